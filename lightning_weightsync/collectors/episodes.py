"""How does a worker play whole episodes, in place of batches? By a collector that can, under one version.

The worker's side of an evaluation; ``evaluation.py`` is the trainer's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn.probabilistic import InteractionType, set_interaction_type

from lightning_weightsync.collectors.base import Collector, CollectorFactory
from lightning_weightsync.schemes.gate import Gate


@dataclass(frozen=True)
class EpisodeFactory:
    """Makes the collector of one evaluation worker, in the worker.

    Args:
        collector: The group's own factory.
        episodes: Of one evaluation, over all workers; worker ``w`` of ``n`` plays ``w``, ``w + n``, ...
        num_workers: How many share them.
        first_worker_idx: What ``collector`` is told is this and the worker's index, so that no two workers of a
            trainer are told the same (an environment may derive a port or a folder from it).
        seed: Episode ``k`` has a seed of its own, derived from this one, whoever plays it and whenever.
        deterministic: Whether the policy is to take its best action.
    """

    collector: CollectorFactory
    episodes: int
    num_workers: int
    first_worker_idx: int
    seed: int
    deterministic: bool

    def __call__(self, *, worker_idx: int, seed: int) -> EpisodeCollector:
        """Build the group's collector and make it play. ``seed`` is not used: it differs between restarts."""
        own, *seeds = (int(s) for s in np.random.SeedSequence(self.seed).generate_state(1 + self.episodes))
        collector = self.collector(worker_idx=self.first_worker_idx + worker_idx, seed=own)
        share = range(worker_idx, self.episodes, self.num_workers)
        return EpisodeCollector(collector, {episode: seeds[episode] for episode in share}, self.deterministic)


class EpisodeCollector:
    """Yields the same episodes again and again, with whatever weights are in force, as one batch of their figures.

    Its gate, if the collector has one, is held from the first action of a batch to the last: one version. Every other
    attribute is the collector's, so that destinations are found where they are in the group's workers.

    Args:
        collector: What plays: it has ``play_episodes(seeds) -> [(return, length), ...]``.
        seeds: Episode -> seed.
        deterministic: Play under ``InteractionType.DETERMINISTIC``; else as batches are collected.

    Raises:
        TypeError: The collector cannot play whole episodes.
    """

    def __init__(self, collector: Collector, seeds: dict[int, int], deterministic: bool) -> None:
        if not callable(getattr(collector, "play_episodes", None)):
            raise TypeError(
                f"{type(collector).__name__} cannot be evaluated: it has no play_episodes(seeds), which plays one "
                "whole episode per seed and returns (return, length) of each; GymCollector has"
            )
        self._collector: Any = collector
        self._seeds = seeds
        self._deterministic = deterministic

    def __getattr__(self, name: str) -> Any:
        if name == "_collector":  # not there yet
            raise AttributeError(name)
        return getattr(self._collector, name)

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Play all episodes for each batch that is asked for."""
        while True:
            yield self._play()

    def close(self) -> None:
        """Close the collector."""
        self._collector.close()

    def _play(self) -> TensorDict:
        gate = getattr(self._collector, "gate", None)
        gate = gate if isinstance(gate, Gate) else None
        mode = set_interaction_type(InteractionType.DETERMINISTIC) if self._deterministic else nullcontext()
        seeds = list(self._seeds.values())
        # What a policy draws depends on the episodes only. The CPU's generator alone: without worker processes this is
        # the trainer's process, and only that generator is given back to it.
        torch.default_generator.manual_seed(seeds[0])
        with gate or nullcontext(), mode:
            version = gate.version if gate is not None else None
            played = self._collector.play_episodes(seeds)
        if len(played) != len(seeds):
            raise RuntimeError(
                f"{type(self._collector).__name__}.play_episodes was given {len(seeds)} seeds and returned "
                f"{len(played)} episodes"
            )
        returns, lengths = zip(*played, strict=True)
        figures = {
            "episode": torch.tensor(list(self._seeds)),
            "episode_return": torch.tensor(returns, dtype=torch.float32),
            "episode_length": torch.tensor(lengths, dtype=torch.float32),
        }
        if version is not None:
            figures["policy_version"] = torch.full((len(seeds),), version)
        return TensorDict(figures, [len(seeds)])
