"""Downloads from a server that does everything wrong: the right bytes arrive, or one clear line, never a bad file under its final name."""
import hashlib
import http.server
import json
import os
import shutil
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings as hypothesis_settings, strategies as st

from engine import download
import prepare_data
from engine.errors import UserError
from engine.shards import MAGIC, VERSION, Windows, get_tokenizer, read_meta
from engine.download import fetch


def shard(n_tokens, seed):
    header = np.zeros(256, np.int32)
    header[:3] = MAGIC, VERSION, n_tokens
    return header.tobytes() + np.random.default_rng(seed).integers(0, 257, n_tokens, dtype=np.uint16).tobytes()


RIGHT = shard(50_000, 0)  # 100 kB


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves server.files; each request does what the next word of server.script says, and the right thing when there is none."""

    def log_message(self, *args): pass

    def do_GET(self):
        server, body = self.server, self.server.files.get(self.path)
        server.seen.append((self.path, self.headers.get('Range')))
        how = server.script.pop(0) if server.script else 'ok'
        if how in ('429', '500', '503', '403') or body is None:
            self.send_response(int(how) if body is not None else 404)
            self.send_header('Retry-After', '0')
            self.send_header('Content-Length', '0')
            return self.end_headers()
        if how == 'noise': return self.wfile.write(b'\0\1\2 this is no HTTP\r\n\r\n')
        if how == 'mute': return server.over.wait(10)
        if how == 'redirect':
            self.send_response(302)
            self.send_header('Location', self.path)
            self.send_header('X-Linked-Etag', f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header('Content-Length', '0')
            return self.end_headers()
        first = int((self.headers.get('Range') or 'bytes=0-')[6:-1]) if how != 'ignores range' else 0
        if first >= len(body):
            self.send_response(416)
            self.send_header('Content-Range', f'bytes */{len(body)}')
            self.send_header('Content-Length', '0')
            return self.end_headers()
        if how == 'garbage': body = np.random.default_rng(1).bytes(len(body))
        if how == 'bad tokens': body = body[:-2] + b'\xff\xff'
        if how == 'other range': first += 100
        if how == 'page': body, first = b'<html>please log in</html>', 0
        rest = body[first:]
        length = {'too short': len(rest) // 2, 'too long': len(rest) + 1000}.get(how, len(rest))
        self.send_response(206 if first else 200)
        if first: self.send_header('Content-Range', f"bytes {first}-{len(body) - 1}/{len(body)}")
        if how != 'no length': self.send_header('Content-Length', str(length))
        self.end_headers()
        self.wfile.write(rest[:len(rest) // 2] if how in ('cut', 'stall', 'cut without length') else rest[:20_000] if how == 'bit' else rest[:length])
        self.wfile.flush()
        if how == 'stall': server.over.wait(10)


TRANSIENT = ['429', '500', '503', 'noise', 'mute', 'cut', 'stall', 'ignores range', 'too short', 'too long', 'garbage', 'bad tokens', 'page', 'other range',
             'no length', 'bit', 'redirect']


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    def handle_error(self, *args): pass  # the client hung up, as it should


@pytest.fixture
def server(monkeypatch):
    """A local server; time-outs and pauses are short."""
    s = Server(('127.0.0.1', 0), Handler)
    s.files, s.script, s.seen, s.over = {'/a.bin': RIGHT}, [], [], threading.Event()
    s.url = f'http://127.0.0.1:{s.server_port}'
    threading.Thread(target=s.serve_forever, kwargs=dict(poll_interval=0.01), daemon=True).start()
    monkeypatch.setattr(download, 'PAUSE', 0.001)
    monkeypatch.setattr(download, 'TIMEOUT', 0.25)
    monkeypatch.setenv('no_proxy', '*')
    yield s
    s.over.set()
    s.shutdown()
    s.server_close()


def get(server, folder):
    fetch(server.url + '/a.bin', str(folder / 'a.bin'), lambda file: download.count_tokens(file, 257))


@pytest.mark.parametrize('how', TRANSIENT)
def test_what_goes_wrong_once_or_twice_is_overcome(server, tmp_path, how):
    server.script = [how, 'cut', how]
    get(server, tmp_path)
    assert (tmp_path / 'a.bin').read_bytes() == RIGHT and os.listdir(tmp_path) == ['a.bin']


@pytest.mark.parametrize('how', ['429', '500', 'noise', 'mute', 'too short', 'too long', 'garbage', 'bad tokens', 'page'])
def test_what_goes_wrong_always_is_one_line(server, tmp_path, how):
    server.script = [how] * 50
    with pytest.raises(UserError) as error: get(server, tmp_path)
    assert server.url in str(error.value) and '\n' not in str(error.value) and 'same command' in str(error.value)
    assert not os.path.exists(tmp_path / 'a.bin') and len(server.seen) <= 2 * download.TRIES


@pytest.mark.parametrize('how', ['403', 'missing'])
def test_what_no_further_try_would_change(server, tmp_path, how):
    server.script = [how] if how == '403' else []
    if how == 'missing': server.files.clear()
    with pytest.raises(UserError, match='404' if how == 'missing' else how): get(server, tmp_path)
    assert len(server.seen) == 1 and os.listdir(tmp_path) == []


def test_many_cuts_do_not_matter_as_long_as_bytes_arrive(server, tmp_path):
    server.script = ['bit'] * 5 + ['500', 'bit']  # more failures than TRIES, never so many in a row without a new byte
    get(server, tmp_path)
    assert (tmp_path / 'a.bin').read_bytes() == RIGHT
    starts = [int(r[6:-1]) for _, r in server.seen if r]
    assert len(starts) == len(server.seen) - 1 and starts == sorted(starts), "every try but the first asked for the rest alone"


def test_the_next_run_goes_on(server, tmp_path):
    server.script = ['cut'] + ['500'] * 50
    with pytest.raises(UserError): get(server, tmp_path)
    have = os.path.getsize(tmp_path / 'a.bin.part')
    assert 0 < have < len(RIGHT)
    server.script, server.seen = [], []
    get(server, tmp_path)
    assert server.seen == [('/a.bin', f'bytes={have}-')] and (tmp_path / 'a.bin').read_bytes() == RIGHT


@pytest.mark.parametrize('how, tries', [('ignores range', 1), ('other range', 2)])
def test_a_server_that_does_not_send_the_rest_alone(server, tmp_path, how, tries):
    (tmp_path / 'a.bin.part').write_bytes(RIGHT[:1000])
    server.script = [how]
    get(server, tmp_path)
    assert (tmp_path / 'a.bin').read_bytes() == RIGHT and len(server.seen) == tries


@pytest.mark.parametrize('part', [RIGHT, RIGHT + b'x', b'\xff' * len(RIGHT), b'\xff' * 500], ids=['whole', 'longer', 'other', 'other start'])
def test_any_part_of_an_earlier_run(server, tmp_path, part):
    (tmp_path / 'a.bin.part').write_bytes(part)
    get(server, tmp_path)
    assert (tmp_path / 'a.bin').read_bytes() == RIGHT and os.listdir(tmp_path) == ['a.bin']


def test_the_checksum_the_server_states(server, tmp_path):
    changed = bytearray(RIGHT)
    changed[5000] ^= 1
    (tmp_path / 'a.bin.part').write_bytes(changed[:6000])
    server.script = ['redirect']
    get(server, tmp_path)
    assert (tmp_path / 'a.bin').read_bytes() == RIGHT


@hypothesis_settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from([how for how in TRANSIENT if how not in ('mute', 'stall')]), max_size=12))
def test_any_row_of_mishaps(server, tmp_path, script):
    server.script = list(script)
    try: get(server, tmp_path)
    except UserError: assert not os.path.exists(tmp_path / 'a.bin')
    else: assert (tmp_path / 'a.bin').read_bytes() == RIGHT
    for name in os.listdir(tmp_path): os.remove(tmp_path / name)


# the data sets

@pytest.fixture
def hub(server, tmp_path, monkeypatch):
    """The server as a mirror of Hugging Face with four small shards, tmp_path as current folder, and bytes in gpt2's place."""
    server.files = {f'/datasets/kjj0/finewebedu10B-gpt2/resolve/main/finewebedu_{name}.bin': shard(n, n) for name, n in
                    (('val_000000', 700), ('train_000001', 900), ('train_000002', 1100), ('train_000003', 500))}
    monkeypatch.setenv('HF_ENDPOINT', server.url + '/')
    monkeypatch.setattr(download, 'get_tokenizer', lambda name: get_tokenizer('byte' if name == 'gpt2' else name))
    monkeypatch.chdir(tmp_path)
    return server


