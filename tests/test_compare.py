"""tools/compare.py: one recipe for all, nothing made twice, numbers that follow from the runs."""
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, cells, program

import prepare_data
import train
from configurator import build, read
from engine.checkpoint import load_checkpoint
from engine.files import UserError, append_line
from engine.flops import flops_per_token
from engine.shards import get_tokenizer
from model import GPT, GPTConfig
from prepare_data import DataSettings, write_dataset
from tools import compare

RECIPE = ['--n_layer=2', '--n_head=2', '--n_embd=32', '--mlp_hidden=32', '--block_size=32',
          '--batch_tokens=64', '--micro_batch=2', '--max_steps=4', '--save_interval=2',
          '--eval_interval=9', '--eval_tokens=256', '--log_interval=1', '--sample_tokens=0',
          '--learning_rate=0.01', '--device=cpu', '--dtype=float32']


@pytest.fixture
def common(small_data):
    """train.py's arguments for all runs."""
    return [*RECIPE, f'--data_dir={small_data}']


@pytest.fixture
def in_process(monkeypatch):
    """train.py without a process of its own (3 s to import torch); the names of the runs made."""
    made = []

    def quick(label, args, folder, settings):
        made.append(os.path.basename(folder))
        train.main(args)
    monkeypatch.setattr(compare, 'train', quick)
    return made


def settings_of(args):
    given, _ = read(args, '', train.Settings, GPTConfig)
    return given


def records_in(folder):
    return compare.read_lines(folder / 'runs.jsonl')


# -------------------------------------------------------------------------------------------------
# Plans


def layers_in_all_passes(gpt, texts):
    """In the place of flops_per_token, which takes a second for each model."""
    c = gpt.config
    passes = 1 if c.ponder == 'none' else c.ponder_steps + 1
    return 1e6 * c.n_layer * passes


def every_name():
    return compare.names_of(compare.CompareSettings())


def test_all_runs_have_the_same_recipe(common, monkeypatch):
    monkeypatch.setattr(compare, 'flops_per_token', layers_in_all_passes)
    monkeypatch.setattr(compare, 'COUNTED', {})
    common = [*common, '--max_steps=1000', '--n_layer=4']
    common.remove('--learning_rate=0.01')
    asked = settings_of(common)
    plain = build(train.Settings, asked)
    cost = {}
    for name in [*dict.fromkeys([*every_name(), *compare.RUNS]), 'loop_2x', 'loop_2x_as_chain']:
        plan = compare.make_plan(name, common)
        settings = build(train.Settings, settings_of(plan.args))
        cost[name] = plan.flops * settings.max_steps
        if '_as_' not in name:
            assert settings.max_steps == 1000
        settings.max_steps = plain.max_steps
        settings.out_dir = plain.out_dir
        if name == 'plain_stock':
            settings.weight_decay = plain.weight_decay
        assert settings == plain, name
    for name in cost:
        if '_as_' in name:
            assert cost[name] == pytest.approx(cost[name.partition('_as_')[2]], rel=0.001)
            assert cost[name] > cost['plain']
    what = {}       # each name is something of its own: but four passes are loop.py's
    for name in compare.RUNS:
        plan = compare.make_plan(name, common)
        what.setdefault(json.dumps(plan.settings), []).append(name)
    assert [names for names in what.values() if len(names) > 1] == [['loop', 'loop_4']]
    quick = compare.make_plan('plain_2x@0.5_as_loop', common)
    assert quick.settings['learning_rate'] == 0.5
    assert {**quick.settings, 'learning_rate': plain.learning_rate} == compare.make_plan(
        'plain_2x_as_loop', common).settings
    for name in every_name():
        scales = {compare.make_plan(one, common).settings['embed_scale']
                  for one in (name, *name.split('_as_'))}
        assert len(scales) == 1, f"{name} starts otherwise"
    layers = [settings_of(compare.make_plan(name, common).args)['n_layer']
              for name in ('plain_scaled', 'plain_scaled_2x', 'plain_scaled_4x_as_loop')]
    assert layers == [layers[0], 2 * layers[0], 4 * layers[0]]


def test_as_other_is_for_all_flops_that_other_has(common, monkeypatch):
    """Whose own line may set its steps, or its batch."""
    monkeypatch.setattr(compare, 'flops_per_token', layers_in_all_passes)
    monkeypatch.setattr(compare, 'COUNTED', {})
    for option in '--max_steps=8', '--batch_tokens=128':
        monkeypatch.setitem(compare.RUNS, 'mine', ('loop', option))
        plan = compare.make_plan('plain_scaled_as_mine', common)
        assert plan.settings['max_steps'] == 2 * 4 * 4      # twice the text, four passes, 4 steps


@pytest.mark.parametrize('args, words', [
    (['--names=lop_as_plain'], 'lop_as_plain.*plain_scaled_as_loop'),
    (['--seeds=1,x'], '1,2,3'),
    (['--seed=1'], 'seed=1.*--help'),
    (['--lrs=1e-3,2e-3'], 'learning_rate=0.01: chosen here'),
    (['--lrs=1e-3,2e-3', '--pick=2'], 'pick=2 has 2, as seeds'),
    (['--lrs=1e-3,2e-3', '--pick=0,2'], 'pick=0,2 has 2, as seeds'),
    (['--pick=x'], 'pick=x: give whole numbers'),
    (['--lrs=1e-3,'], 'lrs=1e-3,: give learning rates'),
    (['--lrs=1e-3,0'], 'lrs=1e-3,0: give learning rates'),
    (['--names=plain_as_loop@3e-3'], 'a rate belongs to what is trained'),
    (['folder'], 'folder: neither a setting'),
    (['--beside=plain_scaled_2x', '--names=loop'], 'beside=plain_scaled_2x.*add it to --names'),
])
def test_refusals(common, tmp_path, args, words):
    with pytest.raises(UserError, match=words):
        compare.main([*common, f'--out={tmp_path}', *args])
    assert not os.listdir(tmp_path)


