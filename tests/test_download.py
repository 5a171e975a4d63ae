"""
Downloads from a server that does everything wrong: the right bytes arrive, or one clear line, never
a bad file under its final name.
"""

import gzip
import hashlib
import http.server
import json
import os
import shutil
import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings as hypothesis_settings, strategies as st

import prepare_data
from engine import download, shards
from engine.download import fetch
from engine.files import UserError
from engine.shards import MAGIC, VERSION, get_tokenizer, read_meta
from engine.windows import Windows


def shard(n_tokens, seed):
    """The bytes of a shard of random tokens."""
    header = np.zeros(256, np.int32)
    header[:3] = MAGIC, VERSION, n_tokens
    tokens = np.random.default_rng(seed).integers(0, 257, n_tokens, dtype=np.uint16)
    return header.tobytes() + tokens.tobytes()


RIGHT = shard(50_000, 0)  # 100 kB


# --------------------------------------------------------------------------------------------------
# a server that means harm


def drip(request, what):
    """Send it byte by byte, each before the time-out of the one before."""
    for byte in what:
        if request.server.over.wait(0.05):
            return
        request.wfile.write(bytes([byte]))
        request.wfile.flush()


def endless(request):
    request.wfile.write(b'HTTP/1.0 200 OK\r\n\r\n')
    while not request.server.over.is_set():
        request.wfile.write(RIGHT)


