"""Generation: what is drawn, when it stops, what it costs, and what happens past the context length."""
import pytest
import torch
from conftest import ONE_EACH, TOGGLES, close, make

from engine.hardware import compile_decoding
from engine.memory import KVCache, StaticCache


def draw(model, prompts, n):
    """n random tokens behind each prompt: the rows, and the logits (B, n, V) each token was drawn from; of rows that run ahead (n B, V)."""
    logits, sample = [], model._sample
    model._sample = lambda given, *options: (logits.append(given), sample(given, *options))[1]
    rows = model.generate(prompts, n, seed=0)
    assert [len(row) for row in rows] == [len(prompt) + n for prompt in prompts]
    assert all(row[:len(prompt)].tolist() == prompt for prompt, row in zip(prompts, rows))
    together = all(len(drawn) == len(prompts) for drawn in logits)
    return [row.tolist() for row in rows], torch.stack(logits, 1) if together else torch.cat(logits)


def close_in_any_order(a, b):
    """The rows of logits (n,V) are the same, those that run ahead of others come earlier."""
    close(*(rows[rows[:, 0].argsort()] for rows in (a, b)))


def test_decoding_equals_recomputing(toggle):
    model = make(**toggle)
    [tokens], logits = draw(model, [[3, 1, 4]], 20)
    close(logits, model(torch.tensor([tokens]))[0][:, 2:-1])  # no position sees what follows it: one pass for all tokens


@pytest.mark.parametrize('name', ['depth', 'loop_depth', 'latent2_depth', 'chain', 'pause', 'gate'])
def test_compiled_decoding_changes_nothing(name, monkeypatch):
    """Prompts of two lengths, past the context: the same tokens and logits, from a few graphs of a few shapes that serve all tokens."""
    model, prompts, graphs, shapes = make(**{**TOGGLES[name], 'block_size': 16, 'n_layer': 3}), [[3, 1, 4], [1, 5, 9, 2, 6]], [], set()
    want, logits = draw(model, prompts, 20)
    compile, count = torch.compile, lambda graph, inputs: (graphs.append(graph), graph.forward)[1]
    monkeypatch.setattr(torch, 'compile', lambda f, mode: compile(f, backend=count))
    torch._dynamo.reset()  # forget what other tests compiled
    compile_decoding(model)
    decode = model.decode_layers
    model.decode_layers = lambda *args: (shapes.add(tuple(args[3].shape[1:])), decode(*args))[1]  # of the mask
    tokens, compiled = draw(model, prompts, 20)
    assert tokens == want
    close(compiled, logits)
    first = len(graphs)
    if name == 'loop_depth': return  # left as it is: what its loops keep would not outlast a CUDA graph
    assert 0 < first <= 6 and len(shapes) <= 2, "one shape for each window of the context"
    draw(model, prompts, 20)
    assert len(graphs) == first


def test_a_token_costs_its_own_slots_whatever_the_context(toggle):
    model = make(**{**toggle, **({'halt_tau': 0.0} if 'halting' in toggle else {})})  # nobody halts; test_halting has the rest
    slots, each = [], []
    model.h[-1].register_forward_pre_hook(lambda m, args: slots.append(args[0].size(1)))
    for token, passes in model.stream(torch.tensor([[3, 1, 4]] * 2), 8):
        each.append((sum(slots), passes.tolist()))
        slots.clear()
    n = toggle['ponder_steps'] + 1 if 'ponder' in toggle else 1
    assert each[1:] == [(n, [n, n])] * 7, "decoding: one slot for each pass or thought"
    if toggle.get('ponder') != 'latent': assert each[0] == (3 * n, [n, n])


def recompute_in_windows(model, tokens, n_prompt, left=0):
    """
    The logits of every token behind the prompt, by the documented rule: when the window of 8 is full, its newer 4 are read
    again as if they were the whole text. The first `left` tokens are padding.
    """
    first, read, parts = 0, n_prompt, []  # tokens[first:read] are read together; there is room to decode up to first + 8
    while read < len(tokens):
        start, end = max(first, left), min(first + 9, len(tokens))
        parts.append(model(torch.tensor([tokens[start:end - 1]]))[0][:, read - start - 1:])
        first, read = end - 4, end
    return torch.cat(parts, 1)


def test_sliding_past_block_size(toggle):
    model = make(**{**toggle, 'block_size': 8})
    slots = []
    hook = model.h[0].register_forward_pre_hook(lambda m, args: slots.append(args[0].size(1)))
    [tokens], logits = draw(model, [[3, 1, 4]], 30)
    hook.remove()
    n = toggle['ponder_steps'] + 1 if 'ponder' in toggle else 1
    if toggle.get('ponder') != 'latent':  # reading a prompt takes Jacobi iterations
        assert sum(slots) < 2 * 33 * n, "reading again costs at most one token's work per token on average"
    close(logits, recompute_in_windows(model, tokens, 3))


@pytest.mark.parametrize('toggle', ONE_EACH)
def test_sliding_with_unequal_prompts(toggle):
    model = make(**{**TOGGLES[toggle], 'block_size': 8})
    prompts = [[3, 1, 4, 1, 5, 9], [2], [7, 1, 8]]
    rows, logits = draw(model, prompts, 20)
    # a short row slides together with the longest: its own first tokens go first only when it has that many
    lefts = [6 - len(prompt) for prompt in prompts]
    want = [recompute_in_windows(model, [0] * left + row, 6, left)[0] for left, row in zip(lefts, rows)]
    close_in_any_order(logits.flatten(0, -2), torch.cat(want))


