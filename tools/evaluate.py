"""
Measure a checkpoint: loss, perplexity and bits per byte on any text; the papers' tasks; whether its Python is Python.

    python tools/evaluate.py out/depth_attn                              the validation set of its data
    python tools/evaluate.py out/depth_attn notes.txt data/mine          your texts, token shards (.bin) or data folders
    python tools/evaluate.py out/depth_attn --functions=200              share of sampled functions that ast.parse accepts
    python tools/evaluate.py out/depth_attn --tasks=lambada_openai,piqa,sciq --num_fewshot=0

--tasks needs EleutherAI's harness, pip install lm_eval, which fetches the tasks' data by itself; those made of log-likelihoods
work: LAMBADA, PIQA, WinoGrande, SciQ, HellaSwag, ARC, RACE and others.
"""

import ast
import math
import os
import sys
import time
import warnings
from dataclasses import dataclass
from typing import Optional

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # run from anywhere
from engine.checkpoint import CHECKPOINTS
from configurator import build, check_range, read
from engine.errors import UserError, run
from engine.shards import count_tokens, encode, open_shard, read_meta
from engine.hardware import explained, pick_device, tune_cpu
from sample import load_model, override


@dataclass
class EvaluateSettings:
    """what to measure"""
    tokens: Optional[int] = None        # read only so many tokens of each text (None: all)
    functions: int = 0                  # Python functions to sample
    max_new_tokens: int = 500           # length of a function, in tokens; one that does not end by then counts as wrong
    temperature: float = 0.7            # of the functions
    seed: int = 1337                    # of the functions
    tasks: Optional[str] = None         # names of lm_eval tasks, with commas between
    num_fewshot: Optional[int] = None   # examples before each question (None: what the task says)
    limit: Optional[int] = None         # questions per task, for a quick look (None: all)
    include_path: Optional[str] = None  # folder with your own tasks' .yaml files
    cache: Optional[str] = None         # lm_eval: file that keeps answers, so that a stopped run goes on; one per checkpoint and setting
    batch_size: int = 16                # sequences computed together
    device: Optional[str] = None        # 'cpu', 'cuda', 'mps' (None: the best there is)
    ponder_steps: Optional[int] = None  # other than in training (None: as there)
    halt_tau: Optional[float] = None    # with halting: a larger one stops earlier (None: as trained)
    dtype: str = 'float32'              # 'bfloat16' is faster where the hardware has it; changes the third decimal or so

    def __post_init__(self):
        if self.batch_size < 1 or self.functions < 0 or self.max_new_tokens < 1:
            raise ValueError("batch_size and max_new_tokens must be at least 1, functions not negative")
        if self.temperature: check_range(self, 1e-6, 1e6, 'temperature')  # as in sample.py
        check_range(self, 0, 2 ** 31 - 1, 'seed')
        check_range(self, 0, math.inf, 'halt_tau')
        if self.tokens is not None and self.tokens < 2: raise ValueError(f"tokens={self.tokens} must be at least 2")
        if self.dtype not in ('float32', 'bfloat16', 'float16'):
            raise ValueError(f"dtype={self.dtype!r} must be 'float32', 'bfloat16' or 'float16'")


@torch.inference_mode()
def nats(model, tokens, batch_size):
    """Total of -log p in nats of all tokens (n,) but the first, each given those before it in its window of block_size."""
    T, device, total = model.config.block_size, model.wte.weight.device, 0.0
    for first in range(0, len(tokens) - 1, T * batch_size):
        part = torch.from_numpy(np.asarray(tokens[first:first + T * batch_size + 1], np.int64)).to(device)
        pad = (0, (1 - len(part)) % T)
        x, y = F.pad(part[:-1], pad), F.pad(part[1:], pad, value=-1)  # a target of -1 counts for nothing
        total += model(x.view(-1, T), y.view(-1, T))[1].item() * (len(part) - 1)
    return total


def token_arrays(path, tokenizer):
    """The token arrays of a text file, of a shard, or of the validation shards of a data folder."""
    if os.path.exists(os.path.join(path, CHECKPOINTS[0])): raise UserError(f"{path}: a checkpoint; only the first folder is one")
    if os.path.isdir(path):
        shards = [os.path.join(path, shard['name']) for shard in read_meta(path, tokenizer)['val']['shards']]
    else: shards = [path] if path.endswith('.bin') else []
    for shard in shards: count_tokens(shard, tokenizer.n_vocab)  # UserError for a token that the model has not
    if shards: return [open_shard(shard) for shard in shards]
    try:
        with open(path, 'rb') as f: text = f.read()
    except OSError as error: raise UserError(f"{path}: cannot be read ({error.strerror}); prepare_data.py makes data sets") from None
    return [np.append(np.uint16(tokenizer.eot_token), encode(tokenizer, text)[:-1])]  # the end-of-text goes to the front


def evaluate_text(model, tokenizer, path, s):
    """(tokens predicted, nats per token, nats per byte) of a text. End-of-text tokens count as tokens of no bytes."""
    length = np.array([len(tokenizer.decode_single_token_bytes(t)) * (t != tokenizer.eot_token) for t in range(tokenizer.n_vocab)])
    total = count = size = 0
    for tokens in token_arrays(path, tokenizer):
        if s.tokens is not None: tokens = tokens[:s.tokens - count]
        if len(tokens) < 2: continue
        total += nats(model, tokens, s.batch_size)
        count, size = count + len(tokens) - 1, size + int(length[tokens[1:]].sum())
    if not size: raise UserError(f"{path}: no text in it")
    return count, total / count, total / size


