"""Made tasks: the problems, their answers, the data sets, and how right answers are counted."""
import os
import random
import re
import shutil
from functools import partial

import pytest
import torch
from conftest import cells, make, save

import prepare_data
import sample
import train
from engine import answers, tasks, trained
from engine.answers import exam_of_data
from engine.files import UserError
from engine.generate import stream
from engine.shards import get_tokenizer, open_shard, read_meta
from engine.tasks import TASKS, check_room, problems
from model import GPTConfig
from prepare_data import DataSettings
from tools import evaluate, explain

SMALL = dict(vocab_size=320, n_tokens=257, block_size=48, n_layer=1)


@pytest.fixture
def in_tmp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def prepare(task, **settings):
    prepare_data.prepare(DataSettings(**{'problems': 400, **settings}), [task])
    return f"data/{settings.get('name', task)}"


def all_problems(folder, split):
    """Questions and answers of one split, by another way than engine/answers.py."""
    text = ''
    for shard in read_meta(folder)[split]['shards']:
        text += get_tokenizer('byte').decode(open_shard(f"{folder}/{shard['name']}").tolist())
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


@pytest.mark.parametrize('question, longest', [
    ('19+11=', 1),
    ('9999+0001=', 4),
    ('9999+0000=', 0),
    ('5454+5545=', 1),
    ('5955+5055=', 2),
])
def test_how_far_carries_run(question, longest):
    assert TASKS['addition'].difficulty(question) == longest


def test_the_examples_of_the_first_page_are_right():
    examples = re.findall(r'^ +(\w+) +(\S+[=|])(\S+) ', tasks.__doc__, re.M)
    assert [name for name, _, _ in examples] == list(TASKS)
    for name, question, answer in examples:
        assert TASKS[name].answer(question) == answer


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


@pytest.mark.parametrize('name, typed', [
    ('addition', '74 + 67='), ('addition', '74+670='), ('addition', '74+67,80+90='),
    ('addition', '+='), ('addition', 'hello='),
    ('traffic', '2:>>_>__|'), ('traffic', ':>.|'), ('traffic', '1:|'),
    ('minimax', '37a25a='), ('minimax', '3='), ('minimax', '3a7='), ('minimax', '37a5b8='),
    ('minimax', '37a5b='), ('minimax', '37c='), ('minimax', '37a25ac='),
])
def test_what_is_no_question_has_no_answer(name, typed):
    task = TASKS[name]
    with pytest.raises(UserError, match=f'no problem of {name}'):
        tasks.answer_to(typed, name)
    for seed in range(50):
        question = task.question(random.Random(seed), task.default_size)
        assert tasks.answer_to(question, name) == task.answer(question)


@pytest.mark.parametrize('name', TASKS)
@pytest.mark.parametrize('size', [1, 7])
def test_the_longest_problem_is_as_long_as_said(name, size):
    lengths = [len(problem) for problem in problems(name, size, 300, seed=1)]
    assert max(lengths) == TASKS[name].longest(size)


# -------------------------------------------------------------------------------------------------
# Data sets


@pytest.mark.parametrize('task', TASKS)
def test_data_sets_are_disjoint_whole_and_the_same_again(task, in_tmp):
    folder = prepare(task)
    made = all_problems(folder, 'train'), all_problems(folder, 'val')
    assert not set(made[0]) & set(made[1])
    assert len(made[0]) + len(made[1]) == 400
    for problem in made[0] + made[1]:
        question, end, answer = problem.partition(TASKS[task].end)
        assert TASKS[task].answer(question + end) == answer

    again = prepare(task, name='again')
    assert (all_problems(again, 'train'), all_problems(again, 'val')) == made
    assert all_problems(prepare(task, name='other', seed=2), 'val') != made[1]
    more = prepare(task, name='more', problems=800)     # none moves to the other side
    assert set(made[1]) < set(all_problems(more, 'val'))


def test_refusals(in_tmp):
    for args, words in [(['addition', '--size=101'], '--size=101.*1 to 100'),
                        (['traffic', '--problems=5'], '--problems=5'),
                        (['--size=3'], 'addition, traffic, minimax')]:
        with pytest.raises(UserError, match=words):
            prepare_data.main(args)
    check_room('addition', 9, 31)
    with pytest.raises(UserError, match='31 tokens.*block_size=30'):
        check_room('addition', 9, 30)


# -------------------------------------------------------------------------------------------------
# Right answers


@pytest.fixture(autouse=True)
def stand_ins_may_answer(monkeypatch):
    """A StandIn streams by itself, a model by engine/generate.py."""
    def of_either(model, *args, **options):
        return getattr(model, 'stream', partial(stream, model))(*args, **options)
    monkeypatch.setattr(answers, 'stream', of_either)


