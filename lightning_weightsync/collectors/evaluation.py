"""How good are the weights now? Whole episodes at one pinned version, by workers of their own, as a validation loader.

An evaluation is a small group beside the group that it belongs to: the same factory, the same schemes (copies of
them), other processes, seeds and links. So nothing that is collected for training is touched, and a push to the
evaluation's workers is none of the trainer's versions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict

from lightning_weightsync.collectors.episodes import EpisodeFactory
from lightning_weightsync.collectors.group import GRACE_AFTER_FAILURE, CollectorGroup
from lightning_weightsync.errors import explain
from lightning_weightsync.schemes.push import is_per_worker

if TYPE_CHECKING:
    from lightning_weightsync.schemes.strategy import Weights

_TAG = 0x65766C  # keeps seeds of evaluations apart from those of the group's workers


class Evaluation:
    """A sized loader of episodes; made by ``CollectorGroup.evaluation``.

    Each iteration pushes the weights as they are at its first item to the evaluation's workers, has them play
    ``episodes`` whole episodes, and yields one ``TensorDict`` per episode, of batch size ``[]``:

    * ``episode_return`` and ``episode_length`` (float32, which is what ``self.log`` averages),
    * ``episode`` (int64): 0, 1, ...; each has a seed of its own, the same one in every iteration, so that two versions
      are compared on the same episodes,
    * ``policy_version`` (int64): of the group, when the weights were pinned. They are what a checkpoint would hold now,
      which may be newer than what the group's workers have.

    The first item waits for all episodes; ``group.look_around`` is called ten times a second meanwhile. A worker that
    is killed is replaced as the group's are (``max_restarts``), and its episodes are played again. An iteration that
    raises or is interrupted ends the evaluation's workers; the next one starts new ones.
    """

    def __init__(self, group: CollectorGroup, episodes: int, deterministic: bool, num_workers: int | None) -> None:
        if num_workers is None:
            num_workers = min(1, group.num_workers)
        if episodes < 1 or num_workers < 0 or num_workers > episodes:
            raise ValueError(
                f"episodes={episodes}, num_workers={num_workers}: at least one episode, and one for each worker"
            )
        self.episodes = episodes
        self.deterministic = deterministic
        self._of = group
        self._players = CollectorGroup(
            group.collector,
            num_workers,
            weight_sync_schemes={name: copy.copy(scheme) for name, scheme in group.weight_sync_schemes.items()},
            max_restarts=group.max_restarts,
            env_timeout=group.env_timeout,
            threads_per_worker=group.threads_per_worker,
        )
        self._indices = range(0)
        group.evaluations.add(self, self._players)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._of.evaluations.add(self, self._players)

    @property
    def worker_indices(self) -> range:
        """Which ``worker_idx`` its workers were told, as long as it is connected; empty if it is not."""
        return self._indices if self._players.connected else range(0)

    def __len__(self) -> int:
        """How many episodes an iteration yields."""
        return self.episodes

    def __iter__(self) -> Iterator[TensorDict]:
        """Push, play, and yield one item per episode. Making an iterator has no side effect."""
        yield from self.play().unbind(0)

    def play(self, weights_dict: Mapping[str, Weights] | None = None) -> TensorDict:
        """Play all episodes with these weights. Blocks until the last one has ended.

        Args:
            weights_dict: Weights for each destination; ``None``: as they are now in the sources, those of the
                ``UpdateWeights`` callback, or the modules that the group was connected with.

        Returns:
            All episodes, of batch size ``[episodes]``.

        Raises:
            WorkerError: Code in an evaluation worker raised; carries its traceback.
            WorkerDied: An evaluation worker's process ended.
            WeightSyncError: The weights did not arrive.
            ValueError: Each of the group's workers has weights of its own.
            RuntimeError: The group has no source that could be read again.
        """
        weights = dict(self._of.newest_weights() if weights_dict is None else weights_dict)
        for name, given in weights.items():
            if is_per_worker(given):
                raise ValueError(f"each worker has its own weights for {name!r}: call play() with those to evaluate")
        version = self._of.version
        players = self._players
        try:
            self.launch()
            players.look_around = self._of.look_around
            if weights:
                players.broadcast(**self._of.values)
            if not players.connected:
                players.collector = self._factory()
                players.connect(weights)
            elif weights:
                players.update_policy_weights_(weights_dict=weights)
            batch = next(iter(players))
        except BaseException as error:
            self.shutdown(GRACE_AFTER_FAILURE)
            explain(error, f"in an evaluation of {self.episodes} episodes, by workers of its own")
            raise
        # Workers label episodes with a version of their own hub's.
        batch["policy_version"] = torch.full((self.episodes,), version)
        ordered: TensorDict = batch[batch["episode"].argsort()]
        return ordered

    def launch(self) -> None:
        """Start the interpreters, if they do not run; does not block."""
        if not self._players.running:
            self._players.launch()

    def shutdown(self, timeout: float = 10.0) -> None:
        """Stop the evaluation's workers within ``timeout`` seconds; the next iteration starts new ones. Idempotent."""
        self._players.shutdown(timeout)

    def stats(self) -> dict[int, dict[str, Any]]:
        """For each of its workers: pid, state, cause and so on; empty before the first is started."""
        return self._players.stats()

    def __repr__(self) -> str:
        how = "deterministic" if self.deterministic else "sampled"
        return f"{type(self).__name__}({self.episodes} episodes, {how}, num_workers={self._players.num_workers})"

    def _factory(self) -> EpisodeFactory:
        group = self._of
        first, num_workers = group.evaluations.free_index(group.num_workers), max(1, self._players.num_workers)
        self._indices = range(first, first + num_workers)
        seed = np.random.SeedSequence([group.base_seed, group.rank, _TAG]).generate_state(1, np.uint64)[0]
        return EpisodeFactory(
            group.collector,
            self.episodes,
            num_workers,
            first,
            int(seed),
            self.deterministic,
        )
