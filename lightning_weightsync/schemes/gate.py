"""The gate: when may weights switch? Policy calls share it, a switch holds it alone.

It is a readers-writer lock in which a waiting switch has priority over *new* readers, while a thread that is already
inside may enter again, and readers that one switch has held back go before the next; so neither side starves and no
thread deadlocks with itself. It also carries the version in force, which changes only while the gate is held alone:
whoever holds the gate can trust ``gate.version``.

A sender of this host may switch the weights itself while nobody is inside (``transports.at_rest``). So whoever comes
into an empty gate first keeps such senders out, and looks whether there is another version. They only write for some
microseconds; the gate waits for that without being woken.

Do not hold it while waiting for anything that depends on a push, and never across ``await``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lightning_weightsync.errors import WeightSyncTimeout

_LOOK_AROUND = 0.1
_MOMENT = 0.0002
_OFTEN = 0.001


@dataclass
class _Reader:
    name: str
    since: float
    depth: int = 1


class OutsideWriter(Protocol):
    """A sender that may switch the weights while nobody is in the gate, as the gate knows it."""

    def keep_out(self) -> bool:
        """Keep it from writing from now on; ``False`` while it writes."""
        ...

    def let_in(self) -> None:
        """It may write."""
        ...

    def is_whole(self) -> bool:
        """It is kept out: whether it has left whole weights, rather than going to push them once more.

        Raises:
            WeightSyncError: They are a mixture of two versions, and it is gone.
        """
        ...

    def catch_up(self) -> None:
        """It is kept out, nobody is inside: make up for what else belongs to the version that it has written."""
        ...

    def gradients_recorded(self) -> None:
        """A policy call may record gradients: they need the weights until the backward pass."""
        ...

    def newer_version(self) -> int | None:
        """The version in force, if nobody has come into the gate since it has been written."""
        ...

    def withdraw(self) -> None:
        """Weights may lie elsewhere now: it may not write until it has pushed them in the usual way."""
        ...

    def covers(self, other: Any) -> bool:
        """Whether it pushes everything that another one, which has ended, has left as a mixture."""
        ...

    @property
    def ended(self) -> bool:
        """Whether it is gone."""
        ...


class Gate:
    """Readers-writer lock between policy calls (``with gate:``, shared) and a switch of weights (``gate.alone()``).

    Args:
        gradients: Whether policy calls may record gradients; what never does can be switched without being woken.

    Attributes:
        run: The run of the weights in force.
        version: The version of the weights in force. Stable for as long as the calling thread holds the gate.
        values: The schedule values that came with it (``CollectorGroup.broadcast``); as stable.

    Example:
        >>> gate = Gate()
        >>> with gate:  # a policy call
        ...     version = gate.version
    """

    def __init__(self, *, gradients: bool = True) -> None:
        self.run = 0
        self._version = 0
        self.values: Mapping[str, Any] = {}
        self._changed = threading.Condition(threading.Lock())
        self._readers: dict[int, _Reader] = {}
        self._writer: int | None = None
        self._writer_reentries = 0
        self._waiting_writers = 0
        self._waiting_readers = 0
        self._due_readers = 0  # of the waiting ones, those that a switch has held back already
        self._switches = 0
        self._gradients = gradients
        self._outside: tuple[OutsideWriter, ...] = ()

    def __enter__(self) -> Gate:
        """Enter shared. Blocks for one switch that is in progress or waits, unless this thread is already inside."""
        me = threading.get_ident()
        with self._changed:
            if self._writer == me:
                self._writer_reentries += 1
                return self
            mine = self._readers.get(me)
            if mine is not None:
                mine.depth += 1
                return self
            if self._writer is not None or self._waiting_writers:
                self._let_a_switch_pass()
            if self._outside:
                self._come_in_first()
            self._readers[me] = _Reader(threading.current_thread().name, time.monotonic())
        return self

    def __exit__(self, *exc: object) -> None:
        me = threading.get_ident()
        with self._changed:
            if self._writer == me and self._writer_reentries:
                self._writer_reentries -= 1
                return
            mine = self._readers.get(me)
            if mine is None:
                raise RuntimeError(
                    "the gate was left by a thread that had not entered it: enter and exit on one thread"
                )
            mine.depth -= 1
            if mine.depth == 0:
                del self._readers[me]
                if not self._readers:
                    self._let_in()
                if self._waiting_writers:
                    self._changed.notify_all()

    async def __aenter__(self) -> Gate:
        raise RuntimeError(
            "the gate must not be held across await: use `with gate:` around the synchronous policy call"
        )

    async def __aexit__(self, *exc: object) -> None:
        raise RuntimeError("the gate must not be held across await")

    @property
    def version(self) -> int:
        """See the class. Whoever is not inside reads what the next one to come in finds."""
        for writer in self._outside:
            newer = writer.newer_version()
            if newer is not None:
                return newer
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version = version

    def connect(self, writer: OutsideWriter) -> None:
        """From now on this sender may switch the weights while nobody is inside."""
        with self._changed:
            while (self._readers or self._writer is not None) and not writer.keep_out():
                self._changed.wait(_MOMENT)
            others = [other for other in self._outside if not (other.ended and writer.covers(other))]
            self._outside = (*others, writer)

    def disconnect(self, writer: OutsideWriter) -> None:
        """This sender does not write any more."""
        with self._changed:
            self._outside = tuple(other for other in self._outside if other is not writer)

    @property
    def inside(self) -> bool:
        """Whether the calling thread holds the gate, shared or alone."""
        me = threading.get_ident()
        with self._changed:
            return me in self._readers or self._writer == me

    def alone(
        self, deadline: float | None = None, check: Callable[[], None] | None = None
    ) -> AbstractContextManager[None]:
        """Hold the gate alone: the calling thread waits until every reader has left, and new ones wait for it.

        The holder may still enter shared (an applied hook may call the policy).

        Args:
            deadline: On the monotonic clock, in seconds; ``None`` waits for ever.
            check: Called about ten times a second while waiting; may raise to give up.

        Raises:
            RuntimeError: The calling thread is inside the gate already; it would wait for itself.
            WeightSyncTimeout: The deadline passed; names the threads inside and the seconds they have been there.
        """
        return _Alone(self, deadline, check)

    def _enter_alone(self, deadline: float | None, check: Callable[[], None] | None) -> None:
        me = threading.get_ident()
        with self._changed:
            if me in self._readers or self._writer == me:
                raise RuntimeError("weights cannot be switched from inside the gate: leave `with gate:` first")
            self._waiting_writers += 1
            try:
                while (busy := bool(self._writer or self._readers or self._due_readers)) or not self._keep_out():
                    remaining = None if deadline is None else min(deadline - time.monotonic(), threading.TIMEOUT_MAX)
                    if remaining is not None and remaining <= 0:
                        raise WeightSyncTimeout(f"the gate was not free before the push's deadline: {self._holders()}")
                    if check is not None:
                        check()
                        remaining = _LOOK_AROUND if remaining is None else min(remaining, _LOOK_AROUND)
                    if not busy:
                        remaining = _MOMENT
                    self._changed.wait(remaining)
                self._writer = me
                with contextlib.suppress(Exception):  # whoever switches finds out what is wrong, and tells
                    self._catch_up()
            except BaseException:
                if self._writer == me:
                    self._writer = None
                    self._let_in()
                raise
            finally:
                self._waiting_writers -= 1
                if self._writer != me:
                    self._changed.notify_all()

    def _leave_alone(self) -> None:
        with self._changed:
            self._writer = None
            self._writer_reentries = 0
            self._switches += 1
            self._due_readers = self._waiting_readers
            for writer in self._outside:
                writer.withdraw()
            self._let_in()
            self._changed.notify_all()

    def wait_for_version(self, version: int, timeout: float) -> bool:
        """Block until at least this version is in force, at most ``timeout`` seconds; not from inside the gate.

        Returns:
            Whether it is.
        """
        with self._changed:
            deadline = time.monotonic() + timeout
            while self.version < version and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, _OFTEN) if self._outside else left)  # it tells nobody
            return self.version >= version

    def _come_in_first(self) -> None:
        """Keep senders out, if nobody has yet; waits while one writes. The caller has ``_changed``."""
        while self._writer is not None or not (self._readers or self._finds_whole()):
            self._changed.wait(_MOMENT)
        if self._gradients and torch.is_grad_enabled():
            for writer in self._outside:
                writer.gradients_recorded()

    def _finds_whole(self) -> bool:
        if not self._keep_out():
            return False
        try:
            if all(writer.is_whole() for writer in self._outside):
                self._catch_up()
                return True
        except BaseException:
            self._let_in()
            raise
        self._let_in()
        return False

    def _keep_out(self) -> bool:
        """Keep all senders out, or none; whether they are."""
        kept: list[OutsideWriter] = []
        for writer in self._outside:
            if not writer.keep_out():
                for other in kept:
                    other.let_in()
                return False
            kept.append(writer)
        return True

    def _catch_up(self) -> None:
        for writer in self._outside:
            writer.catch_up()

    def _let_in(self) -> None:
        for writer in self._outside:
            writer.let_in()

    def _let_a_switch_pass(self) -> None:
        before = self._switches
        self._waiting_readers += 1
        try:
            while self._writer is not None or (self._waiting_writers and self._switches == before):
                self._changed.wait()
        finally:
            self._waiting_readers -= 1
            if self._switches != before:
                self._due_readers -= 1
                self._changed.notify_all()

    def _holders(self) -> str:
        now = time.monotonic()
        inside = [f"thread {r.name!r} has been inside for {now - r.since:.1f} s" for r in self._readers.values()]
        if self._writer is not None:
            inside.append("another switch is in progress")
        return "; ".join(inside) or "nobody is inside"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a gate belongs to one process and is never pickled")


class _Alone(AbstractContextManager[None]):
    """One switch."""

    def __init__(self, gate: Gate, deadline: float | None, check: Callable[[], None] | None) -> None:
        self._gate = gate
        self._deadline = deadline
        self._check = check

    def __enter__(self) -> None:
        self._gate._enter_alone(self._deadline, self._check)

    def __exit__(self, *exc: object) -> None:
        self._gate._leave_alone()
