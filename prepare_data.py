"""
Text to token shards.

    python prepare_data.py                          the built-in corpus: Python's own standard library, as bytes
    python prepare_data.py --packages=True          and the source of every installed package, for larger runs
    python prepare_data.py PATH... --name=mine      your text files, or folders of them -> data/mine

Writes data/NAME/{train,val}_000000.bin and meta.json. A shard is 256 int32 (magic 20240520, version 1, token count),
then the tokens as uint16: the format of the public GPT-2-tokenised FineWeb shards. Documents end with an end-of-text
token. A document goes to train or val by a hash of its content, so that adding files moves no other document and a
copy never lands on the other side. meta.json names tokenizer, vocabulary, counts and checksums; it is written last, so
a folder with meta.json is complete.
"""

import hashlib
import json
import os
import sysconfig
import time
from dataclasses import dataclass
from typing import Optional

import numpy as np

from configurator import UserError, build, read, run
from data import HEADER_BYTES, MAGIC, VERSION, get_tokenizer

SHARD_TOKENS = 10 ** 8       # tokens per shard, 200 MB
PIECE_BYTES = 2 ** 16        # your files go to train and val in pieces, cut at line ends: a 32nd of the file, at most this
BUILTIN = 'data/python'      # train.py makes this one by itself


@dataclass
class DataSettings:
    """what to read and how to tokenise it"""
    name: Optional[str] = None      # folder under data/ (None: python, python-packages, or the first PATH's name)
    tokenizer: str = 'byte'         # 'byte' needs no download; or any tiktoken name with at most 65,536 tokens: gpt2, r50k_base
    packages: bool = False          # built-in corpus: add every installed package's source
    val_fraction: float = 0.1       # share of the documents held out for validation


def encode(tokenizer, text):
    """Tokens (n,) uint16 of a bytes object. Bytes that are no UTF-8 are kept by the byte tokenizer, others see U+FFFD instead."""
    if tokenizer.name == 'byte':
        return np.frombuffer(text, np.uint8).astype(np.uint16)  # what the Encoding would say, without its loop
    return np.array(tokenizer.encode_ordinary(text.decode('utf-8', errors='replace')), np.uint16)


# ----------------------------------------------------------------------------------------------------------------------
# where text comes from: generators of (bytes, whether a document ends here)

def python_sources(packages):
    """The standard library's .py files, one document each, in the order of their paths; with `packages`, site-packages too."""
    paths = sysconfig.get_paths()
    # Not every installation has the tests and the other folders named here: without them the corpus is the same everywhere.
    skip = {'test', 'tests', 'idle_test', 'idlelib', 'lib2to3', 'turtledemo', 'ensurepip',
            'site-packages', 'dist-packages', '__pycache__'}
    roots = [paths['stdlib']] + (sorted({paths['purelib'], paths['platlib']}) if packages else [])
    for root in roots:
        for path in walk(root, skip):
            if path.endswith('.py') and not os.path.basename(path).startswith('_sysconfig'):  # differs per machine
                with open(path, 'rb') as f: yield f.read().replace(b'\r\n', b'\n'), True


