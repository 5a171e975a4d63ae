"""
The memories of model.py, each without a model around it: what `update` returns, of random keys and
values, is what its docstring says.
"""

import pytest
import torch
from conftest import close, make

from model import (LOG_ZERO, ChainMemory, FrozenMemory, LoopMemory, Memories, Memory, RouterMemory,
                   SlotMemory, WeightedMemory)

B, LAYERS, HD = 3, 2, 4


def random_kv(S):
    """k and v (B, 1, S, hd)."""
    return torch.randn(2, B, 1, S, HD).double()


def tokens(T):
    return torch.zeros(B, T, dtype=torch.long)


def weights_of(k):
    """The weights (B,N) of keys that `update` returned: the eight channels are equal."""
    channels = k[:, 0, :, HD:]
    assert channels.size(-1) == 8 and (channels == channels[..., :1]).all()
    return (channels.sum(-1) / HD ** 0.5).exp()


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


# ---- one key of each token -----------------------------------------------------------------------

def test_a_memory_returns_all_keys_and_knows_the_newest():
    memory, all_k, all_v = Memory(), [], []
    for T in 4, 1, 2:
        memory.begin(tokens(T))
        assert memory.pos.tolist() == list(range(memory.tokens - T, memory.tokens))
        for layer in range(LAYERS):
            k, v = random_kv(T)
            if layer == 0:
                all_k.append(k)
                all_v.append(v)
                keys, values = memory.update(layer, k, v)
                assert torch.equal(keys, torch.cat(all_k, dim=2))
                assert torch.equal(values, torch.cat(all_v, dim=2))
            else:
                memory.update(layer, k, v)
            newest_k, newest_v = memory.newest(layer, T)
            assert torch.equal(newest_k, k) and torch.equal(newest_v, v)


@pytest.mark.parametrize('settings', [dict(), dict(ponder='chain')])
def test_a_memory_takes_one_pass_for_each_begin(settings, idx):
    """Or a new mechanism would read keys of another pass, without a word."""
    model = make(**settings)
    memory = model.new_memory()
    memory.begin(idx)
    of_pass = memory[0] if settings else memory
    x = model.trunk(model.embed(idx), of_pass)
    with pytest.raises(AssertionError, match='once after each begin'):
        model.trunk(x, of_pass)


def test_a_pass_that_left_out_tokens_cannot_be_taken_again():
    """Or a new mechanism would read later tokens as if those had never been."""
    memory = Memories(WeightedMemory, 2, None)
    memory.begin(tokens(3))
    memory[0].update(0, *random_kv(3))
    memory.begin(tokens(1))
    memory[0].update(0, *random_kv(1))
    with pytest.raises(AssertionError, match='once after each begin'):
        memory[1].update(0, *random_kv(1))


def test_padding_has_no_weight():
    memory = WeightedMemory(torch.tensor([0, 3, 1]))
    for T in 2, 1, 2:
        memory.begin(tokens(T))
        keys, values = memory.update(0, *random_kv(T))
    want = torch.arange(5) >= torch.tensor([0, 3, 1])[:, None]
    assert torch.equal(weights_of(keys) > 0.5, want)
    assert torch.equal(memory.is_token, want[:, -2:])
    assert (values[..., HD:] == 0).all()
    k, _ = memory.newest(0, 2)
    assert k.size(-1) == HD, "Depth-Attention reads them without their weights"


def test_weights_are_those_of_their_pass_but_not_of_padding():
    pad = torch.tensor([0, 2, 1])
    memory = SlotMemory(pad)
    memory.begin(tokens(3))
    w = torch.rand(B, 6)
    keys, _ = memory.begin_pass(2, w.log()).update(0, *random_kv(6))
    real = (torch.arange(3) >= pad[:, None]).repeat_interleave(2, dim=1)
    close(weights_of(keys), w.where(real, 0.0).double(), 1e-6)
    assert WeightedMemory().log_w is None, "no channels where nothing has a weight"


# ---- several of each -----------------------------------------------------------------------------

def test_slots_of_a_token_stand_side_by_side_at_its_position():
    memory, kept = SlotMemory(), []
    for T, n in (3, 2), (1, 2), (2, 2):
        first = memory.tokens
        memory.begin(tokens(T))
        for slots in 1, 3, n:       # sweeps: each takes the place of the one before
            memory.rewind()
            memory.begin_pass(slots)
            k, v = random_kv(T * slots)
            for layer in range(LAYERS):
                keys, values = memory.update(layer, k, v)
            assert torch.equal(keys, torch.cat([*kept, k], dim=2))
        kept.append(k)
        assert memory.pos.tolist() == [t for t in range(first, first + T) for _ in range(n)]
    assert torch.equal(memory.keys[0], torch.cat(kept, dim=2)) and memory.N == 12


def test_without_rewind_slots_follow_each_other():
    """As the passes over a new token do."""
    memory = SlotMemory()
    memory.begin(tokens(1))
    parts = []
    for _ in range(3):
        k, v = random_kv(1)
        keys, _ = memory.begin_pass().update(0, k, v)
        parts.append(k)
    assert torch.equal(keys, torch.cat(parts, dim=2))


