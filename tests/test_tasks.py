"""Made tasks: the problems, their answers, the data sets, and how right answers are counted."""
import json
import random
import re

import numpy as np
import pytest
import torch
from conftest import make, save

import prepare_data
import train
from engine import tasks
from engine.files import UserError, checksum
from engine.shards import encode, get_tokenizer, read_meta
from engine.tasks import TASKS, check_context, problems
from model import GPTConfig
from prepare_data import DataSettings
from tools import answers, compare, evaluate

SMALL = dict(vocab_size=320, n_tokens=257, block_size=48, n_layer=1)


@pytest.fixture
def in_tmp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def prepare(task, **settings):
    prepare_data.prepare(DataSettings(**{'problems': 400, **settings}), [task])
    return f'data/{task}'


def all_problems(folder, split):
    """Questions and answers of one split, by another way than tools/answers.py."""
    meta = read_meta(folder)
    tokenizer = get_tokenizer('byte')
    text = ''
    for shard in meta[split]['shards']:
        with open(f"{folder}/{shard['name']}", 'rb') as f:
            f.seek(1024)
            tokens = memoryview(f.read()).cast('H').tolist()
        text += tokenizer.decode(tokens)
    *found, rest = text.split('<|endoftext|>')
    assert rest == ''
    return found


# -------------------------------------------------------------------------------------------------
# Problems


def test_sums():
    task = TASKS['addition']
    for seed in range(200):
        question = task.question(random.Random(seed), 5)
        a, b = question.removesuffix('=').split('+')
        assert len(a) == len(b) == 5
        assert task.answer(question) == f'{int(a) + int(b):06d}'


@pytest.mark.parametrize('question, longest, reach', [
    ('12+34=', 0, [1, 1, 0]),
    ('19+11=', 1, [1, 1, 0]),
    ('1999+0001=', 3, [1, 3, 2, 1, 0]),
    ('9999+0001=', 4, [4, 3, 2, 1, 0]),
    ('9999+0000=', 0, [4, 3, 2, 1, 0]),
    ('5454+5545=', 1, [1, 3, 2, 1, 0]),
    ('5955+5055=', 2, [1, 2, 1, 1, 0]),
])
def test_how_far_carries_run(question, longest, reach):
    assert TASKS['addition'].difficulty(question) == longest
    assert TASKS['addition'].reach(question) == reach


def test_the_examples_of_the_first_page_are_right():
    examples = re.findall(r'^ +(\w+) +(\S+[=|])(\S+) ', tasks.__doc__, re.M)
    assert [name for name, _, _ in examples] == list(TASKS)
    for name, question, answer in examples:
        assert TASKS[name].answer(question) == answer


def carries(question):
    """The longest carry by adding as one does on paper."""
    a, b = question[:-1].split('+')
    carry, longest, run = 0, 0, 0
    for x, y in zip(a[::-1], b[::-1]):
        total = int(x) + int(y) + carry
        made_here = int(x) + int(y) >= 10
        carry = total // 10
        run = 0 if not carry else 1 if made_here else run + 1
        longest = max(longest, run)
    return longest


def test_carries_of_many_sums():
    task = TASKS['addition']
    seen = set()
    for seed in range(300):
        question = task.question(random.Random(seed), 6)
        assert task.difficulty(question) == carries(question)
        seen.add(task.difficulty(question))
    assert seen == {0, 1, 2, 3, 4, 5, 6}


def test_traffic_car_by_car():
    task = TASKS['traffic']
    for seed in range(100):
        question = task.question(random.Random(seed), 5)
        rounds, road = question.removesuffix('|').split(':')
        for _ in range(int(rounds)):
            moving = [i for i in range(len(road) - 1) if road[i] == '>' and road[i + 1] == '.']
            cars = [i + (i in moving) for i, place in enumerate(road) if place == '>']
            road = ''.join('>' if i in cars else '.' for i in range(len(road)))
        assert task.answer(question) == road
        assert task.difficulty(question) == int(rounds)