def parses(text):
    """Whether `text`, which starts with "def ", goes on to the end of this function and Python can read it up to there."""
    lines = text.split('\n')
    end = next((i for i, line in enumerate(lines) if i and line[:1].strip()), None)  # the next line that is not indented
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            return end is not None and bool(ast.parse('\n'.join(lines[:end])))
    except (SyntaxError, ValueError, RecursionError, MemoryError): return False


def sample_functions(model, tokenizer, s):
    """Texts of s.functions samples that go on from "def "."""
    prompt, texts = tokenizer.encode_ordinary('\n\ndef ')[-model.config.block_size:], []
    while len(texts) < s.functions:
        rows = model.generate([prompt] * min(s.batch_size, s.functions - len(texts)), s.max_new_tokens, seed=s.seed + len(texts),
                              temperature=s.temperature, stop_token=tokenizer.eot_token)
        texts += ['def ' + tokenizer.decode([t for t in row[len(prompt):].tolist() if t != tokenizer.eot_token]) for row in rows]
    return texts


@torch.inference_mode()
def log_likelihoods(model, pairs, batch_size):
    """
    For pairs[i] = (context, answer), lists of tokens, yields (i, sum of log p of the answer, whether each of its tokens was
    the likeliest), the longest first. A context that is too long loses its beginning. UserError if an answer is too long.
    """
    T, device = model.config.block_size, model.wte.weight.device
    order = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
    for first in range(0, len(order), batch_size):
        chosen = order[first:first + batch_size]
        rows = [torch.tensor([*pairs[i][0], *pairs[i][1]][-T - 1:], device=device) for i in chosen]
        h = model.hidden(torch.nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True))  # padded on the right
        for i, row, h_i in zip(chosen, rows, h):
            n, end = len(pairs[i][1]), len(row) - 1
            if n > T: raise UserError(f"an answer of {n} tokens does not fit into the model's context, block_size={T}")
            logits = model.head(h_i[end - n:end])
            logp = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
            right = logp.gather(-1, row[-n:, None])
            yield i, right.cpu().double().sum().item(), bool((right[:, 0] >= logp.max(-1).values).all())


def harness(model, tokenizer, batch_size):
    """The model as lm_eval wants it; UserError if lm_eval is missing."""
    try: from lm_eval.api.model import TemplateLM
    except ImportError: raise UserError("--tasks needs EleutherAI's harness: pip install lm_eval") from None

    class Harness(TemplateLM):
        eot_token_id = tokenizer.eot_token

        def tok_encode(self, string, add_special_tokens=None, **kwargs):
            return tokenizer.encode_ordinary(string)

        def _loglikelihood_tokens(self, requests, disable_tqdm=False):
            answers = [None] * len(requests)
            for i, *answer in log_likelihoods(model, [r[1:] for r in requests], batch_size):
                answers[i] = tuple(answer)
                self.cache_hook.add_partial('loglikelihood', requests[i][0], answers[i])
            return answers

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            return [-nats(model, np.array([tokenizer.eot_token, *self.tok_encode(r.args[0])]), batch_size) for r in requests]

        def generate_until(self, requests, disable_tqdm=False):
            raise UserError("a task asks for generated text: only tasks made of log-likelihoods work here")
    return Harness()


def run_tasks(model, tokenizer, s):
    """lm_eval's table for the tasks; UserError if there is no such task or its data cannot be had."""
    lm, names = harness(model, tokenizer, s.batch_size), s.tasks.split(',')
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table
    manager = TaskManager(include_path=s.include_path)
    if missing := [name for name in names if not manager.match_tasks([name])]:
        raise UserError(f"--tasks={','.join(missing)}: lm_eval knows no such task; `lm_eval ls tasks` lists them")
    try: results = simple_evaluate(lm, tasks=names, num_fewshot=s.num_fewshot, limit=s.limit, use_cache=s.cache,
                                   task_manager=manager)
    except OSError as error:  # the network's errors are OSErrors
        raise UserError(f"--tasks={s.tasks}: the data could not be had ({' '.join(str(error).split())[:150]})") from None
    return make_table(results)


@explained()
def main(argv):
    given, paths = read(argv, __doc__.strip(), EvaluateSettings, files=False)  # a .py file is text here
    s = build(EvaluateSettings, given)
    if not paths: raise UserError("name a checkpoint folder, such as: python tools/evaluate.py out/depth_attn")
    device, dtype = pick_device(s.device), getattr(torch, s.dtype)
    model, tokenizer, settings = load_model(paths[0], device)
    model.to(dtype)
    override(model.config, s)
    if device.type == 'cpu': tune_cpu()
    texts = paths[1:] or ([] if s.tasks or s.functions else [settings['data_dir']])
    for path in texts:
        start = time.perf_counter()
        count, per_token, per_byte = evaluate_text(model, tokenizer, path, s)
        print(f"{path}: {count:,} tokens, {per_token:.4f} nats per token, perplexity {math.exp(per_token):.3f}, "
              f"{per_byte / math.log(2):.4f} bits per byte, {time.perf_counter() - start:.1f} s")
    if s.functions:
        good = sum(map(parses, sample_functions(model, tokenizer, s)))
        print(f"{good} of {s.functions} sampled functions are Python ({good / s.functions:.1%})")
    if s.tasks: print(run_tasks(model, tokenizer, s))


if __name__ == '__main__':
    run(main)
