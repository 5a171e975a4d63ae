"""tools/plot.py: what is drawn are the numbers of the run or the checkpoint."""
import json
import os

import pytest
import torch
from conftest import make, save

from engine.errors import UserError
from model import GPT, GPTConfig
from tools import plot

pytest.importorskip('matplotlib')
SIZE = dict(vocab_size=320, n_tokens=257, block_size=24, n_layer=5, n_head=4, n_embd=32, mlp_hidden=48)


def write_run(folder, *losses, **settings):
    """A log with 10 ms per step, a line every 2 steps and an evaluation after the last."""
    os.makedirs(folder)
    lines = [dict(step=2 * i, tokens=128 * i, loss=loss, ms=10) for i, loss in enumerate(losses, 1)]
    with open(folder / 'log.jsonl', 'w') as f:
        for r in [*lines, dict(lines[-1], val_loss=losses[-1] - 0.5)]:
            if 'val_loss' in r: del r['ms'], r['loss']
            f.write(json.dumps(r) + '\n')
    with open(folder / 'settings.json', 'w') as f: json.dump({**SIZE, **settings}, f)


def drawn(figure):
    """[(x, y)] of the lines that hold points."""
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in figure.axes[0].lines if len(line.get_xdata())]


@pytest.fixture
def folder(tmp_path, small_data):
    """Makes a checkpoint with random weights."""
    def write(model):
        return save(tmp_path / 'ckpt', model, data_dir=small_data)
    return write


def test_curves(tmp_path):
    write_run(tmp_path / 'loop-s1', 5, 4, 3, ponder='loop')
    write_run(tmp_path / 'loop-s2', 5, 4, 2, ponder='loop')
    write_run(tmp_path / 'plain', 5, 3, 2)
    with open(tmp_path / 'plain' / 'log.jsonl', 'a') as f:  # resumed after step 2: the last line counts
        f.write(json.dumps(dict(step=4, tokens=256, loss=2.5, ms=20)) + '\n')
    paths = [str(tmp_path / name) for name in ('loop-s1', 'loop-s2', 'plain/log.jsonl')]
    figure = plot.curves(paths, plot.PlotSettings())
    # the plain run is better (1.5 against the mean of 2.5 and 1.5), so it comes first
    assert drawn(figure) == [([128, 256, 384], [5, 2.5, 2]), ([384], [1.5]), ([128, 256, 384], [5, 4, 2.5]), ([384], [2.0])]
    assert [t.get_text() for t in figure.axes[0].get_legend().get_texts()] == ['plain  1.500', 'loop, 2 seeds  2.000']
    assert [x for x, _ in drawn(plot.curves(paths[2:], plot.PlotSettings(x='seconds')))] == [pytest.approx([.02, .06, .08]), pytest.approx([.08])]
    flops = drawn(plot.curves(paths, plot.PlotSettings(x='flops')))
    for i, settings in (0, {}), (2, dict(ponder='loop')):
        assert flops[i][0] == pytest.approx([n * GPT(GPTConfig(**SIZE, **settings)).flops_per_token() for n in (128, 256, 384)])
    ax = figure.axes[0]
    assert ax.get_xlabel() == 'training tokens' and ax.get_ylabel() == 'loss (nats per token)' and figure.get_facecolor() == (1, 1, 1, 1)
    # two seeds share the steps that both logged, and two folders of one name are two runs
    write_run(tmp_path / 'more' / 'loop-s1', 5, 4, 3, 1, ponder='loop')
    write_run(tmp_path / 'more' / 'loop-s2', 5, 3, ponder='loop')
    more = [*paths[:2], str(tmp_path / 'more' / 'loop-s1'), str(tmp_path / 'more' / 'loop-s2')]
    assert drawn(plot.curves(more, plot.PlotSettings()))[2:] == [([128, 256], [5, 3.5])]
    with pytest.raises(UserError, match='more/loop: its seeds ended after 4 to 8 steps'): plot.final(more, plot.PlotSettings())
    (tmp_path / 'odd').write_bytes(b'\xff\n5\n')
    with pytest.raises(UserError, match='no log'): plot.curves([str(tmp_path / 'odd')], plot.PlotSettings())
    plot.main(['curves', *paths, f'--out={tmp_path}/c.png'])
    assert (tmp_path / 'c.png').read_bytes().startswith(b'\x89PNG')


