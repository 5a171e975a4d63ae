"""
What a run would take, without data or GPU: `python train.py CONFIG... --dry_run=True` prints it.

Memory is measured, not put into a formula that every mechanism would have to keep true: the model's
own forward and backward run on fake tensors, which have shapes and no numbers, while the bytes of
all living storages are added up.

What is counted is what PyTorch allocates in eager mode on a GPU, or with device=cpu on a CPU: with
torch.compile, the default on CUDA, blocks keep less. Not counted: the CUDA context (about half a
GB), scratch memory of kernels, fragmentation, and the heads of earlier passes in `exit`'s loss from
halt_start on. Leave a tenth of the card free.
"""

import contextlib
import os
import weakref
from dataclasses import replace
from functools import partial

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.build import new_model, without_numbers
from engine.cpu import tune_cpu
from engine.files import UserError, same_folder
from engine.flops import flops_per_token
from engine.hardware import PEAK_FLOPS, pick_device, pick_dtype
from engine.muon import matrices_of_blocks
from engine.prepare import recompute_blocks
from engine.shards import read_meta
from engine.start import asked_of_model, check_asked, goes_on, old_config, start_config
from model import RMSNorm

MORE = (8, 64)      # numbers of GPUs to plan for, beside one
DAY = 24 * 60 * 60
MFU = 0.4           # the share of a GPU's peak that well-tuned training of this size reaches


# ---- measuring memory ----------------------------------------------------------------------------

class LiveBytes(TorchDispatchMode):
    """Adds up the storages that operations make, until they are freed; `peak` is the most of it."""

    def __init__(self):
        super().__init__()
        self.now = 0
        self.peak = 0
        self.alive = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.count(leaf.untyped_storage())
        return out

    def count(self, storage):
        key = storage._cdata
        if key in self.alive:
            return
        size = storage.nbytes()
        # called when the storage is freed, with the reference itself as the last argument
        self.alive[key] = weakref.ref(storage, partial(self.freed, key, size))
        self.now += size
        self.peak = max(self.peak, self.now)

    def freed(self, key, size, reference):
        del self.alive[key]
        self.now -= size


class NormOnGPU(torch.autograd.Function):
    """
    F.rms_norm as CUDA has it: one kernel, in fp32 under autocast, that keeps its input. On a CPU it
    is four operations.
    """

    @staticmethod
    def forward(ctx, x, weight):
        x = x.float()
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def norm_as_on_gpu(weight, x):
    """RMSNorm.forward of model.py, with NormOnGPU."""
    return NormOnGPU.apply(x, weight.to(x.dtype)).to(x.dtype)


def activations(config, settings, dtype, accumulates):
    """
    Bytes on top of weights and optimizer state at the worst moment of a micro-batch. With
    `accumulates` gradients are there before it starts, and are not counted.
    """
    with FakeTensorMode(), LiveBytes() as live:
        model = new_model(config).train()
        for module in model.modules():
            if isinstance(module, RMSNorm) and settings.device != 'cpu':
                module.forward = partial(norm_as_on_gpu, module.weight)
        model.mechanism.begin_step(-1, 1)       # when nobody halts, whatever halt_start is
        model.mechanism.drawn = model.mechanism.draws()[0]  # what costs most
        if settings.checkpoint_activations:
            recompute_blocks(model)
        if accumulates:
            for p in model.parameters():
                p.grad = torch.zeros_like(p) if p.requires_grad else None
        before = live.now
        x = torch.zeros(settings.micro_batch, config.block_size, dtype=torch.long)
        # 'cpu' stands for any device
        with torch.autocast('cpu', dtype, enabled=dtype != torch.float32):
            _, result = model(x, x)
        result.backward()
    return live.peak - before


def memory(config, settings, dtype):
    """Bytes of training at the worst moment: {part: bytes}, with the optimizer's in one piece."""
    model = without_numbers(config)
    weights = 4 * model.num_params()    # fp32; autocast's copies: activations
    trained = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    moments = 2 * trained
    if settings.optimizer == 'muon':    # which has one for each weight
        moments -= 4 * sum(p.numel() for p in matrices_of_blocks(model) if p.requires_grad)
    # The plan of several GPUs is that of one with their micro_batch, so it accumulates: right, as
    # DDP's gradients are there before a step.
    accumulates = settings.micro_batches(config.block_size, 1)[0] > 1
    return {
        'weights': weights,
        'optimizer': moments,
        'gradients': trained if accumulates else 0,
        'activations': activations(config, settings, dtype, accumulates),
    }


# ---- the plan ------------------------------------------------------------------------------------

