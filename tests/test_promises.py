"""The promises every toggle keeps; each test runs once per toggle."""

import math

import naive
import pytest
import torch
from conftest import ONE_EACH, TOGGLES, close, make, rows_of, slow_but
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from engine.build import new_model, without_numbers
from engine.flops import flops_of_new_token, flops_per_token
from engine.generate import left_pad
from engine.mechanisms import halts
from engine.prepare import compile_blocks, recompute_blocks
from model import HALTING, PONDER, GPT, GPTConfig


def differ(a, b, by=1e-4):
    assert (a - b)[a.isfinite()].abs().max() > by


def targets(idx):
    return torch.roll(idx, -1, 1)


def few_sweeps(toggle):
    """The same with as many Jacobi sweeps as in training; `make` has enough to be exact."""
    if toggle.get('ponder') == 'latent':
        return {**toggle, 'jacobi_iters': 2}
    if toggle.get('ponder') == 'feedback':
        return {**toggle, 'ponder_steps': 2}
    return toggle


def gradients(model, idx, autocast=None):
    """[loss, gradient of each parameter]; autocast: a type to compute in."""
    model.zero_grad()
    with torch.autocast('cpu', autocast or torch.bfloat16, enabled=autocast is not None):
        loss = model(idx, targets(idx))[1]
    loss.backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return [loss.detach(), *(grad.clone() for grad in grads)]


@pytest.mark.parametrize('toggles', [
    TOGGLES.values(),
    [TOGGLES[name] for name in ONE_EACH],
])
def test_every_mechanism_is_under_these_tests(toggles):
    assert {toggle.get('ponder', 'none') for toggle in toggles} == set(PONDER)
    assert {toggle.get('halting', 'none') for toggle in toggles} == {'none', *HALTING}


def test_initial_loss_and_gradients(toggle):
    torch.manual_seed(0)
    small = dict(vocab_size=320, n_tokens=257, block_size=64, n_layer=5, n_head=4, n_embd=64,
                 mlp_hidden=128)
    model = new_model(GPTConfig(**{**small, **toggle})).train()
    model.mechanism.begin_step(0, 1)  # halting adds its own term to the loss later in a run
    idx = torch.randint(0, 257, (8, 64))
    loss = model(idx, torch.randint(0, 257, (8, 64)))[1]
    assert abs(loss.item() / math.log(257) - 1) < 0.05
    loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all() and p.grad.abs().sum() > 0, name


def test_causality(toggle, idx):
    model = make(**toggle, block_size=13)
    before, passes = model(idx)[0], model.mechanism.passes
    for t in (0, 5, 12):
        changed = idx.clone()
        changed[:, t] = (changed[:, t] + 1) % 50
        after = model(changed)[0]
        assert torch.equal(before[:, :t], after[:, :t])
        differ(before[:, t], after[:, t])
        if passes is not None:
            assert torch.equal(passes[:, :t], model.mechanism.passes[:, :t])


def test_cached_equals_full_however_the_text_is_split(toggle, idx):
    T = 9 if toggle.get('ponder') == 'latent' else 13  # a split costs 2 T sweeps there
    idx = idx[:, :T]
    model = make(**toggle, block_size=T)
    mechanism = model.mechanism
    full, passes = model(idx)[0], mechanism.passes

    several = [5, 3, 1, 4] if T == 13 else [4, 3, 1, 1]
    for split in [[1, T - 1], [T - 1, 1], [1] * T, several]:
        memory = model.new_memory()
        logits, taken = [], []
        with torch.no_grad():
            for part in idx.split(split, dim=1):
                logits.append(model.head(model.hidden(part, memory)))
                taken.append(mechanism.passes)
        close(torch.cat(logits, 1), full)
        if passes is not None:
            assert torch.equal(torch.cat(taken, 1), passes)


