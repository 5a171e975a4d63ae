"""
Checks exercises, and says in words what is not right yet. You need not read this file to solve one.

    python exercises/attention.py                one of them, here and now
    python exercises/attention.py --hint         a hint; --hint=3: all three
    python exercises/check.py                    all eight, one line each;
                                                 exit status 0 if all are right, else 1
    python exercises/check.py FOLDER [FOLDER ..] the exercises in other folders, each file in a
                                                 process of its own; several folders give a table
"""
import ast
import contextlib
import io
import math
import os
import re
import sys
import traceback
import types
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.realpath(__file__))
sys.path[:0] = [os.path.dirname(HERE), HERE]    # from here on exercises find the project's modules
from configurator import build, read
from engine.files import UserError, one_line, run as run_program, typed
from model import GPT, Embedding, GPTConfig

# An exercise is a file with stubs; the line `# the check`; PARTS, {name: a function that hands what
# the student made to `compare`, `difference` or `record`, and raises NotYet with a sentence};
# conclusion(), which returns what is said in the end; three HINTS; `import check` on top and
# `check.run(__name__)` at the end. Its name stands here, a right answer in answers.py, and another
# right one in UNUSUAL of tests/students.py.
NAMES = (
    'attention', 'rope', 'kv_cache', 'depth_attention', 'pondering', 'jacobi', 'halting', 'flops',
)
ADVICE = {  # words in an error message: what they usually mean here
    'not enough values to unpack .expected 2, got 0':
        "An empty list was taken apart, as zip(*pairs) does with no pairs. Layer 0 has no sources: "
        "say what happens then.",
    'File too large':
        "It prints, or writes, without end.",
    'same dtype|expected scalar type':
        "Make new tensors with dtype=x.dtype, as the tensor they meet has it. "
        "x.float() makes float32 of whole numbers (long), and of float64 (double).",
    'in-?place operation':
        "Backward needs what was overwritten there (x += y and x[i] = y do that): make a new "
        "tensor, as in x = x + y.",
    'is ambiguous':
        "`if`, `and`, `or` and `not` take a single True or False. Between tensors of True and "
        "False write &, | and ~.",
    'bitwise_|Boolean-type|boolean (mask|tensor)':
        "Is it a tensor of True and False (dtype=torch.bool)? And & comes before a comparison, "
        "so a comparison needs brackets.",
    'Python scalar|must be Tensor, not':
        "Functions of math take a single number, and functions of torch take a tensor.",
    'tuple of Tensors':
        "It takes one tuple or list, with all the tensors in it.",
    'invalid combination|interpreted as an integer':
        "An argument is of the wrong type. Is it 3.0 instead of 3? Whole numbers come from //.",
    "'indices'":
        "An embedding looks up tokens, which are whole numbers. These are none.",
    'NoneType':
        "Something is None there: a function without `return`, or a value that was never set.",
    'is not defined':
        "A typo, a missing import, or a function that was renamed? Or does it stand below the line "
        "`# the check`?",
    'not associated with a value|referenced before assignment':
        "It is set only inside of a loop or an `if` that did not run: set it before.",
    'KeyError':
        "Nothing is stored under that name yet: what should happen the first time?",
    'view size is not compatible':
        "view cannot put axes together after a transpose: reshape does what view cannot.",
    'BdbQuit|EOFError':
        "Nobody answers it where exercises are checked: take breakpoint() or input() out.",
    'positional argument':
        "Is it called with the arguments that it takes? Those of the exercise stay as they are.",
    'has no attribute':
        "That value is of another type than the line expects: print(type(x)) shows it.",
    'out of (range|bounds)':
        "Count again: indices start at 0, and torch's axes also count from -1 backwards.",
    'shape|size|dimension|broadcast|unpack':
        "Shapes do not fit: print(x.shape) in the line before shows them.",
}
torch.set_num_threads(1)  # the models here are far too small for more
notes = []  # of the part that is being checked, see `record`


class NotYet(Exception):
    """What is not right yet: one sentence for the student."""


def expect(ok, sentence):
    """NotYet with the sentence, unless ok."""
    if not ok:
        raise NotYet(sentence)


# -------------------------------------------------------------------------------------------------
# comparing two tensors

