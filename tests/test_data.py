"""Corpora, shards, tokenizers, the order of windows."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import requests
import tiktoken
import torch
from conftest import program, refused

import prepare_data
from engine.files import UserError, alone, checksum
from engine.plan import planned_vocabulary
from engine.shards import encode, get_tokenizer, open_shard, read_meta
from engine.tasks import TASKS
from engine.windows import Windows
from prepare_data import DataSettings, write_dataset

CPU = torch.device('cpu')
PROGRAM = prepare_data.__file__


def write(folder, texts):
    """A data set of bytes from these documents; returns its meta.json."""
    return write_dataset(str(folder), texts, get_tokenizer('byte'), 0.3, 'test')


def numbered(n):
    """n short documents, all different."""
    return [f'text {i}'.encode() for i in range(n)]


def documents(folder):
    """(set of documents of training, of validation) read back from the shards, the slow way."""
    found = []
    for split in ('train', 'val'):
        names = [shard['name'] for shard in read_meta(str(folder))[split]['shards']]
        tokens = np.concatenate([open_shard(os.path.join(folder, name)) for name in names])
        ends = np.flatnonzero(tokens == 256) + 1
        parts = [part[part < 256] for part in np.split(tokens, ends)]
        found.append({bytes(part.astype(np.uint8)) for part in parts} - {b''})
    return found


def contents(folder):
    """{name: checksum} of all files in a folder."""
    return {name: checksum(os.path.join(folder, name)) for name in os.listdir(folder)}


# ---- what a data set holds -----------------------------------------------------------------------

def test_shards_hold_every_document_once(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, 'SHARD_TOKENS', 1000)
    texts = [bytes([65 + i % 26]) * (i + 1) + str(i).encode() for i in range(100)]
    meta = write(tmp_path, texts)
    train, val = documents(tmp_path)
    assert train | val == set(texts) and not train & val

    n_bytes = sum(map(len, texts))
    assert meta['train']['bytes'] + meta['val']['bytes'] == n_bytes
    assert meta['train']['tokens'] + meta['val']['tokens'] == n_bytes + len(texts)
    assert len(meta['train']['shards']) > 2
    assert all(shard['tokens'] == 1000 for shard in meta['train']['shards'][:-1])
    header = np.fromfile(tmp_path / 'train_000000.bin', np.int32, 256)
    assert header[:3].tolist() == [20240520, 1, 1000] and not header[3:].any()

    shards = meta['train']['shards'] + meta['val']['shards']
    described = {shard['name']: shard['sha256'] for shard in shards}
    assert contents(tmp_path) == {**described, 'meta.json': checksum(tmp_path / 'meta.json')}


def test_files_that_are_no_text_do_not_change_how_texts_are_cut(tmp_path, monkeypatch, capsys):
    """Few texts are cut in pieces, also beside many pictures."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'notes').mkdir()
    for i in range(3):
        (tmp_path / f'notes/{i}.md').write_text(''.join(f'line {n} of {i}\n' for n in range(9000)))
    prepare_data.main(['notes', '--name=a'])
    for i in range(100):
        (tmp_path / f'notes/{i}.png').write_bytes(b'\x89PNG\0\0')
    prepare_data.main(['notes', '--name=b'])
    assert '100 of 103 files are left out' in capsys.readouterr().err
    assert read_meta('data/a')['val'] == read_meta('data/b')['val']


def test_folders_that_are_links_are_read_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ('corpus', 'elsewhere'):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'a.txt').write_text(f'a line {name}\n' * 99)
    for link, to in (('books', 'elsewhere'), ('again', 'elsewhere'), ('loop', 'corpus')):
        (tmp_path / 'corpus' / link).symlink_to(tmp_path / to)
    prepare_data.main(['corpus'])
    meta = read_meta('data/corpus')
    both = 99 * len('a line corpus\na line elsewhere\n')
    assert meta['train']['bytes'] + meta['val']['bytes'] == both


def test_a_folder_called_like_a_made_task_is_not_read_in_its_place(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'traffic').mkdir()
    prepare_data.main(['traffic', '--problems=300'])
    assert 'traffic is a set of this project; for your own write' in capsys.readouterr().err


