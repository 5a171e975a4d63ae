"""
The FreqKV lab: its cache is bounded, exact however the text is cut, and equal to a slow one written
from the equations.
"""
import math
import os
import re
import runpy
import sys

import naive
import pytest
import torch
from conftest import ROOT, make, save

sys.path.insert(0, os.path.join(ROOT, 'exercises', 'labs'))
import freqkv
from engine.files import UserError
from freqkv import (FreqKV, FreqKVSettings, LongGPT, Rotated, Truncated, contestants, dct_matrix,
                    filtered)

N, S, L = 12, 2, 4  # cache, sinks, entries that stay: W = 6
MODELS = {
    'plain': {},
    'grouped': dict(n_kv_head=2),
    'depth': dict(depth_attn=True, n_kv_head=2),
    'no_norm': dict(qk_norm=False),
}
FILTER = filtered(N - S, L)


@pytest.fixture(params=MODELS)
def gpt(request):
    return make(n_layer=2, block_size=N, **MODELS[request.param])


def long(gpt, A=FILTER, kind=FreqKV):
    return LongGPT(gpt, lambda: kind(gpt.config, N, S, A))


def text(T, B=2):
    return torch.randint(0, 50, (B, T), generator=torch.Generator().manual_seed(T))


def changed_at(idx, t):
    """The same text with another token at t."""
    other = idx.clone()
    other[:, t] = (other[:, t] + 1) % 50
    return other


def difference(model, idx, other):
    """Of the hidden states of two texts, the largest at each position: (T,)."""
    return (model.hidden(idx) - model.hidden(other)).abs().amax((0, 2))


def equal_to(x, y, tolerance=1e-10):
    """Up to an absolute tolerance."""
    return torch.allclose(x, y, rtol=0, atol=tolerance)


def transformed(x, L):
    """The three steps of the equations for a list of span vectors, sum by sum."""
    span = len(x)
    Z = []
    for k in range(L):
        waves = [math.cos(math.pi * k * (2 * n + 1) / (2 * span)) for n in range(span)]
        Z.append(normaliser(k, span) * sum(x[n] * waves[n] for n in range(span)))
    back = []
    for n in range(L):
        waves = [math.cos(math.pi * k * (2 * n + 1) / (2 * L)) for k in range(L)]
        back.append(sum(normaliser(k, L) * Z[k] * waves[k] for k in range(L)))
    return [math.sqrt(L / span) * y for y in back]


def normaliser(k, n):
    """a_k."""
    return math.sqrt((1 if k == 0 else 2) / n)


# ---- the filter ----------------------------------------------------------------------------------

@pytest.mark.parametrize('n', [1, 2, 7, 64])
def test_the_dct_is_orthonormal_and_keeping_all_is_the_identity(n):
    C = dct_matrix(n)
    one = torch.eye(n, dtype=torch.float64)
    assert torch.allclose(C @ C.T, one, atol=1e-12)
    assert torch.allclose(filtered(n, n), one, atol=1e-12)
    x = torch.randn(n, 3, dtype=torch.float64)
    assert torch.allclose((C @ x).square().sum(0), x.square().sum(0))  # Parseval


