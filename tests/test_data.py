"""Corpora, shards, the order of windows, tokenizers."""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import requests
import tiktoken
import torch
from conftest import program, refused
from hypothesis import given, settings as hypothesis_settings, strategies as st

import prepare_data
from engine.files import UserError, checksum
from engine.shards import HEADER_BYTES, MAGIC, get_tokenizer, open_shard, read_meta
from engine.tasks import TASKS
from engine.windows import Batch, Windows, shuffle
from prepare_data import DataSettings, write_dataset

CPU = torch.device('cpu')
PROGRAM = os.path.join(os.path.dirname(prepare_data.__file__), 'prepare_data.py')


def write(folder, texts, val_fraction=0.3):
    """A data set of bytes from these documents; returns its meta.json."""
    return write_dataset(str(folder), texts, get_tokenizer('byte'), val_fraction, 'test')


def numbered(n):
    """n short documents, all different."""
    return [f'text {i}'.encode() for i in range(n)]


def write_files(folder, n):
    """The same as files 0.txt, 1.txt, ... of a new folder."""
    folder.mkdir()
    for i, text in enumerate(numbered(n)):
        (folder / f'{i}.txt').write_bytes(text)


def read_tokens(path):
    return np.fromfile(path, np.uint16)[HEADER_BYTES // 2:]


def documents(folder, meta):
    """{split: set of documents} read back from the shards, the slow way."""
    found = {}
    for split in ('train', 'val'):
        names = [shard['name'] for shard in meta[split]['shards']]
        tokens = np.concatenate([read_tokens(os.path.join(folder, name)) for name in names])
        ends = np.flatnonzero(tokens == 256) + 1
        parts = [part[part < 256] for part in np.split(tokens, ends)]
        found[split] = {bytes(part.astype(np.uint8)) for part in parts} - {b''}
    return found


def sides(folder, texts):
    """The names in `texts` whose text is whole on each side, as two sets."""
    found = documents(folder, read_meta(str(folder)))
    return [{name for name, text in texts.items() if text in found[split]}
            for split in ('train', 'val')]


def contents(folder):
    """{name: checksum} of all files in a folder."""
    return {name: checksum(folder / name) for name in os.listdir(folder)}


# --------------------------------------------------------------------------------------------------
# what a data set holds


def test_shards_hold_every_document_once(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, 'SHARD_TOKENS', 1000)
    folder = tmp_path / 'd'
    texts = [bytes([65 + i % 26]) * (i + 1) + str(i).encode() for i in range(100)]
    meta = write(folder, texts)
    train, val = meta['train'], meta['val']

    found = documents(folder, meta)
    assert found['train'] | found['val'] == set(texts)
    assert not found['train'] & found['val']

    n_bytes = sum(map(len, texts))
    assert train['bytes'] + val['bytes'] == n_bytes
    assert train['tokens'] + val['tokens'] == n_bytes + len(texts)
    assert len(train['shards']) > 2
    assert all(shard['tokens'] == 1000 for shard in train['shards'][:-1])

    header = np.fromfile(folder / 'train_000000.bin', np.int32, 256)
    assert header[:3].tolist() == [20240520, 1, 1000]
    assert not header[3:].any()

    shards = train['shards'] + val['shards']
    for shard in shards:
        assert checksum(folder / shard['name']) == shard['sha256']
    names = [shard['name'] for shard in shards]
    assert sorted(os.listdir(folder)) == sorted(['meta.json'] + names)


def test_more_text_moves_no_document(tmp_path):
    texts = [f'document {i}'.encode() for i in range(60)]
    few = documents(tmp_path / 'a', write(tmp_path / 'a', texts[::2]))
    many = documents(tmp_path / 'b', write(tmp_path / 'b', texts))
    assert few['val']
    assert few['val'] <= many['val']
    assert few['train'] <= many['train']


def test_builtin_corpus_is_the_standard_library():
    texts = list(prepare_data.python_sources(packages=False))
    assert texts == list(prepare_data.python_sources(packages=False))
    with open(os.path.join(os.path.dirname(os.__file__), 'argparse.py'), 'rb') as f:
        assert f.read().replace(b'\r\n', b'\n') in texts
    assert 5e6 < sum(map(len, texts)) < 3e7
    assert not any(b'site-packages' in text and b'import pytest' in text for text in texts)


def test_packages_add_installed_ones():
    with open(np.__file__, 'rb') as f:
        source = f.read().replace(b'\r\n', b'\n')
    assert any(text == source for text in prepare_data.python_sources(packages=True))


def write_mixture(folder):
    """
    Files with any bytes in folder/texts, records in folder/all.jsonl, and files that are left out.
    Returns {name: text} of all documents.
    """
    texts = {f'{i}.txt': f'text {i}: naïve ☃\r\n'.encode() * (i + 1) for i in range(40)}
    texts['latin1.txt'] = 'caf\xe9 cr\xe8me\n'.encode('latin-1') * 50
    texts['settings.py'] = b'name = "a text like others"\n'
    (folder / 'texts' / 'sub').mkdir(parents=True)
    for i, (name, text) in enumerate(texts.items()):
        place = 'texts/sub' if i % 2 else 'texts'
        (folder / place / name).write_bytes(text)

    lines = []
    for i in range(30):
        record = f'record {i} "☃"\n' * 3
        texts[f'r{i}'] = record.encode()
        lines.append(json.dumps(dict(id=i, text=record), ensure_ascii=bool(i % 2)))
    (folder / 'all.jsonl').write_text('\n\n'.join(lines), encoding='utf-8')

    (folder / 'texts' / 'picture.bin').write_bytes(b'\x89PNG\0\0')
    (folder / 'texts' / '.hidden').write_bytes(b'secret')
    os.mkfifo(folder / 'texts' / 'pipe')
    return texts


def test_your_own_files_through_the_command_line(tmp_path):
    texts = write_mixture(tmp_path)
    command = [PROGRAM, 'texts', 'all.jsonl', '--name=mine', '--val_fraction=0.2']
    program(*command, cwd=tmp_path)
    mine = tmp_path / 'data' / 'mine'
    train, val = sides(mine, texts)
    assert train | val == set(texts), "every document whole, byte for byte"
    assert not train & val, "on one side"
    assert len(val) >= 3

    meta = read_meta(str(mine))
    n_bytes = sum(map(len, texts.values()))
    n_tokens = meta['train']['tokens'] + meta['val']['tokens']
    assert meta['train']['bytes'] + meta['val']['bytes'] == n_bytes
    assert n_tokens == n_bytes + len(texts), "and one end-of-text after each"
    assert 'shard' in program(PROGRAM, '--check', 'data/mine', cwd=tmp_path).stdout

    for i in range(40, 80):
        (tmp_path / 'texts' / f'{i}.txt').write_bytes(b'another text %d' % i)
    program(*command, cwd=tmp_path)
    assert sides(mine, texts) == [train, val], "more files move no document"


def test_files_are_read_in_order_and_hidden_ones_not_at_all(tmp_path, monkeypatch):
    for name in ('.git/x.txt', 'b.txt', 'a.txt', 'c/d.txt', '.hidden'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('t')
    walk = os.walk

    def backwards(*args, **options):
        for folder, subfolders, files in walk(*args, **options):
            yield folder, subfolders, sorted(files, reverse=True)

    monkeypatch.setattr(os, 'walk', backwards)
    found = [os.path.relpath(path, tmp_path) for path in prepare_data.walk(str(tmp_path))]
    assert found == ['a.txt', 'b.txt', os.path.join('c', 'd.txt')]


@pytest.mark.parametrize('line', [
    '{"text": 3}',
    '{"txt": "a"}',
    '["text"]',
    'text',
    '{"text": "a"',
    '3',
    pytest.param('[' * 100_000, id='brackets'),
    '\xff',
])
def test_a_bad_jsonl_line_is_named(tmp_path, line):
    lines = '{"text": "good"}\n\n' + line + '\n'
    (tmp_path / 'a.jsonl').write_text(lines, encoding='latin-1')
    with pytest.raises(UserError, match=r'a\.jsonl:3: ') as error:
        list(prepare_data.your_texts([str(tmp_path)], 10 ** 6, lambda done: None))
    assert '\n' not in str(error.value)


# --------------------------------------------------------------------------------------------------
# cutting long texts


def test_a_single_file_is_cut_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = ''.join(f'line {i} of a long file\n' for i in range(4000)).encode()
    (tmp_path / 'book.txt').write_bytes(text)
    prepare_data.main(['book.txt'])
    meta = read_meta('data/book')
    assert meta['train']['bytes'] + meta['val']['bytes'] == len(text)
    assert 0.02 < meta['val']['bytes'] / len(text) < 0.3
    found = documents('data/book', meta)
    for piece in found['train'] | found['val']:
        assert piece.startswith(b'line')
        assert piece.endswith(b'file\n')


def split_of(text, val_fraction):
    """(all pieces, those for val) of one text that is cut."""
    f = io.BufferedReader(io.BytesIO(text))
    pieces = list(prepare_data.cut(f, len(text), 0, val_fraction))
    assert b''.join(pieces) == text
    return pieces, [piece for piece in pieces if prepare_data.position(piece) < val_fraction]


def some_text(size, seed):
    """A piece of this program's own source."""
    with open(PROGRAM, 'rb') as f:
        source = f.read()
    source = source * (1 + size // len(source))     # the same lines again, in other pieces
    first = np.random.default_rng(seed).integers(1 + len(source) - size)
    return source[first:first + size]


@pytest.mark.parametrize('val_fraction, smallest', [(0.02, 3000), (0.1, 400), (0.3, 200)])
def test_a_single_text_of_any_size_is_split_near_the_fraction(val_fraction, smallest):
    for size in (smallest, 2 * smallest, 7000, 20_000, 54_000):
        for seed in range(6):
            _, val = split_of(some_text(size, seed), val_fraction)
            share = sum(map(len, val)) / size
            assert val_fraction / 1.7 < share < 1.7 * val_fraction, (size, seed)


@pytest.mark.parametrize('text', [
    b'one line without end, ' * 40,
    '日本語の文章。'.encode() * 60 + bytes(range(256)),
    b'\n' * 300 + bytes(range(10, 200)) * 3,
    b'\r\n'.join(b'row %d' % i for i in range(99)),
    bytes(range(256)) * 4 + b'end',
])
def test_texts_of_odd_form_are_split_too(text):
    _, val = split_of(text, 0.1)
    assert 0.02 < sum(map(len, val)) / len(text) < 0.3


def test_more_files_move_no_piece_of_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / 'texts'
    folder.mkdir()
    before = {'train': set(), 'val': set()}
    for i in range(4):
        (folder / f'{9 - i}.txt').write_bytes(some_text(3000 + 700 * i, i))
        monkeypatch.setattr(prepare_data, 'DOCUMENT_BYTES', 1)  # all are cut, however many
        prepare_data.main(['texts'])
        found = documents('data/texts', read_meta('data/texts'))
        assert before['train'] <= found['train'] and before['val'] <= found['val']
        assert not found['train'] & found['val']
        before = found


@pytest.mark.parametrize('suffix', ['txt', 'py', 'jsonl'])
def test_a_first_try_with_one_small_file(tmp_path, monkeypatch, suffix):
    monkeypatch.chdir(tmp_path)
    for seed in range(8):
        text = some_text(1000 + 700 * seed, seed)
        if suffix == 'jsonl':
            text = json.dumps(dict(text=text.decode(errors='replace'))).encode()
        (tmp_path / f'mine.{suffix}').write_bytes(text)
        prepare_data.main([f'mine.{suffix}'])
        meta = read_meta('data/mine')
        share = meta['val']['bytes'] / (meta['val']['bytes'] + meta['train']['bytes'])
        assert 0.05 < share < 0.2


ANY_BYTES = st.one_of(
    st.text('aé☃\U0001f600\n', max_size=3000).map(str.encode),
    st.binary(max_size=3000),
    st.integers(0, 9).map(lambda n: b'x' * n + '☃'.encode() * 700),
)


@hypothesis_settings(max_examples=100, deadline=None, derandomize=True)
@given(ANY_BYTES, st.sampled_from([0, 700, 10_000]))
def test_cutting_loses_nothing_and_splits_no_character(text, longest):
    f = io.BufferedReader(io.BytesIO(text))
    pieces = list(prepare_data.cut(f, len(text), longest))
    assert b''.join(pieces) == text
    assert all(pieces)
    assert len(pieces) <= 1 or len(text) > longest
    try:
        text.decode()
    except UnicodeDecodeError:
        return
    for piece in pieces:
        piece.decode()


def test_large_files_are_never_in_memory_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, 'DOCUMENT_BYTES', 1000)
    (tmp_path / 'a.txt').write_bytes(b'no line end here ' * 6000)
    (tmp_path / 'b.jsonl').write_text(json.dumps(dict(text='x\n' * 50_000)))
    pieces = list(prepare_data.your_texts([str(tmp_path)], 1000, lambda done: None))
    assert sum(map(len, pieces)) == 17 * 6000 + 100_000
    assert max(map(len, pieces)) <= 2003


# --------------------------------------------------------------------------------------------------
# tokenizers


@pytest.fixture(scope='module')
def words():
    """A tokenizer with merges, like gpt2, that needs no download."""
    pairs = [b'th', b'he', b'the', b' t', b' the', b'in', b'er', b' a', b'\xc3\xa9']
    tokens = [bytes([i]) for i in range(256)] + pairs
    return tiktoken.Encoding('words', pat_str=r' ?\p{L}+|\s+|[^\s\p{L}]+',
                             mergeable_ranks={token: i for i, token in enumerate(tokens)},
                             special_tokens={'<|endoftext|>': len(tokens)})


def test_tokens_are_tiktokens_whatever_the_threads_do(tmp_path, words):
    texts = []
    for i in range(60):
        texts.append(f'the other thé <|endoftext|> {i} '.encode() * (1 + 977 * i % 400))
    texts.append(b'caf\xe9 \xff')
    meta = write_dataset(str(tmp_path / 'd'), iter(texts), words, 0.3, 'test')

    expected = []
    for text in texts:
        position = int(hashlib.sha256(text).hexdigest()[:16], 16) / 2 ** 64
        if position >= 0.3:
            expected += words.encode_ordinary(text.decode('utf-8', 'replace'))
            expected += [words.eot_token]
    train = read_tokens(tmp_path / 'd' / 'train_000000.bin').tolist()
    assert train == expected
    assert meta['n_tokens'] == 266
    assert meta['train']['tokens'] == len(train)


def test_byte_encoding_is_what_tiktoken_says():
    text = 'def f(x):\n\treturn "naïve ☃"\r\n'
    tokenizer = get_tokenizer('byte')
    ours = prepare_data.encode(tokenizer, text.encode()).tolist()
    assert ours == tokenizer.encode_ordinary(text) + [256]
    assert ours == [*text.encode(), 256]
    assert tokenizer.decode(tokenizer.encode_ordinary(text)) == text
    assert tokenizer.n_vocab == 257
    assert tokenizer.eot_token == 256


def test_unknown_tokenizer():
    with pytest.raises(UserError, match='byte'):
        get_tokenizer('nonsense')


def test_unreachable_tokenizer(monkeypatch):
    """No network: the message names the tokenizer that needs none."""
    def no_route(name):
        raise requests.exceptions.ConnectionError('no route')

    monkeypatch.setattr(tiktoken, 'get_encoding', no_route)
    with pytest.raises(UserError, match='--tokenizer=byte'):
        get_tokenizer('gpt2')


def test_a_vocabulary_that_cannot_be_fetched(tmp_path):
    (tmp_path / 'a.txt').write_text('text')
    nowhere = 'http://127.0.0.1:9'
    done = program(PROGRAM, 'a.txt', '--tokenizer=gpt2', cwd=tmp_path, ok=False, no_proxy='',
                   https_proxy=nowhere, HTTPS_PROXY=nowhere,
                   TIKTOKEN_CACHE_DIR=str(tmp_path / 'none'))
    refused(done, 'gpt2', 'could not be fetched', '--tokenizer=byte')
    assert os.listdir(tmp_path) == ['a.txt']


def test_a_vocabulary_that_needs_more_than_16_bits_is_refused(tmp_path):
    big = tiktoken.Encoding('big', pat_str=r'(?s:.)',
                            mergeable_ranks={bytes([i]): i for i in range(256)},
                            special_tokens={'<|endoftext|>': 2 ** 16})
    with pytest.raises(UserError, match='16 bits'):
        write_dataset(str(tmp_path / 'd'), [b'a', b'b'], big, 0.3, 'test')


# --------------------------------------------------------------------------------------------------
# refusals


@pytest.mark.parametrize('texts, words', [
    ([], 'no text'),
    ([b''], 'no text'),
    ([b'one document'], 'no sensible split'),
])
def test_too_little_text(tmp_path, texts, words):
    with pytest.raises(UserError, match=words):
        write(tmp_path / 'd', texts)
    assert os.listdir(tmp_path / 'd') == []


@pytest.mark.parametrize('argv, words', [
    (['missing.txt'], ['missing.txt', 'no such file']),
    (['--val_fraction=1.5'], ['val_fraction']),
    (['--tokeniser=byte'], ['tokenizer']),
    (['empty'], ['empty', 'no text']),
    (['--tokenizer=nope'], ['byte']),
])
def test_command_line_refusals(tmp_path, argv, words):
    (tmp_path / 'empty').mkdir()
    done = program(PROGRAM, *argv, cwd=tmp_path, ok=False)
    refused(done, *words)


def test_data_sets_are_not_replaced_by_mistake(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ('notes.v1', 'notes.v2'):
        (tmp_path / name).write_text('Some words of a text. ' * 99)
    prepare_data.main(['notes.v1'])
    before = (tmp_path / 'data' / 'notes' / 'meta.json').read_bytes()

    same_default_name = [
        ['notes.v2'],
        ['notes.v1', 'notes.v2'],
    ]
    made_from = 'data/notes was made from notes.v1: give another --name, or --name=notes'
    for argv in same_default_name:
        with pytest.raises(UserError, match=made_from):
            prepare_data.main(argv)

    without_check = [
        ['data/notes'],
        ['data/notes', '--name=notes', '--tokenizer=byte'],
        ['notes.v1', 'data/notes', '--name=more'],
    ]
    for argv in without_check:
        with pytest.raises(UserError, match='data/notes: a data set, no text.*--check data/notes'):
            prepare_data.main(argv)

    assert (tmp_path / 'data' / 'notes' / 'meta.json').read_bytes() == before
    prepare_data.main(['notes.v1'])
    prepare_data.main(['notes.v2', '--name=notes'])
    assert read_meta('data/notes')['source'] == 'notes.v2'


def test_missing_data_names_its_command():
    command = 'make data/mine with: python prepare_data.py PATH... --name=mine$'
    with pytest.raises(UserError, match=command):
        read_meta('data/mine')
    for name in ('shakespeare', *prepare_data.FINEWEB):
        with pytest.raises(UserError, match=f'python prepare_data.py {name}$'):
            read_meta(f'data/{name}')
    with pytest.raises(UserError, match='python prepare_data.py$'):
        read_meta('nowhere/python')
    with pytest.raises(UserError, match='python prepare_data.py --packages=True$'):
        read_meta('nowhere/python-packages')


def test_preparing_does_not_load_torch(tmp_path):
    for i in range(20):
        (tmp_path / f'{i}.txt').write_text(f'text {i} ' * 50)
    code = ("import sys, prepare_data; prepare_data.main(sys.argv[1:]); "
            "assert 'torch' not in sys.modules")
    program('-c', code, '.', '--val_fraction=0.3', cwd=tmp_path)


# --------------------------------------------------------------------------------------------------
# what can go wrong on the way: a data set is whole or absent


def test_failure_leaves_the_old_data_and_no_rest(tmp_path):
    folder = tmp_path / 'd'
    write(folder, [f'old {i}'.encode() for i in range(50)])
    before = contents(folder)

    def broken():
        for i in range(50):
            yield f"new {i}".encode()
        raise UserError('source vanished')

    with pytest.raises(UserError):
        write(folder, broken())
    assert contents(folder) == before


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / 'data').write_text('a file is in the way')
    done = program(PROGRAM, cwd=tmp_path, ok=False)
    refused(done, 'data', 'cannot be written')


LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (10 ** 6, 10 ** 6))
runpy.run_path(sys.argv.pop(1), run_name='__main__')
"""


@pytest.mark.skipif(sys.platform == 'win32', reason="needs limits on file sizes")
def test_a_disk_that_takes_no_more(tmp_path):
    done = program('-c', LIMITED, PROGRAM, cwd=tmp_path, ok=False)
    refused(done, 'data/python', 'cannot be written', 'File too large')
    assert os.listdir(tmp_path / 'data' / 'python') == []


@pytest.mark.parametrize('word, message', [
    ('train_', 'data/mine: cannot be written .Permission'),
    ('7.txt', '7.txt: cannot be read .Permission'),
])
def test_no_permission(tmp_path, monkeypatch, word, message):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path / 'mine', 40)

    def denied(path, mode='r', **more):
        if word in str(path) and str(path).endswith(('.bin', '.txt')):
            raise PermissionError(13, 'Permission denied', path)
        return open(path, mode, **more)

    monkeypatch.setattr(prepare_data, 'open', denied, raising=False)
    for _ in range(2):
        with pytest.raises(UserError, match=message):
            prepare_data.main(['mine'])
        assert os.listdir(tmp_path / 'data' / 'mine') == []


@pytest.mark.parametrize('what, message', [
    ('data', 'data/mine: cannot be written .No such file'),
    ('mine', 'txt: cannot be read .No such file'),
])
def test_a_folder_vanishes(tmp_path, monkeypatch, what, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare_data, 'SHARD_TOKENS', 500)
    write_files(tmp_path / 'mine', 200)
    your_texts = prepare_data.your_texts

    def vanishing(*args):
        for i, text in enumerate(your_texts(*args)):
            if i == 100:
                shutil.rmtree(what)
            yield text

    monkeypatch.setattr(prepare_data, 'your_texts', vanishing)
    with pytest.raises(UserError, match=message):
        prepare_data.main(['mine'])
    if what == 'mine':
        assert os.listdir(tmp_path / 'data' / 'mine') == []


def test_two_at_once_take_turns(tmp_path):
    processes = []
    for _ in range(3):
        processes.append(subprocess.Popen([sys.executable, PROGRAM], cwd=tmp_path, text=True,
                                          stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0
        assert not err
        assert 'data/python: 9,' in out
    prepare_data.check(str(tmp_path / 'data' / 'python'))


def test_a_data_set_is_complete_or_says_it_is_not(tmp_path, monkeypatch):
    """
    While files are moved there is no meta.json, it comes last, and what it names is on the disk by
    then.
    """
    folder = tmp_path / 'd'
    write(folder, numbered(50))
    replace, fsync = os.replace, os.fsync
    moved = []   # (name, whether there was a meta.json, whether the file was on the disk)
    synced = []  # inodes

    def replace_and_note(source, target):
        described = os.path.exists(folder / 'meta.json')
        on_disk = os.stat(source).st_ino in synced
        moved.append((os.path.basename(target), described, on_disk))
        replace(source, target)

    def fsync_and_note(f):
        synced.append(os.fstat(f).st_ino)
        fsync(f)

    monkeypatch.setattr(os, 'replace', replace_and_note)
    monkeypatch.setattr(os, 'fsync', fsync_and_note)
    write(folder, numbered(50))

    *shards, (last, described, _) = moved
    assert {name for name, _, _ in shards} == {'train_000000.bin', 'val_000000.bin'}
    assert last == 'meta.json'
    assert not described
    for _, described, on_disk in shards:
        assert on_disk
        assert not described


def test_what_a_killed_run_left_is_cleared(tmp_path):
    unfinished = tmp_path / 'd' / '.unfinished'
    unfinished.mkdir(parents=True)
    (unfinished / 'train_000007.bin').write_bytes(b'rest')
    write(tmp_path / 'd', numbered(50))
    names = sorted(os.listdir(tmp_path / 'd'))
    assert names == ['meta.json', 'train_000000.bin', 'val_000000.bin']


@pytest.mark.parametrize('damage', ['shard', 'size', 'token', 'tokens', 'gone'])
def test_check_finds_damage(small_data, tmp_path, damage, capsys):
    folder = tmp_path / 'd'
    shutil.copytree(small_data, folder)
    prepare_data.main(['--check', str(folder)])
    assert 'val is whole' in capsys.readouterr().out

    path = folder / 'val_000000.bin'
    content = bytearray(path.read_bytes())
    meta = json.loads((folder / 'meta.json').read_text())
    if damage == 'shard':
        content[2000] ^= 1
    if damage == 'size':
        del content[-2:]
    if damage == 'token':
        content[2001] = 2
    if damage == 'tokens':
        meta['val']['shards'][0]['tokens'] += 1
        meta['val']['tokens'] += 1
    path.write_bytes(content)
    (folder / 'meta.json').write_text(json.dumps(meta))
    if damage == 'gone':
        path.unlink()
    with pytest.raises(UserError, match='val_000000.bin'):
        prepare_data.main(['--check', str(folder)])


# --------------------------------------------------------------------------------------------------
# reading shards


@pytest.mark.parametrize('damage', ['short', 'long', 'magic', 'version', 'empty', 'gone'])
def test_damaged_shards_are_refused(small_data, tmp_path, damage):
    with open(os.path.join(small_data, 'train_000000.bin'), 'rb') as f:
        good = f.read()
    bad = {
        'short': good[:-2],
        'long': good + b'xx',
        'magic': b'\0' * 4 + good[4:],
        'version': good[:4] + b'\2' + good[5:],
        'empty': b'',
    }
    path = tmp_path / 'shard.bin'
    if damage != 'gone':
        path.write_bytes(bad[damage])
    with pytest.raises(UserError) as error:
        open_shard(str(path))
    assert str(path) in str(error.value)
    assert 'prepare the data again' in str(error.value)


@hypothesis_settings(max_examples=100, deadline=None, derandomize=True)
@given(st.binary(max_size=2100))
def test_no_file_makes_the_shard_reader_fail_otherwise(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / 'any.bin'
    right_start = np.array([MAGIC, 1], np.int32).tobytes()
    for start in (b'', right_start):
        path.write_bytes(start + content)
        try:
            tokens = open_shard(str(path))
        except UserError:
            continue
        assert len(tokens) * 2 + HEADER_BYTES == len(start + content)
        del tokens  # before the file it maps is written again


NO_SPLITS = '{"tokenizer": 3, "n_tokens": 2, "eot": 1, "train": {}, "val": {}}'
NO_SHARDS = ('{"tokenizer": "byte", "n_tokens": 257, "eot": 256, '
             '"train": {"bytes": 1, "tokens": 1, "shards": "ab"}, "val": 0}')
NO_NUMBER = ('{"tokenizer": "byte", "n_tokens": "257", "eot": 256, "source": "test", '
             '"train": {"bytes": 1, "tokens": 1, "shards": []}, '
             '"val": {"bytes": 1, "tokens": 1, "shards": []}}')


@pytest.mark.parametrize('text', [
    None,
    '',
    '{',
    '[]',
    '{"tokenizer": "byte"}',
    NO_SPLITS,
    NO_SHARDS,
    NO_NUMBER,
])
def test_bad_meta(tmp_path, text):
    if text is not None:
        (tmp_path / 'meta.json').write_text(text)
    with pytest.raises(UserError, match='prepare') as error:
        read_meta(str(tmp_path))
    assert '\n' not in str(error.value)


# --------------------------------------------------------------------------------------------------
# the order of windows


@pytest.mark.parametrize('n', [1, 2, 3, 7, 16, 17, 1000, 4097])
def test_shuffle_is_a_permutation(n):
    order = shuffle(np.arange(n), n, (1, 2))
    assert sorted(order.tolist()) == list(range(n))
    if n < 1000:
        return
    other_epoch = shuffle(np.arange(n), n, (1, 3))
    other_seed = shuffle(np.arange(n), n, (2, 3))
    assert order.tolist() != other_epoch.tolist()
    assert other_epoch.tolist() != other_seed.tolist()

    correlation = np.corrcoef(np.arange(n), order)[0, 1]
    still_near = np.abs(np.diff(order)) < n / 100
    assert abs(correlation) < 0.1, "uncorrelated with the place"
    assert np.mean(still_near) < 0.05, "neighbours do not stay neighbours"

    part = shuffle(np.arange(500, 520), n, (1, 2))
    assert order[500:520].tolist() == part.tolist()


def test_shuffle_needs_no_memory_for_huge_sets():
    n = 10 ** 12
    order = shuffle(np.arange(n - 100, n), n, (0, 0))
    assert len(set(order.tolist())) == 100
    assert 0 <= order.min()
    assert order.max() < n


def rows(tokens):
    """The rows of (B, T) tokens, sorted."""
    return sorted(tuple(row) for row in tokens.tolist())


def test_windows_cover_an_epoch_across_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, 'SHARD_TOKENS', 1000)
    texts = [np.random.default_rng(i).integers(0, 256, 300, dtype=np.uint8) for i in range(40)]
    meta = write(tmp_path / 'd', [text.tobytes() for text in texts])
    data = Windows(str(tmp_path / 'd'), 'train', meta, 16)
    assert data.n == sum((shard['tokens'] - 1) // 16 for shard in meta['train']['shards'])

    x, y = data.sample(0, data.n, 5, CPU)
    assert torch.equal(x[:, 1:], y[:, :-1])
    straight, _ = data.get(np.arange(data.n), CPU)
    assert rows(x) == rows(straight)
    assert not torch.equal(x, straight)

    # the second epoch: all of it again, in another order
    again, _ = data.sample(data.n, data.n, 5, CPU)
    assert rows(again) == rows(straight)
    assert not torch.equal(again, x)

    middle, _ = data.sample(7, 5, 5, CPU)
    assert torch.equal(middle, x[7:12])


def test_a_seed_has_its_own_order(small_data):
    data = Windows(small_data, 'train', read_meta(small_data), 16)
    one, _ = data.sample(0, 8, 1, CPU)
    other, _ = data.sample(0, 8, 2, CPU)
    assert not torch.equal(one, other)


def test_windows_of_a_tiny_split(small_data):
    with pytest.raises(UserError, match='block_size'):
        Windows(small_data, 'val', read_meta(small_data), 10 ** 6)


def test_batches_read_ahead_are_the_same(small_data):
    meta = read_meta(small_data)
    plain = Windows(small_data, 'train', meta, 16)
    ahead = Windows(small_data, 'train', meta, 16)
    for first in (0, 8, 16, 4, 40, plain.n - 4):  # also where the guess was wrong
        x, y = plain.sample(first, 8, 1, CPU)
        ahead_x, ahead_y = ahead.sample(first, 8, 1, CPU, then=first + 8)
        assert torch.equal(x, ahead_x)
        assert torch.equal(y, ahead_y)
    last = Batch(plain.n + 4, 8, 1, CPU)
    assert ahead.ahead == last
    assert torch.equal(ahead.ahead_tokens.result(), ahead.read_batch(last))
    assert 0 < ahead.waited < 60


def resident():
    """kB of files in this process's memory."""
    with open('/proc/self/status') as f:
        return sum(int(line.split()[1]) for line in f if line.startswith(('RssFile', 'RssShmem')))


@pytest.mark.skipif(not os.path.exists('/proc/self/status'), reason="needs /proc")
def test_reading_needs_the_same_memory_for_any_number_of_shards(tmp_path):
    n = 2 * 10 ** 7
    shards = [dict(name=f'{i}.bin', tokens=n) for i in range(4)]
    for shard in shards:  # 160 MB in all, holes that take no space
        path = tmp_path / shard['name']
        np.array([MAGIC, 1, n], np.int32).tofile(path)
        os.truncate(path, HEADER_BYTES + 2 * n)
    data = Windows(str(tmp_path), 'train', dict(n_tokens=257, train=dict(shards=shards)), 2 ** 16)
    assert data.n == 4 * (n // 2 ** 16)

    before = resident()
    for window in range(data.n):
        data.get([window], CPU)
    assert resident() - before < 20_000


def test_data_that_vanishes_while_it_is_read(small_data, tmp_path):
    folder = tmp_path / 'd'
    shutil.copytree(small_data, folder)
    data = Windows(str(folder), 'train', read_meta(small_data), 16)
    data.sample(0, 4, 1, CPU)

    os.truncate(folder / 'train_000000.bin', 1100)
    with pytest.raises(UserError, match='shorter'):
        data.get([data.n - 1], CPU)

    with open(folder / 'train_000000.bin', 'r+b') as f:
        f.seek(HEADER_BYTES)
        f.write(b'\1\1')
    with pytest.raises(UserError, match='token 257 of a vocabulary of 257'):
        data.get([0], CPU)

    shutil.rmtree(folder)
    with pytest.raises(UserError, match='cannot be read'):
        data.sample(8, 4, 1, CPU, then=12)


@pytest.mark.parametrize('name', TASKS)
def test_of_a_task_only_answers_are_targets(tmp_path, name):
    folder = str(tmp_path / 'd')
    prepare_data.prepare_task(DataSettings(size=3, problems=200), name, folder)
    data = Windows(folder, 'train', read_meta(folder), 50)
    x, y = data.sample(0, data.n, 1, CPU)
    whole, counted = 0, 0
    for inputs, targets in zip(x.tolist(), y.tolist()):
        text = bytes(token % 256 for token in inputs).decode('latin-1')     # end-of-text is NUL
        question, started = False, False
        for i, token in enumerate(inputs):
            if token == 256:
                started, question = True, False
            if token == ord(TASKS[name].end):
                question = started
            if not question:
                assert targets[i] == -1, text[:i]
                continue
            counted += 1
            if i + 1 < len(inputs):
                assert targets[i] == inputs[i + 1]
            if targets[i] == 256:       # a problem that is whole: its answer is right
                problem = text[:i + 1].rpartition('\0')[2]
                asked, mark, answer = problem.partition(TASKS[name].end)
                assert answer == TASKS[name].answer(asked + mark)
                whole += 1
    assert whole > 100
    assert counted < y.numel() / 2
    one, _ = data.get([3], CPU)
    assert one.min() >= 0, "inputs and targets do not share memory"
