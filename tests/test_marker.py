"""
The marker believes numbers, not words: files that are right, that are not, and that pretend. What
starts a process for each file takes seconds; more of it runs with --slow.
"""
import json
import os
import runpy
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, program

FOLDER = os.path.join(ROOT, 'exercises')
sys.path.insert(0, FOLDER)
import attempt
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


SLEEPS = 'import time\nopen("begun", "w")\nwhile True:\n    time.sleep(1)\n'


def test_a_file_that_leaves_or_hangs_is_not_right(tmp_path):
    mark = marked(tmp_path, 'rope', SLEEPS, seconds=0.2)
    assert mark.points == 0 and mark.words.startswith('no result after 0.2 s')
    assert mark.seconds < 30 and not marker.running


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


@pytest.mark.slow
@pytest.mark.skipif(os.name != 'posix', reason='signals')
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_marker_that_is_stopped_leaves_nothing_behind(number, tmp_path):
    work, students = tmp_path / 'work', tmp_path / 'anna'
    work.mkdir()
    students.mkdir()
    for name in ('rope', 'attention'):
        (students / f'{name}.py').write_text(SLEEPS)
    process = subprocess.Popen([sys.executable, os.path.join(FOLDER, 'check.py'), str(students)],
                               env={**os.environ, 'TMPDIR': str(work)}, stderr=subprocess.PIPE)
    for _ in range(300):
        if list(work.glob('*/work/begun')):
            break
        time.sleep(0.1)
    process.send_signal(number)
    assert process.communicate(timeout=20)[1] == b''
    assert process.returncode == 130
    assert not list(work.glob('tmp*'))  # torch may leave a cache of its own


# -------------------------------------------------------------------------------------------------
# what is no file of a student's

ANSWERS_PATH = os.path.join(FOLDER, 'answers.py')
NO_FILE = 'a link, a folder or a device'
UNREADABLE = {  # what: (how to make it, words of the answer)
    'a link to the answers': (lambda path: path.symlink_to(ANSWERS_PATH), NO_FILE),
    'a link to itself': (lambda path: path.symlink_to(path), NO_FILE),
    'a link to nothing': (lambda path: path.symlink_to('nothing'), NO_FILE),
    'a folder': (lambda path: path.mkdir(), NO_FILE),
    'a pipe': (lambda path: os.mkfifo(path), NO_FILE),
    'two megabytes': (lambda path: path.write_text('x = 1\n' * 400_000), 'has 2,400,000 bytes'),
    'UTF-16': (lambda path: path.write_text('x = 1', encoding='utf-16'), 'no text in UTF-8'),
}


@pytest.mark.skipif(os.name != 'posix', reason='links and pipes')
@pytest.mark.parametrize('what', UNREADABLE)
def test_what_is_no_file_of_a_students_is_refused_before_it_runs(what, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, 'Popen', None)
    make, words = UNREADABLE[what]
    make(tmp_path / 'rope.py')
    assert marker.handed_in(tmp_path) == ['rope']
    mark = marker.mark_file(str(tmp_path / 'rope.py'), {'angles()': []}, SEED, 60)
    assert mark.points == 0 and words in mark.words


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
    (['nowhere'], 'there is no such folder'),
    ([os.path.join(FOLDER, 'rope.py')], 'there is no such folder'),
    ([os.path.join(ROOT, 'config', 'task')], 'no exercise in it, .*; there is addition.py, '),
    (['--seconds=0'], 'whole number from 1 to 86400'),
    (['--seconds=99999999999'], 'whole number from 1 to 86400'),
    (['--seed=x'], 'whole number from 0 to'),
    (['--seed=' + 5000 * '9'], 'whole number from 0 to'),
    (['--secs=3'], 'there are --seconds=60'),
])
def test_wrong_options_are_refused(argv, words):
    with pytest.raises(UserError, match=words):
        marker.main(argv)


def test_a_place_for_json_is_tried_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(marker, 'mark_names', None)
    for path in (tmp_path, tmp_path / 'nowhere' / 'marks.json'):
        with pytest.raises(UserError, match='a folder, where|cannot be written'):
            marker.main([f'--json={path}'])


def test_every_folder_has_a_row(tmp_path, monkeypatch, capsys):
    def mark_names(places, seed, seconds):
        part = marker.Part('angles()', True, '')
        return [marker.Mark(os.path.dirname(os.path.join(folder, name)), name, [part])
                for folder, name in places]

    monkeypatch.setattr(marker, 'mark_names', mark_names)
    monkeypatch.chdir(tmp_path)
    for student in ('anna', 'ben', 'c\x1b[31m'):
        os.mkdir(student)
    for student in ('anna', 'c\x1b[31m'):
        open(os.path.join(student, 'rope.py'), 'w').close()
    with pytest.raises(SystemExit):
        marker.main(['anna/', 'ben', 'c\x1b[31m'])
    out, told = capsys.readouterr()
    assert told == 'ben: there is no exercise in it, such as attention.py; there is nothing\n'
    _, anna, ben, c = out.splitlines()
    assert anna.split()[:3] == ['anna', '-', '1/1']
    assert ben.split() == ['ben', *8 * '-']
    assert c.split()[:4] == ['c', '[31m', '-', '1/1']


def test_a_stopped_marker_begins_no_other_file(monkeypatch):
    begun = []

    def mark_file(*args):
        begun.append(args)
        time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(marker, 'right_numbers', lambda name, seed: {})
    monkeypatch.setattr(marker, 'mark_file', mark_file)
    with pytest.raises(KeyboardInterrupt):
        marker.mark_names([('anna', 'rope')] * 100, SEED, 60)
    assert len(begun) < 100


def test_a_students_process_finds_torch_where_the_marker_does():
    environment = marker.environment('work')
    assert set(filter(None, sys.path)) <= set(environment['PYTHONPATH'].split(os.pathsep))
    assert environment['PYTHONUTF8'] == '1'  # print('→') is no error


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
