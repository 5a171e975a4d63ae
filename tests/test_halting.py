"""
Halting: the limits where it must equal a model without it, wrong variants, what it computes and
what it adds to the loss.
"""

import math

import naive
import pytest
import torch
import torch.nn.functional as F
from conftest import close, make
from test_promises import differ, gradients, targets

from model import NEVER, in_fp32

MODES = {
    'gate': dict(ponder='embedding', ponder_steps=3, halting='gate', halt_tau=0.45),
    'mask': dict(ponder='latent', ponder_steps=2, halting='mask', halt_tau=0.3),
    'router': dict(ponder='chain', ponder_steps=3, halting='router', halt_tau=0.3),
}
TOKENS = [3, 14, 15, 9, 26, 5, 35]
every_mode = pytest.mark.parametrize('mode', MODES)


def make_mode(mode, **settings):
    """A model whose context is as long as `idx`, so that few Jacobi sweeps are exact."""
    return make(**{'block_size': 13, **MODES[mode], **settings})


def deciders(model):
    """The modules that decide: their last layers."""
    if model.config.halting == 'gate':
        return [gate[2] for gate in model.mechanism.gates]
    return [model.mechanism.router]


def decide(model, go_on):
    """Make every token go on to the end, or stop at once, whatever it reads."""
    K = model.config.ponder_steps
    for module in deciders(model):
        torch.nn.init.zeros_(module.weight)
        torch.nn.init.constant_(module.bias, 1e3 if go_on else -1e3)
        if model.config.halting == 'mask':  # the likeliest number of thoughts: K or 0
            bias = [0.0] * K + [1e3] if go_on else [0.0] + [-1e3] * K
            module.bias.data = torch.tensor(bias).double()
    return model


def twin(model, **settings):
    """A model of other settings with the same weights, as far as it has them."""
    other = make(**settings)
    other.load_state_dict(model.state_dict(), strict=False)
    return other


def rows_of(model, call):
    """Rows (slots) that the last block computed during call()."""
    rows = []
    hook = model.h[-1].register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[:2]))
    call()
    hook.remove()
    return sum(shape.numel() for shape in rows)


def read_token_by_token(model, idx, memory):
    for token in idx.split(1, dim=1):
        model.hidden(token, memory)


@every_mode
@pytest.mark.parametrize('go_on', [True, False])
def test_open_is_the_fixed_model_and_shut_the_plain_one(mode, go_on, idx, kind):
    shared = dict(depth_attn=True, n_layer=3, block_size=13, kind=kind)
    model = make_mode(mode, halt_tau=1e-4, **shared)
    if go_on:
        fixed = {name: MODES[mode][name] for name in ('ponder', 'ponder_steps')}
        other, passes = twin(model, **fixed, **shared), model.config.ponder_steps + 1
    else:
        other, passes = twin(model, embed_scale=model.config.embed_scale, **shared), 1

    decide(model, go_on)
    close(model(idx)[0], other(idx)[0], 1e-12)
    assert (model.mechanism.passes == passes).all()
    close(model.head(model.hidden(idx, model.new_memory())), other(idx)[0])
    assert (model.mechanism.passes == passes).all()


@pytest.mark.parametrize('mode, wrong', [
    ('gate', 'keys move'),
    ('gate', 'readout moves'),
    ('mask', 'no fading'),
    ('router', 'all visible'),
])
def test_wrong_variants_differ(mode, wrong):
    model = make_mode(mode)
    right = model(torch.tensor([TOKENS]))[0][0]
    close(naive.logits(model, TOKENS), right)
    differ(naive.logits(model, TOKENS, wrong=wrong), right)


@every_mode
def test_what_is_not_needed_is_not_computed(mode, idx):
    model = make_mode(mode)
    model(idx)
    passes = model.mechanism.passes
    assert 1 < passes.double().mean() < model.config.ponder_steps + 1

    for row in range(3):
        one, needed = idx[row:row + 1], passes[row].sum()
        if mode != 'mask':  # its prompt is read by iteration
            memory = model.new_memory(13)
            rows = rows_of(model, lambda: model.hidden(one, memory))
            assert rows == needed == memory.held()
        memory = model.new_memory(13)
        rows = rows_of(model, lambda: read_token_by_token(model, one, memory))
        assert rows == needed == memory.held() == memory.length
        assert memory.places <= 2 * needed  # buffers grow by doubling


@every_mode
def test_rows_that_read_together_wait_but_nobody_reads_what_fills_them_up(mode, idx):
    """In a pass over a text a row that thinks less is filled up to the row that thinks most."""
    model = make_mode(mode)
    model(idx)
    passes = model.mechanism.passes
    memory = model.new_memory(13)
    rows = rows_of(model, lambda: read_token_by_token(model, idx, memory))
    assert memory.held() == passes.sum()
    assert memory.length == passes.max(0).values.sum()
    assert passes.sum() < rows == 3 * memory.length


