"""
What a token costs, in FLOPs: by what the mechanism's class says (`cost` in model.py), or counted by
PyTorch where it says nothing.
"""

from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from engine.files import UserError
from model import GPT, linear_weights, source_layers


def flops_per_token(gpt, T=None, training=True):
    """
    FLOPs of one token in a text of T (None: block_size), forward and backward, or forward alone: 2
    for each multiply-add of a matrix product, as PyTorch's own counter has them. In training the
    mean over what is drawn; nobody halts. Attention counts all T keys, read or not, as is usual.
    Each matrix of a block is taken to be used once by each vector, one head by each token: for a
    model.py in which it is not, take counted_flops. Left out: norms, activations, sources of
    earlier loops, recomputation, the heads by which Exit trains to leave and to stay.
    """
    c, mechanism = gpt.config, gpt.mechanism
    T = T or c.block_size
    per_slot = linear_weights(gpt.h)                        # multiply-adds, as all that follow
    if c.depth_attn:
        for layer in range(1, c.n_layer):                   # layer 0 has no source
            mixed = len(source_layers(c, layer)) + 1
            per_slot += 2 * mixed * c.n_kv_head * c.head_dim
    per_key = 2 * c.n_layer * c.n_head * c.head_dim         # q k^T, and its weight times v
    counts_itself = 'cost' in vars(type(mechanism))     # what is inherited is not believed
    draws = mechanism.draws() if training else mechanism.draws()[:1]
    total = 0
    for drawn in draws:
        if not counts_itself:
            total += counted_flops(gpt, T, training, drawn)
            continue
        cost = mechanism.cost(gpt, drawn, training)
        adds = cost.vectors * per_slot + cost.keys * T * per_key
        adds += gpt.lm_head.weight.numel() + cost.other
        if training and not mechanism.trains_alone:
            adds *= 3                                   # backward takes twice what forward takes
        if training:
            adds += cost.no_grad
        total += 2 * adds
    return total / len(draws)


def counted_flops(gpt, T, training, drawn):
    """flops_per_token as PyTorch counts it, on a model without numbers."""
    with torch.device('meta'):
        twin = GPT(replace(gpt.config, block_size=T))       # in training mode, where nobody halts
        idx = torch.zeros(1, T, dtype=torch.long)
    twin.mechanism.drawn = drawn
    if twin.mechanism.halts:
        twin.mechanism.progress = 0.0
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        try:
            if training:
                twin(idx, idx)[1].backward()
            else:
                twin(idx)
        except RuntimeError as error:
            if 'meta tensors' not in str(error):
                raise
            raise UserError(f"{type(gpt.mechanism).__name__} of model.py asks for numbers, and "
                            "FLOPs are counted on shapes: give it a `cost` (docs/architecture.md, "
                            "Adding a mechanism)") from None
    return counter.get_total_flops() / T


def flops_of_new_token(gpt, T=None):
    """
    FLOPs of token number T (None: block_size) in generation, as PyTorch counts them: without what
    Depth-Attention mixes. Not for models that halt.
    """
    T = T or gpt.config.block_size
    with torch.device('meta'):
        twin = GPT(gpt.config).eval()
        idx = torch.zeros(1, T, dtype=torch.long)
        memory = twin.new_memory()
        twin.hidden(idx[:, 1:], memory)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            twin.head(twin.hidden(idx[:, :1], memory))
    return counter.get_total_flops()
