"""
The model of a config, as programs make it: model.py's GPT, with the blocks of a released model
where the config names some (engine/variant.py).

    new_model(config)           with new weights
    without_numbers(config)     its shapes alone: to count, to compare with, to be given weights
"""

import contextlib

import torch
from torch.overrides import TorchFunctionMode

from engine.variant import fit
from model import GPT


def new_model(config):
    return fit(GPT(config))


class WithoutNormal(TorchFunctionMode):
    """normal_ does nothing: without numbers it would not either, but import the compiler first."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.normal_, torch.nn.init.normal_):
            return args[0] if args else kwargs['tensor']
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def shapes_only():
    """Modules made in here need no memory and hardly any time, and compute nothing."""
    with torch.device('meta'), WithoutNormal():
        yield


def without_numbers(config):
    with shapes_only():
        return new_model(config)