@pytest.mark.parametrize('span, L', [
    (10, 4),
    (9, 5),
    (124, 62),
    (5, 1),
])
def test_the_filter_is_the_equations(span, L):
    x = torch.randn(span, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    want = torch.stack(transformed(list(x), L))
    assert torch.allclose(filtered(span, L) @ x, want, atol=1e-10)


def wave(k, n):
    """Wave k of n entries; for k = 0 a constant."""
    i = torch.arange(n, dtype=torch.float64)
    return torch.cos(math.pi * k * (2 * i + 1) / (2 * n))


def test_slow_waves_keep_their_amplitude_and_fast_ones_vanish():
    """Wave k of span entries becomes wave k of L entries."""
    low = filtered(40, 16)
    for k in range(40):
        kept = wave(k, 16) if k < 16 else torch.zeros(16, dtype=torch.float64)
        assert torch.allclose(low @ wave(k, 40), kept, atol=1e-12), k
    assert torch.linalg.matrix_norm(low, 2).item() == pytest.approx(math.sqrt(16 / 40))

    high = filtered(40, 16, slice(-16, None))
    assert torch.allclose(high @ wave(0, 40), torch.zeros(16, dtype=torch.float64), atol=1e-12)
    assert (high @ wave(39, 40)).abs().max() > 0.5


# ---- the cache -----------------------------------------------------------------------------------

def test_until_it_is_full_it_is_the_plain_cache(gpt):
    """Bit for bit; and from the first compression on it is not."""
    idx = text(N)
    model = long(gpt)
    assert torch.equal(model(idx)[0], gpt(idx)[0])
    assert model.peak == N
    prompt = idx[:, :3]
    new = model.generate(prompt, N - 3, temperature=0)
    assert torch.equal(new, gpt.generate(prompt, N - 3, temperature=0))

    longer = LongGPT(gpt, lambda: FreqKV(gpt.config, 99, 0, None))
    idx = text(N + 1)
    change = (model.hidden(idx) - longer.hidden(idx)).abs().amax((0, 2))
    assert change[:N].max() < 1e-12
    assert change[N] > 1e-4


@pytest.mark.parametrize('cut', [
    [1] * (5 * N),
    [1, 5, 17],
    [11, 1, 1, 20],
    [12, 6, 6],
], ids=['one by one', 'cut1', 'cut2', 'cut3'])
def test_chunks_and_single_tokens_agree(gpt, cut):
    idx = text(5 * N)
    model = long(gpt)
    want = model.hidden(idx)
    memory = model.new_memory(None)
    rest = 5 * N - sum(cut)
    sizes = [*cut, rest] if rest else cut
    got = torch.cat([model.hidden(part, memory) for part in idx.split(sizes, 1)], 1)
    assert equal_to(got, want)
    assert model.peak == N


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
            heads.append(transformed([entry[n] for entry in entries[S:]], L))
        entries[S:] = [list(entry) for entry in zip(*heads)]


def test_equals_the_slow_one(gpt):
    idx = text(2 * N + 4, B=1)
    stack = NaiveFreqKV(gpt)
    with torch.no_grad():
        want = []
        for x in gpt.embed(idx)[0]:
            want.append(naive.rms(stack.next(x), gpt.ln_f.weight, gpt.config.norm_eps))
        want = torch.stack(want)
        got = long(gpt).hidden(idx)[0]
        wrong = long(gpt, kind=Rotated).hidden(idx)[0]
    assert equal_to(got, want)
    assert equal_to(wrong[:N], want[:N])
    assert (wrong - want)[N:].abs().amax(1).min() > 1e-4


def held_lengths(memory):
    """Those of all its keys and values."""
    return {tensor.size(2) for tensor in memory.k + memory.v}


def test_lengths_and_positions_stay_below_the_bound(monkeypatch):
    model = long(make(n_layer=2, block_size=N))
    trunk, compress = model.trunk, FreqKV.compress
    lengths, places = [], []

    def watched(x, pos, memory):
        h = trunk(x, pos, memory)
        assert held_lengths(memory) == {memory.length}
        lengths.append(memory.length)
        places.append(pos)
        return h

    def squeezed(self):
        assert self.length == N
        compress(self)
        assert self.length == S + L
        assert held_lengths(self) == {S + L}

    monkeypatch.setattr(model, 'trunk', watched)
    monkeypatch.setattr(FreqKV, 'compress', squeezed)
    model(text(6 * N))
    assert max(lengths) == N == model.peak
    assert torch.cat(places).max() == N - 1

    model.generate(text(4), 6 * N, temperature=0)
    assert max(lengths) == N
    assert torch.cat(places).max() == N - 1
    assert len(lengths) > 6 * N


def test_a_full_cache_refuses_more():
    memory = FreqKV(make().config, N, S, None)
    k = torch.zeros(1, 4, N - 1, 8)
    memory.update(0, k, k)
    memory.length = N - 1
    two = k[:, :, :2]
    words = '11 \\+ 2 entries do not fit into a cache of 12: compress'
    with pytest.raises(ValueError, match=words):
        memory.update(0, two, two)


def test_sinks_are_never_touched_and_a_constant_survives(gpt):
    memory = FreqKV(gpt.config, N, S, FILTER)
    with torch.no_grad():
        gpt.trunk(gpt.embed(text(N)), torch.arange(N), memory)
    for v in memory.v:
        v[:, :, S:] = 3.0
    sinks = [tensor[:, :, :S].clone() for tensor in memory.k + memory.v]

    for _ in range(20):
        memory.compress()
        for layer in range(2):
            more = torch.randn(2, gpt.config.n_kv_head, N - S - L, 8, dtype=torch.float64)
            memory.update(layer, more, torch.full_like(more, 3.0))

    for tensor, before in zip(memory.k + memory.v, sinks):
        assert torch.equal(tensor[:, :, :S], before)
    for v in memory.v:
        others = v[:, :, S:]
        assert torch.allclose(others, torch.full_like(others, 3.0), atol=1e-12)


def test_an_unrotated_key_keeps_its_content_and_takes_its_new_place():
    """Equal keys before rotation are equal keys after compression, at their new places."""
    memory = FreqKV(make().config, N, S, FILTER)
    k = torch.randn(1, 1, 1, 8, dtype=torch.float64).expand(1, 1, N, 8)
    memory.k, memory.v, memory.length = [memory.turn(k, 0)], [k], N
    memory.compress()
    assert torch.allclose(memory.k[0], memory.turn(k[:, :, :S + L], 0), atol=1e-12)


# ---- what a text does with it --------------------------------------------------------------------

def test_nothing_looks_ahead_and_compressed_tokens_still_count(gpt):
    idx = text(5 * N)
    model = long(gpt)
    for t in (S + 1, N, 2 * N + 3):
        change = difference(model, idx, changed_at(idx, t))
        assert change[:t].max() < 1e-12, t
        assert change[t:].min() > 1e-9, t


@pytest.mark.parametrize('kind, forgets', [
    ('window', True),
    ('truncation', True),
    ('FreqKV', False),
])
def test_a_window_forgets_what_it_drops(kind, forgets):
    """
    The control of the test before: with one layer, a token that has left the window and is no sink
    counts for nothing.
    """
    gpt = make(n_layer=1, block_size=N)
    models = {
        'window': long(gpt, torch.eye(N - S)[-L:]),
        'truncation': Truncated(gpt),
        'FreqKV': long(gpt),
    }
    idx = text(5 * N)
    change = difference(models[kind], idx, changed_at(idx, S + 1))
    assert (change[3 * N:].max() < 1e-12) == forgets


def test_gradients_reach_tokens_that_were_compressed(gpt):
    model = long(gpt)
    embed = model.embed
    embedded = []

    def watched(idx):
        x = embed(idx)
        x.retain_grad()
        embedded.append(x)
        return x

    model.embed = watched
    model.hidden(text(4 * N))[:, -1].sum().backward()
    assert len(embedded) == 7
    for x in embedded:
        assert (x.grad.abs().amax(-1) > 0).all()


def test_truncation_is_what_generate_does(gpt):
    model = Truncated(gpt)
    with torch.no_grad():
        out = gpt.generate(text(N - 3), 3 * N, temperature=0)
        likeliest = model(out[:, :-1])[0].argmax(-1)
    assert torch.equal(likeliest[:, N - 4:], out[:, N - 3:])
    assert model.peak == N


def test_generation_goes_on_as_the_full_reading_says(gpt):
    model = long(gpt)
    with torch.no_grad():
        out = model.generate(text(20), 3 * N, temperature=0)  # the prompt is longer than the cache
        likeliest = model(out[:, :-1])[0].argmax(-1)
    assert torch.equal(likeliest[:, 19:], out[:, 20:])
    assert model.peak == N
    with pytest.raises(ValueError, match='different lengths'):
        model.generate([[1, 2], [3]], 2)


def test_the_contestants_are_what_their_names_say():
    gpt = make(n_layer=2, block_size=N)
    idx = text(4 * N)
    models = contestants(gpt, FreqKVSettings(sinks=S, keep=0.45))
    hidden = {name: model.hidden(idx) for name, model in models.items()}
    for name, model in models.items():
        assert equal_to(hidden[name][:, :N], gpt.hidden(idx[:, :N]), 1e-12), name
        assert model.peak == (4 * N if name == 'no compression' else N), name
    assert torch.equal(hidden['FreqKV'], long(gpt).hidden(idx))

    # the window, by hand: what is read after the first compression, in places of its own
    window = models['sinks + sliding window'].memory()
    kept = [*range(S), *range(N - L, N)]
    with torch.no_grad():
        gpt.trunk(gpt.embed(idx[:, :N]), torch.arange(N), window)
    unrotated = [window.turn(k, 0, back=True)[:, :, kept] for k in window.k]
    window.compress()
    for k, raw in zip(window.k, unrotated):
        assert torch.allclose(k, window.turn(raw, 0), atol=1e-12)

    # no two of them are the same
    sums = {round(h[:, N:].sum().item(), 9) for h in hidden.values()}
    assert len(sums) == len(hidden)


# ---- the program ---------------------------------------------------------------------------------

def folder(path, data, **settings):
    """A checkpoint with random weights that says it was trained on `data`."""
    small = dict(vocab_size=320, n_tokens=257, n_layer=2, block_size=16)
    model = make(**{**small, **settings}).float()
    return save(path, model, data_dir=data)


def test_runs_as_a_program(tmp_path, small_data, monkeypatch, capsys):
    """In this process; tests/test_labs.py starts it in one of its own."""
    checkpoint = folder(tmp_path / 'ckpt', small_data)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'argv', ['freqkv.py', checkpoint, '--windows=3', '--steps=2'])
    runpy.run_path(freqkv.__file__, run_name='__main__')
    said = capsys.readouterr()
    assert '48 tokens from a cache that never held more than 16' in said.out
    assert 'step 2/2' in said.err

    number = r'  +(\d+\.\d{4})'
    rows = re.findall(r'^(\w.*?)' + 3 * number + r'  +(\d+)$', said.out, re.M)
    names, at_n, _, at_4n, peaks = zip(*rows)
    assert len(set(names)) == 9
    assert [name.endswith('tuned') for name in names] == [False] * 6 + [True] * 3
    assert len(set(at_n[:6])) == 1
    assert len(set(at_4n)) > 5
    assert at_n[0] not in at_n[6:]
    for name, peak in zip(names, peaks):
        assert peak == ('64' if name.startswith('no compression') else '16'), name


