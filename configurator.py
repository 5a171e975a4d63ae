"""
Settings from config files and the command line.

    given, rest = read(argv, usage, Settings, ...)    {name: value} the user set; what is left over
    settings = build(Settings, given)                 the dataclass with these values in it

A dataclass is one block of settings: its fields with their types, defaults and comments are all
there is to declare. Arguments apply from left to right: FILE.py holds lines `name = value`,
FILE.json one object, --name=value sets one. Values are literals and arithmetic; nothing is ever
executed. Bad input is a UserError: one line that says what, where and what to do.
"""

import ast
import difflib
import inspect
import json
import math
import operator
import re
import sys
import warnings
from dataclasses import dataclass, fields
from typing import get_args

from engine.files import UserError

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}
CALLED = {bool: 'True or False', str: 'text', float: 'a number', int: 'a whole number'}
LARGEST = 2 ** 1024  # of what a calculation holds: no float is larger
FIELD = re.compile(r'^    (\w+): .*? = (.*?) *# (.*)$', re.MULTILINE)  # name, default, comment


@dataclass
class Assignment:
    """One `name = value` of a file, or one argument --name=value."""
    name: str
    value: ast.expr  # the text as a tree; nobody has calculated it yet
    where: str       # for messages: FILE.py:LINE, FILE.json, or the argument


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
            usage = (usage or '').strip()   # python -OO leaves docstrings out
            print(usage, *map(describe, blocks), sep='\n\n', flush=True)
            sys.exit()
        assignments = []
        if arg.startswith('--'):
            assignments = [read_option(arg, kinds)]
        elif files and arg.endswith(('.py', '.json')):
            assignments = read_file(arg)
        else:
            rest.append(path_of(arg))
        for assignment in assignments:
            given[assignment.name] = calculate(assignment, kinds)
    return given, rest


def path_of(arg):
    """An argument that names a file or folder; UserError if no text can name it."""
    try:
        check_text(arg)
    except ValueError as error:
        raise UserError(f"{arg}: {error}; rename it") from None
    return arg


def check_text(text):
    """ValueError for NUL, and for bytes that are no UTF-8: Python keeps them as lone surrogates."""
    try:
        text.encode('utf-8')
    except UnicodeEncodeError:
        raise ValueError("holds bytes that are no UTF-8 text") from None
    if '\0' in text:
        raise ValueError("holds a NUL character")


def read_option(arg, kinds):
    """The Assignment of an argument --name=value. Text needs no quotes."""
    name, equals, text = arg[2:].partition('=')
    if not equals:
        raise UserError(f"{arg}: write it as --name=value")
    value = ast.Constant(text)
    if str not in kinds.get(name, ()) or text == 'None':
        try:
            value = parse(text.strip(), 'eval').body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            pass  # it stays text, and is refused as such
    return Assignment(name, value, arg if len(arg) <= 80 else arg[:77] + '...')


def read_file(path):
    """An Assignment for every line of a .py file, or for every entry of a .json file."""
    try:
        with open(path, encoding='utf-8-sig') as f:
            text = f.read()
        if path.endswith('.json'):
            entries = json.loads(text).items()
            return [Assignment(name, ast.Constant(value), path) for name, value in entries]
        statements = parse(text, 'exec').body
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (SyntaxError, ValueError, AttributeError, RecursionError, MemoryError) as error:
        number = getattr(error, 'lineno', None) or 1
        raise UserError(f"{path}:{number}: not a file of lines name = value") from None

    if statements and is_docstring(statements[0]):
        statements = statements[1:]
    return [read_statement(statement, path) for statement in statements]


def parse(text, mode):
    """ast.parse, without the warnings that are for those who run what they wrote."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return ast.parse(text, mode=mode)


def is_docstring(statement):
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def read_statement(statement, path):
    """The Assignment of a statement `name = value`; UserError for any other."""
    where = f"{path}:{statement.lineno}"
    has_one_target = isinstance(statement, ast.Assign) and len(statement.targets) == 1
    if not has_one_target or not isinstance(statement.targets[0], ast.Name):
        raise UserError(f"{where}: only lines name = value are allowed")
    return Assignment(statement.targets[0].id, statement.value, where)


def calculate(assignment, kinds):
    """The value of an assignment, as the type of its setting. UserError if it is none."""
    name, where = assignment.name, assignment.where
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds, 1)
        advice = f"did you mean '{near[0]}'?" if near else "see --help"
        raise UserError(f"{where}: there is no setting '{name}'; {advice}")
    try:
        return convert(evaluate(assignment.value), kinds[name])
    except ValueError as error:
        raise UserError(f"{where}: {name} {error}") from None
    except RecursionError:
        raise UserError(f"{where}: {name} is nested too deeply") from None


def evaluate(node):
    """The value of a tree of literals and arithmetic on numbers; ValueError otherwise."""
    if isinstance(node, ast.Constant):
        return node.value
    if not isinstance(node, (ast.BinOp, ast.UnaryOp)) or type(node.op) not in OPERATORS:
        raise ValueError("may only be a literal or arithmetic")
    if isinstance(node, ast.BinOp):
        numbers = [evaluate(node.left), evaluate(node.right)]
    else:
        numbers = [evaluate(node.operand)]
    if not all(type(number) in (int, float) for number in numbers):
        raise ValueError("may only calculate with numbers")
    if isinstance(node.op, ast.Pow) and max(map(abs, numbers)) > 1e4:
        raise ValueError("holds too large a power")
    try:
        result = OPERATORS[type(node.op)](*numbers)
    except ZeroDivisionError:
        raise ValueError("divides by zero") from None
    except OverflowError:
        raise ValueError("holds too large a number") from None
    if type(result) is int and abs(result) >= LARGEST:
        raise ValueError("holds too large a number")
    return result


def convert(value, kinds):
    """
    `value` as the declared type; ValueError where that would change it (1.5 as a whole number, text
    as a number).
    """
    is_number = type(value) in (int, float)      # True and False are none
    if type(value) is str:
        check_text(value)
    if type(value) in kinds and not is_number:
        return value
    if is_number and abs(value) < 2 ** 63:       # neither inf nor nan is
        if float in kinds:
            return float(value)
        if int in kinds and value == int(value):
            return int(value)
    wanted = CALLED[kinds[0]]
    if is_number and not abs(value) < 2 ** 63:
        wanted += " below 2**63"
    if len(kinds) > 1:
        wanted += " or None"
    raise ValueError(f"should be {wanted}, not {str(value)[:60]!r}")


def build(block, given):
    """
    An instance of `block` with the given values; UserError for the block's own ValueError (an
    impossible pair).
    """
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


def describe(block):
    """A block's settings for --help: each with its default and the comment behind its field."""
    # text as it is typed: without quotes, and the value where the default is a constant's name
    texts = {field.name: field.default for field in fields(block) if type(field.default) is str}
    rows = [f"{block.__name__}: {block.__doc__}"]
    for name, default, comment in FIELD.findall(inspect.getsource(block)):
        option = f"  --{name}={texts.get(name, default)}"
        rows.append(f"{option:34s} {comment}")
    return '\n'.join(rows)
