"""
Exercise 6 of 8: thoughts in sequence, and by Jacobi iteration. About 60 minutes.

    python exercises/jacobi.py            checks what you wrote and says what is not right yet
    python exercises/jacobi.py --hint     a hint; --hint=2 and --hint=3 say more

PonderLM-2 (arXiv 2509.23184) gives each token a thought: the hidden state of its slot goes back in as a slot of its
own, which predicts the next token. With one thought per token the model reads

    x_0 z_0 x_1 z_1 x_2 z_2 ..       z_t = output of the trunk at x_t's slot;  token t+1 is predicted at z_t's slot

A slot sees all slots before it, thoughts included, and both slots of token t stand at rotary position t. Part 1 is to
do just this, one slot after the other. It is exact, and for training far too slow: T tokens take 2T passes that wait
for each other.

But look at it as an equation: the thoughts z = (z_0, .., z_{T-1}) must satisfy z = F(z), where F runs the trunk once
over x_0 z_0 x_1 z_1 .. and reads the outputs at the token slots. Jacobi iteration solves it by guessing z and putting
F(z) in its place, for all t at once. Part 2:

    first guess     z = trunk(x_0 x_1 x_2 ..)                             a plain pass without thoughts         T slots
    R iterations    z_t <- output at x_t's slot of x_0 z_0 x_1 z_1 ..     all t from the old z                 2T slots each
    last pass       result_t = output at z_t's slot                                                            2T slots

Part 3: z_0 is exact from the start, since x_0 has nothing before it. If z_0 .. z_{n-1} are exact, then one more
iteration makes z_n exact. How many iterations make every result exact, whatever the weights?

You are compared with `latent` of model.py. x (B, T, C) are embeddings, gpt.trunk(x, pos) runs all blocks and the
final norm.
"""
from unittest.mock import patch

import torch
from check import call, causal, compare, expect, gradients, run, tiny

from engine.memory import KVCache
from model import latent


def sequential(gpt, x):
    """
    x (B, T, C) -> the outputs at the thoughts' slots, (B, T, C), slot by slot. No cache is needed: at this size you may run
    the trunk on all slots so far for every new slot.
    """
    raise NotImplementedError("sequential() is still empty: write it in place of this line")


def jacobi(gpt, x, iterations):
    """x (B, T, C) -> the same by Jacobi iteration, `iterations` + 2 passes in all."""
    raise NotImplementedError("sequential() is right, jacobi() is still empty: write it in place of this line")


def iterations_needed(T):
    """The smallest number of iterations after which jacobi() is exact for any weights and any text of T tokens."""
    raise NotImplementedError("jacobi() is right, iterations_needed() is still empty: write it in place of this line")


# ----------------------------------------------------------------------------------------------------------------------
# the check: read it when you are done, it gives things away

HINTS = (
    "sequential: keep a list of slots. For each t, append x[:, t], run the trunk on torch.stack(slots, 1), append the last output "
    "(that is z_t), run again, and keep the last output as the result. pos is 0 0 1 1 2 2 ..",
    "jacobi: torch.stack((x, z), 2).flatten(1, 2) interleaves to x_0 z_0 x_1 z_1 .., and pos.repeat_interleave(2) goes with it. "
    "In the output h, h[:, 0::2] are the token slots and h[:, 1::2] the thoughts' slots.",
    "iterations_needed: the first guess is exact at position 0. The result at t needs z_0 .. z_t. Try T = 1, 2, 3 by hand.",
)
AXES = ('row', 'position', 'channel')
SLOTS = "returns the outputs at the token slots, which are the thoughts; the results are the outputs at the thoughts' slots"
POSITIONS = "gives each slot a position of its own; both slots of token t stand at position t"


def library(gpt, x, iterations):
    """What model.py computes by Jacobi iteration."""
    return latent(gpt, x, torch.arange(x.size(1)), [None], iterations)


