"""The command: a run composed from YAML, overridden on the command line, and what it leaves behind."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = [
    sys.executable,
    "-c",
    "from lightning_weightsync.cli import main; main()",
    "--config-dir",
    str(ROOT / "configs"),
    "--config-name",
    "cartpole_ppo",
]
SMALL = [
    "collector.num_workers=0",
    "collector.batches_per_epoch=3",
    "collector.collector.num_envs=2",
    "collector.collector.frames_per_batch=64",
    "module.minibatch_size=16",
    "module.epochs=2",
    "trainer.max_epochs=2",
]


def run(folder, *overrides, timeout=90):
    command = [*COMMAND, f"hydra.run.dir={folder}", *overrides]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def rows(folder):
    """One for each step: the logger writes the module's own figures into another line."""
    steps = {}
    with open(folder / "metrics.csv", newline="") as file:
        for line in csv.DictReader(file):
            steps.setdefault(line["step"], {}).update({name: text for name, text in line.items() if text})
    return list(steps.values())


def last_line(done):
    return dict(re.findall(r"(\w+)=(\S+)", done.stdout.splitlines()[-1]))


def test_batches_are_the_default_cadence_and_an_unsolved_run_exits_with_1(tmp_path):
    done = run(tmp_path, *SMALL)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1].startswith("unsolved frames=384 ")
    assert last_line(done)["version"] == "6"
    assert [float(row["weight_sync/version"]) for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert os.path.exists(tmp_path / ".hydra" / "config.yaml")


def test_the_cadence_is_overridden_on_the_command_line(tmp_path):
    # 64 frames in minibatches of 16, twice: 8 optimizer steps in each of 6 batches.
    cadence = [
        "callbacks.update_weights.interval_unit=optim_steps",
        "callbacks.update_weights.update_weights_interval=5",
    ]
    done = run(tmp_path, *SMALL, *cadence)
    assert done.returncode == 1, done.stderr
    assert last_line(done)["version"] == "10"  # after steps 5, 10, ..., 45, and the last one at the end
    assert float(rows(tmp_path)[-1]["weight_sync/version"]) == 10


@pytest.mark.slow
def test_a_cadence_in_frames_and_one_in_seconds_from_the_command_line(tmp_path):
    unit, interval = "callbacks.update_weights.interval_unit", "callbacks.update_weights.update_weights_interval"
    done = run(tmp_path / "frames", *SMALL, f"{unit}=frames", f"{interval}=100")
    assert done.returncode == 1, done.stderr
    assert last_line(done)["version"] == "3"  # 64 frames a batch: after every other one of 6
    done = run(tmp_path / "seconds", *SMALL, f"{unit}=seconds", f"{interval}=1000.5")
    assert done.returncode == 1, done.stderr
    warning = r"update_weights_interval=1000\.5 \(seconds\) is longer than the [\d.]+ counted since the last push"
    assert re.search(warning, done.stderr)
    assert last_line(done)["version"] == "1"  # at the end


def test_a_run_that_reaches_its_threshold_exits_with_0_and_stops_early(tmp_path):
    done = run(tmp_path, *SMALL, "callbacks.solved.stopping_threshold=1", "trainer.max_epochs=20")
    assert done.returncode == 0, done.stderr
    figures = last_line(done)
    assert done.stdout.splitlines()[-1].startswith("solved ") and float(figures["return"]) >= 1
    assert int(figures["frames"]) < 20 * 3 * 64


def test_a_run_is_validated_on_whole_episodes_and_stops_by_them(tmp_path):
    evaluation = ["+evaluation.episodes=3", "module._target_=tests.helpers.evaluated_ppo.EvaluatedPPO"]
    solved = ["callbacks.solved.monitor=val/episode_return", "callbacks.solved.check_on_train_epoch_end=false"]
    done = run(tmp_path, *SMALL, *evaluation, *solved, "callbacks.solved.stopping_threshold=1")
    assert done.returncode == 0, done.stderr
    assert last_line(done)["frames"] == "192"  # of the one epoch's training, not of the episodes
    (value,) = [float(row["val/episode_return"]) for row in rows(tmp_path) if "val/episode_return" in row]
    assert value >= 1


@pytest.mark.slow
def test_two_worker_processes_and_a_checkpoint_to_go_on_from(tmp_path):
    workers = ["collector.num_workers=2", "trainer.enable_checkpointing=true"]
    first = run(tmp_path / "first", *SMALL, *workers)
    assert first.returncode == 1, first.stderr
    assert last_line(first)["frames"] == "768"
    (checkpoint,) = Path(tmp_path).rglob("*.ckpt")
    again = run(tmp_path / "second", *SMALL, *workers, "trainer.max_epochs=3", f"ckpt_path='{checkpoint}'")
    assert again.returncode == 1, again.stderr
    assert last_line(again)["version"] == "9"
    assert last_line(again)["frames"] == "1152"  # of both runs


@pytest.mark.slow
@pytest.mark.parametrize("seed", [11, 12])
def test_cartpole_is_solved(tmp_path, seed):
    done = run(tmp_path, f"seed={seed}", timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(last_line(done)["frames"]) <= 200_000
