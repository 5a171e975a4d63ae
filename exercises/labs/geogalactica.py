"""
Lab: take a finished model to a new domain: what replay of its old text saves, and what fine-tuning
does to both.

    python exercises/labs/geogalactica.py out/lab
        about 4 minutes on a free CPU core
    python exercises/labs/geogalactica.py out/lab --peak=1
        at the rate of pretraining: is more forgotten?
    python exercises/labs/geogalactica.py out/lab --loss_on_answers=False
        fine-tuned on questions and answers alike

GeoGalactica (arXiv 2401.00434) made a model of geoscience out of Galactica-30B: it went on
pretraining with 80 % papers of the new field and 20 % text like the old in every batch, then
fine-tuned on instruction pairs made from tables of facts. There is no new architecture; the paper
is the recipe, and this lab is the recipe on a checkpoint of yours.

    further pretraining   (4.1)  a batch holds n_new rows of the new text and n_old of the old,
                                 (1 - replay) B and replay B
                          (5.1)  eta_i = eta min(1, (i + 1) / w)
                                 eta = 0.1 x the base's peak, w = 100/7324 of the steps
    fine-tuning           (5.2)  L = - sum_t m_t log p(x_t+1 | x_1 .. x_t) / sum_t m_t
                                 m_t = 1 where x_t+1 is a token of the answer or the end-of-text
                                 behind it, else 0
    forgetting                   the loss on the old text after minus before
    gain                         the loss on the new text before minus after

The old text is what the checkpoint was trained on. The new one is minerals.py: minerals that do not
exist, made from the seed, so that the checkpoint cannot know a single fact. Its facts are of three
kinds: told by the texts and asked in fine-tuning; told but held out of fine-tuning; never told.
Each is asked at the end, and an answer counts if it is exact, end-of-text included. The last kind
is the control: no model can know these, so what is right there is luck. A second control is
fine-tuned without having read the texts, a third reads them without replay.

How this differs from the paper: byte tokens and made-up facts instead of 65 B tokens of papers;
replay is the base's own text, where the paper's arXiv and code are only like it; one fine-tuning
stage, not a general one (Alpaca) and then one of the field; the rate stays constant after its
warm-up, as section 5.1 says (appendix E: linear decay); no dropout. Authors' code: there is none
for training; the fine-tuning follows K2, whose script learns questions too unless told not to, and
the paper does not say which was used, so --loss_on_answers is a choice of this lab. The run without
replay reads as many tokens in all: 25 % more new ones.

What came out (a plain model of 0.9M parameters, 600 steps, 1.88 nats per byte; the second of two
seeds, their checkpoints too, in brackets; one core of an Intel Xeon at 2.5 GHz, 3 min 40 s of
computing, 2026-11-21, when train.py read its windows in another order):

    stage                    old text      new text      asked         held out      never told
    checkpoint               1.85 (1.83)   2.93 (3.05)   0    (0)      0    (0)      0    (0)
    no replay                5.32 (5.50)   0.15 (0.16)   0    (0)      0    (0)      0    (0)
    replay                   1.94 (1.92)   0.19 (0.19)   0    (0)      0    (0)      0    (0)
    replay, fine-tuned       2.45 (2.65)   0.77 (1.14)   1.00 (1.00)   0.31 (0.12)   0.12 (0.25)

This table leaves out what the program prints besides: the rows "untaught, fine-tuned" and "no
replay, fine-tuned", and the column "recited", which counts held-out facts that are completed in the
words of the texts.

Replay takes away 97 % of the forgetting for 0.03 nats of the new text; it is the very text the
checkpoint knows, which flatters it. At the full rate (--peak=1, one seed) 0.25 nats are forgotten
in spite of replay, not 0.09, and 0.02 more are gained.

What it does not show: that fine-tuning brings out what was read. With replay, all held-out facts
can be recited in the words of the texts before it and few after it; asked, the two models have 7 of
32 right, and 6 of the 32 they cannot know. The 32 facts asked in training are learned by heart.
Answers in whole sentences did not help (0 and 1 of 16: right mineral, but a key that had been asked
of it, in the ten looked at). GeoGalactica reports 46.6 against its base's 41.2 in an exam of the
field, and the general ability kept; here fine-tuning forgets too.
"""
import copy
import math
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from common import fit, joined, load_plain, loss_on, own_text, start, text_loss, windows
from configurator import check_range
from engine.files import UserError, run, table
from engine.generate import generate
from minerals import completion, documents, question, world


