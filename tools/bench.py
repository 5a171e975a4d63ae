"""
Speed, as ratios within one run: a training step, decoding, and what halting saves.

    python tools/bench.py                              the defaults, plain and Depth-Attention
    python tools/bench.py config/size/360m.py --micro_batch=16 --toggles=plain,loop,chain
    python tools/bench.py --toggles=gate,mask,router,exit     each against all its passes
    python tools/bench.py --toggles=plain,chain,exit --parts=True    what each part of engine/ gains
    python tools/bench.py out/loop out/halting_exit           whole answers of runs on a made task

Candidates take turns (A B C A B C ...), so a machine whose speed drifts slows all alike. The table
has medians, quartiles, and the first candidate's time as a multiple of each. The machine's two
ceilings come first: a large matrix product in the same precision, and a large copy. "of ceiling" is
a step's FLOPs per second as a share of the one, in decoding the blocks' weights read per second as
a share of the other; empty where tokens may have stopped early.

Where tokens halt, decisions are drawn, not learned: each goes on to the next of up to 4 passes with
the same probability, so that it takes 1.5, 2 or 3 on average. Ideal is 4 / (passes taken). But with
--parts they are the model's own.
"""

import math
import os
import statistics
import sys
import time
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn as nn

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)  # run from anywhere
from configurator import build, check_range, read
from engine.answers import Progress, answer_problems, ask, totals
from engine.compile import compile_blocks, compile_decoding
from engine.fast import BY_ROWS, new_model, pick_fast
from engine.files import UserError, run, table
from engine.flops import flops_per_token
from engine.generate import generate, stream
from engine.hardware import expect_new_lengths, pick_compile, pick_device, pick_dtype, tune_cpu
from engine.trained import exam_of_run, load_model
from model import GPT, HALTING, GPTConfig
from train import Settings


@dataclass
class BenchSettings:
    """
    what to measure; shape, micro_batch, device, dtype, fast and compile are train.py's (where
    tokens halt, but with --parts, fast is on, nothing is compiled, and decoding is in fp32)
    """
    toggles: str = 'plain,depth_attn'  # comma-separated names of TOGGLES, the first is the base
    parts: bool = False                # beside each: with fast, and without each of its parts
    repeats: int = 7                   # timed turns of each candidate, after one not counted
    batches: str = '1,8'               # rows that are decoded together
    new_tokens: int = 64               # tokens decoded per turn, after 8 of a prompt

    def __post_init__(self):
        for name in self.toggles.split(','):
            if name not in TOGGLES:
                raise ValueError(f"toggles={name}: choose from {', '.join(TOGGLES)}")
        if not all(rows.isdecimal() for rows in self.batches.split(',')):
            raise ValueError(f"batches={self.batches}: give whole numbers, such as 1,8")
        check_range(self, 1, math.inf, 'repeats', 'new_tokens')


TOGGLES = {
    'plain': {},
    'depth_attn': dict(depth_attn=True),
    'embedding': dict(ponder='embedding'),
    'latent': dict(ponder='latent', ponder_steps=1),
    'chain': dict(ponder='chain'),
    'loop': dict(ponder='loop'),
    'pause': dict(ponder='pause'),
}
for name, kind in HALTING.items():
    TOGGLES[name] = dict(ponder=kind.works_on, ponder_steps=3, halting=name, halt_tau=0.5)
PROMPT = 8  # tokens before those that are decoded
ANSWERS = 64    # problems of a turn, where runs answer
# passes per token on average, 1 + p + p^2 + p^3: p, the probability of each next one
DEPTHS = {1.5: 0.34252, 2: 0.54369, 3: 0.81054}


# -------------------------------------------------------------------------------------------------
# The clock


def seconds(action, device):
    """Wall-clock seconds of one call, device work included."""
    wait_for(device)
    start = time.perf_counter()
    action()
    wait_for(device)
    return time.perf_counter() - start


def wait_for(device):
    if device.type != 'cpu':
        torch.accelerator.synchronize()


def take_turns(candidates, repeats):
    """{name: [its results]} of {name: function}, called in turn; the first turn does not count."""
    results = {name: [] for name in candidates}
    progress = Progress()
    for turn in range(1 + repeats):
        for name, measure in candidates.items():
            result = measure()
            progress(f"turn {turn} of {repeats}, {name}")
            if turn > 0:
                results[name].append(result)
    return results


