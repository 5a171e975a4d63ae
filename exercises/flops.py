"""
Exercise 8 of 8: counting FLOPs, and a fair comparison. About 45 minutes.

    python exercises/flops.py            checks what you wrote and says what is not right yet
    python exercises/flops.py --hint     a hint; --hint=3: all three

In the papers a model that ponders has a lower loss than a plain one after the same number of
tokens; in docs/results.md some do. But it also worked four times as much. Would the plain one,
given that work, have got further? Count.

Only matmuls count here: an (m, k) times (k, n) product takes m k n multiplications and as many
additions, 2 m k n FLOPs. For one token that is 2 FLOPs for each weight of each matrix it meets.
Looking up an embedding is no matmul; norms, rotations, softmaxes and Depth-Attention's mixing
(exercise 4) are left out, they are small.
In attention, each query head of width hd meets T keys and then T values: all T of them, as is the
custom, though the causal mask hides half.

    in each layer      the queries             C -> nh hd
                       the keys                C -> nkv hd
                       the values              C -> nkv hd
                       the heads' results      nh hd -> C
                       the MLP's gate          C -> mlp_hidden
                       what the gate scales    C -> mlp_hidden
                       the MLP's result        mlp_hidden -> C
    at the end, once   the head                C -> V

With ponder='embedding' and K steps (exercise 5), the trunk runs K + 1 times and the head after
each of these passes; and K times, probabilities (V) meet the embedding table (V, C). Training: the
backward pass takes twice the FLOPs of the forward pass, so 3 times as many in all.

The fields of c, a GPTConfig: n_layer, n_embd (C), n_head (nh), n_kv_head (nkv), head_dim (hd),
mlp_hidden, vocab_size (V), ponder_steps (K). You are compared with engine/flops.py, which runs the
model on shapes alone and adds up each matmul that it sees, by PyTorch's own formulas.
"""
import check    # finds the project's files


def forward_flops(c, T):
    """FLOPs of the plain model's forward pass, per token, in a text of T tokens."""
    raise NotImplementedError("forward_flops() is still empty: write it in place of this line")


def ponder_flops(c, T):
    """The same for ponder='embedding' with c.ponder_steps steps over the whole vocabulary."""
    raise NotImplementedError(
        "ponder_flops() is still empty: write it in place of this line")


def fair_tokens(c, T, tokens):
    """
    How many tokens the plain model can be trained on with the training FLOPs that pondering takes
    for `tokens` tokens.
    """
    raise NotImplementedError(
        "fair_tokens() is still empty: write it in place of this line")


# -------------------------------------------------------------------------------------------------
# the check: read it when you are done, it gives things away

from dataclasses import replace

from check import NotYet, call, draw, expect, record

from engine.flops import flops_per_token
from model import GPT, GPTConfig

HINTS = (
    "In each layer the weights are C (nh + 2 nkv) hd, nh hd C, and 3 C mlp_hidden. Attention adds "
    "2 T nh hd multiplications, of T keys and T values. Each comes with an addition.",

    "ponder_flops: take forward_flops apart into trunk and head. (K + 1) trunks, K + 1 heads, and "
    "K mixtures of 2 V C.",

    "fair_tokens: tokens times the training FLOPs of one is the work, the same for both models. So "
    "the one whose token costs less gets more of them, by the ratio of the two costs.",
)
TINY = dict(  # config/size/tiny.py with bytes
    vocab_size=320, n_tokens=257, n_layer=6, n_head=3, n_embd=192, mlp_hidden=512, block_size=256)
SMALL = {**TINY, 'n_layer': 3}
GROUPED = dict(
    vocab_size=448, n_layer=3, n_head=8, n_kv_head=2, n_embd=128, head_dim=24, mlp_hidden=352)


def library(c, T):
    """What the library says of the forward pass."""
    return flops_per_token(GPT(c), T, training=False)


