"""
Several ranks, and runs that are interrupted: by signals, by SIGKILL at random moments, by a rank
that dies.
"""
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import test_train
import torch
import torch.distributed as dist
from conftest import ONE_EACH
from test_train import QUICK, SHAPE, log_of, options, same_weights, stopped_at
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.checkpoint import load_checkpoint
from engine.optimizer import load_optimizer

if sys.platform == 'win32':
    pytest.skip('gloo over torchrun, fork and signals need POSIX', allow_module_level=True)
from ranks import finish, launch, launch_torchrun, wait_for

run_train = test_train.run_train  # the fixture
# the others have these in them: depth has plain, gate has embedding, router has chain
TWO_RANKS = [name for name in ONE_EACH
             if name not in ('plain', 'embedding', 'chain_depth', 'loop_depth')]


@pytest.fixture
def start(small_data, tmp_path):
    """
    Start the small model in processes of their own; what they print goes to tmp_path/name.log0,
    .log1, ...
    """
    running = []

    def start(name, *args, world=1):
        folders = [f'--data_dir={small_data}', f'--out_dir={tmp_path / name}']
        log = str(tmp_path / f'{name}.log')
        processes = launch([*SHAPE, *QUICK, *folders, *args], log, world)
        running.extend(processes)
        return processes

    yield start
    for process in running:
        process.kill()


@pytest.fixture
def train_to_the_end(start, tmp_path):
    """The same, until they end well; returns the checkpoint."""
    def train(name, *args, world=1):
        finish(start(name, *args, world=world), str(tmp_path / f'{name}.log'))
        return load_checkpoint(str(tmp_path / name))
    return train


def same_optimizer(a, b, tol):
    a, b = a['optimizer'], b['optimizer']
    assert a['state'].keys() == b['state'].keys()
    assert a['param_groups'] == b['param_groups']
    for i, state in a['state'].items():
        for name, value in state.items():
            assert (value - b['state'][i][name]).abs().max() <= tol, (i, name)


def only_previous(of, folder):
    """A folder whose checkpoint is the one before the last of another."""
    os.makedirs(folder)
    shutil.copy(of / 'ckpt_prev.pt', folder / 'ckpt.pt')


# ---- several ranks -------------------------------------------------------------------------------

@pytest.mark.parametrize('toggle', TWO_RANKS)
def test_two_ranks_equal_one(run_train, train_to_the_end, tmp_path, toggle):
    one = run_train('one', *options(toggle))
    two = train_to_the_end('two', *options(toggle), world=2)
    same_weights(one, two, 2e-5)
    logs = log_of(tmp_path / 'one'), log_of(tmp_path / 'two')
    assert len(logs[0]) == len(logs[1]) == 3
    for a, b in zip(*logs):
        for key in {'loss', 'val_loss', 'grad_norm'} & set(a):
            assert a[key] == pytest.approx(b[key], rel=1e-4)


def test_resume_on_another_number_of_ranks(run_train, train_to_the_end, tmp_path):
    # 12 windows: 3 x 4, or 3 ranks of 4, or 2 x 3 x 2
    batch = ['--batch_tokens=384', '--save_interval=5']
    one = run_train('one', *batch)
    three = train_to_the_end('three', *batch, '--shard_optimizer=True', world=3)
    same_weights(one, three, 2e-5)
    same_optimizer(one, three, 2e-5)  # in one piece, whatever it was in memory

    for name in ('two', 'single'):    # both go on from step 5 of the three ranks
        only_previous(tmp_path / 'three', tmp_path / name)
    assert load_checkpoint(str(tmp_path / 'two'))['step'] == 5
    resume = [*batch, '--init_from=resume']
    two = train_to_the_end('two', *resume, '--micro_batch=2', '--shard_optimizer=True', world=2)
    single = run_train('single', *resume)
    for other in (two, single):
        assert other['step'] == 10
        same_weights(one, other, 2e-5)
        same_optimizer(one, other, 2e-5)


def test_sharded_resume_is_exact(train_to_the_end, tmp_path):
    sharded = ['--shard_optimizer=True', '--save_interval=5', '--dropout=0.1']
    straight = train_to_the_end('straight', *sharded, world=2)
    only_previous(tmp_path / 'straight', tmp_path / 'resumed')
    resumed = train_to_the_end('resumed', *sharded, '--init_from=resume', world=2)
    same_weights(straight, resumed)
    same_optimizer(straight, resumed, 0.0)


