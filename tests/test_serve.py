"""tools/explain.py --serve answers on a page, and goes on whatever it is sent."""
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from browser import needs_browser, shared_browser, texts
from conftest import ONE_EACH, ROOT, TOGGLES, make, save, slow_but

import prepare_data
import sample
from engine.files import UserError
from engine.generate import generate
from engine.shards import get_tokenizer
from model import Loop
from prepare_data import DataSettings
from tools import explain, serve
from tools.serve import Question, Served, Side

SIZE = dict(vocab_size=320, n_tokens=257, block_size=64)
BYTE = get_tokenizer('byte')
END = 256       # the end-of-text token
EXAM = dict(task='addition', size=4, eot=END, problems=[('1+2=', '3')])


# ---- a server, started from the shell ------------------------------------------------------------

class Running:
    """The program, and what it prints; use it in `with`, which ends it."""

    def __init__(self, folder, *args):
        self.errors = open(folder / 'errors.txt', 'w+')
        env = {'PATH': '', 'PYTHONPATH': ROOT, 'OMP_NUM_THREADS': '1', 'HOME': str(folder)}
        command = [sys.executable, f'{ROOT}/tools/explain.py', *args, '--serve', '--port=0',
                   '--device=cpu']
        self.process = subprocess.Popen(command, cwd=folder, env=env, text=True,
                                        stdout=subprocess.PIPE, stderr=self.errors)
        self.address = self.process.stdout.readline().split()[0]
        self.port = int(re.fullmatch(r'http://127\.0\.0\.1:(\d+)/', self.address)[1])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.errors.close()

    def said(self):
        """What it wrote to stderr."""
        self.errors.seek(0)
        return self.errors.read()

    def request(self, method, path, body=None, **headers):
        """A response that can be read."""
        connection = http.client.HTTPConnection('127.0.0.1', self.port, timeout=60)
        connection.request(method, path, body, headers)
        return connection.getresponse()

    def start(self, **question):
        """The response to a question."""
        return self.request('POST', '/ask', json.dumps(question))

    def ask(self, **question):
        """All events of an answer."""
        response = self.start(**question)
        assert response.status == 200, response.read()
        return [json.loads(line) for line in response]

    def send(self, raw):
        """(status, text) of the answer to raw bytes; 0 where it has no head, as HTTP/0.9 wants."""
        with socket.create_connection(('127.0.0.1', self.port), timeout=60) as connection:
            connection.sendall(raw)
            with connection.makefile('rb') as reader:
                answer = reader.read()
        if not answer.startswith(b'HTTP/'):
            return 0, answer.decode()
        head, _, text = answer.partition(b'\r\n\r\n')
        return int(head.split()[1]), text.decode()


@pytest.fixture(scope='module')
def server(tmp_path_factory):
    """A model of text, one of sums, and one that takes a minute for an answer."""
    folder = tmp_path_factory.mktemp('serve')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        prepare_data.prepare(DataSettings(problems=100), ['addition'])
    save(folder / 'text', make(**SIZE, **TOGGLES['loop_depth']))
    save(folder / 'sums', make(**SIZE, **TOGGLES['exit']), data_dir='data/addition')
    slow = dict(SIZE, block_size=512)
    save(folder / 'slow', make(**slow, ponder='loop', ponder_steps=40))
    with Running(folder, 'text', 'sums', 'slow') as running:
        running.folder = folder
        yield running
        assert running.said() == ''
        assert running.process.poll() is None       # it went on


def written(events, side=0):
    """The text that a side drew."""
    return ''.join(event['token'] for event in events if event['side'] == side and 'token' in event)


def pages(events, side=0):
    return [event['page'] for event in events if event['side'] == side and 'page' in event]


def assert_answers(server):
    events = server.ask(text='def ', max_new_tokens=2, sides=[dict(model='text')])
    assert events[-1]['end'].startswith('2 tokens')


# ---- answers -------------------------------------------------------------------------------------

