"""
Reading data: tokenizers, token shards, and the order in which training visits them.

A data folder holds shards TRAIN_OR_VAL_000000.bin and meta.json; prepare_data.py writes both. A shard is 256 int32
(magic 20240520, version 1, token count), then the tokens as uint16. Training does not map shards: windows are read
from the file, so a process needs the same memory for one shard as for a thousand.
"""

import contextlib
import hashlib
import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tiktoken

from engine.errors import UserError

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 256 * 4


@contextlib.contextmanager
def on_disk(path, action):
    """What the disk refuses inside becomes a UserError that names the path."""
    try: yield
    except OSError as error: raise UserError(f"{path}: cannot be {action} ({error.strerror}); see to it, then try again") from None


@contextlib.contextmanager
def alone(folder, wait=False):
    """
    Makes `folder` if it is missing, and keeps others who ask for it out: UserError if another process has it, with `wait` it is
    waited for. The lock goes with the process, however that ends. Windows and some network disks have none.
    """
    os.makedirs(folder, exist_ok=True)
    try: import fcntl
    except ImportError: return (yield)
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait: raise UserError(f"{folder}: another process writes here; let it finish, or choose another folder") from None
        print(f"{folder}: another process writes here; waiting for it", flush=True)
        fcntl.flock(held, fcntl.LOCK_EX)
    except OSError: pass
    try: yield
    finally: os.close(held)


def get_tokenizer(name):
    """
    A tiktoken Encoding by name. 'byte' is built here: token i is byte i, token 256 is end-of-text. Others are fetched
    by tiktoken at first use. UserError if the name is unknown or the download fails.
    """
    if name == 'byte':
        return tiktoken.Encoding('byte', pat_str=r'(?s:.)', mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={'<|endoftext|>': 256})
    if name not in tiktoken.list_encoding_names():
        raise UserError(f"--tokenizer={name}: tiktoken knows no such encoding; use byte, gpt2 or another of its names")
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; a wrong checksum is a ValueError
        raise UserError(f"--tokenizer={name}: its vocabulary could not be fetched ({type(error).__name__}); "
                        "check the network, or use --tokenizer=byte, which needs none") from None


def encode(tokenizer, text):
    """Tokens (n,) uint16 of a document and its end. The byte tokenizer keeps bytes that are no UTF-8, others see U+FFFD instead."""
    if tokenizer.name == 'byte': tokens = np.frombuffer(text, np.uint8)  # what the Encoding would say, without its loop
    else: tokens = tokenizer.encode_to_numpy(text.decode('utf-8', errors='replace'), disallowed_special=())
    return np.append(tokens.astype(np.uint16), np.uint16(tokenizer.eot_token))


SPLIT = dict(bytes=int, tokens=int, shards=[dict(name=str, tokens=int, sha256=str)])  # bytes of text, for losses per byte
META = dict(tokenizer=str, n_tokens=int, eot=int, source=str, train=SPLIT, val=SPLIT)  # what meta.json holds


def shaped(value, shape):
    """The part of a JSON value that `shape` describes; TypeError or KeyError where it has another form."""
    if isinstance(shape, dict): return {key: shaped(value[key], inner) for key, inner in shape.items()}
    if isinstance(shape, list): return [shaped(inner, shape[0]) for inner in value]
    if type(value) is not shape: raise TypeError(f"{value!r} is no {shape.__name__}")
    return value


def read_meta(folder, tokenizer=None):
    """meta.json of a data folder. UserError with the command that makes the folder, or if its tokens are not those of `tokenizer`."""
    try:
        with open(os.path.join(folder, 'meta.json'), encoding='utf-8') as f: meta = shaped(json.load(f), META)
    except FileNotFoundError:
        name = os.path.basename(os.path.normpath(folder))
        what = {'python': '', 'python-packages': ' --packages=True'}.get(name, f" PATH... --name={name}")
        if name in ('shakespeare', 'fineweb', 'fineweb-edu'): what = f" {name}"
        raise UserError(f"{folder}: no data set (no meta.json); make data/{name} with: python prepare_data.py{what}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}/meta.json: no description of a data set ({error}); prepare the data again") from None
    if tokenizer and meta['tokenizer'] != tokenizer.name: raise UserError(f"{folder} has {meta['tokenizer']} tokens, not {tokenizer.name}")
    return meta


def open_shard(path):
    """The tokens of a shard as a read-only memory map (n,) uint16; UserError if it is truncated or no shard."""
    try:
        header = np.fromfile(path, np.int32, 256)
        if len(header) < 256 or header[0] != MAGIC or header[1] != VERSION:
            raise UserError(f"{path}: no token shard (header without magic {MAGIC}, version {VERSION}); prepare the data again")
        expected, size = HEADER_BYTES + 2 * int(header[2]), os.path.getsize(path)
        if size != expected:
            raise UserError(f"{path}: damaged ({size} bytes, its header says {expected}); prepare the data again")
        return np.memmap(path, np.uint16, 'r', HEADER_BYTES)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); prepare the data again") from None


