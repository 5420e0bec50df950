"""What does a worker do with each message of its sender? The receiver's end of a link.

It joins the sender, agrees on layouts, stages announced pushes, commits them under the gate and acknowledges. One
object serves all destinations of one context. Either a thread of its own does that (``start_service``: pushes are
applied as soon as the gate is free), or the worker's loop does (``serve_once``: pushes are applied where the loop
says).

A second small thread sends heartbeats, so that a long environment step is not taken for a dead worker.

    NEW --join()--> JOINING --welcome--> JOINED --first version applied--> SERVING
     |  <--refused, late--+                 |                                 |
     +--------------------+-----------------+--end(), or the channel ends-----+--> ENDED
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Protocol

from lightning_weightsync.errors import LayoutMismatchError, StaleVersionError, WeightSyncError, WeightSyncTimeout
from lightning_weightsync.schemes.extra_state import unpack
from lightning_weightsync.schemes.gate import Gate
from lightning_weightsync.schemes.staging import StagedModel
from lightning_weightsync.schemes.transaction import Staged, Transaction, check_newer
from lightning_weightsync.transports.base import ReceiverTransport, TransferFailed
from lightning_weightsync.transports.control import ChannelClosed, ChannelTimeout, ControlChannel, Message
from lightning_weightsync.transports.dialling import join
from lightning_weightsync.transports.layout import WeightLayout
from lightning_weightsync.transports.meeting import Values, from_text, to_text
from lightning_weightsync.transports.memory import SlotMemory
from lightning_weightsync.transports.rendezvous import StoreInfo
from lightning_weightsync.transports.shared_memory import SharedMemoryReceiver


class ReceiverState(Enum):
    """See the module's picture. An ended link is never joined again: a process that comes back makes another."""

    NEW = "new"
    JOINING = "joining"
    JOINED = "joined"
    SERVING = "serving"
    ENDED = "ended"


_MOVES: Mapping[ReceiverState, frozenset[ReceiverState]] = {
    ReceiverState.NEW: frozenset({ReceiverState.JOINING, ReceiverState.ENDED}),
    ReceiverState.JOINING: frozenset({ReceiverState.JOINED, ReceiverState.NEW, ReceiverState.ENDED}),
    ReceiverState.JOINED: frozenset({ReceiverState.SERVING, ReceiverState.ENDED}),
    ReceiverState.SERVING: frozenset({ReceiverState.ENDED}),
    ReceiverState.ENDED: frozenset(),
}
_NEVER = 365 * 86400.0
_LEAVE_SECONDS = 0.3


class Destination(Protocol):
    """What a scheme puts on the link: a model, and the transport that its bytes come over."""

    @property
    def staged_model(self) -> StagedModel:
        """The destination's model."""
        ...

    def accept_offer(self, offer: Message) -> None:
        """Check the sender's backend and layout; raises ``WeightSyncError`` or ``LayoutMismatchError``."""
        ...

    def make_transport(self, offer: Message) -> ReceiverTransport:
        """This side's end of the transport that the sender has offered; it is connected later."""
        ...


