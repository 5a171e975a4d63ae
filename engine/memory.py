"""
What attention may read. A slot is one vector that goes through the trunk in one pass: a token, or
one of its thoughts. It has a time, the place of its token in the text, and a step: the pass it goes
through, or where a token's slots stand side by side, its place among them. Two rules say who reads
what, and with a single step both are causal attention:

    by pass   a query (time, step) reads the slots with time' <= time and step' <= step: a pass
              reads its own slots and those of earlier passes. Where tokens keep one set of keys,
              a newer slot replaces the older ones of its token
    flat      it reads all slots of earlier tokens, and of its own token those with step' <= step:
              x_0 z_{0,1} z_{0,2} x_1 z_{1,1} .. is one causal sequence

A text that is there as a whole needs no cache: a pass reads itself and perhaps earlier passes. In
generation the tokens read before come from a cache.

    class           reads                                            for
    CausalMemory    its own pass                                     a text: most mechanisms
    FrozenMemory    by pass, newer slots replace older ones          a text: gate
    StepMemory      by pass                                          a text: router
    ChainMemory     by pass, where all tokens take all passes        a text: chain
    KVCache         all before; the same number of slots per token   generation: most mechanisms
    StepCache       by pass                                          generation: chain, router
    LatestCache     by pass, newer slots replace older ones          generation: gate
    ThoughtCache    flat, and keys can fade                          generation: mask

They are asked

    begin(B, pos)           by GPT.hidden: tokens at positions pos (T,) follow, in each of B rows
    mask(S, device)         by GPT.blocks, when a pass begins: makes room for its S slots and says
                            who reads what, for engine/attention.py: attend
    update(layer, k, v)     by Attention: takes the keys and values (B, nkv, S, hd) of the pass, and
                            returns all there are to read, (B, nkv, readable, hd)
    open(slots, pos, step)  by a mechanism: the pass to come is number `step`, of these slots
                            (engine/slots.py) at positions pos; returns the memory of this pass
    rewind(n)               by a mechanism: the pass to come has n slots for each of the new tokens,
                            in the place of what passes over them have left behind
    add_bias(bias)          by a mechanism: added to all scores against the keys of this pass, (B,S)

and have `start` (B,), how many tokens of padding each row has on the left (None: none at all), and
`cached`, whether they hold tokens that were read before.
"""

import math

import torch
import torch.nn.functional as F

from engine.attention import Group, KeyBias
from engine.slots import NEVER


class Memories(list):
    """The memories of a text: one for each pass, or one that all share."""
    tokens = 0                      # read so far

    def begin(self, B, T, device):
        """T more tokens follow in each of B rows; returns their positions (T,)."""
        pos = torch.arange(self.tokens, self.tokens + T, device=device)
        for memory in self:
            memory.begin(B, pos)
        self.tokens += T
        return pos


def layout(mechanism):
    """(number of memories, most slots of a token in each)."""
    passes = mechanism.steps + 1
    return (1, passes) if mechanism.one_cache else (passes, 1)


def new_caches(mechanism, n_layer, tokens, start=None, static=False):
    """
    Empty caches for a text of so many tokens. start (B,): tokens of padding on the left of each
    row. static: for compiled code, see KVCache.
    """
    number, slots = layout(mechanism)
    capacity = tokens * slots
    return Memories(mechanism.cache(n_layer, capacity, start, static) for _ in range(number))


def no_caches(mechanism, n_layer):
    """The memories for a text that is there as a whole, as in training."""
    number, _ = layout(mechanism)
    return Memories(mechanism.memory(n_layer) for _ in range(number))


# -------------------------------------------------------------------------------------------------
# A text as a whole. Autograd does not allow writing into a buffer that backward still needs, and a
# block may run again in backward. So each pass has an object of its own, which joins its keys and
# values with those of the pass before.


class CausalMemory:
    """Each slot reads itself and all before it in this pass: nothing is kept."""
    cached = False
    start = None                    # no padding

    def __init__(self, n_layer=None):
        self.bias = None            # (B,S), of the keys

    def begin(self, B, pos):
        """Nothing was read before."""

    def rewind(self, n):
        self.bias = None            # nothing else was left behind

    def add_bias(self, bias):
        self.bias = bias

    def mask(self, S, device):
        return None if self.bias is None else KeyBias(self.bias)

    def update(self, layer, k, v):
        return k, v


