"""
Exercise 4 of 8: Depth-Attention. About 45 minutes.

    python exercises/depth_attention.py         checks what you wrote and says what is not right yet
    python exercises/depth_attention.py --hint  a hint; --hint=3: all three

Ordinary attention looks along the text, within one layer. Depth-Attention (arXiv 2606.05014) first
looks down through the layers, at one position. Layer l's query scores the keys of layer l and of a
few lower layers, its sources. By these scores their values are mixed. Attention along the text then
reads the mixed values v~ in the place of v.

    shape letters    B rows    T positions    nh query heads    nkv key/value heads
                     hd width of a head

    J(l)  = { j < l : j is a multiple of the stride s }      the sources of layer l: the anchors
                                                             0, s, 2s, .. below it

    a(j)  = softmax over j of  q_l . k_j / sqrt(hd)          j in J(l), or j = l itself    (Eq. 2)
    v~_l  = a(l) v_l  +  sum over j in J(l) of a(j) v~_j     own value raw,
                                                             earlier ones already mixed    (Eq. 3)

One softmax per position and key/value head; no position looks at another here. Layer 0 has no
sources: v~_0 = v_0. With grouped queries (exercise 1), the g queries that share a key/value head
are averaged first, and the scale stays 1 / sqrt(hd).

Write the softmax over the layers yourself, without F.scaled_dot_product_attention. You are
compared with what the real model computes in a real pass. Afterwards, think about this: why does a
model with Depth-Attention need no larger cache than the one of exercise 3?
"""
import check    # finds the project's files
import torch


def mix(q, k, v, sources):
    """
    q (B, nh, T, hd), k and v (B, nkv, T, hd) of one layer, and its sources
    -> v~ (B, nkv, T, hd) of this layer. First make it work for nh = nkv.
    sources: a list of pairs (k_j, v~_j), both (B, nkv, T, hd). For layer 0 the list is empty.
    """
    raise NotImplementedError("mix() is still empty: write it in place of this line")


def mix_all(layers, stride):
    """layers [(q, k, v), ...] from layer 0 upwards -> [v~_0, v~_1, ...]. Use mix()."""
    raise NotImplementedError(
        "mix_all() is still empty: write it in place of this line")


# -------------------------------------------------------------------------------------------------
# the check: read it when you are done, it gives things away

from dataclasses import dataclass
from unittest.mock import patch

from check import call, compare, difference, draw, expect, inside, same, tiny

import model
from model import depth_attention as library

HINTS = (
    "One score per layer: (q * k_j).sum(-1) is (B, nkv, T). torch.stack of all, own last, then "
    "softmax over the new axis.",

    "q.reshape(B, nkv, g, T, hd).mean(2) averages the queries of each group: neighbours belong "
    "together.",

    "mix_all: keep a list of anchors. Layer l gets all anchors so far; then, if l % stride == 0, "
    "it joins them with its own key and its mixed value.",
)
AXES = ('row', 'head', 'position', 'channel')


@dataclass
class Recorded:
    """What a real pass hands to model.depth_attention in one layer, and what comes back."""
    q: torch.Tensor   # (B, nh, T, hd)
    k: torch.Tensor   # (B, nkv, T, hd), like all the others
    v: torch.Tensor
    sources: list     # [(k_j, v~_j), ...]
    mixed: torch.Tensor


def real_pass(**settings):
    """A pass of a model with these settings: one Recorded for each of its 6 layers."""
    calls = []

    def spy(q, k, v, sources, mode):
        sources = list(sources)
        mixed = library(q, k, v, sources, mode)
        calls.append(Recorded(q, k, v, sources, mixed))
        return mixed

    gpt = tiny(depth_attn=True, n_layer=6, **settings)
    with patch.object(model, 'depth_attention', spy):
        gpt(torch.randint(0, 30, (2, 5)))
    return calls


def check_mix(made):
    """mix() on what one layer of a real pass made."""
    q, k, v, sources = made.q, made.k, made.v, made.sources
    g = q.size(1) // k.size(1)
    name = f"mix() with {q.size(1)} query heads and {k.size(1)} key/value heads"
    if g == 1:
        name = "mix()"
    found = difference(name, call(mix, q, k, v, sources), made.mixed, AXES)
    if not found:
        return
    mistakes = typical_mistakes(name, q, k, v, sources)
    if g > 1:
        mistakes |= grouping_mistakes(name, q, k, v, sources)
    found.recognise(mistakes)
    ones = torch.ones_like(v)
    ones_below = [(k_j, ones) for k_j, _ in sources]
    expect(same(mix(q, k, ones, ones_below), ones),
           f"{name} has weights that do not sum to 1 over the layers of one position: the softmax "
           "should run over the layers, own one included, not over positions or heads")
    found.locate()


def typical_mistakes(name, q, k, v, sources):
    """{sentence: what mix() gives with this mistake}"""
    (first_k, first_v), *others = sources
    root = q.size(-1) ** 0.5
    keys_below = [(k_j, k_j) for k_j, _ in sources]
    return {
        f"{name} leaves the layer's own key and value out of the softmax":
            library(q, first_k, first_v, others),
        f"{name} gives all layers the same weight: the softmax of the scores decides":
            library(q, k, v, sources, 'uniform'),
        f"{name} forgets to divide the scores by sqrt(hd)":
            library(q * root, k, v, sources),
        f"{name} divides the scores by hd, not by its square root":
            library(q / root, k, v, sources),
        f"{name} multiplies the scores by sqrt(hd) where it should divide":
            library(q * root ** 2, k, v, sources),
        f"{name} returns the layer's own value, unmixed":
            v,
        f"{name} scores the layers by its key instead of its query":
            library(k, k, v, sources),
        f"{name} mixes keys instead of values":
            library(q, k, k, keys_below),
        f"{name} has the layer's own key and value in the softmax twice":
            library(q, k, v, [*sources, (k, v)]),
        f"{name} leaves layer 0 out, the first of the sources":
            library(q, k, v, others),
        **{f"{name} divides by sqrt({width}); the width of a head is {q.size(-1)} here: read it "
           "from k":
           library(q * root / width ** 0.5, k, v, sources) for width in (4, 8, 16)},
    }


