"""
Exercise 6 of 8: thoughts in sequence, and by Jacobi iteration. About 60 minutes.

    python exercises/jacobi.py            checks what you wrote and says what is not right yet
    python exercises/jacobi.py --hint     a hint; --hint=2 and --hint=3 say more

PonderLM-2 (arXiv 2509.23184) gives each token a thought: the hidden state of its slot goes back in
as a slot of its own, which predicts the next token. With one thought per token the model reads

    x_0 z_0 x_1 z_1 x_2 z_2 ..       z_t = output of the trunk at x_t's slot;
                                     token t+1 is predicted at z_t's slot

A slot sees all slots before it, thoughts included, and both slots of token t stand at rotary
position t. Part 1 is to do just this, one slot after the other. It is exact, and for training far
too slow: T tokens take 2T passes that wait for each other.

But look at it as an equation: the thoughts z = (z_0, .., z_{T-1}) must satisfy z = F(z), where F
runs the trunk once over x_0 z_0 x_1 z_1 .. and reads the outputs at the token slots. Jacobi
iteration solves it by guessing z and putting F(z) in its place, for all t at once. Part 2:

    first guess     z = trunk(x_0 x_1 x_2 ..)                             T slots
                    a plain pass without thoughts
    R iterations    z_t <- output at x_t's slot of x_0 z_0 x_1 z_1 ..     2T slots each
                    all t from the old z
    last pass       result_t = output at z_t's slot                       2T slots

Part 3: z_0 is exact from the start, since x_0 has nothing before it. If z_0 .. z_{n-1} are exact,
then one more iteration makes z_n exact. How many iterations make every result exact, whatever the
weights?

You are compared with `Latent` of model.py. x (B, T, C) are embeddings, gpt.trunk(x, pos) runs all
blocks and the final norm.
"""
from dataclasses import dataclass
from unittest.mock import patch

import torch
from check import NotYet, call, causal, difference, expect, gradients, run, tiny

from engine.memory import no_caches


def sequential(gpt, x):
    """
    x (B, T, C) -> the outputs at the thoughts' slots, (B, T, C), slot by slot. No cache is needed:
    at this size you may run the trunk on all slots so far for every new slot.
    """
    raise NotImplementedError("sequential() is still empty: write it in place of this line")


def jacobi(gpt, x, iterations):
    """x (B, T, C) -> the same by Jacobi iteration, `iterations` + 2 passes in all."""
    raise NotImplementedError(
        "sequential() is right, jacobi() is still empty: write it in place of this line")


def iterations_needed(T):
    """
    The smallest number of iterations after which jacobi() is exact for any weights and any text of
    T tokens.
    """
    raise NotImplementedError(
        "jacobi() is right, iterations_needed() is still empty: write it in place of this line")


# -------------------------------------------------------------------------------------------------
# the check: read it when you are done, it gives things away

HINTS = (
    "sequential: keep a list of slots. For each t, append x[:, t], run the trunk on "
    "torch.stack(slots, 1), append the last output (that is z_t), run again, and keep the last "
    "output as the result. pos is 0 0 1 1 2 2 ..",

    "jacobi: torch.stack((x, z), 2).flatten(1, 2) interleaves to x_0 z_0 x_1 z_1 .., and "
    "pos.repeat_interleave(2) goes with it. In the output h, h[:, 0::2] are the token slots and "
    "h[:, 1::2] the thoughts' slots.",

    "iterations_needed: the first guess is exact at position 0. The result at t needs z_0 .. z_t. "
    "Try T = 1, 2, 3 by hand.",
)
AXES = ('row', 'position', 'channel')
SLOTS = ("returns the outputs at the token slots, which are the thoughts; "
         "the results are the outputs at the thoughts' slots")
POSITIONS = "gives each slot a position of its own; both slots of token t stand at position t"


def library(gpt, x, iterations):
    """What model.py computes by Jacobi iteration."""
    latent = gpt.mechanism
    latent.jacobi = iterations
    memory = no_caches(latent, gpt.config.n_layer)
    pos = memory.begin(*x.shape[:2], x.device)
    return latent(gpt, x, pos, memory)


def library_sequential(gpt, x):
    """What model.py computes while generating: token by token, with a cache."""
    B, T, _ = x.shape
    memory = gpt.new_memory(T)
    results = []
    for t in range(T):
        pos = memory.begin(B, 1, x.device)
        results.append(gpt.mechanism(gpt, x[:, t:t + 1], pos, memory))
    return torch.cat(results, 1)


