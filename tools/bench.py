"""
Speed, as ratios within one run: training steps, reading a prompt, decoding with and without the
cache, and the first step.

    python tools/bench.py                                    tiny, plain and depth_attn
    python tools/bench.py config/size/small.py --against=hf  with Hugging Face's Qwen3 of this shape
    python tools/bench.py config/size/360m.py --micro_batch=16 --compile=True --json=bench.json

Candidates take turns (A B C A B C ...), so a machine whose speed drifts slows all alike. The table
has medians, the spread from the first to the third quartile, and the ratio to the plain model's
median. The machine's two ceilings come first: a large matrix product in the same precision, and a
large copy. matmul_share is a step's FLOPs per second as a share of the one, copy_share the blocks'
weights read per second as a share of the other. --against=hf needs: pip install transformers
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Optional

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)  # run from anywhere
from configurator import build, read
from engine.files import UserError, run, whole
from engine.compile import compile_blocks, compile_decoding
from engine.hardware import expect_new_lengths, tune_cpu
from engine.hardware import pick_compile, pick_device, pick_dtype
from engine.fast import FastGPT
from model import GPTConfig
from train import Settings


@dataclass
class BenchSettings:
    """what to measure"""
    toggles: str = 'plain,depth_attn'  # comma-separated names of TOGGLES, or 'none': ceilings alone
    against: Optional[str] = None      # 'hf' adds Hugging Face's Qwen3: same shape, same precision
    repeats: int = 15                  # timed turns of each candidate, after two not counted
    decode_batches: str = '1,8,64'     # batch sizes for reading prompts and decoding
    new_tokens: int = 64               # tokens decoded per turn
    json: Optional[str] = None         # file for all numbers

    def __post_init__(self):
        for name in self.toggles.split(','):
            if name not in (*TOGGLES, 'none'):
                raise ValueError(f"toggles={name}: choose from {', '.join(TOGGLES)}")
        if self.against not in (None, 'hf'):
            raise ValueError(f"against={self.against!r} must be 'hf' or None")
        check_counts(self.repeats, self.new_tokens)
        whole_numbers(self.decode_batches, 'decode_batches')


TOGGLES = {
    'plain': {},
    'depth_attn': dict(depth_attn=True),
    'depth_uniform': dict(depth_attn=True, depth_mode='uniform'),
    'depth_stride1': dict(depth_attn=True, depth_stride=1),
    'embedding': dict(ponder='embedding'),
    'latent': dict(ponder='latent', ponder_steps=1),
    'chain': dict(ponder='chain'),
    'loop': dict(ponder='loop'),
    'pause': dict(ponder='pause'),
}
PLAIN = dict(depth_attn=False, ponder='none', halting='none')  # whatever a config file says
TINY = os.path.join(ROOT, 'config', 'size', 'tiny.py')


# -------------------------------------------------------------------------------------------------
# What bench_halting.py uses too: settings, the clock, turns, an optimizer step, decoding


def check_counts(repeats, new_tokens):
    """ValueError if there would be nothing to time."""
    if repeats < 1 or new_tokens < 2:
        raise ValueError("repeats must be at least 1 and new_tokens at least 2")


def whole_numbers(text, name):
    """[1, 8] of '1,8'; ValueError if these are no numbers from 1 on."""
    words = text.split(',')
    if not all(word.isdecimal() and int(word) for word in words):
        raise ValueError(f"{name}={text}: give whole numbers, such as 1,8")
    return [int(word) for word in words]


@dataclass
class Setup:
    """What was asked for, and where it is measured."""
    own: object           # the benchmark's own settings
    train: Settings       # train.py's: micro_batch, device, dtype, compile
    given: dict           # all that files and arguments set, the model's settings too
    device: torch.device
    dtype: torch.dtype    # of training steps: the autocast type


def set_up(argv, usage, block):
    """The Setup of a benchmark with these own settings (`block`). Without a shape: tiny."""
    given, rest = read(argv, usage, block, Settings, GPTConfig)
    if rest:
        raise UserError(f"{rest[0]}: neither a setting nor a config file")
    if 'n_layer' not in given:
        tiny, _ = read([TINY], '', Settings, GPTConfig)
        given = {**tiny, **given}
    own = build(block, given)
    train = build(Settings, given)
    device = pick_device(train.device)
    dtype = pick_dtype(train.dtype, device)
    if device.type == 'cpu':  # bytes; on a GPU the table of the larger tokenizers
        given = {'vocab_size': 320, **given}
    return Setup(own, train, given, device, dtype)


def seconds(action, device):
    """Wall-clock seconds of one call, device work included."""
    wait_for(device)
    start = time.perf_counter()
    action()
    wait_for(device)
    return time.perf_counter() - start


def wait_for(device):
    if device.type != 'cpu':
        torch.accelerator.synchronize()


def take_turns(candidates, repeats, warm_up=2):
    """
    {name: [result of each turn]} of {name: function that works once and returns its seconds}. All
    are called in turn; the first `warm_up` turns are not counted.
    """
    results = {name: [] for name in candidates}
    for turn in range(warm_up + repeats):
        for name, measure in candidates.items():
            result = measure()
            if turn >= warm_up:
                results[name].append(result)
    return results


class TrainingStep:
    """One whole optimizer step per call: forward, backward, clipping, fused AdamW."""

    def __init__(self, model, loss_of, idx, dtype):
        self.model = model
        self.loss_of = loss_of  # (model, idx) -> loss
        self.idx = idx          # (B,T)
        self.dtype = dtype
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def __call__(self):
        mixed = self.dtype != torch.float32
        with torch.autocast(self.idx.device.type, self.dtype, enabled=mixed):
            loss = self.loss_of(self.model, self.idx)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def own_loss(model, idx):
    """Each token is its own target: the numbers do not matter here."""
    _, loss = model(idx, idx)
    return loss


def decode(model, prompt, new_tokens, device):
    """
    (seconds, [passes (B,) of each token]) of greedy decoding after the prompt (B,T). Reading the
    prompt, which gives the first of the new tokens, is over before the clock starts.
    """
    stream = model.stream(prompt, new_tokens, temperature=0)
    next(stream)
    made = []
    elapsed = seconds(partial(made.extend, stream), device)
    return elapsed, [passes for _, passes in made]


# -------------------------------------------------------------------------------------------------
# The machine's ceilings, and the table


def ceilings(device, dtype):
    """(FLOP/s of a large matmul, bytes/s of a large copy, read and written both), medians."""
    cuda = device.type == 'cuda'
    n = 8192 if cuda else 1536
    a = torch.randn(n, n, device=device, dtype=dtype)
    b = torch.randn(n, n, device=device, dtype=dtype)
    target = torch.empty(2 ** (30 if cuda else 27), dtype=torch.uint8, device=device)
    source = torch.zeros_like(target)
    candidates = {
        'matmul': partial(seconds, partial(torch.matmul, a, b), device),
        'copy': partial(seconds, partial(target.copy_, source), device),
    }
    times = take_turns(candidates, 10)
    flops = 2 * n ** 3 / statistics.median(times['matmul'])
    bandwidth = 2 * source.numel() / statistics.median(times['copy'])
    return flops, bandwidth


def summarise(times, tokens):
    """{name: numbers} of {name: seconds of each turn}, for the table and the JSON file."""
    medians = {name: statistics.median(elapsed) for name, elapsed in times.items()}
    base = medians.get('plain', next(iter(medians.values())))
    rows = {}
    for name in times:
        elapsed = sorted(times[name])
        low = elapsed[len(elapsed) // 4]
        high = elapsed[(3 * len(elapsed)) // 4]
        median = medians[name]
        rows[name] = dict(median_s=median, quartiles_s=[low, high], tokens_per_s=tokens / median,
                          speed_vs_plain=base / median)
    return rows


MEASURED = ('median_s', 'quartiles_s', 'tokens_per_s', 'speed_vs_plain')


def print_table(title, rows):
    """The rows that `summarise` made; what was added to them since has columns of its own."""
    added = [key for key in next(iter(rows.values())) if key not in MEASURED]
    print(f"\n{title}")
    print(f"{'':24s} {'median':>10s} {'quartiles':>19s} {'tokens/s':>10s} {'vs plain':>9s}",
          *(f"{key:>15s}" for key in added))
    for name, row in rows.items():
        low, high = row['quartiles_s']
        print(f"{name:24s} {row['median_s'] * 1e3:7.1f} ms {low * 1e3:8.1f}-{high * 1e3:7.1f} ms "
              f"{row['tokens_per_s']:10,.0f} {row['speed_vs_plain']:8.3f}x",
              *(f"{row[key]:15,.3f}" for key in added))


# -------------------------------------------------------------------------------------------------
# What is measured


def first_step():
    """
    Import, build the tiny model, and take one optimizer step; a process of its own, see
    bench_start.
    """
    given, _ = read([TINY], '', Settings, GPTConfig)
    config = build(GPTConfig, {**given, 'vocab_size': 320})
    idx = torch.randint(0, 320, (given['micro_batch'], config.block_size))
    step = TrainingStep(FastGPT(config), own_loss, idx, pick_dtype(None, idx.device))
    step()


def bench_start(repeats):
    """Seconds from the start of Python to the end of the first training step of the tiny model."""
    code = (f"import sys; sys.path.insert(0, {ROOT!r}); "
            "from tools.bench import first_step; first_step()")
    start = partial(subprocess.run, [sys.executable, '-c', code], check=True)
    cpu = torch.device('cpu')
    times = sorted(seconds(start, cpu) for _ in range(min(repeats, 5)))
    print(f"\na new process until its first training step is done, tiny: "
          f"{statistics.median(times):.1f} s ({times[0]:.1f} to {times[-1]:.1f})")
    return times


def hf_model(config):
    """Hugging Face's Qwen3 of the same shape, with its own default attention (sdpa)."""
    try:
        from transformers import Qwen3Config, Qwen3ForCausalLM
    except ImportError:
        raise UserError("--against=hf needs transformers: pip install transformers") from None
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=config.vocab_size, hidden_size=config.n_embd,
        intermediate_size=config.mlp_hidden, num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head, num_key_value_heads=config.n_kv_head,
        head_dim=config.head_dim, use_cache=False, max_position_embeddings=config.block_size,
        tie_word_embeddings=config.tie_embeddings))


