"""The page of tools/explain.py --html: its data is what look() saw, and in a browser it works."""

import io
import json
import re

import pytest
import torch
from browser import Browser, find_browser
from conftest import ONE_EACH, TOGGLES, make, save

from engine.files import UserError
from engine.shards import get_tokenizer
from tools import explain, think

SIZE = dict(vocab_size=320, n_tokens=257, block_size=64)
BYTE = get_tokenizer('byte')
HOSTILE = '</script><b id=owned>&amp;{{DATA}}\u202e\u2028é\r\n\t\'"`${1}\\'
TEXT = 'def add(a, b):\n    return "é"\n'


def page(tmp_path, text, *options, **settings):
    """The path of a page about a model with these settings."""
    folder = save(tmp_path / 'ckpt', make(**{**SIZE, **settings}).float())
    path = str(tmp_path / 'think.html')
    explain.main([folder, f'--start={text}', f'--html={path}', '--device=cpu', *options])
    return path


def read_data(path):
    """The data of a page."""
    with open(path, encoding='utf-8') as f:
        [data] = re.findall(r'<script type="application/json".*?>(.*?)</script>', f.read())
    return json.loads(data)


# ---- the data ------------------------------------------------------------------------------------

@pytest.mark.parametrize('name', ['depth', 'latent2_depth', 'gate', 'mask', 'router_depth'])
def test_the_data_is_what_look_saw(tmp_path, name):
    path = page(tmp_path, TEXT, '--top=3', **TOGGLES[name])
    data = read_data(path)
    tokens = list(TEXT.encode())
    assert data['tokens'] == tokens
    model = make(**{**SIZE, **TOGGLES[name]}).float()
    seen = explain.look(model, torch.tensor(tokens))

    [said] = data['models']
    assert said['steps'] == seen.steps.tolist()
    assert said['kind'] == seen.kind
    assert said['mixed'] == seen.mixed.tolist()
    for key in ('halting', 'compared'):
        assert_near(said[key], getattr(seen, key))
    assert said['tau'] == (model.config.halt_tau if model.mechanism.halts else None)
    assert (said['values'] is None) == (seen.values is None)
    if seen.values is not None:
        assert_near(said['values'], seen.values)
    assert len(said['after']) == len(seen.after)
    for reading, logits in zip([*said['after'], said['output']], [*seen.after, seen.logits]):
        assert_reading(reading, logits, tokens)


def assert_near(got, want):
    """Numbers of the page, and a tensor or a list of them."""
    want = torch.stack(want) if isinstance(want, list) and want else want
    if len(want):
        torch.testing.assert_close(torch.tensor(got), want.float(), rtol=0, atol=1e-3)
    else:
        assert got == []


def assert_reading(reading, logits, tokens):
    best = logits.softmax(-1).topk(3)
    assert reading['likeliest'] == best.indices.tolist()
    assert_near(reading['p'], best.values)
    log_p = logits.log_softmax(-1)
    for t, following in enumerate(tokens[1:]):
        assert reading['loss'][t] == pytest.approx(-log_p[t, following].item(), abs=1e-3)
    assert reading['loss'][-1] is None
    known = log_p[:, :257]
    assert_near(reading['entropy'], -(known.exp() * known).sum(-1))


def test_bytes_are_joined_to_characters():
    raw = 'a€\n'.encode() + b'\xff\xe2\x82'
    pieces = think.pieces_of([*raw[:5], BYTE.eot_token, *raw[5:]], BYTE)
    assert [(piece['text'], piece['count']) for piece in pieces] == [
        ('a', 1), ('€', 3), ('\n', 1), ('∎', 1), ('\\xff', 1), ('\\xe2\\x82', 2)]


def test_text_never_becomes_markup():
    data = dict(text=HOSTILE + '<!--<script>', models=[dict(name=HOSTILE)])
    written = think.fill_template(data)
    [said] = re.findall(r'<script type="application/json".*?>(.*?)</script>', written)
    assert json.loads(said) == data
    assert not set('<>&') & set(said)
    assert '<b id' not in written
    assert written.count('<script') == written.count('</script>') == 2


def test_the_same_text_gives_the_same_page(tmp_path):
    first, second = [open(page(tmp_path, TEXT), 'rb').read() for _ in range(2)]
    assert first == second


