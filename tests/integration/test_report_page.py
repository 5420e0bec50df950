"""The report in a browser: nothing is fetched, nothing is wrong on the console, and there is something to be seen."""

import re
import shutil
import subprocess
import sys

import pytest

from tests.integration.test_cli import SMALL, run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed here")
def test_a_browser_shows_the_report_without_a_request_or_an_error(tmp_path):
    pytest.importorskip("matplotlib")
    made = run(tmp_path, *SMALL)
    assert made.returncode == 1, made.stderr  # unsolved
    command = [sys.executable, "-m", "lightning_weightsync.cli", "report", tmp_path]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    page, shot, log = tmp_path / "report.html", tmp_path / "page.png", tmp_path / "net.json"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1200,3000"]
    options += ["--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"]
    options += ["--host-resolver-rules=MAP * ~NOTFOUND"]
    options += [f"--screenshot={shot}", f"--log-net-log={log}", f"--user-data-dir={tmp_path / 'profile'}"]
    shown = subprocess.run([CHROMIUM, *options, page.as_uri()], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert "CONSOLE" not in shown.stderr
    requests = re.findall(r'"url":"(\w+:[^"]+)"', log.read_text(encoding="utf-8"))
    of_the_browser = r"(file|data|chrome[\w-]*|blob):|https?://[\w.-]*\.(google|gvt1|googleapis|gstatic)\.com[:/]"
    of_the_page = [url for url in requests if not re.match(of_the_browser, url)]
    assert not of_the_page, of_the_page
    assert shot.stat().st_size > 50_000
