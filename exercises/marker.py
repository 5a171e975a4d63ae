"""
Marks folders of exercises: `python exercises/check.py FOLDER ..` runs this.

Each file runs in a process of its own (attempt.py), for as many seconds as it is given. There the
part above the check is the student's and the check is this project's. A part counts if two things
come back: the word that the check let it pass, behind letters which that process was told at its
start; and the numbers the check looked at, which must be those of a right answer (answers.py).
These are computed here, where no student's code runs, and the inputs are drawn anew in each run. So
leaving early, printing "right", or changing torch or check.py gains nothing: without the right
numbers nothing counts. (This project's own exercises are read here too: mark those of others with
an unchanged copy.)

What is fenced off: the clock, the processor's time, memory and files written, by limits of the
system; network, other programs, files outside of its temporary folder and those with the answers,
by an audit hook of Python; and the network once more, where `unshare` is permitted. This stops what
happens by accident and what students try; borrowed.py refuses the ways into the checking program.
It is no prison: a determined attacker gets out. Mark strangers in a container.
"""
import functools
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

import borrowed
import check
import torch
from check import HERE, NAMES, UserError

from engine.files import on_disk, whole

A_DAY = 86_400     # seconds
AT_ONCE = 4        # at most so many processes side by side
OUTPUT = 4_000     # characters of what a student prints that are kept
SENTENCE = 1_000   # characters of what is said
LARGEST = 2 ** 20  # bytes of a file
KEPT = ('PATH', 'LD_LIBRARY_PATH', 'LANG', 'SYSTEMROOT')  # of the environment
NUMBERS_WRONG = ("the check let this pass, but the numbers that came back are not those of a right "
                 "answer: does the file change torch, or the check?")
running = set()  # processes, so that Ctrl-C can end them


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
    words: str = ''   # the first thing that is not right yet
    seconds: float = 0.0
    output: str = ''  # the beginning of what it printed
    points: int = field(init=False)

    def __post_init__(self):
        self.points = sum(part.right for part in self.parts)

    @property
    def right(self):
        return bool(self.parts) and self.points == len(self.parts)


# -------------------------------------------------------------------------------------------------
# one file

def mark_file(path, truth, seed, seconds):
    """
    The Mark of a student's file, whose name says which exercise it is.
    truth: what `right_numbers` gave for this seed.
    """
    exercise = os.path.basename(path)[:-3]
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        letters = secrets.token_hex(16)
        ended = run(path, letters, seed, seconds, folder)
        took = time.monotonic() - begin
        results = read(os.path.join(folder, 'results'), 2 * 2 ** 20)
        output = printable(read(os.path.join(folder, 'output'), OUTPUT), keep='\n')

    said = outcomes(results, letters)
    parts = []
    for name, numbers in truth.items():
        outcome = said.get(name)
        if outcome is None:
            parts.append(Part(name, False, ended or "no result came back"))
        elif outcome.right and not agree(outcome.notes, numbers):
            parts.append(Part(name, False, NUMBERS_WRONG))
        else:
            parts.append(Part(name, outcome.right, printable(outcome.words)[:SENTENCE]))
    words = next((part.words for part in parts if not part.right), '')
    return Mark(os.path.dirname(path), exercise, parts, words, round(took, 1), output)


