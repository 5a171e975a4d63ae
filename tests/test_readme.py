"""The commands, links and promises of the README and its companions are true. Run as a program, it mends links to lines."""
import ast
import os
import re

import pytest
from conftest import ROOT


def read_text(path):
    with open(os.path.join(ROOT, path), encoding='utf-8') as f: return f.read()


PAGES = ('README.md', 'docs/architecture.md', 'exercises/README.md')
README = read_text('README.md')
COMMANDS = [line.split('   ')[0].strip() for page in PAGES for block in re.findall(r'```\n(.*?)```', read_text(page), re.S)
            for line in block.splitlines() if line.startswith(('python ', 'pip ', 'torchrun '))]


def test_the_two_commands_are_what_ci_runs():
    with open(os.path.join(ROOT, '.ci', 'run')) as f: ci = f.read().splitlines()
    assert 'pip install -r requirements.txt && python train.py config/depth_attn.py config/size/tiny.py' in COMMANDS
    for command in COMMANDS:
        if command.startswith('pip '): assert command in ci


@pytest.mark.parametrize('command', [c for c in COMMANDS if '.py' in c])
def test_commands_name_files_and_settings_that_exist(command):
    from configurator import read
    from model import GPTConfig
    from prepare_data import DataSettings
    from sample import SampleSettings
    from tools.compare import ALL, CompareSettings
    from tools.evaluate import EvaluateSettings
    from tools.explain import ExplainSettings
    from tools.plot import KINDS, PlotSettings
    from train import Settings
    program, *args = re.findall(r'(?:"[^"]*"|\S)+', command[re.search(r'\b(\w+/)?\w+\.py', command).start():])
    if program.startswith('exercises/'):
        assert os.path.exists(os.path.join(ROOT, program)) and all(re.fullmatch('--hint(=[123])?', a) for a in args)
        return
    blocks = {'train.py': (Settings, GPTConfig), 'sample.py': (SampleSettings,), 'prepare_data.py': (DataSettings,),
              'tools/compare.py': (CompareSettings, Settings, GPTConfig), 'tools/evaluate.py': (EvaluateSettings,),
              'tools/explain.py': (ExplainSettings,), 'tools/plot.py': (PlotSettings,)}[program]
    given, rest = read([a.replace('"', '') for a in args if a not in ('--help', '--check')], '', *blocks)
    if program == 'tools/plot.py': assert rest[0] in KINDS
    if program == 'tools/compare.py':
        for name in given['names'].split(','): assert name in ALL


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


def test_files_keep_their_promised_length():
    for path, budget in re.findall(r'\[`([\w/.]+)`\]\([^)]*\) \| (\d+) \|', README):
        with open(os.path.join(ROOT, path), encoding='utf-8') as f: assert len(f.readlines()) <= int(budget), path


def test_no_function_is_longer_than_60_lines():
    for folder in ('.', 'tools', 'exercises'):
        for name in os.listdir(os.path.join(ROOT, folder)):
            if not name.endswith('.py'): continue
            with open(os.path.join(ROOT, folder, name), encoding='utf-8') as f: tree = ast.parse(f.read())
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef): assert node.end_lineno - node.lineno < 60, f'{name}: {node.name}'


if __name__ == '__main__':
    for page in PAGES:
        text = with_right_lines(page)
        with open(os.path.join(ROOT, page), 'w', encoding='utf-8') as f: f.write(text)
