"""Training in one process: exact resume, order of the data, checkpoints, evaluation, and what is refused. Several: test_processes.py."""
import collections
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ONE_EACH, ROOT, TOGGLES, close, make, program, refused

from engine import hardware
import train
from engine.checkpoint import load_checkpoint, save_checkpoint
from configurator import build, read
from engine.errors import UserError
from engine.shards import Windows, alone, read_meta
from model import GPT, GPTConfig
from train import Settings, Trainer

SHAPE = ['--n_layer=3', '--n_head=2', '--n_embd=32', '--mlp_hidden=48', '--block_size=32']
QUICK = ['--batch_tokens=256', '--micro_batch=4', '--max_steps=10', '--eval_tokens=512', '--sample_tokens=0', '--learning_rate=1e-2', '--dtype=float32', '--device=cpu']


@pytest.fixture
def run_train(small_data, tmp_path):
    """Run train.py in this process; returns the checkpoint of its out_dir, and gives every run the same small model."""
    def run(name, *args, shape=SHAPE):
        train.main([*shape, *QUICK, f'--data_dir={small_data}', f'--out_dir={tmp_path / name}', *args])
        return load_checkpoint(str(tmp_path / name))
    return run


@pytest.fixture
def make_trainer(small_data, tmp_path):
    """The Trainer of such a run, for its parts."""
    def make(*args):
        given = read([*SHAPE, *QUICK, f'--data_dir={small_data}', f'--out_dir={tmp_path / "out"}', *args], '', Settings, GPTConfig)[0]
        return Trainer(build(Settings, given), given, None, 0, 1, torch.device('cpu'))
    return make


def options(toggle):
    return [f'--{k}={v}' for k, v in TOGGLES[toggle].items() if k != 'n_kv_head']


def same_weights(a, b, tol=0.0):
    assert a['model'].keys() == b['model'].keys()
    for name in a['model']: assert (a['model'][name] - b['model'][name]).abs().max() <= tol, name


@pytest.mark.parametrize('toggle', ONE_EACH)
def test_ten_steps_equal_five_and_resume_and_five(run_train, monkeypatch, toggle, capsys):
    extra = [*options(toggle), '--dropout=0.1']
    straight = run_train('straight', *extra)
    monkeypatch.setattr(Trainer, 'should_stop', lambda self: self.step == 5)
    half = run_train('halves', *extra)
    assert half['step'] == 5 and '--init_from=resume' in capsys.readouterr().out
    monkeypatch.undo()
    whole = run_train('halves', *extra, '--init_from=resume')
    assert whole['step'] == 10
    same_weights(straight, whole)
    for key in straight['optimizer']['state']:
        for name, value in straight['optimizer']['state'][key].items(): assert torch.equal(value, whole['optimizer']['state'][key][name])
    with pytest.raises(AssertionError): same_weights(half, whole)


def test_each_step_knows_its_place_in_the_run_and_draws_its_iterations(run_train, monkeypatch):
    """Halting sets in by `progress`, and 'latent' trains with one iteration more or less, whether a run was resumed or not."""
    told, forward = [], GPT.forward
    def listen(self, idx, targets=None, jacobi=None):
        if self.training: told.append((self.progress, jacobi))
        return forward(self, idx, targets, jacobi)
    monkeypatch.setattr(GPT, 'forward', listen)
    run_train('straight', '--ponder=latent', '--ponder_steps=1', '--jacobi_iters=5')
    straight, told[:] = list(told), []
    with monkeypatch.context() as early:
        early.setattr(Trainer, 'should_stop', lambda self: self.step == 5)
        run_train('halves', '--ponder=latent', '--ponder_steps=1', '--jacobi_iters=5')
    run_train('halves', '--init_from=resume')
    assert told == straight and [progress for progress, _ in straight] == [step / 10 for step in range(10) for _ in range(2)]
    draws = [jacobi for _, jacobi in straight]
    assert set(draws) == {4, 5} and draws[::2] == draws[1::2]  # the micro-batches of a step alike


def test_another_seed_gives_other_weights(run_train):
    with pytest.raises(AssertionError): same_weights(run_train('a'), run_train('b', '--seed=2'))


def test_micro_batches_do_not_matter(run_train):
    same_weights(run_train('a', '--micro_batch=8'), run_train('b', '--micro_batch=2'), 2e-5)


def test_learns_and_logs(run_train, small_data, tmp_path, capsys):
    run_train('out', '--max_steps=40', '--log_interval=20')
    records = [json.loads(line) for line in open(tmp_path / 'out' / 'log.jsonl')]
    losses = [r['loss'] for r in records if 'loss' in r]
    assert [r['step'] for r in records if 'loss' in r] == [1, 20, 40] and losses[0] > 5 and losses[-1] < 0.6 * losses[0]
    assert records[-1]['val_loss'] < 0.6 * losses[0] and records[-1]['tokens'] == 40 * 256
    assert all(0 < r['data_ms'] < r['ms'] for r in records if 'loss' in r), "time waiting for data, as a part of each step"
    text, val = capsys.readouterr().out, read_meta(small_data)['val']
    assert records[-1]['val_nats_per_byte'] == pytest.approx(records[-1]['val_loss'] * val['tokens'] / val['bytes'])
    assert f"({records[-1]['val_nats_per_byte'] / math.log(2):.3f} bits) per byte" in text
    for word in ('step    40/40', 'loss', 'lr', 'grad norm', 'tokens/s', 'left', 'validation loss'): assert word in text


def test_what_is_logged_of_time_and_learning_rate(run_train, tmp_path, monkeypatch, capsys):
    """By a clock that a step moves by half a second, and an evaluation by 100."""
    clock, step, evaluate = [0.0], Trainer.train_step, Trainer.evaluate
    def takes(seconds, call):
        clock[0] += seconds
        return call
    monkeypatch.setattr(train.time, 'perf_counter', lambda: clock[0])
    monkeypatch.setattr(Trainer, 'train_step', lambda self: takes(0.5, step)(self))
    monkeypatch.setattr(Trainer, 'evaluate', lambda self: takes(100, evaluate)(self))
    run_train('out', '--log_interval=4', '--eval_interval=2', '--warmup=0.5')
    records = [r for r in map(json.loads, open(tmp_path / 'out' / 'log.jsonl')) if 'ms' in r]
    assert [(r['step'], r['ms'], r['tokens_per_second']) for r in records] == [(n, pytest.approx(500), pytest.approx(512)) for n in (1, 4, 8)]
    assert [r['lr'] for r in records] == pytest.approx([1e-2 / 5, 1e-2 * 4 / 5, 1e-2 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 2 / 4)))])
    assert '0:00:03 left' in (out := capsys.readouterr().out) and '0:00:01 left' in out  # 6 and 2 steps


