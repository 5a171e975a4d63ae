"""
The blocks of released models that are not quite model.py's: GPT-NeoX's, which Pythia and the
PonderLM models on it are made of (arXiv 2204.06745), Ouro's, keys that are normed after the
rotation, scaled embeddings. `new_model` of engine/build.py puts them in where a config names a
variant. All have the call of model.py's Block, so every mechanism, cache and tool runs on them.
"""

from dataclasses import dataclass
from functools import partial
from typing import Optional

import torch
import torch.nn as nn
import torch.nn.functional as F

import model
from model import GPTConfig, RMSNorm, apply_rope


@dataclass
class Variant:
    """Without arguments: model.py's GPT."""
    input_factor: float = 1.0       # multiplies the embeddings of tokens, not PonderLM's mixtures
    late_k_norm: bool = False       # keys are normed after the rotation, queries before it
    sandwich: bool = False          # norms behind both branches too, as in Ouro
    neox: bool = False              # GPT-NeoX's blocks; the fields below are theirs
    parallel_residual: bool = True
    attention_bias: bool = True
    gelu: str = 'none'              # its approximation: 'none' (exact) or 'tanh'
    turning: int = 0                # so many channels of a head, the first, turn with the position


@dataclass
class ReleasedConfig(GPTConfig):
    """GPTConfig of a released model."""
    variant: Optional[dict] = None  # Variant's fields


def variant_of(config):
    """The Variant of a GPTConfig."""
    return Variant(**(getattr(config, 'variant', None) or {}))


def with_variant_parts(gpt):
    """Puts the parts of its config's variant into a new GPT; returns it."""
    config = gpt.config
    v = variant_of(config)
    trained = gpt.ln_f.weight.requires_grad     # not where a mechanism learns alone (Ouro)
    if v.input_factor != 1:
        gpt.wte.register_forward_hook(partial(multiply, v.input_factor))
    if v.late_k_norm:
        for block in gpt.h:
            block.attn = LateNormAttention(config, block.attn.layer)
    if v.sandwich:
        gpt.h = nn.ModuleList(SandwichBlock(config, layer) for layer in range(config.n_layer))
    if v.neox:
        gpt.h = nn.ModuleList(NeoxBlock(config, layer, v) for layer in range(config.n_layer))
        gpt.ln_f = nn.LayerNorm(config.n_embd, config.norm_eps)
    for new in gpt.h, gpt.ln_f:
        new.requires_grad_(trained)
    return gpt


def multiply(factor, module, args, x):
    """A forward hook: module's output x, multiplied."""
    return x * factor


def heads_of(attention, x):
    """x (B,S,C) -> q (B,S,nh,hd), k and v (B,S,nkv,hd), neither normed nor rotated."""
    c = attention.config
    heads = attention.c_attn(x).unflatten(-1, (c.n_head + 2 * c.n_kv_head, c.head_dim))
    return heads.split((c.n_head, c.n_kv_head, c.n_kv_head), dim=2)


class LateNormAttention(model.Attention):
    """Keys are normed after the rotation, as in the code of Depth-Attention's authors."""

    def project(self, x, rope):
        q, k, v = heads_of(self, x)
        q = apply_rope(self.q_norm(q), *rope)
        k = self.k_norm(apply_rope(k, *rope))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class SandwichBlock(model.Block):
    """Each branch has a norm behind it, too."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.ln_1_out = RMSNorm(config.n_embd, config.norm_eps)
        self.ln_2_out = RMSNorm(config.n_embd, config.norm_eps)

    def forward(self, x, rope, memory):
        x = x + self.drop(self.ln_1_out(self.attn(self.ln_1(x), rope, memory)))
        return x + self.drop(self.ln_2_out(self.mlp(self.ln_2(x))))


# ---- GPT-NeoX ------------------------------------------------------------------------------------

class NeoxBlock(nn.Module):
    """
    LayerNorms and biases, GELU, rotary positions on some channels of a head, and two ways to add:

        parallel    x + attn(ln_1(x)) + mlp(ln_2(x))
        serial      x = x + attn(ln_1(x)), then x + mlp(ln_2(x))
    """

    def __init__(self, config, layer, variant):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, config.norm_eps)
        self.attn = NeoxAttention(config, layer, variant)
        self.ln_2 = nn.LayerNorm(config.n_embd, config.norm_eps)
        self.mlp = NeoxMLP(config, variant.gelu)
        self.drop = nn.Dropout(config.dropout)
        self.parallel = variant.parallel_residual

    def forward(self, x, rope, memory):
        y = self.drop(self.attn(self.ln_1(x), rope, memory))
        if self.parallel:
            return x + y + self.drop(self.mlp(self.ln_2(x)))
        x = x + y
        return x + self.drop(self.mlp(self.ln_2(x)))


class NeoxAttention(model.Attention):

    def __init__(self, config, layer, variant):
        super().__init__(config, layer)
        C, width, bias = config.n_embd, config.n_head * config.head_dim, variant.attention_bias
        self.c_attn = nn.Linear(C, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, C, bias=bias)
        self.turning = variant.turning

    def project(self, x, rope):
        q, k, v = heads_of(self, x)
        q, k = (turn_first(self.turning, t, rope) for t in (q, k))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def turn_first(n, x, rope):
    """
    Turn the first n channels of each head of x (B,S,heads,hd): j < n/2 and j + n/2 are a pair,
    which turns by the angle that `rope` has for j. GPT-NeoX's angle at position p is
    p theta^(-2j / n), that of model.py p theta^(-2j / hd): rope_theta gives the theta for which
    they are the same.
    """
    rope = [t[..., :n // 2] for t in rope]
    return torch.cat((apply_rope(x[..., :n], *rope), x[..., n:]), dim=-1)


def rope_theta(theta, head_dim, turning):
    return theta ** (head_dim / turning)


class NeoxMLP(nn.Module):

    def __init__(self, config, gelu):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.mlp_hidden)
        self.c_proj = nn.Linear(config.mlp_hidden, config.n_embd)
        self.gelu = gelu

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate=self.gelu))
