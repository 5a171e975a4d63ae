"""
--track: what TensorBoard's own reader and wandb's own file hold is what log.jsonl holds; a run
ends well without them.
"""
import errno
import json
import math
import os
import struct
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, program, refused
from test_train import QUICK, SHAPE, log_of

import prepare_data
import train
from configurator import build
from engine import track
from engine.checkpoint import load_checkpoint
from engine.files import UserError
from engine.hardware import Ranks
from engine.log import Log, Stop
from tools import compare
from train import Settings, Trainer

COMMON = [*SHAPE, *QUICK, '--max_steps=6', '--log_interval=1', '--eval_interval=3',
          '--save_interval=4']
RUN = [*COMMON, '--ponder=loop', '--halting=exit']


def numbers_in(log):
    """{(name, step): number} of a log's lines, the later ones where a run went on."""
    return {(name, record['step']): value
            for record in log for name, value in track.numbers_of(record).items()}


def test_numbers_have_the_logs_names():
    record = dict(step=5, loss=2.5, mfu=None, val_passes=1.5, passes=[1.0, 0.5, 0.25])
    assert track.numbers_of(record) == {'loss': 2.5, 'val_passes': 1.5, 'passes': 1.75,
                                        'passes/1': 1.0, 'passes/2': 0.5, 'passes/3': 0.25}


# ---- TensorBoard ---------------------------------------------------------------------------------

@pytest.fixture
def in_process(tmp_path, small_data, monkeypatch):
    """Run train.py with these arguments, in this process and a folder where nothing else is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr('engine.log.SILENCE', math.inf)

    def run(*args):
        train.main([*RUN, f'--data_dir={small_data}', '--out_dir=out', *args])
    return run


def read_events(folder):
    """What TensorBoard shows: {(name, step): number}, {name: its last text}, [steps, repeated]."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(folder), size_guidance={'scalars': 0, 'tensors': 0})
    events.Reload()
    tags = events.Tags()
    steps = [(name, e.step) for name in tags['scalars'] for e in events.Scalars(name)]
    numbers = {(name, e.step): e.value for name in tags['scalars'] for e in events.Scalars(name)}
    texts = {name.removesuffix('/text_summary'):
             events.Tensors(name)[-1].tensor_proto.string_val[0].decode()
             for name in tags['tensors']}
    return numbers, texts, steps


def test_tensorboard_has_each_step_once_after_a_kill(in_process, tmp_path, monkeypatch, capsys):
    prepare_data.main(['addition', '--size=1', '--problems=200'])
    sums = ['--data_dir=data/addition', '--sample_tokens=9']
    step = Trainer.train_step

    def killed(self):
        if self.step == 5:
            raise KeyboardInterrupt     # without a save since step 4
        return step(self)

    monkeypatch.setattr(Trainer, 'train_step', killed)
    with pytest.raises(KeyboardInterrupt):
        in_process(*sums, '--track=tensorboard')
    monkeypatch.setattr(Trainer, 'train_step', step)
    in_process(*sums, '--init_from=resume', '--learning_rate=1e-3')    # kept: --track
    assert '--logdir=out' in capsys.readouterr().out

    log = log_of(tmp_path / 'out')
    assert [record['step'] for record in log if 'lr' in record] == [1, 2, 3, 4, 5, 5, 6]
    numbers, texts, steps = read_events('out/tensorboard')
    assert numbers == pytest.approx(numbers_in(log))
    steps = [one for one in steps if one[0] != 'tokens']    # which an evaluation has, too
    assert len(steps) == len({*steps})
    assert {('passes/4', 5), ('val_right', 3), ('val_loss', 6), ('grad_norm', 6)} < {*numbers}
    assert '    learning_rate   0.001\n' in texts['settings']   # as it went on
    assert '    ponder_steps   3\n' in texts['settings']
    problems = load_checkpoint('out')['exam']['problems']
    assert texts['answers'].count('=') == len(problems) > 1

    # an evaluation is no part of the run
    files = os.listdir('out/tensorboard')
    monkeypatch.setattr(track, 'MODULES', {'tensorboard': 'nowhere'})
    in_process(*sums, '--init_from=resume', '--eval_only=True')
    assert os.listdir('out/tensorboard') == files


def test_another_run_in_the_folder_replaces_the_one_before(in_process):
    in_process('--track=tensorboard')
    for name in ('ckpt.pt', 'ckpt_prev.pt'):
        os.remove(f'out/{name}')
    in_process('--track=tensorboard', '--max_steps=2')
    assert {step for _, step in read_events('out/tensorboard')[2]} == {1, 2}


