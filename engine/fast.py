"""
The joint between model.py and engine/. A program's model is model.py's own GPT, or with `fast` a
GPT with quicker parts. Each of them equals the part in whose place it stands: tests/test_fast.py
compares the two over every toggle. Who changes one of those parts is told so, in one line, instead
of seeing no effect.

    model = new_model(config, fast)     what a program trains or asks
    pick_fast(choice, device)           the setting `fast` of all programs: None is on CUDA alone;
                                        sample.py, evaluate.py: as the checkpoint was trained
"""

import ast
import contextlib
import hashlib
import inspect
import io
import textwrap
import tokenize
from functools import cache, partial
from unittest import mock

import torch

import model as model_py
from engine.attention import attend
from engine.files import UserError
from engine.generate import each
from engine.loss import chunked_cross_entropy, in_parts, nats_in_parts
from engine.memory import Cache, cache_memory, text_memory
from engine.variant import fit
from model import GPT, NEVER, Attention, Embedding, Exit, Halting, Mask, Mechanism

# What stands in for which part of model.py, and the sum of what that part computed when its
# stand-in was last compared with it: tests/test_edits.py says how to renew one.
PARTS = {
    'engine/attention.py': {            # a kernel for each mask and length
        'Attention.attend': '1244553b4863',
    },
    'engine/memory.py': {               # buffers, and no masks where none are needed
        'Memory': 'e0965cc89c97',
        'Labels': 'b75bf2606a5b',
        'Padded': 'ca08ee8425c3',
        'labels_of': '3107f9ee0ccf',
        'token_times': 'dc6c2dc15d87',
        'SlotMemory': 'c77ac6c01f76',
        'GPT.new_memory': 'bf0e04f1f529',
        'Mechanism.new_memory': 'bc03a5343bb4',
        'flat': '45cc7235f97c',
        'by_pass': '375d7c1d6b52',
        'newest': 'ceaf666cdb07',
        'faded': '103501571112',
        'source_layers': '1a9ead7b2e5c',
    },
    'engine/loss.py': {                 # never all logits at once
        'GPT.head': 'd6fdd657411d',
        'GPT.loss': '1a69b6a69f33',
        'at_least_fp32': '8a483de1ada9',
        'GPT.token_losses': 'b103239eb83b',
        'Embedding.mixture': '042032c359c1',
        'Exit.confidence': 'ae8eada5a756',
        'Exit.uniform_nats': '4611bf0c3e6e',
    },
    'engine/fast.py': {                 # `think`: without the tokens that have stopped
        'Halting.forward': 'fefee1528345',
        'TokenState.where': '01535b23cd2b',
    },
    'engine/generate.py': {             # `run_ahead`: rows that do not wait for each other
        'GPT.hidden': 'c1c23dcfe4cf',
        'Mask.forward': '9d99aabfba24',
    },
}

# what makes V logits of each of many rows, of which engine/loss.py takes some at a time
BY_ROWS = (Embedding, 'mixture'), (Exit, 'confidence'), (Exit, 'uniform_nats')


class FastGPT(GPT):
    """UserError if a part of model.py was changed for which there is another one here."""

    def __init__(self, config):
        check_record()
        super().__init__(config)
        fit(self)                       # released models have other blocks
        check_own_parts(self)
        self.static_places = None       # for compiled decoding: engine/compile.py
        self.dense = False              # True: over a text nobody is skipped: no shape varies
        for block in self.h:
            block.attn.attend = attend
        for kind, name in BY_ROWS:
            if isinstance(self.mechanism, kind):
                setattr(self.mechanism, name, partial(in_parts, getattr(kind, name)))
        forward = type(self.mechanism).forward
        if forward is Halting.forward:
            self.mechanism.forward = partial(think, self.mechanism)
        self.runs_ahead = forward in (Halting.forward, Mask.forward)    # engine/generate.py

    def hidden(self, idx, memory=None):
        return super().hidden(idx, text_memory(self) if memory is None else memory)

    def new_memory(self, pad=None):
        return cache_memory(self, pad, self.static_places)

    def loss(self, h, targets):
        return chunked_cross_entropy(h, self.lm_head.weight, targets, self.config.n_tokens)

    def token_losses(self, h, targets):
        if torch.is_grad_enabled() and h.requires_grad:
            return in_parts(GPT.token_losses, self, h, targets)
        return nats_in_parts(self.head, h, targets, self.config.vocab_size)


def new_model(config, fast=False):
    """The model of a GPTConfig that programs train and ask: model.py's, or a FastGPT."""
    gpt = FastGPT(config) if fast else fit(GPT(config))
    if gpt.mechanism.trains_alone:
        gpt.requires_grad_(False)
        gpt.mechanism.requires_grad_(True)
    return gpt


def pick_fast(choice, device):
    """Whether a program's model is to be a FastGPT: as asked for, else on CUDA."""
    return device.type == 'cuda' if choice is None else choice


@contextlib.contextmanager
def shapes_only():
    """Modules made in here need no memory and hardly any time, and compute nothing."""
    # On these tensors normal_ does nothing, but PyTorch imports for more than a second to do it.
    with torch.device('meta'), mock.patch.object(torch.Tensor, 'normal_', lambda x, *_, **__: x):
        yield


def without_numbers(config, fast=False):
    """The model of a config as shapes: to count, to compare with, to be given weights."""
    with shapes_only():
        return new_model(config, fast)


# -------------------------------------------------------------------------------------------------
# Is each part still what its stand-in was written for?