def test_your_own_files_through_the_command_line(tmp_path):
    texts = {f'{i}.txt': f'text {i}: naïve ☃\r\n'.encode() * (i + 1) for i in range(120)}
    texts['latin1.txt'] = 'caf\xe9 cr\xe8me\n'.encode('latin-1') * 50
    texts['settings.py'] = b'name = "a text like others"\n'
    (tmp_path / 'texts' / 'sub').mkdir(parents=True)
    for i, (name, text) in enumerate(texts.items()):
        (tmp_path / ('texts/sub' if i % 2 else 'texts') / name).write_bytes(text)
    lines = []
    for i in range(30):
        record = f'record {i} "☃"\n' * 3
        texts[f'r{i}'] = record.encode()
        lines.append(json.dumps(dict(id=i, text=record), ensure_ascii=bool(i % 2)))
    (tmp_path / 'all.jsonl').write_text('\n\n'.join(lines), encoding='utf-8')
    (tmp_path / 'texts' / 'picture.bin').write_bytes(b'\x89PNG\0\0')
    (tmp_path / 'texts' / '.hidden').write_bytes(b'secret')
    os.mkfifo(tmp_path / 'texts' / 'pipe')
    (tmp_path / 'texts' / 'gone').symlink_to('nowhere')

    # texts/0.txt is in texts: a file counts once
    command = [PROGRAM, 'texts', 'all.jsonl', 'texts/0.txt', '--name=mine', '--val_fraction=0.2']
    said = program(*command, cwd=tmp_path).stderr
    assert '1 of 124 files are left out' in said and 'texts/picture.bin' in said
    assert 'warning: texts/gone is left out: a link to nothing' in said
    assert '1 documents are no UTF-8 (kept as they are' in said
    assert 'as on Windows in 120 documents' in said
    refused(program(PROGRAM, 'texts/pipe', cwd=tmp_path, ok=False), 'texts/pipe: a pipe')
    meta = read_meta(tmp_path / 'data' / 'mine')
    assert meta['train']['bytes'] + meta['val']['bytes'] == sum(map(len, texts.values()))
    train, val = documents(tmp_path / 'data' / 'mine')
    assert train | val == set(texts.values()), "every document whole, byte for byte"
    assert not train & val and len(val) >= 3
    assert 'val is whole' in program(PROGRAM, '--check', 'data/mine', cwd=tmp_path).stdout

    for i in range(40):
        (tmp_path / 'texts' / f'new{i}.txt').write_bytes(b'another text %d' % i)
    program(*command, cwd=tmp_path)
    more_train, more_val = documents(tmp_path / 'data' / 'mine')
    assert train < more_train and val < more_val, "more files move no document"


def test_builtin_corpus_is_the_standard_library():
    texts = list(prepare_data.python_sources(packages=False))
    with open(os.path.join(os.path.dirname(os.__file__), 'argparse.py'), 'rb') as f:
        assert f.read().replace(b'\r\n', b'\n') in texts
    assert 5e6 < sum(map(len, texts)) < 3e7
    assert not any(text.lstrip().startswith(b'# system configuration generated') for text in texts)
    with open(np.__file__, 'rb') as f:
        numpy = f.read().replace(b'\r\n', b'\n')
    assert numpy not in texts
    assert numpy in prepare_data.python_sources(packages=True)


@pytest.mark.parametrize('line, words', [
    ('{"text": 3}', 'no JSON object'),
    ('{"txt": "a"}', 'no JSON object'),
    ('["text"]', 'no JSON object'),
    ('text', 'no JSON object'),
    ('{"text": "caf\xe9"}', 'no UTF-8'),
])
def test_a_bad_jsonl_line_is_named(tmp_path, line, words):
    (tmp_path / 'a.jsonl').write_text('{"text": "good"}\n\n' + line + '\n', encoding='latin-1')
    with pytest.raises(UserError, match=rf'a\.jsonl:3: {words}'):
        list(prepare_data.your_texts([str(tmp_path / 'a.jsonl')], 'mine'))


def test_a_single_file_is_cut_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = ''.join(f'line {i} of a long file\n' for i in range(4000)).encode()
    (tmp_path / 'book.txt').write_bytes(text)
    prepare_data.main(['book.txt'])
    meta = read_meta('data/book')
    assert meta['train']['bytes'] + meta['val']['bytes'] == len(text)
    assert 0.03 < meta['val']['bytes'] / len(text) < 0.25
    train, val = documents('data/book')
    for piece in train | val:
        assert piece.startswith(b'line') and piece.endswith(b'file\n')