def endless_chunks(request):
    request.wfile.write(b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n')
    while not request.server.over.is_set():
        request.wfile.write(b'%x\r\n%b\r\n' % (len(RIGHT), RIGHT))


def bomb(request):
    body = gzip.compress(bytes(10 ** 6))
    request.wfile.write(b'HTTP/1.0 200 OK\r\nContent-Encoding: gzip\r\n\r\n' + body)


def dripping_body(request):
    request.wfile.write(b'HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n' % len(RIGHT))
    drip(request, RIGHT)


def dripping_head(request):
    drip(request, b'HTTP/1.0 200 OK\r\nX: ' + b'x' * 10_000)


def head(line):
    """A server that answers with this line in its head, and the right body."""
    def answer(request):
        request.wfile.write(b'HTTP/1.0 200 OK\r\n' + line + b'\r\n\r\n' + RIGHT)
    return answer


def redirect(target):
    def answer(request):
        request.wfile.write(b'HTTP/1.0 302 Found\r\nLocation: ' + target + b'\r\n\r\n')
    return answer


def controls(request):
    request.wfile.write(b'HTTP/1.0 404 \x1b[2J\x1b]0;owned\x07 gone\r\n\r\n')


HARM = {
    'endless': endless,
    'endless chunks': endless_chunks,
    'gzip bomb': bomb,
    'dripping body': dripping_body,
    'dripping head': dripping_head,
    'length too large': head(b'Content-Length: 99999999999999'),
    'negative length': head(b'Content-Length: -1\r\nContent-Encoding: br'),
    'redirect to a file': redirect(b'file:///etc/passwd'),
    'redirect to ftp': redirect(b'ftp://127.0.0.1/x'),
    'redirect to data': redirect(b'data:text/plain,hello'),
    'redirect to nowhere': redirect(b'http://'),
    'redirect to no host': redirect(b'http://[::1'),
    'redirect to itself': redirect(b'/a.bin'),
    'control characters': controls,
}


@pytest.mark.parametrize('name', HARM)
def test_servers_that_mean_harm(server, tmp_path, monkeypatch, capsys, name):
    monkeypatch.setattr(Handler, 'do_GET', lambda request: HARM[name](request))
    monkeypatch.setattr(download, 'TRIES', 2)
    url = server.url.replace('//', '//me:secret@') + '/a.bin'
    start = time.monotonic()
    with pytest.raises(UserError) as error:
        fetch(url, str(tmp_path / 'a.bin'), check_tokens, largest=10 ** 6)
    assert time.monotonic() - start < 8
    said = str(error.value) + capsys.readouterr().out.replace('\n', '')
    assert said.isprintable()
    assert 'secret' not in said
    assert not (tmp_path / 'a.bin').exists()
    left = tmp_path / 'a.bin.part'
    assert not left.exists() or left.stat().st_size <= 10 ** 6


@pytest.mark.parametrize('line', [b'Content-Length: ' + b'9' * 5000, b'Content-Length: x',
                                  b'X-Linked-Etag: "\x1b[2J"', b'Content-Range: bytes 0-0/0'])
def test_heads_that_mean_nothing_are_not_read(server, tmp_path, monkeypatch, line):
    monkeypatch.setattr(Handler, 'do_GET', lambda request: head(line)(request))
    get(server, tmp_path)
    assert (tmp_path / 'a.bin').read_bytes() == RIGHT


@pytest.mark.parametrize('here, there, follows', [
    ('https://huggingface.co/x', 'https://cdn.example.org/y', True),
    ('https://huggingface.co/x', 'http://cdn.example.org/y', False),
    ('http://mirror.example.org/x', 'https://cdn.example.org/y', True),
    ('http://mirror.example.org/x', 'http://cdn.example.org/y', True),
    ('https://huggingface.co/x', 'https://127.0.0.1/y', False),
    ('https://huggingface.co/x', 'https://localhost/y', False),
    ('https://huggingface.co/x', 'https://169.254.169.254/latest', False),
    ('https://huggingface.co/x', 'https://10.0.0.1/', False),
    ('https://huggingface.co/x', 'https://[::1]/', False),
    ('https://huggingface.co/x', 'https://printer/', False),
    ('https://huggingface.co/x', 'https://printer.local/', False),
    ('http://10.0.0.5/x', 'http://10.0.0.6/y', True),
    ('http://localhost:8000/x', 'http://localhost:8001/y', True),
    ('https://huggingface.co/x', 'file:///etc/passwd', False),
    ('https://huggingface.co/x', 'javascript:alert(1)', False),
    ('https://huggingface.co/x', 'https:///y', False),
    ('https://huggingface.co/x', 'https://[bad/y', False),
])
def test_where_a_redirection_may_lead(here, there, follows):
    if follows:
        download.refuse_redirection(here, there)
    else:
        with pytest.raises(download.Failed, match='makes no sense'):
            download.refuse_redirection(here, there)


@pytest.mark.parametrize('url, told', [
    ('https://me:secret@host/x', 'https://host/x'),
    ('https://me:p@ss@host/x', 'https://host/x'),
    ('https://token@host', 'https://host'),
    ('https://host/a@b', 'https://host/a@b'),
    ('https://host/\x1b[31m\n', 'https://host/?[31m'),
])
def test_passwords_are_not_told(url, told):
    assert download.shown(url) == told


# --------------------------------------------------------------------------------------------------
# the server

STATUSES = ('403', '429', '500', '503')
TRANSIENT = ['429', '500', '503', 'noise', 'mute', 'cut', 'stall', 'ignores range', 'too short',
             'too long', 'garbage', 'bad tokens', 'page', 'other range', 'no length', 'bit',
             'redirect']


class Handler(http.server.BaseHTTPRequestHandler):
    """
    Serves server.files. Each request does what the next word of server.script says, and the right
    thing when there is none.
    """

    def log_message(self, *args):
        """Says nothing."""

    def do_GET(self):
        server = self.server
        server.seen.append((self.path, self.headers.get('Range')))
        how = server.script.pop(0) if server.script else 'ok'
        body = server.files.get(self.path)
        if body is None:
            self.send_empty(404, ('Retry-After', '0'))
        elif how in STATUSES:
            self.send_empty(int(how), ('Retry-After', '0'))
        elif how == 'noise':
            self.wfile.write(b'\0\1\2 this is no HTTP\r\n\r\n')
        elif how == 'mute':
            server.over.wait(10)
        elif how == 'redirect':
            checksum = hashlib.sha256(body).hexdigest()
            self.send_empty(302, ('Location', self.path), ('X-Linked-Etag', f'"{checksum}"'))
        else:
            self.send_file(body, how)

    def send_empty(self, status, *headers):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header('Content-Length', '0')
        self.end_headers()

    def send_file(self, body, how):
        """The file from the first byte that was asked for, or something else."""
        first = 0
        if how != 'ignores range':
            asked = self.headers.get('Range') or 'bytes=0-'
            first = int(asked.removeprefix('bytes=').removesuffix('-'))
        if first >= len(body):
            self.send_empty(416, ('Content-Range', f'bytes */{len(body)}'))
            return
        if how == 'garbage':
            body = np.random.default_rng(1).bytes(len(body))
        if how == 'bad tokens':
            body = body[:-2] + b'\xff\xff'
        if how == 'other range':
            first += 100
        if how == 'page':
            body, first = b'<html>please log in</html>', 0
        self.send_rest(body, first, how)

    def send_rest(self, body, first, how):
        rest = body[first:]
        half = len(rest) // 2
        length = {'too short': half, 'too long': len(rest) + 1000}.get(how, len(rest))
        self.send_response(206 if first else 200)
        if first:
            self.send_header('Content-Range', f"bytes {first}-{len(body) - 1}/{len(body)}")
        if how != 'no length':
            self.send_header('Content-Length', str(length))
        self.end_headers()

        sent = {'cut': half, 'stall': half, 'bit': 20_000}.get(how, length)
        self.wfile.write(rest[:sent])
        self.wfile.flush()
        if how == 'stall':
            self.server.over.wait(10)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *args):
        """The client hung up, as it should."""


