"""
A fair comparison: the same data, tokens, batches and optimiser for every mechanism, several seeds, one run after another.

    python tools/compare.py config/size/tiny.py                             every mechanism, three seeds: hours on a laptop
    python tools/compare.py config/size/tiny.py --names=plain_scaled,loop,plain_scaled_as_loop --seeds=1,2

A name is one of RUNS, several joined by + (loop+depth_attn), or PLAIN_as_NAME: a plain run of as many training FLOPs, by more steps.
Files and settings of train.py hold for all: of a mechanism's own file its learning rate and number of steps do not count.
Stopped, the same command goes on. Writes OUT/NAME-sSEED (train.py's folder, and output.txt) and a line per run in OUT/runs.jsonl.
"""

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise, product

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)  # run from anywhere
import prepare_data
from engine.checkpoint import CHECKPOINTS, load_checkpoint
from configurator import build, read
from engine.errors import UserError, run
from engine.shards import read_meta
from engine.hardware import pick_device, stop_signals
from model import GPT, GPTConfig
from train import Settings


@dataclass
class CompareSettings:
    """what to compare; every other setting is train.py's"""
    names: str = 'all'                  # comma-separated (all: each of RUNS, and a PLAIN_as_NAME for those that cost more)
    seeds: str = '1337,1,2'             # every name is run with the first seed, then with the next
    out: str = 'out/compare'            # folder of the runs
    table_only: bool = False            # print the table of the runs in `out` that are finished


# name: its config file, and what differs from it. plain_scaled starts as loop, chain and latent do, with their embedding scale and
# initial weights, plain_ponderlm as embedding, gate and pause. A run of your own is one more line
RUNS = {'plain': ('vanilla',), 'plain_scaled': ('loop', '--ponder_steps=0'), 'plain_ponderlm': ('ponder', '--ponder_steps=0'),
        'depth_attn': ('depth_attn',),
        'depth_uniform': ('depth_attn', '--depth_mode=uniform'), 'depth_stride1': ('depth_attn', '--depth_stride=1'),
        'loop': ('loop',), 'embedding': ('ponder',), 'chain': ('chain',), 'pause': ('pause',), 'latent': ('latent',),
        'gate': ('halting_gate',), 'router': ('halting_router',), 'mask': ('halting_mask', '--ponder_steps=1')}
PONDERLM = ('embedding', 'gate', 'pause')  # these start as plain_ponderlm
ALL = [*RUNS, *(('plain_ponderlm' if name in PONDERLM else 'plain_scaled') + f'_as_{name}' for name in RUNS
                if not name.startswith(('plain', 'depth')))]
OURS = ('seed', 'out_dir', 'init_from', 'eval_only', 'dry_run')  # settings of train.py that are chosen here, for each run
LOSS = 'val_nats_per_byte'


def training_flops(config):
    """Forward and backward FLOPs per token."""
    with torch.device('meta'): return GPT(config).flops_per_token()  # shapes, no numbers


