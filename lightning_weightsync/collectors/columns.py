"""Where do the transitions of a batch lie? In columns that are allocated once, and filled step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from lightning_weightsync.collectors.spaces import Arrays, Flags, Leaf
from lightning_weightsync.collectors.trees import nested


@dataclass(frozen=True, slots=True)
class EnvColumns:
    """numpy views of the columns that are filled at each step, each ``[num_envs, T, ...]``.

    Writing through numpy costs an eighth of the same writes through TensorDict indexing.
    """

    observation: Arrays
    version: npt.NDArray[np.int64]
    following: Arrays
    reward: npt.NDArray[np.float32]
    terminated: Flags
    truncated: Flags
    done: Flags
    real: Flags


def allocate(leaves: Sequence[Leaf], num_envs: int, rows: int, worker_idx: int) -> tuple[TensorDict, EnvColumns]:
    """Make a batch with the columns that do not depend on the policy.

    Args:
        leaves: Of one environment's observation.
        num_envs: How many environments.
        rows: Steps that there is room for, ``T``.
        worker_idx: What its column is filled with.

    Returns:
        The batch, of batch size ``[num_envs, T]``, and views of its columns: observations and those that follow,
        ``[num_envs, T, *shape]`` in the leaf's dtype; in ``next``, reward (float32) and the three flags (bool),
        ``[num_envs, T, 1]``; ``policy_version`` and ``worker_idx`` (int64), ``[num_envs, T]``.
    """
    size = (num_envs, rows)
    paths = [leaf.path for leaf in leaves]
    seen, following = (
        [torch.from_numpy(np.zeros((*size, *leaf.shape), leaf.dtype)) for leaf in leaves] for _ in range(2)
    )
    reward = torch.zeros(*size, 1)
    terminated, truncated, done = (torch.zeros(*size, 1, dtype=torch.bool) for _ in range(3))
    version = torch.zeros(size, dtype=torch.int64)
    after = {"reward": reward, "terminated": terminated, "truncated": truncated, "done": done}
    batch = TensorDict(
        nested(paths, seen)
        | {
            "next": TensorDict(nested(paths, following) | after, size),
            "policy_version": version,
            "worker_idx": torch.full(size, worker_idx, dtype=torch.int64),
        },
        size,
    )
    return batch, EnvColumns(
        observation=[column.numpy() for column in seen],
        version=version.numpy(),
        following=[column.numpy() for column in following],
        reward=reward.numpy()[..., 0],
        terminated=terminated.numpy()[..., 0],
        truncated=truncated.numpy()[..., 0],
        done=done.numpy()[..., 0],
        real=np.ones(size, np.bool_),
    )
