"""
Settings from config files and the command line.

    given, rest = read(argv, usage, Settings, ...)    {name: value} the user set; what is left over
    settings = build(Settings, given)                 the dataclass with these values in it

A dataclass is one block of settings: its fields with their types, defaults and comments are all
there is to declare. Arguments apply from left to right: FILE.py holds lines `name = value`,
FILE.json one object, --name=value sets one, --name alone switches it on. Values are literals and
+ - * / on numbers; nothing is ever executed. Bad input is a UserError: one line that says what,
where and what to do.
"""

import ast
import difflib
import inspect
import json
import math
import operator
import os
import re
import sys
from dataclasses import fields
from typing import get_args

from engine.files import UserError, on_disk

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
             ast.Div: operator.truediv, ast.USub: operator.neg}
CALLED = {bool: 'True or False', str: 'text', float: 'a number', int: 'a whole number'}
PATHS = ('data_dir', 'out_dir', 'init_from', 'out', 'html', 'json', 'against')     # of all programs
FIELD = re.compile(r'^    (\w+): .*? = (.*?) *# (.*)$', re.MULTILINE)  # name, default, comment


def read(argv, usage, *blocks, files=True):
    """
    ({name: value} that argv and its files set, [arguments that are neither]). --help prints `usage`
    and all settings, and leaves.

    files=False: arguments that end with .py or .json are no config files here.
    """
    kinds = {}  # {name: types that are allowed}
    for block in blocks:
        for field in fields(block):
            # of Optional[int]: (int, NoneType); of int: nothing, so (int,)
            kinds[field.name] = get_args(field.type) or (field.type,)

    given, rest = {}, []
    for arg in argv:
        if arg in ('-h', '--help'):
            print(usage.strip(), *map(describe, blocks), sep='\n\n', flush=True)
            sys.exit()
        folder = os.path.isdir(arg.removeprefix('hf:'))     # it may be called out/loop.json
        if arg.startswith('--'):
            assignments = [read_option(arg, kinds)]
        elif files and arg.endswith(('.py', '.json')) and not folder:
            assignments = read_file(arg)
        else:
            assignments = []
            rest.append(arg)
        for name, tree, where in assignments:
            given[name] = value_of(name, tree, where, kinds)
    return given, rest


def own_words(argv, block):
    """The words of a command that set something of this block, and --help."""
    names = {'-h', '--help', *(f'--{field.name}' for field in fields(block))}
    return [word for word in argv if word.partition('=')[0] in names]


# what nanoGPT's users type, and what it is here
NANOGPT = dict(batch_size='micro_batch', gradient_accumulation_steps='batch_tokens',
               max_iters='max_steps', lr_decay_iters='max_steps', warmup_iters='warmup',
               min_lr='min_lr_rate', eval_iters='eval_tokens', dataset='data_dir')


# An assignment is (name, the value as a tree that nobody has calculated yet, where it stands).


def read_option(arg, kinds):
    """The assignment of an argument --name=value. Text needs no quotes."""
    name, equals, text = arg[2:].partition('=')
    if not equals:
        if name in kinds and bool not in kinds[name]:
            raise UserError(f"{arg}: write it as --name=value")
        text = 'True'
    tree = ast.Constant(text)
    if str not in kinds.get(name, ()) or text == 'None':
        try:
            parsed = ast.parse(text.strip(), mode='eval').body
            if not isinstance(parsed, ast.Name):    # a word, such as true, stays text
                tree = parsed
        except (SyntaxError, ValueError):
            pass  # it stays text, and is refused as such
    return name, tree, arg


