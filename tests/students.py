"""
What students write: for each exercise a right solution, and typical mistakes with words of the
sentence that should answer them. SOLUTIONS and MISTAKES at the end have them all.

Where a right solution has switches, arguments with defaults, each of them makes a mistake.
"""
import functools
import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from engine.memory import KVCache, no_caches
from engine.shapes import shapes_only
from model import GPT, GPTConfig, apply_rope, depth_attention, mixture, rope_table

sdpa = F.scaled_dot_product_attention  # under another name: the check of attention.py forbids it


def but(function, **switches):
    """The function with switches set, under its own name."""
    def wrong(*args):
        return function(*args, **switches)
    wrong.__name__ = function.__name__
    return wrong


def sub(base, **switches):
    """The class with some of its attributes or methods replaced, under its own name."""
    return type(base.__name__, (base,), switches)


# -------------------------------------------------------------------------------------------------
# attention.py

def attention_of_torch(q, k, v):
    return sdpa(q, k, v, is_causal=True, enable_gqa=True)


def attention(q, k, v, dim=-1, scale=True, diagonal=0, fill=-math.inf, late=False, repeat=False):
    g, T, hd = q.size(1) // k.size(1), q.size(2), q.size(3)
    if repeat:
        k, v = k.repeat(1, g, 1, 1), v.repeat(1, g, 1, 1)
    else:
        k, v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
    scores = q @ k.transpose(-1, -2)  # (B, nh, T, T)
    if scale:
        scores = scores / math.sqrt(hd)
    seen = torch.ones(T, T, dtype=torch.bool, device=q.device).tril(diagonal)
    if late:
        weights = scores.softmax(dim) * seen
    else:
        weights = scores.masked_fill(~seen, fill).softmax(dim)
    return weights @ v


def attention_in_half(q, k, v):
    return attention(q.half(), k.half(), v.half())


