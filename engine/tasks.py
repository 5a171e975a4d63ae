"""
Made tasks: problems whose answer takes several steps of work, one after the other, and a dial for
how many. prepare_data.py writes them as ordinary data sets, tools/evaluate.py counts the right
answers.

    addition   1999+8001=10000          the first digit waits for carries from the last ones
    traffic    2:>>.>..|.>.>.>          cars after two rounds; a car moves if the next place is free
    minimax    37a25ab=3                the value of a game tree: a takes the lower of two, b the
                                        higher

A problem is a document: a question, which ends with '=' or '|', and its answer. How hard it is can
be read from the question.
"""

import contextlib
import random
import re

import numpy as np

from engine.files import UserError


class Task:
    """
    A kind of problem; `size` is its dial. Each has

        question(rng, size)     a question, drawn with a random.Random
        form                    a regular expression that every question matches
        answer(question)        its answer
        difficulty(question)    how much work it is, one step after the other
        longest(size)           bytes of the longest problem
    """
    largest_size = 1
    default_size = 1
    end = '='           # the last character of a question
    unit = ''           # what `difficulty` counts


class Addition(Task):
    """
    Sums of two numbers with `size` digits, the first digit first. In 70 % of the problems 60 % of
    the pairs of digits are made to add up to 9, so that carries run far.
    """
    form = r'[0-9]+\+[0-9]+='
    largest_size = 100
    default_size = 4
    unit = 'longest carry'

    def question(self, rng, size):
        far = rng.random() < 0.7
        first, second = '', ''
        for _ in range(size):
            digit = rng.randrange(10)
            nine = far and rng.random() < 0.6
            first += str(digit)
            second += str(9 - digit if nine else rng.randrange(10))
        return f'{first}+{second}='

    def answer(self, question):
        first, second = question[:-1].split('+')
        if len(first) != len(second):
            raise ValueError(question)
        digits = len(first) + 1
        return str(int(first) + int(second)).zfill(digits)

    def difficulty(self, question):
        """How many places the longest carry runs through: 0 for 12+34, 3 for 1999+0001."""
        first, second = question[:-1].split('+')
        longest, run = 0, 0
        for a, b in zip(reversed(first), reversed(second)):
            pair = int(a) + int(b)
            if pair >= 10:
                run = 1             # a carry begins
            elif pair == 9 and run:
                run += 1            # and goes on
            else:
                run = 0
            longest = max(longest, run)
        return longest

    def longest(self, size):
        return 3 * size + 3     # two numbers, a sum with one digit more, + and =


class Traffic(Task):
    """
    1 to `size` rounds on a road of 2 size places. In a round every car (>) with a free place (.) in
    front of it moves there, all at once; the road ends at a wall. This is rule 184 of Wolfram's
    elementary cellular automata, in which jams move backwards.
    """
    form = r'[0-9]+:[.>]+\|'
    largest_size = 99
    default_size = 8
    end = '|'
    unit = 'rounds'

    def question(self, rng, size):
        rounds = rng.randint(1, size)
        road = ''.join(rng.choice('.>') for _ in range(2 * size))
        return f'{rounds}:{road}|'

    def answer(self, question):
        rounds, road = question[:-1].split(':')
        standing = len(road) ** 2       # rounds after which no car can move any more
        for _ in range(min(int(rounds), standing)):
            road = road.replace('>.', '.>')     # no two '>.' overlap: all cars at once
        return road

    def difficulty(self, question):
        return int(question.split(':')[0])

    def longest(self, size):
        return len(str(size)) + 4 * size + 2    # the number of rounds, the road twice, : and |


class Minimax(Task):
    """
    The value of a complete game tree of 1 to `size` levels, whose leaves are digits. It is written
    as both branches, then the player who chooses. Players a, c, .. take the lower value, b, d, ..
    the higher.
    """
    form = r'[0-9]{2}[0-9a-h]*[a-h]='
    largest_size = 8
    default_size = 4
    unit = 'levels'
    players = 'abcdefgh'

    def question(self, rng, size):
        return self.tree(rng, rng.randint(1, size)) + '='

    def tree(self, rng, levels):
        if levels == 0:
            return str(rng.randrange(10))
        branches = self.tree(rng, levels - 1) + self.tree(rng, levels - 1)
        return branches + self.players[levels - 1]

    def answer(self, question):
        trees = []      # that wait for their player: (value, levels)
        for character in question[:-1]:
            if character.isdigit():
                trees.append((int(character), 0))
                continue
            (right, of_right), (left, of_left) = trees.pop(), trees.pop()
            level = self.players.index(character)
            if not level == of_right == of_left:
                raise ValueError(question)
            choose = min if level % 2 == 0 else max
            trees.append((choose(left, right), level + 1))
        [(value, _)] = trees    # ValueError without a player who has the last choice
        return str(value)

    def difficulty(self, question):
        return self.players.index(question[-2]) + 1

    def longest(self, size):
        return 2 ** (size + 1) + 1  # 2 ** (size + 1) - 1 leaves and players, = and a digit


TASKS = {'addition': Addition(), 'traffic': Traffic(), 'minimax': Minimax()}


def answer_to(question, name):
    """The answer to what somebody has typed; UserError if it is no question of the task."""
    task = TASKS[name]
    if re.fullmatch(task.form, question):
        with contextlib.suppress(ValueError, IndexError):   # as a tree without enough leaves
            return task.answer(question)
    raise UserError(f"{question}: no problem of {name}, which this model is trained on; see "
                    "engine/tasks.py")


def problems(name, size, count, seed):
    """Yields `count` problems as bytes, question and answer; the same for the same seed."""
    task = TASKS[name]
    rng = random.Random(f'{name} {size} {seed}')
    for _ in range(count):
        question = task.question(rng, size)
        yield (question + task.answer(question)).encode()


def check_task(name, size, count):
    """UserError for a size that the task has not, or for too few problems."""
    largest = TASKS[name].largest_size
    if not 1 <= size <= largest:
        raise UserError(f"--size={size}: {name} has sizes from 1 to {largest}")
    if count < 100:
        raise UserError(f"--problems={count} must be at least 100")


def task_of(meta):
    """(the name of the task that a data set was made of, its size); None for another text."""
    # as prepare_data.py writes it
    made = re.match(r'(\S+) --size=([0-9]+) --problems=', meta['source'])
    if made is None or made[1] not in TASKS:
        return None
    name, size = made[1], int(made[2])
    return (name, size) if 1 <= size <= TASKS[name].largest_size else None


def in_answers(x, name, eot):
    """
    Which targets of inputs x (B,T) belong to an answer: (B,T). An answer goes from the end of its
    question to the end-of-text token `eot`, which is part of it. Of a problem that began before the
    window none do: nobody could know it.
    """
    place = np.arange(1, x.shape[1] + 1)
    begin = np.maximum.accumulate(place * (x == eot), axis=1)                   # of the problem
    ended = np.maximum.accumulate(place * (x == ord(TASKS[name].end)), axis=1)  # the question
    return (0 < begin) & (begin < ended)


def check_room(name, size, block_size):
    """UserError if a task's problems do not fit into the model's context."""
    needed = TASKS[name].longest(size) + 1      # and the end-of-text token in front of it
    if needed > block_size:
        raise UserError(f"{name} of size {size} has problems of {needed} tokens: raise "
                        f"block_size={block_size}, or prepare them with a smaller --size")
