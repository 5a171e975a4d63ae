"""
What the choices of a halting model are worth: its validation loss, and that of the same passes
dealt out otherwise. And what any choice could be worth, of a model that does not halt too.

    python tools/choices.py out/halting_router
    python tools/choices.py out/loop
    python tools/choices.py hf:models/ponder --data_dir=data/mine-neox

Each line has one halt_tau: the mean passes per token, the loss with the passes that the model
chose, and the loss with the same numbers of passes handed out to the tokens at random. Weights stay
as they are: what differs is who gets the passes. ('mask' weighs its thoughts by the probabilities
it chooses by: those of the thoughts that are left are scaled to a sum of 1, in all columns.)

Then every token takes the same number; "corrects" is the share of tokens whose likeliest successor
becomes the right one by the last of these passes, "breaks" the share where it was right before. The
oracle knows the text: it takes for each token the number of passes, the same for all tokens, after
which the token's loss is least. No rule that only halts can do better with these weights, except by
what tokens read of each other. On a made task only the answers' characters count.
"""

import contextlib
import os
import statistics
import sys
from dataclasses import dataclass
from typing import Optional
from unittest import mock

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # run from anywhere
from configurator import check_range
from engine.answers import Progress
from engine.checkpoint import change_steps
from engine.files import UserError, run, table
from engine.loss import in_parts
from engine.shards import read_meta
from engine.windows import Windows
from sample import data_dir_of, open_one


@dataclass
class ChoiceSettings:
    """what to try"""
    taus: str = '0.0001,0.1,0.5'        # values of halt_tau, with commas between
    lots: int = 3                       # times that the passes are dealt out at random
    data_dir: Optional[str] = None      # whose validation set is read (None: that of its training)
    tokens: int = 8192                  # of the validation set that are read
    seed: int = 1337                    # of the dealing
    device: Optional[str] = None        # 'cpu', 'cuda', 'mps' (None: the best there is)

    def __post_init__(self):
        check_range(self, 0, 2 ** 31 - 1, 'seed')
        if self.lots < 1 or self.tokens < 1:
            raise ValueError("lots and tokens must be at least 1")
        try:
            right = all(0 < float(tau) <= 1 for tau in self.taus.split(','))
        except ValueError:
            right = False
        if not right:
            raise ValueError(f"taus={self.taus}: give numbers above 0 and up to 1, with commas "
                             "between")


# -------------------------------------------------------------------------------------------------
# A model that takes the passes it is told


@contextlib.contextmanager
def told(model, passes):
    """In here a halting model takes so many passes (B,T), whatever its gates or router say."""
    mechanism, config = model.mechanism, model.config
    k = torch.arange(mechanism.K + 1, device=passes.device)
    taken = k < passes[..., None]                                   # (B,T,K+1): who takes pass k
    taus = torch.where(taken, -1.0, 2.0)        # all probabilities reach the one, none the other
    after, route = mechanism.after, getattr(mechanism, 'route', None)

    def after_told(gpt, state, x, h, k):
        config.halt_tau = taus[..., min(k + 1, mechanism.K)]
        return after(gpt, state, x, h, k)

    def route_told(h):      # 'mask': its router says at once how many thoughts there will be
        s = route(h)[0] * taken
        s = s / s.sum(-1, keepdim=True)
        return s, s.flip(-1).cumsum(-1).flip(-1).log()

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(config, 'halt_tau', taus))
        stack.enter_context(mock.patch.object(model, 'dense', True))    # all tokens in all passes
        stack.enter_context(mock.patch.object(mechanism, 'after', after_told))
        if route is not None:
            stack.enter_context(mock.patch.object(mechanism, 'route', route_told))
        yield


def best(gpt, h):
    """The likeliest tokens (n,1) after hidden states (n,C)."""
    return gpt.head(h).argmax(-1, keepdim=True)


