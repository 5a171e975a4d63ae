"""tools/compare.py: one recipe for all, nothing made twice, numbers that follow from the runs."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from conftest import ROOT

import train
from configurator import build, read
from engine.checkpoint import load_checkpoint
from engine.files import UserError
from model import GPT, GPTConfig
from tools import compare

RECIPE = ['--n_layer=2', '--n_head=2', '--n_embd=32', '--mlp_hidden=32', '--block_size=16',
          '--batch_tokens=64', '--micro_batch=4', '--max_steps=4', '--save_interval=2',
          '--eval_interval=9', '--eval_tokens=256', '--log_interval=1', '--sample_tokens=0',
          '--warmup=0.3', '--learning_rate=0.01', '--device=cpu', '--dtype=float32']


@pytest.fixture
def common(small_data, monkeypatch):
    """train.py's arguments for all runs; its processes take one thread, as this one does."""
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    return [*RECIPE, f'--data_dir={small_data}']


@pytest.fixture
def in_process(monkeypatch):
    """train.py without a process of its own (3 s to import torch); the names of the runs made."""
    made = []

    def quick(args, folder, settings):
        made.append(os.path.basename(folder))
        train.main(args)
    monkeypatch.setattr(compare, 'train', quick)
    return made


def without(args, *names):
    """The arguments but for those that set one of these names."""
    return [arg for arg in args if not arg.startswith(tuple(f'--{name}=' for name in names))]


def settings_of(args):
    given, _ = read(args, '', train.Settings, GPTConfig)
    return given


def names_in(folder):
    with open(folder / 'runs.jsonl') as f:
        records = [json.loads(line) for line in f]
    return [(r['name'], r['seed']) for r in records]


# -------------------------------------------------------------------------------------------------
# Plans


def test_all_runs_have_the_same_recipe(common):
    common = [*without(common, 'warmup', 'max_steps', 'learning_rate'), '--max_steps=1000']
    asked = settings_of(common)
    plain = build(train.Settings, asked)
    cost = {}
    for name in [*compare.ALL, *compare.BY_NAME, 'loop+depth_attn']:
        plan = compare.make_plan(name, common, asked)
        settings = build(train.Settings, settings_of(plan.args))
        cost[name] = plan.flops * settings.max_steps
        if '_as_' not in name:
            assert settings.max_steps == 1000
        # the mechanisms' own files set learning_rate, warmup, max_steps, batch_tokens
        settings.max_steps = plain.max_steps
        settings.out_dir = plain.out_dir
        if name == 'plain_stock':
            settings.weight_decay = plain.weight_decay
        assert settings == plain, name

    for name in cost:
        if '_as_' in name:
            like = name.partition('_as_')[2]
            assert cost[name] == pytest.approx(cost[like], rel=0.001)
            assert cost[name] > cost['plain']


def test_two_mechanisms_joined_are_both_on(common):
    plan = compare.make_plan('loop+depth_attn', common, settings_of(common))
    both = build(GPTConfig, plan.settings)
    assert both.ponder == 'loop'
    assert both.depth_attn


def test_training_of_latent_costs_the_mean_of_two_and_three_iterations(common):
    asked = settings_of(common)
    shape = {**asked, 'vocab_size': 320, 'n_tokens': 257, 'ponder': 'latent', 'ponder_steps': 1}
    model = GPT(build(GPTConfig, shape))
    two, three = model.flops_per_token(jacobi=2), model.flops_per_token(jacobi=3)
    plan = compare.make_plan('latent', common, asked)
    assert plan.flops == pytest.approx((two + three) / 2)


@pytest.mark.parametrize('args, words', [
    (['--names=loob'], ['loob', 'plain_scaled_as_loop']),
    (['--names=loop_as_plain'], ['loop_as_plain']),
    (['--seeds=1,x'], ['seeds', '1,2,3']),
    (['--seed=1'], ['seed=1', '--help']),
    (['--nmaes=plain'], ["did you mean 'names'"]),
    (['folder'], ['folder']),
    (['--table_only=True'], ['no finished run']),
    (['--dry_run=True'], ['dry_run']),
    (['--names=loop+pause'], ['loop and pause both set ponder']),
    (['--names=loop+loop'], ['loop and loop']),
    (['--names=plain', '--n_head=3'], ['n_head=3']),
])
def test_refusals(common, tmp_path, args, words):
    with pytest.raises(UserError) as error:
        compare.main([*common, f'--out={tmp_path}', *args])
    assert '\n' not in str(error.value)
    assert not os.listdir(tmp_path)
    for word in words:
        assert word in str(error.value)


# -------------------------------------------------------------------------------------------------
# Runs


