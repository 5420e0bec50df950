"""What happens in a run? Written down as it happens: a line of JSON for each batch, and for each change of a worker.

Written by the trainer's side only, from what the callback logs and the group's public figures; workers do nothing for
it. A thread looks at the workers ten times a second. The file is ``events.jsonl`` in the run folder, and another one
for each further rank, which has workers of its own. Times are seconds since the recorder was made, on a monotonic
clock; ``began`` is when that was, by the wall clock, in seconds since 1970.

    {"kind": "start", "time": 1.2, "wall": "…", "began": 1764502102.8, "rank": 0, "ranks": 1, …}
    {"kind": "worker", "time": 1.3, "worker": 0, "state": "collecting", "version": 3, "pid": …, "restarts": 0}
    {"kind": "batch", "time": 2.0, "asked": 1.5, "waited": 0.4, "step": 1, "frames": 2048, "ages": {"0": 2048}, …}
    {"kind": "evaluation", "time": 3.0, "frames": 2048, "return": 21.5}
    {"kind": "end", "time": 9.9, "pushes": 51, …}
"""

from __future__ import annotations

import json
import logging
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import lightning.pytorch as pl
import torch
from tensordict import TensorDictBase

from lightning_weightsync.callback import UpdateWeights
from lightning_weightsync.report.events import events_file
from lightning_weightsync.report.trace import write_trace

if TYPE_CHECKING:
    from lightning_weightsync.collectors.group import CollectorGroup

log = logging.getLogger(__name__)

_FIGURES = {
    "weight_sync/bytes": "bytes",
    "weight_sync/staleness_mean": "staleness_mean",
    "weight_sync/staleness_max": "staleness_max",
    "weight_sync/workers_alive": "alive",
    "weight_sync/worker_restarts": "restarts",
    "collect/batches_dropped": "dropped",
    "collect/episode_return": "return",
    "collect/episode_length": "length",
    "collect/frames_per_sec": "frames_per_sec",
}
_OF_WORKER = ("state", "pid", "version", "restarts", "dropped")


class Pushes(NamedTuple):
    """How many, and how long they have held the trainer together."""

    number: int
    stall_seconds: float


