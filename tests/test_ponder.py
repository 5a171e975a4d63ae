"""Pondering: each mode against wrong variants, and what is particular to it."""

import naive
import pytest
import torch
import torch.nn.functional as F
from conftest import close, make
from test_promises import differ, gradients

import model as library
from engine.generate import left_pad
from engine.memory import ChainPass
from model import GPT, GPTConfig, mixture

TOKENS = [3, 14, 15, 9, 26]
T = 13  # tokens of a row of `idx`


def watch_trunk(model):
    """A list that gets the hidden states of each pass from now on."""
    trunk, made = model.trunk, []

    def watched(x, pos, memory=None, **how):
        made.append(trunk(x, pos, memory, **how))
        return made[-1]

    model.trunk = watched
    return made


@pytest.mark.parametrize('mode, wrong', [
    ('embedding', 'replace'),
    ('embedding', 'one cache'),
    ('latent', 'own positions'),
    ('chain', 'all visible'),
    ('loop', 'norm between'),
    ('loop', 'one cache'),
])
def test_wrong_variants_differ(mode, wrong):
    model = make(ponder=mode, ponder_steps=2)
    right = model(torch.tensor([TOKENS]))[0][0]
    close(naive.logits(model, TOKENS), right)
    differ(naive.logits(model, TOKENS, wrong=wrong), right)


@pytest.mark.parametrize('settings, passes, slots', [
    (dict(ponder='embedding', ponder_steps=2), 3, 3),
    (dict(ponder='loop', ponder_steps=2), 3, 3),
    (dict(ponder='chain', ponder_steps=2), 3, 3),
    (dict(ponder='pause', ponder_steps=2), 1, 3),
    (dict(ponder='latent', ponder_steps=2, jacobi_iters=3), 6, 1 + 2 + 4 * 3),
    (dict(ponder='latent', ponder_steps=3, jacobi_iters=0), 4, 1 + 2 + 3 + 4),
    (dict(ponder='latent', ponder_steps=0, jacobi_iters=3), 1, 1),
])
def test_passes_and_slots_of_a_token(settings, passes, slots, idx, kind):
    model = make(**settings, kind=kind)
    taken = []
    model.h[-1].register_forward_pre_hook(lambda m, args: taken.append(args[0].size(1)))
    model(idx)
    assert (len(taken), sum(taken)) == (passes, slots * T)


# PonderLM

def test_mixture_is_the_expected_embedding():
    model = make(ponder='embedding')
    h = torch.randn(2, 3, 32, dtype=torch.float64)
    table = model.wte.weight[:50] * model.config.embed_scale
    want = model.head(h)[..., :50].softmax(-1) @ table
    close(mixture(model, h), want, 1e-12)
    longest = table.norm(dim=-1).max()
    assert (mixture(model, h).norm(dim=-1) <= longest).all()


def test_topk_of_all_tokens_is_the_full_mixture_and_of_one_its_row(idx):
    full, every, one = (make(ponder='embedding', ponder_topk=k) for k in (None, 50, 1))
    close(full(idx)[0], every(idx)[0])
    h = torch.randn(2, 3, 32, dtype=torch.float64)
    likeliest = one.wte.weight[one.head(h).argmax(-1)]
    close(mixture(one, h), likeliest * one.config.embed_scale, 1e-12)


def test_padded_rows_get_no_mass_and_no_gradient(idx):
    model = make(ponder='embedding', ponder_steps=2)
    before = model(idx)[0]
    gradients(model, idx)
    grad = model.wte.weight.grad
    assert not grad[50:].any()
    assert grad[:50].abs().sum(1).gt(0).all(), "tokens that are not in the batch are mixed too"
    with torch.no_grad():
        model.wte.weight[50:] = 1e3
        model.lm_head.weight[50:] = 1e3
    assert torch.equal(model(idx)[0], before)


def test_gradients_flow_through_every_pass(idx, monkeypatch):
    """Detaching the mixtures changes the gradient of the blocks."""
    model = make(ponder='embedding', ponder_steps=2)
    want = gradients(model, idx)
    monkeypatch.setattr(library, 'mixture', lambda gpt, h: mixture(gpt, h).detach())
    differ(gradients(model, idx)[5], want[5], 1e-6)


# PonderLM-2

