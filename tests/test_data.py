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
import tiktoken
import torch
from conftest import program, refused
from hypothesis import given, settings as hypothesis_settings, strategies as st

import prepare_data
from engine.errors import UserError
from engine.files import checksum
from engine.shards import HEADER_BYTES, MAGIC, get_tokenizer, open_shard, read_meta
from engine.windows import Batch, Windows, shuffle
from prepare_data import write_dataset

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
    texts = list(prepare_data.python_sources(packages=False))
    assert texts == list(prepare_data.python_sources(packages=False))
    with open(os.path.join(os.path.dirname(os.__file__), 'argparse.py'), 'rb') as f: assert f.read().replace(b'\r\n', b'\n') in texts
    assert 5e6 < sum(map(len, texts)) < 3e7 and not any(b'site-packages' in t and b'import pytest' in t for t in texts)


def test_packages_add_installed_ones():
    with open(np.__file__, 'rb') as f: source = f.read().replace(b'\r\n', b'\n')
    assert any(t == source for t in prepare_data.python_sources(packages=True))


PROGRAM = os.path.join(os.path.dirname(prepare_data.__file__), 'prepare_data.py')


def sides(folder, texts):
    """The names in `texts` whose text is whole on each side, as two sets."""
    meta = read_meta(str(folder))
    found = documents(folder, meta)
    return [{name for name, text in texts.items() if text in found[split]} for split in ('train', 'val')]


def test_your_own_files_through_the_command_line(tmp_path):
    texts = {f'{i}.txt': f'text {i}: naïve ☃\r\n'.encode() * (i + 1) for i in range(40)}
    texts['latin1.txt'] = 'caf\xe9 cr\xe8me\n'.encode('latin-1') * 50
    texts['settings.py'] = b'name = "a text like others"\n'
    records = {f'r{i}': f'record {i} "☃"\n' * 3 for i in range(30)}
    (tmp_path / 'texts' / 'sub').mkdir(parents=True)
    for i, (name, text) in enumerate(texts.items()): (tmp_path / ('texts/sub' if i % 2 else 'texts') / name).write_bytes(text)
    lines = [json.dumps(dict(id=i, text=text), ensure_ascii=i % 2) for i, text in enumerate(records.values())]
    (tmp_path / 'all.jsonl').write_text('\n\n'.join(lines), encoding='utf-8')
    (tmp_path / 'texts' / 'picture.bin').write_bytes(b'\x89PNG\0\0')
    (tmp_path / 'texts' / '.hidden').write_bytes(b'secret')
    os.mkfifo(tmp_path / 'texts' / 'pipe')
    program(PROGRAM, 'texts', 'all.jsonl', '--name=mine', '--val_fraction=0.2', cwd=tmp_path)
    everything = {**texts, **{name: text.encode() for name, text in records.items()}}
    train, val = sides(tmp_path / 'data' / 'mine', everything)
    assert train | val == set(everything) and not train & val, "every document whole, byte for byte, on one side"
    meta, total = read_meta(str(tmp_path / 'data' / 'mine')), sum(map(len, everything.values()))
    assert meta['train']['bytes'] + meta['val']['bytes'] == total and len(val) >= 3
    assert meta['train']['tokens'] + meta['val']['tokens'] == total + len(everything), "and one end-of-text after each"
    assert 'shard' in program(PROGRAM, '--check', 'data/mine', cwd=tmp_path).stdout

    for i in range(40, 80): (tmp_path / 'texts' / f'{i}.txt').write_bytes(b'another text %d' % i)
    program(PROGRAM, 'texts', 'all.jsonl', '--name=mine', '--val_fraction=0.2', cwd=tmp_path)
    assert sides(tmp_path / 'data' / 'mine', everything) == [train, val], "more files move no document"


def test_a_single_file_is_cut_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = ''.join(f'line {i} of a long file\n' for i in range(4000)).encode()
    (tmp_path / 'book.txt').write_bytes(text)
    prepare_data.main(['book.txt'])
    meta = read_meta('data/book')
    assert meta['train']['bytes'] + meta['val']['bytes'] == len(text) and 0.02 < meta['val']['bytes'] / len(text) < 0.3
    found = documents('data/book', meta)
    assert all(piece.startswith(b'line') and piece.endswith(b'file\n') for split in found.values() for piece in split)


