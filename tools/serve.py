"""
The page of tools/explain.py --serve: what is asked there is answered by checkpoints, on this
machine alone.

    GET  /      the page: engine/page.html, with serve.html in front of it
    POST /ask   a Question as JSON, answered by lines of JSON as they come; see `answer`
    POST /stop  ends the answer that is being drawn

A page elsewhere, in the same browser, cannot ask: it has another origin, or another Host. One
question is answered at a time.
"""

import ast
import codecs
import json
import math
import os
import re
import sys
import threading
import time
import traceback
import webbrowser
from dataclasses import dataclass, fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Optional, get_args

import torch

from configurator import build, check_range, value_of
from engine.answers import what_counts
from engine.files import UserError, one_line
from engine.generate import stream
from engine.mechanisms import halts, slots_per_token
from engine.page import END, MOST_TOKENS, as_script, fill_template, model_data, page_data
from engine.tasks import TASKS
from sample import as_question, behind_examples, check_length, override, tokens_of

FRAGMENT = os.path.join(os.path.dirname(os.path.realpath(__file__)), 'serve.html')
MOST_BYTES = 2 ** 16        # of a question
MOST_STEPS = 100            # of pondering
MOST_LETTERS = 300          # of a line that says what is wrong


# ---- what is asked -------------------------------------------------------------------------------

@dataclass
class Side:
    """One of the answers to a question: who gives it, and how."""
    model: str = ''
    ponder_steps: Optional[int] = None      # None: as trained
    halt_tau: Optional[float] = None

    def __post_init__(self):
        check_range(self, 0, MOST_STEPS, 'ponder_steps')
        check_range(self, 0, 1, 'halt_tau')


@dataclass
class Question:
    """What is asked, of one model or two."""
    text: str = ''
    temperature: float = 0.0
    seed: int = 1337
    max_new_tokens: int = 200
    sides: Any = ()                         # [Side, ..]

    def __post_init__(self):
        check_range(self, 0, 100, 'temperature')
        check_range(self, 0, 2 ** 63 - 1, 'seed')
        check_range(self, 1, MOST_TOKENS, 'max_new_tokens')


def read_question(body, names):
    """
    The Question in the bytes of a request; UserError for anything else, or for a model that is none
    of `names`.
    """
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        raise UserError("a question is JSON in UTF-8") from None
    sides = given.pop('sides', None) if isinstance(given, dict) else None
    if not isinstance(sides, list) or not 1 <= len(sides) <= 2:
        raise UserError("a question has one side or two")
    question = block_of(Question, given)
    question.sides = [block_of(Side, side) for side in sides]
    for side in question.sides:
        if side.model not in names:
            raise UserError(f"there is no model {side.model[:100]!r} here")
    return question


def block_of(block, given):
    """A dataclass from what JSON says, checked as settings are."""
    if not isinstance(given, dict):
        raise UserError("a question and its sides are objects")
    kinds = {field.name: get_args(field.type) or (field.type,) for field in fields(block)}
    values = {name: value_of(name, ast.Constant(value), 'the question', kinds)
              for name, value in given.items()}
    return build(block, values)


# ---- an answer -----------------------------------------------------------------------------------

class Served:
    """A checkpoint that answers, and what it was trained with."""

    def __init__(self, name, model, tokenizer, exam):
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self.exam = exam            # of a made task
        self.ponders = slots_per_token(model) > 1   # before a question has set other steps
        self.ponder_steps = model.config.ponder_steps
        self.halt_tau = model.config.halt_tau

    def about(self):
        """What the page has to know for its controls."""
        example = 'def f(x):' if self.exam is None else self.exam['problems'][-1][0]
        return dict(
            name=self.name,
            example=example,
            task=None if self.exam is None else self.exam['task'],
            ponder_steps=self.ponder_steps if self.ponders else None,
            halt_tau=self.halt_tau if halts(self.model) else None,
        )

    def set_as(self, side):
        """The model as trained, but for what this side wants otherwise; what it is called then."""
        self.model.config.ponder_steps = self.ponder_steps
        self.model.config.halt_tau = self.halt_tau
        override(self.model, side)
        changed = [f"{name}={getattr(side, name):g}" for name in ('ponder_steps', 'halt_tau')
                   if getattr(side, name) not in (None, getattr(self, name))]
        return ', '.join([self.name, *changed])

    def prompt(self, text):
        """(tokens to read, the first that is part of the question)."""
        block_size = self.model.config.block_size
        try:
            tokens = tokens_of(text.encode(), self.tokenizer)
        except UnicodeEncodeError:      # half of a pair, which JSON can hold
            raise UserError("the text has a character that is none") from None
        check_length(tokens, block_size, 'the text')
        if self.exam is None:
            return tokens or [self.tokenizer.eot_token], 0
        if not text.strip():
            raise UserError(f"the question is empty: ask a problem of {self.exam['task']}")
        question = as_question(tokens, self.exam)
        tokens = behind_examples(question, self.exam, block_size)
        return tokens, len(tokens) - len(question)

    def verdict(self, tokens):
        """Whether a made task's problem, with its answer, is right."""
        task = TASKS[self.exam['task']]
        question, mark, answer = bytes(tokens).decode('utf-8', 'replace').partition(task.end)
        truth = task.answer(question + mark)
        return f"{answer} is right" if answer == truth else f"{answer} is wrong: it is {truth}"


