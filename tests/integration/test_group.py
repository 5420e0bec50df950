"""A group of workers without Lightning: life cycle, batches, versions, faults, seeds, state."""

import inspect
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from torch import nn

from lightning_weightsync import (
    CollectorGroup,
    DistributedWeightSyncScheme,
    LayoutMismatchError,
    WeightSyncError,
    WeightSyncTimeout,
    WorkerDied,
)
from lightning_weightsync.collectors.recycling import BatchMemory
from tests.helpers import collectors
from tests.helpers.collectors import (
    NUM_ENVS,
    STEPS,
    ParentEnv,
    Report,
    Stream,
    gym_collector,
    misbehaving_collector,
    misbehaving_factory,
    update_at_batch_or_step,
)
from tests.helpers.policies import Policy, Value, fingerprint, sha256
from tests.helpers.processes import cpu_seconds, wait_until, zombies


def group_of(num_workers, collector=gym_collector, *, destinations=("policy",), timeout=60.0, **kwargs):
    schemes = {name: DistributedWeightSyncScheme(timeout=timeout) for name in destinations}
    return CollectorGroup(collector, num_workers, weight_sync_schemes=schemes, **kwargs)


def take(group, count=1):
    return list(islice(group, count))


class NoCollector:
    pass


class Endless(Stream):
    """What a user's own collector may get wrong, by the name of the mistake."""

    def __init__(self, mistake, **kwargs):
        super().__init__(**kwargs)
        self.mistake = mistake
        if mistake == "gate without version":
            from lightning_weightsync import Gate

            self.gate = Gate()

    def __iter__(self):
        if self.mistake == "no dimension":
            return (batch[0] for batch in super().__iter__())
        return iter(()) if self.mistake == "ends" else super().__iter__()


# --- life cycle ------------------------------------------------------------------------------------------------------


def test_a_group_works_without_lightning_from_start_to_shutdown(no_leftovers):
    # An environment with a process of its own, as those with a simulator have; stopping the worker ends it too.
    group, policy = group_of(2, partial(gym_collector, env=ParentEnv)), Policy(1)
    assert group.version == 0 and group.stats() == {}
    with pytest.raises(RuntimeError, match=r"new.*start\(\)"):
        take(group)
    group.start()
    with pytest.raises(RuntimeError, match=r"launched, not connected"):
        take(group)
    with pytest.raises(RuntimeError, match="launched already"):
        group.launch()
    with pytest.raises(TypeError, match="cannot be pickled while its workers run"):
        pickle.dumps(group)

    group.update_policy_weights_(policy)
    assert (group.run, group.version) == (1, 0)
    assert group.digest() == {0: sha256(policy), 1: sha256(policy)}
    (batch,) = take(group)
    assert batch.batch_size == (2 * NUM_ENVS, STEPS)
    assert batch["worker_idx"][:, 0].tolist() == [0] * NUM_ENVS + [1] * NUM_ENVS
    assert batch["policy_version"].eq(0).all() and batch["policy_version"].dtype == torch.int64
    assert batch["next", "reward"].shape == (2 * NUM_ENVS, STEPS, 1)
    assert batch["fingerprint"].eq(fingerprint(policy)).all()

    with torch.no_grad():
        policy.head.weight.mul_(-3.0)
    assert set(group.digest().values()) != {sha256(policy)}
    group.update_policy_weights_()  # what was given before, as it is now
    assert group.digest() == {0: sha256(policy), 1: sha256(policy)}
    (later,) = take(group)
    assert later["policy_version"].eq(1).all()
    assert later["fingerprint"].eq(fingerprint(policy)).all()
    assert batch["policy_version"].eq(0).all(), "an earlier batch was overwritten by a later one"

    stats = group.stats()
    assert list(stats) == [0, 1]
    assert {stat["pid"] for stat in stats.values()} < set(no_leftovers())
    assert len(no_leftovers()) == 2 + 2 * NUM_ENVS
    for stat in stats.values():
        wanted = {"state": "connected", "cause": None, "run": 1, "version": 1, "generation": 0, "restarts": 0}
        assert {name: stat[name] for name in wanted} == wanted
        assert stat["frames"] == 2 * NUM_ENVS * STEPS
    assert group.frames == 4 * NUM_ENVS * STEPS
    for stat in stats.values():  # a cluster sends these to everybody: they are the parent's business
        os.kill(stat["pid"], signal.SIGTERM)
        os.kill(stat["pid"], signal.SIGINT)
    assert take(group)[0]["policy_version"].eq(1).all()
    metrics = group.metrics()
    assert metrics["weight_sync/workers_alive"] == 2
    assert metrics["collect/episode_length"] == pytest.approx(3.0)  # episodes in each environment: 3, 1, 5 steps
    started = time.monotonic()
    group.shutdown()
    assert time.monotonic() - started < 2
    group.shutdown()
    assert wait_until(lambda: not no_leftovers(), 1)  # an orphan is reaped by somebody else
    assert group.version == 1
    assert {stat["state"] for stat in group.stats().values()} == {"stopped"}
    for refused in (group.update_policy_weights_, group.digest, lambda: take(group)):
        with pytest.raises(RuntimeError, match="stopped"):
            refused()
    assert pickle.loads(pickle.dumps(group)).version == 1


