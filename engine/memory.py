"""
What attention reads, without joining and masking more than it has to. Everything here equals the
memories of model.py; who reads whom is said there, by the rules.

    text_memory     for a text as a whole, as in training. For each rule a pass that knows a quicker
                    way: causal attention without a mask, frozen keys, a bias, interleaved keys
    cache_memory    for a text that is read in pieces, as in generation: buffers
"""

import torch
import torch.nn.functional as F

from engine.attention import Group, KeyBias
from model import (NEVER, Labels, Memories, Memory, by_pass, faded, flat, labels_of, newest,
                   token_times)


def text_memory(gpt):
    """Nothing was read before, nothing follows, and there is no padding."""
    sources = sources_of(gpt.config)
    if gpt.mechanism.rule is not None:
        return TextSlots(gpt.mechanism.rule, sources)
    if gpt.config.ponder == 'none':
        return CausalPass(sources)
    return Memories(CausalPass(sources) for _ in range(gpt.mechanism.K + 1))


def cache_memory(gpt, pad, places):
    """
    A text of at most block_size tokens. places: of so many, for compiled code: a new token reads
    all places behind a mask, so that shapes and addresses never change and one compiled function,
    or one CUDA graph, serves every token.
    """
    sources = sources_of(gpt.config)
    static = places is not None
    tokens = places or gpt.config.block_size
    if gpt.mechanism.rule is not None:
        slots = tokens * gpt.mechanism.slots
        return Cache(sources, slots, pad, static, gpt.mechanism.rule)
    if gpt.config.ponder == 'none':
        return Cache(sources, tokens, pad, static)
    passes = range(gpt.mechanism.K + 1)
    return Memories(Cache(sources, tokens, pad, static) for _ in passes)


NO_LOOPS = ()   # of a memory whose `loops` nobody has set: model.py's Loop sets lists, even empty


def sources_of(config):
    """The layers whose keys and values Depth-Attention asks for."""
    return range(0, config.n_layer, config.depth_stride) if config.depth_attn else ()


# -------------------------------------------------------------------------------------------------
# A text as a whole. Autograd does not allow writing into a buffer that backward still needs: so
# each pass is an object with tensors of its own.


class TextPass:
    """
    Reads what `join` makes of `past`, from the pass before, and of its own keys and values. `join`
    has no side effects, so that compiled code has it too: engine/compile.py.
    """

    def __init__(self, sources, before=None):
        self.sources = sources
        self.before = before        # the pass before, or None
        self.made, self.keys, self.values = {}, {}, {}
        self.loops = NO_LOOPS
        self.ran = set()            # layers

    def mask(self, S, device):
        return None

    def past(self, layer):
        """Tensors for `join`; () if there is no pass before this one."""
        return () if self.before is None else (self.before.keys[layer], self.before.values[layer])

    @staticmethod
    def join(past, k, v):
        """() or (keys, values), k, v -> keys and values to read."""
        if not past:
            return k, v
        return torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)

    def keep(self, layer, made, read):
        """made, read: (k, v) of this pass alone, and with those before it."""
        self.keep_source(layer, made)
        self.keys[layer], self.values[layer] = read

    def keep_source(self, layer, made):
        """For Depth-Attention, which asks for all layers where `loops` is set."""
        if layer in self.sources or self.loops is not NO_LOOPS:
            self.made[layer] = made

    def update(self, layer, k, v):
        assert layer not in self.ran, f"block {layer} ran twice in one pass"
        self.ran.add(layer)
        read = self.join(self.past(layer), k, v)
        self.keep(layer, (k, v), read)
        return read


class CausalPass(TextPass):
    """
    A pass that no other reads: in place of a Memory; or where all slots of all tokens go through at
    once. bias (B,S): added to all scores against a key.
    """

    def __init__(self, sources, bias=None):
        super().__init__(sources)
        self.bias = bias
        self.tokens = 0

    def begin(self, x):
        self.tokens += x.size(1)
        return torch.arange(x.size(1), device=x.device)

    def mask(self, S, device):
        return None if self.bias is None else KeyBias(self.bias)

    def keep(self, layer, made, read):
        self.keep_source(layer, made)


class FrozenPass(TextPass):
    """newest: tokens that have stopped keep the keys and values of the pass before."""

    def __init__(self, sources, before, visible):
        super().__init__(sources, before)
        self.visible = visible      # (B,T)

    def past(self, layer):
        before = super().past(layer)
        return (*before, self.visible[:, None, :, None]) if before else ()

    @staticmethod
    def join(past, k, v):
        if not past:
            return k, v
        old_k, old_v, visible = past
        return torch.where(visible, k, old_k), torch.where(visible, v, old_v)


