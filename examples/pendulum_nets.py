"""What trainer and workers of the Pendulum example share. Workers import this, so no Lightning here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn.probabilistic import InteractionType, interaction_type
from torch import Tensor, nn
from torch.nn.functional import softplus

from lightning_weightsync import GymCollector

GAMMA = 0.98


def mlp(inputs: int, outputs: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )


class Actor(nn.Module):
    """A stochastic policy over actions in ``[-limit, limit]``: a Gaussian, squashed by tanh.

    Called with a ``TensorDict`` it adds ``action``: a sample, or the mode under
    ``set_interaction_type(DETERMINISTIC)``, as in an evaluation.
    """

    def __init__(
        self, observation_size: int = 3, action_size: int = 1, hidden_size: int = 64, limit: float = 2.0
    ) -> None:
        super().__init__()
        self.net = mlp(observation_size, 2 * action_size, hidden_size)
        self.limit = limit

    def sample(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Differentiable actions ``[*, action_size]``, and their log-probabilities ``[*]`` (in units of ``limit``)."""
        mean, log_std = self.net(observation).chunk(2, dim=-1)
        log_std = log_std.clamp(-5.0, 2.0)
        noise = torch.randn_like(mean)
        raw = mean + log_std.exp() * noise
        gaussian = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        squashing = 2 * (math.log(2) - raw - softplus(-2 * raw))  # log of tanh's derivative, without cancellation
        return self.limit * raw.tanh(), (gaussian - squashing).sum(-1)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        if interaction_type() is InteractionType.DETERMINISTIC:
            mean, _ = self.net(tensordict["observation"]).chunk(2, dim=-1)
            tensordict["action"] = self.limit * mean.tanh()
        else:
            tensordict["action"], _ = self.sample(tensordict["observation"])
        return tensordict


class Critic(nn.Module):
    """Two independent action values."""

    def __init__(self, observation_size: int = 3, action_size: int = 1, hidden_size: int = 64) -> None:
        super().__init__()
        self.nets = nn.ModuleList(mlp(observation_size + action_size, 1, hidden_size) for _ in range(2))

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        """Map observations ``[*, observation_size]`` and actions ``[*, action_size]`` to values ``[2, *]``."""
        both = torch.cat([observation, action], dim=-1)
        return torch.stack([net(both).squeeze(-1) for net in self.nets])


class PrioritizingCollector(GymCollector):
    """A ``GymCollector`` whose batches say how surprising each transition is: ``priority`` ``[num_envs, T]``.

    It is the temporal-difference error under the worker's own copies of policy and critic. Both are destinations of
    the weight sync, pushed as one version, and the gate is held from the first action to the priorities: they belong
    together, and ``policy_version`` names them both.
    """

    def __init__(self, env: Any, policy: Callable[[], Actor], *, critic: Callable[[], Critic], **kwargs: Any) -> None:
        super().__init__(env, policy, **kwargs)
        self.critic = critic()

    def __iter__(self) -> Iterator[TensorDictBase]:
        batches = super().__iter__()
        while True:
            with self.gate:
                batch = next(batches)
                batch["priority"] = self.surprise(batch)
            yield batch

    @torch.no_grad()
    def surprise(self, batch: TensorDictBase) -> Tensor:
        following = batch["next"]
        next_action, _ = self.policy.sample(following["observation"])
        next_value = self.critic(following["observation"], next_action).amin(0) * ~following["terminated"].squeeze(-1)
        value = self.critic(batch["observation"], batch["action"]).amin(0)
        return (following["reward"].squeeze(-1) + GAMMA * next_value - value).abs()
