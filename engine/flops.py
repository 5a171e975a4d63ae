"""FLOPs: 2 for each multiply-add of a matrix product, as PyTorch's own counter has them."""

from dataclasses import dataclass
from typing import Optional

import torch.nn as nn


@dataclass
class Pass:
    """One pass over all tokens of a text."""
    slots: float = 1                # of each token in it
    keys: int = 1                   # that each slot reads, in multiples of the number of tokens
    layers: Optional[range] = None  # the blocks it runs (None: all)
    key_bias: bool = False          # keys with a bias: engine/attention.py widens their heads


@dataclass
class Cost:
    """What a mechanism does for each token; all but the passes in multiply-adds."""
    passes: list
    decisions: int = 0              # outside of the blocks: gates, routers
    recomputed: int = 0             # the same, but computed once more in backward
    training_only: int = 0          # without a backward pass


def per_token(gpt, T=None, training=True, jacobi=None):
    """
    FLOPs of one token in a text of T tokens (None: block_size), forward and backward, or forward
    alone. With halting nobody halts. jacobi: R of 'latent' and 'mask' (None: jacobi_iters, in
    training half a sweep less, its mean). Attention counts all T keys, read or not, as is usual.
    Left out: norms, activations, sources of earlier loops, blocks that backward recomputes.
    """
    T = T or gpt.config.block_size
    R = jacobi
    if R is None:
        R = gpt.config.jacobi_iters
        if training:
            R = max(R - 0.5, 0)  # train.py draws jacobi_iters or one less
    cost = gpt.mechanism.cost(gpt, R)
    blocks = sum(of_pass(gpt, one, T) for one in cost.passes)
    forward = blocks + gpt.lm_head.weight.numel() + cost.decisions
    if not training:
        return 2 * (forward + cost.recomputed)
    # backward is two forwards
    return 2 * (3 * forward + 4 * cost.recomputed + cost.training_only)


def of_pass(gpt, one, T):
    """Multiply-adds for each token of a pass through the blocks."""
    config = gpt.config
    layers = range(config.n_layer) if one.layers is None else one.layers
    head_width = config.head_dim + (8 if one.key_bias else 0)
    total = 0
    for layer in layers:
        total += linear_weights(gpt.h[layer])
        total += 2 * one.keys * T * config.n_head * head_width  # q k^T, and weights times v
        sources = [j for j in config.sources(layer) if j in layers]
        if sources:  # Depth-Attention: the same over layers
            total += 2 * (len(sources) + 1) * config.n_kv_head * config.head_dim
    return one.slots * total


def linear_weights(module):
    """Multiply-adds of a module's matrix products with its weights, for each slot."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))
