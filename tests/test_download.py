"""Downloads from a bad line: the right bytes arrive, or one line says why not."""

import hashlib
import http.server
import os
import threading

import numpy as np
import pytest

import prepare_data
from engine import download
from engine.download import fetch
from engine.files import UserError
from engine.shards import MAGIC, VERSION, get_tokenizer, read_meta
from engine.windows import Windows


def shard(n_tokens):
    """The bytes of a shard of random tokens."""
    header = np.zeros(256, np.int32)
    header[:3] = MAGIC, VERSION, n_tokens
    tokens = np.random.default_rng(n_tokens).integers(0, 257, n_tokens, dtype=np.uint16)
    return header.tobytes() + tokens.tobytes()


RIGHT = shard(50_000)  # 100 kB


class Handler(http.server.BaseHTTPRequestHandler):
    """
    Serves server.files. Each request does what the next word of server.script says: 'cut' half way,
    'noise' with another last token, 'all' whatever is asked for, a status, or 'ok'.
    """

    def log_message(self, *args):
        """Says nothing."""

    def do_GET(self):
        script, asked = self.server.script, self.headers.get('Range')
        self.server.seen.append((os.path.basename(self.path), asked))
        how = script.pop(0) if script else 'ok'
        if how.isdecimal():
            self.send_error(int(how))
            return
        body = self.server.files[self.path]
        first = 0
        if asked and how != 'all':
            first = int(asked.removeprefix('bytes=').removesuffix('-'))
        if first >= len(body):
            self.send_error(416)
            return
        self.send_response(206 if first else 200)
        if self.path.endswith('.bin'):      # as Hugging Face does; others do not
            self.send_header('X-Linked-Etag', f'"{hashlib.sha256(body).hexdigest()}"')
        rest = body[first:]
        self.send_header('Content-Length', str(len(rest)))
        self.end_headers()
        if how == 'noise':
            rest = rest[:-2] + b'\1\0'     # another token, which could stand there
        self.wfile.write(rest[:len(rest) // 2] if how == 'cut' else rest)


@pytest.fixture
def server(monkeypatch):
    """A local server; small blocks, and no pauses between tries."""
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    server.files = {'/a.bin': RIGHT}
    server.script = []
    server.seen = []
    server.url = f'http://127.0.0.1:{server.server_port}'
    serve = threading.Thread(target=server.serve_forever, kwargs=dict(poll_interval=0.01))
    serve.start()
    monkeypatch.setattr(download, 'PAUSE', 0)
    monkeypatch.setattr(download, 'BLOCK', 100)
    monkeypatch.setenv('no_proxy', '*')
    yield server
    server.shutdown()
    server.server_close()
    serve.join()


def get(server, folder):
    fetch(server.url + '/a.bin', str(folder / 'a.bin'),
          check=lambda path: download.count_tokens(path, 257), progress=lambda n_bytes: None)


@pytest.mark.parametrize('script', [
    ['cut', 'cut', 'cut', 'cut', 'cut', 'cut', 'cut', 'cut'],   # more than TRIES, but bytes arrive
    ['500', '429', 'cut', '503'],
    ['noise', 'cut', 'noise'],
    ['cut', 'all'],
])
def test_what_goes_wrong_for_a_while_is_overcome(server, tmp_path, script):
    server.script = list(script)
    get(server, tmp_path)
    assert (tmp_path / 'a.bin').read_bytes() == RIGHT
    assert os.listdir(tmp_path) == ['a.bin']
    if 'all' in script:
        assert len(server.seen) == 2, "what comes in whole is taken as it comes"
    elif 'noise' not in script:
        starts = [int(asked[6:-1]) for _, asked in server.seen if asked]
        assert starts == sorted(starts) and starts[-1] > 0, "every try asks for the rest alone"


@pytest.mark.parametrize('how, words, tries', [
    ('500', '6 tries.*same command', 6),
    ('noise', '6 tries.*wrong content.*same command', 6),
    ('404', 'status 404', 1),
])
def test_what_goes_wrong_always_is_said(server, tmp_path, how, words, tries):
    server.script = [how] * 50
    with pytest.raises(UserError, match=f'a.bin: {words}'):
        get(server, tmp_path)
    assert len(server.seen) == tries
    assert os.listdir(tmp_path) == []


def test_a_file_is_on_the_disk_before_it_has_its_name(server, tmp_path, monkeypatch):
    named = []
    monkeypatch.setattr(os, 'fsync', lambda file: named.append(os.path.exists(tmp_path / 'a.bin')))
    get(server, tmp_path)
    assert named == [False]


def test_the_next_run_goes_on(server, tmp_path):
    server.script = ['cut'] + ['500'] * 50
    with pytest.raises(UserError):
        get(server, tmp_path)
    have = os.path.getsize(tmp_path / 'a.bin.part')
    assert 0 < have < len(RIGHT)

    server.script, server.seen = [], []
    get(server, tmp_path)
    assert server.seen == [('a.bin', f'bytes={have}-')]
    assert (tmp_path / 'a.bin').read_bytes() == RIGHT


@pytest.mark.parametrize('part', [RIGHT, RIGHT + b'x', b'\xff' * 500], ids=['whole', 'long', 'bad'])
def test_any_part_of_an_earlier_run(server, tmp_path, part):
    (tmp_path / 'a.bin.part').write_bytes(part)
    get(server, tmp_path)
    assert (tmp_path / 'a.bin').read_bytes() == RIGHT
    assert os.listdir(tmp_path) == ['a.bin']


# ---- the data sets -------------------------------------------------------------------------------

FOLDER = os.path.join('data', 'fineweb-edu')


@pytest.fixture
def hub(server, tmp_path, monkeypatch):
    """
    The server as a mirror of Hugging Face with four small shards, tmp_path as current folder, and
    bytes in gpt2's place.
    """
    sizes = dict(val_000000=700, train_000001=900, train_000002=1100, train_000003=500)
    repository = '/datasets/kjj0/finewebedu10B-gpt2/resolve/main'
    server.files = {f'{repository}/finewebedu_{name}.bin': shard(n) for name, n in sizes.items()}
    monkeypatch.setenv('HF_ENDPOINT', server.url + '/')
    monkeypatch.setattr(download, 'get_tokenizer', lambda name: get_tokenizer('byte'))
    monkeypatch.chdir(tmp_path)
    return server


def test_fineweb_from_a_mirror(hub):
    hub.script = ['cut', '500', 'ok', 'noise']
    prepare_data.main(['fineweb-edu', '--shards=2'])
    meta = read_meta(FOLDER)
    assert [entry['tokens'] for entry in meta['train']['shards']] == [900, 1100]
    assert [entry['tokens'] for entry in meta['val']['shards']] == [700]
    val = next(iter(hub.files.values()))
    tokens = np.frombuffer(val[1024:], np.uint16)
    assert meta['val']['bytes'] == (tokens < 256).sum(), "end-of-text is no text"
    assert sorted(os.listdir(FOLDER)) == ['finewebedu_train_000001.bin',
                                          'finewebedu_train_000002.bin',
                                          'finewebedu_val_000000.bin',
                                          'meta.json']
    prepare_data.main(['--check', FOLDER])
    assert Windows(FOLDER, 'train', meta, 16).n == 899 // 16 + 1099 // 16


def test_fineweb_again_fetches_only_what_is_missing_or_damaged(hub, capsys):
    prepare_data.main(['fineweb-edu'])
    hub.seen.clear()
    prepare_data.main(['fineweb-edu'])
    assert hub.seen == []

    os.truncate(os.path.join(FOLDER, 'finewebedu_train_000001.bin'), 1500)
    prepare_data.main(['fineweb-edu', '--shards=3'])
    assert [name for name, _ in hub.seen] == [f'finewebedu_train_00000{i}.bin' for i in (1, 2, 3)]

    hub.seen.clear()
    path = os.path.join(FOLDER, 'finewebedu_train_000002.bin')
    with open(path, 'r+b') as f:        # a token that is one, but not this
        f.seek(1100)
        f.write(b'\1')
    with pytest.raises(UserError, match='train_000002.bin: not the file'):
        prepare_data.main(['--check', FOLDER])
    prepare_data.main(['fineweb-edu', '--shards=3'])
    assert [name for name, _ in hub.seen] == ['finewebedu_train_000002.bin']
    prepare_data.main(['--check', FOLDER])
    capsys.readouterr()
    prepare_data.main(['fineweb-edu'])
    assert 'had 3 training shards, and now lists 1: ' in capsys.readouterr().out
    prepare_data.main(['fineweb-edu', '--shards=3'])
    assert 'had' not in capsys.readouterr().out

    hub.script = ['404']
    os.remove(os.path.join(FOLDER, 'finewebedu_train_000003.bin'))
    before = read_meta(FOLDER)
    with pytest.raises(UserError, match='train_000003'):
        prepare_data.main(['fineweb-edu', '--shards=3'])
    assert read_meta(FOLDER) == before


def test_shakespeare(hub, monkeypatch):
    text = b''.join(b'line %d of a play\n' % i for i in range(7000))
    hub.files['/input.txt'] = text
    monkeypatch.setattr(download, 'SHAKESPEARE', hub.url + '/input.txt')
    monkeypatch.setattr(download, 'SHAKESPEARE_SHA256', hashlib.sha256(text).hexdigest())
    hub.script = ['noise', 'cut']
    prepare_data.main(['shakespeare'])
    with open(os.path.join('data', 'shakespeare', 'input.txt'), 'rb') as f:
        assert f.read() == text
    prepare_data.main(['--check', os.path.join('data', 'shakespeare')])

    hub.seen.clear()
    prepare_data.main(['shakespeare'])
    assert hub.seen == []


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason="needs /dev/full")
def test_a_full_disk(hub):
    os.makedirs(FOLDER)
    os.symlink('/dev/full', os.path.join(FOLDER, 'finewebedu_val_000000.bin.part'))
    with pytest.raises(UserError, match='cannot be written .No space left on device'):
        prepare_data.main(['fineweb-edu'])
    assert len(hub.seen) == 1
