"""The plain parts: settings, loss, parameter counts, initial weights."""
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import TOGGLES, close, make

from model import GPT, ChunkedCrossEntropy, GPTConfig, RMSNorm, rope_table


@pytest.mark.parametrize('settings, words', [
    (dict(n_embd=100, n_head=3), ['n_embd=100', 'n_head=3']), (dict(n_embd=15, n_head=5), ['head_dim=3', 'odd']), (dict(n_head=15, n_kv_head=4), ['n_head=15', 'n_kv_head=4']),
    (dict(n_tokens=60000), ['n_tokens=60000', 'vocab_size=50304']), (dict(n_layer=0), ['n_layer=0', 'positive']), (dict(block_size=-1), ['block_size=-1']),
    (dict(ponder='embedding', ponder_topk=0), ['ponder_topk=0']), (dict(depth_mode='mean'), ["'mean'", "'softmax'", "'uniform'"]), (dict(depth_stride=0), ['depth_stride=0']), (dict(dropout=1.0), ['dropout=1.0']), (dict(norm_eps=0.0), ['norm_eps'])])
def test_impossible_settings_are_named(settings, words):
    with pytest.raises(ValueError) as error: GPTConfig(**settings)
    assert '\n' not in str(error.value)
    for word in words: assert word in str(error.value)


def test_defaults_are_the_papers_360m():
    with torch.device('meta'): model = GPT(GPTConfig())
    assert model.num_params() == 50304 * 960 * 2 + 24 * (4 * 960 * 960 + 3 * 960 * 2560 + 2 * 960 + 2 * 64) + 960
    assert GPTConfig().init_std == pytest.approx(0.02, rel=0.03) and GPTConfig(mlp_hidden=None).mlp_hidden == 2560
    assert GPTConfig(n_embd=1024, n_head=16, mlp_hidden=None).mlp_hidden == 2752  # rounded up


@pytest.mark.parametrize('mode, scale', [('none', 1), ('embedding', 960 ** 0.5), ('pause', 960 ** 0.5), ('latent', 2400 ** 0.5),
                                         ('chain', 2400 ** 0.5), ('loop', 2400 ** 0.5)])
def test_pondering_starts_as_in_the_papers(mode, scale):
    assert GPTConfig(ponder=mode).embed_scale == pytest.approx(scale)
    model = GPT(GPTConfig(vocab_size=64, n_layer=8, n_head=2, n_embd=128, mlp_hidden=256, block_size=16, ponder=mode))
    for name, p in model.named_parameters():
        smaller = 4 if mode != 'none' and name.endswith('c_proj.weight') else 1  # sqrt(2 n_layer)
        if p.dim() == 2: assert p.std().item() == pytest.approx(math.sqrt(0.4 / 128) / smaller, rel=0.05), name


@pytest.mark.parametrize('halting, ponder, weight, bias', [('gate', 'embedding', 0.1, 4), ('mask', 'latent', 0.01, 0), ('router', 'chain', 0.4, 0)])
def test_halting_starts_as_in_the_papers(halting, ponder, weight, bias):
    config = GPTConfig(vocab_size=64, n_layer=1, n_head=2, n_embd=32, block_size=16, ponder=ponder, halting=halting)
    assert (config.halt_tau, config.halt_lambda, config.halt_start, config.halt_full) == (1e-4, weight, 0.4, 0.48)
    assert (config.halt_share, config.halt_beta) == (0.1, 10)
    starts = {name: p.unique().tolist() for name, p in GPT(config).named_parameters() if name.startswith(('gates.', 'router.')) and name.endswith('bias')}
    assert starts == ({f'gates.{i}.{j}.bias': [bias if j else 0] for i in range(3) for j in (0, 2)} if halting == 'gate' else {'router.bias': [bias]})


def test_tied_embeddings_count_once():
    model = make(tie_embeddings=True)
    assert model.lm_head.weight is model.wte.weight
    assert model.num_params() == make().num_params() - 64 * 32


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


@pytest.mark.parametrize('place', ['embeddings', 'attention weights', 'attention branch', 'MLP branch'])
def test_dropout_acts_at_each_of_its_places(place, idx):
    model = make(dropout=0.3, n_layer=1).train()
    block = model.h[0]
    # silent: what the other places act on is switched off, or their dropout is
    if place != 'embeddings': model.drop.p = 0.0
    if place != 'attention weights': block.attn.dropout = 0.0
    if place in ('embeddings', 'MLP branch'): torch.nn.init.zeros_(block.attn.c_proj.weight)
    if place in ('embeddings', 'attention branch', 'attention weights'): torch.nn.init.zeros_(block.mlp.c_proj.weight)
    if place == 'attention weights': block.drop.p = 0.0
    assert not torch.equal(model(idx)[0], model(idx)[0])


def test_norms_stay_in_bf16_where_autocast_widens_them(monkeypatch):
    norm = F.rms_norm
    monkeypatch.setattr(F, 'rms_norm', lambda x, shape, weight, eps: norm(x.float(), shape, weight.float(), eps))  # as on CUDA
    assert RMSNorm(8, 1e-5)(torch.ones(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_positions_are_told_apart_in_bf16():
    cos, sin = rope_table(torch.tensor([256, 257]), 8, 10000.0, torch.bfloat16)
    assert cos.dtype == sin.dtype == torch.bfloat16
    close(cos[1, 0, 0], torch.tensor(math.cos(257)), 0.01)
    close(sin[1, 0, -4], torch.tensor(math.sin(257)), 0.01)


def test_logits_are_made_a_chunk_at_a_time(idx, monkeypatch):
    monkeypatch.setattr(ChunkedCrossEntropy, 'CHUNK', 7 * 64)
    for toggle in 'embedding', 'router':
        model, rows = make(**TOGGLES[toggle]).train(), []
        head = model.head
        model.head = lambda h: rows.append(h.shape[:-1].numel()) or head(h)
        model(idx, idx)
        assert rows and max(rows) <= 7


def test_under_autocast_probabilities_and_the_heads_gradient_are_fp32(monkeypatch):
    torch.manual_seed(0)
    w, h, y = torch.randn(64, 32).requires_grad_(), torch.randn(4096, 32), torch.randint(0, 64, (4096,))
    monkeypatch.setattr(ChunkedCrossEntropy, 'CHUNK', 64 * 4)  # many chunks: in bf16 their sum would be 3 % off
    with torch.autocast('cpu', torch.bfloat16): ChunkedCrossEntropy.apply(h, w, y, 64, True).backward()
    want = torch.autograd.grad(F.cross_entropy(h @ w.t(), y), w)[0]
    assert (w.grad - want).norm() < 0.01 * want.norm()
    model, seen, softmax = make(**TOGGLES['embedding']).float(), [], torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, 'softmax', lambda t, *args: seen.append(t.dtype) or softmax(t, *args))
    with torch.autocast('cpu', torch.bfloat16): model.mixture(torch.randn(2, 8, 32))
    assert set(seen) == {torch.float32}


def test_tokens_are_drawn_in_fp32():
    logits = (torch.randn(2000, 300, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
    draw = lambda logits: make()._sample(logits, 0.7, None, 0.9, torch.Generator().manual_seed(0))
    assert torch.equal(draw(logits), draw(logits.float()))
