"""
Exercise 3 of 8: the key/value cache. About 45 minutes.

    python exercises/kv_cache.py            checks what you wrote and says what is not right yet
    python exercises/kv_cache.py --hint     a hint; --hint=3: all three, mostly one per function

To generate, a model predicts a token, appends it and predicts the next. Running the whole text
again for each new token would cost 1 + 2 + .. + T positions. But attention is causal: what a
position computes never changes when others follow it. All that later positions ever ask of it are
its keys and values. Keep those, and a new token costs one position.

model.py has one seam for this. `GPT.trunk(x, pos, memory)` runs the blocks on new positions only,
and asks `memory` two things:

    memory.mask(S, device)        once per pass, before anything else:
                                  what may each of the S new positions read?
    memory.update(layer, k, v)    in each layer:
                                  here are the new keys and values, give me all that there are

If n positions are in the cache and S are new, new position i stands at n + i. It may read the n
old ones, and the new ones up to itself:

    mask[i, u] = True  for u <= n + i              (S, n + S)

Keys are rotated before they are handed over (exercise 2), so `pos` has to say where the new
positions really stand. Write the cache, and then the loop that uses it. You are compared with the
model without a cache, and with GPT.generate. Afterwards, think about this: how many bytes does
your cache hold after T tokens, and what do grouped queries (exercise 1) change about it?
"""
import check  # in a folder of your own: python exercises/check.py FOLDER
import torch


class Cache:
    """The keys and values of all positions read so far, layer by layer."""

    def __init__(self, n_layer):
        self.k = [None] * n_layer  # None: nothing yet
        self.v = [None] * n_layer

    def update(self, layer, k, v):
        """
        Append k and v (B, nkv, S, hd) of one layer
        -> all keys and all values of that layer, each (B, nkv, n + S, hd).
        """
        raise NotImplementedError(
            "Cache.update() is still empty: write it in place of this line")

    def mask(self, S, device):
        """What S new positions may read: bool (S, n + S), True for yes."""
        raise NotImplementedError(
            "Cache.mask() is still empty: write it in place of this line")


def generate(gpt, prompt, n):
    """
    prompt (B, T) -> (B, T + n): append the likeliest token n times. Each token may go through
    gpt.trunk only once. gpt.embed(tokens) gives x, gpt.trunk(x, pos, cache) hidden states h at
    positions pos (S,), gpt.head(h) logits; gpt.config.n_layer counts layers.
    """
    raise NotImplementedError(
        "generate() is still empty: write it in place of this line")


# -------------------------------------------------------------------------------------------------
# the check: read it when you are done, it gives things away

from unittest.mock import patch

from check import NotYet, call, compare, draw, expect, record, shaped, tiny

HINTS = (
    "update: if self.k[layer] is None, the new ones are all there are; otherwise torch.cat along "
    "the axis of positions, 2. Store the result before you return it.",

    "mask: n is self.k[0].size(2), or 0 at first, since mask is asked before the updates. "
    "torch.ones(S, n + S, dtype=torch.bool, device=device).tril(n) moves the diagonal n places to "
    "the right.",

    "generate: first the whole prompt at positions 0 .. T-1, then in turn: take h[:, -1], head, "
    "argmax(-1), append, and run the trunk on that one token, whose pos is a tensor with one "
    "number, the count of tokens before it.",
)
AXES = ('row', 'head', 'position', 'channel')


def check_update():
    """Two layers take 4 positions, then 1, then 1; layer 1 gets other numbers than layer 0."""
    nkv, hd = draw(1, 2, 3), draw(4, 8)
    k, v = torch.randn(2, 3, nkv, 6, hd)  # (3 rows, heads, 6 positions, channels) each
    cache = Cache(2)
    for begin, end in ((0, 4), (4, 5), (5, 6)):
        check_append(cache, 0, k, v, begin, end)
        check_append(cache, 1, -k, -v, begin, end)


def check_append(cache, layer, k, v, begin, end):
    """Positions begin .. end - 1 of k and v join those before in the cache."""
    new_k, new_v = k[:, :, begin:end].clone(), v[:, :, begin:end].clone()  # the cache's from now on
    got = call(cache.update, layer, new_k, new_v, name='Cache.update')
    expect(isinstance(got, (tuple, list)) and len(got) == 2,
           "Cache.update() should return two tensors: all keys, all values")
    so_far = f"that Cache.update() returns after {end} positions"
    for what, mine, right, other in (('keys', got[0], k, v), ('values', got[1], v, k)):
        if begin > 0:
            expect(length(mine) != end - begin,
                   f"Cache.update() returns only the new {what}; it should remember those of "
                   "before, and return them too")
        if layer == 1:
            expect(length(mine) != 2 * end,
                   "Cache.update() gives layer 1 what layer 0 stored: each layer has its own keys "
                   "and values")
        want, swapped = right[:, :, :end], other[:, :, :end]
        stored_swapped = torch.cat((other[:, :, :begin], right[:, :, begin:end]), 2)
        compare(f"layer {layer}: the tensor of {what} {so_far}", mine, want, AXES, {
            "Cache.update() mixes up the layers: each has its own keys and values":
                -want,
            "Cache.update() returns values where keys should be, or the other way round":
                swapped,
            "Cache.update() stores keys where values should be, or the other way round":
                stored_swapped,
        })


def length(x):
    """How many positions x (B, nkv, positions, hd) has; None if it is something else."""
    is_one = isinstance(x, torch.Tensor) and x.dim() == 4
    return x.size(2) if is_one else None


