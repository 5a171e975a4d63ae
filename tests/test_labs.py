"""The labs start as programs, from any folder, and find their imports by themselves."""

import glob
import os

from conftest import ROOT, program

# A process for each lab, all from one that has read the packages already.
HELP_OF_EACH = """
import os, runpy, sys
import requests, tiktoken, torch.nn.parallel, torch.utils.flop_counter

for lab in sys.argv[1:]:
    if os.fork() == 0:
        sys.path[0] = os.path.dirname(lab)
        sys.argv = [lab, '--help']
        runpy.run_path(lab, run_name='__main__')
    print(os.path.basename(lab), os.wait()[1], flush=True)
"""


def test_every_lab_says_what_it_is(tmp_path):
    labs = []
    for path in sorted(glob.glob(os.path.join(ROOT, 'exercises', 'labs', '*.py'))):
        with open(path, encoding='utf-8') as f:
            if "__name__ == '__main__'" in f.read():
                labs.append(path)
    assert len(labs) == 5
    out = program('-c', HELP_OF_EACH, *labs, cwd=tmp_path, PYTHONPATH='').stdout
    for lab in labs:
        assert f'python exercises/labs/{os.path.basename(lab)} ' in out
        assert f'{os.path.basename(lab)} 0\n' in out
