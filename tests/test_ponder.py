"""Pondering: each mode against wrong variants, and what is particular to it."""
import naive
import pytest
import torch
from conftest import close, make
from test_promises import differ, gradients

from engine.memory import ChainMemory, PassMemory
from model import GPT, GPTConfig

TOKENS = [3, 14, 15, 9, 26]


@pytest.mark.parametrize('mode, wrong', [('embedding', 'replace'), ('embedding', 'one cache'), ('latent', 'own positions'), ('chain', 'all visible'),
                                         ('loop', 'norm between'), ('loop', 'one cache')])
def test_wrong_variants_differ(mode, wrong):
    model = make(ponder=mode, ponder_steps=2)
    right = model(torch.tensor([TOKENS]))[0][0]
    close(naive.logits(model, TOKENS), right)
    differ(naive.logits(model, TOKENS, wrong=wrong), right)


def count(model, idx, **options):
    """(passes, rows per token) of a forward, counted by a hook on the last block."""
    rows = []
    hook = model.h[-1].register_forward_pre_hook(lambda m, args: rows.append(args[0].size(1)))
    model(idx, **options)
    hook.remove()
    return len(rows), sum(rows) / idx.size(1)


@pytest.mark.parametrize('K, R', [(1, 2), (1, 3), (2, 3), (3, 0), (0, 3)])
def test_latent_passes_and_rows(K, R, idx):
    model = make(ponder='latent', ponder_steps=K, jacobi_iters=R)
    assert count(model, idx) == ((K + R + 1, K * (K + 1) / 2 + (R + 1) * (K + 1)) if K else (1, 1))
    if K: assert count(model, idx, jacobi=R + 1)[0] == K + R + 2


@pytest.mark.parametrize('mode, passes, rows', [('embedding', 3, 3), ('loop', 3, 3), ('chain', 3, 3), ('pause', 1, 3)])
def test_passes_and_rows(mode, passes, rows, idx):
    assert count(make(ponder=mode, ponder_steps=2), idx) == (passes, rows)


@pytest.mark.parametrize('mode', ['embedding', 'loop', 'chain', 'pause', 'latent'])
def test_flops_grow_with_the_passes(mode):
    """Trunk FLOPs in multiples of the plain GPT's, attention aside (T = 1)."""
    plain, model = (make(ponder=p, ponder_steps=2, n_layer=3, jacobi_iters=3) for p in ('none', mode))
    head, C, V = model.lm_head.weight.numel(), 32, 64
    trunk = (plain.flops_per_token(1, False) - 2 * head)
    mixing = 2 * 2 * (head + V * C) if mode == 'embedding' else 0
    rows = {'latent': 3 + 4 * 3}.get(mode, 3)
    got = (model.flops_per_token(1, False) - 2 * head - mixing) / trunk
    assert got == pytest.approx(rows, rel=0.15)


# PonderLM

def test_mixture_is_the_expected_embedding(idx):
    model = make(ponder='embedding')
    h = torch.randn(2, 3, 32, dtype=torch.float64)
    table = model.wte.weight[:50] * model.config.embed_scale
    want = model.head(h)[..., :50].softmax(-1) @ table
    close(model.mixture(h), want, 1e-12)
    assert (model.mixture(h).norm(dim=-1) <= table.norm(dim=-1).max()).all()


def test_topk_of_all_tokens_is_the_full_mixture_and_of_one_its_row(idx):
    full, all_, one = (make(ponder='embedding', ponder_topk=k) for k in (None, 50, 1))
    close(full(idx)[0], all_(idx)[0])
    h = torch.randn(2, 3, 32, dtype=torch.float64)
    close(one.mixture(h), one.wte.weight[one.head(h).argmax(-1)] * one.config.embed_scale, 1e-12)


def test_padded_rows_get_no_mass_and_no_gradient(idx):
    model = make(ponder='embedding', ponder_steps=2)
    before = model(idx)[0]
    gradients(model, idx)
    assert not model.wte.weight.grad[50:].any() and model.wte.weight.grad[:50].abs().sum(1).gt(0).all(), "tokens that are not in the batch are mixed too"
    with torch.no_grad(): model.wte.weight[50:] = 1e3; model.lm_head.weight[50:] = 1e3
    assert torch.equal(model(idx)[0], before)


def test_mixture_in_chunks_is_the_same(idx, monkeypatch):
    from model import ChunkedCrossEntropy
    model = make(ponder='embedding', ponder_steps=2)
    want = gradients(model, idx)
    monkeypatch.setattr(ChunkedCrossEntropy, 'CHUNK', 7 * 64)
    for a, b in zip(gradients(model, idx), want): close(a, b, 1e-12)


