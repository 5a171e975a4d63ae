"""tools/race.py: all are trained as train.py trains, and the table follows from the runs."""
import json
import os
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, cells

import prepare_data
import train
from engine.build import new_model
from engine.files import UserError, alone
from model import GPTConfig
from prepare_data import DataSettings
from tools import compare, race
from tools.compare import read_log

RECIPE = ['--n_layer=2', '--n_head=2', '--n_embd=32', '--mlp_hidden=32', '--block_size=32',
          '--batch_tokens=128', '--micro_batch=2', '--max_steps=4', '--eval_interval=2',
          '--eval_tokens=256', '--log_interval=2', '--device=cpu', '--dtype=float32']
# as much of nanoGPT's file as its users call
NANOGPT = '''
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        layers = [nn.Linear(config.n_embd, config.n_embd) for _ in range(config.n_layer)]
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd), h=nn.ModuleList(layers)))

    def forward(self, idx, targets):
        x = self.transformer.wte(idx)
        for layer in self.transformer.h:
            x = x + layer(x).relu()
        logits = x @ self.transformer.wte.weight.T
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
'''


@pytest.fixture
def started(small_data, tmp_path, monkeypatch):
    """Start tools/race.py; returns the records of its folder."""
    monkeypatch.setattr(race, 'TURNS', 1)
    monkeypatch.setattr(race, 'STEPS', 1)
    path = tmp_path / 'model.py'
    path.write_text(NANOGPT)

    def start(*args):
        out = tmp_path / 'race'
        race.main([str(path), *RECIPE, f'--data_dir={small_data}', f'--out={out}', *args])
        with open(out / 'runs.jsonl') as f:
            return [json.loads(line) for line in f]
    return start


def test_ours_is_what_train_py_trains(started, small_data, tmp_path):
    for optimizer in ('adamw', 'muon'):
        started('--names=ours', f'--optimizers={optimizer}', '--lrs=1e-3', '--seeds=1')
        plain = [os.path.join(ROOT, 'config', 'loop.py'), '--ponder_steps=0', *RECIPE]
        train.main([*plain, '--learning_rate=1e-3', '--seed=1', '--sample_tokens=0',
                    f'--optimizer={optimizer}', f'--data_dir={small_data}',
                    f'--out_dir={tmp_path / optimizer}'])
        assert not (tmp_path / 'race' / f'ours-{optimizer}-0.001-s0').exists()  # no choice, no seed
        raced = read_log(tmp_path / 'race' / f'ours-{optimizer}-0.001-s1')
        trained = read_log(tmp_path / optimizer)
        assert len(raced) == len(trained) == 5
        for mine, theirs in zip(raced, trained):
            assert mine.keys() - {'ms'} < theirs.keys()
            for key in mine.keys() - {'ms'}:
                assert mine[key] == pytest.approx(theirs[key], rel=1e-6), key


def test_each_races_at_the_best_of_its_rates(started, tmp_path, capsys, monkeypatch):
    args = ['--lrs=1e-5,1e-2', '--seeds=1,2']
    records = started(*args)
    runs = [r for r in records if 'seed' in r]
    chosen = {}
    for r in runs:
        pair = r['name'], r['optimizer']
        if r['picks']:
            assert r['seed'] == 0
            chosen[pair] = min(chosen.get(pair, (99, 0)), (r['val_loss'], r['learning_rate']))
        else:
            assert r['learning_rate'] == chosen[pair][1] == 1e-2
        assert [*r['curve']] == ['2', '4'] and r['curve']['4'] == r['val_loss']
    assert len(chosen) == 4 and len(runs) == 4 * (2 + 2)
    told = capsys.readouterr().out
    assert 'nanogpt muon: 0.01 is the best of --lrs and at its edge' in told
    table = cells(told)
    both = sorted([*pair, rate] for pair in chosen for rate in ('1e-05', '0.01'))
    assert sorted([*row[:2], row[3]] for row in table[1:]) == both
    [timed] = [r['ms'] for r in records if 'ms' in r]
    assert sorted(timed) == ['nanogpt adamw', 'nanogpt muon', 'ours adamw', 'ours muon']
    assert started(*args) == records        # nothing is made twice
    race.main([str(tmp_path / 'race' / 'runs.jsonl')])
    assert cells(capsys.readouterr().out)[-8:] == table[1:]
    with pytest.raises(UserError, match='seed 2, which was made to judge and would now choose'):
        started(*args[:1], '--pick=0,2', '--seeds=1')
    with pytest.raises(UserError, match='--max_steps=8.*choose another --out'):
        started(*args, '--max_steps=8')     # those records are of 4 steps
    (tmp_path / 'model.py').write_text(NANOGPT.replace('relu', 'tanh'))
    with pytest.raises(UserError, match='nanogpt=.*choose another --out'):
        started(*args)
    (tmp_path / 'model.py').write_text(NANOGPT)
    with monkeypatch.context() as patch:
        patch.setattr(race.inspect, 'getsource', lambda module: 'CONTENDERS = {}')
        with pytest.raises(UserError, match='race=.*choose another --out'):
            started(*args)
    monkeypatch.setattr(race, 'CODE', 'of another model.py')
    with pytest.raises(UserError, match='code=.*choose another --out'):
        started(*args)


