"""Nothing grows: the short form of ``python -m benchmarks.soak``."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.holdings import Holdings
from benchmarks.soak import MEMORY_LIMIT, MODES, growth, has_grown
from tests.helpers.processes import nothing_left


def looks_of(last, *, at=30):
    """Forty looks at one process, which holds this much from the ``at``-th on."""
    held = [last if k >= at else (100.0, 4, 9, 3) for k in range(40)]
    return [{"trainer": Holdings(resident, resident / 2, *counts)} for resident, *counts in held]


@pytest.mark.parametrize(
    ("last", "grown"),
    [
        ((100.0 + MEMORY_LIMIT - 1, 16, 9, 3), False),
        ((100.0 + MEMORY_LIMIT + 1, 4, 9, 3), True),
        ((100.0, 17, 9, 3), True),
        ((100.0, 4, 10, 3), True),
        ((100.0, 4, 9, 4), True),
    ],
)
def test_what_counts_as_growth(last, grown):
    ((before, after),) = growth(looks_of(last)).values()
    assert has_grown(before, after, workers=2) is grown
    ((before, after),) = growth(looks_of(last, at=8)).values()
    assert has_grown(before, after, workers=2) is (last[1] > 16), "it has warmed up"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_grows_over_many_batches(tmp_path, capfd):
    report = tmp_path / "soak.json"
    command = [sys.executable, "-m", "benchmarks.soak", "--batches", "800", "--json", str(report)]
    with nothing_left(capfd):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(command, env=environment, timeout=115, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(report.read_text())
    assert seen["grown"] == [] and seen["modes"].keys() == MODES.keys()
    for run in seen["modes"].values():
        assert run["versions"] == 800 and run["restarts"] == 0
        assert run["calls"] >= 800 * 4, "each batch takes four policy calls of a worker"