def test_after_an_evaluation_training_goes_on_as_before(run_train):
    same_weights(run_train('a', '--dropout=0.1'), run_train('b', '--dropout=0.1', '--eval_interval=5'))


def test_settings_file_is_a_config_file(run_train, tmp_path):
    first = run_train('a', '--seed=5', '--save_interval=5')
    again = tmp_path / 'again'
    os.remove(tmp_path / 'a' / 'ckpt.pt')  # back to step 5: the file of the resumed run serves as well
    run_train('a', '--init_from=resume', '--seed=5')
    train.main([str(tmp_path / 'a' / 'settings.json'), f'--out_dir={again}'])
    same_weights(first, load_checkpoint(str(again)))


def test_evaluation_is_the_plain_mean_over_fixed_windows(run_train, small_data, tmp_path, capsys):
    state = run_train('out')
    capsys.readouterr()
    train.main([f'--data_dir={small_data}', f'--out_dir={tmp_path / "out"}', '--init_from=resume', '--eval_only=True', '--eval_tokens=100_000_000', '--dtype=float32', '--device=cpu'])
    printed = float(capsys.readouterr().out.split('validation loss ')[1].split()[0])
    model = GPT(GPTConfig(**state['config'])).eval()
    model.load_state_dict(state['model'])
    data = Windows(small_data, 'val', read_meta(small_data), 32)
    losses = [model(*data.get([w], torch.device('cpu')))[1].item() for w in range(data.n)]
    assert printed == pytest.approx(sum(losses) / len(losses), abs=1e-4)


def test_evaluation_reads_eval_tokens_from_all_over_the_set(make_trainer, monkeypatch):
    trainer, read = make_trainer(), []
    get = trainer.val_data.get
    monkeypatch.setattr(trainer.val_data, 'get', lambda windows, device: read.extend(windows) or get(windows, device))
    trainer.evaluate()
    n = 512 // 32
    assert read == [i * trainer.val_data.n // n for i in range(n)] and trainer.val_data.n > 2 * n


@pytest.mark.parametrize('dtype', ['float32', 'float16'])
def test_gradients_are_clipped_to_the_norm_asked_for(make_trainer, monkeypatch, dtype):
    trainer, norms, clip = make_trainer(f'--dtype={dtype}', '--grad_clip=0.01'), [], torch.nn.utils.clip_grad_norm_
    def spy(params, most):
        params = list(params)
        norms.append(clip(params, most).item())
        norms.append(torch.stack([p.grad.norm() for p in params]).norm().item())
        return torch.tensor(norms[0])
    monkeypatch.setattr(torch.nn.utils, 'clip_grad_norm_', spy)
    trainer.train_step()
    assert 0.01 < norms[0] < 100 and norms[1] == pytest.approx(0.01, rel=1e-3)  # fp16's scale, 65536, is out of them


def test_ranks_have_dropout_of_their_own_and_read_ahead_what_they_need_next(make_trainer, monkeypatch):
    trainer, seeds, asked = make_trainer(), [], []
    seed, sample = torch.manual_seed, trainer.train_data.sample
    monkeypatch.setattr(torch, 'manual_seed', lambda n: seeds.append(n) or seed(n))
    monkeypatch.setattr(trainer.train_data, 'sample', lambda first, *args, then: asked.append((first, then)) or sample(first, *args, then=then))
    monkeypatch.setattr(torch.distributed, 'all_reduce', lambda x: None)
    trainer.world, trainer.accumulation = 2, 1
    for trainer.rank in 0, 1:
        trainer.step = 0
        for _ in range(3): trainer.train_step()
    assert len(set(seeds)) == 6
    assert [then for _, then in asked[:2]] == [first for first, _ in asked[1:3]] and [then for _, then in asked[3:5]] == [first for first, _ in asked[4:]]


def test_a_step_logs_the_passes_of_all_its_micro_batches(make_trainer, monkeypatch):
    trainer, shares = make_trainer('--ponder=chain', '--halting=router'), iter([torch.tensor([1.0, 1, 0, 0]), torch.tensor([1.0, 0, 0, 0])])
    monkeypatch.setattr(trainer, 'shares', lambda: next(shares))
    trainer.train_step()
    assert trainer.thinking()[1] == [1, 0.5, 0, 0]


@pytest.mark.parametrize('name, fixed', [('gate', True), ('router', False)])
def test_attention_that_plans_each_length_is_for_fixed_lengths(run_train, name, fixed):
    run_train('out', *options(name), '--max_steps=1', '--sample_tokens=0')
    assert torch.backends.cuda.cudnn_sdp_enabled() == fixed
    run_train('more', *options(name), '--max_steps=1', '--sample_tokens=2')
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_passes_are_logged_and_tau_can_change_at_evaluation(run_train, small_data, tmp_path, capsys):
    run_train('out', *options('router'), '--max_steps=10', '--log_interval=5')
    records = [json.loads(line) for line in open(tmp_path / 'out' / 'log.jsonl')]
    for record in records[:-1]:
        assert record['passes'][0] == 1 and record['passes'] == sorted(record['passes'], reverse=True) and len(record['passes']) == 3
    assert 1 < records[-1]['val_passes'] < 3
    assert f"{sum(records[0]['passes']):.2f} passes (1.00" in capsys.readouterr().out
    for tau, passes in ((0.0, '3.000 passes'), (1.1, '1.000 passes'), (0.3, f"{records[-1]['val_passes']:.3f} passes")):
        train.main([f'--data_dir={small_data}', f'--out_dir={tmp_path / "out"}', '--init_from=resume', '--eval_only=True',
                    f'--halt_tau={tau}', '--dtype=float32', '--device=cpu', '--eval_tokens=512'])
        assert passes in capsys.readouterr().out


@pytest.mark.parametrize('name, steps, words', [('gate', 0, None), ('gate', 1, None), ('gate', 3, 'weights for 2'), ('mask', 0, 'weights for 1'),
                                                ('router', 0, None), ('router', 3, None), ('pause', 0, None), ('pause', 3, None), ('plain', 1, "ponder='none'")])
def test_steps_can_change_at_evaluation(run_train, small_data, tmp_path, capsys, name, steps, words):
    run_train('out', *options(name), '--max_steps=1')
    again = lambda n: train.main([f'--data_dir={small_data}', f'--out_dir={tmp_path / "out"}', '--init_from=resume', '--eval_only=True',
                                  f'--ponder_steps={n}', '--dtype=float32', '--device=cpu', '--eval_tokens=512'])
    if words:
        with pytest.raises(UserError, match=words): again(steps)
    else:
        again(steps)
        assert 'validation loss' in capsys.readouterr().out
    with pytest.raises(UserError, match='must not be negative'): again(-1)


def test_a_sample_compiles_nothing(run_train, monkeypatch, capsys):
    """Each token reads one key more than the one before: compiled code would be made for each of them, in each layer."""
    graphs, compile = [], torch.nn.Module.compile
    count = lambda graph, inputs: graphs.append(graph) or graph.forward
    monkeypatch.setattr(torch.nn.Module, 'compile', lambda module, dynamic: compile(module, backend=count, dynamic=dynamic))
    torch._dynamo.reset()  # forget what other tests compiled
    run_train('without', '--depth_attn=True', '--compile=True', '--max_steps=2')
    before, told = len(graphs), len(capsys.readouterr().out)
    assert before
    torch._dynamo.reset()
    run_train('with', '--depth_attn=True', '--compile=True', '--max_steps=2', '--sample_tokens=12')
    assert len(graphs) == 2 * before and len(capsys.readouterr().out) > told


def test_compiling_without_a_compiler_is_refused(small_data, tmp_path):
    done = program('train.py', *SHAPE, *QUICK, f'--data_dir={small_data}', f"--out_dir={tmp_path / 'out'}", '--compile=True',
                   ok=False, CXX='missing', PATH=str(tmp_path), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / 'cache'))
    refused(done, 'compile=True', 'C++ compiler', '--compile=False')