def print_plan(settings, given, builtin, state):
    """
    Print parameters, FLOPs, memory and days of a run; UserError if its settings do not fit
    together. given: the user's settings. builtin: folders of data sets that train.py makes, which
    need not be there. state: what checkpoint_of read, or None.
    """
    config, vocabulary = planned_config(settings, asked_of_model(given), builtin, state)
    dtype = planned_dtype(settings, state)
    sizes = sequences(settings, config.block_size)
    if settings.device == 'cpu':
        tune_cpu()  # rules which attention runs

    model = without_numbers(config)
    per_token = flops_per_token(model, texts=sizes[min(sizes)])
    tokens = settings.max_steps * settings.batch_tokens
    flops = per_token * tokens
    print(f"parameters  {model.num_params() / 1e6:,.2f}M, vocabulary {config.vocab_size:,} "
          f"({vocabulary})")
    print(f"compute     {per_token / 1e6:,.1f} MFLOPs per token, forward and backward; "
          f"{flops:.3g} FLOPs in all")
    whole = ', from step 0 on' if settings.init_from == 'resume' else ''
    print(f"tokens      {tokens / 1e6:,.1f}M: {settings.max_steps:,} steps of "
          f"{settings.batch_tokens:,}{whole}")
    print_memory(config, settings, dtype, sizes)
    if settings.checkpoint_activations:
        flops *= 4 / 3      # forward, forward again, and backward, which is two of them
    print_days(flops, sizes)


def planned_config(settings, asked, builtin, state):
    """(the config that the run would have, where the size of its vocabulary is from)."""
    old = old_config(settings.init_from, state)
    n_tokens, vocabulary = None, "the weights'"
    if old is None:
        n_tokens, vocabulary = planned_vocabulary(settings.data_dir, builtin)
        if asked.get('vocab_size') is not None:
            vocabulary = 'as set'
    config = start_config(settings, asked, n_tokens, old)
    if not settings.eval_only:      # start_config leaves the steps that an evaluation asks for out
        check_asked(config, asked)
    return config, vocabulary


def planned_dtype(settings, state):
    """What the run computes in. A GPU, which need not be here, is taken for one that has bf16."""
    name = settings.dtype
    if goes_on(settings):       # in what it computed in before
        name = name or state.get('precision')
    if (settings.device or 'cuda').startswith('cuda'):
        return getattr(torch, name or 'bfloat16')
    dtype, _ = pick_dtype(name, pick_device(settings.device))
    return dtype


def planned_vocabulary(data_dir, builtin):
    """(tokens of the data set, or None, and where that is known from)."""
    if os.path.exists(os.path.join(data_dir, 'meta.json')):
        return read_meta(data_dir)['n_tokens'], f'of {data_dir}'
    if any(same_folder(data_dir, one) for one in builtin):
        return 257, f'of {data_dir}'        # of bytes: they, and the end of a text
    return None, f'{data_dir} is not there: the default'


def sequences(settings, T):
    """
    {GPUs: how many sequences of T tokens each has at a time}, of those numbers of GPUs that can
    share a step. UserError if none can.
    """
    sizes = {}
    for n in (1, *MORE):
        with contextlib.suppress(UserError):
            sizes[n] = settings.micro_batches(T, n)[1]
    return sizes or {1: settings.micro_batches(T, 1)[1]}    # which says why not


def print_memory(config, settings, dtype, sizes):
    """
    Memory per GPU with these settings, and with those that would lower it. sizes: {GPUs: how many
    sequences each has at a time}.
    """
    precision = str(dtype).removeprefix('torch.')
    fewest = min(sizes)
    title = f"\nGB per GPU, {sizes[fewest]} x {config.block_size} tokens in {precision}"
    print_row(title, [f"{n} GPU{'s' if n > 1 else ''}" for n in sizes])
    if len({*sizes.values()}) > 1:
        print_row("  sequences at a time", sizes.values())

    sharded = settings.shard_optimizer
    parts = memory_of(config, settings, dtype, sizes)
    print_row("  these settings", gigabytes(parts, sharded))
    if not sharded and len(sizes) > 1 and settings.optimizer == 'adamw':
        print_row("  with shard_optimizer=True", gigabytes(parts, True))
    if not settings.checkpoint_activations:
        leaner = memory_of(config, replace(settings, checkpoint_activations=True), dtype, sizes)
        print_row("  with checkpoint_activations=True", gigabytes(leaner, sharded))
    of_first = [f"{part} {n / 1e9:.2f}" for part, n in parts[fewest].items()]
    print("  the first is " + ' + '.join(of_first))


def memory_of(config, settings, dtype, sizes):
    """{GPUs: {part: bytes}}, measured once for each number of sequences."""
    of_size = {size: memory(config, replace(settings, micro_batch=size), dtype)
               for size in {*sizes.values()}}
    return {n: of_size[size] for n, size in sizes.items()}


def gigabytes(parts, sharded):
    """GB per GPU. parts: {GPUs: {part: bytes}}. sharded: each keeps a share of 'optimizer'."""
    cells = []
    for n, of in parts.items():
        total = sum(of.values())
        if sharded:
            total -= of['optimizer'] * (n - 1) / n
        cells.append(f"{total / 1e9:.2f}")
    return cells


def print_days(flops, numbers):
    """How long so many FLOPs take, for each kind and these numbers of GPUs."""
    print_row(f"\ndays at {MFU:.0%} of the bf16 peak", [])
    for name, peak in PEAK_FLOPS.items():
        days = [flops / (peak * MFU * n) / DAY for n in numbers]
        cells = [f"{d:,.2f}" if d >= 0.01 else '< 0.01' for d in days]
        print_row(f"  {name}, {peak / 1e12:.0f} TFLOP/s", cells)


def print_row(name, cells):
    print(f"{name:40s}" + ''.join(f"{cell:>10}" for cell in cells))
