"""The networks of the CartPole example: what trainer and workers share. Workers import this, so no Lightning here."""

from __future__ import annotations

import math

import torch
from tensordict import TensorDictBase
from tensordict.nn.probabilistic import InteractionType, interaction_type
from torch import Tensor, nn


def linear(fan_in: int, fan_out: int, gain: float) -> nn.Linear:
    layer = nn.Linear(fan_in, fan_out)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, outputs: int, hidden: int, head_gain: float) -> nn.Sequential:
    """Two orthogonally initialised tanh layers and a linear head."""
    return nn.Sequential(
        linear(inputs, hidden, math.sqrt(2)),
        nn.Tanh(),
        linear(hidden, hidden, math.sqrt(2)),
        nn.Tanh(),
        linear(hidden, outputs, head_gain),
    )


class Actor(nn.Module):
    """A stochastic policy over discrete actions.

    Called with a ``TensorDict`` it acts: it adds ``action`` (int64) and ``sample_log_prob`` to ``observation``. The
    action is a sample, or the likeliest one under ``set_interaction_type(DETERMINISTIC)``, as in an evaluation.
    Training calls :meth:`log_probs`.
    """

    def __init__(self, observation_size: int = 4, num_actions: int = 2, hidden_size: int = 64) -> None:
        super().__init__()
        # A head near zero: the first actions are uniform, whatever the seed.
        self.net = mlp(observation_size, num_actions, hidden_size, head_gain=0.01)

    def log_probs(self, observation: Tensor) -> Tensor:
        """Log-probability of each action, ``[*, num_actions]``."""
        return torch.log_softmax(self.net(observation), dim=-1)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        log_probs = self.log_probs(tensordict["observation"])
        scores = log_probs
        if interaction_type() is not InteractionType.DETERMINISTIC:
            # A race of exponentials is what torch.multinomial draws too; but its checks slow collection by a sixth.
            scores = log_probs.exp() / torch.empty_like(log_probs).exponential_()
        action = scores.argmax(-1, keepdim=True)
        tensordict["action"] = action.squeeze(-1)
        tensordict["sample_log_prob"] = log_probs.gather(-1, action).squeeze(-1)
        return tensordict


class Critic(nn.Module):
    """A state value."""

    def __init__(self, observation_size: int = 4, hidden_size: int = 64) -> None:
        super().__init__()
        self.net = mlp(observation_size, 1, hidden_size, head_gain=1.0)

    def forward(self, observation: Tensor) -> Tensor:
        """Map observations ``[*, observation_size]`` to values ``[*]``."""
        return self.net(observation).squeeze(-1)