def test_rank_0_alone(tmp_path):
    settings = Settings(out_dir=f'{tmp_path}/out', track='tensorboard')
    log = Log(settings, None, Stop(Ranks(1, 2), torch.device('cpu')))
    with log.open({}, {}, 0):
        assert log.tracker is None
    assert not os.listdir(tmp_path)


# ---- wandb ---------------------------------------------------------------------------------------

def read_wandb(path):
    """
    What is in wandb's offline file: {(name, step): number}, and the last record of each kind. The
    file is a log of LevelDB's: blocks of 32 KiB, in them pieces of records.
    """
    from wandb.proto.wandb_internal_pb2 import Record
    with open(path, 'rb') as f:
        data = f.read()
    numbers, last, place, whole = {}, {}, 7, b''
    while place < len(data):
        left = 2 ** 15 - place % 2 ** 15
        if left < 7:        # a block's padding
            place += left
            continue
        _, length, kind = struct.unpack('<IHB', data[place:place + 7])
        whole += data[place + 7:place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or its last piece
            record, whole = Record.FromString(whole), b''
            last[record.WhichOneof('record_type')] = record
            row = {item.nested_key[0]: json.loads(item.value_json)
                   for item in record.history.item if len(item.nested_key) == 1}   # no table
            numbers.update({(name, row['_step']): value for name, value in row.items()
                            if type(value) in (int, float) and name[0] != '_'})
    return numbers, last


def files_of_wandb(folder):
    return sorted((folder / 'wandb').glob('offline-run-*/run-*.wandb'))


def test_wandb_offline(small_data, tmp_path, monkeypatch):
    """A run of compare.py: in a group with the folder's name, and one run when it goes on."""
    monkeypatch.delenv('WANDB_RUN_GROUP', raising=False)
    monkeypatch.setenv('WANDB_MODE', 'offline')
    monkeypatch.setenv('HOME', str(tmp_path))
    out = tmp_path / 'texts' / 'exit-s1'
    compare.main([*COMMON, f'--data_dir={small_data}', '--sample_tokens=9', '--track=wandb',
                  f'--out={tmp_path}/texts', '--names=exit', '--seeds=1'])
    said = (out / 'output.txt').read_text()
    file, = files_of_wandb(out)
    assert f'track=wandb: wandb sync {file.parent}\n' in said
    numbers, last = read_wandb(file)
    assert numbers == pytest.approx(numbers_in(log_of(out)))
    run = last['run'].run
    assert (run.project, run.run_group, run.display_name) == ('nanoponder', 'texts', 'exit-s1')
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    with open(out / 'settings.json') as f:
        assert json.load(f).items() <= config.items()
    table, = file.parent.glob('files/media/table/sample_6_*.json')
    text = json.loads(table.read_text())['data'][0][0]
    assert '<|model|>' in text and text.split('<|model|>')[0] in said
    assert last['exit'].exit.exit_code == 0

    program('train.py', f'--out_dir={out}', '--init_from=resume', '--max_steps=8')  # kept: --track
    _, second = files_of_wandb(out)
    assert second.name == file.name     # the run's id
    assert {step for _, step in read_wandb(second)[0]} == {7, 8}


def test_wandb_another_run_in_the_folder_has_another_id(tmp_path, monkeypatch):
    ids = []

    def init(id, resume, settings, **more):
        assert resume == 'allow' and settings.finish_timeout_raises
        assert max(settings.init_timeout, settings.finish_timeout) < 60
        ids.append(id)
        raise TimeoutError

    monkeypatch.setattr('wandb.init', init)
    for step in (4, 4, 0, 5):
        with track.Tracker('wandb', str(tmp_path), print, {}, step):
            pass
    assert ids[0] == ids[1] != ids[2] == ids[3]


def test_wandb_takes_no_step_twice_and_the_run_says_so(tmp_path, monkeypatch):
    had = SimpleNamespace(step=9, dir=str(tmp_path / 'wandb'), disabled=False, offline=False,
                          url='u', finish=lambda exit_code: None)
    monkeypatch.setattr('wandb.init', lambda **settings: had)
    said = []
    for step in (8, 4):
        with track.Tracker('wandb', str(tmp_path), said.append, {}, step):
            pass
    assert [line for line in said if 'up to step' in line] == [
        'track=wandb: it has this run up to step 8, and takes none of these steps again; '
        'log.jsonl has them as they are now']


# ---- a run goes on without -----------------------------------------------------------------------

def test_wandb_that_cannot_begin_costs_one_line(in_process, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('HOME', str(tmp_path))   # where nobody has logged in
    monkeypatch.setenv('WANDB_MODE', 'online')
    monkeypatch.delenv('WANDB_API_KEY', raising=False)
    in_process('--track=wandb')
    assert capsys.readouterr().out.count('track=wandb failed (No API key configured') == 1
    assert len(log_of(tmp_path / 'out')) == 8   # 6 steps and 2 evaluations
    assert load_checkpoint('out')['step'] == 6


def test_tensorboard_that_fails_in_between_costs_one_line(in_process, tmp_path, monkeypatch,
                                                          capsys):
    from torch.utils.tensorboard import SummaryWriter

    def full(self, name, value, step):
        if step == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SummaryWriter, 'add_scalar', full)
    in_process('--track=tensorboard')
    said = capsys.readouterr().out
    assert said.count('track=tensorboard failed') == 1 and os.strerror(errno.ENOSPC) in said
    assert len(log_of(tmp_path / 'out')) == 8


def test_tensorboard_whose_disk_is_full(tmp_path, monkeypatch):
    """Its own thread finds out; neither later lines nor the end wait for it."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    said = []
    monkeypatch.setattr('threading.excepthook', lambda args: None)
    with track.Tracker('tensorboard', str(tmp_path), said.append, {}, 0) as tracker:
        monkeypatch.setattr(RecordWriter, 'write', full)
        for step in range(1, 100):
            tracker.log(dict(step=step, loss=1.0))
    assert ['failed' in line for line in said] == [False, True]


@pytest.fixture
def without_packages(tmp_path):
    """An environment in which neither can be imported; whoever tries leaves a file, `imported`."""
    for name in ('tensorboard', 'wandb'):
        code = f"open('imported', 'w').close()\nraise ImportError('No module {name}')\n"
        (tmp_path / f'{name}.py').write_text(code)
    return dict(PYTHONPATH=f'{tmp_path}{os.pathsep}{ROOT}')


# two runs in one process, of the second one's arguments
WITHOUT_AND_WITH = """
import os, sys, train
from engine.files import run

train.main([*sys.argv[2:], f'--data_dir={sys.argv[1]}', '--out_dir=without'])
assert not os.path.exists('imported')
run(lambda argv: train.main([*argv[1:], '--track=wandb']))
"""


def test_nothing_is_imported_unless_asked_for_and_then_before_anything_is_made(
        without_packages, small_data, tmp_path):
    done = program('-c', WITHOUT_AND_WITH, small_data, *RUN, '--max_steps=1', cwd=tmp_path,
                   ok=False, **without_packages)
    refused(done, 'track=wandb', 'No module wandb', 'pip install -r requirements-track.txt')
    assert (tmp_path / 'without' / 'ckpt.pt').exists() and (tmp_path / 'imported').exists()
    assert not (tmp_path / 'out').exists() and not (tmp_path / 'data').exists()


def test_a_broken_package_is_as_a_missing_one(monkeypatch):
    monkeypatch.setattr('tensorboard.__version__', '1.14')  # torch refuses it
    monkeypatch.delitem(sys.modules, 'torch.utils.tensorboard', raising=False)
    with pytest.raises(UserError, match='track=tensorboard .*1.15.*requirements-track.txt'):
        track.package_of('tensorboard')


def test_another_name_is_refused():
    with pytest.raises(UserError, match="track='neptune' must be 'tensorboard' or 'wandb'"):
        build(Settings, dict(track='neptune'))


# ---- tools/compare.py ----------------------------------------------------------------------------

def test_compare_in_tensorboard(small_data, tmp_path, monkeypatch):
    """Each run has its name there, in the folder of them all."""
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
    monkeypatch.setattr(compare, 'train', lambda label, args, *rest: train.main(args))
    compare.main([*COMMON, f'--data_dir={small_data}', '--track=tensorboard',
                  f'--out={tmp_path}', '--names=plain', '--seeds=1,2'])
    shown = EventMultiplexer().AddRunsFromDirectory(str(tmp_path))
    assert {*shown.Runs()} == {'plain-s1/tensorboard', 'plain-s2/tensorboard'}
