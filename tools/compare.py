"""
A fair comparison: the same data, tokens, batches and optimiser for every mechanism, several seeds,
one run after another.

    python tools/compare.py config/tasks.py --names=plain_scaled,loop,plain_scaled_as_loop
    python tools/compare.py         every mechanism at 2.8M, three seeds: a day or two
    python tools/compare.py --names=plain_scaled,smear --lrs=1.5e-3,3e-3,6e-3
        each at the best of these peak learning rates, found with seeds of their own (--pick)
    python tools/compare.py docs/runs/addition.jsonl        the table of runs that are made
    python tools/compare.py docs/runs/text-long.jsonl --beside=plain_scaled_2x
        the same, with the differences to this run

A name is one of RUNS. NAME_2x has twice the layers; NAME@3e-3 has this peak learning rate;
NAME_as_OTHER is trained for as many FLOPs as OTHER, by more or fewer steps. Files and settings of
train.py hold for all; what RUNS adds overrules yours. Stopped, the same command goes on. On a made
task the table counts right answers. On text, the loss of latent, mask and feedback is that of a
text read token by token. Writes OUT/NAME-sSEED (train.py's folder, output.txt and the sum of its
code), a line per run in OUT/runs.jsonl, and what holds for all in OUT/recipe.txt.
"""

import inspect
import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Optional

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.insert(0, ROOT)  # run from anywhere
import prepare_data
import train as train_py
from configurator import build, check_range, only_with, own_words, read
from engine import muon
from engine.answers import summary
from engine.checkpoint import CHECKPOINTS
from engine.build import without_numbers
from engine.files import Progress, UserError, append_line, checksum, read_lines, run, table
from engine.flops import flops_per_token
from engine.hardware import autocast, pick_device
from engine.mechanisms import iterates
from engine.score import token_nats
from engine.shards import read_meta
from engine.start import vocabulary_of
from engine.sums import source_of_model, sum_of
from engine.tasks import task_of
from engine.trained import exam_of_run, load_model
from engine.windows import Windows
from model import PONDER, GPTConfig
from train import Settings


def code():
    """The sum of TRAINS, the code of training that people edit: a comparison has one version."""
    return sum_of(source_of_model() + inspect.getsource(train_py) + inspect.getsource(muon))


TRAINS = 'model.py, train.py or engine/muon.py'
CODE = code()       # when compare.py began


@dataclass
class CompareSettings:
    """what to compare; every other setting is train.py's"""
    names: str = 'all'        # comma-separated (all: each method, beside plain models)
    seeds: str = '1337,1,2'   # every name is run with the first seed, then with the next
    lrs: Optional[str] = None # peak learning rates that each name tries first, comma-separated
    pick: str = '0'           # the seeds that they are tried with, which are in no comparison
    out: str = 'out/compare'  # folder of the runs
    answers: int = 1000       # on a made task: problems that every finished model answers
    beside: Optional[str] = None # the name that losses are compared with (None: a plain model)

    def __post_init__(self):
        check_seeds_and_rates(self)
        check_range(self, 1, math.inf, 'answers')


def seeds_that_pick(s):
    """Of settings with lrs and pick: the seeds that choose between rates; of one rate none."""
    return [int(seed) for seed in s.pick.split(',')] if ',' in (s.lrs or '') else []


def check_seeds_and_rates(s):
    """ValueError if seeds, lrs and pick, of settings that have them, are not what they are for."""
    for name in ('seeds', 'pick'):
        if not all(seed.isdecimal() for seed in getattr(s, name).split(',')):
            raise ValueError(f"{name}={getattr(s, name)}: give whole numbers, such as 1,2,3")
    both = set(seeds_that_pick(s)) & set(map(int, s.seeds.split(',')))
    if both:
        raise ValueError(f"pick={s.pick} has {min(both)}, as seeds={s.seeds}: what chooses the "
                         "rates cannot judge them")
    for rate in s.lrs.split(',') if s.lrs else []:
        try:
            good = 0 < float(rate) < math.inf
        except ValueError:
            good = False
        if not good:
            raise ValueError(f"lrs={s.lrs}: give learning rates, such as 1.5e-3,3e-3")


