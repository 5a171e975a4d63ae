"""The FreqKV lab: its cache is bounded, exact however the text is cut, and equal to a slow one written from the equations."""
import math
import os
import re
import sys

import naive
import pytest
import torch
from conftest import ROOT, make, program, save

sys.path.insert(0, os.path.join(ROOT, 'exercises', 'labs'))
import freqkv
from engine.errors import UserError
from freqkv import FreqKV, FreqKVSettings, LongGPT, Rotated, Truncated, contestants, dct_matrix, filtered

N, S, L = 12, 2, 4  # cache, sinks, entries that stay: W = 6
MODELS = {'plain': {}, 'grouped': dict(n_kv_head=2), 'depth': dict(depth_attn=True, n_kv_head=2), 'no_norm': dict(qk_norm=False)}


@pytest.fixture(params=MODELS)
def gpt(request):
    return make(n_layer=2, block_size=N, **MODELS[request.param])


def long(gpt, A=filtered(N - S, L), kind=FreqKV):
    return LongGPT(gpt, lambda: kind(gpt.config, N, S, A))


def text(T, B=2):
    return torch.randint(0, 50, (B, T), generator=torch.Generator().manual_seed(T))


def transformed(x, L):
    """The three steps of the equations for a list of span vectors, sum by sum."""
    span = len(x)
    a = lambda k, n: math.sqrt((1 if k == 0 else 2) / n)
    Z = [a(k, span) * sum(x[n] * math.cos(math.pi * k * (2 * n + 1) / (2 * span)) for n in range(span)) for k in range(L)]
    back = [sum(a(k, L) * Z[k] * math.cos(math.pi * k * (2 * n + 1) / (2 * L)) for k in range(L)) for n in range(L)]
    return [math.sqrt(L / span) * y for y in back]


# ---- the filter

def test_the_dct_is_orthonormal_and_keeping_all_is_the_identity():
    for n in (1, 2, 7, 64):
        C, one = dct_matrix(n), torch.eye(n, dtype=torch.float64)
        assert torch.allclose(C @ C.T, one, atol=1e-12) and torch.allclose(filtered(n, n), one, atol=1e-12)
        x = torch.randn(n, 3, dtype=torch.float64)
        assert torch.allclose((C @ x).square().sum(0), x.square().sum(0))  # Parseval


