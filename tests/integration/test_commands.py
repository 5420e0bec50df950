"""The subcommands: what they print, and what overrides on the command line do to a run, measured in the run."""

import html
import json
import os
import pickle
import resource
import subprocess
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from omegaconf import OmegaConf

from lightning_weightsync import CollectorGroup, DistributedWeightSyncScheme, GymCollector, UpdateWeights, callback
from lightning_weightsync.commands.composing import rewrite
from lightning_weightsync.commands.plan import find_routes
from lightning_weightsync.commands.problems import ConfigError
from lightning_weightsync.errors import LayoutMismatchError
from lightning_weightsync.report.events import read_events, read_run
from tests.helpers.configured import Constants, Probe, Shown

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_weightsync"
SHOWN = "tests/helpers/shown.yaml"
MAP = "callbacks.update_weights.weight_update_map"


def run_all(*lines, **more):
    """The results of several command lines, run in one process, one after the other; ``more`` is about the last."""
    command = [sys.executable, "-m", "tests.helpers.command"]
    given = [{"arguments": list(map(str, line))} for line in lines]
    given[-1] |= more
    text = json.dumps(given)
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def probe(folder):
    return json.loads((folder / "probe.json").read_text())


# --- overrides ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_runs(tmp_path_factory):
    """Runs without worker processes, by name: their folders; and all that was printed."""
    folder = tmp_path_factory.mktemp("small")
    both = f'{MAP}=["policy=actor","nets[1]=critic"]'
    runs = {
        "mapped as in the YAML": [],
        "mapped by a list": [both],
        "mapped by a mapping": [f"{MAP}={{policy:other}}"],
        "every other batch": ["callbacks.update_weights.update_weights_interval=2"],
        "the same seed": ["seed=1"],
        "another seed": ["seed=2", "trace=true"],
    }
    sweep = ["--multirun", SHOWN, f"hydra.sweep.dir={folder / 'sweep'}"]
    lines = [[SHOWN, f"hydra.run.dir={folder / name}", *overrides] for name, overrides in runs.items()]
    lines.append([*sweep, "callbacks.update_weights.update_weights_interval=1,3"])
    lines.append([SHOWN, "--cfg", "job", both])
    lines.append(["check", ROOT / "configs" / "pendulum_sac.yaml"])
    (folder / "checked").mkdir()
    results = run_all(*lines, folder=str(folder / "checked"))
    assert [result["code"] for result in results] == [0] * len(lines), results
    return {name: folder / name for name in [*runs, "sweep", "checked"]}, [result["output"] for result in results]


def test_a_list_on_the_command_line_takes_the_place_of_the_map_brackets_and_all(small_runs):
    folders, _ = small_runs
    # SGD with 0.1 on the actor only: it is 1, 0.9, 0.8 when the batches are made.
    models = [batch["models"] for batch in probe(folders["mapped by a list"])["batches"]]
    assert models[0] == [[1.0], [0.0], [2.0]]
    assert models[1] == [[pytest.approx(0.9)], [0.0], [2.0]]
    as_it_is = [batch["models"] for batch in probe(folders["mapped as in the YAML"])["batches"]]
    assert as_it_is[0] == [[1.0], [0.0], [0.0]]
    assert probe(folders["mapped by a mapping"])["batches"][0]["models"] == [[3.0], [0.0], [0.0]]


def test_the_cadence_from_the_command_line_is_that_of_the_run(small_runs):
    folders, _ = small_runs
    assert [batch["version"] for batch in probe(folders["mapped as in the YAML"])["batches"]] == [0, 1, 2]
    assert [batch["version"] for batch in probe(folders["every other batch"])["batches"]] == [0, 0, 1]


def test_a_multirun_over_cadences_runs_them_all(small_runs):
    folders, outputs = small_runs
    versions = [[batch["version"] for batch in probe(folders["sweep"] / job)["batches"]] for job in ("0", "1")]
    assert versions == [[0, 1, 2], [0, 0, 0]]
    assert outputs[-3].count("weight sync: ") == 2


def test_the_seed_from_the_command_line_makes_the_experience(small_runs):
    folders, _ = small_runs
    seen = {
        name: probe(folders[name])["batches"][0]["observation"]
        for name in ("mapped as in the YAML", "the same seed", "another seed")
    }
    assert seen["the same seed"] == seen["mapped as in the YAML"] != seen["another seed"]


