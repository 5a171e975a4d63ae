"""
Lab: FreqKV, a cache of keys and values that never outgrows the training window. About 2 minutes.

    python exercises/labs/freqkv.py out/lab
        a long sample, and losses at 1, 2 and 4 training windows
    python exercises/labs/freqkv.py out/lab --steps=0 --keep=0.25
        without fine-tuning, and keeping less

FreqKV: Key-Value Compression in Frequency Domain for Context Window Extension (J. Kai and others,
arXiv 2505.00570). In a text longer than the N tokens of training, a model meets positions it never
saw, and its cache grows without end. Along the sequence, says the paper, keys and values are mostly
low frequencies. So when the cache is full, keep its first S entries ("sinks") as they are, and of
the others the low frequencies only, for which fewer entries are enough. No new weights.

    span  = N - S,   L = int(gamma span),   W = S + L
    Z_k   = a_k sum_n x_n cos(pi k (2n + 1) / (2 span))     a_0 = sqrt(1 / span)
                                                            the others sqrt(2 / span)
    x'    = sqrt(L / span) C_L^T Z[:L]
    cache = [ S sinks | L compressed | up to N - W new ]

Here x is one channel of a key or value head, and gamma the share of the coefficients that stays. Z
is the DCT-II, C_n the DCT of length n, orthonormal; the root keeps amplitudes. When the cache is
full again, its last two parts are compressed together: old text again and again, new text once.

All of it is one fixed matrix, x' = A x, and rivals are other matrices: the A that picks the last L
entries is "sinks + sliding window" (StreamingLLM, arXiv 2309.17453). Keys are compressed without
their rotation, and a position is a place in the cache, so it stays below N.

What it shows (config/size/tiny.py with n_layer=4, n_head=2, n_embd=128, mlp_hidden=352,
block_size=128, batch_tokens=512: 0.9M parameters, 2400 steps; one seed, nats per byte; "tuned":
after 100 steps at 2 N; one core of an AMD EPYC, 2026-11-22, when train.py read its windows in
another order):

                                  N     2 N     4 N  peak cache    tuned: N     2 N     4 N
    no compression           1.8653  1.8746  1.9215         512      1.8756  1.8600  1.8710
    FreqKV                   1.8653  1.8670  1.8638         128      1.8744  1.8738  1.8706
    its keys left rotated    1.8653  2.0272  2.1204         128
    high frequencies kept    1.8653  1.8984  1.9038         128
    sinks + sliding window   1.8653  1.8482  1.8378         128      1.8736  1.8560  1.8457
    truncation               1.8653  1.8480  1.8379         128

At 4 N the model gets worse as it stands, and with FreqKV it does not, in a quarter of the cache.
Low frequencies are the ones to keep, and keys must lose their rotation first.

What it does not show is a gain over forgetting. A sliding window is better, in two models of a
quarter of the training steps too. And once tuned at 2 N, no compression is better at 2 N and as
good at 4 N. This text seldom asks for what is far back, and the filter blurs what is near; the
paper reports on a 7B model and long documents.

What differs from the authors' code: the matrix instead of an FFT; keys wait in the cache rotated,
and are turned back to be compressed; decoding token by token is exact, theirs scores whole texts.
Their path without flash attention adds 1 to the scores of compressed entries, the other does not,
nor do we. From the paper: it tunes LoRA, embeddings and norms of LLaMA-2-7B for 1000 steps at
2 N = 8192, here all weights are, for a few. We had the code and the abstract, not the paper's text.
"""
import math
from dataclasses import dataclass, replace
from functools import partial

import torch

from common import load_plain, loss_on, own_text, start, tuned, windows
from configurator import check_range
from engine.files import UserError, run, table
from engine.generate import generate
from model import GPT, Memory, apply_rope, rope_table


