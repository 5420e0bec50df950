"""Who collects in a measured turn? Our groups, TorchRL's collectors, and a loop that is written by hand.

All engines of a comparison are up at once. While it is not its turn an engine sleeps: our workers that collect ahead
have filled what there is to fill, and TorchRL's, which go on for seconds, are stopped (SIGSTOP), and so are their
environments' processes. A turn of collectors that work ahead begins with batches that are not counted: those that were
ready, and one more of each worker. Those that are, are as many of each worker, because they tend to come in volleys.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.acting import NUM_ENVS, Task
from benchmarks.engines import Sample
from lightning_weightsync import CollectorGroup, DistributedWeightSyncScheme, GymCollector


class Engine(Protocol):
    """One of those that are compared.

    Attributes:
        name: As in the tables.
    """

    name: str

    def turn(self, seconds: float) -> Sample:
        """Collect for about so long; milliseconds per batch, by name."""
        ...

    def pids(self) -> list[int]:
        """Of the processes that must be quiet before somebody else's turn."""
        ...

    def close(self) -> None:
        """End all processes."""
        ...


class Ours:
    """A ``CollectorGroup`` of ``GymCollector``, and a push after each batch."""

    def __init__(self, name: str, task: Task, policy: str, workers: int, *, sync: bool) -> None:
        self.name = name
        make = task.policies[policy]
        share = task.frames // workers if sync else task.frames
        factory = partial(GymCollector, task.env, make, num_envs=NUM_ENVS, frames_per_batch=share)
        schemes = {"policy": DistributedWeightSyncScheme()}
        self._group = CollectorGroup(factory, workers, weight_sync_schemes=schemes, sync=sync, seed=1)
        self._policy = make()
        self._sync = sync
        self._ahead = 0 if sync else workers
        self._frames = task.frames
        try:
            self._group.start({"policy": self._policy})
        except BaseException:
            self.close()
            raise
        self._batches = iter(self._group)

    def batch(self) -> None:
        """Take one, and push."""
        batch = next(self._batches)
        if batch.numel() != self._frames:
            raise RuntimeError(f"{self.name}: a batch of {batch.numel()} frames in place of {self._frames}")
        if self._sync:
            self._group.update_policy_weights_(self._policy)
        else:
            self._group.send_async({"policy": self._policy})

    def turn(self, seconds: float) -> Sample:
        return {self.name: timed(self.batch, seconds, self._ahead)}

    def pids(self) -> list[int]:
        return [stat["pid"] for stat in self._group.stats().values()]

    def close(self) -> None:
        self._group.shutdown()