def best(leaves, level):
    """The value of a complete game tree, from the root down."""
    if len(leaves) == 1:
        return leaves[0]
    half = len(leaves) // 2
    branches = best(leaves[:half], level - 1), best(leaves[half:], level - 1)
    return min(branches) if level % 2 == 1 else max(branches)


def test_minimax_from_the_root_down():
    task = TASKS['minimax']
    assert task.answer('37a25ab=') == '3'
    for seed in range(100):
        question = task.question(random.Random(seed), 4)
        leaves = [int(character) for character in question if character.isdigit()]
        levels = len(leaves).bit_length() - 1
        assert task.difficulty(question) == levels
        assert task.answer(question) == str(best(leaves, levels))


@pytest.mark.parametrize('name', TASKS)
@pytest.mark.parametrize('size', [1, 3, 7])
def test_the_longest_problem_is_as_long_as_said(name, size):
    lengths = [len(problem) for problem in problems(name, size, 300, seed=1)]
    assert max(lengths) == TASKS[name].longest(size)


# -------------------------------------------------------------------------------------------------
# Data sets


@pytest.mark.parametrize('task', TASKS)
def test_data_sets_are_disjoint_whole_and_the_same_again(task, in_tmp, capsys):
    folder = prepare(task)
    made = all_problems(folder, 'train'), all_problems(folder, 'val')
    assert not set(made[0]) & set(made[1])
    assert len(made[0]) + len(made[1]) == 400
    for problem in made[0] + made[1]:
        question, end, answer = problem.partition(TASKS[task].end)
        assert TASKS[task].answer(question + end) == answer

    prepare(task, name='again')
    assert (all_problems('data/again', 'train'), all_problems('data/again', 'val')) == made
    prepare(task, name='other', seed=2)
    assert all_problems('data/other', 'val') != made[1]
    prepare_data.main(['--check', folder])


def test_more_problems_move_none_to_the_other_side(in_tmp):
    few = prepare('addition')
    many = prepare('addition', name='many', problems=800) and 'data/many'
    for split in ('train', 'val'):
        assert set(all_problems(few, split)) < set(all_problems(many, split))


@pytest.mark.parametrize('args, words', [
    (['addition', '--size=0'], ['--size=0', 'addition', '1 to 100']),
    (['addition', '--size=101'], ['--size=101']),
    (['minimax', '--size=9'], ['minimax', '1 to 8']),
    (['traffic', '--problems=5'], ['--problems=5']),
    (['traffic', '--problems=-5'], ['--problems=-5']),
    (['--size=3'], ['--size', 'addition, traffic, minimax']),
])
def test_impossible_dials_are_one_line(args, words, in_tmp):
    with pytest.raises(UserError) as error:
        prepare_data.main(args)
    assert '\n' not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_another_size_replaces_the_data_set(in_tmp):
    prepare('addition')
    prepare('addition', size=2)
    assert len(all_problems('data/addition', 'val')[0]) == len('11+22=033')


def test_problems_have_to_fit_into_the_context(in_tmp):
    meta = read_meta(prepare('addition', size=9))
    check_context(meta, 31)
    with pytest.raises(UserError) as error:
        check_context(meta, 30)
    assert '31 tokens' in str(error.value) and 'block_size=30' in str(error.value)
    shape = ['--n_layer=1', '--n_head=1', '--n_embd=8', '--mlp_hidden=8', '--batch_tokens=16']
    with pytest.raises(UserError, match='block_size=16'):
        train.main([*shape, '--block_size=16', '--data_dir=data/addition', '--max_steps=1'])


# -------------------------------------------------------------------------------------------------
# Right answers


class StandIn:
    """In the place of a model: says what `answer` makes of a question."""

    def __init__(self, answer, block_size=128):
        self.answer = answer
        self.config = GPTConfig(vocab_size=64, block_size=block_size)
        self.prompts = []

    def stream(self, prompts, max_new_tokens, temperature, stop_token):
        """The tokens of each answer, one pass for the first, two for the second, ..."""
        assert temperature == 0
        self.prompts += prompts
        rows = []
        for prompt in prompts:
            assert prompt[0] == stop_token
            assert len(prompt) + max_new_tokens - 1 <= self.config.block_size
            last = len(prompt) - prompt[::-1].index(stop_token)
            said = [*self.answer(bytes(prompt[last:]).decode()).encode(), stop_token]
            rows.append((said + [stop_token] * max_new_tokens)[:max_new_tokens])
        for place, column in enumerate(zip(*rows)):
            yield torch.tensor(column), torch.full((len(rows),), place + 1)


