"""
Halting: the limits where it equals a model without it, what it leaves out, and what each paper adds
to the loss. That the passes are the papers': test_promises.py.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import EXIT, LOOP, OURO, close, make
from test_promises import targets

from engine.flops import flops_per_token
from engine.generate import stream
from model import HALTING, Attention

MODES = {
    'gate': dict(ponder='embedding', ponder_steps=3, halting='gate', halt_tau=0.45),
    'mask': dict(ponder='latent', ponder_steps=2, halting='mask', halt_tau=0.3),
    'router': dict(ponder='chain', ponder_steps=3, halting='router', halt_tau=0.3),
    'exit': dict(EXIT, halt_tau=0.8),
    'ouro': OURO,
}
every_mode = pytest.mark.parametrize('mode', MODES)
all_that_learn_to_halt = pytest.mark.parametrize('mode', ['gate', 'mask', 'router', 'ouro'])


def make_mode(mode, **settings):
    """A model whose context is as long as `idx`, so that few Jacobi sweeps are exact."""
    return make(**{'block_size': 13, **MODES[mode], **settings})


def deciders(model):
    """The modules that decide: their last layers."""
    mechanism = model.mechanism
    if model.config.halting == 'gate':
        return [gate[2] for gate in mechanism.gates]
    return [mechanism.gate if model.config.halting == 'ouro' else mechanism.router]


def decide(model, go_on):
    """Make every token go on to the end, or stop at once, whatever it reads."""
    if model.config.halting in ('exit', 'ouro'):
        model.config.halt_tau = 0.0 if go_on else 1.0
        return
    K = model.config.ponder_steps
    for module in deciders(model):
        torch.nn.init.zeros_(module.weight)
        torch.nn.init.constant_(module.bias, 1e3 if go_on else -1e3)
        if model.config.halting == 'mask':  # the likeliest number of thoughts: K or 0
            bias = [0.0] * K + [1e3] if go_on else [0.0] + [-1e3] * K
            module.bias.data = torch.tensor(bias).double()


@every_mode
@pytest.mark.parametrize('go_on', [True, False])
def test_open_is_the_fixed_model_and_shut_the_plain_one(mode, go_on, idx):
    shared = dict(n_layer=3, block_size=13)
    model = make_mode(mode, **{**shared, 'halt_tau': 1e-4})
    other, passes = dict(embed_scale=model.config.embed_scale), 1
    if go_on:
        names = {'ponder', 'ponder_steps', 'loop_norm'} & MODES[mode].keys()
        other = {name: MODES[mode][name] for name in names}
        passes = model.config.ponder_steps + 1
    other = make(**other, **shared)
    other.load_state_dict(model.state_dict(), strict=False)

    decide(model, go_on)
    close(model(idx)[0], other(idx)[0], 1e-12)
    assert (model.mechanism.passes == passes).all()


@every_mode
def test_a_token_goes_on_while_its_chance_is_at_least_halt_tau(mode, idx):
    """The slow loops have too few tokens to tell 0.3 from 0.27."""
    model = make_mode(mode)
    model(idx)
    on, passes = torch.ones_like(idx, dtype=torch.bool), torch.ones_like(idx)
    for score in model.mechanism.kept.scores:
        on = on & (score >= model.config.halt_tau)
        passes += on
    assert torch.equal(model.mechanism.passes, passes)
    assert len(passes.unique()) > 1


# ---- what is not computed, and what is reported --------------------------------------------------

@every_mode
def test_a_new_token_costs_as_many_passes_as_the_longest_row_takes(mode):
    """And each row is told its own, which are those of its text alone."""
    model = make_mode(mode, block_size=18)
    prompts = [[3, 1, 4, 1, 5, 9], [2], [7, 1, 8]]
    calls, taken, tokens, shares = [], [], [], []
    model.h[-1].register_forward_pre_hook(lambda _, args: calls.append(args[0].shape[1]))
    for token, passes in stream(model, prompts, 12, temperature=0):
        tokens.append(token)
        taken.append(passes.tolist())
        shares.append(len(calls))
        calls.clear()
    assert shares[1:] == [max(passes) for passes in taken[1:]]
    assert len(set(sum(taken, []))) > 1, "some stop earlier than others"
    for i, prompt in enumerate(prompts):
        text = prompt + [token[i].item() for token in tokens]
        model(torch.tensor([text[:-1]]))
        took = model.mechanism.passes[0, len(prompt) - 1:]
        assert [passes[i] for passes in taken] == took.tolist()


# ---- precision -----------------------------------------------------------------------------------

@pytest.mark.parametrize('mode, stage', [
    ('gate', 1), ('mask', 1), ('router', 1), ('ouro', 1), ('ouro', 2)])
def test_saturated_decisions_keep_gradients_finite(mode, stage, idx):
    model = make_mode(mode, halt_tau=1e-4, jacobi_iters=2, ouro_stage=stage).float().train()
    for module in deciders(model):
        module.weight.data *= 1e4
    with torch.autocast('cpu', torch.bfloat16):
        loss = model(idx, targets(idx))[1]
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


def test_looking_for_who_leaves_costs_the_head_no_gradient_under_autocast(idx):
    """A head called without gradients must not leave its 16-bit weights for the call with them."""
    model = make_mode('exit').train()
    model.mechanism.begin_step(99, 100)
    with torch.autocast('cpu', torch.bfloat16):
        model(idx, idx)[1].backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


@every_mode
@pytest.mark.parametrize('autocast', [False, True])
def test_bf16_decodes(mode, autocast, idx, monkeypatch):
    """And attention gets what CUDA's kernels take: one dtype, and masks that are bool."""
    kernel = F.scaled_dot_product_attention

    def watched(q, k, v, attn_mask=None, *args, **options):
        assert attn_mask is None or attn_mask.dtype == torch.bool
        assert autocast or q.dtype == k.dtype == v.dtype
        return kernel(q, k, v, attn_mask, *args, **options)

    monkeypatch.setattr(Attention, 'kernel', staticmethod(watched))
    model = make_mode(mode)
    model = model.float() if autocast else model.bfloat16()
    memory = model.new_memory()
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        for part in idx.split([5, 1, 1, 6], dim=1):
            assert model.hidden(part, memory).isfinite().all()
    first = memory if mode == 'mask' else memory[0]
    assert {held.dtype for held in first.keys.values()} == {torch.bfloat16}


