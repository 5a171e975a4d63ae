"""
engine/attention.py against the plain PyTorch that its docstrings name: values and gradients, for
every kind of mask.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import close

from engine import attention
from engine.attention import Group, KeyBias, attend, two_matmuls
from model import Attention

B, HD = 2, 6


def plain_attention(q, k, v, scores, dropout=0.0):
    """The docstring of `attend`; scores: added to those of q and k, -inf where nothing is read."""
    shared = q.size(1) // k.size(1)
    k, v = (t.repeat_interleave(shared, dim=1) for t in (k, v))
    weights = (q @ k.mT / math.sqrt(q.size(-1)) + scores).softmax(-1)
    return F.dropout(weights, dropout) @ v


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


@pytest.mark.parametrize('kind, S, N', [
    ('none', 7, 7),
    ('seen', 3, 7),
    ('numbers, some -inf', 3, 7),
])
def test_attention_in_model_py_equals_plain_attention(kind, S, N):
    q, k, v = random_qkv(4, 2, S, N)
    mask, scores = mask_and_scores(kind, S, N)
    close(Attention.attend(q, k, v, mask, 0.0), plain_attention(q, k, v, scores), 1e-13)


def test_a_key_bias_has_a_gradient():
    """halting='mask' learns through it."""
    q, k, v = random_qkv(4, 2, 7, 7)
    bias = torch.randn(B, 7).double()
    causal = as_scores(torch.ones(7, 7, dtype=torch.bool).tril())
    got = with_gradients(lambda bias: attend(q, k, v, KeyBias(bias)), bias)
    want = with_gradients(
        lambda bias: plain_attention(q, k, v, causal + bias[:, None, None, :]), bias)
    for a, b in zip(got, want):
        close(a, b, 1e-13)


def many_times(x, draws):
    """A batch, or a mask with one, as a batch of `draws` copies of it."""
    if isinstance(x, KeyBias):
        return KeyBias(x.bias.repeat(draws, 1))
    if torch.is_tensor(x) and x.size(0) == B:
        return x.repeat(draws, 1, 1, 1)
    return x


def check_dropped(drawn, weights, dropout):
    """Of many draws: each weight w is 0 or w / (1 - p), as often as it should be."""
    kept = weights / (1 - dropout)
    there = drawn.abs() > 1e-12
    close(drawn, torch.where(there, kept, 0.0), 0.01 if drawn.dtype == torch.bfloat16 else 1e-12)
    close(there.double().mean(0), (weights > 0) * (1 - dropout), 0.1)


@pytest.mark.parametrize('kind, S, N', [
    ('none', 7, 7),
    ('none', 1, 7),
    ('seen', 3, 7),
    ('key bias', 7, 7),
    ('groups', 7, 9),
])
def test_attend_drops_weights_as_plain_attention_does(kind, S, N):
    draws, dropout = 800, 0.3
    q, k, _ = random_qkv(4, 2, S, N, hd=9)
    v = torch.eye(N, 9).double().expand(B, 2, N, 9)     # what comes out is the weights themselves
    mask, scores = mask_and_scores(kind, S, N)
    weights = plain_attention(q, k, v, scores)
    torch.manual_seed(3)
    q, k, v, mask = (many_times(x, draws) for x in (q, k, v, mask))
    drawn = attend(q, k, v, mask, dropout)
    check_dropped(drawn.unflatten(0, (draws, B)), weights, dropout)


def test_attend_drops_other_weights_in_each_call():
    q, k, v = random_qkv(4, 2, 7, 7)
    assert not torch.equal(attend(q, k, v, dropout=0.5), attend(q, k, v, dropout=0.5))


# the kernel for CPUs

@pytest.fixture
def no_pytorch_kernel(monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("this was meant for two_matmuls")

    monkeypatch.setattr(F, 'scaled_dot_product_attention', refuse)


def of_bf16(q, k, v):
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def nearly(a, b):
    """Equal up to bf16's rounding."""
    assert a.dtype == torch.bfloat16
    assert (a.double() - b).norm() < 0.01 * b.norm()