class ReceiverLink:
    """The worker's end of the link to its sender.

    Args:
        info: Where the sender is.
        worker_idx: This worker's 0-based index.
        gate: Of the context whose models are kept in sync.

    Attributes:
        run: Run of the weights in force.
        version: Version of the weights in force; -1 before the first.
        generation: Which replacement of this index the sender takes it for.
        state: See ``ReceiverState``; changed by ``_move`` alone.
        cause: Why it is ``ENDED``, if that was not in good order.
    """

    def __init__(self, info: StoreInfo, worker_idx: int, gate: Gate) -> None:
        self.info = info
        self.worker_idx = worker_idx
        self.gate = gate
        self.run = -1
        self.version = -1
        self.generation = -1
        self.state = ReceiverState.NEW
        self.cause: Exception | None = None
        self._destinations: dict[str, Destination] = {}
        self._offers: dict[str, Message] = {}
        self._transports: dict[str, ReceiverTransport] = {}
        self._joining: socket.socket | None = None
        self._channel: ControlChannel | None = None
        self._pending: Transaction | None = None
        self._refusal: Exception | None = None
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()
        self._moving = threading.Lock()

    def add(self, destination: Destination) -> None:
        """Register a destination; before ``connect``."""
        self._destinations[destination.staged_model.model_id] = destination

    def connect(self, deadline: float) -> None:
        """Join the sender, agree on every destination's layout, and apply the initial weights. Blocks on the sender.

        Raises:
            LayoutMismatchError: This worker's leaves are not the sender's.
            WeightSyncTimeout: The deadline (monotonic clock, seconds) passed first.
            WeightSyncError: The sender refused this worker, went away, or gave up on its own account.
        """
        if self.state is ReceiverState.NEW:
            self.join(deadline)
        channel = self._open_channel()
        started = time.monotonic()
        try:
            while self.version < 0:
                self._serve(channel.receive(deadline))
                if self._refusal is not None:
                    raise self._refusal
        except ChannelTimeout as error:
            self.end(error)
            raise WeightSyncTimeout(
                f"worker {self.worker_idx}: the sender delivered no weights within {time.monotonic() - started:.1f} s "
                "(phase: connect)"
            ) from error
        except ChannelClosed as error:
            self.end(error)
            raise WeightSyncError(
                f"worker {self.worker_idx}: the sender gave up connecting (phase: connect): {error}"
            ) from error
        except BaseException as error:
            self.end(error if isinstance(error, Exception) else None)
            raise

    def join(self, deadline: float) -> None:
        """Meet the sender, and have it take this worker in; ``connect`` does that first. Blocks on the sender.

        Raises:
            WeightSyncTimeout: The deadline (monotonic clock, seconds) passed first.
            WeightSyncError: The sender refused this worker or went away, or this end was shut down meanwhile.
        """

        def hold(sock: socket.socket) -> None:
            self._joining = sock  # from here on `end` breaks the wait off
            if self.state is ReceiverState.ENDED:
                raise ChannelClosed("this end was shut down")

        if not self._move(ReceiverState.JOINING):
            raise WeightSyncError(f"worker {self.worker_idx} cannot join: its link is {self.state.value}")
        try:
            channel, welcome = join(self.info, self.worker_idx, deadline, hold)
        except WeightSyncError as error:
            if not self._move(ReceiverState.NEW):
                raise WeightSyncError(f"worker {self.worker_idx} was shut down while it connected") from error
            raise
        self.generation = welcome["generation"]
        self._channel = channel  # before the move: who ends the link from then on closes it
        if not self._move(ReceiverState.JOINED):
            channel.close()
            raise WeightSyncError(f"worker {self.worker_idx} was shut down while it connected")
        self._spawn(self._beat, "heartbeat", channel, float(welcome["heartbeat_timeout"]))

    def start_service(self) -> None:
        """From now on a background thread serves the sender, and commits as soon as the gate is free."""
        self._spawn(self._serve_for_ever, "receiver")

    def serve_once(self, timeout: float | None) -> bool:
        """Serve the sender from the calling thread until a push was applied.

        Args:
            timeout: Seconds to wait: ``None`` waits for ever, ``0`` only looks.

        Returns:
            Whether a push was applied.

        Raises:
            WeightSyncError: The link has ended.
            RuntimeError: The calling thread is inside the gate.
        """
        if self.gate.inside:
            raise RuntimeError("weights cannot be received inside the gate: leave `with gate:` first")
        channel = self._open_channel()
        deadline = time.monotonic() + (_NEVER if timeout is None else timeout)
        before = (self.run, self.version)
        try:
            while True:
                message = channel.poll()
                if message is None and time.monotonic() >= deadline:
                    return False
                self._serve(message if message is not None else channel.receive(deadline))
                if (self.run, self.version) != before:
                    return True
        except ChannelTimeout:
            return False
        except ChannelClosed as error:
            self.end(error)
            why = self.cause or error
            raise WeightSyncError(f"worker {self.worker_idx}: the link to the sender has ended: {why}") from error

    def safe_point(self) -> bool:
        """Commit in the calling thread what the background thread has staged; whether it switched."""
        if self.gate.inside:
            raise RuntimeError("weights cannot be switched from inside the gate: leave `with gate:` first")
        pending = self._pending
        try:
            return pending is not None and pending.commit()
        except ChannelClosed:  # called off by the sender; the background thread ends the link
            return False

    def check_wanted(self) -> None:
        """See ``schemes.transaction.Origin``: a sender that gives a push up closes the link, and so does ``end``."""
        if self.state is ReceiverState.ENDED:
            raise ChannelClosed("this end was shut down")
        if self._channel is not None:
            self._channel.check_open()

    def end(self, cause: Exception | None = None, *, keep_models: bool = True) -> None:
        """Close the channel and every transport; both threads leave. Idempotent, does not block on the sender.

        Args:
            cause: Why, if it is not in good order.
            keep_models: Whether the models are used on: they are moved out of the sender's slots first.
        """
        if not self._move(ReceiverState.ENDED, cause):
            return
        if isinstance(cause, ChannelClosed) and self._channel is not None:
            self.cause = ChannelClosed(_last_words(self._channel, str(cause)))
        if keep_models:
            self._leave_slots()
        self._ended.set()
        if self._channel is not None:
            self._channel.close()
        elif self._joining is not None:
            with contextlib.suppress(OSError):
                self._joining.shutdown(socket.SHUT_RDWR)
        for transport in self._transports.values():
            transport.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(0.9)

    def _move(self, state: ReceiverState, cause: Exception | None = None) -> bool:
        """Change the state if that is a move of the table; whether it was."""
        with self._moving:
            if state not in _MOVES[self.state]:
                return False
            self.state, self.cause = state, cause
            return True

    def _leave_slots(self) -> None:
        # While the channel is open the sender writes nothing into them; once it is lost it never does again.
        models = [self._destinations[name].staged_model for name in self._transports]
        # If somebody stays in the gate, the models go on viewing the slots: harmless, but for the memory.
        with contextlib.suppress(WeightSyncTimeout, RuntimeError), self.gate.alone(time.monotonic() + _LEAVE_SECONDS):
            for model in models:
                if model.holds_slot:
                    model.detach()

    def swap(self, model_id: str, ours: Values, deadline: float) -> Values:
        """Tell the sender our values for a meeting in a pair group, and return its own; blocks on it.

        Raises:
            TransferFailed: It did not tell.
        """
        channel = self._open_channel()
        try:
            message = channel.receive(deadline)
            if message.kind != "meet" or message["model_id"] != model_id:
                raise TransferFailed(f"the sender sent {message.kind!r} where its address for {model_id!r} was due")
            channel.send("meet", model_id=model_id, values=to_text(ours), deadline=deadline)
        except (ChannelTimeout, ChannelClosed) as error:
            raise TransferFailed(f"the sender did not come to the pair group: {error}") from error
        return from_text(message["values"])

    @property
    def local_host(self) -> str | None:
        """Address of this worker's interface to its sender; ``None`` if they are connected by a Unix socket."""
        return self._open_channel().local_host

    def _open_channel(self) -> ControlChannel:
        if self._channel is None or self.state is ReceiverState.ENDED:
            why = "was never connected" if self._channel is None else f"has ended: {self.cause or 'shut down'}"
            raise WeightSyncError(f"worker {self.worker_idx}: the link to the sender {why}")
        return self._channel

    def _spawn(self, target: Callable[..., None], name: str, *args: Any) -> None:
        name = f"weight-sync-{name}-{self.worker_idx}"
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _beat(self, channel: ControlChannel, heartbeat_timeout: float) -> None:
        while not self._ended.wait(min(5.0, heartbeat_timeout / 4)):
            try:
                channel.try_send("beat")
            except ChannelClosed:
                return

    def _serve_for_ever(self) -> None:
        try:
            channel = self._open_channel()
            while True:
                self._serve(channel.receive(None))
        except Exception as error:  # whatever it is: a receiver that serves nobody must not look alive
            self.end(error)

    def _serve(self, message: Message) -> None:
        """Act on one message; ``ChannelClosed`` ends the link, everything else is reported to the sender."""
        channel = self._open_channel()
        if message.kind == "attach":
            self._attach(channel, message)
        elif message.kind == "open":
            self._open(channel, message)
        elif message.kind == "push":
            self._push(channel, message)
        elif message.kind == "slot":
            self._learn_slot(message)
        elif message.kind == "retire":
            self._forget_slot(message)
        elif message.kind == "digest":
            destination = self._destinations.get(message["model_id"])
            with self.gate:
                digest = destination.staged_model.digest() if destination is not None else ""
            channel.send("digested", model_id=message["model_id"], digest=digest)
        elif message.kind == "close":
            raise ChannelClosed("the sender closed the link")
        elif message.kind == "refused":
            raise ChannelClosed(_given_up(message))
        else:
            raise ChannelClosed(f"the sender sent {message.kind!r}, which is no request")

    def _attach(self, channel: ControlChannel, offer: Message) -> None:
        model_id = offer["model_id"]
        destination = self._destinations.get(model_id)
        try:
            if destination is None:
                known = ", ".join(map(repr, self._destinations)) or "none"
                raise WeightSyncError(f"there is no receiver for {model_id!r} in this worker; there is {known}")
            destination.accept_offer(offer)
        except LayoutMismatchError as error:
            self._refusal = error
            channel.send(
                "mismatch",
                model_id=model_id,
                message=str(error),
                missing=error.missing,
                unexpected=error.unexpected,
                mismatched=error.mismatched,
            )
        except Exception as error:
            self._refusal = error
            channel.send("attach_failed", model_id=model_id, message=str(error))
        else:
            self._offers[model_id] = offer
            holds = destination.staged_model.holds_slot
            channel.send("attached", model_id=model_id, local=channel.passes_descriptors, holds=holds)

    def _open(self, channel: ControlChannel, message: Message) -> None:
        model_id = message["model_id"]
        deadline = time.monotonic() + message["budget"]
        try:
            transport = self._destinations[model_id].make_transport(self._offers[model_id])
            self._transports[model_id] = transport
            # Nothing interrupts gloo while two ends meet: each begins when it knows that the other is there.
            channel.check_open()
            channel.send("opening", model_id=model_id)
            transport.connect(deadline)
        except (TransferFailed, KeyError) as error:
            reason = _last_words(channel, f"the transport of {model_id!r} could not be opened: {error}")
            channel.close()
            raise ChannelClosed(reason) from error

    def _learn_slot(self, message: Message) -> None:
        transport = self._transports.get(message["model_id"])
        if not isinstance(transport, SharedMemoryReceiver):
            os.close(message.descriptor)
            raise ChannelClosed(f"a slot came for {message['model_id']!r}, which has no shared memory")
        try:
            transport.learn(message["index"], message["nbytes"], message.descriptor)
        except TransferFailed as error:
            raise ChannelClosed(str(error)) from error

    def _forget_slot(self, message: Message) -> None:
        transport = self._transports.get(message["model_id"])
        slot = transport.forget(message["index"]) if isinstance(transport, SharedMemoryReceiver) else None
        if slot is not None:
            self._destinations[message["model_id"]].staged_model.forget(slot)

    def _push(self, channel: ControlChannel, message: Message) -> None:
        run, version = message["run"], message["version"]
        deadline = time.monotonic() + message["budget"]
        push = Transaction(self.gate, run, version, deadline, origin=self)
        try:
            # Taken in even if it is going to be refused: the next receive would get these bytes otherwise.
            staged, extras = self._stage(message, deadline)
        except TransferFailed as error:
            push.abort(error)
            reason = _last_words(channel, f"the transfer of version {version} broke: {error}")
            channel.close()
            raise ChannelClosed(reason) from error
        try:
            check_newer((self.run, self.version), (run, version), initial=message["initial"])
            push.stage(
                [
                    Staged(model, slot, unpack(extra), verify=bool(entry.get("verify")))
                    for (model, slot), extra, entry in zip(staged, extras, message["models"], strict=True)
                ]
            )
            self._pending = push
            push.commit()
            if push.error is not None:  # aborted by a commit in another thread
                raise push.error
            if self.state is ReceiverState.JOINED:
                self._move(ReceiverState.SERVING)
        except Exception as error:
            if push.error is None:
                push.abort(error)
            if isinstance(error, ChannelClosed):
                raise
            channel.send(
                "failed",
                run=run,
                version=version,
                reason=_reason_for(error),
                message=f"{type(error).__name__}: {error}",
                traceback="".join(traceback.format_exception(error)),
            )
        else:
            channel.send("applied", run=run, version=version, digests=push.digests)
            for model, slot in staged:
                self._transports[model.model_id].entered(slot, held=model.holds_slot)
        finally:
            self._pending = None

    def _stage(self, message: Message, deadline: float) -> tuple[list[tuple[StagedModel, SlotMemory]], list[bytes]]:
        staged: list[tuple[StagedModel, SlotMemory]] = []
        extras: list[bytes] = []
        start = 0
        for entry in message["models"]:
            model = self._model_of(entry)
            slot = self._transports[model.model_id].stage(entry.get("ticket", {}), model.layout.nbytes, deadline)
            staged.append((model, slot))
            end = start + int(entry.get("extra", 0))
            extras.append(message.blob[start:end])
            start = end
        return staged, extras

    def _model_of(self, entry: object) -> StagedModel:
        model_id = entry.get("model_id") if isinstance(entry, dict) else None
        if not isinstance(model_id, str) or model_id not in self._transports:
            raise ChannelClosed(f"a push names {model_id!r}, which is not connected")
        return self._destinations[model_id].staged_model


def _reason_for(error: BaseException) -> str:
    if isinstance(error, StaleVersionError):
        return "stale"
    return "deadline" if isinstance(error, WeightSyncTimeout) else "user"


def _last_words(channel: ControlChannel, otherwise: str) -> str:
    """Why the sender has given this worker up, if that is among what has not been read yet."""
    with contextlib.suppress(ChannelClosed):
        while (message := channel.poll()) is not None:
            if message.descriptor >= 0:
                os.close(message.descriptor)
            if message.kind == "refused":
                return _given_up(message)
    return otherwise


def _given_up(message: Message) -> str:
    return f"the sender has given this worker up: {message['reason']}"


def layout_of_offer(offer: Message) -> WeightLayout:
    """The sender's layout, rebuilt from an ``attach`` message.

    Raises:
        WeightSyncError: It is not a layout.
    """
    try:
        return WeightLayout.from_json(offer["layout"])
    except ValueError as error:
        raise WeightSyncError(f"the sender's layout of {offer['model_id']!r} cannot be read: {error}") from error