class StandIn:
    """In the place of a model: says what `answer` makes of a question."""

    def __init__(self, answer, block_size=128):
        self.answer = answer
        self.config = GPTConfig(vocab_size=64, block_size=block_size)
        self.prompts = []

    def stream(self, prompts, max_new_tokens, temperature, stop_token, exact):
        """The tokens of each answer, one pass for the first, two for the second, ..."""
        assert temperature == 0 and not exact
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
    exam = exam_of_data(folder)
    task = TASKS[name]
    perfect = answers.summary(StandIn(task.answer), exam, 1000)
    assert perfect['right'] == 1
    assert perfect['problems'] == len(set(all_problems(folder, 'val')))
    assert sum(row['problems'] for row in perfect['by_difficulty']) == perfect['problems']

    def goes_on(question):
        return task.answer(question) + '1'
    assert answers.summary(StandIn(goes_on), exam, 1000)['right'] == 0
    assert answers.summary(StandIn(lambda question: ''), exam, 1000)['right'] == 0


@pytest.mark.parametrize('block_size, shown', [
    (48, 2),    # 2 x 16 + 11 in front of the answer, whose five digits are read, too
    (47, 1),
    (32, 1),
    (31, 0),
])
def test_a_question_follows_as_many_problems_as_there_is_room_for(block_size, shown, in_tmp):
    folder = prepare('addition')
    exam = exam_of_data(folder)
    model = StandIn(TASKS['addition'].answer, block_size)
    assert answers.summary(model, exam, 1000)['right'] == 1
    problems = all_problems(folder, 'val')
    ends = [prompt.count(256) for prompt in model.prompts]
    assert ends == [shown + 1] * len(problems)
    with pytest.raises(UserError, match='block_size=15'):
        answers.summary(StandIn(TASKS['addition'].answer, 15), exam, 1000)
    by_question = {bytes(token for token in prompt if token < 256)[-10:]: prompt
                   for prompt in model.prompts}
    last = by_question[problems[-1][:10].encode()]
    expected = [256, *problems[-1][:10].encode()]
    for problem in problems[-2:-2 - shown:-1]:
        expected = [256, *problem.encode(), *expected]
    assert last == expected


class ShortSums(type(TASKS['addition'])):
    """Answers of unlike lengths, in letters that are no ASCII."""

    def answer(self, question):
        first, second = question[:-1].split('+')
        return str(int(first) + int(second)).replace('1', 'é')

    def longest(self, size):
        return super().longest(size) + size + 1


@pytest.mark.parametrize('name', ['sort2', 'copy_back'])
def test_a_task_of_ones_own(name, in_tmp, monkeypatch):
    monkeypatch.setitem(TASKS, name, ShortSums())
    folder = prepare(name)
    assert tasks.task_of(read_meta(folder)) == (name, 4)
    exam = exam_of_data(folder)
    for block_size in (25, 48):     # where a window slid, StandIn would say so
        assert answers.summary(StandIn(TASKS[name].answer, block_size), exam, 100)['right'] == 1


@pytest.mark.parametrize('name, size', [('addition', 1), ('traffic', 2), ('minimax', 1)])
def test_each_question_is_asked_once_and_never_behind_itself(name, size, in_tmp):
    folder = prepare(name, size=size, problems=3000)
    task = TASKS[name]
    found = set(all_problems(folder, 'val'))
    assert len(found) < 20
    model = StandIn(task.answer)
    perfect = answers.summary(model, exam_of_data(folder), 1000)
    assert perfect['right'] == 1 and perfect['problems'] == len(found)
    texts = [bytes(token if token < 256 else 0 for token in prompt).decode().split('\0')[1:]
             for prompt in model.prompts]
    assert {question + task.answer(question) for *_, question in texts} == found
    for *before, question in texts:
        assert not any(problem.startswith(question) for problem in before)
        assert len(set(before)) == len(before) == min(answers.EXAMPLES, len(found) - 1)
        assert set(before) < found


def test_a_prompt_does_not_stand_behind_its_own_answer(in_tmp):
    folder = prepare('addition', size=1, problems=1000)
    exam = exam_of_data(folder)
    for question, answer in exam['problems']:
        for asked in (question, question + answer):
            tokens = answers.behind_solved([256, *asked.encode()], exam, 128)
            *before, last = bytes(token if token < 256 else 0 for token in tokens).split(b'\0')[1:]
            assert last == asked.encode()
            assert len(before) == 2
            assert not any(problem.startswith(question.encode()) for problem in before)