def compare(name, got, want, axes, mistakes=None):
    """
    NotYet with the most telling difference, if the student's tensor `got` is not `want`.
    name: what sentences call it. axes: what each axis of want counts, ('row', 'position', ..).
    mistakes: {sentence: what somebody gets who makes this mistake}.
    """
    found = difference(name, got, want, axes)
    if found:
        found.recognise(mistakes or {})
        found.locate()


def difference(name, got, want, axes):
    """
    None if got is want, else their Difference, for a check that looks for reasons of its own.
    NotYet at once if got is no tensor of this shape and dtype.
    """
    shaped(name, got, want.shape, axes)
    record(got)
    expect(got.is_floating_point(),
           f"{name} holds whole numbers ({got.dtype}), and should hold {want.dtype}: what stands "
           "behind the point is lost")
    expect(got.dtype in (want.dtype, torch.float64),
           f"{name} holds numbers of type {got.dtype}, and should hold {want.dtype}: keep "
           "the dtype of the tensors that came in")
    if same(got, want):
        return None
    return Difference(name, got.detach().to(want.dtype), want.detach(), axes)


@dataclass
class Difference:
    """
    A tensor of the right shape with wrong numbers. First recognise(), then reasons that only this
    exercise knows, and if none of them was it, locate(): the most telling sentence comes first.
    """
    name: str
    got: torch.Tensor
    want: torch.Tensor
    axes: tuple

    def recognise(self, mistakes):
        """NotYet if it is one of these mistakes, or one that can happen in every exercise."""
        for sentence, wrong in mistakes.items():
            # else these numbers cannot tell it from a right one
            shows = wrong.isfinite().all() and not same(wrong, self.want)
            expect(not (shows and same(self.got, wrong)), sentence)
        self.recognise_size()
        self.recognise_order()

    def recognise_size(self):
        """NotYet if all numbers are nearly right, or 0, or wrong by one factor."""
        name, got, want = self.name, self.got, self.want
        off = float((got - want).norm() / want.norm())
        expect(off > 0.005,
               f"{name} is right but for {100 * off:.2g} %: are numbers rounded to 16 bits on the "
               "way (bfloat16, half), or is something small let in that should be left out?")
        expect(got.abs().max() > 0,
               f"{name} is all zeros: was it made with torch.zeros and never filled?")
        factor = float((got * want).sum() / (want * want).sum())
        expect(not same(got, factor * want),
               f"{name} is right but for a factor: all numbers are {factor:.4g} times what they "
               "should be")

    def recognise_order(self):
        """NotYet if the right numbers stand in wrong places."""
        name, got, want = self.name, self.got, self.want
        for i, j in pairs(want.dim()):
            expect(not same(got.transpose(i, j), want), f"{name} has its axes {i} and {j} swapped")
        expect(not same(got.flatten().sort().values, want.flatten().sort().values),
               f"{name} holds the right numbers in the wrong places: look at the order in which "
               "things are put together; and view and reshape never swap axes, transpose does")

    def locate(self):
        """NotYet: at which positions, heads, .. it is right, or else where it differs most."""
        name, got, want, axes = self.name, self.got, self.want, self.axes
        close = (got - want).abs() <= 1e-3 * want.abs().max()
        positions_first = sorted(range(want.dim()), key=lambda axis: axes[axis] != 'position')
        for axis in positions_first:
            right = close.movedim(axis, 0).flatten(1).all(1)  # one bool for each place on this axis
            expect(right.all() or not right.any(),
                   f"{name} is right only at {places(axes[axis], right)}")
        worst = torch.unravel_index((got - want).abs().argmax(), want.shape)
        raise NotYet(
            f"{name} differs in {int((~close).sum())} of {close.numel()} numbers, "
            f"most at {[int(i) for i in worst]}: "
            f"it is {float(got[worst]):.4g} and should be {float(want[worst]):.4g}")


def record(*numbers):
    """
    Note what the student's code gave, tensors or numbers. marker.py compares the notes with those
    of a right answer, in another process.
    """
    for one in numbers:
        notes.append(torch.as_tensor(one).detach().double().flatten().tolist())


def same(a, b):
    """Two tensors of one shape agree, up to the rounding of a few operations in float32."""
    if a.shape != b.shape:
        return False
    a, b = a.detach().to(b.dtype), b.detach()
    return torch.allclose(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))


