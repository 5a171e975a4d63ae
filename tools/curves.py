"""Pictures of training runs, for tools/plot.py: `curves` and `final`."""

import os
import re

import numpy as np

from configurator import UserError, build, read
from model import GPTConfig
from tools.compare import read_lines, training_flops
from train import Settings

X = {'tokens': 'training tokens', 'flops': 'training FLOPs', 'seconds': 'seconds of training steps'}


def new_figure(panels=1, size=(7, 4.2)):
    """(figure, list of axes) on an opaque white ground, so that it can be read on a dark page; UserError without matplotlib."""
    try: from matplotlib.figure import Figure
    except ImportError: raise UserError("pictures need matplotlib: pip install matplotlib") from None
    figure = Figure(size, dpi=150, facecolor='white', layout='constrained')
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def read_run(path, x):
    """[training loss, validation loss] of a run, each {x: nats per token}. Of steps taken twice the later hold."""
    log = path if os.path.isfile(path) else os.path.join(path, 'log.jsonl')
    records = {(r['step'], 'ms' in r): r for r in read_lines(log) if 'step' in r}
    steps = sorted(step for step, trained in records if trained)
    if not steps: raise UserError(f"{log}: no log of train.py")
    if x == 'flops':
        settings = os.path.join(os.path.dirname(log), 'settings.json')
        per_token = training_flops(build(GPTConfig, read([settings], '', Settings, GPTConfig)[0]))
    seconds = np.cumsum([records[step, True]['ms'] / 1e3 * n for step, n in zip(steps, np.diff(steps, prepend=0))])
    place = {'tokens': lambda r: r['tokens'], 'flops': lambda r: r['tokens'] * per_token,
             'seconds': lambda r: float(np.interp(r['step'], steps, seconds))}[x]
    return [{place(r): r[key] for _, r in sorted(records.items()) if key in r} for key in ('loss', 'val_loss')]


def by_name(paths, x):
    """{name: [what read_run reads, for each of its seeds]}"""
    runs = {}
    for path in paths:
        runs.setdefault(os.path.basename(re.sub(r'(-s\d+)?(/log\.jsonl|/+)?$', '', path)), []).append(read_run(path, x))
    return runs


def curves(paths, s):
    """Loss against tokens, FLOPs or seconds. The legend has the last validation loss, the mean of the seeds, best first."""
    runs, (figure, (ax,)) = by_name(paths, s.x), new_figure()
    last = {name: np.mean([list(val.values())[-1] if val else np.inf for _, val in seeds]) for name, seeds in runs.items()}
    from matplotlib import colormaps
    for i, name in enumerate(sorted(last, key=last.get)):
        colour = colormaps['viridis'](0.8 * i / max(1, len(runs) - 1))  # from dark to light, so they stay apart in grey
        line = dict(linestyle=('-', '--', '-.', ':')[i % 4], linewidth=1.2)
        mark = dict(marker='osD^vPX<>*'[i % 10], markersize=6, markeredgecolor='black')
        for part, style in enumerate((line, dict(mark, linestyle='none'))):
            n = min(len(seed[part]) for seed in runs[name])
            if not n: continue
            at, losses = (np.array([[*f(seed[part])][:n] for seed in runs[name]]) for f in (dict.keys, dict.values))
            late = at.mean(0) >= at.mean(0)[-1] / 20        # the fall from ln V at the start says little
            at, losses = at.mean(0)[late], losses[:, late]
            ax.plot(at, losses.mean(0), color=colour, **style)
            if len(losses) > 1: ax.fill_between(at, losses.min(0), losses.max(0), color=colour, alpha=0.2, linewidth=0)
        label = name + f", {len(runs[name])} seeds" * (len(runs[name]) > 1) + f"  {last[name]:.3f}" * bool(last[name] < np.inf)
        ax.plot([], [], label=label, color=colour, **mark, **line)
    ax.set(xscale='log', xlabel=X[s.x], ylabel='loss (nats per token)', title='training loss (lines), validation loss (marks)')
    ax.legend(fontsize=8, frameon=False)
    return figure


def final(paths, s):
    """The last validation loss of each run, and the range of its seeds. A line joins plain_scaled and its longer runs."""
    figure, (ax,) = new_figure(size=(9.5, 4.2))
    points = {}
    for name, seeds in by_name(paths, s.x).items():
        ends = [list(val.items())[-1] for _, val in seeds if val]
        if not ends: raise UserError(f"{name}: no validation loss in its log; leave it out")
        points[name] = np.mean([x for x, _ in ends]), [loss for _, loss in ends]
    order = sorted(points, key=lambda name: np.mean(points[name][1]))
    for i, name in enumerate(order):
        (x, losses), plain = points[name], name.startswith('plain')
        mean, label = np.mean(losses), name + f", {len(losses)} seeds" * (len(losses) > 1)
        ax.errorbar(x, mean, [[mean - min(losses)], [max(losses) - mean]], label=f"{label}  {mean:.3f}", linestyle='none',
                    marker='osD^vPX<>*dphH8'[i % 15], markersize=7, markerfacecolor='white' if plain else '0.35',
                    markeredgecolor='black', ecolor='black', elinewidth=0.8, capsize=2)
    line = sorted((points[name][0], np.mean(points[name][1])) for name in points if name.startswith('plain_scaled'))
    if len(line) > 1: ax.plot(*zip(*line), color='black', linestyle=':', linewidth=1, zorder=0, label='plain_scaled, trained longer')
    ax.set(xscale='log', xlabel=X[s.x], ylabel='validation loss (nats per token)')
    ax.legend(fontsize=8, frameon=False, loc='center left', bbox_to_anchor=(1, 0.5))
    return figure
