"""
What the choices of a halting model are worth: its validation loss, on a made task its right
answers, and those of the same passes dealt out otherwise. And what any choice could be worth, of a
model that does not halt too.

    python tools/choices.py out/halting_exit
    python tools/choices.py out/loop --halting=exit
        a rule it was not trained with
    python tools/choices.py hf:models/ponder --data_dir=data/mine-neox

Each line has one halt_tau: the mean passes per token, the result with the passes that the model
chose, and the result with the same numbers of passes handed out to the tokens at random. Weights
stay as they are: what differs is who gets the passes. ('mask' weighs its thoughts by the
probabilities it chooses by: those of the thoughts that are left are scaled to a sum of 1, in all
columns.) Last comes the rank correlation of a token's passes with its loss after one pass: above 0
if they go to those that are hard, 0 if at random.

Then every token takes the same number; "corrects" is the share of tokens whose likeliest successor
becomes the right one by the last of these passes, "breaks" the share where it was right before. The
oracle knows the text: it takes for each token the number of passes, the same for all tokens, after
which the token's loss is least. No rule that only halts has a lower loss with these weights, except
by what tokens read of each other.

On a made task the text is problems, each behind two others. An answer is right if all its
characters and the end behind it are; passes are those of its characters, and dealt out among these.
--json adds a line to a file, from which tools/plot.py halting draws.
"""

import contextlib
import math
import os
import statistics
import sys
from dataclasses import dataclass
from typing import Optional

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # from anywhere
from configurator import build, check_range, only_with, read
from engine.answers import exam_of_data, read_answers
from engine.checkpoint import change_steps
from engine.files import Progress, UserError, append_line, run, table
from engine.mechanisms import halts, iterates, slots_per_token
from engine.shards import read_meta
from engine.start import is_own_data, say_other_data
from engine.trained import data_dir_of, exam_of_run, load_model, only
from engine.windows import Windows
from model import log_weight, some_rows_at_once

TOKENS_AT_ONCE = 2 ** 14    # 8 windows of 2,048
TAUS = '0.0001,0.1,0.5'
PROGRESS = Progress()       # of all that is read


@dataclass
class ChoiceSettings:
    """what to try"""
    halting: Optional[str] = None       # 'exit': tokens leave a 'loop' when sure (None: as trained)
    taus: Optional[str] = None          # values of halt_tau, as 0.1,0.5 (None: 0.0001,0.1,0.5)
    lots: int = 3                       # times that the passes are dealt out at random
    data_dir: Optional[str] = None      # whose validation set is read (None: that of its training)
    tokens: int = 8192                  # of the validation set that are read, all over it
    problems: int = 500                 # of a made task that are read
    json: Optional[str] = None          # file to add a line to, with all numbers
    seed: int = 1337                    # of the dealing
    device: Optional[str] = None        # 'cpu', 'cuda', 'mps' (None: the best there is)

    def __post_init__(self):
        check_range(self, 1, math.inf, 'lots', 'tokens', 'problems')
        check_range(self, 0, 2 ** 63 - 1, 'seed')
        try:
            right = all(0 < float(tau) <= 1 for tau in (self.taus or TAUS).split(','))
        except ValueError:
            right = False
        if not right:
            raise ValueError(f"taus={self.taus}: give numbers above 0 and up to 1, with commas "
                             "between")


# -------------------------------------------------------------------------------------------------
# A model that takes the passes it is told


class Told:
    """In front of a class of Halting: tokens take as many passes as they are told to."""
    told = None     # (B,T)

    def forward(self, gpt, x, memory):
        self.asked = 0
        return super().forward(gpt, x, memory)

    def goes_on(self, score):
        """Asked after pass 0, 1, ..; by the sweeps of Mask, of all thoughts at once."""
        if score.dim() > self.told.dim():
            return self.takes()
        self.asked += 1
        return self.asked < self.told

    def takes(self):
        """(B,T,K+1): who takes pass k."""
        return torch.arange(self.K + 1, device=self.told.device) < self.told[..., None]

    def route(self, h, is_token):
        """Mask: its router says at once how many thoughts there will be."""
        s = super().route(h, is_token)[0] * self.takes()
        s = s / s.sum(-1, keepdim=True)
        w = s.flip(-1).cumsum(-1).flip(-1)
        needed = self.takes() & is_token[..., None]
        return s, w, needed, log_weight(needed, w.log())


@contextlib.contextmanager
def told(model, passes):
    """In here a halting model takes so many passes (B,T), whatever its gates or router say."""
    mechanism, kind = model.mechanism, type(model.mechanism)
    mechanism.__class__ = type('Told', (Told, kind), {'told': passes})
    try:
        yield
    finally:
        mechanism.__class__ = kind