class ChainPass(TextPass):
    """
    by_pass, where all T tokens take all passes. Keys stand in the order of time, x_0 z_0 x_1 z_1
    .., so that a group of QUERIES tokens reads only a prefix of them: half the work at long T.
    """
    QUERIES = 256

    def __init__(self, sources, before, k):
        super().__init__(sources, before)
        assert k == (before.passes if before else 0), "by_pass: for_pass(k) with the pass's number"
        self.passes = k + 1

    def mask(self, S, device):
        if self.before is None:
            return None
        # Which keys the last group reads. For a group that ends n tokens earlier it is the same,
        # n * passes keys earlier.
        pos = torch.arange(S, device=device)
        last = pos.repeat_interleave(self.passes) <= pos[-self.QUERIES:, None]
        groups = []
        for first in range(0, S, self.QUERIES):
            end = min(first + self.QUERIES, S)
            seen = last[first - end:, (S - end) * self.passes:]
            groups.append(Group(n_keys=end * self.passes, seen=seen))
        return groups

    @staticmethod
    def join(past, k, v):
        if not past:
            return k, v
        return interleaved(past[0], k), interleaved(past[1], v)


def interleaved(before, new):
    """before (B, nkv, T n, hd), n of each token, and new (B, nkv, T, hd): n + 1 of each token."""
    before = before.unflatten(2, (new.size(2), -1))                     # (B, nkv, T, n, hd)
    return torch.cat((before, new.unsqueeze(3)), dim=3).flatten(2, 3)


class RulePass(TextPass):
    """Any rule, by the labels of its slots."""

    def __init__(self, sources, before, rule, query, key, causal=False):
        """
        query, key: the labels of its slots, (B,S) each, as readers and as what is read. causal: the
        rule need not be asked.
        """
        super().__init__(sources, before)
        self.rule = rule
        self.plain_causal = causal
        self.query_labels = query
        self.key_labels = key
        if before is not None:
            self.key_labels = before.key_labels.joined(key)

    def mask(self, S, device):
        if self.plain_causal:
            return None
        return self.rule(self.query_labels[:, :, None], self.key_labels[:, None])[:, None]


class TextSlots:
    """In the place of a SlotMemory."""

    def __init__(self, rule, sources):
        self.rule = rule
        self.sources = sources
        self.tokens = 0
        self.last = None            # the pass before
        self.state = None           # Feedback's

    def begin(self, x):
        B, T = x.shape[:2]
        pos = torch.arange(T, device=x.device)
        self.t = pos.expand(B, T)
        self.tokens += T
        return pos

    def is_token(self):
        return torch.ones_like(self.t, dtype=torch.bool)

    def rewind(self):
        self.last = None

    def for_pass(self, first_k=0, n=1, visible=None, log_w=None):
        T = self.t.size(1)
        if self.rule in (flat, faded) and T > 1:
            assert self.last is None, 'flat, faded: all slots of a text go at once, or rewind()'
        if self.rule is flat and T > 1:
            self.last = CausalPass(self.sources)
        elif self.rule is faded and T > 1:
            if visible is not None:
                log_w = log_w.masked_fill(~visible, -torch.inf)
            self.last = CausalPass(self.sources, bias=log_w)
        elif self.rule is by_pass and visible is None and n == 1:
            self.last = ChainPass(self.sources, self.last, first_k)
        elif self.rule is newest and visible is not None and n == 1:
            self.last = FrozenPass(self.sources, self.last, visible)
        else:
            query, key = labels_of(self.t, first_k, n, visible, log_w)
            self.last = RulePass(self.sources, self.last, self.rule, query, key)
        return self.last

    def for_tokens(self, t, k, log_w):
        """Pass k of some tokens: t (B,n), NEVER for what fills up the rectangle."""
        slots = Labels(t, torch.full_like(t, k), log_w)
        causal = self.last is None and self.rule is by_pass     # one slot of each token
        self.last = RulePass(self.sources, self.last, self.rule, slots, slots, causal)
        return self.last


# -------------------------------------------------------------------------------------------------
# Generation


def earlier(query, key):
    """The rule of Memory.mask in model.py."""
    return key.t <= query.t


