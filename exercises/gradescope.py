"""
Exercises on Gradescope: writes the zip that its form for programming assignments asks for.

    python exercises/gradescope.py                       writes autograder.zip for all exercises
        --exercises=attention,rope    only these
        --out=FILE.zip                the zip's name
        --seed=N                      the same shapes and numbers for everybody and every time
                                      (otherwise they are drawn anew each time)
        --seconds=60                  the time that one file may take

Students hand in files such as attention.py. Each part of an exercise is a test with one point; how
a file is marked stands in marker.py. The zip holds this project's model.py, engine/ and exercises/,
and what Gradescope's machine runs: setup.sh once, run_autograder for each submission.
"""
import json
import os
import secrets
import zipfile

import check
import marker
from check import HERE, NAMES, UserError, run_program

ROOT = os.path.dirname(HERE)
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
venv/bin/python source/exercises/gradescope.py --mark={exercises} --seconds={seconds} {seed} \\
    --submission=submission --results=results/results.json
'''
OPTIONS = {'exercises': ','.join(NAMES), 'out': 'autograder.zip', 'seed': '', 'seconds': '60'}
OF_THE_MACHINE = {'mark': '', 'submission': 'submission', 'results': 'results/results.json'}


def main(argv):
    if argv in (['-h'], ['--help']):
        print(__doc__.strip())
        return
    options = read_options(argv)
    seconds = marker.number('seconds', options['seconds'], least=1, most=marker.A_DAY)
    if options['seed']:
        marker.number('seed', options['seed'], least=0)
    names = (options['mark'] or options['exercises']).split(',')
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise UserError(f"{', '.join(unknown)}: the exercises are {', '.join(NAMES)}")
    if options['mark']:
        mark(names, options, seconds)
    else:
        write_zip(names, options)


def read_options(argv):
    options = {**OPTIONS, **OF_THE_MACHINE}
    for word in argv:
        name, _, value = word.removeprefix('--').partition('=')
        if not word.startswith('--') or name not in options or not value:
            known = ', '.join(f'--{name}=' for name in OPTIONS)
            raise UserError(f"{word}: there are {known}")
        options[name] = value
    return options


# -------------------------------------------------------------------------------------------------
# here

def write_zip(names, options):
    """The zip to upload."""
    seed = f"--seed={options['seed']}" if options['seed'] else ''
    run = RUN.format(exercises=','.join(names), seconds=options['seconds'], seed=seed)
    with zipfile.ZipFile(options['out'], 'w', zipfile.ZIP_DEFLATED) as archive:
        write_program(archive, 'setup.sh', SETUP)
        write_program(archive, 'run_autograder', run)
        for path in files():
            archive.write(os.path.join(ROOT, path), path)
    points = sum(len(check.load(os.path.join(HERE, name + '.py')).PARTS) for name in names)
    print(f"{options['out']}: {len(names)} exercises, {points} points")


def write_program(archive, name, text):
    info = zipfile.ZipInfo(name)
    info.external_attr = 0o755 << 16  # may be executed
    archive.writestr(info, text)


def files():
    """What the marker needs of this project."""
    found = ['model.py', 'requirements.txt']
    for folder in ('engine', 'exercises'):
        names = sorted(os.listdir(os.path.join(ROOT, folder)))
        found += [os.path.join(folder, name) for name in names if name.endswith('.py')]
    return found


# -------------------------------------------------------------------------------------------------
# on Gradescope's machine

def mark(names, options, seconds):
    """Mark a submission and write results.json."""
    seed = int(options['seed'] or secrets.randbelow(2 ** 31))
    folder = options['submission']
    present = marker.handed_in(folder, names)
    marks = marker.mark_names([(folder, name) for name in present], seed, seconds)
    tests = [test for one in marks for test in tests_of(one)]
    for name in names:
        if name not in present:
            tests.append({'name': name, 'score': 0, 'max_score': points(name), 'status': 'failed',
                          'output': f"{name}.py is not at the top of the submission"})
    results = {
        'output': f"Shapes and numbers were drawn with seed {seed}.",
        'execution_time': sum(one.seconds for one in marks),
        'tests': tests,
    }
    os.makedirs(os.path.dirname(options['results']) or '.', exist_ok=True)
    with open(options['results'], 'w', encoding='utf-8') as f:
        json.dump(results, f, indent=1)


def points(name):
    return len(check.load(os.path.join(HERE, name + '.py')).PARTS)


def tests_of(one):
    """A Mark as Gradescope's tests, one per part."""
    tests = []
    for part in one.parts:
        tests.append({
            'name': f"{one.exercise}: {part.name}",
            'score': int(part.right),
            'max_score': 1,
            'status': 'passed' if part.right else 'failed',
            'output': 'right' if part.right else f"not yet: {part.words}",
        })
    return tests


if __name__ == '__main__':
    run_program(main)
