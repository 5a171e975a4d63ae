"""
Measure a checkpoint: right answers, the loss on any text, the papers' tasks.

    python tools/evaluate.py out/loop --answers=1000
        right answers to problems of the made task that it was trained on, or of another task's
        data folder that is named
    python tools/evaluate.py out/loop --answers=500 --ponder_steps=0,1,2,3,6
        the same weights with other numbers of passes
    python tools/evaluate.py out/loop --answers=500 --halting=exit --halt_tau=0.5,0.1,0.01
        tokens leave as soon as the model is sure, with three ideas of what sure is
    python tools/evaluate.py out/depth_attn notes.txt data/mine
        the loss on texts, token shards (.bin) or data folders; without any, on the validation set
        of its data, or of a made task 1,000 answers
    python tools/evaluate.py out/depth_attn --tasks=lambada_openai,piqa --num_fewshot=0
        tasks of the papers

Answers are written greedily, through the cache; each question follows two problems of the
validation set and their answers. --tasks needs EleutherAI's harness, pip install lm_eval, which
fetches the tasks' data; those made of log-likelihoods work (LAMBADA, PIQA, SciQ, HellaSwag, ARC).
"""

import codecs
import math
import os
import sys
from dataclasses import dataclass
from typing import Optional

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # from anywhere
from configurator import build, check_range, only_with, read
from engine.answers import exam_of_data, summary
from engine.checkpoint import CHECKPOINTS
from engine.cpu import tune_cpu
from engine.files import Progress, UserError, run, table
from engine.hardware import explained
from engine.mechanisms import halts, iterates
from engine.score import read_tokens, token_nats
from engine.shards import MAGIC, count_tokens, encode, open_shard, read_meta, token_lengths
from engine.start import is_own_data, say_other_data
from engine.tasks import TASKS, in_answers, task_of
from engine.trained import data_dir_of, exam_of_run, load_model
from prepare_data import is_jsonl, is_utf8
from sample import SampleSettings, override, warn_of_text

PROGRESS = Progress()   # of all texts together


@dataclass
class EvaluateSettings:
    """what to measure"""
    answers: int = 0                    # problems of a made task to answer
    tokens: Optional[int] = None        # read only so many tokens of each text (None: all)
    ponder_steps: Optional[str] = None  # one or several, as 0,1,2,3 (None: as trained)
    halting: Optional[str] = None       # 'exit': tokens leave a 'loop' when sure (None: as trained)
    halt_tau: Optional[str] = None      # with halting: one or several; larger stops earlier
    exact: bool = False                 # latent, mask, feedback: read token by token
    tasks: Optional[str] = None         # names of lm_eval tasks, with commas between
    num_fewshot: Optional[int] = None   # examples before each question (None: what the task says)
    batch_size: int = 16                # windows of a text computed together
    device: Optional[str] = None        # 'cpu', 'cuda', 'mps' (None: the best there is)
    dtype: str = 'float32'              # 'bfloat16' is faster on some hardware, a little less exact

    def __post_init__(self):
        check_range(self, 0, math.inf, 'answers')
        check_range(self, 1, math.inf, 'batch_size')
        check_range(self, 2, math.inf, 'tokens')
        if self.ponder_steps and self.halt_tau:
            raise ValueError("ponder_steps and halt_tau: vary one of them at a time")
        SampleSettings(dtype=self.dtype)    # ValueError for any but the three there


def each_setting(model, s):
    """
    Yields (name of a setting, its value) for each value asked for, when the model has it; else once
    what the model was trained with.
    """
    stops = halts(model)
    name = 'halt_tau' if s.halt_tau or (stops and not s.ponder_steps) else 'ponder_steps'
    asked = getattr(s, name)
    if asked is None:
        yield name, model.config.halt_tau if stops else model.mechanism.K
        return
    try:
        values = [float(word) if name == 'halt_tau' else int(word) for word in asked.split(',')]
    except ValueError:
        raise UserError(f"{name}={asked}: give numbers, with commas between") from None
    settings = [build(SampleSettings, {name: value}) for value in values]
    for setting in settings:    # what is wrong shows before anything is computed
        override(model, setting)
    for value, setting in zip(values, settings):
        override(model, setting)
        yield name, value


# ---- loss on texts -------------------------------------------------------------------------------

