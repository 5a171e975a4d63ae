"""tools/plot.py: what is drawn are the numbers of the run or the checkpoint."""

import json
import os
import sys
from itertools import combinations

import pytest
import torch
from conftest import make, save

from engine.files import UserError
from engine.palette import SHADES, shade, terminal_shade
from engine.shards import get_tokenizer, open_shard
from model import GPT, GPTConfig
from tools import plot
from tools.curves import box_of, spread
from tools.plot import PlotSettings

pytest.importorskip('matplotlib')
SIZE = dict(vocab_size=320, n_tokens=257, block_size=24, n_layer=5, n_head=4, n_embd=32,
            mlp_hidden=48)


def write_run(folder, *losses, **settings):
    """
    A log with 10 ms per step, a line every 2 steps of 64 tokens, and an evaluation after the last,
    whose loss is lower by 0.5.
    """
    os.makedirs(folder)
    lines = []
    for i, loss in enumerate(losses, 1):
        lines.append(dict(step=2 * i, tokens=128 * i, loss=loss, ms=10))
    last = lines[-1]
    lines.append(dict(step=last['step'], tokens=last['tokens'], val_loss=last['loss'] - 0.5))
    with open(folder / 'log.jsonl', 'w') as f:
        for line in lines:
            f.write(json.dumps(line) + '\n')
    with open(folder / 'settings.json', 'w') as f:
        json.dump({**SIZE, **settings}, f)


def drawn(figure):
    """[(x, y)] of the lines that hold points."""
    lines = figure.axes[0].lines
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in lines
            if len(line.get_xdata())]


def labels(figure):
    """Words beside points and lines: {text: the point (x, y) that they name}."""
    return {text.get_text(): text.xy for text in figure.axes[0].texts}


def curves(paths, **settings):
    return plot.curves([str(path) for path in paths], PlotSettings(**settings))


def final(paths, **settings):
    return plot.final([str(path) for path in paths], PlotSettings(**settings))


# -------------------------------------------------------------------------------------------------
# Runs


@pytest.fixture
def runs(tmp_path):
    """Two seeds of one run, and a better run that was resumed after step 2."""
    write_run(tmp_path / 'loop-s1', 5, 4, 3, ponder='loop')
    write_run(tmp_path / 'loop-s2', 5, 4, 2, ponder='loop')
    write_run(tmp_path / 'plain', 5, 3, 2)
    with open(tmp_path / 'plain' / 'log.jsonl', 'a') as f:  # step 4 once more: this line counts
        f.write(json.dumps(dict(step=4, tokens=256, loss=2.5, ms=20)) + '\n')
    return [tmp_path / name for name in ('loop-s1', 'loop-s2', 'plain/log.jsonl')]


def test_curves_against_tokens(runs):
    figure = curves(runs)
    # the plain run is better (1.5 against the mean of 2.5 and 1.5), so it comes first
    assert drawn(figure) == [
        ([128, 256, 384], [5, 2.5, 2]),
        ([384], [1.5]),
        ([128, 256, 384], [5, 4, 2.5]),
        ([384], [2.0]),
    ]
    ax = figure.axes[0]
    assert list(labels(figure)) == ['plain  1.500', 'loop  2.000']
    assert '1 to 2 seeds' in ax.get_title(loc='left')
    assert ax.get_xlabel() == 'training tokens'
    assert ax.get_ylabel() == 'loss (nats per token)'
    assert figure.get_facecolor() == (1, 1, 1, 1)


def test_curves_against_seconds(runs):
    training, validation = drawn(curves(runs[2:], x='seconds'))
    assert training[0] == pytest.approx([0.02, 0.06, 0.08])
    assert validation[0] == pytest.approx([0.08])


def test_curves_against_flops(runs):
    lines = drawn(curves(runs, x='flops'))
    for i, settings in (0, {}), (2, dict(ponder='loop')):
        per_token = GPT(GPTConfig(**SIZE, **settings)).flops_per_token()
        assert lines[i][0] == pytest.approx([n * per_token for n in (128, 256, 384)])


def test_seeds_share_steps_and_two_folders_of_one_name_are_two_runs(runs, tmp_path):
    write_run(tmp_path / 'more' / 'loop-s1', 5, 4, 3, 1, ponder='loop')
    write_run(tmp_path / 'more' / 'loop-s2', 5, 3, ponder='loop')
    more = [*runs[:2], tmp_path / 'more' / 'loop-s1', tmp_path / 'more' / 'loop-s2']
    assert drawn(curves(more))[2:] == [([128, 256], [5, 3.5])]
    assert drawn(curves([more[3], more[2]])) == [([128, 256], [5, 3.5])]
    with pytest.raises(UserError, match='more/loop: its seeds ended after 4 to 8 steps'):
        final(more)


