"""
The fingerprint lab: the disguise changes nothing that the model says, and the fingerprints see
through it.
"""
import copy
import itertools
import os
import runpy
import struct
import sys
import zlib
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, make, save

sys.path.insert(0, os.path.join(ROOT, 'exercises', 'labs'))
import fingerprint as lab
from common import fit, loss_on, own_text, text_loss, warm_up, windows
from model import GPT

SHAPES = {
    'plain': {},
    'grouped, tied': dict(n_kv_head=2, tie_embeddings=True),
    'no QK-norm': dict(qk_norm=False, n_kv_head=2),
    'wide heads': dict(head_dim=16, n_kv_head=1),
}
SEEN = torch.arange(50)  # of the 64 rows of `make`; the others are padding


def small(seed=0, **settings):
    """Two layers of width 64, float64, with norm gains that are not 1."""
    shape = dict(n_layer=2, n_embd=64, n_head=4, mlp_hidden=80)
    return make(seed, **{**shape, **settings})


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def score(A, B, **options):
    value, _ = lab.awm(A, B, SEEN, **options)
    return value


def ics(A, B, product=False, tokens=SEEN):
    return lab.cosine(lab.terms(A, tokens, product), lab.terms(B, tokens, product))


def same_logits(A, B, idx):
    """Of all tokens in use."""
    return torch.allclose(A(idx)[0][..., :50], B(idx)[0][..., :50], atol=1e-10)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


# ---- the attack ----------------------------------------------------------------------------------

@pytest.mark.parametrize('shape', SHAPES)
def test_a_disguise_keeps_the_logits_and_no_weight(shape, idx):
    A = small(**SHAPES[shape])
    before = copy.deepcopy(A.state_dict())
    B = lab.disguise(A, seed=5)
    assert (B(idx)[0] - A(idx)[0])[..., :50].abs().max() < 1e-10

    # it can be saved and loaded
    saved = GPT(B.config).double().eval()
    saved.load_state_dict(B.state_dict())
    assert torch.equal(saved(idx)[0], B(idx)[0])
    assert (B(idx)[0][..., 50:] == -torch.inf).all()

    for name, p in A.named_parameters():
        assert torch.equal(p, before[name]), name  # A itself is left alone
        if 'q_norm' not in name and 'k_norm' not in name:
            assert not torch.isclose(p, B.get_parameter(name)).all(), name
    assert lab.pcs(A, B) < 0.5


def test_another_seed_is_another_disguise():
    A = small()
    one = lab.disguise(A, 1).wte.weight
    assert torch.equal(one, lab.disguise(A, 1).wte.weight)
    assert not torch.isclose(one, lab.disguise(A, 2).wte.weight).any()


@pytest.mark.parametrize('shape', SHAPES)
def test_the_fingerprints_see_through_the_disguise(shape):
    A = small(**SHAPES[shape])
    B = lab.disguise(A, seed=5)
    assert score(A, B) > 0.9999
    assert ics(A, B) > 0.9999
    assert score(A, B, lap=False) < 0.1   # what the assignment is for
    assert ics(A, B, product=True) < 0.8  # the third term of each layer is lost


# ---- AWM -----------------------------------------------------------------------------------------

def ucka(X, Y):
    return lab.cosine(lab.gram(X), lab.gram(Y))


def hsic(K, L):
    """The textbook's unbiased estimate; the constant in front cancels in a ratio."""
    n = len(K)
    one = torch.ones(n, dtype=K.dtype)
    K = K - K.diag().diag()
    L = L - L.diag().diag()
    trace = (K @ L).trace()
    sums = (one @ K @ one) * (one @ L @ one) / ((n - 1) * (n - 2))
    return trace + sums - 2 / (n - 2) * (one @ K @ L @ one)