def answer(served, question, side, look, top, stopped):
    """
    Yields what one model answers, as it comes. A token that is drawn: {token, passes, count, most}.
    At times, and at the end: {page}, which is what `look` of explain.py sees in all tokens so far
    (engine/page.py says what is in it). In the end {end}, some words.
    """
    model, tokenizer = served.model, served.tokenizer
    name = served.set_as(side)
    tokens, first = served.prompt(question.text)
    most_read = min(model.config.block_size, MOST_TOKENS)
    most = min(question.max_new_tokens, most_read - len(tokens))
    if most < 1:
        raise UserError(f"the text has {len(tokens)} tokens, and with an answer at most "
                        f"{most_read} can be shown: shorten it")

    def page():
        idx = torch.tensor(tokens, device=model.wte.weight.device)
        counts = what_counts(tokens, served.exam, first)
        seen = model_data(look(model, idx), model.config, name, idx, top)
        return dict(page=page_data([seen], tokens, counts, tokenizer))

    utf8 = codecs.getincrementaldecoder('utf-8')('replace')     # a character may be several tokens
    count, total = 0, 0
    shown, took = -math.inf, 0.0        # when `page` was last asked, and how long that took
    yield dict(name=name, reads=len(tokens), most=most)
    for token, passes in stream(model, [tokens], most, question.temperature, seed=question.seed,
                                stop_token=tokenizer.eot_token):
        token, passes = token.item(), passes.item()
        tokens.append(token)
        count += 1
        total += passes
        ended = token == tokenizer.eot_token
        text = END if ended else utf8.decode(tokenizer.decode_single_token_bytes(token))
        yield dict(token=text, passes=passes, count=count, most=most)
        if stopped():
            break
        now = time.monotonic()
        if now - shown > max(0.1, 4 * took):    # so that looking takes a fifth of the time
            yield page()
            shown = time.monotonic()
            took = shown - now
    yield page()

    words = [f"{count} tokens", f"{total / count:.2f} passes each"]
    if ended and served.exam is not None:
        words.insert(0, served.verdict(tokens[first:-1]))
    elif not ended and count < most:
        words.append("stopped")
    elif not ended and most < question.max_new_tokens:
        words.append(f"no more than {most_read} tokens fit")
    yield dict(end=', '.join(words))


# ---- the server ----------------------------------------------------------------------------------

class Refused(Exception):
    """A request that is answered by a status and one line."""

    def __init__(self, status, line):
        super().__init__(line)
        self.status = status


