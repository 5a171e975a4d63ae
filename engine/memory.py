"""
What attention may read. Attention asks one object:

    k, v = memory.update(layer, k, v)    stores this pass's keys and values (B, nkv, S, hd), returns all it has for reading
    memory.mask(S, device)               which of those each of the S queries reads: bool (B or 1, 1, S, readable), or what
                                         is added to the scores; or None for "itself and all before it"; or
                                         [(n, bool (s, n)), ...]: for the first s queries, the next, .., which of the first n

    KVCache         generation, the same number of slots per token         plain, embedding, loop, pause, latent
    StaticCache     the same, for compiled code
    RaggedCache     generation, else: slots vary, or some are hidden       everything that halts; chain
    ChainMemory     no cache: steps read the steps before them             chain
    StepMemory      the same, each token with its own number of steps      router
    FrozenMemory    no cache: tokens that stopped are still read           gate

The other half of halting is thinking.py: which slots still think.
"""

import math

import torch
import torch.nn.functional as F

NEVER = 2 ** 40  # the time of padding: after every slot, so that none reads it


# ----------------------------------------------------------------------------------------------------------------------
# generation

class KVCache:
    """
    A memory for `GPT.trunk`: keeps the keys and values of all slots seen so far, so that a new token costs one slot.

    Holds 2 L B nkv capacity hd numbers, allocated at first use in the dtype of the keys. Depth-Attention stores its
    mixed values here, so it needs not one byte more. Rows of a batch may have different lengths: they are aligned at
    the right end, and `start` (B,) counts the padding tokens on the left of each row, of `slots` slots each, which
    nobody reads.
    """

    def __init__(self, n_layer, capacity, start=None, slots=1):
        self.capacity, self.start, self.slots = capacity, start, slots
        self.slots_now = slots  # in the current pass: `latent` starts with fewer
        self.k, self.v = [None] * n_layer, [None] * n_layer
        self.length = self.tokens = 0  # slots and tokens in use

    def update(self, layer, k, v):
        """Append k, v (B, nkv, S, hd) of one layer, for reading only (no gradient); returns all it holds, (B, nkv, length + S, hd)."""
        if self.k[layer] is None:
            shape = (k.size(0), k.size(1), self.capacity, k.size(3))
            self.k[layer], self.v[layer] = k.new_zeros(shape), v.new_zeros(shape)
        end = self.after(k.size(2))
        self.k[layer][:, :, self.length:end], self.v[layer][:, :, self.length:end] = k.detach(), v.detach()
        if layer == len(self.k) - 1: self.length = end  # the last layer closes the pass
        return self.k[layer][:, :, :end], self.v[layer][:, :, :end]

    def after(self, S):
        """The slots in use after S more; ValueError if there is no room for them."""
        end = self.length + S
        if end > self.capacity: raise ValueError(f"the cache holds {self.capacity} slots, but {end} are needed: make it larger, or slide")
        return end

    def mask(self, S, device):
        """Which slots the next S queries may read: bool (B or 1, 1, S, length + S), or None for "all up to oneself"."""
        if self.start is None and (S == 1 or self.length == 0): return None
        return self.seen(S, self.length + S, device)

    def seen(self, S, slots, device):
        """Which of the first `slots` slots the next S queries may read: bool (B or 1, 1, S, slots)."""
        key = torch.arange(slots, device=device)
        query = key[self.length:self.length + S, None]
        seen = (key <= query)[None, None]
        if self.start is None: return seen
        padding = self.start[:, None, None, None] * self.slots  # of it held, and in this pass:
        padding = padding.clamp(max=self.length) + (padding - self.length).clamp(min=0) // self.slots * self.slots_now
        return seen & (key >= padding) | (key == query)  # padding reads itself: a softmax over nothing would be NaN

    def bytes(self):
        """Bytes allocated so far."""
        return sum(t.numel() * t.element_size() for t in self.k + self.v if t is not None)


class StaticCache(KVCache):
    """
    A KVCache of fixed shapes and addresses: one compiled function, or one CUDA graph, then serves all new tokens. The price: each
    reads all `capacity` slots. Prompts are read as by a KVCache. `compiled`: this pass is one new token's, for GPT.decode_layers.
    """

    def mask(self, S, device):
        self.compiled = self.length > 0 and S <= self.slots_now
        if not self.compiled: return super().mask(S, device)
        end = self.after(S)
        self.place, seen = torch.arange(self.length, end, device=device), self.seen(S, self.capacity, device)
        self.length = end  # here, because `update` would be recompiled for each length
        return torch.where(seen, self.k[0].new_zeros(()), -math.inf)

    def update(self, layer, k, v):
        if not self.compiled: return super().update(layer, k, v)
        return self.k[layer].index_copy_(2, self.place, k), self.v[layer].index_copy_(2, self.place, v)


