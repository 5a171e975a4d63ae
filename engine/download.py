"""
Downloads that survive a bad line: what has arrived is kept, and the next try, or the next run, goes
on from there.

    fetch(url, path, check, progress)    path then holds what `check` accepts; until then there is
                                         only path.part
    fineweb(kind, shards, ..)            shards of FineWeb, and their meta.json
    shakespeare(folder)                  a megabyte of text

Hugging Face is reached under the address in the environment variable HF_ENDPOINT, for those who
need a mirror.
"""

import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial

import requests

from engine.files import UserError, checksum
from engine.shards import HEADER_BYTES, count_tokens, get_tokenizer, read_meta, token_lengths

TIMEOUT = 30        # seconds without a byte after which a connection counts as dead
TRIES = 6           # failed tries, none of which but the first brought a new byte, before giving up
PAUSE = 1           # seconds before the second try; doubles with every further one
BLOCK = 2 ** 14     # bytes that are written at once

FINEWEB = {'fineweb': 103, 'fineweb-edu': 99}   # how many shards there are for training
FINEWEB_BYTES = HEADER_BYTES + 2 * 10 ** 8  # of every shard but the last

SHAKESPEARE = ('https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/'
               'input.txt')
SHAKESPEARE_SHA256 = '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'


class Failed(Exception):
    """A try that failed and is worth another."""


class ProgressLine:
    """
    How far, how fast and how long still: one line rewritten twice a second on a terminal, a new one
    every 30 s in a file.
    """

    def __init__(self, what, total):
        self.what = what
        self.total = max(total, 1)
        self.first = None           # bytes that were there before this run
        self.start = time.monotonic()
        self.shown = self.start     # when the last line was
        self.interval, self.end = (0.5, '\r') if sys.stdout.isatty() else (30, '\n')

    def __call__(self, done):
        """`done` bytes are there. Those of the first call say nothing about the speed."""
        if self.first is None:
            self.first = done
        now = time.monotonic()
        if now - self.shown < self.interval:
            return
        self.shown = now
        rate = max(1, done - self.first) / (now - self.start)  # bytes per second
        left = timedelta(seconds=max(0, round((self.total - done) / rate)))
        print(f"{self.what}: {done / self.total:4.0%} of {self.total / 1e6:,.0f} MB | "
              f"{rate / 1e6:.1f} MB/s | {left} left   ", end=self.end, flush=True)


# ---- one file ------------------------------------------------------------------------------------

def fetch(url, path, check, progress):
    """
    Download `url` to `path`, unless it is there; progress(n_bytes) is called with the bytes there
    are. `check` is given the file when it is complete, and its result is returned; if it raises a
    UserError the content is wrong and thrown away.

    UserError for an answer that no further try would change, or after TRIES tries; OSError if the
    disk does not take it. Whatever arrived is kept for the next run in path.part.
    """
    with suppress(UserError):   # missing, or damaged since
        return check(path)
    part = path + '.part'
    most = size(part)  # bytes that were ever there
    failures = 0       # in a row, without a new byte
    while True:
        try:
            stated = request_rest(url, part, progress)
            found = accept(part, stated, check)
            os.replace(part, path)
            return found
        except (requests.RequestException, Failed) as error:
            reason = str(error) if isinstance(error, Failed) else type(error).__name__
        failures += 1
        if size(part) > most:
            most, failures = size(part), 1
        if failures == TRIES:
            raise UserError(f"{url}: {TRIES} tries in a row failed, the last by {reason}; check "
                            "the network and run the same command again: it keeps what has arrived")
        wait = PAUSE * 2 ** (failures - 1)
        print(f"{os.path.basename(path)}: {reason}; next try in {wait:g} s", flush=True)
        time.sleep(wait)


def request_rest(url, part, progress):
    """
    One request for what `part` does not hold yet; Failed if the file is then not as long as the
    server says. Returns the file's SHA-256 in hex if the server states it, else None.
    """
    have = size(part)
    headers = {'Accept-Encoding': 'identity'}
    if have:
        headers['Range'] = f'bytes={have}-'
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response:
        status = response.status_code
        if status in (408, 429) or status >= 500:  # too slow, too often, the server's fault
            raise Failed(f"status {status}")
        if status == 416:   # nothing follows: the part is whole, or of another file
            return stated_checksum(response)
        if not response.ok:
            raise UserError(f"{url}: status {status}; nothing to download there")
        if status == 200:   # the whole file, whatever was asked for
            have = 0
        length = response.headers.get('Content-Length')
        with open(part, 'ab' if have else 'wb') as f:
            for block in response.iter_content(BLOCK):
                f.write(block)
                progress(f.tell())
            f.flush()
            os.fsync(f.fileno())
    if length is not None and size(part) != have + int(length):
        raise Failed(f"{size(part)} of {have + int(length)} bytes")
    return stated_checksum(response)


