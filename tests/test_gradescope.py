"""The autograder for Gradescope: what its zip holds is enough to mark a submission."""
import json
import os
import subprocess
import sys
import zipfile

import pytest
from test_marker import solution

import gradescope
from engine.files import UserError


def test_the_autograder_marks_a_submission(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    gradescope.main(['--exercises=flops,jacobi'])
    assert capsys.readouterr().out == 'autograder.zip: 2 exercises, 7 points\n'
    with zipfile.ZipFile(tmp_path / 'autograder.zip') as archive:
        archive.extractall(tmp_path / 'source')
        assert archive.getinfo('setup.sh').external_attr >> 16 == 0o755
    (tmp_path / 'submission').mkdir()
    # flops.py takes more of the project than the other exercises
    (tmp_path / 'submission' / 'flops.py').write_text(solution('flops'))
    (tmp_path / 'venv' / 'bin').mkdir(parents=True)     # as setup.sh makes it
    interpreter = tmp_path / 'venv' / 'bin' / 'python'
    interpreter.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    interpreter.chmod(0o755)
    environment = {**os.environ, 'AUTOGRADER': str(tmp_path), 'PYTHONPATH': ''}
    subprocess.run(['bash', tmp_path / 'source' / 'run_autograder'], env=environment, check=True)

    with open(tmp_path / 'results' / 'results.json') as f:
        tests = json.load(f)['tests']
    assert [test['score'] for test in tests] == [1, 1, 1, 0]
    assert [test['max_score'] for test in tests] == [1, 1, 1, 4]
    assert tests[0]['status'] == 'passed' and tests[3]['status'] == 'failed'
    assert tests[3]['output'] == 'jacobi.py is not at the top of the submission'


def test_help_and_unknown_exercises_write_no_zip(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        gradescope.main(['--help'])
    assert '--exercises=' in capsys.readouterr().out
    with pytest.raises(UserError, match='ropes: the exercises are attention'):
        gradescope.main(['--exercises=ropes'])
    with pytest.raises(UserError, match='seconds=0'):
        gradescope.main(['--seconds=0'])
    assert not os.listdir(tmp_path)
