"""
Sample from a checkpoint, streaming to the terminal.

    python sample.py out/depth_attn                                    from a document's start
    python sample.py out/depth_attn --start="def " --num_samples=3     go on from a text
    python sample.py out/depth_attn --start=FILE:prompt.txt --seed=7   from a file, repeatably
    python sample.py out/halting_exit --show_steps=True                colour tokens by their passes
    python sample.py out/loop --start="1999+8001="                     of a made task: solve it;
                                                                       without --start: another
"""

import codecs
import math
import os
import re
import sys
import time
from dataclasses import dataclass
from typing import Optional

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))   # `python -P` leaves it out
from configurator import build, check_range, only_with, read
from engine.answers import behind_solved
from engine.checkpoint import change_steps
from engine.decode import compile_decoding
from engine.files import UserError, for_terminal, on_disk, run
from engine.generate import stream
from engine.mechanisms import halts, iterates, slots_per_token
from engine.shards import encode
from engine.tasks import TASKS, answer_to
from engine.trained import exam_for_prompt, load_model, only


# ---- settings ------------------------------------------------------------------------------------

@dataclass
class SampleSettings:
    """what to draw, and how"""
    start: Optional[str] = None         # text to go on from, or FILE:path (None: a new document)
    num_samples: int = 1                # samples, one after the other
    max_new_tokens: int = 500           # of each, at most
    temperature: Optional[float] = None # 0 takes the likeliest (None: 0.7, of a made task 0)
    top_k: Optional[int] = None         # keep only the k likeliest tokens
    top_p: Optional[float] = None       # keep the fewest tokens that together have this probability
    seed: int = 1337                    # sample i is drawn with seed + i
    ponder_steps: Optional[int] = None  # pondering steps or thoughts per token (None: as trained)
    halting: Optional[str] = None       # 'exit': tokens leave a 'loop' when sure (None: as trained)
    halt_tau: Optional[float] = None    # with halting: larger stops earlier (None: as trained)
    show_steps: bool = False            # colour each token by its passes
    exact: bool = False                 # read prompts token by token (latent, mask, feedback)
    compile: bool = False               # for a GPU, slow to start (most mechanisms)
    device: Optional[str] = None        # 'cpu', 'cuda', 'mps' (None: the best there is)
    dtype: str = 'float32'              # 'bfloat16' halves memory traffic where hardware has it

    def __post_init__(self):
        check_range(self, 1, math.inf, 'num_samples', 'max_new_tokens')
        check_range(self, 0, 1, 'halt_tau', 'top_p')
        check_range(self, 1, math.inf, 'top_k')
        check_range(self, 0, math.inf, 'temperature')
        check_range(self, 0, 2 ** 63 - 1, 'seed')
        if self.dtype not in ('float32', 'bfloat16', 'float16'):
            raise ValueError(f"dtype={self.dtype!r} must be 'float32', 'bfloat16' or 'float16'")


def override(model, s):
    """Settings that may differ from training's; UserError where they mean nothing to this model."""
    if s.ponder_steps is not None:
        change_steps(model, s.ponder_steps)
    if s.halt_tau is not None:
        if not halts(model):
            raise UserError("halt_tau: no token of this model halts; leave the setting out")
        model.config.halt_tau = s.halt_tau


# ---- the prompt ----------------------------------------------------------------------------------

def encode_prompt(start, tokenizer, block_size):
    """
    The tokens to go on from; without `start` the end-of-text token, which documents follow. In it
    <|endoftext|> stands for that token. UserError if they are none, more than the model's context,
    or in a file that cannot be read.
    """
    if start is None:
        return [tokenizer.eot_token]
    tokens = tokens_of(read_start(start), tokenizer)
    if not tokens:
        raise UserError("--start is empty: give at least one character, or leave it out to start "
                        "a new document")
    check_length(tokens, block_size, '--start')
    return tokens


def tokens_of(text, tokenizer):
    """Those of a prompt's bytes, in which <|endoftext|> stands for that token."""
    tokens = []
    for document in text.split(b'<|endoftext|>'):
        tokens += encode(tokenizer, document).tolist()              # an end-of-text token behind it
    return tokens[:-1]                                              # but not behind the last


def check_length(tokens, block_size, name):
    """UserError for more tokens than the model's context."""
    if len(tokens) > block_size:
        raise UserError(f"{name} has {len(tokens)} tokens, the model's context (block_size) is "
                        f"{block_size}: shorten it")


def as_question(prompt, exam):
    """
    A made task's problem as in training, perhaps with the beginning of its answer: its question has
    an end, and a file's line has none. UserError if it is no problem of the task.
    """
    end = TASKS[exam['task']].end
    text = bytes(token for token in prompt if token != exam['eot'])
    question, _, answer = text.decode('utf-8', 'replace').strip().partition(end)
    answer_to(question + end, exam['task'])
    if re.search(r'[\s,]', answer):
        raise UserError(f"{text.decode('utf-8', 'replace')!r}: a model of a made task reads one "
                        "problem at a time")
    return list((question + end + answer).encode())


