"""
Training in one process: exact resume, order of the data, checkpoints, evaluation, and what is
refused. Several processes: test_processes.py.
"""
import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ONE_EACH, ROOT, TOGGLES, make, save
from ranks import launch, wait_for

import train
from configurator import build, read
from engine import attention, hardware, log, output
from engine.checkpoint import load_checkpoint, save_checkpoint
from engine.files import UserError, alone
from engine.hardware import Ranks
from engine.log import Log
from engine.output import Output, Stop
from engine.shards import read_meta
from engine.windows import Windows
from model import GPT, GPTConfig
from train import Settings, Trainer

SHAPE = ['--n_layer=3', '--n_head=2', '--n_embd=32', '--mlp_hidden=48', '--block_size=32']
QUICK = ['--batch_tokens=256', '--micro_batch=4', '--max_steps=10', '--eval_tokens=512',
         '--sample_tokens=0', '--learning_rate=1e-2', '--dtype=float32', '--device=cpu']
CPU = torch.device('cpu')
ALONE = Ranks(0, 1)
posix = pytest.mark.skipif(sys.platform == 'win32', reason='POSIX signals')


@pytest.fixture
def run_train(small_data, tmp_path):
    """
    Run train.py in this process, with the same small model in every run; returns the checkpoint
    of its out_dir.
    """
    def run(name, *args, shape=SHAPE):
        out_dir = str(tmp_path / name)
        train.main([*shape, *QUICK, f'--data_dir={small_data}', f'--out_dir={out_dir}', *args])
        return load_checkpoint(out_dir)
    return run


@pytest.fixture
def make_trainer(small_data, tmp_path):
    """The Trainer of such a run, for its parts."""
    def make(*args):
        folders = [f'--data_dir={small_data}', f'--out_dir={tmp_path / "out"}']
        given, _ = read([*SHAPE, *QUICK, *folders, *args], '', Settings, GPTConfig)
        return Trainer(build(Settings, given), given, None, ALONE, CPU)
    return make


@pytest.fixture
def fork_train(small_data, tmp_path):
    """
    Start such a run, without end, in a process of its own. Its output goes to tmp_path/out.log0,
    its errors to tmp_path/errors.
    """
    running = []

    def start(*args, **options):
        folders = [f'--data_dir={small_data}', f'--out_dir={tmp_path / "out"}']
        endless = ['--max_steps=100000', '--log_interval=1']
        [process] = launch([*SHAPE, *QUICK, *endless, *folders, *args], str(tmp_path / 'out.log'),
                           errors=str(tmp_path / 'errors'), **options)
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()


@contextlib.contextmanager
def stopped_at(step):
    """Runs in here are told to stop in this step."""
    train_step = Trainer.train_step

    def step_and_ask(self):
        result = train_step(self)
        if self.step == step:
            self.stop.ask()
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, 'train_step', step_and_ask)
        yield


def options(toggle):
    return [f'--{name}={value}' for name, value in TOGGLES[toggle].items() if name != 'n_kv_head']


def log_of(folder):
    """The records of log.jsonl."""
    with open(folder / 'log.jsonl') as f:
        return [json.loads(line) for line in f]


def same_weights(a, b, tol=0.0):
    assert a['model'].keys() == b['model'].keys()
    for name in a['model']:
        assert (a['model'][name] - b['model'][name]).abs().max() <= tol, name


# ---- resuming ------------------------------------------------------------------------------------

@pytest.mark.parametrize('toggle', ONE_EACH)
def test_ten_steps_equal_five_and_resume_and_five(run_train, toggle, capsys):
    extra = [*options(toggle), '--dropout=0.1']
    straight = run_train('straight', *extra)
    with stopped_at(5):
        half = run_train('halves', *extra)
    assert half['step'] == 5
    assert '--init_from=resume' in capsys.readouterr().out

    whole = run_train('halves', *extra, '--init_from=resume')
    assert whole['step'] == 10
    same_weights(straight, whole)
    for key, held in straight['optimizer']['state'].items():
        for name, value in held.items():
            assert torch.equal(value, whole['optimizer']['state'][key][name])
    with pytest.raises(AssertionError):
        same_weights(half, whole)


def as_version_1(state):
    """
    A checkpoint as it was saved before a mechanism had its weights: gates, router and pause stood
    beside those of the plain GPT, and `pause` was the first of all vectors.
    """
    optimizer = state['optimizer']
    if 'mechanism.pause' in state['model']:
        held = optimizer['state']
        vectors = optimizer['param_groups'][1]['params']
        order = [vectors[-1], *vectors[:-1]]
        moved = {new: held[old] for new, old in zip(vectors, order)}
        optimizer = {**optimizer, 'state': {**held, **moved}}
    model = {name.removeprefix('mechanism.'): p for name, p in state['model'].items()}
    return {**state, 'version': 1, 'model': model, 'optimizer': optimizer}


@pytest.mark.parametrize('toggle', [
    'pause',
    'gate',
    *[pytest.param(name, marks=pytest.mark.slow) for name in ('plain', 'mask', 'router')],
])
def test_checkpoints_of_version_1_go_on_exactly(run_train, tmp_path, toggle):
    straight = run_train('straight', *options(toggle))
    with stopped_at(5):
        half = run_train('halves', *options(toggle))
    old = as_version_1(half)
    assert not any(name.startswith('mechanism') for name in old['model'])
    save_checkpoint(str(tmp_path / 'halves'), old)
    whole = run_train('halves', *options(toggle), '--init_from=resume')
    same_weights(straight, whole)


@pytest.mark.parametrize('toggle, before', [('router', 0.0), ('gate', 0.4)])
def test_routers_of_version_2_keep_their_term_from_the_first_step_on(tmp_path, toggle, before):
    save(tmp_path, make(**TOGGLES[toggle]))
    path = tmp_path / 'ckpt.pt'
    state = torch.load(path)
    state['version'] = 2
    state['config'].update(halt_start=0.4, halt_full=0.48)
    torch.save(state, path)
    assert load_checkpoint(str(tmp_path))['config']['halt_start'] == before


def test_each_step_knows_its_place_in_the_run_and_draws_its_iterations(run_train, monkeypatch):
    """
    Halting sets in by `progress`, and 'latent' trains with one iteration more or less, whether a
    run was resumed or not.
    """
    told = []
    forward = GPT.forward

    def listen(self, idx, targets=None, jacobi=None):
        if self.training:
            told.append((self.mechanism.progress, jacobi))
        return forward(self, idx, targets, jacobi)

    monkeypatch.setattr(GPT, 'forward', listen)
    latent = ['--ponder=latent', '--ponder_steps=1', '--jacobi_iters=5']
    run_train('straight', *latent)
    straight = list(told)
    told.clear()
    with stopped_at(5):
        run_train('halves', *latent)
    run_train('halves', '--init_from=resume')
    assert told == straight
    assert [progress for progress, _ in straight] == [step / 10 for step in range(10) for _ in '12']

    draws = [jacobi for _, jacobi in straight]
    assert set(draws) == {4, 5}
    assert draws[::2] == draws[1::2]  # the micro-batches of a step alike


