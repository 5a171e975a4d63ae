"""tools/explain.py says what the model does."""
import os
from dataclasses import asdict

import pytest
import torch
from conftest import TOGGLES, make, save

from engine.files import UserError
from engine.memory import CausalMemory
from engine.shards import get_tokenizer, open_shard
from model import GPTConfig, apply_rope, rope_table
from tools import explain

IDX = torch.randint(0, 50, (7,), generator=torch.Generator().manual_seed(2))


def output(model, idx=IDX):
    """The model's logits (T,V)."""
    return model(idx[None])[0][0]


def assert_equal(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


# ---- what is seen --------------------------------------------------------------------------------

def test_steps_end_in_the_models_output(toggle):
    model = make(**toggle)
    config = model.config
    seen = explain.look(model, IDX)
    want = output(model)
    assert_equal(seen.logits, want)

    if config.halting in ('none', 'gate'):      # the others mix their steps
        last = seen.after[seen.steps - 1, torch.arange(7)]
        assert_equal(last, want)
    if config.halting == 'none':
        steps = 1 if config.ponder == 'none' else config.ponder_steps + 1
        assert seen.steps.tolist() == [steps] * 7
        assert not seen.halting
        assert not seen.compared
    else:
        decisions_agree_with_steps(seen, config)
    if config.depth_attn:
        n_layer = 3 if config.ponder == 'latent' else 5
        assert seen.values.shape == (7, n_layer, n_layer + 1)
        ones = torch.ones(7, n_layer).double()
        torch.testing.assert_close(seen.values.sum(-1), ones)   # shares of all layers' values
    else:
        assert seen.values is None


def decisions_agree_with_steps(seen, config):
    """What decided, the paper's rule and the steps taken fit together."""
    said = torch.stack(seen.halting, -1)                # (7,n)
    if config.halting == 'gate':
        go_on = said
        assert said.shape == (7, config.ponder_steps)
    if config.halting == 'router':
        go_on = said.cumprod(-1)                        # probability of getting there
        assert said.shape == (7, config.ponder_steps)
    if config.halting == 'mask':
        at_least = said.flip(-1).cumsum(-1).flip(-1)    # probability of needing k thoughts or more
        go_on = at_least[:, 1:]
        assert said.shape == (7, config.ponder_steps + 1)
    assert_equal(torch.stack(seen.compared, -1), go_on)
    went = (go_on >= config.halt_tau).long().cumprod(-1).sum(-1)
    assert torch.equal(went + 1, seen.steps)


@pytest.mark.parametrize('ponder', ['embedding', 'chain', 'loop'])
def test_a_step_is_the_output_of_a_model_with_fewer(ponder):
    model = make(ponder=ponder, ponder_steps=3)
    after = explain.look(model, IDX).after
    for steps in range(4):
        model.config.ponder_steps = steps
        assert_equal(after[steps], output(model))


def test_values_by_hand():
    # 5 layers, stride 2, two query heads to a key head
    model = make(depth_attn=True, n_kv_head=2)
    config = model.config
    values = explain.look(model, IDX).values
    rope = rope_table(torch.arange(7), config.head_dim, config.rope_theta, torch.float64)
    x = model.embed(IDX[None])
    all_keys = []
    sources = []
    for layer, block in enumerate(model.h):
        attn = block.attn
        qkv = attn.c_attn(block.ln_1(x)).view(7, 8, config.head_dim)
        q, k, _ = qkv.split((4, 2, 2), 1)
        q = apply_rope(attn.q_norm(q), *rope).view(7, 2, 2, -1).mean(2)     # (7,nkv,hd)
        k = apply_rope(attn.k_norm(k), *rope)                               # (7,nkv,hd)

        below = [j for j in (0, 2, 4) if j < layer]
        keys = [all_keys[j] for j in below] + [k]
        scores = torch.stack([(q * key).sum(-1) for key in keys], -1)       # (7,nkv,sources + 1)
        weights = (scores / config.head_dim ** 0.5).softmax(-1)
        want = torch.zeros(7, 6, dtype=torch.float64)
        want[:, [*below, layer]] = weights.mean(1)
        assert_equal(values[:, layer], want)

        all_keys.append(k)
        x, new = block(x, rope, sources, CausalMemory(), None)
        if layer in (0, 2, 4):
            sources.append(new)


class TwoBelow(GPTConfig):
    """Depth-Attention with other sources: the two layers just below."""

    def sources(self, layer):
        return [j for j in (layer - 1, layer - 2) if j >= 0]


def test_which_layers_are_read_is_said_in_one_place():
    """Another rule in GPTConfig.sources changes the model, its picture and its cost alike."""
    model = make(depth_attn=True)
    before = output(model)
    flops = model.flops_per_token(24, False)
    model.config = TwoBelow(**asdict(model.config))

    seen = explain.look(model, IDX)
    assert (seen.logits - before)[..., :50].abs().max() > 1e-3
    read = (seen.values > 0).all(0)             # (L,L+1)
    read = [row.nonzero()[:, 0].tolist() for row in read]
    assert read == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]
    assert model.flops_per_token(24, False) - flops == 2 * 2 * 4 * 8    # one source more


