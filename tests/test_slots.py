"""engine/slots.py: who takes the next pass, picked out and put back."""

from dataclasses import dataclass, fields

import pytest
import torch
from conftest import close

from engine.slots import NEVER, Everyone, Gathered, choose, for_each_field, real_tokens

THINKING = torch.tensor([
    [0, 1, 1, 0, 1],
    [1, 0, 0, 0, 0],
    [0, 0, 0, 0, 0],
    [1, 1, 0, 0, 1],
], dtype=torch.bool)
POS = torch.tensor([10, 11, 12, 13, 14])


@dataclass
class Carried:
    x: torch.Tensor
    go_on: torch.Tensor


def numbers(*width):
    """(4,5,..), all different."""
    size = (4, 5, *width)
    return torch.arange(torch.Size(size).numel()).view(size).double()


@pytest.mark.parametrize('kind', [Everyone, Gathered])
@pytest.mark.parametrize('width', [(), (3,), (3, 2)])
def test_put_what_was_taken_is_the_same(kind, width):
    slots, x = kind(THINKING), numbers(*width)
    assert torch.equal(slots.put(x, slots.take(x)), x)


@pytest.mark.parametrize('kind', [Everyone, Gathered])
@pytest.mark.parametrize('width', [(), (3,), (3, 2)])
def test_what_is_put_lands_where_it_was_taken_and_fillers_nowhere(kind, width):
    slots, x = kind(THINKING), numbers(*width)
    valid = slots.valid.view(*slots.valid.shape, *[1] * len(width))
    new = torch.where(valid, -slots.take(x), torch.nan)
    thinking = THINKING.view(4, 5, *[1] * len(width))
    before = x.clone()
    assert torch.equal(slots.put(x, new), torch.where(thinking, -x, x))
    assert torch.equal(x, before), "x itself stays as it is"


@pytest.mark.parametrize('kind', [Everyone, Gathered])
def test_gradients_take_the_same_way(kind):
    slots = kind(THINKING)
    x = numbers(3).requires_grad_()
    factor = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    slots.put(x, slots.take(x) * factor).sum().backward()
    close(x.grad, torch.where(THINKING, 2.0, 1.0)[..., None].expand(4, 5, 3).double(), 1e-15)
    assert factor.grad == x.detach()[THINKING].sum()


@pytest.mark.parametrize('kind', [Everyone, Gathered])
def test_a_dataclass_is_its_tensors(kind):
    slots = kind(THINKING)
    state = Carried(x=numbers(3), go_on=THINKING)
    taken = slots.take(state)
    for field in fields(Carried):
        held = getattr(state, field.name)
        assert torch.equal(getattr(taken, field.name), slots.take(held))
    new = for_each_field(lambda x: ~x if x.dtype == torch.bool else -x, taken)
    put = slots.put(state, new)
    assert torch.equal(put.x, slots.put(state.x, new.x))
    assert torch.equal(put.go_on, slots.put(state.go_on, new.go_on))
    assert not put.go_on.any()
    both = for_each_field(torch.maximum, state, put)
    assert torch.equal(both.x, torch.maximum(state.x, put.x))


def test_gathered_keeps_the_order_of_a_row():
    slots = Gathered(THINKING)
    taken = slots.take(POS)                                             # (4,3)
    assert slots.valid.tolist() == [[True] * 3, [True, False, False], [False] * 3, [True] * 3]
    assert taken[0].tolist() == [11, 12, 14]
    assert taken[1, 0] == 10
    assert taken[3].tolist() == [10, 11, 14]
    assert slots.time(POS).tolist() == [[11, 12, 14], [10, NEVER, NEVER],
                                        [NEVER] * 3, [10, 11, 14]]


def test_everyone_stays_where_they_are():
    slots, x = Everyone(THINKING), numbers(3)
    assert slots.take(x) is x
    assert slots.take(POS) is POS
    assert torch.equal(slots.valid, THINKING)
    times = slots.time(POS)
    assert torch.equal(times[THINKING], POS.expand(4, -1)[THINKING])
    assert (times[~THINKING] == NEVER).all()


def test_all_of_them_need_no_choice():
    slots, x = Everyone(torch.ones(4, 5, dtype=torch.bool), all_valid=True), numbers(3)
    assert torch.equal(slots.put(x, -x), -x)
    assert slots.put(x, (-x).float()).dtype == torch.float64
    assert torch.equal(slots.time(POS), POS.expand(4, -1))


@pytest.mark.parametrize('kind', [Everyone, Gathered])
def test_what_is_put_takes_the_type_of_what_was_there(kind):
    slots, x = kind(THINKING), numbers(3)
    assert slots.put(x, slots.take(x).float()).dtype == torch.float64


def test_choose_gathers_only_where_that_saves_something():
    everybody = torch.ones(4, 5, dtype=torch.bool)
    assert isinstance(choose(THINKING, leave_out=True), Gathered)
    assert isinstance(choose(THINKING, leave_out=False), Everyone)
    assert isinstance(choose(everybody, leave_out=True), Everyone)
    assert torch.equal(choose(everybody, leave_out=True).valid, everybody)


@pytest.mark.parametrize('leave_out', [False, True])
def test_chosen_either_way_the_result_is_the_same(leave_out):
    x = numbers(3)
    for thinking in THINKING, torch.ones_like(THINKING):
        slots = choose(thinking, leave_out)
        want = torch.where(thinking[..., None], x.square(), x)
        assert torch.equal(slots.put(x, slots.take(x).square()), want)


class Memory:
    start = None


def test_real_tokens_are_all_but_the_padding_on_the_left():
    memory, x = Memory(), numbers(3)
    assert real_tokens(x, POS, memory).all()
    assert real_tokens(x, POS, memory).shape == (4, 5)
    memory.start = torch.tensor([0, 10, 12, 14])
    assert real_tokens(x, POS, memory).sum(1).tolist() == [5, 5, 3, 1]
    assert real_tokens(x, POS, memory)[2].tolist() == [False, False, True, True, True]
