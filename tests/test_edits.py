"""
What one reads in model.py is what runs: whoever edits one of its functions changes what train.py,
sample.py or tools/evaluate.py give; with `fast`, too, or is told in one line that it would not.
"""

import ast
import contextlib
import inspect
import json
import os
import shutil
import sys
import types

import pytest
import torch
from conftest import ONE_EACH, ROOT, TOGGLES, program, refused

import model as model_py
import prepare_data
import sample
import train
from engine import fast
from engine.fast import new_model
from engine.files import UserError
from engine.generate import check_pieces
from model import GPTConfig
from tools import evaluate

SHAPE = ['--n_layer=3', '--n_head=2', '--n_embd=32', '--mlp_hidden=48', '--block_size=48',
         '--init_std=0.2', '--micro_batch=2', '--batch_tokens=96', '--max_steps=3',
         '--eval_tokens=96', '--dtype=float32', '--device=cpu']
# so that halting's terms of the loss count in step 2 in part, in step 3 in full
HALTING = dict(halt_start=0.1, halt_full=0.6)
TINY = dict(n_layer=1, n_head=1, n_embd=8, mlp_hidden=8, vocab_size=64)
GAIN = dict(TOGGLES['ouro'], ouro_stage=2)
RUNS = {**{name: TOGGLES[name] for name in ONE_EACH}, 'gain': GAIN,
        'topk': TOGGLES['embedding_topk'], 'answers': {},
        'twice': dict(ponder='twice', ponder_steps=1)}

# without a body; a copy of a model, in a notebook; tools/explain.py
NOT_CALLED = {'Mechanism.cost', 'Mechanism.forward', 'Halting.after', 'Halting.penalty',
              'Halting.__getstate__', 'Mask.decisions'}


class Twice(model_py.Loop):
    """A mechanism that is not model.py's, whose FLOPs PyTorch counts."""


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


def run_programs(name, is_fast, data, folder):
    """{program: the functions of model.py that it calls}, for a small run of RUNS[name]."""
    settings = RUNS[name]
    settings = {**settings, **(HALTING if 'halting' in settings else {}), 'fast': is_fast}
    out, text = str(folder / f'{name}-{is_fast}'), folder / 'text'
    text.write_text('def f(x):\n    return x\n' * 4)
    called = {'train': set(), 'sample': set(), 'evaluate': set()}
    with calls(called['train']):
        train.main([*SHAPE, *args_of(settings), f'--data_dir={data}', f'--out_dir={out}',
                    '--sample_tokens=5'])
    asked = ['--device=cpu', f'--fast={is_fast}']
    with calls(called['sample']):
        sample.main([out, '--max_new_tokens=45', '--top_k=9', '--start=def f(x):', *asked])
    with calls(called['evaluate']):
        evaluate.main([out, str(text), *asked])
    return called


def test_every_function_is_called_and_what_fast_does_not_call_is_on_record(
        small_data, tmp_path, monkeypatch):
    """Program by program: or one would run what was edited, and another not."""
    monkeypatch.setitem(model_py.PONDER, 'twice', Twice)
    monkeypatch.chdir(tmp_path)
    prepare_data.prepare(prepare_data.DataSettings(problems=400, size=3, name='trees'), ['minimax'])
    on_record = {part for parts in fast.PARTS.values() for part in parts}
    called = set()
    for name in RUNS:
        # a task's questions do not count as targets, which `exit` treats in its own way; they have
        # several lengths
        of_task = name.startswith('exit') or name == 'answers'
        data = str(tmp_path / 'data' / 'trees') if of_task else small_data
        plain, quick = [run_programs(name, is_fast, data, tmp_path) for is_fast in (False, True)]
        called.update(*plain.values())
        for program_name, names in plain.items():
            for part in names - quick[program_name]:
                said = part in on_record or part.split('.')[0] in on_record
                assert said, f"{part}: {program_name} calls it, but not with fast ({name})"
    assert set(functions().values()) - called == NOT_CALLED


# ---- what is on record ---------------------------------------------------------------------------

SOURCE = fast.source_of_model()
ALL_PARTS = [part for parts in fast.PARTS.values() for part in parts]


def test_the_record_is_true():
    """
    After a change of a part, make its stand-in do the same; then put these sums into PARTS of
    engine/fast.py.
    """
    found = fast.sums_of(SOURCE, tuple(ALL_PARTS))
    recorded = {part: of for parts in fast.PARTS.values() for part, of in parts.items()}
    assert {part: of for part, of in found.items() if recorded[part] != of} == {}


