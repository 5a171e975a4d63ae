"""
Training: exact resume, one rank and several, what is logged, evaluated and refused, runs that are
interrupted. Damaged checkpoints: test_checkpoint.py.
"""
import contextlib
import io
import json
import math
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
from conftest import ONE_EACH, ROOT, TOGGLES, make, program, slow_but
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import prepare_data
import train
from configurator import build, read
from engine import hardware
from engine.checkpoint import load_checkpoint, load_optimizer
from engine.files import UserError
from engine.flops import flops_per_token
from engine.hardware import Ranks
from engine.log import Log, Stop
from engine.muon import MuonAndAdamW, equalized
from engine.prepare import prepare
from engine.shards import read_meta
from engine.start import check_memory, check_ranks, check_resume, idle_settings
from engine.trained import load_model
from engine.windows import Windows
from model import GPT, MLP, Attention, Block, GPTConfig, Mechanism
from train import Settings, Trainer

SHAPE = ['--n_layer=3', '--n_head=2', '--n_embd=32', '--mlp_hidden=48', '--block_size=32']
QUICK = ['--batch_tokens=256', '--micro_batch=4', '--max_steps=10', '--eval_tokens=512',
         '--sample_tokens=0', '--learning_rate=1e-2', '--dtype=float32', '--device=cpu']
ENDLESS = ['--max_steps=100000', '--log_interval=1']
CPU = torch.device('cpu')
ALONE = Ranks(0, 1)
posix = pytest.mark.skipif(sys.platform == 'win32', reason='fork, signals and gloo need POSIX')


@pytest.fixture
def run_train(small_data, tmp_path, monkeypatch):
    """
    Run train.py in this process, with the same small model in every run; returns the checkpoint
    of its out_dir.
    """
    monkeypatch.setattr('engine.log.SILENCE', math.inf)     # no lines more on a busy machine

    def run(name, *args, shape=SHAPE):
        out_dir = str(tmp_path / name)
        train.main([*shape, *QUICK, f'--data_dir={small_data}', f'--out_dir={out_dir}', *args])
        return load_checkpoint(out_dir)
    return run


@pytest.fixture
def make_trainer(small_data, tmp_path):
    """The Trainer of such a run, for its parts."""
    def make(*args, device=CPU):
        folders = [f'--data_dir={small_data}', f'--out_dir={tmp_path / "out"}']
        given, _ = read([*SHAPE, *QUICK, *folders, *args], '', Settings, GPTConfig)
        return Trainer(build(Settings, given), given, None, ALONE, device)
    return make


@contextlib.contextmanager
def stopped_at(step):
    """Runs in here are told to stop in this step."""
    train_step = Trainer.train_step

    def step_and_stop(self):
        result = train_step(self)
        if self.step == step:
            self.stop.since = 1.0
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, 'train_step', step_and_stop)
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


def same_optimizer(a, b, tol=0.0):
    a, b = a['optimizer'], b['optimizer']
    assert a['state'].keys() == b['state'].keys()
    assert a['param_groups'] == b['param_groups']
    for i, state in a['state'].items():
        for name, value in state.items():
            assert (value - b['state'][i][name]).abs().max() <= tol, (i, name)


# ---- resuming ------------------------------------------------------------------------------------

# the others have these in them: depth has plain, gate embedding, router chain, exit loop
MOST = [name for name in ONE_EACH
        if name not in ('plain', 'embedding', 'chain_depth', 'loop_depth')]


@pytest.mark.parametrize('toggle', slow_but(('feedback_depth', 'gate'), MOST))
def test_four_steps_equal_two_and_resume_and_two(run_train, toggle, capsys):
    few = [*options(toggle), '--max_steps=4', '--batch_tokens=128', '--eval_tokens=64',
           '--dropout=0.1']
    straight = run_train('straight', *few)
    with stopped_at(2):
        half = run_train('halves', *few)
    assert half['step'] == 2
    assert 'stopped at step 2; go on' in capsys.readouterr().out
    whole = run_train('halves', *few, '--init_from=resume')
    same_weights(straight, whole)
    same_optimizer(straight, whole)
    with pytest.raises(AssertionError):
        same_weights(half, whole)


@pytest.mark.parametrize('optimizer', ['adamw', 'muon'])
def test_fp16_resumes_exactly_too(run_train, optimizer):
    """Its scale grows as the run does well, and is part of the checkpoint."""
    half = ['--dtype=float16', '--save_interval=5', f'--optimizer={optimizer}']
    straight = run_train('straight', *half)
    with stopped_at(5):
        run_train('out', *half)
    resumed = run_train('out', *half, '--init_from=resume')
    same_weights(straight, resumed)
    assert straight['scaler'] == resumed['scaler']
    assert straight['scaler']['_growth_tracker'] > 5


def test_a_time_limit_and_a_resume_that_says_nothing_more(run_train, tmp_path, monkeypatch, capsys):
    recipe = ['--weight_decay=0.3', '--beta2=0.9']
    straight = run_train('straight', *recipe)
    assert run_train('first', *recipe, '--max_seconds=1e-6')['step'] == 1
    told = capsys.readouterr().out
    assert 'stopped at step 1; go on' in told
    assert 'learned by heart' not in told
    kept = json.loads((tmp_path / 'first' / 'settings.json').read_text())
    assert kept['weight_decay'] == 0.3 and 'max_seconds' not in kept

    # the other settings are in the checkpoint, but for its folder, which has moved, and the limit
    os.rename(tmp_path / 'first', tmp_path / 'out')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr('engine.log.OFTEN', 0)
    assert train.main(['--init_from=resume']) == 0
    assert 'warning: a text read 0 times is learned by heart' in capsys.readouterr().out
    assert not os.path.exists(tmp_path / 'first')
    resumed = load_checkpoint(str(tmp_path / 'out'))
    same_weights(straight, resumed)
    assert {**straight['settings'], 'out_dir': 0} == {**resumed['settings'], 'out_dir': 0}

    # and in settings.json, which is a config file
    train.main([str(tmp_path / 'out' / 'settings.json'), f'--out_dir={tmp_path / "again"}'])
    same_weights(straight, load_checkpoint(str(tmp_path / 'again')))


def test_the_first_step_of_a_process_has_a_line_of_its_own(run_train, tmp_path, capsys):
    """It compiles: among others it would slow them all. And no step is lost from the log."""
    few = ['--max_steps=15', '--log_interval=10', '--eval_interval=3']
    with stopped_at(3):
        run_train('out', *few)
    assert 'evaluation stopped; --init_from=resume --eval_only=True' in capsys.readouterr().out
    run_train('out', *few, '--init_from=resume')
    assert [r['step'] for r in log_of(tmp_path / 'out') if 'loss' in r] == [1, 3, 4, 10, 15]


def test_the_last_evaluation_is_made_when_time_is_up(run_train, tmp_path, capsys):
    """No later run would put it on record."""
    with stopped_at(4):
        run_train('out', '--max_steps=4')
    assert 'step 4: validation loss' in capsys.readouterr().out
    assert [r['step'] for r in log_of(tmp_path / 'out') if 'val_loss' in r] == [4]


def test_what_is_counted_as_if_it_had_been_so_from_the_start_is_told(run_train, capsys):
    run_train('out', '--ponder=loop', '--ponder_steps=0', '--max_steps=1')
    again = ['--init_from=resume', '--ponder_steps=2', '--batch_tokens=128']
    run_train('out', *again, '--max_steps=2', shape=[])
    told = capsys.readouterr().err
    assert 'ponder_steps was 0: log.jsonl counts FLOPs as if' in told
    assert 'batch_tokens was 256: the data goes on' in told
    run_train('out', *again, '--max_steps=3', shape=[])
    assert ' was ' not in capsys.readouterr().err


def test_a_run_says_whose_weights_it_begins_with(run_train, tmp_path, capsys):
    """Also where a settings.json asks for them, which the user may not have looked into."""
    first = tmp_path / 'first'
    run_train('first', '--max_steps=1')
    run_train('tuned', '--max_steps=1', f'--init_from={first}')
    capsys.readouterr()
    run_train('again', str(tmp_path / 'tuned' / 'settings.json'), f'--out_dir={tmp_path / "again"}')
    assert f'begins with the weights of {first}\n' in capsys.readouterr().out
    run_train('first', '--max_steps=2', '--init_from=resume')
    assert 'begins with' not in capsys.readouterr().out


def test_settings_given_when_resuming_count(run_train):
    run_train('out', '--max_steps=4')
    given = ['--weight_decay=0.3', '--beta1=0.8', '--dropout=0.1']
    state = run_train('out', '--max_steps=5', '--init_from=resume', *given)
    groups = state['optimizer']['param_groups']
    assert [g['weight_decay'] for g in groups] == [0.3, 0.0]
    assert groups[0]['betas'] == (0.8, 0.95)


