"""tools/explain.py says what the model does, in print and on a page, which works in a browser."""
import io
import json
import re

import pytest
import torch
from browser import needs_browser, shared_browser, texts
from conftest import ONE_EACH, TOGGLES, make, save

import prepare_data
from engine import page
from engine.files import UserError
from engine.mechanisms import halts
from engine.shards import get_tokenizer
from model import PONDER, Feedback, Memory, apply_rope, rope_table
from prepare_data import DataSettings
from tools import explain

IDX = torch.randint(0, 50, (7,), generator=torch.Generator().manual_seed(2))
SIZE = dict(vocab_size=320, n_tokens=257, block_size=64)
BYTE = get_tokenizer('byte')
TEXT = 'def add(a, b):\n    return "é"\n'


def output(model, idx=IDX):
    """The model's logits (T,V)."""
    return model(idx[None])[0][0]


def assert_equal(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


# ---- what is seen --------------------------------------------------------------------------------

def test_steps_end_in_the_models_output(one_of_each):
    model = make(**one_of_each)
    config = model.config
    seen = explain.look(model, IDX)
    want = output(model)
    assert_equal(seen.logits, want)
    if config.halting in ('none', 'gate', 'exit'):      # the others mix their steps
        assert_equal(seen.after[seen.steps - 1, torch.arange(7)], want)
    if config.halting == 'none':
        steps = 2 if config.ponder in ('feedback', 'smear') else model.mechanism.K + 1
        assert seen.steps.tolist() == [steps] * 7
        assert not seen.compared
    else:
        go_on = torch.stack(seen.compared, -1) >= config.halt_tau       # (7,n)
        assert torch.equal(go_on.long().cumprod(-1).sum(-1) + 1, seen.steps)
    if config.depth_attn:
        ones = torch.ones(7, config.n_layer, dtype=torch.float64)
        assert_equal(seen.values.sum(-1), ones)         # shares of all layers' values
    else:
        assert seen.values is None


@pytest.mark.parametrize('ponder', ['embedding', 'chain', 'loop'])
def test_a_step_is_the_output_of_a_model_with_fewer(ponder):
    model = make(ponder=ponder, ponder_steps=3)
    after = explain.look(model, IDX).after
    for steps in range(4):
        model.config.ponder_steps = steps
        assert_equal(after[steps], output(model))


def test_what_a_step_is_called():
    """Also of a single token, whose slots are as many as its passes would be."""
    for ponder, kind in ('latent', 'slot'), ('pause', 'slot'), ('loop', 'pass'), ('none', 'pass'):
        for T in 1, 3:
            assert explain.look(make(ponder=ponder, ponder_steps=2), torch.arange(T)).kind == kind


def test_feedback_without_and_with_the_state():
    model = make(ponder='feedback')
    seen = explain.look(model, IDX)
    x = model.embed(IDX[None])
    before, state = x[:, :0], torch.zeros_like(x[:, :1])
    for t in range(7):      # over the whole text each time: no memory
        off = model.trunk(torch.cat((before, x[:, t:t + 1]), 1))[:, -1:]
        before = torch.cat((before, x[:, t:t + 1] + state), 1)
        state = model.trunk(before)[:, -1:]
        off, on = model.head(off)[0, 0], model.head(state)[0, 0]
        assert_equal(seen.after[:, t], torch.stack((off, on)))
        p, q = on[:50].softmax(0), off[:50].softmax(0)      # the tokens in use
        assert_equal(seen.moved[t], sum(p * (p / q).log()))
    assert seen.moved[0] == 0 and seen.moved[1:].min() > 0.01


def test_smear_without_and_with_the_token_before():
    model = make(ponder='smear', depth_attn=True)
    seen = explain.look(model, IDX)
    x = model.embed(IDX[None])
    smeared = x + torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)
    assert_equal(seen.after[1], output(model))
    for t in range(7):
        off = model.trunk(torch.cat((smeared[:, :t], x[:, t:t + 1]), 1))[0, -1]
        assert_equal(seen.after[0, t], model.head(off))
    assert seen.moved[0] == 0 and seen.moved[1:].min() > 0.01


