r"""
Train a GPT on a laptop CPU, one GPU, or many.

    python train.py config/depth_attn.py
        2.8M parameters; 3 to 6 minutes on 2 CPU cores
    python train.py config/depth_attn.py config/size/360m.py --data_dir=data/fineweb-edu \
        --dry_run=True
        what the paper's size would take: memory, days
    torchrun --nproc_per_node=8 train.py config/depth_attn.py config/size/360m.py \
        --data_dir=data/fineweb-edu
        on eight GPUs, after python prepare_data.py fineweb-edu --shards=99
    python train.py --init_from=resume --out_dir=out/depth_attn
        go on after an interruption

Config files and --name=value apply from left to right. What none of them sets has its default,
that of config/size/tiny.py; device, dtype, compile and threads are the machine's. Ctrl-C, SIGTERM,
SIGHUP, max_seconds or a log that cannot be written saves and stops after the step; a second signal
stops at once. The exit status after a signal is not 0.
Writes OUT_DIR/ckpt.pt (the one before it is ckpt_prev.pt), settings.json (every setting but
max_seconds, derived ones too: a config file for the same mechanism and size) and log.jsonl (a JSON
object for each line of steps or evaluation in training).
"""

import math
import os
import sys
from dataclasses import asdict, dataclass
from functools import partial
from typing import Optional

import torch
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))   # `python -P` leaves it out
import prepare_data
from configurator import build, check_range, read
from engine.answers import exam_of_data
from engine.checkpoint import CHECKPOINTS, load_optimizer, optimizer_state, save_checkpoint
from engine.command import say_order
from engine.files import UserError, run, stamp
from engine.hardware import autocast, check_causal, pick_dtype, process_group
from engine.log import Log, Stop, lacks_evaluation
from engine.mechanisms import halts
from engine.muon import MuonAndAdamW, matrices_of_blocks
from engine.prepare import prepare
from engine.shards import read_meta
from engine.start import check_out_dir, check_ranks, checkpoint_of, goes_on, start_model
from engine.track import MODULES, package_of
from engine.windows import Windows
from model import GPTConfig

BAD_STEPS = 20  # in a row that are not finite end a run; fp16 may begin with some


# ---- settings ------------------------------------------------------------------------------------