def test_a_run_keeps_the_precision_it_began_in(run_train, tmp_path, monkeypatch, capsys):
    """Where nobody names one, a clock decides, and another time it may decide otherwise."""
    monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: {'avx512_bf16': True}, raising=False)
    free = ['--dtype=None', '--max_steps=4']
    runs = {}
    for wide, narrow, name in ((2e-3, 1e-3, 'bfloat16'), (1e-3, 2e-3, 'float32')):
        monkeypatch.setattr(hardware, 'time_products', lambda: (wide, narrow))
        runs[name] = run_train(name, *free)
        assert (f'{name} (a product takes {wide * 1e3:.1f} ms in float32, {narrow * 1e3:.1f} in '
                'bfloat16) on 1 x cpu') in capsys.readouterr().out
        same_weights(runs[name], run_train(f'named {name}', '--max_steps=4', f'--dtype={name}'))
    with pytest.raises(AssertionError):
        same_weights(runs['bfloat16'], runs['float32'])

    monkeypatch.setattr(hardware, 'time_products', lambda: (2e-3, 1e-3))
    with stopped_at(2):
        run_train('halves', *free)
    monkeypatch.setattr(hardware, 'time_products', lambda: (1e-3, 2e-3))
    whole = run_train('halves', *free, '--init_from=resume')
    assert 'bfloat16 (as set, or as before)' in capsys.readouterr().out
    same_weights(whole, runs['bfloat16'])
    assert whole['settings']['dtype'] is None
    with open(tmp_path / 'halves' / 'settings.json') as f:
        assert json.load(f)['dtype'] is None    # on another machine another may be the quick one


# ---- Muon ----------------------------------------------------------------------------------------

MUON = ['--optimizer=muon', '--dropout=0.1']


def test_muon_moves_the_matrices_of_the_blocks_and_adamw_the_rest(make_trainer):
    """Three steps, beside PyTorch's two optimizers on a model of the same weights."""
    trainer, beside = make_trainer('--optimizer=muon'), make_trainer()
    s, other = trainer.settings, beside.model
    matrices = [w for w in other.h.parameters() if w.dim() == 2]
    tables = [other.wte.weight, other.lm_head.weight]
    vectors = [w for w in other.parameters() if w.dim() == 1]
    assert len(matrices) == 4 * other.config.n_layer
    assert len(matrices) + len(tables) + len(vectors) == len(list(other.parameters()))
    decays = [dict(params=tables, weight_decay=0.1), dict(params=vectors, weight_decay=0.0)]
    starts = [w.detach().clone() for w in other.parameters()]
    muon = torch.optim.Muon(matrices, adjust_lr_fn='match_rms_adamw', weight_decay=0.1)
    adamw = torch.optim.AdamW(decays, betas=(s.beta1, s.beta2))
    for step in range(3):
        for micro in range(beside.accumulation):
            x, y = beside.batch(micro)
            (other(x, y)[1] / beside.accumulation).backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), s.grad_clip)
        for group in (*muon.param_groups, *adamw.param_groups):
            group['lr'] = train.learning_rate(s, step)
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        beside.step += 1
        trainer.train_step()
    for start, moved, expected in zip(starts, trainer.model.parameters(), other.parameters()):
        # PyTorch's Muon computes in bf16; with another optimizer they lie 0.4 apart and more
        assert (moved - expected).std() < 0.2 * (expected - start).std()


@pytest.mark.parametrize('shape', [(8, 24), (24, 8), (8, 8)])
def test_muon_makes_singular_values_nearly_equal(shape):
    values = torch.logspace(-2, 0, 8)           # the largest is 100 times the smallest
    U, _, V = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    found = U.T @ equalized(U @ values.diag() @ V) @ V.T
    assert found.diag().min() > 0.68 and found.diag().max() < 1.21
    torch.testing.assert_close(found, found.diag().diag(), atol=1e-5, rtol=0)
    assert not equalized(torch.zeros(shape)).any()


def test_muon_in_bf16_is_pytorchs():
    start, gradient = torch.randn(2, 64, 192)
    by_torch, ours = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    muon = torch.optim.Muon([by_torch], lr=0.01, adjust_lr_fn='match_rms_adamw')
    both = MuonAndAdamW(dict(params=[ours], weight_decay=0.1),
                        [dict(params=[nn.Parameter(torch.zeros(1))], weight_decay=0.0)],
                        0.01, (0.9, 0.95), False, torch.bfloat16)
    for _ in range(3):
        by_torch.grad = ours.grad = gradient
        muon.step()
        both.step()
    assert torch.equal(ours, by_torch) and not torch.equal(ours, start)


def test_a_run_with_muon_resumes_exactly_and_with_nothing_else(run_train, tmp_path):
    straight = run_train('straight', *MUON)
    with stopped_at(2):
        run_train('out', *MUON)
    with pytest.raises(UserError, match=r"optimizer=adamw: .*those of muon; .*--init_from="):
        run_train('out', '--optimizer=adamw', '--init_from=resume')
    resumed = run_train('out', '--init_from=resume')    # it keeps what it began with
    same_weights(straight, resumed)
    same_optimizer(straight, resumed)
    assert json.loads((tmp_path / 'out' / 'settings.json').read_text())['optimizer'] == 'muon'
    moments = [held.keys() for held in resumed['optimizer']['state'].values()]
    matrices = [n for n, w in resumed['model'].items() if n.startswith('h.') and w.dim() == 2]
    assert sorted(map(len, moments)) == [1] * len(matrices) + [3] * (len(moments) - len(matrices))
    # weights of a run are free to go on in a new one
    assert run_train('new', '--init_from=' + str(tmp_path / 'out'))['step'] == resumed['step']


def test_a_run_from_before_there_was_a_choice_goes_on_with_adamw(run_train, tmp_path):
    with stopped_at(2):
        state = run_train('out')
    del state['settings']['optimizer']
    torch.save(state, tmp_path / 'other.pt')
    os.replace(tmp_path / 'other.pt', tmp_path / 'out' / 'ckpt.pt')   # what was loaded is mapped
    with pytest.raises(UserError, match='optimizer=muon: .*those of adamw'):
        run_train('out', '--optimizer=muon', '--init_from=resume')
    same_weights(run_train('straight'), run_train('out', '--init_from=resume'))


def test_a_misspelled_muon_and_a_shared_out_one_are_refused(run_train):
    with pytest.raises(UserError, match="optimizer='Muon' must be 'adamw' or 'muon'"):
        run_train('out', '--optimizer=Muon')
    with pytest.raises(UserError, match='shard_optimizer shares out AdamW'):
        run_train('out', '--optimizer=muon', '--shard_optimizer=True')


# ---- the step ------------------------------------------------------------------------------------

TRAFFIC = ['--data_dir=data/traffic', '--n_layer=1', '--block_size=128', '--batch_tokens=1024',
           '--max_steps=2', '--eval_tokens=256']


@pytest.fixture
def traffic(tmp_path, monkeypatch):
    """A made task in data/traffic; its windows have between a few targets and many."""
    monkeypatch.chdir(tmp_path)
    prepare_data.prepare(prepare_data.DataSettings(problems=200), ['traffic'])
    counts = (Windows('data/traffic', 'train', read_meta('data/traffic'), 128)
              .sample(0, 8, 1337, CPU)[1] >= 0).sum(1)
    assert len(set(counts.tolist())) > 1


@pytest.mark.parametrize('toggle', ['plain', 'mask', 'router_depth'])
def test_micro_batches_do_not_matter(run_train, traffic, tmp_path, toggle):
    """The loss is the mean over the step's targets; each window here has its own number of them."""
    whole, cut = [run_train(f'in{micro}', *TRAFFIC, *options(toggle), f'--micro_batch={micro}')
                  for micro in (8, 1)]
    same_weights(whole, cut, 2e-5)
    for a, b in zip(*(log_of(tmp_path / f'in{micro}') for micro in (8, 1)), strict=True):
        counted = {'loss', 'grad_norm', 'val_loss'} & a.keys()
        assert counted
        for key in counted:
            assert a[key] == pytest.approx(b[key], rel=1e-4)


def test_a_micro_batch_without_targets_counts_for_nothing(make_trainer):
    trainer = make_trainer()
    y = torch.tensor([[3, -1, 4], [-1, -1, -1], [-1, 5, -1]])
    divisors, n_targets = trainer.by_targets([(None, row) for row in y])
    assert divisors.tolist() == [1.5, math.inf, 3.0] and n_targets == 3
    divisors, n_targets = trainer.by_targets([(None, y[1])])
    assert divisors.tolist() == [math.inf] and n_targets == 0


def test_the_last_step_is_at_the_lowest_rate():
    for max_steps, warmup in ((2, 0.5), (3, 0.67), (3, 0.0), (50, 0.02), (50, 0.98)):
        s = Settings(max_steps=max_steps, warmup=warmup, learning_rate=1.0, min_lr_rate=0.1)
        rates = [train.learning_rate(s, step) for step in range(max_steps)]
        peak = max(1, round(warmup * max_steps))
        assert rates[peak - 1] == max(rates) == 1.0
        assert rates[-1] == pytest.approx(0.1), (max_steps, warmup)