def test_another_seed_gives_other_weights(run_train):
    with pytest.raises(AssertionError):
        same_weights(run_train('a'), run_train('b', '--seed=2'))


def test_micro_batches_do_not_matter(run_train):
    same_weights(run_train('a', '--micro_batch=8'), run_train('b', '--micro_batch=2'), 2e-5)


def test_time_limit_and_a_resume_that_names_only_the_folder(run_train, tmp_path, capsys):
    recipe = ['--weight_decay=0.3', '--beta2=0.9']
    straight = run_train('straight', *recipe)
    assert run_train('out', *recipe, '--max_seconds=1e-6')['step'] == 1
    assert 'stopped at step 1; go on' in capsys.readouterr().out

    # the other settings are in the checkpoint
    train.main(['--init_from=resume', f'--out_dir={tmp_path / "out"}', '--max_seconds=None'])
    resumed = load_checkpoint(str(tmp_path / 'out'))
    same_weights(straight, resumed)
    assert {**straight['settings'], 'out_dir': 0} == {**resumed['settings'], 'out_dir': 0}
    with open(tmp_path / 'out' / 'settings.json') as f:
        assert json.load(f)['init_from'] == 'scratch'  # where the weights began


def test_settings_given_when_resuming_count(run_train):
    run_train('out', '--max_steps=4')
    given = ['--weight_decay=0.3', '--beta1=0.8', '--dropout=0.1']
    state = run_train('out', '--max_steps=5', '--init_from=resume', *given)
    groups = state['optimizer']['param_groups']
    assert [g['weight_decay'] for g in groups] == [0.3, 0.0]
    assert groups[0]['betas'] == (0.8, 0.95)


def test_fp16_resumes_with_its_scale(run_train):
    half = ['--dtype=float16', '--save_interval=5']
    straight = run_train('straight', *half)
    assert straight['scaler']['_growth_tracker'] > 5
    with stopped_at(5):
        run_train('out', *half)
    resumed = run_train('out', *half, '--init_from=resume')
    same_weights(straight, resumed)
    assert straight['scaler'] == resumed['scaler']


def test_other_data_than_before_is_named(run_train, monkeypatch, capsys):
    run_train('out', '--max_steps=4')
    run_train('out', '--init_from=resume', '--max_steps=6')
    assert 'not what this run read before' not in capsys.readouterr().err

    def changed(folder):
        meta = read_meta(folder)
        meta['train']['tokens'] = 7
        return meta

    monkeypatch.setattr(train, 'read_meta', changed)
    run_train('out', '--init_from=resume', '--max_steps=8')
    assert 'is not what this run read before' in capsys.readouterr().err


def test_data_that_can_no_longer_be_read_costs_no_step(run_train, monkeypatch, tmp_path):
    straight = run_train('straight')
    sample = Windows.sample
    readable = [0]  # steps

    def lost(self, first, *args, **options):
        if first >= readable[0] * 8:  # 8 windows a step
            raise UserError('gone')
        return sample(self, first, *args, **options)

    monkeypatch.setattr(Windows, 'sample', lost)
    with pytest.raises(UserError, match='gone'):
        run_train('out')
    assert os.listdir(tmp_path / 'out') != []
    assert not (tmp_path / 'out' / 'ckpt.pt').exists()  # nothing learned, nothing to keep

    readable[0] = 7
    with pytest.raises(UserError, match='gone'):
        run_train('out')
    assert load_checkpoint(str(tmp_path / 'out'))['step'] == 7
    monkeypatch.undo()
    same_weights(straight, run_train('out', '--init_from=resume'))


# ---- the step ------------------------------------------------------------------------------------

@pytest.mark.parametrize('dtype', ['float32', 'float16'])
def test_gradients_are_clipped_to_the_norm_asked_for(make_trainer, monkeypatch, dtype):
    trainer = make_trainer(f'--dtype={dtype}', '--grad_clip=0.01')
    clip = torch.nn.utils.clip_grad_norm_
    norms = []

    def spy(params, most):
        params = list(params)
        norms.append(clip(params, most).item())
        norms.append(torch.stack([p.grad.norm() for p in params]).norm().item())
        return torch.tensor(norms[0])

    monkeypatch.setattr(torch.nn.utils, 'clip_grad_norm_', spy)
    trainer.train_step()
    before, after = norms
    assert 0.01 < before < 100  # fp16's scale, 65536, is out of them
    assert after == pytest.approx(0.01, rel=1e-3)


def test_ranks_have_dropout_of_their_own_and_read_ahead_what_they_need_next(make_trainer,
                                                                            monkeypatch):
    trainer = make_trainer()
    manual_seed, sample = torch.manual_seed, trainer.train_data.sample
    seeds, asked = [], []

    def spy_seed(n):
        seeds.append(n)
        return manual_seed(n)

    def spy_sample(first, *args, then):
        asked.append((first, then))
        return sample(first, *args, then=then)

    monkeypatch.setattr(torch, 'manual_seed', spy_seed)
    monkeypatch.setattr(trainer.train_data, 'sample', spy_sample)
    monkeypatch.setattr(torch.distributed, 'all_reduce', lambda x: None)
    trainer.accumulation = 1
    for rank in (0, 1):
        trainer.ranks = Ranks(rank, 2)
        trainer.step = 0
        for _ in range(3):
            trainer.train_step()

    assert len(set(seeds)) == 6
    for calls in (asked[:3], asked[3:]):
        assert [then for _, then in calls[:2]] == [first for first, _ in calls[1:]]


def test_a_step_logs_the_passes_of_all_its_micro_batches(make_trainer, monkeypatch):
    trainer = make_trainer('--ponder=chain', '--halting=router')
    add_passes = trainer.log.add_passes
    taken = iter([torch.tensor([[2, 2]]), torch.tensor([[1, 1]])])
    monkeypatch.setattr(trainer.log, 'add_passes', lambda steps: add_passes(next(taken)))
    trainer.train_step()
    assert trainer.log.shares() == [1, 0.5, 0, 0]


