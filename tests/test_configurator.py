"""Settings: what is accepted, what is refused and how, and that no input can do anything else."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, fields
from typing import Optional

import pytest
from conftest import ROOT, program
from hypothesis import given, settings as hypothesis_settings, strategies as st

from configurator import build, describe, read
from engine.files import UserError, run


@dataclass
class Block:
    """a block for the tests"""
    count: int = 3                      # a whole number
    rate: float = 0.5                   # any number
    name: str = 'x'                     # text
    flag: bool = False                  # yes or no
    limit: Optional[int] = None         # a whole number, or none
    label: Optional[str] = None         # text, or none

    def __post_init__(self):
        if self.count == 13:
            raise ValueError("count=13 is impossible: take 12")


def parse(*argv):
    return read(list(argv), 'usage', Block)


# --------------------------------------------------------------------------------------------------
# arguments


@pytest.mark.parametrize('arg, name, value', [
    ('--count=5', 'count', 5),
    ('--count=2**4*3', 'count', 48),
    ('--count=1e3', 'count', 1000),
    ('--count=-(4//2)', 'count', -2),
    ('--rate=1', 'rate', 1.0),
    ('--rate=6e-4/2', 'rate', 3e-4),
    ('--name=a b=c#d', 'name', 'a b=c#d'),
    ('--name=3', 'name', '3'),
    ('--name=', 'name', ''),
    ('--flag=True', 'flag', True),
    ('--limit=None', 'limit', None),
    ('--limit=7', 'limit', 7),
    ('--label=None', 'label', None),
    ('--label=ab', 'label', 'ab'),
])
def test_options(arg, name, value):
    got, rest = parse(arg)
    assert got == {name: value}
    assert type(got[name]) is type(value)
    assert rest == []


@pytest.mark.parametrize('arg, words', [
    ('--cuont=5', ["'cuont'", "did you mean 'count'"]),
    ('--zzz=5', ['zzz', '--help']),
    ('--count', ['--name=value']),
    ('--count=1.5', ['whole number', '1.5']),
    ('--count=True', ['whole number']),
    ('--count=abc', ['count']),
    ('--count=', ['count']),
    ('--rate=nan', ['rate']),
    ('--rate=1e999', ['number', 'inf']),
    ('--flag=1', ['True or False']),
    ('--flag=true', ['flag']),
    ('--name=None', ['text']),
    ('--count=1/0', ['zero']),
    ('--count=9**9**9', ['power']),
    ('--count=10**30', ['whole number']),
    ('--rate=1e300', ['number']),
    ('--count=2**-99999', ['power']),
    ('--count=(-8)**0.5', ['count']),
    ('--count=1);flag=(True', ['count']),
    ("--count='a'*9", ['numbers']),
    ('--count=__import__("os")', ['literal']),
    ('--limit=[1]', ['literal']),
    ('nofile.py', ['nofile.py', 'cannot be read']),
    ('--count=' + '(' * 500, ['count']),
])
def test_refusals_name_the_argument(arg, words):
    with pytest.raises(UserError) as error:
        parse(arg)
    message = str(error.value)
    assert '\n' not in message
    assert arg.partition('=')[0].lstrip('-') in message
    for word in words:
        assert word in message


@pytest.mark.parametrize('text', [
    '10000**10000', '9999**9999*9999**9999', '1e4**1e4', '1e308**2', '10**400/3',
    '10**400-10**400', '2**2000', '9' * 5000, '-' * 3000 + '1', '(' * 5000, '1/0', '5%0',
    '5//0.0', '1j', '...', 'b"x"', '1 is 1', r"'\d'", '0x', '1if 1else 2', '0777', '1e308*10',
    'nan', '(-8)**.5', '[' * 200, '\0',
])
@pytest.mark.parametrize('name', ['count', 'rate', 'flag', 'limit'])
def test_odd_values_are_one_short_line_without_internals(text, name, tmp_path, recwarn):
    (tmp_path / 'odd.py').write_text(f'{name} = {text}\n')
    for arg in (f'--{name}={text}', str(tmp_path / 'odd.py')):
        with pytest.raises(UserError) as error:
            parse(arg)
        message = str(error.value)
        assert len(message) < 250 and '\n' not in message
        for internal in ('Errno', 'out of range', 'digits', 'division', 'None:', 'object'):
            assert internal not in message
    assert not recwarn.list


@pytest.mark.parametrize('text', ['rate = 1\0', '\0', 'rate = "\\N{x}"', 'rate = (\n',
                                  '\ufeff\ufeff', ' rate = 1'])
def test_files_that_are_no_python_name_a_line(text, tmp_path):
    (tmp_path / 'odd.py').write_text(text)
    with pytest.raises(UserError, match=r'odd.py:\d+: '):
        parse(str(tmp_path / 'odd.py'))


@hypothesis_settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(max_size=40), st.sampled_from(['', *(f.name for f in fields(Block))]))
def test_no_argument_makes_a_traceback(text, name):
    for arg in (text, f'--{text}', f'--{name}={text}'):
        if arg in ('-h', '--help') or arg.endswith(('.py', '.json')):
            continue
        try:
            got, _ = parse(arg)
        except UserError:
            continue
        assert set(got) <= {name, text.partition('=')[0]}


NUMBERS = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))


@hypothesis_settings(max_examples=200, deadline=None, derandomize=True)
@given(NUMBERS, st.sampled_from(['count', 'rate']))
def test_numbers_arrive_unchanged_or_not_at_all(value, name):
    try:
        got = parse(f'--{name}={value!r}')[0][name]
    except UserError:
        is_fraction = name == 'count' and value != int(value)
        assert is_fraction or abs(value) >= 2 ** 63
    else:
        assert got == (float(value) if name == 'rate' else value)


# --------------------------------------------------------------------------------------------------
# files


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


@pytest.mark.parametrize('line', [
    'import os',
    'count = len("abc")',
    'for i in range(3): count = i',
    'count += 1',
    'count = name',
    'count, rate = 1, 2',
    'count = rate = 3',
    'def f(): pass',
    'count: int = 3',
    'Block.count = 3',
    'count = [1][0]',
    'count = lambda: 3',
    'count = 3 if True else 4',
    'print(1)',
    'count = = 3',
    'name = 3',
    'coutn = 3',
    'name = f"{1}"',
    'count = (rate := 3)',
    '"""late"""',
])
def test_config_files_hold_nothing_but_assignments(tmp_path, line):
    path = tmp_path / 'bad.py'
    path.write_text(f'rate = 1\n{line}\n')
    with pytest.raises(UserError) as error:
        parse(str(path))
    assert f'{path}:2' in str(error.value)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('text', [
    '[1, 2]',
    '{',
    '{"count": [1]}',
    '{"count": "3"}',
    '{"nope": 1}',
    '3',
    '',
])
def test_bad_json(tmp_path, text):
    path = tmp_path / 'bad.json'
    path.write_text(text)
    with pytest.raises(UserError) as error:
        parse(str(path))
    assert str(path) in str(error.value)


def test_a_binary_file_is_refused(tmp_path):
    path = tmp_path / 'bad.py'
    path.write_bytes(b'\xff\xfe\0\x01')
    with pytest.raises(UserError):
        parse(str(path))


@hypothesis_settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(max_size=60))
def test_no_config_file_makes_a_traceback(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / 'any.py'
    path.write_text(text, encoding='utf-8', errors='replace')
    try:
        parse(str(path))
    except UserError as error:
        assert str(path) in str(error)


TEXT = st.text(st.characters(codec='utf-8', exclude_characters='\0'))   # others are refused
BLOCKS = st.builds(
    Block,
    count=st.integers(-2 ** 63 + 1, 2 ** 63 - 1).filter(lambda n: n != 13),
    rate=st.floats(-9e18, 9e18),
    name=TEXT,
    flag=st.booleans(),
    limit=st.none() | st.integers(0, 2 ** 63 - 1),
    label=st.none() | TEXT,
)


@hypothesis_settings(max_examples=200, deadline=None, derandomize=True)
@given(BLOCKS)
def test_stored_settings_come_back_unchanged(tmp_path_factory, block):
    path = tmp_path_factory.getbasetemp() / 'stored.json'
    path.write_text(json.dumps(asdict(block)))
    assert build(Block, parse(str(path))[0]) == block


# --------------------------------------------------------------------------------------------------
# blocks and --help


def test_impossible_pairs_and_help():
    with pytest.raises(UserError, match='take 12'):
        build(Block, dict(count=13))
    assert build(Block, dict(count=4)) == Block(count=4)
    text = describe(Block)
    for field in fields(Block):
        assert f'--{field.name}=' in text
    assert '--rate=0.5' in text
    assert 'any number' in text


def test_every_setting_of_the_programs_is_in_their_help():
    from model import GPTConfig
    from prepare_data import DataSettings
    from sample import SampleSettings
    from train import Settings
    for block in (GPTConfig, Settings, SampleSettings, DataSettings):
        text = describe(block)
        for field in fields(block):
            assert f'--{field.name}=' in text, f'{field.name} has no comment on its line'


# --------------------------------------------------------------------------------------------------
# how a program ends


def test_a_terminal_that_cannot_show_a_character():
    code = r"from engine.errors import run; run(lambda argv: print('caf\xe9', '\udce9'))"
    done = program('-c', code, PYTHONIOENCODING='ascii:strict')
    assert done.stdout == 'caf? ?\n'


@pytest.mark.skipif(sys.platform == 'win32', reason='POSIX pipes')
def test_a_reader_that_leaves_is_no_error(tmp_path):
    talk = tmp_path / 'talk.py'
    talk.write_text("from engine.errors import run\n"
                    "run(lambda argv: print('line\\n' * 100000))\n")
    process = subprocess.Popen([sys.executable, talk], env={**os.environ, 'PYTHONPATH': ROOT},
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b''
    assert process.wait(timeout=60) == 141


@pytest.mark.parametrize('text', ['a\nb', 'a\r\nb', '\x1b[31mred', 'a\tb', '\u2028', '\udcff',
                                  '\x07'])
def test_one_line_is_one_line(text, capsys):
    def fail(argv):
        raise UserError(f"{text}: no such thing")

    with pytest.raises(SystemExit) as leaves:
        run(fail)
    assert leaves.value.code == 2
    said = capsys.readouterr().err
    assert said.endswith(': no such thing\n') and said[:-1].isprintable()


def test_ctrl_c_is_said_by_the_status(capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as leaves:
        run(interrupted)
    assert leaves.value.code == 130
    assert capsys.readouterr() == ('', '')
