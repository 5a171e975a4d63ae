"""
The order in which training visits the data. Which tokens a step reads is a function of
(seed, step), so a run resumes exactly, on any number of devices.

    data = Windows('data/python', 'train', meta, T)
    x, y = data.sample(first, count, seed, device)    (count, T) each, from sample `first` on

Shards are not mapped: windows are read from the file, so a process needs the same memory for one
shard as for a thousand.
"""

import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch  # slow to load: prepare_data.py starts without it, and without this file

from engine.files import UserError, on_disk
from engine.shards import HEADER_BYTES, open_shard, refuse_tokens
from engine.tasks import in_answers, task_of


def shuffle(i, n, key):
    """
    The i-th number of a pseudo-random permutation of 0..n-1, without storing it.
    i: int64 array; key: small ints.

    A Feistel network is a permutation of the 2b-bit numbers, whatever its round function. Where it
    lands at n or beyond, applying it again gets back below n ("cycle walking"), after less than 4
    rounds on average.
    """
    bits = math.ceil(math.log2(max(2, n)) / 2)  # of each half of a number
    half = np.uint64(bits)
    mask = np.uint64(2 ** bits - 1)
    keys = np.random.default_rng(key).integers(0, 2 ** 63, 4, dtype=np.uint64)
    i = i.astype(np.uint64)
    todo = np.ones(len(i), bool)
    while todo.any():
        left = i[todo] >> half
        right = i[todo] & mask
        for k in keys:
            mixed = (right ^ k) * np.uint64(0x9E3779B97F4A7C15)  # wraps around
            mixed = (mixed >> np.uint64(32)) & mask              # the high bits are mixed well
            left, right = right, left ^ mixed
        i[todo] = (left << half) | right
        todo = i >= n
    return i.astype(np.int64)


@dataclass(frozen=True)
class Batch:
    """Samples first .. first + count of the stream that belongs to this seed."""
    first: int
    count: int
    seed: int
    device: torch.device  # where they will be used


class Windows:
    """
    The tokens of one split, cut into windows of T tokens that do not overlap and do not cross
    shards. `n` is how many there are. `waited` counts the seconds that callers of `sample` spent in
    it; set it to 0 to count anew.
    """

    def __init__(self, folder, split, meta, T):
        self.T = T
        self.n_tokens = meta['n_tokens']
        self.eot = meta['eot']
        self.task = task_of(meta)
        self.paths = []
        windows = []
        for shard in meta[split]['shards']:
            path = os.path.join(folder, shard['name'])
            tokens = len(open_shard(path, shard['tokens']))
            self.paths.append(path)
            windows.append(max(0, (tokens - 1) // T))  # one token more than T: the last target
        self.ends = np.cumsum(windows)  # windows up to and with each shard
        self.n = sum(windows)
        if self.n == 0:
            raise UserError(f"{folder}: no {split} shard holds block_size + 1 = {T + 1} tokens; "
                            "lower block_size or add data")
        self.waited = 0.0
        self.reader = ThreadPoolExecutor(1)  # its thread starts with the first batch it reads ahead
        self.ahead = None                    # the Batch that is being read ahead
        self.ahead_tokens = None             # and the Future of its tokens

    def sample(self, first, count, seed, device, then=None):
        """
        Inputs and targets, each (count, T) int64: samples first .. first + count of an endless
        stream that visits every window once per epoch, each in a new order. `then` is the first
        sample of the next call, if known: a thread reads that batch while the caller computes.
        """
        start = time.perf_counter()
        wanted = Batch(first, count, seed, device)
        if wanted == self.ahead:
            tokens = self.ahead_tokens.result()
        else:
            tokens = self.read_batch(wanted)
        inputs, targets = self.split(tokens, device)

        self.ahead, self.ahead_tokens = None, None
        if then is not None:
            self.ahead = Batch(then, count, seed, device)
            self.ahead_tokens = self.reader.submit(self.read_batch, self.ahead)
        self.waited += time.perf_counter() - start
        return inputs, targets

    def get(self, windows, device):
        """Inputs and targets, each (len(windows), T) int64, of the windows with these numbers."""
        return self.split(self.read(windows, device), device)

    def split(self, tokens, device):
        """
        Inputs and targets, each (B, T), of tokens (B, T + 1), on `device`. In a made task targets
        are -1, which do not count, but for the answers: questions are drawn at random.
        """
        x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].clone() 
        if self.task is not None:
            name, _ = self.task
            y[~torch.from_numpy(in_answers(x.numpy(), name, self.eot))] = -1
        return x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    def read_batch(self, batch):
        """Tokens (count, T + 1) int64 of a Batch, in host memory."""
        i = np.arange(batch.first, batch.first + batch.count)
        windows = np.empty_like(i)
        epochs = i // self.n
        for epoch in np.unique(epochs):
            here = epochs == epoch
            windows[here] = shuffle(i[here] % self.n, self.n, (batch.seed, int(epoch)))
        return self.read(windows, batch.device)

    def read(self, windows, device):
        """
        Tokens (len(windows), T + 1) int64 of the windows with these numbers, in host memory that
        `device` copies from fast.
        """
        rows = [self.read_window(window) for window in windows]
        tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
        if device.type == 'cuda':
            tokens = tokens.pin_memory()
        return tokens

    def read_window(self, window):
        """Tokens (T + 1,) uint16 of one window; UserError if its shard changed or is damaged."""
        shard = int(np.searchsorted(self.ends, window, side='right'))
        path = self.paths[shard]
        before = self.ends[shard - 1] if shard else 0  # windows in the shards before this one
        start = int(window - before) * self.T
        with on_disk(path, 'read'):
            offset = HEADER_BYTES + 2 * start
            row = np.fromfile(path, np.uint16, self.T + 1, offset=offset)
        if len(row) <= self.T:
            raise UserError(f"{path}: became shorter while it was in use; prepare the data again")
        if row.max() >= self.n_tokens:  # a GPU would say nothing of use
            refuse_tokens(path, row, self.n_tokens, first=start)
        return row
