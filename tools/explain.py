"""
What a model does with a text, position by position: its passes, when it stops, what it would say
after each, and the layers its values came from.

    python tools/explain.py out/loop --start=7420+6779,1999+8001 --html=out/think.html
    python tools/explain.py out/embedding --start="def f(x):"
    python tools/explain.py out/depth_attn --start=FILE:prompt.txt --top=5
    python tools/explain.py out/loop --html=out/think.html      the beginning of its validation set
    python tools/explain.py out/vanilla --against=out/depth_attn --start="def f" --html=out/a.html
    python tools/explain.py out/loop out/halting_exit --serve   a page to ask them, as they answer

A step is a pass through the blocks (embedding, loop, chain) or a slot of the token (latent, pause).
Feedback and Smear are read token by token, as in generation: the two steps are with a zero in the
place of the state that comes in, and with the state; the memory of earlier tokens is the same in
both.
The line of a step shows the likeliest next tokens, as if the model ended there. The last line is
what the model was trained for, unless a line "output" follows. With --html it is a page to open in
a browser, to point at and to click. Of a model of a made task, --start holds problems, with or
without their right answers; two of the validation set come before them, as in training.
"""

import math
import re
import sys
from dataclasses import dataclass
from os.path import dirname, realpath
from typing import Optional

import torch

sys.path.insert(0, dirname(dirname(realpath(__file__))))  # from anywhere
from configurator import build, check_range, only_with, read
from engine.answers import behind_solved, what_counts
from engine.files import UserError, run
from engine.mechanisms import SCORES, halts
from engine.page import model_data, write_page
from engine.prepare import with_own_dicts
from engine.shards import identity, one_tokenizer
from engine.tasks import TASKS, answer_to
from engine.trained import data_dir_of, exam_for_prompt, load_model, only
from model import Feedback, SlotMemory, Smear, depth_attention, depth_sources, source_layers
from sample import check_length, encode_prompt, read_start
from tools.evaluate import token_arrays
from tools.serve import Served, serve


@dataclass
class ExplainSettings:
    """what to explain"""
    start: Optional[str] = None     # text, FILE:path or problems (None: the validation set)
    top: Optional[int] = None       # tokens shown after each step (None: 3, on a page 6)
    html: Optional[str] = None      # write a page of up to 512 tokens to this file
    against: Optional[str] = None   # with html: a second checkpoint, on the same text
    serve: bool = False             # answer what is asked on a page, of one checkpoint or several
    port: int = 8000                # with serve: where the page is on this machine (0: any)
    device: Optional[str] = None    # 'cpu', 'cuda', 'mps' (None: the best there is)

    def __post_init__(self):
        if self.top is None:
            self.top = 3 if self.html is None and not self.serve else 6
        check_range(self, 1, math.inf, 'top')
        check_range(self, 0, 2 ** 16 - 1, 'port')
        if self.serve and (self.start, self.html, self.against) != (None, None, None):
            raise ValueError("serve: what is asked, and of whom, is said on its page")
        if self.against is not None and self.html is None:
            raise ValueError("against needs a page to show both on, such as --html=out/think.html")


# ---- looking -------------------------------------------------------------------------------------
# T tokens, n the most steps that one of them takes, V the vocabulary, L layers

@dataclass
class Seen:
    """
    What happened while a model read T tokens.

    values: how Depth-Attention mixed each layer's values, in the token's last step. Row l has the
    shares that came from layers 0, 1, ..; on the diagonal is layer l's own value, and in the last
    column what layer l made in earlier loops. None without Depth-Attention.
    """
    steps: torch.Tensor             # (T,) long     the steps each token took
    logits: torch.Tensor            # (T,V)         the model's output
    compared: list                  # [(T,), ..]    what must reach halt_tau for step 2, 3, ..
    after: torch.Tensor             # (n,T,V)       logits after each step, as if it were the last
    values: Optional[torch.Tensor]  # (T,L,L+1)     whose values each layer mixed
    mixed: torch.Tensor             # (T,) bool     the output is not the last step's, but a mixture
    kind: str                       # what a step is: 'pass', 'slot'; Feedback and Smear: 'state'
    moved: Optional[torch.Tensor]   # (T,)          of a state: nats, KL(with it || without)