def test_ucka_is_the_textbooks_and_sees_neither_rotation_nor_scale():
    torch.manual_seed(0)
    X = torch.randn(20, 9, dtype=torch.float64)
    Y = torch.randn(20, 13, dtype=torch.float64) + 0.5
    K, L = X @ X.T, Y @ Y.T
    textbook = hsic(K, L) / (hsic(K, K) * hsic(L, L)).sqrt()
    assert ucka(X, Y) == pytest.approx(textbook.item(), abs=1e-12)

    U = torch.linalg.qr(torch.randn(9, 9, dtype=torch.float64))[0]
    assert ucka(X, 3.7 * X @ U) == pytest.approx(1, abs=1e-12)
    assert ucka(X, X * torch.linspace(0.1, 3, 9)) < 0.97


@pytest.mark.parametrize('size, limit', [
    (64, 0.1),
    (128, 0.05),
])
def test_ucka_of_unrelated_matrices_is_about_0_and_the_biased_one_is_not(size, limit):
    torch.manual_seed(size)
    for _ in range(5):
        X, Y = torch.randn(2, size, size, dtype=torch.float64)
        assert abs(ucka(X, Y)) < limit
        centred = [Z - Z.mean(0) for Z in (X, Y)]
        assert lab.cosine(*[Z @ Z.T for Z in centred]) > 0.4


@pytest.mark.parametrize('n, m', [
    (1, 1),
    (5, 5),
    (4, 6),
    (6, 3),
])
def test_the_assignment_is_the_best_of_all(n, m):
    draw = seeded(n + 10 * m)
    for levels in 20 * [1000, 3]:  # the second has many ties
        cost = torch.randint(-levels, levels, (n, m), generator=draw).float()
        rows, columns = lab.assign(cost)
        assert len(rows) == len(columns) == min(n, m)
        assert len(set(rows.tolist())) == len(set(columns.tolist())) == min(n, m)

        flat = cost if n <= m else cost.T
        short, long = flat.shape
        sums = []
        for choice in itertools.permutations(range(long), short):
            sums.append(flat[range(short), choice].sum())
        assert cost[rows, columns].sum() == min(sums)


@pytest.mark.parametrize('n', [10, 300])
def test_the_alignment_recovers_permutation_and_signs(n):
    torch.manual_seed(n)
    E = torch.randn(n, 48, dtype=torch.float64)
    P = torch.randperm(48)
    D = torch.randn(48).sign()
    disguised = E[:, P] * D * 1.7 + 0.05 * torch.randn(n, 48)
    a, b, sign = lab.align(E, disguised)
    assert torch.equal(a[b.argsort()], P)
    assert torch.equal(sign[b.argsort()], D.double())


def test_layers_in_another_order_are_paired():
    A = small(n_layer=4)
    B = lab.disguise(A)
    B.h = torch.nn.ModuleList(B.h[i] for i in (2, 0, 3))  # and one is missing
    cases = (
        (A, B, {(2, 0), (0, 1), (3, 2)}),
        (B, A, {(0, 2), (1, 0), (2, 3)}),
    )
    for first, second, order in cases:
        value, pairs = lab.awm(first, second, SEEN)
        assert {(i, j) for i, j, _, _ in pairs} == order
        assert value > 0.9999
        assert value == pytest.approx(sum(abs(q) + abs(k) for _, _, q, k in pairs) / 6)


def test_a_narrower_model_is_found_in_a_wider_one():
    """A quarter of the residual stream is cut out: pruning, as far as embeddings, Wq and Wk go."""
    A = small()
    B = small(n_embd=48, head_dim=16)
    keep = torch.randperm(64, generator=seeded(3))[:48]
    B.wte.weight.copy_(A.wte.weight[:, keep])
    for new, old in zip(B.h, A.h):
        new.attn.c_attn.weight.copy_(old.attn.c_attn.weight[:, keep])
        new.ln_1.weight.copy_(old.ln_1.weight[keep])
    other = small(1, n_embd=48, head_dim=16)
    assert score(A, B) > 0.9999
    assert score(B, A) > 0.9999
    assert score(A, other) < 0.15


