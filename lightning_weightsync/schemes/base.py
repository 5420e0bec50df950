"""What is a weight-sync scheme? The life cycle that keeps one destination in sync, whatever moves the bytes.

    init_on_sender / init_on_receiver     (talk to nobody)
    connect                               (both sides block on each other; current weights applied)
    send ... / receive ...                (each push is a transaction per worker)
    shutdown                              (any time, any thread, twice is fine)

A scheme is one object with two possible roles, fixed by the first ``init_*``. It pickles as its configuration (and,
after ``init_on_sender``, where its sender can be reached): sockets, gates, threads and models never travel.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeGuard

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_weightsync.errors import LayoutMismatchError, WeightSyncError, WeightSyncTimeout
from lightning_weightsync.paths import resolve
from lightning_weightsync.schemes.gate import Gate
from lightning_weightsync.schemes.receiver import ReceiverLink, layout_of_offer
from lightning_weightsync.schemes.source import Source
from lightning_weightsync.schemes.staging import StagedModel
from lightning_weightsync.schemes.strategy import StrategyName, Weights, WeightStrategy, nested
from lightning_weightsync.transports.base import ReceiverTransport, SenderTransport, TransferFailed
from lightning_weightsync.transports.control import Message
from lightning_weightsync.transports.hub import LinkHub, Payload, PushHandle, raise_failures
from lightning_weightsync.transports.link import WorkerLink
from lightning_weightsync.transports.rendezvous import StoreInfo
from lightning_weightsync.transports.slots import Slot, SlotPool

Role = Literal["sender", "receiver"]

_process_gate = Gate()
"""The gate of receivers that have no context, or one without a gate."""


class WeightSyncScheme(ABC):
    """Keeps one destination of every worker equal to one source in the sender.

    Args:
        sync: For hand-written receivers. ``True``: the worker's loop calls ``receive``. ``False``: a background thread
            applies pushes as soon as the gate is free. Collector groups always work in the second way.
        timeout: Bounds one push as a whole, in seconds.
        connect_timeout: Bounds ``connect``, in seconds; ``None`` means 60 and 2 per worker.
        heartbeat_timeout: Seconds of silence after which a worker that is being waited for counts as dead.
        host: Address that the sender listens on.
        strategy: How leaves are found and written, see ``WeightStrategy``.
        strict: Whether the sender must have every leaf of the receiver. A leaf that only the sender has, or of another
            shape or dtype, is an error in any case.
        apply: ``"auto"`` points the receiver's parameters at the slot where that is safe; ``"copy"`` always copies.
        max_slots: How many slots the sender may make; ``None`` means workers + 2. With 1, receivers copy.
        wire_dtype: Floating-point leaves travel in this dtype; the receiver keeps its own.
    """

    def __init__(
        self,
        *,
        sync: bool = True,
        timeout: float = 3600.0,
        connect_timeout: float | None = None,
        heartbeat_timeout: float = 30.0,
        host: str = "127.0.0.1",
        strategy: StrategyName = "tensordict",
        strict: bool = True,
        apply: Literal["auto", "copy"] = "auto",
        max_slots: int | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        if apply not in ("auto", "copy"):
            raise ValueError(f"apply={apply!r}: choose 'auto' or 'copy'")
        if max_slots is not None and max_slots < 1:
            raise ValueError(f"max_slots={max_slots}: at least 1")
        if wire_dtype is not None and not (isinstance(wire_dtype, torch.dtype) and wire_dtype.is_floating_point):
            raise ValueError(f"wire_dtype={wire_dtype!r}: give a floating-point dtype, for example torch.bfloat16")
        for name, seconds in (
            ("timeout", timeout),
            ("connect_timeout", connect_timeout),
            ("heartbeat_timeout", heartbeat_timeout),
        ):
            if seconds is not None and not seconds > 0:
                raise ValueError(f"{name}={seconds!r}: give a positive number of seconds")
        self.sync = sync
        self.timeout = float(timeout)
        self.connect_timeout = connect_timeout
        self.heartbeat_timeout = float(heartbeat_timeout)
        self.host = host
        self.strategy = WeightStrategy(strategy)
        self.strict = strict
        self.apply = apply
        self.max_slots = max_slots
        self.wire_dtype = wire_dtype
        self._reset()

    def _reset(self) -> None:
        self._role: Role | None = None
        self._model_id: str | None = None
        self._context: Any = None
        self._source: Weights | None = None
        self._hub: LinkHub | None = None
        self._owns_hub = False
        self._reader: Source | None = None
        self._pool: SlotPool | None = None
        self._transports: dict[int, SenderTransport] = {}
        self._store_info: StoreInfo | None = None
        self._staged: StagedModel | None = None
        self._gate: Gate | None = None
        self._link: ReceiverLink | None = None
        self._owns_link = False
        self._receiver_transport: ReceiverTransport | None = None
        self._worker_idx: int | None = None
        self._hooks: list[Callable[[Any, int], None]] = []
        self._ended = False

    def __getstate__(self) -> dict[str, Any]:
        runtime = WeightSyncScheme.__new__(type(self))
        runtime._reset()
        state = {name: value for name, value in self.__dict__.items() if name not in runtime.__dict__}
        return state | {"_model_id": self._model_id, "_store_info": self._store_info}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._reset()
        self.__dict__.update(state)

    # --- the sender's side ---------------------------------------------------------------------------------------

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
        """
        self._take_role("sender", model_id)
        self._context = context
        self._source = model if model is not None else weights
        if self._source is None and hasattr(context, "get_model"):
            self._source = context.get_model(model_id)
        hub = getattr(context, "hub", None)
        if isinstance(hub, LinkHub):
            self._hub = hub
        else:
            count = num_workers if num_workers is not None else getattr(context, "num_workers", None)
            if not isinstance(count, int) or count < 1:
                self._role = None
                raise ValueError(f"num_workers={count!r}: give the number of workers, or a context that has it")
            self._owns_hub = True
            self._hub = LinkHub(
                count,
                host=self.host,
                local=self.wants_local,
                connect_timeout=self.connect_timeout,
                heartbeat_timeout=self.heartbeat_timeout,
            )
        self._store_info = self._hub.info

    def get_store_info(self) -> StoreInfo:
        """Host, port and key that a receiver needs, where the scheme itself was not pickled over to it."""
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

    def attach(self, weights: Weights | None, worker_ids: Sequence[int], deadline: float) -> None:
        """Agree on the layout with each worker and open the transports; part of ``connect``.

        A group calls it for each of its schemes, and then pushes all of them as one version.

        Raises:
            LayoutMismatchError: The leaves differ, in any worker; ``.failed`` names the workers.
            WeightSyncError: A worker did not answer, or cannot use this backend.
        """
        hub = self._sender_hub()
        if weights is not None:
            self._source = weights
        model_id = self._known_model_id()
        reader = Source(model_id, self._bound(), self.strategy, self.wire_dtype)
        if not reader.layout.leaves:
            raise ValueError(f"the source of {model_id!r} has neither parameters nor buffers")
        layout = reader.layout.to_json()
        max_slots = hub.num_workers + 2 if self.max_slots is None else self.max_slots
        phase = f"agreeing on the layout of {model_id!r}"
        with self._offering(deadline) as transport_offer:

            def offer(link: WorkerLink) -> None:
                link.channel.send(
                    "attach",
                    model_id=model_id,
                    layout=layout,
                    extra_keys=reader.extra_keys,
                    casts=self.wire_dtype is not None,
                    strict=self.strict,
                    may_hold=max_slots > 1,
                    backend=self.backend_name,
                    transport=transport_offer(link),
                    budget=float(deadline - time.monotonic()),
                    deadline=deadline,
                )

            verdicts = {"attached", "mismatch", "attach_failed"}
            answers = hub.ask(worker_ids, offer, verdicts, phase=phase, deadline=deadline)
            _raise_refusals(model_id, answers.replies, answers.failed, phase)
            self._reader = reader
            self._pool = SlotPool(reader.layout, max_slots, shared=any(self.shares(hub.links[i]) for i in worker_ids))
            self._pool.prefault(2)

            def open_transport(link: WorkerLink) -> None:
                budget = float(deadline - time.monotonic())
                link.channel.send("open", model_id=model_id, budget=budget, deadline=deadline)

            phase = f"opening the transport of {model_id!r}"
            opened = hub.ask(worker_ids, open_transport, {"opening"}, phase=phase, deadline=deadline)
            raise_failures(opened.failed, phase)
            for index in worker_ids:
                link = hub.links[index]
                holds = bool(answers.replies[index]["holds"])
                transport = self.create_transport(link=link, offer=transport_offer(link), holds=holds)
                if transport is not self.shared_transport:
                    link.when_ended(transport.close)
                started = time.monotonic()
                try:
                    transport.connect(deadline)
                except TransferFailed as error:
                    cause = hub.lose(link, phase, time.monotonic() - started, error)
                    raise_failures({index: cause}, phase)
                self._transports[index] = transport

    def snapshot(self, weights: Weights | None, holder: object, deadline: float) -> tuple[Slot, bytes]:
        """Copy weights (``None``: what was bound) into a free slot, which ``holder`` then holds.

        Returns:
            The slot, and the extra state as bytes.

        Raises:
            LayoutMismatchError: They are not the weights of ``connect``.
            WeightSyncTimeout: No slot became free by the deadline (monotonic clock, seconds).
        """
        if self._reader is None or self._pool is None:
            raise RuntimeError(f"scheme {self._model_id!r} is not connected: call connect() first")
        pool, taken = self._pool, []

        def got_slot() -> bool:
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
        try:
            return taken[0], self._reader.read(taken[0], weights)
        except BaseException:
            pool.release(taken[0], holder)
            raise

    def release(self, slot: Slot, holder: object) -> None:
        """``holder`` of a snapshot does not need it any more."""
        if self._pool is not None:
            self._pool.release(slot, holder)

    def payload(self, worker_idx: int, slot: Slot, extra: bytes) -> Payload:
        """What a push hands to the hub for one worker."""
        transport = self._transports.get(worker_idx)
        if transport is None or self._pool is None:
            raise WeightSyncError(f"worker {worker_idx} is not connected for {self._model_id!r}: call connect() first")
        return Payload(self._known_model_id(), self._pool, slot, transport, extra)

    # --- the receiver's side -------------------------------------------------------------------------------------

    def init_on_receiver(
        self,
        model_id: str,
        context: Any = None,
        *,
        model: Weights | None = None,
        worker_idx: int | None = None,
        store_info: StoreInfo | None = None,
    ) -> None:
        """Make this the receiver's end. Talks to nobody.

        Args:
            model_id: The destination.
            context: Object on which ``model_id`` is resolved as a path; may lend its ``gate`` and its link.
            model: The live model, where there is no context.
            worker_idx: 0-based; may be given to ``connect`` instead.
            store_info: Only where the scheme was not pickled over after ``init_on_sender``.
        """
        self._take_role("receiver", model_id)
        self._context = context
        self._worker_idx = worker_idx
        if store_info is not None:
            self._store_info = store_info
        if model is None and context is not None:
            model = context.get_model(model_id) if hasattr(context, "get_model") else resolve(context, model_id)
        if model is None:
            self._role = None
            raise ValueError(f"{model_id!r}: give the model, or the context on which it is found")
        self._staged = StagedModel(model_id, model, self.strategy, strict=self.strict, may_switch=self.apply == "auto")
        self._staged.applied_hooks += self._hooks
        if hasattr(context, "update_policy_weights_"):
            self._staged.applied_hooks.append(self._hand_on)
        gate = getattr(context, "gate", None)
        self._gate = gate if isinstance(gate, Gate) else _process_gate
        link = getattr(context, "receiver_link", None)
        if isinstance(link, ReceiverLink):
            self._link = link
            link.add(self)

    def receive(self, timeout: float | None = None) -> TensorDict | None:
        """With ``sync=True``: wait for a push, apply it in the calling thread, acknowledge it. This is the safe point.

        Args:
            timeout: ``None`` blocks, ``0`` polls, otherwise at most so many seconds.

        Returns:
            A copy of the applied weights, or ``None`` if nothing came. A wait that timed out harms nothing.

        Raises:
            RuntimeError: ``sync=False`` (a background thread receives), or called inside the gate.
            WeightSyncError: The sender is gone.
        """
        link = self._receiver_link()
        if not self.sync:
            raise RuntimeError("sync=False: a background thread receives; use safe_point() or the gate")
        if not link.serve_once(timeout):
            return None
        return self._receiving().copy()

    def safe_point(self) -> bool:
        """Switch now, in the calling thread, to what was pushed; whether it switched.

        Raises:
            RuntimeError: Called inside the gate.
        """
        link = self._receiver_link()
        return link.serve_once(0.0) if self.sync and self._owns_link else link.safe_point()

    def add_applied_hook(self, hook: Callable[[Any, int], None]) -> None:
        """Have ``hook(model, version)`` called on the receiver after each switch, under the gate, before the next call.

        A hook that raises fails the push: every model of it is rolled back. Hooks stay in their process: they are not
        pickled with the scheme.
        """
        self._hooks.append(hook)
        if self._staged is not None:
            self._staged.applied_hooks.append(hook)

    def accept_offer(self, offer: Message) -> None:
        """Check a sender's offer; see ``schemes.receiver.Destination``."""
        if offer["backend"] != self.backend_name:
            raise WeightSyncError(
                f"the sender moves {offer['model_id']!r} over backend={offer['backend']!r}, this worker was told "
                f"{self.backend_name!r}: give both sides the same scheme"
            )
        self._receiving().bind(
            layout_of_offer(offer),
            extra_keys=offer["extra_keys"],
            casts=offer["casts"],
            strict=offer["strict"],
            may_hold=offer["may_hold"],
        )

    def make_transport(self, offer: Message) -> ReceiverTransport:
        """This side's end of the offered transport; see ``schemes.receiver.Destination``."""
        transport: ReceiverTransport = self.create_transport(offer=offer["transport"])
        self._receiver_transport = transport
        return transport

    # --- both sides ----------------------------------------------------------------------------------------------

    def connect(self, weights: Weights | None = None, *, worker_idx: int | None = None) -> None:
        """Meet the other side: equal layouts and the current weights, or an error on each side that is alive.

        Blocks: the sender on all its workers, a receiver on its sender, each for at most ``connect_timeout``.

        Args:
            weights: Sender only: the source, if it was not bound before.
            worker_idx: Receiver only: its index, if it was not given before.

        Raises:
            LayoutMismatchError: The leaves differ; names each.
            WeightSyncTimeout: Somebody did not come in time; names who.
        """
        if self._role == "sender":
            self._connect_sender(weights)
        elif self._role == "receiver":
            self._connect_receiver(worker_idx)
        else:
            raise RuntimeError("call init_on_sender() or init_on_receiver() before connect()")

    def shutdown(self) -> None:
        """End this side. Idempotent, under a second, unblocks any waiter; what a context lent is left to it.

        A scheme that was shut down may be initialised again.
        """
        if self._owns_hub and self._hub is not None:
            self._hub.close()
        if self._owns_link and self._link is not None:
            self._link.end()
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()
        if self._pool is not None:
            self._pool.close()
        self._ended = True

    def prepare_weights(
        self,
        weights: Weights | str | None,
        model_id: str,
        strategy: WeightStrategy,
        context: Any = None,
    ) -> TensorDict | dict[str, Tensor]:
        """The leaves that a push would carry, as references.

        Args:
            weights: ``None`` (what was bound, or ``context.get_model(model_id)``), a module, a TensorDict, a dict, or a
                source path that is resolved on the context.
            model_id: The destination.
            strategy: How leaves are found.
            context: Where a path or ``None`` is looked up.
        """
        if isinstance(weights, str):
            weights = resolve(context if context is not None else self._context, weights)
        elif weights is None and hasattr(context, "get_model"):
            weights = context.get_model(model_id)
        return strategy.extract_weights(self._bound() if weights is None else weights)

    def apply_weights(self, weights: Weights, inplace: bool = True) -> None:
        """Write weights into the receiver's model, alone in the gate; parameters keep their identity either way."""
        model = self._receiving().target
        if not isinstance(model, nn.Module):
            raise TypeError("apply_weights() needs a receiver that was given a module")
        with self.gate.alone():
            self.strategy.apply_weights(model, weights, inplace)

    def create_sender(self) -> WeightSender:
        """A handle with ``update_weights()``, for code that knows no schemes."""
        return WeightSender(self)

    def create_receiver(self) -> WeightReceiver:
        """A handle with ``receive()``, for code that knows no schemes."""
        return WeightReceiver(self)

    @property
    def wants_local(self) -> bool:
        """Whether the hub is to listen on a Unix socket for workers of this host."""
        return False

    @property
    @abstractmethod
    def backend_name(self) -> str:
        """What both sides must agree on to move bytes."""

    @abstractmethod
    def create_transport(self, **kwargs: Any) -> Any:
        """A ``SenderTransport`` (from ``link``, ``offer``, ``holds``) or a ``ReceiverTransport`` (from ``offer``)."""

    @abstractmethod
    def shares(self, link: WorkerLink) -> bool:
        """Whether this worker maps the sender's slots."""

    @abstractmethod
    def _offering(self, deadline: float) -> Any:
        """Context manager around ``attach``: yields what the ``transport`` field of a worker's offer holds."""

    @property
    def context(self) -> Any:
        """The object that was given to ``init_*``, or ``None``."""
        return self._context

    @context.setter
    def context(self, context: Any) -> None:
        self._context = context

    @property
    def model(self) -> Any:
        """The module that is read (sender) or written (receiver), or ``None``."""
        return self._staged.target if self._staged is not None else self._source

    @property
    def model_id(self) -> str | None:
        """The destination."""
        return self._model_id

    @property
    def weights(self) -> TensorDict | None:
        """References to the current leaves as a nested TensorDict, or ``None``."""
        model = self.model
        return None if model is None else nested({k: v.detach() for k, v in self.strategy.leaves(model).items()})

    @property
    def worker_idx(self) -> int | None:
        """The receiver's index; ``None`` on a sender."""
        return self._worker_idx

    @property
    def version(self) -> int:
        """Sender: of the newest push. Receiver: of the weights in force (-1 before the first)."""
        if self._hub is not None:
            return self._hub.version
        return self._link.version if self._link is not None else -1

    @property
    def gate(self) -> Gate:
        """The receiver's gate.

        Raises:
            RuntimeError: This is not a receiver.
        """
        if self._gate is None:
            raise RuntimeError("only a receiver has a gate: call init_on_receiver() first")
        return self._gate

    @property
    def sender_transports(self) -> dict[int, SenderTransport]:
        """One transport per connected worker."""
        return dict(self._transports)

    @property
    def receiver_transport(self) -> ReceiverTransport | None:
        """The receiver's end, once connected."""
        return self._receiver_transport

    @property
    def shared_transport(self) -> SenderTransport | None:
        """The transport that all workers of this host share, where there is one."""
        return None

    @property
    def staged_model(self) -> StagedModel:
        """What the receiver holds for its destination."""
        return self._receiving()

    # --- inside --------------------------------------------------------------------------------------------------

    def _connect_sender(self, weights: Weights | None) -> None:
        hub = self._sender_hub()
        if not self._owns_hub:
            raise RuntimeError("this scheme uses its group's links: the group connects it")
        if self._transports:
            raise NotImplementedError("connecting a second time (a replacement joins) is not there yet")
        deadline = time.monotonic() + hub.connect_timeout
        everybody = list(range(hub.num_workers))
        try:
            hub.accept(everybody, deadline)
            self.attach(weights, everybody, deadline)
            push_models(hub, {self: None}, everybody, timeout=deadline - time.monotonic(), initial=True).wait()
        except BaseException:
            self.shutdown()
            raise

    def _connect_receiver(self, worker_idx: int | None) -> None:
        if worker_idx is not None:
            self._worker_idx = worker_idx
        if self._link is None:
            if self._worker_idx is None:
                raise ValueError("worker_idx is not known: give it to init_on_receiver() or connect()")
            if self._store_info is None:
                raise ValueError(
                    "store_info is not known: give scheme.get_store_info() of the sender to init_on_receiver()"
                )
            self._link = ReceiverLink(self._store_info, self._worker_idx, self.gate)
            self._link.add(self)
            self._owns_link = True
        timeout = 60.0 if self.connect_timeout is None else self.connect_timeout
        self._link.connect(time.monotonic() + timeout)
        if self._owns_link and not self.sync:
            self._link.start_service()

    def _take_role(self, role: Role, model_id: str) -> None:
        if self._ended:
            self._reset()
        if self._role is not None:
            raise RuntimeError(
                f"this scheme is the {self._role} of {self._model_id!r} already: use one scheme per model"
            )
        if not model_id or not isinstance(model_id, str):
            raise ValueError(f"model_id={model_id!r}: give the destination, for example 'policy'")
        self._role = role
        self._model_id = model_id

    def _hand_on(self, model: Any, version: int) -> None:
        self._context.update_policy_weights_(weights=self._receiving().copy(), model_id=self._model_id)

    def _bound(self) -> Weights:
        if self._source is None:
            raise ValueError(
                f"no weights are bound to {self._model_id!r}: give them to send(), connect() or init_on_sender()"
            )
        return self._source

    def _known_model_id(self) -> str:
        if self._model_id is None:
            raise RuntimeError("call init_on_sender() or init_on_receiver() first")
        return self._model_id

    def _sender_hub(self) -> LinkHub:
        if self._role != "sender" or self._hub is None:
            raise RuntimeError("this is not a sender: call init_on_sender() first")
        return self._hub

    def _receiver_link(self) -> ReceiverLink:
        if self._role != "receiver" or self._link is None:
            raise RuntimeError("this is not a connected receiver: call init_on_receiver() and connect() first")
        return self._link

    def _receiving(self) -> StagedModel:
        if self._staged is None:
            raise RuntimeError("this is not a receiver: call init_on_receiver() first")
        return self._staged