def parts(c, T):
    """FLOPs per token of the parts of a plain forward pass."""
    C, L, V = c.n_embd, c.n_layer, c.vocab_size
    width, kv_width = c.n_head * c.head_dim, c.n_kv_head * c.head_dim
    return {
        "the queries": 2 * L * C * width,
        "the keys": 2 * L * C * kv_width,
        "the values": 2 * L * C * kv_width,
        "the projection of the heads' results": 2 * L * width * C,
        "the scores with T keys": 2 * L * T * width,
        "the sum over T values": 2 * L * T * width,
        "the MLP": 6 * L * C * c.mlp_hidden,
        "the head": 2 * C * V,
    }


def check_number(name, got, want, mistakes):
    """
    True if got is want. NotYet if it is no number, or one of the mistakes, {what it does: what it
    gives}, or half of what it should be.
    """
    expect(type(got) in (int, float),
           f"{name} should be a number, and is of type {type(got).__name__}")
    record(float(got))
    if near(got, want, want):
        return True
    for sentence, wrong in mistakes.items():
        expect(not near(got, wrong, want), f"{name} {sentence}")
    expect(not near(got, want / 2, want),
           f"{name} is half of what it should be: a multiplication and an addition are 2 FLOPs")
    return False


def near(a, b, scale):
    return abs(a - b) <= 1e-6 * scale


def check_parts(name, got, want, terms):
    """NotYet if got lacks one of these terms, {what: its FLOPs}, or has it half or twice."""
    for flops in terms.values():
        # a number cannot tell which of several terms it was, if they cost the same
        what = ', or '.join(other for other in terms if terms[other] == flops)
        expect(not near(got, want - flops, want), f"{name} leaves out {what}: {flops:,} FLOPs")
        expect(not near(got, want - flops / 2, want), f"{name} counts {what} at half the cost")
        expect(not near(got, want + flops, want), f"{name} counts {what} twice")


def beside(name, got, want):
    return (f"{name} is {got:,.0f} and should be {want:,.0f}, so {got / want:.4g} times as much "
            "as it should be")


def kind_of(c):
    return "grouped queries" if c.n_kv_head < c.n_head else "as many key/value heads as query heads"


def check_forward(c, T):
    name = f"forward_flops(), for {kind_of(c)} and T = {T},"
    want = library(c, T)
    got = call(forward_flops, c, T)
    if check_number(name, got, want, forward_mistakes(c, T, want)):
        return
    terms = parts(c, T)
    check_parts(name, got, want, terms)
    list_of_parts = ', '.join(f"{what} {flops:,}" for what, flops in terms.items())
    raise NotYet(f"{beside(name, got, want)}. Its parts: {list_of_parts}")


def forward_mistakes(c, T, right):
    """{what forward_flops() does: what it gives then}"""
    terms = parts(c, T)
    scores, head = terms['the scores with T keys'], terms['the head']
    return {
        "counts the embedding as a matmul; it is a look-up":
            right + head,
        "leaves out attention itself, the scores with T keys and the sum over T values":
            right - 2 * scores,
        "counts half of attention: scores alone, or values alone, or half of the T keys, which by "
        "custom all count, masked or not; or multiplications without their additions":
            right - scores,
        "is for training; the forward pass alone was asked for":
            3 * right,
        f"is for all T = {T} tokens; asked for is the cost of one of them":
            T * right,
        "counts one layer; the model has c.n_layer of them":
            (right - head) / c.n_layer + head,
        "has two matrices in the MLP; it has three, the gate counts too":
            right - terms['the MLP'] / 3,
        "counts the head in every layer; it comes once":
            right + (c.n_layer - 1) * head,
        **{sentence: right + more for sentence, more in width_mistakes(c, T).items()},
    }


def width_mistakes(c, T):
    """{what a count of one pass does with the heads: how much more it gives then}"""
    terms = parts(c, T)
    scores, keys = terms['the scores with T keys'], terms['the keys']
    projections = terms['the queries'] + terms["the projection of the heads' results"]
    share = c.n_kv_head / c.n_head
    too_much = 1 - c.n_embd / (c.n_head * c.head_dim)   # of the width of all heads, against C
    return {
        "gives keys and values as many heads as the queries have; they have n_kv_head":
            2 * keys * (1 / share - 1),
        "counts n_kv_head heads in attention too; every query head meets T keys and T values":
            -2 * scores * (1 - share),
        "takes C for the width of all heads in attention; it is n_head * head_dim":
            -2 * scores * too_much,
        "takes C for the width of all heads; it is n_head * head_dim":
            -projections * too_much,
        "takes C for the width of all heads, in attention too; it is n_head * head_dim":
            -(projections + 2 * scores) * too_much,
    }


