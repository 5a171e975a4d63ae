"""
Lab: FreqKV, a key-value cache that never outgrows the training window. About 4 minutes.

    python exercises/labs/freqkv.py out/vanilla                      losses at 1, 2 and 4 training windows, and a long sample
    python exercises/labs/freqkv.py out/vanilla --steps=0            without fine-tuning: about a minute
    python exercises/labs/freqkv.py out/vanilla --keep=0.25 --sinks=0

FreqKV: Key-Value Compression in Frequency Domain for Context Window Extension (J. Kai and others, arXiv 2505.00570).
A model of N positions meets angles it never saw when a text grows longer, and its cache grows with the text. FreqKV says:
along the sequence, keys and values are mostly low frequencies. When the cache is full, keep the first S entries ("sinks"),
and of the others keep low frequencies only, which fewer entries can hold. No new weights, and the text may go on for ever.

    span = N - S,   L = int(gamma span),   W = S + L        gamma: the share of the coefficients that stays
    Z_k  = a_k sum_n x_n cos(pi k (2n + 1) / (2 span))      DCT-II; a_0 = sqrt(1 / span), the others sqrt(2 / span)
    x'   = sqrt(L / span) C_L^T Z[:L]                       C_n: the DCT of length n, orthonormal; the root keeps amplitudes
    cache = [ S sinks | L compressed | up to N - W new ]    full again: the last two parts are compressed together

x is one channel of one key or value head. All of it is one fixed matrix, x' = A x, and rivals are other matrices: A that
picks the last L entries is "sinks + sliding window" (StreamingLLM, arXiv 2309.17453). Keys are compressed without their
rotation, and a position is a place in the cache: it stays below N, so the model never leaves what it was trained for.
Old text is compressed again and again, recent text once or not at all.

What differs from the authors' code: the matrix instead of an FFT; keys wait in the cache rotated, and are turned back to be
compressed; generation token by token, which theirs does not have. One path of theirs, the one without flash attention, adds 1
to all scores of compressed entries: a slip, it seems, and not copied. From the paper: it trains LoRA, embeddings and norms of
LLaMA-2-7B for 1000 steps at N = 4096 and 2 N = 8192 tokens; here all weights are tuned, for a few steps. We know the method by
the code and the abstract, not by the paper's text.
"""
import math
import os
import sys
from dataclasses import dataclass, replace

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from common import fit, load_plain, loss_on, own_text, table, warm_up, windows
from configurator import UserError, build, read, run
from memory import KVCache
from model import GPT, apply_rope, rope_table


# ---- the mechanism ---------------------------------------------------------------------------------------------------

def dct_matrix(n):
    """C (n,n): row k is a_k cos(pi k (2i + 1) / 2n), the DCT-II. Orthonormal: C.T is the inverse."""
    k, i = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
    C = math.sqrt(2 / n) * torch.cos(math.pi * k * (2 * i + 1) / (2 * n))
    C[0] /= math.sqrt(2)
    return C


def filtered(span, L, kept=slice(None)):
    """A (L, span): of the first L coefficients, or those `kept`, the inverse DCT of length L. Low-pass: each row sums to 1."""
    Z = dct_matrix(span)[kept][:L]                                          # (L, span)
    return math.sqrt(L / span) * dct_matrix(L).T @ Z


