r"""
Pictures of runs and of a checkpoint. Needs: pip install matplotlib

    python tools/plot.py records docs/runs/addition.jsonl docs/runs/text.jsonl
        what tools/compare.py's runs reached: a panel for each runs.jsonl, a dot for each seed
    python tools/plot.py records docs/runs/text-long.jsonl --x=generated \
        --names=plain_scaled,plain_scaled_2x,plain_scaled_4x,loop_2,loop
        loss on text against what a new token costs, a line through the sizes of plain models (first
        make data/python: python prepare_data.py)
    python tools/plot.py halting docs/runs/halting.jsonl
        right answers against passes, of tools/choices.py --json: a line for each kind of model,
        dotted with the same passes dealt out at random
    python tools/plot.py curves out/compare/*-s* --x=flops
        loss against tokens, training FLOPs or seconds, of train.py's folders
    python tools/plot.py race docs/runs/race.jsonl
        validation loss against steps, of tools/race.py's runs: a line for each seed
    python tools/plot.py depth out/depth_attn
        which layers' values each layer mixes
"""

import math
import os
import re
import shlex
import sys
from dataclasses import dataclass, replace
from typing import Optional

import numpy as np
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.insert(0, ROOT)  # run from anywhere
from configurator import build, only_with, read
from engine.build import without_numbers
from engine.files import UserError, one_line, read_lines, run, whole
from engine.flops import flops_of_new_token
from engine.mechanisms import halts, iterates
from engine.trained import exam_for_prompt, load_model
from sample import encode_prompt
from tools.compare import EXACT, LEARNED, LOSS, configs_of, flops_of, has_flops, is_plain
from tools.compare import loss_of, read_log, seconds_by_step, settings_in
from tools.compare import those_that_judge
from tools.explain import look, validation_tokens
from tools.race import at_best_rate, runs_of

X = {
    'tokens': 'training tokens',
    'flops': 'training FLOPs',
    'seconds': 'seconds of training steps',
    'generated': 'FLOPs of a new token in generation',
}
WITHOUT_MUONS = ", without Muon's own"      # behind training FLOPs, which are the model's
TEXT = 12   # size of all text in points: readable when a picture is shown at half its size

# few colours, apart for colour-blind readers and in grey
INK = '#222222'
GREY = '#8a8a8a'
ORANGE = '#d75f00'      # thinking
BLUE = '#0072b2'
COLOURS = (ORANGE, BLUE, INK, '#009e73', GREY, '#cc79a7', '#56b4e9', '#e69f00', '#b09000',
           '#7a3b00')


@dataclass
class PlotSettings:
    """what to draw"""
    out: Optional[str] = None        # file to write: .png, .svg or .pdf (None: out/KIND.png)
    x: str = 'flops'                 # or 'tokens'; for curves 'seconds', for records 'generated'
    names: Optional[str] = None      # all but depth: only these, with commas between
    start: Optional[str] = None      # depth: text, or FILE:path (None: the validation set)
    device: Optional[str] = None     # 'cpu', 'cuda', 'mps' (None: the best there is)

    def __post_init__(self):
        if self.x not in X:
            raise ValueError(f"x={self.x!r} must be one of {', '.join(map(repr, X))}")

    def draws(self, name):
        """Whether a run of this name is to be drawn."""
        return self.names is None or name in self.names.split(',')

    def check_names(self, names):
        """UserError if one of those asked for is not among the names that were found."""
        for name in (self.names or '').split(','):
            if name and name not in names:
                raise UserError(f"names={self.names}: {name} is in none of these")