@pytest.fixture
def server(monkeypatch):
    """A local server; time-outs and pauses are short."""
    server = Server(('127.0.0.1', 0), Handler)
    server.files = {'/a.bin': RIGHT}
    server.script = []
    server.seen = []
    server.over = threading.Event()
    server.url = f'http://127.0.0.1:{server.server_port}'
    serve = threading.Thread(target=server.serve_forever, kwargs=dict(poll_interval=0.01),
                             daemon=True)
    serve.start()
    monkeypatch.setattr(download, 'PAUSE', 0.001)
    monkeypatch.setattr(download, 'TIMEOUT', 0.25)
    monkeypatch.setenv('no_proxy', '*')
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()


# --------------------------------------------------------------------------------------------------
# one file


def check_tokens(file):
    return download.count_tokens(file, 257)


def get(server, folder):
    fetch(server.url + '/a.bin', str(folder / 'a.bin'), check_tokens)


@pytest.mark.parametrize('how', TRANSIENT)
def test_what_goes_wrong_once_or_twice_is_overcome(server, tmp_path, how):
    server.script = [how, 'cut', how]
    get(server, tmp_path)
    assert (tmp_path / 'a.bin').read_bytes() == RIGHT
    assert os.listdir(tmp_path) == ['a.bin']


@pytest.mark.parametrize('how', ['429', '500', 'noise', 'mute', 'too short', 'garbage',
                                 'bad tokens', 'page'])
def test_what_goes_wrong_always_is_one_line(server, tmp_path, how):
    server.script = [how] * 50
    with pytest.raises(UserError) as error:
        get(server, tmp_path)
    message = str(error.value)
    assert server.url in message
    assert '\n' not in message
    assert 'same command' in message
    assert not os.path.exists(tmp_path / 'a.bin')
    assert len(server.seen) <= 2 * download.TRIES


@pytest.mark.parametrize('status', ['403', '404'])
def test_what_no_further_try_would_change(server, tmp_path, status):
    if status == '404':
        server.files.clear()
    else:
        server.script = [status]
    with pytest.raises(UserError, match=status):
        get(server, tmp_path)
    assert len(server.seen) == 1
    assert os.listdir(tmp_path) == []


def test_many_cuts_do_not_matter_as_long_as_bytes_arrive(server, tmp_path):
    # more failures than TRIES, never so many in a row without a new byte
    server.script = ['bit'] * 5 + ['500', 'bit']
    get(server, tmp_path)
    assert (tmp_path / 'a.bin').read_bytes() == RIGHT
    starts = [int(asked.removeprefix('bytes=').removesuffix('-'))
              for _, asked in server.seen if asked]
    assert len(starts) == len(server.seen) - 1, "every try but the first asked for the rest alone"
    assert starts == sorted(starts)


def test_the_next_run_goes_on(server, tmp_path):
    server.script = ['cut'] + ['500'] * 50
    with pytest.raises(UserError):
        get(server, tmp_path)
    have = os.path.getsize(tmp_path / 'a.bin.part')
    assert 0 < have < len(RIGHT)

    server.script, server.seen = [], []
    get(server, tmp_path)
    assert server.seen == [('/a.bin', f'bytes={have}-')]
    assert (tmp_path / 'a.bin').read_bytes() == RIGHT


