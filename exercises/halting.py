"""
Exercise 7 of 8: a halting gate. About 60 minutes.

    python exercises/halting.py            checks what you wrote and says what is not right yet
    python exercises/halting.py --hint     a hint; --hint=3: all three

Pondering (exercise 5) spends K + 1 passes on every token, as many on an easy word as on the result
of a sum. AdaPonderLM (arXiv 2603.01914) puts a small gate after each pass. The gate reads a token's
hidden state and says whether that token goes on. At the start E = embed(idx), and m = 1, which
means that all tokens are active. In pass k = 0 .. K, for every token:

    h        = trunk(E)
    readout  = h where m, else as before  the model answers from it; a halted token keeps its own

and then, in all passes but the last, which has no gate:

    s        = sigmoid(gate_k(h))         one number per token
    m        = m and (s >= tau)           tau: a threshold between 0 and 1
                                          monotone: who has halted never wakes up again
    E        = E + m s e                  e = Embedding.mixture(gpt, h): the mean embedding of
                                          exercise 5, here times s

And in each layer a halted token keeps the keys and values of its last active pass, which active
tokens go on reading:

    its keys and values = the new ones where m, else those of the pass before     (Eq. 10)

In training all passes run on all tokens, and `where` keeps what a halted token had: its keys, its
values and its readout. In generation a halted token really stops, and costs nothing more. Both must
give the same numbers. The check compares you with such a generation, token by token, with caches
and a `break` when the gate says so, and your gradients with model.py's. Afterwards, think about
this: with these three frozen, would it matter if a halted token's E moved on?

    shape letters    B rows    T positions    C width of the model
                     nkv key/value heads    hd width of a head
"""
import check    # finds the project's files
import torch

from model import Embedding


class Frozen:
    """
    The memory of one pass over a text of T tokens. GPT.trunk calls its update in each layer, where
    active tokens get new keys and values, and others keep theirs.
    """
    keys_per_slot = 1               # as in exercise 3

    def __init__(self, T, active=None, before=None):
        self.pos = torch.arange(T)  # as in exercise 3; each pass reads the whole text
        self.keys = {}              # of each layer: what this pass read, for the next one to see
        self.values = {}
        self.active = active        # m (B, T), bool; None in the first pass, where all are active
        self.before = before        # the Frozen of the pass before; None in the first pass

    def update(self, layer, k, v):
        """
        k and v (B, nkv, T, hd) as this pass makes them -> those it reads, by Eq. 10.
        Stores them in self.keys and self.values too.
        """
        raise NotImplementedError(
            "Frozen.update() is still empty: write it in place of this line")


def think(gpt, gates, x, tau):
    """
    x (B, T, C), the first E -> (readout (B, T, C), passes (B, T): how many each token took, whole
    numbers).
    gates: K functions from (B, T, C) to (B, T, 1).
    gpt.trunk(x, Frozen(T, ...)) is one pass.
    """
    raise NotImplementedError(
        "think() is still empty: write it in place of this line")


# -------------------------------------------------------------------------------------------------
# the check: read it when you are done, it gives things away

from dataclasses import dataclass, field

from check import (NotYet, call, compare, difference, draw, expect, gradients, record,
                   same, shaped, tiny)

from model import Memory

GIVEN = ('Embedding',)  # what may be imported from the project
HINTS = (
    "update: in the first pass store k and v as they are. After it, torch.where chooses, at each "
    "position, between the new ones and those of self.before. self.active is (B, T), and needs an "
    "axis for the heads and one for the channels. Store the result, not the new k: the next pass "
    "must find what was frozen two passes ago.",

    "think: keep m, readout, passes and the memory of the pass before as variables of one loop "
    "over passes. Each pass adds m to passes.",

    "readout is h in the first pass. Later it is h where m, with the m that this pass began with. "
    "Only then the gate changes m, and the new m decides what joins x. A gate gives (B, T, 1), and "
    "squeeze(-1) makes (B, T) of that; m[..., None] is (B, T, 1), which fits x and h.",
)
AXES = ('row', 'position', 'channel')