def walk(root, skip=()):
    """Paths of all files below a folder, sorted, hidden ones and folders named in `skip` left out."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(d for d in subfolders if d not in skip and not d.startswith('.'))
        yield from (os.path.join(folder, f) for f in sorted(files) if not f.startswith('.'))


def text_files(paths):
    """Your files, and the text files of your folders, in pieces: all of a folder but hidden files and those with a NUL byte."""
    for root in paths:
        if not os.path.exists(root): raise UserError(f"{root}: no such file or folder")
        for path in walk(root) if os.path.isdir(root) else [root]:
            try:
                size = os.path.getsize(path)
                with open(path, 'rb') as f:
                    if os.path.isdir(root) and b'\0' in f.read(8192): continue  # not text
                    f.seek(0)
                    while piece := f.read(min(PIECE_BYTES, size // 32 + 1)):
                        yield piece + f.readline(PIECE_BYTES), f.tell() >= size
            except OSError as error:
                raise UserError(f"{path}: cannot be read ({error.strerror})") from None


# ----------------------------------------------------------------------------------------------------------------------
# writing and reading shards

class ShardWriter:
    """Appends tokens to shards SPLIT_000000.bin, ... of a folder, under temporary names until `publish`."""

    def __init__(self, folder, split):
        self.folder, self.split = folder, split
        self.names, self.sizes, self.bytes, self.file = [], [], 0, None

    def add(self, tokens, n_bytes):
        self.bytes += n_bytes
        while len(tokens):
            if self.file is None or self.sizes[-1] == SHARD_TOKENS: self._next()
            part, tokens = np.split(tokens, [SHARD_TOKENS - self.sizes[-1]])
            self.file.write(part.tobytes())
            self.sizes[-1] += len(part)

    def _next(self):
        self.close()
        self.names.append(f'{self.split}_{len(self.names):06d}.bin')
        self.sizes.append(0)
        self.file = open(os.path.join(self.folder, self.names[-1] + '.tmp'), 'wb')
        self.file.write(bytes(HEADER_BYTES))

    def close(self):
        """Write the header, now that the count is known, and make sure all of it is on disk."""
        if self.file is None: return
        header = np.zeros(256, np.int32)
        header[:3] = MAGIC, VERSION, self.sizes[-1]
        self.file.seek(0)
        self.file.write(header.tobytes())
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self.file = None

    def discard(self):
        """Remove what was not published."""
        if self.file is not None: self.file.close()
        for name in self.names:
            if os.path.exists(path := os.path.join(self.folder, name + '.tmp')): os.remove(path)

    def publish(self):
        """Give the shards their final names; returns their entry in meta.json."""
        self.close()
        for name in self.names: os.replace(os.path.join(self.folder, name + '.tmp'), os.path.join(self.folder, name))
        shards = [dict(name=name, tokens=tokens, sha256=checksum(os.path.join(self.folder, name)))
                  for name, tokens in zip(self.names, self.sizes)]
        return dict(bytes=self.bytes, tokens=sum(self.sizes), shards=shards)


def checksum(path):
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with open(path, 'rb') as f:
        while block := f.read(2 ** 20): digest.update(block)
    return digest.hexdigest()


def write_dataset(folder, texts, tokenizer, val_fraction, source):
    """Tokenise an iterable of (bytes, document ends) into folder/{train,val}_*.bin and meta.json; returns the meta dictionary."""
    if tokenizer.n_vocab > 2 ** 16:
        raise UserError(f"--tokenizer={tokenizer.name}: its {tokenizer.n_vocab} tokens do not fit into 16 bits; use byte or gpt2")
    if not 0 < val_fraction < 1: raise UserError(f"--val_fraction={val_fraction} must be between 0 and 1")
    writers = {split: ShardWriter(folder, split) for split in ('train', 'val')}
    meta_path = os.path.join(folder, 'meta.json')
    try:
        os.makedirs(folder, exist_ok=True)
        for text, ends in texts:
            position = int.from_bytes(hashlib.sha256(text).digest()[:8], 'big') / 2 ** 64  # uniform in [0, 1)
            tokens = encode(tokenizer, text)
            writers['val' if position < val_fraction else 'train'].add(
                np.append(tokens, np.uint16(tokenizer.eot_token)) if ends else tokens, len(text))
        for split, writer in writers.items():
            if not writer.bytes:
                raise UserError(f"{source}: no text fell to {split}; give more text, or change --val_fraction={val_fraction}")
        if os.path.exists(meta_path): os.remove(meta_path)  # from here until the end the folder is incomplete
        meta = dict(tokenizer=tokenizer.name, n_tokens=tokenizer.n_vocab, eot=tokenizer.eot_token, source=source,
                    **{split: writer.publish() for split, writer in writers.items()})
        with open(meta_path + '.tmp', 'w', encoding='utf-8') as f: json.dump(meta, f, indent=1)
        os.replace(meta_path + '.tmp', meta_path)
        return meta
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from None
    finally:
        for writer in writers.values(): writer.discard()


def prepare(settings, paths=()):
    """Do what the command line asked for; see the top of this file."""
    start = time.time()
    tokenizer = get_tokenizer(settings.tokenizer)
    name = settings.name or (os.path.basename(os.path.abspath(paths[0])).split('.')[0] if paths else
                             'python-packages' if settings.packages else 'python')
    texts, source = (text_files(paths), ' '.join(paths)) if paths else (python_sources(settings.packages), 'Python source')
    folder = os.path.join('data', name)
    meta = write_dataset(folder, texts, tokenizer, settings.val_fraction, source)
    print(f"{folder}: {meta['train']['tokens']:,} training and {meta['val']['tokens']:,} validation tokens "
          f"({tokenizer.name}) in {time.time() - start:.1f} s")


def main(argv):
    given, paths = read(argv, __doc__.strip(), DataSettings, files=False)  # a .py file is text here
    prepare(build(DataSettings, given), paths)


if __name__ == '__main__':
    run(main)
