"""What time is it, and who runs, in a simulation? One thread, a clock made by hand, and waits that cost no real time.

Within ``simulated`` the package's modules see this clock in the place of ``time``, polls that never block in the
place of ``select``, and a gate whose waiting thread hands over to the simulation. Whatever would block calls
``Clock.wait``, which lets something happen, or lets the time pass.
"""

from __future__ import annotations

import contextlib
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from lightning_weightsync.schemes import gate as gate_module
from lightning_weightsync.schemes import receiver as receiver_module


class Clock:
    """The time of a simulation, in seconds, and the name of the thread that is being played."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.thread = 0
        self.on_wait: Callable[[float], bool] = lambda seconds: False
        self.on_gate_wait: Callable[[], bool] = lambda: False

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def wait(self, seconds: float) -> None:
        """Somebody has nothing to do for so long: either something happens meanwhile, or the time passes."""
        if not self.on_wait(seconds):
            self.now += max(seconds, 1e-4)  # less might be lost in rounding

    @contextlib.contextmanager
    def playing(self, thread: int) -> Iterator[None]:
        """What is called within is called by this thread, as far as gates can tell."""
        before, self.thread = self.thread, thread
        try:
            yield
        finally:
            self.thread = before


class _Poll:
    """``select.poll()`` whose timeout is the simulation's."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._real = select.poll()
        self.register, self.unregister = self._real.register, self._real.unregister

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        events = self._real.poll(0)
        if events or not timeout:
            return events
        self._clock.wait(timeout / 1000)
        return self._real.poll(0)


class _Select:
    def __init__(self, clock: Clock) -> None:
        self.poll = lambda: _Poll(clock)

    def __getattr__(self, name: str) -> Any:
        return getattr(select, name)


class _Condition:
    """A condition whose wait gives the turn to the simulation: what the gate waits for happens there, or does not."""

    def __init__(self, clock: Clock, lock: Any) -> None:
        self._clock, self._lock = clock, lock

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> None:
        self._lock.release()
        try:
            if not self._clock.on_gate_wait():
                self._clock.now += 0.1 if timeout is None else timeout
        finally:
            self._lock.acquire()

    def notify_all(self) -> None:
        pass


class _GateThreading:
    """``threading``, as a gate sees it: threads are numbers."""

    TIMEOUT_MAX = threading.TIMEOUT_MAX

    def __init__(self, clock: Clock) -> None:
        self.Lock = threading.Lock
        self.Condition = lambda lock: _Condition(clock, lock)
        self.get_ident = lambda: clock.thread
        self.current_thread = threading.current_thread


class _NoThread:
    """A thread that is never run: the simulation sends the heartbeats itself."""

    def __init__(self, **kwargs: Any) -> None:
        pass

    def start(self) -> None:
        pass

    def join(self, timeout: float | None = None) -> None:
        pass


class _ReceiverThreading:
    def __getattr__(self, name: str) -> Any:
        return _NoThread if name == "Thread" else getattr(threading, name)


@contextlib.contextmanager
def simulated(clock: Clock) -> Iterator[None]:
    """Have the package live by this clock."""
    replaced = {time: clock, select: _Select(clock)}
    with contextlib.ExitStack() as stack:
        for module in [m for name, m in sys.modules.items() if name.startswith("lightning_weightsync.")]:
            for name, value in list(vars(module).items()):
                if value is time or value is select:
                    stack.enter_context(mock.patch.object(module, name, replaced[value]))
        stack.enter_context(mock.patch.object(gate_module, "threading", _GateThreading(clock)))
        stack.enter_context(mock.patch.object(receiver_module, "threading", _ReceiverThreading()))
        yield
