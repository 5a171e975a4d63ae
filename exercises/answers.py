"""
The right answers, for the programs that check: marker.py compares what came out of a student's code
with what comes out of these, and an exercise that refuses these says that model.py was changed.
This is a module and no program. To learn from, read model.py: it says why it does the same so.
"""
import math

import torch

from model import Embedding, Memory

# -------------------------------------------------------------------------------------------------
# 1 to 4


def attention(q, k, v):
    g, T = q.size(1) // k.size(1), q.size(2)
    k, v = k.repeat_interleave(g, dim=1), v.repeat_interleave(g, dim=1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))            # (B, nh, T, T)
    seen = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v


def angles(pos, hd, theta):
    return pos[:, None] * theta ** (-torch.arange(0, hd, 2) / hd)


def rotate(x, pos, theta):
    a, b = x.chunk(2, dim=-1)                                           # (B, S, heads, hd/2)
    angle = angles(pos, x.size(-1), theta)[:, None]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Cache:
    keys_per_slot = 1

    def __init__(self):
        self.tokens = 0
        self.pos = None
        self.keys = {}
        self.values = {}

    def begin(self, x):
        first = self.tokens
        self.tokens = first + x.size(1)
        self.pos = torch.arange(first, self.tokens, device=x.device)

    def update(self, layer, k, v):
        if layer in self.keys:
            k = torch.cat((self.keys[layer], k), dim=2)
            v = torch.cat((self.values[layer], v), dim=2)
        self.keys[layer], self.values[layer] = k, v
        return k, v


def mask(S, N, device):
    if S == 1:
        return None
    return torch.ones(S, N, dtype=torch.bool, device=device).tril(N - S)


def generate(gpt, prompt, n):
    cache, out, new = Cache(), prompt, prompt
    for _ in range(n):
        x = gpt.embed(new)
        cache.begin(x)
        h = gpt.trunk(x, cache)
        new = gpt.head(h[:, -1]).argmax(-1, keepdim=True)               # (B,1)
        out = torch.cat((out, new), dim=1)
    return out


def mix(q, k, v, sources):
    B, nkv, T, hd = k.shape
    q = q.reshape(B, nkv, -1, T, hd).mean(2)                            # (B, nkv, T, hd)
    keys = torch.stack([k_j for k_j, _ in sources] + [k])               # (layers, B, nkv, T, hd)
    values = torch.stack([v_j for _, v_j in sources] + [v])
    a = ((q * keys).sum(-1, keepdim=True) / math.sqrt(hd)).softmax(0)
    return (a * values).sum(0)


def mix_all(layers, stride):
    anchors, mixed = [], []
    for layer, (q, k, v) in enumerate(layers):
        mixed.append(mix(q, k, v, anchors))
        if layer % stride == 0:
            anchors = anchors + [(k, mixed[-1])]
    return mixed


# -------------------------------------------------------------------------------------------------
# 5 to 8


def ponder(gpt, idx, steps):
    x = gpt.embed(idx)
    for _ in range(steps):
        p = gpt.head(gpt.trunk(x)).softmax(-1)                          # (B,T,V)
        x = x + p @ (gpt.wte.weight * gpt.config.embed_scale)
    return gpt.trunk(x)


def read(gpt, slots, pos):
    memory = Memory()
    memory.begin(slots)
    memory.pos = pos
    return gpt.trunk(slots, memory)


def sequential(gpt, x):
    slots, results = [], []
    for t in range(x.size(1)):
        slots.append(x[:, t])
        slots.append(last_output(gpt, slots))                           # z_t
        results.append(last_output(gpt, slots))
    return torch.stack(results, dim=1)


def last_output(gpt, slots):
    pos = torch.arange(len(slots)) // 2
    return read(gpt, torch.stack(slots, dim=1), pos)[:, -1]


def jacobi(gpt, x, iterations):
    pos = torch.arange(x.size(1))
    z = gpt.trunk(x)
    for _ in range(iterations + 1):
        slots = torch.stack((x, z), dim=2).flatten(1, 2)                # x_0 z_0 x_1 z_1 ..
        h = read(gpt, slots, pos.repeat_interleave(2))
        z = h[:, 0::2]
    return h[:, 1::2]


def iterations_needed(T):
    return T - 1


class Frozen:
    keys_per_slot = 1

    def __init__(self, T, active=None, before=None):
        self.pos = torch.arange(T)
        self.keys = {}
        self.values = {}
        self.active = active
        self.before = before

    def update(self, layer, k, v):
        if self.before is not None:
            m = self.active[:, None, :, None]
            k = torch.where(m, k, self.before.keys[layer])
            v = torch.where(m, v, self.before.values[layer])
        self.keys[layer], self.values[layer] = k, v
        return k, v


def think(gpt, gates, x, tau):
    m = torch.ones(x.shape[:2], dtype=torch.bool)                       # (B,T)
    memory = Frozen(x.size(1))
    readout = h = gpt.trunk(x, memory)
    passes = m.long()
    for gate in gates:
        s = gate(h).sigmoid().squeeze(-1)
        m = m & (s >= tau)
        x = x + (m * s)[..., None] * Embedding.mixture(gpt, h)
        memory = Frozen(x.size(1), m, memory)
        h = gpt.trunk(x, memory)
        readout = torch.where(m[..., None], h, readout)
        passes = passes + m
    return readout, passes


def forward_flops(c, T):
    trunk, head = trunk_and_head(c, T)
    return trunk + head


def trunk_and_head(c, T):
    width, kv_width = c.n_head * c.head_dim, c.n_kv_head * c.head_dim
    weights = c.n_embd * (width + 2 * kv_width) + width * c.n_embd + 3 * c.n_embd * c.mlp_hidden
    return 2 * c.n_layer * (weights + 2 * T * width), 2 * c.n_embd * c.vocab_size


def ponder_flops(c, T):
    trunk, head = trunk_and_head(c, T)
    K = c.ponder_steps
    return (K + 1) * (trunk + head) + K * head  # a mixture costs as much as a head


def fair_tokens(c, T, tokens):
    return tokens * ponder_flops(c, T) / forward_flops(c, T)  # 3 times both in training


ANSWERS = {  # of each exercise: {what the student writes: a right one}
    'attention': dict(attention=attention),
    'rope': dict(angles=angles, rotate=rotate),
    'kv_cache': dict(Cache=Cache, mask=mask, generate=generate),
    'depth_attention': dict(mix=mix, mix_all=mix_all),
    'pondering': dict(ponder=ponder),
    'jacobi': dict(sequential=sequential, jacobi=jacobi, iterations_needed=iterations_needed),
    'halting': dict(Frozen=Frozen, think=think),
    'flops': dict(forward_flops=forward_flops, ponder_flops=ponder_flops, fair_tokens=fair_tokens),
}