@pytest.mark.parametrize('K', [1, 3])
def test_jacobi_is_exact_after_as_many_passes_as_latents(K):
    """Logits of position t are exact if R >= t K; with too few iterations the last ones are not."""
    model = make(ponder='latent', ponder_steps=K)
    exact = naive.logits(model, TOKENS)
    for R in range(0, K * 4 + 1):
        got = model(torch.tensor([TOKENS]), jacobi=R)[0][0]
        sure = min(R // K, 4) + 1
        close(got[:sure], exact[:sure])
        if sure < 5:
            differ(got[-1], exact[-1], 1e-9)
    close(model(torch.tensor([TOKENS]), jacobi=K * 4 + 3)[0][0], exact)


def read_in_two_parts(model, prompt, more, pad=None):
    """Hidden states of a prompt (B,n), and then of `more` (B,m), behind one another."""
    memory = model.new_memory(pad=pad)
    return torch.cat((model.hidden(prompt, memory), model.hidden(more, memory)), dim=1)


@pytest.mark.parametrize('halting', ['none', 'mask'])
def test_padding_is_not_read_by_guesses_either(halting, kind):
    """
    Short prompts in a batch, read at once and in two pieces, with too few iterations: as each
    alone, with its own guesses.
    """
    model = make(ponder='latent', ponder_steps=2, jacobi_iters=1, halting=halting, halt_tau=0.3,
                 kind=kind)
    prompts = [[3, 1, 4, 1, 5, 9], [2], [7, 1, 8]]
    tokens, pad = left_pad(prompts, model.config, 'cpu')
    more = torch.tensor([[11, 12]])
    together = read_in_two_parts(model, tokens, more.expand(3, -1), pad)
    for prompt, got in zip(prompts, together):
        want = read_in_two_parts(model, torch.tensor([prompt]), more)[0]
        close(got[-len(prompt) - 2:], want)


@pytest.mark.parametrize('halting, training', [
    ('none', False),
    ('mask', False),    # it cuts
    ('mask', True),     # it fades
])
def test_causal_with_too_few_iterations_too(idx, halting, training, kind):
    model = make(ponder='latent', ponder_steps=2, jacobi_iters=1, halting=halting, halt_tau=0.3,
                 kind=kind)
    model.train(training)
    before = model(idx)[0]
    changed = idx.clone()
    changed[:, 6] += 1
    assert torch.equal(before[:, :6], model(changed % 50)[0][:, :6])
    close(model(idx[:, :8])[0], before[:, :8])


def test_first_guess_comes_from_a_plain_pass(idx):
    """
    Which passes a position's loss reads: with K = 1 and R = 2, latents of the first pass only up to
    position t - 2.
    """
    model = make(ponder='latent', ponder_steps=1, jacobi_iters=2)
    latents = watch_trunk(model)
    logits = model(idx)[0]
    [grad] = torch.autograd.grad(logits[:, 7, :50].sum(), [latents[0]])
    reached = grad.abs().sum((0, 2)) > 1e-14
    assert reached.tolist() == [i <= 7 - 2 for i in range(T)]


def test_three_iterations_are_close_to_the_recursion_at_the_start_of_training(idx):
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=64, n_layer=4, n_head=4, n_embd=64, mlp_hidden=128,
                       block_size=16, ponder='latent', ponder_steps=1)
    model = GPT(config).eval()
    few = model(idx)[0]
    model.config.jacobi_iters = T
    exact = model(idx)[0]
    error = (few - exact).abs().max()
    assert 0 < error < 1e-2 * exact.abs().max()


