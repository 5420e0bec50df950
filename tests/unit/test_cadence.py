import doctest

import pytest

from lightning_weightsync import cadence
from lightning_weightsync.cadence import Cadence


class TestCadence:
    @pytest.mark.parametrize("unit", ["batches", "optim_steps"])
    def test_a_push_is_due_when_at_least_the_interval_was_counted(self, unit):
        cadence = Cadence(3, unit)
        tick = cadence.batch_ended if unit == "batches" else cadence.step_happened
        seen = []
        for _ in range(4):
            tick()
            seen.append((cadence.pending, cadence.due))
        assert seen == [(1, False), (2, False), (3, True), (4, True)]

    def test_a_late_push_does_not_make_the_next_one_early(self):
        cadence = Cadence(2)
        for _ in range(3):
            cadence.batch_ended()
        cadence.pushed()
        cadence.batch_ended()
        assert (cadence.pending, cadence.due) == (1, False)
        cadence.batch_ended()
        assert cadence.due

    def test_only_its_own_unit_makes_a_push_due(self):
        cadence = Cadence(1, "optim_steps")
        cadence.batch_ended()
        assert (cadence.pending, cadence.due) == (0, False)

    @pytest.mark.parametrize(("interval", "pending", "due"), [(10, 4, False), (4, 4, True), (1, 4, True)])
    def test_the_count_survives_another_interval_on_resume(self, interval, pending, due):
        before = Cadence(5)
        for _ in range(4):
            before.batch_ended()
        after = Cadence(interval)
        after.load_state_dict(before.state_dict())
        after.load_state_dict(before.state_dict())
        assert (after.pending, after.due) == (pending, due)

    def test_the_state_is_ints_and_does_not_follow_later_counting(self):
        cadence = Cadence(2, "optim_steps")
        cadence.step_happened()
        state = cadence.state_dict()
        cadence.step_happened()
        assert state == {"batches": 0, "optim_steps": 1, "frames": 0, "milliseconds": 0}
        assert all(type(value) is int for value in state.values())

    def test_an_empty_state_counts_from_zero(self):
        cadence = Cadence()
        cadence.batch_ended()
        cadence.load_state_dict({})
        assert cadence.pending == 0

    @pytest.mark.parametrize("interval", [0, -1])
    def test_an_interval_below_one_is_refused(self, interval):
        with pytest.raises(ValueError, match=f"at least 1, got {interval}"):
            Cadence(interval)

    @pytest.mark.parametrize("interval", [1.0, "3", True, None])
    def test_an_interval_that_is_no_int_is_refused(self, interval):
        with pytest.raises(TypeError, match="in batches is an int, got"):
            Cadence(interval)

    @pytest.mark.parametrize("interval", [0, -0.5, float("nan")])
    def test_an_interval_in_seconds_is_positive(self, interval):
        with pytest.raises(ValueError, match=f"in seconds is positive, got {interval}"):
            Cadence(interval, "seconds")

    @pytest.mark.parametrize("interval", ["3", True, None])
    def test_an_interval_in_seconds_is_a_number(self, interval):
        with pytest.raises(TypeError, match="in seconds is a number, got"):
            Cadence(interval, "seconds")

    @pytest.mark.parametrize(("unit", "text"), [("batch", "batches"), ("frame", "frames"), ("second", "seconds")])
    def test_an_unknown_unit_is_told_with_the_nearest_one(self, unit, text):
        with pytest.raises(ValueError, match=f"'{unit}' is none of .*did you mean '{text}'"):
            Cadence(1, unit)


class FakeClock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return FakeClock()


class TestFrames:
    def test_a_push_is_due_when_at_least_so_many_were_collected(self):
        cadence, seen = Cadence(10, "frames"), []
        for frames in (4, 4, 4, 0):
            cadence.batch_ended(frames)
            seen.append((cadence.pending, cadence.due))
        assert seen == [(4, False), (8, False), (12, True), (12, True)]
        cadence.pushed()
        cadence.batch_ended(4)
        assert (cadence.pending, cadence.due) == (4, False), "the two over were counted twice"

    def test_a_batch_of_nothing_new_is_trained_on_all_the_same(self):
        cadence = Cadence(10, "frames")
        cadence.batch_ended(0)
        assert cadence.unpushed and not cadence.due

    def test_the_count_survives_a_resume(self):
        before, after = Cadence(10, "frames"), Cadence(6, "frames")
        before.batch_ended(6)
        after.load_state_dict(before.state_dict())
        assert (after.pending, after.due) == (6, True)


class TestSeconds:
    def test_the_clock_is_looked_at_when_a_batch_ends(self, clock):
        cadence, seen = Cadence(10, "seconds", clock=clock), []
        cadence.start_clock()
        for _ in range(3):
            clock.now += 4
            assert not cadence.due
            cadence.batch_ended()
            seen.append((cadence.pending, cadence.due))
        assert seen == [(4, False), (8, False), (12, True)]

    def test_a_late_push_does_not_make_the_next_one_early(self, clock):
        cadence = Cadence(10, "seconds", clock=clock)
        cadence.start_clock()
        clock.now += 19
        cadence.batch_ended()
        clock.now += 3  # as long as the push took
        cadence.pushed()
        clock.now += 9
        cadence.batch_ended()
        assert (cadence.pending, cadence.due) == (9, False)

    def test_the_time_between_two_runs_does_not_count(self, clock):
        before = Cadence(10, "seconds", clock=clock)
        before.start_clock()
        clock.now += 6.25
        before.batch_ended()
        clock.now += 1  # in the middle of a batch, whose end the checkpoint has not seen
        state = before.state_dict()
        assert state["milliseconds"] == 6250 and all(type(value) is int for value in state.values())
        clock.now = 3.0  # another boot
        after = Cadence(10, "seconds", clock=clock)
        for _ in range(2):
            after.load_state_dict(state)
        clock.now += 1000  # until the first batch is there
        after.start_clock()
        clock.now += 3.5
        after.batch_ended()
        assert (after.pending, after.due) == (9.75, False)
        clock.now += 0.25
        after.batch_ended()
        assert after.due

    def test_the_time_between_two_fits_does_not_count(self, clock):
        cadence = Cadence(10, "seconds", clock=clock)
        for _ in range(2):
            clock.now += 1000
            cadence.start_clock()
            clock.now += 2
            cadence.batch_ended()
        assert cadence.pending == 4

    def test_a_clock_that_was_not_started_counts_nothing(self, clock):
        cadence = Cadence(10, "seconds", clock=clock)
        clock.now += 100
        cadence.batch_ended()
        cadence.pushed()
        clock.now += 100
        cadence.batch_ended()
        assert cadence.pending == 0 and cadence.unpushed

    def test_a_fraction_of_a_second_is_an_interval(self, clock):
        cadence = Cadence(0.5, "seconds", clock=clock)
        cadence.start_clock()
        clock.now += 0.5
        cadence.batch_ended()
        assert cadence.due


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(cadence).failed == 0
