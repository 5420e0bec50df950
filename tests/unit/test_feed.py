"""Which batch is next, and whom to ask: step by step, and in a simulated run of workers and a trainer."""

import math
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_weightsync.collectors.feed import LONGEST_PAUSE, Feed

SLOTS = 2


def asked(feed, version=0, *, waiting=True):
    return [(request.worker, request.slot) for request in feed.requests(version, waiting=waiting)]


def hand_over(feed, version):
    batch = feed.next(version)
    feed.hand_over(batch, version)
    return batch.worker, batch.slot


# --- without a bound -------------------------------------------------------------------------------------------------


def test_every_free_slot_is_asked_for_at_once_everybodys_first_ones_first():
    feed = Feed(range(3), SLOTS)
    assert asked(feed) == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    assert asked(feed) == [] and feed.next(0) is None
    assert all(feed.collecting(worker) for worker in range(3))


def test_a_slot_is_asked_for_again_once_its_batch_has_been_handed_over():
    feed = Feed([0], SLOTS)
    asked(feed)
    feed.arrived(0, 0, 0)
    assert asked(feed) == [] and feed.collecting(0)
    assert feed.next(0) == feed.next(0), "a batch that was not handed over is gone"
    assert hand_over(feed, 0) == (0, 0)
    assert feed.next(0) is None
    assert asked(feed, waiting=False) == [(0, 0)]


def test_a_lent_slot_is_not_asked_for_until_it_is_given_back_and_a_spare_one_takes_its_place():
    feed = Feed([0], SLOTS, spare=2)
    assert asked(feed) == [(0, 0), (0, 1)], "spare slots are not for collecting further ahead"
    for slot, next_slot in ((0, 2), (1, 3)):
        feed.arrived(0, slot, 0)
        feed.hand_over(feed.next(0), 0, lent=True)
        assert asked(feed) == [(0, next_slot)]
    feed.arrived(0, 2, 0)
    feed.hand_over(feed.next(0), 0)
    assert asked(feed) == [(0, 2)]
    feed.give_back(0, 1)
    feed.give_back(0, 0)
    assert asked(feed) == []
    feed.arrived(0, 3, 0)
    feed.hand_over(feed.next(0), 0)
    assert asked(feed) == [(0, 0)]
    feed.lose(0)
    feed.give_back(0, 2)  # of a worker that is gone: nobody misses it


def test_batches_go_in_the_order_in_which_they_came_whatever_their_age():
    feed = Feed(range(2), SLOTS)
    asked(feed)
    for worker, slot, oldest in ((1, 0, 9), (0, 0, 3), (0, 1, 3), (1, 1, 0)):
        feed.arrived(worker, slot, oldest)
    assert [hand_over(feed, 100) for _ in range(4)] == [(1, 0), (0, 0), (0, 1), (1, 1)]
    assert feed.dropped == {}


def test_a_lost_workers_batches_are_handed_over_and_it_is_asked_for_no_more():
    feed = Feed(range(2), SLOTS)
    asked(feed)
    feed.arrived(1, 0, 0)
    feed.lose(1)
    assert not feed.knows(1) and feed.holds(1)
    feed.add(2)
    assert asked(feed) == [(2, 0), (2, 1)]
    assert hand_over(feed, 0) == (1, 0)
    assert asked(feed) == [] and not feed.holds(1)


def test_what_was_dropped_of_a_worker_that_is_gone_stays_counted_and_the_rest_can_be_forgotten():
    feed = Feed(range(1), SLOTS, max_staleness=0)
    feed.arrived(*asked(feed)[0], 0)
    assert feed.next(1) is None and feed.dropped == {0: 1}
    feed.arrived(*asked(feed, 1)[0], 1)
    feed.lose(0)
    assert feed.next(1) is not None
    feed.forget(0)
    assert feed.next(1) is None and feed.dropped == {0: 1}


# --- with a bound ----------------------------------------------------------------------------------------------------


def test_what_is_older_than_the_bound_is_dropped_and_its_slot_is_free():
    feed = Feed(range(2), SLOTS, max_staleness=2)
    assert len(asked(feed)) == 3
    feed.arrived(0, 0, 4)
    feed.arrived(1, 0, 5)
    assert hand_over(feed, 7) == (1, 0), "a batch of age 3 was handed over, or one of age 2 was not"
    assert feed.dropped == {0: 1}
    assert (0, 0) not in asked(feed, 7), "a worker whose batch came too late is held back"