def check_ponder(c, T):
    name = f"ponder_flops() with ponder_steps={c.ponder_steps}, for {kind_of(c)},"
    want = library(c, T)
    got = call(ponder_flops, c, T)
    if not check_number(name, got, want, ponder_mistakes(c, T, want)):
        expect(c.ponder_steps > 0,
               f"{name} should be forward_flops(), for one plain pass: {want:,.0f}, and not "
               f"{got:,.0f}")
        raise NotYet(beside(name, got, want))


def ponder_mistakes(c, T, right):
    """{what ponder_flops() does: what it gives then}"""
    K = c.ponder_steps
    terms = parts(c, T)
    head = terms['the head']  # a mixture costs as much
    trunk = sum(terms.values()) - head
    return {
        "forgets that K steps are K + 1 passes":
            right - trunk - 2 * head,
        "has a mixture after the last pass too; only steps mix":
            right + head,
        "leaves out K matmuls of size V: every step needs the head, and then a mixture":
            right - K * head,
        "counts K heads; there is one after each of the K + 1 passes":
            right - head,
        "leaves out heads and mixtures of the steps":
            right - 2 * K * head,
        "counts the trunk only once":
            right - K * trunk,
        "counts the trunk K times; it runs K + 1 times":
            right - trunk,
        **{sentence: right + (K + 1) * more for sentence, more in width_mistakes(c, T).items()},
    }


def check_fair(c, T, tokens):
    name = f"fair_tokens() for {tokens:,.0f} tokens"
    want = tokens * library(c, T) / sum(parts(c, T).values())
    got = call(fair_tokens, c, T, tokens)
    if not check_number(name, got, want, fair_mistakes(c, T, tokens, want)):
        raise NotYet(beside(name, got, want))


def fair_mistakes(c, T, tokens, right):
    """{what fair_tokens() does: what it gives then}"""
    plain, K = sum(parts(c, T).values()), c.ponder_steps
    return {
        "compares training with the forward pass alone; both models are trained":
            3 * right,
        "has the ratio upside down: pondering costs more, so the plain model gets more tokens":
            tokens ** 2 / right,
        "gives the plain model as many tokens as the other: what about the work?":
            tokens,
        "counts passes only; steps have heads and mixtures too":
            (K + 1) * tokens,
        "gives the FLOPs; asked for are tokens":
            3 * right * plain,
        "counts 3 steps; c.ponder_steps says how many":
            tokens * library(replace(c, ponder_steps=3), T) / plain,
    }


def check_all_forward():
    for shape in (SMALL, GROUPED):
        for T in (draw(250, 200), draw(100, 50)):
            check_forward(GPTConfig(**shape), T)


def check_all_ponder():
    for shape in (SMALL, GROUPED):
        for steps in (0, 1, draw(3, 4, 5)):
            c = GPTConfig(**shape, ponder='embedding', ponder_steps=steps)
            check_ponder(c, draw(250, 200))


def check_all_fair():
    for shape in (TINY, GROUPED):
        for steps in (3, draw(1, 2)):
            c = GPTConfig(**shape, ponder='embedding', ponder_steps=steps)
            check_fair(c, draw(256, 128), 1e6)


def conclusion():
    """What the count means for days 6 and 10 of exercises/README.md."""
    c = GPTConfig(**TINY, ponder='embedding', ponder_steps=3)
    tokens = fair_tokens(c, 256, 800 * 1024)
    return (
        "Now use it. The two models of day 6 read the same 0.82M bytes. But the work of the "
        f"pondering one would have paid for {tokens / 1e6:.2f}M bytes of the plain model. Day 10 "
        "trains that model on so much.")


PARTS = {
    "forward_flops()": check_all_forward,
    "ponder_flops()": check_all_ponder,
    "fair_tokens()": check_all_fair,
}


if __name__ == '__main__':
    check.run(__name__)
