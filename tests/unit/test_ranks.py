"""When a rank is told that it is alone."""

import os
import pickle
import subprocess
import sys
import threading
import time

import pytest

from lightning_weightsync import ranks
from lightning_weightsync.errors import WeightSyncError
from lightning_weightsync.ranks import RankWatch


def test_one_rank_is_not_watched_and_a_watch_can_be_pickled():
    before = threading.active_count()
    watch = RankWatch.start(local_rank=0, world_size=1)
    assert threading.active_count() == before
    watch.look()
    assert isinstance(pickle.loads(pickle.dumps(watch)), RankWatch)


def test_a_rank_whose_parent_is_gone_is_told_so():
    watch = RankWatch()
    watch._parent = os.getppid()
    watch.look()
    watch._parent = 2**22 + 1  # no such process
    with pytest.raises(WeightSyncError, match="the process that started this rank .* has ended"):
        watch.look()


def test_a_rank_that_is_stuck_in_lightnings_handler_of_sigterm_is_ended(monkeypatch, caplog):
    codes = []
    monkeypatch.setattr(ranks, "GRACE_IN_SIGTERM_HANDLER", 0.1)
    monkeypatch.setattr(ranks, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(os, "_exit", codes.append)
    watch = RankWatch.start(local_rank=0, world_size=2)
    time.sleep(0.3)
    assert codes == []
    try:
        _sigterm_notifier_fn(lambda: codes)
    finally:
        watch.stop()
    assert codes[0] == 143
    assert "SIGTERM came in the middle of a collective operation" in caplog.text


def _sigterm_notifier_fn(condition):
    """As Lightning's handler is called."""
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def test_lightnings_handler_is_called_what_is_looked_for():
    from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

    assert _SignalConnector._sigterm_notifier_fn.__code__.co_name == "_sigterm_notifier_fn"


@pytest.mark.slow
def test_only_a_parent_that_runs_the_same_script_is_watched(tmp_path):
    script, launcher = tmp_path / "train.py", tmp_path / "launch.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "from lightning_weightsync.ranks import _parent_runs_this_script\n"
        "print(_parent_runs_this_script(), flush=True)\n"
        "if 'first' in sys.argv: subprocess.run([sys.executable, os.path.abspath(sys.argv[0])])\n"
    )
    launcher.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, {str(script)!r}, 'first'])\n")
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, launcher], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "True"], done.stderr