def test_batch_of_unequal_prompts_equals_each_alone(toggle):
    model = make(**toggle, block_size=16)
    prompts = [[3, 1, 4, 1, 5, 9], [2], [7, 1, 8]]
    together = rows_of(model, prompts, 10)
    for prompt, row in zip(prompts, together):
        alone = model.generate(torch.tensor([prompt]), 10, temperature=0)[0]
        assert row.tolist() == alone.tolist()
        assert row[:len(prompt)].tolist() == prompt
    # the tokens could agree by luck: compare the logits behind a left-padded prefill and one
    # decoding step
    tokens, pad = left_pad(prompts, model.config, 'cpu')
    memory = model.new_memory(pad=pad)
    with torch.no_grad():
        model.hidden(tokens, memory)
        step = model.head(model.hidden(torch.tensor([[11]] * 3), memory))
        for i, prompt in enumerate(prompts):
            alone = model(torch.tensor([prompt + [11]]))[0]
            close(step[i, 0], alone[0, -1])


def test_equals_the_naive_loop(toggle):
    model = make(**toggle)
    tokens = [3, 14, 15, 9, 26, 5, 35]
    passes = []
    got = model(torch.tensor([tokens]))[0][0]
    close(got, naive.logits(model, tokens, passes=passes))
    if halts(model):
        assert model.mechanism.passes[0].tolist() == passes
    else:
        assert model.mechanism.passes is None and passes == []


SIZE = dict(vocab_size=256, block_size=128, n_layer=3, n_head=4, n_embd=128, mlp_hidden=256)
LAYERS = 3 * (4 * 128 * 128 + 3 * 128 * 256)    # q, k, v, their projection; the MLP
HEAD = 128 * 256


@pytest.mark.parametrize('name', slow_but(
    ('plain', 'smear', 'embedding', 'feedback', 'chain_depth', 'exit'),
    ['plain', 'smear', 'embedding', 'latent2_depth', 'feedback', 'chain_depth', 'gate', 'mask',
     'router', 'exit', 'ouro']))
@pytest.mark.parametrize('training', [False, True])
def test_flops_are_those_that_torch_counts(name, training):
    """
    Of real numbers, all layers and all draws. engine/flops.py counts shapes, of one layer to three,
    and says from these what four cost.
    """
    model = GPT(GPTConfig(**{**SIZE, 'n_layer': 4, **TOGGLES[name]}))
    idx = torch.randint(0, 256, (1, 128))
    mechanism = model.mechanism
    mechanism.begin_step(0, 1)          # nobody halts: so it is counted
    counts = []
    for mechanism.drawn in mechanism.draws() if training else mechanism.draws()[:1]:
        # the math backend is the one whose matmuls torch counts on a CPU
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            if training:
                model(idx, targets(idx))[1].backward()
            else:
                model(idx)
        counts.append(counter.get_total_flops() / idx.numel())
    said = flops_per_token(model, training=training)
    assert sum(counts) / len(counts) == pytest.approx(said, rel=0.03)


def test_flops_of_the_plain_model_by_hand():
    model = GPT(GPTConfig(**SIZE))
    for T in 100, 128:
        keys = 3 * 2 * T * 128          # q k^T, and its weight times v
        forward = 2 * (LAYERS + keys + HEAD)
        assert flops_per_token(model, T, training=False) == forward
        assert flops_per_token(model, T) == 3 * forward     # of each matrix, and of its input


def test_flops_of_attention_grow_with_the_keys_of_every_query():
    """Also where Chain's queries come in turns, which leave out later keys."""
    for settings in {}, dict(ponder='chain', ponder_steps=1):
        model = GPT(GPTConfig(**SIZE, **settings))
        at_128, at_256, at_512 = [flops_per_token(model, T) for T in (128, 256, 512)]
        assert at_512 - at_256 == 2 * (at_256 - at_128)


