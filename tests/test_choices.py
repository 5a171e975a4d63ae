"""tools/choices.py: told what to take, a model is the one that took it by itself."""
import json
import os
from statistics import fmean

import prepare_data
import pytest
import torch
from conftest import TOGGLES, cells, make, save
from engine import tasks
from engine.answers import answer_problems, exam_of_data, read_answers
from engine.files import UserError
from engine.trained import load_model
from tools import choices

N, T = 10, 11
ROWS = torch.randint(0, 50, (N, T + 1), generator=torch.Generator().manual_seed(3))
X, Y = ROWS[:, :-1], ROWS[:, 1:].clone()
Y[:, :2] = -1   # do not count
TEXT = choices.Text(X, Y, answers=False)
HALTING = ['gate_depth', 'router', 'router_depth', 'mask2_depth', 'exit', 'ouro']


@pytest.fixture(params=HALTING)
def model(request):
    return make(**TOGGLES[request.param], block_size=T)


def test_told_its_own_choice_it_is_the_same(model):
    seen = set()
    for tau in (1e-4, model.config.halt_tau, 0.6):
        model.config.halt_tau = tau
        losses, _, passes = choices.see(model, X, Y)
        told, _, taken = choices.see(model, X, Y, passes)
        assert torch.equal(passes, taken)
        assert model.config.halt_tau == tau
        # `mask` leaves out what it cuts, and told to it scales up the rest
        if model.config.halting != 'mask' or tau == 1e-4:
            torch.testing.assert_close(told, losses, rtol=0, atol=1e-3 if tau == 1e-4 else 1e-10)
        seen.add(passes.double().mean().item())
    assert len(seen) > 1    # the thresholds do differ


def test_all_passes_are_threshold_0_and_one_is_the_plain_gpt(model):
    losses, right = choices.after_each_pass(model, TEXT)
    model.config.halt_tau = 0
    everything = choices.see(model, X, Y)[0]
    torch.testing.assert_close(losses[-1], everything, rtol=0, atol=1e-9)
    h = model.trunk(model.embed(X))
    torch.testing.assert_close(losses[0], model.token_losses(h, Y), rtol=0, atol=1e-9)
    assert torch.equal(right[0], model.head(h).argmax(-1) == Y)


def test_a_lot_takes_the_same_passes_elsewhere(model):
    losses, _, passes = choices.see(model, X, Y)
    order = torch.randperm(N * T, generator=torch.Generator().manual_seed(0))
    lot = passes.flatten()[order].view(N, T)
    dealt, _, taken = choices.see(model, X, Y, lot)
    assert torch.equal(taken, lot)
    assert not torch.equal(lot, passes)
    assert (dealt.mean() - losses.mean()).abs() > 1e-6