@pytest.mark.parametrize('kind, S, N', [
    ('causal', 5, 7),
    ('causal', 512, 512),
    ('seen', 3, 7),
])
def test_two_matmuls_equals_pytorchs_attention(kind, S, N, no_pytorch_kernel):
    q, k, v = of_bf16(*random_qkv(4, 4, S, N))
    seen = torch.ones(S, N, dtype=torch.bool).tril() if kind == 'causal' else some_keys(B, S, N)
    options = dict(is_causal=True) if kind == 'causal' else dict(attn_mask=seen)

    def ours(q, k, v):
        return two_matmuls(q, k, v, scale=HD ** -0.5, **options)

    def plain(q, k, v):
        return plain_attention(q, k, v, as_scores(seen))

    got = with_gradients(ours, q, k, v)
    want = with_gradients(plain, q.double(), k.double(), v.double())
    for a, b in zip(got, want):
        nearly(a, b)


def test_two_matmuls_drops_weights():
    draws, dropout = 800, 0.3
    q, k, _ = of_bf16(*random_qkv(4, 4, 7, 7, hd=7))
    v = torch.eye(7).bfloat16().expand(B, 4, 7, 7)
    weights = two_matmuls(q, k, v, is_causal=True, scale=1.0)
    torch.manual_seed(3)
    q, k, v = (many_times(x, draws) for x in (q, k, v))
    drawn = two_matmuls(q, k, v, dropout_p=dropout, is_causal=True, scale=1.0)
    check_dropped(drawn.unflatten(0, (draws, B)), weights, dropout)


def test_a_row_that_reads_nothing_reads_everything_in_two_matmuls():
    q, k, v = of_bf16(*random_qkv(4, 4, 3, 7))
    seen = some_keys(1, 3, 7)
    seen[:, :, 1] = False
    y = two_matmuls(q, k, v, attn_mask=seen, scale=HD ** -0.5)
    nearly(y[:, :, 1], v.double().mean(2))


@pytest.mark.parametrize('what', ['fp32', 'numbers', 'no mask', 'shared heads', '513 queries'])
def test_two_matmuls_leaves_the_rest_to_pytorch(what, monkeypatch):
    q, k, v = of_bf16(*random_qkv(4, 2 if what == 'shared heads' else 4, 7, 7))
    options = dict(is_causal=True)
    if what == 'fp32':
        q, k, v = q.float(), k.float(), v.float()
    if what == 'numbers':
        options = dict(attn_mask=torch.randn(7, 7).bfloat16())
    if what == 'no mask':
        options = {}
    if what == 'shared heads':
        options = dict(is_causal=True, enable_gqa=True)
    if what == '513 queries':
        q, k, v = of_bf16(*random_qkv(4, 4, 513, 513))
    kernel, calls = F.scaled_dot_product_attention, []

    def watched(*args, **options):
        calls.append(1)
        return kernel(*args, **options)

    monkeypatch.setattr(F, 'scaled_dot_product_attention', watched)
    got = two_matmuls(q, k, v, scale=0.5, **options)
    assert len(calls) == 1
    assert torch.equal(got, kernel(q, k, v, scale=0.5, **options))


@pytest.mark.parametrize('kind, S, N', CASES)
def test_attend_with_two_matmuls_as_its_kernel(kind, S, N, monkeypatch):
    calls = []

    def watched(*args, **options):
        calls.append(1)
        return two_matmuls(*args, **options)

    monkeypatch.setattr(attention, 'kernel', watched)
    q, k, v = of_bf16(*random_qkv(4, 2, S, N))
    mask, scores = mask_and_scores(kind, S, N)
    if torch.is_tensor(mask) and mask.dtype != torch.bool:
        mask = mask.bfloat16()
        scores = mask.double()
    if isinstance(mask, KeyBias):
        mask = KeyBias(mask.bias.bfloat16())
    got = attend(q, k, v, mask)
    want = plain_attention(q.double(), k.double(), v.double(), scores)
    nearly(got, want)
    assert calls
