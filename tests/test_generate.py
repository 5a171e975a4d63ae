"""Generation: what is drawn, when it stops, what it costs, and what happens past the context."""

import math
from unittest import mock

import pytest
import torch
from conftest import ONE_EACH, TOGGLES, close, make, slow_but

from engine import generate
from engine.generate import stream
from engine.decode import compile_decoding
from engine.files import UserError


def draw(model, prompts, n):
    """n random tokens behind each prompt: the rows, and the logits (B,n,V) they were drawn from."""
    logits, sample = [], generate.sample

    def watched(given, *options):
        logits.append(given)
        return sample(given, *options)

    with mock.patch.object(generate, 'sample', watched):
        rows = generate.generate(model, prompts, n, seed=0)
    assert [len(row) for row in rows] == [len(prompt) + n for prompt in prompts]
    for prompt, row in zip(prompts, rows):
        assert row[:len(prompt)].tolist() == prompt
    return [row.tolist() for row in rows], torch.stack(logits, dim=1)


BY_ITERATION = ('latent', 'feedback')     # this is how a prompt is read


def passes_per_token(toggle):
    return toggle.get('ponder_steps', 0) + 1    # feedback: one


@pytest.mark.parametrize('name', slow_but(
    ('depth', 'loop', 'feedback_depth'),
    ['plain', 'depth', 'smear_depth', 'embedding', 'loop', 'latent2_depth', 'feedback_depth',
     'mask']))
def test_compiled_decoding_changes_nothing(name, compiler):
    """
    Prompts of two lengths, past the context: the same tokens and logits, from a few graphs that
    serve all tokens.
    """
    model = make(**{**TOGGLES[name], 'block_size': 16, 'n_layer': 2, 'jacobi_iters': 48})
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6]]
    want, logits = draw(model, prompts, 20)
    one = generate.generate(model, [[3]], 9, temperature=0)[0].tolist()

    compile_decoding(model, 16)
    tokens, compiled = draw(model, prompts, 20)
    assert tokens == want
    close(compiled, logits)
    first = compiler.graphs
    assert 0 < first <= 6
    draw(model, prompts, 20)
    assert compiler.graphs == first
    assert generate.generate(model, [[3]], 9, temperature=0)[0].tolist() == one


@pytest.mark.parametrize('name', ['chain', 'pause_depth', 'loop_depth', 'gate', 'router'])
def test_who_cannot_be_compiled_decodes_as_before(name, compiler):
    model = make(**{**TOGGLES[name], 'block_size': 16, 'n_layer': 2, 'jacobi_iters': 48})
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6]]
    want, logits = draw(model, prompts, 20)
    compile_decoding(model, 16)
    tokens, same = draw(model, prompts, 20)
    assert tokens == want
    assert torch.equal(same, logits)
    assert compiler.graphs == 0


@pytest.mark.parametrize('name', ONE_EACH)
def test_a_token_costs_its_own_slots_whatever_the_context(name):
    toggle = TOGGLES[name]
    # 0: nobody halts; test_halting has the rest
    model = make(**{**toggle, 'halt_tau': 0.0})
    slots, each = [], []
    model.h[-1].register_forward_pre_hook(lambda m, args: slots.append(args[0].size(1)))
    for token, passes in stream(model, torch.tensor([[3, 1, 4]] * 2), 8):
        each.append((sum(slots), passes.tolist()))
        slots.clear()
    n = passes_per_token(toggle)
    assert each[1:] == [(n, [n, n])] * 7, "decoding: one slot for each pass or thought"
    if toggle.get('ponder') not in BY_ITERATION:
        assert each[0] == (3 * n, [n, n])


