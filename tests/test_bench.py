"""The benchmark measures what it says; how long it takes is nothing to assert."""
import pytest
import torch
from conftest import cells

from engine.files import UserError
from model import GPTConfig
from tools import bench

SHAPE = dict(n_layer=1, n_head=2, n_embd=16, mlp_hidden=16, vocab_size=64)
SMALL = [*(f'--{name}={value}' for name, value in SHAPE.items()), '--block_size=32',
         '--micro_batch=2', '--repeats=1', '--new_tokens=3', '--batches=1']


def test_a_table_of_each_kind(monkeypatch, capsys):
    monkeypatch.setattr(bench, 'ceilings', lambda device, dtype: (1e11, 1e10))
    monkeypatch.setattr(bench, 'DEPTHS', {2: 0.54369})
    bench.main([*SMALL, '--ponder=loop', '--toggles=plain,pause,router'])
    models = ['plain', 'pause']
    assert [row[0] for row in cells(capsys.readouterr().out)] == [
        'step, 2 x 32 tokens', *models,
        'decoding 3 tokens, batch 1', *models,
        'router: decoding 3 tokens, batch 1, fp32', 'all', '2',
        'router: step, 2 x 32 tokens', 'all', '2']


def test_a_line_for_each_part(monkeypatch, capsys):
    monkeypatch.setattr(bench, 'ceilings', lambda device, dtype: (1e11, 1e10))
    bench.main([*SMALL, '--toggles=gate', '--parts=True'])
    models = ['gate, model.py', 'gate, fast', 'gate, fast without loss',
              'gate, fast without skipping', 'gate, fast without memory']
    assert [row[0] for row in cells(capsys.readouterr().out)] == [
        'step, 2 x 32 tokens', *models, 'decoding 3 tokens, batch 1', *models]


@pytest.mark.parametrize('halting', ['gate', 'mask', 'router', 'exit'])
@pytest.mark.parametrize('depth', [1.5, 3.0])
def test_drawn_decisions_take_the_wished_depth(halting, depth):
    torch.manual_seed(0)
    config = GPTConfig(**SHAPE, block_size=512, **bench.TOGGLES[halting])
    model = bench.drawn(config, depth, torch.device('cpu')).eval()
    model.dense = True
    with torch.no_grad():
        model(torch.randint(64, (4, 512)))
    assert model.mechanism.passes.double().mean().item() == pytest.approx(depth, abs=0.1)


def test_refusal():
    with pytest.raises(UserError, match='toggles=plane.*depth_attn'):
        bench.main(['--toggles=plane'])
