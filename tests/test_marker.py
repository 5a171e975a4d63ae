"""
The marker believes numbers, not words: files that are right, that are not, and that pretend. Each
process takes seconds; more of it runs with --slow.
"""
import json
import os

import pytest
from conftest import cells, program, slow_but
from test_exercises import ANSWERS, FOLDER

import check
import marker
from engine.files import UserError


def solution(name):
    """A right file, without the check below it."""
    given = {'halting': 'Embedding', 'jacobi': 'Memory'}    # what else is refused
    line = f'from model import {given[name]}\n' if name in given else ''
    return ANSWERS.replace('from model import Embedding, Memory\n', line)


PRETENDS = '''
import torch

print('right')
with open('results', 'a') as f:
    f.write('["rotate()", {"right": true, "words": "", "notes": []}]')


def yes(*args, **options):
    return True


torch.allclose = torch.equal = yes


def angles(pos, hd, theta):
    return pos[:, None] * theta ** (-torch.arange(0, hd, 2) / hd)


def rotate(x, pos, theta):
    return x * 2
'''


AT_HOME = {  # what a file does above a right answer, and whether that costs its mark (None: either)
    'files are removed': ('for f in os.listdir("."): os.remove(f)', False),
    'the folder is removed': ('shutil.rmtree(os.getcwd())', False),
    'all around is removed': ('shutil.rmtree("..")', None),
    'the project is removed': (
        'import check; shutil.rmtree(os.path.dirname(check.__file__))', None),
    'folders in the way': ('for f in ("output", "results"): os.makedirs(f)', False),
    'pipes': ('for f in ("output", "results"): os.mkfifo(f)', False),
    'a folder that nobody may read': ('os.mkdir("x"); os.chmod("x", 0); os.chmod(".", 0)', False),
    'folders in folders': ('for i in range(1500): os.mkdir("a"); os.chdir("a")', None),
    'its process': ('os.kill(os.getpid(), 9)', True),
    'its parent': ('os.kill(os.getppid(), 9)', None),   # it may be done before it is ended
    'its group': ('os.killpg(0, 9)', True),
    'its outputs are closed': ('os.closerange(0, 99)', True),
    'nothing that is JSON': ('[os.write(f, b"[" * 99999 + b"\\n") for f in range(1, 20)]', None),
    'notes that are no numbers': (
        """[os.write(f, b'["angles()", {"right": true, "notes": 5}]\\n') for f in range(3, 20)]""",
        None),
}


def hand_in(folder, **files):
    """Each student's rope.py, in a folder of the student's name."""
    for student, source in files.items():
        (folder / student).mkdir()
        (folder / student / 'rope.py').write_text(source)


def at_home(name):
    """A right answer, and above it what AT_HOME says."""
    doing, _ = AT_HOME[name]
    above = f'import contextlib, os, shutil\nwith contextlib.suppress(OSError):\n    {doing}\n'
    return above + solution('rope')


def test_a_class_is_one_table(tmp_path, monkeypatch, capsys):
    """Whatever a file does: a row of its own, sentences in the JSON, exit status 1."""
    files = dict(dora=at_home('files are removed'), emil=at_home('its parent'),
                 anna=solution('rope'), ben=PRETENDS, carl='def angles(:')
    hand_in(tmp_path, **files)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        marker.main([*files, '--json=marks.json', '--seed=3'])
    printed = capsys.readouterr()
    assert left.value.code == 1 and not printed.err
    head, *rows = cells(printed.out)
    assert head == ['', *check.NAMES] and [row[0] for row in rows] == [*files]
    points = {student: row[:3] for student, *row in rows}
    points.pop('emil')      # who may have done some of it before his parent was ended
    assert points == {'dora': ['-', '3/3', '-'], 'anna': ['-', '3/3', '-'],
                      'ben': ['-', '1/3', '-'], 'carl': ['-', '0/3', '-']}
    said = json.loads((tmp_path / 'marks.json').read_text())
    _, _, anna, ben, carl = said['marks']
    assert said['seed'] == 3 and anna['right']
    assert ben['words'].startswith('the check let this pass, but the numbers')
    assert ben['output'] == 'right\n'
    assert carl['words'] == 'line 1 is not Python (invalid syntax)'
    assert (tmp_path / 'dora' / 'rope.py').read_text() == files['dora']


@pytest.mark.slow
@pytest.mark.parametrize('name', AT_HOME)
def test_what_a_file_does_costs_its_own_mark(name, tmp_path):
    """The others of the class are marked, and their files, the table and the JSON are there."""
    _, costs = AT_HOME[name]
    files = {'anna': at_home(name), 'ben': solution('rope')}
    hand_in(tmp_path, **files)
    done = program(os.path.join(FOLDER, 'check.py'), *files, '--json=marks.json', cwd=tmp_path,
                   ok=False, PYTHONPATH='')
    assert done.returncode in (0, 1) and not done.stderr
    anna, ben = json.loads((tmp_path / 'marks.json').read_text())['marks']
    assert ben['right'] and cells(done.stdout)[2][:3] == ['ben', '-', '3/3']
    assert costs is None or anna['right'] != costs, anna
    assert (tmp_path / 'anna' / 'rope.py').exists() and os.path.exists(marker.__file__)


