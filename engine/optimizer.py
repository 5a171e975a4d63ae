"""
AdamW, with its state in one piece, or sharded: each rank then keeps a part of it. Either way a
checkpoint holds one piece, so a run may go on with another number of ranks.
"""

from unittest import mock

import torch


def adamw(groups, sharded, **options):
    """AdamW over groups of parameters; `sharded` needs a process group."""
    if not sharded:
        return torch.optim.AdamW(groups, **options)
    from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **options)


def load_optimizer(optimizer, saved):
    """Put the state of a checkpoint back. Learning rate, decay and so on stay what they are."""
    groups = []
    for now, then in zip(optimizer.param_groups, saved['param_groups']):
        groups.append({**now, 'params': then['params']})
    optimizer.load_state_dict({'state': saved['state'], 'param_groups': groups})

    if hasattr(optimizer, 'optim'):  # ZeroRedundancyOptimizer: its part is in there
        for p, held in optimizer.optim.state.items():
            held['step'] = held['step'].to(p.device)  # fused AdamW wants it there
        optimizer.state.clear()  # a second copy of that part, which nothing reads


def gather(optimizer):
    """Before saving, on all ranks together: rank 0 gets the state in one piece."""
    if not hasattr(optimizer, 'consolidate_state_dict'):
        return
    with mock.patch.object(torch, 'ByteTensor', bytes_as_tensor):
        optimizer.consolidate_state_dict()


def bytes_as_tensor(data):
    """In the place of torch.ByteTensor, which would make every byte a Python number first."""
    return torch.frombuffer(data, dtype=torch.uint8)