def shaped(name, got, shape, axes):
    """NotYet unless got is a finite tensor of this shape. axes: what each axis counts."""
    counts = f"({', '.join(axes)})"
    plain = type(got) in (torch.Tensor, torch.nn.Parameter)  # others may mean other things by ==
    expect(plain, f"{name} should be a tensor {counts}, and is of type {type(got).__name__}")
    expect(not got.is_complex(), f"{name} holds complex numbers, and should hold real ones")
    if got.shape != shape:
        sentence = f"{name} has shape {tuple(got.shape)} and should have {tuple(shape)}: {counts}"
        axes_to_swap = pairs(len(shape)) if got.dim() == len(shape) else []
        for i, j in axes_to_swap:
            expect(got.transpose(i, j).shape != shape,
                   f"{sentence}. Axes {i} and {j} are swapped: transpose({i}, {j})")
        raise NotYet(sentence)
    wrong = (~got.isfinite()).nonzero()
    expect(len(wrong) == 0,
           f"{name} is NaN or infinite in {len(wrong)} of {got.numel()} places, first at "
           f"{wrong[:1].flatten().tolist()}: a softmax over nothing but -inf does that (does it "
           "run over the right axis, is the mask the right way round, and may each position read "
           "itself?), and so do -inf times 0, exp() of a large number, and a division by 0")


def pairs(n):
    """All (i, j) with i < j < n."""
    return [(i, j) for j in range(n) for i in range(j)]


def places(what, chosen):
    """Where a row of bools is True: 'position 0', 'positions 0 to 2', or a list."""
    found = chosen.nonzero().flatten().tolist()
    if len(found) == 1:
        return f"{what} {found[0]}"
    if found and found == list(range(len(found))):
        return f"{what}s 0 to {found[-1]}"
    return f"{what}s {', '.join(map(str, found))}"


# -------------------------------------------------------------------------------------------------
# calling what a student wrote

def call(function, *args, name=None):
    """function(*args); NotYet if it returns None or writes into its arguments."""
    name = name or getattr(function, '__name__', 'it')  # what functools.partial makes has none
    before = [tensor.clone() for tensor in tensors(args)]
    with torch.random.fork_rng(devices=[]):  # what is drawn after it should not depend on it
        result = function(*args)
    expect(result is not None, f"{name}() returned None: does its last line say `return`?")
    after = tensors(args)
    untouched = len(before) == len(after) and all(map(torch.equal, before, after))
    expect(untouched,
           f"{name}() changed one of its arguments in place (x += y does, every method that ends "
           "with _, and append on a list): make a new one, as in x = x + y")
    return result


def tensors(x):
    """All tensors in nested lists and tuples."""
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, (list, tuple)):
        return [tensor for part in x for tensor in tensors(part)]
    return []


def forbid(owner, name):
    """A patch: while it lasts, calling owner.name is NotYet."""
    def stop(*args, **options):
        raise NotYet(f"{name}() is what you are to write yourself: use its parts instead")
    return patch.object(owner, name, stop)


def causal(name, function, x, axis=1):
    """NotYet if a result of function(x) depends on what stands in x at a later position."""
    at = 4  # positions from here on are changed; those before should not notice
    changed = x.clone()
    changed.narrow(axis, at, x.size(axis) - at).add_(1)
    moved = (function(x) - function(changed)).abs()
    moved = moved.movedim(axis, 0).flatten(1).amax(1)[:at] > 1e-5  # one bool per position
    expect(not moved.any(),
           f"{name} sees the future: changing position {at} and later ones changes it at "
           f"{places('position', moved)}")


def draw(*choices):
    """One of them."""
    return choices[torch.randint(len(choices), ())]


def tiny(**settings):
    """A real model of model.py, with weights large enough that every part matters; milliseconds."""
    small = dict(vocab_size=40, n_tokens=30, block_size=32, n_layer=4, n_head=4, n_embd=32,
                 mlp_hidden=48, init_std=0.2)
    config = GPTConfig(**{**small, **settings})
    return GPT(config).eval().requires_grad_(False)


@torch.enable_grad()
def inside(name, gpt, *patches):
    """
    NotYet unless the model's logits and gradients stay what they are while the patches put the
    student's function into it.
    """
    gpt.requires_grad_(True)
    idx = torch.randint(0, 30, (2, 11))
    want = gpt(idx)[0][..., :30]  # the other logits are padding, -inf
    with contextlib.ExitStack() as patched:
        for each in patches:
            patched.enter_context(each)
        got = gpt(idx)[0][..., :30]
    compare(f"a GPT with {name} inside is not right: the tensor of its logits",
            got, want, ('row', 'position', 'token'))
    gradients(f"{name} inside a GPT", gpt, got, want)


