"""The plain parts: settings, loss, parameter counts, initial weights."""
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import make

from model import GPT, ChunkedCrossEntropy, GPTConfig


@pytest.mark.parametrize('settings, words', [
    (dict(n_embd=100, n_head=3), ['n_embd=100', 'n_head=3']), (dict(n_embd=15, n_head=5), ['head_dim=3', 'odd']), (dict(n_head=15, n_kv_head=4), ['n_head=15', 'n_kv_head=4']),
    (dict(n_tokens=60000), ['n_tokens=60000', 'vocab_size=50304']), (dict(n_layer=0), ['n_layer=0', 'positive']), (dict(block_size=-1), ['block_size=-1']),
    (dict(depth_mode='mean'), ["'mean'", "'softmax'", "'uniform'"]), (dict(depth_stride=0), ['depth_stride=0']), (dict(dropout=1.0), ['dropout=1.0']), (dict(norm_eps=0.0), ['norm_eps'])])
def test_impossible_settings_are_named(settings, words):
    with pytest.raises(ValueError) as error: GPTConfig(**settings)
    assert '\n' not in str(error.value)
    for word in words: assert word in str(error.value)


def test_defaults_are_the_papers_360m():
    with torch.device('meta'): model = GPT(GPTConfig())
    assert model.num_params() == 50304 * 960 * 2 + 24 * (4 * 960 * 960 + 3 * 960 * 2560 + 2 * 960 + 2 * 64) + 960
    assert model.num_params(embeddings=False) == model.num_params() - 50304 * 960
    assert GPTConfig().init_std == pytest.approx(0.02, rel=0.03) and GPTConfig(mlp_hidden=None).mlp_hidden == 2560


def test_tied_embeddings_count_once():
    model = make(tie_embeddings=True)
    assert model.lm_head.weight is model.wte.weight
    assert model.num_params() == make().num_params() - 64 * 32 == model.num_params(embeddings=False)


def test_initial_weights():
    model = GPT(GPTConfig(vocab_size=512, n_layer=2, n_head=2, n_embd=128, mlp_hidden=256, block_size=16))
    for name, p in model.named_parameters():
        if p.dim() == 1: assert (p == 1).all()
        else: assert p.std().item() == pytest.approx(math.sqrt(0.4 / 128), rel=0.05) and abs(p.mean().item()) < 0.005, name


def reference_loss(h, weight, targets, n_tokens):
    return F.cross_entropy((h @ weight.t())[:, :n_tokens], targets, ignore_index=-1)


@pytest.mark.parametrize('chunk', [2 ** 25, 7 * 64, 1])
def test_chunked_loss_equals_plain_cross_entropy(chunk, monkeypatch):
    monkeypatch.setattr(ChunkedCrossEntropy, 'CHUNK', chunk)
    model = make()
    h = torch.randn(4, 5, 32, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 50, (4, 5))
    targets[0, :3] = -1
    results = []
    for f in (lambda: model.loss(h, targets), lambda: reference_loss(h.view(20, 32), model.lm_head.weight, targets.view(20), 50)):
        h.grad = model.lm_head.weight.grad = None
        loss = f()
        (3 * loss).backward()
        results.append((loss.detach(), h.grad, model.lm_head.weight.grad))
    for a, b in zip(*results): assert torch.allclose(a, b, atol=1e-13, rtol=1e-12)
    with torch.no_grad(): assert torch.equal(model.loss(h, targets), results[0][0])


def test_all_ignored_targets_give_zero():
    model = make()
    h = torch.randn(2, 3, 32, dtype=torch.float64, requires_grad=True)
    loss = model.loss(h, torch.full((2, 3), -1))
    loss.backward()
    assert loss == 0 and not h.grad.any()


def test_loss_never_holds_all_logits():
    """The largest tensor made in forward and backward is a chunk of the logits, or the head's own gradient."""
    from torch.utils._python_dispatch import TorchDispatchMode
    sizes = []
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor))
            return out
    weight, h = torch.randn(1024, 8, requires_grad=True), torch.randn(4096, 8, requires_grad=True)
    chunk, ChunkedCrossEntropy.CHUNK = ChunkedCrossEntropy.CHUNK, 2 ** 17
    try:
        with Watch(): ChunkedCrossEntropy.apply(h, weight, torch.randint(0, 1024, (4096,)), 1000, True).backward()
    finally: ChunkedCrossEntropy.CHUNK = chunk
    assert max(sizes) == 2 ** 17 < 4096 * 1024 / 4


def test_forward_with_and_without_targets(idx):
    model = make()
    logits, loss = model(idx)
    assert loss is None and logits.shape == (3, 13, 64)
    none, loss = model(idx, idx)
    assert none is None and loss.item() == pytest.approx(F.cross_entropy(logits[..., :50].reshape(-1, 50), idx.reshape(-1)).item(), abs=1e-12)


def test_embed_scale(idx):
    assert torch.equal(make(embed_scale=3.0).embed(idx), 3 * make().embed(idx))


def test_dropout_acts_in_training_only(idx):
    model = make(dropout=0.3)
    assert torch.equal(model(idx)[0], model(idx)[0])
    model.train()
    assert not torch.equal(model(idx)[0], model(idx)[0])
