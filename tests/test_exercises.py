"""Each exercise accepts the library as its solution, and answers typical mistakes in words, never with a traceback."""
import functools
import math
import os
import re
import runpy
import shutil
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, program

sys.path.insert(0, os.path.join(ROOT, 'exercises'))
import check
from engine.memory import KVCache
from model import GPT, GPTConfig, apply_rope, depth_attention, latent, rope_table

sdpa = F.scaled_dot_product_attention


def attention(q, k, v, dim=-1, scale=True, diagonal=0, late=False, groups='repeat_interleave', fill=-math.inf):
    """What a student writes, with switches for what goes wrong."""
    g, T = q.size(1) // k.size(1), q.size(2)
    k, v = (x.repeat_interleave(g, 1) if groups == 'repeat_interleave' else x.repeat(1, g, 1, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / (math.sqrt(q.size(-1)) if scale else 1)
    seen = torch.ones(T, T, dtype=torch.bool).tril(diagonal)
    return (scores.softmax(dim) * seen if late else scores.masked_fill(~seen, fill).softmax(dim)) @ v


def angles(pos, hd, theta, power=-1.0):
    return pos[:, None] * theta ** (power * torch.arange(0, hd, 2) / hd)


def rotate(x, pos, theta):
    return apply_rope(x, *rope_table(pos, x.size(-1), theta, x.dtype))


def rotate_by(rule):
    def rotate(x, pos, theta):
        (a, b), angle = x.chunk(2, -1), angles(pos, x.size(-1), theta)[:, None]
        return torch.cat(rule(a, b, angle.cos(), angle.sin()), -1)
    return rotate


class Cache(KVCache):
    """The library's cache with a student's constructor."""

    def __init__(self, n_layer):
        super().__init__(n_layer, 32)


class CatCache:
    """What a student writes, with switches for what goes wrong."""
    keep, own_layers, shift, dtype = True, True, True, torch.float32

    def __init__(self, n_layer):
        self.k, self.v = [None] * n_layer, [None] * n_layer

    def update(self, layer, k, v):
        if not self.own_layers: layer = 0
        if self.keep and self.k[layer] is not None: k, v = torch.cat((self.k[layer], k), 2), torch.cat((self.v[layer], v), 2)
        self.k[layer], self.v[layer] = k.to(self.dtype).float(), v
        return k, v

    def mask(self, S, device):
        n = self.k[0].size(2) if self.k[0] is not None else 0
        return torch.ones(S, n + S, dtype=torch.bool).tril(n if self.shift else 0)


def generate(gpt, prompt, n, restart=False, again=False, last=-1, head='head'):
    cache, new, out = CatCache(gpt.config.n_layer), prompt, prompt
    for _ in range(n):
        begin = 0 if restart else out.size(1) - new.size(1)
        h = gpt.trunk(gpt.embed(new), torch.arange(begin, begin + new.size(1)), CatCache(gpt.config.n_layer) if again else cache)
        token = getattr(gpt, head)(h)[:, last].argmax(-1, keepdim=True)
        out = torch.cat((out, token), 1)
        new = out if again else token
    return out


def mix_all(layers, stride, source=lambda l, j, s: j % s == 0, raw=False):
    """GPT.layers' use of depth_attention, with switches for what goes wrong."""
    out = []
    for l, (q, k, v) in enumerate(layers):
        out.append(depth_attention(q, k, v, [(layers[j][1], layers[j][2] if raw else out[j]) for j in range(l) if source(l, j, stride)]))
    return out


def mix_over(dim):
    """mix() with the softmax over one axis of (layers, B, nkv, T)."""
    def mix(q, k, v, sources):
        q = q.reshape(k.size(0), k.size(1), -1, *k.shape[2:]).mean(2)
        pairs = sources + [(k, v)]
        weights = (torch.stack([(q * k_j).sum(-1) for k_j, _ in pairs]) / k.size(-1) ** 0.5).softmax(dim)
        return sum(w[..., None] * v_j for w, (_, v_j) in zip(weights, pairs))
    return mix


def ponder(gpt, idx, steps):
    gpt.config.ponder_steps = steps
    return gpt.hidden(idx)


def ponder_by(rule, extra=0, head=lambda gpt, h: gpt.head(h)):
    def ponder(gpt, idx, steps):
        pos, start = torch.arange(idx.size(1)), gpt.embed(idx)
        x = start
        for _ in range(steps + extra): x = rule(gpt, start, x, head(gpt, gpt.trunk(x, pos)).softmax(-1))
        return gpt.trunk(x, pos)
    return ponder


def table(gpt):
    return gpt.wte.weight * gpt.config.embed_scale


add = lambda gpt, start, x, p: x + p @ table(gpt)[:p.size(-1)]
pondered = ponder_by(add)


def sequential(gpt, x):
    return torch.cat([latent(gpt, x[:, t:t + 1], torch.tensor([t]), [cache], 0)
                      for cache in [KVCache(gpt.config.n_layer, 2 * x.size(1), slots=2)] for t in range(x.size(1))], 1)


def jacobi(gpt, x, R):
    return latent(gpt, x, torch.arange(x.size(1)), [None], R)


def jacobi_by(zeros=False, block=False, own=False, read=1, kept=lambda z: z):
    def jacobi(gpt, x, R):
        T = x.size(1)
        pos = torch.arange(T)
        join = (lambda z: torch.cat((x, z), 1)) if block else (lambda z: torch.stack((x, z), 2).flatten(1, 2))
        where = torch.arange(2 * T) if own else pos.repeat(2) if block else pos.repeat_interleave(2)
        half = (lambda h, i: h[:, i * T:(i + 1) * T]) if block else (lambda h, i: h[:, i::2])
        z = torch.zeros_like(x) if zeros else gpt.trunk(x, pos)
        for _ in range(R): z = kept(half(gpt.trunk(join(z), where), 0))
        return half(gpt.trunk(join(z), where), read)
    return jacobi


class Frozen:
    """A student's memory, with switches for what goes wrong."""
    freeze, store, layer, kept = True, 'frozen', None, lambda self, x: x

    def __init__(self, n_layer, active=None, before=None):
        self.k, self.v, self.active, self.before = [None] * n_layer, [None] * n_layer, active, before

    def update(self, layer, k, v):
        self.k[layer], self.v[layer] = k, v
        if self.freeze and self.before is not None:
            keep = self.active[:, None, :, None]
            old = layer if self.layer is None else self.layer
            k, v = torch.where(keep, k, self.before.k[old]), torch.where(keep, v, self.before.v[old])
        if self.store != 'raw': self.k[layer], self.v[layer] = k, v
        if self.store == 'in place' and self.before: self.before.k[layer].copy_(k), self.before.v[layer].copy_(v)
        return self.kept(k), self.kept(v)

    def mask(self, S, device):
        return None


def think(gpt, gates, x, pos, tau, monotone=True, freeze=True, scale=True, count=True, memory=True, go=torch.ge, gate=torch.sigmoid,
          cls=Frozen):
    m, before = torch.ones(x.shape[:2], dtype=torch.bool), None
    passes = torch.zeros(x.shape[:2], dtype=torch.long)
    for i in range(len(gates) + 1):
        frozen = cls(gpt.config.n_layer, m if before else None, before)
        h = gpt.trunk(x, pos, frozen)
        if memory: before = frozen
        readout = h if i == 0 or not freeze else torch.where(m[..., None], h, readout)
        passes = passes + (m if count or i else 0)
        if i == len(gates): break
        g = gate(gates[i](h)).squeeze(-1)
        m = m & go(g, tau) if monotone else go(g, tau)
        x = x + (m * (g if scale else 1))[..., None] * gpt.mixture(h)
    return readout, passes


@functools.cache
def model_of(fields):
    with torch.device('meta'): return GPT(GPTConfig(**dict(fields)))


def library_flops(c, T, training=False):
    return model_of(tuple(vars(c).items())).flops_per_token(T, training)


def forward_flops(c, T):
    return library_flops(replace(c, ponder='none'), T)


def fair_tokens(c, T, tokens):
    return tokens * library_flops(c, T, True) / library_flops(replace(c, ponder='none'), T, True)


def but(function, **switches):
    """The function with switches set, under its own name."""
    wrong = lambda *args: function(*args, **switches)
    wrong.__name__ = function.__name__
    return wrong


def sub(base, **switches):
    return type(base.__name__, (base,), switches)


SOLUTIONS = {  # the library, or the few lines around it that an exercise asks for
    'attention': dict(attention=lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True)),
    'rope': dict(angles=angles, rotate=rotate),
    'kv_cache': dict(Cache=Cache, generate=lambda gpt, prompt, n: generate(gpt, prompt, n)),
    'depth_attention': dict(mix=depth_attention, mix_all=mix_all),
    'pondering': dict(ponder=pondered),
    'jacobi': dict(sequential=sequential, jacobi=jacobi, iterations_needed=lambda T: T - 1),
    'halting': dict(Frozen=Frozen, think=think),
    'flops': dict(forward_flops=forward_flops, ponder_flops=library_flops, fair_tokens=fair_tokens),
}
MISTAKES = [  # (exercise, what the student wrote, words of the sentence that answers it)
    ('attention', dict(attention=lambda q, k, v: sdpa(q, k, v)), 'without a mask'),
    ('attention', dict(attention=but(attention, scale=False)), r'forgets to divide the scores by sqrt\(hd\)'),
    ('attention', dict(attention=but(attention, dim=-2)), 'do not sum to 1'),
    ('attention', dict(attention=but(attention, late=True)), 'the mask belongs before the softmax'),
    ('attention', dict(attention=but(attention, diagonal=1)), 'sees the future: changing position 4 and later ones changes it at position 3'),
    ('attention', dict(attention=but(attention, diagonal=-1)), 'may each position read itself'),
    ('attention', dict(attention=but(attention, groups='repeat')), 'mixes up the groups'),
    ('attention', dict(attention=lambda q, k, v: attention(q, k, v).transpose(1, 2)), r'Axes 1 and 2 are swapped'),
    ('attention', dict(attention=lambda q, k, v: attention(q, k, v).transpose(1, 2).reshape(q.shape)), 'right numbers in the wrong places'),
    ('attention', dict(attention=lambda q, k, v: attention(q, k, v) / 2), 'all numbers are 0.5 times'),
    ('attention', dict(attention=lambda q, k, v: attention(q.mul_(1.5), k, v)), 'changed one of its arguments in place'),
    ('attention', dict(attention=lambda q, k, v: attention(q, k, v)[:, :, :1].expand_as(q)), 'right only at position 0'),
    ('attention', dict(attention=lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)), 'are to write yourself'),
    ('attention', dict(attention=lambda q, k, v: attention(q.half(), k.half(), v.half())), 'numbers of type torch.float16'),
    ('attention', dict(attention=lambda q, k, v: attention(q, k, v).half().float()), 'rounded to 16 bits'),
    ('attention', dict(attention=lambda q, k, v: attention(k, q, v)), 'queries and keys swapped'),
    ('attention', dict(attention=lambda q, k, v: attention(q, k, k)), 'keys instead of values'),
    ('attention', dict(attention=but(attention, dim=1)), 'does it run over the right axis'),
    ('attention', dict(attention=but(attention, fill=-100.0)), 'right only while the scores are small'),
    ('attention', dict(attention=lambda q, k, v: attention(q, k, v.detach())), 'part of the gradient is lost'),
    ('rope', dict(angles=lambda pos, hd, theta: angles(pos - pos.min(), hd, theta)), 'counts from the smallest position'),
    ('rope', dict(rotate=lambda x, pos, theta: rotate(x, pos - pos.min(), theta)), 'rotate.. differs'),
    ('rope', dict(angles=lambda pos, hd, theta: angles(torch.arange(len(pos)), hd, theta)), 'ignores pos'),
    ('rope', dict(angles=but(angles, power=-0.5)), 'exponent -i / hd'),
    ('rope', dict(angles=but(angles, power=1.0)), 'the exponent should be negative'),
    ('rope', dict(rotate=rotate_by(lambda a, b, cos, sin: (a * cos + b * sin, b * cos - a * sin))), 'turns the wrong way'),
    ('rope', dict(rotate=rotate_by(lambda a, b, cos, sin: (a * cos - b * sin, b * cos - a * sin))), 'changes the length'),
    ('rope', dict(rotate=rotate_by(lambda a, b, cos, sin: (a + cos, b + sin))), 'changes what stands at position 0'),
    ('rope', dict(rotate=lambda x, pos, theta: rotate(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), pos, theta)
                  .unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)), 'pairs neighbours'),
    ('kv_cache', dict(Cache=sub(CatCache, keep=False)), 'returns only the new keys'),
    ('kv_cache', dict(Cache=sub(CatCache, own_layers=False)), 'each layer has its own'),
    ('kv_cache', dict(Cache=sub(CatCache, shift=False)), r'new position i stands at 4 \+ i'),
    ('kv_cache', dict(Cache=sub(CatCache, mask=lambda self, S, device: None)), 'returned None'),
    ('kv_cache', dict(Cache=sub(CatCache, dtype=torch.half)), 'rounded to 16 bits'),
    ('kv_cache', dict(Cache=sub(CatCache, update=lambda self, layer, k, v: CatCache.update(self, layer, k, k) and
                                (self.k[layer], torch.cat((self.k[layer][:, :, :-k.size(2)], v), 2)))), 'keys where values should be'),
    ('kv_cache', dict(Cache=sub(CatCache, mask=lambda self, S, device: torch.ones(
        S, sum(k.size(2) for k in self.k if k is not None) + S, dtype=torch.bool).tril())), 'as wide as 8 positions'),
    ('kv_cache', dict(generate=but(generate, head='lm_head')), 'padding of the vocabulary'),
    ('kv_cache', dict(generate=but(generate, restart=True)), 'positions .* count on'),
    ('kv_cache', dict(generate=but(generate, again=True)), 'ran 63 positions through the trunk, and 12 are enough'),
    ('kv_cache', dict(generate=but(generate, last=0)), 'is each new token the argmax'),
    ('depth_attention', dict(mix=lambda q, k, v, sources: v), 'own value, unmixed'),
    ('depth_attention', dict(mix=lambda q, k, v, sources: depth_attention(q * 8 ** 0.5, k, v, sources)), 'forgets to divide'),
    ('depth_attention', dict(mix=lambda q, k, v, sources: depth_attention(q, *sources[0], sources[1:])), 'own key and value out'),
    ('depth_attention', dict(mix=mix_over(-1)), 'do not sum to 1 over the layers'),
    ('depth_attention', dict(mix=lambda q, k, v, sources: depth_attention(q[:, :k.size(1)], k, v, sources)), 'takes the first queries'),
    ('depth_attention', dict(mix=lambda q, k, v, sources: depth_attention(q * (q.size(1) // k.size(1)), k, v, sources)), 'should be averaged'),
    ('depth_attention', dict(mix_all=but(mix_all, raw=True)), 'mixes raw values'),
    ('depth_attention', dict(mix_all=but(mix_all, source=lambda l, j, s: (l - j) % s == 0)), 'the anchors are fixed'),
    ('depth_attention', dict(mix_all=but(mix_all, source=lambda l, j, s: True)), 'reads all layers below'),
    ('depth_attention', dict(mix_all=but(mix_all, source=lambda l, j, s: j % s == 0 and j < l - 1)), 'layer l reads each j < l'),
    ('depth_attention', dict(mix=lambda q, k, v, sources: sources.append((k, v)) or depth_attention(q, k, v, sources[:-1])), 'in place'),
    ('depth_attention', dict(mix=lambda q, k, v, sources: depth_attention(q, k, v, [(a, b.detach()) for a, b in sources])), 'gradient'),
    ('pondering', dict(ponder=ponder), r'hidden\(\) is what you are to write yourself'),
    ('pondering', dict(ponder=lambda gpt, idx, steps: pondered(gpt, idx, gpt.config.ponder_steps)), 'reads gpt.config.ponder_steps'),
    ('pondering', dict(ponder=lambda gpt, idx, steps: gpt.head(pondered(gpt, idx, steps))), r'shape \(2, 9, 40\)'),
    ('pondering', dict(ponder=ponder_by(lambda gpt, start, x, p: x + p.log().softmax(1) @ table(gpt))), 'does it run over the right axis'),
    ('pondering', dict(ponder=ponder_by(lambda gpt, start, x, p: x + (p @ table(gpt)).roll(-1, 1))), 'sees the future'),
    ('pondering', dict(ponder=ponder_by(lambda gpt, start, x, p: x.add_(p @ table(gpt)))), 'Backward needs what was overwritten'),
    ('pondering', dict(ponder=ponder_by(add, head=lambda gpt, h: F.linear(h, gpt.lm_head.weight.detach()[:30]))), 'way to lm_head.weight'),
    ('pondering', dict(ponder=ponder_by(lambda gpt, start, x, p: p @ table(gpt))), 'replaces the input'),
    ('pondering', dict(ponder=ponder_by(lambda gpt, start, x, p: start + p @ table(gpt))), 'should join the running sum'),
    ('pondering', dict(ponder=ponder_by(lambda gpt, start, x, p: x + p @ gpt.wte.weight)), 'without its scale'),
    ('pondering', dict(ponder=ponder_by(lambda gpt, start, x, p: x + table(gpt)[p.argmax(-1)])), 'takes the likeliest token'),
    ('pondering', dict(ponder=ponder_by(add, extra=-1)), 'one pass too few'),
    ('pondering', dict(ponder=ponder_by(lambda gpt, start, x, p: x + p.detach() @ table(gpt))), 'part of the gradient is lost'),
    ('pondering', dict(ponder=lambda gpt, idx, steps: pondered(gpt, idx, steps).detach()), 'no gradient can flow'),
    ('jacobi', dict(sequential=lambda gpt, x: gpt.trunk(x, torch.arange(x.size(1)))), 'what the plain model gives'),
    ('jacobi', dict(sequential=lambda gpt, x: jacobi_by(own=True)(gpt, x, 9)), 'a position of its own'),
    ('jacobi', dict(sequential=lambda gpt, x: jacobi_by(read=0)(gpt, x, 9)), 'outputs at the token slots'),
    ('jacobi', dict(jacobi=jacobi_by(read=0)), 'outputs at the token slots'),
    ('jacobi', dict(jacobi=jacobi_by(own=True)), 'a position of its own'),
    ('jacobi', dict(jacobi=jacobi_by(block=True)), 'sees the future'),
    ('jacobi', dict(jacobi=jacobi_by(zeros=True)), r'ran passes of \[12\] slots; asked for are \[6, 12\]'),
    ('jacobi', dict(jacobi=lambda gpt, x, R: jacobi(gpt, x, R + 1)), 'one iteration more than asked'),
    ('jacobi', dict(jacobi=jacobi_by(kept=torch.detach)), 'part of the gradient is lost'),
    ('jacobi', dict(iterations_needed=lambda T: T), 'more than it takes'),
    ('jacobi', dict(iterations_needed=lambda T: 3), 'more than it takes'),
    ('jacobi', dict(iterations_needed=lambda T: min(T - 1, 3)), 'position 5 is still off by'),
    ('halting', dict(Frozen=sub(Frozen, freeze=False)), 'all keys anew'),
    ('halting', dict(Frozen=sub(Frozen, store='raw')), 'should hold them too'),
    ('halting', dict(Frozen=sub(Frozen, store='in place')), 'writes into self.before'),
    ('halting', dict(Frozen=sub(Frozen, layer=0)), 'of another layer'),
    ('halting', dict(think=but(think, cls=sub(Frozen, kept=lambda self, x: x.detach()))), 'part of the gradient is lost'),
    ('halting', dict(think=but(think, go=torch.gt)), 'nobody halts while g >= tau'),
    ('halting', dict(think=but(think, gate=lambda z: z)), 'the sigmoid of it is g'),
    ('halting', dict(think=but(think, gate=lambda z: z.sigmoid().detach())), 'part of the gradient is lost'),
    ('halting', dict(think=lambda *args: [x.float() for x in think(*args)]), 'and not in torch.float32'),
    ('halting', dict(think=but(think, monotone=False)), 'never wakes up again'),
    ('halting', dict(think=but(think, freeze=False)), 'readout of halted tokens moves on'),
    ('halting', dict(think=but(think, scale=False)), 'the gate should scale it'),
    ('halting', dict(think=but(think, count=False)), 'the first one included'),
    ('halting', dict(think=but(think, go=torch.lt)), r'think\(\) counts 1 .* 4 is right'),
    ('halting', dict(think=but(think, memory=False)), 'should read the frozen keys and values'),
    ('flops', dict(forward_flops=lambda c, T: forward_flops(c, T) / 2), 'half of what it should be'),
    ('flops', dict(forward_flops=lambda c, T: forward_flops(c, T) - 2 * c.n_layer * c.mlp_hidden * c.n_embd), 'two matrices in the MLP'),
    ('flops', dict(forward_flops=lambda c, T: forward_flops(c, T) + 2 * c.vocab_size * c.n_embd), 'it is a look-up'),
    ('flops', dict(forward_flops=lambda c, T: forward_flops(replace(c, n_kv_head=c.n_head), T)), 'they have n_kv_head'),
    ('flops', dict(forward_flops=lambda c, T: forward_flops(c, T) - 2 * c.n_layer * c.n_embd * c.n_kv_head * c.head_dim), 'or the values'),
    ('flops', dict(ponder_flops=lambda c, T: library_flops(replace(c, ponder_steps=max(0, c.ponder_steps - 1)), T)), r's steps are s \+ 1 passes'),
    ('flops', dict(ponder_flops=lambda c, T: (c.ponder_steps + 1) * forward_flops(c, T)), 'and then a mixture'),
    ('flops', dict(fair_tokens=lambda c, T, tokens: tokens ** 2 / fair_tokens(c, T, tokens)), 'upside down'),
    ('flops', dict(fair_tokens=lambda c, T, tokens: 4 * tokens), 'counts passes only'),
]


@pytest.fixture
def grade(monkeypatch):
    """grade(name, written): the verdict on an exercise in which the student wrote this, and the rest is right."""
    def grade(name, written):
        exercise = check.load(os.path.join(ROOT, 'exercises', name + '.py'))
        for function, code in {**SOLUTIONS[name], **written}.items(): setattr(exercise, function, code)
        right, words = check.verdict(exercise.check)
        assert isinstance(words, str) and words and '\n' not in words and 'Traceback' not in words
        return right, words
    return grade


@pytest.mark.parametrize('name', check.NAMES)
def test_the_library_is_a_solution(grade, name):
    assert grade(name, {})[0], grade(name, {})[1]


@pytest.mark.parametrize('name, written, words', MISTAKES)
def test_a_typical_mistake_gets_its_sentence(grade, name, written, words):
    right, said = grade(name, written)
    assert not right and re.search(words, said), said


FUNCTIONS = [(name, function) for name in check.NAMES for function in SOLUTIONS[name] if not isinstance(SOLUTIONS[name][function], type)]
METHODS = [('kv_cache', 'Cache', CatCache, 'update'), ('kv_cache', 'Cache', CatCache, 'mask'), ('halting', 'Frozen', Frozen, 'update')]


def broken(right):
    """Functions that return what no answer is, in the ways of a first attempt."""
    def squeezed(*args):
        x = right(*args)
        return x[..., :1] if isinstance(x, torch.Tensor) else [y[..., :1] for y in x] if isinstance(x, (tuple, list)) else -x
    def nan(*args):
        x = right(*args)
        return x * math.nan if isinstance(x, (torch.Tensor, float, int)) else [y * math.nan for y in x]
    for value in (None, 0, (0, 0), [None] * 6, torch.zeros(2, 2)):
        yield lambda *args, value=value: value
    yield from (squeezed, nan, lambda *args: right(*args[:-1]), lambda *args: exit(0))


@pytest.mark.parametrize('name, function', FUNCTIONS)
def test_anything_a_function_returns_is_answered_in_one_line(grade, name, function):
    for wrong in broken(SOLUTIONS[name][function]): assert not grade(name, {function: wrong})[0]


@pytest.mark.parametrize('name, cls, base, method', METHODS)
def test_anything_a_method_returns_is_answered_in_one_line(grade, name, cls, base, method):
    for wrong in broken(getattr(base, method)): assert not grade(name, {cls: sub(base, **{method: wrong})})[0]


def test_stubs_are_answered_kindly_and_the_whole_set_is_listed(capsys):
    assert not check.check_all()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == list(check.NAMES) and lines[-1] == '0 of 8 right'
    for line in lines[:-1]: assert 'not yet: ' in line and 'still empty' in line


@pytest.mark.parametrize('name, functions', [(name, list(SOLUTIONS[name])) for name in check.NAMES if len(SOLUTIONS[name]) > 1])
def test_one_step_after_the_other(name, functions):
    """With the first function written, the sentence is about the second."""
    exercise = check.load(os.path.join(ROOT, 'exercises', name + '.py'))
    for function, following in zip(functions, functions[1:]):
        setattr(exercise, function, SOLUTIONS[name][function])
        right, words = check.verdict(exercise.check)
        assert not right and re.search(rf'{following}\(\) is still empty', words), words


ANSWER = {
    'an error in a line': ('    z = q @ k\n    return z', r"line \d+, `z = q @ k`, stops with RuntimeError: .*Shapes do not fit"),
    'a name that is not there': ('    return softmax(q)', r"line \d+, `return softmax\(q\)`, stops with NameError: .*missing import"),
    'nothing returned': ('    y = q', r'returned None: does its last line say `return`\?'),
    'float64 in between': ('    return q @ torch.ones(16, 16, dtype=torch.float64)', 'Make new tensors with dtype=x.dtype'),
    'float64 in a batched product': ('    return (q @ k.mT).double() @ v', 'Make new tensors with dtype=x.dtype'),
    'an attribute that is not there': ('    return q.size(1).shape', 'of another type'),
    'leaves': ('    exit(0)', 'SystemExit'),
}


@pytest.mark.parametrize('what', ANSWER)
def test_errors_in_a_students_file_are_explained_with_their_line(what, tmp_path):
    code, words = ANSWER[what]
    with open(os.path.join(ROOT, 'exercises', 'attention.py'), encoding='utf-8') as f: source = f.read()
    source, changed = re.subn(r'    raise NotImplementedError\(.*\)', lambda match: code, source, count=1)
    assert changed
    path = tmp_path / 'attention.py'
    path.write_text(source, encoding='utf-8')
    right, said = check.verdict(check.load(str(path)).check)
    assert not right and re.search(words, said), said
    if said.startswith('line'): assert source.splitlines()[int(re.search(r'line (\d+)', said)[1]) - 1] in code.splitlines()


@pytest.mark.parametrize('name', check.NAMES)
def test_every_exercise_knows_the_students_part_of_its_file(name, tmp_path):
    with open(os.path.join(ROOT, 'exercises', name + '.py'), encoding='utf-8') as f: source = f.read()
    path = tmp_path / f'{name}.py'
    path.write_text(re.sub(r'    raise NotImplementedError\(.*\)', '    x = undefined + 1', source), encoding='utf-8')
    assert ', `x = undefined + 1`, stops with NameError' in check.verdict(check.load(str(path)).check)[1]
    path.write_text(re.sub(r'    raise NotImplementedError\(.*\)', "    return 'text', 0", source), encoding='utf-8')
    assert not check.verdict(check.load(str(path)).check)[1].startswith('line')  # what is wrong shows only later, in the check


def test_a_file_that_is_not_python_is_named_with_its_line(tmp_path, capsys):
    for name in check.NAMES: (tmp_path / f'{name}.py').write_text('x = 1\ndef f(:\n')
    (tmp_path / 'rope.py').write_text('x = 1\ny = x + z\n')
    assert not check.check_all(str(tmp_path))
    out = capsys.readouterr().out
    assert 'attention        not yet: line 2 is not Python' in out and "rope             not yet: line 2, `y = x + z`, stops with NameError" in out


def test_an_exercise_is_a_program(tmp_path):
    stub = program(os.path.join(ROOT, 'exercises', 'rope.py'), cwd=tmp_path, ok=False, PYTHONPATH='')
    assert stub.returncode == 1 and not stub.stderr
    assert stub.stdout.startswith('not yet: angles() is still empty') and 'rope.py --hint gives a hint' in stub.stdout


def test_the_whole_set_is_a_program(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, 'argv', ['check.py'])
    with pytest.raises(SystemExit) as left: runpy.run_path(os.path.join(ROOT, 'exercises', 'check.py'), run_name='__main__')
    assert left.value.code == 1 and capsys.readouterr().out.endswith('0 of 8 right\n')
    shutil.copy(os.path.join(ROOT, 'exercises', 'attention.py'), tmp_path)
    with pytest.raises(SystemExit) as left: check.mark([str(tmp_path)])
    out = capsys.readouterr().out
    assert left.value.code == 1 and 'attention        not yet: ' in out and f"{tmp_path / 'rope.py'} is not there" in out
    for wrong in (['nowhere'], [str(tmp_path), str(tmp_path)]):
        with pytest.raises(check.UserError, match='name one folder'): check.mark(wrong)


def test_help_is_the_text_at_the_top(capsys):
    exercise = check.load(os.path.join(ROOT, 'exercises', 'rope.py'))
    check.main(['--help'], exercise.__file__, exercise.check, exercise.HINTS)
    check.mark(['-h'])
    out = capsys.readouterr().out
    assert out.startswith('Exercise 2 of 8: rotary positions') and '\nChecks exercises' in out


def test_status_is_0_for_a_right_answer(monkeypatch, capsys):
    exercise = check.load(os.path.join(ROOT, 'exercises', 'attention.py'))
    monkeypatch.setattr(exercise, 'attention', attention)
    with pytest.raises(SystemExit) as left: check.main([], exercise.__file__, exercise.check, exercise.HINTS)
    assert left.value.code == 0 and capsys.readouterr().out.startswith('right. ')


def test_hints_come_one_by_one(capsys):
    for name in check.NAMES:
        exercise = check.load(os.path.join(ROOT, 'exercises', name + '.py'))
        assert len(exercise.HINTS) == 3
        for option, n in (('--hint', 1), ('--hint=2', 2), ('--hint=3', 3)):
            check.main([option], exercise.__file__, exercise.check, exercise.HINTS)
            assert capsys.readouterr().out.count(' of 3: ') == n
        for option in ('--hint=0', '--hint=4', '--hints', 'hint'):
            with pytest.raises(check.UserError): check.main([option], exercise.__file__, exercise.check, exercise.HINTS)


def test_the_losses_quoted_are_those_of_the_results_page():
    with open(os.path.join(ROOT, 'docs', 'results.md'), encoding='utf-8') as f: results = f.read()
    words = check.load(os.path.join(ROOT, 'exercises', 'flops.py')).conclusion(1.0)
    losses = re.findall(r'\d\.\d{4}', words)
    assert len(losses) == 3
    for loss in losses: assert loss in results, f'{loss} stands in exercises/flops.py and no longer in docs/results.md'


def test_every_exercise_has_a_mistake_table():
    for name in check.NAMES: assert sum(name == mistake[0] for mistake in MISTAKES) >= 3, name


@pytest.mark.skipif('halting' not in GPTConfig.__dataclass_fields__, reason='this model.py has no halting yet')
def test_the_loop_of_the_halting_exercise_is_what_the_model_does(idx):
    """Its reference is written from the equations; here it meets halting='gate'."""
    exercise = check.load(os.path.join(ROOT, 'exercises', 'halting.py'))
    gpt = check.tiny(ponder='embedding', ponder_steps=3, n_layer=3, halting='gate', halt_tau=0.5)
    torch.manual_seed(3)
    for gate in gpt.gates: gate[-1].weight.data.normal_(), gate[-1].bias.data.fill_(1)
    idx = idx[:, :8] % 30
    with torch.no_grad():
        readout, passes = exercise.one_by_one(gpt, gpt.gates, gpt.embed(idx), torch.arange(8), 0.5)
        assert torch.allclose(gpt.hidden(idx), readout, atol=1e-4) and len(passes.unique()) > 1
        assert torch.equal(gpt.steps, passes)
