"""
Exercise 2 of 8: rotary positions (RoPE). About 40 minutes.

    python exercises/rope.py            checks what you wrote and says what is not right yet
    python exercises/rope.py --hint     a hint; --hint=3: all three

Attention alone knows no order among the tokens that a query may read: shuffle their keys and
values, and the sum stays the same. RoPE (arXiv 2104.09864) tells it, by turning queries and keys.
The hd channels of a head are paired, i with i + hd/2, and each pair is a point in a plane. At
position p the plane of pair i is turned by the angle

    angle(p, i) = p * theta^(-2i / hd)                          i = 0 .. hd/2 - 1
                                                                theta: a number, such as 10,000

    x'_i        = x_i cos(angle) - x_{i+hd/2} sin(angle)        the usual rotation by that angle
    x'_{i+hd/2} = x_i sin(angle) + x_{i+hd/2} cos(angle)

If two points are turned by a and b, their scalar product is as if turned by 0 and b - a. So of the
positions only t - u counts in q_t . k_u: the model sees distances, not places. Pair 0 turns by 1
radian per token and tells neighbours apart; the last pairs turn so slowly that they reach over the
whole text.

    shape letters    B rows of the batch    S positions    hd width of a head

You are compared with rope_table and apply_rope of model.py. Afterwards, think about this: what
would change in the model's output if every position were 100 larger?
"""
import check    # finds the project's files
import torch


def angles(pos, hd, theta):
    """
    Positions pos (S,), which may be any whole numbers from 0 up, in any order
    -> the angles of all pairs, (S, hd/2).
    """
    raise NotImplementedError("angles() is still empty: write it in place of this line")


def rotate(x, pos, theta):
    """
    Turn x (B, S, heads, hd), whose entries x[:, s] stand at position pos[s] -> the same shape.
    (Here the heads come after the positions; in exercise 1 they came before.) Use angles().
    """
    raise NotImplementedError(
        "rotate() is still empty: write it in place of this line")


# -------------------------------------------------------------------------------------------------
# the check: read it when you are done, it gives things away

from unittest.mock import patch

from check import call, compare, difference, draw, expect, inside, same, tiny

import model
from model import apply_rope, rope_table

HINTS = (
    "torch.arange(0, hd, 2) is 2i for all pairs. pos[:, None] * frequencies makes the table "
    "(S, hd/2) by broadcasting.",

    "x.chunk(2, dim=-1) gives the halves, (B, S, heads, hd/2) each. The angles need an axis for "
    "the heads: angle[:, None, :].",

    "The two lines of the equation give the two halves of the result; "
    "torch.cat((first, second), dim=-1) puts them together.",
)
AXES = ('row', 'position', 'head', 'channel')
PLACES = (torch.tensor([0, 1, 1, 5, 30, 2]), torch.tensor([9, 4, 107]))


