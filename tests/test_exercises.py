"""
Each exercise accepts right answers and answers mistakes in words, with the line; as a student
starts it, it says what is empty.
"""
import functools
import os
import re
import shlex
import shutil

import pytest
import torch
from conftest import ROOT, program, save
from students import SLIPS, UNUSUAL

FOLDER = os.path.join(ROOT, 'exercises')
import check
import common
import course
import gradescope
import marker

with open(os.path.join(FOLDER, 'answers.py'), encoding='utf-8') as f:
    ANSWERS, TABLE = f.read().split('ANSWERS = ')
STUB = re.compile(r'    raise NotImplementedError\(.*?"\)', re.S)  # what a student writes over


def load(name):
    """A fresh copy of an exercise, as a module."""
    return check.load(os.path.join(FOLDER, name + '.py'))


def solved(name, source):
    """The exercise with what this source of answers has for it."""
    found = {}
    exec(f"import torch.nn.functional as F\n{source}\nANSWERS = {TABLE}", found)
    exercise = load(name)
    check.install(exercise, found['ANSWERS'][name])
    return exercise


@functools.cache
def right_numbers(name):
    return marker.right_numbers(name, seed=3)


# -------------------------------------------------------------------------------------------------
# right and wrong answers

@pytest.mark.parametrize('name', check.NAMES)
def test_right_answers_are_accepted(name):
    """Unusual ones too: by the check, and by the numbers that the marker compares."""
    exercise = solved(name, ANSWERS + UNUSUAL[name])
    right, said = check.verdict(exercise)
    assert right, said
    for part, function in exercise.PARTS.items():
        outcome = check.judge(function, exercise.__file__, seed=3)
        assert outcome.right, outcome.words
        assert sum(map(len, outcome.notes)) > 0
        assert marker.agree(outcome.notes, right_numbers(name)[part])
    assert not marker.agree(outcome.notes, marker.right_numbers(name, seed=4)[part])


@pytest.mark.parametrize('name, right, wrong, words', [
    (name, *slip) for name, slips in SLIPS.items() for slip in slips])
def test_a_mistake_gets_its_sentence(name, right, wrong, words):
    assert right in ANSWERS
    accepted, said = check.verdict(solved(name, ANSWERS.replace(right, wrong)))
    assert not accepted and re.search(words, said), said
    assert '\n' not in said


@pytest.mark.parametrize('name, right, wide', [
    ('attention', 'return scores.masked', 'scores, v = scores.double(), v.double()\n'
                                          '    return scores.masked'),
    ('rope', 'return pos[:, None]', 'return pos.double()[:, None]'),
    ('depth_attention', '    q = q.reshape(B', '    q = q.double()\n    q = q.reshape(B'),
])
def test_float64_on_the_way_is_no_mistake(name, right, wide):
    assert right in ANSWERS
    accepted, said = check.verdict(solved(name, ANSWERS.replace(right, wide)))
    assert accepted, said


@pytest.mark.parametrize('seed', [2, 5, 17])
def test_no_draw_lets_a_wrong_token_pass(seed):
    """In the first model of these seeds padding is never the likeliest."""
    wrong = ANSWERS.replace('gpt.head(h[:, -1])', 'gpt.lm_head(h[:, -1])')
    exercise = solved('kv_cache', wrong)
    outcomes = [check.judge(part, exercise.__file__, seed) for part in exercise.PARTS.values()]
    assert any('padding of the vocabulary' in outcome.words for outcome in outcomes)


def test_each_part_alone_says_what_is_wrong():
    """A grader asks for the gradients though the values are wrong."""
    more = ANSWERS.replace('range(iterations + 1)', 'range(iterations + 2)')
    assert more != ANSWERS
    exercise = solved('jacobi', more)
    words = [check.judge(part, exercise.__file__, 3).words for part in exercise.PARTS.values()]
    assert any('one iteration more' in said for said in words)
    assert not any('the values are right' in said for said in words)


