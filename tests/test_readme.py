"""The README's commands, links and promises are true."""
import ast
import os
import re

import pytest
from conftest import ROOT

with open(os.path.join(ROOT, 'README.md'), encoding='utf-8') as f: README = f.read()
COMMANDS = [line.split('   ')[0].strip() for block in re.findall(r'```\n(.*?)```', README, re.S) for line in block.splitlines()
            if line.startswith(('python ', 'pip ', 'torchrun '))]


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
    blocks = {'train.py': (Settings, GPTConfig), 'sample.py': (SampleSettings,), 'prepare_data.py': (DataSettings,),
              'tools/compare.py': (CompareSettings, Settings, GPTConfig), 'tools/evaluate.py': (EvaluateSettings,),
              'tools/explain.py': (ExplainSettings,), 'tools/plot.py': (PlotSettings,)}[program]
    given, rest = read([a.replace('"', '') for a in args if a != '--help'], '', *blocks)
    if program == 'tools/plot.py': assert rest[0] in KINDS
    if program == 'tools/compare.py':
        for name in given['names'].split(','): assert name in ALL


def test_line_ranges_are_those_of_the_code_they_name():
    """A range starts at the comment block above the first thing it names and ends with the last."""
    links = re.findall(r'\[([^\]]*)\]\((\w+\.py)#L(\d+)-L(\d+)\)', README)
    assert links
    for text, path, first, last in links:
        with open(os.path.join(ROOT, path), encoding='utf-8') as f: source = f.read()
        spans = {node.name: (node.lineno, node.end_lineno) for node in ast.parse(source).body if hasattr(node, 'name')}
        named = [spans[name] for name in re.findall(r'`(\w+)`', text)]
        start, lines = min(named)[0], [''] + source.splitlines()
        if lines[start - 1] == '' and lines[start - 2].startswith('#'): start -= 1
        while lines[start - 1].startswith('#'): start -= 1
        assert (int(first), int(last)) == (start, max(end for _, end in named)), text


def test_every_link_to_a_file_exists():
    for path in re.findall(r'\]\(([^)#]+)[^)]*\)', README):
        if not path.startswith('http'): assert os.path.exists(os.path.join(ROOT, path)), path


def test_files_keep_their_promised_length():
    for path, budget in re.findall(r'\[`([\w/.]+)`\]\([^)]*\) \| (\d+) \|', README):
        with open(os.path.join(ROOT, path), encoding='utf-8') as f: assert len(f.readlines()) <= int(budget), path


def test_no_function_is_longer_than_60_lines():
    for folder in ('.', 'tools'):
        for name in os.listdir(os.path.join(ROOT, folder)):
            if not name.endswith('.py'): continue
            with open(os.path.join(ROOT, folder, name), encoding='utf-8') as f: tree = ast.parse(f.read())
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef): assert node.end_lineno - node.lineno < 60, f'{name}: {node.name}'
