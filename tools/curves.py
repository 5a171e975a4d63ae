"""Pictures of training runs, for tools/plot.py: `curves` and `final`."""

import os
import re
from dataclasses import dataclass

import numpy as np

from configurator import build, read
from engine.errors import UserError
from model import GPTConfig
from tools.compare import read_lines, training_flops
from train import Settings

X = {
    'tokens': 'training tokens',
    'flops': 'training FLOPs',
    'seconds': 'seconds of training steps',
}
MARKS = 'osD^vPX<>*dphH8'


def new_figure(panels=1, size=(7, 4.2)):
    """
    (figure, list of axes) on an opaque white ground, so that it can be read on a dark page;
    UserError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("pictures need matplotlib: pip install matplotlib") from None
    figure = Figure(size, dpi=150, facecolor='white', layout='constrained')
    axes = figure.subplots(1, panels, squeeze=False)
    return figure, list(axes[0])


# -------------------------------------------------------------------------------------------------
# Reading runs


def read_run(path, x):
    """
    {'loss': {step: (x, nats per token)}, 'val_loss': the same} of a run: in training, and on the
    validation set. Of steps taken twice the later hold.
    """
    log = path if os.path.isfile(path) else os.path.join(path, 'log.jsonl')
    latest = {}  # a step's line has its milliseconds, that of an evaluation after it has none
    for r in read_lines(log):
        if 'step' in r and 'tokens' in r:
            latest[r['step'], 'ms' in r] = r
    records = [r for _, r in sorted(latest.items())]
    if not any('ms' in r for r in records):
        raise UserError(f"{log}: no log of train.py")
    run = {'loss': {}, 'val_loss': {}}
    for r, place in zip(records, places(records, x, log)):
        for key, points in run.items():
            if key in r:
                points[r['step']] = (place, r[key])
    return run


def places(records, x, log):
    """Where on the axis x each of a log's records is."""
    if x == 'tokens':
        return [r['tokens'] for r in records]
    if x == 'flops':
        settings = os.path.join(os.path.dirname(log), 'settings.json')
        given, _ = read([settings], '', Settings, GPTConfig)
        per_token = training_flops(build(GPTConfig, given))
        return [r['tokens'] * per_token for r in records]
    trained = [r for r in records if 'ms' in r]
    steps = [r['step'] for r in trained]
    each = np.array([r['ms'] / 1e3 for r in trained])  # mean of the steps since the line before
    seconds = np.cumsum(each * np.diff(steps, prepend=0))
    return np.interp([r['step'] for r in records], steps, seconds).tolist()


def by_name(paths, x):
    """
    {name: [what read_run reads, for each of its seeds]}; the name is the folder's, or its path if
    others have that name too.
    """
    runs = {}
    for path in paths:
        without_seed = re.sub(r'(-s\d+)?(/log\.jsonl|/+)?$', '', path)
        runs.setdefault(without_seed, []).append(read_run(path, x))
    names = [os.path.basename(path) for path in runs]
    named = {}
    for name, (path, seeds) in zip(names, runs.items()):
        alone = names.count(name) == 1
        named[name if alone else path] = seeds
    return named


def shared(seeds, key):
    """
    (x, losses), both (seeds, n), of the steps that all seeds of a run have. key: 'loss' or
    'val_loss'.
    """
    steps = [step for step in seeds[0][key] if all(step in seed[key] for seed in seeds)]
    points = [[seed[key][step] for step in steps] for seed in seeds]
    points = np.array(points).reshape(len(seeds), -1, 2)
    return points[..., 0], points[..., 1]


def label_of(name, seeds):
    """A legend's text. A folder's name may hold $, TeX's sign, or begin with _, which hides it."""
    name = name.replace('$', r'\$')
    if name.startswith('_'):
        name = f' {name}'
    return name if seeds == 1 else f"{name}, {seeds} seeds"


# -------------------------------------------------------------------------------------------------
# Loss against tokens, FLOPs or seconds


