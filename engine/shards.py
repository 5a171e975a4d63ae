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
import re

import numpy as np
import tiktoken

from engine.files import UserError, shown
from engine.tasks import task_of

MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = HEADER_INTS * 4

# what meta.json holds
SHARD = dict(name=str, tokens=int, sha256=str)
SPLIT = dict(bytes=int, tokens=int, shards=[SHARD])  # bytes of text, for losses per byte
META = dict(tokenizer=str, n_tokens=int, eot=int, source=str, train=SPLIT, val=SPLIT)

CALLED = {int: 'a whole number', str: 'text', dict: 'a dictionary', list: 'a list'}

# tokenizer: (tokens, end-of-text), where it takes no download to know
VOCABULARIES = {'byte': (257, 256), 'gpt2': (50257, 50256), 'r50k_base': (50257, 50256)}

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
        from engine.released import FolderTokenizer     # it imports PyTorch, and takes a second
        return FolderTokenizer(name.removeprefix('hf:'))
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


def knows_tokens(n_tokens, name, n_vocab):
    """
    Whether a model of n_tokens tokens was made for the tokenizer of this name, which has n_vocab.
    Models of Hugging Face folders may have more than their tokenizers.
    """
    return n_tokens == n_vocab or (name.startswith('hf:') and n_tokens > n_vocab)


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
            meta = shaped(json.load(f), META, 'it')
        check_meta(meta)
    except FileNotFoundError:
        name = os.path.basename(os.path.normpath(folder))
        arguments = KNOWN.get(name, f"PATH... --name={name}")
        command = f"python prepare_data.py {arguments}".rstrip()
        raise UserError(
            f"{folder}: no data set (no meta.json); make data/{name} with: {command}") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, Damaged) else "it is no JSON"
        if isinstance(error, OSError):
            reason = error.strerror
        raise UserError(f"{folder}/meta.json: no description of a data set ({reason}); "
                        "prepare the data again") from None
    if tokenizer and meta['tokenizer'] != tokenizer.name:
        raise UserError(f"{folder} has {meta['tokenizer']} tokens, not {tokenizer.name}")
    return meta


class Damaged(ValueError):
    """What is wrong with a meta.json."""


def require(ok, message):
    if not ok:
        raise Damaged(message)


def shaped(value, shape, name):
    """
    The part of a JSON value that `shape` describes. A shape is a type, a dictionary of shapes, or a
    list with the shape of all entries. Damaged where the value has another form; `name` says where.
    """
    kind = shape if isinstance(shape, type) else type(shape)
    require(type(value) is kind, f"{name} should be {CALLED[kind]}, not {shown(value)}")
    if kind is dict:
        parts = {}
        for key, inner in shape.items():
            require(key in value, f"{name} has no {key}")
            parts[key] = shaped(value[key], inner, key if name == 'it' else f'{name}.{key}')
        return parts
    if kind is list:
        return [shaped(value[i], shape[0], f'{name}[{i}]') for i in range(len(value))]
    return value


def check_meta(meta):
    """Damaged where counts, names, checksums or vocabulary contradict each other."""
    name, n_tokens, eot = meta['tokenizer'], meta['n_tokens'], meta['eot']
    known = name in VOCABULARIES or name in tiktoken.list_encoding_names()
    require(known or name.startswith('hf:'), f"tiktoken knows no encoding {shown(name)}")
    require(0 <= eot < n_tokens <= 2 ** 16, f"n_tokens={n_tokens} and eot={eot} are no vocabulary")
    right = VOCABULARIES.get(name, (n_tokens, eot))
    require((n_tokens, eot) == right,
            f"{name} has n_tokens={right[0]} and eot={right[1]}, not {n_tokens} and {eot}")
    require(name == 'byte' or task_of(meta) is None,
            f"a made task has byte tokens, not {name}")
    for split in ('train', 'val'):
        check_split(meta[split], split, one_byte_each=name == 'byte')
    shards = meta['train']['shards'] + meta['val']['shards']
    for key, what in (('name', "is listed twice"), ('sha256', "is a copy of another shard")):
        seen = set()
        for shard in shards:
            require(shard[key] not in seen, f"{shard['name']} {what}")
            seen.add(shard[key])


def check_split(split, name, one_byte_each):
    """Damaged where the entry of a split contradicts itself. name: 'train' or 'val'."""
    shards = split['shards']
    tokens = [shard['tokens'] for shard in shards]
    require(split['bytes'] > 0, f"{name}.bytes={split['bytes']} must be positive")
    require(all(0 < n < 2 ** 31 for n in tokens), f"{name}: a shard's tokens must be positive")
    require(sum(tokens) == split['tokens'] > 0, f"{name}.tokens={split['tokens']}, but its shards "
                                                f"have {sum(tokens)} together")
    require(not one_byte_each or split['bytes'] <= split['tokens'],
            f"{name} has more bytes than tokens, which are bytes here")
    for shard in shards:
        file, checksum = shard['name'], shard['sha256']
        plain = re.fullmatch(r'[^/\\\0]+\.bin', file) and file.isprintable()
        require(plain, f"{name}: {shown(file)} is no name of a shard")
        require(re.fullmatch('[0-9a-f]{64}', checksum), f"{file}: {shown(checksum)} is no SHA-256")
    names = [shard['name'] for shard in shards]
    require(names == sorted(names), f"{name}: shards are not in the order of their names")


# --------------------------------------------------------------------------------------------------
# shards


def open_shard(path, tokens=None):
    """
    The tokens of a shard as a read-only memory map (n,) uint16; UserError if it is truncated or no
    shard, or has another number of `tokens` than meta.json says.
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
        if tokens not in (None, header[2]):
            raise UserError(f"{path}: not the file that meta.json describes ({header[2]} tokens, "
                            f"not {tokens}); prepare the data again")
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
        refuse_tokens(path, tokens, n_tokens)
    return counts[:n_tokens]


def refuse_tokens(path, tokens, n_tokens, first=0):
    """UserError for the largest of `tokens` (n,), which are those from place `first` of a shard."""
    place = int(tokens.argmax())
    raise UserError(f"{path}: damaged (token {tokens[place]} of a vocabulary of {n_tokens}, at "
                    f"place {first + place}); prepare the data again")