# ---- Frozen

ACTIVE = torch.tensor([  # m in each of three passes, (3, 2 rows, 5 positions)
    [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]],
    [[1, 1, 0, 0, 1], [1, 0, 1, 0, 1]],
    [[1, 0, 0, 0, 1], [1, 0, 0, 0, 1]],
]).bool()


def check_frozen():
    """Three passes through two layers; each makes new keys and values, (2, heads, 5, channels)."""
    k, v = torch.randn(2, 3, 2, draw(1, 2, 3), 5, draw(4, 6))
    made = [(k, v), (-k, -v)]  # by layer 0 and layer 1
    memory = None
    for i in range(3):
        before = memory
        memory = Frozen(5, ACTIVE[i] if i > 0 else None, before)
        for layer, (k, v) in enumerate(made):
            new_k, new_v = k[i].clone(), v[i].clone()  # a later pass may write into them
            got = call(memory.update, layer, new_k, new_v, name='Frozen.update')
            expect(isinstance(got, (tuple, list)) and len(got) == 2,
                   "Frozen.update() should return two tensors, keys and values")
            check_read(i, 'keys', k, got[0], memory.keys.get(layer))
            check_read(i, 'values', v, got[1], memory.values.get(layer))
            if i > 0:
                same_k = same(before.keys[layer], frozen(k, i - 1))
                same_v = same(before.values[layer], frozen(v, i - 1))
                expect(same_k and same_v,
                       f"in pass {i}, Frozen.update() writes into self.before: make new tensors, "
                       "and leave those of the pass before as they are")


def frozen(new, i):
    """What pass i reads, by Eq. 10, if `new` (3, ..) is what the three passes make."""
    if i == 0:
        return new[0]
    return torch.where(ACTIVE[i][:, None, :, None], new[i], frozen(new, i - 1))


def check_read(i, what, new, got, stored):
    """
    new (3, ..): the keys, or values, that the passes make.
    got, stored: what update() returned in pass i, and what the memory of this pass holds now.
    """
    name = f"in pass {i}, Frozen.update()"
    active, before = ACTIVE[i][:, None, :, None], max(0, i - 1)
    read_before = frozen(new, before)
    want = frozen(new, i)
    axes = ('row', 'head', 'position', 'channel')
    compare(f"{name} returns {what} in a tensor that", got, want, axes, {
        f"{name} returns all {what} anew; halted tokens should keep those of their last active "
        "pass":
            new[i],
        f"{name} has it the wrong way round: active tokens get new {what}, halted ones keep "
        "theirs":
            torch.where(active, read_before, new[i]),
        f"{name} gives halted tokens the {what} that the pass before made, not those it read: "
        "store the frozen ones":
            torch.where(active, new[i], new[before]),
        f"{name} gives halted tokens the {what} of another layer":  # which made the opposite
            torch.where(active, new[i], -read_before),
    })
    expect(isinstance(stored, torch.Tensor) and same(stored, want),
           f"{name} returns the right {what}, but self.{what}[layer] should hold them too: the "
           "next pass looks there")


# ---- think

