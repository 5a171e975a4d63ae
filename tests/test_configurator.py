"""Settings: what is accepted, what is refused and how; and how a program ends."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, fields
from typing import Optional

import pytest
from conftest import ROOT

from configurator import build, describe, read
from engine.files import UserError, run
from model import GPTConfig
from prepare_data import DataSettings
from sample import SampleSettings
from train import Settings


@dataclass
class Block:
    """a block for the tests"""
    count: int = 3                      # a whole number
    rate: float = 0.5                   # any number
    name: str = 'x'                     # text
    flag: bool = False                  # yes or no
    limit: Optional[int] = None         # a whole number, or none
    label: Optional[str] = None         # text, or none
    out_dir: str = 'out'                # a folder


def parse(*argv):
    return read(list(argv), 'usage', Block)


@pytest.mark.parametrize('arg, name, value', [
    ('--count=16*3', 'count', 48),
    ('--count=1e3', 'count', 1000),
    ('--rate=1', 'rate', 1.0),
    ('--name=a b=c#d', 'name', 'a b=c#d'),
    ('--name=3', 'name', '3'),
    ('--name=~/b', 'name', '~/b'),
    ('--out_dir=a/~', 'out_dir', 'a/~'),
    ('--name=', 'name', ''),
    ('--flag=True', 'flag', True),
    ('--flag', 'flag', True),
    ('--limit=None', 'limit', None),
    ('--limit=7', 'limit', 7),
    ('--label=None', 'label', None),
])
def test_options(arg, name, value):
    got, rest = parse(arg)
    assert got == {name: value}
    assert type(got[name]) is type(value)
    assert rest == []


@pytest.mark.parametrize('arg, words', [
    ('--cuont=5', ["'cuont'", "did you mean 'count'"]),
    ('--cuont', ["'cuont'", "did you mean 'count'"]),
    ('--count', ['--name=value']),
    ('--count=1.5', ['whole number', '1.5']),
    ('--count=True', ['whole number']),
    ('--rate=1e999', ['number', 'inf']),
    ('--flag=true', ['should be True or False', "'true'"]),
    ('--name=None', ['text']),
    ('--out_dir=~/a', ['the whole path']),
    ('--out_dir=~', ['the whole path']),
    ('--count=1/0', ['zero']),
    ('--count=9**9**9', ['+ - * /']),
    ("--count='a'*9", ['numbers']),
    ('--count=__import__("os")', ['literal']),
])
def test_refusals_name_the_argument(arg, words):
    with pytest.raises(UserError) as error:
        parse(arg)
    assert '\n' not in str(error.value)
    for word in [arg.partition('=')[0], *words]:
        assert word in str(error.value)


def test_files_compose_left_to_right(tmp_path):
    a, b, c = tmp_path / 'a.py', tmp_path / 'b.py', tmp_path / 'c.json'
    a.write_text('"""A docstring."""\n'
                 'count = 4 * 2   # a comment\n'
                 'name = "a"\n')
    b.write_text('\ufeff'  # as some editors on Windows begin a file
                 'count = 9\n'
                 'limit = None\n', encoding='utf-8')
    c.write_text(json.dumps(dict(rate=2, flag=True)))

    given, _ = parse(str(a), str(b), '--name=z', str(c), 'other')
    assert given == dict(count=9, name='z', limit=None, rate=2.0, flag=True)
    given, rest = parse(str(b), str(a), 'other')
    assert given == dict(count=8, name='a', limit=None)
    assert rest == ['other']
    with pytest.raises(UserError, match='nosuch.py: cannot be read'):
        parse(str(tmp_path / 'nosuch.py'))


@pytest.mark.parametrize('line', [
    'import os',
    'count = len("abc")',
    'count += 1',
    'count, rate = 1, 2',
    'count = rate = 3',
    'Block.count = 3',
    'print(1)',
    'count = = 3',
    'coutn = 3',
])
def test_config_files_hold_nothing_but_assignments(tmp_path, line):
    path = tmp_path / 'bad.py'
    path.write_text(f'rate = 1\n{line}\n')
    with pytest.raises(UserError) as error:
        parse(str(path))
    assert f'{path}:2' in str(error.value)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('text', ['[1, 2]', '{', '{"count": "3"}'])
def test_bad_json(tmp_path, text):
    path = tmp_path / 'bad.json'
    path.write_text(text)
    with pytest.raises(UserError) as error:
        parse(str(path))
    assert str(path) in str(error.value)


def test_stored_settings_come_back_unchanged(tmp_path):
    path = tmp_path / 'stored.json'
    block = Block(count=2 ** 60 + 1, rate=0.1 + 0.2, name="it's \n ☃", flag=True, label='')
    path.write_text(json.dumps(asdict(block)))
    assert build(Block, parse(str(path))[0]) == block


@pytest.mark.parametrize('block', [Block, GPTConfig, Settings, SampleSettings, DataSettings])
def test_every_setting_is_in_the_help(block):
    text = describe(block)
    for field in fields(block):
        assert f'--{field.name}=' in text, f'{field.name} has no comment on its line'


@pytest.mark.parametrize('name', [name for name in sorted(os.listdir(os.path.join(ROOT, 'config')))
                                  if name.endswith('.py')])
def test_every_config_makes_a_model(name):
    given, _ = read([os.path.join(ROOT, 'config', name)], '', Settings, GPTConfig)
    if name not in ('tasks.py', 'trees.py'):
        assert given['out_dir'] == 'out/' + name.removesuffix('.py')
    build(Settings, given)
    build(GPTConfig, given)


# ---- how a program ends --------------------------------------------------------------------------

def test_a_reader_that_leaves_is_no_error(tmp_path):
    talk = tmp_path / 'talk.py'
    talk.write_text("from engine.files import run\n"
                    "run(lambda argv: print('line\\n' * 100000))\n")
    process = subprocess.Popen([sys.executable, talk], env={**os.environ, 'PYTHONPATH': ROOT},
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b''
    assert process.wait(timeout=60) == 141


@pytest.mark.parametrize('error, status, said', [
    (UserError('\x1b[31mred\n: no such thing'), 2, 'error: ?[31mred : no such thing\n'),
    (FileNotFoundError(2, 'No such file', 'a.py'), 2, "error: [Errno 2] No such file: 'a.py'\n"),
    (KeyboardInterrupt(), 130, ''),
    (None, 7, ''),
])
def test_what_ends_a_program_is_a_line_and_a_status(error, status, said, capsys):
    def fail(argv):
        if error is not None:
            raise error
        return status

    with pytest.raises(SystemExit) as leaves:
        run(fail)
    assert leaves.value.code == status
    assert capsys.readouterr() == ('', said)


def test_a_folder_is_no_config_file_whatever_it_is_called(tmp_path):
    """out/loop.json, or a published one: hf:models/v1.py."""
    names = [str(tmp_path / name) for name in ('loop.json', 'v1.py')]
    for name in names:
        os.mkdir(name)
    folders = [*names, f'hf:{names[1]}']
    assert parse(*folders) == ({}, folders)
