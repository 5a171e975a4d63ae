"""The page of tools/explain.py --html works in a browser."""
import io

import pytest
from browser import Browser, find_browser
from conftest import ONE_EACH, TOGGLES, make, save
from test_explain import SIZE, read_page

import prepare_data
from prepare_data import DataSettings

TEXT = 'def add(a, b):\n    return "é"\n'
needs_browser = pytest.mark.skipif(find_browser() is None, reason='no Chromium on this machine')


def page(tmp_path, text, *options, data_dir='', **settings):
    """(path, data) of a page about a model with these settings."""
    model = make(**{**SIZE, **settings}).float()
    folder = save(tmp_path / 'ckpt', model, data_dir=data_dir)
    return tmp_path / 'out' / 'think.html', read_page(tmp_path, folder, text, *options)


@pytest.fixture(scope='module')
def browser(tmp_path_factory):
    with Browser(find_browser(), tmp_path_factory.mktemp('profile')) as browser:
        yield browser


def texts(browser, selector):
    """The text of each element that a selector finds."""
    return browser.run(f"[...document.querySelectorAll('{selector}')].map(e => e.innerText)")


def token(t):
    return f'.text:not(.said) [data-t="{t}"]'


def assert_alive(browser):
    """Nothing failed, the text is there, and the picture is not empty."""
    assert not browser.failures()
    from matplotlib.image import imread
    picture = imread(io.BytesIO(browser.picture()))[..., :3]
    ground = picture[2, 2]
    assert (abs(picture - ground).max(-1) > 0.2).mean() > 0.01


@needs_browser
def test_point_pin_keys_slider_and_address(tmp_path, browser):
    path, data = page(tmp_path, TEXT, **TOGGLES['router_depth'])
    [model] = data['models']
    browser.open(path)
    assert texts(browser, '.text:not(.said)')[0].startswith('def add(a, b):↵\n    return "é"↵')

    browser.mouse(token(5))
    assert texts(browser, '.card h2') == ['After d token 5']
    assert len(texts(browser, '.card .step')) == model['steps'][5] + model['mixed'][5]
    p = model['after'][0]['p'][5]
    widths = browser.run("[...document.querySelectorAll('.card .step:first-child .fill')]"
                         ".map(bar => parseFloat(bar.style.width) / 100)")
    assert widths[:6] == pytest.approx(p)
    assert set(texts(browser, '.card .bar.true .word')) == {'d'}    # the next token of "add"

    browser.mouse(token(5), click=True)
    browser.mouse(token(9))
    assert texts(browser, '.card h2') == ['After d token 5', 'After , token 9']
    browser.mouse(token(9), click=True)
    browser.mouse(token(2))
    assert len(texts(browser, '.card')) == 2
    assert 'pin=5,9' in browser.run('location.hash')
    browser.press('ArrowRight', 'Escape')
    assert texts(browser, '.card h2') == ['After ␣ token 3']

    stops = len(texts(browser, '.passes tbody tr'))
    browser.press('ArrowDown', 'ArrowDown')
    assert browser.run("document.querySelector('input').value") == str(stops - 3)
    assert browser.run('location.hash') == f'#t=3&pass={stops - 2}&tint=passes'
    browser.run("document.querySelector('input').focus()")
    browser.press('ArrowLeft')

    browser.open(path, address='#t=4&pass=1&tint=loss&pin=7,bad,99')
    assert texts(browser, '.card h2') == ['After ( token 7', 'After a token 4']
    assert texts(browser, '.passes .chosen th') == ['pass 1']
    assert texts(browser, '[aria-pressed=true]') == ['loss']
    assert_alive(browser)


@needs_browser
def test_opens_on_an_answer_and_counts_answers_alone(tmp_path, browser, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare_data.prepare(DataSettings(problems=100), ['addition'])
    path, data = page(tmp_path, '12+34=046', data_dir='data/addition', **TOGGLES['loop'])
    browser.open(path)
    answer = [t for t, counts in enumerate(data['counts']) if counts]
    assert browser.run("location.hash") == '' and len(answer) == 3
    [title] = texts(browser, '.card h2')
    assert int(title.split()[-1]) in answer
    rows = texts(browser, '.passes tbody tr')
    assert len(rows) == 3 and all('of 3' in row for row in rows)
    assert_alive(browser)


@needs_browser
@pytest.mark.slow
def test_two_models_are_linked(tmp_path, browser):
    other = save(tmp_path / 'other', make(**SIZE, **TOGGLES['loop']).float())
    browser.open(page(tmp_path, TEXT, f'--against={other}', **TOGGLES['chain_depth'])[0])
    assert len(texts(browser, '.model')) == 2
    browser.mouse('.model:last-child ' + token(7))
    assert browser.run("document.querySelectorAll('.token.here').length") == 4
    assert len(texts(browser, '.card')) == 2
    assert_alive(browser)


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize('width', [1400, 390])
@pytest.mark.parametrize('name', ONE_EACH)
def test_every_mechanism_has_a_page(tmp_path, browser, name, width):
    browser.open(page(tmp_path, TEXT, **TOGGLES[name])[0], width)
    browser.mouse(token(3), click=True)
    assert texts(browser, '.card h2') == ['After ␣ token 3']
    assert browser.run('document.documentElement.scrollWidth') <= width     # nothing sticks out
    assert_alive(browser)