def test_the_composed_configuration_is_printed(small_runs):
    _, outputs = small_runs
    config = OmegaConf.create(outputs[-2])
    assert config.callbacks.update_weights.weight_update_map == ["policy=actor", "nets[1]=critic"]


def test_a_run_ends_with_what_its_pushes_cost_and_writes_down_each_batch(small_runs):
    folders, outputs = small_runs
    told, last = outputs[0].splitlines()[-2:]
    assert told.startswith("weight sync: 3 pushes, ") and "staleness at most 0, 0 restart(s)" in told
    assert last.startswith("finished frames=12 ")
    events = [json.loads(line) for line in (folders["mapped as in the YAML"] / "events.jsonl").read_text().splitlines()]
    batches = [event for event in events if event["kind"] == "batch"]
    assert [event["frames"] for event in batches] == [4, 8, 12]
    assert [event["version"] for event in batches] == [1, 2, 3]
    assert [event["ages"] for event in batches] == [{"0": 4}] * 3
    assert events[0]["kind"] == "start" and events[-1]["kind"] == "end"
    assert events[-1]["pushes"] == 3


def test_a_trace_has_the_trainer_and_its_workers_on_one_clock(small_runs):
    folders, _ = small_runs
    assert not (folders["the same seed"] / "trace.json").exists()
    events = json.loads((folders["another seed"] / "trace.json").read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert tracks == {0: "trainer", 1: "worker 0"}
    spans = [event for event in events if event["ph"] == "X"]
    trainer = [event["name"] for event in spans if event["tid"] == 0]
    assert trainer == ["wait for a batch", "learn", "push"] * 3
    waits = [(event["ts"], event["dur"]) for event in spans if event["name"] == "wait for a batch"]
    collects = [(event["ts"], event["dur"]) for event in spans if event["name"] == "collecting"]
    assert waits == collects  # sync: a batch is collected while the trainer waits for it


@pytest.mark.slow
def test_workers_backend_and_staleness_from_the_command_line_are_those_of_the_run(tmp_path):
    ahead = ["collector.sync=false", "collector.batches_per_epoch=8"]
    runs = {
        "one": ["collector.num_workers=1", "hydra.job.chdir=true"],
        "two": ["collector.num_workers=2", "weight_sync_scheme=network"],
        "bounded": ["collector.num_workers=1", *ahead, "collector.max_staleness=0"],
        "unbounded": ["collector.num_workers=1", *ahead],
    }
    results = run_all(*[[SHOWN, f"hydra.run.dir={tmp_path / name}", *o] for name, o in runs.items()])
    assert [result["code"] for result in results] == [0] * 4, results
    probes = {name: probe(tmp_path / name) for name in runs}
    assert [len(set(probes[name]["pids"])) for name in ("one", "two")] == [1, 2]
    assert probes["two"]["batches"][0]["workers"] == [0, 1]
    assert [probes[name]["shared"] for name in ("one", "two")] == [{"policy": True}, {"policy": False}]
    assert max(batch["age"] for batch in probes["bounded"]["batches"]) == 0
    assert max(batch["age"] for batch in probes["unbounded"]["batches"]) > 0


@pytest.mark.slow
def test_an_error_in_a_run_keeps_its_traceback_and_is_in_the_record_of_the_run(tmp_path):
    failing = "module._target_=tests.helpers.configured.FailsInTraining"
    (result,) = run_all([SHOWN, failing, f"hydra.run.dir={tmp_path}"])
    assert result["code"] == 1
    assert "in training_step" in result["output"] and "my own error" in result["output"].splitlines()[-1]
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events if event["kind"] != "worker"] == ["start", "batch", "exception"]
    assert events[-1]["message"] == "ConfigKeyError: my own error"


# --- check ---------------------------------------------------------------------------------------------------------


def test_check_prints_who_sends_what_to_whom_starts_no_process_and_writes_nothing(small_runs):
    folders, outputs = small_runs
    lines = outputs[-1].splitlines()
    assert lines[-1] == "ok"
    assert "  actor -> policy" in lines and "  critic -> critic" in lines
    assert any("every 16 optimizer step(s); the trainer waits for one copy only" in line for line in lines)
    assert any("Critic: 12 leaves, 36.5 KB" in line for line in lines)
    assert not list(folders["checked"].iterdir())


