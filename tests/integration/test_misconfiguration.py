"""Wrong configurations: each ends soon, with one message that names key, value and what to do, and no traceback."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CARTPOLE = "configs/cartpole_ppo.yaml"
UPDATE = "callbacks.update_weights"
MAP = f"{UPDATE}.weight_update_map"

CASES = {
    # name: (arguments, what the message holds)
    "a missing extra": (
        ["check", CARTPOLE],
        ["collector.collector._target_='lightning_weightsync.GymCollector'", "pip install 'lightning_weightsync[gym]'"],
    ),
    "an interval that is no number": (
        ["check", CARTPOLE, f"{UPDATE}.update_weights_interval=abc"],
        [f"{UPDATE}.update_weights_interval='abc': a number is needed"],
    ),
    "an interval of nothing": (
        ["check", CARTPOLE, f"{UPDATE}.update_weights_interval=0"],
        [UPDATE, "the interval in batches is at least 1, got 0"],
    ),
    "an interval of half a batch": (
        ["check", CARTPOLE, f"{UPDATE}.update_weights_interval=2.5"],
        [UPDATE, "the interval in batches is an int, got 2.5"],
    ),
    "an unknown unit": (
        ["check", CARTPOLE, f"{UPDATE}.interval_unit=batch"],
        [f"{UPDATE}.interval_unit='batch'", "'batches', 'optim_steps', 'frames', 'seconds'", "did you mean 'batches'?"],
    ),
    "an override of an unknown key": (
        ["check", CARTPOLE, f"{UPDATE}.update_weights_intervall=2"],
        ["no key 'update_weights_intervall'", "did you mean 'update_weights_interval'?", "interval_unit, blocking"],
    ),
    "an unknown argument": (
        ["check", CARTPOLE, f"+{UPDATE}.blockin=true"],
        [f"{UPDATE}.blockin=True: UpdateWeights has no 'blockin'; did you mean 'blocking'?", "It takes"],
    ),
    "no bool": (["check", CARTPOLE, f"{UPDATE}.blocking=maybe"], [f"{UPDATE}.blocking='maybe': true or false or null"]),
    "a source that is not there": (
        ["check", CARTPOLE, f'{MAP}=["policy=actr"]'],
        [MAP, "'policy'", "'actr'", "did you mean 'actor'"],
    ),
    "a source that is not there, at the start of a run": (
        [CARTPOLE, f"{MAP}.policy=actor.body", "record=false"],
        [MAP, "'actor.body'", "no attribute 'body'"],
    ),
    "a destination that is not there": (
        ["check", CARTPOLE, f'{MAP}=["polcy=actor"]'],
        ["weight_update_map", "'polcy'", "did you mean 'policy'"],
    ),
    "a pair without a source": (["check", CARTPOLE, f'{MAP}=["policy"]'], [MAP, "'policy'", "'destination=source'"]),
    "a destination twice": (
        ["check", CARTPOLE, f'{MAP}=["policy=actor","policy=critic"]'],
        [MAP, "'policy' is given twice", "'actor' and 'critic'"],
    ),
    "a malformed path": (["check", CARTPOLE, f'{MAP}=["policy=actor["]'], [MAP, "'actor['", "a path is names, [int]"]),
    "another layout": (
        ["check", CARTPOLE, f'{MAP}=["policy=critic"]'],
        ["weight_update_map: 'policy'", "receiver"],
    ),
    "a scheme without a source": (
        ["check", CARTPOLE, "+weight_sync_schemes.critic=${weight_sync_scheme}"],
        ["destinations ['policy'], weight_sync_schemes ['critic']", "a scheme without a source: 'critic'"],
    ),
    "a destination without a scheme": (
        ["check", CARTPOLE, "~weight_sync_scheme"],
        ["destinations ['policy'], weight_sync_schemes []", "without a scheme: ['policy']", "add weight_sync_scheme"],
    ),
    "an unknown backend": (
        ["check", CARTPOLE, "weight_sync_scheme.backend=glo"],
        ["weight_sync_scheme", "backend='glo': choose one of 'gloo', 'nccl'"],
    ),
    "a timeout that has passed": (
        ["check", CARTPOLE, "weight_sync_scheme.timeout=-1"],
        ["weight_sync_scheme", "timeout=-1: give a positive number of seconds"],
    ),
    "an unknown way to this host": (
        ["check", CARTPOLE, "weight_sync_scheme.same_host=sharedmemory"],
        ["weight_sync_scheme.same_host='sharedmemory'", "'shared_memory', 'network'", "did you mean 'shared_memory'?"],
    ),
    "a choice that is not there": (
        ["check", CARTPOLE, "logger=csvv"],
        ["logger=csvv", "did you mean 'csv'?", "csv, tensorboard"],
    ),
    "workers that are no number": (
        ["check", CARTPOLE, "collector.num_workers=two"],
        ["collector.num_workers='two': an int is needed"],
    ),
    "less than no workers": (
        ["check", CARTPOLE, "collector.num_workers=-1"],
        ["collector", "num_workers=-1: at least 0"],
    ),
    "a bound that needs another mode": (
        ["check", CARTPOLE, "collector.max_staleness=2"],
        ["collector", "max_staleness=2 needs sync=False"],
    ),
    "frames that do not divide": (
        ["check", CARTPOLE, "collector.collector.frames_per_batch=1023"],
        ["collector.collector", "frames_per_batch=1023 must be a positive multiple of num_envs=8"],
    ),
    "an unknown environment": (
        ["check", CARTPOLE, "collector.collector.env=CartPool-v1"],
        ["collector.collector", "CartPool", "CartPole"],
    ),
    "an unknown class": (
        ["check", CARTPOLE, "module._target_=examples.cartpole_ppo.PPOO"],
        ["module._target_='examples.cartpole_ppo.PPOO'", "did you mean 'PPO'?"],
    ),
    "an unknown module": (
        ["check", CARTPOLE, "module._target_=exampels.cartpole_ppo.PPO"],
        ["module._target_='exampels.cartpole_ppo.PPO'", "there is no module 'exampels'"],
    ),
    "an unknown policy": (
        ["check", CARTPOLE, "collector.collector.policy.path=examples.cartpole_nets.Acter"],
        ["collector.collector.policy.path='examples.cartpole_nets.Acter'", "did you mean 'Actor'?"],
    ),
    "an argument of the module's that is of another type": (
        ["check", CARTPOLE, "module.lr=fast"],
        ["module.lr='fast': a number is needed"],
    ),
    "no epochs": (["check", CARTPOLE, "trainer.max_epochs=many"], ["trainer.max_epochs='many': an int or null"]),
    "an unknown accelerator": (
        ["check", CARTPOLE, "trainer.accelerator=tpuu"],
        ["trainer", "accelerator", "tpuu"],
    ),
    "a factory that does not pickle": (
        [
            "check",
            "tests/helpers/shown.yaml",
            "collector.num_workers=1",
            "collector.collector._target_=tests.helpers.configured.unpicklable_factory",
        ],
        ["collector.collector", "cannot be sent to worker processes", "pickle", "inside of it"],
    ),
    "a seed that is none": (["check", CARTPOLE, "seed=one"], ["seed='one': an int is needed"]),
    "an unknown group": (["check", CARTPOLE, "colector=gym"], ["colector", "did you mean 'collector'?"]),
    "a node that is nearly there": (
        ["check", CARTPOLE, "+evaluatoin.episodes=3"],
        ["evaluatoin: there is no node of that name; did you mean 'evaluation'?"],
    ),
    "an evaluation of nothing": (
        ["check", CARTPOLE, "+evaluation.episodes=0"],
        ["evaluation", "episodes=0", "at least one episode"],
    ),
    "a checkpoint that is not there": (
        ["check", CARTPOLE, "ckpt_path=nowhere.ckpt"],
        ["ckpt_path='nowhere.ckpt': there is no such file"],
    ),
    "what is not filled in": (
        ["check", "configs/template.yaml"],
        [
            "module._target_ has no value (???)",
            "weight_update_map.policy has no value (???)",
            "collector.collector.env",
        ],
    ),
    "a file that Hydra does not read": (["check", "conf/my.yml"], ["conf/my.yml", "rename it to conf/my.yaml"]),
    "two files": (
        ["check", CARTPOLE, "configs/pendulum_sac.yaml"],
        [f"configs/pendulum_sac.yaml: the configuration is {CARTPOLE} already; name one file"],
    ),
    "a getter beside a map that is not filled in": (
        ["check", CARTPOLE, f"{MAP}=???", f"{UPDATE}.policy_weights_getter={{_target_: torch.zeros}}"],
        [f"{MAP} has no value (???)", "or null, where policy_weights_getter or sender is given in its place"],
    ),
    "no such file": (["check", "configs/cartpole.yaml"], ["there is no file configs/cartpole.yaml"]),
    "a list without quotes": ([CARTPOLE, f"{MAP}=[policy=actor]"], [MAP, "cannot be read", "quote it"]),
    "groups that are not found": (
        ["check", "{folder}/lost.yaml"],
        ["no group for 'collector/gym'", "hydra: {searchpath: [pkg://lightning_weightsync.configs]}"],
    ),
    "no YAML": (["check", "{folder}/broken.yaml"], ["the YAML cannot be read", "broken.yaml", "line 3"]),
    "an interpolation of nothing": (["check", CARTPOLE, "module.lr=${speed}"], ["module.lr", "'speed' not found"]),
    "a module that raises": (
        ["check", "tests/helpers/shown.yaml", "module._target_=tests.helpers.configured.Raises"],
        ["module: TypeError: can only concatenate str", "HYDRA_FULL_ERROR=1 shows where"],
    ),
    "an environment that raises": (
        ["check", "tests/helpers/shown.yaml", "collector.collector._target_=tests.helpers.configured.broken_factory"],
        ["collector.collector", "RuntimeError: no simulator on port 4711"],
    ),
    "one wrong job of a multirun, of which the others go on": (
        [
            "--multirun",
            "tests/helpers/shown.yaml",
            "hydra.sweep.dir={folder}/sweep",
            f"{UPDATE}.update_weights_interval=0,1",
        ],
        ["the interval in batches is at least 1, got 0", "finished frames=12 "],
    ),
    "schemes in two places": (
        [
            "check",
            CARTPOLE,
            "+weight_sync_schemes.policy=${weight_sync_scheme}",
            "+collector.weight_sync_schemes.policy=${weight_sync_scheme}",
        ],
        ["weight_sync_schemes has ['policy'] and collector.weight_sync_schemes ['policy']: use one of them"],
    ),
    "no such command": (["chekc", CARTPOLE], ["there is no command 'chekc'; did you mean 'check'?"]),
    "no plots without matplotlib": (
        ["report", "{folder}"],
        ["matplotlib", "pip install 'lightning_weightsync[plots]'"],
    ),
    "no run": (["report", "nowhere"], ["nowhere/events.jsonl is not there"]),
    "a folder of runs": (["report", "{folder}/.."], ["is not there; there is one in"]),
}
WITHOUT = {"a missing extra": ["gymnasium"], "no plots without matplotlib": ["matplotlib"]}

SLOW = {  # much like others; in a process of their own only
    "an interval of half a batch",
    "no bool",
    "a pair without a source",
    "a destination twice",
    "a malformed path",
    "a timeout that has passed",
    "less than no workers",
    "an unknown module",
    "an unknown policy",
    "no epochs",
    "a seed that is none",
    "a node that is nearly there",
    "an evaluation of nothing",
}
TOGETHER = [name for name in CASES if name not in SLOW]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """All of them, in one process."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    folder.mkdir()
    (folder / "events.jsonl").write_text('{"kind": "start", "time": 0.0}\n')
    (folder / "lost.yaml").write_text("defaults: [collector: gym, _self_]\n")
    (folder / "broken.yaml").write_text("seed: 1\nmodule: [\n")
    lines = [
        {
            "arguments": [a.replace("{folder}", str(folder)) for a in CASES[name][0]],
            "without": WITHOUT.get(name, []),
        }
        for name in TOGETHER
    ]
    command = [sys.executable, "-m", "tests.helpers.command"]
    done = subprocess.run(command, cwd=ROOT, input=json.dumps(lines), capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return dict(zip(TOGETHER, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", TOGETHER)
def test_a_wrong_configuration_is_told(results, name):
    _, parts = CASES[name]
    result = results[name]
    assert result["code"] == 2, result["output"]
    assert result["seconds"] < 10
    assert "Traceback" not in result["output"]
    for part in parts:
        assert part in result["output"], result["output"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (f'{MAP}=["polcy=actor"]', ["'polcy'", "did you mean 'policy'?"]),
        (f'{MAP}=["policy=critic"]', ["'policy' differs between sender and receiver", "net.4.bias"]),
        ("collector.collector.env=CartPool-v1", ["CartPool", "Did you mean: `CartPole`?"]),
    ],
)
def test_what_only_workers_find_ends_a_run_before_its_first_batch_in_the_same_way(tmp_path, override, parts):
    code = "from lightning_weightsync.cli import main; main()"
    command = [sys.executable, "-c", code, CARTPOLE, override, f"hydra.run.dir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("configuration: a worker ") and "`check`" in last
    assert all(part in last for part in parts), last


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in WITHOUT and "{folder}" not in str(CASES[name])])
def test_and_so_it_is_in_a_process_of_its_own(name):
    arguments, parts = CASES[name]
    code = "from lightning_weightsync.cli import main; main()"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10  # seconds of the processor's
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert all(part in done.stderr for part in parts), done.stderr
