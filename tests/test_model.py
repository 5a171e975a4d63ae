"""The plain parts: settings, parameter counts, initial weights, dropout, norms and positions."""

import math
import os

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, close, make

from configurator import build, read
from model import GPT, GPTConfig, RMSNorm, apply_rope, rope_table
from train import Settings


@pytest.mark.parametrize('settings, words', [
    (dict(n_embd=100, n_head=3), ['n_embd=100', 'n_head=3']),
    (dict(n_embd=15, n_head=5), ['head_dim=3', 'odd']),
    (dict(n_embd=960, n_head=15, n_kv_head=4), ['n_head=15', 'n_kv_head=4']),
    (dict(dropout=1.0), ['dropout=1.0', 'below 1']),
    (dict(ponder='think'), ["'think'", "'embedding'", "'pause'"]),
    (dict(ponder='embedding', ponder_topk=99999), ['ponder_topk=99999', 'n_tokens=50304']),
    (dict(ponder='latent', ponder_steps=-1), ['ponder_steps=-1', 'negative']),
    (dict(n_tokens=99, vocab_size=64), ['n_tokens=99', 'vocab_size=64']),
    (dict(ponder='loop', halting='exit', halt_start=0.8, halt_full=0.2),
     ['halt_start=0.8', 'halt_full=0.2']),
    (dict(halting='gate'), ["halting='gate'", "ponder='none'", "ponder='embedding'"]),
])
def test_impossible_settings_are_named(settings, words):
    """In one line: the user reads it."""
    with pytest.raises(ValueError) as error:
        GPTConfig(**settings)
    assert '\n' not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_the_papers_360m():
    given, _ = read([os.path.join(ROOT, 'config', 'size', '360m.py')], '', Settings, GPTConfig)
    with torch.device('meta'):
        model = GPT(build(GPTConfig, given))
    tables = 2 * 50304 * 960
    matrices = 4 * 960 * 960 + 3 * 960 * 2560
    norms = 2 * 960 + 2 * 64
    assert model.num_params() == tables + 24 * (matrices + norms) + 960
    assert GPTConfig(n_embd=960, n_head=15).mlp_hidden == 2560
    assert GPTConfig(n_embd=128, n_head=2, mlp_hidden=None).mlp_hidden == 384  # rounded up
    assert make(tie_embeddings=True).num_params() == make().num_params() - 64 * 32


@pytest.mark.parametrize('mode, scale', [
    ('none', 1),
    ('smear', 2400 ** 0.5),
    ('embedding', 960 ** 0.5),
    ('pause', 960 ** 0.5),
    ('latent', 2400 ** 0.5),
    ('chain', 2400 ** 0.5),
    ('loop', 2400 ** 0.5),
])
def test_models_start_as_in_the_papers(mode, scale):
    assert GPTConfig(n_embd=960, n_head=15, ponder=mode).embed_scale == pytest.approx(scale)
    model = GPT(GPTConfig(vocab_size=64, n_layer=8, n_head=2, n_embd=128, mlp_hidden=256,
                          block_size=16, ponder=mode))
    for name, p in model.named_parameters():
        if p.dim() == 2:
            want = math.sqrt(0.4 / 128)
            if mode != 'none' and name.endswith('c_proj.weight'):
                want /= 4                                               # sqrt(2 n_layer)
            assert p.std().item() == pytest.approx(want, rel=0.05), name
        elif name != 'mechanism.pause':
            assert (p == 1).all(), name


@pytest.mark.parametrize('halting, ponder, biases', [
    ('gate', 'embedding', {0, 4}),      # sigmoid(4): nearly all of PonderLM's step
    ('mask', 'latent', {0}),
    ('router', 'chain', {0}),
])
def test_biases_of_halting_start_as_in_the_papers(halting, ponder, biases):
    config = GPTConfig(vocab_size=64, n_layer=1, n_head=2, n_embd=32, block_size=16,
                       ponder=ponder, halting=halting)
    own = GPT(config).mechanism.named_parameters()
    starts = [p.unique().tolist() for name, p in own if name.endswith('bias')]
    assert {value for values in starts for value in values} == biases


def test_forward_with_and_without_targets(idx):
    model = make()
    logits, loss = model(idx)
    assert loss is None
    assert logits.shape == (3, 13, 64)
    none, loss = model(idx, idx)
    assert none is None
    want = F.cross_entropy(logits[..., :50].reshape(-1, 50), idx.reshape(-1))
    assert loss.item() == pytest.approx(want.item(), abs=1e-12)


@pytest.mark.parametrize('place', [
    'embeddings', 'attention weights', 'attention branch', 'MLP branch'])
def test_dropout_acts_at_each_of_its_places(place, idx):
    """In training alone. The others are silenced: their dropout is off, or what it acts on is 0."""
    model = make(dropout=0.3, n_layer=1)
    assert torch.equal(model(idx)[0], model(idx)[0])
    model.train()
    block = model.h[0]
    if place != 'embeddings':
        model.drop.p = 0.0
    if place != 'attention weights':
        model.config.dropout = 0.0      # what attention reads; the others have read it
    if place in ('embeddings', 'MLP branch'):
        torch.nn.init.zeros_(block.attn.c_proj.weight)
    if place in ('embeddings', 'attention branch', 'attention weights'):
        torch.nn.init.zeros_(block.mlp.c_proj.weight)
    if place == 'attention weights':
        block.drop.p = 0.0
    assert not torch.equal(model(idx)[0], model(idx)[0])


def test_norms_stay_in_bf16_where_autocast_widens_them(monkeypatch):
    """As on CUDA: activations in fp32 would take twice the memory."""
    norm = F.rms_norm

    def as_on_cuda(x, shape, weight, eps):
        return norm(x.float(), shape, weight.float(), eps)

    monkeypatch.setattr(F, 'rms_norm', as_on_cuda)
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    assert RMSNorm(8, 1e-5)(x).dtype == torch.bfloat16


def test_positions_are_told_apart_in_bf16():
    cos, sin = rope_table(torch.tensor([256, 257]), 8, 10000.0, torch.bfloat16)
    x = apply_rope(torch.ones(1, 2, 1, 8, dtype=torch.bfloat16), cos, sin)
    assert x.dtype == torch.bfloat16
    close(x[0, 1, 0, 0], torch.tensor(math.cos(257) - math.sin(257)), 0.02)
    close(x[0, 1, 0, 4], torch.tensor(math.cos(257) + math.sin(257)), 0.02)