FOLDER = os.path.join('data', 'fineweb-edu')


def names(server):
    return [path.rsplit('_', 2)[1] + path[-11:-4] for path, _ in server.seen]


def test_fineweb_from_a_mirror(hub):
    hub.script = ['redirect', 'cut', '500', 'redirect', 'garbage']
    prepare_data.main(['fineweb-edu', '--shards=2'])
    meta = read_meta(FOLDER)
    assert [s['tokens'] for s in meta['train']['shards']] == [900, 1100] and [s['tokens'] for s in meta['val']['shards']] == [700]
    for path, content in list(hub.files.items())[:3]:
        with open(os.path.join(FOLDER, os.path.basename(path)), 'rb') as f: assert f.read() == content
        assert hashlib.sha256(content).hexdigest() in json.dumps(meta)
    tokens = np.frombuffer(next(iter(hub.files.values()))[1024:], np.uint16)
    assert meta['val']['bytes'] == (tokens < 256).sum(), "end-of-text is no text"
    assert sorted(os.listdir(FOLDER)) == ['finewebedu_train_000001.bin', 'finewebedu_train_000002.bin', 'finewebedu_val_000000.bin', 'meta.json']
    prepare_data.main(['--check', FOLDER])
    assert Windows(FOLDER, 'train', meta, 16).n == 899 // 16 + 1099 // 16


