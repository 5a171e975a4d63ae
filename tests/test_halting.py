"""Halting: the limits where it must equal a model without it, wrong variants, what it computes and what it adds to the loss."""
import copy
import math

import naive
import pytest
import torch
import torch.nn.functional as F
from conftest import close, make
from test_promises import differ, targets

from engine.memory import with_key_bias
from model import GPTConfig, penalty

MODES = {'gate': dict(ponder='embedding', ponder_steps=3, halting='gate', halt_tau=0.45),
         'mask': dict(ponder='latent', ponder_steps=2, halting='mask', halt_tau=0.3),
         'router': dict(ponder='chain', ponder_steps=3, halting='router', halt_tau=0.3)}
TOKENS = [3, 14, 15, 9, 26, 5, 35]


def decide(model, want):
    """Make every token stop at once (want=0) or never (want=1), whatever it reads."""
    modules = [gate[2] for gate in model.gates] if model.config.halting == 'gate' else [model.router]
    for module in modules:
        torch.nn.init.zeros_(module.weight)
        torch.nn.init.constant_(module.bias, 1e3 if want else -1e3)
        if model.config.halting == 'mask': module.bias.data = torch.tensor([0.0] * model.config.ponder_steps + [1e3 if want else -1e3]).double()
        if model.config.halting == 'mask' and not want: module.bias.data = torch.tensor([0.0] + [-1e3] * model.config.ponder_steps).double()
    return model


def twin(model, **settings):
    """A model of other settings with the same weights, as far as it has them."""
    other = make(**settings)
    other.load_state_dict(model.state_dict(), strict=False)
    return other


def rows_of(model, call):
    """Rows (slots) that the last block computed during call()."""
    rows = []
    hook = model.h[-1].register_forward_pre_hook(lambda m, args: rows.append(args[0].shape[:2].numel()))
    call()
    hook.remove()
    return sum(rows)


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('depth_attn', [False, True])
def test_open_is_the_fixed_model_and_shut_the_plain_one(mode, depth_attn, idx):
    settings = {**MODES[mode], 'depth_attn': depth_attn, 'n_layer': 3, 'halt_tau': 1e-4}
    model = make(**settings)
    fixed = twin(model, **{k: v for k, v in settings.items() if not k.startswith('halt')})
    plain = twin(model, embed_scale=model.config.embed_scale, depth_attn=depth_attn, n_layer=3)
    for other, want, steps in ((fixed, 1, model.config.ponder_steps + 1), (plain, 0, 1)):
        decide(model, want)
        close(model(idx)[0], other(idx)[0], 1e-12)
        # bit for bit, where keys have no more dimensions (mask) and the same order (not so in router and chain)
        assert torch.equal(model(idx)[0], other(idx)[0]) or mode == 'mask' or (mode == 'router' and other is fixed)
        assert (model.steps == steps).all()
        close(model.head(model.hidden(idx, model.new_memory(13))), other(idx)[0])
        assert (model.steps == steps).all()


@pytest.mark.parametrize('mode, wrong', [('gate', 'keys move'), ('gate', 'readout moves'), ('mask', 'no fading'), ('router', 'all visible')])
def test_wrong_variants_differ(mode, wrong):
    model = make(**MODES[mode])
    right = model(torch.tensor([TOKENS]))[0][0]
    close(naive.logits(model, TOKENS), right)
    differ(naive.logits(model, TOKENS, wrong=wrong), right)


@pytest.mark.parametrize('mode', MODES)
def test_what_is_not_needed_is_not_computed(mode, idx):
    model = make(**MODES[mode])
    model(idx)
    steps = model.steps
    assert 1 < steps.double().mean() < model.config.ponder_steps + 1
    if mode != 'mask':  # its prompt is read by iteration
        memory = model.new_memory(13)
        assert rows_of(model, lambda: model.hidden(idx[:1], memory)) == steps[0].sum() == memory[0].used.sum()
    memory = model.new_memory(13)  # decoding: rows of the batch drop out one by one
    assert rows_of(model, lambda: [model.hidden(part, memory) for part in idx.split(1, 1)]) == steps.sum() == memory[0].used.sum()
    needed = memory[0].bytes() / (3 * memory[0].time.size(1)) * memory[0].used.max()
    assert memory[0].bytes() <= 2 * 3 * needed  # buffers grow by doubling