def grouping_mistakes(name, q, k, v, sources):
    """The same for mistakes that need more query heads than key/value heads."""
    nkv, g = k.size(1), q.size(1) // k.size(1)
    of_each_group = q.unflatten(1, (nkv, g)).unbind(2)          # g times (B, nkv, T, hd)
    far_apart = q.unflatten(1, (g, nkv)).transpose(1, 2).flatten(1, 2)
    return {
        f"{name} adds the queries of a group, which should be averaged":
            library(q * g, k, v, sources),
        f"{name} averages the weights of a group's queries; it should average the queries, and "
        "make one softmax of that":
            sum(library(one, k, v, sources) for one in of_each_group) / g,
        f"{name} takes one query of each group; it should average them":
            library(of_each_group[0], k, v, sources),
        f"{name} takes the first queries for all; each key/value head has its group":
            library(q[:, :nkv], k, v, sources),
        f"{name} puts the wrong queries into a group: neighbours belong together":
            library(far_apart, k, v, sources),
    }


def check_mix_all(stride):
    name = f"mix_all(stride={stride})"
    calls = real_pass(n_head=6, n_kv_head=2, head_dim=8, depth_stride=stride)
    layers = [(made.q, made.k, made.v) for made in calls]
    got = call(mix_all, layers, stride)
    expect(isinstance(got, (list, tuple)) and len(got) == 6,
           "mix_all() should return a list with one v~ for each of the 6 layers")
    mistakes = wrong_sources(name, layers, stride)
    for layer, made in enumerate(calls):
        here = {sentence: mixed[layer] for sentence, mixed in mistakes.items()}
        compare(f"layer {layer}: v~ from {name}", got[layer], made.mixed, AXES, here)


def wrong_sources(name, layers, s):
    """{sentence: v~ of all layers with this mistake}"""
    return {
        f"{name} mixes raw values of earlier layers; Eq. 3 takes their mixed ones":
            walk(layers, lambda layer, j: j % s == 0, raw=True),
        f"{name} has the wrong sources: the anchors are fixed, 0, s, 2s, .., not l - s, l - 2s, "
        ".., and layer l reads each j < l of them":
            walk(layers, lambda layer, j: (layer - j) % s == 0),
        f"{name} reads all layers below; only multiples of the stride are sources":
            walk(layers, lambda layer, j: True),
        f"{name} reads only the newest anchor":
            walk(layers, lambda layer, j: j == (layer - 1) // s * s),
        f"{name} reads only layer 0":
            walk(layers, lambda layer, j: j == 0),
        f"{name} makes a layer a source of itself; mix() has the layer's own key and value already":
            walk(layers, lambda layer, j: j % s == 0, itself=True),
        f"{name} has the pairs of its sources the wrong way round: (k_j, v~_j), the key first":
            walk(layers, lambda layer, j: j % s == 0, value_first=True),
    }


def walk(layers, reads, raw=False, itself=False, value_first=False):
    """
    v~ of all layers if a layer reads those j below it for which reads(layer, j) is true; their own
    values if raw; with `itself` its own value, too; value_first: values are taken for keys.
    """
    mixed = []
    for layer, (q, k, v) in enumerate(layers):
        sources = []
        for j in range(layer + 1 if itself else layer):
            _, k_j, v_j = layers[j]
            if reads(layer, j):
                pair = k_j, v_j if raw or j == layer else mixed[j]
                sources.append(pair[::-1] if value_first else pair)
        mixed.append(library(q, k, v, sources))
    return mixed


def in_place_of_the_library(q, k, v, sources, mode):
    """The student's function with the arguments of model.depth_attention."""
    sources = list(sources)
    return mix(q, k, v, sources).to(v.dtype) if sources else v  # it may compute in float64


def check_heads(*pairs):
    for nh, nkv in pairs:
        *_, top = real_pass(n_head=nh, n_kv_head=nkv, head_dim=draw(4, 8, 12, 16))
        check_mix(top)  # the top layer has the most sources


def check_plain():
    check_heads((4, 4))


def check_grouped():
    check_heads((6, 2), (8, 4))


def check_layers():
    for stride in (3, 2, 1):
        check_mix_all(stride)


def check_inside():
    into_the_model = patch.object(model, 'depth_attention', in_place_of_the_library)
    gpt = tiny(depth_attn=True, n_head=6, n_kv_head=2, head_dim=8)
    inside("your mix()", gpt, into_the_model)


def conclusion():
    return ("A GPT of model.py gives the same logits and gradients with your mix() inside. "
            "Now read depth_attention in model.py: it never stacks its sources, and says why.")


PARTS = {
    "mix() with as many key/value heads as query heads": check_plain,
    "mix() with grouped queries": check_grouped,
    "mix_all()": check_layers,
    "inside a GPT": check_inside,
}


if __name__ == '__main__':
    check.run(__name__)
