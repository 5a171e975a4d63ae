"""
Speed, as ratios within one run: training steps, reading a prompt, decoding with and without the cache, and the first step.

    python tools/bench.py                                                 tiny, plain and depth_attn
    python tools/bench.py config/size/small.py --against=hf               with Hugging Face's Qwen3 of the same shape
    python tools/bench.py config/size/360m.py --micro_batch=16 --compile=True --json=bench.json

Candidates take turns (A B C A B C ...), so a machine whose speed drifts slows all alike; the table has medians, the
spread from the first to the third quartile, and the ratio to the plain model's median. The machine's two ceilings come
first: a large matrix product in the same precision, and a large copy. matmul_share is a step's FLOPs per second as a share of the one,
copy_share the blocks' weights read per second as a share of the other. --against=hf needs: pip install transformers
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Optional

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)  # run from anywhere
from engine.checkpoint import whole
from configurator import build, read
from engine.errors import UserError, run
from engine.hardware import compile_blocks, compile_decoding, expect_new_lengths, pick_compile, pick_device, pick_dtype, tune_cpu
from model import GPT, GPTConfig
from train import Settings


@dataclass
class BenchSettings:
    """what to measure"""
    toggles: str = 'plain,depth_attn'   # comma-separated names out of TOGGLES, or 'none' for the ceilings alone
    against: Optional[str] = None       # 'hf' adds Hugging Face's Qwen3 of the same shape, same precision
    repeats: int = 15                   # timed turns of each candidate, after two that are not counted
    decode_batches: str = '1,8,64'      # batch sizes for reading prompts and decoding
    new_tokens: int = 64                # tokens decoded per turn
    json: Optional[str] = None          # file for all numbers

    def __post_init__(self):
        for name in self.toggles.split(','):
            if name not in (*TOGGLES, 'none'): raise ValueError(f"toggles={name}: choose from {', '.join(TOGGLES)}")
        if self.against not in (None, 'hf'): raise ValueError(f"against={self.against!r} must be 'hf' or None")
        if self.repeats < 1 or self.new_tokens < 2: raise ValueError("repeats must be at least 1 and new_tokens at least 2")
        whole_numbers(self.decode_batches, 'decode_batches')


PLAIN = dict(depth_attn=False, ponder='none', halting='none')  # whatever a config file says
TOGGLES = {'plain': {}, 'depth_attn': dict(depth_attn=True), 'depth_uniform': dict(depth_attn=True, depth_mode='uniform'),
           'depth_stride1': dict(depth_attn=True, depth_stride=1), 'embedding': dict(ponder='embedding'),
           'latent': dict(ponder='latent', ponder_steps=1), 'chain': dict(ponder='chain'), 'loop': dict(ponder='loop'),
           'pause': dict(ponder='pause')}
TINY = os.path.join(ROOT, 'config', 'size', 'tiny.py')


def whole_numbers(text, name):
    """[1, 8] of '1,8'; ValueError if these are no numbers from 1 on."""
    if all(n.isdecimal() and int(n) for n in text.split(',')): return list(map(int, text.split(',')))
    raise ValueError(f"{name}={text}: give whole numbers, such as 1,8")


def seconds(f, device):
    """Wall-clock seconds of one call, device work included."""
    synchronize = torch.accelerator.synchronize if device.type != 'cpu' else lambda: None
    synchronize()
    start = time.perf_counter()
    f()
    synchronize()
    return time.perf_counter() - start


def take_turns(candidates, repeats, device):
    """{name: sorted seconds} of {name: function}, called in turn."""
    times = {name: [] for name in candidates}
    for turn in range(repeats + 2):
        for name, f in candidates.items():
            t = seconds(f, device)
            if turn >= 2: times[name].append(t)
    return {name: sorted(ts) for name, ts in times.items()}


def ceilings(device, dtype):
    """(FLOP/s of a large matmul, bytes/s of a large copy counting bytes read and written), medians."""
    n = 8192 if device.type == 'cuda' else 1536
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    big = torch.empty(2 ** (30 if device.type == 'cuda' else 27), dtype=torch.uint8, device=device)
    other = torch.zeros_like(big)
    times = take_turns({'matmul': lambda: a @ b, 'copy': lambda: big.copy_(other)}, 10, device)
    return 2 * n ** 3 / statistics.median(times['matmul']), 2 * big.numel() / statistics.median(times['copy'])


def hf_model(config):
    """Hugging Face's Qwen3 of the same shape, with its own default attention (sdpa)."""
    try:
        from transformers import Qwen3Config, Qwen3ForCausalLM
    except ImportError:
        raise UserError("--against=hf needs transformers: pip install transformers") from None
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=config.vocab_size, hidden_size=config.n_embd, intermediate_size=config.mlp_hidden,
        num_hidden_layers=config.n_layer, num_attention_heads=config.n_head, num_key_value_heads=config.n_kv_head,
        head_dim=config.head_dim, use_cache=False, max_position_embeddings=config.block_size, tie_word_embeddings=config.tie_embeddings))