@pytest.mark.parametrize('mode', MODES)
def test_stream_reports_the_passes_of_each_token(mode):
    model = make(**MODES[mode])
    prompts = [[3, 1, 4, 1, 5, 9], [2], [7, 1, 8]]
    new = list(model.stream(prompts, 12, temperature=0))
    for i, prompt in enumerate(prompts):
        text = prompt + [token[i].item() for token, _ in new]
        model(torch.tensor([text[:-1]]))
        assert [passes[i].item() for _, passes in new] == model.steps[0, len(prompt) - 1:].tolist()


@pytest.mark.parametrize('mode', MODES)
def test_rows_of_a_batch_do_not_wait_for_each_other(mode):
    model = make(**MODES[mode])
    prompts = torch.tensor([[3, 1, 4], [2, 7, 1], [8, 2, 8], [1, 8, 2]])
    stream, rows = model.stream(prompts, 12, seed=0), []
    taken = [next(stream)[1]]  # the prompt
    model.h[0].register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    taken = torch.stack(taken + [passes for _, passes in stream])[1:]                    # (11,B)
    assert sum(rows) == taken.sum(), "a pass computes only the rows that think"
    assert len(rows) == taken.sum(0).max() < taken.max(1).values.sum(), "as many passes as the row that thought most needs"


@pytest.mark.parametrize('mode', MODES)
def test_tau_decides_how_long_tokens_think(mode, idx):
    model, means = make(**MODES[mode]), []
    for tau in (0.0, 0.2, 0.4, 0.6, 1.1):
        model.config.halt_tau = tau
        model(idx)
        means.append(model.steps.double().mean().item())
    assert means == sorted(means, reverse=True) and means[0] == model.config.ponder_steps + 1 and means[-1] == 1
    plain = twin(model, embed_scale=model.config.embed_scale, n_layer=model.config.n_layer)
    if mode != 'mask': close(model(idx)[0], plain(idx)[0])  # there the one pass still shares its weight with the thoughts left out


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('size', [40.0, 1e4])
def test_saturated_decisions_keep_gradients_finite(mode, dtype, size, idx):
    model = make(**{**MODES[mode], 'halt_tau': 1e-4, **({'jacobi_iters': 2} if mode == 'mask' else {})}).float().train()
    for module in [gate[2] for gate in model.gates] if mode == 'gate' else [model.router]: module.weight.data *= size
    with torch.autocast('cpu', dtype, enabled=dtype != torch.float32): loss = model(idx, targets(idx))[1]
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('autocast', [False, True])
def test_bf16_decodes(mode, autocast, idx):
    model = make(**MODES[mode])
    model, memory = model.float() if autocast else model.bfloat16(), model.new_memory(13)
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        parts = [model.head(model.hidden(part, memory)) for part in idx.split([5, 1, 1, 6], 1)]
    logits = torch.cat(parts, 1)[..., :model.config.n_tokens]
    assert logits.dtype == torch.bfloat16 and logits.isfinite().all() and memory[0].k[0].dtype == torch.bfloat16


@pytest.mark.parametrize('mode', MODES)
def test_decisions_are_made_in_fp32_under_autocast(mode, idx):
    model = make(**MODES[mode]).float()
    module, h = model.gates[0] if mode == 'gate' else model.router, model.embed(idx)
    with torch.autocast('cpu', torch.bfloat16): got = model.wide(module, h)
    assert got.dtype == torch.float32 and torch.equal(got, module(h))


@pytest.mark.parametrize('mode', MODES)
def test_the_penalty_is_a_matter_of_training(mode, idx):
    model = make(**MODES[mode], halt_lambda=0.5, halt_beta=1.0)
    close(model(idx, targets(idx))[1], model.loss(model.hidden(idx), targets(idx)), 1e-12)
    model.train().dense = True
    assert model(idx, targets(idx))[1] > model.loss(model.hidden(idx), targets(idx)) + 1e-3
    assert model(idx, torch.full_like(idx, -1))[1] == 0  # nothing counts


@pytest.mark.parametrize('mode', MODES)
def test_a_model_can_be_copied_after_a_step(mode, idx):
    model = make(**MODES[mode]).train()
    model(idx, targets(idx))[1].backward()
    close(copy.deepcopy(model).eval()(idx)[0], model.eval()(idx)[0], 1e-15)


# AdaPonderLM

def test_gates_let_nobody_halt_before_halt_start(idx):
    model = make(**MODES['gate']).train()
    model.progress = 0.39
    model(idx)
    assert (model.steps == 4).all()
    model.eval()(idx)  # outside of training they always do
    assert (model.steps < 4).any()
    model.train().progress = 0.41
    model(idx)
    assert (model.steps < 4).any()


