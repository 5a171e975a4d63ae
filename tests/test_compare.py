"""tools/compare.py: the same recipe for all, nothing made twice, numbers that follow from the runs."""
import json
import os
import signal
import threading
import time

import pytest
from conftest import ROOT

import train
from configurator import build, read
from engine.errors import UserError
from model import GPT, GPTConfig
from tools import compare

RECIPE = ['--n_layer=2', '--n_head=2', '--n_embd=32', '--mlp_hidden=32', '--block_size=16', '--batch_tokens=64', '--micro_batch=4',
          '--max_steps=4', '--save_interval=2', '--eval_interval=9', '--eval_tokens=256', '--log_interval=1', '--sample_tokens=0',
          '--warmup=0.3', '--learning_rate=0.01', '--device=cpu', '--dtype=float32']


@pytest.fixture
def common(small_data):
    return [*RECIPE, f'--data_dir={small_data}']


@pytest.fixture
def in_process(monkeypatch):
    """train.py without a process of its own; the names of the runs made."""
    made = []
    def quick(args, folder, given):
        made.append(os.path.basename(folder))
        train.main(args)
    monkeypatch.setattr(compare, 'train', quick)
    return made


def names_in(out):
    with open(out / 'runs.jsonl') as f: return [(r['name'], r['seed']) for r in map(json.loads, f)]


def test_all_runs_have_the_same_recipe(common):
    common = [a for a in common if not a.startswith(('--warmup', '--max_steps', '--learning_rate'))] + ['--max_steps=1000']
    asked = read(common, '', train.Settings, GPTConfig)[0]
    plain = build(train.Settings, asked)
    cost = {}
    for name in [*compare.ALL, 'loop+depth_attn']:
        args, given, flops = compare.plan(name, common, asked)
        settings = build(train.Settings, read(args, '', train.Settings, GPTConfig)[0])
        cost[name] = flops * settings.max_steps
        if '_as_' not in name: assert settings.max_steps == 1000
        settings.max_steps, settings.out_dir = plain.max_steps, plain.out_dir
        assert settings == plain, name  # the mechanisms' own files set learning_rate, warmup, max_steps, batch_tokens
    for name in cost:
        if '_as_' in name: assert cost[name] == pytest.approx(cost[name.partition('_as_')[2]], rel=0.001) and cost[name] > cost['plain']
    both = build(GPTConfig, compare.plan('loop+depth_attn', common, asked)[1])
    assert both.ponder == 'loop' and both.depth_attn
    # 2 or 3 Jacobi iterations in training
    shape = {**asked, 'vocab_size': 320, 'n_tokens': 257, 'ponder': 'latent', 'ponder_steps': 1}
    two, three = (GPT(build(GPTConfig, shape)).flops_per_token(jacobi=n) for n in (2, 3))
    assert cost['latent'] == pytest.approx(1000 * (two + three) / 2)


def test_finished_runs_are_skipped_and_failed_ones_tried_again(common, in_process, tmp_path, capsys, monkeypatch):
    args = [*common, f'--out={tmp_path}', '--names=plain,depth_attn', '--seeds=1,2']
    quick = compare.train
    def broken(args, folder, given):
        if folder.endswith('depth_attn-s1'): raise UserError("no luck")
        quick(args, folder, given)
    monkeypatch.setattr(compare, 'train', broken)
    with pytest.raises(UserError, match='1 runs failed'): compare.main(args)
    assert 'depth_attn, seed 1 failed: no luck' in capsys.readouterr().err
    assert names_in(tmp_path) == [('plain', 1), ('plain', 2), ('depth_attn', 2)]
    monkeypatch.setattr(compare, 'train', quick)
    in_process.clear()
    compare.main(args)
    assert in_process == ['depth_attn-s1'] and len(names_in(tmp_path)) == 4
    out = capsys.readouterr().out
    monkeypatch.chdir(tmp_path)  # no data here, and none is made
    compare.main([f'--out={tmp_path}', '--table_only=True'])
    table = capsys.readouterr().out
    assert out.endswith(table) and table.count('\n| ') == 3 and in_process == ['depth_attn-s1']
    with pytest.raises(UserError, match='max_steps=4, now it is 5'): compare.main([*args, '--max_steps=5'])
    # one table, one recipe: another mechanism, and a setting that is left at its default now
    less = [arg for arg in common if not arg.startswith('--warmup')]
    with pytest.raises(UserError, match='warmup=0.3, now it is 0.02'): compare.main([*less, f'--out={tmp_path}', '--names=plain_scaled', '--seeds=1'])
    assert len(names_in(tmp_path)) == 4


