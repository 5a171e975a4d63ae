"""
Pictures of runs and checkpoints. Needs: pip install matplotlib

    python tools/plot.py curves out/compare/*-s* --x=flops --out=curves.png  loss against tokens, training FLOPs or seconds
    python tools/plot.py final out/compare/*-s* --x=flops --out=final.png    where the runs ended, and the line of plain ones
    python tools/plot.py depth out/depth_attn --out=depth.png                which layers' values each layer mixes
    python tools/plot.py ponder out/ponder --max_steps=6 --out=ponder.png    loss against steps at inference
    python tools/plot.py steps out/halting_gate --out=steps.png              with halting: how many steps, and for which tokens
    python tools/plot.py text out/halting_gate --start=FILE:a.txt            with halting: a text, shaded by steps

The first two take train.py's folders or log.jsonl files; NAME-s1, NAME-s2, .. are seeds of one run: mean and range are drawn.
"""

import os
import sys
from dataclasses import dataclass
from typing import Optional

import numpy as np
import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # run from anywhere
from engine.checkpoint import change_steps, whole
from configurator import build, read
from engine.errors import UserError, run
from engine.hardware import pick_device
from model import HALTING
from sample import encode_prompt, load_model
from tools.curves import X, curves, final, new_figure
from tools.evaluate import token_arrays
from tools.explain import look


@dataclass
class PlotSettings:
    """what to draw"""
    out: str = 'plot.png'               # file to write: .png, .svg or .pdf
    x: str = 'tokens'                   # curves, final: against 'tokens', 'flops' or 'seconds'
    start: Optional[str] = None         # text to read, or FILE:path (None: the validation set)
    tokens: int = 2048                  # how much of the validation set to read
    max_steps: Optional[int] = None     # ponder: try 0 .. max_steps (None: up to twice as many as trained)
    device: Optional[str] = None        # 'cpu', 'cuda', 'mps' (None: the best there is)

    def __post_init__(self):
        if self.x not in X: raise ValueError(f"x={self.x!r} must be one of {', '.join(map(repr, X))}")
        if self.tokens < 2 or (self.max_steps or 0) < 0: raise ValueError("tokens must be at least 2, max_steps not negative")


def read_text(settings, tokenizer, s):
    """The tokens (n,) to read: --start, or the beginning of the validation set of the checkpoint's data."""
    if s.start is not None: return torch.tensor(encode_prompt(s.start, tokenizer, 10 ** 9))
    return torch.from_numpy(token_arrays(settings['data_dir'], tokenizer)[0][:s.tokens].astype(np.int64))


@torch.inference_mode()
def per_token(model, tokens):
    """For all tokens (n,) but the first, read in windows of block_size: loss in nats, and with halting the steps it took."""
    T, losses, steps = model.config.block_size, [], []
    if len(tokens) < 2: raise UserError("--start: give at least two tokens; of the first nothing is predicted")
    for first in range(0, len(tokens) - 1, T):
        part = tokens[first:first + T + 1].to(model.wte.weight.device)
        losses.append(torch.nn.functional.cross_entropy(model(part[None, :-1])[0][0].float(), part[1:], reduction='none'))
        steps.append(model.steps)
    return torch.cat(losses).cpu(), torch.cat(steps, 1)[0].cpu() if steps[0] is not None else None


def depth(model, tokens, tokenizer, s):
    """Depth-Attention: whose values each layer mixes, as a mean over the text's first window."""
    if not model.config.depth_attn: raise UserError("this model has depth_attn=False: name one with Depth-Attention")
    values = look(model, tokens[:model.config.block_size].to(model.wte.weight.device)).values.mean(0).cpu().numpy()
    n, loops = len(values), bool(values[:, -1].any())
    values = np.where(values > 0, values, np.nan)[:, :n + loops]
    figure, (ax,) = new_figure(size=(0.45 * n + 3, 0.4 * n + 1.8))
    ax.set(xlabel='layer the values come from', ylabel='layer that mixes them', title='Depth-Attention', yticks=range(n),
           xticks=range(n + loops), xticklabels=[*range(n), *(['earlier\nloops'] if loops else [])])
    for (i, j), share in np.ndenumerate(values):
        if n > 12 or not share > 0: continue  # too many to be read, or not a number: it mixes nothing of this layer's
        ax.text(j, i, f"{share:.0%}", ha='center', va='center', size=7, color='white' if share < 0.6 else 'black')
    figure.colorbar(ax.imshow(values, cmap='cividis', vmin=0, vmax=1), label='share of the mixed value')
    return figure


