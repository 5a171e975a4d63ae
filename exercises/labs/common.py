"""
What the labs share: their start, a checkpoint and its text, a short training loop. Read a lab
first, this when you wonder.
"""
import copy
import os
import sys
import time

import numpy as np
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
sys.path.insert(0, ROOT)  # so that a lab runs from anywhere

from configurator import build, read
from engine.cpu import tune_cpu
from engine.files import UserError
from engine.score import token_nats
from engine.shards import encode, open_shard, read_meta
from engine.tasks import task_of
from engine.trained import data_dir_of, load_model

MAKE_ONE = (  # as in exercises/README.md
    "python train.py config/vanilla.py --n_layer=4 --n_head=2 --n_embd=128 --mlp_hidden=352 "
    "--block_size=128 --batch_tokens=512 --max_steps=600 --dtype=float32 --out_dir=out/lab")


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


def own_text(settings, split, limit, tokenizer):
    """
    The first `limit` tokens (n,) int64 of the 'train' or 'val' text that a checkpoint was made
    with; `settings` are its own. UserError if the text is gone, or has another tokenizer now, or is
    a made task's, whose questions no training predicts.
    """
    folder = data_dir_of(settings)
    meta = read_meta(folder, tokenizer)
    if task_of(meta):
        raise UserError(f"{folder} is a made task: take a checkpoint of a text")
    parts, left = [], limit
    for shard in meta[split]['shards']:
        tokens = open_shard(os.path.join(folder, shard['name']))[:left]
        parts.append(torch.from_numpy(tokens.astype('int64')))
        left -= len(tokens)
    return torch.cat(parts)


def joined(documents, tokenizer):
    """Documents (bytes) one after the other, an end-of-text behind each: tokens (n,) int64."""
    tokens = [encode(tokenizer, document) for document in documents]
    return torch.from_numpy(np.concatenate(tokens).astype(np.int64))


def windows(tokens, T):
    """
    Tokens (n,) cut into rows ((n - 1) // T, T + 1): T inputs, and the token after each. What is
    left at the end is dropped.
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


def fit(name, parameters, loss, peak, steps, warmup=0.1, betas=(0.9, 0.95), weight_decay=0.1):
    """
    A fresh AdamW on `parameters`: step i minimises loss(i), a scalar tensor. The learning rate
    rises linearly to `peak` over the share `warmup` of the steps, and stays; gradients are clipped
    to norm 1. It reports to stderr, by this name.
    """
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, betas=betas, weight_decay=weight_decay)
    rising = max(1, round(warmup * steps))
    last_report = time.perf_counter()
    for i in range(steps):
        optimizer.param_groups[0]['lr'] = peak * min(1.0, (i + 1) / rising)
        value = loss(i)
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if i + 1 == steps or time.perf_counter() - last_report > 5:
            print(f"{name}: step {i + 1}/{steps}, loss {value.item():.3f}", file=sys.stderr)
            last_report = time.perf_counter()


def tuned(name, model, rows, peak, steps, seed, **how):
    """A copy of the model after `steps` steps of `fit` on 4 of the rows (n, T + 1) each."""
    draw = torch.Generator().manual_seed(seed)
    batches = rows[torch.randint(len(rows), (steps, 4), generator=draw)]    # (steps, 4, T + 1)
    torch.manual_seed(seed)             # of dropout
    model = copy.deepcopy(model).train()
    fit(name, model.parameters(), lambda i: text_loss(model, batches[i]), peak, steps, **how)
    return model.eval()
