"""The benchmark measures what it says; how long it takes is nothing to assert."""
import pytest
import torch
from conftest import TOGGLES, cells, make, save

import prepare_data
from engine.files import UserError
from model import HALTING, GPTConfig
from tools import bench
from train import Settings

SHAPE = dict(n_layer=1, n_head=2, n_embd=16, mlp_hidden=16, vocab_size=64)
SMALL = [*(f'--{name}={value}' for name, value in SHAPE.items()), '--block_size=32',
         '--micro_batch=2', '--repeats=1', '--new_tokens=3', '--batches=1']


def test_a_table_of_each_kind(monkeypatch, capsys):
    monkeypatch.setattr(bench, 'ceilings', lambda device, dtype: (1e11, 1e10))
    monkeypatch.setattr(bench, 'DEPTHS', {2: 0.54369})
    bench.main([*SMALL, '--toggles=plain,latent,router'])
    models = ['plain', 'latent']
    rows = cells(capsys.readouterr().out)
    assert [row[0] for row in rows] == [
        'step, 2 x 32 tokens', *models, 'router',
        'decoding 3 tokens, batch 1', *models,
        'router: decoding 3 tokens, batch 1, fp32', 'all', '2',
        'router: step, 2 x 32 tokens', 'all', '2']
    assert [bool(row[4]) for row in rows[1:7]] == [True, False, True, True, True, True]


@pytest.mark.parametrize('halting', HALTING)
@pytest.mark.parametrize('depth', [1.5, 3.0])
def test_drawn_decisions_take_the_wished_depth(halting, depth):
    torch.manual_seed(0)
    config = GPTConfig(**SHAPE, block_size=512, **bench.TOGGLES[halting])
    model = bench.drawn(config, depth, torch.device('cpu')).eval()
    with torch.no_grad():
        model(torch.randint(64, (4, 512)))
    assert model.mechanism.passes.double().mean().item() == pytest.approx(depth, abs=0.1)


def test_in_training_the_router_skips_what_is_drawn():
    config = GPTConfig(**SHAPE, block_size=512, **bench.TOGGLES['router'])
    model = bench.drawn(config, 1.5, torch.device('cpu'))
    slots = []
    model.h[0].register_forward_pre_hook(lambda block, args: slots.append(args[0].size(1)))
    bench.TrainingStep(model, torch.randint(64, (1, 512)), torch.float32, Settings())()
    assert slots[0] == 512 > 2 * slots[1] > 2 * slots[2]
    assert sum(slots) / 512 == pytest.approx(1.5, abs=0.1)


# in the place of a bench.py: it writes down who was called, and prints ever longer times
STAND_IN = """
import sys
with open('turns.txt', 'a+') as f:
    f.write(f"{sys.argv[0][0]}: {' '.join(sys.argv[1:])}\\n")
    f.seek(0)
    ms = 10.0 * len(f.readlines())
print("a machine\\n\\n| step  | median | quartiles |\\n| ----- | ------ | --------- |")
print(f"| plain | {ms} ms | 1.0 to 2.0 |\\n| {sys.argv[0]} | 1.0 ms | |")
print("\\n| decoding | median |\\n| -------- | ------ |\\n| plain | 10.0 ms |")
"""


def test_two_folders_take_turns(tmp_path, monkeypatch, capsys):
    """Rows of both, by table and name; each ratio is of one round."""
    monkeypatch.chdir(tmp_path)
    for folder in 'here', 'there':
        (tmp_path / folder / 'tools').mkdir(parents=True)
        (tmp_path / folder / 'tools' / 'bench.py').write_text(STAND_IN)
    monkeypatch.setattr(bench, 'ROOT', 'here')
    bench.main(['--toggles=plain', '--against=there', '--rounds=3', '--threads=1',
                '--against_options=--fast=True --dtype=float32'])
    h = 'h: --toggles=plain --threads=1'
    t = 't: --toggles=plain --threads=1 --fast=True --dtype=float32'
    assert (tmp_path / 'turns.txt').read_text().splitlines() == [h, t, t, h, h, t]
    # here 10, 40 and 50 ms, there 20, 30 and 60
    assert cells(capsys.readouterr().out)[1:] == [
        ['step', 'plain', '40 ms', '30 ms', '0.833', '0.500 to 1.333'],
        ['decoding', 'plain', '10 ms', '10 ms', '1.000', '1.000 to 1.000']]