# ---- what is printed -----------------------------------------------------------------------------

@pytest.fixture
def looped(tmp_path):
    """A model with two passes and Depth-Attention, and its checkpoint."""
    model = make(vocab_size=320, n_tokens=257, ponder='loop', ponder_steps=1, depth_attn=True)
    model = model.float()
    return model, save(tmp_path / 'ckpt', model)


def test_prints_every_position(looped, capsys):
    model, folder = looped
    explain.main([folder, '--start=dé', '--top=2', '--device=cpu'])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 * 4                  # three bytes: a title, two passes and the layers
    assert lines[0] == "   0 'd'   2 passes"
    assert lines[4] == "   1 '\\xc3'   2 passes"

    after_last, values = lines[10:]
    assert after_last.startswith('       after pass 2')
    numbers = [float(word) for word in after_last.split() if len(word) == 5 and word[:2] == '0.']
    p = output(model, torch.tensor(list('dé'.encode())))[2].softmax(-1).topk(2)
    assert numbers == pytest.approx(p.values.tolist(), abs=6e-4)
    assert 'output' not in after_last
    assert 'layer 0' in values
    assert 'earlier loops' in values


def test_prints_no_more_tokens_than_there_are(looped, capsys):
    _, folder = looped
    explain.main([folder, '--start=a', '--top=300', '--device=cpu'])    # the table has 320 rows
    line = capsys.readouterr().out.splitlines()[1]
    assert len(line.split('   ')[3:]) == 257


def test_reads_the_validation_set(tmp_path, small_data, capsys):
    model = make(vocab_size=320, n_tokens=257).float()
    folder = save(tmp_path / 'ckpt', model, data_dir=small_data)
    explain.main([folder, '--tokens=9', '--device=cpu'])
    shard = open_shard(os.path.join(small_data, 'val_000000.bin'))
    lines = capsys.readouterr().out.splitlines()[::2]
    tokenizer = get_tokenizer('byte')
    assert [line.split('   ')[-2].split(' ', 1)[1] for line in lines] == [
        explain.word(token, tokenizer) for token in shard[:9].tolist()]


@pytest.mark.parametrize('args, words', [
    ([], 'checkpoint folder'),
    (['nowhere'], 'no checkpoint'),
    (['CKPT', '--top=0'], 'top'),
    (['CKPT', '--start='], 'empty'),
    (['CKPT', '--against=CKPT'], 'against needs a page'),
    (['CKPT', '--tokens=25'], 'context .* is 24'),
    (['CKPT', '--tokens=2'], 'names no data folder'),
    (['CKPT', '--tokens=2', '--start=a'], 'in the place of start'),
])
def test_refusals(looped, args, words):
    _, folder = looped
    args = [folder if arg == 'CKPT' else arg for arg in args]
    with pytest.raises(UserError, match=words):
        explain.main(args)


@pytest.mark.parametrize('halting', ['gate', 'router'])
def test_prints_a_number_for_each_decision_that_was_made(halting, tmp_path, capsys):
    settings = dict(TOGGLES[halting], vocab_size=320, n_tokens=257, halt_tau=0.3)
    model = make(**settings).float()
    folder = save(tmp_path / 'ckpt', model)
    explain.main([folder, '--start=def add(a, b): return', '--device=cpu'])
    taken = set()
    for line in capsys.readouterr().out.splitlines():
        if 'pass' not in line or 'after' in line:
            continue
        passes, decisions = line.split('   ')[-2:]      # 2 passes   gate 0.4710 0.2233
        passes = int(passes.split()[0])
        numbers = [word for word in decisions.split() if '.' in word]
        assert len(numbers) == min(passes, model.config.ponder_steps)   # none after the last pass
        taken.add(passes)
    assert len(taken) > 1
