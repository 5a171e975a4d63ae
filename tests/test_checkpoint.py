"""
The faults that happen to a run's folder: files cut short, flipped or foreign, a full disk, other
data, numbers that are not finite. What was lost is said; what is there is what was saved.
"""
import json
import math
import os
import shutil

import pytest
import test_train
import torch
from conftest import ROOT, TOGGLES, Evil, make, save
from test_train import QUICK, SHAPE, log_of, same_weights

import sample
import train
from engine import checkpoint, start
from engine.checkpoint import load_checkpoint, model_of, save_checkpoint
from engine.files import UserError, alone, whole
from engine.shards import get_tokenizer
from engine.trained import load_model
from model import GPT, MLP
from prepare_data import write_dataset
from tools import evaluate
from train import Trainer

run_train = test_train.run_train    # the fixture


@pytest.fixture(scope='module')
def trained(small_data, tmp_path_factory):
    """The folder of a run: checkpoints of its steps 4 and 2."""
    folder = tmp_path_factory.mktemp('trained') / 'out'
    train.main([*SHAPE, *QUICK, f'--data_dir={small_data}', f'--out_dir={folder}',
                '--max_steps=4', '--save_interval=2'])
    return folder


@pytest.fixture
def out(trained, tmp_path):
    """A copy of it, for one test."""
    return shutil.copytree(trained, tmp_path / 'out')


def why(folder):
    """The one line with which a folder is refused."""
    with pytest.raises(UserError) as error:
        load_checkpoint(str(folder))
    assert '\n' not in str(error.value)
    return str(error.value)


def rewrite(folder, **fields):
    """Put other fields into its checkpoint, as no program does."""
    state = torch.load(folder / 'ckpt.pt', weights_only=True)
    torch.save({**state, **fields}, folder / 'other.pt')
    (folder / 'other.pt').replace(folder / 'ckpt.pt')   # what was loaded before may be mapped


# ---- files ---------------------------------------------------------------------------------------

