"""
Exercise 3 of 8: the key/value cache. About 45 minutes.

    python exercises/kv_cache.py            checks what you wrote and says what is not right yet
    python exercises/kv_cache.py --hint     a hint; --hint=3: all three

To generate, a model predicts a token, appends it and predicts the next. Running the whole text
again for each new token would cost 1 + 2 + .. + T positions. But attention is causal: what a
position computes never changes when others follow it. All that later positions ever ask of it are
its keys and values. Keep those, and a new token costs one position.

model.py gives this work to one object, a `memory`, with two methods:

    memory.begin(x)               is called before each gpt.trunk(x, memory), which runs x through
                                  all layers. It counts the S new tokens of x, and says in
                                  memory.pos where they stand
    memory.update(layer, k, v)    is called by the trunk in each layer. It takes the keys and values
                                  of the new tokens, and returns those of all tokens so far

If n tokens are in the cache and S are new, new token i stands at position n + i. Keys are rotated
by these positions before they are handed over (exercise 2).

The cache does not decide who reads whom. Attention gets S queries, of the newest tokens, and all
N = n + S keys. Query i may read the n old keys, and the new ones up to its own:

    mask[i, u] = True  for u <= n + i              (S, N)

For the whole text at once, S = N, that is exercise 1's triangle. When a text goes on, the mask's
diagonal begins n places further right. For one new token the mask is a row of True, since all
cached keys came earlier. So generation, where this matters most, needs no mask.

Write the cache, then the mask, then the loop that generates. You are compared with the model
without a cache, and with GPT.generate. Afterwards, think about this: how many bytes does your
cache hold after T tokens, and what do grouped queries (exercise 1) change about it?

    shape letters    B rows    nkv key/value heads    hd width of a head    C width of the model
"""
import check    # finds the project's files
import torch


class Cache:
    """The keys and values of all tokens read so far, layer by layer."""
    keys_per_slot = 1       # attention asks for it: here each token leaves one key in each layer

    def __init__(self):
        self.tokens = 0     # read so far, the newest included
        self.pos = None     # (S,): the positions of the newest, which the trunk asks for
        self.keys = {}      # of each layer, once it has some: (B, nkv, tokens, hd)
        self.values = {}

    def begin(self, x):
        """S new tokens come, as embeddings x (B, S, C): count them, and set self.pos (S,)."""
        raise NotImplementedError(
            "Cache.begin() is still empty: write it in place of this line")

    def update(self, layer, k, v):
        """
        Append k and v (B, nkv, S, hd) of one layer
        -> all keys and all values of that layer, each (B, nkv, n + S, hd).
        """
        raise NotImplementedError(
            "Cache.update() is still empty: write it in place of this line")


def mask(S, N, device):
    """
    Which of N keys the queries of the newest S tokens may read: bool (S, N), True for yes. None for
    a single query, S = 1: it may read all.
    """
    raise NotImplementedError(
        "mask() is still empty: write it in place of this line")


def generate(gpt, prompt, n):
    """
    prompt (B, T) -> (B, T + n): append the likeliest token n times. Each position may go through
    gpt.trunk only once, for all rows together. gpt.embed(tokens) gives x, gpt.trunk(x, cache)
    hidden states h, after cache.begin(x), and gpt.head(h) logits.
    """
    raise NotImplementedError(
        "generate() is still empty: write it in place of this line")


# -------------------------------------------------------------------------------------------------
# the check: read it when you are done, it gives things away

from contextlib import suppress
from unittest.mock import patch

from check import NotYet, call, compare, draw, expect, places, record, shaped, tiny
from torch.nn.functional import scaled_dot_product_attention

from model import Attention

HINTS = (
    "begin: x.size(1) tokens are new, and self.tokens stood before them; torch.arange, on x's "
    "device. update: the first time there is nothing to append to, later torch.cat along the axis "
    "of positions. Store the result before you return it.",

    "mask: N - S tokens are old. torch.ones(S, N, dtype=torch.bool, device=device).tril(N - S) "
    "moves the diagonal so many places to the right.",

    "generate: first the whole prompt, then in turn: take h[:, -1:], head, argmax(-1), which is "
    "(B, 1), append, and run the trunk on that one token. In front of each call of the trunk, "
    "cache.begin with the same embeddings.",
)
AXES = ('row', 'head', 'position', 'channel')


def check_begin():
    """A text comes in pieces."""
    sizes = draw((5, 1, 1, 3), (4, 1, 1, 2))
    cache, n = Cache(), 0
    for S in sizes:
        begin(cache, torch.randn(2, S, draw(6, 8)))
        check_pos(cache, n, S)
        n += S
    x = torch.empty(2, 3, 4, device='meta')     # it stands for a GPU here
    begin(cache, x)
    expect(cache.pos.device == x.device,
           "Cache.begin() makes self.pos on the CPU, wherever x is: device=x.device")


