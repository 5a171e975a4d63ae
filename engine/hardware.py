"""
The machine: device and precision, what suits them, the processes of one run, and what their
failures mean.
"""

import contextlib
import functools
import importlib.util
import os
import re
import time
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from engine.files import UserError

# dense bf16, per second; a longer name stands before a shorter one
PEAK_FLOPS = {
    'H200 NVL': 835e12,
    'H200': 989e12,
    'H100 NVL': 835e12,
    'H100 PCIe': 756e12,
    'H100': 989e12,
    'A100': 312e12,
    'L40S': 362e12,
    'RTX 4090': 165e12,
    'RTX 3090': 71e12,
}

DTYPES = torch.float32, torch.bfloat16, torch.float16


def peak_flops(gpu):
    """
    Of PEAK_FLOPS, by the name that PyTorch gives a GPU; None of others, and of a part of a card
    (MIG), a laptop's, or a sister (4090 D, 3090 Ti), which have peaks of their own.
    """
    words = set(re.split(r'[\s-]+', gpu))
    if words & {'MIG', 'Laptop', 'D', 'Ti', 'SUPER'}:
        return None
    for name, peak in PEAK_FLOPS.items():
        if words >= set(name.split()):
            return peak
    return None


# ---- device and precision ------------------------------------------------------------------------

def pick_device(name, local_rank=0):
    """
    The device to compute on (None: the best there is); a GPU becomes PyTorch's current one.
    UserError if the one asked for is not there.
    """
    if name is None:
        name = best_device()
    if name == 'cuda':
        name = f'cuda:{local_rank}'
    if name.split(':')[0] not in ('cpu', 'cuda', 'mps'):
        raise UserError(f"device={name}: choose cpu, cuda or mps")
    try:
        torch.empty(1, device=name)
        device = torch.device(name)
        if device.type == 'cuda':
            torch.cuda.set_device(device)  # clocks and memory counters ask the current one
        return device
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"device={name}: not usable here ({reason})") from None


def best_device():
    if torch.cuda.is_available():
        return 'cuda'
    if torch.backends.mps.is_available():
        return 'mps'
    return 'cpu'


def pick_dtype(name, device):
    """
    (The autocast type, why it is that one.) Without a name: on CUDA bf16, fp16 on older cards; on a
    CPU bf16 where products are faster in it; else fp32. Without AMX's tiles, bf16 is twice as fast
    as fp32 on some CPUs and half as fast on others: hence the clock, and fp32 where bf16 gains less
    than a fifth. Clocks are noisy: two runs that must agree name a dtype.
    """
    new_gpu = device.type == 'cuda' and torch.cuda.get_device_capability(device) >= (8, 0)
    if name is not None:
        in_tf32 = ', products in TF32' if new_gpu and name == 'float32' else ''     # prepare.py
        return getattr(torch, name), f'as set, or as before{in_tf32}'
    if device.type == 'cuda':
        return torch.bfloat16 if new_gpu else torch.float16, 'what this GPU computes in'
    can = torch.cpu.get_capabilities() if hasattr(torch.cpu, 'get_capabilities') else {}
    if device.type != 'cpu' or not (can.get('avx512_bf16') or can.get('amx_bf16')):
        return torch.float32, '16 bits are no quicker here'
    if can.get('amx_bf16'):
        return torch.bfloat16, 'the CPU has AMX tiles'
    wide, narrow = time_products()
    why = f'a product takes {1e3 * wide:.1f} ms in float32, {1e3 * narrow:.1f} in bfloat16'
    return torch.bfloat16 if 1.2 * narrow < wide else torch.float32, why


@functools.cache
def time_products():
    """Seconds of a product of matrices (384,384) in fp32 and in bf16: the best of five each."""
    best = {}
    for dtype in 5 * (torch.float32, torch.bfloat16):
        a = torch.ones(384, 384, dtype=dtype)
        began = time.perf_counter()
        a @ a
        seconds = time.perf_counter() - began
        best[dtype] = min(seconds, best.get(dtype, seconds))
    return list(best.values())


def autocast(device, dtype):
    """Around what computes its products in this type; fp32 has it off."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def check_causal(device, dtype):
    """UserError if PyTorch's causal attention is wrong there: on MPS in 16 bits it was."""
    if device.type not in ('cpu', 'cuda') and not attention_is_right(device, dtype):
        instead = 'device=cpu' if dtype == torch.float32 else 'dtype=float32'
        raise UserError(f"device={device.type}: PyTorch's attention lets tokens see those behind "
                        f"them there, in {dtype}; add --{instead}")