def test_curves_of_a_file_that_is_no_log(tmp_path):
    (tmp_path / 'odd').write_bytes(b'\xff\n5\n')
    with pytest.raises(UserError, match='no log'):
        curves([tmp_path / 'odd'])


def test_curves_are_written_as_png(runs, tmp_path):
    plot.main(['curves', *map(str, runs), f'--out={tmp_path}/c.png'])
    assert (tmp_path / 'c.png').read_bytes().startswith(b'\x89PNG')


def test_the_first_twentieth_of_a_run_is_left_out(tmp_path):
    write_run(tmp_path / 'a', *[5.0] * 40)
    training, _ = drawn(curves([tmp_path / 'a']))
    assert training[0] == [128 * i for i in range(2, 41)]


def test_final(tmp_path):
    write_run(tmp_path / 'loop-s1', 5, 4, 3.5, ponder='loop')
    write_run(tmp_path / 'loop-s2', 5, 4, 1.5, ponder='loop')
    write_run(tmp_path / 'plain_scaled', 5, 3, 3)
    write_run(tmp_path / 'plain_scaled_as_loop', 5, 3, 2, 2)
    write_run(tmp_path / 'plain', 5, 3, 3.25)
    write_run(tmp_path / 'plain_as_pause', 5, 3, 2, 2, 1.75)
    figure = final(tmp_path.iterdir())
    assert labels(figure) == {
        'loop': (384, 2.0),
        'plain': (384, 2.75),
        'plain,\ntrained longer': (640, 1.25),
        'plain_scaled': (384, 2.5),
        'plain_scaled,\ntrained longer': (512, 1.5),
    }
    lines = {}
    for line in figure.axes[0].lines:
        lines[line.get_linestyle()] = list(zip(*line.get_data()))
    assert lines[':'] == [(384, 2.75), (640, 1.25)]
    assert lines['--'] == [(384, 2.5), (512, 1.5)]
    points = {point for x, y in drawn(figure) for point in zip(x, y)}
    mean_and_ends_of_loop = {(384, 2.0), (384, 1.0), (384, 3.0)}
    assert points >= {*mean_and_ends_of_loop, (384, 2.5), (512, 1.5)}


def test_labels_hide_neither_each_other_nor_points(tmp_path):
    for i in range(12):
        write_run(tmp_path / f'mechanism_{i}', 5, 4, 3 + 0.01 * i, ponder='loop')
    figure = final(tmp_path.iterdir())
    ax = figure.axes[0]
    boxes = [box_of(text) for text in ax.texts]
    assert len(boxes) == 12
    for box, other in combinations(boxes, 2):
        assert not box.overlaps(other)
    for line in ax.lines:
        for point in ax.transData.transform(line.get_xydata()):
            assert not any(box.contains(*point) for box in boxes)


def test_labels_at_ends_are_as_near_as_the_others_let_them():
    assert spread([0.5, 0.2, 0.55, 0.9], 0.1) == pytest.approx([0.5, 0.2, 0.6, 0.9])
    assert spread([-0.3, -0.3], 0.1) == pytest.approx([0, 0.1])


def test_a_terminal_shows_the_colours_of_the_pictures():
    for number, colour in SHADES.items():
        assert colour == colour_of_terminal(number)
    assert [shade(n) for n in (1, 6, 9)] == ['#eeeeee', '#d75f00', '#d75f00']
    assert [terminal_shade(n) for n in (1, 6, 9)] == [255, 166, 166]


