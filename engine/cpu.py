"""Two things that cost nothing on a CPU; docs/runs/LOG.md has what they gain."""

import contextlib
import ctypes

import torch
import torch.nn.functional as F

from model import Attention


def tune_cpu():
    Attention.kernel = staticmethod(two_matmuls)

    # On Linux, let malloc keep freed blocks: the kernel would zero every new page of activations.
    with contextlib.suppress(OSError, AttributeError, TypeError):  # not Linux
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 32 * 2 ** 20)  # M_MMAP_THRESHOLD, the largest allowed
        libc.mallopt(-1, 2 ** 30)       # M_TRIM_THRESHOLD


def two_matmuls(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                enable_gqa=False):
    """
    F.scaled_dot_product_attention for CPUs. In bf16 two matmuls with all scores between them are
    faster until the scores leave the caches: up to 512 x 512 of them. PyTorch's own form of these
    looks for rows that read nothing; here such a row would read everything. All other cases go to
    PyTorch's kernel.
    """
    bool_mask = attn_mask is not None and attn_mask.dtype == torch.bool
    scores = q.size(2) * k.size(2)
    fits = q.dtype == torch.bfloat16 and scores <= 512 * 512 and not enable_gqa
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
