"""The dry run: its numbers against what was measured, in a folder without data."""
import json
import os

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, save
from torch._subclasses.fake_tensor import FakeTensorMode

import train
from configurator import build, read
from engine.errors import UserError
from model import GPT, GPTConfig
from engine.plan import LiveBytes, activations, memory
from train import Settings, Trainer

SIZES = os.path.join(ROOT, 'config', 'size')


@pytest.mark.parametrize('size', ['tiny', pytest.param('small', marks=pytest.mark.slow)])
def test_memory_is_what_the_allocator_says(small_data, tmp_path, size):
    """Two real steps under PyTorch's profiler, which sees every block that its allocator hands out or takes back."""
    given, _ = read([os.path.join(SIZES, f'{size}.py'), f'--data_dir={small_data}', '--device=cpu', '--dtype=float32'], '', Settings, GPTConfig)
    s = build(Settings, given)
    s.batch_tokens = s.micro_batch * given['block_size']
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        trainer = Trainer(s, given, None, 0, 1, torch.device('cpu'))
        for _ in range(2): trainer.model.train(), trainer.train_step()
    profile.export_chrome_trace(str(tmp_path / 'trace.json'))
    with open(tmp_path / 'trace.json') as f: events = json.load(f)['traceEvents']
    measured = max(event['args']['Total Allocated'] for event in events if event['name'] == '[memory]')
    assert sum(memory(trainer.config, s, torch.float32).values()) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize('checkpointed', [False, True])
def test_a_deep_stack_is_planned_as_if_it_were_run(checkpointed):
    config = GPTConfig(vocab_size=320, block_size=64, n_layer=16, n_head=4, n_embd=64, mlp_hidden=128, depth_attn=True)
    s = Settings(micro_batch=4, batch_tokens=256, checkpoint_activations=checkpointed)
    assert memory(config, s, torch.bfloat16)['activations'] == pytest.approx(activations(config, s, torch.bfloat16, False), rel=1e-3)


def test_norms_on_a_gpu_keep_their_input_alone():
    config = GPTConfig(vocab_size=320, block_size=64, n_layer=4, n_head=4, n_embd=64, mlp_hidden=128)
    cpu, gpu = (activations(config, Settings(micro_batch=4, device=device), torch.float32, True) for device in ('cpu', None))
    layer = 2 * (64 + 1) + 2 * 4 * (16 + 1)  # numbers per token: x / rms(x), and 1 / rms(x), of the two norms and of 4 queries and 4 keys
    assert cpu - gpu == (config.n_layer * layer + 64 + 1) * 4 * (4 * 64)


def test_chunked_loss_takes_less_than_a_quarter_of_full_logits():
    def peak(loss):
        with FakeTensorMode(), LiveBytes() as live:
            model = GPT(GPTConfig(vocab_size=50304, n_layer=1, n_head=2, n_embd=64, mlp_hidden=64))
            h, y = torch.zeros(8, 2048, 64, requires_grad=True), torch.zeros(8, 2048, dtype=torch.long)
            before = live.now
            loss(model, h, y).backward()
        return live.peak - before
    full = peak(lambda model, h, y: F.cross_entropy(model.head(h).flatten(0, 1), y.flatten()))
    assert full > 8 * 2048 * 50304 * 4  # logits in fp32, to begin with
    assert peak(GPT.loss) < 8 * 2048 * 50304 * 4 / 4


