"""
exercises/labs/fingerprint.py: the disguise changes nothing that the model says, and the
fingerprints see through it.
"""
import copy

import pytest
import torch
from conftest import cells, close, make, save

import fingerprint as lab
from engine.files import UserError

SHAPES = {
    'plain': {},
    'grouped, tied, no QK-norm': dict(n_kv_head=2, tie_embeddings=True, qk_norm=False),
    'wide heads': dict(head_dim=16, n_kv_head=1),
}
SEEN = torch.arange(50)  # of the 64 rows of `make`; the others are padding


def small(seed=0, **settings):
    """Two layers of width 64, float64, with norm gains that are not 1."""
    return make(seed, **{**dict(n_layer=2, n_embd=64, mlp_hidden=80), **settings})


def ics(A, B):
    return lab.cosine(lab.terms(A, SEEN), lab.terms(B, SEEN))


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize('shape', SHAPES)
def test_a_disguise_keeps_the_logits_and_no_weight_and_is_seen_through(shape, idx):
    A = small(**SHAPES[shape])
    before = copy.deepcopy(A.state_dict())
    B = lab.disguise(A, seed=5)
    close(B(idx)[0], A(idx)[0])
    for name, p in A.named_parameters():
        assert torch.equal(p, before[name]), name  # A itself is left alone
        if 'q_norm' not in name and 'k_norm' not in name:
            assert not torch.isclose(p, B.get_parameter(name)).all(), name
    assert lab.pcs(A, B) < 0.5
    assert lab.awm(A, B, SEEN)[0] > 0.9999
    assert ics(A, B) > 0.9999
    assert lab.awm(A, B, SEEN, lap=False)[0] < 0.1      # what the assignment is for
    other = small(1, **SHAPES[shape])
    assert lab.awm(A, other, SEEN)[0] < 0.2
    assert abs(ics(A, other)) < 0.2


def hsic(K, L):
    """The textbook's unbiased estimate; the constant in front cancels in a ratio."""
    n = len(K)
    one = torch.ones(n, dtype=K.dtype)
    K = K - K.diag().diag()
    L = L - L.diag().diag()
    sums = (one @ K @ one) * (one @ L @ one) / ((n - 1) * (n - 2))
    return (K @ L).trace() + sums - 2 / (n - 2) * (one @ K @ L @ one)


def test_ucka_is_the_textbooks():
    torch.manual_seed(0)
    X = torch.randn(20, 9, dtype=torch.float64)
    Y = torch.randn(20, 13, dtype=torch.float64) + 0.5
    K, L = X @ X.T, Y @ Y.T
    textbook = hsic(K, L) / (hsic(K, K) * hsic(L, L)).sqrt()
    assert lab.cosine(lab.gram(X), lab.gram(Y)) == pytest.approx(textbook.item(), abs=1e-12)


def test_terms_are_sums_over_heads_standardised():
    A = small(n_kv_head=2, n_layer=3)
    X = A.wte.weight[:20]
    for block, got in zip(A.h[1:], lab.terms(A, SEEN[:20]).split(3)):
        qkv = (block.attn.c_attn.weight * block.ln_1.weight).split(16)      # heads (16, C)
        q, k, v = qkv[:4], qkv[4:6], qkv[6:]
        o = block.attn.c_proj.weight.T.split(16)
        W_a = sum(q[h].T @ k[h // 2] for h in range(4))
        W_b = sum(v[h // 2].T @ o[h] for h in range(4))
        up = block.mlp.c_fc.weight[80:] * block.ln_2.weight
        W_f = up.T @ block.mlp.c_proj.weight.T
        for W, m in zip((W_a, W_b, W_f), got):
            want = X @ W @ X.T
            close(m, (want - want.mean()) / want.std())


def test_layers_in_another_order_are_paired():
    A = small(n_layer=4)
    B = lab.disguise(A)
    B.h = torch.nn.ModuleList(B.h[i] for i in (2, 0, 3))  # and one is missing
    value, pairs = lab.awm(A, B, SEEN)
    assert {(i, j) for i, j, _, _ in pairs} == {(2, 0), (0, 1), (3, 2)}
    assert value > 0.9999


def test_tokens_that_nobody_trained_are_left_out():
    text = torch.tensor([3, 3, 7, 1, 1, 1, 40, 40])
    assert lab.rarest_first(text, 50).tolist() == [7, 3, 40, 1]


def test_the_program(small_data, tmp_path, capsys):
    bytewise = dict(vocab_size=320, n_tokens=257)
    A = small(**bytewise)
    a = save(tmp_path / 'a', copy.deepcopy(A), data_dir=small_data)
    b = save(tmp_path / 'b', lab.disguise(A), data_dir=small_data)
    picture = tmp_path / 'icons.png'
    with torch.enable_grad():
        lab.main([a, b, '--steps=1', '--K=12', f'--out={picture}'])
    out = capsys.readouterr().out
    rows = {row[0]: row[1:] for row in cells(out) if len(row) == 6}
    assert rows['A'][1:] == ['1.000'] * 4
    assert rows['A, disguised'][0] == rows['A'][0] != rows['A, 1 more steps'][0]
    assert ': relatives: ' in out.splitlines()[-2]

    from matplotlib.image import imread
    icons = imread(picture)
    of_A, of_disguised, of_B = icons[:, :128], icons[:, 256:384], icons[:, 512:]
    assert (of_A == of_disguised).mean() > 0.99     # float32 may round a shade another way
    assert of_B.shape == of_A.shape and of_A.std() > 0.1

    few = save(tmp_path / 'few', small(vocab_size=256), 'byte', data_dir=small_data)
    with pytest.raises(UserError, match='byte has 257 tokens'):
        lab.main([a, few])


def test_the_verdict_needs_both_scores():
    assert lab.verdict(0.97, 0.9).startswith('relatives')
    assert lab.verdict(0.04, -0.01).startswith('no kinship')
    assert lab.verdict(0.04, -0.6).startswith('undecided')
    assert lab.verdict(0.9, 0.1).startswith('undecided')
