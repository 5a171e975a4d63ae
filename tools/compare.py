"""
A fair comparison: the same data, tokens, batches and optimiser for every mechanism, several seeds,
one run after another.

    python tools/compare.py config/size/tiny.py     every mechanism, three seeds: hours on a laptop
    python tools/compare.py config/size/tiny.py --names=plain_scaled,loop,plain_scaled_as_loop

A name is one of RUNS or BY_NAME, several joined by + (loop+depth_attn), or PLAIN_as_NAME: a plain
run of as many training FLOPs, by more steps. Files and settings of train.py hold for all: of a
mechanism's own file its learning rate and number of steps do not count. Stopped, the same command
goes on. On a made task (config/task/) the table counts right answers.
Writes OUT/NAME-sSEED (train.py's folder, and output.txt) and a line per run in OUT/runs.jsonl.
"""

import contextlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)  # run from anywhere
import prepare_data
from configurator import build, read
from engine.checkpoint import CHECKPOINTS, load_checkpoint
from engine.files import UserError, on_disk, run
from engine.hardware import pick_device, stop_signals
from engine.shards import read_meta
from engine.tasks import task_of
from engine.fast import without_numbers
from model import GPTConfig
from sample import load_model
from tools.answers import summary
from train import Settings


@dataclass
class CompareSettings:
    """what to compare; every other setting is train.py's"""
    names: str = 'all'        # comma-separated (all: RUNS, and a PLAIN_as_NAME for what costs more)
    seeds: str = '1337,1,2'   # every name is run with the first seed, then with the next
    out: str = 'out/compare'  # folder of the runs
    table_only: bool = False  # print the table of the runs in `out` that are finished
    answers: int = 1000       # on a made task: problems that every finished model answers


# name: its config file, and what differs from it. plain_scaled starts as loop, chain and latent do,
# with their embedding scale and initial weights, plain_ponderlm as embedding, gate and pause. A run
# of your own is one more line.
RUNS = {
    'plain': ('vanilla',),
    'plain_scaled': ('loop', '--ponder_steps=0'),
    'plain_ponderlm': ('ponder', '--ponder_steps=0'),
    'depth_attn': ('depth_attn',),
    'depth_uniform': ('depth_attn', '--depth_mode=uniform'),
    'depth_stride1': ('depth_attn', '--depth_stride=1'),
    'loop': ('loop',),
    'embedding': ('ponder',),
    'chain': ('chain',),
    'pause': ('pause',),
    'latent': ('latent',),
    'gate': ('halting_gate',),
    'router': ('halting_router',),
    'mask': ('halting_mask', '--ponder_steps=1'),
}
# more, which `all` leaves out
BY_NAME = {
    # for config/task/, whose models have one layer: as many layers as loop has passes
    'plain_deep': ('loop', '--ponder_steps=0', '--n_layer=4'),
    # the term for fewer steps waits
    'router_late': ('halting_router', '--halt_start=0.6', '--halt_full=0.8'),
    # as PonderLM-2's released scripts have it: their vanilla baseline, and the norms of all runs
    'plain_stock': ('vanilla', '--norm_eps=0.1', '--init_std=0.01', '--weight_decay=0.01'),
    'latent_stock': ('latent', '--norm_eps=0.1'),
}
PONDERLM = ('embedding', 'gate', 'pause')  # these start as plain_ponderlm


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def plain_of(name):
    """The plain run that starts as this one."""
    return 'plain_ponderlm' if name in PONDERLM else 'plain_scaled'


COSTLY = [name for name in RUNS if not name.startswith(('plain', 'depth'))]
KNOWN = {**RUNS, **BY_NAME}
ALL = [*RUNS, *(f'{plain_of(name)}_as_{name}' for name in COSTLY)]
OURS = ('seed', 'out_dir', 'init_from', 'eval_only', 'dry_run')  # of train.py, but chosen here
LOSS = 'val_nats_per_byte'
NUMBERS = ('step', 'loss', 'val_loss', LOSS, 'right', 'passes', 'seed')   # of a log, of results
AMOUNTS = ('tokens', 'ms', 'steps', 'flops', 'seconds')         # more than 0