@pytest.mark.parametrize('span, L', [(10, 4), (9, 5), (124, 62), (5, 1)])
def test_the_filter_is_the_equations(span, L):
    x = torch.randn(span, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(filtered(span, L) @ x, torch.stack(transformed(list(x), L)), atol=1e-10)


def test_slow_waves_keep_their_amplitude_and_fast_ones_vanish():
    """Wave k of span entries becomes wave k of L entries; for k = 0 that is a constant."""
    wave = lambda k, n: torch.cos(math.pi * k * (2 * torch.arange(n, dtype=torch.float64) + 1) / (2 * n))
    for k in range(40):
        kept = wave(k, 16) if k < 16 else torch.zeros(16, dtype=torch.float64)
        assert torch.allclose(filtered(40, 16) @ wave(k, 40), kept, atol=1e-12), k
    assert torch.linalg.matrix_norm(filtered(40, 16), 2).item() == pytest.approx(math.sqrt(16 / 40))
    high = filtered(40, 16, slice(-16, None))
    assert torch.allclose(high @ wave(0, 40), wave(0, 16) * 0, atol=1e-12) and (high @ wave(39, 40)).abs().max() > 0.5


# ---- the cache

def test_until_it_is_full_it_is_the_plain_cache(gpt):
    """Bit for bit; and from the first compression on it is not."""
    idx, model = text(N), long(gpt)
    assert torch.equal(model(idx)[0], gpt(idx)[0]) and model.peak == N
    assert torch.equal(model.generate(idx[:, :3], N - 3, temperature=0), gpt.generate(idx[:, :3], N - 3, temperature=0))
    longer = LongGPT(gpt, lambda: FreqKV(gpt.config, 99, 0, None))
    idx = text(N + 1)
    same = (model.hidden(idx) - longer.hidden(idx)).abs().amax((0, 2))
    assert same[:N].max() < 1e-12 < 1e-4 < same[N]


@pytest.mark.parametrize('cut', ['one by one', [1, 5, 17], [11, 1, 1, 20], [12, 6, 6]])
def test_chunks_and_single_tokens_agree(gpt, cut):
    idx, model = text(5 * N), long(gpt)
    want, memory = model.hidden(idx), model.new_memory(None)
    sizes = [1] * (5 * N) if cut == 'one by one' else [*cut, 5 * N - sum(cut)]
    got = torch.cat([model.hidden(part, memory) for part in idx.split(sizes, 1)], 1)
    assert torch.allclose(got, want, rtol=0, atol=1e-10) and model.peak == N


class NaiveFreqKV(naive.Stack):
    """One entry and one head at a time; keys are turned back vector by vector."""

    def next(self, x):
        if len(self.steps) == N:
            for layer in range(self.c.n_layer):
                for place in range(S, N):
                    self.keys[layer][place] = [naive.rotate(k, -place, self.c.rope_theta) for k in self.keys[layer][place]]
                for held in (self.keys, self.values):
                    heads = [transformed([entry[n] for entry in held[layer][S:]], L) for n in range(self.c.n_kv_head)]
                    held[layer][S:] = [list(entry) for entry in zip(*heads)]
                for place in range(S, S + L):
                    self.keys[layer][place] = [naive.rotate(k, place, self.c.rope_theta) for k in self.keys[layer][place]]
            del self.steps[S + L:], self.bias[S + L:]
        return self.read(x, len(self.steps))


def test_equals_the_slow_one(gpt):
    idx, stack = text(2 * N + 4, B=1), NaiveFreqKV(gpt)
    with torch.no_grad():
        x = gpt.embed(idx)[0]
        want = torch.stack([naive.rms(stack.next(x_t), gpt.ln_f.weight, gpt.config.norm_eps) for x_t in x])
        got, wrong = (long(gpt, kind=kind).hidden(idx)[0] for kind in (FreqKV, Rotated))
    assert torch.allclose(got, want, rtol=0, atol=1e-10)
    assert torch.allclose(wrong[:N], want[:N], rtol=0, atol=1e-10) and (wrong - want)[N:].abs().amax(1).min() > 1e-4


def test_lengths_and_positions_stay_below_the_bound(monkeypatch):
    gpt, lengths, places = make(n_layer=2, block_size=N), [], []
    model = long(gpt)
    trunk, compress = model.trunk, FreqKV.compress

    def watched(x, pos, memory):
        h = trunk(x, pos, memory)
        lengths.append([memory.length, *(k.size(2) for k in memory.k + memory.v)])
        places.append(pos)
        return h

    def squeezed(self):
        assert self.length == N
        compress(self)
        assert {self.length, *(k.size(2) for k in self.k + self.v)} == {S + L}
    monkeypatch.setattr(model, 'trunk', watched)
    monkeypatch.setattr(FreqKV, 'compress', squeezed)
    model(text(6 * N))
    assert all(len(set(row)) == 1 for row in lengths) and max(row[0] for row in lengths) == N == model.peak
    assert torch.cat(places).max() == N - 1
    model.generate(text(4), 6 * N, temperature=0)
    assert max(row[0] for row in lengths) == N and torch.cat(places).max() == N - 1 and len(lengths) > 6 * N


def test_a_full_cache_refuses_more():
    memory, k = FreqKV(make().config, N, S, None), torch.zeros(1, 4, N - 1, 8)
    memory.update(0, k, k)
    memory.length = N - 1
    with pytest.raises(ValueError, match='11 \\+ 2 entries do not fit into a cache of 12: compress'): memory.update(0, k[:, :, :2], k[:, :, :2])


def test_sinks_are_never_touched_and_a_constant_survives(gpt):
    memory = FreqKV(gpt.config, N, S, filtered(N - S, L))
    with torch.no_grad(): gpt.trunk(gpt.embed(text(N)), torch.arange(N), memory)
    for v in memory.v: v[:, :, S:] = 3.0
    sinks = [t[:, :, :S].clone() for t in memory.k + memory.v]
    for _ in range(20):
        memory.compress()
        for layer in range(2):
            more = torch.randn(2, gpt.config.n_kv_head, N - S - L, 8, dtype=torch.float64)
            memory.update(layer, more, torch.full_like(more, 3.0))
    for t, before in zip(memory.k + memory.v, sinks): assert torch.equal(t[:, :, :S], before)
    for v in memory.v: assert torch.allclose(v[:, :, S:], torch.full_like(v[:, :, S:], 3.0), atol=1e-12)


def test_an_unrotated_key_keeps_its_content_and_takes_its_new_place():
    """Equal keys everywhere, before rotation, are equal keys after compression, at their new places."""
    memory = FreqKV(make().config, N, S, filtered(N - S, L))
    k = torch.randn(1, 1, 1, 8, dtype=torch.float64).expand(1, 1, N, 8)
    memory.k, memory.v, memory.length = [memory.turn(k, 0)], [k], N
    memory.compress()
    assert torch.allclose(memory.k[0], memory.turn(k[:, :, :S + L], 0), atol=1e-12)


# ---- what a text does with it

def test_nothing_looks_ahead_and_compressed_tokens_still_count(gpt):
    idx, model = text(5 * N), long(gpt)
    for t in (S + 1, N, 2 * N + 3):
        other = idx.clone()
        other[:, t] = (other[:, t] + 1) % 50
        change = (model.hidden(idx) - model.hidden(other)).abs().amax((0, 2))
        assert change[:t].max() < 1e-12 and change[t:].min() > 1e-9, t


def test_a_window_forgets_what_it_drops():
    """The control of the test before: with one layer, a token that has left the window and is no sink counts for nothing."""
    gpt = make(n_layer=1, block_size=N)
    idx = text(5 * N)
    other = idx.clone()
    other[:, S + 1] = (other[:, S + 1] + 1) % 50
    for model, forgets in ((long(gpt, torch.eye(N - S)[-L:]), True), (Truncated(gpt), True), (long(gpt), False)):
        change = (model.hidden(idx) - model.hidden(other)).abs().amax((0, 2))
        assert (change[3 * N:].max() < 1e-12) == forgets


def test_gradients_reach_tokens_that_were_compressed(gpt):
    model, reached = long(gpt), []
    embed = model.embed
    model.embed = lambda idx: reached.append(embed(idx)) or reached[-1].retain_grad() or reached[-1]
    model.hidden(text(4 * N))[:, -1].sum().backward()
    assert len(reached) == 7 and all((x.grad.abs().amax(-1) > 0).all() for x in reached)


def test_truncation_is_what_generate_does(gpt):
    prompt, n = text(N - 3), 3 * N
    with torch.no_grad():
        out = gpt.generate(prompt, n, temperature=0)
        model = Truncated(gpt)
        assert torch.equal(model(out[:, :-1])[0].argmax(-1)[:, N - 4:], out[:, N - 3:]) and model.peak == N


def test_generation_goes_on_as_the_full_reading_says(gpt):
    model = long(gpt)
    with torch.no_grad():
        out = model.generate(text(20), 3 * N, temperature=0)  # the prompt is longer than the cache
        assert torch.equal(model(out[:, :-1])[0].argmax(-1)[:, 19:], out[:, 20:]) and model.peak == N
    with pytest.raises(ValueError, match='different lengths'): model.generate([[1, 2], [3]], 2)


def test_the_contestants_are_what_their_names_say():
    gpt = make(n_layer=2, block_size=N)
    idx = text(4 * N)
    models = contestants(gpt, FreqKVSettings(sinks=S, keep=0.45))
    h = {name: model.hidden(idx) for name, model in models.items()}
    for name, model in models.items():
        assert torch.allclose(h[name][:, :N], gpt.hidden(idx[:, :N]), rtol=0, atol=1e-12), name
        assert model.peak == (4 * N if name == 'no compression' else N), name
    assert torch.equal(h['FreqKV'], long(gpt).hidden(idx))
    # the window, by hand: what is read after the first compression, in places of its own
    layers, kept = models['sinks + sliding window'].memory(), list(range(S)) + list(range(N - L, N))
    with torch.no_grad(): gpt.trunk(gpt.embed(idx[:, :N]), torch.arange(N), layers)
    raw = [layers.turn(k, 0, back=True)[:, :, kept] for k in layers.k]
    layers.compress()
    for k, r in zip(layers.k, raw): assert torch.allclose(k, layers.turn(r, 0), atol=1e-12)
    assert len(set(map(lambda x: round(x[:, N:].sum().item(), 9), h.values()))) == len(h)


# ---- the program

def folder(path, data, **settings):
    """A checkpoint with random weights that says it was trained on `data`."""
    model = make(**{**dict(vocab_size=320, n_tokens=257, n_layer=2, block_size=16), **settings}).float()
    return save(path, model, data_dir=data)


def test_runs_as_a_program(tmp_path, small_data):
    done = program(os.path.join(ROOT, 'exercises', 'labs', 'freqkv.py'), folder(tmp_path / 'ckpt', small_data), '--windows=3', '--steps=2', cwd=tmp_path)
    assert '48 tokens from a cache that never held more than 16' in done.stdout and 'step 2/2' in done.stderr
    rows = re.findall(r'^(\w.*?)  +(\d+\.\d{4})  +(\d+\.\d{4})  +(\d+\.\d{4})  +(\d+)$', done.stdout, re.M)
    names, at_n, _, at_4n, peaks = zip(*rows)
    assert len(set(names)) == 9 and [name.endswith('tuned') for name in names] == [False] * 6 + [True] * 3
    assert len(set(at_n[:6])) == 1 and len(set(at_4n)) > 5 and at_n[0] not in at_n[6:]
    assert peaks == tuple('64' if name.startswith('no compression') else '16' for name in names)


def test_depth_attention_and_repeatable(tmp_path, small_data, capsys):
    ckpt, out = folder(tmp_path / 'ckpt', small_data, depth_attn=True), []
    for _ in range(2):
        freqkv.main([ckpt, '--windows=1', '--steps=1', '--sinks=0', '--keep=0.25'])
        out.append(capsys.readouterr().out)
    assert out[0] == out[1] and 'FreqKV, tuned' in out[0]


@pytest.mark.parametrize('args, words', [
    ([], ['one checkpoint folder']), (['CKPT', 'b'], ['one checkpoint folder']), (['nowhere'], ['nowhere', 'no checkpoint']),
    (['PONDER'], ['plain GPT', "ponder='loop'"]), (['CKPT', '--keep=0'], ['keep=0.0', 'keep 4 + 0 of 16']),
    (['CKPT', '--keep=1'], ['keep=1.0', '4 + 12 of 16']), (['CKPT', '--sinks=16'], ['sinks=16', '16 + 0 of 16', 'lower sinks']),
    (['CKPT', '--sinks=-1'], ['sinks=-1']), (['CKPT', '--windows=0'], ['windows=0']), (['CKPT', '--steps=-1'], ['steps=-1']),
    (['CKPT', '--step=5'], ['step', 'steps']), (['NODATA'], ['no data set'])])
def test_refusals(tmp_path, small_data, args, words):
    folders = {'CKPT': lambda: folder(tmp_path / 'ckpt', small_data), 'NODATA': lambda: folder(tmp_path / 'nodata', 'gone'),
               'PONDER': lambda: folder(tmp_path / 'ponder', small_data, ponder='loop', ponder_steps=1)}
    with pytest.raises(UserError) as error: freqkv.main([folders[a]() if a in folders else a for a in args])
    assert '\n' not in str(error.value)
    for word in words: assert word in str(error.value)


def test_a_refusal_is_one_line_and_status_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['freqkv.py', 'nowhere'])
    with pytest.raises(SystemExit) as left: freqkv.run(freqkv.main)
    out = capsys.readouterr()
    assert left.value.code == 2 and out.err.startswith('error: nowhere') and out.err.count('\n') == 1 and not out.out


def test_too_little_text(tmp_path, small_data):
    with pytest.raises(UserError, match=r'^\d{4,5} tokens are too few for one window of 16384'): freqkv.main([folder(tmp_path / 'ckpt', small_data, block_size=4096)])