def begin(cache, x):
    """cache.begin(x), which returns nothing."""
    with torch.random.fork_rng(devices=[]):
        cache.begin(x)
    expect(isinstance(cache.tokens, int),
           f"after Cache.begin(), self.tokens should be a whole number, and is {cache.tokens!r}")


def check_pos(cache, n, S):
    """After begin() for S tokens, behind n others."""
    name = f"with {n} tokens in the cache and {S} new ones, Cache.begin()"
    expect(cache.pos is not None, f"{name} leaves self.pos at None: the trunk asks for it")
    want = torch.arange(n, n + S)
    mistakes = {
        f"{name} counts from 0 in self.pos; new token i stands at {n} + i":
            torch.arange(S),
        f"{name} has in self.pos the positions behind the new tokens: those of the new ones "
        "begin where self.tokens was before":
            want + S,
        f"{name} counts positions from 1; the first token of a text stands at 0":
            want + 1,
    }
    compare(f"{name} leaves a self.pos that", in_numbers(cache.pos), want.float(), ('token',),
            {sentence: wrong.float() for sentence, wrong in mistakes.items()})
    expect(cache.tokens == n + S,
           f"{name} leaves self.tokens at {cache.tokens}; it should be {n + S}, all tokens so far")


def in_numbers(pos):
    return pos.float() if isinstance(pos, torch.Tensor) else pos


def check_update():
    """Two layers take 4 positions, then 1, then 1; layer 1 gets other numbers than layer 0."""
    nkv, hd = draw(1, 2, 3), draw(4, 8)
    k, v = torch.randn(2, 3, nkv, 6, hd)  # (3 rows, heads, 6 positions, channels) each
    cache = Cache()
    for first, end in ((0, 4), (4, 5), (5, 6)):
        with suppress(NotImplementedError):     # update alone may be written already
            begin(cache, torch.randn(3, end - first, hd))
        check_append(cache, 0, k, v, first, end)
        check_append(cache, 1, -k, -v, first, end)


def check_append(cache, layer, k, v, first, end):
    """Positions first .. end - 1 of k and v join those before in the cache."""
    new_k, new_v = k[:, :, first:end].clone(), v[:, :, first:end].clone()  # the cache's from now on
    tokens = cache.tokens
    got = call(cache.update, layer, new_k, new_v, name='Cache.update')
    expect(cache.tokens == tokens,
           f"Cache.update() changes self.tokens from {tokens} to {cache.tokens}: Cache.begin() "
           "counts the new tokens, once, and update() is called in every layer")
    expect(isinstance(got, (tuple, list)) and len(got) == 2,
           "Cache.update() should return two tensors: all keys, all values")
    so_far = f"that Cache.update() returns after {end} positions"
    for what, mine, right, other in (('keys', got[0], k, v), ('values', got[1], v, k)):
        if first > 0:
            expect(length(mine) != end - first,
                   f"Cache.update() returns only the new {what}; it should remember those of "
                   "before, and return them too")
        if layer == 1:
            expect(length(mine) != 2 * end,
                   "Cache.update() gives layer 1 what layer 0 stored: each layer has its own keys "
                   "and values")
        want, swapped = right[:, :, :end], other[:, :, :end]
        stored_swapped = torch.cat((other[:, :, :first], right[:, :, first:end]), 2)
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
    """n tokens in the cache, S new ones."""
    N = n + S
    name = f"with {n} tokens in the cache and {S} new ones, mask({S}, {N}, ..)"
    got = mask(S, N, torch.device('cpu'))
    if S == 1:
        expect(got is None,
               f"{name} should be None: a single new token is the last one, so it may read all {N} "
               "keys, and attention without a mask is faster")
        record(0.0)
        return
    expect(got is not None,
           f"{name} returned None. That is right for a single new token; here the first of {S} "
           "would read those after it")
    expect(isinstance(got, torch.Tensor) and got.dtype == torch.bool,
           f"{name} should be a tensor of True and False: dtype=torch.bool")
    while got.dim() > 2 and len(got) == 1:  # (1, 1, S, N), as attention has its scores, is right
        got = got[0]
    want = torch.ones(S, N).tril(n)
    compare(name, got.float(), want, ('new token', 'readable token'), {
        f"{name} lets every new token read all others, later ones too":
            torch.ones(S, N),
        f"{name} lines up the first new token with the first key, as is_causal does; but new token "
        f"i stands at {n} + i":
            torch.ones(S, N).tril(),
        f"{name} lets a new token read the one behind it":
            torch.ones(S, N).tril(n + 1),
        f"{name} does not let a new token read itself":
            torch.ones(S, N).tril(n - 1),
        f"{name} lets a new token read itself and later ones; it should read itself and earlier "
        "ones":
            torch.ones(S, N).triu(n),
        f"{name} is upside down: True means that it may be read":
            1 - want,
    })
    there = mask(S, N, torch.device('meta'))    # it stands for a GPU here
    expect(getattr(there, 'device', None) == torch.device('meta'),
           f"{name} makes its mask on the CPU, whatever `device` says")


