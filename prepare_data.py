"""
Text to token shards.

    python prepare_data.py                          built-in corpus: the standard library, as bytes
    python prepare_data.py --packages=True          and every installed package, for larger runs
    python prepare_data.py PATH... --name=mine      your .txt and .jsonl files, or folders of them
    python prepare_data.py shakespeare              the classic, a megabyte
    python prepare_data.py fineweb-edu --shards=10  10 x 100M tokens of the web; or plain `fineweb`
    python prepare_data.py addition --size=6        problems that take steps: engine/tasks.py; or
                                                    `traffic`, `minimax`
    python prepare_data.py --check data/mine        compare a folder with its meta.json

Writes data/NAME/{train,val}_000000.bin in the format of the public GPT-2-tokenised FineWeb shards
(see engine/shards.py), and meta.json with tokenizer, vocabulary, counts and checksums; it comes
last, so a folder with meta.json is complete.

A document is a file, or a record {"text": ...} of a .jsonl file; one above a megabyte is cut into
many at line ends. Documents end with an end-of-text token, and go to train or val by a hash of
their content: adding files moves no other document, and a copy never lands on the other side. (Too
few documents are cut into pieces, until there are more.) Whatever is interrupted goes on, or starts
over, with the same command.
"""

import collections
import contextlib
import hashlib
import io
import json
import math
import os
import shutil
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Optional

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # python -I leaves this out
from configurator import build, path_of, read
from engine.download import FINEWEB, Progress, fineweb, shakespeare
from engine.files import UserError, alone, checksum, on_disk, run
from engine.shards import HEADER_BYTES, MAGIC, VERSION
from engine.shards import count_tokens, encode, get_tokenizer, open_shard, read_meta
from engine.tasks import TASKS, check_task, problems

SHARD_TOKENS = 10 ** 8       # tokens per shard, 200 MB
DOCUMENT_BYTES = 2 ** 20     # longer texts are cut, into 32 pieces of at most this size, or more
SHORTEST = 16                # bytes of a piece

# what train.py makes by itself: the folder, and the paths to prepare it from
BUILTIN = {'data/python': (), **{f'data/{name}': (name,) for name in TASKS}}


@dataclass
class DataSettings:
    """what to read and how to tokenise it"""
    name: Optional[str] = None      # folder under data/ (None: python[-packages], or as PATH)
    tokenizer: Optional[str] = None # up to 65,536 tokens: gpt2, .., or hf:FOLDER (None: byte)
    packages: bool = False          # built-in corpus: add every installed package's source
    shards: int = 1                 # FineWeb: training shards to download, each 100M tokens, 200 MB
    val_fraction: float = 0.1       # share of the documents held out for validation
    size: Optional[int] = None      # made tasks: digits, rounds or levels (None: the task's own)
    problems: int = 200_000         # made tasks: how many, training and validation together
    seed: int = 1337                # made tasks: of the draw


def main(argv):
    if argv[:1] == ['--check']:
        if len(argv) != 2:
            raise UserError("--check: name one data folder, as in --check data/mine")
        check(path_of(argv[1]))
        return
    given, paths = read(argv, __doc__, DataSettings, files=False)  # a .py file is text here
    prepare(build(DataSettings, given), paths)


def prepare(settings, paths=()):
    """Do what the command line asked for; see the top of this file."""
    start = time.time()
    folder = choose_folder(settings, paths)
    made = len(paths) == 1 and paths[0] in TASKS
    if settings.size is not None and not made:
        raise UserError(f"--size is for made tasks: {', '.join(TASKS)}")
    if len(paths) == 1 and paths[0] in FINEWEB:
        meta = prepare_fineweb(settings, paths[0], folder)
    elif made:
        meta = prepare_task(settings, paths[0], folder)
    else:
        meta = prepare_text(settings, paths, folder)
    train, val = meta['train']['tokens'], meta['val']['tokens']
    print(f"{folder}: {train:,} training and {val:,} validation tokens "
          f"({meta['tokenizer']}) in {time.time() - start:.1f} s")


