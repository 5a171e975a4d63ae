"""Several ranks, and runs that are interrupted: by signals, by SIGKILL at random moments, by a rank that dies."""
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import ONE_EACH, ROOT
from test_train import QUICK, SHAPE, options, run_train, same_weights  # noqa: F401, run_train is a fixture
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.checkpoint import load_checkpoint
from train import Trainer

if sys.platform == 'win32': pytest.skip('gloo over torchrun, fork and signals need POSIX', allow_module_level=True)
from ranks import finish, launch


@pytest.fixture
def start(small_data, tmp_path):
    """Start the small model in processes of their own; what they print goes to tmp_path/name.log0, .log1, ..."""
    running = []
    def start(name, *args, world=1):
        processes = launch([*SHAPE, *QUICK, f'--data_dir={small_data}', f'--out_dir={tmp_path / name}', *args], str(tmp_path / f'{name}.log'), world)
        running.extend(processes)
        return processes
    yield start
    for process in running: process.kill()


@pytest.mark.parametrize('toggle', [name for name in ONE_EACH if name not in ('plain', 'embedding')])  # depth and gate have these in them
def test_two_ranks_equal_one(run_train, start, tmp_path, toggle):
    one = run_train('one', *options(toggle))
    finish(start('two', *options(toggle), world=2), str(tmp_path / 'two.log'))
    same_weights(one, load_checkpoint(str(tmp_path / 'two')), 2e-5)
    read = lambda name: [json.loads(line) for line in open(tmp_path / name / 'log.jsonl')]
    assert len(read('one')) == len(read('two')) == 3
    for a, b in zip(read('one'), read('two')):
        for key in {'loss', 'val_loss', 'grad_norm'} & set(a): assert a[key] == pytest.approx(b[key], rel=1e-4)


def same_optimizer(a, b, tol):
    assert a['optimizer']['state'].keys() == b['optimizer']['state'].keys() and a['optimizer']['param_groups'] == b['optimizer']['param_groups']
    for i, state in a['optimizer']['state'].items():
        for name, value in state.items(): assert (value - b['optimizer']['state'][i][name]).abs().max() <= tol, (i, name)


def test_resume_on_another_number_of_ranks(run_train, start, tmp_path):
    batch = ['--batch_tokens=384', '--save_interval=5']  # 12 windows: 3 x 4 or 3 ranks of 4 or 2 x 3 x 2
    one = run_train('one', *batch)
    finish(start('three', *batch, '--shard_optimizer=True', world=3), str(tmp_path / 'three.log'))
    three = load_checkpoint(str(tmp_path / 'three'))
    same_weights(one, three, 2e-5)
    same_optimizer(one, three, 2e-5)  # in one piece, whatever it was in memory
    for name in ('two', 'single'):    # both go on from step 5 of the three ranks
        os.makedirs(tmp_path / name)
        shutil.copy(tmp_path / 'three' / 'ckpt_prev.pt', tmp_path / name / 'ckpt.pt')
    assert load_checkpoint(str(tmp_path / 'two'))['step'] == 5
    finish(start('two', *batch, '--init_from=resume', '--micro_batch=2', '--shard_optimizer=True', world=2), str(tmp_path / 'two.log'))
    for other in (load_checkpoint(str(tmp_path / 'two')), run_train('single', *batch, '--init_from=resume')):
        assert other['step'] == 10
        same_weights(one, other, 2e-5)
        same_optimizer(one, other, 2e-5)


def test_sharded_resume_is_exact(start, tmp_path):
    sharded = ['--shard_optimizer=True', '--save_interval=5', '--dropout=0.1']
    finish(start('straight', *sharded, world=2), str(tmp_path / 'straight.log'))
    os.makedirs(tmp_path / 'resumed')
    shutil.copy(tmp_path / 'straight' / 'ckpt_prev.pt', tmp_path / 'resumed' / 'ckpt.pt')
    finish(start('resumed', *sharded, '--init_from=resume', world=2), str(tmp_path / 'resumed.log'))
    straight, resumed = (load_checkpoint(str(tmp_path / name)) for name in ('straight', 'resumed'))
    same_weights(straight, resumed)
    same_optimizer(straight, resumed, 0.0)