@dataclass
class Watched:
    """What somebody saw who stood beside GPT.trunk."""
    result: torch.Tensor  # of the function that called the trunk
    sizes: list           # how many slots each pass had
    last: torch.Tensor    # the output of the last pass


def watch(function, gpt, *args, renumber=False):
    """Run function(gpt, *args) -> Watched. renumber: give every slot a position of its own."""
    trunk, sizes, outputs = gpt.trunk, [], []

    def spy(x, pos, memory=None):
        sizes.append(x.size(1))
        if renumber:
            begin = getattr(memory, 'length', 0)  # slots of a cache
            pos = begin + torch.arange(x.size(1))
        outputs.append(trunk(x, pos, memory))
        return outputs[-1]

    with patch.object(gpt, 'trunk', spy):
        result = function(gpt, *args)
    return Watched(result, sizes, outputs[-1])


def check_sequential(gpt, x):
    name, T = "sequential()", x.size(1)
    found = difference(name, call(sequential, gpt, x), library_sequential(gpt, x), AXES)
    if not found:
        return
    exact = watch(library, gpt, x, T)  # in its last pass, tokens and thoughts take turns
    found.recognise({
        f"{name} {SLOTS}":
            exact.last[:, 0::2],
        f"{name} {POSITIONS}":
            watch(library_sequential, gpt, x, renumber=True).result,
        f"{name} returns what the plain model gives, without any thought":
            gpt.trunk(x, torch.arange(T)),
    })
    causal(name, lambda changed: sequential(gpt, changed), x)
    found.locate()


def check_jacobi(gpt, x, R):
    name, T = f"jacobi() with iterations={R}", x.size(1)
    right = watch(library, gpt, x, R)
    found = difference(name, call(jacobi, gpt, x, R), right.result, AXES)
    if not found:
        return
    mistakes = {
        f"{name} {SLOTS}":
            right.last[:, 0::2],
        f"{name} {POSITIONS}":
            watch(library, gpt, x, R, renumber=True).result,
        f"{name} did one iteration more than asked":
            library(gpt, x, R + 1),
        f"{name} is the exact result: it should stop after {R}, that is how training can afford "
        "it":
            library(gpt, x, T),
    }
    if R > 0:
        mistakes[f"{name} did one iteration less than asked"] = library(gpt, x, R - 1)
    found.recognise(mistakes)
    causal(name, lambda changed: jacobi(gpt, changed, R), x)
    sizes = watch(jacobi, gpt, x, R).sizes
    expect(sizes == right.sizes,
           f"{name} ran passes of {sizes} slots; asked for are {right.sizes}: a plain pass of "
           f"T = {T} for the first guess, then {R + 1} of 2T")
    found.locate()


def error(gpt, x, R, t):
    """How far jacobi() is off at position t after R iterations."""
    difference_at_t = (jacobi(gpt, x, R) - library_sequential(gpt, x))[:, t]
    return float(difference_at_t.abs().max())


def check_needed(gpt, x, T):
    name = f"iterations_needed({T})"
    R = call(iterations_needed, T)
    expect(type(R) is int and R >= 0,
           f"{name} should be a whole number from 0 up, and is {str(R)[:20]!r}")
    if R < T - 1:
        off = error(gpt, x, R, T - 1)
        raise NotYet(f"{name} = {R} is too few: after them the result at position {T - 1} is "
                     f"still off by {off:.2g}")
    expect(R == T - 1,
           f"{name} = {R} is more than it takes: the first guess is already exact at position 0, "
           "and the last pass reads all the thoughts")


@torch.no_grad()
def check():
    torch.manual_seed(0)
    T = 6
    gpt = tiny(ponder='latent', ponder_steps=1, n_layer=3)
    x = gpt.embed(torch.randint(0, 30, (2, T)))
    check_sequential(gpt, x)
    for R in (0, 1, 3):
        check_jacobi(gpt, x, R)
    with torch.enable_grad():  # training goes through it
        gpt.requires_grad_(True)
        gradients("jacobi()", gpt, jacobi(gpt, x, 2), library(gpt, x, 2))
    for n in (1, 2, T):
        check_needed(gpt, x, n)
    errors = ', '.join(f"{error(gpt, x, R, T - 1):.1e}" for R in range(T))
    return (f"At the last of {T} positions your jacobi() is off by {errors} after 0 to {T - 1} "
            "iterations. It need not be exact to be close, which is why PonderLM-2 can train with "
            "2 or 3 of them.")


if __name__ == '__main__':
    run(__file__, check, HINTS)
