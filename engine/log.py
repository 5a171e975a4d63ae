"""
What a run says and leaves behind, and what ends it early.

    stop = Stop(ranks, device, max_seconds)     asked(): is the run to save and end?
    log = Log(settings, model, stop)            lines for people, JSON objects for programs
    with log.open(written, stamps, step):       the run's folder: settings.json, log.jsonl
"""

import contextlib
import json
import math
import os
import signal
import sys
import textwrap
import time
from functools import partial
from statistics import fmean

import torch

from engine.answers import answer_problems
from engine.files import (
    UserError, alone, end_torn_line, for_terminal, one_line, read_lines, whole)
from engine.flops import flops_per_token
from engine.generate import check_pieces, generate
from engine.hardware import peak_flops, without_cudnn_attention
from engine.mechanisms import switched_on
from engine.shards import get_tokenizer
from engine.start import check_out_dir
from engine.tasks import task_of
from engine.track import Tracker

SILENCE = 20    # seconds without a line, after which a run says how far it is
PROBLEMS = 100  # of a made task, which each evaluation asks
OFTEN = 100     # times that a run may read its data without a warning


class Stop:
    """Whether a run is to save and end early: a signal, no time left, a log that is lost."""

    def __init__(self, ranks, device, max_seconds=None):
        self.ranks = ranks
        self.device = device
        self.deadline = time.monotonic() + (max_seconds or math.inf)
        self.since = 0.0            # when this rank heard a signal; 0: it did not
        self.status = 0             # what the program ends with: 128 and the signal's number
        self.error = None           # why a line of the log is lost: what the program ends with

    def asked(self):
        """Whether any rank was told to stop, or is out of time; all ranks get the same answer."""
        stop = self.since > 0 or self.error is not None or time.monotonic() > self.deadline
        if self.ranks.world == 1:
            return stop
        return self.ranks.mean(torch.tensor([float(stop)], device=self.device)) > 0

    def because(self, error):
        """A line of the log is lost: its reader has left, or the disk is full."""
        if not isinstance(error, BrokenPipeError):
            error = UserError(f"a line of the log cannot be written ({error.strerror}): see to it, "
                              "then go on with --init_from=resume, if steps are left")
        self.error = self.error or error

    def hear(self, number, frame):
        """
        The first signal asks for a stop, and this is said, as a step can take long. A second one
        ends the process, unless it is the first again, passed on by torchrun.
        """
        if self.since and time.monotonic() - self.since > 0.5:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if not self.since and self.ranks.rank == 0:
            with contextlib.suppress(OSError):      # the terminal may be gone
                # not print, which the signal may have interrupted
                os.write(2, b"stopping after this step; a second time ends it now\n")
        self.since = self.since or time.monotonic()
        self.status = 128 + number

    @contextlib.contextmanager
    def on_signals(self):
        """Around the part of a run that Ctrl-C, SIGTERM and the terminal's end may ask to stop."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if hasattr(signal, 'SIGHUP') and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)   # Windows has none; nohup has it ignored
        before = {number: signal.signal(number, self.hear) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Log:
    """
    What rank 0 prints and writes to log.jsonl, and what it asks of the model for that: answers, and
    a sample. The other ranks are silent.
    """

    def __init__(self, settings, model, stop):
        """stop: the run's Stop. It is told when a line is lost, so that the run saves and ends."""
        self.settings = settings
        self.model = model
        self.stop = stop
        self.ranks = stop.ranks
        self.device = stop.device
        self.file = None            # log.jsonl, once it is open
        self.tracker = None         # where its lines go too, if the user asked for it
        self.said = time.monotonic()
        self.outcomes = []          # of a made task's problems, in the last evaluation
        self.checked = False        # whether check_pieces was called
        self.flops = 0.0            # per token, of a step
        self.first = True           # whether no step was counted yet
        # since the last line of steps:
        self.began = 0.0            # when that was, moved on by what clock_stopped leaves out
        self.losses = []            # of each step
        self.passes = []            # of each micro-batch: shares of the tokens in each pass

    @contextlib.contextmanager
    def open(self, written, stamps, step):
        """
        Around the run, which goes on from `step`: makes its folder and locks out other runs;
        settings.json, with what is `written`, and log.jsonl are in it. UserError if the folder
        cannot be written, or another run had it until now. stamps: as in check_out_dir.
        """
        if self.ranks.rank > 0:
            yield
            return
        folder, closing = self.settings.out_dir, contextlib.ExitStack()
        try:
            closing.enter_context(alone(folder))
            check_out_dir(self.settings, stamps)
            with whole(os.path.join(folder, 'settings.json')) as f:
                json.dump(written, f, indent=1)
            path = os.path.join(folder, 'log.jsonl')
            self.file = closing.enter_context(open(path, 'a+', encoding='utf-8'))
            end_torn_line(self.file)
        except OSError as error:
            raise UserError(f"out_dir={folder}: cannot be written ({error.strerror}); choose "
                            "another --out_dir") from None
        with closing:
            if self.settings.track:
                tracker = Tracker(self.settings.track, folder, self.say, written, step)
                self.tracker = closing.enter_context(tracker)
            yield

    def say(self, text, **record):
        """
        Print `text`; `record` becomes a line of log.jsonl, if that is open. Where one of the two
        cannot be written, the other is, and the run is asked to stop.
        """
        self.said = time.monotonic()
        if self.ranks.rank > 0:
            return
        for write in (partial(self.write_line, record), partial(print, text, flush=True)):
            try:
                write()
            except OSError as error:
                self.stop.because(error)

    def write_line(self, record):
        """A line of log.jsonl, which the tracker gets, too."""
        if not record or not self.file:
            return
        record = without_nan(record)
        print(json.dumps(record), file=self.file, flush=True)
        if self.tracker:
            self.tracker.log(record)

    def alive(self, text):
        """Say how far it is, if nothing was said for a while."""
        if self.silent():
            self.say(text)

    def silent(self):
        return time.monotonic() - self.said > SILENCE

    # ---- steps

    def start(self, accumulation, micro_batch, precision, meta, share):
        """
        Say what is trained, and start the clock. precision: in which, and why. meta: describes the
        data. share: Windows.share.
        """
        s, world = self.settings, self.ranks.world
        parameters = self.model.num_params() / 1e6
        self.flops = flops_per_token(self.model, texts=micro_batch)
        epochs = s.max_steps * s.batch_tokens / meta['train']['tokens']
        source = one_line(textwrap.shorten(meta['source'], 80))
        at_most = ' at most' if self.skips else ''
        self.say(f"{switched_on(self.model.config)}: {parameters:.2f}M parameters, "
                 f"{self.flops / 1e6:.1f} MFLOPs per token{at_most}, "
                 f"{s.batch_tokens:,} tokens per step in {accumulation} x {world} x "
                 f"{micro_batch} sequences of {self.model.config.block_size}, {precision} on "
                 f"{world} x {self.device.type}; all {s.max_steps:,} steps read "
                 f"{s.data_dir} ({source}) {epochs:,.1f} times")
        for words in self.surprises(epochs, meta, share):
            self.say(words)
        self.began = time.perf_counter()

    def surprises(self, epochs, meta, share):
        """Yields a line for each thing that a user may not expect of this run."""
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        if trained < self.model.num_params():
            yield (f"only {trained:,} parameters are trained, those of the mechanism, and the loss "
                   "is its own")
        if epochs > OFTEN and not task_of(meta):
            yield f"warning: a text read {epochs:,.0f} times is learned by heart"
        if share < 1:
            yield (f"{share:.0%} of what the answers hold counts: a problem that begins before its "
                   "window is not known (block_size)")
        threads = torch.get_num_threads()
        if self.device.type == 'cpu' and threads > 1:   # they wait for each other by spinning
            yield (f"{threads} threads: where other programs use these cores too, fewer are "
                   "quicker (--threads=1)")

    @contextlib.contextmanager
    def clock_stopped(self):
        """Around what is no part of a step's time, such as saving and evaluating."""
        begin = time.perf_counter()
        yield
        self.began += time.perf_counter() - begin

    def add_passes(self, passes):
        """Count one forward. passes: that each token took, (B,T), or None without halting."""
        if passes is not None:
            most = self.model.config.ponder_steps + 1
            shares = [(passes > k).float().mean() for k in range(most)]
            self.passes.append(torch.stack(shares))                     # (most,)

    def step(self, step, loss, norm, lr, saved):
        """
        Count a step that is done. Of every log_interval-th say so, of one after long silence, of
        the first in this process, whose time is another one: it compiles; and of one that was
        saved, as the last is, so that a run goes on behind a line.
        """
        self.losses.append(loss)
        s = self.settings
        due = self.first or saved or step % s.log_interval == 0
        self.first = False
        if not due and not self.silent():
            return
        now = time.perf_counter()
        seconds = (now - self.began) / len(self.losses)
        loss = mean_loss(self.losses)   # what is trained on: with halting's term
        tokens, rate = step * s.batch_tokens, s.batch_tokens / seconds
        mfu, shares = self.mfu(rate), self.shares()
        left = round((s.max_steps - step) * seconds)
        words = [
            f"step {step:>5}/{s.max_steps}",
            f"{tokens / 1e6:8.2f}M tokens",
            f"loss {loss:.4f}",
            f"lr {lr:.2e}",
            f"grad norm {norm:.2f}",
            f"{seconds * 1e3:.0f} ms",
            f"{rate:,.0f} tokens/s",
            f"MFU {mfu:.1%}" if mfu else '',
            f"{sum(shares):.2f} passes ({' '.join(f'{p:.2f}' for p in shares)})" if shares else '',
            f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left",
        ]
        self.say(' | '.join(word for word in words if word), step=step, tokens=tokens,
                 flops=tokens * self.flops, loss=loss, lr=lr, grad_norm=norm, ms=seconds * 1e3,
                 tokens_per_second=rate, mfu=mfu, passes=shares)
        self.began, self.losses = now, []

    @property
    def skips(self):
        """Whether tokens that stopped are not computed, so that flops_per_token says the most."""
        return self.model.config.halting == 'router'

    def mfu(self, rate):
        """The share of the GPUs' peak that so many tokens per second need; None if not known."""
        if self.device.type != 'cuda' or self.skips:
            return None
        peak = peak_flops(torch.cuda.get_device_name(self.device))
        return rate * self.flops / (peak * self.ranks.world) if peak else None

    def shares(self):
        """Shares of this rank's tokens in passes 1, 2, .. since the last line; or None."""
        if not self.passes:
            return None
        mean = torch.stack(self.passes).mean(0)                         # (ponder_steps + 1,)
        self.passes = []
        return mean.tolist()

    # ---- evaluations

    def evaluation(self, step, loss, passes, meta, exam, autocast):
        """
        Say what Trainer.evaluate found. Of a made task only the answers count, and PROBLEMS of its
        exam are asked. meta: the data's description. autocast: makes the context that the model
        runs in.
        """
        if self.ranks.rank > 0:
            return
        if not self.checked:
            with torch.compiler.set_stance('force_eager'):     # it has lengths of its own
                check_pieces(self.model)
            self.checked = True
        s = self.settings
        per_byte, unit = in_bytes(loss, meta, exam)
        text = f"step {step}: validation loss {loss:.4f} {unit}"
        if s.eval_only:
            folder = s.out_dir if s.init_from == 'resume' else s.init_from
            text = f"{folder} on {s.data_dir}, {text}"
        if passes:
            text += f", {passes:.3f} passes per token"
        right = None
        if exam is not None:
            right, words = self.ask(exam, autocast)
            text += f", {words}"
        self.say(text, step=step, tokens=step * s.batch_tokens, val_loss=loss,
                 val_nats_per_byte=per_byte, val_passes=passes, val_right=right)

    def ask(self, exam, autocast):
        """(the share of right answers to PROBLEMS of an exam, the same in words)."""
        with autocast(), torch.compiler.set_stance('force_eager'):  # lengths of all kinds
            self.outcomes = answer_problems(self.model, exam, PROBLEMS)
        asked, right = len(self.outcomes), sum(outcome.right for outcome in self.outcomes)
        words = f"{right} of {asked} answers right"
        if asked < PROBLEMS:
            words += " (it has no more questions that differ)"
        return right / asked, words

    def examples(self, data, meta, autocast):
        """
        After the last evaluation: print some of the problems of a made task that it asked, or how
        the model goes on with a piece of the validation text. data: its Windows.
        """
        if self.ranks.rank > 0:
            return
        if self.outcomes:
            print_answers(self.outcomes)
            rows = [(one.question, one.answer, one.text, one.right) for one in self.outcomes]
            if self.tracker:
                self.tracker.show('answers', ('question', 'answer', 'of the model', 'right'), rows)
            return
        with autocast(), torch.compiler.set_stance('force_eager'):
            text = print_sample(self.model, data, meta['tokenizer'], self.settings)
        if self.tracker and text:
            self.tracker.show('sample', ('validation text <|model|> what it makes of it',),
                              [(text,)])