def recompute_in_windows(model, tokens, n_prompt, left):
    """
    The logits of every token behind the prompt, by the documented rule: when the window of 8 is
    full, its newer 4 are read again as if they were the whole text. The first `left` tokens are
    padding.
    """
    first, read, parts = 0, n_prompt, []  # tokens[first:read] are read together
    while read < len(tokens):
        start, end = max(first, left), min(first + 9, len(tokens))  # room to decode up to end
        logits = model(torch.tensor([tokens[start:end - 1]]))[0]
        parts.append(logits[:, read - start - 1:])
        first, read = end - 4, end
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize('name', ONE_EACH)
def test_sliding_past_block_size(name):
    """Prompts of three lengths; reading again costs at most as much as reading."""
    model = make(**{**TOGGLES[name], 'block_size': 8, 'n_layer': 3})
    slots = []
    hook = model.h[0].register_forward_pre_hook(lambda m, args: slots.append(args[0].size(1)))
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [2], [7, 1, 8]]     # one is still padded when it slides
    rows, logits = draw(model, prompts, 20)
    hook.remove()
    if TOGGLES[name].get('ponder') not in BY_ITERATION:
        assert sum(slots) < 2 * 28 * passes_per_token(TOGGLES[name])
    want = []
    for prompt, row in zip(prompts, rows):
        # a short row slides together with the longest: its own first tokens go first only when it
        # has that many
        left = 8 - len(prompt)
        want.append(recompute_in_windows(model, [0] * left + row, 8, left)[0])
    close(logits, torch.stack(want))


def test_a_stream_without_an_end_takes_memory_as_it_goes():
    model = make(n_layer=2, block_size=8)
    drawn = stream(model, torch.tensor([[3, 1]]), 10 ** 13, temperature=0)
    got = [token.item() for (token, _), _ in zip(drawn, range(20))]
    [row] = generate.generate(model, [[3, 1]], 20, temperature=0)
    assert got == row[2:].tolist()


@pytest.mark.parametrize('few', [dict(top_k=1), dict(top_p=1e-9)])
def test_a_stream_draws_from_few_tokens_where_it_is_asked_to(few):
    model = make(n_layer=2)

    def tokens(**options):
        return generate.generate(model, [[3, 1]], 8, seed=0, **options)[0].tolist()
    assert tokens(temperature=3.0, **few) == tokens(temperature=0) != tokens(temperature=3.0)


def test_no_tokens_to_draw_from():
    with pytest.raises(ValueError, match='top_k=0'):
        next(stream(make(), torch.tensor([[3]]), 1, top_k=0))


@pytest.mark.parametrize('name', ['depth', 'gate'])
def test_stop_token_cuts_each_row(name):
    """And a stream ends, and pays for nothing more, when all rows have had theirs."""
    model = make(**{**TOGGLES[name], 'block_size': 12, 'n_layer': 2})
    prompts = [[3, 1], [7], [4, 4, 2]]
    greedy = []
    for prompt, row in zip(prompts, generate.generate(model, prompts, 20, temperature=0)):
        greedy.append(row[len(prompt):].tolist())
    for stop in {row[4] for row in greedy}:
        cut = [row[:row.index(stop) + 1] if stop in row else row for row in greedy]
        rows = generate.generate(model, prompts, 20, temperature=0, stop_token=stop)
        for prompt, row, want in zip(prompts, rows, cut):
            assert row[len(prompt):].tolist() == want
        steps = list(stream(model, prompts, 20, temperature=0, stop_token=stop))
        assert len(steps) == max(len(row) for row in cut)
        for i, row in enumerate(cut):
            for token, _ in steps[len(row):]:
                assert token[i] == stop


def shares(logits, temperature=1.0, top_k=None, top_p=None):
    """How often each token is drawn from logits (V,)."""
    generator = torch.Generator().manual_seed(0)
    drawn = generate.sample(logits.expand(4000, -1), temperature, top_k, top_p, generator)
    return torch.bincount(drawn, minlength=len(logits)) / 4000


def test_sampling_filters():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -float('inf')])
    p = logits.softmax(0)                               # 0.64, 0.24, 0.09, 0.03, 0
    two = torch.cat((p[:2] / p[:2].sum(), torch.zeros(3)))
    assert torch.allclose(shares(logits), p, atol=0.03)
    assert shares(logits)[4] == 0
    assert torch.allclose(shares(logits, top_k=2), two, atol=0.03)
    assert shares(logits, top_k=100).count_nonzero() == 4
    assert shares(logits, top_p=0.6).tolist() == [1, 0, 0, 0, 0]
    assert shares(logits, top_p=0.8).count_nonzero() == 2
    assert shares(torch.zeros(2), top_p=0.5).count_nonzero() == 1      # which has just that much
    for top_p in (1e-9, 0.0):
        assert shares(logits, top_p=top_p).tolist() == [1, 0, 0, 0, 0]
    flatter = (logits / 2).softmax(0)
    assert torch.allclose(shares(logits, temperature=2.0), flatter, atol=0.03)
    assert shares(logits, temperature=0).tolist() == [1, 0, 0, 0, 0]


