"""
Lab: whose weights are these? HuRef (arXiv 2312.04828) and AWM (arXiv 2510.06738) know a model by its weights alone.

    python exercises/labs/fingerprint.py out/a out/b        is one made from the other? Plain checkpoints of one tokenizer; 1 minute

Fine-tuning hardly moves the weights, so the cosine of all parameters (PCS) betrays a copy. But a thief can `disguise` it for free:
permute and flip the residual stream, turn heads, shuffle hidden units. Every logit stays, the cosine goes. Both methods compare
what such edits cannot change. Weights are out x in, E is the embedding table:

    HuRef   M_a = X Wq^T Wk X^T    M_b = X Wv^T Wo^T X^T    M_f = X Wup^T Wdown^T X^T     X: rows of E, the K rarest tokens
            ICS = cosine of the M of the last two layers, each standardised               M: (K, K), of any model
    AWM     RMSNorm lets one do nothing to the residual stream but permute it (P), flip signs (D) and scale it, so
            E_B ~ c E_A P D  and  W_B ~ c' U W_A P D  for W = Wq, Wk, with U orthogonal (the paper's theorems)
            P, D: the assignment (LAP) of columns of E_A to columns of E_B with the largest sum of |cosine|
            score = mean of |UCKA((W_A P D)^T, W_B^T)| over layers, Wq and Wk; UCKA, unbiased linear CKA, sees no U and no c'

It shows: copies of out/a that are disguised, fine-tuned, or both score as relatives; out/b, an independent seed, does not. "no LAP"
is AWM without P and D. "gate*up" is the ICS with M_f as HuRef's release has it for gated MLPs: D squares away, and M_f is lost.

                                    loss     AWM  no LAP     ICS  gate*up     PCS
    A                             1.6470  1.0000  1.0000  1.0000   1.0000  1.0000
    A, 200 more steps             1.4366  0.9723  0.9723  0.8753   0.8712  0.9801
    A, disguised                  1.6470  1.0000  0.0134  1.0000   0.6466  0.1284
    A, 200 more steps, disguised  1.4366  0.9722  0.0130  0.8753   0.5654  0.1250
    B                             1.6326  0.0366  0.0144  0.0061   0.0033  0.3091    (PCS: all norm gains are near 1)

Seeds 1337 and 1, one pair: 4 layers of width 128, 600 steps of 512 tokens by config/vanilla.py; 2026-11-21, 30 s of work for one of
two cores of an Intel Xeon at 2.5 GHz. A third model, with A's seed and another learning rate, has AWM 0.70 and ICS 0.35: it shares
A's initial weights, and runs this short still show them. The papers' models train too long for that.

The picture: HuRef draws a dog, by a trained encoder and StyleGAN2, and proves in zero knowledge that the drawing is honest. Here is
none of that, but an identicon: 64 block means of the terms, mirrored. It shows likeness to the eye, hides nothing, proves nothing.

Other than in the papers and their code (LUMIA-Group/HuRef and /AWM; HuRef's text was not at hand, its equations are its code's):
norm gains are folded into the weights that read them, as moving them there is free. K is 64 of the tokens that occur, not 4096: a
row that was never trained ties a model to its seed. Absolute values of UCKA are the AWM paper's, not its code's. Layers are always
paired by a second assignment, in the code only if their numbers differ. The verdict has two thresholds of ours, the paper a Z-score
over 90 independent pairs. `assign` is 20 lines to read in place of SciPy, which would be one more package.

Not shown: pruning, upcycling, long continued training, where AWM's paper finds ICS weak and AWM strong. Neither method sees
distillation, a new embedding table, or theft of other matrices. Without QK-norm, a rotary plane of Wq times s and of Wk divided
by s is free: AWM falls, M_a does not. With it, a head's Wq may have (nearly) any scale, which lowers both a little. Exercise: add
that to `disguise`, and mend the scores. Another: what is the CKA of two random matrices without `gram`'s care for the diagonal?
"""
import copy
import math
import os
import struct
import zlib
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from common import fit, load_plain, loss_on, own_text, table, warm_up, windows
from configurator import build, read
from engine.errors import UserError, run
from engine.shards import on_disk
from model import RMSNorm


