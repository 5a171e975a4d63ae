"""The benchmarks measure what they say; how long it takes is nothing to assert."""

import json

import pytest
import torch

from engine.files import UserError
from model import GPT, GPTConfig
from tools import bench, bench_halting

SHAPE = dict(n_layer=2, n_head=2, n_embd=16, mlp_hidden=32, block_size=64, vocab_size=64)
SMALL = [*(f'--{name}={value}' for name, value in SHAPE.items()), '--micro_batch=2', '--repeats=1']
MATMUL_RATE, COPY_RATE = 1e11, 1e10


@pytest.fixture
def known_ceilings(monkeypatch):
    monkeypatch.setattr(bench, 'ceilings', lambda device, dtype: (MATMUL_RATE, COPY_RATE))


@pytest.fixture
def processes(monkeypatch):
    """No process is started; the commands that would be."""
    commands = []
    monkeypatch.setattr(bench.subprocess, 'run', lambda command, check: commands.append(command))
    return commands


@pytest.fixture
def report_of(tmp_path):
    """bench.py's JSON file for a small model and these arguments."""
    path = tmp_path / 'bench.json'

    def measure(*args):
        bench.main([*SMALL, *args, f'--json={path}'])
        return json.loads(path.read_text())
    return measure


def test_report(report_of, processes, known_ceilings):
    toggles = ['plain', 'embedding', 'latent', 'chain', 'pause']
    report = report_of(f"--toggles={','.join(toggles)}", '--decode_batches=1,2', '--new_tokens=5')
    assert len(processes) == len(report['start']) == 1
    assert [part['batch'] for part in report['decoding']] == [1, 2]
    tables = [report['training']]
    for part in report['decoding']:
        tables += [part['prefill'], part['decoding']]
    for rows in tables:
        assert list(rows) == toggles
        check_ratios(rows)
    assert list(report['cache']) == ['31', '63']
    for times in report['cache'].values():
        assert len(times) == 2

    flops = {}
    for name in toggles:
        model = GPT(GPTConfig(**SHAPE, **bench.TOGGLES[name]))
        flops[name] = model.flops_per_token(64, jacobi=3)
    for name in toggles:
        check_training_row(report['training'][name], flops[name], flops['plain'])

    passes = dict(plain=1, embedding=4, latent=2, chain=4, pause=1)  # pause: once, for all slots
    for name in toggles:
        batch_1, batch_2 = report['decoding']
        check_decoding_rows(batch_1, batch_2, name, passes[name])
    keys_and_values = 2 * 2 * 16 * 64 * 4 / 2 ** 20  # of 2 layers, 64 places, in MiB
    assert report['decoding'][0]['prefill']['plain']['cache_mib'] == keys_and_values


def check_ratios(rows):
    assert rows['plain']['speed_vs_plain'] == 1
    for row in rows.values():
        assert row['median_s'] > 0
        ratio = rows['plain']['median_s'] / row['median_s']
        assert row['speed_vs_plain'] == pytest.approx(ratio)


def check_training_row(row, flops, plain_flops):
    tokens = 2 * 64
    assert row['flops_vs_plain'] == pytest.approx(flops / plain_flops)
    assert row['first_step_s'] > 0
    assert row['tokens_per_s'] == pytest.approx(tokens / row['median_s'])
    assert row['matmul_share'] == pytest.approx(flops * tokens / row['median_s'] / MATMUL_RATE)


def check_decoding_rows(batch_1, batch_2, name, passes):
    attention = 4 * 16 * 16 + 2 * 8  # projections; the norms of query and key
    mlp = 3 * 16 * 32
    block_bytes = 4 * 2 * (attention + mlp + 2 * 16)  # float32, 2 layers, with two norms each

    decoding = batch_2['decoding'][name]
    assert decoding['tokens_per_s'] == pytest.approx(2 * 4 / decoding['median_s'])
    bytes_per_second = passes * block_bytes * 4 / decoding['median_s']  # 4 tokens
    assert decoding['copy_share'] == pytest.approx(bytes_per_second / COPY_RATE)

    prefill = batch_2['prefill'][name]
    assert prefill['tokens_per_s'] == pytest.approx(2 * 32 / prefill['median_s'])
    assert prefill['cache_mib'] == 2 * batch_1['prefill'][name]['cache_mib']