def test_check_finds_the_mismatch_that_connect_would():
    def group():
        return CollectorGroup(Shown, 1, weight_sync_schemes={"policy": DistributedWeightSyncScheme()})

    class Wide(Constants):
        def __init__(self):
            super().__init__()
            self.more = Constants()

    with pytest.raises(ConfigError) as found:
        find_routes(group(), {"policy": Wide()})
    with group() as connecting, pytest.raises(LayoutMismatchError) as raised:
        connecting.update_policy_weights_(Wide())
    cause = found.value.__cause__
    assert isinstance(cause, LayoutMismatchError)
    assert cause.unexpected == raised.value.unexpected == ["more.value"]
    assert (cause.missing, cause.mismatched) == (raised.value.missing, raised.value.mismatched)


# --- report --------------------------------------------------------------------------------------------------------


def test_report_is_one_page_with_its_plots_inside(small_runs):
    pytest.importorskip("matplotlib")
    from lightning_weightsync.commands.report import report

    folders, _ = small_runs
    folder = folders["mapped as in the YAML"]
    page = report(folder)
    assert page.count('src="data:image/png;base64,') == page.count("<img") == 4  # no episodes here, so no returns
    assert "http" not in page.replace("http-equiv", "")
    assert "looked at 10 times a second" in page and "looked at 100 times" in report(folders["another seed"])
    for text in ("Staleness", "Push latency", "Workers", "tests.helpers.configured.Probe", "time lost to pushes"):
        assert text in page


def test_report_reads_a_run_that_was_killed_as_far_as_it_goes(tmp_path):
    pytest.importorskip("matplotlib")
    from lightning_weightsync.commands.report import report

    lines = [
        {"kind": "start", "time": 0.0, "module": "<Net>", "workers": 1, "sync": False},
        {"kind": "worker", "time": 0.1, "worker": 0, "state": "starting", "pid": 1, "version": -1},
        {"kind": "worker", "time": 1.0, "worker": 0, "state": "collecting", "pid": 1, "version": 0},
        {"kind": "worker", "time": 2.0, "worker": 0, "state": "failed", "pid": 1, "version": 3, "cause": "a <signal>"},
    ]
    text = "\n".join(map(json.dumps, lines)) + '\n{"kind": "batch", "ti'
    (tmp_path / "events.jsonl").write_text(text)
    page = report(tmp_path)
    assert "worker 0: a &lt;signal&gt;" in page and "&lt;Net&gt;" in page
    assert page.count("<img") == 1
    (tmp_path / "events.jsonl").write_text("no events\n" + text)
    with pytest.raises(ConfigError, match=r"events.jsonl:1 is no event"):
        report(tmp_path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "does not begin with an event of kind 'start'"),
        ("garbage", "1 is no event"),
        ('{"kind": "sta', "1 is no event"),
        (
            '{"kind": "start", "time": 0.0}\n{"kind": "worker", "time": 0.1}\n{"kind": "end", "time": 1.0}',
            "2 is no event",
        ),
        ('{"kind": "end", "time": 1.0}', "does not begin"),
        ("[]", "1 is no event"),
    ],
)
def test_what_is_no_record_of_a_run_is_said_to_be_none(tmp_path, text, why):
    (tmp_path / "events.jsonl").write_text(text)
    with pytest.raises(ValueError, match=why):
        read_events(tmp_path / "events.jsonl")