def test_the_first_twentieth_of_a_run_is_left_out(tmp_path):
    write_run(tmp_path / 'a', *[5.0] * 40)
    assert drawn(plot.curves([str(tmp_path / 'a')], plot.PlotSettings()))[0][0] == [128 * i for i in range(2, 41)]


def test_depth(folder):
    model = make(**SIZE, depth_attn=True, depth_mode='uniform', depth_stride=2).float()
    figure = plot.depth(model, torch.arange(20), None, None)
    shown = figure.axes[0].images[0].get_array().filled(0)
    below = {0: [], 1: [0], 2: [0], 3: [0, 2], 4: [0, 2]}
    for layer, sources in below.items():
        want = [1 / (len(sources) + 1) if j in (*sources, layer) else 0 for j in range(5)]
        assert shown[layer].tolist() == pytest.approx(want)
    assert sorted({t.get_text() for t in figure.axes[0].texts}) == ['100%', '33%', '50%']


@pytest.mark.parametrize('ponder', ['embedding', 'pause'])
def test_loss_against_steps(ponder):
    model = make(**SIZE, ponder=ponder, ponder_steps=2)
    tokens = torch.randint(0, 257, (60,), generator=torch.Generator().manual_seed(3))
    (steps, losses), (trained, _) = drawn(plot.ponder(model, tokens, None, plot.PlotSettings(max_steps=3)))
    assert steps == [0, 1, 2, 3] and trained == [2, 2] and model.config.ponder_steps == 2
    for k in steps:
        model.config.ponder_steps = k
        parts = [tokens[i:i + 25] for i in (0, 24, 48)]
        want = sum(model(p[None, :-1], p[None, 1:])[1].item() * (len(p) - 1) for p in parts) / 59
        assert losses[k] == pytest.approx(want, abs=1e-6)


def test_final(tmp_path):
    write_run(tmp_path / 'loop-s1', 5, 4, 3, ponder='loop')
    write_run(tmp_path / 'loop-s2', 5, 4, 2, ponder='loop')
    write_run(tmp_path / 'plain_scaled', 5, 3, 3)
    write_run(tmp_path / 'plain_scaled_as_loop', 5, 3, 2, 2)
    write_run(tmp_path / 'plain', 5, 3, 3.25)
    write_run(tmp_path / 'plain_as_pause', 5, 3, 2, 2, 1.75)
    paths = [str(path) for path in tmp_path.iterdir()]
    figure = plot.final(paths, plot.PlotSettings())
    assert sorted((t.get_text() for t in figure.axes[0].get_legend().get_texts()), key=lambda t: (len(t.split()), t)) == [
        'plain  2.750', 'plain_scaled  2.500', 'plain, trained longer', 'plain_scaled, trained longer', 'loop, 2 seeds  2.000']
    lines = {line.get_linestyle(): list(zip(*line.get_data())) for line in figure.axes[0].lines}
    assert lines[':'] == [(384, 2.75), (640, 1.25)] and lines['--'] == [(384, 2.5), (512, 1.5)]
    points = {(x, y) for xs, ys in drawn(figure) for x, y in zip(xs, ys)}
    assert points >= {(384, 2.0), (384, 1.5), (384, 2.5), (512, 1.5)}  # the mean, and the ends of its bar
    write_run(tmp_path / 'new', 5)
    os.remove(tmp_path / 'new' / 'log.jsonl')
    (tmp_path / 'runs.jsonl').write_text('{"name": "loop", "steps": 3}\n')
    for path in ('new', 'runs.jsonl'):
        with pytest.raises(UserError, match='no log'): plot.final([str(tmp_path / path)], plot.PlotSettings())


@pytest.fixture
def halting(monkeypatch):
    """A model whose token n takes n % 3 + 1 steps."""
    model, hidden = make(**SIZE, ponder='chain', ponder_steps=2), GPT.hidden
    def counted(self, idx, *args, **options):
        h = hidden(self, idx, *args, **options)
        self.steps = idx % 3 + 1
        return h
    monkeypatch.setattr(GPT, 'hidden', counted)
    return model