@dataclass
class FingerprintSettings:
    """what to compare, and the copies to make"""
    K: int = 64                         # HuRef: the rarest tokens of A's text that it compares (bytes: 64, BPE: 512 to 2048)
    steps: int = 200                    # training of the fine-tuned copy; 0 makes none
    seed: int = 0                       # of the disguise, and of the order of the fine-tuning text
    out: str = 'fingerprint.png'        # the picture

    def __post_init__(self):
        if self.K < 2 or self.steps < 0: raise ValueError(f"K={self.K} must be at least 2, steps={self.steps} not negative")
        if not self.out.endswith('.png'): raise ValueError(f"out={self.out!r} must end with .png")


# ---- the fingerprints ------------------------------------------------------------------------------------------------

def layers(gpt):
    """The matrices of each layer, out x in, norm gains folded in, k and v once for each query head: q, k, v (nh hd, C), .."""
    for block in gpt.h:
        a = block.attn
        q, k, v = (a.c_attn.weight * block.ln_1.weight).split([n * a.head_dim for n in (a.n_head, a.n_kv_head, a.n_kv_head)])
        k, v = (W.unflatten(0, (a.n_kv_head, -1)).repeat_interleave(a.n_head // a.n_kv_head, 0).flatten(0, 1) for W in (k, v))
        gate, up = (block.mlp.c_fc.weight * block.ln_2.weight).chunk(2)
        yield dict(q=q, k=k, v=v, o=a.c_proj.weight, gate=gate, up=up, down=block.mlp.c_proj.weight)


def cosine(x, y):
    """Of two tensors of one shape, as long vectors. Of terms: HuRef's ICS; of Gram matrices by `gram`: AWM's UCKA."""
    return F.cosine_similarity(x.flatten(), y.flatten(), dim=0).item()


def terms(gpt, tokens, product=False):
    """HuRef's invariant terms of the last two layers, standardised: (6, K, K). product: gate*up in M_f, as in the release."""
    X, M = gpt.wte.weight[tokens], []                               # (K, C)
    for w in list(layers(gpt))[-2:]:
        up = w['gate'] * w['up'] if product else w['up']
        M += [X @ W @ X.T for W in (w['q'].T @ w['k'], w['v'].T @ w['o'].T, up.T @ w['down'].T)]  # W (C, C): heads summed
    M = torch.stack(M)                                              # (6, K, K)
    return (M - M.mean((1, 2), keepdim=True)) / M.std((1, 2), keepdim=True)


def gram(X):
    """X (n, p) -> its Gram matrix (n, n), that of X U too, centred as if the diagonal, much alike for all X, were not there."""
    n, G = len(X), (X @ X.T).fill_diagonal_(0)
    m = G.sum(0) / (n - 2)
    m = m - m.sum() / (2 * (n - 1))
    return (G - m[:, None] - m).fill_diagonal_(0)


def align(E_A, E_B):
    """AWM's LAP: indices a, b and signs, so that E_A[:, a] * sign ~ E_B[:, b] for E_A (tokens, C_A) and E_B (tokens, C_B)."""
    C = F.normalize(E_A, dim=0).T @ F.normalize(E_B, dim=0)         # (C_A, C_B) cosines of columns
    a, b = assign(-C.abs())
    return a, b, C[a, b].sign()


def awm(A, B, tokens, lap=True):
    """AWM of two models over shared `tokens`: the score, and the paired layers as (layer of A, layer of B, UCKA of Wq, of Wk)."""
    E_A, E_B = A.wte.weight[tokens], B.wte.weight[tokens]
    a = b = torch.arange(min(E_A.size(1), E_B.size(1)))
    a, b, sign = align(E_A, E_B) if lap else (a, b, 1)
    G_A = [[gram((w[x][:, a] * sign).T) for x in 'qk'] for w in layers(A)]  # rows are the C dimensions of the residual stream
    G_B = [[gram(w[x][:, b].T) for x in 'qk'] for w in layers(B)]
    s = torch.tensor([[[cosine(x, y) for x, y in zip(g, h)] for h in G_B] for g in G_A])  # (L_A, L_B, 2): UCKA
    i, j = assign(-s.abs().sum(-1))
    return s[i, j].abs().mean().item(), [(*ij, *qk) for *ij, qk in zip(i.tolist(), j.tolist(), s[i, j].tolist())]


# ---- the assignment --------------------------------------------------------------------------------------------------

def assign(cost):
    """
    The assignment problem: cost (n, m) -> rows and columns, each (min(n, m),), none twice, with the least sum of cost. The
    Hungarian method: rows enter one by one, each by the cheapest chain of swaps (Dijkstra over cost - u - v >= 0). O(n^2 m).
    """
    if cost.size(0) > cost.size(1): return assign(cost.T)[::-1]
    (n, m), cost = cost.shape, F.pad(cost.double(), (0, 1)).numpy()  # column m is the door by which a row enters
    u, v, row_of = np.zeros(n), np.zeros(m + 1), np.full(m + 1, -1)  # prices of rows and columns; a column's row, -1 if free
    for row_of[m] in range(n):
        way, before, done, column = np.full(m + 1, np.inf), np.full(m + 1, m), np.zeros(m + 1, bool), m
        while row_of[column] >= 0:                                  # on to the nearest column, until it is a free one
            done[column] = True
            step = cost[row_of[column]] - u[row_of[column]] - v
            nearer = ~done & (step < way)
            way[nearer], before[nearer] = step[nearer], column
            column = np.where(done, np.inf, way).argmin()
            low = way[column]
            way[~done] -= low
            v[done] -= low
            u[row_of[done]] += low
        while column != m: row_of[column], column = row_of[before[column]], before[column]  # swap along the chain, back to the door
    columns = np.flatnonzero(row_of[:m] >= 0)
    return torch.from_numpy(row_of[columns]), torch.from_numpy(columns)


# ---- the attack ------------------------------------------------------------------------------------------------------

def turn(W, angle):
    """Turn each rotary plane (i, i + hd / 2) of the rows of W (heads, hd, C) by angle (heads, hd / 2)."""
    (x, y), cos, sin = W.chunk(2, 1), angle.cos()[..., None], angle.sin()[..., None]
    return torch.cat((x * cos - y * sin, x * sin + y * cos), 1)


@torch.no_grad()
def disguise(gpt, seed=0, c=1.7):
    """
    A copy of a plain GPT with other weights and the same logits. The residual stream x becomes c x P D; inside a layer change
    what cancels: norm gain and readers, Wq and Wk, Wv and Wo, up and down. Exact, as norm_eps changes with c.
    """
    new, config, draw = copy.deepcopy(gpt), gpt.config, torch.Generator().manual_seed(seed)
    C, nh, nkv, hd, g = config.n_embd, config.n_head, config.n_kv_head, config.head_dim, config.n_head // config.n_kv_head
    normal = lambda *shape: torch.randn(shape, generator=draw).to(gpt.wte.weight.dtype)
    P, D = torch.randperm(C, generator=draw), normal(C).sign()
    reads = lambda W: W[:, P] * D                                   # W (out, C) -> W P D
    writes = lambda W: c * W[P] * D[:, None]                        # W (C, in) -> c (P D)^T W
    new.wte.weight.copy_(c * reads(gpt.wte.weight))
    if not config.tie_embeddings: new.lm_head.weight.copy_(reads(gpt.lm_head.weight))
    new.ln_f.weight.copy_(gpt.ln_f.weight[P] / (c if config.tie_embeddings else 1))
    for part in (new.wte, new.lm_head):                             # padded rows are never read, or masked: put anything there
        part.weight[config.n_tokens:] = part.weight.std() * normal(config.vocab_size - config.n_tokens, C)
    for norm in new.modules():                                      # rms(c x) is c rms(x) if eps becomes c^2 eps
        if isinstance(norm, RMSNorm): norm.eps *= c * c
    new.config.norm_eps *= c * c
    for block, old in zip(new.h, gpt.h):
        r = normal(2, C).mul(0.3).exp()
        block.ln_1.weight.copy_(old.ln_1.weight[P] * r[0])
        block.ln_2.weight.copy_(old.ln_2.weight[P] * r[1])
        q, k, v = (reads(old.attn.c_attn.weight) / r[0]).unflatten(0, (-1, hd)).split((nh, nkv, nkv))  # (heads, hd, C)
        angle = math.pi * normal(nkv, hd // 2)
        if config.qk_norm:                                          # between Wq and the rotation stand gains, and an eps that grew:
            angle, q, k = (1 + angle.sign()) * math.pi / 2, c * q, c * k  # of all angles only half turns commute with them
        q, k = turn(q, angle.repeat_interleave(g, 0)), turn(k, angle)
        R = torch.linalg.qr(normal(nkv, hd, hd))[0] * normal(nkv, 1, hd).mul(0.3).exp()  # any that can be inverted
        block.attn.c_attn.weight.copy_(torch.cat((q, k, R @ v)).flatten(0, 1))
        o = writes(old.attn.c_proj.weight).unflatten(1, (nh, hd)).transpose(0, 1)        # (nh, C, hd)
        block.attn.c_proj.weight.copy_((o @ R.inverse().repeat_interleave(g, 0)).transpose(0, 1).flatten(1))
        order, s = torch.randperm(config.mlp_hidden, generator=draw), normal(config.mlp_hidden).exp()
        gate, up = (reads(old.mlp.c_fc.weight) / r[1]).chunk(2)
        block.mlp.c_fc.weight.copy_(torch.cat((gate[order], up[order] * s[:, None])))
        block.mlp.c_proj.weight.copy_(writes(old.mlp.c_proj.weight)[:, order] / s)
    return new


# ---- the table and the picture ---------------------------------------------------------------------------------------

def pcs(A, B):
    """HuRef's parameter cosine similarity: of all parameters with the same name and shape, as they are."""
    other = dict(B.named_parameters())
    both = [(p, other[name]) for name, p in A.named_parameters() if name in other and other[name].shape == p.shape]
    return cosine(*(torch.cat([p.flatten() for p in side]) for side in zip(*both)))


def relatives(A, rows, s):
    """{name: gpt in float64}: A, a copy after s.steps training steps of 4 windows out of rows (n, T + 1), and both disguised."""
    found, new = {'A': A}, copy.deepcopy(A).train()
    batches = rows[torch.randint(len(rows), (s.steps, 4), generator=torch.Generator().manual_seed(s.seed))]  # (steps, 4, T + 1)
    fit(new.parameters(), lambda i: new(batches[i, :, :-1], batches[i, :, 1:])[1], warm_up(1e-3, s.steps), name='fine-tuning')
    if s.steps: found[f'A, {s.steps} more steps'] = new.eval()
    for name, gpt in list(found.items()): found[name + ', disguised'] = disguise(gpt.double(), s.seed)
    return found


def identicon(M):
    """Terms M (6, K, K) -> pixels (128, 128, 3) uint8: 64 block means, standardised, 9 shades of blue to red, mirrored twice."""
    means = torch.stack([block.mean() for block in M.flatten().tensor_split(64)])
    v = ((means - means.mean()) / means.std()).mul(2).round().clamp(-4, 4).div(4).view(8, 8)
    v = torch.cat((v, v.flip(1)), 1)
    v = torch.cat((v, v.flip(0)), 0)                                # (16, 16) of -1 .. 1
    rgb = 1 - torch.stack((-v, v.abs(), v), -1).clamp(min=0)
    return rgb.mul(255).byte().repeat_interleave(8, 0).repeat_interleave(8, 1)


def png(pixels):
    """pixels (H, W, 3) uint8 -> the bytes of a PNG file."""
    chunk = lambda kind, body: struct.pack('>I', len(body)) + kind + body + struct.pack('>I', zlib.crc32(kind + body))
    size = struct.pack('>2I5B', pixels.size(1), pixels.size(0), 8, 2, 0, 0, 0)  # 8 bits each of red, green, blue
    lines = b''.join(b'\0' + line.numpy().tobytes() for line in pixels)
    return b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', size) + chunk(b'IDAT', zlib.compress(lines)) + chunk(b'IEND', b'')


def verdict(score, similarity):
    """What AWM's score and the ICS mean, in one sentence."""
    if min(score, similarity) > 0.5: return "relatives: one was made from the other, or both from a third"
    if max(score, abs(similarity)) < 0.2: return "no kinship to be seen: as far apart as models trained independently"
    return "undecided: a score lies between 0.2 and 0.5, or the two disagree; compare with models known to be independent"


def rarest_first(text, n):
    """The tokens of `text` that occur at all, out of n, by frequency; so their numbering does not matter."""
    counts = torch.bincount(text, minlength=n)
    order = counts.argsort(stable=True)
    return order[counts[order] > 0]


@torch.no_grad()
def compare(models, tokens, rows, s):
    """Print how each of models {name: gpt} relates to the first, and what that means for the last; write the picture."""
    A, B = list(models.values())[::len(models) - 1]
    M, released = ([terms(gpt, tokens[:s.K], product) for gpt in models.values()] for product in (False, True))
    lines = [(name, loss_on(gpt, rows), awm(A, gpt, tokens)[0], awm(A, gpt, tokens, lap=False)[0], cosine(M[0], m),
              cosine(released[0], r), pcs(A, gpt)) for (name, gpt), m, r in zip(models.items(), M, released)]
    print(table(('', 'loss', 'AWM', 'no LAP', 'ICS', 'gate*up', 'PCS'), lines))
    score, pairs = awm(A, B, tokens)
    print('\n' + table(('layer of A', 'layer of B', 'UCKA of Wq', 'of Wk'), pairs))
    print(f"\nA and B: AWM {score:.4f}, ICS {lines[-1][4]:.4f}: {verdict(score, lines[-1][4])}")
    with on_disk(s.out, 'written'), open(s.out, 'wb') as f: f.write(png(torch.cat([identicon(m) for m in M], 1)))
    print(f"{s.out}: the identicons of the first table's rows, from left to right")


def main(argv):
    given, folders = read(argv, __doc__.strip(), FingerprintSettings)
    s = build(FingerprintSettings, given)
    if len(folders) != 2: raise UserError("name two checkpoint folders, as in: python exercises/labs/fingerprint.py out/a out/b")
    if not os.path.isdir(os.path.dirname(s.out) or '.'): raise UserError(f"out={s.out}: there is no such folder; make it first")
    (A, tokenizer, settings), (B, other, _) = map(load_plain, folders)
    n, T = A.config.n_tokens, min(A.config.block_size, B.config.block_size)
    if (tokenizer.name, n) != (other.name, B.config.n_tokens):
        raise UserError(f"{folders[0]} has {n} tokens of {tokenizer.name}, {folders[1]} {B.config.n_tokens} of {other.name}: "
                        "give two checkpoints of one tokenizer")
    for folder, gpt in zip(folders, (A, B)):
        if gpt.config.n_layer < 2: raise UserError(f"{folder}: has one layer, and HuRef compares the last two; give deeper models")
        if not all(p.isfinite().all() for p in gpt.parameters()):
            raise UserError(f"{folder}: some weights are infinite or not a number; take an earlier checkpoint")
    text, rows = own_text(settings, 'train', 2 ** 20), windows(own_text(settings, 'val', 2 ** 16), T)
    if max(text.max(), rows.max()) >= n:
        raise UserError(f"{settings['data_dir']}: has tokens beyond the {n} of {folders[0]}; prepare its training data again")
    half = len(rows) // 2                                           # to fine-tune on; the loss is that of the other half
    models = relatives(A, rows[:max(1, half)], s) | {'B: ' + folders[1]: B.double()}
    compare(models, rarest_first(text, n), rows[half:][:64], s)


if __name__ == '__main__': run(main)
