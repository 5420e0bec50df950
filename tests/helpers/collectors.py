"""Factories of collectors, and environments that misbehave, for workers. Workers import this, so no Lightning here."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from torch import nn

from lightning_weightsync import GymCollector
from tests.helpers.envs import CountingEnv
from tests.helpers.policies import Policy

NUM_ENVS, STEPS = 2, 3
"""Of each worker's batch."""


def gym_collector(
    *,
    worker_idx: int,
    seed: int,
    env: Callable[[], Any] = CountingEnv,
    policy: Callable[[], nn.Module] = Policy,
    num_envs: int = NUM_ENVS,
    steps: int = STEPS,
    update_at: Any = "batch",
) -> GymCollector:
    return GymCollector(
        env,
        policy,
        num_envs=num_envs,
        frames_per_batch=num_envs * steps,
        worker_idx=worker_idx,
        seed=seed,
        update_at=update_at,
    )


def update_at_batch_or_step(*, worker_idx: int, seed: int, **kwargs: Any) -> GymCollector:
    """Even workers switch between batches, odd ones between policy calls."""
    return gym_collector(worker_idx=worker_idx, seed=seed, update_at=("batch", "step")[worker_idx % 2], **kwargs)


class MisbehavingEnv(gymnasium.Wrapper):
    """Does ``fault()`` in step ``at`` (counted from 1 over the environment's life)."""

    def __init__(self, fault: Callable[[], None], at: int, env: Callable[[], Any] = CountingEnv) -> None:
        super().__init__(env())
        self.fault = fault
        self.at = at
        self.steps = 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == self.at:
            self.fault()
        return super().step(action)


def misbehaving_collector(
    *,
    worker_idx: int,
    seed: int,
    fault: Callable[[], None],
    at: int,
    only: int,
    env: type[MisbehavingEnv] = MisbehavingEnv,
    **kwargs: Any,
) -> GymCollector:
    """Worker ``only`` does ``fault()`` in step ``at`` of its first environment."""

    def make_env() -> Any:
        return env(fault, at) if worker_idx == only else CountingEnv()

    return gym_collector(worker_idx=worker_idx, seed=seed, env=make_env, **kwargs)


class Reluctant(MisbehavingEnv):
    """Takes a second and a half to close."""

    def close(self) -> None:
        time.sleep(1.5)
        super().close()


class SlowEnv(CountingEnv):
    """Each step takes ``seconds``."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def step(self, action: Any) -> Any:
        time.sleep(self.seconds)
        return super().step(action)


def paced_collector(*, worker_idx: int, seed: int, seconds: Sequence[float], **kwargs: Any) -> GymCollector:
    """Worker ``i`` needs ``seconds[i]`` for a step of each of its environments."""
    return gym_collector(worker_idx=worker_idx, seed=seed, env=partial(SlowEnv, seconds[worker_idx]), **kwargs)


def misbehaving_factory(*, worker_idx: int, seed: int, fault: Callable[[], None], only: int) -> GymCollector:
    """Worker ``only`` does ``fault()`` before it has a collector."""
    if worker_idx == only:
        fault()
    return gym_collector(worker_idx=worker_idx, seed=seed)


def stumble() -> None:
    raise ArithmeticError("the dice rolled off the table")


def vanish() -> None:
    os._exit(9)


def leave() -> None:
    sys.exit(3)


def spin() -> None:
    while True:
        pass


def doze() -> None:
    time.sleep(3600)


def times(directory: Any, count: int, fault: Callable[[], None]) -> None:
    """Does ``fault()`` the first ``count`` times that anybody asks, in whatever process.

    Args:
        directory: An empty one, where it is written down how often that was.
    """
    for k in range(count):
        try:
            os.close(os.open(os.path.join(directory, f"{k}"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        fault()
        return


def replacements_misbehave(
    *, worker_idx: int, seed: int, directory: Any, fault: Callable[[], None], count: int, only: int = 1
) -> GymCollector:
    """The first ``count`` replacements of worker ``only`` do ``fault()`` before they have a collector."""
    if worker_idx == only:
        mine = os.path.join(directory, "first")
        if os.path.exists(mine):
            times(directory, count, fault)
        else:
            os.close(os.open(mine, os.O_CREAT))
    return gym_collector(worker_idx=worker_idx, seed=seed)


class Mortal(Policy):
    """Does ``fault()`` once while version ``at`` is being applied."""

    def __init__(self, directory: Any = None, fault: Callable[[], None] | None = None, at: int = 1) -> None:
        super().__init__()
        self.directory, self.fault, self.at = directory, fault, at
        self.version = 0

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.version)

    def set_extra_state(self, state: torch.Tensor) -> None:
        if self.fault is not None and int(state) == self.at:
            times(self.directory, 1, self.fault)


class Sluggish(Policy):
    """Takes ``seconds`` to apply version ``at``, counted from 0 by its own applied ones."""

    def __init__(self, seed: int | None = None, *, seconds: float = 0.0, at: int = -1) -> None:
        super().__init__(seed)
        self.seconds, self.at, self.version = seconds, at, -1

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(0)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.version += 1
        if self.version == self.at:
            time.sleep(self.seconds)


class Stamped:
    """A collector's batches with a column that tells whether the worker takes itself for a rank."""

    def __init__(self, collector: GymCollector) -> None:
        self.collector = collector
        self.policy, self.gate = collector.policy, collector.gate

    def __iter__(self) -> Iterator[TensorDict]:
        for batch in self.collector:
            distributed = any(name in os.environ for name in _VARIABLES) or torch.distributed.is_initialized()
            batch["variables"] = torch.full(tuple(batch.batch_size), distributed)
            yield batch

    def close(self) -> None:
        self.collector.close()