def check_angles(pos, hd, theta):
    name = f"angles(pos, hd={hd}, theta={theta:g})"
    i = torch.arange(hd // 2)
    place = pos[:, None]
    counted = torch.arange(len(pos))[:, None]
    right = theta ** (-2 * i / hd)  # radians per token, of each pair
    compare(name, call(angles, pos, hd, theta), place * right, ('place', 'pair'), {
        f"{name} ignores pos and counts 0, 1, 2, ..: positions may repeat and jump":
            counted * right,
        f"{name} counts from the smallest position in pos; angles are those of pos itself":
            (place - pos.min()) * right,
        f"{name} counts positions from 1; they are what pos says":
            (place + 1) * right,
        f"{name} has the exponent -i / hd; it should be -2i / hd":
            place * theta ** (-i / hd),
        f"{name} has the exponent -2i / (hd/2): hd is the width of the head, not the number of "
        "pairs. Or it has -4i / hd: is i doubled twice?":
            place * theta ** (-4 * i / hd),
        f"{name} grows with the pair: the exponent should be negative, so that later pairs turn "
        "more slowly":
            place * theta ** (2 * i / hd),
    })


def library(x, pos, theta):
    """What model.py makes of x."""
    cos, sin = rope_table(pos, x.size(-1), theta, x.dtype)
    return apply_rope(x, cos, sin)


def library_with_neighbours(x, pos, theta):
    """The same if the pairs were (0, 1), (2, 3), ..: channels change places before and after."""
    hd = x.size(-1)
    to_halves = torch.arange(hd).view(-1, 2).T.flatten()  # the first of all pairs, then the second
    return library(x[..., to_halves], pos, theta)[..., to_halves.argsort()]


def pairs_mixed_up(x, pos, theta, neighbours):
    """
    What comes of two conventions in one: the channels are paired as neighbours and the angles stand
    as for halves, or the other way round.
    """
    cos, sin = rope_table(pos, x.size(-1), theta, x.dtype)              # (S, 1, hd/2) each
    if neighbours:
        a, b = x[..., 0::2], x[..., 1::2]
        quarter_turn = torch.stack((-b, a), -1).flatten(-2)
        return x * torch.cat((cos, cos), -1) + quarter_turn * torch.cat((sin, sin), -1)
    a, b = x.chunk(2, -1)
    quarter_turn = torch.cat((-b, a), -1)
    return x * cos.repeat_interleave(2, -1) + quarter_turn * sin.repeat_interleave(2, -1)


def check_rotate(x, pos, theta):
    name = "rotate()"
    found = difference(name, call(rotate, x, pos, theta), library(x, pos, theta), AXES)
    if not found:
        return
    found.recognise({
        f"{name} turns the wrong way: the minus belongs to the first half, "
        "x_i cos - x_(i+hd/2) sin":
            library(x, -pos, theta),
        f"{name} pairs neighbours, (0, 1), (2, 3), ..; here the pairs are i and i + hd/2":
            library_with_neighbours(x, pos, theta),
        f"{name} pairs neighbours, (0, 1), (2, 3), .., and has the angles in another order; here "
        "the pairs are i and i + hd/2":
            pairs_mixed_up(x, pos, theta, neighbours=True),
        f"{name} gives channels 0 and 1 the same angle; channel i has the angle of pair i, and so "
        "has channel i + hd/2":
            pairs_mixed_up(x, pos, theta, neighbours=False),
        f"{name} counts positions 0, 1, 2, .. itself instead of reading pos":
            library(x, torch.arange(len(pos)), theta),
        f"{name} has a theta of its own; it should take the argument":
            library(x, pos, 10_000.0),
    })
    y = rotate(x, pos, theta)
    if pos[0] == 0:
        expect(same(y[:, 0], x[:, 0]),
               f"{name} changes what stands at position 0, where all angles are 0")
    expect(same(y.norm(dim=-1), x.norm(dim=-1)),
           f"{name} changes the length of vectors, and a rotation never does: check the signs, "
           "and that each half of the result uses both old halves")
    found.locate()


def in_place_of_the_library(x, pos, theta):
    return rotate(x, pos, theta).to(x.dtype)    # it may compute in float64


def check_inside():
    """The model makes a table once and rotates with it; here the "table" is what rotate() needs."""
    table = patch.object(model, 'rope_table', lambda pos, hd, theta, dtype: (pos, theta))
    turn = patch.object(model, 'apply_rope', in_place_of_the_library)
    inside("your rotate()", tiny(), table, turn)


def score(q, k, t, u, theta):
    """q . k with the query at position t and the key at position u."""
    turned_q = rotate(q, torch.tensor([t]), theta)
    turned_k = rotate(k, torch.tensor([u]), theta)
    return float((turned_q * turned_k).sum())


def check_all_angles():
    for pos in PLACES:
        check_angles(pos, draw(6, 8, 10), draw(50.0, 100.0, 200.0))


def check_all_rotations():
    for pos in PLACES:
        hd, theta = draw(6, 8, 10), draw(50.0, 100.0, 200.0)
        check_rotate(torch.randn(2, len(pos), 3, hd), pos, theta)


def conclusion():
    q, k = torch.randn(2, 1, 1, 1, 8)
    theta = 100.0
    near = score(q, k, 7, 4, theta)
    far = score(q, k, 107, 104, theta)
    back = score(q, k, 4, 7, theta)
    expect(abs(near - far) < 1e-3 < abs(near - back),
           "only distances should count, and their direction")
    return ("A GPT of model.py gives the same logits and gradients with your rotate() inside. "
            f"And only distances count: a query at 7 with a key at 4 scores {near:.3f}, "
            f"at 107 with 104 {far:.3f}, but at 4 with 7 {back:.3f}.")


PARTS = {
    "angles()": check_all_angles,
    "rotate()": check_all_rotations,
    "inside a GPT": check_inside,
}


if __name__ == '__main__':
    check.run(__name__)
