"""
Checks exercises, and says in words what is not right yet. You need not read this file to solve one.

    python exercises/check.py             all eight, one line each; exit status 0 if all are right, else 1
    python exercises/check.py FOLDER      the same for the exercises in another folder
    python exercises/attention.py         one of them, the same way
    python exercises/attention.py --hint  a hint; --hint=2 and --hint=3 say more
"""
import contextlib
import importlib.util
import inspect
import math
import os
import re
import sys
import traceback
from unittest.mock import patch

import torch

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
from engine.errors import UserError, run as run_program
from model import GPT, GPTConfig

NAMES = ('attention', 'rope', 'kv_cache', 'depth_attention', 'pondering', 'jacobi', 'halting', 'flops')
ADVICE = {  # words in an error message: what they usually mean here
    'same dtype|expected scalar type': "Make new tensors with dtype=x.dtype, as the tensor they meet has it.",
    'inplace operation': "Backward needs what was overwritten there (x += y does that): make a new tensor, as in x = x + y.",
    'NoneType': "Something is None there: a function without `return`, or a value that was never set.",
    'is not defined': "A typo, a missing import, or a function that was renamed?",
    'has no attribute': "That value is of another type than the line expects: print(type(x)) shows it.",
    'out of (range|bounds)': "Count again: indices start at 0, and torch's axes also count from -1 backwards.",
    'shape|size|dimension|broadcast|unpack': "Shapes do not fit: print(x.shape) in the line before shows them.",
}


class NotYet(Exception):
    """What is not right yet: one sentence for the student."""


def expect(ok, sentence):
    """NotYet with the sentence, unless ok."""
    if not ok: raise NotYet(sentence)


# ----------------------------------------------------------------------------------------------------------------------
# comparing

def tensors(x):
    """All tensors in nested lists and tuples."""
    if isinstance(x, torch.Tensor): return [x]
    return [t for part in x for t in tensors(part)] if isinstance(x, (list, tuple)) else []


def call(function, *args, name=None):
    """function(*args); NotYet if it returns None or writes into its arguments."""
    name, before = name or function.__name__, [t.clone() for t in tensors(args)]
    result = function(*args)
    expect(result is not None, f"{name}() returned None: does its last line say `return`?")
    after = tensors(args)
    expect(len(before) == len(after) and all(map(torch.equal, before, after)), f"{name}() changed one of its arguments in place "
           "(x += y does, every method that ends with _, and append on a list): make a new one, as in x = x + y")
    return result


def forbid(owner, name):
    """A patch: while it lasts, calling owner.name is answered with NotYet."""
    def stop(*args, **options): raise NotYet(f"{name}() is what you are to write yourself: use its parts instead")
    return patch.object(owner, name, stop)


def same(a, b):
    """Two tensors of one shape agree, up to the rounding of a few operations in float32."""
    return a.shape == b.shape and torch.allclose(a.detach().to(b.dtype), b.detach(), rtol=1e-3, atol=1e-4 * float(b.detach().abs().max()))


def shaped(name, got, shape, axes):
    """NotYet unless got is a tensor of this shape with only finite numbers in it. axes: what each axis counts."""
    expect(isinstance(got, torch.Tensor), f"{name} should be a tensor ({', '.join(axes)}), and is of type {type(got).__name__}")
    sentence = f"{name} has shape {tuple(got.shape)} and should have {tuple(shape)}: ({', '.join(axes)})"
    for i, j in pairs(len(shape) if got.dim() == len(shape) else 0):
        swapped = got.shape != shape and got.transpose(i, j).shape == shape
        expect(not swapped, f"{sentence}. Axes {i} and {j} are swapped: transpose({i}, {j})")
    expect(got.shape == shape, sentence)
    wrong = (~got.isfinite()).nonzero()
    expect(len(wrong) == 0, f"{name} is NaN or infinite in {len(wrong)} of {got.numel()} places, first at "
           f"{wrong[:1].flatten().tolist()}: a softmax over nothing but -inf does that (does it run over the right axis, and "
           "may each position read itself?), and so does a division by 0")