def test_the_input_of_tokens_that_stopped_stays(idx):
    model, inputs = make(**MODES['gate']), []
    hook = model.h[0].register_forward_pre_hook(lambda block, args: inputs.append(args[0]))
    model(idx)
    hook.remove()
    for i in (1, 2, 3):  # m of (9) is 0 for those who had at most i passes: what (13) reads of them is frozen too
        stays = (inputs[i] == inputs[i - 1]).all(-1)
        assert torch.equal(stays, model.steps <= i) and stays.any()
    assert not stays.all()


def test_cross_entropy_moves_the_gates_of_those_alone_who_go_on(idx):
    model = make(**MODES['gate']).train()
    h = model.hidden(idx)
    gates = list(model.trace)
    grads = torch.autograd.grad(model.loss(h, targets(idx)), gates)
    for i, (s, grad) in enumerate(zip(gates, grads)):
        went_on = model.steps > i + 1
        assert torch.equal(grad != 0, went_on) and went_on.any() and not went_on.all()


def test_gate_penalty_is_the_mean_of_the_lowest_share(idx):
    model = make(**MODES['gate'], halt_share=0.2, halt_lambda=0.5).train()
    y = targets(idx)
    y[0, :5] = -1
    for progress, share in ((0.0, 0), (0.4, 0), (0.44, 0.1), (0.48, 0.2), (1.0, 0.2)):
        model.progress = progress
        loss, h = model(idx, y)[1], model.hidden(idx)
        values = sorted(s.item() for gate in model.trace for s in gate[y >= 0])
        lowest = values[:math.floor(share * len(values) + 1e-9)]
        assert loss.item() == pytest.approx(model.loss(h, y).item() + (0.5 * sum(lowest) / len(lowest) if lowest else 0), abs=1e-12)


# PonderLM-3

@pytest.mark.parametrize('kv_heads', [1, 2, 4])
def test_a_key_bias_is_one_more_dimension(kv_heads):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 7, 6).double(), torch.randn(2, kv_heads, 7, 6).double(), torch.randn(2, kv_heads, 7, 6).double()
    bias = torch.randn(2, 7).double()
    mask = torch.full((7, 7), -math.inf).triu(1).double() + bias[:, None, None, :]
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    got = F.scaled_dot_product_attention(*with_key_bias(q, k, v, bias), is_causal=True, scale=6 ** -0.5, enable_gqa=True)
    close(got[..., :6], want, 1e-14)
    assert not got[..., 6:].any()


def test_too_few_iterations_differ_from_the_recursion(idx):
    model = make(**MODES['mask'])
    right = model(idx)[0]
    differ(model(idx, jacobi=0)[0], right)
    close(model(idx, jacobi=60)[0], right)


@pytest.mark.parametrize('K, J', [(1, 0), (2, 0), (2, 1), (3, 3)])
def test_a_cached_prompt_is_forward_at_the_same_number_of_iterations(K, J, idx):
    """A thought that is cut in one sweep may come back in the next, as without a cache. What is cut in the last one is not kept."""
    for seed in range(12):
        model = make(seed, **{**MODES['mask'], 'ponder_steps': K, 'jacobi_iters': J})
        memory = model.new_memory(13)
        close(model.head(model.hidden(idx, memory)), model(idx)[0])
        cache, held = memory[0], torch.arange(memory[0].time.size(1)) < memory[0].used[:, None]
        assert (cache.bias[held] >= math.log(0.3)).all() and (cache.time[held] < 13 * (K + 1)).all()
        assert all((cache.time[row, :n].diff() > 0).all() for row, n in enumerate(cache.used))


def test_mask_training_fades_where_evaluation_cuts(idx):
    model = make(**MODES['mask'])
    cut, fading = model(idx)[0], model.train()(idx)[0]
    differ(fading, cut)
    model.config.halt_tau = 0.0
    close(fading, model.train()(idx)[0])  # nothing is cut there
    close(fading, model.eval()(idx)[0])


