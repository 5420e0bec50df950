"""The CartPole example, run as its users run it: however it ends, it ends soon and leaves nothing."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.helpers.processes import MARKER, hear_ctrl_c, processes_with, wait_until

ROOT = Path(__file__).parents[2]
RAISES = """
import sys
import examples.cartpole_ppo as example

def training_step(self, batch, batch_idx):
    raise ArithmeticError("the user's own error")

example.PPO.training_step = training_step
sys.exit(example.main())
"""
ENDINGS = {
    # name: (arguments of python, signal once it trains, whether the exit code is 0)
    "normal": (["-m", "examples.cartpole_ppo", "--max-epochs", "1"], None, False),  # not solved in one epoch
    "exception": (["-c", RAISES], None, False),
    "SIGINT": (["-m", "examples.cartpole_ppo", "--num-workers", "2"], signal.SIGINT, False),
    "SIGTERM": (["-m", "examples.cartpole_ppo", "--num-workers", "2"], signal.SIGTERM, True),  # Lightning's choice
}


@pytest.mark.parametrize(
    "ending", ["normal", "SIGINT", *(pytest.param(e, marks=pytest.mark.slow) for e in ("exception", "SIGTERM"))]
)
def test_the_example_ends_within_ten_seconds_and_leaves_no_process(ending, tmp_path):
    arguments, number, succeeds = ENDINGS[ending]
    marker = f"example-{ending}-{os.getpid()}"
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env={**os.environ, MARKER: marker, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,  # where Lightning draws its progress bar
        stderr=subprocess.STDOUT,
        preexec_fn=hear_ctrl_c,
    )
    printed = bytearray()
    reader = threading.Thread(
        target=lambda: [printed.extend(line) for line in iter(lambda: process.stdout.read1(), b"")]
    )
    reader.start()
    try:
        if number is not None:
            # The progress bar shows what it has learned from.
            assert wait_until(lambda: b"weight_sync/version" in printed, 60), printed.decode()
            assert len(processes_with(marker)) == 3
            process.send_signal(number)
            started = time.monotonic()
            code = process.wait(10)
            assert time.monotonic() - started < 10
        else:
            code = process.wait(60)
        assert (code == 0) is succeeds, printed.decode()
        assert wait_until(lambda: not processes_with(marker), 5), processes_with(marker)
        if ending == "exception":
            assert b"ArithmeticError: the user's own error" in printed
    finally:
        process.kill()
        process.wait()
        reader.join(5)
        process.stdout.close()
