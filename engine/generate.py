"""
Generation with caches: what programs use in the place of GPT.generate. It asks a model for hidden
states and logits, and draws by `sample` of model.py.

    stream        token by token, for a batch of prompts of unequal lengths, past block_size too
    generate      all of it
    check_pieces  warns of a changed model.py that does not generate as it was trained
    in_step       within one window of the context: all rows get their next token together
"""

import sys
from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn as nn
import torch.nn.functional as F

from engine.files import UserError
from engine.mechanisms import halts, iterates, slots_per_token
from engine.variant import variant_of
from model import require, sample


def stream(gpt, prompts, max_new_tokens, temperature=1.0, top_k=None, top_p=None, seed=None,
           stop_token=None, exact=False):
    """
    Generate step by step; yields (token (B,), passes (B,)): each row's new token, and the passes
    (of `pause`, slots) it took. ValueError at once for prompts that do not fit.

    prompts      (B,T), or a list of B sequences of any lengths, none empty or above block_size
    temperature  0 takes the likeliest token
    top_k        only the k likeliest
    top_p        only the fewest that together have this probability
    seed         makes the draw repeatable on one device
    stop_token   a row that drew it repeats it; the stream ends when all rows have
    exact        'latent', 'mask', 'feedback': read prompts token by token, not by iteration

    Past block_size: when the window is full, its newer half is read afresh, as if it were the whole
    text. So each token is predicted from block_size / 2 to block_size tokens, as by `forward` on
    that window ('latent', 'mask', 'feedback': with enough sweeps), and on average each is read
    about twice. The window is the batch's: when the longest row fills it, all rows lose their older
    part.
    """
    require(top_k is None or top_k >= 1, f"top_k={top_k} must be at least 1")
    device = gpt.wte.weight.device
    prompt, padding = left_pad(prompts, gpt.config, device)
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    done = torch.zeros(len(prompt), dtype=torch.bool, device=device)
    finite = torch.ones((), dtype=torch.bool, device=device)
    sampler = Sampler(temperature, top_k, top_p, stop_token, generator, done, finite)
    return in_windows(gpt, prompt, padding, max_new_tokens, sampler, exact)