@dataclass
class Settings:
    """what is learned, and how; the rate is that of both trainings, as in the paper"""
    minerals: int = 16                  # how many; each has 4 facts
    steps: int = 1000                   # of further pretraining
    batch: int = 5                      # rows of text per step
    replay: float = 0.2                 # share of old text among them; batch * replay must be whole
    peak: float = 0.1                   # rate after the warm-up, as a share of the checkpoint's own
    sft_steps: int = 60                 # of fine-tuning, 16 pairs each
    loss_on_answers: bool = True        # False: fine-tuning learns to write the questions too
    seed: int = 1337                    # the minerals, the texts, the order of all batches

    def __post_init__(self):
        check_range(self, 1, math.inf, 'steps', 'batch', 'sft_steps')
        check_range(self, 2, 200, 'minerals')
        check_range(self, 0, 2 ** 31 - 1, 'seed')
        n_old = self.batch * self.replay
        if not 0 < n_old < self.batch or abs(n_old - round(n_old)) > 1e-9:
            raise ValueError(f"batch={self.batch} times replay={self.replay} must be a whole "
                             "number of rows, and not all of them: change one")


# ---- further pretraining -------------------------------------------------------------------------

def visits(n, count, steps, draw):
    """Which of n rows each step reads, (steps, count): all of them before any comes again."""
    rounds = max(1, math.ceil(steps * count / n))
    order = torch.cat([torch.randperm(n, generator=draw) for _ in range(rounds)])
    return order[:steps * count].view(steps, count)


def pretrain_further(name, model, sources, counts, peak, s):
    """
    Train on counts[j] rows of sources[j] (rows, T + 1) in every batch: the mix is exact, not drawn
    (section 4.1).
    """
    draw = torch.Generator().manual_seed(s.seed)
    parts = []
    for rows, count in zip(sources, counts):
        parts.append(rows[visits(len(rows), count, s.steps, draw)])         # (steps, .., T + 1)
    batches = torch.cat(parts, dim=1)                                       # (steps, B, T + 1)
    fit(name, model.parameters(), lambda i: text_loss(model, batches[i]), peak, s.steps,
        warmup=100 / 7324)


# ---- fine-tuning ---------------------------------------------------------------------------------

def instruct(pairs, loss_on_answers=True):
    """
    Pairs (question tokens, answer tokens) -> inputs x and targets y, each (pairs, longest - 1).
    y[t] = x[t + 1] where that is part of the answer, and -1, which the loss ignores, on the
    question and on padding. So the first position that is trained is the question's last: it
    predicts how the answer begins.
    """
    x, y = [], []
    for asked, answer in pairs:
        x.append(torch.tensor(asked + answer))
        ignored = [-1] * len(asked)
        y.append(torch.tensor((ignored if loss_on_answers else asked) + answer))
    x = pad_sequence(x, batch_first=True)
    y = pad_sequence(y, batch_first=True, padding_value=-1)
    return x[:, :-1], y[:, 1:]


def fine_tune(name, model, pairs, peak, s):
    """Supervised fine-tuning on 16 pairs a step, with the paper's AdamW (section 5.2)."""
    x, y = instruct(pairs, s.loss_on_answers)
    draw = torch.Generator().manual_seed(s.seed)
    order = visits(len(x), 16, s.sft_steps, draw)                           # (steps, 16)
    fit(name, model.parameters(), lambda i: model(x[order[i]], y[order[i]])[1], peak, s.sft_steps,
        betas=(0.9, 0.999), weight_decay=0.05)