def colour_of_terminal(number):
    """Colours 16 to 231 are a cube of six levels each, 232 to 255 a scale of greys."""
    if number >= 232:
        level = 8 + 10 * (number - 232)
        return '#' + f'{level:02x}' * 3
    levels = (0, 95, 135, 175, 215, 255)
    n = number - 16
    return ''.join(['#', *(f'{levels[i]:02x}' for i in (n // 36, n // 6 % 6, n % 6))])


def write_records(path, *records):
    lines = [json.dumps(dict(zip(('name', 'flops', 'val_nats_per_byte', 'right'), record)))
             for record in records]
    path.write_text('\n'.join(lines))
    return str(path)


def test_records_of_a_task_and_of_a_text(tmp_path):
    task = write_records(tmp_path / 'task.jsonl', ('plain', 10.0, 3, 0.25), ('loop', 40.0, 2, 0.5),
                         ('loop', 40.0, 2, 1.0), ('plain_as_loop', 40.0, 3, 0.375))
    text = write_records(tmp_path / 'text.jsonl', ('plain', 10.0, 3), ('loop', 40.0, 2))
    figure = plot.records([task, text], plot.PlotSettings(x='flops'))
    assert labels(figure) == {
        'plain': (10, 25),
        'loop': (40, 75),
        'plain,\ntrained longer': (40, 37.5),
    }
    left, right = figure.axes
    assert 'right answers' in left.get_title('left') and '1 to 2 seeds' in left.get_title('left')
    assert 'nats per byte' in right.get_title('left')
    assert {point for line in right.lines for point in line.get_ydata()} >= {2, 3}

    figure = plot.records([task], plot.PlotSettings(x='flops', names='loop'))
    assert labels(figure) == {'loop': (40, 75)}


def test_records_that_are_none(tmp_path):
    task = write_records(tmp_path / 'task.jsonl', ('plain', 10.0, 3, 0.25))
    for path, names in ((task, 'loop'), (str(tmp_path / 'gone.jsonl'), None)):
        with pytest.raises(UserError, match='no run'):
            plot.records([path], plot.PlotSettings(names=names, x='flops'))
    (tmp_path / 'other.jsonl').write_text('{"name": "plain"}')
    with pytest.raises(UserError, match='not a run'):
        plot.records([str(tmp_path / 'other.jsonl')], plot.PlotSettings(x='flops'))


def test_final_without_a_log(tmp_path):
    write_run(tmp_path / 'new', 5)
    os.remove(tmp_path / 'new' / 'log.jsonl')
    (tmp_path / 'runs.jsonl').write_text('{"name": "loop", "steps": 3}\n')
    for path in ('new', 'runs.jsonl'):
        with pytest.raises(UserError, match='no log'):
            final([tmp_path / path])


# -------------------------------------------------------------------------------------------------
# Checkpoints


@pytest.fixture
def folder(tmp_path, small_data):
    """Makes a checkpoint with random weights."""
    def write(model):
        return save(tmp_path / 'ckpt', model, data_dir=small_data)
    return write


def test_depth():
    model = make(**SIZE, depth_attn=True, depth_mode='uniform', depth_stride=2).float()
    figure = plot.depth(model, torch.arange(20), None, None)
    shown = figure.axes[0].images[0].get_array().filled(0)
    sources = {0: [], 1: [0], 2: [0], 3: [0, 2], 4: [0, 2]}
    for layer, earlier in sources.items():
        share = 1 / (len(earlier) + 1)
        want = [share if j in (*earlier, layer) else 0 for j in range(5)]
        assert shown[layer].tolist() == pytest.approx(want)
    written = {text.get_text() for text in figure.axes[0].texts}
    assert written == {'100%', '33%', '50%'}


@pytest.mark.parametrize('ponder', ['embedding', 'pause'])
def test_loss_against_steps(ponder):
    model = make(**SIZE, ponder=ponder, ponder_steps=2)
    tokens = torch.randint(0, 257, (60,), generator=torch.Generator().manual_seed(3))
    figure = plot.ponder(model, tokens, None, PlotSettings(max_steps=3))
    (steps, losses), (trained, _) = drawn(figure)
    assert steps == [0, 1, 2, 3]
    assert trained == [2, 2]
    assert model.config.ponder_steps == 2
    windows = [tokens[i:i + 25] for i in (0, 24, 48)]
    for k in steps:
        model.config.ponder_steps = k
        total = 0
        for window in windows:
            _, loss = model(window[None, :-1], window[None, 1:])
            total += loss.item() * (len(window) - 1)
        assert losses[k] == pytest.approx(total / 59, abs=1e-6)


@pytest.fixture
def halting(monkeypatch):
    """A model whose token n takes n % 3 + 1 steps."""
    model = make(**SIZE, ponder='chain', ponder_steps=2)
    hidden = GPT.hidden

    def counted(self, idx, *args, **options):
        h = hidden(self, idx, *args, **options)
        self.mechanism.passes = idx % 3 + 1
        return h
    monkeypatch.setattr(GPT, 'hidden', counted)
    return model


def test_steps(halting):
    tokens = torch.tensor([0, 3, 6, 9, 1, 2, 5] * 5 + [0])  # 24 and 11 tokens in the two windows
    bars, boxes = plot.steps(halting, tokens, None, None).axes
    heights = [bar.get_height() for bar in bars.patches]
    assert heights == pytest.approx([400 / 7, 100 / 7, 200 / 7])
    assert bars.get_ylabel() == 'tokens (%)'

    losses, steps = plot.per_token(halting, tokens)
    assert len(losses) == 35
    means = [losses[steps == n].mean().item() for n in (1, 2, 3)]
    triangles = [line for line in boxes.lines if line.get_marker() == '^']
    assert [line.get_xdata()[0] for line in triangles] == [1, 2, 3]
    assert [line.get_ydata()[0] for line in triangles] == pytest.approx(means)
    assert boxes.get_ylabel() == 'loss of the token (nats)'


def test_text(halting):
    """Ten lines `a$`, then 91 characters, one more than a line of the picture holds."""
    written = b'a$\n' * 10 + b'b' * 91
    figure = plot.text(halting, torch.tensor(list(written)), get_tokenizer('byte'), None)
    ax, bar = figure.axes
    letters = {}
    for text in ax.texts:
        column, row = text.get_position()
        letters[row, column] = text.get_text()
    want = {(11, 0): 'b'}
    for i in range(10):
        want[i, 0] = 'a'
        want[i, 1] = '$'
    for j in range(90):
        want[10, j] = 'b'
    assert letters == want

    grid = ax.images[0].get_array().filled(-1)
    taken = [n % 3 + 1 for n in written[:-1]]  # to predict a token: those of the token before
    assert grid[0, :3].tolist() == [-1, *taken[:2]]
    assert grid[1, :4].tolist() == [*taken[2:5], -1]
    assert grid[10].tolist() == taken[29:119]
    assert grid[11, :2].tolist() == [taken[119], -1]
    assert f'{sum(taken) / 120:.2f} in the mean' in bar.get_xlabel()


def test_reads_the_validation_set_or_a_text(small_data):
    byte = get_tokenizer('byte')
    settings = dict(data_dir=small_data)
    shard = open_shard(os.path.join(small_data, 'val_000000.bin'))
    read = plot.read_text(settings, byte, PlotSettings(tokens=9))
    assert read.tolist() == shard[:9].tolist()
    assert plot.read_text(settings, byte, PlotSettings(start='ab')).tolist() == [97, 98]


def test_a_picture_of_a_checkpoint_is_written_as_svg(folder, tmp_path):
    path = folder(make(**SIZE, ponder='loop', ponder_steps=1).float())
    plot.main(['ponder', path, f'--out={tmp_path}/p.svg', '--tokens=30', '--device=cpu'])
    assert '<svg' in (tmp_path / 'p.svg').read_text()


# -------------------------------------------------------------------------------------------------
# What goes wrong


def test_a_full_disk_keeps_the_picture_before(tmp_path, monkeypatch):
    write_run(tmp_path / 'run', 5, 4)
    (tmp_path / 'a.png').write_text('before')

    def fails(self, f, **_):
        f.write(b'half')
        raise OSError('No space left on device')
    monkeypatch.setattr('matplotlib.figure.Figure.savefig', fails)
    with pytest.raises(OSError):
        plot.main(['curves', str(tmp_path / 'run'), f'--out={tmp_path}/a.png'])
    assert (tmp_path / 'a.png').read_text() == 'before'
    assert sorted(os.listdir(tmp_path)) == ['a.png', 'run']


@pytest.mark.parametrize('args, words', [
    ([], 'name a picture'),
    (['depth'], 'then a checkpoint'),
    (['depth', 'PLAIN', 'PLAIN'], 'a checkpoint'),
    (['pie', 'PLAIN'], 'curves'),
    (['depth', 'PLAIN'], 'depth_attn=False'),
    (['ponder', 'PLAIN'], "ponder='none'"),
    (['steps', 'PLAIN'], 'halting'),
    (['text', 'PLAIN'], 'halting'),
    (['text', 'PLAIN', '--out=a.html'], 'png'),
    (['curves', 'PLAIN'], 'no log'),
    (['curves', 'PLAIN', '--out=a.gif'], 'png'),
    (['curves', 'PLAIN', '--x=flips'], 'flips'),
])
def test_refusals(folder, args, words):
    plain = folder(make(**SIZE).float())
    args = [plain if arg == 'PLAIN' else arg for arg in args]
    with pytest.raises(UserError, match=words) as error:
        plot.main(args)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('settings, args, words', [
    (dict(ponder='embedding', halting='gate', ponder_steps=0), ['steps', 'MODEL'],
     'ponder_steps=0: name one that halts'),
    (dict(ponder='pause', ponder_steps=0), ['ponder', 'MODEL', '--max_steps=2'],
     'weights for 0 steps'),
    (dict(ponder='loop'), ['ponder', 'MODEL', '--start=a'],
     'at least two tokens'),
])
def test_models_that_have_no_such_picture(folder, settings, args, words):
    path = folder(make(**SIZE, **settings).float())
    args = [path if arg == 'MODEL' else arg for arg in args]
    with pytest.raises(UserError, match=words):
        plot.main([*args, '--device=cpu'])


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    with pytest.raises(UserError, match='pip install matplotlib'):
        plot.new_figure()
