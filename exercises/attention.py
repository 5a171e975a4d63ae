"""
Exercise 1 of 8: attention and the causal mask. About 40 minutes.

    python exercises/attention.py            checks what you wrote and says what is not right yet
    python exercises/attention.py --hint     a hint; --hint=3: all three

Each position t asks a question, its query q_t. Each position u offers a key k_u and a value v_u.
How well the key fits the query decides how much of that value goes into the result of t.

    shape letters    B rows of the batch    T positions    nh, nkv heads    hd width of a head

    score(t, u)  = q_t . k_u / sqrt(hd)        for u <= t, and -infinity for u > t
    a(t, u)      = exp(score(t, u)) / sum over u' of exp(score(t, u'))
                                               a softmax: positive, and their sum is 1
    y_t          = sum over u of a(t, u) v_u

The case u > t is the causal mask. While training, the model sees the whole text at once and
predicts, at each position, the next token. A position that could read later ones would find the
answer there, and learn nothing.

All heads do this side by side, each with its own q, k and v. Models save memory by having fewer
key/value heads than query heads: with nh query heads and nkv key/value heads, g = nh / nkv
neighbours share one. Query heads 0 .. g-1 read key/value head 0, g .. 2g-1 read head 1, and so on.

Use matmul, softmax and torch's functions for masks. Do not use F.scaled_dot_product_attention: the
library calls that, and you are compared with it. Afterwards, think about this: without the
division by sqrt(hd), what happens to the softmax when hd grows?
"""
import check    # finds the project's files
import math

import torch
import torch.nn.functional as F


def attention(q, k, v):
    """
    q (B, nh, T, hd), k and v (B, nkv, T, hd) -> y (B, nh, T, hd).
    First make it work for nkv = nh.
    """
    raise NotImplementedError("attention() is still empty: write it in place of this line")


# -------------------------------------------------------------------------------------------------
# the check: read it when you are done, it gives things away

from unittest.mock import patch

from check import (call, causal, compare, difference, draw, expect, forbid, inside, record, same,
                   tiny)

from model import Attention

HINTS = (
    "q @ k.transpose(-1, -2) is all scores at once, (B, nh, T, T): row t has the scores of query "
    "t.",

    "torch.ones(T, T, dtype=torch.bool).tril() is True where u <= t. Before the softmax, "
    "scores.masked_fill(~that, -math.inf) gives the others weight 0. The softmax runs over the "
    "last axis, the keys.",

    "For shared heads, k.repeat_interleave(nh // nkv, dim=1) repeats each head g times in a row, "
    "as the query heads need it; k.repeat would put them in the order 0 1 0 1.",
)
AXES = ('row', 'head', 'position', 'channel')
sdpa = F.scaled_dot_product_attention


def heads(nh, nkv, hd):
    """q (2, nh, T, hd), k and v (2, nkv, T, hd) of random numbers."""
    T = draw(7, 8, 9)
    return torch.randn(2, nh, T, hd), torch.randn(2, nkv, T, hd), torch.randn(2, nkv, T, hd)


def typical_mistakes(name, q, k, v):
    """{sentence: what attention() gives with this mistake}"""
    T, hd = q.size(2), q.size(3)
    itself_and_the_future = torch.ones(T, T, dtype=torch.bool).triu()
    return {
        f"{name} sees the future: without a mask, every position reads all others":
            sdpa(q, k, v),
        f"{name} has the mask upside down: each position reads itself and the future":
            sdpa(q, k, v, attn_mask=itself_and_the_future),
        f"{name} gives later positions the score 0; exp(0) is 1, so they still count":
            (q @ k.mT / math.sqrt(hd)).tril().softmax(-1) @ v,
        f"{name} forgets to divide the scores by sqrt(hd)":
            sdpa(q, k, v, is_causal=True, scale=1.0),
        f"{name} divides the scores by hd, not by its square root":
            sdpa(q, k, v, is_causal=True, scale=1 / hd),
        f"{name} multiplies the scores by sqrt(hd) where it should divide":
            sdpa(q, k, v, is_causal=True, scale=math.sqrt(hd)),
        f"{name} divides the scores by sqrt(T), the number of positions; hd is the last axis of q":
            sdpa(q, k, v, is_causal=True, scale=T ** -0.5),
        f"{name} divides the scores by sqrt(nh hd), the width of all heads; hd is that of one":
            sdpa(q, k, v, is_causal=True, scale=(q.size(1) * hd) ** -0.5),
        f"{name} has queries and keys swapped: row t of the scores belongs to query t":
            sdpa(k, q, v, is_causal=True),
        f"{name} sums up keys instead of values":
            sdpa(q, k, k, is_causal=True),
    }