def exact_match(model, pairs):
    """Share of the pairs (question tokens, answer tokens) whose answer the model says, greedily."""
    longest = max(len(answer) for _, answer in pairs)
    said = generate(model, [asked for asked, _ in pairs], longest, temperature=0)
    right = 0
    for row, (asked, answer) in zip(said, pairs):
        right += row[len(asked):][:len(answer)].tolist() == answer
    return right / len(pairs)


# ---- the questions -------------------------------------------------------------------------------

def in_tokens(pairs, tokenizer, *ending):
    """Pairs of texts as pairs of lists of tokens; `ending` follows the second."""
    encode = tokenizer.encode_ordinary
    return [(encode(first), [*encode(second), *ending]) for first, second in pairs]


def asked_about(facts, forms, tokenizer):
    """The facts as pairs (question tokens, answer tokens and end-of-text), in these forms."""
    pairs = [question(fact, form) for fact in facts for form in forms]
    return in_tokens(pairs, tokenizer, tokenizer.eot_token)


# ---- the experiment ------------------------------------------------------------------------------

def experiment(model, tokenizer, base, s):
    """
    All runs from one checkpoint; `base` are its settings. Returns {stage: the other cells of its
    row}: losses on old and on new text, and four shares of exact answers.
    """
    T = min(128, model.config.block_size)
    if T < 64:      # a question and its answer have up to 62 bytes
        raise UserError(f"block_size={T} is too short for a question and its answer: take a "
                        "checkpoint with at least 64")

    # what is read
    asked, held_out, untold = world(s.minerals, s.seed)
    told = asked + held_out
    new = windows(joined(documents(told, 100 * s.minerals, s.seed), tokenizer), T)
    new_val = windows(joined(documents(told, 8 * s.minerals, s.seed + 1), tokenizer), T)
    old = windows(own_text(base, 'train', 2 ** 21, tokenizer), T)
    old_val = windows(own_text(base, 'val', 2 ** 21, tokenizer), T)
    old_val = old_val[::max(1, len(old_val) // 64)][:64]                    # from all over it

    # what is asked: first held-out facts, as sentences of the texts to be completed
    exams = [in_tokens(map(completion, held_out), tokenizer)]
    exams += [asked_about(facts, [0], tokenizer) for facts in (asked, held_out, untold)]
    pairs = asked_about(asked, [0, 1], tokenizer)

    def measure(model):
        losses = [loss_on(model, rows) for rows in (old_val, new_val)]
        return losses + [exact_match(model, exam) for exam in exams]

    # rows of new and of old text in each batch
    n_old = round(s.batch * s.replay)
    mixes = {
        'untaught': None,
        'no replay': (s.batch, 0),
        'replay': (s.batch - n_old, n_old),
    }

    peak = s.peak * base['learning_rate']
    rows = {'checkpoint': measure(model)}
    for stage, counts in mixes.items():
        student = copy.deepcopy(model)
        if counts is not None:
            pretrain_further(stage, student, (new, old), counts, peak, s)
            rows[stage] = measure(student)
        fine_tune(f"{stage}, fine-tuning", student, pairs, peak, s)
        rows[f"{stage}, fine-tuned"] = measure(student)
    return rows


def main(argv):
    s, [folder] = start(argv, __doc__, Settings)
    model, tokenizer, base = load_plain(folder)
    rows = experiment(model, tokenizer, base, s)
    print(f"learning rate {s.peak:g} x {base['learning_rate']:g}; "
          "losses in nats per token, then shares of exact answers\n")
    header = ('stage', 'old text', 'new text', 'recited', 'asked', 'held out', 'never told')
    print(table(header, [[stage, *row] for stage, row in rows.items()]))
    old, new, *_ = rows['checkpoint']
    old_without, new_without, *_ = rows['no replay']
    old_with, new_with, *_ = rows['replay']
    print(f"\nforgetting {old_without - old:.4f} without replay, {old_with - old:.4f} with; "
          f"gain {new - new_without:.4f} and {new - new_with:.4f}")
    print("recited: held-out facts completed in the words of the texts: "
          "what a model knows, whether or not it can be asked")


if __name__ == '__main__':
    run(main)
