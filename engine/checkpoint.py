"""
Checkpoints: complete or absent at any moment, the one before kept, and nothing in them is executed.

    save_checkpoint(folder, state)      folder/ckpt.pt; what was there is now ckpt_prev.pt
    state = load_checkpoint(folder)     the newest one that can be read
    model = model_of(state)             its model, with these weights
    with_own_weights(model, state)      the same, its weights copied out of the file
    load_weights(model, weights)        weights, into a model of the same shape
    load_optimizer(optimizer, scaler, state)    its moments; `optimizer_state` for saving
    change_steps(model, K)              it is to take K pondering steps
"""

import math
import os
import pickle
import sys
import zipfile
from dataclasses import fields, replace
from functools import partial

import torch
import torch.distributed as dist

from engine.build import config_of, shapes_only, without_numbers
from engine.files import UserError, check_whole, stamp, typed, whole
from engine.mechanisms import halts
from engine.released import load_released
from engine.variant import ReleasedConfig
from model import require

VERSION = 3
CHECKPOINTS = ('ckpt.pt', 'ckpt_prev.pt')  # newest first


# ---- saving --------------------------------------------------------------------------------------

def save_checkpoint(folder, state):
    """
    Write folder/ckpt.pt so that it is complete or absent at any moment; the one before it becomes
    ckpt_prev.pt. UserError if a weight or a moment is not finite, or the disk refuses.
    """
    path, previous = (os.path.join(folder, name) for name in CHECKPOINTS)
    check_finite(state)
    try:
        with whole(path, 'wb', before=partial(keep, path, previous)) as f:
            torch.save({'version': VERSION, **state}, f)
    except (OSError, RuntimeError) as error:
        cause = error.__context__ or error  # PyTorch raises its own error over a full disk's
        raise UserError(f"{path}: cannot be written ({str(cause).splitlines()[0]}); the checkpoint "
                        "before it is kept: see to it, then use --init_from=resume") from None


def keep(path, previous):
    """Let a checkpoint take the place of the one before it, if it is there and whole."""
    try:
        check_sums(path)
    except Exception:   # nearly any error
        return
    os.replace(path, previous)


def check_sums(path):
    """
    Read a checkpoint once, some 2 GB a second, and compare its checksums. ValueError if one is
    wrong; of a file that was cut, or is no archive, nearly any error.
    """
    with zipfile.ZipFile(path) as archive:      # torch.load does not compare checksums
        require(archive.testzip() is None, "a checksum is wrong")


def check_finite(state):
    """UserError for the first weight or moment that holds NaN or infinity."""
    tensors = {f'model.{name}': tensor for name, tensor in state['model'].items()}
    for number, moments in state['optimizer'].get('state', {}).items():
        tensors.update({f'optimizer.{number}.{name}': moments[name] for name in moments})
    for name, tensor in tensors.items():
        lowest, highest = (extreme.item() for extreme in tensor.detach().aminmax())
        if not (math.isfinite(lowest) and math.isfinite(highest)):  # NaN, if any number is NaN
            raise UserError(f"after step {state['step']} {name} is not finite (from {lowest:.3g} "
                            f"to {highest:.3g}): lower learning_rate, and go on with "
                            "--init_from=resume from the last checkpoint")


def optimizer_state(optimizer):
    """
    For a checkpoint, on all ranks together: the state in one piece, also where ranks share it out
    (ZeroRedundancyOptimizer, which would send it as one Python number per byte).
    """
    if not hasattr(optimizer, 'optim'):
        return optimizer.state_dict()
    number = {}     # of each parameter, as in state_dict
    for group in optimizer.param_groups:
        for p in group['params']:
            number[p] = len(number)
    own = {}        # this rank's part
    for p, held in optimizer.optim.state.items():
        own[number[p]] = {name: moment.cpu() for name, moment in held.items()}

    state, rank = {}, dist.get_rank()
    for owner in range(dist.get_world_size()):
        part = [own if rank == owner else None]
        dist.broadcast_object_list(part, src=owner)     # one after the other: it takes memory
        if rank == 0:
            state.update(part[0])
    if rank > 0:
        return None
    groups = torch.optim.Optimizer.state_dict(optimizer)['param_groups']
    return {'state': dict(sorted(state.items())), 'param_groups': groups}


# ---- loading -------------------------------------------------------------------------------------

def load_checkpoint(folder):
    """
    The newest readable checkpoint of a folder: what train.py saved, a dict of step, config,
    settings, tokenizer, model, optimizer and so on. A damaged or missing one is reported and the
    one before it used. UserError if there is none. hf:FOLDER is a Hugging Face folder, see
    engine/released.py.

    Its tensors lie in the file, of which many processes share one copy, and which others may write
    over: copy them at once, then call check_whole with `files`.
    """
    if folder.startswith('hf:'):
        return load_released(folder.removeprefix('hf:'))
    if os.path.isfile(folder):
        where = os.path.dirname(folder) or '.'
        raise UserError(f"{folder} is a file: name the folder it is in, {where}")
    problems = []
    files = {path: stamp(path) for path in (os.path.join(folder, name) for name in CHECKPOINTS)}
    if not any(files.values()):
        command = typed('python', 'train.py', f'--out_dir={folder}')
        raise UserError(f"{folder}: no checkpoint here; make one with {command}")
    for path, there in files.items():
        if there is None:   # a run was killed between the renames of save_checkpoint
            problems.append(f"{path}: missing")
            continue
        try:
            state = read_checkpoint(path)
        except Exception as error:
            reason = ' '.join(str(error).split())[:120] or type(error).__name__
            problems.append(f"{path}: damaged, or not a checkpoint of this program ({reason})")
            continue
        for problem in problems:
            print(f"warning: {problem}; using {path}", file=sys.stderr)
        warn_of_unknown(state['config'], path)
        return {**state, 'files': files}
    raise UserError('; '.join(problems))


