"""
engine/memory.py: which slots attention reads, against the rule at the top of that file.

Every slot has a number of its own. Queries and keys are all 0 here, and the value of a slot is its
number as a one-hot vector: what attention returns are the weights with which it reads each slot.
Beside the memory, a plain list holds all slots of a row; a few lines below say who reads what of
such a list.
"""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from engine.attention import attend
from engine.memory import (CausalMemory, ChainMemory, FrozenMemory, KVCache, LatestCache, Memories,
                           StepCache, StepMemory, ThoughtCache, new_caches, no_caches)
from engine.slots import NEVER, Everyone, choose
from model import GPT, GPTConfig

STEPS = 3           # passes, at most
TOKENS = 12         # room in a text
NOBODY = TOKENS * STEPS     # the number of all that fills up a rectangle
WIDTH = NOBODY + 4          # of one-hot vectors: a multiple of 8
LAYERS = 2
PADDINGS = [None, torch.tensor([0, 3, 1])]


@dataclass(frozen=True)
class Slot:
    time: int
    step: int
    bias: float = 0.0

    @property
    def number(self):
        return self.time * STEPS + self.step


def plain_rule(key, query, held):
    return key.time <= query.time and key.step <= query.step


def newest_alone(key, query, held):
    """The rule, where a token's newest slot replaces the ones before it."""
    newer = Slot(key.time, key.step + 1)
    replaced = newer in held and newer.step <= query.step
    return plain_rule(key, query, held) and not replaced


def all_before(key, query, held):
    """All slots stand in one row: those of a token behind those of the token before it."""
    return key.number <= query.number


def weights(query, held, rule):
    """The weights (WIDTH,) with which a slot reads the slots of its row."""
    result = torch.zeros(WIDTH).double()
    for key in held:
        if rule(key, query, held):
            result[key.number] = math.exp(key.bias)
    return result / result.sum()


def read(memory, numbers):
    """A pass of slots with these numbers (B,S): the weights (B, S, WIDTH) that attention gives."""
    values = F.one_hot(numbers, WIDTH).double()[:, None]                # (B, 1, S, WIDTH)
    nothing = torch.zeros_like(values)
    mask = memory.mask(numbers.size(1), numbers.device)
    layers = []
    for layer in range(LAYERS):
        k, v = memory.update(layer, nothing, values)
        layers.append(attend(nothing, k, v, mask)[:, 0])
    assert torch.equal(layers[0], layers[-1])
    return layers[0]


def check_row(got, queries, held, rule):
    """got (n, WIDTH), of these queries."""
    assert len(got) == len(queries)
    for weight, query in zip(got, queries):
        torch.testing.assert_close(weight, weights(query, held, rule))


def real_from(start, B):
    """The first token of each row that is no padding."""
    return [0] * B if start is None else start.tolist()


# a text as a whole, and caches with equally many slots for each token

def test_causal_memory_reads_all_before_in_this_pass():
    for pos in torch.arange(5), torch.arange(5, 7):  # nothing is kept of the first
        memory = CausalMemory()
        memory.begin(3, pos)
        got = read(memory, pos.expand(3, -1) * STEPS)
        queries = [Slot(t, 0) for t in pos.tolist()]
        for row in got:
            check_row(row, queries, queries, all_before)


def test_causal_memory_with_a_bias_for_each_key():
    memory = CausalMemory()
    bias = torch.randn(2, 6, generator=torch.Generator().manual_seed(0)).double()
    memory.rewind(2)
    memory.add_bias(bias)
    slots = [[Slot(t, k, bias[b, 2 * t + k].item()) for t in range(3) for k in range(2)]
             for b in range(2)]
    numbers = torch.tensor([[slot.number for slot in row] for row in slots])
    for got, row in zip(read(memory, numbers), slots):
        check_row(got, row, row, all_before)
    memory.rewind(1)
    for got in read(memory, numbers):
        check_row(got, slots[0], [Slot(s.time, s.step) for s in slots[0]], all_before)


def check_real_and_padding(got, slots, held, start):
    """Rows of a KVCache: a slot reads all real ones before it, and padding itself alone."""
    for row, first in zip(range(len(got)), real_from(start, len(got))):
        real = [slot for slot in held if slot.time >= first]
        for weight, query in zip(got[row], slots):
            if query.time >= first:
                torch.testing.assert_close(weight, weights(query, real, all_before))
            else:
                torch.testing.assert_close(weight, weights(query, [query], all_before))


