"""What the README and its companions state is true: commands, links, names and costs."""
import ast
import glob
import importlib
import json
import os
import re
import shutil
from statistics import mean, median

import engine
import prepare_data
import pytest
import released
import train
from conftest import ROOT, make, save, slow_but
from configurator import build, read
from engine import tasks
from engine.build import without_numbers
from engine.files import UserError
from engine.flops import flops_of_new_token, flops_per_token
from model import HALTING, PONDER, GPTConfig
from prepare_data import DataSettings
from sample import SampleSettings
from tools import compare
from tools.bench import BenchSettings
from tools.choices import ChoiceSettings
from tools.compare import CompareSettings
from tools.evaluate import EvaluateSettings
from tools.explain import ExplainSettings
from tools.plot import KINDS, PlotSettings
from tools.race import RaceSettings, goal_of, steps_to
from train import Settings

import check


def read_text(path):
    with open(os.path.join(ROOT, path), encoding='utf-8') as f:
        return f.read()


def exists(path):
    return os.path.exists(os.path.join(ROOT, path))


README = read_text('README.md')
LOGS = [f'docs/runs/{name}' for name in sorted(os.listdir(os.path.join(ROOT, 'docs/runs')))
        if name.endswith('.md')]
PAGES = (
    'README.md',
    'docs/architecture.md',
    'docs/baseline.md',
    'docs/claims.md',
    'docs/compare.md',
    'docs/decisions.md',
    'docs/modify.md',
    'docs/performance.md',
    'docs/released.md',
    'docs/results.md',
    'docs/training.md',
    'exercises/README.md',
    'exercises/TEACHING.md',
    *LOGS,
)

# ---- commands


def read_commands(page):
    """The commands in a page's blocks, without the comments behind them."""
    commands = []
    for language, block in re.findall(r'```(\w*)\n(.*?)```', read_text(page), re.S):
        for line in block.splitlines():
            if not language and line.startswith(('python ', 'pip ', 'torchrun ')):
                commands.append(re.split(r'   | +# ', line)[0].strip())
    return commands


def split_command(command):
    """The program a command runs, as a path, and its arguments; None if it runs none of ours."""
    found = re.search(r'\b(\w+/)*\w+\.py\b.*', command)
    if found is None:
        return None
    words = re.findall(r'(?:"[^"]*"|\S)+', found[0])
    return [word.replace('"', '') for word in words]


PAGES_THAT_RUN = ('README.md', 'docs/modify.md', 'docs/training.md', 'docs/released.md')
PAGES_OF_COMMANDS = (*PAGES_THAT_RUN, 'exercises/README.md', 'exercises/TEACHING.md')
COMMANDS = [command for page in PAGES_OF_COMMANDS for command in read_commands(page)]
BENCHES = [command for page in ('docs/performance.md', *LOGS)
           for command in re.findall(r'`(python tools/bench\w*\.py [^`]*)`', read_text(page))]
PROGRAMS = [command for command in COMMANDS + BENCHES if split_command(command)]

SETTINGS = {
    'train.py': (Settings, GPTConfig),
    'sample.py': (SampleSettings,),
    'prepare_data.py': (DataSettings,),
    'tools/bench.py': (BenchSettings, Settings, GPTConfig),
    'tools/choices.py': (ChoiceSettings,),
    'tools/compare.py': (CompareSettings, Settings, GPTConfig),
    'tools/evaluate.py': (EvaluateSettings,),
    'tools/explain.py': (ExplainSettings,),
    'tools/hf.py': (),
    'tools/plot.py': (PlotSettings,),
    'tools/race.py': (RaceSettings, Settings, GPTConfig),
}


def test_the_first_commands_are_what_ci_runs():
    ci = read_text('.ci/run').splitlines()
    assert COMMANDS[0].startswith('pip install -r requirements.txt && python train.py')
    for command in read_commands('README.md'):
        if command.startswith('pip ') or command in COMMANDS[:3]:
            assert command in ci


@pytest.mark.parametrize('command', [c for c in PROGRAMS if 'exercises/' in c])
def test_commands_name_exercises_that_exist(command):
    program, *args = split_command(command)
    assert exists(program)
    if os.path.basename(program)[:-3] in check.NAMES:
        for word in args:
            assert re.fullmatch('--hint(=[123])?', word)


# what needs a network or lm_eval, or has tests of its own
ELSEWHERE = ('--serve', 'fineweb', 'shakespeare', '--tokenizer=gpt2', '--tasks', 'exercises/',
             'inject', 'settled')
