"""Pushes while workers are killed, stopped and slowed down: the short form of ``python -m benchmarks.chaos``."""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.processes import nothing_left

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

FAULTS = {"killed", "stopped", "paused", "slow", "stuck"}
SHORT = ["--pushes", "60", "--every", "10", "--timeout", "1.5", "--heartbeat", "1"]
FULL = ["--pushes", "1000"]


@pytest.mark.parametrize("transport", [pytest.param("shared_memory", marks=pytest.mark.slow), "network"])
@pytest.mark.parametrize("options", [SHORT, pytest.param(FULL, marks=pytest.mark.slow)], ids=["60", "1000"])
def test_the_living_are_served_the_dead_are_named_and_the_returning_get_the_newest(options, transport, tmp_path, capfd):
    report = tmp_path / "chaos.json"
    command = [sys.executable, "-m", "benchmarks.chaos", "--transports", transport, "--json", str(report), *options]
    with nothing_left(capfd):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(command, env=environment, timeout=115, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (outcome,) = json.loads(report.read_text())["outcomes"]
    assert outcome["wrong"] == []
    assert outcome["pushes"] >= int(options[1])
    assert set(outcome["faults"]) == FAULTS
    assert outcome["replaced"] == outcome["faults"]["killed"] + outcome["faults"]["stopped"]
