"""
Files that are whole while others, or a full disk, get in the way; and how a program ends: one line
for what the user can mend, and an exit status that says so.

    raise UserError("data/mine: no data set; make ..")    where, what is wrong, and what to do
    run(main)                       main(argv); a UserError, or the disk's, becomes that line
    with whole(path) as f:          a file that becomes `path` when all of it is written
    with alone(folder):             keeps other processes out of a folder
    with on_disk(path, 'read'):     what the disk refuses is a UserError that names the path
    append_line(path, record)       a line of a .jsonl file; read_lines(path): all of them
    checksum(path)                  SHA-256
    typed(word, ..)                 words of a command, as a shell takes them
    table(header, rows)             for a terminal, or a page
"""

import contextlib
import errno
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class UserError(Exception):
    """Something the user can mend."""


def one_line(text):
    """Text on one line, without characters that a terminal would obey."""
    words = ' '.join(str(text).split())
    return ''.join(c if c.isprintable() else '?' for c in words)


# all control characters but tab and newline
OBEYED = dict.fromkeys({*range(32), *range(127, 160)} - {ord('\t'), ord('\n')}, '\ufffd')


def for_terminal(text):
    """Text to print: for a terminal without the characters that it would obey, else as it is."""
    return text.translate(OBEYED) if sys.stdout.isatty() else text


def typed(*words):
    """Words of a command as they are typed: a path with a space in it has quotes around it."""
    return subprocess.list2cmdline(words) if os.name == 'nt' else shlex.join(words)


def run(main):
    """
    Call main(argv), which returns the exit status or None, 0. What is wrong with the input, a file
    or the disk becomes one line and exit status 2; Ctrl-C is 130, and output that nobody reads any
    more (`| head`) is 141, as for other programs.
    """
    try:
        if hasattr(sys.stdout, 'reconfigure'):
            sys.stdout.reconfigure(errors='replace')  # a terminal that cannot show a character
        status = main(sys.argv[1:]) or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        leave(130)
    except BrokenPipeError:
        leave(141)
    except (UserError, OSError) as error:
        say(error)
        leave(2)
    leave(status)


def say(error):
    """The error's text on stderr, as one line; with several ranks it says which one found it."""
    rank = os.environ.get('RANK')  # set by torchrun
    who = 'error:' if rank is None else f'error: rank {rank}:'
    if rank not in (None, '0'):
        time.sleep(5)  # rank 0 says the same, or torchrun ends this one before it repeats it
    if os.strerror(errno.EMFILE) in str(error):
        error = f"{error}; allow more with `ulimit -n 4096`, and give the same command again"
    print(who, one_line(error), file=sys.stderr)


def leave(status):
    """Exit. What cannot be printed any more (the reader left, the disk is full) is lost."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if 'RANK' in os.environ:    # set by torchrun: gloo's threads are there until the end, and now
        os._exit(status)        # and then Python's own way out would abort under them
    sys.exit(status)


@contextlib.contextmanager
def whole(path, mode='w', before=None):
    """
    A file to write, which becomes `path` when all of it is on the disk. `before`, if given, is
    called just before that. After a failure `path` is as it was.
    """
    unfinished = path + '.tmp'
    try:
        with open(unfinished, mode) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
    except BaseException:  # on a full disk, half of a file would be in the way
        with contextlib.suppress(OSError):
            os.remove(unfinished)
        raise
    if before is not None:
        before()
    os.replace(unfinished, path)


@contextlib.contextmanager
def on_disk(path, action):
    """What the disk refuses inside becomes a UserError that names the path."""
    try:
        yield
    except OSError as error:
        reason = f"cannot be {action} ({error.strerror}); see to it, then try again"
        raise UserError(f"{path}: {reason}") from None


@contextlib.contextmanager
def alone(folder, wait=False):
    """
    Makes `folder` if it is missing, and keeps others who ask for it out. UserError if another
    process has it; with `wait` it is waited for. The lock goes with the process, however that ends.
    Windows and some network disks have none, and on NFS it keeps out this machine's processes only.
    """
    os.makedirs(folder, exist_ok=True)
    if fcntl is None:
        yield
        return
    held = os.open(folder, os.O_RDONLY)
    try:
        lock(held, folder, wait)
        yield
    finally:
        os.close(held)  # which gives the lock back


def lock(held, folder, wait):
    """Lock the open folder, if its disk has locks at all; see `alone`."""
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        theirs = f"{folder}: another process writes here"
        if not wait:
            raise UserError(f"{theirs}; let it finish, or choose another folder") from None
        print(f"{theirs}; waiting for it", flush=True)
        fcntl.flock(held, fcntl.LOCK_EX)
    except OSError:
        pass


def checksum(path):
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with open(path, 'rb') as f:
        while block := f.read(2 ** 20):
            digest.update(block)
    return digest.hexdigest()


def append_line(path, record):
    """Add an object to a .jsonl file, as a line of its own."""
    with open(path, 'a+', encoding='utf-8') as f:
        end_torn_line(f)
        f.write(json.dumps(record) + '\n')


def read_lines(path):
    """The objects of a .jsonl file, none if it is missing; not the half a line of a killed run."""
    if not os.path.exists(path):
        return []
    records = []
    with open(path, encoding='utf-8', errors='replace') as f:
        for line in f:
            with contextlib.suppress(ValueError):
                records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def end_torn_line(file):
    """End the last line of an open .jsonl file, if a full disk or a kill cut it short."""
    file.seek(max(0, file.tell() - 1))
    if file.read(1) not in ('', '\n'):
        file.write('\n')


def same_folder(a, b):
    """Whether two paths are one place, over links, dots and a slash at the end."""
    return os.path.realpath(a) == os.path.realpath(b)


def stamp(path):
    """What tells whether a file was written since; None if it is missing."""
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return found.st_ino, found.st_size, found.st_mtime_ns


def check_whole(stamps):
    """UserError if a file of {path: stamp} was written over since, and not replaced by another."""
    for path, before in stamps.items():
        now = stamp(path)
        if now != before and now and before and now[0] == before[0]:
            raise UserError(f"{path}: written over while it was read; start again when it is whole")


class Progress:
    """Says every ten seconds how far it is, for work that prints its result at the end."""

    def __init__(self):
        self.said = time.monotonic()

    def __call__(self, words):
        if time.monotonic() - self.said > 10:
            print(words, file=sys.stderr, flush=True)
            self.said = time.monotonic()


def table(header, rows):
    """Cells in aligned columns, as a terminal and Markdown show them; floats with 3 decimals."""
    cells = [[f'{v:.3f}' if isinstance(v, float) else str(v) for v in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells)]
    rule = ['-' * width for width in widths]
    lines = []
    for row in [header, rule, *cells]:
        first, *others = row
        padded = [first.ljust(widths[0])] + [c.rjust(w) for c, w in zip(others, widths[1:])]
        lines.append('| ' + ' | '.join(padded) + ' |')
    return '\n'.join(lines)
