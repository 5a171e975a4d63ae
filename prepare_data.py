"""
Text to token shards.

    python prepare_data.py                          built-in corpus: the standard library, as bytes
    python prepare_data.py --packages=True          and every installed package, for larger runs
    python prepare_data.py PATH... --name=mine      your text and .jsonl files, or folders of them
    python prepare_data.py shakespeare              the classic, a megabyte
    python prepare_data.py fineweb-edu --shards=10  10 x 100M tokens of the web; or plain `fineweb`
    python prepare_data.py addition --name=sums     problems that take steps: engine/tasks.py; or
                                                    `traffic`, `minimax`; --size=6: larger ones
    python prepare_data.py --check data/mine        compare a folder with its meta.json

Writes data/NAME/{train,val}_000000.bin in the format of the public GPT-2-tokenised FineWeb shards,
whose own keep their names (see engine/shards.py), and meta.json with tokenizer, vocabulary, counts
and checksums; it comes last, so a folder with meta.json is complete.

A document is a file, or a record {"text": ...} of a .jsonl file; of your files one above a megabyte
is cut at line ends, and so are all above 512 bytes if they are fewer than 100, none a .jsonl.
Documents end with an end-of-text token, and go to train or val by a hash of their content: adding
files moves no other document (but for the one that ends the cutting), and a copy never lands on the
other side. Whatever is interrupted goes on, or starts over, with the same command.
"""

import codecs
import contextlib
import hashlib
import io
import itertools
import json
import math
import os
import shutil
import sys
import sysconfig
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Optional

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))   # `python -P` leaves it out
from configurator import build, read
from engine.download import FINEWEB, ProgressLine, fineweb, shakespeare
from engine.files import (
    UserError, alone, checksum, on_disk, one_line, run, same_folder, typed, whole)
from engine.shards import HEADER_BYTES, KNOWN, MAGIC, VERSION
from engine.shards import (
    encode, get_tokenizer, identity, of_another_program, open_shard, read_meta)
from engine.tasks import TASKS, check_task, problems, task_of

SHARD_TOKENS = 10 ** 8       # tokens per shard, 200 MB
DOCUMENT_BYTES = 2 ** 20     # longer texts of a user are cut
FEW_FILES = 100              # below this all texts are cut, or validation might get nothing
PIECES = 128                 # of a text that is cut, at most; above 128 MB one for each megabyte
PIECE_BYTES = 512            # of a piece at least, but for a text's last: shreds teach shreds

SETS = (*FINEWEB, *TASKS, 'shakespeare')     # what a path may name instead of files
# what train.py makes by itself: the folder, and this program's arguments for it
BUILTIN = {f'data/{name}': KNOWN[name].split() for name in ('python', 'trees', *TASKS)}


@dataclass
class DataSettings:
    """what to read and how to tokenise it"""
    name: Optional[str] = None      # folder under data/ (None: python[-packages], or as PATH)
    tokenizer: Optional[str] = None # of texts, up to 65,536 tokens: gpt2, hf:FOLDER (None: byte)
    packages: bool = False          # built-in corpus: add every installed package's source
    shards: int = 1                 # FineWeb: training shards to download, each 100M tokens, 200 MB
    val_fraction: float = 0.1       # share of the documents held out for validation
    size: Optional[int] = None      # made tasks: digits, rounds or levels (None: the task's own)
    problems: int = 200_000         # made tasks: how many, training and validation together
    seed: int = 1337                # made tasks: of the draw


# settings that only some kinds of data read: given for another, they are refused
MADE = f"made tasks ({', '.join(TASKS)})"
MEANT_FOR = dict(size=[MADE], problems=[MADE], seed=[MADE], shards=['FineWeb'],
                 tokenizer=['texts', 'FineWeb'], val_fraction=['texts', MADE])


def main(argv):
    if argv[:1] == ['--check']:
        if len(argv) != 2:
            raise UserError("--check: name one data folder, as in --check data/mine")
        check(argv[1])
        return
    given, paths = read(argv, __doc__, DataSettings, files=False)  # a .py file is text here
    prepare(build(DataSettings, given), paths)


