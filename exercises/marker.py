"""
Marks exercises: `python exercises/check.py FOLDER [FOLDER ..]` runs this.

Each file runs in a process of its own (attempt.py), on copies of the file and of the project, with
limits of time, memory and output: what it does costs its own mark. There the part above the check
is the student's, and the check is this project's. A part counts if the check let it pass, and if
the numbers that the check looked at are those of a right answer. These are computed here, where no
student's code runs, and the inputs are drawn anew in each run: leaving early, printing "right", or
changing torch gains nothing.

It is no prison, and the answers are public: mark strangers in a container.
"""
import contextlib
import glob
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Optional

import torch

import check
from check import HERE, NAMES, UserError
from configurator import build, check_range, read
from engine.files import one_line, table

ROOT = os.path.dirname(HERE)
FILES = 'model.py', 'configurator.py', 'engine/*.py', 'exercises/*.py'     # that it takes to mark
AT_ONCE = 4        # at most so many processes side by side
OUTPUT = 4_000     # characters of what a student prints that are kept
SENTENCE = 1_000   # characters of what is said
running = set()    # the processes of students, which Ctrl-C does not reach
NUMBERS_WRONG = ("the check let this pass, but the numbers that came back are not those of a right "
                 "answer: does the file change torch, or the check?")


@dataclass
class MarkSettings:
    """how to mark"""
    seconds: int = 60               # that one file may take
    seed: Optional[int] = None      # of shapes and numbers (None: new ones in each run)
    json: Optional[str] = None      # a file for points per part, seconds, sentences, output

    def __post_init__(self):
        check_range(self, 1, 86_400, 'seconds')
        check_range(self, 0, 2 ** 31 - 1, 'seed')
        if self.seed is None:
            self.seed = secrets.randbelow(2 ** 31)


@dataclass
class Part:
    name: str
    right: bool
    words: str   # what is not right yet


@dataclass
class Mark:
    """What came of one student's file."""
    folder: str
    exercise: str
    parts: list       # [Part]
    seconds: float = 0.0
    output: str = ''  # the beginning of what it printed
    words: str = field(init=False)  # the first thing that is not right yet
    points: int = field(init=False)
    right: bool = field(init=False)

    def __post_init__(self):
        self.points = sum(part.right for part in self.parts)
        self.right = self.points == len(self.parts)
        self.words = next((part.words for part in self.parts if not part.right), '')


# -------------------------------------------------------------------------------------------------
# one file

def mark_file(path, truth, seed, seconds):
    """
    The Mark of a student's file, whose name says which exercise it is.
    truth: what `right_numbers` gave for this seed.
    """
    exercise = os.path.basename(path)[:-3]
    begin = time.monotonic()
    with (contextlib.suppress(RecursionError),  # of cleaning up folders in folders in folders
          tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
          tempfile.TemporaryFile() as results, tempfile.TemporaryFile() as printed):
        ended = run(exercise, path, seed, seconds, folder, results, printed)
        printed.seek(0)
        output = printed.read(4 * OUTPUT).decode('utf-8', 'replace')[:OUTPUT]
        said = outcomes(results)

    parts = []
    for name, numbers in truth.items():
        outcome = said.get(name, check.Outcome(False, ended))
        if outcome.right and not agree(outcome.notes, numbers):
            outcome = check.Outcome(False, NUMBERS_WRONG)
        parts.append(Part(name, outcome.right, one_line(outcome.words)[:SENTENCE]))
    took = round(time.monotonic() - begin, 1)
    return Mark(os.path.dirname(path), exercise, parts, took, output)


def run(exercise, path, seed, seconds, folder, results, printed):
    """
    Run the attempt.py of a copy of the project on a copy of the file, both in the folder. `results`
    and `printed` are open files, which nobody can remove. Returns how it ended, in words, if no
    result came back.
    """
    program = copy_project(folder)
    here, copy = os.path.join(folder, 'here'), os.path.join(folder, exercise + '.py')
    os.mkdir(here)
    try:
        shutil.copyfile(path, copy)
    except OSError as error:
        return f"the file cannot be read ({error.strerror})"
    command = [sys.executable, program, exercise, copy, str(seed), str(seconds)]
    if os.name == 'posix':      # whoever ends the parent of this process ends a shell, and not us
        command = ['sh', '-c', '"$@"; exit $?', 'sh', *command]
    process = subprocess.Popen(command, cwd=here, stdin=subprocess.DEVNULL, stdout=results,
                               stderr=printed, env={**os.environ, 'PYTHONUTF8': '1'},
                               start_new_session=True)
    running.add(process)
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"no result after {seconds} s: is there a loop that does not end?"
    finally:
        end(process)
        running.remove(process)
    if status in (128 + 9, 128 + 24):   # as the shell tells of SIGKILL and SIGXCPU
        return "the system ended it: did it take too much memory, or time?"
    return f"the file ends the program before its check is done, with status {status}"