def test_learning_rate_schedule():
    s = Settings(max_steps=100, learning_rate=2.0, warmup=0.1, min_lr_rate=0.1)
    rates = [train.learning_rate(s, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == pytest.approx(2.0)
    assert rates[99] == pytest.approx(0.2)
    assert all(a < b for a, b in zip(rates[:9], rates[1:10]))
    assert all(a > b for a, b in zip(rates[10:99], rates[11:]))


def test_decay_on_matrices_only(run_train):
    groups = run_train('out')['optimizer']['param_groups']
    config = GPTConfig(n_layer=3, n_head=2, n_embd=32, mlp_hidden=48, vocab_size=320)
    shapes = [p.shape for p in GPT(config).parameters()]
    assert [g['weight_decay'] for g in groups] == [0.1, 0.0]
    assert len(groups[0]['params']) == sum(len(shape) == 2 for shape in shapes)
    assert len(groups[1]['params']) == sum(len(shape) == 1 for shape in shapes)


@pytest.fixture
def with_ddp(make_trainer, tmp_path):
    """
    A Trainer that adds up two micro-batches in bf16, and whose model is in DDP, with one rank.
    """
    store = f'file://{tmp_path / "store"}'
    torch.distributed.init_process_group('gloo', init_method=store, rank=0, world_size=1)
    trainer = make_trainer('--dtype=bfloat16', '--ponder=chain', '--halting=router')
    trainer.ddp = torch.nn.parallel.DistributedDataParallel(trainer.model,
                                                            gradient_as_bucket_view=True)
    assert trainer.accumulation == 2
    yield trainer
    torch.distributed.destroy_process_group()


def test_gradients_stay_in_ddps_buckets_and_backward_is_not_autocast(with_ddp, monkeypatch):
    model, ddp = with_ddp.model, with_ddp.ddp
    backward, no_sync = torch.Tensor.backward, ddp.no_sync
    autocast, alone, where = [], [], []

    def spy_backward(loss):
        autocast.append(torch.is_autocast_enabled('cpu'))
        return backward(loss)

    def spy_no_sync():
        alone.append(1)
        return no_sync()

    def note_gradients(*_):
        where.append([p.grad.data_ptr() for p in model.parameters() if p.grad is not None])

    monkeypatch.setattr(torch.Tensor, 'backward', spy_backward)
    monkeypatch.setattr(ddp, 'no_sync', spy_no_sync)
    model.register_forward_pre_hook(note_gradients)
    for _ in range(3):
        with_ddp.train_step()

    assert autocast == [False] * 6
    assert len(alone) == 3  # ranks talk once a step
    assert where[2] == where[3] == where[4] == where[5]
    assert len(where[2]) == len(list(model.parameters()))


def test_bad_numbers_stop_the_run_and_keep_the_checkpoint(run_train, monkeypatch, tmp_path, capsys):
    good = run_train('out', '--max_steps=4')
    loss = GPT.loss
    monkeypatch.setattr(GPT, 'loss', lambda self, h, y: loss(self, h, y) * float('nan'))
    with pytest.raises(UserError, match='3 steps in a row.*learning_rate'):
        # none of these steps is saved
        run_train('out', '--init_from=resume', '--max_bad_steps=3', '--save_interval=1')
    assert capsys.readouterr().out.count('step skipped') == 3

    kept = load_checkpoint(str(tmp_path / 'out'))
    same_weights(good, kept)
    assert kept['step'] == 4
    with pytest.raises(UserError, match='5 steps in a row.*start again'):
        run_train('new')  # nothing to resume from


def test_one_bad_step_is_skipped(run_train, monkeypatch, tmp_path):
    loss, calls = GPT.loss, []

    def sometimes(self, h, y):
        calls.append(1)
        factor = float('nan') if len(calls) in (5, 9) else 1  # steps 3 and 5: not in a row
        return loss(self, h, y) * factor

    monkeypatch.setattr(GPT, 'loss', sometimes)
    state = run_train('out', '--max_bad_steps=2', '--max_seconds=600')
    records = log_of(tmp_path / 'out')
    assert all(math.isfinite(r['loss']) for r in records if 'loss' in r), "a mean over the others"
    assert state['step'] == 10
    assert all(p.isfinite().all() for p in state['model'].values())


def test_out_of_memory_says_what_to_lower(run_train, monkeypatch):
    with pytest.raises(RuntimeError) as cpu:
        torch.empty(2 ** 60, dtype=torch.uint8)
    gpu = torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 MiB')

    def fail_with(error):
        def fails(*args):
            raise error
        monkeypatch.setattr(GPT, 'loss', fails)

    advice = '^out of memory: .*micro_batch.*checkpoint_activations.*shard_optimizer.*block_size'
    for error in (cpu.value, gpu, MemoryError()):
        fail_with(error)
        with pytest.raises(UserError, match=advice):
            run_train('out')
    fail_with(RuntimeError('shapes differ'))
    with pytest.raises(RuntimeError, match='shapes differ'):
        run_train('out')  # a bug keeps its traceback


# ---- what is logged ------------------------------------------------------------------------------

def test_learns_and_logs(run_train, small_data, tmp_path, capsys):
    run_train('out', '--max_steps=40', '--log_interval=20')
    records = log_of(tmp_path / 'out')
    lines = [r for r in records if 'loss' in r]
    losses = [r['loss'] for r in lines]
    assert [r['step'] for r in lines] == [1, 20, 40]
    assert losses[0] > 5
    assert losses[-1] < 0.6 * losses[0]
    assert records[-1]['val_loss'] < 0.6 * losses[0]
    assert records[-1]['tokens'] == 40 * 256
    for r in lines:
        assert 0 < r['data_ms'] < r['ms'], "time waiting for data, as a part of each step"

    text, val = capsys.readouterr().out, read_meta(small_data)['val']
    per_byte = records[-1]['val_nats_per_byte']
    assert per_byte == pytest.approx(records[-1]['val_loss'] * val['tokens'] / val['bytes'])
    assert f"({per_byte / math.log(2):.3f} bits) per byte" in text
    for word in ('step    40/40', 'loss', 'lr', 'grad norm', 'tokens/s', 'left', 'validation loss'):
        assert word in text


def test_what_is_logged_of_time_and_learning_rate(run_train, tmp_path, monkeypatch, capsys):
    """By a clock that a step moves by half a second, and an evaluation by 100."""
    clock = [0.0]
    step, evaluate = Trainer.train_step, Trainer.evaluate

    def timed_step(self):
        clock[0] += 0.5
        return step(self)

    def timed_evaluate(self):
        clock[0] += 100
        return evaluate(self)

    monkeypatch.setattr(time, 'perf_counter', lambda: clock[0])
    monkeypatch.setattr(Trainer, 'train_step', timed_step)
    monkeypatch.setattr(Trainer, 'evaluate', timed_evaluate)
    run_train('out', '--log_interval=4', '--eval_interval=2', '--warmup=0.5')

    records = [r for r in log_of(tmp_path / 'out') if 'ms' in r]
    assert [r['step'] for r in records] == [1, 4, 8]
    for r in records:
        assert r['ms'] == pytest.approx(500)
        assert r['tokens_per_second'] == pytest.approx(512)
    half_way = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 2 / 4))
    rates = [1e-2 * 1 / 5, 1e-2 * 4 / 5, 1e-2 * half_way]
    assert [r['lr'] for r in records] == pytest.approx(rates)
    out = capsys.readouterr().out
    assert '0:00:03 left' in out  # 6 steps
    assert '0:00:01 left' in out  # 2 steps


