import asyncio
import copy
import doctest
import math
import os
import pickle
import random
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from lightning_weightsync.errors import WeightSyncTimeout
from lightning_weightsync.schemes import gate as module_under_test
from lightning_weightsync.schemes.gate import Gate
from lightning_weightsync.schemes.resting import Resting
from lightning_weightsync.transports.board import WorkerBoard, make_board
from tests.helpers.threads import Call, eventually, soon


@pytest.fixture(params=["on its own", "with a sender outside"])
def gate(request):
    """The second kind is shared with a sender that never writes; see ``test_resting`` for what happens if it does."""
    gate = Gate()
    if request.param == "on its own":
        yield gate
        return
    sender = make_board(os.getpid())
    if sender is None:
        pytest.skip("boards are made on Linux only")
    outside = Resting(WorkerBoard(sender.descriptor), gate, list)
    outside.version = 0
    gate.connect(outside)
    yield gate
    outside.end()
    sender.close()


class Visitor:
    """A thread that enters the gate, stays until it is told to leave, and leaves."""

    def __init__(self, gate, *, alone=False, deadline=None, name=None):
        self.inside = threading.Event()
        self._leave = threading.Event()
        self._gate = gate
        self._way = gate.alone(deadline) if alone else gate
        self._call = Call(self._visit, name=name)

    def _visit(self):
        with self._way:
            self.inside.set()
            assert self._leave.wait(10)
            return self._gate.version

    def leave(self):
        """Let it out (or in and out); returns the version that it saw when it left."""
        self._leave.set()
        return self._call.result()

    def result(self):
        return self._call.result()


def reader(gate, **kwargs):
    visitor = Visitor(gate, **kwargs)
    assert visitor.inside.wait(10)
    return visitor


def waiting_switch(gate, deadline=None):
    """A switch in another thread that waits for those inside to leave."""
    before = gate._waiting_writers
    switch = Visitor(gate, alone=True, deadline=deadline)
    eventually(lambda: gate._waiting_writers == before + 1)
    assert not switch.inside.is_set()
    return switch


def still_outside(visitor):
    return not visitor.inside.wait(0.05)


def assert_nobody_is_left(gate):
    assert (gate._readers, gate._writer, gate._writer_reentries) == ({}, None, 0)
    assert (gate._waiting_readers, gate._waiting_writers, gate._due_readers) == (0, 0, 0)


@contextmanager
def threads_change_places_often():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(2e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def test_a_new_gate_lets_anybody_in_and_is_at_version_0(gate):
    assert (gate.run, gate.version, gate.inside) == (0, 0, False)
    with gate as entered:
        assert entered is gate
        assert gate.inside
    assert not gate.inside
    with gate.alone():
        assert gate.inside
    assert not gate.inside


def test_threads_share_it(gate):
    readers = [reader(gate) for _ in range(5)]  # each is inside before the next one comes
    assert not gate.inside
    for visitor in readers:
        visitor.leave()


def test_a_switch_waits_until_every_reader_has_left(gate):
    readers = [reader(gate) for _ in range(3)]
    switch = waiting_switch(gate)
    for visitor in readers:
        assert still_outside(switch)
        visitor.leave()
    assert switch.inside.wait(5)
    switch.leave()


def test_a_reader_waits_until_the_switch_is_done_and_sees_its_version(gate):
    switch = reader(gate, alone=True)
    waiting = Visitor(gate)
    assert still_outside(waiting)
    gate.version = 5
    switch.leave()
    assert waiting.inside.wait(5)
    assert waiting.leave() == 5


def test_two_switches_are_never_in_at_once(gate):
    first = reader(gate, alone=True)
    second = waiting_switch(gate)
    assert still_outside(second)
    first.leave()
    assert second.inside.wait(5)
    second.leave()


def test_a_waiting_switch_goes_before_new_readers(gate):
    old = reader(gate)
    switch = waiting_switch(gate)
    new = [Visitor(gate) for _ in range(3)]
    assert all(still_outside(visitor) for visitor in new)
    old.leave()
    assert switch.inside.wait(5)
    assert all(still_outside(visitor) for visitor in new)
    gate.version = 9
    switch.leave()
    assert [visitor.leave() for visitor in new] == [9, 9, 9]


def test_readers_that_come_without_a_pause_do_not_starve_a_switch(gate):
    stop = threading.Event()

    def read():
        while not stop.is_set():
            with gate:
                time.sleep(1e-4)

    readers = [Call(read) for _ in range(4)]
    try:
        for _ in range(20):
            with gate.alone(soon(5.0)):
                pass
    finally:
        stop.set()
    for call in readers:
        call.result()


def test_switches_that_come_without_a_pause_do_not_starve_a_reader(gate):
    stop = threading.Event()

    def switch():
        while not stop.is_set():
            with gate.alone(soon(5.0)):
                gate.version += 1
                time.sleep(1e-3)

    def read():
        for _ in range(20):
            with gate:
                pass

    switches = [Call(switch) for _ in range(3)]
    try:
        eventually(lambda: gate.version)
        Call(read).result(5.0)
    finally:
        stop.set()
    for call in switches:
        call.result()


def test_readers_that_a_switch_held_back_go_before_the_next_switch(gate):
    first = reader(gate, alone=True)
    held_back = [Visitor(gate) for _ in range(3)]
    eventually(lambda: gate._waiting_readers == 3)
    second = waiting_switch(gate)
    first.leave()
    assert all(visitor.inside.wait(5) for visitor in held_back)
    assert still_outside(second)
    for visitor in held_back:
        visitor.leave()
    assert second.inside.wait(5)
    second.leave()


def test_a_thread_that_is_inside_may_enter_again_while_a_switch_waits(gate):
    with gate:
        switch = waiting_switch(gate)
        with gate:
            with gate:
                assert still_outside(switch)
            assert still_outside(switch)
        assert still_outside(switch)  # it is the outermost exit that counts
    assert switch.inside.wait(5)
    switch.leave()


def test_an_exception_inside_lets_go_of_the_gate(gate):
    with pytest.raises(ZeroDivisionError), gate, gate:
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), gate.alone(), gate:
        raise ZeroDivisionError
    with gate.alone(soon(0.0)):
        pass


