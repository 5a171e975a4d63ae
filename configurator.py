"""
Settings from config files and the command line. Values are literals and arithmetic; nothing is ever executed.

    given, rest = read(argv, usage, Settings, ...)    # {name: value} that the user set, and what is no setting
    settings = build(Settings, given)                 # the dataclass with these values in it

A dataclass is one block of settings: its fields with their types, defaults and comments are all there is to declare.
Arguments apply from left to right: FILE.py holds lines `name = value`, FILE.json one object, --name=value sets one.
Bad input is a UserError: one line that says what, where and what to do.
"""
import ast, difflib, inspect, json, math, operator, re, sys
from dataclasses import fields
from typing import get_args

from engine.errors import UserError

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
             ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.USub: operator.neg}


def evaluate(node):
    """The value of an expression tree of literals and arithmetic on numbers; ValueError or ArithmeticError otherwise."""
    if isinstance(node, ast.Constant): return node.value
    operands = {ast.BinOp: ('left', 'right'), ast.UnaryOp: ('operand',)}.get(type(node))
    if not operands or type(node.op) not in OPERATORS: raise ValueError("may only be a literal or arithmetic")
    numbers = [evaluate(getattr(node, name)) for name in operands]
    if not all(type(n) in (int, float) for n in numbers): raise ValueError("may only calculate with numbers")
    if isinstance(node.op, ast.Pow) and max(map(abs, numbers)) > 1e4: raise ValueError("holds too large a power")
    return OPERATORS[type(node.op)](*numbers)


def convert(value, kinds):
    """`value` as the declared type; ValueError where that would change it (1.5 as a whole number, text as a number)."""
    if type(value) in kinds and type(value) not in (int, float): return value
    if type(value) in (int, float) and abs(value) < 2 ** 63:  # not so for inf and nan
        if float in kinds: return float(value)
        if int in kinds and value == int(value): return int(value)
    wanted = {bool: 'True or False', str: 'text', float: 'a number', int: 'a whole number'}[kinds[0]]
    raise ValueError(f"should be {wanted}{' or None' if len(kinds) > 1 else ''}, not {value!r}")


def lines(path):
    """(name, value as a tree, where) of every line `name = value` of a .py file, or of every entry of a .json file."""
    try:
        with open(path, encoding='utf-8-sig') as f: text = f.read()
        if path.endswith('.json'): return [(name, ast.Constant(value), path) for name, value in json.loads(text).items()]
        body = ast.parse(text).body
    except OSError as error: raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (SyntaxError, ValueError, AttributeError, RecursionError, MemoryError) as error:
        raise UserError(f"{path}:{getattr(error, 'lineno', 1)}: not a file of lines name = value") from None
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant): body = body[1:]  # a docstring
    for node in body:
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)):
            raise UserError(f"{path}:{node.lineno}: only lines name = value are allowed")
    return [(node.targets[0].id, node.value, f"{path}:{node.lineno}") for node in body]


def option(arg, kinds):
    """The same for an argument --name=value. Text needs no quotes."""
    name, equals, text = arg[2:].partition('=')
    if not equals: raise UserError(f"{arg}: write it as --name=value")
    try: tree = ast.parse(text.strip(), mode='eval').body
    except (SyntaxError, ValueError, RecursionError, MemoryError): tree = ast.Constant(text)
    return [(name, ast.Constant(text) if str in kinds.get(name, ()) and text != 'None' else tree, arg)]


def read(argv, usage, *blocks, files=True):
    """
    ({name: value} that argv and its files set, [arguments that are neither]); --help prints all settings and leaves.
    files=False: arguments that end with .py or .json are no config files here.
    """
    kinds = {f.name: get_args(f.type) or (f.type,) for block in blocks for f in fields(block)}  # Optional[int]: (int, NoneType)
    given, rest = {}, []
    for arg in argv:
        if arg in ('-h', '--help'): sys.exit(print(usage, *map(describe, blocks), sep='\n\n', flush=True))
        is_file, is_option = files and arg.endswith(('.py', '.json')), arg.startswith('--')
        if not (is_file or is_option): rest.append(arg)
        for name, tree, where in option(arg, kinds) if is_option else lines(arg) if is_file else ():
            near = [f"; did you mean '{n}'?" for n in difflib.get_close_matches(name, kinds, 1)] or ["; see --help"]
            if name not in kinds: raise UserError(f"{where}: there is no setting '{name}'{near[0]}")
            try: given[name] = convert(evaluate(tree), kinds[name])
            except (ValueError, ArithmeticError, RecursionError) as error: raise UserError(f"{where}: {name} {error}") from None
    return given, rest


def build(block, given):
    """An instance of `block` with the given values; its own ValueError (an impossible pair) becomes a UserError."""
    try: return block(**{f.name: given[f.name] for f in fields(block) if f.name in given})
    except ValueError as error: raise UserError(str(error)) from None


def check_range(settings, low, high, *names):
    """ValueError for the first of these settings that is not between low and high (inf: no bound); None is."""
    bounds = f"between {low} and {high}" if high < math.inf else f"at least {low}"
    for name in names:
        value = getattr(settings, name)
        if value is not None and not low <= value <= high: raise ValueError(f"{name}={value} must be {bounds}")


def describe(block):
    """A block's settings for --help: each with its default and the comment behind its field."""
    rows = re.findall(r'^    (\w+): .*? = (.*?) *# (.*)$', inspect.getsource(block), re.M)
    words = {f.name: f.default for f in fields(block) if type(f.default) is str}  # as they are typed: no quotes, no names
    return '\n'.join([f"{block.__name__}: {block.__doc__}"] + [f"  --{k}={words.get(k, v)}".ljust(34) + f" {text}" for k, v, text in rows])
