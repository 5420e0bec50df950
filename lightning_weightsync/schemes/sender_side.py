"""What does a scheme do in the trainer's process? Makes or borrows a hub, agrees on layouts, snapshots, pushes."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from lightning_weightsync.errors import LayoutMismatchError, WeightSyncError, WeightSyncTimeout
from lightning_weightsync.schemes.core import SchemeCore
from lightning_weightsync.schemes.joining import connect_workers, reconnect_workers
from lightning_weightsync.schemes.newest import Newest, NewestWeights
from lightning_weightsync.schemes.push import push_models
from lightning_weightsync.schemes.source import Source
from lightning_weightsync.schemes.strategy import Weights
from lightning_weightsync.transports.base import TransferFailed
from lightning_weightsync.transports.control import Message
from lightning_weightsync.transports.filling import Filling
from lightning_weightsync.transports.hub import LinkHub
from lightning_weightsync.transports.layout import digest_of
from lightning_weightsync.transports.link import LinkState, WorkerLink
from lightning_weightsync.transports.pushing import Payload, PushHandle, raise_failures
from lightning_weightsync.transports.rendezvous import StoreInfo
from lightning_weightsync.transports.shared_memory import SharedMemoryTransport, holder_of
from lightning_weightsync.transports.slots import Slot, SlotPool

_WORTH_FOLLOWING = 32 << 20
_SECONDS_FOR_PAGES = 3.0


class SenderSide(SchemeCore):
    """The sender's role of a scheme."""

    def init_on_sender(
        self,
        model_id: str,
        context: Any = None,
        *,
        model: nn.Module | None = None,
        weights: Weights | None = None,
        num_workers: int | None = None,
    ) -> None:
        """Make this the sender's end. Talks to nobody; from here on workers can be told ``get_store_info``.

        Args:
            model_id: The destination.
            context: Lends its hub of links and ``num_workers`` (a ``CollectorGroup``), or a model (``get_model``).
            model: The source, read at each ``send()`` without weights.
            weights: The same as a TensorDict or dict of tensors.
            num_workers: How many workers there are; taken from the context where it is not given.

        Raises:
            ValueError: Neither the context nor ``num_workers`` tells how many workers there are.
            RuntimeError: The scheme has a role already.
            OSError: It cannot listen on ``host``.
        """
        self.check_backend()
        self._check_free(model_id)
        source = model if model is not None else weights
        if source is None and hasattr(context, "get_model"):
            source = context.get_model(model_id)
        hub = getattr(context, "hub", None)
        borrowed = isinstance(hub, LinkHub)
        if not isinstance(hub, LinkHub):
            count = num_workers if num_workers is not None else getattr(context, "num_workers", None)
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"num_workers={count!r}: give the number of workers, or a context that has it")
            hub = LinkHub(
                count,
                host=self.host,
                local=self.wants_local,
                connect_timeout=self.connect_timeout,
                heartbeat_timeout=self.heartbeat_timeout,
            )
        self._take_role("sender", model_id)
        self._context, self._source = context, source
        self._hub, self._owns_hub = hub, not borrowed
        self._store_info = hub.info.copy()
        self._store_info["connect_timeout"] = hub.connect_timeout

    def get_store_info(self) -> StoreInfo:
        """Host, port, key and deadline that a receiver needs, where the scheme itself was not pickled over to it."""
        if self._store_info is None:
            raise RuntimeError("get_store_info() is known after init_on_sender()")
        return self._store_info

    def send(self, weights: Weights | None = None, worker_ids: int | Sequence[int] | None = None) -> None:
        """Push one version; returns when every targeted worker has applied it. Blocks on all of them at once.

        Args:
            weights: ``None`` (what was bound), a module, a TensorDict, or a flat or nested dict of tensors.
            worker_ids: ``None`` (all), one index, or several.

        Raises:
            WeightSyncError: ``.failed`` maps each worker that did not apply it to the cause. All others did.
            WeightSyncTimeout: The same, where all of them were late. With an empty ``.failed``: no slot became free
                within ``timeout``, and nothing was sent.
            LayoutMismatchError: The weights are not those of ``connect``; nothing was sent.
            ValueError: A worker index that does not exist.
        """
        hub = self._sender_hub()
        push_models(hub, {self: weights}, hub.check_ids(worker_ids), timeout=self.timeout).wait()

    def send_async(self, weights: Weights | None = None, worker_ids: int | Sequence[int] | None = None) -> PushHandle:
        """Snapshot the weights and return; a background thread delivers them. Blocks on no worker.

        The caller is held for one copy of the weights. Each worker has at most one waiting push: a newer one takes its
        place, and the older handle says that it was superseded. (Only when all ``max_slots`` are held by slow workers
        does the call wait, for a slot.)

        Args:
            weights: See ``send``.
            worker_ids: See ``send``.

        Raises:
            LayoutMismatchError: The weights are not those of ``connect``; nothing was sent.
            ValueError: A worker index that does not exist.
            WeightSyncTimeout: No slot became free within ``timeout``.
        """
        hub = self._sender_hub()
        ids = hub.check_ids(worker_ids)
        handle = push_models(hub, {self: weights}, ids, timeout=self.timeout, replaceable=True)
        hub.dispatcher.run_in_background()
        return handle

    def attach(self, weights: Weights | None, links: Mapping[int, WorkerLink], deadline: float) -> None:
        """Agree on the layout with workers that are connecting, and open the transports; see ``schemes.joining``.

        Args:
            weights: The source, if it was not bound before; what a scheme was connected with once is kept.
            links: The workers.
            deadline: On the monotonic clock, in seconds.

        Raises:
            LayoutMismatchError: The leaves differ, in any worker; ``.failed`` names the workers.
            WeightSyncError: A worker did not answer, or cannot use this backend.
        """
        hub = self._sender_hub()
        model_id = self._known_model_id()
        if self._reader is None and weights is not None:
            self._source = weights
        on_cpu = self.slot_device.type == "cpu"
        reader = self._reader or Source(
            model_id, self._bound(), self.strategy, self.wire_dtype, only_changed=self.only_changed and on_cpu
        )
        if not reader.layout.leaves:
            raise ValueError(f"the source of {model_id!r} has neither parameters nor buffers")
        layout = reader.layout.to_json()
        phase = f"agreeing on the layout of {model_id!r}"
        offers: dict[int, dict[str, Any]] = {}

        def offer(link: WorkerLink) -> None:
            offers[link.worker_idx] = self._offer(link)
            link.channel.send(
                "attach",
                model_id=model_id,
                layout=layout,
                extra_keys=reader.extra_keys,
                casts=self.wire_dtype is not None,
                strict=self.strict,
                may_hold=on_cpu and (self._spares_slots() or not self.shares(link)),
                backend=self.backend_name,
                transport=offers[link.worker_idx],
            )

        verdicts = {"attached", "mismatch", "attach_failed"}
        answers = hub.ask(links.values(), offer, verdicts, phase=phase, deadline=deadline)
        _raise_refusals(model_id, answers.replies, answers.failed, phase)
        if self._pool is None:
            self._pool = SlotPool(
                reader.layout,
                self._slot_limit(),
                shared=any(map(self.shares, links.values())),
                device=self.slot_device,
            )
            self._newest = NewestWeights(self._pool)
            self._pool.prefault(2, min(_SECONDS_FOR_PAGES, 0.2 * (deadline - time.monotonic())))
        self._pool.max_slots = max(self._pool.max_slots, self._slot_limit())  # there may be more workers by now
        self._reader = reader
        for index, link in links.items():
            self._open(link, offers[index], bool(answers.replies[index]["holds"]), deadline)

    def _open(self, link: WorkerLink, offer: Mapping[str, Any], holds: bool, deadline: float) -> None:
        """Open one worker's transport: both ends at the same time, and one worker after the other.

        Nothing interrupts gloo while two ends meet, and it hears no heartbeats: they have ``heartbeat_timeout`` for it.
        """
        hub, model_id, index = self._sender_hub(), self._known_model_id(), link.worker_idx
        phase = f"opening the transport of {model_id!r}"

        def open_transport(link: WorkerLink) -> None:
            budget = min(deadline - time.monotonic(), self.heartbeat_timeout)
            link.channel.send("open", model_id=model_id, budget=float(budget))

        raise_failures(hub.ask([link], open_transport, {"opening"}, phase=phase, deadline=deadline).failed, phase)
        transport = self.create_transport(link=link, offer=offer, holds=holds)
        if transport is not self.shared_transport:
            link.when_ended(transport.close)
        self._transports[index] = transport
        started = time.monotonic()
        try:
            transport.connect(min(deadline, started + self.heartbeat_timeout))
        except TransferFailed as error:
            if link.state is LinkState.OPEN:
                hub.dispatcher.give_up(link, error, phase=phase, since=started)
            raise_failures({index: link.cause or error}, phase)

    def _slot_limit(self) -> int:
        # The most that are in use at once: each worker has one in force and another one sent to it, one is waiting for
        # all of them, and one is being written. Slots are made when they are needed.
        return 2 * self._sender_hub().num_workers + 2 if self.max_slots is None else self.max_slots

    def _spares_slots(self) -> bool:
        """Whether one is left for the next version when each worker has another version in force, in a slot each."""
        return self._slot_limit() > self._sender_hub().num_workers

    def snapshot(
        self, weights: Weights | None, holder: object, deadline: float, *, followed_by: Collection[int] = ()
    ) -> tuple[Slot, bytes]:
        """Copy weights (``None``: what was bound) into a free slot, which ``holder`` then holds.

        Args:
            weights: To be copied.
            holder: Until it calls ``release``.
            deadline: On the monotonic clock, in seconds.
            followed_by: Workers to whom the slot may leave while it is written. If their transports can do that, and it
                pays, the weights are only checked here, and ``slot.filling.run()`` copies them.

        Returns:
            The slot, and the extra state as bytes.

        Raises:
            LayoutMismatchError: They are not the weights of ``connect``.
            WeightSyncTimeout: No slot became free by the deadline (monotonic clock, seconds).
        """
        if self._reader is None or self._pool is None or self._newest is None:
            raise RuntimeError(f"scheme {self._model_id!r} is not connected: call connect() first")
        pool, newest, taken = self._pool, self._newest, []

        def got_slot() -> bool:
            slot = pool.try_acquire(holder)
            if slot is None and newest.give_way():
                slot = pool.try_acquire(holder)
            if slot is not None:
                taken.append(slot)
            return slot is not None

        if not got_slot():
            # Slots become free as workers answer, and somebody must listen to them.
            self._sender_hub().dispatcher.wait_until(lambda: bool(taken) or got_slot(), deadline)
        if not taken:
            raise WeightSyncTimeout(
                f"push of {self._model_id!r}: no slot became free in time; {len(pool)} (max_slots) are held by "
                f"{', '.join(pool.holders())}"
            )
        slot = taken[0]
        try:
            if self._pays_to_follow(followed_by):
                copy, extra = self._reader.read_in_order(slot, weights)
                slot.filling = Filling(pool.nbytes, copy)
                return slot, extra
            extra = self._reader.read(slot, weights)
            slot.digest = digest_of(slot.views) if self.verify else None
            self._sender_hub().bytes_saved += slot.saved
            return slot, extra
        except BaseException:
            pool.release(slot, holder)
            raise

    def _pays_to_follow(self, worker_ids: Collection[int]) -> bool:
        if self._pool is None or self._pool.nbytes < _WORTH_FOLLOWING or not worker_ids:
            return False
        if self.verify or self.only_changed or self.slot_device.type != "cpu":
            return False
        return all(i in self._transports and self._transports[i].follows for i in worker_ids)

    def release(self, holder: object) -> None:
        """``holder`` of snapshots does not need them any more."""
        if self._pool is not None:
            self._pool.release_all(holder)

    def keep_newest(self, worker_ids: Iterable[int], newest: Newest) -> None:
        """A snapshot is what a replacement of one of these workers starts from; see ``schemes.newest``."""
        if self._newest is not None:
            self._newest.keep(worker_ids, newest)

    def discard_newest(self, slot: Slot) -> None:
        """A snapshot was not completed: nobody starts from it."""
        if self._newest is not None:
            self._newest.discard(slot)

    def newest(self, worker_idx: int) -> Newest | None:
        """The newest snapshot that was meant for a worker, if it is still there."""
        return self._newest.of(worker_idx) if self._newest is not None else None

    def mapped_slot(self, links: Collection[WorkerLink], meant_for: Iterable[int], holder: object) -> Slot | None:
        """The one slot that all of these workers have mapped, if nobody else needs its bytes; see ``schemes.push``."""
        if self._pool is None or self._newest is None or self.only_changed:  # which relies on what a slot has held
            return None
        slot = self._pool.held_by({holder_of(link) for link in links}, {self._newest}, also=holder)
        if slot is None or (not self._newest.needs(slot, but_for=meant_for) and self._is_shown(slot, links)):
            return slot
        self._pool.release(slot, holder)
        return None

    def _is_shown(self, slot: Slot, links: Iterable[WorkerLink]) -> bool:
        """Whether the transport, as in every push, would name this very slot to these workers, and do nothing else."""
        for link in links:
            transport = self._transports.get(link.worker_idx)
            if not isinstance(transport, SharedMemoryTransport):
                return False
            try:
                ticket = transport.send(link.worker_idx, slot)
            except Exception:  # the usual push meets it too, and tells
                return False
            if ticket != {"slot": slot.index}:
                return False
        return True

    def add_workers(self, worker_ids: Iterable[int]) -> None:
        """There are more workers: they start from what was meant for all. The caller holds the hub's ``pushing``."""
        if self._newest is not None:
            self._newest.add(worker_ids)

    def drop_workers(self, worker_ids: Iterable[int]) -> None:
        """These workers have left for good: nothing is kept for them. The caller holds the hub's ``pushing``."""
        gone = list(worker_ids)
        for index in gone:
            self._transports.pop(index, None)
        if self._newest is not None:
            self._newest.drop(gone)

    def payload(self, worker_idx: int, slot: Slot, extra: bytes) -> Payload:
        """What a push hands to the hub for one worker."""
        transport = self._transports.get(worker_idx)
        if transport is None or self._pool is None:
            raise WeightSyncError(f"worker {worker_idx} is not connected for {self._model_id!r}: call connect() first")
        return Payload(self._known_model_id(), self._pool, slot, transport, extra)

    def _connect_sender(self, weights: Weights | None, worker_ids: int | Sequence[int] | None) -> None:
        hub = self._sender_hub()
        if not self._owns_hub:
            raise RuntimeError("this scheme uses its group's links: the group connects it")
        deadline = time.monotonic() + hub.connect_timeout
        if hub.links:
            self._reconnect(weights, hub.find_down() if worker_ids is None else hub.check_ids(worker_ids), deadline)
            return
        if worker_ids is not None:
            raise ValueError("worker_ids: the first connect() waits for all workers; later ones for replacements")
        try:
            connect_workers(hub, {self: weights}, hub.check_ids(None), deadline)
        except BaseException:
            self.shutdown()
            raise

    def _reconnect(self, weights: Weights | None, worker_ids: Sequence[int], deadline: float) -> None:
        if weights is not None:
            raise ValueError("weights: this scheme is connected, and a replacement starts from what was pushed last")
        if worker_ids:
            reconnect_workers(self._sender_hub(), [self], worker_ids, deadline)

    def _bound(self) -> Weights:
        if self._source is None:
            raise ValueError(
                f"no weights are bound to {self._model_id!r}: give them to send(), connect() or init_on_sender()"
            )
        return self._source

    def _sender_hub(self) -> LinkHub:
        if self._role != "sender" or self._hub is None:
            raise RuntimeError("this is not a sender: call init_on_sender() first")
        return self._hub


def _raise_refusals(model_id: str, replies: Mapping[int, Message], failed: Mapping[int, Exception], phase: str) -> None:
    failed = dict(failed)
    mismatch: LayoutMismatchError | None = None
    for index, reply in sorted(replies.items()):
        if reply.kind == "mismatch":
            leaves = {name: reply[name] for name in ("missing", "unexpected", "mismatched")}
            error = LayoutMismatchError(f"worker {index}: {reply['message']}", **leaves)
            failed[index] = error
            mismatch = mismatch or error
        elif reply.kind == "attach_failed":
            failed[index] = WeightSyncError(f"worker {index}: {reply['message']}")
    if mismatch is not None:
        raise LayoutMismatchError(
            str(mismatch),
            failed,
            missing=mismatch.missing,
            unexpected=mismatch.unexpected,
            mismatched=mismatch.mismatched,
        )
    raise_failures(failed, phase)
