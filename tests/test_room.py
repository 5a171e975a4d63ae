"""What does not fit into memory is refused before it is allocated, and nothing else is."""

import math

import pytest
import test_train
import torch
from conftest import ONE_EACH, TOGGLES, make, save
from test_train import ALONE, CPU, SHAPE

import sample
from configurator import build, read
from engine import plan, room
from engine.files import UserError
from engine.hardware import Ranks, tune_cpu
from model import GPT, GPTConfig
from tools import evaluate
from train import Settings

run_train = test_train.run_train    # the fixture
CUDA = torch.device('cuda')


@pytest.fixture
def machine(monkeypatch):
    """machine(bytes): there is so much memory, whatever the device."""
    def set_memory(n):
        monkeypatch.setattr(room, 'memory_of', lambda device: n)
    return set_memory


def refuse(*args, device=CPU, ranks=ALONE):
    """Whether a run with these arguments is refused: the line, or None."""
    given, _ = read(list(args), '', Settings, GPTConfig)
    config = build(GPTConfig, given)
    settings = build(Settings, given)
    try:
        room.check_training_fits(GPT, config, settings, device, torch.bfloat16, ranks)
    except UserError as error:
        return str(error)


# ---- the first command on a laptop ---------------------------------------------------------------

def test_360m_on_a_laptop(machine, monkeypatch):
    def nothing(*_):
        raise AssertionError('it has been allocated')

    monkeypatch.setattr(GPT, 'init_weights', lambda self: self.wte.weight.is_meta or nothing())
    machine(5e9)    # not even weights and moments
    line = refuse('config/depth_attn.py')
    for words in ('5.8 GB', '5.0 GB', 'config/size/tiny.py', 'GPU'):
        assert words in line
    assert '\n' not in line


@pytest.mark.slow
def test_360m_with_its_activations(machine):
    machine(24e9)
    line = refuse('config/depth_attn.py')
    for words in ('34.5 GB', '24.0 GB', 'micro_batch=8', 'config/size/tiny.py'):
        assert words in line
    assert refuse('config/depth_attn.py', '--micro_batch=1') is None


SMALL = [*SHAPE, '--vocab_size=320', '--micro_batch=4', '--block_size=128', '--n_layer=4']


@pytest.mark.parametrize('toggle', ['depth', 'router'])
def test_what_the_dry_run_counts_is_the_limit(machine, toggle):
    args = [*SMALL, *test_train.options(toggle)]
    given, _ = read(args, '', Settings, GPTConfig)
    config = build(GPTConfig, given)
    settings = build(Settings, {**given, 'device': 'cpu'})
    tune_cpu()
    parts = plan.memory(GPT, config, settings, torch.bfloat16)
    needs = sum(parts.values())
    machine(1.02 * needs)
    assert refuse(*args) is None
    machine(0.98 * needs)
    assert 'micro_batch=4' in refuse(*args)


@pytest.mark.parametrize('toggle', [
    pytest.param(name, marks=() if name in ('plain', 'chain_depth', 'mask') else pytest.mark.slow)
    for name in ONE_EACH
])
def test_the_rough_count_is_never_too_small(toggle):
    config = GPTConfig(**{**dict(vocab_size=320, n_layer=3, n_head=4, n_embd=64, block_size=64),
                          **TOGGLES[toggle]})
    settings = Settings(micro_batch=4, batch_tokens=4 * 64, device='cpu')
    measured = plan.activations(GPT, config, settings, torch.bfloat16, accumulates=True)
    assert measured < room.activations_bound(config, settings)


def test_small_models_are_not_measured(machine, monkeypatch):
    monkeypatch.setattr(plan, 'activations', None)
    machine(8e9)
    for name in ('vanilla', 'depth_attn', 'ponder', 'chain', 'loop', 'halting_router'):
        assert refuse(f'config/{name}.py', 'config/size/tiny.py', '--vocab_size=320') is None