def test_finished_runs_are_skipped_and_failed_ones_tried_again(common, in_process, tmp_path,
                                                               capsys, monkeypatch):
    args = [*common, f'--out={tmp_path}', '--names=plain,depth_attn', '--seeds=1,2']
    quick = compare.train

    def broken(args, folder, settings):
        if folder.endswith('depth_attn-s1'):
            raise UserError("no luck")
        quick(args, folder, settings)
    monkeypatch.setattr(compare, 'train', broken)
    with pytest.raises(UserError, match='1 runs failed'):
        compare.main(args)
    assert 'depth_attn, seed 1 failed: no luck' in capsys.readouterr().err
    assert names_in(tmp_path) == [('plain', 1), ('plain', 2), ('depth_attn', 2)]

    # the same command again
    monkeypatch.setattr(compare, 'train', quick)
    in_process.clear()
    compare.main(args)
    assert in_process == ['depth_attn-s1']
    assert len(names_in(tmp_path)) == 4
    printed = capsys.readouterr().out

    # the table alone: no data here, and none is made
    monkeypatch.chdir(tmp_path)
    compare.main([f'--out={tmp_path}', '--table_only=True'])
    table = capsys.readouterr().out
    assert printed.endswith(table)
    assert table.count('\n| ') == 3
    assert in_process == ['depth_attn-s1']

    # one table, one recipe: another setting, and another mechanism with a setting at its default
    with pytest.raises(UserError, match='max_steps=4, now it is 5'):
        compare.main([*args, '--max_steps=5'])
    less = [*without(common, 'warmup'), f'--out={tmp_path}', '--names=plain_scaled', '--seeds=1']
    with pytest.raises(UserError, match='warmup=0.3, now it is 0.02'):
        compare.main(less)
    assert len(names_in(tmp_path)) == 4


def test_precisions_are_not_mixed_in_one_table(common, in_process, tmp_path):
    args = [*without(common, 'dtype'), f'--out={tmp_path}', '--names=plain', '--seeds=3']
    compare.main([*args, '--dtype=float32'])
    with pytest.raises(UserError, match='dtype=float32, now it is None'):
        compare.main(args)


def test_a_run_killed_in_its_last_evaluation_ends_like_the_uninterrupted_one(common, tmp_path):
    common = [*common, '--log_interval=2']
    folder = tmp_path / 'loop-s3'
    loop = os.path.join(ROOT, 'config', 'loop.py')
    train.main([loop, *common, '--seed=3', f'--out_dir={folder}'])
    lines = (folder / 'log.jsonl').read_text().splitlines(keepends=True)
    want = json.loads(lines[-1])
    half_a_line = '{"step": 4, "val'
    (folder / 'log.jsonl').write_text(''.join(lines[:-1]) + half_a_line)

    # in a process of its own: on from the checkpoint of step 2
    compare.main([*common, f'--out={tmp_path}', '--names=loop', '--seeds=3'])
    r = json.loads((tmp_path / 'runs.jsonl').read_text())
    assert r['val_nats_per_byte'] == want['val_nats_per_byte']
    assert (r['steps'], r['tokens'], r['seed']) == (4, 256, 3)
    model = GPT(GPTConfig(**load_checkpoint(str(folder))['config']))
    assert r['flops'] == 256 * model.flops_per_token()
    assert 'resume' not in r['command']
    assert r['command'].startswith('python train.py config/loop.py --n_layer=2')
    assert r['torch'] and r['hardware'] and r['date']

    # its seconds: of steps 1 and 2 as first taken, of steps 3 and 4 as taken again
    again = (folder / 'log.jsonl').read_text().splitlines()[-2]
    ms = [json.loads(line)['ms'] for line in (lines[0], lines[1], again)]
    assert r['seconds'] == pytest.approx((ms[0] + ms[1] + 2 * ms[2]) / 1e3)


@pytest.fixture
def hangup(request):
    """What SIGHUP does to this process: nohup ignores it."""
    before = signal.signal(signal.SIGHUP, request.param)
    yield request.param
    signal.signal(signal.SIGHUP, before)


class SignalWhen(threading.Thread):
    """
    with SignalWhen(ready, number): this process gets the signal as soon as ready() says so, and
    `on_hangup` is then what SIGHUP would do to it.
    """

    def __init__(self, ready, number):
        super().__init__(daemon=True)
        self.ready = ready
        self.number = number
        self.on_hangup = None
        self.over = threading.Event()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.over.set()

    def run(self):
        while not self.over.wait(0.05):
            if self.ready():
                self.on_hangup = signal.getsignal(signal.SIGHUP)
                os.kill(os.getpid(), self.number)
                return


SIGNALS = [
    (signal.SIGTERM, signal.SIG_IGN),
    (signal.SIGHUP, signal.SIG_DFL),
]
ONE_AND_SLOW = [SIGNALS[0], pytest.param(*SIGNALS[1], marks=pytest.mark.slow)]


def stopped(args, capsys):
    """compare.py ends as it does after a signal."""
    with pytest.raises(SystemExit) as leaves:
        compare.main(args)
    assert leaves.value.code == 130
    assert 'the same command goes on' in capsys.readouterr().err