def cut(content):
    return content[:len(content) // 2]


def flip(content):
    """A bit in each of 128 bytes: tensors are aligned to 64, and what fills up is not checked."""
    middle = len(content) // 2
    flipped = bytes(byte ^ 1 for byte in content[middle:middle + 128])
    return content[:middle] + flipped + content[middle + 128:]


@pytest.mark.parametrize('damage', [cut, flip, lambda content: b''])
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(out, capsys, damage):
    path = out / 'ckpt.pt'
    path.write_bytes(damage(path.read_bytes()))
    assert load_checkpoint(str(out))['step'] == 2
    told = capsys.readouterr().err
    assert 'ckpt.pt: damaged' in told and 'using' in told and told.count('\n') == 1

    path = out / 'ckpt_prev.pt'
    path.write_bytes(damage(path.read_bytes()))
    assert 'ckpt_prev.pt: damaged' in why(out)


@pytest.mark.parametrize('damage', [cut, flip, lambda content: b''])
def test_a_damaged_one_does_not_take_the_place_of_the_one_before(out, damage):
    path = out / 'ckpt.pt'
    path.write_bytes(damage(path.read_bytes()))
    save_checkpoint(str(out), {**load_checkpoint(str(out)), 'step': 5})
    assert load_checkpoint(str(out))['step'] == 5
    os.remove(path)     # as in a run killed between the two renames
    assert load_checkpoint(str(out))['step'] == 2


def test_a_run_killed_between_the_two_renames(run_train, out, capsys):
    os.remove(out / 'ckpt.pt')
    assert load_checkpoint(str(out))['step'] == 2
    told = capsys.readouterr().err
    assert 'ckpt.pt: missing; using' in told and told.count('\n') == 1
    straight = run_train('straight', '--max_steps=4')
    with pytest.raises(UserError, match='--init_from=resume'):
        run_train('out', '--max_steps=4')
    same_weights(straight, run_train('out', '--max_steps=4', '--init_from=resume'))


def test_folders_without_a_checkpoint(tmp_path, out):
    assert 'no checkpoint here' in why(tmp_path / 'nowhere')
    assert 'name the folder it is in' in why(out / 'ckpt.pt')
    (tmp_path / 'ckpt.pt').write_bytes(b'a text')
    assert 'not a checkpoint of this program' in why(tmp_path)
    torch.save({'some': 'dict'}, tmp_path / 'ckpt.pt')
    assert 'not a checkpoint of this program' in why(tmp_path)


def test_checkpoints_cannot_run_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({'version': 3, 'model': Evil()}, 'ckpt.pt')
    assert 'holds more than tensors' in why(tmp_path)
    assert not os.path.exists('executed')


def test_checkpoints_of_another_program(out, run_train, capsys):
    state = load_checkpoint(str(out))
    os.remove(out / 'ckpt_prev.pt')
    rewrite(out, version=2)
    assert 'version 2, this program has 3' in why(out)
    rewrite(out, version=3, config={**state['config'], 'ponder': 'telepathy'})
    assert 'telepathy' in why(out)
    rewrite(out, config=state['config'], settings={**state['settings'], 'min_lr': 0.5})
    run_train('out', '--init_from=resume', '--max_steps=5')
    assert 'no longer settings: min_lr' in capsys.readouterr().err


def test_a_setting_that_model_py_has_not_is_told(out, capsys):
    state = load_checkpoint(str(out))
    assert capsys.readouterr().err == ''
    rewrite(out, config={**state['config'], 'telepathy': 1})
    load_checkpoint(str(out))
    assert "ckpt.pt: model.py has no setting telepathy=1" in capsys.readouterr().err


def test_a_buffer_that_no_checkpoint_holds(out, monkeypatch):
    class Buffered(MLP):
        def __init__(self, config):
            super().__init__(config)
            self.register_buffer('table', torch.ones(2), persistent=False)

    monkeypatch.setattr('model.MLP', Buffered)
    with pytest.raises(UserError, match=r'lacks h\.0\.mlp\.table, .*without persistent=False'):
        model_of(load_checkpoint(str(out)))


def test_another_model_than_the_one_that_was_saved(out, run_train):
    state = load_checkpoint(str(out))
    rewrite(out, config={**state['config'], 'n_layer': 2})
    with pytest.raises(UserError, match='do not fit'):
        model_of(load_checkpoint(str(out)))

    parameters = state['optimizer']['param_groups'][0]['params']
    parameters[1], parameters[2] = parameters[2], parameters[1]     # as in a changed model.py
    rewrite(out, config=state['config'], optimizer=state['optimizer'])
    with pytest.raises(UserError, match='optimizer belongs to another model'):
        run_train('out', '--init_from=resume', '--max_steps=5')


def test_weights_alone_are_sampled_from_and_not_resumed(tmp_path, small_data):
    folder = save(tmp_path / 'weights', make(vocab_size=320, n_tokens=257).float(),
                  data_dir=small_data)
    sample.main([folder, '--device=cpu', '--max_new_tokens=1'])
    with pytest.raises(UserError, match='no optimizer state'):
        train.main(['--init_from=resume', f'--out_dir={folder}', '--batch_tokens=192'])


@pytest.mark.parametrize('toggle', ['plain_gqa', 'gate', 'mask', 'pause'])
def test_what_was_saved_is_loaded_bit_for_bit(tmp_path, toggle):
    model = make(**TOGGLES[toggle]).float()
    state = load_checkpoint(save(tmp_path, model))
    loaded = model_of(state)
    assert loaded.config == model.config
    assert loaded.num_params() == model.num_params(), "tied tables are one again"
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name])


# ---- files that others write over ----------------------------------------------------------------

def write_over(path, other):
    """As cp does: the same file, with other numbers."""
    content = other.read_bytes()
    with open(path, 'r+b') as f:
        f.write(content)


def test_a_model_is_its_own_whatever_is_copied_over_its_file(out, tmp_path):
    for halving in (None, torch.bfloat16):
        here = shutil.copytree(out, tmp_path / str(halving))
        if halving:
            state = torch.load(here / 'ckpt.pt', weights_only=True)
            rewrite(here, model={n: w.to(halving) for n, w in state['model'].items()})
        other = tmp_path / 'other.pt'
        state = torch.load(here / 'ckpt.pt', weights_only=True)
        torch.save({**state, 'model': {n: -w for n, w in state['model'].items()}}, other)
        model, *_ = load_model(str(here), 'cpu', 'bfloat16' if halving else 'float32')
        write_over(here / 'ckpt.pt', other)
        for name, weight in model.state_dict().items():
            assert torch.equal(weight, state['model'][name])