@torch.inference_mode()
def read(model, inputs, targets, passes=None, progress=Progress()):
    """
    (losses (n,T), whether the likeliest token is the right one (n,T), passes (n,T) that were taken)
    of inputs and targets (n,T). passes: those that a halting model is told to take.
    """
    losses, right, taken = [], [], []
    for i in range(0, len(inputs), 8):
        some = slice(i, i + 8)
        with told(model, passes[some]) if passes is not None else contextlib.nullcontext():
            h = model.hidden(inputs[some])
        losses.append(model.nats(h, targets[some]))
        right.append(in_parts(best, model, h)[..., 0] == targets[some])
        if model.mechanism.halts:
            taken.append(model.mechanism.passes)
        progress(f"{i + 8} of {len(inputs)} windows")
    return torch.cat(losses), torch.cat(right), torch.cat(taken) if taken else None


# -------------------------------------------------------------------------------------------------


def print_taus(model, inputs, targets, s):
    """A line per halt_tau: passes, the loss as chosen, the losses of the lots."""
    counts = targets >= 0
    draw = torch.Generator().manual_seed(s.seed)
    rows = []
    for tau in s.taus.split(','):
        model.config.halt_tau = float(tau)
        *_, passes = read(model, inputs, targets)
        # told for chosen and lots alike, or 'mask' would differ by its scale
        chosen = read(model, inputs, targets, passes)[0][counts].mean()
        lots = []
        for _ in range(s.lots):
            order = torch.randperm(int(counts.sum()), generator=draw).to(passes.device)
            dealt = passes.clone()
            dealt[counts] = passes[counts][order]
            lots.append(read(model, inputs, targets, dealt)[0][counts].mean().item())
        rows.append([tau, f"{passes[counts].float().mean():.2f}", f"{chosen:.4f}",
                     f"{statistics.mean(lots):.4f}", f"{min(lots):.4f} to {max(lots):.4f}"])
    print(table(['halt_tau', 'passes', 'chosen', 'at random', 'lowest to highest'], rows), '\n',
          flush=True)


def after_each_pass(model, inputs, targets):
    """
    When all tokens take 1, 2, .. K + 1 passes: each counted token's loss (K+1,N), and whether the
    right one is the likeliest (K+1,N).
    """
    counts = targets >= 0
    K = model.mechanism.K
    losses, right = [], []
    for n in range(1, K + 2):
        passes = None
        if model.mechanism.halts:
            passes = torch.full_like(inputs, n)
        else:
            change_steps(model, n - 1)
        loss, hit, _ = read(model, inputs, targets, passes)
        losses.append(loss[counts])
        right.append(hit[counts])
    model.config.ponder_steps = K
    return torch.stack(losses), torch.stack(right)


def print_everyone(model, inputs, targets):
    """A line per number of passes that all tokens take, and one of the oracle."""
    losses, right = after_each_pass(model, inputs, targets)
    rows = []
    for n in range(1, len(losses) + 1):
        row = [f"everyone {n}", f"{losses[n - 1].mean():.4f}", '', '']
        if n > 1:
            now, before = right[n - 1], right[n - 2]
            row[2] = f"{(now & ~before).float().mean():.1%}"
            row[3] = f"{(before & ~now).float().mean():.1%}"
        rows.append(row)
    least = losses.min(0)
    passes = least.indices.float().mean() + 1
    rows.append([f"oracle {passes:.2f}", f"{least.values.mean():.4f}", '', ''])
    print(table(['passes', 'loss', 'corrects', 'breaks'], rows))


def main(argv):
    s, model, tokenizer, settings = open_one(argv, __doc__, ChoiceSettings,
                                             "python tools/choices.py out/halting_router")
    config = model.config
    if model.mechanism.K == 0:
        raise UserError(f"this model has ponder={config.ponder!r} and "
                        f"ponder_steps={config.ponder_steps}: name one with several passes")
    data_dir = s.data_dir or data_dir_of(settings)
    windows = Windows(data_dir, 'val', read_meta(data_dir, tokenizer), config.block_size)
    n = min(windows.n, -(-s.tokens // config.block_size))
    inputs, targets = windows.get(range(n), model.wte.weight.device)
    print(f"nats per token of {int((targets >= 0).sum()):,} validation tokens\n", flush=True)
    if model.mechanism.halts:
        print_taus(model, inputs, targets, s)
    print_everyone(model, inputs, targets)


if __name__ == '__main__':
    run(main)
