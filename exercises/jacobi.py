"""
Exercise 6 of 8: thoughts in sequence, and by Jacobi iteration. About 60 minutes.

    python exercises/jacobi.py            checks what you wrote and says what is not right yet
    python exercises/jacobi.py --hint     a hint; --hint=3: all three

PonderLM-2 (arXiv 2509.23184) gives each token a thought. A slot is one place in the sequence of
vectors that goes through the trunk. A token has one. What comes out of this slot goes back in as a
second slot, the thought, which predicts the next token. With one thought per token the model reads

    x_0 z_0 x_1 z_1 x_2 z_2 ..       z_t = output of the trunk at x_t's slot;
                                     token t+1 is predicted at z_t's slot

A slot sees all slots before it, thoughts included, and both slots of token t stand at rotary
position t. Part 1 is to do just this, one slot after the other, as generation does. For training it
is far too slow: T tokens take 2T passes that wait for each other.

But look at it as an equation: the thoughts z = (z_0, .., z_{T-1}) must satisfy z = F(z), where F
runs the trunk once over x_0 z_0 x_1 z_1 .. and reads the outputs at the token slots. Jacobi
iteration solves it by guessing z and putting F(z) in its place, for all t at once. Part 2:

    first guess     z = trunk(x_0 x_1 x_2 ..)                             T slots
                    a plain pass without thoughts
    R iterations    z_t <- output at x_t's slot of x_0 z_0 x_1 z_1 ..     2T slots each
                    all t from the old z
    last pass       result_t = output at z_t's slot                       2T slots

Part 3: a thought or a result is exact if it is the one of part 1. z_0 is exact from the first guess
on, since x_0 has nothing before it. If z_0 .. z_{n-1} are exact, then one more iteration makes z_n
exact. How many iterations make every result exact, whatever the weights?

You are compared with `Latent` of model.py. x (B, T, C) are embeddings, C wide. gpt.trunk(x) runs
all blocks and the final norm over a text, at the positions 0, 1, 2, .. `read` takes other ones.
"""
import check    # finds the project's files
import torch

from model import Memory


def read(gpt, slots, pos):
    """
    gpt.trunk over a sequence of slots (B, S, C) at the rotary positions pos (S,): each slot reads
    itself and those before it. -> (B, S, C). This is given; use it.
    """
    assert len(pos) == slots.size(1), f"pos has {len(pos)} positions for {slots.size(1)} slots"
    memory = Memory()
    memory.begin(slots)     # it counts, as in a text: 0, 1, 2, ..
    memory.pos = pos        # but slots of one token share its position
    return gpt.trunk(slots, memory)


def sequential(gpt, x):
    """
    x (B, T, C) -> the outputs at the thoughts' slots, (B, T, C), slot by slot. No cache is needed:
    at this size you may read all slots so far again for every new slot.
    """
    raise NotImplementedError("sequential() is still empty: write it in place of this line")


def jacobi(gpt, x, iterations):
    """x (B, T, C) -> the results after so many iterations, (B, T, C): `iterations` + 2 passes."""
    raise NotImplementedError(
        "jacobi() is still empty: write it in place of this line")


def iterations_needed(T):
    """
    The smallest number of iterations after which jacobi() is exact for any weights and any text of
    T tokens.
    """
    raise NotImplementedError(
        "iterations_needed() is still empty: write it in place of this line")


# -------------------------------------------------------------------------------------------------
# the check: read it when you are done, it gives things away

from dataclasses import dataclass
from unittest.mock import patch

from answers import read as row_of
from check import (NotYet, call, causal, difference, draw, expect, gradients, record, same, tiny)