def test_sharded_state_is_restored_to_the_device():
    """
    On a pretended GPU: ZeroRedundancyOptimizer puts the step counts on the CPU, where fused AdamW
    does not take them.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            w = torch.nn.Parameter(torch.ones(4, 4, device='cuda'))
            groups = [dict(params=[w])]
            optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=1e-3)
            held = dict(step=torch.tensor(1.0), exp_avg=torch.ones(4, 4),
                        exp_avg_sq=torch.ones(4, 4))
            group = {**optimizer.param_groups[0], 'params': [0]}
            load_optimizer(optimizer, dict(state={0: held}, param_groups=[group]))
            devices = [t.device.type for t in optimizer.optim.state[w].values()]
            assert devices == ['cuda'] * 3
            assert not optimizer.state
    finally:
        dist.destroy_process_group()


def test_one_message_for_all_ranks(start, tmp_path):
    first, second = start('out', '--batch_tokens=128', world=2)
    first.join(60)
    second.terminate()  # as torchrun does
    second.join(60)
    said, repeated = [(tmp_path / f'out.log{rank}').read_text().splitlines() for rank in (0, 1)]
    assert first.exitcode == 2
    assert len(said) == 1
    assert repeated == []
    for word in ('error: rank 0:', 'batch_tokens=128', 'micro_batch', '4 x 32 x 2 = 256'):
        assert word in said[0]


# ---- torchrun ------------------------------------------------------------------------------------

@pytest.fixture
def torchrun(small_data, tmp_path):
    """
    An endless run of two ranks by torchrun, after its third step. What it prints goes to
    tmp_path/out.log and tmp_path/errors.
    """
    args = ['--standalone', '--nproc_per_node=2', 'train.py', *SHAPE, *QUICK, '--max_steps=100000',
            '--log_interval=1', f'--data_dir={small_data}', f'--out_dir={tmp_path / "out"}']
    process = launch_torchrun(args, str(tmp_path / 'out.log'), str(tmp_path / 'errors'))
    wait_for('step     3', tmp_path / 'out.log', process)
    yield process
    process.kill()


def test_torchrun_passes_on_sigterm(torchrun, run_train, tmp_path):
    torchrun.terminate()
    torchrun.join(60)
    assert torchrun.exitcode is not None
    state = load_checkpoint(str(tmp_path / 'out'))
    step = state['step']
    assert step >= 3
    told = f"stopped at step {step}; go on with the same command and --init_from=resume"
    assert told in (tmp_path / 'out.log').read_text()
    with stopped_at(step):
        one = run_train('one', '--max_steps=100000')
    same_weights(state, one, 1e-3)  # both ranks stopped at that step


def test_a_killed_rank_ends_the_job(torchrun, tmp_path):
    os.kill(workers_of(torchrun)[1], signal.SIGKILL)
    torchrun.join(60)  # it does not hang
    assert torchrun.exitcode not in (None, 0)
    errors = (tmp_path / 'errors').read_text()
    assert re.search(r'rank +: 1 ', errors)  # torchrun's summary
    assert 'SIGKILL' in errors
    assert 'error: rank 0: lost contact with another rank' in errors


def workers_of(process):
    """The processes that this one started, in this order."""
    table = subprocess.run(['ps', '-A', '-o', 'pid=,ppid='], capture_output=True, text=True).stdout
    rows = [line.split() for line in table.splitlines()]
    return sorted(int(pid) for pid, parent in rows if int(parent) == process.pid)


# ---- killed --------------------------------------------------------------------------------------

FREQUENT = ['--max_steps=30', '--save_interval=1', '--log_interval=1']


@pytest.mark.parametrize('kills', [
    5,
    pytest.param(100, marks=pytest.mark.slow),
])
def test_sigkill_at_random_moments(start, train_to_the_end, tmp_path, kills):
    train_to_the_end('first', '--max_steps=1')  # the next one starts as fast as those after it
    begin = time.monotonic()
    straight = train_to_the_end('straight', *FREQUENT)
    seconds = time.monotonic() - begin

    rng = random.Random(0)
    killed, runs, step = 0, 0, 0
    while killed < kills or step < 30:
        if step == 30:  # killed too late: another run
            runs += 1
            step = 0
        out, log = tmp_path / f'run{runs}', tmp_path / f'run{runs}.log0'
        log.unlink(missing_ok=True)
        resume = ['--init_from=resume'] if step else []
        [process] = start(out.name, *FREQUENT, *resume)

        ahead = rng.randint(0, 6)  # new steps until it is killed; none: while it starts
        wait_for_steps(ahead, log, process)
        if killed < kills:
            process.join(rng.uniform(0, seconds / (5 if ahead == 0 else 30)))
        else:
            process.join(120)
        if process.exitcode is None:
            process.kill()
            process.join()
            killed += 1
        else:
            assert process.exitcode == 0, log.read_text()

        before = step
        step = load_checkpoint(str(out))['step'] if list(out.glob('ckpt*.pt')) else 0
        # what was saved is there: all but the step it was killed in
        assert step >= before + ahead - 1 or step == 30
        assert not log.exists() or 'damaged' not in log.read_text()
        if step == 30:
            same_weights(straight, load_checkpoint(str(out)))
            same_optimizer(straight, load_checkpoint(str(out)), 0.0)


def wait_for_steps(n, log, process):
    """Wait until n steps are logged, or the process has ended."""
    while process.is_alive():
        if log.exists() and len(re.findall('^step .*loss', log.read_text(), re.M)) >= n:
            return
        time.sleep(0.002)