def test_a_file_that_cannot_be_read_costs_its_own_mark(tmp_path):
    (tmp_path / 'rope.py').mkdir()
    mark = marker.mark_file(str(tmp_path / 'rope.py'), {'angles()': []}, 7, seconds=60)
    assert mark.words == 'the file cannot be read (Is a directory)'


def test_ones_own_files_cost_their_own_marks(tmp_path):
    """`python exercises/check.py`, where exercises/ itself holds what the student wrote."""
    marker.copy_project(str(tmp_path))
    exercises = tmp_path / 'exercises'
    for name, above in (('rope', 'def f(:\n'), ('flops', 'exit(0)\n')):
        path = exercises / f'{name}.py'
        path.write_text(above + path.read_text())
    for other in 'kv_cache', 'depth_attention', 'pondering', 'jacobi', 'halting':   # take seconds
        (exercises / f'{other}.py').unlink()
    done = program(exercises / 'check.py', cwd=tmp_path, ok=False, PYTHONPATH='')
    assert done.returncode == 1 and not done.stderr
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines['rope'].startswith('not yet: line 1 is not Python')
    assert 'SystemExit' in lines['flops'] and 'is still empty' in lines['attention']


def test_a_check_that_was_changed_is_named(tmp_path):
    path = tmp_path / 'rope.py'
    with open(os.path.join(FOLDER, 'rope.py'), encoding='utf-8') as f:
        path.write_text(f.read().replace('\n# the check', '\n# my check'))
    with pytest.raises(UserError, match='rope.py: its check does not run .*put back .*the check`'):
        check.load(str(path))


PRETENDING = {  # file: (its source, words of the answer)
    'attention': ('raise KeyboardInterrupt', 'stops with KeyboardInterrupt'),
    'rope': ('exit(0)', 'SystemExit'),
    'kv_cache': ('while True:\n    print("right. " * 99)', 'prints, or writes, without end'),
    'pondering': ('def ponder(gpt, idx, steps):\n    return gpt.hidden(idx)', 'uses gpt.hidden'),
    'jacobi': (solution('jacobi').replace('return T - 1', 'import os; os._exit(0)'),
               'ends the program before its check is done'),
    'halting': ('x = [0] * 10 ** 10', 'MemoryError'),
    'flops': ('x = 1', 'should be defined above the line'),
}


@pytest.mark.parametrize('name', slow_but(['jacobi'], PRETENDING))
def test_what_leaves_or_pretends_is_not_right(name, tmp_path):
    source, words = PRETENDING[name]
    path = tmp_path / f'{name}.py'
    path.write_text(source)
    mark = marker.mark_file(str(path), marker.right_numbers(name, 7), 7, seconds=60)
    assert words in mark.words
    assert mark.points == (3 if name == 'jacobi' else 0)    # its other parts were done before


@pytest.mark.slow
@pytest.mark.parametrize('name', check.NAMES)
def test_right_answers_are_right(name, tmp_path):
    path = tmp_path / f'{name}.py'
    path.write_text(solution(name))
    mark = marker.mark_file(str(path), marker.right_numbers(name, 7), 7, seconds=60)
    assert mark.right, mark.words


def test_what_hangs_is_ended(tmp_path):
    path = tmp_path / 'rope.py'
    path.write_text('import time\nwhile True:\n    time.sleep(1)\n')
    mark = marker.mark_file(str(path), {'angles()': []}, 7, seconds=1)
    assert mark.words == 'no result after 1 s: is there a loop that does not end?'


def test_a_part_that_records_no_numbers_is_refused(monkeypatch):
    """An exercise of a teacher's own: whatever its check lets pass would be right."""
    part = {'angles()': check.Outcome(True)}
    monkeypatch.setattr(check, 'solved', lambda *args: part)
    with pytest.raises(UserError, match='rope.py: a part of it records no numbers'):
        marker.right_numbers('rope', 7)


def test_a_folder_without_exercises_is_refused(tmp_path):
    with pytest.raises(UserError, match='no folder with an exercise in it, such as attention.py'):
        marker.main([str(tmp_path)])
    with pytest.raises(UserError, match='bne: no such folder'):     # which is no folder without
        marker.main([FOLDER, 'bne'])


def test_folders_may_end_with_a_slash(tmp_path, monkeypatch, capsys):
    for name in ('anna', 'ben'):
        os.makedirs(tmp_path / name)
        (tmp_path / name / 'rope.py').write_text('')

    def mark_names(places, seed, seconds):
        return [marker.Mark(folder, name, [marker.Part('angles()', True, '')])
                for folder, name in places]

    monkeypatch.setattr(marker, 'mark_names', mark_names)
    with pytest.raises(SystemExit):
        marker.main([f'{tmp_path}/anna/', f'{tmp_path}/ben'])
    assert capsys.readouterr().out.count('1/1') == 2


def test_one_folder_gets_sentences(capsys):
    parts = [marker.Part('mix()', True, ''), marker.Part('mix_all()', False, 'no')]
    marker.print_sentences([marker.Mark('x', 'rope', parts[:1]), marker.Mark('x', 'flops', parts)])
    first, second, last = capsys.readouterr().out.splitlines()
    assert first == 'rope             right'
    assert second == 'flops            not yet: no'
    assert last.startswith('1 of 2 right; not in the folder: attention, kv_cache')
