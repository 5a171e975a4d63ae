"""
Pictures of runs and checkpoints. Needs: pip install matplotlib

    python tools/plot.py curves out/compare/*-s* --x=flops --out=curves.png
        loss against tokens, training FLOPs or seconds
    python tools/plot.py final out/compare/*-s* --x=flops --out=final.png
        where the runs ended, and the line of plain ones
    python tools/plot.py records docs/runs/addition.jsonl docs/runs/text.jsonl --x=flops
        the same of tools/compare.py's runs.jsonl; of a made task the right answers
    python tools/plot.py depth out/depth_attn --out=depth.png
        which layers' values each layer mixes
    python tools/plot.py ponder out/ponder --max_steps=6 --out=ponder.png
        loss against steps at inference
    python tools/plot.py steps out/halting_gate --out=steps.png
        with halting: how many steps, and for which tokens
    python tools/plot.py text out/halting_gate --start=FILE:a.txt
        with halting: a text, shaded by steps

The first two take train.py's folders or log.jsonl files; NAME-s1, NAME-s2, .. are seeds of one run:
mean and range are drawn.
"""

import os
import sys
from dataclasses import dataclass
from typing import Optional

import numpy as np
import torch
from torch.nn import functional as F

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # run from anywhere
from configurator import build, read
from engine.checkpoint import change_steps
from engine.files import UserError, run, whole
from engine.hardware import pick_device
from engine.palette import BLUE, GREY, INK, ORANGE, SHADES, shade
from sample import data_dir_of, encode_prompt, load_model
from tools.curves import TEXT, X, curves, final, new_figure, records
from tools.evaluate import token_arrays
from tools.explain import look


@dataclass
class PlotSettings:
    """what to draw"""
    out: str = 'plot.png'            # file to write: .png, .svg or .pdf
    x: str = 'tokens'                # of runs: against 'tokens', 'flops' or 'seconds'
    names: Optional[str] = None      # records: only these runs, with commas between
    start: Optional[str] = None      # text to read, or FILE:path (None: the validation set)
    tokens: int = 2048               # how much of the validation set to read
    max_steps: Optional[int] = None  # ponder: try 0 .. max_steps (None: twice as many as trained)
    device: Optional[str] = None     # 'cpu', 'cuda', 'mps' (None: the best there is)

    def __post_init__(self):
        if self.x not in X:
            raise ValueError(f"x={self.x!r} must be one of {', '.join(map(repr, X))}")
        if self.tokens < 2 or (self.max_steps or 0) < 0:
            raise ValueError("tokens must be at least 2, max_steps not negative")


def read_text(settings, tokenizer, s):
    """
    The tokens (n,) to read: --start, or the beginning of the validation set of the checkpoint's
    data.
    """
    if s.start is not None:
        return torch.tensor(encode_prompt(s.start, tokenizer, 10 ** 9))
    first_shard = token_arrays(data_dir_of(settings), tokenizer)[0]
    return torch.from_numpy(first_shard[:s.tokens].astype(np.int64))


@torch.inference_mode()
def per_token(model, tokens):
    """
    For all tokens (n,) but the first, read in windows of block_size: (losses (n-1,) in nats, steps
    that each took (n-1,); None without halting).
    """
    if len(tokens) < 2:
        raise UserError("--start: give at least two tokens; of the first nothing is predicted")
    T = model.config.block_size
    losses, steps = [], []
    for first in range(0, len(tokens) - 1, T):
        window = tokens[first:first + T + 1].to(model.wte.weight.device)
        logits, _ = model(window[None, :-1])  # (1,T,V)
        losses.append(F.cross_entropy(logits[0].float(), window[1:], reduction='none'))
        steps.append(model.mechanism.passes)
    losses = torch.cat(losses).cpu()
    if steps[0] is None:
        return losses, None
    return losses, torch.cat(steps, 1)[0].cpu()


# -------------------------------------------------------------------------------------------------
# Pictures of a checkpoint: each reads tokens (n,)


def depth(model, tokens, tokenizer, s):
    """Depth-Attention: whose values each layer mixes, as a mean over the text's first window."""
    if not model.config.depth_attn:
        raise UserError("this model has depth_attn=False: name one with Depth-Attention")
    window = tokens[:model.config.block_size].to(model.wte.weight.device)
    shares = look(model, window).values.mean(0).cpu().numpy()  # (layers, layers + 1)
    n = len(shares)
    labels = [str(layer) for layer in range(n)]
    if shares[:, -1].any():
        labels.append('earlier\nloops')
    shares = np.where(shares > 0, shares, np.nan)[:, :len(labels)]  # nothing mixed: no colour

    figure, (ax,) = new_figure(size=(0.55 * n + 2.6, 0.5 * n + 1.8))
    ax.set(xlabel='layer the values come from', ylabel='layer that mixes them',
           title='Depth-Attention', yticks=range(n), xticks=range(len(labels)), xticklabels=labels)
    if n <= 12:  # with more they could not be read
        write_shares(ax, shares)
    image = ax.imshow(shares, cmap=colours(), vmin=0, vmax=1)
    add_bar(figure, image, 'share of the mixed value')
    return figure


def colours(n=None):
    """The palette's shades from pale to dark: the first n, or a scale without steps."""
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap
    if n is None:
        return LinearSegmentedColormap.from_list('shades', list(SHADES.values()))
    return ListedColormap([shade(passes) for passes in range(1, n + 1)])


def add_bar(figure, image, label, **options):
    """A bar that says what the image's colours mean."""
    bar = figure.colorbar(image, **options)
    bar.set_label(label, size=TEXT, color=INK)
    bar.ax.tick_params(labelsize=TEXT, colors=INK)
    bar.outline.set_visible(False)


