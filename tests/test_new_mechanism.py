"""
A new mechanism is one class: the one on the page docs/architecture.md, taken from there, keeps the
promises without a change anywhere else.
"""
import importlib.util
import os
import re

import pytest
import torch
from conftest import ROOT, close, make, rows_of
from test_plan import planned_as_if_run
from test_promises import gradients
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import model as library
import train
from engine.checkpoint import change_steps
from engine.fast import FastGPT
from engine.loss import recompute_blocks
from model import GPTConfig, Memory, rope_table
from sample import load_model
from tools.explain import look

SETTINGS = dict(ponder='middle', ponder_steps=3, n_layer=6)


@pytest.fixture(autouse=True)
def middle(tmp_path, monkeypatch):
    """The code of the page, with its entry in the table, for the length of one test."""
    with open(os.path.join(ROOT, 'docs', 'architecture.md'), encoding='utf-8') as f:
        page = f.read()
    [code] = [part for part in re.findall(r'```python\n(.*?)```', page, re.S)
              if 'class Middle' in part]
    path = tmp_path / 'middle.py'
    path.write_text(code)
    monkeypatch.setattr(library, 'PONDER', dict(library.PONDER))
    spec = importlib.util.spec_from_file_location('middle', path)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def naive(model, idx):
    """Block after block, each with plain attention over what goes through it now."""
    B, T = idx.shape
    rope = rope_table(torch.arange(T), model.config.head_dim, model.config.rope_theta,
                      torch.float64)
    third = model.config.n_layer // 3
    order = [*range(third)]
    for _ in range(model.config.ponder_steps + 1):
        order += range(third, model.config.n_layer - third)
    order += range(model.config.n_layer - third, model.config.n_layer)
    x = model.embed(idx)
    for layer in order:
        memory = Memory()
        memory.begin(B, T, 'cpu')
        x = model.h[layer](x, rope, memory, None)
    return model.head(model.ln_f(x))


@pytest.mark.parametrize('steps', [0, 3])
def test_forward_is_the_naive_loop(steps, idx, kind):
    model = make(**{**SETTINGS, 'ponder_steps': steps}, kind=kind)
    close(model(idx)[0], naive(model, idx), 1e-12)


@pytest.mark.parametrize('split', [[5, 3, 1, 4], [1] * 13])
def test_cached_is_full(split, idx, kind):
    model = make(**SETTINGS, kind=kind)
    memory, parts = model.new_memory(), []
    for part in idx.split(split, dim=1):
        parts.append(model.head(model.hidden(part, memory)))
    close(torch.cat(parts, 1), model(idx)[0])


def test_rows_of_unequal_prompts_are_those_of_each_alone(kind):
    model = make(**SETTINGS, kind=kind)
    prompts = [[3, 1, 4, 1, 5, 9], [2], [7, 1, 8]]
    # engine/'s goes on past the context of 24
    rows = rows_of(model, prompts, 25 if kind is FastGPT else 10)
    for prompt, row in zip(prompts, rows):
        alone = model.generate(torch.tensor([prompt]), 10, temperature=0)[0]
        assert torch.equal(row[:len(alone)], alone)


def test_passes_are_reported():
    _, passes = next(make(**SETTINGS).stream([[3, 1, 4]], 1))
    assert passes.tolist() == [4]


@pytest.mark.parametrize('training, depth_attn', [(False, False), (True, True)])
def test_flops_are_those_that_torch_counts(training, depth_attn):
    config = GPTConfig(vocab_size=256, block_size=128, n_head=4, n_embd=128, mlp_hidden=256,
                       depth_attn=depth_attn, depth_stride=2, **SETTINGS)
    model, idx = FastGPT(config), torch.randint(0, 256, (2, 128))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        logits, loss = model(idx, idx if training else None)
        if training:
            loss.backward()
    counted = counter.get_total_flops() / idx.numel()
    assert counted == pytest.approx(model.flops_per_token(training=training), rel=0.03)


def test_gradients_are_finite_differences(idx):
    model = make(**SETTINGS).train()
    targets = torch.roll(idx, -1, 1)
    model(idx, targets)[1].backward()
    generator = torch.Generator().manual_seed(3)
    ways = []
    for p in model.parameters():
        ways.append(torch.randn(p.shape, generator=generator, dtype=p.dtype))
        assert p.grad.abs().sum() > 0
    slope = sum((p.grad * way).sum() for p, way in zip(model.parameters(), ways)).item()
    losses = []
    for by in (1e-6, -2e-6):
        with torch.no_grad():
            for p, way in zip(model.parameters(), ways):
                p += by * way
            losses.append(model(idx, targets)[1].item())
    assert slope == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-4)


def test_recomputed_blocks_change_nothing(idx):
    model = make(**SETTINGS).train()
    want = gradients(model, idx)
    recompute_blocks(model)
    for a, b in zip(gradients(model, idx), want):
        close(a, b, 1e-12)


def test_a_dry_run_plans_its_memory():
    planned_as_if_run(FastGPT, checkpointed=True, **SETTINGS)


@pytest.mark.parametrize('depth_attn', [False, True])
def test_every_pass_is_explained(depth_attn):
    model = make(**SETTINGS, depth_attn=depth_attn, depth_stride=2)
    idx = torch.tensor([3, 1, 4, 1, 5])
    seen = look(model, idx)
    assert seen.steps.tolist() == [4] * 5
    assert seen.after.shape == (4, 5, 64)
    close(seen.after[-1], seen.logits)


def test_it_trains_resumes_and_samples(small_data, tmp_path):
    shape = ['--n_layer=3', '--n_head=2', '--n_embd=32', '--mlp_hidden=48', '--block_size=32']
    run = ['--batch_tokens=64', '--micro_batch=2', '--eval_tokens=64', '--sample_tokens=2',
           f'--data_dir={small_data}', '--dtype=float32', '--device=cpu']
    out = [f'--out_dir={tmp_path / "out"}']
    train.main([*shape, *run, *out, '--ponder=middle', '--max_steps=2'])
    train.main(['--init_from=resume', *out, '--max_steps=3'])
    model, tokenizer, _ = load_model(str(tmp_path / 'out'), 'cpu')
    assert model.config.ponder == 'middle'
    change_steps(model, 1)
    [(_, passes)] = model.stream([tokenizer.encode_ordinary('def ')], 1)
    assert passes.tolist() == [2]
