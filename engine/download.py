"""
Downloads that survive a bad line: what has arrived is kept, and the next try, or the next run, goes
on from there.

    fetch(url, path, check)              path then holds what `check` accepts; until then there is
                                         only path.part
    fineweb(kind, shards, ..)            shards of FineWeb, and their meta.json
    shakespeare(folder)                  a megabyte of text

Hugging Face is reached under the address in the environment variable HF_ENDPOINT, for those who
need a mirror.
"""

import os
import re
import sys
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import requests

from engine.errors import UserError
from engine.files import checksum
from engine.shards import HEADER_BYTES, count_tokens, get_tokenizer

TIMEOUT = 30     # seconds without a byte after which a connection counts as dead
TRIES = 6        # failed tries in a row, none of which brought a new byte, before giving up
PAUSE = 1        # seconds before the second try; doubles with every further one


class Failed(Exception):
    """A try that failed and is worth another; `wait` is how many seconds the server asked for."""

    def __init__(self, reason, wait=0):
        super().__init__(reason)
        self.wait = wait


class Missing(UserError):
    """The server has no such file."""


class Progress:
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
        self.on_terminal = bool(sys.stdout and sys.stdout.isatty())
        self.interval = 0.5 if self.on_terminal else 30
        self.end = '\r' if self.on_terminal else '\n'

    def __call__(self, done, total=None):
        """
        `done` of `total` bytes are there (None: as it was). Those of the first call were there
        before and say nothing about the speed.
        """
        self.total = total or self.total
        if self.first is None:
            self.first = done
        now = time.monotonic()
        if now - self.shown < self.interval:
            return
        self.shown = now
        rate = max(1, done - self.first) / (now - self.start)  # bytes per second
        seconds = max(0, round((self.total - done) / rate))
        left = f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
        print(f"{self.what}: {done / self.total:4.0%} of {self.total / 1e6:,.0f} MB | "
              f"{rate / 1e6:.1f} MB/s | {left} left   ", end=self.end, flush=True)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.on_terminal and self.shown > self.start:
            print()  # whatever is printed next gets a line of its own


# --------------------------------------------------------------------------------------------------
# one file


def silent(n_bytes, total):
    """The progress that nobody sees."""


def fetch(url, path, check, progress=silent):
    """
    Download `url` to `path`; progress(n_bytes, total) is called with the bytes there are, and those
    of the whole file or None. `check` is given the file when it is complete; if it raises a
    UserError the content is wrong and thrown away.

    UserError for an answer that no further try would change, or after TRIES tries; OSError if the
    disk does not take it. Whatever arrived is kept for the next run in path.part.
    """
    part = path + '.part'
    most = size(part)  # bytes that were ever there
    failures = 0       # in a row, without a new byte
    while True:
        try:
            stated = request_rest(url, part, progress)
            accept(part, stated, check)
            os.replace(part, path)
            return
        except (requests.exceptions.MissingSchema, requests.exceptions.InvalidSchema,
                requests.exceptions.InvalidURL):
            raise UserError(f"{url}: not an address; check HF_ENDPOINT") from None
        except requests.RequestException as error:
            failed = Failed(type(error).__name__)
        except Failed as error:
            failed = error

        failures += 1
        if size(part) > most:
            most = size(part)
            failures = 1
        if failures == TRIES:
            raise UserError(f"{url}: {TRIES} tries in a row failed, the last by {failed}; "
                            "check the network and run the same command again: "
                            "it keeps what has arrived")
        wait = max(PAUSE * 2 ** (failures - 1), failed.wait)
        print(f"{os.path.basename(path)}: {failed}; next try in {wait:g} s", flush=True)
        time.sleep(wait)


def accept(part, stated, check):
    """
    Failed if the content is not what the server states, or not what `check` wants; the file is
    thrown away then.
    """
    try:
        if stated and checksum(part) != stated:
            raise UserError(f"SHA-256 is not {stated}, which the server states")
        check(part)
    except UserError as error:
        os.remove(part)
        reason = str(error).partition(';')[0].removeprefix(part + ': ')
        raise Failed("wrong content, " + reason) from None


def size(path):
    """Bytes in a file; 0 if there is none."""
    return os.path.getsize(path) if os.path.exists(path) else 0


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
        refuse_status(url, response)
        sha256 = stated_checksum(response)
        if has_no_rest(response, have):
            return sha256
        start, total = announced(response)
        sends_all = response.status_code == 200  # no Range was asked for, or the server ignores it
        if not sends_all and start != have:
            if have:
                os.remove(part)  # the server speaks of another file: start over
            raise Failed("an answer that does not fit what was asked for")
        write_body(response, part, 'wb' if sends_all else 'ab', partial(progress, total=total))
    if total is not None and size(part) != total:
        raise Failed(f"{size(part)} of {total} bytes")
    return sha256


def refuse_status(url, response):
    """Failed for a status that another try may change, UserError for one that it will not."""
    status = response.status_code
    if status in (408, 429) or status >= 500:  # too slow, too often, the server's fault
        asked = response.headers.get('Retry-After', '')
        wait = min(int(asked), 300) if asked.isdecimal() else 0
        raise Failed(f"status {status}", wait)
    if status == 404:
        raise Missing(f"{url}: status 404, {response.reason}; nothing to download there")
    if status not in (200, 206, 416):
        raise UserError(f"{url}: status {status}, {response.reason}; nothing to download there")


