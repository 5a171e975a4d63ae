"""
Compiled decoding: torch.compile of the pass that reads one new token, all blocks in one piece; on a
GPU it is replayed as a CUDA graph. That takes keys whose places in memory never change.
"""

import torch
import torch.nn.functional as F

from engine.hardware import explained
from engine.mechanisms import iterates
from model import (LOG_ZERO, WEIGHT_CHANNELS, LoopMemory, Memories, Memory, SlotMemory,
                   WeightedMemory)


def compile_decoding(model, tokens):
    """
    For a model on its device, whose blocks are not compiled. Its memories have places for so many
    tokens from then on. The first tokens wait for the compiler. `chain`, `pause` and `loop` with
    depth_attn decode as before, and so do models that halt, but for `mask`.
    """
    new_memory = model.new_memory
    model.new_memory = lambda pad=None: fixed(new_memory(pad), tokens, model)
    model.trunk = CompiledTrunk(model)


def fixed(memory, tokens, model):
    """A new memory with fixed places in the place of another, if there is such a one."""
    if isinstance(memory, Memories):
        memory[:] = [fixed(of_pass, tokens, model) for of_pass in memory]
        return memory
    pad = getattr(memory, 'pad', None)
    if pad is None:     # all keys get a weight, and so can be hidden
        pad = torch.zeros(1, dtype=torch.long, device=model.wte.weight.device)
    if type(memory) is SlotMemory and iterates(model):  # not pause: its slots come side by side
        return FixedSlots(pad).with_places(tokens * (model.mechanism.K + 1))
    alone = type(memory) is LoopMemory and not model.config.depth_attn
    if type(memory) in (Memory, WeightedMemory) or alone:
        return FixedMemory(pad).with_places(tokens)
    return memory


class Places(Memory):
    """Keys in places that never move. A new token reads all of them: those not used are hidden."""
    used = 0

    def with_places(self, places):
        self.places = places
        return self

    def take(self, S):
        """Before a pass of S slots."""
        self.here = torch.arange(self.used, self.used + S, device=self.pos.device)
        self.used += S

    def update(self, layer, k, v):
        if layer not in self.keys:
            B, nkv, S, width = k.shape
            keys = k.new_zeros(B, nkv, self.places, width - WEIGHT_CHANNELS)
            self.keys[layer] = F.pad(keys, (0, WEIGHT_CHANNELS), value=LOG_ZERO)
            self.values[layer] = v.new_zeros(B, nkv, self.places, width)
        keys = self.keys[layer].index_copy_(2, self.here, k)
        values = self.values[layer].index_copy_(2, self.here, v)
        if k.size(2) == 1:
            return keys, values
        return keys[:, :, :self.used], values[:, :, :self.used]

    def newest(self, layer, S):
        return (held[layer].index_select(2, self.here) for held in (self.keys, self.values))


class FixedMemory(WeightedMemory, Places):
    """A WeightedMemory with such places."""


class FixedSlots(SlotMemory, Places):

    def begin(self, x):
        super().begin(x)
        self.used_before = self.used

    def rewind(self):
        self.used = self.used_before
        for keys in self.keys.values():
            keys[:, :, self.used:, -WEIGHT_CHANNELS:] = LOG_ZERO


class CompiledTrunk:
    """GPT.trunk, compiled for the passes of new tokens; other passes run as they are."""

    def __init__(self, model):
        self.cuda = model.wte.weight.is_cuda
        self.plain = model.trunk
        self.compiled = torch.compile(model.trunk, mode='reduce-overhead' if self.cuda else None)

    def __call__(self, x, memory=None, norm=True):
        if not isinstance(memory, Places):
            return self.plain(x, memory, norm)
        memory.take(x.size(1))
        if x.size(1) > 1 or not memory.keys:
            return self.plain(x, memory, norm)
        if self.cuda:
            torch.compiler.cudagraph_mark_step_begin()
            for held in (*memory.keys.values(), *memory.values.values()):   # written in place
                torch._dynamo.mark_static_address(held, guard=False)
        with explained():  # the next replay writes where this one did: hence the copy
            return self.compiled(x, memory, norm).clone()