@some_rows_at_once
def likeliest(gpt, h):
    """The likeliest tokens (..) after hidden states (..,C)."""
    return gpt.head(h).argmax(-1)


@torch.inference_mode()
def see(model, inputs, targets, passes=None):
    """
    (losses (n,T), whether the likeliest token is the right one (n,T), passes (n,T) that were taken)
    of inputs and targets (n,T). passes: those that a halting model is told to take.
    """
    rows = max(1, TOKENS_AT_ONCE // inputs.size(1))
    losses, right, taken = [], [], []
    for i in range(0, len(inputs), rows):
        some = slice(i, i + rows)
        with told(model, passes[some]) if passes is not None else contextlib.nullcontext():
            h = model.hidden(inputs[some])
        losses.append(model.token_losses(h, targets[some]))
        right.append(likeliest(model, h) == targets[some])
        if halts(model):
            taken.append(model.mechanism.passes)
        PROGRESS(f"{min(i + rows, len(inputs))} of {len(inputs)} texts")
    return torch.cat(losses), torch.cat(right), torch.cat(taken) if taken else None


# -------------------------------------------------------------------------------------------------
# The tables


@dataclass
class Text:
    """What is read, and what of it counts."""
    inputs: torch.Tensor    # (n,T)
    targets: torch.Tensor   # (n,T), -1 where nothing counts
    answers: bool           # whether each row holds one answer, which may be right
    end: int = -1           # the token behind an answer

    @property
    def counts(self):
        return self.targets >= 0

    @property
    def shuffled(self):
        """(n,T) bool: whose passes are counted, and dealt out."""
        return self.counts & (self.targets != self.end)

    def result(self, losses, right):
        """Of (n,T) each: the share of right answers, or the mean loss."""
        if self.answers:
            return (right | ~self.counts).all(1).float().mean().item()
        return losses[self.counts].mean().item()

    def words(self, result):
        return f"{result:.1%}" if self.answers else f"{result:.4f}"


def open_text(model, tokenizer, settings, s):
    """The Text of the validation set of --data_dir, or else of the model's training."""
    device = model.wte.weight.device
    if s.data_dir is None:
        exam = exam_of_run(settings, s.problems)
    else:
        meta = read_meta(s.data_dir, tokenizer)     # UserError if its tokens are others
        if is_own_data(s.data_dir, settings):
            say_other_data(s.data_dir, meta, settings, splits=('val',))
        exam = exam_of_data(s.data_dir, s.problems)
    if exam is not None:
        inputs, targets = read_answers(model, exam, s.problems)
        return Text(inputs.to(device), targets.to(device), True, exam['eot'])
    data_dir = s.data_dir or data_dir_of(settings)
    meta = read_meta(data_dir, tokenizer)
    windows = Windows(data_dir, 'val', meta, model.config.block_size)
    chosen = windows.spread(math.ceil(s.tokens / model.config.block_size))
    return Text(*windows.get(chosen, device), False)


def each_tau(model, text, s, first):
    """
    For each halt_tau: {'tau', 'passes', 'chosen', 'random': [of each lot], 'rank'}. first (n,T):
    the losses after one pass.
    """
    draw = torch.Generator().manual_seed(s.seed)
    for tau in map(float, (s.taus or TAUS).split(',')):
        model.config.halt_tau = tau
        *_, passes = see(model, text.inputs, text.targets)
        # told for chosen and lots alike, or 'mask' would differ by its scale
        chosen = text.result(*see(model, text.inputs, text.targets, passes)[:2])
        lots = []
        for _ in range(s.lots):
            order = torch.randperm(int(text.shuffled.sum()), generator=draw).to(passes.device)
            dealt = passes.clone()
            dealt[text.shuffled] = passes[text.shuffled][order]
            lots.append(text.result(*see(model, text.inputs, text.targets, dealt)[:2]))
        taken = passes[text.shuffled].float()
        yield {'tau': tau, 'passes': taken.mean().item(), 'chosen': chosen, 'random': lots,
               'rank': rank_correlation(taken, first[text.shuffled])}


def rank_correlation(a, b):
    """Spearman's, of values (n,) each; 0 if all of one are equal."""
    places = torch.stack((ranks(a.cpu()), ranks(b.cpu())))      # MPS has no float64
    return torch.corrcoef(places)[0, 1].nan_to_num().item()


def ranks(values):
    """Of values (n,): places in their order; equal ones share the mean of theirs."""
    _, index, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[index]


def print_taus(found, text):
    rows = []
    for row in found:
        lots = row['random']
        rows.append([f"{row['tau']:g}", f"{row['passes']:.2f}", text.words(row['chosen']),
                     text.words(statistics.mean(lots)),
                     f"{text.words(min(lots))} to {text.words(max(lots))}", f"{row['rank']:+.2f}"])
    header = ['halt_tau', 'passes', 'chosen', 'at random', 'lowest to highest', 'rank']
    print(table(header, rows) + '\n', flush=True)


def after_each_pass(model, text):
    """
    When all tokens take 1, 2, .. K + 1 passes: losses (K+1,n,T), and whether the right token is the
    likeliest (K+1,n,T).
    """
    K = model.mechanism.K
    losses, right = [], []
    for n in range(1, K + 2):
        passes = None
        if halts(model):
            passes = torch.full_like(text.inputs, n)
        else:
            change_steps(model, n - 1)
        loss, hit, _ = see(model, text.inputs, text.targets, passes)
        losses.append(loss)
        right.append(hit)
    return torch.stack(losses), torch.stack(right)


def everyone(losses, right, text):
    """
    Of after_each_pass: {'passes', 'result', 'loss', 'corrects', 'breaks'} of each number of passes,
    both 0 for the first; and the first three of the oracle.
    """
    rows = []
    for n in range(1, len(losses) + 1):
        now, before = right[n - 1][text.counts], right[max(0, n - 2)][text.counts]
        rows.append({
            'passes': n,
            'result': text.result(losses[n - 1], right[n - 1]),
            'loss': losses[n - 1][text.counts].mean().item(),
            'corrects': (now & ~before).float().mean().item(),
            'breaks': (before & ~now).float().mean().item(),
        })
    least = losses.min(0)
    chosen = right.gather(0, least.indices[None])[0]
    oracle = {
        'passes': least.indices[text.shuffled].float().mean().item() + 1,
        'result': text.result(least.values, chosen),
        'loss': least.values[text.counts].mean().item(),
    }
    return rows, oracle


def print_everyone(rows, oracle, text):
    header = ['passes', 'loss', 'right answers', 'corrects', 'breaks']
    cells = []
    for row in [*rows, oracle]:
        name = f"oracle {row['passes']:.2f}" if row is oracle else f"everyone {row['passes']}"
        shares = [f"{row[key]:.1%}" if row['passes'] != 1 and key in row else ''
                  for key in ('corrects', 'breaks')]
        cells.append([name, f"{row['loss']:.4f}", text.words(row['result']), *shares])
    if not text.answers:    # where the result is the loss
        header.pop(2)
        for row in cells:
            row.pop(2)
    print(table(header, cells))


def main(argv):
    given, folders = read(argv, __doc__, ChoiceSettings)
    s = build(ChoiceSettings, given)
    folder = only(folders, "python tools/choices.py out/halting_router")
    model, tokenizer, settings = load_model(folder, s.device, halting=s.halting)
    if s.json is not None:
        os.makedirs(os.path.dirname(s.json) or '.', exist_ok=True)
        open(s.json, 'a').close()   # an error now, and not when all is computed
    config = model.config
    if slots_per_token(model) == 1:
        raise UserError(f"ponder={config.ponder!r}: this model takes one pass for each token; name "
                        "one with several")
    if s.taus is not None and not halts(model):
        raise UserError("taus: this model has halting='none'; leave the setting out, or for a loop "
                        "add --halting=exit")
    only_with('a model that halts', halts(model), given, 'lots', 'seed')
    text = open_text(model, tokenizer, settings, s)
    only_with('a text', not text.answers, given, 'tokens')
    only_with('a made task', text.answers, given, 'problems')
    what = f"right answers to {len(text.inputs):,} problems" if text.answers else "nats per token"
    print(f"{what}; {int(text.counts.sum()):,} validation tokens\n", flush=True)
    if text.answers and iterates(model):
        print(f"{config.ponder}: answers, too, are read by iteration here; in tools/evaluate.py "
              "--answers the model writes them\n", flush=True)
    losses, right = after_each_pass(model, text)
    found = []
    if halts(model):
        found = list(each_tau(model, text, s, losses[0]))
        print_taus(found, text)
    rows, oracle = everyone(losses, right, text)
    print_everyone(rows, oracle, text)
    if s.json is not None:
        record = {'checkpoint': folder, 'halting': config.halting,
                  'data': s.data_dir or settings['data_dir'],
                  'answers': text.answers, 'taus': found, 'everyone': rows, 'oracle': oracle}
        append_line(s.json, record)


if __name__ == '__main__':
    run(main)
