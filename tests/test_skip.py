"""
engine/skip.py: Router in training without the tokens that stopped. What it computes is the same as
model.py's; it goes through the blocks with fewer tokens.
"""

from dataclasses import asdict

import pytest
import torch
from conftest import DEPTH, DEPTH_GQA, ROUTER, close, make
from test_promises import targets

from engine.build import config_of, new_model
from engine.prepare import compile_blocks, recompute_blocks
from engine.skip import skip_stopped_tokens

EXTRAS = {'plain': {}, 'gqa': dict(n_kv_head=2), 'depth': DEPTH, 'depth_gqa': DEPTH_GQA}
every_extra = pytest.mark.parametrize('extra', EXTRAS)


def both(seed=0, **settings):
    """The same model twice, in training mode; the second one skips."""
    settings = {**ROUTER, 'ponder_steps': 3, 'n_layer': 3, 'halt_lambda': 2.0, **settings}
    models = [make(seed, **settings).train() for _ in range(2)]
    skip_stopped_tokens(models[1])
    models[1].mechanism.begin_step(1, 1)
    assert models[0].state_dict().keys() == models[1].state_dict().keys()
    return models


def slots(model, call):
    """How many tokens of all rows went through the last block, pass by pass, and what call() is."""
    seen = []
    hook = model.h[-1].register_forward_pre_hook(lambda _, args: seen.append(len(args[0][0])))
    result = call()
    hook.remove()
    return seen, result


def results(model, idx):
    """[loss, gradients, passes, logits] of training."""
    y = targets(idx)
    y[0, :4] = -1
    loss = model(idx, y)[1]
    loss.backward()
    passes = model.mechanism.passes.double()
    return [loss.detach(), *(p.grad for p in model.parameters()), passes, model(idx)[0].detach()]


@every_extra
@pytest.mark.parametrize('seed', range(3))
def test_skipping_changes_nothing(extra, seed, idx):
    """Each row's tokens that go on, side by side; those of shorter rows are filled up."""
    idx = torch.randint(0, 50, idx.shape, generator=torch.Generator().manual_seed(seed))
    plain, skips = both(seed, **EXTRAS[extra])
    want = results(plain, idx)
    seen, got = slots(skips, lambda: results(skips, idx))
    for a, b in zip(got, want, strict=True):
        close(a, b)
    passes = skips.mechanism.passes
    in_rows = [(passes > k).sum(1) for k in range(4)]
    longest = [n.max().item() for n in in_rows]
    assert seen == longest * 2 and longest[0] == 13 > longest[1] > longest[2] > 0
    assert any(n.min() < n.max() for n in in_rows), "rows of unequal lengths"


@every_extra
@pytest.mark.parametrize('tau, passes', [(0.0, 4), (1.0, 1)])
def test_when_nobody_stops_or_all_do(extra, tau, passes, idx):
    plain, skips = both(**EXTRAS[extra], halt_tau=tau)
    want = results(plain, idx)
    seen, got = slots(skips, lambda: results(skips, idx))
    for a, b in zip(got, want, strict=True):
        close(a, b)
    assert (skips.mechanism.passes == passes).all()
    assert seen == ([13] * passes + [0] * (4 - passes)) * 2


@every_extra
def test_evaluation_is_left_alone(extra, idx):
    """Bit for bit, in pieces and beside padding as well."""
    plain, skips = (model.eval() for model in both(**EXTRAS[extra]))
    assert torch.equal(plain(idx)[0], skips(idx)[0])
    pad = torch.tensor([0, 3, 1])
    memories = [model.new_memory(pad) for model in (plain, skips)]
    for part in idx.split([5, 1, 1, 6], dim=1):
        a, b = (model.hidden(part, memory) for model, memory in zip((plain, skips), memories))
        assert torch.equal(a, b)
        assert torch.equal(plain.mechanism.passes, skips.mechanism.passes)


@pytest.mark.parametrize('how', [recompute_blocks, compile_blocks])
def test_it_works_with_what_else_training_does(how, idx, compiler):
    """What goes through the blocks is of another length in each pass and step."""
    plain, skips = both(**DEPTH_GQA, n_layer=2)
    how(skips)
    for text in idx, (idx + 7) % 50:
        for a, b in zip(results(skips, text), results(plain, text), strict=True):
            close(a, b)


def test_dropout_and_bf16_run(idx):
    _, skips = both(dropout=0.2)
    skips.float()
    with torch.autocast('cpu', torch.bfloat16):
        loss = skips(idx, targets(idx))[1]
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in skips.parameters())


def test_other_models_are_left_alone():
    for settings in dict(ponder='chain'), dict(ROUTER, ponder_steps=0):
        model = make(**settings)
        before = type(model.mechanism), type(model.h[0].attn)
        skip_stopped_tokens(model)
        assert (type(model.mechanism), type(model.h[0].attn)) == before


def test_attention_that_is_not_that_of_model_py_stays():
    """Of some models that others released."""
    config = asdict(make(**ROUTER).config)
    model = new_model(config_of({**config, 'variant': dict(late_k_norm=True)}))
    before = type(model.mechanism), type(model.h[0].attn)
    skip_stopped_tokens(model)
    assert (type(model.mechanism), type(model.h[0].attn)) == before
