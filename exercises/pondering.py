"""
Exercise 5 of 8: pondering embeddings. About 40 minutes.

    python exercises/pondering.py            checks what you wrote and says what is not right yet
    python exercises/pondering.py --hint     a hint; --hint=3: all three

A GPT spends the same work on every token. PonderLM (arXiv 2505.20674) lets it think again before
it answers. It runs the model, and takes the whole distribution of the next token. The mean
embedding under this distribution is added to the input. Then the same model runs again.

    E_0      = embed(idx)                   scaled token embeddings                       (B, T, C)
    P_k      = softmax(head(trunk(E_k)))    the distribution over the next token          (B, T, V)
    e_k      = P_k (scale * W)              the mean of the scaled embeddings under it    (B, T, C)
    E_{k+1}  = E_k + e_k                    the running sum: nothing is replaced
    result   = trunk(E_K)                   head(result) predicts; the loss reads this pass only

With K steps the trunk runs K + 1 times. There is no new parameter, all positions ponder side by
side, and gradients flow back through all passes.

    shape letters    B rows    T positions    C width of the model    V rows of the vocabulary

In the model, gpt.embed(idx) is E_0, gpt.trunk(x) runs all blocks and the final norm over a whole
text, gpt.head(h) gives logits, W is gpt.wte.weight (V, C), and its scale is
gpt.config.embed_scale. Do not call Embedding.mixture or gpt.hidden: you are compared with them.
Afterwards, think about this: to generate with caches (exercise 3), how many caches does a model
with K steps need?
"""
import check    # finds the project's files
import torch
import torch.nn.functional as F


def ponder(gpt, idx, steps):
    """
    Tokens idx (B, T) -> the hidden states (B, T, C) after `steps` pondering steps.
    With 0 steps: the plain model.
    """
    raise NotImplementedError("ponder() is still empty: write it in place of this line")


# -------------------------------------------------------------------------------------------------
# the check: read it when you are done, it gives things away

from check import call, causal, difference, draw, forbid, gradients, tiny

import model

HINTS = (
    "Begin with steps = 0: gpt.trunk(gpt.embed(idx)). Then put a loop of `steps` rounds before "
    "that last trunk.",

    "A softmax over the vocabulary, the last axis, times the table is one matmul: "
    "(B, T, V) @ (V, C).",

    "The table of that matmul is scaled as gpt.embed scales it, by gpt.config.embed_scale. What a "
    "round finds is added to the input of this round, and not to E_0. Nothing is detached.",
)
AXES = ('row', 'position', 'channel')


NOT_STEPS = 5  # in gpt.config.ponder_steps while ponder() runs, whose argument says how many


def add(start, x, h, e):
    """The right step, E_k + e_k."""
    return x + e


def walk(gpt, idx, steps, step=add, start=None, last=True):
    """
    Pondering with another step: step(E_0, E_k, trunk(E_k), e_k) gives E_{k+1}. start: another E_0.
    Without `last` what comes out is E_K.
    """
    table = gpt.wte.weight * gpt.config.embed_scale  # (V,C)
    start = x = gpt.embed(idx) if start is None else start
    for _ in range(steps):
        h = gpt.trunk(x)
        e = gpt.head(h).softmax(-1) @ table          # (B,T,V) @ (V,C) -> (B,T,C)
        x = step(start, x, h, e)
    return gpt.trunk(x) if last else x


