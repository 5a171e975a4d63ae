"""What a text costs a model: the nats of each of its tokens."""

import torch

from model import LOGITS_AT_ONCE


def read_tokens(model, idx, exact):
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
        h = read_tokens(model, part[:, :-1].clamp(min=0), exact)
        for some, targets in zip(h.split(at_once), part[:, 1:].split(at_once)):
            losses.append(model.token_losses(some, targets))
    model.train(was_training)
    return torch.cat(losses)