@pytest.mark.parametrize('name', TASKS)
def test_a_perfect_model_is_right_and_a_broken_one_wrong(name, in_tmp):
    folder = prepare(name)
    task = TASKS[name]
    perfect = answers.summary(StandIn(task.answer), folder, 1000)
    assert perfect['right'] == 1
    assert perfect['problems'] == len(all_problems(folder, 'val'))
    assert sum(row['problems'] for row in perfect['by_difficulty']) == perfect['problems']

    def goes_on(question):
        return task.answer(question) + '1'
    assert answers.summary(StandIn(goes_on), folder, 1000)['right'] == 0
    assert answers.summary(StandIn(lambda question: ''), folder, 1000)['right'] == 0


@pytest.mark.parametrize('block_size, shown', [
    (128, 2),
    (48, 2),    # 2 x 16 + 11 in front of the answer, whose five digits are read, too
    (47, 1),
    (32, 1),
    (31, 0),
    (16, 0),
])
def test_a_question_follows_as_many_problems_as_there_is_room_for(block_size, shown, in_tmp):
    folder = prepare('addition')
    model = StandIn(TASKS['addition'].answer, block_size)
    assert answers.summary(model, folder, 1000)['right'] == 1
    problems = all_problems(folder, 'val')
    ends = [prompt.count(256) for prompt in model.prompts]
    assert ends.count(shown + 1) == len(problems) - shown
    by_question = {bytes(token for token in prompt if token < 256)[-10:]: prompt
                   for prompt in model.prompts}
    last = by_question[problems[-1][:10].encode()]
    expected = [256, *problems[-1][:10].encode()]
    for problem in problems[-2:-2 - shown:-1]:
        expected = [256, *problem.encode(), *expected]
    assert last == expected


def rewrite(folder, split, text):
    """Give a data set another split, one shard of this text; its meta.json describes the file."""
    tokens = encode(get_tokenizer('byte'), text)
    path = f'{folder}/{split}_000000.bin'
    with open(path, 'r+b') as f:
        f.truncate(0)
        header = np.zeros(256, np.int32)
        header[:3] = 20240520, 1, len(tokens)
        f.write(header.tobytes() + tokens.tobytes())
    meta = read_meta(folder)
    shard = dict(name=f'{split}_000000.bin', tokens=len(tokens), sha256=checksum(path))
    meta[split] = dict(bytes=len(text), tokens=len(tokens), shards=[shard])
    write_meta(folder, meta)


def write_meta(folder, meta):
    with open(f'{folder}/meta.json', 'w') as f:
        json.dump(meta, f)


@pytest.mark.parametrize('name, text', [
    ('addition', '12+34=047'), ('addition', '1+2=3'), ('addition', '12+34'), ('addition', '='),
    ('addition', '12345+12345=024690'), ('addition', 'some text'), ('addition', '1+2+3=6'),
    ('traffic', '2:>>..|>>..'), ('traffic', '99999999999:..|..'), ('traffic', ':>.|>.'),
    ('minimax', '37a=7'), ('minimax', 'a=3'), ('minimax', '37z=3'), ('minimax', '=3'),
    ('minimax', '37'),
])
def test_what_is_no_problem_of_the_task_is_one_line(name, text, in_tmp):
    folder = prepare(name, size=4, problems=100)
    rewrite(folder, 'val', text.encode())
    prepare_data.main(['--check', folder])      # the files are those that it describes
    with pytest.raises(UserError, match=f'no problem of {name} --size=4.* at place 0') as error:
        answers.summary(StandIn(TASKS[name].answer), folder, 10)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('source', [
    '', 'addition', 'addition --size=', 'addition --size=x --problems=1', 'juggling --size=4',
    'addition --size=0 --problems=400', 'addition --size=999 --problems=400',
    'addition --size=10000000000000000 --problems=400', 'addition mine.txt', '--size=4',
])
def test_sources_that_are_no_task(source, in_tmp):
    folder = prepare('addition', problems=100)
    meta = {**read_meta(folder), 'source': source}
    write_meta(folder, meta)
    check_context(read_meta(folder), 8)     # a text, which may be longer
    with pytest.raises(UserError, match='--answers needs a task'):
        answers.validation_problems(folder)