class FreqKV(KVCache):
    """
    A memory for `GPT.trunk` that holds N entries at most. Who fills it calls `compress` when it is full; the new tokens'
    positions are length, length + 1, ..: their places in the cache. Joins tensors instead of writing into a buffer, so
    gradients reach the tokens that were compressed. With Depth-Attention it holds the mixed values, as every cache.
    """

    def __init__(self, config, N, S, A):
        super().__init__(config.n_layer, N)
        self.S, self.A, self.theta = S, A, config.rope_theta

    def update(self, layer, k, v):
        """Append k, v (B, nkv, n, hd) of one layer; returns all that layer holds, (B, nkv, length + n, hd)."""
        if self.length + k.size(2) > self.capacity:
            raise ValueError(f"{self.length} + {k.size(2)} entries do not fit into a cache of {self.capacity}: compress it first")
        if self.length: k, v = torch.cat((self.k[layer], k), 2), torch.cat((self.v[layer], v), 2)
        self.k[layer], self.v[layer] = k, v
        if layer == len(self.k) - 1: self.length = k.size(2)  # the last layer closes the pass
        return k, v

    def turn(self, k, first, back=False):
        """Keys (.., n, hd), turned by the angles of places first, first + 1, .. in the cache, or back."""
        cos, sin = rope_table(torch.arange(first, first + k.size(-2)), k.size(-1), self.theta, k.dtype)  # (n,1,hd)
        return apply_rope(k, cos[:, 0], -sin[:, 0] if back else sin[:, 0])

    def compress(self):
        """length -> S + L entries. The DCT mixes places, so a key must lose its old place before, and gets its new one after."""
        S, A = self.S, self.A.to(self.k[0])                                 # (L, span)
        for layer, (k, v) in enumerate(zip(self.k, self.v)):
            x = A @ self.turn(k[:, :, S:], S, back=True)                    # (B, nkv, L, hd)
            self.k[layer] = torch.cat((k[:, :, :S], self.turn(x, S)), 2)    # (B, nkv, W, hd)
            self.v[layer] = torch.cat((v[:, :, :S], A @ v[:, :, S:]), 2)
        self.length = S + len(A)


# ---- models that read on ---------------------------------------------------------------------------------------------

class LongGPT(GPT):
    """A copy of `gpt` whose forward, loss and generate take texts of any length, through a new memory() each."""

    def __init__(self, gpt, memory):
        super().__init__(replace(gpt.config, block_size=2 ** 30))
        self.to(gpt.wte.weight.dtype).load_state_dict(gpt.state_dict())
        self.N, self.memory, self.peak = gpt.config.block_size, memory, 0  # peak: the longest cache ever seen

    def new_memory(self, capacity, start=None):
        if start is not None: raise ValueError("prompts of different lengths: a compressed cache cannot tell padding from text")
        return [self.memory()]

    def hidden(self, idx, memory=None, jacobi=None):
        """Tokens (B,T) -> hidden states (B,T,C): read until the cache is full, compress it, read on."""
        cache, out = (memory or self.new_memory(None))[0], []
        while idx.size(1):
            if cache.length == cache.capacity: cache.compress()
            room = cache.capacity - cache.length
            part, idx = idx[:, :room], idx[:, room:]
            out.append(self.trunk(self.embed(part), torch.arange(cache.length, cache.length + part.size(1)), cache))
            self.peak = max(self.peak, cache.length)
        return torch.cat(out, 1)


class Truncated(LongGPT):
    """What GPT.generate does past block_size, for losses: when the window is full, its newer half is read again as the whole text."""

    def hidden(self, idx, memory=None, jacobi=None):
        N, old, out = self.N, self.N // 2 - 1, []
        for begin in range(0, max(1, idx.size(1) - old), N - old):
            part = idx[:, begin:begin + N]
            out.append(self.trunk(self.embed(part), torch.arange(part.size(1)))[:, old if begin else 0:])
            self.peak = max(self.peak, part.size(1))
        return torch.cat(out, 1)


class Rotated(FreqKV):
    """A mistake to learn from: keys are compressed as they stand in the cache, rotated."""

    def turn(self, k, first, back=False):
        return k


# ---- the lab ---------------------------------------------------------------------------------------------------------

@dataclass
class FreqKVSettings:
    """what the cache keeps, and what is measured"""
    sinks: int = 4        # S: the first entries, never compressed
    keep: float = 0.5     # gamma: share of the coefficients that stay
    windows: int = 64     # losses are of this many stretches of validation text, 4 N tokens each
    steps: int = 100      # fine-tuning steps at 2 N (0: none)
    lr: float = 3e-4      # and their learning rate, after a warm-up
    seed: int = 1337      # of fine-tuning's batches and of the sample

    def __post_init__(self):
        if self.sinks < 0 or self.steps < 0: raise ValueError(f"sinks={self.sinks} and steps={self.steps} must not be negative")
        if self.windows < 1: raise ValueError(f"windows={self.windows} must be at least 1")
        if not self.lr > 0: raise ValueError(f"lr={self.lr} must be positive")


