"""
Each exercise accepts the library as its solution, and answers typical mistakes in words, never
with a traceback.
"""
import functools
import math
import os
import re
import sys

import pytest
import torch
from conftest import ROOT, program
from students import MISTAKES, SOLUTIONS, CatCache, Frozen, attention, sub
from variants import NEAR, UNUSUAL

FOLDER = os.path.join(ROOT, 'exercises')
sys.path.insert(0, FOLDER)
import borrowed
import check
import marker

STUB = re.compile(r'    raise NotImplementedError\(.*?"\)', re.S)  # what a student writes over


def path_of(name):
    return os.path.join(FOLDER, name + '.py')


def read(path):
    with open(path, encoding='utf-8') as f:
        return f.read()


def load(name):
    """A fresh copy of an exercise, as a module."""
    return check.load(path_of(name))


def grade(name, written):
    """The verdict on an exercise in which the student wrote this, and the rest is right."""
    exercise = load(name)
    check.install(exercise, {**SOLUTIONS[name], **written})
    right, words = check.verdict(exercise)
    assert isinstance(words, str) and words
    assert '\n' not in words and 'Traceback' not in words
    return right, words


def verdict_on_file(path):
    return check.verdict(check.load(str(path)))


# -------------------------------------------------------------------------------------------------
# right and wrong solutions

def some_of(table, every):
    """Every so manyth row in each run of the tests, the others with --slow."""
    return [row if i % every == 0 else pytest.param(*row, marks=pytest.mark.slow)
            for i, row in enumerate(table)]


@pytest.mark.parametrize('name', check.NAMES)
def test_the_library_is_a_solution(name):
    right, said = grade(name, {})
    assert right, said


@pytest.mark.parametrize('name, function, written, words', some_of(MISTAKES, every=2))
def test_a_typical_mistake_gets_its_sentence(name, function, written, words):
    right, said = grade(name, {function: written})
    assert not right and re.search(words, said), said


def test_every_exercise_has_a_mistake_table():
    for name in check.NAMES:
        assert sum(name == mistake[0] for mistake in MISTAKES) >= 3, name


with open(os.path.join(FOLDER, 'answers.py'), encoding='utf-8') as f:
    ANSWERS = f.read()


def with_source(name, source, folder):
    """An exercise with what answers.py with this source has for it."""
    path = folder / 'answers.py'
    path.write_text(source, encoding='utf-8')
    exercise = load(name)
    check.install(exercise, check.load(str(path)).ANSWERS[name])
    return exercise


@pytest.mark.parametrize('name, right_text, written, words', some_of(NEAR, every=3))
def test_one_slip_in_the_right_answer_is_refused(name, right_text, written, words, tmp_path):
    assert right_text in ANSWERS
    exercise = with_source(name, ANSWERS.replace(right_text, written), tmp_path)
    right, said = check.verdict(exercise)
    assert right == (words is None), said
    if not right:
        assert re.search(words, said), said


@pytest.mark.parametrize('name, written', some_of(UNUSUAL, every=3))
def test_an_unusual_right_answer_is_accepted(name, written, tmp_path):
    """By the check, and by the numbers that the marker compares."""
    table = ANSWERS.index('ANSWERS = ')
    imports = 'import torch.nn.functional as F\n\n'
    source = ANSWERS[:table] + imports + written + '\n\n' + ANSWERS[table:]
    exercise = with_source(name, source, tmp_path)
    numbers = right_numbers(name)
    for part, function in exercise.PARTS.items():
        outcome = check.judge(function, exercise.__file__, seed=3)
        assert outcome.right and marker.agree(outcome.notes, numbers[part]), (part, outcome.words)


@functools.cache
def right_numbers(name):
    return marker.right_numbers(name, seed=3)


@pytest.mark.parametrize('name', check.NAMES)
def test_enough_is_refused_and_accepted(name):
    assert sum(name == near[0] for near in NEAR) >= 10
    assert sum(name == unusual[0] for unusual in UNUSUAL) >= 3


FUNCTIONS = [
    (name, function)
    for name in check.NAMES
    for function, code in SOLUTIONS[name].items()
    if not isinstance(code, type)
]
METHODS = [
    ('kv_cache', 'Cache', CatCache, 'update'),
    ('kv_cache', 'Cache', CatCache, 'mask'),
    ('halting', 'Frozen', Frozen, 'update'),
]


@pytest.mark.parametrize('name, function', some_of(FUNCTIONS, every=3))
def test_anything_a_function_returns_is_answered_in_one_line(name, function):
    for wrong in broken(SOLUTIONS[name][function]):
        refused_in_one_line(name, {function: wrong})


@pytest.mark.parametrize('name, cls, base, method', METHODS)
def test_anything_a_method_returns_is_answered_in_one_line(name, cls, base, method):
    for wrong in broken(getattr(base, method)):
        refused_in_one_line(name, {cls: sub(base, **{method: wrong})})


