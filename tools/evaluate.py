"""
Measure a checkpoint: loss, perplexity and bits per byte on any text; right answers; the papers'
tasks; whether its Python is Python.

    python tools/evaluate.py out/depth_attn                         the validation set of its data
    python tools/evaluate.py out/depth_attn notes.txt data/mine     your texts, token shards (.bin)
                                                                    or data folders
    python tools/evaluate.py out/loop --answers=1000                right answers to problems of the
                                                                    task it was trained on
    python tools/evaluate.py out/depth_attn --functions=200         share of sampled functions that
                                                                    ast.parse accepts
    python tools/evaluate.py out/depth_attn --tasks=lambada_openai,piqa,sciq --num_fewshot=0

--tasks needs EleutherAI's harness, pip install lm_eval, which fetches the tasks' data by itself.
Tasks made of log-likelihoods work: LAMBADA, PIQA, WinoGrande, SciQ, HellaSwag, ARC, RACE and
others.
"""

import ast
import json
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
from configurator import build, check_range, read
from engine.checkpoint import CHECKPOINTS
from engine.files import UserError, on_disk, run, whole
from engine.hardware import explained, pick_device, tune_cpu
from engine.shards import count_tokens, encode, open_shard, read_meta
from sample import data_dir_of, load_model, override
from tools import answers


@dataclass
class EvaluateSettings:
    """what to measure"""
    tokens: Optional[int] = None        # read only so many tokens of each text (None: all)
    answers: int = 0                    # problems of a made task to answer
    json: Optional[str] = None          # file for the same as JSON
    functions: int = 0                  # Python functions to sample
    max_new_tokens: int = 500           # longest function, in tokens; one without an end is wrong
    temperature: float = 0.7            # of the functions
    seed: int = 1337                    # of the functions
    tasks: Optional[str] = None         # names of lm_eval tasks, with commas between
    num_fewshot: Optional[int] = None   # examples before each question (None: what the task says)
    limit: Optional[int] = None         # questions per task, for a quick look (None: all)
    include_path: Optional[str] = None  # folder with your own tasks' .yaml files
    cache: Optional[str] = None         # file of answers to go on from; one per model and setting
    batch_size: int = 16                # sequences computed together
    device: Optional[str] = None        # 'cpu', 'cuda', 'mps' (None: the best there is)
    ponder_steps: Optional[int] = None  # other than in training (None: as there)
    halt_tau: Optional[float] = None    # with halting: larger stops earlier (None: as trained)
    dtype: str = 'float32'              # 'bfloat16' is faster on some hardware, a little less exact

    def __post_init__(self):
        if self.batch_size < 1 or self.max_new_tokens < 1:
            raise ValueError("batch_size and max_new_tokens must be at least 1")
        if self.functions < 0 or self.answers < 0:
            raise ValueError("functions and answers must not be negative")
        if self.json and not self.answers:
            raise ValueError("json: what is written there are the --answers")
        if self.temperature != 0:       # as in sample.py
            check_range(self, 1e-6, 1e6, 'temperature')
        check_range(self, 0, 2 ** 31 - 1, 'seed')
        check_range(self, 0, math.inf, 'halt_tau')
        if self.tokens is not None and self.tokens < 2:
            raise ValueError(f"tokens={self.tokens} must be at least 2")
        if self.dtype not in ('float32', 'bfloat16', 'float16'):
            raise ValueError(f"dtype={self.dtype!r} must be 'float32', 'bfloat16' or 'float16'")


# ---- loss on texts -------------------------------------------------------------------------------

@torch.inference_mode()
def nats(model, tokens, batch_size):
    """
    Total of -log p in nats of all tokens (n,) but the first, each given those before it in its
    window of block_size.
    """
    T = model.config.block_size
    device = model.wte.weight.device
    total = 0.0
    for first in range(0, len(tokens) - 1, T * batch_size):
        part = tokens[first:first + T * batch_size + 1]
        part = torch.from_numpy(np.asarray(part, np.int64)).to(device)      # (n + 1,)
        n = len(part) - 1
        padding = (0, -n % T)                                               # fills the last window
        x = F.pad(part[:-1], padding).view(-1, T)                           # (B,T)
        y = F.pad(part[1:], padding, value=-1).view(-1, T)                  # -1 counts for nothing
        _, loss = model(x, y)
        total += loss.item() * n
    return total