def ceilings(device, dtype):
    """(FLOP/s of a large matmul, bytes/s of a large copy, read and written both), medians."""
    large = device.type == 'cuda'
    n = 8192 if large else 1536
    a = torch.randn(n, n, device=device, dtype=dtype)
    source = torch.zeros(2 ** (30 if large else 27), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = take_turns({
        'matmul': partial(seconds, partial(torch.matmul, a, a), device),
        'copy': partial(seconds, partial(target.copy_, source), device),
    }, 7)
    return (2 * n ** 3 / statistics.median(times['matmul']),
            2 * source.numel() / statistics.median(times['copy']))


def print_times(title, times, ceiling=None):
    """
    A line for each candidate. ceiling: {name: share of the machine's, at one second}, where known.
    """
    base = statistics.median(next(iter(times.values())))
    rows = []
    for name, elapsed in times.items():
        elapsed = sorted(elapsed)
        median = statistics.median(elapsed)
        low, high = elapsed[len(elapsed) // 4], elapsed[3 * len(elapsed) // 4]
        row = [name, f"{median * 1e3:.1f} ms", f"{low * 1e3:.1f} to {high * 1e3:.1f}",
               f"{base / median:.3f}x"]
        if ceiling is not None:
            row.append(f"{ceiling[name] / median:.1%}" if name in ceiling else '')
        rows.append(row)
    header = [title, 'median', 'quartiles', f'speed, {next(iter(times))} = 1']
    if ceiling is not None:
        header.append('of ceiling')
    print(f"\n{table(header, rows)}", flush=True)


# -------------------------------------------------------------------------------------------------
# What is measured


class TrainingStep:
    """One whole optimizer step per call: forward, backward, clipping, fused AdamW."""

    def __init__(self, model, idx, dtype):
        self.model = model.train()
        self.idx = idx          # (B,T); each token is its own target, which does not matter here
        self.dtype = dtype
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def __call__(self):
        mixed = self.dtype != torch.float32
        with torch.autocast(self.idx.device.type, self.dtype, enabled=mixed):
            _, loss = self.model(self.idx, self.idx)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def decode(model, batch, new_tokens, device):
    """
    (seconds, mean passes per token) of greedy decoding, after a prompt that is not counted and
    gives the first token.
    """
    prompt = torch.randint(0, model.config.n_tokens, (batch, PROMPT), device=device)
    steps = stream(model, prompt, new_tokens + 1, temperature=0)
    next(steps)
    made = []
    elapsed = seconds(partial(made.extend, steps), device)
    return elapsed, torch.stack([passes for _, passes in made]).float().mean().item()


def bench_toggles(setup, configs):
    """Steps and decoding of the models {name: config}, each against the first."""
    flops, bandwidth = ceilings(setup.device, setup.dtype)
    print(f"matmul {flops / 1e9:,.0f} GFLOP/s, copy {bandwidth / 1e9:,.1f} GB/s", flush=True)
    config = next(iter(configs.values()))
    T, n_tokens = config.block_size, config.n_tokens        # of all
    fast = pick_fast(setup.train.fast, setup.device)
    makers = {}     # of a new model, by the candidate's name
    for name, config in configs.items():
        if not setup.own.parts:
            makers[name] = partial(new_model, config, fast)
            continue
        makers[f'{name}, model.py'] = partial(new_model, config)
        makers[f'{name}, fast'] = partial(new_model, config, True)
        for part in PARTS:
            makers[f'{name}, fast without {part}'] = partial(without, part, config)
    compiled = pick_compile(setup.train.compile, setup.device)

    steps, work = {}, {}
    for name, make in makers.items():
        model = make().to(setup.device)
        # latent draws: these steps take the costliest, so FLOPs are counted of that
        model.mechanism.draws = partial(list, model.mechanism.draws()[:1])
        idx = torch.randint(0, n_tokens, (setup.train.micro_batch, T), device=setup.device)
        if compiled:
            compile_blocks(model)
        steps[name] = partial(seconds, TrainingStep(model, idx, setup.dtype), setup.device)
        if not model.mechanism.skips:   # it computes less than is counted
            work[name] = flops_per_token(model, T) * idx.numel() / flops
    shape = f'{setup.train.micro_batch} x {T} tokens'
    print_times(f'step, {shape}', take_turns(steps, setup.own.repeats), work)

    expect_new_lengths()    # not before: steps have one length
    asked = setup.train.dtype is not None or setup.device.type == 'cuda'
    dtype = setup.dtype if asked else torch.float32     # in which a CPU decodes
    new = min(setup.own.new_tokens, T - PROMPT)
    models, read = {}, {}
    for name, make in makers.items():
        model = models[name] = make().to(setup.device, dtype).eval()
        if compiled and fast:
            compile_decoding(model)
        if model.mechanism.halts:       # it may read them less often
            continue
        weights = sum(p.numel() * p.element_size() for p in model.h.parameters())
        passes = 1 if model.config.ponder == 'pause' else model.mechanism.K + 1
        read[name] = weights * passes * new / bandwidth
    for batch in map(int, setup.own.batches.split(',')):
        prompt = torch.randint(0, n_tokens, (batch, PROMPT), device=setup.device)
        turns = {}
        for name, model in models.items():
            write = partial(generate, model, prompt, new, temperature=0)
            turns[name] = partial(seconds, write, setup.device)
        print_times(f'decoding {new} tokens, batch {batch}', take_turns(turns, setup.own.repeats),
                    read)


PARTS = ('loss', 'skipping', 'memory')


def without(part, config):
    """
    A FastGPT with a part that is model.py's own. loss: head and cross-entropy for all tokens at
    once. skipping: all tokens take all passes, and rows wait for each other. memory: that, too, as
    skipping needs it.
    """
    gpt = new_model(config, True)
    mechanism = gpt.mechanism
    if part == 'loss':
        gpt.loss, gpt.token_losses = partial(GPT.loss, gpt), partial(GPT.token_losses, gpt)
        for _, name in BY_ROWS:
            vars(mechanism).pop(name, None)     # then it is the class's
    else:
        mechanism.forward = partial(type(mechanism).forward, mechanism)
        gpt.runs_ahead = False
    if part == 'memory':
        gpt.hidden, gpt.new_memory = partial(GPT.hidden, gpt), partial(GPT.new_memory, gpt)
    return gpt


# -------------------------------------------------------------------------------------------------
# What skipping saves


def drawn(config, depth, device):
    """A model whose tokens take `depth` of its passes on average, whatever its weights say."""
    model = new_model(config, True).to(device)
    mechanism, p = model.mechanism, DEPTHS[depth]
    after, route = mechanism.after, getattr(mechanism, 'route', None)

    def after_drawn(gpt, state, x, h, k):
        new = after(gpt, state, x, h, k)
        luck = torch.rand(new.go_on.shape, device=h.device) < p
        return replace(new, go_on=state.go_on & luck & (k < mechanism.K))

    def route_drawn(h):     # 'mask' decides once, on all
        luck = torch.rand(*h.shape[:-1], mechanism.K, device=h.device) < p
        needed = nn.functional.pad(luck.cumprod(-1), (1, 0), value=1.0)     # (B,T,K+1)
        return route(h)[0], needed.log()

    config.halt_tau = 0.5
    if route is None:
        config.halt_tau = 0.0       # nobody stops but by luck
        mechanism.after = after_drawn
    else:
        mechanism.route = route_drawn
    return model


def bench_halting(setup, name, config):
    """Decoding against the same passes taken by all, and a step where training skips them too."""
    expect_new_lengths()
    models = {'all': new_model(replace(config, halting='none'), True).to(setup.device)}
    for depth in DEPTHS:
        models[depth] = drawn(replace(config), depth, setup.device)
    new = min(setup.own.new_tokens, config.block_size - PROMPT)
    for batch in map(int, setup.own.batches.split(',')):
        turns = {depth: partial(decode, model.eval(), batch, new, setup.device)
                 for depth, model in models.items()}
        print_saved(f'{name}: decoding {new} tokens, batch {batch}, fp32', config,
                    take_turns(turns, setup.own.repeats))
    if not models[depth].mechanism.skips:
        return
    shape = (setup.train.micro_batch, config.block_size)
    idx = torch.randint(0, config.n_tokens, shape, device=setup.device)
    steps = {depth: partial(step_and_passes, TrainingStep(model, idx, setup.dtype), setup.device)
             for depth, model in models.items()}
    print_saved(f'{name}: step, {shape[0]} x {shape[1]} tokens', config,
                take_turns(steps, setup.own.repeats))


def step_and_passes(step, device):
    elapsed = seconds(step, device)
    passes = step.model.mechanism.passes
    return elapsed, 0.0 if passes is None else passes.float().mean().item()


def print_saved(title, config, turns):
    """A line for each depth. turns: {depth: [(seconds, mean passes) of each turn]}."""
    times = {depth: statistics.median(s for s, _ in results) for depth, results in turns.items()}
    rows = [['all', f"{times['all'] * 1e3:.1f} ms", f"{config.ponder_steps + 1:.2f}", '', '', '']]
    for depth in list(times)[1:]:
        passes = statistics.fmean(passes for _, passes in turns[depth])
        faster, ideal = times['all'] / times[depth], (config.ponder_steps + 1) / passes
        rows.append([depth, f"{times[depth] * 1e3:.1f} ms", f"{passes:.2f}", f"{faster:.2f}x",
                     f"{ideal:.2f}x", f"{faster / ideal:.0%}"])
    header = [title, 'median', 'passes', 'faster', 'ideal', 'of ideal']
    print(f"\n{table(header, rows)}", flush=True)


# -------------------------------------------------------------------------------------------------
# Whole answers


def bench_answers(setup, folders):
    """Runs on made tasks, each against the first: questions read, and whole answers written."""
    fast = pick_fast(setup.train.fast, setup.device)    # of all alike, however each was trained
    runs = {}       # of each folder: its model, and what it is asked
    for folder in folders:
        model, _, settings = load_model(folder, setup.device, fast=fast)
        exam = exam_of_run(settings)
        if exam is None:
            raise UserError(f"{folder}: was trained on a text, which asks nothing: name runs on a "
                            "made task")
        runs[folder] = model, exam
    rows = []
    for folder, (model, exam) in runs.items():
        answers = totals(answer_problems(model, exam, ANSWERS))['passes']
        rows.append([folder, question_passes(model, exam), f"{answers:.2f}"])
    print(f"\n{table(['passes of', 'a question token', 'an answer token'], rows)}", flush=True)
    for batch in map(int, setup.own.batches.split(',')):
        turns = {folder: partial(seconds_per_answer, *asked, batch, setup.device)
                 for folder, asked in runs.items()}
        print_times(f'one answer, batch {batch}', take_turns(turns, setup.own.repeats))


@torch.no_grad()
def question_passes(model, exam):
    """The mean over the tokens of questions, with what stands in front of them; in words."""
    if model.mechanism.iterates:
        return 'by iteration'
    if not model.mechanism.halts:
        return f"{model.mechanism.slots:.2f}"
    taken = []
    for tokens, _, _ in ask(model, exam, ANSWERS):
        model.hidden(torch.tensor([tokens], device=model.wte.weight.device), model.new_memory())
        taken += model.mechanism.passes[0].tolist()
    return f"{statistics.fmean(taken):.2f}"


def seconds_per_answer(model, exam, batch, device):
    answer = partial(answer_problems, model, exam, ANSWERS, batch_size=batch)
    return seconds(answer, device) / min(ANSWERS, len(exam['problems']))


# -------------------------------------------------------------------------------------------------


@dataclass
class Setup:
    """What was asked for, and where it is measured."""
    own: BenchSettings
    train: Settings       # micro_batch, device, dtype, fast, compile
    device: torch.device
    dtype: torch.dtype    # of training steps: the autocast type


def main(argv):
    given, folders = read(argv, __doc__, BenchSettings, Settings, GPTConfig)
    train = build(Settings, given)
    device = pick_device(train.device)
    setup = Setup(build(BenchSettings, given), train, device, pick_dtype(train.dtype, device))
    if device.type == 'cpu':
        given = {'vocab_size': 320, **given}    # bytes; on a GPU the table of larger tokenizers
        tune_cpu()
    if train.threads is not None:
        torch.set_num_threads(train.threads)
    plain = dict(depth_attn=False, ponder='none', halting='none')  # whatever a config file says
    configs = {name: build(GPTConfig, {**given, **plain, **TOGGLES[name]})
               for name in setup.own.toggles.split(',')}

    torch.manual_seed(0)
    torch.set_float32_matmul_precision('high')  # TF32 where fp32 is used on CUDA, as train.py
    dtype = torch.float32 if folders else setup.dtype
    print(f"{device.type}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
          f"{'answers' if folders else 'steps'} in {str(dtype).removeprefix('torch.')}", flush=True)
    if folders:
        return bench_answers(setup, folders)
    fixed = {name: config for name, config in configs.items()
             if setup.own.parts or config.halting == 'none'}
    if fixed:
        bench_toggles(setup, fixed)
    for name, config in configs.items():
        if name not in fixed:
            bench_halting(setup, name, config)


if __name__ == '__main__':
    run(main)