def test_without_halting_each_pass_is_the_model_of_so_many():
    loop = make(**TOGGLES['loop'], block_size=T)
    losses, _ = choices.after_each_pass(loop, TEXT)
    assert loop.config.ponder_steps == 2
    loop.config.ponder_steps = 1
    logp = loop(X)[0].log_softmax(-1)
    want = -logp.gather(-1, Y.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(losses[1][Y >= 0], want[Y >= 0])


# three passes over two answers of two characters each: of the first the oracle takes passes 1 and
# 2, of the second 3 and 1
LOSSES = torch.tensor([[[1, 5], [4, 1]], [[2, 3], [4, 2]], [[4, 3.5], [1, 3]]])
RIGHT = torch.tensor([[[1, 0], [0, 1]], [[1, 1], [0, 1]], [[0, 1], [1, 0]]]).bool()
ALL = torch.zeros(2, 2, dtype=torch.long)


def test_the_oracle_takes_the_best_pass_of_each_token():
    text = choices.Text(ALL, ALL, answers=False)
    rows, oracle = choices.everyone(LOSSES, RIGHT, text)
    assert [row['loss'] for row in rows] == [2.75, 2.75, 2.875]
    assert [row['corrects'] for row in rows] == [0, 0.25, 0.25]
    assert [row['breaks'] for row in rows] == [0, 0, 0.5]
    assert oracle == {'passes': 1.75, 'loss': 1.5, 'result': 1.5}


def test_rank_correlation_is_that_of_the_places():
    losses = torch.tensor([0.1, 3.0, 0.2, 900.0])
    assert choices.rank_correlation(torch.tensor([1.0, 3.0, 2.0, 4.0]), losses) == pytest.approx(1)
    assert choices.rank_correlation(-losses, losses) == pytest.approx(-1)
    # places 1.5, 1.5, 3.5, 3.5 and 1, 3, 2, 4: covariance 2/3, variances 4/3 and 5/3
    assert choices.rank_correlation(torch.tensor([1.0, 1.0, 2.0, 2.0]), losses) == pytest.approx(
        2 / 3 / (4 / 3 * 5 / 3) ** 0.5)
    assert choices.rank_correlation(torch.ones(4), losses) == 0


def test_an_answer_is_right_if_all_its_characters_are():
    text = choices.Text(ALL, ALL, answers=True)
    rows, oracle = choices.everyone(LOSSES, RIGHT, text)
    assert [row['result'] for row in rows] == [0, 0.5, 0]
    assert oracle['result'] == 1
    not_all_count = choices.Text(ALL, torch.tensor([[0, -1], [-1, 0]]), answers=True)
    rows, _ = choices.everyone(LOSSES, RIGHT, not_all_count)
    assert [row['result'] for row in rows] == [1, 1, 0]


def test_each_number_is_in_its_column(capsys):
    columns = ['loss', 'right answers', 'corrects', 'breaks'], ['2.8750', '0.0%', '25.0%', '50.0%']
    for answers in True, False:
        text = choices.Text(ALL, ALL, answers)
        choices.print_everyone(*choices.everyone(LOSSES, RIGHT, text), text)
        head, _, _, last, oracle = cells(capsys.readouterr().out)
        for row, want in zip((head, last), columns):
            assert row[1:] == (want if answers else want[:1] + want[2:])
        assert oracle[:2] == ['oracle 1.75', '1.5000']
    choices.print_taus([{'tau': 0.1, 'passes': 2.0, 'chosen': 1.5, 'random': [1.0, 1.2, 1.7],
                         'rank': 0.25}], text)
    assert cells(capsys.readouterr().out)[1][:6] == [
        '0.1', '2.00', '1.5000', '1.3000', '1.0000 to 1.7000', '+0.25']


def test_the_end_of_an_answer_keeps_its_passes(model, monkeypatch):
    """The passes of its characters alone are counted, and dealt out."""
    answers = choices.Text(X, Y, answers=True, end=int(Y[0, 5]))
    ends, at_first = Y == answers.end, choices.see(model, X, Y)[2]
    seen, see = [], choices.see

    def watched(model, inputs, targets, passes=None):
        seen.append(passes)
        return see(model, inputs, targets, passes)

    monkeypatch.setattr(choices, 'see', watched)
    first, lots = torch.rand(N, T), []
    for seed in (1, 2):
        settings = choices.ChoiceSettings(taus=str(model.config.halt_tau), lots=1, seed=seed)
        [row] = choices.each_tau(model, answers, settings, first)
        lots.append(seen[-1])
    dealt = lots[0]
    assert not torch.equal(*lots)
    counted = ~ends & (Y >= 0)
    assert row['rank'] == choices.rank_correlation(at_first[counted].float(), first[counted]) != 0
    assert not torch.equal(dealt, at_first)
    assert torch.equal(dealt[ends | (Y < 0)], at_first[ends | (Y < 0)])
    assert row['passes'] == pytest.approx(at_first[~ends & (Y >= 0)].double().mean().item())


def test_a_line_per_tau_and_one_per_number_of_passes(tmp_path, small_data, capsys):
    size = dict(vocab_size=320, n_tokens=257, block_size=16, n_layer=2)
    folder = save(tmp_path / 'a', make(**{**TOGGLES['exit'], **size}), data_dir=small_data)
    choices.main([folder, '--tokens=100', '--lots=2', '--taus=0.2,0.9', '--device=cpu'])
    out = capsys.readouterr().out
    assert out.startswith('nats per token; 112 validation tokens\n')
    assert [row[0].split()[0] for row in cells(out)] == [
        'halt_tau', '0.2', '0.9', 'passes', 'everyone', 'everyone', 'everyone', 'oracle']
    old = save(tmp_path / 'c', make(**{**TOGGLES['exit'], **size}), data_dir=small_data)
    state = torch.load(f'{old}/ckpt.pt', weights_only=True)
    torch.save({**state, 'val_data': 'other'}, f'{old}/ckpt.pt')
    for spelled in (small_data, small_data + '/', os.path.relpath(small_data)):
        choices.main([old, f'--data_dir={spelled}', '--tokens=100', '--lots=1', '--taus=0.2',
                      '--device=cpu'])
        assert 'validation set in' in capsys.readouterr().err
    for ponder in ('none', 'feedback'):     # in generation
        one_pass = save(tmp_path / 'b', make(**{**size, 'ponder': ponder}), data_dir=small_data)
        with pytest.raises(UserError, match=f"ponder='{ponder}': this model takes one pass"):
            choices.main([one_pass])
    loop = save(tmp_path / 'd', make(**{**TOGGLES['loop'], **size}), data_dir=small_data)
    with pytest.raises(UserError, match="taus: this model has halting='none'"):
        choices.main([loop, '--taus=0.2'])
    with pytest.raises(UserError, match='lots=2: is for a model that halts'):
        choices.main([loop, '--lots=2'])
    with pytest.raises(UserError, match='problems=9: is for a made task'):
        choices.main([loop, '--problems=9'])


def test_on_a_made_task_answers_count(tmp_path, monkeypatch, capsys):
    """Those that are generated are those that are right when the answer is read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare_data, 'problems',
                        lambda name, size, count, seed: tasks.problems(name, size, 900, seed))
    prepare_data.main(['addition', '--size=2'])
    size = dict(vocab_size=320, n_tokens=257, block_size=32, n_layer=1)
    loop = make(**{**TOGGLES['loop'], **size}).float()
    optimizer = torch.optim.AdamW(loop.parameters(), 3e-3)
    inputs, targets = read_answers(loop, exam_of_data('data/addition'), 30)
    for _ in range(60):         # until some are right and some are not
        loss = loop(inputs, targets)[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save('out', loop.eval(), data_dir='data/addition')
    choices.main(['out', '--halting=exit', '--taus=0.3', '--lots=1', '--problems=30',
                  '--json=out/choices.jsonl', '--device=cpu'])
    assert 'right answers to 30 problems; 120 validation tokens' in capsys.readouterr().out
    with open('out/choices.jsonl') as f:
        [record] = map(json.loads, f)
    model, _, _ = load_model('out', 'cpu', halting='exit')
    model.config.halt_tau = 0.3
    exam = exam_of_data('data/addition')
    wrote = fmean(outcome.right for outcome in answer_problems(model, exam, 30))
    [row] = record['taus']
    assert row['chosen'] == pytest.approx(wrote)
    assert 0.1 < wrote < 1
    assert 1 < row['passes'] < 3
    assert record['everyone'][-1]['result'] > record['everyone'][0]['result']