def curves(paths, s):
    """The legend has the last validation loss, the mean of the seeds, best first."""
    runs = by_name(paths, s.x)
    figure, (ax,) = new_figure()
    from matplotlib import colormaps
    last = {name: last_loss(seeds) for name, seeds in runs.items()}
    for i, name in enumerate(sorted(last, key=last.get)):
        # from dark to light, so they stay apart in grey
        colour = colormaps['viridis'](0.8 * i / max(1, len(runs) - 1))
        line = dict(linestyle=('-', '--', '-.', ':')[i % 4], linewidth=1.2)
        mark = dict(marker=MARKS[i % 10], markersize=6, markeredgecolor='black')
        draw_curve(ax, *shared(runs[name], 'loss'), colour, line)
        draw_curve(ax, *shared(runs[name], 'val_loss'), colour, dict(mark, linestyle='none'))
        label = label_of(name, len(runs[name]))
        if last[name] < np.inf:
            label += f"  {last[name]:.3f}"
        ax.plot([], [], label=label, color=colour, **mark, **line)
    ax.set(xscale='log', xlabel=X[s.x], ylabel='loss (nats per token)',
           title='training loss (lines), validation loss (marks)')
    ax.legend(fontsize=8, frameon=False)
    return figure


def last_loss(seeds):
    """The mean of the seeds' last validation losses; infinite if there is none."""
    _, losses = shared(seeds, 'val_loss')
    return losses[:, -1].mean() if losses.size else np.inf


def draw_curve(ax, x, losses, colour, style):
    """The mean of the seeds, in their range; x and losses (seeds, n)."""
    if not losses.size:
        return
    x = x.mean(0)
    late = x >= x[-1] / 20  # the fall from ln V at the start says little
    x, losses = x[late], losses[:, late]
    ax.plot(x, losses.mean(0), color=colour, **style)
    if len(losses) > 1:
        ax.fill_between(x, losses.min(0), losses.max(0), color=colour, alpha=0.2, linewidth=0)


# -------------------------------------------------------------------------------------------------
# Where the runs ended


@dataclass
class End:
    """Where the runs of a name ended."""
    x: float
    losses: list    # validation losses of its seeds
    base: str       # of a run PLAIN_as_NAME: PLAIN, of others their own name

    @property
    def mean(self):
        return np.mean(self.losses)


def read_ends(paths, x):
    """{name: End}; UserError for a run without a validation loss, or with seeds that go on."""
    ends = {}
    for name, seeds in by_name(paths, x).items():
        steps = {max(seed['val_loss'], default=0) for seed in seeds}
        if 0 in steps:
            raise UserError(f"{name}: no validation loss in its log; leave it out")
        if len(steps) > 1:
            raise UserError(f"{name}: its seeds ended after {min(steps)} to {max(steps)} steps; "
                            "leave out what is not finished")
        at, losses = shared(seeds, 'val_loss')
        ends[name] = End(at[:, -1].mean(), losses[:, -1], name.partition('_as_')[0])
    return ends


def final(paths, s):
    """
    The last validation loss of each run, and the range of its seeds. A line joins the longer runs
    of a plain one, PLAIN_as_NAME.
    """
    figure, (ax,) = new_figure(size=(9.5, 4.2))
    ends = read_ends(paths, s.x)
    marks = marks_of({end.base for end in ends.values()})
    for name in sorted(ends, key=lambda name: ends[name].mean):  # the legend: best first
        draw_end(ax, name, ends[name], marks)
    longer = {end.base for name, end in ends.items() if name != end.base}
    for plain, style in zip(sorted(longer), (':', '--', '-.')):
        points = sorted((end.x, end.mean) for end in ends.values() if end.base == plain)
        ax.plot(*zip(*points), color='black', linestyle=style, linewidth=1, zorder=0,
                label=f'{label_of(plain, 1)}, trained longer')
    ax.set(xscale='log', xlabel=X[s.x], ylabel='validation loss (nats per token)')
    ax.legend(fontsize=8, frameon=False, loc='center left', bbox_to_anchor=(1, 0.5))
    return figure


def marks_of(names):
    """{name: mark}; plain runs, whose marks are white, may have the same marks as others."""
    plain = sorted(name for name in names if name.startswith('plain'))
    others = sorted(name for name in names if not name.startswith('plain'))
    marks = {}
    for kind in (plain, others):
        for i, name in enumerate(kind):
            marks[name] = MARKS[i % len(MARKS)]
    return marks


def draw_end(ax, name, end, marks):
    """A mark at the mean, a bar over the range of the seeds; the legend has no PLAIN_as_NAME."""
    label = None
    if name == end.base:
        label = f"{label_of(name, len(end.losses))}  {end.mean:.3f}"
    face = 'white' if name.startswith('plain') else '0.35'
    below, above = end.mean - min(end.losses), max(end.losses) - end.mean
    ax.errorbar(end.x, end.mean, [[below], [above]], label=label, marker=marks[end.base],
                markersize=7, markerfacecolor=face, markeredgecolor='black', ecolor='black',
                elinewidth=0.8, capsize=2, linestyle='none')