def test_flops_of_a_head_that_runs_again_are_counted():
    """As soon as the logits of all texts together are many (some_rows_at_once)."""
    model = without_numbers(GPTConfig(**{**SIZE, 'vocab_size': 50304}))
    one, several = [flops_per_token(model, 100, texts=texts) for texts in (1, 8)]
    assert 100 * 50304 < 2 ** 25 < 8 * 100 * 50304
    assert several - one == 2 * 50304 * model.config.n_embd


def test_flops_of_a_new_token():
    keys = 3 * 2 * 100 * 128
    for ponder, passes in ('none', 1), ('smear', 1), ('feedback', 1), ('loop', 4):
        model = GPT(GPTConfig(**{**SIZE, 'block_size': 100}, ponder=ponder, ponder_steps=3))
        got = flops_of_new_token(model)
        assert got == pytest.approx(2 * (passes * (LAYERS + keys) + HEAD), rel=0.01), ponder
    # a slot of latent reads those of all four passes
    got = flops_of_new_token(
        GPT(GPTConfig(**{**SIZE, 'block_size': 100}, ponder='latent', ponder_steps=3)))
    assert got == pytest.approx(2 * (4 * (LAYERS + 4 * keys) + HEAD), rel=0.01)


@pytest.mark.parametrize('name', [name for name in ONE_EACH if 'halting' not in TOGGLES[name]])
def test_a_device_is_not_waited_for(name):
    """On the meta device, which has no numbers: to read one is an error, so is to mix devices."""
    model = make(**{**TOGGLES[name], **few_sweeps(TOGGLES[name])}).to('meta')
    idx = torch.zeros(3, 7, dtype=torch.long, device='meta')
    assert model.hidden(idx).shape == (3, 7, 32)
    assert model.generate(idx, 3, temperature=0).shape == (3, 10)


def counted_penalty(toggle):
    """
    Settings with which halting's term of the loss counts; but not the router's, which takes a
    probability for a constant: moving the weights would move it.
    """
    if 'halting' not in toggle:
        return {}
    if toggle['halting'] == 'router':
        return dict(halt_lambda=0.0)
    return dict(halt_lambda=5.0, halt_share=0.5)


def test_gradients_agree_with_finite_differences(toggle, idx):
    """
    Nothing is detached on the way: keys and values of earlier passes, sources, gates and biases
    all pass gradients on.
    """
    model = make(**few_sweeps(toggle), **counted_penalty(toggle)).train()
    params = list(model.parameters())
    generator = torch.Generator().manual_seed(3)
    ways = []
    for p in params:
        way = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        ways.append(way * p.detach().abs().mean())

    @torch.no_grad()
    def loss_after(step):
        """The loss with all parameters moved along `ways`; they are moved back afterwards."""
        for p, way in zip(params, ways):
            p += step * way
        loss = model(idx, targets(idx))[1].item()
        for p, way in zip(params, ways):
            p -= step * way
        return loss

    grads = gradients(model, idx)[1:]
    slope = sum((grad * way).sum() for grad, way in zip(grads, ways)).item()
    measured = (loss_after(1e-6) - loss_after(-1e-6)) / 2e-6
    assert slope == pytest.approx(measured, rel=1e-4)
    assert abs(slope) > 1e-3


def test_activation_checkpointing_changes_nothing(toggle, idx):
    model = make(**few_sweeps(toggle)).train()
    calls = []
    model.h[0].attn.register_forward_pre_hook(lambda *_: calls.append(1))
    want = gradients(model, idx)
    plain_calls = len(calls)
    recompute_blocks(model)
    got = gradients(model, idx)
    assert len(calls) == 3 * plain_calls, "a pass was not recomputed"
    for a, b in zip(got, want):
        close(a, b, 1e-12)


@pytest.mark.parametrize('name', slow_but(('loop_depth', 'router_depth'), ONE_EACH))
def test_compiled_blocks_change_nothing(name, idx, compiler):
    model = make(**{**few_sweeps(TOGGLES[name]), 'n_layer': 3}).train()
    texts = idx, (idx + 2) % 50
    want = [gradients(model, text) for text in texts]
    compile_blocks(model)
    for text, grads in zip(texts, want):
        for a, b in zip(gradients(model, text), grads):
            close(a, b, 1e-12)
    assert compiler.graphs > 0