def test_passes_are_logged_and_tau_can_change_at_evaluation(run_train, small_data, tmp_path,
                                                            capsys):
    run_train('out', *options('router'), '--max_steps=10', '--log_interval=5')
    records = log_of(tmp_path / 'out')
    for record in records[:-1]:
        assert record['passes'][0] == 1
        assert record['passes'] == sorted(record['passes'], reverse=True)
        assert len(record['passes']) == 3
    assert 1 < records[-1]['val_passes'] < 3
    assert f"{sum(records[0]['passes']):.2f} passes (1.00" in capsys.readouterr().out

    trained = f"{records[-1]['val_passes']:.3f} passes"
    for tau, passes in ((0.0, '3.000 passes'), (1.1, '1.000 passes'), (0.3, trained)):
        train.main([f'--data_dir={small_data}', f'--out_dir={tmp_path / "out"}',
                    '--init_from=resume', '--eval_only=True', f'--halt_tau={tau}',
                    '--dtype=float32', '--device=cpu', '--eval_tokens=512'])
        assert passes in capsys.readouterr().out


def make_log(model=None):
    model = model or make()
    return Log(Output(ALONE, Stop(ALONE, CPU)), Settings(), model, None, ALONE, CPU)


@pytest.mark.parametrize('passes, progress, words', [
    ([1, 1, 1], 0.5, 'nobody halts!'),
    ([1, 1, 1], 0.3, ''),
    ([1, 0, 0], 0.3, 'everybody halts!'),
    ([1, 0.9, 0.1], 0.9, ''),
])
def test_collapse_is_named_in_the_log(passes, progress, words):
    log = make_log(make(**TOGGLES['gate']))
    log.model.mechanism.progress = progress
    log.passes = [torch.tensor(passes, dtype=torch.float32)]
    text = log.describe(log.shares())
    assert text.rsplit(')', 1)[1].strip() == words
    assert log.passes == []


def test_mfu_is_a_share_of_the_gpus_peak(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'NVIDIA H100 80GB HBM3')
    log = make_log()
    assert log.mfu(1e6) is None  # on a CPU
    log.device = torch.device('cuda')
    log.ranks = Ranks(0, 8)
    assert log.mfu(1e6) == 1e6 * log.model.flops_per_token() / (989e12 * 8)
    router = make_log(make(**TOGGLES['router']))
    router.device = torch.device('cuda')
    assert router.mfu(1e6) is None  # its tokens stop in training
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'a GPU of the future')
    assert log.mfu(1e6) is None


def test_loss_spikes_are_said():
    log, said = make_log(), []
    log.say = lambda text, **record: said.append((text, record))
    for i in range(60):
        log.watch(7, 2 + 0.1 * (i % 3))  # as far as noise goes
    log.watch(7, math.nan)               # a skipped step is another matter
    assert said == []
    log.watch(7, 3.5)
    [(text, record)] = said
    assert 'step 7: loss spike, 3.5000 after 2.1' in text
    assert record['spike'] == 3.5
    assert record['mean_before'] == pytest.approx(2.1, abs=0.01)


def test_half_a_line_in_the_log_costs_no_other(run_train, tmp_path):
    run_train('out', '--max_steps=4')
    with open(tmp_path / 'out' / 'log.jsonl', 'a') as f:
        f.write('{"step": 4, "val')
    run_train('out', '--init_from=resume', '--max_steps=10')
    lines = (tmp_path / 'out' / 'log.jsonl').read_text().splitlines()
    lines.remove('{"step": 4, "val')
    assert [json.loads(line)['step'] for line in lines] == [1, 4, 10, 10]


# ---- evaluation ----------------------------------------------------------------------------------

def test_after_an_evaluation_training_goes_on_as_before(run_train):
    once = run_train('a', '--dropout=0.1')
    same_weights(once, run_train('b', '--dropout=0.1', '--eval_interval=5'))


def test_evaluation_is_the_plain_mean_over_fixed_windows(run_train, small_data, tmp_path, capsys):
    state = run_train('out')
    capsys.readouterr()
    train.main([f'--data_dir={small_data}', f'--out_dir={tmp_path / "out"}', '--init_from=resume',
                '--eval_only=True', '--eval_tokens=100_000_000', '--dtype=float32', '--device=cpu'])
    printed = float(capsys.readouterr().out.split('validation loss ')[1].split()[0])

    model = GPT(GPTConfig(**state['config'])).eval()
    model.load_state_dict(state['model'])
    data = Windows(small_data, 'val', read_meta(small_data), 32)
    losses = [model(*data.get([w], CPU))[1].item() for w in range(data.n)]
    assert printed == pytest.approx(sum(losses) / len(losses), abs=1e-4)


