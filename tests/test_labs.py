"""The labs start as programs, from any folder, and find their imports by themselves."""
import os

from conftest import ROOT, program

LABS = [os.path.join(ROOT, 'exercises', 'labs', name + '.py')
        for name in ('fingerprint', 'freqkv', 'geogalactica', 'innovator')]

# All in one process, as most of a start is PyTorch's. Before each lab the process forgets what
# belongs to this repository, and where that is.
START_EACH = """
import os
import runpy
import sys
import torch

root, *labs = sys.argv[1:]
path = list(sys.path)
for lab in labs:
    for name, module in list(sys.modules.items()):
        folder = os.path.dirname(getattr(module, '__file__', None) or '')
        if folder in (root, os.path.join(root, 'engine'), os.path.dirname(lab)):
            del sys.modules[name]
    sys.path[:] = [os.path.dirname(lab), *path[1:]]
    sys.argv = [lab]
    try:
        runpy.run_path(lab, run_name='__main__')
    except SystemExit as end:
        print(os.path.basename(lab), end.code)
"""


def test_every_lab_starts_anywhere_and_asks_for_a_checkpoint(tmp_path):
    done = program('-c', START_EACH, ROOT, *LABS, cwd=tmp_path, PYTHONPATH='')
    ends = [f'{os.path.basename(lab)} 2' for lab in LABS]
    assert done.stdout.splitlines() == ends
    said = done.stderr.splitlines()
    assert len(said) == len(LABS)
    for line, lab in zip(said, LABS):
        assert line.startswith('error: name ')
        assert f'python exercises/labs/{os.path.basename(lab)} out/' in line