def test_without_qk_norm_reciprocal_scales_deceive_awm_and_not_the_q_k_term(idx):
    """The gap that the lab names: the logits stay, Wq and Wk differ by more than a rotation."""
    A = small(qk_norm=False)
    B = copy.deepcopy(A)
    scales = torch.randn(4, 1, 8, generator=seeded(0), dtype=torch.float64).exp()
    for block in B.h:
        q, k, _ = block.attn.c_attn.weight.split(64)  # views
        both = scales.expand(4, 2, 8).reshape(64, 1)  # the two of a plane share their scale
        q.mul_(both)
        k.div_(both)
    assert same_logits(A, B, idx)
    assert score(A, B) < 0.9
    M_a = [lab.terms(gpt, SEEN)[::3] for gpt in (A, B)]
    assert lab.cosine(*M_a) > 0.9999


# ---- HuRef ---------------------------------------------------------------------------------------

def residual_edit(gpt, P, D):
    """Only the residual stream of an untied model is permuted and flipped."""
    new = copy.deepcopy(gpt)
    norms = [new.ln_f]
    readers = [new.wte.weight, new.lm_head.weight]
    writers = []
    for block in new.h:
        norms += [block.ln_1, block.ln_2]
        readers += [block.attn.c_attn.weight, block.mlp.c_fc.weight]
        writers += [block.attn.c_proj.weight, block.mlp.c_proj.weight]
    for norm in norms:
        norm.weight.copy_(norm.weight[P])
    for W in readers:
        W.copy_(W[:, P] * D)
    for W in writers:
        W.copy_(W[P] * D[:, None])
    return new


@pytest.mark.parametrize('edit', ['permutation', 'sign flips'])
def test_the_product_of_gate_and_up_survives_a_permutation_and_not_sign_flips(edit, idx):
    """The gap of the release's term for gated MLPs; `up` alone has none."""
    P = torch.arange(64)
    D = torch.ones(64, dtype=torch.float64)
    if edit == 'permutation':
        P = torch.randperm(64, generator=seeded(0))
    else:
        D = D * torch.randn(64, generator=seeded(1)).sign()
    A = small()
    B = residual_edit(A, P, D)
    assert same_logits(A, B, idx)

    M_f = [lab.terms(gpt, SEEN, product=True)[2::3] for gpt in (A, B)]  # of both layers
    likeness = lab.cosine(*M_f)
    if edit == 'permutation':
        assert likeness > 0.9999
    else:
        assert abs(likeness) < 0.5
    assert ics(A, B) > 0.9999


def head(W, h):
    """The rows (16, C) of a head."""
    return W[h * 16:(h + 1) * 16]


def summed_over_heads(left, right):
    """Of the products left(h)^T right(h) of four query heads, (C, C)."""
    return sum((left(h).T @ right(h) for h in range(4)), torch.zeros(64, 64, dtype=torch.float64))