def test_gradients_flow_through_every_pass(idx):
    """Detaching the mixtures changes the gradient of the blocks."""
    model = make(ponder='embedding', ponder_steps=2)
    want, mixture = gradients(model, idx), model.mixture
    model.mixture = lambda h: mixture(h).detach()
    differ(gradients(model, idx)[5], want[5], 1e-6)


# PonderLM-2

@pytest.mark.parametrize('K', [1, 2, 3])
def test_jacobi_is_exact_after_as_many_passes_as_latents(K):
    """Logits of position t are exact if R >= t K; with too few iterations the last ones are not."""
    model = make(ponder='latent', ponder_steps=K)
    exact = naive.logits(model, TOKENS)
    for R in range(0, K * 4 + 1):
        got = model(torch.tensor([TOKENS]), jacobi=R)[0][0]
        sure = min(R // K, 4) + 1
        close(got[:sure], exact[:sure])
        if sure < 5: differ(got[-1], exact[-1], 1e-9)
    close(model(torch.tensor([TOKENS]), jacobi=K * 4 + 3)[0][0], exact)


@pytest.mark.parametrize('halting', ['none', 'mask'])
@pytest.mark.parametrize('K, R', [(2, 1), (3, 3)])
def test_padding_is_not_read_by_guesses_either(K, R, halting):
    """Short prompts in a batch, read at once and in two pieces, with too few iterations: as each alone, with its own guesses."""
    model = make(ponder='latent', ponder_steps=K, jacobi_iters=R, halting=halting, halt_tau=0.3)
    prompts = [[3, 1, 4, 1, 5, 9], [2], [7, 1, 8]]
    tokens, start = model._left_pad(prompts, 'cpu')
    together, more = model.new_memory(8, start), torch.tensor([[11, 12]] * 3)
    got = torch.cat([model.hidden(part, together) for part in (tokens, more)], 1)
    for i, prompt in enumerate(prompts):
        alone = model.new_memory(8)
        want = torch.cat([model.hidden(part, alone) for part in (torch.tensor([prompt]), more[:1])], 1)
        close(got[i, -len(prompt) - 2:], want[0])


@pytest.mark.parametrize('halting, training', [('none', False), ('mask', False), ('mask', True)])  # mask fades in training, else it cuts
def test_causal_with_too_few_iterations_too(idx, halting, training):
    model = make(ponder='latent', ponder_steps=2, jacobi_iters=1, halting=halting, halt_tau=0.3).train(training)
    before = model(idx)[0]
    changed = idx.clone()
    changed[:, 6] += 1
    assert torch.equal(before[:, :6], model(changed % 50)[0][:, :6])
    close(model(idx[:, :8])[0], before[:, :8])


def test_first_guess_comes_from_a_plain_pass(idx):
    """Which passes a position's loss reads: with K = 1 and R = 2, latents of the first pass only up to position t - 2."""
    model = make(ponder='latent', ponder_steps=1, jacobi_iters=2)
    latents = []
    trunk = model.trunk
    def watch(x, pos, memory=None, mask=None):
        h = trunk(x, pos, memory, mask)
        if h.requires_grad: h.retain_grad()
        latents.append(h)
        return h
    model.trunk = watch
    logits = model(idx)[0]
    logits[:, 7, :50].sum().backward()
    reached = latents[0].grad.abs().sum((0, 2)) > 1e-14
    assert reached.tolist() == [i <= 7 - 2 for i in range(13)]


def test_three_iterations_are_close_to_the_recursion_at_the_start_of_training(idx):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, n_layer=4, n_head=4, n_embd=64, mlp_hidden=128, block_size=16, ponder='latent', ponder_steps=1)).eval()
    exact = model(idx, jacobi=13)[0]
    assert 0 < (model(idx, jacobi=3)[0] - exact).abs().max() < 1e-2 * exact.abs().max()