@pytest.mark.parametrize('toggle', ONE_EACH)
def test_stop_token_cuts_each_row(toggle):
    model, prompts = make(**{**TOGGLES[toggle], 'block_size': 12}), [[3, 1], [7], [4, 4, 2]]
    greedy = [row[len(prompt):].tolist() for row, prompt in zip(model.generate(prompts, 20, temperature=0), prompts)]
    for stop in {row[4] for row in greedy}:
        rows = model.generate(prompts, 20, temperature=0, stop_token=stop)
        cut = [row[:row.index(stop) + 1] if stop in row else row for row in greedy]
        assert [row[len(prompt):].tolist() for row, prompt in zip(rows, prompts)] == cut
        steps = list(model.stream(prompts, 20, temperature=0, stop_token=stop))
        assert len(steps) == max(map(len, cut))
        for i, row in enumerate(cut): assert all(token[i] == stop for token, _ in steps[len(row):])


def test_seed_makes_draws_repeatable():
    model = make()
    draw = lambda seed: model.generate(torch.tensor([[3, 1, 4]] * 4), 12, seed=seed).tolist()
    assert draw(1) == draw(1) != draw(2)
    assert len(set(map(tuple, draw(1)))) > 1, "rows of a batch are drawn independently"


def test_sampling_filters():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -float('inf')]]).expand(4000, 5)
    def shares(**options):
        options = {**dict(temperature=1.0, top_k=None, top_p=None, generator=torch.Generator().manual_seed(0)), **options}
        drawn = make()._sample(logits, **options)
        return torch.bincount(drawn, minlength=5) / 4000
    p = logits[0].softmax(0)
    assert torch.allclose(shares(), p, atol=0.03) and shares()[4] == 0
    assert torch.allclose(shares(top_k=2), torch.cat((p[:2] / p[:2].sum(), torch.zeros(3))), atol=0.03)
    assert shares(top_k=100).count_nonzero() == 4
    # p = 0.64, 0.24, 0.09, 0.03: the first alone reaches 0.6, the first two 0.8
    assert shares(top_p=0.6).tolist() == [1, 0, 0, 0, 0]
    assert shares(top_p=0.8).count_nonzero() == 2 and shares(top_p=1e-9).tolist() == [1, 0, 0, 0, 0]
    assert torch.allclose(shares(temperature=2.0), (logits[0] / 2).softmax(0), atol=0.03)
    assert shares(temperature=0).tolist() == [1, 0, 0, 0, 0]


def test_draws_as_torch_does():
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(1))
    ours = make()._sample(logits, 1.0, None, None, torch.Generator().manual_seed(2))
    assert torch.equal(ours, torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator().manual_seed(2))[:, 0])


def test_padded_vocabulary_is_never_drawn():
    model = make(n_tokens=40)
    assert torch.isinf(model(torch.tensor([[1, 2]]))[0][..., 40:]).all()
    assert model.generate(torch.tensor([[1]] * 50), 20, temperature=50.0, seed=0).max() < 40


def test_refusals():
    model = make()
    with pytest.raises(ValueError, match='empty prompt'): model.generate([[1], []], 3)
    with pytest.raises(ValueError, match='empty prompt'): model.generate([], 3)
    with pytest.raises(ValueError, match='25 tokens.*block_size=24'): model.generate([[1] * 25], 3)
    with pytest.raises(ValueError, match='block_size=24'): model(torch.ones(1, 25, dtype=torch.long))
    for kind, read in (KVCache, 0), (StaticCache, 4):
        cache, model.decode_layers = kind(5, 4), model.layers
        run = lambda n: model.trunk(model.embed(torch.ones(1, n, dtype=torch.long)), torch.arange(n), cache)
        if read: run(read)
        with pytest.raises(ValueError, match='cache holds 4'): run(1 if read else 5)


def test_a_full_prompt_and_no_new_tokens():
    model = make(block_size=6)
    assert model.generate(torch.tensor([[1, 2, 3, 4, 5, 6]]), 3, temperature=0).shape == (1, 9)
    assert model.generate(torch.tensor([[1, 2]]), 0).tolist() == [[1, 2]]


def test_training_mode_and_dropout_are_left_alone():
    model = make(dropout=0.5).train()
    a, b = (model.generate(torch.tensor([[1, 2]]), 8, temperature=0).tolist() for _ in range(2))
    assert a == b and model.training
    stream = model.stream(torch.tensor([[1, 2]]), 8)
    next(stream); stream.close()
    assert model.training


@pytest.mark.parametrize('name', ['depth', 'gate', 'chain', 'mask', 'router'])
def test_compiled_decoding_of_a_prompt_of_one_token(name, monkeypatch):
    monkeypatch.setattr(torch, 'compile', lambda function, mode: function)  # what is compiled is not the point here
    model = make(**TOGGLES[name])
    want = model.generate([[3]], 9, temperature=0)[0].tolist()
    compile_decoding(model)
    assert model.generate([[3]], 9, temperature=0)[0].tolist() == want


@pytest.mark.parametrize('name', ['plain', 'chain'])
def test_a_cache_keeps_no_graph_and_grows_rarely(name):
    model, sizes = make(**TOGGLES[name], block_size=64), set()
    memory = model.new_memory(64)
    for _ in range(64):
        model.hidden(torch.tensor([[3]]), memory)  # with gradients, as outside of inference
        sizes.add(memory[0].k[0].size(2))
    assert not memory[0].k[0].requires_grad and len(sizes) <= 9
