"""
Attention kernels: `attend` computes softmax(q k^T / sqrt(hd) + mask) v in the way that is fastest
for its arguments. docs/performance.md has what some of these ways gain.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

kernel = None  # engine/hardware.py: what to use in the place of PyTorch's own


@dataclass
class KeyBias:
    """A mask: causal, and a number for each key that is added to all scores against it."""
    bias: torch.Tensor                                              # (B,S)


@dataclass
class Group:
    """Part of a mask: some queries read the first n_keys keys, and of these the ones `seen`."""
    n_keys: int
    seen: torch.Tensor                                              # (queries, keys), bool


def attend(q, k, v, mask=None, dropout=0.0):
    """
    Attention.attend of model.py, for more kinds of mask: q (B,nh,S,hd), k and v (B,nkv,N,hd) ->
    (B,nh,S,hd).

    mask    None        query i of S reads the keys 0 .. i; a single query reads all there are
            a tensor    (B or 1, 1, S, N): True where a key is read, or numbers added to the scores
            KeyBias     causal, with a number for each key
            [Group, ..] the first queries, the next, ..: each group with its own keys
    """
    B, nh, S, hd = q.shape
    nkv, width = k.size(1), v.size(-1)
    run = partial(kernel or F.scaled_dot_product_attention, dropout_p=dropout, scale=hd ** -0.5)
    if isinstance(mask, torch.Tensor) and mask.is_floating_point():
        mask = mask.to(q.dtype)
    if isinstance(mask, KeyBias):
        q, k, v = with_key_bias(q, k, v, mask.bias)
        mask = None

    if S == 1 and not isinstance(mask, list):  # query heads of one key head become the query axis
        y = run(q.reshape(B, nkv, nh // nkv, -1), k, v, attn_mask=mask)
        return y.reshape(B, nh, 1, -1)[..., :width]
    if nh > nkv and must_repeat(q, mask):
        k = k.repeat_interleave(nh // nkv, dim=1)
        v = v.repeat_interleave(nh // nkv, dim=1)
    if isinstance(mask, list):
        return attend_in_groups(run, q, k, v, mask)
    y = run(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=nh > k.size(1))
    return y[..., :width]


def must_repeat(q, mask):
    """
    Whether to repeat the keys that heads share. With enable_gqa, PyTorch has a fused kernel on CUDA
    only for bf16 without a mask tensor; else it would hold all scores at once.
    """
    return mask is not None or (q.is_cuda and q.dtype != torch.bfloat16)


def attend_in_groups(run, q, k, v, groups):
    """One group of queries at a time, each with only the keys it may read."""
    parts = []
    for queries, group in zip(q.split([len(g.seen) for g in groups], dim=2), groups):
        keys, values = k[:, :, :group.n_keys], v[:, :, :group.n_keys]
        parts.append(run(queries, keys, values, attn_mask=group.seen))
    return torch.cat(parts, dim=2)


def with_key_bias(q, k, v, bias):
    """
    q, k and v with 8 more dimensions, so that q' k'^T = q k^T + sqrt(hd) bias: every query gets a
    1, key s gets sqrt(hd) bias[s]. The first hd dimensions of the result are those of attention
    with the mask (B,1,S,S) that is causal plus bias (B,S). Flash kernels take no mask tensor, but
    they do take this, if widths are multiples of 8: so the other 7 dimensions are 0.
    """
    hd = k.size(-1)
    column = (bias * hd ** 0.5).to(k.dtype)[:, None, :, None]       # (B,1,S,1)
    column = column.expand(*k.shape[:3], 1)                         # (B,nkv,S,1)
    q = F.pad(F.pad(q, (0, 1), value=1.0), (0, 7))
    k = F.pad(torch.cat((k, column), dim=-1), (0, 7))
    return q, k, F.pad(v, (0, 8))


def two_matmuls(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                enable_gqa=False):
    """
    F.scaled_dot_product_attention for CPUs. In bf16 two matmuls with all scores between them are
    faster until the scores leave the caches: up to 512 queries. PyTorch's own form of these looks
    for rows that read nothing; here such a row would read everything. All other cases go to
    PyTorch's kernel.
    """
    bool_mask = attn_mask is not None and attn_mask.dtype == torch.bool
    fits = q.dtype == torch.bfloat16 and q.size(2) <= 512 and not enable_gqa
    if not fits or not (is_causal or bool_mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal,
                                              scale=scale, enable_gqa=enable_gqa)
    seen = attn_mask
    if is_causal:
        seen = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril()
    added = torch.zeros(seen.shape, dtype=q.dtype)
    added.masked_fill_(~seen, torch.finfo(q.dtype).min)
    weights = (q * scale @ k.mT).add_(added).softmax(-1)
    return F.dropout(weights, dropout_p) @ v