@pytest.mark.parametrize('dtype', ['float32', 'float16'])
def test_gradients_are_clipped_to_the_norm_asked_for(make_trainer, dtype):
    trainer = make_trainer(f'--dtype={dtype}', '--grad_clip=0.01')
    trainer.optimizer.zero_grad = lambda set_to_none: None  # they stay to be looked at
    _, before = trainer.train_step()
    after = torch.stack([p.grad.norm() for p in trainer.model.parameters()]).norm()
    assert 0.01 < before < 100  # fp16's scale, 65536, is out of them
    assert after.item() == pytest.approx(0.01, rel=1e-3)


def test_steps_and_ranks_have_dropout_of_their_own(make_trainer, monkeypatch):
    trainer, seeds = make_trainer(), []
    monkeypatch.setattr(torch, 'manual_seed', seeds.append)
    monkeypatch.setattr(dist, 'all_reduce', lambda x: None)
    trainer.accumulation = 1
    for trainer.settings.seed in (1, 2):
        for rank in (0, 1):
            trainer.ranks = Ranks(rank, 2)
            trainer.step = 0
            for _ in range(3):
                trainer.train_step()
    assert len(set(seeds)) == 12


def test_a_seed_rules_weights_and_data(make_trainer):
    """And dropout, above: else three seeds would be one run."""
    one, other = make_trainer(), make_trainer('--seed=1')
    assert not torch.equal(one.model.wte.weight, other.model.wte.weight)
    assert not torch.equal(one.batch(0)[0], other.batch(0)[0])


def test_decay_on_matrices_only(make_trainer):
    matrices, vectors = make_trainer().optimizer.param_groups
    assert matrices['weight_decay'] == 0.1 and vectors['weight_decay'] == 0.0
    assert {p.dim() for p in matrices['params']} == {2}
    assert {p.dim() for p in vectors['params']} == {1}


def test_backward_is_not_in_autocast(make_trainer, monkeypatch):
    """Else gates and routers, in fp32 on purpose, would have gradients in 16 bits."""
    trainer, backward = make_trainer('--dtype=bfloat16'), torch.Tensor.backward
    within = []

    def watched(loss):
        within.append(torch.is_autocast_enabled('cpu'))
        return backward(loss)

    monkeypatch.setattr(torch.Tensor, 'backward', watched)
    trainer.train_step()
    assert within == [False] * trainer.accumulation


def test_steps_that_are_not_finite_are_skipped_and_end_a_run(run_train, monkeypatch, tmp_path,
                                                             capsys):
    good = run_train('out', '--max_steps=4')
    loss, calls = GPT.loss, []

    def spoil(when):
        def spoiled(self, h, y):
            calls.append(1)
            return loss(self, h, y) * (math.nan if when(len(calls)) else 1)
        calls.clear()
        monkeypatch.setattr(GPT, 'loss', spoiled)

    spoil(lambda n: n in (5, 9))    # steps 3 and 5
    state = run_train('some')
    assert all(p.isfinite().all() for p in state['model'].values())
    assert all(math.isfinite(r['loss']) for r in log_of(tmp_path / 'some') if 'loss' in r)
    assert capsys.readouterr().out.count('step skipped (1 in a row)') == 2

    spoil(lambda n: True)
    monkeypatch.setattr(train, 'BAD_STEPS', 5)
    with pytest.raises(UserError, match='5 steps in a row.*learning_rate'):
        run_train('out', '--init_from=resume', '--save_interval=6')
    same_weights(good, load_checkpoint(str(tmp_path / 'out')))


@pytest.mark.parametrize('dtype, scale', [('float32', 1), ('float16', 2 ** 15)])
def test_a_gradient_alone_that_is_not_finite_is_skipped_too(make_trainer, dtype, scale):
    """Clipped, it would be NaN in the weights. fp16's scale is halved."""
    trainer = make_trainer(f'--dtype={dtype}')
    trainer.model.ln_f.weight.register_hook(lambda grad: grad * math.inf)
    before = [p.clone() for p in trainer.model.parameters()]
    loss, norm = trainer.train_step()
    assert math.isfinite(loss) and not math.isfinite(norm)
    assert all(map(torch.equal, before, trainer.model.parameters()))
    assert trainer.scaler.get_scale() == scale


def begun(monkeypatch):
    """A list of what training steps tell the mechanism, and draw: (step, steps, seed, drawn)."""
    calls, begin_step = [], Mechanism.begin_step

    def watched(self, step, steps, seed=0):
        begin_step(self, step, steps, seed)
        if steps > 1:       # not where FLOPs are counted
            calls.append((step, steps, seed, self.drawn))

    monkeypatch.setattr(Mechanism, 'begin_step', watched)
    return calls


def test_a_mechanism_is_told_of_each_step_and_a_resumed_run_draws_the_same(run_train, monkeypatch):
    """Whether a step takes R sweeps of latent thoughts or R - 1 is drawn by (seed, step)."""
    calls = begun(monkeypatch)
    few = ['--ponder=latent', '--ponder_steps=1', '--batch_tokens=128', '--eval_tokens=64']
    run_train('straight', *few, '--seed=5')
    straight = list(calls)
    assert [call[:3] for call in straight] == [(step, 10, 5) for step in range(10)]
    assert {drawn for *_, drawn in straight} == {3, 2}

    calls.clear()
    with stopped_at(4):
        run_train('halves', *few, '--seed=5')
    run_train('halves', *few, '--seed=5', '--init_from=resume')
    assert calls == straight
    calls.clear()
    run_train('other', *few, '--seed=6')
    assert [drawn for *_, drawn in calls] != [drawn for *_, drawn in straight]


def test_all_ranks_draw_the_same(make_trainer, monkeypatch):
    calls = begun(monkeypatch)
    monkeypatch.setattr(dist, 'all_reduce', lambda x: None)
    trainer = make_trainer('--ponder=feedback', '--ponder_steps=3')
    trainer.accumulation = 1
    for rank in (0, 1):
        trainer.ranks = Ranks(rank, 2)
        trainer.step = 0
        for _ in range(6):
            trainer.train_step()
    assert calls[:6] == calls[6:]
    assert {drawn for *_, drawn in calls} == {3, 2}


def slots_of_blocks(monkeypatch):
    """A list of how many slots go through a block, of each call in training."""
    slots, forward = [], Block.forward

    def watched(self, x, *args):
        if self.training:
            slots.append(x.size(1))
        return forward(self, x, *args)

    monkeypatch.setattr(Block, 'forward', watched)
    return slots


OF_ROUTER, _ = read([os.path.join(ROOT, 'config', 'halting_router.py')], '', Settings, GPTConfig)
# a token of the small models gets further after one pass with about 1/2, after two with 1/4
ROUTER = [f'--{name}={value}' for name, value in OF_ROUTER.items() if name != 'out_dir']
ROUTER += ['--halt_tau=0.25', '--init_std=0.3', '--max_steps=4']


@pytest.mark.parametrize('depth', slow_but(['False'], ['False', 'True']))
def test_a_router_skips_stopped_tokens_and_learns_the_same(run_train, tmp_path, monkeypatch, depth):
    router = [*ROUTER, f'--depth_attn={depth}']
    slots = slots_of_blocks(monkeypatch)
    skipping = run_train('skipping', *router)
    assert set(slots) - {32} and max(slots) == 32
    slots.clear()
    monkeypatch.setattr('engine.prepare.skip_stopped_tokens', lambda model: None)
    plain = run_train('plain', *router)
    assert set(slots) == {32}
    same_weights(skipping, plain, 2e-5)
    for a, b in zip(log_of(tmp_path / 'skipping'), log_of(tmp_path / 'plain'), strict=True):
        compared = {'loss', 'grad_norm', 'val_loss', 'val_passes', 'passes'} & a.keys()
        for key in compared:
            assert a[key] == pytest.approx(b[key], rel=1e-4)
    assert 1 < sum(log_of(tmp_path / 'skipping')[0]['passes']) < 4


def test_a_router_that_skips_resumes_exactly(run_train, monkeypatch):
    router = [*ROUTER, '--dropout=0.1']
    slots = slots_of_blocks(monkeypatch)
    straight = run_train('straight', *router)
    assert set(slots) - {32}
    with stopped_at(2):
        run_train('halves', *router)
    resumed = run_train('halves', *router, '--init_from=resume')
    same_weights(straight, resumed)
    same_optimizer(straight, resumed)


def test_failures_of_the_machine_say_what_to_do(run_train, monkeypatch):
    with pytest.raises(RuntimeError) as cpu:
        torch.empty(2 ** 60, dtype=torch.uint8)
    gpu = torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 MiB')
    no_compiler = RuntimeError('InvalidCxxCompiler: No working C++ compiler found')
    memory = '^out of memory: .*micro_batch.*checkpoint_activations.*shard_optimizer.*block_size'
    for error, advice in ((cpu.value, memory), (gpu, memory), (no_compiler, '--compile=False')):
        def fails(*args, error=error):
            raise error
        monkeypatch.setattr(GPT, 'loss', fails)
        with pytest.raises(UserError, match=advice):
            run_train('out')


