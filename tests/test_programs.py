"""What people start: each program's --help, from another folder, and every config."""
import importlib
import os
import sys
from dataclasses import fields, is_dataclass

import pytest
import test_plan
from conftest import ROOT, make, program, save, slow_but

from configurator import build, read
from engine import plan
from model import GPTConfig
from train import Settings

VOCABULARY = GPTConfig.vocab_size
CONFIG = os.path.join(ROOT, 'config')
# parameters, Depth-Attention paper, tables 8 and 9
PAPER = {'360m.py': 0.361e9, '500m.py': 0.498e9, '710m.py': 0.716e9, '1.5b.py': 1.344e9,
         '3b.py': 2.748e9}
# A process for each program, all from one that has imported what takes long. Where its path stands
# behind `-P:`, Python does not look in its folder, as with `python -P` or PYTHONSAFEPATH.
HELP_OF_EACH = """
import os, runpy, sys
import requests, tiktoken, torch.nn.parallel, torch.utils.flop_counter

for given in sys.argv[1:]:
    if os.fork() == 0:
        path = given.removeprefix('-P:')
        sys.path[:1] = [os.path.dirname(os.path.realpath(path))] if path == given else []
        sys.argv, status = [path, '--help'], 0
        try:
            runpy.run_path(path, run_name='__main__')
        except SystemExit as end:
            status = end.code or 0
        sys.stdout.flush()
        os._exit(status)    # at once: Python's own end would take as long as all before
    print(given, 'ended with', os.wait()[1], flush=True)
"""


def files(*folder, having=''):
    """The Python files of a folder, their paths, that have this text in them."""
    found = []
    for name in sorted(os.listdir(os.path.join(ROOT, *folder))):
        path = os.path.join(ROOT, *folder, name)
        if name.endswith('.py'):
            with open(path, encoding='utf-8') as f:
                if having in f.read():
                    found.append(path)
    return found


@pytest.mark.skipif(sys.platform == 'win32', reason='fork')
@pytest.mark.parametrize('linked', slow_but([True], [False, True]))
def test_each_program_says_what_it_does(linked, tmp_path):
    """
    In a shell, from another folder, which nobody has set up; by `python -P`; and through a link,
    where other packages have the names of all that is ours.
    """
    programs = []
    for folder in ('.', 'tools', 'exercises', os.path.join('exercises', 'labs')):
        programs += files(folder, having="if __name__ == '__main__':")
    programs = [path for path in programs if not path.endswith('attempt.py')]   # the marker's own
    assert len(programs) > 20
    if linked:
        others = [*os.listdir(ROOT), *os.listdir(f'{ROOT}/exercises'),
                  *os.listdir(f'{ROOT}/exercises/labs')]
        for name in {name.removesuffix('.py') for name in others}:
            (tmp_path / 'site' / name).mkdir(parents=True)
            (tmp_path / 'site' / name / '__init__.py').touch()
        for i, path in enumerate(programs):
            programs[i] = tmp_path / str(i) / os.path.basename(path)    # nothing else is there
            programs[i].parent.mkdir()
            programs[i].symlink_to(path)
    programs += [f'-P:{ROOT}/{name}.py' for name in ('train', 'sample', 'prepare_data')]
    site = tmp_path / 'site'
    done = program('-c', HELP_OF_EACH, *programs, cwd=tmp_path, PYTHONPATH=site if linked else '')
    assert done.stderr == ''
    rest = done.stdout
    for path in map(str, programs):
        told, ended, rest = rest.partition(f'{path} ended with 0\n')
        assert ended, path
        path = os.path.realpath(path.removeprefix('-P:'))
        name = os.path.relpath(path, ROOT).replace(os.sep, '/')
        assert f'python {name}' in told, f"{name} --help has no line to copy"


def test_sampling_starts_without_pytorchs_compiler(tmp_path):
    """Whose import takes a second; a new model of shapes once imported it."""
    folder = save(tmp_path / 'out', make(vocab_size=320, n_tokens=257))
    code = ("import sample, sys; sample.main(sys.argv[1:]); "
            "assert 'torch._dynamo' not in sys.modules")
    program('-c', code, folder, '--start=def', '--max_new_tokens=2')


SEEDED = []     # PyTorch and numpy have bounds; prepare_data.py takes any
for folder in ('.', 'tools', os.path.join('exercises', 'labs')):
    for path in files(folder, having='    seed: int'):
        if not path.endswith('prepare_data.py'):
            SEEDED.append(path)


@pytest.mark.parametrize('path', SEEDED)
def test_a_seed_that_is_too_large_is_refused(path, monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(path))
    program = importlib.import_module(os.path.basename(path).removesuffix('.py'))
    [block] = [block for block in vars(program).values() if is_dataclass(block)
               and 'seed' in [field.name for field in fields(block)]]
    with pytest.raises(ValueError, match='seed=1.* must be between 0 and'):
        block(seed=2 ** 64)


dry_run = test_plan.dry_run     # the fixture


@pytest.fixture(autouse=True)
def no_memory(monkeypatch):
    """It is measured in test_plan.py alone."""
    monkeypatch.setattr(plan, 'activations', lambda *_: 0)


def settings_of(*names):
    given, _ = read([os.path.join(CONFIG, *names)], '', Settings, GPTConfig)
    return given


def test_tiny_is_the_defaults():
    tiny = settings_of('size', 'tiny.py')
    assert build(Settings, tiny) == Settings()
    assert build(GPTConfig, tiny) == GPTConfig()


@pytest.mark.parametrize('size', files('config', 'size'))
def test_a_size_leaves_nothing_of_its_recipe_to_the_defaults(size):
    """Which are those of another size."""
    assert settings_of(size).keys() >= settings_of('size', 'tiny.py').keys()


def test_the_papers_recipe():
    s = build(Settings, settings_of('size', '360m.py'))
    assert s.max_steps * s.batch_tokens == pytest.approx(33e9, rel=0.01)
    assert s == Settings(max_steps=15625, batch_tokens=1024 * 2048, micro_batch=8,
                         learning_rate=1.5e-3, log_interval=10, eval_interval=500,
                         eval_tokens=2 ** 20, save_interval=500)


@pytest.mark.parametrize('size', files('config', 'size'))
def test_every_size_can_be_planned(dry_run, size):
    name = os.path.basename(size)
    out = dry_run(os.path.join(CONFIG, 'depth_attn.py'), size, f'--vocab_size={VOCABULARY}')
    for line in ('compute', 'GB per GPU', 'days at 40% of the bf16 peak', 'H100'):
        assert line in out
    if name in PAPER:
        millions = float(out.split()[1].removesuffix('M,').replace(',', ''))
        assert millions == pytest.approx(PAPER[name] / 1e6, rel=0.01)


MECHANISMS = [path for path in files('config') if not path.endswith(('tasks.py', 'trees.py'))]


@pytest.mark.parametrize('mechanism', slow_but(
    [os.path.join(CONFIG, f'{name}.py') for name in ('depth_attn', 'feedback', 'halting_router')],
    MECHANISMS))
def test_every_mechanism_can_be_planned_on_text_and_on_a_task(dry_run, mechanism):
    for path in (os.path.join(CONFIG, 'size', 'tiny.py'), os.path.join(CONFIG, 'tasks.py')):
        assert 'vocabulary 320 (of data/' in dry_run(mechanism, path)
