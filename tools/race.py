"""
The race with nanoGPT: its model.py, as you have it, beside this one, trained alike on the same
bytes.

    python tools/race.py ../nanoGPT/model.py                    hours on two cores
    python tools/race.py ../nanoGPT/model.py --names=ours,gelu --optimizers=muon --seeds=1
    python tools/race.py docs/runs/race.jsonl                   the table of runs that are made

Each name races with each optimizer at its best learning rate: if there are several --lrs, each runs
with the seed --pick, and the one that ends lowest runs with --seeds, which alone are in the table.
`ours` is the plain GPT as loops start (plain_scaled in tools/compare.py); each other name is `ours`
with one thing as nanoGPT has it. All have nanoGPT's loop in common with train.py: the same windows
in the same order, one schedule, weight decay on matrices, clipping. Config files and settings of
train.py hold for all.

Writes OUT/NAME-OPTIMIZER-RATE-sSEED/log.jsonl (train.py's format, for tools/plot.py curves) and a
line per run in OUT/runs.jsonl; stopped, the same command goes on with the run that it was at. At
the end it times a step of each, in turns. The file of nanoGPT is executed: take one you trust.
"""

import importlib.util
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
from configurator import build, check_range, read
from engine.build import new_model
from engine.files import UserError, run, table
from engine.hardware import pick_device, pick_dtype
from engine.prepare import prepare
from engine.shards import read_meta
from engine.start import vocabulary_of
from engine.windows import Windows
from model import Attention, GPTConfig
from tools.compare import commit, hardware, keep_recipe, read_lines, read_log
from train import Settings, learning_rate, make_optimizer

START = [os.path.join(ROOT, 'config', 'loop.py'), '--ponder_steps=0']   # plain_scaled's
LOSS = 'val_loss'


@dataclass
class RaceSettings:
    """who races; every other setting is train.py's"""
    names: str = 'nanogpt,ours'         # of CONTENDERS, comma-separated
    optimizers: str = 'adamw,muon'      # each name races with each
    lrs: str = '1.5e-3,3e-3,6e-3'       # peak learning rates that each one tries
    pick: int = 0                       # the seed that chooses the rate, and is in no table
    seeds: str = '1,2,3'                # those of the table
    rounds: int = 5                     # of ten steps each, timed in turns at the end
    out: str = 'out/race'               # folder of the runs

    def __post_init__(self):
        check_range(self, 1, math.inf, 'rounds')
        if ',' in self.lrs and str(self.pick) in self.seeds.split(','):
            raise ValueError(f"pick={self.pick} is one of seeds={self.seeds}: what chooses the "
                             "rates cannot judge them")
        for name in self.names.split(','):
            if name not in CONTENDERS:
                raise ValueError(f"names={name}: choose from {', '.join(CONTENDERS)}")


# ---- who races -----------------------------------------------------------------------------------