def test_switching_from_inside_is_an_error_that_changes_nothing(gate):
    with gate:
        with gate, pytest.raises(RuntimeError, match="from inside the gate"), gate.alone(soon()):
            pytest.fail("got in")
        another = reader(gate)  # no switch is waiting
        another.leave()
        assert gate.inside
    with gate.alone():
        with pytest.raises(RuntimeError, match="from inside the gate"), gate.alone(soon()):
            pytest.fail("got in")
        assert gate.inside
        waiting = Visitor(gate)
        assert still_outside(waiting)
    waiting.leave()


def test_the_switching_thread_may_enter_shared(gate):
    with gate.alone():
        with gate, gate:
            gate.version = 3
            assert (gate.inside, gate.version) == (True, 3)
        outside = Visitor(gate)
        assert still_outside(outside)  # its exits did not let anybody in
    assert outside.leave() == 3


def test_async_with_raises_and_holds_nothing(gate):
    async def policy_call():
        async with gate:
            pytest.fail("got in")

    with pytest.raises(RuntimeError, match="across await"):
        asyncio.run(policy_call())
    with gate.alone(soon(0.0)):
        pass


def test_leaving_on_another_thread_raises_and_lets_nobody_out(gate):
    with gate:
        with pytest.raises(RuntimeError, match="one thread"):
            Call(gate.__exit__, None, None, None).result()
        assert gate.inside
        switch = waiting_switch(gate)
        assert still_outside(switch)
    switch.leave()
    with gate.alone():
        with pytest.raises(RuntimeError, match="one thread"):
            Call(gate.__exit__, None, None, None).result()
        waiting = Visitor(gate)
        assert still_outside(waiting)
    waiting.leave()


def test_leaving_without_having_entered_raises(gate):
    with pytest.raises(RuntimeError, match="had not entered"):
        gate.__exit__(None, None, None)
    with gate.alone(), pytest.raises(RuntimeError, match="had not entered"):
        gate.__exit__(None, None, None)
    with gate:
        pass


def test_an_expired_switch_names_who_is_inside_and_for_how_long_and_lets_readers_go_on(gate):
    slow, other = reader(gate, name="env-loop-7"), reader(gate, name="evaluation")
    started = time.monotonic()
    switch = Visitor(gate, alone=True, deadline=started + 0.3)
    eventually(lambda: gate._waiting_writers)
    held_back = Visitor(gate)
    assert still_outside(held_back)
    with pytest.raises(WeightSyncTimeout) as caught:
        switch.result()
    assert 0.3 <= time.monotonic() - started < 1.5
    assert "'env-loop-7' has been inside for 0." in str(caught.value)
    assert "'evaluation' has been inside for 0." in str(caught.value)
    assert " s" in str(caught.value)
    assert held_back.inside.wait(5)  # although the slow ones are in there yet
    for visitor in (slow, other, held_back):
        visitor.leave()
    with gate.alone(soon(0.0)):
        pass


def test_an_expired_switch_tells_of_another_one_in_progress(gate):
    first = reader(gate, alone=True)
    with pytest.raises(WeightSyncTimeout, match="another switch is in progress"), gate.alone(soon(0.05)):
        pytest.fail("got in")
    first.leave()


