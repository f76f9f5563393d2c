"""Prometheus scrapes a task of a job, and every query of the dashboard finds something."""

import json
import os
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from own_ports import free_port

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = os.environ.get("PROMETHEUS") or shutil.which("prometheus")
VARIABLES = {"$__rate_interval": "10s", "$task": ".*", "$protocol": ".*"}


@pytest.mark.skipif(not PROMETHEUS, reason="prometheus is not on PATH (or in $PROMETHEUS)")
def test_every_panel_has_data(address, tmp_path):
    (tmp_path / "prometheus.yaml").write_text(json.dumps({"scrape_configs": [{"job_name": "starwire", "scrape_interval": "1s", "static_configs": [{"targets": [address]}]}]}))
    port = free_port()
    flags = [f"--config.file={tmp_path}/prometheus.yaml", f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{port}"]
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen([PROMETHEUS, *flags], stdout=log, stderr=log)

    def query(expression):
        url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]["result"]

    try:
        deadline, scraped = time.monotonic() + 60, []
        # Rates need two samples.
        while not scraped or float(scraped[0]["value"][1]) < 5:
            assert time.monotonic() < deadline and server.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.2)
            try:
                scraped = query('count_over_time(up{job="starwire"}[1m])')
            except OSError:
                continue
        assert query("up")[0]["value"][1] == "1"
        dashboard = json.loads((ROOT / "deploy/monitoring/grafana-dashboard.json").read_text())
        asked = [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel.get("targets", [])]
        assert len(asked) > 10
        empty = []
        for title, expression in asked:
            for variable, value in VARIABLES.items():
                expression = re.sub(re.escape(variable) + r"\b", value, expression)
            if not query(expression):
                empty.append((title, expression))
        assert not empty, empty
    finally:
        server.kill()
        server.wait()