# name: its config file, and what differs from it. `all` stands for these
METHODS = {
    'plain': ('vanilla',),
    'plain_scaled': ('loop', '--ponder_steps=0'),
    'plain_ponderlm': ('embedding', '--ponder_steps=0'),
    'depth_attn': ('depth_attn',),
    'depth_uniform': ('depth_attn', '--depth_mode=uniform'),
    'depth_stride1': ('depth_attn', '--depth_stride=1'),
    'smear': ('smear',),
    'loop': ('loop',),
    'embedding': ('embedding',),
    'chain': ('chain',),
    'pause': ('pause',),
    'latent': ('latent',),
    'feedback': ('feedback',),
    'gate': ('halting_gate',),
    'router': ('halting_router',),
    'mask': ('halting_mask', '--ponder_steps=1'),
    'exit': ('halting_exit',),
    'ouro': ('halting_ouro',),
}
# all names; a run of your own is one more line
RUNS = {
    **METHODS,
    # for docs/results.md and docs/claims.md: both in one; fewer steps; more thoughts
    'plain_scaled+depth_attn': ('loop', '--ponder_steps=0', '--depth_attn=True'),
    'plain_scaled+depth_uniform': ('loop', '--ponder_steps=0', '--depth_attn=True',
                                   '--depth_mode=uniform'),
    'smear+depth_attn': ('smear', '--depth_attn=True'),
    'embedding_1': ('embedding', '--ponder_steps=1'),
    'embedding_2': ('embedding', '--ponder_steps=2'),
    'loop+depth_attn': ('loop', '--depth_attn=True'),
    'latent_2': ('latent', '--ponder_steps=2'),
    'latent_3': ('latent', '--ponder_steps=3'),
    'mask_3': ('halting_mask',),
    # the term for fewer steps waits
    'router_late': ('halting_router', '--halt_start=0.6', '--halt_full=0.8'),
    # as many passes for everyone, which exit has to beat
    'loop_2': ('loop', '--ponder_steps=1'),
    'loop_3': ('loop', '--ponder_steps=2'),
    'loop_4': ('loop', '--ponder_steps=3'),
    'loop_6': ('loop', '--ponder_steps=5'),
    'loop_8': ('loop', '--ponder_steps=7'),
    # other losses for exit: of the last pass alone; of all equally
    'exit_last': ('halting_exit', '--exit_loss=last'),
    'exit_uniform': ('halting_exit', '--exit_loss=uniform'),
    # as PonderLM-2's released scripts have it: their vanilla baseline, and the norms of all runs
    'plain_stock': ('vanilla', '--norm_eps=0.1', '--init_std=0.01', '--weight_decay=0.01'),
    'latent_stock': ('latent', '--norm_eps=0.1'),
}
OURS = ('seed', 'out_dir', 'init_from', 'eval_only', 'dry_run')  # of train.py, but chosen here
LOSS = 'val_nats_per_byte'
EXACT = 'exact_nats_per_byte'   # read token by token, of a model that else reads by iteration
LEARNED = 0.9       # of the answers right: this seed has learned the task
NO_DIFFERENCES = "a table of right answers has no differences; leave it out"


# -------------------------------------------------------------------------------------------------
# Names


def parts_of(name):
    """(BASE, TIMES, RATE, OTHER) of a name BASE_TIMESx@RATE_as_OTHER; None for what it lacks."""
    return re.fullmatch(r'(.*?)(?:_(\d)x)?(?:@(.*?))?(?:_as_(.*))?', name).groups()


def at_rate(name, rate):
    """NAME@RATE, or NAME@RATE_as_OTHER."""
    base, as_, other = name.partition('_as_')
    return f'{base}@{rate}{as_}{other}'


def without_rate(name):
    """NAME_as_OTHER of NAME@RATE_as_OTHER."""
    return re.sub(r'@.*?(?=_as_|$)', '', name)


def is_plain(name):
    """Whether a run is a plain model's, of whatever size and for however long."""
    return parts_of(name)[0] in ('plain', 'plain_scaled', 'plain_ponderlm', 'plain_stock')


def start_of(name):
    """
    The plain run with the embedding scale and the initial weights of this one: plain_ponderlm
    starts as embedding, gate and pause do, plain_scaled as all others of pondering. None where
    RUNS sets one of these: no plain run starts so.
    """
    base = parts_of(name)[0]
    ponder = 'loop'     # of records whose name is no longer in RUNS
    if base in RUNS:
        file, *options = RUNS[base]
        given, _ = read([config_file(file), *options], '', Settings, GPTConfig)
        if given.keys() & {'embed_scale', 'init_std'}:
            return None
        ponder = given.get('ponder', 'none')
    scale = PONDER.get(ponder, PONDER['loop']).default_embed_scale(4)   # 1, 4^0.5 or (2.5 x 4)^0.5
    return {1.0: 'plain', 2.0: 'plain_ponderlm'}.get(scale, 'plain_scaled')


def names_of(compare):
    """The names that are asked for. All: each method and, where it costs more, a plain model."""
    if compare.names != 'all':
        return compare.names.split(',')
    costly = [name for name in METHODS
              if not name.startswith(('plain', 'depth', 'smear')) and start_of(name)]
    return [*METHODS, *(f'{start_of(name)}_as_{name}' for name in costly)]


