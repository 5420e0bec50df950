"""How soon is CartPole solved? ``examples/cartpole_ppo.py`` beside stable-baselines3's PPO with rl-zoo's settings.

    python -m benchmarks.cartpole --sb3-python sb3/bin/python [--seeds 5] [--json FILE] [-- options of the example]

Both are processes of their own, in turn, seed by seed. A run is over when the mean return of the last 100 finished
training episodes is at least 475, which is gymnasium's definition of solved (its ``reward_threshold``, over 100
consecutive episodes), and what both report anyway: the example looks after every 4,096 frames, stable-baselines3 after
every 256. The clock runs from the start of the process, imports included, to the line that says so. Both networks have
two layers of 64 for the policy and two for the value.

stable-baselines3 needs a Python of its own, so that this project's stays as it is:

    python -m venv sb3 && sb3/bin/python -m pip install -c constraints.txt torch stable-baselines3
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.options import add_json, at_least, positive, write
from benchmarks.table import machine, table, verdict

ROOT = Path(__file__).parents[1]
PEER = Path(__file__).with_name("cartpole_sb3.py")
OURS, THEIRS = "examples/cartpole_ppo.py", "stable-baselines3"


@dataclass(frozen=True)
class Run:
    """One seed of one of the two.

    Attributes:
        seconds: From the start of the process to the line that says how it ended.
        frames: Collected until then.
        episode_return: Mean of the last 100 episodes.
    """

    name: str
    seed: int
    solved: bool
    seconds: float
    frames: int
    episode_return: float


def run(name: str, command: Sequence[str], seed: int, limit: float) -> Run:
    """Run one process to its end.

    Args:
        name: Which of the two.
        command: Without the seed, its last argument.
        seed: The seed.
        limit: Seconds after which it is killed.

    Raises:
        RuntimeError: It did not say how it ended; carries the end of what it wrote.
    """
    started = time.perf_counter()
    process = subprocess.Popen(
        [*command, str(seed)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    killer = threading.Timer(limit, process.kill)
    killer.start()
    wrote: deque[str] = deque(maxlen=20)
    ended: tuple[float, str] | None = None
    for line in process.stdout:
        wrote.append(line)
        if re.match(r"(un)?solved frames=", line):
            ended = time.perf_counter() - started, line
    process.wait()
    killer.cancel()
    if ended is None:
        raise RuntimeError(f"{name}, seed {seed}, did not say whether it was solved:\n{''.join(wrote)}")
    seconds, line = ended
    figures = dict(re.findall(r"(\w+)=(\S+)", line))
    return Run(name, seed, line.startswith("solved"), seconds, int(figures["frames"]), float(figures["return"]))


def check_peer(python: str | None) -> None:
    """Exit with a message if this Python has no stable-baselines3."""
    problem = "--sb3-python is not given"
    if python is not None:
        try:
            done = subprocess.run([python, "-c", "import stable_baselines3"], capture_output=True, text=True)
            problem = done.stderr.strip().rpartition("\n")[2]
        except OSError as error:
            problem = str(error)
    if problem:
        sys.exit(
            f"there is no stable-baselines3 to compare with: {problem}. To set one up:\n"
            "    python -m venv sb3 && sb3/bin/python -m pip install -c constraints.txt torch stable-baselines3\n"
            "    python -m benchmarks.cartpole --sb3-python sb3/bin/python"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sb3-python", metavar="FILE", help="a Python that has stable-baselines3")
    parser.add_argument("--seeds", type=at_least(1), default=5, help="seeds 1 to this")
    parser.add_argument("--limit", type=positive, default=600.0, help="seconds after which a run is killed")
    add_json(parser, "all runs")
    parser.add_argument("options", nargs="*", help="of the example, after --")
    args = parser.parse_args()
    check_peer(args.sb3_python)
    commands = {
        OURS: [sys.executable, "-m", "examples.cartpole_ppo", *args.options, "--seed"],
        THEIRS: [args.sb3_python, str(PEER)],
    }
    runs: list[Run] = []
    for seed in range(1, args.seeds + 1):
        for name, command in commands.items():
            runs.append(run(name, command, seed, args.limit))
            print(runs[-1], file=sys.stderr, flush=True)
    report(runs)
    write(args.json, {"machine": machine(), "runs": [asdict(r) for r in runs]})


def report(runs: Sequence[Run]) -> None:
    """Print medians, and their ratio. A run that was not solved counts as if it had been when it ended."""
    medians, rows = {}, []
    for name in (OURS, THEIRS):
        mine = [r for r in runs if r.name == name]
        seconds = [r.seconds for r in mine]
        medians[name] = statistics.median(seconds)
        frames = statistics.median(r.frames for r in mine)
        solved = f"{sum(r.solved for r in mine)} of {len(mine)}"
        rows.append([name, medians[name], min(seconds), max(seconds), solved, frames])
    print(f"{machine()}\n")
    print(table(["to a mean return of 475", "seconds, median", "least", "most", "solved", "frames"], rows))
    print(f"\nsooner by a factor of {verdict(medians[THEIRS] / medians[OURS], 3.0, at_least=True)}")


if __name__ == "__main__":
    main()