def test_evaluation_reads_eval_tokens_from_all_over_the_set(make_trainer, monkeypatch):
    trainer, windows_read = make_trainer(), []
    data = trainer.val_data
    get = data.get

    def spy(windows, device):
        windows_read.extend(windows)
        return get(windows, device)

    monkeypatch.setattr(data, 'get', spy)
    trainer.evaluate()
    n = 512 // 32
    assert windows_read == [i * data.n // n for i in range(n)]
    assert data.n > 2 * n


@pytest.mark.parametrize('name, steps, words', [
    ('gate', 0, None),
    ('gate', 1, None),
    ('gate', 3, 'weights for 2'),
    ('mask', 0, 'weights for 1'),
    ('router', 0, None),
    ('router', 3, None),
    ('pause', 0, None),
    ('pause', 3, None),
    ('plain', 1, "ponder='none'"),
])
def test_steps_can_change_at_evaluation(run_train, small_data, tmp_path, capsys, name, steps,
                                        words):
    run_train('out', *options(name), '--max_steps=1')

    def evaluate(n):
        train.main([f'--data_dir={small_data}', f'--out_dir={tmp_path / "out"}',
                    '--init_from=resume', '--eval_only=True', f'--ponder_steps={n}',
                    '--dtype=float32', '--device=cpu', '--eval_tokens=512'])

    if words:
        with pytest.raises(UserError, match=words):
            evaluate(steps)
    else:
        evaluate(steps)
        assert 'validation loss' in capsys.readouterr().out
    with pytest.raises(UserError, match='must not be negative'):
        evaluate(-1)


def test_evaluating_another_folder(run_train, small_data, tmp_path, capsys):
    """By the step of its checkpoint, whatever the batch is."""
    run_train('out')
    capsys.readouterr()
    evaluate = [f'--init_from={tmp_path / "out"}', '--eval_only=True', '--eval_tokens=512',
                '--batch_tokens=7', '--device=cpu']
    told = f'{tmp_path / "out"} on {small_data}, step 10: validation loss'
    for data in ([f'--data_dir={small_data}'], []):  # without: the data of that run
        train.main([*evaluate, *data])
        assert told in capsys.readouterr().out


def test_a_signal_cuts_an_evaluation_short(run_train, monkeypatch, capsys):
    straight, evaluate, batches = run_train('straight'), Trainer.evaluate, []

    def interrupted(self):
        get = self.val_data.get

        def signalled(*args):
            batches.append(args)
            self.stop.ask()
            return get(*args)

        monkeypatch.setattr(self.val_data, 'get', signalled)
        return evaluate(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, 'evaluate', interrupted)
        assert run_train('out', '--eval_interval=5')['step'] == 5
    out = capsys.readouterr().out
    assert len(batches) == 1
    assert 'step 5: evaluation left out' in out
    assert 'stopped at step 5; go on' in out
    same_weights(straight, run_train('out', '--eval_interval=5', '--init_from=resume'))


# ---- the sample at the end -----------------------------------------------------------------------

@pytest.mark.parametrize('name, fixed', [('gate', True), ('router', False)])
def test_attention_that_plans_each_length_is_for_fixed_lengths(run_train, name, fixed):
    run_train('out', *options(name), '--max_steps=1', '--sample_tokens=0')
    assert torch.backends.cuda.cudnn_sdp_enabled() == fixed
    run_train('more', *options(name), '--max_steps=1', '--sample_tokens=2')
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_sample_compiles_nothing(run_train, monkeypatch, capsys):
    """
    Each token reads one key more than the one before: compiled code would be made for each of them,
    in each layer.
    """
    graphs, compile = [], torch.nn.Module.compile

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def compile_and_count(module, dynamic):
        compile(module, backend=count, dynamic=dynamic)

    monkeypatch.setattr(torch.nn.Module, 'compile', compile_and_count)
    compiled = ['--depth_attn=True', '--compile=True', '--max_steps=2']
    torch._dynamo.reset()  # forget what other tests compiled
    run_train('without', *compiled)
    before, told = len(graphs), len(capsys.readouterr().out)
    assert before
    torch._dynamo.reset()
    run_train('with', *compiled, '--sample_tokens=12')
    assert len(graphs) == 2 * before
    assert len(capsys.readouterr().out) > told


def test_a_run_whose_vocabulary_cannot_be_fetched_is_complete_without_a_sample(
        run_train, monkeypatch, capsys):
    def no_network(name):
        raise UserError('its vocabulary could not be fetched')

    monkeypatch.setattr(log, 'get_tokenizer', no_network)
    assert run_train('out', '--max_steps=1', '--sample_tokens=5')['step'] == 1
    assert 'no sample: its vocabulary could not be fetched' in capsys.readouterr().out


def test_the_shortest_context_ends_with_a_sample(run_train, capsys):
    run_train('out', '--block_size=2', '--max_steps=1', '--sample_tokens=3')
    assert '<|model|>' in capsys.readouterr().out


# ---- checkpoints ---------------------------------------------------------------------------------

def test_previous_checkpoint_is_kept_and_used(run_train, tmp_path, capsys):
    out = tmp_path / 'out'
    run_train('out', '--save_interval=5')
    assert load_checkpoint(str(out))['step'] == 10
    with open(out / 'ckpt.pt', 'r+b') as f:
        f.truncate(1000)
    assert load_checkpoint(str(out))['step'] == 5
    assert 'ckpt.pt: damaged' in capsys.readouterr().err

    run_train('out', '--save_interval=5', '--init_from=resume')
    names = ('ckpt.pt', 'ckpt_prev.pt')
    assert [torch.load(out / name, weights_only=True)['step'] for name in names] == [10, 5]
    os.remove(out / 'ckpt.pt')  # as after a crash between the two renames
    assert load_checkpoint(str(out))['step'] == 5
    assert not [name for name in os.listdir(out) if name.endswith('.tmp')]


class Unpicklable:
    def __reduce__(self):
        raise OSError(28, 'No space left on device')


def test_a_failing_save_keeps_the_old_checkpoint(tmp_path):
    save_checkpoint(str(tmp_path), {'step': 1})
    with pytest.raises(OSError):
        save_checkpoint(str(tmp_path), {'step': Unpicklable()})
    assert torch.load(tmp_path / 'ckpt.pt', weights_only=True) == {'step': 1}
    assert os.listdir(tmp_path) == ['ckpt.pt']


class Evil:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_checkpoints_cannot_run_code(tmp_path):
    pwned = tmp_path / 'pwned'
    torch.save({'version': 1, 'model': Evil(str(pwned))}, tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match='not a checkpoint'):
        load_checkpoint(str(tmp_path))
    assert not pwned.exists()


@pytest.mark.parametrize('content', [
    b'',
    b'garbage',
    {'some': 'dict'},
    {'version': 99, 'model': {}},
    [1, 2],
])
def test_foreign_checkpoints(run_train, tmp_path, content):
    if isinstance(content, bytes):
        (tmp_path / 'ckpt.pt').write_bytes(content)
    else:
        torch.save(content, tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match='not a checkpoint') as error:
        run_train('out', f'--init_from={tmp_path}')
    assert '\n' not in str(error.value)


def rewrite(folder, state):
    """Put another checkpoint there; not in place: `state` may be mapped from the one before."""
    torch.save(state, folder / 'other.pt')
    (folder / 'other.pt').replace(folder / 'ckpt.pt')


def test_a_model_that_is_not_known_here_is_foreign(run_train, tmp_path, capsys):
    state = run_train('out', '--max_steps=4', '--save_interval=2')
    rewrite(tmp_path / 'out', {**state, 'config': {**state['config'], 'telepathy': True}})
    assert run_train('out', '--init_from=resume', '--max_steps=4', '--eval_only=True')['step'] == 4
    told = capsys.readouterr()
    assert 'not a checkpoint of this program' in told.err
    assert 'telepathy' in told.err
    assert 'step 2: validation loss' in told.out  # of the one before it


def test_a_setting_of_an_older_checkpoint_is_named(run_train, tmp_path, capsys):
    state = run_train('out', '--max_steps=1')
    rewrite(tmp_path / 'out', {**state, 'settings': {**state['settings'], 'min_lr': 0.5}})
    run_train('out', '--init_from=resume', '--max_steps=2')
    assert 'warning: no longer settings: min_lr' in capsys.readouterr().err


def test_a_full_disk_is_named_behind_pytorchs_own_error(run_train, monkeypatch):
    def full(folder, state):
        try:
            raise OSError(28, 'No space left on device')
        finally:
            raise RuntimeError('[enforce fail at inline_container.cc:672]')

    monkeypatch.setattr(train, 'save_checkpoint', full)
    with pytest.raises(UserError, match='No space left on device'):
        run_train('out', '--max_steps=1')


@pytest.mark.parametrize('save_interval', [1, 3, 100])
def test_a_folder_that_vanishes(run_train, monkeypatch, tmp_path, save_interval):
    train_step = Trainer.train_step

    def vanish(self):
        if self.step == 5:
            shutil.rmtree(tmp_path / 'out')
        return train_step(self)

    monkeypatch.setattr(Trainer, 'train_step', vanish)
    with pytest.raises(UserError, match='cannot write the checkpoint') as error:
        run_train('out', f'--save_interval={save_interval}')
    message = str(error.value)
    assert message.count('cannot write') == 1
    assert 'holds no checkpoint' in message     # none is kept any more


# ---- starting from other weights -----------------------------------------------------------------

NO_LEARNING = ['--max_steps=1', '--learning_rate=1e-9', '--weight_decay=0.0']


@pytest.mark.parametrize('toggle', ['plain', 'gate', 'router', 'pause'])
def test_weights_can_start_another_run(run_train, tmp_path, toggle):
    first = run_train('first', *options(toggle))
    start = f'--init_from={tmp_path / "first"}'
    second = run_train('second', start, *NO_LEARNING, '--rope_theta=5e5', shape=[])
    assert second['config']['rope_theta'] == 5e5
    assert second['step'] == 1
    same_weights(first, second, 1e-7)


@pytest.mark.parametrize('mechanism, own', [
    (['--depth_attn=True'], set()),
    (['--ponder=loop', '--ponder_steps=1'], set()),
    (['--ponder=embedding', '--halting=gate', '--ponder_steps=2'], {'mechanism'}),
])
def test_a_new_run_may_add_a_mechanism_or_change_the_context(run_train, tmp_path, mechanism, own):
    first = run_train('first')
    start = f'--init_from={tmp_path / "first"}'
    for name, context in (('second', []), ('shorter', ['--block_size=16'])):
        second = run_train(name, start, *NO_LEARNING, *mechanism, *context, shape=[])
        for key, p in first['model'].items():
            assert (second['model'][key] - p).abs().max() <= 1e-7, key
        new = second['model'].keys() - first['model'].keys()
        assert {key.split('.')[0] for key in new} == own
    assert second['config']['block_size'] == 16
    assert second['config']['embed_scale'] == first['config']['embed_scale'] == 1

    if own:
        with pytest.raises(UserError, match='do not fit.*gates'):
            run_train('third', f'--init_from={tmp_path / "shorter"}', '--halting=none', shape=[])


def test_a_new_run_needs_all_weights_of_the_plain_gpt(run_train, tmp_path):
    state = run_train('first')
    del state['model']['h.1.ln_2.weight']
    save_checkpoint(str(tmp_path / 'first'), state)
    os.remove(tmp_path / 'first' / 'ckpt_prev.pt')
    with pytest.raises(UserError, match='model.h.1.ln_2.weight is missing'):
        run_train('second', f'--init_from={tmp_path / "first"}', '--ponder=loop', shape=[])


def test_none_is_the_default_again_in_a_new_run(run_train, tmp_path):
    run_train('first', '--depth_attn=True', '--depth_stride=2')
    start = f'--init_from={tmp_path / "first"}'
    for args, stride in (([], 2), (['--depth_stride=None'], 1)):
        second = run_train(f'second{stride}', start, '--max_steps=1', *args, shape=[])
        assert second['config']['depth_stride'] == stride


def test_settings_of_a_mechanism_that_is_off_are_named(run_train, tmp_path, capsys):
    run_train('plain', '--depth_stride=1', '--halt_tau=0.5', '--ponder_steps=2', '--ponder=none')
    warning = 'warning: depth_stride, halt_tau, ponder_steps: without effect'
    assert warning in capsys.readouterr().err
    run_train('loop', '--ponder=loop', '--jacobi_iters=2', '--ponder_topk=5')
    assert 'warning: jacobi_iters, ponder_topk: without effect' in capsys.readouterr().err

    train.main([str(tmp_path / 'plain' / 'settings.json'), f'--out_dir={tmp_path / "again"}',
                '--depth_stride=None', '--halt_tau=1e-4', '--ponder_steps=3'])
    run_train('on', '--depth_attn=True', '--depth_stride=1', '--ponder=chain', '--halting=router',
              '--halt_tau=0.5', '--ponder_steps=2')
    assert 'without effect' not in capsys.readouterr().err


def test_data_of_another_vocabulary(run_train, small_data, tmp_path):
    run_train('out')
    other = tmp_path / 'other'
    os.makedirs(other)
    for name in os.listdir(small_data):
        with open(os.path.join(small_data, name), 'rb') as f:
            content = f.read()
        if name == 'meta.json':
            content = content.replace(b'"n_tokens": 257', b'"n_tokens": 50257')
            content = content.replace(b'"eot": 256', b'"eot": 50256')
            content = content.replace(b'"tokenizer": "byte"', b'"tokenizer": "gpt2"')
        (other / name).write_bytes(content)
    with pytest.raises(UserError, match='50257 tokens.*n_tokens=257'):
        run_train('out', f'--data_dir={other}', '--init_from=resume', '--max_steps=12')


def test_the_builtin_corpus_is_prepared_when_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train.main([*SHAPE, *QUICK, '--max_steps=1', '--sample_tokens=5'])
    assert 'preparing the built-in corpus' in capsys.readouterr().out
    assert read_meta(str(tmp_path / 'data' / 'python'))['n_tokens'] == 257
    train.main([*SHAPE, *QUICK, '--max_steps=1', '--out_dir=b'])
    assert 'preparing' not in capsys.readouterr().out


def test_a_dry_run_plans_the_model_that_is_loaded(run_train, tmp_path, capsys):
    state = run_train('out', '--ponder=loop', '--n_kv_head=1')
    parameters = sum(p.numel() for p in state['model'].values())
    for start in ('resume', tmp_path / 'out'):
        capsys.readouterr()
        train.main([f'--out_dir={tmp_path / "out"}', f'--init_from={start}', '--n_kv_head=None',
                    '--batch_tokens=256', '--micro_batch=4', '--dry_run=True'])
        assert f"parameters  {parameters / 1e6:,.2f}M" in capsys.readouterr().out
    with pytest.raises(UserError, match='nowhere: no checkpoint'):
        train.main([f'--init_from={tmp_path / "nowhere"}', '--dry_run=True'])


# ---- the output folder ---------------------------------------------------------------------------

def test_settings_file_is_a_config_file(run_train, tmp_path):
    first = run_train('a', '--seed=5', '--save_interval=5')
    os.remove(tmp_path / 'a' / 'ckpt.pt')  # back to step 5: a resumed run's file serves as well
    run_train('a', '--init_from=resume', '--seed=5')
    again = tmp_path / 'again'
    train.main([str(tmp_path / 'a' / 'settings.json'), f'--out_dir={again}'])
    same_weights(first, load_checkpoint(str(again)))


def test_settings_are_whole_or_those_before(run_train, tmp_path, monkeypatch):
    run_train('out')
    settings = tmp_path / 'out' / 'settings.json'
    before = settings.read_text()

    def half(value, file, **_):
        file.write('{"seed": 1')
        raise OSError(28, 'No space left on device')

    with monkeypatch.context() as full:
        full.setattr(json, 'dump', half)
        with pytest.raises(UserError, match='out: cannot be written'):
            run_train('out', '--init_from=resume', '--max_steps=12')
    assert settings.read_text() == before
    assert not (tmp_path / 'out' / 'settings.json.tmp').exists()


def test_existing_checkpoints_are_not_overwritten(run_train, tmp_path):
    out = tmp_path / 'out'
    run_train('out')
    with pytest.raises(UserError, match='--init_from=resume'):
        run_train('out')
    with pytest.raises(UserError, match='--init_from=resume'):
        run_train('out', f'--init_from={out}', '--max_steps=3')
    os.rename(out / 'ckpt.pt', out / 'ckpt_prev.pt')  # as after a crash between two renames
    with pytest.raises(UserError, match='--init_from=resume'):
        run_train('out')

    with pytest.raises(UserError, match='max_steps=10'):
        run_train('out', '--init_from=resume')
    more = ['--init_from=resume', '--max_steps=12']
    with pytest.raises(UserError, match='n_layer=4.*has 3'):
        run_train('out', *more, '--n_layer=4')
    with pytest.raises(UserError, match="ponder=latent, but the model loaded has none"):
        run_train('out', *more, '--ponder=latent')
    with pytest.raises(UserError, match='depth_attn=True'):
        run_train('out', *more, '--depth_attn=True')


def test_what_another_run_saved_meanwhile_is_not_overwritten(run_train, monkeypatch, tmp_path):
    other = run_train('other', '--seed=2')

    @contextlib.contextmanager
    def after_the_other(folder):  # which had the lock until now
        os.rename(tmp_path / 'other', folder)
        yield

    monkeypatch.setattr(output, 'alone', after_the_other)
    with pytest.raises(UserError, match='out holds a checkpoint'):
        run_train('out')
    same_weights(other, load_checkpoint(str(tmp_path / 'out')))


def test_two_runs_do_not_share_a_folder(run_train, tmp_path):
    with alone(str(tmp_path / 'out')):
        with pytest.raises(UserError, match='out: another process writes here'):
            run_train('out')
        assert os.listdir(tmp_path / 'out') == []
    assert run_train('out')['step'] == 10


def test_an_output_folder_that_cannot_be_made(run_train, tmp_path):
    (tmp_path / 'file').write_text('in the way')
    with pytest.raises(UserError, match='cannot be written'):
        run_train(os.path.join('file', 'out'))


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='needs a device that is always full')
def test_a_full_disk_while_logging_is_one_line(fork_train, tmp_path):
    os.makedirs(tmp_path / 'out')
    os.symlink('/dev/full', tmp_path / 'out' / 'log.jsonl')
    process = fork_train()
    process.join(60)
    assert process.exitcode == 2
    [line] = (tmp_path / 'errors').read_text().splitlines()
    assert line.startswith('error: ')
    assert 'log.jsonl' in line
    assert 'No space left' in line
    # the log's first line; what was learned is kept
    assert load_checkpoint(str(tmp_path / 'out'))['step'] == 1