def test_steps(halting):
    tokens = torch.tensor([0, 3, 6, 9, 1, 2, 5] * 5 + [0])  # 24 and 11 tokens in the two windows
    figure = plot.steps(halting, tokens, None, None)
    bars, boxes = figure.axes
    assert [bar.get_height() for bar in bars.patches] == pytest.approx([400 / 7, 100 / 7, 200 / 7])
    losses, steps = plot.per_token(halting, tokens)
    means = [losses[steps == n].mean().item() for n in (1, 2, 3)]
    triangles = [(line.get_xdata()[0], line.get_ydata()[0]) for line in boxes.lines if line.get_marker() == '^']
    assert [x for x, _ in triangles] == [1, 2, 3] and [y for _, y in triangles] == pytest.approx(means) and len(losses) == 35
    assert bars.get_ylabel() == 'tokens (%)' and boxes.get_ylabel() == 'loss of the token (nats)'


def test_text(halting):
    from engine.shards import get_tokenizer
    figure = plot.text(halting, torch.tensor(list(b'a$\n' * 10 + b'b' * 101)), get_tokenizer('byte'), None)
    ax, bar = figure.axes
    letters = {(t.get_position()[1], t.get_position()[0]): t.get_text() for t in ax.texts}
    assert letters == {**{(i, 0): 'a' for i in range(10)}, **{(i, 1): '$' for i in range(10)}, **{(10, j): 'b' for j in range(100)}, (11, 0): 'b'}
    grid = ax.images[0].get_array().filled(-1)
    taken = [n % 3 + 1 for n in b'a$\n' * 10 + b'b' * 100]  # those of the token before
    assert grid[0, :3].tolist() == [-1, *taken[:2]] and grid[1, :4].tolist() == [*taken[2:5], -1]
    assert grid[10].tolist() == taken[29:129] and grid[11, :2].tolist() == [taken[129], -1]
    assert f'{sum(taken) / 130:.2f} in the mean' in bar.get_xlabel()


def test_reads_the_validation_set_or_a_text(folder, small_data, tmp_path):
    path = folder(make(**SIZE, ponder='loop', ponder_steps=1).float())
    from engine.shards import get_tokenizer, open_shard
    byte = get_tokenizer('byte')
    assert plot.read_text(dict(data_dir=small_data), byte, plot.PlotSettings(tokens=9)).tolist() == open_shard(os.path.join(small_data, 'val_000000.bin'))[:9].tolist()
    assert plot.read_text(dict(data_dir=small_data), byte, plot.PlotSettings(start='ab')).tolist() == [97, 98]
    plot.main(['ponder', path, f'--out={tmp_path}/p.svg', '--tokens=30', '--device=cpu'])
    assert '<svg' in (tmp_path / 'p.svg').read_text()


def test_a_full_disk_keeps_the_picture_before(tmp_path, monkeypatch):
    write_run(tmp_path / 'run', 5, 4)
    (tmp_path / 'a.png').write_text('before')
    def fails(self, f, **_): f.write(b'half'); raise OSError('No space left on device')
    monkeypatch.setattr('matplotlib.figure.Figure.savefig', fails)
    with pytest.raises(OSError): plot.main(['curves', str(tmp_path / 'run'), f'--out={tmp_path}/a.png'])
    assert (tmp_path / 'a.png').read_text() == 'before' and sorted(os.listdir(tmp_path)) == ['a.png', 'run']


def test_refusals(folder, tmp_path, monkeypatch):
    path = folder(make(**SIZE).float())
    for args, words in [([], 'name a picture'), (['depth'], 'then a checkpoint'), (['depth', path, path], 'a checkpoint'), (['pie', path], 'curves'),
                        (['depth', path], 'depth_attn=False'), (['ponder', path], "ponder='none'"), (['steps', path], 'halting'),
                        (['text', path], 'halting'), (['text', path, '--out=a.html'], 'png'), (['curves', path], 'no log'),
                        (['curves', path, '--out=a.gif'], 'png'), (['curves', path, '--x=flips'], 'flips')]:
        with pytest.raises(UserError, match=words) as error: plot.main(args)
        assert '\n' not in str(error.value)
    for settings, args, words in [(dict(ponder='embedding', halting='gate', ponder_steps=0), ['steps'], 'ponder_steps=0: name one that halts'),
                                  (dict(ponder='pause', ponder_steps=0), ['ponder', '--max_steps=2'], 'weights for 0 steps'),
                                  (dict(ponder='loop'), ['ponder', '--start=a'], 'at least two tokens')]:
        path = folder(make(**SIZE, **settings).float())
        with pytest.raises(UserError, match=words): plot.main([args[0], path, *args[1:], '--device=cpu'])
    monkeypatch.setitem(__import__('sys').modules, 'matplotlib.figure', None)
    with pytest.raises(UserError, match='pip install matplotlib'): plot.new_figure()
