"""Does a collector get on?"""

import threading
from functools import partial

import pytest

from lightning_weightsync.collectors.watch import Watch


class Worker:
    """What is watched: ``steps`` is its progress."""

    def __init__(self):
        self.steps = 0

    def progress(self):
        return self.steps, "environment 0 (Toy), in step(),"


def watch_of(collector, timeout=10.0):
    return Watch(collector, timeout, *[lambda *told: pytest.fail(f"told: {told}")] * 2)


def test_time_counts_only_while_a_batch_is_made_and_nothing_moves():
    worker = Worker()
    watch = watch_of(worker)
    assert [watch.look(now) for now in (0.0, 1.0, 2.0)] == [0.0] * 3, "between batches"
    with watch:
        assert [watch.look(now) for now in (3.0, 4.0, 5.0)] == [0.0, 1.0, 2.0]
        worker.steps += 1
        assert [watch.look(now) for now in (6.0, 7.0)] == [0.0, 1.0]
    assert watch.look(8.0) == 0.0
    with watch:
        assert watch.look(9.0) == 0.0


def test_a_batch_is_progress_where_the_collector_tells_of_none():
    watch = watch_of(object())
    with watch:
        assert [watch.look(now) for now in (0.0, 1.0)] == [0.0, 1.0]
    with watch:
        assert [watch.look(now) for now in (2.0, 3.0)] == [0.0, 1.0], "the next one, begun between two looks"


def test_time_in_which_nobody_could_look_does_not_count():
    """The process was stopped: for an hour nobody's step got on."""
    watch = watch_of(Worker())
    with watch:
        assert [watch.look(now) for now in (0.0, 1.0, 3601.0, 3602.0)] == [0.0, 1.0, 3.0, 4.0]


def test_who_is_stuck_is_told_of_once_with_the_stack_of_the_thread_that_makes_the_batches():
    told, release = [], threading.Event()

    def stuck(*what):
        told.append(what)
        release.set()

    def wait_in_a_simulator():
        assert release.wait(20)

    watch = Watch(Worker(), 0.2, stuck, pytest.fail)
    watch.start()
    with watch:
        wait_in_a_simulator()
    ((seconds, at, stack),) = told
    assert 0.2 <= seconds < 1.0
    assert at == "environment 0 (Toy), in step(),"
    assert "in wait_in_a_simulator" in stack


class Vague(Worker):
    """Raises when it is asked for its progress the ``nth`` time; else it does not say where it is."""

    def __init__(self, nth):
        super().__init__()
        self.nth, self.asked = nth, 0

    def progress(self):
        self.asked += 1
        if self.asked == self.nth:
            raise KeyError("port")
        return 7, None


@pytest.mark.parametrize(
    ("nth", "stuck_at_once", "told"), [(2, False, "failed"), (1, True, "failed"), (None, False, "stuck")]
)
def test_whatever_progress_does_somebody_is_told(nth, stuck_at_once, told):
    """It is asked at each look, and once more, what it is at, when it is known to be stuck."""
    heard, release = [], threading.Event()

    def tell(which, what, *more):
        heard.append((which, what, *more))
        release.set()

    watch = Watch(Vague(nth), 0.2, partial(tell, "stuck"), partial(tell, "failed"))
    if stuck_at_once:
        watch.look = lambda now: 0.2
    with watch:
        watch.start()
        assert release.wait(5), "the watch has ended without a word"
    assert [which for which, *_ in heard] == [told]
    assert heard[0][2] is None if told == "stuck" else repr(heard[0][1]) == "KeyError('port')"