@pytest.mark.parametrize('text', [
    '日本語の文章。' * 9999, 'without end, ' * 4000, '\n' * 19_999])
def test_cutting_loses_nothing_and_splits_no_character(text):
    text = text.encode()
    pieces = list(prepare_data.cut(io.BufferedReader(io.BytesIO(text)), len(text), 0))
    assert b''.join(pieces) == text
    assert len(pieces) > 30
    for piece in pieces:
        piece.decode()


def test_short_files_are_not_cut_to_shreds():
    """Eighty scripts of 3 kB: a model of shreds ends a text after a line or two."""
    text = b'    a line of a short script\n' * 100
    pieces = list(prepare_data.cut(io.BufferedReader(io.BytesIO(text)), len(text), 0))
    assert b''.join(pieces) == text
    assert all(512 <= len(piece) < 600 for piece in pieces[:-1])


def test_a_mark_of_the_byte_order_is_no_text(tmp_path):
    (tmp_path / 'a.txt').write_bytes(b'\xef\xbb\xbftext')
    assert [*prepare_data.your_texts([str(tmp_path / 'a.txt')], 'mine')] == [b'text']


def test_half_a_description_is_named(tmp_path):
    (tmp_path / 'meta.json').write_text('{"tokenizer": "by')
    with pytest.raises(UserError, match='meta.json: damaged'):
        read_meta(str(tmp_path))


def test_large_files_are_never_in_memory_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, 'DOCUMENT_BYTES', 1000)
    (tmp_path / 'a.txt').write_bytes(b'no line end here ' * 6000)
    (tmp_path / 'b.jsonl').write_text(json.dumps(dict(text='x\n' * 50_000)))
    files = [str(tmp_path / name) for name in ('a.txt', 'b.jsonl')]
    pieces = list(prepare_data.your_texts(files, 'mine'))
    assert sum(map(len, pieces)) == 17 * 6000 + 100_000
    assert max(map(len, pieces)) <= 2003


# ---- tokenizers ----------------------------------------------------------------------------------

def test_tokens_are_tiktokens(tmp_path, capsys):
    pairs = [b'th', b'he', b'the', b' t', b' the', b'in', b'er', b' a', b'\xc3\xa9']
    tokens = [bytes([i]) for i in range(256)] + pairs
    words = tiktoken.Encoding('words', pat_str=r' ?\p{L}+|\s+|[^\s\p{L}]+',
                              mergeable_ranks={token: i for i, token in enumerate(tokens)},
                              special_tokens={'<|endoftext|>': len(tokens)})
    texts = [f'the other thé <|endoftext|> {i} '.encode() * (1 + 977 * i % 400) for i in range(200)]
    texts.append(b'caf\xe9 \xff')
    meta = write_dataset(str(tmp_path), iter(texts), words, 0.3, 'test')
    expected = []
    for text in texts:
        if prepare_data.position(text) >= 0.3:
            expected += words.encode_ordinary(text.decode('utf-8', 'replace'))
            expected += [words.eot_token]
    assert open_shard(tmp_path / 'train_000000.bin').tolist() == expected
    assert meta['n_tokens'] == 266
    assert '1 documents are no UTF-8 (' in capsys.readouterr().err


def test_half_a_character_of_a_record_is_kept(tmp_path):
    (tmp_path / 'a.jsonl').write_text('{"text": "a\\ud83d b"}')
    path = str(tmp_path / 'a.jsonl')
    with open(path, 'rb') as f:
        assert list(prepare_data.documents(f, path, 100)) == [b'a\xed\xa0\xbd b']


def test_other_data_in_its_place_is_told(tmp_path, capsys):
    byte = get_tokenizer('byte')
    other = tiktoken.Encoding('other', pat_str='.', special_tokens={'<|endoftext|>': 256},
                              mergeable_ranks={bytes([i]): i for i in range(256)})
    for source, tokens, told in (('a.txt', byte, ''), ('a.txt', byte, ''),
                                 ('b.txt', byte, 'was made of a.txt (byte), which this replaces'),
                                 ('b.txt', other, 'replaces by b.txt (other)')):
        write_dataset(str(tmp_path), numbered(99), tokens, 0.3, source)
        out = capsys.readouterr().out
        assert told in out and bool(out) == bool(told)


