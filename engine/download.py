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

import ipaddress
import os
import queue
import re
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from urllib.parse import urljoin, urlsplit

import numpy as np
import requests
import urllib3

from engine.files import UserError, checksum, one_line
from engine.shards import HEADER_BYTES, count_tokens, get_tokenizer

TIMEOUT = 30     # seconds without a byte after which a connection counts as dead
SLOWEST = 1000   # bytes per second, over two such times; a connection that is slower counts as dead
LARGEST = 2 ** 36  # bytes of a file whose size nobody knows
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


def fetch(url, path, check, progress=silent, largest=LARGEST):
    """
    Download `url` to `path`; progress(n_bytes, total) is called with the bytes there are, and those
    of the whole file or None. `check` is given the file when it is complete; if it raises a
    UserError the content is wrong and thrown away. largest: more bytes than this are not taken.

    UserError for an answer that no further try would change, or after TRIES tries; OSError if the
    disk does not take it. Whatever arrived is kept for the next run in path.part.
    """
    part = path + '.part'
    most = size(part)  # bytes that were ever there
    failures = 0       # in a row, without a new byte
    while True:
        try:
            stated = request_rest(url, part, progress, largest)
            accept(part, stated, check)
            os.replace(part, path)
            return
        except (requests.exceptions.MissingSchema, requests.exceptions.InvalidSchema,
                requests.exceptions.InvalidURL):
            raise UserError(f"{shown(url)}: not an address; check HF_ENDPOINT") from None
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            failed = Failed(type(error).__name__)
        except Failed as error:
            failed = error

        failures += 1
        if size(part) > most:
            most = size(part)
            failures = 1
        if failures == TRIES:
            raise UserError(f"{shown(url)}: {TRIES} tries in a row failed, the last by {failed}; "
                            "check the network and run the same command again: "
                            "it keeps what has arrived")
        wait = max(PAUSE * 2 ** (failures - 1), failed.wait)
        print(f"{os.path.basename(path)}: {one_line(failed)}; next try in {wait:g} s", flush=True)
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


def shown(url):
    """An address in a message: without the password that may stand before its host."""
    return one_line(re.sub('//[^/]*@', '//', url))


def request_rest(url, part, progress, largest):
    """
    One request for what `part` does not hold yet; Failed if the file is then not as long as the
    server says. Returns the file's SHA-256 in hex if the server states it, else None.
    """
    have = size(part)
    headers = {'Accept-Encoding': 'identity'}
    if have:
        headers['Range'] = f'bytes={have}-'
    with answer(url, headers) as response:
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
        if response.headers.get('Content-Encoding', 'identity') != 'identity':
            raise Failed("a compressed answer, which was not asked for")
        if total is not None and total > largest:
            raise Failed(f"a file of {total} bytes, where at most {largest} are expected")
        shows = partial(progress, total=total)
        write_body(response, part, 'wb' if sends_all else 'ab', shows, largest)
    if total is not None and size(part) != total:
        raise Failed(f"{size(part)} of {total} bytes")
    return sha256


def answer(url, headers):
    """
    The response to a request, its body not read yet; Failed if it takes too long. Every byte of its
    head would start the time-out of requests anew: so somebody else waits for it.
    """
    box = queue.SimpleQueue()
    threading.Thread(target=ask, args=(box, url, headers), daemon=True).start()
    try:
        response = box.get(timeout=4 * TIMEOUT)
    except queue.Empty:
        raise Failed("no answer in time") from None
    if isinstance(response, Exception):
        raise response
    return response


def ask(box, url, headers):
    """Put the response to a request, or the error that it ended with, into the box."""
    try:
        box.put(Careful().get(url, headers=headers, stream=True, timeout=TIMEOUT))
    except (Failed, requests.RequestException) as error:
        box.put(error)
    except Exception as error:      # a head that no library expects
        box.put(Failed(type(error).__name__))