@dataclass
class FreqKVSettings:
    """what the cache keeps, and what is measured"""
    sinks: int = 4        # S: the first entries, never compressed
    keep: float = 0.5     # gamma: share of the coefficients that stay
    windows: int = 48     # losses are of this many stretches of validation text, 4 N tokens each
    steps: int = 100      # fine-tuning steps on texts of 2 N tokens (0: none)
    seed: int = 1337      # of the texts that are drawn for fine-tuning, and of the sample

    def __post_init__(self):
        check_range(self, 0, math.inf, 'sinks', 'steps')
        check_range(self, 1, math.inf, 'windows')
        check_range(self, 0, 2 ** 31 - 1, 'seed')


# ---- the filter ----------------------------------------------------------------------------------

def dct_matrix(n):
    """
    C (n,n): row k is a_k cos(pi k (2i + 1) / 2n), the DCT-II. Orthonormal: C.T is the inverse.
    """
    i = torch.arange(n, dtype=torch.float64)                        # (n,)
    k = i[:, None]                                                  # (n, 1)
    C = math.sqrt(2 / n) * torch.cos(math.pi * k * (2 * i + 1) / (2 * n))
    C[0] /= math.sqrt(2)
    return C


def filtered(span, kept):
    """
    A (L, span): the inverse DCT, of length L, of the L coefficients that the slice `kept` names. Of
    the first ones, a low-pass: each row sums to 1.
    """
    Z = dct_matrix(span)[kept]                                      # (L, span)
    return math.sqrt(len(Z) / span) * dct_matrix(len(Z)).T @ Z


# ---- the cache -----------------------------------------------------------------------------------

class FreqKV(Memory):
    """
    A memory of at most `most` entries. Who fills it calls `compress` when it is full; from then on
    `tokens` counts entries, so the positions of new tokens are their places in it. A token reads
    all entries, and new tokens up to itself. Gradients reach the tokens that were compressed. With
    Depth-Attention it holds the mixed values, as every memory.
    """

    def __init__(self, theta, most, S, A):
        super().__init__()
        self.theta = theta              # of the rotary positions
        self.most = most                # N of the equations
        self.S = S                      # sinks
        self.A = A                      # the filter, (L, N - S)

    def compress(self):
        """
        N entries -> S + L. The DCT mixes places, so a key must lose its old place before, and gets
        its new one after.
        """
        S = self.S
        for layer, k in self.keys.items():
            v = self.values[layer]
            A = self.A.to(k)                                        # (L, span)
            unrotated = self.turn(k[:, :, S:], S, back=True)        # (B, nkv, span, hd)
            keys = self.turn(A @ unrotated, S)                      # (B, nkv, L, hd)
            values = A @ v[:, :, S:]                                # (B, nkv, L, hd)
            self.keys[layer] = torch.cat((k[:, :, :S], keys), 2)    # (B, nkv, S + L, hd)
            self.values[layer] = torch.cat((v[:, :, :S], values), 2)
        self.tokens = S + len(self.A)

    def turn(self, k, first, back=False):
        """Keys (.., n, hd), turned by the angles of places first, first + 1, ..; or back."""
        places = torch.arange(first, first + k.size(-2))            # (n,)
        cos, sin = rope_table(places, k.size(-1), self.theta, k.dtype)
        cos, sin = cos[:, 0], sin[:, 0]                             # (n, 1, hd/2) -> (n, hd/2)
        return apply_rope(k, cos, -sin if back else sin)


class Rotated(FreqKV):
    """A mistake to learn from: keys are compressed as they stand in the cache, rotated."""

    def turn(self, k, first, back=False):
        return k


# ---- models that read on -------------------------------------------------------------------------

