"""Starting, losing and replacing workers, told by processes that do what the test says. One process."""

import contextlib
import os
import socket
import sys
import threading
import time
from functools import partial
from itertools import count

import pytest

from lightning_weightsync import CollectorGroup
from lightning_weightsync.collectors import fleet, member
from lightning_weightsync.collectors.fleet import FleetOptions
from lightning_weightsync.collectors.group_record import GroupState
from lightning_weightsync.collectors.member import WorkerState
from lightning_weightsync.collectors.pool import WorkerPool
from lightning_weightsync.collectors.process import JOB_MESSAGES
from lightning_weightsync.collectors.supervisor import Condition
from lightning_weightsync.errors import WeightSyncTimeout, WorkerDied
from lightning_weightsync.transports.control import ChannelClosed, ControlChannel
from lightning_weightsync.transports.link import LinkState, WorkerLink
from lightning_weightsync.transports.memory import create_memory_file
from lightning_weightsync.transports.posting import PostingChannel
from tests.helpers.collectors import Stream
from tests.helpers.processes import wait_until

_PIDS = count(1)


class Process:
    """Stands in for a ``WorkerProcess``; ``theirs`` is the worker's end of its job channel."""

    def __init__(self):
        self.jobs, self.theirs = (ControlChannel(end, JOB_MESSAGES) for end in socket.socketpair())
        self.pid = next(_PIDS)
        self.memory = create_memory_file("test")
        self.end_is = None
        self.reaped = False
        self.interrupts = False  # whoever waits for its end

    def hears(self):
        """What it is told next, if anything: the kind of the message."""
        message = self.theirs.poll() if self.end_is is None else None
        return message.kind if message is not None else None

    def vanish(self):
        if self.end_is is None:
            self.end_is = "exit code 9"
        self.theirs.close()

    def ended(self, wait=0.0):
        if self.interrupts and wait > 0.0:
            raise KeyboardInterrupt
        return self.end_is

    def ask_to_stop(self):
        with contextlib.suppress(ChannelClosed):
            self.jobs.send("stop")

    kill = vanish

    def reap(self, wait):
        if not self.reaped:
            self.ended(wait)
            self.kill()
            self.reaped = True
            self.jobs.close()
            os.close(self.memory)


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def processes(monkeypatch):
    """Those that were started so far."""
    started = []

    def start(*_):
        started.append(Process())
        return started[-1]

    monkeypatch.setattr(member, "start_worker", start)
    return started


@pytest.fixture
def pool_of(processes):
    """Makes pools of workers that are up, without a caretaker; stops them."""
    pools = []

    def make(num_workers, *, up=True):
        pool = WorkerPool(FleetOptions(num_workers, {}, 1, max_restarts=3, new_seed=lambda index: index))
        pools.append(pool)
        pool.supervisor._clock = Clock()
        if up:
            pool.supervisor.watch(range(num_workers))
            for worker in pool._workers:
                worker.state = WorkerState.CONNECTED
        return pool

    yield make
    for pool in pools:
        pool.schemes = {}
        pool.shutdown(0.0)
    assert all(process.reaped for process in processes)