def prepare(settings, paths=()):
    """Do what the command line asked for; see the top of this file."""
    start = time.time()
    folder = choose_folder(settings, paths)
    name = paths[0] if len(paths) == 1 else None
    if name in SETS and os.path.exists(name):
        print(f"warning: {name} is a set of this project; for your own write {typed(f'./{name}')} "
              "and a --name", file=sys.stderr)
    kind = 'FineWeb' if name in FINEWEB else MADE if name in TASKS else 'texts'
    for setting, kinds in MEANT_FOR.items():
        if kind not in kinds and getattr(settings, setting) != getattr(DataSettings, setting):
            raise UserError(f"--{setting} is for {' and '.join(kinds)}, and does nothing for "
                            f"{kind}")
    if settings.packages and paths:
        raise UserError("--packages adds to the built-in corpus: name no path with it")
    if name in FINEWEB:
        with workshop(folder) as work:
            meta = fineweb(name, settings.shards, settings.tokenizer, folder)
            say_replaced(folder, meta['source'], meta['tokenizer'], len(meta['train']['shards']))
            publish(work, folder, meta)
    elif name in TASKS:
        meta = prepare_task(settings, name, folder)
    else:
        meta = prepare_text(settings, paths, folder)
    train, val = meta['train']['tokens'], meta['val']['tokens']
    source = one_line(textwrap.shorten(meta['source'], 80))
    print(f"{folder}: {train:,} training and {val:,} validation tokens ({meta['tokenizer']}) of "
          f"{source}, in {time.time() - start:.1f} s")


def prepare_builtin(folder):
    """Make one of the BUILTIN data sets, if it is missing."""
    path = os.path.join(folder, 'meta.json')
    folder = next((one for one in BUILTIN if same_folder(one, folder)), None)
    if folder is None or os.path.exists(path):
        return
    with on_disk('data', 'written'), alone('data', wait=True):  # `prepare` asks for `folder`
        if os.path.exists(path):
            return      # another run has made it meanwhile
        what = ' '.join(BUILTIN[folder]) or "the built-in corpus, Python's standard library"
        print(f"{folder} is missing: preparing {what}")
        main(BUILTIN[folder])


def choose_folder(settings, paths):
    """
    data/NAME: of --name, or as the first path, without leading dots and what follows a dot.
    UserError if that is not the name of a folder inside data/.
    """
    if settings.name is not None:
        name = settings.name
    elif paths:
        name = os.path.basename(os.path.abspath(paths[0])).lstrip('.').split('.')[0]
        if name in KNOWN and (paths != [name] or name not in SETS):
            raise UserError(f"{paths[0]}: data/{name} is for a set that comes with this project: "
                            "give yours another --name")
    elif settings.packages:
        name = 'python-packages'
    else:
        name = 'python'
    if not name or name.startswith('.') or set(name) & set('/\\'):
        raise UserError(f"--name={name}: should be the name of a folder in data/, without / and a "
                        "dot in front")
    return os.path.join('data', name)


def prepare_task(settings, name, folder):
    """Make the problems of a task. Returns the meta dictionary."""
    size = TASKS[name].default_size if settings.size is None else settings.size
    check_task(name, size, settings.problems)
    source = f'{name} --size={size} --problems={settings.problems} --seed={settings.seed}'
    texts = problems(name, size, settings.problems, settings.seed)
    return write_dataset(folder, texts, get_tokenizer('byte'), settings.val_fraction, source)


