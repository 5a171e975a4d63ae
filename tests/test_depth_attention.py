"""Depth-Attention: the invariants of the paper, and wrong variants that must be told apart."""

import math

import naive
import pytest
import torch
from conftest import close, make
from test_promises import differ

import model as library
from model import GPTConfig, apply_rope, depth_attention, rope_table

DEPTH = dict(depth_attn=True)


def heads(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def own(nh=2, seed=0):
    """q (2,nh,5,8), k and v (2,2,5,8) of a layer."""
    q = heads(2, nh, 5, 8, seed=seed)
    k = heads(2, 2, 5, 8, seed=seed + 1)
    v = heads(2, 2, 5, 8, seed=seed + 2)
    return q, k, v


def bank(n):
    """(keys, values) of n sources."""
    sources = []
    for j in range(n):
        keys = heads(2, 2, 5, 8, seed=2 * j + 1)
        values = heads(2, 2, 5, 8, seed=2 * j + 2)
        sources.append((keys, values))
    return sources


def copy_weights(source, **settings):
    """A model with the same weights and other settings."""
    model = make(**settings)
    model.load_state_dict(source.state_dict())
    return model


def read_into_a_cache(model, idx):
    cache = model.new_memory(13)
    model.hidden(idx, cache)
    return cache


@pytest.mark.parametrize('wrong', [dict(anchors='raw'), dict(stride='relative'), dict(cache='raw')])
def test_wrong_variants_differ(wrong):
    model = make(n_layer=6, **DEPTH)
    tokens = [3, 14, 15, 9, 26]
    right = model(torch.tensor([tokens]))[0][0]
    close(naive.logits(model, tokens), right)
    differ(naive.logits(model, tokens, **wrong), right)


def outputs(model, idx):
    """What comes out of each block."""
    outputs = []
    for block in model.h:
        block.register_forward_hook(lambda module, args, out: outputs.append(out))
    model(idx)
    return outputs


def test_vanilla_weights_load_and_layer_0_is_untouched(idx):
    plain = make()
    deep = copy_weights(plain, **DEPTH)
    of_plain, of_deep = outputs(plain, idx), outputs(deep, idx)
    assert torch.equal(of_plain[0], of_deep[0])
    differ(of_plain[1], of_deep[1])


def test_one_layer_is_the_plain_gpt_bit_for_bit(idx):
    plain = make(n_layer=1)
    deep = copy_weights(plain, n_layer=1, **DEPTH)
    assert torch.equal(deep(idx)[0], plain(idx)[0])


def test_a_huge_own_score_gives_the_plain_values():
    k, v = heads(2, 2, 5, 8, seed=20), heads(2, 2, 5, 8, seed=21)
    sources = [(-k, values) for _, values in bank(2)]
    close(depth_attention(1e4 * k, k, v, sources), v, 1e-12)


def test_zero_query_has_a_closed_form(idx):
    """Uniform weights with L = 6, s = 3: tells mixed from raw anchors, absolute from relative."""
    model = make(n_layer=6, depth_stride=3, **DEPTH)
    raw = []  # values of each layer

    def keep_values(module, args, out):
        raw.append(out[..., -32:].view(3, 13, 4, 8).transpose(1, 2))

    for block in model.h:
        torch.nn.init.zeros_(block.attn.q_norm.weight)
        block.attn.c_attn.register_forward_hook(keep_values)
    cache = read_into_a_cache(model, idx)
    v0 = raw[0]
    m3 = (raw[0] + raw[3]) / 2
    want = [
        v0,
        (v0 + raw[1]) / 2,
        (v0 + raw[2]) / 2,
        m3,
        (v0 + m3 + raw[4]) / 3,
        (v0 + m3 + raw[5]) / 3,
    ]
    for layer in range(6):
        close(cache.values[layer], want[layer], 1e-12)


def test_the_cache_has_mixed_values_and_not_one_byte_more(idx):
    plain = make()
    deep = copy_weights(plain, **DEPTH)
    of_plain, of_deep = read_into_a_cache(plain, idx), read_into_a_cache(deep, idx)
    assert of_plain.bytes() == of_deep.bytes() == 2 * 5 * 3 * 4 * 13 * 8 * 8
    assert torch.equal(of_plain.values[0], of_deep.values[0])
    differ(of_plain.values[1], of_deep.values[1])


@pytest.mark.parametrize('layer, matters', [(0, False), (1, True), (4, True)])
def test_one_token_reads_its_query(layer, matters):
    """
    With one token sequence attention is the identity, so only Depth-Attention can make W_q matter.
    """
    model = make(**DEPTH)
    before = model(torch.tensor([[7]]))[0]
    with torch.no_grad():
        model.h[layer].attn.c_attn.weight[:32].mul_(-1)
    assert torch.equal(before, model(torch.tensor([[7]]))[0]) != matters


@pytest.mark.parametrize('L, s, total', [
    (48, 24, 117),
    (48, 1, 1175),
])
def test_schedule_has_the_papers_number_of_sources(L, s, total, monkeypatch):
    """
    Counts the sources each layer is really given, its own entry included; 117 is in the paper's
    appendix B.2.
    """
    stride = None if s == L // 2 else s  # None: the default
    model = make(n_layer=L, n_embd=8, n_head=1, mlp_hidden=8, depth_stride=stride, **DEPTH)
    counts = []

    def watched(q, k, v, sources, mode):
        counts.append(len(sources))
        return depth_attention(q, k, v, sources, mode)

    monkeypatch.setattr(library, 'depth_attention', watched)
    model(torch.tensor([[1, 2]]))
    assert sum(n + 1 for n in counts if n > 0) == total
    assert counts[0] == 0 and counts[s] == 1 and counts[s + 1] == 2


def test_mix_is_convex():
    sources, (q, k, v) = bank(2), own(seed=30)
    mixed = depth_attention(q, k, v, sources)
    values = torch.stack([values for _, values in sources] + [v])
    assert (mixed <= values.amax(0) + 1e-12).all()
    assert (mixed >= values.amin(0) - 1e-12).all()
    one = torch.ones_like(v)
    close(depth_attention(q, k, one, [(keys, one) for keys, _ in sources]), one, 1e-12)


def test_equals_a_stacked_reference_with_grouped_queries():
    sources, (q, k, v) = bank(3), own(nh=6, seed=40)
    keys = torch.stack([keys for keys, _ in sources] + [k])             # (sources, B, nkv, T, hd)
    values = torch.stack([values for _, values in sources] + [v])
    query = torch.stack([q[:, :3].mean(1), q[:, 3:].mean(1)], dim=1)    # (B, nkv, T, hd)
    scores = torch.einsum('bhtd,jbhtd->jbht', query, keys) / math.sqrt(8)
    want = torch.einsum('jbht,jbhtd->bhtd', scores.softmax(0), values)
    close(depth_attention(q, k, v, sources), want, 1e-12)


def test_local_in_position_and_head():
    sources, (q, k, v) = bank(2), own(nh=4, seed=50)
    whole = depth_attention(q, k, v, sources)
    some = (slice(None), slice(1, None), slice(1, 4))  # the second key head at positions 1 to 3
    some_sources = [(keys[some], values[some]) for keys, values in sources]
    part = depth_attention(q[:, 2:, 1:4], k[some], v[some], some_sources)
    close(whole[some], part, 1e-12)


def turn(x):
    """x (B,heads,T,8) rotated by its positions."""
    cos, sin = rope_table(torch.arange(x.size(2)), 8, 1e4, torch.float64)
    return apply_rope(x.transpose(1, 2), cos, sin).transpose(1, 2)


def test_rotation_cancels(idx):
    sources, (q, k, v) = bank(2), own(nh=4, seed=60)
    turned = [(turn(keys), values) for keys, values in sources]
    close(depth_attention(turn(q), turn(k), v, turned), depth_attention(q, k, v, sources), 1e-12)

    model = make(**DEPTH)
    x, pos = model.embed(idx), torch.arange(13)
    close(model.trunk(x, pos), model.trunk(x, pos + 100), 1e-9)


def with_two_sources(q, k, v, k_0, v_0, k_1, v_1):
    return depth_attention(q, k, v, [(k_0, v_0), (k_1, v_1)])


def test_gradients_are_right():
    arguments = [heads(1, 2, 5, 4, seed=70), heads(1, 1, 5, 4, seed=71), heads(1, 1, 5, 4, seed=72)]
    for keys, values in bank(2):
        arguments += [keys[:1, :1, :, :4], values[:1, :1, :, :4]]
    for x in arguments:
        x.requires_grad_()
    assert torch.autograd.gradcheck(with_two_sources, arguments)


def test_softmax_is_fp32_in_half_precision():
    """Scores of 60 and 61 are the same number in bf16 after scaling; their weights must not be."""
    q = torch.full((1, 1, 5, 4), 1.0).bfloat16()
    k = torch.full((1, 1, 5, 4), 30.5).bfloat16()
    k_0 = torch.full((1, 1, 5, 4), 30.0).bfloat16()
    v = torch.ones(1, 1, 5, 4).bfloat16()
    mixed = depth_attention(q, k, v, [(k_0, torch.zeros_like(v))])
    assert mixed.float().mean().item() == pytest.approx(1 / (1 + math.exp(-1)), abs=0.01)


def test_scores_are_summed_in_fp32_in_half_precision():
    """Sums of 257 and 256 are the same number in bf16."""
    q = v = torch.ones(1, 1, 5, 64).bfloat16()
    k_0 = torch.full((1, 1, 5, 64), 4.0).bfloat16()
    k = k_0.clone()
    k[..., 7] = 5.0
    mixed = depth_attention(q, k, v, [(k_0, torch.zeros_like(v))])
    assert (mixed == torch.tensor(1 / 8).sigmoid().bfloat16()).all()


def test_uniform_mode_is_a_plain_average():
    sources, (q, k, v) = bank(2), own(seed=80)
    average = (sources[0][1] + sources[1][1] + v) / 3
    close(depth_attention(q, k, v, sources, 'uniform'), average, 1e-12)


@pytest.mark.parametrize('L, stride', [(1, 1), (7, 3)])
def test_default_stride(L, stride):
    assert GPTConfig(n_layer=L, **DEPTH).depth_stride == stride
