"""
Lab: whose weights are these? HuRef (arXiv 2312.04828) and AWM (arXiv 2510.06738) know a model by
its weights alone.

    python exercises/labs/fingerprint.py out/a out/b

Is one made from the other? Give plain checkpoints of one tokenizer; 1 minute.

Fine-tuning hardly moves the weights, so the cosine of all parameters (PCS) betrays a copy. But a
thief can `disguise` it for free: permute and flip the residual stream, turn heads, shuffle hidden
units. Every logit stays, the cosine goes. Both methods compare what such edits cannot change.
Weights are out x in, E is the embedding table:

    HuRef   M_a = X Wq^T Wk X^T    M_b = X Wv^T Wo^T X^T    M_f = X Wup^T Wdown^T X^T
            X: rows of E, the K rarest tokens    M: (K, K), of any model
            ICS = cosine of the M of the last two layers, each standardised

    AWM     RMSNorm lets one do nothing to the residual stream but permute it (P), flip signs (D)
            and scale it, so (the paper's theorems)
            E_B ~ c E_A P D  and  W_B ~ c' U W_A P D  for W = Wq, Wk, with U orthogonal
            P, D: the assignment (LAP) of columns of E_A to columns of E_B with a large sum of
            |cosine|
            score = mean of |UCKA((W_A P D)^T, W_B^T)| over layers, Wq and Wk
            UCKA, unbiased linear CKA, sees no U and no c'

It shows: copies of out/a that are disguised, fine-tuned, or both score as relatives; out/b, an
independent seed, does not. "no LAP" is AWM without P and D.

                                    loss     AWM  no LAP     ICS     PCS
    A                             1.6470  1.0000  1.0000  1.0000  1.0000
    A, 200 more steps             1.4366  0.9723  0.9723  0.8753  0.9801
    A, disguised                  1.6470  1.0000  0.0134  1.0000  0.1284
    A, 200 more steps, disguised  1.4366  0.9722  0.0130  0.8753  0.1250
    B                             1.6326  0.0366  0.0144  0.0061  0.3091

B's PCS is that high because all norm gains are near 1. Seeds 1337 and 1, one pair: 4 layers of
width 128, 600 steps of 512 tokens by config/vanilla.py, which then read them in another order;
2026-11-21, 30 s of work for one of two cores of an Intel Xeon at 2.5 GHz. A third model, with A's
seed and another learning rate, has AWM 0.70 and ICS 0.35: it shares A's initial weights, and runs
this short still show them. The papers' models train too long for that.

The picture: HuRef draws a dog, by a trained encoder and StyleGAN2, and proves in zero knowledge
that the drawing is honest. Here is none of that, but an identicon: 64 block means of the terms,
mirrored. It shows likeness to the eye, hides nothing, proves nothing.

Other than in the papers and their code (LUMIA-Group/HuRef and /AWM; HuRef's text was not at hand,
its equations are its code's):

- M_f has Wup alone. HuRef's release multiplies gate and up, where D squares away: sign flips of the
  residual stream then hide a copy.
- Norm gains are folded into the weights that read them, as moving them there is free.
- K is 64 of the tokens that occur, not 4096: a row that was never trained ties a model to its seed.
- Absolute values of UCKA are the AWM paper's, not its code's.
- Layers are always paired by a second assignment, in the code only if their numbers differ.
- The verdict has two thresholds of ours, the paper a Z-score over 90 independent pairs.
- `assign` takes the best pair first, then the best of the rest. The papers take the pairs with the
  largest sum of all, as SciPy has them: the same pairs for relatives, hardly other scores.

Not shown: pruning, upcycling, long continued training, where AWM's paper finds ICS weak and AWM
strong. Neither method sees distillation, a new embedding table, or theft of other matrices.
Without QK-norm, a rotary plane of Wq times s and of Wk divided by s is free: AWM falls, M_a does
not. With it, a head's Wq may have (nearly) any scale, which lowers both a little.
"""
import copy
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector

from common import load_plain, loss_on, own_text, start, tuned, windows
from configurator import check_range
from engine.files import UserError, run, table
from model import RMSNorm, apply_rope


@dataclass
class FingerprintSettings:
    """what to compare, and the copies to make"""
    K: int = 64                   # HuRef compares A's rarest tokens (bytes: 64, BPE: 512 to 2048)
    steps: int = 200              # training of the fine-tuned copy; 0 makes none
    seed: int = 0                 # of the disguise, and of the order of the fine-tuning text
    out: str = 'fingerprint.png'  # the picture

    def __post_init__(self):
        check_range(self, 2, math.inf, 'K')
        check_range(self, 0, math.inf, 'steps')
        check_range(self, 0, 2 ** 31 - 1, 'seed')


# ---- what both methods read ----------------------------------------------------------------------