def test_compiled_blocks_train_the_same_and_are_not_for_a_sample(run_train, compiler):
    """
    A sample has lengths of its own: compiled code would be made for each of them.
    """
    plain = run_train('plain', '--max_steps=2')
    compiled = run_train('compiled', '--max_steps=2', '--compile=True',
                         '--sample_tokens=12')
    same_weights(plain, compiled, 1e-6)
    assert 0 < compiler.graphs <= 4, "two to train, two to evaluate"


# ---- what is logged ------------------------------------------------------------------------------

def test_learns_and_logs(run_train, small_data, tmp_path, capsys):
    run_train('out', '--max_steps=40', '--log_interval=20')
    records = log_of(tmp_path / 'out')
    losses = [r['loss'] for r in records if 'loss' in r]
    assert [r['step'] for r in records] == [1, 20, 40, 40]
    assert losses[0] > 5
    assert losses[-1] < 0.6 * losses[0]
    assert records[-1]['val_loss'] < 0.6 * losses[0]
    assert records[-1]['tokens'] == 40 * 256
    assert records[1]['flops'] == 20 * 256 * flops_per_token(
        GPT(GPTConfig(**load_checkpoint(str(tmp_path / 'out'))['config'])))

    text, val = capsys.readouterr().out, read_meta(small_data)['val']
    times = 40 * 256 / read_meta(small_data)['train']['tokens']
    assert f'all 40 steps read {small_data} (test) {times:.1f} times' in text
    per_byte = records[-1]['val_nats_per_byte']
    assert per_byte == pytest.approx(records[-1]['val_loss'] * val['tokens'] / val['bytes'])
    assert f"({per_byte / math.log(2):.3f} bits) per byte" in text


def test_time_of_a_step_is_without_that_of_saving_and_evaluating(run_train, tmp_path, monkeypatch,
                                                                 capsys):
    """By a clock that a step moves by half a second, saving and evaluating by 100."""
    clock = [0.0]

    def timed(name, seconds):
        function = getattr(Trainer, name)

        def takes(self):
            clock[0] += seconds
            return function(self)
        monkeypatch.setattr(Trainer, name, takes)

    monkeypatch.setattr(time, 'perf_counter', lambda: clock[0])
    timed('train_step', 0.5)
    timed('evaluate', 100)
    timed('save', 100)
    run_train('out', '--log_interval=4', '--eval_interval=2', '--save_interval=3', '--warmup=0.4')

    records = [r for r in log_of(tmp_path / 'out') if 'ms' in r]
    assert [r['step'] for r in records] == [1, 3, 4, 6, 8, 9, 10]   # also of what was saved
    for r in records:
        assert r['ms'] == pytest.approx(500)
        assert r['tokens_per_second'] == pytest.approx(512)
    on_the_way = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * n / 5)) for n in (1, 3, 4)]
    rates = [1e-2 * share for share in (1 / 4, 3 / 4, 1, *on_the_way, 0.1)]
    assert [r['lr'] for r in records] == pytest.approx(rates)
    out = capsys.readouterr().out
    assert '0:00:03 left' in out and '0:00:01 left' in out  # 6 steps, 2 steps


def test_no_run_is_silent_for_long(run_train, monkeypatch, capsys):
    monkeypatch.setattr('engine.log.SILENCE', -1.0)
    run_train('out', '--log_interval=100', '--max_steps=3')
    out = capsys.readouterr().out
    for words in ('step     2/3', 'step 2: micro-batch 1 of 2', 'evaluation: 4 of 16 windows'):
        assert words in out
    assert 'micro-batch 2 of 2' not in out, "it would take the place of the step's own line"


def test_passes_of_all_micro_batches_are_logged(run_train, make_trainer, tmp_path, capsys):
    trainer = make_trainer('--ponder=chain', '--halting=router')
    trainer.train_step()
    assert len(trainer.log.passes) == trainer.accumulation == 2
    trainer.log.passes = []
    for passes in (2, 1):
        trainer.log.add_passes(torch.tensor([[passes, passes]]))
    assert trainer.log.shares() == [1, 0.5, 0, 0]

    run_train('out', *options('router'), '--log_interval=5')
    *steps, evaluation = log_of(tmp_path / 'out')
    for record in steps:
        assert len(record['passes']) == 3
        assert record['passes'] == sorted(record['passes'], reverse=True)
    assert 1 < evaluation['val_passes'] < 3
    assert f"{sum(steps[0]['passes']):.2f} passes (1.00" in capsys.readouterr().out


def test_mfu_is_a_share_of_the_gpus_peak(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'NVIDIA H100 80GB HBM3')
    log = Log(Settings(), make(), Stop(Ranks(0, 8), CPU))
    assert log.mfu(1e6) is None
    log.device = torch.device('cuda')
    log.flops = 1e5
    assert log.mfu(1e6) == 1e6 * 1e5 / (989e12 * 8)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'NVIDIA H100 PCIe')
    assert log.mfu(1e6) == 1e6 * 1e5 / (756e12 * 8)
    log.model = make(**TOGGLES['router'])
    assert log.mfu(1e6) is None     # its tokens stop in training


@pytest.mark.parametrize('gpu, peak', [
    ('NVIDIA H200', 989e12), ('NVIDIA H200 NVL', 835e12), ('NVIDIA A100-SXM4-80GB', 312e12),
    ('NVIDIA A100 80GB PCIe', 312e12), ('NVIDIA L40S', 362e12),
    ('NVIDIA GeForce RTX 4090', 165e12), ('NVIDIA GeForce RTX 4090 D', None),
    ('NVIDIA GeForce RTX 4090 Laptop GPU', None), ('NVIDIA GeForce RTX 3090 Ti', None),
    ('NVIDIA RTX A1000', None), ('NVIDIA A100-SXM4-40GB MIG 1g.5gb', None), ('Tesla T4', None),
])
def test_no_peak_of_another_card(gpu, peak):
    assert hardware.peak_flops(gpu) == peak


def test_right_answers_are_a_share_and_their_characters_bytes(monkeypatch):
    outcomes = [SimpleNamespace(right=i < 30) for i in range(40)]
    monkeypatch.setattr('engine.log.answer_problems', lambda *args: outcomes)
    log, said = Log(Settings(), make(), Stop(ALONE, CPU)), {}
    monkeypatch.setattr(log, 'say', lambda text, **record: said.update(record, text=text))
    log.evaluation(7, 0.5, None, {}, dict(eot=256), contextlib.nullcontext)
    assert '30 of 40 answers right' in said['text'] and said['val_right'] == 0.75
    assert said['val_loss'] == said['val_nats_per_byte'] == 0.5


# ---- evaluation ----------------------------------------------------------------------------------

def test_recomputed_blocks_learn_the_same(run_train, monkeypatch):
    calls, forward = [], MLP.forward
    monkeypatch.setattr(MLP, 'forward', lambda mlp, x: calls.append(1) or forward(mlp, x))
    few = ['--max_steps=2', '--dropout=0.1', '--eval_tokens=32']
    kept = run_train('kept', *few)
    once = len(calls)
    again = run_train('again', *few, '--checkpoint_activations=True')
    same_weights(kept, again)
    assert len(calls) - once > once


def test_after_an_evaluation_training_goes_on_as_before(run_train, capsys):
    once = run_train('a', '--dropout=0.4', '--init_std=0.5')
    more = run_train('b', '--dropout=0.4', '--init_std=0.5', '--eval_interval=5',
                     '--sample_tokens=2')
    same_weights(once, more)
    assert 'warning' not in capsys.readouterr().err, "a sample is drawn without dropout"


