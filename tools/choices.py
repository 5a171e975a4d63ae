"""
What the choices of a halting model are worth: its validation loss, and that of the same passes dealt out otherwise.

    python tools/choices.py out/halting_router

Each line has one halt_tau: the mean passes per token, the loss with the passes that the model chose, and the loss with the same
numbers of passes handed out to the tokens at random. The last lines give every token the same number. Weights stay as they are:
what differs is who gets the passes. ('mask' weighs its thoughts by the probabilities it chooses by: those of the thoughts that are
left are scaled to a sum of 1, in all columns.)
"""

import copy
import os
import statistics
import sys
from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn as nn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # run from anywhere
from configurator import check_range
from engine.errors import UserError, run
from engine.shards import Windows, read_meta
from model import HALTING
from sample import open_one


@dataclass
class ChoiceSettings:
    """what to try"""
    taus: str = '0.0001,0.01,0.1,0.3,0.5'  # values of halt_tau, with commas between
    lots: int = 5                       # times that the passes are dealt out at random
    tokens: int = 32768                 # of the validation set that are read
    seed: int = 1337                    # of the dealing
    device: Optional[str] = None        # 'cpu', 'cuda', 'mps' (None: the best there is)

    def __post_init__(self):
        check_range(self, 0, 2 ** 31 - 1, 'seed')
        if self.lots < 1 or self.tokens < 1: raise ValueError("lots and tokens must be at least 1")
        try: wrong = not all(0 < float(tau) <= 1 for tau in self.taus.split(','))
        except ValueError: wrong = True
        if wrong: raise ValueError(f"taus={self.taus}: give numbers above 0 and up to 1, with commas between")


class Told(nn.Module):
    """In the place of a trained gate, or a chain's router: keeps its numbers, but tokens go on as long as deal['passes'] (B,T) says."""

    def __init__(self, own, deal):
        super().__init__()
        self.own, self.deal = own, deal

    def forward(self, h):
        self.deal['taken'] += 1
        on = self.deal['passes'][..., None] > self.deal['taken']
        return torch.where(on, self.own(h).clamp(min=self.deal['floor']), -torch.inf)


class ToldAtOnce(Told):
    """The same for the router of 'mask', which says before the first thought how many there will be."""

    def forward(self, h):
        logits = self.own(h)                                            # (B,T,K+1)
        logits = logits.clamp(min=logits.amax(-1, keepdim=True) + self.deal['floor'])
        later = torch.arange(logits.size(-1), device=h.device) >= self.deal['passes'][..., None]
        return logits.masked_fill(later, -torch.inf)


def obedient(model):
    """A copy of a halting model that takes the passes it is told, and the dict by which to tell it."""
    model = copy.deepcopy(model)
    model.config.halt_tau, deal = 1e-37, {'floor': -80 / model.config.ponder_steps}  # e^-80 = 2e-35: no token stops by itself
    if model.config.halting == 'mask': model.router = ToldAtOnce(model.router, deal)
    elif model.config.halting == 'gate': model.gates = nn.ModuleList(Told(gate, deal) for gate in model.gates)
    else: model.router, model.dense = Told(model.router, deal), True
    return model, deal


@torch.inference_mode()
def nats(model, rows, deal=None, passes=None):
    """Mean loss of rows (n, T + 1) and the passes (n, T) of their tokens; `deal`: of an obedient model that is told `passes`."""
    losses, taken = [], []
    for i in range(0, len(rows), 8):
        if deal is not None: deal.update(passes=passes[i:i + 8], taken=0)
        losses += [model(rows[i:i + 8, :-1], rows[i:i + 8, 1:])[1].item()] * len(rows[i:i + 8])
        taken.append(model.steps)
    return statistics.mean(losses), torch.cat(taken)


def main(argv):
    s, model, tokenizer, settings = open_one(argv, __doc__.strip(), ChoiceSettings, "python tools/choices.py out/halting_router")
    c, device, data_dir = model.config, model.wte.weight.device, settings['data_dir']
    if model.mechanism not in HALTING.values():
        raise UserError(f"this model has halting={c.halting!r} and ponder_steps={c.ponder_steps}: name one that halts")
    val, (other, deal) = Windows(data_dir, 'val', read_meta(data_dir, tokenizer), c.block_size), obedient(model)
    rows = val.read(range(min(val.n, -(-s.tokens // c.block_size))), device).to(device)
    draw = torch.Generator().manual_seed(s.seed)
    print(f"nats per token of {rows[:, 1:].numel():,} validation tokens\n")
    print(f"halt_tau  passes  chosen  at random (lowest to highest of {s.lots})")
    for c.halt_tau in map(float, s.taus.split(',')):
        _, passes = nats(model, rows)
        loss, _ = nats(other, rows, deal, passes)  # the same model for chosen and lots, or 'mask' would differ by its scale
        orders = [torch.randperm(passes.numel(), generator=draw).to(device) for _ in range(s.lots)]
        lots = [nats(other, rows, deal, passes.flatten()[order].view_as(passes))[0] for order in orders]
        spread = f"{statistics.mean(lots):7.4f} ({min(lots):.4f} to {max(lots):.4f})"
        print(f"{c.halt_tau:8g} {passes.float().mean():7.2f} {loss:7.4f} {spread}")
    for n in range(1, c.ponder_steps + 2):
        print(f"everyone {n:7d} {nats(other, rows, deal, torch.full_like(rows[:, 1:], n))[0]:7.4f}")


if __name__ == '__main__':
    run(main)