@pytest.mark.parametrize('few', [1, 2])
def test_a_validation_set_of_one_or_two_problems(few, in_tmp, capsys, monkeypatch):
    found = {}
    for question, _ in exam_of_data(prepare('addition'))['problems'][:few + 40]:
        found[question + TASKS['addition'].answer(question)] = len(found) < few
    monkeypatch.setattr(prepare_data, 'position', lambda text: 0.9 * (not found[text.decode()]))
    texts = [text.encode() for text in found for _ in range(1 + 9 * found[text])]
    prepare_data.write_dataset('data/addition', texts, get_tokenizer('byte'), 0.1,
                               'addition --size=4 --problems=400 --seed=1337')
    train.main([*TINY, '--block_size=32', '--data_dir=data/addition'])
    assert f'0 of {few} answers right (it has no more questions that differ)' in (
        capsys.readouterr().out)
    evaluate.main(['out', '--device=cpu'])
    told = capsys.readouterr().out
    assert f'right answers to {few} problems' in told and 'no more that differ' in told


def test_right_answers_are_counted_by_difficulty(in_tmp):
    folder = prepare('addition', problems=2000)
    task = TASKS['addition']

    def without_long_carries(question):
        return task.answer(question) if task.difficulty(question) < 2 else '0'
    result = answers.summary(StandIn(without_long_carries), exam_of_data(folder), 1000)
    carries = {row['longest carry']: row['right'] for row in result['by_difficulty']}
    assert carries == {0: 1, 1: 1, 2: 0, 3: 0, 4: 0}
    easy = sum(row['problems'] for row in result['by_difficulty'] if row['right'])
    assert result['right'] == easy / result['problems']


def test_passes_are_counted(in_tmp):
    """The stand-in takes i passes for digit i of five."""
    exam = exam_of_data(prepare('addition'))
    result = answers.summary(StandIn(TASKS['addition'].answer), exam, 1000)
    assert result['passes'] == 3

    # what is not written any more takes no pass, and is not counted: '0' takes 1, the end 2
    assert answers.summary(StandIn(lambda question: '0'), exam, 1000)['passes'] == 1.5

    # the mean is one over characters, not over answers
    def some(question):
        return TASKS['addition'].answer(question) if question[0] < '3' else '0'
    whole = sum(question[0] < '3' for question, _ in exam['problems'])
    short = len(exam['problems']) - whole
    assert answers.summary(StandIn(some), exam, 1000)['passes'] == pytest.approx(
        (15 * whole + 3 * short) / (5 * whole + 2 * short))


def test_evaluate_prints_one_table_for_several_numbers_of_passes(in_tmp, capsys):
    """Each line is the model of so many passes."""
    folder = prepare('addition')
    save('out', make(**SMALL, ponder='loop', ponder_steps=3), data_dir=folder)
    capsys.readouterr()
    evaluate.main(['out', '--answers=20', '--ponder_steps=0,3,6', '--device=cpu'])
    out = capsys.readouterr().out
    assert out.startswith('addition: right answers to 20 problems, all and by longest carry')
    rows = cells(out)
    assert rows[0][:4] == ['ponder_steps', 'passes', 'right', '0']
    assert [row[:3] for row in rows[1:]] == [
        ['0', '1.00', '0.0%'], ['3', '4.00', '0.0%'], ['6', '7.00', '0.0%']]


def test_what_is_read_by_iteration_is_asked_token_by_token_too(in_tmp, monkeypatch):
    save('out', make(**SMALL, ponder='latent', ponder_steps=1), data_dir=prepare('addition'))
    asked, summary = [], evaluate.summary
    monkeypatch.setattr(evaluate, 'summary',
                        lambda *args: asked.append(args[2:]) or summary(*args))
    evaluate.main(['out', '--answers=20', '--exact=True', '--device=cpu'])
    assert asked == [(20, True)]


def test_where_tokens_halt_the_threshold_varies(in_tmp, capsys):
    folder = prepare('addition')
    save('out', make(**SMALL, ponder='loop', halting='exit'), data_dir=folder)
    evaluate.main(['out', '--halt_tau=1,0', '--answers=20', '--device=cpu'])
    rows = cells(capsys.readouterr().out)
    assert rows[0][0] == 'halt_tau'
    assert [row[:2] for row in rows[1:3]] == [['1', '1.00'], ['0', '4.00']]
    assert rows[3] == ['halt_tau', '0', '1', '2']               # passes by difficulty
    assert [row[:2] for row in rows[4:6]] == [['1', '1.00'], ['0', '4.00']]

    evaluate.main(['out', '--halt_tau=1,0', '--tokens=300', '--device=cpu'])     # as a text
    header, *rows = cells(capsys.readouterr().out.partition('\n')[2])
    assert header[-1] == 'passes per token'
    assert [row[-1] for row in rows] == ['1.00', '4.00']