def prepare_text(settings, paths, folder):
    """Tokenise what the paths name, or else Python's own source. Returns the meta dictionary."""
    tokenizer = get_tokenizer(settings.tokenizer or 'byte')
    if list(paths) == ['shakespeare']:
        with workshop(folder):
            paths = [shakespeare(folder)]
    for path in paths:
        if path.lower().endswith('.json') and os.path.isfile(path):
            raise UserError(f"{path}: JSON, whose braces would be the text: write its texts to a "
                            '.txt file, or as lines {"text": "..."} to a .jsonl')
        meta = os.path.join(path, 'meta.json')
        if os.path.exists(meta) and not of_another_program(meta):
            raise UserError(f"{path}: a data set, no text; to see whether it is whole: "
                            f"{typed('--check', path)}")
    python = f'source of Python {sys.version.split()[0]}'
    source = ' '.join(paths) or python + ' and of installed packages' * settings.packages
    texts = python_sources(settings.packages)
    if paths:
        once = {os.path.realpath(file): file for path in paths
                for file in walk(path, links=True)}
        texts = your_texts(list(once.values()), folder)
    return write_dataset(folder, texts, tokenizer, settings.val_fraction, source)


def check(folder):
    """Compare all shards of a data folder with its meta.json; UserError at the first difference."""
    meta = read_meta(folder)
    for split in ('train', 'val'):
        shards = meta[split]['shards']
        for shard in shards:
            path = os.path.join(folder, shard['name'])
            open_shard(path, shard['tokens'])
            if checksum(path) != shard['sha256']:
                raise UserError(f"{path}: not the file that {folder}/meta.json describes; "
                                "prepare the data again")
        print(f"{folder}: {split} is whole, {meta[split]['tokens']:,} tokens, "
              f"{len(shards)} shard(s)")


# ---- reading texts -------------------------------------------------------------------------------

def walk(root, skip=(), links=False):
    """
    Paths of all files below a folder, each folder's own first and sorted, without hidden ones, and
    folders named in `skip`; of a file its own. links: also below links to folders, each once.
    """
    if not os.path.exists(root):
        raise UserError(f"{root}: no such file or folder, and no data set of that name")
    if not os.path.isdir(root):
        if not os.path.isfile(root):
            raise UserError(f"{root}: a pipe or a device: write what it gives to a file")
        yield root
        return
    seen = {os.path.realpath(root)}
    for folder, subfolders, files in os.walk(root, onerror=refuse_folder, followlinks=links):
        # os.walk goes on with what is left in this list
        subfolders[:] = sorted(name for name in subfolders if name[0] != '.' and name not in skip)
        if links:
            real = {os.path.realpath(os.path.join(folder, name)): name for name in subfolders}
            subfolders[:] = [real[path] for path in real if path not in seen]
            seen.update(real)
        for name in sorted(files):
            path = os.path.join(folder, name)
            if name[0] != '.' and os.path.isfile(path):     # no pipe
                yield path
            elif name[0] != '.' and not os.path.exists(path):
                print(f"warning: {one_line(path)} is left out: a link to nothing", file=sys.stderr)


def refuse_folder(error):
    """os.walk calls this for a folder it cannot list; without it such a folder is left out."""
    raise UserError(f"{error.filename}: cannot be read ({error.strerror})")


def python_sources(packages):
    """The standard library's .py files, in `walk`'s order; with `packages`, site-packages too."""
    # Not every installation has the tests and the other folders named here: without them the corpus
    # of one release of Python is nearly the same everywhere. Another release has another one.
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


def your_texts(files, folder):
    """
    The documents of your files, but for JSON and those with a NUL byte near their beginning, of
    which a line tells. folder: what is made of them, for the line that says how far it is.
    """
    reads = {path: is_text(path) for path in files}
    texts = [path for path in files if reads[path]]
    few = len(texts) < FEW_FILES and not any(map(is_jsonl, texts))
    longest = 0 if few else DOCUMENT_BYTES
    progress = ProgressLine(folder, sum(map(os.path.getsize, texts)))
    done, count = 0, 0
    for path in texts:
        with on_disk(path, 'read'), open(path, 'rb') as f:
            for text in documents(f, path, longest):
                yield text
                count += 1
                progress(done + f.tell())
        done += os.path.getsize(path)
    if few and count:
        print(f"cut {len(texts)} file{'s' * (len(texts) > 1)} into {count:,} documents, of "
              f"{done // count:,} bytes in the mean, so that some are for validation")
    left_out = [path for path in files if not reads[path]]
    if left_out:
        print(f"warning: {len(left_out)} of {len(files)} files are left out, as .json or for NUL "
              f"bytes, as UTF-16 has, or what is no text: the first is {one_line(left_out[0])}",
              file=sys.stderr)