def style_of_line(i):
    """Of line number i, for matplotlib: dashed when the colours have been used."""
    return dict(color=COLOURS[i % len(COLOURS)],
                linestyle=('-', '--', '-.')[i // len(COLOURS) % 3])


def new_figure(panels=1, size=(7.5, 4.5), most_columns=2):
    """
    (figure, list of axes) on an opaque white ground, so that it can be read on a dark
    page; UserError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("pictures need matplotlib: pip install matplotlib") from None
    figure = Figure(size, dpi=150, facecolor='white', layout='constrained')
    axes = []
    for i in range(panels):
        columns = min(panels, most_columns)
        axes.append(figure.add_subplot(math.ceil(panels / columns), columns, i + 1))
    for ax in axes:
        ax.spines[['top', 'right']].set_visible(False)
        ax.tick_params(labelsize=TEXT, colors=INK)
        for words in (ax.title, ax.xaxis.label, ax.yaxis.label):
            words.set(size=TEXT, color=INK)
    return figure, axes


def add_legend(figure, order=()):
    """Below all panels, each name of a line once: in this order, or as they come."""
    columns = 4 if len(figure.axes) > 1 else 2
    write_legend(figure, figure.axes, order, loc='outside lower center', ncols=columns)


def write_legend(place, axes, order=(), **options):
    """
    On a figure or an axes. Names are written as they are: to matplotlib a label that starts with _
    is hidden, and what stands between two $ is mathematics.
    """
    handles = {line.get_label(): line for ax in axes for line in ax.lines
               if not re.fullmatch(r'_child\d+', line.get_label())}     # matplotlib's for no label
    names = [name for name in order or handles if name in handles]
    legend = place.legend([handles[name] for name in names], ['name'] * len(names), frameon=False,
                          fontsize=TEXT, **options)
    for text, name in zip(legend.get_texts(), names):
        text.set(text=one_line(name), parse_math=False)


# -------------------------------------------------------------------------------------------------
# Where tools/compare.py's runs ended

# name: what it is called, its colour and mark
PLAIN_WORDS = {
    'plain_scaled': ('one pass', INK, 'o'),
    'plain_scaled_as_loop': ('one pass, trained longer', BLUE, 's'),
    'plain_scaled_4x': ('four times the layers', '#009e73', 'o'),  # a ring, as loop's mark is near
    'loop': ('loop', ORANGE, 'D'),
    'feedback': ('feedback', '#cc79a7', 'P'),
}
MARKS = 'v^<>pPX*hd'    # of the others, first in grey
OTHERS = (GREY, '#56b4e9', '#b09000', '#7a3b00')


def records(paths, s):
    """A panel for each runs.jsonl: right answers where the data is a made task, else the loss."""
    if s.x == 'seconds':
        raise UserError("x=seconds is for curves: records are of several machines")
    panels = [read_records(path, s) for path in paths]
    s.check_names({name for runs in panels for name in runs})
    if s.x == 'generated':
        panels = [in_generation(panels)]
    others = list(dict.fromkeys(name for runs in panels for name in runs
                                if name not in PLAIN_WORDS))
    styles = {name: (name, OTHERS[i // len(MARKS) % len(OTHERS)], MARKS[i % len(MARKS)])
              for i, name in enumerate(others)}
    styles.update(PLAIN_WORDS)
    rows, columns = math.ceil(len(panels) / 2), min(len(panels), 2)
    lines = len({name for runs in panels for name in runs}) // 2    # of the legend
    height = 4.2 * rows + 0.9 + 0.3 * max(0, lines - 2)
    figure, axes = new_figure(len(panels), size=(6 * columns, height))
    for ax, runs in zip(axes, panels):
        draw_records(ax, runs, styles, s.x)
    add_legend(figure, [styles[name][0] for name in (*PLAIN_WORDS, *others)])
    return figure


def read_records(path, s):
    """{name: [record, ..]} of the runs to draw; UserError if there are none."""
    # no record of choices.py or race.py, and no line of train.py's log
    made = [r for r in read_all([path]) if LOSS in r and 'name' in r]
    runs = those_that_judge([r for r in made if s.draws(r['name'])])
    if not runs:
        raise UserError(f"{path}: no run of tools/compare.py with one of these names")
    return runs


def read_all(paths):
    """The records of files that must be there."""
    for path in paths:
        if not os.path.isfile(path):
            raise UserError(f"{path}: no such file")
    return [record for path in paths for record in read_lines(path)]


def in_generation(panels):
    """
    All runs on text, as one panel's, of the seeds that each name has. `generated` is what a new
    token costs. UserError if recipes differ.
    """
    runs, recipes = {}, set()
    on_text = [r for panel in panels for found in panel.values() for r in found if 'right' not in r]
    for record in (r for found in those_that_judge(on_text).values() for r in found):
        s, config = configs_of(args_of(record))
        recipes.add(str(replace(s, seed=0, out_dir='')) + str(config.block_size))
        gpt, name = without_numbers(config), record['name']
        if halts(gpt) or (iterates(gpt) and EXACT not in record):
            raise UserError(f"x=generated: {name} halts, or its record has no {EXACT}: leave it "
                            "out of --names")
        if not has_flops(record, flops_of(config, s)):
            raise UserError(f"x=generated: {name}'s command does not make the model of its record "
                            "here: leave it out of --names")
        runs.setdefault(name, []).append({**record, 'gpt': gpt})
    seeds = [{record['seed'] for record in found} for found in runs.values()]
    shared = set.intersection(*seeds) if seeds else set()
    if len(recipes) != 1 or not shared:
        raise UserError(f"x=generated: {len(recipes)} recipes and {len(shared)} shared seeds of "
                        "runs on text: choose some with --names")
    drawn = {name: [r for r in found if r['seed'] in shared] for name, found in runs.items()}
    for found in drawn.values():
        for record in found:
            record['generated'] = flops_of_new_token(record['gpt'])
    return drawn


def args_of(record):
    """train.py's arguments for a record's run."""
    command = record['command']
    if record['name'].startswith('smear'):      # in docs/runs, made by an edited Feedback
        command = command.replace('config/feedback.py', 'config/smear.py')
    return shlex.split(command)[2:]     # python train.py ..


def draw_records(ax, runs, styles, x):
    """
    A dot for each seed and a mark at the median, against multiples of the least cost drawn. styles:
    {name: (what it is called, its colour, its mark)}.
    """
    drawn = [record for found in runs.values() for record in found]
    answers = all('right' in record for record in drawn)
    costs = {name: np.median([record[x] for record in found]) for name, found in runs.items()}
    least = min(costs.values())
    for name in sorted(runs, key=list(styles).index):
        words, colour, mark = styles[name]
        cost = costs[name] / least
        ends = [100 * r['right'] if answers else loss_of(r) for r in runs[name]]
        front = 2 if name in PLAIN_WORDS else 1
        ax.plot([cost] * len(ends), ends, mark, color=colour, markersize=4, zorder=front)
        size = dict(markersize=10, markeredgecolor='white')
        if name == 'plain_scaled_4x':
            size = dict(markersize=18, markerfacecolor='none', markeredgewidth=2)
        ax.plot(cost, np.median(ends), mark, color=colour, zorder=front, label=words,
                linestyle='none', **size)
        if answers and name in PLAIN_WORDS and name != 'plain_scaled_4x':
            learned = sum(end >= 100 * LEARNED for end in ends)
            ax.annotate(f"{learned} of {len(ends)}", (cost, np.median(ends)), (13, 0),
                        textcoords='offset points', color=colour, size=TEXT, va='center')
    if x == 'generated':
        sizes = [(costs[name] / least, np.median([loss_of(r) for r in runs[name]]))
                 for name in runs if is_plain(name)]
        ax.plot(*zip(*sorted(sizes)), color=INK, linewidth=1.2, zorder=0)
    ax.set_xscale('log', base=2)
    ax.xaxis.set_major_formatter('{x:g}')
    ax.xaxis.set_minor_formatter('')
    ax.margins(x=0.15)
    low, high = ax.get_xlim()
    if high < 2 * low:      # equal costs stand together
        ax.set_xlim(low / 1.5, high * 1.5)
    by_muon = any(record.get('optimizer') == 'muon' for record in drawn)
    without = WITHOUT_MUONS if by_muon and x == 'flops' else ''
    ax.set_xlabel(f"{X[x]}{without}, least = 1")
    if answers:
        task = drawn[0].get('task', 'task')
        counted = ' (n of m: seeds that learned it)' if ax.texts else ''
        ax.set_title(f"{task}{counted}", loc='left', size=TEXT, parse_math=False)
        ax.set_ylabel('right answers (%), better ↑')
        ax.set_ylim(0, 106)
    else:
        ax.set_title('text', loc='left', size=TEXT)
        ax.set_ylabel('nats per byte, better ↓')


# -------------------------------------------------------------------------------------------------
# What tools/choices.py found


def halting(paths, s):
    """A panel for each data set: medians over seeds, against the passes that were taken."""
    made = newest_of(read_all(paths))
    s.check_names({name_of(record['checkpoint']) for record in made})
    of_data = {}    # of each data set, the records to draw
    for record in made:
        if s.draws(name_of(record['checkpoint'])):
            of_data.setdefault(record['data'], []).append(record)
    if not of_data:
        raise UserError(f"{', '.join(paths)}: no line of tools/choices.py")
    panels = {data: lines_of(records) for data, records in of_data.items()}
    names = dict.fromkeys(name for lines in panels.values() for name in lines)
    styles = {name: style_of_line(i) for i, name in enumerate(names)}   # the same in all panels
    size = (1 + 4.2 * len(panels), 4.2)
    figure, axes = new_figure(len(panels), size, most_columns=len(panels))
    titles = [os.path.basename(data) for data in panels]
    for ax, (data, lines) in zip(axes, panels.items()):
        for name, records in lines.items():
            draw_halting(ax, name, records, styles[name])
        ax.set(xlabel='passes per token', ylabel='loss (nats per token), better ↓')
        if of_data[data][0]['answers']:
            ax.set(xlabel='passes per character', ylabel='right answers (%), better ↑')
            ax.set_ylim(0, 106)
        title = data if titles.count(os.path.basename(data)) > 1 else os.path.basename(data)
        ax.set_title(one_line(title), loc='left', size=TEXT, parse_math=False)
    add_legend(figure)
    return figure


def newest_of(records):
    """A record of each checkpoint, rule and data set, with its newest line for each threshold."""
    last = {}
    for record in records:
        if not record.get('checkpoint') or 'data' not in record:    # not of choices.py
            continue
        folder = os.path.normpath(record['checkpoint'])
        record = {**record, 'checkpoint': folder, 'data': os.path.normpath(record['data'])}
        key = folder, record.get('halting'), record['data']
        earlier = last.get(key)
        # the same model, asked the same: not one that was trained anew in the folder
        if earlier and earlier['everyone'] == record['everyone']:
            rows = {row['tau']: row for row in [*earlier['taus'], *record['taus']]}
            record['taus'] = [*rows.values()]
        last[key] = record
    return [*last.values()]


def lines_of(records):
    """{name: its records} of one data set: a checkpoint that was asked with two rules has two."""
    names = names_of([record['checkpoint'] for record in records])
    rules = {}      # of each checkpoint
    for record in records:
        if record['taus']:
            rules.setdefault(record['checkpoint'], set()).add(record.get('halting'))
    lines = {}
    for record in records:
        name = names[record['checkpoint']]
        if not record['taus']:
            name += ', the same for all'
        elif len(rules[record['checkpoint']]) > 1:
            name += f", {record['halting']}"
        lines.setdefault(name, []).append(record)
    return lines


def name_of(folder):
    """What the runs of all seeds are called: of out/loop-s1, loop."""
    return re.sub(r'-s\d+$', '', os.path.basename(folder.rstrip('/')))


def names_of(folders):
    """{folder: name_of(folder), but with its path where runs of two places have that name}."""
    paths = {}
    for folder in folders:
        paths[folder] = os.path.join(os.path.dirname(os.path.normpath(folder)), name_of(folder))
    names = [os.path.basename(path) for path in {*paths.values()}]
    return {folder: path if names.count(name_of(folder)) > 1 else name_of(folder)
            for folder, path in paths.items()}


def draw_halting(ax, name, records, style):
    """
    A line over the thresholds that as many seeds have as any; a dotted one for the same passes at
    random.
    """
    key, place = ('taus', 'tau') if records[0]['taus'] else ('everyone', 'passes')
    scale = 100 if records[0]['answers'] else 1
    found = {}      # of each threshold, or number of passes: the rows of all seeds
    for row in [row for record in records for row in record[key]]:
        found.setdefault(row[place], []).append(row)
    points = []
    most = max(map(len, found.values()))    # medians of other seeds are no part of a line
    for rows in [rows for rows in found.values() if len(rows) == most]:
        chosen = [row.get('chosen', row.get('result')) for row in rows]
        dealt = [np.mean(row['random']) for row in rows if 'random' in row]
        passes = np.median([row['passes'] for row in rows])
        points.append((passes, scale * np.median(chosen), scale * np.median(dealt or chosen)))
    passes, chosen, dealt = zip(*sorted(points))
    ax.plot(passes, chosen, marker='o', markersize=5, label=name, **style)
    if key == 'taus':
        ax.plot(passes, dealt, **{**style, 'linestyle': ':'})


# -------------------------------------------------------------------------------------------------
# Loss against tokens, FLOPs or seconds


def read_run(folder, x):
    """{'loss': [(x, nats per token), ..], 'val_loss': the same} of a run."""
    found = read_log(folder)
    if not any('ms' in r for r in found):
        raise UserError(f"{folder}: no log.jsonl of train.py in it")
    at = places(found, x, folder)
    lines = {key: [(place, r[key]) for place, r in zip(at, found) if r.get(key) is not None]
             for key in ('loss', 'val_loss')}
    if not lines['loss']:
        raise UserError(f"{folder}: no loss in its log is finite: leave it out")
    return lines


def places(found, x, folder):
    """Where on the axis x each of a log's records is."""
    if x == 'tokens':
        return [r['tokens'] for r in found]
    if x == 'flops':
        per_token = [r['flops'] / r['tokens'] for r in found if 'flops' in r]
        if not per_token:
            raise UserError(f"{folder}: its log has no FLOPs: take --x=tokens")
        # ponder_steps may change where a run goes on: each line's new tokens at its own price
        total, tokens, price = 0.0, 0, per_token[0]
        at = []
        for r in found:
            price = r['flops'] / r['tokens'] if 'flops' in r else price
            total += (r['tokens'] - tokens) * price
            tokens = r['tokens']
            at.append(total)
        return at
    seconds = seconds_by_step(found)
    return np.interp([r['step'] for r in found], [*seconds], [*seconds.values()]).tolist()


def curves(paths, s):
    """A line for the training loss of each run, a mark for each validation loss."""
    if s.x == 'generated':
        raise UserError("x=generated is for records")
    figure, (ax,) = new_figure()
    styles = {}     # of a name, which its seeds share
    s.check_names({name_of(path) for path in paths})
    names = names_of([path for path in paths if s.draws(name_of(path))])
    for path, name in names.items():
        known = name in styles
        style = styles.setdefault(name, style_of_line(len(styles)))
        lines = read_run(path, s.x)
        x, losses = zip(*lines['loss'])
        late = sum(place < x[-1] / 20 for place in x)   # the fall from ln V says little
        ax.plot(x[late:], losses[late:], linewidth=1.2, alpha=0.8, label=None if known else name,
                **style)
        if lines['val_loss']:
            ax.plot(*zip(*lines['val_loss']), 'o', color=style['color'], markersize=5)
    settings = [settings_in(path) for path in names]
    if len({of['n_tokens'] for of in settings if 'n_tokens' in of}) > 1:
        print("warning: these runs read other tokens, so their losses cannot be compared: see "
              "val_nats_per_byte in log.jsonl", file=sys.stderr)
    by_muon = any(of.get('optimizer') == 'muon' for of in settings)
    without = WITHOUT_MUONS if by_muon and s.x == 'flops' else ''
    ax.set(xlabel=X[s.x] + without, ylabel='loss (nats per target), better ↓')
    ax.set_title('lines: what training lowers, marks: validation loss', loc='left', size=TEXT)
    write_legend(ax, [ax])
    return figure


def race(paths, s):
    """A line for each seed through its validation losses, each pair at its best rate."""
    runs = {}       # {(name, optimizer): its records}
    for r in runs_of(read_all(paths)):
        runs.setdefault((r['name'], r['optimizer']), []).append(r)
    if not runs:
        raise UserError(f"{', '.join(paths)}: no run of tools/race.py to draw")
    s.check_names({name for name, _ in runs})
    figure, (ax,) = new_figure()
    drawn = [pair for pair in runs if s.draws(pair[0])]
    for i, pair in enumerate(drawn):
        label = ', '.join(pair)
        made = at_best_rate(runs[pair])
        if not made:
            print(f"{label}: not drawn, no seed has judged it at its best rate yet",
                  file=sys.stderr)
        for r in made:
            steps, losses = zip(*((int(step), loss) for step, loss in r['curve'].items()))
            ax.plot(steps, losses, marker='o', linewidth=1.2, markersize=4, label=label,
                    **style_of_line(i))
            label = None        # its seeds share one
    ax.set(xlabel='steps', ylabel='validation loss (nats per token), better ↓')
    write_legend(ax, [ax])
    return figure


# -------------------------------------------------------------------------------------------------
# Which layers Depth-Attention mixes


def depth(paths, s):
    """Whose values each layer mixes, in the last pass, as a mean over a text's first window."""
    if len(paths) > 1:
        raise UserError("depth: name one checkpoint")
    model, tokenizer, settings = load_model(paths[0], s.device)
    if not model.config.depth_attn:
        raise UserError("this model has depth_attn=False: name one with Depth-Attention")
    T = model.config.block_size
    if s.start is None:
        tokens = validation_tokens(T, settings, exam_for_prompt(settings), tokenizer)
    else:
        tokens = encode_prompt(s.start, tokenizer, 10 ** 9)[:T]
    seen = look(model, torch.tensor(tokens, device=model.wte.weight.device))
    shares = seen.values.mean(0).cpu().numpy()          # (layers, layers + 1)
    n = len(shares)
    labels = [str(layer) for layer in range(n)]
    if shares[:, -1].any():
        labels.append('earlier\nloops')
    shares = np.where(shares > 0, shares, np.nan)[:, :len(labels)]  # nothing mixed: no colour

    figure, (ax,) = new_figure(size=(0.55 * n + 2.6, 0.5 * n + 1.8))
    ax.set(xlabel='layer the values come from', ylabel='layer that mixes them',
           title='Depth-Attention', yticks=range(n), xticks=range(len(labels)), xticklabels=labels)
    if n <= 12:  # with more they could not be read
        for (i, j), share in np.ndenumerate(shares):
            if not np.isnan(share):
                ax.text(j, i, f"{share:.0%}", ha='center', va='center', size=TEXT - 2, color=INK)
    image = ax.imshow(shares, cmap='Oranges', vmin=0, vmax=1.4)     # black can be read on all
    bar = figure.colorbar(image, boundaries=np.linspace(0, 1, 101), ticks=[0, 0.5, 1])
    bar.set_label('share of the mixed value', size=TEXT, color=INK)
    bar.outline.set_visible(False)
    return figure


# -------------------------------------------------------------------------------------------------

KINDS = {'records': records, 'halting': halting, 'curves': curves, 'race': race, 'depth': depth}


def main(argv):
    given, rest = read(argv, __doc__, PlotSettings, files=False)    # records may be .json
    s = build(PlotSettings, given)
    kind, *paths = rest or ['']
    if kind not in KINDS or not paths:
        raise UserError(f"name a picture ({', '.join(KINDS)}), then what it is of; see --help")
    only_with('records and curves', kind in ('records', 'curves'), given, 'x')
    only_with('depth', kind == 'depth', given, 'start', 'device')
    only_with('all but depth', kind != 'depth', given, 'names')
    out = s.out or f'out/{kind}.png'
    ending = os.path.splitext(out)[1][1:]
    if ending not in ('png', 'svg', 'pdf'):
        raise UserError(f"--out={out}: a picture is .png, .svg or .pdf")
    figure = KINDS[kind](paths, s)
    os.makedirs(os.path.dirname(out) or '.', exist_ok=True)
    with whole(out, 'wb') as f:
        figure.savefig(f, format=ending)
    print(out)


if __name__ == '__main__':
    run(main)
