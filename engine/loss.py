"""
The head and the loss in parts. At vocabulary 50,304 the logits of 8 x 2048 tokens take 3.3 GB in
fp32, and so does their gradient: neither is ever whole.
"""

import copy
import math
from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

LOGITS_AT_ONCE = 2 ** 25  # 134 MB in fp32
LOGITS_KEPT = 2 ** 22     # 17 MB: not worth computing a second time


def recompute(function):
    """The same function; in backward it runs again instead of having kept its insides."""
    return partial(checkpoint, function, use_reentrant=False)


def recompute_blocks(model):
    """Let the blocks of a model run again in backward: less memory, a third more compute."""
    for block in model.h:
        block.forward = RunsAgain(block.forward)


class RunsAgain:
    """
    In the place of a block's forward, which leaves keys and values in the memory. When it runs
    again in backward it finds a memory as it was before, and what it leaves there is for nobody.
    """

    def __init__(self, forward):
        self.forward = forward

    def __call__(self, x, rope, memory, mask):
        before, memories = with_own_dicts(memory), [memory]
        run = partial(self.run, before, memories)
        return checkpoint(run, x, rope, mask, use_reentrant=False)

    def run(self, before, memories, x, rope, mask):
        memory = memories.pop() if memories else with_own_dicts(before)
        return self.forward(x, rope, memory, mask)


def with_own_dicts(memory):
    """A copy of a memory that can be written to; the tensors in it are the same."""
    twin = copy.copy(memory)
    for name, value in vars(memory).items():
        if isinstance(value, (dict, set, list)):
            setattr(twin, name, copy.copy(value))
    return twin


def in_parts(function, gpt, h, *targets):
    """
    function(gpt, h) or function(gpt, h, targets), some rows at a time: it makes V logits of each
    row (n,C) on its way. In backward these are computed once more, if they are many.
    """
    V = gpt.config.vocab_size
    rows = [h.reshape(-1, h.size(-1)), *(t.reshape(-1) for t in targets)]
    if torch.is_grad_enabled() and len(rows[0]) * V > LOGITS_KEPT:
        function = recompute(function)
    parts = zip(*(x.split(max(1, LOGITS_AT_ONCE // V)) for x in rows))
    return torch.cat([function(gpt, *part) for part in parts]).unflatten(0, h.shape[:-1])


@torch.no_grad()
def nats_in_parts(head, h, targets, width):
    """GPT.token_losses of model.py without gradients, in parts, and only where targets count."""
    result = h.new_zeros(targets.numel(), dtype=torch.promote_types(h.dtype, torch.float32))
    for some in rows_that_count(targets.flatten()).split(max(1, LOGITS_AT_ONCE // width)):
        logits = head(h.flatten(0, -2)[some]).to(result.dtype)          # (n,V)
        result[some] = F.cross_entropy(logits, targets.flatten()[some], reduction='none')
    return result.view(targets.shape)


def rows_that_count(targets):
    return (targets >= 0).nonzero()[:, 0]


def chunked_cross_entropy(h, weight, targets, n_tokens):
    """
    GPT.loss of model.py: F.cross_entropy(h @ weight[:n_tokens].T, targets) for h (..,C), weight
    (V,C) and targets (..), the mean over all targets that are not negative; 0 if there are none.
    """
    rows, targets = h.reshape(-1, h.size(-1)), targets.reshape(-1)
    return ChunkedCrossEntropy.apply(rows, weight, targets, n_tokens, torch.is_grad_enabled())


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
        nats = torch.zeros(len(x), dtype=wide, device=h.device)     # (N,)
        dh = torch.empty_like(x) if need_grad else None
        dw = torch.zeros_like(weight) if need_grad else None

        rows = max(1, LOGITS_AT_ONCE // weight.size(0))
        for first in range(0, len(x), rows):
            chunk = slice(first, first + rows)
            target = targets[chunk, None].clamp(min=0)              # (n,1)
            counted = counts[chunk, None]                           # (n,1)
            logits = (x[chunk] @ w.t()).to(wide)                    # (n,V)
            logits[:, n_tokens:] = -math.inf                        # padding of the vocabulary
            logp = logits.log_softmax(-1)
            nats[chunk] = -logp.gather(1, target)[:, 0]
            if need_grad:
                dlogits = logp.exp_()                               # in place from here: softmax
                dlogits.scatter_add_(1, target, -torch.ones_like(target, dtype=wide))  # - onehot
                dlogits = dlogits.to(dtype)
                dh[chunk] = (dlogits @ w) * counted
                dw += dlogits.t() @ (x[chunk] * counted)

        count = counts.sum().clamp(min=1)
        if need_grad:
            ctx.save_for_backward(dh, dw, count)
        return (nats * counts).sum() / count

    @staticmethod
    def backward(ctx, grad):
        dh, dw, count = ctx.saved_tensors
        scale = grad / count  # not before: small probabilities would underflow in fp16
        return dh * scale, dw * scale, None, None, None


def compute_dtype(h):
    """The type that a matmul of h has here: autocast's, or its own."""
    device = 'cpu' if h.is_meta else h.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return h.dtype


def read(model, idx, exact):
    """The hidden states (B,T,C) of idx (B,T). exact: token by token, where at once is iteration."""
    if not exact:
        return model.hidden(idx)
    memory = model.new_memory()
    return torch.cat([model.hidden(token, memory) for token in idx.split(1, dim=1)], dim=1)


@torch.no_grad()
def token_nats(model, rows, batch_size=16, exact=False):
    """
    -log p of each token of a text given those before it in its row, in eval mode: rows (n,T+1) to
    (n,T); 0 where a token is -1, which counts for nothing. exact: read token by token.
    """
    was_training = model.training
    model.eval()
    losses = []
    at_once = max(1, LOGITS_AT_ONCE // (rows.size(1) * model.config.vocab_size))
    for part in rows.split(batch_size):
        part = part.to(model.wte.weight.device)
        h = read(model, part[:, :-1].clamp(min=0), exact)
        for some, targets in zip(h.split(at_once), part[:, 1:].split(at_once)):
            losses.append(model.token_losses(some, targets))
    model.train(was_training)
    return torch.cat(losses)