def test_tasks_of_other_tokens_than_bytes_are_refused(in_tmp):
    folder = prepare('addition', problems=100)
    write_meta(folder, {**read_meta(folder), 'tokenizer': 'gpt2', 'n_tokens': 50257, 'eot': 50256})
    with pytest.raises(UserError, match='a made task has byte tokens, not gpt2'):
        read_meta(folder)


def test_right_answers_are_counted_by_difficulty(in_tmp):
    folder = prepare('addition', problems=2000)
    task = TASKS['addition']

    def without_long_carries(question):
        return task.answer(question) if task.difficulty(question) < 2 else '0'
    result = answers.summary(StandIn(without_long_carries), folder, 1000)
    carries = {row['longest carry']: row['right'] for row in result['by_difficulty']}
    assert carries == {0: 1, 1: 1, 2: 0, 3: 0, 4: 0}
    easy = sum(row['problems'] for row in result['by_difficulty'] if row['right'])
    assert result['right'] == easy / result['problems']


def test_passes_are_counted_by_how_far_a_digit_waits(in_tmp):
    """The stand-in takes i passes for digit i; the last of five waits for nothing."""
    folder = prepare('addition')
    result = answers.summary(StandIn(TASKS['addition'].answer), folder, 1000)
    assert result['passes'] == 3
    by_reach = {row['places its carry depends on']: row for row in result['by_reach']}
    assert by_reach[0]['passes'] == 5
    assert by_reach[0]['characters'] == result['problems']
    assert by_reach[4]['passes'] == 1
    assert 1 < by_reach[3]['passes'] <= 2


def test_evaluate_prints_a_table_and_writes_json(in_tmp, capsys):
    folder = prepare('addition')
    save('model', make(**SMALL, ponder='chain', halting='router'), data_dir=folder)
    evaluate.main(['model', '--answers=50', '--json=answers.json'])
    printed = capsys.readouterr().out
    with open('answers.json') as f:
        result = json.load(f)
    assert '| longest carry | problems | right | passes |' in printed
    assert '| places its carry depends on |' in printed
    assert f"{result['right']:.1%} of {result['problems']}" in printed
    assert result['problems'] == min(50, len(all_problems(folder, 'val')))


def test_only_tasks_have_answers(small_data, in_tmp):
    save('model', make(**SMALL), data_dir=str(small_data))
    with pytest.raises(UserError, match='needs a task: addition, traffic, minimax'):
        evaluate.main(['model', '--answers=50'])
    with pytest.raises(UserError, match='--answers'):
        evaluate.main(['model', '--json=a.json'])


def test_compare_counts_right_answers(in_tmp, capsys, monkeypatch):
    folder = prepare('addition')
    monkeypatch.setattr(compare, 'train', lambda args, *_: train.main(args))
    shape = ['--n_layer=1', '--n_head=1', '--n_embd=16', '--mlp_hidden=16', '--block_size=32',
             '--batch_tokens=64', '--micro_batch=2', '--max_steps=2', '--sample_tokens=0',
             '--eval_tokens=64', '--learning_rate=0.01', '--device=cpu', '--dtype=float32']
    compare.main([*shape, f'--data_dir={folder}', '--names=plain,loop', '--seeds=1',
                  '--answers=20'])
    printed = capsys.readouterr().out
    assert '| run | seeds | right answers | lowest to highest | passes |' in printed
    assert '| loop | 1 | 0.0% | 0.0% to 0.0% | 4.00 |' in printed