def prepare_builtin(folder):
    """Make one of the BUILTIN data sets, if it is missing."""
    if folder not in BUILTIN or os.path.exists(os.path.join(folder, 'meta.json')):
        return
    paths = BUILTIN[folder]
    what = "the built-in corpus, the source code of Python's standard library"
    if paths:
        what = f"the made task {paths[0]}"
    print(f"{folder} is missing: preparing {what}")
    prepare(DataSettings(), paths)


def choose_folder(settings, paths):
    """
    data/NAME: of --name, or as the first path, without leading dots and what follows a dot.
    UserError if that is not the name of a folder inside data/.
    """
    if settings.name is not None:
        name = settings.name
    elif paths:
        name = os.path.basename(os.path.abspath(paths[0])).lstrip('.').split('.')[0]
    elif settings.packages:
        name = 'python-packages'
    else:
        name = 'python'
    if not name or name.startswith('.') or set(name) & set('/\\'):
        raise UserError(f"--name={name}: should be the name of a folder in data/, without / and a "
                        "dot in front")
    return os.path.join('data', name)


def prepare_fineweb(settings, kind, folder):
    """Download shards, which are tokens already. Returns the meta dictionary."""
    with workshop(folder) as work:
        meta = fineweb(kind, settings.shards, settings.tokenizer, folder)
        publish(work, folder, meta)
    return meta


def prepare_task(settings, name, folder):
    """Make the problems of a task. Returns the meta dictionary."""
    size = TASKS[name].default_size if settings.size is None else settings.size
    check_task(name, size, settings.problems)
    source = f'{name} --size={size} --problems={settings.problems} --seed={settings.seed}'
    refuse_other(settings, folder, source)
    texts = problems(name, size, settings.problems, settings.seed)
    return write_dataset(folder, texts, get_tokenizer('byte'), settings.val_fraction, source)


def prepare_text(settings, paths, folder):
    """Tokenise what the paths name, or else Python's own source. Returns the meta dictionary."""
    tokenizer = get_tokenizer(settings.tokenizer or 'byte')
    if list(paths) == ['shakespeare']:
        with workshop(folder):
            paths = [shakespeare(folder)]
    refuse_mistakes(settings, paths, folder)
    try:
        return tokenise(settings, paths, folder, tokenizer, DOCUMENT_BYTES)
    except BadSplit:
        print(f"{folder}: too few documents to keep whole ones for validation; "
              "all are cut into pieces, until there are more")
    return tokenise(settings, paths, folder, tokenizer, 0)


def refuse_mistakes(settings, paths, folder):
    """UserError for a data set in place of a text, and as in refuse_other."""
    for path in paths:
        if made_from(path) is not None:
            raise UserError(f"{path}: a data set, no text; "
                            f"to see whether it is whole: --check {path}")
    refuse_other(settings, folder, source_of(paths))


def refuse_other(settings, folder, source):
    """UserError for a data set that would be replaced by another, unless --name asks for it."""
    before = made_from(folder)
    if settings.name is None and before not in (None, source):
        same_name = f"--name={os.path.basename(folder)}"
        raise UserError(f"{folder} was made from {before}: "
                        f"give another --name, or {same_name} to replace it")


def made_from(folder):
    """What the data set in a folder was made from; None if there is none."""
    try:
        return read_meta(folder)['source']
    except UserError:
        return None


def source_of(paths):
    """How meta.json names what the texts come from."""
    return ' '.join(paths) or 'Python source'


def tokenise(settings, paths, folder, tokenizer, longest):
    """One data set from all texts; those longer than `longest` bytes are cut."""
    total = sum(os.path.getsize(file) for path in paths for file in walk(path))
    with Progress(folder, total) as progress:
        if paths:
            texts = your_texts(paths, longest, progress, settings.val_fraction)
        else:
            texts = python_sources(settings.packages)
        return write_dataset(folder, texts, tokenizer, settings.val_fraction, source_of(paths))


