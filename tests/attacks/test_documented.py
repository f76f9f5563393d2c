"""SECURITY.md lists exactly the attacks tested here."""

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent


def test_every_attack_is_documented():
    text = (HERE.parents[1] / "SECURITY.md").read_text()
    section = text[text.index("## Attacks that are tested") :].split("\n## ")[0]
    documented = set(re.findall(r"`(test_\w+)`", section))
    files = [path for path in HERE.glob("test_*.py") if path != Path(__file__)]
    made = {name for path in files for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)}
    assert documented == made