@pytest.mark.parametrize('model, options', [
    ('text', dict(temperature=0)),
    ('text', dict(temperature=1, seed=5)),
    ('text', dict(temperature=0, ponder_steps=4)),
    ('sums', dict(temperature=0)),
    ('sums', dict(temperature=0, halt_tau=0.95)),
])
def test_an_answer_is_what_sample_prints(server, capsys, monkeypatch, model, options):
    monkeypatch.chdir(server.folder)
    given = {name: options[name] for name in options if name in ('ponder_steps', 'halt_tau')}
    shared = {name: options[name] for name in options if name not in given}
    text = '12+34='
    events = server.ask(text=text, max_new_tokens=15, **shared, sides=[dict(model=model, **given)])
    args = [f'--{name}={value}' for name, value in options.items()]
    sample.main([model, f'--start={text}', '--max_new_tokens=15', '--device=cpu', *args])
    told = capsys.readouterr().out      # where it ends in a character it has a mark more
    assert told.rstrip('�') == (text + written(events).replace('∎', '')).rstrip('�')
    tokens = pages(events)[-1]['tokens']
    assert BYTE.decode([token for token in tokens if token != END]).endswith(told)
    assert len(told) > len(text)


def test_tokens_come_one_by_one_and_end_in_the_page(server):
    events = server.ask(text='ab', max_new_tokens=5, sides=[dict(model='text')])
    assert events[0] == dict(side=0, name='text', reads=2, most=5)
    drawn = [event for event in events if 'token' in event]
    assert [event['count'] for event in drawn] == [1, 2, 3, 4, 5]
    assert {event['passes'] for event in drawn} == {3}
    last = events[-2]['page']
    assert len(last['tokens']) == 7 and last['counts'] == [True] * 6 + [False]
    assert len(last['models'][0]['after']) == 3
    assert 'end' in events[-1]


def test_two_sides_and_settings_of_one_answer_alone(server):
    sides = [dict(model='text', ponder_steps=5), dict(model='text')]
    events = server.ask(text='ab', temperature=0, max_new_tokens=3, sides=sides)
    names = [event['name'] for event in events if 'name' in event]
    assert names == ['text, ponder_steps=5', 'text']
    passes = [{event['passes'] for event in events if event['side'] == i and 'token' in event}
              for i in (0, 1)]
    assert passes == [{6}, {3}]
    assert [len(pages(events, i)[-1]['models'][0]['after']) for i in (0, 1)] == [6, 3]

    server.ask(text='ab', max_new_tokens=1, sides=[dict(model='text', ponder_steps=0)])
    page = server.request('GET', '/').read().decode()
    assert re.search(r'"name": ?"text",.*?"ponder_steps": ?(\w+)', page)[1] == '2'    # as trained

    few, many = [server.ask(text='12+34', max_new_tokens=9, sides=[dict(model='sums', halt_tau=n)])
                 for n in (1, 0)]
    assert {event['passes'] for event in few if 'token' in event} == {1}
    assert {event['passes'] for event in many if 'token' in event} == {3}


def test_a_question_counts_from_its_own_tokens_on(server):
    page = pages(server.ask(text='12+34=04', max_new_tokens=2, sides=[dict(model='sums')]))[-1]
    text = ''.join(piece['text'] for piece in page['text'])
    start = text.index('12+34=') + 5
    assert re.match(r'(∎\d{4}\+\d{4}=\d{5})+∎', text[:start - 5])
    assert page['counts'][:start] == [False] * start
    assert page['counts'][start:start + 2] == [True, True]


def test_a_verdict():
    sums = Served('sums', make(**SIZE), BYTE, EXAM)
    assert sums.verdict([*b'12+34=046']) == '046 is right'
    assert sums.verdict([*b'12+34=47']) == '47 is wrong: it is 046'
    with pytest.raises(UserError, match='hello=: no problem of addition'):
        sums.prompt('hello')
    with pytest.raises(UserError, match='reads one problem at a time'):
        sums.prompt('12+34=,56+78=')


def test_the_end_of_a_text_is_one_token():
    text = Served('text', make(**SIZE), BYTE, None)
    assert text.prompt('a<|endoftext|>b') == ([*b'a', 256, *b'b'], 0)


