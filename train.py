"""
Train a GPT on a laptop CPU, one GPU, or many.

    python train.py config/depth_attn.py config/size/tiny.py                                3 to 4 minutes on 2 CPU cores
    python train.py config/depth_attn.py --data_dir=data/fineweb-edu                        360M, one GPU
    torchrun --nproc_per_node=8 train.py config/depth_attn.py --data_dir=data/fineweb-edu   360M, eight GPUs
    python train.py --init_from=resume --out_dir=out                                        go on after an interruption
    python train.py config/depth_attn.py --dry_run=True                                     what it would take: memory, days

Config files and --name=value apply from left to right; a mechanism's file alone means 360M. Ctrl-C, SIGTERM, SIGHUP
or max_seconds saves and stops at the next step; a second signal stops at once. Writes OUT_DIR/ckpt.pt (the one before it
is ckpt_prev.pt), settings.json (every setting, derived ones too: a config file) and log.jsonl (one JSON object per log line).
"""

import collections
import contextlib
import json
import math
import os
import signal
import statistics
import sys
import time
from dataclasses import asdict, dataclass, fields
from typing import Optional
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import prepare_data
from engine.checkpoint import CHECKPOINT_VERSION, CHECKPOINTS, change_steps, load_checkpoint, load_weights, save_checkpoint, whole
from configurator import build, check_range, read
from engine.errors import UserError, run
from engine.shards import Windows, alone, get_tokenizer, read_meta
from engine.hardware import (PEAK_FLOPS, compile_blocks, expect_new_lengths, pick_compile, pick_device, pick_dtype, process_group,
                      stop_signals, tune_cpu)
from model import GPT, GPTConfig
from tools.hf import load_state


@dataclass
class Settings:
    """the run; the defaults are the recipe of the Depth-Attention paper's 360M model"""
    data_dir: str = prepare_data.BUILTIN # folder of token shards; the built-in corpus is prepared when missing
    out_dir: str = 'out'                # where checkpoint, settings and log go
    init_from: str = 'scratch'          # 'scratch', 'resume' (go on in out_dir), a checkpoint folder, or hf:FOLDER
    eval_only: bool = False             # evaluate a checkpoint and stop
    max_steps: int = 15625              # optimizer steps in all, which the schedules span; by default the paper's 32B tokens
    batch_tokens: int = 1024 * 2048     # tokens per optimizer step, over all devices
    micro_batch: int = 8                # sequences per device in one forward; accumulation follows from batch_tokens
    learning_rate: float = 1.5e-3       # peak
    min_lr_rate: float = 0.1            # floor of the cosine, as a share of the peak
    warmup: float = 0.02                # share of the steps in which the learning rate grows linearly
    weight_decay: float = 0.1           # AdamW; on matrices only
    beta1: float = 0.9                  # AdamW
    beta2: float = 0.95                 # AdamW
    grad_clip: float = 1.0              # the gradient's total norm is clipped to this
    seed: int = 1337                    # initial weights, order of the data, dropout
    log_interval: int = 10              # steps between log lines
    eval_interval: int = 500            # steps between evaluations; there is always one at the end
    eval_tokens: int = 2 ** 20          # tokens of the validation set per evaluation, the same each time
    save_interval: int = 500            # steps between checkpoints; there is always one at the end
    max_bad_steps: int = 5              # stop after this many steps in a row whose loss or gradient is not finite
    max_seconds: Optional[float] = None # save and stop after this long, as on a signal (None: no limit)
    sample_tokens: int = 400            # length of the sample printed at the end, 0 for none
    device: Optional[str] = None        # 'cpu', 'cuda', 'cuda:1', 'mps' (None: the best there is)
    dtype: Optional[str] = None         # 'float32', 'bfloat16', 'float16' (None: 16 bits where the hardware has them)
    compile: Optional[bool] = None      # torch.compile each block (None: on CUDA only)
    checkpoint_activations: bool = False # recompute blocks in backward: less memory, a third more compute
    shard_optimizer: bool = False       # each rank keeps a part of AdamW's state: less memory, the same result
    dry_run: bool = False               # print what the run would take, and stop; needs no data and no GPU
    mfu: float = 0.4                    # dry_run: share of the GPUs' peak that is reached

    def __post_init__(self):
        for name in ('max_steps', 'batch_tokens', 'micro_batch', 'learning_rate', 'grad_clip', 'log_interval',
                     'eval_interval', 'eval_tokens', 'save_interval', 'max_bad_steps', 'max_seconds', 'mfu'):
            if (value := getattr(self, name)) is not None and value <= 0: raise ValueError(f"{name}={value} must be positive")
        check_range(self, 0, 1, 'min_lr_rate', 'warmup', 'beta1', 'beta2', 'mfu')
        if max(self.beta1, self.beta2) == 1: raise ValueError(f"beta1={self.beta1} and beta2={self.beta2} must be below 1")
        check_range(self, 0, 2 ** 31 - 1, 'seed')
        check_range(self, 0, math.inf, 'sample_tokens', 'weight_decay')
        if self.dtype not in (None, 'float32', 'bfloat16', 'float16'):
            raise ValueError(f"dtype={self.dtype!r} must be 'float32', 'bfloat16' or 'float16'")