@pytest.mark.parametrize('start', PADDINGS)
@pytest.mark.parametrize('static', [False, True])
@pytest.mark.parametrize('n', [1, 3])
@pytest.mark.parametrize('split', [[8], [5, 3], [4, 1, 1, 2], [5, 1, 1, 1], [1] * 8])
def test_kv_cache_reads_all_before_but_padding(start, static, n, split):
    """n slots for each token, all in one pass."""
    memory = KVCache(LAYERS, TOKENS * n, start, static)
    memories, held = Memories([memory]), []
    for T in split:
        pos = memories.begin(3, T, 'cpu')
        slots = [Slot(t, k) for t in pos.tolist() for k in range(n)]
        held += slots
        got = read(memory, torch.tensor([[slot.number for slot in slots]] * 3))
        check_real_and_padding(got, slots, held, start)
        assert memory.length == len(held)
        compiled = static and T == 1 and len(held) > n
        assert memory.compiled == compiled
    assert memories.tokens == 8
    assert memory.bytes() == 2 * LAYERS * 3 * TOKENS * n * WIDTH * 8


@pytest.mark.parametrize('start', PADDINGS)
@pytest.mark.parametrize('static', [False, True])
def test_kv_cache_reads_what_replaced_the_guesses(start, static):
    """Sweeps of 1, 2, 3, 3 slots for each token, then a token of which each slot is a pass."""
    memory, held = KVCache(LAYERS, TOKENS * STEPS, start, static), []
    for pos in torch.arange(4), torch.arange(4, 6):
        memory.begin(3, pos)
        for n in (1, 2, 3, 3):
            memory.rewind(n)
            slots = [Slot(t, k) for t in pos.tolist() for k in range(n)]
            got = read(memory, torch.tensor([[slot.number for slot in slots]] * 3))
            check_real_and_padding(got, slots, held + slots, start)
        held += slots
    for t in 6, 7:
        memory.begin(3, torch.tensor([t]))
        for k in range(STEPS):
            held.append(Slot(t, k))
            got = read(memory, torch.tensor([[held[-1].number]] * 3))
            check_real_and_padding(got, held[-1:], held, start)
            assert memory.compiled == static
    assert memory.length == 8 * STEPS


def test_a_static_cache_keeps_its_shapes_and_addresses():
    memory = KVCache(LAYERS, TOKENS, static=True)
    masks, addresses = set(), set()
    for T in 3, 1, 1, 1:
        memory.begin(1, torch.arange(memory.length, memory.length + T))
        mask = memory.mask(T, 'cpu')
        for layer in range(LAYERS):
            k, v = memory.update(layer, torch.zeros(1, 1, T, 4), torch.zeros(1, 1, T, 4))
        if T == 1:
            masks.add((mask.shape, mask.dtype, k.shape))
            addresses.add((k.data_ptr(), v.data_ptr()))
    assert masks == {((1, 1, 1, TOKENS), torch.float32, (1, 1, TOKENS, 4))}
    assert len(addresses) == 1


# tokens with different numbers of slots

def some_stops(T, seed):
    """(3,T): how many passes each token takes, 1 .. STEPS."""
    return torch.randint(1, STEPS + 1, (3, T), generator=torch.Generator().manual_seed(seed))


def read_text(memory, pos, stops, held, rule, start=None, leave_out=False):
    """
    Pass by pass over the tokens at pos (T,), each of which takes stops (B,T) of them: checks what
    every slot reads, and adds the slots to held, a list for each row. Returns the last memory.
    """
    first = torch.tensor(real_from(start, len(stops)))
    for k in range(STEPS):
        thinking = (stops > k) & (pos >= first[:, None])
        slots = choose(thinking, leave_out)
        memory = memory.open(slots, pos, k)
        time = slots.take(pos).expand(slots.valid.shape)                # (B,n)
        numbers = (time * STEPS + k).where(slots.valid, NOBODY)
        got = read(memory, numbers)
        for row, valid in enumerate(slots.valid):
            queries = [Slot(t, k) for t in time[row][valid].tolist()]
            held[row] += queries
            check_row(got[row][valid], queries, held[row], rule)
    return memory


