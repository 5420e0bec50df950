"""A group with ``sync=False``, without Lightning: order, versions, staleness, back-pressure, ends."""

import logging
import os
import signal
import threading
import time
from collections import Counter
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch

from lightning_weightsync import (
    CollectorGroup,
    DistributedWeightSyncScheme,
    WeightSyncError,
    WeightSyncTimeout,
    WorkerDied,
    WorkerError,
)
from lightning_weightsync.collectors.late import EVERY
from lightning_weightsync.collectors.rollouts import NUM_SLOTS
from tests.helpers import collectors
from tests.helpers.collectors import (
    NUM_ENVS,
    STEPS,
    Blocks,
    Stream,
    gym_collector,
    misbehaving_collector,
    paced_collector,
    update_at_batch_or_step,
)
from tests.helpers.envs import steps_before
from tests.helpers.policies import Policy, Value, fingerprint, sha256
from tests.helpers.processes import wait_until

FRAMES = NUM_ENVS * STEPS


def group_of(num_workers, collector=gym_collector, *, timeout=60.0, **kwargs):
    schemes = {"policy": DistributedWeightSyncScheme(timeout=timeout)}
    return CollectorGroup(collector, num_workers, weight_sync_schemes=schemes, sync=False, **kwargs)


def take(group, count=1):
    return list(islice(group, count))


def whose(batch):
    (worker,) = batch["worker_idx"].unique().tolist()
    return worker


def places(batch):
    """For each environment and column, how many steps the environment had made before."""
    return [[steps_before(int(episode), int(step)) for episode, step, _ in row] for row in batch["observation"]]


def number_of(batch):
    """How many batches its worker had made before; every row must be its unbroken continuation."""
    first = places(batch)[0][0]
    assert first % STEPS == 0
    assert places(batch) == [list(range(first, first + STEPS))] * NUM_ENVS
    return first // STEPS


def age(group, batch):
    return group.version - int(batch["policy_version"].min())


def all_wait(group):
    """Whether every worker has filled all of its slots."""
    return all(stat["state"] == "connected" for stat in group.stats().values())


# --- batches ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uneven():
    """Worker 1 needs 60 ms for a batch, worker 0 next to nothing."""
    with group_of(2, partial(paced_collector, seconds=(0.0, 0.01))) as group:
        group.update_policy_weights_(Policy(0))
        yield group


def test_batches_come_one_workers_at_a_time_in_its_order_none_lost_and_none_twice(uneven):
    batches, kept = [], None
    counts = cycle((1, 30, 7))
    while min(Counter(map(whose, batches))[worker] for worker in range(2)) < 5:
        for batch in islice(uneven, next(counts)):  # an epoch may be left early: what is ready goes to the next one
            kept = (batch, batch.clone()) if kept is None else kept
            batches.append(batch)
            uneven.send_async({"policy": Policy(len(batches))})
    assert all(batch.batch_size == (NUM_ENVS, STEPS) for batch in batches)
    for worker in range(2):
        numbers = [number_of(batch) for batch in batches if whose(batch) == worker]
        assert numbers == list(range(len(numbers)))
    assert Counter(map(whose, batches))[0] > 2 * Counter(map(whose, batches))[1], "the fast worker waited"
    assert (kept[0] == kept[1]).all(), "a batch that the trainer keeps was overwritten"
    assert uneven.frames == len(batches) * FRAMES
    collected = sum(stat["frames"] for stat in uneven.stats().values())
    assert collected <= uneven.frames + 2 * NUM_SLOTS * FRAMES
    assert uneven.metrics()["collect/batches_dropped"] == 0
    assert 1 < uneven.metrics()["collect/episode_length"] < 5


def test_a_worker_without_a_free_slot_waits_and_applies_a_push_at_once(uneven):
    take(uneven)
    assert wait_until(lambda: all_wait_after_look(uneven), 10)
    frames = {index: stat["frames"] for index, stat in uneven.stats().items()}
    policy = Policy(77)
    started = time.monotonic()
    uneven.update_policy_weights_(policy)
    assert time.monotonic() - started < 0.5
    assert uneven.digest() == dict.fromkeys((0, 1), sha256(policy))
    time.sleep(0.2)
    assert frames == {index: stat["frames"] for index, stat in uneven.stats().items()}, "somebody went on collecting"
    old = take(uneven, 2 * NUM_SLOTS)
    assert all(batch["policy_version"].max() < uneven.version for batch in old)
    assert (take(uneven, 3)[-1]["policy_version"] == uneven.version).all()


def all_wait_after_look(group):
    """Ready batches are noticed when one is asked for; this looks without asking."""
    group._pool._take_batches()
    return all_wait(group)


