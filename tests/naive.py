"""
A GPT with its mechanisms, one slot and one head at a time, straight from the papers' equations; nothing shared with
model.py but the names of the weights. Slow on purpose.

Wrong variants serve as negative controls. Depth-Attention: anchors that enter with their raw values, sources counted
relative to the layer, a cache that keeps raw values. Pondering: mixtures that replace each other instead of adding up, one
cache for all passes, a chain that reads every slot, latents at positions of their own.
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
        self.steps = []  # of each slot

    def read(self, x, t, step=0, upto=None, earlier=()):
        """Output of the blocks for input x at position t, which may see slots of steps <= upto; earlier: [(keys, values)] of earlier loops."""
        c, w = self.c, self.w
        d, g = c.head_dim, c.n_head // c.n_kv_head
        own_k, own_v, raw_v = [], [], []  # this slot's, [layer][kv head]
        self.steps.append(step)
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
                weights = torch.softmax(torch.stack([q[n] @ self.keys[l][i][n // g] for i in visible]) / math.sqrt(d), 0)
                heads.append(sum(weight * now[i][n // g] for weight, i in zip(weights, visible)))
            x = x + w[f'h.{l}.attn.c_proj.weight'] @ torch.cat(heads)
            h = rms(x, w[f'h.{l}.ln_2.weight'], c.norm_eps)
            gate, up = (w[f'h.{l}.mlp.c_fc.weight'] @ h).split(c.mlp_hidden)
            x = x + w[f'h.{l}.mlp.c_proj.weight'] @ (gate * torch.sigmoid(gate) * up)
        self.own = own_k, own_v
        return x

    def norm(self, x):
        return rms(x, self.w['ln_f.weight'], self.c.norm_eps)


def logits(model, tokens, wrong=None, **variants):
    """Logits (T, V) of a list of tokens, each read after all is done for the ones before it."""
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
        if c.ponder == 'none': h = first.norm(first.read(x, t))
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
        rows.append(head(h))
    return torch.stack(rows)