def library_sequential(gpt, x):
    """What model.py computes while generating: token by token, with a cache."""
    cache = KVCache(gpt.config.n_layer, 2 * x.size(1), slots=2)
    return torch.cat([latent(gpt, x[:, t:t + 1], torch.tensor([t]), [cache], 0) for t in range(x.size(1))], 1)


def spied(gpt, function, *args, renumber=False):
    """(function(gpt, *args), the slots of each trunk pass, output of the last). renumber: give every slot its own position."""
    trunk, sizes, last = gpt.trunk, [], []

    def spy(x, pos, memory=None):
        sizes.append(x.size(1))
        begin = memory.length if renumber and memory is not None else 0
        last[:] = [trunk(x, begin + torch.arange(x.size(1)) if renumber else pos, memory)]
        return last[0]
    with patch.object(gpt, 'trunk', spy): return function(gpt, *args), sizes, last[0]


def check_sequential(gpt, x):
    name, T = "sequential()", x.size(1)
    compare(name, call(sequential, gpt, x), library_sequential(gpt, x), AXES, lambda: {
        f"{name} {SLOTS}": spied(gpt, library, x, T)[2][:, 0::2],
        f"{name} {POSITIONS}": spied(gpt, library_sequential, x, renumber=True)[0],
        f"{name} returns what the plain model gives, without any thought": gpt.trunk(x, torch.arange(T)),
    }, lambda: causal(name, lambda x: sequential(gpt, x), x))


def check_jacobi(gpt, x, R):
    name, T = f"jacobi() with iterations={R}", x.size(1)
    want, sizes, last = spied(gpt, library, x, R)
    mistakes = lambda: {
        f"{name} {SLOTS}": last[:, 0::2],
        f"{name} {POSITIONS}": spied(gpt, library, x, R, renumber=True)[0],
        f"{name} did one iteration more than asked": library(gpt, x, R + 1),
        f"{name} did one iteration less than asked": library(gpt, x, R - 1) if R else want,
        f"{name} is the exact result: it should stop after {R}, that is how training can afford it": library(gpt, x, T),
    }

    def more():
        causal(name, lambda x: jacobi(gpt, x, R), x)
        mine = spied(gpt, jacobi, x, R)[1]
        expect(mine == sizes, f"{name} ran passes of {mine} slots; asked for are {sizes}: a plain pass of T = {T} for the first guess, "
               f"then {R + 1} of 2T")
    compare(name, call(jacobi, gpt, x, R), want, AXES, mistakes, more)


def check_needed(n, error):
    R, name = call(iterations_needed, n), f"iterations_needed({n})"
    expect(type(R) is int and R >= 0, f"{name} should be a whole number from 0 up, and is {str(R)[:20]!r}")
    expect(R >= n - 1, f"{name} = {R} is too few: after them the result at position {n - 1} is still off by {error(R, n - 1):.2g}")
    expect(R <= n - 1, f"{name} = {R} is more than it takes: the first guess is already exact at position 0, and the last pass "
           "reads all the thoughts")


@torch.no_grad()
def check():
    torch.manual_seed(0)
    T, gpt = 6, tiny(ponder='latent', ponder_steps=1, n_layer=3)
    x = gpt.embed(torch.randint(0, 30, (2, T)))
    check_sequential(gpt, x)
    for R in (0, 1, 3): check_jacobi(gpt, x, R)
    with torch.enable_grad():  # training goes through it
        gpt.requires_grad_(True)
        gradients("jacobi()", gpt, jacobi(gpt, x, 2), library(gpt, x, 2))
    exact = library_sequential(gpt, x)
    error = lambda R, t: float((jacobi(gpt, x, R) - exact)[:, t].abs().max())
    for n in (1, 2, T): check_needed(n, error)
    return (f"At the last of {T} positions your jacobi() is off by {', '.join(f'{error(R, T - 1):.1e}' for R in range(T))} after 0 to "
            f"{T - 1} iterations. It need not be exact to be close, which is why PonderLM-2 can train with 2 or 3 of them.")


if __name__ == '__main__': run(__file__, check, HINTS)
