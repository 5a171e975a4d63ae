"""
The lab on Innovator: what splitting, routing and each stage promise, with a control that breaks
each promise.
"""
import copy
import os
import re
import runpy
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, make, save

sys.path.insert(0, os.path.join(ROOT, 'exercises', 'labs'))
import innovator as lab
from engine.files import UserError
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
    return torch.randn(2, 9, C, dtype=torch.float64, generator=seeded(4))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def equal_to(x, y, tolerance=1e-10):
    """Up to an absolute tolerance."""
    return torch.allclose(x, y, rtol=0, atol=tolerance)


def opened(model, a=0.5):
    for block in model.h:
        block.mlp.a.data.fill_(a)
    return model


def routed(moe, x):
    """What the experts alone give."""
    return (moe(x) - moe.shared(x)) / moe.a


def shard(fc, proj, x):
    gate, up = (x @ fc.t()).chunk(2, -1)
    return (F.silu(gate) * up) @ proj.t()


# ---- the mixture of experts ----------------------------------------------------------------------


def test_the_shards_of_an_ffn_sum_to_it_and_none_can_be_spared(base, x):
    mlp = base.h[0].mlp
    fc, proj = lab.split(mlp, G)
    assert fc.shape == (G, 2 * f // G, C)
    assert proj.shape == (G, C, f // G)

    parts = [shard(fc[i], proj[i], x) for i in range(G)]
    total = sum(parts)
    assert equal_to(total, mlp(x), 1e-12)
    for part in parts:
        assert not torch.allclose(total - part, mlp(x), atol=1e-3)
    assert not torch.allclose(total / G, mlp(x), atol=1e-3)  # what gates that sum to 1 would give


def test_a_shard_owns_its_rows_and_columns(base):
    """Shard i has gate and up rows, and down columns, i h to (i + 1) h."""
    mlp = base.h[0].mlp
    fc, proj = lab.split(mlp, G)
    h = f // G
    for i in range(G):
        rows = torch.arange(i * h, (i + 1) * h)
        assert torch.equal(fc[i], mlp.c_fc.weight[torch.cat((rows, f + rows))])
        assert torch.equal(proj[i], mlp.c_proj.weight[:, rows])


def test_the_mixture_starts_as_the_dense_model(base, mixture, idx):
    want = base(idx)[0]
    assert (mixture(idx)[0] - want)[..., :257].abs().max() <= 1e-10
    assert torch.equal(mixture(idx)[0], want)
    # it is `a`, not that the experts do nothing
    assert (opened(mixture)(idx)[0] - want)[..., :257].abs().max() > 1e-2
    # nor that they are copies: ungated, they double the FFN
    doubled = opened(lab.upcycle(base, [base, base], G), 1.0)
    assert (doubled(idx)[0] - want)[..., :257].abs().max() > 1e-2


def test_at_first_the_router_picks_a_whole_specialist(mixture, specialists, x):
    moe = opened(mixture).h[1].mlp
    per_domain = moe.router(x).unflatten(-1, (2, G))[..., 0]
    winner = per_domain.argmax(-1)  # (2, 9): which domain
    assert 0 < winner.sum() < winner.numel()
    first, second = [specialist.h[1].mlp(x) for specialist in specialists]
    want = torch.where(winner[..., None] == 0, first, second)
    assert equal_to(routed(moe, x), want)
    # eight rows of their own: shards of both
    moe.router.weight.data = torch.randn_like(moe.router.weight)
    assert not torch.allclose(routed(moe, x), want, atol=1e-2)


@pytest.mark.parametrize('domain', [0, 1])
def test_a_router_that_knows_the_domain_gives_its_ffn(mixture, specialists, x, domain):
    moe = opened(mixture).h[0].mlp
    x = x.abs()  # so that a row of ones wins everywhere
    moe.router.weight.data.zero_()
    moe.router.weight.data.view(2, G, C)[domain] = 1
    ffns = [specialist.h[0].mlp for specialist in specialists]
    assert equal_to(routed(moe, x), ffns[domain](x))
    assert not torch.allclose(routed(moe, x), ffns[1 - domain](x), atol=1e-2)


def test_gates_sum_to_k(mixture, x):
    moe = opened(mixture, 0.7).h[0].mlp
    torch.nn.init.normal_(moe.router.weight)
    gates, top = lab.route(moe.router(x.flatten(0, 1)), moe.K)
    assert gates.shape == top.shape == (18, G)
    for row in top:
        assert len(row.unique()) == G
    assert torch.allclose(gates.sum(-1), torch.full((18,), float(G), dtype=gates.dtype), atol=1e-12)


@pytest.mark.parametrize('b, t', [(0, 0), (0, 8), (1, 5)])
def test_the_mixture_is_a_sum_over_the_k_largest(mixture, x, b, t):
    """Straight from the equations, one token at a time."""
    moe = opened(mixture, 0.7).h[0].mlp
    torch.nn.init.normal_(moe.router.weight)
    token = x[b, t]
    r = moe.router.weight @ token
    chosen = sorted(range(2 * G), key=lambda e: -r[e])[:G]
    total = sum(r[e].exp() for e in chosen)
    y = moe.shared(token)
    for e in chosen:
        y = y + 0.7 * (G * r[e].exp() / total) * shard(moe.fc[e], moe.proj[e], token)
    assert equal_to(moe(x)[b, t], y)


@torch.no_grad()
def test_the_mixture_is_causal(mixture):
    model = opened(mixture)
    idx = torch.randint(0, 257, (2, 12), generator=seeded(5))
    changed = idx.clone()
    changed[:, 7] = (idx[:, 7] + 1) % 257
    before = model(idx)[0][..., :257]
    after = model(changed)[0][..., :257]
    assert torch.allclose(before[:, :7], after[:, :7], atol=1e-12)
    assert not torch.allclose(before[:, 7:], after[:, 7:], atol=1e-3)


@torch.no_grad()
def test_the_mixture_generates_with_a_cache(mixture):
    model = opened(mixture)
    idx = torch.randint(0, 257, (2, 12), generator=seeded(5))
    new = model.generate(idx[:, :5], 6, temperature=0)
    likeliest = model(new)[0].argmax(-1)
    assert torch.equal(likeliest[:, 4:-1], new[:, 5:])


# ---- the balance term ----------------------------------------------------------------------------

def test_the_balance_term_is_1_when_even_and_n_over_k_when_collapsed():
    N, K = 8, 4
    even = torch.full((6, N), -50.0)
    for t in range(6):  # each token K of N, all alike often
        even[t, [(t + i) % 2 + 2 * (i % K) for i in range(K)]] = 0.0
    even = torch.cat((even, -50 - even))
    assert torch.equal(lab.loads(even, K), torch.ones(N))
    assert lab.balance(even, K).item() == pytest.approx(1)

    collapsed = torch.full((6, N), -50.0)
    collapsed[:, 2:2 + K] = 0.0
    assert lab.balance(collapsed, K).item() == pytest.approx(N / K)
    assert lab.loads(collapsed, K).max() == N / K


def test_gradient_descent_on_the_balance_term_takes_probability_from_the_busy():
    """Their logits fall, the others rise."""
    N, K = 8, 4
    r = torch.randn(50, N, generator=seeded(0)) + torch.arange(N) * 0.5
    r.requires_grad_(True)
    lab.balance(r, K).backward()
    assert r.grad.sum(0)[-1] > 0
    assert r.grad.sum(0)[0] < 0


@pytest.fixture
def rows():
    return torch.randint(0, 257, (2, 17), generator=seeded(6))


def router_gradients(model, rows, alpha):
    weights = [block.mlp.router.weight for block in model.h]
    return torch.autograd.grad(lab.objective(model, rows, alpha), weights)


def test_a_shut_gate_gives_the_router_no_gradient(mixture, rows):
    for gradient in router_gradients(mixture, rows, 0.0):
        assert not gradient.any()
    for gradient in router_gradients(mixture, rows, 1e-3):
        assert gradient.any()  # the balance term alone
    for gradient in router_gradients(opened(mixture), rows, 0.0):
        assert gradient.any()
        # and shards of a domain, tied so far, part
        assert not torch.allclose(gradient[0], gradient[1])


def test_the_balance_term_joins_the_loss_of_every_layer(base, mixture, rows):
    x, y = rows[:, :-1], rows[:, 1:]
    with lab.routers_of(mixture) as seen:
        _, loss = mixture(x, y)
    assert len(seen) == L
    for r, K in seen:
        assert r.shape == (32, 2 * G)
        assert K == G
    want = loss + 0.3 * sum(lab.balance(r, K) for r, K in seen)
    assert lab.objective(mixture, rows, 0.3).item() == pytest.approx(want.item(), abs=1e-12)
    assert lab.objective(base, rows, 0.3).item() == base(x, y)[1].item()  # a dense model has none


def test_the_balance_term_leaves_no_graph_behind(mixture, rows):
    loss = lab.objective(mixture, rows, 0.3)
    assert loss.requires_grad
    copy.deepcopy(mixture)  # PyTorch refuses where a module holds a tensor of a graph
    for module in mixture.modules():
        assert not module._forward_hooks


# ---- what it costs -------------------------------------------------------------------------------

def formula(dense, ffn, N, G, router):
    """
    (all, active) parameters of a mixture of N experts, each 1/G of an FFN, G at work, in terms of a
    dense model's.
    """
    return dense + N * ffn // G + router, dense + ffn + router


def test_parameters_are_counted(base, mixture):
    dense = base.num_params()
    ffn = 3 * C * f * L
    assert lab.sizes(base) == (dense, dense)
    total, active = formula(dense, ffn, 2 * G, G, (2 * G * C + 1) * L)  # an `a` in each layer
    assert lab.sizes(mixture) == (total, active)
    assert total == sum(p.numel() for p in mixture.parameters())

    three = lab.upcycle(base, [base] * 3, G)  # N = 3 K, so that K / N and 1 - K / N differ
    assert lab.sizes(three) == formula(dense, ffn, 3 * G, G, (3 * G * C + 1) * L)


def test_parameters_are_counted_as_the_papers_are():
    """
    Qwen2.5-7B: 28 layers, width 3584, hidden 18944, 7.616B parameters; 64 experts, 8 at work. The
    paper: 53.3B, 13.3B.
    """
    dense = 7_616_000_000
    ffn = 3 * 3584 * 18944 * 28
    router = 64 * 3584 * 28
    total, active = formula(dense, ffn, 64, 8, router)
    assert abs(total / 1e9 - 53.3) < 0.1
    assert abs(active / 1e9 - 13.3) < 0.1
    total, _ = formula(dense, ffn, 64, 64, router)
    assert total / 1e9 < 14  # shards of 1/64 would not fit those numbers


def test_flops_are_those_of_the_active_experts(base, mixture):
    idx = torch.randint(0, 257, (1, 16))
    dense, mixed = [lab.flops(lambda: model(idx)) / 16 for model in (base, mixture)]
    assert dense == base.flops_per_token(16, training=False)
    router, active_shards = 2 * G * C, G * (3 * C * f // G)
    assert mixed - dense == 2 * L * (router + active_shards)  # not all N


# ---- the stages ----------------------------------------------------------------------------------

def settings(**changes):
    fast = dict(induce_steps=2, route_steps=2, joint_steps=3, batch_size=4)
    return lab.InnovatorSettings(**{**fast, **changes})


@pytest.fixture
def data():
    """{domain: rows (40, 17)}, each domain of 80 tokens of its own."""
    draw = seeded(7)
    lowest = {'own text': 0, 'C++': 80, 'Unicode': 160}
    return {name: torch.randint(low, low + 80, (40, 17), generator=draw)
            for name, low in lowest.items()}


def differ(before, after):
    """Names of the tensors of a state dict that are not those of `before`."""
    return {name for name, p in after.items() if not torch.equal(p, before[name])}


@pytest.fixture
def after(base, data):
    """
    {stage: (weights, FLOPs so far)} of all stages. The weights are copies, as models change from
    stage to stage; what each layer's `a` should be is checked on the way.
    """
    found = {}
    for name, model, spent in lab.stages(base, data, settings(), seeded(0)):
        if 'mixture' in name:
            wanted = 0.5 if '0.5' in name else 0
            assert [block.mlp.a.item() for block in model.h] == [wanted] * L
        found[name] = copy.deepcopy(model.state_dict()), spent
    return found


def test_each_stage_changes_what_it_should_and_nothing_else(base, after):
    start = make(**TINY).state_dict()  # as base was
    weights = {name: state for name, (state, _) in after.items()}
    assert not differ(start, base.state_dict())

    # FFNs only: specialists share one attention, bit for bit
    ffns = {f'h.{layer}.mlp.{w}.weight' for layer in range(L) for w in ('c_fc', 'c_proj')}
    assert differ(start, weights['1  specialist, C++']) == ffns
    assert differ(start, weights['1  specialist, Unicode']) == ffns

    routers = {f'h.{layer}.mlp.{w}' for layer in range(L) for w in ('a', 'router.weight')}
    before = weights['   mixture, a = 0.5']
    assert differ(before, weights['3  router trained']) == routers

    before = weights['3  router trained']
    assert differ(before, weights['4  all trained']) == set(before)
    assert differ(start, weights['dense, the same rows']) == set(start)
    assert differ(start, weights['dense, new domains only']) == set(start)


def test_what_each_stage_costs(after):
    cost = {name: spent for name, (_, spent) in after.items()}
    specialists = cost['1  specialist, C++'] + cost['1  specialist, Unicode']
    assert specialists == cost['2  mixture, a = 0'] < cost['3  router trained']
    # 9 dense steps, 2 of the specialist; in a step of stage 1, the frozen attention, head and
    # embedding cost no weight gradients
    assert 0 < cost['1  specialist, C++'] / 2 < cost['dense, the same rows'] / 9


def share(rows, low):
    """Of the rows, those whose tokens are `low` and the next 80."""
    return sum(low <= row[0] < low + 80 for row in rows) / len(rows)


def test_the_dense_models_get_equal_data(base, data, monkeypatch):
    fed = []

    def watched(model, parameters, batches, rate, alpha, name):
        fed.append([tuple(row) for batch in batches for row in batch.tolist()])
        return 0

    monkeypatch.setattr(lab, 'train', watched)
    for _ in lab.stages(base, data, settings(), seeded(0)):
        pass
    cpp, names, routing, joint, same, only_new = fed
    mixture_saw = cpp + names + routing + joint
    assert sorted(same) == sorted(mixture_saw)
    assert same != mixture_saw
    assert len(only_new) == len(same)

    assert share(cpp, 80) == share(names, 160) == 1
    for rows in (routing, joint):
        assert share(rows, 0) == 0.5
    assert share(joint, 80) == share(joint, 160) == 0.25
    assert share(only_new, 80) == share(only_new, 160) == 0.5


def test_loads_are_reported_by_domain(mixture):
    """
    Own text and C++ (tokens below 80) go to the first domain's shards, the rest to the second's.
    """
    mixture.wte.weight.data[:80] = 1.0
    mixture.wte.weight.data[80:] = -1.0
    for block in mixture.h:
        block.attn.c_proj.weight.data.zero_()
        block.mlp.shared.c_proj.weight.data.zero_()
        block.ln_2.weight.data.fill_(1.0)
        block.mlp.router.weight.data[:G] = 1.0
        block.mlp.router.weight.data[G:] = -1.0
    tokens = {'own text': 3, 'C++': 7, 'Unicode': 200}
    rows = {name: torch.full((3, 17), token) for name, token in tokens.items()}
    lines = lab.load_table(mixture, rows).splitlines()
    assert [re.split(r'  +', line) for line in lines if '---' not in line] == [
        ['share of C++ experts in layer', '0', '1'],
        ['own text', '1.00', '1.00'],
        ['C++', '1.00', '1.00'],
        ['Unicode', '0.00', '0.00'],
        ['load of the busiest expert over all, 1 is even', '1.33', '1.33'],
    ]


# ---- the domains ---------------------------------------------------------------------------------

def test_held_out_rows_come_from_documents_of_their_own(small_data, monkeypatch):
    documents = {}
    for name, low in (('C++', 100), ('Unicode', 150)):
        documents[name] = [bytes([low + i]) * 40 for i in range(30)]
    monkeypatch.setattr(lab, 'new_texts', lambda: documents)
    byte = get_tokenizer('byte')
    data, held_out = lab.domains(dict(data_dir=small_data), byte, 16, seeded(0))
    assert list(data) == list(held_out) == ['own text', 'C++', 'Unicode']
    for name in documents:
        train = set(data[name].flatten().tolist()) - {256}
        val = set(held_out[name].flatten().tolist()) - {256}
        assert len(train) == 27
        assert len(val) == 3
        assert not train & val


def test_where_pytorch_has_no_headers(monkeypatch, tmp_path):
    monkeypatch.setattr(lab.torch, '__file__', str(tmp_path / '__init__.py'))
    with pytest.raises(UserError, match='c10: .*install it with pip'):
        lab.new_texts()


# ---- the program ---------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def folders(tmp_path_factory, small_data):
    """Checkpoints: a plain one, one that ponders, and one whose text is gone."""
    loop = dict(ponder='loop', ponder_steps=1)
    kinds = (
        ('plain', {}, small_data),
        ('pondering', loop, small_data),
        ('lost', {}, 'nowhere'),
    )
    made = {}
    for name, changes, data_dir in kinds:
        model = make(**TINY, **changes)
        made[name] = save(tmp_path_factory.mktemp(name), model, data_dir=data_dir)
    return made


def test_the_lab_is_a_program(folders, monkeypatch, capsys):
    """In this process; tests/test_labs.py starts it in one of its own."""
    fast = ['--induce_steps=2', '--route_steps=1', '--joint_steps=2', '--batch_size=4']
    monkeypatch.setattr(sys, 'argv', ['innovator.py', folders['plain'], *fast])
    runpy.run_path(lab.__file__, run_name='__main__')
    out = capsys.readouterr().out

    losses = {}
    for line in out.splitlines():
        name = line[0] if line[:1].isdigit() else re.split(r'  +', line)[0]
        losses[name] = re.findall(r'\d+\.\d{4}', line)
    assert losses['the checkpoint'] == losses['2']
    assert len(losses['2']) == 3
    assert losses['4'] != losses['2']
    assert losses['dense, the same rows'] != losses['dense, new domains only']
    assert 'load of the busiest expert' in out
    assert 'nan' not in out


WRONG = {
    'no checkpoint named': ([], 'name one checkpoint folder'),
    'two of them': (['plain', 'plain'], 'name one checkpoint folder'),
    'nothing there': (['nowhere'], 'no checkpoint here'),
    'a pondering model': (['pondering'], "needs a plain GPT, and this one has ponder='loop'"),
    'its text is gone': (['lost'], 'no data set'),
    'shards': (['plain', '--shards=5'], 'shards=5 does not divide .*mlp_hidden=48'),
    'no quarters': (['plain', '--batch_size=6'], 'batch_size=6 must be a multiple of 4'),
    'no steps': (['plain', '--joint_steps=0'], 'joint_steps=0 must be positive'),
    'a negative weight': (['plain', '--alpha=-1'], 'alpha=-1.0 must not be negative'),
    'a setting that is none': (['plain', '--shard=2'], "no setting 'shard'; did you mean 'shards'"),
}


@pytest.mark.parametrize('what', WRONG)
def test_wrong_input_is_answered_in_one_line(folders, what):
    args, words = WRONG[what]
    with pytest.raises(UserError, match=words) as error:
        lab.main([folders.get(arg, arg) for arg in args])
    assert '\n' not in str(error.value)


def test_wrong_input_ends_the_program_with_status_2(folders, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['innovator.py', folders['pondering']])
    with pytest.raises(SystemExit) as left:
        lab.run(lab.main)
    assert left.value.code == 2
    line = 'error: .*needs a plain GPT.* make one with: python train.py .*\n'
    assert re.fullmatch(line, capsys.readouterr().err)
