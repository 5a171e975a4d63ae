"""The fingerprint lab: the disguise changes nothing that the model says, and the fingerprints see through it."""
import copy
import itertools
import os
import struct
import sys
import zlib

import pytest
import torch
from conftest import ROOT, make, program, save

sys.path.insert(0, os.path.join(ROOT, 'exercises', 'labs'))
import fingerprint as lab
from common import fit, loss_on, own_text, warm_up, windows
from model import GPT

SHAPES = {'plain': {}, 'grouped, tied': dict(n_kv_head=2, tie_embeddings=True), 'no QK-norm': dict(qk_norm=False, n_kv_head=2),
          'wide heads': dict(head_dim=16, n_kv_head=1)}
SEEN = torch.arange(50)  # of the 64 rows of `make`; the others are padding


def small(seed=0, **settings):
    """Two layers of width 64, float64, with norm gains that are not 1."""
    return make(seed, **{**dict(n_layer=2, n_embd=64, n_head=4, mlp_hidden=80), **settings})


def score(A, B, **options):
    return lab.awm(A, B, SEEN, **options)[0]


def ics(A, B, product=False, tokens=SEEN):
    return lab.cosine(lab.terms(A, tokens, product), lab.terms(B, tokens, product))


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad(): yield


# ---- the attack ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('shape', SHAPES)
def test_a_disguise_keeps_the_logits_and_no_weight(shape, idx):
    A = small(**SHAPES[shape])
    before, B = copy.deepcopy(A.state_dict()), lab.disguise(A, seed=5)
    assert (B(idx)[0] - A(idx)[0])[..., :50].abs().max() < 1e-10
    saved = GPT(B.config).double().eval()
    saved.load_state_dict(B.state_dict())
    assert torch.equal(saved(idx)[0], B(idx)[0]) and (B(idx)[0][..., 50:] == -torch.inf).all()
    for name, p in A.named_parameters():
        assert torch.equal(p, before[name]), name  # A itself is left alone
        if 'q_norm' not in name and 'k_norm' not in name: assert not torch.isclose(p, B.get_parameter(name)).all(), name
    assert lab.pcs(A, B) < 0.5


def test_another_seed_is_another_disguise():
    A = small()
    assert torch.equal(lab.disguise(A, 1).wte.weight, lab.disguise(A, 1).wte.weight)
    assert not torch.isclose(lab.disguise(A, 1).wte.weight, lab.disguise(A, 2).wte.weight).any()


@pytest.mark.parametrize('shape', SHAPES)
def test_the_fingerprints_see_through_the_disguise(shape):
    A = small(**SHAPES[shape])
    B = lab.disguise(A, seed=5)
    assert score(A, B) > 0.9999 and ics(A, B) > 0.9999
    assert score(A, B, lap=False) < 0.1  # what the assignment is for
    assert ics(A, B, product=True) < 0.8  # the third term of each layer is lost


# ---- AWM -------------------------------------------------------------------------------------------------------------

def ucka(X, Y):
    return lab.cosine(lab.gram(X), lab.gram(Y))


def hsic(K, L):
    """The textbook's unbiased estimate; the constant in front cancels in a ratio."""
    n, one = len(K), torch.ones(len(K), dtype=K.dtype)
    K, L = K - K.diag().diag(), L - L.diag().diag()
    return (K @ L).trace() + (one @ K @ one) * (one @ L @ one) / ((n - 1) * (n - 2)) - 2 / (n - 2) * (one @ K @ L @ one)


def test_ucka_is_the_textbooks_and_sees_neither_rotation_nor_scale():
    torch.manual_seed(0)
    X, Y = torch.randn(20, 9, dtype=torch.float64), torch.randn(20, 13, dtype=torch.float64) + 0.5
    K, L = X @ X.T, Y @ Y.T
    assert ucka(X, Y) == pytest.approx((hsic(K, L) / (hsic(K, K) * hsic(L, L)).sqrt()).item(), abs=1e-12)
    U = torch.linalg.qr(torch.randn(9, 9, dtype=torch.float64))[0]
    assert ucka(X, 3.7 * X @ U) == pytest.approx(1, abs=1e-12)
    assert ucka(X, X * torch.linspace(0.1, 3, 9)) < 0.97