def test_cutting_thoughts_that_nobody_needs_changes_nothing(idx):
    """Thoughts whose w is 0 (two of four slots are left) may as well not exist; else what is cut costs more, the more is cut."""
    model = make(**{**MODES['mask'], 'ponder_steps': 3, 'halt_tau': 1e-4})
    model.router.bias.data = torch.tensor([0.0, 0.0, -1e3, -1e3]).double()
    whole = model.train()(idx)[0]
    close(model.eval()(idx)[0], whole)
    assert (model.steps == 2).all()
    model.router.bias.data.zero_()
    model.router.weight.data *= 0.3
    whole, errors = model.train()(idx)[0], []
    for model.config.halt_tau in (1e-4, 0.15, 0.2, 0.25, 0.3, 0.4): errors.append((model.eval()(idx)[0] - whole)[..., :50].abs().mean().item())
    assert errors == sorted(errors) and errors[0] < 1e-3 < errors[-1]


def test_mask_penalty_is_the_expected_number_of_thoughts(idx):
    model = make(**MODES['mask'], halt_lambda=0.5).train()
    y = targets(idx)
    y[0, :5] = -1
    for progress, ramp in ((0.4, 0), (0.44, 0.5), (0.48, 1), (1, 1)):
        model.progress = progress
        loss, h = model(idx, y)[1], model.hidden(idx)
        need = model.trace[0]
        assert need.sum(-1).allclose(torch.ones(3, 13).double())
        expected = sum(k * need[..., k] for k in range(3))[y >= 0].mean()
        assert loss.item() == pytest.approx(model.loss(h, y).item() + 0.5 * ramp * expected.item(), abs=1e-12)


# Adaptive Latent CoT

def test_skipping_rows_in_training_changes_nothing(idx):
    model, results = make(**MODES['router'], depth_attn=True).train(), []
    for model.dense in (False, True):
        model.zero_grad()
        loss = model(idx, targets(idx))[1]
        loss.backward()
        results.append([loss.detach()] + [p.grad.clone() for p in model.parameters()])
    for a, b in zip(*results): close(a, b, 1e-12)
    model.dense = False
    computed = rows_of(model, lambda: model(idx))
    padded = sum(3 * (model.steps > k).sum(1).max().item() for k in range(4))
    assert computed == padded < rows_of(model, lambda: setattr(model, 'dense', True) or model(idx))


def test_router_penalty_by_hand(idx):
    model = make(**MODES['router'], halt_lambda=0.5, halt_beta=2.0).train()
    model.dense = True
    y = targets(idx)
    y[0, :5] = -1
    loss, h = model(idx, y)[1], model.hidden(idx)
    total = 0.0
    for k, (active, z, g) in enumerate(model.trace):
        p = model.head(z).softmax(-1)
        for b in range(3):
            for t in range(13):
                if y[b, t] >= 0 and model.steps[b, t] > k: total += (g[b, t] * p[b, t, y[b, t]] ** 2).item()
    assert loss.item() == pytest.approx(model.loss(h, y).item() + 0.5 * total / (3 * 13 - 5), abs=1e-6)


def test_router_gradients_of_those_who_stopped(idx):
    model = make(**MODES['router']).train()
    model.dense = True
    h = model.hidden(idx)
    trace, steps = list(model.trace), model.steps
    wanted = [g for _, _, g in trace]
    by_loss = torch.autograd.grad(model.loss(h, targets(idx)), wanted, retain_graph=True)
    by_penalty = torch.autograd.grad(penalty(model, targets(idx)), wanted + [model.lm_head.weight], allow_unused=True, retain_graph=True)
    for k, (loss_grad, penalty_grad) in enumerate(zip(by_loss, by_penalty)):
        assert torch.equal(loss_grad != 0, steps > k + 1)            # a decision to stop is not revised by cross-entropy
        assert (penalty_grad > 0).equal(steps > k)                   # going on has its price, until the step that was the last
    assert by_penalty[-1] is None                                    # the right token's probability is a constant


@pytest.mark.parametrize('settings, words', [
    (dict(halting='gate'), ["halting='gate'", "ponder='none'", "ponder='embedding'"]), (dict(ponder='loop', halting='router'), ["ponder='chain'"]),
    (dict(halting='stop'), ["'stop'", "'gate'", "'router'"]), (dict(ponder='chain', halting='router', halt_tau=-1), ['halt_tau']),
    (dict(ponder='embedding', halting='gate', halt_start=0.5, halt_full=0.4), ['halt_start=0.5', 'halt_full=0.4']),
    (dict(ponder='embedding', halting='gate', halt_start=0.4, halt_full=0.4), ['halt_start=0.4'])])
def test_impossible_settings_name_what_to_change(settings, words):
    with pytest.raises(ValueError) as error: GPTConfig(**settings)
    for word in words: assert word in str(error.value)