def test_sharded_state_is_restored_to_the_device():
    """On a pretended GPU: ZeroRedundancyOptimizer puts the step counts on the CPU, where fused AdamW does not take them."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            w = torch.nn.Parameter(torch.ones(4, 4, device='cuda'))
            optimizer = ZeroRedundancyOptimizer([dict(params=[w])], torch.optim.AdamW, lr=1e-3)
            held = dict(step=torch.tensor(1.0), exp_avg=torch.ones(4, 4), exp_avg_sq=torch.ones(4, 4))
            state = dict(optimizer=dict(state={0: held}, param_groups=[{**optimizer.param_groups[0], 'params': [0]}]))
            Trainer._restore(SimpleNamespace(world=1, optimizer=optimizer, meta=dict(train=None)), state)
            assert [t.device.type for t in optimizer.optim.state[w].values()] == ['cuda'] * 3 and not optimizer.state
    finally:
        dist.destroy_process_group()


def test_one_message_for_all_ranks(start, tmp_path):
    first, second = start('out', '--batch_tokens=128', world=2)
    first.join(60)
    second.terminate()  # as torchrun does
    second.join(60)
    said = [(tmp_path / f'out.log{rank}').read_text().splitlines() for rank in (0, 1)]
    assert first.exitcode == 2 and len(said[0]) == 1 and said[1] == []
    for word in ('error: rank 0:', 'batch_tokens=128', 'micro_batch', '4 x 32 x 2 = 256'): assert word in said[0][0]


def torchrun(small_data, tmp_path):
    """An endless run of two ranks by torchrun; returns it after its third step."""
    command = [sys.executable, '-u', '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', 'train.py', *SHAPE, *QUICK, '--max_steps=100000', '--log_interval=1',
               f'--data_dir={small_data}', f'--out_dir={tmp_path / "out"}']
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, 'OMP_NUM_THREADS': '1'})
    for line in process.stdout:
        if line.startswith('step     3'): return process
    raise AssertionError(process.stderr.read())


def test_torchrun_passes_on_sigterm(run_train, small_data, tmp_path, monkeypatch):
    process = torchrun(small_data, tmp_path)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    state = load_checkpoint(str(tmp_path / 'out'))
    assert f"stopped at step {state['step']}; go on with the same command and --init_from=resume" in out and state['step'] >= 3
    monkeypatch.setattr(Trainer, 'should_stop', lambda self: self.step == state['step'])
    same_weights(state, run_train('one', '--max_steps=100000'), 1e-3)  # both ranks stopped at that step


def test_a_killed_rank_ends_the_job(small_data, tmp_path):
    process = torchrun(small_data, tmp_path)
    children = subprocess.run(['ps', '-A', '-o', 'pid=,ppid='], capture_output=True, text=True).stdout.split('\n')
    workers = sorted(int(line.split()[0]) for line in children if line.split()[1:] == [str(process.pid)])
    os.kill(workers[1], signal.SIGKILL)
    out, err = process.communicate(timeout=60)  # it does not hang
    assert process.returncode != 0
    assert re.search(r'rank +: 1 ', err) and 'SIGKILL' in err  # torchrun's summary
    assert 'error: rank 0: lost contact with another rank' in err


@pytest.mark.parametrize('kills', [5, pytest.param(100, marks=pytest.mark.slow)])
def test_sigkill_at_random_moments(start, tmp_path, kills):
    steps, frequent = 30, ['--max_steps=30', '--save_interval=1', '--log_interval=1']
    finish(start('first', '--max_steps=1'), str(tmp_path / 'first.log'))  # the next one starts as fast as those after it
    begin = time.monotonic()
    finish(start('straight', *frequent), str(tmp_path / 'straight.log'))
    seconds, straight = time.monotonic() - begin, load_checkpoint(str(tmp_path / 'straight'))
    rng, killed, runs, step = random.Random(0), 0, 0, 0

    while killed < kills or step < steps:
        if step == steps: runs, step = runs + 1, 0  # killed too late: another run
        out, log = tmp_path / f'run{runs}', tmp_path / f'run{runs}.log0'
        log.unlink(missing_ok=True)
        [process] = start(out.name, *frequent, *(['--init_from=resume'] if step else []))
        ahead = rng.randint(0, 6)  # new steps until it is killed; none: while it starts
        while process.is_alive() and not (log.exists() and len(re.findall('^step .*loss', log.read_text(), re.M)) >= ahead): time.sleep(0.001)
        if killed < kills: process.join(rng.uniform(0, seconds / (5 if ahead == 0 else steps)))
        else: process.join(120)
        if process.exitcode is None:
            process.kill()
            process.join()
            killed += 1
        else: assert process.exitcode == 0, log.read_text()
        before, step = step, load_checkpoint(str(out))['step'] if list(out.glob('ckpt*.pt')) else 0
        assert step >= before + ahead - 1 or step == steps  # what was saved is there: all but the step it was killed in
        assert not log.exists() or 'damaged' not in log.read_text()
        if step == steps:
            same_weights(straight, load_checkpoint(str(out)))
            same_optimizer(straight, load_checkpoint(str(out)), 0.0)
