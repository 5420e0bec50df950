"""A Hydra application: one folder per job, and workers that see what the trainer sees and are heard in its log."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import marked, wait_until

ROOT = Path(__file__).parents[2]


def run(folder, *overrides, code=0):
    """The application in its own working directory; its standard error."""
    command = [sys.executable, "-m", "tests.helpers.hydra_app", *overrides]
    with marked() as processes:
        environment = os.environ | {"PYTHONPATH": os.fspath(ROOT)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110)
        assert wait_until(lambda: not processes(), 5), processes()
    assert done.returncode == code, done.stderr
    return done.stderr


def told(log):
    """What trainer and worker of one rank have told in the job's log: records as (logger, level, text)."""
    records = re.findall(r"^\[[^]]*\]\[(\w+)\]\[(\w+)\] - (.*)$", log.read_text(), re.MULTILINE)
    trainer, worker = (
        [json.loads(text.removeprefix(whose)) for _, _, text in records if text.startswith(whose)]
        for whose in ("trainer ", "[worker 0] worker ")
    )
    assert len(trainer) == len(worker) == 1
    return records, trainer[0], worker[0]


def check_job(folder, ranks=1, x=0):
    """One output folder, one .hydra; each rank's worker sees its trainer's values, and the one file."""
    made = json.loads((folder / "env.json").read_text())
    logs = sorted(folder.glob("*.log"))
    assert len(logs) == ranks
    for log in logs:
        records, trainer, worker = told(log)
        assert worker.pop("file") == made
        assert worker == trainer, "a worker has resolved the configuration by itself"
        assert trainer["folder"] == os.fspath(folder) and trainer["x"] == made["x"] == x
        assert ("env", "INFO", "[worker 0] an info") in records  # Hydra has set the level
        assert not any("a debug message" in text for _, _, text in records)


def folders(root):
    """Of all jobs, wherever they are."""
    return sorted(path.parent for path in root.rglob(".hydra"))


def test_a_worker_sees_the_trainers_values_and_files_and_is_heard_in_the_jobs_log(tmp_path):
    run(tmp_path, "hydra.job.chdir=True")
    (folder,) = folders(tmp_path)
    check_job(folder)


@pytest.mark.slow
def test_two_ranks_share_one_folder(tmp_path):
    run(tmp_path, "hydra.job.chdir=True", "devices=2", "strategy=ddp")
    (folder,) = folders(tmp_path)
    check_job(folder, ranks=2)
    assert len(list((tmp_path / "outputs").glob("*/*"))) == 1


@pytest.mark.slow
def test_a_sweep_has_one_folder_per_job(tmp_path):
    run(tmp_path, "-m", "hydra.job.chdir=True", "x=1,2")
    first, second = folders(tmp_path)
    check_job(first, x=1)
    check_job(second, x=2)


@pytest.mark.slow
def test_a_sweep_of_two_ranks_in_a_fixed_folder(tmp_path):
    run(tmp_path, "-m", "hydra.job.chdir=True", "x=1,2", "devices=2", "strategy=ddp", f"hydra.sweep.dir={tmp_path}/all")
    assert folders(tmp_path) == [tmp_path / "all" / "0", tmp_path / "all" / "1"]
    for x, folder in enumerate(folders(tmp_path), 1):
        check_job(folder, ranks=2, x=x)


@pytest.mark.slow
def test_a_sweep_of_two_ranks_that_would_be_in_two_folders_is_refused(tmp_path):
    err = run(tmp_path, "-m", "hydra.job.chdir=True", "x=1,2", "devices=2", "strategy=ddp", code=1)
    assert "Set hydra.sweep.dir to a fixed path, or strategy='ddp_spawn'" in err


@pytest.mark.slow
def test_a_sweep_of_two_ranks_that_are_spawned(tmp_path):
    err = run(tmp_path, "-m", "hydra.job.chdir=True", "x=1,2", "devices=2", "strategy=ddp_spawn")
    assert len(folders(tmp_path)) == 2 and len(list((tmp_path / "multirun").glob("*/*"))) == 1
    told_by_workers = [json.loads(text) for text in re.findall(r"\[worker 0\] worker (.*)$", err, re.MULTILINE)]
    expected = []
    for x, folder in enumerate(folders(tmp_path), 1):
        (text,) = re.findall(r"trainer (.*)$", (folder / "hydra_app.log").read_text(), re.MULTILINE)
        trainer = json.loads(text)
        assert (trainer["x"], trainer["folder"]) == (x, os.fspath(folder))
        expected += 2 * [trainer | {"file": json.loads((folder / "env.json").read_text())}]
    assert told_by_workers == expected