FREE = ('ponder_steps', 'jacobi_iters', 'dropout', 'halt_tau', 'halt_lambda', 'halt_start', 'halt_full', 'halt_share',
        'halt_beta')  # model settings that may differ from the checkpoint's on any start
START = (*FREE, 'block_size', 'rope_theta', 'depth_attn', 'depth_stride', 'depth_mode', 'ponder', 'ponder_topk',
         'halting')  # those a new run from its weights may change


def accumulation(s, T, world):
    """How many micro-batches of windows of T tokens each of `world` ranks accumulates per step; UserError if that is no whole number."""
    per_pass = s.micro_batch * T * world
    if s.batch_tokens % per_pass:
        raise UserError(f"batch_tokens={s.batch_tokens} is not a multiple of micro_batch x block_size x processes = "
                        f"{s.micro_batch} x {T} x {world} = {per_pass}: change one of them")
    return s.batch_tokens // per_pass


class Trainer:
    """One run: built from settings, carried out by `run`."""

    def __init__(self, settings, given, state, rank, world, device):
        """given: what the user set of `settings`. state: the checkpoint to go on from, or None. device: of this rank."""
        self.s, self.rank, self.world, self.device = settings, rank, world, device
        self.origin = state['settings']['init_from'] if state else settings.init_from  # where the weights first came from
        self.started = time.monotonic()
        self.meta = self._data()
        self.model, self.step = self._model(given, state)
        self.config = self.model.config
        T = self.config.block_size
        self.accumulation = None if settings.eval_only else accumulation(settings, T, world)
        self.train_data = Windows(settings.data_dir, 'train', self.meta, T)
        self.val_data = Windows(settings.data_dir, 'val', self.meta, T)
        torch.set_float32_matmul_precision('high')  # TF32 where fp32 is used on CUDA
        self.dtype = pick_dtype(settings.dtype, device)
        self.autocast = lambda: torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32)
        if device.type == 'cpu': tune_cpu()
        if self.config.halting == 'router': expect_new_lengths()  # each pass has as many slots as tokens that go on
        self.model.to(device)
        self.model.checkpoint_activations = settings.checkpoint_activations
        if pick_compile(settings.compile, device): compile_blocks(self.model)
        self.optimizer = self._optimizer()
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype == torch.float16)
        if state and not settings.eval_only: self._restore(state)
        self.ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True) if world > 1 else None
        self.stop, self.bad_steps, self.recent, self.passes = 0.0, 0, collections.deque(maxlen=50), []
        self.log_file, self.broken, self.closing = None, None, contextlib.ExitStack()

    def _data(self):
        """The data set's description; prepares the built-in corpus if it is missing."""
        folder = self.s.data_dir
        if folder == prepare_data.BUILTIN:
            if self.rank == 0 and not os.path.exists(os.path.join(folder, 'meta.json')):
                print(f"{folder} is missing: preparing the built-in corpus, the source code of Python's standard library")
                prepare_data.prepare(prepare_data.DataSettings())
            if self.world > 1: dist.barrier()  # on every rank, even one that arrives after the data is there
        return read_meta(folder)

    def _model(self, given, state):
        """A model, according to init_from, and the step it is at."""
        s, own, step = self.s, {f.name for f in fields(GPTConfig)}, 0
        asked = {name: value for name, value in given.items() if name in own}
        torch.manual_seed(s.seed)
        if s.init_from == 'scratch':
            if s.eval_only: raise UserError("eval_only needs a trained model: add --init_from=resume or --init_from=FOLDER")
            model = GPT(build(GPTConfig, {'n_tokens': (n := self.meta['n_tokens']), 'vocab_size': math.ceil(n / 64) * 64, **asked}))
        else:
            state = state or (load_state(s.init_from[3:]) if s.init_from.startswith('hf:') else load_checkpoint(s.init_from))
            new = s.init_from != 'resume' and not s.eval_only
            free = {n: asked.pop(n) for n in (START if new else FREE) if n in asked and (new or asked[n] is not None)}
            steps = free.pop('ponder_steps', None) if s.eval_only else None
            if not new: step = state['step']
            model = GPT(build(GPTConfig, {**state['config'], **free}))
            fresh = {k: p for k, p in model.state_dict().items() if k.split('.')[0] not in ('wte', 'h', 'ln_f', 'lm_head')}
            if new: state = {**state, 'model': {**fresh, **state['model']}}  # only a mechanism's own weights may be new
            load_weights(model, state)
            if steps not in (None, model.config.ponder_steps): change_steps(model.config, steps)
        for name, value in asked.items():
            if value is not None and getattr(model.config, name) != value:
                raise UserError(f"{name}={value}, but the model loaded has {getattr(model.config, name)}: leave the setting out")
        if model.config.n_tokens != self.meta['n_tokens']:
            raise UserError(f"{s.data_dir} is tokenised with {self.meta['n_tokens']} tokens ({self.meta['tokenizer']}), "
                            f"the model has n_tokens={model.config.n_tokens}: use the data the model was made for")
        used = {'depth_': (c := model.config).depth_attn, 'halt_': c.halting != 'none', 'ponder_steps': c.ponder != 'none',
                'ponder_topk': c.ponder == 'embedding', 'jacobi_iters': c.ponder == 'latent'}
        off = tuple(name for name, on in used.items() if not on)
        idle = [n for n, v in given.items() if n in own and n.startswith(off) and v not in (None, getattr(GPTConfig, n))]
        if idle and not self.rank: print(f"warning: {', '.join(idle)}: without effect, the mechanism is off", file=sys.stderr)
        return model, step

    def _optimizer(self):
        """AdamW with weight decay on matrices only: norms have no reason to shrink."""
        s, params = self.s, list(self.model.parameters())
        groups = [dict(params=[p for p in params if p.dim() >= 2], weight_decay=s.weight_decay),
                  dict(params=[p for p in params if p.dim() < 2], weight_decay=0.0)]
        options = dict(lr=s.learning_rate, betas=(s.beta1, s.beta2), fused=self.device.type in ('cpu', 'cuda'))
        if not s.shard_optimizer or self.world == 1: return torch.optim.AdamW(groups, **options)
        from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **options)

    def _restore(self, state):
        """What is not in the model: the optimizer's state (with the current settings) and the scaler's."""
        if self.world > 1 and self.mean(torch.tensor([float(self.step)], dtype=torch.float64, device=self.device)) != self.step:
            raise UserError(f"this rank found step {self.step} in {self.s.out_dir}, other ranks another: give them all the same folder")
        if state.get('train_data', self.meta['train']) != self.meta['train'] and not self.rank:
            print(f"warning: the training data in {self.s.data_dir} is not what this run read before", file=sys.stderr)
        saved = state['optimizer']
        groups = [{**now, 'params': then['params']} for now, then in zip(self.optimizer.param_groups, saved['param_groups'])]
        self.optimizer.load_state_dict({'state': saved['state'], 'param_groups': groups})
        if hasattr(self.optimizer, 'optim'):  # ZeroRedundancyOptimizer: its part is in there
            for p, held in self.optimizer.optim.state.items(): held['step'] = held['step'].to(p.device)  # fused AdamW wants it there
            self.optimizer.state.clear()  # a second copy of that part, which nothing reads
        if state.get('scaler'): self.scaler.load_state_dict(state['scaler'])

    def learning_rate(self, step):
        """Linear warm-up that is never 0, then a cosine from the peak to min_lr_rate times the peak, reached at the last step."""
        s, warmup = self.s, max(1, round(self.s.warmup * self.s.max_steps))
        if step < warmup: return s.learning_rate * (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, s.max_steps - 1 - warmup))
        return s.learning_rate * (s.min_lr_rate + (1 - s.min_lr_rate) * 0.5 * (1 + math.cos(math.pi * progress)))

    def train_step(self):
        """One optimizer step; returns (mean loss over all micro-batches and ranks, gradient norm)."""
        s, step, model = self.s, self.step, self.ddp or self.model
        torch.manual_seed((s.seed * 1_000_003 + step) * 4096 + self.rank)  # dropout too is a function of (seed, step, rank)
        self.model.progress = step / s.max_steps  # halting's schedule reads it
        # 'latent' trains with jacobi_iters or one less: the same on all ranks
        jacobi = max(0, self.config.jacobi_iters - int(np.random.default_rng((s.seed, step)).integers(2)))
        for group in self.optimizer.param_groups: group['lr'] = self.learning_rate(step)
        total = torch.zeros(1, device=self.device)
        for micro in range(self.accumulation):
            # this rank's slice of the step's samples: the same samples whatever the number of ranks
            first = step * (s.batch_tokens // self.config.block_size) + (micro * self.world + self.rank) * s.micro_batch
            x, y = self.train_data.sample(first, s.micro_batch, s.seed, self.device, then=first + self.world * s.micro_batch)
            more = self.ddp and micro < self.accumulation - 1  # ranks exchange gradients in the last one
            with self.ddp.no_sync() if more else contextlib.nullcontext():
                with self.autocast(): loss = model(x, y, jacobi)[1] / self.accumulation
                self.scaler.scale(loss).backward()
            total += loss.detach()
            self.passes.append(self.shares())
        self.scaler.unscale_(self.optimizer)
        # the host waits for the GPU here, before the update: during the update it can already queue the next step
        norm, total = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), s.grad_clip)), self.mean(total)
        finite = math.isfinite(norm) and math.isfinite(total)  # the same on all ranks
        if finite or self.scaler.is_enabled(): self.scaler.step(self.optimizer)  # the scaler skips by itself
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=self.ddp is None)  # DDP's must stay in its buckets, or there would be two copies
        self.bad_steps = 0 if finite else self.bad_steps + 1
        if not finite:
            self.say(f"step {step + 1}: loss {total:.4g}, gradient norm {norm:.4g}; step skipped ({self.bad_steps} in a row)")
        if self.bad_steps >= s.max_bad_steps:
            raise UserError(f"{self.bad_steps} steps in a row were not finite: lower learning_rate, then resume or start again")
        self.step += 1
        return total, norm

    def mean(self, value):
        """A one-element tensor averaged over ranks, as a float."""
        if self.world > 1: dist.all_reduce(value)
        return value.item() / self.world

    def shares(self):
        """Shares of the tokens that took at least 1, 2, .. passes in the last forward, (ponder_steps + 1,); None without halting."""
        steps, most = self.model.steps, self.config.ponder_steps + 1
        return None if steps is None else torch.stack([(steps > k).float().mean() for k in range(most)])

    @torch.no_grad()
    def evaluate(self):
        """
        (mean loss in nats per token, mean passes per token or None without halting) over the same eval_tokens of the validation
        set each time, spread evenly over it; None if the run is to stop.
        """
        data, was_training = self.val_data, self.model.training
        n = min(data.n, max(self.world, self.s.eval_tokens // data.T))
        mine = (np.arange(n) * data.n // n)[self.rank::self.world]
        self.model.eval()
        total, passes, stop = torch.zeros(1, device=self.device), torch.zeros(1, device=self.device), False
        for i in range(0, math.ceil(n / self.world), self.s.micro_batch):  # equally often on all ranks
            if stop := self.should_stop(): break
            if i >= len(mine): continue  # this rank has one window fewer than others
            x, y = data.get(mine[i:i + self.s.micro_batch], self.device)
            with self.autocast(): total += self.model(x, y)[1] * len(x)
            if self.model.steps is not None: passes += self.model.steps.float().mean() * len(x)
        self.model.train(was_training)
        return None if stop else (self.mean(total) * self.world / n, self.mean(passes) * self.world / n or None)

    def save(self):
        """Checkpoint by rank 0; UserError if it cannot be written."""
        if hasattr(self.optimizer, 'consolidate_state_dict'):  # gathers on rank 0; PyTorch alone would make every byte a Python int
            with mock.patch.object(torch, 'ByteTensor', lambda data: torch.frombuffer(data, dtype=torch.uint8)):
                self.optimizer.consolidate_state_dict()
        if self.rank: return
        state = dict(version=CHECKPOINT_VERSION, step=self.step, config=asdict(self.config), tokenizer=self.meta['tokenizer'],
                     train_data=self.meta['train'], settings={**asdict(self.s), 'init_from': self.origin}, model=self.model.state_dict(),
                     optimizer=self.optimizer.state_dict(), scaler=self.scaler.state_dict())
        try:
            save_checkpoint(self.s.out_dir, state)
        except (OSError, RuntimeError) as error:
            reason = str(error.__context__ or error).splitlines()[0]  # PyTorch raises its own error over a full disk's
            raise UserError(f"{self.s.out_dir}: cannot write the checkpoint ({reason}); the one before is kept") from None

    def say(self, text, **record):
        """Print on rank 0 only; `record` becomes a line of log.jsonl, if it is open. If that cannot be written, the run saves and stops."""
        if self.rank: return
        for file, line in ((sys.stdout, text), (self.log_file, record and json.dumps(record))):
            try:
                if file and line: print(line, file=file, flush=True)
            except OSError as error:
                self.stop = self.stop or time.monotonic()
                self.broken = f"{file.name}: cannot be written ({error.strerror}); see to it, and go on with --init_from=resume"

    def should_stop(self):
        """Whether any rank was asked to stop, or is out of time; all ranks get the same answer."""
        stop = self.stop > 0 or time.monotonic() - self.started > (self.s.max_seconds or math.inf)
        return stop if self.world == 1 else self.mean(torch.tensor([float(stop)], device=self.device)) > 0

    def _on_signal(self, number, frame):
        """The first signal asks for a stop. A second one ends the process, unless it is the first again, passed on by torchrun."""
        if self.stop and time.monotonic() - self.stop > 0.5:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.stop = self.stop or time.monotonic()

    def open_output(self):
        """Make out_dir and lock out other runs; write settings.json and open log.jsonl."""
        if self.rank: return
        folder = self.s.out_dir
        # init_from is not 'resume' in the file, or a run from it would look for a checkpoint
        settings = {**asdict(self.s), **asdict(self.config), 'init_from': self.origin}
        try:
            self.closing.enter_context(alone(folder))
            if self.s.init_from != 'resume' and any(os.path.exists(os.path.join(folder, name)) for name in CHECKPOINTS):
                raise UserError(f"{folder} holds a checkpoint: go on with --init_from=resume, or choose another --out_dir")
            with whole(os.path.join(folder, 'settings.json')) as f: json.dump(settings, f, indent=1)
            self.log_file = self.closing.enter_context(open(os.path.join(folder, 'log.jsonl'), 'a+'))
            self.log_file.seek(max(0, self.log_file.tell() - 1))
            if self.log_file.read(1) not in ('', '\n'): self.log_file.write('\n')  # end the line that a full disk cut short
        except OSError as error:
            raise UserError(f"out_dir={folder}: cannot be written ({error.strerror}); choose another --out_dir") from None

    def report_evaluation(self):
        """Evaluate and say so; nats per byte can be compared between tokenizers."""
        if (result := self.evaluate()) is None: return self.say(f"step {self.step}: evaluation left out, the run was told to stop")
        loss, passes = result
        per_byte = loss * self.meta['val']['tokens'] / self.meta['val']['bytes']
        where = f"{self.s.out_dir if self.s.init_from == 'resume' else self.s.init_from} on {self.s.data_dir}, " if self.s.eval_only else ''
        self.say(f"{where}step {self.step}: validation loss {loss:.4f} nats per token, "
                 f"{per_byte:.4f} nats ({per_byte / math.log(2):.3f} bits) per byte"
                 + (f", {passes:.3f} passes per token" if passes else '')
                 + (f", the last batch's Jacobi change {self.model.jacobi_change:.1e}" if self.model.jacobi_change is not None else ''),
                 step=self.step, tokens=self.step * self.s.batch_tokens, val_loss=loss, val_nats_per_byte=per_byte, val_passes=passes)

    def run(self):
        """Evaluate only, or train to max_steps with logs, checkpoints and evaluations; ends early on a signal."""
        s = self.s
        if s.eval_only: return self.report_evaluation()
        if self.step >= s.max_steps:
            raise UserError(f"{s.out_dir} is at step {self.step} of max_steps={s.max_steps}: raise max_steps (which stretches schedules)")
        try:
            self.open_output()
            self.say(f"{self.model.num_params() / 1e6:.2f}M parameters, {self.model.flops_per_token() / 1e6:.1f} MFLOPs per token, "
                     f"{s.batch_tokens:,} tokens per step in {self.accumulation} x {self.world} x {s.micro_batch} sequences of "
                     f"{self.config.block_size}, {str(self.dtype).removeprefix('torch.')} on {self.world} x {self.device.type}")
            for number in stop_signals(): self.closing.callback(signal.signal, number, signal.signal(number, self._on_signal))
            try: self.loop()
            except UserError:  # such as data that can no longer be read: the steps done so far are kept
                if self.step and self.world == 1 and not self.bad_steps: self.save()
                raise
        finally:
            with contextlib.suppress(OSError): self.closing.close()
        if self.broken: raise UserError(self.broken)
        if self.step == s.max_steps and not self.stop: self.print_sample()

    def loop(self):
        """Steps until max_steps or a signal; a checkpoint is written before anything else that is due."""
        s = self.s
        self.model.train()
        mark, losses = time.perf_counter(), []
        while self.step < s.max_steps:
            loss, norm = self.train_step()
            losses.append(loss)
            self.watch(loss)
            if self.step % s.log_interval == 0 or self.step == 1:
                now = time.perf_counter()
                counted = [loss for loss in losses if math.isfinite(loss)] or [math.nan]  # without skipped steps
                self.log(statistics.fmean(counted), norm, (now - mark) / len(losses), self.train_data.waited / len(losses))
                mark, losses, self.train_data.waited = now, [], 0.0
            pause, last = time.perf_counter(), self.step == s.max_steps
            saved = last or self.step % s.save_interval == 0 and not self.bad_steps
            if saved: self.save()
            if last or self.step % s.eval_interval == 0: self.report_evaluation()
            if not last and self.should_stop():
                if not saved: self.save()
                return self.say(f"stopped at step {self.step}; go on with the same command and --init_from=resume")
            mark += time.perf_counter() - pause  # saving and evaluating are no part of a step's time

    def watch(self, loss):
        """Say so when a step's loss is far above those of the steps before it."""
        if len(self.recent) == self.recent.maxlen:
            mean, deviation = statistics.fmean(self.recent), statistics.pstdev(self.recent)
            if loss > mean + 6 * deviation:
                self.say(f"step {self.step}: loss spike, {loss:.4f} after {mean:.4f} in the last {len(self.recent)} steps",
                         step=self.step, spike=loss, mean_before=mean)
        if math.isfinite(loss): self.recent.append(loss)

    def log(self, loss, norm, seconds, waited):
        """One line for people, one for programs; loss (with `penalty`), time and data time are means over the steps since the last."""
        s, lr = self.s, self.learning_rate(self.step - 1)
        tokens, rate = self.step * s.batch_tokens, s.batch_tokens / seconds
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == 'cuda' else ''
        peak = next((flops for name, flops in PEAK_FLOPS.items() if name in gpu), None)
        if self.config.halting == 'router': peak = None  # its tokens stop in training: less is computed than flops_per_token says
        mfu = rate * self.model.flops_per_token() / (peak * self.world) if peak else None
        left = round((s.max_steps - self.step) * seconds)
        thinking, shares = self.thinking()
        self.say(f"step {self.step:>5}/{s.max_steps} | {tokens / 1e6:8.2f}M tokens | loss {loss:.4f} | lr {lr:.2e} | "
                 f"grad norm {norm:.2f} | {seconds * 1e3:.0f} ms | {rate:,.0f} tokens/s" + (f" | MFU {mfu:.1%}" if mfu else '') +
                 thinking + f" | {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left",
                 step=self.step, tokens=tokens, loss=loss, lr=lr, grad_norm=norm, ms=seconds * 1e3, data_ms=waited * 1e3,
                 tokens_per_second=rate, mfu=mfu, passes=shares)

    def thinking(self):
        """Mean passes per token since the last log line, and the share of tokens in each pass: (text, list); ('', None) without halting."""
        kept, self.passes = [p for p in self.passes if p is not None], []
        if not kept: return '', None
        kept = torch.stack(kept).mean(0)
        if self.world > 1: dist.all_reduce(kept)
        shares, most = (kept / self.world).tolist(), self.config.ponder_steps + 1
        early = self.model.progress < self.config.halt_full  # gate, mask: the term is not at full weight yet; router: too soon to tell
        collapse = 'nobody halts!' if sum(shares) > most - 0.005 and not early else 'everybody halts!' if sum(shares) < 1.005 else ''
        return f" | {sum(shares):.2f} passes ({' '.join(f'{p:.2f}' for p in shares)}) {collapse}".rstrip(), shares

    def print_sample(self):
        """A piece of the validation text, and how the model goes on."""
        if self.rank or not self.s.sample_tokens: return
        try: tokenizer = get_tokenizer(self.meta['tokenizer'])
        except UserError as error: return print(f"no sample: {error}")  # a vocabulary that has to be fetched; the run is complete
        expect_new_lengths()
        window = self.val_data.get([self.val_data.n // 2], self.device)[0]
        prompt = window[:, :max(1, self.config.block_size // 4)]
        # each token reads one more key than the one before: compiled blocks would be recompiled for each
        with torch.compiler.set_stance('force_eager'), self.autocast():
            tokens = self.model.generate(prompt, self.s.sample_tokens, temperature=0.7, seed=self.s.seed)[0].tolist()
        given, new = tokenizer.decode(tokens[:prompt.size(1)]), tokenizer.decode(tokens[prompt.size(1):])
        print('-' * 40, 'validation text <|model|> what the model makes of it', '-' * 40, f'\n{given}<|model|>{new}\n' + '-' * 133)


def main(argv):
    given, rest = read(argv, __doc__.strip(), Settings, GPTConfig)
    if rest: raise UserError(f"{rest[0]}: neither a setting (--name=value) nor a config file (.py, .json)")
    settings, state = build(Settings, given), None
    if (start := settings.init_from) == 'resume' or settings.eval_only and start != 'scratch' and not start.startswith('hf:'):
        state = load_checkpoint(settings.out_dir if start == 'resume' else start)
        if gone := state['settings'].keys() - asdict(settings): print(f"warning: no longer settings: {', '.join(gone)}", file=sys.stderr)
        settings = build(Settings, {**state['settings'], **given})  # its settings too, where the user gave none
    if settings.dry_run:
        from engine.plan import plan
        return plan(settings, given, state)
    device = pick_device(settings.device, int(os.environ.get('LOCAL_RANK') or 0))
    with process_group(device) as (rank, world):
        trainer = Trainer(settings, given, state, rank, world, device)
        trainer.run()
        trainer.ddp = None  # release the process group while its threads can still be joined


if __name__ == '__main__':
    run(main)