def test_evaluation_is_the_mean_over_windows_from_all_over_the_set(run_train, small_data, tmp_path,
                                                                   capsys):
    """Of another folder, with its own settings; the step is its checkpoint's."""
    state = run_train('out')
    left = files_in(tmp_path / 'out')
    capsys.readouterr()
    train.main([f'--init_from={tmp_path / "out"}', '--eval_only=True', '--batch_tokens=7'])
    assert files_in(tmp_path / 'out') == left
    told = capsys.readouterr().out
    assert told.startswith('evaluation in float32 (as set')
    assert f'{tmp_path / "out"} on {small_data}, step 10: validation loss' in told
    printed = float(told.split('validation loss ')[1].split()[0])

    model = GPT(GPTConfig(**state['config'])).eval()
    model.load_state_dict(state['model'])
    data = Windows(small_data, 'val', read_meta(small_data), 32)
    n = 512 // 32
    assert data.n > 2 * n
    losses = [model(*data.get([i * data.n // n], CPU))[1].item() for i in range(n)]
    assert printed == pytest.approx(sum(losses) / n, abs=1e-4)


def test_evaluation_needs_no_training_data_and_no_time_limit_ends_it(run_train, small_data,
                                                                     tmp_path, capsys):
    run_train('out', '--max_steps=1')
    held_out = tmp_path / 'held_out'
    held_out.mkdir()
    for name in os.listdir(small_data):
        if not name.startswith('train_'):
            shutil.copy(os.path.join(small_data, name), held_out)
    train.main([f'--init_from={tmp_path / "out"}', '--eval_only=True', f'--data_dir={held_out}',
                '--max_steps=9', '--max_seconds=1e-9'])
    assert 'validation loss' in capsys.readouterr().out


@pytest.mark.parametrize('name, setting, words', [
    ('gate', 'ponder_steps=0', '1.000 passes'),
    ('gate', 'ponder_steps=3', 'another number'),
    ('router', 'ponder_steps=3', '4.000 passes'),
    ('router', 'halt_tau=1.0', '1.000 passes'),
    ('mask', 'ponder_steps=3', 'another number'),
    ('smear', 'ponder_steps=1', "ponder='smear', and so one pass"),
])
def test_passes_can_change_at_evaluation(run_train, tmp_path, capsys, name, setting, words):
    more = ['--halt_tau=0'] if setting == 'ponder_steps=3' else []      # all take all passes
    run_train('out', *options(name), *more, '--max_steps=1', '--eval_tokens=64')
    left = files_in(tmp_path / 'out')
    capsys.readouterr()
    told = ''
    try:
        train.main([f'--out_dir={tmp_path / "out"}', '--init_from=resume', '--eval_only=True',
                    f'--{setting}'])
    except UserError as error:
        told = str(error)
    assert words in told + capsys.readouterr().out
    assert files_in(tmp_path / 'out') == left


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_signal_cuts_an_evaluation_short(make_trainer, capsys):
    trainer, batches = make_trainer(), []

    def signalled(text):
        batches.append(text)
        trainer.stop.since = 1.0

    trainer.log.alive = signalled
    trainer.evaluate()
    assert batches == ['evaluation: 4 of 16 windows']
    assert 'validation loss' not in capsys.readouterr().out


# ---- the size, and where weights come from -------------------------------------------------------

TASK = ['config/tasks.py', '--max_steps=1', '--eval_tokens=512', '--device=cpu',
        '--dtype=float32']


SMALL = "a small model, by default; for 362M parameters add config/size/360m.py"


def test_a_mechanisms_file_alone_is_small_on_every_machine(small_data, tmp_path, monkeypatch,
                                                           capsys):
    """And the first line names the paper's size, where nobody chose one."""
    monkeypatch.chdir(ROOT)

    def run(name, *args):
        train.main(['config/chain.py', f'--data_dir={small_data}', f'--out_dir={tmp_path / name}',
                    '--batch_tokens=512', '--eval_tokens=512', '--sample_tokens=0', '--device=cpu',
                    *args])
        with open(tmp_path / name / 'settings.json') as f:
            return json.load(f), capsys.readouterr().out.splitlines()

    settings, told = run('out', '--max_steps=1')
    assert told[0] == SMALL
    assert settings['n_layer'] == 6 and settings['n_embd'] == 192
    assert settings['learning_rate'] == 3e-3
    assert settings['ponder'] == 'chain'
    assert settings['max_steps'] == 1           # what stands on the command line counts

    # the same command goes on with the same settings
    resumed, told = run('out', '--max_steps=2', '--init_from=resume')
    assert resumed == {**settings, 'max_steps': 2}
    assert SMALL not in told

    # from other weights the shape is theirs, and the rest is by default
    small = ['--n_layer=1', '--n_head=2', '--n_embd=32', '--block_size=64', '--max_steps=1']
    assert SMALL not in run('small', *small)[1]
    tuned, told = run('tuned', '--max_steps=1', f'--init_from={tmp_path / "small"}')
    assert SMALL not in told
    assert tuned['n_embd'] == 32 and tuned['block_size'] == 64
    assert tuned['save_interval'] == 600


def test_on_a_made_task_right_answers_are_counted(tmp_path, monkeypatch, capsys):
    """And the built-in data is made when it is missing."""
    files = [os.path.join(ROOT, TASK[0]), *TASK[1:]]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(prepare_data.BUILTIN, 'data/addition', ['addition', '--problems=2000'])
    train.main([*files, '--out_dir=out'])
    told = capsys.readouterr().out
    assert 'preparing addition' in told
    assert '0 of 100 answers right' in told
    assert len(re.findall(r'\n\d{4}\+\d{4}=.*wrong: \d{5}', told)) >= 8
    assert log_of(tmp_path / 'out')[-1]['val_right'] == 0


def test_what_does_not_count_is_said(tmp_path, monkeypatch, capsys):
    """Of a window as long as a problem nothing counts; of one that is longer, sometimes."""
    monkeypatch.chdir(tmp_path)
    prepare_data.main(['addition', '--problems=200'])
    checked = []
    monkeypatch.setattr('engine.log.check_pieces', checked.append)
    run = [*SHAPE, '--data_dir=data/addition', '--micro_batch=1', '--sample_tokens=0',
           '--device=cpu', '--dtype=float32']
    with pytest.raises(UserError, match='raise block_size'):
        train.main([*run, '--block_size=16', '--batch_tokens=16', '--max_steps=1', '--out_dir=a'])
    capsys.readouterr()
    train.main([*run, '--block_size=18', '--batch_tokens=18', '--max_steps=30', '--out_dir=b',
                '--log_interval=1'])
    told = capsys.readouterr().out
    assert len(checked) == 1, "a run is told once if model.py cannot generate"
    assert 'read data/addition (addition --size=4 --problems=200 --seed=1337)' in told
    assert re.search(r'\n\d+% of what the answers hold counts', told)
    skipped = set(re.findall(r'\nstep (\d+): no answer in its windows counts; step skipped', told))
    assert 3 < len(skipped) < 30
    losses = {str(record['step']): record['loss'] for record in log_of(tmp_path / 'b')
              if 'loss' in record}
    assert {step for step, loss in losses.items() if loss is None} == skipped
    assert min(loss for loss in losses.values() if loss is not None) > 0.1
    with pytest.raises(UserError, match='no answer in the windows evaluated counts'):
        train.main([*run, '--block_size=17', '--batch_tokens=17', '--max_steps=1', '--out_dir=c',
                    '--eval_tokens=17'])


NO_LEARNING = ['--max_steps=1', '--learning_rate=1e-9', '--weight_decay=0.0']


@pytest.mark.parametrize('mechanism, own', [
    (['--depth_attn=True', '--ponder=loop', '--ponder_steps=1'], set()),
    (['--ponder=embedding', '--halting=gate', '--ponder_steps=2'], {'mechanism'}),
])
def test_a_new_run_may_add_a_mechanism_or_change_the_context(run_train, tmp_path, mechanism, own,
                                                              capsys):
    first = run_train('first')
    start = [f'--init_from={tmp_path / "first"}', *NO_LEARNING, '--block_size=16']
    second = run_train('second', *start, *mechanism, shape=[])
    for key, p in first['model'].items():
        assert (second['model'][key] - p).abs().max() <= 1e-7, key
    new = second['model'].keys() - first['model'].keys()
    assert {key.split('.')[0] for key in new} == own
    assert second['step'] == 1
    assert second['config']['block_size'] == 16
    assert second['config']['embed_scale'] == first['config']['embed_scale'] == 1
    told = capsys.readouterr().out
    assert f'weights of {tmp_path / "first"}{", and new mechanism.gates" if own else ""}\n' in told
    if own:     # and may leave it behind
        start = [f'--init_from={tmp_path / "second"}', *NO_LEARNING]
        third = run_train('third', *start, '--halting=none', shape=[])
        assert third['model'].keys() == first['model'].keys()
        assert f'weights of {tmp_path / "second"}, without mechanism.gates\n' in (
            capsys.readouterr().out)
        with pytest.raises(UserError, match='do not fit'):      # a gate less is no other rule
            run_train('fourth', *start, '--ponder_steps=1', shape=[])


def test_where_the_mechanism_trains_alone_all_else_stays(run_train, tmp_path, capsys):
    """Ouro's two stages: a gate after the model, on the model's own losses."""
    loop = ['--ponder=loop', '--halting=exit', '--ponder_steps=2']
    first = run_train('first', *loop, '--exit_loss=uniform')
    second = run_train('second', f'--init_from={tmp_path / "first"}', '--halting=ouro',
                       '--ouro_stage=2', shape=[])
    assert 'only 33 parameters are trained' in capsys.readouterr().out
    own = {name for name in second['model'] if name.startswith('mechanism.')}
    assert own == second['model'].keys() - first['model'].keys() != set()
    same_weights(first, {'model': {name: second['model'][name] for name in first['model']}})
    third = run_train('second', '--init_from=resume', '--max_steps=12')
    for name in own:
        assert not torch.equal(second['model'][name], third['model'][name])
    same_weights(first, {'model': {name: third['model'][name] for name in first['model']}})


def test_none_is_the_default_again_in_a_new_run(run_train, tmp_path):
    run_train('first', '--depth_attn=True', '--depth_stride=2')
    start = f'--init_from={tmp_path / "first"}'
    for args, stride in (([], 2), (['--depth_stride=None'], 1)):
        second = run_train(f'second{stride}', start, '--max_steps=1', *args, shape=[])
        assert second['config']['depth_stride'] == stride


def test_another_rule_has_its_own_defaults(run_train, tmp_path, capsys):
    run_train('first', '--ponder=loop', '--halting=exit', '--halt_tau=0.3')
    start = [f'--init_from={tmp_path / "first"}', *NO_LEARNING]
    router = ['--ponder=chain', '--halting=router']
    second = run_train('second', *start, *router, shape=[])
    assert [second['config'][name] for name in ('halt_lambda', 'halt_start', 'halt_tau')] == [
        0.4, 0.0, 1e-4]
    assert 'warning' not in capsys.readouterr().err

    kept = [str(tmp_path / 'first' / 'settings.json'), *start, *router]
    third = run_train('third', *kept, f'--out_dir={tmp_path / "third"}', shape=[])
    assert third['config']['halt_lambda'] == 0.1
    advice = '--halt_full=0.0 --halt_lambda=0.4 --halt_start=0.0 --halt_tau=0.0001'
    assert ('halt_full=0.7, halt_lambda=0.1, halt_start=0.5, halt_tau=0.3: as in '
            f'{kept[0]}; for those of this model add {advice}\n') in capsys.readouterr().err
    fourth = run_train('fourth', *kept, *advice.split(), f'--out_dir={tmp_path / "fourth"}',
                       shape=[])
    assert fourth['config'] == second['config']
    assert 'as in' not in capsys.readouterr().err


def test_the_numbers_of_another_mechanism_or_width_are_told(run_train, tmp_path, capsys):
    """As those of a settings.json that another model is made from."""
    run_train('plain')
    file = str(tmp_path / 'plain' / 'settings.json')
    for changed, told in ((['--ponder=loop'], ['embed_scale=1.0']),
                          (['--n_embd=64', '--n_head=4'], ['init_std=']), ([], [])):
        run_train('a', file, *changed, '--max_steps=1', f'--out_dir={tmp_path / "a"}', shape=[])
        shutil.rmtree(tmp_path / 'a')
        err = capsys.readouterr().err
        assert ('as in ' + file in err) == bool(told) and all(words in err for words in told)


def test_none_is_the_default_again_in_a_run_that_goes_on(run_train, capsys):
    run_train('out', '--ponder=loop', '--halting=exit', '--halt_lambda=0.7')
    went_on = run_train('out', '--init_from=resume', '--max_steps=11', '--halt_lambda=None',
                        shape=[])
    assert went_on['config']['halt_lambda'] == 0.1
    assert 'halt_lambda=0.1 (was 0.7)' in capsys.readouterr().out


def test_settings_of_a_mechanism_that_is_off_are_named(run_train, capsys):
    """Else what was never on would look like a mechanism that does nothing."""
    asked = dict(depth_stride=1, halt_tau=0.5, halt_share=0.2, exit_loss='last', ponder_steps=2,
                 jacobi_iters=2)
    for on, idle in ((dict(), {*asked}),
                     (dict(ponder='loop'), {*asked} - {'ponder_steps'}),
                     (dict(ponder='latent', halting='mask', depth_attn=True),
                      {'halt_share', 'exit_loss'})):
        assert {*idle_settings(make(**asked, **on), asked)} == idle
    no_steps = dict(ponder='loop', ponder_steps=0, halting='exit', halt_tau=0.5)
    assert idle_settings(make(**no_steps), no_steps) == ['halt_tau']
    one_layer = dict(depth_attn=True, n_layer=1)
    assert idle_settings(make(**one_layer), one_layer) == ['depth_attn']
    assert not idle_settings(make(**one_layer, ponder='loop'), one_layer)
    once = dict(**one_layer, ponder='loop', ponder_steps=0)
    assert idle_settings(make(**once), one_layer) == ['depth_attn']
    run_train('plain', '--max_steps=1', '--depth_stride=1')
    assert 'warning: depth_stride: without effect' in capsys.readouterr().err


# ---- what is refused -----------------------------------------------------------------------------

@pytest.mark.parametrize('args, words', [
    (['--batch_tokens=1000'], ['batch_tokens=1000', 'micro_batch']),
    (['--eval_only=True'], ['eval_only', '--init_from']),
    (['--data_dir=elsewhere'], ['elsewhere', 'prepare_data.py']),
    (['--n_tokens=300', '--vocab_size=320'],
     ['n_tokens=300', 'add --n_tokens=257 --vocab_size=320']),
    (['--device=quantum'], ['device=quantum', 'choose cpu, cuda or mps']),
    (['--max_steps=0'], ['max_steps=0']),
    (['--max_iters=9'], ["nanoGPT calls so is 'max_steps'"]),
    (['--batch_size=9'], ["nanoGPT calls so is 'micro_batch'"]),
    (['stray'], ['stray']),
    (['--block_size=100000', '--batch_tokens=400000'], ['block_size']),
    (['--n_layer=300', '--n_embd=16384', '--n_head=128'], ['GB of memory', 'config/size/tiny.py']),
])
def test_refusals(run_train, args, words):
    with pytest.raises(UserError) as error:
        run_train('out', *args)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize('cuda, mps, cpu, want', [
    ((9, 0), False, {}, ('cuda:1', torch.bfloat16, True)),
    ((7, 5), True, {}, ('cuda:1', torch.float16, True)),
    (None, True, {}, ('mps', torch.float32, False)),
    (None, False, {'amx_bf16': True}, ('cpu', torch.bfloat16, False)),
])
def test_device_and_precision_are_the_best_there_are(monkeypatch, cuda, mps, cpu, want):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: cuda is not None)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: cuda)
    monkeypatch.setattr(torch.cuda, 'set_device', lambda device: None)
    monkeypatch.setattr(hardware.importlib.util, 'find_spec', lambda name: name)    # triton
    monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: mps)
    monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: cpu, raising=False)
    monkeypatch.setattr(torch, 'empty', lambda *size, device: None)  # there is no such device here
    device = hardware.pick_device(None, local_rank=1)
    dtype, _ = hardware.pick_dtype(None, device)
    assert (str(device), dtype, hardware.pick_compile(None, device)) == want
    in_tf32 = 'TF32' in hardware.pick_dtype('float32', device)[1]
    assert in_tf32 == (device.type == 'cuda' and dtype == torch.bfloat16)


