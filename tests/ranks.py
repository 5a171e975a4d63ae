"""
Processes of train.py for the tests that need several of them, or kill them: forked from one that has imported torch, so that
starting one takes no time. torchrun's part, the environment, is played here; test_processes.py has torchrun itself too.
"""
import multiprocessing
import os
import socket
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
os.environ['PYTHONPATH'] = os.pathsep.join([os.path.dirname(HERE), HERE, os.environ.get('PYTHONPATH', '')])  # for the preload


def launch(args, log, world=1):
    """Start train.py with these arguments in `world` processes; rank r writes its output to log + str(r)."""
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['train', 'torch.distributed.optim'])
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    env = lambda rank: {'RANK': rank, 'LOCAL_RANK': rank, 'WORLD_SIZE': world, 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': port}
    processes = [context.Process(target=_train, args=(args, log + str(rank), env(rank) if world > 1 else {})) for rank in range(world)]
    for process in processes: process.start()
    return processes


def finish(processes, log=''):
    """Wait until all have ended well."""
    for rank, process in enumerate(processes):
        process.join(120)
        assert process.exitcode == 0, open(log + str(rank)).read()


def _train(args, log, env):
    import torch

    from engine.errors import run
    import train
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(fd, 1), os.dup2(fd, 2)
    os.environ.update({name: str(value) for name, value in env.items()})
    torch.set_num_threads(1)
    sys.argv = ['train.py', *args]
    run(train.main)
