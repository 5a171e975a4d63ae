"""The choices of a halting model against lots: passes as told, and nothing else changes."""

import json

import pytest
import torch
from conftest import TOGGLES, make, save
from released import PONDER, write_folder

from engine.files import UserError
from engine.shards import get_tokenizer
from prepare_data import write_dataset
from tools import choices

N, T = 10, 11  # more rows than are computed at a time; a full context
ROWS = torch.randint(0, 50, (N, T + 1), generator=torch.Generator().manual_seed(3))


@pytest.fixture(params=['gate', 'gate_depth', 'router', 'router_depth', 'mask', 'mask2_depth'])
def model(request):
    return make(**TOGGLES[request.param], block_size=T)


def test_told_its_own_choice_it_is_the_same(model):
    other, deal = choices.obedient(model)
    seen = []
    for tau in (1e-4, model.config.halt_tau, 0.6):
        model.config.halt_tau = tau
        loss, passes = choices.nats(model, ROWS)
        told, taken = choices.nats(other, ROWS, deal, passes)
        assert torch.equal(passes, taken)
        if model.config.halting != 'mask':
            assert loss == pytest.approx(told, abs=1e-10)
        elif tau == 1e-4:
            # `mask` leaves out what it cuts, the copy scales up the rest: of a thought of 0.01 %
            # nothing is to be seen
            assert loss == pytest.approx(told, abs=1e-3)
        seen.append((loss, passes.double().mean()))
    assert len(set(seen)) == 3  # the thresholds do differ


def test_all_passes_are_threshold_0_and_one_is_the_plain_gpt(model):
    other, deal = choices.obedient(model)
    model.config.halt_tau = 0
    everything, _ = choices.nats(model, ROWS)
    hidden = model.trunk(model.embed(ROWS[:, :-1]), torch.arange(T))
    plain = model.loss(hidden, ROWS[:, 1:]).item()
    for want, n in ((everything, model.config.ponder_steps + 1), (plain, 1)):
        loss, taken = choices.nats(other, ROWS, deal, torch.full((N, T), n))
        assert want == pytest.approx(loss, abs=1e-10)
        assert (taken == n).all()


def test_a_lot_takes_the_same_passes_elsewhere(model):
    other, deal = choices.obedient(model)
    loss, passes = choices.nats(model, ROWS)
    order = torch.randperm(N * T, generator=torch.Generator().manual_seed(0))
    lot = passes.flatten()[order].view(N, T)
    dealt, taken = choices.nats(other, ROWS, deal, lot)
    assert torch.equal(taken, lot)
    assert not torch.equal(lot, passes)
    assert abs(dealt - loss) > 1e-6


def test_after_each_pass_it_is_the_model_of_so_many_passes(model):
    """Told so or, where nobody halts, with fewer steps; a token's loss is read one by one."""
    losses, right = choices.after_each_pass(model, ROWS)
    other, deal = choices.obedient(model)
    for n in range(1, model.config.ponder_steps + 2):
        loss, _ = choices.nats(other, ROWS, deal, torch.full((N, T), n))
        assert losses[n - 1].mean().item() == pytest.approx(loss, abs=1e-10)
    loop = make(**TOGGLES['loop'], block_size=T)
    losses, right = choices.after_each_pass(loop, ROWS)
    loop.config.ponder_steps = 1
    logits = loop(ROWS[:, :-1])[0]
    for row, t in ((0, 0), (3, 5), (9, 10)):
        target = ROWS[row, t + 1]
        assert losses[1, row, t] == pytest.approx(-logits[row, t].log_softmax(-1)[target].item())
        assert right[1, row, t] == (logits[row, t].argmax() == target)


def test_the_oracle_takes_the_best_pass_of_each_token(monkeypatch, capsys):
    losses = torch.tensor([[[1.0, 5.0]], [[2.0, 3.0]], [[4.0, 3.5]]])       # (passes, 1, 2)
    right = torch.tensor([[[True, False]], [[True, True]], [[False, True]]])
    monkeypatch.setattr(choices, 'after_each_pass', lambda *_: (losses, right))
    choices.print_everyone(None, None)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ['everyone', '1', '3.0000']
    assert lines[2] == ['everyone', '2', '2.5000', '50.0%', '0.0%']
    assert lines[3] == ['everyone', '3', '3.7500', '0.0%', '50.0%']
    assert lines[4] == ['oracle', '1.50', '2.0000']