def hf_loss(model, idx):
    """It shifts the labels by itself."""
    return model(input_ids=idx, labels=idx).loss


def step_memory(step):
    """MiB that a step on CUDA takes at its peak, beside weights and moments."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 2 ** 20


def training_steps(setup, models, idx):
    """{name: TrainingStep} of the models, and of what they are measured against."""
    first, model = next(iter(models.items()))
    candidates = dict(models)
    if pick_compile(setup.train.compile, setup.device):
        for compiled in models.values():
            compile_blocks(compiled)
        candidates[f'{first}, not compiled'] = FastGPT(model.config).to(setup.device)
    steps = {}
    for name, candidate in candidates.items():
        steps[name] = TrainingStep(candidate, own_loss, idx, setup.dtype)
    if setup.own.against:
        theirs = hf_model(model.config).to(setup.device)
        steps['hf qwen3'] = TrainingStep(theirs, hf_loss, idx, setup.dtype)
    return steps


def bench_training(setup, models, matmul_rate):
    """Whole optimizer steps on random tokens. With compiling, of the first model as it is too."""
    first, model = next(iter(models.items()))
    B, T = setup.train.micro_batch, model.config.block_size
    idx = torch.randint(0, model.config.n_tokens, (B, T), device=setup.device)
    steps = training_steps(setup, models, idx)
    flops = {}
    for name, ours in models.items():
        flops[name] = ours.flops_per_token(T, jacobi=ours.config.jacobi_iters) * B * T

    first_seconds = {name: seconds(step, setup.device) for name, step in steps.items()}
    peaks = {}
    if setup.device.type == 'cuda':
        peaks = {name: step_memory(step) for name, step in steps.items()}
    turns = {name: partial(seconds, step, setup.device) for name, step in steps.items()}
    rows = summarise(take_turns(turns, setup.own.repeats), B * T)

    for name, row in rows.items():
        work = flops.get(name, flops[first])  # the others have the first model's shape
        row['matmul_share'] = work / row['median_s'] / matmul_rate
        row['flops_vs_plain'] = work / flops[first]
        row['first_step_s'] = first_seconds[name]
        if peaks:
            row['step_mib'] = peaks[name]
    print_table(f"training step, {B} x {T} tokens, {model.num_params() / 1e6:.1f}M parameters",
                rows)
    return rows


def next_logits(model, tokens, memory=None):
    """Logits (B,V) of the token after these (B,T), which follow those in memory."""
    return model.head(model.hidden(tokens, memory)[:, -1])


def prefill(model, prompt):
    """Read a prompt into a new cache; returns the bytes that the cache takes."""
    memory = model.new_memory(model.config.block_size)
    next_logits(model, prompt, memory)
    return sum(cache.bytes() for cache in memory if cache)


@torch.inference_mode()
def bench_prefill(setup, models, prompt):
    """Reading a prompt (B,T)."""
    B, T = prompt.shape
    held = {name: prefill(model, prompt) for name, model in models.items()}
    turns = {}
    for name, model in models.items():
        turns[name] = partial(seconds, partial(prefill, model, prompt), setup.device)
    rows = summarise(take_turns(turns, setup.own.repeats), B * T)
    for name, row in rows.items():
        row['cache_mib'] = held[name] / 2 ** 20
    print_table(f"prefill (never compiled), batch {B}, {T} tokens, {dtype_of(models)}", rows)
    return rows


def decoding_seconds(model, prompt, new_tokens, device):
    elapsed, _ = decode(model, prompt, new_tokens, device)
    return elapsed


@torch.inference_mode()
def bench_decoding(setup, models, prompt, copy_rate):
    """Decoding after a prompt (B,T), with the cache."""
    B, T = prompt.shape
    config = next(iter(models.values())).config
    new = min(setup.own.new_tokens, config.block_size - T)
    turns = {}
    for name, model in models.items():
        turns[name] = partial(decoding_seconds, model, prompt, new, setup.device)
    rows = summarise(take_turns(turns, setup.own.repeats), B * (new - 1))
    for name, row in rows.items():
        weights_read = bytes_per_token(models[name]) * (new - 1)
        row['copy_share'] = weights_read / row['median_s'] / copy_rate
    print_table(f"decoding, batch {B}, {new - 1} tokens after {T}, {dtype_of(models)}", rows)
    return rows


def bytes_per_token(model):
    """Bytes of the blocks' weights that decoding one token reads, once per pass."""
    weights = sum(p.numel() * p.element_size() for p in model.h.parameters())
    one_pass = model.config.ponder in ('none', 'pause')
    return weights if one_pass else weights * (model.config.ponder_steps + 1)