@pytest.mark.parametrize('right, wrong', [
    ('.tril(N - S)', '.tril()'),
    ('torch.arange(first, self.tokens', 'torch.arange(first + 1, self.tokens + x.size(1)'),
])
def test_a_text_is_read_in_pieces_by_the_students_cache_and_mask(right, wrong):
    """A grader asks for this part though the parts before it are wrong."""
    exercise = solved('kv_cache', ANSWERS.replace(right, wrong))
    read_in_pieces = exercise.PARTS['a text read in pieces']
    assert not check.judge(read_in_pieces, exercise.__file__, 3).right


@pytest.mark.parametrize('axes, right', [('1', True), ('1, 1', True), ('2', False)])
def test_a_mask_may_begin_with_axes_of_length_1(axes, right):
    wider = ANSWERS.replace('.tril(N - S)', f'.tril(N - S).expand({axes}, S, N)')
    accepted, said = check.verdict(solved('kv_cache', wider))
    assert accepted == right, said


@pytest.mark.parametrize('seed', range(4))
def test_no_draw_lets_a_finite_mask_pass(seed):
    exercise = solved('attention', ANSWERS.replace('-math.inf', '-1e6'))
    plain = exercise.PARTS['as many key/value heads as query heads']
    assert 'should be -inf' in check.judge(plain, exercise.__file__, seed).words


def test_a_changed_library_is_named(monkeypatch):
    exercise = load('rope')
    assert not check.changed(exercise)
    monkeypatch.setattr(exercise.model, 'apply_rope', lambda x, cos, sin: x)
    assert check.changed(exercise)
    with pytest.raises(check.UserError, match='refuses a right answer: model.py'):
        marker.right_numbers('rope', 0)


# -------------------------------------------------------------------------------------------------
# files

WRITTEN = [  # (exercise, what is written in place of the first stub, words of the answer)
    ('attention', '    z = q @ k\n    return z', '`z = q @ k`, stops with RuntimeError.*Shapes do'),
    ('attention', '    return softmax(q)', 'stops with NameError: .*missing import'),
    ('attention', '    return (q @ k.mT).double() @ v', 'Make new tensors with dtype=x.dtype'),
    ('attention', '    return q.size(1).shape', 'of another type'),
    ('attention', '    exit(0)', 'SystemExit'),
    ('attention', '    raise EOFError', r'take breakpoint\(\) or input\(\) out'),
    ('attention', '    return attention(q)', 'arguments that it takes'),
    ('attention', '    return q[9]', 'Count again'),
    ('attention', '    return q.transpose(1, 2).view(2, -1)', 'reshape does what view cannot'),
    ('attention', '    return AXES', 'NameError: .*below the line `# the check`'),
    ('kv_cache', '    return self.keys[0]', 'KeyError: 0.* the first time'),
    ('attention', '    return def', 'is not Python'),
    ('attention', '    return "text"', '^attention.. should be a tensor'),
    ('attention', '    return sdpa(q, k, v, is_causal=True)', 'NameError: .*missing import'),
    ('attention', '    return q / hd', '`return q / hd`, stops with NameError'),
    ('attention', '    return F.multi_head_attention_forward(q)', 'uses F.multi_head'),
    ('rope', '    from model import rope_table\n    return rope_table(pos)', 'uses model.rope_tab'),
    ('kv_cache', '    from model import Memory\n', 'uses model.Memory'),
    ('depth_attention', '    import check as c, answers\n', 'uses answers'),
    ('pondering', '    return gpt.hidden(idx)', r'line \d+ uses gpt.hidden'),
    ('pondering', '    return check.call(1)', 'uses check.call'),
    ('halting', '    from model import Embedding, Gate\n', 'uses model.Gate'),
    # a helper that is called as one of the check's
    ('flops', '    return parts(c)\n\n\ndef parts(c):\n    return 1', '^forward_flops.*is 1 '),
]


