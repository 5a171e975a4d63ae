"""
A model made ready for training: on its device, tuned, with what train.py's settings ask for, by
functions around model.py's own code.
"""

import copy
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from engine.cpu import tune_cpu
from engine.hardware import pick_compile, without_cudnn_attention
from engine.skip import skip_stopped_tokens
from model import LoopMemory, Memory, SlotMemory, WeightedMemory, source_layers


def prepare(model, settings, device):
    """Move a model to its device, for training with train.py's settings."""
    torch.set_float32_matmul_precision('high')  # TF32 where fp32 is used on CUDA
    if device.type == 'cpu':
        tune_cpu()
    if model.config.ponder == 'chain':      # its masks are tensors: gradients may be NaN
        without_cudnn_attention()
    model.to(device)
    if model.config.halting == 'router':
        skip_stopped_tokens(model)
    if pick_compile(settings.compile, device):
        compile_blocks(model)
    if settings.checkpoint_activations:
        recompute_blocks(model)


def compile_blocks(model):
    """
    torch.compile each block's q, k and v, and its MLP; the code of one serves all, so compile time
    does not grow with depth. All else stays outside.
    """
    torch._dynamo.config.recompile_limit = 128      # variants of shapes
    # where training skips tokens that stopped, shapes change from step to step
    dynamic = None if model.config.halting == 'router' else False
    for block in model.h:
        block.attn.project = torch.compile(block.attn.project, dynamic=dynamic)
        block.mlp.forward = torch.compile(block.mlp.forward, dynamic=dynamic)


def recompute_blocks(model):
    """Let the blocks of a model run again in backward: less memory, a third more compute."""
    for layer, block in enumerate(model.h):
        block.forward = RunsAgain(block.forward, model.config, layer)


class RunsAgain:
    """
    In the place of a block's forward, which leaves keys and values in the memory. When it runs
    again in backward it finds a memory as it was before, and what it leaves there is for nobody.
    """

    def __init__(self, forward, config, layer):
        self.forward = forward
        self.layers = {layer}       # whose keys and values it reads
        self.one_pass = [Memory, WeightedMemory, SlotMemory]    # read by no later pass
        self.is_source = False      # whether a later block reads them
        if config.depth_attn:
            self.layers.update(source_layers(config, layer))
            self.is_source = layer % config.depth_stride == 0
        else:
            self.one_pass.append(LoopMemory)

    def __call__(self, x, rope, memory):
        if not torch.is_grad_enabled():
            return self.forward(x, rope, memory)
        before, memories = part_of(memory, self.layers), []
        if self.is_source or type(memory) not in self.one_pass:
            memories.append(memory)
        run = partial(self.run, before, memories)
        return checkpoint(run, x, rope, use_reentrant=False)

    def run(self, before, memories, x, rope):
        memory = memories.pop() if memories else part_of(before, self.layers)
        return self.forward(x, rope, memory)


def with_own_dicts(memory):
    """A copy of a memory that can be written to; the tensors in it are the same."""
    twin = copy.copy(memory)
    twin.keys, twin.values = dict(memory.keys), dict(memory.values)
    return twin


def part_of(memory, layers, of_pass_before=False):
    """
    The same with the keys and values of some layers alone, in it and in the memories of passes
    before that it reads: all others may be freed.
    """
    twin = with_own_dicts(memory)
    for layer in memory.keys.keys() - layers:
        del twin.keys[layer], twin.values[layer]
    alone = of_pass_before or type(memory) is WeightedMemory
    for name, value in vars(memory).items():
        if isinstance(value, list):         # of memories
            setattr(twin, name, [] if alone else [part_of(m, layers, True) for m in value])
    return twin
