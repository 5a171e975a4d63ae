"""
The marker believes numbers, not words: files that are right, that are not, and that pretend. What
starts a process for each file takes seconds; more of it runs with --slow.
"""
import json
import os
import runpy
import sys

import pytest
import torch
from conftest import ROOT, program

FOLDER = os.path.join(ROOT, 'exercises')
sys.path.insert(0, FOLDER)
import attempt
import borrowed
import check
import marker
from check import UserError
from test_exercises import right_numbers

with open(os.path.join(FOLDER, 'answers.py'), encoding='utf-8') as f:
    ANSWERS = f.read().partition('ANSWERS = ')[0]
SEED = 7


def solution(name):
    """A right file, without the check below it."""
    if name == 'halting':
        return ANSWERS
    return ANSWERS.replace('from model import mixture\n', '')  # only that exercise gives it


def marked(folder, name, source, seconds=60):
    path = folder / f'{name}.py'
    path.write_text(source, encoding='utf-8')
    truth = marker.right_numbers(name, SEED)
    return marker.mark_file(str(path), truth, SEED, seconds)


# -------------------------------------------------------------------------------------------------
# whole files, each in a process

PRETENDS = '''
import torch

line = b'{"part": "rotate()", "right": true, "words": "", "notes": []}'
print('right', line)
for number in range(3, 9):
    try:
        with open(number, 'wb', closefd=False) as file:
            file.write(line + b'\\n')
    except OSError:
        pass


def yes(*args, **options):
    return True


torch.allclose = torch.equal = yes


def angles(pos, hd, theta):
    return pos[:, None] * theta ** (-torch.arange(0, hd, 2) / hd)


def rotate(x, pos, theta):
    return x * 2
'''


def test_right_numbers_count_and_what_is_said_does_not(tmp_path):
    mark = marked(tmp_path, 'rope', PRETENDS)
    assert [part.right for part in mark.parts] == [True, False, False], mark
    assert mark.output.startswith('right b')


@pytest.mark.slow
@pytest.mark.parametrize('name', check.NAMES)
def test_right_answers_are_right(name, tmp_path):
    mark = marked(tmp_path, name, solution(name))
    assert mark.right, mark.words


def test_a_computed_name_leads_nowhere_either():
    for name in ('__globals__', 'gene' + 'rate', 'f_back', 'sys'):
        with pytest.raises(AttributeError, match='leads out'):
            attempt.careful_getattr(torch, name)
    assert attempt.careful_getattr(torch, 'relu') is torch.relu
    assert attempt.careful_getattr(torch, 'rely', 3) == 3


def test_a_file_that_leaves_or_hangs_is_not_right(tmp_path):
    mark = marked(tmp_path, 'rope', 'import time\nwhile True:\n    time.sleep(1)\n', seconds=1)
    assert mark.points == 0 and mark.words.startswith('no result after 1 s')
    assert mark.seconds < 30