@pytest.mark.parametrize('leave_out', [False, True])
@pytest.mark.parametrize('seed', range(3))
def test_step_memory_reads_the_slots_of_all_passes_so_far(leave_out, seed):
    read_text(StepMemory(LAYERS), torch.arange(9), some_stops(9, seed), [[], [], []], plain_rule,
              leave_out=leave_out)


@pytest.mark.parametrize('seed', range(3))
def test_frozen_memory_reads_the_newest_slot_of_each_token(seed):
    read_text(FrozenMemory(LAYERS), torch.arange(9), some_stops(9, seed), [[], [], []],
              newest_alone)


@pytest.mark.parametrize('queries', [256, 9, 8, 4, 3, 1])
@pytest.mark.parametrize('T', [9, 1])
def test_chain_memory_reads_the_slots_of_all_passes_so_far(queries, T, monkeypatch):
    monkeypatch.setattr(ChainMemory, 'QUERIES', queries)
    stops = torch.full((2, T), STEPS)
    read_text(ChainMemory(LAYERS), torch.arange(T), stops, [[], []], plain_rule)


@pytest.mark.parametrize('kind, rule', [(FrozenMemory, newest_alone), (StepMemory, plain_rule)])
def test_a_second_text_reads_nothing_of_the_first(kind, rule):
    first = kind(LAYERS)
    for seed in range(2):
        read_text(first, torch.arange(5), some_stops(5, seed), [[], [], []], rule)


@dataclass
class Writer:
    """A row that goes on behind its text, at its own token and step."""
    row: int
    time: int
    step: int = 0


def open_pass(memory, writers):
    """The next pass of these rows; returns the slot that each appends."""
    time = torch.tensor([[writer.time] for writer in writers])          # (r,1)
    step = torch.tensor([[writer.step] for writer in writers])
    everyone = Everyone(torch.ones_like(time, dtype=torch.bool), all_valid=True)
    memory.open(everyone, time, step)
    if not isinstance(memory, ThoughtCache):
        return [Slot(writer.time, writer.step) for writer in writers]
    biases = [-0.5 * writer.step * (writer.row + 1) for writer in writers]
    memory.add_bias(torch.tensor(biases)[:, None].double())
    return [Slot(writer.time, writer.step, bias) for writer, bias in zip(writers, biases)]


def write_ahead(memory, first, stops, held, rule):
    """
    Tokens from place `first` on, until there is no more room, each of which takes stops (B,TOKENS)
    passes. No row waits for another: they are at different tokens and steps, and a row that is done
    leaves the batch. Checks every pass.
    """
    writers = [Writer(row, first) for row in range(len(stops))]
    while writers:
        queries = open_pass(memory, writers)
        got = read(memory, torch.tensor([[query.number] for query in queries]))
        for writer, query, weight in zip(writers, queries, got):
            held[writer.row].append(query)
            check_row(weight, [query], held[writer.row], rule)
            writer.step += 1
            if writer.step == stops[writer.row, writer.time]:
                writer.time, writer.step = writer.time + 1, 0
        stay = [i for i, writer in enumerate(writers) if writer.time < TOKENS]
        if len(stay) < len(writers):
            memory.keep(torch.tensor(stay, dtype=torch.long))
            writers = [writer for writer in writers if writer.time < TOKENS]
            assert memory.held() == sum(len(held[writer.row]) for writer in writers)


CACHES = [(StepCache, plain_rule), (LatestCache, newest_alone)]


@pytest.mark.parametrize('kind, rule', CACHES)
@pytest.mark.parametrize('start', PADDINGS)
@pytest.mark.parametrize('static', [False, True])
@pytest.mark.parametrize('seed', range(3))
def test_caches_of_tokens_with_different_numbers_of_slots(kind, rule, start, static, seed):
    """A text in two pieces, a single token, then rows that run ahead of each other."""
    memory = kind(LAYERS, TOKENS * STEPS, start, static)
    memories, held = Memories([memory]), [[], [], []]
    stops = some_stops(TOKENS, seed)
    for first, end in ((0, 4), (4, 6), (6, 7)):
        pos = memories.begin(3, end - first, 'cpu')
        read_text(memory, pos, stops[:, first:end], held, rule, start, leave_out=True)
        assert memory.held() == sum(len(row) for row in held)
    write_ahead(memory, 7, stops, held, rule)
    for row, first in zip(held, real_from(start, 3)):
        assert [slot.time for slot in row if slot.step == 0] == list(range(first, TOKENS))


