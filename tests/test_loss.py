"""
What makes logits of many rows makes some at a time (some_rows_at_once of model.py): the same values
and gradients. And what a text costs (engine/score.py).
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import TOGGLES, close, make
from test_attention import with_gradients
from test_promises import few_sweeps, gradients, targets

import model as model_py
from engine import score
from engine.score import token_nats
from model import some_rows_at_once


@pytest.mark.parametrize('at_once', [2 ** 25, 4 * 16, 3 * 16, 1])
def test_some_rows_at_once_equals_the_function(at_once, monkeypatch):
    """The same value and gradients, of the weights that the function reads too."""
    monkeypatch.setattr(model_py, 'LOGITS_AT_ONCE', at_once)
    torch.manual_seed(0)
    h, w = torch.randn(2, 5, 8).double(), torch.randn(16, 8).double()
    y = torch.arange(10).view(2, 5)
    sizes = []

    def of_rows(gpt, h, y):
        sizes.append(y.numel())
        return (h @ gpt.w.T).softmax(-1) @ gpt.w * y[..., None]

    def gpt(w):
        return SimpleNamespace(w=w, config=SimpleNamespace(vocab_size=16))

    want = with_gradients(lambda h, w: of_rows(gpt(w), h, y), h, w)
    sizes.clear()
    got = with_gradients(lambda h, w: some_rows_at_once(of_rows)(gpt(w), h, y), h, w)
    for a, b in zip(got, want, strict=True):
        close(a, b, 1e-13)
    in_parts = at_once < 160
    assert max(sizes) == min(10, max(1, at_once // 16))
    assert sum(sizes) == (20 if in_parts else 10), "in backward, they are computed again"
    sizes.clear()
    with torch.no_grad():
        close(some_rows_at_once(of_rows)(gpt(w), h, y), want[0], 1e-13)
    assert sum(sizes) == 10


@pytest.mark.parametrize('name', ['plain', 'embedding', 'embedding_topk', 'gate', 'router', 'exit',
                                  'ouro'])
def test_training_is_the_same_with_few_logits_at_once(name, idx, monkeypatch):
    """Whatever a mechanism makes of logits: mixtures, confidence, and each pass's losses."""
    toggle = {**TOGGLES[name], 'halt_start': 0.4, 'halt_full': 0.6}
    model = make(**toggle).train()
    y = targets(idx)
    y[0, :5] = -1

    def results():
        model.zero_grad()
        loss = model(idx, y)[1]
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    sizes = []
    model.lm_head.register_forward_hook(lambda _, args, out: sizes.append(out.numel()))
    want, most = results(), max(sizes)
    sizes.clear()
    monkeypatch.setattr(model_py, 'LOGITS_AT_ONCE', 7 * 64)
    got = results()
    assert most == 3 * 13 * 64 and max(sizes) <= 7 * 64
    for a, b in zip(got, want, strict=True):
        close(a, b, 1e-12)


def test_the_loss_is_the_mean_where_targets_count():
    model = make()
    torch.manual_seed(0)
    h = torch.randn(2, 5, 32).double()
    y = torch.randint(0, 50, (2, 5))
    y[0, :2], y[1, 3] = -1, -5          # any negative one
    logits = model.head(h)[..., :50]
    want = F.cross_entropy(logits[y >= 0], y[y >= 0])
    close(model.loss(h, y), want, 1e-13)
    assert (model.token_losses(h, y) == 0).tolist() == (y < 0).tolist()


def test_all_ignored_targets_give_zero():
    model = make()
    h = torch.randn(2, 3, 32, dtype=torch.float64, requires_grad=True)
    value = model.loss(h, torch.full((2, 3), -1))
    value.backward()
    assert value == 0
    assert not h.grad.any()


# ---- in 16 bits ----------------------------------------------------------------------------------

def test_nats_of_a_model_in_bf16_are_fp32():
    """Or the rounding of each of them, 0.4 %, would be in every score."""
    model = make().bfloat16()
    with torch.no_grad():
        nats = model.token_losses(torch.randn(2, 5, 32).bfloat16(), torch.randint(0, 50, (2, 5)))
    assert nats.dtype == torch.float32


def test_doubt_of_a_model_in_bf16_is_fp32():
    """Or there would be none between 0 and 0.004, and halt_tau is small."""
    model = make(**TOGGLES['exit']).bfloat16()
    with torch.no_grad():
        sure = model.mechanism.confidence(model, torch.randn(2, 5, 32).bfloat16())
    assert sure.dtype == torch.float32


def test_in_parts_gradients_are_those_of_one_piece_under_autocast(idx, monkeypatch):
    model = make().float().train()
    want = gradients(model, idx, torch.bfloat16)
    monkeypatch.setattr(model_py, 'LOGITS_AT_ONCE', 64)
    for a, b in zip(gradients(model, idx, torch.bfloat16), want, strict=True):
        assert (a - b).norm() < 0.02 * b.norm()


# ---- engine/score.py -----------------------------------------------------------------------------

@pytest.mark.parametrize('name, at_once', [
    ('plain', 2 * 12 * 64), ('latent2_depth', 2 * 12 * 64), ('exit', 2 * 12 * 64),
    ('plain', 2 ** 25), ('plain', 1)])
def test_the_nats_of_a_text(name, at_once, idx, monkeypatch):
    """Of each token given those before it in its row; in eval mode, which is left again."""
    for module in model_py, score:
        monkeypatch.setattr(module, 'LOGITS_AT_ONCE', at_once)
    model = make(**few_sweeps(TOGGLES[name]))
    want = -model(idx[:, :-1])[0].log_softmax(-1).gather(-1, idx[:, 1:, None])[..., 0]
    close(token_nats(model.train(), idx, batch_size=2), want)
    assert model.training
    rows = idx.clone()
    rows[1, -4:] = -1                   # the end of a shorter row
    want[1, -4:] = 0
    close(token_nats(model, rows), want)


def test_read_exactly_means_token_by_token(idx):
    """Where at once means by iteration: few sweeps are not enough."""
    enough, few = make(ponder='latent'), make(ponder='latent', jacobi_iters=1)
    want = token_nats(enough, idx)
    close(token_nats(few, idx, exact=True), want)
    assert (token_nats(few, idx) - want).abs().max() > 1e-3