def count_tokens(path, n_tokens):
    """How often each token occurs in a shard, (n_tokens,); UserError if it is damaged or holds a token from n_tokens on."""
    tokens, counts = open_shard(path), np.zeros(2 ** 16, np.int64)
    for i in range(0, len(tokens), 2 ** 22): counts += np.bincount(tokens[i:i + 2 ** 22], minlength=2 ** 16)
    if counts[n_tokens:].any():
        raise UserError(f"{path}: damaged (token {counts.nonzero()[0][-1]} of a vocabulary of {n_tokens}); prepare the data again")
    return counts[:n_tokens]


def checksum(path):
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with open(path, 'rb') as f:
        while block := f.read(2 ** 20): digest.update(block)
    return digest.hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# data: which tokens step s reads is a function of (seed, s), so a run resumes exactly, on any number of devices

def shuffle(i, n, key):
    """
    The i-th number of a pseudo-random permutation of 0..n-1, without storing it. i: int64 array; key: small ints.

    A Feistel network is a permutation of the 2b-bit numbers, whatever its round function; where it lands at n or beyond,
    applying it again gets back below n ("cycle walking"), after less than 4 rounds on average.
    """
    half = max(1, math.ceil(math.log2(max(2, n)) / 2))
    mask = np.uint64(2 ** half - 1)
    keys = np.random.default_rng(key).integers(0, 2 ** 63, 4, dtype=np.uint64)
    i = i.astype(np.uint64)
    todo = np.ones(len(i), bool)
    while todo.any():
        left, right = i[todo] >> np.uint64(half), i[todo] & mask
        for k in keys:
            mixed = (right ^ k) * np.uint64(0x9E3779B97F4A7C15)  # wraps; the high bits are well mixed
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        i[todo] = left << np.uint64(half) | right
        todo = i >= n
    return i.astype(np.int64)


class Windows:
    """
    The tokens of one split, cut into windows of T tokens that do not overlap and do not cross shards.
    `waited` counts the seconds that callers of `sample` spent in it; set it to 0 to count anew.
    """

    def __init__(self, folder, split, meta, T):
        self.paths = [os.path.join(folder, shard['name']) for shard in meta[split]['shards']]
        self.T, self.n_tokens = T, meta['n_tokens']
        self.ends = np.cumsum([max(0, (len(open_shard(path)) - 1) // T) for path in self.paths])  # windows up to and with each
        self.n = int(self.ends[-1]) if len(self.ends) else 0
        if self.n == 0:
            raise UserError(f"{folder}: no {split} shard holds block_size + 1 = {T + 1} tokens; lower block_size or add data")
        self.waited = 0.0
        self.reader = ThreadPoolExecutor(1)  # its thread starts with the first batch that `sample` reads ahead
        self.ahead = None, None              # arguments of `_sample`, and the Future of its result

    def read(self, windows, device):
        """Tokens (len(windows), T + 1) int64 of the windows with these numbers, in host memory that `device` copies from fast."""
        import torch  # only here: prepare_data.py has no use for it, and starts in an eighth of the time without
        rows = []
        for w in windows:
            s = int(np.searchsorted(self.ends, w, side='right'))
            start = int(w - (self.ends[s - 1] if s else 0)) * self.T
            with on_disk(self.paths[s], 'read'):
                row = np.fromfile(self.paths[s], np.uint16, self.T + 1, offset=HEADER_BYTES + 2 * start)
            if len(row) <= self.T: raise UserError(f"{self.paths[s]}: became shorter while it was in use; prepare the data again")
            if (most := row.max()) >= self.n_tokens:  # a GPU would say nothing of use
                raise UserError(f"{self.paths[s]}: damaged (token {most} of a vocabulary of {self.n_tokens}); prepare the data again")
            rows.append(row)
        tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
        return tokens.pin_memory() if device.type == 'cuda' else tokens

    def split(self, tokens, device):
        """Inputs and targets, each (B, T), of tokens (B, T + 1), on `device`."""
        tokens = tokens.to(device, non_blocking=True)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def get(self, windows, device):
        """Inputs and targets (len(windows), T) int64 of the windows with these numbers."""
        return self.split(self.read(windows, device), device)

    def _sample(self, first, count, seed, device):
        i = np.arange(first, first + count)
        windows = np.empty_like(i)
        for epoch in np.unique(i // self.n):
            here = i // self.n == epoch
            windows[here] = shuffle(i[here] % self.n, self.n, (seed, int(epoch)))
        return self.read(windows, device)

    def sample(self, first, count, seed, device, then=None):
        """
        Samples first .. first + count of an endless stream that visits every window once per epoch, each in a new order.
        `then` is the first sample of the next call, if known: a thread reads that batch while the caller computes.
        """
        start = time.perf_counter()
        wanted, (known, future) = (first, count, seed, device), self.ahead
        tokens = future.result() if known == wanted else self._sample(*wanted)
        batch = self.split(tokens, device)
        following = (then, count, seed, device)
        self.ahead = (following, self.reader.submit(self._sample, *following)) if then is not None else (None, None)
        self.waited += time.perf_counter() - start
        return batch
