"""
exercises/labs/copying.py: matches are those of a slow search, every token is in one group of each
kind, and a model that copies is seen.
"""
import math

import pytest
import torch
from conftest import cells, make, save

import copying as lab
from copying import groups, matches
from engine.files import UserError

SMALL = dict(vocab_size=320, n_tokens=257, block_size=96)


def slow_match(row, i):
    """
    (how many tokens of a list, up to and with place i, stand in the same order before, what
    followed there the last time).
    """
    for n in range(i, 0, -1):
        for j in range(i - 1, n - 2, -1):
            if row[j + 1 - n:j + 1] == row[i + 1 - n:i + 1]:
                return n, row[j + 1]
    return 0, None


def test_matches_are_those_of_a_slow_search():
    x = torch.randint(0, 3, (4, 40), generator=torch.Generator().manual_seed(0))
    x[3] = 2
    length, follower = matches(x)
    for row, lengths, followers in zip(x.tolist(), length.tolist(), follower.tolist()):
        for i in range(40):
            want, then = slow_match(row, i)
            assert lengths[i] == want
            assert want == 0 or followers[i] == then
    assert length[3].tolist() == [*range(40)]
    assert length[0].max() < 12


def test_every_token_is_in_one_group_of_each_kind():
    x, y = torch.randint(0, 3, (2, 3, 28), generator=torch.Generator().manual_seed(0))
    named = groups(x, y)
    kinds = list(named.values())
    assert kinds[0].all()
    assert (torch.stack(kinds[1:4]).sum(0) == 1).all()
    assert (torch.stack(kinds[4:]).sum(0) == 1).all()
    assert named['place 0 to 6'].float().mean().item() == pytest.approx(1 / 4)
    length, follower = matches(x)
    assert named['as then'].equal((length > 2) & (follower == y))


def copies(model, rows):
    """Losses of one who copies, with one nat of doubt, behind a match of three or more."""
    x, y = rows[:, :-1], rows[:, 1:]
    length, follower = matches(x)
    guesses = torch.full(x.shape, math.log(256))
    return guesses.masked_fill(length >= 3, 9.0).masked_fill((length >= 3) & (follower == y), 1.0)


def test_the_table_shows_who_copies(small_data, tmp_path, capsys, monkeypatch):
    for name, depth in ('plain', False), ('depth', True):
        save(tmp_path / name, make(**SMALL, depth_attn=depth), data_dir=str(small_data))
    folders = [str(tmp_path / 'plain'), str(tmp_path / 'depth')]
    assert lab.main([*folders, '--windows=30']) is None
    _, share, plain, depth = cells(capsys.readouterr().out)
    assert plain != depth
    numbers = [float(cell) for cell in plain[1:]]
    shares = [float(cell) for cell in share[1:-2]]
    for kind in (slice(1, 4), slice(4, 7)):
        assert sum(shares[kind]) == pytest.approx(1, abs=0.003)
        mean = sum(a * b for a, b in zip(numbers[kind], shares[kind]))
        assert mean == pytest.approx(numbers[0], abs=0.02)

    monkeypatch.setattr(lab, 'token_nats', copies)
    lab.main([folders[0], '--windows=30'])
    numbers = [float(cell) for cell in cells(capsys.readouterr().out)[2][1:]]
    assert numbers[1:4] == [pytest.approx(math.log(256), abs=1e-3), 1.0, 9.0]
    assert numbers[-1] < 2 < numbers[-2]

    # the same tokens once and again: those behind the first of each half
    monkeypatch.setattr(lab, 'token_nats', lambda model, rows: (
        torch.arange(1.0, rows.size(1)).expand(len(rows), -1)))
    lab.main([folders[0], '--windows=30'])
    once, again = cells(capsys.readouterr().out)[2][-2:]
    half = SMALL['block_size'] // 2
    assert float(once) == half / 2 and float(again) == half + half / 2


def test_refusals(small_data, tmp_path):
    with pytest.raises(UserError, match='name checkpoint folders'):
        lab.main([])
    save(tmp_path / 'a', make(**SMALL), data_dir=str(small_data))
    save(tmp_path / 'b', make(**{**SMALL, 'block_size': 16}), data_dir=str(small_data))
    with pytest.raises(UserError, match='another block_size'):
        lab.main([str(tmp_path / 'a'), str(tmp_path / 'b')])
    save(tmp_path / 'c', make(**SMALL, ponder='feedback'), data_dir=str(small_data))
    with pytest.raises(UserError, match='c: reads a text by iteration'):
        lab.main([str(tmp_path / 'a'), str(tmp_path / 'c')])
