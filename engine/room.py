"""
Whether a model fits into the machine's memory, before anything large is allocated: the system kills
a program that takes more, without a word.

    check_training_fits(GPT, config, settings, device, dtype, ranks)    UserError: cannot train here
    check_model_fits(config, variant, device)                           UserError: cannot be loaded

Only what surely fails is refused. On a GPU, weights, gradients and moments must fit into the whole
card. On a CPU, these and the activations must fit into what is free. To load or to evaluate a
model, only its weights are counted. A system that does not say what it has refuses nothing.
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

COMPILED = 0.75     # compiled blocks keep at least this share of the activations that are counted


def check_training_fits(GPT, config, settings, device, dtype, ranks):
    """UserError if training GPT(config), or evaluating it, needs more memory than there is."""
    has = memory_of(device)
    if ranks.world > 1:     # a mean waits for all ranks, so all look before one of them allocates
        has = ranks.mean(torch.tensor([has], dtype=torch.float64, device=device))
    with shapes_only():
        bytes_of_weights = model_bytes(GPT(config), torch.float32)
    processes = 1           # that share this memory
    if device.type == 'cpu':
        processes = int(os.environ.get('LOCAL_WORLD_SIZE') or ranks.world)
    if settings.eval_only:
        check_fits("loading this model", bytes_of_weights * processes, has, device)
        return
    moment_shares = ranks.world if settings.shard_optimizer else 1
    least_bytes = (2 + 2 / moment_shares) * bytes_of_weights    # weights, gradients, two moments
    check_fits("training this model", least_bytes * processes, has, device)
    if device.type != 'cpu':
        return
    if (least_bytes + activations_bound(config, settings)) * processes < has:
        return
    activations = measure(GPT, config, settings, dtype, device)
    check_fits(f"training this model with micro_batch={settings.micro_batch}",
               (least_bytes + activations) * processes, has, device, "lower micro_batch, ")


def check_model_fits(config, variant, device, dtype=torch.float32):
    """UserError if there is no room on the device for the weights of a GPTConfig and a variant."""
    needs = model_bytes(outline(config, variant), dtype)
    check_fits("loading this model", needs, memory_of(device), device)


def check_fits(what, needs, has, device, first=''):
    """UserError if it needs more bytes than there are. first: what to do before all else."""
    if needs <= has:
        return
    way_out = f"{first}take a smaller model (such as config/size/tiny.py) or a larger GPU"
    raise UserError(f"{what} takes {needs / 1e9:.1f} GB of memory, and there are "
                    f"{has / 1e9:.1f} GB for it ({device.type}): {way_out}")


def model_bytes(model, dtype):
    """Bytes of a model's weights, if they are of this dtype."""
    return dtype.itemsize * model.num_params()


# ---- what it takes -------------------------------------------------------------------------------

def activations_bound(config, settings):
    """A rough upper bound on the bytes of activations. If it fits, measuring is not needed."""
    mechanism = config.without_weights().mechanism
    passes = mechanism.steps + 1
    if 'jacobi_iters' in mechanism.settings:
        passes *= config.jacobi_iters + 1
    tokens = settings.micro_batch * config.block_size
    scores = config.n_head * min(config.block_size, 512)    # longer rows are never whole
    # what a block keeps: vectors as wide as x, vectors inside the MLP, scores and their softmax
    numbers_per_token = 10 * config.n_embd + 5 * config.mlp_hidden + 2 * scores
    logits = min(tokens * config.vocab_size, LOGITS_AT_ONCE)
    # fp32; of the logits four copies, such as their softmax and their gradient
    return 4 * (tokens * config.n_layer * passes * numbers_per_token + 4 * logits)


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
        free, total = torch.cuda.mem_get_info(device)
        return total
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
