"""
Exercise 5 of 8: pondering embeddings. About 40 minutes.

    python exercises/pondering.py            checks what you wrote and says what is not right yet
    python exercises/pondering.py --hint     a hint; --hint=2 and --hint=3 say more

A GPT spends the same work on every token. PonderLM (arXiv 2505.20674) lets it think again before it answers: it runs
the model, takes what it would say next, not one token but the whole distribution, turns that into the mean embedding
of the next token, adds it to the input, and runs the same model once more.

    E_0      = embed(idx)                       scaled token embeddings                              (B, T, C)
    P_j      = softmax(head(trunk(E_j)))        the distribution over the next token                 (B, T, V)
    e_j      = P_j (scale * W)                  the mean of the scaled embeddings under it           (B, T, C)
    E_{j+1}  = E_j + e_j                        the running sum: nothing is replaced
    result   = trunk(E_s)                       head() of this predicts; no loss reads the steps before

With s steps the trunk runs s + 1 times. There is no new parameter, all positions ponder side by side, and gradients
flow back through all passes.

In the model, gpt.embed(idx) is E_0, gpt.trunk(x, pos) runs all blocks and the final norm at positions pos (T,),
gpt.head(h) gives logits, W is gpt.wte.weight (V, C), and its scale is gpt.config.embed_scale. Do not call gpt.mixture
or gpt.hidden: you are compared with them. Afterwards, think about this: to generate with caches (exercise 3), how
many caches does a model with s steps need?
"""
import torch
from check import call, causal, compare, forbid, gradients, run, tiny


def ponder(gpt, idx, steps):
    """Tokens idx (B, T) -> the hidden states (B, T, C) after `steps` pondering steps. With 0 steps: the plain model."""
    raise NotImplementedError("ponder() is still empty: write it in place of this line")


# ----------------------------------------------------------------------------------------------------------------------
# the check: read it when you are done, it gives things away

HINTS = (
    "Begin with steps = 0: gpt.trunk(gpt.embed(idx), torch.arange(T)). Then put a loop of `steps` rounds before that last trunk.",
    "A softmax over the vocabulary, the last axis, times the table is one matmul: (B, T, V) @ (V, C).",
    "Each round adds to x what it found: x = x + probabilities @ (gpt.wte.weight * gpt.config.embed_scale). Nothing is detached.",
)
AXES = ('row', 'position', 'channel')


def walk(gpt, idx, steps, feed=lambda start, x, e: x + e, weights=lambda z: z.softmax(-1), table=None, head=None):
    """Pondering with one part replaced."""
    pos = torch.arange(idx.size(1))
    table = gpt.wte.weight * gpt.config.embed_scale if table is None else table
    start = x = gpt.embed(idx)
    for _ in range(steps): x = feed(start, x, weights((head or gpt.head)(gpt.trunk(x, pos))) @ table)
    return gpt.trunk(x, pos)


def mistakes(name, gpt, idx, steps):
    scale, identity = gpt.config.embed_scale, torch.eye(gpt.config.n_embd)
    likeliest = lambda z: torch.nn.functional.one_hot(z.argmax(-1), z.size(-1)).to(z.dtype)
    return {
        f"{name} ran one pass too few: s steps are s + 1 passes":
            walk(gpt, idx, max(0, steps - 1)),
        f"{name} ran one pass too many: s steps are s + 1 passes":
            walk(gpt, idx, steps + 1),
        f"{name} reads gpt.config.ponder_steps, which is 5 here; the argument `steps` says how many":
            walk(gpt, idx, 5),
        f"{name} replaces the input by the mean embedding; it should add it":
            walk(gpt, idx, steps, feed=lambda start, x, e: e),
        f"{name} adds the new mean to the token embedding; it should join the running sum, E_j + e_j":
            walk(gpt, idx, steps, feed=lambda start, x, e: start + e),
        f"{name} mixes the table without its scale, gpt.config.embed_scale":
            walk(gpt, idx, steps, table=gpt.wte.weight),
        f"{name} mixes rows of the head; P_j mixes the embedding table, gpt.wte.weight":
            walk(gpt, idx, steps, table=gpt.lm_head.weight * scale),
        f"{name} takes the likeliest token; it should take the mean over all of them":
            walk(gpt, idx, steps, weights=likeliest),
        f"{name} mixes with the logits: the softmax is missing":
            walk(gpt, idx, steps, weights=lambda z: z, head=gpt.lm_head),
        f"{name} gives padded rows of the vocabulary some probability: gpt.head masks them, gpt.lm_head does not":
            walk(gpt, idx, steps, head=gpt.lm_head),
        f"{name} feeds back the hidden state; it should feed back the mean embedding":
            walk(gpt, idx, steps, weights=lambda z: z, head=lambda h: h, table=identity),
    }


def check():
    torch.manual_seed(0)
    gpt, idx = tiny(ponder='embedding', embed_scale=4.0).requires_grad_(True), torch.randint(0, 29, (2, 9))
    for steps in (0, 1, 2):
        gpt.config.ponder_steps, name = 5, f"ponder() with steps={steps}"
        with forbid(gpt, 'mixture'), forbid(gpt, 'hidden'): got = call(ponder, gpt, idx, steps)
        gpt.config.ponder_steps = steps
        compare(name, got, gpt.hidden(idx), AXES, lambda: mistakes(name, gpt, idx, steps),
                lambda: causal(name, lambda x: ponder(gpt, x, steps), idx))
    gradients("ponder()", gpt, got, gpt.hidden(idx))
    return ("It equals GPT.hidden with ponder='embedding', gradients included. Now read embedding and GPT.mixture in model.py: the "
            "mixture goes through the rows in parts, so that (B, T, V) is never held as a whole.")


if __name__ == '__main__': run(__file__, check, HINTS)
