"""
exercises/labs/freqkv.py: until it is full its cache is the plain one; then it is bounded, exact
however the text is cut, and equal to a slow one written from the equations.
"""
import math

import naive
import pytest
import torch
from conftest import cells, close, make, save

import freqkv
from engine.files import UserError
from engine.generate import generate
from freqkv import FreqKV, FreqKVSettings, LongGPT, Rotated, contestants, filtered

N, S, L = 12, 2, 4  # cache, sinks, entries that stay
SHAPES = {'plain': {}, 'depth_gqa': dict(depth_attn=True, n_kv_head=2)}
FILTER = filtered(N - S, slice(L))


@pytest.fixture(params=SHAPES)
def gpt(request):
    return make(n_layer=2, block_size=N, **SHAPES[request.param])


def long(gpt, A=FILTER, kind=FreqKV):
    return LongGPT(gpt, lambda: kind(gpt.config.rope_theta, N, S, A)).eval()


def text(T, B=2):
    return torch.randint(0, 50, (B, T), generator=torch.Generator().manual_seed(T))


def wave(k, i, n):
    """a_k times wave k at entry i of n."""
    return math.sqrt((1 if k == 0 else 2) / n) * math.cos(math.pi * k * (2 * i + 1) / (2 * n))


def transformed(x):
    """The three steps of the equations for a list of span vectors, sum by sum."""
    span = len(x)
    Z = [sum(x[n] * wave(k, n, span) for n in range(span)) for k in range(L)]
    back = [sum(Z[k] * wave(k, n, L) for k in range(L)) for n in range(L)]
    return [math.sqrt(L / span) * y for y in back]


class NaiveFreqKV(naive.Stack):
    """One entry and one head at a time; keys are turned back vector by vector."""

    def next(self, x):
        if len(self.steps) == N:
            for layer in range(self.c.n_layer):
                self.turn(layer, range(S, N), -1)
                for held in (self.keys, self.values):
                    self.squeeze(held[layer])
                self.turn(layer, range(S, S + L), 1)
            del self.steps[S + L:]
            del self.bias[S + L:]
        return self.read(x, len(self.steps))

    def turn(self, layer, places, sign):
        """Keys at these places by the angles of the places, or back."""
        for place in places:
            heads = self.keys[layer][place]
            self.keys[layer][place] = [
                naive.rotate(k, sign * place, self.c.rope_theta) for k in heads]

    def squeeze(self, entries):
        """All but the sinks of a list of entries, each a list of heads."""
        heads = []
        for n in range(self.c.n_kv_head):
            heads.append(transformed([entry[n] for entry in entries[S:]]))
        entries[S:] = [list(entry) for entry in zip(*heads)]


@torch.no_grad()
def test_until_the_cache_is_full_all_are_the_plain_gpt_and_then_all_differ(gpt):
    idx = text(3 * N)
    models = contestants(gpt, FreqKVSettings(sinks=S, keep=0.45))
    hidden = [model.hidden(idx) for model in models.values()]
    for h in hidden:
        close(h[:, :N], gpt.hidden(idx[:, :N]), 1e-12)
    assert len({round(h[:, N:].sum().item(), 9) for h in hidden}) == len(hidden)


@torch.no_grad()
def test_equals_the_slow_one(gpt):
    idx = text(2 * N + 4, B=1)
    stack = NaiveFreqKV(gpt)
    want = []
    for x in gpt.embed(idx)[0]:
        want.append(naive.rms(stack.next(x), gpt.ln_f.weight, gpt.config.norm_eps))
    want = torch.stack(want)
    close(long(gpt).hidden(idx)[0], want)
    wrong = long(gpt, kind=Rotated).hidden(idx)[0]
    assert (wrong - want)[N:].abs().amax(1).min() > 1e-4


@torch.no_grad()
def test_it_is_bounded_exact_in_pieces_and_generates(gpt):
    idx = text(5 * N)
    model = long(gpt)
    want = model.hidden(idx)
    assert model.peak == N
    memory = model.new_memory()
    cut = [11, 1, 1, 20, 5 * N - 33]
    close(torch.cat([model.hidden(part, memory) for part in idx.split(cut, 1)], 1), want)
    out = generate(model, idx[:, :20], 2 * N, temperature=0)     # the prompt outgrows the cache
    assert torch.equal(model(out[:, :-1])[0].argmax(-1)[:, 19:], out[:, 20:])
    assert model.peak == N


def test_gradients_reach_compressed_tokens_and_a_window_forgets():
    """With one layer: a token that has left the window, and is no sink, counts for nothing."""
    gpt = make(n_layer=1, block_size=N)
    idx = text(4 * N) % 49
    idx[0, S + 1] = 49
    for A, reached in ((FILTER, True), (torch.eye(N - S)[-L:], False)):
        model = long(gpt, A)
        model.hidden(idx)[:, -1].sum().backward()
        assert bool(model.wte.weight.grad[49].any()) == reached


def test_the_program(tmp_path, small_data, capsys):
    gpt = make(vocab_size=320, n_tokens=257, n_layer=2, block_size=N)
    folder = save(tmp_path / 'ckpt', gpt, data_dir=small_data)
    freqkv.main([folder, '--windows=2', '--steps=1', '--sinks=2'])
    out = capsys.readouterr().out
    assert f'{3 * N} tokens from a cache that never held more than {N}' in out
    rows = cells(out)[1:]
    assert len(rows) == 9
    for name, at_n, _, at_4n, peak in rows:
        assert float(at_n) > 0 and float(at_4n) > 0
        assert int(peak) == (4 * N if name.startswith('no compression') else N)

    with pytest.raises(UserError, match='keep=1.0 keep 2 . 10 of 12'):
        freqkv.main([folder, '--sinks=2', '--keep=1'])