def attention_forbidden(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention_reshaped(q, k, v):
    return attention(q, k, v).transpose(1, 2).reshape(q.shape)


SEES = 'sees the future: changing position 4 and later ones changes it at position 3'
WRONG_ATTENTION = [
    (lambda q, k, v: sdpa(q, k, v), 'without a mask'),
    (but(attention, scale=False), r'forgets to divide the scores by sqrt\(hd\)'),
    (but(attention, dim=-2), 'do not sum to 1'),
    (but(attention, late=True), 'the mask belongs before the softmax'),
    (but(attention, diagonal=1), SEES),
    (but(attention, diagonal=-1), 'may each position read itself'),
    (but(attention, repeat=True), 'mixes up the groups'),
    (lambda q, k, v: attention(q, k, v).transpose(1, 2), r'Axes 1 and 2 are swapped'),
    (attention_reshaped, 'right numbers in the wrong places'),
    (lambda q, k, v: attention(q, k, v) / 2, 'all numbers are 0.5 times'),
    (lambda q, k, v: attention(q.mul_(1.5), k, v), 'changed one of its arguments in place'),
    (lambda q, k, v: attention(q, k, v)[:, :, :1].expand_as(q), 'right only at position 0'),
    (attention_forbidden, 'are to write yourself'),
    (attention_in_half, 'numbers of type torch.float16'),
    (lambda q, k, v: attention(q, k, v).half().float(), 'rounded to 16 bits'),
    (lambda q, k, v: attention(k, q, v), 'queries and keys swapped'),
    (lambda q, k, v: attention(q, k, k), 'keys instead of values'),
    (but(attention, dim=1), 'does it run over the right axis'),
    (but(attention, fill=-100.0), 'right only while the scores are small'),
    (lambda q, k, v: attention(q, k, v.detach()), 'part of the gradient is lost'),
]


# -------------------------------------------------------------------------------------------------
# rope.py

def angles(pos, hd, theta, power=-1.0):
    return pos[:, None] * theta ** (power * torch.arange(0, hd, 2) / hd)


def angles_from_smallest(pos, hd, theta):
    return angles(pos - pos.min(), hd, theta)


def angles_without_pos(pos, hd, theta):
    return angles(torch.arange(len(pos)), hd, theta)


WRONG_ANGLES = [
    (angles_from_smallest, 'counts from the smallest position'),
    (angles_without_pos, 'ignores pos'),
    (but(angles, power=-0.5), 'exponent -i / hd'),
    (but(angles, power=1.0), 'the exponent should be negative'),
]


def rotate(x, pos, theta):
    cos, sin = rope_table(pos, x.size(-1), theta, x.dtype)
    return apply_rope(x, cos, sin)


def rotate_from_smallest(x, pos, theta):
    return rotate(x, pos - pos.min(), theta)


def rotate_by(rule):
    """rotate() in which the halves a and b become rule(a, b, cos, sin)."""
    def rotate(x, pos, theta):
        a, b = x.chunk(2, -1)
        angle = angles(pos, x.size(-1), theta)[:, None]
        return torch.cat(rule(a, b, angle.cos(), angle.sin()), -1)
    return rotate


def rotate_neighbours(x, pos, theta):
    halves = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    turned = rotate(halves, pos, theta)
    return turned.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def backwards(a, b, cos, sin):
    return a * cos + b * sin, b * cos - a * sin


def wrong_sign(a, b, cos, sin):
    return a * cos - b * sin, b * cos - a * sin


def shifted(a, b, cos, sin):
    return a + cos, b + sin


WRONG_ROTATE = [
    (rotate_from_smallest, 'rotate.. differs'),
    (rotate_by(backwards), 'turns the wrong way'),
    (rotate_by(wrong_sign), 'changes the length'),
    (rotate_by(shifted), 'changes what stands at position 0'),
    (rotate_neighbours, 'pairs neighbours'),
]


# -------------------------------------------------------------------------------------------------
# kv_cache.py

class Cache(KVCache):
    """The library's cache with a student's constructor."""

    def __init__(self, n_layer):
        super().__init__(n_layer, 32)

    def update(self, layer, k, v):
        if layer == 0:
            self.first = self.length  # a pass begins, also where nobody asks for a mask
        return super().update(layer, k, v)


class CatCache:
    keep = True            # what came before
    own_layers = True      # not all in layer 0
    shift = True           # the mask's diagonal
    dtype = torch.float32  # of the keys

    def __init__(self, n_layer):
        self.k = [None] * n_layer
        self.v = [None] * n_layer

    def update(self, layer, k, v):
        if not self.own_layers:
            layer = 0
        if self.keep and self.k[layer] is not None:
            k = torch.cat((self.k[layer], k), 2)
            v = torch.cat((self.v[layer], v), 2)
        self.k[layer] = k.to(self.dtype).float()
        self.v[layer] = v
        return k, v

    def mask(self, S, device):
        n = 0 if self.k[0] is None else self.k[0].size(2)
        seen = torch.ones(S, n + S, dtype=torch.bool, device=device)
        return seen.tril(n if self.shift else 0)


class StoresKeysTwice(CatCache):
    """Returns the new values, but remembers keys in their place."""

    def update(self, layer, k, v):
        super().update(layer, k, k)
        before = self.k[layer][:, :, :-k.size(2)]
        return self.k[layer], torch.cat((before, v), 2)


class CountsEveryLayer(CatCache):
    """Takes the keys of all layers for positions."""

    def mask(self, S, device):
        n = sum(k.size(2) for k in self.k if k is not None)
        return torch.ones(S, n + S, dtype=torch.bool, device=device).tril()


WRONG_CACHE = [
    (sub(CatCache, keep=False), 'returns only the new keys'),
    (sub(CatCache, own_layers=False), 'each layer has its own'),
    (sub(CatCache, shift=False), r'new position i stands at 4 \+ i'),
    (sub(CatCache, mask=lambda self, S, device: None), 'returned None'),
    (sub(CatCache, dtype=torch.half), 'rounded to 16 bits'),
    (StoresKeysTwice, 'keys where values should be'),
    (CountsEveryLayer, 'as wide as 8 positions'),
]


def generate(gpt, prompt, n, restart=False, again=False, last=-1, head='head'):
    """restart: positions begin at 0 again. again: read the whole text for every token."""
    cache, new, out = CatCache(gpt.config.n_layer), prompt, prompt
    for _ in range(n):
        if again:
            cache = CatCache(gpt.config.n_layer)
        begin = 0 if restart else out.size(1) - new.size(1)
        pos = torch.arange(begin, begin + new.size(1))
        h = gpt.trunk(gpt.embed(new), pos, cache)
        logits = getattr(gpt, head)(h)[:, last]
        token = logits.argmax(-1, keepdim=True)
        out = torch.cat((out, token), 1)
        new = out if again else token
    return out


WRONG_GENERATE = [
    (but(generate, head='lm_head'), 'padding of the vocabulary'),
    (but(generate, restart=True), 'positions .* count on'),
    (but(generate, again=True), r'ran \d+ positions through the trunk, and 1\d are enough'),
    (but(generate, last=0), 'is each new token the argmax'),
]


# -------------------------------------------------------------------------------------------------
# depth_attention.py

def mix_without_own(q, k, v, sources):
    (first_k, first_v), *others = sources
    return depth_attention(q, first_k, first_v, others)


def mix_unscaled(q, k, v, sources):
    return depth_attention(q * q.size(-1) ** 0.5, k, v, sources)


def mix_over_positions(q, k, v, sources):
    q = q.reshape(k.size(0), k.size(1), -1, *k.shape[2:]).mean(2)  # (B, nkv, T, hd)
    pairs = sources + [(k, v)]
    scores = torch.stack([(q * k_j).sum(-1) for k_j, _ in pairs]) / k.size(-1) ** 0.5
    weights = scores.softmax(-1)                                   # (layers, B, nkv, T)
    return sum(w[..., None] * v_j for w, (_, v_j) in zip(weights, pairs))


def mix_first_queries(q, k, v, sources):
    return depth_attention(q[:, :k.size(1)], k, v, sources)


def mix_summed_queries(q, k, v, sources):
    g = q.size(1) // k.size(1)
    return depth_attention(q * g, k, v, sources)


def mix_and_append(q, k, v, sources):
    sources.append((k, v))
    return depth_attention(q, k, v, sources[:-1])


def mix_detached(q, k, v, sources):
    sources = [(k_j, v_j.detach()) for k_j, v_j in sources]
    return depth_attention(q, k, v, sources)


def mix_own_twice(q, k, v, sources):
    return depth_attention(q, k, v, [*sources, (k, v)])


def mix_averaged_weights(q, k, v, sources):
    groups = q.unflatten(1, (k.size(1), -1)).unbind(2)
    return sum(depth_attention(one, k, v, sources) for one in groups) / len(groups)


def mix_taken_apart(q, k, v, sources):
    keys, values = zip(*sources)
    return depth_attention(q, k, v, list(zip(keys, values)))


WRONG_MIX = [
    (mix_own_twice, 'own key and value in the softmax twice'),
    (mix_averaged_weights, 'averages the weights'),
    (lambda q, k, v, sources: v, 'own value, unmixed'),
    (mix_unscaled, 'forgets to divide'),
    (mix_without_own, 'own key and value out'),
    (mix_over_positions, 'do not sum to 1 over the layers'),
    (mix_first_queries, 'takes the first queries'),
    (mix_summed_queries, 'should be averaged'),
    (mix_and_append, 'in place'),
    (mix_detached, 'gradient'),
]


def is_anchor(layer, j, stride):
    return j % stride == 0


def mix_all(layers, stride, reads=is_anchor, raw=False):
    """reads(layer, j, stride): whether j is a source of layer. raw: with its unmixed value."""
    mixed = []
    for layer, (q, k, v) in enumerate(layers):
        sources = []
        for j in range(layer):
            _, k_j, v_j = layers[j]
            if reads(layer, j, stride):
                sources.append((k_j, v_j if raw else mixed[j]))
        mixed.append(depth_attention(q, k, v, sources))
    return mixed


def counts_from_itself(layer, j, stride):
    return (layer - j) % stride == 0


def leaves_out_the_one_below(layer, j, stride):
    return j % stride == 0 and j < layer - 1


def mix_all_taken_apart(layers, stride):
    anchors = []
    for layer, (q, k, v) in enumerate(layers):
        mixed = mix_taken_apart(q, k, v, anchors)
        anchors.append((k, mixed))
    return mixed


WRONG_MIX_ALL = [
    (mix_all_taken_apart, 'Layer 0 has no sources'),
    (but(mix_all, raw=True), 'mixes raw values'),
    (but(mix_all, reads=counts_from_itself), 'the anchors are fixed'),
    (but(mix_all, reads=lambda layer, j, stride: True), 'reads all layers below'),
    (but(mix_all, reads=leaves_out_the_one_below), 'layer l reads each j < l'),
]


# -------------------------------------------------------------------------------------------------
# pondering.py

def scaled_table(gpt):
    return gpt.wte.weight * gpt.config.embed_scale  # (V,C)


def add_mean(gpt, start, x, p):
    return x + p @ scaled_table(gpt)[:p.size(-1)]


def masked_head(gpt, h):
    return gpt.head(h)


def ponder(gpt, idx, steps, step=add_mean, extra=0, head=masked_head):
    """step(gpt, E_0, E_j, P_j) -> E_{j+1}. extra: so many steps too many."""
    pos = torch.arange(idx.size(1))
    start = x = gpt.embed(idx)
    for _ in range(steps + extra):
        p = head(gpt, gpt.trunk(x, pos)).softmax(-1)  # (B,T,V)
        x = step(gpt, start, x, p)
    return gpt.trunk(x, pos)


def ponder_by_the_model(gpt, idx, steps):
    gpt.config.ponder_steps = steps
    return gpt.hidden(idx)


def ponder_as_configured(gpt, idx, steps):
    return ponder(gpt, idx, gpt.config.ponder_steps)


def detached_head(gpt, h):
    return F.linear(h, gpt.lm_head.weight.detach()[:30])


def replace_input(gpt, start, x, p):
    return p @ scaled_table(gpt)


def add_to_start(gpt, start, x, p):
    return start + p @ scaled_table(gpt)


def add_unscaled(gpt, start, x, p):
    return x + p @ gpt.wte.weight


def add_likeliest(gpt, start, x, p):
    return x + scaled_table(gpt)[p.argmax(-1)]


def add_detached(gpt, start, x, p):
    return x + p.detach() @ scaled_table(gpt)


def add_in_place(gpt, start, x, p):
    return x.add_(p @ scaled_table(gpt))


def add_over_positions(gpt, start, x, p):
    return x + p.log().softmax(1) @ scaled_table(gpt)


def add_of_the_next(gpt, start, x, p):
    return x + (p @ scaled_table(gpt)).roll(-1, 1)


def add_to_the_next(gpt, start, x, p):
    mean = p @ scaled_table(gpt)
    return x + F.pad(mean[:, :-1], (0, 0, 1, 0))


WRONG_PONDER = [
    (but(ponder, step=add_to_the_next), 'gives the mean to the next position'),
    (ponder_by_the_model, r'hidden\(\) is what you are to write yourself'),
    (ponder_as_configured, 'reads gpt.config.ponder_steps'),
    (lambda gpt, idx, steps: gpt.head(ponder(gpt, idx, steps)), r'shape \(2, \d, 40\)'),
    (but(ponder, step=add_over_positions), 'does it run over the right axis'),
    (but(ponder, step=add_of_the_next), 'sees the future'),
    (but(ponder, step=add_in_place), 'Backward needs what was overwritten'),
    (but(ponder, head=detached_head), 'way to lm_head.weight'),
    (but(ponder, step=replace_input), 'replaces the input'),
    (but(ponder, step=add_to_start), 'should join the running sum'),
    (but(ponder, step=add_unscaled), 'without its scale'),
    (but(ponder, step=add_likeliest), 'takes the likeliest token'),
    (but(ponder, extra=-1), 'one pass too few'),
    (but(ponder, step=add_detached), 'part of the gradient is lost'),
    (lambda gpt, idx, steps: ponder(gpt, idx, steps).detach(), 'no gradient can flow'),
]


# -------------------------------------------------------------------------------------------------
# jacobi.py

def sequential(gpt, x):
    B, T, _ = x.shape
    memory = gpt.new_memory(T)
    results = []
    for t in range(T):
        pos = memory.begin(B, 1, x.device)
        results.append(gpt.mechanism(gpt, x[:, t:t + 1], pos, memory))
    return torch.cat(results, 1)


def jacobi(gpt, x, R):
    gpt.mechanism.jacobi = R
    memory = no_caches(gpt.mechanism, gpt.config.n_layer)
    pos = memory.begin(*x.shape[:2], x.device)
    return gpt.mechanism(gpt, x, pos, memory)


def iterate(gpt, x, R, zeros=False, block=False, own=False, back=0, read=1, detach=False):
    """
    jacobi() by hand. zeros: as the first guess. block: see join. own: positions for every slot.
    back, read: what is put back, and what is the result: 0 for the outputs at the token slots, 1
    for those at the thoughts' slots.
    """
    T = x.size(1)
    pos = torch.arange(T)
    both = pos.repeat(2) if block else pos.repeat_interleave(2)
    if own:
        both = torch.arange(2 * T)
    z = torch.zeros_like(x) if zeros else gpt.trunk(x, pos)
    for _ in range(R):
        h = gpt.trunk(join(x, z, block), both)
        z = part(h, block)[back]
        if detach:
            z = z.detach()
    h = gpt.trunk(join(x, z, block), both)
    return part(h, block)[read]


def join(x, z, block):
    """x_0 z_0 x_1 z_1 .., (B, 2T, C); in a block, x_0 x_1 .. z_0 z_1 .."""
    if block:
        return torch.cat((x, z), 1)
    return torch.stack((x, z), 2).flatten(1, 2)


def part(h, block):
    """The outputs at the token slots and those at the thoughts' slots, (B, T, C) each."""
    if block:
        return h.chunk(2, 1)
    return h[:, 0::2], h[:, 1::2]


WRONG_SEQUENTIAL = [
    (lambda gpt, x: iterate(gpt, x, 9, block=True), 'right after it'),
    (lambda gpt, x: gpt.trunk(x, torch.arange(x.size(1))), 'what the plain model gives'),
    (lambda gpt, x: iterate(gpt, x, 9, own=True), 'a position of its own'),
    (lambda gpt, x: iterate(gpt, x, 9, read=0), 'outputs at the token slots'),
]
WRONG_JACOBI = [
    (but(iterate, read=0), 'outputs at the token slots'),
    (but(iterate, own=True), 'a position of its own'),
    (but(iterate, block=True), 'they take turns'),
    (but(iterate, back=1), "puts the outputs at the thoughts' slots back"),
    (but(iterate, zeros=True), r'ran passes of \[10\] slots; asked for are \[5, 10\]'),
    (lambda gpt, x, R: jacobi(gpt, x, R + 1), 'one iteration more than asked'),
    (but(iterate, detach=True), 'part of the gradient is lost'),
]
WRONG_ITERATIONS_NEEDED = [
    (lambda T: T, 'more than it takes'),
    (lambda T: 3, 'more than it takes'),
    (lambda T: min(T - 1, 3), 'is not exact yet, after them it is still off by'),
]


# -------------------------------------------------------------------------------------------------
# halting.py

class Frozen:
    freeze = True      # halted tokens keep their keys and values
    stored = 'frozen'  # or 'raw', or 'in place', over those of the pass before
    source = None      # a layer whose keys and values all layers keep

    def __init__(self, n_layer, active=None, before=None):
        self.k = [None] * n_layer
        self.v = [None] * n_layer
        self.active = active
        self.before = before

    def update(self, layer, k, v):
        self.k[layer], self.v[layer] = k, v
        if self.freeze and self.before is not None:
            source = layer if self.source is None else self.source
            keep = self.active[:, None, :, None]
            k = torch.where(keep, k, self.before.k[source])
            v = torch.where(keep, v, self.before.v[source])
        if self.stored != 'raw':
            self.k[layer], self.v[layer] = k, v
        if self.stored == 'in place' and self.before is not None:
            self.before.k[layer].copy_(k)
            self.before.v[layer].copy_(v)
        return k, v

    def mask(self, S, device):
        return None


class DetachedFrozen(Frozen):
    def update(self, layer, k, v):
        k, v = super().update(layer, k, v)
        return k.detach(), v.detach()


WRONG_FROZEN = [
    (sub(Frozen, freeze=False), 'all keys anew'),
    (sub(Frozen, stored='raw'), 'should hold them too'),
    (sub(Frozen, stored='in place'), 'writes into self.before'),
    (sub(Frozen, source=0), 'of another layer'),
]


def think(gpt, gates, x, pos, tau,
          gate=torch.sigmoid,  # makes g of what a gate returns
          go=torch.ge,         # g >= tau: who goes on
          monotone=True,       # who has halted never wakes up again
          scale=True,          # the gate scales the mean embedding
          freeze=True,         # the readout of halted tokens
          count_first=True,    # the first pass is a pass
          remember=True,       # each memory knows the one of the pass before
          memory=Frozen):
    m = torch.ones(x.shape[:2], dtype=torch.bool)
    passes = torch.zeros(x.shape[:2], dtype=torch.long)
    before = None
    for i in range(len(gates) + 1):
        active = None if before is None else m
        new = memory(gpt.config.n_layer, active, before)
        h = gpt.trunk(x, pos, new)
        if remember:
            before = new

        if i == 0 or not freeze:
            readout = h
        else:
            readout = torch.where(m[..., None], h, readout)
        if i > 0 or count_first:
            passes = passes + m
        if i == len(gates):
            return readout, passes

        g = gate(gates[i](h)).squeeze(-1)
        m = m & go(g, tau) if monotone else go(g, tau)
        factor = m * g if scale else m
        x = x + factor[..., None] * mixture(gpt, h)


def think_in_floats(*args):
    readout, passes = think(*args)
    return readout, passes.float()


WRONG_THINK = [
    (but(think, memory=DetachedFrozen), 'part of the gradient is lost'),
    (but(think, go=torch.gt), 'nobody halts while g >= tau'),
    (but(think, gate=lambda z: z), 'the sigmoid of it is g'),
    (but(think, gate=lambda z: z.sigmoid().detach()), 'part of the gradient is lost'),
    (think_in_floats, 'and not in torch.float32'),
    (but(think, monotone=False), 'never wakes up again'),
    (but(think, freeze=False), 'readout of halted tokens moves on'),
    (but(think, scale=False), 'the gate should scale it'),
    (but(think, count_first=False), 'the first one included'),
    (but(think, go=torch.lt), r'think\(\) counts 1 .* 4 is right'),
    (but(think, remember=False), 'should read the frozen keys and values'),
]


# -------------------------------------------------------------------------------------------------
# flops.py

@functools.cache
def model_of(fields):
    """A model without numbers; fields: ((name, value), ..) of its GPTConfig."""
    with shapes_only():
        return GPT(GPTConfig(**dict(fields)))


def model_flops(c, T, training=False):
    fields = tuple(vars(c).items())
    return model_of(fields).flops_per_token(T, training)


def forward_flops(c, T):
    return model_flops(replace(c, ponder='none'), T)


def fair_tokens(c, T, tokens):
    plain = replace(c, ponder='none')
    return tokens * model_flops(c, T, training=True) / model_flops(plain, T, training=True)


def forward_and(difference):
    """forward_flops() with a difference(c) added."""
    return lambda c, T: forward_flops(c, T) + difference(c)


def look_up(c):
    return 2 * c.vocab_size * c.n_embd


def one_matrix_of_the_mlp(c):
    return 2 * c.n_layer * c.mlp_hidden * c.n_embd


def all_keys(c):
    return 2 * c.n_layer * c.n_embd * c.n_kv_head * c.head_dim


def forward_with_all_heads(c, T):
    return forward_flops(replace(c, n_kv_head=c.n_head), T)


def ponder_one_less(c, T):
    return model_flops(replace(c, ponder_steps=max(0, c.ponder_steps - 1)), T)


def ponder_without_mixtures(c, T):
    return (c.ponder_steps + 1) * forward_flops(c, T)


WRONG_FORWARD_FLOPS = [
    (lambda c, T: forward_flops(c, T) / 2, 'half of what it should be'),
    (forward_and(lambda c: -one_matrix_of_the_mlp(c)), 'two matrices in the MLP'),
    (forward_and(look_up), 'it is a look-up'),
    (forward_with_all_heads, 'they have n_kv_head'),
    (forward_and(lambda c: -all_keys(c)), 'or the values'),
]
WRONG_PONDER_FLOPS = [
    (ponder_one_less, r's steps are s \+ 1 passes'),
    (ponder_without_mixtures, 'and then a mixture'),
]
WRONG_FAIR_TOKENS = [
    (lambda c, T, tokens: tokens ** 2 / fair_tokens(c, T, tokens), 'upside down'),
    (lambda c, T, tokens: 4 * tokens, 'counts passes only'),
]


# -------------------------------------------------------------------------------------------------
# all of them

SOLUTIONS = {  # of each exercise, in the order in which its check asks for them
    'attention': dict(attention=attention_of_torch),
    'rope': dict(angles=angles, rotate=rotate),
    'kv_cache': dict(Cache=Cache, generate=generate),
    'depth_attention': dict(mix=depth_attention, mix_all=mix_all),
    'pondering': dict(ponder=ponder),
    'jacobi': dict(sequential=sequential, jacobi=jacobi, iterations_needed=lambda T: T - 1),
    'halting': dict(Frozen=Frozen, think=think),
    'flops': dict(forward_flops=forward_flops, ponder_flops=model_flops, fair_tokens=fair_tokens),
}
WRONG = {  # (exercise, function or class): [(what the student wrote, words of the answer), ..]
    ('attention', 'attention'): WRONG_ATTENTION,
    ('rope', 'angles'): WRONG_ANGLES,
    ('rope', 'rotate'): WRONG_ROTATE,
    ('kv_cache', 'Cache'): WRONG_CACHE,
    ('kv_cache', 'generate'): WRONG_GENERATE,
    ('depth_attention', 'mix'): WRONG_MIX,
    ('depth_attention', 'mix_all'): WRONG_MIX_ALL,
    ('pondering', 'ponder'): WRONG_PONDER,
    ('jacobi', 'sequential'): WRONG_SEQUENTIAL,
    ('jacobi', 'jacobi'): WRONG_JACOBI,
    ('jacobi', 'iterations_needed'): WRONG_ITERATIONS_NEEDED,
    ('halting', 'Frozen'): WRONG_FROZEN,
    ('halting', 'think'): WRONG_THINK,
    ('flops', 'forward_flops'): WRONG_FORWARD_FLOPS,
    ('flops', 'ponder_flops'): WRONG_PONDER_FLOPS,
    ('flops', 'fair_tokens'): WRONG_FAIR_TOKENS,
}
MISTAKES = [  # (exercise, function or class, what the student wrote, words of the answer)
    (*place, written, words) for place, rows in WRONG.items() for written, words in rows
]
