"""Corpora, shards, the order of windows, tokenizers."""
import json
import os
import sys

import numpy as np
import pytest
import torch
from conftest import program, refused
from hypothesis import given, settings as hypothesis_settings, strategies as st

import prepare_data
from configurator import UserError
from data import HEADER_BYTES, MAGIC, Windows, get_tokenizer, open_shard, read_meta, shuffle
from prepare_data import checksum, write_dataset

CPU = torch.device('cpu')


def write(folder, texts, val_fraction=0.3):
    return write_dataset(str(folder), texts, get_tokenizer('byte'), val_fraction, 'test')


def documents(folder, meta):
    """{split: set of documents} read back from the shards, the slow way."""
    found = {}
    for split in ('train', 'val'):
        tokens = np.concatenate([np.fromfile(os.path.join(folder, s['name']), np.uint16)[HEADER_BYTES // 2:] for s in meta[split]['shards']])
        found[split] = set(bytes(part.astype(np.uint8)) for part in np.split(tokens, np.flatnonzero(tokens == 256) + 1) for part in [part[part < 256]]) - {b''}
    return found


def test_shards_hold_every_document_once(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, 'SHARD_TOKENS', 1000)
    texts = [bytes([65 + i % 26]) * (i + 1) + str(i).encode() for i in range(100)]
    meta = write(tmp_path / 'd', texts)
    found = documents(tmp_path / 'd', meta)
    assert found['train'] | found['val'] == set(texts) and not found['train'] & found['val']
    assert meta['train']['bytes'] + meta['val']['bytes'] == sum(map(len, texts))
    assert meta['train']['tokens'] + meta['val']['tokens'] == sum(map(len, texts)) + len(texts)
    assert len(meta['train']['shards']) > 2 and all(s['tokens'] == 1000 for s in meta['train']['shards'][:-1])
    header = np.fromfile(tmp_path / 'd' / 'train_000000.bin', np.int32, 256)
    assert header[:3].tolist() == [20240520, 1, 1000] and not header[3:].any()
    for split in ('train', 'val'):
        for shard in meta[split]['shards']: assert checksum(tmp_path / 'd' / shard['name']) == shard['sha256']
    assert sorted(os.listdir(tmp_path / 'd')) == sorted(['meta.json'] + [s['name'] for split in ('train', 'val') for s in meta[split]['shards']])


def test_more_text_moves_no_document(tmp_path):
    texts = [f'document {i}'.encode() for i in range(60)]
    few, many = (documents(tmp_path / d, write(tmp_path / d, t)) for d, t in (('a', texts[::2]), ('b', texts)))
    assert few['val'] and few['val'] <= many['val'] and few['train'] <= many['train']


def test_builtin_corpus_is_the_standard_library(tmp_path):
    texts = [t for t in prepare_data.python_sources(packages=False)]
    assert texts == [t for t in prepare_data.python_sources(packages=False)]
    with open(os.path.join(os.path.dirname(os.__file__), 'argparse.py'), 'rb') as f: assert f.read().replace(b'\r\n', b'\n') in texts
    assert 5e6 < sum(map(len, texts)) < 3e7 and not any(b'site-packages' in t and b'import pytest' in t for t in texts)


def test_packages_add_installed_ones():
    with open(np.__file__, 'rb') as f: source = f.read().replace(b'\r\n', b'\n')
    assert any(t == source for t in prepare_data.python_sources(packages=True))


def test_your_own_folder_through_the_command_line(tmp_path):
    (tmp_path / 'texts' / 'sub').mkdir(parents=True)
    long = ''.join(f'line {i} of a long file\n' for i in range(4000)).encode()
    (tmp_path / 'texts' / 'a.txt').write_bytes(long)
    (tmp_path / 'texts' / 'sub' / 'latin1.txt').write_bytes('caf\xe9 cr\xe8me\n'.encode('latin-1') * 50)
    (tmp_path / 'settings.py').write_bytes(b'name = "a text like others"\n')
    (tmp_path / 'texts' / 'picture.bin').write_bytes(b'\x89PNG\0\0')
    (tmp_path / 'texts' / '.hidden').write_bytes(b'secret')
    program(os.path.join(os.path.dirname(prepare_data.__file__), 'prepare_data.py'), 'texts', 'settings.py', '--name=mine', cwd=tmp_path)
    meta = read_meta(str(tmp_path / 'data' / 'mine'))
    total = meta['train']['bytes'] + meta['val']['bytes']
    assert total == len(long) + 50 * 11 + 28, "a file that is no UTF-8 is kept byte for byte; binary and hidden files are left out"
    assert 0.02 < meta['val']['bytes'] / total < 0.3
    assert meta['train']['tokens'] + meta['val']['tokens'] == total + 3, "one end-of-text per file, not per piece"


def test_byte_encoding_is_what_tiktoken_says():
    text = 'def f(x):\n\treturn "naïve ☃"\r\n'
    tokenizer = get_tokenizer('byte')
    assert prepare_data.encode(tokenizer, text.encode()).tolist() == tokenizer.encode_ordinary(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode_ordinary(text)) == text and tokenizer.n_vocab == 257 and tokenizer.eot_token == 256


def test_unknown_tokenizer():
    with pytest.raises(UserError, match='byte'): get_tokenizer('nonsense')


def test_unreachable_tokenizer(monkeypatch):
    """No network: the message names the tokenizer that needs none."""
    import requests
    import tiktoken
    monkeypatch.setattr(tiktoken, 'get_encoding', lambda name: (_ for _ in ()).throw(requests.exceptions.ConnectionError('no route')))
    with pytest.raises(UserError, match='--tokenizer=byte'): get_tokenizer('gpt2')


@pytest.mark.parametrize('texts, words', [([], 'no text'), ([b''], 'no text'), ([b'one document'], 'no text fell to')])
def test_too_little_text(tmp_path, texts, words):
    with pytest.raises(UserError, match=words): write(tmp_path / 'd', texts)
    assert os.listdir(tmp_path / 'd') == []


def test_failure_leaves_the_old_data_and_no_rest(tmp_path):
    write(tmp_path / 'd', [f'old {i}'.encode() for i in range(50)])
    before = {name: checksum(tmp_path / 'd' / name) for name in os.listdir(tmp_path / 'd')}
    def broken():
        yield from (f"new {i}".encode() for i in range(50))
        raise UserError('source vanished')
    with pytest.raises(UserError): write_dataset(str(tmp_path / 'd'), broken(), get_tokenizer('byte'), 0.3, 'test')
    assert before == {name: checksum(tmp_path / 'd' / name) for name in os.listdir(tmp_path / 'd')}


@pytest.mark.parametrize('argv, words', [(['missing.txt'], ['missing.txt', 'no such file']), (['--val_fraction=1.5'], ['val_fraction']), (['--tokeniser=byte'], ['tokenizer']),
                                         (['empty'], ['no text']), (['--tokenizer=nope'], ['byte'])])
def test_command_line_refusals(tmp_path, argv, words):
    (tmp_path / 'empty').mkdir()
    done = program(os.path.join(os.path.dirname(prepare_data.__file__), 'prepare_data.py'), *argv, cwd=tmp_path, ok=False)
    refused(done, *words)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / 'data').write_text('a file is in the way')
    refused(program(os.path.join(os.path.dirname(prepare_data.__file__), 'prepare_data.py'), cwd=tmp_path, ok=False), 'data', 'cannot be written')


# reading

@pytest.mark.parametrize('damage', ['short', 'long', 'magic', 'empty', 'gone'])
def test_damaged_shards_are_refused(small_data, tmp_path, damage):
    with open(os.path.join(small_data, 'train_000000.bin'), 'rb') as f: good = f.read()
    path = str(tmp_path / 'shard.bin')
    bad = dict(short=good[:-2], long=good + b'xx', magic=b'\0' * 4 + good[4:], empty=b'', gone=None)[damage]
    if bad is not None:
        with open(path, 'wb') as f: f.write(bad)
    with pytest.raises(UserError) as error: open_shard(path)
    assert path in str(error.value) and 'prepare the data again' in str(error.value)


@hypothesis_settings(max_examples=100, deadline=None, derandomize=True)
@given(st.binary(max_size=2100))
def test_no_file_makes_the_shard_reader_fail_otherwise(tmp_path_factory, content):
    path = str(tmp_path_factory.getbasetemp() / 'any.bin')
    for start in (b'', np.array([MAGIC, 1], np.int32).tobytes()):
        with open(path, 'wb') as f: f.write(start + content)
        try: tokens = open_shard(path)
        except UserError: continue
        assert len(tokens) * 2 + HEADER_BYTES == len(start + content)
        del tokens


@pytest.mark.parametrize('text', [None, '', '{', '[]', '{"tokenizer": "byte"}'])
def test_bad_meta(tmp_path, text):
    if text is not None: (tmp_path / 'meta.json').write_text(text)
    with pytest.raises(UserError, match='prepare') as error: read_meta(str(tmp_path))
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('n', [1, 2, 3, 7, 16, 17, 1000, 4097])
def test_shuffle_is_a_permutation(n):
    order = shuffle(np.arange(n), n, (1, 2))
    assert sorted(order.tolist()) == list(range(n))
    if n >= 1000:
        assert order.tolist() != shuffle(np.arange(n), n, (1, 3)).tolist() != shuffle(np.arange(n), n, (2, 3)).tolist()
        # uncorrelated with the place, and neighbours do not stay neighbours
        assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 0.1 and np.mean(np.abs(np.diff(order)) < n / 100) < 0.05
        assert order[500:520].tolist() == shuffle(np.arange(500, 520), n, (1, 2)).tolist()


def test_shuffle_needs_no_memory_for_huge_sets():
    n = 10 ** 12
    order = shuffle(np.arange(n - 100, n), n, (0, 0))
    assert len(set(order.tolist())) == 100 and 0 <= order.min() and order.max() < n


def test_windows_cover_an_epoch_across_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, 'SHARD_TOKENS', 1000)
    meta = write(tmp_path / 'd', [np.random.default_rng(i).integers(0, 256, 300, dtype=np.uint8).tobytes() for i in range(40)])
    data = Windows(str(tmp_path / 'd'), 'train', meta, 16)
    assert data.n == sum((s['tokens'] - 1) // 16 for s in meta['train']['shards'])
    x, y = data.sample(0, data.n, 5, CPU)
    assert torch.equal(x[:, 1:], y[:, :-1])
    straight, _ = data.get(np.arange(data.n), CPU)
    rows = lambda t: sorted(map(tuple, t.tolist()))
    assert rows(x) == rows(straight) and not torch.equal(x, straight)
    again, _ = data.sample(data.n, data.n, 5, CPU)  # the second epoch: all of it again, in another order
    assert rows(again) == rows(straight) and not torch.equal(again, x)
    middle, _ = data.sample(7, 5, 5, CPU)
    assert torch.equal(middle, x[7:12])


def test_windows_of_a_tiny_split(small_data):
    with pytest.raises(UserError, match='block_size'): Windows(small_data, 'val', read_meta(small_data), 10 ** 6)
