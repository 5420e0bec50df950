"""What was recorded of a run? ``events.jsonl`` as series; a file that was cut off is read as far as it goes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

EVENTS = "events.jsonl"
"""The file in a run's folder; that of rank 0, if there are several."""


def events_file(rank: int) -> str:
    """The name of a rank's file."""
    return EVENTS if rank == 0 else f"events-rank{rank}.jsonl"


@dataclass
class Span:
    """A stretch of time in which a worker was in one state.

    Attributes:
        begin: Seconds.
        end: Seconds.
        state: ``"waiting"``, ``"collecting"``, ``"starting"`` or ``"dead"``. Of the states in ``CollectorGroup.stats``,
            one that is connected is waiting here; failed and stopped ones are dead.
    """

    begin: float
    end: float
    state: str


@dataclass
class RunEvents:
    """A run, as one of its ranks has recorded it.

    Attributes:
        start: The first event.
        batches: One for each training batch.
        workers: Worker -> its changes.
        evaluations: One for each validation on whole episodes.
        end: The last event of a fit that ended well.
        error: What ended it otherwise.
        seconds: Time of the last event, which is how long the record goes.
        began: From when on times count, in seconds since 1970; ``None``: from where the record itself counts them.
        others: What further ranks have recorded, by rank.
    """

    start: dict[str, Any] = field(default_factory=dict)
    batches: list[dict[str, Any]] = field(default_factory=list)
    workers: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    error: str | None = None
    seconds: float = 0.0
    began: float | None = None
    others: dict[int, RunEvents] = field(default_factory=dict)

    @property
    def ranks(self) -> dict[int, RunEvents]:
        """This record and the others, by rank."""
        return {int(self.start.get("rank", 0)): self, **self.others}

    def add(self, event: dict[str, Any]) -> None:
        """Take in an event; raises ``KeyError``, ``TypeError`` or ``ValueError`` if it is none."""
        kind = event["kind"]
        if kind == "start":
            self.start = event
        shift = 0.0 if self.began is None else self.start["began"] - self.began
        for name in ("time", "asked"):
            if name in event:
                event[name] += shift
        seconds = float(event["time"])
        if kind == "batch":
            self.batches.append(event)
        elif kind == "worker":
            self.workers.setdefault(int(event["worker"]), []).append(event)
        elif kind == "evaluation":
            self.evaluations.append(event)
        elif kind == "end":
            self.end = event
        elif kind == "exception":
            self.error = str(event["message"])
        self.seconds = seconds

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
        return [(b["time"], b["stall_ms"] / b["pushes"]) for b in self.batches if b.get("pushes")]

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


def read_run(folder: Path) -> RunEvents:
    """Read what all ranks of a run have recorded, on the clock of the first; a rank whose file is elsewhere is missing.

    Raises:
        OSError: There is no file of the first rank's.
        ValueError: A file is something else.
    """
    run = read_events(folder / events_file(0))
    for rank in range(1, int(run.start.get("ranks", 1))):
        path = folder / events_file(rank)
        if path.exists():
            run.others[rank] = read_events(path, run.start["began"])
    return run


def read_events(path: Path, began: float | None = None) -> RunEvents:
    """Read a file of events.

    Args:
        path: The file.
        began: See ``RunEvents``.

    Raises:
        OSError: There is none.
        ValueError: It is something else.
    """
    run = RunEvents(began=began)
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            run.add(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and run.start:  # the process ended while it was written
                break
            raise ValueError(f"{path}:{number} is no event: {type(error).__name__}: {error}") from None
    if not run.start:
        raise ValueError(f"{path} does not begin with an event of kind 'start'")
    return run
