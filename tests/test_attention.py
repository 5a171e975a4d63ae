"""
Attention.attend against the plain PyTorch that its docstring names, values and gradients; and
engine/cpu.py, its kernel for CPUs.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import close

from engine.cpu import two_matmuls
from model import LOG_ZERO, Attention, GPTConfig, WeightedMemory

B, HD = 2, 6


def attention(nh=4, nkv=4, dropout=0.0):
    config = GPTConfig(vocab_size=8, n_embd=nh * HD, n_head=nh, n_kv_head=nkv, dropout=dropout)
    return Attention(config, layer=0)


def random_qkv(nh, nkv, S, N, hd=HD):
    """q (B,nh,S,hd), and k and v (B,nkv,N,hd)."""
    torch.manual_seed(0)
    q = torch.randn(B, nh, S, hd).double()
    k, v = torch.randn(2, B, nkv, N, hd).double()
    return q, k, v


def plain_attention(q, k, v, per_slot=1, log_w=0.0):
    """Query s, of token T - S + s, reads all keys of tokens up to its own. log_w: (B,N)."""
    S, N = q.size(2), k.size(2)
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    token_of_query = torch.arange(S) + N // per_slot - S
    reads = torch.arange(N) // per_slot <= token_of_query[:, None]
    scores = q @ k.mT / math.sqrt(q.size(-1))
    if torch.is_tensor(log_w):
        scores = scores + log_w[:, None, None]
    return scores.masked_fill(~reads, -math.inf).softmax(-1) @ v


def with_gradients(function, *inputs):
    """function(*inputs), and the gradients of a weighted sum of what it returns."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def weighted(log_w):
    """Keys and values with the channels that WeightedMemory gives them."""
    memory = WeightedMemory()
    memory.log_w = log_w
    return memory.weighted


# queries, tokens, keys of each token
CASES = [
    (7, 7, 1),          # a whole text
    (1, 7, 1),          # a new token
    (1, 1, 1),
    (3, 7, 1),          # a piece
    (7, 7, 2),          # a text in the second pass of a chain
    (1, 7, 3),
    (3, 7, 3),
    (300, 300, 2),      # groups of 256 queries
    (300, 310, 1),
    (256, 260, 2),
    (257, 260, 1),
]


@pytest.mark.parametrize('S, T, per_slot', CASES)
@pytest.mark.parametrize('nkv', [2, 4])
@pytest.mark.parametrize('weights', [False, True])
def test_attend_equals_plain_attention(S, T, per_slot, nkv, weights):
    q, k, v = random_qkv(4, nkv, S, T * per_slot)
    log_w = 0.0
    if weights:
        log_w = torch.randn(B, T * per_slot, generator=torch.Generator().manual_seed(1)).double()
        log_w[0, 1:4] = LOG_ZERO

    def got(q, k, v):
        k, v = weighted(log_w)(k, v) if weights else (k, v)
        return attention(nkv=nkv).attend(q, k, v, per_slot)

    def want(q, k, v):
        return plain_attention(q, k, v, per_slot, log_w)

    for a, b in zip(with_gradients(got, q, k, v), with_gradients(want, q, k, v)):
        close(a, b, 1e-12)


def test_a_hidden_key_has_no_weight_in_any_precision():
    """0, and not nearly 0: nor does a value come through."""
    for dtype in torch.float16, torch.bfloat16, torch.float32, torch.float64:
        q, k, v = (x.to(dtype) for x in random_qkv(4, 4, 1, 7))
        log_w = torch.zeros(B, 7)
        log_w[:, 3] = LOG_ZERO
        v[:, :, 3] = 1e4
        assert attention().attend(q, *weighted(log_w)(k, v)).abs().max() < 10


