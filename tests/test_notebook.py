"""exercises/start.ipynb runs from top to bottom, and shows outputs of such a run."""

import json
import os
import shutil

import pytest
from conftest import ROOT

PATH = os.path.join(ROOT, 'exercises', 'start.ipynb')
TINY = ('config/halting_router.py config/size/tiny.py --max_steps=2 --n_layer=2 --n_embd=32 '
        '--n_head=2 --mlp_hidden=48 --block_size=256 --batch_tokens=256 --micro_batch=1 '
        '--eval_tokens=256 --eval_interval=2 --dtype=float32 --device=cpu --data_dir={data}')


def read_cells():
    with open(PATH, encoding='utf-8') as f:
        return json.load(f)['cells']


def text_of(output):
    """What an output shows as text."""
    data = output.get('data', {})
    return ''.join(output.get('text', [])) + ''.join(data.get('text/html', []))


def outputs(cell):
    return ''.join(text_of(output) for output in cell['outputs'])


def test_the_outputs_are_those_of_one_run_of_these_cells():
    assert os.path.getsize(PATH) < 500_000
    cells = [cell for cell in read_cells() if cell['cell_type'] == 'code']
    assert [cell['execution_count'] for cell in cells] == list(range(1, len(cells) + 1))
    shown = [outputs(cell) for cell in cells]
    assert not any(output['output_type'] == 'error' for cell in cells for output in cell['outputs'])
    assert 'step   300/300' in shown[2]
    assert '\x1b[30;48;5;' in shown[3]              # coloured
    assert 'class="nanoponder"' in shown[4]         # the page
    assert shown[5].startswith('not yet: ')
    assert shown[6].startswith('right. ')
    assert '/home/' not in ''.join(shown)           # nobody's folders


@pytest.mark.slow
def test_it_runs(tmp_path, small_data):
    nbclient = pytest.importorskip('nbclient', reason='pip install nbclient ipykernel')
    pytest.importorskip('ipykernel', reason='pip install nbclient ipykernel')
    import nbformat
    project = tmp_path / 'project'
    shutil.copytree(ROOT, project, ignore=shutil.ignore_patterns('.*', 'out', 'data', 'tests'))
    notebook = nbformat.read(PATH, 4)
    for cell in notebook.cells:
        if 'settings' in cell.metadata.get('tags', ()):
            line = cell.source.splitlines()[0]
            cell.source = cell.source.replace(line, f'settings = {TINY.format(data=small_data)!r}')
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name='python3',
                                     resources={'metadata': {'path': str(project / 'exercises')}})
    client.execute()
    code = [cell for cell in notebook.cells if cell.cell_type == 'code']
    shown = [outputs(cell) for cell in code]
    assert 'step 2: validation loss' in shown[2]
    assert 'class="nanoponder"' in shown[4]
    assert shown[6].startswith('right. ')
    assert (project / 'out' / 'start' / 'think.html').exists()