@every_mode
def test_stream_reports_the_passes_of_each_token(mode):
    model = make_mode(mode, block_size=18)
    prompts = [[3, 1, 4, 1, 5, 9], [2], [7, 1, 8]]
    new = list(model.stream(prompts, 12, temperature=0))
    for i, prompt in enumerate(prompts):
        text = prompt + [token[i].item() for token, _ in new]
        model(torch.tensor([text[:-1]]))
        took = model.mechanism.passes[0, len(prompt) - 1:]
        assert [passes[i].item() for _, passes in new] == took.tolist()


@every_mode
def test_rows_of_a_batch_do_not_wait_for_each_other(mode):
    model = make_mode(mode, block_size=15)
    prompts = torch.tensor([[3, 1, 4], [2, 7, 1], [8, 2, 8], [1, 8, 2]])
    stream = model.stream(prompts, 12, seed=0)
    next(stream)  # the prompt
    rows = []
    model.h[0].register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    taken = torch.stack([passes for _, passes in stream])               # (11,B)
    assert sum(rows) == taken.sum(), "a pass computes only the rows that think"
    longest_row, in_step = taken.sum(0).max(), taken.max(1).values.sum()
    assert len(rows) == longest_row < in_step, "as many passes as the row that thought most needs"


@every_mode
def test_tau_decides_how_long_tokens_think(mode, idx):
    model = make_mode(mode, jacobi_iters=2)
    means = []
    for tau in (0.0, 0.2, 0.4, 0.6, 1.0):
        model.config.halt_tau = tau
        model(idx)
        means.append(model.mechanism.passes.double().mean().item())
    assert means == sorted(means, reverse=True)
    assert means[0] == model.config.ponder_steps + 1
    assert means[-1] == 1
    if mode != 'mask':  # there the one pass still shares its weight with the thoughts left out
        c = model.config
        plain = twin(model, embed_scale=c.embed_scale, n_layer=c.n_layer, block_size=13)
        close(model(idx)[0], plain(idx)[0])


@every_mode
@pytest.mark.parametrize('dtype, size', [(torch.float32, 40.0), (torch.bfloat16, 1e4)])
def test_saturated_decisions_keep_gradients_finite(mode, dtype, size, idx):
    model = make_mode(mode, halt_tau=1e-4, jacobi_iters=2).float().train()
    for module in deciders(model):
        module.weight.data *= size
    with torch.autocast('cpu', dtype, enabled=dtype != torch.float32):
        loss = model(idx, targets(idx))[1]
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@every_mode
@pytest.mark.parametrize('autocast', [False, True])
def test_bf16_decodes(mode, autocast, idx, monkeypatch):
    """And masks are as CUDA's kernels take them: bool, or numbers of the type of the queries."""
    kernel = F.scaled_dot_product_attention

    def watched(q, k, v, attn_mask=None, *args, **options):
        assert attn_mask is None or attn_mask.dtype in (torch.bool, q.dtype)
        return kernel(q, k, v, attn_mask, *args, **options)

    monkeypatch.setattr(F, 'scaled_dot_product_attention', watched)
    model = make_mode(mode)
    model = model.float() if autocast else model.bfloat16()
    memory = model.new_memory(13)
    parts = []
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        for part in idx.split([5, 1, 1, 6], dim=1):
            parts.append(model.head(model.hidden(part, memory)))
    logits = torch.cat(parts, 1)[..., :model.config.n_tokens]
    assert logits.dtype == torch.bfloat16
    assert logits.isfinite().all()
    assert memory.keys[0].dtype == torch.bfloat16


@every_mode
def test_decisions_are_made_in_fp32_under_autocast(mode, idx):
    model = make_mode(mode).float()
    module = model.mechanism.gates[0] if mode == 'gate' else model.mechanism.router
    h = model.embed(idx)
    with torch.autocast('cpu', torch.bfloat16):
        got = in_fp32(module, h)
    assert got.dtype == torch.float32
    assert torch.equal(got, module(h))


@every_mode
def test_the_penalty_is_a_matter_of_training(mode, idx):
    model = make_mode(mode, halt_lambda=0.5, halt_beta=1.0, jacobi_iters=2)
    y = targets(idx)
    close(model(idx, y)[1], model.loss(model.hidden(idx), y), 1e-12)
    model.train()
    model.dense = True
    assert model(idx, y)[1] > model.loss(model.hidden(idx), y) + 1e-3
    assert model(idx, torch.full_like(idx, -1))[1] == 0  # nothing counts


# AdaPonderLM