class Recorder:
    """Listens to the blocks of a model, in `with`, and keeps what each pass made."""

    def __init__(self, model):
        self.model = model
        self.outputs = []           # of each pass: (1,S,C), normed
        self.shares = []            # of each pass, who mixes whose values: (1,S,L,L+1)

    def __enter__(self):
        blocks = self.model.h
        self.hooks = [blocks[0].register_forward_pre_hook(self.before_blocks),
                      blocks[-1].register_forward_hook(self.after_blocks)]
        if self.model.config.depth_attn:
            self.hooks += [block.attn.register_forward_hook(self.after_attention)
                           for block in blocks]
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()

    def before_blocks(self, block, args):
        x, L = args[0], len(self.model.h)                               # x: (1,S,C)
        alone = torch.eye(L, L + 1, dtype=x.dtype, device=x.device)     # each layer its own values
        self.shares.append(alone.repeat(1, x.size(1), 1, 1))

    def after_blocks(self, block, args, x):
        self.outputs.append(self.model.ln_f(x))

    def after_attention(self, attention, args, y):
        """
        Mixing the rows of a unit matrix in the place of values gives the weights themselves, in the
        order of depth_sources; here they go into the columns of their layers.
        """
        x, rope, memory = args
        config, layer = attention.config, attention.layer
        q, k, _ = attention.project(x, rope)
        keys = [k_j for k_j, _ in depth_sources(config, layer, memory, x.size(1))]
        unit = torch.eye(len(keys) + 1, dtype=x.dtype, device=x.device)
        rows = [row.expand(*k.shape[:3], -1) for row in unit]           # (1,nkv,S,sources + 1)
        mode = config.depth_mode
        weights = depth_attention(q, k, rows[-1], list(zip(keys, rows)), mode).mean(1)

        loops, below = len(memory.depth_memories), [*source_layers(config, layer)]
        row = self.shares[-1][:, :, layer]                              # (1,S,L+1)
        row.zero_()
        row[..., -1] = weights[..., :loops].sum(-1)
        row[..., [*below, layer]] = weights[..., loops:]

    def join(self, n):
        """Passes of single tokens, n of each: they become n passes of the text."""
        self.outputs = [torch.cat(self.outputs[k::n], dim=1) for k in range(n)]
        self.shares = [torch.cat(self.shares[k::n], dim=1) for k in range(n)]


@torch.inference_mode()
def look(model, idx):
    """What happens while a model in eval mode reads idx (T,): a `Seen`."""
    T = len(idx)
    mechanism = model.mechanism
    carries = isinstance(mechanism, (Feedback, Smear))
    with Recorder(model) as recorder:
        if carries:
            logits = read_without_and_with_state(model, idx)                # (T,V)
            recorder.join(2)
        else:
            logits = model(idx[None])[0][0]

    after = model.head(by_token(recorder.outputs, T))                       # (n,T,V)
    steps = torch.full((T,), len(after), device=idx.device)
    position = torch.arange(T, device=idx.device)
    compared = []
    if halts(model):
        steps = mechanism.passes[0]                                         # (T,)
        scores = getattr(mechanism.kept, 'scores', [])      # a rule of your own may have none
        compared = [score[0] for score in scores]                           # each (T,)
    values = None
    if model.config.depth_attn:
        values = by_token(recorder.shares, T)                               # (n,T,L,L+1)
        values = values[steps - 1, position]                                # (T,L,L+1)
    last = after[steps - 1, position]                                       # (T,V)
    mixed = ~torch.isclose(last, logits, atol=1e-3).all(-1)
    has_slots = mechanism.K > 0 and isinstance(model.new_memory(), SlotMemory)
    kind = 'slot' if has_slots else 'pass'
    moved = None
    if carries:
        kind = 'state'
        without, given = after[..., :model.config.n_tokens].log_softmax(-1)
        moved = (given.exp() * (given - without)).sum(-1)                   # (T,)
    return Seen(steps, logits, compared, after, values, mixed, kind, moved)