def refused_in_one_line(name, written):
    """A part refuses the one function that is written: first ask the part that is called so."""
    exercise = load(name)
    check.install(exercise, {**SOLUTIONS[name], **written})
    [function] = written
    parts = sorted(exercise.PARTS, key=lambda part: function not in part)
    outcomes = (check.judge(exercise.PARTS[part], exercise.__file__) for part in parts)
    words = next(outcome.words for outcome in outcomes if not outcome.right)
    assert words and '\n' not in words and 'Traceback' not in words


def broken(right):
    """Functions that return what no answer is, in the ways of a first attempt."""
    for value in (None, 0, (0, 0), [None] * 6, torch.zeros(2, 2)):
        yield lambda *args, value=value: value
    yield lambda *args: squeezed(right(*args))
    yield lambda *args: not_a_number(right(*args))
    yield lambda *args: right(*args[:-1])
    yield lambda *args: exit(0)


def squeezed(x):
    if isinstance(x, torch.Tensor):
        return x[..., :1]
    if isinstance(x, (tuple, list)):
        return [part[..., :1] for part in x]
    return -x


def not_a_number(x):
    if isinstance(x, (torch.Tensor, float, int)):
        return x * math.nan
    return [part * math.nan for part in x]


@pytest.mark.parametrize('name', [name for name in check.NAMES if len(SOLUTIONS[name]) > 1])
def test_one_step_after_the_other(name):
    """With the first function written, the sentence is about the second."""
    exercise = load(name)
    functions = list(SOLUTIONS[name])
    for function, following in zip(functions, functions[1:]):
        setattr(exercise, function, SOLUTIONS[name][function])
        right, words = check.verdict(exercise)
        assert not right
        assert re.search(rf'{following}\(\) is still empty', words), words


# -------------------------------------------------------------------------------------------------
# errors in a student's file

ANSWER = {  # what is wrong: (the student's code, words of the answer)
    'an error in a line': (
        '    z = q @ k\n    return z',
        r"line \d+, `z = q @ k`, stops with RuntimeError: .*Shapes do not fit"),
    'a name that is not there': (
        '    return softmax(q)',
        r"line \d+, `return softmax\(q\)`, stops with NameError: .*missing import"),
    'nothing returned': (
        '    y = q',
        r'returned None: does its last line say `return`\?'),
    'float64 in between': (
        '    return q @ torch.ones(16, 16, dtype=torch.float64)',
        'Make new tensors with dtype=x.dtype'),
    'float64 in a batched product': (
        '    return (q @ k.mT).double() @ v',
        'Make new tensors with dtype=x.dtype'),
    'an attribute that is not there': (
        '    return q.size(1).shape',
        'of another type'),
    'leaves': (
        '    exit(0)',
        'SystemExit'),
    'a type that torch cannot take': (
        '    return torch.arange(4).softmax(-1)',
        r"line \d+, .* stops with NotImplementedError: .* not implemented for 'Long'"),
    'asks somebody': (
        '    raise EOFError',
        r'take breakpoint\(\) or input\(\) out'),
    'other arguments': (
        '    return attention(q)',
        'arguments that it takes'),
    'raises what Python raises': (
        '    raise SyntaxError("mine")',
        r'line \d+, .* stops with SyntaxError: mine'),
}


@pytest.mark.parametrize('what', ANSWER)
def test_errors_in_a_students_file_are_explained_with_their_line(what, tmp_path):
    code, words = ANSWER[what]
    source, changed = STUB.subn(lambda match: code, read(path_of('attention')), count=1)
    assert changed
    path = tmp_path / 'attention.py'
    path.write_text(source, encoding='utf-8')
    right, said = verdict_on_file(path)
    assert not right and re.search(words, said), said
    if said.startswith('line'):
        number = int(re.search(r'line (\d+)', said)[1])
        assert source.splitlines()[number - 1] in code.splitlines()


@pytest.mark.parametrize('name', check.NAMES)
def test_every_exercise_knows_the_students_part_of_its_file(name, tmp_path):
    source = read(path_of(name))
    path = tmp_path / f'{name}.py'
    path.write_text(STUB.sub('    x = undefined + 1', source), encoding='utf-8')
    _, said = verdict_on_file(path)
    assert ', `x = undefined + 1`, stops with NameError' in said

    path.write_text(STUB.sub("    return 'text', 0", source), encoding='utf-8')
    _, said = verdict_on_file(path)
    assert not said.startswith('line')  # what is wrong shows only later, in the check