class Forgets(Feedback):

    def forward(self, gpt, x, memory):
        h = super().forward(gpt, x, memory)
        memory.carried = None
        return h


def test_a_state_that_does_not_come_in_moves_nothing(monkeypatch):
    monkeypatch.setitem(PONDER, 'feedback', Forgets)
    seen = explain.look(make(ponder='feedback'), IDX)
    assert_equal(seen.moved, torch.zeros(7).double())


def test_values_by_hand():
    # 5 layers, stride 2, two query heads to a key head
    model = make(depth_attn=True, n_kv_head=2)
    config = model.config
    values = explain.look(model, IDX).values
    rope = rope_table(torch.arange(7), config.head_dim, config.rope_theta, torch.float64)
    x = model.embed(IDX[None])
    memory = Memory()
    memory.begin(x)
    all_keys = []
    for layer, block in enumerate(model.h):
        attn = block.attn
        qkv = attn.c_attn(block.ln_1(x)).view(7, 8, config.head_dim)
        q, k, _ = qkv.split((4, 2, 2), 1)
        q = apply_rope(attn.q_norm(q), *rope).view(7, 2, 2, -1).mean(2)     # (7,nkv,hd)
        all_keys.append(apply_rope(attn.k_norm(k), *rope))                  # (7,nkv,hd)

        sources = [j for j in (0, 2, 4) if j < layer] + [layer]
        scores = torch.stack([(q * all_keys[j]).sum(-1) for j in sources], -1)
        weights = (scores / config.head_dim ** 0.5).softmax(-1)             # (7,nkv,sources)
        want = torch.zeros(7, 6, dtype=torch.float64)
        want[:, sources] = weights.mean(1)
        assert_equal(values[:, layer], want)
        x = block(x, rope, memory)


def test_values_are_those_of_the_last_pass_a_token_took():
    model = make(**{**TOGGLES['exit_depth'], 'halt_tau': 0.85})
    seen = explain.look(model, IDX)
    left = seen.steps == 1
    assert 0 < left.sum() < 7
    model.config.halt_tau = 1.0     # all leave
    assert_equal(seen.values[left], explain.look(model, IDX).values[left])


def test_nothing_listens_when_it_is_over():
    model = make(depth_attn=True)
    explain.look(model, IDX)
    modules = [part for block in model.h for part in (block, block.attn)]
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in modules)


# ---- what is printed -----------------------------------------------------------------------------

def test_prints_every_position(tmp_path, capsys):
    model = make(**SIZE, ponder='loop', ponder_steps=1, depth_attn=True)
    explain.main([save(tmp_path, model), '--start=dé', '--top=2', '--device=cpu'])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 * 4                  # three bytes: a title, two passes and the layers
    assert lines[0] == "   0 'd'   2 passes"
    assert lines[4] == "   1 '\\xc3'   2 passes"
    after_last, values = lines[10:]
    numbers = [float(word) for word in after_last.split() if len(word) == 5 and word[:2] == '0.']
    p = output(model, torch.tensor(list('dé'.encode())))[2].softmax(-1).topk(2)
    assert numbers == pytest.approx(p.values.tolist(), abs=6e-4)
    assert 'output' not in after_last
    shares = [int(share) for share in re.findall(r'(\d+)%', values)]
    assert 'earlier loops' in values and abs(sum(shares) - 100) < len(shares)


def test_prints_what_halting_compares(tmp_path, capsys):
    settings = dict(TOGGLES['router'], **SIZE)
    explain.main([save(tmp_path / 'a', make(**settings)), '--start=def add(a, b)', '--device=cpu'])
    titles = [line for line in capsys.readouterr().out.splitlines() if 'further' in line]
    assert len(titles) == len('def add(a, b)')
    taken = [int(re.search(r'(\d) pass', line)[1]) for line in titles]
    assert len(set(taken)) > 1
    for n, line in zip(taken, titles):      # the last pass there can be decides nothing
        assert len(re.findall(r'0\.\d{4}', line)) == min(n, settings['ponder_steps'])


