"""How do TorchRL's collectors use our scheme? As one of theirs: in ``weight_sync_schemes={"policy": scheme}``.

Their ``MultiSyncCollector`` and ``MultiAsyncCollector`` (0.14) call a scheme in their own way, and this module is the
one place that knows it. In the trainer: ``init_on_sender`` without ``num_workers``, ``connect``, ``send``; nothing at
the end. In a worker: ``init_on_receiver`` and ``connect`` before there is a collector, on a policy whose tensors are on
the meta device; then ``.context`` is assigned, and ``.model`` where the collector has made its own copy of the policy.
Nobody calls ``receive``.

What follows from that:

* Pushes are applied by a background thread, whatever ``sync`` is, between two calls of the policy's ``forward``; see
  ``schemes.forward_gate`` for what that does not cover. ``cudagraph_policy=True`` is one such thing, and refused.
* Several schemes of one collector are several senders: a ``weights_dict`` of two models is two versions.
* A worker that was killed is not replaced: pushes name it in ``WorkerDied.failed``, and serve all others.
* ``policy_version`` counts pushes, as with TorchRL's schemes. It is read after the policy was called, so a sample that
  is taken while a push arrives may be stamped with the version after its own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.weight_update import WeightSyncScheme as _TheirScheme

from lightning_weightsync.errors import LayoutMismatchError, WorkerDied, WorkerError
from lightning_weightsync.paths import resolve
from lightning_weightsync.schemes.distributed import DistributedWeightSyncScheme
from lightning_weightsync.schemes.forward_gate import gate_forward
from lightning_weightsync.schemes.push import PerWorker, is_per_worker
from lightning_weightsync.schemes.strategy import Weights, module_parts, non_persistent, unwrap
from lightning_weightsync.transports.pushing import PushHandle
from lightning_weightsync.transports.rendezvous import StoreInfo


class TorchRLWeightSyncScheme(DistributedWeightSyncScheme):
    """``DistributedWeightSyncScheme``, for TorchRL's multi-process collectors.

    It takes the same arguments, of which ``sync`` is without effect: ``update_policy_weights_`` returns when every
    targeted worker has applied the weights, and workers apply them without being asked to. It ends when its collector
    is shut down.

    With a ``policy_factory``, give the collector a ``policy`` too: the one whose weights are pushed.

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
        self._processes: _Processes | None = None
        self._watch: _EndWatch | None = None

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
            model = _model_of(context, model_id)
        super().init_on_sender(model_id, context, model=model, weights=weights, num_workers=num_workers)
        self._sender_pid = os.getpid()
        self._first_index = 1 if _numbers_from_one(context) else 0
        # A worker's policy arrives without the values of any tensor, and these are not in the layout that travels.
        self._constants = _constants_of(model) if model is not None else {}
        if hasattr(context, "pipes"):
            self._sender_hub().watcher = self._processes = _Processes(context)

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
            model = _model_of(context, model_id)
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
            self._check_filled()
        elif self._processes is not None and self._watch is None:
            self._processes.connecting = False
            self._watch = _EndWatch(self)
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
        """TorchRL's index of a worker in our 0-based numbering.

        Its multi-process collectors count from 0. Its distributed ones number the senders' side from 0, and tell a
        worker its rank, which counts from 1, under the same name.
        """
        return None if worker_idx is None else worker_idx - self._first_index

    def _carried(self, weights: Any) -> Any:
        """Weights without the tensors that do not travel: ``TensorDict.from_module`` has non-persistent buffers."""
        if not self._constants or not isinstance(weights, TensorDictBase | Mapping) or is_per_worker(weights):
            return weights
        leaves = self.strategy.leaves(weights)
        return {name: leaf for name, leaf in leaves.items() if name not in self._constants}

    def _check_filled(self) -> None:
        unfilled = sorted(self._unfilled - self._receiving().layout.by_name.keys())
        self._unfilled = set()
        if unfilled:
            self.shutdown()
            raise LayoutMismatchError(
                f"{self._model_id!r} came to the worker without values, and the sender has none for "
                f"{', '.join(unfilled)}: give a policy_factory",
                missing=unfilled,
            )

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


