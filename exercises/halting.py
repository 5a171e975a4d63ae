"""
Exercise 7 of 8: a halting gate. About 60 minutes.

    python exercises/halting.py            checks what you wrote and says what is not right yet
    python exercises/halting.py --hint     a hint; --hint=2 and --hint=3 say more

Pondering (exercise 5) spends s + 1 passes on every token, on "the" as on the result of a sum. AdaPonderLM (arXiv
2603.01914) puts a small gate after each pass: it reads a token's hidden state and says whether that token goes on. In
pass i = 0 .. s, for every token:

    h        = trunk(E)                      E = embed(idx) at first, m = 1: all tokens are active
    readout  = h where m, else as before     a halted token's answer stays what it was
    g        = sigmoid(gate_i(h))            one number per token; there is no gate after the last pass
    m        = m and (g >= tau)              monotone: who has halted never wakes up again
    E        = E + m g e                     e = gpt.mixture(h) is the mean embedding of exercise 5; the gate scales it too

And in each layer a halted token keeps the keys and values of its last active pass, which active tokens go on reading:

    k = k where m, else k of the pass before         the same for v                                            (Eq. 10)

Training runs all passes on all tokens, with `where` in three places, and so knows exactly what generation does, which
really stops: there a halted token costs no pass any more. The paper leaves open what becomes of a halted token's
readout; frozen, as here, is the only choice with which both agree. You are compared with a loop that does it the
other way: token by token, with caches, and a `break` when the gate says so; your gradients, with model.py's. Afterwards,
think about this: with all three frozen, would it matter if a halted token's E moved on?

    shape letters    B rows    T positions    C width of the model    nkv key/value heads    hd width of a head
"""
import torch
from check import NotYet, call, compare, expect, gradients, run, same, shaped, tensors, tiny

from engine.memory import KVCache


class Frozen:
    """The memory of one pass, whose update GPT.trunk calls in each layer: active tokens get new keys and values, others keep theirs."""

    def __init__(self, n_layer, active=None, before=None):
        self.k, self.v = [None] * n_layer, [None] * n_layer  # what this pass read, for the next pass to look at
        self.active = active                                 # m (B, T), bool; None in the first pass, where all are active
        self.before = before                                 # the Frozen of the pass before; None in the first pass

    def update(self, layer, k, v):
        """k and v (B, nkv, T, hd) as this pass makes them -> those it reads, by Eq. 10. Stores them in self.k and self.v too."""
        raise NotImplementedError("Frozen.update() is still empty: write it in place of this line")

    def mask(self, S, device):
        """Nothing beyond the usual causal mask."""
        return None


def think(gpt, gates, x, pos, tau):
    """
    x (B, T, C) at positions pos (T,) -> (readout (B, T, C), passes (B, T): how many passes each token took).
    gates: s functions from (B, T, C) to (B, T, 1). gpt.trunk(x, pos, Frozen(gpt.config.n_layer, ...)) is one pass.
    """
    raise NotImplementedError("Frozen is right, think() is still empty: write it in place of this line")


# ----------------------------------------------------------------------------------------------------------------------
# the check: read it when you are done, it gives things away

HINTS = (
    "update: torch.where(self.active[:, None, :, None], k, self.before.k[layer]), and the same for v. Store the result, not the new "
    "k: the next pass must find what was frozen two passes ago.",
    "think: keep m, readout, passes and the memory of the pass before as variables of one loop over passes. Each pass adds m to "
    "passes.",
    "readout = h in the first pass, then torch.where(m[..., None], h, readout), with the m that this pass began with. After the "
    "gate: m = m & (g >= tau), x = x + (m * g)[..., None] * gpt.mixture(h).",
)
AXES = ('row', 'position', 'channel')


def one_by_one(gpt, gates, x, pos, tau):
    """What generation does: each token in turn, one cache per pass, and no further pass once the gate is shut."""
    readout, passes, layers = torch.zeros_like(x), torch.zeros(x.shape[:2], dtype=torch.long), range(gpt.config.n_layer)
    for row in range(len(x)):
        caches = [KVCache(len(layers), len(pos)) for _ in range(len(gates) + 1)]
        for t in range(len(pos)):
            e = x[row:row + 1, t:t + 1]
            for i, cache in enumerate(caches):
                h = gpt.trunk(e, pos[t:t + 1], cache)
                if i == len(gates): break
                g = gates[i](h).sigmoid()
                if g < tau: break
                e = e + g * gpt.mixture(h)
            for later in caches[i + 1:]:  # passes it does not take still find its keys and values
                for layer in layers: later.update(layer, cache.k[layer][:, :, t:t + 1], cache.v[layer][:, :, t:t + 1])
            readout[row, t], passes[row, t] = h[0, 0], i + 1
    return readout, passes


