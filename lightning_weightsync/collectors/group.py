"""What does the trainer hold? A group: N workers, one version, batches when they are asked for.

This is its life and its batches; what it is pushed is in ``group_weights``, what is known of it in ``group_record``.

The group is a loader (iterable, sized, with state) and the target of pushes. It works without Lightning; with it, the
callback launches it in ``setup``, connects it when the weights are restored, and stops it on every way a run can end.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import cloudpickle
from tensordict import TensorDict

from lightning_weightsync.collectors.ahead import AheadPool
from lightning_weightsync.collectors.base import CollectorFactory
from lightning_weightsync.collectors.evaluations import Evaluations
from lightning_weightsync.collectors.fleet import FleetOptions
from lightning_weightsync.collectors.group_record import GroupState
from lightning_weightsync.collectors.group_weights import GroupWeights, unmatched
from lightning_weightsync.collectors.inline import InlinePool
from lightning_weightsync.collectors.pickling import dumps
from lightning_weightsync.collectors.pool import WorkerPool
from lightning_weightsync.schemes.base import WeightSyncScheme
from lightning_weightsync.schemes.push import PerWorker
from lightning_weightsync.schemes.strategy import Weights

if TYPE_CHECKING:
    from lightning_weightsync.collectors.evaluation import Evaluation

GRACE_AFTER_FAILURE = 2.0
"""Seconds that workers get to end by themselves when the run has failed: nobody wants their batches any more."""


class CollectorGroup(GroupWeights):
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
        seed: Base of every worker's seed, at least 0; ``None`` takes ``torch.initial_seed()``.
        threads_per_worker: Cap on each worker's compute threads.
        launcher: ``"local"``: child processes of this one.

    Raises:
        TypeError: ``collector`` is not callable.
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
            ("seed", seed, 0),
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
        super().__init__(dict(weight_sync_schemes or {}), seed)
        self.collector = collector
        self.num_workers = num_workers
        self.sync = sync
        self.max_staleness = max_staleness
        self.batches_per_epoch = batches_per_epoch
        self.max_restarts = max_restarts
        self.env_timeout = env_timeout
        self.threads_per_worker = threads_per_worker
        self.look_around: Callable[[], None] = _nothing
        self.evaluations = Evaluations()
        self._starts = 0

    def successor(self) -> CollectorGroup:
        """A group of the same arguments that has not been started, and goes on after this one's counts."""
        successor = CollectorGroup(
            self.collector,
            self.num_workers,
            weight_sync_schemes=self.weight_sync_schemes,
            sync=self.sync,
            max_staleness=self.max_staleness,
            batches_per_epoch=self.batches_per_epoch,
            max_restarts=self.max_restarts,
            env_timeout=self.env_timeout,
            seed=self.seed,
            threads_per_worker=self.threads_per_worker,
        )
        successor.load_state_dict(self.state_dict())
        return successor

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
            options = FleetOptions(
                self.num_workers,
                self.weight_sync_schemes,
                self.threads_per_worker,
                self.max_restarts,
                self._new_seed,
                self.env_timeout,
            )
            self._pool = WorkerPool(options) if self.sync else AheadPool(options, self.max_staleness)
        else:
            self._pool = InlinePool(self.weight_sync_schemes)
        self._state = GroupState.LAUNCHED
        atexit.register(self._shutdown_at_exit)
        self.evaluations.launch()

    def connect(self, weights_dict: Mapping[str, Weights | PerWorker] | None = None) -> None:
        """Phase two: build the collectors and deliver the current version. Blocks until every worker has applied it.

        Args:
            weights_dict: Weights for each destination; modules are remembered as the sources of later pushes.

        Raises:
            RuntimeError: The group is not launched, or connected already.
            TypeError: The factory does not pickle.
            ValueError: The destinations are not those of ``weight_sync_schemes``; both lists are shown.
            WorkerError: A factory raised in a worker; carries its traceback.
            WorkerDied: A worker's process ended.
            LayoutMismatchError: The models of trainer and workers differ.
            WeightSyncTimeout: Not everybody was ready in time; names who.
        """
        if self._state is not GroupState.LAUNCHED:
            raise RuntimeError(f"the group is {self._state.value}: launch it before it is connected")
        weights = dict(weights_dict or {})
        reason = unmatched("weights_dict", weights, self.weight_sync_schemes)
        if reason is not None:
            raise ValueError(reason)
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
        try:
            self.stop_evaluations(min(timeout, GRACE_AFTER_FAILURE))
        finally:  # without worker processes, it is the user's close() that is called
            self._stop_pool(deadline)

    def _stop_pool(self, deadline: float) -> None:
        if self._state in (GroupState.LAUNCHED, GroupState.RUNNING) and self._pool is not None:
            self._run, self._version = self.run, self.version
            try:
                self._pool.shutdown(max(0.0, deadline - time.monotonic()))
            finally:
                self._state = GroupState.STOPPED

    def resize(self, num_workers: int, timeout: float = 10.0) -> None:
        """Have this many workers from the next batch on. To be called between two batches.

        New workers start from what was pushed last; this blocks until they have joined, looking at stop requests, and
        pushes of other threads go on meanwhile. Workers of evaluations that have the indices of new ones are stopped:
        the next iteration starts others. Of too many, those with the highest indices are stopped: asked, then
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
        self.evaluations.make_way(num_workers, timeout)
        if self._state is GroupState.RUNNING:
            pool = self._running_pool()
            assert isinstance(pool, WorkerPool)
            try:
                pool.resize(num_workers, timeout, self.look_around)
            finally:  # if it was interrupted, too
                self.num_workers = pool.num_workers
        else:
            self.num_workers = num_workers

    def __enter__(self) -> CollectorGroup:
        if self._state in (GroupState.NEW, GroupState.STOPPED):
            self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

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
        """Batches, which stay as they are for as long as they, or any view of them, are kept. Endless without a length.

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
            WeightSyncError: The workers were stopped, by another thread, while they were waited for; or the model of a
                replacement differs from the trainer's (``.failed`` then has its ``LayoutMismatchError``).
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
        rollout = self._running_pool().collect(self.look_around)
        self._ledger.add(rollout.batch.numel(), rollout.episodes, rollout.sums)
        return rollout.batch

    # --- evaluation ----------------------------------------------------------------------------------------------

    def evaluation(self, episodes: int = 20, deterministic: bool = True, num_workers: int | None = None) -> Evaluation:
        """A loader of whole episodes, for ``trainer.fit(module, group, val_dataloaders=group.evaluation())``.

        Its workers are its own, build what the group's workers build, and start and end with them, for as long as
        somebody keeps what is returned here. Each iteration pins the weights as they are when it begins. Batches for
        training are as if there were no evaluation.

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

        return Evaluation(self, episodes, deterministic, num_workers)

    def stop_evaluations(self, timeout: float = 10.0) -> None:
        """Stop the workers of all evaluations within ``timeout`` seconds overall. Idempotent."""
        self.evaluations.shutdown(timeout)

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

    def _shutdown_at_exit(self) -> None:
        """Of a group that nobody has stopped: a rank that was spawned is told of a failure nowhere else."""
        self.shutdown(GRACE_AFTER_FAILURE)

    def __repr__(self) -> str:
        schemes = ", ".join(f"{name!r}: {type(s).__name__}" for name, s in self.weight_sync_schemes.items())
        return (
            f"{type(self).__name__}(num_workers={self.num_workers}, {{{schemes}}}, {self._state.value}, "
            f"version={self.version})"
        )


def _nothing() -> None:
    """Nobody wants to be called while the group waits."""
