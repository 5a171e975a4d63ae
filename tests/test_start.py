"""Every way to start a program: Python's own switches, and variables that make no sense."""

import os
import socket
import sys
from datetime import timedelta

import pytest
import test_train
from conftest import ROOT, program, refused

from engine import hardware
from engine.files import UserError

run_train = test_train.run_train    # the fixture
ALL = ['-OO', '-I', '-W', 'error']


@pytest.mark.parametrize('switches, args, words', [
    (ALL, ['prepare_data.py', '--check', 'nowhere'], 'no data set'),
    (ALL, ['train.py', '--max_steps=0'], 'max_steps=0'),
    *[pytest.param(switches, args, words, marks=pytest.mark.slow)
      for switches in (['-OO'], ['-I'], ['-P'], ['-W', 'error'], ['-E', '-s'], ['-X', 'dev'])
      for args, words in ((['train.py', '--max_steps=0'], 'max_steps=0'),
                          (['sample.py', 'nowhere'], 'nowhere: no checkpoint'),
                          (['tools/evaluate.py', 'nowhere'], 'nowhere: no checkpoint'),
                          (['prepare_data.py', '--name=../x'], '--name=../x'))
      if switches != ['-P'] or hasattr(sys.flags, 'safe_path')],
])
def test_switches(tmp_path, switches, args, words):
    path = os.path.join(ROOT, args[0])
    done = program(*switches, path, *args[1:], cwd=tmp_path, ok=False, PYTHONPATH='')
    refused(done, words)


@pytest.mark.slow
@pytest.mark.parametrize('switches', [['-OO'], ['-I'], ['-W', 'error'], ['-OO', '-W', 'error']])
def test_a_run_from_data_to_sample(tmp_path, switches):
    small = [*test_train.SHAPE, *test_train.QUICK, '--sample_tokens=5', '--max_steps=2']
    path = os.path.join(ROOT, 'train.py')
    done = program(*switches, path, *small, cwd=tmp_path, PYTHONPATH='')
    assert '<|model|>' in done.stdout
    program(*switches, os.path.join(ROOT, 'sample.py'), 'out', '--max_new_tokens=5', cwd=tmp_path)
    program(*switches, path, '--help', cwd=tmp_path)


def test_help_without_docstrings(capsys, monkeypatch):
    monkeypatch.setattr(test_train.train, '__doc__', None)
    with pytest.raises(SystemExit):
        test_train.train.main(['--help'])
    assert '--learning_rate=' in capsys.readouterr().out


# ---- torchrun's variables ------------------------------------------------------------------------

RIGHT = dict(RANK='0', WORLD_SIZE='1', MASTER_ADDR='127.0.0.1', MASTER_PORT='0')


def start(monkeypatch, run_train, **variables):
    """The line with which a run with these variables is refused."""
    for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT'):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(hardware, 'JOIN', timedelta(seconds=1))
    with pytest.raises(UserError, match='RANK.*torchrun') as error:
        run_train('out', '--max_steps=1')
    assert '\n' not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize('name, value', [
    *[('LOCAL_RANK', value) for value in ('x', '-1', '1.5', '0x1', '1' * 30, ' ', '١')],
    *[('RANK', value) for value in ('x', '', '-1', '1', '1.0', '9' * 5000)],
    *[('WORLD_SIZE', value) for value in ('x', '', '0', '-2', '1.5', '9' * 5000)],
    *[('MASTER_PORT', value) for value in ('x', '', '-1', '99999', '1.5', '9' * 30)],
])
def test_variables_that_make_no_sense(monkeypatch, run_train, name, value):
    start(monkeypatch, run_train, **{**RIGHT, name: value})


@pytest.mark.parametrize('missing', ['MASTER_ADDR', 'MASTER_PORT'])
def test_variables_that_are_missing(monkeypatch, run_train, missing):
    some = {name: value for name, value in RIGHT.items() if name != missing}
    assert missing in start(monkeypatch, run_train, **some)


@pytest.mark.parametrize('rank', [pytest.param('0', marks=pytest.mark.slow), '1'])
def test_processes_that_are_not_there(monkeypatch, run_train, rank):
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = str(free.getsockname()[1])
    told = start(monkeypatch, run_train, RANK=rank, WORLD_SIZE='2', MASTER_ADDR='127.0.0.1',
                 MASTER_PORT=port)
    assert f'not all 2 processes met at 127.0.0.1:{port} in 1 s' in told


def test_an_empty_local_rank_is_the_first(monkeypatch):
    for text, number in (('', 0), ('0', 0), ('7', 7)):
        monkeypatch.setenv('LOCAL_RANK', text)
        assert hardware.local_rank() == number
