"""
What a token costs, in FLOPs, by PyTorch's own formulas: 2 for each multiply-add of a matrix
product, and attention as if each query of a call read all its keys. Where logits are many, the head
runs again in backward (some_rows_at_once of model.py), and is counted there, too. Norms,
activations and Depth-Attention's mixing are no matrix products, and are left out.
"""

import contextlib
import math
import sys
from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import model
from engine.build import new_model, shapes_only
from engine.files import UserError


def flops_per_token(gpt, T=None, training=True, texts=1):
    """
    FLOPs of one token in so many texts of T tokens (None: block_size) at once, forward and
    backward, or forward alone. In training the mean over what is drawn, at the beginning of a run;
    nobody halts.

    Of a deep model one layer, two and three are counted: where each more costs the same, so do all.
    In a mechanism of your own some layers may run more often. Then all are counted.
    """
    layers = gpt.config.n_layer
    if layers > 3 and run_equally_often(gpt):
        first, second, third = (counted_flops(gpt, T, training, texts, n) for n in (1, 2, 3))
        if math.isclose(third - second, second - first):
            return first + (layers - 1) * (second - first)
    return counted_flops(gpt, T, training, texts)


def run_equally_often(gpt):
    """Whether a forward pass runs all blocks the same number of times."""
    twin, idx = on_shapes(gpt.config)
    calls = []
    for block in twin.h:
        block.register_forward_pre_hook(lambda block, _: calls.append(block))
    with counted(), torch.no_grad():
        twin(idx)
    return len({calls.count(block) for block in twin.h}) == 1


def on_shapes(config, texts=1):
    """(a model in training, where no token halts yet; texts of its block_size), without numbers."""
    with shapes_only():
        twin = new_model(config).train()
        idx = torch.zeros(texts, config.block_size, dtype=torch.long)
    twin.mechanism.begin_step(-1, 1)    # whatever halt_start is
    return twin, idx


def counted_flops(gpt, T=None, training=True, texts=1, n_layer=None):
    """flops_per_token, with so many layers (None: the model's)."""
    T = T or gpt.config.block_size
    config = replace(gpt.config, block_size=T, n_layer=n_layer or gpt.config.n_layer)
    twin, idx = on_shapes(config, texts)
    mechanism = twin.mechanism
    draws = mechanism.draws() if training else mechanism.draws()[:1]
    total = 0
    for drawn in draws:
        mechanism.drawn = drawn
        with counted() as counter:
            if training:
                twin(idx, idx)[1].backward()
            else:
                twin(idx)
        total += counter.flops
    return total / len(draws) / idx.numel()


class Counter(TorchDispatchMode):
    """Adds up, in `flops`, what the products inside of it cost, by PyTorch's formulas."""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        formula = flop_registry.get(function._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        return out


@contextlib.contextmanager
def counted():
    """A Counter, around code that runs on shapes alone; UserError where it asks for numbers."""
    queries_at_once = model.QUERIES_AT_ONCE
    model.QUERIES_AT_ONCE = sys.maxsize     # else Chain's queries would not read all their keys
    try:
        with sdpa_kernel(SDPBackend.MATH), Counter() as counter:    # attention as two products
            yield counter
    except RuntimeError as error:
        if 'meta tensors' not in str(error):
            raise
        raise UserError("FLOPs are counted on shapes, and something in model.py asks for numbers: "
                        f"{error}") from None
    finally:
        model.QUERIES_AT_ONCE = queries_at_once


def flops_of_new_token(gpt):
    """FLOPs of token number block_size in generation. Not for models that halt."""
    with shapes_only():
        twin = new_model(gpt.config).eval()
        idx = torch.zeros(1, gpt.config.block_size, dtype=torch.long)
        memory = twin.new_memory()
    with torch.no_grad():
        twin.hidden(idx[:, 1:], memory)
        with counted() as counter:
            twin.head(twin.hidden(idx[:, :1], memory))
    return counter.flops