@contextlib.contextmanager
def in_thread(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    yield
    thread.join(10)
    assert not thread.is_alive()


# --- replacements ----------------------------------------------------------------------------------------------------


class Queue:
    """A lock that is held until ``release``, and then taken in the order in which it was asked for."""

    def __init__(self):
        self.waiting = 0
        self._turn = -1
        self._changed = threading.Condition()

    def __enter__(self):
        with self._changed:
            mine, self.waiting = self.waiting, self.waiting + 1
            assert self._changed.wait_for(lambda: self._turn == mine, 10)

    def __exit__(self, *exc):
        self.release()

    def release(self):
        with self._changed:
            self._turn += 1
            self._changed.notify_all()


def lose(pool, index, process):
    """It is gone, and its replacement is due."""
    process.vanish()
    pool.notice()
    pool.supervisor._clock.now += 60
    assert pool.due() == [index]


def test_a_replacement_that_is_lost_while_it_waits_to_join_holds_up_nobody(pool_of, processes, monkeypatch):
    """Two replacements do not dial at once; one that waits for another may have one of its own by then."""
    pool, calls = pool_of(1), []

    def reconnect(hub, schemes, worker_ids, deadline):
        calls.append(worker_ids)
        if not wait_until(lambda: processes[2].hears() == "connect", 2):
            raise WeightSyncTimeout("nobody has dialled")
        processes[2].theirs.send("connected")

    monkeypatch.setattr(fleet, "reconnect_workers", reconnect)
    pool.schemes, pool._joining = {"policy": object()}, Queue()  # by a replacement that is slow
    lose(pool, 0, processes[0])
    with in_thread(pool.replace, 0):
        assert wait_until(lambda: len(processes) == 2, 5)
        processes[1].theirs.send("built")
        assert wait_until(lambda: pool._joining.waiting == 1, 5)
        lose(pool, 0, processes[1])
        with in_thread(pool.replace, 0):
            assert wait_until(lambda: len(processes) == 3, 5)
            processes[2].theirs.send("built")
            assert wait_until(lambda: pool._joining.waiting == 2, 5)
            pool._joining.release()
            assert wait_until(lambda: pool.supervisor.condition(0) is Condition.UP, 1.5)
    assert calls == [[0]]
    assert pool.stats()[0]["pid"] == processes[2].pid and pool.stats()[0]["restarts"] == 2


def test_whether_a_replacement_that_dials_is_lost_is_asked_of_that_one(pool_of, processes, monkeypatch):
    """One that dies while it dials is replaced at once where it was the first of its index."""
    pool, causes = pool_of(1), []

    def reconnect(hub, schemes, worker_ids, deadline):
        if len(processes) == 2:
            lose(pool, 0, processes[1])
            pool._successor(0)
        causes.append(pool.cause_of_death(0, 0.0))
        raise causes[-1]

    monkeypatch.setattr(fleet, "reconnect_workers", reconnect)
    pool.schemes = {"policy": object()}
    lose(pool, 0, processes[0])
    with in_thread(pool.replace, 0):
        assert wait_until(lambda: len(processes) == 2, 5)
        processes[1].theirs.send("built")
    assert f"(pid {processes[1].pid})" in str(causes[0]) and len(processes) == 3
    assert pool.stats()[0]["pid"] == processes[2].pid and pool.stats()[0]["state"] == "starting"


def test_a_replacement_that_cannot_be_started_is_tried_again_a_while_later(pool_of, processes, monkeypatch):
    pool, start = pool_of(1), member.start_worker
    lose(pool, 0, processes[0])

    def refuse(*_):
        raise OSError("no process id is left")

    monkeypatch.setattr(member, "start_worker", refuse)
    pool.replace(0)
    assert pool.due() == [] and pool.supervisor.condition(0) is Condition.DOWN
    pool.supervisor._clock.now += 1.0
    assert pool.due() == [0]
    pool.could_not_replace(0, RuntimeError("can't start new thread"))
    assert "no replacement of worker 0 could be started: can't start" in str(pool.supervisor.last_death(0))
    monkeypatch.setattr(member, "start_worker", start)
    pool.supervisor._clock.now += 60.0
    assert pool.due() == [0]
    with in_thread(pool.replace, 0):
        assert wait_until(lambda: len(processes) == 2, 5)
        processes[1].theirs.send("built")
        processes[1].theirs.send("connected")
    assert pool.supervisor.condition(0) is Condition.UP


# --- the first connection --------------------------------------------------------------------------------------------


def test_a_worker_that_ends_as_soon_as_it_has_connected_is_told_of_by_connect(pool_of, processes):
    """Nobody is replaced before all are connected: the first batch would tell of it, whatever ``max_restarts`` is."""
    pool = pool_of(2, up=False)
    pool.hub.connect_timeout = 5.0

    def look_around():
        for process in processes:
            told = process.hears()
            if told == "build":
                process.theirs.send("built")
            elif told == "connect":
                process.theirs.send("connected")
                if process is processes[1]:
                    process.vanish()

    with pytest.raises(WorkerDied, match=r"worker 1 \(pid \d+\) ended: exit code 9") as caught:
        pool.connect(Stream, [1, 2], {}, look_around)
    assert list(caught.value.failed) == [1]
    assert pool.supervisor.condition(0) is None


def test_a_worker_that_does_not_read_what_it_is_to_build_is_named_in_time(pool_of):
    pool = pool_of(2, up=False)
    pool.hub.connect_timeout = 0.3
    started = time.monotonic()
    with pytest.raises(WeightSyncTimeout, match=r"worker 0 \(pid \d+\) has not read 'build' after 0\.3 s") as caught:
        pool.connect(partial(Stream, reuse=bytes(2**22)), [1, 2], {}, lambda: None)
    assert list(caught.value.failed) == [0]
    assert time.monotonic() - started < 2.0


# --- more and fewer --------------------------------------------------------------------------------------------------


def test_whoever_looks_at_workers_beside_a_resize_meets_no_worker_that_has_left(pool_of):
    """A recorder reads ``stats()``, and the driver of a push asks for causes of death, in threads of their own."""
    pool, errors, stop = pool_of(3), [], threading.Event()
    last = pool._workers[2]

    def look():
        try:
            while not stop.is_set():
                assert set(pool.stats()) <= {0, 1, 2}
                pool.cause_of_death(2, 0.0)
                pool.beyond_repair({2: WorkerDied("its link is gone")})
                pool._look(2)
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with in_thread(look), in_thread(look):
            until = time.monotonic() + 0.5
            while time.monotonic() < until and not errors:
                with pool._mutex:
                    del pool._workers[2]
                with pool._mutex:
                    pool._workers.append(last)
            stop.set()
    finally:
        sys.setswitchinterval(interval)
    assert not errors


def test_an_interrupt_while_those_that_are_too_many_end_leaves_one_number_of_workers(pool_of, processes):
    group = CollectorGroup(Stream, 3)
    group._pool, group._state = pool_of(3), GroupState.RUNNING
    ends = [socket.socketpair() for _ in processes]
    links = [WorkerLink(k, processes[k].pid, PostingChannel(ours), 0) for k, (ours, _) in enumerate(ends)]
    group.hub.links = dict(enumerate(links))

    processes[1].interrupts = True
    with pytest.raises(KeyboardInterrupt):
        group.resize(1)
    assert group.num_workers == group.hub.num_workers == 1 == len(group.stats())
    assert [process.reaped for process in processes] == [False, True, True]
    assert [link.state for link in links] == [LinkState.OPEN, LinkState.BROKEN, LinkState.BROKEN]


def test_an_interrupt_while_new_ones_start_leaves_the_number_as_it_was(pool_of, processes):
    group = CollectorGroup(Stream, 2)
    group._pool, group._state = pool_of(2), GroupState.RUNNING

    def interrupted():
        raise KeyboardInterrupt

    group.look_around = interrupted
    with pytest.raises(KeyboardInterrupt):
        group.resize(4)
    assert group.num_workers == group.hub.num_workers == 2 == len(group.stats())
    assert [process.reaped for process in processes] == [False, False, True, True]


def test_an_interrupt_while_workers_end_leaves_none(pool_of, processes):
    group = CollectorGroup(Stream, 2)
    group._pool, group._state = pool_of(2), GroupState.RUNNING
    group._owner, group._pool._order = os.getpid(), b"they have built something"

    processes[0].interrupts = True
    with pytest.raises(KeyboardInterrupt):
        group.shutdown(5.0)
    assert all(process.reaped for process in processes) and not group.running
    assert [stat["state"] for stat in group.stats().values()] == ["stopped", "stopped"]


# --- states ----------------------------------------------------------------------------------------------------------


def test_a_worker_that_has_left_is_not_lost_any_more_and_comes_back_from_nowhere(pool_of, processes):
    pool = pool_of(3)
    gone = pool._workers[2]
    pool.resize(2, 0.0, lambda: None)
    pool._lose(2, gone, WorkerDied("its link is gone"))
    assert (gone.state, gone.cause) == (WorkerState.STOPPED, None)
    lose(pool, 1, processes[1])
    lost = pool._workers[1]
    for state in (WorkerState.CONNECTED, WorkerState.COLLECTING, WorkerState.STARTING, WorkerState.FAILED):
        assert not gone.move(state) and not lost.move(state)
    assert lost.state is WorkerState.FAILED
    pool.resize(1, 0.0, lambda: None)
    assert lost.state is WorkerState.STOPPED, "what it had finished would be handed over"