def test_gates_let_nobody_halt_before_halt_start(idx):
    model = make_mode('gate').train()
    model.mechanism.progress = 0.39
    model(idx)
    assert (model.mechanism.passes == 4).all()
    model.eval()(idx)  # outside of training they always do
    assert (model.mechanism.passes < 4).any()
    model.train()
    model.mechanism.progress = 0.41
    model(idx)
    assert (model.mechanism.passes < 4).any()


def test_the_input_of_tokens_that_stopped_stays(idx):
    model = make_mode('gate')
    inputs = []
    hook = model.h[0].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model(idx)
    hook.remove()
    # m of (9) is 0 for those who had at most i passes: what (13) reads of them is frozen too
    for i in (1, 2, 3):
        stays = (inputs[i] == inputs[i - 1]).all(-1)
        assert torch.equal(stays, model.mechanism.passes <= i)
        assert stays.any()
    assert not stays.all()


def test_cross_entropy_moves_the_gates_of_those_alone_who_go_on(idx):
    model = make_mode('gate').train()
    h = model.hidden(idx)
    gates = model.mechanism.decisions()
    grads = torch.autograd.grad(model.loss(h, targets(idx)), gates)
    for i, grad in enumerate(grads):
        went_on = model.mechanism.passes > i + 1
        assert torch.equal(grad != 0, went_on)
        assert went_on.any() and not went_on.all()


@pytest.mark.parametrize('progress, share', [
    (0.4, 0),
    (0.44, 0.1),
    (1.0, 0.2),
])
def test_gate_penalty_is_the_mean_of_the_lowest_share(progress, share, idx):
    model = make_mode('gate', halt_share=0.2, halt_lambda=0.5).train()
    model.mechanism.progress = progress
    y = targets(idx)
    y[0, :5] = -1
    loss = model(idx, y)[1]
    h = model.hidden(idx)
    gates = torch.stack(model.mechanism.decisions())                    # (K,B,T)
    values = sorted(gates[:, y >= 0].flatten().tolist())
    assert len(values) == 3 * (3 * 13 - 5)
    lowest = values[:math.floor(share * len(values) + 1e-9)]
    penalty = 0.5 * sum(lowest) / len(lowest) if lowest else 0
    assert loss.item() == pytest.approx(model.loss(h, y).item() + penalty, abs=1e-12)


# PonderLM-3

def test_too_few_iterations_differ_from_the_recursion(idx):
    model, idx = make_mode('mask'), idx[:, :5]
    right = model(idx)[0]
    differ(model(idx, jacobi=0)[0], right)
    close(model(idx, jacobi=60)[0], right)


@pytest.mark.parametrize('K, J', [(2, 0), (3, 3)])
def test_a_cached_prompt_is_forward_at_the_same_number_of_iterations(K, J, idx):
    """
    A thought that is cut in one sweep may come back in the next, as without a cache. What is cut in
    the last one is not kept.
    """
    for seed in range(6):
        model = make_mode('mask', seed=seed, ponder_steps=K, jacobi_iters=J)
        cache = model.new_memory(13)
        close(model.head(model.hidden(idx, cache)), model(idx)[0])

        held = cache.held()
        assert held > 3 * 13
        cache.begin(3, 0, 'cpu')    # what follows finds the slots in order, and nothing between
        held_labels = cache.key_labels[:, :cache.length]
        t, k, log_w = held_labels.t, held_labels.k, held_labels.log_w
        there = t < NEVER                                               # (B, length)
        assert there.sum() == held
        assert (log_w[there] >= math.log(0.3)).all()
        assert (t[there] < 13).all() and (k[there] <= K).all()
        for row in range(3):
            n = there[row].sum()
            assert there[row, :n].all()
            assert ((t * (K + 1) + k)[row, :n].diff() > 0).all()


def test_mask_training_fades_where_evaluation_cuts(idx):
    model = make_mode('mask', jacobi_iters=2)
    cut, fading = model(idx)[0], model.train()(idx)[0]
    differ(fading, cut)
    model.config.halt_tau = 0.0
    close(fading, model.train()(idx)[0])  # nothing is cut there
    close(fading, model.eval()(idx)[0])


def test_cutting_thoughts_that_nobody_needs_changes_nothing(idx):
    """Thoughts whose w is 0 (two of four slots are left) may as well not exist."""
    model = make_mode('mask', ponder_steps=3, halt_tau=1e-4, jacobi_iters=2)
    model.mechanism.router.bias.data = torch.tensor([0.0, 0.0, -1e3, -1e3]).double()
    whole = model.train()(idx)[0]
    close(model.eval()(idx)[0], whole)
    assert (model.mechanism.passes == 2).all()