@pytest.mark.parametrize('name', [pytest.param(name, marks=[] if name in ('tiny.py', '3b.py') else pytest.mark.slow) for name in sorted(os.listdir(SIZES))])
def test_every_size_can_be_planned(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    train.main([os.path.join(SIZES, name), '--dry_run=True', '--vocab_size=50304'])
    out = capsys.readouterr().out
    assert os.listdir(tmp_path) == []
    for line in ('parameters', 'compute', 'tokens', 'GB per GPU', 'days at --mfu=0.4', 'H100'): assert line in out
    if name == '3b.py':  # 2.748B of the paper's table; of the optimizer's 8 bytes per parameter, each of 8 GPUs keeps one
        assert '2,748.' in out and '32,768.0M: 15,625 steps of 2,097,152' in out and 'with shard_optimizer' not in out
        gb = [float(n) for n in out.split('these settings')[1].split('\n')[0].split()]
        assert 0.9 * 80 > gb[0] > gb[1] > gb[2] > 8 * 2.748 and gb[0] - gb[1] == pytest.approx(7 * 2.748, abs=0.02)


def test_numbers_of_a_plan(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shape = ['--n_layer=2', '--n_head=2', '--n_embd=64', '--mlp_hidden=128', '--block_size=64', '--micro_batch=2', '--batch_tokens=1024', '--max_steps=10_000_000_000']
    train.main([*shape, '--dry_run=True', '--mfu=0.5', '--dtype=float32'])
    out = capsys.readouterr().out
    model = GPT(GPTConfig(vocab_size=320, n_tokens=257, n_layer=2, n_head=2, n_embd=64, mlp_hidden=128, block_size=64))
    assert f'{model.num_params() / 1e6:.2f}M, vocabulary 320 (of data/python)' in out and '64 GPUs' not in out  # 8 x 128 tokens per step
    assert [f'{1e10 * 1024 * model.flops_per_token() / (989e12 * 0.5 * n) / 86400:.2f}' for n in (1, 8)] == out.split('H100, 989 TFLOP/s')[1].split('\n')[0].split()
    weights = 4 * model.num_params() / 1e9
    assert f'weights {weights:.2f} + optimizer {2 * weights:.2f} + gradients {weights:.2f} + activations' in out
    plans = []
    for device in [], ['--device=cuda']:  # a GPU is planned for without one
        train.main([*shape, '--dry_run=True', *device])
        plans.append(capsys.readouterr().out)
    assert plans[0] == plans[1] != out
    with pytest.raises(UserError, match='batch_tokens=1000'): train.main([*shape, '--dry_run=True', '--batch_tokens=1000'])
    save(tmp_path / 'out', model)
    train.main(['--init_from=resume', '--dry_run=True'])  # of the run that is there
    assert f'parameters  {model.num_params() / 1e6:.2f}M' in capsys.readouterr().out


@pytest.mark.parametrize('halting, ponder', [('gate', 'embedding'), ('mask', 'latent'), ('router', 'chain')])
def test_what_halts_can_be_planned(tmp_path, monkeypatch, capsys, halting, ponder):
    monkeypatch.chdir(tmp_path)
    shape = ['--n_layer=2', '--n_head=2', '--n_embd=32', '--mlp_hidden=48', '--block_size=32', '--batch_tokens=256', '--micro_batch=4']
    train.main([*shape, f'--ponder={ponder}', f'--halting={halting}', '--dry_run=True'])
    assert 'GB per GPU' in capsys.readouterr().out


def test_a_tied_table_counts_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train.main(['--n_layer=2', '--n_head=2', '--n_embd=64', '--mlp_hidden=128', '--block_size=64', '--batch_tokens=512', '--tie_embeddings=True', '--dry_run=True'])
    here, full = (GPT(GPTConfig(vocab_size=V, n_layer=2, n_head=2, n_embd=64, mlp_hidden=128, tie_embeddings=True)).num_params() for V in (320, 50304))
    out = capsys.readouterr().out
    assert f'{here / 1e6:.2f}M, vocabulary 320' in out and f'{full / 1e6:.2f}M with 50,304' in out


def test_no_step_of_embedding_keeps_its_probabilities():
    s = Settings(micro_batch=16, batch_tokens=16 * 512)
    shape = dict(vocab_size=8192, block_size=512, n_layer=2, n_head=2, n_embd=64, mlp_hidden=64, ponder='embedding')
    three, one = (activations(GPTConfig(**shape, ponder_steps=n), s, torch.float32, True) for n in (3, 1))
    assert three - one < 16 * 512 * 8192 * 4  # (B,T,V) in fp32
