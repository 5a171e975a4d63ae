"""The commands, links and promises of the README and its companions are true. Run as a program, it mends links to lines."""
import ast
import glob
import importlib
import os
import re

import pytest
import torch
from conftest import ROOT, make, save
from engine.errors import UserError
from model import HALTING, PONDER, GPT, GPTConfig


def read_text(path):
    with open(os.path.join(ROOT, path), encoding='utf-8') as f: return f.read()


PAGES = ('README.md', 'docs/architecture.md', 'exercises/README.md')
README = read_text('README.md')


def read_commands(page):
    """The commands of a page, without what is said of them."""
    return [line.split('   ')[0].strip() for language, block in re.findall(r'```(\w*)\n(.*?)```', read_text(page), re.S) if not language
            for line in block.splitlines() if line.startswith(('python ', 'pip ', 'torchrun '))]


def split_command(command):
    """The program a command runs, as a path, and its arguments; None if it runs none of ours."""
    found = re.search(r'\b(\w+/)?\w+\.py\b.*', command)
    if found: return [word.replace('"', '') for word in re.findall(r'(?:"[^"]*"|\S)+', found[0])]


COMMANDS = [command for page in PAGES for command in read_commands(page)]


def test_the_two_commands_are_what_ci_runs():
    with open(os.path.join(ROOT, '.ci', 'run')) as f: ci = f.read().splitlines()
    assert 'pip install -r requirements.txt && python train.py config/depth_attn.py config/size/tiny.py' in COMMANDS
    for command in COMMANDS:
        if command.startswith('pip '): assert command in ci


@pytest.mark.parametrize('command', list(filter(split_command, COMMANDS)))
def test_commands_name_files_and_settings_that_exist(command):
    from configurator import read
    from model import GPTConfig
    from prepare_data import DataSettings
    from sample import SampleSettings
    from tools.choices import ChoiceSettings
    from tools.compare import ALL, CompareSettings
    from tools.evaluate import EvaluateSettings
    from tools.explain import ExplainSettings
    from tools.plot import KINDS, PlotSettings
    from train import Settings
    program, *args = split_command(command)
    if program.startswith('exercises/'):
        assert os.path.exists(os.path.join(ROOT, program)) and all(re.fullmatch('--hint(=[123])?', a) for a in args)
        return
    blocks = {'train.py': (Settings, GPTConfig), 'sample.py': (SampleSettings,), 'prepare_data.py': (DataSettings,),
              'tools/compare.py': (CompareSettings, Settings, GPTConfig), 'tools/evaluate.py': (EvaluateSettings,),
              'tools/choices.py': (ChoiceSettings,), 'tools/explain.py': (ExplainSettings,), 'tools/plot.py': (PlotSettings,)}[program]
    given, rest = read([a for a in args if a not in ('--help', '--check')], '', *blocks)
    if program == 'tools/plot.py': assert rest[0] in KINDS
    if program == 'tools/compare.py':
        for name in given['names'].split(','): assert name in ALL


ELSEWHERE = {'fineweb': 'test_download', 'shakespeare': 'test_download', '--tokenizer=gpt2': 'test_download',
             '--tasks': 'test_evaluate', 'exercises/': 'test_exercises'}  # what needs a network or lm_eval, or has its own tests
TINY = ['--n_layer=2', '--n_embd=32', '--n_head=2', '--n_kv_head=2', '--mlp_hidden=32', '--block_size=32', '--batch_tokens=64',
        '--micro_batch=2', '--max_steps=2', '--save_interval=2', '--eval_tokens=64', '--sample_tokens=2', '--compile=False']
LESS = {'sample.py': ['--max_new_tokens=3', '--num_samples=2', '--compile=False'], 'tools/evaluate.py': ['--max_new_tokens=3', '--tokens=99'],
        'tools/plot.py': ['--tokens=99'], 'tools/compare.py': TINY, 'tools/choices.py': ['--tokens=99', '--lots=1']}


@pytest.mark.parametrize('page', list(filter(read_commands, PAGES)))
def test_commands_run(page, tmp_path, monkeypatch, capsys):
    """In the order of the page, in one folder, by the programs' own main functions, on models and texts as small as can be."""
    import prepare_data
    import train
    from tools import compare
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'config').symlink_to(os.path.join(ROOT, 'config'))
    (tmp_path / 'my_texts').mkdir()
    for name in ('my_texts/a.txt', 'notes.txt'): (tmp_path / name).write_text('Some words to learn from. ' * 99)
    (tmp_path / 'prompt.txt').write_text('def ')
    (tmp_path / 'all.jsonl').write_text(''.join(f'{{"text": "{i} words, a document of their own."}}\n' for i in range(2000)))
    monkeypatch.setattr(prepare_data, 'python_sources', lambda *_: (b'def f(x):\n    return x\n' * n for n in range(1, 99)))
    monkeypatch.setattr(compare, 'train', lambda args, *_: train.main(args))  # not in a process of its own
    if page == 'README.md':  # it samples from models it does not spell out how to train
        for name in ('ponder', 'halting_gate'): train.main([f'config/{name}.py', 'config/size/tiny.py', *TINY])
    for command in filter(split_command, read_commands(page)):
        if any(word in command for word in ELSEWHERE): continue
        path, *args = split_command(command)
        args = [name for a in args for name in (glob.glob(a) if '*' in a else [a])]
        less = list(LESS.get(path, ()))
        if path == 'train.py' and '--init_from=resume' in args: less = ['--max_steps=4']  # it was stopped before its end
        elif path == 'train.py' and not {'--help', '--dry_run=True'} & set(args): less = list(TINY)
        if command.startswith('torchrun'): less.append(f'--out_dir=out/{len(os.listdir("out"))}')  # the same run again, on several GPUs
        capsys.readouterr()
        try: importlib.import_module(path[:-3].replace('/', '.')).main(args + less)
        except UserError as error: pytest.fail(f'{command}: {error}')
        except SystemExit as left: assert not left.code, command
        assert capsys.readouterr().out or '--out=' in command, command