def read_file(path):
    """The assignments of a .py or .json file; UserError for anything else in it."""
    with on_disk(path, 'read'), open(path, encoding='utf-8-sig') as f:
        try:
            if path.endswith('.json'):
                return [(name, ast.Constant(value), path) for name, value in json.load(f).items()]
            statements = ast.parse(f.read()).body
        except (SyntaxError, ValueError, AttributeError) as error:
            number = getattr(error, 'lineno', 1)
            raise UserError(f"{path}:{number}: not a file of lines name = value") from None
    assignments = []
    for statement in statements:
        where = f"{path}:{statement.lineno}"
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=tree):
                assignments.append((name, tree, where))
            case ast.Expr(value=ast.Constant()):
                pass    # a docstring
            case _:
                raise UserError(f"{where}: only lines name = value are allowed")
    return assignments


def value_of(name, tree, where, kinds):
    """The value of an assignment, as the type of its setting. UserError if it is none."""
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds, 1)
        advice = f"did you mean '{near[0]}'?" if near else "see --help"
        if NANOGPT.get(name) in kinds:
            advice = f"what nanoGPT calls so is '{NANOGPT[name]}' here (docs/training.md)"
        raise UserError(f"{where}: there is no setting '{name}'; {advice}")
    try:
        value = convert(calculate(tree), kinds[name])
    except (ValueError, ArithmeticError) as error:
        raise UserError(f"{where}: {name} {error}") from None
    if name in PATHS and value is not None and value.removeprefix('hf:').split('/')[0] == '~':
        raise UserError(f"{where}: ~ stays as it is here, and would be a folder of that name: "
                        "write the whole path")
    return value


def calculate(tree):
    """The value of literals and + - * / on numbers; ValueError for anything else."""
    if isinstance(tree, ast.Constant):
        return tree.value
    if not isinstance(tree, (ast.BinOp, ast.UnaryOp)) or type(tree.op) not in OPERATORS:
        raise ValueError("may only be a literal, or + - * / on numbers")
    parts = [tree.left, tree.right] if isinstance(tree, ast.BinOp) else [tree.operand]
    numbers = [calculate(part) for part in parts]
    if not all(type(number) in (int, float) for number in numbers):
        raise ValueError("may only calculate with numbers")
    return OPERATORS[type(tree.op)](*numbers)


def convert(value, kinds):
    """
    `value` as the declared type; ValueError where that would change it (1.5 as a whole number, text
    as a number).
    """
    is_number = type(value) in (int, float)     # True and False are none
    if type(value) in kinds and not is_number:
        return value
    if is_number and float in kinds and math.isfinite(value):
        return float(value)
    if is_number and int in kinds and math.isfinite(value) and value == int(value):
        return int(value)
    wanted = ' or '.join(CALLED.get(kind, 'None') for kind in kinds)
    raise ValueError(f"should be {wanted}, not {str(value)[:60]!r}")


def build(block, given):
    """An instance of `block` with the given values; its ValueError becomes a UserError."""
    values = {field.name: given[field.name] for field in fields(block) if field.name in given}
    try:
        return block(**values)
    except ValueError as error:
        raise UserError(str(error)) from None


def check_range(settings, low, high, *names):
    """
    ValueError for the first of these settings that is not between low and high (inf: no bound).
    None is allowed.
    """
    bounds = f"between {low} and {high}" if high < math.inf else f"at least {low}"
    for name in names:
        value = getattr(settings, name)
        if value is not None and not low <= value <= high:
            raise ValueError(f"{name}={value} must be {bounds}")


def only_with(what, there, given, *names):
    """UserError for a setting that the user gave, if what it is for is not there."""
    for name in names:
        value = given.get(name)
        if value is not None and value is not False and not there:
            raise UserError(f"{name}={given[name]}: is for {what}; leave it out")


def describe(block):
    """A block's settings for --help: each with its default and the comment behind its field."""
    # text as it is typed: without quotes, and the value where the default is a constant's name
    texts = {field.name: field.default for field in fields(block) if type(field.default) is str}
    rows = [f"{block.__name__}: {inspect.getdoc(block)}"]
    for name, default, comment in FIELD.findall(inspect.getsource(block)):
        option = f"  --{name}={texts.get(name, default)}"
        rows.append(f"{option:34s} {comment}")
    return '\n'.join(rows)