# ---- signals -------------------------------------------------------------------------------------

@posix
@pytest.mark.parametrize('name', ['SIGINT', 'SIGTERM', 'SIGHUP'])  # not all exist on Windows
def test_a_signal_saves_and_stops(fork_train, tmp_path, name):
    process = fork_train()
    wait_for('step     3', tmp_path / 'out.log0', process)
    os.kill(process.pid, getattr(signal, name))
    process.join(60)
    assert process.exitcode == 0, (tmp_path / 'errors').read_text()
    out = (tmp_path / 'out.log0').read_text()
    assert 'stopped at step' in out
    assert '--init_from=resume' in out
    assert load_checkpoint(str(tmp_path / 'out'))['step'] >= 3


@posix
def test_under_nohup_a_run_outlives_its_terminal(run_train, monkeypatch):
    step = Trainer.train_step
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def hung_up(self):
        signal.raise_signal(signal.SIGHUP)
        return step(self)

    monkeypatch.setattr(Trainer, 'train_step', hung_up)
    try:
        assert run_train('out', '--max_steps=3')['step'] == 3
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_signal_ends_at_once_unless_torchrun_passed_it_on(monkeypatch):
    now, raised = [100.0], []
    monkeypatch.setattr(time, 'monotonic', lambda: now[0])
    monkeypatch.setattr(signal, 'signal', lambda number, handler: raised.append(handler))
    monkeypatch.setattr(signal, 'raise_signal', raised.append)
    stop = Stop(ALONE, CPU)
    assert not stop.asked()
    for now[0] in (100.0, 100.1):
        stop.hear(signal.SIGTERM, None)
    assert stop.asked()
    assert raised == []
    now[0] = 101.0
    stop.hear(signal.SIGTERM, None)
    assert raised == [signal.SIG_DFL, signal.SIGTERM]


