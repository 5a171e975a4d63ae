"""exercises/labs/middle.py: what its passes are, and that a folder of other runs is refused."""

import pytest
import torch
from conftest import close, make

import train
from engine.files import UserError
from exercises.labs import middle

TINY = ['--n_layer=3', '--n_head=2', '--n_embd=16', '--mlp_hidden=16', '--block_size=16',
        '--batch_tokens=32', '--micro_batch=2', '--max_steps=10', '--eval_tokens=64',
        '--sample_tokens=0', '--learning_rate=0.01', '--device=cpu', '--dtype=float32']


@pytest.fixture(autouse=True)
def middle_for_this_test_only(monkeypatch):
    monkeypatch.setitem(middle.PONDER, 'middle', middle.LateMiddle)
    monkeypatch.setattr(middle.LateMiddle, 'begin', 0.5)


def test_the_middle_runs_twice_from_the_beginning_it_is_told(idx, kind):
    """Step by step against the trunk; K = 0 is the plain model."""
    gpt = make(ponder='middle', ponder_steps=1, n_layer=6, kind=kind)
    x, pos = gpt.embed(idx), torch.arange(13)
    first = gpt.trunk(x, pos, layers=range(2), norm=False)
    once = gpt.trunk(first, pos, layers=range(2, 4), norm=False)
    twice = gpt.trunk(once, pos, layers=range(2, 4), norm=False)
    for progress, inside in ((0.4, once), (0.5, twice), (1.0, twice)):
        gpt.mechanism.progress = progress
        close(gpt.hidden(idx), gpt.trunk(inside, pos, layers=range(4, 6)), 1e-12)
    gpt.config.ponder_steps = 0
    close(gpt.hidden(idx), gpt.trunk(x, pos), 1e-12)


def test_generation_with_memories_by_name_is_the_full_reading(idx, kind):
    gpt = make(ponder='middle', ponder_steps=1, n_layer=6, kind=kind)
    memory = gpt.new_memory()
    parts = [gpt.hidden(part, memory) for part in idx.split([4, 1, 6, 1, 1], dim=1)]
    close(torch.cat(parts, dim=1), gpt.hidden(idx))


def test_a_finished_run_is_read_and_another_one_refused(small_data, tmp_path, monkeypatch, capsys):
    args = [*TINY, f'--data_dir={small_data}', '--seeds=1', f'--out={tmp_path}']
    middle.main(args)
    first = capsys.readouterr().out.splitlines()[-6:]
    assert [line.split()[1] for line in first[2:]] == ['plain', 'late', 'whole', 'plain_longer']
    monkeypatch.setattr(train, 'main', None)    # nothing is trained again
    middle.main(args)
    assert capsys.readouterr().out.splitlines()[-6:] == first
    with pytest.raises(UserError, match='choose another --out'):
        middle.main([*args, '--n_layer=6'])