# -------------------------------------------------------------------------------------------------
# What a run is


@dataclass
class Plan:
    """All runs of a name, whatever their seed."""
    args: list        # train.py's arguments, but for seed and folder
    settings: dict    # all settings of train.py and of the model
    flops: float      # of training, per token


@dataclass
class Run:
    """One run of train.py."""
    name: str
    seed: int
    folder: str
    plan: Plan

    @property
    def args(self):
        return [*self.plan.args, f'--seed={self.seed}', f'--out_dir={self.folder}']


def training_flops(config):
    """Forward and backward FLOPs per token."""
    return without_numbers(config).flops_per_token()


def make_plan(name, common, asked):
    """The Plan of a name. common: train.py's arguments for all; asked: the settings in them."""
    base, _, like = name.partition('_as_')
    parts = base.split('+')
    unknown = set(parts) - set(KNOWN)
    if unknown or (like and not base.startswith('plain')):
        raise UserError(f"--names={name}: choose from "
                        f"{', '.join([*ALL, *BY_NAME])}")
    files = [config_file(part) for part in parts]
    refuse_shared_settings(name, parts)

    # what the mechanisms' files say of the recipe is overruled by what holds for all
    recipe = asdict(build(Settings, asked))
    of_files, _ = read(files, '', Settings, GPTConfig)
    overruled = [n for n in of_files if n in recipe and n not in (*asked, 'out_dir')]
    options = [option for part in parts for option in KNOWN[part][1:]]
    args = [*files, *common, *(f'--{n}={recipe[n]}' for n in overruled), *options]

    given, _ = read(args, '', Settings, GPTConfig)
    given['max_steps'] = recipe['max_steps']
    n_tokens = read_meta(recipe['data_dir'])['n_tokens']
    of_data = {'n_tokens': n_tokens, 'vocab_size': -(-n_tokens // 64) * 64}  # as train.py does
    config = build(GPTConfig, {**of_data, **given})
    settings = {**asdict(build(Settings, given)), **asdict(config)}
    flops = training_flops(config)
    if like:
        ratio = make_plan(like, common, asked).flops / flops
        settings['max_steps'] = round(recipe['max_steps'] * ratio)
        args.append(f"--max_steps={settings['max_steps']}")
    return Plan(args, settings, flops)


def config_file(part):
    path = os.path.join(ROOT, 'config', f'{KNOWN[part][0]}.py')
    return os.path.relpath(path)


def refuse_shared_settings(name, parts):
    """UserError if two parts of a name such as loop+pause set the same of the model."""
    owner = {}
    for part in parts:
        options = KNOWN[part][1:]
        given, _ = read([config_file(part), *options], '', GPTConfig, Settings)
        for setting in given:
            if setting not in GPTConfig.__dataclass_fields__:
                continue
            if setting in owner:
                raise UserError(f"--names={name}: {owner[setting]} and {part} both set {setting}")
            owner[setting] = part


# -------------------------------------------------------------------------------------------------
# Making the runs


def read_lines(path):
    """
    The objects of a .jsonl file, none if it is missing; what a killed process left of a line is
    skipped, and so is what should be a number or a text and is none.
    """
    if not os.path.lexists(path):
        return []
    with on_disk(path, 'read'), open(path, encoding='utf-8', errors='replace') as f:
        lines = f.readlines()
    records = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            records.append(json.loads(line))
    return [usable(record) for record in records if isinstance(record, dict)]


def usable(record):
    """A record without the fields whose values are none: a loss that is null, zero FLOPs."""
    fits = dict.fromkeys(NUMBERS, is_number)
    fits.update(dict.fromkeys(AMOUNTS, lambda value: is_number(value) and value > 0))
    fits['name'] = lambda value: isinstance(value, str)
    return {name: value for name, value in record.items()
            if name not in fits or fits[name](value)}


def final_loss(folder, settings):
    """
    Validation nats per byte after the last step, None if the run is not finished; UserError if it
    has other settings.
    """
    path = os.path.join(folder, 'settings.json')
    if os.path.exists(path):
        before, _ = read([path], '', Settings, GPTConfig)
        refuse_other_settings(folder, before, settings)
    for record in read_lines(os.path.join(folder, 'log.jsonl')):
        if record.get('step') == settings['max_steps'] and LOSS in record:
            return record[LOSS]
    return None


def refuse_other_settings(folder, before, settings):
    for name, value in settings.items():
        if name in OURS:
            continue
        # train.py's None is saved as None; a model's None as what GPTConfig made of it
        if value is None and not hasattr(Settings, name):
            continue
        if before.get(name, value) != value:
            raise UserError(f"{folder} was run with {name}={before[name]}, now it is {value}: "
                            "choose another --out")


def train(args, folder, settings):
    """
    Run train.py to its end, resuming what is there. UserError if it fails; leaves if it was told to
    stop.
    """
    paths = [os.path.join(folder, name) for name in CHECKPOINTS]
    checkpoints = [path for path in paths if os.path.exists(path)]
    if checkpoints and load_checkpoint(folder)['step'] >= settings['max_steps']:
        # killed in the last evaluation: the steps since the checkpoint before come out equal
        os.remove(checkpoints.pop(0))
    command = [sys.executable, os.path.join(ROOT, 'train.py'), *args]
    if checkpoints:
        command.append('--init_from=resume')
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, 'output.txt'), 'a+', encoding='utf-8') as output:
        status = call(command, output)
        output.seek(0)
        last_line = output.read().strip()[-300:].splitlines()[-1:]

    unfinished = status == 0 and final_loss(folder, settings) is None
    if status == -signal.SIGTERM or unfinished:
        print("stopped; the same command goes on", file=sys.stderr)
        sys.exit(130)
    if status:
        raise UserError(f"{folder}: {' '.join(last_line)} (exit status {status}; the rest is in "
                        "output.txt there)")