def dtype_of(models):
    return next(iter(models.values())).wte.weight.dtype


@torch.inference_mode()
def bench_cache(setup, models):
    """
    {n: times} of one more token behind n others, with the cache and by reading all of them again;
    the first model alone.
    """
    name, model = next(iter(models.items()))
    device, repeats = setup.device, setup.own.repeats
    lengths = [2 ** i - 1 for i in range(5, 20) if 2 ** i - 1 < model.config.block_size]
    results = {}
    print(f"\none more token of {name}, batch 1, medians")
    for n in lengths:
        text = torch.randint(0, model.config.n_tokens, (1, n + 1), device=device)
        memory = model.new_memory(n + repeats + 3)  # each turn adds a token
        model.hidden(text[:, :n], memory)
        with_cache = partial(next_logits, model, text[:, n:], memory)
        reading_all = partial(next_logits, model, text)
        turns = {'cached': partial(seconds, with_cache, device),
                 'recomputed': partial(seconds, reading_all, device)}
        times = take_turns(turns, repeats)
        results[n] = {way: sorted(elapsed) for way, elapsed in times.items()}
        cached = statistics.median(results[n]['cached']) * 1e3
        recomputed = statistics.median(results[n]['recomputed']) * 1e3
        print(f"after {n:6d}: {cached:8.2f} ms with the cache, {recomputed:8.2f} ms by reading "
              f"all again, {recomputed / cached:6.1f}x")
    return results


