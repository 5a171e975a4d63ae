"""
A GPT with Depth-Attention, one token and one head at a time, straight from the papers' equations; nothing shared with
model.py but the names of the weights. Slow on purpose.

Three wrong variants serve as negative controls: anchors that enter with their raw values, sources counted relative to
the layer, and a cache that keeps raw values.
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


def logits(model, tokens, anchors='mixed', stride='absolute', cache='mixed'):
    """Logits (T, V) of a list of tokens, each read after the ones before it from a list of cached keys and values."""
    c, w = model.config, model.state_dict()
    d, g = c.head_dim, c.n_head // c.n_kv_head
    keys, values = [[] for _ in range(c.n_layer)], [[] for _ in range(c.n_layer)]  # [layer][position][kv head]
    result = []
    for t, token in enumerate(tokens):
        x = w['wte.weight'][token] * c.embed_scale
        own_k, own_v, raw_v = [], [], []  # this token's, [layer][kv head]
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
                sources = []
                if c.depth_attn:
                    s = c.depth_stride
                    sources = [j for j in range(l) if (j % s == 0 if stride == 'absolute' else (l - j) % s == 0)]
                query = sum(q[n * g:(n + 1) * g]) / g
                scores = [float(query @ key) / math.sqrt(d) for key in [own_k[j][n] for j in sources] + [k[n]]]
                if c.depth_mode == 'uniform': scores = [0.0] * len(scores)
                total = sum(math.exp(score) for score in scores)
                earlier = own_v if anchors == 'mixed' else raw_v
                parts = [earlier[j][n] for j in sources] + [v[n]]
                mixed.append(sum(math.exp(score) / total * part for score, part in zip(scores, parts)))
            own_k.append(k); own_v.append(mixed); raw_v.append(v)
            keys[l].append(k)
            values[l].append(mixed if cache == 'mixed' else v)
            heads = []
            for n in range(c.n_head):
                now = values[l][:-1] + [mixed]  # a wrong cache shows only from the next token on
                weights = torch.softmax(torch.stack([q[n] @ key[n // g] for key in keys[l]]) / math.sqrt(d), 0)
                heads.append(sum(weight * value[n // g] for weight, value in zip(weights, now)))
            x = x + w[f'h.{l}.attn.c_proj.weight'] @ torch.cat(heads)
            h = rms(x, w[f'h.{l}.ln_2.weight'], c.norm_eps)
            gate, up = (w[f'h.{l}.mlp.c_fc.weight'] @ h).split(c.mlp_hidden)
            x = x + w[f'h.{l}.mlp.c_proj.weight'] @ (gate * torch.sigmoid(gate) * up)
        out = w['lm_head.weight'] @ rms(x, w['ln_f.weight'], c.norm_eps)
        out[c.n_tokens:] = -math.inf
        result.append(out)
    return torch.stack(result)