def test_terms_are_sums_over_heads_standardised():
    A = small(n_kv_head=2, n_layer=3)
    X = A.wte.weight[:20]
    found = lab.terms(A, SEEN[:20]).split(3)
    for layer, got in zip(A.h[1:], found):
        qkv = layer.attn.c_attn.weight * layer.ln_1.weight[None]
        q, k, v = qkv[:64], qkv[64:96], qkv[96:]
        o = layer.attn.c_proj.weight.T
        up = layer.mlp.c_fc.weight[80:] * layer.ln_2.weight
        W_a = summed_over_heads(lambda h: head(q, h), lambda h: head(k, h // 2))
        W_b = summed_over_heads(lambda h: head(v, h // 2), lambda h: head(o, h))
        W_f = up.T @ layer.mlp.c_proj.weight.T
        for W, m in zip((W_a, W_b, W_f), got):
            want = X @ W @ X.T
            assert torch.allclose((want - want.mean()) / want.std(), m)


def test_terms_of_models_of_other_shapes_compare():
    other = small(1, n_embd=32, n_head=2, n_layer=3, mlp_hidden=64)
    assert abs(ics(small(), other)) < 0.1


def test_the_parameter_cosine_skips_what_has_no_counterpart():
    A = small()
    B = small(1, mlp_hidden=64, n_layer=3)
    for name, p in B.named_parameters():
        if 'mlp' not in name and 'h.2' not in name:
            p.copy_(A.get_parameter(name))
    assert lab.pcs(A, B) == pytest.approx(1, abs=1e-12)
    assert lab.pcs(A, small(1)) < 0.5


def test_rows_that_nobody_trained_do_not_count():
    A = small()
    B = copy.deepcopy(A)
    text = torch.tensor([3] * 3 + [7] + [1] * 9 + [40] * 2)
    tokens = lab.rarest_first(text, 50)
    assert tokens.tolist() == [7, 40, 3, 1]

    unseen = [i for i in range(64) if i not in tokens]
    B.wte.weight[unseen] = torch.randn(len(unseen), 64, dtype=torch.float64)
    assert torch.equal(lab.terms(A, tokens), lab.terms(B, tokens))
    assert lab.awm(A, B, tokens)[0] == lab.awm(A, A, tokens)[0]


def test_the_numbering_of_tokens_does_not_matter():
    A = small()
    B = copy.deepcopy(A)
    number = torch.randperm(50, generator=seeded(2))
    B.wte.weight[number] = A.wte.weight[:50]  # token i of A is token number[i] of B
    text = torch.arange(50).repeat_interleave(torch.arange(50) + 1)
    tokens_A = lab.rarest_first(text, 50)[:20]
    tokens_B = lab.rarest_first(number[text], 50)[:20]
    assert torch.equal(lab.terms(A, tokens_A), lab.terms(B, tokens_B))
    assert not torch.equal(tokens_A, tokens_B)


# ---- trained models ------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def trained(small_data):
    """Two seeds of a model, A and B, 50 steps on the same text; its windows, and its tokens."""
    settings = dict(data_dir=small_data)
    rows = windows(own_text(settings, 'train', 20000), 24)
    models = []
    for seed in (0, 1):
        gpt = small(seed, vocab_size=320, n_tokens=257, init_std=0.08).train()
        torch.manual_seed(seed)
        with torch.enable_grad():
            fit(gpt.parameters(), lambda i: text_loss(gpt, some(rows)), warm_up(3e-3, 50))
        models.append(gpt.eval())
    A, B = models
    tokens = lab.rarest_first(own_text(settings, 'train', 2 ** 20), 257)
    return SimpleNamespace(A=A, B=B, rows=rows, tokens=tokens)


def some(rows):
    """8 of them."""
    return rows[torch.randint(len(rows), (8,))]


def test_fine_tuned_copies_are_relatives_and_other_seeds_are_not(trained):
    A = trained.A
    with torch.enable_grad():
        copies = lab.relatives(A, trained.rows, lab.FingerprintSettings(steps=20))
    assert list(copies) == [
        'A', 'A, 20 more steps', 'A, disguised', 'A, 20 more steps, disguised']
    _, new, _, both = copies.values()
    models = (new, both, trained.B)

    tuned, disguised, other = [lab.awm(A, gpt, trained.tokens)[0] for gpt in models]
    assert 0.95 < tuned < 0.99999
    assert abs(tuned - disguised) < 0.01
    assert other < 0.2

    tuned, disguised, other = [ics(A, gpt, tokens=trained.tokens[:64]) for gpt in models]
    assert 0.9 < tuned < 0.99999
    assert abs(tuned - disguised) < 0.01
    assert abs(other) < 0.2

    assert lab.pcs(A, new) > 0.95
    assert lab.pcs(A, both) < 0.5


# ---- the picture ---------------------------------------------------------------------------------

def decode(data):
    """Pixels (H, W, 3) of a PNG file without filters, its checksums compared."""
    assert data[:8] == b'\x89PNG\r\n\x1a\n'
    at = 8
    chunks = {}
    while at < len(data):
        n, kind = struct.unpack('>I4s', data[at:at + 8])
        body = data[at + 8:at + 8 + n]
        checksum, = struct.unpack('>I', data[at + 8 + n:at + 12 + n])
        assert checksum == zlib.crc32(kind + body)
        chunks[kind] = body
        at += 12 + n
    assert list(chunks) == [b'IHDR', b'IDAT', b'IEND']

    width, height = struct.unpack('>2I', chunks[b'IHDR'][:8])
    raw = bytearray(zlib.decompress(chunks[b'IDAT']))
    lines = torch.frombuffer(raw, dtype=torch.uint8).view(height, 1 + 3 * width)
    assert not lines[:, 0].any()  # no filter
    return lines[:, 1:].view(height, width, 3)


def test_the_identicon_is_that_of_the_disguised_copy_and_not_of_another_seed():
    A, B = small(), small(1)
    icon = lab.identicon(lab.terms(A, SEEN))
    assert icon.shape == (128, 128, 3)
    assert torch.equal(icon, icon.flip(0))
    assert torch.equal(icon, icon.flip(1))
    assert torch.equal(icon, lab.identicon(lab.terms(lab.disguise(A), SEEN)))
    assert (icon != lab.identicon(lab.terms(B, SEEN))).any(-1).float().mean() > 0.5
    assert len(icon.view(-1, 3).unique(dim=0)) > 4  # no flat patch


def test_the_picture_is_a_png():
    pixels = torch.randint(0, 256, (5, 7, 3), dtype=torch.uint8, generator=seeded(0))
    assert torch.equal(decode(lab.png(pixels)), pixels)


# ---- the program ---------------------------------------------------------------------------------

@pytest.mark.parametrize('awm, similarity, words', [
    (0.97, 0.9, 'relatives'),
    (0.04, -0.01, 'no kinship'),
    (0.04, -0.6, 'undecided'),
    (0.9, 0.1, 'undecided'),
    (0.3, 0.3, 'undecided'),
])
def test_the_verdict_needs_both_scores(awm, similarity, words):
    assert lab.verdict(awm, similarity).startswith(words)


@pytest.fixture
def checkpoint(tmp_path, small_data):
    """checkpoint(name, ...): a folder with a model, as given or with random weights."""
    def write(name, gpt=None, tokenizer='byte', data_dir=small_data, **settings):
        if gpt is None:
            gpt = small(**{**dict(vocab_size=320, n_tokens=257), **settings})
        return save(tmp_path / name, gpt, tokenizer, data_dir=data_dir)
    return write


def numbers(out, name):
    """The numbers in the line of the table that begins with `name`, under their columns' names."""
    line, = [line for line in out.splitlines() if line.startswith(name + '  ')]
    columns = ('loss', 'AWM', 'no LAP', 'ICS', 'gate*up', 'PCS')
    return dict(zip(columns, map(float, line[len(name):].split()), strict=True))


def test_the_lab_is_a_program(checkpoint, trained, small_data, tmp_path, monkeypatch, capsys):
    """In this process; tests/test_labs.py starts it in one of its own."""
    a = checkpoint('a', copy.deepcopy(trained.A))
    b = checkpoint('b', copy.deepcopy(trained.B))
    monkeypatch.chdir(tmp_path)
    args = ['fingerprint.py', a, b, '--steps=3', '--K=12', '--out=icons.png']
    monkeypatch.setattr(sys, 'argv', args)
    with torch.enable_grad():
        runpy.run_path(lab.__file__, run_name='__main__')
    out = capsys.readouterr().out

    A = numbers(out, 'A')
    loss = A.pop('loss')
    assert list(A.values()) == [1] * 5
    held_out = windows(own_text(dict(data_dir=small_data), 'val', 2 ** 16), 24)
    second_half = held_out[len(held_out) // 2:]
    assert loss == pytest.approx(loss_on(trained.A, second_half[:64]), abs=1e-4)

    disguised = numbers(out, 'A, disguised')
    assert disguised['loss'] == loss
    assert disguised['AWM'] == 1
    assert disguised['ICS'] == 1
    assert numbers(out, 'A, 3 more steps')['loss'] != loss
    assert numbers(out, 'A, 3 more steps, disguised')['AWM'] > 0.9

    B = numbers(out, 'B: ' + b)
    awm, similarity = B['AWM'], B['ICS']
    want = ics(trained.A, trained.B, tokens=trained.tokens[:12])
    assert similarity == pytest.approx(want, abs=1e-4)
    assert f'A and B: AWM {awm:.4f}, ICS {similarity:.4f}: no kinship' in out

    icons = decode((tmp_path / 'icons.png').read_bytes())
    assert icons.shape == (128, 5 * 128, 3)
    of_A, of_disguised, of_B = icons[:, :128], icons[:, 256:384], icons[:, 512:]
    assert torch.equal(of_A, of_disguised)
    assert not torch.equal(of_A, of_B)


def test_a_disguised_checkpoint_is_found_out(checkpoint, tmp_path, capsys):
    A = small(vocab_size=320, n_tokens=257)
    a = checkpoint('a', copy.deepcopy(A))
    b = checkpoint('b', lab.disguise(A))
    lab.main([a, b, '--steps=0', f"--out={tmp_path / 'x.png'}"])
    assert ': relatives: ' in capsys.readouterr().out.splitlines()[-2]


GPT2 = dict(tokenizer='gpt2', vocab_size=50304, n_tokens=50257)
WRONG = {  # what is wrong: how a and b are made, further arguments, words of the answer
    'tokenizers': ({}, GPT2, [], 'gpt2'),
    'a vocabulary': ({}, dict(n_tokens=256), [], 'one tokenizer'),
    'a model that ponders': ({}, dict(ponder='loop', ponder_steps=1), [], 'needs a plain GPT'),
    'Depth-Attention': (dict(depth_attn=True), {}, [], 'depth_attn=True'),
    'one layer': ({}, dict(n_layer=1), [], 'the last two'),
    'the data is gone': (dict(data_dir='nowhere'), {}, [], 'nowhere'),
    'K': ({}, {}, ['--K=1'], 'K=1'),
    'steps': ({}, {}, ['--steps=-1'], 'steps=-1'),
    'a picture of another kind': ({}, {}, ['--out=x.jpg'], '.png'),
    'a folder that is not there': ({}, {}, ['--out=nowhere/x.png'], 'no such folder'),
    'a typing error': ({}, {}, ['--step=3'], "did you mean 'steps'"),
}


def answer(capsys, *args):
    """The line that the program ends with."""
    with pytest.raises(lab.UserError) as error:
        lab.main(list(args))
    assert '\n' not in str(error.value)
    assert not capsys.readouterr().out
    return str(error.value)


@pytest.mark.parametrize('what', WRONG)
def test_wrong_input_is_one_line(what, checkpoint, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # gpt2's own would need the network
    monkeypatch.setattr('sample.get_tokenizer', lambda name: SimpleNamespace(name=name, n_vocab=0))
    monkeypatch.setattr('sample.knows_tokens', lambda *_: True)
    of_a, of_b, more, words = WRONG[what]
    a = checkpoint('a', **of_a)
    b = checkpoint('b', **of_b)
    assert words in answer(capsys, a, b, *more)
    assert not list(tmp_path.glob('*.png'))


def test_weights_that_are_no_numbers_and_foreign_data_are_one_line(checkpoint, capsys):
    broken = small(vocab_size=320, n_tokens=257)
    broken.h[1].mlp.c_fc.weight[3, 3] = torch.nan
    assert 'is not finite' in answer(capsys, checkpoint('a'), checkpoint('b', broken))
    few = checkpoint('few', vocab_size=64, n_tokens=50)
    assert 'byte has 257 tokens' in answer(capsys, few, few)
    assert 'two checkpoint folders' in answer(capsys, few)


def test_a_wrong_checkpoint_is_refused_with_status_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['fingerprint.py', 'nowhere', 'neither'])
    with pytest.raises(SystemExit) as left:
        lab.run(lab.main)
    said = capsys.readouterr()
    assert left.value.code == 2
    assert not said.out
    assert said.err.startswith('error: nowhere: no checkpoint here')
    assert said.err.count('\n') == 1