@hypothesis_settings(max_examples=100, deadline=None, derandomize=True)
@given(st.one_of(st.text('aé☃\U0001f600\n', max_size=3000).map(str.encode), st.binary(max_size=3000),
                 st.integers(0, 9).map(lambda n: b'x' * n + '☃'.encode() * 700)), st.sampled_from([0, 700, 10_000]))
def test_cutting_loses_nothing_and_splits_no_character(text, whole):
    pieces = list(prepare_data.cut(io.BufferedReader(io.BytesIO(text)), len(text), whole))
    assert b''.join(pieces) == text and all(pieces) and (len(pieces) <= 1 or len(text) > whole)
    try: text.decode()
    except UnicodeDecodeError: return
    for piece in pieces: piece.decode()


def test_large_files_are_never_in_memory_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, 'DOCUMENT_BYTES', 1000)
    (tmp_path / 'a.txt').write_bytes(b'no line end here ' * 6000)
    (tmp_path / 'b.jsonl').write_text(json.dumps(dict(text='x\n' * 50_000)))
    pieces = list(prepare_data.your_texts([str(tmp_path)], 1000, lambda done: None))
    assert sum(map(len, pieces)) == 17 * 6000 + 100_000 and max(map(len, pieces)) <= 2003


@pytest.mark.parametrize('line', ['{"text": 3}', '{"txt": "a"}', '["text"]', 'text', '{"text": "a"', '3', '[' * 100_000, '\xff'])
def test_a_bad_jsonl_line_is_named(tmp_path, line):
    (tmp_path / 'a.jsonl').write_text('{"text": "good"}\n\n' + line + '\n', encoding='latin-1')
    with pytest.raises(UserError, match=r'a\.jsonl:3: ') as error: list(prepare_data.your_texts([str(tmp_path)], 10 ** 6, lambda done: None))
    assert '\n' not in str(error.value)


@pytest.fixture(scope='module')
def words():
    """A tokenizer with merges, like gpt2, that needs no download."""
    pairs = [b'th', b'he', b'the', b' t', b' the', b'in', b'er', b' a', b'\xc3\xa9']
    return tiktoken.Encoding('words', pat_str=r' ?\p{L}+|\s+|[^\s\p{L}]+', special_tokens={'<|endoftext|>': 256 + len(pairs)},
                             mergeable_ranks={token: i for i, token in enumerate([bytes([i]) for i in range(256)] + pairs)})


def test_tokens_are_tiktokens_whatever_the_threads_do(tmp_path, words):
    texts = [f'the other thé <|endoftext|> {i} '.encode() * (1 + 977 * i % 400) for i in range(60)] + [b'caf\xe9 \xff']
    meta = write_dataset(str(tmp_path / 'd'), iter(texts), words, 0.3, 'test')
    train = np.fromfile(tmp_path / 'd' / 'train_000000.bin', np.uint16)[HEADER_BYTES // 2:].tolist()
    position = lambda text: int(hashlib.sha256(text).hexdigest()[:16], 16) / 2 ** 64
    expected = [words.encode_ordinary(t.decode('utf-8', 'replace')) + [words.eot_token] for t in texts if position(t) >= 0.3]
    assert train == sum(expected, []) and meta['n_tokens'] == 266 and meta['train']['tokens'] == len(train)


def test_a_vocabulary_that_cannot_be_fetched(tmp_path):
    (tmp_path / 'a.txt').write_text('text')
    refused(program(PROGRAM, 'a.txt', '--tokenizer=gpt2', cwd=tmp_path, ok=False, TIKTOKEN_CACHE_DIR=str(tmp_path / 'none'), no_proxy='',
                    https_proxy='http://127.0.0.1:9', HTTPS_PROXY='http://127.0.0.1:9'), 'gpt2', 'could not be fetched', '--tokenizer=byte')
    assert os.listdir(tmp_path) == ['a.txt']


def test_byte_encoding_is_what_tiktoken_says():
    text = 'def f(x):\n\treturn "naïve ☃"\r\n'
    tokenizer = get_tokenizer('byte')
    assert prepare_data.encode(tokenizer, text.encode()).tolist() == tokenizer.encode_ordinary(text) + [256] == [*text.encode(), 256]
    assert tokenizer.decode(tokenizer.encode_ordinary(text)) == text and tokenizer.n_vocab == 257 and tokenizer.eot_token == 256


def test_unknown_tokenizer():
    with pytest.raises(UserError, match='byte'): get_tokenizer('nonsense')


def test_unreachable_tokenizer(monkeypatch):
    """No network: the message names the tokenizer that needs none."""
    import requests
    import tiktoken
    monkeypatch.setattr(tiktoken, 'get_encoding', lambda name: (_ for _ in ()).throw(requests.exceptions.ConnectionError('no route')))
    with pytest.raises(UserError, match='--tokenizer=byte'): get_tokenizer('gpt2')


@pytest.mark.parametrize('texts, words', [([], 'no text'), ([b''], 'no text'), ([b'one document'], 'no sensible split')])
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
                                         (['empty'], ['empty', 'no text']), (['--tokenizer=nope'], ['byte'])])
