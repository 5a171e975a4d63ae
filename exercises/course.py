"""
Measurements for days 3 and 4 of exercises/README.md.

    python exercises/course.py context out/course out/course_theta
    python exercises/course.py time out/course

context: loss by how much text stands before a token. It scores 511 windows of validation text, and
says how well a token is predicted that has so many tokens of its window before it (the first rows
are means of few tokens).
time: ms per token, within one text of 600 tokens that is written with a cache.
"""
import os
import statistics
import sys
import time

HERE = os.path.dirname(os.path.realpath(__file__))
sys.path[:0] = [os.path.dirname(HERE), os.path.join(HERE, 'labs')]
import torch
from common import own_text, windows

from engine.files import UserError, run, table
from engine.generate import stream
from engine.score import token_nats
from engine.trained import load_model

TEXT = 2 ** 17                                       # tokens that `context` scores
EDGES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)   # of its groups of places


def print_context(folders):
    columns = [loss_by_context(folder) for folder in folders]
    longest = min(len(column) for column in columns)
    rows = []
    for begin, end in zip(EDGES, EDGES[1:]):
        if begin < longest:
            fewest, most = begin + 1, min(end, longest)     # tokens that stand before
            name = f"{most}" if fewest == most else f"{fewest} to {most}"
            rows.append([name] + [column[begin:end].mean().item() for column in columns])
    rows.append(['all'] + [column[:longest].mean().item() for column in columns])
    print(table(['tokens before', *folders], rows))


@torch.no_grad()
def loss_by_context(folder):
    """Nats per token at each place of a window, (block_size,): p + 1 tokens predict place p."""
    model, tokenizer, settings = load_model(folder, 'cpu')
    rows = windows(own_text(settings, 'val', TEXT, tokenizer), model.config.block_size)
    return token_nats(model, rows).mean(0)


def print_time(folder):
    model, tokenizer, _ = load_model(folder, 'cpu')
    times = []
    begin = time.perf_counter()
    for _ in stream(model, [tokenizer.encode_ordinary('def ')], 600, seed=1):
        now = time.perf_counter()
        times.append((now - begin) * 1000)
        begin = now
    rows = []
    for first in range(0, 600, 40):
        some = times[first:first + 40]
        rows.append([f"{first} to {first + 39}", statistics.median(some), max(some)])
    print(table(['token', 'ms, median', 'ms, slowest'], rows))


def main(argv):
    if argv[:1] == ['context'] and len(argv) > 1:
        print_context(argv[1:])
    elif argv[:1] == ['time'] and len(argv) == 2:
        print_time(argv[1])
    elif argv in (['-h'], ['--help']):
        print(__doc__.strip())
    else:
        raise UserError("say context FOLDER [FOLDER ..], or time FOLDER; --help says more")


if __name__ == '__main__':
    run(main)