def test_after_an_interrupted_wait_nothing_is_lost(uneven):
    class Interrupted(Exception):
        pass

    def interrupt():
        raise Interrupted

    batches, interrupted = take(uneven, 12), 0
    uneven.look_around = interrupt
    try:
        while interrupted < 3:
            try:
                batches += take(uneven)
            except Interrupted:
                interrupted += 1
    finally:
        uneven.look_around = lambda: None
    batches += take(uneven, 20)
    for worker in range(2):
        numbers = [number_of(batch) for batch in batches if whose(batch) == worker]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_without_workers_it_is_the_same_as_a_synchronous_group():
    with group_of(0, max_staleness=0) as group:
        for seed in range(4):
            policy = Policy(seed)
            group.update_policy_weights_(policy)
            (batch,) = take(group)
            assert batch["policy_version"].eq(seed).all()
            assert batch["fingerprint"].eq(fingerprint(policy)).all()
        assert group.metrics()["collect/batches_dropped"] == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"max_staleness": -1}, "max_staleness=-1: at least 0"), ({"sync": True, "max_staleness": 2}, "needs sync=False")],
)
def test_a_bound_that_makes_no_sense_is_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        CollectorGroup(gym_collector, 1, **{"sync": False, **arguments})


# --- versions --------------------------------------------------------------------------------------------------------


def value_weights(version):
    value = torch.tensor(7.0 * version)
    return {"value": value, "twin": value.clone()}


@pytest.mark.parametrize("blocking", [False, True])
def test_every_sample_has_the_version_that_chose_its_action(blocking):
    """Worker 0 switches between two batches, worker 1 between two policy calls; pushes hammer from another thread."""
    with group_of(2, partial(update_at_batch_or_step, policy=Value, steps=40)) as group:
        group.update_policy_weights_(value_weights(0))
        stop, errors = threading.Event(), []

        def hammer():
            try:
                while not stop.is_set():
                    if blocking:
                        group.update_policy_weights_(value_weights(group.version + 1))
                    else:
                        group.send_async({"policy": value_weights(group.version + 1)})
                        time.sleep(0.01)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=hammer)
        thread.start()
        try:
            batches = take(group, 30)
        finally:
            stop.set()
            thread.join(30)
        assert not errors
        group.update_policy_weights_(value_weights(group.version + 1))
        assert {stat["version"] for stat in group.stats().values()} == {group.version}
    spread = {0: [], 1: []}
    newest = {0: 0, 1: 0}
    for batch in batches:
        versions = batch["policy_version"]
        assert torch.equal(batch["begin"], batch["end"]), "weights changed inside a policy call"
        assert torch.equal(batch["begin"], 7.0 * versions), "a sample is labelled with another version than made it"
        assert (versions == versions[0]).all() and (versions.diff(dim=-1) >= 0).all()
        assert versions.min() >= newest[whose(batch)], "a worker went back to an older version"
        newest[whose(batch)] = int(versions.max())
        spread[whose(batch)].append(len(versions.unique()))
    assert set(spread[0]) == {1}, "update_at='batch' and two versions in one batch"
    assert max(spread[1]) > 1, "update_at='step' never switched within a batch"
    assert min(newest.values()) > 2


@pytest.mark.slow
def test_a_blocking_push_waits_for_the_slowest_workers_next_safe_point():
    """600 ms for a batch: worker 0 switches after it, worker 1 after one of its steps."""
    factory = partial(update_at_batch_or_step, env=partial(collectors.SlowEnv, 0.1))
    with group_of(2, factory) as group:
        group.update_policy_weights_(Policy(0))
        take(group)
        for seed in range(1, 4):
            policy = Policy(seed)
            started = time.monotonic()
            group.update_policy_weights_(policy)
            assert time.monotonic() - started < 2
            assert group.digest() == dict.fromkeys((0, 1), sha256(policy))
            take(group, 2)
        one, two = [], []
        for worker, found in ((0, one), (1, two)):
            for _ in range(3):
                take(group)
                started = time.monotonic()
                group.update_policy_weights_(Policy(5), worker_ids=worker)
                found.append(time.monotonic() - started)
        assert max(two) < 0.55, "a worker with update_at='step' waited for the end of its batch"


@pytest.mark.slow
def test_a_blocking_push_that_finds_no_safe_point_in_time_names_the_worker_and_the_next_one_works():
    factory = partial(paced_collector, seconds=(0.0, 0.3))
    with group_of(2, factory, timeout=0.5) as group:
        group.update_policy_weights_(Policy(0))
        take(group)
        with pytest.raises(WeightSyncTimeout, match="worker 1") as caught:
            group.update_policy_weights_(Policy(1))
        assert list(caught.value.failed) == [1]
        group.weight_sync_schemes["policy"].timeout = 30.0
        policy = Policy(2)
        group.update_policy_weights_(policy)
        assert group.digest() == dict.fromkeys((0, 1), sha256(policy))
        assert {whose(batch) for batch in take(group, 8)} == {0, 1}