@pytest.mark.parametrize('can, wide, narrow, want', [
    ({'amx_bf16': True, 'avx512_bf16': True}, 1, 2, torch.bfloat16),
    ({'avx512_bf16': True}, 1.1, 0.5, torch.bfloat16),
    ({'avx512_bf16': True}, 260, 145, torch.bfloat16),
    ({'avx512_bf16': True}, 145, 260, torch.float32),
    ({'avx512_bf16': True}, 1.0, 0.95, torch.float32),      # too close: noise would decide
    ({}, 2, 1, torch.float32),
])
def test_on_a_cpu_the_quicker_precision_is_taken(monkeypatch, can, wide, narrow, want):
    monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: can, raising=False)
    monkeypatch.setattr(hardware, 'time_products', lambda: (wide, narrow))
    assert hardware.pick_dtype(None, CPU)[0] == want
    assert hardware.pick_dtype('bfloat16', CPU)[0] == torch.bfloat16
    assert hardware.pick_dtype('float32', CPU)[0] == torch.float32


def test_products_are_timed_once_and_soon_done():
    assert hardware.time_products() is hardware.time_products()
    assert all(0 < seconds < 1 for seconds in hardware.time_products())


def test_attention_that_reads_ahead_is_refused(make_trainer, monkeypatch):
    """As on MPS in 16 bits. The CPU plays it: one key too many in every row."""
    right = torch.nn.functional.scaled_dot_product_attention
    mps = torch.device('mps')

    def reads_ahead(q, k, v, is_causal):
        seen = torch.ones(64, 64, dtype=torch.bool).tril(int(q.dtype == torch.bfloat16))
        return right(q, k, v, seen)

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert hardware.attention_is_right(CPU, dtype)
    monkeypatch.setattr(hardware.F, 'scaled_dot_product_attention', reads_ahead)
    assert hardware.attention_is_right(CPU, torch.float32)
    assert not hardware.attention_is_right(CPU, torch.bfloat16)

    monkeypatch.setattr(hardware, 'attention_is_right', lambda device, dtype: False)
    monkeypatch.setattr('engine.trained.pick_device', lambda name: mps)
    for start in (lambda: make_trainer('--dtype=bfloat16', device=mps),
                  lambda: load_model('nowhere', 'mps', 'bfloat16')):
        with pytest.raises(UserError, match='device=mps.* in torch.bfloat16; add --dtype=float32'):
            start()
    with pytest.raises(UserError, match='add --device=cpu'):
        hardware.check_causal(mps, torch.float32)
    hardware.check_causal(torch.device('cuda'), torch.bfloat16)     # asks nothing of a GPU


