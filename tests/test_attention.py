"""
engine/attention.py against the plain PyTorch that its docstrings name: values and gradients, for
every kind of mask; and its kernel for CPUs.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import close

from engine import attention
from engine.attention import Group, KeyBias, attend, two_matmuls

B, HD = 2, 6


def plain_attention(q, k, v, scores):
    """The docstring of `attend`; scores: added to those of q and k, -inf where nothing is read."""
    shared = q.size(1) // k.size(1)
    k, v = (t.repeat_interleave(shared, dim=1) for t in (k, v))
    weights = (q @ k.mT / math.sqrt(q.size(-1)) + scores).softmax(-1)
    return weights @ v


def random_qkv(nh, nkv, S, N, hd=HD):
    """q (B,nh,S,hd), and k and v (B,nkv,N,hd)."""
    torch.manual_seed(0)
    q = torch.randn(B, nh, S, hd).double()
    k, v = torch.randn(2, B, nkv, N, hd).double()
    return q, k, v


def with_gradients(function, *inputs):
    """function(*inputs), and the gradients of a weighted sum of what it returns."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def as_scores(seen):
    """True, False -> 0, -inf"""
    return torch.zeros(seen.shape).double().masked_fill(~seen, -math.inf)


def some_keys(batch, S, N):
    """(batch,1,S,N) bool: about half of the keys, the first one always."""
    seen = torch.rand(batch, 1, S, N, generator=torch.Generator().manual_seed(2)) < 0.5
    seen[..., 0] = True
    return seen


def mask_and_scores(kind, S, N):
    """A mask as `attend` takes it, and the same as numbers to add (.., S, N)."""
    causal = as_scores(torch.ones(S, N, dtype=torch.bool).tril())
    numbers = torch.randn(B, 1, S, N, generator=torch.Generator().manual_seed(1)).double()
    if kind == 'none':
        return None, causal if S > 1 else torch.zeros(1, N).double()
    if kind == 'seen':
        seen = some_keys(B, S, N)
        return seen, as_scores(seen)
    if kind == 'seen by all rows':
        seen = some_keys(1, S, N)
        return seen, as_scores(seen)
    if kind == 'numbers':
        return numbers, numbers
    if kind == 'numbers, some -inf':
        numbers = numbers + as_scores(some_keys(B, S, N))
        return numbers, numbers
    if kind == 'key bias':
        bias = numbers[:, 0, 0]                                         # (B,N)
        return KeyBias(bias), causal + bias[:, None, None, :]
    if kind == 'key bias, some -inf':
        bias = numbers[:, 0, 0].clone()
        bias[:, 2] = -math.inf
        return KeyBias(bias), causal + bias[:, None, None, :]
    groups, scores = [], torch.full((S, N), -math.inf).double()
    for first, end, keys in ((0, 2, 3), (2, 6, 5), (6, 7, N)):
        seen = some_keys(1, end - first, keys)[0, 0]
        groups.append(Group(n_keys=keys, seen=seen))
        scores[first:end, :keys] = as_scores(seen)
    return groups, scores


# the mask, queries, keys
CASES = [
    ('none', 7, 7),
    ('none', 5, 7),
    ('none', 1, 7),
    ('seen', 3, 7),
    ('seen', 1, 7),
    ('seen by all rows', 3, 7),
    ('seen by all rows', 1, 7),
    ('numbers', 7, 7),
    ('numbers, some -inf', 3, 7),
    ('numbers, some -inf', 1, 7),
    ('key bias', 7, 7),
    ('key bias', 1, 1),
    ('key bias, some -inf', 7, 7),
    ('groups', 7, 9),
]


@pytest.mark.parametrize('kind, S, N', CASES)
@pytest.mark.parametrize('nkv', [2, 4])
def test_attend_equals_plain_attention(kind, S, N, nkv):
    q, k, v = random_qkv(4, nkv, S, N)
    mask, scores = mask_and_scores(kind, S, N)
    got = with_gradients(lambda q, k, v: attend(q, k, v, mask), q, k, v)
    want = with_gradients(lambda q, k, v: plain_attention(q, k, v, scores), q, k, v)
    for a, b in zip(got, want):
        close(a, b, 1e-13)


def bf16(*tensors):
    return [t.bfloat16() for t in tensors]


def nearly(a, b):
    """Equal up to bf16's rounding."""
    assert (a.double() - b).norm() < 0.01 * b.norm()


@pytest.mark.parametrize('kind, S, N', CASES)
def test_attend_with_two_matmuls_as_its_kernel(kind, S, N, monkeypatch):
    """Whatever `attend` hands to PyTorch's kernel, it may hand to this one."""
    monkeypatch.setattr(attention, 'kernel', two_matmuls)
    q, k, v = bf16(*random_qkv(4, 2, S, N))
    mask, scores = mask_and_scores(kind, S, N)
    if kind.startswith('numbers'):
        [mask] = bf16(mask)
        scores = mask.double()
    nearly(attend(q, k, v, mask), plain_attention(q.double(), k.double(), v.double(), scores))


@pytest.mark.parametrize('what', ['causal', 'seen', 'fp32', 'numbers', 'no mask', 'shared heads'])
def test_two_matmuls_equals_pytorchs_attention(what):
    """Where it computes itself, the first two, and where it must not."""
    inputs = random_qkv(4, 2 if what == 'shared heads' else 4, 7, 7)
    inputs = [x.float() for x in inputs] if what == 'fp32' else bf16(*inputs)
    mask, options = None, dict(is_causal=True)
    if what in ('seen', 'numbers'):
        mask, options = some_keys(B, 7, 7), {}
    if what == 'numbers':
        mask = as_scores(mask)
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


def test_a_row_that_reads_nothing_reads_everything_in_two_matmuls():
    """Such as padding: NaN would spread from it."""
    q, k, v = bf16(*random_qkv(4, 4, 3, 7))
    seen = some_keys(1, 3, 7)
    seen[:, :, 1] = False
    y = two_matmuls(q, k, v, attn_mask=seen, scale=HD ** -0.5)
    nearly(y[:, :, 1], v.double().mean(2))


@pytest.mark.parametrize('kernel, dtype, tol', [
    (None, torch.float64, 1e-12),
    (two_matmuls, torch.bfloat16, 0.01),
])
def test_dropout_drops_weights(kernel, dtype, tol, monkeypatch):
    """Of many draws: each weight w is 0 or w / (1 - p), as often as it should be."""
    monkeypatch.setattr(attention, 'kernel', kernel)
    draws, p = 800, 0.3
    q, k, _ = random_qkv(4, 4, 7, 7, hd=7)
    v = torch.eye(7).expand(B, 4, 7, 7)     # what comes out is the weights themselves
    q, k, v = (x.to(dtype) for x in (q, k, v))
    weights = attend(q, k, v)
    torch.manual_seed(3)
    many = [x.repeat(draws, 1, 1, 1) for x in (q, k, v)]
    drawn = attend(*many, dropout=p).unflatten(0, (draws, B))
    kept = drawn.abs() > 1e-12
    close(drawn, torch.where(kept, weights / (1 - p), 0.0), tol)
    close(kept.double().mean(0), (weights > 0) * (1 - p), 0.1)