def compare(name, got, want, axes, mistakes=None, more=None):
    """
    NotYet with the most telling difference, if got is not want. axes: names of want's axes. mistakes: {sentence: what that
    mistake would give}, or a function that makes that dict. more: a function that looks for further reasons. Both are called
    only if there is a difference.
    """
    shaped(name, got, want.shape, axes)
    if same(got, want): return
    expect(got.dtype in (want.dtype, torch.float64), f"{name} holds numbers of type {got.dtype}, and should hold {want.dtype}: keep "
           "the dtype of the tensors that came in")
    got, want = got.detach().to(want.dtype), want.detach()
    for sentence, wrong in (mistakes() if callable(mistakes) else mistakes or {}).items():
        expect(same(wrong, want) or not same(got, wrong), sentence)
    off = float((got - want).norm() / want.norm())
    expect(off > 0.005, f"{name} is right but for {100 * off:.2g} %: are numbers rounded to 16 bits on the way (bfloat16, half), or is "
           "something small let in that should be left out?")
    expect(got.abs().max() > 0, f"{name} is all zeros: was it made with torch.zeros and never filled?")
    factor = float((got * want).sum() / (want * want).sum())
    expect(not same(got, factor * want), f"{name} is right but for a factor: all numbers are {factor:.4g} times what they should be")
    for i, j in pairs(want.dim()):
        expect(not same(got.transpose(i, j), want), f"{name} has its axes {i} and {j} swapped")
    expect(not same(got.flatten().sort().values, want.flatten().sort().values),
           f"{name} holds the right numbers in the wrong places: look at the order in which things are put together; and view and "
           "reshape never swap axes, transpose does")
    if more: more()
    ok = (got - want).abs() <= 1e-3 * want.abs().max()
    for axis in sorted(range(want.dim()), key=lambda i: axes[i] != 'position'):
        good = ok.movedim(axis, 0).flatten(1).all(1)
        expect(good.all() or not good.any(), f"{name} is right only at {places(axes[axis], good)}")
    at = torch.unravel_index((got - want).abs().argmax(), want.shape)
    raise NotYet(f"{name} differs in {int((~ok).sum())} of {ok.numel()} numbers, most at {[int(i) for i in at]}: "
                 f"it is {float(got[at]):.4g} and should be {float(want[at]):.4g}")


def pairs(n):
    """All (i, j) with i < j < n."""
    return [(i, j) for j in range(n) for i in range(j)]


def places(what, chosen):
    """Where a row of bools is True: 'position 0', 'positions 0 to 2', or a list."""
    found = chosen.nonzero().flatten().tolist()
    if len(found) == 1: return f"{what} {found[0]}"
    run = found == list(range(len(found)))
    return f"{what}s 0 to {found[-1]}" if run and found else f"{what}s {', '.join(map(str, found))}"


def causal(name, function, x, axis=1, at=4):
    """NotYet if function(x) depends, at a position before `at`, on position `at` of x or a later one."""
    changed = x.clone()
    changed.narrow(axis, at, x.size(axis) - at).add_(1)
    moved = (function(x) - function(changed)).abs().movedim(axis, 0).flatten(1).amax(1)[:at] > 1e-5
    expect(not moved.any(), f"{name} sees the future: changing position {at} and later ones changes it at {places('position', moved)}")


def tiny(**settings):
    """A real model of model.py, small enough for milliseconds, with weights large enough that every part matters."""
    torch.manual_seed(0)
    small = dict(vocab_size=40, n_tokens=30, block_size=32, n_layer=4, n_head=4, n_embd=32, mlp_hidden=48, init_std=0.2)
    return GPT(GPTConfig(**{**small, **settings})).eval().requires_grad_(False)


def inside(name, gpt, *patches):
    """NotYet unless the model's logits and gradients stay what they are while the patches put the student's function into it."""
    idx = torch.randint(0, 30, (2, 11))
    with torch.enable_grad(), contextlib.ExitStack() as stack:
        want = gpt.requires_grad_(True)(idx)[0][..., :30]
        for each in patches: stack.enter_context(each)
        got = gpt(idx)[0][..., :30]
    compare(f"{name} is right alone, but a GPT with it inside is not: the tensor of its logits", got, want, ('row', 'position', 'token'))
    gradients(f"{name} inside a GPT", gpt, got, want)


