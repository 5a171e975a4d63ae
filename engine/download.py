"""
Downloads that survive a bad line: what has arrived is kept, and the next try, or the next run, goes on from there.

    fetch(url, path, check)         # path then holds what `check` accepts; until then there is only path.part

Hugging Face is reached under the address in the environment variable HF_ENDPOINT, for those who need a mirror.
"""

import os
import re
import sys
import time

import numpy as np
import requests

from engine.errors import UserError
from engine.files import checksum
from engine.shards import HEADER_BYTES, count_tokens, get_tokenizer

FINEWEB = {'fineweb': ('kjj0/fineweb10B-gpt2', 'fineweb', 103), 'fineweb-edu': ('kjj0/finewebedu10B-gpt2', 'finewebedu', 99)}
SHAKESPEARE = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'
SHAKESPEARE_SHA256 = '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'

TIMEOUT = 30     # seconds without a byte after which a connection counts as dead
TRIES = 6        # failed tries in a row, none of which brought a new byte, before giving up
PAUSE = 1        # seconds before the second try; doubles with every further one


class Failed(Exception):
    """A try that failed and is worth another; `wait` is how many seconds the server asked for."""
    wait = 0


class Progress:
    """How far, how fast and how long still: one line rewritten twice a second on a terminal, a new one every 30 s in a file."""

    def __init__(self, what, total):
        self.what, self.total, self.first = what, max(total, 1), None
        self.start = self.shown = time.monotonic()
        self.interval, self.end = (0.5, '\r') if sys.stdout and sys.stdout.isatty() else (30, '\n')

    def __call__(self, done):
        """`done` of `total` bytes are there. Those of the first call were there before and say nothing about the speed."""
        if self.first is None: self.first = done
        now = time.monotonic()
        if now - self.shown < self.interval: return
        self.shown = now
        rate = max(1, done - self.first) / (now - self.start)
        left = max(0, round((self.total - done) / rate))
        print(f"{self.what}: {done / self.total:4.0%} of {self.total / 1e6:,.0f} MB | {rate / 1e6:.1f} MB/s | "
              f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left   ", end=self.end, flush=True)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.end == '\r' and self.shown > self.start: print()  # whatever is printed next gets a line of its own


def fetch(url, path, check, progress=lambda n_bytes: None):
    """
    Download `url` to `path`; progress(n_bytes) is called with the bytes there are. `check` is given the file when it is complete;
    if it raises a UserError the content is wrong and thrown away. UserError for an answer that no further try would change, or
    after TRIES tries; OSError if the disk does not take it. Whatever arrived is kept for the next run in path.part.
    """
    part, failures = path + '.part', 0
    most = size(part)
    while True:
        try:
            stated = request_rest(url, part, progress)
            try:
                if stated and checksum(part) != stated: raise UserError(f"SHA-256 is not {stated}, which the server states")
                check(part)
            except UserError as error:
                os.remove(part)
                raise Failed("wrong content, " + str(error).partition(';')[0].removeprefix(part + ': ')) from None
            return os.replace(part, path)
        except (requests.exceptions.MissingSchema, requests.exceptions.InvalidSchema, requests.exceptions.InvalidURL):
            raise UserError(f"{url}: not an address; check HF_ENDPOINT") from None
        except (requests.RequestException, Failed) as error:
            reason = str(error) if isinstance(error, Failed) else type(error).__name__
            failures = 1 if size(part) > most else failures + 1
            most = max(most, size(part))
            if failures == TRIES:
                raise UserError(f"{url}: {TRIES} tries in a row failed, the last by {reason}; check the network and run "
                                "the same command again: it keeps what has arrived") from None
            wait = max(PAUSE * 2 ** (failures - 1), getattr(error, 'wait', 0))
            print(f"{os.path.basename(path)}: {reason}; next try in {wait:g} s", flush=True)
            time.sleep(wait)


def size(path):
    return os.path.getsize(path) if os.path.exists(path) else 0


def request_rest(url, part, progress):
    """
    One request for what `part` does not hold yet; Failed if the file is then not as long as the server says. Returns the file's
    SHA-256 in hex if the server states it, as Hugging Face does in the redirection to its storage, else None.
    """
    have = size(part)
    headers = {'Accept-Encoding': 'identity', **({'Range': f'bytes={have}-'} if have else {})}
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response:
        status, content_range = response.status_code, response.headers.get('Content-Range', '')
        linked = (r.headers.get('X-Linked-Etag', '').strip('"') for r in [*response.history, response])
        sha256 = next((etag for etag in linked if re.fullmatch('[0-9a-f]{64}', etag)), None)
        if status == 416 and content_range == f'bytes */{have}': return sha256  # there is no rest
        if status in (408, 429) or status >= 500:
            failed = Failed(f"status {status}")
            if (asked := response.headers.get('Retry-After', '')).isdecimal(): failed.wait = min(int(asked), 300)
            raise failed
        span = re.match(r'bytes (\d+)-\d+/(\d+)$', content_range) if status == 206 else None
        if status == 416 or status == 206 and not (span and int(span[1]) == have):
            if have: os.remove(part)  # the server speaks of another file: start over
            raise Failed("an answer that does not fit what was asked for")
        if status not in (200, 206): raise UserError(f"{url}: status {status}, {response.reason}; nothing to download there")
        with open(part, 'ab' if status == 206 else 'wb') as f:  # 200: it ignores Range and sends all
            for block in response.iter_content(2 ** 14):  # small: of a block that a cut ends nothing is kept
                f.write(block)
                progress(f.tell())
            f.flush()
            os.fsync(f.fileno())
        whole = span[2] if span else response.headers.get('Content-Length', '')
        if whole.isdecimal() and size(part) != int(whole): raise Failed(f"{size(part)} of {whole} bytes")
        return sha256


# ----------------------------------------------------------------------------------------------------------------------
# the data sets

def fineweb(kind, shards, tokenizer, folder):
    """
    Download the validation shard and `shards` training shards of FineWeb (kind: a name in FINEWEB) into a folder; what is there
    already stays. Returns the folder's meta.json as a dictionary.
    """
    repository, stem, most = FINEWEB[kind]
    if tokenizer not in (None, 'gpt2'): raise UserError(f"--tokenizer={tokenizer}: {kind} comes as tokens of gpt2; leave it out")
    if not 1 <= shards <= most: raise UserError(f"--shards={shards}: {kind} has 1 to {most} training shards")
    tokenizer = get_tokenizer('gpt2')  # before the long download: without it, nobody could sample from the model either
    lengths = np.array([len(tokenizer.decode_bytes([token])) for token in range(tokenizer.eot_token)] + [0])
    hub = (os.environ.get('HF_ENDPOINT') or 'https://huggingface.co').rstrip('/')
    splits = dict(train=dict(bytes=0, tokens=0, shards=[]), val=dict(bytes=0, tokens=0, shards=[]))
    shard_bytes = HEADER_BYTES + 2 * 10 ** 8  # of all but the last
    with Progress(folder, (shards + 1) * shard_bytes) as progress:
        for i in range(shards + 1):
            split = splits['train' if i else 'val']
            name = f"{stem}_{'train' if i else 'val'}_{i:06d}.bin"
            path = os.path.join(folder, name)
            try: counts = count_tokens(path, tokenizer.n_vocab)
            except UserError:  # missing, or damaged since
                fetch(f"{hub}/datasets/{repository}/resolve/main/{name}", path,
                      lambda file: count_tokens(file, tokenizer.n_vocab), lambda n_bytes: progress(i * shard_bytes + n_bytes))
                counts = count_tokens(path, tokenizer.n_vocab)
            split['shards'].append(dict(name=name, tokens=int(counts.sum()), sha256=checksum(path)))
            split['tokens'] += int(counts.sum())
            split['bytes'] += int(counts @ lengths)
    return dict(tokenizer='gpt2', n_tokens=tokenizer.n_vocab, eot=tokenizer.eot_token,
                source=f"{hub}/datasets/{repository}", **splits)


def shakespeare(folder):
    """Download the classic megabyte of Shakespeare; returns the path of the text."""
    path = os.path.join(folder, 'input.txt')
    def check(file):
        if checksum(file) != SHAKESPEARE_SHA256: raise UserError(f"{file}: not the text that was expected")
    try: check(path)
    except (UserError, FileNotFoundError): fetch(SHAKESPEARE, path, check)
    return path
