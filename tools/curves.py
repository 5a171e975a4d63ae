"""Pictures of training runs, for tools/plot.py: `curves` and `final`."""

import os
import re

import numpy as np

from configurator import build, read

from engine.errors import UserError
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
    """[training loss, validation loss] of a run, each {step: (x, nats per token)}. Of steps taken twice the later hold."""
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
    return [{r['step']: (place(r), r[key]) for _, r in sorted(records.items()) if key in r} for key in ('loss', 'val_loss')]


def by_name(paths, x):
    """{name: [what read_run reads, for each of its seeds]}; the name is the folder's, or its path if others have that name too."""
    runs = {}
    for path in paths: runs.setdefault(re.sub(r'(-s\d+)?(/log\.jsonl|/+)?$', '', path), []).append(read_run(path, x))
    names = [os.path.basename(path) for path in runs]
    return {name if names.count(name) == 1 else path: seeds for name, (path, seeds) in zip(names, runs.items())}


def shared(seeds, part):
    """Places (seeds, n) and losses (seeds, n) of the steps that all seeds of a run have, in training (part 0) or validation (1)."""
    steps = [step for step in seeds[0][part] if all(step in seed[part] for seed in seeds)]
    return np.array([[seed[part][step] for step in steps] for seed in seeds]).reshape(len(seeds), -1, 2).transpose(2, 0, 1)


def curves(paths, s):
    """Loss against tokens, FLOPs or seconds. The legend has the last validation loss, the mean of the seeds, best first."""
    runs, (figure, (ax,)) = by_name(paths, s.x), new_figure()
    ends = {name: shared(seeds, 1)[1] for name, seeds in runs.items()}
    last = {name: losses[:, -1].mean() if losses.size else np.inf for name, losses in ends.items()}
    from matplotlib import colormaps
    for i, name in enumerate(sorted(last, key=last.get)):
        colour = colormaps['viridis'](0.8 * i / max(1, len(runs) - 1))  # from dark to light, so they stay apart in grey
        line = dict(linestyle=('-', '--', '-.', ':')[i % 4], linewidth=1.2)
        mark = dict(marker='osD^vPX<>*'[i % 10], markersize=6, markeredgecolor='black')
        for part, style in enumerate((line, dict(mark, linestyle='none'))):
            at, losses = shared(runs[name], part)
            if not losses.size: continue
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
    """The last validation loss of each run, and the range of its seeds. A line joins the longer runs of a plain one, PLAIN_as_NAME."""
    figure, (ax,) = new_figure(size=(9.5, 4.2))
    points = {}
    for name, seeds in by_name(paths, s.x).items():
        ends = {max(val, default=0) for _, val in seeds}
        if 0 in ends: raise UserError(f"{name}: no validation loss in its log; leave it out")
        if len(ends) > 1: raise UserError(f"{name}: its seeds ended after {min(ends)} to {max(ends)} steps; leave out what is not finished")
        at, losses = shared(seeds, 1)
        points[name] = at[:, -1].mean(), losses[:, -1]
    base = {name: name.partition('_as_')[0] for name in points}
    kinds = [sorted({b for b in base.values() if b.startswith('plain') == plain}) for plain in (True, False)]
    marks = {name: mark for kind in kinds for name, mark in zip(kind, 'osD^vPX<>*dphH8' * len(kind))}
    for name, (x, losses) in sorted(points.items(), key=lambda item: np.mean(item[1][1])):  # the legend: best first
        mean, label = np.mean(losses), name + f", {len(losses)} seeds" * (len(losses) > 1)
        ax.errorbar(x, mean, [[mean - min(losses)], [max(losses) - mean]], label=f"{label}  {mean:.3f}" if name == base[name] else None,
                    marker=marks[base[name]], markersize=7, markerfacecolor='white' if name.startswith('plain') else '0.35',
                    markeredgecolor='black', ecolor='black', elinewidth=0.8, capsize=2, linestyle='none')
    for plain, style in zip(sorted({base[name] for name in points if name != base[name]}), (':', '--', '-.')):
        line = sorted((points[name][0], np.mean(points[name][1])) for name in points if base[name] == plain)
        ax.plot(*zip(*line), color='black', linestyle=style, linewidth=1, zorder=0, label=f'{plain}, trained longer')
    ax.set(xscale='log', xlabel=X[s.x], ylabel='validation loss (nats per token)')
    ax.legend(fontsize=8, frameon=False, loc='center left', bbox_to_anchor=(1, 0.5))
    return figure
