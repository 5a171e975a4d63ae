"""
The parts of released models that model.py's GPT has not: GPT-NeoX's block (arXiv 2204.06745), which
Pythia and the PonderLM models on it are made of, keys that are normed after the rotation, scaled
embeddings. FastGPT puts them in where its config names a variant.

The block has the call of model.py's Block. Attention is model.py's own, with biases.
"""

from dataclasses import dataclass
from functools import partial
from typing import Optional

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import GPTConfig, apply_rope, require


@dataclass
class Variant:
    """Without arguments: model.py's GPT. The last four fields count only with neox."""
    input_factor: float = 1.0       # multiplies the embeddings of tokens, not PonderLM's mixtures
    late_k_norm: bool = False       # keys are normed after the rotation, queries before it
    neox: bool = False              # GPT-NeoX's blocks; the fields below are theirs
    parallel_residual: bool = True
    attention_bias: bool = True
    gelu: str = 'none'              # its approximation: 'none' (exact) or 'tanh'
    rotary_dim: int = 0             # channels of a head that turn with the position


@dataclass
class ReleasedConfig(GPTConfig):
    """GPTConfig of a released model."""
    variant: Optional[dict] = None  # Variant's fields


def config_of(values):
    """The config of {setting: value}: a ReleasedConfig if they name a variant."""
    if values.get('variant') is None:
        return GPTConfig(**{name: value for name, value in values.items() if name != 'variant'})
    return ReleasedConfig(**values)


def fit(model):
    """Give a new GPT the parts of its config's variant."""
    config = model.config
    if not isinstance(config, ReleasedConfig):
        return
    v = Variant(**config.variant)
    if v.input_factor != 1:
        model.wte.register_forward_hook(partial(multiply, v.input_factor))
    if v.late_k_norm:
        for block in model.h:
            block.attn.project = partial(project_with_late_norm, block.attn)
    if v.neox:
        require(config.n_kv_head == config.n_head, "GPT-NeoX has as many n_kv_head as n_head")
        model.h = nn.ModuleList(Block(block.attn, config, v) for block in model.h)
        model.ln_f = nn.LayerNorm(config.n_embd, config.norm_eps)


def multiply(factor, module, args, x):
    """A forward hook: module's output x, multiplied."""
    return x * factor


def project_with_late_norm(attention, x, rope):
    """Attention.project of model.py, but for keys that are normed after the rotation."""
    B, S, _ = x.shape
    c = attention.config
    heads = attention.c_attn(x).view(B, S, c.n_head + 2 * c.n_kv_head, c.head_dim)
    q, k, v = heads.split((c.n_head, c.n_kv_head, c.n_kv_head), dim=2)
    q = apply_rope(attention.q_norm(q), *rope)
    k = attention.k_norm(apply_rope(k, *rope))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class MLP(nn.Module):

    def __init__(self, config, gelu):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.mlp_hidden)
        self.c_proj = nn.Linear(config.mlp_hidden, config.n_embd)
        self.gelu = gelu            # 'none': with the error function; 'tanh': an approximation

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate=self.gelu))


class Block(nn.Module):
    """
    LayerNorms and biases, GELU, rotary positions on some channels of a head, and two ways to add:

        parallel    x + attn(ln_1(x)) + mlp(ln_2(x))
        serial      x = x + attn(ln_1(x)), then x + mlp(ln_2(x))
    """

    def __init__(self, attention, config, variant):
        """attention: model.py's, of the same layer. variant: a Variant."""
        super().__init__()
        C, width = config.n_embd, config.n_head * config.head_dim
        attention.c_attn = nn.Linear(C, 3 * width, bias=variant.attention_bias)
        attention.c_proj = nn.Linear(width, C, bias=variant.attention_bias)
        self.ln_1 = nn.LayerNorm(C, config.norm_eps)
        self.attn = attention
        self.ln_2 = nn.LayerNorm(C, config.norm_eps)
        self.mlp = MLP(config, variant.gelu)
        self.drop = nn.Dropout(config.dropout)
        self.parallel = variant.parallel_residual
        still = torch.ones(config.head_dim, dtype=torch.bool, device='cpu')
        still[turning_channels(config.head_dim, variant.rotary_dim)] = False
        self.register_buffer('still', still, persistent=False)          # (hd,)

    def forward(self, x, rope, memory, mask):
        """As Block.forward in model.py."""
        cos, sin = rope
        rope = cos.masked_fill(self.still, 1.0), sin.masked_fill(self.still, 0.0)
        y = self.drop(self.attn(self.ln_1(x), rope, memory, mask))
        if self.parallel:
            return x + y + self.drop(self.mlp(self.ln_2(x)))
        x = x + y
        return x + self.drop(self.mlp(self.ln_2(x)))


# ---- rotary positions ----------------------------------------------------------------------------
# With hd channels in a head, of which the first r turn, GPT-NeoX turns channel j < r/2 together
# with j + r/2, by the angle p theta^(-2j / r) at position p. model.py turns channel c < hd/2
# together with c + hd/2, by p theta^(-2c / hd). Both are the same for c = step j, if their channel
# j stands at c here and theta is chosen for it. The step is 4 where a quarter turns.

def turning_channels(head_dim, rotary_dim):
    """Where the first r channels of GPT-NeoX's heads stand here, in their order: a list of r."""
    step = head_dim // rotary_dim
    first = [step * j for j in range(rotary_dim // 2)]
    return first + [head_dim // 2 + channel for channel in first]


def rope_theta(theta, head_dim, rotary_dim):
    """The theta with which model.py's channels c = step j turn as GPT-NeoX's channels j."""
    step = head_dim // rotary_dim
    return theta ** (head_dim / (step * rotary_dim))


def rows_of_attention(n_head, head_dim, rotary_dim):
    """
    Their query_key_value has q, k and v of head 0, those of head 1, ..; c_attn has q of all heads,
    k of all, v of all. -> (3 nh hd,): the number of their row for each row here.
    """
    turning = turning_channels(head_dim, rotary_dim)
    order = torch.empty(head_dim, dtype=torch.long)
    order[turning] = torch.arange(rotary_dim)
    others = [channel for channel in range(head_dim) if channel not in turning]
    order[others] = torch.arange(rotary_dim, head_dim)
    rows = torch.arange(3 * n_head * head_dim).view(n_head, 3, head_dim)
    q, k, v = rows[:, 0, order], rows[:, 1, order], rows[:, 2]
    return torch.cat((q.flatten(), k.flatten(), v.flatten()))
