"""
What one reads in model.py is what runs: whoever edits one of its functions changes what train.py,
sample.py or tools/evaluate.py give. And programs warn of a model that does not generate as it was
trained.
"""

import contextlib
import inspect
import json
import os
import shutil
import sys
import types

import pytest
import torch
from conftest import ONE_EACH, ROOT, TOGGLES, program, slow_but

import model as model_py
import prepare_data
import sample
import train
from engine.generate import check_pieces
from engine.sums import source_of_model, sums_of, what_is_computed
from engine.trained import load_model
from model import GPTConfig
from tools import evaluate

SHAPE = ['--n_layer=2', '--n_head=2', '--n_embd=32', '--mlp_hidden=48', '--block_size=48',
         '--init_std=0.2', '--micro_batch=2', '--batch_tokens=96', '--max_steps=3',
         '--eval_tokens=96', '--dtype=float32', '--device=cpu', '--compile=False']
# so that halting's terms of the loss count in step 2 in part, in step 3 in full
HALTING = dict(halt_start=0.1, halt_full=0.6)
TINY = dict(n_layer=2, n_head=1, n_embd=8, mlp_hidden=8, vocab_size=64, block_size=16,
            init_std=0.5)
GAIN = dict(TOGGLES['ouro'], ouro_stage=2)
RUNS = {**{name: TOGGLES[name] for name in ONE_EACH}, 'gain': GAIN,
        'topk': TOGGLES['embedding_topk']}

# without a body; what programs do without; while model.py is imported
NOT_CALLED = {'Mechanism.forward', 'Halting.penalty', 'LoopExit.who_takes_next', 'GPT.generate',
              'some_rows_at_once'}


def functions():
    """{the code of each function of model.py: its name, with its class}."""
    found = {}
    for name, value in vars(model_py).items():
        members = vars(value) if inspect.isclass(value) else {}
        for member, what in [(None, value), *members.items()]:
            what = getattr(what, '__func__', getattr(what, 'fget', what))     # static, property
            what = inspect.unwrap(what) if callable(what) else what
            if isinstance(what, types.FunctionType) and what.__code__.co_filename == \
                    model_py.__file__ and what.__name__ == what.__qualname__.split('.')[-1]:
                found.setdefault(what.__code__, what.__qualname__)
    return found


@contextlib.contextmanager
def calls(names):
    """Adds to `names` what is called of model.py in here."""
    code_names = functions()

    def watch(frame, event, _):
        if event == 'call' and frame.f_code in code_names:
            names.add(code_names[frame.f_code])
    sys.settrace(watch)     # and not setprofile, which C functions call too
    try:
        yield
    finally:
        sys.settrace(None)


def args_of(settings):
    return [f'--{name}={value}' for name, value in settings.items()]


def run_programs(name, data, folder):
    """Train a small model of RUNS[name], and sample from it."""
    settings = {**RUNS[name], **(HALTING if 'halting' in RUNS[name] else {})}
    out = str(folder / name)
    train.main([*SHAPE, *args_of(settings), f'--data_dir={data}', f'--out_dir={out}',
                '--sample_tokens=0'])
    start = [] if 'trees' in data else ['--start=def f(x):']    # of a task: a question of its own
    sample.main([out, '--max_new_tokens=12', '--top_k=9', *start, '--device=cpu'])
    return out


