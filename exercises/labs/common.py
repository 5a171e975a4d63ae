"""
What the labs share: their start, a checkpoint and its text, a short training loop. Read a lab
first, this when you wonder.
"""
import os
import sys
import time

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, ROOT)  # so that a lab runs from anywhere

from configurator import build, read
from engine.files import UserError
from engine.hardware import tune_cpu
from engine.loss import token_nats
from engine.shards import open_shard, read_meta
from sample import data_dir_of, load_model

MAKE_ONE = "python train.py config/vanilla.py config/size/tiny.py"


# ---- a checkpoint and its text -------------------------------------------------------------------

def start(argv, usage, block, folders=1):
    """(the settings of `block`, the so many checkpoint folders) that arguments name."""
    given, named = read(argv, usage, block)
    if len(named) != folders:
        raise UserError(f"name {folders} checkpoint folder(s), see --help; "
                        f"make one with: {MAKE_ONE}")
    return build(block, given), named


def load_plain(folder, depth_attn=False):
    """
    (model in fp32 on the CPU, tokenizer, train.py's settings as a dict) of a checkpoint folder.
    UserError if there is none, or if its model thinks in a way that the labs do not treat.
    depth_attn=True: Depth-Attention is fine.
    """
    model, tokenizer, settings = load_model(folder, 'cpu')
    config = model.config
    if config.ponder != 'none' or (config.depth_attn and not depth_attn):
        raise UserError(
            f"{folder}: this lab needs a plain GPT, and this one has ponder={config.ponder!r}, "
            f"depth_attn={config.depth_attn}; make one with: {MAKE_ONE}")
    tune_cpu()
    return model, tokenizer, settings


def own_text(settings, split, limit, tokenizer=None):
    """
    The first `limit` tokens (n,) int64 of the 'train' or 'val' text that a checkpoint was made
    with; `settings` are its own. UserError if the text is gone, or has another tokenizer now.
    """
    folder = data_dir_of(settings)
    parts, left = [], limit
    for shard in read_meta(folder, tokenizer)[split]['shards']:
        tokens = open_shard(os.path.join(folder, shard['name']))[:left]
        parts.append(torch.from_numpy(tokens.astype('int64')))
        left -= len(tokens)
    return torch.cat(parts)


def windows(tokens, T):
    """
    Tokens (n,) cut into rows (n // T, T + 1): T inputs, and the token after each. What is left at
    the end is dropped.
    """
    if len(tokens) <= T:
        raise UserError(f"{len(tokens)} tokens are too few for one window of {T}: give more text")
    return tokens.unfold(0, T + 1, T)


# ---- losses and training -------------------------------------------------------------------------

def text_loss(model, rows):
    """Mean -log p in nats per token over rows (B, T + 1), as a tensor to differentiate."""
    _, loss = model(rows[:, :-1], rows[:, 1:])
    return loss


def loss_on(model, rows):
    """The same in eval mode, of any number of rows; a float."""
    return token_nats(model, rows).mean().item()


def warm_up(peak, steps, share=0.1):
    """`steps` learning rates: linearly up to `peak` over the first `share`, constant after."""
    n = max(1, round(share * steps))
    return [peak * min(1.0, (i + 1) / n) for i in range(steps)]


def fit(parameters, loss, rates, betas=(0.9, 0.95), weight_decay=0.1, name=''):
    """
    A fresh AdamW on `parameters`: step i minimises loss(i), a scalar tensor, with learning rate
    rates[i]; gradients are clipped to norm 1. Returns the losses before each step, a list of
    floats. With a name it reports to stderr as it goes.
    """
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=0.0, betas=betas, weight_decay=weight_decay)
    losses = []
    last_report = time.perf_counter()
    for i, rate in enumerate(rates):
        optimizer.param_groups[0]['lr'] = rate
        value = loss(i)
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(value.item())

        is_last = i + 1 == len(rates)
        if name and (is_last or time.perf_counter() - last_report > 5):
            report = f"{name}: step {i + 1}/{len(rates)}, loss {losses[-1]:.3f}"
            print(report, file=sys.stderr, flush=True)
            last_report = time.perf_counter()
    return losses
