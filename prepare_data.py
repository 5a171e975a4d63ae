"""
Text to token shards.

    python prepare_data.py                              the built-in corpus: Python's own standard library, as bytes
    python prepare_data.py --packages=True              and the source of every installed package, for larger runs
    python prepare_data.py PATH... --name=mine          your .txt and .jsonl files, or folders of them -> data/mine
    python prepare_data.py shakespeare                  the classic, a megabyte -> data/shakespeare
    python prepare_data.py fineweb-edu --shards=10      download 10 x 100M tokens of the web, or of plain `fineweb`
    python prepare_data.py --check data/mine            compare a folder with its meta.json

Writes data/NAME/{train,val}_000000.bin in the format of the public GPT-2-tokenised FineWeb shards (see data.py), and
meta.json with tokenizer, vocabulary, counts and checksums; it comes last, so a folder with meta.json is complete. A document is a
file, or a record {"text": ...} of a .jsonl file; one above a megabyte is cut into many at line ends. Documents end with an end-of-text
token, and go to train or val by a hash of their content: adding files moves no other document, and a copy never lands on the other side
(too few documents are cut into pieces, until there are more). Whatever is interrupted goes on, or starts over, with the same command.
"""

import collections
import contextlib
import hashlib
import io
import json
import os
import shutil
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Optional

import numpy as np

from configurator import build, read

from engine.errors import UserError, run
from engine.files import alone, checksum, on_disk
from engine.shards import HEADER_BYTES, MAGIC, VERSION, count_tokens, encode, get_tokenizer, read_meta
from engine.download import FINEWEB, Progress, fineweb, shakespeare

SHARD_TOKENS = 10 ** 8       # tokens per shard, 200 MB
DOCUMENT_BYTES = 2 ** 20     # longer texts are cut, into 32 pieces of at most this size, or more
BUILTIN = 'data/python'      # train.py makes this one by itself


@dataclass
class DataSettings:
    """what to read and how to tokenise it"""
    name: Optional[str] = None      # folder under data/ (None: python, python-packages, or the name of the first thing given)
    tokenizer: Optional[str] = None # 'byte', or any tiktoken name with at most 65,536 tokens: gpt2, r50k_base (None: byte)
    packages: bool = False          # built-in corpus: add every installed package's source
    shards: int = 1                 # FineWeb: training shards to download, 100M tokens and 200 MB each
    val_fraction: float = 0.1       # share of the documents held out for validation


def walk(root, skip=()):
    """Paths of all files below a folder, sorted, without hidden ones, links to folders, and folders named in `skip`; of a file its own."""
    def refuse(error): raise UserError(f"{error.filename}: cannot be read ({error.strerror})")
    if not os.path.exists(root): raise UserError(f"{root}: no such file or folder, and no data set of that name")
    if os.path.isfile(root): return (yield root)
    for folder, subfolders, files in os.walk(root, onerror=refuse):
        subfolders[:] = sorted(d for d in subfolders if d not in skip and not d.startswith('.'))
        for path in (os.path.join(folder, f) for f in sorted(files) if not f.startswith('.')):
            if os.path.isfile(path) or not os.path.lexists(path): yield path  # no pipe or broken link; what vanished is an error


def python_sources(packages, *_):
    """The standard library's .py files, in the order of their paths; with `packages`, site-packages too."""
    paths = sysconfig.get_paths()
    # Not every installation has the tests and the other folders named here: without them the corpus is the same everywhere.
    skip = {'test', 'tests', 'idle_test', 'idlelib', 'lib2to3', 'turtledemo', 'ensurepip',
            'site-packages', 'dist-packages', '__pycache__'}
    roots = [paths['stdlib']] + (sorted({paths['purelib'], paths['platlib']}) if packages else [])
    for root in roots:
        for path in walk(root, skip):
            if path.endswith('.py') and not os.path.basename(path).startswith('_sysconfig'):  # differs per machine
                with on_disk(path, 'read'), open(path, 'rb') as f: yield f.read().replace(b'\r\n', b'\n')