class PassMemory:
    """A pass that reads what `join` makes of its keys and values and those of the pass before."""
    cached = False
    start = None

    def __init__(self, n_layer, before=None):
        self.k = [None] * n_layer   # each (B, nkv, readable, hd)
        self.v = [None] * n_layer
        self.before = before        # the memory of the pass before; None in the first
        self.seen = None            # the mask; None: causal

    def begin(self, B, pos):
        """Nothing was read before."""

    def next(self):
        """An empty memory for the pass after this one; `no_caches` makes one before the first."""
        is_first = self.k[0] is None
        return type(self)(len(self.k), None if is_first else self)

    def mask(self, S, device):
        return self.seen

    # It changes the object's state: a compiled block would be compiled anew for every layer.
    # torch.compiler.disable does the same, but imports the compiler with this file: more than a
    # second before a sample starts. (Private; in PyTorch 2.11 to 2.13.)
    @torch._disable_dynamo
    def update(self, layer, k, v):
        if self.before is not None:
            k = self.join(self.before.k[layer], k)
            v = self.join(self.before.v[layer], v)
        self.k[layer], self.v[layer] = k, v
        return k, v


class FrozenMemory(PassMemory):
    """Tokens that have stopped keep the keys and values of the pass before."""

    def open(self, slots, pos, step):
        memory = self.next()
        memory.thinking = slots.valid[:, None, :, None]                 # (B, 1, T, 1)
        return memory

    def join(self, before, new):
        return torch.where(self.thinking, new, before)


class StepMemory(PassMemory):
    """The slots of all passes so far, pass behind pass: the rule needs their times."""

    def open(self, slots, pos, step):
        memory = self.next()
        time = slots.time(pos)                                          # (B,n)
        memory.time = time
        if memory.before is not None:
            memory.time = torch.cat((self.time, time), dim=1)           # (B, readable)
            memory.seen = memory.time[:, None, None, :] <= time[:, None, :, None]
        return memory

    def join(self, before, new):
        return torch.cat((before, new), dim=2)


class ChainMemory(PassMemory):
    """
    StepMemory where all T tokens take all passes. Keys stand in the order of time, x_0 z_0 x_1 z_1
    .., so that a group of QUERIES tokens reads only a prefix of them: half the work at long T.
    """
    QUERIES = 256

    def open(self, slots, pos, step):
        memory = self.next()
        memory.passes = passes = step + 1
        T = len(pos)
        if step == 0 or T == 1:
            return memory  # causal; or one token, which reads all there is
        # Which keys the last group reads. For a group that ends n tokens earlier it is the same,
        # n * passes keys earlier.
        key_pos = pos.repeat_interleave(passes)
        last = key_pos <= pos[-self.QUERIES:, None]                     # (queries, T * passes)
        memory.seen = []
        for first in range(0, T, self.QUERIES):
            end = min(first + self.QUERIES, T)
            seen = last[first - end:, (T - end) * passes:]
            memory.seen.append(Group(n_keys=end * passes, seen=seen))
        return memory

    def join(self, before, new):
        before = before.unflatten(2, (-1, self.passes - 1))             # (B, nkv, T, step, hd)
        return torch.cat((before, new.unsqueeze(3)), dim=3).flatten(2, 3)


# -------------------------------------------------------------------------------------------------
# Generation


