"""Models with shapes and no numbers: what a checkpoint, a plan or a memory has to fit to."""

import contextlib
from unittest import mock

import torch


@contextlib.contextmanager
def shapes_only():
    """Modules made in here need no memory and hardly any time, and compute nothing."""
    # On these tensors normal_ does nothing, but PyTorch imports for more than a second to do it.
    with torch.device('meta'), mock.patch.object(torch.Tensor, 'normal_', lambda x, *_, **__: x):
        yield