def ponder(model, tokens, tokenizer, s):
    """Loss of the same weights with 0, 1, .. pondering steps."""
    c, trained = model.config, model.config.ponder_steps
    losses, counts = [], range((2 * trained if s.max_steps is None else s.max_steps) + 1)
    if c.ponder == 'none' or c.halting != 'none': raise UserError(f"ponder={c.ponder!r}: name a model that ponders, without halting")
    change_steps(c, counts[-1])  # UserError if it has no weights for that
    for c.ponder_steps in counts: losses.append(per_token(model, tokens)[0].mean().item())
    c.ponder_steps = trained
    figure, (ax,) = new_figure()
    ax.plot(counts, losses, 'o-', color='black')
    ax.axvline(trained, color='grey', linestyle='--')
    ax.set(xlabel="pondering steps (ponder_steps)", ylabel='loss (nats per token)', xticks=counts,
           title=f"ponder={c.ponder!r}, trained with {trained} (dashed), on {len(tokens) - 1:,} tokens")
    return figure


def steps(model, tokens, tokenizer, s):
    """How many tokens take how many steps, and how hard these tokens are."""
    losses, steps = per_token(model, tokens)
    counts = range(1, model.config.ponder_steps + 2)
    figure, (left, right) = new_figure(2, (9, 3.8))
    left.bar(counts, [(steps == n).float().mean().item() * 100 for n in counts], color='0.45', edgecolor='black')
    left.set(xlabel='steps', ylabel='tokens (%)', xticks=counts, title=f"{steps.float().mean():.2f} steps per token")
    seen = [n for n in counts if (steps == n).any()]
    right.boxplot([losses[steps == n].numpy() for n in seen], positions=seen, showfliers=False, showmeans=True,
                  medianprops=dict(color='black'), meanprops=dict(markerfacecolor='black', markeredgecolor='black'))
    right.set(xlabel='steps', ylabel='loss of the token (nats)', title='quartiles, median (line) and mean (triangle)')
    return figure


def text(model, tokens, tokenizer, s):
    """The text, each character on a ground shaded by the passes taken to predict its token."""
    taken, most, lines = per_token(model, tokens)[1].tolist(), model.config.ponder_steps + 1, [[]]
    for token, n in zip(tokens.tolist(), [np.nan, *taken]):
        for char in tokenizer.decode_single_token_bytes(token).decode('utf-8', 'replace'):
            lines[-1].append((char, n))
            if char == '\n' or len(lines[-1]) == 100: lines.append([])
    figure, (ax,) = new_figure(size=(9, 0.17 * len(lines) + 1))
    for i, line in enumerate(lines):
        for j, (char, _) in enumerate(line):
            if char.isprintable(): ax.text(j, i, char, ha='center', va='center', family='monospace', size=8, parse_math=False)
    grid = np.array([[n for _, n in line] + [np.nan] * (100 - len(line)) for line in lines])
    image = ax.imshow(grid, cmap='Oranges', vmin=1, vmax=1.5 * most, aspect='auto')  # never so dark that black is hard to read
    ax.axis('off')
    figure.colorbar(image, ticks=range(1, most + 1), boundaries=np.arange(0.5, most + 1), location='top', aspect=60,
                    label=f"passes taken to predict each token, {np.mean(taken):.2f} in the mean")
    return figure


RUNS = {'curves': curves, 'final': final}
KINDS = {**RUNS, 'depth': depth, 'ponder': ponder, 'steps': steps, 'text': text}


def main(argv):
    given, rest = read(argv, __doc__.strip(), PlotSettings)
    s, (kind, *paths) = build(PlotSettings, given), rest or ['']
    if kind not in KINDS or not paths or kind not in RUNS and len(paths) > 1:
        raise UserError(f"name a picture ({', '.join(KINDS)}), then a checkpoint, or any number of runs for curves and final; see --help")
    ending = os.path.splitext(s.out)[1][1:]
    if ending not in ('png', 'svg', 'pdf'): raise UserError(f"--out={s.out}: a picture is .png, .svg or .pdf")
    if kind in RUNS: figure = RUNS[kind](paths, s)
    else:
        model, tokenizer, settings = load_model(paths[0], pick_device(s.device))
        if kind in ('steps', 'text') and model.mechanism not in HALTING.values():
            raise UserError(f"{paths[0]} has halting={model.config.halting!r}, ponder_steps={model.config.ponder_steps}: "
                            "name one that halts")
        figure = KINDS[kind](model, read_text(settings, tokenizer, s), tokenizer, s)
    os.makedirs(os.path.dirname(s.out) or '.', exist_ok=True)
    with whole(s.out, 'wb') as f: figure.savefig(f, format=ending)


if __name__ == '__main__':
    run(main)