@all_that_learn_to_halt
def test_decisions_are_made_in_fp32_under_autocast(mode, idx):
    model = make_mode(mode).float()
    types = []
    for module in deciders(model):
        module.register_forward_hook(lambda module, inputs, out: types.append(out.dtype))
    with torch.autocast('cpu', torch.bfloat16):
        model(idx)
    assert set(types) == {torch.float32}


# ---- the loss ------------------------------------------------------------------------------------

@every_mode
def test_the_penalty_is_a_matter_of_training(mode, idx):
    """A validation loss is cross-entropy alone."""
    model = make_mode(mode, halt_lambda=0.5, jacobi_iters=2)
    y = targets(idx)
    y[0, :5] = -1
    close(model(idx, y)[1], model.loss(model.hidden(idx), y), 1e-12)


@pytest.mark.parametrize('mode', ['gate', 'mask', 'router'])
def test_where_no_target_counts_the_loss_is_0(mode, idx):
    """And not 0 / 0."""
    model = make_mode(mode, jacobi_iters=2).train()
    assert model(idx, torch.full_like(idx, -1))[1] == 0


@pytest.mark.parametrize('start, full, ramp', [
    (0.4, 0.48, {0.39: 0, 0.44: 0.5, 0.48: 1, 1.0: 1}),
    (0.5, 0.5, {0.49: 0, 0.5: 1}),
])
def test_the_penalty_grows_from_halt_start_to_halt_full(start, full, ramp):
    mechanism = make_mode('gate', halt_start=start, halt_full=full).mechanism
    for progress, share in ramp.items():
        mechanism.progress = progress
        assert mechanism.onset() == pytest.approx(share)


# AdaPonderLM

def test_gates_let_nobody_halt_before_halt_start(idx):
    model = make_mode('gate').train()
    for progress, halts in ((0.39, False), (0.41, True)):
        model.mechanism.progress = progress
        model(idx)
        assert (model.mechanism.passes < 4).any() == halts
    model.mechanism.progress = 0.0
    model.eval()(idx)  # outside of training they always do
    assert (model.mechanism.passes < 4).any()