# -------------------------------------------------------------------------------------------------
# The program, on models of bytes

SIZE = dict(vocab_size=320, n_tokens=257, block_size=16, n_layer=2)


@pytest.fixture
def router(tmp_path, small_data):
    """The path of a checkpoint that halts."""
    model = make(**{**TOGGLES['router'], **SIZE})
    return save(tmp_path / 'router', model, data_dir=small_data)


def test_prints_a_line_per_tau_and_one_per_number_of_passes(router, capsys):
    printed = []
    for seed in (0, 0, 1):
        choices.main([router, '--tokens=100', '--lots=2', '--taus=0.2,0.3', '--device=cpu',
                      f'--seed={seed}'])
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]
    lines = printed[0].splitlines()
    assert lines[0] == 'nats per token of 112 validation tokens'
    first_words = [line.split()[0] for line in lines if line]
    assert first_words == ['nats', 'halt_tau', '0.2', '0.3', 'passes', 'everyone', 'everyone',
                           'everyone', 'oracle']
    # another seed, other lots; up to the loss as chosen all is the same
    other_seed = printed[2].splitlines()
    assert [line[:23] for line in lines[3:5]] == [line[:23] for line in other_seed[3:5]]


def test_a_data_set_that_was_made_again_with_another_tokenizer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = (b'some words %d' % n * 9 for n in range(99))
    write_dataset('data/re', texts, get_tokenizer('byte'), 0.3, 'test')
    path = save(tmp_path / 'other', make(**{**TOGGLES['router'], **SIZE}), data_dir='data/re')
    meta = tmp_path / 'data' / 're' / 'meta.json'
    gpt2 = dict(tokenizer='gpt2', n_tokens=50257, eot=50256)
    changed = {**json.loads(meta.read_text()), **gpt2}
    meta.write_text(json.dumps(changed))
    with pytest.raises(UserError, match='data/re has gpt2 tokens, not byte'):
        choices.main([path])


def test_a_hugging_face_folder_is_measured_on_the_data_that_is_named(tmp_path, capsys):
    c = dict(PONDER, vocab_size=270, max_position_embeddings=32)
    folder, _ = write_folder(tmp_path / 'hf', c, tokenizer=True)
    with pytest.raises(UserError, match='no validation set.*--data_dir=FOLDER'):
        choices.main([f'hf:{folder}'])

    tokenizer = get_tokenizer(f'hf:{folder}')
    documents = [f'hello  he said {i} '.encode() * 9 for i in range(100)]
    write_dataset(str(tmp_path / 'mine'), documents, tokenizer, 0.3, 'test')
    choices.main([f'hf:{folder}', f'--data_dir={tmp_path / "mine"}', '--tokens=64'])
    out = capsys.readouterr().out
    assert 'nats per token of 64 ' in out
    assert len([line for line in out.splitlines() if line.startswith('everyone ')]) == 4


@pytest.mark.parametrize('args, words', [
    (['STILL'], 'ponder_steps=0'),
    ([], 'one checkpoint'),
    (['PLAIN', 'PLAIN'], 'one checkpoint'),
    (['PLAIN'], "ponder='none'"),
    (['gone'], 'no checkpoint'),
    (['ROUTER', '--taus=a'], 'taus=a'),
    (['ROUTER', '--taus=0'], 'taus=0'),
    (['ROUTER', '--lots=0'], 'lots'),
])
def test_refusals(tmp_path, small_data, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    settings = {
        'PLAIN': SIZE,
        'STILL': {**TOGGLES['gate'], **SIZE, 'ponder_steps': 0},
        'ROUTER': {**TOGGLES['router'], **SIZE},
    }
    if args and args[0] in settings:
        model = make(**settings[args[0]])
        path = save(tmp_path / 'model', model, data_dir=small_data)
        args = [path if arg in settings else arg for arg in args]
    with pytest.raises(UserError, match=words) as error:
        choices.main(args)
    assert '\n' not in str(error.value)