def call(command, output):
    """
    The exit status of a process that writes to this file. It has a session of its own, so that
    Ctrl-C, or the end of the terminal, reaches it once, through here: it then saves and stops.
    """
    child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT,
                             start_new_session=True)

    def pass_on(*_):
        child.send_signal(signal.SIGTERM)
    handlers = {number: signal.signal(number, pass_on) for number in stop_signals()}
    status = child.wait()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return status


def record(run, problems):
    """The line of runs.jsonl for a finished Run. problems: how many of a made task it answers."""
    settings = run.plan.settings
    tokens = settings['max_steps'] * settings['batch_tokens']
    answered = {}
    if task_of(read_meta(settings['data_dir'])):
        model, _, _ = load_model(run.folder, pick_device(settings['device']))
        answered = summary(model, settings['data_dir'], problems)
    return {
        **answered,
        'name': run.name,
        'seed': run.seed,
        'command': ' '.join(['python', 'train.py', *run.args]),
        'steps': settings['max_steps'],
        'tokens': tokens,
        'flops': tokens * run.plan.flops,
        'seconds': seconds_of_steps(os.path.join(run.folder, 'log.jsonl')),
        LOSS: final_loss(run.folder, settings),
        'commit': commit(),
        'torch': torch.__version__,
        'hardware': hardware(settings['device']),
        'date': time.strftime('%Y-%m-%d'),
    }


def seconds_of_steps(log):
    """Seconds of a run's training steps: no start, no evaluation, no saving."""
    ms = {}     # of each step, the mean since the line before
    for r in read_lines(log):
        if 'ms' in r and 'step' in r:
            ms[r['step']] = r['ms']
    steps = [0, *sorted(ms)]
    return sum(ms[step] * (step - before) for before, step in pairwise(steps)) / 1e3