def test_a_folder_of_texts_may_hold_the_meta_json_of_another_program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine' / 'meta.json').write_text('{"title": "my corpus"}')
    for i in range(20):
        (tmp_path / 'mine' / f'{i}.txt').write_text(f'text number {i} ' * 200)
    prepare_data.main(['mine', '--name=my', '--val_fraction=0.3'])
    assert read_meta('data/my')['source'] == 'mine'
    with pytest.raises(UserError, match="mine.meta.json: another program's"):
        read_meta('mine')


def test_byte_encoding_is_what_tiktoken_says():
    text = 'def f(x):\n\treturn "naïve ☃"\r\n'
    tokenizer = get_tokenizer('byte')
    assert encode(tokenizer, text.encode()).tolist() == tokenizer.encode_ordinary(text) + [256]
    assert tokenizer.decode(list(text.encode())) == text


def test_vocabularies_that_cannot_be_had(tmp_path, monkeypatch):
    def no_route(name):
        raise requests.exceptions.ConnectionError('no route')

    monkeypatch.setattr(tiktoken, 'get_encoding', no_route)
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'a.txt').write_text('text')
    for argv in (['a.txt', '--tokenizer=gpt2'], ['fineweb-edu']):
        with pytest.raises(UserError, match='vocabulary of gpt2 could not be fetched') as error:
            prepare_data.main(argv)
        assert '--tokenizer' not in str(error.value), "nobody typed it for FineWeb"
    with pytest.raises(UserError, match='nonsense.*use byte'):
        prepare_data.main(['a.txt', '--tokenizer=nonsense'])
    big = tiktoken.Encoding('big', pat_str=r'(?s:.)', special_tokens={'<|endoftext|>': 2 ** 16},
                            mergeable_ranks={bytes([i]): i for i in range(256)})
    with pytest.raises(UserError, match='16 bits'):
        write_dataset('big', numbered(9), big, 0.3, 'test')


# ---- wrong arguments -----------------------------------------------------------------------------

@pytest.mark.parametrize('argv, words', [
    (['gone.txt'], 'gone.txt: no such file'),
    (['empty.txt'], 'no sensible split, 0 bytes.*give more text, or a larger'),
    (['traffic', '--size=1'], 'no sensible split.*too few problems that differ: give a larger'),
    (['data/mine'], 'a data set, no text.*--check data/mine'),
    (['--val_fraction=0.7'], 'val_fraction=0.7'),
    (['--check'], 'one data folder'),
    (['--name=../x'], '--name=../x'),
    (['fineweb-edu', '--shards=100'], '1 to 99'),
    (['fineweb', '--tokenizer=byte'], 'gpt2'),
    (['traffic', '--tokenizer=gpt2'], '--tokenizer is for texts and FineWeb, and does nothing'),
    (['fineweb-edu', '--val_fraction=0.01'], '--val_fraction is for texts .* nothing for FineWeb'),
    (['empty.txt', '--seed=2'], '--seed is for made tasks'),
    (['empty.txt', '--packages=True'], '--packages adds to the built-in corpus'),
    (['...'], '--name='),
    (['python.txt'], 'python.txt: data/python is for a set .*another --name'),
    (['python'], 'python: data/python is for a set .*another --name'),
])
def test_what_cannot_be_prepared_is_one_line(tmp_path, monkeypatch, argv, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'empty.txt').touch()
    write(tmp_path / 'data' / 'mine', numbered(50))
    before = contents('data/mine')
    with pytest.raises(UserError, match=words):
        prepare_data.main(argv)
    assert contents('data/mine') == before


def test_where_validation_got_more_a_smaller_fraction_is_advised(tmp_path):
    texts = [b'%d ' % n * 5000 for n in range(99)]
    long = next(text for text in texts if prepare_data.position(text) < 0.1)
    with pytest.raises(UserError, match='give more text, or a smaller --val_fraction'):
        write_dataset(str(tmp_path), [*numbered(9), long], get_tokenizer('byte'), 0.1, 'texts')