# -------------------------------------------------------------------------------------------------
# What a run is


def config_file(name):
    return os.path.relpath(os.path.join(ROOT, 'config', f'{name}.py'))


@dataclass
class Plan:
    """All runs of a name, whatever their seed."""
    args: list        # train.py's arguments, but for seed and folder
    settings: dict    # all settings of train.py and of the model
    flops: float      # of training, per token, without the optimizer's
    data: str         # sum_of_data, before the first run


def make_plan(name, common):
    """The Plan of a name. common: train.py's arguments for all."""
    base, times, rate, other = parts_of(name)
    if '@' in (other or ''):
        raise UserError(f"--names={name}: a rate belongs to what is trained, as in "
                        "plain_scaled@3e-3_as_loop")
    if name != base and name in RUNS:
        raise UserError(f"RUNS has {name}, but this means {base} with other layers, another rate "
                        "or another length: give that line another name")
    if base not in RUNS:
        raise UserError(f"--names={name}: choose from {', '.join(RUNS)}, and NAME_2x such as "
                        "plain_scaled_2x, NAME@3e-3, and NAME_as_OTHER such as "
                        "plain_scaled_as_loop; a run of your own is one more line of RUNS in "
                        "tools/compare.py")
    file, *options = RUNS[base]
    path = config_file(file)
    for setting in read([path], '', Settings, GPTConfig)[0]:
        if hasattr(Settings, setting) and setting != 'out_dir':
            raise UserError(f"{path} sets {setting}, which is to be the same for all: give it on "
                            "the command line")
    args = [path, *common, *options]
    if rate:
        args.append(f'--learning_rate={rate}')

    s, config = configs_of(args)
    if times:
        args.append(f'--n_layer={int(times) * config.n_layer}')
        s, config = configs_of(args)
    settings = {**asdict(s), **asdict(config)}
    flops = flops_of(config, s)
    if other:
        theirs = make_plan(other, common)
        total = theirs.flops * theirs.settings['max_steps'] * theirs.settings['batch_tokens']
        settings['max_steps'] = round(total / (flops * s.batch_tokens))
        args.append(f"--max_steps={settings['max_steps']}")
    return Plan(args, settings, flops, sum_of_data(s.data_dir))


def has_flops(record, per_token):
    """
    Whether a run's record has the FLOPs of a model that costs so many per token. Within 5 %: those
    in docs/runs are counted by formulas, up to 2 % off PyTorch's, and more where tokens halt.
    """
    return math.isclose(record['flops'], record['tokens'] * per_token, rel_tol=0.05)


COUNTED = {}    # {a config and texts, as text: FLOPs of a token}, as many names share one


def flops_of(config, s):
    """FLOPs of a token in training with train.py's Settings s, on one device."""
    _, texts = s.micro_batches(config.block_size, 1)
    model = repr((config, texts))
    if model not in COUNTED:
        COUNTED[model] = flops_per_token(without_numbers(config), texts=texts)
    return COUNTED[model]


def configs_of(args):
    """(Settings, GPTConfig) of train.py's arguments."""
    given, _ = read(args, '', Settings, GPTConfig)
    s = build(Settings, given)
    config = build(GPTConfig, {**vocabulary_of(read_meta(s.data_dir)['n_tokens']), **given})
    return s, config


# -------------------------------------------------------------------------------------------------
# Making the runs


def holds_runs(path):
    """Whether this is a file with lines of runs, whatever it is called."""
    return os.path.isfile(path) and any('command' in record for record in read_lines(path))


def read_log(folder):
    """
    The steps and evaluations in a run's log.jsonl, without what was given up: where a run went on
    from an earlier step, or another began in its folder, the later lines hold.
    """
    log = []
    for line in read_lines(os.path.join(folder, 'log.jsonl')):
        if 'step' in line:
            while log and in_order(log[-1]) >= in_order(line):
                log.pop()
            log.append(line)
    return log


def in_order(line):
    """A step's line has its milliseconds; that of an evaluation comes after it and has none."""
    return line['step'], 'ms' not in line


def settings_in(folder):
    """A run's settings.json, {name: value}; empty if it is missing."""
    path = os.path.join(folder, 'settings.json')
    if not os.path.exists(path):
        return {}
    with open(path, encoding='utf-8') as f:
        return json.load(f)


def final_loss(folder, settings):
    """Validation nats per byte after the last step, None if the run is not finished."""
    for record in read_log(folder):
        if record.get('step') == settings['max_steps'] and LOSS in record:
            return record[LOSS]
    return None


