"""
Models that others released and that are not quite model.py's GPT: what GPTConfig cannot say.

    fit(model, variant)                 put the parts that differ into a GPT, before its weights are
                                        loaded
    new_model(GPT, variant, config)     a new GPT(config) with these parts
    constructor(GPT, variant)           the same as a function of config
    variant_of(model)                   what was put into it; None for a GPT as it is
    outline(config, variant)            the model of both, with shapes and no numbers
    check_variant(variant, config)      ValueError if they do not fit together

A variant is a dictionary of Variant's fields, or None for model.py's GPT; checkpoints keep it.
"""

from dataclasses import dataclass, fields
from functools import partial

import torch.nn as nn

from engine.checks import check_types, require
from engine.neox import Block
from engine.shapes import shapes_only


@dataclass
class Variant:
    """Without arguments: model.py's GPT. The last four fields count only with neox."""
    input_factor: float = 1.0       # multiplies the embeddings of tokens, not PonderLM's mixtures
    late_k_norm: bool = False       # keys are normed after the rotation, queries before it
    neox: bool = False              # blocks of engine/neox.py; the fields below are theirs
    parallel_residual: bool = True
    attention_bias: bool = True
    gelu: str = 'none'              # its approximation: 'none' (exact) or 'tanh'
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
            block.attn.k_norm_late = block.attn.k_norm
            block.attn.k_norm = nn.Identity()
    if v.neox:
        config = model.config
        model.h = nn.ModuleList(Block(block.attn, config, v) for block in model.h)
        model.ln_f = nn.LayerNorm(config.n_embd, config.norm_eps)


def multiply(factor, module, args, x):
    """A forward hook: module's output x, multiplied."""
    return x * factor


def variant_of(model):
    return getattr(model, 'variant', None)


def outline(config, variant):
    """The model of a GPTConfig and a variant, with shapes and no numbers."""
    model = config.without_weights()
    with shapes_only():
        fit(model, variant)
    return model


def check_variant(variant, config):
    """ValueError for the first thing in a variant that does not fit a GPTConfig; None fits all."""
    if variant is None:
        return
    require(type(variant) is dict, "variant should be a dictionary or None")
    known = {field.name for field in fields(Variant)}
    for name in variant:
        require(name in known, f"variant.{name}: this program knows no such part")
    check_types(Variant, variant)
    v = Variant(**variant)
    require(v.gelu in ('none', 'tanh'), f"gelu={v.gelu!r} must be 'none' or 'tanh'")
    turns = 0 < v.rotary_dim <= config.head_dim and v.rotary_dim % 2 == 0
    require(turns or not v.neox, f"rotary_dim={v.rotary_dim} must be an even number of the "
                                 f"{config.head_dim} channels of a head")
    require(config.n_kv_head == config.n_head or not v.neox,
            "n_kv_head: GPT-NeoX has as many as n_head")


def new_model(GPT, variant, config):
    """A GPT of this config that has the parts of a variant."""
    model = GPT(config)
    fit(model, variant)
    return model


def constructor(GPT, variant):
    """A function that makes a model from a config, as GPT does, with the parts of a variant."""
    return partial(new_model, GPT, variant)