@pytest.mark.parametrize('number, hangup', ONE_AND_SLOW, indirect=['hangup'])
def test_a_signal_saves_and_stops(common, tmp_path, capsys, number, hangup):
    log = tmp_path / 'plain-s1' / 'log.jsonl'

    def a_step_is_done():
        return log.exists() and log.stat().st_size > 0
    args = [*common, f'--out={tmp_path}', '--names=plain', '--seeds=1', '--max_steps=1000000',
            '--save_interval=1000000']
    with SignalWhen(a_step_is_done, number) as sender:
        stopped(args, capsys)
    assert (sender.on_hangup is signal.SIG_IGN) == (hangup is signal.SIG_IGN)
    assert load_checkpoint(str(log.parent))['step'] > 0
    assert not (tmp_path / 'runs.jsonl').exists()


@pytest.mark.parametrize('number, hangup', SIGNALS, indirect=['hangup'])
def test_a_signal_before_train_listens_stops_too(common, tmp_path, capsys, monkeypatch, number,
                                                 hangup):
    """The process is still importing, so the signal ends it; here it is one that sleeps."""
    popen = subprocess.Popen

    def sleeps(command, **options):
        return popen([sys.executable, '-c', 'import time; time.sleep(60)'], **options)
    monkeypatch.setattr(compare.subprocess, 'Popen', sleeps)
    before = signal.getsignal(number)

    def compare_listens():
        return signal.getsignal(number) != before
    args = [*common, f'--out={tmp_path}', '--names=plain', '--seeds=1']
    with SignalWhen(compare_listens, number) as sender:
        stopped(args, capsys)
    assert (sender.on_hangup is signal.SIG_IGN) == (hangup is signal.SIG_IGN)
    assert signal.getsignal(number) == before
    assert not (tmp_path / 'runs.jsonl').exists()


# -------------------------------------------------------------------------------------------------
# The table


@pytest.mark.parametrize('line', [
    '{"name": "plain"}',
    '{"name": "plain", "seed": 1, "val_nats_per_byte": null, "flops": 1, "seconds": 1}',
])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    (tmp_path / 'runs.jsonl').write_text(line + '\n')
    with pytest.raises(UserError, match='runs.jsonl: a line is not'):
        compare.main([f'--out={tmp_path}', '--table_only=True'])


def table_of(*runs):
    """The lines of the table of runs (name, seed, loss, FLOPs)."""
    records = []
    for name, seed, loss, flops in runs:
        records.append(dict(name=name, seed=seed, val_nats_per_byte=loss, flops=flops, seconds=10,
                            commit='abc', torch='2.13.0', hardware='a CPU', date='2026-01-01'))
    return compare.table(records).splitlines()


def test_the_table_by_hand():
    rows = table_of(('plain', 1, 1.5, 100),
                    ('plain', 2, 1.7, 100),
                    ('loop', 1, 1.4, 400),
                    ('loop', 2, 1.3, 400),
                    ('loop', 3, 1.2, 400),
                    ('plain_as_pause', 2, 1.25, 410),
                    ('latent', 1, 1.0, 900))
    assert rows[2] == '| plain | 2 | 1.6000 | 1.5000 to 1.7000 |  |  | 1.00 | 1.00 |'
    # paired by seed: 1.4 - 1.5 and 1.3 - 1.7; the longer plain run has 2.5 % more FLOPs
    assert rows[3] == ('| loop | 3 | 1.3000 | 1.2000 to 1.4000 | -0.2500 (-0.4000 to -0.1000) | '
                       '+0.0500 (+0.0500 to +0.0500) | 4.00 | 1.00 |')
    assert rows[5] == ('| latent | 1 | 1.0000 | 1.0000 to 1.0000 | -0.5000 (-0.5000 to -0.5000) | '
                       ' | 9.00 | 1.00 |')


def test_of_plain_runs_within_5_percent_of_the_flops_the_nearest_counts():
    rows = table_of(('plain', 1, 1.5, 100),
                    ('loop', 1, 1.4, 400),
                    ('plain_a', 1, 1.1, 385),
                    ('plain_b', 1, 1.2, 404),
                    ('plain_c', 1, 1.0, 360))
    assert '| +0.2000 (+0.2000 to +0.2000) | 4.00 |' in rows[3]
    rows = table_of(('plain', 1, 1.5, 100),
                    ('loop', 1, 1.4, 400),
                    ('plain_c', 1, 1.0, 360))
    assert rows[3].endswith('|  | 4.00 | 1.00 |')


def test_without_plain_the_next_best_is_compared_with():
    rows = table_of(('loop', 1, 1.4, 400),
                    ('plain_scaled', 1, 1.5, 100))
    assert 'minus plain_scaled' in rows[0]
    assert rows[2].endswith('| -0.1000 (-0.1000 to -0.1000) |  | 4.00 | 1.00 |')
    assert rows[-1] == 'a CPU; torch 2.13.0; commit abc; 2026-01-01. Equal FLOPs: within 5 %.'