def attention_is_right(device, dtype):
    """Whether causal attention of one small text is what fp32 on the CPU makes of it."""
    draw = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, 1, 4, 64, 64, generator=draw).to(dtype)        # each (B,nh,T,hd)
    causal = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    off = causal(*qkv.to(device)).cpu().float() - causal(*qkv.float())
    return off.abs().max().item() < 0.1     # rounding: 0.01; if one token more is read: 0.5 or more


def pick_compile(choice, device):
    """Whether to compile: as asked for, else on CUDA devices where PyTorch's compiler runs."""
    if choice is not None:
        return choice
    if device.type != 'cuda' or importlib.util.find_spec('triton') is None:     # as on Windows
        return False
    return torch.cuda.get_device_capability(device) >= (7, 0)


# ---- what suits them -----------------------------------------------------------------------------

def without_cudnn_attention():
    """
    Before work whose lengths change from call to call: generation, scoring, the router. Since 2.11
    PyTorch prefers cuDNN's attention in 16 bits on H100 and B200; it is the fastest there in
    training, but makes a plan for every shape it has not seen. Also before training with masks that
    are tensors: in 2.13, where a length is 64 more than a multiple of 128, its gradients are NaN.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


# ---- the processes of a run ----------------------------------------------------------------------

class Ranks(NamedTuple):
    """The place of this process among those of a run."""
    rank: int
    world: int

    def sum(self, value):
        """A tensor, added up over all ranks, in place."""
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def dtype_of_first(self, dtype, device):
        """Rank 0's type, on all ranks."""
        if self.world == 1:
            return dtype
        number = torch.tensor([DTYPES.index(dtype) * (self.rank == 0)], device=device)
        return DTYPES[self.sum(number).item()]

    def wait(self):
        """Until all ranks are here."""
        if self.world > 1:
            dist.barrier()

    def mean(self, value):
        """A one-element tensor, averaged over all ranks, as a float."""
        return self.sum(value).item() / self.world


@contextlib.contextmanager
def process_group(name):
    """
    (the Ranks of this process, the device of this name that it computes on), with a process group
    around it when torchrun started it.
    """
    several = 'RANK' in os.environ  # torchrun's; a WORLD_SIZE without it may be a scheduler's
    if several and name is None and best_device() == 'mps':
        name = 'cpu'                # between MPS devices nothing can be exchanged
    device = pick_device(name, int(os.environ.get('LOCAL_RANK', 0)))
    with explained():  # after a failure the group stays: taking it down would wait for the others
        ranks = join_group(device) if several else Ranks(0, 1)
        yield ranks, device
        ranks.wait()    # nobody leaves while another still talks
    if several and device.type == 'cuda':
        dist.destroy_process_group()
    # gloo's stays, see `leave` in engine/files.py: giving it up waits for its threads, which may
    # wait for Python to let go of their tensors, and that for them


def join_group(device):
    """Wait for the other ranks that torchrun started; returns the Ranks of this one."""
    cuda = device.type == 'cuda'
    backend = 'nccl' if cuda else 'gloo'
    try:
        dist.init_process_group(backend, device_id=device if cuda else None,
                                timeout=timedelta(minutes=30))  # of who waits while rank 0 saves
    except ValueError as error:     # a variable that is missing, or no number
        reason = str(error).rpartition(': ')[2]
        raise UserError(f"RANK is set, as by torchrun, but not all that torchrun sets ({reason}): "
                        "unset RANK, or use torchrun") from None
    return Ranks(dist.get_rank(), dist.get_world_size())


# ---- its failures --------------------------------------------------------------------------------

@contextlib.contextmanager
def explained():
    """Around what may fail by the machine's fault: what `explain` knows becomes a UserError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        message = explain(error)
        if message is None:
            raise
        raise UserError(message) from None


def explain(error):
    """A line that says what to do about a failure of the machine; None for one of the code."""
    text = ' '.join(str(error).split())
    no_memory = "can't allocate memory", 'not enough memory', 'out of memory'    # MPS: the last
    if isinstance(error, MemoryError) or any(words in text for words in no_memory):
        return ("out of memory: lower micro_batch (the result stays the same, but for dropout, "
                "halting='gate', and 'exit' and 'ouro' on made tasks), set "
                "checkpoint_activations=True, with several GPUs shard_optimizer=True, or lower "
                "block_size (dry_run=True estimates what that gives); in evaluate.py lower "
                "batch_size")
    no_compiler = 'No working C++ compiler', 'Failed to find C compiler', 'cl is not found'
    if any(words in text for words in no_compiler):
        return ("compile=True needs a C++ compiler, and none was found: install one (such as g++), "
                "or set --compile=False")
    if isinstance(error, dist.DistError) or 'gloo' in text:
        return (f"no contact, or no longer, with another rank ({text}): the first failure in "
                "torchrun's summary says which one failed, and of what; what was saved goes on "
                "with the same command and --init_from=resume")
    return None