def test_a_road_stands_still_after_some_rounds():
    traffic = Served('t', make(**SIZE), BYTE, dict(EXAM, task='traffic'))
    assert traffic.verdict([*b'99999999999999999999:>>..|..>>']) == '..>> is right'


@pytest.mark.parametrize('name', slow_but(
    ('plain', 'latent2_depth', 'loop_depth', 'feedback_depth', 'router_depth'), ONE_EACH))
def test_looking_changes_no_answer(monkeypatch, name):
    """`look` uses the model between two tokens."""
    times = iter(10.0 ** n for n in range(200))     # each wait is long: it looks at every token
    monkeypatch.setattr(serve.time, 'monotonic', lambda: next(times))
    model = make(**{**SIZE, 'block_size': 16, **TOGGLES[name]})
    served = Served('a', model, BYTE, None)
    question = Question('ab', max_new_tokens=8)
    events = list(serve.answer(served, question, Side('a'), explain.look, 3, lambda: False))
    looked = [event['page'] for event in events if 'page' in event]
    want = generate(model, [[*b'ab']], 8, temperature=0, stop_token=END)[0].tolist()
    assert looked[-1]['tokens'] == want
    assert len(looked) == len(want) - 2 + 1


def test_an_answer_ends_with_the_context(server):
    events = server.ask(text='a' * 60, max_new_tokens=100, sides=[dict(model='text')])
    assert events[0]['most'] == 4
    assert events[-1]['end'].endswith('no more than 64 tokens fit') or '∎' in written(events)


def test_a_text_too_long_for_one_side_is_answered_by_the_other(server):
    sides = [dict(model='text'), dict(model='slow', ponder_steps=0)]
    events = server.ask(text='a' * 65, max_new_tokens=1, sides=sides)
    assert [list(event) for event in events if event['side'] == 0] == [['side', 'error']]
    assert [event for event in events if event['side'] == 1 and 'end' in event]


def test_an_error_in_model_py_is_one_line_on_the_page(monkeypatch, capsys):
    monkeypatch.setattr(Loop, 'forward', lambda *_: 1 / 0)
    served = Served('a', make(**SIZE, ponder='loop'), BYTE, None)
    running = serve.Server(0, {'a': served}, explain.look, 3)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    connection = http.client.HTTPConnection('127.0.0.1', running.server_port, timeout=60)
    connection.request('POST', '/ask', json.dumps(dict(text='b', sides=[dict(model='a')])))
    *_, last = connection.getresponse().read().splitlines()
    running.shutdown()
    running.server_close()
    said = json.loads(last)['error']
    assert said == 'ZeroDivisionError: division by zero (more in the terminal)'
    assert 'Traceback' in capsys.readouterr().err


# ---- what is refused -----------------------------------------------------------------------------

TEXT = [dict(model='text')]
REFUSED = [
    (b'{"text": ', 'JSON'),
    (b'\xff\xfe\x00', 'JSON'),
    (b'{"text": "\xe9", "sides": [{"model": "text"}]}', 'JSON'),
    (b'[' * 60_000, 'JSON'),
    (b'', 'JSON'),
    (b'null', 'one side or two'),
    (b'[]', 'one side or two'),
    (dict(text='a'), 'one side or two'),
    (dict(text='a', sides=[]), 'one side or two'),
    (dict(text='a', sides=TEXT * 3), 'one side or two'),
    (dict(text='a', sides=['text']), 'objects'),
    (dict(text='a', sides=[dict(model='/etc')]), 'no model'),
    (dict(text='a', sides=[dict(model='text', dtype='x')]), 'no setting'),
    (dict(text='a', top_q=1, sides=TEXT), 'no setting'),
    (dict(text=7, sides=TEXT), 'text should be text'),
    (dict(text=None, sides=TEXT), 'text should be text'),
    (dict(text='a', max_new_tokens=10_000, sides=TEXT), 'between 1 and 512'),
    (dict(text='a', max_new_tokens=0, sides=TEXT), 'between 1 and 512'),
    (dict(text='a', max_new_tokens='many', sides=TEXT), 'whole number'),
    (dict(text='a', temperature=float('nan'), sides=TEXT), 'a number'),
    (dict(text='a', temperature=-1, sides=TEXT), 'between 0 and 100'),
    (dict(text='a', seed=-1, sides=TEXT), 'seed=-1'),
    (dict(text='a', sides=[dict(model='text', ponder_steps=101)]), 'between 0 and 100'),
    (dict(text='a', sides=[dict(model='text', ponder_steps=1.5)]), 'whole number'),
    (dict(text='a', sides=[dict(model='text', ponder_steps=[1])]), 'whole number'),
    (dict(text='a', sides=[dict(model='text', halt_tau=0.5)]), 'no token of this model halts'),
    (dict(text='\ud800', sides=TEXT), 'a character that is none'),
    (dict(text='a' * 65, sides=TEXT), 'has 65 tokens'),
    (dict(text='a' * 64, sides=TEXT), 'shorten it'),
    (dict(text=' ', sides=[dict(model='sums')]), 'empty'),
]