@pytest.mark.slow
def test_every_function_is_called(small_data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare_data.prepare(prepare_data.DataSettings(problems=400, size=3, name='trees'), ['minimax'])
    text = tmp_path / 'text'
    text.write_text('def f(x):\n    return x\n' * 4)
    called = set()
    with calls(called):
        for name in RUNS:
            # a task's questions do not count as targets, which `exit` treats in its own way
            data = str(tmp_path / 'data' / 'trees') if name == 'exit' else small_data
            out = run_programs(name, data, tmp_path)
            if name == 'plain':
                evaluate.main([out, str(text), '--device=cpu'])
    assert set(functions().values()) - called == NOT_CALLED


# ---- a sum of the source -------------------------------------------------------------------------

def test_blanks_count_only_where_they_mean_something():
    same = what_is_computed('def f(a):\n    return f(a, 1)\n')
    assert what_is_computed('def f(a):\n\n  return f( a,\n      1 )   # why\n') == same
    inside = 'for x in y:\n    a()\n    b()\n'
    assert what_is_computed(inside) != what_is_computed('for x in y:\n    a()\nb()\n')
    words = 'x = f"{a} b"\n', 'x = f"{a} c"\n'
    assert what_is_computed(words[0]) != what_is_computed(words[1])


def test_the_sum_of_a_part_is_that_of_its_code():
    source = 'class A:\n    def f(self):\n        return 1\n\n\ndef g():\n    return A()\n'
    parts = 'A', 'A.f', 'g'
    sums = sums_of(source, parts)
    commented = source.replace('        return 1', '        """One."""\n        return 1  # one')
    assert sums_of(commented, parts) == sums
    changed = sums_of(source.replace('return 1', 'return 2'), parts)
    assert [changed[part] == sums[part] for part in parts] == [False, False, True]


# ---- what passes by the memory -------------------------------------------------------------------

class Shift(model_py.Block):
    """Reads the token before, and not by the memory."""

    def forward(self, x, rope, memory):
        before = torch.nn.functional.pad(x[:, :-1], (0, 0, 1, 0))
        return super().forward(x + before, rope, memory)


class Places(model_py.Block):
    """Knows a token's place in the text; padding moves it."""

    def forward(self, x, rope, memory):
        return super().forward(x * (1 + memory.pos[:, None]), rope, memory)


class Far(model_py.Block):
    """As Shift, of the token 32 places before."""

    def forward(self, x, rope, memory):
        before = torch.nn.functional.pad(x, (0, 0, 32, 0))[:, :x.size(1)]
        return super().forward(x + before, rope, memory)


def warning_of(capsys):
    torch.manual_seed(0)
    check_pieces(model_py.GPT(GPTConfig(**{**TINY, 'block_size': 64})).eval())
    return capsys.readouterr().err


@pytest.mark.parametrize('kind, says', [
    (Shift, 'read in pieces, as in generation,'),
    (Far, 'read in pieces, as in generation,'),
    (Places, 'read beside padding, as in a batch,')])
def test_what_passes_by_the_memory_is_warned_of(kind, says, monkeypatch, capsys):
    assert warning_of(capsys) == ''
    monkeypatch.setattr(model_py, 'Block', kind)
    assert says in warning_of(capsys)


def test_a_run_on_text_warns_too_and_whoever_reads_it(small_data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(model_py, 'Block', Shift)
    out = str(tmp_path / 'out')
    train.main([*SHAPE, f'--data_dir={small_data}', f'--out_dir={out}', '--sample_tokens=0',
                '--eval_interval=1'])
    assert capsys.readouterr().err.count('read in pieces, as in generation,') == 1
    load_model(out, 'cpu')
    assert 'read in pieces, as in generation,' in capsys.readouterr().err


# ---- from a shell --------------------------------------------------------------------------------

# what somebody tries first: (the model, what to change in model.py and into what)
EDITS = {
    'a soft cap': ({}, """\
        logits = self.lm_head(h)
""", """\
        logits = 2 * torch.tanh(self.lm_head(h) / 2)
"""),
    'a chain that reads its own pass alone': (dict(ponder='chain'), """\
        memories = [*self.earlier, self]
""", """\
        memories = [self] * self.keys_per_slot
"""),
    'a loss without the first letter of a line': ({}, """\
        return mean_where(targets >= 0, self.token_losses(h, targets))
""", """\
        targets = targets.masked_fill(F.pad(targets, (1, -1)) == 10, -1)
        return mean_where(targets >= 0, self.token_losses(h, targets))
"""),
}


@pytest.fixture(scope='module')
def edited(tmp_path_factory):
    """run(old, new, program, *args): what a program of an edited copy of the project prints."""
    folder = tmp_path_factory.mktemp('copy')
    for name in ('engine', 'config', 'model.py', 'train.py', 'sample.py', 'prepare_data.py',
                 'configurator.py'):
        copy = shutil.copytree if '.' not in name else shutil.copy
        copy(os.path.join(ROOT, name), folder / name)

    def run(old, new, *args):
        source = source_of_model()
        assert source.count(old) == 1
        (folder / 'model.py').write_text(source.replace(old, new))
        return program(*args, cwd=folder, PYTHONPATH=str(folder)).stdout
    return run


def losses_of(out):
    lines = map(json.loads, (out / 'log.jsonl').read_text().splitlines())
    return torch.tensor([line.get('loss', line.get('val_loss')) for line in lines])


@pytest.mark.parametrize('name', slow_but(['a soft cap'], EDITS))
def test_an_edit_shows_in_the_next_run(name, edited, small_data, tmp_path, capsys):
    """And in the next sample: of the edited copy from a shell, beside what is here."""
    settings, old, new = EDITS[name]
    ours, theirs = tmp_path / 'ours', tmp_path / 'theirs'
    run = [*SHAPE, *args_of(settings), f'--data_dir={small_data}', '--sample_tokens=0']
    train.main([*run, f'--out_dir={ours}'])
    args = [str(ours), '--start=def f(x):', '--max_new_tokens=30', '--device=cpu']
    capsys.readouterr()
    sample.main(args)
    same = capsys.readouterr().out == edited(old, new, 'sample.py', *args)
    assert same == ('loss' in name)     # another loss changes no sample
    edited(old, new, 'train.py', *run, f'--out_dir={theirs}')
    assert (losses_of(ours) - losses_of(theirs)).abs().max() > 1e-3