@pytest.mark.slow
def test_a_foreign_collector_without_a_gate_is_stamped_with_what_made_it():
    with group_of(1, Stream) as group:
        policies = [Policy(0)]
        group.update_policy_weights_(policies[0])
        for _ in range(20):
            (batch,) = take(group)
            (version,) = batch["policy_version"].unique().tolist()
            assert batch["fingerprint"].eq(fingerprint(policies[version])).all()
            policies.append(Policy(len(policies)))
            group.send_async({"policy": policies[-1]})


# --- staleness -------------------------------------------------------------------------------------------------------


def learn(group, count, seconds):
    """Batches per second of a trainer that needs ``seconds`` for each, and how old each one was."""
    policy = Policy(0)
    group.update_policy_weights_(policy)
    batches = iter(group)
    for _ in range(3):
        next(batches)
    ages, workers, started = [], [], time.monotonic()
    for _ in range(count):
        batch = next(batches)
        ages.append(age(group, batch))
        workers.append(whose(batch))
        time.sleep(seconds)
        group.send_async({"policy": policy})
    return count / (time.monotonic() - started), ages, workers


@pytest.mark.slow
def test_no_batch_is_older_than_the_bound_and_a_slow_worker_does_not_slow_the_trainer():
    """Worker 1 needs 240 ms for a batch, in which the trainer learns from eight of the others'."""
    factory = partial(paced_collector, seconds=(0.0, 0.04))
    rates = {}
    for bound in (None, 2):
        with group_of(2, factory, max_staleness=bound) as group:
            rates[bound], ages, workers = learn(group, 120, 0.03)
            dropped = {index: stat["dropped"] for index, stat in group.stats().items()}
            assert group.metrics()["collect/batches_dropped"] == sum(dropped.values())
        if bound is None:
            assert max(ages) > 2 and workers.count(1) > 5 and not any(dropped.values())
        else:
            assert max(ages) <= bound
            assert 1 <= sum(dropped.values()) <= 20, dropped
    assert rates[2] >= 0.9 * rates[None], rates


@pytest.mark.slow
def test_what_is_dropped_is_counted_and_told_and_nothing_else_is_missing(caplog):
    """Nobody can foresee three pushes at once every now and then."""
    caplog.set_level(logging.INFO, "lightning_weightsync")
    started = time.monotonic()
    with group_of(2, partial(paced_collector, seconds=(0.001, 0.001)), max_staleness=1) as group:
        group.update_policy_weights_(Policy(0))
        numbers = {0: [], 1: []}
        for count, batch in enumerate(islice(group, 200)):
            assert age(group, batch) <= 1
            numbers[whose(batch)].append(number_of(batch))
            for _ in range(3 if count % 10 == 0 else 1):
                group.send_async({"policy": Policy(count)})
        stats = group.stats()
        for worker in range(2):
            assert numbers[worker] == sorted(set(numbers[worker]))
            missing = numbers[worker][-1] + 1 - len(numbers[worker])
            assert missing <= stats[worker]["dropped"] <= missing + NUM_SLOTS
        assert 5 < sum(stat["dropped"] for stat in stats.values()) < 100
        told = [r.getMessage() for r in caplog.records if "dropped as too old" in r.getMessage()]
        assert 1 <= len(told) <= 2 * (1 + (time.monotonic() - started) // EVERY) and "(max_staleness=1)" in told[0]
        assert group.frames == 200 * FRAMES
        assert len(numbers[0]) > 50 and len(numbers[1]) > 50


# --- ends ------------------------------------------------------------------------------------------------------------


def test_an_error_in_a_worker_ends_the_wait_for_any_batch_with_its_traceback(no_leftovers):
    """Worker 0 never comes to the end of its first batch."""
    group = group_of(2, partial(misbehaving_collector, fault=collectors.stumble, at=STEPS * 4, only=1))
    with group:
        group.update_policy_weights_(Policy(0))
        with pytest.raises(WorkerError, match=r"worker 1 \(pid \d+\) raised in phase 'collect'") as caught:
            take(group, 1000)
        assert "in stumble" in caught.value.remote_traceback


def test_a_killed_worker_is_named_while_the_trainer_waits(no_leftovers):
    with group_of(2, partial(misbehaving_collector, fault=collectors.doze, at=1, only=0), max_restarts=0) as group:
        group.update_policy_weights_(Policy(0))
        take(group)
        pid = group.stats()[1]["pid"]
        killer = threading.Timer(0.3, os.kill, args=(pid, signal.SIGKILL))
        killer.start()
        started = time.monotonic()
        with pytest.raises(WorkerDied, match=rf"worker 1 \(pid {pid}\) ended: killed by SIGKILL"):
            take(group, 10**6)
        assert time.monotonic() - started < 3
        started = time.monotonic()
        group.shutdown(timeout=1.0)  # worker 0 hangs in its environment
        assert time.monotonic() - started < 2


def test_a_killed_workers_finished_batches_arrive_and_the_others_go_on_until_it_is_replaced(no_leftovers):
    with group_of(2, partial(paced_collector, seconds=(0.005, 0.005))) as group:
        policy = Policy(0)
        group.update_policy_weights_(policy)
        take(group, 4)
        assert wait_until(lambda: all_wait_after_look(group), 10)
        pid = group.stats()[0]["pid"]
        os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: group.stats()[0]["pid"] != pid or group.stats()[0]["state"] == "failed", 5)
        batches = take(group, 2 * NUM_SLOTS)
        assert Counter(map(whose, batches)) == {0: NUM_SLOTS, 1: NUM_SLOTS}
        policy = Policy(1)
        group.update_policy_weights_(policy)
        deadline = time.monotonic() + 60
        while not (group.stats()[0]["restarts"] and whose(batches[-1]) == 0):
            batches += take(group)
            assert time.monotonic() < deadline
        assert batches[-1]["policy_version"].eq(group.version).all()
        assert batches[-1]["fingerprint"].eq(fingerprint(policy)).all()
        numbers = [number_of(batch) for batch in batches if whose(batch) == 1]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert number_of(batches[-1]) == 0, "the replacement's first batch is not its first one"


