"""
Speed, as ratios within one run: a training step, decoding, and what halting saves.

    python tools/bench.py                              the defaults, plain and Depth-Attention
    python tools/bench.py config/size/360m.py --micro_batch=16 --toggles=plain,loop,chain
    python tools/bench.py --toggles=gate,mask,router,exit     each against all its passes
    python tools/bench.py out/loop out/halting_exit           whole answers of runs on a made task
    python tools/bench.py config/size/tiny.py --toggles=plain,chain --against=../before
        this code against another folder of the project: both bench.py take turns
    python tools/bench.py config/size/tiny.py --against=. --against_options=--optimizer=muon
        AdamW against Muon

Candidates take turns (A B C A B C ...), so a machine whose speed drifts slows all alike. The table
has medians, quartiles, and the first candidate's time as a multiple of each. The machine's two
ceilings come first: a large matrix product in the same precision, and a large copy. "of ceiling" is
a step's FLOPs per second as a share of the one (empty where steps are drawn, as latent's), in
decoding the blocks' weights read per second as a share of the other. On a GPU decoding is compiled,
but not that of chain and pause, and not where tokens halt.

Where tokens halt, nobody does in a training step of the first table. Then decisions are drawn, not
learned: each token goes on to the next of up to 4 passes with the same probability, so that it
takes 1.5, 2 or 3 on average. Ideal is 4 / (passes taken).

With --against each row that both print has the medians of all rounds, and the ratio here / there of
each round: below 1, this code is quicker.
"""

import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from typing import Optional

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.insert(0, ROOT)  # run from anywhere
from configurator import build, check_range, only_with, read
from engine.answers import answer_problems, ask, totals
from engine.build import new_model
from engine.cpu import tune_cpu
from engine.decode import compile_decoding
from engine.files import Progress, UserError, run, table
from engine.flops import flops_per_token
from engine.generate import generate, stream
from engine.hardware import (
    autocast, pick_compile, pick_device, pick_dtype, without_cudnn_attention)
from engine.mechanisms import halts, iterates, slots_per_token
from engine.prepare import prepare
from engine.skip import skip_stopped_tokens
from engine.trained import exam_of_run, load_model
from model import HALTING, GPTConfig
from train import Settings, make_optimizer


@dataclass
class BenchSettings:
    """
    what to measure; shape, micro_batch, optimizer, device, dtype, threads, compile and
    checkpoint_activations are train's (where decisions are drawn nothing is compiled, and decoding
    is in fp32)
    """
    toggles: str = 'plain,depth_attn'  # comma-separated names of TOGGLES, the first is the base
    repeats: int = 7                   # timed turns of each candidate, after one not counted
    batches: str = '1,8'               # rows that are decoded together
    new_tokens: int = 64               # tokens decoded per turn, after 8 of a prompt
    against: Optional[str] = None      # another folder of the project, whose bench.py is run too
    against_options: str = ''          # more options for that one alone
    rounds: int = 3                    # times that the two are run

    def __post_init__(self):
        for name in self.toggles.split(','):
            if name not in TOGGLES:
                raise ValueError(f"toggles={name}: choose from {', '.join(TOGGLES)}")
        if not all(rows.isdecimal() and int(rows) for rows in self.batches.split(',')):
            raise ValueError(f"batches={self.batches}: give whole numbers from 1 on, such as 1,8")
        check_range(self, 1, math.inf, 'repeats', 'new_tokens', 'rounds')


