"""In which order do TorchRL's collectors call a scheme? One is ours: ``weight_sync_schemes={"policy": scheme}``.

Its collectors (0.14) call a scheme in their own way, and the ``torchrl*`` modules are the one place that knows it.

``MultiSyncCollector`` and ``MultiAsyncCollector``. In the trainer: ``init_on_sender`` without ``num_workers``,
``connect``, ``send``; nothing at the end. In a worker: ``init_on_receiver`` and ``connect`` before there is a
collector, on a policy whose tensors are on the meta device; then ``.context`` is assigned, and ``.model`` where the
collector has made its own copy of the policy. Nobody calls ``receive``.

``DistributedCollector``. In the trainer: ``init_on_sender``, ``connect`` once its workers run, ``send``, ``shutdown``.
In a worker: ``init_on_receiver`` with a collector that is complete, ``connect``, ``shutdown``. That collector may be
one of several processes: it is handed the weights by TorchRL's own scheme, tensors only.

TorchRL's other distributed collectors have no use for it: ``DistributedSyncCollector`` takes no scheme, and
``RPCCollector`` hands a scheme to its workers before there is a sender to connect to.

What follows from that:

* Pushes are applied by a background thread, whatever ``sync`` is, between two calls of the policy's ``forward``; see
  ``schemes.forward_gate`` for what that does not cover. ``cudagraph_policy=True`` is one such thing, and refused.
* Several schemes of one collector are several senders: a ``weights_dict`` of two models is two versions.
* A worker that was killed is not replaced: pushes name it in ``WorkerDied.failed``, and serve all others.
* ``policy_version`` counts pushes, as with TorchRL's schemes. It is read after the policy was called, so a sample that
  is taken while a push arrives may be stamped with the version after its own.
* Without a ``policy_factory``, a ``DistributedCollector`` with ``launcher="mp"`` has all its processes share the memory
  of one policy: what one worker is pushed, all of them and the trainer hold, and the trainer's steps show before they
  are pushed.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.weight_update import WeightSyncScheme as _TheirScheme

from lightning_weightsync.errors import LayoutMismatchError
from lightning_weightsync.integrations.torchrl_policy import carried, check_filled, constants_of, materialize, model_of
from lightning_weightsync.integrations.torchrl_workers import EndWatch, Processes, first_index
from lightning_weightsync.schemes.distributed import DistributedWeightSyncScheme
from lightning_weightsync.schemes.forward_gate import gate_forward
from lightning_weightsync.schemes.push import PerWorker, is_per_worker
from lightning_weightsync.schemes.strategy import Weights
from lightning_weightsync.transports.pushing import PushHandle
from lightning_weightsync.transports.rendezvous import StoreInfo


class TorchRLWeightSyncScheme(DistributedWeightSyncScheme):
    """``DistributedWeightSyncScheme``, for TorchRL's ``Multi*Collector`` and ``DistributedCollector``.

    It takes the same arguments, of which ``sync`` is without effect: ``update_policy_weights_`` returns when every
    targeted worker has applied the weights, and workers apply them without being asked to. It ends when its collector
    is shut down.

    With a ``policy_factory``, give the collector a ``policy`` too: the one whose weights are pushed. Give a
    ``DistributedCollector`` both, or its processes may share the memory of one policy.

    Example::

        collector = MultiSyncCollector(
            [make_env] * 2, policy, frames_per_batch=256, total_frames=-1,
            weight_sync_schemes={"policy": TorchRLWeightSyncScheme()},
        )
        for batch in collector:
            ...                                      # train the policy
            collector.update_policy_weights_()       # or (net), (tensordict), (tensordict, worker_ids=[0])
    """

    _first_index = 0
    _constants: Mapping[str, Tensor] = {}

    def _reset(self) -> None:
        super()._reset()
        self._connected = False
        self._unfilled: set[str] = set()
        self._sender_pid: int | None = None
        self._processes: Processes | None = None
        self._watch: EndWatch | None = None

    # --- their calling sequence ------------------------------------------------------------------------------------

    def init_on_sender(
        self,
        model_id: str,
        context: Any = None,
        *,
        model: nn.Module | None = None,
        weights: Weights | None = None,
        num_workers: int | None = None,
        ctx: Any = None,
    ) -> None:
        """See ``WeightSyncScheme``. Called by the collector, before it starts its workers.

        Args:
            model_id: The destination.
            context: The collector: has the model, the number of workers and their processes. Held weakly.
            model: The source, where it is not the collector's.
            weights: The same as a TensorDict or dict of tensors.
            num_workers: How many workers there are; taken from the context where it is not given.
            ctx: The collector's multiprocessing context; not needed.

        Raises:
            ValueError: The collector has no such model, or nothing tells how many workers there are.
        """
        if model is None and weights is None and context is not None:
            model = model_of(context, model_id)
        super().init_on_sender(model_id, context, model=model, weights=weights, num_workers=num_workers)
        self._sender_pid = os.getpid()
        self._first_index = first_index(context)
        # A worker's policy arrives without the values of any tensor, and these are not in the layout that travels.
        self._constants = constants_of(model) if model is not None else {}
        if hasattr(context, "pipes"):
            self._sender_hub().watcher = self._processes = Processes(context)

    def init_on_receiver(
        self,
        model_id: str,
        context: Any = None,
        *,
        model: Weights | None = None,
        worker_idx: int | None = None,
        store_info: StoreInfo | None = None,
        safe_point: Literal["gate", "forward"] = "forward",
    ) -> None:
        """See ``WeightSyncScheme``. Called in a worker.

        Args:
            model_id: The destination.
            context: The worker's collector, where there is one already. Held weakly.
            model: The live model; found on the context where it is not given.
            worker_idx: In TorchRL's numbering.
            store_info: Only where the scheme was not pickled over after ``init_on_sender``.
            safe_point: ``"forward"``, since nobody in TorchRL knows of gates; ``"gate"`` is for a loop of your own.

        Raises:
            ValueError: There is no model.
            TypeError: The model is no module, and has no ``forward``.
        """
        if self._sender_pid not in (None, os.getpid()):
            self.__setstate__(self.__getstate__())  # a fork: this is the sender's copy, not a receiver's
        if model is None and context is not None:
            model = model_of(context, model_id)
        self.sync = False  # here: a background thread receives
        super().init_on_receiver(
            model_id,
            model=model,
            worker_idx=self._our_index(worker_idx),
            store_info=store_info,
            safe_point=safe_point,
        )
        self._receiving().applied_hooks.append(self._tell_context)
        self._unfilled = materialize(model, self._constants) if isinstance(model, nn.Module) else set()
        self.context = context

    def connect(
        self,
        weights: Weights | None = None,
        *,
        worker_idx: int | None = None,
        worker_ids: int | Sequence[int] | None = None,
    ) -> None:
        """See ``WeightSyncScheme``.

        Args:
            weights: Sender only: the source, if it was not bound before.
            worker_idx: Receiver only: in TorchRL's numbering.
            worker_ids: Sender only: 0-based; of the workers to wait for, once all have been connected.
        """
        super().connect(weights, worker_idx=self._our_index(worker_idx), worker_ids=worker_ids)
        if self._role == "receiver":
            unfilled, self._unfilled = self._unfilled, set()
            try:
                check_filled(self._known_model_id(), unfilled, self._receiving().layout)
            except LayoutMismatchError:
                self.shutdown()
                raise
        elif self._processes is not None and self._watch is None:
            self._processes.connecting = False
            self._watch = EndWatch(self.context, self.shutdown)
        self._connected = True

    @property
    def initialized_on_sender(self) -> bool:
        """Whether this is a sender."""
        return self._role == "sender" and not self._ended

    @property
    def initialized_on_receiver(self) -> bool:
        """Whether this is a receiver."""
        return self._role == "receiver" and not self._ended

    @property
    def synchronized_on_sender(self) -> bool:
        """Whether this is a connected sender."""
        return self.initialized_on_sender and self._connected

    @property
    def synchronized_on_receiver(self) -> bool:
        """Whether this is a connected receiver."""
        return self.initialized_on_receiver and self._connected

    @property
    def model(self) -> Any:
        """The module that is read (sender) or written (receiver). A receiver's may be replaced by a copy of it."""
        return self._staged.target if self._staged is not None else self._source

    @model.setter
    def model(self, model: nn.Module) -> None:
        staged = self._receiving()
        if model is staged.target:
            return
        materialize(model, self._constants)
        with self.gate.alone():
            staged.rebind(model)
        if self._open_forward is not None:
            open_before, self._open_forward = self._open_forward, gate_forward(model, self.gate)
            open_before()

    def send(self, weights: Weights | PerWorker | None = None, worker_ids: int | Sequence[int] | None = None) -> None:
        """See ``WeightSyncScheme``; what ``update_policy_weights_`` calls.

        Args:
            weights: Also a dict with worker indices as keys, which gives each worker its own.
            worker_ids: 0-based; by default all, or those that are given weights.
        """
        if is_per_worker(weights):
            worker_ids = list(weights) if worker_ids is None else worker_ids
            weights = {index: self._carried(own) for index, own in weights.items()}
        super().send(self._carried(weights), worker_ids)

    def send_async(self, weights: Weights | None = None, worker_ids: int | Sequence[int] | None = None) -> PushHandle:
        """See ``WeightSyncScheme``."""
        return super().send_async(self._carried(weights), worker_ids)

    def receive(self, timeout: float | None = None) -> TensorDict | None:
        """Nothing is left to do: a background thread receives. Switches to what it has staged, and returns ``None``."""
        self.safe_point()
        return None

    def shutdown(self) -> None:
        """See ``WeightSyncScheme``. Happens by itself when the collector has shut down."""
        if self._watch is not None:
            self._watch.stop()
        super().shutdown()

    # --- inside ----------------------------------------------------------------------------------------------------

    @property
    def _context(self) -> Any:
        """The collector, or ``None``; held weakly, so that dropping a collector still shuts it down."""
        return self._context_ref()

    @_context.setter
    def _context(self, context: Any) -> None:
        if self._role == "receiver" and getattr(context, "cudagraphed_policy", False):
            raise ValueError(
                "cudagraph_policy=True replays the policy without calling its forward, which is where weights are kept "
                "from changing under it: use compile_policy"
            )
        self._context_ref: Callable[[], Any] = _nobody if context is None else weakref.ref(context)

    def _our_index(self, worker_idx: int | None) -> int | None:
        """TorchRL's index of a worker in our 0-based numbering."""
        return None if worker_idx is None else worker_idx - self._first_index

    def _carried(self, weights: Any) -> Any:
        return carried(weights, self.strategy, self._constants)

    def _tell_context(self, model: Any, version: int) -> None:
        """After a switch: a collector counts versions, a collector of collectors hands the weights on."""
        context = self.context
        if isinstance(context, Collector) and not context._weight_sync_schemes:
            # Its update_policy_weights_ would copy the weights over themselves, and then do this.
            if self._connected:
                context.increment_version()
        elif hasattr(context, "update_policy_weights_"):
            self._hand_on(model, version)


_TheirScheme.register(TorchRLWeightSyncScheme)


def _nobody() -> None:
    return None
