"""exercises/labs/middle.py: what its passes are, and that a folder of other runs is refused."""

import pytest
import torch
from conftest import make

import train
from engine.files import UserError
from exercises.labs import middle

TINY = ['--n_layer=3', '--n_head=2', '--n_embd=16', '--mlp_hidden=16', '--block_size=16',
        '--batch_tokens=32', '--micro_batch=2', '--max_steps=10', '--eval_tokens=64',
        '--sample_tokens=0', '--learning_rate=0.01', '--device=cpu', '--dtype=float32']


@pytest.fixture(autouse=True)
def middle_for_this_test_only(monkeypatch):
    monkeypatch.setitem(middle.PONDER, 'middle', middle.LateMiddle)


def test_the_middle_runs_twice_from_the_beginning_it_is_told(monkeypatch):
    monkeypatch.setattr(middle.LateMiddle, 'begin', 0.5)
    gpt = make(ponder='middle', ponder_steps=1, n_layer=6)
    idx = torch.randint(0, 50, (2, 9))
    x = gpt.embed(idx)
    pos = torch.arange(9)
    first = gpt.blocks(x, pos, layers=range(2))
    once = gpt.blocks(first, pos, layers=range(2, 4))
    twice = gpt.blocks(once, pos, layers=range(2, 4))
    for progress, inside in ((0.4, once), (0.5, twice), (1.0, twice)):
        gpt.mechanism.progress = progress
        expected = gpt.ln_f(gpt.blocks(inside, pos, layers=range(4, 6)))
        assert torch.allclose(gpt.hidden(idx), expected, atol=1e-12)


def test_a_finished_run_is_read_and_another_one_refused(small_data, tmp_path, monkeypatch, capsys):
    args = [*TINY, f'--data_dir={small_data}', '--seeds=1', f'--out={tmp_path}']
    middle.main(args)
    first = capsys.readouterr().out.splitlines()[-6:]
    monkeypatch.setattr(train, 'main', None)    # nothing is trained again
    middle.main(args)
    assert capsys.readouterr().out.splitlines()[-6:] == first
    with pytest.raises(UserError, match='choose another --out'):
        middle.main([*args, '--n_layer=6'])
