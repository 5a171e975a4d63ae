"""
exercises/labs/copying.py: matches are those of a slow search, every token is in one group of each
kind, and a model that copies is seen.
"""
import math

import pytest
import torch
from conftest import cells, make, save

import copying as lab
from copying import groups, match_lengths, repeated
from engine.files import UserError

SMALL = dict(vocab_size=320, n_tokens=257, block_size=96)


def slow_match(row, i):
    """How many tokens of a list, up to and with place i, stand in the same order before."""
    for n in range(i, 0, -1):
        if any(row[j + 1 - n:j + 1] == row[i + 1 - n:i + 1] for j in range(n - 1, i)):
            return n
    return 0


def test_matches_are_those_of_a_slow_search():
    x = torch.randint(0, 3, (4, 40), generator=torch.Generator().manual_seed(0))
    x[3] = 2
    want = [[slow_match(row, i) for i in range(len(row))] for row in x.tolist()]
    assert match_lengths(x).tolist() == want
    assert want[3] == [*range(40)]
    assert max(want[0]) < 12


def test_what_comes_again_is_foretold_by_nothing_else():
    x = torch.arange(40).view(4, 10)
    twice = repeated(x)
    assert twice.shape == x.shape
    assert twice[:, :5].equal(twice[:, 5:])
    assert len(set(twice[:, :5].flatten().tolist())) == 20
    assert (twice[:, 1:5] - twice[:, :4] != 1).any()


def test_every_token_is_in_one_group_of_each_kind():
    match = torch.randint(0, 20, (3, 30), generator=torch.Generator().manual_seed(0))
    named = groups(match)
    for kind in ('all', 'match', 'place'):
        of_kind = [chosen for name, chosen in named.items() if name.startswith(kind)]
        assert (torch.stack(of_kind).sum(0) == 1).all(), kind
    assert named['match 3 to 5'].equal((match > 2) & (match < 6))
    assert named['place 7 to 13'].float().mean().item() == pytest.approx(7 / 30)


def copies(model, rows):
    """Losses of one who copies, with one nat of doubt, behind a match of three or more."""
    guesses = torch.full((len(rows), rows.size(1) - 1), math.log(256))
    return guesses.masked_fill(match_lengths(rows[:, :-1]) >= 3, 1.0)


def test_the_table_shows_who_copies(small_data, tmp_path, capsys, monkeypatch):
    for name, depth in ('plain', False), ('depth', True):
        save(tmp_path / name, make(**SMALL, depth_attn=depth), data_dir=str(small_data))
    folders = [str(tmp_path / 'plain'), str(tmp_path / 'depth')]
    assert lab.main([*folders, '--windows=30']) is None
    _, share, plain, depth = cells(capsys.readouterr().out)
    assert plain != depth
    numbers = [float(cell) for cell in plain[1:]]
    shares = [float(cell) for cell in share[1:-2]]
    for kind in (slice(1, 5), slice(5, 8)):
        assert sum(shares[kind]) == pytest.approx(1, abs=0.003)
        mean = sum(a * b for a, b in zip(numbers[kind], shares[kind]))
        assert mean == pytest.approx(numbers[0], abs=0.02)

    monkeypatch.setattr(lab, 'token_nats', copies)
    lab.main([folders[0], '--windows=30'])
    numbers = [float(cell) for cell in cells(capsys.readouterr().out)[2][1:]]
    assert numbers[1] == pytest.approx(math.log(256), abs=1e-3)
    assert numbers[2] == 1.0
    assert numbers[-1] < numbers[-2] - 4


def test_refusals(small_data, tmp_path):
    with pytest.raises(UserError, match='name checkpoint folders'):
        lab.main([])
    save(tmp_path / 'a', make(**SMALL), data_dir=str(small_data))
    save(tmp_path / 'b', make(**{**SMALL, 'block_size': 16}), data_dir=str(small_data))
    with pytest.raises(UserError, match='another block_size'):
        lab.main([str(tmp_path / 'a'), str(tmp_path / 'b')])
