"""What ran when? A run's events as a trace of trainer and workers on one clock, in Chrome's format.

It opens in ``chrome://tracing`` and in https://ui.perfetto.dev. The clock is the trainer's monotonic one: workers are
seen from there, as they are in ``events.jsonl``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_weightsync.report.events import RunEvents, read_events

TRACE = "trace.json"


def write_trace(events: Path) -> Path:
    """Make ``trace.json`` beside a file of events; returns where it is."""
    path = events.with_name(TRACE)
    made = {"traceEvents": list(trace_events(read_events(events))), "displayTimeUnit": "ms"}
    path.write_text(json.dumps(made), encoding="utf-8")
    return path


def trace_events(run: RunEvents) -> Iterator[dict[str, Any]]:
    """Complete events ("X") in microseconds: track 0 is the trainer, track ``i + 1`` is worker ``i``."""
    yield _name(0, "trainer")
    for batch in run.batches:
        begun = batch["asked"] + batch["waited"]
        push = min(batch.get("stall_ms", 0.0) / 1e3, batch["time"] - begun)  # all of the batch, drawn at its end
        facts: dict[str, Any] = {name: batch[name] for name in ("frames", "version", "pushes", "ages") if name in batch}
        yield _span(0, "wait for a batch", batch["asked"], begun, facts)
        yield _span(0, "learn", begun, batch["time"] - push, facts)
        if batch.get("pushes"):
            yield _span(0, "push", batch["time"] - push, batch["time"], facts)
        yield {"ph": "C", "pid": 0, "name": "version", "ts": 1e6 * batch["time"], "args": {"version": batch["version"]}}
    for evaluation in run.evaluations:
        yield {"ph": "i", "pid": 0, "tid": 0, "s": "t", "name": "evaluated", "ts": 1e6 * evaluation["time"]}
    for worker in sorted(run.workers):
        yield _name(worker + 1, f"worker {worker}")
        for span in run.spans(worker):
            if span.state != "waiting":
                yield _span(worker + 1, span.state, span.begin, span.end, {})
        for moment in run.switches(worker):
            yield {"ph": "i", "pid": 0, "tid": worker + 1, "s": "t", "name": "switched", "ts": 1e6 * moment}


def _name(track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": track, "name": "thread_name", "args": {"name": name}}


def _span(track: int, name: str, begin: float, end: float, facts: dict[str, Any]) -> dict[str, Any]:
    duration = max(0.0, end - begin)
    return {"ph": "X", "pid": 0, "tid": track, "name": name, "ts": 1e6 * begin, "dur": 1e6 * duration, "args": facts}
