"""What the documentation shows is run as it stands: each page's Python blocks, in order, as one script.

What a page leaves out for brevity is in an HTML comment of its own: ``<!-- python``, code, ``-->``.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
OF_OTHER_PROCESSES = {"docs/how-to/receivers.md"}  # which import the script
TUTORIAL = "docs/tutorial.md"  # its blocks are files
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
    return bool(script(page).strip()) and page not in OF_OTHER_PROCESSES | {TUTORIAL}


@pytest.mark.parametrize("page", list(filter(runs, PAGES)))
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


def test_the_site_is_built_without_warnings(tmp_path):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'lightning_weightsync[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, timeout=100, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    reference = (tmp_path / "site" / "reference.html").read_text(encoding="utf-8")
    assert "update_weights_interval" in reference and "num_workers" in reference


COMMANDS = """
import sys
from lightning_weightsync.cli import main

for line in {lines}:
    sys.argv = ["lightning-weightsync", *line.split()]
    try:
        main()
    except SystemExit as done:
        if done.code:
            raise
"""


def test_the_tutorial_works_from_its_files_to_the_report(tmp_path):
    text = (ROOT / TUTORIAL).read_text(encoding="utf-8")
    for name, body in re.findall(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        (tmp_path / name).write_text(body, encoding="utf-8")
    little = "collector.num_workers=1 collector.batches_per_epoch=3 trainer.max_epochs=1 hydra.run.dir=run"
    lines = ["check cartpole.yaml", f"cartpole.yaml {little}", "report run"]
    assert all(f"lightning-weightsync {line.split(' c')[0].replace('run', 'outputs')}" in text for line in lines)
    command = [sys.executable, "-c", COMMANDS.format(lines=lines)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, timeout=100, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Actor: 4 leaves" in done.stdout and "finished frames=" in done.stdout
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


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


def test_every_command_line_that_names_a_file_of_ours_can_be_composed_and_the_demos_is_right():
    lines = set()
    for document in ("README.md", "docs/cli.md", "examples/cartpole_ppo.py", "examples/pendulum_sac.py", "Makefile"):
        text = (ROOT / document).read_text(encoding="utf-8").replace("\\\n", " ")
        lines |= set(re.findall(r"lightning-weightsync ((?:--multirun )?configs/\w+\.yaml[^`\n]*)", text))
    assert len(lines) >= 8
    arguments = [[word for word in shlex.split(line) if word not in ("--multirun", "--cfg", "job")] for line in lines]
    arguments = [[re.sub(r"=1,4,16$", "=4", word) for word in words] for words in arguments]
    given = [{"arguments": [*words, "--cfg", "job"]} for words in arguments]
    given.append({"arguments": ["check", "configs/cartpole_ppo.yaml"]})
    command = [sys.executable, "-m", "tests.helpers.command"]
    done = subprocess.run(command, cwd=ROOT, input=json.dumps(given), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    *composed, checked = json.loads(done.stdout)
    assert checked["output"].endswith("ok\n"), checked
    for line, result in zip(lines, composed, strict=True):
        wrong = "callbacks.update_weights.interval_unit=batch " in line  # composes; what it says is another test's
        assert result["code"] == 0 or wrong, (line, result["output"])