def nats(model, tokens, batch_size, counts=None, exact=False, taken=None):
    """
    Total of -log p in nats of all tokens (n,) but the first, each given those before it in its
    window of block_size. counts: which of them count, (n - 1,) bool (None: all). exact: read token
    by token. taken: a list that gets the passes of the tokens that these are predicted from, of a
    model that halts and is not read `exact`.
    """
    T = min(model.config.block_size, max(1, len(tokens) - 1))   # no longer than the text
    total = 0.0
    for first in range(0, len(tokens) - 1, T * batch_size):
        part = torch.from_numpy(tokens[first:first + T * batch_size + 1].astype(np.int64))
        padded = F.pad(part, (0, -(len(part) - 1) % T), value=-1)   # -1 counts for nothing
        rows = padded.unfold(0, T + 1, T)   # each begins with the last token of the one before
        losses = token_nats(model, rows, batch_size, exact).cpu().double().flatten()[:len(part) - 1]
        chosen = slice(None)
        if counts is not None:
            chosen = torch.from_numpy(counts[first:first + len(losses)])
        if taken is not None:
            taken.append(model.mechanism.passes.flatten()[:len(losses)].cpu()[chosen])
        losses = losses[chosen]
        total += losses.sum().item()
        PROGRESS(f"{first + len(part):,} of {len(tokens):,} tokens")
    return total


def answers_in(tokens, T, task, eot):
    """`counts` for nats: the characters of answers, as in training."""
    inputs = np.pad(tokens[:-1], (0, -(len(tokens) - 1) % T)).reshape(-1, T)
    return in_answers(inputs, task, eot).ravel()[:len(tokens) - 1]


def is_shard(path):
    """By its name, or by what it begins with: read as a text, its bytes would be scored."""
    return path.endswith('.bin') or (
        os.path.isfile(path) and np.fromfile(path, np.int32, 1).tolist() == [MAGIC])


def data_folder(path):
    """The data folder that `path` is, or that has this shard; None of a text, or a shard alone."""
    if os.path.isdir(path):
        return path
    folder = os.path.dirname(path) or '.'
    described = is_shard(path) and os.path.exists(os.path.join(folder, 'meta.json'))
    return folder if described else None


def token_arrays(path, tokenizer):
    """The token arrays of a text file, a shard, or the validation shards of a data folder."""
    if os.path.exists(os.path.join(path, CHECKPOINTS[0])):
        raise UserError(f"{path}: a checkpoint; only the first folder is one")
    folder = data_folder(path)
    meta = folder and read_meta(folder, tokenizer)  # UserError for the tokens of another tokenizer
    shards = []
    if folder == path:
        for shard in meta['val']['shards']:
            shards.append((os.path.join(path, shard['name']), shard['tokens']))
    elif is_shard(path):
        shards.append((path, None))
        if folder is None:
            print(f"warning: {path}: a shard without its folder's meta.json: its tokens are taken "
                  f"for {tokenizer.name}'s, and all of them count", file=sys.stderr)
    elif is_jsonl(path) or path.lower().endswith('.json'):
        raise UserError(f"{path}: records or JSON, and this reads text: write their texts to a "
                        ".txt file, or prepare records (prepare_data.py) and name the folder")

    for shard, _ in shards:
        count_tokens(shard, tokenizer.n_vocab)  # UserError for a token that the model has not
    return [open_shard(shard, tokens) for shard, tokens in shards] or [read_text(path, tokenizer)]


def read_text(path, tokenizer):
    """The tokens of a text file, as a document: after an end-of-text token."""
    with open(path, 'rb') as f:
        text = f.read().removeprefix(codecs.BOM_UTF8)   # as prepare_data.py reads a text
    warn_of_text(path, text)
    if tokenizer.name != 'byte' and not is_utf8(text):
        print(f"warning: {path} is no UTF-8: where it is not, U+FFFD is read", file=sys.stderr)
    tokens = encode(tokenizer, text)
    return np.roll(tokens, 1)       # the end-of-text that is behind it comes before


def size_of_text(path):
    """Bytes of a text file, without a byte order mark, which is no text."""
    with open(path, 'rb') as f:
        mark = f.read(3) == codecs.BOM_UTF8
    return os.path.getsize(path) - 3 * mark


def about(path):
    """(bytes of text in a file, data folder or, not known: None, a shard; its made task or None)"""
    folder = data_folder(path)
    if folder is None:
        known = os.path.isfile(path) and not is_shard(path)     # not of a pipe
        return size_of_text(path) if known else None, None
    meta = read_meta(folder)
    made = task_of(meta)
    return meta['val']['bytes'] if folder == path else None, made and made[0]


