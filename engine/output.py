"""
What a run leaves behind, and what ends it early.

    stop = Stop(ranks, device, max_seconds)
    output = Output(ranks, stop)
    output.open(out_dir, settings, resumed)
    with stop.on_signals():
        output.say("step 1", step=1, loss=5.6)      a line to read, and one of log.jsonl
        stop.asked()                                is the run to save and end? All ranks agree
    output.close()
"""

import contextlib
import json
import math
import os
import signal
import sys
import time

import torch

from engine.checkpoint import CHECKPOINTS
from engine.errors import UserError
from engine.files import alone, plain_file, whole
from engine.hardware import stop_signals


class Stop:
    """Whether a run is to save and end before its last step: a signal, or no time left."""

    def __init__(self, ranks, device, max_seconds=None):
        self.ranks = ranks
        self.device = device
        self.deadline = time.monotonic() + (max_seconds or math.inf)
        self.since = 0.0            # when this rank was told to stop; 0: it was not

    def ask(self):
        """Tell this rank to stop. The others hear of it when they call `asked` together."""
        self.since = self.since or time.monotonic()

    def asked(self):
        """Whether any rank was told to stop, or is out of time; all ranks get the same answer."""
        stop = self.since > 0 or time.monotonic() > self.deadline
        if self.ranks.world == 1:
            return stop
        return self.ranks.mean(torch.tensor([float(stop)], device=self.device)) > 0

    def hear(self, number, frame):
        """
        The first signal asks for a stop. A second one ends the process, unless it is the first
        again, passed on by torchrun.
        """
        if self.since and time.monotonic() - self.since > 0.5:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.ask()

    @contextlib.contextmanager
    def on_signals(self):
        """Around the part of a run that signals may ask to stop."""
        before = {number: signal.signal(number, self.hear) for number in stop_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Output:
    """What rank 0 prints and writes to log.jsonl; the other ranks are silent."""

    def __init__(self, ranks, stop):
        self.silent = ranks.rank > 0
        self.stop = stop
        self.log = None             # log.jsonl, once it is open
        self.broken = None          # why a line could not be written
        self.closing = contextlib.ExitStack()

    def say(self, text, **record):
        """
        Print `text`; `record` becomes a line of log.jsonl, if that is open. If one of them cannot
        be written, the run saves and stops.
        """
        if self.silent:
            return
        self.write(sys.stdout, text)
        if record:
            finite = {name: None if is_nan(value) else value for name, value in record.items()}
            self.write(self.log, json.dumps(finite))

    def write(self, file, line):
        if file is None:
            return
        try:
            print(line, file=file, flush=True)
        except OSError as error:
            self.stop.ask()
            self.broken = (f"{file.name}: cannot be written ({error.strerror}); see to it, and go "
                           "on with --init_from=resume")

    def open(self, folder, settings, resumed):
        """
        Make the run's folder and lock out other runs; write settings.json, open log.jsonl.
        UserError if the folder cannot be written, or holds a checkpoint and is not `resumed`.
        """
        if self.silent:
            return
        try:
            self.closing.enter_context(alone(folder))
            if not resumed:
                refuse_checkpoints(folder)
            with whole(os.path.join(folder, 'settings.json')) as f:
                json.dump(settings, f, indent=1)
            log = plain_file(os.path.join(folder, 'log.jsonl'), devices=True)
            self.log = self.closing.enter_context(open(log, 'a+'))
            end_torn_line(self.log)
        except OSError as error:
            raise UserError(f"out_dir={folder}: cannot be written ({error.strerror}); choose "
                            "another --out_dir") from None

    def close(self):
        """Close the log and let others have the folder."""
        with contextlib.suppress(OSError):  # what cannot be written was reported by `write`
            self.closing.close()


def is_nan(value):
    """Whether it is a number that JSON has not."""
    return isinstance(value, float) and not math.isfinite(value)


def refuse_checkpoints(folder):
    """UserError if the folder holds another run's checkpoint."""
    if any(os.path.exists(os.path.join(folder, name)) for name in CHECKPOINTS):
        raise UserError(f"{folder} holds a checkpoint: go on with --init_from=resume, or choose "
                        "another --out_dir")


def end_torn_line(log):
    """End the last line of a log, if a full disk or a kill cut it short."""
    log.seek(max(0, log.tell() - 1))
    if log.read(1) not in ('', '\n'):
        log.write('\n')