@pytest.mark.slow
def test_more_and_fewer_workers_between_two_batches(no_leftovers):
    with group_of(1, partial(paced_collector, seconds=(0.005,) * 3), max_staleness=4) as group:
        group.update_policy_weights_(Policy(0))
        take(group, 3)
        group.resize(3)
        assert {whose(batch) for batch in take(group, 40)} == {0, 1, 2}
        group.resize(1)
        assert {whose(batch) for batch in take(group, 10)} == {0}


@pytest.mark.slow
def test_shutdown_from_another_thread_ends_a_wait_for_a_batch(no_leftovers):
    group = group_of(1, partial(misbehaving_collector, fault=collectors.doze, at=1, only=0))
    group.start({"policy": Policy(0)})
    threading.Timer(0.5, group.shutdown, args=(1.0,)).start()
    started = time.monotonic()
    with pytest.raises((WeightSyncError, RuntimeError)):
        take(group)
    assert time.monotonic() - started < 5
    wait_until(lambda: not group.running, 5)


@pytest.mark.slow
def test_stopping_waits_for_the_batch_in_progress_and_not_for_those_asked_for_ahead(no_leftovers):
    group = group_of(1, partial(paced_collector, seconds=(0.2,)))  # 1.2 s for a batch
    group.start({"policy": Policy(0)})
    take(group)
    assert group.stats()[0]["state"] == "collecting"
    started = time.monotonic()
    group.shutdown()
    assert time.monotonic() - started < 1.9


def test_memory_and_descriptors_do_not_grow(no_leftovers):
    def held(pids):
        found = []
        for pid in pids:
            resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            found.append((resident, len(os.listdir(f"/proc/{pid}/fd"))))
        return found

    def mapped():
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {line.split()[4] for line in lines if "memfd:lightning_weightsync" in line}

    mapped_before = mapped()
    with group_of(2, Blocks, max_staleness=3) as group:
        policy = Policy(0)
        group.update_policy_weights_(policy)
        pids = [os.getpid(), *(stat["pid"] for stat in group.stats().values())]
        batches = iter(group)

        def learn_from(count):
            for _ in range(count):
                batch = next(batches)
                group.send_async({"policy": policy})
            return batch

        kept = learn_from(40)
        assert kept["block"].nbytes == Blocks.nbytes
        value = kept["block"].clone()
        before = held(pids)
        assert mapped() > mapped_before
        learn_from(300)
        for (memory, descriptors), (memory_then, descriptors_then) in zip(held(pids), before, strict=True):
            assert memory - memory_then < 30 * Blocks.nbytes
            # At most six slots of weights are made (two per worker, and two), and not all at the start.
            assert descriptors <= descriptors_then + 8
    assert torch.equal(kept["block"], value)
    del kept
    assert mapped() <= mapped_before, "the group that was stopped holds on to its memory"
    assert group.version == 340