@pytest.mark.parametrize('size, limit', [(64, 0.1), (128, 0.05)])
def test_ucka_of_unrelated_matrices_is_about_0_and_the_biased_one_is_not(size, limit):
    torch.manual_seed(size)
    for _ in range(5):
        X, Y = torch.randn(2, size, size, dtype=torch.float64)
        assert abs(ucka(X, Y)) < limit
        centred = [(Z - Z.mean(0)) @ (Z - Z.mean(0)).T for Z in (X, Y)]
        assert lab.cosine(*centred) > 0.4


@pytest.mark.parametrize('n, m', [(1, 1), (5, 5), (4, 6), (6, 3)])
def test_the_assignment_is_the_best_of_all(n, m):
    generator = torch.Generator().manual_seed(n + 10 * m)
    for levels in (1000, 3):  # the second has many ties
        cost = torch.randint(-levels, levels, (n, m), generator=generator).float()
        rows, columns = lab.assign(cost)
        assert len(set(rows.tolist())) == len(set(columns.tolist())) == len(rows) == len(columns) == min(n, m)
        a, b = (cost, range(m)) if n <= m else (cost.T, range(n))
        best = min(sum(a[i, j] for i, j in enumerate(p)) for p in itertools.permutations(b, min(n, m)))
        assert cost[rows, columns].sum() == best


@pytest.mark.parametrize('n', [10, 300])
def test_the_alignment_recovers_permutation_and_signs(n):
    torch.manual_seed(n)
    E, P, D = torch.randn(n, 48, dtype=torch.float64), torch.randperm(48), torch.randn(48).sign()
    a, b, sign = lab.align(E, E[:, P] * D * 1.7 + 0.05 * torch.randn(n, 48))
    assert torch.equal(a[b.argsort()], P) and torch.equal(sign[b.argsort()], D.double())


def test_layers_in_another_order_are_paired():
    A = small(n_layer=4)
    B = lab.disguise(A)
    B.h = torch.nn.ModuleList(B.h[i] for i in (2, 0, 3))  # and one is missing
    for A, B, order in ((A, B, {(2, 0), (0, 1), (3, 2)}), (B, A, {(0, 2), (1, 0), (2, 3)})):
        value, pairs = lab.awm(A, B, SEEN)
        assert {(i, j) for i, j, *_ in pairs} == order and value > 0.9999
        assert value == pytest.approx(sum(abs(q) + abs(k) for *_, q, k in pairs) / 6)


def test_a_narrower_model_is_found_in_a_wider_one():
    """A quarter of the residual stream is cut out: pruning, as far as embeddings, Wq and Wk go."""
    A, B = small(), small(n_embd=48, head_dim=16)
    keep = torch.randperm(64, generator=torch.Generator().manual_seed(3))[:48]
    B.wte.weight.copy_(A.wte.weight[:, keep])
    for new, old in zip(B.h, A.h):
        new.attn.c_attn.weight.copy_(old.attn.c_attn.weight[:, keep])
        new.ln_1.weight.copy_(old.ln_1.weight[keep])
    other = small(1, n_embd=48, head_dim=16)
    for X, Y in ((A, B), (B, A)): assert score(X, Y) > 0.9999
    assert score(A, other) < 0.15


def test_without_qk_norm_reciprocal_scales_deceive_awm_and_not_the_q_k_term(idx):
    """The gap that the lab names: the logits stay, Wq and Wk are not related by a rotation any more."""
    A = small(qk_norm=False)
    B, s = copy.deepcopy(A), torch.randn(4, 1, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).exp()
    for block in B.h:
        q, k, _ = block.attn.c_attn.weight.split(64)  # views
        both = s.expand(4, 2, 8).reshape(64, 1)       # the two of a plane share their scale
        q.mul_(both), k.div_(both)
    assert torch.allclose(A(idx)[0][..., :50], B(idx)[0][..., :50], atol=1e-10)
    assert score(A, B) < 0.9 and lab.cosine(lab.terms(A, SEEN)[::3], lab.terms(B, SEEN)[::3]) > 0.9999


# ---- HuRef -----------------------------------------------------------------------------------------------------------

def residual_edit(gpt, P, D):
    """Only the residual stream of an untied model is permuted and flipped."""
    new = copy.deepcopy(gpt)
    for W in (new.wte.weight, new.lm_head.weight): W.copy_(W[:, P] * D)
    for norm in [new.ln_f] + [norm for block in new.h for norm in (block.ln_1, block.ln_2)]: norm.weight.copy_(norm.weight[P])
    for block in new.h:
        for W in (block.attn.c_attn.weight, block.mlp.c_fc.weight): W.copy_(W[:, P] * D)
        for W in (block.attn.c_proj.weight, block.mlp.c_proj.weight): W.copy_(W[P] * D[:, None])
    return new