def token_arrays(path, tokenizer):
    """The token arrays of a text file, a shard, or the validation shards of a data folder."""
    if os.path.exists(os.path.join(path, CHECKPOINTS[0])):
        raise UserError(f"{path}: a checkpoint; only the first folder is one")
    shards = []
    if os.path.isdir(path):
        for shard in read_meta(path, tokenizer)['val']['shards']:
            shards.append(os.path.join(path, shard['name']))
    elif path.endswith('.bin'):
        shards.append(path)

    for shard in shards:
        count_tokens(shard, tokenizer.n_vocab)  # UserError for a token that the model has not
    if shards:
        return [open_shard(shard) for shard in shards]
    return [read_text(path, tokenizer)]


def read_text(path, tokenizer):
    """The tokens of a text file, as a document: after an end-of-text token."""
    try:
        with open(path, 'rb') as f:
            text = f.read()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); "
                        "prepare_data.py makes data sets") from None
    tokens = encode(tokenizer, text)[:-1]       # without the end-of-text behind it
    return np.append(tokens.dtype.type(tokenizer.eot_token), tokens)


def bytes_of_tokens(tokenizer):
    """How many bytes of text each token stands for, (n_vocab,); 0 for end-of-text."""
    length = np.zeros(tokenizer.n_vocab, np.int64)
    for token in range(tokenizer.n_vocab):
        if token != tokenizer.eot_token:
            length[token] = len(tokenizer.decode_single_token_bytes(token))
    return length


def evaluate_text(model, tokenizer, path, s):
    """
    (tokens predicted, nats per token, nats per byte) of a text. End-of-text tokens count as tokens
    of no bytes.
    """
    length = bytes_of_tokens(tokenizer)
    total = 0.0
    count = 0
    size = 0
    for tokens in token_arrays(path, tokenizer):
        if s.tokens is not None:
            tokens = tokens[:s.tokens - count]
        if len(tokens) < 2:
            continue
        total += nats(model, tokens, s.batch_size)
        count += len(tokens) - 1
        size += int(length[tokens[1:]].sum())
    if size == 0:
        raise UserError(f"{path}: no text in it")
    if not math.isfinite(total):
        raise UserError(f"{path}: the loss is not finite; try --dtype=float32")
    return count, total / count, total / size


# ---- sampled functions ---------------------------------------------------------------------------

def sample_functions(model, tokenizer, s):
    """Texts of s.functions samples that go on from "def "."""
    prompt = tokenizer.encode_ordinary('\n\ndef ')[-model.config.block_size:]
    eot = tokenizer.eot_token
    texts = []
    while len(texts) < s.functions:
        n = min(s.batch_size, s.functions - len(texts))
        rows = model.generate([prompt] * n, s.max_new_tokens, temperature=s.temperature,
                              seed=s.seed + len(texts), stop_token=eot)
        for row in rows:
            new = [token for token in row[len(prompt):].tolist() if token != eot]
            texts.append('def ' + tokenizer.decode(new))
    return texts


def parses(text):
    """
    Whether `text`, which starts with "def ", goes on to the end of this function, and Python can
    read it up to there.
    """
    lines = text.split('\n')
    n = count_lines_of_function(lines)
    if n is None:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')     # about strings such as "\d"
            ast.parse('\n'.join(lines[:n]))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def count_lines_of_function(lines):
    """How many lines it has: up to the next that is not indented; None if there is no such line."""
    for i in range(1, len(lines)):
        start = lines[i][:1]
        if start and not start.isspace():
            return i
    return None


# ---- tasks ---------------------------------------------------------------------------------------

@torch.inference_mode()
def log_likelihoods(model, pairs, batch_size):
    """
    For pairs[i] = (context, answer), lists of tokens, yields (i, sum of log p of the answer,
    whether each of its tokens was the likeliest), the longest first. A context that is too long
    loses its beginning. UserError if an answer is too long.
    """
    T = model.config.block_size
    device = model.wte.weight.device
    lengths = [len(context) + len(answer) for context, answer in pairs]
    order = sorted(range(len(pairs)), key=lengths.__getitem__, reverse=True)

    for first in range(0, len(order), batch_size):
        chosen = order[first:first + batch_size]
        rows = []
        for i in chosen:
            context, answer = pairs[i]
            rows.append(torch.tensor([*context, *answer][-T - 1:], device=device))
        inputs = [row[:-1] for row in rows]
        inputs = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True)  # (B,S), padded behind
        hidden = model.hidden(inputs)                                       # (B,S,C)

        for i, row, h in zip(chosen, rows, hidden):
            n = len(pairs[i][1])
            if n > T:
                raise UserError(f"an answer of {n} tokens does not fit into the model's context, "
                                f"block_size={T}")
            end = len(row) - 1
            yield i, *score(model.head(h[end - n:end]), row[-n:])


