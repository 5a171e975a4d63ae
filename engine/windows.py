"""
The order in which training visits the data. Which tokens a step reads is a function of
(seed, step), so a run resumes exactly, on any number of devices.

    data = Windows('data/python', 'train', meta, T)
    x, y = data.sample(first, count, seed, device)    (count, T) each, from sample `first` on
    x, y = data.get(windows, device)                  the windows with these numbers
"""

import functools
import os

import numpy as np
import torch  # slow to load: prepare_data.py starts without it, and without this file

from engine.files import UserError
from engine.shards import HEADER_BYTES, open_shard
from engine.tasks import in_answers, task_of


@functools.lru_cache(2)     # a batch may hold the end of an epoch and the beginning of the next
def order(seed, epoch, n):
    """The numbers 0 .. n - 1 as this epoch visits them, (n,) int32."""
    return np.random.default_rng((seed, epoch)).permutation(n).astype(np.int32)


class Windows:
    """
    The tokens of one split, cut into windows of T tokens that do not overlap and do not cross
    shards. `n` is how many there are. In a made task only the characters of answers are targets, as
    questions are drawn at random; the rest is -1. `share`: the part of these characters whose whole
    problem is in the same window. Only that part counts.
    """

    def __init__(self, folder, split, meta, T):
        self.T = T
        self.n_tokens, self.eot = meta['n_tokens'], meta['eot']
        self.task = task_of(meta)
        self.files = []     # held open: prepare_data.py may put others in their places
        windows = []
        for shard in meta[split]['shards']:
            path = os.path.join(folder, shard['name'])
            tokens = len(open_shard(path, shard['tokens']))
            self.files.append(open(path, 'rb', buffering=0))
            windows.append(max(0, (tokens - 1) // T))  # one token more than T: the last target
        self.ends = np.cumsum(windows)  # windows up to and with each shard
        self.n = sum(windows)
        if self.n == 0:
            raise UserError(f"{folder}: no {split} shard holds block_size + 1 = {T + 1} tokens; "
                            "lower block_size or add data")
        self.share = 1.0 if self.task is None else self.share_that_counts()
        if self.share == 0:
            raise UserError(f"{folder}: in windows of block_size={T} tokens no answer has its "
                            "whole question in front, so nothing would count: raise block_size")

    def share_that_counts(self):
        """
        Of the characters of answers in the first windows, the share that are targets; not those
        whose problem began before the window.
        """
        name, _ = self.task
        shard = int(np.argmax(self.ends > 0))
        n = min(int(self.ends[shard]), 1000)
        tokens = open_shard(self.files[shard].name)[:n * self.T]
        rows = [tokens.reshape(n, self.T), tokens[None]]    # in windows, and as one
        in_windows, whole = (in_answers(x, name, self.eot).sum() for x in rows)
        return in_windows / max(1, whole)

    def sample(self, first, count, seed, device):
        """
        Inputs and targets, each (count, T) int64: samples first .. first + count of an endless
        stream that visits every window once per epoch, each in a new order.
        """
        epochs_and_places = (divmod(i, self.n) for i in range(first, first + count))
        windows = [order(seed, epoch, self.n)[place] for epoch, place in epochs_and_places]
        return self.get(windows, device)

    def spread(self, n):
        """The numbers of n windows, spread evenly over the split; of all, if there are fewer."""
        n = min(self.n, n)
        return np.arange(n) * self.n // n

    def get(self, windows, device):
        """Inputs and targets, each (len(windows), T) int64, of the windows with these numbers."""
        tokens = np.stack([self.read_window(window) for window in windows]).astype(np.int64)
        x, y = tokens[:, :-1], tokens[:, 1:]
        if self.task is not None:
            name, _ = self.task
            y = np.where(in_answers(x, name, self.eot), y, -1)
        both = torch.from_numpy(np.stack((x, y)))
        cuda = device.type == 'cuda'
        if cuda:
            both = both.pin_memory()    # the copy is queued, and the CPU does not wait
        x, y = both.to(device, non_blocking=cuda)
        return x, y

    def read_window(self, window):
        """Tokens (T + 1,) uint16 of one window; UserError if its shard is not what it was."""
        shard = int(np.searchsorted(self.ends, window, side='right'))
        file = self.files[shard]
        before = self.ends[shard - 1] if shard else 0  # windows in the shards before this one
        file.seek(HEADER_BYTES + 2 * self.T * int(window - before))
        row = np.fromfile(file, np.uint16, self.T + 1)
        if len(row) <= self.T or row.max() >= self.n_tokens:    # a GPU would say nothing of use
            raise UserError(f"{file.name}: damaged, or changed while it was in use; prepare the "
                            "data again")
        return row