def test_a_run_that_another_program_has_finished_meanwhile_stands_there_once(
        common, tmp_path, in_process, monkeypatch):
    record_of = compare.record_of

    def finished_by_both(*args):
        record = record_of(*args)
        with open(tmp_path / 'runs.jsonl', 'a') as f:
            f.write(json.dumps(record) + '\n')
        return record

    monkeypatch.setattr(compare, 'record_of', finished_by_both)
    compare.main([*common, '--names=plain', '--seeds=1', f'--out={tmp_path}'])
    assert [(r['name'], r['seed']) for r in records_in(tmp_path)] == [('plain', 1)]


def test_a_line_behind_half_a_line_is_one_of_its_own(tmp_path):
    path = tmp_path / 'runs.jsonl'
    path.write_text('{"name": "cut sh')
    append_line(path, {'name': 'whole'})
    append_line(path, {'name': 'next'})
    assert compare.read_lines(path) == [{'name': 'whole'}, {'name': 'next'}]


def test_who_may_stand_beside(tmp_path, small_data, monkeypatch):
    def check(names, beside, path='nowhere', data_dir=small_data):
        chosen = compare.CompareSettings(names=names, beside=beside)
        compare.check_beside(chosen, str(path), str(data_dir))

    made = tmp_path / 'runs.jsonl'
    made.write_text(json.dumps({'name': 'chain@3e-3'}) + '\n')
    for names, beside in ('plain@3e-3', 'plain'), ('loop', 'loop@1e-3'), ('loop', 'chain'):
        check(names, beside, made)
    with pytest.raises(UserError, match='beside=chain: no such run'):
        check('loop', 'chain')
    monkeypatch.chdir(tmp_path)
    prepare_data.prepare(DataSettings(problems=100), ['addition'])
    with pytest.raises(UserError, match='beside=loop: a table of right answers'):
        check('loop', 'loop', data_dir='data/addition')


@pytest.mark.parametrize('args, words', [
    (['nowhere.jsonl'], 'no finished run'),
    (['halting.jsonl'], 'no finished run'),
    (['text.jsonl', '--lrs=3e-3'], 'lrs: does nothing for a file'),
    (['text.jsonl', '--max_steps=5'], 'max_steps: does nothing for a file'),
    (['text.jsonl', '--names=loop', '--beside=chain'], 'no finished run of those asked for, which'),
])
def test_what_a_file_of_made_runs_does_not_have(args, words):
    path, *rest = args
    with pytest.raises(UserError, match=words):
        compare.main([os.path.join(ROOT, 'docs', 'runs', path), *rest])


def test_tables_of_files_say_whose_they_are_and_what_chose_a_rate(capsys):
    files = [os.path.join(ROOT, 'docs', 'runs', f'{name}-rates.jsonl')
             for name in ('minimax', 'traffic')]
    compare.main(files)
    told = capsys.readouterr().out
    assert all(f'\n{path}\n\n' in told for path in files)
    assert 'loop@4e-3 (seed 0) 99.4% right, 0.0062' in told

    compare.main([os.path.join(ROOT, 'docs', 'runs', 'text-2.8M.jsonl'), '--names=loop_2'])
    assert 'Not compared with plain_ponderlm, plain_' in capsys.readouterr().out


def test_a_setting_that_would_do_nothing_is_refused(common, in_process, tmp_path):
    for setting, words in (('--pick=7', 'pick=7: is for several --lrs'),
                           ('--answers=9', 'answers=9: is for a made task')):
        with pytest.raises(UserError, match=words):
            compare.main([*common, '--names=plain', f'--out={tmp_path}', setting])
    assert not in_process


# -------------------------------------------------------------------------------------------------
# Runs


def test_finished_runs_are_skipped_and_failed_ones_tried_again(common, in_process, tmp_path,
                                                               capsys, monkeypatch):
    args = [*common, f'--out={tmp_path}', '--names=plain,depth_attn', '--seeds=1,2']
    quick = compare.train

    def broken(label, args, folder, settings):
        if folder.endswith('depth_attn-s1'):
            raise UserError("no luck")
        quick(label, args, folder, settings)
    monkeypatch.setattr(compare, 'train', broken)
    with pytest.raises(UserError, match='1 runs failed'):
        compare.main(args)
    assert 'no luck' in capsys.readouterr().err
    made = [(r['name'], r['seed']) for r in records_in(tmp_path)]
    assert made == [('plain', 1), ('plain', 2), ('depth_attn', 2)]

    # the same command again
    monkeypatch.setattr(compare, 'train', quick)
    in_process.clear()
    compare.main(args)
    assert in_process == ['depth_attn-s1']
    r = records_in(tmp_path)[-1]
    assert torch.backends.cpu.get_cpu_capability() in r['hardware']
    assert r['flops'] == 256 * compare.make_plan('depth_attn', common).flops
    printed = capsys.readouterr().out
    compare.main([str(tmp_path / 'runs.jsonl')])                        # the table alone
    assert printed.endswith(capsys.readouterr().out)

    # one table, one recipe
    with pytest.raises(UserError, match='choose another --out'):
        compare.main([*args, '--warmup=0.5'])
    assert len(records_in(tmp_path)) == 4


