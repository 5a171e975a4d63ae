"""
A model made ready for its device, and torch.compile: the blocks for training, a whole pass for
decoding. Both are model.py's own code; with `fast`, what holds keys and values between blocks stays
outside of the compiled code.
"""

import torch

from engine.fast import FastGPT
from engine.hardware import expect_new_lengths, explained, pick_compile, tune_cpu
from engine.loss import recompute_blocks
from engine.memory import NO_LOOPS, Cache, TextPass
from model import by_pass


def prepare(model, settings, device):
    """Move a model to its device, for training with train.py's settings."""
    torch.set_float32_matmul_precision('high')  # TF32 where fp32 is used on CUDA
    if device.type == 'cpu':
        tune_cpu()
    skips, rule = model.mechanism.skips, model.mechanism.rule
    masks = rule is by_pass or (rule is not None and not isinstance(model, FastGPT))    # as tensors
    if skips or masks:
        expect_new_lengths()
    model.to(device)
    if pick_compile(settings.compile, device):
        compile_blocks(model)
    if settings.checkpoint_activations:
        recompute_blocks(model)


def compile_blocks(model):
    """torch.compile the blocks: one's code serves all, so compile time does not grow with depth."""
    torch._dynamo.config.optimize_ddp = False   # it would cut blocks at the ends of DDP's buckets
    torch._dynamo.config.recompile_limit = 128  # variants: of shapes, of Depth-Attention's sources
    # where training skips tokens that stopped, shapes change from step to step
    dynamic = None if model.mechanism.skips else False
    on_tensors = torch.compile(run_block, dynamic=dynamic)
    with_memory = torch.compile(forward_of, dynamic=dynamic)
    for block in model.h:
        block.forward = CompiledBlock(block, on_tensors, with_memory)


class CompiledBlock:
    """
    In the place of a block's forward. With `fast`, what a pass holds stays outside of the compiled
    code; model.py's memories are compiled with it, for each layer anew, and in training alone. In
    generation, where lengths change, a block runs as it is.
    """

    def __init__(self, block, on_tensors, with_memory):
        self.block = block
        self.on_tensors = on_tensors
        self.with_memory = with_memory

    def __call__(self, x, rope, memory, mask):
        if isinstance(memory, TextPass):
            return self.on_text_pass(x, rope, memory, mask)
        if self.block.training:
            return self.with_memory(self.block, x, rope, memory, mask)
        return forward_of(self.block, x, rope, memory, mask)

    def on_text_pass(self, x, rope, memory, mask):
        layer = self.block.attn.layer
        loops = [loop.made[layer] for loop in memory.loops]
        reads = memory.join, memory.past(layer), memory.made, loops
        x, made, read = self.on_tensors(self.block, x, rope, mask, *reads)
        memory.keep(layer, made, read)
        return x


def forward_of(block, x, rope, memory, mask):
    return type(block).forward(block, x, rope, memory, mask)


def run_block(block, x, rope, mask, join, past, made, loops):
    """Block.forward as a function of tensors: x, and the keys and values that it made and read."""
    memory = Reads(join, past, made, loops)
    x = forward_of(block, x, rope, memory, mask)
    return x, memory.new, memory.read


class Reads:
    """A TextPass for one block. made: {layer: (k, v)}; loops: (k, v) of this layer, of each."""

    def __init__(self, join, past, made, loops):
        self.join = join
        self.past = past
        self.made = made
        self.loops = [Loop(of_layer) for of_layer in loops]

    def update(self, layer, k, v):
        self.new = k, v
        self.read = self.join(self.past, k, v)
        return self.read


class Loop:
    """An earlier loop, for one block."""

    def __init__(self, of_layer):
        self.made = AnyLayer(of_layer)


class AnyLayer:
    """{layer: (k, v)}, whatever the layer: its number would make compiled code another."""

    def __init__(self, of_layer):
        self.of_layer = of_layer

    def __getitem__(self, layer):
        return self.of_layer


def compile_decoding(model, places=None):
    """
    Compile the pass of a FastGPT that reads one new token, all blocks in one piece; on a GPU replay
    it as a CUDA graph. For a model on its device, whose blocks are not compiled; caches are static
    from then on, of so many places for tokens (None: block_size). The first tokens wait for the
    compiler.
    """
    model.trunk = CompiledTrunk(model)
    model.static_places = places or model.config.block_size


class CompiledTrunk:
    """
    GPT.trunk, compiled for the passes of new tokens; other passes run as they are. `loop` with
    depth_attn does too: what earlier loops made would not outlast a CUDA graph's next replay.
    """

    def __init__(self, model):
        self.cuda = model.wte.weight.is_cuda
        self.plain = model.trunk
        self.compiled = torch.compile(run_trunk, mode='reduce-overhead' if self.cuda else None)

    def __call__(self, x, pos, memory=None, norm=True):
        is_new_token = isinstance(memory, Cache) and memory.compiled
        if not is_new_token or memory.loops is not NO_LOOPS:
            return self.plain(x, pos, memory, norm)
        mask = memory.mask(x.size(1), x.device)
        if self.cuda:
            torch.compiler.cudagraph_mark_step_begin()
            for held in memory.all_tensors():  # written in place, not copied in
                torch._dynamo.mark_static_address(held, guard=False)
        with explained():  # the next replay writes where this one did: hence the copy
            return self.compiled(self.plain, x, pos, memory, mask, norm).clone()


def run_trunk(trunk, x, pos, cache, mask, norm):
    return trunk(x, pos, NewToken(cache, mask), norm)


class NewToken:
    """A Cache whose pass has begun: its mask was made outside of the compiled code."""

    def __init__(self, cache, mask):
        self.cache = cache
        self.ready_mask = mask
        self.made, self.loops = {}, ()

    def mask(self, S, device):
        return self.ready_mask

    def update(self, layer, k, v):
        self.made[layer] = k, v
        return self.cache.write_here(layer, k, v)
