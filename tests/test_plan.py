"""The dry run: its numbers against what was measured, in a folder without data."""
import json
import os
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, save, slow_but
from torch._subclasses.fake_tensor import FakeTensorMode

import train
from configurator import build, read
from engine.build import without_numbers
from engine.files import UserError
from engine.flops import flops_per_token
from engine.hardware import Ranks
from engine.plan import LiveBytes, activations, memory, planned_dtype
from engine.prepare import recompute_blocks
from model import GPT, GPTConfig
from train import Settings, Trainer, make_optimizer

SIZES = os.path.join(ROOT, 'config', 'size')
CPU = torch.device('cpu')


@pytest.fixture
def dry_run(tmp_path, monkeypatch, capsys):
    """Run train.py --dry_run=True in a folder without data; returns what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(*args):
        train.main([*args, '--dry_run=True'])
        return capsys.readouterr().out
    return run


# ---- memory --------------------------------------------------------------------------------------

def test_memory_is_what_the_allocator_says(small_data, tmp_path):
    """
    Two real steps under PyTorch's profiler, which sees every block that its allocator hands out or
    takes back.
    """
    args = [os.path.join(SIZES, 'tiny.py'), f'--data_dir={small_data}', '--device=cpu',
            '--dtype=float32']
    given, _ = read(args, '', Settings, GPTConfig)
    s = build(Settings, given)
    s.batch_tokens = s.micro_batch * given['block_size']
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        trainer = Trainer(s, given, None, Ranks(0, 1), CPU)
        trainer.model.train()
        for _ in range(2):
            trainer.train_step()
    trace = tmp_path / 'trace.json'
    profile.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())['traceEvents']
    allocated = [e['args']['Total Allocated'] for e in events if e['name'] == '[memory]']
    planned = memory(trainer.config, s, torch.float32)
    assert sum(planned.values()) == pytest.approx(max(allocated), rel=0.15)


def planned_as_if_run(checkpointed, **settings):
    """What is planned for a small model is what real tensors take."""
    config = GPTConfig(vocab_size=320, block_size=64, n_head=4, n_embd=64, mlp_hidden=128,
                       **settings)
    s = Settings(micro_batch=4, batch_tokens=256, device='cpu', checkpoint_activations=checkpointed)
    planned = memory(config, s, torch.bfloat16)['activations']

    with LiveBytes() as live:  # real numbers
        model = GPT(config).train()
        if checkpointed:
            recompute_blocks(model)
        before = live.now
        x = torch.zeros(4, 64, dtype=torch.long)
        with torch.autocast('cpu', torch.bfloat16):
            _, loss = model(x, x)
        loss.backward()
    assert planned == pytest.approx(live.peak - before, rel=1e-3)


@pytest.mark.parametrize('checkpointed', [False, True])
def test_a_deep_stack_is_planned_as_if_it_were_run(checkpointed):
    planned_as_if_run(checkpointed, n_layer=10, depth_attn=True)


def of_one_pass_more(ponder, steps, **settings):
    """What a pass more keeps, in multiples of a block's input."""
    s = Settings(micro_batch=4, batch_tokens=256, **settings)
    few = GPTConfig(vocab_size=64, block_size=64, n_layer=8, n_head=4, n_embd=64, mlp_hidden=64,
                    ponder=ponder, ponder_steps=steps)
    bytes_of = [activations(config, s, torch.float32, True)
                for config in (few, replace(few, ponder_steps=steps + 1))]
    return (bytes_of[1] - bytes_of[0]) / (8 * 4 * 64 * 64 * 4)


@pytest.mark.parametrize('ponder', slow_but(['loop'], ['loop', 'embedding']))
def test_blocks_that_run_again_keep_their_inputs_alone(ponder):
    """The keys and values of a pass, which no other reads, would be four times as much."""
    assert 1 <= of_one_pass_more(ponder, 4, checkpoint_activations=True) < 1.5


def test_norms_on_a_gpu_keep_their_input_alone():
    config = GPTConfig(vocab_size=320, block_size=64, n_layer=4, n_head=4, n_embd=64,
                       mlp_hidden=128)
    cpu, gpu = [Settings(micro_batch=4, device=device) for device in ('cpu', None)]
    on_cpu, on_gpu = [activations(config, s, torch.float32, True) for s in (cpu, gpu)]
    # numbers per token: x / rms(x), and 1 / rms(x), of the two norms and of 4 queries and 4 keys
    layer = 2 * (64 + 1) + 2 * 4 * (16 + 1)
    assert on_cpu - on_gpu == (config.n_layer * layer + 64 + 1) * 4 * (4 * 64)


