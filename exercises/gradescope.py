"""
Exercises on Gradescope: writes the zip that its form for programming assignments asks for.

    python exercises/gradescope.py                                  all exercises
    python exercises/gradescope.py --exercises=attention,rope       some of them

Students hand in files such as attention.py. Each part of an exercise is a test with one point; how
a file is marked stands in marker.py. The zip holds what the marker needs of this project, and what
Gradescope's machine runs: setup.sh once, run_autograder for each submission.
"""
import glob
import json
import os
import zipfile
from dataclasses import dataclass
from typing import Optional

import check
import marker
from check import HERE, NAMES, UserError, run_program
from configurator import build, read
from marker import FILES, ROOT

SETUP = '''#!/usr/bin/env bash
# Gradescope runs this once, when the autograder is built.
set -euo pipefail
cd "${AUTOGRADER:-/autograder}"
apt-get update
apt-get install -y python3 python3-venv
python3 -m venv venv    # newer systems refuse packages beside their own
venv/bin/pip install -r source/requirements.txt \\
    --extra-index-url https://download.pytorch.org/whl/cpu
'''
RUN = '''#!/usr/bin/env bash
# Gradescope runs this for each submission.
cd "${{AUTOGRADER:-/autograder}}"
venv/bin/python source/exercises/gradescope.py --submission=submission \\
    --exercises={exercises} --seconds={seconds}
'''


@dataclass
class GradescopeSettings:
    """what is asked for, and how it is marked"""
    exercises: str = ','.join(NAMES)    # those asked for
    out: str = 'autograder.zip'         # the zip to write
    seconds: int = 60                   # that one file may take
    submission: Optional[str] = None    # on Gradescope's machine: mark this folder instead

    def __post_init__(self):
        marker.MarkSettings(self.seconds)       # its own check, before the zip is there


def main(argv):
    given, rest = read(argv, __doc__, GradescopeSettings)
    s = build(GradescopeSettings, given)
    names = s.exercises.split(',')
    unknown = [*rest, *(name for name in names if name not in NAMES)]
    if unknown:
        raise UserError(f"{', '.join(unknown)}: the exercises are {', '.join(NAMES)}")
    if s.submission is None:
        write_zip(names, s)
    else:
        write_results(names, s)


def write_zip(names, s):
    run = RUN.format(exercises=s.exercises, seconds=s.seconds)
    with zipfile.ZipFile(s.out, 'w', zipfile.ZIP_DEFLATED) as archive:
        for name, text in (('setup.sh', SETUP), ('run_autograder', run)):
            info = zipfile.ZipInfo(name)
            info.external_attr = 0o755 << 16  # may be executed
            archive.writestr(info, text)
        for pattern in (*FILES, 'requirements.txt'):
            for path in glob.glob(pattern, root_dir=ROOT):
                archive.write(os.path.join(ROOT, path), path)
    print(f"{s.out}: {len(names)} exercises, {sum(map(points, names))} points")


def points(name):
    return len(check.load(os.path.join(HERE, name + '.py')).PARTS)


def write_results(names, s):
    """Mark the submission and write results/results.json, a test for each part of an exercise."""
    how = marker.MarkSettings(s.seconds)
    present = marker.handed_in(s.submission, names)
    tests = []
    for one in marker.mark_names([(s.submission, name) for name in present], how.seed, how.seconds):
        for part in one.parts:
            said = 'right' if part.right else f"not yet: {part.words}"
            tests.append(test(f"{one.exercise}: {part.name}", int(part.right), 1, said))
    for name in names:
        if name not in present:
            said = f"{name}.py is not at the top of the submission"
            tests.append(test(name, 0, points(name), said))
    os.makedirs('results', exist_ok=True)
    with open('results/results.json', 'w', encoding='utf-8') as f:
        json.dump({'output': f"Drawn with seed {how.seed}.", 'tests': tests}, f, indent=1)


def test(name, score, max_score, output):
    status = 'passed' if score == max_score else 'failed'
    return dict(name=name, score=score, max_score=max_score, status=status, output=output)


if __name__ == '__main__':
    run_program(main)