@pytest.mark.parametrize('question, words', REFUSED)
def test_a_bad_question_is_one_line(server, question, words):
    body = question if isinstance(question, bytes) else json.dumps(question)
    response = server.request('POST', '/ask', body)
    text = response.read().decode()
    if response.status == 200:          # found out by the model
        *_, last = text.splitlines()
        line = json.loads(last)['error']
    else:
        assert response.status == 400
        [line] = text.splitlines()
    assert words in line and len(line) <= 300
    assert_answers(server)


def test_a_text_names_no_file(server):
    path = server.folder / 'data/addition/meta.json'
    page = pages(server.ask(text='FILE:/etc/passwd', max_new_tokens=1, sides=TEXT))[-1]
    assert path.exists() and bytes(page['tokens'][:16]) == b'FILE:/etc/passwd'


@pytest.mark.parametrize('size', [500_000, 65_537])
def test_a_long_question(server, size):
    response = server.request('POST', '/ask', json.dumps(dict(text='a' * size, sides=TEXT)))
    assert response.status == 413
    assert response.read().decode() == "a question has 65,536 bytes at most: shorten it\n"


HOST = b'Host: localhost\r\n'
RAW = [
    (b'GET / HTTP/1.0\r\n\r\n', 403),                                               # no Host
    (b'GET / HTTP/1.1\r\nHost: example.com\r\n\r\n', 403),
    (b'GET / HTTP/1.1\r\nHost: 127.0.0.1.example.com\r\n\r\n', 403),
    (b'POST /ask HTTP/1.1\r\nHost: example.com\r\nContent-Length: 2\r\n\r\n{}', 403),
    (b'POST /stop HTTP/1.1\r\n' + HOST + b'Origin: http://example.com\r\n\r\n', 403),
    (b'POST /stop HTTP/1.1\r\n' + HOST + b'Origin: null\r\n\r\n', 403),
    (b'GET /../../model.py HTTP/1.1\r\n' + HOST + b'\r\n', 404),
    (b'GET /%2e%2e/model.py HTTP/1.1\r\n' + HOST + b'\r\n', 404),
    (b'GET /model.py HTTP/1.1\r\n' + HOST + b'\r\n', 404),
    (b'GET //etc/passwd HTTP/1.1\r\n' + HOST + b'\r\n', 404),
    (b'GET http://[/ HTTP/1.1\r\n' + HOST + b'\r\n', 404),
    (b'GET /ask HTTP/1.1\r\n' + HOST + b'\r\n', 404),
    (b'POST / HTTP/1.1\r\n' + HOST + b'\r\n', 404),
    (b'PUT / HTTP/1.1\r\n' + HOST + b'\r\n', 501),
    (b'POST /ask HTTP/1.1\r\n' + HOST + b'\r\n', 411),
    (b'POST /ask HTTP/1.1\r\n' + HOST + b'Content-Length: -5\r\n\r\n', 411),
    (b'POST /ask HTTP/1.1\r\n' + HOST + b'Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n', 411),
    (b'GET /' + b'a' * 70_000 + b' HTTP/1.1\r\n' + HOST + b'\r\n', 414),
    (b'GET / HTTP/1.1\r\n' + HOST + b'a: b\r\n' * 200 + b'\r\n', 431),
    (b'\xff\x00\xfe / nothing\r\n\r\n', 0),
    (b'GET /\r\n\r\n', 0),
]