def stamped_collector(*, worker_idx: int, seed: int, policy: Callable[[], nn.Module] = Sluggish) -> Stamped:
    return Stamped(gym_collector(worker_idx=worker_idx, seed=seed, policy=policy))


class TrainerEnv(CountingEnv):
    """Fits a module of its own before its first episode, as an environment with a learned model would."""

    def __init__(self) -> None:
        super().__init__()
        from lightning.pytorch import Trainer
        from lightning.pytorch.demos.boring_classes import BoringModel

        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = Trainer(devices=1, accelerator="cpu", max_steps=2, limit_val_batches=0, **quiet)
        trainer.fit(BoringModel())
        assert (trainer.global_step, trainer.world_size, trainer.global_rank) == (2, 1, 0)


class TellingEnv(CountingEnv):
    """Logs, in its first step, what it was configured with, and what a relative path leads to."""

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.settings = settings
        self.told = False

    def step(self, action: Any) -> Any:
        if not self.told:
            self.told = True
            file = json.loads(Path(self.settings.file).read_text())
            seen = {name: self.settings[name] for name in ("began", "folder", "x")}
            logging.warning(f"worker {json.dumps(seen | {'file': file})}")
            logging.getLogger("env").info("an info")
            logging.getLogger("env").debug("a debug message")
        return super().step(action)


def configured_collector(*, worker_idx: int, seed: int, settings: Any) -> GymCollector:
    return gym_collector(worker_idx=worker_idx, seed=seed, env=partial(TellingEnv, settings), num_envs=1)


class ParentEnv(CountingEnv):
    """Starts a process of its own, as environments with a simulator do; it ignores polite requests to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.child = multiprocessing.get_context("fork").Process(target=_sleep_on)
        self.child.start()


def _sleep_on() -> None:
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3600)


class Stream:
    """A collector that is nobody's: an iterator of TensorDicts and ``close()``, no gate, two models.

    Args:
        reuse: Yield one TensorDict again and again, overwritten, as collectors that save allocations do.
    """

    def __init__(self, *, worker_idx: int, seed: int, reuse: bool = False) -> None:
        self.policy = Policy()
        self.nets = nn.ModuleDict({"q": nn.Linear(2, 1)})
        self.reuse = reuse
        self.closed = False

    def __iter__(self) -> Iterator[TensorDict]:
        kept = TensorDict({}, [4])
        while not self.closed:
            batch = kept if self.reuse else TensorDict({}, [4])
            batch["observation"] = torch.rand(4, 3)
            self.policy.eval()(batch)
            batch["q"] = self.nets["q"].weight.detach().sum().expand(4).clone()
            time.sleep(0.02)
            yield batch

    def close(self) -> None:
        self.closed = True


class Blocks:
    """A batch a time, as fast as they can be carried, each of ``nbytes``."""

    nbytes = 2**20

    def __init__(self, *, worker_idx: int, seed: int) -> None:
        self.policy = Policy()

    def __iter__(self) -> Iterator[TensorDict]:
        for number in count():
            yield TensorDict({"block": torch.full((1, self.nbytes), number % 256, dtype=torch.uint8)}, [1])

    def close(self) -> None:
        pass


_REPORTED = ("lightning", "lightning.pytorch", "lightning_fabric", "pytorch_lightning", "hydra", "omegaconf")
_VARIABLES = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED")


class Report:
    """Batches that tell about the worker's process: imports, environment variables, process groups, threads."""

    modules = _REPORTED
    variables = _VARIABLES

    def __init__(self, *, worker_idx: int, seed: int) -> None:
        self.policy = nn.Linear(1, 1)

    def __iter__(self) -> Iterator[TensorDict]:
        while True:
            facts = {
                "imported": torch.tensor([[name in sys.modules for name in _REPORTED]]),
                "variables": torch.tensor([[name in os.environ for name in _VARIABLES]]),
                "default_group": torch.tensor([torch.distributed.is_initialized()]),
                "threads": torch.tensor([torch.get_num_threads()]),
            }
            yield TensorDict(facts, [1])

    def close(self) -> None:
        pass
