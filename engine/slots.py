"""
Who takes the next pass. A text has tokens (B,T); of those that think, a pass needs

    take(x)       what they hold: x (B,T,..) -> (B,n,..), or a dataclass of such tensors
    put(x, new)   x with new (B,n,..) in their places
    valid (B,n)   which of these really think; the others fill up the rectangle
    time(pos)     (B,n): their positions pos (T,), and NEVER for those that do not think

Everyone leaves all tokens where they are: shapes never change, nothing is saved. Gathered picks out
those that think, so that the others cost nothing. `choose` makes one of the two.
"""

from dataclasses import fields, is_dataclass

import torch

NEVER = 2 ** 40  # a time after every query's, so that none reads such a slot


def real_tokens(x, pos, memory):
    """(B,T) bool: all tokens of x (B,T,C) but the padding on the left of short prompts."""
    if memory.start is None:
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return pos >= memory.start[:, None]


def choose(thinking, leave_out):
    """The tokens `thinking` (B,T): gathered, if others are to be left out and there are any."""
    if not leave_out:
        return Everyone(thinking)
    if thinking.all():
        return Everyone(thinking, all_valid=True)
    return Gathered(thinking)


def for_each_field(function, *states):
    """function(a) or function(a, b) for each field of one or two dataclasses of the same kind."""
    results = {}
    for field in fields(states[0]):
        results[field.name] = function(*[getattr(state, field.name) for state in states])
    return type(states[0])(**results)


def like(valid, x):
    """valid (B,n) with as many dimensions as x (B,n,..)."""
    return valid.view(*valid.shape, *([1] * (x.dim() - 2)))


class Everyone:
    """All tokens (B,T) as they stand. Results of those that do not think are thrown away."""

    def __init__(self, thinking, all_valid=False):
        self.valid = thinking
        self.all_valid = all_valid  # then there is nothing to choose between

    def take(self, x):
        return x

    def put(self, x, new):
        if is_dataclass(x):
            return for_each_field(self.put, x, new)
        new = new.to(x.dtype)
        if self.all_valid:
            return new
        return torch.where(like(self.valid, x), new, x)

    def time(self, pos):
        return torch.where(self.valid, pos, NEVER)


class Gathered:
    """
    The tokens that think, side by side: each row holds, in their order, those of one row of the
    batch, and then others, which are not `valid`.
    """

    def __init__(self, thinking):
        B, T = thinking.shape
        n = int(thinking.sum(1).max())
        thinking_first = thinking.byte().argsort(dim=1, descending=True, stable=True)  # (B,T)
        self.column = thinking_first[:, :n]                             # (B,n), of T
        first = torch.arange(B, device=thinking.device)[:, None] * T
        self.place = first + self.column                                # (B,n), of B T
        self.valid = thinking.gather(1, self.column)

    def take(self, x):
        if is_dataclass(x):
            return for_each_field(self.take, x)
        if x.dim() == 1:                                                # (T,), the same in all rows
            return x[self.column]
        picked = x.flatten(0, 1).index_select(0, self.place.flatten())
        return picked.unflatten(0, self.place.shape)

    def put(self, x, new):
        if is_dataclass(x):
            return for_each_field(self.put, x, new)
        new = torch.where(like(self.valid, x), new.to(x.dtype), self.take(x))
        return x.flatten(0, 1).index_copy(0, self.place.flatten(), new.flatten(0, 1)).view_as(x)

    def time(self, pos):
        return torch.where(self.valid, self.take(pos), NEVER)
