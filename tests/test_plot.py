"""tools/plot.py: a picture of each kind; and what is drawn are the numbers of the runs."""
import json
import os
import shlex
import shutil
import statistics

import pytest
import torch
from conftest import ROOT, TOGGLES, cells, make, save

from engine.files import UserError
from tools import compare, plot
from tools.explain import look
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
    lines = [dict(step=2 * i, tokens=128 * i, flops=1e9 * i, loss=loss, ms=10)
             for i, loss in enumerate(losses, 1)]
    lines.append(dict(step=2 * len(losses), tokens=128 * len(losses),
                      val_loss=losses[-1] and losses[-1] - 0.5))
    (folder / 'log.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    (folder / 'settings.json').write_text(json.dumps({**SIZE, **settings}))
    return str(folder)


def drawn(figure):
    """[(x, y)] of the lines."""
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in figure.axes[0].lines]


def test_curves(tmp_path):
    paths = [write_run(tmp_path / 'loop-s1', 5, 4, 3, ponder='loop'),
             write_run(tmp_path / 'loop-s2', 5, 4, 2, ponder='loop'),
             write_run(tmp_path / 'plain', 5, 3, 2)]
    again = [dict(step=4, tokens=256, loss=2.5, ms=20), dict(step=6, tokens=384, loss=2, ms=10),
             dict(step=6, tokens=384, val_loss=1.5)]
    with open(tmp_path / 'plain' / 'log.jsonl', 'a') as f:  # on from step 2: these lines count
        f.write('\n' + '\n'.join(map(json.dumps, again)))
    figure = plot.curves(paths, PlotSettings(x='tokens'))
    assert drawn(figure) == [
        ([128, 256, 384], [5, 4, 3]), ([384], [2.5]),
        ([128, 256, 384], [5, 4, 2]), ([384], [1.5]),
        ([128, 256, 384], [5, 2.5, 2]), ([384], [1.5])]
    words = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert words == ['loop', 'plain']

    by_flops = drawn(plot.curves(paths, PlotSettings(x='flops')))
    assert by_flops[0][0] == pytest.approx([1e9, 2e9, 3e9])
    by_seconds = drawn(plot.curves(paths, PlotSettings(x='seconds')))
    assert by_seconds[4][0] == pytest.approx([0.02, 0.06, 0.08])


def test_curves_say_whose_flops_are_not_counted(tmp_path):
    """A log has the model's, and a step of Muon costs more."""
    paths = [write_run(tmp_path / name, 5, 4, optimizer=name) for name in ('adamw', 'muon')]
    for x, of, words in (('flops', paths, "training FLOPs, without Muon's own"),
                         ('flops', paths[:1], 'training FLOPs'),
                         ('tokens', paths, 'training tokens')):
        assert plot.curves(of, PlotSettings(x=x)).axes[0].get_xlabel() == words


def test_curves_of_other_tokens_are_told(tmp_path, capsys):
    paths = [write_run(tmp_path / name, 5, 4, n_tokens=n) for name, n in (('a', 257), ('b', 300))]
    plot.curves(paths[:1], PlotSettings())
    assert not capsys.readouterr().err
    plot.curves(paths, PlotSettings())
    assert 'these runs read other tokens' in capsys.readouterr().err