@pytest.mark.parametrize('name', race.CONTENDERS)
def test_what_is_changed_trains(name, started):
    [run, _] = started(f'--names={name}', '--optimizers=adamw', '--lrs=1e-2', '--seeds=1')
    assert run['curve']['4'] < run['curve']['2']


def test_learned_positions_take_the_place_of_rotated_ones():
    config = GPTConfig(vocab_size=320, n_layer=1, n_head=2, n_embd=32, mlp_hidden=32, block_size=32)
    rotated = new_model(config)
    learned = race.new_contender('learned_positions', None, config, 1)
    idx = torch.randint(257, (1, 9))
    turned = torch.cat((idx[:, :8].flip(1), idx[:, 8:]), dim=1)
    for model, same in ((rotated, False), (learned, False), (learned, True)):
        if same:
            torch.nn.init.zeros_(model.drop.wpe.weight)     # the last token sees a bag of tokens
        a, b = [model(x)[0][:, -1, :257] for x in (idx, turned)]
        assert torch.allclose(a, b, atol=1e-5) == same


def record(name='nanogpt', optimizer='adamw', rate=1e-3, seed=1, loss=2.0, **more):
    return dict(name=name, optimizer=optimizer, learning_rate=rate, seed=seed, picks=seed == 0,
                val_loss=loss, curve={'2': 3.0, '4': loss}, steps=4, parameters=10 ** 6,
                commit='abc', torch='2.13.0', hardware='a CPU', date='2026-01-01') | more


def timing(ms, **more):
    return dict(ms=ms, commit='abc', torch='2.13.0', hardware='a CPU', date='2026-01-01') | more


def test_the_table_has_every_run_and_names_its_seed():
    made = [record(loss=2.25, seed=0), record(rate=3e-3, seed=0, loss=2.0),
            record(rate=3e-3, seed=2, loss=2.5), record(rate=3e-3, seed=1, loss=1.5),
            record('ours', seed=1, loss=1.0), timing({'nanogpt adamw': 1}, hardware='an old CPU'),
            timing({'ours adamw': 20, 'nanogpt adamw': 10}, hardware='another CPU')]
    assert 'a CPU, another CPU; torch' in race.table_of(made)
    assert cells(race.table_of(made))[1:4] == [
        ['nanogpt', 'adamw', '1.00M', '0.001', '2.250', '', '', '', '10'],
        ['nanogpt', 'adamw', '1.00M', '0.003', '2.000', '1: 1.500, 2: 2.500', '2.0000',
         '3, not', '10'],
        ['ours', 'adamw', '1.00M', '0.001', '', '1: 1.000', '1.0000', '3', '20']]
    below = [record(), record('ours', curve={'2': 1.5, '4': 1.0})]  # from its first evaluation on
    assert [row[-2] for row in cells(race.table_of(below))[1:]] == ['4', '<=2']
    for more, words in ((record(rate=3e-3, seed=2), 'nanogpt adamw 0.003 2 is there twice'),
                        (record(seed=5, steps=2), 'several numbers of steps')):
        with pytest.raises(UserError, match=words):
            race.table_of([*made, more])


def test_only_the_rate_that_was_picked_counts():
    made = [record(rate=rate, seed=seed, loss=loss)
            for rate, seed, loss in ((1e-3, 0, 2.0), (3e-3, 0, 1.0), (1e-3, 1, 0.5), (3e-3, 1, 3.0),
                                     (3e-3, 2, 2.0), (1e-3, 2, 4.0))]
    assert race.at_best_rate(made) == made[3:5]
    assert race.at_best_rate(made[2:]) == [made[2], made[5]]    # no seed has picked: of the mean
    assert race.goal_of(made) == 2.5
    assert race.goal_of([{**r, 'optimizer': 'muon'} for r in made]) is None
    assert race.goal_of(made[:3]) is None       # nobody has judged that rate yet
    again = record(rate=3e-3, seed=4, loss=3.0)     # one more seed picks, without the first rate
    again['picks'] = True
    assert race.at_best_rate([*made, again]) == made[3:5]
    made[0]['val_loss'] = 1.5       # lower than the mean of the two
    assert race.at_best_rate([*made, again]) == made[3:5]


def test_a_file_of_made_runs_takes_no_settings():
    for setting in '--names=ours', '--max_steps=77':
        with pytest.raises(UserError, match='(names|max_steps): does nothing for a file of runs'):
            race.main(['docs/runs/race.jsonl', setting])