TOGGLES = {
    'plain': {},
    'depth_attn': dict(depth_attn=True),
    'smear': dict(ponder='smear'),
    'embedding': dict(ponder='embedding'),
    'latent': dict(ponder='latent', ponder_steps=1),
    'feedback': dict(ponder='feedback'),
    'chain': dict(ponder='chain'),
    'loop': dict(ponder='loop'),
    'pause': dict(ponder='pause'),
}
for name, kind in HALTING.items():
    TOGGLES[name] = dict(ponder=kind.works_on, ponder_steps=3, halting=name, halt_tau=0.0)
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
    """A line for each. ceiling: {name: share of the machine's, at one second}, where known."""
    base = statistics.median(next(iter(times.values())))
    rows = []
    for name, elapsed in times.items():
        elapsed = sorted(elapsed)
        median = statistics.median(elapsed)
        low, high = elapsed[len(elapsed) // 4], elapsed[3 * len(elapsed) // 4]
        row = [name, f"{median * 1e3:.4g} ms", f"{low * 1e3:.4g} to {high * 1e3:.4g}",
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
    """
    One whole optimizer step per call: forward, backward, clipping, the optimizer. Where a mechanism
    draws, the costliest.
    """

    def __init__(self, model, idx, dtype, settings):
        self.model = model.train()
        self.idx = idx          # (B,T); each token is its own target, which does not matter here
        self.dtype = dtype
        self.cudnn = torch.backends.cuda.cudnn_sdp_enabled()    # as it was prepared
        self.optimizer = make_optimizer(settings, model, idx.device, dtype)

    def __call__(self):
        torch.backends.cuda.enable_cudnn_sdp(self.cudnn)    # models take turns
        mechanism = self.model.mechanism
        mechanism.begin_step(0, 1)
        mechanism.drawn = mechanism.draws()[0]
        with autocast(self.idx.device, self.dtype):
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


def bench_steps(setup, configs, flops):
    """Training steps of models {name: config}, each against the first. flops: the machine's."""
    steps, work = {}, {}
    for name, config in configs.items():
        model = new_model(config)
        torch.backends.cuda.enable_cudnn_sdp(True)      # `prepare` switches it off for some
        prepare(model, setup.train, setup.device)
        shape = (setup.train.micro_batch, config.block_size)
        idx = torch.randint(0, config.n_tokens, shape, device=setup.device)
        step = TrainingStep(model, idx, setup.dtype, setup.train)
        steps[name] = partial(seconds, step, setup.device)
        if len(model.mechanism.draws()) == 1:       # else the mean over draws is counted
            work[name] = flops_per_token(model, texts=shape[0]) * idx.numel() / flops
    print_times(f'step, {shape[0]} x {shape[1]} tokens', take_turns(steps, setup.own.repeats), work)


def new_tokens(setup, config):
    """How many tokens a turn decodes; UserError if the context has no room for one."""
    if config.block_size <= PROMPT:
        raise UserError(f"block_size={config.block_size}: a prompt alone has {PROMPT} tokens; "
                        "raise it")
    return min(setup.own.new_tokens, config.block_size - PROMPT)


def bench_decoding(setup, configs, bandwidth):
    """Decoding by models {name: config}, each against the first. bandwidth: the machine's."""
    without_cudnn_attention()    # not before: steps have one length
    asked = setup.train.dtype is not None or setup.device.type == 'cuda'
    dtype = setup.dtype if asked else torch.float32     # in which a CPU decodes
    models, read = {}, {}
    for name, config in configs.items():
        new = new_tokens(setup, config)     # the same for all
        model = models[name] = new_model(config).to(setup.device, dtype).eval()
        if pick_compile(setup.train.compile, setup.device):
            compile_decoding(model, PROMPT + new)
        weights = sum(p.numel() * p.element_size() for p in model.h.parameters())
        passes = 1 if config.ponder == 'pause' else slots_per_token(model)
        read[name] = weights * passes * new / bandwidth
    for batch in map(int, setup.own.batches.split(',')):
        prompt = torch.randint(0, config.n_tokens, (batch, PROMPT), device=setup.device)
        turns = {}
        for name, model in models.items():
            write = partial(generate, model, prompt, new, temperature=0)
            turns[name] = partial(seconds, write, setup.device)
        print_times(f'decoding {new} tokens, batch {batch}', take_turns(turns, setup.own.repeats),
                    read)


# -------------------------------------------------------------------------------------------------
# What skipping saves


def drawn(config, depth, device):
    """A model whose tokens take `depth` of its passes on average, whatever its weights say."""
    model = new_model(config).to(device)
    if config.halting == 'router':
        skip_stopped_tokens(model)
    p = DEPTHS[depth]

    class Drawn(type(model.mechanism)):

        def goes_on(self, score):
            luck = torch.rand(score.shape, device=score.device) < p
            if score.dim() == 3:        # Mask asks of all thoughts, and the token itself, at once
                luck[..., 0] = True
                luck = luck.cumprod(-1).bool()
            return luck

    model.mechanism.__class__ = Drawn
    return model


def bench_halting(setup, name, config):
    """Decoding against the same passes taken by all, and a step where training skips them too."""
    without_cudnn_attention()
    models = {'all': new_model(replace(config, halting='none')).to(setup.device)}
    for depth in DEPTHS:
        models[depth] = drawn(config, depth, setup.device)
    new = new_tokens(setup, config)
    for batch in map(int, setup.own.batches.split(',')):
        turns = {depth: partial(decode, model.eval(), batch, new, setup.device)
                 for depth, model in models.items()}
        print_saved(f'{name}: decoding {new} tokens, batch {batch}, fp32', config,
                    take_turns(turns, setup.own.repeats))
    if config.halting != 'router':      # only there does training skip
        return
    shape = (setup.train.micro_batch, config.block_size)
    idx = torch.randint(0, config.n_tokens, shape, device=setup.device)
    steps = {}
    for depth, model in models.items():
        step = TrainingStep(model, idx, setup.dtype, setup.train)
        steps[depth] = partial(step_and_passes, step, setup.device)
    print_saved(f'{name}: step, {shape[0]} x {shape[1]} tokens', config,
                take_turns(steps, setup.own.repeats))


def step_and_passes(step, device):
    elapsed = seconds(step, device)
    passes = step.model.mechanism.passes
    return elapsed, 0.0 if passes is None else passes.float().mean().item()


def print_saved(title, config, turns):
    """A line for each depth. turns: {depth: [(seconds, mean passes) of each turn]}."""
    times = {depth: statistics.median(s for s, _ in results) for depth, results in turns.items()}
    rows = [['all', f"{times['all'] * 1e3:.4g} ms", f"{config.ponder_steps + 1:.2f}", '', '', '']]
    for depth in list(times)[1:]:
        passes = statistics.fmean(passes for _, passes in turns[depth])
        faster, ideal = times['all'] / times[depth], (config.ponder_steps + 1) / passes
        rows.append([depth, f"{times[depth] * 1e3:.4g} ms", f"{passes:.2f}", f"{faster:.2f}x",
                     f"{ideal:.2f}x", f"{faster / ideal:.0%}"])
    header = [title, 'median', 'passes', 'faster', 'ideal', 'of ideal']
    print(f"\n{table(header, rows)}", flush=True)


# -------------------------------------------------------------------------------------------------
# Whole answers


def bench_answers(setup, folders):
    """Runs on made tasks, each against the first: questions read, and whole answers written."""
    runs = {}       # of each folder: its model, and what it is asked
    for folder in folders:
        model, _, settings = load_model(folder, setup.train.device)
        exam = exam_of_run(settings)
        if exam is None:
            raise UserError(f"{folder}: was trained on a text, which asks nothing: name runs on a "
                            "made task")
        runs[folder] = model, exam
    if len({(exam['task'], exam['size']) for _, exam in runs.values()}) > 1:
        raise UserError("these are of several tasks or sizes, whose answers have other lengths: "
                        "name runs on one")
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
    if iterates(model):
        return 'by iteration'
    if not halts(model):
        return f"{slots_per_token(model):.2f}"
    taken = []
    for tokens, _, _ in ask(model, exam, ANSWERS):
        model.hidden(torch.tensor([tokens], device=model.wte.weight.device), model.new_memory())
        taken += model.mechanism.passes[0].tolist()
    return f"{statistics.fmean(taken):.2f}"


def seconds_per_answer(model, exam, batch, device):
    answer = partial(answer_problems, model, exam, ANSWERS, batch_size=batch)
    return seconds(answer, device) / min(ANSWERS, len(exam['problems']))


# -------------------------------------------------------------------------------------------------
# Another folder of the project


def bench_against(own, argv):
    """This bench.py and the other folder's in turns, each time in a process of its own."""
    if not os.path.exists(os.path.join(own.against, 'tools', 'bench.py')):
        raise UserError(f"--against={own.against}: there is no tools/bench.py: name a folder of "
                        "the project")
    asked = [arg for arg in argv if not arg.startswith(('--against', '--rounds'))]
    commands = {'here': (ROOT, asked),
                'there': (own.against, [*asked, *shlex.split(own.against_options)])}
    found = {side: defaultdict(list) for side in commands}  # ms of each row, a number per round
    progress = Progress()
    for turn in range(own.rounds):
        for side in ('here', 'there') if turn % 2 == 0 else ('there', 'here'):
            progress(f"round {turn + 1} of {own.rounds}, {side}")
            for row, ms in medians_printed(*commands[side]).items():
                found[side][row].append(ms)
        if not found['here'].keys() & found['there'].keys():
            raise UserError("the two sides have no row in common: leave toggles, batches and "
                            "shapes out of --against_options")
    rows = []
    for title, name in sorted(found['here'].keys() ^ found['there'].keys()):
        print(f"left out: {title}, {name}, which one side alone has")
    for (title, name), here in found['here'].items():
        there = found['there'].get((title, name))
        if there:
            ratios = sorted(a / b for a, b in zip(here, there))
            rows.append([title, name, f"{statistics.median(here):.4g} ms",
                         f"{statistics.median(there):.4g} ms", f"{statistics.median(ratios):.3f}",
                         f"{ratios[0]:.3f} to {ratios[-1]:.3f}"])
    print(table(['measured', 'of', 'here', 'there', 'here / there', 'lowest to highest'], rows))


def medians_printed(folder, options):
    """{(title, name): ms} of the tables of times that a folder's bench.py prints."""
    program = os.path.join(folder, 'tools', 'bench.py')
    done = subprocess.run([sys.executable, program, *options], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{program}: {(done.stderr.strip() or 'failed').splitlines()[-1]}")
    found, title = {}, None
    for line in done.stdout.splitlines():
        name, median, *_ = [cell.strip() for cell in line.strip('|').split('|')] + ['']
        if median == 'median':
            title = name
        elif median.endswith(' ms'):
            found[title, name] = float(median.removesuffix(' ms'))
    return found


# -------------------------------------------------------------------------------------------------


@dataclass
class Setup:
    """What was asked for, and where it is measured."""
    own: BenchSettings
    train: Settings       # those that BenchSettings names
    device: torch.device
    dtype: torch.dtype    # of training steps: the autocast type


def main(argv):
    given, folders = read(argv, __doc__, BenchSettings, Settings, GPTConfig)
    unused = given.keys() - {'batches', 'repeats', 'against', 'against_options', 'rounds', 'device',
                             'threads'}
    if folders and unused:
        raise UserError(f"{min(unused)}: finished runs are timed as they are, without it")
    for name in ('ponder', 'ponder_steps', 'halting', 'halt_tau', 'depth_attn'):
        if f'--{name}' in [arg.partition('=')[0] for arg in argv]:
            raise UserError(f"{name}: chosen here for each row, by --toggles (--help)")
    only_with('--against', given.get('against'), given, 'against_options', 'rounds')
    asked = given.get('halting', given.get('ponder', 'none'))   # of a config file
    if asked != 'none' and 'toggles' not in given and not folders:
        raise UserError(f"{asked}: methods are chosen by --toggles, as --toggles=plain,{asked}, "
                        "from TOGGLES here")
    train = build(Settings, given)
    device = pick_device(train.device)
    dtype, _ = pick_dtype(train.dtype, device)
    setup = Setup(build(BenchSettings, given), train, device, dtype)
    if setup.own.against is not None:
        return bench_against(setup.own, argv)
    if device.type == 'cpu':
        given = {'vocab_size': 320, **given}    # bytes; on a GPU the table of larger tokenizers
        tune_cpu()
    if train.threads is not None:
        torch.set_num_threads(train.threads)
    plain = dict(depth_attn=False, ponder='none', halting='none',   # whatever a config file says
                 ponder_steps=GPTConfig.ponder_steps)
    configs = {name: build(GPTConfig, {**given, **plain, **TOGGLES[name]})
               for name in setup.own.toggles.split(',')}

    torch.manual_seed(0)
    torch.set_float32_matmul_precision('high')  # TF32 where fp32 is used on CUDA, as train.py
    dtype = torch.float32 if folders else setup.dtype
    print(f"{device.type}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
          f"{'answers' if folders else 'steps'} in {str(dtype).removeprefix('torch.')}", flush=True)
    if folders:
        return bench_answers(setup, folders)
    flops, bandwidth = ceilings(device, dtype)
    print(f"matmul {flops / 1e9:,.0f} GFLOP/s, copy {bandwidth / 1e9:,.1f} GB/s", flush=True)
    bench_steps(setup, configs, flops)
    fixed = {name: config for name, config in configs.items() if config.halting == 'none'}
    if fixed:
        bench_decoding(setup, fixed, bandwidth)
    for name, config in configs.items():
        if name not in fixed:
            bench_halting(setup, name, config)


if __name__ == '__main__':
    run(main)