SHAPE = ['--n_layer=2', '--n_embd=32', '--n_head=2', '--n_kv_head=2', '--mlp_hidden=32']
QUICK = [
    '--block_size=32',
    '--batch_tokens=64',
    '--micro_batch=2',
    '--max_steps=2',
    '--save_interval=2',
    '--eval_tokens=64',
    '--sample_tokens=2',
    '--compile=False',
]
LESS = {
    'sample.py': ['--max_new_tokens=3', '--num_samples=2', '--compile=False'],
    'tools/choices.py': ['--tokens=99', '--lots=1'],
    'tools/compare.py': [*SHAPE, *QUICK, '--block_size=64', '--batch_tokens=128', '--answers=20'],
    'tools/evaluate.py': ['--tokens=99'],
}


def texts_to_learn_from(folder):
    """The files and the corpus that the commands ask for, as small as can be."""
    (folder / 'config').symlink_to(os.path.join(ROOT, 'config'))
    (folder / 'my_texts').mkdir()
    for name in ('my_texts/a.txt', 'notes.txt'):
        lines = (f'Some words to learn from, line {i} of {name}.\n' for i in range(500))
        (folder / name).write_text(''.join(lines))
    (folder / 'prompt.txt').write_text('def ')
    models = dict(ponderlm2=released.LATENT, ouro=released.OURO, ponder=released.PONDER,
                  depth=released.DEPTH, pythia=released.NEOX)
    for name, config in models.items():
        released.write_folder(folder / 'models' / name, config, tokenizer=True)
    record = '{{"text": "{} words, a document of their own."}}\n'
    (folder / 'all.jsonl').write_text(''.join(record.format(i) for i in range(2000)))


def python_sources(*_):
    """In the place of the built-in corpus."""
    for n in range(1, 99):
        yield b'def f(x):\n    return x\n' * n