def test_the_answers_that_are_counted_are_told_when_it_is_stopped(in_tmp, monkeypatch, capsys):
    save('out', make(**SMALL, ponder='loop', ponder_steps=1), data_dir=prepare('addition'))
    summary = evaluate.summary

    def stopped(model, *args):
        if model.config.ponder_steps == 1:
            raise KeyboardInterrupt
        return summary(model, *args)

    monkeypatch.setattr(evaluate, 'summary', stopped)
    with pytest.raises(KeyboardInterrupt):
        evaluate.main(['out', '--ponder_steps=0,1,2', '--answers=20', '--device=cpu'])
    assert [row[0] for row in cells(capsys.readouterr().out)] == ['ponder_steps', '0']


# -------------------------------------------------------------------------------------------------
# A run knows what it was trained on

TINY = ['--n_layer=1', '--n_head=2', '--n_embd=16', '--mlp_hidden=16', '--block_size=64',
        '--batch_tokens=128', '--micro_batch=2', '--max_steps=1', '--eval_tokens=64',
        '--sample_tokens=0', '--device=cpu', '--dtype=float32', '--out_dir=out']
QUESTION = '--start=1999+8001='


def say(capsys, program, *args):
    """What a program says about the checkpoint in `out`, without times."""
    program.main([*args, '--device=cpu'])
    said = capsys.readouterr()
    return said.out, re.sub(r'\d+ tokens in .*', '', said.err)


@pytest.fixture
def sums(in_tmp, capsys):
    """A checkpoint of sums, and what each program says of it."""
    train.main([*TINY, '--data_dir=' + prepare('addition')])
    out = os.path.abspath('out')
    asked = [
        (sample, out, QUESTION, '--temperature=0', '--max_new_tokens=9'),
        (explain, out, QUESTION),
        (explain, out),
        (evaluate, out, '--answers=30'),
        (evaluate, out),
    ]
    capsys.readouterr()
    return {question: say(capsys, *question) for question in asked}


CHANGES = {     # one after the other
    'no data': lambda: shutil.rmtree('data'),
    'other sums': lambda: prepare('addition', size=5),
    'another task': lambda: prepare('minimax', name='addition'),
    'texts': lambda: prepare_data.write_dataset(
        'data/addition', [b'text %d' % i for i in range(90)], get_tokenizer('byte'), 0.2, 'texts'),
    'another folder': lambda: (os.mkdir('else'), os.chdir('else')),
}


def test_a_run_can_be_asked_wherever_its_data_is(sums, capsys):
    for name, change in CHANGES.items():
        change()
        capsys.readouterr()
        for question, said in sums.items():
            assert say(capsys, *question) == said, name
    [(prompt, *_), *_] = sums.values()
    assert prompt.startswith('1999+8001=')


def forget(*names):
    """Leave the checkpoint as a version that kept less."""
    state = torch.load('out/ckpt.pt', weights_only=True)
    torch.save({name: value for name, value in state.items() if name not in names}, 'out/ckpt.pt')


def test_older_runs_are_asked_with_their_data_or_say_so(sums, capsys):
    forget('exam', 'val_data', 'tokenizer_id')
    for question, said in sums.items():
        assert say(capsys, *question) == said
    for change, words in ((lambda: prepare('addition', size=5), 'another in its place'),
                          (lambda: shutil.rmtree('data'), 'no data set')):
        change()
        capsys.readouterr()
        _, err = say(capsys, sample, 'out', QUESTION, '--max_new_tokens=3')
        assert err.startswith('warning: read as a text') and words in err
        for args in (['out'], ['out', '--answers=30']):
            with pytest.raises(UserError, match=words):
                evaluate.main(args)


def test_more_problems_than_a_run_keeps_are_in_its_data(sums, capsys, monkeypatch):
    monkeypatch.setattr(trained, 'KEPT', 20)
    assert 'to 30 problems' in say(capsys, evaluate, 'out', '--answers=30')[0]
    prepare('addition', size=5)
    with pytest.raises(UserError, match='data/addition is not the data'):
        evaluate.main(['out', '--answers=30'])


def test_an_evaluation_on_what_took_the_datas_place_says_so(sums, capsys):
    again = ['--init_from=resume', '--eval_only=True', '--out_dir=out']
    train.main(again)
    assert 'warning' not in capsys.readouterr().err
    other = prepare('addition', name='other', seed=2)
    train.main([*again, f'--data_dir={other}'])     # asked for: the line says on which data
    assert 'warning' not in capsys.readouterr().err
    prepare('addition', size=5)
    train.main(again)
    assert 'data/addition is not what this model read before' in capsys.readouterr().err


def test_only_tasks_have_answers(small_data, in_tmp):
    save('model', make(**SMALL), data_dir=str(small_data))
    with pytest.raises(UserError, match='needs a made task: name its folder'):
        evaluate.main(['model', '--answers=50'])
    save('sums', make(**SMALL), data_dir=prepare('addition'))
    with pytest.raises(UserError, match="ponder='none'"):
        evaluate.main(['sums', '--answers=50', '--ponder_steps=1'])
