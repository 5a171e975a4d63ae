"""
Tokens on disk: tokenizers, token shards, and meta.json, which describes them.

    tokenizer = get_tokenizer('byte')         or 'gpt2', another name of tiktoken, or hf:FOLDER
    tokens = encode(tokenizer, b'text')       (n,), with the end-of-text token
    meta = read_meta('data/python')           the folder's description, checked
    tokens = open_shard(path)                 (n,) uint16, a read-only map of the file

A data folder holds shards train_000000.bin, val_000000.bin, ... and meta.json; prepare_data.py
writes both. A shard is 256 int32 (magic 20240520, version 1, token count, zeros), then the tokens
as uint16.
"""

import json
import os

import numpy as np
import tiktoken

from engine.bpe import read_tokenizer
from engine.errors import UserError

MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = HEADER_INTS * 4

# what meta.json holds
SHARD = dict(name=str, tokens=int, sha256=str)
SPLIT = dict(bytes=int, tokens=int, shards=[SHARD])  # bytes of text, for losses per byte
META = dict(tokenizer=str, n_tokens=int, eot=int, source=str, train=SPLIT, val=SPLIT)

# what prepare_data.py makes by itself or downloads: data/NAME, and the arguments that make it
KNOWN = {
    'python': '',
    'python-packages': '--packages=True',
    'shakespeare': 'shakespeare',
    'fineweb': 'fineweb',
    'fineweb-edu': 'fineweb-edu',
    'addition': 'addition',
    'traffic': 'traffic',
    'minimax': 'minimax',
}


# --------------------------------------------------------------------------------------------------
# tokenizers


def get_tokenizer(name):
    """
    A tiktoken Encoding by name. 'byte' is built here: token i is byte i, token 256 is end-of-text.
    hf:FOLDER is a Hugging Face folder's. Others are fetched by tiktoken at first use. UserError if
    the name is unknown or the download fails.
    """
    if name.startswith('hf:'):
        return read_tokenizer(name.removeprefix('hf:'))
    if name == 'byte':
        single_bytes = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding('byte', pat_str=r'(?s:.)', mergeable_ranks=single_bytes,
                                 special_tokens={'<|endoftext|>': 256})
    if name not in tiktoken.list_encoding_names():
        raise UserError(f"--tokenizer={name}: tiktoken knows no such encoding; "
                        "use byte, gpt2 or another of its names")
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # no network; a wrong checksum
        reason = type(error).__name__
        raise UserError(
            f"--tokenizer={name}: its vocabulary could not be fetched ({reason}); "
            "check the network, or use --tokenizer=byte, which needs none") from None


def encode(tokenizer, text):
    """
    Tokens (n,) of a document (bytes) and its end, uint16 if they all fit. The byte tokenizer keeps
    bytes that are no UTF-8; others see U+FFFD instead.
    """
    dtype = np.uint16 if tokenizer.n_vocab <= 2 ** 16 else np.uint32
    if tokenizer.name == 'byte':
        tokens = np.frombuffer(text, np.uint8)  # what the Encoding would say, without its loop
    else:
        readable = text.decode('utf-8', errors='replace')
        tokens = tokenizer.encode_to_numpy(readable, disallowed_special=())
    return np.append(tokens.astype(dtype), dtype(tokenizer.eot_token))


# --------------------------------------------------------------------------------------------------
# meta.json


def read_meta(folder, tokenizer=None):
    """
    meta.json of a data folder, as a dictionary. UserError if there is none, with the command that
    makes it; if it is damaged; and if the tokens are not those of `tokenizer`.
    """
    try:
        with open(os.path.join(folder, 'meta.json'), encoding='utf-8') as f:
            meta = shaped(json.load(f), META)
    except FileNotFoundError:
        name = os.path.basename(os.path.normpath(folder))
        arguments = KNOWN.get(name, f"PATH... --name={name}")
        command = f"python prepare_data.py {arguments}".rstrip()
        raise UserError(
            f"{folder}: no data set (no meta.json); make data/{name} with: {command}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}/meta.json: no description of a data set ({error}); "
                        "prepare the data again") from None
    if tokenizer and meta['tokenizer'] != tokenizer.name:
        raise UserError(f"{folder} has {meta['tokenizer']} tokens, not {tokenizer.name}")
    return meta


def shaped(value, shape):
    """
    The part of a JSON value that `shape` describes. A shape is a type, a dictionary of shapes, or a
    list with the shape of all entries. TypeError or KeyError where the value has another form.
    """
    if isinstance(shape, dict):
        return {key: shaped(value[key], inner) for key, inner in shape.items()}
    if isinstance(shape, list):
        return [shaped(entry, shape[0]) for entry in value]
    if type(value) is not shape:
        raise TypeError(f"{value!r} is no {shape.__name__}")
    return value


# --------------------------------------------------------------------------------------------------
# shards


def open_shard(path):
    """
    The tokens of a shard as a read-only memory map (n,) uint16; UserError if it is truncated or no
    shard.
    """
    try:
        header = np.fromfile(path, np.int32, HEADER_INTS)
        if len(header) < HEADER_INTS or header[0] != MAGIC or header[1] != VERSION:
            raise UserError(f"{path}: no token shard (header without magic {MAGIC}, "
                            f"version {VERSION}); prepare the data again")
        size = os.path.getsize(path)
        expected = HEADER_BYTES + 2 * int(header[2])
        if size != expected:
            raise UserError(f"{path}: damaged ({size} bytes, its header says {expected}); "
                            "prepare the data again")
        return np.memmap(path, np.uint16, 'r', HEADER_BYTES)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); prepare the data again") from None


def count_tokens(path, n_tokens):
    """
    How often each token occurs in a shard, (n_tokens,) int64. UserError if it is damaged or holds a
    token from n_tokens on.
    """
    tokens = open_shard(path)
    counts = np.zeros(2 ** 16, np.int64)
    for start in range(0, len(tokens), 2 ** 22):  # in parts: bincount makes int64 of them
        part = tokens[start:start + 2 ** 22]
        counts += np.bincount(part, minlength=2 ** 16)
    if counts[n_tokens:].any():
        largest = counts.nonzero()[0][-1]
        raise UserError(f"{path}: damaged (token {largest} of a vocabulary of {n_tokens}); "
                        "prepare the data again")
    return counts[:n_tokens]