def test_depth_attention_and_repeatable(tmp_path, small_data, capsys):
    checkpoint = folder(tmp_path / 'ckpt', small_data, depth_attn=True)
    out = []
    for _ in range(2):
        freqkv.main([checkpoint, '--windows=1', '--steps=1', '--sinks=0', '--keep=0.25'])
        out.append(capsys.readouterr().out)
    assert out[0] == out[1]
    assert 'FreqKV, tuned' in out[0]


@pytest.mark.parametrize('args, words', [
    ([], ['one checkpoint folder']),
    (['CKPT', 'b'], ['one checkpoint folder']),
    (['nowhere'], ['nowhere', 'no checkpoint']),
    (['PONDER'], ['plain GPT', "ponder='loop'"]),
    (['CKPT', '--keep=0'], ['keep=0.0', 'keep 4 + 0 of 16']),
    (['CKPT', '--keep=1'], ['keep=1.0', '4 + 12 of 16']),
    (['CKPT', '--sinks=16'], ['sinks=16', '16 + 0 of 16', 'lower sinks']),
    (['CKPT', '--sinks=-1'], ['sinks=-1']),
    (['CKPT', '--windows=0'], ['windows=0']),
    (['CKPT', '--steps=-1'], ['steps=-1']),
    (['CKPT', '--step=5'], ['step', 'steps']),
    (['NODATA'], ['no data set']),
])
def test_refusals(tmp_path, small_data, args, words):
    if 'CKPT' in args:
        folder(tmp_path / 'CKPT', small_data)
    if 'NODATA' in args:
        folder(tmp_path / 'NODATA', 'gone')
    if 'PONDER' in args:
        folder(tmp_path / 'PONDER', small_data, ponder='loop', ponder_steps=1)
    args = [str(tmp_path / arg) if arg.isupper() else arg for arg in args]
    with pytest.raises(UserError) as error:
        freqkv.main(args)
    assert '\n' not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_a_refusal_is_one_line_and_status_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['freqkv.py', 'nowhere'])
    with pytest.raises(SystemExit) as left:
        freqkv.run(freqkv.main)
    said = capsys.readouterr()
    assert left.value.code == 2
    assert said.err.startswith('error: nowhere')
    assert said.err.count('\n') == 1
    assert not said.out


def test_too_little_text(tmp_path, small_data):
    checkpoint = folder(tmp_path / 'ckpt', small_data, block_size=4096)
    words = r'^\d{4,5} tokens are too few for one window of 16384'
    with pytest.raises(UserError, match=words):
        freqkv.main([checkpoint])