@pytest.mark.parametrize('passes, progress, words', [([1, 1, 1], 0.5, 'nobody halts!'), ([1, 1, 1], 0.3, ''), ([1, 0, 0], 0.3, 'everybody halts!'), ([1, 0.9, 0.1], 0.9, '')])
def test_collapse_is_named_in_the_log(passes, progress, words):
    trainer = object.__new__(Trainer)
    trainer.model, trainer.world = make(**TOGGLES['gate']), 1
    trainer.config = trainer.model.config
    trainer.model.progress, trainer.passes = progress, [torch.tensor(passes, dtype=torch.float32)]
    assert trainer.thinking()[0].rsplit(')', 1)[1].strip() == words and trainer.passes == []


def test_learning_rate_schedule():
    s = Settings(max_steps=100, learning_rate=2.0, warmup=0.1, min_lr_rate=0.1)
    trainer = object.__new__(Trainer)
    trainer.s = s
    rates = [trainer.learning_rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.2) and rates[9] == rates[10] == pytest.approx(2.0) and rates[99] == pytest.approx(0.2)
    assert all(a < b for a, b in zip(rates[:9], rates[1:10])) and all(a > b for a, b in zip(rates[10:99], rates[11:]))


def test_decay_on_matrices_only(run_train):
    groups = run_train('out')['optimizer']['param_groups']
    shapes = [p.shape for p in GPT(GPTConfig(n_layer=3, n_head=2, n_embd=32, mlp_hidden=48, vocab_size=320)).parameters()]
    assert [g['weight_decay'] for g in groups] == [0.1, 0.0]
    assert len(groups[0]['params']) == sum(len(s) == 2 for s in shapes) and len(groups[1]['params']) == sum(len(s) == 1 for s in shapes)


def test_previous_checkpoint_is_kept_and_used(run_train, tmp_path, capsys):
    run_train('out', '--save_interval=5')
    assert load_checkpoint(str(tmp_path / 'out'))['step'] == 10
    with open(tmp_path / 'out' / 'ckpt.pt', 'r+b') as f: f.truncate(1000)
    state = load_checkpoint(str(tmp_path / 'out'))
    assert state['step'] == 5 and 'ckpt.pt: damaged' in capsys.readouterr().err
    run_train('out', '--save_interval=5', '--init_from=resume')
    assert [torch.load(tmp_path / 'out' / name, weights_only=True)['step'] for name in ('ckpt.pt', 'ckpt_prev.pt')] == [10, 5]
    os.remove(tmp_path / 'out' / 'ckpt.pt')  # as after a crash between the two renames
    assert load_checkpoint(str(tmp_path / 'out'))['step'] == 5
    assert not [n for n in os.listdir(tmp_path / 'out') if n.endswith('.tmp')]


def test_a_failing_save_keeps_the_old_checkpoint(tmp_path):
    save_checkpoint(str(tmp_path), {'step': 1})
    class Unpicklable:
        def __reduce__(self): raise OSError(28, 'No space left on device')
    with pytest.raises(OSError): save_checkpoint(str(tmp_path), {'step': Unpicklable()})
    assert torch.load(tmp_path / 'ckpt.pt', weights_only=True) == {'step': 1} and os.listdir(tmp_path) == ['ckpt.pt']


def test_checkpoints_cannot_run_code(tmp_path):
    class Evil:
        def __reduce__(self): return (os.mkdir, (str(tmp_path / 'pwned'),))
    torch.save({'version': 1, 'model': Evil()}, tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match='not a checkpoint'): load_checkpoint(str(tmp_path))
    assert not (tmp_path / 'pwned').exists()


