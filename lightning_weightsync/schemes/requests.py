"""What does a worker do with each message of its sender? Agrees on layouts, stages pushes, commits, acknowledges.

One object serves all destinations of one context, in whichever thread reads the link (``receiver``).
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
import traceback
from typing import Protocol

from lightning_weightsync.errors import LayoutMismatchError, StaleVersionError, WeightSyncError, WeightSyncTimeout
from lightning_weightsync.schemes.extra_state import unpack
from lightning_weightsync.schemes.gate import Gate
from lightning_weightsync.schemes.staging import StagedModel
from lightning_weightsync.schemes.transaction import Origin, Staged, Transaction, check_newer
from lightning_weightsync.transports.base import ReceiverTransport, TransferFailed
from lightning_weightsync.transports.control import ChannelClosed, ControlChannel, Message
from lightning_weightsync.transports.layout import WeightLayout
from lightning_weightsync.transports.memory import SlotMemory
from lightning_weightsync.transports.shared_memory import SharedMemoryReceiver


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


class Requests:
    """What the sender asks of the destinations of one context.

    Args:
        gate: Of the context.
        link: Where the messages come from; given the version together with the gate.

    Attributes:
        pending: The push that is being committed, for a safe point of another thread.
        refusal: Why an offer of the sender was refused here.
    """

    def __init__(self, gate: Gate, link: Origin) -> None:
        self.pending: Transaction | None = None
        self.refusal: Exception | None = None
        self._gate = gate
        self._link = link
        self._destinations: dict[str, Destination] = {}
        self._offers: dict[str, Message] = {}
        self._transports: dict[str, ReceiverTransport] = {}

    def add(self, destination: Destination) -> None:
        """Register a destination; before the sender asks."""
        self._destinations[destination.staged_model.model_id] = destination

    def serve(self, channel: ControlChannel, message: Message) -> None:
        """Act on one message.

        Raises:
            ChannelClosed: The link is at its end; everything else is reported to the sender.
        """
        if message.kind == "attach":
            self._attach(channel, message)
        elif message.kind == "open":
            self._open(channel, message)
        elif message.kind == "push":
            self._push(channel, message)
        elif message.kind == "slot":
            self._learn_slot(message)
        elif message.kind == "board":
            self._link.take_board(message.descriptor)
            os.close(message.descriptor)
        elif message.kind == "retire":
            self._forget_slot(message)
        elif message.kind == "digest":
            destination = self._destinations.get(message["model_id"])
            with self._gate:
                digest = destination.staged_model.digest() if destination is not None else ""
            channel.send("digested", model_id=message["model_id"], digest=digest)
        elif message.kind == "close":
            raise ChannelClosed("the sender closed the link")
        elif message.kind == "refused":
            raise ChannelClosed(given_up(message))
        else:
            raise ChannelClosed(f"the sender sent {message.kind!r}, which is no request")

    def models(self) -> list[StagedModel]:
        """Those that the sender pushes."""
        return [self._destinations[name].staged_model for name in self._transports]

    def leave_slots(self, patience: float) -> None:
        """Move the models out of the sender's slots; waits for the gate for at most ``patience`` seconds."""
        # While the channel is open the sender writes nothing into them; once it is lost it never does again.
        models = self.models()
        # If somebody stays in the gate, the models go on viewing the slots: harmless, but for the memory.
        with contextlib.suppress(WeightSyncTimeout, RuntimeError), self._gate.alone(time.monotonic() + patience):
            for model in models:
                if model.holds_slot:
                    model.detach()

    def close(self) -> None:
        """Close every transport."""
        for transport in self._transports.values():
            transport.close()

    def _attach(self, channel: ControlChannel, offer: Message) -> None:
        model_id = offer["model_id"]
        destination = self._destinations.get(model_id)
        try:
            if destination is None:
                known = ", ".join(map(repr, self._destinations)) or "none"
                raise WeightSyncError(f"there is no receiver for {model_id!r} in this worker; there is {known}")
            destination.accept_offer(offer)
        except LayoutMismatchError as error:
            self.refusal = error
            channel.send(
                "mismatch",
                model_id=model_id,
                message=str(error),
                missing=error.missing,
                unexpected=error.unexpected,
                mismatched=error.mismatched,
            )
        except Exception as error:
            self.refusal = error
            channel.send("attach_failed", model_id=model_id, message=str(error))
        else:
            self._offers[model_id] = offer
            holds = destination.staged_model.holds_slot
            channel.send("attached", model_id=model_id, holds=holds)

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
            reason = last_words(channel, f"the transport of {model_id!r} could not be opened: {error}")
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
        values = copy.deepcopy(message["values"]) if message["values"] else {}
        push = Transaction(self._gate, run, version, deadline, origin=self._link, values=values)
        try:
            # Taken in even if it is going to be refused: the next receive would get these bytes otherwise.
            staged, extras = self._stage(message, deadline)
        except TransferFailed as error:
            push.abort(error)
            reason = last_words(channel, f"the transfer of version {version} broke: {error}")
            channel.close()
            raise ChannelClosed(reason) from error
        try:
            may_be_equal = message["initial"] or self._link.is_mixed
            check_newer((self._link.run, self._link.version), (run, version), initial=may_be_equal)
            push.stage(
                [
                    Staged(model, slot, unpack(extra), verify=bool(entry.get("verify")))
                    for (model, slot), extra, entry in zip(staged, extras, message["models"], strict=True)
                ]
            )
            self.pending = push
            push.commit()
        except Exception as error:
            if push.error is None:
                push.abort(error)
        except BaseException:  # sys.exit() in a hook, Ctrl-C: it ends this thread, or its loop, once the sender knows
            _tell_failure(channel, push)
            raise
        finally:
            self.pending = None
        if push.error is not None:  # perhaps by a commit in another thread
            is_mixed = self._link.is_mixed  # as the push before has left it; when this one is answered, others come
            _tell_failure(channel, push)
            if is_mixed:
                raise ChannelClosed("the push that was to make the weights whole has failed")
            return
        self._link.offer_rest()
        channel.send("applied", run=run, version=version, digests=push.digests)
        for model, slot in staged:
            self._transports[model.model_id].entered(slot, held=model.holds_slot)

    def _stage(self, message: Message, deadline: float) -> tuple[list[tuple[StagedModel, SlotMemory]], list[bytes]]:
        staged: list[tuple[StagedModel, SlotMemory]] = []
        extras: list[bytes] = []
        start = 0
        for entry in message["models"]:
            model = self._model_of(entry)
            end = start + int(entry.get("extra", 0))
            extras.append(message.blob[start:end])
            ticket, nbytes, start = entry.get("ticket", {}), model.layout.nbytes, end
            if "inline" in ticket:
                start = end + nbytes
                ticket = {**ticket, "inline": message.blob[end:start]}
            staged.append((model, self._transports[model.model_id].stage(ticket, nbytes, deadline)))
        return staged, extras

    def _model_of(self, entry: object) -> StagedModel:
        model_id = entry.get("model_id") if isinstance(entry, dict) else None
        if not isinstance(model_id, str) or model_id not in self._transports:
            raise ChannelClosed(f"a push names {model_id!r}, which is not connected")
        return self._destinations[model_id].staged_model


def _tell_failure(channel: ControlChannel, push: Transaction) -> None:
    """Report why a push was not applied, if it was not; a sender that has called it off itself is not told."""
    error = push.error
    if isinstance(error, ChannelClosed):
        raise error
    if error is not None:
        channel.send(
            "failed",
            run=push.run,
            version=push.version,
            reason=_reason_for(error),
            message=f"{type(error).__name__}: {error}",
            traceback="".join(traceback.format_exception(error)),
        )


def _reason_for(error: BaseException) -> str:
    if isinstance(error, StaleVersionError):
        return "stale"
    return "deadline" if isinstance(error, WeightSyncTimeout) else "user"


def last_words(channel: ControlChannel, otherwise: str) -> str:
    """Why the sender has given this worker up, if that is among what has not been read yet."""
    with contextlib.suppress(ChannelClosed):
        while (message := channel.poll()) is not None:
            if message.descriptor >= 0:
                os.close(message.descriptor)
            if message.kind == "refused":
                return given_up(message)
    return otherwise


def given_up(message: Message) -> str:
    """What a ``refused`` message says."""
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
