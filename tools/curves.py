"""Pictures of training runs, for tools/plot.py: `curves` and `final`."""

import math
import os
import re
from dataclasses import dataclass

import numpy as np

from configurator import build, read
from engine.files import UserError
from engine.palette import GREY, INK, LINES, ORANGE
from model import GPTConfig
from tools.compare import read_lines, training_flops
from train import Settings

X = {
    'tokens': 'training tokens',
    'flops': 'training FLOPs',
    'seconds': 'seconds of training steps',
}
STYLES = ('-', '--', ':', '-.')     # of the second four lines, the third, ..
TEXT = 12   # size of all text in points: readable when a picture is shown at half its size


def new_figure(panels=1, size=(7.5, 4.5)):
    """
    (figure, list of axes, two in a row) on an opaque white ground, so that it can be read on a dark
    page; UserError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("pictures need matplotlib: pip install matplotlib") from None
    figure = Figure(size, dpi=150, facecolor='white', layout='constrained')
    axes = []
    for i in range(panels):
        columns = min(panels, 2)
        axes.append(figure.add_subplot(math.ceil(panels / columns), columns, i + 1))
    for ax in axes:
        ax.spines[['top', 'right']].set_visible(False)
        ax.tick_params(labelsize=TEXT, colors=INK)
        ax.set_title('', loc='left', size=TEXT, color=INK)
        for words in (ax.title, ax.xaxis.label, ax.yaxis.label):
            words.set(size=TEXT, color=INK)
    return figure, axes


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


def titled(ax, title, seeds):
    """The title, and of how many seeds the means are; seeds: a number for each run."""
    least, most = min(seeds), max(seeds)
    if most > 1:
        number = f"{most}" if least == most else f"{least} to {most}"
        title += f" (mean and range of {number} seeds)"
    ax.set_title(title, loc='left')


# -------------------------------------------------------------------------------------------------
# Loss against tokens, FLOPs or seconds


def curves(paths, s):
    """At a line's end: its name, and the last validation loss, the mean of the seeds."""
    runs = by_name(paths, s.x)
    figure, (ax,) = new_figure()
    last = {name: last_loss(seeds) for name, seeds in runs.items()}
    labels = []
    for i, name in enumerate(sorted(last, key=last.get)):
        seeds = runs[name]
        colour = LINES[i % len(LINES)]
        line = dict(linestyle=STYLES[i // len(LINES) % len(STYLES)], linewidth=1.5)
        mark = dict(linestyle='none', marker='o', markersize=5)
        draw_curve(ax, *shared(seeds, 'loss'), colour, line)
        draw_curve(ax, *shared(seeds, 'val_loss'), colour, mark)
        words = name
        if last[name] < np.inf:
            words += f"  {last[name]:.3f}"
        labels.append(Label(*ax.lines[-1].get_xydata()[-1], words, colour))
    ax.set(xscale='log', xlabel=X[s.x], ylabel='loss (nats per token)')
    seeds = [len(seeds) for seeds in runs.values()]
    titled(ax, 'lines: training loss, marks: validation loss', seeds)
    label_ends(ax, labels)
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
    losses: list    # validation losses of its seeds, or their shares of right answers
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
    of a plain one, PLAIN_as_NAME; its label stands at the last of them.
    """
    figure, (ax,) = new_figure(size=(9, 5))
    ends = read_ends(paths, s.x)
    ax.set(xlabel=X[s.x], ylabel='validation loss (nats per token)')
    titled(ax, 'validation loss at the end', [len(end.losses) for end in ends.values()])
    draw_ends(ax, ends)
    return figure


def draw_ends(ax, ends):
    """
    A mark for each End, a line along the longer runs of each plain one, and their labels; last of
    all, since labels need to know how large the axes are.
    """
    labels = []
    for name, end in ends.items():
        draw_end(ax, name, end)
        if name == end.base:
            labels.append(Label(end.x, end.mean, name))
    longer = {end.base for name, end in ends.items() if name != end.base}
    for plain, style in zip(sorted(longer), (':', '--', '-.')):
        points = sorted((end.x, end.mean) for end in ends.values() if end.base == plain)
        ax.plot(*zip(*points), color=INK, linestyle=style, linewidth=1.2, zorder=0)
        labels.append(Label(*points[-1], f"{plain},\ntrained longer"))
    ax.set_xscale('log')
    ax.margins(0.12)
    label_points(ax, labels)


def records(paths, s):
    """
    What tools/compare.py wrote down, a panel for each runs.jsonl: right answers where the data is a
    made task, else the validation loss.
    """
    rows, columns = math.ceil(len(paths) / 2), min(len(paths), 2)
    figure, axes = new_figure(len(paths), size=(7 * columns, 4.6 * rows))
    panels = [(ax, read_panel(ax, path, s)) for ax, path in zip(axes, paths)]
    for ax, ends in panels:
        draw_ends(ax, ends)
    return figure


def read_panel(ax, path, s):
    """A panel's title and x axis; returns its {name: End}. UserError where the file has none."""
    found = read_lines(path)
    if s.names is not None:
        found = [r for r in found if r.get('name') in s.names.split(',')]
    counts_answers = all('right' in r for r in found)
    try:
        if counts_answers:
            ends = ends_of_records(found, s.x, 'right', scale=100)
        else:
            ends = ends_of_records(found, s.x, 'val_nats_per_byte', scale=1)
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: a line is not a run's record of tools/compare.py") from None
    if not ends:
        raise UserError(f"{path}: no run with one of these names")

    title = 'text: nats per byte'
    if counts_answers:
        title = f"{found[0].get('task', 'task')}: right answers (%)"
    titled(ax, title, [len(end.losses) for end in ends.values()])
    ax.set_xlabel(X[s.x])
    return ends


def ends_of_records(found, x, key, scale):
    """{name: End} of records of compare.py; what ended is record[key] times `scale`."""
    runs = {}
    for r in found:
        runs.setdefault(r['name'], []).append(r)
    ends = {}
    for name, seeds in runs.items():
        place = np.mean([r[x] for r in seeds])
        ends[name] = End(place, [scale * r[key] for r in seeds], name.partition('_as_')[0])
    return ends


def draw_end(ax, name, end):
    """A mark at the mean, white where nothing is added, and a bar over the range of the seeds."""
    plain = name.startswith('plain') and '+' not in name
    edge = INK if plain else ORANGE
    inside = 'white' if plain else ORANGE
    below, above = end.mean - min(end.losses), max(end.losses) - end.mean
    ax.errorbar(end.x, end.mean, [[below], [above]], color=edge, elinewidth=1.5, capsize=3,
                marker='o', markersize=8, markerfacecolor=inside, linestyle='none')


# -------------------------------------------------------------------------------------------------
# Labels, in the place of a legend


@dataclass
class Label:
    """Words beside a point of the picture."""
    x: float
    y: float
    text: str
    colour: str = INK


LEADER = dict(arrowstyle='-', color=GREY, linewidth=0.7)   # from a label to its point

# where a label may stand, in points from its point: right, left, above, below, then further away
NEAR, FAR = 9, 24
PLACES = [(NEAR, 0), (-NEAR, 0), (0, NEAR), (0, -NEAR)]
for distance in range(8, 120, 8):
    PLACES += [(FAR, distance), (FAR, -distance), (-FAR, distance), (-FAR, -distance)]


def label_ends(ax, labels):
    """The labels right of the axes, each as near to the height of its line as the others let it."""
    ax.figure.draw_without_rendering()      # only now places in the axes have a height in pixels
    line_height = 1.25 * TEXT / 72 * ax.figure.dpi / ax.bbox.height     # as a share of the axes
    places = ax.transAxes.inverted().transform(ax.transData.transform([(a.x, a.y) for a in labels]))
    heights = spread([y for _, y in places], line_height)
    for label, (x, y), height in zip(labels, places, heights):
        ax.annotate(label.text, (x, y), (1.03, height), 'axes fraction', 'axes fraction',
                    color=label.colour, size=TEXT, va='center', annotation_clip=False,
                    parse_math=False,   # a folder's name may hold $, TeX's sign
                    arrowprops=dict(LEADER, relpos=(0, 0.5)))


def spread(heights, gap):
    """These heights, shares of the axes, moved up until they are `gap` apart; none below 0."""
    moved = list(heights)
    lowest = 0.0
    for i in np.argsort(heights, kind='stable'):
        moved[i] = max(moved[i], lowest)
        lowest = moved[i] + gap
    return moved


def label_points(ax, labels):
    """Each label in the first place beside its point that hides neither marks nor other labels."""
    ax.figure.draw_without_rendering()
    taken = drawn_boxes(ax)
    for label in labels:
        for offset in PLACES:
            words = put(ax, label, offset)
            box = box_of(words)
            inside = ax.bbox.contains(*box.min) and ax.bbox.contains(*box.max)
            if inside and not any(box.overlaps(other) for other in taken):
                break
            words.remove()
        else:
            words = put(ax, label, PLACES[0])   # a crowd: over others rather than not at all
        taken.append(box_of(words))


def put(ax, label, offset):
    """The label at `offset` points from its point, joined to it if it is far; the annotation."""
    x, y = np.sign(offset)
    ha = {-1: 'right', 0: 'center', 1: 'left'}[x]
    va = 'center'
    if x == 0:
        va = 'bottom' if y > 0 else 'top'
    leader = None
    if abs(offset[0]) == FAR:
        leader = dict(LEADER, relpos=(0 if x > 0 else 1, 0.5))
    return ax.annotate(label.text, (label.x, label.y), offset, textcoords='offset points',
                       size=TEXT, color=label.colour, ha=ha, va=va, arrowprops=leader,
                       in_layout=False, parse_math=False)


def box_of(words):
    """The box of an annotation's words, without its line, in pixels."""
    from matplotlib.text import Text
    words.get_window_extent()       # only now the words know where they are
    return Text.get_window_extent(words)


def drawn_boxes(ax):
    """Small boxes along all lines and around all marks, in pixels."""
    from matplotlib.transforms import Bbox
    boxes = []
    for line in ax.lines:
        x, y = ax.transData.transform(line.get_xydata()).T
        n = len(x)
        radius = line.get_markersize() if line.get_marker() != 'None' else 1
        at = np.linspace(0, n - 1, 60 * (n - 1) + 1)
        for point in zip(np.interp(at, range(n), x), np.interp(at, range(n), y)):
            boxes.append(Bbox([np.subtract(point, radius), np.add(point, radius)]))
    return boxes
