"""The promises every toggle keeps; each test runs once per toggle."""
import math

import naive
import pytest
import torch
from conftest import ONE_EACH, TOGGLES, close, make
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from engine.hardware import compile_blocks
from engine.memory import RaggedCache
from model import HALTING, PONDER, GPT, GPTConfig


def differ(a, b, by=1e-4):
    assert (a - b)[a.isfinite()].abs().max() > by


def targets(idx):
    return torch.roll(idx, -1, 1)


def test_every_mechanism_is_under_these_tests():
    for toggles in TOGGLES.values(), [TOGGLES[name] for name in ONE_EACH]:
        assert {t.get('ponder', 'none') for t in toggles} == set(PONDER) and {t.get('halting', 'none') for t in toggles} == {'none', *HALTING}


def test_initial_loss_and_gradients(toggle):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**dict(vocab_size=320, n_tokens=257, block_size=64, n_layer=5, n_head=4, n_embd=64, mlp_hidden=128), **toggle})).train()
    model.progress = 0.0  # halting adds its own term to the loss later in a run
    idx = torch.randint(0, 257, (16, 64))
    loss = model(idx, torch.randint(0, 257, (16, 64)))[1]
    assert abs(loss.item() / math.log(257) - 1) < 0.05
    loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().sum() > 0, name


def test_causality(toggle, idx):
    model = make(**toggle)
    model.dense = True  # or later tokens that halt would change the shapes that earlier ones are computed in, and their rounding
    before, steps = model(idx)[0], model.steps
    for t in (0, 5, 12):
        changed = idx.clone()
        changed[:, t] = (changed[:, t] + 1) % 50
        after = model(changed)[0]
        assert torch.equal(before[:, :t], after[:, :t])
        differ(before[:, t], after[:, t])
        if steps is not None: assert torch.equal(steps[:, :t], model.steps[:, :t])


def test_cached_equals_full_for_every_split(toggle, idx):
    model = make(**toggle, block_size=13)
    full, steps = model(idx)[0], model.steps
    T, per_token = idx.size(1), model.config.slots * len(model.new_memory(1))
    for split in [[n, T - n] for n in range(1, T)] + [[1] * T, [5, 3, 1, 4]]:
        memory, parts, taken, start = model.new_memory(T), [], [], 0
        for n in split:
            parts.append(model.head(model.hidden(idx[:, start:start + n], memory)))
            taken.append(model.steps)
            start += n
        close(torch.cat(parts, 1), full)
        held = sum(cache.used.sum().item() if isinstance(cache, RaggedCache) else 3 * cache.length for cache in memory)
        if steps is None: assert held == 3 * T * per_token
        else:  # what a token did not compute is not in the cache
            assert torch.equal(torch.cat(taken, 1), steps) and held == steps.sum() < 3 * T * (model.config.ponder_steps + 1)


def test_batch_of_unequal_prompts_equals_each_alone(toggle):
    model = make(**toggle)
    prompts = [[3, 1, 4, 1, 5, 9], [2], [7, 1, 8]]
    together = model.generate(prompts, 10, temperature=0)
    for prompt, row in zip(prompts, together):
        assert row.tolist() == model.generate(torch.tensor([prompt]), 10, temperature=0)[0].tolist()
        assert row[:len(prompt)].tolist() == prompt
    # the tokens could agree by luck: compare the logits behind a left-padded prefill and one decoding step
    tokens, start = model._left_pad(prompts, 'cpu')
    memory = model.new_memory(8, start)
    model.hidden(tokens, memory)
    step = model.head(model.hidden(torch.tensor([[11]] * 3), memory))
    for i, prompt in enumerate(prompts):
        close(step[i, 0], model(torch.tensor([prompt + [11]]))[0][0, -1])


