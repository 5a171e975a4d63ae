"""
One student's file, checked in a process of its own. Started by marker.py, which says why.

    python attempt.py EXERCISE NAMES FILE SEED SECONDS      a line of random letters on stdin

NAMES, as a,b: what the student is to write. What the student prints goes to stderr. On stdout there
is one line for each part of the exercise: the letters of stdin, then JSON with the part's name and
its Outcome (check.py).
"""
import contextlib
import json
import os
import sys
import types
from dataclasses import asdict

import borrowed
import check

ROOT = os.path.dirname(check.HERE)
MEGABYTE = 2 ** 20
CHANGES = (  # events of Python's audit hooks, each with a path in front
    'os.chmod', 'os.chown', 'os.link', 'os.mkdir', 'os.remove', 'os.rename', 'os.rmdir',
    'os.symlink', 'os.truncate', 'os.utime',
)
OUTSIDE = (  # the beginnings of such events
    'socket.', 'subprocess.', 'os.exec', 'os.fork', 'os.kill', 'os.posix_spawn', 'os.spawn',
    'os.startfile', 'os.system', 'pty.',
)


class Fence:
    """
    An audit hook of Python: the student's code opens no socket, starts no program, changes no file
    outside of `folder`, and reads none that the answers are in.
    """

    def __init__(self, folder):
        self.folder = os.path.realpath(folder)
        venv = [sys.prefix] if within(sys.prefix, ROOT) else []
        self.readable = [self.folder, *venv]  # as far as it is in the project

    def __call__(self, event, args):
        if event.startswith(OUTSIDE):
            raise PermissionError(f"no network and no programs from here ({event})")
        if event in CHANGES and not self.inside(args[0]):
            raise PermissionError(f"no changes outside of your folder ({event} {args[0]})")
        if event == 'open' and isinstance(args[0], (str, bytes)):
            self.check_open(*args)

    def check_open(self, path, mode, flags):
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        if writes and not self.inside(path) and path != os.devnull:
            raise PermissionError(f"no changes outside of your folder (open {path})")
        if within(path, ROOT) and not any(within(path, place) for place in self.readable):
            raise PermissionError(f"the answers are in there ({path})")

    def inside(self, path):
        return within(path, self.folder)


def within(path, folder):
    """Whether the file is in the folder; a file that is open already counts as in it."""
    if isinstance(path, int):
        return True
    real, folder = os.path.realpath(os.fsdecode(path)), os.path.realpath(folder)
    return real.startswith(folder.rstrip(os.sep) + os.sep)


def main(argv):
    name, wanted, path, seed, seconds = argv
    letters = sys.stdin.readline()
    out = separate_stdout()
    exercise = check.load(os.path.join(check.HERE, name + '.py'))
    hide_the_project()
    set_limits(int(seconds))
    sys.addaudithook(Fence(os.getcwd()))

    problem = take_over(exercise, path, wanted.split(','))
    for part, function in exercise.PARTS.items():
        outcome = problem or check.judge(function, path, int(seed))
        out.write(letters.strip() + json.dumps({'part': part, **asdict(outcome)}) + '\n')
        out.flush()


def separate_stdout():
    """What was stdout, as a file; from now on whatever is printed goes to stderr."""
    out = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)
    return out


def hide_the_project():
    """Its modules are loaded; nobody shall find them by their names."""
    for name in list(sys.modules):
        if borrowed.of_the_project(name):
            del sys.modules[name]
    sys.path[:] = [path for path in sys.path if path not in (ROOT, check.HERE, '')]


def set_limits(seconds):
    """Where the system has such limits. They hold for what the process starts, too."""
    try:
        import resource
    except ImportError:  # Windows
        return
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_DATA: 4096 * MEGABYTE,
        resource.RLIMIT_FSIZE: MEGABYTE,
    }
    for limit, value in limits.items():
        _, most = resource.getrlimit(limit)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        with contextlib.suppress(OSError, ValueError):  # macOS does not know all of them
            resource.setrlimit(limit, (value, value))


def take_over(exercise, path, wanted):
    """
    Run the student's part of the file, and put what it defines, as far as it is `wanted`, into the
    exercise. Returns an Outcome if that is impossible.
    """
    given = {name: getattr(exercise, name) for name in getattr(exercise, 'GIVEN', ())}
    words = borrowed.borrowed(path, given)
    if words:
        return check.Outcome(False, words)
    sys.modules['model'] = types.ModuleType('model')
    vars(sys.modules['model']).update(given)  # all that there is to import from it

    student = sys.modules['student'] = types.ModuleType('student')
    student.getattr = careful_getattr
    try:
        exec(compile(borrowed.students_part(path), path, 'exec'), vars(student))
    except BaseException as error:  # exit() too, and exceptions that a student made
        return check.Outcome(False, check.explain(error, path))
    missing = [name for name in wanted if not hasattr(student, name)]
    if missing:
        return check.Outcome(False, f"{' and '.join(missing)} should be defined above the line "
                                    "`# the check`")
    check.install(exercise, {name: getattr(student, name) for name in wanted})
    return None


def careful_getattr(thing, name, *default):
    """getattr in the student's part, where borrowed.py cannot know the name."""
    if type(name) is not str or borrowed.leads_out(name) or borrowed.is_an_answer(name):
        raise AttributeError(f"{name} leads out of an exercise")
    return getattr(thing, name, *default)


if __name__ == '__main__':
    main(sys.argv[1:])
