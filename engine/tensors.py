"""
Files of named tensors, read one tensor at a time: .safetensors and pytorch_model.bin.

    stored = open_tensors(folder)       {name: tensor in a file}; no numbers are read yet
    stored[name].copy_into(out)         out (of the same shape) may have another dtype

A .safetensors file is 8 bytes, the length of a header; the header, JSON, with the dtype, shape and
place of each tensor; and their numbers. It is read, not mapped into memory, and converted in
pieces: a model that is loaded takes little more memory than itself. Nothing in a file is executed.
"""

import json
import math
import os
import re
import zipfile
from dataclasses import dataclass

import torch

from engine.files import UserError

DTYPES = {'F64': torch.float64, 'F32': torch.float32, 'F16': torch.float16, 'BF16': torch.bfloat16}
PIECE = 2 ** 17                 # numbers that are converted at a time
LONGEST_HEADER = 100 * 10 ** 6  # bytes, as in the safetensors library

# in a folder whose weights are in several files, one of these names them
INDEXES = ('model.safetensors.index.json', 'pytorch_model.bin.index.json')


@dataclass
class SafeTensor:
    """A tensor in a .safetensors file."""
    path: str
    name: str
    dtype: str              # as the file names it
    shape: tuple
    start: int              # its first byte in the file

    def copy_into(self, out):
        """Read it into `out`, contiguous and of this shape; UserError if that cannot be done."""
        if self.dtype not in DTYPES:
            raise UserError(f"{self.path}: {self.name} has dtype {self.dtype}: weights that are "
                            "quantised or no floating-point numbers are not supported")
        with open(self.path, 'rb') as f:
            f.seek(self.start)
            for part in out.view(-1).split(PIECE):
                numbers = torch.empty(len(part), dtype=DTYPES[self.dtype])
                buffer = numbers.view(torch.uint8).numpy()
                if f.readinto(buffer) < len(buffer):
                    raise UserError(f"{self.path}: ends in the middle of {self.name}")
                part.copy_(numbers)


@dataclass
class LoadedTensor:
    """A tensor of a pytorch_model.bin, mapped into memory."""
    path: str
    name: str
    tensor: torch.Tensor

    @property
    def shape(self):
        return tuple(self.tensor.shape)

    def copy_into(self, out):
        if not self.tensor.is_floating_point():
            raise UserError(f"{self.path}: {self.name} has dtype {self.tensor.dtype}: weights that "
                            "are quantised or no floating-point numbers are not supported")
        out.copy_(self.tensor)


def open_tensors(folder):
    """
    {name: SafeTensor or LoadedTensor} of all weights in a folder. UserError if there are none, a
    file is damaged, or a name occurs twice.
    """
    stored = {}
    for path in weight_files(folder):
        read = read_header if path.endswith('.safetensors') else read_bin
        for name, tensor in read(path).items():
            if name in stored:
                raise UserError(f"{folder}: {name} is in {os.path.basename(stored[name].path)} and "
                                f"in {os.path.basename(path)}: remove one of these files")
            stored[name] = tensor
    return stored


def weight_files(folder):
    """
    The paths of a folder's weights: those of an index, else all .safetensors, else
    pytorch_model.bin. UserError if there are none.
    """
    try:
        present = sorted(os.listdir(folder))
    except OSError as error:
        raise UserError(f"{folder}: cannot be read ({error.strerror})") from None
    safe = [name for name in present if name.endswith('.safetensors')]
    if INDEXES[0] in present:
        names = files_of_index(os.path.join(folder, INDEXES[0]))
    elif safe:
        names = safe
    elif INDEXES[1] in present:
        names = files_of_index(os.path.join(folder, INDEXES[1]))
    elif 'pytorch_model.bin' in present:
        names = ['pytorch_model.bin']
    else:
        raise UserError(f"{folder}: no weights: neither .safetensors files nor pytorch_model.bin")
    for name in names:
        if name not in present:
            raise UserError(f"{folder}: {name} is missing, a part of the weights")
    return [os.path.join(folder, name) for name in names]


def files_of_index(path):
    """The names of the files that an index spreads the weights over; UserError if it is damaged."""
    try:
        with open(path, encoding='utf-8') as f:
            names = set(json.load(f)['weight_map'].values())
        for name in names:
            # no path: it would lead out of the folder
            if not re.fullmatch(r'[\w.-]+\.(safetensors|bin)', name):
                raise ValueError(f"{name!r} is no name of a file of weights")
        return sorted(names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: not an index of weights ({brief(error)})") from None


# ---- one file ------------------------------------------------------------------------------------

def read_header(path):
    """{name: SafeTensor} of a .safetensors file; UserError if header and length do not agree."""
    try:
        size = os.path.getsize(path)
        with open(path, 'rb') as f:
            length = int.from_bytes(f.read(8), 'little')
            if length > min(size - 8, LONGEST_HEADER):
                raise ValueError(f"{size} bytes are too few for its header")
            header = json.loads(f.read(length))
        header.pop('__metadata__', None)
        return place_tensors(path, header, first=8 + length, size=size)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: damaged, or no .safetensors file ({brief(error)})") from None


def place_tensors(path, header, first, size):
    """The same of a header whose numbers begin at byte `first`; ValueError if they cannot."""
    tensors = {}
    end = 0
    for name, entry in header.items():
        shape = tuple(entry['shape'])
        start, stop = entry['data_offsets']
        numbers = (*shape, start, stop)
        if any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"{name} has no valid shape and place")
        dtype = entry['dtype']
        if dtype in DTYPES and stop - start != math.prod(shape) * DTYPES[dtype].itemsize:
            raise ValueError(f"{name} does not fill its place")
        tensors[name] = SafeTensor(path, name, dtype, shape, first + start)
        end = max(end, stop)
    if first + end != size:
        raise ValueError(f"{size} bytes, its header says {first + end}")
    return tensors


def read_bin(path):
    """{name: LoadedTensor} of a file of torch.save; UserError if it holds anything but tensors."""
    try:
        # an older format is no zip file, and cannot be mapped
        mapped = zipfile.is_zipfile(path)
        state = torch.load(path, map_location='cpu', weights_only=True, mmap=mapped)
        tensors = {name: LoadedTensor(path, name, state[name]) for name in state}
        for tensor in tensors.values():
            tensor.shape                    # AttributeError: not a tensor
        return tensors
    except Exception as error:              # on a damaged or foreign file, nearly any
        raise UserError(f"{path}: damaged, or not a file of weights ({brief(error)})") from None


def brief(error):
    """An error's text as part of a line."""
    return ' '.join(str(error).split())[:120] or type(error).__name__
