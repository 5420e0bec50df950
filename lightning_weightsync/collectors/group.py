"""What does the trainer hold? A group: N workers, one version, batches when they are asked for.

The group is a loader (iterable, sized, with state) and the target of pushes. It works without Lightning; with it, the
callback launches it in ``setup``, connects it when the weights are restored, and stops it on every way a run can end.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_weightsync.collectors.ahead import AheadPool
from lightning_weightsync.collectors.base import CollectorFactory
from lightning_weightsync.collectors.inline import InlinePool
from lightning_weightsync.collectors.ledger import Ledger
from lightning_weightsync.collectors.member import WorkerState
from lightning_weightsync.collectors.pickling import dumps
from lightning_weightsync.collectors.pool import WorkerPool
from lightning_weightsync.collectors.recycling import BatchMemory
from lightning_weightsync.collectors.schedule import canonical
from lightning_weightsync.errors import WeightSyncError
from lightning_weightsync.schemes.base import WeightSyncScheme
from lightning_weightsync.schemes.push import PerWorker
from lightning_weightsync.schemes.strategy import Weights
from lightning_weightsync.transports.hub import LinkHub
from lightning_weightsync.transports.pushing import PushHandle, failure

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from lightning_weightsync.collectors.evaluation import Evaluation

GRACE_AFTER_FAILURE = 2.0
"""Seconds that workers get to end by themselves when the run has failed: nobody wants their batches any more."""


class GroupState(Enum):
    """``NEW -launch-> LAUNCHED -connect-> RUNNING -shutdown-> STOPPED -launch-> ...``."""

    NEW = "new"
    LAUNCHED = "launched"
    RUNNING = "running"
    STOPPED = "stopped"


class CollectorGroup:
    """Worker processes that collect batches with the trainer's newest weights.

    Args:
        collector: A picklable factory, called in each worker as ``factory(worker_idx=..., seed=...)``; returns a
            ``Collector``.
        num_workers: How many processes, for each trainer rank; 0 runs one collector in this process.
        weight_sync_schemes: Destination -> scheme. Destinations are paths that are resolved on the collector.
        sync: ``True``: a batch is collected when it is asked for, with the weights that were pushed before, by all
            workers together. ``False``: workers collect ahead, and a batch is one worker's, as soon as it is ready.
            With ``num_workers=0`` there is nobody to collect ahead: the same as ``True``.
        max_staleness: For ``sync=False``: a batch whose oldest sample is more than so many versions behind the newest
            push is dropped, and counted; workers hold back so that few are. ``None``: any age will do.
        batches_per_epoch: Length as a loader. Required under Lightning, which prefetches from a loader without a
            length.
        max_restarts: How often a worker that was lost (its process ended, or it did not answer in time) is replaced,
            within any ten minutes: same index, newest weights, seeds of its own. The first time at once, then after a
            pause that doubles as long as it makes no batch. After that, and with 0, its loss ends the run, as an
            exception in the user's own code always does. Replacements begin when the group is connected.
        env_timeout: Seconds that one step (or reset) of an environment may take. A worker that makes no progress for
            so long while it collects counts as lost: the cause names the environment, and shows where it hangs. A slow
            worker that gets on does not, however long its batches take. A collector that does not tell of its progress
            (``Collector.progress``) may take so long for a whole batch. ``None``: any time. Without worker processes
            nobody watches.
        seed: Base of every worker's seed; ``None`` takes ``torch.initial_seed()``.
        threads_per_worker: Cap on each worker's compute threads.
        launcher: ``"local"``: child processes of this one.

    Raises:
        ValueError: A number that makes no sense, or ``max_staleness`` with ``sync=True``.
        NotImplementedError: A mode that is not there yet.

    Example::

        factory = partial(GymCollector, "CartPole-v1", make_policy, num_envs=8, frames_per_batch=1024)
        with CollectorGroup(factory, 2, weight_sync_schemes={"policy": DistributedWeightSyncScheme()}) as group:
            group.update_policy_weights_(net)      # connects: version 0
            for batch in group:
                train(net, batch)                  # [16, 128]: the workers' batches, in worker order
                group.update_policy_weights_(net)  # version + 1, applied in every worker
    """

    def __init__(
        self,
        collector: CollectorFactory,
        num_workers: int,
        *,
        weight_sync_schemes: Mapping[str, WeightSyncScheme] | None = None,
        sync: bool = True,
        max_staleness: int | None = None,
        batches_per_epoch: int | None = None,
        max_restarts: int = 3,
        env_timeout: float | None = None,
        seed: int | None = None,
        threads_per_worker: int = 1,
        launcher: str = "local",
    ) -> None:
        if not callable(collector):
            raise TypeError(
                f"collector must be a factory, called in each worker; {type(collector).__name__} is not callable"
            )
        for name, value, least in (
            ("num_workers", num_workers, 0),
            ("batches_per_epoch", batches_per_epoch, 1),
            ("max_restarts", max_restarts, 0),
            ("threads_per_worker", threads_per_worker, 1),
            ("max_staleness", max_staleness, 0),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name}={value}: at least {least}")
        if env_timeout is not None and not env_timeout > 0:
            raise ValueError(f"env_timeout={env_timeout}: a positive number of seconds, or None")
        for name, given, there in (("launcher", launcher, "local"),):
            if given != there:
                raise NotImplementedError(f"{name}={given!r} is not there yet; use {name}={there!r}")
        if sync and max_staleness is not None:
            raise ValueError(
                f"max_staleness={max_staleness} needs sync=False: with sync=True every batch is collected with the "
                "weights that were pushed before it was asked for"
            )
        self.collector = collector
        self.num_workers = num_workers
        self.weight_sync_schemes: dict[str, WeightSyncScheme] = dict(weight_sync_schemes or {})
        self.sync = sync
        self.max_staleness = max_staleness
        self.batches_per_epoch = batches_per_epoch
        self.max_restarts = max_restarts
        self.env_timeout = env_timeout
        self.seed = seed
        self.threads_per_worker = threads_per_worker
        self.rank = 0
        self.look_around: Callable[[], None] = _nothing
        self.weights_getter: Callable[[], Mapping[str, Weights | PerWorker]] | None = None
        self._evaluations: list[Evaluation] = []
        self._ledger = Ledger()
        self._memory = BatchMemory()
        self._run = 1
        self._version = 0
        self._incarnation = 0
        self._restarts = 0
        self._starts = 0
        self._owner = 0  # the process that has launched it
        self._base_seed: int | None = None
        self._sources: dict[str, Weights | PerWorker] = {}
        self._values: dict[str, Any] = {}
        self._pool: WorkerPool | InlinePool | None = None
        self._state = GroupState.NEW

    # --- life cycle ----------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Phase one: start the interpreters, which import while the caller goes on. Does not block.

        Raises:
            RuntimeError: The group is running already.
        """
        if self._state in (GroupState.LAUNCHED, GroupState.RUNNING):
            raise RuntimeError(f"the group is {self._state.value} already: shut it down before it is started again")
        self._owner = os.getpid()
        self._restarts = self.restarts
        if self._starts:
            self._run += 1
            self._incarnation += 1
        self._starts += 1
        if self.num_workers:
            pool = WorkerPool if self.sync else partial(AheadPool, max_staleness=self.max_staleness)
            self._pool = pool(
                self.num_workers,
                self.weight_sync_schemes,
                self.threads_per_worker,
                max_restarts=self.max_restarts,
                new_seed=self._new_seed,
                env_timeout=self.env_timeout,
            )
        else:
            self._pool = InlinePool(self.weight_sync_schemes)
        self._state = GroupState.LAUNCHED
        atexit.register(self._shutdown_at_exit)
        for evaluation in self._evaluations:
            evaluation.launch()

    def connect(self, weights_dict: Mapping[str, Weights | PerWorker] | None = None) -> None:
        """Phase two: build the collectors and deliver the current version. Blocks until every worker has applied it.

        Args:
            weights_dict: Weights for each destination; modules are remembered as the sources of later pushes.

        Raises:
            ValueError: The destinations are not those of ``weight_sync_schemes``; both lists are shown.
            WorkerError: A factory raised in a worker; carries its traceback.
            WorkerDied: A worker's process ended.
            LayoutMismatchError: The models of trainer and workers differ.
            WeightSyncTimeout: Not everybody was ready in time; names who.
        """
        if self._state is not GroupState.LAUNCHED:
            raise RuntimeError(f"the group is {self._state.value}: launch it before it is connected")
        weights = dict(weights_dict or {})
        if weights.keys() != self.weight_sync_schemes.keys():
            raise ValueError(
                f"weights are given for {sorted(weights)}, and the group has schemes for "
                f"{sorted(self.weight_sync_schemes)}: connecting needs both to be the same"
            )
        pool = self._running_pool()
        counter = pool.hub if isinstance(pool, WorkerPool) else pool
        counter.run, counter.version = self._run, self._version
        counter.values = counter.next_values = self._values
        try:
            seeds = [self._seed_of(index) for index in range(max(1, self.num_workers))]
            pool.connect(self.collector, seeds, weights, self.look_around)
        except BaseException:
            self.shutdown(GRACE_AFTER_FAILURE)
            raise
        self._sources = weights
        self._state = GroupState.RUNNING
        self._ledger.start_clock()

    def start(self, weights_dict: Mapping[str, Weights | PerWorker] | None = None) -> None:
        """Both phases; without weights only the first, and the first ``update_policy_weights_`` connects."""
        self.launch()
        if weights_dict is not None or not self.weight_sync_schemes:
            self.connect(weights_dict)

    def shutdown(self, timeout: float = 10.0) -> None:
        """Stop all workers within ``timeout`` seconds overall: they are asked, then killed. Idempotent, any time.

        Args:
            timeout: Seconds, for all workers together, those of evaluations too.
        """
        deadline = time.monotonic() + timeout
        atexit.unregister(self._shutdown_at_exit)
        if self.running and self._owner != os.getpid():  # a forked child stops nothing of its parent's
            self._pool, self._state = None, GroupState.STOPPED
            return
        self.stop_evaluations(min(timeout, GRACE_AFTER_FAILURE))
        if self._state in (GroupState.LAUNCHED, GroupState.RUNNING) and self._pool is not None:
            self._run, self._version = self.run, self.version
            self._pool.shutdown(max(0.0, deadline - time.monotonic()))
            self._state = GroupState.STOPPED

    def resize(self, num_workers: int, timeout: float = 10.0) -> None:
        """Have this many workers from the next batch on. To be called between two batches.

        New workers start from what was pushed last; this blocks until they have joined, looking at stop requests, and
        pushes of other threads go on meanwhile. Of too many, those with the highest indices are stopped: asked, then
        killed. A batch that they have not handed over is lost.

        Args:
            num_workers: At least 1; a group without worker processes cannot get any, nor lose its last one.
            timeout: Seconds that workers get to end by themselves.

        Raises:
            ValueError: ``num_workers`` is 0, or the group has none.
            RuntimeError: The group is launched, and not connected.
            WeightSyncError: A new worker could not be connected; the group is as it was.
        """
        if num_workers < 1 or self.num_workers < 1:
            raise ValueError(f"resize({num_workers}) of {self.num_workers} workers: at least 1, before and after")
        if self._state is GroupState.LAUNCHED:
            raise RuntimeError("the group is launched, not connected: it is resized before or after that")
        if self._state is GroupState.RUNNING:
            pool = self._running_pool()
            assert isinstance(pool, WorkerPool)
            pool.resize(num_workers, timeout, self.look_around)
        self.num_workers = num_workers

    def __enter__(self) -> CollectorGroup:
        if self._state in (GroupState.NEW, GroupState.STOPPED):
            self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    # --- weights -------------------------------------------------------------------------------------------------

    def update_policy_weights_(
        self,
        policy_or_weights: Weights | PerWorker | None = None,
        *,
        weights: Weights | PerWorker | None = None,
        policy: Weights | None = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Weights | PerWorker] | None = None,
        worker_ids: int | Sequence[int] | None = None,
    ) -> None:
        """Push one version; returns when every targeted worker has applied it. The first call connects, as version 0.

        A worker that is lost meanwhile, or being replaced, is no error as long as it is replaced: its replacement
        starts from this version. It is not waited for.

        Args:
            policy_or_weights: A module, TensorDict or dict of tensors; a dict with int keys gives each worker its
                own. Without any weights, what was given to ``connect`` is read again.
            weights: The same, by name.
            policy: The same, by name.
            model_id: The destination; needed only where the group has several.
            weights_dict: Several destinations as one version, applied together or not at all in each worker.
            worker_ids: ``None`` for all, one index, or several.

        Raises:
            WeightSyncError: ``.failed`` maps each worker that did not apply it, and will not, to the cause; all others
                did.
            LayoutMismatchError: The weights are not those of ``connect``; nothing was sent.
            ValueError: An unknown destination or worker.
            RuntimeError: The group is not started.
        """
        given = next((w for w in (policy_or_weights, weights, policy) if w is not None), None)
        pushed = self._destinations(given, model_id, weights_dict)
        if self._state is GroupState.LAUNCHED:
            self.connect(pushed)
            return
        pool = self._running_pool()
        handle = pool.push(pushed, pool.check_ids(worker_ids), timeout=self._timeout(pushed))
        if handle is not None:
            self.settle(handle)

    def send_async(self, weights_dict: Mapping[str, Weights | PerWorker] | None = None) -> PushHandle | None:
        """Snapshot the weights as one version and return; a background thread delivers it. Blocks on no worker.

        Args:
            weights_dict: Weights for each destination; ``None`` reads again what was given to ``connect``.

        Returns:
            The handle, which tells what became of the push; ``None`` without worker processes, where it is applied at
            once. Its ``wait`` raises for a worker that is replaced, too; ``settle`` does not.

        Raises:
            LayoutMismatchError: The weights are not those of ``connect``; nothing was sent.
            RuntimeError: The group is not connected.
        """
        if self._state is not GroupState.RUNNING:
            raise RuntimeError(f"the group is {self._state.value}: connect it first")
        pushed = self._destinations(None, None, self._sources if weights_dict is None else weights_dict)
        pool = self._running_pool()
        handle = pool.push(pushed, pool.check_ids(None), timeout=self._timeout(pushed), replaceable=True)
        if handle is not None and self.hub is not None:
            self.hub.dispatcher.run_in_background()
        return handle

    def settle(self, handle: PushHandle) -> None:
        """Wait until a push is settled; what replacements of lost workers make good is no error.

        Raises:
            WeightSyncError: ``.failed`` names the workers that have not applied it, and will not be replaced.
        """
        try:
            handle.wait()
        except WeightSyncError as error:
            left = self._running_pool().beyond_repair(error.failed)
            if left:
                raise failure(left, handle.phase) from None
            if not error.failed:
                raise
            log.debug(f"{handle.phase} was missed by workers that are replaced: {sorted(error.failed)}")

    def broadcast(self, **values: Any) -> None:
        """Give workers schedule values (epsilon, a temperature, a level); they come into force with the next push.

        Policies, environments and collectors read them in the workers, as ``lightning_weightsync.values["epsilon"]``:
        together with the version that they came with, they change between two policy calls. Each push carries all
        values, so replacements, new workers and evaluations have them too; what a group was given before it is
        connected is there when its collectors are built. They are checkpointed with the group. Does not block.

        Args:
            **values: Numbers, strings, bools, None, and lists and dicts of them; each replaces the one of its name.

        Raises:
            TypeError: A value is anything else.
            RuntimeError: The group has no ``weight_sync_schemes``, and runs: nothing is pushed.

        Example::

            group.broadcast(epsilon=max(0.05, 1.0 - step / 10_000))  # and with the next push every worker has it
        """
        given = canonical(values)
        if self.running and not self.weight_sync_schemes:
            raise RuntimeError("values travel with pushes, and this group has no weight_sync_schemes")
        self._values = {**self._values, **given}
        if self.running and self._pool is not None:
            (self.hub or self._pool).next_values = self._values  # type: ignore[union-attr]  # a pool without a hub

    @property
    def values(self) -> dict[str, Any]:
        """What was broadcast so far; workers have it with the next push."""
        return dict(self._values)

    def reduce(self) -> dict[str, Tensor]:
        """Take what has added up, over all workers, in the batches that were handed over since the last call.

        What collectors return from ``take_sums()`` (with ``GymCollector``, its policy's ``take_sums()``) travels with
        each batch, and is summed: counts, sums and squares of observations, say. A batch that is lost with its worker
        takes its sums with it; one that was too old to be handed over (``max_staleness``) does not. Does not block.

        Returns:
            Name -> sum, float64, of the shape that collectors have told. Empty if nothing came.

        Example::

            module.actor.norm.seen += group.reduce()["seen"]  # and it travels back with the next push, as extra state
        """
        return self._ledger.take_sums()

    def digest(self, model_id: str = "policy") -> dict[int, str]:
        """SHA-256 over each worker's live leaves, in layout order: ``worker_idx`` -> hexadecimal digits.

        Workers that are being replaced are left out.
        """
        self._known(model_id)
        return self._running_pool().digest(model_id)

    @property
    def frames(self) -> int:
        """Transitions handed to the trainer so far, over resumes."""
        return self._ledger.frames

    @property
    def incarnation(self) -> int:
        """Goes into every worker's seed; grows with each start of the group, and of a replacement, and over resumes."""
        return self._incarnation

    @property
    def restarts(self) -> int:
        """Replacements of lost workers so far, over resumes."""
        return self._restarts + (self._pool.restarts if isinstance(self._pool, WorkerPool) else 0)

    @property
    def hub(self) -> LinkHub | None:
        """The links to the workers; ``None`` without worker processes."""
        return self._pool.hub if isinstance(self._pool, WorkerPool) else None

    @property
    def run(self) -> int:
        """Grows with each start, and over resumes."""
        return self._counter("run", self._run)

    @property
    def version(self) -> int:
        """Of the newest push."""
        return self._counter("version", self._version)

    # --- batches -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches per epoch.

        Raises:
            TypeError: ``batches_per_epoch`` was not given.
        """
        if self.batches_per_epoch is None:
            raise TypeError("this group has no length: give batches_per_epoch")
        return self.batches_per_epoch

    def __iter__(self) -> Iterator[TensorDict]:
        """Batches, in memory of the trainer's own: they stay as they are. Endless without a length.

        With ``sync=True``, those of all workers, concatenated along dimension 0, in worker order; each is collected
        when it is asked for. With ``sync=False``, one worker's at a time, in the order in which they are ready (with
        ``max_staleness``, the one that is oldest first); each worker's come in the order in which it made them, none is
        handed over twice, and what is ready when an iterator ends goes to the next one. Workers begin when the first
        batch is asked for. Asking blocks until a batch is ready. Making an iterator has no side effect.

        Raises:
            RuntimeError: The group is not connected.
            WorkerError: Code in a worker raised; carries its traceback.
            WorkerDied: A worker was lost, and is not replaced (any more); its part of a batch is else collected again
                by its replacement, which is waited for.
        """
        made = 0
        while self.batches_per_epoch is None or made < self.batches_per_epoch:
            yield self._next_batch()
            made += 1

    def _next_batch(self) -> TensorDict:
        if self._state is not GroupState.RUNNING:
            raise RuntimeError(
                f"the group is {self._state.value}, not connected: under Lightning, add UpdateWeights(group, ...) to "
                "the trainer's callbacks and give the group batches_per_epoch; elsewhere, call start() and "
                "update_policy_weights_() first"
            )
        rollouts = self._running_pool().collect(self.look_around)
        for rollout in rollouts:
            self._ledger.add(rollout.frames, rollout.episodes, rollout.sums)
        if rollouts[0].owned:
            return rollouts[0].batch
        return self._memory.concatenated([rollout.batch for rollout in rollouts])  # the slots are free again

    # --- evaluation ----------------------------------------------------------------------------------------------

    def evaluation(self, episodes: int = 20, deterministic: bool = True, num_workers: int | None = None) -> Evaluation:
        """A loader of whole episodes, for ``trainer.fit(module, group, val_dataloaders=group.evaluation())``.

        Its workers are its own, build what the group's workers build, and start and end with them. Each iteration
        pins the weights as they are when it begins. Batches for training are as if there were no evaluation.

        Args:
            episodes: How many whole episodes an iteration yields, one per item; see ``Evaluation``.
            deterministic: The policy is called under ``tensordict.nn.set_interaction_type(DETERMINISTIC)``, which
                modules that sample have to heed; one that draws random numbers all the same is an error. ``False``: as
                for training.
            num_workers: How many processes; ``None``: one, or none where the group has none.

        Raises:
            ValueError: Less than one episode, or more workers than episodes.

        Example::

            def validation_step(self, batch, batch_idx):
                self.log("val/episode_return", batch["episode_return"])
        """
        from lightning_weightsync.collectors.evaluation import Evaluation

        made = Evaluation(self, episodes, deterministic, num_workers)
        self._evaluations.append(made)
        return made

    def stop_evaluations(self, timeout: float = 10.0) -> None:
        """Stop the workers of all evaluations, each within ``timeout`` seconds. Idempotent."""
        for evaluation in self._evaluations:
            evaluation.shutdown(timeout)

    def newest_weights(self) -> Mapping[str, Weights | PerWorker]:
        """The sources as they are now: what the callback would push, or what the group was connected with.

        Raises:
            RuntimeError: The group was given tensors, not modules: they are what they were when it was connected.
        """
        if self.weights_getter is not None:
            return self.weights_getter()
        weights = self._sources
        if weights.keys() != self.weight_sync_schemes.keys() or not all(
            isinstance(source, nn.Module) for source in weights.values()
        ):
            raise RuntimeError(
                f"the group does not know a source of {sorted(self.weight_sync_schemes)} that it could read again: it "
                "was not connected with modules, and no UpdateWeights callback drives it"
            )
        return weights

    @property
    def base_seed(self) -> int:
        """What all seeds are derived from, fixed when it is first asked for, or restored."""
        if self._base_seed is None:
            self._base_seed = torch.initial_seed() if self.seed is None else self.seed
        return self._base_seed

    # --- figures and state ---------------------------------------------------------------------------------------

    def stats(self) -> dict[int, dict[str, Any]]:
        """For each worker: pid, state, cause, run, version, generation, restarts, frames, dropped (batches).

        ``cause`` is why the worker, or the one that it has replaced, was lost; ``frames`` are those of all that had
        this index in this start of the group.
        """
        return self._pool.stats() if self._pool is not None else {}

    def metrics(self) -> dict[str, float]:
        """Figures for a logger.

        ``collect/frames_per_sec`` is over the time since the last call; ``collect/episode_return`` and
        ``episode_length`` are means of the last 100 finished episodes, and absent before the first;
        ``collect/batches_dropped`` counts, since the group was started, those that were older than ``max_staleness``.
        """
        up = {WorkerState.CONNECTED.value, WorkerState.COLLECTING.value}
        states = self._pool.stats().values() if self._pool is not None else ()
        return self._ledger.figures() | {
            "collect/batches_dropped": float(sum(stat["dropped"] for stat in states)),
            "weight_sync/bytes": float(self._counter("bytes_pushed", 0)),
            "weight_sync/bytes_saved": float(self._counter("bytes_saved", 0)),
            "weight_sync/workers_alive": float(sum(stat["state"] in up for stat in states)),
            "weight_sync/worker_restarts": float(self.restarts),
        }

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: run, version, frames, seed stream, restarts, values, and the last episodes."""
        return {
            "run": self.run,
            "version": self.version,
            "seed": self._base_seed,
            "incarnation": self.incarnation,
            "restarts": self.restarts,
            "values": self.values,
            **self._ledger.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a saved run was: a newer run of the same version, new episodes. Idempotent.

        Raises:
            RuntimeError: The group is connected: its workers have their seeds.
        """
        if self._state is GroupState.RUNNING:
            raise RuntimeError("a group's state is loaded before it is connected")
        self.restore_version(int(state["run"]), int(state["version"]), int(state["incarnation"]))
        self._restarts = int(state["restarts"])
        self._base_seed = None if state["seed"] is None else int(state["seed"])
        self._values = dict(state["values"])
        self._ledger.load_state_dict(state)

    @classmethod
    def is_state(cls, state: object) -> bool:
        """Whether this is what a group's ``state_dict`` returns."""
        keys = {"run", "version", "frames", "seed", "incarnation", "restarts", "episodes", "values"}
        return isinstance(state, Mapping) and state.keys() == keys

    def restore_version(self, run: int, version: int, incarnation: int) -> None:
        """Go on after (run, version): in a newer run, never backwards, with other episodes. Idempotent.

        Before ``connect``. It is all that a resumed run gets where the group is not the trainer's loader itself.

        Args:
            run: Of the run that goes on.
            version: Of its newest push.
            incarnation: The last one that its workers' seeds were made of.
        """
        if (run + 1, version) > (self._run, self._version):
            self._run, self._version = run + 1, version
        self._incarnation = max(self._incarnation, incarnation + 1)

    def __getstate__(self) -> dict[str, Any]:
        if self._state in (GroupState.LAUNCHED, GroupState.RUNNING):
            raise TypeError("a group cannot be pickled while its workers run: it owns processes")
        return self.__dict__ | {
            "collector": dumps(self.collector),  # as it goes to workers, also by way of a rank that is spawned
            "_pool": None,
            "_restarts": self.restarts,
            "look_around": _nothing,
            "weights_getter": None,
            "_sources": {},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The bytes were inside a pickle that somebody has chosen to read.
        self.__dict__.update(state, collector=cloudpickle.loads(state["collector"]))

    def __repr__(self) -> str:
        schemes = ", ".join(f"{name!r}: {type(s).__name__}" for name, s in self.weight_sync_schemes.items())
        return (
            f"{type(self).__name__}(num_workers={self.num_workers}, {{{schemes}}}, {self._state.value}, "
            f"version={self.version})"
        )

    # --- inside --------------------------------------------------------------------------------------------------

    def _shutdown_at_exit(self) -> None:
        """Of a group that nobody has stopped: a rank that was spawned is told of a failure nowhere else."""
        self.shutdown(GRACE_AFTER_FAILURE)

    @property
    def running(self) -> bool:
        """Whether the group has been launched and not stopped since."""
        return self._state in (GroupState.LAUNCHED, GroupState.RUNNING)

    def check_process(self) -> None:
        """Raise in a process that was forked from the one that runs the group.

        Raises:
            RuntimeError: Two processes would speak to the same workers over the same sockets.
        """
        if self.running and self._owner != os.getpid():
            raise RuntimeError(
                f"this group was started in process {self._owner}, and process {os.getpid()} was forked from it (by "
                "strategy='ddp_notebook' or 'ddp_fork'): its workers cannot serve several ranks. Do not start the "
                "group before fit: UpdateWeights starts it in each rank"
            )

    @property
    def connected(self) -> bool:
        """Whether batches can be asked for."""
        return self._state is GroupState.RUNNING

    def _destinations(
        self,
        weights: Weights | PerWorker | None,
        model_id: str | None,
        weights_dict: Mapping[str, Weights | PerWorker] | None,
    ) -> dict[str, Weights | PerWorker]:
        if weights_dict is not None:
            if weights is not None or model_id is not None:
                raise ValueError("give either weights_dict, or weights with at most a model_id")
            for name in weights_dict:
                self._known(name)
            return dict(weights_dict)
        if weights is None and model_id is None and self._sources:
            return dict(self._sources)
        if model_id is None:
            if len(self.weight_sync_schemes) != 1:
                raise ValueError(f"give model_id or weights_dict: the group has {sorted(self.weight_sync_schemes)}")
            model_id = next(iter(self.weight_sync_schemes))
        self._known(model_id)
        if weights is None:
            if model_id not in self._sources:
                raise ValueError(f"no weights are given for {model_id!r}, and none were before")
            weights = self._sources[model_id]
        return {model_id: weights}

    def _timeout(self, destinations: Mapping[str, object]) -> float:
        return max(self.weight_sync_schemes[name].timeout for name in destinations)

    def _known(self, model_id: str) -> None:
        if model_id not in self.weight_sync_schemes:
            raise ValueError(f"there is no scheme for {model_id!r}; the group has {sorted(self.weight_sync_schemes)}")

    def _running_pool(self) -> WorkerPool | InlinePool:
        if self._pool is None or not self.running:
            raise RuntimeError(f"the group is {self._state.value}: call start() first")
        return self._pool

    def _counter(self, name: str, before: int) -> int:
        if self._state is not GroupState.RUNNING:
            return before
        owner = self.hub if self.hub is not None else self._pool
        return int(getattr(owner, name))

    def _seed_of(self, worker_idx: int) -> int:
        """Of one worker, from (seed, rank, worker_idx, incarnation)."""
        sequence = np.random.SeedSequence([self.base_seed, self.rank, worker_idx, self._incarnation])
        return int(sequence.generate_state(1, np.uint64)[0] >> 1)

    def _new_seed(self, worker_idx: int) -> int:
        """Of a replacement: a seed that no worker of this index has had. Called by one thread at a time."""
        self._incarnation += 1
        return self._seed_of(worker_idx)


def _nothing() -> None:
    """Nobody wants to be called while the group waits."""