def materialize(model: nn.Module, constants: Mapping[str, Tensor]) -> set[str]:
    """Give memory on the CPU to tensors that are on the meta device, which is how TorchRL sends a policy to a worker.

    Args:
        model: Its other tensors stay what they are.
        constants: Values of the buffers that are not persistent, by name.

    Returns:
        The names of the tensors that have no values yet.
    """
    unfilled: set[str] = set()
    made: dict[int, Tensor] = {}  # tied tensors stay tied
    for prefix, part in module_parts(unwrap(model)):
        homes: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for home in homes:
            tensors: dict[str, Any] = home
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _with_memory(tensor)
                tensors[name] = made[id(tensor)]
                if f"{prefix}{name}" in constants:
                    made[id(tensor)].copy_(constants[f"{prefix}{name}"])
                else:
                    unfilled.add(f"{prefix}{name}")
    return unfilled


def _with_memory(tensor: Tensor) -> Tensor:
    real = torch.empty_like(tensor, device="cpu")
    return nn.Parameter(real, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else real


def _constants_of(model: nn.Module) -> dict[str, Tensor]:
    names = non_persistent(model)
    return {name: b.detach().cpu().clone() for name, b in unwrap(model).named_buffers() if name in names}


def _model_of(collector: Any, model_id: str) -> Any:
    """The model that a collector has under this name.

    Raises:
        ValueError: It has none.
    """
    try:
        model = collector.get_model(model_id) if hasattr(collector, "get_model") else resolve(collector, model_id)
    except (ValueError, AttributeError):
        model = None
    if model is None:
        raise ValueError(
            f"{type(collector).__name__} has no model {model_id!r}: give it policy= beside policy_factory=, or call "
            f"scheme.init_on_sender({model_id!r}, model=net, num_workers=n) before"
        )
    return model


def _numbers_from_one(context: Any) -> bool:
    """Whether this is one of TorchRL's distributed collectors, told without importing what they need."""
    return any(base.__module__.startswith("torchrl.collectors.distributed") for base in type(context).__mro__)


def _nobody() -> None:
    return None


class _Processes:
    """Tells the hub what has become of a collector's workers; see ``transports.hub.Watcher``."""

    def __init__(self, collector: Any) -> None:
        self.connecting = True
        self._collector = weakref.ref(collector)

    def cause_of_death(self, worker_idx: int, wait: float) -> Exception | None:
        collector = self._collector()
        processes = getattr(collector, "procs", ())
        if collector is None or worker_idx >= len(processes):
            return None
        report = self._report(collector, worker_idx)
        if report is not None:
            return report
        process = processes[worker_idx]
        with contextlib.suppress(ValueError):  # it was closed
            process.join(wait)
            if process.is_alive():
                return None
            # It may have told why and ended since the last look.
            return self._report(collector, worker_idx) or WorkerDied(
                f"worker {worker_idx} (pid {process.pid}) ended with exit code {process.exitcode}"
            )
        return WorkerDied(f"worker {worker_idx} was closed by its collector")

    def _report(self, collector: Any, worker_idx: int) -> WorkerError | None:
        """What a worker says that failed before it had a collector. At that time its pipe brings nothing else."""
        if not self.connecting:
            return None
        try:
            pipe = collector.pipes[worker_idx]
            message = pipe.recv() if pipe.poll() else None
        except (EOFError, OSError):
            return None
        if not isinstance(message, dict) or "traceback" not in message:
            return None
        text = str(message["traceback"]).rstrip()
        return WorkerError(
            f"worker {worker_idx} raised {message.get('exception_type')}: {message.get('exception_msg')}\n{text}",
            remote_traceback=text,
        )


class _EndWatch:
    """Shuts a sender down when its collector has been: the collector itself does not tell its schemes."""

    def __init__(self, scheme: TorchRLWeightSyncScheme) -> None:
        self._collector = weakref.ref(scheme.context)
        self._sentinels = [process.sentinel for process in scheme.context.procs]
        self._shutdown = scheme.shutdown
        self._stopped = threading.Event()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="weight-sync-end-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._stopped.set()
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")
        if self._thread is not threading.current_thread():
            self._thread.join(0.9)

    def _run(self) -> None:
        try:
            waiting: set[Any] = {*self._sentinels, self._wake_reader}
            while len(waiting) > 1 and not self._stopped.is_set():
                waiting -= set(connection.wait(waiting))
            # Workers that crashed are no end: pushes have to go on telling so.
            while not self._stopped.is_set() and not getattr(self._collector(), "closed", True):
                self._stopped.wait(0.2)
            if not self._stopped.is_set():
                self._shutdown()
        finally:
            self._wake_reader.close()
            self._wake_writer.close()