def one_by_one(gpt, gates, x, tau):
    """
    What generation does: each token in turn, one cache per pass, and no further pass once the gate
    is shut. Returns readout, passes, the readout of those who halt by a gate one pass too soon, and
    that of everybody one pass too soon.
    """
    B, T, _ = x.shape
    readout, too_soon, one_before = torch.zeros(3, *x.shape)
    passes = torch.zeros(B, T, dtype=torch.long)
    for row in range(B):
        caches = [Memory() for _ in range(len(gates) + 1)]
        for t in range(T):
            e = x[row:row + 1, t:t + 1]  # (1,1,C)
            for cache in caches:
                cache.begin(e)  # one token more, at position t
            outputs = []
            for i, cache in enumerate(caches):
                h = gpt.trunk(e, cache)
                outputs.append(h[0, 0])
                if i == len(gates):
                    break
                s = gates[i](h).sigmoid()
                if s < tau:
                    break
                e = e + s * Embedding.mixture(gpt, h)
            for later in caches[i + 1:]:  # which find the keys and values of its last pass
                for layer in range(gpt.config.n_layer):
                    later.update(layer, *caches[i].newest(layer, 1))
            readout[row, t] = outputs[i]
            one_before[row, t] = outputs[max(0, i - 1)]
            too_soon[row, t] = outputs[i] if i == len(gates) else one_before[row, t]
            passes[row, t] = i + 1
    return readout, passes, too_soon, one_before


@dataclass
class Case:
    """A situation in which think() is compared with one_by_one()."""
    what: str                                     # how sentences call it
    gates: list                                   # one per step
    about_passes: str                             # what to say if their number is wrong
    tau: float = 0.5
    mistakes: dict = field(default_factory=dict)  # {sentence: the readout with this mistake}


def gate_at(z):
    """A gate that gives every token the same z, so that s = sigmoid(z)."""
    return lambda h: torch.full_like(h[..., :1], z)


def gate_that_looks():
    """A gate that gives every token a z of its own: 12 tokens take unlike numbers of passes."""
    w = torch.randn(32, 1)
    return lambda h: h @ w / 2 + 1


def cases(gpt, idx):
    """Gates that give everybody the same: with these, think() goes wrong in one way at a time."""
    shut, half, wide = gate_at(-9.0), gate_at(0.0), gate_at(30.0)
    yield Case(
        what="all gates wide open",
        gates=[wide, wide, wide],
        about_passes="K gates are K + 1 passes, the first one included; who has s >= tau goes on",
        mistakes={
            "with all gates wide open, think() scales by what gates return; the sigmoid of it is "
            "s": always(gpt, idx, 30.0),
            "with all gates wide open, think() adds the new mean to the token embedding; it should "
            "join the running sum": always(gpt, idx, 1.0, keep=lambda start, x: start),
            "with all gates wide open, think() replaces the input by the mean embedding; it should "
            "add it": always(gpt, idx, 1.0, keep=lambda start, x: 0.0),
        })
    yield Case(
        what="all gates at s = tau = 0.5",
        gates=[half, half, half],
        about_passes="nobody halts while s >= tau, and s = sigmoid(gate_k(h))",
        mistakes={
            "with all gates at s = 0.5, think() adds the whole mean embedding; the gate should "
            "scale it": always(gpt, idx, 1.0),
        })
    yield Case(
        what="all gates shut",
        gates=[shut, shut, shut],
        about_passes="a token halts when s < tau, and the pass it halts after counts")
    yield Case(
        what="gate 0 shut and the later ones open",
        gates=[shut, wide, wide],
        about_passes="who has halted never wakes up again")


def always(gpt, idx, factor, keep=lambda start, x: x):
    """
    Three steps for everybody, with this factor on every mean embedding, which joins what
    keep(E_0, E_k) gives.
    """
    start = x = gpt.embed(idx)
    for _ in range(3):
        x = keep(start, x) + factor * Embedding.mixture(gpt, gpt.trunk(x))
    return gpt.trunk(x)