class Peer:
    """TorchRL's ``MultiSyncCollector`` or ``MultiAsyncCollector``, with the weight updates that it has by default.

    Args:
        name: As in the tables.
        task: What is played.
        workers: How many.
        sync: Which of the two.
        env: Makes one worker's environments, of which there are ``NUM_ENVS``.

    Raises:
        ModuleNotFoundError: TorchRL is not installed.
    """

    def __init__(self, name: str, task: Task, workers: int, *, sync: bool, env: Callable[[], Any]) -> None:
        from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector

        self.name = name
        self._ahead = 0 if sync else workers
        self._frames = task.frames
        before = set(multiprocessing.active_children())
        make = task.policies["probabilistic"]
        arguments: dict[str, Any] = {"frames_per_batch": task.frames, "total_frames": -1, "use_buffers": True}
        if sync:
            self._collector = MultiSyncCollector([env] * workers, make(), cat_results=0, **arguments)
        else:
            self._collector = MultiAsyncCollector([env] * workers, make(), **arguments)
        self._processes = set(multiprocessing.active_children()) - before
        self._batches: Iterator[Any] = iter(self._collector)

    def batch(self) -> None:
        """Take one, and push."""
        batch = next(self._batches)
        if batch.numel() != self._frames:
            raise RuntimeError(f"{self.name}: a batch of {batch.numel()} frames in place of {self._frames}")
        self._collector.update_policy_weights_()

    def turn(self, seconds: float) -> Sample:
        self._signal(signal.SIGCONT)
        try:
            return {self.name: timed(self.batch, seconds, self._ahead)}
        finally:
            self._signal(signal.SIGSTOP)

    def pids(self) -> list[int]:
        workers = [process.pid for process in self._processes if process.pid is not None]
        return [*workers, *(child for worker in workers for child in children(worker))]

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self._collector.shutdown()

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def children(pid: int) -> list[int]:
    """Processes that this one has started, as far as ``/proc`` tells."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def own_vector_env(task: Task) -> Any:
    """TorchRL's vector environment of ``NUM_ENVS``; it is gymnasium's ``AsyncVectorEnv``, with a process for each."""
    from torchrl.envs import GymEnv

    return GymEnv(task.env_id, num_envs=NUM_ENVS, categorical_action_encoding=True)


def wrapped_vector_env(task: Task) -> Any:
    """A vector environment for TorchRL that steps in one process and leaves resets to it: the fastest that we found."""
    from torchrl.envs import GymWrapper

    return GymWrapper(task.vector_env("Disabled"), categorical_action_encoding=True)


class Bare:
    """A loop that is written by hand, in as many processes: no TensorDict, no shared memory, no pushes, no trainer.

    Args:
        name: As in the tables.
        task: What is played.
        workers: How many processes.
        policy: Which form of it.
    """

    def __init__(self, name: str, task: Task, workers: int, policy: str) -> None:
        self.name = name
        self._frames = task.frames
        self._pipes: list[Connection] = []
        self._processes = []
        context = multiprocessing.get_context("spawn")
        for seed in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, task, policy, seed), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.batches(1)

    def batches(self, count: int) -> None:
        """So many batches, a share of them in each process."""
        steps = max(1, count * self._frames // NUM_ENVS // len(self._pipes))
        for pipe in self._pipes:
            pipe.send(steps)
        for pipe in self._pipes:
            pipe.recv()

    def turn(self, seconds: float) -> Sample:
        started = time.perf_counter()
        self.batches(1)
        count = max(1, round(seconds / (time.perf_counter() - started)))
        return {self.name: timed(lambda: self.batches(count), 0.0) / count}

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            process.kill()


def _serve(pipe: Connection, task: Task, policy: str, seed: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    loop = _steps(task, policy, seed)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            for _ in range(pipe.recv()):
                next(loop)
            pipe.send(None)


def _steps(task: Task, policy: str, seed: int) -> Iterator[None]:
    """Act, step, and keep what a trainer needs, for ever."""
    act = task.function(policy)
    envs = task.vector_env()
    length = 128
    observation, _ = envs.reset(seed=seed)
    seen = np.zeros((length, *observation.shape), observation.dtype)
    following = np.zeros_like(seen)
    rewards, log_probs = (np.zeros((length, NUM_ENVS), np.float32) for _ in range(2))
    ended, cut = (np.zeros((length, NUM_ENVS), np.bool_) for _ in range(2))
    actions = np.zeros((length, NUM_ENVS), np.int64)
    while True:
        for t in range(length):
            seen[t] = observation
            with torch.inference_mode():
                action, log_prob = act(torch.from_numpy(observation))
            actions[t], log_probs[t] = action.numpy(), log_prob.numpy()
            observation, rewards[t], ended[t], cut[t], info = envs.step(actions[t])
            following[t] = observation
            if "final_obs" in info:
                for e in np.flatnonzero(info["_final_obs"]):
                    following[t, e] = info["final_obs"][e]
            yield


def timed(batch: Callable[[], None], seconds: float, ahead: int = 0) -> float:
    """Milliseconds per batch, over so many seconds or more.

    Args:
        batch: Takes one.
        seconds: For how long at least.
        ahead: How many workers make batches that nobody has asked for yet. Two that each of them may have ready, and
            one that it has begun, are not counted; of those that are, each has made the same number.
    """
    for _ in range(3 * ahead):
        batch()
    started = time.perf_counter()
    count = 0
    while count < max(1, 3 * ahead) or count % max(1, ahead) or time.perf_counter() - started < seconds:
        batch()
        count += 1
    return 1e3 * (time.perf_counter() - started) / count