def mean_loss(losses):
    """Of the steps that were not skipped, whose loss is finite; NaN if all were."""
    return fmean([loss for loss in losses if math.isfinite(loss)] or [math.nan])


def without_nan(record):
    """{name: value} with None for each number that is not finite: JSON has no such number."""
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()}


def in_bytes(loss, meta, exam):
    """
    (nats per byte, which can be compared between tokenizers; the unit of the loss, and for a text
    what it is per byte).
    """
    if exam is not None:
        return loss, "nats per answer character"    # a character is a byte there
    per_byte = loss * meta['val']['tokens'] / meta['val']['bytes']
    bits = per_byte / math.log(2)
    # of other tokens than bytes the windows may hold more or fewer bytes than the whole set
    about = '' if meta['tokenizer'] == 'byte' else 'about '
    return per_byte, f"nats per token, {about}{per_byte:.4f} nats ({bits:.3f} bits) per byte"


def lacks_evaluation(folder, step):
    """Whether log.jsonl does not end with the evaluation after this step: the run was killed."""
    *_, line = [{}, *read_lines(os.path.join(folder, 'log.jsonl'))]
    return line.get('step') != step or 'val_loss' not in line


def print_sample(model, data, tokenizer, settings):
    """
    Print a piece of the validation text, from its Windows, and how the model goes on; returns both
    as one text, or None.
    """
    try:
        tokenizer = get_tokenizer(tokenizer)
    except UserError as error:  # a vocabulary that has to be fetched; the run is complete
        print(f"no sample: {error}", file=sys.stderr)
        return None
    without_cudnn_attention()
    device = model.wte.weight.device
    window, _ = data.get([data.n // 2], device)                         # (1,T)
    prompt = window[:, :max(1, data.T // 4)]
    out = generate(model, prompt, settings.sample_tokens, temperature=0.7, seed=settings.seed)
    tokens = out[0].tolist()
    given = tokenizer.decode(tokens[:prompt.size(1)])
    new = tokenizer.decode(tokens[prompt.size(1):])
    text = f'{given}<|model|>{new}'
    title = f"{'-' * 40} validation text <|model|> what the model makes of it {'-' * 40}"
    print(title, for_terminal(text), '-' * len(title), sep='\n')
    return text


def print_answers(outcomes):
    """Print some problems of a made task, and what the model answered."""
    print('-' * 40, 'problems, and what the model answers', '-' * 40)
    for outcome in outcomes[::max(1, len(outcomes) // 8)]:
        mark = 'right' if outcome.right else f'wrong: {outcome.answer}'
        print(f"{outcome.question}{for_terminal(outcome.text)}   {mark}")