def test_what_was_dropped_is_told_once():
    feed = Feed(range(2), SLOTS, max_staleness=2)
    asked(feed)
    feed.arrived(0, 0, 4)
    feed.arrived(1, 0, 5)
    assert feed.next(7) is not None
    assert [(batch.worker, batch.oldest) for batch in feed.take_dropped()] == [(0, 4)]
    assert feed.take_dropped() == []


def test_with_a_bound_the_batch_that_is_oldest_goes_first():
    feed = Feed(range(3), SLOTS, max_staleness=5)
    asked(feed)
    for worker, oldest in ((0, 3), (1, 2), (2, 3)):
        feed.arrived(worker, 0, oldest)
    assert [hand_over(feed, 5) for _ in range(3)] == [(1, 0), (0, 0), (2, 0)]


@pytest.mark.parametrize("bound", [0, 1, 2, 3])
def test_as_many_are_under_way_as_are_handed_over_before_the_first_is_too_old(bound):
    """One push per batch, which is what is assumed before it is known."""
    feed = Feed(range(4), SLOTS, max_staleness=bound)
    assert len(asked(feed)) == bound + 1


def test_a_request_names_the_version_without_which_its_batch_would_come_too_late():
    feed = Feed(range(3), SLOTS, max_staleness=2)
    assert [request.version for request in feed.requests(10, waiting=True)] == [8, 9, 10]
    assert {request.version for request in Feed(range(3), SLOTS).requests(10, waiting=True)} == {0}


def test_a_push_every_fourth_batch_leaves_room_for_four_batches_per_version():
    feed = Feed(range(4), SLOTS, max_staleness=0)
    version = 0
    for count in range(80):
        found = asked(feed, version)
        if count > 40:
            assert len(found) == (4 if count % 4 == 0 else 0), count
        for worker, slot in found:
            feed.arrived(worker, slot, version)
        hand_over(feed, version)
        assert count <= 40 or asked(feed, version, waiting=False) == []
        version += count % 4 == 3
    assert sum(feed.dropped.values()) < 10


def test_while_nothing_is_under_way_somebody_is_asked_even_if_all_are_held_back():
    feed = Feed(range(2), SLOTS, max_staleness=0)
    for version in range(0, 100, 10):  # ten pushes while a batch is under way
        ((worker, slot),) = asked(feed, version)
        feed.arrived(worker, slot, version)
        assert feed.next(version + 10) is None
    assert sum(feed.dropped.values()) == 10 and len(feed.dropped) == 2 and min(feed.dropped.values()) > 1


# --- a simulated run -------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    handed: list = field(default_factory=list)  # (worker, number of that worker's batch, age)
    seconds: float = 0.0
    dropped: int = 0

    @property
    def rate(self):
        return len(self.handed) / self.seconds

    @property
    def ages(self):
        return [age for _, _, age in self.handed]

    @property
    def by_worker(self):
        return Counter(worker for worker, _, _ in self.handed)


def simulate(durations, training, bound, *, batches=500, pushes=lambda count: 1):
    """Workers that need ``durations`` seconds per batch, a trainer that needs ``training`` and pushes after each."""
    feed = Feed(range(len(durations)), SLOTS, max_staleness=bound)
    queues = [deque() for _ in durations]  # of (when it is full, slot, number, version)
    idle_since, made = [0.0] * len(durations), [0] * len(durations)
    history = [(0.0, 0)]  # (when, version), to know what was in force when a batch began
    now, version, outcome = 0.0, 0, Outcome()
    contents = {}

    def ask(waiting):
        for request in feed.requests(version, waiting=waiting):
            begin = max(now, idle_since[request.worker])
            idle_since[request.worker] = begin + durations[request.worker]
            queues[request.worker].append((idle_since[request.worker], request.slot, made[request.worker], begin))
            made[request.worker] += 1

    def take_in():
        due = sorted((queue[0], worker) for worker, queue in enumerate(queues) if queue)
        while due and due[0][0][0] <= now:
            (_, slot, number, begin), worker = due[0]
            queues[worker].popleft()
            oldest = max(v for when, v in history if when <= begin)
            assert (worker, slot) not in contents, "a slot was asked for while its batch was still there"
            contents[worker, slot] = number
            feed.arrived(worker, slot, oldest)
            due = sorted((queue[0], worker) for worker, queue in enumerate(queues) if queue)

    for count in range(batches):
        take_in()
        before = dict(feed.dropped)
        while (batch := feed.next(version)) is None:
            _forget_dropped(feed, before, contents)
            ask(True)
            now = max(now, min(queue[0][0] for queue in queues if queue))
            take_in()
        _forget_dropped(feed, before, contents)
        ask(True)
        outcome.handed.append((batch.worker, contents.pop((batch.worker, batch.slot)), version - batch.oldest))
        feed.hand_over(batch, version)
        ask(False)
        now += training
        for _ in range(pushes(count)):
            version += 1
        history.append((now, version))
    outcome.seconds, outcome.dropped = now, sum(feed.dropped.values())
    assert sum(made) == batches + outcome.dropped + len(contents) + sum(map(len, queues)), "a batch is lost"
    return outcome


