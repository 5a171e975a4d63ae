"""
The race with nanoGPT: its model.py, as you have it, beside this one, trained alike on the same
bytes.

    python tools/race.py ../nanoGPT/model.py                    hours on two cores
    python tools/race.py ../nanoGPT/model.py --names=ours,gelu --optimizers=muon --seeds=1
    python tools/race.py docs/runs/race.jsonl                   the table of runs that are made

Each name races with each optimizer at its best learning rate: if there are several --lrs, each runs
with the seeds of --pick, and the one that ends lowest, in the mean, runs with --seeds. `ours` is
the plain GPT as loops start (plain_scaled in tools/compare.py). Each other name is `ours` with one
thing changed: five as nanoGPT has it, and plain_start has the first weights of config/vanilla.py.
All are trained as train.py trains: the same windows in the same order, one schedule, weight decay
on matrices, clipping. Nothing is compiled. Config files and settings of train.py hold for all. Of a
model's settings, nanoGPT's takes only layers, heads, width, context, vocabulary and dropout.

Writes OUT/NAME-OPTIMIZER-RATE-sSEED/log.jsonl (train.py's format, for tools/plot.py curves
--x=tokens) and a line per run in OUT/runs.jsonl. Stopped, the same command goes on, and begins the
run that it was at again. At the end it times a step of each, in turns. The file of nanoGPT is
executed: take one you trust.
"""

import importlib.util
import inspect
import itertools
import json
import math
import os
import statistics
import sys
import time
from dataclasses import dataclass, replace

import torch
from torch import nn

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.insert(0, ROOT)  # run from anywhere
import prepare_data
from configurator import build, only_with, own_words, read
from engine.build import new_model
from engine.files import UserError, alone, append_line, checksum, read_lines, run, table
from engine.hardware import autocast, pick_device, pick_dtype
from engine.log import mean_loss, without_nan
from engine.prepare import prepare
from engine.shards import read_meta
from engine.sums import sum_of
from engine.tasks import task_of
from engine.windows import Windows
from model import Attention, GPTConfig
from tools.bench import wait_for
from tools.compare import (
    CODE, OURS, check_data, check_role, check_seeds_and_rates, commit, configs_of, hardware,
    keep_recipe, seeds_that_pick, sum_of_data, where_made)
from train import Settings, learning_rate, make_optimizer

START = [os.path.join(ROOT, 'config', 'loop.py'), '--ponder_steps=0']   # plain_scaled's
LOSS = 'val_loss'   # in nats per token
TURNS, STEPS = 5, 10    # in which each is timed at the end
# of train.py: what the race chooses, and what it has no use for
REFUSED = (*OURS, 'optimizer', 'ponder', 'ponder_steps', 'halting', 'depth_attn', 'compile',
           'checkpoint_activations', 'shard_optimizer', 'max_seconds', 'track')


@dataclass
class RaceSettings:
    """who races; every other setting is train.py's"""
    names: str = 'nanogpt,ours'         # of CONTENDERS, comma-separated
    optimizers: str = 'adamw,muon'      # each name races with each
    lrs: str = '1.5e-3,3e-3,6e-3'       # peak learning rates that each one tries
    pick: str = '0'                     # the seeds that choose the rate, and do not judge it
    seeds: str = '1,2,3'                # those that judge
    out: str = 'out/race'               # folder of the runs

    def __post_init__(self):
        for name in self.names.split(','):
            if name not in CONTENDERS:
                raise ValueError(f"names={name}: choose from {', '.join(CONTENDERS)}")
        for optimizer in self.optimizers.split(','):
            replace(Settings(), optimizer=optimizer)    # which checks it
        check_seeds_and_rates(self)

    @property
    def pairs(self):
        """Of a name and an optimizer each."""
        return list(itertools.product(self.names.split(','), self.optimizers.split(',')))


# ---- who races -----------------------------------------------------------------------------------