def check_frozen():
    k, v = torch.randn(2, 3, 2, 2, 5, 4)  # of three passes, each (2 rows, 2 heads, 5 positions, 4 channels)
    active = torch.tensor([[[1, 1, 1, 1, 1]] * 2, [[1, 1, 0, 0, 1], [1, 0, 1, 0, 1]], [[1, 0, 0, 0, 1]] * 2]).bool()
    before, right = None, [(k[0], v[0]), (-k[0], -v[0])]  # layer 1 gets other numbers than layer 0
    for i, layer in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)):
        if layer == 0: memory = Frozen(2, active[i] if i else None, before)
        keep, sign, old = active[i][:, None, :, None], 1 - 2 * layer, right[layer]
        got = call(memory.update, layer, sign * k[i], sign * v[i], name='Frozen.update')
        expect(isinstance(got, (tuple, list)) and len(got) == 2, "Frozen.update() should return two tensors, keys and values")
        right[layer] = torch.where(keep, sign * k[i], old[0]), torch.where(keep, sign * v[i], old[1])
        for n, what, new in ((0, 'keys', sign * k), (1, 'values', sign * v)):
            name, want, stored = f"in pass {i}, Frozen.update()", right[layer][n], (memory.k, memory.v)[n][layer]
            compare(f"{name} returns {what} in a tensor that", got[n], want, ('row', 'head', 'position', 'channel'), {
                f"{name} returns all {what} anew; halted tokens should keep those of their last active pass":
                    new[i],
                f"{name} has it the wrong way round: active tokens get new {what}, halted ones keep theirs":
                    torch.where(keep, old[n], new[i]),
                f"{name} gives halted tokens the {what} that the pass before made, not those it read: store the frozen ones":
                    torch.where(keep, new[i], new[max(0, i - 1)]),
                f"{name} gives halted tokens the {what} of another layer":
                    torch.where(keep, new[i], -old[n])})
            expect(tensors(stored) and same(stored, want), f"{name} returns the right {what}, but self.{what[0]}[layer] should "
                   "hold them too: the next pass looks there")
        expect(not i or same(before.k[layer], old[0]) and same(before.v[layer], old[1]), f"in pass {i}, Frozen.update() writes into "
               "self.before: make new tensors, and leave those of the pass before as they are")
        if layer == 1: before = memory


def check_think(what, gpt, x, gates, about_passes, mistakes=None):
    """Compare think() with one_by_one() in one situation."""
    pos, tau = torch.arange(x.size(1)), 0.5
    got = call(think, gpt, gates, x, pos, tau)
    expect(isinstance(got, (tuple, list)) and len(got) == 2, "think() should return two tensors: the readout and the number of passes")
    readout, passes = got
    shaped("the first result of think(), the readout,", readout, x.shape, AXES)
    shaped("the second result of think(), the number of passes,", passes, x.shape[:2], AXES[:2])
    expect(passes.dtype == torch.long, f"the second result of think() counts passes, in dtype=torch.long, and not in {passes.dtype}")
    want, counts = one_by_one(gpt, gates, x, pos, tau)
    for row, t in (passes != counts).nonzero().tolist():
        raise NotYet(f"with {what}, think() counts {int(passes[row, t])} for the passes of position {t} in row {row}, and "
                     f"{int(counts[row, t])} is right: {about_passes}")

    def more():
        off, first = (readout - want).abs().amax(-1) > 1e-3, counts == 1
        expect(not (off & first).any(), f"with {what}, the readout of halted tokens moves on after they halted: it should stay what "
               "their last pass gave")
        expect(not first.any(), f"with {what}, tokens that halted at once are right and the others are not: they should read the "
               "frozen keys and values. Does each pass get a Frozen with its m and with the Frozen of the pass before?")
    compare(f"with {what}, the readout of think()", readout, want, AXES, mistakes, more)


def always(gpt, idx, factor):
    """Three steps for everybody, with this factor on every mean embedding."""
    x, pos = gpt.embed(idx), torch.arange(idx.size(1))
    for _ in range(3): x = x + factor * gpt.mixture(gpt.trunk(x, pos))
    return gpt.trunk(x, pos)


def check_gradients(idx):
    """Training runs think() too: its gradients are those of model.py's halting='gate'."""
    gpt, pos = tiny(ponder='embedding', n_layer=3, halting='gate', halt_tau=0.5), torch.arange(idx.size(1))
    for gate in gpt.gates: gate[-1].weight.normal_(), gate[-1].bias.fill_(1)
    with torch.enable_grad():
        want = gpt.requires_grad_(True).hidden(idx)
        gradients("think()", gpt, think(gpt, gpt.gates, gpt.embed(idx), pos, 0.5)[0], want)


@torch.no_grad()
def check():
    torch.manual_seed(0)
    check_frozen()
    gpt, idx = tiny(ponder='embedding', n_layer=3), torch.randint(0, 30, (2, 8))
    x, shut, half, wide = gpt.embed(idx), *(lambda h, z=z: torch.full_like(h[..., :1], z) for z in (-9.0, 0.0, 30.0))
    check_think("all gates wide open", gpt, x, [wide] * 3, "s gates are s + 1 passes, the first one included; who has g >= tau goes on", {
        "with all gates wide open, think() scales by what gates return; the sigmoid of it is g": always(gpt, idx, 30.0)})
    check_think("all gates at g = tau = 0.5", gpt, x, [half] * 3, "nobody halts while g >= tau, and g = sigmoid(gate_i(h))", {
        "with all gates at g = 0.5, think() adds the whole mean embedding; the gate should scale it": always(gpt, idx, 1.0)})
    check_think("all gates shut", gpt, x, [shut] * 3, "a token halts when g < tau, and the pass it halts after counts")
    check_think("gate 0 shut and the later ones open", gpt, x, [shut, wide, wide], "who has halted never wakes up again")
    torch.manual_seed(8)  # tokens of 1, 2, 3 and 4 passes, and no gate so close to tau that rounding could decide
    looks = [lambda h, w=torch.randn(32, 1): h @ w / 2 + 1 for _ in range(3)]
    check_think("gates that look at the token", gpt, x, looks, "compare with the equations, line by line")
    check_gradients(idx)
    passes = think(gpt, looks, x, torch.arange(8), 0.5)[1]
    return (f"Masked training and a loop that really stops agree, and here {int(passes.sum())} token passes are enough where 4 for "
            f"everybody would be {4 * passes.numel()}. The tokens of row 0 took {', '.join(map(str, passes[0].tolist()))} passes.")


if __name__ == '__main__': run(__file__, check, HINTS)