def test_equals_the_naive_loop(toggle):
    model = make(**toggle)
    tokens = [3, 14, 15, 9, 26, 5, 35]
    passes = []
    close(model(torch.tensor([tokens]))[0][0], naive.logits(model, tokens, passes=passes))
    if passes: assert model.steps[0].tolist() == passes


def test_flops_agree_with_torch(toggle):
    if 'halting' in toggle: toggle = {**toggle, 'halt_tau': 0.0}  # counted as if nobody halts
    model = GPT(GPTConfig(**{**dict(vocab_size=256, block_size=128, n_layer=3, n_head=4, n_embd=128, mlp_hidden=256), **toggle}))
    idx = torch.randint(0, 256, (2, 128))
    for training in (False, True):
        # the math backend is the one whose matmuls torch counts on a CPU
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            loss = model(idx, targets(idx))[1] if training else model(idx)[0]
            if training: loss.backward()
        assert counter.get_total_flops() / idx.numel() == pytest.approx(model.flops_per_token(None, training, model.config.jacobi_iters), rel=0.03)


@pytest.mark.parametrize('toggle', [name for name in ONE_EACH if 'halting' not in TOGGLES[name]])
def test_a_device_is_not_waited_for(toggle):
    """On the meta device, which has no numbers: to read one is an error there, and so is to mix devices."""
    model, idx = make(**TOGGLES[toggle]).to('meta'), torch.zeros(3, 7, dtype=torch.long, device='meta')
    assert model.hidden(idx, jacobi=1).shape == (3, 7, 32)
    if model.config.ponder in ('none', 'embedding', 'loop', 'pause'):  # chain's cache counts slots, latent's prompt takes seconds here
        assert model.generate(idx, 3, temperature=0).shape == (3, 10)


def test_gradients_agree_with_finite_differences(toggle, idx):
    """Nothing is detached on the way: keys and values of earlier passes, sources, gates and biases all pass gradients on."""
    # the router's term of the loss takes a probability for a constant, which moving weights does not; the others' counts here
    weight = {} if 'halting' not in toggle else dict(halt_lambda=0.0) if toggle['halting'] == 'router' else dict(halt_lambda=5.0, halt_share=0.5)
    model = make(**{**toggle, **({'jacobi_iters': 2} if 'latent' == toggle.get('ponder') else {}), **weight}).train()
    params, generator = list(model.parameters()), torch.Generator().manual_seed(3)
    ways = [torch.randn(p.shape, generator=generator, dtype=p.dtype) * p.detach().abs().mean() for p in params]
    slope = sum((grad * way).sum() for grad, way in zip(gradients(model, idx)[1:], ways)).item()

    def moved(by):
        with torch.no_grad():
            for p, way in zip(params, ways): p += by * way
            loss = model(idx, targets(idx))[1].item()
            for p, way in zip(params, ways): p -= by * way
        return loss

    assert slope == pytest.approx((moved(1e-6) - moved(-1e-6)) / 2e-6, rel=1e-4) and abs(slope) > 1e-3


def gradients(model, idx, autocast=None):
    model.zero_grad()
    with torch.autocast('cpu', autocast or torch.bfloat16, enabled=autocast is not None):
        loss = model(idx, targets(idx))[1]
    loss.backward()
    return [loss.detach()] + [p.grad.clone() for p in model.parameters()]


def test_activation_checkpointing_changes_nothing(toggle, idx):
    model = make(**{**toggle, **({'jacobi_iters': 2} if 'latent' == toggle.get('ponder') else {})}).train()
    calls = []
    model.h[0].register_forward_pre_hook(lambda *_: calls.append(1))
    want = gradients(model, idx)
    plain_calls = len(calls)
    model.checkpoint_activations = True
    got = gradients(model, idx)
    assert len(calls) == 3 * plain_calls, "a pass was not recomputed"
    for a, b in zip(got, want): close(a, b, 1e-12)


