"""
The student's part of a file, and what it may use. check.py asks this before it runs anything, and
names the line.

Code that looks into the program that checks it finds the right answers there: in the frames of its
callers, among all objects, behind the functions it is given. There are many ways in and few needs,
so this lists what may be imported, and refuses names with a leading underscore that are not the
student's own.
"""
import ast
import math

PROJECT = (  # modules in which the answers are, or by which one gets to them
    'model', 'engine', 'check', 'borrowed', 'answers', 'attempt', 'marker', 'sample', 'train',
    'tools', 'tests',
)
MODULES = (  # what may be imported
    '__future__', 'abc', 'collections', 'contextlib', 'copy', 'dataclasses', 'einops', 'enum',
    'functools', 'itertools', 'json', 'math', 'numpy', 'pprint', 'random', 'statistics', 'time',
    'torch', 'typing', 'warnings',
)  # not operator and string: they look up attributes by names that no reader of the code sees
OF_A_MODEL = ('hidden', 'generate', 'stream', 'mechanism', 'new_memory')  # answers, as attributes
OF_TORCH = ('scaled_dot_product_attention', 'multi_head_attention_forward', 'MultiheadAttention')
BUILT_IN = ('compile', 'eval', 'exec', 'globals', 'locals', 'vars')  # see, or run, any code
INSIDE = (  # attributes that lead out of torch, or into the program that runs
    'ag_frame', 'builtins', 'cr_frame', 'ctypes', 'f_back', 'f_builtins', 'f_globals', 'f_locals',
    'from_file', 'gc', 'get_type_hints', 'gi_frame', 'importlib', 'inspect', 'load',
    'multiprocessing', 'ops', 'os', 'pickle', 'save', 'sys', 'tb_frame',
)
SPECIAL = (
    '__call__', '__getitem__', '__init__', '__len__', '__name__', '__post_init__', '__version__',
)


def read(path):
    """
    An exercise as text, as editors on all systems write it: a mark at the beginning is left out,
    and bytes that are not UTF-8, mostly in a comment, are replaced.
    """
    with open(path, encoding='utf-8-sig', errors='replace') as f:
        return f.read()


def students_lines(path):
    """How many lines of an exercise stand above its check: those are the student's."""
    for i, line in enumerate(read(path).split('\n')):
        if line.startswith('# the check'):
            return i
    return math.inf


def students_part(path):
    """The lines above the check, as text."""
    lines = read(path).split('\n')
    end = min(students_lines(path), len(lines))
    return '\n'.join(lines[:end])


def borrowed(path, given=()):
    """
    A sentence if the student's part of this file uses what holds the answers: the project's
    modules, what the check below is made of, a model's own methods; or if it looks into the program
    around it. Else None.
    given: names that may be imported from the project all the same.
    """
    try:
        source = students_part(path)
        tree = ast.parse(source)
        own = names_bound(tree)
        below = names_below(path) - own
    except (OSError, SyntaxError, ValueError):
        return None  # told elsewhere
    except (RecursionError, MemoryError):  # what cannot be read here might run all the same
        return "an expression is nested too deeply, or has too many terms: split it up"
    if '\n    from check import' in source:
        return "the line `# the check` is gone: put it back above what you were not to change"
    for node in ast.walk(tree):
        what = taken(node, below, given)
        if what:
            return f"line {node.lineno} uses {what}: the answer is in there, and it is to be yours"
        what = outside(node, own)
        if what:
            return (f"line {node.lineno} uses {what}, by which code can reach the answers: take it "
                    "out, torch and math are enough here (exercises/borrowed.py lists what else "
                    "may be imported)")
    return None


def names_below(path):
    """What the check in this file defines, or imports from the project."""
    tree = ast.parse(read(path))
    end, names = students_lines(path), set()
    for node in tree.body:
        if node.lineno <= end:
            continue
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ImportFrom) and of_the_project(node.module):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def names_bound(tree):
    """
    All names, of attributes too, that are assigned, imported, defined or arguments somewhere in
    this code.
    """
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        if isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition('.')[0])
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.arg):
            names.add(node.arg)
    return names


def taken(node, below, given):
    """The name of an answer, if that is what this node of the student's code takes, or None."""
    for module, name in imports(node):
        if of_the_project(module) and name not in given:
            return f"{module}.{name}" if name else module
        if name in OF_TORCH:
            return name
    if isinstance(node, ast.Name) and node.id in below:
        return node.id
    if isinstance(node, ast.Attribute) and is_an_answer(node.attr) and not is_self(node.value):
        return ast.unparse(node)
    return None


def is_an_answer(attribute):
    return attribute in OF_A_MODEL or attribute in OF_TORCH


# -------------------------------------------------------------------------------------------------
# what leads out of an exercise: for each kind of node a rule, rule(node, own) -> a name or None

def outside(node, own):
    """
    What leads out of an exercise, if this node of the student's code does; or None.
    own: names that the student's code gives.
    """
    rule = RULES.get(type(node))
    return rule(node, own) if rule else None


def import_outside(node, own):
    """`import gc` takes a module that is not listed, `from torch import sys` a name inside one."""
    for module, name in imports(node):
        package, *inner = module.split('.')
        if package not in (*MODULES, *PROJECT):
            return module
        what = first_outside([*inner, name or ''], own)
        if what:
            return what
    return None


def name_outside(node, own):
    """`exec`, `__builtins__`"""
    special = node.id.startswith('__') and node.id not in SPECIAL
    return node.id if special or node.id in BUILT_IN else None


def attribute_outside(node, own):
    """`f.__globals__`, `torch.sys`"""
    return first_outside([node.attr], own)


def pattern_outside(node, own):
    """`case object(__globals__=found)`"""
    return first_outside(node.kwd_attrs, own)


RULES = {
    ast.Import: import_outside,
    ast.ImportFrom: import_outside,
    ast.Name: name_outside,
    ast.Attribute: attribute_outside,
    ast.MatchClass: pattern_outside,
}


def first_outside(names, own):
    return next((name for name in names if leads_out(name, own)), None)


def imports(node):
    """(module, name) of each import that this node of the code makes; name: None for a module."""
    if isinstance(node, ast.Import):
        return [(alias.name, None) for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [('.' * node.level + (node.module or ''), alias.name) for alias in node.names]
    return []


def leads_out(name, own=()):
    """Whether an attribute of this name does. own: names that the student's code gives."""
    if name in SPECIAL:
        return False
    special = name.startswith('__') and name.endswith('__')
    return name in INSIDE or special or (name.startswith('_') and name not in own)


def is_self(node):
    return isinstance(node, ast.Name) and node.id == 'self'


def of_the_project(module):
    return module.partition('.')[0] in PROJECT