def typical_mistakes(name, gpt, idx, steps):
    """{sentence: what ponder() gives with this mistake}"""
    scale, rows_of_head = gpt.config.embed_scale, gpt.lm_head.weight
    table = gpt.wte.weight * scale
    return {
        f"{name} ran one pass too few: K steps are K + 1 passes":
            walk(gpt, idx, max(0, steps - 1)),
        f"{name} ran one pass too many: K steps are K + 1 passes":
            walk(gpt, idx, steps + 1),
        f"{name} reads gpt.config.ponder_steps, which is {NOT_STEPS} here; the argument `steps` "
        "says how many":
            walk(gpt, idx, NOT_STEPS),
        f"{name} returns E_K itself; the result is one more trunk of it":
            walk(gpt, idx, steps, last=False),
        f"{name} begins with gpt.wte(idx); gpt.embed(idx) scales it":
            walk(gpt, idx, steps, start=gpt.wte(idx)),
        f"{name} scales the mean embedding twice":
            walk(gpt, idx, steps, lambda start, x, h, e: x + e * scale),
        f"{name} replaces the input by the mean embedding; it should add it":
            walk(gpt, idx, steps, lambda start, x, h, e: e),
        f"{name} adds the new mean to the token embedding; it should join the running sum, "
        "E_k + e_k":
            walk(gpt, idx, steps, lambda start, x, h, e: start + e),
        f"{name} mixes the table without its scale, gpt.config.embed_scale":
            walk(gpt, idx, steps, lambda start, x, h, e: x + e / scale),
        f"{name} mixes rows of the head; P_k mixes the embedding table, gpt.wte.weight":
            walk(gpt, idx, steps,
                 lambda start, x, h, e: x + gpt.head(h).softmax(-1) @ (rows_of_head * scale)),
        f"{name} takes the likeliest token; it should take the mean over all of them":
            walk(gpt, idx, steps, lambda start, x, h, e: x + table[gpt.head(h).argmax(-1)]),
        f"{name} mixes with the logits: the softmax is missing":
            walk(gpt, idx, steps, lambda start, x, h, e: x + gpt.head(h) @ table),
        f"{name} runs its softmax over the positions; it should run over the vocabulary, the last "
        "axis":
            walk(gpt, idx, steps, lambda start, x, h, e: x + gpt.head(h).softmax(1) @ table),
        f"{name} gives padded rows of the vocabulary some probability: gpt.head masks them, "
        "gpt.lm_head does not":
            walk(gpt, idx, steps, lambda start, x, h, e: x + gpt.lm_head(h).softmax(-1) @ table),
        f"{name} feeds back the hidden state; it should feed back the mean embedding":
            walk(gpt, idx, steps, lambda start, x, h, e: x + h),
        f"{name} adds the mean embedding to the hidden state; it should join the input, E_k + e_k":
            walk(gpt, idx, steps, lambda start, x, h, e: h + e),
        f"{name} gives the mean to the next position; each position adds what it found itself":
            walk(gpt, idx, steps, lambda start, x, h, e: x + F.pad(e[:, :-1], (0, 0, 1, 0))),
        f"{name} scales the sum; only the mean embedding is scaled, E_0 has its scale already":
            walk(gpt, idx, steps, lambda start, x, h, e: scale * (x + e / scale)),
        f"{name} averages E_k and the mean embedding; it should add them":
            walk(gpt, idx, steps, lambda start, x, h, e: (x + e) / 2),
    }


def check_ponder(gpt, idx, steps):
    """NotYet, or what ponder() and the model return: the same."""
    name = f"ponder() with steps={steps}"
    gpt.config.ponder_steps = NOT_STEPS
    with forbid(model.Embedding, 'mixture'), forbid(gpt, 'hidden'):
        got = call(ponder, gpt, idx, steps)
    gpt.config.ponder_steps = steps
    want = gpt.hidden(idx)
    found = difference(name, got, want, AXES)
    if found:
        found.recognise(typical_mistakes(name, gpt, idx, steps))
        causal(name, lambda changed: ponder(gpt, changed, steps), idx)
        found.locate()
    return got, want


def model_and_text(n_tokens=30):
    gpt = tiny(ponder='embedding', embed_scale=draw(3.0, 4.0, 5.0), n_tokens=n_tokens)
    return gpt.requires_grad_(True), torch.randint(0, 29, (2, draw(8, 9, 10)))


def check_values():
    # padding of the vocabulary, with logits of -inf, makes NaN of many a mistake: first without
    for n_tokens in (40, 30):
        gpt, idx = model_and_text(n_tokens)
        for steps in (0, 1, 2):
            check_ponder(gpt, idx, steps)


def check_gradients():
    gpt, idx = model_and_text()
    got, want = check_ponder(gpt, idx, 2)
    gradients("ponder()", gpt, got, want)


def conclusion():
    return ("It equals GPT.hidden with ponder='embedding', gradients included. Now read Embedding "
            "in model.py. With a large vocabulary its mixture is computed for some rows at a time "
            "(some_rows_at_once), so that (B, T, V) is never held as a whole.")


PARTS = {
    "ponder()": check_values,
    "its gradients": check_gradients,
}


if __name__ == '__main__':
    check.run(__name__)