class KVCache:
    """
    Keeps the keys and values of all slots so far, so that a new token costs one slot. It holds
    2 L B nkv capacity hd numbers. Depth-Attention stores its mixed values here: not one byte more.

    Rows of a batch are aligned at the right end; start (B,) says how many tokens of padding are on
    the left of each, which nobody reads. static: for compiled code, a new token reads all
    `capacity` slots behind a mask, so that shapes and addresses never change and one compiled
    function, or one CUDA graph, serves every token.
    """
    cached = True

    def __init__(self, n_layer, capacity, start=None, static=False):
        self.k = [None] * n_layer   # each (B, nkv, places, hd), made when its first keys come
        self.v = [None] * n_layer
        self.capacity = capacity    # most slots of a row
        self.places = capacity      # slots there is room for at present
        self.start = start
        self.static = static
        self.length = 0             # slots in use
        self.first = 0              # where this pass begins
        self.began = 0              # where the tokens that are read now begin
        self.rows = None            # of the batch
        self.pos = None             # (T,): positions of the tokens that are read now
        self.compiled = False       # whether the pass is one new token's, in compiled code
        self.real = None            # (B, capacity): slots that are no padding

    def begin(self, B, pos):
        self.rows = B
        self.pos = pos
        self.began = self.length

    def rewind(self, n):
        self.length = self.began

    def begin_pass(self, S, compiled, device):
        """S slots follow those there are; returns the end of the last one."""
        self.first = self.length
        end = self.first + S
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} slots, but {end} are needed: "
                             f"make it larger, or slide")
        self.compiled = compiled
        self.readable = self.places if compiled else end
        if compiled:
            self.here = torch.arange(self.first, end, device=device)
            self.length = end  # not in `update`, which would be compiled anew for each length
        return end

    def mask(self, S, device):
        one_token = self.pos is not None and len(self.pos) == 1  # without `begin`: unknown
        compiled = self.static and self.length > 0 and one_token
        end = self.begin_pass(S, compiled, device)
        if self.start is None and not compiled and (S == 1 or self.first == 0):
            return None
        key = torch.arange(self.readable, device=device)
        query = key[self.first:end, None]
        seen = (key <= query)[None]                                     # (1, S, readable)
        if self.start is not None:
            self.mark_padding(S)
            seen = seen & self.real[:, None, :self.readable]            # (B, S, readable)
            seen = seen | (key == query)  # padding reads itself: a softmax needs something
        return self.as_numbers(seen[:, None]) if compiled else seen[:, None]

    def mark_padding(self, S):
        """Which of the S new slots are no padding; the tokens read now have equally many each."""
        if self.real is None:
            self.real = self.start.new_zeros(len(self.start), self.capacity, dtype=torch.bool)
        real = self.pos >= self.start[:, None]                          # (B,T)
        slots = S // len(self.pos)
        self.real[:, self.first:self.first + S] = real.repeat_interleave(slots, dim=1)

    def as_numbers(self, seen):
        """
        The mask as numbers to add to the scores, made once instead of in every layer. Their type is
        that of the keys: before there are any, `seen` is returned as it is.
        """
        held = self.all_tensors()
        return torch.where(seen, held[0].new_zeros(()), -math.inf) if held else seen

    def update(self, layer, k, v):
        """Keeps k and v without their gradients; returns all of this layer."""
        if self.compiled:
            keys = self.k[layer].index_copy_(2, self.here, k)
            return keys, self.v[layer].index_copy_(2, self.here, v)
        end = self.first + k.size(2)
        self.length = end
        self.k[layer] = self.enlarged(self.k[layer], k)
        self.v[layer] = self.enlarged(self.v[layer], v)
        self.k[layer][:, :, self.first:end] = k.detach()
        self.v[layer][:, :, self.first:end] = v.detach()
        return self.k[layer][:, :, :end], self.v[layer][:, :, :end]

    def enlarged(self, held, new):
        """held (B, nkv, .., hd), or None before the first keys, with a place for each slot."""
        if held is None:
            B, nkv, _, hd = new.shape
            return new.new_zeros(B, nkv, self.places, hd)
        more = self.places - held.size(2)
        return F.pad(held, (0, 0, 0, more)) if more > 0 else held

    def all_tensors(self):
        """Keys and values of all layers that have some."""
        return [t for t in self.k + self.v if t is not None]

    def bytes(self):
        """Bytes allocated so far."""
        return sum(t.numel() * t.element_size() for t in self.all_tensors())