def test_a_config_file_may_not_change_between_names(common, in_process, tmp_path):
    recipe = tmp_path / 'recipe.py'
    recipe.write_text('weight_decay = 0.1')
    args = [*common, str(recipe), '--seeds=1', f'--out={tmp_path}']
    compare.main([*args, '--names=plain'])
    recipe.write_text('weight_decay = 0.2')
    with pytest.raises(UserError, match='choose another --out'):
        compare.main([*args, '--names=smear'])
    assert in_process == ['plain-s1']


def test_what_a_name_stands_for_may_not_change_between_runs(in_process, tmp_path):
    """A config file, or the data, of which the command says no more than a name."""
    data, out = tmp_path / 'data', tmp_path / 'out'
    write_dataset(str(data), texts(1), get_tokenizer('byte'), 0.3, 'test')
    (tmp_path / 'mine.py').write_text('warmup = 0.1\n')
    args = [str(tmp_path / 'mine.py'), *RECIPE, f'--data_dir={data}', '--seeds=1', f'--out={out}']
    compare.main([*args, '--names=plain'])
    compare.main([*args, '--names=plain,loop'])
    assert in_process == ['plain-s1', 'loop-s1']

    (tmp_path / 'mine.py').write_text('warmup = 0.2\n')
    with pytest.raises(UserError, match='plain-s1 was made with warmup=0.1, not 0.2: choose'):
        compare.main([*args, '--names=plain,depth_attn'])
    (tmp_path / 'mine.py').write_text('warmup = 0.1\nn_kv_head = 1\n')
    os.remove(out / 'plain-s1' / 'settings.json')       # or its folder
    with pytest.raises(UserError, match='has plain, seed 1, with other settings'):
        compare.main([*args, '--names=plain'])
    (tmp_path / 'mine.py').write_text('warmup = 0.1\n')
    write_dataset(str(data), texts(2), get_tokenizer('byte'), 0.3, 'test')
    with pytest.raises(UserError, match='data=.*choose another --out'):
        compare.main([*args, '--names=plain,depth_attn'])


def test_seeds_of_two_models_share_no_row(common, in_process, tmp_path, monkeypatch):
    args = [*common, '--names=mine', f'--out={tmp_path}']
    monkeypatch.setitem(compare.RUNS, 'mine', ('loop', '--loop_norm=False'))
    compare.main([*args, '--seeds=1'])
    monkeypatch.setitem(compare.RUNS, 'mine', ('loop', '--loop_norm=True'))     # as many FLOPs
    with pytest.raises(UserError, match='mine-s1 was made with loop_norm=False, not True'):
        compare.main([*args, '--seeds=2'])
    assert in_process == ['mine-s1']


def test_a_config_file_edited_while_runs_go_on_ends_them(common, tmp_path, monkeypatch, capsys):
    recipe = tmp_path / 'recipe.py'
    recipe.write_text('weight_decay = 0.1')

    def edited_first(label, args, folder, settings):
        recipe.write_text('weight_decay = 0.2')
        train.main(args)
    monkeypatch.setattr(compare, 'train', edited_first)
    with pytest.raises(UserError, match='1 runs failed'):
        compare.main([*common, str(recipe), '--names=plain', '--seeds=1', f'--out={tmp_path}'])
    assert 'made with weight_decay=0.2, not 0.1' in capsys.readouterr().err
    assert records_in(tmp_path) == []


def test_data_prepared_anew_while_runs_go_on_ends_them(in_process, tmp_path, monkeypatch, capsys):
    data, out = tmp_path / 'data', tmp_path / 'out'
    write_dataset(str(data), texts(1), get_tokenizer('byte'), 0.3, 'test')
    quick = compare.train

    def prepared_anew_after(label, *args):
        quick(label, *args)
        if label == 'loop, seed 1':
            write_dataset(str(data), texts(2), get_tokenizer('byte'), 0.3, 'test')
    monkeypatch.setattr(compare, 'train', prepared_anew_after)
    with pytest.raises(UserError, match='2 runs failed'):
        compare.main([*RECIPE, f'--data_dir={data}', '--names=plain,loop,chain', '--seeds=1',
                      f'--out={out}'])
    assert capsys.readouterr().err.count('prepared anew since this command began') == 2
    assert [r['name'] for r in records_in(out)] == ['plain'] and in_process[-1] == 'loop-s1'


def test_all_of_a_run_is_of_one_model_py(common, in_process, tmp_path, monkeypatch, capsys):
    args = [*common, '--names=plain', '--seeds=1', f'--out={tmp_path}']
    begun = compare.source_of_model()
    edited = begun.replace('F.silu(gate)', 'F.gelu(gate)')
    monkeypatch.setattr(compare, 'source_of_model', lambda: edited)
    with pytest.raises(UserError, match='1 runs failed'):
        compare.main(args)
    assert f'{compare.TRAINS} was changed since compare.py began' in capsys.readouterr().err
    monkeypatch.setattr(compare, 'CODE', compare.code())    # started again
    compare.main(args)

    os.remove(tmp_path / 'runs.jsonl')      # as if it had been stopped
    monkeypatch.setattr(compare, 'source_of_model', lambda: begun)
    monkeypatch.setattr(compare, 'CODE', compare.code())
    with pytest.raises(UserError, match='1 runs failed'):
        compare.main(args)
    assert f'plain-s1 was begun with another {compare.TRAINS}' in capsys.readouterr().err
    for module in ('train_py', 'muon'):     # as if it had other lines
        with monkeypatch.context() as patch:
            patch.setattr(compare, module, prepare_data)
            assert compare.code() != compare.CODE
    assert in_process == ['plain-s1']