def test_one_expired_switch_leaves_the_priority_of_another_one_that_waits(gate):
    old = reader(gate)
    patient = waiting_switch(gate)
    with pytest.raises(WeightSyncTimeout), gate.alone(soon(0.05)):
        pytest.fail("got in")
    new = Visitor(gate)
    assert still_outside(new)
    old.leave()
    assert patient.inside.wait(5)
    patient.leave()
    new.leave()


def test_a_deadline_that_has_passed_still_takes_a_gate_that_is_free(gate):
    with gate.alone(time.monotonic() - 1.0):
        assert gate.inside


@pytest.mark.parametrize("deadline", [None, math.inf, 1e18])
def test_a_switch_without_a_deadline_worth_mentioning_waits_for_the_reader(gate, deadline):
    old = reader(gate)
    switch = waiting_switch(gate, deadline)
    assert still_outside(switch)
    old.leave()
    assert switch.inside.wait(5)
    switch.leave()


def test_a_waiting_switch_looks_around_and_may_give_up(gate):
    old = reader(gate)
    looks = []

    def check():
        looks.append(time.monotonic())
        if len(looks) == 4:
            raise ZeroDivisionError("enough")

    with pytest.raises(ZeroDivisionError, match="enough"), gate.alone(soon(), check):
        pytest.fail("got in")
    assert 0.1 < looks[-1] - looks[0] < 2.0
    new = reader(gate)
    old.leave()
    new.leave()
    with gate.alone(soon(), lambda: pytest.fail("looked around although the gate was free")):
        pass
    assert_nobody_is_left(gate)


def test_a_gate_never_travels(gate):
    for travel in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="never pickled"):
            travel(gate)


class TwoLayers(nn.Module):
    """Every number in it is the version, or the read is mixed."""

    def __init__(self, size=512):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(size), requires_grad=False)
        self.second = nn.Parameter(torch.zeros(size), requires_grad=False)

    def values(self):
        return {*self.first.tolist(), *self.second.tolist()}

    def write(self, value):
        self.first.fill_(value)
        time.sleep(0)  # lets another thread run between the layers
        self.second.fill_(value)


def test_no_read_mixes_two_versions_while_five_hundred_switches_go_on(gate):
    net = TwoLayers()
    seen = [[] for _ in range(4)]
    last = 500

    def read(number):
        draw = random.Random(number)
        while not seen[number] or seen[number][-1] < last:
            with gate:
                version = gate.version
                values = net.values()
                if draw.random() < 0.3:
                    with gate:
                        values |= net.values()
                assert (values, gate.version) == ({float(version)}, version)
            seen[number].append(version)

    def switch(versions):
        for version in versions:
            with gate.alone(soon(30.0)):
                net.write(version)
                with gate:  # an applied hook calls the policy
                    assert net.values() == {float(version)}
                gate.version = version
            time.sleep(0)

    with threads_change_places_often():
        readers = [Call(read, number) for number in range(4)]
        Call(switch, range(1, last + 1)).result(60)
        for call in readers:
            call.result(60)
    assert net.values() == {float(last)}
    for versions in seen:
        assert versions == sorted(versions)
    assert_nobody_is_left(gate)


def test_switches_readers_and_deadlines_at_random_neither_mix_nor_deadlock(gate):
    net = TwoLayers(size=8)
    applied = []

    def visit(number):
        draw = random.Random(number)
        expired = 0
        for _ in range(60):
            if draw.random() < 0.4:
                try:
                    with gate.alone(soon(draw.choice([0.0, 0.0005, 5.0]))):
                        version = gate.version + 1
                        net.write(version)
                        gate.version = version
                        applied.append(version)
                except WeightSyncTimeout:
                    expired += 1
            else:
                with gate:
                    assert net.values() == {float(gate.version)}
                    time.sleep(draw.choice([0, 0, 1e-4]))
                    with gate:
                        assert net.values() == {float(gate.version)}
        return expired

    with threads_change_places_often():
        calls = [Call(visit, number) for number in range(8)]
        expired = sum(call.result(30) for call in calls)
    assert applied == list(range(1, gate.version + 1))
    assert 0 < gate.version <= 480 - expired
    assert_nobody_is_left(gate)


def test_the_examples_in_the_docstrings_hold():
    results = doctest.testmod(module_under_test)
    assert (results.attempted > 0, results.failed) == (True, 0)


# --- waiting for a version -------------------------------------------------------------------------------------------


def test_a_wait_for_a_version_ends_when_it_is_in_force(gate):
    gate.version = 3
    assert gate.wait_for_version(3, 0.0)
    call = Call(lambda: gate.wait_for_version(5, 10))
    for version in (4, 6):
        with gate.alone():
            gate.version = version
    assert call.result() is True


def test_a_wait_for_a_version_that_does_not_come_ends_in_time_and_holds_nobody_up(gate):
    call = Call(lambda: gate.wait_for_version(1, 0.3))
    with gate.alone(time.monotonic() + 0.2):
        pass
    assert call.result() is False
