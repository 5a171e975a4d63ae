"""Exit: what each exit_loss minimises, and what leaving early saves."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import EXIT, EXIT_GATE, LOOP, close, make
from test_promises import targets

from model import GPT

GAIN = dict(LOOP, halting='exit', exit_by='gate', exit_loss='gain', loop_norm=True)


def each_pass(model, idx):
    """The cross-entropies (B,T) and the states after each pass, and the gates where there are."""
    model.train()
    model(idx, targets(idx))
    nats, gates = [], []
    for _, new in model.mechanism.trace:
        logits = model.head(new.out)
        nats.append(F.cross_entropy(logits.transpose(1, 2), targets(idx), reduction='none'))
        gates.append(new.lam)
    return nats, gates


@pytest.mark.parametrize('how, weights', [
    ('last', [0, 0, 1]),
    ('uniform', [1 / 3, 1 / 3, 1 / 3]),
    ('ramp', [1 / 6, 2 / 6, 3 / 6]),
])
def test_a_fixed_prior_weighs_the_passes(how, weights, idx, kind):
    late = dict(exit_loss=how, halt_start=0.4, halt_full=0.6, halt_tau=0.0)
    model = make(**{**EXIT, **late}, kind=kind)
    nats, _ = each_pass(model, idx)
    for progress, share in [(0.3, 0.0), (0.5, 0.5), (0.9, 1.0)]:
        model.mechanism.progress = progress
        want = (1 - share) * nats[2].mean()
        for weight, loss in zip(weights, nats):
            want = want + share * weight * loss.mean()
        close(model(idx, targets(idx))[1], want)


def test_learned_is_the_papers_first_stage(idx, kind):
    model = make(**{**GAIN, 'exit_loss': 'learned', 'halt_lambda': 0.3}, kind=kind)
    nats, gates = each_pass(model, idx)
    stay = 1.0
    want = 0.0
    for t in range(3):
        p = stay * gates[t] if t < 2 else stay                          # (3)
        stay = stay * (1 - gates[t])
        want = want + (p * nats[t] + 0.3 * p * p.log()).mean()          # (4)
    close(model(idx, targets(idx))[1], want)


def test_gain_is_the_papers_second_stage(idx, kind):
    """Each gate learns whether the next pass gains more than 0.005; nothing else has a gradient."""
    model = make(**GAIN, kind=kind)
    nats, gates = each_pass(model, idx)
    want = 0.0
    for t in range(2):
        gain = (nats[t] - nats[t + 1]).clamp(min=0).detach()            # (5)
        wanted = 1 / (1 + torch.exp(-50 * (gain - 0.005)))
        want = want + F.binary_cross_entropy(1 - gates[t], wanted)      # (6)
    loss = model(idx, targets(idx))[1]
    close(loss, want / 3)
    assert model.mechanism.trains_alone
    loss.backward()
    assert all(p.grad.abs().max() > 0 for p in model.mechanism.parameters())


def test_tokens_leave_in_training_as_in_generation(idx, kind):
    """From halt_full on, and then the loss of a pass is that of the last one a token took."""
    model = make(**{**EXIT, 'halt_tau': 0.8, 'halt_start': 0.4, 'halt_full': 0.6}, kind=kind)
    model(idx)
    taken = model.mechanism.passes
    assert 1 <= taken.min() < taken.max() <= 3
    model.train()
    model.mechanism.progress = 0.5
    model(idx)
    assert (model.mechanism.passes == 3).all()

    model.mechanism.progress = 0.7
    nats, _ = each_pass(model, idx)
    assert torch.equal(model.mechanism.passes, taken)
    second = nats[1].where(taken > 1, nats[0])
    third = nats[2].where(taken > 2, second)
    close(model(idx, targets(idx))[1], (nats[0] + second + third).mean() / 3)


@pytest.mark.parametrize('toggle', [EXIT, {**EXIT_GATE, 'halt_full': 0.0, 'halt_start': 0.0}])
def test_what_is_not_to_be_predicted_is_taught_to_stay(toggle, idx, kind):
    """Doubt, or its gate's probability of staying, grows; without such tokens nothing is due."""
    model = make(**{**toggle, 'halt_tau': 0.0, 'halt_lambda': 0.5}, kind=kind)
    model.train()
    wanted = targets(idx)
    model(idx, wanted)
    assert model.mechanism.penalty(model, wanted) == 0
    wanted[:, :4] = -1
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    stays = []
    for _ in range(2):
        model(idx, wanted)
        first = model.mechanism.trace[0][1]
        p = model.head(first.out).softmax(-1)[..., :model.config.n_tokens]
        # what a gate says, or how near the prediction is to one that knows nothing
        stay = 1 - first.lam if model.mechanism.gate is not None else p.log().mean(-1)
        stays.append(stay[:, :4].mean().item())
        model.mechanism.penalty(model, wanted).backward()
        optimizer.step()
    assert stays[1] > stays[0]


@pytest.mark.parametrize('toggle', [{**EXIT, 'halt_tau': 0.8}, {**GAIN, 'halt_tau': 0.4}])
def test_a_token_that_left_costs_nothing_more(toggle, monkeypatch):
    """In generation, one token at a time, the trunk runs as often as passes are reported."""
    model = make(**toggle)
    calls = []
    trunk = GPT.trunk

    def counting(self, x, *args, **kwargs):
        calls.append(x.size(1))
        return trunk(self, x, *args, **kwargs)

    monkeypatch.setattr(GPT, 'trunk', counting)
    stream = model.stream(torch.tensor([[3, 1, 4]]), 12, temperature=0)
    next(stream)
    calls.clear()
    taken = [passes.item() for _, passes in stream]
    assert sum(calls) == sum(taken)
    assert 1 <= min(taken) < max(taken) <= 3


def test_a_threshold_of_0_takes_all_passes(idx):
    model = make(**{**EXIT, 'halt_tau': 0.0})
    plain_loop = make(**LOOP)
    plain_loop.load_state_dict(model.state_dict())
    close(model(idx)[0], plain_loop(idx)[0])
    assert (model.mechanism.passes == 3).all()


def test_confidence_is_the_largest_probability(idx, kind):
    """A token takes its next pass while 1 - max p is at least halt_tau."""
    model = make(**{**EXIT, 'halt_tau': 0.0}, kind=kind)
    model(idx)
    doubts = []
    for _, new in model.mechanism.trace[:2]:
        doubts.append(1 - model.head(new.out).softmax(-1).amax(-1))
    model.config.halt_tau = tau = doubts[0].median().item()
    model(idx)
    first = model.mechanism.trace[0][1]
    assert torch.equal(first.go_on, doubts[0] >= tau)
    assert 0 < first.go_on.double().mean() < 1
    assert math.isclose(first.chance.median().item(), tau)
