"""The live page of a data port in headless Chromium, while a real job trains. PAGE_SCREENSHOT=docs/img/live.png keeps a picture.

Run by `make test` (stage page).
"""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python"))

from starwire_run import ports  # noqa: E402

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
def address(tmp_path_factory):
    """The data port of a worker that trains with two parameter servers."""
    folder = tmp_path_factory.mktemp("job")
    port, *others = ports.free(4)
    environment = {**os.environ, "STARWIRE_BIND": f"127.0.0.1:{port}", "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(ROOT / "python")}
    script = str(Path(__file__).with_name("job.py"))
    hosts = [f"localhost:{other}" for other in others]
    tasks = []
    for task in ("worker:0", "ps:0", "ps:1"):
        own = environment if task == "worker:0" else {key: value for key, value in environment.items() if key != "STARWIRE_BIND"}
        log = (folder / task.replace(":", "-")).open("w")
        tasks.append(subprocess.Popen([sys.executable, script, task, *hosts], env=own, cwd=folder, stdout=log, stderr=log))
    try:
        deadline = time.monotonic() + 240
        while True:
            assert all(task.poll() is None for task in tasks), [path.read_text() for path in folder.iterdir()]
            assert time.monotonic() < deadline, [path.read_text() for path in folder.iterdir()]
            try:
                text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
            except OSError:
                text = ""
            if len(re.findall(r'^starwire_peer_bytes_sent_total\{.*peer="/job:ps/.* \d{5,}$', text, re.M)) == 2:
                break
            time.sleep(1)
        yield f"127.0.0.1:{port}"
    finally:
        for task in tasks:
            task.kill()
            task.wait()


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
        time.sleep(1)
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
    time.sleep(90 if "PAGE_SCREENSHOT" in os.environ else 3)
    picture.write_bytes(base64.b64decode(browser.ask("Page.captureScreenshot", format="png")["data"]))
    assert picture.stat().st_size > 20_000