def _forget_dropped(feed, before, contents):
    if feed.dropped != before:
        ready = {(batch.worker, batch.slot) for batch in feed._ready}
        for place in set(contents) - ready:
            del contents[place]
        before.update(feed.dropped)


@pytest.mark.parametrize("bound", [1, 2, 5])
@pytest.mark.parametrize("slow", [0.3, 0.5, 1.0, 3.0])
def test_a_bound_costs_a_slowed_trainer_with_one_slow_worker_less_than_a_tenth(bound, slow):
    free = simulate([0.05, slow], 0.2, None)
    bounded = simulate([0.05, slow], 0.2, bound)
    assert max(bounded.ages) <= bound
    assert bounded.rate >= 0.9 * free.rate
    assert bounded.dropped <= 35
    assert max(free.ages) > bound or slow < 1


@pytest.mark.parametrize("bound", [None, 1, 2, 5])
@pytest.mark.parametrize("training", [0.01, 0.1, 0.2])
def test_workers_of_one_speed_are_served_alike_and_nothing_is_dropped(bound, training):
    run = simulate([0.1, 0.1, 0.1], training, bound)
    assert run.dropped <= 3
    assert max(run.by_worker.values()) - min(run.by_worker.values()) <= 5
    assert bound is None or max(run.ages) <= bound


def test_workers_that_are_all_slow_are_held_back_rather_than_their_batches_dropped():
    """Each needs as long for a batch as four take to be learned from: only three may be under way."""
    run = simulate([0.8] * 4, 0.2, 2)
    assert max(run.ages) <= 2 and run.dropped <= 10
    assert run.rate > 2.9  # of 3.75: a worker that is held back begins when the trainer asks the next time
    assert len(run.by_worker) == 4 and min(run.by_worker.values()) > 100


def test_a_slow_worker_that_becomes_fast_enough_is_used_again():
    feed_speed = [0.05, 2.0]
    before = simulate(feed_speed, 0.2, 2, batches=100)
    assert before.by_worker[1] <= 2
    # The same with a worker whose pauses have to fade: half of its batches come in time.
    after = simulate([0.05, 0.25], 0.2, 2)
    assert after.by_worker[1] > 100
    assert before.dropped <= math.log2(LONGEST_PAUSE) + 100 / LONGEST_PAUSE


@pytest.mark.parametrize("pushes", [0, 1, 3, 8])
def test_whatever_the_number_of_pushes_per_batch_the_bound_holds_and_the_run_goes_on(pushes):
    run = simulate([0.05, 0.07], 0.2, 2, pushes=lambda count: pushes)
    assert max(run.ages) <= 2
    assert run.dropped <= 10
    assert run.rate >= (4.5 if pushes <= 1 else 3.5)


@settings(deadline=None, max_examples=60)
@given(
    durations=st.lists(st.floats(0.01, 2.0), min_size=1, max_size=5),
    training=st.floats(0.001, 1.0),
    bound=st.none() | st.integers(0, 6),
    pattern=st.lists(st.integers(0, 4), min_size=1, max_size=6),
)
def test_no_batch_is_lost_or_seen_twice_and_none_is_too_old(durations, training, bound, pattern):
    run = simulate(durations, training, bound, batches=60, pushes=lambda count: pattern[count % len(pattern)])
    assert bound is None or max(run.ages) <= bound
    for worker in range(len(durations)):
        numbers = [number for index, number, _ in run.handed if index == worker]
        assert numbers == sorted(set(numbers)), "a worker's batches came twice, or in another order"
        assert bound is not None or numbers == list(range(len(numbers))), "a batch was left out"