@pytest.mark.parametrize('name', slow_but(
    ('loop_depth', 'pause'), ['plain', 'embedding', 'loop_depth', 'pause']))
def test_one_graph_serves_all_blocks(name, idx, compiler):
    """One of what is in front of attention, and one of the MLP."""
    model = make(**TOGGLES[name])
    compile_blocks(model)
    model(idx)
    assert len(model.h) == 5 and compiler.graphs == 2


def test_bf16_autocast_stays_close(one_of_each, idx):
    if 'ponder_topk' in one_of_each:  # which tokens are the likeliest may change: keep all
        one_of_each = {**one_of_each, 'ponder_topk': 50}
    model = make(**one_of_each, block_size=13, init_std=0.05).float()
    model.train(model.config.halting == 'ouro')     # whose gate counts in training alone
    want = gradients(model, idx)
    got = gradients(model, idx, torch.bfloat16)
    assert got[0] == pytest.approx(want[0].item(), rel=0.01)
    for a, b in zip(got[1:], want[1:]):
        assert a.isfinite().all()
        assert torch.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.99


GATES = {}
for i in range(2):
    GATES[f'mechanism.gates.{i}.0.weight'] = (128, 32)
    GATES[f'mechanism.gates.{i}.0.bias'] = (128,)
    GATES[f'mechanism.gates.{i}.2.weight'] = (1, 128)
    GATES[f'mechanism.gates.{i}.2.bias'] = (1,)

OWN_PARAMETERS = {
    'pause': {'mechanism.pause': (32,)},
    'mask': {'mechanism.router.weight': (2, 32), 'mechanism.router.bias': (2,)},
    'mask2': {'mechanism.router.weight': (3, 32), 'mechanism.router.bias': (3,)},
    'router': {'mechanism.router.weight': (1, 32), 'mechanism.router.bias': (1,)},
    'gate': GATES,
    'ouro': {'mechanism.gate.weight': (1, 32), 'mechanism.gate.bias': (1,)},
}


@pytest.mark.parametrize('name', TOGGLES)
def test_a_toggle_adds_no_parameters_but_its_own(name):
    toggle = TOGGLES[name]
    shared = ('n_kv_head', 'tie_embeddings', 'qk_norm')
    plain = make(**{key: toggle[key] for key in shared if key in toggle}, n_layer=3)
    model = make(**{**toggle, 'n_layer': 3})
    want = {key: tuple(weight.shape) for key, weight in plain.state_dict().items()}
    want.update(OWN_PARAMETERS.get(name.removesuffix('_depth'), {}))
    assert {key: tuple(weight.shape) for key, weight in model.state_dict().items()} == want


@pytest.mark.parametrize('ponder', ['embedding', 'latent', 'feedback', 'chain', 'loop', 'pause'])
@pytest.mark.parametrize('depth_attn', slow_but([False], [False, True]))
def test_no_steps_is_the_plain_gpt_bit_for_bit(ponder, depth_attn, idx):
    shared = dict(depth_attn=depth_attn, n_layer=3)
    model = make(ponder=ponder, ponder_steps=0, **shared)
    plain = make(embed_scale=model.config.embed_scale, **shared)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(idx)[0], plain(idx)[0])
    assert flops_per_token(model) == flops_per_token(plain)
    for prompts in idx[:, :5].tolist(), [[3, 1, 4], [1], [5, 9]]:
        for a, b in zip(rows_of(model, prompts, 6), rows_of(plain, prompts, 6)):
            assert torch.equal(a, b)
    loss = model.train()(idx, targets(idx))[1]
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize('halting', HALTING)
def test_without_steps_nothing_halts(halting):
    ponder = HALTING[halting].works_on
    assert type(make(ponder=ponder, halting=halting, ponder_steps=0).mechanism) is PONDER[ponder]