def layers(gpt):
    """
    The matrices of each layer (q, k, v, o, up, down), out x in: norm gains folded into those that
    read them, and a key or value head once for each of its query heads.
    """
    config = gpt.config
    heads = (config.n_head, config.n_kv_head, config.n_kv_head)
    for block in gpt.h:
        qkv = block.attn.c_attn.weight * block.ln_1.weight
        parts = qkv.unflatten(0, (-1, config.head_dim)).split(heads)        # 3 of (heads, hd, C)
        q, k, v = [W.repeat_interleave(config.n_head // len(W), 0).flatten(0, 1) for W in parts]
        _, up = (block.mlp.c_fc.weight * block.ln_2.weight).chunk(2)        # (mlp_hidden, C)
        # q, k, v: (nh hd, C); o: (C, nh hd); down: (C, mlp_hidden)
        yield q, k, v, block.attn.c_proj.weight, up, block.mlp.c_proj.weight


def cosine(x, y):
    """Of two tensors of one shape, as long vectors; of terms it is HuRef's ICS."""
    return F.cosine_similarity(x.flatten(), y.flatten(), dim=0).item()


def rarest_first(text, n):
    """
    The tokens of `text` that occur at all, out of n, by frequency; so their numbering does not
    matter.
    """
    counts = torch.bincount(text, minlength=n)
    order = counts.argsort(stable=True)
    return order[counts[order] > 0]


# ---- HuRef ---------------------------------------------------------------------------------------

def terms(gpt, tokens):
    """HuRef's invariant terms of the last two layers, standardised: (6, K, K) for K tokens."""
    X = gpt.wte.weight[tokens]                                              # (K, C)
    M = []
    for q, k, v, o, up, down in list(layers(gpt))[-2:]:
        W_a = q.T @ k                                                       # (C, C): heads summed
        W_b = v.T @ o.T                                                     # (C, C)
        W_f = up.T @ down.T                                                 # (C, C)
        M += [X @ W_a @ X.T, X @ W_b @ X.T, X @ W_f @ X.T]
    M = torch.stack(M)                                                      # (6, K, K)
    mean = M.mean((1, 2), keepdim=True)
    return (M - mean) / M.std((1, 2), keepdim=True)


# ---- AWM -----------------------------------------------------------------------------------------

def gram(X):
    """
    X (n, p) -> its Gram matrix (n, n), that of X U too, centred as if the diagonal, much alike for
    all X, were not there. The cosine of two such is UCKA.
    """
    n = len(X)
    G = (X @ X.T).fill_diagonal_(0)
    m = G.sum(0) / (n - 2)
    m = m - m.sum() / (2 * (n - 1))
    return (G - m[:, None] - m).fill_diagonal_(0)


def align(E_A, E_B):
    """
    AWM's LAP, for E_A (tokens, C_A) and E_B (tokens, C_B): indices a, b and signs, so that
    E_A[:, a] * sign ~ E_B[:, b].
    """
    cosines = F.normalize(E_A, dim=0).T @ F.normalize(E_B, dim=0)           # (C_A, C_B)
    a, b = assign(-cosines.abs())
    return a, b, cosines[a, b].sign()


def grams(gpt, columns, sign):
    """
    The Gram matrices of each layer's Wq and Wk as unit vectors (L, 2, n n): UCKA is the product of
    two. Their n rows are those dimensions of the residual stream that `columns` names, each times
    its sign.
    """
    found = []
    for q, k, *_ in layers(gpt):
        found += [gram((W[:, columns] * sign).T) for W in (q, k)]
    return F.normalize(torch.stack(found).flatten(1)).unflatten(0, (-1, 2))


def awm(A, B, tokens, lap=True):
    """
    AWM of two models over shared `tokens`: the score, and the paired layers as
    (layer of A, layer of B, UCKA of Wq, of Wk).
    """
    E_A, E_B = A.wte.weight[tokens], B.wte.weight[tokens]
    if lap:
        columns_A, columns_B, sign = align(E_A, E_B)
    else:
        columns_A = columns_B = slice(min(E_A.size(1), E_B.size(1)))
        sign = 1
    of_A, of_B = grams(A, columns_A, sign), grams(B, columns_B, 1)
    ucka = torch.einsum('iwn,jwn->ijw', of_A, of_B)                         # (L_A, L_B, 2)
    layers_A, layers_B = assign(-ucka.abs().sum(-1))
    score = ucka[layers_A, layers_B].abs().mean().item()
    return score, [(i, j, *ucka[i, j].tolist()) for i, j in zip(layers_A, layers_B)]


def assign(cost):
    """
    Rows and columns of cost (n, m), two lists, none twice: the cheapest pair first, then the
    cheapest of those whose row and column are free.
    """
    cost = cost.clone()
    rows, columns = [], []
    for _ in range(min(cost.shape)):
        row, column = divmod(cost.argmin().item(), cost.size(1))
        cost[row], cost[:, column] = math.inf, math.inf
        rows.append(row)
        columns.append(column)
    return rows, columns


# ---- the attack ----------------------------------------------------------------------------------

@torch.no_grad()
def disguise(gpt, seed=0):
    """
    A copy of a plain GPT with other weights and the same logits. The residual stream x becomes
    c x P D; inside a layer change what cancels: norm gain and readers, Wq and Wk, Wv and Wo, up and
    down. Exact, as norm_eps changes with c.
    """
    new = copy.deepcopy(gpt)
    edit = Disguise(new, seed)
    edit.ends(new)
    for norm in new.modules():
        if isinstance(norm, RMSNorm):
            norm.eps *= edit.c ** 2     # then rms(c x) is c rms(x)
    new.config.norm_eps *= edit.c ** 2
    for block in new.h:
        gains = edit.normal(2, new.config.n_embd).mul(0.3).exp()            # (2, C), around 1
        for norm, gain in zip((block.ln_1, block.ln_2), gains):
            norm.weight.copy_(norm.weight[edit.P] * gain)
        edit.attention(block.attn, gains[0])
        edit.mlp(block.mlp, gains[1])
    return new


class Disguise:
    """What one disguise draws: P and D for the whole model, and the rest part by part."""
    c = 1.7

    def __init__(self, gpt, seed):
        self.config = gpt.config
        self.dtype = gpt.wte.weight.dtype
        self.draw = torch.Generator().manual_seed(seed)
        self.P = torch.randperm(self.config.n_embd, generator=self.draw)
        self.D = self.normal(self.config.n_embd).sign()

    def normal(self, *shape):
        return torch.randn(shape, generator=self.draw).to(self.dtype)

    def reads(self, W):
        """A matrix (out, C) that reads the residual stream -> W P D."""
        return W[:, self.P] * self.D

    def writes(self, W):
        """A matrix (C, in) that writes to it -> c (P D)^T W."""
        return self.c * W[self.P] * self.D[:, None]

    def ends(self, gpt):
        """The embedding table, the output head, and the norm between trunk and head."""
        gpt.wte.weight.copy_(self.c * self.reads(gpt.wte.weight))
        gpt.ln_f.weight.copy_(gpt.ln_f.weight[self.P])
        if self.config.tie_embeddings:
            gpt.ln_f.weight /= self.c
        else:
            gpt.lm_head.weight.copy_(self.reads(gpt.lm_head.weight))

        # padded rows are never read, or masked: put anything there
        padding = self.config.vocab_size - self.config.n_tokens
        for part in (gpt.wte, gpt.lm_head):
            anything = part.weight.std() * self.normal(padding, self.config.n_embd)
            part.weight[self.config.n_tokens:] = anything

    def attention(self, attn, gain):
        """`gain` (C,) is what the norm in front multiplies by now, so the weights divide by it."""
        nh, nkv, hd = self.config.n_head, self.config.n_kv_head, self.config.head_dim
        shared = nh // nkv                                                  # queries per key head
        qkv = self.reads(attn.c_attn.weight) / gain
        q, k, v = qkv.unflatten(0, (-1, hd)).split((nh, nkv, nkv))          # (heads, hd, C)

        # queries and keys: turned together
        angle = math.pi * self.normal(nkv, hd // 2)
        if self.config.qk_norm:
            # between Wq and the rotation stand gains, with which half turns alone commute,
            # and an eps that grew
            angle = (1 + angle.sign()) * math.pi / 2
            q, k = self.c * q, self.c * k
        q = turn(q, angle.repeat_interleave(shared, 0))
        k = turn(k, angle)

        # values: any R that can be inverted, and its inverse in the output projection
        rotation = torch.linalg.qr(self.normal(nkv, hd, hd))[0]
        R = rotation * self.normal(nkv, 1, hd).mul(0.3).exp()               # (nkv, hd, hd)
        o = self.writes(attn.c_proj.weight)                                 # (C, nh hd)
        o = o.unflatten(1, (nh, hd)).transpose(0, 1)                        # (nh, C, hd)
        o = o @ R.inverse().repeat_interleave(shared, 0)

        attn.c_attn.weight.copy_(torch.cat((q, k, R @ v)).flatten(0, 1))
        attn.c_proj.weight.copy_(o.transpose(0, 1).flatten(1))

    def mlp(self, mlp, gain):
        """Hidden units in another order, and `up` times s where `down` is divided by it."""
        hidden = self.config.mlp_hidden
        order = torch.randperm(hidden, generator=self.draw)
        s = self.normal(hidden).exp()
        gate, up = (self.reads(mlp.c_fc.weight) / gain).chunk(2)            # (hidden, C)
        mlp.c_fc.weight.copy_(torch.cat((gate[order], up[order] * s[:, None])))
        mlp.c_proj.weight.copy_(self.writes(mlp.c_proj.weight)[:, order] / s)


def turn(W, angle):
    """Turn each rotary plane (i, i + hd / 2) of rows (heads, hd, C) by angle (heads, hd / 2)."""
    return apply_rope(W.mT, angle.cos()[:, None], angle.sin()[:, None]).mT


# ---- the comparison ------------------------------------------------------------------------------

def pcs(A, B):
    """HuRef's parameter cosine similarity: of all with the same name and shape, as they are."""
    theirs = dict(B.named_parameters())
    pairs = [(p, theirs[name]) for name, p in A.named_parameters() if name in theirs]
    of_A, of_B = zip(*[(p, q) for p, q in pairs if p.shape == q.shape])
    return cosine(parameters_to_vector(of_A), parameters_to_vector(of_B))


def verdict(score, similarity):
    """What AWM's score and the ICS mean, in one sentence."""
    if min(score, similarity) > 0.5:
        return "relatives: one was made from the other, or both from a third"
    if max(score, abs(similarity)) < 0.2:
        return "no kinship to be seen: as far apart as models trained independently"
    return ("undecided: a score lies between 0.2 and 0.5, or the two disagree; "
            "compare with models known to be independent")


def identicon(M):
    """
    Terms M (6, K, K) -> (16, 16), from -1 to 1: 64 block means, standardised, in 9 shades, mirrored
    twice.
    """
    means = torch.stack([block.mean() for block in M.flatten().tensor_split(64)])
    standard = (means - means.mean()) / means.std()
    shade = standard.mul(2).round().clamp(-4, 4).div(4).view(8, 8)
    shade = torch.cat((shade, shade.flip(1)), 1)
    return torch.cat((shade, shade.flip(0)))


@torch.no_grad()
def compare(models, tokens, rows, s):
    """
    Print how each of models {name: gpt} relates to the first, and what that means for the last;
    write the picture. tokens: rarest first; rows (n, T + 1): the text that losses are of.
    """
    M = {name: terms(gpt, tokens[:s.K]) for name, gpt in models.items()}
    A = models['A']
    lines = []
    for name, gpt in models.items():
        score, pairs = awm(A, gpt, tokens)
        unaligned, _ = awm(A, gpt, tokens, lap=False)
        ics = cosine(M['A'], M[name])
        lines.append((name, loss_on(gpt, rows), score, unaligned, ics, pcs(A, gpt)))
    print(table(('', 'loss', 'AWM', 'no LAP', 'ICS', 'PCS'), lines))

    # the last of them is B
    print('\n' + table(('layer of A', 'layer of B', 'UCKA of Wq', 'of Wk'), pairs))
    print(f"\nA and B: AWM {score:.4f}, ICS {ics:.4f}: {verdict(score, ics)}")

    try:
        from matplotlib.image import imsave
    except ImportError:
        raise UserError(f"{s.out}: pictures need pip install matplotlib") from None
    icons = torch.cat([identicon(m) for m in M.values()], 1)
    pixels = icons.repeat_interleave(8, 0).repeat_interleave(8, 1)
    imsave(s.out, pixels.numpy(), cmap='bwr', vmin=-1, vmax=1)              # blue, white, red
    print(f"{s.out}: the identicons of the first table's rows, from left to right")


def main(argv):
    s, folders = start(argv, __doc__, FingerprintSettings, folders=2)
    A, tokenizer, settings = load_plain(folders[0])
    B, other, _ = load_plain(folders[1])
    n = A.config.n_tokens
    if (tokenizer.name, n) != (other.name, B.config.n_tokens):
        raise UserError(
            f"{folders[0]} has {n} tokens of {tokenizer.name}, "
            f"{folders[1]} {B.config.n_tokens} of {other.name}: "
            "give two checkpoints of one tokenizer")

    # A's text; one half of the validation text to fine-tune on, the loss is that of the other half
    T = min(A.config.block_size, B.config.block_size)
    text = own_text(settings, 'train', 2 ** 20, tokenizer)
    rows = windows(own_text(settings, 'val', 2 ** 16, tokenizer), T)        # (n, T + 1)
    half = len(rows) // 2

    models = {'A': A}
    if s.steps:
        name = f'A, {s.steps} more steps'
        models[name] = tuned('fine-tuning', A, rows[:max(1, half)], 1e-3, s.steps, s.seed)
    for name, gpt in list(models.items()):
        models[name + ', disguised'] = disguise(gpt.double(), s.seed)
    models['B: ' + folders[1]] = B.double()
    compare(models, rarest_first(text, n), rows[half:][:64], s)


if __name__ == '__main__':
    run(main)
