"""
What programs ask about a model's mechanism, and model.py need not know. One of your own needs no
entry here: it is taken to use all settings of its kind, and to read a text at once.
"""

from model import HALTING, PONDER, Feedback, Halting, Latent, Smear

# beginnings of names of settings, or whole names: which mechanisms they belong to
SETTINGS = {
    'ponder_steps': tuple(PONDER.keys() - {'none', 'smear'}),
    'ponder_topk': ('embedding',),
    'jacobi_iters': ('latent',),
    'loop_norm': ('loop',),
    'halt_': tuple(HALTING),
    'halt_share': ('gate',),
    'halt_beta': ('router',),
    'exit_': ('exit',),
    'ouro_': ('ouro',),
}

# what halting compares with halt_tau, in words
SCORES = {
    'gate': 'gate',
    'mask': 'probability of another thought',
    'router': 'probability of getting further',
    'exit': 'doubt',
    'ouro': 'survival',
}


def switched_on(config):
    """What the settings switch on, as 'ponder=loop, halting=exit, depth_attn'."""
    words = [f'ponder={config.ponder}']
    if config.halting != 'none':
        words.append(f'halting={config.halting}')
    if config.depth_attn:
        words.append('depth_attn')
    return ', '.join(words)


def halts(model):
    """Whether its tokens stop by themselves."""
    return isinstance(model.mechanism, Halting)


def slots_per_token(model):
    """How many slots go through the blocks for a new token in generation, at most."""
    return 1 if isinstance(model.mechanism, (Smear, Feedback)) else model.mechanism.K + 1


def iterates(model):
    """Whether several tokens at once are read by iteration, which is exact after enough of it."""
    return isinstance(model.mechanism, (Latent, Feedback))