def plan(name, common, asked):
    """Of a run: train.py's arguments but for seed and folder (asked: the settings in `common`), all its settings, FLOPs per token."""
    base, _, like = name.partition('_as_')
    parts, recipe = base.split('+'), asdict(build(Settings, asked))
    if set(parts) - set(RUNS) or like and not base.startswith('plain'):
        raise UserError(f"--names={name}: choose from {', '.join(ALL)}")
    files = [os.path.relpath(os.path.join(ROOT, 'config', f'{RUNS[part][0]}.py')) for part in parts]
    owner = {}  # of each setting of the model
    for part, file in zip(parts, files):
        for n in read([file, *RUNS[part][1:]], '', GPTConfig, Settings)[0].keys() & GPTConfig.__dataclass_fields__.keys():
            if n in owner: raise UserError(f"--names={name}: {owner[n]} and {part} both set {n}")
            owner[n] = part
    own = [n for n in read(files, '', Settings, GPTConfig)[0] if n in recipe and n not in (*asked, 'out_dir')]
    args = [*files, *common, *(f'--{n}={recipe[n]}' for n in own), *(option for part in parts for option in RUNS[part][1:])]
    given = {**read(args, '', Settings, GPTConfig)[0], 'max_steps': recipe['max_steps']}
    rows = {'n_tokens': (n := read_meta(recipe['data_dir'])['n_tokens']), 'vocab_size': -(-n // 64) * 64}  # as train.py does
    config = build(GPTConfig, {**rows, **given})
    flops, settings = training_flops(config), {**asdict(build(Settings, given)), **asdict(config)}
    if like:
        settings['max_steps'] = round(recipe['max_steps'] * plan(like, common, asked)[2] / flops)
        args.append(f"--max_steps={settings['max_steps']}")
    return args, settings, flops


def read_lines(path):
    """The objects of a .jsonl file, none if it is missing; what a killed process left of a line is skipped."""
    records = []
    with contextlib.suppress(FileNotFoundError), open(path, encoding='utf-8', errors='replace') as f:
        for line in f:
            with contextlib.suppress(ValueError): records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def final_loss(folder, settings):
    """Validation nats per byte after the last step, None if the run is not finished; UserError if it has other settings."""
    path = os.path.join(folder, 'settings.json')
    before = read([path], '', Settings, GPTConfig)[0] if os.path.exists(path) else settings
    for name, value in settings.items():
        said = value is not None or hasattr(Settings, name)  # None is saved as None, but of the model as what GPTConfig makes of it
        if said and name not in OURS and before.get(name, value) != value:
            raise UserError(f"{folder} was run with {name}={before[name]}, now it is {value}: choose another --out")
    log = read_lines(os.path.join(folder, 'log.jsonl'))
    return next((r[LOSS] for r in log if r['step'] == settings['max_steps'] and LOSS in r), None)


def train(args, folder, settings):
    """Run train.py to its end, resuming what is there. UserError if it fails; leaves if it was told to stop."""
    checkpoints = [path for path in (os.path.join(folder, name) for name in CHECKPOINTS) if os.path.exists(path)]
    if checkpoints and load_checkpoint(folder)['step'] >= settings['max_steps']:
        os.remove(checkpoints.pop(0))  # killed in the last evaluation: the steps since the checkpoint before come out equal
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, 'output.txt'), 'a+', encoding='utf-8') as output:
        command = [sys.executable, os.path.join(ROOT, 'train.py'), *args, *(['--init_from=resume'] if checkpoints else [])]
        # in a session of its own, so that Ctrl-C, or the end of the terminal, reaches it once, through here: it then saves and stops
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        handlers = {number: signal.signal(number, lambda *_: child.send_signal(signal.SIGTERM)) for number in stop_signals()}
        status = child.wait()
        for number, handler in handlers.items(): signal.signal(number, handler)
        output.seek(0)
        last = output.read().strip()[-300:].splitlines()[-1:]
    if status == -signal.SIGTERM or not status and final_loss(folder, settings) is None:
        sys.exit(print("stopped; the same command goes on", file=sys.stderr) or 130)
    if status: raise UserError(f"{folder}: {' '.join(last)} (exit status {status}; the rest is in output.txt there)")


def record(name, seed, args, settings, flops, folder):
    """The line of runs.jsonl for a finished run. Its seconds are those of training steps: no start, no evaluation, no saving."""
    tokens = settings['max_steps'] * settings['batch_tokens']
    ms = {r['step']: r['ms'] for r in read_lines(os.path.join(folder, 'log.jsonl')) if 'ms' in r}  # mean since the line before
    seconds = sum(ms[step] * (step - before) for before, step in pairwise([0, *sorted(ms)])) / 1e3
    describe = ['git', 'describe', '--always', '--dirty', '--exclude=*', '--abbrev=12']  # '-dirty': changed since the commit
    try: commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True).stdout.strip() or None
    except OSError: commit = None  # no git here
    device = pick_device(settings['device'])
    cpu = torch.cpu.get_capabilities().get('cpu_name', '') if hasattr(torch.cpu, 'get_capabilities') else ''
    hardware = torch.cuda.get_device_name(device) if device.type == 'cuda' else f'{cpu}, {torch.get_num_threads()} threads'
    return {'name': name, 'seed': seed, 'command': ' '.join(['python', 'train.py', *args]), 'steps': settings['max_steps'],
            'tokens': tokens, 'flops': tokens * flops, 'seconds': seconds, LOSS: final_loss(folder, settings), 'commit': commit,
            'torch': torch.__version__, 'hardware': hardware, 'date': time.strftime('%Y-%m-%d')}