class WeightSender:
    """What ``create_sender`` returns: something that can be told to update, and knows its version."""

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self._scheme = scheme

    @property
    def version(self) -> int:
        """Of the newest push."""
        return self._scheme.version

    def update_weights(self, weights: Weights | None = None) -> None:
        """Push to every worker; see ``WeightSyncScheme.send``."""
        self._scheme.send(weights)


class WeightReceiver:
    """What ``create_receiver`` returns: something that takes what was pushed, and knows its version."""

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self._scheme = scheme

    @property
    def version(self) -> int:
        """Of the weights in force."""
        return self._scheme.version

    def receive(self, timeout: float | None = None) -> TensorDict | None:
        """Take a push; see ``WeightSyncScheme.receive``."""
        return self._scheme.receive(timeout)


PerWorker: TypeAlias = Mapping[int, Weights]


def push_models(
    hub: LinkHub,
    weights: Mapping[WeightSyncScheme, Weights | PerWorker | None],
    worker_ids: Sequence[int],
    *,
    timeout: float,
    initial: bool = False,
    replaceable: bool = False,
) -> PushHandle:
    """Take one version, snapshot several models as it, and put it on its way; the caller may wait for the handle.

    Args:
        hub: Whose version it is.
        weights: For each scheme its weights; ``None`` for what was bound; a dict with int keys gives each worker its
            own.
        worker_ids: The targeted workers.
        timeout: Bounds the whole push, in seconds.
        initial: Deliver the current version instead of taking a new one.
        replaceable: Whether a newer push of the same models may take its place where it has not been sent.

    Raises:
        LayoutMismatchError: Weights are not those of ``connect``; nothing was sent and no version taken.
        WeightSyncTimeout: No slot became free in time.
    """
    started = time.monotonic()
    holder = _Snapshot()
    taken: list[tuple[WeightSyncScheme, Slot]] = []
    with hub.pushing:
        hub.check_open()
        try:
            payloads: dict[int, list[Payload]] = {index: [] for index in worker_ids}
            failed: dict[int, Exception] = {}
            for scheme, given in weights.items():
                for indices, own in _per_slot(scheme, given, worker_ids):
                    slot, extra = scheme.snapshot(own, holder, started + timeout)
                    taken.append((scheme, slot))
                    for index in indices:
                        try:
                            payloads[index].append(scheme.payload(index, slot, extra))
                        except WeightSyncError as error:
                            failed[index] = error
            if not initial:
                hub.version += 1
            reachable = {index: several for index, several in payloads.items() if index not in failed}
            remaining = max(0.001, timeout - (time.monotonic() - started))
            handle = hub.push(reachable, hub.version, timeout=remaining, initial=initial, replaceable=replaceable)
            handle.failed |= failed
            return handle
        finally:
            for scheme, slot in taken:
                scheme.release(slot, holder)


class _Snapshot:
    """Holds a slot while it is being written."""

    def __repr__(self) -> str:
        return "a snapshot that is being taken"


def is_per_worker(weights: Weights | PerWorker | None) -> TypeGuard[PerWorker]:
    """Whether these are weights for each worker on its own: a dict with int keys."""
    return isinstance(weights, dict) and bool(weights) and all(isinstance(key, int) for key in weights)


def _per_slot(
    scheme: WeightSyncScheme, weights: Weights | PerWorker | None, worker_ids: Sequence[int]
) -> list[tuple[Sequence[int], Weights | None]]:
    """One snapshot for everybody, or one for each worker where each is given its own weights."""
    if not is_per_worker(weights):
        return [(worker_ids, weights)]
    left_out = [index for index in worker_ids if index not in weights]
    if left_out:
        raise ValueError(
            f"{scheme.model_id!r}: weights are given for workers {sorted(weights)}, but not for {left_out}"
        )
    return [([index], weights[index]) for index in worker_ids]


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