class NanoGPT(nn.Module):
    """nanoGPT's GPT, from its own file, under the names that make_optimizer asks for."""

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
    """In the place of dropout behind the embedding: adds a learned vector for each position."""

    def __init__(self, config):
        super().__init__()
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.scale = config.embed_scale

    def forward(self, x):
        return x + self.wpe.weight[:x.size(1)] * self.scale


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
        self.dtype = pick_dtype(s.dtype, self.device)[0]
        self.meta = read_meta(s.data_dir)
        self.train_data, self.val_data = [
            Windows(s.data_dir, split, self.meta, config.block_size) for split in ('train', 'val')]
        self.accumulation, self.size = s.micro_batches(config.block_size, 1)
        self.model = new_contender(name, path, config, s.seed)
        if name == 'nanogpt':
            self.model.to(self.device)
        else:
            prepare(self.model, s, self.device)
        self.optimizer = make_optimizer(s, self.model, None, self.device, self.dtype)

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def train_step(self):
        """Returns the mean loss of the step."""
        s, total = self.s, 0.0
        self.model.train()
        for group in self.optimizer.param_groups:
            group['lr'] = learning_rate(s, self.step)
        first = self.step * self.accumulation * self.size
        for micro in range(self.accumulation):
            x, y = self.train_data.sample(first + micro * self.size, self.size, s.seed, self.device)
            with self.autocast():
                _, loss = self.model(x, y)
            loss = loss / self.accumulation
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), s.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return total

    @torch.no_grad()
    def evaluate(self):
        """Mean nats per token of the windows that train.py evaluates."""
        self.model.eval()
        windows = self.val_data.spread(max(1, self.s.eval_tokens // self.val_data.T))
        total = 0.0
        for i in range(0, len(windows), self.size):
            some = windows[i:i + self.size]
            with self.autocast():
                _, loss = self.model(*self.val_data.get(some, self.device))
            total += loss.item() * len(some)
        return total / len(windows)

    def to_the_end(self, log, label):
        """Train, with a line of `log` wherever train.py would write one; returns the last loss."""
        s, losses, began = self.s, [], time.perf_counter()
        while self.step < s.max_steps:
            losses.append(self.train_step())
            last = self.step == s.max_steps
            if last or self.step == 1 or self.step % s.log_interval == 0:
                loss = statistics.fmean(losses)
                ms = (time.perf_counter() - began) * 1e3 / len(losses)
                write(log, step=self.step, tokens=self.step * s.batch_tokens, loss=loss, ms=ms)
                print(f"\r{label}: step {self.step} of {s.max_steps}, loss {loss:.4f}", end='',
                      flush=True)
                losses, began = [], time.perf_counter()
            if last or self.step % s.eval_interval == 0:
                value = self.evaluate()
                write(log, step=self.step, tokens=self.step * s.batch_tokens, val_loss=value)
                began = time.perf_counter()
        print(f"\r{label}: {value:.4f} nats per token" + ' ' * 20, flush=True)
        return value


def write(file, **record):
    print(json.dumps(record), file=file, flush=True)


# ---- the race ------------------------------------------------------------------------------------

def race(path, race_settings, s, config, results):
    """Make what is missing of the runs, then time all in turns."""
    r = race_settings
    pairs = [(n, o) for n in r.names.split(',') for o in r.optimizers.split(',')]
    rates = [float(rate) for rate in r.lrs.split(',')]
    chosen = dict.fromkeys(pairs, rates[0])     # of a name and an optimizer: its rate
    if len(rates) > 1:
        for name, optimizer in pairs:
            ends = {rate: loss_of(path, name, optimizer, rate, r.pick, s, config, r, results)
                    for rate in rates}
            chosen[name, optimizer] = min(ends, key=ends.get)
    for seed in map(int, r.seeds.split(',')):
        for name, optimizer in pairs:
            rate = chosen[name, optimizer]
            loss_of(path, name, optimizer, rate, seed, s, config, r, results)
    time_in_turns(path, pairs, s, config, r, results)


def loss_of(path, name, optimizer, rate, seed, s, config, r, results):
    """The last validation loss of a run, which is made now if it is not in the results."""
    for record in read_lines(results):
        made = record['name'], record['optimizer'], record.get('learning_rate'), record.get('seed')
        if made == (name, optimizer, rate, seed):
            return record[LOSS]
    label = f'{name}-{optimizer}-{rate:g}-s{seed}'
    folder = os.path.join(r.out, label)
    os.makedirs(folder, exist_ok=True)
    s = replace(s, optimizer=optimizer, learning_rate=rate, seed=seed)
    with open(os.path.join(folder, 'log.jsonl'), 'w', encoding='utf-8') as log:
        contender = Run(name, path, s, config)
        loss = contender.to_the_end(log, label)
    curve = {line['step']: line[LOSS] for line in read_log(folder) if LOSS in line}
    with open(results, 'a', encoding='utf-8') as f:
        write(f, name=name, optimizer=optimizer, learning_rate=rate, seed=seed,
              picks=seed == r.pick, steps=s.max_steps,
              parameters=sum(p.numel() for p in contender.model.parameters()),
              val_loss=loss, curve=curve, **about(s, contender.dtype))
    return loss


def about(s, dtype):
    """What a record says of where it was made."""
    precision = str(dtype).removeprefix('torch.')
    return dict(commit=commit(), torch=torch.__version__, date=time.strftime('%Y-%m-%d'),
                hardware=f'{hardware(s.device, s.threads)}, {precision}')


def time_in_turns(path, pairs, s, config, r, results):
    """Ten steps of each, then of each again: a record of the medians, in milliseconds a step."""
    if {*pairs} <= {(x['name'], x['optimizer']) for x in read_lines(results) if 'ms' in x}:
        return
    runs = {pair: Run(pair[0], path, replace(s, optimizer=pair[1]), config) for pair in pairs}
    took = {pair: [] for pair in pairs}
    for turn in range(r.rounds + 1):
        for pair, contender in runs.items():
            began = time.perf_counter()
            for _ in range(10):
                contender.train_step()
            if turn:    # the first is a warm-up
                took[pair].append((time.perf_counter() - began) * 100)
    with open(results, 'a', encoding='utf-8') as f:
        for (name, optimizer), ms in took.items():
            write(f, name=name, optimizer=optimizer, ms=statistics.median(ms),
                  **about(s, contender.dtype))


def table_of(records):
    """A row per name and optimizer: the rate chosen, the loss of each seed, what it is behind."""
    runs, ms = {}, {}
    for record in records:
        pair = record['name'], record['optimizer']
        if 'ms' in record:
            ms[pair] = record['ms']
        else:
            runs.setdefault(pair, []).append(record)
    goal = goal_of(runs)
    rows = []
    for pair, made in runs.items():
        tried = ', '.join(f"{x['learning_rate']:g}: {x[LOSS]:.3f}" for x in made if x['picks'])
        seeds = sorted(at_best_rate(made), key=lambda x: x['seed'])
        losses = [x[LOSS] for x in seeds]
        reached = [steps_to(x['curve'], goal) for x in seeds] if goal else []
        rows.append([
            *pair, f"{made[0]['parameters'] / 1e6:.2f}M", tried,
            f"{seeds[0]['learning_rate']:g}" if seeds else '',
            f'{statistics.mean(losses):.4f}' if losses else '',
            ', '.join(f'{loss:.3f}' for loss in losses),
            ', '.join(f'{step:.0f}' if step else 'not' for step in reached),
            f'{ms[pair]:.0f}' if pair in ms else ''])
    header = ['model', 'optimizer', 'weights', 'rates tried', 'rate', 'nats per token',
              'each seed', f"steps to {goal:.3f}" if goal else '', 'ms a step']
    return table(header, rows)


def at_best_rate(made):
    """
    Of the runs of one name and optimizer those that count: at the rate with which the picking seed
    ended lowest, or without one any seed.
    """
    tried = [x for x in made if x['picks']] or made
    best = min(tried, key=lambda x: x[LOSS])['learning_rate']
    return [x for x in made if not x['picks'] and x['learning_rate'] == best]


def goal_of(runs):
    """The mean loss at which nanoGPT's own, with AdamW, ends."""
    made = runs.get(('nanogpt', 'adamw'))
    ends = [x[LOSS] for x in at_best_rate(made)] if made else []
    return statistics.mean(ends) if ends else None


def steps_to(curve, goal):
    """The step at which a straight line between evaluations first has this loss; None: never."""
    points = sorted((int(step), loss) for step, loss in curve.items())
    for (a, high), (b, low) in zip(points, points[1:]):
        if low <= goal < high:
            return a + (b - a) * (high - goal) / (high - low)
    return points[0][0] if points[0][1] <= goal else None


def main(argv):
    ours = RaceSettings.__dataclass_fields__
    mine = [arg for arg in argv if arg[2:].split('=')[0] in ours or arg in ('-h', '--help')]
    r = build(RaceSettings, read(mine, __doc__, RaceSettings)[0])
    rest = [arg for arg in argv if arg not in mine]
    files = [arg for arg in rest if os.path.basename(arg) == 'model.py' or arg.endswith('.jsonl')]
    asked, more = read([*START, *(arg for arg in rest if arg not in files)], '', Settings,
                       GPTConfig)
    if more or len(files) != 1:
        raise UserError("name the model.py of nanoGPT, or a .jsonl of runs that are made (--help)")
    [path] = files
    results = path
    if path.endswith('.py'):
        s = build(Settings, asked)
        results = os.path.join(r.out, 'runs.jsonl')
        if s.threads is not None:
            torch.set_num_threads(s.threads)
        prepare_data.prepare_builtin(s.data_dir)
        keep_recipe(r.out, [arg for arg in rest if arg not in files], s.data_dir)
        vocabulary = vocabulary_of(read_meta(s.data_dir)['n_tokens'])
        config = build(GPTConfig, {**vocabulary, **{
            name: value for name, value in asked.items() if hasattr(GPTConfig, name)}})
        race(path, r, s, config, results)
    print(table_of(read_lines(results)))


if __name__ == '__main__':
    run(main)