def test_the_input_of_tokens_that_stopped_stays(idx):
    """m of (9) is 0 for those who had at most i passes: what (13) reads of them is frozen too."""
    model = make_mode('gate')
    inputs = []
    model.h[0].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model(idx)
    for i in (1, 2, 3):
        stays = (inputs[i] == inputs[i - 1]).all(-1)
        assert torch.equal(stays, model.mechanism.passes <= i)
        assert stays.any()
    assert not stays.all()


def loss_and_penalty(model, idx, penalty):
    """
    What training minimises: its loss, and what is wanted, cross-entropy and penalty(targets). Five
    targets do not count.
    """
    y = targets(idx)
    y[0, :5] = -1
    loss = model(idx, y)[1]
    h = model.hidden(idx)
    return loss.item(), (model.loss(h, y) + penalty(y)).item()


def test_gate_penalty_is_the_mean_of_the_lowest_share(idx):
    model = make_mode('gate', halt_share=0.2, halt_lambda=0.5).train()
    model.mechanism.progress = 0.44     # half of the ramp

    def penalty(y):
        gates = torch.stack(model.mechanism.kept.scores)                     # (K,B,T)
        values = sorted(gates[:, y >= 0].flatten().tolist())
        assert len(values) == 3 * (3 * 13 - 5)
        lowest = values[:math.floor(0.1 * len(values))]
        return 0.5 * sum(lowest) / len(lowest)

    loss, want = loss_and_penalty(model, idx, penalty)
    assert loss == pytest.approx(want, abs=1e-12)


# PonderLM-3

def test_mask_training_fades_where_evaluation_cuts(idx):
    """A cut-off of 0 cuts nothing, and training cuts nothing whatever it is."""
    model = make_mode('mask', jacobi_iters=2)
    cut, fading = model(idx)[0], model.train()(idx)[0]
    model.config.halt_tau = 0.0
    whole = model.eval()(idx)[0]
    close(fading, whole)
    assert (whole - cut)[..., :50].abs().max() > 1e-4


def test_mask_penalty_is_the_expected_number_of_thoughts(idx):
    model = make_mode('mask', halt_lambda=0.5, jacobi_iters=2).train()
    model.mechanism.progress = 0.44     # half of the ramp

    def penalty(y):
        expected = sum(k * model.mechanism.kept.s[..., k] for k in range(3))         # (B,T)
        return 0.5 * 0.5 * expected[y >= 0].mean()

    loss, want = loss_and_penalty(model, idx, penalty)
    assert loss == pytest.approx(want, abs=1e-12)


# Adaptive Latent CoT

def test_router_penalty_by_hand(idx):
    """Going on has its price up to the last step; the right token's probability is a constant."""
    model = make_mode('router', halt_lambda=0.5, halt_beta=2.0, halt_start=0.6, halt_full=0.8)
    model.train()
    model.mechanism.progress = 0.7      # half of the ramp

    def penalty(y):
        mechanism, total = model.mechanism, 0.0
        for k in range(3):
            p = model.head(mechanism.kept.h[k]).softmax(-1)                  # (B,T,V)
            for b, t in (y >= 0).nonzero():
                if mechanism.passes[b, t] > k:
                    total += mechanism.kept.g[k][b, t] * p[b, t, y[b, t]] ** 2
        return 0.5 * 0.5 * total / (3 * 13 - 5)

    loss, want = loss_and_penalty(model, idx, penalty)
    assert loss == pytest.approx(want, abs=1e-6)
    own = model.mechanism.penalty(model, targets(idx))
    assert torch.autograd.grad(own, model.lm_head.weight, allow_unused=True) == (None,)


# Exit

GAIN = dict(LOOP, halting='ouro', ouro_stage=2, loop_norm=True)


def each_pass(model, idx):
    """The cross-entropies (B,T) after each pass, and the gates where there are."""
    model.train()
    model.hidden(idx)
    nats, gates = [], []
    for h in model.mechanism.kept.h:
        logits = model.head(h)
        nats.append(F.cross_entropy(logits.transpose(1, 2), targets(idx), reduction='none'))
        gates.append(model.mechanism.logit(h).sigmoid() if model.config.halting == 'ouro' else None)
    return nats, gates