@pytest.mark.parametrize('toggle, off', [
    ('plain', False),
    ('loop', False),
    ('latent', False),
    ('mask', False),
    ('ouro', False),
    ('chain', True),
    ('router', True),
])
def test_cudnn_is_not_asked_for_attention_with_a_mask_tensor(toggle, off, monkeypatch):
    """Its gradients may be NaN. Whether a mask is a tensor is read off the calls themselves."""
    model, masks = make(**TOGGLES[toggle]).float().train(), []
    prepare(model, Settings(device='cpu'), CPU)
    assert torch.backends.cuda.cudnn_sdp_enabled() == (not off)
    attention = Attention.kernel

    def watched(q, k, v, attn_mask=None, *args, **kw):
        masks.append(attn_mask)
        return attention(q, k, v, attn_mask, *args, **kw)

    monkeypatch.setattr(Attention, 'kernel', staticmethod(watched))
    model.mechanism.begin_step(0, 1)
    model(torch.arange(20).view(2, 10), torch.arange(20).view(2, 10))
    assert masks
    assert any(mask is not None for mask in masks) == off


# ---- several ranks -------------------------------------------------------------------------------

if sys.platform != 'win32':
    from ranks import finish, launch, wait_for

TWO_RANKS = {name: options(name) for name in MOST}
TWO_RANKS['trains alone'] = ['--ponder=loop', '--halting=ouro', '--ouro_stage=2']
TWO_RANKS['config/halting_router.py'] = ROUTER
TWO_RANKS['muon'] = ['--optimizer=muon']


@pytest.fixture
def start(small_data, tmp_path):
    """
    Start the small model in processes of their own; what they print goes to tmp_path/name.log0,
    .log1, ...
    """
    running = []

    def start(name, *args, world=1):
        folders = [f'--data_dir={small_data}', f'--out_dir={tmp_path / name}']
        processes = launch([*SHAPE, *QUICK, *folders, *args], str(tmp_path / f'{name}.log'), world)
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


@posix
@pytest.mark.parametrize('name', slow_but(
    ('depth', 'gate', 'trains alone', 'config/halting_router.py', 'muon'), TWO_RANKS))
def test_two_ranks_equal_one(run_train, train_to_the_end, tmp_path, name):
    few = [*TWO_RANKS[name], '--max_steps=4']
    one = run_train('one', *few)
    two = train_to_the_end('two', *few, world=2)
    same_weights(one, two, 2e-5)
    logs = log_of(tmp_path / 'one'), log_of(tmp_path / 'two')
    assert len(logs[0]) == len(logs[1]) == 3     # two of steps, one of the evaluation
    for a, b in zip(*logs):
        compared = {'loss', 'val_loss', 'grad_norm', 'val_passes'}
        for key in compared & {key for key in a if a[key] is not None}:
            assert a[key] == pytest.approx(b[key], rel=1e-4)


@posix
def test_sharded_state_is_saved_in_one_piece(run_train, train_to_the_end, tmp_path):
    """By two ranks that share it out, and who goes on from it: exactly, or on another number."""
    batch = ['--batch_tokens=384', '--save_interval=5', '--shard_optimizer=True',   # 12 windows
             '--eval_tokens=416']       # 13, in which two of three ranks have one batch fewer
    one = run_train('one', *batch)
    two = train_to_the_end('two', *batch, '--micro_batch=2', world=2)
    same_optimizer(one, two, 2e-5)
    for world, micro in ((2, 2), (3, 4), (1, 4)):
        os.makedirs(tmp_path / f'on{world}')
        shutil.copy(tmp_path / 'two' / 'ckpt_prev.pt', tmp_path / f'on{world}' / 'ckpt.pt')
        other = train_to_the_end(f'on{world}', *batch, '--init_from=resume',
                                 f'--micro_batch={micro}', world=world)
        same_weights(two, other, 0.0 if world == 2 else 1e-4)
        same_optimizer(two, other, 0.0 if world == 2 else 1e-4)


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
            optimizer = ZeroRedundancyOptimizer([dict(params=[w])], torch.optim.AdamW, lr=1e-3)
            held = dict(step=torch.tensor(1.0), exp_avg=torch.ones(4, 4),
                        exp_avg_sq=torch.ones(4, 4))
            group = {**optimizer.param_groups[0], 'params': [0]}
            saved = dict(state={0: held}, param_groups=[group])
            load_optimizer(optimizer, None, dict(optimizer=saved))
            devices = [t.device.type for t in optimizer.optim.state[w].values()]
            assert devices == ['cuda'] * 3
            assert not optimizer.state
    finally:
        dist.destroy_process_group()


@posix
def test_ranks_equal_one_on_a_made_task_too(run_train, train_to_the_end, traffic):
    folder = f'--data_dir={os.path.abspath("data/traffic")}'
    one = run_train('one', *TRAFFIC, folder, '--micro_batch=4')
    two = train_to_the_end('two', *TRAFFIC, folder, '--micro_batch=2', world=2)
    same_weights(one, two, 2e-5)


@pytest.mark.parametrize('tokens, world, shares', [
    (1024, 1, (1, 4)), (1024, 2, (1, 2)), (1024, 4, (1, 1)), (2048, 2, (1, 4)), (1536, 2, (1, 3)),
    (8192, 2, (4, 4)),
])
def test_a_small_batch_is_shared_out_among_ranks(tokens, world, shares):
    assert Settings(batch_tokens=tokens, micro_batch=4).micro_batches(256, world) == shares


@pytest.mark.parametrize('tokens, world', [(1024, 8), (1000, 1), (2560, 2)])
def test_what_ranks_cannot_share_is_refused(tokens, world):
    with pytest.raises(UserError, match=f'batch_tokens={tokens} is not a multiple of .* = 4 x 256'):
        Settings(batch_tokens=tokens, micro_batch=4).micro_batches(256, world)


@posix
def test_ranks_with_less_than_a_micro_batch_equal_one(run_train, train_to_the_end, tmp_path):
    batch = ['--batch_tokens=128', '--max_steps=4']     # 4 windows, micro_batch=4
    one = run_train('one', *batch)
    two = train_to_the_end('two', *batch, world=2)
    assert ' in 1 x 2 x 2 sequences of 32' in (tmp_path / 'two.log0').read_text()
    assert two['settings'] == {**one['settings'], 'out_dir': two['settings']['out_dir']}
    same_weights(one, two, 2e-5)


def test_ranks_of_other_settings_or_data_are_refused(monkeypatch, small_data):
    meta = read_meta(small_data)
    added = []      # to the number of this rank
    monkeypatch.setattr(dist, 'all_reduce', lambda value: added.append(value.item())
                        or value.mul_(2))
    for settings, given, data in [
            (Settings(), {}, meta), (Settings(out_dir='b', data_dir='c', threads=2), {}, meta),
            (Settings(seed=3), {}, meta), (Settings(), dict(ponder_steps=2), meta),
            (Settings(), {}, {**meta, 'val': meta['train']})]:
        check_ranks(settings, given, data, Ranks(0, 2), CPU)
    assert added[0] == added[1] and len(set(added)) == 4
    monkeypatch.setattr(dist, 'all_reduce', lambda value: value.add_(added[2]))
    with pytest.raises(UserError, match='the ranks have other settings or other data'):
        check_ranks(Settings(), {}, meta, Ranks(0, 2), CPU)


def test_ranks_that_found_different_checkpoints_are_refused(monkeypatch):
    state = dict(step=6, optimizer=dict(state={}), settings=dict(optimizer='adamw'))
    monkeypatch.setattr(dist, 'all_reduce', lambda value: value.add_(6))    # the other one's step
    check_resume(state, Settings(), Ranks(0, 2), CPU)
    with pytest.raises(UserError, match='found step 4 .*other ranks another'):
        check_resume({**state, 'step': 4}, Settings(), Ranks(0, 2), CPU)


