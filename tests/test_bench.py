"""The benchmarks measure what they say; how long it takes is nothing to assert."""
import json

import pytest
import torch

from engine.errors import UserError
from model import GPT, GPTConfig
from tools import bench, bench_halting

SMALL = ['--n_layer=2', '--n_head=2', '--n_embd=16', '--mlp_hidden=32', '--block_size=64', '--vocab_size=64', '--micro_batch=2', '--repeats=1']


def test_report(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(bench.subprocess, 'run', lambda command, check: started.append(command))
    monkeypatch.setattr(bench, 'ceilings', lambda device, dtype: (1e11, 1e10))
    toggles = ['plain', 'embedding', 'latent', 'chain', 'pause']
    bench.main([*SMALL, f"--toggles={','.join(toggles)}", '--decode_batches=1,2', '--new_tokens=5', f"--json={tmp_path / 'b.json'}"])
    report = json.loads((tmp_path / 'b.json').read_text())
    assert len(started) == len(report['start']) == 1
    assert [part['batch'] for part in report['decoding']] == [1, 2]
    for rows in [report['training'], *(part[kind] for part in report['decoding'] for kind in ('prefill', 'decoding'))]:
        assert list(rows) == toggles and all(row['median_s'] > 0 for row in rows.values())
        assert rows['plain']['speed_vs_plain'] == 1
        for row in rows.values(): assert row['speed_vs_plain'] == pytest.approx(rows['plain']['median_s'] / row['median_s'])
    size = dict(n_layer=2, n_head=2, n_embd=16, mlp_hidden=32, block_size=64, vocab_size=64)
    blocks = 4 * 2 * (4 * 16 * 16 + 3 * 16 * 32 + 2 * 16 + 2 * 8)  # bytes: projections, SwiGLU, two norms and those of query and key
    flops = {name: GPT(GPTConfig(**size, **bench.TOGGLES[name])).flops_per_token(64, jacobi=3) for name in toggles}
    for name, passes in zip(toggles, (1, 4, 2, 4, 1)):  # pause reads the weights once, for all slots
        step, (batch_1, batch_2) = report['training'][name], report['decoding']
        assert step['flops_vs_plain'] == pytest.approx(flops[name] / flops['plain']) and step['first_step_s'] > 0
        assert step['tokens_per_s'] == pytest.approx(128 / step['median_s'])
        assert step['matmul_share'] == pytest.approx(flops[name] * 128 / step['median_s'] / 1e11)
        decoding = batch_2['decoding'][name]
        assert decoding['tokens_per_s'] == pytest.approx(2 * 4 / decoding['median_s'])
        assert decoding['copy_share'] == pytest.approx(passes * blocks * 4 / decoding['median_s'] / 1e10)
        assert batch_2['prefill'][name]['tokens_per_s'] == pytest.approx(2 * 32 / batch_2['prefill'][name]['median_s'])
        assert batch_2['prefill'][name]['cache_mib'] == 2 * batch_1['prefill'][name]['cache_mib']
    assert report['decoding'][0]['prefill']['plain']['cache_mib'] == 2 * 2 * 16 * 64 * 4 / 2 ** 20  # keys and values of 64 places
    assert list(report['cache']) == ['31', '63'] and all(len(times) == 2 for times in report['cache'].values())


def test_compiled_models_stand_beside_one_that_is_not(tmp_path, monkeypatch):
    compiled, decoding = [], []
    monkeypatch.setattr(bench, 'bench_start', lambda b: [])
    monkeypatch.setattr(bench, 'compile_blocks', compiled.append)
    monkeypatch.setattr(bench, 'compile_decoding', decoding.append)
    bench.main([*SMALL, '--toggles=depth_attn,loop', '--compile=True', '--decode_batches=1', '--new_tokens=2', f"--json={tmp_path / 'b.json'}"])
    report = json.loads((tmp_path / 'b.json').read_text())
    for rows in report['training'], report['decoding'][0]['decoding']: assert list(rows) == ['depth_attn', 'loop', 'depth_attn, not compiled']
    assert len(compiled) == len(decoding) == 2 and not set(compiled) & set(decoding), "compiled blocks would be compiled again for each length"


def test_plain_is_plain_whatever_the_file_says(monkeypatch):
    monkeypatch.setattr(bench, 'bench_start', lambda b: [])
    monkeypatch.setattr(bench, 'ceilings', lambda device, dtype: (1e11, 1e10))
    def look(b, s, models, *_): raise InterruptedError({name: (m.config.ponder, m.config.depth_attn) for name, m in models.items()})
    monkeypatch.setattr(bench, 'bench_training', look)
    with pytest.raises(InterruptedError) as made: bench.main([*SMALL, '--ponder=loop', '--depth_attn=True', '--toggles=plain,depth_attn'])
    assert made.value.args == ({'plain': ('none', False), 'depth_attn': ('none', True)},)


def test_first_step_is_one_training_step(monkeypatch):
    steps, make = [], bench.training_step
    monkeypatch.setattr(bench, 'training_step', lambda *args: lambda: (steps.append(args), make(*args)()))
    bench.first_step()
    (model, _, idx, _), = steps
    assert model.num_params() > 2e6 and idx.shape == (4, 256) and all(p.grad is None for p in model.parameters())


def test_drawn_decisions_take_the_wished_depth():
    for depth in (1.0, 1.5, 3.0, 4.0):
        p = bench_halting.probability(depth)
        assert sum(p ** k for k in range(4)) == pytest.approx(depth)
    torch.manual_seed(0)
    for halting, ponder in bench_halting.MODES.items():
        config = bench.build(bench.GPTConfig, dict(n_layer=1, n_head=2, n_embd=16, mlp_hidden=16, block_size=512, vocab_size=64,
                                                   ponder=ponder, halting=halting))
        model = bench_halting.drawn(config, 2.0, torch.device('cpu')).eval()
        with torch.no_grad(): model(torch.randint(64, (8, 512)))
        assert model.steps.double().mean().item() == pytest.approx(2, abs=0.1)


def test_halting_lines(capsys):
    bench_halting.main([*SMALL, '--depths=2', '--batches=1', '--new_tokens=3'])
    lines = [line for line in capsys.readouterr().out.splitlines() if 'mean depth' in line]
    assert len(lines) == 4 and all('x faster, ideal' in line for line in lines)  # decoding of three modes, router's training


@pytest.mark.parametrize('main', [bench.main, bench_halting.main])
def test_refusals(main):
    own = (['--toggles=plane'], ['--decode_batches=1,x'], ['--block_size=3']) if main is bench.main else (['--depths=5'], ['--depths=a'], ['--batches=0'])
    for args in (['--repeats=0'], ['config/none.py'], *own):
        with pytest.raises(UserError, match=args[0].partition('=')[0].strip('-')): main(args)


def test_a_report_that_cannot_be_written_shows_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, 'ceilings', lambda *_: pytest.fail("measured"))
    with pytest.raises(UserError, match='nowhere'): bench.main([*SMALL, f"--json={tmp_path / 'nowhere' / 'b.json'}"])