class NanoGPT(nn.Module):
    """nanoGPT's GPT, from its own file, under the names that train.py asks for."""

    def __init__(self, path, config):
        super().__init__()
        spec = importlib.util.spec_from_file_location('nanogpt_model', path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module     # its dataclass looks there
        spec.loader.exec_module(module)
        self.gpt = module.GPT(module.GPTConfig(
            block_size=config.block_size, vocab_size=config.vocab_size, n_layer=config.n_layer,
            n_head=config.n_head, n_embd=config.n_embd, dropout=config.dropout, bias=False))
        self.h = self.gpt.transformer.h
        self.config = config

    def forward(self, idx, targets):
        return self.gpt(idx, targets)


class GELU(nn.Module):
    """GPT-2's MLP, which has as many weights as SwiGLU of two thirds its width."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        return self.c_proj(nn.functional.gelu(self.c_fc(x)))


class NotRotated(Attention):
    """Attention that knows no positions."""

    def project(self, x, rope):
        cos, sin = rope
        return super().project(x, (torch.ones_like(cos), torch.zeros_like(sin)))


class Positions(nn.Module):
    """In the place of dropout behind the embedding: first adds a learned vector for each place."""

    def __init__(self, config):
        super().__init__()
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.scale = config.embed_scale
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.drop(x + self.wpe.weight[:x.size(1)] * self.scale)


def with_gelu(model):
    for block in model.h:
        block.mlp = GELU(model.config)


def with_learned_positions(model):
    model.drop = Positions(model.config)
    for layer, block in enumerate(model.h):
        block.attn = NotRotated(model.config, layer)


def with_layer_norm(model):
    C = model.config.n_embd
    for block in model.h:
        block.ln_1 = nn.LayerNorm(C, bias=False)
        block.ln_2 = nn.LayerNorm(C, bias=False)
    model.ln_f = nn.LayerNorm(C, bias=False)


# name: what differs from `ours`, as settings of the model, or as a function that changes it
CONTENDERS = {
    'nanogpt': None,
    'ours': {},
    'plain_start': dict(ponder='none', embed_scale=1.0),
    'tied_head': dict(tie_embeddings=True),
    'no_qk_norm': dict(qk_norm=False),
    'layer_norm': with_layer_norm,
    'gelu': with_gelu,
    'learned_positions': with_learned_positions,
}


def new_contender(name, path, config, seed):
    """A model with initial weights of this seed. path: of nanoGPT's model.py."""
    torch.manual_seed(seed)
    if name == 'nanogpt':
        return NanoGPT(path, config)
    change = CONTENDERS[name]
    if isinstance(change, dict):
        return new_model(replace(config, **change))
    model = new_model(config)
    change(model)
    for module in model.modules():      # as GPT does, with what is new
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=config.init_std)
    model.mechanism.init_weights(model)
    return model


# ---- the loop ------------------------------------------------------------------------------------