def test_a_group_that_was_stopped_starts_again_as_a_newer_run(no_leftovers):
    policy = Policy(1)
    with group_of(0, seed=3) as group:
        group.update_policy_weights_(policy)
        (first,) = take(group)
        group.update_policy_weights_(policy)
    with group:
        group.update_policy_weights_(policy)
        assert (group.run, group.version) == (2, 1)
        (again,) = take(group)
        assert again["policy_version"].eq(1).all()
        assert not torch.equal(first["observation"], again["observation"]), "the first episodes were replayed"


def test_without_workers_the_collector_runs_in_this_process(no_leftovers):
    group, policy = group_of(0), Policy(1)
    group.start({"policy": policy})
    assert group.hub is None and group.version == 0 and not no_leftovers()
    with torch.no_grad():
        policy.body.bias.add_(1)
    group.update_policy_weights_(policy)
    (batch,) = take(group)
    assert batch.batch_size == (NUM_ENVS, STEPS)
    assert batch["policy_version"].eq(1).all() and batch["worker_idx"].eq(0).all()
    assert batch["fingerprint"].eq(fingerprint(policy)).all()
    assert group.digest() == {0: sha256(policy)}
    assert group.stats()[0]["pid"] == os.getpid()
    with pytest.raises(ValueError, match="3"):
        group.update_policy_weights_(policy, worker_ids=3)
    group.shutdown()
    assert group.stats()[0]["state"] == "stopped"
    group.shutdown()