def commit():
    """The commit of this code, '-dirty' if it was changed since; None without git."""
    describe = ['git', 'describe', '--always', '--dirty', '--exclude=*', '--abbrev=12']
    try:
        done = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def hardware(name):
    """The name of the device, of a CPU with the number of threads."""
    device = pick_device(name)
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    cpu = ''
    if hasattr(torch.cpu, 'get_capabilities'):
        cpu = torch.cpu.get_capabilities().get('cpu_name', '')
    return f'{cpu}, {torch.get_num_threads()} threads'


def make_runs(compare, common, asked, results):
    """Make all runs that are not finished; returns how many failed."""
    names = ALL if compare.names == 'all' else compare.names.split(',')
    if not re.fullmatch(r'\d+(,\d+)*', compare.seeds):
        raise UserError(f"--seeds={compare.seeds}: give whole numbers, such as 1,2,3")
    seeds = [int(seed) for seed in compare.seeds.split(',')]
    made = [(r['name'], r['seed']) for r in read_lines(results) if 'name' in r and 'seed' in r]

    # what is wrong with one of them shows before the first run, and so does a finished run of
    # another recipe
    plans = {}
    for name in [*names, *(name for name, _ in made)]:
        if name not in plans:
            plans[name] = make_plan(name, common, asked)
    for name, seed in made:
        final_loss(folder_of(compare, name, seed), plans[name].settings)

    failed = 0
    for seed in seeds:
        for name in names:
            run = Run(name, seed, folder_of(compare, name, seed), plans[name])
            if not make_run(run, results, compare.answers):
                failed += 1
    return failed


def folder_of(compare, name, seed):
    return os.path.join(compare.out, f'{name}-s{seed}')


def make_run(run, results, problems):
    """
    Make a run, if it is not finished, and add its line to the results, see `record`. False if it
    failed.
    """
    loss = final_loss(run.folder, run.plan.settings)
    for r in read_lines(results):
        if (r.get('name'), r.get('seed')) == (run.name, run.seed):
            return True
    if loss is None:
        try:
            train(run.args, run.folder, run.plan.settings)
        except UserError as error:  # the others may go well
            print(f"{run.name}, seed {run.seed} failed: {error}", file=sys.stderr, flush=True)
            return False
    r = record(run, problems)
    with open(results, 'a', encoding='utf-8') as f:
        f.write(json.dumps(r) + '\n')
    print(f"{run.name}, seed {run.seed}: {r[LOSS]:.4f} nats per byte, {r['steps']} steps, "
          f"{r['seconds']:.0f} s", flush=True)
    return True


# -------------------------------------------------------------------------------------------------
# The table


def table(records):
    """
    Markdown, a row per name, against a plain run if there is one. Differences are between equal
    seeds: mean (lowest to highest).
    """
    runs = {}  # {name: its records}
    for r in records:
        runs.setdefault(r['name'], []).append(r)
    plain = [name for name in ('plain', 'plain_scaled', 'plain_ponderlm') if name in runs]
    base = [*plain, *runs][0]
    if all('right' in r for r in records):
        rows = ["| run | seeds | right answers | lowest to highest | passes | nats per byte | "
                "x FLOPs | x time |"]
        cells = [answers_row(name, runs, base) for name in runs]
    else:
        rows = [f"| run | seeds | nats per byte | lowest to highest | minus {base} | "
                "minus plain of equal FLOPs | x FLOPs | x time |"]
        cells = [loss_row(name, runs, base) for name in runs]
    rows.append('| --- | --- | --- | --- | --- | --- | --- | --- |')
    rows += [f"| {' | '.join(row)} |" for row in cells]
    about = {}
    for key in ('hardware', 'torch', 'commit', 'date'):
        about[key] = ', '.join(sorted({str(r[key]) for r in records}))
    rows += ['', "{hardware}; torch {torch}; commit {commit}; {date}. "
                 "Equal FLOPs: within 5 %.".format(**about)]
    return '\n'.join(rows)


