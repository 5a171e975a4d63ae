"""
Reading data: tokenizers, token shards, and the order in which training visits them.

A data folder holds shards TRAIN_OR_VAL_000000.bin and meta.json; prepare_data.py writes both. A shard is 256 int32
(magic 20240520, version 1, token count), then the tokens as uint16. Nothing here copies a shard: it stays on disk, and
the operating system keeps in memory what is in use.
"""

import json
import math
import os

import numpy as np
import tiktoken
import torch

from configurator import UserError

MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 256 * 4


def get_tokenizer(name):
    """
    A tiktoken Encoding by name. 'byte' is built here: token i is byte i, token 256 is end-of-text. Others are fetched
    by tiktoken at first use. UserError if the name is unknown or the download fails.
    """
    if name == 'byte':
        return tiktoken.Encoding('byte', pat_str=r'(?s:.)', mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={'<|endoftext|>': 256})
    try:
        return tiktoken.get_encoding(name)
    except ValueError:
        raise UserError(f"--tokenizer={name}: tiktoken knows no such encoding; use byte, gpt2 or another of its names") from None
    except OSError as error:  # requests' errors are OSErrors
        raise UserError(f"--tokenizer={name}: its vocabulary could not be fetched ({type(error).__name__}); "
                        "check the network, or use --tokenizer=byte, which needs none") from None


def read_meta(folder):
    """meta.json of a data folder, or UserError with the command that makes the folder."""
    try:
        with open(os.path.join(folder, 'meta.json'), encoding='utf-8') as f: meta = json.load(f)
        return {key: meta[key] for key in ('tokenizer', 'n_tokens', 'eot', 'train', 'val')}
    except FileNotFoundError:
        raise UserError(f"{folder}: no data set (no meta.json); make it with: python prepare_data.py PATH... "
                        f"--name={os.path.basename(os.path.normpath(folder))}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}/meta.json: no description of a data set ({error}); prepare the data again") from None


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
    """The tokens of one split, cut into windows of T tokens that do not overlap and do not cross shards."""

    def __init__(self, folder, split, meta, T):
        self.shards = [open_shard(os.path.join(folder, shard['name'])) for shard in meta[split]['shards']]
        self.T = T
        self.ends = np.cumsum([max(0, (len(shard) - 1) // T) for shard in self.shards])  # windows up to and with each shard
        self.n = int(self.ends[-1]) if len(self.ends) else 0
        if self.n == 0:
            raise UserError(f"{folder}: no {split} shard holds block_size + 1 = {T + 1} tokens; lower block_size or add data")

    def get(self, windows, device):
        """Inputs and targets (len(windows), T) int64 of the windows with these numbers."""
        rows = []
        for w in windows:
            s = int(np.searchsorted(self.ends, w, side='right'))
            start = int(w - (self.ends[s - 1] if s else 0)) * self.T
            rows.append(self.shards[s][start:start + self.T + 1])
        both = torch.from_numpy(np.stack(rows).astype(np.int64))
        if device.type == 'cuda': both = both.pin_memory().to(device, non_blocking=True)
        else: both = both.to(device)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def sample(self, first, count, seed, device):
        """Samples first .. first + count of an endless stream that visits every window once per epoch, each in a new order."""
        i = np.arange(first, first + count)
        windows = np.empty_like(i)
        for epoch in np.unique(i // self.n):
            here = i // self.n == epoch
            windows[here] = shuffle(i[here] % self.n, self.n, (seed, int(epoch)))
        return self.get(windows, device)