def test_prints_what_the_state_does(tmp_path, capsys):
    model = make(**SIZE, ponder='feedback')
    explain.main([save(tmp_path, model), '--start=de', '--top=1', '--device=cpu'])
    way, *lines = capsys.readouterr().out.splitlines()
    assert way == 'read token by token'
    assert [line.split("'")[0].strip() for line in lines] == ['0', 'state off', 'state on',
                                                              '1', 'state off', 'state on']
    moved = explain.look(model, torch.tensor([*b'de'])).moved.tolist()
    assert [float(line.split()[-2]) for line in lines[::3]] == pytest.approx(moved, abs=1e-3)


def test_refusals(tmp_path):
    folder = save(tmp_path / 'long', make(**SIZE))
    short = save(tmp_path / 'short', make(**{**SIZE, 'block_size': 8}))
    for args, words in [(['--against=x'], 'against needs a page'),
                        ([], 'no validation set'),
                        (['--start=a', '--port=9'], 'port=9: is for --serve'),
                        (['--start=' + 'a' * 9, f'--against={short}', '--html=a.html'],
                         'for --against=.* has 9 tokens, .* is 8')]:
        with pytest.raises(UserError, match=words):
            explain.main([folder, *args])


# ---- the data of a page --------------------------------------------------------------------------

def page_of(tmp_path, model, text, *options, data_dir=''):
    """(path, data) of the page about a model that reads a text."""
    path = tmp_path / 'out' / 'think.html'
    folder = save(tmp_path / 'ckpt', model, data_dir=data_dir)
    explain.main([folder, f'--start={text}', f'--html={path}', '--device=cpu', *options])
    return path, read_data(path.read_text(encoding='utf-8'))


def read_data(written):
    """The data that is written in a page."""
    [data] = re.findall(r'<script type="application/json".*?>(.*?)</script>', written)
    return json.loads(data)


@pytest.fixture
def sums(tmp_path, monkeypatch):
    """A data folder of sums, in the current folder."""
    monkeypatch.chdir(tmp_path)
    prepare_data.prepare(DataSettings(problems=100), ['addition'])
    return 'data/addition'


@pytest.mark.parametrize('name', ['latent2_depth', 'mask', 'ouro'])
def test_the_data_is_what_look_saw(tmp_path, name):
    model = make(**{**SIZE, **TOGGLES[name]})
    text = 'a = "é"\n'
    _, data = page_of(tmp_path, model, text, '--top=3')
    tokens = list(text.encode())
    assert data['tokens'] == tokens
    assert data['counts'] == [True] * (len(tokens) - 1) + [False]
    seen = explain.look(model, torch.tensor(tokens))
    [said] = data['models']
    assert said['steps'] == seen.steps.tolist()
    assert said['mixed'] == seen.mixed.tolist()
    assert said['tau'] == (model.config.halt_tau if halts(model) else None)
    for got, want in zip(said['compared'], seen.compared, strict=True):
        assert got == pytest.approx(want.tolist(), abs=1e-3)
    for reading, logits in zip([*said['after'], said['output']], [*seen.after, seen.logits],
                               strict=True):
        best = logits.softmax(-1).topk(3)
        assert reading['likeliest'] == best.indices.tolist()
        assert reading['p'][0] == pytest.approx(best.values[0].tolist(), abs=1e-3)
        log_p = logits.log_softmax(-1)
        want = [-log_p[t, following].item() for t, following in enumerate(tokens[1:])]
        assert reading['loss'][:-1] == pytest.approx(want, abs=1e-3)
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        assert reading['entropy'] == pytest.approx(entropy.tolist(), abs=1e-3)


