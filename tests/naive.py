"""
A GPT with its mechanisms, one slot and one head at a time, straight from the papers' equations; nothing shared with
model.py but the names of the weights. Slow on purpose.

Wrong variants serve as negative controls. Depth-Attention: anchors that enter with their raw values, sources counted
relative to the layer, a cache that keeps raw values. Pondering: mixtures that replace each other instead of adding up, one
cache for all passes, a chain that reads every slot, latents at positions of their own. Halting: a stopped token's last hidden
state, keys and values that go on changing, latents that do not fade, keys of steps still to come.
"""
import math

import torch


def rms(x, gain, eps):
    return x / torch.sqrt((x * x).mean() + eps) * gain


def rotate(x, t, theta):
    """Rotary embedding of one head vector at position t, pair (i, i + hd/2) at a time."""
    half, out = len(x) // 2, torch.empty_like(x)
    for i in range(half):
        a = t * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(a) - x[i + half] * math.sin(a)
        out[i + half] = x[i + half] * math.cos(a) + x[i] * math.sin(a)
    return out


class Stack:
    """The blocks and what they remember: one entry per slot read so far."""

    def __init__(self, model, anchors='mixed', stride='absolute', cache='mixed'):
        self.c, self.w = model.config, model.state_dict()
        self.anchors, self.stride, self.cache = anchors, stride, cache
        self.keys, self.values = [[] for _ in range(self.c.n_layer)], [[] for _ in range(self.c.n_layer)]  # [layer][slot][kv head]
        self.steps, self.bias = [], []  # of each slot

    def copy(self, other):
        """Take over the newest slot of another stack, without a pass of its own."""
        for mine, theirs in zip(self.keys + self.values, other.keys + other.values): mine.append(theirs[-1])
        self.steps.append(0)
        self.bias.append(0.0)

    def read(self, x, t, step=0, upto=None, earlier=(), bias=0.0):
        """
        Output of the blocks for input x at position t, which may see slots of steps <= upto; earlier: [(keys, values)] of
        earlier loops; bias: on the scores of this slot as a key.
        """
        c, w = self.c, self.w
        d, g = c.head_dim, c.n_head // c.n_kv_head
        own_k, own_v, raw_v = [], [], []  # this slot's, [layer][kv head]
        self.steps.append(step)
        self.bias.append(bias)
        visible = [i for i, k in enumerate(self.steps) if upto is None or k <= upto]
        for l in range(c.n_layer):
            h = rms(x, w[f'h.{l}.ln_1.weight'], c.norm_eps)
            qkv = (w[f'h.{l}.attn.c_attn.weight'] @ h).view(-1, d)
            q, k, v = list(qkv[:c.n_head]), list(qkv[c.n_head:c.n_head + c.n_kv_head]), list(qkv[c.n_head + c.n_kv_head:])
            if c.qk_norm:
                q = [rms(z, w[f'h.{l}.attn.q_norm.weight'], c.norm_eps) for z in q]
                k = [rms(z, w[f'h.{l}.attn.k_norm.weight'], c.norm_eps) for z in k]
            q, k = [rotate(z, t, c.rope_theta) for z in q], [rotate(z, t, c.rope_theta) for z in k]
            mixed = []
            for n in range(c.n_kv_head):  # Depth-Attention, Eq. 2 and 3, one key/value head at a time
                pairs = []
                if c.depth_attn:
                    s, bank = c.depth_stride, own_v if self.anchors == 'mixed' else raw_v
                    pairs = [(ks[l][n], vs[l][n]) for ks, vs in earlier]
                    pairs += [(own_k[j][n], bank[j][n]) for j in range(l) if (j % s == 0 if self.stride == 'absolute' else (l - j) % s == 0)]
                pairs.append((k[n], v[n]))
                query = sum(q[n * g:(n + 1) * g]) / g
                scores = [0.0 if c.depth_mode == 'uniform' else float(query @ key) / math.sqrt(d) for key, _ in pairs]
                total = sum(math.exp(score) for score in scores)
                mixed.append(sum(math.exp(score) / total * value for score, (_, value) in zip(scores, pairs)))
            own_k.append(k); own_v.append(mixed); raw_v.append(v)
            self.keys[l].append(k)
            self.values[l].append(mixed if self.cache == 'mixed' else v)
            now = self.values[l][:-1] + [mixed]  # a wrong cache shows only from the next slot on
            heads = []
            for n in range(c.n_head):
                weights = torch.softmax(torch.stack([q[n] @ self.keys[l][i][n // g] / math.sqrt(d) + self.bias[i] for i in visible]), 0)
                heads.append(sum(weight * now[i][n // g] for weight, i in zip(weights, visible)))
            x = x + w[f'h.{l}.attn.c_proj.weight'] @ torch.cat(heads)
            h = rms(x, w[f'h.{l}.ln_2.weight'], c.norm_eps)
            gate, up = (w[f'h.{l}.mlp.c_fc.weight'] @ h).split(c.mlp_hidden)
            x = x + w[f'h.{l}.mlp.c_proj.weight'] @ (gate * torch.sigmoid(gate) * up)
        self.own = own_k, own_v
        return x

    def norm(self, x):
        return rms(x, self.w['ln_f.weight'], self.c.norm_eps)


def mlp(w, name, h):
    """Linear, exact GELU, Linear to one number."""
    a = w[f'{name}.0.weight'] @ h + w[f'{name}.0.bias']
    return w[f'{name}.2.weight'][0] @ (a * 0.5 * (1 + torch.erf(a / math.sqrt(2)))) + w[f'{name}.2.bias'][0]


def halting(model, x, t, stacks, expected, wrong):
    """(hidden state that predicts, passes taken) of token embedding x at t, with a way to stop. expected(h): the mean embedding."""
    c, w, s, first = model.config, model.state_dict(), model.config.ponder_steps, stacks[0]
    if c.halting == 'gate':                                     # AdaPonderLM; stacks: one per pass
        for i, stack in enumerate(stacks):
            h = stack.norm(stack.read(x, t))
            if i == s: return h, s + 1
            score = 1 / (1 + math.exp(-mlp(w, f'gates.{i}', h)))
            if score < c.halt_tau: break
            x = x + score * expected(h)
        frozen = h
        for later in stacks[i + 1:]:                            # later tokens find this one's last keys and values
            if wrong in ('keys move', 'readout moves'): h = later.norm(later.read(x, t))
            if wrong != 'keys move':
                if wrong == 'readout moves': [entries.pop() for entries in later.keys + later.values + [later.steps, later.bias]]
                later.copy(stacks[i])
        return (h if wrong == 'readout moves' else frozen), i + 1
    if c.halting == 'mask':                                     # PonderLM-3
        h = first.norm(first.read(x, t))
        odds = [math.exp(row @ h + b) for row, b in zip(w['router.weight'], w['router.bias'])]
        need = [odd / sum(odds) for odd in odds]
        out, taken = need[0] * h, 1
        for k in range(1, s + 1):
            tail = sum(need[k:])
            if tail < c.halt_tau: break
            h = first.norm(first.read(h, t, bias=0.0 if wrong == 'no fading' else math.log(tail)))
            out, taken = out + need[k] * h, taken + 1
        return out, taken
    out, reach, h = 0, 1.0, x                                   # Adaptive Latent CoT
    for k in range(s + 1):
        h = first.norm(first.read(h, t, step=k, upto=None if wrong == 'all visible' else k))
        go_on = 1 / (1 + math.exp(-(w['router.weight'][0] @ h + w['router.bias'][0]))) if k < s else 0.0
        if k == s or reach * go_on < c.halt_tau: return out + reach * h, k + 1
        out, reach = out + reach * (1 - go_on) * h, reach * go_on


def logits(model, tokens, wrong=None, passes=None, **variants):
    """Logits (T, V) of a list of tokens, each read after all is done for the ones before it. passes: a list for those each took."""
    c, w, s = model.config, model.state_dict(), model.config.ponder_steps
    stacks = [Stack(model, **variants) for _ in range(s + 1)]
    if wrong == 'one cache': stacks = stacks[:1] * (s + 1)
    first, rows = stacks[0], []
    table = w['wte.weight'] * c.embed_scale
    def head(h):
        z = w['lm_head.weight'] @ h
        z[c.n_tokens:] = -math.inf
        return z
    for t, token in enumerate(tokens):
        x = table[token]
        if c.halting != 'none':
            h, taken = halting(model, x, t, stacks, lambda h: sum(p * row for p, row in zip(head(h).softmax(0), table)), wrong)
            if passes is not None: passes.append(taken)
        elif c.ponder == 'none': h = first.norm(first.read(x, t))
        elif c.ponder == 'embedding':
            start = x
            for stack in stacks[:-1]:
                z = head(stack.norm(stack.read(x, t)))
                if c.ponder_topk: z[z < z.topk(c.ponder_topk).values[-1]] = -math.inf
                mean = sum(p * row for p, row in zip(z.softmax(0), table))
                x = (start if wrong == 'replace' else x) + mean
            h = stacks[-1].norm(stacks[-1].read(x, t))
        elif c.ponder == 'latent':
            h = x
            for k in range(s + 1): h = first.norm(first.read(h, t * (s + 1) + k if wrong == 'own positions' else t))
        elif c.ponder == 'chain':
            h = x
            for k in range(s + 1): h = first.norm(first.read(h, t, step=k, upto=None if wrong == 'all visible' else k))
        elif c.ponder == 'loop':
            earlier = []
            for stack in stacks:
                x = stack.read(x, t, earlier=tuple(earlier))
                if wrong == 'norm between': x = stack.norm(x)
                earlier.append(stack.own)
            h = x if wrong == 'norm between' else first.norm(x)
        elif c.ponder == 'pause':
            h = first.norm(first.read(x, t))
            for _ in range(s): h = first.norm(first.read(w['pause'] * c.embed_scale, t))
        else: raise NotImplementedError(f"ponder={c.ponder!r} has no slow version here yet")
        rows.append(head(h))
    return torch.stack(rows)