def test_fineweb_again_fetches_only_what_is_missing_or_damaged(hub):
    prepare_data.main(['fineweb-edu'])
    assert names(hub) == ['val_000000', 'train_000001']
    hub.seen.clear()
    prepare_data.main(['fineweb-edu'])
    assert names(hub) == []
    with open(os.path.join(FOLDER, 'finewebedu_train_000001.bin'), 'r+b') as f: f.truncate(1500)
    with pytest.raises(UserError, match='train_000001'): prepare_data.main(['--check', FOLDER])
    prepare_data.main(['fineweb-edu', '--shards=3'])
    assert names(hub) == ['train_000001', 'train_000002', 'train_000003'] and len(read_meta(FOLDER)['train']['shards']) == 3


def test_a_failed_download_keeps_the_data_set_there_was(hub):
    prepare_data.main(['fineweb-edu'])
    hub.script = ['ok', 'cut'] + ['500'] * 50
    with pytest.raises(UserError, match='train_000003'): prepare_data.main(['fineweb-edu', '--shards=3'])
    prepare_data.main(['--check', FOLDER])
    assert len(read_meta(FOLDER)['train']['shards']) == 1
    assert sorted(name for name in os.listdir(FOLDER) if '3' in name) == ['finewebedu_train_000003.bin.part']


@pytest.mark.parametrize('argv, words', [(['fineweb-edu', '--shards=100'], '1 to 99'), (['fineweb', '--shards=0'], '1 to 103'), (['fineweb', '--tokenizer=byte'], 'gpt2')])
def test_refusals(hub, argv, words):
    with pytest.raises(UserError, match=words): prepare_data.main(argv)
    assert hub.seen == []


def test_a_mirror_that_is_no_address(hub, monkeypatch):
    monkeypatch.setenv('HF_ENDPOINT', 'mirror')
    with pytest.raises(UserError, match='HF_ENDPOINT'): prepare_data.main(['fineweb'])


def test_shakespeare(hub, monkeypatch):
    text = b''.join(b'line %d of a play\n' % i for i in range(70_000))
    hub.files['/input.txt'] = text
    monkeypatch.setattr(download, 'SHAKESPEARE', hub.url + '/input.txt')
    monkeypatch.setattr(download, 'SHAKESPEARE_SHA256', hashlib.sha256(text).hexdigest())
    hub.script = ['page', 'cut']
    prepare_data.main(['shakespeare'])
    meta = read_meta(os.path.join('data', 'shakespeare'))
    assert meta['train']['bytes'] + meta['val']['bytes'] == len(text) and 0.02 < meta['val']['bytes'] / len(text) < 0.3
    hub.seen.clear()
    prepare_data.main(['shakespeare'])
    assert hub.seen == []


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason="needs /dev/full")
def test_a_full_disk(hub):
    os.makedirs(FOLDER)
    os.symlink('/dev/full', os.path.join(FOLDER, 'finewebedu_val_000000.bin.part'))
    with pytest.raises(UserError, match='cannot be written .No space left on device'): prepare_data.main(['fineweb-edu'])
    assert os.listdir(FOLDER) == ['finewebedu_val_000000.bin.part'] and len(hub.seen) == 1


def test_the_folder_vanishes(hub, monkeypatch):
    class Vanishing(download.Progress):
        def __call__(self, done): shutil.rmtree('data')
    monkeypatch.setattr(download, 'Progress', Vanishing)
    with pytest.raises(UserError, match='cannot be written'): prepare_data.main(['fineweb-edu'])
    assert os.listdir('.') == []


def test_progress_tells_rate_and_time_left(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(download.time, 'monotonic', lambda: now[0])
    progress = download.Progress('data/x', 500e6)
    for now[0], done in ((0, 100e6), (20, 150e6), (40, 200e6)): progress(done)
    assert capsys.readouterr().out.split() == 'data/x: 40% of 500 MB | 2.5 MB/s | 0:02:00 left'.split()