def test_a_rate_that_diverges_is_not_the_best(started):
    """Not even as the first, though nothing is less than NaN."""
    chosen = [r['learning_rate'] for r in started(
        '--names=ours', '--optimizers=adamw', '--lrs=1e30,1e-2', '--seeds=1') if 'seed' in r]
    assert chosen == [1e30, 1e-2, 1e-2]


def test_a_step_that_is_not_finite_is_skipped(started, tmp_path, monkeypatch):
    """And is left out of the mean in its log."""
    forward, calls = race.NanoGPT.forward, []

    def once_nan(self, *args):
        calls.append(1)
        logits, loss = forward(self, *args)
        return logits, loss * float('nan') if len(calls) in (2, 3) else loss   # in steps 1 and 2
    monkeypatch.setattr(race.NanoGPT, 'forward', once_nan)
    [run, _] = started('--names=nanogpt', '--optimizers=adamw', '--lrs=1e-2', '--seeds=1',
                       '--log_interval=4')
    assert run['curve']['4'] < run['curve']['2'] < float('inf')
    log = read_log(tmp_path / 'race' / 'nanogpt-adamw-0.01-s1')
    first, last = [line['loss'] for line in log if 'loss' in line]
    assert first is None and 0 < last < float('inf')


def test_an_evaluation_is_no_part_of_a_steps_time(started, tmp_path, monkeypatch):
    """Also where it comes between two lines of steps."""
    now = [0.0]

    def takes(seconds, method):
        def slow(self):
            now[0] += seconds
            return method(self)
        return slow
    monkeypatch.setattr(race.Run, 'train_step', takes(1, race.Run.train_step))
    monkeypatch.setattr(race.Run, 'evaluate', takes(100, race.Run.evaluate))
    monkeypatch.setattr(race, 'time', SimpleNamespace(perf_counter=lambda: now[0],
                                                      strftime=race.time.strftime))
    started('--names=ours', '--optimizers=adamw', '--lrs=1e-3', '--seeds=1', '--max_steps=5',
            '--log_interval=4', '--eval_interval=3')
    log = read_log(tmp_path / 'race' / 'ours-adamw-0.001-s1')
    assert [(line['step'], line['ms']) for line in log if 'ms' in line] == [
        (1, 1000), (4, 1000), (5, 1000)]


def test_the_step_at_which_a_curve_has_a_loss():
    curve = {'300': 3.0, '600': 2.0, '900': 1.0}
    assert race.steps_to(curve, 2.25) == 525
    assert race.steps_to(curve, 3.5) == race.steps_to({**curve, '450': 4.0}, 3.5) == 300
    assert race.steps_to(curve, 0.5) is None


@pytest.mark.parametrize('args, words', [
    (['--names=ours,nano'], 'names=nano: choose from nanogpt, ours'),
    (['--seeds=0,1'], 'pick=0 has 0, as seeds'),
    (['--seeds=1,x'], 'give whole numbers'),
    (['--lrs=1e-3,'], 'lrs=1e-3,: give learning rates'),
    (['--optimizers=adamw,moun'], 'moun'),
    (['more.jsonl'], 'name the model.py of nanoGPT'),
    (['--dry_run=True'], 'dry_run=True: the race chooses this itself'),
    (['--ponder_steps=3'], 'ponder_steps=3: the race chooses'),
    (['--learning_rate=1e-3'], 'learning_rate=0.001: the race chooses'),
    (['--dtype=float16'], 'gradient scaler'),
    (['--dropout=0.1'], 'set --dropout=0'),
])
def test_refusals(started, args, words):
    with pytest.raises(UserError, match=words):
        started(*args)


def test_data_prepared_anew_ends_the_race(started, tmp_path, monkeypatch):
    sums = iter('aaaab')    # the recipe's, at first, before a run, after it, before the next
    monkeypatch.setattr(race, 'sum_of_data', lambda folder: next(sums))
    monkeypatch.setattr(compare, 'sum_of_data', lambda folder: next(sums))
    with pytest.raises(UserError, match='prepared anew since this command began'):
        started('--names=ours,gelu', '--optimizers=adamw', '--lrs=1e-3', '--seeds=1')
    assert len(compare.read_lines(tmp_path / 'race' / 'runs.jsonl')) == 1


def test_two_races_do_not_share_a_folder(started, tmp_path):
    with alone(tmp_path / 'race'), pytest.raises(UserError, match='another process writes here'):
        started('--names=ours', '--optimizers=adamw', '--lrs=1e-3', '--seeds=1')


def test_a_race_is_on_text(started, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare_data.prepare(DataSettings(problems=300), ['addition'])
    with pytest.raises(UserError, match='addition is a made task'):
        started('--data_dir=data/addition')
    with pytest.raises(UserError, match='nowhere.jsonl: no finished run here'):
        race.main([str(tmp_path / 'nowhere.jsonl')])
