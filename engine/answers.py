"""
Right answers to the problems of a made task (engine/tasks.py): of a checkpoint, and in evaluations
of a run.

    outcomes = answer_problems(model, folder, 100)      an Outcome for each problem
    summary(model, folder, 1000)                        right answers and passes, by difficulty

Answers are written greedily, through the cache, many at once; each question follows two problems of
the validation set and their answers, or as many as fit in.
"""

import os
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import islice
from statistics import fmean

import numpy as np
import torch

from engine.files import UserError
from engine.shards import open_shard, read_meta
from engine.tasks import TASKS, task_of

EXAMPLES = 2    # problems and their answers in front of each question


@dataclass
class Outcome:
    """How a model did on one problem."""
    question: str
    answer: str
    text: str           # what the model wrote
    difficulty: int
    right: bool         # the whole answer, and the end of the text behind it
    passes: list        # of each of its characters
    reach: list         # of each, Task.reach


def validation_problems(folder):
    """(name of the task, generator of (question, answer)) of a validation set; else UserError."""
    meta = read_meta(folder)
    made = task_of(meta)
    if made is None:
        raise UserError(f"{folder} is made from {meta['source']}, and --answers needs a task: "
                        f"{', '.join(TASKS)}")
    return made[0], read_problems(folder, meta, TASKS[made[0]])


def read_problems(folder, meta, task):
    """Yields (question, answer) of each problem of a validation set."""
    for shard in meta['val']['shards']:
        tokens = open_shard(os.path.join(folder, shard['name']), shard['tokens'])
        start = 0
        for end in np.flatnonzero(tokens == meta['eot']):
            text = bytes(tokens[start:end].astype(np.uint8)).decode()
            question, mark, answer = text.partition(task.end)
            yield question + mark, answer
            start = end + 1


def answer_all(model, task, pairs, eot, batch_size=100):
    """
    The Outcomes of a model on pairs [(question, answer), ..], but the first EXAMPLES. As in
    training, a question follows others: without them some models lose count of the places.
    """
    asked = []      # (tokens that the model reads, question, answer)
    for i, (question, answer) in enumerate(pairs[EXAMPLES:], start=EXAMPLES):
        before = pairs[i - EXAMPLES:i]
        room = model.config.block_size - len(answer)
        asked.append((behind(before, [eot, *question.encode()], eot, room), question, answer))
    asked.sort(key=lambda one: len(one[0]))     # so that batches need little padding
    progress = Progress()
    outcomes = []
    for first in range(0, len(asked), batch_size):
        outcomes += answer_batch(model, task, asked[first:first + batch_size], eot)
        progress(f"{len(outcomes):,} of {len(asked):,} answers")
    return outcomes


def behind(before, tokens, eot, most_tokens):
    """These tokens behind as many of the problems `before` as fit into most_tokens."""
    for earlier, answer in reversed(before):
        problem = [eot, *(earlier + answer).encode()]
        if len(problem) + len(tokens) > most_tokens:
            break
        tokens = problem + tokens
    return tokens


def answer_batch(model, task, asked, eot):
    """The Outcomes of one batch of questions."""
    longest = max(len(answer) for _, _, answer in asked)
    prompts = [prompt for prompt, _, _ in asked]
    steps = list(model.stream(prompts, longest + 1, temperature=0, stop_token=eot))
    tokens = torch.stack([token for token, _ in steps], dim=1).tolist()    # (batch, steps)
    passes = torch.stack([taken for _, taken in steps], dim=1).tolist()

    outcomes = []
    for (_, question, answer), row, taken in zip(asked, tokens, passes):
        n = len(answer)
        right = row[:n + 1] == [*answer.encode(), eot]
        written = row[:row.index(eot)] if eot in row else row
        outcomes.append(Outcome(question, answer, bytes(written).decode('utf-8', 'replace'),
                                task.difficulty(question), right, taken[:n], task.reach(question)))
    return outcomes


def answer_problems(model, folder, count):
    """The Outcomes of `count` problems of a data folder's validation set, behind the first two."""
    name, problems = validation_problems(folder)
    pairs = list(islice(problems, EXAMPLES + count))
    return answer_all(model, TASKS[name], pairs, read_meta(folder)['eot'])


def summary(model, folder, count):
    """
    Over `count` problems of a data folder's validation set:
    {'task', 'problems', 'right', 'passes', 'by_difficulty': [..], 'by_reach': [..]}; right is a
    share, passes are those of an answer's character.
    """
    outcomes = answer_problems(model, folder, count)
    name, _ = validation_problems(folder)
    task = TASKS[name]
    return {'task': name, **totals(outcomes), 'by_difficulty': by_difficulty(task, outcomes),
            'by_reach': by_reach(task, outcomes)}


def totals(outcomes):
    return {
        'problems': len(outcomes),
        'right': fmean(outcome.right for outcome in outcomes),
        'passes': fmean(passes for outcome in outcomes for passes in outcome.passes),
    }


def by_difficulty(task, outcomes):
    """[{unit of difficulty, 'problems', 'right', 'passes'}, ..], the easy ones first."""
    levels = defaultdict(list)
    for outcome in outcomes:
        levels[outcome.difficulty].append(outcome)
    return [{task.unit: level, **totals(some)} for level, some in sorted(levels.items())]


def by_reach(task, outcomes):
    """[{unit of reach, 'characters', 'passes'}, ..]; none for a task without."""
    levels = defaultdict(list)
    for outcome in outcomes:
        for reach, passes in zip(outcome.reach, outcome.passes):
            levels[reach].append(passes)
    return [{task.reach_unit: reach, 'characters': len(taken), 'passes': fmean(taken)}
            for reach, taken in sorted(levels.items())]


class Progress:
    """Says every ten seconds how far it is, for work that prints its result at the end."""

    def __init__(self):
        self.said = time.monotonic()

    def __call__(self, words):
        if time.monotonic() - self.said > 10:
            print(words, file=sys.stderr, flush=True)
            self.said = time.monotonic()
