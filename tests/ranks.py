"""
Processes of train.py for the tests that need several of them, or end them: forked from one that has
imported torch, so that starting one takes no time. torchrun's part, the environment, is played
here; test_processes.py has torchrun itself too.
"""
import io
import multiprocessing
import os
import signal
import socket
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
# for the process that all others are forked from, and what it imports once for all of them
os.environ['PYTHONPATH'] = os.pathsep.join([ROOT, HERE, os.environ.get('PYTHONPATH', '')])
PRELOAD = ['train', 'torch.distributed.optim', 'torch.distributed.run', 'torch._dynamo']


def launch(args, log, world=1, errors=None, env=None):
    """
    Start train.py with these arguments in `world` processes; rank r writes to log + str(r).
    errors: another file for what goes to stderr. env: variables to set.
    """
    port = free_port()
    processes = []
    for rank in range(world):
        variables = dict(env or {})
        if world > 1:
            variables.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world,
                             MASTER_ADDR='127.0.0.1', MASTER_PORT=port)
        output = log + str(rank)
        processes.append(fork(run_train, args, output, errors or output, variables))
    return processes


def launch_torchrun(args, log, errors):
    """Start torchrun with these arguments; its workers are no forks, but programs of their own."""
    return fork(run_torchrun, args, log, errors, {'OMP_NUM_THREADS': 1})


def finish(processes, log=''):
    """Wait until all have ended well."""
    for rank, process in enumerate(processes):
        process.join(120)
        if process.exitcode != 0:
            with open(log + str(rank)) as f:
                raise AssertionError(f.read())


def wait_for(text, log, process):
    """Wait until the file `log` has this text; what it has then."""
    while True:
        alive = process.is_alive()
        if os.path.exists(log):
            with open(log) as f:
                said = f.read()
            if text in said:
                return said
        assert alive, f"ended without {text!r}"
        time.sleep(0.01)


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


# ---- in the process that is forked ---------------------------------------------------------------

def fork(target, *args):
    if sys.platform == 'win32':  # which has no fork: each process imports torch itself
        context = multiprocessing.get_context('spawn')
    else:
        context = multiprocessing.get_context('forkserver')
        context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=target, args=args)
    process.start()
    return process


def run_train(args, output, errors, env):
    prepare(output, errors, env)
    import torch

    import train
    from engine.files import run
    torch.set_num_threads(1)
    sys.argv = ['train.py', *args]
    run(train.main)


def run_torchrun(args, output, errors, env):
    prepare(output, errors, env)
    from torch.distributed.run import main
    os.chdir(ROOT)
    main(args)


def prepare(output, errors, env):
    """Output to these files, variables, and signals as they are for a program in a terminal."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    out = os.open(output, flags)
    os.dup2(out, 1)
    os.dup2(out if errors == output else os.open(errors, flags), 2)
    # anew, as Python does at its start: the one before may have been made for a file that can seek
    raw = io.FileIO(1, 'w', closefd=False)
    raw.name = '<stdout>'
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw))
    for name, value in env.items():
        os.environ[name] = str(value)
    if hasattr(signal, 'SIGHUP'):
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
