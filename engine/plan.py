"""
What a run would take, without data or GPU: `python train.py CONFIG... --dry_run=True` prints it.

Memory is measured, not put into a formula that every mechanism would have to keep true: the model's own forward and
backward run on fake tensors, which have shapes and no numbers, while the bytes of all living storages are added up.
Every block adds the same, so of a deep stack 4 and 6 blocks are run, and the rest is a straight line.

What is counted is what PyTorch allocates in eager mode on a GPU, or with device=cpu on a CPU: with torch.compile, the default
on CUDA, blocks keep less. Not counted: the CUDA context (about half a GB), scratch memory of kernels, fragmentation. Leave a
tenth of the card free.
"""

import os
import weakref
from dataclasses import asdict, replace
from unittest import mock

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.checkpoint import load_checkpoint
from configurator import build
from engine.shards import read_meta
from engine.hardware import PEAK_FLOPS, pick_device, pick_dtype, tune_cpu
from model import GPT, GPTConfig
from prepare_data import BUILTIN
from train import START, accumulation


class LiveBytes(TorchDispatchMode):
    """Adds up the storages that operations make, until they are freed; `peak` is the most there were at once."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.alive = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if not isinstance(t, torch.Tensor): continue
            storage = t.untyped_storage()
            key = storage._cdata
            if key in self.alive: continue
            n = storage.nbytes()
            self.alive[key] = weakref.ref(storage, lambda _, key=key, n=n: self._freed(key, n))
            self.now += n
            self.peak = max(self.peak, self.now)
        return out

    def _freed(self, key, n):
        del self.alive[key]
        self.now -= n


class NormOnGPU(torch.autograd.Function):
    """F.rms_norm as CUDA has it: one kernel, in fp32 under autocast, that keeps its input. On a CPU it is four operations."""

    @staticmethod
    def forward(ctx, x, shape, weight, eps):
        x = x.float()
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return torch.empty_like(x), None, torch.empty_like(weight), None


def activations(config, s, dtype, accumulates):
    """
    Bytes on top of weights and optimizer state at the worst moment of a micro-batch; with `accumulates` gradients are there
    before it starts, and are not counted.
    """
    norm = F.rms_norm if s.device == 'cpu' else NormOnGPU.apply
    with FakeTensorMode(), LiveBytes() as live, mock.patch.object(F, 'rms_norm', norm):
        model = GPT(config).train()
        model.checkpoint_activations = s.checkpoint_activations
        if accumulates:
            for p in model.parameters(): p.grad = torch.zeros_like(p)
        before = live.now
        x = torch.zeros(s.micro_batch, config.block_size, dtype=torch.long)
        with torch.autocast('cpu', dtype, enabled=dtype != torch.float32): loss = model(x, x)[1]  # 'cpu' stands for any device
        loss.backward()
    return live.peak - before


def memory(config, s, dtype):
    """Estimated bytes of training at the worst moment: {part: bytes}, with the optimizer's state in one piece."""
    accumulates = accumulation(s, config.block_size, 1) > 1  # over micro-batches or GPUs
    # Which tokens halt depends on numbers, and there are none: count as if none did, as in the first steps of a run.
    if config.halting != 'none': config = replace(config, halting='none')
    at = lambda n_layer: activations(replace(config, n_layer=n_layer, depth_stride=n_layer // 2), s, dtype, accumulates)
    # With checkpointing the worst moment may move from the loss to the backward pass as blocks are added: no straight line.
    if s.checkpoint_activations or config.n_layer <= 6 or config.depth_attn and config.depth_stride != config.n_layer // 2:
        top = activations(config, s, dtype, accumulates)
    else:  # each block adds the same
        four, six = at(4), at(6)
        top = six + (six - four) * (config.n_layer - 6) // 2
    with torch.device('meta'): weights = 4 * GPT(config).num_params()  # fp32; autocast's copies are among the activations
    return {'weights': weights, 'optimizer': 2 * weights, 'gradients': weights if accumulates else 0, 'activations': top}


def vocabulary(s, given):
    """({setting: value} of the vocabulary that the run would have, and in words where that is known from)."""
    if 'vocab_size' in given or 'n_tokens' in given: return {}, 'as set'
    if os.path.exists(os.path.join(s.data_dir, 'meta.json')): n = read_meta(s.data_dir)['n_tokens']
    elif s.data_dir == BUILTIN: n = 257
    else: return {}, f'{s.data_dir} is not there: the default'
    return dict(n_tokens=n, vocab_size=-(-n // 64) * 64), f'of {s.data_dir}'


def loaded(s, state):
    """{setting: value} of the model that the run starts from (state: the checkpoint it goes on from, or None); {} if from scratch."""
    if s.init_from == 'scratch': return {}
    if s.init_from.startswith('hf:'):
        from tools.hf import read_config
        return asdict(read_config(s.init_from[3:]))
    return (state or load_checkpoint(s.init_from))['config']


def plan(s, given, state=None):
    """Print parameters, FLOPs, memory and days of a run with settings s; UserError if they do not fit together."""
    old = loaded(s, state)  # its shape stays, also where a config file says None
    given = {**old, **{name: value for name, value in given.items() if value is not None or name in START or not old}}
    known, where = vocabulary(s, given)
    config = build(GPTConfig, {**given, **known})
    here = None if s.device in (None, 'cuda') else pick_device(s.device)  # GPUs are planned without one
    dtype = pick_dtype(s.dtype, here) if s.dtype or here else torch.bfloat16  # what GPUs of today compute in
    if s.device == 'cpu': tune_cpu()  # rules which attention runs
    accumulation(s, config.block_size, 1)
    with torch.device('meta'): model = GPT(config)
    tokens, flops, full = s.max_steps * s.batch_tokens, model.flops_per_token(), GPTConfig.vocab_size
    other = model.num_params() + (full - config.vocab_size) * config.n_embd * (1 if config.tie_embeddings else 2)
    print(f"parameters  {model.num_params() / 1e6:,.2f}M, vocabulary {config.vocab_size:,} ({where})"
          + (f"; {other / 1e6:,.2f}M with {full:,}" if config.vocab_size != full else ''))
    print(f"compute     {flops / 1e6:,.1f} MFLOPs per token, forward and backward; {flops * tokens:.3g} FLOPs in all")
    print(f"tokens      {tokens / 1e6:,.1f}M: {s.max_steps:,} steps of {s.batch_tokens:,}")
    worlds = [n for n in (1, 8, 64) if s.batch_tokens % (s.micro_batch * config.block_size * n) == 0]
    print_memory(config, s, dtype, worlds)
    row(f"\ndays at --mfu={s.mfu:g}", [])
    for name, peak in PEAK_FLOPS.items():
        days = [flops * tokens / (peak * s.mfu * n) / 86400 for n in worlds]
        row(f"  {name}, {peak / 1e12:.0f} TFLOP/s", [f"{d:,.2f}" if d >= 0.01 else '< 0.01' for d in days])


def row(name, cells):
    print(f"{name:40s}" + ''.join(f"{cell:>10s}" for cell in cells))


def print_memory(config, s, dtype, worlds):
    """Memory per GPU with these settings, and with those that would lower it."""
    precision = str(dtype).removeprefix('torch.')
    row(f"\nGB per GPU, {s.micro_batch} x {config.block_size} tokens in {precision}", [f"{n} GPU{'s' * (n > 1)}" for n in worlds])
    first, leaner = memory(config, s, dtype), replace(s, checkpoint_activations=True)
    shares = lambda m, sharded: [f"{(sum(m.values()) - sharded * m['optimizer'] * (n - 1) / n) / 1e9:.2f}" for n in worlds]
    row("  these settings", shares(first, s.shard_optimizer))
    if not s.shard_optimizer and len(worlds) > 1: row("  with shard_optimizer=True", shares(first, True))
    if not s.checkpoint_activations:
        row("  with checkpoint_activations=True", shares(memory(config, leaner, dtype), s.shard_optimizer))
    print("  the first is " + ' + '.join(f"{part} {n / 1e9:.2f}" for part, n in first.items()))