def training_step(model, loss_of, idx, dtype):
    """A closure that does one whole optimizer step: forward, backward, clipping, fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    def step():
        with torch.autocast(idx.device.type, dtype, enabled=dtype != torch.float32): loss = loss_of(model, idx)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step


def table(title, times, tokens, extra):
    """Print one comparison; returns its rows for the JSON file. extra(name, median): more columns of a row, {heading: number}."""
    medians, rows = {name: statistics.median(ts) for name, ts in times.items()}, {}
    base, keys = medians.get('plain', next(iter(medians.values()))), extra(*next(iter(medians.items())))
    print(f"\n{title}\n{'':24s} {'median':>10s} {'quartiles':>19s} {'tokens/s':>10s} {'vs plain':>9s}", *(f"{key:>15s}" for key in keys))
    for (name, m), ts in zip(medians.items(), times.values()):
        low, high, columns = ts[len(ts) // 4], ts[(3 * len(ts)) // 4], extra(name, m)
        print(f"{name:24s} {m * 1e3:7.1f} ms {low * 1e3:8.1f}-{high * 1e3:7.1f} ms {tokens / m:10,.0f} {base / m:8.3f}x",
              *(f"{number:15,.3f}" for number in columns.values()))
        rows[name] = dict(median_s=m, quartiles_s=[low, high], tokens_per_s=tokens / m, speed_vs_plain=base / m, **columns)
    return rows


def main(argv):
    given, rest = read(argv, __doc__.strip(), BenchSettings, Settings, GPTConfig)
    for arg in rest: raise UserError(f"{arg}: neither a setting nor a config file")
    if 'n_layer' not in given: given = {**read([TINY], '', Settings, GPTConfig)[0], **given}
    b, s = build(BenchSettings, given), build(Settings, given)
    if b.json and not os.access(os.path.dirname(b.json) or '.', os.W_OK):
        raise UserError(f"json={b.json}: cannot be written; see to its folder")
    device = pick_device(s.device)
    dtype = pick_dtype(s.dtype, device)
    torch.set_float32_matmul_precision('high')  # TF32 where fp32 is used on CUDA, as train.py
    if device.type == 'cpu': given = {'vocab_size': 320, **given}  # bytes; on a GPU the table of the larger tokenizers
    if given.get('block_size', 4) < 4:
        raise UserError(f"block_size={given['block_size']}: at least 4 are needed, to read half of them and decode")
    configs = {name: build(GPTConfig, {**given, **PLAIN, **TOGGLES[name]}) for name in b.toggles.split(',') if name != 'none'}
    flops, bandwidth = ceilings(device, dtype)
    where = torch.cuda.get_device_name(device) if device.type == 'cuda' else f"{torch.get_num_threads()} CPU threads"
    print(f"{where}, {platform.system()}, torch {torch.__version__}, {str(dtype).removeprefix('torch.')}: "
          f"matmul {flops / 1e9:,.0f} GFLOP/s, copy {bandwidth / 1e9:,.1f} GB/s")
    report = dict(machine=where, torch=torch.__version__, dtype=str(dtype), matmul_flops=flops, copy_bytes=bandwidth, settings=given)
    if configs:
        torch.manual_seed(0)
        config = next(iter(configs.values()))
        if device.type == 'cpu': tune_cpu()
        models = {name: GPT(c).to(device) for name, c in configs.items()}
        if device.type == 'cpu': report['start'] = bench_start(b)
        report['training'] = bench_training(b, s, models, config, device, dtype, flops)
        expect_new_lengths()
        decoding = dtype if s.dtype or device.type == 'cuda' else torch.float32  # without autocast: the type of the weights
        fresh = lambda c: GPT(c).to(device, decoding).eval()                     # for decoding: its blocks are not compiled
        models = {name: fresh(c) for name, c in configs.items()}
        report['cache'] = bench_cache(b, models, config, device)
        if pick_compile(s.compile, device):
            for model in models.values(): compile_decoding(model)
            models[f'{next(iter(models))}, not compiled'] = fresh(config)
        report['decoding'] = [bench_decoding(b, models, config, device, batch, bandwidth)
                              for batch in whole_numbers(b.decode_batches, 'decode_batches')]
    if b.json:
        with whole(b.json) as f: json.dump(report, f, indent=1)


def first_step():
    """Import, build the tiny model, and take one optimizer step; a process of its own, see bench_start."""
    given = read([TINY], '', Settings, GPTConfig)[0]
    config = build(GPTConfig, {**given, 'vocab_size': 320})
    idx = torch.randint(0, 320, (given['micro_batch'], config.block_size))
    training_step(GPT(config), lambda model, idx: model(idx, idx)[1], idx, pick_dtype(None, idx.device))()


def bench_start(b):
    """From the start of Python to the end of the first training step of the tiny model."""
    command = [sys.executable, '-c', f"import sys; sys.path.insert(0, {ROOT!r}); from tools.bench import first_step; first_step()"]
    times = sorted(seconds(lambda: subprocess.run(command, check=True), torch.device('cpu')) for _ in range(min(b.repeats, 5)))
    print(f"\na new process until its first training step is done, tiny: {statistics.median(times):.1f} s "
          f"({times[0]:.1f} to {times[-1]:.1f})")
    return times


def bench_training(b, s, models, config, device, dtype, flops):
    """Whole optimizer steps on random tokens."""
    T, batch = config.block_size, s.micro_batch
    idx = torch.randint(0, config.n_tokens, (batch, T), device=device)
    ours, eager = lambda model, idx: model(idx, idx)[1], {}
    theirs = lambda model, idx: model(input_ids=idx, labels=idx).loss  # shifts the labels by itself
    if pick_compile(s.compile, device):
        for model in models.values(): compile_blocks(model)
        eager[f'{next(iter(models))}, not compiled'] = GPT(config).to(device)
    steps = {name: training_step(model, ours, idx, dtype) for name, model in {**models, **eager}.items()}
    if b.against: steps['hf qwen3'] = training_step(hf_model(config).to(device), theirs, idx, dtype)
    work = {name: m.flops_per_token(T, jacobi=m.config.jacobi_iters) * batch * T for name, m in models.items()}
    first = next(iter(work.values()))  # what the others do as well: the same shape
    fixed = {name: dict(flops_vs_plain=work.get(name, first) / first, first_step_s=seconds(step, device)) for name, step in steps.items()}
    for name, step in steps.items() if device.type == 'cuda' else ():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        fixed[name]['step_mib'] = (torch.cuda.max_memory_allocated() - before) / 2 ** 20  # beside weights and moments
    columns = lambda name, t: dict(matmul_share=work.get(name, first) / t / flops, **fixed[name])
    return table(f"training step, {batch} x {T} tokens, {next(iter(models.values())).num_params() / 1e6:.1f}M parameters",
                 take_turns(steps, b.repeats, device), batch * T, columns)


@torch.inference_mode()
def bench_decoding(b, models, config, device, batch, bandwidth):
    """Reading a prompt of half the context, and decoding tokens after it, with the cache."""
    half = config.block_size // 2
    new = min(b.new_tokens, config.block_size - half)
    prompt = torch.randint(0, config.n_tokens, (batch, half), device=device)

    def prefill(model):
        memory = model.new_memory(config.block_size)
        model.head(model.hidden(prompt, memory)[:, -1])
        return sum(cache.bytes() for cache in memory if cache)

    held = {name: prefill(model) for name, model in models.items()}
    dtype = next(iter(models.values())).wte.weight.dtype
    times = take_turns({name: lambda model=model: prefill(model) for name, model in models.items()}, b.repeats, device)
    results = {'prefill': table(f"prefill (never compiled), batch {batch}, {half} tokens, {dtype}", times, batch * half,
                                lambda name, t: dict(cache_mib=held[name] / 2 ** 20))}

    times = {name: [] for name in models}
    for i in range(b.repeats + 2):
        for name, model in models.items():
            stream = model.stream(prompt, new, temperature=0)
            next(stream)  # the prompt's pass is made before the clock starts
            t = seconds(lambda: list(stream), device)
            if i >= 2: times[name].append(t)
    weights = {name: sum(p.numel() * p.element_size() for p in model.h.parameters()) for name, model in models.items()}
    passes = {name: 1 if m.config.ponder in ('none', 'pause') else m.config.ponder_steps + 1 for name, m in models.items()}
    share = lambda name, t: dict(copy_share=passes[name] * weights[name] * (new - 1) / t / bandwidth)
    times = {name: sorted(ts) for name, ts in times.items()}
    title = f"decoding, batch {batch}, {new - 1} tokens after {half}, {dtype}"
    return {'batch': batch, **results, 'decoding': table(title, times, batch * (new - 1), share)}


@torch.inference_mode()
def bench_cache(b, models, config, device):
    """{n: times} of one more token behind n others, with the cache and by reading all of them again; the first model alone."""
    (name, model), results = next(iter(models.items())), {}
    print(f"\none more token of {name}, batch 1, medians")
    for n in (2 ** i - 1 for i in range(5, 20)):
        if n >= config.block_size: break
        text, memory = torch.randint(0, config.n_tokens, (1, n + 1), device=device), model.new_memory(n + b.repeats + 3)
        model.hidden(text[:, :n], memory)
        results[n] = take_turns({'cached': lambda: model.head(model.hidden(text[:, n:], memory)[:, -1]),
                                 'recomputed': lambda: model.head(model.hidden(text)[:, -1])}, b.repeats, device)
        cached, recomputed = (statistics.median(ts) * 1e3 for ts in results[n].values())
        print(f"after {n:6d}: {cached:8.2f} ms with the cache, {recomputed:8.2f} ms by reading all again, {recomputed / cached:6.1f}x")
    return results


if __name__ == '__main__':
    run(main)
