"""
Tokens on disk: tokenizers, token shards, and meta.json, which describes them.

    tokenizer = get_tokenizer('byte')         or 'gpt2', another name of tiktoken, or hf:FOLDER
    tokens = encode(tokenizer, b'text')       (n,), with the end-of-text token
    token_lengths(tokenizer)                  (n_vocab,), how much text is in a token
    meta = read_meta('data/python')           the folder's description
    tokens = open_shard(path)                 (n,) uint16, a read-only map of the file

A data folder holds shards train_000000.bin, val_000000.bin, ... and meta.json; prepare_data.py
writes both. A shard is 256 int32 (magic 20240520, version 1, token count, zeros), then the tokens
as uint16. meta.json holds

    tokenizer, n_tokens, eot    the tokenizer's name, its tokens, which of them is end-of-text
    tokenizer_id                of hf:FOLDER, checksums of the tokens + of how they are found; null:
                                the name says it all
    source                      what the data was made of
    train, val                  each bytes (of text), tokens, shards: a list of name, tokens, sha256
"""

import contextlib
import json
import os

import numpy as np
import tiktoken

from engine.files import UserError, typed
from engine.tasks import TASKS

MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = HEADER_INTS * 4

# what prepare_data.py makes by itself or downloads: data/NAME, and the arguments that make it
KNOWN = {'python': '', 'python-packages': '--packages=True',
         'trees': 'minimax --size=6 --name=trees',
         **{name: name for name in ('shakespeare', 'fineweb', 'fineweb-edu', *TASKS)}}


def get_tokenizer(name):
    """
    A tiktoken Encoding by name. 'byte' is built here: token i is byte i, token 256 is end-of-text.
    hf:FOLDER is a Hugging Face folder's. Others are fetched by tiktoken at first use. UserError if
    the name is unknown or the download fails.
    """
    if name.startswith('hf:'):
        from engine.released import FolderTokenizer  # which loads torch
        return FolderTokenizer(name.removeprefix('hf:'))
    if name == 'byte':
        single_bytes = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding('byte', pat_str=r'(?s:.)', mergeable_ranks=single_bytes,
                                 special_tokens={'<|endoftext|>': 256})
    if name not in tiktoken.list_encoding_names():
        raise UserError(f"tokenizer {name}: tiktoken knows no such encoding; use byte, gpt2 or "
                        "another of its names")
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # no network; a wrong checksum
        reason = type(error).__name__
        raise UserError(f"the vocabulary of {name} could not be fetched ({reason}); check the "
                        "network") from None


def knows_tokens(n_tokens, name, n_vocab):
    """Whether a model with n_tokens suits this tokenizer of n_vocab; those of hf: may have more."""
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


def token_lengths(tokenizer):
    """Bytes of text in each token, (n_vocab,); end-of-text has none."""
    lengths = np.zeros(tokenizer.n_vocab, np.int64)
    for token in range(tokenizer.n_vocab):
        if token != tokenizer.eot_token:
            lengths[token] = len(tokenizer.decode_single_token_bytes(token))
    return lengths


def is_ours(meta):
    """Whether what a meta.json holds describes a data set, and is not another program's."""
    ours = {'source', 'tokenizer', 'n_tokens', 'eot', 'train', 'val'}
    return isinstance(meta, dict) and ours <= meta.keys()


def of_another_program(path):
    """Whether a meta.json is whole, and not ours."""
    with contextlib.suppress(ValueError), open(path, encoding='utf-8') as f:
        return not is_ours(json.load(f))
    return False


def read_meta(folder, tokenizer=None):
    """
    meta.json of a data folder, as a dictionary. UserError if there is none, with the command that
    makes it, and if the tokens are not those of `tokenizer`.
    """
    path = os.path.join(folder, 'meta.json')
    if not os.path.exists(path):
        name = os.path.basename(os.path.normpath(folder))
        arguments = KNOWN.get(name, typed('PATH...', f'--name={name}'))
        command = f"python prepare_data.py {arguments}".rstrip()
        raise UserError(f"{folder}: no data set (no meta.json); make data/{name} with: {command}")
    try:
        with open(path, encoding='utf-8') as f:
            meta = json.load(f)
    except ValueError:      # a copy that broke off
        raise UserError(f"{path}: damaged: copy the folder again, or remove that file and prepare "
                        "the data again") from None
    if not is_ours(meta):
        raise UserError(f"{path}: another program's: name a folder that prepare_data.py made")
    if tokenizer is None:
        return meta
    same = (meta['n_tokens'], meta['eot']) == (tokenizer.n_vocab, tokenizer.eot_token)
    if not same or not one_tokenizer(meta, identity(tokenizer)):
        raise UserError(f"{folder} has tokens of {meta['tokenizer']} that are not those of "
                        f"{tokenizer.name}")
    return meta


def identity(tokenizer):
    """What meta.json and checkpoints keep of a tokenizer, for `one_tokenizer`."""
    return {'tokenizer': tokenizer.name, 'tokenizer_id': getattr(tokenizer, 'id', None)}


def one_tokenizer(*kept):
    """
    Whether two meta.json or checkpoints have the same tokens. A family of models has them in
    several folders, and another tokenizer may lie in a folder now.
    """
    return len(set(map(which_tokens, kept))) == 1


def which_tokens(kept):
    """What tells them from others: the tokenizer's name, or of hf:FOLDER its id."""
    name, known = kept['tokenizer'], kept.get('tokenizer_id') or ''
    if not name.startswith('hf:') or '+' in known:
        return known or name
    now = get_tokenizer(name).id    # older ones kept its first half, or nothing
    return now if now.startswith(known) else known


def open_shard(path, tokens=None):
    """
    Tokens (n,) uint16 of a shard, a read-only map of the file. UserError if it is truncated or no
    shard, or has another number of `tokens` than meta.json says.
    """
    if not os.path.exists(path):
        raise UserError(f"{path}: there is no such file; prepare the data again")
    header = np.fromfile(path, np.int32, HEADER_INTS)
    if len(header) < HEADER_INTS or header[0] != MAGIC or header[1] != VERSION:
        raise UserError(f"{path}: no token shard (header without magic {MAGIC}, version "
                        f"{VERSION}); prepare the data again")
    has = (os.path.getsize(path) - HEADER_BYTES) / 2
    expected = header[2] if tokens is None else tokens
    if not has == header[2] == expected:
        raise UserError(f"{path}: damaged, or another file ({has:.10g} tokens, not {expected}); "
                        "prepare the data again")
    return np.memmap(path, np.uint16, 'r', HEADER_BYTES)


def count_tokens(path, n_tokens):
    """
    How often each token occurs in a shard, (n_tokens,) int64. UserError if it is damaged or holds a
    token from n_tokens on.
    """
    tokens = open_shard(path)
    counts = np.zeros(2 ** 16, np.int64)
    for start in range(0, len(tokens), 2 ** 22):  # in parts: bincount makes int64 of them
        counts += np.bincount(tokens[start:start + 2 ** 22], minlength=2 ** 16)
    if counts[n_tokens:].any():
        raise UserError(f"{path}: damaged (token {tokens.max()} of a vocabulary of {n_tokens}); "
                        "prepare the data again")
    return counts[:n_tokens]
