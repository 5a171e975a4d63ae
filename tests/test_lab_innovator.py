"""The lab on Innovator: what splitting, routing and each stage promise, with a control that breaks each promise."""
import copy
import os
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, make, program, save

sys.path.insert(0, os.path.join(ROOT, 'exercises', 'labs'))
import innovator as lab
from engine.errors import UserError
from engine.shards import get_tokenizer

G = 4
TINY = dict(vocab_size=320, n_tokens=257, block_size=16, n_layer=2)
C, f, L = 32, 48, 2  # of `make`


@pytest.fixture
def base():
    return make(**TINY)


@pytest.fixture
def specialists():
    return [make(seed, **TINY) for seed in (1, 2)]


@pytest.fixture
def mixture(base, specialists):
    torch.manual_seed(3)
    return lab.upcycle(base, specialists, G)


@pytest.fixture
def x():
    return torch.randn(2, 9, C, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def opened(model, a=0.5):
    for block in model.h: block.mlp.a.data.fill_(a)
    return model


def routed(moe, x):
    """What the experts alone give."""
    return (moe(x) - moe.shared(x)) / moe.a


def shard(fc, proj, x):
    gate, up = (x @ fc.t()).chunk(2, -1)
    return (F.silu(gate) * up) @ proj.t()


def test_the_shards_of_an_ffn_sum_to_it_and_none_can_be_spared(base, x):
    mlp = base.h[0].mlp
    fc, proj = lab.split(mlp, G)
    parts = [shard(fc[i], proj[i], x) for i in range(G)]
    assert fc.shape == (G, 2 * f // G, C) and proj.shape == (G, C, f // G)
    assert torch.allclose(sum(parts), mlp(x), atol=1e-12, rtol=0)
    for i in range(G): assert not torch.allclose(sum(parts) - parts[i], mlp(x), atol=1e-3)
    assert not torch.allclose(sum(parts) / G, mlp(x), atol=1e-3)  # what gates that sum to 1 would give
    # shard i owns gate and up rows, and down columns, i h to (i + 1) h
    h = f // G
    for i in range(G):
        rows = torch.arange(i * h, (i + 1) * h)
        assert torch.equal(fc[i], mlp.c_fc.weight[torch.cat((rows, f + rows))]) and torch.equal(proj[i], mlp.c_proj.weight[:, rows])


def test_the_mixture_starts_as_the_dense_model(base, mixture, idx):
    want = base(idx)[0]
    assert (mixture(idx)[0] - want)[..., :257].abs().max() <= 1e-10 and torch.equal(mixture(idx)[0], want)
    assert (opened(mixture)(idx)[0] - want)[..., :257].abs().max() > 1e-2  # it is `a`, not that the experts do nothing
    mixture = lab.upcycle(base, [base, base], G)  # nor that they are copies: ungated, they double the FFN
    assert (opened(mixture, 1.0)(idx)[0] - want)[..., :257].abs().max() > 1e-2


def test_at_first_the_router_picks_a_whole_specialist(mixture, specialists, x):
    moe = opened(mixture).h[1].mlp
    winner = moe.router(x).unflatten(-1, (2, G))[..., 0].argmax(-1)  # (2, 9): which domain
    assert 0 < winner.sum() < winner.numel()
    outputs = torch.stack([specialist.h[1].mlp(x) for specialist in specialists])
    want = outputs.gather(0, winner[None, ..., None].expand(1, *x.shape))[0]
    assert torch.allclose(routed(moe, x), want, atol=1e-10, rtol=0)
    moe.router.weight.data = torch.randn_like(moe.router.weight)  # eight rows of their own: shards of both
    assert not torch.allclose(routed(moe, x), want, atol=1e-2)


@pytest.mark.parametrize('domain', [0, 1])
def test_a_router_that_knows_the_domain_gives_its_ffn(mixture, specialists, x, domain):
    moe, x = opened(mixture).h[0].mlp, x.abs()  # so that a row of ones wins everywhere
    moe.router.weight.data.zero_().view(2, G, C)[domain] = 1
    assert torch.allclose(routed(moe, x), specialists[domain].h[0].mlp(x), atol=1e-10, rtol=0)
    assert not torch.allclose(routed(moe, x), specialists[1 - domain].h[0].mlp(x), atol=1e-2)


def test_the_mixture_is_a_sum_over_the_k_largest(mixture, x):
    moe = opened(mixture, 0.7).h[0].mlp
    torch.nn.init.normal_(moe.router.weight)
    gates, top = lab.route(moe.router(x.flatten(0, 1)), moe.K)
    assert gates.shape == top.shape == (18, G) and all(len(row.unique()) == G for row in top)
    assert torch.allclose(gates.sum(-1), torch.full((18,), float(G), dtype=gates.dtype), atol=1e-12)
    for b, t in ((0, 0), (0, 8), (1, 5)):  # straight from the equations, one token at a time
        token = x[b, t]
        r = moe.router.weight @ token
        chosen = sorted(range(2 * G), key=lambda e: -r[e])[:G]
        total = sum(r[e].exp() for e in chosen)
        y = moe.shared(token) + 0.7 * sum(G * r[e].exp() / total * shard(moe.fc[e], moe.proj[e], token) for e in chosen)
        assert torch.allclose(moe(x)[b, t], y, atol=1e-10, rtol=0)


def test_the_mixture_is_causal_and_generates_with_a_cache(mixture):
    model = opened(mixture)
    idx = torch.randint(0, 257, (2, 12), generator=torch.Generator().manual_seed(5))
    changed = idx.clone()
    changed[:, 7] = (idx[:, 7] + 1) % 257
    with torch.no_grad():
        before, after = model(idx)[0][..., :257], model(changed)[0][..., :257]
        assert torch.allclose(before[:, :7], after[:, :7], atol=1e-12) and not torch.allclose(before[:, 7:], after[:, 7:], atol=1e-3)
        new = model.generate(idx[:, :5], 6, temperature=0)
        assert torch.equal(model(new)[0].argmax(-1)[:, 4:-1], new[:, 5:])


def test_the_balance_term_is_1_when_even_and_n_over_k_when_collapsed():
    N, K = 8, 4
    even = torch.full((6, N), -50.0)
    for t in range(6): even[t, [(t + i) % 2 + 2 * (i % K) for i in range(K)]] = 0.0  # each token K of N, all alike often
    even = torch.cat((even, -50 - even))
    assert torch.equal(lab.loads(even, K), torch.ones(N)) and lab.balance(even, K).item() == pytest.approx(1)
    collapsed = torch.full((6, N), -50.0)
    collapsed[:, 2:2 + K] = 0.0
    assert lab.balance(collapsed, K).item() == pytest.approx(N / K) and lab.loads(collapsed, K).max() == N / K
    # gradient descent on it takes probability from the busy: their logits fall, the others rise
    r = torch.randn(50, N, generator=torch.Generator().manual_seed(0)) + torch.arange(N) * 0.5
    r.requires_grad_(True)
    lab.balance(r, K).backward()
    assert r.grad.sum(0)[-1] > 0 > r.grad.sum(0)[0]


def test_a_shut_gate_gives_the_router_no_gradient(mixture):
    rows = torch.randint(0, 257, (2, 17), generator=torch.Generator().manual_seed(6))
    weights = [block.mlp.router.weight for block in mixture.h]
    for grad in torch.autograd.grad(lab.objective(mixture, rows, 0.0), weights): assert not grad.any()
    for grad in torch.autograd.grad(lab.objective(mixture, rows, 1e-3), weights): assert grad.any()  # the balance term alone
    for grad in torch.autograd.grad(lab.objective(opened(mixture), rows, 0.0), weights):
        assert grad.any() and not torch.allclose(grad[0], grad[1])  # and shards of a domain, tied so far, part


def test_the_balance_term_joins_the_loss_of_every_layer_and_leaves_no_graph_behind(base, mixture):
    rows = torch.randint(0, 257, (2, 17), generator=torch.Generator().manual_seed(6))
    with lab.routers_of(mixture) as seen: loss = mixture(rows[:, :-1], rows[:, 1:])[1]
    assert len(seen) == L and all(r.shape == (32, 2 * G) and K == G for r, K in seen)
    want = loss + 0.3 * sum(lab.balance(r, K) for r, K in seen)
    assert lab.objective(mixture, rows, 0.3).item() == pytest.approx(want.item(), abs=1e-12)
    copy.deepcopy(mixture)  # PyTorch refuses where a module holds a tensor of a graph
    assert not any(m._forward_hooks for m in mixture.modules())
    assert lab.objective(base, rows, 0.3).item() == base(rows[:, :-1], rows[:, 1:])[1].item()  # a dense model has none


def formula(dense, ffn, N, G, router):
    """(all, active) parameters of a mixture of N experts, each 1/G of an FFN, G at work, in terms of a dense model's."""
    return dense + N * ffn // G + router, dense + ffn + router


def test_parameters_are_counted_as_the_papers_are(base, mixture):
    assert lab.sizes(base) == (base.num_params(), base.num_params())
    total, active = formula(base.num_params(), 3 * C * f * L, 2 * G, G, (2 * G * C + 1) * L)  # and an `a` in each layer
    assert lab.sizes(mixture) == (total, active) == (sum(p.numel() for p in mixture.parameters()), active)
    three = lab.upcycle(base, [base] * 3, G)  # N = 3 K, so that K / N and 1 - K / N differ
    assert lab.sizes(three) == formula(base.num_params(), 3 * C * f * L, 3 * G, G, (3 * G * C + 1) * L)
    # Qwen2.5-7B: 28 layers, width 3584, hidden 18944, 7.616B parameters; 64 experts, 8 at work. The paper: 53.3B, 13.3B
    total, active = formula(7_616_000_000, 3 * 3584 * 18944 * 28, 64, 8, 64 * 3584 * 28)
    assert abs(total / 1e9 - 53.3) < 0.1 and abs(active / 1e9 - 13.3) < 0.1
    total, active = formula(7_616_000_000, 3 * 3584 * 18944 * 28, 64, 64, 64 * 3584 * 28)
    assert total / 1e9 < 14  # shards of 1/64 would not fit those numbers


def test_flops_are_those_of_the_active_experts(base, mixture):
    idx = torch.randint(0, 257, (1, 16))
    counted = [lab.flops(lambda: model(idx)) / 16 for model in (base, mixture)]
    assert counted[0] == base.flops_per_token(16, training=False)
    assert counted[1] - counted[0] == 2 * L * (2 * G * C + G * 3 * C * f // G)  # the router, and K shards; not all N


def settings(**changes):
    return lab.InnovatorSettings(**{**dict(induce_steps=2, route_steps=2, joint_steps=3, batch_size=4), **changes})


@pytest.fixture
def data():
    g, first = torch.Generator().manual_seed(7), {'own text': 0, 'C++': 80, 'Unicode': 160}
    return {name: torch.randint(low, low + 80, (40, 17), generator=g) for name, low in first.items()}


def differ(before, model):
    """Names of the tensors that are not those of `before`."""
    return {name for name, p in model.state_dict().items() if not torch.equal(p, before[name])}


def test_each_stage_changes_what_it_should_and_nothing_else(base, data):
    start = copy.deepcopy(base.state_dict())
    seen, cost = {}, {}
    for name, model, spent in lab.stages(base, data, settings(), torch.Generator().manual_seed(0)):
        seen[name], cost[name] = copy.deepcopy(model.state_dict()), spent
        if name.startswith('1'):  # FFNs only: specialists share one attention, bit for bit
            assert differ(start, model) == {f'h.{layer}.mlp.{w}.weight' for layer in range(L) for w in ('c_fc', 'c_proj')}
        if 'mixture' in name: assert all(block.mlp.a.item() == (0.5 if '0.5' in name else 0) for block in model.h)
        if name.startswith('3'):
            learned = {f'h.{layer}.mlp.{w}' for layer in range(L) for w in ('a', 'router.weight')}
            assert differ(seen['   mixture, a = 0.5'], model) == learned
        if name.startswith(('4', 'dense')):
            assert differ(seen['3  router trained'] if name[0] == '4' else start, model) == set(seen[name])
    assert not differ(start, base)
    assert cost['1  specialist, C++'] + cost['1  specialist, Unicode'] == cost['2  mixture, a = 0'] < cost['3  router trained']
    # 9 dense steps; per step, the frozen attention, head and embedding of stage 1 cost no weight gradients
    assert 0 < cost['1  specialist, C++'] / 2 < cost['dense, the same rows'] / 9


def test_the_dense_models_get_equal_data(base, data, monkeypatch):
    fed = []
    monkeypatch.setattr(lab, 'train', lambda model, parameters, batches, rate, alpha, name: fed.append(batches) or 0)
    list(lab.stages(base, data, settings(), torch.Generator().manual_seed(0)))
    cpp, names, routing, joint, same, only = ([tuple(row) for batch in batches for row in batch.tolist()] for batches in fed)
    assert sorted(same) == sorted(cpp + names + routing + joint) and same != cpp + names + routing + joint
    assert len(only) == len(same)
    share = lambda rows, low: sum(low <= row[0] < low + 80 for row in rows) / len(rows)
    assert share(cpp, 80) == share(names, 160) == 1 and share(joint, 0) == share(routing, 0) == 0.5
    assert share(joint, 80) == share(joint, 160) == 0.25 and share(only, 80) == share(only, 160) == 0.5


def test_loads_are_reported_by_domain(mixture):
    for block in mixture.h: block.mlp.router.weight.data.zero_()
    mixture.wte.weight.data[:80], mixture.wte.weight.data[80:] = 1.0, -1.0
    for block in mixture.h:  # own text and C++ (tokens below 80) to the first domain's shards, the rest to the second's
        for part in (block.attn.c_proj, block.mlp.shared.c_proj): part.weight.data.zero_()
        block.ln_2.weight.data.fill_(1.0)
        block.mlp.router.weight.data[:G], block.mlp.router.weight.data[G:] = 1.0, -1.0
    rows = {name: torch.full((3, 17), token) for name, token in (('own text', 3), ('C++', 7), ('Unicode', 200))}
    lines = lab.load_table(mixture, rows).splitlines()
    assert [re.split(r'  +', line) for line in lines if '---' not in line] == [
        ['share of C++ experts in layer', '0', '1'], ['own text', '1.00', '1.00'], ['C++', '1.00', '1.00'], ['Unicode', '0.00', '0.00'],
        ['load of the busiest expert over all, 1 is even', '1.33', '1.33']]


@pytest.fixture(scope='module')
def folders(tmp_path_factory, small_data):
    """Checkpoints: a plain one, one that ponders, and one whose text is gone."""
    made = {}
    loop = dict(ponder='loop', ponder_steps=1)
    for name, changes, data_dir in (('plain', {}, small_data), ('pondering', loop, small_data), ('lost', {}, 'nowhere')):
        made[name] = save(tmp_path_factory.mktemp(name), make(**TINY, **changes), data_dir=data_dir)
    return made


def test_the_lab_is_a_program(folders):
    done = program('exercises/labs/innovator.py', folders['plain'],
                   '--induce_steps=2', '--route_steps=1', '--joint_steps=2', '--batch_size=4')
    lines = {line[:1] if line[:1].isdigit() else re.split(r'  +', line)[0]: re.findall(r'\d+\.\d{4}', line)
             for line in done.stdout.splitlines()}
    assert lines['the checkpoint'] == lines['2'] and len(lines['2']) == 3 and lines['4'] != lines['2']
    assert lines['dense, the same rows'] != lines['dense, new domains only']
    assert 'load of the busiest expert' in done.stdout and 'nan' not in done.stdout


def test_held_out_rows_come_from_documents_of_their_own(small_data, monkeypatch):
    documents = {name: [bytes([low + i]) * 40 for i in range(30)] for name, low in (('C++', 100), ('Unicode', 150))}
    monkeypatch.setattr(lab, 'new_texts', lambda: documents)
    data, held_out = lab.domains(dict(data_dir=small_data), get_tokenizer('byte'), 16, torch.Generator().manual_seed(0))
    assert list(data) == list(held_out) == ['own text', 'C++', 'Unicode']
    for name in documents:
        train, val = (set(rows.flatten().tolist()) - {256} for rows in (data[name], held_out[name]))
        assert len(train) == 27 and len(val) == 3 and not train & val


def test_where_pytorch_has_no_headers(monkeypatch, tmp_path):
    monkeypatch.setattr(lab.torch, '__file__', str(tmp_path / '__init__.py'))
    with pytest.raises(UserError, match='c10: .*install it with pip'): lab.new_texts()


WRONG = {
    'no checkpoint named': ([], 'name one checkpoint folder'),
    'two of them': (['plain', 'plain'], 'name one checkpoint folder'),
    'nothing there': (['nowhere'], 'no checkpoint here'),
    'a pondering model': (['pondering'], "needs a plain GPT, and this one has ponder='loop'"),
    'its text is gone': (['lost'], 'no data set'),
    'shards': (['plain', '--shards=5'], 'shards=5 does not divide .*mlp_hidden=48'),
    'a mix that is no quarters': (['plain', '--batch_size=6'], 'batch_size=6 must be a multiple of 4'),
    'no steps': (['plain', '--joint_steps=0'], 'joint_steps=0 must be positive'),
    'a negative weight': (['plain', '--alpha=-1'], 'alpha=-1.0 must not be negative'),
    'a setting that is none': (['plain', '--shard=2'], "no setting 'shard'; did you mean 'shards'"),
}


@pytest.mark.parametrize('what', WRONG)
def test_wrong_input_is_answered_in_one_line(folders, what):
    args, words = WRONG[what]
    with pytest.raises(UserError, match=words) as error: lab.main([folders.get(arg, arg) for arg in args])
    assert '\n' not in str(error.value)


def test_wrong_input_ends_the_program_with_status_2(folders, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['innovator.py', folders['pondering']])
    with pytest.raises(SystemExit) as left: lab.run(lab.main)
    assert left.value.code == 2
    assert re.fullmatch('error: .*needs a plain GPT.* make one with: python train.py .*\n', capsys.readouterr().err)
