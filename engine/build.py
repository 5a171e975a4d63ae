"""
The model of a config, as programs make it: model.py's GPT, with the blocks of a released model
where the config names some (engine/variant.py).

    config_of(values)           the config of {setting: value}, as a checkpoint has them
    new_model(config)           with new weights
    without_numbers(config)     its shapes alone: to count, to compare with, to be given weights
"""

import contextlib
from dataclasses import fields

import torch
from torch.overrides import TorchFunctionMode

from engine.variant import ReleasedConfig, with_variant_parts
from model import GPT, GPTConfig


def config_of(values):
    """
    The config of {setting: value}, a ReleasedConfig if they name a variant. What is no setting any
    more is left out: an old checkpoint has it.
    """
    kind = GPTConfig if values.get('variant') is None else ReleasedConfig
    known = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in known})


def new_model(config):
    return with_variant_parts(GPT(config))


class WithoutNormal(TorchFunctionMode):
    """normal_ does nothing in here. On shapes it draws nothing either, but imports the compiler."""

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
