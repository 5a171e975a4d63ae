"""The choices of a halting model against lots: passes as told are exactly those, and nothing else changes."""
import json

import pytest
import torch
from conftest import TOGGLES, make, save

from engine.errors import UserError
from engine.shards import get_tokenizer
from prepare_data import write_dataset
from tools import choices


@pytest.fixture(params=['gate', 'gate_depth', 'router', 'router_depth', 'mask', 'mask2_depth'])
def model(request):
    return make(**TOGGLES[request.param])


ROWS = torch.randint(0, 50, (10, 18), generator=torch.Generator().manual_seed(3))


def test_told_its_own_choice_it_is_the_same(model):
    other, deal = choices.obedient(model)
    seen = []
    for tau in (1e-4, model.config.halt_tau, 0.6):
        model.config.halt_tau = tau
        loss, passes = choices.nats(model, ROWS)
        told, taken = choices.nats(other, ROWS, deal, passes)
        assert torch.equal(passes, taken)
        if model.config.halting != 'mask': assert loss == pytest.approx(told, abs=1e-10)
        # `mask` leaves out what it cuts, the copy scales up the rest: of a thought of 0.01 % nothing is to be seen
        elif tau == 1e-4: assert loss == pytest.approx(told, abs=1e-3)
        seen.append((loss, passes.double().mean()))
    assert len(set(seen)) == 3  # the thresholds do differ


def test_all_passes_are_threshold_0_and_one_is_the_plain_gpt(model):
    other, deal = choices.obedient(model)
    model.config.halt_tau = 0
    everything, _ = choices.nats(model, ROWS)
    plain = model.loss(model.trunk(model.embed(ROWS[:, :-1]), torch.arange(17)), ROWS[:, 1:]).item()
    for want, n in ((everything, model.config.ponder_steps + 1), (plain, 1)):
        loss, taken = choices.nats(other, ROWS, deal, torch.full((10, 17), n))
        assert want == pytest.approx(loss, abs=1e-10) and (taken == n).all()


def test_a_lot_takes_the_same_passes_elsewhere(model):
    other, deal = choices.obedient(model)
    loss, passes = choices.nats(model, ROWS)
    lot = passes.flatten()[torch.randperm(170, generator=torch.Generator().manual_seed(0))].view(10, 17)
    dealt, taken = choices.nats(other, ROWS, deal, lot)
    assert torch.equal(taken, lot) and not torch.equal(lot, passes) and abs(dealt - loss) > 1e-6


def test_prints_and_refuses(tmp_path, small_data, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    size = dict(vocab_size=320, n_tokens=257, block_size=16, n_layer=2)
    path = save(tmp_path / 'router', make(**{**TOGGLES['router'], **size}), data_dir=small_data)
    out = []
    for seed in (0, 0, 1):
        choices.main([path, '--tokens=100', '--lots=2', '--taus=0.2,0.3', '--device=cpu', f'--seed={seed}'])
        out.append(capsys.readouterr().out)
    lines = out[0].splitlines()
    assert out[0] == out[1] != out[2] and [line[:23] for line in lines[3:5]] == [line[:23] for line in out[2].splitlines()[3:5]]
    assert lines[0] == 'nats per token of 112 validation tokens' and len(lines) == 8
    assert [line.split()[0] for line in lines[3:]] == ['0.2', '0.3', 'everyone', 'everyone', 'everyone']
    write_dataset('data/re', (b'some words %d' % n * 9 for n in range(99)), get_tokenizer('byte'), 0.3, 'test')
    other = save(tmp_path / 'other', make(**{**TOGGLES['router'], **size}), data_dir='data/re')
    meta = json.loads(open('data/re/meta.json').read())
    with open('data/re/meta.json', 'w') as f: json.dump({**meta, 'tokenizer': 'gpt2', 'n_tokens': 50257}, f)
    with pytest.raises(UserError, match='data/re has gpt2 tokens, not byte'): choices.main([other])
    plain = save(tmp_path / 'plain', make(**size), data_dir=small_data)
    still = save(tmp_path / 'still', make(**{**TOGGLES['gate'], **size, 'ponder_steps': 0}), data_dir=small_data)
    for args, words in [([still], 'ponder_steps=0'), ([], 'one checkpoint'), ([plain, plain], 'one checkpoint'), ([plain], "halting='none'"), (['gone'], 'no checkpoint'),
                        ([path, '--taus=a'], 'taus=a'), ([path, '--taus=0'], 'taus=0'), ([path, '--lots=0'], 'lots')]:
        with pytest.raises(UserError, match=words) as error: choices.main(args)
        assert '\n' not in str(error.value)