class Server(ThreadingHTTPServer):
    """Listens on the loopback address alone."""
    daemon_threads = True
    request_queue_size = 64     # requests that wait until they are looked at

    def __init__(self, port, models, look, top):
        super().__init__(('127.0.0.1', port), Handler)
        self.models = models        # {name: Served}
        self.look = look
        self.top = top
        self.asking = threading.Lock()      # whoever has it draws an answer
        self.stop = threading.Event()

    def handle_error(self, request, client_address):
        """A client that leaves is no error."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Answers one request; after it the connection ends, as of old, and with it an answer."""
    timeout = 20                        # seconds that a client may say or read nothing
    disable_nagle_algorithm = True      # each line is sent as it comes

    def do_GET(self):
        self.handle_by({'/': self.show_page})

    def do_POST(self):
        self.handle_by({'/ask': self.ask, '/stop': self.stop_answer})

    def handle_by(self, methods):
        try:
            self.check_sender()
            path, _, _ = self.path.partition('?')
            if path not in methods:
                raise Refused(404, "there is nothing here; the page is at /")
            methods[path]()
        except Refused as refused:
            self.send_line(refused.status, str(refused))
        except UserError as error:
            self.send_line(400, one_line(error)[:MOST_LETTERS])

    def check_sender(self):
        """Refuses what a page elsewhere makes a browser send."""
        host = self.headers.get('Host', '')
        if not re.fullmatch(r'(127\.0\.0\.1|localhost)(:[0-9]+)?', host):
            raise Refused(403, "this page is at 127.0.0.1 and at localhost alone")
        if self.headers.get('Origin', f'http://{host}') != f'http://{host}':
            raise Refused(403, "a page from elsewhere may not ask")

    def body(self):
        """The bytes of a question."""
        length = self.headers.get('Content-Length', '')
        if not re.fullmatch('[0-9]{1,12}', length):
            raise Refused(411, "how long is it? Content-Length is missing")
        if int(length) > MOST_BYTES:
            self.rfile.read(min(int(length), 2 ** 20))      # or it would not read the answer
            raise Refused(413, f"a question has {MOST_BYTES:,} bytes at most: shorten it")
        return self.rfile.read(int(length))

    # ---- what it says

    def send_head(self, status, kind):
        self.send_response(status)
        self.send_header('Content-Type', f'{kind}; charset=utf-8')
        self.send_header('Cache-Control', 'no-store')
        self.send_header('X-Content-Type-Options', 'nosniff')
        self.send_header('Content-Security-Policy', "default-src 'none'; img-src data:; "
                         "style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
                         "connect-src 'self'; base-uri 'none'; form-action 'none'; "
                         "frame-ancestors 'none'")
        self.end_headers()

    def send_line(self, status, line):
        self.send_head(status, 'text/plain')
        self.wfile.write(f'{line}\n'.encode())

    def send_error(self, code, message=None, explain=None):
        """What the library refuses by itself, such as a method that is not there."""
        self.send_line(code, one_line(message or 'refused')[:MOST_LETTERS])

    def log_message(self, *_):
        pass

    # ---- what it does

    def show_page(self):
        with open(FRAGMENT, encoding='utf-8') as f:
            fragment = f.read()
        models = self.server.models
        about = [served.about() for served in models.values()]
        live = fragment.replace('{{MODELS}}', as_script(about))
        page = fill_template(None, list(models), live).encode()
        self.send_head(200, 'text/html')
        self.wfile.write(page)

    def stop_answer(self):
        self.server.stop.set()
        self.send_line(200, "stopped")

    def ask(self):
        """Answers a question, by one side after the other, until it is stopped or nobody reads."""
        server = self.server
        question = read_question(self.body(), server.models)
        if not server.asking.acquire(timeout=3):
            raise Refused(409, "another answer is being drawn, perhaps in another tab: stop it, or "
                               "ask again when it is there")
        try:
            server.stop.clear()
            self.send_head(200, 'application/x-ndjson')
            self.answer_all(question)
        finally:
            server.asking.release()

    def answer_all(self, question):
        server, stopped = self.server, self.server.stop.is_set
        for i, side in enumerate(question.sides):
            if stopped():
                break
            served = server.models[side.model]
            try:
                for event in answer(served, question, side, server.look, server.top, stopped):
                    self.send_event(side=i, **event)
            except UserError as error:
                self.send_event(side=i, error=one_line(error)[:MOST_LETTERS])
            except OSError:     # nobody reads any more
                raise
            except Exception as error:      # in model.py, which readers edit
                traceback.print_exc()
                line = one_line(f"{type(error).__name__}: {error}")[:MOST_LETTERS]
                self.send_event(side=i, error=f"{line} (more in the terminal)")

    def send_event(self, **event):
        self.wfile.write(json.dumps(event, separators=(',', ':')).encode() + b'\n')


# ---- begin ---------------------------------------------------------------------------------------

def serve(models, look, top, port):
    """Answers what is asked of these models, [Served, ..], until Ctrl-C; the exit status."""
    try:
        server = Server(port, {served.name: served for served in models}, look, top)
    except OSError as error:
        raise UserError(f"--port={port}: nobody can listen there ({error.strerror}): give another, "
                        "or --port=0 for any that is free") from None
    address = f'http://127.0.0.1:{server.server_port}/'
    print(f"{address}   Ctrl-C ends it", flush=True)
    if sys.platform in ('win32', 'darwin') or os.environ.keys() & {'DISPLAY', 'WAYLAND_DISPLAY'}:
        webbrowser.open(address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("\nended")
    server.stop.set()
    server.asking.acquire(timeout=5)    # no model computes while Python ends
    return 130
