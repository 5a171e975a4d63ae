"""
The joint between model.py and engine/: a GPT with quicker parts. Each equals the part in whose
place it stands, and tests/test_fast.py compares the two over every toggle.

    in model.py                     here
    Attention.attend                engine/attention.py: a kernel for each mask and length
    Memory, SlotMemory              engine/memory.py: buffers, and no masks where none are needed
    Halting.forward                 `think` below: without the tokens that have stopped
    GPT.loss, GPT.nats,             engine/loss.py: never all logits at once
    Mechanism.by_rows
    GPT.generate                    engine/generate.py: rows that do not wait for each other, texts
                                    longer than block_size

Whoever changes one of the parts on the left changes it on the right too, or writes GPT for FastGPT.
"""

import contextlib
from functools import partial
from unittest import mock

import torch

from engine import generate
from engine.attention import attend
from engine.generate import each
from engine.loss import chunked_cross_entropy, in_parts, nats_in_parts
from engine.memory import Cache, cache_memory, text_memory
from engine.variant import fit
from model import GPT, NEVER, Halting


class FastGPT(GPT):

    def __init__(self, config):
        super().__init__(config)
        fit(self)                       # released models have other blocks
        self.static_caches = False      # for compiled decoding: engine/compile.py
        self.dense = False              # True: over a text nobody is skipped: no shape varies
        for block in self.h:
            block.attn.attend = attend
        self.mechanism.by_rows = in_parts
        if type(self.mechanism).forward is Halting.forward:
            self.mechanism.forward = partial(think, self.mechanism)
        if self.mechanism.trains_alone:
            self.requires_grad_(False)
            self.mechanism.requires_grad_(True)

    # engine/generate.py: token by token, and all of them
    stream = generate.stream
    generate = generate.generate

    def forward(self, idx, targets=None, jacobi=None):
        """jacobi: R of 'latent' and 'mask' outside of training (None: config.jacobi_iters)."""
        if jacobi is None:
            return super().forward(idx, targets)
        with mock.patch.object(self.config, 'jacobi_iters', jacobi):
            return super().forward(idx, targets)

    def hidden(self, idx, memory=None):
        return super().hidden(idx, text_memory(self) if memory is None else memory)

    def new_memory(self, tokens=None, pad=None):
        """tokens: the most that will be read (None: block_size)."""
        return cache_memory(self, tokens or self.config.block_size, pad, self.static_caches)

    def loss(self, h, targets, weights=1.0):
        return chunked_cross_entropy(h, self.lm_head.weight, targets, weights, self.config.n_tokens)

    def nats(self, h, targets):
        if torch.is_grad_enabled() and h.requires_grad:
            return super().nats(h, targets)
        return nats_in_parts(self.head, h, targets, self.config.vocab_size)


@contextlib.contextmanager
def shapes_only():
    """Modules made in here need no memory and hardly any time, and compute nothing."""
    # On these tensors normal_ does nothing, but PyTorch imports for more than a second to do it.
    with torch.device('meta'), mock.patch.object(torch.Tensor, 'normal_', lambda x, *_, **__: x):
        yield


def without_numbers(config):
    """The model of a config as shapes: to count, to compare with, to be given weights."""
    with shapes_only():
        return FastGPT(config)


# -------------------------------------------------------------------------------------------------
# Tokens that have stopped are left out: in generation always, in training where a mechanism needs
# nothing of them, as shapes then change from step to step.


def think(mechanism, gpt, x, pos, memory):
    """Halting.forward of model.py: embeddings x (B,T,C) -> hidden states (B,T,C)."""
    skips = isinstance(memory, Cache) or (mechanism.skips and not gpt.dense)
    if not skips:
        return Halting.forward(mechanism, gpt, x, pos, memory)

    state = mechanism.start(x, go_on=memory.real())
    mechanism.trace = []
    for k in range(mechanism.K + 1):
        on = state.go_on                                                # (B,T)
        some = Some(on)
        part = each(some.take, state)
        reads = memory.open_some(some.t(pos), k, mechanism.labels(part, k))
        x = mechanism.before(gpt, part, k)                              # (B,n,C)
        h = gpt.trunk(x, some.take(pos), reads, norm=mechanism.norm)
        state = each(some.put, state, mechanism.after(gpt, part, x, h, k))
        mechanism.trace.append((on, state))
        if not state.go_on.any():
            break
    mechanism.passes = torch.stack([on for on, _ in mechanism.trace]).sum(0)    # (B,T)
    return state.out.to(x.dtype)


class Some:
    """
    The tokens of `on` (B,T), side by side: each row holds, in their order, those of one row of the
    batch, and then others, to fill up the rectangle (B,n).
    """

    def __init__(self, on):
        B, T = self.shape = on.shape
        self.all = bool(on.all())
        if self.all:
            return
        n = int(on.sum(1).max())
        thinking_first = on.byte().argsort(dim=1, descending=True, stable=True)     # (B,T)
        self.column = thinking_first[:, :n]                             # (B,n), of T
        first = torch.arange(B, device=on.device)[:, None] * T
        self.place = first + self.column                                # (B,n), of B T
        self.valid = on.gather(1, self.column)

    def take(self, x):
        """x (B,T,..), or (T,) which is the same in all rows -> (B,n,..)."""
        if self.all:
            return x
        if x.dim() == 1:
            return x[self.column]
        picked = x.flatten(0, 1).index_select(0, self.place.flatten())
        return picked.unflatten(0, self.place.shape)

    def put(self, x, new):
        """x with new (B,n,..) in the place of these."""
        new = new.to(x.dtype)
        if self.all:
            return new
        valid = self.valid.view(*self.valid.shape, *[1] * (x.dim() - 2))
        new = torch.where(valid, new, self.take(x))
        return x.flatten(0, 1).index_copy(0, self.place.flatten(), new.flatten(0, 1)).view_as(x)

    def t(self, pos):
        """(B,n): their places in the text, and NEVER for what fills up."""
        if self.all:
            return pos.expand(self.shape)
        return torch.where(self.valid, self.take(pos), NEVER)