@pytest.mark.parametrize('toggle', ['plain', 'gate', 'router', 'pause'])
def test_weights_can_start_another_run(run_train, tmp_path, toggle):
    first = run_train('first', *options(toggle))
    second = run_train('second', f'--init_from={tmp_path / "first"}', '--max_steps=1', '--learning_rate=1e-9', '--weight_decay=0.0', '--rope_theta=5e5', shape=[])
    assert second['config']['rope_theta'] == 5e5
    assert second['step'] == 1
    same_weights(first, second, 1e-7)


@pytest.mark.parametrize('mechanism', [['--depth_attn=True'], ['--ponder=loop', '--ponder_steps=1'], ['--ponder=embedding', '--halting=gate', '--ponder_steps=2']])
def test_a_new_run_may_add_a_mechanism_or_change_the_context(run_train, tmp_path, mechanism):
    first = run_train('first')
    for args in [*mechanism], [*mechanism, '--block_size=16']:
        second = run_train(f'second{len(args)}', f'--init_from={tmp_path / "first"}', '--max_steps=1', '--learning_rate=1e-9', '--weight_decay=0.0', *args, shape=[])
        for name, p in first['model'].items(): assert (second['model'][name] - p).abs().max() <= 1e-7, name
        assert {name.split('.')[0] for name in second['model'].keys() - first['model'].keys()} == ({'gates'} if '--halting=gate' in args else set())
    assert second['config']['block_size'] == 16 and second['config']['embed_scale'] == first['config']['embed_scale'] == 1
    if '--halting=gate' in args:
        with pytest.raises(UserError, match='do not fit.*gates'): run_train('third', f'--init_from={tmp_path / "second4"}', '--halting=none', shape=[])


def test_a_new_run_needs_all_weights_of_the_plain_gpt(run_train, tmp_path):
    state = run_train('first')
    del state['model']['h.1.ln_2.weight']
    save_checkpoint(str(tmp_path / 'first'), state)
    with pytest.raises(UserError, match='do not fit.*h.1.ln_2.weight'): run_train('second', f'--init_from={tmp_path / "first"}', '--ponder=loop', shape=[])


def test_none_is_the_default_again_in_a_new_run(run_train, tmp_path):
    run_train('first', '--depth_attn=True', '--depth_stride=2')
    start = f'--init_from={tmp_path / "first"}'
    for args, stride in [([], 2), (['--depth_stride=None'], 1)]:
        assert run_train(f'second{stride}', start, '--max_steps=1', *args, shape=[])['config']['depth_stride'] == stride


@pytest.fixture
def with_ddp(make_trainer, tmp_path):
    """A Trainer that adds up two micro-batches in bf16, and whose model is in DDP, with one rank."""
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path / "store"}', rank=0, world_size=1)
    trainer = make_trainer('--dtype=bfloat16', '--ponder=chain', '--halting=router')
    trainer.ddp = torch.nn.parallel.DistributedDataParallel(trainer.model, gradient_as_bucket_view=True)
    assert trainer.accumulation == 2
    yield trainer
    torch.distributed.destroy_process_group()


def test_gradients_stay_in_ddps_buckets_and_backward_is_not_autocast(with_ddp, monkeypatch):
    model, autocast, where, backward = with_ddp.model, [], [], torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, 'backward', lambda loss: (autocast.append(torch.is_autocast_enabled('cpu')), backward(loss))[1])
    model.register_forward_pre_hook(lambda *_: where.append([p.grad.data_ptr() for p in model.parameters() if p.grad is not None]))
    alone, no_sync = [], with_ddp.ddp.no_sync
    monkeypatch.setattr(with_ddp.ddp, 'no_sync', lambda: alone.append(1) or no_sync())
    for _ in range(3): with_ddp.train_step()
    assert autocast == [False] * 6 and len(alone) == 3  # ranks talk once a step
    assert where[2] == where[3] == where[4] == where[5] and len(where[2]) == len(list(model.parameters()))


def test_settings_of_a_mechanism_that_is_off_are_named(run_train, tmp_path, capsys):
    run_train('plain', '--depth_stride=1', '--halt_tau=0.5', '--ponder_steps=2', '--ponder=none')
    assert 'warning: depth_stride, halt_tau, ponder_steps: without effect' in capsys.readouterr().err
    run_train('loop', '--ponder=loop', '--jacobi_iters=2', '--ponder_topk=5')
    assert 'warning: jacobi_iters, ponder_topk: without effect' in capsys.readouterr().err
    train.main([str(tmp_path / 'plain' / 'settings.json'), f'--out_dir={tmp_path / "again"}', '--depth_stride=None', '--halt_tau=1e-4', '--ponder_steps=3'])
    run_train('on', '--depth_attn=True', '--depth_stride=1', '--ponder=chain', '--halting=router', '--halt_tau=0.5', '--ponder_steps=2')
    assert 'without effect' not in capsys.readouterr().err


def test_bad_numbers_stop_the_run_and_keep_the_checkpoint(run_train, monkeypatch, tmp_path, capsys):
    good = run_train('out', '--max_steps=4')
    loss = GPT.loss
    monkeypatch.setattr(GPT, 'loss', lambda self, h, y: loss(self, h, y) * float('nan'))
    with pytest.raises(UserError, match='3 steps in a row.*learning_rate'):
        run_train('out', '--init_from=resume', '--max_bad_steps=3', '--save_interval=1')  # none of these steps is saved
    assert capsys.readouterr().out.count('step skipped') == 3
    kept = load_checkpoint(str(tmp_path / 'out'))
    same_weights(good, kept)
    assert kept['step'] == 4
    with pytest.raises(UserError, match='5 steps in a row.*start again'): run_train('new')  # nothing to resume from


def test_one_bad_step_is_skipped(run_train, monkeypatch, tmp_path):
    loss, calls = GPT.loss, []
    def sometimes(self, h, y):
        calls.append(1)
        return loss(self, h, y) * (float('nan') if len(calls) in (5, 9) else 1)  # steps 3 and 5: not in a row
    monkeypatch.setattr(GPT, 'loss', sometimes)
    state = run_train('out', '--max_bad_steps=2', '--max_seconds=600')
    records = [json.loads(line) for line in open(tmp_path / 'out' / 'log.jsonl')]
    assert all(math.isfinite(r['loss']) for r in records if 'loss' in r), "a mean over the others"
    assert state['step'] == 10 and all(t.isfinite().all() for t in state['model'].values())