@pytest.mark.parametrize('raw, status', RAW)
def test_a_bad_request_is_one_line(server, raw, status):
    got, text = server.send(raw)
    assert got == status
    assert len(text.splitlines()) == 1 and '<' not in text
    assert_answers(server)


def test_it_listens_on_this_machine_alone(server):
    with socket.socket() as one:
        one.bind(('127.0.0.2', server.port))        # nobody has it on another address


def test_the_page_asks_nothing_of_anybody_else(server):
    response = server.request('GET', '/?text=anything')
    text = response.read().decode()
    assert "connect-src 'self'" in response.headers['Content-Security-Policy']
    assert not re.search(r'(src|href)="(?!data:)|@import|url\(', text)


# ---- one at a time, and stopping -----------------------------------------------------------------

SLOW = dict(text='a', max_new_tokens=500, sides=[dict(model='slow'), dict(model='text')])


def begin(server):
    """A slow answer, of which the first token is there."""
    response = server.start(**SLOW)
    response.readline()
    assert 'token' in json.loads(response.readline())
    return response


def test_stop(server):
    response = begin(server)
    assert server.request('POST', '/stop').status == 200
    events = [json.loads(line) for line in response]
    assert events[-1]['end'].endswith('stopped')
    assert {event['side'] for event in events} == {0}       # the other side does not begin
    assert 'page' in events[-2]
    assert_answers(server)


def test_a_second_tab_waits_or_is_told(server):
    response = begin(server)
    refused = server.start(text='b', sides=TEXT)
    assert refused.status == 409 and 'another answer' in refused.read().decode()
    answers = []
    later = threading.Thread(target=lambda: answers.append(server.ask(text='b', sides=TEXT)))
    later.start()
    server.request('POST', '/stop')
    response.read()
    later.join()
    assert 'end' in answers[0][-1]


def test_a_client_that_leaves_ends_its_answer(server):
    for _ in range(3):      # as a reload, again and again
        begin(server).close()
        assert_answers(server)