def score(logits, answer):
    """Logits (n,V) and tokens (n,) -> (sum of their log p, whether all are the likeliest)."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    logp = logits.to(wide).log_softmax(-1)              # (n,V)
    right = logp.gather(-1, answer[:, None])[:, 0]      # (n,)
    likeliest = right >= logp.max(-1).values
    return right.cpu().double().sum().item(), bool(likeliest.all())


def harness(model, tokenizer, batch_size):
    """The model as lm_eval wants it; UserError if lm_eval is missing."""
    try:
        from lm_eval.api.model import TemplateLM
    except ImportError:
        raise UserError("--tasks needs EleutherAI's harness: pip install lm_eval") from None

    class Harness(TemplateLM):      # in here, since its base is an optional package
        eot_token_id = tokenizer.eot_token

        def tok_encode(self, string, add_special_tokens=None, **kwargs):
            return tokenizer.encode_ordinary(string)

        def _loglikelihood_tokens(self, requests, disable_tqdm=False):
            pairs = [(context, answer) for _, context, answer in requests]
            answers = [None] * len(requests)
            for i, log_p, likeliest in log_likelihoods(model, pairs, batch_size):
                answers[i] = (log_p, likeliest)
                self.cache_hook.add_partial('loglikelihood', requests[i][0], answers[i])
            return answers

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            answers = []
            for request in requests:
                tokens = [tokenizer.eot_token, *self.tok_encode(request.args[0])]
                answers.append(-nats(model, np.array(tokens), batch_size))
            return answers

        def generate_until(self, requests, disable_tqdm=False):
            raise UserError("a task asks for generated text: only tasks made of log-likelihoods "
                            "work here")

    return Harness()


def run_tasks(model, tokenizer, s):
    """lm_eval's table for the tasks; UserError if there is no such task, or no way to its data."""
    lm = harness(model, tokenizer, s.batch_size)
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    names = s.tasks.split(',')
    manager = TaskManager(include_path=s.include_path)
    missing = [name for name in names if not manager.match_tasks([name])]
    if missing:
        raise UserError(f"--tasks={','.join(missing)}: lm_eval knows no such task; "
                        "`lm_eval ls tasks` lists them")
    try:
        results = simple_evaluate(lm, tasks=names, num_fewshot=s.num_fewshot, limit=s.limit,
                                  use_cache=s.cache, task_manager=manager)
    except OSError as error:        # the network's errors are OSErrors
        reason = ' '.join(str(error).split())[:150]
        raise UserError(f"--tasks={s.tasks}: the data could not be had ({reason})") from None
    return make_table(results)


# ---- the program ---------------------------------------------------------------------------------

def report_text(model, tokenizer, path, s):
    """Print the loss on one text."""
    start = time.perf_counter()
    count, per_token, per_byte = evaluate_text(model, tokenizer, path, s)
    seconds = time.perf_counter() - start
    print(f"{path}: {count:,} tokens, {per_token:.4f} nats per token, "
          f"perplexity {math.exp(per_token):.3f}, {per_byte / math.log(2):.4f} bits per byte, "
          f"{seconds:.1f} s")


def report_answers(model, folder, s):
    """Print the share of right answers, and write it where --json says."""
    result = answers.summary(model, folder, s.answers)
    print(answers.in_words(result, model.mechanism.halts))
    if s.json:
        with on_disk(s.json, 'written'), whole(s.json) as f:
            json.dump(result, f, indent=1)


@explained()
def main(argv):
    given, paths = read(argv, __doc__, EvaluateSettings, files=False)  # a .py file is text
    s = build(EvaluateSettings, given)
    if not paths:
        raise UserError("name a checkpoint folder, such as: "
                        "python tools/evaluate.py out/depth_attn")
    checkpoint, *texts = paths
    device = pick_device(s.device)
    model, tokenizer, settings = load_model(checkpoint, device)
    model.to(getattr(torch, s.dtype))
    override(model, s)
    if device.type == 'cpu':
        tune_cpu()

    if not (texts or s.tasks or s.functions or s.answers):
        texts = [data_dir_of(settings)]
    for path in texts:
        report_text(model, tokenizer, path, s)
    if s.answers:
        report_answers(model, data_dir_of(settings), s)
    if s.functions:
        functions = sample_functions(model, tokenizer, s)
        good = sum(parses(text) for text in functions)
        print(f"{good} of {s.functions} sampled functions are Python ({good / s.functions:.1%})")
    if s.tasks:
        print(run_tasks(model, tokenizer, s))


if __name__ == '__main__':
    run(main)
