"""
Processes of train.py for tests that need several of them, or end them: forked from one that has
imported torch, so that starting one takes no time. torchrun's part, the environment, is played
here; test_train.py has torchrun itself too.
"""
import multiprocessing
import os
import signal
import sys
import time

from torch.distributed import TCPStore

HERE = os.path.dirname(os.path.abspath(__file__))
# for the process that all others are forked from, and what it imports once for all of them
os.environ['PYTHONPATH'] = os.pathsep.join([os.path.dirname(HERE), HERE,
                                            os.environ.get('PYTHONPATH', '')])
PRELOAD = ['train', 'torch.distributed.optim', 'torch._dynamo']


def launch(args, log, world=1):
    """Start train.py with these arguments in `world` processes; rank r writes to log + str(r)."""
    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)    # any free port
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(PRELOAD)
    processes = []
    for rank in range(world):
        env = {}
        if world > 1:
            env = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR='127.0.0.1',
                       MASTER_PORT=store.port, TORCHELASTIC_USE_AGENT_STORE=True,
                       TORCHELASTIC_RESTART_COUNT=0)
        process = context.Process(target=run_train, args=(args, log + str(rank), env))
        process.start()
        process.store = store   # for as long as it runs
        processes.append(process)
    return processes


def run_train(args, output, env):
    """In the process: as a program in a terminal, with its output in a file."""
    out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = open(1, 'w', closefd=False)  # the one before may have been for a file that seeks
    os.environ.update({name: str(value) for name, value in env.items()})
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    import torch

    import train
    from engine.files import run
    torch.set_num_threads(1)
    sys.argv = ['train.py', *args]
    run(train.main)


def finish(processes, log):
    """Wait until all have ended well."""
    for rank, process in enumerate(processes):
        process.join(120)
        if process.exitcode != 0:
            with open(log + str(rank)) as f:
                raise AssertionError(f.read())


def wait_for(text, log, alive):
    """Wait until the file `log` has this text. alive(): whether its process still runs."""
    while True:
        running = alive()
        if os.path.exists(log):
            with open(log) as f:
                said = f.read()
            if text in said:
                return
        assert running, f"ended without {text!r}"
        time.sleep(0.01)
