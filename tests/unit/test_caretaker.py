"""The thread that looks after workers goes on, whatever happens to it."""

import threading

import pytest

from lightning_weightsync.collectors import caretaker
from lightning_weightsync.collectors.caretaker import Caretaker
from tests.helpers.processes import wait_until


class Ward:
    """Two workers whose replacement is due at each look, until it has been started."""

    def __init__(self):
        self.waiting = [0, 1]
        self.replaced, self.not_replaced = [], []
        self.notice_raises = self.due_raises = 0

    def notice(self):
        if self.notice_raises:
            self.notice_raises -= 1
            raise OSError("a lookup that failed")

    def due(self):
        if self.due_raises:
            self.due_raises -= 1
            raise KeyError("a record that is gone")
        due, self.waiting = self.waiting, []
        return due

    def replace(self, worker_idx):
        self.replaced.append(worker_idx)

    def could_not_replace(self, worker_idx, error):
        self.not_replaced.append((worker_idx, str(error)))


@pytest.fixture
def ward():
    return Ward()


@pytest.fixture
def looking(ward):
    """A caretaker of the ward, to be started."""
    made = Caretaker(ward)
    yield made
    made.stop()
    made.join(5)
    assert not any("weight-sync" in thread.name for thread in threading.enumerate())


@pytest.mark.parametrize("what", ["notice_raises", "due_raises"])
def test_one_look_that_fails_is_not_the_last_one(ward, looking, caplog, what):
    setattr(ward, what, 2)
    looking.start()
    assert wait_until(lambda: sorted(ward.replaced) == [0, 1], 5)
    assert wait_until(lambda: caplog.text.count("looking after the workers failed") == 2, 5)


def test_where_no_thread_can_be_started_the_ward_is_told_and_the_others_are_replaced(ward, looking, monkeypatch):
    start, refused = caretaker._started, []

    def started(name, function):
        if name == "weight-sync-restart-0" and not refused:
            refused.append(name)
            raise RuntimeError("can't start new thread")
        return start(name, function)

    monkeypatch.setattr(caretaker, "_started", started)
    looking.start()
    assert wait_until(lambda: ward.replaced == [1], 5)
    assert ward.not_replaced == [(0, "can't start new thread")]
    ward.waiting = [0]  # a while later
    assert wait_until(lambda: ward.replaced == [1, 0], 5)