@torch.inference_mode()
def in_windows(gpt, prompt, padding, max_new_tokens, sampler, exact):
    """What `stream` yields. prompt (B,n), with `padding` (B,) on the left of rows, or None."""
    window, n, tokens = gpt.config.block_size, prompt.size(1), prompt
    last = n + max_new_tokens
    longest_padding = 0 if padding is None else int(padding.max())

    was_training = gpt.training
    gpt.eval()
    try:
        first = 0                   # where the window begins
        while n < last:
            end = min(first + window + 1, last)             # the last token need not be read
            tokens = torch.cat((tokens, tokens.new_zeros(len(tokens), end - n)), dim=1)
            start = (padding - first).clamp(min=0) if longest_padding > first else None
            memory = gpt.new_memory(start)
            for part in tokens[:, first:n].split(1 if exact else n - first, dim=1):
                h = gpt.hidden(part, memory)                # read what is there
            for token, passes in in_step(gpt, tokens[:, :end], n, h[:, -1], memory, sampler):
                if token.device.type == 'cpu':
                    sampler.check()                         # a GPU would be waited for
                yield token, passes                         # write until it is full
                if sampler.all_done(token):
                    break
            sampler.check()
            if sampler.all_done(token):
                return
            n, first = end, end - max(1, window // 2)
    finally:
        gpt.train(was_training)


def generate(gpt, prompts, max_new_tokens, **options):
    """All of `stream`: (B,T) gives (B, T + new); a list gives tensors, cut after the stop token."""
    device, stop = gpt.wte.weight.device, options.get('stop_token')
    rows = [torch.as_tensor(prompt, device=device) for prompt in prompts]
    new = [token for token, _ in stream(gpt, prompts, max_new_tokens, **options)]
    if new:
        new = torch.stack(new, dim=1)                                   # (B,new)
    else:
        new = torch.zeros(len(rows), 0, dtype=torch.long, device=device)
    if isinstance(prompts, torch.Tensor):
        return torch.cat((prompts.to(device), new), dim=1)
    return [torch.cat((prompt, cut(row, stop))) for prompt, row in zip(rows, new)]


@torch.inference_mode()
def check_pieces(gpt):
    """
    Warn if the model predicts otherwise when a text is read in pieces, or beside padding, than at
    once: then model.py was changed, and something reaches other tokens, and not by the memory. Not
    for what is read by iteration, nor in 16 bits: there the two differ anyway. Nor beside padding
    where keys depend on absolute positions, which padding shifts: left_pad refuses that.
    """
    # so long that what reaches far shows, too; but short with halting, where a token whose score is
    # near tau may stop or not, by rounding
    T = min(12 if halts(gpt) else 256, gpt.config.block_size - 2)
    if iterates(gpt) or gpt.wte.weight.itemsize < 4 or T < 2:
        return
    device = gpt.wte.weight.device
    text = torch.arange(T, device=device)[None] * 7 % gpt.config.n_tokens       # any will do
    # with a memory: without one, compiled blocks would be compiled for this length
    at_once = gpt.head(gpt.hidden(text, gpt.new_memory())).softmax(-1)          # (1,T,V)
    ways = [(0, "in pieces, as in generation,")]
    if not variant_of(gpt.config).late_k_norm:
        ways.append((2, "beside padding, as in a batch,"))
    for pad, how in ways:
        memory = gpt.new_memory(torch.tensor([pad], device=device) if pad else None)
        alone = min(6, T - T // 2)      # tokens that come one by one, behind the others
        parts = F.pad(text, (pad, 0)).split([pad + T - alone, *[1] * alone], dim=1)
        h = torch.cat([gpt.hidden(part, memory) for part in parts], dim=1)[:, pad:]
        off = (gpt.head(h).softmax(-1) - at_once).abs().max().item()
        if off > 0.01:
            print(f"warning: a text read {how} is not predicted as one that is read at once (a "
                  f"probability is {off:.2f} off): in model.py something reaches other tokens, and "
                  "not by the memory (docs/modify.md)", file=sys.stderr)
            return


def cut(row, stop):
    """The tokens of a row up to its first `stop`."""
    stops = (row == stop).nonzero() if stop is not None else []
    return row[:stops[0] + 1] if len(stops) > 0 else row


def left_pad(prompts, config, device):
    """
    Right-align prompts: tokens (B, longest), and the padding left of each row (B,), None for none.
    Rotary attention sees differences of positions only: rows shifted to the right need no positions
    of their own. ValueError where that is not so: in a released model whose keys are normed after
    the rotation.
    """
    rows = [torch.as_tensor(prompt, device=device) for prompt in prompts]
    lengths = [len(row) for row in rows]
    require(rows and min(lengths) > 0,
            "an empty prompt: give at least one token, such as the end-of-text token")
    longest = max(lengths)
    require(longest <= config.block_size,
            f"a prompt of {longest} tokens does not fit into block_size={config.block_size}")
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side='left')
    if min(lengths) == longest:
        return tokens, None
    require(not variant_of(config).late_k_norm,
            "prompts of unequal lengths: this model's keys depend on where a text begins, so give "
            "one prompt at a time")
    return tokens, torch.tensor([longest - n for n in lengths], device=device)


@dataclass
class Sampler:
    """How tokens are drawn, and which rows have drawn their stop token."""
    temperature: float
    top_k: Optional[int]
    top_p: Optional[float]
    stop_token: Optional[int]
    generator: Optional[torch.Generator]
    done: torch.Tensor                                                  # (B,)
    finite: torch.Tensor                                                # whether all logits were

    def draw(self, logits):
        """logits (B,V) -> tokens (B,)."""
        self.finite &= logits.amax(-1).isfinite().all()     # `check` asks later
        token = sample(logits, self.temperature, self.top_k, self.top_p, self.generator)
        if self.stop_token is None:
            return token
        return torch.where(self.done, self.stop_token, token)

    def check(self):
        """UserError if something was drawn from logits that were not finite."""
        if not self.finite:
            raise UserError("the model's output is not finite: take another checkpoint, or a wider "
                            "dtype such as float32")

    def all_done(self, token):
        """Whether, with these tokens (B,), all rows have had their stop token."""
        if self.stop_token is None:
            return False
        self.done |= token == self.stop_token
        return bool(self.done.all())


def in_step(gpt, tokens, n, h, memory, sampler):
    """
    Fill tokens (B,end) from place n on and yield (token (B,), passes (B,)) of each place.
    h (B,C): the hidden states that predict the tokens at place n.
    """
    B, end = tokens.shape
    mechanism = gpt.mechanism
    passes = tokens.new_full((B,), slots_per_token(gpt))
    for place in range(n, end):
        token = sampler.draw(gpt.head(h))
        tokens[:, place] = token
        yield token, mechanism.passes[:, -1] if halts(gpt) else passes
        if place + 1 < end:
            h = gpt.hidden(token[:, None], memory)[:, -1]
