"""
The sum of what a piece of source code computes: the same whatever its comments, docstrings, blanks
and line ends are. compare.py tells by it whether runs were made by the same code, hf.py whether
model.py still computes what other libraries do.
"""

import ast
import hashlib
import inspect
import io
import textwrap
import tokenize
from functools import cache

import model as model_py


def source_of_model():
    return inspect.getsource(model_py)


@cache
def sums_of(source, parts):
    """{part: the sum of what it computes}, of the source of model.py; a part is Class.method."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found[node.name] = node
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    found[f'{node.name}.{method.name}'] = method
    lines = source.splitlines(keepends=True)
    sums = {}
    for part in parts:
        node = found.get(part)
        text = '' if node is None else ''.join(lines[node.lineno - 1:node.end_lineno])
        sums[part] = sum_of(textwrap.dedent(text))
    return sums


def sum_of(source):
    """Twelve digits, which comments, docstrings, blanks and line ends do not change."""
    return hashlib.sha256(what_is_computed(source).encode()).hexdigest()[:12]


def what_is_computed(source):
    """
    Source code without comments, docstrings, blanks and line ends: a text in quotes that stands
    alone is a docstring, indentation is what it means. (Blanks inside of an f-string's braces count
    until Python 3.11, and from 3.12 on they do not.)
    """
    marks = {tokenize.INDENT: '<in>', tokenize.DEDENT: '<out>', tokenize.NEWLINE: '<end>'}
    left_out = tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER
    words = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in left_out:
            continue
        words.append(marks.get(token.type, token.string))
        alone = len(words) < 3 or words[-3] in marks.values()
        if token.type == tokenize.NEWLINE and alone and words[-2][-1:] in ('"', "'"):
            del words[-2:]
    return ' '.join(''.join(words).split())