def copy_project(folder):
    """Copy what it takes to mark there; returns the path of its attempt.py."""
    for pattern in FILES:
        for path in glob.glob(pattern, root_dir=ROOT):
            copy = os.path.join(folder, path)
            os.makedirs(os.path.dirname(copy), exist_ok=True)
            shutil.copyfile(os.path.join(ROOT, path), copy)
    return os.path.join(folder, 'exercises', 'attempt.py')


def end(process):
    """End it, and what it started and left behind."""
    with contextlib.suppress(ProcessLookupError):   # it ended, and left nothing behind
        os.killpg(process.pid, signal.SIGKILL) if hasattr(os, 'killpg') else process.kill()
    process.wait()


def outcomes(results):
    """{part: Outcome} of the lines that are as attempt.py writes them."""
    found = {}
    results.seek(0)
    with contextlib.suppress(Exception):  # whatever a student's process wrote there
        for line in results:
            part, outcome = json.loads(line)
            found[part] = check.Outcome(**outcome)
    return found


def right_numbers(exercise, seed):
    """{part: the notes of a right answer}. UserError if the project's own file refuses it."""
    path = os.path.join(HERE, exercise + '.py')
    solved = check.solved(exercise, check.load(path), seed)
    for outcome in solved.values():
        if not outcome.right:
            raise UserError(f"{path} refuses a right answer: model.py is not what it is for. Mark "
                            f"with an unchanged copy of the project ({outcome.words})")
        if not outcome.notes:
            raise UserError(f"{path}: a part of it records no numbers, and an answer that changes "
                            "torch would be right: hand them to compare() or record() of check.py")
    return {part: outcome.notes for part, outcome in solved.items()}


def agree(got, want):
    """Whether two lists of lists of numbers are the same, up to rounding; got may be anything."""
    with contextlib.suppress(Exception):
        return [len(one) for one in got] == [len(one) for one in want] and all(
            check.same(torch.tensor(a).double(), torch.tensor(b).double())
            for a, b in zip(got, want))
    return False


# -------------------------------------------------------------------------------------------------
# folders

def main(argv):
    """See check.py. Exit status 0 if all that was handed in is right, else 1."""
    given, folders = read(argv, check.__doc__, MarkSettings, files=False)
    s = build(MarkSettings, given)
    folders = [os.path.normpath(folder) for folder in folders]
    places = exercises_in(folders or [HERE])
    if s.json:
        open(s.json, 'a').close()  # an error now, and not when all is marked

    marks = mark_names(places, s.seed, s.seconds)
    if len(folders) > 1:
        print_table(folders, marks)
    else:
        print_sentences(marks)
    if s.json:
        with open(s.json, 'w', encoding='utf-8') as f:
            json.dump({'seed': s.seed, 'marks': [asdict(one) for one in marks]}, f, indent=1)
    sys.exit(0 if all(one.right for one in marks) else 1)


def exercises_in(folders):
    """
    (folder, exercise) of each that is there, in their order. UserError if there is none, or if one
    of the folders is not there.
    """
    for folder in folders:
        if not os.path.isdir(folder):
            raise UserError(f"{folder}: no such folder")
    places = [(folder, name) for folder in folders for name in handed_in(folder)]
    if not places:
        raise UserError(f"{', '.join(folders)}: no folder with an exercise in it, such as "
                        f"{NAMES[0]}.py")
    return places


def handed_in(folder, names=NAMES):
    """Those of the exercises that are in a folder."""
    return [name for name in names if os.path.isfile(os.path.join(folder, name + '.py'))]


def mark_names(places, seed, seconds):
    """A Mark for each (folder, exercise)."""
    truth = {name: right_numbers(name, seed) for name in {name for _, name in places}}
    with ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1)) as pool:
        waiting = []
        for folder, name in places:
            path = os.path.join(folder, name + '.py')
            waiting.append(pool.submit(mark_file, path, truth[name], seed, seconds))
        try:
            return [one.result() for one in waiting]
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                end(process)
            raise


def print_sentences(marks):
    """One line per exercise."""
    for one in marks:
        print(f"{one.exercise:16} {'right' if one.right else 'not yet: ' + one.words}")
    absent = [name for name in NAMES if name not in {one.exercise for one in marks}]
    more = f"; not in the folder: {', '.join(absent)}" if absent else ''
    print(f"{sum(one.right for one in marks)} of {len(marks)} right{more}")


def print_table(folders, marks):
    """One line per folder: the points of each exercise, `-` where there is no file."""
    points = {(one.folder, one.exercise): f"{one.points}/{len(one.parts)}" for one in marks}
    rows = [[folder, *(points.get((folder, name), '-') for name in NAMES)] for folder in folders]
    print(table(['', *NAMES], rows))
