"""The live page of a data port in headless Chromium, while a real job trains. PAGE_SCREENSHOT=docs/img/live.png keeps a picture.

Run by `make test` (stage page).
"""

import base64
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """Chromium without any network but loopback, steered through its pipe."""

    def __init__(self, url, folder):
        to_browser, self.requests = os.pipe()
        self.replies, from_browser = os.pipe()
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1200,1150", "--remote-debugging-pipe"]
        command += [f"--user-data-dir={folder}", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "about:blank"]
        shell = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self.process = subprocess.Popen(["bash", "-c", shell, "bash", *command], pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self.number, self.rest, self.session = 0, b"", {}
        target = self.ask("Target.createTarget", url=url)["targetId"]
        self.session = {"sessionId": self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def ask(self, method, **parameters):
        self.number += 1
        request = {"id": self.number, "method": method, "params": parameters, **self.session}
        os.write(self.requests, json.dumps(request).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                data = os.read(self.replies, 1 << 20)
                assert data, "Chromium has ended"
                self.rest += data
            reply, _, self.rest = self.rest.partition(b"\0")
            reply = json.loads(reply)
            if reply.get("id") == self.number:
                assert "error" not in reply, reply
                return reply["result"]

    def evaluate(self, expression):
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.requests)
        os.close(self.replies)


@pytest.fixture(scope="module")
def browser(address, tmp_path_factory):
    assert CHROMIUM, "install chromium (scripts/system-packages page)"
    made = Browser(f"http://{address}/", tmp_path_factory.mktemp("chromium"))
    yield made
    made.close()


def test_the_page_shows_the_job(browser):
    deadline = time.monotonic() + 120
    # Rates appear with the second answer.
    while not re.search(r"^(?!0(\.0+)?$)[\d.]+( k)?\nrequests sent/s$", browser.evaluate("document.body.innerText") or "", re.M):
        assert time.monotonic() < deadline, browser.evaluate("document.body.innerText")
        time.sleep(0.1)
    text = browser.evaluate("document.body.innerText")
    assert re.search(r"^star_server · starwire \d+\.\d+\.\d+, wire version \d+ · process up \d.* · 127\.0\.0\.1:\d+$", text, re.M), text
    assert browser.evaluate("document.title") == "worker 0 – starwire"
    for words in ("received MB/s", "waiting for peers", "memory", "method calls", "/job:ps/replica:0/task:0", "/job:ps/replica:0/task:1"):
        assert words in text, text
    assert "no answer" not in text
    # A line to each parameter server, and two charts of two lines.
    count = "document.querySelectorAll('{}').length"
    assert [browser.evaluate(count.format(name)) for name in ("#topology line", "svg polyline")] == [2, 4]


def test_names_of_peers_are_text(browser):
    """Whatever a peer calls itself."""
    row = "peerTable([{name: '<img src=x onerror=alert(1)>', connections: 1, waiting: 1, in: 0, out: 0, slow: true, still: 9}]);"
    shown = browser.evaluate(row + "document.querySelector('#peers').innerText + document.querySelectorAll('#peers img').length")
    assert shown.startswith("<img src=x onerror=alert(1)>") and shown.endswith("0")
    assert "no progress for 9 s" in shown


def test_a_picture(browser, tmp_path):
    picture = Path(os.environ.get("PAGE_SCREENSHOT") or tmp_path / "live.png").resolve()
    if "PAGE_SCREENSHOT" in os.environ:
        time.sleep(90)  # fills the charts
    picture.write_bytes(base64.b64decode(browser.ask("Page.captureScreenshot", format="png")["data"]))
    assert picture.stat().st_size > 20_000
