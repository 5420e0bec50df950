"""What has a group collected so far? Frames, the last finished episodes, sums, and the rate since it was last asked."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

EPISODE_WINDOW = 100


class Ledger:
    """Counts what comes in.

    Attributes:
        frames: Transitions, over resumes.
    """

    def __init__(self) -> None:
        self.frames = 0
        self._episodes: deque[tuple[float, int]] = deque(maxlen=EPISODE_WINDOW)
        self._asked: tuple[float, int] | None = None
        self._sums: dict[str, Tensor] = {}

    def add(self, frames: int, episodes: Iterable[tuple[float, int]], sums: Iterable[Mapping[str, Any]] = ()) -> None:
        """Take in a batch: its transitions, (return, length) of each episode that ended in it, what adds up."""
        self.frames += frames
        self._episodes += episodes
        for several in sums:
            for name, value in several.items():
                new = torch.tensor(value, dtype=torch.float64)
                before = self._sums.get(name)
                if before is not None and before.shape != new.shape:
                    raise ValueError(
                        f"take_sums() returned {name!r} of shape {tuple(new.shape)}; before, {tuple(before.shape)}"
                    )
                self._sums[name] = new if before is None else before + new

    def take_sums(self) -> dict[str, Tensor]:
        """What has added up since the last call."""
        taken, self._sums = self._sums, {}
        return taken

    def start_clock(self) -> None:
        """Measure the rate from now on."""
        self._asked = (time.monotonic(), self.frames)

    def figures(self) -> dict[str, float]:
        """``collect/frames_per_sec`` since the last call; means over the last 100 episodes, absent before the first."""
        now = time.monotonic()
        since, frames = self._asked or (now, self.frames)
        self._asked = (now, self.frames)
        figures = {"collect/frames_per_sec": (self.frames - frames) / max(now - since, 1e-9)}
        if self._episodes:
            returns, lengths = zip(*self._episodes, strict=True)
            figures["collect/episode_return"] = float(np.mean(returns))
            figures["collect/episode_length"] = float(np.mean(lengths))
        return figures

    def state_dict(self) -> dict[str, Any]:
        """Frames and the last episodes, as plain numbers."""
        return {"frames": self.frames, "episodes": [list(episode) for episode in self._episodes]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state. Idempotent."""
        self.frames = int(state["frames"])
        self._episodes = deque(((float(r), int(n)) for r, n in state["episodes"]), maxlen=EPISODE_WINDOW)