def test_collecting_in_this_process_leaves_the_random_streams_alone():
    with group_of(0) as group:
        group.update_policy_weights_(Policy(1))
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        expected = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        batches = take(group, 2)
        assert torch.equal(torch.get_rng_state(), expected[0])
        assert np.random.get_state()[1].tolist() == expected[1]
        assert random.getstate() == expected[2]
    assert not torch.equal(batches[0]["observation"], batches[1]["observation"])


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"num_workers": -1}, ValueError, "num_workers=-1: at least 0"),
        ({"batches_per_epoch": 0}, ValueError, "batches_per_epoch=0: at least 1"),
        ({"max_restarts": -1}, ValueError, "max_restarts=-1: at least 0"),
        ({"seed": -1}, ValueError, "seed=-1: at least 0"),
        ({"launcher": "slurm"}, NotImplementedError, "launcher='slurm' is not there yet"),
        ({"collector": 7}, TypeError, "int is not callable"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(arguments, error, text):
    with pytest.raises(error, match=text):
        CollectorGroup(**{"collector": gym_collector, "num_workers": 1, **arguments})


def test_a_successor_is_given_every_argument_and_goes_on_after_the_counts():
    given = {
        "collector": Stream,
        "num_workers": 3,
        "weight_sync_schemes": {"policy": DistributedWeightSyncScheme()},
        "sync": False,
        "max_staleness": 2,
        "batches_per_epoch": 7,
        "max_restarts": 5,
        "env_timeout": 11.0,
        "seed": 13,
        "threads_per_worker": 17,
        "launcher": "local",
    }
    assert given.keys() == inspect.signature(CollectorGroup).parameters.keys(), "one that is not its default for each"
    group = CollectorGroup(**given)
    group.restore_version(run=4, version=5, incarnation=6)
    made = group.successor()
    assert made is not group and (made.run, made.version, made.incarnation) == (6, 5, 8)
    public = {name: value for name, value in vars(group).items() if not name.startswith("_") and name != "evaluations"}
    assert public == {name: getattr(made, name) for name in public}
    assert given.keys() - public.keys() == {"launcher"}


def test_a_group_has_a_length_only_if_it_was_given_one():
    assert len(group_of(1, batches_per_epoch=7)) == 7
    with pytest.raises(TypeError, match="batches_per_epoch"):
        len(group_of(1))


# --- weights ---------------------------------------------------------------------------------------------------------


def test_the_version_in_force_never_changes_inside_a_policy_call_or_a_batch():
    """Pushes hammer from another thread; value and twin are equal in every push, and the value says which push."""
    value_of = {0: 0.0}

    def weights(value):
        return {"value": torch.tensor(float(value)), "twin": torch.tensor(float(value))}

    with group_of(2, partial(update_at_batch_or_step, policy=Value, steps=40)) as group:
        group.update_policy_weights_(weights(0))
        stop, errors = threading.Event(), []

        def hammer():
            try:
                while not stop.is_set():
                    value_of[group.version + 1] = 7.0 * (group.version + 1)
                    group.update_policy_weights_(weights(7 * (group.version + 1)))
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=hammer)
        thread.start()
        try:
            batches = []
            while group.version < 24:  # few pushes fit into a batch of the worker that switches between batches
                batches += take(group)
            digests = [group.digest() for _ in range(10)]
        finally:
            stop.set()
            thread.join(30)
    assert not errors
    assert all(list(digest) == [0, 1] for digest in digests)
    versions = []
    for batch in batches:
        assert torch.equal(batch["begin"], batch["end"]), "weights changed inside a policy call"
        expected = torch.tensor([[value_of[int(v)] for v in row] for row in batch["policy_version"]])
        assert torch.equal(batch["begin"], expected), "a sample is labelled with another version than made it"
        by_worker = batch["policy_version"].unflatten(0, (2, NUM_ENVS))
        assert (by_worker[0] == by_worker[0, 0, 0]).all(), "update_at='batch' and two versions in one batch"
        assert (by_worker[1].diff(dim=-1) >= 0).all()
        versions.append([set(rows.unique().tolist()) for rows in by_worker])
    assert len(set.union(*(batch for batch, _ in versions))) == len(batches), "a batch did not get newer weights"
    assert any(len(step) > 1 for _, step in versions), "update_at='step' never switched within a batch"


def test_without_workers_too_pushes_from_several_threads_go_one_at_a_time():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.value = nn.Parameter(torch.zeros(200_000))

        def forward(self, td):
            td["action"] = torch.zeros(td.batch_size, dtype=torch.int64)
            td["least"] = self.value.detach().min().expand(td.batch_size).clone()
            td["most"] = self.value.detach().max().expand(td.batch_size).clone()
            return td

    with group_of(0, partial(gym_collector, policy=Wide, steps=20)) as group:
        group.update_policy_weights_({"value": torch.zeros(200_000)})
        stop, errors, pushes = threading.Event(), [], [0, 0]

        def hammer(mine):
            try:
                while not stop.is_set():
                    group.update_policy_weights_({"value": torch.full((200_000,), float(mine))})
                    pushes[mine] += 1
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=hammer, args=(mine,)) for mine in range(2)]
        for thread in threads:
            thread.start()
        batches = take(group, 10)
        stop.set()
        for thread in threads:
            thread.join(10)
        assert not errors
        assert all(torch.equal(batch["least"], batch["most"]) for batch in batches), "a torn push"
        assert group.version == sum(pushes)


