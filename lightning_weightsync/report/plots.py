"""How does a run look? Its series as pictures: PNG, as the data URLs that a page holds inside itself."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_weightsync.report.events import RunEvents

COLOURS = {"waiting": "#c7ccd1", "collecting": "#3b7dd8", "starting": "#f2c14e", "dead": "#d1495b"}


def draw(run: RunEvents) -> dict[str, str]:
    """Title -> data URL of a picture; what was not recorded is left out.

    Raises:
        ModuleNotFoundError: There is no matplotlib.
    """
    import matplotlib  # noqa: F401 - the first thing to fail, before anything is drawn

    made = {}
    for title, has_data, plot in _PLOTS:
        if has_data(run):
            made[title] = _picture(partial(plot, run=run))
    return made


def _picture(plot: Callable[[Any], None]) -> str:
    from matplotlib.figure import Figure  # not pyplot, which has global state and asks for a display

    figure = Figure(figsize=(7.2, 3.0), dpi=110, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    plot(axes)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _returns(axes: Any, run: RunEvents, *, over: str) -> None:
    for events, label, style in (
        (run.batches, "training, last 100 episodes", "-"),
        (run.evaluations, "evaluation", "o-"),
    ):
        having = [event for event in events if "return" in event]
        if having:
            axes.plot(
                [event[over] for event in having], [e["return"] for e in having], style, label=label, markersize=4
            )
    axes.set(xlabel={"frames": "frames", "time": "seconds"}[over], ylabel="return of an episode")
    axes.legend(frameon=False)


def _staleness(axes: Any, run: RunEvents) -> None:
    counts = run.staleness()
    total = sum(counts.values())
    axes.bar(list(counts), [100 * count / total for count in counts.values()], color=COLOURS["collecting"])
    axes.set(xlabel="age of a sample when it was learned from, in versions", ylabel="% of samples")
    if len(counts) < 12:
        axes.set_xticks(list(counts))


def _latency(axes: Any, run: RunEvents) -> None:
    times, values = zip(*run.pushes(), strict=True)
    axes.plot(times, values, ".", markersize=4)
    axes.set(xlabel="seconds", ylabel="ms that a push held the trainer", ylim=(0, None))


def _bytes(axes: Any, run: RunEvents) -> None:
    times, values = zip(*run.sent(), strict=True)
    axes.plot(times, [value / 1e3 for value in values], ".", markersize=4)
    axes.set(xlabel="seconds", ylabel="KB pushed, per batch", ylim=(0, None))


def _workers(axes: Any, run: RunEvents) -> None:
    rows = [(rank, of_rank, worker) for rank, of_rank in run.ranks.items() for worker in sorted(of_rank.workers)]
    for row, (_, of_rank, worker) in enumerate(rows):
        for state, colour in COLOURS.items():
            bars = [(s.begin, s.end - s.begin) for s in of_rank.spans(worker) if s.state == state]
            axes.broken_barh(bars, (row - 0.35, 0.7), facecolors=colour, label=None if row else state)
        moments = of_rank.switches(worker)
        label = None if row else "switched"
        axes.plot(moments, [row] * len(moments), "|", color="black", markersize=9, label=label)
    names = [f"rank {rank}: {worker}" if run.others else str(worker) for rank, _, worker in rows]
    axes.set(xlabel="seconds", ylabel="worker")
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.legend(frameon=False, ncols=5, loc="upper center", bbox_to_anchor=(0.5, 1.2))


_PLOTS: list[tuple[str, Callable[[RunEvents], bool], Callable[..., None]]] = [
    ("Return over frames", lambda run: bool(run.series("return")), partial(_returns, over="frames")),
    ("Return over time", lambda run: bool(run.series("return")), partial(_returns, over="time")),
    ("Staleness", lambda run: bool(run.staleness()), _staleness),
    ("Push latency", lambda run: bool(run.pushes()), _latency),
    ("Bytes", lambda run: bool(run.sent()), _bytes),
    ("Workers", lambda run: any(of_rank.workers for of_rank in run.ranks.values()), _workers),
]