def your_texts(paths, whole, progress):
    """
    The documents of your files and folders; of a folder all but hidden files and those with a NUL byte. Texts longer than
    `whole` bytes are cut. progress(n) is called with the bytes read so far.
    """
    done = 0
    for root in paths:
        for path in walk(root):
            with on_disk(path, 'read'), open(path, 'rb') as f:
                size = os.path.getsize(path)
                if path != root and b'\0' in f.peek(8192): texts = ()
                elif path.endswith('.jsonl'):
                    texts = (t for r in records(f, path) for t in cut(io.BufferedReader(io.BytesIO(r)), len(r), whole))
                else: texts = cut(f, size, whole)
                for text in texts:
                    yield text
                    progress(done + f.tell())
                done += size


def records(f, path):
    """The texts of a .jsonl file, as bytes."""
    for number, line in enumerate(iter(lambda: f.readline(2 ** 28), b''), 1):  # a longer line is not worth its memory
        try:
            if line.strip(): yield json.loads(line)['text'].encode('utf-8', errors='replace')
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise UserError(f'{path}:{number}: no JSON object with a text field, {{"text": "..."}}') from None


def cut(f, size, whole):
    """What the binary file holds: in one piece if it is no longer than `whole`, else in 32 or more that end with a line."""
    limit = size if size <= whole else min(DOCUMENT_BYTES, max(size // 32, 512))
    while text := f.read(limit):
        text += f.readline(limit)
        for _ in range(3):  # where there is no line end near, not inside a character at least
            if (following := f.peek(1)[:1]) and following[0] & 0xC0 == 0x80: text += f.read(1)
        yield text


def encode_all(tokenizer, texts):
    """(text, tokens) of each document, in order. tiktoken works outside of Python's lock, so that threads use all cores."""
    threads = os.cpu_count() or 1
    with ThreadPoolExecutor(threads) as pool:
        waiting = collections.deque()
        for text in texts:
            waiting.append((text, pool.submit(encode, tokenizer, text)))
            if len(waiting) > 4 * threads:  # no more than this is in memory
                text, tokens = waiting.popleft()
                yield text, tokens.result()
        for text, tokens in waiting: yield text, tokens.result()


class ShardWriter:
    """Appends tokens to shards SPLIT_000000.bin, ... of a folder."""

    def __init__(self, folder, split):
        self.folder, self.split, self.file = folder, split, None
        self.paths, self.sizes, self.bytes = [], [], 0

    def add(self, tokens, n_bytes):
        self.bytes += n_bytes
        while len(tokens):
            if self.file is None or self.sizes[-1] == SHARD_TOKENS:
                if self.file: self.file.close()
                self.paths.append(os.path.join(self.folder, f'{self.split}_{len(self.paths):06d}.bin'))
                self.sizes.append(0)
                self.file = open(self.paths[-1], 'wb')
                self.file.write(bytes(HEADER_BYTES))
            part, tokens = np.split(tokens, [SHARD_TOKENS - self.sizes[-1]])
            self.file.write(part.tobytes())
            self.sizes[-1] += len(part)

    def finish(self):
        """Write the headers, now that the counts are known, and make sure all is on disk. Returns the entry of meta.json."""
        self.file.close()
        entry = dict(bytes=self.bytes, tokens=sum(self.sizes), shards=[])
        for path, tokens in zip(self.paths, self.sizes):
            with open(path, 'r+b') as f:
                f.write(np.array([MAGIC, VERSION, tokens], np.int32).tobytes())
                f.flush()
                os.fsync(f.fileno())
            entry['shards'].append(dict(name=os.path.basename(path), tokens=tokens, sha256=checksum(path)))
        return entry


@contextlib.contextmanager
def workshop(folder):
    """An empty folder inside `folder`, which is made if missing; it disappears in the end."""
    work = os.path.join(folder, '.unfinished')
    with on_disk(folder, 'written'), alone(folder, wait=True):
        shutil.rmtree(work, ignore_errors=True)  # of a run that was killed
        os.mkdir(work)
        try: yield work
        finally: shutil.rmtree(work, ignore_errors=True)


def publish(work, folder, meta):
    """Move all shards of `work` to `folder` and write meta.json; between the first and the last there is no meta.json."""
    with open(os.path.join(work, 'meta.json'), 'w', encoding='utf-8') as f: json.dump(meta, f, indent=1)
    with contextlib.suppress(FileNotFoundError): os.remove(os.path.join(folder, 'meta.json'))
    for name in sorted(os.listdir(work), key=lambda name: name == 'meta.json'):
        os.replace(os.path.join(work, name), os.path.join(folder, name))


class BadSplit(UserError):
    """Too few documents for a training and a validation set."""


def write_dataset(folder, texts, tokenizer, val_fraction, source):
    """Tokenise an iterable of documents (bytes) into folder/{train,val}_*.bin and meta.json; returns the meta dictionary."""
    if not 0 < val_fraction < 0.5: raise UserError(f"--val_fraction={val_fraction} must be between 0 and 0.5")
    if tokenizer.n_vocab > 2 ** 16:
        raise UserError(f"--tokenizer={tokenizer.name}: its {tokenizer.n_vocab} tokens do not fit into 16 bits; use byte or gpt2")
    with workshop(folder) as work:
        train, val = (ShardWriter(work, split) for split in ('train', 'val'))
        for text, tokens in encode_all(tokenizer, texts):
            position = int.from_bytes(hashlib.sha256(text).digest()[:8], 'big') / 2 ** 64  # uniform in [0, 1)
            (val if position < val_fraction else train).add(tokens, len(text))
        if not train.bytes + val.bytes: raise UserError(f"{source}: there is no text (files with NUL bytes, as in UTF-16, are left out)")
        if not 0 < val.bytes < train.bytes:
            raise BadSplit(f"{source}: no sensible split, {train.bytes:,} bytes to train and {val.bytes:,} to val; give more text")
        meta = dict(tokenizer=tokenizer.name, n_tokens=tokenizer.n_vocab, eot=tokenizer.eot_token, source=source,
                    train=train.finish(), val=val.finish())
        publish(work, folder, meta)
    return meta


def check(folder):
    """Compare every shard of a data folder with its meta.json; UserError at the first difference."""
    meta = read_meta(folder)
    for split in ('train', 'val'):
        for shard in meta[split]['shards']:
            path = os.path.join(folder, shard['name'])
            if count_tokens(path, meta['n_tokens']).sum() != shard['tokens'] or checksum(path) != shard['sha256']:
                raise UserError(f"{path}: not the file that {folder}/meta.json describes; prepare the data again")
        print(f"{folder}: {split} is whole, {meta[split]['tokens']:,} tokens, {len(meta[split]['shards'])} shard(s)")


def made_from(folder):
    """What the data set in a folder was made from; None if there is none."""
    try: return read_meta(folder)['source']
    except UserError: return None


def prepare(settings, paths=()):
    """Do what the command line asked for; see the top of this file."""
    start, what = time.time(), paths[0] if len(paths) == 1 else None
    first = paths[0] if paths else 'python-packages' if settings.packages else 'python'
    folder = os.path.join('data', settings.name or os.path.basename(os.path.abspath(first)).lstrip('.').split('.')[0])
    if what in FINEWEB:
        with workshop(folder) as work: publish(work, folder, meta := fineweb(what, settings.shards, settings.tokenizer, folder))
    else:
        tokenizer = get_tokenizer(settings.tokenizer or 'byte')
        if what == 'shakespeare':
            with workshop(folder): paths = [shakespeare(folder)]
        texts = partial(your_texts, paths) if paths else partial(python_sources, settings.packages)
        source = ' '.join(paths) or 'Python source'
        for path in paths:
            if made_from(path) is not None: raise UserError(f"{path}: a data set, no text; to see whether it is whole: --check {path}")
        if settings.name is None and (before := made_from(folder)) not in (None, source):
            raise UserError(f"{folder} was made from {before}: give another --name, or --name={os.path.basename(folder)} to replace it")
        total = sum(os.path.getsize(file) for path in paths for file in walk(path))
        for whole in (DOCUMENT_BYTES, 0):
            try:
                with Progress(folder, total) as progress:
                    meta = write_dataset(folder, texts(whole, progress), tokenizer, settings.val_fraction, source)
                break
            except BadSplit:
                if not whole: raise
                print(f"{folder}: too few documents to keep whole ones for validation; all are cut into pieces, until there are more")
    print(f"{folder}: {meta['train']['tokens']:,} training and {meta['val']['tokens']:,} validation tokens "
          f"({meta['tokenizer']}) in {time.time() - start:.1f} s")


def main(argv):
    if argv[:1] == ['--check']:
        if len(argv) != 2: raise UserError("--check: name one data folder, as in --check data/mine")
        return check(argv[1])
    given, paths = read(argv, __doc__.strip(), DataSettings, files=False)  # a .py file is text here
    prepare(build(DataSettings, given), paths)


if __name__ == '__main__':
    run(main)
