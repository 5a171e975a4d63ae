"""Tools on logs and folders that nobody expects: a picture or a table of the rest, or one line."""

import json
import os

import pytest
from test_plot import curves, final, labels, write_run

from engine.files import UserError
from tools import compare

pytest.importorskip('matplotlib')
DEEP = '[' * 5000
ODD = ['null', '"text"', 'true', 'NaN', 'Infinity', '-1e999', '[]', '{}', '[[1]]', DEEP, '1' * 5000]


def append(path, *lines):
    with open(path, 'a', encoding='utf-8') as f:
        for line in lines:
            f.write(line + '\n')


@pytest.mark.parametrize('key', ['step', 'tokens', 'loss', 'val_loss', 'ms'])
def test_values_that_are_no_numbers(tmp_path, key):
    write_run(tmp_path / 'a', 3.0, 2.0)
    for value in ODD:
        fields = {'step': '3', 'tokens': '192', 'loss': '2.5', 'val_loss': '2.5', 'ms': '10'}
        fields[key] = value
        inside = ', '.join(f'"{name}": {text}' for name, text in fields.items())
        append(tmp_path / 'a' / 'log.jsonl', '{' + inside + '}')
    assert len(labels(curves([tmp_path / 'a'], x='seconds'))) == 1


def test_lines_that_are_no_records(tmp_path):
    write_run(tmp_path / 'a', 3.0, 2.0)
    append(tmp_path / 'a' / 'log.jsonl',
           '', 'null', '3', '"text"', '[]', '{}', DEEP, '{"a":' * 5000, '{"step": 1', '{"step": 9}',
           '\0\0', '{"step": 9, "spike": 4.0, "mean_before": 3.0}', '\ufeff{}',
           '{"step": -1, "tokens": 64}')
    assert list(labels(curves([tmp_path / 'a']))) == ['a  1.500']
    final([tmp_path / 'a'])


@pytest.mark.parametrize('name', [
    '$x$', '$\\frac{1}{0}$', '$', '$$', '_hidden', '%{^_^',
])
def test_folders_whose_names_are_tex(tmp_path, name):
    write_run(tmp_path / name, 3.0, 2.0)
    write_run(tmp_path / f'{name}_as_x', 3.0, 2.5)
    figure = final([tmp_path / name, tmp_path / f'{name}_as_x'])
    for picture in (figure, curves([tmp_path / name])):
        for words in picture.axes[0].texts:
            assert words.get_text().startswith(name) and not words.get_parse_math()
        assert picture.axes[0].texts
        picture.canvas.draw()


@pytest.mark.parametrize('kind', ['folder', 'pipe'])
def test_a_log_that_is_no_file(tmp_path, kind):
    (tmp_path / 'a').mkdir()
    if kind == 'pipe' and not hasattr(os, 'mkfifo'):
        pytest.skip('no pipes')
    (os.mkdir if kind == 'folder' else os.mkfifo)(tmp_path / 'a' / 'log.jsonl')
    with pytest.raises(UserError, match=f'log.jsonl: a {kind}'):
        curves([tmp_path / 'a'])


# ---- the table -----------------------------------------------------------------------------------

RECORD = dict(name='plain', seed=1, val_nats_per_byte=1.5, flops=100, seconds=10, steps=5,
              commit='abc', torch='2.13.0', hardware='a CPU', date='2026-01-01')


@pytest.mark.parametrize('value', [0, -1, None, 'x', True, [], {}, [1], float('nan'), float('inf')])
@pytest.mark.parametrize('key', ['name', 'val_nats_per_byte', 'flops', 'seconds'])
def test_results_that_are_no_records(tmp_path, capsys, key, value):
    fine = key == 'val_nats_per_byte' and value in (0, -1) and value is not True
    if fine or (key == 'name' and value == 'x'):
        return
    append(tmp_path / 'runs.jsonl', json.dumps({**RECORD, 'seed': 2}),
           json.dumps({**RECORD, key: value}))
    with pytest.raises(UserError, match='runs.jsonl: a line is not') as error:
        compare.main([f'--out={tmp_path}', '--table_only=True'])
    assert key in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize('line', ['null', '[1]', DEEP, '{"name"', '7'])
def test_other_lines_of_the_results_are_skipped(tmp_path, capsys, line):
    append(tmp_path / 'runs.jsonl', json.dumps(RECORD), line)
    compare.main([f'--out={tmp_path}', '--table_only=True'])
    assert '| plain | 1 | 1.5000 |' in capsys.readouterr().out