def test_a_finished_run_of_another_model_py_stands_in_no_table(common, in_process, tmp_path,
                                                              monkeypatch):
    args = [*common, '--names=plain', '--seeds=1', f'--out={tmp_path}']
    compare.main(args)
    monkeypatch.setattr(compare, 'CODE', 'an edited one')
    with pytest.raises(UserError, match=f'has plain, seed 1, of another {compare.TRAINS}'):
        compare.main(args)
    assert in_process == ['plain-s1']


def test_what_the_runs_choose_is_not_given_for_all(common, in_process, tmp_path, monkeypatch):
    args = [*common, '--seeds=1', f'--out={tmp_path}']
    for given in ('--ponder=loop', '--depth_attn=True'):
        with pytest.raises(UserError, match='chosen here for each run.*a line more of RUNS'):
            compare.main([*args, given, '--names=plain,chain'])
    mine = tmp_path / 'mine.py'
    mine.write_text("out_dir = 'x'\nponder = 'loop'\nweight_decay = 0.0\n")
    monkeypatch.setitem(compare.RUNS, 'mine', (os.path.splitext(mine)[0],))
    with pytest.raises(UserError, match='mine.py sets weight_decay, which is to be the same'):
        compare.main([*args, '--names=plain,mine'])
    assert not in_process


def test_which_runs_are_plain():
    names = ['plain', 'plain_scaled_4x', 'plain_ponderlm_as_gate', 'plain_scaled+depth_attn',
             'plain_scaled+depth_attn_4x', 'plain_smear', 'loop']
    names[:0] = ['plain@3e-3', 'plain_scaled_2x@3e-3_as_loop']
    assert [compare.is_plain(name) for name in names] == [True] * 5 + [False] * 4


def texts(seed):
    return [f'text {seed} {i} '.encode() * 20 for i in range(99)]


def test_the_loss_of_feedback_is_measured_token_by_token_too(common, in_process, tmp_path):
    for steps, as_exact in (2, False), (7, True):       # in windows of 8 tokens
        out = tmp_path / str(steps)
        compare.main([*common, '--block_size=8', '--init_std=0.2', f'--ponder_steps={steps}',
                      '--names=feedback', '--seeds=1', f'--out={out}'])
        [r] = records_in(out)
        near = r['exact_nats_per_byte'] == pytest.approx(r['val_nats_per_byte'], abs=1e-4)
        assert near == as_exact


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_it_is_measured_in_the_precision_of_the_run(dtype, common, in_process, tmp_path,
                                                    monkeypatch):
    """As the loss of the model that it stands beside."""
    token_nats, computed_in = compare.token_nats, []

    def watched(*args, **options):
        mixed = torch.is_autocast_enabled('cpu')
        computed_in.append(torch.get_autocast_dtype('cpu') if mixed else torch.float32)
        return token_nats(*args, **options)
    monkeypatch.setattr(compare, 'token_nats', watched)
    compare.main([*common, f'--dtype={dtype}', '--block_size=8', '--names=feedback', '--seeds=1',
                  f'--out={tmp_path}'])
    assert computed_in == [getattr(torch, dtype)]


def test_a_run_killed_in_its_last_evaluation_ends_like_the_uninterrupted_one(common, tmp_path):
    """From a shell."""
    folder = tmp_path / 'loop-s3'
    loop = os.path.join(ROOT, 'config', 'loop.py')
    train.main([loop, *common, '--seed=3', f'--out_dir={folder}', '--threads=1'])
    lines = (folder / 'log.jsonl').read_text().splitlines(keepends=True)
    want = json.loads(lines[-1])
    (folder / 'log.jsonl').write_text(''.join(lines[:-1]) + '{"step": 4, "val')
    (folder / 'code.txt').write_text(compare.CODE)
    program('tools/compare.py', *common, f'--out={tmp_path}', '--names=loop', '--seeds=3',
            '--threads=1', OMP_NUM_THREADS='2')
    [r] = records_in(tmp_path)
    assert r['val_nats_per_byte'] == want['val_nats_per_byte']
    assert (r['steps'], r['tokens'], r['seed']) == (4, 256, 3)
    assert r['flops'] == 256 * flops_per_token(
        GPT(GPTConfig(**load_checkpoint(str(folder))['config'])))
    assert r['hardware'].endswith(', 1 threads, float32')   # the run's, not compare.py's
    assert 'resume' not in r['command']
    with pytest.raises(UserError, match='is at step 4 of max_steps=4'):
        train.main(['--init_from=resume', f'--out_dir={folder}'])
    assert r['command'].startswith('python train.py config/loop.py --n_layer=2')
    assert (folder / 'output.txt').stat().st_size > 0

    # its steps are not taken again
    ms = [line['ms'] for line in compare.read_lines(folder / 'log.jsonl') if 'ms' in line]
    assert len(ms) == 4 and r['seconds'] == pytest.approx(sum(ms) / 1e3)