def last_line(part):
    """(the place behind the last line of a part in SOURCE, its indentation)."""
    places = {}
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.ClassDef):
            places[node.name] = node
            places.update({f'{node.name}.{f.name}': f for f in node.body
                           if isinstance(f, ast.FunctionDef)})
        if isinstance(node, ast.FunctionDef):
            places.setdefault(node.name, node)
    node = places[part]
    lines = SOURCE.splitlines(keepends=True)
    return sum(map(len, lines[:node.end_lineno])), ' ' * node.body[-1].col_offset


@pytest.mark.parametrize('part', ALL_PARTS)
def test_a_change_of_a_part_is_seen(part, monkeypatch):
    place, indentation = last_line(part)

    def with_line(text):
        return SOURCE[:place] + f'{indentation}{text}\n' + SOURCE[place:]

    for nothing in ('# a comment', '"""A text that nobody reads."""', ''):
        assert fast.sums_of(with_line(nothing), (part,)) == fast.sums_of(SOURCE, (part,))
    monkeypatch.setattr(fast, 'source_of_model', lambda: with_line('changed = True'))
    with pytest.raises(UserError, match=f'{part} of model.py was changed.*--fast=False'):
        new_model(GPTConfig(**TINY), fast=True)
    new_model(GPTConfig(**TINY))


def test_blanks_count_only_where_they_mean_something():
    same = fast.what_is_computed('def f(a):\n    return f(a, 1)\n')
    assert fast.what_is_computed('def f(a):\n\n  return f( a,\n      1 )   # why\n') == same
    inside = 'for x in y:\n    a()\n    b()\n'
    assert fast.what_is_computed(inside) != fast.what_is_computed('for x in y:\n    a()\nb()\n')
    words = 'x = f"{a} b"\n', 'x = f"{a} c"\n'
    assert fast.what_is_computed(words[0]) != fast.what_is_computed(words[1])


class OwnMixture(model_py.Gate):
    @staticmethod
    def mixture(gpt, h):
        return 2 * model_py.Embedding.mixture(gpt, h)


class OwnMemory(model_py.Chain):
    def new_memory(self, pad):
        return model_py.SlotMemory(model_py.flat, pad)


def test_another_head_is_refused_with_fast():
    gpt = new_model(GPTConfig(**TINY), fast=True)
    gpt.lm_head = torch.nn.Linear(8, 64)    # with a bias
    with pytest.raises(UserError, match='GPT.lm_head of model.py .*engine/loss.py.*--fast=False'):
        fast.check_own_parts(gpt)


class Shift(model_py.Block):
    """Reads the token before, and not by the memory."""

    def forward(self, x, rope, memory, mask):
        before = torch.nn.functional.pad(x[:, :-1], (0, 0, 1, 0))
        return super().forward(x + before, rope, memory, mask)


class Window(model_py.Memory):
    """Three tokens. Where it is put in Memory's place, Padded still derives from the old one."""

    def mask(self, S, device):
        pos = torch.arange(self.tokens, device=device)
        return (pos <= pos[-S:, None]) & (pos > pos[-S:, None] - 3)


@pytest.mark.parametrize('part, kind, says', [
    ('Block', Shift, 'read in pieces, as in generation,'),
    ('Memory', Window, 'read beside padding, as in a batch,')])
def test_what_passes_by_the_memory_is_warned_of(part, kind, says, monkeypatch, capsys):
    shape = {**TINY, 'block_size': 16, 'n_layer': 2, 'init_std': 0.5}
    torch.manual_seed(0)
    check_pieces(model_py.GPT(GPTConfig(**shape)).eval())
    assert capsys.readouterr().err == ''
    monkeypatch.setattr(model_py, part, kind)
    check_pieces(model_py.GPT(GPTConfig(**shape)).eval())
    assert says in capsys.readouterr().err


