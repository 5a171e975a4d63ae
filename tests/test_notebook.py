"""exercises/start.ipynb: its exercise is answered as it says; with --slow it runs as a whole."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

FOLDER = os.path.join(ROOT, 'exercises')
PATH = os.path.join(FOLDER, 'start.ipynb')
TINY = ('config/tasks.py --max_steps=2 --n_embd=32 --n_head=2 --mlp_hidden=48 '
        '--batch_tokens=128 --micro_batch=1 --eval_tokens=1024 --dtype=float32 --device=cpu')


def test_its_exercise_is_refused_and_then_right(capsys, monkeypatch, tmp_path):
    """Other packages of these names are installed."""
    for name in ('check', 'pondering'):
        (tmp_path / f'{name}.py').touch()
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, 'path', [str(tmp_path), *sys.path])
    monkeypatch.chdir(ROOT)
    with open(PATH, encoding='utf-8') as f:
        cells = [cell for cell in json.load(f)['cells'] if cell['cell_type'] == 'code']
    assert not any(cell['outputs'] for cell in cells)
    found = {'sys': sys}
    for cell in cells[-2:]:
        exec(''.join(cell['source']), found)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith('not yet: ponder() with steps=1 replaces the input')
    assert second.startswith('right. ')


@pytest.mark.skipif(os.name == 'nt', reason='a shell')
def test_its_commands_find_a_python_with_a_space_in_its_path(monkeypatch, tmp_path):
    interpreter = tmp_path / "my env's $HOME" / 'python'
    interpreter.parent.mkdir()
    interpreter.write_text('#!/bin/sh\necho "$@"')
    interpreter.chmod(0o755)
    with open(PATH, encoding='utf-8') as f:
        cells = [cell['source'] for cell in json.load(f)['cells'] if cell['cell_type'] == 'code']
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
    nbclient = pytest.importorskip('nbclient', reason='pip install nbclient ipykernel')
    pytest.importorskip('ipykernel', reason='pip install nbclient ipykernel')
    import nbformat
    project = tmp_path / 'project'
    shutil.copytree(ROOT, project, ignore=shutil.ignore_patterns('.*', 'out', 'data', 'tests'))
    notebook = nbformat.read(PATH, 4)
    for cell in notebook.cells:
        if 'settings' in cell.metadata.get('tags', ()):
            line = cell.source.splitlines()[0]
            cell.source = cell.source.replace(line, f'settings = {TINY!r}')
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name='python3',
                                     resources={'metadata': {'path': str(project / 'exercises')}})
    client.execute()
    shown = [str(cell.outputs) for cell in notebook.cells if cell.cell_type == 'code']
    assert 'problems, and what the model answers' in shown[2]
    assert 'problems, and what the model answers' in shown[3]
    assert 'class="nanoponder"' in shown[5]
    assert 'right. ' in shown[7]
