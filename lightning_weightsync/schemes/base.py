"""What is a weight-sync scheme? The life cycle that keeps one destination in sync, whatever moves the bytes.

    init_on_sender / init_on_receiver     (talk to nobody)
    connect                               (both sides block on each other; current weights applied)
    send ... / receive ...                (each push is a transaction per worker)
    shutdown                              (any time, any thread, twice is fine)

A scheme is one object with two possible roles, fixed by the first ``init_*``. It pickles as its configuration (and,
after ``init_on_sender``, where its sender can be reached): sockets, gates, threads and models never travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict
from torch import Tensor, nn

from lightning_weightsync.paths import resolve
from lightning_weightsync.schemes.handles import WeightReceiver, WeightSender
from lightning_weightsync.schemes.receiver_side import ReceiverSide
from lightning_weightsync.schemes.sender_side import SenderSide
from lightning_weightsync.schemes.strategy import Weights, WeightStrategy, nested
from lightning_weightsync.transports.base import ReceiverTransport, SenderTransport


class WeightSyncScheme(SenderSide, ReceiverSide):
    """Keeps one destination of every worker equal to one source in the sender.

    Args:
        sync: For hand-written receivers. ``True``: the worker's loop calls ``receive``. ``False``: a background thread
            applies pushes as soon as the gate is free. Collector groups always work in the second way.
        timeout: Bounds one push as a whole, in seconds.
        connect_timeout: Bounds ``connect``, in seconds; ``None`` means 60 and 2 per worker, also for the receiver.
        heartbeat_timeout: Seconds of silence after which a worker that is being waited for counts as dead.
        host: Address that the sender listens on.
        strategy: How leaves are found and written, see ``WeightStrategy``.
        strict: Whether the sender must have every leaf of the receiver. A leaf that only the sender has, or of another
            shape or dtype, is an error in any case.
        apply: ``"auto"`` lets the receiver's parameters live in the slot where that is safe; ``"copy"`` always copies.
        max_slots: How many slots the sender may make; ``None``, 2 per worker and 2. With no more than one per worker,
            those of this host copy, or there would be none left once each has another version in force.
        wire_dtype: Floating-point leaves travel in this dtype; the receiver keeps its own.
        verify: Whether each worker says what it has applied (SHA-256 over the leaves, some 0.2 s for 300 MB on each
            side), for the sender to compare with what it sent.
        only_changed: Whether leaves whose bytes are in the target already are neither copied nor sent: frozen layers,
            adapters, target nets. Costs a comparison of all leaves per push. What workers hold is the same either way.
    """

    def connect(
        self,
        weights: Weights | None = None,
        *,
        worker_idx: int | None = None,
        worker_ids: int | Sequence[int] | None = None,
    ) -> None:
        """Meet the other side: equal layouts and the current weights, or an error on each side that is alive.

        Blocks: the sender on all its workers, a receiver on its sender, each for at most ``connect_timeout``.

        A sender that is connected waits for replacements: for those of workers that it has lost, or of those that are
        named, which are fenced off as soon as their replacement has joined. A replacement starts from what was pushed
        last, under the same version. Pushes to the other workers go on meanwhile, and whatever goes wrong leaves them
        alone. With nobody to wait for, it returns at once.

        A receiver whose link has ended joins again, as its own replacement.

        Args:
            weights: Sender's first time only: the source, if it was not bound before.
            worker_idx: Receiver only: its index, if it was not given before.
            worker_ids: Sender only: the workers to wait for, once all have been connected.

        Raises:
            LayoutMismatchError: The leaves differ; names each.
            WeightSyncTimeout: Somebody did not come in time; names who.
            WeightSyncError: A worker could not be connected; ``.failed`` names each. The first time, a failure shuts
                the sender down.
        """
        if self._role == "sender":
            self._connect_sender(weights, worker_ids)
        elif self._role == "receiver":
            self._connect_receiver(worker_idx)
        else:
            raise RuntimeError("call init_on_sender() or init_on_receiver() before connect()")

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
        """Write weights into the receiver's model, alone in the gate; parameters keep their identity either way.

        Blocks until every thread has left the gate, however long that takes.

        Raises:
            TypeError: The receiver was given no module.
            LayoutMismatchError: They are not the leaves of the model; nothing was written.
            RuntimeError: This is no receiver, or the calling thread is inside the gate.
        """
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
    def sender_transports(self) -> dict[int, SenderTransport]:
        """One transport per connected worker."""
        return dict(self._transports)

    @property
    def receiver_transport(self) -> ReceiverTransport | None:
        """The receiver's end, once connected."""
        return self._receiver_transport