@pytest.mark.parametrize('memory, world, sharded, fits', [
    (4, 1, False, False), (6, 1, False, True),      # GB; 360M: 1.45 GB of weights, 5.79 in all
    (4, 8, False, False), (4, 8, True, True), (3, 8, True, False),
])
def test_on_a_gpu_what_is_sure_to_be_needed_counts(machine, monkeypatch, memory, world, sharded,
                                                   fits):
    monkeypatch.setattr(Ranks, 'mean', lambda self, value: value.item())
    monkeypatch.setattr(torch, 'tensor', lambda data, **_: torch.DoubleTensor(data))
    machine(memory * 1e9)
    line = refuse('config/depth_attn.py', f'--shard_optimizer={sharded}', device=CUDA,
                  ranks=Ranks(0, world))
    assert (line is None) == fits


def test_several_processes_share_a_cpu(machine, monkeypatch):
    monkeypatch.setattr(Ranks, 'mean', lambda self, value: value.item())
    monkeypatch.setattr(room, 'activations_bound', lambda *_: 0)
    machine(5e9)
    assert refuse('config/depth_attn.py', '--eval_only=True') is None
    machine(9e9)
    assert refuse('config/depth_attn.py') is None
    assert '11.6 GB' in refuse('config/depth_attn.py', ranks=Ranks(1, 2))
    monkeypatch.setenv('LOCAL_WORLD_SIZE', '4')
    assert '23.2 GB' in refuse('config/depth_attn.py', ranks=Ranks(1, 8))
    machine(5e9)
    assert '5.8 GB' in refuse('config/depth_attn.py', '--eval_only=True', ranks=Ranks(1, 8))


# ---- the programs --------------------------------------------------------------------------------

def test_training_says_it_before_it_begins(run_train, machine, tmp_path):
    machine(10_000)
    with pytest.raises(UserError, match='training this model takes 0.0 GB'):
        run_train('out')
    assert not (tmp_path / 'out').exists()


def test_checkpoints_that_do_not_fit(machine, tmp_path):
    folder = save(tmp_path / 'ckpt', make(vocab_size=320, n_tokens=257))
    machine(10_000)
    for program in (sample.main, evaluate.main):
        with pytest.raises(UserError, match='loading this model takes'):
            program([folder, '--device=cpu'])
    machine(math.inf)
    sample.main([folder, '--device=cpu', '--max_new_tokens=1'])


def test_evaluating_needs_less_than_training(run_train, machine):
    run_train('out', '--max_steps=1')
    machine(0.35e6)     # 0.05M parameters
    run_train('out', '--init_from=resume', '--eval_only=True')
    with pytest.raises(UserError, match='training this model'):
        run_train('out', '--init_from=resume', '--max_steps=2')


def test_seeds_give_the_same_weights_with_and_without_a_measurement(run_train, monkeypatch):
    plain = run_train('plain', '--max_steps=1')
    monkeypatch.setattr(room, 'activations_bound', lambda *_: math.inf)
    monkeypatch.setattr(room, 'memory_of', lambda device: 10 ** 12)
    test_train.same_weights(plain, run_train('measured', '--max_steps=1'))


# ---- what there is -------------------------------------------------------------------------------

MEMINFO = 'MemTotal:  100 kB\nMemFree:  1 kB\nMemAvailable:   50 kB\nSwapFree:   7 kB\n'


@pytest.mark.parametrize('text, has', [
    (MEMINFO, 57 * 1024), (MEMINFO.replace('50 kB', 'much'), math.inf), ('', math.inf),
    ('MemTotal: 100 kB\n', math.inf), ('a:b:c\n', math.inf), (None, math.inf),
])
def test_free_memory(tmp_path, text, has):
    if text is not None:
        (tmp_path / 'meminfo').write_text(text)
    assert room.free_memory(str(tmp_path / 'meminfo')) == has


@pytest.mark.parametrize('texts, has', [
    (['max\n', None], math.inf), (['1000\n', None], 1000), ([None, '2000\n'], 2000),
    ([None, None], math.inf), (['', '7'], 7),
])
def test_the_limit_of_a_container(tmp_path, texts, has):
    paths = [str(tmp_path / name) for name in ('v2', 'v1')]
    for path, text in zip(paths, texts):
        if text is not None:
            with open(path, 'w') as f:
                f.write(text)
    assert room.limit_of_container(paths) == has


def test_this_machine_has_memory():
    assert room.memory_of(CPU) > 10 ** 8
    assert room.memory_of(torch.device('mps')) == math.inf