class Cache(Memory):
    """
    Buffers for the keys and values of all slots so far, in the place of a Memory or SlotMemory:
    2 L B nkv places hd numbers. Each pass appends its n slots as n columns, in all rows, whose
    labels say who reads them. Where a row has fewer, t is NEVER. Without padding `earlier` and
    `flat` let each slot read all before it: then there are no labels.
    """

    def __init__(self, sources, capacity, pad=None, static=False, rule=earlier):
        super().__init__()
        self.pad = pad
        self.loops = NO_LOOPS
        self.sources = sources
        self.capacity = capacity    # most slots of a row
        self.static = static
        self.rule = rule
        self.ordered = pad is None and rule in (earlier, flat)
        self.places = capacity if static else 0     # there is room for so many now
        self.key_labels = None      # (B, places) each, if there are some
        self.query_labels = None    # of this pass
        self.t = None               # (B,T): times of the tokens that are read now
        self.length = 0             # slots so far
        self.first = 0              # where this pass begins
        self.n_before = 0           # where the tokens that are read now begin
        self.state = None           # Feedback's
        self.compiled = False       # whether the pass is one new token's, in compiled code

    def begin(self, x):
        pos = super().begin(x)
        self.t = token_times(pos, len(x), self.pad)
        self.n_before = self.length
        if self.rule is earlier:
            self.for_pass()
        return pos

    def is_token(self):
        return self.t < NEVER

    # ---- a pass

    def for_pass(self, first_k=0, n=1, visible=None, log_w=None):
        T = self.t.size(1)
        if self.ordered:
            assert T == 1 or self.length == self.n_before, 'flat: all slots of a text go at once'
            self.reserve(T * n, T == 1, self.t.device)
            return self
        query, key = labels_of(self.t, first_k, n, visible, log_w)
        return self.append_slots(query, key, T == 1)

    def for_tokens(self, t, k, log_w):
        """
        A pass of some tokens: t (B,n), NEVER for what fills up the rectangle. k: its number; or
        (B,n), where rows of a batch write ahead of each other.
        """
        slots = Labels(t, torch.as_tensor(k, device=t.device).expand_as(t), log_w)
        return self.append_slots(slots, slots, t.size(1) == 1)

    def append_slots(self, query, key, one_token):
        """query, key: labels (B,S) of the same slots, as readers and as what is read."""
        self.query_labels = query
        self.reserve(key.t.size(1), one_token, key.t.device)
        held = self.key_labels or key[:, :0]
        self.key_labels = Labels(t=self.with_new(held.t, key.t, NEVER),
                                 k=self.with_new(held.k, key.k, 0),
                                 log_w=self.with_new(held.log_w, key.log_w, 0))
        return self

    def with_new(self, held, new, nothing):
        """A label (B, places), held with `new` (B,S) in its places; `nothing` where no slot is."""
        if new is None:
            return None
        more = self.places - held.size(1)
        if more > 0:
            held = F.pad(held, (0, more), value=nothing)
        held[:, self.first:self.length] = new
        return held

    def reserve(self, S, one_token, device):
        """Places for S slots behind those there are, by doubling; perhaps all of one token."""
        self.made, self.ran = {}, set()
        self.first, end = self.length, self.length + S
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} slots, but {end} are needed: "
                             f"make it larger, or slide")
        if end > self.places:
            self.places = min(max(end, 2 * self.places), self.capacity)
        self.compiled = self.static and self.first > 0 and one_token
        self.readable = self.places if self.compiled else end
        if self.compiled:
            self.here = torch.arange(self.first, end, device=device)
        self.length = end

    def mask(self, S, device):
        if not self.ordered:
            key = self.key_labels[:, None, :self.readable]
            return self.as_numbers(self.rule(self.query_labels[:, :, None], key)[:, None])
        if not self.compiled and (S == 1 or self.first == 0):
            return None
        key = torch.arange(self.readable, device=device)
        seen = (key <= key[self.first:self.length, None])[None, None]   # (1, 1, S, readable)
        return self.as_numbers(seen) if self.compiled else seen

    def as_numbers(self, mask):
        """
        Numbers to add to the scores, made once instead of in every layer. Their type is that of the
        keys; before there are any, `mask` is returned as it is.
        """
        if not self.keys:
            return mask
        held = self.keys[min(self.keys)]
        if mask.is_floating_point():
            return mask.to(held.dtype)
        return torch.where(mask, held.new_zeros(()), -torch.inf)

    def update(self, layer, k, v):
        """Keeps k and v without their gradients; returns all of this layer."""
        assert layer not in self.ran, f"block {layer} ran twice in one pass"
        self.ran.add(layer)
        if layer in self.sources or self.loops is not NO_LOOPS:
            self.made[layer] = k, v
        if self.compiled:
            return self.write_here(layer, k, v)
        end = self.length
        self.keys[layer] = self.enlarged(self.keys.get(layer), k)
        self.values[layer] = self.enlarged(self.values.get(layer), v)
        self.keys[layer][:, :, self.first:end] = k.detach()
        self.values[layer][:, :, self.first:end] = v.detach()
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def write_here(self, layer, k, v):
        """The same in compiled code."""
        keys = self.keys[layer].index_copy_(2, self.here, k)
        return keys, self.values[layer].index_copy_(2, self.here, v)

    def enlarged(self, held, new):
        """held (B, nkv, .., hd), or None before the first keys, with a place for each slot."""
        if held is None:
            B, nkv, _, hd = new.shape
            return new.new_zeros(B, nkv, self.places, hd)
        more = self.places - held.size(2)
        return F.pad(held, (0, 0, 0, more)) if more > 0 else held

    # ---- what is there

    def rewind(self):
        """Forget the slots of these tokens."""
        self.length = self.n_before
        if self.key_labels is not None:
            self.key_labels.t[:, self.length:] = NEVER

    def keep_rows(self, rows):
        """Forget all rows of the batch but these (r,)."""
        self.keys = {layer: k[rows] for layer, k in self.keys.items()}
        self.values = {layer: v[rows] for layer, v in self.values.items()}
        if self.key_labels is not None:
            self.key_labels = self.key_labels[rows]

    def all_tensors(self):
        """Keys and values of all layers that have some."""
        return [*self.keys.values(), *self.values.values()]