GIVEN = ('Memory',)  # what may be imported from the project
HINTS = (
    "sequential: keep a list of slots. Each token adds two, and after each of them you read the "
    "whole list, torch.stack(slots, 1). pos is 0 0 1 1 2 2 .., with as many numbers as there are "
    "slots so far.",

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
    gpt.config.jacobi_iters = iterations
    memory = gpt.new_memory()
    memory.begin(x)
    return gpt.mechanism(gpt, x, memory)


def library_sequential(gpt, x):
    """What model.py computes while generating: token by token, with a cache."""
    memory = gpt.new_memory()
    results = []
    for token in x.split(1, dim=1):
        memory.begin(token)
        results.append(gpt.mechanism(gpt, token, memory))
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

    def spy(x, memory=None):
        sizes.append(x.size(1))
        if renumber:
            memory.pos = torch.arange(memory.N - x.size(1), memory.N)
        outputs.append(trunk(x, memory))
        return outputs[-1]

    with patch.object(gpt, 'trunk', spy):
        result = function(gpt, *args)
    return Watched(result, sizes, outputs[-1])


def variant(gpt, x, R, joined='in turn', put_back='tokens', repeated=False):
    """
    Jacobi iteration with a mistake in it.
    joined: 'one after the other' for x_0 x_1 .. z_0 z_1 ..; 'thoughts first' for z_0 x_0 z_1 ..
    put_back: 'thoughts' to make the outputs at the thoughts' slots the next thoughts; 'all' to put
    the outputs of all slots back into them; 'sum' to add the new thoughts to the old ones.
    repeated: the positions are 0 1 2 .. 0 1 2 .., where the slots take turns.
    """
    pos = torch.arange(x.size(1))
    of_slots = pos.repeat(2) if repeated else pos.repeat_interleave(2)
    z = gpt.trunk(x)
    for _ in range(R + 1):
        if joined != 'one after the other':
            pair = (z, x) if joined == 'thoughts first' else (x, z)
            h = row_of(gpt, torch.stack(pair, 2).flatten(1, 2), of_slots)
            of_tokens, of_thoughts = h[:, 0::2], h[:, 1::2]
        else:
            h = row_of(gpt, torch.cat((x, z), 1), pos.repeat(2))
            of_tokens, of_thoughts = h.chunk(2, dim=1)
        if put_back == 'all':
            x = of_tokens
        if put_back == 'sum':
            z = z + of_tokens
        else:
            z = of_tokens if put_back == 'tokens' else of_thoughts
    return of_thoughts


def without_jacobi():
    """A patch: while it lasts, sequential() cannot call jacobi()."""
    def stop(*args, **options):
        raise NotYet("sequential() calls jacobi(): do one slot after the other here, so that the "
                     "two can be compared")
    return patch.dict(sequential.__globals__, jacobi=stop)


def check_sequential(gpt, x):
    name, T = "sequential()", x.size(1)
    with without_jacobi():
        got = call(sequential, gpt, x)
    found = difference(name, got, library_sequential(gpt, x), AXES)
    if not found:
        return
    exact = watch(library, gpt, x, T)  # in its last pass, tokens and thoughts take turns
    found.recognise({
        f"{name} {SLOTS}":
            exact.last[:, 0::2],
        f"{name} {POSITIONS}":
            watch(library_sequential, gpt, x, renumber=True).result,
        f"{name} returns what the plain model gives, without any thought":
            gpt.trunk(x),
        f"{name} has all tokens first and then all thoughts; a token's thought comes right after "
        "it, x_0 z_0 x_1 z_1 ..":
            variant(gpt, x, T, joined='one after the other'),
    })
    causal(name, lambda changed: sequential(gpt, changed), x)
    right = [same(got[:, t], found.want[:, t]) for t in (0, 1)]
    expect(right != [True, False],
           f"{name} is right at position 0 and wrong at 1. The slots of token 1 should see x_0 and "
           "the thought z_0, too. And is z_t the output at the slot of x_t?")
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
        f"{name} has all tokens first and then all thoughts; they take turns, x_0 z_0 x_1 z_1 ..":
            variant(gpt, x, R, joined='one after the other'),
        f"{name} has each thought in front of its token; they take turns, x_0 z_0 x_1 z_1 ..":
            variant(gpt, x, R, joined='thoughts first'),
        f"{name} gives the slots the positions 0 1 2 .. 0 1 2 ..; both slots of token t stand at "
        "t, so 0 0 1 1 2 2 ..":
            variant(gpt, x, R, repeated=True),
        f"{name} puts the outputs at the thoughts' slots back; the new z_t is the output at x_t's "
        "slot":
            variant(gpt, x, R, put_back='thoughts'),
        f"{name} puts outputs into all slots; x_t stays in its slot, and only z_t changes":
            variant(gpt, x, R, put_back='all'),
        f"{name} adds the new thoughts to the old ones; they take their place":
            variant(gpt, x, R, put_back='sum'),
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
    record(R)
    if R < T - 1:
        sentence = f"{name} = {R} is too few: the result at position {T - 1} is not exact yet"
        if T <= x.size(1):
            sentence = f"{sentence}, after them it is still off by {error(gpt, x, R, T - 1):.2g}"
        raise NotYet(sentence)
    expect(R == T - 1,
           f"{name} = {R} is more than it takes: the first guess is already exact at position 0, "
           "and the last pass reads all the thoughts")


def model_and_input():
    gpt = tiny(ponder='latent', ponder_steps=1, n_layer=2)
    return gpt, gpt.embed(torch.randint(0, 30, (2, draw(5, 6, 7))))


def check_slot_by_slot():
    check_sequential(*model_and_input())


def check_iterations():
    gpt, x = model_and_input()
    for R in (0, 1, 3):
        check_jacobi(gpt, x, R)


def check_gradients():
    gpt, x = model_and_input()
    gpt.requires_grad_(True)
    idx = torch.randint(0, 30, x.shape[:2])     # embedded twice, as a backward frees its graph
    gradients("jacobi()", gpt, jacobi(gpt, gpt.embed(idx), 2), library(gpt, gpt.embed(idx), 2))


def check_count():
    gpt, x = model_and_input()
    for T in (1, 2, x.size(1), 100):
        check_needed(gpt, x, T)


def conclusion():
    gpt, x = model_and_input()
    T = x.size(1)
    errors = ', '.join(f"{error(gpt, x, R, T - 1):.1e}" for R in range(T))
    return (f"At the last of {T} positions your jacobi() is off by {errors} after 0 to {T - 1} "
            "iterations. It need not be exact to be close, which is why PonderLM-2 can train with "
            "2 or 3 of them. Now read Latent in model.py. In the place of read(), SlotMemory in "
            "model.py gives slots the position of their token, and forgets them where the next "
            "iteration brings better ones.")


PARTS = {
    "sequential()": check_slot_by_slot,
    "jacobi()": check_iterations,
    "the gradients of jacobi()": check_gradients,
    "iterations_needed()": check_count,
}


if __name__ == '__main__':
    check.run(__name__)
