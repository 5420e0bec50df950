"""What was recorded of a run? ``events.jsonl`` as series; a file that was cut off is read as far as it goes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

EVENTS = "events.jsonl"
"""The file in a run's folder."""


@dataclass
class Span:
    """A stretch of time in which a worker was in one state.

    Attributes:
        begin: Seconds.
        end: Seconds.
        state: As ``CollectorGroup.stats`` says it; ``"dead"`` for failed and stopped ones.
    """

    begin: float
    end: float
    state: str


@dataclass
class RunEvents:
    """A run, as it was recorded.

    Attributes:
        start: The first event.
        batches: One for each training batch.
        workers: Worker -> its changes.
        evaluations: One for each validation on whole episodes.
        end: The last event of a fit that ended well.
        error: What ended it otherwise.
    """

    start: dict[str, Any] = field(default_factory=dict)
    batches: list[dict[str, Any]] = field(default_factory=list)
    workers: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    error: str | None = None
    seconds: float = 0.0

    def series(self, name: str) -> list[tuple[float, float]]:
        """(time, value) of the batches that have a figure."""
        return [(batch["time"], batch[name]) for batch in self.batches if name in batch]

    def staleness(self) -> dict[int, int]:
        """Age in versions -> samples that were that old when they were learned from."""
        counts: Counter[int] = Counter()
        for batch in self.batches:
            counts.update({int(age): int(count) for age, count in batch.get("ages", {}).items()})
        return dict(sorted(counts.items()))

    def pushes(self) -> list[tuple[float, float]]:
        """(time, milliseconds that one push held the trainer), a mean for each batch with pushes."""
        return [(b["time"], b["push_ms"] / b["pushes"]) for b in self.batches if b.get("pushes") and "push_ms" in b]

    def sent(self) -> list[tuple[float, float]]:
        """(time, bytes since the batch before)."""
        totals = [(0.0, 0.0), *self.series("bytes")]
        return [(time, now - before) for (_, before), (time, now) in pairwise(totals)]

    def spans(self, worker: int) -> list[Span]:
        """What a worker was doing, in stretches; a later one covers those before.

        Workers of a ``sync`` group collect exactly while the trainer waits for a batch; of others it is known as often
        as somebody has looked.
        """
        changes = self.workers[worker]
        ends = [*(change["time"] for change in changes[1:]), self.seconds]
        spans: list[Span] = []
        for change, end in zip(changes, ends, strict=True):
            state = _STATES.get(change["state"], change["state"])
            if self.start.get("sync") and state == "collecting":
                state = "waiting"
            if spans and spans[-1].state == state:
                spans[-1].end = end
            else:
                spans.append(Span(change["time"], end, state))
        if self.start.get("sync"):
            waits = [(batch["asked"], batch["asked"] + batch["waited"]) for batch in self.batches]
            spans += [Span(begin, end, "collecting") for begin, end in waits]
        return sorted(spans, key=lambda span: _ORDER.index(span.state))

    def switches(self, worker: int) -> list[float]:
        """When a worker was first seen with another version."""
        changes = self.workers[worker]
        return [
            after["time"]
            for before, after in pairwise(changes)
            if after["version"] != before["version"] and after["pid"] == before["pid"]
        ]


_ORDER = ["waiting", "collecting", "starting", "dead"]
_STATES = {"connected": "waiting", "failed": "dead", "stopped": "dead"}


def read_events(path: Path) -> RunEvents:
    """Read a file of events.

    Raises:
        OSError: There is none.
        ValueError: It is something else.
    """
    run = RunEvents()
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
            kind, run.seconds = event["kind"], float(event["time"])
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):  # the process ended while it was written
                break
            raise ValueError(f"{path}:{number} is no event: {error}") from None
        if kind == "start":
            run.start = event
        elif kind == "batch":
            run.batches.append(event)
        elif kind == "worker":
            run.workers.setdefault(int(event["worker"]), []).append(event)
        elif kind == "evaluation":
            run.evaluations.append(event)
        elif kind == "end":
            run.end = event
        elif kind == "exception":
            run.error = str(event["message"])
    return run
