"""When a lost worker is replaced, told by a clock that the test turns."""

import pytest

from lightning_weightsync.collectors.supervisor import Condition, Supervisor
from lightning_weightsync.errors import LayoutMismatchError, WeightSyncTimeout, WorkerDied, WorkerError


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def supervisor(clock, max_restarts=3, workers=2):
    made = Supervisor(max_restarts, clock)
    made.watch(range(workers))
    return made


def died(text="killed by SIGKILL"):
    return WorkerDied(text)


def replace(sup, index):
    assert sup.due() == [index]
    sup.starting(index)
    assert sup.due() == []
    sup.joined(index)
    assert sup.condition(index) is Condition.UP


def test_the_first_replacement_starts_at_once(clock):
    sup = supervisor(clock)
    assert sup.due() == []
    assert sup.died(1, died()) == 0.0
    assert sup.condition(1) is Condition.DOWN and sup.condition(0) is Condition.UP
    replace(sup, 1)
    assert (sup.restarts(0), sup.restarts(1), sup.total_restarts) == (0, 1, 1)
    assert not sup.ended


def test_a_worker_that_dies_before_it_made_a_batch_is_waited_for_twice_as_long_each_time(clock):
    sup = supervisor(clock, max_restarts=20)
    waits = []
    for _ in range(10):
        waits.append(sup.died(0, died()))
        if waits[-1]:
            clock.now += waits[-1] - 0.01
            assert sup.due() == []
            clock.now += 0.02
        replace(sup, 0)
    assert waits == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    sup.made_batch(0)
    assert sup.died(0, died()) == 0.0


def test_a_replacement_that_dies_while_it_starts_counts(clock):
    sup = supervisor(clock, max_restarts=2)
    sup.died(0, died())
    for wait in (0.5, None):
        clock.now += 1
        sup.starting(0)
        assert sup.died(0, died()) == wait
    assert list(sup.ended) == [0] and sup.restarts(0) == 2


def test_more_than_max_restarts_within_ten_minutes_is_the_end_and_tells_all_causes(clock):
    sup = supervisor(clock)
    for k in range(3):
        sup.made_batch(1)
        assert sup.died(1, died(f"death {k}")) == 0.0
        replace(sup, 1)
        clock.now += 100
    assert sup.died(1, died("death 3")) is None
    end = sup.ended[1]
    assert isinstance(end, WorkerDied)
    assert "worker 1 was lost 4 times within 10 minutes" in str(end)
    assert "at most 3 times (max_restarts): 1) death 0; 2) death 1; 3) death 2; 4) death 3" in str(end)
    assert sup.condition(1) is Condition.ENDED and sup.due() == []
    assert sup.died(1, died()) is None
    assert sup.died(0, died()) == 0.0, "each worker is counted on its own"


def test_what_is_more_than_ten_minutes_ago_does_not_count(clock):
    sup = supervisor(clock)
    for _ in range(20):
        sup.made_batch(0)
        assert sup.died(0, died()) == 0.0
        replace(sup, 0)
        clock.now += 201  # three of them within any ten minutes
    assert sup.restarts(0) == 20


@pytest.mark.parametrize("error", [WorkerError("user code"), LayoutMismatchError("other leaves"), NameError("ours")])
def test_an_error_of_the_users_code_or_ours_is_the_end(clock, error):
    sup = supervisor(clock)
    assert sup.died(0, error) is None
    assert sup.ended == {0: error}
    sup.died(1, died())
    sup.starting(1)
    assert sup.died(1, error) is None
    assert sup.ended == {0: error, 1: error}


def test_without_restarts_a_death_is_the_end_as_it_was_told(clock):
    sup, cause = supervisor(clock, max_restarts=0), died()
    assert sup.died(0, cause) is None
    assert sup.ended == {0: cause}


def test_who_is_not_watched_is_not_replaced(clock):
    sup, cause = Supervisor(3, clock), died()
    assert sup.died(0, cause) is None
    assert sup.ended == {0: cause} and sup.condition(0) is None


def test_one_death_is_counted_once(clock):
    sup = supervisor(clock)
    assert sup.died(0, died()) == 0.0
    assert sup.died(0, died()) is None
    assert not sup.ended
    replace(sup, 0)
    assert sup.restarts(0) == 1


def test_once_stopped_nothing_is_due(clock):
    sup = supervisor(clock)
    sup.died(0, died())
    sup.stop()
    assert sup.due() == [] and sup.stopped
    assert not sup.repairs(0, died())


def test_what_a_replacement_makes_good(clock):
    sup = supervisor(clock)
    late, lost = WeightSyncTimeout("busy"), WeightSyncTimeout("silent for 30 s")
    sup.died(0, lost)
    assert sup.repairs(0, lost) and sup.repairs(0, died("is broken"))
    assert sup.repairs(0, late), "whatever it missed, its replacement starts from what was pushed last"
    assert not sup.repairs(0, WorkerError("a hook raised"))
    replace(sup, 0)
    assert sup.repairs(0, lost), "it has been made good"
    assert not sup.repairs(0, late), "it was late, and is still there: nobody restarts it"
    assert sup.last_death(0) is lost and sup.last_death(1) is None


def test_new_workers_are_due_and_no_restarts_and_can_be_removed(clock):
    sup = supervisor(clock)
    sup.add([2, 3])
    assert sup.due() == [2, 3]
    sup.starting(2)
    sup.joined(2)
    assert sup.restarts(2) == sup.total_restarts == 0
    sup.died(2, died())
    replacing = [index for index in sup.due() if index == 2]
    assert replacing == [2]
    sup.starting(2)
    assert sup.restarts(2) == sup.total_restarts == 1
    sup.remove([2, 3])
    assert sup.due() == [] and sup.condition(3) is None


def test_a_move_that_makes_no_sense_is_an_error(clock):
    sup = supervisor(clock)
    with pytest.raises(RuntimeError, match="that is up cannot become starting"):
        sup.starting(0)