@pytest.mark.parametrize('eval_only, copies', [(True, 1), (False, 4)])
def test_memory_is_for_weights_gradients_and_moments_of_all_ranks(monkeypatch, eval_only, copies):
    def machine_has(kilobytes):
        text = f'MemTotal: 9 kB\nMemAvailable: {kilobytes} kB\n'
        monkeypatch.setattr('engine.start.open', lambda *args, **kw: io.StringIO(text),
                            raising=False)

    model = make()
    args = model.config, Settings(eval_only=eval_only, init_from='out'), Ranks(0, 2), CPU
    needed = copies * 2 * 4 * model.num_params() // 1024        # kB, of two ranks
    machine_has(needed + 1)
    check_memory(*args)
    machine_has(needed - 1)
    with pytest.raises(UserError, match='GB of memory'):
        check_memory(*args)
    monkeypatch.setenv('LOCAL_WORLD_SIZE', '1')     # the other rank is on another machine
    check_memory(*args)
    monkeypatch.delenv('LOCAL_WORLD_SIZE')
    alone = make(ponder='loop', halting='ouro', ouro_stage=2)
    gate = sum(p.numel() for p in alone.mechanism.parameters())
    assert 0 < gate < alone.num_params() / 10
    machine_has(2 * 4 * (alone.num_params() + copies * gate) // 1024 + 1)
    check_memory(alone.config, *args[1:])


@pytest.mark.parametrize('number, theirs', [(0, 'float32'), (1, 'bfloat16'), (2, 'float16')])
def test_ranks_compute_in_the_first_ones_precision(monkeypatch, number, theirs):
    """Machines differ, and so does what a clock says on each."""
    monkeypatch.setattr(dist, 'all_reduce', lambda value: value.add_(number))    # what rank 0 adds
    for own in (torch.float32, torch.bfloat16, torch.float16):
        assert Ranks(1, 2).dtype_of_first(own, CPU) == getattr(torch, theirs)
    monkeypatch.setattr(dist, 'all_reduce', lambda value: None)
    assert Ranks(0, 2).dtype_of_first(getattr(torch, theirs), CPU) == getattr(torch, theirs)


def test_threads_are_those_asked_for(run_train, capsys):
    """More than one may wait for each other: the run says so. A run that goes on takes as many."""
    try:
        run_train('out', '--threads=2', '--max_steps=1')
        assert '\n2 threads: where other programs' in capsys.readouterr().out
        torch.set_num_threads(1)
        run_train('out', '--max_steps=2', '--init_from=resume')
        assert '\n2 threads: where other programs' in capsys.readouterr().out
        run_train('out', '--threads=1', '--max_steps=3', '--init_from=resume')
        told = capsys.readouterr().out
        assert 'threads=1 (was 2)' in told and 'threads: where other' not in told
    finally:
        torch.set_num_threads(1)


@posix
@pytest.mark.parametrize('fails, status', [('', 0), ("raise UserError('no')", 2)])
def test_a_ranks_status_is_its_own(fails, status):
    """Whatever happens while Python takes itself down: gloo's threads may abort it."""
    code = ('import atexit, os\nfrom engine.files import UserError, run\n'
            f'def main(argv):\n    print("done")\n    {fails}\n'
            'atexit.register(os.abort)\nrun(main)')
    done = program('-c', code, ok=False, RANK='0')
    assert (done.returncode, done.stdout) == (status, 'done\n')
    assert done.stderr == ('error: rank 0: no\n' if fails else '')
    assert program('-c', code, ok=False).returncode == -signal.SIGABRT


def test_nobody_waits_for_gloos_threads(monkeypatch):
    """Who takes its group down does, and they may wait for Python."""
    store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    env = dict(RANK=0, WORLD_SIZE=1, MASTER_ADDR='127.0.0.1', MASTER_PORT=store.port,
               TORCHELASTIC_USE_AGENT_STORE=True, TORCHELASTIC_RESTART_COUNT=0)
    for name, value in env.items():
        monkeypatch.setenv(name, str(value))
    try:
        with hardware.process_group('cpu') as (ranks, _):
            assert ranks == ALONE
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize('left', [dict(RANK='0'), dict(RANK='0', WORLD_SIZE='1'), dict(RANK='')])
def test_variables_that_a_job_left_are_named(monkeypatch, left):
    for name in ('WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT', 'LOCAL_RANK'):
        monkeypatch.delenv(name, raising=False)
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match='RANK is set.* expected.*: unset RANK, or use torchrun'):
        with hardware.process_group('cpu'):
            pass


@posix
def test_torchrun_passes_on_sigterm(small_data, tmp_path):
    """From a shell; both ranks save and stop at the same step."""
    args = ['--standalone', '--nproc_per_node=2', 'train.py', *SHAPE, *QUICK, *ENDLESS,
            f'--data_dir={small_data}', f'--out_dir={tmp_path / "out"}']
    with open(tmp_path / 'out.log', 'w') as log:
        process = subprocess.Popen([sys.executable, '-m', 'torch.distributed.run', *args], cwd=ROOT,
                                   stdout=log, stderr=log,
                                   env={**os.environ, 'OMP_NUM_THREADS': '1'})
    try:
        wait_for('step     3', tmp_path / 'out.log', lambda: process.poll() is None)
        process.terminate()
        process.wait(60)
    finally:
        process.kill()
    state = load_checkpoint(str(tmp_path / 'out'))
    step = state['step']
    assert step >= 3
    told = f"stopped at step {step}; go on with the same command and --init_from=resume"
    assert told in (tmp_path / 'out.log').read_text()


@posix
def test_a_killed_rank_does_not_hang_the_others(start, tmp_path):
    first, second = start('out', *ENDLESS, world=2)
    wait_for('step     3', tmp_path / 'out.log0', first.is_alive)
    second.kill()
    first.join(60)
    assert first.exitcode == 2
    told = (tmp_path / 'out.log0').read_text()
    assert 'error: rank 0: no contact, or no longer, with another rank' in told


# ---- signals, and what kills ---------------------------------------------------------------------

@posix
@pytest.mark.parametrize('name', ['SIGINT', 'SIGTERM', 'SIGHUP'])
def test_a_signal_saves_and_stops(start, tmp_path, name):
    [process] = start('out', *ENDLESS)
    wait_for('step     3', tmp_path / 'out.log0', process.is_alive)
    os.kill(process.pid, getattr(signal, name))
    process.join(60)
    told = (tmp_path / 'out.log0').read_text()
    assert process.exitcode == 128 + getattr(signal, name), told
    assert 'stopped at step' in told
    assert load_checkpoint(str(tmp_path / 'out'))['step'] >= 3


@posix
def test_ctrl_c_on_a_pipe_loses_nothing(start, tmp_path):
    """Ctrl-C on `python train.py | tee log` ends tee first."""
    os.mkfifo(tmp_path / 'out.log0')
    [process] = start('out', *ENDLESS)
    with open(tmp_path / 'out.log0') as out:
        for line in out:
            if line.startswith('step     3'):
                os.kill(process.pid, signal.SIGSTOP)    # both get the signal together
                os.kill(process.pid, signal.SIGINT)
                break
    os.kill(process.pid, signal.SIGCONT)
    process.join(60)
    assert process.exitcode == 141
    assert load_checkpoint(str(tmp_path / 'out'))['step'] >= 3


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason="needs /dev/full")
def test_a_log_that_cannot_be_written_costs_no_step(small_data, tmp_path):
    """`python train.py > log` on a disk that is full."""
    out = tmp_path / 'out'
    args = ['train.py', *SHAPE, *QUICK, *ENDLESS, f'--data_dir={small_data}', f'--out_dir={out}']
    with open('/dev/full', 'w') as log:
        done = subprocess.run([sys.executable, *args], cwd=ROOT, stdout=log, stderr=subprocess.PIPE,
                              text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith('error: a line of the log cannot be written (No space left')
    assert load_checkpoint(str(out))['step'] == 1
    assert [record['step'] for record in log_of(out)] == [1]    # on a disk that is not


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


def test_a_second_signal_ends_at_once_unless_torchrun_passed_it_on(monkeypatch, capfd):
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
    assert capfd.readouterr().err.count('stopping after this step; a second time ends it') == 1
    now[0] = 101.0
    stop.hear(signal.SIGTERM, None)
    assert raised == [signal.SIG_DFL, signal.SIGTERM]
    lost = Stop(ALONE, CPU)     # a log's lost line is no signal: the first one is the first
    lost.because(BrokenPipeError())
    now[0] = 102.0
    lost.hear(signal.SIGINT, None)
    assert lost.asked() and len(raised) == 2


@posix
def test_sigkill_at_random_moments_costs_one_step(run_train, start, tmp_path):
    frequent = [*ENDLESS, '--save_interval=1']
    rng = random.Random(0)
    out, log = tmp_path / 'out', tmp_path / 'out.log0'
    step = 0
    for ahead in (0, 3, 1, 5):      # new steps until it is killed; none: while it starts
        log.unlink(missing_ok=True)
        [process] = start('out', *frequent, *(['--init_from=resume'] if step else []))
        if ahead:
            wait_for(f'step {step + ahead:>5}/', log, process.is_alive)
        process.join(rng.uniform(0, 0.05))
        process.kill()
        process.join()
        before = step
        step = load_checkpoint(str(out))['step'] if list(out.glob('ckpt*.pt')) else 0
        assert step >= before + ahead, log.read_text()
    with stopped_at(step + 2):
        straight = run_train('straight', *frequent)
        same = run_train('out', *frequent, '--init_from=resume')
    same_weights(straight, same)
    same_optimizer(straight, same)