def test_each_step_of_a_curve_has_its_own_price(tmp_path):
    """A run that goes on with more passes: 128 tokens of 1e6 FLOPs each, then 256 of 3e6."""
    path = write_run(tmp_path / 'a', 5)
    lines = [dict(step=2, tokens=128, flops=128e6, loss=5, ms=10),
             dict(step=4, tokens=256, flops=256 * 3e6, loss=4, ms=10),
             dict(step=6, tokens=384, flops=384 * 3e6, loss=3, ms=10),
             dict(step=6, tokens=384, val_loss=3)]
    (tmp_path / 'a' / 'log.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    run = plot.read_run(path, 'flops')
    assert [x for x, _ in run['loss']] == pytest.approx([128e6, 512e6, 896e6])
    assert run['val_loss'] == [(pytest.approx(896e6), 3)]


def test_a_runs_log_has_no_records(tmp_path):
    (tmp_path / 'log.jsonl').write_text('{"step": 2, "val_loss": 1, "val_nats_per_byte": 1}\n')
    with pytest.raises(UserError, match='no run of tools/compare.py'):
        plot.records([str(tmp_path / 'log.jsonl')], PlotSettings())


def test_race(tmp_path, capsys):
    lines = [dict(name=name, optimizer='adamw', learning_rate=rate, seed=seed, picks=seed == 0,
                  val_loss=loss, curve={'300': 3.0, '600': loss}, steps=600)
             for name, rate, seed, loss in (('nanogpt', 1e-3, 1, 2.0), ('nanogpt', 3e-3, 1, 1.5),
                                            ('nanogpt', 3e-3, 2, 1.75), ('nanogpt', 3e-3, 0, 1.0),
                                            ('ours', 1e-3, 1, 1.25), ('gelu', 1e-3, 1, 1.0))]
    path = tmp_path / 'runs.jsonl'
    path.write_text(''.join(json.dumps(line) + '\n' for line in [*lines, dict(ms=3)]))
    figure = plot.race([str(path)], PlotSettings(names='nanogpt,ours'))
    assert drawn(figure) == [([300, 600], [3.0, loss]) for loss in (1.5, 1.75, 1.25)]
    words = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert words == ['nanogpt, adamw', 'ours, adamw']
    for names, words in (('other', 'other is in none of these'), ('ours,ous', 'ous is in none of')):
        with pytest.raises(UserError, match=words):
            plot.race([str(path)], PlotSettings(names=names))
    assert not capsys.readouterr().err
    path.write_text('\n'.join(json.dumps({**line, 'picks': line['name'] == 'ours'})
                              for line in lines))
    assert len(drawn(plot.race([str(path)], PlotSettings()))) == 4
    assert 'ours, adamw: not drawn, no seed has judged it' in capsys.readouterr().err
    with pytest.raises(UserError, match='nanogpt adamw 0.001 1 is there twice'):
        plot.race([str(path), str(path)], PlotSettings())


def test_what_was_given_up_is_no_part_of_a_curve(tmp_path):
    """A run that died before its first checkpoint, and a shorter one in the same folder."""
    path = write_run(tmp_path / 'died', 9, 8, 7, 6)
    lines = [dict(step=2, tokens=128, loss=3, ms=10), dict(step=4, tokens=256, loss=2, ms=10)]
    with open(tmp_path / 'died' / 'log.jsonl', 'a') as f:
        f.write('\n' + '\n'.join(map(json.dumps, lines)))
    assert plot.read_run(path, 'tokens') == {'loss': [(128, 3), (256, 2)], 'val_loss': []}
    with pytest.raises(UserError, match='nothing: no loss in its log is finite'):
        plot.curves([write_run(tmp_path / 'nothing', None, None)], PlotSettings())


def test_runs_of_two_places_are_not_one(tmp_path):
    paths = [write_run(tmp_path / place / 'loop-s1', 5, 4) for place in ('narrow', 'wide')]
    figure = plot.curves(paths, PlotSettings(x='tokens'))
    words = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert words == [f'{tmp_path}/narrow/loop', f'{tmp_path}/wide/loop']

    path = os.path.join(ROOT, 'docs', 'runs', 'halting-text.jsonl')
    figure = plot.halting([path], PlotSettings(names='exit'))
    words = {text.get_text() for text in figure.legends[0].get_texts()}
    assert words == {'out/text/exit', 'out/text28/exit'}


NAMES = ('_base', '$a$', '$\\frac$', r'a\$b', '100%s', 'a\nb')


def test_names_are_written_as_they_are(tmp_path):
    """Those that matplotlib would hide, or read as mathematics: in the legend and the title."""
    paths = [write_run(tmp_path / name, 5, 4) for name in NAMES]
    figure = plot.curves(paths, PlotSettings(x='tokens'))
    texts = figure.axes[0].get_legend().get_texts()
    assert [text.get_text() for text in texts] == [*NAMES[:-1], 'a b']
    assert not any(text.get_parse_math() for text in texts)
    figure.savefig(tmp_path / 'curves.png')

    with open(os.path.join(ROOT, 'docs', 'runs', 'halting-text.jsonl')) as f:
        record = json.loads(f.readline())
    lines = [json.dumps({**record, 'checkpoint': name, 'data': '_$\\frac$'}) for name in NAMES]
    (tmp_path / 'choices.jsonl').write_text('\n'.join(lines))
    figure = plot.halting([str(tmp_path / 'choices.jsonl')], PlotSettings())
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [word.split(',')[0] for word in words] == [*NAMES[:-1], 'a b']
    assert figure.axes[0].get_title(loc='left') == '_$\\frac$'
    figure.savefig(tmp_path / 'halting.svg')


def test_records_may_be_called_anything(tmp_path, monkeypatch, capsys):
    """tools/choices.py --json=FILE, and a copy of runs.jsonl."""
    monkeypatch.chdir(tmp_path)
    for name in ('x.json', 'x.py'):
        shutil.copy(os.path.join(ROOT, 'docs', 'runs', 'halting-text.jsonl'), name)
        plot.main(['halting', name, f'--out={name}.svg'])
        shutil.copy(os.path.join(ROOT, 'docs', 'runs', 'addition.jsonl'), name)
        compare.main([name])
        assert os.path.exists(f'{name}.svg') and cells(capsys.readouterr().out)
    plot.main(['records', name])
    assert os.path.exists('out/records.png')


def test_records_of_earlier_days(tmp_path, monkeypatch):
    """A dot for each seed, a mark at the median, how many learned it."""
    paths = [os.path.join(ROOT, 'docs', 'runs', f'{name}.jsonl') for name in ('addition', 'text')]
    figure = plot.records(paths, PlotSettings(names='plain_scaled,loop,plain_scaled_as_loop,chain'))
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ['one pass', 'one pass, trained longer', 'loop', 'chain']
    of = {}     # of each name, what its runs have right
    with open(paths[0]) as f:
        for r in map(json.loads, f):
            of.setdefault(r['name'], []).append(100 * r['right'])
    right = of['loop']
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert lines['loop'].get_ydata() == [statistics.median(right)]
    dots = [list(line.get_ydata()) for line in figure.axes[0].lines]
    assert right in dots
    learned = [f'{sum(share >= 90 for share in of[name])} of {len(of[name])}'
               for name in ('plain_scaled', 'plain_scaled_as_loop', 'loop')]
    assert [text.get_text() for text in figure.axes[0].texts] == learned
    assert learned[0].startswith('0')

    monkeypatch.chdir(tmp_path)
    plot.main(['records', *paths])
    assert (tmp_path / 'out' / 'records.png').read_bytes().startswith(b'\x89PNG')


def test_halting_draws_what_all_seeds_have(tmp_path):
    """And one folder, however it is spelled, once."""
    def record(folder, right, everyone=()):
        taus = [dict(tau=tau, passes=2, chosen=share, random=[0.5]) for tau, share in right.items()]
        return dict(checkpoint=folder, halting='exit', data='data/sums', answers=9, taus=taus,
                    everyone=everyone)
    made = [record('out/exit-s1', {0.1: 0.75, 0.5: 1.0}), record('out/exit-s1/', {0.5: 0.75}),
            record('out/exit-s2', {0.5: 0.25}), record('out/exit-s2', {0.9: 0.0})]
    path = tmp_path / 'halting.jsonl'
    path.write_text(''.join(json.dumps(r) + '\n' for r in made))
    assert drawn(plot.halting([str(path)], PlotSettings()))[0] == ([2], [50])

    made.append(record('out/exit-s2', {0.1: 0.25}, everyone=[dict(passes=4, result=0.5)]))
    path.write_text(''.join(json.dumps(r) + '\n' for r in made))       # s2 was trained anew
    assert drawn(plot.halting([str(path)], PlotSettings()))[0] == ([2], [50])


def test_two_rules_of_one_checkpoint_are_two_lines(tmp_path):
    path = tmp_path / 'halting.jsonl'
    made = [dict(checkpoint='out/loop', halting=rule, data='data/sums', answers=9,
                 taus=[dict(tau=0.1, passes=2, chosen=share, random=[0.5])])
            for rule, share in (('exit', 0.75), ('settled', 0.25))]
    path.write_text(''.join(json.dumps(r) + '\n' for r in made))
    figure = plot.halting([str(path)], PlotSettings())
    assert sorted(ys for _, ys in drawn(figure)) == [[25], [50], [50], [75]]
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ['loop, exit', 'loop, settled']


def test_the_eleventh_line_is_no_other_colour_but_dashed():
    styles = [tuple(plot.style_of_line(i).values()) for i in range(25)]
    assert len(set(styles)) == 25


def test_the_seed_that_chose_the_rates_is_not_drawn(tmp_path):
    """Nor a name twice, as of two tasks in one file."""
    made = [dict(name='smear@3e-3', seed=seed, val_nats_per_byte=loss, flops=1, picks=seed == 0,
                 command='c') for seed, loss in ((0, 1.0), (1, 1.5), (2, 1.25))]
    path = tmp_path / 'runs.jsonl'
    path.write_text(''.join(json.dumps(r) + '\n' for r in made))
    figure = plot.records([str(path)], PlotSettings())
    assert drawn(figure)[0][1] == [1.5, 1.25]

    path.write_text(''.join(json.dumps(r) + '\n' for r in [*made, made[1]]))
    with pytest.raises(UserError, match='smear@3e-3, seed 1, is there twice'):
        plot.records([str(path)], PlotSettings())


def record_of(name, seed, loss, *options, **more):
    """A line of tools/compare.py, of a run on small_data."""
    file = os.path.join(ROOT, 'config', 'loop.py')
    settings = [f'--{key}={value}' for key, value in SIZE.items()]
    command = ['python', 'train.py', file, *settings, '--batch_tokens=96', *options,
               f'--seed={seed}']
    s, config = plot.configs_of(command[2:])
    return dict(name=name, seed=seed, val_nats_per_byte=loss, command=shlex.join(command),
                tokens=9, flops=9 * compare.flops_of(config, s), **more)


def test_loss_against_what_a_new_token_costs(tmp_path, small_data):
    data, zero = f'--data_dir={small_data}', '--ponder_steps=0'
    feedback = data, '--ponder=feedback'
    records = [record_of('plain', 1, 1.5, data, zero),
               record_of('plain', 2, 1.7, data, zero),
               record_of('plain_scaled_4x', 2, 1.4, data, zero, '--n_layer=10'),
               record_of('loop', 2, 1.3, data),
               record_of('feedback', 2, 1.0, *feedback, exact_nats_per_byte=1.2),
               record_of('plain', 2, 0.1, data, zero, '--max_steps=9', right=1.0)]
    paths = [tmp_path / 'a.jsonl', tmp_path / 'b.jsonl']
    paths[0].write_text('\n'.join(map(json.dumps, records[:3])))
    paths[1].write_text('\n'.join(map(json.dumps, records[3:])))
    figure = plot.records(paths, PlotSettings(x='generated'))
    marks = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
             for line in figure.axes[0].lines}
    assert marks['feedback'] == ([1], [1.2])
    assert marks['plain'] == ([1], [1.7])       # of seed 2 alone, which all have
    [cost], y = marks['loop']
    assert 3 < cost < 4 and y == [1.3]
    [deep], _ = marks['four times the layers']
    assert 1.8 < deep < 2
    assert ([1, deep], [1.7, 1.4]) in drawn(figure)

    paths[1].write_text(json.dumps(record_of('loop', 1, 1.3, data, '--ponder_steps=1')))
    figure = plot.records(paths[1:], PlotSettings(x='generated'))
    [word] = figure.legends[0].get_texts()
    assert word.get_text() == 'loop', "these are two passes"

    for more, words in [(record_of('loop', 2, 1, data, '--max_steps=9'), '2 recipes'),
                        ({**record_of('loop', 2, 1, data), 'flops': 9.0}, 'does not make'),
                        (record_of('chain', 3, 1, data, '--ponder=chain'), '0 shared'),
                        (record_of('exit', 2, 1, data, '--halting=exit'), 'exit halts, or'),
                        (record_of('latent', 2, 1, data, '--ponder=latent'), 'latent halts, or')]:
        paths[1].write_text(json.dumps(more))
        with pytest.raises(UserError, match=words):
            plot.records(paths, PlotSettings(x='generated'))


