"""
The autograder for Gradescope: what is in the zip, what results.json says; with --slow its own
script marks a submission with one file of each kind.
"""
import json
import os
import subprocess
import sys
import zipfile

import pytest
from conftest import program
from test_marker import FOLDER, solution

import for_pytest
import gradescope
import marker
from check import UserError


def written(folder, *options):
    path = folder / 'autograder.zip'
    gradescope.main([f'--out={path}', *options])
    return zipfile.ZipFile(path)


def test_the_zip_holds_what_the_marker_needs(tmp_path, capsys):
    with written(tmp_path, '--exercises=attention,flops', '--seed=3', '--seconds=9') as archive:
        names = set(archive.namelist())
        run = archive.read('run_autograder').decode()
        for program_name in ('setup.sh', 'run_autograder'):
            assert archive.getinfo(program_name).external_attr >> 16 == 0o755
    assert {'setup.sh', 'run_autograder', 'model.py', 'requirements.txt', 'engine/memory.py',
            'exercises/attempt.py', 'exercises/answers.py', 'exercises/borrowed.py'} < names
    assert '--mark=attention,flops --seconds=9 --seed=3' in run
    assert capsys.readouterr().out.endswith('2 exercises, 6 points\n')


def test_results_have_a_test_for_each_part(tmp_path, monkeypatch):
    def mark_names(places, seed, seconds):
        parts = [marker.Part('angles()', True, ''), marker.Part('rotate()', False, 'no')]
        return [marker.Mark(folder, name, parts, 'no', 2.5) for folder, name in places]

    monkeypatch.setattr(marker, 'mark_names', mark_names)
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'submission').mkdir()
    (tmp_path / 'submission' / 'rope.py').write_text('')
    gradescope.main(['--mark=rope,flops', '--seed=3'])
    with open('results/results.json') as f:
        results = json.load(f)
    angles, rotate, flops = results['tests']
    assert results['execution_time'] == 2.5
    assert (angles['score'], angles['max_score'], angles['status']) == (1, 1, 'passed')
    assert (rotate['score'], rotate['status'], rotate['output']) == (0, 'failed', 'not yet: no')
    assert (flops['name'], flops['score'], flops['max_score']) == ('flops', 0, 3)
    assert flops['output'] == 'flops.py is not at the top of the submission'


@pytest.mark.parametrize('word', ['--exercises=ropes', '--seed=x', '--zip=1', 'rope'])
def test_wrong_options_are_refused(word):
    with pytest.raises(UserError):
        gradescope.main([word])


def test_the_pytest_for_a_class_asks_the_marker(monkeypatch):
    def mark_names(places, seed, seconds):
        part = marker.Part('angles()', places == [(for_pytest.FOLDER, 'rope')], '')
        return [marker.Mark('x', 'rope', [part], 'no')]

    monkeypatch.setattr(marker, 'mark_names', mark_names)
    for_pytest.test_exercise('rope')
    with pytest.raises(AssertionError):
        for_pytest.test_exercise('flops')


SUBMISSION = {
    'attention': solution('attention'),
    'rope': open(os.path.join(FOLDER, 'rope.py'), encoding='utf-8').read(),
    'kv_cache': 'import time\nwhile True:\n    time.sleep(1)\n',
    'pondering': 'import gc\n',
    'flops': 'def f(:\n',
}
OUTPUT = {
    'attention': 'right',
    'rope': 'still empty',
    'kv_cache': 'no result after 40 s',
    'pondering': 'line 1 uses gc',
    'flops': 'line 1 is not Python',
}


@pytest.mark.slow
def test_the_autograder_marks_a_submission(tmp_path):
    names = ','.join(SUBMISSION)
    with written(tmp_path, f'--exercises={names}', '--seconds=40') as archive:
        archive.extractall(tmp_path / 'source')
    (tmp_path / 'submission').mkdir()
    for name, source in SUBMISSION.items():
        (tmp_path / 'submission' / f'{name}.py').write_text(source)
    (tmp_path / 'venv' / 'bin').mkdir(parents=True)     # as setup.sh makes it
    interpreter = tmp_path / 'venv' / 'bin' / 'python'
    interpreter.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    interpreter.chmod(0o755)
    environment = {**os.environ, 'AUTOGRADER': str(tmp_path)}
    subprocess.run(['bash', tmp_path / 'source' / 'run_autograder'], env=environment, check=True)
    with open(tmp_path / 'results' / 'results.json') as f:
        tests = json.load(f)['tests']
    assert len(tests) == 3 + 3 + 4 + 2 + 3
    for test in tests:
        name = test['name'].partition(':')[0]
        assert OUTPUT[name] in test['output']
        assert test['score'] == int(name == 'attention')


@pytest.mark.slow
def test_pytest_marks_a_folder(tmp_path):
    (tmp_path / 'rope.py').write_text(solution('rope'))
    (tmp_path / 'flops.py').write_text('def f(:\n')
    done = program('-m', 'pytest', '-n', '0', '-p', 'no:cacheprovider',
                   os.path.join(FOLDER, 'for_pytest.py'), ok=False, STUDENTS=str(tmp_path))
    assert '1 failed, 1 passed' in done.stdout
    assert 'line 1 is not Python' in done.stdout