@torch.enable_grad()
def gradients(name, gpt, got, want):
    """NotYet unless a loss of got, computed by the student's code, has the same gradients as one of want, for all parameters of gpt."""
    expect(got.requires_grad, f"{name}: the values are right, but no gradient can flow: is there a detach() or torch.no_grad()?")
    weights, factors = dict(gpt.named_parameters()), torch.linspace(-1, 1, want.numel()).view_as(want)
    mine, right = (torch.autograd.grad((h * factors).sum(), list(weights.values()), materialize_grads=True) for h in (got, want))
    for weight, a, b in zip(weights, mine, right):
        expect(same(a, b), f"{name}: the values are right, but a part of the gradient is lost on its way to {weight}: detach(), .data, "
               ".item() or torch.no_grad() inside?")


# ----------------------------------------------------------------------------------------------------------------------
# running

def verdict(check):
    """(True, what is to be said about a right answer) or (False, what is not right yet); never an exception."""
    try: return True, check()
    except (NotYet, NotImplementedError) as problem: return False, str(problem) or "something is not implemented yet"
    except (Exception, SystemExit) as error: return False, explain(error, inspect.unwrap(check).__code__.co_filename)


def explain(error, path):
    """An exception in words: the last line of the student's part of the file that it came through, and what helps."""
    if isinstance(error, SyntaxError): return f"line {error.lineno} is not Python ({error.msg})"
    if not os.path.exists(path): return f"{path} is not there"
    message = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300].rstrip(': .')
    advice = [text for words, text in ADVICE.items() if re.search(words, message)][:1]
    with open(path, encoding='utf-8') as f: end = next((i for i, line in enumerate(f) if line.startswith('# the check')), math.inf)
    own = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == path and f.lineno <= end]
    where = f"line {own[-1].lineno}, `{own[-1].line}`, stops with" if own else "what your code returns cannot be used:"
    return ' '.join([f"{where} {message}.", *advice])


def main(argv, path, check, hints):
    """One exercise file: check it, or print hints."""
    if not argv:
        right, words = verdict(check)
        print(f"right. {words}" if right else f"not yet: {words}\n(python {os.path.relpath(path)} --hint gives a hint)")
        sys.exit(0 if right else 1)
    if argv in (['-h'], ['--help']): return print(inspect.unwrap(check).__globals__['__doc__'].strip())
    wanted = re.fullmatch(r'--hint(?:=(\d+))?', argv[0]) if len(argv) == 1 else None
    if not wanted: raise UserError(f"{' '.join(argv)}: only --hint, --hint=2 and so on are understood here")
    n = int(wanted[1] or 1)
    if not 1 <= n <= len(hints): raise UserError(f"{argv[0]}: choose --hint=1 to --hint={len(hints)}")
    for i, hint in enumerate(hints[:n], 1): print(f"hint {i} of {len(hints)}: {hint}")


def run(path, check, hints):
    """What an exercise file does when it is started."""
    run_program(lambda argv: main(argv, os.path.abspath(path), check, hints))


def load(path):
    """The exercise in the file as a module."""
    spec = importlib.util.spec_from_file_location('exercise_' + os.path.basename(path)[:-3], path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_all(folder=HERE):
    """Print one line per exercise; True if all are right."""
    results = []
    for name in NAMES:
        path = os.path.join(folder, name + '.py')
        try: right, words = verdict(load(path).check)
        except (Exception, SystemExit) as error: right, words = False, explain(error, path)
        results.append(right)
        print(f"{name:16} {'right' if right else 'not yet: ' + words}")
    print(f"{sum(results)} of {len(NAMES)} right")
    return all(results)


def mark(argv):
    """Mark the exercises in the folder named, or in this one; exit status 0 if all are right, 1 if not."""
    if argv in (['-h'], ['--help']): return print(__doc__.strip())
    if len(argv) > 1 or argv and not os.path.isfile(os.path.join(argv[0], NAMES[0] + '.py')):
        raise UserError(f"{' '.join(argv)}: name one folder with exercises, or none for {HERE}")
    sys.exit(0 if check_all(*argv) else 1)


if __name__ == '__main__':
    run_program(lambda argv: __import__('check').mark(argv))  # the module the exercises import, not this second copy of it