def test_a_report_shows_the_workers_of_all_ranks_on_one_clock(tmp_path):
    pytest.importorskip("matplotlib")
    from lightning_weightsync.commands.report import report

    for rank, name in enumerate(["events.jsonl", "events-rank1.jsonl", "events-rank2.jsonl"]):
        start = {"kind": "start", "time": 0.5, "began": 1000.0 + 7 * rank, "rank": rank, "ranks": 2, "workers": 1}
        worker = {"kind": "worker", "worker": 0, "pid": 1, "state": "collecting", "version": 0}
        lines = [start, worker | {"time": 1.0}, worker | {"time": 2.0, "version": 1}]
        lines.append(worker | {"time": 3.0, "version": 1, "state": "failed", "cause": f"lost by rank {rank}"})
        lines.append({"kind": "batch", "time": 3.5, "asked": 3.0, "waited": 0.1, "version": 1})
        costs = {"pushes": 9, "bytes": 1, "mean_stall_ms": 1.0, "share_of_time": 0.1, "staleness_max": 0}
        lines.append({"kind": "end", "time": 4.0, "restarts": 1 + rank, **costs})
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)))
    run = read_run(tmp_path)
    assert list(run.ranks) == [0, 1]  # the third file is of an earlier run
    assert [(span.begin, span.end) for span in run.spans(0)] == [(1.0, 3.0), (3.0, 4.0)]
    assert [(span.begin, span.end) for span in run.others[1].spans(0)] == [(8.0, 10.0), (10.0, 11.0)]
    assert run.others[1].switches(0) == [9.0] and run.others[1].batches[0]["asked"] == 10.0
    page = html.unescape(report(tmp_path))
    assert "3.0 s, rank 0, worker 0: lost by rank 0" in page and "10.0 s, rank 1, worker 0: lost by rank 1" in page
    assert "<td>restarts</td><td>3</td>" in page
    assert "<td>pushes</td><td>9</td>" in page and "what pushes cost are rank 0's" in page