@pytest.mark.parametrize('name, code, words', WRITTEN)
def test_what_is_wrong_in_a_file_is_said_with_its_line(name, code, words, tmp_path):
    path = tmp_path / f'{name}.py'
    with open(os.path.join(FOLDER, f'{name}.py'), encoding='utf-8') as f:
        source = STUB.sub(lambda match: code, f.read(), count=1)
    path.write_text(source, encoding='utf-8')
    try:
        right, said = check.verdict_on_file(check.load(str(path)))
    except SyntaxError as error:  # the marker's attempt.py says it so
        right, said = False, check.explain(error, str(path))
    assert not right and re.search(words, said), said
    if said.startswith('line'):
        number = int(re.search(r'line (\d+)', said)[1])
        assert source.splitlines()[number - 1].strip() in code


def test_as_many_positions_as_slots(tmp_path):
    """Else the trunk speaks of keys, and of classes that the exercise does not know."""
    path = tmp_path / 'jacobi.py'
    with open(os.path.join(FOLDER, 'jacobi.py'), encoding='utf-8') as f:
        wrong = '    return read(gpt, x, torch.arange(99))'
        path.write_text(STUB.sub(lambda match: wrong, f.read(), count=1), encoding='utf-8')
    right, said = check.verdict_on_file(check.load(str(path)))
    assert not right and 'pos has 99 positions for 5 slots' in said


def test_a_file_by_another_name_is_refused_in_words(tmp_path):
    path = tmp_path / 'mine.py'
    with open(os.path.join(FOLDER, 'rope.py'), encoding='utf-8') as f:
        path.write_text(f.read(), encoding='utf-8')
    right, said = check.verdict_on_file(check.load(str(path)))
    assert not right and 'which exercise it is' in said


def test_a_lost_line_above_the_check_is_named(tmp_path):
    path = tmp_path / 'rope.py'
    with open(os.path.join(FOLDER, 'rope.py'), encoding='utf-8') as f:
        path.write_text(f.read().replace('\n# the check', '\n#the check'), encoding='utf-8')
    assert check.borrowed(str(path)).startswith('the line `# the check` is gone')


def test_a_students_note_on_the_check_ends_nothing(tmp_path):
    path = tmp_path / 'rope.py'
    with open(os.path.join(FOLDER, 'rope.py'), encoding='utf-8') as f:
        path.write_text('# the check says 4.2\n' + f.read(), encoding='utf-8')
    assert 'NotImplementedError' in check.students_part(str(path))


# As `python exercises/NAME.py` does for each: only its own folder is on the path, and nothing of
# the project is loaded. One process, as torch takes seconds.
AS_PROGRAMS = '''
import os, runpy, sys
path, others = list(sys.path), set(sys.modules)
for argv in sys.argv[1:]:
    sys.path[:] = [os.path.dirname(argv.split()[0]), *path]
    sys.argv = argv.split()
    try:
        runpy.run_path(sys.argv[0], run_name='__main__')
    except SystemExit as left:
        print('status', left.code)
    for name in {'model', 'check', 'configurator', 'engine', 'engine.files'} & set(sys.modules):
        del sys.modules[name]
'''


def test_exercises_are_programs(tmp_path):
    commands = []
    for name in check.NAMES:
        path = os.path.join(FOLDER, f'{name}.py')
        commands += [path, f'{path} --hint']
    commands += [f'{path} --hint=3', f'{path} --hint=4']
    done = program('-c', AS_PROGRAMS, *commands, cwd=tmp_path, PYTHONPATH='')
    assert done.stdout.count('is still empty: write it in place of this line\n') == len(check.NAMES)
    assert done.stdout.count('--hint gives a hint)\nstatus 1\nhint 1 of 3: ') == len(check.NAMES)
    assert done.stdout.count('hint 3 of 3: ') == 1
    assert done.stdout.endswith('status 2\n')
    assert done.stderr == 'error: --hint=4: there are --hint=1 to --hint=3\n'