@pytest.mark.parametrize('how, tries', [
    ('ignores range', 1),
    ('other range', 2),
])
def test_a_server_that_does_not_send_the_rest_alone(server, tmp_path, how, tries):
    (tmp_path / 'a.bin.part').write_bytes(RIGHT[:1000])
    server.script = [how]
    get(server, tmp_path)
    assert (tmp_path / 'a.bin').read_bytes() == RIGHT
    assert len(server.seen) == tries


@pytest.mark.parametrize('part', [
    pytest.param(RIGHT, id='whole'),
    pytest.param(RIGHT + b'x', id='longer'),
    pytest.param(b'\xff' * len(RIGHT), id='other'),
    pytest.param(b'\xff' * 500, id='other start'),
])
def test_any_part_of_an_earlier_run(server, tmp_path, part):
    (tmp_path / 'a.bin.part').write_bytes(part)
    get(server, tmp_path)
    assert (tmp_path / 'a.bin').read_bytes() == RIGHT
    assert os.listdir(tmp_path) == ['a.bin']


def test_the_checksum_the_server_states(server, tmp_path):
    changed = bytearray(RIGHT)
    changed[5000] ^= 1
    (tmp_path / 'a.bin.part').write_bytes(changed[:6000])
    server.script = ['redirect']
    get(server, tmp_path)
    assert (tmp_path / 'a.bin').read_bytes() == RIGHT


QUICK = [how for how in TRANSIENT if how not in ('mute', 'stall')]


@hypothesis_settings(max_examples=25, deadline=None, derandomize=True,
                     suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(QUICK), max_size=12))
def test_any_row_of_mishaps(server, tmp_path, script):
    server.script = list(script)
    try:
        get(server, tmp_path)
    except UserError:
        assert not os.path.exists(tmp_path / 'a.bin')
    else:
        assert (tmp_path / 'a.bin').read_bytes() == RIGHT
    for name in os.listdir(tmp_path):
        os.remove(tmp_path / name)


def test_progress_tells_rate_and_time_left(monkeypatch, capsys):
    now = 0
    monkeypatch.setattr(download.time, 'monotonic', lambda: now)
    progress = download.Progress('data/x', 500e6)
    for now, done in ((0, 100e6), (20, 150e6), (40, 200e6)):
        progress(done)
    said = capsys.readouterr().out
    assert said.split() == 'data/x: 40% of 500 MB | 2.5 MB/s | 0:02:00 left'.split()


# --------------------------------------------------------------------------------------------------
# the data sets

FOLDER = os.path.join('data', 'fineweb-edu')


def byte_for_gpt2(name):
    """get_tokenizer, which downloads nothing."""
    return get_tokenizer('byte' if name == 'gpt2' else name)


@pytest.fixture
def hub(server, tmp_path, monkeypatch):
    """
    The server as a mirror of Hugging Face with four small shards, tmp_path as current folder, and
    bytes in gpt2's place.
    """
    sizes = dict(val_000000=700, train_000001=900, train_000002=1100, train_000003=500)
    repository = '/datasets/kjj0/finewebedu10B-gpt2/resolve/main'
    server.files = {f'{repository}/finewebedu_{name}.bin': shard(n, n) for name, n in sizes.items()}
    monkeypatch.setenv('HF_ENDPOINT', server.url + '/')
    monkeypatch.setattr(download, 'get_tokenizer', byte_for_gpt2)
    monkeypatch.setitem(shards.VOCABULARIES, 'gpt2', (257, 256))
    monkeypatch.chdir(tmp_path)
    return server


def names(server):
    """Of the shards that were asked for: 'val_000000', ..."""
    files = [os.path.basename(path) for path, _ in server.seen]
    return [file.removeprefix('finewebedu_').removesuffix('.bin') for file in files]


