"""
The config files of a command: a warning where one of them takes back what stands before it, or
holds the numbers of another model. Arguments apply from left to right (configurator.py).
"""

import sys
from dataclasses import fields

from configurator import read
from engine.start import FIXED, asked_of_model
from model import GPTConfig


def say_order(argv, given, settings):
    """
    Warnings of config files among the words of the command, argv, that take back what stands before
    them, or hold the numbers of another model.
    """
    blocks = type(settings), GPTConfig
    for i, path in enumerate(argv):
        if path.startswith('--'):
            continue
        filed, _ = read([path], '', *blocks)
        has_all = path.endswith('.json')    # a .py file may overrule another file, no --option
        before_it = [word for word in argv[:i] if has_all or word.startswith('--')]
        earlier, _ = read(before_it, '', *blocks)
        say_overruled(path, filed, earlier, given)
        if has_all:
            say_kept_numbers(path, filed, given, settings)


def say_overruled(path, filed, earlier, given):
    """
    A warning where a config file or settings.json (path, which sets what is `filed`) takes back
    what stands before it in the command. earlier: {name: value} of what it should not take back.
    """
    lost = [name for name in earlier if name in filed and earlier[name] != filed[name]
            and given[name] == filed[name]]
    if lost:
        print(f"warning: {path} stands behind what sets {', '.join(lost)}, and sets it anew: name "
              f"{path} first", file=sys.stderr)


def say_kept_numbers(path, filed, given, settings):
    """
    A warning where a run names a settings.json (path, which sets what is `filed`), but is of
    another mechanism, rule or shape. All numbers stand in that file, also those that follow from
    these, and the user may not have meant them.
    """
    same_kind = all(filed.get(name) == given.get(name)
                    for name in ('ponder', 'halting', 'n_layer', 'n_head', 'n_embd'))
    if same_kind:
        return
    asked = asked_of_model(given)
    names = {field.name for field in fields(GPTConfig) if field.default is None} - {'n_tokens'}
    if settings.init_from != 'scratch':
        names -= {*FIXED}       # which are those of the weights
    try:
        own = GPTConfig(**{name: asked[name] for name in asked if name not in names})
    except ValueError:          # start_config says it
        return
    kept = {name: getattr(own, name) for name in sorted(names)
            if asked.get(name) is not None and asked[name] == filed.get(name) != getattr(own, name)}
    if kept:
        numbers = ', '.join(f'{name}={asked[name]}' for name in kept)
        print(f"warning: {numbers}: as in {path}; for those of this model add "
              + ' '.join(f'--{name}={value}' for name, value in kept.items()), file=sys.stderr)