def check_plain():
    """As many key/value heads as query heads."""
    q, k, v = heads(4, 4, hd=draw(16, 32))
    name = "attention()"
    with forbid(F, 'scaled_dot_product_attention'):
        y = call(attention, q, k, v)
    found = difference(name, y, sdpa(q, k, v, is_causal=True), AXES)
    if found:
        found.recognise(typical_mistakes(name, q, k, v))
        ones = torch.ones_like(v)
        expect(same(attention(q, k, ones), ones),
               "the weights of a position do not sum to 1 over the positions it reads: the mask "
               "belongs before the softmax, and the softmax runs over the keys, the last axis")
        causal(name, lambda x: attention(q, x, x), v, axis=2)
        found.locate()

    far_below_0 = torch.arange(-q.size(2), 0.0)[:, None].expand_as(k)  # and each above the last
    lowest = 1e7    # the score of query and key 0 is minus this, whatever T and hd are
    large = torch.full_like(q, lowest / (q.size(2) * math.sqrt(q.size(3))))
    y = attention(large, far_below_0, v)
    expect(y.isfinite().all(),
           f"{name} is right only while the scores are small: exp() of very negative ones is 0, "
           "and a row becomes 0 / 0. Take torch's softmax, after the mask. Or subtract each row's "
           "maximum first, over what it reads")
    expect(same(y, v),
           f"{name} is right only while the scores are small: the mask should be -inf, which no "
           "score is below")
    record(y)


def check_grouped():
    """Fewer key/value heads than query heads."""
    for nh, nkv in ((6, 2), (8, 4)):
        q, k, v = heads(nh, nkv, hd=draw(8, 24))
        name = f"with {nh} query heads and {nkv} key/value heads, attention()"
        y = call(attention, q, k, v)
        want = sdpa(q, k, v, is_causal=True, enable_gqa=True)
        compare(name, y, want, AXES, grouping_mistakes(name, q, k, v))


def grouping_mistakes(name, q, k, v):
    """{sentence: what attention() gives with this mistake}"""
    nh, nkv = q.size(1), k.size(1)
    g, heads_of_q = nh // nkv, torch.arange(nh)
    first_group = ', '.join(map(str, range(g)))
    wrong = {}
    wrong_orders = {
        f"{name} mixes up the groups: query heads {first_group} read key/value head 0, the next "
        f"{g} read head 1":
            heads_of_q % nkv,  # what k.repeat makes
        f"{name} lets query head h read key/value head h // {nkv}; a group has {g} neighbours, so "
        f"it is h // {g}":
            (heads_of_q // nkv).clamp(max=nkv - 1),
        f"{name} lets all query heads read key/value head 0":
            0 * heads_of_q,
    }
    for sentence, order in wrong_orders.items():
        wrong[sentence] = sdpa(q, k[:, order], v[:, order], is_causal=True)
    for width in (8, 16, 32, 64):
        sentence = (f"{name} divides by sqrt({width}); the width of a head is {q.size(3)} here: "
                    "read it from q")
        wrong[sentence] = sdpa(q, k, v, is_causal=True, enable_gqa=True, scale=width ** -0.5)
    return wrong


def in_place_of_kernel(q, k, v, **options):
    """The student's function with the arguments of Attention.kernel."""
    return attention(q, k, v).to(v.dtype)   # it may compute in float64


def check_inside():
    into_the_model = patch.object(Attention, 'kernel', staticmethod(in_place_of_kernel))
    inside("your attention()", tiny(n_head=6, n_kv_head=2, head_dim=8), into_the_model)


PARTS = {
    "as many key/value heads as query heads": check_plain,
    "grouped queries": check_grouped,
    "inside a GPT": check_inside,
}


def conclusion():
    return ("A GPT of model.py gives the same logits and gradients with your attention() inside. "
            "Now read class Attention in model.py, and its attend.")


if __name__ == '__main__':
    check.run(__name__)