def test_the_loss_takes_less_than_a_third_of_full_logits():
    """Forward and backward, at GPT-2's vocabulary."""
    with FakeTensorMode(), LiveBytes() as live:
        model = GPT(GPTConfig(vocab_size=50304, n_layer=1, n_head=2, n_embd=64, mlp_hidden=64))
        h = torch.zeros(8, 2048, 64, requires_grad=True)
        y = torch.zeros(8, 2048, dtype=torch.long)
        before = live.now
        model.loss(h, y).backward()
    assert live.peak - before < 8 * 2048 * 50304 * 4 / 3    # bytes in fp32


def test_no_step_of_embedding_keeps_its_probabilities():
    s = Settings(micro_batch=16, batch_tokens=16 * 512)
    one_step = GPTConfig(vocab_size=8192, block_size=512, n_layer=2, n_head=2, n_embd=64,
                         mlp_hidden=64, ponder='embedding', ponder_steps=1)
    three_steps = replace(one_step, ponder_steps=3)
    one, three = [activations(config, s, torch.float32, True)
                  for config in (one_step, three_steps)]
    assert three - one < 16 * 512 * 8192 * 4  # (B,T,V) in fp32


def test_frozen_weights_have_neither_gradients_nor_moments():
    config = GPTConfig(vocab_size=320, block_size=64, n_layer=2, n_head=2, n_embd=64, mlp_hidden=64,
                       ponder='loop', halting='ouro', ouro_stage=2)
    s = Settings(micro_batch=4, batch_tokens=512, device='cpu')
    parts = memory(config, s, torch.float32)
    assert parts['gradients'] == 4 * (64 + 1)       # of the gate
    assert parts['optimizer'] == 2 * parts['gradients']
    ramp = memory(replace(config, halting='exit', exit_loss='ramp'), s, torch.float32)
    assert parts['activations'] < 0.5 * ramp['activations']


def test_muon_keeps_one_moment_where_adamw_keeps_two():
    config = GPTConfig(vocab_size=320, block_size=64, n_layer=2, n_head=2, n_embd=64, mlp_hidden=64)
    s = Settings(micro_batch=4, batch_tokens=256, device='cpu', optimizer='muon')
    model = GPT(config)
    optimizer = make_optimizer(s, model, CPU)
    model(torch.zeros(4, 64, dtype=torch.long), torch.zeros(4, 64, dtype=torch.long))[1].backward()
    optimizer.step()
    held = [moment for state in optimizer.state.values() for moment in state.values()]
    moments = sum(moment.nbytes for moment in held if moment.dim())     # no step counts
    assert memory(config, s, torch.float32)['optimizer'] == moments < 8 * model.num_params()


# ---- what is printed -----------------------------------------------------------------------------

def test_numbers_of_a_plan(dry_run, tmp_path):
    shape = ['--n_layer=2', '--n_head=2', '--n_embd=64', '--mlp_hidden=128', '--block_size=64',
             '--micro_batch=2', '--batch_tokens=1024', '--max_steps=10_000_000_000']
    out = dry_run(*shape, '--dtype=float32')
    assert os.listdir(tmp_path) == []
    model = GPT(GPTConfig(vocab_size=320, n_tokens=257, n_layer=2, n_head=2, n_embd=64,
                          mlp_hidden=128, block_size=64))
    parameters = f'{model.num_params() / 1e6:.2f}M'
    assert f'{parameters}, vocabulary 320 (of data/python)' in out
    assert '64 GPUs' not in out  # 8 x 128 tokens per step
    flops = 1e10 * 1024 * flops_per_token(model)
    days = [f'{flops / (989e12 * 0.4 * n) / 86400:.2f}' for n in (1, 8)]
    assert cells(out, 'H100, 989 TFLOP/s') == days
    recomputed = dry_run(*shape, '--checkpoint_activations=True')
    longer = f'{4 / 3 * flops / (989e12 * 0.4) / 86400:.2f}'
    assert cells(recomputed, 'H100, 989 TFLOP/s')[0] == longer
    weights = 4 * model.num_params() / 1e9
    assert (f'weights {weights:.2f} + optimizer {2 * weights:.2f} + gradients {weights:.2f} + '
            'activations') in out

    plans = [dry_run(*shape), dry_run(*shape, '--device=cuda')]  # a GPU is planned for without one
    assert plans[0] == plans[1] != out
    with pytest.raises(UserError, match='batch_tokens=1000'):
        dry_run(*shape, '--batch_tokens=1000')
    save(tmp_path / 'out', model)
    assert f'parameters  {parameters}' in dry_run('--init_from=resume')  # of the run that is there
    assert "vocabulary 320 (the weights')" in dry_run('--init_from=resume')
    with pytest.raises(UserError, match='n_layer=24, but the model loaded has 2'):
        dry_run('--init_from=resume', '--n_layer=24')
    many = dry_run(*shape[:5], '--batch_tokens=8192', '--micro_batch=128', '--vocab_size=50304')
    twin = without_numbers(replace(model.config, vocab_size=50304))
    per_token = flops_per_token(twin, texts=128)
    assert f'{per_token / 1e6:,.1f} MFLOPs per token' in many