def stated_checksum(response):
    """The SHA-256 in hex that Hugging Face states as it redirects to its storage, or None."""
    for answer in [*response.history, response]:
        etag = answer.headers.get('X-Linked-Etag', '').strip('"')
        if len(etag) == 64:
            return etag
    return None


def accept(part, stated, check):
    """
    check(part). Failed if the content is not what the server states, or not what `check` wants; the
    file is thrown away then.
    """
    try:
        if stated and checksum(part) != stated:
            raise UserError(f"SHA-256 is not {stated}, which the server states")
        return check(part)
    except UserError as error:
        os.remove(part)
        raise Failed(f"wrong content, {error}") from None


def size(path):
    """Bytes in a file; 0 if there is none."""
    return os.path.getsize(path) if os.path.exists(path) else 0


# ---- the data sets -------------------------------------------------------------------------------

def fineweb(kind, shards, tokenizer, folder):
    """
    Download the validation shard and `shards` training shards of FineWeb (kind: a name in FINEWEB)
    into a folder; what is there already stays. Returns the folder's meta.json as a dictionary.

    On Hugging Face they are fineweb_val_000000.bin, fineweb_train_000001.bin, .. or finewebedu_..,
    tokens of gpt2.
    """
    if tokenizer not in (None, 'gpt2'):
        raise UserError(f"--tokenizer={tokenizer}: {kind} comes as tokens of gpt2; leave it out")
    if not 1 <= shards <= FINEWEB[kind]:
        raise UserError(f"--shards={shards}: {kind} has 1 to {FINEWEB[kind]} training shards")
    # before the long download: without it, nobody could sample from the model either
    tokenizer = get_tokenizer('gpt2')
    lengths = token_lengths(tokenizer)

    endpoint = os.environ.get('HF_ENDPOINT') or 'https://huggingface.co'
    stem = kind.replace('-', '')
    source = f"{endpoint.rstrip('/')}/datasets/kjj0/{stem}10B-gpt2"
    splits = {split: dict(bytes=0, tokens=0, shards=[]) for split in ('train', 'val')}
    known = {}      # {name: its checksum}, of a run before
    if os.path.exists(os.path.join(folder, 'meta.json')):
        before = read_meta(folder)
        known = {shard['name']: shard['sha256']
                 for split in splits for shard in before[split]['shards']}
    progress = ProgressLine(folder, (shards + 1) * FINEWEB_BYTES)
    for i in range(shards + 1):
        split = 'train' if i > 0 else 'val'
        name = f"{stem}_{split}_{i:06d}.bin"
        path = os.path.join(folder, name)
        if name in known and os.path.exists(path) and checksum(path) != known[name]:
            os.remove(path)     # damaged since
        before = i * FINEWEB_BYTES
        counts = fetch(f"{source}/resolve/main/{name}", path,
                       partial(count_tokens, n_tokens=tokenizer.n_vocab),
                       lambda n_bytes: progress(before + n_bytes))
        tokens = int(counts.sum())
        splits[split]['shards'].append(dict(name=name, tokens=tokens, sha256=checksum(path)))
        splits[split]['tokens'] += tokens
        splits[split]['bytes'] += int(counts @ lengths)
    return dict(tokenizer='gpt2', n_tokens=tokenizer.n_vocab, eot=tokenizer.eot_token,
                source=source, **splits)


def shakespeare(folder):
    """Download the classic megabyte of Shakespeare; returns the path of the text."""
    path = os.path.join(folder, 'input.txt')
    fetch(SHAKESPEARE, path, check_shakespeare, ProgressLine(folder, 1115394))
    return path


def check_shakespeare(path):
    """UserError for another text, or none."""
    if size(path) == 0 or checksum(path) != SHAKESPEARE_SHA256:
        raise UserError(f"{path}: not the text that was expected")
