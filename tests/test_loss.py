"""The head and the loss in parts: each function against the plain PyTorch that it equals."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import TOGGLES, close, make
from test_attention import with_gradients

from engine import loss
from engine.fast import FastGPT
from engine.loss import chunked_cross_entropy, in_parts, recompute
from model import GPT


# the loss

@pytest.mark.parametrize('at_once', [2 ** 25, 3 * 16, 1])
def test_chunked_loss_equals_plain_cross_entropy(at_once, monkeypatch):
    monkeypatch.setattr(loss, 'LOGITS_AT_ONCE', at_once)
    torch.manual_seed(0)
    h, weight = torch.randn(10, 8).double(), torch.randn(16, 8).double()
    targets = torch.randint(0, 11, (10,))
    targets[[2, 7]] = -1

    def plain(h, w):
        return F.cross_entropy(h @ w[:11].T, targets, ignore_index=-1)

    got = with_gradients(lambda h, w: chunked_cross_entropy(h, w, targets, 11), h, weight)
    want = with_gradients(plain, h, weight)
    for a, b in zip(got, want):
        close(a, b, 1e-13)
    with torch.no_grad():
        assert torch.equal(chunked_cross_entropy(h, weight, targets, 11), got[0])


def test_all_ignored_targets_give_zero(kind):
    model = make(kind=kind)
    h = torch.randn(2, 3, 32, dtype=torch.float64, requires_grad=True)
    value = model.loss(h, torch.full((2, 3), -1))
    value.backward()
    assert value == 0
    assert not h.grad.any()


def test_under_autocast_the_heads_gradient_is_summed_in_fp32(monkeypatch):
    """Over many chunks: in bf16 the sum would be 3 % off."""
    monkeypatch.setattr(loss, 'LOGITS_AT_ONCE', 64 * 4)
    torch.manual_seed(0)
    w = torch.randn(64, 32).requires_grad_()
    h = torch.randn(4096, 32)
    y = torch.randint(0, 64, (4096,))
    with torch.autocast('cpu', torch.bfloat16):
        chunked_cross_entropy(h, w, y, 64).backward()
    [want] = torch.autograd.grad(F.cross_entropy(h @ w.t(), y), w)
    assert (w.grad - want).norm() < 0.01 * want.norm()


def test_in_fp16_a_gradient_is_scaled_before_it_is_divided():
    """By GradScaler: else the many small ones of a long text would be 0."""
    torch.manual_seed(0)
    w = 0.002 * torch.randn(64, 32)
    h = torch.randn(4096, 32).requires_grad_()
    y = torch.randint(0, 64, (4096,))
    with torch.autocast('cpu', torch.float16):
        nats = chunked_cross_entropy(h, w, y, 64)
    [got] = torch.autograd.grad(nats * 2 ** 16, h)
    [want] = torch.autograd.grad(F.cross_entropy(h @ w.t(), y), h)
    assert (got / 2 ** 16 - want).norm() < 0.01 * want.norm()


# other functions of rows

@pytest.mark.parametrize('at_once', [2 ** 25, 4 * 16, 1])
@pytest.mark.parametrize('kept', [2 ** 22, 0])
def test_in_parts_equals_the_function(at_once, kept, monkeypatch):
    """The same value and gradients, of the weights that the function reads too."""
    monkeypatch.setattr(loss, 'LOGITS_AT_ONCE', at_once)
    monkeypatch.setattr(loss, 'LOGITS_KEPT', kept)
    torch.manual_seed(0)
    h, w = torch.randn(2, 5, 8).double(), torch.randn(16, 8).double()
    sizes = []

    def gpt(w):
        return SimpleNamespace(w=w, config=SimpleNamespace(vocab_size=16))

    def mean_row(gpt, rows):
        sizes.append(rows.size(0))
        assert rows.dim() == 2
        return (rows @ gpt.w.T).softmax(-1) @ gpt.w

    want = with_gradients(lambda h, w: mean_row(gpt(w), h.flatten(0, 1)).view_as(h), h, w)
    sizes.clear()
    got = with_gradients(lambda h, w: in_parts(mean_row, gpt(w), h), h, w)
    for a, b in zip(got, want):
        close(a, b, 1e-14)
    assert max(sizes) == min(10, max(1, at_once // 16))
    assert sum(sizes) == (10 if kept else 20), "in backward, what was not kept is computed again"

    sizes.clear()
    with torch.no_grad():
        close(in_parts(mean_row, gpt(w), h), want[0], 1e-14)
    assert sum(sizes) == 10


@pytest.mark.parametrize('at_once', [2 ** 25, 4 * 64, 1])
def test_nats_in_parts_are_those_of_the_model(at_once, monkeypatch):
    """With their gradients, where there are some."""
    monkeypatch.setattr(loss, 'LOGITS_AT_ONCE', at_once)
    monkeypatch.setattr(loss, 'LOGITS_KEPT', 0)
    model = make(kind=FastGPT)
    targets = torch.randint(0, 50, (2, 5))
    targets[0, :3] = -1
    h = torch.randn(2, 5, 32).double()
    want = GPT.token_losses(model, h, targets)
    close(model.token_losses(h, targets), want.detach(), 1e-13)
    assert (want == 0).tolist() == (targets < 0).tolist()

    got = with_gradients(lambda h: model.token_losses(h, targets), h)
    for a, b in zip(got, with_gradients(lambda h: GPT.token_losses(model, h, targets), h)):
        close(a, b, 1e-13)


def test_nats_of_a_model_in_bf16_are_fp32(kind):
    """Or the rounding of each of them, 0.4 %, would be in every score."""
    model = make(kind=kind).bfloat16()
    with torch.no_grad():
        nats = model.token_losses(torch.randn(2, 5, 32).bfloat16(), torch.randint(0, 50, (2, 5)))
    assert nats.dtype == torch.float32


def test_doubt_of_a_model_in_bf16_is_fp32(kind):
    """Or there would be none between 0 and 0.004, and halt_tau is small."""
    model = make(**TOGGLES['exit'], kind=kind).bfloat16()
    with torch.no_grad():
        sure = model.mechanism.confidence(model, torch.randn(2, 5, 32).bfloat16())
    assert sure.dtype == torch.float32


def test_recompute_draws_the_same_dropout_again():
    x = torch.ones(1000, dtype=torch.float64, requires_grad=True)
    y = recompute(lambda x: F.dropout(x, 0.5))(x)
    [grad] = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, y.detach())