def check_record():
    """UserError for the first part of model.py that no longer computes what PARTS has recorded."""
    sums = sums_of(source_of_model(), tuple(part for parts in PARTS.values() for part in parts))
    for stand_in, parts in PARTS.items():
        for part, recorded in parts.items():
            if sums[part] != recorded:
                refuse(part, "was changed", stand_in)


def check_own_parts(gpt):
    """UserError if a class of this model has a part of its own where FastGPT has another one."""
    parts = [(Attention, 'attend', 'engine/attention.py'),
             (Mechanism, 'new_memory', 'engine/memory.py')]
    parts += [(kind, name, 'engine/loss.py') for kind, name in BY_ROWS]
    if type(gpt.lm_head) is not torch.nn.Linear or gpt.lm_head.bias is not None:
        refuse('GPT.lm_head', "was changed", 'engine/loss.py')
    for module in gpt.modules():
        for kind, part, stand_in in parts:
            own = isinstance(module, kind) and getattr(type(module), part)
            if own and own is not getattr(kind, part):
                refuse(f"{type(module).__name__}.{part}", "is its own", stand_in)


def refuse(part, why, stand_in):
    raise UserError(f"fast: {part} of model.py {why}, and {stand_in} stands in for it, unchanged: "
                    "add --fast=False, which runs model.py as it is")


def source_of_model():
    return inspect.getsource(model_py)


@cache
def sums_of(source, parts):
    """{part: the sum of what it computes}, of the source of model.py; a part is Class.method."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found[node.name] = node
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    found[f'{node.name}.{method.name}'] = method
    lines = source.splitlines(keepends=True)
    sums = {}
    for part in parts:
        node = found.get(part)
        text = '' if node is None else ''.join(lines[node.lineno - 1:node.end_lineno])
        sums[part] = sum_of(textwrap.dedent(text))
    return sums


def sum_of(source):
    """Twelve digits, the same for all source code that computes the same."""
    return hashlib.sha256(what_is_computed(source).encode()).hexdigest()[:12]


def what_is_computed(source):
    """
    Source code without comments, docstrings, blanks and line ends, the same for every version of
    Python: a text in quotes that stands alone is a docstring, indentation is what it means.
    """
    marks = {tokenize.INDENT: '<in>', tokenize.DEDENT: '<out>', tokenize.NEWLINE: '<end>'}
    left_out = tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER
    words = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in left_out:
            continue
        words.append(marks.get(token.type, token.string))
        alone = len(words) < 3 or words[-3] in marks.values()
        if token.type == tokenize.NEWLINE and alone and words[-2][-1:] in ('"', "'"):
            del words[-2:]
    return ' '.join(''.join(words).split())


# -------------------------------------------------------------------------------------------------
# Tokens that have stopped are left out: in generation always (but in a prompt that Mask reads at
# once), in training where a mechanism needs nothing of them: shapes then change from step to step.


def think(mechanism, gpt, x, pos, memory):
    """Halting.forward of model.py: embeddings x (B,T,C) -> hidden states (B,T,C)."""
    skips = isinstance(memory, Cache) or (mechanism.skips and not gpt.dense)
    if not skips:
        return Halting.forward(mechanism, gpt, x, pos, memory)

    state = mechanism.start(x, go_on=memory.is_token())
    mechanism.trace = []
    for k in range(mechanism.K + 1):
        taken = state.go_on                                             # (B,T)
        chosen = Chosen(taken)
        part = each(chosen.take, state)
        pass_memory = memory.for_tokens(chosen.t(pos), k, mechanism.log_w_of_pass(part, k))
        x = mechanism.before(gpt, part, k)                              # (B,n,C)
        h = gpt.trunk(x, chosen.take(pos), pass_memory, norm=mechanism.final_norm)
        state = each(chosen.put, state, mechanism.after(gpt, part, x, h, k))
        mechanism.trace.append((taken, state))
        if not state.go_on.any():
            break
    mechanism.passes = torch.stack([taken for taken, _ in mechanism.trace]).sum(0)  # (B,T)
    return state.out.to(x.dtype)


class Chosen:
    """
    The tokens of `taken` (B,T), side by side: each row holds, in their order, those of one row of
    the batch, and then others, to fill up the rectangle (B,n).
    """

    def __init__(self, taken):
        B, T = self.shape = taken.shape
        self.all = bool(taken.all())
        if self.all:
            return
        n = int(taken.sum(1).max())
        thinking_first = taken.byte().argsort(dim=1, descending=True, stable=True)  # (B,T)
        self.column = thinking_first[:, :n]                             # (B,n), of T
        first = torch.arange(B, device=taken.device)[:, None] * T
        self.place = first + self.column                                # (B,n), of B T
        self.valid = taken.gather(1, self.column)

    def take(self, x):
        """x (B,T,..), or (T,) which is the same in all rows -> (B,n,..)."""
        if self.all:
            return x
        if x.dim() == 1:
            return x[self.column]
        picked = x.flatten(0, 1).index_select(0, self.place.flatten())
        return picked.unflatten(0, self.place.shape)

    def put(self, x, new):
        """x with new (B,n,..) in the place of these."""
        new = new.to(x.dtype)
        if self.all:
            return new
        valid = self.valid.view(*self.valid.shape, *[1] * (x.dim() - 2))
        new = torch.where(valid, new, self.take(x))
        return x.flatten(0, 1).index_copy(0, self.place.flatten(), new.flatten(0, 1)).view_as(x)

    def t(self, pos):
        """(B,n): their places in the text, and NEVER for what fills up."""
        if self.all:
            return pos.expand(self.shape)
        return torch.where(self.valid, self.take(pos), NEVER)