@pytest.fixture(scope="module")
def streams():
    """Two workers whose collectors are nobody's; worker 1 yields one TensorDict again and again."""

    def factory(*, worker_idx, seed):
        return Stream(worker_idx=worker_idx, seed=seed, reuse=worker_idx == 1)

    with group_of(2, factory, destinations=("policy", "nets['q']")) as group:
        group.update_policy_weights_(weights_dict={"policy": Policy(0), "nets['q']": nn.Linear(2, 1)})
        yield group


def test_a_foreign_collector_without_a_gate_works_and_is_stamped(streams):
    policy = Policy(5)
    for _ in range(3):
        with torch.no_grad():
            policy.body.weight.add_(1.0)
        streams.update_policy_weights_(policy, model_id="policy")
        (batch,) = take(streams)
        assert batch.batch_size == (8,)
        assert batch["policy_version"].tolist() == [streams.version] * 8
        assert batch["worker_idx"].tolist() == [0] * 4 + [1] * 4
        assert batch["fingerprint"].eq(fingerprint(policy)).all()
    assert "collect/episode_return" not in streams.metrics(), "nobody told of any episode"


def test_two_destinations_travel_as_one_version(streams):
    policy, q = Policy(6), nn.Linear(2, 1)
    before = streams.version
    streams.update_policy_weights_(weights_dict={"policy": policy, "nets['q']": q})
    assert streams.version == before + 1
    (batch,) = take(streams)
    assert batch["fingerprint"].eq(fingerprint(policy)).all()
    assert batch["q"].eq(q.weight.sum()).all()
    assert streams.digest("nets['q']") == {0: sha256(q), 1: sha256(q)}

    with torch.no_grad():
        q.weight.add_(1)
    streams.update_policy_weights_(weights=q, model_id="nets['q']")  # one alone: the other one stays
    assert streams.version == before + 2
    assert streams.digest("nets['q']") == {0: sha256(q), 1: sha256(q)}
    assert streams.digest("policy") == {0: sha256(policy), 1: sha256(policy)}


def test_each_worker_can_be_given_its_own_weights_and_be_left_out(streams):
    first, second, third = Policy(7), Policy(8), Policy(9)
    streams.update_policy_weights_({0: first, 1: second}, model_id="policy")
    assert streams.digest() == {0: sha256(first), 1: sha256(second)}
    streams.update_policy_weights_(third, model_id="policy", worker_ids=[1])
    assert streams.digest() == {0: sha256(first), 1: sha256(third)}
    assert streams.stats()[1]["version"] == streams.version == streams.stats()[0]["version"] + 1
    streams.update_policy_weights_(TensorDict.from_module(second), model_id="policy", worker_ids=0)
    assert streams.digest() == {0: sha256(second), 1: sha256(third)}
    before = streams.version
    for wrong in (2, -1, [0, 2]):
        with pytest.raises(ValueError, match=r"0 \.\. 1"):
            streams.update_policy_weights_(third, model_id="policy", worker_ids=wrong)
    with pytest.raises(ValueError, match=r"not for \[1\]"):
        streams.update_policy_weights_({0: first}, model_id="policy")
    assert streams.version == before


def test_weights_that_do_not_fit_are_named_and_take_no_version(streams):
    before, digest = streams.version, streams.digest()
    with pytest.raises(LayoutMismatchError, match=r"body\.weight") as caught:
        streams.update_policy_weights_(Policy(0, width=5), model_id="policy")
    assert "body.weight" in caught.value.mismatched
    with pytest.raises(LayoutMismatchError, match=r"norm\.running_mean"):
        streams.update_policy_weights_(Policy(0, batch_norm=False), model_id="policy")
    with pytest.raises(ValueError, match=r"no scheme for 'polizy'.*nets\['q'\].*policy"):
        streams.update_policy_weights_(Policy(0), model_id="polizy")
    with pytest.raises(ValueError, match="give model_id or weights_dict"):
        streams.update_policy_weights_(Policy(0))
    assert (streams.version, streams.digest()) == (before, digest)
    streams.update_policy_weights_(Policy(3), model_id="policy")
    assert streams.digest() == {0: sha256(Policy(3)), 1: sha256(Policy(3))}


def test_connecting_needs_weights_for_exactly_the_schemes_that_there_are():
    text = r"given for \['policy'\].*\[\"nets\['q'\]\", 'policy'\]"
    with group_of(0, Stream, destinations=("policy", "nets['q']")) as group, pytest.raises(ValueError, match=text):
        group.update_policy_weights_(Policy(0), model_id="policy")


