"""
The head and the loss in parts. At vocabulary 50,304 the logits of 8 x 2048 tokens take 3.3 GB in
fp32, and so does their gradient: neither is ever whole.
"""

import math
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

LOGITS_AT_ONCE = 2 ** 25  # 134 MB in fp32


def recompute(function):
    """The same function; in backward it runs again instead of having kept its insides."""
    return partial(checkpoint, function, use_reentrant=False)


def in_parts(function, h, width):
    """function(h), for one that makes rows (n,C) of rows (n,C) by way of `width` numbers each."""
    if torch.is_grad_enabled():
        function = recompute(function)
    rows = h.reshape(-1, h.size(-1))
    parts = rows.split(max(1, LOGITS_AT_ONCE // width))
    return torch.cat([function(part) for part in parts]).view_as(h)


@torch.no_grad()
def probability_of(head, h, targets, vocab_size):
    """head(h).float().softmax(-1) at targets (..), for h (..,C), head: (n,C) -> (n,V). No grad."""
    n = max(1, LOGITS_AT_ONCE // vocab_size)
    parts = []
    all_rows = h.detach().reshape(-1, h.size(-1))
    for rows, wanted in zip(all_rows.split(n), targets.reshape(-1, 1).split(n)):
        parts.append(head(rows).float().softmax(-1).gather(1, wanted))
    return torch.cat(parts).view(targets.shape)


def chunked_cross_entropy(h, weight, targets, n_tokens):
    """
    F.cross_entropy(h @ weight[:n_tokens].T, targets) for h (N,C), weight (V,C) and targets (N,):
    the mean over all targets that are not negative; 0 if there are none.
    """
    return ChunkedCrossEntropy.apply(h, weight, targets, n_tokens, torch.is_grad_enabled())


class ChunkedCrossEntropy(torch.autograd.Function):
    """
    The gradient of the logits is softmax - onehot, known as soon as they are. So forward turns each
    chunk of logits into its share of dL/dh and dL/dW at once, and backward only scales.
    """

    @staticmethod
    def forward(ctx, h, weight, targets, n_tokens, need_grad):
        dtype = compute_dtype(h)
        wide = torch.promote_types(dtype, torch.float32)            # softmax and sums
        x, w = h.to(dtype), weight.to(dtype)                        # (N,C), (V,C)
        counts = targets >= 0                                       # (N,)
        total = torch.zeros((), dtype=wide, device=h.device)
        dh = torch.empty_like(x) if need_grad else None
        dw = torch.zeros_like(weight) if need_grad else None

        rows = max(1, LOGITS_AT_ONCE // weight.size(0))
        for first in range(0, len(x), rows):
            chunk = slice(first, first + rows)
            target = targets[chunk, None].clamp(min=0)              # (n,1)
            valid = counts[chunk, None]                             # (n,1)
            logits = (x[chunk] @ w.t()).to(wide)                    # (n,V)
            logits[:, n_tokens:] = -math.inf                        # padding of the vocabulary
            logp = logits.log_softmax(-1)
            total -= (logp.gather(1, target) * valid).sum()
            if need_grad:
                dlogits = logp.exp_()                               # in place from here: softmax
                dlogits.scatter_add_(1, target, -torch.ones_like(target, dtype=wide))  # - onehot
                dlogits = dlogits.to(dtype)
                dh[chunk] = (dlogits @ w) * valid
                dw += dlogits.t() @ (x[chunk] * valid)

        count = counts.sum().clamp(min=1)
        if need_grad:
            ctx.save_for_backward(dh, dw, count)
        return total / count

    @staticmethod
    def backward(ctx, grad):
        dh, dw, count = ctx.saved_tensors
        scale = grad / count  # not before: small probabilities would underflow in fp16
        return dh * scale, dw * scale, None, None, None


def compute_dtype(h):
    """The type that a matmul of h has here: autocast's, or its own."""
    device = h.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return h.dtype