@pytest.mark.parametrize('kind, rule', CACHES)
@pytest.mark.parametrize('start', PADDINGS)
def test_caches_read_a_text_where_nobody_is_left_out(kind, rule, start):
    """Fillers are appended, but read by nobody."""
    memory, held = kind(LAYERS, TOKENS * STEPS, start), [[], [], []]
    memory.begin(3, torch.arange(6))
    read_text(memory, torch.arange(6), some_stops(6, 0), held, rule, start, leave_out=False)
    assert memory.held() == sum(len(row) for row in held)
    assert memory.length == 6 * STEPS > memory.held() / 3


def test_a_replaced_slot_is_still_there_for_those_in_its_own_step():
    """Rows 0 and 1 alike but for how far they are: by hand, three tokens of two steps."""
    memory = LatestCache(LAYERS, 8)
    everyone = Everyone(torch.ones(2, 1, dtype=torch.bool))
    reads = []
    for time, step in [([0, 0], [0, 0]), ([0, 0], [1, 1]), ([1, 1], [0, 0]), ([2, 1], [0, 1])]:
        pos, k = torch.tensor(time)[:, None], torch.tensor(step)[:, None]
        memory.open(everyone, pos, k)
        got = read(memory, pos * STEPS + k)[:, 0]                       # (2, WIDTH)
        reads.append([row.nonzero()[:, 0].tolist() for row in got])
    assert reads[0] == [[0], [0]]
    assert reads[1] == [[1], [1]]           # slot 1 took the place of slot 0
    assert reads[2] == [[0, 3], [0, 3]]     # in step 0 it is slot 0 again
    assert reads[3] == [[0, 3, 6], [1, 4]]
    assert memory.held() == 8


@pytest.mark.parametrize('kind', [StepCache, LatestCache, ThoughtCache])
def test_a_cache_refuses_more_than_it_can_hold(kind):
    memory = kind(LAYERS, 4)
    slots = Everyone(torch.ones(1, 5, dtype=torch.bool))
    memory.open(slots, torch.arange(5), 0)
    with pytest.raises(ValueError, match='cache holds 4 slots, but 5'):
        memory.mask(5, 'cpu')


# thoughts that fade

def some_biases(T, seed):
    """(3, T, STEPS): 0 for a token's own slot, falling behind it, and -inf where it is cut."""
    generator = torch.Generator().manual_seed(seed)
    falls = -torch.rand(3, T, STEPS, generator=generator).double()
    falls[..., 0] = 0.0
    bias = falls.cumsum(-1)
    return bias.masked_fill(bias < -0.9, -math.inf)


def sweep(memory, pos, n, bias, held, start):
    """A pass over n slots of each token at pos (T,), bias (B,T,n); returns the slots, per row."""
    memory.rewind(n)
    memory.add_bias(bias.flatten(1))
    time = pos.repeat_interleave(n)                                     # (T n,)
    step = torch.arange(n).repeat(len(pos))
    first = torch.tensor(real_from(start, len(bias)))
    real = time >= first[:, None]                                       # (B, T n)
    got = read(memory, (time * STEPS + step).where(real, NOBODY))
    new = []
    for row in range(len(bias)):
        labels = zip(time.tolist(), step.tolist(), bias[row].flatten().tolist())
        new.append([Slot(*label) for label in labels if label[0] >= first[row]])
        check_row(got[row][real[row]], new[row], held[row] + new[row], all_before)
    return new


@pytest.mark.parametrize('start', PADDINGS)
@pytest.mark.parametrize('static', [False, True])
@pytest.mark.parametrize('seed', range(3))
def test_thought_cache_reads_thoughts_as_they_fade(start, static, seed):
    """
    Two texts of sweeps, each of which takes the place of the one before; what nobody reads is
    dropped; then rows that run ahead of each other.
    """
    memory = ThoughtCache(LAYERS, TOKENS * STEPS, start, static)
    memories, held = Memories([memory]), [[], [], []]
    for T, sweeps in ((5, (1, 2, 3, 3)), (3, (1, 3, 2))):
        pos = memories.begin(3, T, 'cpu')
        for i, n in enumerate(sweeps):
            bias = some_biases(T, seed + 10 * i)[..., :n]
            new = sweep(memory, pos, n, bias, held, start)
        for row in range(3):
            held[row] += [slot for slot in new[row] if slot.bias > -math.inf]
        memory.drop_hidden()
        assert memory.held() == sum(len(row) for row in held)
        assert memory.length == max(len(row) for row in held)
    stops = some_stops(TOKENS, seed)
    write_ahead(memory, 8, stops, held, all_before)


