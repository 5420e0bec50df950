"""What is a collector? Structural protocols, which a worker relies on: users implement them and import nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from tensordict import TensorDictBase


@runtime_checkable
class Collector(Protocol):
    """An iterable of batches that lives in a worker, and is closed once, however its work there ends.

    (But for a process that is killed: because it was stuck, say, or its parent has gone.)

    Weights arrive by *destination*, a path that is resolved on the collector itself: a collector whose policy is to be
    kept in sync as ``"policy"`` has an attribute ``policy``.

    Five members are optional:

    * ``gate: Gate``: the gate that the collector holds around its policy calls
      (:class:`~lightning_weightsync.schemes.gate.Gate`). Weights are switched under this gate, so a collector without
      one can be switched in the middle of a policy call. A collector that has one reads ``gate.version`` inside, to
      label its samples.
    * ``take_episodes() -> list[tuple[float, int]]``: (return, length) of each episode finished since the last call.
    * ``take_sums() -> Mapping[str, Tensor]``: numbers that add up over time and over workers, gathered since the last
      call (``CollectorGroup.reduce``). Small: they travel as text.
    * ``progress() -> tuple[int, str]``: a number that grows with each step of an environment, and what is under way
      ("environment 3 (CartPole-v1), in step(),"). Called by another thread while a batch is made, where the group was
      given an ``env_timeout``: if the number stays as it is for so long, the worker is stuck.
    * ``play_episodes(seeds: Sequence[int]) -> list[tuple[float, int]]``: plays one whole episode per seed, from a reset
      with that seed, and returns (return, length) of each in their order. Called with the gate held, in workers that
      evaluate (``CollectorGroup.evaluation``), and only there.
    """

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Iterate over batches, without end where the data has none. Calling it has no side effect.

        A batch may live in memory that the collector reuses: it is valid until the next one is asked for, and whoever
        keeps it copies it. Every batch has the batch size, the keys, shapes and dtypes of the first; the batch size has
        at least one dimension, along which the batches of several workers are put together.
        """
        ...

    def close(self) -> None:
        """Release environments, files and processes. May be called twice."""
        ...


class CollectorFactory(Protocol):
    """Makes a worker's collector, in the worker. It has to be picklable (by ``cloudpickle``).

    ``functools.partial(GymCollector, "CartPole-v1", Actor, frames_per_batch=1024)`` is one.
    """

    def __call__(self, *, worker_idx: int, seed: int) -> Collector:
        """Build the collector of one worker.

        Args:
            worker_idx: 0-based index of the worker.
            seed: Seed of this worker's environments. No two workers, ranks or restarts of a run get the same one.
        """
        ...