def test_later_keys_are_not_given_to_a_group_of_queries(monkeypatch):
    """Half of the work at long T: nothing would be wrong without it, only slow."""
    sizes = []

    def watched(q, k, v, *args, **options):
        sizes.append((q.size(2), k.size(2)))
        return F.scaled_dot_product_attention(q, k, v, *args, **options)

    monkeypatch.setattr(Attention, 'kernel', staticmethod(watched))
    attention().attend(*random_qkv(4, 4, 600, 1200), 2)
    assert sizes == [(256, 512), (256, 1024), (88, 1200)]
    sizes.clear()
    attention().attend(*random_qkv(4, 4, 600, 600))
    assert sizes == [(600, 600)]        # no mask: PyTorch's kernels know what causal is


# ---- engine/cpu.py -------------------------------------------------------------------------------

def bf16(*tensors):
    return [t.bfloat16() for t in tensors]


def nearly(a, b):
    """Equal up to bf16's rounding."""
    assert (a.double() - b).norm() < 0.01 * b.norm()


@pytest.mark.parametrize('S, T, per_slot', CASES)
def test_attend_with_two_matmuls_as_its_kernel(S, T, per_slot, monkeypatch):
    """Whatever `attend` hands to PyTorch's kernel, it may hand to this one."""
    monkeypatch.setattr(Attention, 'kernel', staticmethod(two_matmuls))
    q, k, v = bf16(*random_qkv(4, 2, S, T * per_slot))
    want = plain_attention(q.double(), k.double(), v.double(), per_slot)
    nearly(attention(nkv=2).attend(q, k, v, per_slot), want)


def some_keys(S, N):
    """(S,N) bool: about half of the keys, the first one always."""
    seen = torch.rand(S, N, generator=torch.Generator().manual_seed(2)) < 0.5
    seen[:, 0] = True
    return seen


@pytest.mark.parametrize('what', ['causal', 'seen', 'fp32', 'numbers', 'no mask', 'shared heads'])
def test_two_matmuls_equals_pytorchs_attention(what):
    """Where it computes itself, the first two, and where it must not."""
    inputs = random_qkv(4, 2 if what == 'shared heads' else 4, 7, 7)
    inputs = [x.float() for x in inputs] if what == 'fp32' else bf16(*inputs)
    mask, options = None, dict(is_causal=True)
    if what in ('seen', 'numbers'):
        mask, options = some_keys(7, 7), {}
    if what == 'numbers':
        mask = torch.zeros(7, 7).double().masked_fill(~mask, -math.inf)
    if what == 'no mask':
        options = {}
    if what == 'shared heads':
        options['enable_gqa'] = True

    def ours(q, k, v):
        numbers = mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype)
        return two_matmuls(q, k, v, attn_mask=numbers, scale=0.5, **options)

    def theirs(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, mask, scale=0.5, **options)

    got = with_gradients(ours, *inputs)
    want = with_gradients(theirs, *[x.double() for x in inputs])
    for a, b in zip(got, want):
        nearly(a, b)


@pytest.mark.parametrize('kernel, dtype, tol', [
    (F.scaled_dot_product_attention, torch.float64, 1e-12),
    (two_matmuls, torch.bfloat16, 0.01),
])
@pytest.mark.parametrize('per_slot', [1, 2])
def test_dropout_drops_weights(kernel, dtype, tol, per_slot, monkeypatch):
    """Of many draws: each weight w is 0 or w / (1 - p), as often as it should be."""
    monkeypatch.setattr(Attention, 'kernel', staticmethod(kernel))
    draws, p, N = 800, 0.3, 7 * per_slot
    q, k, _ = random_qkv(4, 4, 7, N, hd=N)
    v = torch.eye(N).expand(B, 4, N, N)     # what comes out is the weights themselves
    q, k, v = (x.to(dtype) for x in (q, k, v))
    module = attention(dropout=p)
    weights = module.eval().attend(q, k, v, per_slot)
    torch.manual_seed(3)
    many = [x.repeat(draws, 1, 1, 1) for x in (q, k, v)]
    drawn = module.train().attend(*many, per_slot).unflatten(0, (draws, B))
    kept = drawn.abs() > 1e-12
    close(drawn, torch.where(kept, weights / (1 - p), 0.0), tol)
    close(kept.double().mean(0), (weights > 0) * (1 - p), 0.1)