@torch.enable_grad()
def gradients(name, gpt, got, want):
    """
    NotYet unless a loss of got, computed by the student's code, has the same gradients as one of
    want, for all parameters of gpt.
    """
    expect(got.shape == want.shape and same(got, want),
           f"{name}: its values are not right, so its gradients cannot be")
    expect(got.requires_grad,
           f"{name}: the values are right, but no gradient can flow: is there a detach() or "
           "torch.no_grad()?")
    names, weights = zip(*gpt.named_parameters())
    factors = torch.linspace(-1, 1, want.numel()).view_as(want)
    mine = torch.autograd.grad((got * factors).sum(), weights, materialize_grads=True)
    right = torch.autograd.grad((want * factors).sum(), weights, materialize_grads=True)
    for weight, a, b in zip(names, mine, right):
        record(a.norm())
        expect(same(a, b),
               f"{name}: the values are right, but a part of the gradient is lost on its way to "
               f"{weight}: detach(), .data, .item() or torch.no_grad() inside?")


# -------------------------------------------------------------------------------------------------
# whose code it is. This reminds, and names the line; it is no fence, as the answers are public.

PROJECT = ('model', 'engine', 'check', 'answers', 'marker', 'attempt', 'sample', 'train', 'tools',
           'tests')
LIBRARY = ('hidden', 'generate', 'stream', 'mechanism', 'new_memory',   # of a model, and of torch
           'scaled_dot_product_attention', 'multi_head_attention_forward', 'MultiheadAttention')
THE_CHECK = '\n# the check: read it when you are done'
ABOVE = dict(math=math, torch=torch, F=F, Embedding=Embedding)    # what checks use of above it


def text_of(path):
    """An exercise as text, as any editor writes it: bytes that are not UTF-8 are replaced."""
    with open(path, encoding='utf-8-sig', errors='replace') as f:
        return f.read()


def students_part(path):
    """The lines above `# the check`, as text."""
    return text_of(path).partition(THE_CHECK)[0]


def borrowed(path, given=()):
    """
    A sentence if the student's part of this file uses an answer by its name: of the project, or of
    torch. None if not, and if it cannot be read.
    given: names that may be imported from the project.
    """
    source = students_part(path)
    if '\nPARTS = {' in source:
        return "the line `# the check` is gone: put it back above what you were not to change"
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None  # told elsewhere
    for node in ast.walk(tree):
        what = taken(node, given)
        if what:
            return (f"line {node.lineno} uses {what}: the answer is in there, and it is to be "
                    "yours")
    return None


def taken(node, given):
    """The name of an answer, if this node of the student's code takes one; or None."""
    if isinstance(node, ast.Attribute):
        owner = ast.unparse(node.value)
        if owner == 'check' or (node.attr in LIBRARY and owner != 'self'):
            return f"{owner}.{node.attr}"
    imported = []
    if isinstance(node, ast.Import):
        imported = [one.name for one in node.names if one.name != 'check']
    if isinstance(node, ast.ImportFrom):
        imported = [f"{node.module}.{one.name}" for one in node.names if one.name not in given]
    for name in imported:
        words = name.split('.')
        if words[0] in PROJECT or words[-1] in LIBRARY:
            return name
    return None


# -------------------------------------------------------------------------------------------------
# what is said in the end

@dataclass
class Outcome:
    """What came of one part of an exercise."""
    right: bool
    words: str = ''                            # what is not right yet
    notes: list = field(default_factory=list)  # see `record`


def verdict_on_file(exercise):
    """The verdict, where only what stands above `# the check` is the student's."""
    from answers import ANSWERS  # only now: nobody needs them before
    from attempt import take_over
    path = exercise.__file__
    name = os.path.basename(path)[:-3]
    if name not in NAMES:
        return False, f"the name of a file says which exercise it is, such as {NAMES[0]}.py"
    with contextlib.redirect_stdout(io.StringIO()):     # it ran before, as the file, and printed
        problem = take_over(exercise, path, ANSWERS[name])
    return (False, problem.words) if problem else verdict(exercise)


def verdict(exercise):
    """
    (True, what is to be said about a right answer) or (False, what is not right yet) of an exercise
    as a module; never an exception.
    """
    for part in [*exercise.PARTS.values(), exercise.conclusion]:
        outcome = judge(part, exercise.__file__)
        if not outcome.right:
            break
    return outcome.right, outcome.words