@pytest.mark.parametrize('start, options, words', [
    ('a' * 513, [], '513 tokens, a page shows up to 512'),
    ('a' * 60, ['--top=9'], 'would have .* bytes, more than 60,000'),
    ('a', ['--html=nowhere/a.html'], 'nowhere/a.html: cannot be written'),
    ('a', ['--against=nowhere'], 'no checkpoint'),
])
def test_refusals(tmp_path, monkeypatch, start, options, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(think, 'MOST_BYTES', 60_000)
    with pytest.raises(UserError, match=words) as error:
        page(tmp_path, start, *options, block_size=600, ponder='loop', ponder_steps=3)
    assert '\n' not in str(error.value)
    assert not (tmp_path / 'think.html').exists()


def test_two_models_must_read_the_same_tokens(tmp_path):
    short = save(tmp_path / 'short', make(**{**SIZE, 'block_size': 8}).float())
    with pytest.raises(UserError, match='context .* of --against is 8'):
        page(tmp_path, 'a' * 9, f'--against={short}')
    other = save(tmp_path / 'other', make(**SIZE).float(), tokenizer='gpt2')
    with pytest.raises(UserError, match='tokenizer'):
        page(tmp_path, 'a', f'--against={other}')


# ---- in a browser --------------------------------------------------------------------------------

needs_browser = pytest.mark.skipif(find_browser() is None, reason='no Chromium on this machine')


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
    path = page(tmp_path, TEXT, **TOGGLES['router_depth'])
    [model] = read_data(path)['models']
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
def test_hostile_text_is_shown_as_it_is(tmp_path, browser):
    browser.open(page(tmp_path, HOSTILE, **TOGGLES['gate']))
    shown = texts(browser, '.text:not(.said)')[0]
    expected = r'</script><b id=owned>&amp;{{DATA}}\u202e\u2028é\x0d↵ ⇥' + '\'"`${1}\\'
    assert ' '.join(shown.split()) == expected
    assert not browser.run("document.querySelectorAll('#owned').length")
    assert_alive(browser)


def two_in_one(tmp_path):
    """A document, as a notebook is one, with two pages in it and a heading of its own."""
    parts = []
    for i, toggle in enumerate(('embedding', 'mask')):
        (tmp_path / str(i)).mkdir()
        with open(page(tmp_path / str(i), TEXT, **TOGGLES[toggle]), encoding='utf-8') as f:
            parts.append(f'<div class="output">{f.read()}</div>')
    path = tmp_path / 'notebook.html'
    path.write_text('<!doctype html><h1>A notebook</h1><iframe></iframe>' + ''.join(parts))
    return path


@needs_browser
@pytest.mark.slow
def test_two_pages_in_one_notebook(tmp_path, browser):
    browser.open(two_in_one(tmp_path))
    first, second = browser.run("[...document.querySelectorAll('.nanoponder')].map(e => e.id)")
    assert first != second
    browser.mouse(f'#{second} {token(4)}', click=True)
    assert texts(browser, f'#{second} .card h2') == ['After a token 4']
    assert texts(browser, f'#{first} .card h2') != ['After a token 4']
    assert texts(browser, f'#{first} .passes tbody th') == ['pass 1', 'pass 2', 'pass 3']
    assert texts(browser, f'#{second} .passes tbody th') == ['slot 1', 'slot 2', 'output']
    assert browser.run('location.hash') == ''       # it is the notebook's
    own = "getComputedStyle(document.querySelector('body > h1')).fontSize"
    assert browser.run(own) == '32px'
    added = "Object.keys(window).filter(name => !(name in frames[0]))"
    assert browser.run(added) == ['0']              # the frame itself
    assert_alive(browser)


@needs_browser
@pytest.mark.slow
def test_two_models_are_linked(tmp_path, browser):
    other = save(tmp_path / 'other', make(**SIZE, **TOGGLES['loop']).float())
    browser.open(page(tmp_path, TEXT, f'--against={other}', **TOGGLES['chain_depth']))
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
    browser.open(page(tmp_path, TEXT, **TOGGLES[name]), width)
    browser.mouse(token(3), click=True)
    assert texts(browser, '.card h2') == ['After ␣ token 3']
    assert browser.run('document.documentElement.scrollWidth') <= width     # nothing sticks out
    assert_alive(browser)


@needs_browser
@pytest.mark.slow
def test_a_page_of_512_tokens(tmp_path, browser):
    browser.open(page(tmp_path, 'x = "é"\n' * 56 + 'x = 1.25', block_size=512,
                      **TOGGLES['router_depth']))
    assert browser.run("document.querySelectorAll('.text:not(.said) .token').length") == 512
    browser.mouse(token(511), click=True)
    assert 'the text ends here' in texts(browser, '.card')[0]
    assert_alive(browser)
