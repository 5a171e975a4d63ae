"""
Who still thinks, and who goes on to the next token.

    Active         the slots of a batch that still think: gathered for a pass, then put back
    Thinking       slots that take passes until each has had enough: what model.py's `gate`, `router` and (decoding) `mask` return
    run_in_step    decoding where all rows of a batch get their next token together
    run_ahead      decoding with halting: a row goes on to its next token while others still think
"""

import torch

from engine.memory import NEVER


def awake(x, pos, cache):
    """(B,T) bool: all slots but the padding on the left of short prompts."""
    real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return real if cache is None or cache.start is None else pos >= cache.start[:, None]


class Active:
    """
    The slots of (B,S) where `active` is True, as a rectangle (r,n): each row holds, in order, those of one row of the batch, and
    padding where `valid` is False. drop_rows: leave out rows that have none; otherwise r = B. With gather=False the
    rectangle is (B,S) itself: nothing is saved, but shapes stay the same.
    """

    def __init__(self, active, gather=True, drop_rows=False):
        (B, S), self.shape, self.valid = active.shape, active.shape, active
        self.rows = torch.arange(B, device=active.device)                                                  # (r,)
        self.all = gather and bool(active.all())  # then nothing has to be copied
        self.gather = gather and not self.all
        if not self.gather: return
        if drop_rows: self.rows = active.any(1).nonzero()[:, 0]
        n = int(active.sum(1).max())
        self.slots = active[self.rows].byte().argsort(dim=1, descending=True, stable=True)[:, :n]              # (r,n)
        self.index = self.rows[:, None] * S + self.slots                                                   # of (B S)
        self.valid = active.flatten()[self.index]                                                          # (r,n)

    def take(self, x):
        """(B,S,...) or (S,) -> (r,n,...)"""
        if not self.gather: return x
        if x.dim() == 1: return x[self.slots]
        return x.flatten(0, 1).index_select(0, self.index.flatten()).unflatten(0, self.index.shape)

    def put(self, x, new):
        """x (B,S,...) with new (r,n,...) in these slots."""
        if self.all: return new.to(x.dtype)
        if not self.gather: return torch.where(self.valid.view(*self.shape, *[1] * (x.dim() - 2)), new.to(x.dtype), x)
        return x.flatten(0, 1).index_copy(0, self.index[self.valid], new[self.valid].to(x.dtype)).view_as(x)

    def time(self, pos):
        """(r,n): the positions, and NEVER for padding."""
        return torch.where(self.valid, self.take(pos), NEVER)


class Thinking:
    """
    Slots (B,T) that take passes until each has had enough, ponder_steps + 1 at most. One pass is

        new, on = think(trunk, a, k, *state)

    a: the Active that picked the slots which still think. trunk(x (r,n,C), bias (r,n) or None): GPT.trunk for these slots.
    k: how many passes they have had: one number for all, or with a cache (r,n). state: what slots carry from pass to pass, each
    (r,n,..): first the input of the next pass, last the hidden state that predicts. on (r,n): who goes on.

    kind: what attention reads without a cache, FrozenMemory or StepMemory. gather: skip those who stopped instead of
    computing them too; with a cache, always. flat: a token's passes are slots of one causal sequence; else
    pass k reads passes up to k.
    """

    def __init__(self, gpt, think, pos, cache, state, kind=None, gather=True, flat=False):
        self.gpt, self.think, self.pos, self.cache, self.kind, self.flat = gpt, think, pos, cache, kind, flat
        self.gather = gather or cache is not None
        self.state = self.fresh = state
        self.active, self.read = awake(state[0], pos, cache), None
        self.steps = torch.zeros_like(self.active, dtype=torch.long)        # passes of each slot so far
        self.k = 0                                                          # without a cache: passes of all slots together

    def advance(self):
        """One pass; returns the slots for which it was the last, (B,T)."""
        cache, most, was = self.cache, self.gpt.config.ponder_steps, self.active
        a = Active(was, self.gather, drop_rows=cache is not None)
        k = self.k if cache is None else a.take(self.steps)

        def trunk(x, bias=None):                                            # (r,n,C), (r,n) -> (r,n,C)
            if cache is None: self.read = self.kind(self.gpt.config.n_layer, a, self.pos, self.read)
            elif self.flat: self.read = cache.open(a, self.pos * (most + 1) + self.steps, bias=bias)
            else: self.read = cache.open(a, self.pos, k)
            return self.gpt.trunk(x, a.take(self.pos), self.read)

        new, on = self.think(trunk, a, k, *map(a.take, self.state))
        self.state = [a.put(old, t) for old, t in zip(self.state, new)]
        self.active = a.put(was, on & a.valid & (k < most))
        self.steps, self.k = self.steps + was, self.k + 1
        return was & ~self.active

    def finish(self):
        """All passes; returns what predicts the next tokens, (B,T,C). Without `gather`, shapes and the number of passes never vary."""
        for _ in range(self.gpt.config.ponder_steps + 1):
            if self.gather and not self.active.any(): break
            self.advance()
        self.gpt.steps = self.steps
        return self.out

    def next(self, which, x):
        """The slots `which` (B,1) are done: their row's next token, its embedding in x (B,1,C), takes their place."""
        self.state = [torch.where(which.view(-1, *[1] * (t.dim() - 1)), new, t) for t, new in zip(self.state, [x, *self.fresh[1:]])]
        self.pos, self.steps = self.pos + which, self.steps * ~which
        self.active = self.active | which

    def keep(self, rows):
        """Go on with these rows of the batch, bool (B,)."""
        self.state, self.fresh = [t[rows] for t in self.state], [t[rows] for t in self.fresh]
        self.active, self.pos, self.steps = (t[rows] for t in (self.active, self.pos, self.steps))
        self.cache.keep(rows)

    @property
    def out(self):
        return self.state[-1].to(self.state[0].dtype)


