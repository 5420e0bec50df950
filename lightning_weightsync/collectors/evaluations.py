"""Which evaluations does a group have, and which of their workers are to be started, told apart and stopped?"""

from __future__ import annotations

import time
import weakref
from contextlib import ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_weightsync.collectors.evaluation import Evaluation
    from lightning_weightsync.collectors.group import CollectorGroup


class Evaluations:
    """Those of one group. It keeps none of them alive; only their workers, until those are stopped.

    An evaluation that nobody has any more is stopped when the next one is made or connected, and with the group: by a
    thread that calls the group, not by whichever one happens to collect garbage.

    Pickled, it is empty; an evaluation that is pickled adds itself again.
    """

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[Evaluation], CollectorGroup]] = []

    def add(self, evaluation: Evaluation, workers: CollectorGroup) -> None:
        """There is one more, and these are its workers."""
        self._stop_unused()
        self._known.append((weakref.ref(evaluation), workers))

    def launch(self) -> None:
        """Start the interpreters of all; does not block."""
        for evaluation in self._living():
            evaluation.launch()

    def shutdown(self, timeout: float) -> None:
        """Stop the workers of all within ``timeout`` seconds overall, even if one raises when it is closed."""
        self._stop([workers for _, workers in self._known], timeout)
        self._forget_unused()

    def free_index(self, num_workers: int) -> int:
        """The first index beyond those of the group's own workers, and of all evaluations that are connected.

        Args:
            num_workers: Of the group; without worker processes its one collector has an index, too.
        """
        self._stop_unused()
        return max([1, num_workers, *(evaluation.worker_indices.stop for evaluation in self._living())])

    def make_way(self, num_workers: int, timeout: float) -> None:
        """Stop those whose workers have indices that so many workers of the group need, within ``timeout`` seconds."""
        in_the_way = [
            workers
            for known, workers in self._known
            if (evaluation := known()) is not None
            and evaluation.worker_indices
            and evaluation.worker_indices.start < num_workers
        ]
        self._stop(in_the_way, timeout)

    def _living(self) -> list[Evaluation]:
        return [evaluation for known, _ in self._known if (evaluation := known()) is not None]

    def _stop_unused(self) -> None:
        self._stop([workers for known, workers in self._known if known() is None], 0.0)
        self._forget_unused()

    def _forget_unused(self) -> None:
        self._known = [(known, workers) for known, workers in self._known if known() is not None or workers.running]

    @staticmethod
    def _stop(all_workers: list[CollectorGroup], timeout: float) -> None:
        deadline = time.monotonic() + timeout

        def stop(workers: CollectorGroup) -> None:
            workers.shutdown(max(0.0, deadline - time.monotonic()))

        with ExitStack() as stack:  # the others are stopped when one of them raises
            for workers in all_workers:
                stack.callback(stop, workers)

    def __reduce__(self) -> tuple[type[Evaluations], tuple[()]]:
        return Evaluations, ()