def spans(path):
    """{name: (first, last line)} of a file's classes, functions and methods; a comment block above belongs to what it describes."""
    source, found = read_text(path), {}
    lines = [''] + source.splitlines()
    for node in ast.parse(source).body:
        if not hasattr(node, 'name'): continue
        start = node.lineno
        if lines[start - 1] == '' and lines[start - 2].startswith('#'): start -= 1
        while lines[start - 1].startswith('#'): start -= 1
        found[node.name] = (start, node.end_lineno)
        for method in node.body if isinstance(node, ast.ClassDef) else ():
            decorated = [d.lineno for d in getattr(method, 'decorator_list', ())]
            if hasattr(method, 'name'): found[f'{node.name}.{method.name}'] = (min(decorated + [method.lineno]), method.end_lineno)
    return found


LINE_LINK = r'\[([^\]]*)\]\(((?:\.\./)*)([\w/]+\.py)#L(\d+)-L(\d+)\)'  # text, way up to the root, path from there, first, last


def with_right_lines(page):
    """The page's text, in which every link to lines goes from the first thing its text names to the last."""
    def link(match):
        text, up, path = match.groups()[:3]
        names = re.findall(r'`([\w.]+)`', text)
        files = [path] + [file for file in os.listdir(ROOT) if file.endswith('.py')]  # it may have moved to another file
        found = [(file, known) for file, known in ((file, spans(file)) for file in files) if names and set(names) <= set(known)]
        assert found, f'{page}: [{text}]({path}) should name classes, functions or methods of one file'
        file, known = found[0]
        return f'[{text}]({up}{file}#L{min(known[n][0] for n in names)}-L{max(known[n][1] for n in names)})'
    return re.sub(LINE_LINK, link, read_text(page))


@pytest.mark.parametrize('page', PAGES)
def test_line_ranges_are_those_of_the_code_they_name(page):
    written, right = ([match[0] for match in re.finditer(LINE_LINK, text)] for text in (read_text(page), with_right_lines(page)))
    moved = [f'{page}: {a} should be {b}' for a, b in zip(written, right) if a != b]
    assert written and not moved, '`python tests/test_readme.py` writes the right lines:\n' + '\n'.join(moved)


def test_the_first_200_lines_are_at_most_200():
    section = re.search(r'## The first 200 lines\n(.*?)\n## ', read_text('docs/architecture.md'), re.S)[1]
    assert 150 <= sum(int(last) - int(first) + 1 for *_, first, last in re.findall(LINE_LINK, section)) <= 200


@pytest.mark.parametrize('page', PAGES)
def test_every_link_to_a_file_exists(page):
    for path in re.findall(r'\]\(([^)#]+)[^)]*\)', read_text(page)):
        if not path.startswith('http'): assert os.path.exists(os.path.join(ROOT, os.path.dirname(page), path)), path


def test_the_costs_of_the_table_are_those_that_are_counted():
    def cost(**toggle):
        with torch.device('meta'): return GPT(GPTConfig(**toggle)).flops_per_token()
    rows = re.findall(r"\| `(\w+)='?(\w+)'?` \|.*\| [^|]* \| ([^|]*) \| [\d.]+[^|]* \|", README)
    assert {value for _, value, _ in rows} == {'True', *PONDER, *HALTING} - {'none'}
    needs = {'gate': 'embedding', 'mask': 'latent', 'router': 'chain'}
    for name, value, told in rows:
        toggle = {'depth_attn': True} if name == 'depth_attn' else {name: value, 'ponder': needs.get(value, value)}
        short, first = re.search(r'([\d.]+) with s = 1', told), told.split()[0].strip(';,')
        right = lambda text, **steps: f"{cost(**toggle, **steps) / cost():.{len(text.partition('.')[2])}f}" == text
        if short: assert right(short[1], ponder_steps=1), value
        if not short or short[1] != first: assert right(first), value


def test_the_library_lines_run(tmp_path):
    folder = save(tmp_path / 'ckpt', make(vocab_size=320, n_tokens=257, ponder='embedding', ponder_steps=1, halting='gate').float())
    [code], names = re.findall(r'```python\n(.*?)```', README, re.S), {}
    exec(code.replace('out/depth_attn', folder).replace('100', '3'), names)
    assert names['tokens'].shape == (1, 12) and names['h'].shape == (1, 9, 32) and names['loss'].isfinite() and names['model'].steps.shape == (1, 9)


def test_files_keep_their_promised_length():
    for path, budget in re.findall(r'\[`([\w/.]+\.py)`\]\([^)]*\) \| (\d+) \|', README):
        with open(os.path.join(ROOT, path), encoding='utf-8') as f: assert len(f.readlines()) <= int(budget), f"{path} is longer than README's table of files promises; simplify, or raise it there"


def test_no_function_is_longer_than_60_lines():
    for folder in ('.', 'tools', 'exercises', os.path.join('exercises', 'labs')):
        for name in os.listdir(os.path.join(ROOT, folder)):
            if not name.endswith('.py'): continue
            with open(os.path.join(ROOT, folder, name), encoding='utf-8') as f: tree = ast.parse(f.read())
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef): assert node.end_lineno - node.lineno < 60, f'{name}: {node.name}'


if __name__ == '__main__':
    for page in PAGES:
        text = with_right_lines(page)
        with open(os.path.join(ROOT, page), 'w', encoding='utf-8') as f: f.write(text)