def train(label, args, folder, settings):
    """Run train.py to its end, from where it is; UserError if it fails."""
    command = [sys.executable, '-u', os.path.join(ROOT, 'train.py'), *args]
    if any(os.path.exists(os.path.join(folder, name)) for name in CHECKPOINTS):
        command.append('--init_from=resume')
    os.makedirs(folder, exist_ok=True)
    group = os.path.basename(os.path.dirname(os.path.abspath(folder)))  # with --track=wandb
    print(f"{label}: {folder}/output.txt", flush=True)
    line, progress = '', Progress()
    with open(os.path.join(folder, 'output.txt'), 'a', encoding='utf-8') as output, \
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             encoding='utf-8', errors='replace',
                             env={'WANDB_RUN_GROUP': group, **os.environ}) as child:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        try:
            for line in child.stdout:
                output.write(line)
                if line.startswith('warning: '):
                    print(f"{label}: {line.strip()}", file=sys.stderr, flush=True)
                progress(f"{label}: {line.strip()[:80]}")
        except KeyboardInterrupt:   # the run had it too, and saves
            child.wait()
            raise
        except SystemExit:          # this one alone had SIGTERM
            child.terminate()
            child.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if child.returncode or final_loss(folder, settings) is None:
        raise UserError(f"{label} ended before its time: {line.strip()[:300]} (the rest is in "
                        f"{folder}/output.txt); the same command goes on")


def record_of(name, seed, args, folder, plan, compare):
    """The line of runs.jsonl for a finished run."""
    settings = plan.settings
    tokens = settings['max_steps'] * settings['batch_tokens']
    seconds = seconds_by_step(read_log(folder))
    model, _, kept = load_model(folder, settings['device'])
    more = {}
    if task_of(read_meta(settings['data_dir'])):
        more = summary(model, exam_of_run(kept, compare.answers), compare.answers)
    elif iterates(model):
        more = {EXACT: exact_loss(model, settings, kept['precision'])}
    return {
        **more,
        'name': name,
        'seed': seed,
        'command': shlex.join(['python', 'train.py', *args]),
        'picks': seed in seeds_that_pick(compare),
        'optimizer': settings['optimizer'],
        'learning_rate': settings['learning_rate'],
        'steps': settings['max_steps'],
        'tokens': tokens,
        'flops': tokens * plan.flops,
        'seconds': max(seconds.values()),
        LOSS: final_loss(folder, settings),
        'commit': commit(),
        'code': CODE,
        'torch': torch.__version__,
        'hardware': f"{hardware(settings['device'], settings['threads'])}, {kept['precision']}",
        'date': time.strftime('%Y-%m-%d'),
    }


