"""The promises every toggle keeps; each test runs once per toggle."""
import math

import naive
import pytest
import torch
from conftest import TOGGLES, make
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from model import GPT, GPTConfig, KVCache


def close(a, b, tol=1e-10):
    """Equal up to tol where finite, and infinite at the same places."""
    assert torch.equal(a.isfinite(), b.isfinite())
    assert (a - b)[a.isfinite()].abs().max() < tol


def differ(a, b, by=1e-4):
    assert (a - b)[a.isfinite()].abs().max() > by


def targets(idx):
    return torch.roll(idx, -1, 1)


def test_initial_loss_and_gradients(toggle):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**dict(vocab_size=320, n_tokens=257, block_size=64, n_layer=5, n_head=4, n_embd=64, mlp_hidden=128), **toggle}))
    idx = torch.randint(0, 257, (16, 64))
    loss = model(idx, torch.randint(0, 257, (16, 64)))[1]
    assert abs(loss.item() / math.log(257) - 1) < 0.05
    loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().sum() > 0, name


def test_causality(toggle, idx):
    model = make(**toggle)
    before = model(idx)[0]
    for t in (0, 5, 12):
        changed = idx.clone()
        changed[:, t] = (changed[:, t] + 1) % 50
        after = model(changed)[0]
        assert torch.equal(before[:, :t], after[:, :t])
        differ(before[:, t], after[:, t])


def test_cached_equals_full_for_every_split(toggle, idx):
    model = make(**toggle)
    full = model(idx)[0]
    T = idx.size(1)
    for split in [[n, T - n] for n in range(1, T)] + [[1] * T, [5, 3, 1, 4]]:
        cache, parts = KVCache(model.config.n_layer, T), []
        for n in split:
            start = cache.length
            h = model.trunk(model.embed(idx[:, start:start + n]), torch.arange(start, start + n), cache)
            parts.append(model.head(h))
        close(torch.cat(parts, 1), full)
        assert cache.length == T


def test_batch_of_unequal_prompts_equals_each_alone(toggle):
    model = make(**toggle)
    prompts = [[3, 1, 4, 1, 5, 9], [2], [7, 1, 8]]
    together = model.generate(prompts, 10, temperature=0)
    for prompt, row in zip(prompts, together):
        assert row.tolist() == model.generate(torch.tensor([prompt]), 10, temperature=0)[0].tolist()
        assert row[:len(prompt)].tolist() == prompt
    # the tokens could agree by luck: compare the logits behind a left-padded prefill and one decoding step
    tokens, start = model._left_pad(prompts, 'cpu')
    cache = KVCache(model.config.n_layer, 8, start)
    model.trunk(model.embed(tokens), torch.arange(6), cache)
    step = model.head(model.trunk(model.embed(torch.tensor([[11]] * 3)), torch.tensor([6]), cache))
    for i, prompt in enumerate(prompts):
        close(step[i, 0], model(torch.tensor([prompt + [11]]))[0][0, -1])


def test_equals_the_naive_loop(toggle):
    model = make(**toggle)
    tokens = [3, 14, 15, 9, 26, 5, 35]
    close(model(torch.tensor([tokens]))[0][0], naive.logits(model, tokens))


def test_flops_agree_with_torch(toggle):
    model = GPT(GPTConfig(**{**dict(vocab_size=256, block_size=128, n_layer=3, n_head=4, n_embd=128, mlp_hidden=256), **toggle}))
    idx = torch.randint(0, 256, (2, 128))
    for training in (False, True):
        # the math backend is the one whose matmuls torch counts on a CPU
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            loss = model(idx, targets(idx))[1] if training else model(idx)[0]
            if training: loss.backward()
        assert counter.get_total_flops() / idx.numel() == pytest.approx(model.flops_per_token(training=training), rel=0.03)


def gradients(model, idx, autocast=None):
    model.zero_grad()
    with torch.autocast('cpu', autocast or torch.bfloat16, enabled=autocast is not None):
        loss = model(idx, targets(idx))[1]
    loss.backward()
    return [loss.detach()] + [p.grad.clone() for p in model.parameters()]


def test_activation_checkpointing_changes_nothing(toggle, idx):
    model = make(**toggle).train()
    want = gradients(model, idx)
    calls = []
    model.h[0].register_forward_pre_hook(lambda *_: calls.append(1))
    model.checkpoint_activations = True
    got = gradients(model, idx)
    assert len(calls) == 2, "the block was not recomputed"
    for a, b in zip(got, want): close(a, b, 1e-12)


def test_compiled_blocks_change_nothing(toggle, idx):
    model = make(**toggle)
    want = gradients(model, idx)
    torch._dynamo.reset()  # what other tests compiled counts against the limit of variants
    # this backend traces and differentiates as on a GPU, but needs no compiler
    for block in model.h: block.compile(backend='aot_eager', fullgraph=True)
    for a, b in zip(gradients(model, idx), want): close(a, b, 1e-12)


def test_bf16_autocast_stays_close(toggle, idx):
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


def test_no_toggle_adds_a_parameter():
    """True for all toggles so far; one that has parameters of its own names them here."""
    plain = make().state_dict()
    for name in ('depth', 'depth_uniform'):
        own = make(**{**TOGGLES[name], 'qk_norm': True}).state_dict()
        assert {k: v.shape for k, v in own.items()} == {k: v.shape for k, v in plain.items()}
