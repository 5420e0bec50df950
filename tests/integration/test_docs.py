"""What the documentation shows is run as it stands: each page's Python blocks, in order, as one script.

What a page leaves out for brevity is in an HTML comment of its own: ``<!-- python``, code, ``-->``.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
OF_OTHER_PROCESSES = {"docs/how-to/receivers.md"}  # which import the script
CODE = re.compile(r"^(?:```python|<!-- python)\n(.*?)^(?:```|-->)$", re.DOTALL | re.MULTILINE)


def script(page):
    """The page's code, on the page's lines."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = []
    for block in CODE.finditer(text):
        start = text.count("\n", 0, block.start(1))
        lines += [""] * (start - len(lines)) + block[1].splitlines()
    return "\n".join(lines)


def runs(page):
    return bool(script(page).strip())


@pytest.mark.parametrize("page", [page for page in PAGES if runs(page) and page not in OF_OTHER_PROCESSES])
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(script(page), page, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", sorted(OF_OTHER_PROCESSES))
def test_the_code_of_a_page_that_starts_processes_runs(page, tmp_path):
    file = tmp_path / "page.py"
    file.write_text(script(page), encoding="utf-8")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, file], cwd=tmp_path, env=env, timeout=100, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def snippet(document, heading):
    """The first Python block under a heading."""
    text = (ROOT / "docs" / document).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    return re.search(r"```python\n(.+?)```", text, re.DOTALL)[1]


def test_a_collector_of_ones_own_in_thirty_lines():
    code = snippet("collectors.md", "Your own collector")
    assert code.partition("\nif __name__")[0].count("\n") < 30
    names = {"__name__": "__main__"}
    exec(compile(code, "docs/collectors.md", "exec"), names)
    batch, group = names["batch"], names["group"]
    assert batch.batch_size == (128,) and group.version == 3 and not group.running
    assert batch["policy_version"].eq(2).all()
    assert batch["worker_idx"].tolist() == [0] * 64 + [1] * 64
    assert not torch.equal(batch["observation"][:64], batch["observation"][64:])
    torch.testing.assert_close(batch["action"], names["net"](batch["observation"]).detach(), rtol=0, atol=1e-6)