def exact_loss(model, settings, precision):
    """As final_loss, of the same windows in the run's precision, but read token by token."""
    device, dtype = model.wte.weight.device, getattr(torch, precision)
    meta = read_meta(settings['data_dir'])
    data = Windows(settings['data_dir'], 'val', meta, settings['block_size'])
    windows = data.spread(max(1, settings['eval_tokens'] // data.T))
    x, y = data.get(windows, device)
    with autocast(device, dtype):
        losses = token_nats(model, torch.cat((x, y[:, -1:]), dim=1), exact=True)
    return losses.mean().item() * meta['val']['tokens'] / meta['val']['bytes']


def seconds_by_step(log):
    """Of a log's lines: {step: seconds of training until then}, no start, evaluation or saving."""
    ms = {r['step']: r['ms'] for r in log if 'ms' in r}     # mean since the line before
    seconds, before = {0: 0.0}, 0
    for step in sorted(ms):
        seconds[step] = seconds[before] + ms[step] / 1e3 * (step - before)
        before = step
    return seconds


def commit():
    """The commit of this code, '-dirty' if it was changed since; None without git."""
    describe = ['git', 'describe', '--always', '--dirty', '--exclude=*', '--abbrev=12']
    try:
        done = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def hardware(name, threads):
    """
    The device's name; of a CPU also its instructions, which results depend on, and the run's
    threads (None: PyTorch's choice).
    """
    device = pick_device(name)
    if device.type == 'cuda':
        return torch.cuda.get_device_name(device)
    cpu = ''
    if hasattr(torch.cpu, 'get_capabilities'):
        cpu = torch.cpu.get_capabilities().get('cpu_name', '')
    instructions = torch.backends.cpu.get_cpu_capability()
    return f'{cpu} {instructions}, {threads or torch.get_num_threads()} threads'


def make_all(compare, common, results):
    """Make all runs, where --lrs is given at each name's best rate; returns how many failed."""
    names = names_of(compare)
    if compare.lrs:
        rates = compare.lrs.split(',')
        best = dict.fromkeys(names, rates[0])
        picking = seeds_that_pick(compare)
        if picking:
            tried = [(at_rate(name, rate), seed)
                     for seed in picking for name in names for rate in rates]
            failed = make_runs(tried, compare, common, results)
            if failed:
                raise UserError(f"{failed} of the runs that choose a rate failed, see above: the "
                                "same command tries them again; leave out of --lrs a rate that is "
                                "too high")
            best = {name: best_rate(name, rates, picking, results) for name in names}
        names = [at_rate(name, best[name]) for name in names]
    runs = [(name, int(seed)) for seed in compare.seeds.split(',') for name in names]
    return make_runs(runs, compare, common, results)


def best_rate(name, rates, seeds, results):
    """The one of `rates` with which a name's runs of these seeds are best, in the mean."""
    made = {(r['name'], r['seed']): r for r in read_lines(results)}
    best = min(rates, key=lambda rate: badness([made[at_rate(name, rate), seed] for seed in seeds]))
    if float(best) in (min(map(float, rates)), max(map(float, rates))):
        print(f"{name}: {best} is the best of --lrs and at its edge; try rates beyond it",
              flush=True)
    return best


def badness(records):
    """Lower for better runs: on a made task by right answers, then by the loss, in the mean."""
    right = statistics.mean(r.get('right', 0) for r in records)
    return -right, statistics.mean(map(loss_of, records))


def make_runs(runs, compare, common, results):
    """Make those of `runs`, pairs of name and seed, that are not finished; how many failed."""
    plans = {name: make_plan(name, common) for name, _ in runs}     # what is wrong shows first
    data_dir = plans[runs[0][0]].settings['data_dir']   # the same for all
    made = [r for r in read_lines(results) if r['name'] in plans]
    of_rows = [*runs, *((r['name'], r['seed']) for r in made)]  # all seeds of a name share a row
    for name, seed in dict.fromkeys(of_rows):
        check_made(folder_of(compare, name, seed), plans[name].settings)
    for r in made:
        if not has_flops(r, plans[r['name']].flops):
            raise UserError(f"{results} has {r['name']}, seed {r['seed']}, with other settings or "
                            "another model.py: choose another --out")
        if (r['name'], r['seed']) in runs:
            check_role(r, compare)
            if r.get('code', CODE) != CODE:
                raise UserError(f"{results} has {r['name']}, seed {r['seed']}, of another "
                                f"{TRAINS}: choose another --out")
    says = sum_of(repr(configs_of(common)))     # what the config files say now
    keep_recipe(compare.out, [*common, f'--answers={compare.answers}', f'settings={says}'],
                data_dir)
    failed = 0
    for name, seed in runs:
        if is_made(name, seed, results):
            continue
        try:
            make_run(name, seed, plans[name], compare, results)
        except UserError as error:  # the others may go well
            print(error, file=sys.stderr, flush=True)
            failed += 1
    return failed


def check_role(record, s):
    """UserError if a run that was made to choose a rate would now judge, or the other way round."""
    picks = record['seed'] in seeds_that_pick(s)
    if record.get('picks', False) != picks:
        did, does = ('judge', 'choose') if picks else ('choose', 'judge')
        raise UserError(f"{s.out} has {record['name']}, seed {record['seed']}, which was made to "
                        f"{did} and would now {does}: choose another --out")


def is_made(name, seed, results):
    return (name, seed) in [(r['name'], r['seed']) for r in read_lines(results)]


def folder_of(compare, name, seed):
    return os.path.join(compare.out, f'{name}-s{seed}')


def check_made(folder, settings):
    """UserError if there is a run with other settings, as before a config file was edited."""
    before = settings_in(folder)
    for name, value in settings.items():
        if name not in OURS and before.get(name, value) != value:
            raise UserError(f"{folder} was made with {name}={before[name]}, not {value}: choose "
                            "another --out")


def keep_recipe(out, words, data_dir):
    """
    Write down what holds for all runs in `out`, these words and the data; UserError if those there
    have another recipe.
    """
    path = os.path.join(out, 'recipe.txt')
    recipe = shlex.join([*words, f'data={sum_of_data(data_dir)}'])
    os.makedirs(out, exist_ok=True)
    if not os.path.exists(path):
        with open(path, 'w', encoding='utf-8') as f:
            f.write(recipe)
    with open(path, encoding='utf-8') as f:
        before = f.read()
    if before != recipe:
        raise UserError(f"{out} has runs with {before!r}, not {recipe!r}: choose another --out")


def sum_of_data(data_dir):
    """A short sum of a data set, whose meta.json has the sums of its tokens."""
    return checksum(os.path.join(data_dir, 'meta.json'))[:12]


def check_data(data_dir, before):
    """UserError if the data set was prepared anew since this sum_of_data."""
    if sum_of_data(data_dir) != before:
        raise UserError(f"{data_dir} was prepared anew since this command began: start it again "
                        "with another --out")


def make_run(name, seed, plan, compare, results):
    """Make a run, if it is not finished, and add its line to the results; UserError if it fails."""
    folder = folder_of(compare, name, seed)
    args = [*plan.args, f'--seed={seed}', f'--out_dir={folder}']
    label = f"{name}, seed {seed}"
    check_code(label, folder)
    check_data(plan.settings['data_dir'], plan.data)
    if final_loss(folder, plan.settings) is None:
        train(label, args, folder, plan.settings)
        check_code(label, folder)
        check_made(folder, plan.settings)       # a config file may have been edited meanwhile
    r = record_of(name, seed, args, folder, plan, compare)
    check_data(plan.settings['data_dir'], plan.data)
    if is_made(name, seed, results):    # by another compare.py, meanwhile
        return
    append_line(results, r)
    right = f"{r['right']:.1%} right, " if 'right' in r else ''
    print(f"{label}: {right}{loss_of(r):.4f} nats per byte, {r['steps']} steps, "
          f"{r['seconds']:.0f} s", flush=True)


def check_code(label, folder):
    """
    UserError if the code that trains was edited since compare.py began, or since this run did. A
    new run's folder gets the sum of it.
    """
    path = os.path.join(folder, 'code.txt')
    if code() != CODE:
        raise UserError(f"{label}: {TRAINS} was changed since compare.py began: start it again, "
                        "with another --out if runs have begun")
    if not os.path.exists(os.path.join(folder, 'log.jsonl')):   # nothing is trained yet
        os.makedirs(folder, exist_ok=True)
        with open(path, 'w', encoding='utf-8') as f:
            f.write(CODE)
    begun_with = None
    if os.path.exists(path):
        with open(path, encoding='utf-8') as f:
            begun_with = f.read()
    if begun_with != CODE:
        raise UserError(f"{label}: {folder} was begun with another {TRAINS}: choose another "
                        "--out, or take that folder away")


# -------------------------------------------------------------------------------------------------
# The table


def table_of(records, beside=None):
    """
    A row per name: medians of the seeds. Differences, to `beside` or to the plain run with the same
    start, are between equal seeds: mean (lowest to highest). Below it, notes. UserError if there is
    no run `beside`, or if a name has a seed twice.
    """
    runs = those_that_judge(records)
    base = base_of(runs, [beside] if beside else ['plain', 'plain_scaled', 'plain_ponderlm'])
    if beside and not base:
        raise UserError(f"beside={beside}: no finished run of those asked for, which are "
                        f"{', '.join(runs)}")
    base = base or [*runs][0]
    judges = [r for name in runs for r in runs[name]]
    if all('right' in r for r in judges):
        if beside:
            raise UserError(f"beside={beside}: {NO_DIFFERENCES}")
        header = ['run', 'learned it', 'right', 'lowest to highest', 'passes', 'nats per byte']
        rows = [answers_row(name, runs) for name in runs]
    else:
        header = ['run', 'seeds', 'nats per byte', 'lowest to highest',
                  f'minus {base}' if beside else 'minus plain of equal start',
                  'minus plain of equal FLOPs']
        rows = [loss_row(name, runs, base, beside) for name in runs]
    for row, name in zip(rows, runs):
        row.append(f"{median(runs[name], 'flops') / median(runs[base], 'flops'):.2f}")
    tried = [r for r in records if r.get('picks')]
    return table([*header, 'x FLOPs'], rows) + '\n\n' + notes(judges, tried, base)


def notes(records, tried, base):
    """
    Lines below a table of these records, whose FLOPs are multiples of those of `base`: what its
    words mean, where the runs were made, what chose the learning rates (`tried`), and in what the
    runs differ that should be alike.
    """
    text = (f"Medians; differences: means; x: of {base}, before any token stops (exit then costs "
            f"more, router less); learned it: {LEARNED:.0%} right or more; equal FLOPs: within "
            f"5 %. {where_made(records)}")
    if any(r.get('optimizer') == 'muon' for r in records):
        text += "\nFLOPs are those of the model, without Muon's own, which come with every step."
    asked = sorted({r['problems'] for r in records if 'problems' in r})
    if asked:
        text += f"\nRight answers are of {' or '.join(f'{n:,}' for n in asked)} problems."
    if tried:
        text += "\nTried with other seeds: " + ', '.join(
            f"{r['name']} (seed {r['seed']}) "
            + (f"{r['right']:.1%} right, " if 'right' in r else '') + f"{loss_of(r):.4f}"
            for r in tried) + '.'
    versions = runs_by(records, lambda r: r.get('code', r.get('model')))    # older: of model.py
    if len(versions) > 1:
        text += f"\n{TRAINS} was changed between: {' | '.join(versions.values())}"
    dtypes = runs_by(records, lambda r: re.search(r'(b?float\d+|)$', r['hardware'])[0])
    if len(dtypes) > 1:
        text += ''.join(f"\nin {dtype}: {those}" for dtype, those in dtypes.items())
    return text


def runs_by(records, kind_of):
    """{kind: its runs, as 'loop, seed 1; ..'}, without those whose kind is not known."""
    kinds = {}
    for r in records:
        if kind_of(r):
            kinds.setdefault(kind_of(r), []).append(f"{r['name']}, seed {r['seed']}")
    return {kind: '; '.join(runs) for kind, runs in kinds.items()}


def base_of(runs, names):
    """
    The first of `names` that has runs, at the best of its rates with the most seeds; None if none
    has.
    """
    for start in names:
        rates = [name for name in runs if start in (name, without_rate(name))]
        if rates:
            most = max(len(runs[name]) for name in rates)
            rates = [name for name in rates if len(runs[name]) == most]
            return min(rates, key=lambda name: badness(runs[name]))
    return None


def those_that_judge(records):
    """
    {name: its records}, without those of the seed that chose learning rates, unless there are no
    others yet. UserError if a name has a seed twice.
    """
    runs = {}
    for r in [r for r in records if not r.get('picks')] or records:
        same = runs.setdefault(r['name'], [])
        if r['seed'] in [other['seed'] for other in same]:
            raise UserError(f"{r['name']}, seed {r['seed']}, is there twice: split what is of "
                            f"several recipes or tasks; one of both is {r['command']}")
        same.append(r)
    return runs


def where_made(records):
    """A sentence: on what, with which code and when."""
    hardware, torch_, commit, date = [', '.join(sorted({str(r[key]) for r in records}))
                                      for key in ('hardware', 'torch', 'commit', 'date')]
    return f"{hardware}; torch {torch_}; commit {commit}; {date}."


def loss_of(record):
    """A run's loss as generation has it: read token by token, where that differs."""
    return record.get(EXACT, record[LOSS])


def median(records, key):
    return statistics.median(r[key] for r in records)


def answers_row(name, runs):
    """The cells of a run on a made task."""
    records = runs[name]
    right = [r['right'] for r in records]
    learned = sum(share >= LEARNED for share in right)
    return [name, f"{learned} of {len(right)}", f"{statistics.median(right):.1%}",
            f"{min(right):.1%} to {max(right):.1%}", f"{median(records, 'passes'):.2f}",
            f"{median(records, LOSS):.4f}"]


def loss_row(name, runs, base, beside):
    """The cells of a run on text."""
    losses = [loss_of(r) for r in runs[name]]
    partner = base if beside else base_of(runs, [start_of(name)])
    equal = plain_of_equal_flops(name, runs, base)
    return [name, len(losses), f"{statistics.median(losses):.4f}",
            f"{min(losses):.4f} to {max(losses):.4f}", difference(name, partner, runs),
            difference(name, equal, runs)]


def difference(name, other, runs):
    """
    'mean (lowest to highest), verdict' of name's losses minus other's, with the number of seeds
    where these are fewer than three, or than name has; '' if they share no seed.
    """
    if other in (None, name):
        return ''
    theirs = {r['seed']: loss_of(r) for r in runs[other]}
    by_seed = [loss_of(r) - theirs[r['seed']] for r in runs[name] if r['seed'] in theirs]
    if not by_seed:
        return ''
    n = len(by_seed)
    few = f", {n} seed{'s' * (n > 1)}" if n < max(3, len(runs[name])) else ''
    return (f"{statistics.mean(by_seed):+.4f} ({min(by_seed):+.4f} to {max(by_seed):+.4f}), "
            f"{verdict(by_seed)}{few}")


def verdict(differences):
    """What docs/claims.md says of the losses of equal seeds, of a method minus its partner."""
    if abs(statistics.mean(differences)) <= 0.01 and max(map(abs, differences)) <= 0.02:
        return 'level'
    shown = [round(difference, 3) for difference in differences]
    if max(shown) < 0:
        return 'better'
    return 'worse' if min(shown) > 0 else 'seeds disagree'


def plain_of_equal_flops(name, runs, base):
    """
    The plain run that was trained for as many FLOPs as this name (.._as_NAME); without one that of
    the nearest FLOPs, which may be a deeper model, but rather one that starts as this name (of a
    plain one: as `base`). None if all are over 5 % off.
    """
    flops = median(runs[name], 'flops')
    off = {other: abs(median(runs[other], 'flops') / flops - 1)
           for other in runs if is_plain(other)}
    near = [other for other in off if off[other] <= 0.05
            and base_of(runs, [without_rate(other)]) == other]      # at its best rate
    as_this = '_as_' + without_rate(name)
    start = start_of(base if is_plain(name) else name)

    def unlike(other):      # the least comes first
        same = start is None or start_of(other) == start    # None: no plain run starts so
        return not other.endswith(as_this), not same, off[other], other != base
    return min(near, key=unlike, default=None)


# -------------------------------------------------------------------------------------------------


def check_used(compare, given, data_dir):
    """UserError for one of our settings that the user gave, and that would do nothing."""
    only_with('several --lrs', seeds_that_pick(compare), given, 'pick')
    if 'answers' in given:
        only_with('a made task', task_of(read_meta(data_dir)), given, 'answers')


def check_beside(compare, path, data_dir):
    """
    UserError if no run is to be made, or is made (path: their records), to compare with, or if the
    data is a made task.
    """
    if compare.beside and task_of(read_meta(data_dir)):
        raise UserError(f"beside={compare.beside}: {NO_DIFFERENCES}")
    asked = names_of(compare)
    made = [r['name'] for r in read_lines(path) if 'name' in r]
    names = {without_rate(name) for name in (*asked, *made)}
    if compare.beside and without_rate(compare.beside) not in names:
        raise UserError(f"beside={compare.beside}: no such run is asked for; add it to --names")


def those_asked_for(records, given):
    """
    Those of --names, at any rate, and of --seeds, where the user gave them; UserError for a name or
    a seed without a run.
    """
    called = {'names': lambda r: {r['name'], without_rate(r['name']), 'all'},
              'seeds': lambda r: {str(r['seed'])}}
    for setting in [setting for setting in called if setting in given]:
        asked = set(given[setting].split(','))
        missing = asked.difference(*map(called[setting], records))
        if missing:
            raise UserError(f"--{setting}: there is no finished run of {min(missing)} here")
        records = [r for r in records if asked & called[setting](r)]
    return records


def say_left_out(of_file, records, compare):
    """The plain models on text that --names leaves out, beside which nothing is then compared."""
    if compare.names == 'all' or compare.beside:
        return
    left = {r['name'] for r in of_file if 'right' not in r} - {r['name'] for r in records}
    plain = sorted(filter(is_plain, left))
    if plain:
        print(f"Not compared with {', '.join(plain)}, which --names leaves out.")


def check_chosen(compare, asked, common):
    """UserError for a setting of train.py, of those `asked`, that is chosen here for each run."""
    chosen = [*OURS, 'ponder', 'halting', 'depth_attn']
    if compare.lrs and any(arg.startswith('--learning_rate=') for arg in common):
        chosen.append('learning_rate')      # that of a file gives way to --lrs
    for name in chosen:
        if name in asked:
            raise UserError(f"{name}={asked[name]}: chosen here for each run, by --names and "
                            "--seeds and --lrs (--help); a run of your own is a line more of RUNS "
                            "here")


def main(argv):
    files = [arg for arg in argv
             if not arg.startswith('--') and (arg.endswith('.jsonl') or holds_runs(arg))]
    ours = own_words(argv, CompareSettings)
    common = [arg for arg in argv if arg not in (*files, *ours)]
    given, _ = read(ours, __doc__, CompareSettings)
    compare = build(CompareSettings, given)
    asked, rest = read(common, '', Settings, GPTConfig)
    if rest:
        raise UserError(f"{rest[0]}: neither a setting (--name=value) nor a config file "
                        "(.py, .json)")
    check_chosen(compare, asked, common)

    failed = 0
    named = bool(files)     # the user named files of runs that are made
    idle = [name for name in (*given, *asked) if name not in ('names', 'seeds', 'beside')]
    if named and idle:
        raise UserError(f"{idle[0]}: does nothing for a file of runs that are made; leave it out")
    if not named:
        files = [os.path.join(compare.out, 'runs.jsonl')]
        data_dir = build(Settings, asked).data_dir
        prepare_data.prepare_builtin(data_dir)
        check_used(compare, given, data_dir)
        check_beside(compare, files[0], data_dir)
        failed = make_all(compare, common, files[0])
    for path in files:
        of_file = records = [r for r in read_lines(path) if 'name' in r and LOSS in r]
        if named:
            records = those_asked_for(records, given)
        if records:
            title = f"{path}\n\n" if len(files) > 1 else ''
            print(f"\n{title}{table_of(records, compare.beside)}")
            say_left_out(of_file, records, compare)
        elif not failed:
            raise UserError(f"{path}: no finished run here")
    if failed:
        raise UserError(f"{failed} runs failed, see above; the same command tries them again")


if __name__ == '__main__':
    run(main)
