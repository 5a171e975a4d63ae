"""
Depth-Attention and pondering: wrong readings of the papers, and what the promises do not say:
Jacobi iterations that are too few, prompts that are read exactly, steps that change.
"""

import math

import naive
import pytest
import torch
from conftest import close, make
from test_halting import MODES
from test_promises import differ

from engine.generate import generate, left_pad
from model import Memory, depth_attention, depth_sources

TOKENS = [3, 14, 15, 9, 26]
DEPTH = dict(depth_attn=True, n_layer=6)


@pytest.mark.parametrize('settings, wrong', [
    (DEPTH, dict(anchors='raw')),
    (DEPTH, dict(stride='relative')),
    (DEPTH, dict(cache='raw')),
    (dict(ponder='smear'), dict(wrong='alone')),
    (dict(ponder='smear'), dict(wrong='sums')),
    (dict(ponder='embedding'), dict(wrong='replace')),
    (dict(ponder='embedding'), dict(wrong='one cache')),
    (dict(ponder='latent'), dict(wrong='own positions')),
    (dict(ponder='feedback', ponder_steps=7), dict(wrong='alone')),
    (dict(ponder='chain'), dict(wrong='all visible')),
    (dict(ponder='loop'), dict(wrong='norm between')),
    (dict(ponder='loop'), dict(wrong='one cache')),
    (MODES['gate'], dict(wrong='keys move')),
    (MODES['gate'], dict(wrong='readout moves')),
    (MODES['mask'], dict(wrong='no fading')),
    (MODES['router'], dict(wrong='all visible')),
    (MODES['exit'], dict(wrong='keys move')),
])
def test_wrong_readings_of_the_papers_are_told_apart(settings, wrong):
    """Else the equality with the slow loop would prove nothing."""
    model = make(**{'ponder_steps': 2, **settings})
    right = model(torch.tensor([TOKENS]))[0][0]
    close(naive.logits(model, TOKENS), right)
    differ(naive.logits(model, TOKENS, **wrong), right)


# ---- Depth-Attention -----------------------------------------------------------------------------

@pytest.mark.parametrize('n_layer, stride, total', [
    (48, None, 117),    # in the paper's appendix B.2
    (48, 1, 1175),
])
def test_there_are_as_many_sources_as_in_the_paper(n_layer, stride, total):
    """A layer's own entry included; None: the default, half of the layers."""
    model = make(n_layer=n_layer, n_embd=8, n_head=1, depth_attn=True, depth_stride=stride)
    memory = Memory()
    memory.keys = memory.values = {layer: torch.zeros(1, 1, 1, 8) for layer in range(n_layer)}
    counts = [len(depth_sources(model.config, layer, memory, 1)) for layer in range(n_layer)]
    assert sum(n + 1 for n in counts if n > 0) == total


@pytest.mark.parametrize('own, other', [
    # scaled scores of 61 and 60 are one number in bf16
    ([30.5] * 4, [30.0] * 4),
    # and so are their sums, of 257 and 256
    ([4.0] * 63 + [5.0], [4.0] * 64),
])
def test_depths_weights_are_fp32_in_half_precision(own, other):
    k, k_0 = torch.tensor(own).bfloat16(), torch.tensor(other).bfloat16()
    k, k_0 = k.expand(1, 1, 5, -1), k_0.expand(1, 1, 5, -1)
    q = v = torch.ones_like(k)
    mixed = depth_attention(q, k, v, [(k_0, torch.zeros_like(v))])
    difference = (sum(own) - sum(other)) / math.sqrt(len(own))
    assert mixed.float().mean().item() == pytest.approx(1 / (1 + math.exp(-difference)), abs=0.01)


# ---- feedback: an iteration that ends in the recursion ------------------------------------------

def token_by_token(model, idx):
    memory = model.new_memory()
    return torch.cat([model.hidden(token, memory) for token in idx.split(1, dim=1)], dim=1)


def test_feedback_is_exact_up_to_place_K_and_nearer_with_each_pass(idx):
    model = make(ponder='feedback', block_size=13)
    model.ln_f.weight.data /= 10        # or the iteration would not begin to contract at once
    exact, off = token_by_token(model, idx), []
    for K in range(13):
        model.config.ponder_steps = K
        h = model.hidden(idx)
        close(h[:, :K + 1], exact[:, :K + 1])
        off.append((h - exact).norm() / exact.norm())
    assert all(after < before for before, after in zip(off, off[1:-1]))
    assert off[3] < 0.2 * off[0] and off[12] < 1e-12


