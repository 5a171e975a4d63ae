"""
Sample from a checkpoint, streaming to the terminal.

    python sample.py out/depth_attn                                        from the start of a document
    python sample.py out/depth_attn --start="def " --num_samples=3         go on from a text
    python sample.py out/depth_attn --start=FILE:prompt.txt --seed=7       go on from a file, repeatably
    python sample.py out/halting_gate --show_steps=True                    colour each token by the passes it took
"""

import codecs
import math
import os
import sys
import time
from dataclasses import dataclass
from typing import Optional

import torch

from engine.checkpoint import change_steps, load_checkpoint, load_weights
from configurator import build, check_range, read
from engine.errors import UserError, run
from model import GPT, GPTConfig
from engine.shards import get_tokenizer
from engine.hardware import compile_decoding, expect_new_lengths, pick_device


@dataclass
class SampleSettings:
    """what to draw, and how"""
    start: Optional[str] = None         # text to go on from, or FILE:path (None: the end-of-text token, where documents start)
    num_samples: int = 1                # samples, one after the other
    max_new_tokens: int = 500           # length of each
    temperature: float = 0.7            # 0 always takes the likeliest token
    top_k: Optional[int] = None         # keep only the k likeliest tokens
    top_p: Optional[float] = None       # keep the fewest tokens that together have this probability
    seed: int = 1337                    # sample i is drawn with seed + i
    ponder_steps: Optional[int] = None  # pondering steps or thoughts per token (None: as trained)
    halt_tau: Optional[float] = None    # with halting: larger stops earlier (None: as trained)
    show_steps: bool = False            # colour each token by the passes it took; numbers where there is no colour
    exact: bool = False                 # ponder='latent': read the prompt token by token instead of by Jacobi iterations
    compile: bool = False               # compile the pass of one new token: pays after some ten thousand tokens
    device: Optional[str] = None        # 'cpu', 'cuda', 'mps' (None: the best there is)
    dtype: str = 'float32'              # 'bfloat16' halves the memory traffic on hardware that has it

    def __post_init__(self):
        check_range(self, 1, 10 ** 8, 'num_samples', 'max_new_tokens')
        check_range(self, 0, 2 ** 31 - 1, 'seed')
        check_range(self, 0, math.inf, 'halt_tau')
        if self.temperature: check_range(self, 1e-6, 1e6, 'temperature')  # or logits divided by it would be infinite, or all alike
        if self.top_k is not None and self.top_k < 1: raise ValueError(f"top_k={self.top_k} must be at least 1, or None")
        check_range(self, 1e-6, 1, 'top_p')
        if self.dtype not in ('float32', 'bfloat16', 'float16'):
            raise ValueError(f"dtype={self.dtype!r} must be 'float32', 'bfloat16' or 'float16'")


def load_model(folder, device):
    """(model in eval mode on `device`, tokenizer, train.py's settings) of a checkpoint folder; UserError if there is none."""
    state = load_checkpoint(folder)
    model = GPT(GPTConfig(**state['config']))
    load_weights(model, state)
    expect_new_lengths()
    return model.to(device).eval(), get_tokenizer(state['tokenizer']), state['settings']


def open_one(argv, description, block, example):
    """Of a program that takes settings (`block`) and one checkpoint: (settings, model, tokenizer, train.py's settings)."""
    given, folders = read(argv, description, block)
    s = build(block, given)
    if len(folders) != 1: raise UserError(f"name one checkpoint folder, such as: {example}")
    return s, *load_model(folders[0], pick_device(s.device))


def encode_prompt(start, tokenizer, block_size):
    """Tokens of the prompt; UserError if it is empty, unreadable or longer than the model's context."""
    if start is None: return [tokenizer.eot_token]
    if start.startswith('FILE:'):
        try:
            with open(start[5:], encoding='utf-8', errors='replace') as f: start = f.read()
        except OSError as error:
            raise UserError(f"--start={start}: cannot be read ({error.strerror})") from None
    tokens = tokenizer.encode_ordinary(start)
    if not tokens: raise UserError("--start is empty: give at least one character, or leave it out to start a new document")
    if len(tokens) > block_size:
        raise UserError(f"--start has {len(tokens)} tokens, the model's context (block_size) is {block_size}: shorten it")
    return tokens


SHADES = (255, 228, 220, 209, 203, 197)  # backgrounds of the 256-colour terminal, pale for one pass to red for six or more


class Shade:
    """Text marked by a number of passes: a background colour, or without colours the number wherever it changes."""

    def __init__(self, on):
        self.on, self.last = on, None
        self.colour = bool(sys.stdout) and sys.stdout.isatty() and 'NO_COLOR' not in os.environ and os.environ.get('TERM') != 'dumb'

    def __call__(self, text, passes):
        if not self.on: return text
        if self.colour: return f"\033[30;48;5;{SHADES[min(passes, len(SHADES)) - 1]}m{text}\033[0m"
        mark, self.last = f"[{passes}]" if passes != self.last else '', passes
        return mark + text

    def legend(self, most):
        """What the marks mean, for up to `most` passes."""
        marks = ' '.join(self(f" {n} ", n) for n in range(1, most + 1)) if self.colour else "[n] before the text"
        return f"passes per token: {marks}"


def override(config, s):
    """Settings that may differ from those of training; UserError where they mean nothing to this model."""
    if s.ponder_steps is not None: change_steps(config, s.ponder_steps)
    if s.halt_tau is not None:
        if config.halting == 'none': raise UserError("halt_tau: this model has halting='none'; leave the setting out")
        config.halt_tau = s.halt_tau


def main(argv):
    s, model, tokenizer, _ = open_one(argv, __doc__.strip(), SampleSettings, "python sample.py out/depth_attn")
    model.to(getattr(torch, s.dtype))
    override(model.config, s)
    if s.compile: compile_decoding(model)
    prompt = encode_prompt(s.start, tokenizer, model.config.block_size)
    shade, count, total, started = Shade(s.show_steps), 0, 0, time.perf_counter()
    for i in range(s.num_samples):
        if i: print('\n' + '-' * 80)
        print(s.start if s.start and not s.start.startswith('FILE:') else '', end='', flush=True)
        utf8 = codecs.getincrementaldecoder('utf-8')('replace')  # a character may come in several tokens
        for token, passes in model.stream([prompt], s.max_new_tokens, temperature=s.temperature, top_k=s.top_k, top_p=s.top_p,
                                          seed=s.seed + i, stop_token=tokenizer.eot_token, exact=s.exact):
            token, passes = token.item(), passes.item()
            count, total = count + 1, total + passes
            text = utf8.decode(tokenizer.decode_single_token_bytes(token)) if token != tokenizer.eot_token else ''
            if text: print(shade(text, passes), end='', flush=True)
        print(utf8.decode(b'', final=True), end='')  # what is left of a character that never ended
    seconds = time.perf_counter() - started
    if s.show_steps: print('\n\n' + shade.legend(1 if model.config.ponder == 'none' else model.config.ponder_steps + 1), end='')
    print(f"\n\n{count} tokens in {seconds:.1f} s, {count / seconds:.0f} tokens/s, {total / count:.2f} passes per token", file=sys.stderr)


if __name__ == '__main__':
    run(main)
