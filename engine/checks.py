"""Settings of a model that do not fit together are refused, by name and with what to change."""

from dataclasses import fields
from typing import get_args

from engine.errors import shown

CALLED = {bool: 'True or False', str: 'text', float: 'a number', int: 'a whole number'}
POSITIVE = ('vocab_size', 'block_size', 'n_layer', 'n_head', 'n_kv_head', 'n_embd', 'head_dim',
            'mlp_hidden', 'n_tokens', 'depth_stride', 'rope_theta', 'norm_eps', 'embed_scale',
            'init_std')

# far beyond every model there is; more would only end in a wait, or in numbers that overflow
LARGEST = dict(n_layer=1000, ponder_steps=1000, n_head=2 ** 16, head_dim=2 ** 16, n_embd=2 ** 20,
               mlp_hidden=2 ** 20, vocab_size=2 ** 24, block_size=2 ** 31)


def require(ok, message):
    if not ok:
        raise ValueError(message)


def check_config(c, ponder_modes, halting_modes):
    """
    ValueError for the first thing that is wrong with c, a GPTConfig before its defaults are filled
    in. The tables are model.py's: {setting: class}.
    """
    check_types(type(c), vars(c))
    for name in POSITIVE:
        value = getattr(c, name)
        require(value is None or value > 0, f"{name}={value} must be positive")
    for name, largest in LARGEST.items():
        value = getattr(c, name)
        require(value is None or value <= largest, f"{name}={value} must be at most {largest}")
    check_shape(c)
    check_pondering(c, ponder_modes)
    check_halting(c, halting_modes)


def check_types(block, values):
    """
    ValueError for the first of {setting: value} that is not of the type which the dataclass `block`
    declares. A whole number is a number too; NaN and infinity are none.
    """
    for field in fields(block):
        if field.name not in values:
            continue
        value = values[field.name]
        kinds = get_args(field.type) or (field.type,)   # of Optional[int]: (int, NoneType)
        fits = type(value) in kinds or (type(value) is int and float in kinds)
        if type(value) in (int, float):
            fits = fits and abs(value) < 2 ** 63        # neither inf nor nan is
        wanted = CALLED[kinds[0]] + (" or None" if len(kinds) > 1 else '')
        require(fits, f"{field.name} should be {wanted}, not {shown(value)}")


def check_shape(c):
    n_kv_head = c.n_kv_head or c.n_head
    head_dim = c.head_dim or c.n_embd // c.n_head
    n_tokens = c.n_tokens or c.vocab_size
    require(c.head_dim is not None or c.n_embd % c.n_head == 0,
            f"n_embd={c.n_embd} is not a multiple of n_head={c.n_head}: "
            f"change one, or set head_dim")
    require(head_dim % 2 == 0,
            f"head_dim={head_dim} is odd, but rotary positions turn pairs: "
            f"change n_head or head_dim")
    require(c.n_head % n_kv_head == 0,
            f"n_head={c.n_head} is not a multiple of n_kv_head={n_kv_head}: change one of them")
    require(n_tokens <= c.vocab_size,
            f"n_tokens={n_tokens} is larger than vocab_size={c.vocab_size}: raise vocab_size")
    require(c.depth_mode in ('softmax', 'uniform'),
            f"depth_mode={c.depth_mode!r} must be 'softmax' or 'uniform'")
    require(0 <= c.dropout < 1, f"dropout={c.dropout} must be at least 0 and below 1")


def check_pondering(c, modes):
    n_tokens = c.n_tokens or c.vocab_size
    require(c.ponder in modes, f"ponder={c.ponder!r} must be one of {in_words(modes)}")
    require(c.ponder_steps >= 0 and c.jacobi_iters >= 0,
            f"ponder_steps={c.ponder_steps} and jacobi_iters={c.jacobi_iters} must not be negative")
    require(c.ponder_topk is None or 1 <= c.ponder_topk <= n_tokens,
            f"ponder_topk={c.ponder_topk} must be between 1 and n_tokens={n_tokens}")


def check_halting(c, modes):
    names = ('none', *modes)
    require(c.halting in names, f"halting={c.halting!r} must be one of {in_words(names)}")
    if c.halting != 'none':
        needed = modes[c.halting].needs
        require(c.ponder == needed,
                f"halting={c.halting!r} does not work with ponder={c.ponder!r}: "
                f"set ponder={needed!r}")
        start, full = modes[c.halting].default_ramp
        start = start if c.halt_start is None else c.halt_start
        full = full if c.halt_full is None else c.halt_full
        require(0 <= start <= full <= 1,
                f"halt_start={start} and halt_full={full} must be shares of the run, the second "
                f"not smaller")
    at_least_0 = min(c.halt_tau, c.halt_lambda or 0, c.halt_beta) >= 0
    require(at_least_0 and 0 <= c.halt_share <= 1,
            "halt_tau, halt_lambda and halt_beta must not be negative, "
            "halt_share must be between 0 and 1")


def in_words(names):
    return ', '.join(repr(name) for name in names)