def evaluate_text(model, tokenizer, path, arrays, s):
    """
    (tokens that count, nats per token, nats per byte, passes per token) of a text, from its token
    arrays. End-of-text tokens count as tokens of no bytes. Bytes are the text's own, in proportion:
    a tokenizer may have read others (U+FFFD, NFC). None for what is not known, and for passes
    without halting.
    """
    taken = [] if halts(model) and not s.exact else None
    text_bytes, task = about(path)
    lengths = token_lengths(tokenizer).astype(np.int16)
    total, count, predicted = 0.0, 0, 0
    size, whole = 0, 0      # bytes of the tokens that are predicted, and of all
    for tokens in map(np.array, arrays):    # copied: a shard is a map of a file
        whole += int(lengths[tokens].sum(dtype=np.int64))
        if s.tokens is not None:
            tokens = tokens[:s.tokens - predicted]
        if len(tokens) < 2:
            continue
        counts = np.full(len(tokens) - 1, True)
        if task is not None:
            counts = answers_in(tokens, model.config.block_size, task, tokenizer.eot_token)
        total += nats(model, tokens, s.batch_size, counts=counts, exact=s.exact, taken=taken)
        count += int(counts.sum())
        predicted += len(tokens) - 1
        size += int(lengths[tokens[1:]].sum(dtype=np.int64))
    if size == 0 or count == 0:
        raise UserError(f"{path}: no text in it")
    if not math.isfinite(total):
        raise UserError(f"{path}: the loss is not finite; try --dtype=float32")
    per_byte = total / count    # a character of an answer is a byte, and its end is one more
    if task is None:
        text_bytes = whole if tokenizer.name == 'byte' else text_bytes
        per_byte = text_bytes and total * whole / size / text_bytes
    passes = torch.cat(taken).float().mean().item() if taken else None
    return count, total / count, per_byte, passes


def print_texts(model, tokenizer, paths, s):
    """A table of the loss on each text; if it is stopped, of those that are done."""
    for path in paths:
        if not os.path.exists(path):
            raise UserError(f"{path}: there is no such file or folder")
    texts = {path: token_arrays(path, tokenizer) for path in paths}
    for path in filter(lambda path: about(path)[1], paths):
        print(f"{path} is a made task: only the characters of answers count, as in training")
    rows = []
    try:
        for name, value in each_setting(model, s):
            for path, arrays in texts.items():
                count, per_token, per_byte, passes = evaluate_text(model, tokenizer, path, arrays,
                                                                   s)
                bits = '?' if per_byte is None else f'{per_byte / math.log(2):.4f}'
                rows.append([path, f'{value:g}', f'{count:,}', f'{per_token:.4f}',
                             f'{math.exp(per_token):.3f}', bits])
                if passes is not None:
                    rows[-1].append(f'{passes:.2f}')
    finally:
        if any('?' in row for row in rows):
            print("?: how many bytes of text are in a shard, or a pipe, alone is not known; name "
                  "the folder, or a file")
        if rows:
            header = ['text', name, 'tokens', 'nats per token', 'perplexity', 'bits per byte',
                      'passes per token']
            print(table(header[:len(rows[0])], rows))   # passes with halting only


# ---- right answers ------------------------------------------------------------------------------

def exams_of(texts, settings, count):
    """(its folder, what to ask) of each made task among `texts`; without one, (None, the run's)."""
    folders = [folder for folder in map(data_folder, texts) if folder]
    tasks = [folder for folder in folders if task_of(read_meta(folder))]
    return ([(folder, exam_of_data(folder, count)) for folder in tasks]
            or [(None, exam_of_run(settings, count))])


def print_answers(model, exam, s, folder):
    """
    A line for each setting, and with halting one of its passes; if it is stopped, for those that
    are done. folder: whose problems they are, None if they are of the run's own data.
    """
    if exam is None:
        raise UserError("this model was trained on a text, and --answers needs a made task: name "
                        "its folder, such as data/addition")
    results = {}
    try:
        for name, value in each_setting(model, s):
            results[value] = summary(model, exam, s.answers, s.exact)
    finally:
        if results:
            print_results(model, name, results, s.answers, folder)


def print_results(model, name, results, asked, folder):
    """print_answers' tables. results: {a value of the setting `name`: its summary}."""
    first = next(iter(results.values()))
    task = TASKS[first['task']]
    levels = [row[task.unit] for row in first['by_difficulty']]
    rows = []
    for value, found in results.items():
        shares = [found['right'], *(row['right'] for row in found['by_difficulty'])]
        rows.append([f'{value:g}', f"{found['passes']:.2f}", *(f'{p:.1%}' for p in shares)])
    of_what = f"{first['task']} of {folder}" if folder else first['task']
    print(f"{of_what}: right answers to {first['problems']:,} problems, all and by {task.unit}; "
          "passes per character of an answer\n")
    if first['problems'] < asked:
        print("Each is asked once: the validation set has no more that differ.\n")
    print(table([name, 'passes', 'right', *map(str, levels)], rows))

    if halts(model):
        rows = []
        for value, found in results.items():
            passes = [f"{row['passes']:.2f}" for row in found['by_difficulty']]
            rows.append([f'{value:g}', *passes])
        print(f"\npasses by {task.unit}\n\n{table([name, *map(str, levels)], rows)}")