def check(folder):
    """Compare all shards of a data folder with its meta.json; UserError at the first difference."""
    meta = read_meta(folder)
    for split in ('train', 'val'):
        counts = np.zeros(meta['n_tokens'], np.int64)
        for shard in meta[split]['shards']:
            path = os.path.join(folder, shard['name'])
            open_shard(path, shard['tokens'])
            counts += count_tokens(path, meta['n_tokens'])
            if checksum(path) != shard['sha256']:
                raise UserError(f"{path}: not the file that {folder}/meta.json describes; "
                                "prepare the data again")
        text = counts.sum() - counts[meta['eot']]
        if meta['tokenizer'] == 'byte' and text != meta[split]['bytes']:
            raise UserError(f"{folder}/meta.json: {split}.bytes={meta[split]['bytes']}, but its "
                            f"shards hold {text} bytes of text; prepare the data again")
        tokens, shards = meta[split]['tokens'], len(meta[split]['shards'])
        print(f"{folder}: {split} is whole, {tokens:,} tokens, {shards} shard(s)")


# --------------------------------------------------------------------------------------------------
# reading texts


def walk(root, skip=()):
    """
    Paths of all files below a folder, sorted, without hidden ones, links to folders, and folders
    named in `skip`; of a file its own.
    """
    if not os.path.exists(root):
        raise UserError(f"{root}: no such file or folder, and no data set of that name")
    if not os.path.isdir(root):
        yield root
        return
    for folder, subfolders, files in os.walk(root, onerror=refuse_folder):
        # os.walk goes on with what is left in this list
        subfolders[:] = sorted(visible(subfolders) - set(skip))
        for name in sorted(visible(files)):
            path = os.path.join(folder, name)
            is_file = os.path.isfile(path)        # no pipe, no broken link
            vanished = not os.path.lexists(path)  # an error, for whoever opens it
            if is_file or vanished:
                yield path


def visible(names):
    return {name for name in names if not name.startswith('.')}


def refuse_folder(error):
    """os.walk calls this for a folder it cannot list."""
    raise UserError(f"{error.filename}: cannot be read ({error.strerror})")


def python_sources(packages):
    """
    The standard library's .py files, in the order of their paths; with `packages`, site-packages
    too.
    """
    # Not every installation has the tests and the other folders named here: without them the corpus
    # is the same everywhere.
    skip = {'test', 'tests', 'idle_test', 'idlelib', 'lib2to3', 'turtledemo', 'ensurepip',
            'site-packages', 'dist-packages', '__pycache__'}
    paths = sysconfig.get_paths()
    roots = [paths['stdlib']]
    if packages:
        roots += sorted({paths['purelib'], paths['platlib']})
    for root in roots:
        for path in walk(root, skip):
            differs_per_machine = os.path.basename(path).startswith('_sysconfig')
            if path.endswith('.py') and not differs_per_machine:
                with on_disk(path, 'read'), open(path, 'rb') as f:
                    yield f.read().replace(b'\r\n', b'\n')


def your_texts(paths, longest, progress, val_fraction=DataSettings.val_fraction):
    """
    The documents of your files and folders; of a folder all but hidden files and those with a NUL
    byte. Texts longer than `longest` bytes are cut. progress(n) is called with the bytes read so
    far.
    """
    done = 0
    for root in paths:
        for path in walk(root):
            with on_disk(path, 'read'), open(path, 'rb') as f:
                size = os.path.getsize(path)
                if path == root or b'\0' not in f.peek(8192):
                    for text in documents(f, path, longest, val_fraction):
                        yield text
                        progress(done + f.tell())
                done += size


