"""
What halting saves, against the same model with all its steps, in one run.

    python tools/bench_halting.py                  decoding and the router's training step, tiny
    python tools/bench_halting.py config/size/small.py --repeats=7

Decisions are drawn, not learned: each token goes on to the next of up to 4 passes with the same
probability, chosen so that it takes 1.5, 2 or 3 on average. Ideal is (passes of the fixed model) /
(passes taken). The table says which share of that is reached.
"""

import os
import statistics
import sys
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)  # run from anywhere
from configurator import build
from engine.files import UserError, run
from engine.hardware import expect_new_lengths, tune_cpu
from engine.fast import FastGPT
from model import GPTConfig
from tools.bench import TrainingStep, check_counts, decode, own_loss, seconds, set_up, take_turns
from tools.bench import whole_numbers

PASSES = 4  # of the fixed models
PROMPT = 8  # tokens
MODES = {'gate': 'embedding', 'mask': 'latent', 'router': 'chain'}  # the fixed model of each


@dataclass
class HaltingSettings:
    """what to measure"""
    depths: str = '1.5,2,3'  # mean passes per token, of 4
    batches: str = '1,8'     # batch sizes for decoding
    new_tokens: int = 128    # decoded per turn; with few, the row that is done last counts for much
    repeats: int = 5         # timed turns of each candidate, after one that is not counted

    def __post_init__(self):
        check_counts(self.repeats, self.new_tokens)
        whole_numbers(self.batches, 'batches')
        if not all_between(self.depths, 1, PASSES):
            raise ValueError(f"depths={self.depths}: give numbers between 1 and 4, such as 1.5,2")


def all_between(text, low, high):
    """Whether a text such as '1.5,2' holds numbers between low and high, and nothing else."""
    try:
        return all(low <= float(word) <= high for word in text.split(','))
    except ValueError:
        return False


class Draw(nn.Module):
    """In the place of a gate or router: goes on with probability p, whatever it is shown."""

    def __init__(self, p, outcomes=0):
        super().__init__()
        self.p = p
        self.outcomes = outcomes  # 0: each call decides on one more pass. K + 1: one call on all
        self.like = nn.Parameter(torch.zeros(1))  # training expects a weight that gets a gradient

    def forward(self, h):
        """Hidden states (B,T,C) -> logits (B,T,1), or (B,T,outcomes)."""
        if not self.outcomes:
            on = torch.rand(*h.shape[:-1], 1, device=h.device) < self.p  # (B,T,1)
            return torch.where(on, 30.0, -30.0) + 0 * self.like
        on = torch.rand(*h.shape[:-1], self.outcomes - 1, device=h.device) < self.p
        depth = on.cumprod(-1).sum(-1)  # (B,T): this many in a row
        return 60.0 * nn.functional.one_hot(depth, self.outcomes) + 0 * self.like


def probability(depth, most=PASSES):
    """p with 1 + p + p^2 + .. (most terms) = depth, by halving the interval."""
    low, high = 0.0, 1.0
    for _ in range(50):
        p = (low + high) / 2
        if sum(p ** k for k in range(most)) < depth:
            low = p
        else:
            high = p
    return low


def drawn(config, depth, device):
    """A model of this config whose tokens take `depth` passes on average."""
    model = FastGPT(config).to(device)
    mechanism, p = model.mechanism, probability(depth)
    if config.halting == 'gate':
        mechanism.gates = nn.ModuleList(Draw(p) for _ in mechanism.gates)
    elif config.halting == 'mask':
        mechanism.router = Draw(p, config.ponder_steps + 1)
    else:
        mechanism.router = Draw(p)
    return model.to(device)


def make_models(setup, halting, **settings):
    """{'fixed': the model that always takes all passes, mean depth: one that halts, ..}."""
    all_passes = {**setup.given, 'ponder': MODES[halting], 'ponder_steps': PASSES - 1,
                  'halting': 'none'}  # whatever a config file says
    models = {'fixed': FastGPT(build(GPTConfig, all_passes)).to(setup.device)}
    config = build(GPTConfig, {**all_passes, 'halting': halting, **settings})
    for depth in setup.own.depths.split(','):
        models[depth] = drawn(config, float(depth), setup.device)
    return models


def decoding_turn(setup, model, batch):
    """(seconds, mean passes) of decoding after a short prompt, which is not counted."""
    prompt = torch.randint(0, model.config.n_tokens, (batch, PROMPT), device=setup.device)
    elapsed, passes = decode(model, prompt, setup.own.new_tokens + 1, setup.device)
    return elapsed, torch.stack(passes).float().mean().item()


def training_turn(setup, step):
    """(seconds, mean passes) of an optimizer step; passes None if all tokens take all of them."""
    elapsed = seconds(step, setup.device)
    passes = step.model.mechanism.passes
    return elapsed, None if passes is None else passes.float().mean().item()


def report(title, turns):
    """
    Print the fixed model's median and a line for each that halts: median, passes, speed-up, ideal,
    share. turns: {'fixed' or mean depth: [(seconds, mean passes) of each turn]}.
    """
    fixed = statistics.median(elapsed for elapsed, _ in turns['fixed'])
    print(f"\n{title}: {fixed * 1e3:.1f} ms")
    for depth in turns:
        if depth == 'fixed':
            continue
        median = statistics.median(elapsed for elapsed, _ in turns[depth])
        passes = statistics.mean(passes for _, passes in turns[depth])
        faster = fixed / median
        ideal = PASSES / passes
        print(f"{'  mean depth ' + depth:34s} {median * 1e3:9.1f} ms {passes:6.2f} passes "
              f"{faster:7.2f}x faster, ideal {ideal:5.2f}x, {faster / ideal:6.1%} of it")


def bench_decoding(setup, halting, batch):
    """Decoding with one way of halting, and with its fixed model."""
    candidates = {}
    for name, model in make_models(setup, halting).items():
        candidates[name] = partial(decoding_turn, setup, model, batch)
    turns = take_turns(candidates, setup.own.repeats, warm_up=1)
    report(f"decoding {setup.own.new_tokens} tokens, batch {batch}, "
           f"{halting} against {MODES[halting]}", turns)


def bench_training(setup):
    """Whole optimizer steps of 'router', which skips rows in training too."""
    models = make_models(setup, 'router', halt_lambda=0.0)
    config = models['fixed'].config
    B, T = setup.train.micro_batch, config.block_size
    idx = torch.randint(0, config.n_tokens, (B, T), device=setup.device)
    candidates = {}
    for name, model in models.items():
        step = TrainingStep(model, own_loss, idx, setup.dtype)
        candidates[name] = partial(training_turn, setup, step)
    turns = take_turns(candidates, setup.own.repeats, warm_up=1)
    report(f"training step, {B} x {T} tokens, router against chain", turns)


def main(argv):
    setup = set_up(argv, __doc__, HaltingSettings)
    block_size = setup.given.get('block_size', PROMPT)
    if block_size < PROMPT:
        raise UserError(f"block_size={block_size}: at least {PROMPT} are needed, for the prompt")
    if setup.device.type == 'cpu':
        tune_cpu()
    torch.manual_seed(0)
    expect_new_lengths()  # the fixed models too, so that all have the same kernels
    for batch in whole_numbers(setup.own.batches, 'batches'):
        for halting in MODES:
            bench_decoding(setup, halting, batch)
    bench_training(setup)


if __name__ == '__main__':
    run(main)