class Recorder(pl.Callback):
    """Writes events of one fit. It has to come after the ``UpdateWeights`` callbacks, whose figures it reads.

    Args:
        folder: Of the run; made if it is not there.
        group: Whose workers are looked at.
        updates: The callbacks that push.
        trace: Whether ``trace.json`` is made of rank 0's events in the end; workers are looked at ten times as often
            then.
    """

    def __init__(self, folder: Path, group: CollectorGroup, updates: list[UpdateWeights], trace: bool = False) -> None:
        self.path = Path(folder) / events_file(0)
        self.totals = Totals()
        self._group = group
        self._updates = updates
        self._trace = trace
        self._interval = 0.01 if trace else 0.1
        self._began, self._began_wall = time.monotonic(), time.time()
        self._file: IO[str] | None = None
        self._writing = threading.Lock()
        self._ended = threading.Event()
        self._seen: dict[int, tuple[Any, ...]] = {}
        self._last = 0.0
        self._waited = 0.0
        self._ages: dict[str, int] = {}
        self._before: dict[str, torch.Tensor] = {}
        self._pushes = Pushes(0, 0.0)

    def __getstate__(self) -> dict[str, Any]:
        """For a rank that is spawned: what a fit has begun stays in this process."""
        return self.__dict__ | {"_file": None, "_writing": None, "_ended": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _writing=threading.Lock(), _ended=threading.Event())

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Begin the file, and to look at the workers."""
        if stage != "fit":
            return
        self.path = self.path.with_name(events_file(trainer.global_rank))
        self._trace = self._trace and trainer.is_global_zero
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("w", encoding="utf-8")
        except OSError as error:
            self._give_up(error)
            return
        group = self._group
        self._write(
            "start",
            wall=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            began=self._began_wall,
            rank=trainer.global_rank,
            ranks=trainer.world_size,
            module=type(pl_module).__name__,
            workers=group.num_workers,
            sync=group.sync,
            looks_per_second=round(1 / self._interval),
            destinations=sorted(group.weight_sync_schemes),
        )
        self._ended.clear()
        threading.Thread(target=self._look, name="weight-sync-recorder", daemon=True).start()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count from here."""
        self._last = self._now()
        self.totals = Totals(began=self._last)
        self._pushes = self._pushes_so_far()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note how long the batch was waited for, and how old its samples are."""
        self._waited = self._now() - self._last
        self._ages = {}
        if isinstance(batch, TensorDictBase) and "policy_version" in batch:
            ages, counts = torch.unique(self._group.version - batch["policy_version"], return_counts=True)
            self._ages = {str(age): count for age, count in zip(ages.tolist(), counts.tolist(), strict=True)}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write what the batch has come to."""
        asked, self._last = self._last, self._now()
        known = trainer.callback_metrics
        figures = {short: float(known[name]) for name, short in _FIGURES.items() if name in known}
        pushes = self._new_pushes()
        self.totals.add(figures, pushes, self._last)
        self._write(
            "batch",
            asked=round(asked, 5),
            waited=round(self._waited, 5),
            step=trainer.global_step,
            frames=self._group.frames,
            version=self._group.version,
            pushes=pushes.number,
            **({"stall_ms": round(1e3 * pushes.stall_seconds, 4)} if pushes.number else {}),
            ages=self._ages,
            **figures,
        )

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note what is known already: training may log returns of episodes too."""
        self._before = _returns(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write what an evaluation has come to."""
        # What was logged in between is another tensor, even if it holds the same number.
        found = [value for name, value in _returns(trainer).items() if value is not self._before.get(name)]
        if found and not trainer.sanity_checking:
            self._write("evaluation", frames=self._group.frames, **{"return": float(found[0])})

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write what the run has come to."""
        figures = self._group.metrics()
        self.totals.add_pushes(self._new_pushes())
        self.totals.nbytes = figures["weight_sync/bytes"]
        self.totals.restarts = int(figures["weight_sync/worker_restarts"])
        self.totals.ended = self._now()
        self._write("end", **self.totals.as_json())

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """End the file."""
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Say what has ended the run, and end the file."""
        self._write("exception", message=f"{type(exception).__name__}: {exception}"[:2000])
        self._close()

    def _pushes_so_far(self) -> Pushes:
        return Pushes(sum(u.num_pushes for u in self._updates), sum(u.stall_seconds for u in self._updates))

    def _new_pushes(self) -> Pushes:
        """Since the last call."""
        before, self._pushes = self._pushes, self._pushes_so_far()
        return Pushes(self._pushes.number - before.number, self._pushes.stall_seconds - before.stall_seconds)

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _write(self, kind: str, **fields: Any) -> None:
        with self._writing:
            if self._file is not None:
                line = json.dumps({"kind": kind, "time": round(self._now(), 4), **fields})
                try:
                    self._file.write(line + "\n")
                    self._file.flush()  # whoever looks at a run that was killed wants the last lines most
                except OSError as error:
                    self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """A full disk is no reason to end a run."""
        log.warning(f"{self.path} is not written (any further): {error}")
        self._file = None

    def _look(self) -> None:
        """In a thread of its own: what has changed about the workers."""
        while True:
            for worker, stats in self._group.stats().items():
                now = tuple(stats.get(name) for name in _OF_WORKER)
                if now != self._seen.get(worker):
                    self._seen[worker] = now
                    cause = stats.get("cause")
                    more = {"cause": str(cause).splitlines()[0][:300]} if cause else {}
                    self._write("worker", worker=worker, **dict(zip(_OF_WORKER, now, strict=True)), **more)
            if self._ended.wait(self._interval):
                return

    def _close(self) -> None:
        self._ended.set()
        with self._writing:
            if self._file is not None:
                file, self._file = self._file, None
                try:
                    file.close()
                    if self._trace:
                        write_trace(self.path)
                except OSError as error:
                    self._give_up(error)


def _returns(trainer: pl.Trainer) -> dict[str, torch.Tensor]:
    """What is known of episodes' returns, by the names under which it was logged."""
    return {name: value for name, value in trainer.callback_metrics.items() if name.endswith("episode_return")}


class Totals:
    """What the pushes of a fit have come to.

    Args:
        began: Seconds on the recorder's clock.
    """

    def __init__(self, began: float = 0.0) -> None:
        self.began = self.ended = began
        self.batches = 0
        self.pushes = 0
        self.stall_seconds = 0.0
        self.staleness_max = 0.0
        self.nbytes = 0.0
        self.restarts = 0

    def add(self, figures: dict[str, float], pushes: Pushes, now: float) -> None:
        """Take in one batch, and the pushes in it."""
        self.batches += 1
        self.add_pushes(pushes)
        self.staleness_max = max(self.staleness_max, figures.get("staleness_max", 0.0))
        self.ended = now

    def add_pushes(self, pushes: Pushes) -> None:
        """Take in pushes, those at the end of a fit too."""
        self.pushes += pushes.number
        self.stall_seconds += pushes.stall_seconds

    def as_json(self) -> dict[str, Any]:
        """Numbers by name; times in ms and s."""
        return {
            "batches": self.batches,
            "pushes": self.pushes,
            "bytes": int(self.nbytes),
            "mean_stall_ms": 1e3 * self.stall_seconds / max(1, self.pushes),
            "share_of_time": self.stall_seconds / max(1e-9, self.ended - self.began),
            "staleness_max": self.staleness_max,
            "restarts": self.restarts,
            "seconds": self.ended - self.began,
        }

    def __str__(self) -> str:
        figures = self.as_json()
        stall, lost, seconds = (figures["mean_stall_ms"], 100 * figures["share_of_time"], figures["seconds"])
        return (
            f"weight sync: {self.pushes} pushes, {self.nbytes / 1e6:.3g} MB, mean stall {stall:.2f} ms, "
            f"{lost:.2f} % of {seconds:.1f} s lost to it, staleness at most {self.staleness_max:g}, "
            f"{self.restarts} restart(s)"
        )