class RaggedCache:
    """
    The cache where tokens have different numbers of slots, or slots may not read all before them: it holds what was computed,
    row by row, and no more. A query of time t in step k reads the slots of times up to t that were made in steps up to k and
    not replaced by then.
    capacity: for compiled code, as in StaticCache: allocate this many slots per row at once; a new token's pass reads them all.
    """

    def __init__(self, n_layer, start=None, capacity=0):
        self.k, self.v, self.start, self.capacity = [None] * n_layer, [None] * n_layer, start, capacity
        self.tokens, self.time, self.bias = 0, None, None

    def open(self, active, time, step=0, bias=None):
        """
        Make room for a pass over `active` slots of the times (S,) or (B,S) in a step, one for all or (r,n). bias (r,n): added to
        all scores of these keys, now and later. Returns self, a memory for this pass.
        """
        if self.time is None:
            self.used = torch.zeros(active.shape[0], dtype=torch.long, device=time.device)   # slots of each row
            self.time, self.step, self.until = (self.used.new_zeros(len(self.used), 0) for _ in range(3))
        self.rows, time = active.rows, active.time(time)                                      # (r,), (r,n)
        step = torch.as_tensor(step, device=time.device).expand_as(time)
        self.place = self.used[self.rows, None] + torch.arange(time.size(1), device=time.device)  # (r,n)
        self.step_now, self.index = step, None
        self.compiled = self.capacity > 0 and self.k[0] is not None and time.size(1) == 1
        self.end = self.time.size(1) if self.compiled else int(self.place.max()) + 1
        if self.end > self.time.size(1):                                                      # grow by doubling
            more = max(self.end, 2 * self.time.size(1), self.capacity) - self.time.size(1)
            self.time, self.step, self.until = (F.pad(t, (0, more), value=NEVER) for t in (self.time, self.step, self.until))
            if self.bias is not None: self.bias = F.pad(self.bias, (0, more))
        self.some = slice(None) if len(self.rows) == len(self.used) else self.rows            # all rows: a view, not a copy
        here = self.rows[:, None], self.place
        self.time[here], self.step[here], self.until[here] = time, step, NEVER
        self.used[self.rows] += active.valid.sum(1)  # padding stands last and is written over
        key_time, key_step, key_until = (t[self.some, None, :self.end] for t in (self.time, self.step, self.until))
        time, step = time[..., None], step[..., None]                                         # (r,n,1)
        self.seen = ((key_time <= time) & (key_step <= step) & (key_until > step))[:, None]   # (r,1,n,end)
        if bias is not None:
            if self.bias is None: self.bias = bias.new_zeros(self.time.shape)
            self.bias[here] = bias
            self.seen = torch.where(self.seen, self.bias[self.some, None, None, :self.end], -math.inf)
        elif self.k[0] is not None:  # as numbers: attention would convert a bool mask in every layer
            self.seen = torch.where(self.seen, self.k[0].new_zeros(()), -math.inf)
        return self

    def mask(self, S, device):
        return self.seen

    def update(self, layer, k, v):
        """Store k, v (r, nkv, n, hd) of one layer; returns all it holds of these rows, (r, nkv, end, hd)."""
        (_, nkv, _, hd), slots = k.shape, self.time.size(1)
        if self.index is None:  # once per pass, for all layers: where these slots stand among all (B nkv slots)
            heads = self.rows[:, None] * nkv + torch.arange(nkv, device=k.device)             # (r,nkv)
            self.index = (heads[..., None] * slots + self.place[:, None]).flatten()           # (r nkv n)
        readable = []
        for held, new in ((self.k, k), (self.v, v)):                                          # held: (B,nkv,slots,hd) per layer
            if held[layer] is None: held[layer] = new.new_zeros(len(self.used), nkv, 0, hd)
            more = slots - held[layer].size(2)
            if more > 0: held[layer] = F.pad(held[layer], (0, 0, 0, more))
            held[layer].view(-1, hd).index_copy_(0, self.index, new.detach().reshape(-1, hd))
            readable.append(held[layer][self.some, :, :self.end])
        return readable

    def replace(self, which):
        """Which (r,n) of the last pass's slots get a successor in the next step; from then on it is read in their place."""
        self.until[self.rows[:, None], self.place] = torch.where(which, self.step_now + 1, NEVER)

    def forget(self, which):
        """Drop the slots `which` (B,slots); those after them move up. For keys with a bias."""
        gone = which | (self.time == NEVER)
        self.time, self.used, order = self.time.masked_fill(gone, NEVER), (~gone).sum(1), gone.byte().argsort(dim=1, stable=True)
        self.time, self.step, self.until, self.bias = (t.gather(1, order) for t in (self.time, self.step, self.until, self.bias))
        for held in self.k + self.v: held.copy_(held.gather(2, order[:, None, :, None].expand_as(held)))

    def keep(self, rows):
        """Drop all other rows; rows: bool (B,). Without this, every pass over some rows would copy their keys and values."""
        self.k, self.v = [k[rows] for k in self.k], [v[rows] for v in self.v]
        self.used, self.time, self.step, self.until = (t[rows] for t in (self.used, self.time, self.step, self.until))
        self.bias = self.bias[rows] if self.bias is not None else None

    bytes = KVCache.bytes