# ---- lm_eval's tasks -----------------------------------------------------------------------------

@torch.inference_mode()
def log_likelihoods(model, pairs, batch_size, exact=False):
    """
    For pairs[i] = (context, answer), lists of tokens, yields (i, sum of log p of the answer,
    whether each of its tokens was the likeliest), the longest first. A context that is too long
    loses its beginning. exact: as in nats. UserError if an answer is too long.
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
        hidden = read_tokens(model, inputs, exact)                          # (B,S,C)

        for i, row, h in zip(chosen, rows, hidden):
            n = len(pairs[i][1])
            if n > T:
                raise UserError(f"an answer of {n} tokens does not fit into the model's context, "
                                f"block_size={T}")
            end = len(row) - 1
            logits = model.head(h[end - n:end])                             # (n,V)
            logp = logits.log_softmax(-1, torch.float32)
            right = logp.gather(-1, row[len(row) - n:, None])[:, 0]         # (n,)
            yield i, right.sum().item(), bool((right >= logp.max(-1).values).all())


def harness(model, tokenizer, batch_size, exact):
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
            T = model.config.block_size
            cut = sum(len(context) + len(answer) > T + 1 for context, answer in pairs)
            if cut:
                print(f"warning: {cut:,} of {len(pairs):,} questions with an answer are longer "
                      f"than the model's context, {T} tokens, and lost their beginning",
                      file=sys.stderr)
            progress = Progress()
            for done, (i, *answer) in enumerate(log_likelihoods(model, pairs, batch_size, exact)):
                answers[i] = tuple(answer)
                progress(f"{done:,} of {len(pairs):,} questions")
            return answers

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            answers = []
            for request in requests:
                tokens = [tokenizer.eot_token, *self.tok_encode(request.args[0])]
                answers.append(-nats(model, np.array(tokens), batch_size, exact=exact))
            return answers

        def generate_until(self, requests, disable_tqdm=False):
            raise UserError("a task asks for generated text: only tasks made of log-likelihoods "
                            "work here")

    return Harness()


def print_tasks(model, tokenizer, s):
    """lm_eval's table for the tasks; UserError if there is no such task, or no way to its data."""
    lm = harness(model, tokenizer, s.batch_size, s.exact)
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    names = s.tasks.split(',')
    manager = TaskManager()
    missing = [name for name in names if not manager.match_tasks([name])]
    if missing:
        raise UserError(f"--tasks={','.join(missing)}: lm_eval knows no such task; "
                        "`lm_eval ls tasks` lists them")
    for name, value in each_setting(model, s):
        try:
            results = simple_evaluate(lm, tasks=names, num_fewshot=s.num_fewshot,
                                      task_manager=manager)
        except OSError as error:        # the network's errors are OSErrors
            reason = ' '.join(str(error).split())[:150]
            raise UserError(f"--tasks={s.tasks}: the data could not be had ({reason})") from None
        print(f"{name}={value}\n{make_table(results)}")


# ---- the program ---------------------------------------------------------------------------------

@explained()
def main(argv):
    given, paths = read(argv, __doc__, EvaluateSettings, files=False)  # a .py file is text
    s = build(EvaluateSettings, given)
    if not paths:
        raise UserError("name a checkpoint folder, such as: "
                        "python tools/evaluate.py out/depth_attn")
    checkpoint, *texts = paths
    model, tokenizer, settings = load_model(checkpoint, s.device, s.dtype, s.halting)
    if model.wte.weight.device.type == 'cpu':
        tune_cpu()

    if not (texts or s.tasks or s.answers):
        if exam_of_run(settings) and s.tokens is None:
            s.answers = 1000
        else:
            texts = [data_dir_of(settings)]
    only_with('texts', texts, given, 'tokens')
    only_with('texts and --tasks', texts or s.tasks, given, 'batch_size')
    only_with('--tasks', s.tasks, given, 'num_fewshot')
    only_with('latent, mask and feedback', iterates(model), given, 'exact')
    for folder in dict.fromkeys(map(data_folder, texts)):
        if folder and is_own_data(folder, settings):
            say_other_data(folder, read_meta(folder), settings, splits=('val',))
    if iterates(model) and model.mechanism.K > 0:
        how = "token by token" if s.exact else "by iteration (--exact=True: token by token)"
        print(f"{model.config.ponder}: texts and prompts are read {how}")
    if texts:
        print_texts(model, tokenizer, texts, s)
    if s.answers:
        for folder, exam in exams_of(texts, settings, s.answers):
            print_answers(model, exam, s, folder)
    if s.tasks:
        print_tasks(model, tokenizer, s)


if __name__ == '__main__':
    run(main)