def read_without_and_with_state(model, idx):
    """
    The logits (T,V) of idx (T,), read token by token. Each is read twice: first without the state,
    and into a copy of the memory.
    """
    memory = model.new_memory()
    hidden = []
    for token in idx:
        x = model.embed(token[None, None])
        memory.begin(x)
        without = with_own_dicts(memory)
        without.carried = None
        model.mechanism(model, x, without)
        hidden.append(model.mechanism(model, x, memory))                    # (1,1,C)
    return model.head(torch.cat(hidden, dim=1))[0]


def by_token(passes, T):
    """
    [(1,S,..)] of every pass -> (n,T,..) of every step. Where a token has one slot, its steps are
    the passes; else they are its slots, in the last pass, which is the one that counts.
    """
    if passes[-1].size(1) == T:
        return torch.cat(passes)
    slots = passes[-1][0].unflatten(0, (T, -1))                             # (T,n,..)
    return slots.transpose(0, 1)


# ---- showing -------------------------------------------------------------------------------------

def show(seen, mechanism, idx, tokenizer, top):
    """Print a paragraph for each position."""
    top = min(top, mechanism.config.n_tokens)
    if seen.kind == 'state':
        print("read token by token")
    for t, token in enumerate(idx.tolist()):
        n = seen.steps[t].item()
        plural = '' if n == 1 else 'es' if seen.kind == 'pass' else 's'
        decided = ''
        if seen.compared:
            asked = seen.compared[:n] if seen.kind == 'pass' else seen.compared
            chances = ' '.join(f'{chance[t]:.4f}' for chance in asked)
            decided = f"   {SCORES.get(mechanism.config.halting, 'score')} {chances}"
        title = f"{n} {seen.kind}{plural}{decided}"
        if seen.kind == 'state':
            title = f"the state moved it by {seen.moved[t]:.4f} nats"
        print(f"{t:4d} {word(token, tokenizer)}   {title}")
        for k in range(n):
            step = f"after {seen.kind} {k + 1}"
            if seen.kind == 'state':
                step = f"{('state off', 'state on')[k]:12}"
            print(f"       {step}   {likeliest(seen.after[k, t], tokenizer, top)}")
        if seen.mixed[t]:
            print(f"       output         {likeliest(seen.logits[t], tokenizer, top)}")
        if seen.values is not None:
            print(f"       values from    {shares(seen.values[t])}")


def word(token, tokenizer):
    """A token in quotes; as bytes where it is only a part of a character."""
    raw = tokenizer.decode_single_token_bytes(token)
    try:
        return repr(raw.decode())
    except UnicodeDecodeError:
        return repr(raw).removeprefix('b')


def likeliest(logits, tokenizer, top):
    """The likeliest tokens under logits (V,), with their probabilities."""
    best = logits.softmax(-1).topk(top)
    pairs = zip(best.indices.tolist(), best.values.tolist())
    return '   '.join(f"{word(token, tokenizer)} {p:.3f}" for token, p in pairs)


def shares(values):
    """Whose values (L,L+1) a token's layers mixed, in words: the mean of those with a choice."""
    chosen = values[values.diagonal() < 1]
    if len(chosen) == 0:
        return 'the layer itself 100%'
    own = values.diagonal()[values.diagonal() < 1].mean().item()
    others = values.clone()
    others.diagonal().zero_()
    *layers, loops = (others.sum(0) / len(chosen)).tolist()
    named = {'the layer itself': own, **{f'layer {j}': p for j, p in enumerate(layers)},
             'earlier loops': loops}
    return ', '.join(f"{name} {share:.0%}" for name, share in named.items() if share)