@dataclass
class Settings:
    """the run; the defaults are the recipe of config/size/tiny.py"""
    data_dir: str = 'data/python'        # token shards; a built-in data set is made when missing
    out_dir: str = 'out'                # where checkpoint, settings and log go
    init_from: str = 'scratch'          # 'scratch', 'resume', a checkpoint's folder, or hf:FOLDER
    eval_only: bool = False             # evaluate a checkpoint and stop
    max_steps: int = 2400               # optimizer steps; schedules span them
    batch_tokens: int = 4 * 256         # tokens per optimizer step, over all devices
    micro_batch: int = 4                # sequences per device in one forward; the rest accumulates
    optimizer: str = 'adamw'            # or 'muon': Muon for the matrices of the blocks
    learning_rate: float = 3e-3         # peak
    min_lr_rate: float = 0.1            # floor of the cosine, as a share of the peak
    warmup: float = 0.02                # share of the steps in which the learning rate grows
    weight_decay: float = 0.1           # on matrices only
    beta1: float = 0.9                  # AdamW
    beta2: float = 0.95                 # AdamW
    grad_clip: float = 1.0              # the gradient's total norm is clipped to this
    seed: int = 1337                    # of all that is drawn: weights, order of the data, dropout
    log_interval: int = 50              # steps between log lines
    eval_interval: int = 600            # steps between evaluations; there is always one at the end
    eval_tokens: int = 128 * 1024       # validation tokens per evaluation, the same each time
    save_interval: int = 600            # steps between checkpoints; there is always one at the end
    max_seconds: Optional[float] = None # save and stop after this long, with exit status 0
    sample_tokens: int = 400            # of the sample printed at the end, 0 for none
    track: Optional[str] = None         # 'tensorboard' or 'wandb' gets what log.jsonl gets
    device: Optional[str] = None        # 'cpu', 'cuda', 'cuda:1', 'mps' (None: the best there is)
    dtype: Optional[str] = None         # 'float32', 'bfloat16', 'float16' (None: the quick one)
    threads: Optional[int] = None       # on a CPU (None: PyTorch's choice, one per core)
    compile: Optional[bool] = None      # torch.compile parts of blocks (None: on CUDA only)
    checkpoint_activations: bool = False # recompute blocks: less memory, a third more compute
    shard_optimizer: bool = False       # ranks share out AdamW's state: less memory, same result
    dry_run: bool = False               # print what it would take, and stop; needs no data or GPU

    def __post_init__(self):
        check_range(self, 1, math.inf, 'max_steps', 'batch_tokens', 'micro_batch', 'log_interval',
                    'eval_interval', 'eval_tokens', 'save_interval', 'threads')
        for name in ('learning_rate', 'grad_clip', 'max_seconds'):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value} must be positive")
        check_range(self, 0, 1, 'min_lr_rate', 'warmup', 'beta1', 'beta2')
        if max(self.beta1, self.beta2) == 1:
            raise ValueError(f"beta1={self.beta1} and beta2={self.beta2} must be below 1")
        check_range(self, 0, 2 ** 31 - 1, 'seed')
        check_range(self, 0, math.inf, 'sample_tokens', 'weight_decay')
        if self.optimizer not in ('adamw', 'muon'):
            raise ValueError(f"optimizer={self.optimizer!r} must be 'adamw' or 'muon'")
        if self.optimizer == 'muon' and self.shard_optimizer:
            raise ValueError("shard_optimizer shares out AdamW's state, not Muon's: leave one out")
        if self.dtype not in (None, 'float32', 'bfloat16', 'float16'):
            raise ValueError(f"dtype={self.dtype!r} must be 'float32', 'bfloat16' or 'float16'")
        if self.eval_only and self.init_from == 'scratch':
            raise ValueError("eval_only needs a trained model: add --init_from=resume or "
                             "--init_from=FOLDER")
        if self.track not in (None, *MODULES):
            raise ValueError(f"track={self.track!r} must be 'tensorboard' or 'wandb'")

    def micro_batches(self, T, world):
        """
        (how many micro-batches each of `world` ranks adds up in a step, how many sequences of T
        tokens each of these has). A micro-batch has `micro_batch` sequences, or what a rank has in
        a step, if that is less. UserError if batch_tokens cannot be split so.
        """
        windows, rest = divmod(self.batch_tokens, T * world)    # of each rank
        size = self.micro_batch if rest else min(self.micro_batch, windows)
        per_pass = size * T * world
        if self.batch_tokens % per_pass:
            raise UserError(f"batch_tokens={self.batch_tokens} is not a multiple of micro_batch x "
                            f"block_size x processes = {size} x {T} x {world} = {per_pass}: "
                            "change one of them")
        return self.batch_tokens // per_pass, size


# ---- set-up --------------------------------------------------------------------------------------

def make_optimizer(s, model, device, dtype=torch.float32, world=1):
    """
    AdamW, in one piece or shared out among `world` ranks; or Muon for the matrices of the blocks
    and AdamW for the rest. Weight decay on matrices only. dtype: of the run's products.
    """
    by_muon = matrices_of_blocks(model) if s.optimizer == 'muon' else []
    of_blocks = set(by_muon)
    by_adamw = [p for p in model.parameters() if p not in of_blocks]
    groups = [dict(params=[p for p in by_adamw if p.dim() >= 2], weight_decay=s.weight_decay),
              dict(params=[p for p in by_adamw if p.dim() < 2], weight_decay=0.0)]
    options = dict(lr=s.learning_rate, betas=(s.beta1, s.beta2),
                   fused=device.type in ('cpu', 'cuda'))
    if s.optimizer == 'muon':
        for_muon = dict(params=by_muon, weight_decay=s.weight_decay)
        return MuonAndAdamW(for_muon, groups, **options, dtype=dtype)
    if s.shard_optimizer and world > 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **options)
    return torch.optim.AdamW(groups, **options)


def learning_rate(s, step):
    """
    Linear warm-up that is never 0, then a cosine from the peak to min_lr_rate times the peak, which
    the last step has (if it is behind the warm-up).
    """
    warmup = max(1, round(s.warmup * s.max_steps))
    if step < warmup:
        return s.learning_rate * (step + 1) / warmup
    last = s.max_steps - 1
    progress = (step - warmup) / (last - warmup) if step < last else 1.0
    cosine = 0.5 * (1 + math.cos(math.pi * progress))  # from 1 to 0
    return s.learning_rate * (s.min_lr_rate + (1 - s.min_lr_rate) * cosine)