# ----------------------------------------------------------------------------------------------------------------------
# decoding

def run_in_step(gpt, tokens, n, h, memory, draw, stop_token):
    """
    Fill tokens (B,end) from place n on, one token per row at a time, and yield (token (B,), passes (B,)) of each place.
    h (B,T,C): the hidden states of what `memory` holds; draw(h, rows): the next tokens of these rows.
    """
    passes = tokens.new_full(tokens.shape[:1], 1 if gpt.config.ponder == 'none' else gpt.config.ponder_steps + 1)
    for n in range(n, tokens.size(1)):
        tokens[:, n] = draw(h[:, -1], slice(None))
        yield tokens[:, n], passes
        if n + 1 < tokens.size(1): h = gpt.hidden(tokens[:, n:n + 1], memory)


def run_ahead(gpt, tokens, n, h, memory, draw, stop_token):
    """
    The same with halting. In step, a batch would wait for the row that thinks longest: most passes would be for a few rows,
    and a pass for a few costs nearly as much as one for all. So a row that had enough goes on to its next token at once.
    A place is yielded as soon as the slowest row is there.
    """
    B, end = tokens.shape
    passes, at = torch.zeros_like(tokens), tokens.new_full((B,), n)          # at: the place each row has reached
    left = torch.arange(B, device=tokens.device)                             # rows that have places to fill
    ready, h, steps = left >= 0, h[:, -1], gpt.steps[:, -1]                  # of these: those whose next token can be drawn
    last = tokens.new_full((B, 1), memory[0].tokens - 1)                     # the position that was read last
    thinking = gpt.mechanism(gpt, gpt.embed(tokens[:, n - 1:n]), last, memory, 0)
    thinking.active = torch.zeros_like(thinking.active)                      # all have had enough about that one
    while True:
        which = ready.nonzero()[:, 0]                                        # once: indexing by a mask waits for the GPU
        rows = left[which]
        token = draw(h[which], rows)
        tokens[rows, at[rows]], passes[rows, at[rows]] = token, steps[which]
        at[rows] += 1
        for row in rows[token == stop_token] if stop_token is not None else ():
            tokens[row, at[row]:], at[row] = stop_token, end                 # it says no more
        while n < at.min():
            yield tokens[:, n], passes[:, n]
            n += 1
        if n == end: return
        more = at[left] < end
        if not more.all():
            left, ready = left[more], ready[more]
            thinking.keep(more)
        thinking.next(ready[:, None], gpt.embed(tokens[left, at[left] - 1, None]))
        while not (ready := thinking.advance()[:, 0]).any(): pass
        h, steps = thinking.out[:, 0], thinking.steps[:, 0]
