"""NaN and infinity are never a success: at the end of a run, in a checkpoint, or in a sample."""

import json
import math

import pytest
import test_train
import torch
from conftest import make, save
from test_train import ALONE, CPU, log_of, same_weights, stopped_at

import sample
from engine.checkpoint import kept, load_checkpoint
from engine.files import UserError
from engine.output import Output, Stop
from model import GPT
from tools import evaluate
from train import Trainer

run_train, make_trainer = test_train.run_train, test_train.make_trainer     # the fixtures
LR = 'lower learning_rate'


@pytest.fixture
def bad_from(monkeypatch):
    """bad_from(step, value): from this step of training on, losses are multiplied by `value`."""
    def start(step, value):
        loss, calls = GPT.loss, []

        def spoiled(self, h, y):
            if not self.training:
                return loss(self, h, y)
            calls.append(1)
            return loss(self, h, y) * (value if len(calls) > 2 * (step - 1) else 1)

        monkeypatch.setattr(GPT, 'loss', spoiled)
    return start


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize('bad', [1, 3])
def test_a_run_whose_last_steps_diverge(run_train, bad_from, tmp_path, value, bad):
    bad_from(11 - bad, value)
    with pytest.raises(UserError, match=f'the last steps, {bad} in a row.*{LR}') as error:
        run_train('out', '--save_interval=5')
    assert f'{tmp_path / "out" / "ckpt.pt"} of step 5 is kept' in str(error.value)
    assert load_checkpoint(str(tmp_path / 'out'))['step'] == 5


def test_a_run_that_is_stopped_while_it_diverges_keeps_the_weights_it_has(run_train, bad_from,
                                                                          tmp_path):
    straight = run_train('straight', '--save_interval=7')
    bad_from(8, math.nan)
    with stopped_at(9), pytest.raises(UserError, match='the last steps, 2 in a row.*step 9'):
        run_train('out')
    saved = load_checkpoint(str(tmp_path / 'out'))
    assert saved['step'] == 9
    before = torch.load(tmp_path / 'straight' / 'ckpt_prev.pt', weights_only=True)
    assert straight['step'] == 10 and before['step'] == 7
    same_weights(saved, before)


def test_fp16_may_end_with_a_scale_that_was_too_large(run_train, monkeypatch):
    unscale = torch.amp.GradScaler.unscale_
    steps = []

    def overflow_at_last(self, optimizer):
        steps.append(1)
        if len(steps) == 10:
            optimizer.param_groups[0]['params'][0].grad[0, 0] = math.inf
        return unscale(self, optimizer)

    monkeypatch.setattr(torch.amp.GradScaler, 'unscale_', overflow_at_last)
    assert run_train('out', '--dtype=float16')['step'] == 10


@pytest.mark.parametrize('interval', [1, 5])
def test_weights_that_are_not_finite_are_not_saved(run_train, monkeypatch, tmp_path, interval):
    """The update itself overflows: loss and gradient of its step are fine."""
    train_step = Trainer.train_step

    def overflow(self):
        result = train_step(self)
        if self.step == 10:
            self.model.ln_f.weight.data[3] = math.inf
        return result

    monkeypatch.setattr(Trainer, 'train_step', overflow)
    words = f'after step 10 model.ln_f.weight is not finite.*{LR}'
    with pytest.raises(UserError, match=words) as error:
        run_train('out', f'--save_interval={interval}')
    assert f'of step {10 - interval} is kept' in str(error.value)
    assert load_checkpoint(str(tmp_path / 'out'))['step'] == 10 - interval


@pytest.mark.parametrize('save_interval, named', [(5, 'ckpt.pt of step 5'), (8, 'no checkpoint')])
def test_an_evaluation_that_is_not_finite(run_train, monkeypatch, tmp_path, save_interval, named):
    monkeypatch.setattr(Trainer, 'evaluate', lambda self: (math.nan, None))
    with pytest.raises(UserError, match='step 8: the validation loss is not finite') as error:
        run_train('out', '--eval_interval=8', f'--save_interval={save_interval}')
    assert named in str(error.value)
    assert not any('val_loss' in record for record in log_of(tmp_path / 'out'))


def test_the_checkpoint_before_a_bad_evaluation_stays(run_train, monkeypatch, tmp_path):
    monkeypatch.setattr(Trainer, 'evaluate', lambda self: (math.inf, None))
    with pytest.raises(UserError, match='ckpt_prev.pt of step 5 is kept'):
        run_train('out', '--save_interval=5')
    path = str(tmp_path / 'out')
    assert kept(path, before=10) == f'{path}/ckpt_prev.pt of step 5 is kept'
    with pytest.raises(UserError, match='step 10: the validation loss is not finite.*dtype'):
        run_train('out', '--init_from=resume', '--eval_only=True')


def test_the_log_is_json_whatever_happens(tmp_path, capsys):
    output = Output(ALONE, Stop(ALONE, CPU))
    output.open(str(tmp_path), {}, resumed=False)
    output.say('x', step=1, loss=math.nan, grad_norm=math.inf, passes=[0.5], mfu=None)
    output.close()
    line = (tmp_path / 'log.jsonl').read_text()
    record = json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert record == dict(step=1, loss=None, grad_norm=None, passes=[0.5], mfu=None)


# ---- programs that read checkpoints --------------------------------------------------------------

@pytest.fixture
def large(tmp_path):
    """A checkpoint whose finite weights make infinite sums."""
    model = make(vocab_size=320, n_tokens=257).float()
    model.h[0].mlp.c_proj.weight.data.fill_(3e38)
    return save(tmp_path / 'large', model)


@pytest.mark.parametrize('name', ['wte.weight', 'h.0.ln_1.weight', 'lm_head.weight'])
@pytest.mark.parametrize('value', [math.nan, math.inf])
def test_nobody_samples_from_weights_that_are_not_finite(tmp_path, name, value):
    model = make(vocab_size=320, n_tokens=257)
    model.get_parameter(name).data.view(-1)[-1] = value
    folder = save(tmp_path / 'bad', model)
    for program in (sample.main, evaluate.main):
        with pytest.raises(UserError, match=f'{name} is not finite'):
            program([folder, '--device=cpu'])


def test_nobody_samples_from_an_output_that_is_not_finite(large, tmp_path):
    with pytest.raises(UserError, match='output is not finite'):
        sample.main([large, '--device=cpu', '--max_new_tokens=3'])
    (tmp_path / 'text').write_text('some text')
    with pytest.raises(UserError, match='text: the loss is not finite'):
        evaluate.main([large, str(tmp_path / 'text'), '--device=cpu'])


@pytest.mark.parametrize('toggle', ['gate', 'mask', 'latent2_depth'])
def test_mechanisms_do_not_hide_it(toggle):
    model = make(**test_train.TOGGLES[toggle])
    model.ln_f.weight.data[0] = math.nan
    with pytest.raises(UserError, match='not finite'):
        model.generate([[1, 2, 3]], 4)