def judge(part, path, seed=0):
    """
    The Outcome of a part, a function that raises NotYet or returns what is to be said; never an
    exception. path: the student's file. seed: of all that is drawn.
    """
    notes.clear()
    torch.manual_seed(seed)
    try:
        with torch.enable_grad():  # whatever the student's file has switched off
            words = part()
        return Outcome(True, words or '', list(notes))
    except NotYet as problem:
        return Outcome(False, str(problem))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # exit() too
        return Outcome(False, explain(error, path))


def explain(error, path):
    """An exception in words: the student's line that it came through, and what helps."""
    if isinstance(error, NotImplementedError) and 'is still empty' in str(error):
        return str(error)
    if isinstance(error, SyntaxError) and error.lineno:
        return f"line {error.lineno} is not Python ({error.msg})"
    message = one_line(f"{type(error).__name__}: {error}")[:300].rstrip(': .')
    return f"{where(error, path)} {message}.{advice(message)}"


def where(error, path):
    """The beginning of the sentence: the last line of the student's that the error came through."""
    end = students_part(path).count('\n') + 1
    for line in reversed(traceback.extract_tb(error.__traceback__)):
        if os.path.abspath(line.filename) == os.path.abspath(path) and line.lineno <= end:
            return f"line {line.lineno}, `{line.line}`, stops with"
    return "what your code returns cannot be used:"


def advice(message):
    """' What such an error usually means here.', or nothing."""
    for words, text in ADVICE.items():
        if re.search(words, message):
            return ' ' + text
    return ''


# -------------------------------------------------------------------------------------------------
# the programs

@dataclass
class ExerciseSettings:
    """without any, your answer is checked"""
    hint: int = 0       # print so many of the hints; --hint is the first


def run(name):
    """What an exercise file does when it is started; name: of its module."""
    run_program(lambda argv: main(argv, sys.modules[name]))


def main(argv, exercise):
    """One exercise, as a module: check it, or print hints."""
    argv = ['--hint=1' if word == '--hint' else word for word in argv]
    given, rest = read(argv, exercise.__doc__, ExerciseSettings)
    n = build(ExerciseSettings, given).hint
    if rest or not 0 <= n <= len(exercise.HINTS):
        raise UserError(f"{' '.join(argv)}: there are --hint=1 to --hint={len(exercise.HINTS)}")
    for i, hint in enumerate(exercise.HINTS[:n], 1):
        print(f"hint {i} of {len(exercise.HINTS)}: {hint}")
    if n > 0:
        return

    right, words = verdict_on_file(exercise)
    print(f"right. {words}" if right else f"not yet: {words}")
    if not right:
        print(f"({typed('python', os.path.relpath(exercise.__file__))} --hint gives a hint)")
        if changed(exercise):
            print("(a right answer is refused here too: model.py is not what this exercise was "
                  "written for. Check yours in an unchanged copy.)")
    sys.exit(0 if right else 1)


def changed(exercise):
    """Whether the right answer is refused too: somebody has changed model.py."""
    name = os.path.basename(exercise.__file__)[:-3]
    return name in NAMES and not all(outcome.right for outcome in solved(name, exercise).values())


def solved(name, exercise, seed=0):
    """Put the right answer into an exercise, as a module -> {part: Outcome}."""
    from answers import ANSWERS
    install(exercise, ANSWERS[name])
    return {part: judge(function, exercise.__file__, seed)
            for part, function in exercise.PARTS.items()}


def install(exercise, code):
    """Put functions and classes, {name: which}, into an exercise."""
    for name, function in code.items():
        setattr(exercise, name, function)


def load(path):
    """The exercise in the file as a module, where nothing of the student's part is run."""
    module = types.ModuleType('exercise_' + os.path.basename(path)[:-3])
    vars(module).update(ABOVE, __file__=path)
    above, line, below = text_of(path).partition(THE_CHECK)
    try:
        exec(compile('\n' * above.count('\n') + line + below, path, 'exec'), vars(module))
        module.PARTS, module.HINTS, module.conclusion
    except Exception as error:
        raise UserError(f"{path}: its check does not run ({type(error).__name__}: {error}); put "
                        "back the line `# the check` and what stands below it") from None
    return module


if __name__ == '__main__':
    import marker  # it imports this file as `check`, as the exercises do
    run_program(marker.main)