def test_ended_by_sigterm_its_run_saves(common, tmp_path):
    command = [sys.executable, os.path.join(ROOT, 'tools', 'compare.py'), *common,
               '--max_steps=100000', f'--out={tmp_path}', '--names=loop', '--seeds=3',
               '--save_interval=100000']
    folder = tmp_path / 'loop-s3'
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL) as ours:
        while ours.poll() is None and len(compare.read_lines(folder / 'log.jsonl')) < 3:
            time.sleep(0.05)
        ours.terminate()
    assert ours.returncode == 128 + signal.SIGTERM
    assert load_checkpoint(str(folder))['step'] >= 2


def test_a_run_that_fails_says_why_and_warnings_are_told(common, tmp_path, capsys):
    args = [*common, f'--out_dir={tmp_path}/a', '--batch_tokens=100', '--ponder_topk=9']
    with pytest.raises(UserError, match='a, seed 1 ended.*batch_tokens=100.*output.txt'):
        compare.train('a, seed 1', args, str(tmp_path / 'a'), dict(max_steps=4))
    assert 'a, seed 1: warning: ponder_topk: without effect' in capsys.readouterr().err


def test_on_a_made_task_right_answers_are_counted(in_process, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    prepare_data.prepare(DataSettings(problems=300), ['addition'])
    compare.main([*RECIPE, '--data_dir=data/addition', '--out=out', '--names=plain,loop',
                  '--seeds=1', '--answers=10'])
    told = capsys.readouterr().out
    [loop] = [row for row in cells(told) if row[0] == 'loop']
    assert loop[:5] == ['loop', '0 of 1', '0.0%', '0.0% to 0.0%', '4.00']
    assert 'Right answers are of 10 problems.' in told
    assert [r['problems'] for r in compare.read_lines('out/runs.jsonl')] == [10, 10]


def test_the_flops_are_those_of_the_sequences_that_a_step_has(common):
    """The head of a large vocabulary takes some rows at once, so their number counts."""
    def flops(size):
        args = ['config/vanilla.py', *common, '--vocab_size=50304', '--block_size=512',
                '--batch_tokens=1024', f'--micro_batch={size}']
        s, config = compare.configs_of(args)
        return compare.flops_of(config, s)
    assert flops(64) == flops(2) != flops(1)        # a step has two


# -------------------------------------------------------------------------------------------------
# The table


def table_of(*runs, beside=None, **more):
    """The cells of the table of runs (name, seed, loss, FLOPs), without its header."""
    records = []
    for name, seed, loss, flops in runs:
        records.append(dict(name=name, seed=seed, val_nats_per_byte=loss, flops=flops, seconds=10,
                            commit='abc', torch='2.13.0', hardware='a CPU', date='2026-01-01',
                            **{key: values[len(records)] for key, values in more.items()}))
    return cells(compare.table_of(records, beside))[1:]


def test_the_table_of_losses_by_hand():
    plain, _, loop, _, latent = table_of(('plain_scaled', 1, 1.5, 100),
                                         ('plain_scaled', 2, 1.7, 100),
                                         ('plain_scaled', 4, 1.6, 100),
                                         ('other', 1, 1.6, 100),
                                         ('loop', 1, 1.4, 400),
                                         ('loop', 2, 1.3, 400),
                                         ('loop', 3, 1.2, 400),
                                         ('loop', 4, 1.3, 400),
                                         ('plain_scaled_as_pause', 2, 1.25, 410),
                                         ('latent', 2, 1.0, 440),
                                         ('plain_scaled_4x', 2, 1.0, 385))[:5]
    assert plain == ['plain_scaled', '3', '1.6000', '1.5000 to 1.7000', '', '', '1.00']
    # paired by seed: the mean of -0.1, -0.4 and -0.3; of the plain runs whose FLOPs are within 5 %
    # the nearest counts, which has 2.5 % more
    assert loop == ['loop', '4', '1.3000', '1.2000 to 1.4000',
                    '-0.2667 (-0.4000 to -0.1000), better, 3 seeds',
                    '+0.0500 (+0.0500 to +0.0500), worse, 1 seed', '4.00']
    assert latent[4:] == ['-0.7000 (-0.7000 to -0.7000), better, 1 seed', '', '4.40']


@pytest.mark.parametrize('rate', ['', '@3e-3'])
def test_of_as_many_flops_is_who_was_trained_for_them_and_not_who_is_deeper(rate):
    rows = table_of((f'plain_scaled{rate}_as_loop_2', 1, 1.125, 202),
                    (f'plain_scaled{rate}', 1, 1.5, 100), (f'loop_2{rate}', 1, 1.25, 200),
                    (f'plain_scaled_2x{rate}', 1, 1.0, 200))
    assert rows[2][4:6] == ['-0.2500 (-0.2500 to -0.2500), better, 1 seed',
                            '+0.1250 (+0.1250 to +0.1250), worse, 1 seed']


def fails(*_):
    raise UserError("20 steps with a loss that is not finite")


def test_each_runs_at_the_best_of_its_rates(common, in_process, tmp_path, capsys, monkeypatch):
    """Which a seed chooses that is in no row of the table."""
    common.remove('--learning_rate=0.01')
    recipe = tmp_path / 'recipe.py'
    recipe.write_text('learning_rate = 1.0')        # of a file, it gives way to --lrs
    args = [*common, str(recipe), '--names=plain,plain_2x', '--seeds=1,2', '--lrs=1e-5,1e-2,1',
            f'--out={tmp_path}']
    compare.main(args)
    told = capsys.readouterr().out
    tried = ['@1e-5-s0', '@1e-2-s0', '@1-s0']
    assert in_process[:6] == [f'{name}{end}' for name in ('plain', 'plain_2x') for end in tried]
    best = {}
    for r in records_in(tmp_path):
        assert r['picks'] == (r['seed'] == 0) and r['optimizer'] == 'adamw'
        assert float(r['name'].partition('@')[2]) == r['learning_rate']
        if r['picks']:
            best.setdefault(r['name'].partition('@')[0], []).append((r[compare.LOSS], r['name']))
    chosen = [min(best[name])[1] for name in ('plain', 'plain_2x')]
    assert in_process[6:] == [f'{name}-s{seed}' for seed in (1, 2) for name in chosen]
    assert '1e-5' not in ' '.join(chosen)     # nothing is learned with it
    _, table = told.split('\n\n', 1)
    assert [row[:2] for row in cells(table)[1:]] == [[name, '2'] for name in chosen]
    assert 'Tried with other seeds: plain@1e-5 (seed 0) ' in table

    compare.main(args)      # nothing is made twice
    assert len(in_process) == 10

    with monkeypatch.context() as patch:
        patch.setattr(compare, 'make_run', fails)
        with pytest.raises(UserError, match='2 of the runs that choose a rate failed.*too high'):
            compare.main([*args, '--names=loop', '--lrs=1e-2,1'])
    compare.main([*common, '--names=plain', '--seeds=0', '--lrs=1e-2', f'--out={tmp_path}/one'])
    assert len(in_process) == 11        # of one rate no seed need choose
    assert '@1e-2 ' in capsys.readouterr().out


def test_several_seeds_choose_a_rate_together(common, in_process, tmp_path):
    common.remove('--learning_rate=0.01')
    compare.main([*common, '--names=plain', '--seeds=2', '--lrs=1e-5,1e-2', '--pick=0,1',
                  f'--out={tmp_path}'])
    assert in_process == ['plain@1e-5-s0', 'plain@1e-2-s0', 'plain@1e-5-s1', 'plain@1e-2-s1',
                          'plain@1e-2-s2']
    assert [r['picks'] for r in records_in(tmp_path)] == [True] * 4 + [False]

    more = [*common, '--names=plain', '--lrs=1e-5,1e-2', f'--out={tmp_path}']
    with pytest.raises(UserError, match='seed 1, which was made to choose and would now judge'):
        compare.main([*more, '--seeds=1,2'])
    with pytest.raises(UserError, match='seed 2, which was made to judge and would now choose'):
        compare.main([*more, '--seeds=3', '--pick=0,1,2'])

    ends = {('1e-3', 0): 1.0, ('1e-3', 1): 4.0, ('2e-3', 0): 2.0, ('2e-3', 1): 2.0}
    path = tmp_path / 'more.jsonl'
    path.write_text(''.join(json.dumps(dict(name=f'plain@{rate}', seed=seed, val_nats_per_byte=end))
                            + '\n' for (rate, seed), end in ends.items()))
    rates = ['1e-3', '2e-3']
    assert [compare.best_rate('plain', rates, seeds, path) for seeds in ([0], [1], [0, 1])] == [
        '1e-3', '2e-3', '2e-3']


def test_of_a_made_task_the_rate_with_more_right_answers_is_best(tmp_path):
    lines = [dict(name=f'plain@{rate}', seed=0, right=right, val_nats_per_byte=loss)
             for rate, right, loss in (('1e-3', 0.5, 0.1), ('2e-3', 0.9, 0.2), ('4e-3', 0.9, 0.3))]
    path = tmp_path / 'runs.jsonl'
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    assert compare.best_rate('plain', ['1e-3', '2e-3', '4e-3'], [0], path) == '2e-3'


def test_a_rate_at_the_edge_of_those_tried_is_told(capsys, tmp_path):
    lines = [dict(name=f'plain@{rate}', seed=0, val_nats_per_byte=loss)
             for rate, loss in (('1e-3', 3.0), ('2e-3', 2.0), ('4e-3', 1.0))]
    path = tmp_path / 'runs.jsonl'
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    assert compare.best_rate('plain', ['1e-3', '2e-3', '4e-3'], [0], path) == '4e-3'
    assert 'plain: 4e-3 is the best of --lrs and at its edge' in capsys.readouterr().out
    path.write_text(''.join(json.dumps({**line, 'val_nats_per_byte': abs(i - 1)}) + '\n'
                            for i, line in enumerate(lines)))
    assert compare.best_rate('plain', ['1e-3', '2e-3', '4e-3'], [0], path) == '2e-3'
    assert not capsys.readouterr().out


@pytest.mark.parametrize('rate', ['', '@3e-3'])
def test_of_plain_runs_of_equal_flops_that_counts_which_starts_alike(rate):
    runs = [('plain', 1, 1.5, 100), ('plain_scaled', 1, 1.25, 100),
            ('plain_ponderlm', 1, 1.75, 100), ('smear', 1, 1.0, 100),
            ('depth_attn', 1, 1.0, 101), ('plain_scaled_2x', 1, 1.0, 200),
            ('plain_ponderlm_2x', 1, 1.5, 202), ('embedding_1', 1, 1.25, 200)]
    rows = table_of(*[(name + rate, *run) for name, *run in runs])
    minus = {row[0].removesuffix(rate): row[5].split(' ')[0] for row in rows if len(row) > 5}
    assert minus == {'plain': '', 'plain_scaled': '-0.2500', 'plain_ponderlm': '+0.2500',
                     'smear': '-0.2500', 'depth_attn': '-0.5000', 'plain_scaled_2x': '',
                     'plain_ponderlm_2x': '', 'embedding_1': '-0.2500'}


def test_without_beside_a_method_stands_beside_the_plain_run_that_starts_alike():
    runs = [('plain', 1, 1.5, 100), ('plain_scaled', 1, 1.25, 100), ('embedding', 1, 1.0, 400),
            ('loop@3e-3', 1, 1.0, 400), ('depth_attn', 1, 1.0, 101),
            ('plain_scaled_2x', 1, 1.0, 200)]
    minus = {row[0]: row[4].split(' ')[0] for row in table_of(*runs) if len(row) > 5}
    assert minus == {'plain': '', 'plain_scaled': '', 'embedding': '', 'loop@3e-3': '-0.2500',
                     'depth_attn': '-0.5000', 'plain_scaled_2x': '-0.2500'}


def test_a_start_that_no_plain_run_has_stands_beside_none(monkeypatch):
    monkeypatch.setitem(compare.RUNS, 'mine', ('loop', '--embed_scale=1.0'))
    monkeypatch.setitem(compare.METHODS, 'mine', compare.RUNS['mine'])
    runs = [('plain_stock', 1, 2.5, 100), ('plain', 1, 1.5, 100), ('mine', 1, 1.0, 100)]
    assert table_of(*runs)[2][4:6] == ['', '-0.5000 (-0.5000 to -0.5000), better, 1 seed']
    assert table_of(*runs, beside='plain')[2][4].startswith('-0.5000')
    names = compare.names_of(compare.CompareSettings())
    assert not any(name.startswith('None') for name in names)
    assert 'plain_scaled_as_loop' in names and 'plain_scaled_as_smear' not in names


@pytest.mark.parametrize('name, file, option, start', [
    ('mine', 'embedding', '--ponder_steps=1', 'plain_ponderlm'),
    ('plainest', 'loop', '--ponder_steps=1', 'plain_scaled'),
    ('depth_x', 'halting_gate', '--ponder_steps=1', 'plain_ponderlm'),
    ('inject', 'vanilla', '--ponder=loop', 'plain_scaled'),     # as docs/modify.md names one
    ('paused', 'depth_attn', '--ponder=pause', 'plain_ponderlm'),
    ('wide', 'vanilla', '--n_embd=384', 'plain'),
    ('unscaled', 'loop', '--embed_scale=1.0', None),    # no plain run has this start
    ('small', 'vanilla', '--init_std=0.01', None),
])
def test_a_run_of_ones_own_starts_as_its_settings_say(name, file, option, start, monkeypatch):
    monkeypatch.setitem(compare.RUNS, name, (file, option))
    assert compare.start_of(f'{name}_2x@3e-3_as_loop') == start


def test_a_run_of_ones_own_is_not_called_as_a_change_of_another(common, monkeypatch):
    monkeypatch.setitem(compare.RUNS, 'loop_4x', ('loop', '--ponder_steps=7'))
    with pytest.raises(UserError, match='RUNS has loop_4x.*another name'):
        compare.make_plan('loop_4x', common)


def test_where_others_start():
    assert compare.start_of('depth_attn') == 'plain'
    assert compare.start_of('of_old_records') == 'plain_scaled'


@pytest.mark.parametrize('differences, word', [
    ((-0.02, 0.005, 0.01), 'level'),
    ((-0.021, 0.005, 0.01), 'seeds disagree'),      # a seed is too far away
    ((0.011, 0.012, 0.01), 'worse'),                # so is the mean, if no seed
    ((-0.03, -0.001, -0.02), 'better'),
    ((-0.03, 0.0, -0.02), 'seeds disagree'),
    ((0.03, 0.0004, 0.02), 'seeds disagree'),       # as it is shown, 0.000
    ((-0.5,), 'better'),
])
def test_a_verdict_is_by_the_rule_of_the_claims(differences, word):
    assert compare.verdict(differences) == word


def test_runs_of_several_dtypes_are_told():
    records = []
    for seed, dtype in (1, ', float32'), (2, ', bfloat16'), (3, ''):    # older records say nothing
        records.append(dict(name='loop', seed=seed, val_nats_per_byte=1.0, flops=1, seconds=1,
                            commit='a', torch='2', date='d', hardware=f'a CPU, 1 threads{dtype}'))
    told = compare.table_of(records)
    assert told.endswith('\nin float32: loop, seed 1\nin bfloat16: loop, seed 2')
    assert 'in float32' not in compare.table_of([records[0], records[2]])


def test_differences_are_to_the_run_that_beside_names():
    runs = [('plain', 1, 1.5, 100), ('plain_2x@3e-3', 1, 1.25, 100), ('loop', 1, 1.0, 100)]
    plain, other, loop = table_of(*runs, beside='plain_2x')[:3]
    assert plain[4] == '+0.2500 (+0.2500 to +0.2500), worse, 1 seed' and other[4] == ''
    assert loop[4] == '-0.2500 (-0.2500 to -0.2500), better, 1 seed'
    assert table_of(*runs, beside='plain_2x@3e-3')[:3] == [plain, other, loop]
    with pytest.raises(UserError, match='beside=chain: no finished run of .* are plain, '):
        table_of(*runs, beside='chain')


def test_a_verdict_tells_its_seeds_where_they_are_few_or_fewer_than_the_row_has():
    plain = [('plain_scaled', seed, 1.0, 100) for seed in (1, 2, 3)]
    loop = [('loop', seed, 2.0, 100) for seed in (1, 2, 3, 4)]
    for runs, words in ((loop[:2], ', 2 seeds'), (loop[:3], ''), (loop, ', 3 seeds')):
        verdicts = [row[4] for row in table_of(*plain, *runs) if row[0] == 'loop']
        assert verdicts == ['+1.0000 (+1.0000 to +1.0000), worse' + words]


@pytest.mark.parametrize('beside', [None, 'plain_scaled'])
def test_of_several_rates_of_the_base_the_best_counts(beside):
    """As after --lrs was widened; but not one that has run with fewer seeds so far."""
    runs = [('plain_scaled@1e-3', 1, 4.0, 100), ('plain_scaled@1e-3', 2, 4.0, 100),
            ('loop@1e-2', 1, 2.5, 400), ('loop@1e-2', 2, 2.5, 400)]
    wider = [('plain_scaled@1e-2', 1, 2.0, 100), ('plain_scaled@1e-2', 2, 2.0, 100)]
    assert table_of(*runs, *wider, beside=beside)[1][4].startswith('+0.5000')
    assert table_of(*runs, wider[0], beside=beside)[1][4].startswith('-1.5000')


def test_of_the_plain_runs_of_equal_flops_the_best_rate_counts():
    runs = [('plain_scaled@3e-3', 1, 1.2, 100), ('plain_scaled@3e-3_as_loop', 1, 1.16, 400),
            ('plain_scaled@6e-3_as_loop', 1, 1.07, 400), ('loop@3e-3', 1, 1.1, 400)]
    for order in runs, runs[::-1]:
        [row] = [row for row in table_of(*order) if row[0] == 'loop@3e-3']
        assert row[5].startswith('+0.0300')


def test_a_file_shows_the_names_and_seeds_that_were_asked_for(tmp_path, capsys):
    file = str(tmp_path / 'runs.jsonl')
    more = dict(flops=100, seconds=10, commit='abc', torch='2.13.0', hardware='a CPU', date='today')
    with open(file, 'w', encoding='utf-8') as f:
        for name, seed in (('plain', 1), ('plain', 2), ('loop@1e-3', 1), ('loop@1e-3', 2)):
            f.write(json.dumps(dict(name=name, seed=seed, val_nats_per_byte=seed, **more)) + '\n')
    compare.main([file, '--names=loop', '--seeds=2'])
    assert [row[:3] for row in cells(capsys.readouterr().out)[1:]] == [['loop@1e-3', '1', '2.0000']]
    for asked in '--names=smear', '--seeds=1,3':
        with pytest.raises(UserError, match=f'{asked[:7]}: there is no finished run of (smear|3)'):
            compare.main([file, asked])


def test_differences_are_of_losses_read_token_by_token():
    """The model that is published generates so; iteration flatters Feedback."""
    row = table_of(('smear', 1, 2.0, 100), ('feedback', 1, 1.5, 400), beside='smear',
                   exact_nats_per_byte=[2.0, 2.25])[1]
    assert row[2] == '2.2500' and row[4].startswith('+0.2500')


def test_a_table_is_of_one_recipe():
    """As of two runs.jsonl in one file."""
    with pytest.raises(UserError, match='loop, seed 1, is there twice.*one of both is c 2'):
        table_of(('loop', 1, 1.5, 100), ('loop', 2, 1.5, 100), ('loop', 1, 1.0, 100),
                 command=['c 0', 'c 1', 'c 2'])


def test_the_commands_of_the_page_start(monkeypatch):
    with open(os.path.join(ROOT, 'docs', 'compare.md'), encoding='utf-8') as f:
        page = f.read().replace('\\\n', ' ')
    commands = re.findall(r'^python tools/compare.py (.*)$', page, re.M)
    ours = re.search(r'^  (--out=out/mine .*)$', page, re.M)[1]
    commands.append(re.sub(r'--out=\S+ --names=\S+', ours, commands[0]))
    monkeypatch.setattr(compare.prepare_data, 'prepare_builtin', lambda folder: None)
    monkeypatch.setattr(compare, 'make_all', lambda *_: 99)
    assert len(commands) > 3
    for command in commands:
        with pytest.raises(UserError, match='99 runs failed|no finished run'):
            compare.main(shlex.split(command))


def test_the_flops_of_a_record_are_near_those_of_its_model():
    record = dict(tokens=10, flops=1030)
    assert [compare.has_flops(record, flops) for flops in (100, 103, 110)] == [True, True, False]


def test_the_table_says_if_model_py_was_changed_between_its_runs():
    common = dict(seed=1, val_nats_per_byte=1.5, flops=100, seconds=10, commit='abc-dirty',
                  torch='2.13.0', hardware='a CPU', date='2026-01-01')
    runs = [dict(name=name, model=of, **common)
            for name, of in [('plain', 'a'), ('loop', 'b'), ('chain', 'b')]]
    told = f'{compare.TRAINS} was changed between: plain, seed 1 | loop, seed 1; chain, seed 1'
    assert compare.table_of(runs).endswith(told)
    assert 'changed' not in compare.table_of(runs[1:])


def test_the_table_of_right_answers_has_medians_and_seeds_that_learned():
    _, loop = table_of(('plain', 1, 1.5, 100), ('loop', 1, 1.4, 400), ('loop', 2, 1.2, 400),
                       ('loop', 3, 1.3, 400), right=[0.5, 0.95, 0.2, 0.9], passes=[1, 4, 3, 9])
    assert loop == ['loop', '2 of 3', '90.0%', '20.0% to 95.0%', '4.00', '1.3000', '4.00']