class LongGPT(GPT):
    """
    A copy of `gpt` whose forward, loss and generate take texts of any length. make_memory() makes
    the cache for one text.
    """

    def __init__(self, gpt, make_memory=None):
        super().__init__(replace(gpt.config, block_size=2 ** 30))
        self.to(gpt.wte.weight.dtype)
        self.load_state_dict(gpt.state_dict())
        self.N = gpt.config.block_size
        self.make_memory = make_memory
        self.peak = 0                   # the longest cache ever seen

    def new_memory(self, pad=None):
        assert pad is None, "a compressed cache cannot tell padding from text: give one length"
        return self.make_memory()

    def hidden(self, idx, memory=None):
        """
        Tokens (B,T) -> hidden states (B,T,C): read until the cache is full, compress it, read on.
        """
        if memory is None:
            memory = self.new_memory()
        out = []
        while idx.size(1):
            if memory.tokens == memory.most:
                memory.compress()
            room = memory.most - memory.tokens
            part, idx = idx[:, :room], idx[:, room:]
            memory.begin(part)
            out.append(self.trunk(self.embed(part), memory))
            self.peak = max(self.peak, memory.tokens)
        return torch.cat(out, 1)


class Truncated(LongGPT):
    """
    What engine/generate.py does past block_size: the newer half of a full window is read again as
    if it were the whole text.
    """

    def hidden(self, idx, memory=None):
        N = self.N
        old = N // 2 - 1                # tokens that a window shares with the one before
        out = []
        for begin in range(0, max(1, idx.size(1) - old), N - old):
            part = idx[:, begin:begin + N]
            h = self.trunk(self.embed(part))
            out.append(h[:, old:] if begin else h)
            self.peak = max(self.peak, part.size(1))
        return torch.cat(out, 1)


# ---- the lab -------------------------------------------------------------------------------------

def contestants(gpt, s):
    """{name: a model that reads on}. UserError if the settings leave nothing to compress."""
    N, S, theta = gpt.config.block_size, s.sinks, gpt.config.rope_theta
    span = N - S
    L = int(s.keep * span)
    if not 0 < L < span:
        raise UserError(
            f"sinks={S} and keep={s.keep} keep {S} + {L} of {N} entries: "
            "lower sinks, or choose keep between 0 and 1")

    low = filtered(span, slice(L))                                  # (L, span)
    high = filtered(span, slice(-L, None))
    newest = torch.eye(span)[-L:]
    memories = {
        'no compression':            partial(FreqKV, theta, 2 ** 30, 0, None),
        'FreqKV':                    partial(FreqKV, theta, N, S, low),
        'FreqKV, high frequencies':  partial(FreqKV, theta, N, S, high),
        'FreqKV, keys left rotated': partial(Rotated, theta, N, S, low),
        'sinks + sliding window':    partial(FreqKV, theta, N, S, newest),
    }
    models = {name: LongGPT(gpt, memory).eval() for name, memory in memories.items()}
    models['truncation'] = Truncated(gpt).eval()
    return models


def main(argv):
    s, [folder] = start(argv, __doc__, FreqKVSettings)
    gpt, tokenizer, settings = load_plain(folder, depth_attn=True)
    N = gpt.config.block_size

    # the same tokens in windows of three lengths
    text = own_text(settings, 'val', s.windows * 4 * N + 1, tokenizer)
    text = text[:len(windows(text, 4 * N)) * 4 * N + 1]
    rows = [windows(text, T) for T in (N, 2 * N, 4 * N)]

    models = contestants(gpt, s)
    if s.steps:
        # gradients flow through compressions
        train = windows(own_text(settings, 'train', 2 ** 20, tokenizer), 2 * N)
        for name in ('no compression', 'FreqKV', 'sinks + sliding window'):
            models[name + ', tuned'] = tuned(name, models[name], train, 3e-4, s.steps, s.seed,
                                             weight_decay=0.0)

    model = models.get('FreqKV, tuned', models['FreqKV'])
    eot = tokenizer.eot_token
    [sample] = generate(model, [[eot]], 3 * N, temperature=0.7, seed=s.seed)
    print(f"{3 * N} tokens from a cache that never held more than {model.peak}:\n")
    print(tokenizer.decode([token for token in sample.tolist() if token != eot]), end='\n\n')

    lines = []
    for name, model in models.items():
        lines.append([name, *(loss_on(model, some) for some in rows), model.peak])
    print(table([f"nats per token, N = {N}", 'N', '2 N', '4 N', 'peak cache'], lines))


if __name__ == '__main__':
    run(main)
