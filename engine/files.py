"""
Files and folders that are safe while others, or a full disk, get in the way.

    with whole(path) as f:            a file that becomes `path` when all of it is written
    with alone(folder):               keeps other processes out of a folder
    with on_disk(path, 'read'):       what the disk refuses is a UserError that names the path
    open(plain_file(path))            no pipe, which might never answer, no device, no folder
    checksum(path)                    SHA-256
"""

import contextlib
import hashlib
import os
import stat

from engine.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@contextlib.contextmanager
def whole(path, mode='w', before=None):
    """
    A file to write, which becomes `path` when all of it is on the disk. `before`, if given, is
    called just before that. After a failure `path` is as it was.
    """
    unfinished = plain_file(path + '.tmp')
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


def plain_file(path, devices=False):
    """
    The path itself, if it is that of a file, or of nothing; UserError for a folder, and for what
    might never end: a pipe, a socket or a device. devices: these are fine, they are only written.
    """
    kinds = {stat.S_IFDIR: 'a folder', stat.S_IFIFO: 'a pipe', stat.S_IFSOCK: 'a socket'}
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):       # whoever opens it will say so
        return path
    if not stat.S_ISREG(mode) and not (devices and stat.S_ISCHR(mode)):
        kind = kinds.get(stat.S_IFMT(mode), 'a device')
        raise UserError(f"{path}: {kind}, where a file should be")
    return path


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
    Windows and some network disks have none.
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
    with open(plain_file(path), 'rb') as f:
        while block := f.read(2 ** 20):
            digest.update(block)
    return digest.hexdigest()
