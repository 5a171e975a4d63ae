"""
exercises/labs/across_layers.py: each way is the plain model where its paper says so, causal, exact
from a cache that does not grow, and learns with all its weights; the plain run is train.py's.
"""
import json
import os

import pytest
import torch
from conftest import ROOT, cells, close, make

import across_layers
import train
from across_layers import WAYS, AttentionResiduals, HyperConnections, sinkhorn
from engine.files import UserError
from model import GPTConfig

SMALL = dict(vocab_size=64, n_tokens=50, block_size=24, n_layer=4, n_head=2, n_embd=32,
             mlp_hidden=48, init_std=0.2)
OTHERS = ('denseformer', 'attnres', 'attnres_biased', 'mhc')


def way(name, moved=True, **settings):
    """A model in float64; moved: its own weights are not at their start."""
    kind, own = WAYS[name]
    torch.manual_seed(0)
    model = kind(GPTConfig(**{**SMALL, **own, **settings})).double().eval()
    plain = {name for name, _ in make(**SMALL).named_parameters()}
    for key, p in model.named_parameters():
        if moved and key not in plain:
            p.data += 0.3 * torch.randn(p.shape, dtype=p.dtype)
    return model


def plain_of(model):
    plain = WAYS['plain'][0](model.config).double().eval()
    plain.load_state_dict(model.state_dict(), strict=False)
    return plain


def one_block(model):
    model.layers_per_block = model.config.n_layer
    return model


def frozen(model):
    for maps in model.maps:
        maps.a.data.zero_()
    return model


@pytest.mark.parametrize('model, tolerance', [
    (way('denseformer', moved=False), 1e-12),
    (frozen(way('mhc', moved=False)), 1e-7),        # its biases are fp32
    (one_block(way('attnres', moved=False, norm_eps=1e-12)), 1e-8),     # up to the norms' eps
])
def test_where_it_is_the_plain_model(model, tolerance, idx):
    close(model(idx)[0], plain_of(model)(idx)[0], tolerance)


@pytest.mark.parametrize('name', OTHERS)
def test_elsewhere_it_is_not(name, idx):
    model = way(name)
    assert (model(idx)[0] - plain_of(model)(idx)[0])[..., :50].abs().max() > 1e-3


def test_the_first_reads_of_attention_residuals():
    """w = 0, a layer to a block: means of what there is."""
    model = way('attnres', moved=False, n_layer=2)
    sources = []
    model.look = lambda i, found: sources.append(found) or AttentionResiduals.look(model, i, found)
    x = torch.randn(1, 3, 32, dtype=torch.float64)
    model.trunk(x)
    assert [len(found) for found in sources] == [1, 2, 2, 3, 3]
    b0, a0 = sources[1]
    assert torch.equal(b0, x)
    _, b1 = sources[2]                              # a sum of both branches, without b0
    mlp = model.h[0].mlp(model.h[0].ln_2((b0 + a0) / 2))
    close(b1, a0 + mlp)


def test_rows_and_columns_sum_to_one():
    m = sinkhorn(torch.randn(5, 4, 4, dtype=torch.float64))
    assert (m > 0).all()
    close(m.sum(-1), torch.ones(5, 4), 1e-3)
    close(m.sum(-2), torch.ones(5, 4), 1e-3)


@pytest.mark.parametrize('name', OTHERS)
def test_causal_and_exact_from_a_cache_as_large_as_the_plain_one(name, idx):
    model = way(name)
    whole = model(idx)[0]
    changed = idx.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 50
    assert torch.equal(model(changed)[0][:, :7], whole[:, :7])

    memory = model.new_memory()
    parts = [model.head(model.hidden(part, memory)) for part in idx.split([5, 1, 7], dim=1)]
    close(torch.cat(parts, 1), whole)
    assert {k.shape for k in memory.keys.values()} == {(3, 2, 13, 16)}
    assert len(memory.keys) == 4


@pytest.mark.parametrize('name', OTHERS)
def test_every_weight_learns(name, idx):
    model = way(name).train()
    model(idx, idx.roll(-1, 1))[1].backward()
    for key, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, key


def test_equal_streams_stay_equal_without_random_weights(idx):
    """W = 0: no gradient tells one stream of mHC from another."""
    for random in (False, True):
        torch.manual_seed(0)
        model = HyperConnections(GPTConfig(**SMALL)).double().train()
        for maps in model.maps:
            maps.W.data *= random
        model(idx, idx.roll(-1, 1))[1].backward()
        grads = torch.stack([maps.b_pre.grad for maps in model.maps])
        assert (grads.std(dim=1) > 1e-9).any() == random


def test_the_plain_run_is_train_pys(small_data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'data').mkdir()
    (tmp_path / 'data' / 'python').symlink_to(small_data)
    across_layers.main(['--steps=3', '--seeds=1', '--names=plain,denseformer,mhc'])
    rows = cells(capsys.readouterr().out)
    assert [row[0] for row in rows[1:]] == ['plain', 'denseformer', 'mhc']
    shape = ['--n_layer=4', '--n_embd=128', '--n_head=2', '--mlp_hidden=352', '--block_size=128']
    train.main([os.path.join(ROOT, 'config', 'size', 'tiny.py'), *shape, '--batch_tokens=512',
                '--max_steps=3', '--eval_tokens=65536', '--sample_tokens=0', '--dtype=float32',
                '--seed=1', '--device=cpu', '--out_dir=out'])
    with open('out/log.jsonl') as f:
        last = json.loads(f.readlines()[-1])
    assert float(rows[1][1]) == pytest.approx(last['val_loss'], abs=2e-4)


def test_losses_of_words_are_none_of_bytes(monkeypatch):
    monkeypatch.setattr(across_layers.prepare_data, 'prepare_builtin', lambda folder: None)
    monkeypatch.setattr(across_layers, 'read_meta', lambda folder: dict(tokenizer='gpt2'))
    with pytest.raises(UserError, match='data/python has tokens of gpt2'):
        across_layers.main(['--names=plain'])


def test_refusals():
    with pytest.raises(UserError, match='names are plain'):
        across_layers.main(['--names=denser'])
