"""
Right answers to the problems of a made task (engine/tasks.py): of a checkpoint, and in evaluations
of a run.

    exam = exam_of_data(folder)                         what to ask, wherever the data is later
    outcomes = answer_problems(model, exam, 100)        an Outcome for each problem
    summary(model, exam, 1000)                          right answers and passes, by difficulty
    inputs, targets = read_answers(model, exam, 100)    the problems with their answers, as texts

Answers are written greedily, through the cache, many at once. Each question is asked once, behind
two other problems of the validation set and their answers, or as many as fit in.
"""

import os
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch

from engine.files import Progress
from engine.generate import stream
from engine.shards import open_shard, read_meta
from engine.tasks import TASKS, check_room, in_answers, task_of

EXAMPLES = 2    # problems and their answers in front of each question
KEPT = 1000     # problems that a run keeps, so that they can be asked without its data


@dataclass
class Outcome:
    """How a model did on one problem."""
    question: str
    answer: str
    text: str           # what the model wrote
    difficulty: int
    right: bool         # the whole answer, and the end of the text behind it
    passes: list        # of each byte written, up to the answer's length, and of an early end


def exam_of_data(folder, count=KEPT):
    """
    What to ask a model of the made task in a data folder: {'task', 'size', 'eot', 'problems'}; None
    of another text. problems: the first of its validation set that differ, as (question, answer),
    `count` and EXAMPLES more, or as many as there are.
    """
    meta = read_meta(folder)
    made = task_of(meta)
    if made is None:
        return None
    name, size = made
    answers = {}    # of each question
    for question, answer in read_problems(folder, meta, TASKS[name]):
        answers[question] = answer
        if len(answers) == count + EXAMPLES:
            break
    return dict(task=name, size=size, eot=meta['eot'], problems=list(answers.items()))


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


def ask(model, exam, count):
    """
    [(tokens that the model reads, question, answer), ..] of `count` problems of an exam, or of as
    many as it has. As in training, a question follows others: without them some models lose count
    of the places. The first ones are examples, and asked last.
    """
    check_room(exam['task'], exam['size'], model.config.block_size)
    eot = exam['eot']
    problems = [*exam['problems'][EXAMPLES:], *exam['problems'][:EXAMPLES]]
    asked = []
    longest = max(len(answer.encode()) for _, answer in problems[:count])
    room = model.config.block_size - longest    # one for all: a batch draws as many tokens of each
    for i, (question, answer) in enumerate(problems[:count]):
        near = [problems[(i - k) % len(problems)] for k in range(EXAMPLES, 0, -1)]
        before = [one for one in near if one[0] != question]    # where there are no others
        asked.append((behind(before, [eot, *question.encode()], eot, room), question, answer))
    return asked


def answer_problems(model, exam, count, exact=False, batch_size=100):
    """The Outcomes of `count` problems of an exam, or of as many as it has; exact as in stream."""
    asked = ask(model, exam, count)
    asked.sort(key=lambda one: len(one[0]))     # so that batches need little padding
    progress = Progress()
    outcomes = []
    for first in range(0, len(asked), batch_size):
        some = asked[first:first + batch_size]
        outcomes += answer_batch(model, TASKS[exam['task']], some, exam['eot'], exact)
        progress(f"{len(outcomes):,} of {len(asked):,} answers")
    return outcomes


def behind_solved(tokens, exam, block_size):
    """
    These tokens behind solved problems of an exam, as in `ask`: as many as leave room for the
    answer, if they are a question, and none that they ask.
    """
    text = ''.join(map(chr, tokens))
    others = [one for one in exam['problems'] if chr(exam['eot']) + one[0] not in text]
    longest = 1 + TASKS[exam['task']].longest(exam['size'])     # with the end-of-text in front
    answer = max(0, longest - len(tokens))
    return behind(others[:EXAMPLES], tokens, exam['eot'], block_size - answer)


def what_counts(tokens, exam, first=0):
    """
    Of each token from place `first` on, whether the one behind it is to be predicted: in a text
    (exam is None) of all, of a made task of the characters of answers.
    """
    counts = np.full(len(tokens), True)
    if exam is not None:
        eot = exam['eot']
        answers = in_answers(np.array([tokens]), exam['task'], eot)[0]
        counts = answers & (np.roll(tokens, -1) != eot)
    counts[:first] = False
    counts[-1] = False
    return counts.tolist()


def behind(before, tokens, eot, most_tokens):
    """These tokens behind as many of the problems `before` as fit into most_tokens."""
    for earlier, answer in reversed(before):
        problem = [eot, *(earlier + answer).encode()]
        if len(problem) + len(tokens) > most_tokens:
            break
        tokens = problem + tokens
    return tokens


def answer_batch(model, task, asked, eot, exact):
    """The Outcomes of one batch of questions."""
    longest = max(len(answer.encode()) for _, _, answer in asked)
    prompts = [prompt for prompt, _, _ in asked]
    steps = list(stream(model, prompts, longest + 1, temperature=0, stop_token=eot,
                        exact=exact))
    tokens = torch.stack([token for token, _ in steps], dim=1).tolist()    # (batch, steps)
    passes = torch.stack([taken for _, taken in steps], dim=1).tolist()

    outcomes = []
    for (_, question, answer), row, taken in zip(asked, tokens, passes):
        wanted = [*answer.encode(), eot]
        right = row[:len(wanted)] == wanted
        written = row[:row.index(eot)] if eot in row else row
        outcomes.append(Outcome(question, answer, bytes(written).decode('utf-8', 'replace'),
                                task.difficulty(question), right,
                                taken[:min(len(wanted) - 1, len(written) + 1)]))
    return outcomes


def read_answers(model, exam, count):
    """
    The same problems with their answers: inputs and targets, (count, T) each. Targets are -1, which
    do not count, but for the answer and the end of the text behind it. The model writes an answer
    right if and only if each of these targets is the likeliest token, as caches are exact (but
    latent, mask and feedback read by iteration).
    """
    eot = exam['eot']
    texts = [(tokens, [*answer.encode(), eot]) for tokens, _, answer in ask(model, exam, count)]
    T = max(len(tokens) + len(answer) for tokens, answer in texts) - 1
    inputs = torch.full((len(texts), T), eot)       # behind the answer, where nothing counts
    targets = torch.full((len(texts), T), -1)
    for i, (tokens, answer) in enumerate(texts):
        end = len(tokens) + len(answer) - 1
        inputs[i, :end] = torch.tensor(tokens + answer[:-1])
        targets[i, len(tokens) - 1:end] = torch.tensor(answer)
    return inputs, targets


def summary(model, exam, count, exact=False):
    """
    Over `count` problems of an exam: {'task', 'problems', 'right', 'passes', 'by_difficulty':
    [..]}; right is a share, passes are those of an answer's character.
    """
    outcomes = answer_problems(model, exam, count, exact)
    by_level = by_difficulty(TASKS[exam['task']], outcomes)
    return {'task': exam['task'], **totals(outcomes), 'by_difficulty': by_level}


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