def warn_of_unknown(config, path):
    """Say which settings of a checkpoint config_of leaves out."""
    unknown = sorted(config.keys() - {field.name for field in fields(ReleasedConfig)})
    if unknown:
        told = ', '.join(f"{name}={config[name]!r}" for name in unknown)
        print(f"warning: {path}: model.py has no setting {told}, and goes on without",
              file=sys.stderr)


def read_checkpoint(path):
    """
    The dict that is in one file. Of a damaged file, or another program's, ValueError or nearly any
    other error. Executes nothing.
    """
    check_sums(path)
    mapped = sys.platform != 'win32'    # which cannot rename a mapped file
    try:
        state = torch.load(path, map_location='cpu', weights_only=True, mmap=mapped)
    except pickle.UnpicklingError:  # PyTorch's own text advises to trust the file
        raise ValueError("it holds more than tensors, numbers and texts") from None
    require(state['version'] == VERSION, f"version {state['version']}, this program has {VERSION}")
    config_of(state['config'])
    return state


def model_of(state):
    """
    The model of a checkpoint: its weights are those in `state` and not a copy, as a second set of a
    large model might not fit into memory.
    """
    model = without_numbers(config_of(state['config']))
    load_weights(model, state['model'], assign=True)
    if model.config.tie_embeddings:
        model.lm_head.weight = model.wte.weight
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise UserError(f"the checkpoint lacks {name}, which a changed model.py asks for: "
                            "register that buffer without persistent=False, and train again")
    return model


def with_own_weights(model, state):
    """model_of(state) with its weights copied out of the files, one by one; the same object."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == 'cpu':
            tensor.data = tensor.data.clone()
    check_whole(state['files'])
    return model


def load_weights(model, weights, assign=False):
    """Put {name: tensor} into a model; UserError unless they fit. assign: these, not a copy."""
    try:
        model.load_state_dict(weights, assign=assign)
    except RuntimeError as error:
        reason = ' '.join(str(error).split())[:120]
        raise UserError(f"the checkpoint's weights do not fit the model's settings ({reason}); "
                        "leave out what differs from the checkpoint's; or model.py has other "
                        "weights than when it was trained") from None


def load_optimizer(optimizer, scaler, state):
    """Put those of a checkpoint back. Learning rate, decay and so on stay what they are."""
    if state.get('scaler'):
        scaler.load_state_dict(state['scaler'])
    saved = state['optimizer']
    groups = []
    for now, then in zip(optimizer.param_groups, saved['param_groups']):
        groups.append({**now, 'params': then['params']})
    optimizer.load_state_dict({'state': saved['state'], 'param_groups': groups})

    shared_out = hasattr(optimizer, 'optim')    # ZeroRedundancyOptimizer: this rank's part is there
    for p, held in (optimizer.optim if shared_out else optimizer).state.items():
        for name, moment in held.items():
            if moment.dim() == 0:
                moment = moment.to(p.device) if shared_out else moment  # for fused AdamW
            elif moment.shape != p.shape:       # which would read past the end of a shorter one
                raise UserError(f"the checkpoint's optimizer belongs to another model: {name} has "
                                f"shape {tuple(moment.shape)}, its parameter {tuple(p.shape)}")
            held[name] = moment.clone()     # on a CPU it lies in the file, and keeps it open
    if shared_out:
        optimizer.state.clear()  # a second copy of that part, which nothing reads


def with_halting(state, halting):
    """
    A checkpoint whose tokens stop by a rule that it was not trained with; UserError if it takes one
    pass, if the rule needs weights that are not there, or if its passes read earlier ones.
    """
    before = state['config']
    config = {**before, 'halting': halting}
    if before.get('halting') != halting:
        config['halt_tau'] = None       # the rule's own
    if before.get('ponder_steps') == 0:
        raise UserError(f"halting={halting!r}: this model was trained with ponder_steps=0, and "
                        "takes one pass for each token; leave the setting out")
    try:
        needs = without_numbers(config_of(config)).state_dict()
    except ValueError as error:
        raise UserError(str(error)) from None
    if needs.keys() != state['model'].keys():
        raise UserError(f"halting={halting!r}: this model has other weights; train with it")
    if before.get('depth_attn') and before.get('halting') != halting:
        raise UserError(f"halting={halting!r}: with depth_attn a loop's passes read earlier ones, "
                        "and those of a model that halts do not; train with it")
    return {**state, 'config': config}


def change_steps(model, K):
    """Let a trained model take K pondering steps; UserError if it has no weights for them."""
    config = model.config
    if K < 0:
        raise UserError(f"ponder_steps={K} must not be negative")
    if config.ponder in ('none', 'smear'):
        raise UserError(f"ponder_steps: this model has ponder={config.ponder!r}, and so one pass; "
                        "leave the setting out")
    if K > 0 and config.halting != 'none' and not halts(model):
        raise UserError(f"ponder_steps={K}: this model was trained with ponder_steps=0, so its "
                        "tokens never learned to halt; leave the setting out")
    has = model.mechanism.state_dict()
    with shapes_only():
        needs = type(model.mechanism)(replace(config, ponder_steps=K)).state_dict()
    if any(name not in has or has[name].shape != needs[name].shape for name in needs):
        instead = ", and use --halt_tau" if config.halting != 'none' else ''
        raise UserError(f"ponder_steps={K}: this model has weights for another number of steps; "
                        f"leave the setting out{instead}")
    config.ponder_steps = K
