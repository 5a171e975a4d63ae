"""The drawings of docs/ are those that docs/draw.py makes, of every mechanism, and are shown."""

import os
import sys
from xml.etree import ElementTree

import pytest
from conftest import ROOT

sys.path.insert(0, os.path.join(ROOT, 'docs'))
from draw import DRAWINGS, WIDTH

from model import HALTING, PONDER

SVG = '{http://www.w3.org/2000/svg}'


def read_text(*path):
    with open(os.path.join(ROOT, *path), encoding='utf-8') as f:
        return f.read()


def test_every_mechanism_is_drawn():
    assert set(DRAWINGS) == {'depth_attention', *PONDER, *HALTING} - {'none'}
    files = os.listdir(os.path.join(ROOT, 'docs', 'drawings'))
    assert sorted(files) == sorted(f'{name}.svg' for name in DRAWINGS)


@pytest.mark.parametrize('name', DRAWINGS)
def test_the_file_is_what_the_program_draws(name):
    drawn = DRAWINGS[name]().svg()
    assert read_text('docs', 'drawings', f'{name}.svg') == drawn, "run python docs/draw.py"
    for page in ('README.md', 'model.py'):
        assert f'docs/drawings/{name}.svg' in read_text(page)


@pytest.mark.parametrize('name', DRAWINGS)
def test_nothing_sticks_out(name):
    """Boxes and words, reckoned at 8 pixels a letter, lie inside; one box is the reader's."""
    picture = ElementTree.fromstring(DRAWINGS[name]().svg())
    height = float(picture.get('height'))
    for text in picture.iter(f'{SVG}text'):
        width = 8 * len(text.text)
        left = float(text.get('x')) - (width / 2 if text.get('text-anchor') == 'middle' else 0)
        assert left >= 0 and left + width <= WIDTH, text.text
        assert 0 < float(text.get('y')) < height
    slots = [box for box in picture.iter(f'{SVG}rect') if 'slot' in box.get('class')]
    for box in slots:
        assert float(box.get('x')) + float(box.get('width')) < WIDTH
    here = [box for box in slots if 'here' in box.get('class') and float(box.get('y')) > 80]
    assert len(here) == 1


@pytest.mark.parametrize('name', DRAWINGS)
def test_a_slot_reads_what_came_before(name):
    """No blue box lies right of the black one, or above it."""
    picture = ElementTree.fromstring(DRAWINGS[name]().svg())
    boxes = [box for box in picture.iter(f'{SVG}rect') if float(box.get('y', 0)) > 80]
    [here] = [box for box in boxes if 'here' in box.get('class')]
    read = [box for box in boxes if 'read' in box.get('class')]
    assert read
    for box in read:
        assert float(box.get('x')) <= float(here.get('x'))
        assert float(box.get('y')) >= float(here.get('y'))