def test_weights_that_are_given_twice_or_not_at_all_are_refused():
    policy = Policy(0)
    with group_of(0, Stream) as group:
        for twice in ({"weights": policy}, {"policy": policy}):
            with pytest.raises(ValueError, match="give the weights once"):
                group.update_policy_weights_(policy, **twice)
        group.update_policy_weights_(policy)
        for push in (group.update_policy_weights_, group.send_async):
            with pytest.raises(ValueError, match=r"no weights to push; the group has schemes for \['policy'\]"):
                push(weights_dict={})
        assert group.version == 0
    with group_of(0, Stream, destinations=()) as group, pytest.raises(ValueError, match=r"no weights to push.* \[\]"):
        group.send_async()


def test_without_workers_too_a_push_is_for_those_that_are_named():
    with group_of(0, Stream) as group:
        group.update_policy_weights_(Policy(1))
        for wrong in (False, 1, [0, 1], "0"):
            with pytest.raises(ValueError, match=r"worker_ids holds .*; workers are numbered 0 \.\. 0"):
                group.update_policy_weights_(Policy(2), worker_ids=wrong)
        group.update_policy_weights_(Policy(2), worker_ids=[])
        assert group.version == 1 and group.digest() == {0: sha256(Policy(1))}
        group.update_policy_weights_(Policy(2), worker_ids=[0, 0])
        assert group.version == 2 and group.digest() == {0: sha256(Policy(2))}


# --- batches ---------------------------------------------------------------------------------------------------------


def test_after_an_interrupted_wait_the_next_batch_is_a_new_one(streams):
    """Ctrl-C in a notebook: the batch that was under way has old weights, and must not be taken for the next one."""

    class Interrupted(Exception):
        pass

    def interrupt():
        raise Interrupted

    policy = Policy(11)
    streams.update_policy_weights_(policy, model_id="policy")
    take(streams)
    streams.look_around = interrupt
    try:
        for _ in range(3):
            with pytest.raises(Interrupted):
                take(streams, 1000)
            with torch.no_grad():
                policy.head.bias.add_(1.0)
            streams.update_policy_weights_(policy, model_id="policy")
    finally:
        streams.look_around = lambda: None
    for _ in range(2):
        (batch,) = take(streams)
        assert batch["policy_version"].tolist() == [streams.version] * 8
        assert batch["fingerprint"].eq(fingerprint(policy)).all()


def test_iterating_has_no_side_effect_until_a_batch_is_asked_for(streams):
    frames = streams.frames
    iter(streams), iter(streams)
    assert streams.frames == frames


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ("ends", "Endless ended: it has to go on making batches"),
        ("gate without version", "Endless has a gate of its own, and has to write 'policy_version'"),
        ("no dimension", r"Endless made a batch of batch size \[\]: it needs a first dimension"),
    ],
)
def test_a_collector_that_breaks_its_contract_is_told_how(mistake, text):
    with group_of(0, partial(Endless, mistake)) as group:
        group.update_policy_weights_(Policy(0))
        with pytest.raises(RuntimeError, match=text):
            take(group)


def test_what_is_no_collector_is_refused():
    with (
        group_of(0, lambda worker_idx, seed: NoCollector()) as group,
        pytest.raises(TypeError, match=r"NoCollector; a collector is iterable and has close\(\)"),
    ):
        group.update_policy_weights_(Policy(0))


# --- workers ---------------------------------------------------------------------------------------------------------


def test_a_worker_imports_neither_lightning_nor_hydra_and_is_no_rank_of_the_trainer(no_leftovers, monkeypatch):
    for name in Report.variables:
        monkeypatch.setenv(name, "3")
    with group_of(1, Report, threads_per_worker=1) as group:
        group.update_policy_weights_(nn.Linear(1, 1))
        (batch,) = take(group)
    imported = dict(zip(Report.modules, batch["imported"][0].tolist(), strict=True))
    variables = dict(zip(Report.variables, batch["variables"][0].tolist(), strict=True))
    assert not any(imported.values()), imported
    assert not any(variables.values()), variables
    assert not batch["default_group"].any()
    assert batch["threads"].tolist() == [1]
    assert not torch.distributed.is_initialized()