def test_smear_in_docs_is_the_mechanism_of_that_name(monkeypatch):
    """The commands of these records name config/feedback.py, which they ran with a patch."""
    monkeypatch.setattr(compare, 'read_meta', lambda folder: dict(n_tokens=257))    # data/python
    monkeypatch.chdir(ROOT)
    runs = PlotSettings(x='generated', names='plain_scaled,smear,smear+depth_attn')
    path = os.path.join('docs', 'runs', 'text-2.8M.jsonl')
    marks = {line.get_label(): line for line in plot.records([path], runs).axes[0].lines}
    cost = {name: list(line.get_xdata()) for name, line in marks.items() if name[0] != '_'}
    assert cost == {'smear': [1], 'smear+depth_attn': [1], 'one pass': [1]}


def test_halting_draws_medians_and_the_same_passes_at_random(tmp_path):
    """A line for each kind of model, of those that halt a dotted one."""
    lines = []
    for seed, right in enumerate((0.5, 0.7, 0.6)):
        lots = [0.1, 0.5 if seed == 0 else 0.3]
        taus = [{'tau': tau, 'passes': 2 - tau, 'chosen': right - tau, 'random': lots}
                for tau in (0.0, 0.5)]
        everyone = [{'passes': 1, 'result': 0.2}, {'passes': 2, 'result': right}]
        lines.append(dict(checkpoint=f'out/exit-s{seed}', data='data/a', answers=True, taus=taus,
                          everyone=everyone))
        lines.append(dict(checkpoint=f'out/loop-s{seed}', data='data/a', answers=True, taus=[],
                          everyone=everyone))
    path = tmp_path / 'a.jsonl'
    earlier = dict(lines[0], taus=[])       # of a run that went on
    path.write_text('\n'.join(map(json.dumps, [earlier, *lines])))
    figure = plot.halting([str(path)], PlotSettings())
    close = pytest.approx
    assert drawn(figure) == [([1.5, 2.0], close([10, 60])), ([1.5, 2.0], close([20, 20])),
                             ([1, 2], close([20, 60]))]
    again = [dict(line, data='data/a/') for line in lines]      # the same folder
    others = [dict(line, data='other/a') for line in lines]     # another of that name
    path.write_text('\n'.join(map(json.dumps, [*lines, *again, *others])))
    both = plot.halting([str(path)], PlotSettings())
    assert drawn(both) == drawn(figure)
    assert [ax.get_title(loc='left') for ax in both.axes] == ['data/a', 'other/a']
    with pytest.raises(UserError, match='names'):
        plot.halting([str(path)], PlotSettings(names='gate'))
    for others in str(path), os.path.join(ROOT, 'docs', 'runs', 'race.jsonl'):
        with pytest.raises(UserError, match='no run of tools/compare.py'):
            plot.records([others], PlotSettings())