@pytest.mark.parametrize('mode', ['exit', 'ouro'])
def test_exit_compares_what_the_papers_say(mode, idx):
    """1 - the largest probability, or that nobody has left by the gate: the numbers themselves."""
    model = make_mode(mode)
    model(idx)
    mechanism, survival = model.mechanism, 1.0
    for taken, h, score in zip(mechanism.taken, mechanism.kept.h, model.mechanism.kept.scores):
        chance = 1 - model.head(h).softmax(-1).amax(-1)
        if mode == 'ouro':
            chance = survival = survival * (1 - mechanism.gate(h)[..., 0].sigmoid())
        close(score[taken], chance[taken])
    assert len(mechanism.taken) == 3


@pytest.mark.parametrize('how, weights', [
    ('last', [0, 0, 1]),
    ('uniform', [1 / 3, 1 / 3, 1 / 3]),
    ('ramp', [1 / 6, 2 / 6, 3 / 6]),
])
def test_a_fixed_prior_weighs_the_passes(how, weights, idx):
    late = dict(exit_loss=how, halt_start=0.4, halt_full=0.6, halt_tau=0.0)
    model = make(**{**EXIT, **late})
    nats, _ = each_pass(model, idx)
    for progress, share in [(0.3, 0.0), (0.5, 0.5), (0.9, 1.0)]:
        model.mechanism.progress = progress
        want = (1 - share) * nats[2].mean()
        for weight, loss in zip(weights, nats):
            want = want + share * weight * loss.mean()
        close(model(idx, targets(idx))[1], want)


def test_ouros_stage_1_is_the_papers(idx):
    """Of targets that count; where none does, staying is learned, here half of the ramp."""
    model = make(**{**GAIN, 'ouro_stage': 1, 'halt_lambda': 0.3, 'halt_start': 0.4,
                    'halt_full': 0.6})
    nats, gates = each_pass(model, idx)
    model.mechanism.progress = 0.5
    y = targets(idx)
    y[:, :4] = -1
    stay = 1.0
    want = 0.0
    for t in range(3):
        p = stay * gates[t] if t < 2 else stay                          # (3)
        stay = stay * (1 - gates[t])
        want = want + (p * nats[t] + 0.3 * p * p.log())[y >= 0].mean()  # (4)
    for gate in gates[:2]:
        want = want - 0.3 * 0.5 * (1 - gate).log()[y < 0].mean() / 2
    close(model(idx, y)[1], want)


def test_ouros_stage_2_is_the_papers(idx):
    """Each gate learns whether the next pass gains more than 0.005."""
    model = make(**GAIN)
    nats, gates = each_pass(model, idx)
    y = targets(idx)
    y[:, :4] = -1       # a question: its tokens stay
    want = 0.0
    for t in range(2):
        gain = (nats[t] - nats[t + 1]).clamp(min=0).detach()            # (5)
        wanted = 1 / (1 + torch.exp(-50 * (gain - 0.005)))
        wanted[:, :4] = 1
        want = want + F.binary_cross_entropy(1 - gates[t], wanted)      # (6)
    loss = model(idx, y)[1]
    close(loss, want / 3)
    loss.backward()
    assert all(p.grad.abs().max() > 0 for p in model.mechanism.parameters())


@pytest.mark.parametrize('stage', [1, 2])
def test_a_gate_that_lets_all_tokens_leave_can_learn_that_questions_stay(stage, idx):
    model = make(**{**GAIN, 'ouro_stage': stage, 'halt_start': 0.0, 'halt_full': 0.0}).train()
    gate = model.mechanism.gate
    torch.nn.init.constant_(gate.bias, 40.0)        # lam is 1, in fp32
    y = targets(idx)
    y[:, :4] = -1
    model(idx, y)[1].backward()
    assert gate.bias.grad > 0.01


def test_what_a_gate_alone_costs_has_no_backward_pass():
    """
    But for the gate's own, of each pass but the last, which the loss asks again; after each pass
    there is a head.
    """
    forward = flops_per_token(make(**GAIN), training=False)     # its gates are in it
    gates, heads = 2 * 2 * 32, 2 * 2 * 32 * 64          # 2 FLOPs of C, or of C V
    assert flops_per_token(make(**GAIN)) == forward + heads + 2 * gates