@pytest.mark.parametrize('reads', ['load_model', 'start'])
def test_a_file_that_is_written_over_while_it_is_read(reads, out, run_train, monkeypatch):
    def meanwhile(*args, load=checkpoint.load_weights, **options):
        load(*args, **options)
        write_over(out / 'ckpt.pt', out / 'ckpt_prev.pt')
    monkeypatch.setattr('engine.checkpoint.load_weights', meanwhile)
    monkeypatch.setattr('engine.start.load_weights', meanwhile)
    with pytest.raises(UserError, match='ckpt.pt: written over while it was read; start again'):
        if reads == 'load_model':
            load_model(str(out), 'cpu')
        else:
            run_train('new', f'--init_from={out}', '--max_steps=1')


# ---- saving --------------------------------------------------------------------------------------

def test_a_file_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    """Else a machine that loses power may leave an empty one there, and nothing of the old."""
    called = []
    for name in ('fsync', 'replace'):
        def watched(*args, name=name, call=getattr(os, name)):
            called.append(name)
            call(*args)
        monkeypatch.setattr(os, name, watched)
    with whole(str(tmp_path / 'a')) as f:
        f.write('text')
    assert called == ['fsync', 'replace']


def test_a_full_disk_keeps_the_old_checkpoint(out, run_train, monkeypatch):
    """PyTorch raises its own error over the disk's."""
    before = (out / 'ckpt.pt').read_bytes()

    def full(state, file):
        file.write(before[:1000])
        try:
            raise OSError(28, 'No space left on device')
        finally:
            raise RuntimeError('[enforce fail at inline_container.cc:672]')

    monkeypatch.setattr(torch, 'save', full)
    with pytest.raises(UserError, match='ckpt.pt: cannot be written.*No space left on device'):
        run_train('out', '--init_from=resume', '--max_steps=5')
    assert (out / 'ckpt.pt').read_bytes() == before
    assert not list(out.glob('*.tmp'))


def test_a_full_disk_keeps_the_settings_and_half_a_line_of_the_log_costs_no_other(out, run_train,
                                                                                   monkeypatch):
    before = (out / 'settings.json').read_text()

    def half(value, file, **_):
        file.write('{"seed": 1')
        raise OSError(28, 'No space left on device')

    with monkeypatch.context() as full:
        full.setattr(json, 'dump', half)
        with pytest.raises(UserError, match='out: cannot be written'):
            run_train('out', '--init_from=resume', '--max_steps=5')
    assert (out / 'settings.json').read_text() == before

    with open(out / 'log.jsonl', 'a') as f:
        f.write('{"step": 4, "val')
    run_train('out', '--init_from=resume', '--max_steps=5')
    lines = (out / 'log.jsonl').read_text().splitlines()
    lines.remove('{"step": 4, "val')
    assert [json.loads(line)['step'] for line in lines] == [1, 2, 4, 4, 5, 5]


def test_no_run_overwrites_another(out, run_train, tmp_path):
    with pytest.raises(UserError, match='out holds a checkpoint.*--init_from=resume'):
        run_train('out')
    with pytest.raises(UserError, match='out holds a checkpoint'):
        run_train('out', f'--init_from={out}', '--max_steps=5')
    with alone(str(out)), pytest.raises(UserError, match='another process writes here'):
        run_train('out', '--init_from=resume', '--max_steps=5')
    with pytest.raises(UserError, match='max_steps=4'):
        run_train('out', '--init_from=resume', '--max_steps=4')
    with pytest.raises(UserError, match='n_layer=4.*has 3'):
        run_train('out', '--init_from=resume', '--max_steps=5', '--n_layer=4')
    with pytest.raises(UserError, match='norm_eps=0.1, but the model loaded has 1e-05'):
        run_train('new', f'--init_from={out}', '--norm_eps=0.1')
    with pytest.raises(UserError, match='ponder=latent, but the model loaded has none'):
        run_train('out', '--init_from=resume', '--max_steps=5', '--ponder=latent')
    (tmp_path / 'file').write_text('in the way')
    with pytest.raises(UserError, match='cannot be written'):
        run_train(os.path.join('file', 'out'))


