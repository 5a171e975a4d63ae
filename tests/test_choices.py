"""tools/choices.py: told what to take, a model is the one that took it by itself."""
import pytest
import torch
from conftest import TOGGLES, make, save

from engine.files import UserError
from tools import choices

N, T = 10, 11
ROWS = torch.randint(0, 50, (N, T + 1), generator=torch.Generator().manual_seed(3))
X, Y = ROWS[:, :-1], ROWS[:, 1:].clone()
Y[:, :2] = -1   # do not count
HALTING = ['gate_depth', 'router', 'router_depth', 'mask2_depth', 'exit', 'exit_gate']


@pytest.fixture(params=HALTING)
def model(request):
    return make(**TOGGLES[request.param], block_size=T)


def test_told_its_own_choice_it_is_the_same(model):
    seen = set()
    for tau in (1e-4, model.config.halt_tau, 0.6):
        model.config.halt_tau = tau
        losses, _, passes = choices.read(model, X, Y)
        told, _, taken = choices.read(model, X, Y, passes)
        assert torch.equal(passes, taken)
        assert model.config.halt_tau == tau
        # `mask` leaves out what it cuts, and told to it scales up the rest
        if model.config.halting != 'mask' or tau == 1e-4:
            torch.testing.assert_close(told, losses, rtol=0, atol=1e-3 if tau == 1e-4 else 1e-10)
        seen.add(passes.double().mean().item())
    assert len(seen) > 1    # the thresholds do differ


def test_all_passes_are_threshold_0_and_one_is_the_plain_gpt(model):
    losses, right = choices.after_each_pass(model, X, Y)
    counts = Y >= 0
    model.config.halt_tau = 0
    model.dense = True
    everything = choices.read(model, X, Y)[0][counts]
    torch.testing.assert_close(losses[-1], everything, rtol=0, atol=1e-9)
    h = model.trunk(model.embed(X), torch.arange(T))
    plain = model.nats(h, Y)[counts]
    torch.testing.assert_close(losses[0], plain, rtol=0, atol=1e-9)
    assert torch.equal(right[0], (model.head(h).argmax(-1) == Y)[counts])


def test_a_lot_takes_the_same_passes_elsewhere(model):
    losses, _, passes = choices.read(model, X, Y)
    order = torch.randperm(N * T, generator=torch.Generator().manual_seed(0))
    lot = passes.flatten()[order].view(N, T)
    dealt, _, taken = choices.read(model, X, Y, lot)
    assert torch.equal(taken, lot)
    assert not torch.equal(lot, passes)
    assert (dealt.mean() - losses.mean()).abs() > 1e-6


def test_without_halting_each_pass_is_the_model_of_so_many():
    loop = make(**TOGGLES['loop'], block_size=T)
    losses, _ = choices.after_each_pass(loop, X, Y)
    assert loop.config.ponder_steps == 2
    loop.config.ponder_steps = 1
    logp = loop(X)[0].log_softmax(-1)
    want = -logp.gather(-1, Y.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(losses[1], want[Y >= 0])


def test_the_oracle_takes_the_best_pass_of_each_token(monkeypatch, capsys):
    losses = torch.tensor([[1.0, 5.0], [2.0, 3.0], [4.0, 3.5]])         # (passes, 2)
    right = torch.tensor([[True, False], [True, True], [False, True]])
    monkeypatch.setattr(choices, 'after_each_pass', lambda *_: (losses, right))
    choices.print_everyone(None, None, None)
    lines = capsys.readouterr().out.replace('|', ' ').splitlines()
    assert [line.split() for line in lines[2:]] == [
        ['everyone', '1', '3.0000'],
        ['everyone', '2', '2.5000', '50.0%', '0.0%'],
        ['everyone', '3', '3.7500', '0.0%', '50.0%'],
        ['oracle', '1.50', '2.0000']]


def test_a_line_per_tau_and_one_per_number_of_passes(tmp_path, small_data, capsys):
    size = dict(vocab_size=320, n_tokens=257, block_size=16, n_layer=2)
    folder = save(tmp_path / 'a', make(**{**TOGGLES['exit'], **size}), data_dir=small_data)
    choices.main([folder, '--tokens=100', '--lots=2', '--taus=0.2,0.9', '--device=cpu'])
    lines = capsys.readouterr().out.replace('|', ' ').splitlines()
    assert lines[0] == 'nats per token of 112 validation tokens'
    assert [line.split()[0] for line in lines if line.strip()] == [
        'nats', 'halt_tau', '--------', '0.2', '0.9', 'passes', '-----------', 'everyone',
        'everyone', 'everyone', 'oracle']
    plain = save(tmp_path / 'b', make(**size), data_dir=small_data)
    with pytest.raises(UserError, match="ponder='none'"):
        choices.main([plain])