def behind_examples(question, exam, block_size):
    """What a model of a made task reads before it answers: solved problems, then the question."""
    return behind_solved([exam['eot'], *question], exam, block_size)[-block_size:]


def read_start(start):
    """The bytes of --start, or of its FILE:path, as they are."""
    if not start.startswith('FILE:'):
        return start.encode('utf-8', 'surrogateescape')     # so Python holds what is no UTF-8
    path = start.removeprefix('FILE:')
    with on_disk(path, 'read'), open(path, 'rb') as f:
        text = f.read().removeprefix(codecs.BOM_UTF8)   # as prepare_data.py reads a text
    warn_of_text(path, text)
    return text


def warn_of_text(path, text):
    """A warning of bytes in a text file that hardly any model was trained on."""
    if b'\0' in text:
        print(f"warning: {path} has NUL bytes: it is UTF-16, or no text", file=sys.stderr)
    if b'\r\n' in text:
        print(f"warning: {path}: lines end as on Windows, and the model may not know such ends; "
              "convert them, as with dos2unix", file=sys.stderr)


# ---- sampling ------------------------------------------------------------------------------------

# of 1, 2, .. passes: numbers of a terminal's 256 colours, one hue, pale enough for black text
SHADES = (255, 223, 216, 209, 202, 166)


def shaded(text, passes):
    """Text on the colour of a number of passes."""
    return f"\033[30;48;5;{SHADES[min(passes, len(SHADES)) - 1]}m{text}\033[0m"


def print_sample(model, tokenizer, prompt, s, seed):
    """Print what the model makes of a prompt, as it comes; returns (tokens, passes they took)."""
    utf8 = codecs.getincrementaldecoder('utf-8')('replace')     # a character may be several tokens
    count, total = 0, 0
    for token, passes in stream(model, [prompt], s.max_new_tokens, temperature=s.temperature,
                                top_k=s.top_k, top_p=s.top_p, seed=seed,
                                stop_token=tokenizer.eot_token, exact=s.exact):
        token, passes = token.item(), passes.item()     # both are (1,): there is one prompt
        count += 1
        total += passes
        if token != tokenizer.eot_token:
            text = for_terminal(utf8.decode(tokenizer.decode_single_token_bytes(token)))
            print(shaded(text, passes) if s.show_steps and text else text, end='', flush=True)
    print(utf8.decode(b'', final=True), end='')     # what is left of a character that never ended
    return count, total


def main(argv):
    options, folders = read(argv, __doc__, SampleSettings)
    s = build(SampleSettings, options)
    folder = only(folders, "python sample.py out/depth_attn")
    model, tokenizer, settings = load_model(folder, s.device, s.dtype, s.halting)
    override(model, s)
    only_with('latent, mask and feedback', iterates(model), options, 'exact')
    start, exam = None if s.start == '<|endoftext|>' else s.start, exam_for_prompt(settings)
    if s.temperature is None:
        s.temperature = 0.7 if exam is None else 0.0
    only_with('a temperature above 0, such as --temperature=0.7', s.temperature > 0, options,
              'num_samples', 'top_k', 'top_p')
    if start is None and exam is not None:
        start, _ = exam['problems'][-1]     # a question of the validation set
    prompt = encode_prompt(start, tokenizer, model.config.block_size)
    if exam is not None:
        prompt = as_question(prompt, exam)
    given = '' if start is None else tokenizer.decode(prompt)
    if exam is not None:
        print("a made task: asked behind solved problems, as in training", file=sys.stderr)
        prompt = behind_examples(prompt, exam, model.config.block_size)

    if s.compile:
        compile_decoding(model, min(model.config.block_size, len(prompt) + s.max_new_tokens))

    tokens, passes = 0, 0
    started = time.perf_counter()
    for i in range(s.num_samples):
        if i > 0:
            print('\n' + '-' * 80)
        print(for_terminal(given), end='', flush=True)
        count, total = print_sample(model, tokenizer, prompt, s, s.seed + i)
        tokens += count
        passes += total
    seconds = time.perf_counter() - started

    if s.show_steps:
        legend = ' '.join(shaded(f" {n} ", n) for n in range(1, slots_per_token(model) + 1))
        print(f"\n\npasses per token: {legend}", end='')
    compiled = " (with the compiler's time)" if s.compile else ''
    print(f"\n\n{tokens} tokens in {seconds:.1f} s{compiled}, {tokens / seconds:.0f} tokens/s, "
          f"{passes / tokens:.2f} passes per token", file=sys.stderr)


if __name__ == '__main__':
    run(main)
