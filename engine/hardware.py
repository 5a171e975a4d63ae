"""
The machine: device and precision, what suits them and what is compiled, the processes of one run, and what their failures mean.
"""

import contextlib
import ctypes
import os
import signal

import torch
import torch.distributed as dist

from engine.errors import UserError
from engine import attention

PEAK_FLOPS = {'H200': 989e12, 'H100': 989e12, 'A100': 312e12, 'L40S': 362e12, 'RTX 4090': 165e12, 'RTX 3090': 71e12}  # dense bf16


def pick_device(name, local_rank=0):
    """The device to compute on, of GPUs then the current one; UserError if the one asked for is not there."""
    if name is None: name = 'cuda' if torch.cuda.is_available() else 'mps' if torch.backends.mps.is_available() else 'cpu'
    if name == 'cuda': name = f'cuda:{local_rank}'
    try:
        torch.empty(1, device=name)
        device = torch.device(name)
        if device.type == 'cuda': torch.cuda.set_device(device)  # clocks and memory counters ask the current one
        if device.type in ('cpu', 'cuda', 'mps'): return device
        raise RuntimeError("choose cpu, cuda or mps")
    except (RuntimeError, AssertionError, ImportError) as error:
        raise UserError(f"device={name}: not usable here ({str(error).splitlines()[0]})") from None


def pick_dtype(name, device):
    """The autocast type: bf16 where the hardware computes in it, fp16 on older CUDA cards, else fp32."""
    if name is not None: return getattr(torch, name)
    if device.type == 'cuda': return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    cpu = torch.cpu.get_capabilities() if device.type == 'cpu' and hasattr(torch.cpu, 'get_capabilities') else {}
    return torch.bfloat16 if cpu.get('avx512_bf16') or cpu.get('amx_bf16') else torch.float32


def pick_compile(choice, device):
    """Whether to compile: as asked for, else on CUDA devices alone."""
    return device.type == 'cuda' if choice is None else choice


def tune_cpu():
    """Two things that cost nothing on a CPU; docs/performance.md has what they gain."""
    attention.kernel = attention.two_matmuls
    # On Linux, let malloc keep freed blocks: every new page of activations would be zeroed by the kernel again.
    with contextlib.suppress(OSError, AttributeError, TypeError):  # not Linux
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 32 * 2 ** 20)  # M_MMAP_THRESHOLD, the largest allowed
        libc.mallopt(-1, 2 ** 30)       # M_TRIM_THRESHOLD


def expect_new_lengths():
    """
    Before work whose lengths change from call to call: generation, scoring, the router. Since 2.11 PyTorch prefers cuDNN's attention
    in 16 bits on H100 and B200; it is the fastest there in training, but makes a plan for every shape it has not seen.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def compile_blocks(model):
    """torch.compile each block: one block's code serves all, so compile time does not grow with depth."""
    torch._dynamo.config.optimize_ddp = False   # it would cut each block where one of DDP's buckets ends
    torch._dynamo.config.recompile_limit = 128  # the variants are those of shapes, and of sources for Depth-Attention
    dynamic = None if model.config.halting == 'router' else False  # its rectangles of active slots change from step to step
    for block in model.h: block.compile(dynamic=dynamic)


def compile_decoding(model):
    """
    Compile the pass that reads one new token, all blocks in one piece; on a GPU replay it as a CUDA
    graph. For a model on its device, whose blocks are not compiled; caches are static from then on.
    The first tokens wait for the compiler.
    """
    model.blocks = CompiledBlocks(model)
    model.static_caches = True


class CompiledBlocks:
    """
    GPT.blocks, compiled for the passes of new tokens; other passes run as they are. `loop` with
    depth_attn does too: what earlier loops made would not outlast a CUDA graph's next replay.
    """

    def __init__(self, model):
        self.cuda = model.wte.weight.is_cuda
        self.plain = model.blocks
        self.compiled = torch.compile(self.plain, mode='reduce-overhead' if self.cuda else None)

    def __call__(self, x, pos, memory=None, layers=None, earlier=None):
        if memory is None or not memory.cached:
            return self.plain(x, pos, memory, layers, earlier)
        opened = Opened(memory, memory.mask(x.size(1), x.device))
        if earlier is not None or not memory.compiled:
            return self.plain(x, pos, opened, layers, earlier)
        if self.cuda:
            torch.compiler.cudagraph_mark_step_begin()
            for held in memory.all_tensors():  # written in place, not copied in
                torch._dynamo.mark_static_address(held, guard=False)
        with explained():  # the next replay writes where this one did: hence the copy
            return self.compiled(x, pos, opened, layers).clone()


class Opened:
    """A cache whose pass has begun: its mask was made outside of the compiled code."""

    def __init__(self, memory, mask):
        self.memory = memory
        self.ready_mask = mask

    def mask(self, S, device):
        return self.ready_mask

    def update(self, layer, k, v):
        return self.memory.update(layer, k, v)


def stop_signals():
    """What asks a run to save and stop: Ctrl-C, SIGTERM, and SIGHUP, the terminal's end, unless nohup has it ignored (Windows has none)."""
    heard = hasattr(signal, 'SIGHUP') and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM] + ([signal.SIGHUP] if heard else [])


@contextlib.contextmanager
def process_group(device):
    """(rank, world) of this process, with a process group around them when torchrun started it."""
    cuda = device.type == 'cuda'
    try:
        rank, world = 0, 1
        if 'RANK' in os.environ:  # torchrun's; a WORLD_SIZE without it may be a scheduler's
            rank, world = int(os.environ['RANK']), int(os.environ.get('WORLD_SIZE', 1))
            with explained(): dist.init_process_group('nccl' if cuda else 'gloo', device_id=device if cuda else None)
    except ValueError as error:
        raise UserError(f"RANK and what goes with it do not fit ({error}): start with torchrun, or unset them") from None
    with explained():  # after a failure the group is left as it is: taking it down would wait for the others
        yield rank, world
        if 'RANK' in os.environ: dist.barrier()  # nobody leaves while another still talks
    if 'RANK' in os.environ: dist.destroy_process_group()


@contextlib.contextmanager
def explained():
    """Around what may fail by the machine's fault: the failures that `explain` knows become UserErrors."""
    try: yield
    except (RuntimeError, MemoryError) as error:
        if (message := explain(error)) is None: raise
        raise UserError(message) from None


def explain(error):
    """A failure of the machine as one line that says what to do, or None for what only a traceback explains."""
    text = ' '.join(str(error).split())
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in text or 'not enough memory' in text:
        return ("out of memory: lower micro_batch (the result stays the same, but for halting='gate' and dropout), set "
                "checkpoint_activations=True, with several GPUs shard_optimizer=True, or lower block_size (dry_run=True estimates "
                "what that gives); in evaluate.py lower batch_size")
    if 'No working C++ compiler' in text or 'Failed to find C compiler' in text:
        return "compile=True needs a C++ compiler, and none was found: install one (such as g++), or set --compile=False"
    if isinstance(error, dist.DistError) or 'gloo' in text:
        return (f"lost contact with another rank ({text[:120]}): the first failure in torchrun's summary says which one died, and of "
                "what; go on with the same command and --init_from=resume")
    return None