def run(path, letters, seed, seconds, folder):
    """
    Run attempt.py on a copy of the student's part of the file; its stdout becomes `results` in the
    folder, its stderr `output`. Returns how it ended, in words, '' if as it should.
    """
    work = os.path.join(folder, 'work')
    os.mkdir(work)
    copy = os.path.join(work, os.path.basename(path))
    try:
        with open(copy, 'w', encoding='utf-8') as f:
            f.write(students_part(path))
    except (OSError, ValueError) as error:
        return f"the file cannot be read: {error}"
    exercise = os.path.basename(path)[:-3]
    command = [*fence(), sys.executable, os.path.join(HERE, 'attempt.py'), exercise,
               ','.join(wanted(exercise)), copy, str(seed), str(seconds)]
    with (open(os.path.join(folder, 'results'), 'wb') as results,
          open(os.path.join(folder, 'output'), 'wb') as output):
        process = subprocess.Popen(
            command, cwd=work, env=environment(work), stdin=subprocess.PIPE, stdout=results,
            stderr=output, start_new_session=True)
        running.add(process)
        try:
            process.communicate(f'{letters}\n'.encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"no result after {seconds} s: is there a loop that does not end?"
        finally:
            kill(process)
            running.discard(process)
    return how_it_ended(process.returncode)


def students_part(path):
    """
    What the student wrote, as text. It is read outside of the fence, so ValueError if it is no file
    of the student's, or so large that reading it costs something.
    """
    if os.path.islink(path) or not os.path.isfile(path):
        raise ValueError("it is a link, a folder or a device. Hand in the file itself")
    size = os.path.getsize(path)
    if size > LARGEST:
        raise ValueError(f"it has {size:,} bytes, and an exercise has about 10,000. Hand in the "
                         "code alone, without data")
    text = borrowed.students_part(path)
    if '\0' in text:
        raise ValueError("it is no text in UTF-8. Save it as that, in a plain text editor")
    return text


def kill(process):
    """End a process and whatever it started."""
    if os.name == 'posix':
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    else:
        process.kill()
    process.wait()


def how_it_ended(status):
    if status == 0:
        return "the file ends the program before its check is done: is there an exit()?"
    if status in (-9, -24, 128 + 9, 128 + 24):  # SIGKILL and SIGXCPU, perhaps by way of a shell
        return "the system ended it: did it take too much memory, or time?"
    return f"the file ends the program before its check is done, with status {status}"


def environment(work):
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    path = os.pathsep.join(filter(None, sys.path))  # torch may lie where only this process looks
    return {**kept, 'HOME': work, 'TMPDIR': work, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': path,
            'PYTHONUTF8': '1', 'PYTHONDONTWRITEBYTECODE': '1', 'CUDA_VISIBLE_DEVICES': ''}


@functools.cache
def fence():
    """Words before a command: without network and in a world of its own, if that is permitted."""
    words = ['unshare', '--map-root-user', '--net', '--pid', '--fork', '--kill-child']
    if shutil.which('unshare') is None:
        return []
    done = subprocess.run([*words, 'true'], capture_output=True)
    return words if done.returncode == 0 else []


def read(path, limit):
    """The beginning of a file as text, '' if there is none."""
    try:
        with open(path, 'rb') as f:
            return f.read(limit).decode('utf-8', 'replace')
    except OSError:
        return ''


def printable(text, keep=''):
    """Without control characters: what students write is shown on a teacher's terminal."""
    return ''.join(char if char.isprintable() or char in keep else ' ' for char in text)


def outcomes(results, letters):
    """{part: Outcome} of the lines that begin with these letters and are as attempt.py writes."""
    found = {}
    for line in results.splitlines():
        if not line.startswith(letters):
            continue
        try:
            said = json.loads(line[len(letters):])
            outcome = check.Outcome(said['right'] is True, str(said['words']), said['notes'])
            found.setdefault(str(said['part']), outcome)
        except (ValueError, LookupError, TypeError, RecursionError):
            continue
    return found


# -------------------------------------------------------------------------------------------------
# what is right

def wanted(exercise):
    """The names of what a student writes in it."""
    from answers import ANSWERS
    return ANSWERS[exercise]


def right_numbers(exercise, seed):
    """
    {part: the notes of a right answer}. UserError if the project's own file is broken or refuses a
    right answer.
    """
    path = os.path.join(HERE, exercise + '.py')
    try:
        solved = check.solved(exercise, check.load(path), seed)
    except (Exception, SystemExit) as error:
        raise UserError(f"{path}: {check.explain(error, path)} Mark with an unchanged copy")
    for part, outcome in solved.items():
        if not outcome.right:
            raise UserError(f"{path} refuses a right answer: model.py or engine/ is not what it is "
                            f"for. Mark with an unchanged copy of the project ({outcome.words})")
    return {part: outcome.notes for part, outcome in solved.items()}


def agree(got, want):
    """Whether two lists of lists of numbers are the same, up to rounding."""
    try:
        if [len(one) for one in got] != [len(one) for one in want]:
            return False
        return all(check.same(torch.tensor(a, dtype=torch.float64), torch.tensor(b).double())
                   for a, b in zip(got, want))
    except (TypeError, ValueError, RuntimeError):  # not lists of numbers
        return False


# -------------------------------------------------------------------------------------------------
# folders

def main(argv):
    """See check.py. Exit status 0 if all that was handed in is right, else 1."""
    if argv in (['-h'], ['--help']):
        print(check.__doc__.strip())
        return
    options = {'seconds': '60', 'seed': str(secrets.randbelow(2 ** 31)), 'json': ''}
    folders = []
    for word in argv:
        name, _, value = word.removeprefix('--').partition('=')
        if not word.startswith('--'):
            folders.append(os.path.dirname(os.path.join(word, '')))  # anna/ is anna
        elif name in options and value:
            options[name] = value
        else:
            raise UserError(f"{word}: there are --seconds=60, --seed=N and --json=FILE")
    seconds = number('seconds', options['seconds'], least=1, most=A_DAY)
    seed = number('seed', options['seed'], least=0)
    places = exercises_in(folders or [HERE])
    if options['json']:
        check_place(options['json'])

    marks = mark_names(places, seed, seconds)
    if len(folders) > 1:
        print_table(folders, marks)
    else:
        print_sentences(marks)
    if options['json']:
        write_json(options['json'], seed, marks)
    sys.exit(0 if all(one.right for one in marks) else 1)


def number(name, text, least, most=2 ** 63 - 1):
    if not text.isdecimal() or len(text) > 19 or not least <= int(text) <= most:
        raise UserError(f"--{name}={text} should be a whole number from {least} to {most}")
    return int(text)


def check_place(path):
    """UserError if the file cannot be written: now, and not when all is marked."""
    with on_disk(path, 'written'):
        open(path + '.tmp', 'w').close()
        os.remove(path + '.tmp')


def exercises_in(folders):
    """
    (folder, exercise) of each that is there, in their order. UserError if there is none; a folder
    without any is told, and stops nobody else.
    """
    for folder in folders:
        if not os.path.isdir(folder):
            raise UserError(f"{folder}: there is no such folder")
    places = [(folder, name) for folder in folders for name in handed_in(folder)]
    if not places:
        raise UserError(no_exercise(folders[0]))
    for folder in folders:
        if not handed_in(folder):
            print(no_exercise(folder), file=sys.stderr)
    return places


def handed_in(folder, names=NAMES):
    """Those of the exercises that are in a folder, be it as something that cannot be read."""
    return [name for name in names if os.path.lexists(os.path.join(folder, name + '.py'))]


def no_exercise(folder):
    found = ', '.join(sorted(os.listdir(folder))[:8]) or 'nothing'
    words = f"{folder}: there is no exercise in it, such as {NAMES[0]}.py; there is {found}"
    return printable(words)


def mark_names(places, seed, seconds):
    """A Mark for each (folder, exercise)."""
    names = sorted({name for _, name in places})
    truth = {name: right_numbers(name, seed) for name in names}
    with ThreadPoolExecutor(min(AT_ONCE, cores())) as pool:
        waiting = []
        for folder, name in places:
            path = os.path.join(folder, name + '.py')
            waiting.append(pool.submit(mark_file, path, truth[name], seed, seconds))
        try:
            return [one.result() for one in waiting]
        except BaseException:  # Ctrl-C: neither begin nor finish the others
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                kill(process)
            raise


def stop_as_by_ctrl_c():
    """What ends this process by the system's default ends what it started, too."""
    for name in ('SIGTERM', 'SIGHUP'):  # the latter: the terminal was closed
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


def cores():
    """How many this process may use."""
    if hasattr(os, 'sched_getaffinity'):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
    width = max(map(len, folders))
    print(' ' * width, *NAMES)
    for folder in folders:
        row = [points.get((folder, name), '-').rjust(len(name)) for name in NAMES]
        print(printable(folder).ljust(width), *row)


def write_json(path, seed, marks):
    rows = [{**asdict(one), 'right': one.right, 'of': len(one.parts)} for one in marks]
    with on_disk(path, 'written'), whole(path) as f:
        json.dump({'seed': seed, 'marks': rows}, f, indent=1)
        f.write('\n')
