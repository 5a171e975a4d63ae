"""
A new mechanism is one class, and so is a new halting rule: those on the page docs/modify.md, taken
from there, keep the promises without a change anywhere else. And the loop that the page changes
computes the same.
"""

import importlib.util
import inspect
import os
import re
import textwrap

import pytest
import test_promises
import torch
from conftest import ROOT, close, make, save
from test_plan import planned_as_if_run

import model as library
import train
from engine.checkpoint import change_steps
from engine.files import UserError
from engine.flops import counted_flops, flops_per_token
from engine.generate import stream
from engine.shards import get_tokenizer
from engine.trained import load_model
from model import Loop, Mechanism, Memories, Memory, Smear, WeightedMemory, rope_table
from tools.explain import look, show

SETTINGS = dict(ponder='inject', ponder_steps=3)
NEIGHBOUR = dict(ponder='neighbour', ponder_steps=2)
SETTLED = dict(ponder='loop', ponder_steps=3, loop_norm=True, halting='settled', halt_tau=0.4)
PROMISES = [test for name, test in vars(test_promises).items() if name.startswith('test_')
            and {'toggle'} <= inspect.signature(test).parameters.keys() <= {'toggle', 'idx'}
            and 'naive' not in name]    # its slow loop is below
assert len(PROMISES) == 6


def code_of_the_page(part):
    """The one block of code that has `part` in it."""
    with open(os.path.join(ROOT, 'docs', 'modify.md'), encoding='utf-8') as f:
        page = f.read()
    [code] = [block for block in re.findall(r'```python\n(.*?)```', page, re.S) if part in block]
    return code