SCRIPT = """
from functools import partial

import torch
from torch import nn

from lightning_weightsync import CollectorGroup, DistributedWeightSyncScheme
from tests.helpers.collectors import gym_collector
from tests.helpers.policies import Policy

class Mine(Policy):
    pass

torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
policy = Mine(1)
policy.logits(torch.rand(8, 3)).sum().backward()  # starts threads that a fork would lose
schemes = {"policy": DistributedWeightSyncScheme()}
with CollectorGroup(partial(gym_collector, policy=Mine), 2, weight_sync_schemes=schemes) as group:
    group.update_policy_weights_(policy)
    print(next(iter(group))["policy_version"].unique().tolist(), "once")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["file", "-c"])
def test_a_script_needs_no_main_guard_and_runs_once(no_leftovers, tmp_path, how):
    """Workers do not import it again; its classes and functions come along all the same."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    arguments = [str(script)] if how == "file" else ["-c", SCRIPT]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, *arguments], env=environment, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[0] once\n"), done.stderr
    assert "Traceback" not in done.stderr


class TrainsItself(Stream):
    """Fits something in a Trainer of its own before it collects, as a model of the world may be."""

    def __init__(self, *, worker_idx, seed):
        super().__init__(worker_idx=worker_idx, seed=seed)
        import lightning.pytorch as pl
        from lightning.pytorch.demos.boring_classes import BoringModel

        self.trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        self.trainer.fit(BoringModel())

    def __iter__(self):
        for batch in super().__iter__():
            yield batch.set("world", torch.full((4,), self.trainer.world_size))


@pytest.mark.slow
def test_a_trainer_inside_a_worker_takes_itself_for_no_rank(no_leftovers, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "3")
    with group_of(1, TrainsItself) as group:
        group.update_policy_weights_(Policy(1))
        assert take(group)[0]["world"].tolist() == [1] * 4


def test_workers_differ_from_each_other_and_a_run_can_be_repeated():
    def first_batches(seed, num_workers):
        with group_of(num_workers, seed=seed) as group:
            group.update_policy_weights_(Policy(0))
            return torch.cat(take(group, 2), dim=-1)

    both = first_batches(7, 2)
    once, again, other = (first_batches(seed, 0) for seed in (7, 7, 8))
    for key in ("observation", "action"):
        assert torch.equal(once[key], again[key])
        assert torch.equal(once[key], both[key][:NUM_ENVS]), "worker 0 does not collect what one process alone does"
    rows = torch.cat([both, other])["observation"][..., 2]
    assert len({tuple(row.tolist()) for row in rows}) == len(rows), "two workers or seeds have the same episodes"
    torch.manual_seed(7)
    assert torch.equal(first_batches(None, 0)["observation"], once["observation"]), "seed=None is not torch's"


@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_two_runs_of_one_seed_give_identical_batches(num_workers):
    def start():
        group = group_of(num_workers, seed=3)
        group.launch()  # both runs' interpreters import at the same time
        return group

    def batches_of(group):
        kept, clones, policy = [], [], Policy(0)
        with group:
            group.update_policy_weights_(policy)
            for batch in islice(group, 5):
                kept.append(batch)
                clones.append(batch.clone())
                with torch.no_grad():
                    policy.body.weight.mul_(-1.5)
                group.update_policy_weights_(policy)
        return kept, clones

    runs = [start(), start()]
    (once, clones), (again, _) = map(batches_of, runs)
    for first, second, clone in zip(once, again, clones, strict=True):
        assert first["worker_idx"][:, 0].tolist() == [w for w in range(num_workers) for _ in range(NUM_ENVS)]
        for key in first.keys(include_nested=True, leaves_only=True):
            assert torch.equal(first[key], second[key]), key
            assert torch.equal(first[key], clone[key]), "a batch that was kept has changed"
    assert [int(batch["policy_version"].max()) for batch in once] == list(range(5))
    assert len({tuple(batch["action"].flatten().tolist()) for batch in once}) > 1