def test_precisions_are_not_mixed_in_one_table(common, tmp_path):
    args = [*[a for a in common if not a.startswith('--dtype')], f'--out={tmp_path}', '--names=plain', '--seeds=3']
    compare.main([*args, '--dtype=float32'])
    with pytest.raises(UserError, match='dtype=float32, now it is None'): compare.main(args)


def test_a_run_killed_in_its_last_evaluation_ends_like_the_uninterrupted_one(common, tmp_path):
    common, folder = [*common, '--log_interval=2'], tmp_path / 'loop-s3'
    args = [*common, f'--out={tmp_path}', '--names=loop', '--seeds=3']
    train.main([os.path.join(ROOT, 'config', 'loop.py'), *common, '--seed=3', f'--out_dir={folder}'])
    log = (folder / 'log.jsonl').read_text().splitlines(keepends=True)
    want = json.loads(log[-1])
    (folder / 'log.jsonl').write_text(''.join(log[:-1]) + '{"step": 4, "val')
    compare.main(args)  # in a process of its own: on from the checkpoint of step 2, with half a line in the log
    r = json.loads((tmp_path / 'runs.jsonl').read_text())
    assert r['val_nats_per_byte'] == want['val_nats_per_byte'] and (r['steps'], r['tokens'], r['seed']) == (4, 256, 3)
    assert r['flops'] == 256 * GPT(GPTConfig(**train.load_checkpoint(str(folder))['config'])).flops_per_token()
    assert 'resume' not in r['command'] and r['command'].startswith('python train.py config/loop.py --n_layer=2')
    again = (folder / 'log.jsonl').read_text().splitlines()[-2]  # steps 3 and 4, where they count
    ms = [json.loads(line)['ms'] for line in (log[0], log[1], again)]
    assert r['seconds'] == pytest.approx((ms[0] + ms[1] + 2 * ms[2]) / 1e3) and r['torch'] and r['hardware'] and r['date']


@pytest.mark.parametrize('number, hangup', [(signal.SIGTERM, signal.SIG_IGN), (signal.SIGHUP, signal.SIG_DFL)])  # nohup ignores SIGHUP
def test_a_signal_saves_and_stops(common, tmp_path, capsys, number, hangup):
    seen, log = [], tmp_path / 'plain-s1' / 'log.jsonl'
    def signal_when_it_runs():
        while not (log.exists() and log.stat().st_size): time.sleep(0.05)
        seen.append(signal.getsignal(signal.SIGHUP))
        os.kill(os.getpid(), number)
    before = signal.signal(signal.SIGHUP, hangup)
    threading.Thread(target=signal_when_it_runs, daemon=True).start()
    args = [*common, f'--out={tmp_path}', '--names=plain', '--seeds=1', '--max_steps=1000000', '--save_interval=1000000']
    with pytest.raises(SystemExit) as leaves: compare.main(args)
    signal.signal(signal.SIGHUP, before)
    assert (seen[0] is signal.SIG_IGN) == (hangup is signal.SIG_IGN)
    assert leaves.value.code == 130 and 'the same command goes on' in capsys.readouterr().err
    assert train.load_checkpoint(str(log.parent))['step'] > 0 and not (tmp_path / 'runs.jsonl').exists()