def test_compiled_models_stand_beside_one_that_is_not(report_of, processes, monkeypatch):
    compiled, decoding = [], []
    monkeypatch.setattr(bench, 'compile_blocks', compiled.append)
    monkeypatch.setattr(bench, 'compile_decoding', decoding.append)
    report = report_of('--toggles=depth_attn,loop', '--compile=True', '--decode_batches=1',
                       '--new_tokens=2')
    for rows in (report['training'], report['decoding'][0]['decoding']):
        assert list(rows) == ['depth_attn', 'loop', 'depth_attn, not compiled']
    assert len(compiled) == len(decoding) == 2
    again = set(compiled) & set(decoding)
    assert not again, "compiled blocks would be compiled again for each length"


def test_plain_is_plain_whatever_the_file_says(processes, known_ceilings, monkeypatch):
    seen = {}

    def look(setup, models, *_):
        for name, model in models.items():
            seen[name] = (model.config.ponder, model.config.depth_attn)
        raise InterruptedError
    monkeypatch.setattr(bench, 'bench_training', look)
    args = ['--ponder=loop', '--depth_attn=True', '--toggles=plain,depth_attn']
    with pytest.raises(InterruptedError):
        bench.main([*SMALL, *args])
    assert seen == {'plain': ('none', False), 'depth_attn': ('none', True)}


def test_first_step_is_one_training_step(monkeypatch):
    steps = []

    class Noted(bench.TrainingStep):
        def __call__(self):
            steps.append(self)
            super().__call__()
    monkeypatch.setattr(bench, 'TrainingStep', Noted)
    bench.first_step()
    (step,) = steps
    assert step.model.num_params() > 2e6
    assert step.idx.shape == (4, 256)
    assert all(p.grad is None for p in step.model.parameters())


@pytest.mark.parametrize('depth', [1.0, 1.5, 3.0, 4.0])
def test_the_probability_of_a_depth(depth):
    p = bench_halting.probability(depth)
    assert sum(p ** k for k in range(4)) == pytest.approx(depth)


@pytest.mark.parametrize('halting', bench_halting.MODES)
def test_drawn_decisions_take_the_wished_depth(halting):
    torch.manual_seed(0)
    config = GPTConfig(n_layer=1, n_head=2, n_embd=16, mlp_hidden=16, block_size=512,
                       vocab_size=64, ponder=bench_halting.MODES[halting], halting=halting)
    model = bench_halting.drawn(config, 2.0, torch.device('cpu')).eval()
    with torch.no_grad():
        model(torch.randint(64, (8, 512)))
    assert model.mechanism.passes.double().mean().item() == pytest.approx(2, abs=0.1)


def test_halting_lines(capsys):
    bench_halting.main([*SMALL, '--depths=2', '--batches=1', '--new_tokens=3'])
    printed = capsys.readouterr().out.splitlines()
    lines = [line for line in printed if 'mean depth' in line]
    assert len(lines) == 4  # decoding of three modes, router's training
    assert all('x faster, ideal' in line for line in lines)


@pytest.mark.parametrize('main, arg, named', [
    (bench.main, '--repeats=0', 'repeats'),
    (bench.main, 'config/none.py', 'config/none.py'),
    (bench.main, '--toggles=plane', 'toggles'),
    (bench.main, '--decode_batches=1,x', 'decode_batches'),
    (bench.main, '--block_size=3', 'block_size'),
    (bench_halting.main, '--repeats=0', 'repeats'),
    (bench_halting.main, 'config/none.py', 'config/none.py'),
    (bench_halting.main, '--depths=5', 'depths'),
    (bench_halting.main, '--block_size=3', 'block_size'),
    (bench_halting.main, '--depths=a', 'depths'),
    (bench_halting.main, '--batches=0', 'batches'),
])
def test_refusals(main, arg, named):
    with pytest.raises(UserError, match=named):
        main([arg])


def test_a_report_that_cannot_be_written_shows_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, 'ceilings', lambda *_: pytest.fail("measured"))
    path = tmp_path / 'nowhere' / 'b.json'
    with pytest.raises(UserError, match='nowhere'):
        bench.main([*SMALL, f'--json={path}'])