def test_feedback_without_steps_is_the_plain_model_in_pieces_too(idx):
    model = make(ponder='feedback', ponder_steps=0)
    plain = make(n_layer=3, embed_scale=model.config.embed_scale)
    plain.load_state_dict(model.state_dict())
    close(token_by_token(model, idx), plain.hidden(idx))


def test_each_step_of_feedback_feeds_something_back():
    for K, draws in (3, [3, 2]), (2, [2, 1]), (1, [1]), (0, [0]):
        assert make(ponder='feedback', ponder_steps=K).mechanism.draws() == draws


def test_feedback_costs_in_generation_what_the_plain_model_does(idx):
    model = make(ponder='feedback', ponder_steps=3)
    calls = []
    model.h[0].register_forward_pre_hook(lambda _, args: calls.append(args[0].size(1)))
    model.generate(idx, 4, temperature=0)
    assert calls == [13] * 4 + [1] * 3      # K + 1 passes over the prompt, then one for each token


# ---- latent and mask: Jacobi iterations ----------------------------------------------------------

@pytest.mark.parametrize('K', [1, 3])
def test_jacobi_is_exact_after_as_many_passes_as_latents(K):
    """Logits of position t are exact if R >= t K; with too few iterations the last ones are not."""
    model = make(ponder='latent', ponder_steps=K)
    exact = naive.logits(model, TOKENS)
    for R in range(K * 4 + 2):
        model.config.jacobi_iters = R
        got = model(torch.tensor([TOKENS]))[0][0]
        sure = min(R // K, 4) + 1
        close(got[:sure], exact[:sure])
        if sure < 5:
            differ(got[-1], exact[-1], 1e-9)


def make_few(halting, **settings):
    """A model with too few iterations."""
    return make(ponder='latent', ponder_steps=2, halting=halting, halt_tau=0.3,
                **{'jacobi_iters': 1, **settings})


@pytest.mark.parametrize('halting', ['none', 'mask'])
def test_padding_is_not_read_by_guesses_either(halting):
    """Short prompts in a batch, in two pieces: as each alone, with its own guesses."""
    model = make_few(halting)
    prompts = [[3, 1, 4, 1, 5, 9], [2], [7, 1, 8]]
    tokens, pad = left_pad(prompts, model.config, 'cpu')
    more = torch.tensor([[11, 12]])

    def read(prompt, more, pad=None):
        memory = model.new_memory(pad=pad)
        return torch.cat((model.hidden(prompt, memory), model.hidden(more, memory)), dim=1)

    for prompt, got in zip(prompts, read(tokens, more.expand(3, -1), pad)):
        close(got[-len(prompt) - 2:], read(torch.tensor([prompt]), more)[0])


@pytest.mark.parametrize('halting, training', [
    ('none', False),
    ('mask', False),    # it cuts
    ('mask', True),     # it fades
])
def test_causal_with_too_few_iterations_too(idx, halting, training):
    """No sweep lets a guess see later tokens."""
    model = make_few(halting).train(training)
    before = model(idx)[0]
    changed = idx.clone()
    changed[:, 6] += 1
    assert torch.equal(before[:, :6], model(changed % 50)[0][:, :6])
    close(model(idx[:, :8])[0], before[:, :8])


@pytest.mark.parametrize('halting', ['none', 'mask'])
def test_reading_a_prompt_exactly(halting):
    """Token by token equals enough iterations."""
    few, enough = make_few(halting), make_few(halting, jacobi_iters=50)
    prompts = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8], [1, 6, 1, 8, 0, 3]])
    want = generate(enough, prompts, 12, temperature=0)
    assert torch.equal(generate(few, prompts, 12, temperature=0, exact=True), want)
    assert not torch.equal(generate(few, prompts, 12, temperature=0), want)


# ---- all of them ---------------------------------------------------------------------------------

@pytest.mark.parametrize('mode', ['embedding', 'latent', 'chain', 'loop', 'pause'])
def test_steps_can_change_after_training(mode, idx):
    """As --ponder_steps does at evaluation: the same weights, as a model made for these steps."""
    model, other = [make(ponder=mode, ponder_steps=steps, jacobi_iters=2) for steps in (1, 3)]
    other.load_state_dict(model.state_dict())
    differ(model(idx)[0], other(idx)[0])
    model.config.ponder_steps = 3
    close(model(idx)[0], other(idx)[0], 1e-12)
    assert torch.equal(generate(model, [[3, 1]], 5, temperature=0)[0],
                       generate(other, [[3, 1]], 5, temperature=0)[0])