# -------------------------------------------------------------------------------------------------
# what the exercises say is true

def test_names_at_the_end_of_each_exercise_exist():
    """'Now read class Memory in model.py, ..': a student looks there."""
    for name in check.NAMES:
        exercise = solved(name, ANSWERS)
        said = check.judge(exercise.conclusion, exercise.__file__).words
        named = re.findall(r'(\w+) in ([\w/]+\.py)', said)
        assert named or name in ('rope', 'flops')
        for word, page in named:
            with open(os.path.join(ROOT, page), encoding='utf-8') as f:
                assert re.search(rf'^(class|def) {word}\b', f.read(), re.M), (word, page)


def page_of(name):
    with open(os.path.join(FOLDER, name), encoding='utf-8') as f:
        return f.read()


def test_the_days_of_both_pages_are_the_same():
    """The pupils' page has no answers; the teacher's has them, and a row of a table, for each."""
    pupils, teacher = page_of('README.md'), page_of('TEACHING.md')
    days = re.findall(r'^### Day (\d+): (?:`(\w+)\.py`)?', pupils, re.M)
    assert 'two weeks, ten days' in pupils.lower()
    assert [int(day) for day, _ in days] == list(range(1, 11))
    assert [name for _, name in days if name] == list(check.NAMES)
    rows = re.findall(r'^\| (\d+) \|[^|]*\| (?:`(\w+)\.py`)?', teacher, re.M)
    assert rows == days
    assert re.findall(r'^\*\*Day (\d+)\.', teacher, re.M) == [day for day, _ in days]
    assert 'Answers' not in pupils and '<details>' not in pupils


def test_the_labs_and_their_page_train_the_same_model():
    assert common.MAKE_ONE + '\n' in page_of('README.md')


def test_the_points_are_those_of_the_parts():
    points = sum(gradescope.points(name) for name in check.NAMES)
    assert f'makes {points} for' in ' '.join(page_of('TEACHING.md').split())


def test_the_loop_of_the_halting_exercise_is_what_the_model_does(idx):
    """Its reference is written from the equations; here it meets halting='gate'."""
    exercise = load('halting')
    gpt = check.tiny(ponder='embedding', ponder_steps=3, n_layer=3, halting='gate', halt_tau=0.5)
    torch.manual_seed(3)
    for gate in gpt.mechanism.gates:
        gate[-1].weight.data.normal_()
        gate[-1].bias.data.fill_(1)
    idx = idx[:, :8] % 30
    with torch.no_grad():
        x = gpt.embed(idx)
        readout, passes, *_ = exercise.one_by_one(gpt, gpt.mechanism.gates, x, 0.5)
        assert torch.allclose(gpt.hidden(idx), readout, atol=1e-4)
        assert len(passes.unique()) > 1
        assert torch.equal(gpt.mechanism.passes, passes)


def test_the_measurements_of_the_course(tmp_path, small_data, capsys):
    folder = save(tmp_path / 'out', check.tiny(vocab_size=257, n_tokens=257),
                  data_dir=small_data)
    course.main(['context', folder, folder])
    course.main(['time', folder])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[2:5]] == ['1', '2', '3']
    assert lines[-1].split()[1:4] == ['560', 'to', '599']


def test_a_command_to_copy_is_quoted(tmp_path, monkeypatch, capsys):
    """Where a path has a space in it."""
    path = tmp_path / 'my exercises' / 'rope.py'
    path.parent.mkdir()
    shutil.copy(os.path.join(FOLDER, 'rope.py'), path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        check.main([], check.load(str(path)))
    [line] = [line for line in capsys.readouterr().out.splitlines() if 'gives a hint' in line]
    command = shlex.split(line.removeprefix('(').removesuffix(' gives a hint)'))
    assert command == ['python', os.path.join('my exercises', 'rope.py'), '--hint']