def while_it_waits_for_the_lock(monkeypatch, happens):
    """`happens()` when the next run has looked at everything, and asks for the lock."""
    def asked(folder):
        monkeypatch.setattr('engine.log.alone', alone)
        happens()
        return alone(folder)
    monkeypatch.setattr('engine.log.alone', asked)


def test_two_runs_that_begin_together(run_train, tmp_path, monkeypatch):
    """The one that gets the lock after the other has ended would train over its checkpoint."""
    while_it_waits_for_the_lock(monkeypatch, lambda: run_train('new', '--max_steps=3'))
    with pytest.raises(UserError, match='new holds a checkpoint.*--init_from=resume'):
        run_train('new', '--max_steps=2')
    assert load_checkpoint(str(tmp_path / 'new'))['step'] == 3

    more = ['new', '--init_from=resume']
    while_it_waits_for_the_lock(monkeypatch, lambda: run_train(*more, '--max_steps=5'))
    with pytest.raises(UserError, match='another run went on from the same checkpoint.*again'):
        run_train(*more, '--max_steps=4')
    assert load_checkpoint(str(tmp_path / 'new'))['step'] == 5
    assert run_train(*more, '--max_steps=6')['step'] == 6


# ---- numbers that are not finite -----------------------------------------------------------------

def test_weights_that_are_not_finite_are_not_saved(out, run_train, monkeypatch):
    """The update itself overflows: loss and gradient of its step are fine."""
    train_step = Trainer.train_step

    def overflow(self):
        result = train_step(self)
        self.model.ln_f.weight.data[3] = -math.inf
        return result

    monkeypatch.setattr(Trainer, 'train_step', overflow)
    with pytest.raises(UserError, match='after step 5 model.ln_f.weight is not finite.*learning_r'):
        run_train('out', '--init_from=resume', '--max_steps=5')
    assert load_checkpoint(str(out))['step'] == 4


def test_moments_that_are_not_finite_are_not_saved(out):
    state = torch.load(out / 'ckpt.pt', weights_only=True)
    state['optimizer']['state'][0]['exp_avg'][0, 0] = math.nan
    with pytest.raises(UserError, match='optimizer.0.exp_avg is not finite'):
        save_checkpoint(str(out), state)


@pytest.fixture
def spoiled(tmp_path):
    """A checkpoint whose finite weights make infinite sums."""
    model = make(vocab_size=320, n_tokens=257).float()
    model.h[0].mlp.c_proj.weight.data.fill_(3e38)
    return save(tmp_path / 'spoiled', model)


def test_nobody_reads_a_number_that_is_none(spoiled, small_data, tmp_path):
    with pytest.raises(UserError, match='output is not finite'):
        sample.main([spoiled, '--device=cpu', '--max_new_tokens=3'])
    (tmp_path / 'text').write_text('some text')
    with pytest.raises(UserError, match='text: the loss is not finite'):
        evaluate.main([spoiled, str(tmp_path / 'text'), '--device=cpu'])
    with pytest.raises(UserError, match='the validation loss is not finite'):
        train.main([f'--init_from={spoiled}', '--eval_only=True', f'--data_dir={small_data}',
                    '--device=cpu', '--dtype=float32', '--eval_tokens=24'])


def test_the_log_is_json_whatever_happens(run_train, monkeypatch, tmp_path):
    loss = GPT.token_losses
    monkeypatch.setattr(train, 'BAD_STEPS', 100)
    monkeypatch.setattr('model.GPT.loss', lambda self, h, y: loss(self, h, y).sum() * math.nan)
    with pytest.raises(UserError, match='validation loss'):
        run_train('out', '--max_steps=2')
    assert log_of(tmp_path / 'out')[0]['loss'] is None


# ---- data ----------------------------------------------------------------------------------------

@pytest.fixture
def other_data(tmp_path):
    """Another data set of bytes."""
    texts = [f'another text, number {i}\n'.encode() * 20 for i in range(100)]
    write_dataset(str(tmp_path / 'other'), texts, get_tokenizer('byte'), 0.2, 'test')
    return tmp_path / 'other'