def test_many_at_once(server):
    """Each is answered, or told that another is."""
    statuses = []
    threads = [threading.Thread(target=lambda: statuses.append(
        server.start(text='a', max_new_tokens=3, sides=TEXT).status)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(statuses) == 20 and {200} <= set(statuses) <= {200, 409}


def test_ctrl_c_ends_it_in_one_line(tmp_path):
    slow = dict(SIZE, block_size=512)
    save(tmp_path / 'slow', make(**slow, ponder='loop', ponder_steps=40))
    with Running(tmp_path, 'slow') as running:
        response = running.start(text='a', sides=[dict(model='slow')])
        response.readline()
        running.process.send_signal(signal.SIGINT)
        out, _ = running.process.communicate(timeout=20)
        assert out.split() == ['ended']
        assert running.process.returncode == 130
        assert running.said() == ''


def test_a_taken_port_is_one_line(server):
    with pytest.raises(explain.UserError, match='nobody can listen there .* or --port=0'):
        explain.main([str(server.folder / 'text'), '--serve', f'--port={server.port}'])


# ---- in a browser --------------------------------------------------------------------------------

browser = shared_browser    # the fixture


def wait_for(browser, condition):
    """Waits until a JavaScript expression is true."""
    for _ in range(600):
        if browser.run(condition):
            return
        time.sleep(0.1)
    raise AssertionError(f"{condition}: {texts(browser, '.say')}")


def wait_for_end(browser):
    wait_for(browser, "document.querySelector('.stop-answer').disabled "
                      "&& document.querySelector('.ends').innerText !== ''")


def type_in(browser, selector, text):
    """Into a field, in the place of what is there."""
    browser.run(f"document.querySelector('{selector}').select()")
    browser.send('Input.insertText', text=text)


def enter(browser):
    for kind in ('keyDown', 'keyUp'):
        browser.send('Input.dispatchKeyEvent', type=kind, key='Enter', code='Enter', text='\r')


@needs_browser
def test_type_press_and_point(server, browser):
    browser.open(server.address)
    assert browser.run("document.activeElement.name") == 'text'
    type_in(browser, '[name=text]', 'def ')
    type_in(browser, '[name=max_new_tokens]', '6')
    type_in(browser, '[name=temperature]', '0')
    type_in(browser, '[name=ponder_steps]', '4')
    assert texts(browser, '.remark')[0] == '5 passes, more than the 3 it was trained with'
    browser.run("document.querySelector('[name=text]').focus()")
    enter(browser)
    wait_for_end(browser)
    assert re.match(r'text, ponder_steps=4: \d tokens, ', texts(browser, '.ends')[0])
    said = server.ask(text='def ', temperature=0, max_new_tokens=6,
                      sides=[dict(model='text', ponder_steps=4)])
    shown = browser.run("[...document.querySelectorAll('.text:not(.said) .token')].length")
    assert shown == len(pages(said)[-1]['tokens'])
    assert len(texts(browser, '.passes tbody tr')) == 5
    values = browser.run("[...document.querySelectorAll('.text:not(.said) .token')]"
                         ".map(token => token.dataset.value)")
    assert re.fullmatch(r'-?\d+\.\d\d', values[0])      # a number beside the tint

    browser.mouse('.text:not(.said) [data-t="3"]', click=True)
    assert texts(browser, '.card h2') == ['After ␣ token 3']
    assert len(texts(browser, '.card .step')) == 5
    address = browser.run('location.href')
    assert 'ponder_steps=4' in address and 'pin=3' in address

    browser.open(address)       # a bookmark
    wait_for_end(browser)
    assert texts(browser, '.card h2') == ['After ␣ token 3']
    assert browser.run("document.querySelector('[name=text]').value") == 'def '


@needs_browser
@pytest.mark.parametrize('width', [1400, 390])
def test_side_by_side(server, browser, width):
    address = '?text=12%2B34&model=sums&model2=sums&halt_tau2=1&temperature=0&max_new_tokens=5'
    browser.open(server.address, width, address)
    wait_for(browser, "document.querySelectorAll('.ends p').length === 2")
    titles = texts(browser, '.model h2')
    assert [title.split('  ')[0] for title in titles] == ['sums ponder=loop, halting=exit',
                                                         'sums, halt_tau=1 ponder=loop, '
                                                         'halting=exit']
    assert len(texts(browser, '.card')) == 2
    assert browser.run('document.documentElement.scrollWidth') <= width


@needs_browser
def test_stop_and_a_second_tab_and_a_bad_question(server, browser):
    browser.open(server.address, address='?text=a&model=slow&max_new_tokens=500')
    wait_for(browser, "/[1-9] of at most/.test(document.querySelector('.progress').innerText)")
    browser.mouse('.stop-answer', click=True)
    wait_for_end(browser)
    assert texts(browser, '.ends')[0].endswith('stopped')

    browser.mouse('[type=submit]', click=True)      # in the middle of it, another question
    wait_for(browser, "/[1-9] of at most/.test(document.querySelector('.progress').innerText)")
    type_in(browser, '[name=max_new_tokens]', '3')
    browser.mouse('[type=submit]', click=True)
    wait_for_end(browser)
    assert texts(browser, '.ends')[0].startswith('slow: 3 tokens')

    response = begin(server)    # another tab
    browser.mouse('[type=submit]', click=True)
    wait_for_end(browser)
    assert texts(browser, '.ends')[0].startswith('another answer is being drawn')
    response.close()

    type_in(browser, '[name=max_new_tokens]', '10000')
    browser.mouse('[type=submit]', click=True)
    wait_for_end(browser)
    assert texts(browser, '.ends') == ['max_new_tokens=10000 must be between 1 and 512']