def test_the_parts_of_several_workers_are_copied_once_and_lie_in_one_piece_from_then_on(monkeypatch, no_leftovers):
    copies = []
    concatenated = BatchMemory.concatenated
    monkeypatch.setattr(BatchMemory, "concatenated", lambda *args: copies.append(len(args[1])) or concatenated(*args))
    with group_of(2, seed=3) as group:
        group.update_policy_weights_(Policy(0))
        kept = take(group)[0].clone()
        assert copies == [2], "workers' first batches tell what they look like"
        seen = [kept]
        for _ in range(6):
            (batch,) = take(group)
            assert batch["worker_idx"][:, 0].tolist() == [0] * NUM_ENVS + [1] * NUM_ENVS
            seen.append(batch.clone())
            del batch
        assert copies == [2]
        held = take(group, 2)
        assert copies == [2]
        held += take(group, 2)  # who keeps more than are lent gets copies
        assert copies == [2, 1, 1]
        seen += [batch.clone() for batch in held]
        group.resize(3)
        del held
        assert [len(batch) for batch in take(group, 2)] == [3 * NUM_ENVS] * 2
        assert copies == [2, 1, 1, 3]
    copies.clear()
    with group_of(2, seed=3) as group:  # the same, all of them kept
        group.update_policy_weights_(Policy(0))
        for batch, expected in zip(take(group, len(seen)), seen, strict=True):
            for key in expected.keys(include_nested=True, leaves_only=True):
                assert torch.equal(batch[key], expected[key]), key


def uneven(*, worker_idx, seed):
    """Worker 1 has twice as many environments."""
    return gym_collector(worker_idx=worker_idx, seed=seed, num_envs=NUM_ENVS * (1 + worker_idx))


def test_workers_may_have_parts_of_different_sizes(no_leftovers):
    with group_of(2, uneven) as group:
        group.update_policy_weights_(Policy(0))
        for batch in take(group, 3):
            assert batch.batch_size == (3 * NUM_ENVS, STEPS)
            assert batch["worker_idx"][:, 0].tolist() == [0] * NUM_ENVS + [1] * 2 * NUM_ENVS


class Raises(Stream):
    """Its second batch raises, once; its batches are lazy stacks."""

    made = 0

    def __iter__(self):
        for batch in super().__iter__():
            self.made += 1
            if self.made == 2:
                raise KeyError("the second one")
            yield LazyStackedTensorDict(*batch.unbind(0), stack_dim=0) if self.made == 3 else batch


def test_without_workers_collecting_goes_on_after_an_exception_and_takes_any_tensordict():
    with group_of(0, Raises) as group:
        group.update_policy_weights_(Policy(0))
        take(group)
        with pytest.raises(KeyError, match="the second one"):
            take(group)
        assert group.stats()[0]["state"] == "connected"
        third, fourth = take(group, 2)
        assert third["observation"].shape == fourth["observation"].shape == (4, 3)
        assert not torch.equal(third["observation"], fourth["observation"])


def test_a_resumed_group_goes_on_in_a_newer_run_with_other_episodes():
    with group_of(0, seed=7) as group:
        group.update_policy_weights_(Policy(0))
        (first,) = take(group)
        group.update_policy_weights_(Policy(0))
        state = pickle.loads(pickle.dumps(group.state_dict()))
        with pytest.raises(RuntimeError, match="before it is connected"):
            group.load_state_dict(state)
    resumed = group_of(0, seed=1234)
    for _ in range(2):  # loading twice is loading once
        resumed.load_state_dict(state)
    with resumed:
        resumed.update_policy_weights_(Policy(0))
        assert (resumed.run, resumed.version, resumed.frames) == (2, 1, NUM_ENVS * STEPS)
        (batch,) = take(resumed)
        assert batch["policy_version"].eq(1).all()
        assert not torch.equal(batch["observation"], first["observation"])
        assert resumed.metrics()["collect/episode_length"] == pytest.approx(group.metrics()["collect/episode_length"])


