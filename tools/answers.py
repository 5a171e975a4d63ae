"""
Right answers to the problems of a made task (engine/tasks.py), for tools/evaluate.py and
tools/compare.py.

    by difficulty   the share of right answers, and the passes of the model per character
    by reach        sums, with halting: passes by how many places a character depends on

Answers are written greedily, through the cache, many at once; each question follows up to two
problems of the validation set and their answers.
"""

import os
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
    name, size = made
    return name, read_problems(folder, meta, TASKS[name], size)


def read_problems(folder, meta, task, size):
    """Yields (question, answer) of each problem; UserError for a text that is none."""
    for shard in meta['val']['shards']:
        path = os.path.join(folder, shard['name'])
        tokens = open_shard(path, shard['tokens'])
        start = 0
        for end in np.flatnonzero(tokens == meta['eot']):
            text = ''.join(map(chr, tokens[start:end]))
            question, mark, answer = text.partition(task.end)
            if not is_problem(task, size, question + mark, answer):
                raise UserError(f"{path}: no problem of {meta['source']} at place {start}; "
                                "prepare the data again")
            yield question + mark, answer
            start = end + 1


def is_problem(task, size, question, answer):
    """Whether this is a question of the task, of at most this size, and its answer."""
    try:
        text = question + answer
        fits = text.isascii() and len(text) <= task.longest(size)
        return fits and task.difficulty(question) <= size and task.answer(question) == answer
    except (ValueError, IndexError):    # not of the form that the task's questions have
        return False


def answer_all(model, task, pairs, eot, batch_size=100):
    """
    The Outcomes of a model on pairs [(question, answer), ..]. As in training, a question follows
    others: without them some models lose count of the places. The shortest prompts come first.
    """
    asked = []
    for i, (question, answer) in enumerate(pairs):
        before = pairs[max(0, i - EXAMPLES):i]
        prompt = prompt_of(question, before, eot, prompt_room(model, answer))
        asked.append(Prompted(prompt, question, answer))
    asked.sort(key=lambda one: len(one.prompt))     # so that batches need little padding
    outcomes = []
    for first in range(0, len(asked), batch_size):
        outcomes += answer_batch(model, task, asked[first:first + batch_size], eot)
    return outcomes


@dataclass
class Prompted:
    """A question as the model reads it, and the right answer."""
    prompt: list        # tokens
    question: str
    answer: str


def prompt_room(model, answer):
    """Tokens of the context that are left for the prompt."""
    return model.config.block_size - len(answer)


def prompt_of(question, before, eot, most_tokens):
    """A question's tokens, behind as many of the problems `before` as fit into most_tokens."""
    tokens = [eot, *question.encode()]
    for earlier, answer in reversed(before):
        problem = [eot, *(earlier + answer).encode()]
        if len(problem) + len(tokens) > most_tokens:
            break
        tokens = problem + tokens
    return tokens


def answer_batch(model, task, asked, eot):
    """The Outcomes of one batch of questions."""
    longest = max(len(one.answer) for one in asked)
    prompts = [one.prompt for one in asked]
    steps = list(model.stream(prompts, longest + 1, temperature=0, stop_token=eot))
    tokens = torch.stack([token for token, _ in steps], dim=1).tolist()    # (batch, steps)
    passes = torch.stack([taken for _, taken in steps], dim=1).tolist()

    outcomes = []
    for one, row, taken in zip(asked, tokens, passes):
        n = len(one.answer)
        right = row[:n + 1] == [*one.answer.encode(), eot]
        difficulty = task.difficulty(one.question)
        outcomes.append(Outcome(difficulty, right, taken[:n], task.reach(one.question)))
    return outcomes


def summary(model, folder, count):
    """
    Over the first `count` problems of a data folder's validation set:
    {'task', 'problems', 'right', 'passes', 'by_difficulty': [..], 'by_reach': [..]}
    """
    name, problems = validation_problems(folder)
    task = TASKS[name]
    eot = read_meta(folder)['eot']
    answers = answer_all(model, task, list(islice(problems, count)), eot)
    return {
        'task': name,
        'problems': len(answers),
        'right': fmean(answer.right for answer in answers),
        'passes': fmean(passes for answer in answers for passes in answer.passes),
        'by_difficulty': by_difficulty(task, answers),
        'by_reach': by_reach(task, answers),
    }


def by_difficulty(task, answers):
    """[{unit of difficulty, 'problems', 'right', 'passes'}, ..], the easy ones first."""
    levels = defaultdict(list)
    for answer in answers:
        levels[answer.difficulty].append(answer)
    rows = []
    for level, some in sorted(levels.items()):
        passes = fmean(passes for answer in some for passes in answer.passes)
        right = fmean(answer.right for answer in some)
        rows.append({task.unit: level, 'problems': len(some), 'right': right, 'passes': passes})
    return rows


def by_reach(task, answers):
    """[{unit of reach, 'characters', 'passes'}, ..]; none for a task without."""
    levels = defaultdict(list)
    for answer in answers:
        for reach, passes in zip(answer.reach, answer.passes):
            levels[reach].append(passes)
    return [{task.reach_unit: reach, 'characters': len(taken), 'passes': fmean(taken)}
            for reach, taken in sorted(levels.items())]


def in_words(result, halts):
    """The summary as a line, and tables in Markdown; without halting all passes are equal."""
    parts = [f"{result['task']}: {result['right']:.1%} of {result['problems']:,} answers right, "
             f"with {result['passes']:.2f} passes per character"]
    parts += markdown(result['by_difficulty'])
    if halts and result['by_reach']:
        parts += markdown(result['by_reach'])
    return '\n'.join(parts)


def markdown(rows):
    """Dictionaries of the same names as the lines of a table."""
    names = list(rows[0])
    lines = ['', '| ' + ' | '.join(names) + ' |', '| ' + ' | '.join('---' for _ in names) + ' |']
    for row in rows:
        lines.append('| ' + ' | '.join(in_table(row[name]) for name in names) + ' |')
    return lines


def in_table(value):
    return f'{value:,}' if isinstance(value, int) else f'{value:.3f}'