def test_whole_answers_of_runs(tmp_path, monkeypatch, capsys, small_data):
    """With a halt_tau that nobody reaches passes are the most, with one that all do 1."""
    monkeypatch.chdir(tmp_path)
    prepare_data.prepare(prepare_data.DataSettings(problems=400, size=2), ['addition'])
    size = dict(vocab_size=320, n_tokens=257, block_size=32)
    folders = []
    for name, tau in ('loop', 0.1), ('exit', 1e-4), ('exit', 1.0), ('feedback', 0.1):
        model = make(**{**TOGGLES[name], **size, 'halt_tau': tau})
        folders.append(save(tmp_path / f'{name}{tau}', model, data_dir='data/addition'))
    monkeypatch.setattr(bench, 'ANSWERS', 3)
    bench.main([*folders, '--repeats=1', '--batches=1,2', '--device=cpu'])
    passes, *lines = cells(capsys.readouterr().out)
    assert passes == ['passes of', 'a question token', 'an answer token']
    assert lines[:4] == [[folders[0], '3.00', '3.00'], [folders[1], '3.00', '3.00'],
                         [folders[2], '1.00', '1.00'], [folders[3], 'by iteration', '1.00']]
    assert [line[0] for line in lines[4:]] == ['one answer, batch 1', *folders,
                                               'one answer, batch 2', *folders]
    with pytest.raises(UserError, match='halt_tau: finished runs are timed as they are'):
        bench.main([*folders, '--halt_tau=1', '--device=cpu'])
    small = prepare_data.DataSettings(problems=400, size=1, name='short')
    prepare_data.prepare(small, ['addition'])
    short = save(tmp_path / 'short', model, data_dir='data/short')
    with pytest.raises(UserError, match='several tasks or sizes'):
        bench.main([folders[0], short, '--device=cpu'])
    text = save(tmp_path / 'text', make(**size), data_dir=small_data)
    with pytest.raises(UserError, match='trained on a text'):
        bench.main([text, '--device=cpu'])


def test_ratios(capsys):
    """More than 1 is quicker."""
    assert bench.take_turns(dict(a=iter(range(9)).__next__), 3) == dict(a=[1, 2, 3])
    bench.print_times('step', dict(plain=[3.0, 1.0, 2.0], loop=[4.0, 8.0, 5.0], exit=[1.0]),
                      dict(plain=1.0, loop=2.5))
    assert cells(capsys.readouterr().out)[1:] == [
        ['plain', '2000 ms', '1000 to 3000', '1.000x', '50.0%'],
        ['loop', '5000 ms', '4000 to 8000', '0.400x', '50.0%'],
        ['exit', '1000 ms', '1000 to 1000', '2.000x', '']]
    config = GPTConfig(**SHAPE, ponder='loop', ponder_steps=3)
    bench.print_saved('step', config, {'all': [(4.0, 0.0)], 2: [(2.5, 2.0)]})
    assert cells(capsys.readouterr().out)[1:] == [
        ['all', '4000 ms', '4.00', '', '', ''],
        ['2', '2500 ms', '2.00', '1.60x', '2.00x', '80%']]


def test_a_loop_is_the_same_whatever_a_config_file_says(tmp_path, monkeypatch):
    timed = []
    monkeypatch.setattr(bench, 'ceilings', lambda *_: (1.0, 1.0))
    monkeypatch.setattr(bench, 'bench_steps', lambda setup, configs, flops: timed.append(configs))
    monkeypatch.setattr(bench, 'bench_decoding', lambda *_: None)
    (tmp_path / 'trees.py').write_text('ponder_steps = 7')
    bench.main([str(tmp_path / 'trees.py'), '--toggles=loop', '--device=cpu', '--dtype=float32'])
    assert timed[0]['loop'].ponder_steps == 3


def test_refusals(tmp_path, monkeypatch):
    with pytest.raises(UserError, match='toggles=plane.*depth_attn'):
        bench.main(['--toggles=plane'])
    with pytest.raises(UserError, match='depth_attn: chosen here for each row, by --toggles'):
        bench.main(['--depth_attn'])
    with pytest.raises(UserError, match='halt_tau: chosen here for each row, by --toggles'):
        bench.main(['--toggles=exit', '--halt_tau=0.5'])
    with pytest.raises(UserError, match='exit: methods are .* --toggles=plain,exit'):
        bench.main([f"{bench.ROOT}/config/halting_exit.py"])
    with pytest.raises(UserError, match='rounds=2: is for --against'):
        bench.main(['--rounds=2'])
    with pytest.raises(UserError, match='batches=0: give whole numbers from 1'):
        bench.main(['--batches=0'])
    with pytest.raises(UserError, match='block_size=8: a prompt alone has 8 tokens'):
        bench.main([*SMALL, '--block_size=8'])
    with pytest.raises(UserError, match='nowhere: there is no tools/bench.py'):
        bench.main(['--against=nowhere'])
    monkeypatch.setattr(bench, 'ROOT', str(tmp_path))
    (tmp_path / 'tools').mkdir()
    (tmp_path / 'tools' / 'bench.py').write_text('import sys; sys.exit("one line")')
    with pytest.raises(UserError, match='tools/bench.py: one line'):
        bench.main([f'--against={tmp_path}'])

    def rows_of(folder, args):
        return {('step', 'loop' if '--toggles=loop' in args else 'plain'): 1.0}
    monkeypatch.setattr(bench, 'medians_printed', rows_of)
    with pytest.raises(UserError, match='no row in common'):
        bench.main([f'--against={tmp_path}', '--against_options=--toggles=loop'])
