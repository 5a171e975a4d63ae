"""
What a loaded checkpoint has to be before anything uses it. PyTorch does not check. It takes moments
of a wrong shape, and AdamW's fused kernel then reads past their end. It also takes weights that are
NaN.

    check_archive(path)             the file's own checksums
    check_form(state)               what holds for every version: fields and their kinds
    check_model(state, GPTConfig)   of the newest version: config and variant, and the weights and
                                    moments they call for
    check_numbers(state)            before saving: no NaN and no infinity

The last three raise a ValueError that names the field. A weight is model.NAME. Its moments are
optimizer.NAME.exp_avg and so on, or optimizer.state[NUMBER].exp_avg where no model is at hand.
"""

import math
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from functools import partial

import torch

from engine.checks import require
from engine.errors import shown
from engine.variant import check_variant, outline

PARTS = dict(version=int, step=int, config=dict, settings=dict, tokenizer=str, model=dict,
             optimizer=dict)
CALLED = {int: 'a whole number', str: 'text', dict: 'a dictionary', list: 'a list'}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MOMENTS = ('step', 'exp_avg', 'exp_avg_sq')     # of every parameter, in train.py's optimizer
SCALER = ('scale', 'growth_factor', 'backoff_factor', 'growth_interval', '_growth_tracker')

# Saved with every model. A field that GPTConfig gained later has its default in older files.
CONFIG = ('vocab_size', 'n_tokens', 'block_size', 'n_layer', 'n_head', 'n_kv_head', 'n_embd',
          'head_dim', 'mlp_hidden', 'rope_theta', 'norm_eps', 'qk_norm', 'tie_embeddings',
          'embed_scale', 'init_std', 'dropout', 'depth_attn', 'depth_stride', 'depth_mode',
          'ponder', 'ponder_steps', 'ponder_topk', 'jacobi_iters', 'halting', 'halt_tau',
          'halt_lambda', 'halt_start', 'halt_full', 'halt_share', 'halt_beta')


# ---- the file ------------------------------------------------------------------------------------

def check_archive(path):
    """
    zipfile.BadZipFile if a checksum is wrong, which torch.load does not compare; ValueError if the
    parts are not torch.save's.
    """
    with zipfile.ZipFile(path) as archive, ThreadPoolExecutor() as pool:
        entries = archive.infolist()
        names = {entry.filename for entry in entries}
        stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
        require(stored and len(names) == len(entries), "not the parts that torch.save makes")
        # Threads help: checksums release Python's lock. list() raises what a thread raised, which
        # map() alone would keep to itself.
        list(pool.map(partial(read_through, archive), entries))


def read_through(archive, entry):
    """Read a part of the archive to its end, where its checksum is compared."""
    with archive.open(entry) as part:
        while part.read(2 ** 20):
            pass


# ---- the form ------------------------------------------------------------------------------------

def check_form(state):
    """ValueError for a missing field, and for one that is not the kind of thing it should be."""
    require_kind(state, dict, "the file's content")
    for name, kind in PARTS.items():
        require(name in state, f"{name} is missing")
        require_kind(state[name], kind, name)
    require(0 <= state['step'] < 2 ** 31, f"step={state['step']} is no number of steps")
    for part in ('config', 'settings', 'model'):
        for name in state[part]:
            require_kind(name, str, f"a name in {part}")
    for name, value in state['settings'].items():
        is_plain = value is None or type(value) in (bool, int, float, str)
        require(is_plain, f"settings.{name} should be a number, a text or None, not {shown(value)}")
    for name, tensor in state['model'].items():
        check_tensor(f'model.{name}', tensor)
    check_scaler(state.get('scaler') or {})
    if state['optimizer']:                      # nothing in it: weights to sample from, no more
        check_optimizer(state['optimizer'])


def require_kind(value, kind, name):
    is_kind = isinstance(value, kind) and not isinstance(value, bool)
    require(is_kind, f"{name} should be {CALLED[kind]}, not {shown(value)}")


def check_tensor(name, tensor):
    """Dense floating-point numbers in the plain order of memory: what kernels write into."""
    require(isinstance(tensor, torch.Tensor), f"{name} should be a tensor, not {shown(tensor)}")
    is_float = tensor.dtype in DTYPES
    require(is_float, f"{name} holds {tensor.dtype}, not one of the float types of 16 to 64 bits")
    is_dense = tensor.layout == torch.strided and tensor.device.type == 'cpu'
    require(is_dense and tensor.is_contiguous(),
            f"{name} is not a plain tensor, one number per place")


def check_scaler(scaler):
    """fp16's loss scale; empty in other precisions."""
    require_kind(scaler, dict, 'scaler')
    require(not scaler or set(scaler) == set(SCALER), f"scaler should hold {', '.join(SCALER)}")
    for name, value in scaler.items():
        is_amount = type(value) in (int, float) and math.isfinite(value) and value >= 0
        require(is_amount, f"scaler.{name} should be 0 or a positive number, not {shown(value)}")