def attend(self, q, k, v, per_slot=1):
    """In the place of Attention.attend: the student's mask says who reads whom."""
    reads = mask(q.size(2), k.size(2), q.device)
    return scaled_dot_product_attention(q, k, v, attn_mask=reads, enable_gqa=True)


def check_reading(gpt, idx, sizes):
    """A text of 12 tokens read in pieces, each with a pass of its own."""
    x = gpt.embed(idx)
    cache, parts = Cache(), []
    for piece in x.split(sizes, 1):
        begin(cache, piece)
        with patch.object(Attention, 'attend', attend):
            parts.append(gpt.trunk(piece, cache))
    in_pieces = ', '.join(map(str, sizes))
    compare(f"a text read with your cache and your mask in pieces of {in_pieces} gives a tensor of "
            "hidden states that",
            torch.cat(parts, 1), gpt.trunk(x), ('row', 'position', 'channel'))


def check_generate(gpt, prompt, n):
    """How many positions the student's generate() runs through the trunk."""
    trunk, T = gpt.trunk, prompt.size(1)
    read = []  # all positions that go through the trunk, in this order
    embeddings = []  # and what stands there

    def spy(x, memory=None):
        expect(memory is not None,
               "generate() calls gpt.trunk without your cache: trunk(x, cache)")
        expect(memory.pos is not None and memory.pos.shape == x.shape[1:2],
               f"generate() gives the trunk {x.size(1)} embeddings, but the cache has not heard of "
               "them, as its pos says: call cache.begin(x) in front of each trunk(x, cache)")
        read.extend(memory.pos.tolist())
        embeddings.append(x)
        return trunk(x, memory)

    with patch.object(gpt, 'trunk', spy):
        got = call(generate, gpt, prompt, n)
    shaped("what generate() returns, prompt and new tokens,",
           got, (len(prompt), T + n), ('row', 'position'))
    expect(not got.is_floating_point(),
           f"generate() returns numbers of type {got.dtype}; tokens are whole numbers, torch.long "
           "as in the prompt")
    expect(got.max() < gpt.config.n_tokens,
           f"generate() chose token {int(got.max())}, which is padding of the vocabulary: "
           "gpt.head masks it, gpt.lm_head does not")
    expect(len(read) <= T + n,
           f"generate() ran {len(read)} positions through the trunk, and {T + n - 1} are enough, "
           "with all rows in one pass: read only what the cache does not hold yet")
    expect(read == list(range(len(read))),
           f"generate() tells the trunk the positions {read}: they should count on, {T} after "
           f"{T - 1}, and never start again. Call cache.begin(x) once in front of each "
           "trunk(x, cache), of one and the same cache")
    record(got)
    wrong = (got != gpt.generate(prompt, n, temperature=0)).nonzero()
    if len(wrong):
        returned = gpt.embed(got.long().clamp(min=0))[:, :len(read)]
        same_text = torch.cat(embeddings, 1) == returned
        elsewhere = ~same_text.all(-1).all(0)       # one bool for each position that was read
        expect(not elsewhere.any(),
               f"generate() gives the trunk other tokens at {places('position', elsewhere)} than "
               "it returns there: is a token read twice, such as the last one of the prompt?")
        _, first = wrong[0].tolist()
        raise NotYet(
            f"generate() has another token than GPT.generate at position {first}: is each new "
            "token the argmax of the logits at the last position, and is it the one that is read "
            "next?")
    return len(read)


def check_masks():
    for n, S in ((0, 4), (4, 1), (draw(4, 5), 3), (2, draw(5, 6)), (0, 1)):
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
            f"{without}. Now read class Memory in model.py, which is your cache, and the method "
            "attend of Attention: a single token needs no mask, and for a whole text the kernel "
            "knows the triangle (is_causal). For other pieces attend_in_turns makes your mask. "
            "torch.cat copies everything at every token; FixedMemory in engine/decode.py has a "
            "place for each from the start.")


PARTS = {
    "Cache.begin()": check_begin,
    "Cache.update()": check_update,
    "mask()": check_masks,
    "a text read in pieces": check_pieces,
    "generate()": check_loop,
}


if __name__ == '__main__':
    check.run(__name__)
