"""
exercises/start.ipynb: its check answers as it says, and its stored outputs hold nothing of the
machine that made them; with --slow it runs as a whole.

    python tests/test_notebook.py       runs it in out/notebook and stores its outputs anew: minutes
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

FOLDER = os.path.join(ROOT, 'exercises')
PATH = os.path.join(FOLDER, 'start.ipynb')
TINY = ('config/tasks.py --max_steps=2 --n_embd=32 --n_head=2 --mlp_hidden=48 '
        '--batch_tokens=128 --micro_batch=1 --eval_tokens=1024 --dtype=float32 --device=cpu')


def cells_of_code():
    with open(PATH, encoding='utf-8') as f:
        return [cell for cell in json.load(f)['cells'] if cell['cell_type'] == 'code']


def test_its_loop_is_refused_and_then_right(capsys, monkeypatch, tmp_path):
    """Another package named check is installed."""
    import check
    gpt = check.tiny(ponder='loop', ponder_steps=3, loop_norm=True)
    (tmp_path / 'check.py').touch()
    monkeypatch.delitem(sys.modules, 'check')
    monkeypatch.setattr(sys, 'path', [str(tmp_path), *sys.path])
    monkeypatch.chdir(ROOT)
    found = dict(sys=sys, torch=torch, gpt=gpt, idx=torch.randint(0, 30, (1, 11)),
                 tokenizer=SimpleNamespace(decode=str))
    for cell in cells_of_code()[-2:]:
        exec(''.join(cell['source']), found)
    first, second, *passes = capsys.readouterr().out.splitlines()
    assert first.startswith('not yet: looped() gives what a single pass gives')
    assert second == 'right.'
    assert len(passes) == 4


def test_it_writes_no_function_of_an_exercise():
    asked_for = set()
    for name in check_names():
        with open(os.path.join(FOLDER, f'{name}.py'), encoding='utf-8') as f:
            stubs = f.read().partition('# the check')[0]
        asked_for |= {node.name for node in ast.walk(ast.parse(stubs)) if hasattr(node, 'name')}
    assert 'ponder' in asked_for
    for cell in cells_of_code():
        written = set(re.findall(r'^ *(?:def|class) (\w+)', ''.join(cell['source']), re.M))
        assert not written & asked_for


def check_names():
    import check
    return check.NAMES


def test_its_stored_outputs_are_those_of_a_run_and_of_no_machine():
    cells = cells_of_code()
    shown = [text_of(cell) for cell in cells]
    assert 'problems, and what the model answers' in shown[2]
    assert 'problems, and what the model answers' in shown[3]
    assert '14199' in shown[6]
    assert shown[7].startswith('not yet: ') and shown[8].startswith('right.\n')
    assert not any(re.search(OF_A_MACHINE, text) for text in shown)
    assert os.path.getsize(PATH) < 30_000


# ---- what is stored

# times, paths, and what programs say while they work: also a line between those of each 100 steps
OF_A_MACHINE = '|'.join((
    r'step +\d*(?:[1-9]\d|\d[1-9])/.*\n',
    r' \| +[\d,]+ ms \|.*', r' in [\d.]+ s\b', r'(?<![\w.])/(?:\w+/)+\S*', r'\r',
    r'.*micro-batch \d+ of.*\n', r'[\d,]+ of [\d,]+ answers\s*\n', r'Note: you may need.*\n'))


def text_of(cell):
    """What a cell's stored outputs print."""
    return ''.join(''.join(output.get('text', '')) for output in cell['outputs'])


def keep_what_any_machine_says(cell):
    """Of a cell that ran, in place: what it printed, without what differs from run to run."""
    from nbformat.v4 import new_output
    metadata = {name: cell.metadata[name] for name in cell.metadata if name != 'execution'}
    printed = [output for output in cell['outputs'] if output['output_type'] == 'stream']
    text = ''.join(output['text'] for output in printed).replace('\r\n', '\n')
    text = re.sub(OF_A_MACHINE, '', text)
    kept = [new_output('stream', text=text)] if text.strip() else []
    cell.outputs, cell.execution_count, cell.metadata = kept, None, metadata


def copy_project(project):
    """The project in another folder, where a run of the notebook may write."""
    left_out = shutil.ignore_patterns('.*', 'out', 'data', 'tests')
    shutil.copytree(ROOT, project, ignore=left_out)


def run_notebook(notebook, project, seconds):
    import nbclient
    resources = {'metadata': {'path': os.path.join(project, 'exercises')}}
    nbclient.NotebookClient(notebook, timeout=seconds, kernel_name='python3',
                            resources=resources).execute()


def store_outputs():
    import nbformat
    project = os.path.join(ROOT, 'out', 'notebook')
    shutil.rmtree(project, ignore_errors=True)
    copy_project(project)
    notebook = nbformat.read(PATH, 4)
    kept = dict(notebook.metadata)      # not those of this machine's kernel
    run_notebook(notebook, project, seconds=3600)
    notebook.metadata = kept
    for cell in notebook.cells:
        if cell.cell_type == 'code':
            keep_what_any_machine_says(cell)
    nbformat.write(notebook, PATH)


# ---- its commands

@pytest.mark.skipif(os.name == 'nt', reason='a shell')
def test_its_commands_find_a_python_with_a_space_in_its_path(monkeypatch, tmp_path):
    interpreter = tmp_path / "my env's $HOME" / 'python'
    interpreter.parent.mkdir()
    interpreter.write_text('#!/bin/sh\necho "$@"')
    interpreter.chmod(0o755)
    cells = [cell['source'] for cell in cells_of_code()]
    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr(sys, 'path', list(sys.path))
    monkeypatch.setattr(sys, 'executable', str(interpreter))
    found = {'settings': 'config/tasks.py'}
    exec(''.join(cells[0]), found)
    commands = [line[1:] for cell in cells for line in cell if line.startswith('!')]
    assert len(commands) == 4
    for command in commands:
        done = subprocess.run(['bash', '-c', command.format_map(found)], capture_output=True,
                              text=True)
        assert done.returncode == 0 and '.py ' in done.stdout, done.stderr


@pytest.mark.slow
def test_it_runs(tmp_path):
    pytest.importorskip('nbclient', reason='pip install nbclient ipykernel')
    pytest.importorskip('ipykernel', reason='pip install nbclient ipykernel')
    import nbformat
    copy_project(tmp_path / 'project')
    notebook = nbformat.read(PATH, 4)
    for cell in notebook.cells:
        if 'settings' in cell.metadata.get('tags', ()):
            line = cell.source.splitlines()[0]
            cell.source = cell.source.replace(line, f'settings = {TINY!r}')
    run_notebook(notebook, tmp_path / 'project', seconds=300)
    shown = [str(cell.outputs) for cell in notebook.cells if cell.cell_type == 'code']
    assert 'problems, and what the model answers' in shown[2]
    assert 'problems, and what the model answers' in shown[3]
    assert 'class="nanoponder"' in shown[5]
    assert 'right.' in shown[8]


if __name__ == '__main__':
    store_outputs()