@pytest.mark.skipif(sys.platform == 'win32', reason='POSIX signals')
@pytest.mark.parametrize('number', ['SIGINT', 'SIGTERM', 'SIGHUP'])  # by name: not all exist on Windows
def test_a_signal_saves_and_stops(small_data, tmp_path, number):
    command = [sys.executable, '-u', 'train.py', *SHAPE, *QUICK, '--max_steps=100000', '--log_interval=1', f'--data_dir={small_data}', f'--out_dir={tmp_path / "out"}']
    heard = lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also if these tests run under nohup
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    for line in process.stdout:
        if line.startswith('step     3'): process.send_signal(getattr(signal, number)); break
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert 'stopped at step' in out and '--init_from=resume' in out
    assert load_checkpoint(str(tmp_path / 'out'))['step'] >= 3


@pytest.mark.skipif(sys.platform == 'win32', reason='POSIX signals')
def test_under_nohup_a_run_outlives_its_terminal(run_train, monkeypatch):
    step, before = Trainer.train_step, signal.signal(signal.SIGHUP, signal.SIG_IGN)
    def hung_up(self):
        signal.raise_signal(signal.SIGHUP)
        return step(self)
    monkeypatch.setattr(Trainer, 'train_step', hung_up)
    try: assert run_train('out', '--max_steps=3')['step'] == 3
    finally: signal.signal(signal.SIGHUP, before)


def test_a_second_signal_ends_at_once_unless_torchrun_passed_it_on(monkeypatch):
    trainer, now, raised = object.__new__(Trainer), [100.0], []
    trainer.stop = 0.0
    monkeypatch.setattr(time, 'monotonic', lambda: now[0])
    monkeypatch.setattr(signal, 'signal', lambda number, handler: raised.append(handler))
    monkeypatch.setattr(signal, 'raise_signal', raised.append)
    for now[0] in (100.0, 100.1): trainer._on_signal(signal.SIGTERM, None)
    assert trainer.stop and raised == []
    now[0] = 101.0
    trainer._on_signal(signal.SIGTERM, None)
    assert raised == [signal.SIG_DFL, signal.SIGTERM]


def test_time_limit_and_a_resume_that_names_only_the_folder(run_train, tmp_path, capsys):
    straight = run_train('straight', '--weight_decay=0.3', '--beta2=0.9')
    assert run_train('out', '--weight_decay=0.3', '--beta2=0.9', '--max_seconds=1e-6')['step'] == 1
    assert 'stopped at step 1; go on' in capsys.readouterr().out
    train.main(['--init_from=resume', f'--out_dir={tmp_path / "out"}', '--max_seconds=None'])  # the other settings are in the checkpoint
    resumed = load_checkpoint(str(tmp_path / 'out'))
    same_weights(straight, resumed)
    assert {**straight['settings'], 'out_dir': 0} == {**resumed['settings'], 'out_dir': 0}
    with open(tmp_path / 'out' / 'settings.json') as f: assert json.load(f)['init_from'] == 'scratch'  # where the weights began


def test_settings_given_when_resuming_count(run_train):
    run_train('out', '--max_steps=4')
    groups = run_train('out', '--max_steps=5', '--init_from=resume', '--weight_decay=0.3', '--beta1=0.8', '--dropout=0.1')['optimizer']['param_groups']
    assert [g['weight_decay'] for g in groups] == [0.3, 0.0] and groups[0]['betas'] == (0.8, 0.95)


def test_a_signal_cuts_an_evaluation_short(run_train, monkeypatch, capsys):
    straight, evaluate, batches = run_train('straight'), Trainer.evaluate, []
    def interrupted(self):
        get = self.val_data.get
        def signalled(*args):
            batches.append(args)
            self.stop = 1.0
            return get(*args)
        monkeypatch.setattr(self.val_data, 'get', signalled)
        return evaluate(self)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, 'evaluate', interrupted)
        assert run_train('out', '--eval_interval=5')['step'] == 5
    out = capsys.readouterr().out
    assert len(batches) == 1 and 'step 5: evaluation left out' in out and 'stopped at step 5; go on' in out
    same_weights(straight, run_train('out', '--eval_interval=5', '--init_from=resume'))


def test_fp16_resumes_with_its_scale(run_train, monkeypatch):
    half = ['--dtype=float16', '--save_interval=5']
    straight = run_train('straight', *half)
    assert straight['scaler']['_growth_tracker'] > 5
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, 'should_stop', lambda self: self.step == 5)
        run_train('out', *half)
    resumed = run_train('out', *half, '--init_from=resume')
    same_weights(straight, resumed)
    assert straight['scaler'] == resumed['scaler']