def test_versions_alone_are_enough_to_go_on_with_other_episodes():
    """Only the callback's state is restored where the loader is not the group itself, or Lightning set it up early."""
    with group_of(0, seed=7) as group:
        group.update_policy_weights_(Policy(0))
        (first,) = take(group)
    resumed = group_of(0, seed=7)
    resumed.restore_version(group.run, group.version, group.incarnation)
    with resumed:
        resumed.update_policy_weights_(Policy(0))
        (batch,) = take(resumed)
    assert not torch.equal(batch["observation"], first["observation"])


# --- faults ----------------------------------------------------------------------------------------------------------


def test_a_killed_worker_is_named_the_others_are_served_and_shutdown_is_bounded(no_leftovers):
    factory = partial(misbehaving_collector, fault=collectors.spin, at=1, only=1)
    group = group_of(3, factory, max_restarts=0)
    group.start({"policy": Policy(0)})
    pids = {index: stat["pid"] for index, stat in group.stats().items()}
    os.kill(pids[2], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=rf"worker 2 \(pid {pids[2]}\) ended: killed by SIGKILL") as caught:
        group.update_policy_weights_(Policy(1))
    assert time.monotonic() - started < 3
    assert list(caught.value.failed) == [2]
    stats = group.stats()
    assert [stats[index]["version"] for index in range(3)] == [1, 1, 0]
    assert (stats[2]["state"], stats[0]["state"]) == ("failed", "connected") and "SIGKILL" in stats[2]["cause"]

    before = cpu_seconds(pids[1])
    with pytest.raises(WorkerDied, match="worker 2"):
        take(group)
    # The others have begun, unless they are told to stop before: worker 1 never ends.
    assert wait_until(lambda: cpu_seconds(pids[1]) > before + 0.2, 10)
    started = time.monotonic()
    group.shutdown(timeout=2)
    assert 1.5 < time.monotonic() - started < 4
    started = time.monotonic()
    group.shutdown(timeout=2)
    assert time.monotonic() - started < 0.1
    assert not no_leftovers() and not zombies()


def test_a_worker_that_exits_while_it_imports_is_named_at_once(no_leftovers):
    group = group_of(2, partial(misbehaving_factory, fault=collectors.vanish, only=1))
    group.start()
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=r"worker 1 \(pid \d+\) ended: exit code 9") as caught:
        group.update_policy_weights_(Policy(0))
    assert list(caught.value.failed) == [1]
    assert time.monotonic() - started < 30, "the deadline of connecting (64 s) was waited for"
    assert not no_leftovers()


def test_a_factory_that_does_not_pickle_is_a_type_error(no_leftovers):
    lock = threading.Lock()

    def factory(*, worker_idx, seed):
        return lock

    group = group_of(1, factory)
    group.start()
    with pytest.raises(TypeError, match=r"cannot be pickled.*inside the factory"):
        group.update_policy_weights_(Policy(0))
    assert not group.running


def test_interpreters_that_were_told_nothing_yet_are_not_waited_for(no_leftovers):
    group = group_of(2)
    group.launch()
    started = time.monotonic()
    group.shutdown()
    assert time.monotonic() - started < 1


def test_a_worker_that_is_not_ready_in_time_is_named_and_stopped(no_leftovers):
    group = group_of(1, partial(misbehaving_factory, fault=collectors.doze, only=0))
    group.weight_sync_schemes["policy"].connect_timeout = 1.0
    group.start()
    pid = group.stats()[0]["pid"]
    started = time.monotonic()
    with pytest.raises(WeightSyncTimeout, match=rf"worker 0 \(pid {pid}\) was still starting after 1\.\d s"):
        group.update_policy_weights_(Policy(0))
    assert time.monotonic() - started < 6
    assert not no_leftovers() and not group.running


@pytest.mark.slow
def test_shutdown_from_another_thread_ends_a_wait_for_a_batch(no_leftovers):
    group = group_of(1, partial(misbehaving_collector, fault=collectors.doze, at=2, only=0))
    group.start({"policy": Policy(0)})
    threading.Timer(0.5, group.shutdown, args=(1.0,)).start()
    started = time.monotonic()
    with pytest.raises((WeightSyncError, RuntimeError)):
        take(group)
    assert time.monotonic() - started < 5
    wait_until(lambda: not group.running, 5)
