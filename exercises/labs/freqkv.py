"""
Lab: FreqKV, a cache of keys and values that never outgrows the training window. About 2 minutes.

    python exercises/labs/freqkv.py out/vanilla              a long sample, and losses at 1, 2 and 4 training windows
    python exercises/labs/freqkv.py out/vanilla --steps=0 --keep=0.25      without fine-tuning, and keeping less

FreqKV: Key-Value Compression in Frequency Domain for Context Window Extension (J. Kai and others, arXiv 2505.00570).
In a text longer than the N tokens of training, a model meets positions it never saw, and its cache grows without end. Along
the sequence, says the paper, keys and values are mostly low frequencies. So when the cache is full, keep its first S entries
("sinks") as they are, and of the others the low frequencies only, for which fewer entries are enough. No new weights.

    span = N - S,   L = int(gamma span),   W = S + L        gamma: the share of the coefficients that stays
    Z_k  = a_k sum_n x_n cos(pi k (2n + 1) / (2 span))      DCT-II; a_0 = sqrt(1 / span), the others sqrt(2 / span)
    x'   = sqrt(L / span) C_L^T Z[:L]                       C_n: the DCT of length n, orthonormal; the root keeps amplitudes
    cache = [ S sinks | L compressed | up to N - W new ]    full again: the last two parts are compressed together

x is one channel of a key or value head. All of it is one fixed matrix, x' = A x, and rivals are other matrices: the A that
picks the last L entries is "sinks + sliding window" (StreamingLLM, arXiv 2309.17453). Keys are compressed without their
rotation, and a position is a place in the cache, so it stays below N. Old text is compressed again and again, the newest not.

What it shows (config/size/tiny.py with n_layer=4, n_head=2, n_embd=128, mlp_hidden=352, block_size=128, batch_tokens=512: 0.9M
parameters, 2400 steps; one seed, nats per byte; "tuned": after 100 steps at 2 N; one core of an AMD EPYC, 2026-11-22):

                                  N     2 N     4 N  peak cache        tuned: N     2 N     4 N
    no compression           1.8653  1.8746  1.9215         512          1.8756  1.8600  1.8710
    FreqKV                   1.8653  1.8670  1.8638         128          1.8744  1.8738  1.8706
    its keys left rotated    1.8653  2.0272  2.1204         128
    high frequencies kept    1.8653  1.8984  1.9038         128
    sinks + sliding window   1.8653  1.8482  1.8378         128          1.8736  1.8560  1.8457
    truncation               1.8653  1.8480  1.8379         128

At 4 N the model gets worse as it stands, and with FreqKV it does not, in a quarter of the cache. Low frequencies are the ones
to keep, and keys must lose their rotation first. What it does not show is a gain over forgetting: a sliding window is better, in
two models of a quarter of the training steps too, and once tuned at 2 N, no compression is better at 2 N and as good at 4 N. This
text seldom asks for what is far back, and the filter blurs what is near; the paper reports on a 7B model and long documents.

What differs from the authors' code: the matrix instead of an FFT; keys wait in the cache rotated, and are turned back to be
compressed; decoding token by token is exact, theirs scores whole texts. Their path without flash attention adds 1 to the scores
of compressed entries, the other does not, nor do we. From the paper: it tunes LoRA, embeddings and norms of LLaMA-2-7B for 1000
steps at 2 N = 8192, here all weights are, for a few. We had the code and the abstract, not the paper's text.
"""
import math
import sys
from dataclasses import dataclass, replace

import torch

from common import fit, load_plain, loss_on, own_text, table, warm_up, windows
from configurator import build, read
from engine.errors import UserError, run
from engine.memory import KVCache
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

    def __init__(self, gpt, memory=None):
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
    """What GPT.generate does past block_size: the newer half of a full window is read again as if it were the whole text."""

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
    windows: int = 48     # losses are of this many stretches of validation text, 4 N tokens each
    steps: int = 100      # fine-tuning steps on texts of 2 N tokens (0: none)
    seed: int = 1337      # of the texts that are drawn for fine-tuning, and of the sample

    def __post_init__(self):
        if min(self.sinks, self.steps) < 0: raise ValueError(f"sinks={self.sinks} and steps={self.steps} must not be negative")
        if self.windows < 1: raise ValueError(f"windows={self.windows} must be at least 1")


def contestants(gpt, s):
    """{name: a function that makes this model}. UserError if the settings leave nothing to compress."""
    N, S = gpt.config.block_size, s.sinks
    span, L = N - S, int(s.keep * (N - S))
    if not 0 < L < span:
        raise UserError(f"sinks={S} and keep={s.keep} keep {S} + {L} of {N} entries: lower sinks, or choose keep between 0 and 1")
    bounded = lambda A, kind=FreqKV: lambda: LongGPT(gpt, lambda: kind(gpt.config, N, S, A))
    return {'no compression': lambda: LongGPT(gpt, lambda: FreqKV(gpt.config, 2 ** 30, 0, None)),
            'FreqKV': bounded(filtered(span, L)),
            'FreqKV, high frequencies': bounded(filtered(span, L, slice(-L, None))),
            'FreqKV, keys left rotated': bounded(filtered(span, L), Rotated),
            'sinks + sliding window': bounded(torch.eye(span)[-L:]),
            'truncation': lambda: Truncated(gpt)}


def tuned(model, rows, s, name):
    """The model after s.steps steps on 4 of the rows (n, 2 N + 1) each: gradients flow through its compressions."""
    batches = rows[torch.randint(len(rows), (s.steps, 4), generator=torch.Generator().manual_seed(s.seed))]
    torch.manual_seed(s.seed)  # of dropout
    model.train()
    loss = lambda i: model(batches[i, :, :-1], batches[i, :, 1:])[1]
    fit(model.parameters(), loss, warm_up(3e-4, s.steps), weight_decay=0.0, name=name)
    return model.eval()


def main(argv):
    given, folders = read(argv, __doc__.strip(), FreqKVSettings)
    s = build(FreqKVSettings, given)
    if len(folders) != 1: raise UserError("name one checkpoint folder, such as: python exercises/labs/freqkv.py out/vanilla")
    gpt, tokenizer, settings = load_plain(folders[0], depth_attn=True)
    N = gpt.config.block_size
    text = own_text(settings, 'val', s.windows * 4 * N + 1)
    n = len(windows(text, 4 * N))
    rows = {T: windows(text[:n * 4 * N + 1], T) for T in (N, 2 * N, 4 * N)}  # the same tokens in all three
    make = contestants(gpt, s)
    models = {name: new() for name, new in make.items()}
    if s.steps:
        train = windows(own_text(settings, 'train', 2 ** 20), 2 * N)
        for name in ('no compression', 'FreqKV', 'sinks + sliding window'):
            models[name + ', tuned'] = tuned(make[name](), train, s, name)

    longer = models.get('FreqKV, tuned', models['FreqKV'])
    new = longer.generate([[tokenizer.eot_token]], 3 * N, temperature=0.7, seed=s.seed)[0]
    if hasattr(sys.stdout, 'reconfigure'): sys.stdout.reconfigure(errors='replace')  # a terminal that cannot show a character
    print(f"{3 * N} tokens from a cache that never held more than {longer.peak}:\n")
    print(tokenizer.decode([t for t in new.tolist() if t != tokenizer.eot_token]), end='\n\n')
    losses = [[name, *[loss_on(model, rows[T]) for T in (N, 2 * N, 4 * N)], model.peak] for name, model in models.items()]
    print(table([f"nats per token, N = {N}", 'N', '2 N', '4 N', 'peak cache'], losses))


if __name__ == '__main__':
    run(main)