def new_caches(config, capacity, start=None, ragged=False, static=False):
    """
    Empty caches for generating `capacity` tokens with a model of this config: one for each pass where passes do
    not read each other's keys, else one. start (B,): tokens of padding on the left of each row. ragged: tokens may take different
    numbers of slots, or later steps are hidden. static: for compiled code.
    """
    passes = config.ponder_steps + 1
    if ragged:
        return [RaggedCache(config.n_layer, start, capacity * passes if static else 0)]
    kind = StaticCache if static else KVCache
    caches = 1 if config.ponder in ('none', 'latent', 'pause') else passes
    return [kind(config.n_layer, capacity * config.slots, start, config.slots) for _ in range(caches)]


# ----------------------------------------------------------------------------------------------------------------------
# training, and any other forward without a cache

class PassMemory:
    """The memory of one pass without a cache: gradients forbid writing into a buffer. `before`: the memory of the pass before."""

    def __init__(self, n_layer, before=None):
        self.k, self.v, self.before, self.seen = [None] * n_layer, [None] * n_layer, before, None

    # It changes state, for which a compiled block would be specialised layer by layer. torch.compiler.disable does the same,
    # but imports the compiler with this file: two more seconds before a sample starts. (Private API; in 2.11 to 2.13.)
    @torch._disable_dynamo
    def update(self, layer, k, v):
        """k, v (B, nkv, S, hd) of this pass -> what it may read, made from them and the pass before."""
        if self.before: k, v = self.join(self.before.k[layer], k), self.join(self.before.v[layer], v)
        self.k[layer], self.v[layer] = k, v
        return k, v

    def mask(self, S, device):
        return self.seen


class StepMemory(PassMemory):
    """Each step of a chain reads its own slots and those of the steps before, up to its token's time (1 or B, n)."""

    def __init__(self, n_layer, active, pos, before=None):
        super().__init__(n_layer, before)
        time = active.time(pos)
        self.time = time if before is None else torch.cat((before.time, time), 1)
        if before: self.seen = self.time[:, None, None, :] <= time[:, None, :, None]    # (1 or B, 1, n, keys)

    def join(self, before, new):
        return torch.cat((before, new), 2)


class ChainMemory(PassMemory):
    """
    StepMemory where all T tokens take all steps. Keys stand in the order of time, x_0 z_0 .. x_1 z_1 .., so that each group of QUERIES
    tokens reads a prefix of them: half the work at long T, and one mask of QUERIES times all keys.
    """
    QUERIES = 256

    def __init__(self, n_layer, time, before=None):
        super().__init__(n_layer, before)
        self.steps = n = before.steps + 1 if before else 1
        if not before or len(time) == 1: return  # one token reads all there is
        last = time.repeat_interleave(n) <= time[-self.QUERIES:, None]  # what the last group reads; shifted, the other groups' masks
        groups = zip(range(0, len(time), self.QUERIES), [*range(self.QUERIES, len(time), self.QUERIES), len(time)])
        self.seen = [(end * n, last[begin - end:, (len(time) - end) * n:]) for begin, end in groups]

    def join(self, before, new):
        return torch.cat((before.unflatten(2, (-1, self.steps - 1)), new.unsqueeze(3)), 3).flatten(2, 3)


class FrozenMemory(PassMemory):
    """Tokens that are not `active` keep the keys and values of the pass before."""

    def __init__(self, n_layer, active, pos, before=None):  # pos: unused; Thinking makes this or a StepMemory
        super().__init__(n_layer, before)
        self.active = active.valid                                                      # (B,S)

    def join(self, before, new):
        return torch.where(self.active[:, None, :, None], new, before)


def with_key_bias(q, k, v, bias):
    """
    q, k, v with 8 more dimensions, so that q' k'^T / sqrt(hd) = q k^T / sqrt(hd) + bias: every query gets a 1, key s gets
    sqrt(hd) bias[s]. For bias (B,S) this is what a mask (B,1,S,S) would do, but flash kernels
    can run it: they want multiples of 8, so the other 7 dimensions are 0.
    """
    own = (bias * math.sqrt(k.size(-1))).to(k.dtype)[:, None, :, None].expand(*k.shape[:3], 1)
    return F.pad(F.pad(q, (0, 1), value=1.0), (0, 7)), F.pad(torch.cat((k, own), -1), (0, 7)), F.pad(v, (0, 8))