def test_other_data_than_before_is_named(out, run_train, other_data, capsys):
    run_train('out', '--init_from=resume', '--max_steps=5')
    assert 'not what this model read before' not in capsys.readouterr().err
    run_train('out', '--init_from=resume', '--max_steps=6', f'--data_dir={other_data}')
    told = capsys.readouterr()
    for words in ('training data', 'validation set'):
        assert f'the {words} in {other_data} is not what this model read before' in told.err
    # more shards of one data set: what is held out is the same
    meta = json.loads((other_data / 'meta.json').read_text())
    more = {**meta, 'train': {**meta['train'], 'tokens': 1}}
    start.say_other_data('more', more, {'train_data': meta['train'], 'val_data': meta['val']})
    told_of_more = capsys.readouterr().err
    assert 'may read a text again' in told_of_more and 'validation' not in told_of_more
    assert f'from here on with max_steps=6 (was 5), data_dir={other_data} (was ' in told.out


def test_a_settings_json_that_takes_back_what_stands_before_it_is_told(out, tmp_path, capsys):
    file = str(out / 'settings.json')
    train.main([file, '--ponder=loop', f'--out_dir={tmp_path / "first"}', '--max_steps=1'])
    told = capsys.readouterr()
    assert 'stands behind' not in told.err and '\nponder=loop: ' in '\n' + told.out
    train.main(['--ponder=loop', '--dropout=0.1', file, '--dropout=0.1',
                f'--out_dir={tmp_path / "behind"}', '--max_steps=1'])
    told = capsys.readouterr()
    assert f'warning: {file} stands behind what sets ponder, and sets it anew' in told.err
    assert '\nponder=none: ' in '\n' + told.out
    # a config file takes back an option, and is meant to take back a file
    loop = os.path.join(ROOT, 'config', 'loop.py')
    train.main([file, '--ponder_steps=1', loop, f'--out_dir={tmp_path / "third"}', '--max_steps=1'])
    assert f'{loop} stands behind what sets ponder_steps, and' in capsys.readouterr().err


def test_weights_that_start_a_run_on_their_own_data_made_anew_are_named(
        out, run_train, other_data, capsys):
    """On other data they are at home: that is fine-tuning."""
    run_train('tuned', f'--init_from={out}', f'--data_dir={other_data}', '--max_steps=1')
    assert 'warning' not in capsys.readouterr().err
    write_dataset(str(other_data), [b'%d ' % i * 40 for i in range(99)], get_tokenizer('byte'),
                  0.2, 'test')
    tuned = other_data.parent / 'tuned'
    run_train('more', f'--init_from={tuned}', f'--data_dir={other_data}', '--max_steps=1')
    assert 'it may hold what the model was trained on' in capsys.readouterr().err


def spellings(folder, tmp_path):
    """Other paths to a folder below tmp_path, where the program runs."""
    (tmp_path / 'link').symlink_to(folder, target_is_directory=True)
    name = folder.name
    return [name, f'{name}/', f'./{name}', f'out/../{name}', str(folder), 'link']


def test_its_own_data_made_anew_is_named_however_it_is_spelled(run_train, other_data, tmp_path,
                                                               monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    paths = spellings(other_data, tmp_path)
    train.main([*SHAPE, *QUICK, '--data_dir=other', '--out_dir=out/v', '--max_steps=1'])
    for path in paths:
        assert start.is_own_data(path, dict(data_dir='other'))
    assert not start.is_own_data('elsewhere', dict(data_dir='other'))
    capsys.readouterr()
    train.main([*QUICK, '--init_from=resume', '--out_dir=out/v', '--max_steps=2',
                f'--data_dir={paths[1]}'])
    told = capsys.readouterr()
    assert 'what this model read before' not in told.err
    assert 'from here on with max_steps=2 (was 1)\n' in told.out

    texts = [b'%d ' % i * 40 for i in range(99)]
    write_dataset(str(other_data), texts, get_tokenizer('byte'), 0.2, 'test')
    write_dataset('elsewhere', texts, get_tokenizer('byte'), 0.2, 'test')
    shard = os.path.join('other', 'val_000000.bin')
    for path in 'link', shard, 'elsewhere':
        evaluate.main(['out/v', path, '--tokens=50', '--device=cpu'])
        told = capsys.readouterr().err.count('is not what this model read before')
        assert told == (path != 'elsewhere'), path
    starts = [*QUICK, '--init_from=./out/v/', '--max_steps=1']
    for path in 'link', 'elsewhere':
        for call in (f'--out_dir=new/{path}', '--eval_only=True'):
            train.main([*starts, f'--data_dir={path}', call])
            told = capsys.readouterr().err.count('is not what this model read before')
            splits = 1 if 'eval_only' in call else 2
            assert told == (0 if path == 'elsewhere' else splits), (path, call)

    (tmp_path / 'below').mkdir()
    monkeypatch.chdir(tmp_path / 'below')   # the checkpoint's path to its data begins above
    evaluate.main(['../out/v', '../other', '--tokens=50', '--device=cpu'])
    assert 'is not what this model read before' in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists('/proc/self/maps'), reason="Linux")