def fewer_problems(name, size, count, seed):
    """In the place of a made task."""
    return tasks.problems(name, size, count // 10, seed)


def arguments_for_less(path, args):
    """What makes a command quick."""
    if path == 'tools/evaluate.py' and any(arg.startswith('--answers=') for arg in args):
        return ['--answers=20']
    if path != 'train.py':
        return LESS.get(path, [])
    if '--init_from=resume' in args:
        return ['--max_steps=4']  # the run was stopped before its end
    if '--dry_run=True' in args:
        return SHAPE
    if '--help' in args:
        return []
    released = any(arg.startswith('--init_from=hf:') for arg in args)   # it has its own shape
    return QUICK if released else SHAPE + QUICK


def is_elsewhere(command):
    if 'data/fineweb-edu' in command:
        return not os.path.exists('data/fineweb-edu')
    return any(word in command for word in ELSEWHERE)


RUN = {command for page in PAGES_THAT_RUN for command in read_commands(page)
       if not is_elsewhere(command)}    # by the test below


@pytest.mark.parametrize('command', [command for command in dict.fromkeys(PROGRAMS)
                                     if 'exercises/' not in command and command not in RUN])
def test_commands_name_files_and_settings_that_exist(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'config').symlink_to(os.path.join(ROOT, 'config'))
    (tmp_path / 'out/depth_attn').mkdir(parents=True)
    (tmp_path / 'out/depth_attn/settings.json').write_text('{}')  # what a finished run leaves
    program, *args = split_command(command)
    switches = ('--help', '--check')
    args = [word for word in args if word not in switches]
    given, rest = read(args, '', *SETTINGS[program])
    if program == 'tools/plot.py':
        assert rest[0] in KINDS
    if program == 'tools/compare.py':
        for name in given['names'].split(','):
            assert name in compare.names_of(compare.CompareSettings())


def run_as_written(command):
    """A command, by its program's own main function."""
    path, *args = split_command(command)
    expanded = []
    for word in args:
        expanded += glob.glob(word) if '*' in word else [word]
    program = importlib.import_module(path.removesuffix('.py').replace('/', '.'))
    try:
        program.main(expanded + arguments_for_less(path, args))
    except UserError as error:
        pytest.fail(f'{command}: {error}')
    except SystemExit as left:
        assert not left.code, command


@pytest.mark.parametrize('page', slow_but(PAGES_THAT_RUN, (*PAGES_THAT_RUN, 'exercises/README.md')))
def test_commands_run(page, tmp_path, monkeypatch, capsys):
    """In the order of the page, in one folder, on models and texts as small as can be."""
    monkeypatch.chdir(tmp_path)
    texts_to_learn_from(tmp_path)
    monkeypatch.setattr(prepare_data, 'python_sources', python_sources)
    monkeypatch.setattr(prepare_data, 'problems', fewer_problems)
    monkeypatch.setattr(compare, 'train', lambda _, args, *rest: train.main(args))     # here
    if page == 'docs/training.md':
        prepare_data.main(['my_texts/', 'notes.txt', 'all.jsonl', '--name=mine'])
        shutil.copytree('data/mine', 'data/fineweb-edu')
    if page == 'docs/released.md':
        save(tmp_path / 'out' / 'vanilla', make())

    commands = [command for command in filter(split_command, read_commands(page))
                if not is_elsewhere(command)]
    assert commands
    for command in commands:
        capsys.readouterr()
        run_as_written(command)
        assert capsys.readouterr().out or '--out=' in command, command


# ---- links and names


@pytest.mark.parametrize('page', PAGES)
def test_every_link_to_a_file_exists(page):
    for link in re.findall(r'(?:\]\(|src=")([^)"]+)', read_text(page)):
        if link.startswith('http'):
            continue
        path, _, part = link.partition('#')
        target = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
        assert exists(target), link
        assert not re.match(r'L\d', part), f'{link}: name what is there, lines move'
        if part:
            assert part in headings(target), link


def headings(page):
    """The names by which links reach the headings of a page."""
    found = re.findall(r'^#+ (.*)$', read_text(page), re.M)
    return [re.sub(r'[^\w -]', '', text).lower().replace(' ', '-') for text in found]


def defined(path):
    """The classes and functions of a file, and the methods as Class.method."""
    names = set()
    for node in ast.parse(read_text(path)).body:
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [child for child in node.body if isinstance(child, ast.FunctionDef)]
            names |= {f'{node.name}.{method.name}' for method in methods}
    return names


# `name`, `name` in [`file`](path)
NAMES = r'((?:`[\w.]+`(?:, | and )?)+) in \[`[\w/.]+`\]\(([\w/.]+\.py)\)'


def test_names_are_in_the_file_they_are_said_to_be_in():
    said = [(page, *found) for page in PAGES for found in re.findall(NAMES, read_text(page))]
    assert len(said) > 4
    for page, names, link in said:
        path = os.path.normpath(os.path.join(os.path.dirname(page), link))
        missing = set(re.findall(r'`([\w.]+)`', names)) - defined(path)
        assert not missing, f'{page}: {path} has no {missing}'


def cells_under(heading, page):
    """The cells of all columns whose heading ends so, in the tables of a page."""
    columns, found = None, []
    for line in read_text(page).splitlines():
        cells = [cell.strip() for cell in line.strip('|').split('|')]
        if not line.startswith('|'):
            columns = None
        elif columns is None:
            columns = [i for i, cell in enumerate(cells) if cell.endswith(heading)]
        else:
            found += [cells[i] for i in columns]
    return found


@pytest.mark.parametrize('page', ('README.md', 'docs/architecture.md'))
def test_names_in_tables_are_in_the_model(page):
    cells = ' '.join(cells_under('in `model.py`', page))
    names = set(re.findall(r'`([\w.]+)`', cells))
    assert len(names) > 5
    missing = names - defined('model.py')
    assert not missing


def test_every_mechanism_and_rule_has_its_file_and_its_row():
    rows = cells_under('setting', 'README.md')
    for setting, prefix, names in (('ponder', '', PONDER), ('halting', 'halting_', HALTING)):
        for name in names.keys() - {'none'}:
            path = os.path.join(ROOT, 'config', f'{prefix}{name}.py')
            given, _ = read([path], '', Settings, GPTConfig)
            assert given[setting] == name
            assert f"`{setting}='{name}'`" in rows


def test_the_first_page_of_the_engine_lists_all_its_files():
    listed = re.findall(r'^ {4}[\w ]{12}(\w+\.py) ', engine.__doc__, re.M)
    files = os.listdir(os.path.join(ROOT, 'engine'))
    assert sorted(listed) == sorted(name for name in files
                                    if name.endswith('.py') and name != '__init__.py')


# ---- numbers of docs/runs

TEXTS = {   # their records
    '0.3 MB': 'text', '3 MB': 'text-long', '5 MB': 'text-2.8M', '0.3 MB, Muon': 'text-rates-muon',
    '3 MB, Muon': 'text-long-muon'}
TUNED = {   # the records of each model's best rate, which is 3e-3 if nothing else is said
    '2.5 MB, tuned': (['rates-adamw'],
                      dict.fromkeys(['plain_scaled', 'smear', 'plain', 'loop_2'], '1.5e-3')),
    '2.5 MB, Muon, tuned': (['rates-muon'], {}),
    '3 MB, tuned': (['text-long-adamw'], dict.fromkeys(
        ['plain_scaled', 'loop_2', 'loop', 'plain_scaled_2x', 'plain_scaled_4x'], '1.5e-3')),
    '5 MB, tuned': (['rates-adamw-4800', 'text-2.8M'],
                    dict.fromkeys(['plain_scaled', 'loop_2'], '1.5e-3')),
    '5 MB, Muon, tuned': (['rates-muon-4800'], {}),
}


def records_of(name):
    return [json.loads(line) for line in read_text(f'docs/runs/{name}.jsonl').splitlines()]


def losses(text):
    """{name: {seed: nats per byte}} of the runs with this text, token by token where known."""
    runs = {}
    for record in records_of(TEXTS[text]):
        if not record.get('picks'):
            name = compare.without_rate(record['name'])
            loss = record.get('exact_nats_per_byte', record['val_nats_per_byte'])
            runs.setdefault(name, {})[record['seed']] = loss
    return runs


def rows(page, title):
    """The cells of the rows of the first table below a title of a page, without the head."""
    table = read_text(page).partition(f'\n{title}')[2].partition('\n| ---')[2]
    lines = table.partition('\n\n')[0].splitlines()[1:]
    assert lines, title
    return [[cell.strip() for cell in line.split('|')[1:-1]] for line in lines]


@pytest.mark.parametrize('text', TEXTS)
def test_losses_of_the_log(text):
    told = {}
    for label, *cells in rows('docs/runs/LOG.md', f'### With {text}'):
        told[name_in(label)] = {seed: cell for seed, cell in zip((1, 2, 1337), cells) if cell}
    assert told == {name: {seed: f'{loss:.3f}' for seed, loss in of_run.items()}
                    for name, of_run in losses(text).items()}


@pytest.mark.parametrize('records, title, rates', [
    ('text-rates-muon', '### With 0.3 MB, Muon', (1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2)),
    ('text-rates-adamw', '| seed 0, AdamW', (1.5e-3, 3e-3, 6e-3, 1.2e-2)),
    ('text-long-muon', '### With 3 MB, Muon', (1.5e-3, 3e-3, 6e-3)),
])
def test_what_seed_0_chose_at_09M(records, title, rates):
    made = records_of(records)
    table = rows('docs/runs/LOG.md', title)
    for label, *cells in table:
        tried = {r['learning_rate']: r['val_nats_per_byte'] for r in made
                 if compare.without_rate(r['name']) == name_in(label) and r['picks']}
        n = len(rates)
        assert cells[-n:] == [f'{tried[rate]:.3f}' if rate in tried else '' for rate in rates]
        best = min(tried, key=tried.get)
        assert cells[:-n] == [] or float(cells[-n - 1]) == best
        assert {r['learning_rate'] for r in made if not r['picks']
                and compare.without_rate(r['name']) == name_in(label)} <= {best}
    assert len(table) == len({compare.without_rate(r['name']) for r in made})


def name_in(label):
    return re.search('`(.+?)`', label)[1]


def differences(text, name, other):
    """The losses of a run minus another's, of the seeds that both have."""
    runs = tuned_losses(text) if text in TUNED else losses(text)
    if text == '0.3 MB':    # runs that the log has elsewhere
        for r in records_of('feedback-text') + records_of('text-rates-adamw'):
            loss = r.get('exact_nats_per_byte', r['val_nats_per_byte'])
            if not r.get('picks'):
                runs.setdefault(compare.without_rate(r['name']), {})[r['seed']] = loss
    if text in ('5 MB', '5 MB, tuned'):     # over twice the text, as loop_2 has two passes
        as_much = 'plain_scaled' if text == '5 MB' else 'plain_scaled@1.5e-3'
        runs['plain_scaled_as_loop_2'] = {r['seed']: r['val_nats_per_byte']
                                          for r in records_of('text-2.8M-9600')
                                          if r['name'] == as_much}
    ours, theirs = runs[name], runs[other]
    return [ours[seed] - theirs[seed] for seed in ours if seed in theirs]


def tuned_losses(text):
    """As `losses`, of each model at its best rate, without the seed that chose it."""
    files, rates = TUNED[text]
    runs = {}
    for record in [record for file in files for record in records_of(file)]:
        name, _, rate = record['name'].partition('@')
        if record['seed'] > 0 and (rate or '3e-3') == rates.get(name, '3e-3'):
            runs.setdefault(name, {})[record['seed']] = record['val_nats_per_byte']
    return runs


def signed(difference):
    return '0.000' if f'{difference:.3f}' in ('0.000', '-0.000') else f'{difference:+.3f}'


def test_verdicts_of_the_claims():
    method = beside = ''
    for line in read_text('docs/claims.md').splitlines():
        cells = [cell.strip() for cell in line.split('|')[1:-1]]
        if len(cells) != 7 or cells[2] in ('text', '---'):
            continue
        method, beside = cells[0] or method, cells[1] or beside     # empty: as above
        if '`' not in beside:   # a lab's method
            continue
        found = differences(cells[2], name_in(method), name_in(beside))
        seeds = ['', ', one seed', ', two seeds', '', ', four seeds', ', five seeds'][len(found)]
        summary = [mean(found), min(found), max(found)][:3 if len(found) > 1 else 1]
        told = [cell for cell in cells[3:] if cell]
        assert told == [compare.verdict(found) + seeds, *map(signed, summary)], line


def flops_of_answer(name):
    """Of a new token of a run on the tasks."""
    base = name.partition('_as_')[0]
    file, *options = compare.RUNS[base.removesuffix('_4x')]
    paths = [os.path.join(ROOT, 'config', f'{part}.py') for part in (file, 'tasks')]
    given, _ = read([*paths, *options], '', Settings, GPTConfig)
    given['n_layer'] *= 4 if base.endswith('_4x') else 1
    return flops_of_new_token(without_numbers(build(GPTConfig, dict(given, vocab_size=320))))


def test_tables_of_the_results():
    for label, _, *cells in rows('docs/results.md', '## Text'):
        for text, cell in zip(('3 MB', '5 MB', '5 MB, tuned'), cells):
            if cell:
                found = differences(text, name_in(label), 'plain_scaled')
                assert cell == signed(mean(found)), label
    flops = {r['name']: r['flops'] for r in records_of('traffic')}
    medians = {}
    for label, training, new_token, *cells in rows('docs/results.md', '## Tasks'):
        name = name_in(label)
        assert training == f"{flops[name] / flops['plain_scaled']:.1f}", label
        ratio = flops_of_answer(name) / flops_of_answer('plain_scaled')
        assert new_token == f'{ratio:.1f}', label
        for task, cell in zip(('addition', 'traffic', 'minimax'), cells):
            right = [100 * record['right'] for record in records_of(task)
                     if record['name'] == name_in(label)]
            told = f'{median(right):.1f} ({min(right):.1f} to {max(right):.1f})'
            assert cell == told, (label, task)
        medians[name] = [training, new_token, *(cell.partition(' ')[0] for cell in cells)]
    for label, *cells in rows('docs/results.md', '| method | sums'):
        name = name_in(label)
        partner = f"plain_{'ponderlm' if name == 'embedding' else 'scaled'}_as_{name}"
        found = []
        for task in ('addition', 'traffic'):
            for of in (name, partner):
                right = [100 * r['right'] for r in records_of(task) if r['name'] == of]
                assert len(right) >= 5
                found.append(f'{median(right):.1f}')
        assert cells == found, label
    table = rows('README.md', '| model | weights')
    of_rows = ('plain_scaled', 'plain', 'plain_scaled_as_loop', 'loop_2', 'loop',
               'plain_scaled_4x')
    assert [[cell.removesuffix(' x') for cell in row[2:]] for row in table] == [
        medians[name] for name in of_rows]


def test_one_layer_of_twice_the_width():
    right = {}
    for r in records_of('wide'):
        if not r['picks']:
            right.setdefault(r['task'], []).append(100 * r['right'])
    sums, traffic, trees = (f'{median(right[task]):.1f} %'
                            for task in ('addition', 'traffic', 'minimax'))
    words = ' '.join(read_text('docs/results.md').split())
    assert f'gets {sums} of the sums, {traffic} of traffic and {trees} of the game trees' in words


def test_other_rates_of_the_tasks():
    files = {'sums': 'addition-rates', 'traffic': 'traffic-rates', 'game trees': 'minimax-rates'}
    table = rows('docs/runs/LOG.md', '### Other rates on tasks')
    for label, *cells in table:
        tried, judged = {}, {}      # {rate: {seed: right in per cent}}
        for r in records_of(files[label.partition(',')[0]]):
            if compare.without_rate(r['name']) == name_in(label):
                rate = re.search(r'@([\d.e-]+)', r['name'])[1]
                of_seeds = (tried if r['picks'] else judged).setdefault(rate, {})
                of_seeds[r['seed']] = f"{100 * r['right']:.1f}"
        [(chosen, seeds)] = judged.items()
        assert cells == [*(tried[rate][0] for rate in ('2e-3', '4e-3', '8e-3')), chosen,
                         *(seeds[seed] for seed in (1, 2, 3))], label
    assert len(table) == 6


def test_other_rates_with_3_MB():
    made = {(r['name'], r['seed']): f"{r.get('exact_nats_per_byte', r['val_nats_per_byte']):.3f}"
            for r in records_of('text-long-adamw')}
    columns = ((0, '1.5e-3'), (0, '3e-3'), (0, '6e-3'),
               (1, '1.5e-3'), (2, '1.5e-3'), (1337, '1.5e-3'))
    table = rows('docs/runs/LOG.md', '| AdamW, 3 MB')
    for label, *cells in table:
        assert cells == [made.get((f'{name_in(label)}@{rate}', seed), '')
                         for seed, rate in columns], label
    assert sum(cell != '' for _, *cells in table for cell in cells) == len(made)


def test_game_trees_of_feedback():
    made = {}
    names = ('plain_scaled', 'smear', 'feedback', 'loop')
    for r in [r for r in records_of('minimax') if r['name'] in names]:
        hard = r['by_difficulty'][-1]['right']
        both = (r.get('exact_right', r['right']), r.get('exact_right_of_four_levels', hard))
        made.setdefault(r['name'], []).append(both)
    told = {}
    for label, _, _, _, *cells in rows('docs/results.md', '## Feedback'):
        if cells[0]:
            told[name_in(label)] = cells[:2]
    assert told == {name: [f'{100 * median(column):.1f}' for column in zip(*both)]
                    for name, both in made.items()}


def test_tables_of_other_learning_rates_and_muon():
    losses = {}     # {optimizer: {(name, rate, seed): nats per byte}}
    for optimizer in ('adamw', 'muon'):
        for record in records_of(f'rates-{optimizer}'):
            name, rate = record['name'].split('@')
            assert record['optimizer'] == optimizer and record['learning_rate'] == float(rate)
            run = name, rate, record['seed']
            losses.setdefault(optimizer, {})[run] = record['val_nats_per_byte']
    best = {}
    rates = ('7.5e-4', '1.5e-3', '3e-3', '6e-3')
    for label, *cells in rows('docs/runs/LOG.md', '| loss of seed 0'):
        name, of = name_in(label), losses[label.split()[-1].lower()]
        told = {rate: cell for rate, cell in zip(rates, cells) if cell}
        assert told == {rate: f'{loss:.3f}' for (run, rate, seed), loss in of.items()
                        if (run, seed) == (name, 0)}
        best[label] = min(told, key=told.get)
    for optimizer in 'AdamW', 'Muon':   # the rate of seed 0, and if there is another, the best
        of, means = losses[optimizer.lower()], {}
        for label, rate, *_ in rows('docs/baseline.md', f'| {optimizer}, 2.5 MB'):
            if rate:
                means.setdefault(label, {})[rate] = mean(
                    of[name_in(label), rate, seed] for seed in (1, 2, 3))
        assert len(means) >= 3
        for label, of_rates in means.items():
            assert best.get(f'{label}, {optimizer}') in (None, *of_rates)
            assert [*of_rates][-1] == min(of_rates, key=of_rates.get)


AT_BEST_RATES = {
    'AdamW, 2.5 MB': ['rates-adamw'],
    'AdamW, 5 MB': ['rates-adamw-4800', 'text-2.8M'],
    'Muon, 2.5 MB': ['rates-muon'],
    'Muon, 5 MB': ['rates-muon-4800'],
}


@pytest.mark.parametrize('title', AT_BEST_RATES)
def test_tables_of_each_at_its_best_rate(title):
    of = {}
    for r in [r for file in AT_BEST_RATES[title] for r in records_of(file)]:
        name, _, rate = r['name'].partition('@')
        of[name, rate or '3e-3', r['seed']] = r['val_nats_per_byte']
    head = read_text('docs/baseline.md').partition(f'\n| {title}')[2].splitlines()[0]
    seeds = list(map(int, re.findall(r'seed (\d+)', head)))
    plain = above = {}
    for label, rate, *cells in rows('docs/baseline.md', f'| {title}'):
        if rate:
            above = {seed: of[name_in(label), rate, seed] for seed in seeds
                     if (name_in(label), rate, seed) in of}
            told = {seed: f'{loss:.3f}' for seed, loss in above.items()}
            if name_in(label) == 'plain_scaled':
                plain = above
        else:
            told = {seed: signed(above[seed] - plain[seed]) for seed in above}
        assert cells == [told.get(seed, '') for seed in seeds], label


def test_the_summary_of_each_at_its_best_rate():
    columns = ('2.5 MB, tuned', '5 MB, tuned', '2.5 MB, Muon, tuned', '5 MB, Muon, tuned')
    for label, *cells in rows('docs/baseline.md', '## Each at its best rate'):
        for text, cell in zip(columns, cells):
            if cell:
                found = differences(text, name_in(label), 'plain_scaled')
                lower = sum(difference < 0 for difference in found)
                assert cell == f'{signed(mean(found))} ({lower} of {len(found)})', label


def test_the_readmes_table_of_text():
    three, five = (1, 2, 1337), (1, 2, 3, 4, 1337)
    wanted = [('rates-adamw-4800', 'plain_scaled@1.5e-3', three),
              ('rates-adamw-4800', 'loop_2@1.5e-3', three),
              ('text-2.8M', 'smear', three),
              ('text-2.8M', 'plain_scaled+depth_attn', three),
              ('rates-muon-4800', 'plain_scaled@3e-3', five),
              ('rates-muon-4800', 'smear@3e-3', five),
              ('rates-muon-4800', 'plain_scaled+depth_attn@3e-3', five)]
    muon = 1.59     # times the FLOPs, as the log has it
    assert '59 % more operations' in ' '.join(read_text('docs/runs/LOG.md').split())
    cells, plain = [], None
    for file, name, seeds in wanted:
        made = [r for r in records_of(file) if r['name'] == name and r['seed'] in seeds]
        assert len(made) == len(seeds)
        losses, flops = [r['val_nats_per_byte'] for r in made], made[0]['flops']
        spread = f'{min(losses):.3f} to {max(losses):.3f}'
        plain = plain or flops
        optimizer = 'Muon' if 'muon' in file else 'AdamW'
        flops *= muon if 'muon' in file else 1
        cells.append([optimizer, name.partition('@')[2] or '3e-3',
                      f'{mean(losses):.3f} ({spread})', f'{flops / plain:.1f} x'])
    assert [row[1:] for row in rows('README.md', '| 2.8M parameters')] == cells


def test_one_pass_over_more_text():
    def run(file, name, seed):
        [made] = [r for r in records_of(file) if (r['name'], r['seed']) == (name, seed)]
        return made
    wanted = [
        ('text', 'loop', 'text', 'plain_scaled_as_loop'),
        ('rates-adamw', 'loop_2@1.5e-3', 'rates-adamw-4800', 'plain_scaled@1.5e-3'),
        ('rates-adamw', 'loop_2@1.5e-3', 'rates-adamw-4800', 'plain_scaled@1.5e-3'),
        ('rates-adamw-4800', 'loop_2@1.5e-3', 'text-2.8M-9600', 'plain_scaled@1.5e-3'),
        ('text-2.8M', 'loop_2', 'text-2.8M-9600', 'plain_scaled'),
        *[('rates-muon', 'loop_2@3e-3', 'rates-muon-4800', 'plain_scaled@3e-3')] * 3]
    table = rows('docs/results.md', '| the loop, size')
    assert len(table) == len(wanted)
    for (_, _, seed, *losses), (file, name, other, plain) in zip(table, wanted):
        looped, one_pass = run(file, name, int(seed)), run(other, plain, int(seed))
        assert looped['flops'] == pytest.approx(one_pass['flops'], rel=0.02)
        assert losses == [f"{r['val_nats_per_byte']:.3f}" for r in (looped, one_pass)]


def test_the_table_beside_nanogpt():
    runs = [r for r in records_of('race') if not r['picks']]
    goal = goal_of(records_of('race'))
    table = rows('docs/baseline.md', '## Beside nanoGPT')
    assert f'steps to {goal:.2f}' in read_text('docs/baseline.md')
    for label, optimizer, rate, *cells in table:
        name = 'nanogpt' if 'nanoGPT' in label else 'ours'
        made = {r['seed']: r for r in runs if (r['name'], r['optimizer'], r['learning_rate']) == (
            name, optimizer.lower(), float(rate))}
        assert cells[:3] == [f"{made[seed]['val_loss']:.3f}" for seed in (1, 2, 3)]
        if (name, optimizer) != ('nanogpt', 'AdamW'):
            steps = mean(steps_to(made[seed]['curve'], goal) for seed in (1, 2, 3))
            assert cells[3] == f'{round(steps, -1):.0f}'
    assert len(table) == 4

    tried = {(r['optimizer'], r['learning_rate']): f"{r['val_loss']:.3f}"
             for r in records_of('race') if r['picks']}
    told = {(optimizer.lower(), rate): cell
            for optimizer, *cells in rows('docs/runs/LOG.md', '| nanoGPT, seed 0')
            for rate, cell in zip((1e-3, 1.5e-3, 3e-3, 6e-3, 1.2e-2), cells) if cell}
    assert told == tried


def test_the_table_of_one_change_at_a_time():
    losses = {}
    for r in records_of('race-600'):
        losses.setdefault(r['name'], {})[r['seed']] = r['val_loss']
    table = rows('docs/baseline.md', '| our model, changed')
    assert {name_in(label) for label, *_ in table} == losses.keys()
    for label, *cells in table:
        of = losses[name_in(label)]
        behind = mean(of[seed] - losses['ours'][seed] for seed in of)
        told = '' if name_in(label) == 'ours' else signed(behind)
        assert cells == [f'{of[1]:.3f}', f'{of[2]:.3f}', told]


def test_the_sums_to_expect_are_those_of_the_results():
    runs = [*records_of('addition'), *records_of('addition-epyc')]      # of two machines
    lowest, *others = sorted(100 * r['right'] for r in runs if r['name'] == 'loop')
    plain = [100 * r['right'] for r in runs if r['name'] == 'plain_scaled' and r['seed'] != 1337]
    got = f'{min(others):.0f} to {max(others):.0f} %'
    page = ' '.join(read_text('docs/modify.md').split())
    assert f'got {got} right in {len(others)} runs, and {lowest:.0f} % in one' in page
    assert f'{len(others)} got {got}, and one got {lowest:.0f}.' in ' '.join(README.split())
    assert f'got {min(plain):.0f} to {max(plain):.0f} % with five seeds' in page
    assert {r['right'] for r in records_of('addition-muon-epyc')} == {1.0}
    of_feedback = {re.match(r'`(\w+)`', name)[1]: sums
                   for name, _, sums, *_ in rows('docs/results.md', '## Feedback')}
    assert f"{of_feedback['smear']} % right in the median of several seeds" in page


# ---- the README itself


def test_the_readme_can_be_read():
    """What made it hard to read: numbers and colons in every sentence, and a late first command."""
    prose = re.sub(r'```.*?```', '', README, flags=re.S)
    prose = re.sub(r'\]\(.*?\)', ']', prose)     # links
    prose = '\n'.join(line for line in prose.splitlines() if not line.startswith(('|', '#', '!')))
    per_100 = 100 / len(prose.split())
    assert len(re.findall(r'\d[\d.,]*', prose)) * per_100 < 3.5
    assert len(re.findall(r'[:;]\s', prose)) * per_100 < 1.5
    assert len(README.partition('```\npip')[0].split()) < 160


def test_the_table_of_costs_says_what_is_counted(request):
    """With --slow the FLOPs of every row; otherwise of those whose counting takes a second."""
    slow = request.config.getoption('--slow')
    paper, _ = read([os.path.join(ROOT, 'config', 'size', '360m.py')], '', Settings, GPTConfig)
    plain = without_numbers(build(GPTConfig, paper))
    flops_of_plain = flops_per_token(plain)
    new_token_of_plain = flops_of_new_token(plain)
    table = rows('docs/results.md', '## What every method costs')
    seen = set()
    for setting, cost, new_token, weights in table[1:]:     # behind that of the plain model
        given = dict(re.findall(r"(\w+)=('?\w+'?)", setting.split('`')[1]))
        toggle = {name: ast.literal_eval(value) for name, value in given.items()}
        seen |= {value for name, value in toggle.items() if name != 'ponder_steps'}
        halting = toggle.get('halting')
        if halting:
            toggle['ponder'] = HALTING[halting].works_on
        model = without_numbers(build(GPTConfig, {**paper, **toggle}))

        if slow or setting.startswith(("`depth", "`ponder='smear", "`ponder='loop'")):
            assert f'{flops_per_token(model) / flops_of_plain:.{decimals(cost)}f}' == cost, setting
        if not halting and (slow or setting.startswith("`ponder='loop'")):
            ratio = flops_of_new_token(model) / new_token_of_plain
            assert f'{ratio:.{decimals(new_token)}f}' == new_token, setting

        added = model.num_params() - plain.num_params()
        assert weights in ('none' if added == 0 else f'{added:,}', f'{added / 1e6:.1f}M'), setting
    assert seen == {True, *PONDER, *HALTING} - {'none'}


def decimals(number):
    return len(number.partition('.')[2])


def test_the_page_says_what_smears_config_says():
    page = read_text('docs/modify.md')
    for line in read_text('config/smear.py').rpartition('"""\n')[2].splitlines():
        assert line in page


def test_the_library_lines_run(tmp_path):
    halts = dict(ponder='embedding', ponder_steps=1, halting='gate')
    model = make(vocab_size=320, n_tokens=257, **halts).float()
    folder = save(tmp_path / 'ckpt', model)
    section = read_text('docs/architecture.md').partition('## As a library')[2]
    [code] = re.findall(r'```python\n(.*?)```', section, re.S)

    names = {}
    exec(code.replace('100', '3').replace('out/depth_attn', folder), names)
    assert names['tokens'].shape == (1, 12)
    assert names['h'].shape == (1, 9, 32)
    assert names['loss'].isfinite()
    assert names['passes'].shape == (1, 9)
