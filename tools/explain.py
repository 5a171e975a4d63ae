"""
What a model does with a prompt, position by position: its passes, when it stops, what it would say
after each, and the layers its values came from.

    python tools/explain.py out/ponder --start="def f(x):"
    python tools/explain.py out/depth_attn --start=FILE:prompt.txt --top=5
    python tools/explain.py out/halting_router --start="def f(x):" --html=think.html
    python tools/explain.py out/loop --tokens=120 --html=think.html     of the validation set
    python tools/explain.py out/loop --against=out/chain --start="def f(x):" --html=think.html

A step is a pass through the blocks (embedding, loop, chain) or a slot of the token (latent, pause).
Its line shows the likeliest next tokens, as if the model ended there: the last one is what it was
trained for, unless it says "output" below. With --html it is a page to open in a browser, to point
at and to click.
"""

import sys
from dataclasses import dataclass
from os.path import abspath, dirname
from typing import Optional
from unittest import mock

import torch

sys.path.insert(0, dirname(dirname(abspath(__file__))))  # run from anywhere
import model as library
from configurator import read
from engine.files import UserError, run
from sample import encode_prompt, load_model, open_one
from tools.evaluate import token_arrays
from tools.think import check_length, model_data, write_page


@dataclass
class ExplainSettings:
    """what to explain"""
    start: Optional[str] = None         # the prompt, or FILE:path (None: a new document)
    tokens: Optional[int] = None        # read this many tokens of the validation set instead
    top: Optional[int] = None           # tokens shown after each step (None: 3, on a page 6)
    html: Optional[str] = None          # write a page of up to 512 tokens to this file
    against: Optional[str] = None       # with html: a second checkpoint, on the same text
    device: Optional[str] = None        # 'cpu', 'cuda', 'mps' (None: the best there is)

    def __post_init__(self):
        if self.top is None:
            self.top = 3 if self.html is None else 6
        if self.top < 1:
            raise ValueError(f"top={self.top} must be at least 1")
        if self.tokens is not None and (self.start is not None or self.tokens < 1):
            raise ValueError("tokens must be at least 1, and stands in the place of start")
        if self.against is not None and self.html is None:
            raise ValueError("against needs a page to show both on, such as --html=think.html")


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
    kind: str                       # 'pass' or 'slot': what a step is


class Recorder:
    """Listens to the passes of a model and to Depth-Attention, and keeps what they made."""

    def __init__(self, model):
        self.config = model.config
        self.outputs = []           # of each pass: (1,S,C)
        self.shares = []            # of each pass, with Depth-Attention: (1,S,L,L+1)
        self.layers = None          # whose values the block that runs now mixes
        self.ln_f = model.ln_f
        self.run_pass = model.trunk
        self.find = library.depth_sources
        self.mix = library.depth_attention

    def trunk(self, x, pos, memory=None, layers=None, norm=True):
        """In the place of GPT.trunk; what it keeps is normed."""
        if self.config.depth_attn:
            self.shares.append(self.shares_before(x))
        x = self.run_pass(x, pos, memory, layers, norm)
        self.outputs.append(x if norm else self.ln_f(x))
        return x

    def shares_before(self, x):
        """What a pass over x (1,S,C) starts from: layers that it does not run keep theirs."""
        if self.shares and self.shares[-1].size(1) == x.size(1):
            return self.shares[-1].clone()
        L = self.config.n_layer
        return x.new_zeros(1, x.size(1), L, L + 1)

    def depth_sources(self, layer, below, memory):
        """In the place of model.depth_sources."""
        loops = getattr(memory, 'loops', ())
        self.layers = layer, len(loops), [j for j in below if j in memory.made]
        return self.find(layer, below, memory)

    def depth_attention(self, q, k, v, sources, mode):
        """
        In the place of model.depth_attention. Mixing the rows of a unit matrix instead of values
        gives the weights themselves.
        """
        unit = torch.eye(len(sources) + 1, dtype=v.dtype, device=v.device)
        rows = [row.expand(*k.shape[:3], -1) for row in unit]               # (1,nkv,S,sources + 1)
        keys = [k_j for k_j, _ in sources]
        weights = self.mix(q, k, rows[-1], list(zip(keys, rows)), mode).mean(1)
        self.put_at_layers(weights)                                         # (1,S,sources + 1)
        return self.mix(q, k, v, sources, mode)

    def put_at_layers(self, weights):
        """Weights of sources, in the order of depth_sources, in the columns of their layers."""
        layer, loops, below = self.layers
        row = self.shares[-1][:, :, layer]                                  # (1,S,L+1)
        row.zero_()
        row[..., -1] = weights[..., :loops].sum(-1)
        row[..., [*below, layer]] = weights[..., loops:]