def table(records):
    """Markdown, a row per name, against a plain run if there is one. Differences are between equal seeds: mean (lowest to highest)."""
    runs = {}
    for r in records: runs.setdefault(r['name'], []).append(r)
    mean = {name: {key: statistics.mean(r[key] for r in rs) for key in (LOSS, 'flops', 'seconds')} for name, rs in runs.items()}

    def difference(name, other):
        theirs = {r['seed']: r[LOSS] for r in runs.get(other, ()) if name != other}
        by_seed = [r[LOSS] - theirs[r['seed']] for r in runs[name] if r['seed'] in theirs]
        return f"{statistics.mean(by_seed):+.4f} ({min(by_seed):+.4f} to {max(by_seed):+.4f})" if by_seed else ''

    base = next((name for name in ('plain', 'plain_scaled', 'plain_ponderlm') if name in runs), next(iter(runs)))
    rows = [f"| run | seeds | nats per byte | lowest to highest | minus {base} | minus plain of equal FLOPs | x FLOPs | x time |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for name, rs in runs.items():
        losses = [r[LOSS] for r in rs]
        off = {n: abs(mean[n]['flops'] / mean[name]['flops'] - 1) for n in runs if n.startswith('plain')}
        peer = min((n for n in off if off[n] <= 0.05), key=lambda n: (off[n], n != base), default=None)
        times = [f"{mean[name][key] / mean[base][key]:.2f}" for key in ('flops', 'seconds')]
        rows.append(f"| {name} | {len(rs)} | {mean[name][LOSS]:.4f} | {min(losses):.4f} to {max(losses):.4f} | "
                    f"{difference(name, base)} | {difference(name, peer)} | {times[0]} | {times[1]} |")
    about = {key: ', '.join(sorted({str(r[key]) for r in records})) for key in ('hardware', 'torch', 'commit', 'date')}
    return '\n'.join([*rows, '', "{hardware}; torch {torch}; commit {commit}; {date}. Equal FLOPs: within 5 %.".format(**about)])


def make_runs(c, common, asked, results):
    """Make all runs that are not finished; returns how many failed."""
    names, failed = ALL if c.names == 'all' else c.names.split(','), 0
    if not re.fullmatch(r'\d+(,\d+)*', c.seeds): raise UserError(f"--seeds={c.seeds}: give whole numbers, such as 1,2,3")
    made = [(r['name'], r['seed']) for r in read_lines(results) if 'name' in r and 'seed' in r]
    # what is wrong with one of them shows before the first run, and so does a finished run of another recipe
    plans = {name: plan(name, common, asked) for name in dict.fromkeys([*names, *(name for name, _ in made)])}
    for name, seed in made: final_loss(os.path.join(c.out, f'{name}-s{seed}'), plans[name][1])
    for seed, name in product(map(int, c.seeds.split(',')), names):
        (args, settings, flops), folder = plans[name], os.path.join(c.out, f'{name}-s{seed}')
        args = [*args, f'--seed={seed}', f'--out_dir={folder}']
        loss = final_loss(folder, settings)
        if any((r.get('name'), r.get('seed')) == (name, seed) for r in read_lines(results)): continue
        try:
            if loss is None: train(args, folder, settings)
        except UserError as error:  # the others may go well
            failed += print(f"{name}, seed {seed} failed: {error}", file=sys.stderr, flush=True) or 1
            continue
        r = record(name, seed, args, settings, flops, folder)
        with open(results, 'a', encoding='utf-8') as f: f.write(json.dumps(r) + '\n')
        print(f"{name}, seed {seed}: {r[LOSS]:.4f} nats per byte, {r['steps']} steps, {r['seconds']:.0f} s", flush=True)
    return failed


def main(argv):
    own = [a for a in argv if a in ('-h', '--help') or a[2:].split('=')[0] in CompareSettings.__dataclass_fields__]
    common = [a for a in argv if a not in own]
    c = build(CompareSettings, read(own, __doc__.strip(), CompareSettings)[0])
    given, rest = read(common, '', Settings, GPTConfig, CompareSettings)
    for arg in rest: raise UserError(f"{arg}: neither a setting (--name=value) nor a config file (.py, .json)")
    for name in set(OURS) & set(given): raise UserError(f"{name}={given[name]}: this is chosen here for each run; see --help")
    folder = build(Settings, given).data_dir
    if not c.table_only and folder == prepare_data.BUILTIN and not os.path.exists(os.path.join(folder, 'meta.json')):
        prepare_data.prepare(prepare_data.DataSettings())
    results = os.path.join(c.out, 'runs.jsonl')
    failed = 0 if c.table_only else make_runs(c, common, given, results)
    if records := read_lines(results):
        try: print(table(records))
        except (KeyError, TypeError) as error: raise UserError(f"{results}: a line is not a run's record ({error}): take it out") from None
    elif not failed: raise UserError(f"{results}: no finished run; leave out --table_only")
    if failed: raise UserError(f"{failed} runs failed, see above; the same command tries them again")


if __name__ == '__main__':
    run(main)
