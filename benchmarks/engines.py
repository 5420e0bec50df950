"""What is measured? A copy, our scheme and TorchRL's: each an action that takes one sample, in milliseconds."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from threading import Event
from types import TracebackType
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Store, TCPStore

from benchmarks.models import KINDS, change, checksum, leaves, size
from benchmarks.receivers import Receivers
from lightning_weightsync.errors import WeightSyncError
from lightning_weightsync.schemes.distributed import DistributedWeightSyncScheme
from lightning_weightsync.transports.pushing import PushHandle

Sample = dict[str, float]
"""Milliseconds, by what they are of."""

ReceiverMode = Literal["background", "receive"]

PEER = "torchrl.weight_update"
_PEER_TIMEOUT = 60.0
_IN_A_ROW = 5


def milliseconds(action: Callable[[], object]) -> float:
    """How long one call takes."""
    started = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - started)


class Source:
    """The sender's model, and a second set of tensors of the same sizes to copy it to.

    Args:
        kind: Name of the model.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.model = KINDS[kind].build()
        self.nbytes = size(self.model)
        self.tensors = len(leaves(self.model))
        self._from = leaves(self.model)
        self._to = [torch.zeros_like(leaf) for leaf in self._from]

    def copy(self) -> Sample:
        """One warm copy of all leaves: what no push can be faster than."""
        return {"copy": milliseconds(lambda: torch._foreach_copy_(self._to, self._from))}


class Engine(Protocol):
    """A scheme with its receivers, connected."""

    receivers: Receivers

    def send(self) -> Sample:
        """One push that every receiver has acknowledged."""
        ...

    def close(self) -> None:
        """Stop the receivers, and give everything back."""
        ...


@dataclass
class _OurEnd:
    scheme: DistributedWeightSyncScheme
    index: int

    def serve(self, model: nn.Module) -> None:
        self.scheme.init_on_receiver("policy", model=model, worker_idx=self.index)
        self.scheme.connect()
        if not self.scheme.sync:
            Event().wait()  # the scheme's thread serves; the process ends with its pipe
        try:
            while True:
                self.scheme.receive()
        except WeightSyncError:
            return  # the sender has shut down


class Ours:
    """Our scheme.

    Args:
        source: What is pushed.
        workers: How many receivers there are.
        name: Of the samples.
        same_host: How the receivers are reached.
        mode: Whether a thread of the scheme applies pushes in a receiver, or its main loop calls ``receive``.
    """

    def __init__(
        self,
        source: Source,
        workers: int,
        *,
        name: str = "ours",
        same_host: Literal["shared_memory", "network"] = "shared_memory",
        mode: ReceiverMode = "background",
    ) -> None:
        self.name = name
        self.scheme = DistributedWeightSyncScheme(
            sync=mode == "receive", timeout=120.0, heartbeat_timeout=120.0, same_host=same_host
        )
        self.scheme.init_on_sender("policy", model=source.model, num_workers=workers)
        self.receivers = Receivers(source.kind, [_OurEnd(self.scheme, index) for index in range(workers)], [PEER])
        try:
            self.scheme.connect()
        except BaseException:
            self.close()
            raise

    def send(self) -> Sample:
        """One push that every receiver has acknowledged."""
        return {self.name: milliseconds(self.scheme.send)}

    def send_in_a_row(self) -> Sample:
        """Several such pushes without a pause: what receivers do after they acknowledge counts too."""

        def several() -> None:
            for _ in range(_IN_A_ROW):
                self.scheme.send()

        return {f"{self.name} in a row": milliseconds(several) / _IN_A_ROW}

    def send_async(self) -> Sample:
        """One ``send_async``: how long it holds the caller (``stall``), and until all have applied it (``applied``)."""
        started = time.perf_counter()
        handle = self.scheme.send_async()
        returned = time.perf_counter()
        handle.wait()
        ended = time.perf_counter()
        return {f"{self.name} stall": 1e3 * (returned - started), f"{self.name} applied": 1e3 * (ended - started)}

    def send_async_past(self, stuck: int) -> Sample:
        """The stall of one ``send_async`` while one receiver is stuck; all others have acknowledged when it returns."""
        handles: list[PushHandle] = []
        stall = milliseconds(lambda: handles.append(self.scheme.send_async()))
        deadline = time.monotonic() + 60.0
        while not all(errand.final for errand in handles[0].errands if errand.link.worker_idx != stuck):
            if time.monotonic() >= deadline:
                raise RuntimeError(f"a live receiver did not acknowledge in 60 s, while {stuck} was stopped")
            time.sleep(0.001)
        return {f"{self.name} stall": stall}

    def close(self) -> None:
        """Stop the receivers, and give everything back."""
        self.scheme.shutdown()
        self.receivers.close()

    def __enter__(self) -> Ours:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