def answers_row(name, runs, base):
    """The cells of a run on a made task."""
    records = runs[name]
    right = [r['right'] for r in records]
    return [
        name,
        str(len(records)),
        f"{mean(records, 'right'):.1%}",
        f"{min(right):.1%} to {max(right):.1%}",
        f"{mean(records, 'passes'):.2f}",
        f"{mean(records, LOSS):.4f}",
        *costs(records, runs[base]),
    ]


def loss_row(name, runs, base):
    """The cells of a run on text."""
    records = runs[name]
    losses = [r[LOSS] for r in records]
    return [
        name,
        str(len(records)),
        f"{statistics.mean(losses):.4f}",
        f"{min(losses):.4f} to {max(losses):.4f}",
        difference(name, base, runs),
        difference(name, plain_of_equal_flops(name, runs, base), runs),
        *costs(records, runs[base]),
    ]


def costs(records, base):
    """FLOPs and time of training, as multiples of those of the base."""
    return [f"{mean(records, key) / mean(base, key):.2f}" for key in ('flops', 'seconds')]


def mean(records, key):
    return statistics.mean(r[key] for r in records)


def difference(name, other, runs):
    """'mean (lowest to highest)' of name's losses minus other's; '' if they share no seed."""
    if other is None or other == name:
        return ''
    theirs = {r['seed']: r[LOSS] for r in runs[other]}
    by_seed = [r[LOSS] - theirs[r['seed']] for r in runs[name] if r['seed'] in theirs]
    if not by_seed:
        return ''
    return f"{statistics.mean(by_seed):+.4f} ({min(by_seed):+.4f} to {max(by_seed):+.4f})"


def plain_of_equal_flops(name, runs, base):
    """The plain run of the nearest FLOPs (of equal ones `base`); None if all are over 5 % off."""
    flops = mean(runs[name], 'flops')
    off = {}
    for other in runs:
        if other.startswith('plain'):
            off[other] = abs(mean(runs[other], 'flops') / flops - 1)
    near = [other for other in off if off[other] <= 0.05]
    return min(near, key=lambda other: (off[other], other != base), default=None)


# -------------------------------------------------------------------------------------------------


def main(argv):
    ours = [arg for arg in argv if is_ours(arg)]
    common = [arg for arg in argv if not is_ours(arg)]
    compare = build(CompareSettings, read(ours, __doc__, CompareSettings)[0])
    asked, rest = read(common, '', Settings, GPTConfig, CompareSettings)
    if rest:
        raise UserError(f"{rest[0]}: neither a setting (--name=value) nor a config file "
                        "(.py, .json)")
    for name in OURS:
        if name in asked:
            raise UserError(f"{name}={asked[name]}: this is chosen here for each run; see --help")

    data_dir = build(Settings, asked).data_dir
    results = os.path.join(compare.out, 'runs.jsonl')
    failed = 0
    if not compare.table_only:
        prepare_data.prepare_builtin(data_dir)
        failed = make_runs(compare, common, asked, results)
    records = read_lines(results)
    if records:
        try:
            print(table(records))
        except (KeyError, TypeError) as error:
            raise UserError(f"{results}: a line is not a run's record ({error}): take it "
                            "out") from None
    elif not failed:
        raise UserError(f"{results}: no finished run; leave out --table_only")
    if failed:
        raise UserError(f"{failed} runs failed, see above; the same command tries them again")


def is_ours(arg):
    """Whether an argument is for this program, not for train.py."""
    name = arg[2:].split('=')[0]
    return arg in ('-h', '--help') or name in CompareSettings.__dataclass_fields__


if __name__ == '__main__':
    run(main)
