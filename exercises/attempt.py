"""
One student's file, checked in a process of its own. marker.py starts it.

    python attempt.py EXERCISE FILE SEED SECONDS

A line of stdout for each part of the exercise: JSON, its name and its Outcome (check.py). What the
student prints goes to stderr.
"""
import json
import os
import sys
import types
from dataclasses import asdict

import check
from answers import ANSWERS

MEGABYTE = 2 ** 20


def main(argv):
    name, path, seed, seconds = argv
    exercise = check.load(os.path.join(check.HERE, name + '.py'))
    with os.fdopen(os.dup(1), 'w') as f:
        os.dup2(2, 1)
        set_limits(int(seconds))
        problem = take_over(exercise, path, ANSWERS[name])
        for part, function in exercise.PARTS.items():
            outcome = problem or check.judge(function, path, int(seed))
            print(json.dumps([part, asdict(outcome)]), file=f, flush=True)


def set_limits(seconds):
    """Of time, memory, and what is printed or written; where the system has such limits."""
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
        resource.setrlimit(limit, (value, value))


def take_over(exercise, path, wanted):
    """
    Run the student's part of the file, and put what it defines, as far as it is `wanted`, into the
    exercise. Returns an Outcome if that is impossible.
    """
    student = sys.modules['student'] = types.ModuleType('student')
    try:
        words = check.borrowed(path, getattr(exercise, 'GIVEN', ()))
        if words:
            return check.Outcome(False, words)
        exec(compile(check.students_part(path), path, 'exec'), vars(student))
    except BaseException as error:  # exit() too
        return check.Outcome(False, check.explain(error, path))
    missing = [name for name in wanted if not hasattr(student, name)]
    if missing:
        return check.Outcome(False, f"{' and '.join(missing)} should be defined above the line "
                                    "`# the check`")
    check.install(exercise, {name: getattr(student, name) for name in wanted})
    return None


if __name__ == '__main__':
    main(sys.argv[1:])