class Careful(requests.Session):
    """Follows no redirection to where no download can be."""

    def get_redirect_target(self, response):
        target = super().get_redirect_target(response)
        if target is not None:
            refuse_redirection(response.url, urljoin(response.url, target))
        return target


def refuse_redirection(url, target):
    """Failed for one that leaves https, or leads from the network into this machine or house."""
    try:
        here, there = urlsplit(url), urlsplit(target)
        leaves = there.scheme != 'https' and there.scheme != here.scheme
        leaves = leaves or there.scheme not in ('http', 'https') or not there.hostname
        inwards = not leaves and is_local(there.hostname) and not is_local(here.hostname)
    except ValueError:      # no address at all
        leaves = inwards = True
    if leaves or inwards:
        raise Failed(f"a redirection to {shown(target)[:80]}, which makes no sense")


def is_local(host):
    """Whether a host is this machine, or one of a private network."""
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return '.' not in host or host.endswith(('.localhost', '.local', '.internal'))


def refuse_status(url, response):
    """Failed for a status that another try may change, UserError for one that it will not."""
    status = response.status_code
    if status in (408, 429) or status >= 500:  # too slow, too often, the server's fault
        asked = response.headers.get('Retry-After', '')
        wait = min(whole_number(asked) or 0, 300)
        raise Failed(f"status {status}", wait)
    if status == 404:
        raise Missing(f"{shown(url)}: status 404, Not Found; nothing to download there")
    if status not in (200, 206, 416):
        reason = one_line(response.reason)[:80]
        raise UserError(f"{shown(url)}: status {status}, {reason}; nothing to download there")


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
        return 0, whole_number(response.headers.get('Content-Length', ''))
    content_range = response.headers.get('Content-Range', '')
    span = re.match(r'bytes (\d{1,18})-\d{1,18}/(\d{1,18})$', content_range, re.ASCII)
    if response.status_code == 206 and span:
        return int(span[1]), int(span[2])
    return None, None


def whole_number(text):
    """The number that a header states; None if it is none."""
    return int(text) if re.fullmatch('[0-9]{1,18}', text) else None


def write_body(response, part, mode, progress, largest):
    """
    Write what the server sends to the file, and make sure it is on disk. Failed if it sends too
    slowly, or more than `largest` bytes; these are thrown away.
    """
    with open(part, mode) as f:
        began, size_then = time.monotonic(), f.tell()
        while block := response.raw.read1(2 ** 16):     # whatever is there
            f.write(block)
            progress(f.tell())
            if f.tell() > largest:
                os.remove(part)
                raise Failed(f"more than the {largest} bytes that are expected")
            seconds = time.monotonic() - began
            if seconds > 2 * TIMEOUT:
                if f.tell() - size_then < SLOWEST * seconds:
                    raise Failed("too slow to be alive")
                began, size_then = time.monotonic(), f.tell()
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
                source=shown(source), **splits)


def token_lengths(tokenizer):
    """Bytes of text in each token, (n_vocab,); end-of-text, the last, has none."""
    texts = [tokenizer.decode_bytes([token]) for token in range(tokenizer.eot_token)]
    return np.array([len(text) for text in texts] + [0])


def fetch_shard(url, path, n_tokens, progress):
    """Download a shard unless it is there. How often each token occurs in it, (n_tokens,)."""
    try:
        return count_tokens(path, n_tokens)
    except UserError:  # missing, or damaged since
        check = partial(count_tokens, n_tokens=n_tokens)
        fetch(url, path, check, progress, largest=FINEWEB_BYTES)
    return count_tokens(path, n_tokens)


def shakespeare(folder):
    """Download the classic megabyte of Shakespeare; returns the path of the text."""
    path = os.path.join(folder, 'input.txt')
    try:
        check_shakespeare(path)
    except (UserError, FileNotFoundError):
        fetch(SHAKESPEARE, path, check_shakespeare, largest=2 ** 21)
    return path


def check_shakespeare(path):
    """UserError for another text."""
    if checksum(path) != SHAKESPEARE_SHA256:
        raise UserError(f"{path}: not the text that was expected")