def stated_checksum(response):
    """
    The SHA-256 that Hugging Face states in the redirection to its storage, in hex; None if there is
    none.
    """
    for answer in [*response.history, response]:
        etag = answer.headers.get('X-Linked-Etag', '').strip('"')
        if re.fullmatch('[0-9a-f]{64}', etag):
            return etag
    return None


def has_no_rest(response, have):
    """Whether the server answers that the file ends after the bytes there are."""
    content_range = response.headers.get('Content-Range', '')
    return response.status_code == 416 and content_range == f'bytes */{have}'


def announced(response):
    """
    (start, total): the first byte that an answer brings, and the bytes of the whole file.
    None where it does not say.
    """
    if response.status_code == 200:  # the whole file
        length = response.headers.get('Content-Length', '')
        total = int(length) if length.isdecimal() else None
        return 0, total
    content_range = response.headers.get('Content-Range', '')
    span = re.match(r'bytes (\d+)-\d+/(\d+)$', content_range)
    if response.status_code == 206 and span:
        return int(span[1]), int(span[2])
    return None, None


def write_body(response, part, mode, progress):
    """Write what the server sends to the file, and make sure it is on disk."""
    with open(part, mode) as f:
        for block in response.iter_content(2 ** 14):  # small: of a block cut off nothing is kept
            f.write(block)
            progress(f.tell())
        f.flush()
        os.fsync(f.fileno())


def hub():
    """The address of Hugging Face, or of its mirror in HF_ENDPOINT."""
    return (os.environ.get('HF_ENDPOINT') or 'https://huggingface.co').rstrip('/')


# --------------------------------------------------------------------------------------------------
# the data sets


@dataclass
class Corpus:
    """Shards of tokens of gpt2 on Hugging Face."""
    repository: str
    stem: str      # the files are STEM_val_000000.bin, STEM_train_000001.bin, ...
    shards: int    # for training


FINEWEB = {
    'fineweb': Corpus('kjj0/fineweb10B-gpt2', 'fineweb', 103),
    'fineweb-edu': Corpus('kjj0/finewebedu10B-gpt2', 'finewebedu', 99),
}
FINEWEB_BYTES = HEADER_BYTES + 2 * 10 ** 8  # of every shard but the last

SHAKESPEARE = ('https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/'
               'input.txt')
SHAKESPEARE_SHA256 = '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed'


def fineweb(kind, shards, tokenizer, folder):
    """
    Download the validation shard and `shards` training shards of FineWeb (kind: a name in FINEWEB)
    into a folder; what is there already stays. Returns the folder's meta.json as a dictionary.
    """
    corpus = FINEWEB[kind]
    if tokenizer not in (None, 'gpt2'):
        raise UserError(f"--tokenizer={tokenizer}: {kind} comes as tokens of gpt2; leave it out")
    if not 1 <= shards <= corpus.shards:
        raise UserError(f"--shards={shards}: {kind} has 1 to {corpus.shards} training shards")
    # before the long download: without it, nobody could sample from the model either
    tokenizer = get_tokenizer('gpt2')
    lengths = token_lengths(tokenizer)

    source = f"{hub()}/datasets/{corpus.repository}"
    splits = {split: dict(bytes=0, tokens=0, shards=[]) for split in ('train', 'val')}
    with Progress(folder, (shards + 1) * FINEWEB_BYTES) as progress:
        for i in range(shards + 1):
            split = 'train' if i > 0 else 'val'
            name = f"{corpus.stem}_{split}_{i:06d}.bin"
            path = os.path.join(folder, name)
            before = i * FINEWEB_BYTES
            counts = fetch_shard(f"{source}/resolve/main/{name}", path, tokenizer.n_vocab,
                                 lambda n_bytes, total: progress(before + n_bytes))
            tokens = int(counts.sum())
            splits[split]['shards'].append(dict(name=name, tokens=tokens, sha256=checksum(path)))
            splits[split]['tokens'] += tokens
            splits[split]['bytes'] += int(counts @ lengths)
    return dict(tokenizer='gpt2', n_tokens=tokenizer.n_vocab, eot=tokenizer.eot_token,
                source=source, **splits)


def token_lengths(tokenizer):
    """Bytes of text in each token, (n_vocab,); end-of-text, the last, has none."""
    texts = [tokenizer.decode_bytes([token]) for token in range(tokenizer.eot_token)]
    return np.array([len(text) for text in texts] + [0])


def fetch_shard(url, path, n_tokens, progress):
    """Download a shard unless it is there. How often each token occurs in it, (n_tokens,)."""
    try:
        return count_tokens(path, n_tokens)
    except UserError:  # missing, or damaged since
        fetch(url, path, partial(count_tokens, n_tokens=n_tokens), progress)
    return count_tokens(path, n_tokens)


def shakespeare(folder):
    """Download the classic megabyte of Shakespeare; returns the path of the text."""
    path = os.path.join(folder, 'input.txt')
    try:
        check_shakespeare(path)
    except (UserError, FileNotFoundError):
        fetch(SHAKESPEARE, path, check_shakespeare)
    return path


def check_shakespeare(path):
    """UserError for another text."""
    if checksum(path) != SHAKESPEARE_SHA256:
        raise UserError(f"{path}: not the text that was expected")