def write_shares(ax, shares):
    """Each share as a percentage in its place."""
    for (i, j), share in np.ndenumerate(shares):
        if not np.isnan(share):
            ax.text(j, i, f"{share:.0%}", ha='center', va='center', size=TEXT - 2, color=INK)


def ponder(model, tokens, tokenizer, s):
    """Loss of the same weights with 0, 1, .. pondering steps."""
    config = model.config
    if config.ponder == 'none' or config.halting != 'none':
        raise UserError(f"ponder={config.ponder!r}: name a model that ponders, without halting")
    trained = config.ponder_steps
    most = 2 * trained if s.max_steps is None else s.max_steps
    change_steps(model, most)  # UserError if it has no weights for that
    counts = range(most + 1)
    losses = []
    for count in counts:
        config.ponder_steps = count
        losses.append(per_token(model, tokens)[0].mean().item())
    config.ponder_steps = trained

    figure, (ax,) = new_figure()
    ax.plot(counts, losses, 'o-', color=ORANGE)
    ax.axvline(trained, color=GREY, linestyle='--')
    ax.annotate(' as trained', (trained, 1), xycoords=('data', 'axes fraction'), va='top',
                size=TEXT, color=INK)
    ax.set(xlabel="pondering steps (ponder_steps)", ylabel='loss (nats per token)', xticks=counts,
           title=f"ponder={config.ponder!r}, {len(tokens) - 1:,} tokens")
    return figure


def steps(model, tokens, tokenizer, s):
    """How many tokens take how many steps, and how hard these tokens are."""
    losses, taken = per_token(model, tokens)
    counts = range(1, model.config.ponder_steps + 2)
    percent = [(taken == n).float().mean().item() * 100 for n in counts]
    seen = [n for n in counts if (taken == n).any()]

    figure, (left, right) = new_figure(2, (9, 4))
    left.bar(counts, percent, color=[shade(n) for n in counts], edgecolor=INK)
    left.set(xlabel='steps', ylabel='tokens (%)', xticks=counts,
             title=f"{taken.float().mean():.2f} steps per token")
    right.boxplot([losses[taken == n].numpy() for n in seen], positions=seen, showfliers=False,
                  showmeans=True, medianprops=dict(color=BLUE, linewidth=2),
                  meanprops=dict(markerfacecolor=INK, markeredgecolor=INK))
    right.set(xlabel='steps', ylabel='loss of the token (nats)',
              title='quartiles, median, mean (triangle)')
    return figure


COLUMNS = 90  # characters per line of `text`


def text(model, tokens, tokenizer, s):
    """The text, each character on a ground shaded by the passes taken to predict its token."""
    _, taken = per_token(model, tokens)
    taken = taken.tolist()
    most = model.config.ponder_steps + 1
    lines = lines_of(tokens.tolist(), [np.nan, *taken], tokenizer)

    figure, (ax,) = new_figure(size=(9, 0.19 * len(lines) + 1))
    grid = np.full((len(lines), COLUMNS), np.nan)
    for i, line in enumerate(lines):
        for j, (char, passes) in enumerate(line):
            grid[i, j] = passes
            if char.isprintable():
                ax.text(j, i, char, ha='center', va='center', family='monospace', size=9,
                        color=INK, parse_math=False)
    image = ax.imshow(grid, cmap=colours(most), vmin=0.5, vmax=most + 0.5, aspect='auto')
    ax.axis('off')
    add_bar(figure, image, f"passes taken to predict each token, {np.mean(taken):.2f} in the mean",
            ticks=range(1, most + 1), location='top', aspect=60)
    return figure


def lines_of(tokens, passes, tokenizer):
    """[[(character, passes of its token), ..] of each line of the text]."""
    lines = [[]]
    for token, n in zip(tokens, passes):
        for char in tokenizer.decode_single_token_bytes(token).decode('utf-8', 'replace'):
            lines[-1].append((char, n))
            if char == '\n' or len(lines[-1]) == COLUMNS:
                lines.append([])
    return lines


# -------------------------------------------------------------------------------------------------

RUNS = {'curves': curves, 'final': final, 'records': records}
CHECKPOINT = {'depth': depth, 'ponder': ponder, 'steps': steps, 'text': text}
KINDS = {**RUNS, **CHECKPOINT}


def draw(kind, paths, s):
    """The picture of this kind, of runs or of the one checkpoint."""
    if kind in RUNS:
        return RUNS[kind](paths, s)
    path = paths[0]
    model, tokenizer, settings = load_model(path, pick_device(s.device))
    if kind in ('steps', 'text') and not model.mechanism.halts:
        raise UserError(f"{path} has halting={model.config.halting!r}, "
                        f"ponder_steps={model.config.ponder_steps}: name one that halts")
    tokens = read_text(settings, tokenizer, s)
    return CHECKPOINT[kind](model, tokens, tokenizer, s)


def main(argv):
    given, rest = read(argv, __doc__, PlotSettings)
    s = build(PlotSettings, given)
    kind, *paths = rest or ['']
    if kind not in KINDS or not paths or (kind in CHECKPOINT and len(paths) > 1):
        raise UserError(f"name a picture ({', '.join(KINDS)}), then a checkpoint, or any number of "
                        f"runs for {', '.join(RUNS)}; see --help")
    ending = os.path.splitext(s.out)[1][1:]
    if ending not in ('png', 'svg', 'pdf'):
        raise UserError(f"--out={s.out}: a picture is .png, .svg or .pdf")
    figure = draw(kind, paths, s)
    os.makedirs(os.path.dirname(s.out) or '.', exist_ok=True)
    with whole(s.out, 'wb') as f:
        figure.savefig(f, format=ending)


if __name__ == '__main__':
    run(main)