def test_command_line_refusals(tmp_path, argv, words):
    (tmp_path / 'empty').mkdir()
    done = program(PROGRAM, *argv, cwd=tmp_path, ok=False)
    refused(done, *words)


def test_data_sets_are_not_replaced_by_mistake(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ('notes.v1', 'notes.v2'): (tmp_path / name).write_text('Some words of a text. ' * 99)
    prepare_data.main(['notes.v1'])
    before = (tmp_path / 'data' / 'notes' / 'meta.json').read_bytes()
    for argv in ['notes.v2'], ['notes.v1', 'notes.v2']:  # the same default name
        with pytest.raises(UserError, match='data/notes was made from notes.v1: give another --name, or --name=notes'): prepare_data.main(argv)
    for argv in ['data/notes'], ['data/notes', '--name=notes', '--tokenizer=byte'], ['notes.v1', 'data/notes', '--name=more']:  # --check forgotten
        with pytest.raises(UserError, match='data/notes: a data set, no text.*--check data/notes'): prepare_data.main(argv)
    assert (tmp_path / 'data' / 'notes' / 'meta.json').read_bytes() == before
    prepare_data.main(['notes.v1'])
    prepare_data.main(['notes.v2', '--name=notes'])
    assert read_meta('data/notes')['source'] == 'notes.v2'


def test_missing_data_names_its_command():
    with pytest.raises(UserError, match='make data/mine with: python prepare_data.py PATH... --name=mine$'): read_meta('data/mine')
    for name in ('shakespeare', *prepare_data.FINEWEB):
        with pytest.raises(UserError, match=f'python prepare_data.py {name}$'): read_meta(f'data/{name}')


def test_preparing_does_not_load_torch(tmp_path):
    for i in range(20): (tmp_path / f'{i}.txt').write_text(f'text {i} ' * 50)
    program('-c', "import sys, prepare_data; prepare_data.main(sys.argv[1:]); assert 'torch' not in sys.modules", '.', '--val_fraction=0.3', cwd=tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / 'data').write_text('a file is in the way')
    refused(program(PROGRAM, cwd=tmp_path, ok=False), 'data', 'cannot be written')


LIMITED = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (10 ** 6, 10 ** 6)); runpy.run_path(sys.argv.pop(1), run_name='__main__')"


@pytest.mark.skipif(sys.platform == 'win32', reason="needs limits on file sizes")
def test_a_disk_that_takes_no_more(tmp_path):
    refused(program('-c', LIMITED, PROGRAM, cwd=tmp_path, ok=False), 'data/python', 'cannot be written', 'File too large')
    assert os.listdir(tmp_path / 'data' / 'python') == []


def test_no_permission(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'mine').mkdir()
    for i in range(40): (tmp_path / 'mine' / f'{i}.txt').write_text(f'text {i}')
    def denied(word):
        def open_(path, mode='r', **more):
            if word in str(path) and str(path).endswith(('.bin', '.txt')): raise PermissionError(13, 'Permission denied', path)
            return open(path, mode, **more)
        return open_
    for word, message in (('train_', 'data/mine: cannot be written .Permission'), ('7.txt', '7.txt: cannot be read .Permission')):
        monkeypatch.setattr(prepare_data, 'open', denied(word), raising=False)
        with pytest.raises(UserError, match=message): prepare_data.main(['mine'])
        assert os.listdir(tmp_path / 'data' / 'mine') == []


