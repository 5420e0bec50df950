"""What were the returns of the episodes that ended in a batch? Sums over parts of its rows, and of earlier ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_weightsync.collectors.spaces import Flags


class EpisodeSums:
    """Return and length of the episodes under way in ``num_envs`` environments, from one batch to the next."""

    def __init__(self, num_envs: int) -> None:
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)

    def forget(self) -> None:
        """New episodes begin everywhere."""
        self._returns[:], self._lengths[:] = 0, 0

    def add(self, reward: npt.NDArray[Any], done: Flags, real: Flags) -> list[tuple[float, int]]:
        """Take in the rows of a batch, at once: of short episodes a batch has dozens.

        Args:
            reward: ``[num_envs, T]``.
            done: ``[num_envs, T]``: the episode has ended in this row.
            real: ``[num_envs, T]``: the row is a transition; another one counts for nothing.

        Returns:
            (return, length) of each episode that has ended, in the order of their ends.
        """
        rows = done.shape[1]
        begins = np.ones_like(done)
        begins[:, 1:] = done[:, :-1]
        first = np.flatnonzero(begins)  # an episode's part of a row is in one piece in all rows, one after the other
        last = np.append(first[1:], done.size) - 1
        returns = np.add.reduceat(np.where(real, reward, 0.0).ravel(), first, dtype=np.float64)
        lengths = np.add.reduceat(real.ravel(), first, dtype=np.int64)
        goes_on = first % rows == 0  # from the batch before; one in each environment
        returns[goes_on] += self._returns
        lengths[goes_on] += self._lengths
        ended, at = done.ravel()[last], last % rows
        under_way = at == rows - 1
        self._returns = np.where(ended, 0.0, returns)[under_way]
        self._lengths = np.where(ended, 0, lengths)[under_way]
        ends = np.flatnonzero(ended)
        ends = ends[np.argsort(at[ends], kind="stable")]
        return list(zip(returns[ends].tolist(), lengths[ends].tolist(), strict=True))
