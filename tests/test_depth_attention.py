"""Depth-Attention: the invariants of the paper, and wrong variants that must be told apart."""
import math

import naive
import pytest
import torch
from conftest import close, make
from test_promises import differ

from engine.memory import KVCache
from model import GPTConfig, apply_rope, depth_attention, rope_table

DEPTH = dict(depth_attn=True)


def heads(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


either = pytest.mark.parametrize('T', [1, 5])  # one slot is computed in another way than several


def bank(n, nkv=2, T=5, hd=8):
    return [(heads(2, nkv, T, hd, seed=2 * j + 1), heads(2, nkv, T, hd, seed=2 * j + 2)) for j in range(n)]


def copy_weights(source, **settings):
    """A model with the same weights and other settings."""
    model = make(**settings)
    model.load_state_dict(source.state_dict())
    return model


@pytest.mark.parametrize('wrong', [dict(anchors='raw'), dict(stride='relative'), dict(cache='raw')])
def test_wrong_variants_differ(wrong):
    model = make(n_layer=6, **DEPTH)
    tokens = [3, 14, 15, 9, 26]
    right = model(torch.tensor([tokens]))[0][0]
    close(naive.logits(model, tokens), right)
    differ(naive.logits(model, tokens, **wrong), right)


def test_vanilla_weights_load_and_layer_0_is_untouched(idx):
    plain = make()
    deep = copy_weights(plain, **DEPTH)
    seen = {}
    for model in (plain, deep):
        for layer in (0, 1): model.h[layer].register_forward_hook(lambda m, i, out, key=(model is deep, layer): seen.update({key: out[0]}))
        model(idx)
    assert torch.equal(seen[False, 0], seen[True, 0])
    differ(seen[False, 1], seen[True, 1])


def test_one_layer_is_the_plain_gpt_bit_for_bit(idx):
    plain = make(n_layer=1)
    assert torch.equal(copy_weights(plain, n_layer=1, **DEPTH)(idx)[0], plain(idx)[0])


def test_a_huge_own_score_gives_the_plain_values():
    sources, k, v = bank(2), heads(2, 2, 5, 8, seed=20), heads(2, 2, 5, 8, seed=21)
    close(depth_attention(1e4 * k, k, v, [(-k, s[1]) for s in sources]), v, 1e-12)


def test_zero_query_has_a_closed_form(idx):
    """Uniform weights with L = 6, s = 3: tells mixed from raw anchors and absolute from relative strides."""
    model = make(n_layer=6, depth_stride=3, **DEPTH)
    for block in model.h: torch.nn.init.zeros_(block.attn.q_norm.weight)
    raw = []
    for block in model.h:
        block.attn.c_attn.register_forward_hook(lambda m, i, out: raw.append(out[..., -32:].view(3, 13, 4, 8).transpose(1, 2)))
    cache = KVCache(6, 13)
    model.trunk(model.embed(idx), torch.arange(13), cache)
    v0, m3 = raw[0], (raw[0] + raw[3]) / 2
    want = [v0, (v0 + raw[1]) / 2, (v0 + raw[2]) / 2, m3, (v0 + m3 + raw[4]) / 3, (v0 + m3 + raw[5]) / 3]
    for layer in range(6): close(cache.v[layer], want[layer], 1e-12)


def test_the_cache_has_mixed_values_and_not_one_byte_more(idx):
    plain = make()
    deep = copy_weights(plain, **DEPTH)
    caches = []
    for model in (plain, deep):
        caches.append(KVCache(5, 13))
        model.trunk(model.embed(idx), torch.arange(13), caches[-1])
    assert caches[0].bytes() == caches[1].bytes() == 2 * 5 * 3 * 4 * 13 * 8 * 8
    assert torch.equal(caches[0].v[0], caches[1].v[0])
    differ(caches[0].v[1], caches[1].v[1])


def test_one_token_reads_its_query():
    """With one token sequence attention is the identity, so only Depth-Attention can make W_q matter."""
    for layer, matters in ((0, False), (1, True), (4, True)):
        model = make(**DEPTH)
        before = model(torch.tensor([[7]]))[0]
        with torch.no_grad(): model.h[layer].attn.c_attn.weight[:32].mul_(-1)
        assert torch.equal(before, model(torch.tensor([[7]]))[0]) != matters


@pytest.mark.parametrize('L, s, total', [(48, 24, 117), (24, 12, 57), (32, 16, 77), (12, 6, 27), (48, 1, 1175)])
def test_schedule_has_the_papers_number_of_sources(L, s, total):
    """Counts the sources each layer is really given, its own entry included; 117 is in the paper's appendix B.2."""
    model = make(n_layer=L, n_embd=8, n_head=1, mlp_hidden=8, depth_stride=None if s == L // 2 else s, **DEPTH)
    counts = []
    for block in model.h: block.register_forward_pre_hook(lambda m, args: counts.append(len(args[2])))
    model(torch.tensor([[1, 2]]))
    assert sum(n + 1 for n in counts if n) == total
    assert counts[0] == 0 and counts[s] == 1 and counts[s + 1] == 2


def test_mix_is_convex():
    sources, q, k, v = bank(2), heads(2, 2, 5, 8, seed=30), heads(2, 2, 5, 8, seed=31), heads(2, 2, 5, 8, seed=32)
    mixed = depth_attention(q, k, v, sources)
    values = torch.stack([s[1] for s in sources] + [v])
    assert (mixed <= values.amax(0) + 1e-12).all() and (mixed >= values.amin(0) - 1e-12).all()
    ones = depth_attention(q, k, torch.ones_like(v), [(s[0], torch.ones_like(v)) for s in sources])
    close(ones, torch.ones_like(v), 1e-12)


@either
def test_equals_a_stacked_reference_with_grouped_queries(T):
    sources, q, k, v = bank(3, T=T), heads(2, 6, T, 8, seed=40), heads(2, 2, T, 8, seed=41), heads(2, 2, T, 8, seed=42)
    K, V = torch.stack([s[0] for s in sources] + [k]), torch.stack([s[1] for s in sources] + [v])
    qbar = torch.stack([q[:, :3].mean(1), q[:, 3:].mean(1)], 1)
    weights = torch.einsum('bhtd,jbhtd->jbht', qbar, K).div(math.sqrt(8)).softmax(0)
    close(depth_attention(q, k, v, sources), torch.einsum('jbht,jbhtd->bhtd', weights, V), 1e-12)


def test_local_in_position_and_head():
    sources, q, k, v = bank(2), heads(2, 4, 5, 8, seed=50), heads(2, 2, 5, 8, seed=51), heads(2, 2, 5, 8, seed=52)
    whole = depth_attention(q, k, v, sources)
    part = depth_attention(q[:, 2:, 1:4], k[:, 1:, 1:4], v[:, 1:, 1:4], [(a[:, 1:, 1:4], b[:, 1:, 1:4]) for a, b in sources])
    close(whole[:, 1:, 1:4], part, 1e-12)


def test_rotation_cancels(idx):
    sources, q, k, v = bank(2), heads(2, 4, 5, 8, seed=60), heads(2, 2, 5, 8, seed=61), heads(2, 2, 5, 8, seed=62)
    turn = lambda x: apply_rope(x.transpose(1, 2), *rope_table(torch.arange(5), 8, 1e4, torch.float64)).transpose(1, 2)
    close(depth_attention(turn(q), turn(k), v, [(turn(a), b) for a, b in sources]), depth_attention(q, k, v, sources), 1e-12)
    model = make(**DEPTH)
    close(model.trunk(model.embed(idx), torch.arange(13)), model.trunk(model.embed(idx), torch.arange(13) + 100), 1e-9)


@either
def test_gradients_are_right(T):
    arguments = [heads(1, 2, T, 4, seed=70), heads(1, 1, T, 4, seed=71), heads(1, 1, T, 4, seed=72), *(x[:1, :1, :, :4] for s in bank(2, T=T) for x in s)]
    for x in arguments: x.requires_grad_()
    assert torch.autograd.gradcheck(lambda q, k, v, *s: depth_attention(q, k, v, [s[:2], s[2:]]), arguments)


def test_gradients_reach_layer_0(idx):
    # only the last layer's attention output is read, so layer 0's values matter to it through depth as well
    model = make(n_layer=2, depth_stride=1, **DEPTH)
    new = {}
    model.h[1].register_forward_hook(lambda m, i, out: new.update(v=out[1][1]))
    model(idx)
    new['v'].sum().backward()
    assert model.h[0].attn.c_attn.weight.grad[-64:].abs().sum(1).gt(0).all()  # rows of W_k and W_v


@either
def test_softmax_is_fp32_in_half_precision(T):
    """Scores of 60 and 61 are the same number in bf16 after scaling; their weights must not be."""
    q = torch.full((1, 1, T, 4), 1.0)
    k, source = torch.full((1, 1, T, 4), 30.5), torch.full((1, 1, T, 4), 30.0)
    v, other = torch.ones(1, 1, T, 4), torch.zeros(1, 1, T, 4)
    mixed = depth_attention(*(x.bfloat16() for x in (q, k, v)), [(source.bfloat16(), other.bfloat16())])
    assert mixed.float().mean().item() == pytest.approx(1 / (1 + math.exp(-1)), abs=0.01)


@either
def test_scores_are_summed_in_fp32_in_half_precision(T):
    """Sums of 257 and 256 are the same number in bf16."""
    q, source, v = torch.ones(1, 1, T, 64), torch.full((1, 1, T, 64), 4.0), torch.ones(1, 1, T, 64)
    own = torch.where(torch.arange(64) == 7, 5.0, source)
    mixed = depth_attention(*(x.bfloat16() for x in (q, own, v)), [(source.bfloat16(), torch.zeros(1, 1, T, 64).bfloat16())])
    assert (mixed == torch.tensor(1 / 8).sigmoid().bfloat16()).all()


def test_uniform_mode_is_a_plain_average():
    sources, q, k, v = bank(2), heads(2, 2, 5, 8, seed=80), heads(2, 2, 5, 8, seed=81), heads(2, 2, 5, 8, seed=82)
    close(depth_attention(q, k, v, sources, 'uniform'), (sources[0][1] + sources[1][1] + v) / 3, 1e-12)


def test_default_stride():
    assert [GPTConfig(n_layer=L, depth_attn=True).depth_stride for L in (1, 2, 7, 24)] == [1, 1, 3, 12]