@pytest.mark.parametrize('what', ['data', 'mine'])
def test_a_folder_vanishes(tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare_data, 'SHARD_TOKENS', 500)
    (tmp_path / 'mine').mkdir()
    for i in range(200): (tmp_path / 'mine' / f'{i}.txt').write_text(f'text {i}')
    def vanishing(*args, original=prepare_data.your_texts):
        for i, text in enumerate(original(*args)):
            if i == 100: shutil.rmtree(what)
            yield text
    monkeypatch.setattr(prepare_data, 'your_texts', vanishing)
    with pytest.raises(UserError, match='data/mine: cannot be written .No such file' if what == 'data' else 'txt: cannot be read .No such file'):
        prepare_data.main(['mine'])
    assert what == 'data' or os.listdir(tmp_path / 'data' / 'mine') == []


def test_two_at_once_take_turns(tmp_path):
    programs = [subprocess.Popen([sys.executable, PROGRAM], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in programs:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0 and not err and 'data/python: 9,' in out
    prepare_data.check(str(tmp_path / 'data' / 'python'))


def test_a_data_set_is_complete_or_says_it_is_not(tmp_path, monkeypatch):
    """While files are moved there is no meta.json, it comes last, and what it names is on the disk by then."""
    texts, moved, synced, replace, sync = [f'text {i}'.encode() for i in range(50)], [], [], os.replace, os.fsync
    write(tmp_path / 'd', texts)
    def record(a, b):
        moved.append((os.path.basename(b), os.path.exists(tmp_path / 'd' / 'meta.json'), os.stat(a).st_ino in synced))
        replace(a, b)
    monkeypatch.setattr(os, 'replace', record)
    monkeypatch.setattr(os, 'fsync', lambda f: synced.append(os.fstat(f).st_ino) or sync(f))
    write(tmp_path / 'd', texts)
    assert {name for name, *_ in moved[:-1]} == {'train_000000.bin', 'val_000000.bin'} and moved[-1][0] == 'meta.json'
    assert all(on_disk and not there for _, there, on_disk in moved[:-1]) and not moved[-1][1]


def test_files_are_read_in_order_and_hidden_ones_not_at_all(tmp_path, monkeypatch):
    for name in ('.git/x.txt', 'b.txt', 'a.txt', 'c/d.txt', '.hidden'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('t')
    listed = os.walk
    def backwards(*args, **options):
        for folder, subfolders, files in listed(*args, **options): yield folder, subfolders, sorted(files, reverse=True)
    monkeypatch.setattr(os, 'walk', backwards)
    assert [os.path.relpath(path, tmp_path) for path in prepare_data.walk(str(tmp_path))] == ['a.txt', 'b.txt', os.path.join('c', 'd.txt')]


def test_a_vocabulary_that_needs_more_than_16_bits_is_refused(tmp_path):
    big = tiktoken.Encoding('big', pat_str=r'(?s:.)', mergeable_ranks={bytes([i]): i for i in range(256)}, special_tokens={'<|endoftext|>': 2 ** 16})
    with pytest.raises(UserError, match='16 bits'): write_dataset(str(tmp_path / 'd'), [b'a', b'b'], big, 0.3, 'test')


def test_a_seed_has_its_own_order(small_data):
    data = Windows(small_data, 'train', read_meta(small_data), 16)
    assert not torch.equal(data.sample(0, 8, 1, CPU)[0], data.sample(0, 8, 2, CPU)[0])


def test_what_a_killed_run_left_is_cleared(tmp_path):
    (tmp_path / 'd' / '.unfinished').mkdir(parents=True)
    (tmp_path / 'd' / '.unfinished' / 'train_000007.bin').write_bytes(b'rest')
    write(tmp_path / 'd', [f'text {i}'.encode() for i in range(50)])
    assert sorted(os.listdir(tmp_path / 'd')) == ['meta.json', 'train_000000.bin', 'val_000000.bin']


@pytest.mark.parametrize('damage', ['shard', 'size', 'token', 'tokens', 'gone'])
def test_check_finds_damage(small_data, tmp_path, damage, capsys):
    shutil.copytree(small_data, tmp_path / 'd')
    path = tmp_path / 'd' / 'val_000000.bin'
    prepare_data.main(['--check', str(tmp_path / 'd')])
    assert 'val is whole' in capsys.readouterr().out
    content, meta = bytearray(path.read_bytes()), json.loads((tmp_path / 'd' / 'meta.json').read_text())
    if damage == 'shard': content[2000] ^= 1
    if damage == 'size': del content[-2:]
    if damage == 'token': content[2001] = 2
    if damage == 'tokens': meta['val']['shards'][0]['tokens'] += 1
    path.write_bytes(content)
    (tmp_path / 'd' / 'meta.json').write_text(json.dumps(meta))
    if damage == 'gone': path.unlink()
    with pytest.raises(UserError, match='val_000000.bin'): prepare_data.main(['--check', str(tmp_path / 'd')])


# reading

@pytest.mark.parametrize('damage', ['short', 'long', 'magic', 'version', 'empty', 'gone'])
def test_damaged_shards_are_refused(small_data, tmp_path, damage):
    with open(os.path.join(small_data, 'train_000000.bin'), 'rb') as f: good = f.read()
    path = str(tmp_path / 'shard.bin')
    bad = dict(short=good[:-2], long=good + b'xx', magic=b'\0' * 4 + good[4:], version=good[:4] + b'\2' + good[5:], empty=b'', gone=None)[damage]
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


@pytest.mark.parametrize('text', [None, '', '{', '[]', '{"tokenizer": "byte"}', '{"tokenizer": 3, "n_tokens": 2, "eot": 1, "train": {}, "val": {}}',
                                  '{"tokenizer": "byte", "n_tokens": 257, "eot": 256, "train": {"bytes": 1, "tokens": 1, "shards": "ab"}, "val": 0}'])
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


def test_batches_read_ahead_are_the_same(small_data):
    plain, ahead = (Windows(small_data, 'train', read_meta(small_data), 16) for _ in range(2))
    for first in (0, 8, 16, 4, 40, plain.n - 4):  # also where the guess was wrong
        for one, other in zip(plain.sample(first, 8, 1, CPU), ahead.sample(first, 8, 1, CPU, then=first + 8)): assert torch.equal(one, other)
    last = Batch(plain.n + 4, 8, 1, CPU)
    assert ahead.ahead == last
    assert torch.equal(ahead.ahead_tokens.result(), ahead.read_batch(last))
    assert 0 < ahead.waited < 60


@pytest.mark.skipif(not os.path.exists('/proc/self/status'), reason="needs /proc")
def test_reading_needs_the_same_memory_for_any_number_of_shards(tmp_path):
    n = 2 * 10 ** 7
    shards = [dict(name=f'{i}.bin') for i in range(4)]
    for shard in shards:
        np.array([MAGIC, 1, n], np.int32).tofile(tmp_path / shard['name'])
        os.truncate(tmp_path / shard['name'], HEADER_BYTES + 2 * n)  # 160 MB in all, holes that take no space
    def resident():
        with open('/proc/self/status') as f: return sum(int(line.split()[1]) for line in f if line.startswith(('RssFile', 'RssShmem')))
    data, before = Windows(str(tmp_path), 'train', dict(n_tokens=257, train=dict(shards=shards)), 2 ** 16), resident()
    for w in range(data.n): data.get([w], CPU)
    assert data.n == 4 * (n // 2 ** 16) and resident() - before < 20_000, "kB of files in this process's memory"


def test_data_that_vanishes_while_it_is_read(small_data, tmp_path):
    shutil.copytree(small_data, tmp_path / 'd')
    data = Windows(str(tmp_path / 'd'), 'train', read_meta(small_data), 16)
    data.sample(0, 4, 1, CPU)
    os.truncate(tmp_path / 'd' / 'train_000000.bin', 1100)
    with pytest.raises(UserError, match='shorter'): data.get([data.n - 1], CPU)
    with open(tmp_path / 'd' / 'train_000000.bin', 'r+b') as f: f.seek(HEADER_BYTES), f.write(b'\1\1')
    with pytest.raises(UserError, match='token 257 of a vocabulary of 257'): data.get([0], CPU)
    shutil.rmtree(tmp_path / 'd')
    with pytest.raises(UserError, match='cannot be read'): data.sample(8, 4, 1, CPU, then=12)
