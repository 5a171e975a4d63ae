"""
exercises/labs/innovator.py: what splitting, routing and each stage promise.
"""
import copy
import re

import pytest
import torch
import torch.nn.functional as F
from conftest import close, make, save

import innovator as lab
from engine.files import UserError

G = 4
TINY = dict(vocab_size=320, n_tokens=257, block_size=16, n_layer=2)
C, f, L = 32, 48, 2  # of `make`


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def base():
    return make(**TINY)


@pytest.fixture
def mixture(base):
    torch.manual_seed(3)
    return lab.upcycle(base, [make(seed, **TINY) for seed in (1, 2)], G)


@pytest.fixture
def rows():
    return torch.randint(0, 257, (2, 17), generator=seeded(6))


def opened(model, a=0.5):
    for mixture in lab.mixtures(model):
        mixture.a.data.fill_(a)
    return model


def test_it_starts_as_the_dense_model_and_opens_to_whole_specialists(base, mixture, rows):
    """At first the gates are shut; then tied router rows pick all shards of one domain, with 1."""
    assert torch.equal(mixture(rows[:, 1:])[0], base(rows[:, 1:])[0])
    moe = opened(mixture, 1.0).h[0].mlp
    x = torch.randn(2, 9, C, dtype=torch.float64, generator=seeded(4))
    specialists = [make(seed, **TINY).h[0].mlp(x) for seed in (1, 2)]
    wins = (moe.router(x)[..., 0] < moe.router(x)[..., G])[..., None]
    close(moe(x) - moe.shared(x), torch.where(wins, specialists[1], specialists[0]))


def test_the_mixture_is_a_sum_over_the_k_largest(mixture):
    """Straight from the equations, one token at a time."""
    moe = opened(mixture, 0.7).h[0].mlp
    torch.nn.init.normal_(moe.router.weight, generator=seeded(5))
    x = torch.randn(2, 9, C, dtype=torch.float64, generator=seeded(4))
    got = moe(x)
    for b, t in ((0, 0), (0, 8), (1, 5)):
        r = moe.router.weight @ x[b, t]
        chosen = sorted(range(2 * G), key=lambda e: -r[e])[:G]
        total = sum(r[e].exp() for e in chosen)
        y = moe.shared(x[b, t])
        for e in chosen:
            gate, up = (moe.fc[e] @ x[b, t]).chunk(2)
            y = y + 0.7 * (G * r[e].exp() / total) * (moe.proj[e] @ (F.silu(gate) * up))
        close(got[b, t], y)


def test_the_balance_term_is_1_when_even_and_n_over_k_when_collapsed():
    N, K = 8, 4
    even = torch.full((2, N), -50.0)
    even[0, :K] = 0.0
    even[1, K:] = 0.0
    assert lab.balance(even, K).item() == pytest.approx(1)
    assert lab.balance(even[:1], K).item() == pytest.approx(N / K)


def test_while_the_gates_are_shut_the_balance_alone_teaches_the_router(base, mixture, rows):
    def gradients(alpha):
        weights = [block.mlp.router.weight for block in mixture.h]
        return torch.autograd.grad(lab.objective(mixture, rows, alpha), weights)

    assert not any(gradient.any() for gradient in gradients(0.0))
    assert all(gradient.any() for gradient in gradients(1e-3))
    opened(mixture)
    for gradient in gradients(0.0):
        assert not torch.allclose(gradient[0], gradient[1])     # shards, tied so far, part
    assert lab.objective(base, rows, 0.3).item() == lab.text_loss(base, rows).item()


def test_parameters_and_flops_are_those_of_the_active_experts(base, mixture):
    total, active = lab.sizes(mixture)
    assert total == sum(p.numel() for p in mixture.parameters())
    router, shards = 2 * G * C + 1, G * (3 * C * f // G)        # and an `a` in each layer
    assert active == base.num_params() + L * (router + shards)
    idx = torch.randint(0, 257, (1, 16))
    dense, mixed = [lab.flops(lambda: model(idx)) / 16 for model in (base, mixture)]
    assert mixed - dense == 2 * L * (router - 1 + shards)       # not all N


def differ(before, after):
    """Names of the tensors of a state dict that are not those of `before`."""
    return {name for name, p in after.items() if not torch.equal(p, before[name])}


def test_each_stage_changes_what_it_should_and_nothing_else(base):
    """And costs more than the one before; each dense model has as many steps as all stages."""
    data = {name: torch.randint(0, 257, (40, 17), generator=seeded(i))
            for i, name in enumerate(('own text', 'C++', 'Unicode'))}
    settings = lab.InnovatorSettings(induce_steps=2, route_steps=2, joint_steps=3, batch_size=4)
    weights, cost = {}, {}
    for name, model, spent in lab.stages(base, data, settings, seeded(0)):
        weights[name], cost[name] = copy.deepcopy(model.state_dict()), spent
    start = make(**TINY).state_dict()
    assert not differ(start, base.state_dict())

    ffns = {f'h.{layer}.mlp.{w}.weight' for layer in range(L) for w in ('c_fc', 'c_proj')}
    assert differ(start, weights['1  specialist, C++']) == ffns
    assert differ(start, weights['1  specialist, Unicode']) == ffns
    routers = {f'h.{layer}.mlp.{w}' for layer in range(L) for w in ('a', 'router.weight')}
    before = weights['   mixture, a = 0.5']
    assert differ(before, weights['3  router trained']) == routers
    before = weights['3  router trained']
    assert differ(before, weights['4  all trained']) == set(before)
    assert differ(start, weights['dense, the same rows']) == set(start)

    assert cost['2  mixture, a = 0'] == 2 * cost['1  specialist, C++'] < cost['3  router trained']
    assert cost['dense, the same rows'] == cost['dense, new domains only']
    # 9 dense steps, 2 of the specialist, whose frozen parts cost no gradients of weights
    assert 0 < cost['1  specialist, C++'] / 2 < cost['dense, the same rows'] / 9


def test_the_program(tmp_path, small_data, capsys):
    folder = save(tmp_path / 'ckpt', make(**TINY), data_dir=small_data)
    fast = ['--induce_steps=1', '--route_steps=1', '--joint_steps=1', '--batch_size=4']
    lab.main([folder, *fast])
    out = capsys.readouterr().out
    losses = dict(re.findall(r'^\| (\S+).*?\| +((?:\d\.\d{3} \| +){3})', out, re.M))
    assert losses['the'] == losses['2'] != losses['4']
    assert 'load of the busiest expert' in out
    with pytest.raises(UserError, match='shards=5 does not divide .*mlp_hidden=48'):
        lab.main([folder, '--shards=5'])