def test_a_chain_reads_token_after_token_the_passes_up_to_its_own():
    """x_0 z_0^(1) .. x_1 z_1^(1) .., (Eq. 2)."""
    memory, all_k = Memories(ChainMemory, 3, None), [[], [], []]
    for T in 3, 1, 2:
        memory.begin(tokens(T))
        for i in range(3):
            k, v = random_kv(T)
            all_k[i].append(k)
            keys, values = memory[i].update(0, k, v)
            assert memory[i].keys_per_slot == i + 1
            passes = [torch.cat(parts, dim=2) for parts in all_k[:i + 1]]
            want = [one[:, :, t] for t in range(memory.tokens) for one in passes]
            assert torch.equal(keys, torch.stack(want, dim=2))
            assert values.shape == keys.shape
            newest_k, _ = memory[i].newest(0, T)
            assert torch.equal(newest_k, k)


def test_loops_know_those_before_them():
    memory = Memories(LoopMemory, 3, None)
    assert [loop.depth_memories for loop in memory] == [[], memory[:1], memory[:2]]


# ---- tokens that stopped -------------------------------------------------------------------------

PIECES = [5, 1, 1, 1, 2, 1, 3]      # how a text comes: 14 tokens


def stopping(passes_of_text, T, first):
    """taken (B,T) of each pass that somebody of these tokens takes: others end the loop."""
    here = passes_of_text[:, first:first + T]
    return [here > k for k in range(int(here.max()))]


def frozen(all_k, passes, k):
    """Keys of pass k by their definition: a token's own, or those of the last pass it took."""
    columns = []
    for t in range(passes.size(1)):
        rows = [all_k[min(k, int(passes[b, t]) - 1)][b, :, t] for b in range(B)]
        columns.append(torch.stack(rows))
    return torch.stack(columns, dim=2)                                  # (B, 1, N, hd)


@pytest.mark.parametrize('highest', [1, 2, 4])
def test_frozen_keys_are_those_of_a_tokens_last_pass(highest):
    """
    Pieces stop at different passes, so a pass may have seen none of several pieces when it is taken
    again; highest: the most passes that the middle of the text takes.
    """
    torch.manual_seed(highest)
    passes = torch.randint(1, 5, (B, 14))
    passes[:, 4:10] = passes[:, 4:10].clamp(max=highest)
    memory = Memories(FrozenMemory, 4, None)
    own = torch.randn(4, LAYERS, 2, B, 1, 14, HD).double()      # k and v of all passes
    first = 0
    for T in PIECES:
        memory.begin(tokens(T))
        for k, taken in enumerate(stopping(passes, T, first)):
            memory[k].begin_pass(taken)
            for layer in range(LAYERS):
                key, value = own[k, layer, :, ..., first:first + T, :]
                keys, values = memory[k].update(layer, key, value)
                end = first + T
                for got, all_passes in (keys, own[:, layer, 0]), (values, own[:, layer, 1]):
                    want = frozen(all_passes[..., :end, :], passes[:, :end], k)
                    assert torch.equal(got, want)
        first += T


@pytest.mark.parametrize('highest', [1, 2, 4])
@pytest.mark.parametrize('pad', [None, torch.tensor([0, 2, 1])])
def test_who_stopped_has_hidden_keys_in_a_routers_memory(highest, pad):
    """And those of the passes that it took stand where they would in a chain."""
    torch.manual_seed(highest)
    passes = torch.randint(1, 5, (B, 14))
    passes[:, 4:10] = passes[:, 4:10].clamp(max=highest)
    if pad is not None:
        passes = passes * (torch.arange(14) >= pad[:, None])
    memory = Memories(RouterMemory, 4, pad)
    own = torch.randn(4, 2, B, 1, 14, HD).double()
    first = 0
    for T in PIECES:
        memory.begin(tokens(T))
        for k, taken in enumerate(stopping(passes, T, first)):
            memory[k].begin_pass(taken)
            keys, values = memory[k].update(0, *own[k, :, ..., first:first + T, :])
            end = first + T
            weights = weights_of(keys).view(B, end, k + 1)
            took = passes[:, :end, None] > torch.arange(k + 1)
            assert torch.equal(weights > 0.5, took)
            keys, values = (x[:, 0, :, :HD].view(B, end, k + 1, HD) for x in (keys, values))
            for j in range(k + 1):
                here = took[..., j]
                assert torch.equal(keys[:, :, j][here], own[j, 0, :, 0, :end][here])
                assert torch.equal(values[:, :, j][here], own[j, 1, :, 0, :end][here])
        first += T


def test_hidden_survives_half_precision():
    """Of each dtype: what the channels of a hidden key add up to is low enough."""
    for dtype in torch.float16, torch.bfloat16:
        k, v = (x.to(dtype) for x in torch.zeros(2, B, 1, 5, HD + 8))
        k, _ = RouterMemory.stand_in(k, v)
        assert k.isfinite().all() and k.dtype == dtype
        assert k[..., HD:].float().sum(-1).max() <= LOG_ZERO