@torch.inference_mode()
def look(model, idx):
    """What happens while a model in eval mode reads idx (T,): a `Seen`."""
    T = len(idx)
    recorder = Recorder(model)
    mechanism = model.mechanism
    model.dense = True              # halting='router': all tokens in all passes
    try:
        with mock.patch.object(library, 'depth_attention', recorder.depth_attention), \
                mock.patch.object(library, 'depth_sources', recorder.depth_sources), \
                mock.patch.object(model, 'trunk', recorder.trunk):
            logits = model(idx[None])[0][0]                                 # (T,V)
    finally:
        model.dense = False

    after = model.head(by_token(recorder.outputs, T))                       # (n,T,V)
    steps = torch.full((T,), len(after), device=idx.device)
    position = torch.arange(T, device=idx.device)
    compared = []
    if mechanism.halts:
        steps = mechanism.passes[0]                                         # (T,)
        compared = [chance[0] for chance in mechanism.decisions()]          # each (T,)
    values = None
    if model.config.depth_attn:
        values = by_token(recorder.shares, T)                               # (n,T,L,L+1)
        values = values[steps - 1, position]                                # (T,L,L+1)
    last = after[steps - 1, position]                                       # (T,V)
    mixed = ~torch.isclose(last, logits, atol=1e-3).all(-1)
    kind = 'pass' if recorder.outputs[-1].size(1) == T else 'slot'
    return Seen(steps, logits, compared, after, values, mixed, kind)


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
    for t, token in enumerate(idx.tolist()):
        n = seen.steps[t].item()
        decided = decisions(seen.compared, t, mechanism)
        print(f"{t:4d} {word(token, tokenizer)}   {count(n, seen.kind)}{decided}")
        for k in range(n):
            words = likeliest(seen.after[k, t], tokenizer, top)
            print(f"       after {seen.kind} {k + 1}   {words}")
        if seen.mixed[t]:
            print(f"       output         {likeliest(seen.logits[t], tokenizer, top)}")
        if seen.values is not None:
            print(f"       values from    {shares(seen.values[t])}")


def count(n, kind):
    """1 pass, 2 passes, 3 slots."""
    if n == 1:
        return f"1 {kind}"
    return f"{n} slots" if kind == 'slot' else f"{n} passes"


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
    parts = []
    for token, p in zip(best.indices.tolist(), best.values.tolist()):
        parts.append(f"{word(token, tokenizer)} {p:.3f}")
    return '   '.join(parts)


def decisions(compared, t, mechanism):
    """What was compared with halt_tau after the passes of position t, in words."""
    if not compared:
        return ''
    return f"   {mechanism.decides} {' '.join(f'{chance[t]:.4f}' for chance in compared)}"


def shares(values):
    """Whose values (L,L+1) a token's layers mixed, in words: the mean of those with a choice."""
    others = values.clone()
    others.diagonal().zero_()
    layer_0_alone = len(values) > 1 and not others[0].any()     # it reads earlier loops or nothing
    first = 1 if layer_0_alone else 0
    own = values.diagonal()[first:].mean().item()
    *layers, loops = others[first:].mean(0).tolist()

    named = {'the layer itself': own}
    for j, share in enumerate(layers):
        named[f'layer {j}'] = share
    named['earlier loops'] = loops
    return ', '.join(f"{name} {share:.0%}" for name, share in named.items() if share)


# ---- main ----------------------------------------------------------------------------------------

def show_page(s, name, model, idx, tokenizer):
    """Write the page of --html, of this model and of --against, and say where it is."""
    check_length(idx)
    models = [model_data(look(model, idx), model.config, name, idx, s.top)]
    if s.against is not None:
        model = second_model(s, tokenizer, idx)
        models.append(model_data(look(model, idx), model.config, s.against, idx, s.top))
    size = write_page(s.html, models, idx, tokenizer)
    print(f"{s.html}: {len(idx)} tokens, {size / 1e3:,.0f} kB; open it in a browser")


def read_validation(n, settings, tokenizer, block_size):
    """The first n tokens of the validation set that the checkpoint's data folder has."""
    if n > block_size:
        raise UserError(f"--tokens={n}: the model's context (block_size) is {block_size}; "
                        "choose fewer")
    if 'data_dir' not in settings:
        raise UserError("--tokens: this checkpoint names no data folder; give a --start instead")
    first_shard = token_arrays(settings['data_dir'], tokenizer)[0]
    return first_shard[:n].tolist()


def second_model(s, tokenizer, idx):
    """The model of --against; UserError if it cannot read the same tokens."""
    model, other, _ = load_model(s.against, idx.device)
    if other.name != tokenizer.name:
        raise UserError(f"--against={s.against}: its tokenizer is {other.name}, the first model's "
                        f"is {tokenizer.name}; name one with the same")
    if len(idx) > model.config.block_size:
        raise UserError(f"the text has {len(idx)} tokens, the context (block_size) of --against is "
                        f"{model.config.block_size}: shorten it")
    return model


def main(argv):
    s, model, tokenizer, settings = open_one(argv, __doc__, ExplainSettings,
                                             "python tools/explain.py out/ponder")
    if s.tokens is None:
        prompt = encode_prompt(s.start, tokenizer, model.config.block_size)
    else:
        prompt = read_validation(s.tokens, settings, tokenizer, model.config.block_size)
    idx = torch.tensor(prompt, device=model.wte.weight.device)      # (T,)
    if s.html is not None:
        _, [folder] = read(argv, '', ExplainSettings)
        show_page(s, folder, model, idx, tokenizer)
    else:
        show(look(model, idx), model.mechanism, idx, tokenizer, s.top)


if __name__ == '__main__':
    run(main)