def test_out_of_memory_says_what_to_lower(run_train, monkeypatch):
    with pytest.raises(RuntimeError) as cpu: torch.empty(2 ** 60, dtype=torch.uint8)
    for error in (cpu.value, torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 MiB'), MemoryError()):
        def fails(*args): raise error
        monkeypatch.setattr(GPT, 'loss', fails)
        with pytest.raises(UserError, match='^out of memory: .*micro_batch.*checkpoint_activations.*shard_optimizer.*block_size'): run_train('out')
    def bug(*args): raise RuntimeError('shapes differ')
    monkeypatch.setattr(GPT, 'loss', bug)
    with pytest.raises(RuntimeError, match='shapes differ'): run_train('out')  # a bug keeps its traceback


def test_loss_spikes_are_said(capsys):
    trainer, records = object.__new__(Trainer), []
    trainer.recent, trainer.step = collections.deque(maxlen=50), 7
    trainer.say = lambda text, **record: records.append((text, record))
    for i in range(60): trainer.watch(2 + 0.1 * (i % 3))  # as far as noise goes
    trainer.watch(math.nan)                                # a skipped step is another matter
    assert records == []
    trainer.watch(3.5)
    [(text, record)] = records
    assert 'step 7: loss spike, 3.5000 after 2.1' in text and record['spike'] == 3.5 and record['mean_before'] == pytest.approx(2.1, abs=0.01)


def test_the_builtin_corpus_is_prepared_when_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train.main([*SHAPE, *QUICK, '--max_steps=1', '--sample_tokens=5'])
    assert 'preparing the built-in corpus' in capsys.readouterr().out and read_meta(str(tmp_path / 'data' / 'python'))['n_tokens'] == 257
    train.main([*SHAPE, *QUICK, '--max_steps=1', '--out_dir=b'])
    assert 'preparing' not in capsys.readouterr().out


@pytest.mark.parametrize('args, words', [
    (['--n_hed=4'], ["'n_hed'", "'n_head'"]), (['--n_head=5'], ['n_embd=32', 'n_head=5']), (['--n_head=32'], ['head_dim=1', 'odd']), (['--batch_tokens=1000'], ['batch_tokens=1000', 'micro_batch']),
    (['--init_from=resume'], ['no checkpoint']), (['--init_from=nowhere'], ['nowhere', 'no checkpoint']), ([f'--init_from={__file__}'], ['is a file', 'folder it is in']), (['--eval_only=True'], ['eval_only', '--init_from']),
    (['--data_dir=elsewhere'], ['elsewhere', 'prepare_data.py']), (['--vocab_size=100'], ['n_tokens=257', 'vocab_size=100']), (['--n_tokens=300', '--vocab_size=320'], ['257', 'n_tokens=300']),
    (['--device=quantum'], ['device=quantum']), (['--device=hpu'], ['device=hpu']), (['--dtype=int8'], ['dtype', 'bfloat16']), (['--max_steps=0'], ['max_steps=0']), (['--max_seconds=0'], ['max_seconds=0']), (['stray'], ['stray']), (['--seed=-1'], ['seed=-1']), (['--beta2=1.0'], ['beta2=1.0']), (['--sample_tokens=-5'], ['sample_tokens']), (['--weight_decay=-1'], ['weight_decay']), (['--device=meta'], ['device=meta']), (['--block_size=100000', '--batch_tokens=400000'], ['block_size'])])
def test_refusals(run_train, args, words):
    with pytest.raises(UserError) as error: run_train('out', *args)
    assert '\n' not in str(error.value)
    for word in words: assert word in str(error.value)


@pytest.mark.parametrize('rank', ['0', 'x'])
def test_half_of_torchruns_variables_is_refused(run_train, monkeypatch, rank):
    for name in ('WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'): monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('RANK', rank)
    with pytest.raises(UserError, match='RANK.*torchrun'): run_train('out')


@pytest.mark.parametrize('cuda, mps, cpu, want', [
    ((9, 0), False, {}, ('cuda:1', torch.bfloat16, True)), ((7, 5), True, {}, ('cuda:1', torch.float16, True)),
    (None, True, {}, ('mps', torch.float32, False)), (None, False, {}, ('cpu', torch.float32, False)),
    (None, False, {'avx512_bf16': True}, ('cpu', torch.bfloat16, False)), (None, False, {'amx_bf16': True}, ('cpu', torch.bfloat16, False))])
def test_device_and_precision_are_the_best_there_are(monkeypatch, cuda, mps, cpu, want):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: cuda is not None)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device: cuda)
    monkeypatch.setattr(torch.cuda, 'set_device', lambda device: None)
    monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: mps)
    monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: cpu, raising=False)
    monkeypatch.setattr(torch, 'empty', lambda *size, device: None)  # there is no such device here
    device = hardware.pick_device(None, local_rank=1)
    assert (str(device), hardware.pick_dtype(None, device), hardware.pick_compile(None, device)) == want
    assert hardware.pick_dtype('float32', device) == torch.float32 and hardware.pick_compile(True, device) is True


def test_what_is_chosen_for_speed(monkeypatch):
    compiled = []
    hardware.tune_cpu()
    assert make().h[0].attn.sdpa is hardware.two_matmuls
    calls, idx = [], torch.arange(48).view(2, 24)
    for toggle in 'plain', 'chain':
        model = make(**TOGGLES[toggle]).float()
        with torch.autocast('cpu', torch.bfloat16), monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, 'scaled_dot_product_attention', lambda *args, **kw: calls.append(1))
            quick = model.hidden(idx)
        assert (quick - model.hidden(idx)).abs().mean() < 0.05  # what rounding to bf16 does
    assert not calls
    monkeypatch.setattr(torch.nn.Module, 'compile', lambda block, **how: compiled.append(how))
    with torch._dynamo.config.patch(recompile_limit=8, optimize_ddp=True):
        for toggle in 'chain', 'router': hardware.compile_blocks(make(**TOGGLES[toggle]))
        assert compiled == [dict(dynamic=False)] * 5 + [dict(dynamic=None)] * 5 and torch._dynamo.config.recompile_limit == 128


@pytest.mark.parametrize('S, dtype, settings, own', [
    (24, torch.bfloat16, dict(is_causal=True), True), (24, torch.bfloat16, dict(attn_mask=torch.ones(24, 24).tril(3).bool()), True),
    (512, torch.bfloat16, dict(is_causal=True), True), (513, torch.bfloat16, dict(is_causal=True), False),
    (24, torch.float32, dict(is_causal=True), False), (24, torch.bfloat16, {}, False),
    (24, torch.bfloat16, dict(attn_mask=torch.zeros(24, 24).bfloat16()), False), (24, torch.bfloat16, dict(is_causal=True, enable_gqa=True), False)])
def test_two_matmuls_are_attention(S, dtype, settings, own, monkeypatch):
    q, k, v = torch.randn(3, 2, 4, S, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    want = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), scale=0.5, **{
        name: x.float() if name == 'attn_mask' and x.dtype != torch.bool else x for name, x in settings.items()})
    calls, sdpa = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, 'scaled_dot_product_attention', lambda *args, **kw: calls.append(1) or sdpa(*args, **kw))
    close(hardware.two_matmuls(q, k, v, scale=0.5, **settings).float(), want, 0.05)
    assert len(calls) == (not own)