BORROWED = [  # (exercise, what the student writes in place of the first stub, what is named)
    ('attention', '    from engine.attention import attend\n    return attend(q)', 'engine.attent'),
    ('attention', '    return sdpa(q, k, v, is_causal=True)', 'sdpa'),
    ('rope', '    import model\n    return model.rope_table(pos, hd, theta)', 'model'),
    ('rope', '    return rope_table(pos, hd, theta, theta)', 'rope_table'),
    ('kv_cache', '    return KVCache(2, 10).update(layer, k, v)', 'KVCache'),
    ('kv_cache', '    return gpt.generate(k, 1)', 'gpt.generate'),
    ('depth_attention', '    return library(q, k, v, sources)', 'library'),
    ('depth_attention', '    from model import depth_attention as d\n    return d(q, k, v)',
     'model.depth_attention'),
    ('pondering', '    return gpt.hidden(idx)', 'gpt.hidden'),
    ('pondering', '    return walk(gpt, idx, steps)', 'walk'),
    ('jacobi', '    return library_sequential(gpt, x)', 'library_sequential'),
    ('jacobi', '    return gpt.mechanism(gpt, x, None, None)', 'gpt.mechanism'),
    ('halting', '    from model import mixture, Gate\n', 'model.Gate'),
    ('halting', '    return frozen(k, 1), v', 'frozen'),
    ('flops', '    return sum(parts(c, T).values())', 'parts'),
    ('flops', '    import answers\n    return answers.forward_flops(c, T)', 'answers'),
]


@pytest.mark.parametrize('name, code, what', BORROWED)
def test_an_answer_from_the_project_is_named_with_its_line(name, code, what, tmp_path):
    path = tmp_path / f'{name}.py'
    path.write_text(STUB.sub(lambda match: code, read(path_of(name)), count=1), encoding='utf-8')
    right, said = verdict_on_file(path)
    assert not right
    assert re.match(rf'line \d+ uses {what}', said), said


@pytest.mark.parametrize('name', check.NAMES)
def test_an_empty_exercise_borrows_nothing(name):
    given = getattr(load(name), 'GIVEN', ())
    assert borrowed.borrowed(path_of(name), given) is None


OUTSIDE = [  # what looks into the program around it, and what is named
    ('import gc', 'gc'),
    ('import os.path as path', 'os.path'),
    ('from torch import sys', 'sys'),
    ('import torch.utils._pytree', '_pytree'),
    ('from . import other', '.'),
    ('x = torch.sys.modules', 'sys'),
    ('try:\n    1 / 0\nexcept ValueError as error:\n    x = error.tb_frame', 'tb_frame'),
    ('x = torch.relu.__globals__', '__globals__'),
    ('x = F._other', '_other'),
    ('x = __builtins__', '__builtins__'),
    ('exec("import gc")', 'exec'),
    ('torch.save(1, "x")', 'save'),
    ('match q:\n    case object(__globals__=found):\n        pass', '__globals__'),
    ('from torch.nn.functional import scaled_dot_product_attention as f', 'scaled_dot_product'),
    ('x = torch.ops.aten.scaled_dot_product_attention(q)', 'torch.ops.aten.scaled_dot_product'),
    ('g = gpt\ng.generate(1)', 'g.generate'),
    ('import operator', 'operator'),
    ('import torch\ntorch.multiprocessing.get_context("spawn")', 'multiprocessing'),
    ('import typing\ntyping.get_type_hints(f)', 'get_type_hints'),
]


@pytest.mark.parametrize('code, what', OUTSIDE)
def test_what_leads_out_of_an_exercise_is_named_with_its_line(code, what, tmp_path):
    path = tmp_path / 'rope.py'
    path.write_text(code, encoding='utf-8')
    assert re.match(rf'line \d uses {re.escape(what)}', borrowed.borrowed(str(path)))


@pytest.mark.parametrize('code', [
    'import numpy as np', 'from collections import deque', 'import torch.nn.functional as F',
    'class A:\n    def __init__(self):\n        super().__init__()\n        self._k = 1',
    'def f(cache):\n    cache._k = 1\n    return cache._k',
    'class A:\n    hidden = 1\n    def f(self):\n        return self.hidden',
    'if __name__ == "__main__":\n    print(torch.__version__)', 'import json, pprint, time',
])
def test_ordinary_code_stays_inside(code, tmp_path):
    path = tmp_path / 'rope.py'
    path.write_text(code, encoding='utf-8')
    assert borrowed.borrowed(str(path)) is None


def test_what_is_nested_too_deeply_to_be_read_is_not_run(tmp_path):
    path = tmp_path / 'rope.py'
    path.write_text('import sys\nx = 1' + ' + 1' * 5000, encoding='utf-8')
    assert 'nested too deeply' in borrowed.borrowed(str(path))


@pytest.mark.parametrize('name', check.NAMES)
def test_a_lost_line_above_the_check_is_named(name, tmp_path):
    path = tmp_path / f'{name}.py'
    path.write_text(read(path_of(name)).replace('\n# the check', '\n#the check'), encoding='utf-8')
    assert borrowed.borrowed(str(path)).startswith('the line `# the check` is gone')


