"""
What a model is called with. ValueError for what PyTorch would take without a word, or refuse far
from its cause: other shapes, tokens that are none, settings of sampling that mean nothing.

Numbers in tensors are looked at on a CPU only: a GPU would have to be waited for.
"""

import math

import torch

from engine.checks import require
from engine.errors import shown

INTEGERS = (torch.int64, torch.int32)


def check_batch(idx, targets, jacobi, config):
    """Tokens (B,T), and targets of the same shape or None, for GPT.forward."""
    require(isinstance(idx, torch.Tensor), f"tokens should be a tensor (B,T), not {shown(idx)}")
    require(idx.dim() == 2 and 1 <= idx.size(1) <= config.block_size and idx.size(0) > 0,
            f"tokens of shape {tuple(idx.shape)} must be (B,T), T up to "
            f"block_size={config.block_size}")
    require(idx.dtype in INTEGERS, f"tokens should be whole numbers, not {idx.dtype}")
    check_range(idx, 0, config.n_tokens, "tokens")
    require(jacobi is None or is_whole(jacobi, 0), f"jacobi should be a whole number, not "
                                                   f"{shown(jacobi)}")
    if targets is None:
        return
    require(isinstance(targets, torch.Tensor) and targets.shape == idx.shape,
            f"targets should be a tensor of the tokens' shape {tuple(idx.shape)}, the next token "
            f"of each")
    require(targets.dtype == torch.int64, f"targets should be int64, not {targets.dtype}")
    check_range(targets, -math.inf, config.n_tokens, "targets")


def check_range(tokens, low, high, name):
    """ValueError if one of them is below low, or not below high."""
    has_numbers = type(tokens) is torch.Tensor and tokens.device.type == 'cpu'
    if not has_numbers or torch.compiler.is_compiling():
        return
    smallest, largest = (extreme.item() for extreme in tokens.aminmax())
    require(low <= smallest and largest < high,
            f"{name} from {smallest} to {largest}: the model knows 0 to {high - 1} (n_tokens)")


def as_row(prompt, device, n_tokens):
    """A prompt, a tensor or a sequence of whole numbers, as tokens (n,) on the model's device."""
    try:
        row = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"a prompt should be a row of tokens ({error})") from None
    require(row.dim() == 1, f"a prompt of shape {tuple(row.shape)} should be a row of tokens")
    require(len(row) > 0,
            "an empty prompt: give at least one token, such as the end-of-text token")
    whole = not (row.is_floating_point() or row.is_complex() or row.dtype == torch.bool)
    require(whole, f"a prompt should hold whole numbers, not {row.dtype}")
    row = row.long()
    check_range(row, 0, n_tokens, "tokens of a prompt")
    return row.to(device)


def check_sampling(max_new_tokens, temperature, top_k, top_p, seed, stop_token):
    """The settings of engine/generate.py: stream."""
    require(is_whole(max_new_tokens, 0),
            f"max_new_tokens={shown(max_new_tokens)} should be a whole number")
    require(is_number(temperature) and temperature >= 0,
            f"temperature={shown(temperature)} should be 0 or a positive number")
    require(top_k is None or is_whole(top_k, 1),
            f"top_k={shown(top_k)} should be a whole number from 1 on, or None")
    require(top_p is None or (is_number(top_p) and 0 < top_p <= 1),
            f"top_p={shown(top_p)} should be above 0 and at most 1, or None")
    for name, value in (('seed', seed), ('stop_token', stop_token)):
        require(value is None or (is_whole(value, 0) and value < 2 ** 63),
                f"{name}={shown(value)} should be a whole number, or None")


def is_whole(value, least):
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
