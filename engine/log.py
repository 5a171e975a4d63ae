"""
What a run says of its steps: loss, speed, spikes, passes per token, evaluations, and a sample of
what it learned. Steps, spikes and evaluations are also lines of log.jsonl.
"""

import collections
import contextlib
import math
import statistics
import time

import torch

from engine.checkpoint import kept
from engine.errors import NothingToSave, UserError
from engine.hardware import PEAK_FLOPS, expect_new_lengths
from engine.shards import get_tokenizer


class Log:
    """Counts steps, and says how they went every log_interval steps."""

    def __init__(self, output, settings, model, data, ranks, device):
        """data: the Windows of training, which know how long the run waited for them."""
        self.say = output.say
        self.settings = settings
        self.model = model
        self.config = model.config
        self.data = data
        self.ranks = ranks
        self.device = device
        self.recent = collections.deque(maxlen=50)  # losses, to tell a spike by
        # since the last line:
        self.began = 0.0            # when that was, by the clock
        self.losses = []            # of each step
        self.passes = []            # of each micro-batch: shares of the tokens in each pass

    def start(self, accumulation, dtype):
        """Say what is trained, and start the clock."""
        s = self.settings
        parameters = self.model.num_params() / 1e6
        flops = self.model.flops_per_token() / 1e6
        world = self.ranks.world
        precision = str(dtype).removeprefix('torch.')
        self.say(f"{parameters:.2f}M parameters, {flops:.1f} MFLOPs per token, "
                 f"{s.batch_tokens:,} tokens per step in {accumulation} x {world} x "
                 f"{s.micro_batch} sequences of {self.config.block_size}, {precision} on "
                 f"{world} x {self.device.type}")
        self.began = time.perf_counter()

    @contextlib.contextmanager
    def clock_stopped(self):
        """Around what is no part of a step's time, such as saving and evaluating."""
        begin = time.perf_counter()
        yield
        self.began += time.perf_counter() - begin

    def add_passes(self, steps):
        """Count one forward. steps: passes that each token took, (B,T), or None without halting."""
        if steps is None:
            return
        most = self.config.ponder_steps + 1
        shares = [(steps > k).float().mean() for k in range(most)]
        self.passes.append(torch.stack(shares))                         # (most,)

    def step(self, step, loss, norm, lr):
        """Count a step that is done. Every log_interval steps, and after the first, say so."""
        self.losses.append(loss)
        self.watch(step, loss)
        if step != 1 and step % self.settings.log_interval > 0:
            return
        now = time.perf_counter()
        n = len(self.losses)
        finite = [loss for loss in self.losses if math.isfinite(loss)] or [math.nan]
        seconds = (now - self.began) / n
        waited = self.data.waited / n
        self.line(step, statistics.fmean(finite), norm, lr, seconds, waited)
        self.began = now
        self.losses = []
        self.data.waited = 0.0

    def watch(self, step, loss):
        """Say so when a step's loss is far above those of the steps before it."""
        if len(self.recent) == self.recent.maxlen:
            mean = statistics.fmean(self.recent)
            deviation = statistics.pstdev(self.recent)
            if loss > mean + 6 * deviation:
                self.say(f"step {step}: loss spike, {loss:.4f} after {mean:.4f} in the last "
                         f"{len(self.recent)} steps", step=step, spike=loss, mean_before=mean)
        if math.isfinite(loss):
            self.recent.append(loss)

    def line(self, step, loss, norm, lr, seconds, waited):
        """
        Loss (what is trained on: with halting's term), seconds, and of these the ones waited for
        data, are means over the steps since the last line.
        """
        s = self.settings
        tokens = step * s.batch_tokens
        rate = s.batch_tokens / seconds
        mfu = self.mfu(rate)
        shares = self.shares()
        words = [
            f"step {step:>5}/{s.max_steps}",
            f"{tokens / 1e6:8.2f}M tokens",
            f"loss {loss:.4f}",
            f"lr {lr:.2e}",
            f"grad norm {norm:.2f}",
            f"{seconds * 1e3:.0f} ms",
            f"{rate:,.0f} tokens/s",
        ]
        if mfu:
            words.append(f"MFU {mfu:.1%}")
        if shares:
            words.append(self.describe(shares))
        left = round((s.max_steps - step) * seconds)
        words.append(f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left")
        self.say(' | '.join(words), step=step, tokens=tokens, loss=loss, lr=lr, grad_norm=norm,
                 ms=seconds * 1e3, data_ms=waited * 1e3, tokens_per_second=rate, mfu=mfu,
                 passes=shares)

    def mfu(self, rate):
        """The share of the GPUs' peak that so many tokens per second need; None if not known."""
        if self.device.type != 'cuda':
            return None
        if self.model.mechanism.skips:
            return None  # in training less is computed than flops_per_token says
        gpu = torch.cuda.get_device_name(self.device)
        for name, peak in PEAK_FLOPS.items():
            if name in gpu:
                return rate * self.model.flops_per_token() / (peak * self.ranks.world)
        return None

    def shares(self):
        """Shares of the tokens in passes 1, 2, .. since the last line; None without halting."""
        if not self.passes:
            return None
        mean = torch.stack(self.passes).mean(0)                         # (ponder_steps + 1,)
        self.passes = []
        return (self.ranks.sum(mean) / self.ranks.world).tolist()

    def describe(self, shares):
        """The mean number of passes, the share of tokens in each, and whether halting collapsed."""
        passes = sum(shares)
        words = f"{passes:.2f} passes ({' '.join(f'{p:.2f}' for p in shares)})"
        # gate, mask: their loss term is not at full weight yet; router: too soon to tell
        early = self.model.mechanism.progress < max(0.48, self.config.halt_full)
        if passes > len(shares) - 0.005 and not early:
            return words + ' nobody halts!'
        if passes < 1.005:
            return words + ' everybody halts!'
        return words

    def evaluation(self, step, result, meta):
        """
        Say what Trainer.evaluate found; nats per byte can be compared between tokenizers. meta: the
        data's description. NothingToSave if the loss is not finite.
        """
        if result is None:
            self.say(f"step {step}: evaluation left out, the run was told to stop")
            return
        s = self.settings
        loss, passes = result
        per_byte = loss * meta['val']['tokens'] / meta['val']['bytes']
        where = ''
        if s.eval_only:
            folder = s.out_dir if s.init_from == 'resume' else s.init_from
            where = f"{folder} on {s.data_dir}, "
        if not math.isfinite(loss):
            mend = ("try --dtype=float32" if s.eval_only else
                    f"lower learning_rate, or take a wider dtype; {kept(s.out_dir, before=step)}")
            raise NothingToSave(f"{where}step {step}: the validation loss is not finite; {mend}")
        text = (f"{where}step {step}: validation loss {loss:.4f} nats per token, "
                f"{per_byte:.4f} nats ({per_byte / math.log(2):.3f} bits) per byte")
        if passes:
            text += f", {passes:.3f} passes per token"
        change = self.model.mechanism.jacobi_change
        if change is not None:
            text += f", the last batch's Jacobi change {change:.1e}"
        self.say(text, step=step, tokens=step * s.batch_tokens, val_loss=loss,
                 val_nats_per_byte=per_byte, val_passes=passes)


def print_sample(model, data, tokenizer, settings, autocast):
    """
    Print a piece of the validation text, and how the model goes on. data: its Windows. tokenizer:
    its name. autocast: makes the context that the model runs in.
    """
    try:
        tokenizer = get_tokenizer(tokenizer)
    except UserError as error:  # a vocabulary that has to be fetched; the run is complete
        print(f"no sample: {error}")
        return
    expect_new_lengths()
    device = model.wte.weight.device
    window, _ = data.get([data.n // 2], device)                         # (1,T)
    prompt = window[:, :max(1, data.T // 4)]
    # each token reads one key more than the one before: compiled blocks would be compiled anew
    with torch.compiler.set_stance('force_eager'), autocast():
        out = model.generate(prompt, settings.sample_tokens, temperature=0.7, seed=settings.seed)
    tokens = out[0].tolist()
    given = tokenizer.decode(tokens[:prompt.size(1)])
    new = tokenizer.decode(tokens[prompt.size(1):])
    print('-' * 40, 'validation text <|model|> what the model makes of it', '-' * 40,
          f'\n{given}<|model|>{new}\n' + '-' * 133)