@dataclass
class _TcpEnd:
    port: int
    nbytes: int

    def serve(self, model: nn.Module) -> None:
        memory = memoryview(bytearray(self.nbytes))
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            while True:
                got = 0
                while got < self.nbytes:
                    count = connection.recv_into(memory[got:])
                    if not count:
                        return
                    got += count
                connection.sendall(b"!")


class BareTcp:
    """As many bytes as the model has, over a TCP connection to one process, which answers when it has them all.

    Args:
        source: What has so many bytes.
    """

    def __init__(self, source: Source) -> None:
        self._memory = memoryview(bytearray(b"x") * source.nbytes)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(_PEER_TIMEOUT)
            self.receivers = Receivers(source.kind, [_TcpEnd(listener.getsockname()[1], source.nbytes)], [PEER])
            self._connection, _ = listener.accept()
        self._connection.settimeout(_PEER_TIMEOUT)

    def send(self) -> Sample:
        """Send them all, and wait for the answer."""

        def there_and_back() -> None:
            self._connection.sendall(self._memory)
            self._connection.recv(1)

        return {"tcp": milliseconds(there_and_back)}

    def close(self) -> None:
        """End the other process."""
        self._connection.close()
        self.receivers.close()


class _Context:
    """Where TorchRL's scheme looks for its model; it is kept by a weak reference only."""

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy


@dataclass
class _PeerEnd:
    scheme: Any
    rank: int
    world_size: int
    port: int

    def serve(self, model: nn.Module) -> None:
        store = TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=_PEER_TIMEOUT))
        _join_default_group(store, self.rank, self.world_size)
        context = _Context(model)
        self.scheme.init_on_receiver(model_id="policy", context=context, worker_idx=self.rank)
        self.scheme.connect(worker_idx=self.rank)
        Event().wait()  # its background thread receives and acknowledges, with sync=True too


class Peer:
    """TorchRL's ``DistributedWeightSyncScheme``. It works in the default process group, so there is one at a time.

    Args:
        source: What is pushed.
        workers: How many receivers there are.

    Raises:
        ImportError: TorchRL is not installed.
    """

    def __init__(self, source: Source, workers: int) -> None:
        try:
            from torchrl.weight_update import DistributedWeightSyncScheme as PeerScheme
        except ImportError as error:
            raise ImportError("TorchRL is not installed (pip install torchrl)") from error

        self._context = _Context(source.model)
        self.scheme = PeerScheme(backend="gloo", sync=True, timeout=_PEER_TIMEOUT)
        self.scheme.init_on_sender(model_id="policy", context=self._context, num_workers=workers)
        timeout = timedelta(seconds=_PEER_TIMEOUT)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        ends = [_PeerEnd(self.scheme, 1 + index, 1 + workers, store.port) for index in range(workers)]
        self.receivers = Receivers(source.kind, ends, [PEER])
        try:
            _join_default_group(store, 0, 1 + workers)
            self.scheme.connect()
        except BaseException:
            self.close()
            raise

    def send(self) -> Sample:
        """One push that every receiver has acknowledged."""
        return {"peer": milliseconds(self.scheme.send)}

    def close(self) -> None:
        """Stop the receivers, and give everything back."""
        self.receivers.close()
        self.scheme.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()


def verify(source: Source, engine: Engine) -> None:
    """Change the weights, push them, and see that every receiver has exactly those.

    Raises:
        RuntimeError: A receiver has other weights.
    """
    change(source.model)
    engine.send()
    expected, found = checksum(leaves(source.model)), engine.receivers.ask("checksum")
    if wrong := [index for index, value in enumerate(found) if value != expected]:
        raise RuntimeError(f"{type(engine).__name__}: receivers {wrong} do not hold the weights that they acknowledged")


def _join_default_group(store: Store, rank: int, world_size: int) -> None:
    timeout = timedelta(seconds=_PEER_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