# ---- what is read --------------------------------------------------------------------------------

def what_to_read(start, settings, tokenizer, block_size):
    """(tokens to read, of each whether the one behind it is to be predicted)."""
    exam = exam_for_prompt(settings)
    first = 0       # from where on it counts
    if start is None:
        tokens = validation_tokens(min(120, block_size), settings, exam, tokenizer)
    elif exam is None:
        tokens = encode_prompt(start, tokenizer, block_size)
    else:
        tokens, first = problem_tokens(start, exam, block_size)
    return tokens, what_counts(tokens, exam, first)


def problem_tokens(start, exam, block_size):
    """(the tokens of the problems in --start, behind some solved ones, where the first begins)."""
    text = read_start(start).decode('utf-8', 'replace')
    end, asked = TASKS[exam['task']].end, []
    for problem in re.split(r'[,\s]+', text.strip()):
        question, _, answer = problem.partition(end)
        truth = answer_to(question + end, exam['task'])
        if not truth.startswith(answer):    # the page would count the right one as wrong
            raise UserError(f"--start={problem}: the answer is {truth}, as this model is trained "
                            "to write it")
        asked += [exam['eot'], *(question + end + (answer or truth)).encode()]
    check_length(asked, block_size, '--start')
    tokens = behind_solved(asked, exam, block_size)
    return tokens, len(tokens) - len(asked)


def validation_tokens(n, settings, exam, tokenizer):
    """The first n tokens of the validation set; of a made task, of those that the run keeps."""
    if exam is not None:
        problems = [[*(question + answer).encode(), exam['eot']]
                    for question, answer in exam['problems'][:n]]
        return sum(problems, [])[:n]
    return token_arrays(data_dir_of(settings), tokenizer)[0][:n].tolist()


# ---- main ----------------------------------------------------------------------------------------

def show_page(s, name, model, idx, counts, tokenizer):
    """Write the page of --html, of this model and of --against, and say where it is."""
    models = [model_data(look(model, idx), model.config, name, idx, s.top)]
    if s.against is not None:
        model = second_model(s, tokenizer, idx)
        models.append(model_data(look(model, idx), model.config, s.against, idx, s.top))
    size = write_page(s.html, models, idx, counts, tokenizer)
    print(f"{s.html}: {len(idx)} tokens, {size / 1e3:,.0f} kB; open it in a browser")


def second_model(s, tokenizer, idx):
    """The model of --against; UserError if it cannot read the same tokens."""
    model, other, _ = load_model(s.against, s.device)
    if not one_tokenizer(identity(other), identity(tokenizer)):
        raise UserError(f"--against={s.against}: its tokenizer is {other.name}, the first model's "
                        f"is {tokenizer.name}; name one with the same")
    check_length(idx, model.config.block_size, f"the text, for --against={s.against},")
    return model


def serve_page(s, folders):
    """Answer on a page until Ctrl-C; returns the exit status."""
    models = []
    for folder in dict.fromkeys(folders):       # each once
        model, tokenizer, settings = load_model(folder, s.device)
        models.append(Served(folder, model, tokenizer, exam_for_prompt(settings)))
    return serve(models, look, s.top, s.port)


def main(argv):
    given, folders = read(argv, __doc__, ExplainSettings)
    s = build(ExplainSettings, given)
    only_with('--serve', s.serve, given, 'port')
    if s.serve and folders:
        return serve_page(s, folders)
    folder = only(folders, "python tools/explain.py out/embedding")
    model, tokenizer, settings = load_model(folder, s.device)
    tokens, counts = what_to_read(s.start, settings, tokenizer, model.config.block_size)
    idx = torch.tensor(tokens, device=model.wte.weight.device)      # (T,)
    if s.html is not None:
        show_page(s, folder, model, idx, counts, tokenizer)
    else:
        show(look(model, idx), model.mechanism, idx, tokenizer, s.top)


if __name__ == '__main__':
    run(main)