class Evaluated(Probe):
    """Logs returns of its training too, first and under a name that comes first."""

    def training_step(self, batch, batch_idx):
        self.log("a_train/episode_return", 1.0 + batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val/episode_return", 5.0)

    def val_dataloader(self):
        return [torch.zeros(1)]


def test_an_evaluation_is_what_was_logged_in_validation(tmp_path):
    recorded(tmp_path, Evaluated(), batches=2, max_epochs=3)
    assert [event["return"] for event in read_events(tmp_path / "events.jsonl").evaluations] == [5.0] * 3
    (tmp_path / "training").mkdir()
    module = Evaluated()
    module.validation_step = lambda batch, batch_idx: None
    recorded(tmp_path / "training", module, batches=2, max_epochs=3)
    assert read_events(tmp_path / "training" / "events.jsonl").evaluations == []


def test_a_record_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    from lightning_weightsync.report.recorder import Recorder

    (tmp_path / "run").write_text("a file where the folder should be")
    group = CollectorGroup(Shown, 0, weight_sync_schemes={"policy": DistributedWeightSyncScheme()}, batches_per_epoch=2)
    update = UpdateWeights(group, weight_update_map={"policy": "actor"})
    recorder = pickle.loads(pickle.dumps(Recorder(tmp_path / "run", group, [update])))  # as for a rank that is spawned
    (update,) = recorder._updates
    group = update.collector
    quiet = {"enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, callbacks=[update, recorder], default_root_dir=tmp_path, **quiet
    )
    trainer.fit(Probe(), group)
    assert recorder.totals.pushes == update.num_pushes == 2
    assert "events.jsonl is not written" in caplog.text


# --- what pushes cost ----------------------------------------------------------------------------------------------


class ManySteps(Probe):
    """Three optimizer steps in each batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for _ in range(3):
            loss = super().training_step(batch, batch_idx)
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()


class Stopwatch:
    """A clock that only moves when it is told to: whoever reads it twice around one thing gets the same."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        time.sleep(seconds)  # a trace draws pushes within the time that their batch has really taken
        self.now += seconds


def recorded(folder, module, batches=8, several=1, max_epochs=1, watch=None, **options):
    """The recorder of a short fit, and what each push has taken: (seconds, how many batches had begun)."""
    from lightning_weightsync.report.recorder import Recorder

    group = CollectorGroup(
        Shown, 0, weight_sync_schemes={"policy": DistributedWeightSyncScheme()}, batches_per_epoch=batches
    )
    pushes, push, watch = [], group.update_policy_weights_, watch or Stopwatch()

    def slow(**weights):
        started = watch.perf_counter()
        watch.sleep(0.005 + 0.01 * (len(pushes) % 2))  # one figure for several of them would be wrong
        push(**weights)
        pushes.append((watch.perf_counter() - started, group.frames // 4))

    group.update_policy_weights_ = slow
    updates = [UpdateWeights(group, weight_update_map={"policy": "actor"}, **options) for _ in range(several)]
    recorder = Recorder(folder, group, updates, trace=True)
    quiet = {"enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=max_epochs, accelerator="cpu", logger=False, default_root_dir=folder, **quiet)
    for number, update in enumerate(updates):
        update.register(trainer, f"number {number}")
    trainer.callbacks.append(recorder)
    trainer.fit(module, group)
    return recorder, [push for push in pushes if push[1]]  # a second callback's first push is how it connects


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Probe, {"update_weights_interval": 3}),
        (ManySteps, {"interval_unit": "optim_steps"}),
        (ManySteps, {"interval_unit": "optim_steps", "update_weights_interval": 2}),
        (Probe, {"update_weights_interval": 3, "several": 2}),
    ],
    ids=["every third batch", "three in each batch", "one or two in each batch", "two callbacks"],
)
def test_what_pushes_cost_is_the_sum_of_them_all_and_of_nothing_else(tmp_path, monkeypatch, make, options):
    monkeypatch.setattr(callback, "time", watch := Stopwatch())
    recorder, pushes = recorded(tmp_path, make(), watch=watch, **options)
    measured = sum(seconds for seconds, _ in pushes)
    totals = recorder.totals.as_json()
    assert totals["pushes"] == len(pushes)
    assert totals["mean_stall_ms"] == pytest.approx(1e3 * measured / len(pushes), rel=0.01)
    assert totals["share_of_time"] * totals["seconds"] == pytest.approx(measured, rel=0.01)

    batches = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    batches = [event for event in batches if event["kind"] == "batch"]
    assert len(batches) == 8
    last = len(pushes) - sum(batch["pushes"] for batch in batches)  # those of the end belong to no batch
    for number, batch in enumerate(batches, 1):
        of_batch = [seconds for seconds, begun in pushes[: len(pushes) - last] if begun == number]
        assert batch["pushes"] == len(of_batch)
        assert batch.get("stall_ms", 0.0) == pytest.approx(1e3 * sum(of_batch), rel=0.01)
    spans = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    drawn = sum(span["dur"] for span in spans if span["name"] == "push") / 1e6
    assert drawn == pytest.approx(sum(s for s, _ in pushes[: len(pushes) - last]), rel=0.01)
    held = [ms for _, ms in read_events(tmp_path / "events.jsonl").pushes()]
    assert 5 <= min(held) <= max(held) <= 15  # of one push each


# --- bench, doctor, template, help ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_bench_measures_the_configured_model():
    (result,) = run_all(["bench", "configs/cartpole_ppo.yaml", "--pushes", "3", "--batches", "1"])
    assert result["code"] == 0, result["output"]
    assert "policy: 6 leaves, 18.5 KB a push; 2 worker(s)" in result["output"]
    for row in (
        "a plain copy",
        "a push, until all workers",
        "blocking=false: the trainer is held",
        "collecting a batch",
    ):
        assert row in result["output"]


def test_doctor_says_what_is_wrong_and_how_to_mend_it(capsys, monkeypatch):
    from lightning_weightsync.commands.doctor import main

    limits = {resource.RLIMIT_NOFILE: (200, 4096), resource.RLIMIT_NPROC: (-1, -1)}
    monkeypatch.setattr(resource, "getrlimit", limits.get)
    monkeypatch.setenv("RANK", "3")
    assert main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "bad: descriptors"
    (at,) = [i for i, line in enumerate(lines) if line.startswith("BAD  descriptors")]
    assert "200 open files allowed" in lines[at] and "-> ulimit -n 4096" in lines[at + 1]
    assert any(line.startswith("note environment      RANK set") for line in lines)


HIDDEN = ("torch", "tensordict", "lightning", "hydra", "omegaconf", "cloudpickle")


def test_help_the_template_and_doctor_need_nothing_heavy(tmp_path):
    """``doctor`` is for a machine on which something is missing, or broken."""
    code = "\n".join(
        [
            "import sys",
            f"sys.modules.update(dict.fromkeys({HIDDEN}))",
            "from lightning_weightsync.cli import run",
            "assert run(['--help']) == 0",
            "assert run(['template', 'my.yaml']) == 0",
            "from importlib import metadata",
            "version = metadata.version",
            "def without_hydra(name):",
            "    if name == 'hydra-core':",
            "        raise metadata.PackageNotFoundError(name)",
            "    return version(name)",
            "metadata.version = without_hydra",
            "assert run(['doctor']) == 1",
        ]
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "lightning-weightsync --multirun my.yaml" in done.stdout
    assert (tmp_path / "my.yaml").read_text() == (PACKAGE / "configs" / "template.yaml").read_text()
    (at,) = [i for i, line in enumerate(done.stdout.splitlines()) if line.startswith("BAD  hydra-core")]
    told = done.stdout.splitlines()[at : at + 2]
    assert "is not installed" in told[0] and "-> pip install 'hydra-core>=1.3'" in told[1]


def test_the_shell_completes_groups_of_the_file_that_is_named():
    line = "lightning-weightsync check configs/cartpole_ppo.yaml seed=2 logger="
    command = [sys.executable, "-c", "from lightning_weightsync.cli import main; main()", "-sc", "query=bash"]
    env = {**os.environ, "COMP_LINE": line, "COMP_POINT": str(len(line))}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "logger=csv logger=tensorboard"


# --- what is shipped -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "key", "cls", "given_elsewhere"),
    [
        ("weight_sync_scheme/distributed.yaml", None, DistributedWeightSyncScheme, set()),
        ("collector/gym.yaml", None, CollectorGroup, {"weight_sync_schemes"}),
        ("collector/gym.yaml", "collector", GymCollector, {"worker_idx", "seed"}),
    ],
)
def test_a_shipped_group_has_every_argument_with_its_default(path, key, cls, given_elsewhere):
    import inspect

    node = OmegaConf.to_container(OmegaConf.load(PACKAGE / "configs" / path))
    node = node[key] if key else node
    node = {name: value for name, value in node.items() if not name.startswith("_") and name != "defaults"}
    parameters = inspect.signature(cls).parameters
    assert node.keys() == parameters.keys() - given_elsewhere
    chosen = {"timeout", "num_workers", "batches_per_epoch", "seed", "num_envs", "collector"}
    for name, value in node.items():
        if name not in chosen and parameters[name].default is not inspect.Parameter.empty:
            assert value == parameters[name].default, name


def test_the_callback_of_the_shipped_group_has_every_argument_but_those_that_the_command_gives():
    import inspect

    node = OmegaConf.load(PACKAGE / "configs" / "callbacks" / "update_weights.yaml").update_weights
    arguments = inspect.signature(UpdateWeights).parameters.keys() - {"collector", "trainer"}
    assert set(node) - {"_target_"} == arguments


def test_the_template_beside_the_applications_is_the_one_that_is_shipped():
    assert (ROOT / "configs" / "template.yaml").resolve() == (PACKAGE / "configs" / "template.yaml").resolve()


def test_rewriting_a_command_line_twice_is_rewriting_it_once():
    once = rewrite(["seed=2", "configs/cartpole_ppo.yaml", f'{MAP}=["policy=actor"]', "--multirun"])
    assert once[:4] == ["--config-dir", "configs", "--config-name", "cartpole_ppo"]
    assert rewrite(once) == once


@pytest.mark.slow
def test_two_ranks_have_one_run_folder_and_the_same_configuration(tmp_path):
    script = tmp_path / "lws.py"
    script.write_text("from lightning_weightsync.cli import main\n\nmain()\n")
    overrides = [
        "trainer=ddp",
        "hydra.run.dir=run",
        "module._target_=tests.helpers.configured.RankProbe",
        f'{MAP}=["policy=actor","nets[0]=critic"]',
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(ROOT / SHOWN), *overrides]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lws.py", "run"]
    assert [path.name for path in tmp_path.rglob(".hydra")] == [".hydra"]
    config = OmegaConf.load(tmp_path / "run" / ".hydra" / "config.yaml")
    assert config.callbacks.update_weights.weight_update_map == ["policy=actor", "nets[0]=critic"]
    ranks = [json.loads((tmp_path / "run" / f"probe{rank}.json").read_text()) for rank in (0, 1)]
    assert [batches[0]["models"][:2] for batches in ranks] == [[[1.0], [2.0]]] * 2
    assert ranks[0][0]["observation"] != ranks[1][0]["observation"]
    assert done.stdout.count("finished frames=12 ") == 1
    run = read_run(tmp_path / "run")
    assert list(run.ranks) == [0, 1]
    for of_rank in run.ranks.values():
        assert list(of_rank.workers) == [0] and [batch["frames"] for batch in of_rank.batches] == [4, 8, 12]
    ends = [of_rank.batches[0]["time"] for of_rank in run.ranks.values()]
    assert abs(ends[0] - ends[1]) < 1  # they learn together