def test_sampling_filters_of_model_py():
    torch.manual_seed(0)
    model = make()
    logits = model(torch.tensor([[3]]))[0][0, -1]                       # (V,)
    rows = model.generate(torch.tensor([[3]] * 4000), 1, temperature=2.0, top_k=3)
    top = logits.float().topk(3)
    want = torch.zeros(64).scatter(0, top.indices, (top.values / 2).softmax(0))
    assert torch.allclose(torch.bincount(rows[:, 1], minlength=64) / 4000, want, atol=0.03)
    rows = model.generate(torch.tensor([[3]] * 50), 1, temperature=2.0, top_p=0.0)
    assert (rows[:, 1] == top.indices[0]).all()


def test_tokens_are_drawn_in_fp32():
    logits = torch.randn(2000, 300, generator=torch.Generator().manual_seed(0)) * 3

    def drawn(logits):
        return generate.sample(logits, 0.7, None, 0.9, torch.Generator().manual_seed(0))

    half = logits.bfloat16()
    assert torch.equal(drawn(half), drawn(half.float()))


@pytest.mark.parametrize('prompts, message', [
    ([[1], []], 'empty prompt'),
    ([[1] * 25], '25 tokens.*block_size=24'),
])
def test_prompts_that_do_not_fit_are_refused(prompts, message):
    with pytest.raises(ValueError, match=message):
        generate.generate(make(), prompts, 3)


def test_a_text_above_block_size_is_refused():
    text = torch.ones(1, 25, dtype=torch.long)
    with pytest.raises(ValueError, match='25 tokens are more than block_size'):
        make()(text)
    with pytest.raises(ValueError, match='25 tokens are more than block_size'):
        make().generate(text[:, :5], 21)
    assert make().generate(text[:, :5], 20).shape == (1, 25)


def test_in_training_mode_nothing_is_generated():
    model = make(ponder='loop', halting='exit').train()
    model.mechanism.begin_step(0, 10)
    with pytest.raises(ValueError, match='gpt.eval()'):
        model.generate(torch.tensor([[1, 2]]), 3)


def test_a_full_prompt_and_no_new_tokens():
    model = make(block_size=6)
    full = torch.tensor([[1, 2, 3, 4, 5, 6]])
    assert generate.generate(model, full, 3, temperature=0).shape == (1, 9)
    assert generate.generate(model, torch.tensor([[1, 2]]), 0).tolist() == [[1, 2]]


def test_training_mode_and_dropout_are_left_alone():
    model = make(dropout=0.5).train()
    prompt = torch.tensor([[1, 2]])
    once = generate.generate(model, prompt, 8, temperature=0)
    again = generate.generate(model, prompt, 8, temperature=0)
    assert torch.equal(once, again)
    assert model.training
    steps = stream(model, prompt, 8)
    next(steps)
    steps.close()
    assert model.training


@pytest.mark.parametrize('place', [1, 5])
def test_what_is_not_finite_ends_a_stream(place, monkeypatch):
    """In the middle of a window, too: drawn from NaN, each token would be 0."""
    model = make()
    head, calls = model.head, []

    def spoiled(h):
        calls.append(1)
        return head(h) * (math.nan if len(calls) == place else 1)

    monkeypatch.setattr(model, 'head', spoiled)
    with pytest.raises(UserError, match='not finite'):
        generate.generate(model, [[3, 1, 4]], 9, seed=0)
    assert len(calls) == place


def test_a_tiny_temperature_takes_the_likeliest():
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    logits[:, 250:] = -math.inf
    drawn = generate.sample(logits, 1e-45, None, None, torch.Generator().manual_seed(0))
    assert torch.equal(drawn, logits.argmax(-1))


@pytest.mark.parametrize('temperature', [1e39, 1e300, math.inf])
def test_a_huge_temperature_takes_every_token_alike_and_none_that_is_impossible(temperature):
    """As a float32 it is infinite, and -inf / inf not a number."""
    logits = torch.tensor([-math.inf, 3.0, -math.inf, 1.0, -9.0])
    drawn = shares(logits, temperature)
    assert torch.allclose(drawn, torch.tensor([0, 1, 0, 1, 1]) / 3, atol=0.03)
    assert shares(logits, temperature, top_k=2)[4] == 0
    model = make(vocab_size=64, n_tokens=50)        # 14 rows that no token has
    assert model.generate(torch.tensor([[3]] * 50), 9, temperature).unique().numel() > 40