def test_the_product_of_gate_and_up_survives_a_permutation_and_not_sign_flips(idx):
    """The gap of the release's term for gated MLPs; `up` alone has none."""
    A, same = small(), torch.ones(64, dtype=torch.float64)
    P = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    D = same * torch.randn(64, generator=torch.Generator().manual_seed(1)).sign()
    for P, D, survives in ((P, same, True), (torch.arange(64), D, False)):
        B = residual_edit(A, P, D)
        assert torch.allclose(A(idx)[0][..., :50], B(idx)[0][..., :50], atol=1e-10)
        M, N = (lab.terms(gpt, SEEN, product=True)[2::3] for gpt in (A, B))  # M_f of both layers
        assert (lab.cosine(M, N) > 0.9999) == survives and (survives or abs(lab.cosine(M, N)) < 0.5)
        assert ics(A, B) > 0.9999


def test_terms_are_sums_over_heads_standardised():
    A = small(n_kv_head=2, n_layer=3)
    M, X, hd, ones = lab.terms(A, SEEN[:20]), A.wte.weight[:20], 16, torch.zeros(64, 64, dtype=torch.float64)
    for layer, got in zip(A.h[1:], M.split(3)):
        qkv = layer.attn.c_attn.weight * layer.ln_1.weight[None]
        q, k, v = qkv[:64], qkv[64:96], qkv[96:]
        head = lambda W, h: W[h * hd:(h + 1) * hd]
        M_a = X @ sum((head(q, h).T @ head(k, h // 2) for h in range(4)), ones) @ X.T
        M_b = X @ sum((head(v, h // 2).T @ head(layer.attn.c_proj.weight.T, h) for h in range(4)), ones) @ X.T
        up = layer.mlp.c_fc.weight[80:] * layer.ln_2.weight
        for want, m in zip((M_a, M_b, X @ up.T @ layer.mlp.c_proj.weight.T @ X.T), got):
            assert torch.allclose((want - want.mean()) / want.std(), m)


def test_terms_of_models_of_other_shapes_compare():
    assert abs(ics(small(), small(1, n_embd=32, n_head=2, n_layer=3, mlp_hidden=64))) < 0.1


def test_the_parameter_cosine_skips_what_has_no_counterpart():
    A, B = small(), small(1, mlp_hidden=64, n_layer=3)
    for name, p in B.named_parameters():
        if 'mlp' not in name and 'h.2' not in name: p.copy_(A.get_parameter(name))
    assert lab.pcs(A, B) == pytest.approx(1, abs=1e-12) and lab.pcs(A, small(1)) < 0.5


def test_rows_that_nobody_trained_do_not_count():
    A = small()
    B, text = copy.deepcopy(A), torch.tensor([3] * 3 + [7] + [1] * 9 + [40] * 2)
    tokens = lab.rarest_first(text, 50)
    assert tokens.tolist() == [7, 40, 3, 1]
    unseen = [i for i in range(64) if i not in tokens]
    B.wte.weight[unseen] = torch.randn(len(unseen), 64, dtype=torch.float64)
    assert torch.equal(lab.terms(A, tokens), lab.terms(B, tokens)) and lab.awm(A, B, tokens)[0] == lab.awm(A, A, tokens)[0]


def test_the_numbering_of_tokens_does_not_matter():
    A = small()
    B, number = copy.deepcopy(A), torch.randperm(50, generator=torch.Generator().manual_seed(2))
    B.wte.weight[number] = A.wte.weight[:50]  # token i of A is token number[i] of B
    text = torch.arange(50).repeat_interleave(torch.arange(50) + 1)
    t_A, t_B = lab.rarest_first(text, 50)[:20], lab.rarest_first(number[text], 50)[:20]
    assert torch.equal(lab.terms(A, t_A), lab.terms(B, t_B)) and not torch.equal(t_A, t_B)


# ---- trained models --------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def trained(small_data):
    """Two seeds of a model, 50 steps on the same text; its windows, and its tokens."""
    rows, models = windows(own_text(dict(data_dir=small_data), 'train', 20000), 24), []
    for seed in (0, 1):
        gpt = small(seed, vocab_size=320, n_tokens=257, init_std=0.08)
        torch.manual_seed(seed)
        with torch.enable_grad(): fit(gpt.train().parameters(), lambda i: gpt(*batch(rows))[1], warm_up(3e-3, 50))
        models.append(gpt.eval())
    return *models, rows, lab.rarest_first(own_text(dict(data_dir=small_data), 'train', 2 ** 20), 257)


def batch(rows):
    chosen = rows[torch.randint(len(rows), (8,))]
    return chosen[:, :-1], chosen[:, 1:]


def test_fine_tuned_copies_are_relatives_and_other_seeds_are_not(trained):
    A, B, rows, tokens = trained
    with torch.enable_grad(): copies = lab.relatives(A, rows, lab.FingerprintSettings(steps=20))
    assert list(copies) == ['A', 'A, 20 more steps', 'A, disguised', 'A, 20 more steps, disguised']
    _, new, _, both = copies.values()
    tuned, disguised, other = (lab.awm(A, gpt, tokens)[0] for gpt in (new, both, B))
    assert 0.95 < tuned < 0.99999 and abs(tuned - disguised) < 0.01 and other < 0.2
    tuned, disguised, other = (ics(A, gpt, tokens=tokens[:64]) for gpt in (new, both, B))
    assert 0.9 < tuned < 0.99999 and abs(tuned - disguised) < 0.01 and abs(other) < 0.2
    assert lab.pcs(A, new) > 0.95 and lab.pcs(A, both) < 0.5


# ---- the picture -----------------------------------------------------------------------------------------------------

def decode(data):
    """Pixels (H, W, 3) of a PNG file without filters, its checksums compared."""
    assert data[:8] == b'\x89PNG\r\n\x1a\n'
    at, chunks = 8, {}
    while at < len(data):
        n, kind = struct.unpack('>I4s', data[at:at + 8])
        chunks[kind] = data[at + 8:at + 8 + n]
        assert struct.unpack('>I', data[at + 8 + n:at + 12 + n])[0] == zlib.crc32(kind + chunks[kind])
        at += 12 + n
    W, H = struct.unpack('>2I', chunks[b'IHDR'][:8])
    lines = torch.frombuffer(bytearray(zlib.decompress(chunks[b'IDAT'])), dtype=torch.uint8).view(H, 1 + 3 * W)
    assert list(chunks) == [b'IHDR', b'IDAT', b'IEND'] and not lines[:, 0].any()
    return lines[:, 1:].view(H, W, 3)


def test_the_identicon_is_that_of_the_disguised_copy_and_not_of_another_seed():
    A, B = small(), small(1)
    icon = lab.identicon(lab.terms(A, SEEN))
    assert icon.shape == (128, 128, 3) and torch.equal(icon, icon.flip(0)) and torch.equal(icon, icon.flip(1))
    assert torch.equal(icon, lab.identicon(lab.terms(lab.disguise(A), SEEN)))
    assert (icon != lab.identicon(lab.terms(B, SEEN))).any(-1).float().mean() > 0.5
    assert len(icon.view(-1, 3).unique(dim=0)) > 4  # no flat patch


def test_the_picture_is_a_png():
    pixels = torch.randint(0, 256, (5, 7, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(decode(lab.png(pixels)), pixels)


# ---- the program -----------------------------------------------------------------------------------------------------

def test_the_verdict_needs_both_scores():
    for scores, words in {(0.97, 0.9): 'relatives', (0.04, -0.01): 'no kinship', (0.04, -0.6): 'undecided', (0.9, 0.1): 'undecided',
                          (0.3, 0.3): 'undecided'}.items():
        assert lab.verdict(*scores).startswith(words), scores


@pytest.fixture
def checkpoint(tmp_path, small_data):
    """checkpoint(name, ...): a folder with a model, as given or with random weights."""
    def write(name, gpt=None, tokenizer='byte', data_dir=small_data, **settings):
        gpt = gpt or small(**dict(dict(vocab_size=320, n_tokens=257), **settings))
        return save(tmp_path / name, gpt, tokenizer, data_dir=data_dir)
    return write


def numbers(out, name):
    """The numbers in the line of the table that begins with `name`."""
    line, = [line for line in out.splitlines() if line.startswith(name + '  ')]
    return [float(x) for x in line[len(name):].split()]


def test_the_lab_is_a_program(checkpoint, trained, small_data, tmp_path):
    A, B, _, tokens = trained
    a, b = checkpoint('a', copy.deepcopy(A)), checkpoint('b', copy.deepcopy(B))
    path = os.path.join(ROOT, 'exercises', 'labs', 'fingerprint.py')
    done = program(path, a, b, '--steps=3', '--K=12', '--out=icons.png', cwd=tmp_path, PYTHONPATH='')
    loss, *same = numbers(done.stdout, 'A')
    held_out = windows(own_text(dict(data_dir=small_data), 'val', 2 ** 16), 24)
    assert same == [1] * 5 and loss == pytest.approx(loss_on(A, held_out[len(held_out) // 2:][:64]), abs=1e-4)
    assert numbers(done.stdout, 'A, disguised')[:2] == [loss, 1] and numbers(done.stdout, 'A, disguised')[3] == 1
    assert numbers(done.stdout, 'A, 3 more steps')[0] != loss and numbers(done.stdout, 'A, 3 more steps, disguised')[1] > 0.9
    _, awm, _, similarity, *_ = numbers(done.stdout, 'B: ' + b)
    assert similarity == pytest.approx(ics(A, B, tokens=tokens[:12]), abs=1e-4)
    assert f'A and B: AWM {awm:.4f}, ICS {similarity:.4f}: no kinship' in done.stdout
    icons = decode((tmp_path / 'icons.png').read_bytes())
    assert icons.shape == (128, 5 * 128, 3)
    assert torch.equal(icons[:, :128], icons[:, 256:384]) and not torch.equal(icons[:, :128], icons[:, 512:])  # A, A disguised; B


def test_a_disguised_checkpoint_is_found_out(checkpoint, tmp_path, capsys):
    A = small(vocab_size=320, n_tokens=257)
    lab.main([checkpoint('a', copy.deepcopy(A)), checkpoint('b', lab.disguise(A)), '--steps=0', f"--out={tmp_path / 'x.png'}"])
    assert ': relatives: ' in capsys.readouterr().out.splitlines()[-2]


WRONG = {  # what is wrong: how a and b are made, further arguments, words of the answer
    'tokenizers': ({}, dict(tokenizer='gpt2', vocab_size=50304, n_tokens=50257), (), 'gpt2'),
    'a vocabulary': ({}, dict(n_tokens=256), (), 'one tokenizer'),
    'a model that ponders': ({}, dict(ponder='loop', ponder_steps=1), (), 'needs a plain GPT'),
    'Depth-Attention': (dict(depth_attn=True), {}, (), 'depth_attn=True'),
    'one layer': ({}, dict(n_layer=1), (), 'the last two'),
    'the data is gone': (dict(data_dir='nowhere'), {}, (), 'nowhere'),
    'K': ({}, {}, ('--K=1',), 'K=1'),
    'steps': ({}, {}, ('--steps=-1',), 'steps=-1'),
    'a picture of another kind': ({}, {}, ('--out=x.jpg',), '.png'),
    'a folder that is not there': ({}, {}, ('--out=nowhere/x.png',), 'no such folder'),
    'a typing error': ({}, {}, ('--step=3',), "did you mean 'steps'"),
}


def answer(capsys, *args):
    """The line that the program ends with."""
    with pytest.raises(lab.UserError) as error: lab.main(list(args))
    assert '\n' not in str(error.value) and not capsys.readouterr().out
    return str(error.value)


@pytest.mark.parametrize('what', WRONG)
def test_wrong_input_is_one_line(what, checkpoint, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr('sample.get_tokenizer', lambda name: type('Named', (), dict(name=name)))  # gpt2 would need the network
    a, b, more, words = WRONG[what]
    assert words in answer(capsys, checkpoint('a', **a), checkpoint('b', **b), *more)
    assert not list(tmp_path.glob('*.png'))


def test_weights_that_are_no_numbers_and_foreign_data_are_one_line(checkpoint, small_data, tmp_path, capsys):
    broken = small(vocab_size=320, n_tokens=257)
    broken.h[1].mlp.c_fc.weight[3, 3] = torch.nan
    assert 'not a number' in answer(capsys, checkpoint('a'), checkpoint('b', broken))
    few = checkpoint('few', vocab_size=64, n_tokens=50)
    assert 'beyond the 50' in answer(capsys, few, few)
    assert 'two checkpoint folders' in answer(capsys, few)


def test_a_wrong_checkpoint_is_refused_with_status_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['fingerprint.py', 'nowhere', 'neither'])
    with pytest.raises(SystemExit) as left: lab.run(lab.main)
    said = capsys.readouterr()
    assert left.value.code == 2 and not said.out
    assert said.err.startswith('error: nowhere: no checkpoint here') and said.err.count('\n') == 1