def test_a_run_on_text_warns_too_and_whoever_reads_it(small_data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(model_py, 'Block', Shift)
    out = str(tmp_path / 'out')
    train.main([*SHAPE, f'--data_dir={small_data}', f'--out_dir={out}', '--sample_tokens=0',
                '--eval_interval=1'])
    assert capsys.readouterr().err.count('read in pieces, as in generation,') == 1
    sample.load_model(out, 'cpu')
    assert 'read in pieces, as in generation,' in capsys.readouterr().err


def test_a_window_in_memory_holds_beside_padding(monkeypatch, capsys):
    monkeypatch.setattr(model_py.Memory, 'mask', Window.mask)
    torch.manual_seed(0)
    shape = {**TINY, 'block_size': 16, 'n_layer': 2, 'init_std': 0.5}
    check_pieces(model_py.GPT(GPTConfig(**shape)).eval())
    assert capsys.readouterr().err == ''


@pytest.mark.parametrize('kind, part', [(OwnMixture, 'mixture'), (OwnMemory, 'new_memory')])
def test_a_class_with_its_own_version_of_a_part_is_refused(kind, part, monkeypatch):
    monkeypatch.setitem(model_py.PONDER, 'own', kind)
    config = GPTConfig(**TINY, ponder='own')
    with pytest.raises(UserError, match=f'{kind.__name__}.{part} .*--fast=False'):
        new_model(config, fast=True)
    new_model(config)


# ---- from a shell --------------------------------------------------------------------------------

# what somebody tries first: (what to run, of which model, what to change in model.py and into what)
EDITS = {
    'a window of 8': ('train', {}, """\
        if before == 0:
            return None
        key_pos = torch.arange(self.tokens, device=device)              # (N,)
        query_pos = key_pos[before:, None]                              # (S,1)
        return key_pos <= query_pos                                     # (S,N)
""", """\
        key_pos = torch.arange(self.tokens, device=device)              # (N,)
        query_pos = key_pos[before:, None]                              # (S,1)
        return (key_pos <= query_pos) & (key_pos > query_pos - 8)
"""),
    'a soft cap': ('both', {}, """\
        logits = self.lm_head(h)
""", """\
        logits = 2 * torch.tanh(self.lm_head(h) / 2)
"""),
    'thoughts that do not read each other': ('train', dict(ponder='chain'), """\
    return (key.t <= query.t) & (key.k <= query.k)
""", """\
    return (key.t <= query.t) & ((key.k == 0) | ((key.t == query.t) & (key.k <= query.k)))
"""),
    'a loss without the first letter of a line': ('train', {}, """\
        return self.token_losses(h, targets).sum() / (targets >= 0).sum().clamp(min=1)
""", """\
        targets = targets.masked_fill(F.pad(targets, (1, -1)) == 10, -1)
        return self.token_losses(h, targets).sum() / (targets >= 0).sum().clamp(min=1)
"""),
    'a cache without every second key': ('sample', {}, """\
        return key_pos <= query_pos                                     # (S,N)
""", """\
        seen = key_pos <= query_pos
        seen[:, 1:before:2] = False
        return seen
"""),
}


@pytest.fixture(scope='module')
def shell(small_data, tmp_path_factory):
    """run(program, settings, old, new): what a program of a changed copy of the project gives."""
    folder = tmp_path_factory.mktemp('copy')
    for name in ('engine', 'config', 'model.py', 'train.py', 'sample.py', 'prepare_data.py',
                 'configurator.py'):
        copy = shutil.copytree if '.' not in name else shutil.copy
        copy(os.path.join(ROOT, name), folder / name)
    out = folder / 'out'

    def run(name, settings, old='', new=''):
        assert old == '' or SOURCE.count(old) == 1
        (folder / 'model.py').write_text(SOURCE.replace(old, new) if old else SOURCE)
        environment = dict(cwd=folder, PYTHONPATH=str(folder))
        if name == 'sample':
            return program('sample.py', out, '--start=def f(x):', '--max_new_tokens=30',
                           '--device=cpu', **environment).stdout
        shutil.rmtree(out, ignore_errors=True)
        args = [*SHAPE, *args_of(settings), f'--data_dir={small_data}', '--sample_tokens=0']
        done = program('train.py', *args, ok='fast' not in settings, **environment)
        if 'fast' in settings:
            return done
        lines = map(json.loads, (out / 'log.jsonl').read_text().splitlines())
        return [line.get('loss', line.get('val_loss')) for line in lines]
    return run


slow = pytest.mark.slow


@pytest.mark.parametrize('name', [
    'a window of 8', 'a soft cap', 'thoughts that do not read each other',
    pytest.param('a loss without the first letter of a line', marks=slow),
    pytest.param('a cache without every second key', marks=slow)])
def test_an_edit_shows_in_the_next_run(name, shell):
    programs, settings, old, new = EDITS[name]
    losses = shell('train', settings)
    text = shell('sample', settings) if programs != 'train' else None
    if text is not None:
        assert text == shell('sample', settings), "the same without an edit"
        assert text != shell('sample', settings, old, new)
    if programs != 'sample':
        edited = shell('train', settings, old, new)
        assert len(edited) == len(losses) and edited != losses


def test_with_fast_an_edit_is_refused(shell):
    _, _, old, new = EDITS['a soft cap']
    refused(shell('train', dict(fast=True), old, new), 'GPT.head of model.py was changed',
            'engine/loss.py', '--fast=False')