def check_mask(n, S):
    """n positions in the cache, S new ones."""
    name = f"with {n} positions in the cache, Cache.mask({S}, ..)"
    got = filled(Cache(2), n).mask(S, torch.device('cpu'))
    want = torch.ones(S, n + S).tril(n)
    if got is None and n == 0:
        got = want.bool()  # without a mask each reads all up to itself, as is right here
    expect(got is not None,
           f"{name} returned None. That is enough only if nothing is in the cache; here attention "
           "would line up the first new position with the first key")
    expect(isinstance(got, torch.Tensor) and got.dtype == torch.bool,
           f"{name} should be a tensor of True and False: dtype=torch.bool")
    if got.dim() == 4:  # (1, 1, S, n + S), as attention has its scores, is right too
        got = got[0, 0]
    if n > 0:
        expect(got.shape[-1:] != (2 * n + S,),
               f"{name} is as wide as {2 * n} positions in the cache: its layers hold the same "
               "positions, count them once")
    compare(name, got.float(), want, ('new position', 'readable position'), {
        f"{name} lets every new position read all others, later ones too":
            torch.ones(S, n + S),
        f"{name} has its diagonal in the wrong place: new position i stands at {n} + i":
            torch.ones(S, n + S).tril(),
        f"{name} is upside down: True means that it may be read":
            1 - want,
    })
    check_device(name, n, S)


def check_device(name, n, S):
    """The mask belongs where mask() is told; torch's meta device stands for a GPU here."""
    there = filled(Cache(2), n).mask(S, torch.device('meta'))
    right = there is None or getattr(there, 'device', None) == torch.device('meta')
    expect(right, f"{name} makes its mask on the CPU, whatever `device` says")


def filled(cache, n):
    """The cache with n positions in both of its layers."""
    if n > 0:
        ones = torch.ones(1, 1, n, 2)
        cache.mask(n, torch.device('cpu'))      # as the trunk does
        cache.update(0, ones, ones)
        cache.update(1, ones, ones)
    return cache


def check_reading(gpt, idx, sizes):
    """A text of 12 tokens read in pieces, each with a pass of its own."""
    x, pos = gpt.embed(idx), torch.arange(idx.size(1))
    cache = Cache(gpt.config.n_layer)
    pieces = zip(x.split(sizes, 1), pos.split(sizes))
    parts = [gpt.trunk(some_x, some_pos, cache) for some_x, some_pos in pieces]
    in_pieces = ', '.join(map(str, sizes))
    compare(f"a text read with your cache in pieces of {in_pieces} gives a tensor of hidden "
            "states that",
            torch.cat(parts, 1), gpt.trunk(x, pos), ('row', 'position', 'channel'))


def check_generate(gpt, prompt, n):
    """How many positions the student's generate() runs through the trunk."""
    trunk, T = gpt.trunk, prompt.size(1)
    read = []  # all positions that go through the trunk, in this order

    def spy(x, pos, memory=None):
        expect(memory is not None,
               "generate() calls gpt.trunk without your cache: trunk(x, pos, cache)")
        expect(pos.shape == x.shape[1:2],
               f"generate() gives the trunk {x.size(1)} embeddings, but pos has shape "
               f"{tuple(pos.shape)}")
        read.extend(pos.tolist())
        return trunk(x, pos, memory)

    with patch.object(gpt, 'trunk', spy):
        got = call(generate, gpt, prompt, n)
    shaped("what generate() returns, prompt and new tokens,",
           got, (len(prompt), T + n), ('row', 'position'))
    expect(got.max() < gpt.config.n_tokens,
           f"generate() chose token {int(got.max())}, which is padding of the vocabulary: "
           "gpt.head masks it, gpt.lm_head does not")
    expect(len(read) <= T + n,
           f"generate() ran {len(read)} positions through the trunk, and {T + n - 1} are enough: "
           "read only what the cache does not hold yet")
    expect(read == list(range(len(read))),
           f"generate() tells the trunk the positions {read}: they should count on, {T} after "
           f"{T - 1}, and never start again")
    record(got)
    wrong = (got != gpt.generate(prompt, n, temperature=0)).nonzero()
    if len(wrong):
        _, first = wrong[0].tolist()
        raise NotYet(
            f"generate() has another token than GPT.generate at position {first}: is each new "
            "token the argmax of the logits at the last position, and is it the one that is read "
            "next?")
    return len(read)


def check_masks():
    for n, S in ((0, 4), (4, 1), (5, 3)):
        check_mask(n, S)


def check_pieces():
    gpt, idx = model_and_text()
    for sizes in ((12,), (5, 1, 1, 1, 1, 1, 1, 1), (4, 3, 5)):
        check_reading(gpt, idx, sizes)


def model_and_text():
    return tiny(n_kv_head=2), torch.randint(0, 30, (2, 12))


def check_loop():
    for _ in range(4):  # in one model alone a wrong choice of tokens may happen to be right
        gpt, idx = model_and_text()
        check_generate(gpt, idx[:, :draw(5, 6, 7)], draw(6, 7, 8))


def conclusion():
    gpt, idx = model_and_text()
    T, n = 6, 7
    read = check_generate(gpt, idx[:, :T], n)
    without = sum(range(T, T + n))
    return (f"Your loop read {read} positions for {n} tokens; without a cache it would be "
            f"{without}. Now read class Memory in model.py, and Cache in engine/memory.py: it "
            "doubles its memory when that is full, where torch.cat copies everything at every "
            "token.")


PARTS = {
    "Cache.update()": check_update,
    "Cache.mask()": check_masks,
    "a text read in pieces": check_pieces,
    "generate()": check_loop,
}


if __name__ == '__main__':
    check.run(__name__)
