"""
model.py alone: a copy of it in an empty folder trains and generates, with every mechanism and
nothing but PyTorch.
"""

import ast
import json
import os
import shutil
import sys

import pytest
import torch
from conftest import GATE, ONE_EACH, ROOT, TOGGLES, program, slow_but
from test_promises import few_sweeps

import model as library

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


def lines_on_top():
    """The code in model.py's docstring."""
    lines = library.__doc__.split('To train with this file alone')[1].splitlines()
    code = [line[4:] for line in lines if line.startswith('    ')]
    assert len(code) == 9
    return '\n'.join(code)


def run_lines_on_top(settings, steps):
    """
    Run them with a small model on one batch, again and again: the model, its losses, its passes,
    and how its weights began.
    """
    losses, passes, began = [], [], []

    class Watched(library.GPT):
        def __init__(self, config):
            super().__init__(config)
            began.extend(p.detach().clone() for p in self.parameters())

        def forward(self, idx, targets=None):
            out = super().forward(idx, targets)
            losses.append(out[1].item())
            passes.append(self.mechanism.passes)
            return out

    def config(**shown):
        assert shown == dict(n_layer=4, n_head=4, n_embd=128)
        return library.GPTConfig(vocab_size=64, n_tokens=50, block_size=24, n_layer=2, n_head=4,
                                 n_embd=32, **settings)

    torch.manual_seed(0)
    tokens = torch.randint(0, 50, (4, 17))
    names = dict(torch=torch, GPT=Watched, GPTConfig=config, prompt=tokens[:2, :5],
                 batches=[(tokens[:, :-1], tokens[:, 1:])] * steps)
    exec(lines_on_top().replace('100)', '9)'), names)
    assert names['tokens'].shape == (2, 14)
    assert torch.equal(names['tokens'][:, :5], names['prompt'])
    return names['gpt'], losses, passes, began


@pytest.mark.parametrize('name', slow_but(('plain', 'latent2_depth', 'gate', 'ouro'), TOGGLES))
def test_the_lines_on_top_of_it_train(name):
    """Every mechanism: the loss goes down, and no weight stays what it was."""
    gpt, losses, _, began = run_lines_on_top(few_sweeps(TOGGLES[name]), steps=20)
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.3
    for (name, p), before in zip(gpt.named_parameters(), began, strict=True):
        assert not torch.equal(p, before), name


def test_no_token_halts_before_halt_start_in_the_lines_on_top():
    """And then all do: no gate is 1."""
    _, _, passes, _ = run_lines_on_top({**GATE, 'halt_tau': 1.0, 'halt_start': 0.4}, steps=10)
    assert [of_step.unique().tolist() for of_step in passes] == [[3]] * 4 + [[1]] * 6


def test_a_copy_in_an_empty_folder_trains_and_generates(tmp_path):
    """
    The lines on top of it run as they stand. A few steps lower the loss; then, in float64, tokens
    from a cache are those of the whole text read anew for each of them, and so are prompts of
    unequal lengths in one batch.
    """
    shutil.copy(MODEL, tmp_path)
    shutil.copy(os.path.join(ROOT, 'tests', 'alone.py'), tmp_path)
    script = ['import runpy, torch', 'from model import GPT, GPTConfig',
              'prompt = torch.zeros(1, 1, dtype=torch.long)',
              'batches = [torch.ones(2, 1, 8, dtype=torch.long)]', lines_on_top(),
              'print(tokens.shape)', 'runpy.run_path("alone.py", run_name="__main__")']
    (tmp_path / 'lines.py').write_text('\n'.join(script))
    toggles = {name: TOGGLES[name] for name in ONE_EACH}
    done = program('-E', 'lines.py', json.dumps(toggles), cwd=tmp_path)  # -E: without PYTHONPATH
    shape, found = done.stdout.splitlines()
    assert shape == 'torch.Size([1, 101])'
    found = json.loads(found)

    assert found.keys() == toggles.keys()
    for name, of in found.items():
        assert of['after'] < of['before'] - 1, name
        assert of['equal'] and of['error'] < 1e-9, name
        halts = 'halting' in TOGGLES[name]
        assert (len(of['passes']) > 1) == halts, f"{name}: some tokens stop, some do not"