def test_initial_scales_match():
    """Scaled embeddings and fed-back hidden states have the same size."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=512, n_layer=2, n_head=4, n_embd=256, mlp_hidden=512, block_size=32, ponder='latent'))
    idx = torch.randint(0, 512, (4, 32))
    assert model.embed(idx).std().item() == pytest.approx(1, rel=0.05) and model.hidden(idx).std().item() == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize('halting', ['none', 'mask'])
def test_reading_a_prompt_exactly(halting):
    """Token by token equals enough iterations; the change that one more iteration would make tells how far off too few are."""
    few, enough = (make(ponder='latent', ponder_steps=2, jacobi_iters=R, halting=halting, halt_tau=0.3) for R in (1, 50))
    prompts = [[3, 1, 4, 1, 5, 9], [2, 7]]
    def first_logits(model, exact):
        seen = []
        head = model.head
        model.head = lambda h: seen.append(head(h)) or seen[-1]
        next(model.stream(prompts, 2, temperature=0, exact=exact))
        model.head = head
        return seen[0]
    close(first_logits(few, True), first_logits(enough, False))
    differ(first_logits(few, False), first_logits(enough, False), 1e-6)
    if halting == 'mask': return
    idx = torch.tensor([[3, 1, 4, 1, 5, 9]])
    few(idx), enough(idx)
    assert enough.jacobi_change < 1e-12 < 1e-4 < few.jacobi_change


# chain

@pytest.mark.parametrize('group', [256, 5])
def test_chain_equals_one_attention_over_all_slots(idx, monkeypatch, group):
    """Stepwise with reused keys, queries together or in groups, equals a flat pass with the two-dimensional mask, once the states are known."""
    monkeypatch.setattr(ChainMemory, 'QUERIES', group)
    model = make(ponder='chain', ponder_steps=2)
    states = [model.embed(idx)]
    trunk = model.trunk
    model.trunk = lambda x, pos, memory=None: states.append(trunk(x, pos, memory)) or states[-1]
    final = model.hidden(idx)
    t, k = torch.arange(13).repeat(3), torch.arange(3).repeat_interleave(13)
    memory = PassMemory(5)
    memory.seen = ((t[None] <= t[:, None]) & (k[None] <= k[:, None]))[None, None]
    flat = trunk(torch.cat(states[:3], 1), t, memory)
    close(flat[:, -13:], final)


@pytest.mark.parametrize('depth_attn', [False, True])
def test_groups_of_queries_change_nothing(idx, monkeypatch, depth_attn):
    model = make(ponder='chain', ponder_steps=2, depth_attn=depth_attn, n_kv_head=2)
    calls, attention = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr('torch.nn.functional.scaled_dot_product_attention', lambda q, k, v, **options: calls.append((q.size(2), k.size(2))) or attention(q, k, v, **options))

    def learn(group):
        monkeypatch.setattr(ChainMemory, 'QUERIES', group)
        calls.clear(), model.zero_grad()
        model(idx, idx)[1].backward()
        return [p.grad.clone() for p in model.parameters()], calls[::5]  # of each step's first layer

    want, together = learn(13)
    assert together == [(13, 13), (13, 26), (13, 39)]
    for group, apart in ((5, [(5, 10), (5, 20), (3, 26)]), (12, [(12, 24), (1, 26)])):
        got, _ = learn(group)
        for a, b in zip(got, want): close(a, b, 1e-12)
        assert calls[5:5 + len(apart)] == apart  # the second step's first layer: no query reads, or is masked against, later groups


def test_first_step_is_the_plain_gpt(idx):
    model = make(ponder='chain', ponder_steps=2)
    states = []
    trunk = model.trunk
    model.trunk = lambda x, pos, memory=None, mask=None: states.append(trunk(x, pos, memory, mask)) or states[-1]
    model.hidden(idx)
    close(states[0], trunk(model.embed(idx), torch.arange(13)))


# loop

def test_depth_attention_reads_the_same_layer_of_earlier_loops(idx):
    model = make(ponder='loop', ponder_steps=2, depth_attn=True, n_layer=4)
    counts = []
    for block in model.h: block.register_forward_pre_hook(lambda m, args: counts.append(len(args[2])))
    anchors = [0, 1, 1, 2]  # layers 0 and 2 below layers 0 .. 3
    for _ in range(2):  # twice: nothing is left over for the next forward
        counts.clear()
        model(idx)
        assert [counts[i:i + 4] for i in (0, 4, 8)] == [[n + loop for n in anchors] for loop in range(3)]


# settings

@pytest.mark.parametrize('settings, words', [
    (dict(ponder='think'), ["'think'", "'embedding'", "'pause'"]), (dict(ponder='embedding', ponder_topk=99999), ['ponder_topk=99999', 'n_tokens=50304']),
    (dict(ponder='latent', ponder_steps=-1), ['ponder_steps=-1', 'negative']), (dict(ponder='latent', jacobi_iters=-1), ['jacobi_iters=-1'])])
def test_impossible_settings_are_named(settings, words):
    with pytest.raises(ValueError) as error: GPTConfig(**settings)
    for word in words: assert word in str(error.value)


@pytest.mark.parametrize('mode', ['embedding', 'latent', 'chain', 'loop', 'pause'])
def test_steps_can_change_after_training(mode, idx):
    """Another number of steps runs on the same weights, cached as well as in full."""
    model = make(ponder=mode, ponder_steps=1, n_layer=3)
    before = model(idx)[0]
    model.config.ponder_steps = 3
    if mode == 'latent': model.config.jacobi_iters = 39
    after = model(idx)[0]
    differ(before, after)
    memory = model.new_memory(13)
    close(torch.cat([model.head(model.hidden(idx[:, :5], memory)), model.head(model.hidden(idx[:, 5:], memory))], 1), after)