def test_with_the_loss_of_the_last_pass_alone_training_takes_one_head():
    exits, loop = make(**{**EXIT, 'exit_loss': 'last'}), make(**LOOP)
    assert flops_per_token(exits) == flops_per_token(loop)
    # what is counted is the beginning of a run, when nobody leaves: even here
    from_the_start = make(**EXIT, halt_start=0.0, halt_full=0.0)
    assert flops_per_token(from_the_start) == flops_per_token(loop)


def test_no_token_leaves_ouro_in_training(idx):
    """Where outside of it all do."""
    model = make_mode('ouro', halt_tau=1.0)
    for training, passes in (True, 3), (False, 1):
        model.train(training)(idx)
        assert (model.mechanism.passes == passes).all()


def test_tokens_leave_in_training_as_in_generation(idx):
    """From halt_full on, and then the loss of a pass is that of the last one a token took."""
    model = make_mode('exit', halt_start=0.4, halt_full=0.6)
    model(idx)
    taken = model.mechanism.passes
    assert 1 <= taken.min() < taken.max() <= 3
    model.train()
    model.mechanism.progress = 0.5
    model(idx)
    assert (model.mechanism.passes == 3).all()

    model.mechanism.progress = 0.7
    nats, _ = each_pass(model, idx)
    assert torch.equal(model.mechanism.passes, taken)
    second = nats[1].where(taken > 1, nats[0])
    third = nats[2].where(taken > 2, second)
    close(model(idx, targets(idx))[1], (nats[0] + second + third).mean() / 3)


def test_exits_penalty_by_hand(idx):
    """Of tokens with negative targets that took a pass: nats of equal probabilities."""
    model = make_mode('exit', halt_lambda=0.5, halt_start=0.4, halt_full=0.6).train()
    y = targets(idx)
    y[:, :5] = -1
    for progress, onset in (0.5, 0.5), (0.7, 1.0):
        model.mechanism.progress = progress
        model.hidden(idx)
        want = 0.0
        for taken, h in zip(model.mechanism.taken[:2], model.mechanism.kept.h):
            nats = -model.head(h).log_softmax(-1)[..., :50].mean(-1)
            want += 0.5 * onset * nats[(y < 0) & taken].mean() / 2
        close(model.mechanism.penalty(model, y), want)
    assert len(model.mechanism.passes[:, :5].unique()) > 1


@pytest.mark.parametrize('toggle', [EXIT, {**OURO, 'halt_full': 0.0, 'halt_start': 0.0}])
def test_what_is_not_to_be_predicted_is_taught_to_stay(toggle, idx):
    """Doubt, or its gate's probability of staying, grows; without such tokens nothing is due."""
    model = make(**{**toggle, 'halt_tau': 0.0, 'halt_lambda': 0.5}).train()
    mechanism, wanted = model.mechanism, targets(idx)

    model.hidden(idx)
    assert mechanism.penalty(model, wanted) == 0
    wanted[:, :4] = -1
    stays = []
    for _ in range(2):
        model.hidden(idx)
        first = mechanism.kept.h[0]
        p = model.head(first).softmax(-1)[..., :model.config.n_tokens]
        # what a gate says, or how near the prediction is to one that knows nothing
        stay = p.log().mean(-1)
        if toggle['halting'] == 'ouro':
            stay = torch.sigmoid(-mechanism.logit(first))
        stays.append(stay[:, :4].mean().item())
        mechanism.penalty(model, wanted).backward()
        for p in model.parameters():
            if p.grad is not None:
                p.data -= 0.1 * p.grad
    assert stays[1] > stays[0]


def test_a_rule_without_a_threshold_says_so(monkeypatch):
    class Bare(HALTING['router']):
        defaults = dict(halt_lambda=0.1, halt_start=0.0, halt_full=0.0)

    monkeypatch.setitem(HALTING, 'bare', Bare)
    with pytest.raises(ValueError, match='halt_tau=None: add it to Bare.defaults, or set it'):
        make(ponder='chain', halting='bare')
