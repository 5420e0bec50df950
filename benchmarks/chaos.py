"""Does everybody who lives hold the right weights, whatever happens to others? Pushes under random faults.

    python -m benchmarks.chaos                          # 1,000 pushes over each transport, some five minutes
    python -m benchmarks.chaos --pushes 60 --every 10   # does it run?
    python -m benchmarks.chaos --seed 7 --json chaos.json

Every so many pushes something happens to a random worker, before a push or in the middle of one:

    killed    SIGKILL
    stopped   SIGSTOP; when a replacement has joined, SIGCONT: the old process must not change any more
    paused    SIGSTOP and SIGCONT, for less than ``heartbeat_timeout``: nobody may be given up
    slow      a policy call that holds its gate for a part of the push's ``timeout``: nobody may be given up
    stuck     one that holds it for longer than that: the push fails, and the worker stays

Who is killed or stopped is replaced by a new process under the same index, while pushes go on. What must hold is
checked after each push and before each next fault; the exit status says whether it did. The seed fixes what happens
to whom, and in which order; what it interrupts is up to the machine.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from benchmarks.faults import FAULTS, End, Fault, Worker
from benchmarks.holdings import Holdings
from benchmarks.models import KINDS, change, checksum, leaves
from benchmarks.options import add_json, at_least, positive, write
from benchmarks.receivers import Receivers
from benchmarks.table import machine, table
from lightning_weightsync.errors import WeightSyncError
from lightning_weightsync.schemes.distributed import DistributedWeightSyncScheme

Transport = Literal["shared_memory", "network"]

SLACK = 0.25
"""Seconds that a push may end after its deadline: a loaded machine wakes nobody at once."""
ROOM = 8.0
"""MiB by which the sender's memory may differ between two looks."""
_CONNECT_SECONDS = 60.0


class Footprint(NamedTuple):
    """What the sender's process holds, and how many slots: those are made when they are needed, up to ``max_slots``."""

    process: Holdings
    slots: int

    @staticmethod
    def now(scheme: DistributedWeightSyncScheme) -> Footprint:
        """Of this process."""
        return Footprint(Holdings.of(os.getpid()), 0 if scheme._pool is None else len(scheme._pool))