def test_fineweb_from_a_mirror(hub):
    hub.script = ['redirect', 'cut', '500', 'redirect', 'garbage']
    prepare_data.main(['fineweb-edu', '--shards=2'])
    meta = read_meta(FOLDER)
    assert [entry['tokens'] for entry in meta['train']['shards']] == [900, 1100]
    assert [entry['tokens'] for entry in meta['val']['shards']] == [700]
    for path, content in list(hub.files.items())[:3]:
        with open(os.path.join(FOLDER, os.path.basename(path)), 'rb') as f:
            assert f.read() == content
        assert hashlib.sha256(content).hexdigest() in json.dumps(meta)

    val = next(iter(hub.files.values()))
    tokens = np.frombuffer(val[1024:], np.uint16)
    assert meta['val']['bytes'] == (tokens < 256).sum(), "end-of-text is no text"
    assert sorted(os.listdir(FOLDER)) == ['finewebedu_train_000001.bin',
                                          'finewebedu_train_000002.bin',
                                          'finewebedu_val_000000.bin',
                                          'meta.json']
    prepare_data.main(['--check', FOLDER])
    assert Windows(FOLDER, 'train', meta, 16).n == 899 // 16 + 1099 // 16


def test_fineweb_again_fetches_only_what_is_missing_or_damaged(hub):
    prepare_data.main(['fineweb-edu'])
    assert names(hub) == ['val_000000', 'train_000001']
    hub.seen.clear()
    prepare_data.main(['fineweb-edu'])
    assert names(hub) == []

    with open(os.path.join(FOLDER, 'finewebedu_train_000001.bin'), 'r+b') as f:
        f.truncate(1500)
    with pytest.raises(UserError, match='train_000001'):
        prepare_data.main(['--check', FOLDER])
    prepare_data.main(['fineweb-edu', '--shards=3'])
    assert names(hub) == ['train_000001', 'train_000002', 'train_000003']
    assert len(read_meta(FOLDER)['train']['shards']) == 3


def test_a_failed_download_keeps_the_data_set_there_was(hub):
    prepare_data.main(['fineweb-edu'])
    hub.script = ['ok', 'cut'] + ['500'] * 50
    with pytest.raises(UserError, match='train_000003'):
        prepare_data.main(['fineweb-edu', '--shards=3'])
    prepare_data.main(['--check', FOLDER])
    assert len(read_meta(FOLDER)['train']['shards']) == 1
    thirds = sorted(name for name in os.listdir(FOLDER) if '3' in name)
    assert thirds == ['finewebedu_train_000003.bin.part']


@pytest.mark.parametrize('argv, words', [
    (['fineweb-edu', '--shards=100'], '1 to 99'),
    (['fineweb', '--shards=0'], '1 to 103'),
    (['fineweb', '--tokenizer=byte'], 'gpt2'),
])
def test_refusals(hub, argv, words):
    with pytest.raises(UserError, match=words):
        prepare_data.main(argv)
    assert hub.seen == []


def test_a_mirror_that_is_no_address(hub, monkeypatch):
    monkeypatch.setenv('HF_ENDPOINT', 'mirror')
    with pytest.raises(UserError, match='HF_ENDPOINT'):
        prepare_data.main(['fineweb'])


def test_shakespeare(hub, monkeypatch):
    text = b''.join(b'line %d of a play\n' % i for i in range(70_000))
    hub.files['/input.txt'] = text
    monkeypatch.setattr(download, 'SHAKESPEARE', hub.url + '/input.txt')
    monkeypatch.setattr(download, 'SHAKESPEARE_SHA256', hashlib.sha256(text).hexdigest())
    hub.script = ['page', 'cut']
    prepare_data.main(['shakespeare'])
    meta = read_meta(os.path.join('data', 'shakespeare'))
    assert meta['train']['bytes'] + meta['val']['bytes'] == len(text)
    assert 0.02 < meta['val']['bytes'] / len(text) < 0.3

    hub.seen.clear()
    prepare_data.main(['shakespeare'])
    assert hub.seen == []


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason="needs /dev/full")
def test_a_full_disk(hub):
    os.makedirs(FOLDER)
    os.symlink('/dev/full', os.path.join(FOLDER, 'finewebedu_val_000000.bin.part'))
    with pytest.raises(UserError, match='cannot be written .No space left on device'):
        prepare_data.main(['fineweb-edu'])
    assert os.listdir(FOLDER) == ['finewebedu_val_000000.bin.part']
    assert len(hub.seen) == 1


def test_the_folder_vanishes(hub, monkeypatch):
    class Vanishing(download.Progress):
        def __call__(self, done):
            shutil.rmtree('data')

    monkeypatch.setattr(download, 'Progress', Vanishing)
    with pytest.raises(UserError, match='cannot be written'):
        prepare_data.main(['fineweb-edu'])
    assert os.listdir('.') == []