def test_drop_hidden_keeps_the_order_and_what_can_be_read():
    memory, bias = ThoughtCache(LAYERS, TOKENS * STEPS), some_biases(4, 1)
    memory.begin(3, torch.arange(4))
    [row, _, _] = sweep(memory, torch.arange(4), STEPS, bias, [[], [], []], None)
    memory.drop_hidden()
    left = [slot for slot in row if slot.bias > -math.inf]
    assert 4 < len(left) < 4 * STEPS
    n = len(left)
    assert memory.labels['time'][0, :n].tolist() == [slot.time for slot in left]
    assert memory.labels['step'][0, :n].tolist() == [slot.step for slot in left]
    assert memory.labels['bias'][0, :n].tolist() == [slot.bias for slot in left]
    assert (memory.labels['time'][0, n:] == NEVER).all()
    for layer in range(LAYERS):
        numbers = memory.v[layer][0, 0, :n].argmax(-1)
        assert numbers.tolist() == [slot.number for slot in left]


# which memories a model gets

@pytest.mark.parametrize('settings, kinds, cache, capacity', [
    (dict(), [CausalMemory], KVCache, 7),
    (dict(ponder='embedding'), [CausalMemory] * 3, KVCache, 7),
    (dict(ponder='loop'), [CausalMemory] * 3, KVCache, 7),
    (dict(ponder='latent'), [CausalMemory], KVCache, 21),
    (dict(ponder='pause'), [CausalMemory], KVCache, 21),
    (dict(ponder='chain'), [ChainMemory], StepCache, 21),
    (dict(ponder='embedding', halting='gate'), [FrozenMemory], LatestCache, 21),
    (dict(ponder='latent', halting='mask'), [CausalMemory], ThoughtCache, 21),
    (dict(ponder='chain', halting='router'), [StepMemory], StepCache, 21),
])
def test_one_memory_for_each_pass_or_one_for_all(settings, kinds, cache, capacity):
    config = GPTConfig(vocab_size=64, n_layer=LAYERS, n_head=2, n_embd=32, ponder_steps=2,
                       **settings)
    mechanism = GPT(config).mechanism
    assert [type(memory) for memory in no_caches(mechanism, LAYERS)] == kinds
    start = torch.tensor([0, 3])
    caches = new_caches(mechanism, LAYERS, 7, start, static=True)
    assert [type(memory) for memory in caches] == [cache] * len(kinds)
    for memory in caches:
        assert memory.capacity == capacity
        assert memory.start is start
        assert memory.static
        assert len(memory.k) == len(memory.v) == LAYERS


def test_positions_go_on_from_text_to_text():
    memories = Memories([CausalMemory(), CausalMemory()])
    assert memories.begin(2, 3, 'cpu').tolist() == [0, 1, 2]
    assert memories.begin(2, 2, 'cpu').tolist() == [3, 4]
    assert memories.tokens == 5


# gradients: a text as a whole

@pytest.mark.parametrize('kind', [FrozenMemory, StepMemory, ChainMemory])
def test_gradients_reach_the_keys_and_values_of_every_pass(kind):
    """What a pass reads is what was computed, not a copy without a past."""
    memory, leaves = kind(1), []
    thinking = torch.ones(1, 4, dtype=torch.bool)
    for k in range(STEPS):
        memory = memory.open(Everyone(thinking), torch.arange(4), k)
        memory.mask(4, 'cpu')
        leaves.append(torch.randn(1, 1, 4, 2, requires_grad=True))
        _, values = memory.update(0, leaves[-1], leaves[-1])
        thinking = thinking & torch.tensor([[True, kind != FrozenMemory, True, True]])
    values.sum().backward()
    for k, leaf in enumerate(leaves):
        read_now = kind != FrozenMemory or k == STEPS - 1
        reached = torch.full((4,), float(read_now))
        if kind == FrozenMemory:
            reached[1] = float(k == 0)  # token 1 stopped after the first pass
        assert torch.equal(leaf.grad[0, 0], reached[:, None].expand(4, 2))