def test_two_matmuls_drop_weights_and_survive_a_row_that_reads_nothing():
    q, k, v = torch.randn(3, 1, 2, 6, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    seen = torch.ones(6, 6).tril().bool()
    seen[2] = False
    out = hardware.two_matmuls(q, k, v, seen, scale=1.0)
    assert out.isfinite().all()
    close(out[:, :, 2], v.mean(2), 0.02)
    ones = torch.ones_like(v)
    assert torch.equal(hardware.two_matmuls(q, k, ones, is_causal=True, dropout_p=1.0, scale=1.0), torch.zeros_like(v))
    close(hardware.two_matmuls(q, k, ones, is_causal=True, scale=1.0).float(), ones.float(), 0.02)


def test_a_setting_of_an_older_checkpoint_is_named(run_train, tmp_path, capsys):
    state = run_train('out', '--max_steps=1')
    torch.save({**state, 'settings': {**state['settings'], 'min_lr': 0.5}}, tmp_path / 'older.pt')
    (tmp_path / 'older.pt').replace(tmp_path / 'out' / 'ckpt.pt')  # not written in place: `state` is mapped from it
    run_train('out', '--init_from=resume', '--max_steps=2')
    assert 'warning: no longer settings: min_lr' in capsys.readouterr().err


def test_a_run_whose_vocabulary_cannot_be_fetched_is_complete_without_a_sample(run_train, monkeypatch, capsys):
    def no_network(name): raise UserError('its vocabulary could not be fetched')
    monkeypatch.setattr(train, 'get_tokenizer', no_network)
    assert run_train('out', '--max_steps=1', '--sample_tokens=5')['step'] == 1
    assert 'no sample: its vocabulary could not be fetched' in capsys.readouterr().out


def test_a_full_disk_is_named_behind_pytorchs_own_error(run_train, monkeypatch):
    def full(folder, state):
        try: raise OSError(28, 'No space left on device')
        finally: raise RuntimeError('[enforce fail at inline_container.cc:672]')
    monkeypatch.setattr(train, 'save_checkpoint', full)
    with pytest.raises(UserError, match='No space left on device'): run_train('out', '--max_steps=1')


def test_a_world_size_that_some_scheduler_set_is_not_torchruns(run_train, monkeypatch):
    monkeypatch.delenv('RANK', raising=False)
    monkeypatch.setenv('WORLD_SIZE', '2')
    run_train('out', '--max_steps=1')


def test_existing_checkpoints_are_not_overwritten(run_train, tmp_path):
    run_train('out')
    with pytest.raises(UserError, match='--init_from=resume'): run_train('out')
    with pytest.raises(UserError, match='--init_from=resume'): run_train('out', f'--init_from={tmp_path / "out"}', '--max_steps=3')
    os.rename(tmp_path / 'out' / 'ckpt.pt', tmp_path / 'out' / 'ckpt_prev.pt')  # as after a crash between two renames
    with pytest.raises(UserError, match='--init_from=resume'): run_train('out')
    with pytest.raises(UserError, match='max_steps=10'): run_train('out', '--init_from=resume')
    with pytest.raises(UserError, match='n_layer=4.*has 3'): run_train('out', '--init_from=resume', '--max_steps=12', '--n_layer=4')
    with pytest.raises(UserError, match="ponder=latent, but the model loaded has none"): run_train('out', '--init_from=resume', '--max_steps=12', '--ponder=latent')
    with pytest.raises(UserError, match='depth_attn=True'): run_train('out', '--init_from=resume', '--max_steps=12', '--depth_attn=True')


def test_what_another_run_saved_meanwhile_is_not_overwritten(run_train, monkeypatch, tmp_path):
    other = run_train('other', '--seed=2')
    @contextlib.contextmanager
    def after_the_other(folder):  # which had the lock until now
        os.rename(tmp_path / 'other', folder)
        yield
    monkeypatch.setattr(train, 'alone', after_the_other)
    with pytest.raises(UserError, match='out holds a checkpoint'): run_train('out')
    same_weights(other, load_checkpoint(str(tmp_path / 'out')))


def test_data_that_can_no_longer_be_read_costs_no_step(run_train, monkeypatch, tmp_path):
    straight, read = run_train('straight'), Windows.sample
    def lost(self, first, *args, **options):
        if first >= lost.since * 8: raise UserError('gone')  # 8 windows a step
        return read(self, first, *args, **options)
    lost.since = 0
    monkeypatch.setattr(Windows, 'sample', lost)
    with pytest.raises(UserError, match='gone'): run_train('out')
    assert os.listdir(tmp_path / 'out') != [] and not (tmp_path / 'out' / 'ckpt.pt').exists()  # nothing learned, nothing to keep
    lost.since = 7
    with pytest.raises(UserError, match='gone'): run_train('out')
    assert load_checkpoint(str(tmp_path / 'out'))['step'] == 7
    monkeypatch.undo()
    same_weights(straight, run_train('out', '--init_from=resume'))


def test_other_data_than_before_is_named(run_train, monkeypatch, capsys):
    run_train('out', '--max_steps=4')
    run_train('out', '--init_from=resume', '--max_steps=6')
    assert 'not what this run read before' not in capsys.readouterr().err
    monkeypatch.setattr(train, 'read_meta', lambda folder: {**(meta := read_meta(folder)), 'train': {**meta['train'], 'tokens': 7}})
    run_train('out', '--init_from=resume', '--max_steps=8')
    assert 'is not what this run read before' in capsys.readouterr().err


def test_half_a_line_in_the_log_costs_no_other(run_train, tmp_path):
    run_train('out', '--max_steps=4')
    with open(tmp_path / 'out' / 'log.jsonl', 'a') as f: f.write('{"step": 4, "val')
    run_train('out', '--init_from=resume', '--max_steps=10')
    lines = (tmp_path / 'out' / 'log.jsonl').read_text().splitlines()
    torn = lines.index('{"step": 4, "val')
    assert [json.loads(line)['step'] for line in lines[:torn] + lines[torn + 1:]] == [1, 4, 10, 10]


def test_two_runs_do_not_share_a_folder(run_train, tmp_path):
    with alone(str(tmp_path / 'out')):
        with pytest.raises(UserError, match='out: another process writes here'): run_train('out')
        assert os.listdir(tmp_path / 'out') == []
    assert run_train('out')['step'] == 10


def test_the_shortest_context_ends_with_a_sample(run_train, capsys):
    run_train('out', '--block_size=2', '--max_steps=1', '--sample_tokens=3')
    assert '<|model|>' in capsys.readouterr().out


@pytest.mark.parametrize('content', [b'', b'garbage', {'some': 'dict'}, {'version': 99, 'model': {}}, [1, 2]])
def test_foreign_checkpoints(run_train, tmp_path, content):
    if isinstance(content, bytes): (tmp_path / 'ckpt.pt').write_bytes(content)
    else: torch.save(content, tmp_path / 'ckpt.pt')
    with pytest.raises(UserError, match='not a checkpoint') as error: run_train('out', f'--init_from={tmp_path}')
    assert '\n' not in str(error.value)


def test_data_of_another_vocabulary(run_train, small_data, tmp_path):
    run_train('out')
    other = tmp_path / 'other'
    os.makedirs(other)
    for name in os.listdir(small_data):
        with open(os.path.join(small_data, name), 'rb') as f: content = f.read()
        (other / name).write_bytes(content.replace(b'"n_tokens": 257', b'"n_tokens": 50257') if name == 'meta.json' else content)
    with pytest.raises(UserError, match='50257 tokens.*n_tokens=257'): run_train('out', f'--data_dir={other}', '--init_from=resume', '--max_steps=12')


def test_an_output_folder_that_cannot_be_made(run_train, tmp_path):
    (tmp_path / 'file').write_text('in the way')
    with pytest.raises(UserError, match='cannot be written'): run_train(os.path.join('file', 'out'))


@pytest.mark.skipif(sys.platform == 'win32', reason='POSIX signals')
@pytest.mark.parametrize('stopped', [False, True], ids=['alone', 'with Ctrl-C'])
def test_output_that_nobody_reads_any_more_loses_nothing(small_data, tmp_path, stopped):
    """Ctrl-C on `train.py | tee log` ends tee first."""
    command = [sys.executable, 'train.py', *SHAPE, *QUICK, '--max_steps=100000', '--log_interval=1', f'--data_dir={small_data}', f'--out_dir={tmp_path / "out"}']
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith('step     3'): break
    process.stdout.close()
    if stopped: process.send_signal(signal.SIGINT)
    error = process.stderr.read()
    assert process.wait(timeout=60) == 2 and error.count('\n') == 1 and '<stdout>' in error and '--init_from=resume' in error
    assert load_checkpoint(str(tmp_path / 'out'))['step'] >= 3


def test_settings_are_whole_or_those_before(run_train, tmp_path, monkeypatch):
    run_train('out')
    before = (tmp_path / 'out' / 'settings.json').read_text()
    with monkeypatch.context() as full:
        def half(value, file, **_): file.write('{"seed": 1'); raise OSError(28, 'No space left on device')
        full.setattr(train.json, 'dump', half)
        with pytest.raises(UserError, match='out: cannot be written'): run_train('out', '--init_from=resume', '--max_steps=12')
    assert (tmp_path / 'out' / 'settings.json').read_text() == before and not (tmp_path / 'out' / 'settings.json.tmp').exists()


def test_evaluating_another_folder(run_train, small_data, tmp_path, capsys):
    """By the step of its checkpoint, whatever the batch is."""
    run_train('out')
    capsys.readouterr()
    for data in [f'--data_dir={small_data}'], []:  # without: the data of that run
        train.main([f'--init_from={tmp_path / "out"}', *data, '--eval_only=True', '--eval_tokens=512', '--batch_tokens=7', '--device=cpu'])
        assert f'{tmp_path / "out"} on {small_data}, step 10: validation loss' in capsys.readouterr().out


def test_a_dry_run_plans_the_model_that_is_loaded(run_train, tmp_path, capsys):
    state = run_train('out', '--ponder=loop', '--n_kv_head=1')
    for start in 'resume', tmp_path / 'out':
        capsys.readouterr()
        train.main([f'--out_dir={tmp_path / "out"}', f'--init_from={start}', '--n_kv_head=None', '--batch_tokens=256', '--micro_batch=4', '--dry_run=True'])
        assert f"parameters  {sum(p.numel() for p in state['model'].values()) / 1e6:,.2f}M" in capsys.readouterr().out
    with pytest.raises(UserError, match='nowhere: no checkpoint'): train.main([f'--init_from={tmp_path / "nowhere"}', '--dry_run=True'])


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='needs a device that is always full')
def test_a_full_disk_while_logging_is_one_line(small_data, tmp_path):
    os.makedirs(tmp_path / 'out')
    os.symlink('/dev/full', tmp_path / 'out' / 'log.jsonl')
    refused(program(os.path.join(ROOT, 'train.py'), *SHAPE, *QUICK, f'--data_dir={small_data}', f'--out_dir={tmp_path / "out"}', ok=False), 'log.jsonl', 'No space left')
    assert load_checkpoint(str(tmp_path / 'out'))['step'] == 1  # the log's first line; what was learned is kept


@pytest.mark.parametrize('name', sorted(n for n in os.listdir(os.path.join(ROOT, 'config', 'size')) if n.endswith('.py')))
@pytest.mark.parametrize('mechanism', sorted(n for n in os.listdir(os.path.join(ROOT, 'config')) if n.endswith('.py')))
def test_every_config_makes_a_model(mechanism, name):
    from configurator import build, read
    given, rest = read([os.path.join(ROOT, 'config', mechanism), os.path.join(ROOT, 'config', 'size', name)], '', Settings, GPTConfig)
    settings, config = build(Settings, given), build(GPTConfig, given)
    assert settings.batch_tokens % (settings.micro_batch * config.block_size) == 0 and not rest
    with torch.device('meta'): parameters = sum(p.numel() for name, p in GPT(config).named_parameters() if not name.startswith('gates.'))
    papers = {'360m.py': 0.361e9, '500m.py': 0.498e9, '710m.py': 0.716e9, '1.5b.py': 1.344e9, '3b.py': 2.748e9}  # Depth-Attention paper, tables 8 and 9
    if name in papers: assert parameters == pytest.approx(papers[name], rel=0.01)
    assert settings.learning_rate > 0 and math.isfinite(settings.learning_rate)
