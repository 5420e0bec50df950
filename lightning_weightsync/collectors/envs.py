"""What do several environments make together in one step? Transitions only: every row of a batch is a real one.

Observations and actions are lists of arrays, one for each leaf of their space (see ``spaces``), with the environments
along dimension 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import gymnasium
import numpy.typing as npt

from lightning_weightsync.collectors.spaces import Arrays, Flags, Leaf

Env: TypeAlias = "gymnasium.Env[Any, Any]"
Choose: TypeAlias = "Callable[[Arrays], Arrays]"
"""Observations -> actions, of all environments."""


class Step(NamedTuple):
    """What a step of all environments has brought.

    Attributes:
        following: The observations that it led to; where an episode has ended, its last one.
        observation: What the next action is for; where an episode has ended, the first one of the next.
        reward: ``[num_envs]``.
        terminated: ``[num_envs]``.
        truncated: ``[num_envs]``.
        real: Which environments have made a transition; the others were reset. ``None``: all of them.
    """

    following: Arrays
    observation: Arrays
    reward: npt.NDArray[Any]
    terminated: Flags
    truncated: Flags
    real: Flags | None


@dataclass
class At:
    """Which environment is at work; written by the thread that steps them, read by any.

    Attributes:
        titles: Of the environments, or one of all of them where they are stepped as one.
        calls: How many steps and resets have begun.
        index: Of the title; ``None``: none is at work.
        doing: ``"step"`` or ``"reset"``.
    """

    titles: Sequence[str]
    calls: int = 0
    index: int | None = None
    doing: str = "reset"

    def begin(self, index: int, doing: str) -> None:
        """An environment is called."""
        self.calls += 1
        self.index = index
        self.doing = doing

    def __str__(self) -> str:
        index = self.index
        return "the policy" if index is None else f"{self.titles[index]}, in {self.doing}(),"


class Envs(Protocol):
    """``num_envs`` environments. What one of them raises says in its notes which it was.

    Attributes:
        at: What is under way.
        names: Of the environments, in messages.
        observations: Leaves of one environment's observation.
        actions: Leaves of one environment's action.
        skips: Whether a step may make no transition in some environments (``Step.real``).
    """

    at: At
    names: list[str]
    observations: list[Leaf]
    actions: list[Leaf]
    skips: bool

    def reset(self, seeds: Sequence[int] | None = None) -> Arrays:
        """Begin an episode everywhere; seeds, if any, are one for each environment."""
        ...

    def step(self, actions: Arrays) -> Step:
        """Step all of them.

        Raises:
            ValueError: An observation has another shape or dtype than the space says, or a reward is not one number.
        """
        ...

    def play(self, seeds: Sequence[int], choose: Choose) -> list[tuple[float, int]]:
        """Play one whole episode per seed; (return, length) of each, in their order.

        Raises:
            ValueError: See ``step``; or an observation or a reward is NaN.
        """
        ...

    def close(self) -> None:
        """Close all of them."""
        ...
