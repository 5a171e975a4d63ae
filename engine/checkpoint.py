"""
Checkpoints: complete or absent at any moment, the one before kept, and nothing in them is executed.

    save_checkpoint(folder, state)      folder/ckpt.pt; what was there before is ckpt_prev.pt
    state = load_checkpoint(folder)     the newest readable one
    load_weights(model, state)          its weights, into a model of the same shape
    change_steps(config, n)             the model of this config is to take n pondering steps
"""

import contextlib
import os
import sys

import torch

from engine.errors import UserError
from model import GPTConfig

CHECKPOINT_VERSION = 1
CHECKPOINTS = ('ckpt.pt', 'ckpt_prev.pt')  # newest first


@contextlib.contextmanager
def whole(path, mode='w', before=lambda: None):
    """
    A file to write, which becomes `path` when all of it is on the disk; `before` is called just before that. After a failure
    `path` is as it was.
    """
    try:
        with open(path + '.tmp', mode) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
    except BaseException:  # on a full disk, half of one would be in the way
        with contextlib.suppress(OSError): os.remove(path + '.tmp')
        raise
    before()
    os.replace(path + '.tmp', path)


def save_checkpoint(folder, state):
    """Write folder/ckpt.pt so that it is complete or absent at any moment; the one before it becomes ckpt_prev.pt, if it is whole."""
    path, previous = (os.path.join(folder, name) for name in CHECKPOINTS)

    def keep():
        if not os.path.exists(path): return
        try: read_checkpoint(path)
        except Exception: pass  # what is damaged must not take the place of the one before it
        else: os.replace(path, previous)
    with whole(path, 'wb', keep) as f: torch.save(state, f)


def read_checkpoint(path):
    """The dict in one file; on a damaged or foreign one, nearly any error. Nothing in the file is executed."""
    # mapped, not read: many processes share one copy; but Windows cannot rename a mapped file
    state = torch.load(path, map_location='cpu', weights_only=True, mmap=sys.platform != 'win32')
    if state['version'] != CHECKPOINT_VERSION: raise ValueError(f"version {state['version']}")
    GPTConfig(**state['config']), state['model'], state['optimizer'], state['step'], state['settings'], state['tokenizer']
    return state


def load_checkpoint(folder):
    """
    The newest readable checkpoint of a folder: a dict of model, config, optimizer, scaler, step, settings, tokenizer, train_data.
    A damaged one is reported and the one before it used. UserError if there is none. Nothing in the file is executed.
    """
    if os.path.isfile(folder): raise UserError(f"{folder} is a file: name the folder it is in, {os.path.dirname(folder) or '.'}")
    problems = []
    for name in CHECKPOINTS:
        path = os.path.join(folder, name)
        if not os.path.exists(path): continue
        try:
            state = read_checkpoint(path)
            for problem in problems: print(f"warning: {problem}; using {path}", file=sys.stderr)
            return state
        except Exception as error:
            reason = ' '.join(str(error).split())[:80] or type(error).__name__
            problems.append(f"{path}: damaged, or not a checkpoint of this program ({reason})")
    raise UserError('; '.join(problems) or f"{folder}: no checkpoint here; make one with train.py --out_dir={folder}")


def load_weights(model, state):
    """Put a checkpoint's weights into a model of the same shape; UserError otherwise."""
    try:
        model.load_state_dict(state['model'])
    except RuntimeError as error:
        raise UserError(f"the checkpoint's weights do not fit the model's settings ({' '.join(str(error).split())[:120]}); "
                        f"leave out what differs from the checkpoint's") from None


def change_steps(config, n):
    """Let a trained model take n pondering steps. UserError if it does not ponder, or has no weights for so many."""
    trained, some = config.ponder_steps, config.ponder_steps > 0 or n == 0
    fits = {'gate': n <= trained, 'mask': n == trained, 'router': some, 'pause': some}  # the others have no weights for their steps
    if n < 0: raise UserError(f"ponder_steps={n} must not be negative")
    if config.ponder == 'none': raise UserError("ponder_steps: this model has ponder='none'; leave the setting out")
    if not fits.get(config.ponder if config.halting == 'none' else config.halting, True):
        raise UserError(f"ponder_steps={n}: this model has weights for {trained} steps; leave the setting out"
                        + (", and use --halt_tau" if config.halting != 'none' else ''))
    config.ponder_steps = n