def test_on_a_made_task_only_answers_count(tmp_path, sums):
    _, data = page_of(tmp_path, make(**SIZE), '12+34, 56+44=100', data_dir=sums)
    text = ''.join(piece['text'] for piece in data['text'])
    assert re.fullmatch(r'(∎\d{4}\+\d{4}=\d{5}){2}∎12\+34=046∎56\+44=100', text)
    counted = [text[t + 1] for t, counts in enumerate(data['counts']) if counts]
    assert ''.join(counted) == '046100'
    with pytest.raises(UserError, match='abc=: no problem of addition'):
        page_of(tmp_path, make(**SIZE), 'abc', data_dir=sums)
    with pytest.raises(UserError, match='--start=12.34=46: the answer is 046, as'):
        page_of(tmp_path, make(**SIZE), '56+44=10,12+34=46', data_dir=sums)


def test_bytes_are_joined_to_characters():
    raw = 'a€\n'.encode() + b'\xff\xe2\x82'
    pieces = page.pieces_of([*raw[:5], BYTE.eot_token, *raw[5:]], BYTE)
    assert [(piece['text'], piece['count']) for piece in pieces] == [
        ('a', 1), ('€', 3), ('\n', 1), ('∎', 1), ('\\xff', 1), ('\\xe2\\x82', 2)]


def test_text_never_becomes_markup():
    hostile = '</script><b id=owned>&amp;{{DATA}}\u202e\u2028é\r\n\t\'"`${1}\\<!--<script>'
    data = dict(text=hostile, models=[dict(name=hostile)])
    written = page.fill_template(data)
    assert read_data(written) == data
    assert '<b id' not in written
    assert written.count('<script') == written.count('</script>') == 2


# ---- the page in a browser -----------------------------------------------------------------------

browser = shared_browser    # the fixture


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
    path, data = page_of(tmp_path, make(**{**SIZE, **TOGGLES['router_depth']}), TEXT)
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
def test_opens_on_an_answer_and_counts_answers_alone(tmp_path, browser, sums):
    model = make(**{**SIZE, **TOGGLES['loop']})
    path, data = page_of(tmp_path, model, '12+34=046', data_dir=sums)
    browser.open(path)
    answer = [t for t, counts in enumerate(data['counts']) if counts]
    assert browser.run("location.hash") == '' and len(answer) == 3
    [title] = texts(browser, '.card h2')
    assert int(title.split()[-1]) in answer
    rows = texts(browser, '.passes tbody tr')
    assert len(rows) == 3 and all('of 3' in row for row in rows)
    assert_alive(browser)


@needs_browser
def test_feedback_beside_a_loop(tmp_path, browser):
    other = save(tmp_path / 'other', make(**SIZE, **TOGGLES['loop']))
    path, data = page_of(tmp_path, make(**SIZE, ponder='feedback'), TEXT, f'--against={other}')
    browser.open(path, address='#t=5&tint=moved')
    assert texts(browser, '.model:first-child .passes th:first-child')[1:3] == ['state off',
                                                                                'state on']
    assert 'pass 2' in texts(browser, '.model:last-child .passes th:first-child')
    about, _ = texts(browser, '.card > .quiet')
    assert f"the state moved it by {data['models'][0]['moved'][5]} nats" in about
    assert_alive(browser)


@needs_browser
@pytest.mark.slow
def test_two_models_are_linked(tmp_path, browser):
    other = save(tmp_path / 'other', make(**SIZE, **TOGGLES['loop']))
    model = make(**SIZE, **TOGGLES['chain_depth'])
    browser.open(page_of(tmp_path, model, TEXT, f'--against={other}')[0])
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
    browser.open(page_of(tmp_path, make(**{**SIZE, **TOGGLES[name]}), TEXT)[0], width)
    browser.mouse(token(3), click=True)
    assert texts(browser, '.card h2') == ['After ␣ token 3']
    assert browser.run('document.documentElement.scrollWidth') <= width     # nothing sticks out
    assert_alive(browser)
