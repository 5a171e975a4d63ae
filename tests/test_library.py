"""
What model.py promises to those who train with it: begin_step, copies, shapes, and PyTorch's default
dtype. (The lines on top of it: test_alone.py.)
"""

import copy

import pytest
import torch
from conftest import ONE_EACH, TOGGLES, close, make, slow_but
from test_promises import few_sweeps, targets

from engine.build import shapes_only
from engine.mechanisms import halts
from model import GPT, GPTConfig

NEEDS_BEGIN_STEP = ('latent', 'feedback', 'gate', 'mask', 'router', 'exit', 'ouro')
SMALL = dict(vocab_size=64, n_tokens=50, block_size=16, n_layer=2, n_head=4, n_embd=32)


def mechanism_of(toggle):
    """'gate' of {'ponder': 'embedding', 'halting': 'gate'}; 'none' of {}."""
    return toggle.get('halting', toggle.get('ponder', 'none'))


# ---- begin_step ----------------------------------------------------------------------------------

def test_training_without_begin_step_says_so_where_it_matters(one_of_each, idx):
    """And an evaluation does not need it."""
    model = GPT(GPTConfig(**{**SMALL, **few_sweeps(one_of_each)}))
    model.eval()(idx, targets(idx))
    model.train()
    if mechanism_of(one_of_each) not in NEEDS_BEGIN_STEP:
        model(idx, targets(idx))[1].backward()
        return
    with pytest.raises(ValueError) as error:
        model(idx, targets(idx))
    says = str(error.value)
    assert 'gpt.mechanism.begin_step(step, steps)' in says and '\n' not in says
    model.mechanism.begin_step(0, 1)
    model(idx, targets(idx))[1].backward()


@pytest.mark.parametrize('name, draws', [
    ('latent', [3, 2]),
    ('mask', [3, 2]),
    ('feedback', [3, 2]),
    ('loop', [None]),
])
def test_a_step_draws_by_the_seed_and_its_number(name, draws):
    """By nothing else, and it moves no other draw; halting's schedule hears how far the run is."""
    mechanism = GPT(GPTConfig(**SMALL, **{**TOGGLES[name], 'ponder_steps': 3})).mechanism
    assert mechanism.draws() == draws

    def drawn(*seed):
        values = []
        for step in range(40):
            mechanism.begin_step(step, 40, *seed)
            assert mechanism.progress == step / 40
            values.append(mechanism.drawn)
        return values

    assert set(drawn(1)) == set(draws)
    state = torch.random.get_rng_state()
    assert drawn(1) == drawn(1) and drawn() == drawn(0)
    assert torch.equal(state, torch.random.get_rng_state()), "no other draw moves"
    if len(draws) > 1:
        assert drawn(1) != drawn(2)


def test_what_is_drawn_is_how_often_training_iterates(idx):
    """In evaluation it is what the setting says, whatever a step drew before."""
    for name, passes in ('latent2_depth', lambda n: 2 + n + 1), ('feedback', lambda n: n + 1):
        model = make(**few_sweeps(TOGGLES[name]))
        calls = []
        model.h[0].register_forward_pre_hook(lambda *_: calls.append(1))
        for model.mechanism.drawn in model.mechanism.draws():
            model.train()(idx, targets(idx))
            assert len(calls) == passes(model.mechanism.drawn)
            calls.clear()
            model.eval()(idx)
            assert len(calls) == passes(model.mechanism.draws()[0])
            calls.clear()


# ---- copies --------------------------------------------------------------------------------------

def test_a_copy_computes_with_its_own_weights(one_of_each, idx):
    """Such as an average of the weights, kept beside them from step to step."""
    model = make(**few_sweeps(one_of_each)).train()
    model(idx, targets(idx))[1].backward()
    after_a_step = copy.deepcopy(model)
    if halts(model):
        assert torch.equal(after_a_step.mechanism.passes, model.mechanism.passes)
    loss = model(idx, targets(idx))[1]
    within_a_step = copy.deepcopy(model)        # its graph is there until backward
    loss.backward()
    for copied in after_a_step, within_a_step:
        assert torch.equal(copied(idx, targets(idx))[1], loss)
        with torch.no_grad():
            for p in copied.parameters():
                p.mul_(1.5)
        fresh = make(**few_sweeps(one_of_each)).train()
        fresh.load_state_dict(copied.state_dict())
        assert torch.equal(copied(idx)[0], fresh(idx)[0])
    assert torch.equal(model(idx, targets(idx))[1], loss)


# ---- shapes --------------------------------------------------------------------------------------

def test_weights_that_are_drawn_keep_their_shape_without_numbers():
    """Such as nn.Parameter(torch.empty(C).normal_()) in a mechanism of one's own."""
    with shapes_only():
        weight = torch.empty(3)
        assert weight.normal_(std=0.02) is torch.nn.init.normal_(weight) is weight


# ---- PyTorch's default dtype ---------------------------------------------------------------------

@pytest.mark.parametrize('dtype', slow_but([torch.float64], [torch.float64, torch.bfloat16]))
def test_every_default_dtype_will_do(one_of_each, dtype, idx):
    """A tensor that is made without a dtype would be of another one than those it meets."""
    torch.manual_seed(0)
    settings = {**SMALL, **few_sweeps(one_of_each)}
    try:
        torch.set_default_dtype(dtype)
        model = GPT(GPTConfig(**settings)).train()
        model.mechanism.begin_step(9, 10)
        y = targets(idx)
        y[0, :3] = -1
        loss = model(idx, y)[1]
        loss.backward()
        tokens = model.eval().generate(idx[:, :5], 4, temperature=0)
        logits = model(idx)[0]
        memory = model.new_memory(torch.tensor([0, 2, 1]))      # beside padding
        in_pieces = [model.hidden(part, memory) for part in idx.split([9, 1, 3], dim=1)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert logits.dtype == dtype
    assert {h.dtype for h in in_pieces} == {dtype}
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.isfinite() and tokens.shape == (3, 9)
    assert all(p.grad.isfinite().all() for p in model.parameters())

    if dtype == torch.float64:      # which is what .double() gives
        same = GPT(GPTConfig(**settings)).double().train()
        same.load_state_dict(model.state_dict())
        same.mechanism.begin_step(9, 10)
        close(same(idx, y)[1], loss, 1e-12)
        close(same.eval()(idx)[0], logits, 1e-12)


@pytest.mark.parametrize('name', ONE_EACH)
def test_a_model_in_fp32_computes_the_same_under_another_default(name, idx):
    model = make(**few_sweeps(TOGGLES[name])).float()
    want = model(idx)[0]
    try:
        torch.set_default_dtype(torch.float64)
        got = model(idx)[0]
        memory = model.new_memory(torch.tensor([0, 2, 1]))
        h = model.hidden(idx, memory)
    finally:
        torch.set_default_dtype(torch.float32)
    assert got.dtype == h.dtype == torch.float32
    close(got, want, 1e-4)
