"""
What log.jsonl gets, at TensorBoard or Weights & Biases too: --track.

    package_of(name)        'tensorboard' or 'wandb', imported here and nowhere else
    with Tracker(name, folder, say, settings, step) as tracker:     of the run in this folder
        tracker.log(record)                     a line of log.jsonl
        tracker.show(name, header, rows)        what the model makes of some texts

Once it trains, no run ends because of them, or waits long: what fails is said once, and the run
goes on without.
"""

import contextlib
import importlib
import os
import secrets
import textwrap

from engine.files import UserError, one_line, typed, whole

MODULES = {'tensorboard': 'torch.utils.tensorboard', 'wandb': 'wandb'}
PATIENCE = 20       # seconds for wandb to reach its server, to be told a key, to end its upload


def package_of(name):
    """The module; UserError if it is missing, or broken, which may raise anything."""
    try:
        return importlib.import_module(MODULES[name])
    except Exception as error:
        raise UserError(f"track={name} needs a package that is missing ({one_line(error)}): pip "
                        "install -r requirements-track.txt, or go on with --track=None") from None


class Tracker(contextlib.AbstractContextManager):
    """One run there. say: prints a line. settings: all of them. step: what the run goes on from."""

    def __init__(self, name, folder, say, settings, step):
        self.name, self.folder, self.say = name, folder, say
        self.step = step    # of the last line
        self.run = None     # a SummaryWriter, or a run of wandb's; None: it failed
        with self.or_without():
            begin = self.begin_wandb if name == 'wandb' else self.begin_tensorboard
            say(f"track={name}: {begin(package_of(name), settings)}")

    @contextlib.contextmanager
    def or_without(self):
        """Around all that they do: after a failure nothing more is tried."""
        try:
            yield
        except Exception as error:
            self.run = None
            self.say(f"track={self.name} failed ({one_line(error)[:200]}): the run goes on without "
                     f"it, and {os.path.join(self.folder, 'log.jsonl')} has everything")

    def begin_tensorboard(self, package, settings):
        where = os.path.join(self.folder, 'tensorboard')
        self.step += 1      # from here on, what a killed run has left there is made again
        self.run = package.SummaryWriter(where, purge_step=self.step, flush_secs=10)
        self.show('settings', ('setting', 'value'), settings.items())
        return typed('tensorboard', f'--logdir={where}')

    def begin_wandb(self, wandb, settings):
        path = os.path.join(self.folder, 'wandb_id.txt')
        if self.step == 0 or not os.path.exists(path):      # a run that goes on has its id
            with whole(path) as f:
                f.write(secrets.token_hex(4))
        with open(path, encoding='utf-8') as f:
            name = f.read()
        wandb.setup(wandb.Settings(login_timeout=PATIENCE))
        run = self.run = wandb.init(
            id=name, resume='allow', dir=self.folder, config=settings,
            name=os.path.basename(os.path.abspath(self.folder)),
            project=os.environ.get('WANDB_PROJECT', 'nanoponder'),
            settings=wandb.Settings(init_timeout=PATIENCE, finish_timeout=PATIENCE,
                                    finish_timeout_raises=True, console='off', silent=True))
        if run.step > self.step + 1:
            self.say(f"track=wandb: it has this run up to step {run.step - 1}, and takes none of "
                     "these steps again; log.jsonl has them as they are now")
        later = typed('wandb', 'sync', os.path.dirname(run.dir))
        return 'disabled' if run.disabled else later if run.offline else run.url

    def log(self, record):
        self.step = record['step']
        self.send(numbers_of(record))

    def show(self, name, header, rows):
        """Rows of texts, at the last line's step."""
        with self.or_without():
            if self.name == 'wandb':
                table = package_of('wandb').Table(columns=[*header], data=[[*row] for row in rows])
                self.send({name: table})
            else:
                lines = '\n'.join('   '.join(map(str, row)) for row in (header, *rows))
                code = textwrap.indent(lines, '    ', lambda line: True)    # in Markdown
                self.send({name: code})

    def send(self, named):
        """{name: a number, a text or a table}"""
        if self.run is None:
            return
        with self.or_without():
            if self.name == 'wandb':
                self.run.log(named, step=self.step)
                return
            for name, value in named.items():
                add = self.run.add_text if isinstance(value, str) else self.run.add_scalar
                add(name, value, self.step)

    def __exit__(self, kind, error, trace):
        with self.or_without():
            if self.run and self.name == 'wandb':
                self.run.finish(exit_code=int(kind is not None))
            elif self.run:
                self.run.close()


def numbers_of(record):
    """{name: number} of a line; passes/1, .. are shares of tokens, and `passes` is their sum."""
    numbers = {}
    for name, value in record.items():
        if isinstance(value, list):
            numbers |= {f'{name}/{k}': share for k, share in enumerate(value, 1)}
            value = sum(value)
        if value is not None and name != 'step':
            numbers[name] = value
    return numbers
