"""
What halting saves, against the same model with all its steps, in one run.

    python tools/bench_halting.py                                     decoding and the router's training step, tiny
    python tools/bench_halting.py config/size/small.py --repeats=7

Decisions are drawn, not learned: each token goes on to the next of up to 4 passes with the same probability, chosen so that it
takes 1.5, 2 or 3 on average. Ideal is (passes of the fixed model) / (passes taken). The table says which share of that is reached.
"""

import os
import statistics
import sys
from dataclasses import dataclass

import torch
import torch.nn as nn

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)  # run from anywhere
from configurator import build, read
from engine.errors import UserError, run
from engine.hardware import expect_new_lengths, pick_device, pick_dtype, tune_cpu
from model import GPT, GPTConfig
from tools.bench import TINY, seconds, training_step, whole_numbers
from train import Settings


@dataclass
class HaltingSettings:
    """what to measure"""
    depths: str = '1.5,2,3'             # mean passes per token, of 4
    batches: str = '1,8'                # batch sizes for decoding
    new_tokens: int = 128               # tokens decoded per turn; with few, the row that is done last counts for much
    repeats: int = 5                    # timed turns of each candidate, after one that is not counted

    def __post_init__(self):
        if self.repeats < 1 or self.new_tokens < 2: raise ValueError("repeats must be at least 1 and new_tokens at least 2")
        whole_numbers(self.batches, 'batches')
        try: right = all(1 <= float(d) <= 4 for d in self.depths.split(','))
        except ValueError: right = False
        if not right: raise ValueError(f"depths={self.depths}: give numbers between 1 and 4, such as 1.5,2")


MODES = {'gate': 'embedding', 'mask': 'latent', 'router': 'chain'}  # the fixed model of each


class Draw(nn.Module):
    """In the place of a gate or router: goes on with probability p, whatever the hidden states say."""

    def __init__(self, p, outcomes=0):
        super().__init__()
        self.p, self.outcomes, self.like = p, outcomes, nn.Parameter(torch.zeros(1))

    def forward(self, h):
        if not self.outcomes:  # one logit: yes or no
            return torch.where(torch.rand(*h.shape[:-1], 1, device=h.device) < self.p, 30.0, -30.0) + 0 * self.like
        on = torch.rand(*h.shape[:-1], self.outcomes - 1, device=h.device) < self.p
        depth = on.cumprod(-1).sum(-1)  # this many in a row
        return 60.0 * nn.functional.one_hot(depth, self.outcomes) + 0 * self.like


def probability(depth, most=4):
    """p with 1 + p + p^2 + .. (most terms) = depth, by halving the interval."""
    low, high = 0.0, 1.0
    for _ in range(50):
        p = (low + high) / 2
        low, high = (p, high) if sum(p ** k for k in range(most)) < depth else (low, p)
    return low


def drawn(config, depth, device):
    """A model of this config whose tokens take `depth` passes on average."""
    model, p = GPT(config).to(device), probability(depth)
    if config.halting == 'gate': model.gates = nn.ModuleList(Draw(p) for _ in model.gates)
    else: model.router = Draw(p, config.ponder_steps + 1 if config.halting == 'mask' else 0)
    return model.to(device)


def decode(model, batch, s, device):
    """(seconds, mean passes) of decoding s.new_tokens tokens after a short prompt, which is not counted."""
    prompt = torch.randint(0, model.config.n_tokens, (batch, 8), device=device)
    stream = model.stream(prompt, s.new_tokens + 1, temperature=0)
    next(stream)
    passes = []
    t = seconds(lambda: passes.extend(p for _, p in stream), device)
    return t, torch.stack(passes).float().mean().item()


def report(name, fixed, times, passes, most):
    """One line: seconds, speed-up, ideal, share."""
    m, base = statistics.median(times), statistics.median(fixed)
    ideal = most / (sum(passes) / len(passes))
    print(f"{name:34s} {m * 1e3:9.1f} ms {most / ideal:6.2f} passes {base / m:7.2f}x faster, "
          f"ideal {ideal:5.2f}x, {base / m / ideal:6.1%} of it")


def bench_decoding(s, settings, device):
    """Fixed and halting models in turn, for each batch size and mean depth."""
    for batch in whole_numbers(s.batches, 'batches'):
        for halting, ponder in MODES.items():
            fixed = GPT(build(GPTConfig, {**settings, 'ponder': ponder, 'ponder_steps': 3})).to(device)
            config = build(GPTConfig, {**settings, 'ponder': ponder, 'ponder_steps': 3, 'halting': halting})
            models = {d: drawn(config, float(d), device) for d in s.depths.split(',')}
            base, times, passes = [], {d: [] for d in models}, {d: [] for d in models}
            for turn in range(s.repeats + 1):
                t = decode(fixed, batch, s, device)[0]
                if turn: base.append(t)
                for d, model in models.items():
                    t, p = decode(model, batch, s, device)
                    if turn: times[d].append(t), passes[d].append(p)
            print(f"\ndecoding {s.new_tokens} tokens, batch {batch}, {halting} against {ponder}: {statistics.median(base) * 1e3:.1f} ms")
            for d in models: report(f"  mean depth {d}", base, times[d], passes[d], 4)


def bench_training(s, run_settings, settings, device, dtype):
    """Whole optimizer steps of 'router', which skips rows in training too."""
    fixed = GPT(build(GPTConfig, {**settings, 'ponder': 'chain', 'ponder_steps': 3})).to(device).train()
    config = build(GPTConfig, {**settings, 'ponder': 'chain', 'ponder_steps': 3, 'halting': 'router', 'halt_lambda': 0.0})
    T, batch = config.block_size, run_settings.micro_batch
    idx = torch.randint(0, config.n_tokens, (batch, T), device=device)
    models = {d: drawn(config, float(d), device).train() for d in s.depths.split(',')}
    passes = {d: [] for d in models}

    def loss(d):
        def of(model, idx):
            out = model(idx, idx)[1]
            passes[d].append(model.steps.float().mean().item())
            return out
        return of
    steps = {d: training_step(m, loss(d), idx, dtype) for d, m in models.items()}
    base, times = [], {d: [] for d in models}
    fixed_step = training_step(fixed, lambda model, idx: model(idx, idx)[1], idx, dtype)
    for turn in range(s.repeats + 1):
        base.append(seconds(fixed_step, device))
        for d, step in steps.items(): times[d].append(seconds(step, device))
    print(f"\ntraining step, {batch} x {T} tokens, router against chain: {statistics.median(base[1:]) * 1e3:.1f} ms")
    for d in models: report(f"  mean depth {d}", base[1:], times[d][1:], passes[d], 4)


def main(argv):
    given, rest = read(argv, __doc__.strip(), HaltingSettings, Settings, GPTConfig)
    if rest: raise UserError(f"{rest[0]}: neither a setting nor a config file")
    if 'n_layer' not in given: given = {**read([TINY], '', Settings, GPTConfig)[0], **given}
    s, run_settings = build(HaltingSettings, given), build(Settings, given)
    device = pick_device(run_settings.device)
    dtype = pick_dtype(run_settings.dtype, device)
    if device.type == 'cpu': given = {'vocab_size': 320, **given}
    settings = {k: v for k, v in given.items() if k in GPTConfig.__dataclass_fields__}
    if device.type == 'cpu': tune_cpu()
    torch.manual_seed(0)
    expect_new_lengths()  # the fixed models of the training steps too, so that all have the same kernels
    bench_decoding(s, settings, device)
    bench_training(s, run_settings, settings, device, dtype)


if __name__ == '__main__':
    run(main)
