"""When does a worker listen to its sender, and until when? The receiver's end of a link.

What it does with each message is in ``requests``. Either a thread of its own reads them (``start_service``: pushes are
applied as soon as the gate is free), or the worker's loop does (``serve_once``: pushes are applied where the loop
says).

A second small thread sends heartbeats, so that a long environment step is not taken for a dead worker.

    NEW --join()--> JOINING --welcome--> JOINED --first version applied--> SERVING
     |  <--refused, late--+                 |                                 |
     +--------------------+-----------------+--end(), or the channel ends-----+--> ENDED
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from lightning_weightsync.errors import WeightSyncError, WeightSyncTimeout
from lightning_weightsync.schemes.gate import Gate
from lightning_weightsync.schemes.requests import Destination, Requests, last_words
from lightning_weightsync.schemes.resting import Resting
from lightning_weightsync.transports.base import TransferFailed
from lightning_weightsync.transports.board import WorkerBoard
from lightning_weightsync.transports.control import ChannelClosed, ChannelTimeout, ControlChannel, Message
from lightning_weightsync.transports.dialling import join
from lightning_weightsync.transports.meeting import Addresses, from_text, to_text
from lightning_weightsync.transports.rendezvous import StoreInfo


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
_LEAVE_SECONDS = 0.3


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
        self._version = -1
        self.generation = -1
        self.state = ReceiverState.NEW
        self.cause: Exception | None = None
        self._requests = Requests(gate, self)
        self._resting: Resting | None = None
        self._joining: socket.socket | None = None
        self._channel: ControlChannel | None = None
        self._threads: list[threading.Thread] = []
        self._has_service = False
        self._ended = threading.Event()
        self._moving = threading.Lock()

    @property
    def version(self) -> int:
        """See the class."""
        resting = self._resting
        return self._version if resting is None else resting.version

    @version.setter
    def version(self, version: int) -> None:
        self._version = version
        resting = self._resting
        if resting is not None:
            resting.version = version

    def take_board(self, descriptor: int) -> None:
        """The sender shares a board: it may switch this worker in its sleep, once that has been offered."""
        try:
            board = WorkerBoard(descriptor)
        except OSError:
            return  # every push is a message, then
        self._resting = Resting(board, self.gate, self._requests.models)
        self._resting.version = self._version

    def offer_rest(self) -> None:
        """Weights were applied: where that is all that a switch takes, the sender may do it from now on."""
        resting = self._resting
        if resting is not None and self._has_service:
            resting.offer()

    @property
    def is_mixed(self) -> bool:
        """See ``schemes.transaction.Origin``."""
        resting = self._resting
        return resting is not None and resting.is_mixed

    def stay_awake(self) -> None:
        """There is more to do at a switch from now on."""
        resting = self._resting
        if resting is not None:
            resting.withdraw()

    def add(self, destination: Destination) -> None:
        """Register a destination; before ``connect``."""
        self._requests.add(destination)

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
                self._serve(channel, channel.receive(deadline))
                if self._requests.refusal is not None:
                    raise self._requests.refusal
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
            self.end(error)
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
        """From now on a background thread serves the sender, and commits as soon as the gate is free. Idempotent."""
        with self._moving:
            served, self._has_service = self._has_service, True
        if not served:
            if self._resting is not None:
                self.gate.connect(self._resting)
                self.offer_rest()
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
        deadline = None if timeout is None else time.monotonic() + timeout
        before = (self.run, self.version)
        try:
            while True:
                message = channel.poll()
                if message is None and deadline is not None and time.monotonic() >= deadline:
                    return False
                self._serve(channel, message if message is not None else channel.receive(deadline))
                if (self.run, self.version) != before:
                    return True
        except ChannelTimeout:
            return False
        except ChannelClosed as error:
            self.end(error)
            why = self.cause or error
            raise WeightSyncError(f"worker {self.worker_idx}: the link to the sender has ended: {why}") from error

    def safe_point(self) -> bool:
        """Commit in the calling thread what the background thread has staged; whether it switched.

        What goes wrong is the sender's to know, and the background thread tells it: the weights are as they were.

        Raises:
            RuntimeError: The calling thread is inside the gate.
        """
        if self.gate.inside:
            raise RuntimeError("weights cannot be switched from inside the gate: leave `with gate:` first")
        pending = self._requests.pending
        try:
            return pending is not None and pending.commit()
        except Exception:
            return False

    def check_wanted(self) -> None:
        """See ``schemes.transaction.Origin``: a sender that gives a push up closes the link, and so does ``end``."""
        if self.state is ReceiverState.ENDED:
            raise ChannelClosed("this end was shut down")
        if self._channel is not None:
            self._channel.check_open()

    def end(self, cause: BaseException | None = None, *, keep_models: bool = True) -> None:
        """Close the channel and every transport; both threads leave. Idempotent, does not block on the sender.

        Args:
            cause: Why, if it is not in good order.
            keep_models: Whether the models are used on: they are moved out of the sender's slots first.
        """
        if cause is not None and not isinstance(cause, Exception):
            cause = WeightSyncError(f"{type(cause).__name__} was raised while the sender was served")
        if not self._move(ReceiverState.ENDED, cause):
            return
        if isinstance(cause, ChannelClosed) and self._channel is not None:
            self.cause = ChannelClosed(last_words(self._channel, str(cause)))
        if keep_models:
            self._requests.leave_slots(_LEAVE_SECONDS)
        resting = self._resting
        if resting is not None:
            resting.end()
            self._version, self._resting = resting.version, None
        self._ended.set()
        if self._channel is not None:
            self._channel.close()
        elif self._joining is not None:
            with contextlib.suppress(OSError):
                self._joining.shutdown(socket.SHUT_RDWR)
        self._requests.close()
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

    def swap(self, model_id: str, ours: Addresses, deadline: float) -> Addresses:
        """Tell the sender our addresses for a meeting in a pair group, and return its own; blocks on it.

        Raises:
            TransferFailed: It did not tell.
        """
        channel = self._open_channel()
        try:
            message = channel.receive(deadline)
            if message.kind != "meet" or message["model_id"] != model_id:
                raise TransferFailed(f"the sender sent {message.kind!r} where its address for {model_id!r} was due")
            channel.send("meet", model_id=model_id, addresses=to_text(ours), deadline=deadline)
        except (ChannelTimeout, ChannelClosed) as error:
            raise TransferFailed(f"the sender did not come to the pair group: {error}") from error
        return from_text(message["addresses"])

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
                self._serve(channel, channel.receive(None))
        except BaseException as error:  # whatever it is: a receiver that serves nobody must not look alive
            self.end(error)

    def _serve(self, channel: ControlChannel, message: Message) -> None:
        try:
            self._requests.serve(channel, message)
        except ChannelClosed:
            raise
        except BaseException as error:  # the sender waits for an answer that is never going to come
            self.end(error)
            raise
        if self.state is ReceiverState.JOINED and self.version >= 0:
            self._move(ReceiverState.SERVING)