def test_whose_values_each_layer_mixes(tmp_path, small_data, capsys):
    model = make(**{**SIZE, **TOGGLES['loop_depth']}).float()
    folder = save(tmp_path / 'ckpt', model, data_dir=small_data)
    out = tmp_path / 'a.svg'
    plot.main(['depth', folder, f'--out={out}', '--device=cpu'])
    assert '<svg' in out.read_text()
    assert capsys.readouterr().out == f'{out}\n'

    figure = plot.depth([folder], PlotSettings(start='a text ' * 9, device='cpu'))
    values = look(model, torch.tensor([*(b'a text ' * 9)[:24]])).values.mean(0)
    shown = [text.get_text() for text in figure.axes[0].texts]
    assert shown == [f'{share:.0%}' for share in values.flatten().tolist() if share]
    plain = save(tmp_path / 'plain', make(**SIZE), data_dir=small_data)
    for folders, words in ([plain], 'name one with'), ([folder, plain], 'one checkpoint'):
        with pytest.raises(UserError, match=words):
            plot.main(['depth', *folders])


@pytest.mark.parametrize('args, words', [
    (['curve', 'a'], 'name a picture'),
    (['curves', 'a', '--out=a.txt'], '.png, .svg or .pdf'),
    (['curves', 'a'], 'a: no log'),
    (['curves', 'a', '--x=generated'], 'for records'),
    (['race', 'a.jsonl', '--x=tokens'], 'x=tokens: is for records and curves'),
    (['curves', 'a', '--start=ab'], 'start=ab: is for depth'),
    (['depth', 'a', '--names=ab'], 'names=ab: is for all but depth'),
    (['records', 'nowhere.jsonl'], 'nowhere.jsonl: no such file'),
    (['race', 'nowhere.jsonl'], 'nowhere.jsonl: no such file'),
    (['halting', 'nowhere.jsonl'], 'nowhere.jsonl: no such file'),
])
def test_refusals(args, words):
    with pytest.raises(UserError, match=words):
        plot.main(args)
