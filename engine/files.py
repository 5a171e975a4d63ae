"""
Files: complete or absent at any moment, and folders that one process at a time writes to.
"""

import contextlib
import os

from engine.shards import alone, checksum, on_disk  # noqa: F401, their place is here


@contextlib.contextmanager
def whole(path, mode='w', before=None):
    """
    A file to write, which becomes `path` when all of it is on the disk; `before`, if given, is
    called just before that. After a failure `path` is as it was.
    """
    try:
        with open(path + '.tmp', mode) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
    except BaseException:  # on a full disk, half of one would be in the way
        with contextlib.suppress(OSError):
            os.remove(path + '.tmp')
        raise
    if before is not None:
        before()
    os.replace(path + '.tmp', path)