@pytest.mark.parametrize('before', [
    b'\xef\xbb\xbf', b'# \xe4\n', b'# -*- coding: latin-1 -*-\n#\xe4\n',
])
def test_text_of_any_editor_is_read(before, tmp_path):
    path = tmp_path / 'rope.py'
    path.write_bytes(before + b'x = 1\r\n# the check\r\ny = 2\r\n')
    found = {}
    exec(borrowed.students_part(str(path)), found)
    assert found['x'] == 1 and 'y' not in found


def test_an_exception_of_any_kind_is_a_verdict():
    class Own(BaseException):
        pass

    class Silent(Exception):
        def __str__(self):
            exit()

    def raises(error):
        def rotate(*args):
            raise error
        return rotate

    right, said = grade('rope', {'rotate': raises(Own('mine'))})
    assert not right and 'Own: mine' in said
    right, said = grade('rope', {'rotate': raises(Silent())})
    assert not right and said.endswith(' Silent.')


def test_a_function_without_a_name_is_one():
    right, said = grade('rope', {'rotate': functools.partial(SOLUTIONS['rope']['rotate'])})
    assert right, said


def test_complex_numbers_are_not_taken_for_their_real_part():
    ones = torch.ones(2)
    with pytest.raises(check.NotYet, match='holds complex numbers'):
        check.compare('x', ones + 1j, ones, ('pair',))


def test_an_error_in_the_check_names_no_line(tmp_path):
    """What a student's code returned may make the check stumble: its lines mean nothing to them."""
    source = read(path_of('attention')).replace('    y = call(attention', '    undefined(attention')
    path = tmp_path / 'attention.py'
    path.write_text(source, encoding='utf-8')
    right, said = verdict_on_file(path)
    assert not right
    assert said.startswith('what your code returns cannot be used: NameError')


# -------------------------------------------------------------------------------------------------
# the programs

def test_an_exercise_is_a_program(tmp_path):
    stub = program(path_of('rope'), cwd=tmp_path, ok=False, PYTHONPATH='')
    assert stub.returncode == 1 and not stub.stderr
    assert stub.stdout.startswith('not yet: angles() is still empty')
    assert 'rope.py --hint gives a hint' in stub.stdout


def test_help_is_the_text_at_the_top(capsys):
    check.main(['--help'], load('rope'))
    marker.main(['-h'])
    out = capsys.readouterr().out
    assert out.startswith('Exercise 2 of 8: rotary positions')
    assert '\nChecks exercises' in out


def test_status_is_0_for_a_right_answer(monkeypatch, capsys):
    exercise = load('attention')
    monkeypatch.setattr(exercise, 'attention', attention)
    with pytest.raises(SystemExit) as left:
        check.main([], exercise)
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith('right. ')


@pytest.mark.parametrize('name', check.NAMES)
def test_hints_come_one_by_one(name, capsys):
    exercise = load(name)
    assert len(exercise.HINTS) == 3
    for option, n in (('--hint', 1), ('--hint=2', 2), ('--hint=3', 3)):
        check.main([option], exercise)
        assert capsys.readouterr().out.count(' of 3: ') == n
    for option in ('--hint=0', '--hint=4', '--hints', 'hint'):
        with pytest.raises(check.UserError):
            check.main([option], exercise)


# -------------------------------------------------------------------------------------------------
# what the exercises say is true

def test_the_losses_quoted_are_those_of_the_course():
    page = read(os.path.join(FOLDER, 'README.md'))
    flops = load('flops')
    check.install(flops, SOLUTIONS['flops'])
    words = flops.conclusion()
    losses = re.findall(r'\d\.\d{3}', words)
    assert len(losses) == 3
    for loss in losses:
        assert loss in page, f'{loss} stands in flops.py and no longer in exercises/README.md'


def test_the_loop_of_the_halting_exercise_is_what_the_model_does(idx):
    """Its reference is written from the equations; here it meets halting='gate'."""
    exercise = load('halting')
    gpt = check.tiny(ponder='embedding', ponder_steps=3, n_layer=3, halting='gate', halt_tau=0.5)
    torch.manual_seed(3)
    for gate in gpt.mechanism.gates:
        gate[-1].weight.data.normal_()
        gate[-1].bias.data.fill_(1)
    idx = idx[:, :8] % 30
    with torch.no_grad():
        x, pos = gpt.embed(idx), torch.arange(8)
        readout, passes = exercise.one_by_one(gpt, gpt.mechanism.gates, x, pos, 0.5)
        assert torch.allclose(gpt.hidden(idx), readout, atol=1e-4)
        assert len(passes.unique()) > 1
        assert torch.equal(gpt.mechanism.passes, passes)