def documents(f, path, longest, val_fraction):
    """The documents of an open file."""
    if path.endswith('.jsonl'):
        for record in records(f, path):
            text = io.BufferedReader(io.BytesIO(record))
            yield from cut(text, len(record), longest, val_fraction)
    else:
        yield from cut(f, os.path.getsize(path), longest, val_fraction)


def records(f, path):
    """The texts of a .jsonl file, as bytes."""
    number = 0
    while line := f.readline(2 ** 28):  # a longer line is not worth its memory
        number += 1
        if not line.strip():
            continue
        try:
            text = json.loads(line)['text'].encode('utf-8', errors='replace')
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            form = 'no JSON object with a text field, {"text": "..."}'
            raise UserError(f"{path}:{number}: {form}") from None
        yield text


def cut(f, size, longest, val_fraction=DataSettings.val_fraction):
    """
    What the binary file holds: in one piece if it is no longer than `longest`, else in many that
    end with a line.
    """
    limit = choose_limit(f, size, val_fraction) if size > longest else size
    return pieces(f, limit)


def choose_limit(f, size, val_fraction):
    """
    Bytes of a piece, so that val_fraction of the text goes to val, within a fifth of it: 1/32 of
    the text or a megabyte, else less and less, or what comes nearest. It depends on nothing but the
    text: other files move no piece of this one.
    """
    limit = min(DOCUMENT_BYTES, max(size // 32, 512), max(size // 2, 1))
    if size * val_fraction > 100 * DOCUMENT_BYTES:
        return limit        # so many pieces have no need of a choice
    start = f.tell()
    errors = {}             # of each limit
    while True:
        val = sum(len(piece) for piece in pieces(f, limit) if position(piece) < val_fraction)
        f.seek(start)
        errors[limit] = abs(val / (size * val_fraction) - 1) if 0 < val < size else math.inf
        smaller = limit * 19 // 20
        if errors[limit] < 0.2 or smaller < SHORTEST:
            return min(errors, key=errors.get)
        limit = smaller


def pieces(f, limit):
    """The rest of a binary file, in pieces of `limit` bytes and what their last line still has."""
    while text := f.read(limit):
        text += f.readline(limit)
        for _ in range(3):  # where no line ends near, not inside a character at least
            following = f.peek(1)[:1]
            if following and following[0] & 0xC0 == 0x80:  # UTF-8: goes on with a character
                text += f.read(1)
        yield text


# --------------------------------------------------------------------------------------------------
# writing shards


def write_dataset(folder, texts, tokenizer, val_fraction, source):
    """
    Tokenise an iterable of documents (bytes) into folder/{train,val}_*.bin and meta.json; returns
    the meta dictionary.
    """
    if not 0 < val_fraction < 0.5:
        raise UserError(f"--val_fraction={val_fraction} must be between 0 and 0.5")
    if tokenizer.n_vocab > 2 ** 16:
        raise UserError(f"--tokenizer={tokenizer.name}: its {tokenizer.n_vocab} tokens do not fit "
                        "into 16 bits; use byte or gpt2")
    with workshop(folder) as work:
        train = ShardWriter(work, 'train')
        val = ShardWriter(work, 'val')
        for text, tokens in encode_all(tokenizer, texts):
            writer = val if position(text) < val_fraction else train
            writer.add(tokens, len(text))
        refuse_split(train.bytes, val.bytes, source)
        meta = dict(tokenizer=tokenizer.name, n_tokens=tokenizer.n_vocab, eot=tokenizer.eot_token,
                    source=source, train=train.finish(), val=val.finish())
        publish(work, folder, meta)
    return meta


def position(text):
    """A number in [0, 1) that is a function of the text, and uniform over many texts."""
    digest = hashlib.sha256(text).digest()
    return int.from_bytes(digest[:8], 'big') / 2 ** 64


class BadSplit(UserError):
    """Too few documents for a training and a validation set."""


def refuse_split(train, val, source):
    """UserError if there is no text; BadSplit if these bytes of it are no sensible split."""
    if train + val == 0:
        raise UserError(f"{source}: there is no text "
                        "(files with NUL bytes, as in UTF-16, are left out)")
    if not 0 < val < train:
        raise BadSplit(f"{source}: no sensible split, {train:,} bytes to train and {val:,} to val; "
                       "give more text")


def encode_all(tokenizer, texts):
    """
    (text, tokens) of each document, in order. tiktoken works outside of Python's lock, so that
    threads use all cores; for bytes there is nothing to work on.
    """
    if tokenizer.name == 'byte':
        for text in texts:
            yield text, encode(tokenizer, text)
        return
    threads = os.cpu_count() or 1
    with ThreadPoolExecutor(threads) as pool:
        waiting = collections.deque()
        for text in texts:
            waiting.append((text, pool.submit(encode, tokenizer, text)))
            if len(waiting) > 4 * threads:  # no more than this is in memory
                text, tokens = waiting.popleft()
                yield text, tokens.result()
        for text, tokens in waiting:
            yield text, tokens.result()


class ShardWriter:
    """Appends tokens to shards SPLIT_000000.bin, ... of a folder."""

    def __init__(self, folder, split):
        self.folder = folder
        self.split = split
        self.file = None    # the last shard, open
        self.paths = []     # all shards
        self.sizes = []     # and the tokens in each
        self.bytes = 0      # of text, in all

    def add(self, tokens, n_bytes):
        """Append the tokens (n,) uint16 of n_bytes of text."""
        self.bytes += n_bytes
        while len(tokens):
            if self.file is None or self.sizes[-1] == SHARD_TOKENS:
                self.open_next()
            room = SHARD_TOKENS - self.sizes[-1]
            part, tokens = tokens[:room], tokens[room:]
            self.file.write(part.tobytes())
            self.sizes[-1] += len(part)

    def open_next(self):
        """Begin a shard; its header is empty until the end."""
        if self.file is not None:
            self.file.close()
        path = os.path.join(self.folder, f'{self.split}_{len(self.paths):06d}.bin')
        self.paths.append(path)
        self.sizes.append(0)
        self.file = open(path, 'wb')
        self.file.write(bytes(HEADER_BYTES))

    def finish(self):
        """
        Write the headers, now that the counts are known, and make sure all is on disk. Returns the
        entry of meta.json.
        """
        self.file.close()
        shards = []
        for path, tokens in zip(self.paths, self.sizes):
            with open(path, 'r+b') as f:
                f.write(np.array([MAGIC, VERSION, tokens], np.int32).tobytes())
                f.flush()
                os.fsync(f.fileno())
            shards.append(dict(name=os.path.basename(path), tokens=tokens, sha256=checksum(path)))
        return dict(bytes=self.bytes, tokens=sum(self.sizes), shards=shards)


@contextlib.contextmanager
def workshop(folder):
    """An empty folder inside `folder`, which is made if missing; it disappears in the end."""
    work = os.path.join(folder, '.unfinished')
    with on_disk(folder, 'written'), alone(folder, wait=True):
        shutil.rmtree(work, ignore_errors=True)  # of a run that was killed
        os.mkdir(work)
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


def publish(work, folder, meta):
    """
    Move all shards of `work` to `folder` and write meta.json. Between the first and the last there
    is no meta.json.
    """
    shards = sorted(os.listdir(work))
    unfinished = os.path.join(work, 'meta.json')
    published = os.path.join(folder, 'meta.json')
    with open(unfinished, 'w', encoding='utf-8') as f:
        json.dump(meta, f, indent=1)
    with contextlib.suppress(FileNotFoundError):
        os.remove(published)
    for name in shards:
        os.replace(os.path.join(work, name), os.path.join(folder, name))
    os.replace(unfinished, published)


if __name__ == '__main__':
    run(main)