def test_a_line_that_is_no_record_is_named(tmp_path):
    for line in '{"name": "plain"}', '{"name": "plain", "seed": 1, "val_nats_per_byte": null, "flops": 1, "seconds": 1}':
        (tmp_path / 'runs.jsonl').write_text(line + '\n')
        with pytest.raises(UserError, match='runs.jsonl: a line is not'): compare.main([f'--out={tmp_path}', '--table_only=True'])


def test_the_table_by_hand():
    common = dict(seconds=10, commit='abc', torch='2.13.0', hardware='a CPU', date='2026-01-01')
    run = lambda name, seed, loss, flops: dict(name=name, seed=seed, val_nats_per_byte=loss, flops=flops, **common)
    rows = compare.table([run('plain', 1, 1.5, 100), run('plain', 2, 1.7, 100), run('loop', 1, 1.4, 400), run('loop', 2, 1.3, 400),
                          run('loop', 3, 1.2, 400), run('plain_as_pause', 2, 1.25, 410), run('latent', 1, 1.0, 900)]).splitlines()
    assert rows[2] == '| plain | 2 | 1.6000 | 1.5000 to 1.7000 |  |  | 1.00 | 1.00 |'
    # paired by seed: 1.4 - 1.5 and 1.3 - 1.7; the longer plain run has 2.5 % more FLOPs
    assert rows[3] == '| loop | 3 | 1.3000 | 1.2000 to 1.4000 | -0.2500 (-0.4000 to -0.1000) | +0.0500 (+0.0500 to +0.0500) | 4.00 | 1.00 |'
    assert rows[5] == '| latent | 1 | 1.0000 | 1.0000 to 1.0000 | -0.5000 (-0.5000 to -0.5000) |  | 9.00 | 1.00 |'
    rows = compare.table([run('plain', 1, 1.5, 100), run('loop', 1, 1.4, 400), run('plain_a', 1, 1.1, 385), run('plain_b', 1, 1.2, 404), run('plain_c', 1, 1.0, 360)]).splitlines()
    assert '| +0.2000 (+0.2000 to +0.2000) | 4.00 |' in rows[3]  # of those within 5 %, the one that is nearest
    rows = compare.table([run('plain', 1, 1.5, 100), run('loop', 1, 1.4, 400), run('plain_c', 1, 1.0, 360)]).splitlines()
    assert rows[3].endswith('|  | 4.00 | 1.00 |')
    rows = compare.table([run('loop', 1, 1.4, 400), run('plain_scaled', 1, 1.5, 100)]).splitlines()  # no plain: the next best
    assert 'minus plain_scaled' in rows[0] and rows[2].endswith('| -0.1000 (-0.1000 to -0.1000) |  | 4.00 | 1.00 |')
    assert rows[-1] == 'a CPU; torch 2.13.0; commit abc; 2026-01-01. Equal FLOPs: within 5 %.'


@pytest.mark.parametrize('args, words', [
    (['--names=loob'], ['loob', 'plain_scaled_as_loop']), (['--names=loop_as_plain'], ['loop_as_plain']), (['--seeds=1,x'], ['seeds', '1,2,3']),
    (['--seed=1'], ['seed=1', '--help']), (['--nmaes=plain'], ["did you mean 'names'"]), (['folder'], ['folder']),
    (['--table_only=True'], ['no finished run']), (['--dry_run=True'], ['dry_run']),
    (['--names=loop+pause'], ['loop and pause both set ponder']), (['--names=loop+loop'], ['loop and loop']), (['--names=plain', '--n_head=3'], ['n_head=3'])])
def test_refusals(common, tmp_path, args, words):
    with pytest.raises(UserError) as error: compare.main([*common, f'--out={tmp_path}', *args])
    assert '\n' not in str(error.value) and not os.listdir(tmp_path)
    for word in words: assert word in str(error.value)
