"""tools/explain.py says what the model does."""
from dataclasses import asdict

import pytest
import torch
from conftest import TOGGLES, make, save

from engine.errors import UserError
from model import GPTConfig, apply_rope, rope_table
from tools import explain

IDX = torch.randint(0, 50, (7,), generator=torch.Generator().manual_seed(2))


def test_steps_end_in_the_models_output(toggle):
    model = make(**toggle)
    seen, c = explain.look(model, IDX), model.config
    want = model(IDX[None])[0][0]
    torch.testing.assert_close(seen['logits'], want, rtol=0, atol=1e-9)
    if getattr(c, 'halting', 'none') in ('none', 'gate'):  # the others mix their steps
        last = seen['after'][seen['steps'] - 1, torch.arange(7)]
        torch.testing.assert_close(last, want, rtol=0, atol=1e-9)
    if getattr(c, 'halting', 'none') == 'none':
        assert seen['steps'].tolist() == [1 if c.ponder == 'none' else c.ponder_steps + 1] * 7 and not seen['halting']
    else:  # what decided agrees with what was done
        said = torch.stack(seen['halting'], -1)  # (7,n)
        after = {'gate': said, 'mask': said.flip(-1).cumsum(-1).flip(-1)[:, 1:], 'router': said.cumprod(-1)}[c.halting]
        went = (after >= c.halt_tau).long().cumprod(-1).sum(-1)
        assert said.shape == (7, c.ponder_steps + (c.halting == 'mask')) and torch.equal(went + 1, seen['steps'])
    if c.depth_attn:  # shares of all layers' values
        assert seen['values'].shape == (7, 5 if c.ponder != 'latent' else 3, c.n_layer + 1)
        torch.testing.assert_close(seen['values'].sum(-1), torch.ones(7, c.n_layer).double())


@pytest.mark.parametrize('ponder', ['embedding', 'chain', 'loop'])
def test_a_step_is_the_output_of_a_model_with_fewer(ponder):
    model = make(ponder=ponder, ponder_steps=3)
    after = explain.look(model, IDX)['after']
    for steps in range(4):
        model.config.ponder_steps = steps
        torch.testing.assert_close(after[steps], model(IDX[None])[0][0], rtol=0, atol=1e-9)


def test_values_by_hand():
    model = make(depth_attn=True, n_kv_head=2)  # 5 layers, stride 2, two query heads to a key head
    values, c = explain.look(model, IDX)['values'], model.config
    rope = rope_table(torch.arange(7), c.head_dim, c.rope_theta, torch.float64)
    x, keys, sources = model.embed(IDX[None]), [], []
    for layer, block in enumerate(model.h):
        a, y = block.attn, block.ln_1(x)
        q, k, _ = a.c_attn(y).view(7, 8, c.head_dim).split((4, 2, 2), 1)
        q, k = apply_rope(a.q_norm(q), *rope).view(7, 2, 2, -1).mean(2), apply_rope(a.k_norm(k), *rope)  # (7, nkv, hd)
        below = [j for j in (0, 2, 4) if j < layer]
        scores = torch.stack([(q * key).sum(-1) for key in [keys[j] for j in below] + [k]], -1) / c.head_dim ** 0.5
        want = torch.zeros(7, 6, dtype=torch.float64)
        want[:, [*below, layer]] = scores.softmax(-1).mean(1)
        torch.testing.assert_close(values[:, layer], want, rtol=0, atol=1e-9)
        keys.append(k)
        x, new = block(x, rope, tuple(sources))
        if layer in (0, 2, 4): sources.append(new)


class TwoBelow(GPTConfig):
    def sources(self, layer):
        return [j for j in (layer - 1, layer - 2) if j >= 0]


def test_which_layers_are_read_is_said_in_one_place():
    """Another rule in GPTConfig.sources changes the model, its picture and its cost alike."""
    model = make(depth_attn=True)
    before = model(IDX[None])[0]
    model.config = TwoBelow(**asdict(model.config))
    seen = explain.look(model, IDX)
    assert (seen['logits'] - before[0])[..., :50].abs().max() > 1e-3
    read = (seen['values'] > 0).all(0)  # (L, L + 1)
    assert [row.nonzero()[:, 0].tolist() for row in read] == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]
    assert model.flops_per_token(24, False) - make(depth_attn=True).flops_per_token(24, False) == 2 * 2 * 4 * 8  # one source more


def test_prints_every_position(tmp_path, capsys):
    model = make(vocab_size=320, n_tokens=257, ponder='loop', ponder_steps=1, depth_attn=True).float()
    folder = save(tmp_path / 'ckpt', model)
    explain.main([folder, '--start=dé', '--top=2', '--device=cpu'])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 * 4 and lines[0] == "   0 'd'   2 passes" and lines[4] == "   1 '\\xc3'   2 passes"
    p = model(torch.tensor([list('dé'.encode())]))[0][0, 2].softmax(-1).topk(2)
    numbers = [float(word) for word in lines[10].split() if word.startswith('0.') and len(word) == 5]
    assert lines[10].startswith('       after pass 2') and numbers == pytest.approx(p.values.tolist(), abs=6e-4)
    assert 'layer 0' in lines[11] and 'earlier loops' in lines[11] and 'output' not in lines[10]
    explain.main([folder, '--start=a', '--top=300', '--device=cpu'])  # no more than there are tokens; the table has 320 rows
    assert len(capsys.readouterr().out.splitlines()[1].split('   ')[3:]) >= 257
    for args, words in ([], 'checkpoint folder'), (['nowhere'], 'no checkpoint'), ([folder, '--top=0'], 'top'), ([folder, '--start='], 'empty'):
        with pytest.raises(UserError, match=words): explain.main(args)


@pytest.mark.parametrize('halting', ['gate', 'router'])
def test_prints_a_number_for_each_decision_that_was_made(halting, tmp_path, capsys):
    model = make(**{**TOGGLES[halting], 'vocab_size': 320, 'n_tokens': 257, 'halt_tau': 0.3}).float()
    explain.main([save(tmp_path / 'ckpt', model), '--start=def add(a, b): return', '--device=cpu'])
    taken = set()
    for line in capsys.readouterr().out.splitlines():
        if 'pass' not in line or 'after' in line: continue
        count, numbers = line.split('   ')[-2:]
        taken.add(int(count.split()[0]))
        decisions = min(int(count.split()[0]), model.config.ponder_steps)  # after the last pass there is none
        assert len([word for word in numbers.split() if '.' in word]) == decisions
    assert len(taken) > 1