def test_initial_scales_match():
    """Scaled embeddings and fed-back hidden states have the same size."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=512, n_layer=2, n_head=4, n_embd=256, mlp_hidden=512,
                          block_size=32, ponder='latent'))
    idx = torch.randint(0, 512, (4, 32))
    assert model.embed(idx).std().item() == pytest.approx(1, rel=0.05)
    assert model.hidden(idx).std().item() == pytest.approx(1, rel=0.1)


def first_logits(model, prompts, exact):
    """The logits that the first new tokens are drawn from."""
    head, seen = model.head, []

    def watched(h):
        seen.append(head(h))
        return seen[-1]

    model.head = watched
    next(model.stream(prompts, 2, temperature=0, exact=exact))
    model.head = head
    return seen[0]


@pytest.mark.parametrize('halting', ['none', 'mask'])
def test_reading_a_prompt_exactly(halting):
    """Token by token equals enough iterations."""
    settings = dict(ponder='latent', ponder_steps=2, halting=halting, halt_tau=0.3)
    few, enough = make(**settings, jacobi_iters=2), make(**settings, jacobi_iters=50)
    prompts = [[3, 1, 4, 1, 5, 9], [2, 7]]
    want = first_logits(enough, prompts, exact=False)
    close(first_logits(few, prompts, exact=True), want)
    differ(first_logits(few, prompts, exact=False), want, 1e-6)


# chain

class AllAtOnce:
    """Slots that go through the blocks together, behind a mask of their own."""

    def __init__(self, seen):
        self.seen = seen

    def mask(self, S, device):
        return self.seen

    def update(self, layer, k, v):
        return k, v


@pytest.mark.parametrize('group', [256, 5])
def test_chain_equals_one_attention_over_all_slots(idx, monkeypatch, group):
    """
    Stepwise with reused keys, queries together or in groups, equals a flat pass with the
    two-dimensional mask, once the states are known.
    """
    monkeypatch.setattr(ChainPass, 'QUERIES', group)
    model = make(ponder='chain', ponder_steps=2)
    trunk = model.trunk
    made = watch_trunk(model)
    final = model.hidden(idx)
    states = torch.cat([model.embed(idx), *made[:2]], dim=1)            # (3, 3 T, 32)

    t = torch.arange(T).repeat(3)                                       # (3 T,)
    k = torch.arange(3).repeat_interleave(T)
    not_later = (t[None] <= t[:, None]) & (k[None] <= k[:, None])       # (queries, keys)
    flat = trunk(states, t, AllAtOnce(not_later[None, None]))
    close(flat[:, -T:], final)


class Calls(list):
    """(queries, keys) of each call of PyTorch's attention, from here on."""

    def __init__(self, monkeypatch):
        attention = F.scaled_dot_product_attention

        def watched(q, k, v, **options):
            self.append((q.size(2), k.size(2)))
            return attention(q, k, v, **options)

        monkeypatch.setattr(F, 'scaled_dot_product_attention', watched)


@pytest.mark.parametrize('group, calls_of_a_layer', [
    (5, [(5, 10), (5, 20), (3, 26)]),
    (12, [(12, 24), (1, 26)]),
])
def test_groups_of_queries_change_nothing(idx, monkeypatch, group, calls_of_a_layer):
    """No query of the second step reads, or is masked against, what belongs to later groups."""
    model = make(ponder='chain', ponder_steps=2, depth_attn=True, n_kv_head=2)
    calls = Calls(monkeypatch)
    monkeypatch.setattr(ChainPass, 'QUERIES', T)
    want = gradients(model, idx)
    assert calls[::5] == [(13, 13), (13, 26), (13, 39)]  # the first layer's in each step

    calls.clear()
    monkeypatch.setattr(ChainPass, 'QUERIES', group)
    got = gradients(model, idx)
    for a, b in zip(got, want):
        close(a, b, 1e-12)
    assert calls[5:5 + len(calls_of_a_layer)] == calls_of_a_layer


# loop

def test_depth_attention_reads_the_same_layer_of_earlier_loops(idx, monkeypatch, kind):
    model = make(ponder='loop', ponder_steps=2, depth_attn=True, n_layer=4, kind=kind)
    mix, counts = library.depth_attention, []

    def watched(q, k, v, sources, mode):
        counts.append(len(sources))
        return mix(q, k, v, sources, mode)

    monkeypatch.setattr(library, 'depth_attention', watched)
    of_layers = [0, 1, 1, 2]    # layers 0 and 2 below layers 0 .. 3
    for _ in range(2):          # twice: nothing is left over for the next forward
        counts.clear()
        model(idx)
        assert counts == [n + loop for loop in range(3) for n in of_layers]


# all of them

@pytest.mark.parametrize('mode', ['embedding', 'latent', 'chain', 'loop', 'pause'])
def test_steps_can_change_after_training(mode, idx, kind):
    """Another number of steps runs on the same weights, cached as well as in full."""
    idx = idx[:, :7]
    model = make(ponder=mode, ponder_steps=1, n_layer=3, kind=kind)
    before = model(idx)[0]
    model.config.ponder_steps = 3
    model.config.jacobi_iters = 3 * 7
    after = model(idx)[0]
    differ(before, after)
    memory = model.new_memory()
    parts = [model.head(model.hidden(part, memory)) for part in idx.split([5, 2], dim=1)]
    close(torch.cat(parts, dim=1), after)