def check_optimizer(optimizer):
    """Two groups, which name parameters by number, and the moments of each parameter."""
    for name, kind in (('param_groups', list), ('state', dict)):
        require(name in optimizer, f"optimizer.{name} is missing")
        require_kind(optimizer[name], kind, f'optimizer.{name}')
    numbers = []
    groups = optimizer['param_groups']
    require(len(groups) == 2, f"optimizer.param_groups: {len(groups)} groups, not 2")
    for group in groups:
        require_kind(group, dict, 'a group of optimizer.param_groups')
        require_kind(group.get('params'), list, 'params of optimizer.param_groups')
        numbers += group['params']
    for number in numbers:
        require_kind(number, int, 'a parameter of optimizer.param_groups')
    require(len(set(numbers)) == len(numbers), "optimizer.param_groups has a parameter twice")
    for number, moments in optimizer['state'].items():
        require(number in numbers, f"optimizer.state has {shown(number)}, which is no parameter")
        require_kind(moments, dict, f'optimizer.state[{number}]')
        found = ', '.join(map(str, moments))
        require(set(moments) == set(MOMENTS),
                f"optimizer.state[{number}] holds {found or 'nothing'}, not {', '.join(MOMENTS)}")
        for name, tensor in moments.items():
            check_tensor(f'optimizer.state[{number}].{name}', tensor)


# ---- the model -----------------------------------------------------------------------------------

def check_model(state, config_class):
    """
    ValueError if weights or moments are not those of a model with this config and variant, or are
    not finite. config_class: GPTConfig.
    """
    config = read_config(state['config'], config_class)
    check_variant(state.get('variant'), config)
    model = outline(config, state.get('variant'))
    check_shapes(state['model'], model.state_dict())
    check_weights(state['model'])
    if state['optimizer']:
        check_moments(state, list(model.named_parameters()))


def read_config(config, config_class):
    """The GPTConfig of a checkpoint's dictionary; ValueError for one that was never saved."""
    known = {field.name for field in fields(config_class)}
    for name in config:
        require(name in known, f"config.{name}: this program knows no such setting")
    for name in CONFIG:
        require(name in config, f"config.{name} is missing")
    made = config_class(**config)       # ValueError: wrong types, impossible pairs
    for name, value in asdict(made).items():
        # GPTConfig replaces some None by defaults, so a saved config has none there.
        as_saved = name not in config or config[name] == value
        require(as_saved, f"config.{name} should be {shown(value)}, not {shown(config.get(name))}")
    return made


def check_shapes(weights, expected):
    """Both {name: tensor}; of `expected` only the shapes count."""
    for name, tensor in expected.items():
        require(name in weights, f"model.{name} is missing")
        found, right = tuple(weights[name].shape), tuple(tensor.shape)
        require(found == right, f"model.{name} has the shape {found}, its config says {right}")
    for name in weights:
        require(name in expected, f"model.{name}: a model of its config has no such weight")


def check_weights(weights):
    """check_finite for a state's {name in the model: tensor}."""
    check_finite({f'model.{name}': tensor for name, tensor in weights.items()})


def check_finite(tensors):
    """ValueError for the first of {field: tensor} that holds NaN or infinity."""
    for name, tensor in tensors.items():
        # both are NaN, if any number is NaN
        lowest, highest = (extreme.item() for extreme in tensor.detach().aminmax())
        require(math.isfinite(lowest) and math.isfinite(highest),
                f"{name} is not finite (from {lowest:.3g} to {highest:.3g})")


def check_numbers(state):
    """ValueError for a weight or a moment that is not finite."""
    check_weights(state['model'])
    for number, moments in state['optimizer']['state'].items():
        check_finite({f'optimizer.state[{number}].{key}': moments[key] for key in moments})


def check_moments(state, parameters):
    """
    The moments that train.py's optimizer has for [(name, parameter), ..]: of all, or of none before
    its first step.
    """
    matrices = [(name, p.shape) for name, p in parameters if p.dim() >= 2]
    vectors = [(name, p.shape) for name, p in parameters if p.dim() < 2]
    held = state['optimizer']['state']
    if not held:
        require(may_lack_moments(state), f"optimizer.state is empty after {state['step']} steps")
        return
    for group, wanted in zip(state['optimizer']['param_groups'], (matrices, vectors)):
        numbers = group['params']
        require(len(numbers) == len(wanted), f"optimizer.param_groups: {len(numbers)} parameters "
                                             f"where the model has {len(wanted)}")
        for number, (name, shape) in zip(numbers, wanted):
            require(number in held, f"optimizer.{name} is missing")
            check_moments_of(f'optimizer.{name}', held[number], shape, state['step'])


def check_moments_of(name, moments, shape, steps):
    """The moments of one parameter, after so many steps of the run."""
    for key, tensor in moments.items():
        found = tuple(tensor.shape)
        require(key == 'step' or found == tuple(shape),
                f"{name}.{key} has the shape {found}, its parameter {tuple(shape)}")
    check_finite({f'{name}.{key}': tensor for key, tensor in moments.items()})
    if 'exp_avg_sq' in moments:
        require(moments['exp_avg_sq'].amin() >= 0, f"{name}.exp_avg_sq holds negative squares")
    if 'step' in moments:
        count = moments['step']
        require(count.dim() == 0 and 0 <= count.item() <= steps and count.item() % 1 == 0,
                f"{name}.step is no number of steps up to {steps}")


def may_lack_moments(state):
    """Whether AdamW may not have stepped yet: at step 0, or where fp16 skipped every step."""
    scaler = state.get('scaler') or {}
    # a tracker above 0 means that a step was taken
    return state['step'] == 0 or scaler.get('_growth_tracker') == 0