def test_missing_data_names_its_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder, arguments in (('data/mine', ' PATH... --name=mine'), ('data/fineweb', ' fineweb'),
                              ('else/python-packages', ' --packages=True'), ('data/python', ''),
                              ('data/trees', ' minimax --size=6 --name=trees')):
        with pytest.raises(UserError, match=f'python prepare_data.py{arguments}$'):
            read_meta(folder)


# ---- a data set is whole or absent ---------------------------------------------------------------

KILLED = """
import os, signal, sys
import prepare_data

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

setattr(prepare_data, sys.argv[1], die)
prepare_data.prepare(prepare_data.DataSettings(problems=200, seed=2), ['addition'])
assert 'torch' not in sys.modules, "which takes seconds to load"
"""


@pytest.mark.skipif(sys.platform == 'win32', reason="signals")
@pytest.mark.parametrize('where', ['checksum', 'publish', 'nowhere'])
def test_a_killed_run_leaves_the_old_data_and_the_next_one_clears_up(tmp_path, where):
    folder = tmp_path / 'data' / 'addition'
    prepare_data.prepare_task(DataSettings(problems=200), 'addition', str(folder))
    before = contents(folder)
    done = program('-c', KILLED, where, cwd=tmp_path, ok=False)
    killed = where != 'nowhere'
    assert done.returncode == (-signal.SIGKILL if killed else 0), done.stderr
    if killed:
        shutil.copytree(folder, tmp_path / 'found', ignore=lambda *_: ['.unfinished'])
        assert contents(tmp_path / 'found') == before
        assert os.path.exists(folder / '.unfinished')
        prepare_data.prepare_task(DataSettings(problems=200, seed=2), 'addition', str(folder))
    prepare_data.check(str(folder))
    after = contents(folder)
    assert after.keys() == before.keys() and after != before


def test_while_shards_are_moved_there_is_no_description(tmp_path, monkeypatch):
    write(tmp_path, numbered(50))
    replace, moved, on_disk = os.replace, [], []

    def replace_and_note(source, target):
        assert len(on_disk) == 3, "both shards and meta.json, before the first of them is moved"
        moved.append((os.path.basename(target), os.path.exists(tmp_path / 'meta.json')))
        replace(source, target)

    monkeypatch.setattr(os, 'replace', replace_and_note)
    monkeypatch.setattr(os, 'fsync', on_disk.append)
    write(tmp_path, numbered(50))
    assert moved == [('meta.json', True),       # beside the shards, before any of them is moved
                     ('train_000000.bin', False), ('val_000000.bin', False), ('meta.json', False)]


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


def test_two_at_once_take_turns(tmp_path):
    command = [sys.executable, '-u', PROGRAM, 'addition', '--problems=100']
    with alone(str(tmp_path / 'data' / 'addition')):
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        assert any('waiting for it' in line for line in process.stdout)     # or it ends at once
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
    process.communicate(timeout=60)
    assert process.returncode == 0
    prepare_data.check(str(tmp_path / 'data' / 'addition'))