def for_decoding(config, setup):
    """A new model in the type that decoding computes in; its blocks are not compiled."""
    on_gpu = setup.device.type == 'cuda'
    asked = setup.train.dtype is not None
    dtype = setup.dtype if asked or on_gpu else torch.float32  # no autocast: the weights' type
    return FastGPT(config).to(setup.device, dtype).eval()


def bench_models(setup, configs, matmul_rate, copy_rate):
    """All comparisons of the models {name: config}; returns their part of the JSON file."""
    report = {}
    torch.manual_seed(0)
    if setup.device.type == 'cpu':
        tune_cpu()
    models = {name: FastGPT(config).to(setup.device) for name, config in configs.items()}
    if setup.device.type == 'cpu':
        report['start'] = bench_start(setup.own.repeats)
    report['training'] = bench_training(setup, models, matmul_rate)

    expect_new_lengths()
    models = {name: for_decoding(config, setup) for name, config in configs.items()}
    report['cache'] = bench_cache(setup, models)
    first, config = next(iter(configs.items()))
    if pick_compile(setup.train.compile, setup.device):
        for model in models.values():
            compile_decoding(model)
        models[f'{first}, not compiled'] = for_decoding(config, setup)
    report['decoding'] = []
    for batch in whole_numbers(setup.own.decode_batches, 'decode_batches'):
        shape = (batch, config.block_size // 2)
        prompt = torch.randint(0, config.n_tokens, shape, device=setup.device)
        report['decoding'].append({
            'batch': batch,
            'prefill': bench_prefill(setup, models, prompt),
            'decoding': bench_decoding(setup, models, prompt, copy_rate),
        })
    return report


def main(argv):
    setup = set_up(argv, __doc__, BenchSettings)
    path = setup.own.json
    if path and not os.access(os.path.dirname(path) or '.', os.W_OK):
        raise UserError(f"json={path}: cannot be written; see to its folder")
    block_size = setup.given.get('block_size', 4)
    if block_size < 4:
        raise UserError(f"block_size={block_size}: at least 4 are needed, to read half of them "
                        "and decode")
    configs = {}
    for name in setup.own.toggles.split(','):
        if name != 'none':
            configs[name] = build(GPTConfig, {**setup.given, **PLAIN, **TOGGLES[name]})

    torch.set_float32_matmul_precision('high')  # TF32 where fp32 is used on CUDA, as train.py
    flops, bandwidth = ceilings(setup.device, setup.dtype)
    if setup.device.type == 'cuda':
        machine = torch.cuda.get_device_name(setup.device)
    else:
        machine = f"{torch.get_num_threads()} CPU threads"
    print(f"{machine}, {platform.system()}, torch {torch.__version__}, "
          f"{str(setup.dtype).removeprefix('torch.')}: "
          f"matmul {flops / 1e9:,.0f} GFLOP/s, copy {bandwidth / 1e9:,.1f} GB/s")
    report = dict(machine=machine, torch=torch.__version__, dtype=str(setup.dtype),
                  matmul_flops=flops, copy_bytes=bandwidth, settings=setup.given)
    if configs:
        report.update(bench_models(setup, configs, flops, bandwidth))
    if path:
        with whole(path) as f:
            json.dump(report, f, indent=1)


if __name__ == '__main__':
    run(main)