@dataclass
class Outcome:
    """What has come of one transport."""

    transport: str
    pushes: int = 0
    failed: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    replaced: int = 0
    checked: int = 0
    milliseconds: list[float] = field(default_factory=list)
    rejoin_ms: list[float] = field(default_factory=list)
    before: Footprint | None = None
    after: Footprint | None = None
    wrong: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Everything; of the durations their median and the longest."""
        return {
            **vars(self),
            "before": self.before and asdict(self.before.process) | {"slots": self.before.slots},
            "after": self.after and asdict(self.after.process) | {"slots": self.after.slots},
            "milliseconds": {"median": statistics.median(self.milliseconds), "slowest": max(self.milliseconds)},
        }


class Chaos:
    """A sender, its workers, and what befalls them.

    Args:
        transport: ``same_host`` of the scheme.
        kind: Name of the model.
        workers: How many.
        seed: Of what happens to whom, and when.
        timeout: Of a push, in seconds.
        heartbeat_timeout: In seconds.
    """

    def __init__(
        self, transport: Transport, kind: str, workers: int, seed: int, timeout: float, heartbeat_timeout: float
    ) -> None:
        self.outcome = Outcome(transport)
        self._strikes = random.Random(seed)
        self._random = random.Random(seed + 1)
        self._kind = kind
        self._model = KINDS[kind].build()
        self._scheme = DistributedWeightSyncScheme(
            sync=False,
            timeout=timeout,
            connect_timeout=_CONNECT_SECONDS,
            heartbeat_timeout=heartbeat_timeout,
            same_host=transport,
        )
        self._scheme.init_on_sender("policy", model=self._model, num_workers=workers)
        self._workers: list[Worker] = []
        self._sums: dict[int, int] = {}
        self._fault: tuple[Fault, Worker] | None = None
        self._to_come: list[Fault] = []
        self._reported = False
        self._threads: list[threading.Thread] = []

    def run(self, pushes: int, every: int) -> Outcome:
        """Push, with one fault in each ``every`` pushes; blocks until everybody has been looked at."""
        try:
            self._workers = [self._start(index) for index in range(self._scheme._sender_hub().num_workers)]
            self._sums[0] = checksum(leaves(self._model))
            self._scheme.connect()
            strike: float = 0
            while self.outcome.pushes < pushes:
                if self.outcome.pushes % every == 0:
                    self._settle()
                    self._look_at_footprint(pushes)
                    strike = self.outcome.pushes + self._strikes.randrange(every // 2)
                if self.outcome.pushes >= strike:
                    self._strike()
                    strike = math.inf
                self._push_some(min(pushes, self.outcome.pushes + every - self.outcome.pushes % every))
            self._settle()
            self.outcome.after = Footprint.now(self._scheme)
            self._judge_footprint()
        finally:
            self._scheme.shutdown()
            for worker in self._workers:
                worker.close()
        return self.outcome

    def _start(self, index: int) -> Worker:
        return Worker(index, Receivers(self._kind, [End(self._scheme, index)]))

    # --- pushes --------------------------------------------------------------------------------------------------

    def _push_some(self, limit: int) -> None:
        """One push that blocks, or a few that do not, followed by their end."""
        if self._random.random() < 0.8 or self.outcome.pushes + 3 > limit:
            self._push()
            return
        under_way = []
        for _ in range(3):
            change(self._model)
            started = time.monotonic()
            handle = self._scheme.send_async()
            self._sums[handle.version] = checksum(leaves(self._model))
            under_way.append((started, handle))
        for started, handle in under_way:
            with suppress(WeightSyncError):
                handle.wait()
            skipped = [errand.link.worker_idx for errand in handle.errands if errand.state.value == "superseded"]
            self._judge(handle.version, time.monotonic() - started, handle.failed, skipped)

    def _push(self) -> bool:
        """Whether everybody applied it."""
        change(self._model)
        version = self._scheme.version + 1
        self._sums[version] = checksum(leaves(self._model))
        failed: dict[int, Exception] = {}
        started = time.monotonic()
        try:
            self._scheme.send()
        except WeightSyncError as error:
            failed = error.failed
            if not failed:
                self._complain(f"version {version} failed, and nobody is named: {error}")
        self._judge(version, time.monotonic() - started, failed, [])
        untouched = [worker for worker in self._workers if self._fault is None or worker.index != self._fault[1].index]
        if untouched:
            self._compare(self._random.choice(untouched))
        return not failed

    def _judge(self, version: int, seconds: float, failed: dict[int, Exception], skipped: Sequence[int]) -> None:
        outcome = self.outcome
        outcome.pushes += 1
        outcome.failed += bool(failed)
        outcome.milliseconds.append(1e3 * seconds)
        if seconds > self._scheme.timeout + SLACK:
            self._complain(f"version {version} took {seconds:.2f} s; the deadline was {self._scheme.timeout:.2f} s")
        for worker in self._workers:
            if worker.index not in failed and worker.index not in skipped:
                worker.version = max(worker.version, version)
        for index, error in failed.items():
            fault, victim = self._fault or (None, None)
            if fault is None or victim is None or victim.index != index:
                self._complain(f"version {version}: worker {index}, to whom nothing had happened, failed: {error}")
                continue
            if not isinstance(error, fault.errors):
                self._complain(f"version {version}: worker {index} was {fault.name}, and failed with {error!r}")
            if f"worker {index}" not in str(error) or "push of version" not in str(error):
                self._complain(f"version {version}: worker {index} is not named, or not the phase: {error}")
            if not self._reported and fault.ends:
                self._in_thread(self._replace, fault, victim)
            self._reported = True

    # --- faults --------------------------------------------------------------------------------------------------

    def _strike(self) -> None:
        if not self._to_come:
            self._to_come = self._strikes.sample(FAULTS, len(FAULTS))
        fault, victim = self._to_come.pop(), self._strikes.choice(self._workers)
        self.outcome.faults[fault.name] += 1
        self._fault, self._reported = (fault, victim), False
        delay = self._strikes.choice([0.0, self._strikes.uniform(0.0, 0.01)])
        if delay:
            self._in_thread(self._inflict, fault, victim, delay)
        else:
            self._inflict(fault, victim, 0.0, then_in_thread=True)

    def _inflict(self, fault: Fault, victim: Worker, delay: float, *, then_in_thread: bool = False) -> None:
        time.sleep(delay)
        victim.signal(fault.signals[0])
        if fault.name == "stopped" and not delay:  # while nothing is on its way to it
            deadline = time.monotonic() + 5.0
            while not victim.is_stopped() and time.monotonic() < deadline:
                time.sleep(0.001)
            victim.may_be_ahead = False

        def rest() -> None:
            for number in fault.signals[1:]:
                time.sleep(fault.pause * self._scheme.heartbeat_timeout)
                victim.signal(number)

        if then_in_thread:
            self._in_thread(rest)
        else:
            rest()

    def _replace(self, fault: Fault, old: Worker) -> None:
        """A new process under the same index; then see that the old one is fenced off."""
        new = self._start(old.index)
        started = time.monotonic()
        try:
            self._scheme.connect(worker_ids=old.index)
        except WeightSyncError as error:
            self._complain(f"no replacement of worker {old.index}, which was {fault.name}, could join: {error}")
            new.close()
            return
        self.outcome.rejoin_ms.append(1e3 * (time.monotonic() - started))
        self.outcome.replaced += 1
        self._workers[old.index] = new
        if fault.name == "stopped":
            self._see_that_it_is_fenced_off(old)
        old.close()

    def _see_that_it_is_fenced_off(self, old: Worker) -> None:
        allowed = {self._sums[old.version + ahead] for ahead in range(1 + old.may_be_ahead)}
        old.signal(signal.SIGCONT)
        for _ in range(2):
            if old.holds() not in allowed:
                self._complain(f"worker {old.index} changed after it was given up with version {old.version}")
            time.sleep(0.1)

    def _settle(self) -> None:
        """Wait for the end of what is going on; then everybody must hold what the trainer holds."""
        for thread in self._threads:
            thread.join(_CONNECT_SECONDS + 30.0)
        deadline = time.monotonic() + 4 * self._scheme.timeout + self._scheme.heartbeat_timeout
        while not self._push() or any(thread.is_alive() for thread in self._threads):
            if time.monotonic() > deadline:
                self._complain("a push still failed long after the fault")
                break
            for thread in self._threads:  # a fault that this push was the first to meet
                thread.join(_CONNECT_SECONDS + 30.0)
        self._threads.clear()
        if self._fault is not None and self._fault[0].ends and not self._reported:
            self._complain(f"worker {self._fault[1].index} was {self._fault[0].name}, and no push reported it")
        self._fault = None
        for worker in self._workers:
            self._compare(worker)

    def _compare(self, worker: Worker) -> None:
        self.outcome.checked += 1
        if worker.holds() != checksum(leaves(self._model)):
            self._complain(f"worker {worker.index} does not hold version {self._scheme.version}")

    # --- what is in use ------------------------------------------------------------------------------------------

    def _look_at_footprint(self, pushes: int) -> None:
        if self.outcome.before is None and self.outcome.pushes >= pushes // 4:
            self.outcome.before = Footprint.now(self._scheme)

    def _judge_footprint(self) -> None:
        if self.outcome.before is None or self.outcome.after is None:
            return
        before, after = self.outcome.before.process, self.outcome.after.process
        for name in ("descriptors", "threads"):
            if getattr(after, name) > getattr(before, name):
                self._complain(f"the sender's {name} grew from {getattr(before, name)} to {getattr(after, name)}")
        for name in ("resident", "private"):
            grown = getattr(after, name) - getattr(before, name)
            if grown > ROOM:
                self._complain(f"the sender's {name} memory grew by {grown:.1f} MiB")

    def _in_thread(self, function: Callable[..., None], *args: Any) -> None:
        def guarded() -> None:
            try:
                function(*args)
            except Exception as error:
                self._complain(f"{function.__name__}: {type(error).__name__}: {error}")

        thread = threading.Thread(target=guarded, name=f"chaos {function.__name__}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _complain(self, text: str) -> None:
        self.outcome.wrong.append(text)


def show(outcomes: Sequence[Outcome], timeout: float) -> None:
    """One row for each transport, and every complaint."""
    headers = ["", *[outcome.transport for outcome in outcomes]]
    rows: list[list[object]] = []

    def row(name: str, value: Callable[[Outcome], object]) -> None:
        rows.append([name, *map(value, outcomes)])

    row("pushes", lambda o: o.pushes)
    for fault in FAULTS:
        row(f"workers {fault.name}", lambda o, name=fault.name: o.faults[name])  # type: ignore[misc]
    row("workers replaced", lambda o: o.replaced)
    row("pushes that failed, for the worker concerned", lambda o: o.failed)
    row("workers compared with the trainer, bit for bit", lambda o: o.checked)
    row("push, median ms", lambda o: statistics.median(o.milliseconds))
    row(f"push, slowest ms (deadline {1e3 * timeout:.0f})", lambda o: max(o.milliseconds))
    row("replacement connected and served, median ms", lambda o: statistics.median(o.rejoin_ms) if o.rejoin_ms else "-")
    row("sender's resident memory, MiB, early and late", lambda o: _pair(o, lambda f: f"{f.process.resident:.0f}"))
    row("... of it private", lambda o: _pair(o, lambda f: f"{f.process.private:.0f}"))
    row("sender's descriptors, but for slots", lambda o: _pair(o, lambda f: str(f.process.descriptors)))
    row("slots", lambda o: _pair(o, lambda f: str(f.slots)))
    row("sender's threads", lambda o: _pair(o, lambda f: str(f.process.threads)))
    row("complaints", lambda o: len(o.wrong))
    print(table(headers, rows))
    for outcome in outcomes:
        for text in outcome.wrong:
            print(f"\n{outcome.transport}: {text}")


def _pair(outcome: Outcome, shown: Callable[[Footprint], str]) -> str:
    return ", ".join(shown(footprint) if footprint else "-" for footprint in (outcome.before, outcome.after))


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if nobody had reason to complain."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pushes", type=at_least(1), default=1000)
    parser.add_argument("--every", type=at_least(2), default=20, help="pushes per fault (at least 2)")
    parser.add_argument("--workers", type=at_least(1), default=4)
    parser.add_argument("--kind", choices=sorted(KINDS), default="mlp")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=positive, default=2.0, help="of a push, in seconds")
    parser.add_argument("--heartbeat", type=positive, default=1.0, help="heartbeat_timeout, in seconds")
    parser.add_argument("--transports", nargs="+", choices=["shared_memory", "network"], default=None)
    add_json(parser, "what was seen")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    outcomes = []
    for transport in options.transports or ["shared_memory", "network"]:
        chaos = Chaos(transport, options.kind, options.workers, options.seed, options.timeout, options.heartbeat)
        outcomes.append(chaos.run(options.pushes, options.every))
    show(outcomes, options.timeout)
    report = {"machine": machine(), "seed": options.seed, "outcomes": [outcome.as_json() for outcome in outcomes]}
    write(options.json, report)
    return 1 if any(outcome.wrong for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