def test_two_runs_that_miss_the_same_data_make_it_once(tmp_path, monkeypatch, capsys):
    """Made twice, it would be taken away from the one that reads it already."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(prepare_data.BUILTIN, 'data/addition', ['addition', '--problems=100'])

    def asked(folder, wait):
        monkeypatch.setattr(prepare_data, 'alone', alone)
        prepare_data.prepare_builtin('data/addition')
        return alone(folder, wait)

    monkeypatch.setattr(prepare_data, 'alone', asked)
    prepare_data.prepare_builtin('data/addition')
    assert capsys.readouterr().out.count('data/addition is missing') == 1
    prepare_data.check('data/addition')


@pytest.mark.parametrize('spelled', ['data/addition/', './data/addition', 'absolute'])
def test_a_missing_built_in_set_is_made_however_it_is_spelled(spelled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(prepare_data.BUILTIN, 'data/addition', ['addition', '--problems=100'])
    folder = str(tmp_path / 'data' / 'addition') if spelled == 'absolute' else spelled
    prepare_data.prepare_builtin(folder)
    prepare_data.check('data/addition')
    assert planned_vocabulary('data/trees/', prepare_data.BUILTIN) == (257, 'of data/trees/')


# ---- which files are text ------------------------------------------------------------------------

def test_records_have_two_endings(tmp_path):
    for name in ('a.jsonl', 'a.ndjson', 'a.NDJSON'):
        (tmp_path / name).write_text('{"text": "one"}\n{"text": "two"}\n')
        assert list(prepare_data.your_texts([str(tmp_path / name)], 'mine')) == [b'one', b'two']


def test_json_is_no_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for number in range(50):
        (tmp_path / f'{number}.txt').write_text(f'a text {number}\n' * 9)
    (tmp_path / 'all.JSON').write_text('[{"text": "one"}]')
    refused(program(PROGRAM, 'all.JSON', '--name=mine', cwd=tmp_path, ok=False), 'all.JSON: JSON',
            'braces', '.jsonl')
    prepare_data.main(['.', '--name=mine'])     # in a folder there may be others
    assert '1 of 51 files are left out' in (said := capsys.readouterr().err) and 'all.JSON' in said
    tokens = np.concatenate([open_shard(f'data/mine/{split}_000000.bin')
                             for split in ('train', 'val')])
    assert ord('{') not in tokens


@pytest.mark.parametrize('place', [0, 5000, 8191])
def test_a_nul_byte_is_looked_for_in_8192_bytes(place, tmp_path, capsys, monkeypatch):
    text = bytearray(b'x' * 9000)
    text[place] = 0
    (tmp_path / 'a').write_bytes(text)
    with monkeypatch.context() as small:        # as on disks with blocks of 4,096
        small.setattr('builtins.open', partial(open, buffering=4096))
        assert list(prepare_data.your_texts([str(tmp_path / 'a')], 'mine')) == []
    assert 'NUL bytes' in capsys.readouterr().err


FEW_OPEN = """
import resource, sys
import train
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
train.run(train.main)
"""


@pytest.mark.skipif(sys.platform == 'win32', reason="needs limits on open files")
def test_too_many_open_files_name_the_remedy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare_data, 'SHARD_TOKENS', 300)
    prepare_data.main(['addition', '--problems=2000', '--size=2'])
    done = program('-c', FEW_OPEN, '--data_dir=data/addition', '--block_size=32', '--device=cpu',
                   cwd=tmp_path, ok=False)
    refused(done, 'Too many open files', 'ulimit -n 4096', 'same command again')


# ---- damage --------------------------------------------------------------------------------------

def flip_a_bit(shard):
    content = bytearray(shard.read_bytes())
    content[2000] ^= 1
    shard.write_bytes(content)


@pytest.mark.parametrize('damage', [
    flip_a_bit,
    lambda shard: os.truncate(shard, 1500),
    lambda shard: os.truncate(shard, 100),      # in the header
    lambda shard: shutil.copy(shard.with_name('train_000000.bin'), shard),
    lambda shard: shard.write_bytes(b'text ' * 999),
    os.remove,
])
def test_damage_is_found(small_data, tmp_path, damage):
    folder = str(tmp_path / 'd')
    shutil.copytree(small_data, folder)
    prepare_data.check(folder)
    damage(tmp_path / 'd' / 'val_000000.bin')
    with pytest.raises(UserError, match='val_000000.bin.*prepare the data again'):
        prepare_data.check(folder)
    if damage is not flip_a_bit:    # which takes a checksum to see
        with pytest.raises(UserError, match='val_000000.bin.*prepare the data again'):
            Windows(folder, 'val', read_meta(folder), 16)


@pytest.mark.parametrize('change', [
    lambda path: os.truncate(path, 1100),
    lambda path: np.full(9999, 257, np.uint16).tofile(path),    # a vocabulary of 257 has no 257
])
def test_a_shard_that_changes_while_it_is_used(small_data, tmp_path, change):
    shutil.copytree(small_data, tmp_path / 'd')
    data = Windows(str(tmp_path / 'd'), 'train', read_meta(small_data), 16)
    change(tmp_path / 'd' / 'train_000000.bin')
    with pytest.raises(UserError, match='train_000000.bin: damaged, or changed'):
        data.get([100], CPU)


def test_a_run_goes_on_with_the_data_it_began_with(tmp_path):
    """Though its folder is prepared again, from other texts, in the meantime."""
    data = Windows(str(tmp_path), 'train', write(tmp_path, numbered(100)), 16)
    x, _ = data.get([3], CPU)
    write(tmp_path, [b'other ' * 99 + text for text in numbered(100)])
    assert torch.equal(data.get([3], CPU)[0], x)
    again = Windows(str(tmp_path), 'train', read_meta(str(tmp_path)), 16)
    assert not torch.equal(again.get([3], CPU)[0], x)


# ---- the order of windows ------------------------------------------------------------------------

def rows(tokens):
    """The rows of (B, T) tokens, sorted."""
    return sorted(tuple(row) for row in tokens.tolist())


def test_windows_cover_an_epoch_across_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, 'SHARD_TOKENS', 1000)
    texts = [np.random.default_rng(i).integers(0, 256, 300, dtype=np.uint8) for i in range(40)]
    meta = write(tmp_path, [text.tobytes() for text in texts])
    data = Windows(str(tmp_path), 'train', meta, 16)
    straight = []
    for shard in meta['train']['shards']:
        tokens = open_shard(tmp_path / shard['name']).tolist()
        straight += [tuple(tokens[i:i + 16]) for i in range(0, len(tokens) - 16, 16)]
    assert data.n == len(straight) > 100

    x, y = data.sample(0, data.n, 5, CPU)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert rows(x) == sorted(straight)
    again, _ = data.sample(data.n, data.n, 5, CPU)
    assert rows(again) == sorted(straight) and not torch.equal(again, x), "in another order"
    other, _ = data.sample(0, data.n, 6, CPU)
    assert rows(other) == sorted(straight) and not torch.equal(other, x), "each seed has its own"

    places = [straight.index(row) for row in map(tuple, x.tolist())]
    near = np.abs(np.diff(places)) < data.n / 100
    assert np.mean(near) < 0.1, "neighbours do not stay neighbours"


def test_the_order_is_the_same_for_any_number_of_ranks_and_after_a_resume(small_data):
    data = Windows(small_data, 'train', read_meta(small_data), 16)
    first = data.n - 10     # goes over into the next epoch
    whole, _ = data.sample(first, 24, 1, CPU)
    fresh = Windows(small_data, 'train', read_meta(small_data), 16)
    by_ranks = [fresh.sample(first + 4 * rank, 4, 1, CPU)[0] for rank in (5, 4, 3, 2, 1, 0)]
    assert torch.equal(torch.cat(by_ranks[::-1]), whole)


@pytest.mark.parametrize('T, share', [(16, 0), (17, None), (24, 1 / 3), (32, 1 / 2), (128, 7 / 8)])
def test_windows_say_how_much_of_the_answers_counts(tmp_path, T, share):
    """A sum of four digits is 15 characters and an end: 16 and its multiples always begin alike."""
    prepare_data.prepare_task(DataSettings(problems=2000), 'addition', str(tmp_path))
    meta = read_meta(str(tmp_path))
    if share == 0:
        with pytest.raises(UserError, match='block_size=16 .* nothing would count: raise'):
            Windows(str(tmp_path), 'train', meta, T)
        return
    data = Windows(str(tmp_path), 'train', meta, T)
    _, y = data.get(range(data.n), CPU)
    answers = data.n * T * 6 / 16
    assert data.share == pytest.approx((y >= 0).sum().item() / answers, abs=0.01)
    assert share is None or data.share == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize('name', TASKS)
def test_of_a_task_only_answers_are_targets(tmp_path, name):
    prepare_data.prepare_task(DataSettings(size=3, problems=200), name, str(tmp_path))
    data = Windows(str(tmp_path), 'train', read_meta(str(tmp_path)), 50)
    x, y = data.get(range(data.n), CPU)
    end = ord(TASKS[name].end)
    whole = 0
    for inputs, targets in zip(x.tolist(), y.tolist()):
        following = [*inputs[1:], targets[-1]]
        began, asked = False, []    # a problem, and its question, once it has ended
        for i, token in enumerate(inputs):
            if token == 256:
                began, asked, begin = True, [], i + 1
            if token == end and began:
                asked = inputs[begin:i + 1]
            assert targets[i] == (following[i] if asked else -1)
            if targets[i] == 256:       # a problem that is whole: its answer is right
                answer = bytes(inputs[begin:i + 1]).removeprefix(bytes(asked)).decode()
                assert answer == TASKS[name].answer(bytes(asked).decode())
                whole += 1
    assert whole > 100

    one, _ = data.get([3], CPU)
    assert one.min() >= 0, "inputs and targets do not share memory"