def contestants(gpt, s):
    """{name: a function that makes this model}. UserError if the settings leave nothing to compress."""
    N, S = gpt.config.block_size, s.sinks
    span, L = N - S, int(s.keep * (N - S))
    if not 0 < L < span:
        raise UserError(f"sinks={S} and keep={s.keep} make {L} of the cache's other {span} entries: 1 to {span - 1} can be; change one of them")
    bounded = lambda A, kind=FreqKV: lambda: LongGPT(gpt, lambda: kind(gpt.config, N, S, A))
    return {'no compression': lambda: LongGPT(gpt, lambda: FreqKV(gpt.config, 2 ** 30, 0, None)),
            'FreqKV': bounded(filtered(span, L)),
            'FreqKV, high frequencies': bounded(filtered(span, L, slice(-L, None))),
            'FreqKV, keys left rotated': bounded(filtered(span, L), Rotated),
            'sinks + sliding window': bounded(torch.eye(span)[-L:]),
            'truncation': lambda: Truncated(gpt, None)}


def tuned(model, rows, s, name):
    """The model after s.steps steps on 8 of the rows (n, 2 N + 1) each: gradients flow through its compressions."""
    batches = torch.randint(len(rows), (s.steps, 8), generator=torch.Generator().manual_seed(s.seed))
    torch.manual_seed(s.seed)  # of dropout
    model.train()
    fit(model.parameters(), lambda i: model(rows[batches[i], :-1], rows[batches[i], 1:])[1], warm_up(s.lr, s.steps),
        weight_decay=0.0, name=name)
    return model.eval()


@torch.no_grad()
def energy(gpt, idx):
    """
    The paper's reason, on idx (B,N). For each layer [its number, of the keys' energy the share of the lower half of the
    frequencies, and of frequency 0 alone, the same two of the values]. White noise has 1 / 2 and 1 / N.
    """
    cache = FreqKV(gpt.config, idx.size(1), 0, None)
    gpt.trunk(gpt.embed(idx), torch.arange(idx.size(1)), cache)
    C = dct_matrix(idx.size(1)).to(cache.k[0])

    def shares(x):                                                          # (B, nkv, N, hd)
        e = (C @ x).square().sum((0, 1, 3))
        return [(e[:len(e) // 2].sum() / e.sum()).item(), (e[0] / e.sum()).item()]
    return [[i, *shares(cache.turn(k, 0, back=True)), *shares(v)] for i, (k, v) in enumerate(zip(cache.k, cache.v))]


def main(argv):
    given, folders = read(argv, __doc__.strip(), FreqKVSettings)
    s = build(FreqKVSettings, given)
    if len(folders) != 1: raise UserError("name one checkpoint folder, such as: python exercises/labs/freqkv.py out/vanilla")
    gpt, tokenizer, settings = load_plain(folders[0], depth_attn=True)
    N, make = gpt.config.block_size, contestants(gpt, s)
    text = own_text(settings, 'val', s.windows * 4 * N + 1)
    rows = {T: windows(text[:(len(text) - 1) // (4 * N) * 4 * N + 1], T) for T in (4 * N, 2 * N, N)}  # the same tokens in all
    models = {name: new() for name, new in make.items()}
    if s.steps:
        train = windows(own_text(settings, 'train', 2 ** 20), 2 * N)
        for name in ('no compression', 'FreqKV', 'sinks + sliding window'):
            models[name + ', tuned'] = tuned(make[name](), train, s, name)

    longer = models.get('FreqKV, tuned', models['FreqKV'])
    new = longer.generate([[tokenizer.eot_token]], 3 * N, temperature=0.7, seed=s.seed)[0]
    if hasattr(sys.stdout, 'reconfigure'): sys.stdout.reconfigure(errors='replace')  # a terminal that cannot show a character
    print(f"{3 * N} tokens from a cache that never held more than {longer.peak}:\n")
    print(tokenizer.decode([t for t in new.tolist() if t != tokenizer.eot_token]), '\n')

    print(table(['layer', 'keys: low half', 'frequency 0', 'values: low half', 'frequency 0'], energy(gpt, rows[N][:16, :-1])), '\n')
    result = [[name, *[loss_on(model, rows[T]) for T in (N, 2 * N, 4 * N)], model.peak] for name, model in models.items()]
    print(table([f"nats per token, N = {N}", 'N', '2 N', '4 N', 'peak cache'], result))


if __name__ == '__main__':
    run(main)
