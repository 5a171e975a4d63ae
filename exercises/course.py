"""
Measurements for the two weeks of exercises/README.md.

    python exercises/course.py plan                  minutes of each day's training here
    python exercises/course.py context out/course out/course_theta
                                                     loss by how much text stands before
    python exercises/course.py time out/course       ms per token, within one text

plan takes ten steps of each run, a few minutes in all, and counts up; evaluations are left out.
context scores the validation text in windows and says how well a token is predicted that has so
many tokens of its window before it. time writes 600 tokens, with a cache.
"""
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:0] = [ROOT, os.path.join(HERE, 'labs')]
import torch
import torch.nn.functional as F
from common import own_text, windows

from engine.files import UserError, run, table
from sample import load_model

STEPS = 10
TEXT = 2 ** 17                                       # tokens that `context` scores
EDGES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)   # of its groups of positions


# ---- plan ----------------------------------------------------------------------------------------

def print_plan():
    rows = []
    for day, arguments in runs():
        n_steps = number_of_steps(arguments)
        ms = time_of_a_step(arguments)
        rows.append([day, option(arguments, 'out_dir'), n_steps, f"{ms:.0f}",
                     f"{n_steps * ms / 60_000:.1f}"])
        print(f"{rows[-1][1]}: {rows[-1][-1]} minutes", file=sys.stderr, flush=True)
    print(table(['day', 'run', 'steps', 'ms per step', 'minutes'], rows))


def runs():
    """(day, arguments of train.py) of each training run of the two weeks, from README.md."""
    with open(os.path.join(HERE, 'README.md'), encoding='utf-8') as f:
        weeks = f.read().partition('## Two weeks')[2].partition('\n## ')[0]
    found = []
    for day in re.split(r'^\*\*(?=Day)', weeks, flags=re.M)[1:]:
        number = re.match(r'Day \d+', day)[0]
        for line in re.findall(r'^python train.py (config/.*)$', day, re.M):
            found.append((number, line.split()))
    return found


def option(arguments, name):
    [value] = [word.partition('=')[2] for word in arguments if word.startswith(f'--{name}=')]
    return value


def number_of_steps(arguments):
    return int(option(arguments, 'max_steps'))


def time_of_a_step(arguments):
    """The median of a few steps of a run that writes nothing but into a temporary folder, in ms."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, 'train.py', *arguments, f'--max_steps={STEPS}',
                   '--log_interval=1', '--eval_tokens=1024', '--sample_tokens=0',
                   f'--out_dir={folder}/out']
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    times = [int(ms.replace(',', '')) for ms in re.findall(r'\| ([\d,]+) ms \|', done.stdout)]
    if done.returncode != 0 or len(times) < STEPS:
        last = (done.stderr.strip().splitlines() or ['no steps'])[-1]
        raise UserError(f"train.py {' '.join(arguments)}: {last}")
    return statistics.median(times[2:])  # the first steps warm up


# ---- context -------------------------------------------------------------------------------------

@torch.no_grad()
def print_context(folders):
    columns = [loss_by_context(folder) for folder in folders]
    longest = min(len(column) for column in columns)
    rows = []
    for begin, end in zip(EDGES, EDGES[1:]):
        if begin < longest:
            name = f"{begin}" if end == begin + 1 else f"{begin} to {min(end, longest) - 1}"
            rows.append([name] + [column[begin:end].mean().item() for column in columns])
    rows.append(['all'] + [column.mean().item() for column in columns])
    print(table(['tokens before', *folders], rows))


def loss_by_context(folder):
    """Nats per token at each place of a window, (block_size,): place p has p tokens before it."""
    model, _, settings = load_model(folder, torch.device('cpu'))
    rows = windows(own_text(settings, 'val', TEXT), model.config.block_size)
    total = torch.zeros(model.config.block_size)
    for part in rows.split(8):
        logits, _ = model(part[:, :-1])
        targets = part[:, 1:]
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction='none')  # (B,T)
        total += losses.sum(0)
    return total / len(rows)


# ---- time ----------------------------------------------------------------------------------------

def print_time(folder):
    model, tokenizer, _ = load_model(folder, torch.device('cpu'))
    times = []
    begin = time.perf_counter()
    for _ in model.stream([tokenizer.encode_ordinary('def ')], 600, seed=1):
        now = time.perf_counter()
        times.append((now - begin) * 1000)
        begin = now
    rows = []
    for first in range(0, 600, 40):
        some = times[first:first + 40]
        rows.append([f"{first} to {first + 39}", statistics.median(some), max(some)])
    print(table(['token', 'ms, median', 'ms, slowest'], rows))


def main(argv):
    if argv == ['plan']:
        print_plan()
    elif len(argv) > 1 and argv[0] == 'context':
        print_context(argv[1:])
    elif len(argv) == 2 and argv[0] == 'time':
        print_time(argv[1])
    elif argv in (['-h'], ['--help']):
        print(__doc__.strip())
    else:
        raise UserError("say plan, context FOLDER [FOLDER ..], or time FOLDER; --help says more")


if __name__ == '__main__':
    run(main)