PRETENDING = {  # file: (its source, words of the answer)
    'attention': ('raise KeyboardInterrupt', 'stops with KeyboardInterrupt'),
    'rope': ('exit(0)', 'SystemExit'),
    'kv_cache': ('while True:\n    print("right. " * 99)', 'prints, or writes, without end'),
    'depth_attention': ('import check\ncheck.verdict = check.judge = None', 'uses check'),
    'pondering': ('open("/tmp/of_a_student", "w")', 'no changes outside of your folder'),
    'jacobi': ('import numpy\nnumpy.os', 'uses os'),
    'halting': ('x = [0] * 10 ** 10', 'MemoryError'),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', PRETENDING)
def test_what_pretends_is_not_right(name, tmp_path):
    source, words = PRETENDING[name]
    mark = marked(tmp_path, name, source)
    assert mark.points == 0
    assert words.split('.*')[-1] in mark.words, mark.words
    assert not os.path.exists('/tmp/of_a_student')


@pytest.mark.slow
def test_the_part_that_hangs_costs_its_own_point_only(tmp_path):
    source = solution('jacobi').replace('return T - 1', 'while True: pass')
    mark = marked(tmp_path, 'jacobi', source, seconds=40)
    assert [part.right for part in mark.parts] == [True, True, True, False]
    assert 'loop that does not end' in mark.words


@pytest.mark.slow
def test_a_class_is_one_table(tmp_path):
    for student in ('anna', 'ben'):
        (tmp_path / student).mkdir()
    for name in ('rope', 'halting'):
        (tmp_path / 'anna' / f'{name}.py').write_text(solution(name))
    (tmp_path / 'ben' / 'rope.py').write_text('def angles(:')
    done = program(os.path.join(FOLDER, 'check.py'), 'anna', 'ben', '--json=marks.json',
                   '--seed=3', cwd=tmp_path, ok=False, PYTHONPATH='')
    assert done.returncode == 1 and not done.stderr
    head, anna, ben = done.stdout.splitlines()
    assert head.split() == list(check.NAMES)
    assert anna.split() == ['anna', '-', '3/3', '-', '-', '-', '-', '3/3', '-']
    assert ben.split() == ['ben', '-', '0/3', '-', '-', '-', '-', '-', '-']
    with open(tmp_path / 'marks.json') as f:
        said = json.load(f)
    assert said['seed'] == 3
    *_, rope = said['marks']
    assert (rope['exercise'], rope['points'], rope['of'], rope['right']) == ('rope', 0, 3, False)
    assert rope['words'] == 'line 1 is not Python (invalid syntax)'


# -------------------------------------------------------------------------------------------------
# its parts, in this process

NOTES = [[1.0, 2.0], [3.0]]


def line(letters, **changes):
    said = {'part': 'rotate()', 'right': True, 'words': '', 'notes': NOTES, **changes}
    return letters + json.dumps(said) + '\n'


def test_only_lines_behind_the_letters_are_read():
    others = line('') + line('abd') + 'abc{\nabc[1]\n'
    said = marker.outcomes(others + line('abc', words='yes'), 'abc')
    assert list(said) == ['rotate()']
    assert said['rotate()'].right and said['rotate()'].words == 'yes'
    assert not marker.outcomes(line('abc', right='True'), 'abc')['rotate()'].right


@pytest.mark.parametrize('notes', [
    [], [[1.0, 2.0]], [[1.0], [3.0]], [[1.0, 2.5], [3.0]], [['1.0', 2.0], [3.0]], None, 'x', [1, 2],
    [[float('nan'), 2.0], [3.0]],
])
def test_other_numbers_do_not_agree(notes):
    assert not marker.agree(notes, NOTES)


def test_the_same_numbers_agree_up_to_rounding():
    assert marker.agree([[1.00001, 2.0], [3.0]], NOTES)


@pytest.mark.parametrize('name', check.NAMES)
def test_every_seed_draws_other_numbers_and_a_right_answer_stays_right(name):
    first, second = right_numbers(name), marker.right_numbers(name, 2)
    assert list(first) == list(load(name).PARTS)
    assert first != second
    for notes in first.values():
        assert sum(map(len, notes)) > 0  # each part gives numbers to compare


def load(name):
    return check.load(os.path.join(FOLDER, name + '.py'))


def test_a_changed_library_is_named(monkeypatch):
    exercise = load('rope')
    library = exercise.model
    monkeypatch.setattr(library, 'apply_rope', lambda x, cos, sin: x)
    with pytest.raises(UserError, match='refuses a right answer: model.py or engine/'):
        marker.right_numbers('rope', 0)
    assert check.changed(exercise)


def test_an_unchanged_library_is_not_named():
    assert not check.changed(load('rope'))


@pytest.mark.parametrize('event, args, refused', [
    ('open', ('notes.txt', 'w', os.O_WRONLY | os.O_CREAT), False),
    ('open', ('/etc/passwd', 'r', os.O_RDONLY), False),
    ('open', ('/etc/x', 'w', os.O_WRONLY | os.O_CREAT), True),
    ('open', (os.path.join(ROOT, 'model.py'), 'r', os.O_RDONLY), True),
    ('open', (os.path.join(ROOT, '__pycache__', 'model.pyc'), 'r', os.O_RDONLY), True),
    ('os.truncate', (3, 0), False),
    ('os.remove', ('notes.txt', -1), False),
    ('os.remove', ('../notes.txt', -1), True),
    ('socket.connect', (None, ('localhost', 80)), True),
    ('subprocess.Popen', ('ls', [], None, None), True),
    ('import', ('torch', None, None, None, None), False),
])
def test_the_fence(event, args, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fence = attempt.Fence(str(tmp_path))
    if refused:
        with pytest.raises(PermissionError):
            fence(event, args)
    else:
        fence(event, args)


@pytest.mark.parametrize('argv, words', [
    (['nowhere'], 'no such folder'),
    ([os.path.join(ROOT, 'config', 'task')], 'no exercise in it, .*; there is addition.py, '),
    (['--seconds=0'], 'whole number from 1 to 86400'),
    (['--seconds=' + '9' * 20], 'whole number from 1 to 86400'),
    (['--seed=x'], 'whole number from 0 to 2147483647'),
    (['--json=/'], '/: a folder, where a file should be'),
    (['--json=nowhere/marks.json'], 'nowhere/marks.json: cannot be written'),
    (['--secs=3'], 'there are --seconds=60'),
])
def test_wrong_options_are_refused(argv, words):
    with pytest.raises(UserError, match=words):
        marker.main(argv)


def test_a_folder_without_exercises_stops_nobody(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(marker, 'mark_names', lambda places, seed, seconds: places)
    for student in ('anna', 'ben'):
        (tmp_path / student).mkdir()
    (tmp_path / 'anna' / 'Rope.py').write_text('')
    (tmp_path / 'ben' / 'rope.py').write_text('')
    anna, ben = str(tmp_path / 'anna'), str(tmp_path / 'ben')
    assert marker.mark([anna, ben], SEED, 1) == [(ben, 'rope')]
    told = capsys.readouterr().err
    assert told == f'{anna}: there is no exercise in it, such as attention.py; there is Rope.py\n'


@pytest.mark.parametrize('encoding, words', [
    ('utf-16', 'the file is not text in UTF-8: choose that encoding where you save it'),
    ('latin-1', 'the file is not text in UTF-8: choose that encoding where you save it'),
])
def test_a_file_in_another_encoding(tmp_path, encoding, words):
    path = tmp_path / 'rope.py'
    path.write_text('# caf\xe9\n', encoding=encoding)
    mark = marker.mark_file(str(path), {'angles()': []}, SEED, 1)
    assert mark.words == words


def test_the_mark_before_utf8_is_no_mistake(tmp_path):
    path = tmp_path / 'rope.py'
    path.write_text('import model\n\n# the check\n', encoding='utf-8-sig')
    assert borrowed.students_part(path) == 'import model\n\n'
    assert borrowed.borrowed(path).startswith('line 1 uses model')


def test_a_file_with_zeros_is_not_python():
    with pytest.raises(SyntaxError) as error:
        compile('x = 1\0', 'rope.py', 'exec')
    error.value.lineno = None   # as some versions of Python leave it
    assert check.explain(error.value, 'rope.py').startswith('the file is not Python (')


def test_one_folder_gets_sentences(capsys):
    parts = [marker.Part('mix()', True, ''), marker.Part('mix_all()', False, 'no')]
    rope, flops = marker.Mark('x', 'rope', parts[:1]), marker.Mark('x', 'flops', parts, 'no')
    marker.print_sentences([rope, flops])
    first, second, last = capsys.readouterr().out.splitlines()
    assert first == 'rope             right'
    assert second == 'flops            not yet: no'
    assert last.startswith('1 of 2 right; not in the folder: attention, kv_cache')


def test_what_students_write_cannot_steer_a_terminal():
    assert marker.printable('a\x1b[31mb\nc', keep='\n') == 'a [31mb\nc'


@pytest.mark.parametrize('name', check.NAMES)
def test_alone_in_a_folder_an_exercise_says_where_it_is_checked(name, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'check', None)  # importing it fails
    with pytest.raises(SystemExit) as left:
        runpy.run_path(os.path.join(FOLDER, name + '.py'), run_name='__main__')
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said == "error: run the project's check.py: python exercises/check.py FOLDER\n"
