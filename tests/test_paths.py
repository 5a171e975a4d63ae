"""
Whatever stands where a file or a folder should be: pipes, sockets, devices, folders, names that are
no text. One line, at once.
"""

import json
import os
import shutil
import signal
import socket
import sys

import pytest
import test_train
from conftest import make, save
from test_train import QUICK, SHAPE

import prepare_data
import sample
import train
from configurator import read
from engine.checkpoint import load_checkpoint
from engine.files import UserError, checksum, plain_file, whole
from engine.huggingface import load_state
from engine.shards import open_shard, read_meta
from model import GPTConfig
from tools import evaluate
from train import Settings

if sys.platform == 'win32':
    pytest.skip('pipes, sockets and devices in the file system', allow_module_level=True)

run_train = test_train.run_train    # the fixture
KINDS = {'pipe': 'a pipe', 'socket': 'a socket', 'device': 'a device', 'folder': 'a folder'}


@pytest.fixture(autouse=True)
def no_waiting():
    """A hang is a failure after ten seconds."""
    def fail(*_):
        raise TimeoutError('it waits')
    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=KINDS)
def put(request, monkeypatch):
    """put(path): something that is no file appears there; put.words is what it is called."""
    held = []

    def put(path):
        path = str(path)
        if request.param == 'pipe':
            os.mkfifo(path)
        elif request.param == 'device':
            os.symlink('/dev/zero', path)
        elif request.param == 'folder':
            os.mkdir(path)
        else:
            monkeypatch.chdir(os.path.dirname(path))    # the path of a socket has to be short
            held.append(socket.socket(socket.AF_UNIX))
            held[-1].bind(os.path.basename(path))
        return path

    put.words = KINDS[request.param]
    yield put
    for each in held:
        each.close()


def test_each_reader_refuses_it(put, tmp_path):
    path = put(tmp_path / 'x.py')
    readers = [
        plain_file,
        lambda path: read([path], '', Settings),
        open_shard,
        checksum,
        lambda path: sample.read_file(f'FILE:{path}'),
        lambda path: evaluate.read_text(path, None),
    ]
    for reader in readers:
        with pytest.raises(UserError, match=f'{path}.*{put.words}'):
            reader(path)


@pytest.mark.parametrize('name, reader', [
    ('meta.json', read_meta),
    ('config.json', load_state),
    ('ckpt.pt', load_checkpoint),
    ('ckpt_prev.pt', load_checkpoint),
])
def test_readers_of_folders(put, tmp_path, name, reader):
    put(tmp_path / name)
    with pytest.raises(UserError, match=put.words) as error:
        reader(str(tmp_path))
    assert name in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize('name', ['settings.json.tmp', 'log.jsonl', 'ckpt.pt.tmp'])
def test_what_a_run_writes(put, run_train, tmp_path, name):
    if name == 'log.jsonl' and put.words == 'a device':
        return      # writing to one ends
    (tmp_path / 'out').mkdir()
    put(tmp_path / 'out' / name)
    with pytest.raises(UserError, match=f'{name}.*{put.words}'):
        run_train('out', '--max_steps=1')


def test_what_is_replaced_stays(put, tmp_path):
    put(tmp_path / 'file.tmp')
    (tmp_path / 'file').write_text('before')
    with pytest.raises(UserError), whole(str(tmp_path / 'file')) as f:
        f.write('after')
    assert (tmp_path / 'file').read_text() == 'before'
    assert os.path.lexists(tmp_path / 'file.tmp')


def test_a_shard(put, small_data, tmp_path):
    shutil.copytree(small_data, tmp_path / 'd')
    os.remove(tmp_path / 'd' / 'val_000000.bin')
    put(tmp_path / 'd' / 'val_000000.bin')
    for program, args in ((prepare_data.main, ['--check', str(tmp_path / 'd')]),
                          (train.main, [*SHAPE, *QUICK, f'--data_dir={tmp_path / "d"}',
                                        f'--out_dir={tmp_path / "out"}'])):
        with pytest.raises(UserError, match=f'val_000000.bin: {put.words}'):
            program(args)


def test_texts(put, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = put(tmp_path / 'text.txt')
    words = 'no text' if put.words == 'a folder' else put.words     # an empty one
    with pytest.raises(UserError, match=words):
        prepare_data.main([path, '--name=mine'])


# ---- names ---------------------------------------------------------------------------------------

NO_TEXT = {'byte': '\udcff', 'byte inside': 'out\udc80x', 'surrogate': '\ud800', 'nul': 'a\0b'}


@pytest.mark.parametrize('name', NO_TEXT)
@pytest.mark.parametrize('setting', ['out_dir', 'data_dir', 'init_from', 'device', 'dtype'])
def test_settings_that_are_no_text(tmp_path, name, setting):
    with pytest.raises(UserError, match=setting) as error:
        read([f'--{setting}={NO_TEXT[name]}'], '', Settings)
    assert 'UTF-8' in str(error.value) or 'NUL' in str(error.value)
    (tmp_path / 's.json').write_text(json.dumps({setting: NO_TEXT[name]}))
    with pytest.raises(UserError, match=f's.json: {setting} holds'):
        read([str(tmp_path / 's.json')], '', Settings)
    (tmp_path / 's.py').write_text(f'{setting} = {ascii(NO_TEXT[name])}\n')
    with pytest.raises(UserError, match=f's.py:1: {setting} holds'):
        read([str(tmp_path / 's.py')], '', Settings)


@pytest.mark.parametrize('name', NO_TEXT)
def test_arguments_that_are_no_text(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for program, args in ((sample.main, []), (evaluate.main, []), (prepare_data.main, []),
                          (prepare_data.main, ['--check']), (train.main, [])):
        with pytest.raises(UserError, match='holds'):
            program([*args, NO_TEXT[name]])
    with pytest.raises(UserError, match='holds'):
        prepare_data.main([f'--name={NO_TEXT[name]}'])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize('name', ['été', 'a b', "quote'", '日本', '\U0001f600', 'a=b#c', '-x', '~'])
def test_any_text_will_do(run_train, tmp_path, name):
    assert run_train(name, '--max_steps=1')['step'] == 1
    assert load_checkpoint(str(tmp_path / name), GPTConfig)['settings']['out_dir'].endswith(name)


@pytest.mark.parametrize('name', ['../x', '/tmp/x', '..', '.', '', 'a/b', '.hidden', 'a/../../x',
                                  '\\x', './x', 'x/', '...'])
def test_names_stay_inside_data(tmp_path, monkeypatch, name):
    inside = tmp_path / 'inside'
    inside.mkdir()
    monkeypatch.chdir(inside)
    (inside / 'text.txt').write_text('some words\n' * 500)
    for paths in ([], ['text.txt'], ['shakespeare'], ['fineweb']):
        with pytest.raises(UserError, match='--name=.*data/'):
            prepare_data.main([*paths, f'--name={name}'])
    assert os.listdir(tmp_path) == ['inside'] and os.listdir(inside) == ['text.txt']


@pytest.mark.parametrize('path', ['/', '...'])
def test_paths_without_a_name(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / '...').write_text('some words\n' * 500)
    with pytest.raises(UserError, match='--name'):
        prepare_data.main([path])
    assert os.listdir(tmp_path) == ['...']


def test_a_prompt_that_is_a_pipe(put, tmp_path):
    folder = save(tmp_path / 'ckpt', make(vocab_size=320, n_tokens=257))
    path = put(tmp_path / 'prompt')
    with pytest.raises(UserError, match=put.words):
        sample.main([folder, f'--start=FILE:{path}', '--device=cpu'])
