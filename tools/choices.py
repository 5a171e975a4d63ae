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
what tokens read of each other.
"""

import copy
import os
import statistics
import sys
from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # run from anywhere
from configurator import check_range
from engine.checkpoint import change_steps
from engine.files import UserError, run
from engine.shards import read_meta
from engine.windows import Windows
from sample import data_dir_of, open_one


@dataclass
class ChoiceSettings:
    """what to try"""
    taus: str = '0.0001,0.01,0.1,0.3,0.5'  # values of halt_tau, with commas between
    lots: int = 5                       # times that the passes are dealt out at random
    data_dir: Optional[str] = None      # whose validation set is read (None: that of its training)
    tokens: int = 32768                 # of the validation set that are read
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


@dataclass
class Deal:
    """What the gates and routers of an obedient model are told."""
    floor: float                           # no logit for going on is below: nobody stops early
    passes: Optional[torch.Tensor] = None  # (B,T): how many each token takes
    taken: int = 0                         # decisions made so far


class Told(nn.Module):
    """
    In the place of a trained gate, or a chain's router: keeps its numbers, but tokens go on as long
    as the deal says.
    """

    def __init__(self, own, deal):
        super().__init__()
        self.own = own
        self.deal = deal

    def forward(self, h):
        self.deal.taken += 1
        on = self.deal.passes[..., None] > self.deal.taken  # (B,T,1)
        logits = self.own(h).clamp(min=self.deal.floor)
        return torch.where(on, logits, -torch.inf)


class ToldAtOnce(Told):
    """
    The same for the router of 'mask', which says before the first thought how many there will be.
    """

    def forward(self, h):
        logits = self.own(h)  # (B,T,K+1)
        lowest = logits.amax(-1, keepdim=True) + self.deal.floor
        passes = torch.arange(logits.size(-1), device=h.device)
        too_many = passes >= self.deal.passes[..., None]
        return logits.clamp(min=lowest).masked_fill(too_many, -torch.inf)


def obedient(model):
    """(a copy of a halting model that takes the passes it is told, the Deal to tell it by)."""
    model = copy.deepcopy(model)
    model.config.halt_tau = 1e-37
    deal = Deal(floor=-80 / model.config.ponder_steps)  # e^-80 = 2e-35: no token stops by itself
    mechanism = model.mechanism
    if model.config.halting == 'mask':
        mechanism.router = ToldAtOnce(mechanism.router, deal)
    elif model.config.halting == 'gate':
        mechanism.gates = nn.ModuleList(Told(gate, deal) for gate in mechanism.gates)
    else:
        mechanism.router = Told(mechanism.router, deal)
        model.dense = True
    return model, deal


@torch.inference_mode()
def nats(model, rows, deal=None, passes=None):
    """
    (mean loss of rows (n,T+1), passes (n,T) that their tokens took). deal: of an obedient model,
    which is told to take `passes` (n,T).
    """
    losses, taken = [], []
    for i in range(0, len(rows), 8):
        batch = rows[i:i + 8]
        if deal is not None:
            deal.passes = passes[i:i + 8]
            deal.taken = 0
        _, loss = model(batch[:, :-1], batch[:, 1:])
        losses += [loss.item()] * len(batch)
        taken.append(model.mechanism.passes)
    return statistics.mean(losses), torch.cat(taken)


# -------------------------------------------------------------------------------------------------


def read_rows(data_dir, tokenizer, block_size, tokens, device):
    """As many windows (n,block_size+1) of the validation set as hold so many tokens."""
    windows = Windows(data_dir, 'val', read_meta(data_dir, tokenizer), block_size)
    n = min(windows.n, -(-tokens // block_size))
    return torch.from_numpy(windows.read(range(n))).to(device)


def print_taus(model, rows, s):
    """A line per halt_tau: passes, the loss as chosen, the losses of the lots."""
    other, deal = obedient(model)
    draw = torch.Generator().manual_seed(s.seed)
    for tau in s.taus.split(','):
        model.config.halt_tau = float(tau)
        _, passes = nats(model, rows)
        # the same model for chosen and lots, or 'mask' would differ by its scale
        chosen, _ = nats(other, rows, deal, passes)
        orders = [torch.randperm(passes.numel(), generator=draw) for _ in range(s.lots)]
        lots = []
        for order in orders:
            dealt = passes.flatten()[order.to(passes.device)].view_as(passes)
            loss, _ = nats(other, rows, deal, dealt)
            lots.append(loss)
        print(f"{float(tau):8g} {passes.float().mean():7.2f} {chosen:7.4f} "
              f"{statistics.mean(lots):7.4f} ({min(lots):.4f} to {max(lots):.4f})")


@torch.inference_mode()
def after_each_pass(model, rows):
    """
    When all tokens of rows (n,T+1) take 1, 2, .. K + 1 passes: each token's loss (K+1,n,T), and
    whether the right one is the likeliest (K+1,n,T).
    """
    other, deal = obedient(model) if model.mechanism.halts else (copy.deepcopy(model), None)
    losses, right = [], []
    for n in range(1, model.config.ponder_steps + 2):
        if deal is None:
            change_steps(other, n - 1)
        loss, hit = [], []
        for batch in rows.split(8):
            if deal is not None:
                deal.passes = torch.full_like(batch[:, 1:], n)
                deal.taken = 0
            logits = other(batch[:, :-1])[0]                            # (8,T,V)
            target = batch[:, 1:]
            loss.append(F.cross_entropy(logits.transpose(1, 2), target, reduction='none'))
            hit.append(logits.argmax(-1) == target)
        losses.append(torch.cat(loss))
        right.append(torch.cat(hit))
    return torch.stack(losses), torch.stack(right)


def print_everyone(model, rows):
    """A line per number of passes that all tokens take, and one of the oracle."""
    losses, right = after_each_pass(model, rows)
    print("          passes    loss  corrects  breaks")
    for n in range(1, len(losses) + 1):
        line = f"everyone {n:7d} {losses[n - 1].mean():7.4f}"
        if n > 1:
            now, before = right[n - 1], right[n - 2]
            corrects = (now & ~before).float().mean()
            breaks = (before & ~now).float().mean()
            line += f" {corrects:9.1%} {breaks:7.1%}"
        print(line)
    least = losses.min(0)
    passes = least.indices.float().mean() + 1
    print(f"oracle   {passes:7.2f} {least.values.mean():7.4f}")


def main(argv):
    s, model, tokenizer, settings = open_one(argv, __doc__, ChoiceSettings,
                                             "python tools/choices.py out/halting_router")
    config = model.config
    if model.mechanism.K == 0:
        raise UserError(f"this model has ponder={config.ponder!r} and "
                        f"ponder_steps={config.ponder_steps}: name one with several passes")
    device = model.wte.weight.device
    data_dir = s.data_dir or data_dir_of(settings)
    rows = read_rows(data_dir, tokenizer, config.block_size, s.tokens, device)
    print(f"nats per token of {rows[:, 1:].numel():,} validation tokens\n")
    if model.mechanism.halts:
        print(f"halt_tau  passes  chosen  at random (lowest to highest of {s.lots})")
        print_taus(model, rows, s)
        print()
    print_everyone(model, rows)


if __name__ == '__main__':
    run(main)