def test_a_run_that_goes_on_lets_go_of_its_old_file(out, run_train, monkeypatch):
    """Replaced, it would take disk space as long as it is mapped."""
    train_step, mapped = Trainer.train_step, []

    def looked(self):
        with open('/proc/self/maps', encoding='utf-8') as f:
            mapped.append(str(out) in f.read())
        return train_step(self)

    monkeypatch.setattr(Trainer, 'train_step', looked)
    run_train('out', '--init_from=resume', '--max_steps=5')
    assert mapped == [False]


def test_what_a_resumed_run_changes_is_said(run_train, capsys):
    """A setting that was given for a test, and would stay in the checkpoint."""
    run_train('out', '--ponder=loop', '--ponder_steps=2', '--max_steps=1')
    capsys.readouterr()
    again = ['--init_from=resume', '--ponder=loop', '--ponder_steps=2', '--head_dim=None']
    run_train('out', *again, '--max_steps=2', '--max_seconds=600')      # its own time is each run's
    assert 'from here on with max_steps=2 (was 1)\n' in capsys.readouterr().out
    run_train('out', *again, '--max_steps=3', '--ponder_steps=1')
    told = capsys.readouterr().out
    assert 'from here on with max_steps=3 (was 2), ponder_steps=1 (was 2)\n' in told


def test_a_setting_that_no_checkpoint_has_is_told(run_train, monkeypatch, capsys):
    run_train('out', '--max_steps=1')
    again = '--init_from=resume', '--max_steps=2'
    with monkeypatch.context() as patch:    # killed before it saves
        patch.setattr(Trainer, 'train_step', lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_train('out', *again, '--grad_clip=0.5')
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, 'run', lambda self: None)
        run_train('out', *again, '--grad_clip=0.5')
        assert 'warning' not in capsys.readouterr().err
        run_train('out', *again)
    assert 'settings.json says --grad_clip=0.5, but' in capsys.readouterr().err
    run_train('out', *again)        # writes settings.json anew
    run_train('out', '--init_from=resume', '--max_steps=3')
    assert capsys.readouterr().err.count('warning') == 1


def test_another_run_in_the_folder_is_told(run_train, tmp_path, monkeypatch, capsys):
    """Where no lock keeps it out: on another machine, on Windows, in a folder that was moved."""
    run_train('other', '--max_steps=1')
    run_train('out', '--max_steps=3', '--save_interval=1')
    assert 'another run' not in capsys.readouterr().out
    train_step = Trainer.train_step

    def meanwhile(self):
        if self.step == 4:
            shutil.copy(tmp_path / 'other' / 'ckpt.pt', tmp_path / 'out' / 'ckpt.pt')
        return train_step(self)
    monkeypatch.setattr(Trainer, 'train_step', meanwhile)
    run_train('out', '--init_from=resume', '--max_steps=6', '--save_interval=1')
    assert capsys.readouterr().out.count('warning: another run writes to') == 1


def test_data_of_another_tokenizer_is_refused(out, run_train, other_data):
    text = (other_data / 'meta.json').read_text()
    for old, new in (('"byte"', '"gpt2"'), ('"n_tokens": 257', '"n_tokens": 50257'),
                     ('"eot": 256', '"eot": 50256')):
        text = text.replace(old, new)
    (other_data / 'meta.json').write_text(text)
    with pytest.raises(UserError, match='50257 tokens.*gpt2.*n_tokens=257'):
        run_train('out', f'--data_dir={other_data}', '--init_from=resume', '--max_steps=6')