@posix
def test_output_that_nobody_reads_any_more_loses_nothing(fork_train, tmp_path):
    os.mkfifo(tmp_path / 'out.log0')
    process = fork_train()
    with open(tmp_path / 'out.log0') as out:
        read_three_steps(out)
    process.join(60)
    lost_its_reader(process.exitcode, (tmp_path / 'errors').read_text(), tmp_path / 'out')


@posix
def test_ctrl_c_on_a_pipe_loses_nothing(small_data, tmp_path):
    """Ctrl-C on `python train.py | tee log` ends tee first. This is a program of its own."""
    command = [sys.executable, 'train.py', *SHAPE, *QUICK, '--max_steps=100000', '--log_interval=1',
               f'--data_dir={small_data}', f'--out_dir={tmp_path / "out"}']
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
    read_three_steps(process.stdout)
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    errors = process.stderr.read()
    lost_its_reader(process.wait(timeout=60), errors, tmp_path / 'out')


def read_three_steps(out):
    for line in out:
        if line.startswith('step     3'):
            return
    raise AssertionError('ended before')


def lost_its_reader(status, errors, folder):
    assert status == 2
    assert errors.count('\n') == 1
    assert '<stdout>' in errors
    assert '--init_from=resume' in errors
    assert load_checkpoint(str(folder))['step'] >= 3


