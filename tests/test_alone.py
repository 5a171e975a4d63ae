"""
model.py alone: a copy of it in an empty folder trains and generates, with every mechanism and
nothing but PyTorch.
"""

import ast
import json
import os
import shutil
import sys

from conftest import ONE_EACH, ROOT, TOGGLES, program

MODEL = os.path.join(ROOT, 'model.py')


def test_it_imports_pytorch_and_the_standard_library_alone():
    with open(MODEL, encoding='utf-8') as f:
        tree = ast.parse(f.read())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition('.')[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "an import of its own folder"
            imported.add(node.module.partition('.')[0])
    assert imported - sys.stdlib_module_names == {'torch'}


def test_the_lines_on_top_of_it_run(tmp_path):
    shutil.copy(MODEL, tmp_path)
    with open(MODEL, encoding='utf-8') as f:
        doc = ast.get_docstring(ast.parse(f.read()))
    lines = doc.split('To train with this file alone:')[1].splitlines()
    code = [line[4:] for line in lines if line.startswith('    ')]
    assert len(code) == 8

    small = 'GPTConfig(vocab_size=50, block_size=16, n_layer=2, n_head=2, n_embd=16)'
    code = [line.replace('GPTConfig()', small).replace('100)', '3)') for line in code]
    script = ['import torch', 'from model import GPT, GPTConfig',
              'prompt = torch.zeros(1, 1, dtype=torch.long)',
              'batches = [torch.ones(2, 1, 8, dtype=torch.long)]', *code, 'print(tokens.shape)']
    (tmp_path / 'lines.py').write_text('\n'.join(script))
    done = program('-E', 'lines.py', cwd=tmp_path)
    assert done.stdout == 'torch.Size([1, 4])\n'


def test_a_copy_in_an_empty_folder_trains_and_generates(tmp_path):
    """
    A few steps lower the loss; then, in float64, tokens from a cache are those of the whole text
    read anew for each of them, and so are prompts of unequal lengths in one batch.
    """
    shutil.copy(MODEL, tmp_path)
    shutil.copy(os.path.join(ROOT, 'tests', 'alone.py'), tmp_path)
    toggles = {name: TOGGLES[name] for name in ONE_EACH}
    done = program('-E', 'alone.py', json.dumps(toggles), cwd=tmp_path)  # -E: without PYTHONPATH
    found = json.loads(done.stdout)

    assert found.keys() == toggles.keys()
    for name, of in found.items():
        assert of['after'] < of['before'] - 1, name
        assert of['equal'] and of['error'] < 1e-9, name
        halts = 'halting' in TOGGLES[name]
        assert (len(of['passes']) > 1) == halts, f"{name}: some tokens stop, some do not"
