"""What acts in the measurements of collectors? The environments and policies that all engines share.

A policy is given in two forms, as TorchRL's users write it and by hand for speed, and each of them twice: as a module
that maps a ``TensorDict``, and, for the loop that is written by hand, as a function of tensors. All do the same
arithmetic with the same network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.functional import linear

NUM_ENVS = 8
"""Environments of each worker."""


class Pixels(gymnasium.Env[npt.NDArray[np.uint8], np.int64]):
    """Frames of 84x84x4 bytes that cost little more than their writing; episodes of 200 steps."""

    observation_space = Box(0, 255, (84, 84, 4), np.uint8)
    action_space = Discrete(4)

    def __init__(self) -> None:
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._frame(), {}

    def step(self, action: np.int64) -> tuple[npt.NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self._frame(), float(action), self._steps == 200, False, {}

    def _frame(self) -> npt.NDArray[np.uint8]:
        return np.full((84, 84, 4), self._steps, np.uint8)


gymnasium.register("Pixels-v0", "benchmarks.acting:Pixels")


class PixelNet(nn.Module):
    """Logits of four actions; bytes become numbers only here."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 16, kernel_size=8, stride=8)
        self.head = nn.Linear(16 * 10 * 10, 4)

    def forward(self, observation: Tensor) -> Tensor:
        """Map frames ``[*, 84, 84, 4]`` (uint8) to ``[*, 4]``."""
        images = observation.permute(0, 3, 1, 2).float() / 255
        logits: Tensor = self.head(self.conv(images).relu().flatten(1))
        return logits


def cartpole_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def probabilistic(net: Callable[[], nn.Module]) -> nn.Module:
    """The policy as TorchRL's users write it, which is slow to call."""
    logits = TensorDictModule(net(), in_keys=["observation"], out_keys=["logits"])
    sample = ProbabilisticTensorDictModule(
        in_keys=["logits"], out_keys=["action"], distribution_class=Categorical, return_log_prob=True
    )
    policy: nn.Module = ProbabilisticTensorDictSequential(logits, sample)
    return policy


class HandWritten(nn.Module):
    """The same policy as a module that maps a ``TensorDict``, without a distribution object.

    Args:
        net: A factory of the network.
    """

    def __init__(self, net: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.net = net()

    def logits(self, observation: Tensor) -> Tensor:
        """Of the actions."""
        logits: Tensor = self.net(observation)
        return logits

    def act(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """An action of each row, and its log-probability."""
        log_probs = self.logits(observation).log_softmax(-1)
        # A race of exponentials: what torch.multinomial draws too, without its checks.
        action = log_probs.exp().div_(torch.empty_like(log_probs).exponential_()).argmax(-1, keepdim=True)
        return action.squeeze(-1), log_probs.gather(-1, action).squeeze(-1)

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Add ``action`` and ``sample_log_prob`` to ``observation``."""
        td["action"], td["sample_log_prob"] = self.act(td["observation"])
        return td


class HandWrittenCartPole(HandWritten):
    """The network written out: calls of modules inside, and their attributes, take longer than its arithmetic."""

    def __init__(self) -> None:
        super().__init__(cartpole_net)
        self._weights = tuple(self.net.parameters())

    def logits(self, observation: Tensor) -> Tensor:
        """Map ``[*, 4]`` to ``[*, 2]``."""
        w1, b1, w2, b2, w3, b3 = self._weights
        hidden = linear(observation, w1, b1).tanh_()
        return linear(linear(hidden, w2, b2).tanh_(), w3, b3)


def sample_by_distribution(net: nn.Module, observation: Tensor) -> tuple[Tensor, Tensor]:
    """An action of each row, and its log-probability, with torch's distribution object."""
    distribution: Any = Categorical(logits=net(observation))
    action = distribution.sample()
    return action, distribution.log_prob(action)


@dataclass(frozen=True)
class Task:
    """An environment and its network.

    Attributes:
        name: As in the tables.
        env_id: Of its environment.
        net: A factory of the network.
        hand_written: A factory of the policy that is written by hand.
        frames: Transitions per batch, after each of which weights are pushed.
    """

    name: str
    env_id: str
    net: Callable[[], nn.Module]
    hand_written: Callable[[], HandWritten]
    frames: int

    @property
    def env(self) -> Callable[[], gymnasium.Env[Any, Any]]:
        """A factory of one environment."""
        return partial(gymnasium.make, self.env_id)

    @property
    def policies(self) -> dict[str, Callable[[], nn.Module]]:
        """The two forms of its policy, as factories."""
        return {"probabilistic": partial(probabilistic, self.net), "hand-written": self.hand_written}

    def function(self, policy: str) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """One of them as a function of tensors: observations to actions and their log-probabilities."""
        if policy == "probabilistic":
            return partial(sample_by_distribution, self.net().eval())
        return self.hand_written().eval().act

    def vector_env(self, autoreset_mode: str = "SameStep") -> SyncVectorEnv[Any, Any]:
        """``NUM_ENVS`` environments, stepped in turn by gymnasium."""
        return SyncVectorEnv([self.env] * NUM_ENVS, autoreset_mode=AutoresetMode(autoreset_mode))


CARTPOLE = Task("CartPole", "CartPole-v1", cartpole_net, HandWrittenCartPole, 2048)
# With the module that registers it.
PIXELS = Task("84x84x4 bytes", "benchmarks.acting:Pixels-v0", PixelNet, partial(HandWritten, PixelNet), 512)
