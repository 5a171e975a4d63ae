"""meta.json and the shards agree, or one line says where they do not; so does --check."""

import json
import os
import re
import shutil

import numpy as np
import pytest
import test_train
from conftest import program, refused
from test_train import CPU, QUICK, SHAPE

import prepare_data
import train
from engine.files import UserError
from engine.shards import HEADER_BYTES, get_tokenizer, open_shard, read_meta
from engine.windows import Windows
from prepare_data import write_dataset

run_train = test_train.run_train    # the fixture


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A data set of several shards in each split."""
    monkeypatch.setattr(prepare_data, 'SHARD_TOKENS', 1500)
    texts = [f'def f{i}(x):\n    return x + {i}\n'.encode() * 4 for i in range(120)]
    write_dataset(str(tmp_path / 'd'), texts, get_tokenizer('byte'), 0.3, 'test')
    return tmp_path / 'd'


def change(folder, function):
    """Apply a function to meta.json, in place."""
    meta = json.loads((folder / 'meta.json').read_text())
    function(meta)
    (folder / 'meta.json').write_text(json.dumps(meta))


def why(function, *args):
    """The one line with which it is refused."""
    with pytest.raises(UserError) as error:
        function(*args)
    message = str(error.value)
    assert '\n' not in message and 'prepare the data again' in message
    return message


# ---- the description -----------------------------------------------------------------------------

def at(meta, path):
    """(the container, the last key) of a path such as train.shards.0.name."""
    *keys, last = [int(key) if key.isdecimal() else key for key in path.split('.')]
    for key in keys:
        meta = meta[key]
    return meta, last


FIELDS = ['tokenizer', 'n_tokens', 'eot', 'source', 'train', 'val', 'train.bytes', 'train.tokens',
          'train.shards', 'val.bytes', 'val.shards', 'train.shards.0', 'train.shards.0.name',
          'train.shards.1.tokens', 'val.shards.0.sha256']


@pytest.mark.parametrize('value', [None, 1.5, True, -1, 10 ** 600, '', 'x', [], {}, [[]], 'delete'])
@pytest.mark.parametrize('path', FIELDS)
def test_values_of_another_kind(folder, path, value):
    def spoil(meta):
        inside, last = at(meta, path)
        if value == 'delete':
            del inside[last]
        else:
            inside[last] = value
    if path == 'source' and value in ('', 'x'):
        return      # any text will do
    change(folder, spoil)
    why(read_meta, str(folder))


def double_name(meta):
    shards = meta['train']['shards']
    shards[1]['name'] = shards[0]['name']


def double_shard(meta):
    meta['train']['shards'].insert(0, meta['train']['shards'][0])
    meta['train']['tokens'] += meta['train']['shards'][0]['tokens']


def in_both(meta):
    meta['val'] = meta['train']


def copy_in_val(meta):
    meta['val']['shards'][0]['sha256'] = meta['train']['shards'][0]['sha256']


def other_order(meta):
    meta['train']['shards'].reverse()


def too_few_tokens(meta):
    meta['train']['tokens'] -= 1


def shard_left_out(meta):
    del meta['train']['shards'][-1]


def no_shards(meta):
    meta['val'].update(tokens=0, shards=[])


def no_bytes(meta):
    meta['val']['bytes'] = 0


def too_many_bytes(meta):
    meta['val']['bytes'] = meta['val']['tokens'] + 1


def empty_shard(meta):
    shards = meta['train']['shards']
    shards[0]['tokens'] += shards[1]['tokens']
    shards[1]['tokens'] = 0


def checksum_in_capitals(meta):
    meta['train']['shards'][0]['sha256'] = 'A' * 64


def other_vocabulary(meta):
    meta['n_tokens'] = 300


def other_end(meta):
    meta['eot'] = 255


def gpt2_with_256(meta):
    meta['tokenizer'] = 'gpt2'


def unknown_tokenizer(meta):
    meta['tokenizer'] = 'gpt5000'


def end_beyond_vocabulary(meta):
    meta.update(tokenizer='p50k_base', eot=257)


def huge_vocabulary(meta):
    meta.update(tokenizer='p50k_base', n_tokens=2 ** 17)


@pytest.mark.parametrize('spoil', [
    double_name, double_shard, in_both, copy_in_val, other_order, too_few_tokens, shard_left_out,
    no_shards, no_bytes, too_many_bytes, empty_shard, checksum_in_capitals, other_vocabulary,
    other_end, gpt2_with_256, unknown_tokenizer, end_beyond_vocabulary, huge_vocabulary,
])
def test_descriptions_that_contradict_themselves(folder, spoil):
    change(folder, spoil)
    why(read_meta, str(folder))
    why(prepare_data.check, str(folder))


@pytest.mark.parametrize('name', [
    '../train_000000.bin', '/etc/passwd', 'a/b.bin', '', '.', '..', 'x\0.bin', 'x\n.bin',
    '\ud800.bin', 'meta.json', 'a\\b.bin', '\x1b[31m.bin', 'train_000000',
])
def test_names_of_shards_stay_inside(folder, name):
    def rename(meta):
        meta['train']['shards'][0]['name'] = name
    change(folder, rename)
    message = why(read_meta, str(folder))
    assert message.isprintable()


@pytest.mark.parametrize('text', [
    '', '{', 'null', '3', '"text"', '[' * 100_000, '{"a":' * 100_000, '1' * 5000, 'NaN', '\ufeff{}',
])
def test_descriptions_that_are_none(tmp_path, text):
    (tmp_path / 'meta.json').write_text(text)
    message = why(read_meta, str(tmp_path))
    assert 'digits' not in message


# ---- the files -----------------------------------------------------------------------------------

def test_lengths_are_compared_at_every_start(folder, run_train):
    """A whole shard in the place of another: its header is right, meta.json says otherwise."""
    meta = read_meta(str(folder))
    for split in ('train', 'val'):
        names = [shard['name'] for shard in meta[split]['shards']]
        shutil.copy(folder / names[0], folder / 'first')
        shutil.copy(folder / names[-1], folder / names[0])      # the last one is shorter
        assert 'not the file that meta.json describes' in why(
            Windows, str(folder), split, meta, 32)
        assert names[0] in why(prepare_data.check, str(folder))
        assert names[0] in why(train.main, [*SHAPE, *QUICK, f'--data_dir={folder}',
                                            f'--out_dir={folder}/out'])
        os.replace(folder / 'first', folder / names[0])
    prepare_data.check(str(folder))


def test_shards_that_changed_places_are_found_by_check(folder):
    a, b = folder / 'train_000000.bin', folder / 'train_000001.bin'
    a.rename(folder / 'x')
    b.rename(a)
    (folder / 'x').rename(b)
    assert 'train_000000.bin: not the file' in why(prepare_data.check, str(folder))


def test_check_counts_the_bytes_of_text(folder):
    def fewer(meta):
        meta['val']['bytes'] -= 10
    change(folder, fewer)
    assert 'val.bytes' in why(prepare_data.check, str(folder))


@pytest.mark.parametrize('place', [0, 7, 1499])
def test_a_token_outside_of_the_vocabulary_is_named_with_its_place(folder, place):
    path = folder / 'train_000001.bin'
    tokens = np.fromfile(path, np.uint16)
    tokens[HEADER_BYTES // 2 + place] = 777
    tokens.tofile(path)
    told = f'train_000001.bin: damaged (token 777 of a vocabulary of 257, at place {place})'
    assert told in why(prepare_data.check, str(folder))

    data = Windows(str(folder), 'train', read_meta(str(folder)), 1499)
    assert told in why(data.get, [1], CPU)
    assert len(open_shard(str(path))) == 1500


def test_the_program_says_it_in_one_line(folder):
    change(folder, other_order)
    path = os.path.join(os.path.dirname(prepare_data.__file__), 'prepare_data.py')
    done = program(path, '--check', folder, ok=False)
    refused(done, 'meta.json', 'order')
    assert not re.search('Error|Traceback', done.stderr)
