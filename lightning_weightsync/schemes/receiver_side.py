"""What does a scheme do in a worker? Finds its model, joins the sender, receives or has a thread receive."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

from tensordict import TensorDict
from torch import nn

from lightning_weightsync.errors import WeightSyncError
from lightning_weightsync.paths import resolve
from lightning_weightsync.schemes.core import SchemeCore, process_gate
from lightning_weightsync.schemes.forward_gate import gate_forward
from lightning_weightsync.schemes.gate import Gate
from lightning_weightsync.schemes.options import choose
from lightning_weightsync.schemes.receiver import ReceiverLink, ReceiverState
from lightning_weightsync.schemes.requests import layout_of_offer
from lightning_weightsync.schemes.staging import StagedModel
from lightning_weightsync.schemes.strategy import Weights
from lightning_weightsync.transports.base import ReceiverTransport
from lightning_weightsync.transports.control import Message
from lightning_weightsync.transports.rendezvous import StoreInfo


class ReceiverSide(SchemeCore):
    """The receiver's role of a scheme."""

    def init_on_receiver(
        self,
        model_id: str,
        context: Any = None,
        *,
        model: Weights | None = None,
        worker_idx: int | None = None,
        store_info: StoreInfo | None = None,
        safe_point: Literal["gate", "forward"] = "gate",
    ) -> None:
        """Make this the receiver's end. Talks to nobody.

        Args:
            model_id: The destination.
            context: Object on which ``model_id`` is resolved as a path; may lend its ``gate`` and its link.
            model: The live model, where there is no context.
            worker_idx: 0-based; may be given to ``connect`` instead.
            store_info: Only where the scheme was not pickled over after ``init_on_sender``.
            safe_point: ``"gate"``: whoever calls the model holds ``scheme.gate``. ``"forward"``: for models whose
                callers know nothing of gates, the model's own ``forward`` holds it; see ``schemes.forward_gate`` for
                what that does not cover (submodules and other methods called directly, several calls of one batch).
        """
        choose("safe_point", safe_point, ("gate", "forward"))
        self._check_free(model_id)
        if model is None and context is not None:
            model = context.get_model(model_id) if hasattr(context, "get_model") else resolve(context, model_id)
        if model is None:
            raise ValueError(f"{model_id!r}: give the model, or the context on which it is found")
        gate = getattr(context, "gate", None)
        gate = gate if isinstance(gate, Gate) else process_gate
        if safe_point == "forward":
            if not isinstance(model, nn.Module):
                raise TypeError(f"safe_point='forward' needs a module, and {model_id!r} is a {type(model).__name__}")
            self._open_forward = gate_forward(model, gate)
        self._take_role("receiver", model_id)
        self._context, self._worker_idx, self._gate = context, worker_idx, gate
        if store_info is not None:
            self._store_info = store_info
        self._staged = self._holding(model)
        self._staged.applied_hooks += self._hooks
        if hasattr(context, "update_policy_weights_"):
            self._staged.applied_hooks.append(self._hand_on)
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

        What goes wrong with a push (an applied hook raises, the deadline has passed) goes to the sender, not to the
        policy loop: the weights are as they were, and the answer is ``False``.

        Raises:
            RuntimeError: Called inside the gate.
            WeightSyncError: ``sync=True``, and the sender is gone.
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
        if self._link is not None:
            self._link.stay_awake()

    def accept_offer(self, offer: Message) -> None:
        """Check a sender's offer; see ``schemes.requests.Destination``."""
        if offer["backend"] != self.backend_name:
            raise WeightSyncError(
                f"the sender moves {offer['model_id']!r} over backend={offer['backend']!r}, this worker was told "
                f"{self.backend_name!r}: give both sides the same scheme"
            )
        self.check_backend()
        self._receiving().bind(
            layout_of_offer(offer),
            extra_keys=offer["extra_keys"],
            casts=offer["casts"],
            strict=offer["strict"],
            may_hold=offer["may_hold"],
        )

    def make_transport(self, offer: Message) -> ReceiverTransport:
        """This side's end of the offered transport; see ``schemes.requests.Destination``."""
        transport: ReceiverTransport = self.create_transport(offer=offer["transport"])
        self._receiver_transport = transport
        return transport

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
    def staged_model(self) -> StagedModel:
        """What the receiver holds for its destination."""
        return self._receiving()

    def _connect_receiver(self, worker_idx: int | None) -> None:
        if worker_idx is not None:
            self._worker_idx = worker_idx
        link_ended = self._link is not None and self._link.state is ReceiverState.ENDED
        if self._owns_link and not self._ended and link_ended:
            # It ended by itself, and has moved the model out of the sender's slots: join again, as a new worker does.
            self._link = None
            before = self._receiving()
            self._staged = self._holding(before.target)
            self._staged.applied_hooks = before.applied_hooks
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
        timeout = self.connect_timeout
        if timeout is None:
            timeout = self._link.info.get("connect_timeout", 60.0)
        self._link.connect(time.monotonic() + timeout)
        if self._owns_link and not self.sync:
            self._link.start_service()

    def _holding(self, model: Weights) -> StagedModel:
        may_switch = self.apply == "auto"
        return StagedModel(self._known_model_id(), model, self.strategy, strict=self.strict, may_switch=may_switch)

    def _hand_on(self, model: Any, version: int) -> None:
        self._context.update_policy_weights_(weights=self._receiving().copy(), model_id=self._model_id)

    def _receiver_link(self) -> ReceiverLink:
        if self._role != "receiver" or self._link is None:
            raise RuntimeError("this is not a connected receiver: call init_on_receiver() and connect() first")
        return self._link

    def _receiving(self) -> StagedModel:
        if self._staged is None:
            raise RuntimeError("this is not a receiver: call init_on_receiver() first")
        return self._staged