@pytest.mark.parametrize('name', ONE_EACH)
def test_compiled_blocks_change_nothing(name, idx, monkeypatch):
    toggle = TOGGLES[name]
    layers = 3 if 'depth_attn' in toggle else 2
    model = make(**{**toggle, 'n_layer': layers, **({'jacobi_iters': 2} if 'latent' == toggle.get('ponder') else {})})
    want = gradients(model, idx)
    torch._dynamo.reset()  # forget what other tests compiled
    # this backend traces and differentiates as on a GPU, but needs no compiler
    compile, whole = torch.nn.Module.compile, toggle.get('ponder') != 'chain' and toggle.get('halting') != 'gate'
    monkeypatch.setattr(torch.nn.Module, 'compile', lambda block, **how: compile(block, backend='aot_eager', fullgraph=whole, **how))
    with torch._dynamo.config.patch(recompile_limit=128, optimize_ddp=True):  # compile_blocks sets both, for all that follows
        compile_blocks(model)
        for a, b in zip(gradients(model, idx), want): close(a, b, 1e-12)


def test_bf16_autocast_stays_close(toggle, idx):
    if 'ponder_topk' in toggle: toggle = {**toggle, 'ponder_topk': 50}  # which tokens are the likeliest may change: keep all
    model = make(**{**toggle, 'init_std': 0.05}).float()
    want, got = gradients(model, idx), gradients(model, idx, torch.bfloat16)
    assert got[0] == pytest.approx(want[0].item(), rel=0.01)
    for a, b in zip(got[1:], want[1:]):
        assert a.isfinite().all() and torch.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.99


def test_same_result_twice_and_rows_are_independent(toggle, idx):
    model = make(**toggle)
    full = model(idx)[0]
    assert torch.equal(full, model(idx)[0])
    close(model(idx[1:2])[0], full[1:2])


OWN_PARAMETERS = {'pause': {'pause': (32,)}, 'mask': {'router.weight': (2, 32), 'router.bias': (2,)},
                  'mask2': {'router.weight': (3, 32), 'router.bias': (3,)}, 'router': {'router.weight': (1, 32), 'router.bias': (1,)},
                  'gate': {f'gates.{i}.{name}': shape for i in range(2) for name, shape in
                           {'0.weight': (128, 32), '0.bias': (128,), '2.weight': (1, 128), '2.bias': (1,)}.items()}}


@pytest.mark.parametrize('name', TOGGLES)
def test_a_toggle_adds_no_parameters_but_its_own(name):
    settings = {k: v for k, v in TOGGLES[name].items() if k in ('n_kv_head', 'tie_embeddings', 'qk_norm')}
    plain, own = make(**settings, n_layer=3).state_dict(), make(**{**TOGGLES[name], 'n_layer': 3}).state_dict()
    want = {**{k: v.shape for k, v in plain.items()}, **OWN_PARAMETERS.get(name.removesuffix('_depth'), {})}
    assert {k: v.shape for k, v in own.items()} == want


@pytest.mark.parametrize('ponder, halting', [*((ponder, 'none') for ponder in PONDER if ponder != 'none'),
                                             ('embedding', 'gate'), ('latent', 'mask'), ('chain', 'router')])
@pytest.mark.parametrize('depth_attn', [False, True])
def test_no_steps_is_the_plain_gpt_bit_for_bit(ponder, halting, depth_attn, idx):
    model = make(ponder=ponder, halting=halting, ponder_steps=0, depth_attn=depth_attn, n_layer=3)
    plain = make(embed_scale=model.config.embed_scale, depth_attn=depth_attn, n_layer=3)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(idx)[0], plain(idx)[0])
    assert model.flops_per_token() == plain.flops_per_token()
    for prompts in idx[:, :5], [[3, 1, 4], [1], [5, 9]]:
        for row, want in zip(model.generate(prompts, 30, temperature=0), plain.generate(prompts, 30, temperature=0)):
            assert torch.equal(row, want)
    loss = model.train()(idx, targets(idx))[1]
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