def is_text(path):
    """Whether a file is one to read: no JSON, and no NUL byte near its beginning."""
    with on_disk(path, 'read'), open(path, 'rb') as f:
        return b'\0' not in f.read(8192) and not path.lower().endswith('.json')


def is_jsonl(path):
    return path.lower().endswith(('.jsonl', '.ndjson'))


def documents(f, path, longest):
    """The documents of an open file; those longer than `longest` bytes in pieces."""
    if not is_jsonl(path):
        if f.peek(3)[:3] == codecs.BOM_UTF8:    # as Windows begins a file; it is no text
            f.read(3)
        yield from cut(f, os.path.getsize(path), longest)
        return
    for number, line in enumerate(iter(f.readline, b''), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)['text'].encode('utf-8', errors='surrogatepass')
        except UnicodeDecodeError:
            raise UserError(f"{path}:{number}: no UTF-8, in which records are written; "
                            "convert it, as with iconv") from None
        except (ValueError, TypeError, KeyError, AttributeError):
            form = 'no JSON object with a text field, {"text": "..."}'
            raise UserError(f"{path}:{number}: {form}") from None
        yield from cut(io.BufferedReader(io.BytesIO(text)), len(text), longest)


def cut(f, size, longest):
    """
    What the binary file of `size` bytes holds: whole if it is no longer than `longest`, else in
    pieces that end with a line. The cuts depend on nothing but the text.
    """
    limit = size
    if size > longest:
        limit = min(DOCUMENT_BYTES, max(size // PIECES + 16, PIECE_BYTES))
    while text := f.read(limit):
        text += f.readline(limit)
        for _ in range(3):  # where no line ends near, not inside a character at least
            following = f.peek(1)[:1]
            if following and following[0] & 0xC0 == 0x80:  # UTF-8: goes on with a character
                text += f.read(1)
        yield text


# ---- writing shards ------------------------------------------------------------------------------

def write_dataset(folder, texts, tokenizer, val_fraction, source):
    """
    Tokenise an iterable of documents (bytes) into folder/{train,val}_*.bin and meta.json; returns
    the meta dictionary.
    """
    if not 0 < val_fraction < 0.5:
        raise UserError(f"--val_fraction={val_fraction} must be above 0 and below 0.5")
    if tokenizer.n_vocab > 2 ** 16:
        raise UserError(f"--tokenizer={tokenizer.name}: its {tokenizer.n_vocab} tokens do not fit "
                        "into 16 bits; use byte or gpt2")
    with workshop(folder) as work:
        say_replaced(folder, source, tokenizer.name)
        train = ShardWriter(work, 'train')
        val = ShardWriter(work, 'val')
        no_utf8, windows = 0, 0     # documents
        for text, tokens in encode_all(tokenizer, texts):
            writer = val if position(text) < val_fraction else train
            writer.add(tokens, len(text))
            no_utf8 += not is_utf8(text)
            windows += b'\r\n' in text
        if no_utf8:
            so = ("kept as they are, but prompts are UTF-8" if tokenizer.name == 'byte' else
                  f"{tokenizer.name} reads U+FFFD in places")
            print(f"warning: {no_utf8} documents are no UTF-8 ({so}): convert them, as with iconv",
                  file=sys.stderr)
        if windows:
            print(f"warning: lines end as on Windows in {windows} documents, and the model will "
                  "write such lines, too: convert them, as with dos2unix", file=sys.stderr)
        if not 0 < val.bytes < train.bytes:
            other = 'larger' if val.bytes == 0 else 'smaller'
            advice = f"give more text, or a {other} --val_fraction"
            if task_of({'source': source}):
                advice = "it has too few problems that differ: give a larger --size"
            raise UserError(f"{source}: no sensible split, {train.bytes:,} bytes to train and "
                            f"{val.bytes:,} to val; {advice}")
        meta = dict(**identity(tokenizer), n_tokens=tokenizer.n_vocab, eot=tokenizer.eot_token,
                    source=source, train=train.finish(), val=val.finish())
        publish(work, folder, meta)
    return meta


def say_replaced(folder, source, tokenizer, shards=math.inf):
    """
    A line for a folder that holds data made of something else, or in other tokens, or that had
    more than so many shards to train on.
    """
    if os.path.exists(os.path.join(folder, 'meta.json')):
        old = read_meta(folder)
        before = f"{old['source']} ({old['tokenizer']})"
        now = f"{source} ({tokenizer})"
        if before != now:
            print(f"{folder} was made of {before}, which this replaces by {now}")
        elif len(old['train']['shards']) > shards:
            more = len(old['train']['shards'])
            print(f"{folder} had {more} training shards, and now lists {shards}: for all of them "
                  f"again add --shards={more}")


def is_utf8(text):
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def position(text):
    """A number in [0, 1) that is a function of the text, and uniform over many texts."""
    digest = hashlib.sha256(text).digest()
    return int.from_bytes(digest[:8], 'big') / 2 ** 64


def encode_all(tokenizer, texts):
    """
    (text, tokens) of each document, in order. tiktoken works outside of Python's lock, so that
    threads use all cores; for bytes there is nothing to work on.
    """
    texts = iter(texts)
    with ThreadPoolExecutor() as pool:
        parallel_map = map if tokenizer.name == 'byte' else pool.map
        while some := list(itertools.islice(texts, 64)):    # no more than this is in memory
            yield from zip(some, parallel_map(partial(encode, tokenizer), some))


class ShardWriter:
    """Appends tokens to shards SPLIT_000000.bin, ... of a folder."""

    def __init__(self, folder, split):
        self.folder = folder
        self.split = split
        self.bytes = 0      # of text, in all
        self.shards = []    # those that are complete, as meta.json has them
        self.file = None    # the next one, open
        self.tokens = 0     # in it

    def add(self, tokens, n_bytes):
        """Append the tokens (n,) uint16 of n_bytes of text."""
        self.bytes += n_bytes
        while len(tokens):
            if self.file is None:
                name = f'{self.split}_{len(self.shards):06d}.bin'
                self.file = open(os.path.join(self.folder, name), 'wb')
                self.file.write(bytes(HEADER_BYTES))
            room = SHARD_TOKENS - self.tokens
            part, tokens = tokens[:room], tokens[room:]
            self.file.write(part.tobytes())
            self.tokens += len(part)
            if self.tokens == SHARD_TOKENS:
                self.end_shard()

    def end_shard(self):
        """Write the header, now that the count is known, and make sure all is on disk."""
        path = self.file.name
        self.file.seek(0)
        self.file.write(np.array([MAGIC, VERSION, self.tokens], np.int32).tobytes())
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        entry = dict(name=os.path.basename(path), tokens=self.tokens, sha256=checksum(path))
        self.shards.append(entry)
        self.file, self.tokens = None, 0

    def finish(self):
        """Returns the entry of meta.json."""
        if self.file is not None:
            self.end_shard()
        tokens = sum(shard['tokens'] for shard in self.shards)
        return dict(bytes=self.bytes, tokens=tokens, shards=self.shards)


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
    with whole(unfinished) as f:    # on the disk before anything is replaced
        json.dump(meta, f, indent=1)
    with contextlib.suppress(FileNotFoundError):
        os.remove(published)
    for name in shards:
        os.replace(os.path.join(work, name), os.path.join(folder, name))
    os.replace(unfinished, published)


if __name__ == '__main__':
    run(main)