# ---- what is refused -----------------------------------------------------------------------------

@pytest.mark.parametrize('args, words', [
    (['--n_hed=4'], ["'n_hed'", "'n_head'"]),
    (['--n_head=5'], ['n_embd=32', 'n_head=5']),
    (['--n_head=32'], ['head_dim=1', 'odd']),
    (['--batch_tokens=1000'], ['batch_tokens=1000', 'micro_batch']),
    (['--init_from=resume'], ['no checkpoint']),
    (['--init_from=nowhere'], ['nowhere', 'no checkpoint']),
    ([f'--init_from={__file__}'], ['is a file', 'folder it is in']),
    (['--eval_only=True'], ['eval_only', '--init_from']),
    (['--data_dir=elsewhere'], ['elsewhere', 'prepare_data.py']),
    (['--vocab_size=100'], ['n_tokens=257', 'vocab_size=100']),
    (['--n_tokens=300', '--vocab_size=320'], ['257', 'n_tokens=300']),
    (['--device=quantum'], ['device=quantum']),
    (['--device=hpu'], ['device=hpu']),
    (['--dtype=int8'], ['dtype', 'bfloat16']),
    (['--max_steps=0'], ['max_steps=0']),
    (['--max_seconds=0'], ['max_seconds=0']),
    (['stray'], ['stray']),
    (['--seed=-1'], ['seed=-1']),
    (['--beta2=1.0'], ['beta2=1.0']),
    (['--sample_tokens=-5'], ['sample_tokens']),
    (['--weight_decay=-1'], ['weight_decay']),
    (['--device=meta'], ['device=meta']),
    (['--block_size=100000', '--batch_tokens=400000'], ['block_size']),
])
def test_refusals(run_train, args, words):
    with pytest.raises(UserError) as error:
        run_train('out', *args)
    assert '\n' not in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize('rank', ['0', 'x'])
def test_half_of_torchruns_variables_is_refused(run_train, monkeypatch, rank):
    for name in ('WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('RANK', rank)
    with pytest.raises(UserError, match='RANK.*torchrun'):
        run_train('out')


def test_a_world_size_that_some_scheduler_set_is_not_torchruns(run_train, monkeypatch):
    monkeypatch.delenv('RANK', raising=False)
    monkeypatch.setenv('WORLD_SIZE', '2')
    run_train('out', '--max_steps=1')


def test_compiling_without_a_compiler_is_refused(fork_train, tmp_path):
    nothing = dict(CXX='missing', PATH=tmp_path, TORCHINDUCTOR_CACHE_DIR=tmp_path / 'cache')
    process = fork_train('--compile=True', env=nothing)
    process.join(120)
    assert process.exitcode == 2
    [line] = (tmp_path / 'errors').read_text().splitlines()
    assert line.startswith('error: ')
    for word in ('compile=True', 'C++ compiler', '--compile=False'):
        assert word in line


# ---- what suits the machine ----------------------------------------------------------------------

@pytest.mark.parametrize('cuda, mps, cpu, want', [
    ((9, 0), False, {}, ('cuda:1', torch.bfloat16, True)),
    ((7, 5), True, {}, ('cuda:1', torch.float16, True)),
    (None, True, {}, ('mps', torch.float32, False)),
    (None, False, {}, ('cpu', torch.float32, False)),
    (None, False, {'avx512_bf16': True}, ('cpu', torch.bfloat16, False)),
    (None, False, {'amx_bf16': True}, ('cpu', torch.bfloat16, False)),
])
def test_device_and_precision_are_the_best_there_are(monkeypatch, cuda, mps, cpu, want):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: cuda is not None)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: cuda)
    monkeypatch.setattr(torch.cuda, 'set_device', lambda device: None)
    monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: mps)
    monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: cpu, raising=False)
    monkeypatch.setattr(torch, 'empty', lambda *size, device: None)  # there is no such device here
    device = hardware.pick_device(None, local_rank=1)
    dtype = hardware.pick_dtype(None, device)
    assert (str(device), dtype, hardware.pick_compile(None, device)) == want
    assert hardware.pick_dtype('float32', device) == torch.float32
    assert hardware.pick_compile(True, device) is True


def test_what_is_chosen_for_speed(monkeypatch):
    hardware.tune_cpu()
    assert attention.kernel is attention.two_matmuls
    idx = torch.arange(48).view(2, 24)
    calls = []
    for toggle in ('plain', 'chain'):
        model = make(**TOGGLES[toggle]).float()
        with torch.autocast('cpu', torch.bfloat16), monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, 'scaled_dot_product_attention',
                          lambda *args, **options: calls.append(1))
            quick = model.hidden(idx)
        assert (quick - model.hidden(idx)).abs().mean() < 0.05  # what rounding to bf16 does
    assert not calls

    compiled = []
    monkeypatch.setattr(torch.nn.Module, 'compile', lambda block, **how: compiled.append(how))
    with torch._dynamo.config.patch(recompile_limit=8, optimize_ddp=True):
        for toggle in ('chain', 'router'):
            hardware.compile_blocks(make(**TOGGLES[toggle]))
        assert compiled == [dict(dynamic=False)] * 5 + [dict(dynamic=None)] * 5
        assert torch._dynamo.config.recompile_limit == 128


# ---- the configs ---------------------------------------------------------------------------------

CONFIG = os.path.join(ROOT, 'config')
# parameters, Depth-Attention paper, tables 8 and 9
PAPER = {'360m.py': 0.361e9, '500m.py': 0.498e9, '710m.py': 0.716e9, '1.5b.py': 1.344e9,
         '3b.py': 2.748e9}


def files(*folder):
    names = os.listdir(os.path.join(CONFIG, *folder))
    return sorted(name for name in names if name.endswith('.py'))


@pytest.mark.parametrize('name', files('size'))
@pytest.mark.parametrize('mechanism', files())
def test_every_config_makes_a_model(mechanism, name):
    paths = [os.path.join(CONFIG, mechanism), os.path.join(CONFIG, 'size', name)]
    given, rest = read(paths, '', Settings, GPTConfig)
    settings, config = build(Settings, given), build(GPTConfig, given)
    assert not rest
    assert settings.batch_tokens % (settings.micro_batch * config.block_size) == 0
    assert settings.learning_rate > 0
    assert math.isfinite(settings.learning_rate)

    with torch.device('meta'):
        model = GPT(config)
    if name in PAPER:
        weights = [p for key, p in model.named_parameters() if not key.startswith('mechanism.')]
        assert sum(p.numel() for p in weights) == pytest.approx(PAPER[name], rel=0.01)