def test_the_more_is_cut_the_more_it_costs(idx):
    model = make_mode('mask', ponder_steps=3, jacobi_iters=3)
    model.mechanism.router.weight.data *= 0.3
    whole = model.train()(idx)[0]
    errors = []
    for tau in (1e-4, 0.15, 0.2, 0.25, 0.3, 0.4):
        model.config.halt_tau = tau
        error = model.eval()(idx)[0] - whole
        errors.append(error[..., :50].abs().mean().item())
    assert errors == sorted(errors)
    assert errors[0] < 1e-3 < errors[-1]


@pytest.mark.parametrize('progress, ramp', [
    (0.4, 0),
    (0.44, 0.5),
    (1, 1),
])
def test_mask_penalty_is_the_expected_number_of_thoughts(progress, ramp, idx):
    model = make_mode('mask', halt_lambda=0.5, jacobi_iters=2).train()
    model.mechanism.progress = progress
    y = targets(idx)
    y[0, :5] = -1
    loss = model(idx, y)[1]
    h = model.hidden(idx)
    [(_, state)] = model.mechanism.trace
    need = state.s                                                      # (B,T,K+1)
    assert need.sum(-1).allclose(torch.ones(3, 13).double())
    expected = sum(k * need[..., k] for k in range(3))[y >= 0].mean()
    want = model.loss(h, y).item() + 0.5 * ramp * expected.item()
    assert loss.item() == pytest.approx(want, abs=1e-12)


# Adaptive Latent CoT

def test_skipping_rows_in_training_changes_nothing(idx):
    model = make_mode('router', depth_attn=True).train()
    results = []
    for model.dense in (False, True):
        results.append(gradients(model, idx))
    for a, b in zip(*results):
        close(a, b, 1e-12)

    model.dense = False
    computed = rows_of(model, lambda: model(idx))
    passes = model.mechanism.passes
    padded = sum(3 * (passes > k).sum(1).max().item() for k in range(4))
    model.dense = True
    assert computed == padded < rows_of(model, lambda: model(idx))


def test_router_penalty_by_hand(idx):
    model = make_mode('router', halt_lambda=0.5, halt_beta=2.0).train()
    model.dense = True
    y = targets(idx)
    y[0, :5] = -1
    loss = model(idx, y)[1]
    h = model.hidden(idx)
    passes = model.mechanism.passes
    total = 0.0
    for k, (_, state) in enumerate(model.mechanism.trace[:3]):
        p = model.head(state.x).softmax(-1)                             # (B,T,V)
        for b in range(3):
            for t in range(13):
                if y[b, t] >= 0 and passes[b, t] > k:
                    total += (state.g[b, t] * p[b, t, y[b, t]] ** 2).item()
    want = model.loss(h, y).item() + 0.5 * total / (3 * 13 - 5)
    assert loss.item() == pytest.approx(want, abs=1e-6)


def test_router_gradients_of_those_who_stopped(idx):
    model = make_mode('router').train()
    mechanism = model.mechanism
    model.dense = True
    h = model.hidden(idx)
    wanted = [state.g for _, state in mechanism.trace[:3]]
    loss = model.loss(h, targets(idx))
    penalty = mechanism.penalty(model, targets(idx))
    by_loss = torch.autograd.grad(loss, wanted, retain_graph=True)
    *by_penalty, by_penalty_of_head = torch.autograd.grad(
        penalty, [*wanted, model.lm_head.weight], allow_unused=True, retain_graph=True)
    for k in range(3):
        # a decision to stop is not revised by cross-entropy
        assert torch.equal(by_loss[k] != 0, mechanism.passes > k + 1)
        # going on has its price, until the step that was the last
        assert torch.equal(by_penalty[k] > 0, mechanism.passes > k)
    assert by_penalty_of_head is None  # the right token's probability is a constant


@pytest.mark.parametrize('progress, ramp', [(0.6, 0), (0.7, 0.5), (1, 1)])
def test_router_penalty_waits_if_it_is_told_to(progress, ramp, idx):
    model = make_mode('router', halt_lambda=0.5).train()
    model.mechanism.progress = progress
    at_once = model(idx, targets(idx))[1].item()
    model.config.halt_start, model.config.halt_full = 0.6, 0.8
    later = model(idx, targets(idx))[1].item()
    model.config.halt_lambda = 0.0
    without = model(idx, targets(idx))[1].item()
    assert at_once > without
    assert later - without == pytest.approx(ramp * (at_once - without), abs=1e-12)


def test_a_ramp_may_be_a_step(idx):
    model = make_mode('gate', halt_start=0.5, halt_full=0.5)
    for progress, ramp in ((0.2, 0), (0.5, 1), (0.7, 1)):
        model.mechanism.progress = progress
        assert model.mechanism.onset() == ramp