class StepCache(KVCache):
    """
    For slots that are read by pass, or of which tokens have different numbers. Each pass appends
    its n slots as n columns, in all rows; labels say the time and the step of each, from which the
    rule follows. Where a row has fewer slots, the time is NEVER, and nobody reads there. It grows
    by doubling, except in compiled code.
    """

    def __init__(self, n_layer, capacity, start=None, static=False):
        super().__init__(n_layer, capacity, start, static)
        self.places = capacity if static else 0
        self.labels = {}            # name: (B, places)
        self.new = {}               # name: (B, n), of the pass that is opened

    def open(self, slots, pos, step):
        time = slots.time(pos)                                          # (B,n)
        step = torch.as_tensor(step, device=time.device).expand_as(time)
        self.new = {'time': time, 'step': step}
        return self

    def mask(self, S, device):
        compiled = self.static and self.length > 0 and S == 1
        self.places = self.places_for(self.length + S)
        end = self.begin_pass(S, compiled, device)
        self.write_labels(end)
        key = {name: label[:, None, :self.readable] for name, label in self.labels.items()}
        query = {name: label[..., None] for name, label in self.new.items()}
        seen = self.reads(key, query)[:, None]                          # (B, 1, S, readable)
        return self.as_numbers(seen)

    def reads(self, key, query):
        """The rule. Labels of keys (B,1,readable) and queries (B,S,1) -> bool (B,S,readable)."""
        return (key['time'] <= query['time']) & (key['step'] <= query['step'])

    def places_for(self, slots):
        """Columns for so many slots: as many as now, if they suffice, or at least twice that."""
        if slots <= self.places:
            return self.places
        return min(max(slots, 2 * self.places), self.capacity)

    def write_labels(self, end):
        """The labels of the pass that is opened, from `first` to `end`."""
        for name, new in self.new.items():
            nothing = NEVER if name == 'time' else 0
            if name not in self.labels:
                self.labels[name] = new.new_full((len(new), self.places), nothing)
            more = self.places - self.labels[name].size(1)
            if more > 0:
                self.labels[name] = F.pad(self.labels[name], (0, more), value=nothing)
            self.labels[name][:, self.first:end] = new

    def held(self):
        """Slots in the cache, of all rows together."""
        return int((self.labels['time'] < NEVER).sum())

    def keep(self, rows):
        """Forget all rows of the batch but these (r,). Then only `open` may follow, no `begin`."""
        self.k = [None if k is None else k[rows] for k in self.k]
        self.v = [None if v is None else v[rows] for v in self.v]
        self.labels = {name: label[rows] for name, label in self.labels.items()}


class LatestCache(StepCache):
    """
    Where a token's newest slot replaces the ones before it: a query in step k reads the slots of
    step k, and of tokens that stopped before, the last one that they have.
    """

    def write_labels(self, end):
        self.new['replaced'] = torch.zeros_like(self.new['time'], dtype=torch.bool)
        super().write_labels(end)
        time, step, replaced = (self.labels[name] for name in ('time', 'step', 'replaced'))
        same_token = time[:, None] == self.new['time'][..., None]       # (B, n, places)
        pass_before = step[:, None] == self.new['step'][..., None] - 1
        self.labels['replaced'] = replaced | (same_token & pass_before).any(1)

    def reads(self, key, query):
        standing = (key['step'] == query['step']) | ~key['replaced']
        return super().reads(key, query) & standing


class ThoughtCache(StepCache):
    """
    Where the rule is flat: a slot reads all of earlier tokens, and of its own token those up to
    itself. Keys can fade: each has a bias, which is added to all scores against it; -inf hides it.
    """

    def reads(self, key, query):
        earlier = key['time'] < query['time']
        own = (key['time'] == query['time']) & (key['step'] <= query['step'])
        return earlier | own

    def add_bias(self, bias):
        """bias (B,n): of the slots of the pass that is opened."""
        self.new['bias'] = bias

    def rewind(self, n):
        super().rewind(n)
        if self.labels:
            self.labels['time'][:, self.length:] = NEVER
        time = self.pos.expand(self.rows, -1)                           # (B,T)
        if self.start is not None:
            time = time.where(self.pos >= self.start[:, None], NEVER)
        step = torch.arange(n, device=time.device).repeat(self.rows, len(self.pos))  # (B, T n)
        self.new = {'time': time.repeat_interleave(n, dim=1), 'step': step}

    def as_numbers(self, seen):
        bias = self.labels['bias'][:, None, None, :self.readable]       # (B, 1, 1, readable)
        return torch.where(seen, bias, -math.inf)

    def drop_hidden(self):
        """Forget the slots that nobody reads any more; those behind them move up."""
        gone = (self.labels['time'] == NEVER) | (self.labels['bias'] == -math.inf)  # (B, places)
        order = gone.byte().argsort(dim=1, stable=True)                 # the others first
        self.length = int((~gone).sum(1).max())
        self.labels['time'] = self.labels['time'].masked_fill(gone, NEVER)
        self.labels = {name: label.gather(1, order) for name, label in self.labels.items()}
        for held in self.all_tensors():
            held.copy_(held.gather(2, order[:, None, :, None].expand_as(held)))