class Run:
    """One model in training, step by step as train.py does it, on one device in one process."""

    def __init__(self, name, path, s, config):
        self.s, self.step = s, 0
        self.device = pick_device(s.device)
        self.dtype = getattr(torch, s.dtype)
        self.meta = read_meta(s.data_dir)
        self.train_data, self.val_data = [
            Windows(s.data_dir, split, self.meta, config.block_size) for split in ('train', 'val')]
        self.accumulation, self.size = s.micro_batches(config.block_size, 1)
        self.model = new_contender(name, path, config, s.seed)
        prepare(self.model, s, self.device)
        self.optimizer = make_optimizer(s, self.model, self.device, self.dtype)

    def train_step(self):
        """Returns the mean loss of the step."""
        s, total = self.s, 0.0
        self.model.train()
        for group in self.optimizer.param_groups:
            group['lr'] = learning_rate(s, self.step)
        first = self.step * self.accumulation * self.size
        for micro in range(self.accumulation):
            x, y = self.train_data.sample(first + micro * self.size, self.size, s.seed, self.device)
            with autocast(self.device, self.dtype):
                _, loss = self.model(x, y)
            loss = loss / self.accumulation
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), s.grad_clip)
        if math.isfinite(total) and math.isfinite(norm):    # train.py skips such a step, too
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return total

    @torch.no_grad()
    def evaluate(self):
        """Mean nats per token of the windows that train.py evaluates; infinite if it diverged."""
        self.model.eval()
        windows = self.val_data.spread(max(1, self.s.eval_tokens // self.val_data.T))
        total = 0.0
        for i in range(0, len(windows), self.size):
            some = windows[i:i + self.size]
            with autocast(self.device, self.dtype):
                _, loss = self.model(*self.val_data.get(some, self.device))
            total += loss.item() * len(some)
        return total / len(windows) if math.isfinite(total) else math.inf

    def to_the_end(self, log, label):
        """Train, with a line of `log` where train.py without saving has one; returns the curve."""
        s, losses, began, curve = self.s, [], time.perf_counter(), {}
        while self.step < s.max_steps:
            losses.append(self.train_step())
            last = self.step == s.max_steps
            if last or self.step == 1 or self.step % s.log_interval == 0:
                ms = (time.perf_counter() - began) * 1e3 / len(losses)
                loss = mean_loss(losses)
                write(log, step=self.step, tokens=self.step * s.batch_tokens, loss=loss, ms=ms)
                print(f"\r{label}: step {self.step} of {s.max_steps}, loss {loss:.4f}", end='',
                      flush=True)
                losses, began = [], time.perf_counter()
            if last or self.step % s.eval_interval == 0:
                begin = time.perf_counter()
                curve[self.step] = self.evaluate()
                write(log, step=self.step, tokens=self.step * s.batch_tokens,
                      val_loss=curve[self.step])
                began += time.perf_counter() - begin    # no part of a step's time
        print(f"\r{label}: {curve[self.step]:.4f} nats per token" + ' ' * 20, flush=True)
        return curve


def write(file, **record):
    """A line of log.jsonl."""
    print(json.dumps(without_nan(record)), file=file, flush=True)


# ---- the race ------------------------------------------------------------------------------------

@dataclass
class Race:
    """All runs of a command."""
    path: str               # of nanoGPT's model.py
    chosen: RaceSettings
    s: Settings             # but for optimizer, rate and seed
    config: GPTConfig       # of `ours`
    results: str            # a file with a line per run
    data: str               # sum_of_data, before the first run

    def make_all(self):
        """Make what is missing of the runs, then time all in turns."""
        pairs = self.chosen.pairs
        rates = [float(rate) for rate in self.chosen.lrs.split(',')]
        best = dict.fromkeys(pairs, rates[0])
        if seeds_that_pick(self.chosen):
            best = {pair: self.best_rate(pair, rates) for pair in pairs}
        for seed in map(int, self.chosen.seeds.split(',')):
            for pair in pairs:
                self.make(pair, best[pair], seed)
        self.time_in_turns()

    def best_rate(self, pair, rates):
        """The one of `rates` with which the picking seeds end lowest, in the mean."""
        ends = {rate: sum(self.make(pair, rate, seed) for seed in seeds_that_pick(self.chosen))
                for rate in rates}
        best = min(ends, key=ends.get)
        if best in (min(rates), max(rates)):
            print(f"{' '.join(pair)}: {best:g} is the best of --lrs and at its edge; try rates "
                  "beyond it", flush=True)
        return best

    def make(self, pair, rate, seed):
        """Make a run, if it is not in the results; returns its last validation loss."""
        for record in read_lines(self.results):
            if key_of(record) == (*pair, rate, seed):
                check_role(record, self.chosen)
                return record[LOSS]
        name, optimizer = pair
        label = f'{name}-{optimizer}-{rate:g}-s{seed}'
        folder = os.path.join(self.chosen.out, label)
        os.makedirs(folder, exist_ok=True)
        settings = replace(self.s, optimizer=optimizer, learning_rate=rate, seed=seed)
        check_data(self.s.data_dir, self.data)
        contender = Run(name, self.path, settings, self.config)
        with open(os.path.join(folder, 'log.jsonl'), 'w', encoding='utf-8') as log:
            curve = contender.to_the_end(log, label)
        check_data(self.s.data_dir, self.data)
        loss = curve[settings.max_steps]
        append_line(self.results, dict(
            name=name, optimizer=optimizer, learning_rate=rate, seed=seed,
            picks=seed in seeds_that_pick(self.chosen), steps=settings.max_steps,
            parameters=sum(p.numel() for p in contender.model.parameters()),
            val_loss=loss, curve=curve, **self.about()))
        return loss

    def about(self):
        """What a record says of where it was made."""
        return dict(commit=commit(), torch=torch.__version__, date=time.strftime('%Y-%m-%d'),
                    hardware=f'{hardware(self.s.device, self.s.threads)}, {self.s.dtype}')

    def time_in_turns(self):
        """Some steps of each, then of each again: a record of the medians, in ms a step."""
        timed = timed_in(read_lines(self.results))
        pairs = self.chosen.pairs
        if timed.keys() >= set(pairs):
            return
        runs = {pair: Run(pair[0], self.path, replace(self.s, optimizer=pair[1]), self.config)
                for pair in pairs}
        took = {pair: [] for pair in pairs}
        for turn in range(TURNS + 1):
            for pair, contender in runs.items():
                began = time.perf_counter()
                for _ in range(STEPS):
                    contender.train_step()
                wait_for(contender.device)
                if turn:    # the first is a warm-up
                    took[pair].append(1e3 * (time.perf_counter() - began) / STEPS)
        ms = {' '.join(pair): statistics.median(times) for pair, times in took.items()}
        append_line(self.results, dict(ms=ms, **self.about()))


def key_of(record):
    """(name, optimizer, rate, seed) of a run's record; Nones of another record."""
    return tuple(record.get(key) for key in ('name', 'optimizer', 'learning_rate', 'seed'))


def runs_of(records):
    """Those of runs, and not of times. UserError if they are of several races."""
    runs = [r for r in records if 'curve' in r]
    keys = [key_of(r) for r in runs]
    twice = [' '.join(map(str, key)) for key in keys if keys.count(key) > 1]
    if twice:
        raise UserError(f"{twice[0]} is there twice: give the runs of one race")
    if len({r['steps'] for r in runs}) > 1:
        raise UserError("there are several numbers of steps: give the runs of one race")
    return runs


def timing_in(records):
    """The record of those that took turns last, in a list; an empty one if none did."""
    return [r for r in records if isinstance(r.get('ms'), dict)][-1:]


def timed_in(records):
    """{(name, optimizer): ms a step} of that record."""
    return {tuple(pair.split()): ms for r in timing_in(records) for pair, ms in r['ms'].items()}


def table_of(records):
    """
    A row per name, optimizer and learning rate: the loss of seeds that chose between rates, and of
    each other seed; where a curve meets the mean of nanoGPT's ends with AdamW.
    """
    runs = runs_of(records)
    rows = {}   # {(name, optimizer, rate): its records}
    for r in sorted(runs, key=lambda r: r['seed']):
        rows.setdefault(key_of(r)[:3], []).append(r)
    goal, timed = goal_of(runs), timed_in(records)
    lines = []
    for (*pair, rate), made in rows.items():
        judges = [r for r in made if not r['picks']]
        reached = [steps_to(r['curve'], goal) for r in judges] if goal else []
        ms = timed.get(tuple(pair))
        lines.append([
            *pair, f"{made[0]['parameters'] / 1e6:.2f}M", f'{rate:g}',
            ', '.join(f'{r[LOSS]:.3f}' for r in made if r['picks']),
            ', '.join(f"{r['seed']}: {r[LOSS]:.3f}" for r in judges),
            f'{statistics.mean(r[LOSS] for r in judges):.4f}' if judges else '',
            ', '.join(words_of(step, r['curve']) for r, step in zip(judges, reached)),
            f'{ms:.0f}' if ms else ''])
    header = ['model', 'optimizer', 'weights', 'rate', 'of seeds that pick',
              'of each other seed', 'mean', f"steps to {goal:.3f}" if goal else 'steps',
              'ms a step']
    where = where_made([*runs, *timing_in(records)])    # perhaps timed elsewhere
    return f"{table(header, lines)}\n\nNats per token. {where}"


def at_best_rate(made):
    """
    The judging runs of one name and optimizer, at its best rate: that with which the picking seeds
    ended lowest in the mean, or without such seeds the judging ones. A rate that fewer of these
    seeds tried was given up.
    """
    judges = [r for r in made if not r['picks']]
    losses = {}     # {rate: losses}
    for r in [r for r in made if r['picks']] or judges:
        losses.setdefault(r['learning_rate'], []).append(r[LOSS])
    most = max(map(len, losses.values()))
    losses = {rate: of for rate, of in losses.items() if len(of) == most}
    best = min(losses, key=lambda rate: statistics.mean(losses[rate]))
    return [r for r in judges if r['learning_rate'] == best]


def goal_of(runs):
    """The mean loss at which nanoGPT's own, with AdamW, ends at its best rate; None without one."""
    made = [r for r in runs if (r['name'], r['optimizer']) == ('nanogpt', 'adamw')]
    ends = [r[LOSS] for r in at_best_rate(made)] if made else []
    return statistics.mean(ends) if ends else None      # none at that rate yet


def steps_to(curve, goal):
    """The step at which a straight line between evaluations first has this loss; None: never."""
    points = sorted((int(step), loss) for step, loss in curve.items())
    if points[0][1] <= goal:
        return points[0][0]
    for (a, high), (b, low) in zip(points, points[1:]):
        if low <= goal < high:
            return a + (b - a) * (high - goal) / (high - low)
    return None


def words_of(step, curve):
    """What steps_to found; <= where the first evaluation is below the goal already."""
    if step is None:
        return 'not'
    return f"<={step}" if step == min(map(int, curve)) else f'{step:.0f}'


def hold_race(path, chosen, given, asked, options):
    """
    Make what is missing of a race's runs; returns the path of their records. UserError if OUT has
    those of another race. path: of nanoGPT's model.py. chosen: RaceSettings, of `given`. asked:
    what the arguments `options` set of train.py.
    """
    only_with('several --lrs', seeds_that_pick(chosen), given, 'pick')
    prepare_data.prepare_builtin(build(Settings, asked).data_dir)
    s, config = configs_of([*START, *options])
    if task_of(read_meta(s.data_dir)):
        raise UserError(f"{s.data_dir} is a made task; a race is on text")
    dtype = pick_dtype(s.dtype, pick_device(s.device))[0]
    if dtype == torch.float16:
        raise UserError("a race has no gradient scaler for float16: choose --dtype=float32")
    if config.dropout > 0:
        raise UserError(f"dropout={config.dropout}: a race does not drop what train.py would drop: "
                        "set --dropout=0")
    s = replace(s, compile=False, dtype=str(dtype).removeprefix('torch.'))
    if s.threads is not None:
        torch.set_num_threads(s.threads)
    own = sum_of(inspect.getsource(sys.modules[__name__]))  # CONTENDERS may have been edited
    keep_recipe(chosen.out, [*options, f'nanogpt={checksum(path)[:12]}', f'code={CODE}',
                             f'race={own}', f'settings={sum_of(repr((s, config)))}',
                             f'dtype={s.dtype}'], s.data_dir)
    results = os.path.join(chosen.out, 'runs.jsonl')
    with alone(chosen.out):
        Race(path, chosen, s, config, results, sum_of_data(s.data_dir)).make_all()
    return results


def main(argv):
    mine = own_words(argv, RaceSettings)
    files = [arg for arg in argv if os.path.basename(arg) == 'model.py' or arg.endswith('.jsonl')]
    options = [arg for arg in argv if arg not in (*mine, *files)]
    given, _ = read(mine, __doc__, RaceSettings)
    chosen = build(RaceSettings, given)
    asked, more = read(options, '', Settings, GPTConfig)
    if more or len(files) != 1:
        raise UserError("name the model.py of nanoGPT, or a .jsonl of runs that are made (--help)")
    refused = [name for name in REFUSED if name in asked]
    if any(arg.startswith('--learning_rate=') for arg in options):
        refused.append('learning_rate')     # that of a file gives way to --lrs
    if refused:
        raise UserError(f"{refused[0]}={asked[refused[0]]}: the race chooses this itself, by its "
                        "settings, or has no use for it (--help)")

    [path] = files
    idle = {**given, **asked}
    if path.endswith('.jsonl') and idle:
        raise UserError(f"{min(idle)}: does nothing for a file of runs that are made; leave it "
                        "out")
    results = path if path.endswith('.jsonl') else hold_race(path, chosen, given, asked, options)
    records = read_lines(results)
    if not runs_of(records):
        raise UserError(f"{results}: no finished run here")
    print(table_of(records))


if __name__ == '__main__':
    run(main)
