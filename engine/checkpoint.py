"""
Checkpoints: complete or absent at any moment, the one before kept, and nothing in them is executed.

    save_checkpoint(folder, state)              folder/ckpt.pt; what was there is now ckpt_prev.pt
    state = load_checkpoint(folder, GPTConfig)  the newest one that can be read
    model = new_model(state, GPT, GPTConfig)    its model, with these weights
    load_weights(model, state)                  its weights, into a model of the same shape
    kept(folder)                                what there is to go on from, in words
    change_steps(model, n)                      it is to take n pondering steps
"""

import math
import os
import pickle
import sys
from functools import partial

import torch
from torch.overrides import TorchFunctionMode

from engine.errors import UserError
from engine.files import plain_file, whole
from engine.huggingface import load_state
from engine.state import check_archive, check_form, check_model
from engine.variant import fit

CHECKPOINT_VERSION = 3
CHECKPOINTS = ('ckpt.pt', 'ckpt_prev.pt')  # newest first


def save_checkpoint(folder, state):
    """
    Write folder/ckpt.pt so that it is complete or absent at any moment; the one before it becomes
    ckpt_prev.pt, if it is whole.
    """
    path, previous = (os.path.join(folder, name) for name in CHECKPOINTS)
    with whole(path, 'wb', before=partial(keep, path, previous)) as f:
        torch.save(state, f)


def keep(path, previous):
    """Rename the checkpoint at `path`, unless it is damaged: `previous` may be better."""
    if not os.path.exists(path):
        return
    try:
        read_checkpoint(path)
    except Exception:
        return
    os.replace(path, previous)


def read_checkpoint(path, config_class=None):
    """
    The dict in one file, checked by engine/state.py; on a damaged or foreign one, nearly any error.
    Nothing in the file is executed. config_class: GPTConfig, to check config, weights and moments
    too.
    """
    check_archive(plain_file(path))
    # mapped, not read: many processes share one copy; but Windows cannot rename a mapped file
    mapped = sys.platform != 'win32'
    try:
        state = torch.load(path, map_location='cpu', weights_only=True, mmap=mapped)
    except pickle.UnpicklingError:  # PyTorch's own text advises to trust the file
        raise ValueError("it holds more than tensors, numbers and texts") from None
    check_form(state)
    state = upgrade(state)
    if config_class is not None:
        check_model(state, config_class)
    return state


def upgrade(state):
    """
    What a checkpoint of any known version would be if it were saved today; ValueError for other
    versions.

    1 -> 2: the weights of a mechanism moved into it: `gates.0.0.weight` to
    `mechanism.gates.0.0.weight`. Optimizer states are in the order of the parameters, where `pause`
    was the first of the vectors, and is now the last.

    2 -> 3: halt_start and halt_full, which a router did not read, are now settings of it too.
    """
    if state['version'] == 1:
        optimizer = state['optimizer']
        if 'pause' in state['model'] and optimizer:
            vectors = optimizer['param_groups'][1]
            vectors['params'] = vectors['params'][1:] + vectors['params'][:1]
        renamed = {in_mechanism(name): tensor for name, tensor in state['model'].items()}
        state = {**state, 'version': 2, 'model': renamed}
    if state['version'] == 2:
        config = dict(state['config'])
        if config.get('halting') == 'router':
            config.update(halt_start=0.0, halt_full=0.0)
        state = {**state, 'version': 3, 'config': config}
    if state['version'] != CHECKPOINT_VERSION:
        raise ValueError(f"version {state['version']}")
    return state


def in_mechanism(name):
    """Where a weight of version 1 is now."""
    is_mechanism = name.split('.')[0] in ('gates', 'router', 'pause')
    return f'mechanism.{name}' if is_mechanism else name


def load_checkpoint(folder, config_class=None):
    """
    The newest readable checkpoint of a folder: a dict of model, config, optimizer, scaler, step,
    settings, tokenizer, train_data, variant. A damaged one is reported and the one before it used.
    UserError if there is none. Nothing in the file is executed. config_class: as read_checkpoint.
    hf:FOLDER is a Hugging Face folder, see engine/huggingface.py.
    """
    if folder.startswith('hf:'):
        return load_state(folder.removeprefix('hf:'), config_class)
    if os.path.isfile(folder):
        where = os.path.dirname(folder) or '.'
        raise UserError(f"{folder} is a file: name the folder it is in, {where}")

    problems = []
    for name in CHECKPOINTS:
        path = os.path.join(folder, name)
        if not os.path.exists(path):
            continue
        try:
            state = read_checkpoint(path, config_class)
        except Exception as error:
            reason = ' '.join(str(error).split())[:120] or type(error).__name__
            problems.append(f"{path}: damaged, or not a checkpoint of this program ({reason})")
            continue
        for problem in problems:
            print(f"warning: {problem}; using {path}", file=sys.stderr)
        return state

    nothing = f"{folder}: no checkpoint here; make one with train.py --out_dir={folder}"
    raise UserError('; '.join(problems) or nothing)


def kept(folder, before=math.inf):
    """In words, the newest checkpoint of a folder that can be read and is of a step `before`."""
    for name in CHECKPOINTS:
        path = os.path.join(folder, name)
        try:
            step = read_checkpoint(path)['step']
        except Exception:
            continue
        if step < before:
            return f"{path} of step {step} is kept"
    return f"{folder} holds no checkpoint from before"


class Unfilled(TorchFunctionMode):
    """
    Inside, modules do not fill or scale their initial weights, which takes long in a large model.
    What nobody writes to takes no memory either.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.div_:
            return args[0]
        if getattr(func, '__module__', None) == 'torch.nn.init':
            return None
        return func(*args, **(kwargs or {}))


def new_model(state, GPT, GPTConfig):
    """
    The model of a checkpoint: its weights are those in `state` and not a copy, as a second set of a
    large model might not fit into memory.
    """
    with Unfilled():
        model = GPT(GPTConfig(**state['config']))
        load_weights(model, state, assign=True)
    if model.config.tie_embeddings:
        model.lm_head.weight = model.wte.weight
    return model


def load_weights(model, state, assign=False):
    """
    Put a checkpoint's weights into a new model of the same shape, which takes on the checkpoint's
    variant; UserError otherwise. assign: these very tensors, not their numbers.
    """
    fit(model, state.get('variant'))
    try:
        model.load_state_dict(state['model'], assign=assign)
    except RuntimeError as error:
        reason = ' '.join(str(error).split())[:120]
        raise UserError(f"the checkpoint's weights do not fit the model's settings ({reason}); "
                        f"leave out what differs from the checkpoint's") from None


def change_steps(model, n):
    """Let a trained model take n pondering steps; UserError if it cannot."""
    config, trained = model.config, model.config.ponder_steps
    if n < 0:
        raise UserError(f"ponder_steps={n} must not be negative")
    if config.ponder == 'none':
        raise UserError("ponder_steps: this model has ponder='none'; leave the setting out")
    if not model.mechanism.can_take(n):
        instead = ", and use --halt_tau" if config.halting != 'none' else ''
        raise UserError(f"ponder_steps={n}: this model has weights for {trained} steps; leave the "
                        f"setting out{instead}")
    config.ponder_steps = n
