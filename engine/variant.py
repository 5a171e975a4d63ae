"""
Models that others released and that are not quite model.py's GPT: what GPTConfig cannot say.

    fit(model, variant)         put the parts that differ into a GPT, before its weights
    variant_of(model)           what was put into it; None for a GPT as it is

A variant is a dictionary of Variant's fields; checkpoints keep it.
"""

from dataclasses import dataclass
from functools import partial

import torch.nn as nn

from engine.neox import Block


@dataclass
class Variant:
    """The defaults are model.py's GPT."""
    input_factor: float = 1.0       # multiplies the embeddings of tokens, not PonderLM's mixtures
    late_k_norm: bool = False       # keys are normed after the rotation, queries before it
    neox: bool = False              # blocks of engine/neox.py, to which the others belong:
    parallel_residual: bool = True
    attention_bias: bool = True
    gelu: str = 'none'              # or 'tanh'
    rotary_dim: int = 0             # channels of a head that turn with the position


def fit(model, variant):
    """Give a new GPT the parts of a variant (None: leave it as it is)."""
    model.variant = variant
    if variant is None:
        return
    v = Variant(**variant)
    if v.input_factor != 1:
        model.wte.register_forward_hook(partial(multiply, v.input_factor))
    if v.late_k_norm:
        for block in model.h:
            block.attn.k_norm, block.attn.k_norm_late = nn.Identity(), block.attn.k_norm
    if v.neox:
        config = model.config
        model.h = nn.ModuleList(Block(block.attn, config, v) for block in model.h)
        model.ln_f = nn.LayerNorm(config.n_embd, config.norm_eps)


def multiply(factor, module, args, x):
    """A forward hook: module's output x, multiplied."""
    return x * factor


def variant_of(model):
    return getattr(model, 'variant', None)


def constructor(GPT, variant):
    """A function that makes a model from a config, as GPT does, and fits the variant to it."""
    def new_model(config):
        model = GPT(config)
        fit(model, variant)
        return model
    return new_model
