"""A headless Chromium for tests, driven by the DevTools protocol through two pipes."""

import base64
import json
import os
import select
import shutil
import subprocess

import pytest

NAMES = ('chromium', 'chromium-browser', 'google-chrome', 'google-chrome-stable')


def find_browser():
    """The path of a Chromium on this machine, or None."""
    paths = [shutil.which(name) for name in NAMES]
    return next((path for path in paths if path), None)


needs_browser = pytest.mark.skipif(find_browser() is None, reason='no Chromium on this machine')


@pytest.fixture(scope='module')
def shared_browser(tmp_path_factory):
    """One Browser for a module; no page's own scripts may fail."""
    with Browser(find_browser(), tmp_path_factory.mktemp('profile')) as browser:
        yield browser
        assert not browser.failures()


def texts(browser, selector):
    """The text of each element that a selector finds."""
    return browser.run(f"[...document.querySelectorAll('{selector}')].map(e => e.innerText)")


class Browser:
    """A browser with one page; use it in `with`, which ends it."""

    def __init__(self, path, folder):
        self.number = 0             # of the last message sent
        self.events = []            # messages that answer none
        to_browser, self.write_end = os.pipe()
        self.read_end, from_browser = os.pipe()
        options = f"--headless --no-sandbox --disable-gpu --user-data-dir={folder} " \
                  "--no-first-run --disable-background-networking --remote-debugging-pipe"
        command = f"exec {path} {options} 3<&{to_browser} 4>&{from_browser}"
        ends = (to_browser, from_browser)
        self.process = subprocess.Popen(['bash', '-c', command], pass_fds=ends,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self.received = b''         # what has come of the next messages
        self.session = None
        target = self.send('Target.createTarget', url='about:blank')['targetId']
        attached = self.send('Target.attachToTarget', targetId=target, flatten=True)
        self.session = attached['sessionId']
        self.send('Page.enable')
        self.send('Runtime.enable')

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.read_end)
        os.close(self.write_end)

    def send(self, method, **params):
        """A command of the protocol; returns its result."""
        self.number += 1
        message = dict(id=self.number, method=method, params=params)
        if self.session is not None:
            message['sessionId'] = self.session
        os.write(self.write_end, json.dumps(message).encode() + b'\0')
        while True:
            answer = self.receive()
            if answer.get('id') == self.number:
                assert 'error' not in answer, answer
                return answer['result']
            self.events.append(answer)

    def receive(self):
        """The next message: an answer or an event."""
        parts = [self.received]
        while b'\0' not in parts[-1]:
            ready, _, _ = select.select([self.read_end], [], [], 60)
            assert ready, "the browser says nothing for a minute"
            part = os.read(self.read_end, 2 ** 20)
            assert part, "the browser has ended"
            parts.append(part)
        message, _, self.received = b''.join(parts).partition(b'\0')
        return json.loads(message)

    def open(self, path, width=1400, address=''):
        """Show a file, or what is at an address, and wait until it is there."""
        path = str(path)
        url = path if path.startswith('http:') else f"file://{os.path.abspath(path)}"
        self.send('Emulation.setDeviceMetricsOverride', width=width, height=900,
                  deviceScaleFactor=1, mobile=False)
        self.events.clear()
        self.send('Page.navigate', url='about:blank')
        self.wait_for('Page.loadEventFired')
        self.send('Page.navigate', url=url + address)
        self.wait_for('Page.loadEventFired')

    def wait_for(self, method):
        """Waits for an event."""
        while not any(event.get('method') == method for event in self.events):
            self.events.append(self.receive())
        self.events = [event for event in self.events if event.get('method') != method]

    def run(self, script):
        """The value of a JavaScript expression."""
        answer = self.send('Runtime.evaluate', expression=script, returnByValue=True)
        assert 'exceptionDetails' not in answer, answer
        return answer['result'].get('value')

    def failures(self):
        """What the page's own scripts threw."""
        return [event for event in self.events if event.get('method') == 'Runtime.exceptionThrown']

    def mouse(self, selector, click=False):
        """Point at the middle of an element, and click."""
        x, y = self.run(f"""(() => {{
            const element = document.querySelector({json.dumps(selector)});
            element.scrollIntoView({{block: 'center'}});
            const box = element.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }})()""")
        kinds = ['mouseMoved', 'mousePressed', 'mouseReleased'] if click else ['mouseMoved']
        for kind in kinds:
            self.send('Input.dispatchMouseEvent', type=kind, x=x, y=y, button='left', clickCount=1)

    def press(self, *keys):
        """Keys, by their names, one after the other."""
        for key in keys:
            self.send('Input.dispatchKeyEvent', type='keyDown', key=key)
            self.send('Input.dispatchKeyEvent', type='keyUp', key=key)

    def picture(self):
        """The whole page as a PNG."""
        answer = self.send('Page.captureScreenshot', format='png', captureBeyondViewport=True)
        return base64.b64decode(answer['data'])