def test_a_run_that_goes_on_is_planned_in_the_precision_that_it_had():
    kept = {'precision': 'float32'}
    assert planned_dtype(Settings(init_from='resume'), kept) == torch.float32
    assert planned_dtype(Settings(init_from='resume', dtype='float16'), kept) == torch.float16
    assert planned_dtype(Settings(init_from='out/other'), None) == torch.bfloat16


def cells(out, row):
    return out.split(row)[1].split('\n')[0].split()


def test_a_step_for_several_gpus_alone_is_planned_for_these(dry_run, monkeypatch):
    """40 windows are five for each of 8 GPUs; one GPU would take them 16 at a time."""
    monkeypatch.setattr('engine.plan.activations', lambda *_: 0)
    out = dry_run('--batch_tokens=10240', '--micro_batch=16')
    assert 'GB per GPU, 5 x 256 tokens' in out and '1 GPU' not in out and '8 GPUs' in out
    with pytest.raises(UserError, match='batch_tokens=1000 is not a multiple'):
        dry_run('--batch_tokens=1000')


def test_a_plan_is_of_what_the_command_line_says(dry_run, monkeypatch):
    monkeypatch.setattr('engine.plan.activations', lambda *_: 0)    # to measure them takes long
    vanilla = os.path.join(ROOT, 'config', 'vanilla.py')
    assert 'parameters  2.78M' in dry_run(vanilla)
    assert '2 x 512 tokens' in dry_run(vanilla, '--block_size=512')     # micro_batch: all of a step
    out = dry_run(vanilla, os.path.join(SIZES, '360m.py'), '--vocab_size=50304')
    assert 'parameters  362.05M' in out
    one, eight, _ = [float(gigabytes) for gigabytes in cells(out, 'with shard_optimizer=True')]
    # of the optimizer's 8 bytes per parameter, each of 8 GPUs keeps one
    assert one - eight == pytest.approx(7 * 0.362, abs=0.02)


def test_a_plan_has_the_vocabulary_that_training_makes(dry_run, monkeypatch):
    monkeypatch.setattr('engine.plan.activations', lambda *_: 0)
    assert 'vocabulary 320 (of data/python)' in dry_run('--n_tokens=257')
    with pytest.raises(UserError, match='n_tokens=257 is larger than vocab_size=100'):
        dry_run('--vocab_size=100')


def test_a_plan_has_the_sequences_that_each_gpu_gets(dry_run):
    """Fewer than micro_batch, if a step has no more for so many."""
    tiny = os.path.join(SIZES, 'tiny.py')
    out = dry_run(tiny, '--batch_tokens=2048')
    assert cells(out, 'sequences at a time') == ['4', '1']
    both = [float(gigabytes) for gigabytes in cells(out, 'these settings')]
    alone = [float(cells(dry_run(tiny, '--batch_tokens=2048', f'--micro_batch={size}'),
                         'these settings')[0]) for size in (4, 1)]
    assert both == alone and both[0] > both[1]
    assert 'sequences at a time' not in dry_run(tiny)      # of one GPU, and 8 cannot share 4


def test_a_router_can_be_planned(dry_run):
    """Which skips stopped tokens in training: tensors without numbers do not say who stopped."""
    out = dry_run('--n_layer=2', '--n_head=2', '--n_embd=32', '--mlp_hidden=48', '--block_size=32',
                  '--batch_tokens=256', '--micro_batch=4', '--ponder=chain', '--halting=router')
    assert 'GB per GPU' in out