def check_think(gpt, x, case):
    """Compare think() with one_by_one() in one situation."""
    got = call(think, gpt, case.gates, x, case.tau)
    expect(isinstance(got, (tuple, list)) and len(got) == 2,
           "think() should return two tensors: the readout and the number of passes")
    readout, passes = got
    shaped("the first result of think(), the readout,", readout, x.shape, AXES)
    shaped("the second result of think(), the number of passes,", passes, x.shape[:2], AXES[:2])
    expect(not passes.is_floating_point(),
           "the second result of think() counts passes, in whole numbers (dtype=torch.long), and "
           f"not in {passes.dtype}")

    right_readout, right_passes, too_soon, one_before = one_by_one(gpt, case.gates, x, case.tau)
    check_passes(case, passes, right_passes)
    late_m = (f"with {case.what}, think() takes the readout with the m after the gate: who halts "
              "after a pass was active in it. Take the m that the pass began with")
    case.mistakes[late_m] = too_soon
    case.mistakes[f"{late_m}; in the first one all are active"] = (
        too_soon * (right_passes > 1)[..., None])
    case.mistakes[f"with {case.what}, think() never takes the readout of the last pass, which no "
                  "gate follows"] = one_before
    check_readout(case, readout, right_readout, right_passes)


def check_passes(case, got, want):
    record(got)
    wrong = (got != want).nonzero()
    if len(wrong):
        row, t = wrong[0].tolist()
        raise NotYet(
            f"with {case.what}, think() counts {int(got[row, t])} for the passes of position {t} "
            f"in row {row}, and {int(want[row, t])} is right: {case.about_passes}")


def check_readout(case, got, want, passes):
    found = difference(f"with {case.what}, the readout of think()", got, want, AXES)
    if not found:
        return
    found.recognise(case.mistakes)
    off = (got - want).abs().amax(-1) > 1e-3  # (B,T)
    halted_at_once = passes == 1
    expect(not (off & halted_at_once).any(),
           f"with {case.what}, the readout of halted tokens moves on after they halted: it should "
           "stay what their last pass gave")
    expect(not halted_at_once.any(),
           f"with {case.what}, tokens that halted at once are right and the others are not: they "
           "should read the frozen keys and values. Does each pass get a Frozen with its m and "
           "with the Frozen of the pass before?")
    found.locate()


def check_gradients():
    """Training runs think() too: its gradients are those of model.py's halting='gate'."""
    tau = draw(0.4, 0.6)
    gpt = tiny(ponder='embedding', n_layer=3, halting='gate', halt_tau=tau)
    idx = torch.randint(0, 30, (2, 8))
    for gate in gpt.mechanism.gates:
        gate[-1].weight.normal_()
        gate[-1].bias.fill_(1)
    want = gpt.requires_grad_(True).hidden(idx)
    got, _ = think(gpt, gpt.mechanism.gates, gpt.embed(idx), tau)
    gradients("think()", gpt, got, want)


def model_and_text():
    return tiny(ponder='embedding', n_layer=2), torch.randint(0, 30, (2, 6))


def looking(tau):
    return Case(
        what=f"gates that look at the token, and tau = {tau:g}",
        gates=[gate_that_looks() for _ in range(3)],
        about_passes="compare with the equations, line by line; tau is an argument, and each "
                     "Frozen gets the Frozen of the pass before",
        tau=tau)


def check_cases():
    gpt, idx = model_and_text()
    x = gpt.embed(idx)
    for case in cases(gpt, idx):
        check_think(gpt, x, case)
    case = looking(draw(0.3, 0.4, 0.7))
    case.gates.append(gate_that_looks())    # four: elsewhere there are three
    check_think(gpt, x, case)


def conclusion():
    gpt, idx = model_and_text()
    x = gpt.embed(idx)
    case = looking(tau=0.5)
    _, passes = think(gpt, case.gates, x, case.tau)
    of_row_0 = ', '.join(map(str, passes[0].tolist()))
    return (f"Masked training and a loop that really stops agree, and here {int(passes.sum())} "
            f"token passes are enough where 4 for everybody would be {4 * passes.numel()}. "
            f"The tokens of row 0 took {of_row_0} passes. Now read forward of class Gate in "
            "model.py, which is your think() line by line, and FrozenMemory in model.py, which is "
            "your Frozen and a cache besides.")


PARTS = {
    "Frozen": check_frozen,
    "think()": check_cases,
    "its gradients": check_gradients,
}


if __name__ == '__main__':
    check.run(__name__)
