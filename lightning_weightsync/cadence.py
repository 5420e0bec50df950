"""How much has been trained since the last push? Finished batches, optimizer steps, collected frames, seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from lightning_weightsync.wording import nearest

__all__ = ["Cadence", "IntervalUnit"]

IntervalUnit = Literal["batches", "optim_steps", "frames", "seconds"]

_UNITS: tuple[str, ...] = get_args(IntervalUnit)


class Cadence:
    """Says when a push is due: at least ``interval`` counted since the last push.

    It is never a modulus of a total, so a push that comes late, or an interval that is overridden on resume, does not
    make the next one come early or never.

    Args:
        interval: How many make a push due; at least 1. An int; with ``"seconds"`` any positive number.
        unit: What is counted. ``"batches"``: finished training batches. ``"optim_steps"``: real optimizer steps.
            ``"frames"``: what `batch_ended` is told. ``"seconds"``: the time between two looks at the clock, which is
            looked at when a batch ends; the time before `start_clock`, between two runs for example, does not count.
        clock: Seconds that never go backwards.

    Raises:
        ValueError: ``interval`` is below 1 (not positive, in seconds), or there is no such unit.
        TypeError: ``interval`` is no int, or in seconds no number.

    Example:
        >>> cadence = Cadence(2, "batches")
        >>> cadence.batch_ended()
        >>> cadence.due
        False
        >>> cadence.batch_ended()
        >>> cadence.due, cadence.pending
        (True, 2)
        >>> cadence.pushed()
        >>> cadence.pending
        0
    """

    def __init__(
        self,
        interval: float = 1,
        unit: IntervalUnit | str = "batches",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if unit not in _UNITS:
            raise ValueError(f"interval_unit={unit!r} is none of {', '.join(map(repr, _UNITS))}{nearest(unit, _UNITS)}")
        _check_interval(interval, unit)
        self.interval = interval
        self.unit: IntervalUnit = unit  # type: ignore[assignment]
        self._counted = f"_{unit}"
        self._clock = clock
        self._looked: float | None = None
        self.load_state_dict({})

    def start_clock(self) -> None:
        """Count seconds from now on, beside those that were counted before; the time in between does not count."""
        self._looked = self._clock()

    def batch_ended(self, frames: int = 0) -> None:
        """Count one finished training batch, what was collected since the one before, and the time.

        Args:
            frames: Transitions that were collected since the last call.
        """
        self._batches += 1
        self._frames += frames
        if self._looked is not None:
            now = self._clock()
            self._seconds += now - self._looked
            self._looked = now

    def step_happened(self) -> bool:
        """Count one real optimizer step; whether it makes a push due."""
        self._optim_steps += 1
        return self.unit == "optim_steps" and self._optim_steps >= self.interval

    def pushed(self) -> None:
        """Start counting anew: the weights as they are now have been pushed."""
        self.load_state_dict({})
        if self._looked is not None:
            self._looked = self._clock()

    @property
    def pending(self) -> float:
        """How many of the unit were counted since the last push; an int, but for seconds."""
        counted: float = getattr(self, self._counted)
        return counted

    @property
    def unpushed(self) -> bool:
        """Whether anything that may have changed the weights was counted since the last push.

        That is an optimizer step, and a batch too, unless it is steps that are counted.
        """
        return bool(self._optim_steps or (self._batches and self.unit != "optim_steps"))

    @property
    def due(self) -> bool:
        """Whether at least ``interval`` were counted since the last push."""
        return self.pending >= self.interval

    def state_dict(self) -> dict[str, int]:
        """What was counted since the last push, as ints; neither interval nor unit, which a resumed run may change."""
        return {
            "batches": self._batches,
            "optim_steps": self._optim_steps,
            "frames": self._frames,
            "milliseconds": round(1e3 * self._seconds),
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on counting from a saved state, from nothing where it is empty; loading twice is loading once."""
        self._batches = int(state.get("batches", 0))
        self._optim_steps = int(state.get("optim_steps", 0))
        self._frames = int(state.get("frames", 0))
        self._seconds = int(state.get("milliseconds", 0)) / 1e3

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_looked": None}  # clocks of other processes show other times


def _check_interval(interval: object, unit: str) -> None:
    kind, name, least = (int | float, "a number", "positive") if unit == "seconds" else (int, "an int", "at least 1")
    if isinstance(interval, bool) or not isinstance(interval, kind):
        raise TypeError(f"the interval in {unit} is {name}, got {interval!r} ({type(interval).__name__})")
    if not (interval > 0 if unit == "seconds" else interval >= 1):
        raise ValueError(f"the interval in {unit} is {least}, got {interval}")
