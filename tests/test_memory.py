"""
engine/memory.py lets slots read what model.py's rules say: random slots go through a memory of
engine/ and, row by row, through those of model.py. Their keys and values are random, so that equal
outputs mean equal weights on the same slots.
"""

import pytest
import torch
from conftest import close

from engine.attention import attend
from engine.memory import Cache, CausalPass, ChainPass, FrozenPass, RulePass, TextSlots
from engine.fast import Chosen
from model import Attention, Padded, SlotMemory, by_pass, faded, flat, newest

B = 3
PASSES = 3
TOKENS = 12         # room in a text
LAYERS = 2
PADDINGS = [None, torch.tensor([0, 3, 1])]
NO_PADDING = torch.zeros(B, dtype=torch.long)
# of each mechanism: its rule, and whether some of its slots are hidden
RULES = {
    'latent': (flat, False),
    'mask': (faded, True),
    'chain': (by_pass, False),
    'router': (by_pass, True),
    'gate': (newest, True),
}


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


def read(memory, attend, qkv):
    """What slots with q, k and v of qkv (B,S,3,heads,hd) read in all layers, (B,S,..)."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4)                                # (B,heads,S,hd) each
    mask = memory.mask(q.size(2), 'cpu')
    outputs = []
    for layer in range(LAYERS):
        keys, values = memory.update(layer, k, v * (layer + 1))
        outputs.append(attend(q, keys, values, mask, 0.0))
    return torch.cat(outputs, dim=1).transpose(1, 2)


class Rows:
    """
    A memory of model.py for each row. They have padding, if of 0 tokens: so the rule is asked who
    reads whom.
    """

    def __init__(self, pad, rule=None):
        pad = NO_PADDING if pad is None else pad
        self.rows = []
        for padding in pad.split(1):
            self.rows.append(Padded(padding) if rule is None else SlotMemory(rule, padding))

    def begin(self, T):
        for row in self.rows:
            row.begin(torch.empty(1, T))

    def read(self, qkv, n=None, **opening):
        """The same as `read`, in the pass that open(**opening) begins for all rows together."""
        outputs = []
        for b, row in enumerate(self.rows):
            own = {}
            for name, value in opening.items():
                own[name] = value[b:b + 1] if torch.is_tensor(value) else value
            if n is not None:
                row.rewind()
                row.for_pass(n=n, **own)
            elif opening:
                row.for_pass(**own)
            outputs.append(read(row, Attention.attend, qkv[b:b + 1]))
        return torch.cat(outputs)


def random_qkv(S, rows=B):
    return torch.randn(rows, S, 3, 2, 8, dtype=torch.float64, requires_grad=True)


def labels(name, S, rows=B):
    return dict(log_w=-torch.rand(rows, S).double()) if name == 'mask' else {}


def openings(name, real):
    """How a mechanism opens its passes over tokens, of which some are `real` (B,T)."""
    rule, hides = RULES[name]
    T = real.size(1)
    if rule in (flat, faded) and T > 1:
        for n in (1, 3, 2):             # sweeps: each takes the place of the one before
            visible = torch.rand(B, T, n) < 0.6
            visible[..., 0] = True      # a token's own slot
            visible = (visible & real[..., None]).flatten(1)
            yield dict(n=n, visible=visible if hides else None, **labels(name, T * n))
    else:
        stops = torch.randint(1, PASSES + 1, (B, T))
        for k in range(PASSES):
            visible = (stops > k) & real
            if hides and not visible.any():
                return
            yield dict(first_k=k, visible=visible if hides else None, **labels(name, T))


def read_fast(memory, qkv, n=None, **opening):
    """The same of a memory of engine/; also the pass."""
    if n is not None:
        memory.rewind()
        opening['n'] = n
    opened = memory.for_pass(**opening)
    return read(opened, attend, qkv), opened


def read_skipping(memory, pos, qkv, first_k, visible, log_w=None):
    """The same without the slots that are hidden, as in engine/fast.py."""
    chosen = Chosen(visible)
    log_w = None if log_w is None else chosen.take(log_w)
    opened = memory.for_tokens(chosen.t(pos), first_k, log_w)
    got = read(opened, attend, chosen.take(qkv))
    return chosen.put(got.new_zeros(*qkv.shape[:2], *got.shape[2:]), got), opened


@pytest.mark.parametrize('T', [7, 1])
@pytest.mark.parametrize('name, skips, kind', [
    ('latent', False, CausalPass),
    ('mask', False, CausalPass),
    ('chain', False, ChainPass),
    ('router', False, RulePass),
    ('router', True, RulePass),
    ('gate', False, FrozenPass),
])
def test_a_text_as_a_whole(name, skips, kind, T):
    """With the gradients of all that was read."""
    rule, _ = RULES[name]
    text, rows, leaves, got, want = TextSlots(rule, ()), Rows(None, rule), [], [], []
    pos = text.begin(torch.empty(B, T))
    rows.begin(T)
    for opening in openings(name, text.is_token()):
        qkv = random_qkv(T * opening.get('n', 1))
        if skips:
            outputs, opened = read_skipping(text, pos, qkv, **opening)
        else:
            outputs, opened = read_fast(text, qkv, **opening)
        assert type(opened) is kind or T == 1
        compared = opening['visible'] if skips else torch.ones(qkv.shape[:2], dtype=torch.bool)
        leaves.append(qkv)
        got.append(outputs[compared])
        want.append(rows.read(qkv, **opening)[compared])
    check_with_gradients(torch.cat(got), torch.cat(want), leaves)


def check_with_gradients(got, want, leaves):
    weights = torch.randn_like(want)
    close(got, want)
    gradients = [torch.autograd.grad((out * weights).sum(), leaves) for out in (got, want)]
    for a, b in zip(*gradients):
        close(a, b)


@pytest.mark.parametrize('queries', [8, 3, 1])
def test_groups_of_queries(queries, monkeypatch):
    monkeypatch.setattr(ChainPass, 'QUERIES', queries)
    test_a_text_as_a_whole('chain', False, ChainPass, 9)


def test_a_group_of_queries_reads_a_prefix_of_the_keys(monkeypatch):
    """Half of the work at long T: nothing would be wrong without it, only slow."""
    monkeypatch.setattr(ChainPass, 'QUERIES', 5)
    second_pass = ChainPass((), before=ChainPass((), None, 0), k=1)
    assert [group.n_keys for group in second_pass.mask(13, 'cpu')] == [10, 20, 26]


# ---- caches --------------------------------------------------------------------------------------

either_padding = pytest.mark.parametrize('pad', PADDINGS)
static_or_not = pytest.mark.parametrize('static', [False, True])


def real_tokens(pos, pad):
    """(B,T): which of the tokens at pos (T,) are no padding."""
    return pos >= (NO_PADDING if pad is None else pad)[:, None]


@either_padding
@static_or_not
def test_a_cache_of_tokens(pad, static):
    cache, rows = Cache((), TOKENS, pad, static), Rows(pad)
    for T in (5, 2, 1, 1, 3):
        pos = cache.begin(torch.empty(B, T))
        rows.begin(T)
        qkv, real = random_qkv(T), real_tokens(pos, pad)
        close(read(cache, attend, qkv)[real], rows.read(qkv)[real])
    assert sum(t.numel() for t in cache.all_tensors()) == 2 * LAYERS * B * 2 * TOKENS * 8


@either_padding
@static_or_not
@pytest.mark.parametrize('name', RULES)
def test_a_cache_of_slots(name, pad, static):
    """A text in pieces; then rows that run ahead of each other, if tokens stop by themselves."""
    torch.manual_seed(0)
    rule, hides = RULES[name]
    cache, rows = Cache((), TOKENS * PASSES, pad, static, rule), Rows(pad, rule)
    for T in (4, 2, 1, 1):
        pos = cache.begin(torch.empty(B, T))
        rows.begin(T)
        real = real_tokens(pos, pad)
        assert torch.equal(cache.is_token(), real)
        for opening in openings(name, real):
            n = opening.get('n', 1)
            qkv, compared = random_qkv(T * n), real.repeat_interleave(n, dim=1)
            if hides and 'n' not in opening:
                got, _ = read_skipping(cache, pos, qkv, **opening)
                compared = opening['visible']
            else:
                got, _ = read_fast(cache, qkv, **opening)
            close(got[compared], rows.read(qkv, **opening)[compared])
    if hides:
        write_ahead(cache, rows, name)


def write_ahead(cache, rows, name):
    """
    Up to the end of the text each row is at its own token and pass. One that is done leaves the
    batch.
    """
    stops = torch.randint(1, PASSES + 1, (B, TOKENS)).tolist()
    t, k, left = [8] * B, [0] * B, list(range(B))
    while left:
        place = torch.tensor([[t[row]] for row in left])
        number = torch.tensor([[k[row]] for row in left])
        own, qkv = labels(name, 1, len(left)), random_qkv(1, len(left))
        got = read(cache.for_tokens(place, number, own.get('log_w')), attend, qkv)
        for i, row in enumerate(left):
            alone = rows.rows[row]
            if k[row] == 0:
                alone.begin(torch.empty(1, 1))
            alone.for_pass(k[row], **{label: x[i:i + 1] for label, x in own.items()})
            close(got[i], read(alone, Attention.attend, qkv[i:i + 1])[0])
            k[row] += 1
            if k[row] == stops[row][t[row]]:
                t[row], k[row] = t[row] + 1, 0
        stay = [i for i, row in enumerate(left) if t[row] < TOKENS]
        if len(stay) < len(left):
            cache.keep_rows(torch.tensor(stay, dtype=torch.long))
            left = [left[i] for i in stay]


@pytest.mark.parametrize('memory', [TextSlots(flat, ()), Cache((), 20, rule=flat)])
def test_a_flat_text_goes_through_once(memory):
    """A second pass would have to ask the rule: its slots do not stand in order."""
    memory.begin(torch.empty(B, 5))
    read(memory.for_pass(), attend, random_qkv(5))
    with pytest.raises(AssertionError, match='at once'):
        memory.for_pass(first_k=1)


@pytest.mark.parametrize('name', ['latent', 'chain'])
def test_a_static_cache_keeps_its_shapes_and_addresses(name):
    """As long as one token is read at a time: a CUDA graph reads and writes where it did before."""
    cache = Cache((), TOKENS * PASSES, static=True, rule=RULES[name][0])
    masks, addresses = set(), set()
    for T in (3, 1, 1, 1):
        cache.begin(torch.empty(B, T))
        for k in range(PASSES if T == 1 else 1):
            cache.for_pass(k)
            mask = cache.mask(T, 'cpu')
            k, v = cache.update(0, torch.zeros(B, 1, T, 4), torch.zeros(B, 1, T, 4))
            if T == 1:
                assert cache.compiled
                masks.add((mask.shape, mask.dtype, k.shape))
                addresses.add((k.data_ptr(), v.data_ptr()))
    assert len(masks) == len(addresses) == 1
    assert masks.pop()[1] == torch.float32
