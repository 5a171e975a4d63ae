"""
Whether a model fits into the machine's memory, before anything large is allocated: the system kills
a program that takes more, without a word.

    refuse_training(GPT, config, settings, device, dtype, ranks)    UserError: it cannot train here
    refuse_model(config, variant, device)                           not even the weights fit

What is compared is what surely fails: on a GPU weights, gradients and moments with all the card
has, on a CPU all that the dry run counts with what is free. Nothing is compared where a system does
not say what it has.
"""

import math
import os
from dataclasses import replace

import torch

from engine.errors import UserError
from engine.hardware import pick_compile, tune_cpu
from engine.loss import LOGITS_AT_ONCE
from engine.shapes import shapes_only
from engine.variant import outline

COMPILED = 0.75     # of the activations, at least, are left when blocks are compiled


def refuse_training(GPT, config, settings, device, dtype, ranks):
    """UserError if training GPT(config), or evaluating it, needs more memory than there is."""
    has = memory_of(device)
    if ranks.world > 1:     # all look before one of them allocates
        has = ranks.mean(torch.tensor([has], dtype=torch.float64, device=device))
    with shapes_only():
        weights = weight_bytes(GPT(config), torch.float32)
    if settings.eval_only:
        refuse("loading this model", weights, has, device)
        return
    together = 1            # processes that share what was found
    if device.type == 'cpu':
        together = int(os.environ.get('LOCAL_WORLD_SIZE') or ranks.world)
    sharers = ranks.world if settings.shard_optimizer else 1
    least = (2 + 2 / sharers) * weights     # weights and gradients, two moments
    refuse("training this model", least * together, has, device)
    if device.type != 'cpu' or (least + at_most(config, settings)) * together < has:
        return
    activations = measure(GPT, config, settings, dtype, device)
    refuse(f"training this model with micro_batch={settings.micro_batch}",
           (least + activations) * together, has, device, "lower micro_batch, ")


def refuse_model(config, variant, device, dtype=torch.float32):
    """UserError if there is no room on the device for the weights of a GPTConfig and a variant."""
    weights = weight_bytes(outline(config, variant), dtype)
    refuse("loading this model", weights, memory_of(device), device)


def refuse(what, needs, has, device, first=''):
    """UserError if it needs more bytes than there are. first: what to do before all else."""
    if needs <= has:
        return
    way_out = f"{first}take a smaller model (such as config/size/tiny.py) or a larger GPU"
    raise UserError(f"{what} takes {needs / 1e9:.1f} GB of memory, and there are "
                    f"{has / 1e9:.1f} GB for it ({device.type}): {way_out}")


def weight_bytes(model, dtype):
    return dtype.itemsize * model.num_params()


# ---- what it takes -------------------------------------------------------------------------------

def at_most(config, settings):
    """
    More bytes than activations take, by a rough count: where these are there, nothing needs to be
    measured.
    """
    mechanism = config.without_weights().mechanism
    passes = mechanism.steps + 1
    if 'jacobi_iters' in mechanism.settings:
        passes *= config.jacobi_iters + 1
    tokens = settings.micro_batch * config.block_size
    scores = config.n_head * min(config.block_size, 512)    # longer rows are never whole
    numbers = 10 * config.n_embd + 5 * config.mlp_hidden + 2 * scores
    logits = min(tokens * config.vocab_size, LOGITS_AT_ONCE)
    return 4 * (tokens * config.n_layer * passes * numbers + 4 * logits)


def measure(GPT, config, settings, dtype, device):
    """Bytes of activations that training surely takes, as the dry run has them."""
    from engine.plan import activations     # not for every run: it imports for a second
    tune_cpu()                              # rules which attention runs
    on_device = replace(settings, device=device.type)
    count = activations(GPT, config, on_device, dtype, accumulates=True)
    return COMPILED * count if pick_compile(settings.compile, device) else count


# ---- what there is -------------------------------------------------------------------------------

def memory_of(device):
    """Bytes that a program could have there; infinity where that is not known."""
    if device.type == 'cuda':
        return torch.cuda.mem_get_info(device)[1]
    if device.type == 'cpu':
        return min(free_memory(), limit_of_container())
    return math.inf


def free_memory(path='/proc/meminfo'):
    """What Linux says is free, or can be freed, and swap; infinity on other systems."""
    try:
        with open(path, encoding='ascii') as f:
            rows = dict(line.split(':') for line in f)
        kilobytes = [int(rows[name].split()[0]) for name in ('MemAvailable', 'SwapFree')]
        return 1024 * sum(kilobytes)
    except (OSError, ValueError, LookupError):
        return math.inf


def limit_of_container(paths=('/sys/fs/cgroup/memory.max',
                              '/sys/fs/cgroup/memory/memory.limit_in_bytes')):
    """What a container may use at most; infinity without one."""
    for path in paths:
        try:
            with open(path, encoding='ascii') as f:
                return int(f.read())
        except (OSError, ValueError):       # 'max': no limit
            continue
    return math.inf