class Trainer:
    """One run: set up from settings, carried out by `run`."""

    def __init__(self, settings, given, state, ranks, device):
        """
        given: what the user set, of the run and of the model. state: the checkpoint of ours to go
        on from or to evaluate, else None (with --init_from=FOLDER start_model loads the weights).
        ranks: this process among those of the run. device: what it computes on.
        """
        s = self.settings = settings
        self.ranks = ranks
        self.device = device
        if s.threads is not None:
            torch.set_num_threads(s.threads)
        kept = state.get('precision') if goes_on(s) else None
        own, self.why = pick_dtype(s.dtype or kept, device)     # a run keeps what it had
        self.dtype = ranks.dtype_of_first(own, device)
        check_causal(device, self.dtype)
        self.autocast = partial(autocast, device, self.dtype)
        self.stop = Stop(ranks, device, s.max_seconds)
        self.bad_steps = 0          # in a row, whose loss or gradient is not finite
        # {path: stamp} of the checkpoints in out_dir, as this run found them, then of the ckpt.pt
        # that it saved. Another one tells of a second run in it, where no lock keeps that out.
        self.stamps = state['files'] if goes_on(s) else {}
        # what the run began from, which checkpoints and settings.json keep: never 'resume'
        self.began_from = state['settings'].get('init_from', 'scratch') if state else s.init_from

        # the data (a built-in set is made when it is missing), the model, and the step it is at
        if ranks.rank == 0:
            if s.track and not s.eval_only:
                package_of(s.track)     # if it is missing, before anything is made
            prepare_data.prepare_builtin(s.data_dir)
        ranks.wait()
        self.meta = read_meta(s.data_dir)
        check_ranks(s, given, self.meta, ranks, device)
        self.exam = exam_of_data(s.data_dir)    # None, if it is no made task
        self.model, self.step = start_model(s, given, self.meta, state, ranks, device)
        self.config = self.model.config
        T = self.config.block_size
        self.accumulation, self.micro_batch = None, s.micro_batch
        if not s.eval_only:
            self.accumulation, self.micro_batch = s.micro_batches(T, ranks.world)
        self.val_data = Windows(s.data_dir, 'val', self.meta, T)
        prepare(self.model, s, device)          # moves it there; tunes, compiles, recomputes
        self.log = Log(s, self.model, self.stop)
        if not s.eval_only:
            self.prepare_training(state)

    def prepare_training(self, state):
        """Data, optimizer, and what a step calls; state: the checkpoint to go on from, or None."""
        s, ranks = self.settings, self.ranks
        self.train_data = Windows(s.data_dir, 'train', self.meta, self.config.block_size)
        self.optimizer = make_optimizer(s, self.model, self.device, self.dtype, ranks.world)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        if goes_on(s):      # weights of another folder come without their optimizer
            load_optimizer(self.optimizer, self.scaler, state)
        self.net = self.model       # what a step calls; with several ranks it averages gradients
        if ranks.world > 1:
            for p in self.model.parameters():
                if p.requires_grad:     # gradients that a first backward makes lie beside DDP's
                    p.grad = torch.zeros_like(p)
            self.net = DistributedDataParallel(self.model, gradient_as_bucket_view=True)

    # ---- the step --------------------------------------------------------------------------------

    def train_step(self):
        """One optimizer step; returns (mean loss over the step's targets, gradient norm)."""
        s = self.settings
        # dropout is a function of (seed, step, rank): a resumed run draws the same
        torch.manual_seed((s.seed * 1_000_003 + self.step) * 4096 + self.ranks.rank)
        self.model.mechanism.begin_step(self.step, s.max_steps, s.seed)
        for group in self.optimizer.param_groups:
            group['lr'] = learning_rate(s, self.step)

        # forward and backward, in micro-batches whose gradients add up
        total = torch.zeros((), device=self.device)     # of losses
        batches = [self.batch(micro) for micro in range(self.accumulation)]
        divisors, n_targets = self.by_targets(batches)  # of text: the number of micro-batches
        for micro, (x, y) in enumerate(batches):                        # each (micro_batch, T)
            # DDP.no_sync without a `with`: in the last backward ranks average what was added up
            self.net.require_backward_grad_sync = micro == self.accumulation - 1
            with self.autocast():
                _, loss = self.net(x, y)
            loss = loss / divisors[micro]
            self.scaler.scale(loss).backward()
            total += loss.detach()
            self.log.add_passes(self.model.mechanism.passes)
            if micro + 1 < self.accumulation:   # else the step itself is said
                self.log.alive(f"step {self.step + 1}: micro-batch {micro + 1} of "
                               f"{self.accumulation}")

        # the update, unless the gradient is not finite
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), s.grad_clip)
        norm = float(norm)                  # waits for the GPU
        loss = self.ranks.mean(total) if n_targets else math.nan
        if not n_targets:
            self.log.say(f"step {self.step + 1}: no answer in its windows counts; step skipped "
                         "(raise block_size or batch_tokens)")
        elif self.may_update(loss, norm):
            self.scaler.step(self.optimizer)
        self.scaler.update()                # fp16: a smaller scale, if a gradient was not finite
        self.optimizer.zero_grad(set_to_none=self.ranks.world == 1)     # DDP keeps its in buckets
        self.step += 1
        return loss, norm

    def by_targets(self, batches):
        """
        (divisors of the micro-batches' mean losses, the number of targets in the step on all
        ranks). Divided so, the losses add up to one that, averaged over ranks, is the mean over all
        targets. A micro-batch of text has as many targets as any other, but of a made task some
        windows have more than others.
        """
        counts = torch.stack([(y >= 0).sum() for _, y in batches]).float()
        n_targets = self.ranks.sum(counts.sum())
        # infinite where nothing counts
        return n_targets.clamp(min=1) / (counts * self.ranks.world), n_targets

    def batch(self, micro):
        """
        This rank's slice of the step's samples, (micro_batch, T) each: inputs and targets. The step
        has the same samples whatever the number of ranks.
        """
        s = self.settings
        rank, world = self.ranks.rank, self.ranks.world
        per_step = s.batch_tokens // self.config.block_size
        first = self.step * per_step + (micro * world + rank) * self.micro_batch
        return self.train_data.sample(first, self.micro_batch, s.seed, self.device)

    @property
    def precision(self):
        """The name of what it computes in, as 'bfloat16'."""
        return str(self.dtype).removeprefix('torch.')

    def may_update(self, loss, norm):
        """Whether both are finite; says so if not. UserError after BAD_STEPS in a row."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.bad_steps = 0
            return True
        self.bad_steps += 1
        self.log.say(f"step {self.step + 1}: loss {loss:.4g}, gradient norm {norm:.4g}; step "
                     f"skipped ({self.bad_steps} in a row)")
        if self.bad_steps == BAD_STEPS:
            raise UserError(f"{BAD_STEPS} steps in a row were not finite: lower learning_rate, "
                            "and resume from the last checkpoint or start again")
        return False

    # ---- the loop --------------------------------------------------------------------------------

    def loop(self):
        """Steps until max_steps, or `stop` is asked; what is due is saved before it is said."""
        s = self.settings
        self.model.train()
        self.log.start(self.accumulation, self.micro_batch, f"{self.precision} ({self.why})",
                       self.meta, self.train_data.share)
        while self.step < s.max_steps:
            loss, norm = self.train_step()
            last = self.step == s.max_steps
            stop = self.stop.asked()
            saves = last or stop or self.step % s.save_interval == 0
            if saves:
                with self.log.clock_stopped():
                    self.save()
            lr = self.optimizer.param_groups[0]['lr']
            self.log.step(self.step, loss, norm, lr, saves)
            if last or self.step % s.eval_interval == 0:
                with self.log.clock_stopped():
                    self.evaluate()     # says that it does not, if the run is to stop
                    self.model.train()
            if stop and not last:
                self.log.say(f"stopped at step {self.step}; go on with the same command and "
                             "--init_from=resume")
                return

    @torch.no_grad()
    def evaluate(self):
        """
        Say the mean loss in nats per target, with halting also the mean passes, over the same
        eval_tokens of the validation set each time, spread evenly over it. If the run is asked to
        stop meanwhile, say so instead; but the evaluation that ends a run, and that of eval_only,
        are always finished. Leaves the model in eval mode.
        """
        self.model.eval()
        data, at_once = self.val_data, self.micro_batch
        rank, world = self.ranks.rank, self.ranks.world
        windows = data.spread(max(1, self.settings.eval_tokens // data.T))
        n, mine = len(windows), windows[rank::world]
        ends = self.settings.eval_only or self.step == self.settings.max_steps
        total = torch.zeros(3, device=self.device)      # of losses, their targets, passes
        for i in range(0, math.ceil(n / world), at_once):               # as often on all ranks
            if not ends and self.stop.asked():
                self.log.say("evaluation stopped; --init_from=resume --eval_only=True makes one of "
                             "the last checkpoint")
                return
            some = mine[i:i + at_once]
            if len(some) == 0:
                continue    # this rank has one window fewer than others
            x, y = data.get(some, self.device)                          # each (len(some), T)
            with self.autocast():
                _, loss = self.model(x, y)
            targets = (y >= 0).sum()
            total[0] += loss * targets
            total[1] += targets
            if halts(self.model):
                total[2] += self.model.mechanism.passes.float().mean() * len(some)
            self.log.alive(f"evaluation: {min(n, world * (i + len(some)))} of {n} windows")
        total = self.ranks.sum(total)
        if not total[1]:
            raise UserError("no answer in the windows evaluated counts: raise block_size or "
                            "eval_tokens")
        loss, passes = (total[0] / total[1]).item(), total[2].item() / n
        if not math.isfinite(loss):
            raise UserError(f"step {self.step}: the validation loss is not finite; lower "
                            "learning_rate, or take a wider dtype")
        self.log.evaluation(self.step, loss, passes or None, self.meta, self.exam,
                            self.autocast)

    def save(self):
        """Checkpoint by rank 0."""
        optimizer = optimizer_state(self.optimizer)  # on all ranks
        if self.ranks.rank > 0:
            return
        path = os.path.join(self.settings.out_dir, CHECKPOINTS[0])
        if stamp(path) not in (None, self.stamps.get(path)):    # where no lock keeps it out
            self.log.say(f"warning: another run writes to {self.settings.out_dir}, too: give each "
                         "a folder of its own, or the last one to save is what stays")
        save_checkpoint(self.settings.out_dir, dict(
            step=self.step,
            config=asdict(self.config),
            tokenizer=self.meta['tokenizer'],
            tokenizer_id=self.meta.get('tokenizer_id'),
            train_data=self.meta['train'],
            val_data=self.meta['val'],
            exam=self.exam,
            settings={**asdict(self.settings), 'init_from': self.began_from},
            precision=self.precision,
            model=self.model.state_dict(),
            optimizer=optimizer,
            scaler=self.scaler.state_dict(),
        ))
        self.stamps[path] = stamp(path)

    # ---- the run ---------------------------------------------------------------------------------

    def run(self):
        """Evaluate only, or train to max_steps; ends early if `stop` is asked."""
        s = self.settings
        if s.eval_only:
            self.log.say(f"evaluation in {self.precision} ({self.why})")
            self.evaluate()
            return
        unfinished = self.step < s.max_steps or (
            self.step == s.max_steps and lacks_evaluation(s.out_dir, self.step))
        if not unfinished:
            raise UserError(f"{s.out_dir} is at step {self.step} of max_steps={s.max_steps}: raise "
                            "max_steps (which stretches schedules), or add --eval_only=True")
        # a config file: its init_from is not 'resume', or a run from it would look for a checkpoint
        settings = {**asdict(s), **asdict(self.config), 'init_from': self.began_from}
        settings.pop('variant', None)   # of released models: it comes with their weights
        settings.pop('max_seconds')     # of this call
        with self.log.open(settings, self.stamps, self.step):
            with self.stop.on_signals():
                if self.step < s.max_steps:
                    self.loop()
                else:
                    self.evaluate()     # the run was killed in its last evaluation
            if self.step == s.max_steps and s.sample_tokens and not self.stop.asked():
                self.log.examples(self.val_data, self.meta, self.autocast)


# ---- main ----------------------------------------------------------------------------------------

def main(argv):
    given, rest = read(argv, __doc__, Settings, GPTConfig)
    if rest:
        raise UserError(f"{rest[0]}: neither a setting (--name=value) nor a config file (.py, "
                        ".json)")
    # the first Settings say which checkpoint, and the second have those of its run, too
    state, before = checkpoint_of(build(Settings, given))
    settings = build(Settings, {**before, **given})
    if os.environ.get('RANK', '0') == '0':      # torchrun sets it
        say_order(argv, given, settings)
    if settings.dry_run:
        from engine.plan import print_plan  # not for every run: it imports for a second
        print_plan(settings, given, prepare_data.BUILTIN, state)
        return 0
    check_out_dir(settings, {})

    with process_group(settings.device) as (ranks, device):
        by_default = settings.init_from == 'scratch' and not given.keys() & {'n_layer', 'n_embd'}
        if by_default and ranks.rank == 0:
            print("a small model, by default; for 362M parameters add config/size/360m.py",
                  flush=True)
        trainer = Trainer(settings, given, state, ranks, device)
        del state   # it keeps the old file open: replaced, that would still take disk space
        trainer.run()
        trainer.net = None  # it holds the process group
    if trainer.stop.error:
        raise trainer.stop.error    # all is saved, but a line of the log
    return trainer.stop.status


if __name__ == '__main__':
    run(main)