@pytest.fixture(autouse=True)
def classes_of_the_page(tmp_path, monkeypatch):
    """The code of the page, among the names of model.py, with its entries in the tables."""
    path = tmp_path / 'page.py'
    path.write_text('\n\n'.join(['from model import *', code_of_the_page('class Inject('),
                                 code_of_the_page('class Settled('), 'class Neighbour(Inject):',
                                 code_of_the_page('what pass k - 1 made of token t - 1')]))
    spec = importlib.util.spec_from_file_location('page', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(library.PONDER, 'inject', module.Inject)
    monkeypatch.setitem(library.PONDER, 'neighbour', module.Neighbour)
    monkeypatch.setitem(library.HALTING, 'settled', module.Settled)


def naive(model, idx):
    """Block after block, each with plain attention over what goes through it now."""
    B, T = idx.shape
    rope = rope_table(torch.arange(T), model.config.head_dim, model.config.rope_theta,
                      torch.float64)
    x = model.embed(idx)
    h = torch.zeros_like(x)
    for _ in range(model.config.ponder_steps + 1):
        h = x + h
        for block in model.h:
            memory = Memory()
            memory.begin(idx)
            h = block(h, rope, memory)
        h = model.ln_f(h)
    return model.head(h)


@pytest.mark.parametrize('steps', [0, 3])
def test_forward_is_the_naive_loop(steps, idx):
    model = make(**{**SETTINGS, 'ponder_steps': steps})
    close(model(idx)[0], naive(model, idx), 1e-12)


@pytest.mark.parametrize('toggle', [SETTINGS, NEIGHBOUR, SETTLED],
                         ids=['inject', 'neighbour', 'settled'])
@pytest.mark.parametrize('promise', PROMISES, ids=lambda promise: promise.__name__)
def test_it_keeps_the_promise(promise, toggle, idx):
    given = dict(toggle=toggle, idx=idx)
    promise(**{name: given[name] for name in inspect.signature(promise).parameters})


def test_flops_of_all_layers_follow_from_those_of_three():
    model = make(**SETTINGS)
    assert model.config.n_layer > 3
    assert flops_per_token(model) == pytest.approx(counted_flops(model))


@pytest.mark.parametrize('first', [None, 3])
def test_flops_where_some_layers_run_more_often(first, monkeypatch):
    class Upper(Mechanism):
        """The upper half of the layers runs once more (or those from number `first` on)."""

        def forward(self, gpt, x, memory):
            for blocks in gpt.h, gpt.h[first or len(gpt.h) // 2:]:
                memory = Memory()
                memory.begin(x)
                rope = rope_table(memory.pos, gpt.config.head_dim, 10_000.0, x.dtype)
                for block in blocks:
                    x = block(x, rope, memory)
            return gpt.ln_f(x)

    monkeypatch.setitem(library.PONDER, 'upper', Upper)
    model = make(ponder='upper', n_layer=6)
    assert flops_per_token(model) == pytest.approx(counted_flops(model))
    plain = make(n_layer=6)
    of_layers = (counted_flops(plain) - counted_flops(plain, n_layer=3)) / 3
    assert flops_per_token(model) - flops_per_token(plain) == pytest.approx(3 * of_layers)


def test_settled_tokens_leave_after_the_pass_that_hardly_changed_them():
    """Of texts of one token, where a token that left is in nobody's way."""
    tokens = torch.arange(40)[:, None]
    every = make(**{**SETTLED, 'halt_tau': 0.0})
    h = torch.stack([every.ln_f(x) for x in outputs_of_passes(every, tokens)])     # (K+1,B,1,C)
    change = (h[1:] - h[:-1]).norm(dim=-1) / h[1:].norm(dim=-1)                 # (K,B,1)
    left = torch.cat([change[:-1] < SETTLED['halt_tau'], torch.ones_like(change[:1]).bool()])
    last = 1 + left.byte().argmax(0)                                    # (B,1): its last pass
    model = make(**SETTLED)
    out = model(tokens)[0]
    assert torch.equal(model.mechanism.passes, last + 1)
    assert len(last.unique()) > 1
    close(out, model.head(h.gather(0, last[None, ..., None].expand(-1, -1, -1, h.size(-1)))[0]))


def test_a_trained_loop_is_given_the_rule(tmp_path, idx):
    trained = make(**{**SETTLED, 'halting': 'none'}, vocab_size=320, n_tokens=257)
    folder = save(tmp_path / 'loop', trained)
    model, *_ = load_model(folder, 'cpu', halting='settled')
    model.config.halt_tau = 0.0
    close(model(idx)[0], trained.float()(idx)[0], 1e-5)
    model.config.halt_tau = SETTLED['halt_tau']
    model(idx)
    assert (model.mechanism.passes < 4).any()


def outputs_of_passes(model, tokens):
    """What the blocks made of tokens (B,T) in each pass, before the final norm: (B,T,C) each."""
    outputs = []
    hook = model.h[-1].register_forward_hook(lambda module, args, out: outputs.append(out))
    model(tokens)
    hook.remove()
    return outputs


def test_passes_are_reported():
    _, passes = next(stream(make(**SETTINGS), [[3, 1, 4]], 1))
    assert passes.tolist() == [4]


def test_a_dry_run_plans_its_memory():
    planned_as_if_run(checkpointed=True, n_layer=3, **SETTINGS)


def test_every_pass_is_explained():
    model = make(**SETTINGS, depth_attn=True, depth_stride=2)
    seen = look(model, torch.tensor([3, 1, 4, 1, 5]))
    assert seen.steps.tolist() == [4] * 5
    assert seen.after.shape == (4, 5, 64)
    close(seen.after[-1], seen.logits)


def test_what_a_rule_compares_is_explained(capsys):
    model = make(**SETTLED)
    seen = look(model, torch.tensor([3, 1, 4, 1, 5]))
    asked = torch.stack(seen.compared)                                          # (K,T)
    went_on = (asked >= SETTLED['halt_tau']).cumprod(0).sum(0)
    assert torch.equal(1 + went_on, seen.steps)
    show(seen, model.mechanism, torch.tensor([3]), get_tokenizer('byte'), top=1)
    assert f'score {seen.compared[0][0]:.4f}' in capsys.readouterr().out


def test_it_trains_resumes_and_samples(small_data, tmp_path):
    shape = ['--n_layer=3', '--n_head=2', '--n_embd=32', '--mlp_hidden=48', '--block_size=32']
    run = ['--batch_tokens=64', '--micro_batch=2', '--eval_tokens=64', '--sample_tokens=2',
           f'--data_dir={small_data}', '--dtype=float32', '--device=cpu']
    out = [f'--out_dir={tmp_path / "out"}']
    train.main([*shape, *run, *out, '--ponder=inject', '--max_steps=2'])
    train.main(['--init_from=resume', *out, '--max_steps=3'])
    model, tokenizer, _ = load_model(str(tmp_path / 'out'), 'cpu')
    assert model.config.ponder == 'inject'
    change_steps(model, 1)
    [(_, passes)] = stream(model, [tokenizer.encode_ordinary('def ')], 1)
    assert passes.tolist() == [2]


class Middle(Mechanism):
    """The first and the last block once, those between them K + 1 times."""

    def new_memory(self, pad):
        return Memories(WeightedMemory, self.K + 1, pad)

    def forward(self, gpt, x, memory):
        c, last = self.config, self.config.n_layer - 1
        rope = rope_table(memory[0].pos, c.head_dim, c.rope_theta, x.dtype)
        for k in range(self.K + 1):
            for layer in range(0 if k == 0 else 1, last + 1 if k == self.K else last):
                x = gpt.h[layer](x, rope, memory[k])
        return gpt.ln_f(x)


def test_a_mechanism_may_run_some_blocks_only(idx, monkeypatch):
    """Cached, in pieces, it is what it is over the whole text; and each block ran as often."""
    monkeypatch.setitem(library.PONDER, 'middle', Middle)
    model = make(ponder='middle', ponder_steps=2)
    runs = dict.fromkeys(range(5), 0)
    for layer, block in enumerate(model.h):
        block.register_forward_hook(lambda *_, layer=layer: runs.update({layer: runs[layer] + 1}))
    whole = model(idx)[0]
    assert list(runs.values()) == [1, 3, 3, 3, 1]
    memory = model.new_memory()
    with torch.no_grad():
        parts = [model.hidden(idx[:, a:b], memory) for a, b in ((0, 4), (4, 5), (5, 13))]
        close(model.head(torch.cat(parts, 1)), whole, 1e-12)


class AsksForNumbers(Middle):
    def forward(self, gpt, x, memory):
        x = super().forward(gpt, x, memory)
        return -x if x.mean() > 0 else x


def test_who_asks_for_numbers_is_told_that_shapes_have_none(monkeypatch):
    monkeypatch.setitem(library.PONDER, 'asks', AsksForNumbers)
    with pytest.raises(UserError, match='something in model.py asks for numbers') as error:
        flops_per_token(make(ponder='asks'))
    assert '\n' not in str(error.value)


def test_the_page_shows_smear_as_it_is():
    without_docstring = re.sub(r'    """.*?"""\n', '', inspect.getsource(Smear), flags=re.S)
    assert code_of_the_page('memory.carried = x[:, -1:]') == without_docstring


def test_the_changed_loop_of_the_page_is_the_loop_and_three_lines(idx, monkeypatch):
    code = code_of_the_page('embeddings = x').splitlines(keepends=True)
    old = [line for line in code if not line.endswith('# new\n')]
    assert ''.join(old) == inspect.getsource(Loop.forward) and len(code) == len(old) + 3
    names = {}
    exec(textwrap.dedent(''.join(code)), names)
    inject = make(**SETTINGS)(idx)[0]
    monkeypatch.setattr(Loop, 'forward', names['forward'])
    assert torch.equal(make(ponder='loop', ponder_steps=3, loop_norm=True)(idx)[0], inject)
