"""A connected scheme for tests: its sender in the test's process, its receivers in processes of their own.

The functions that take a ``box`` are the receiver's script, run over there by ``ReceiverProcess``.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lightning_weightsync import DistributedWeightSyncScheme
from lightning_weightsync.schemes.gate import Gate
from lightning_weightsync.schemes.receiver import ReceiverLink
from tests.helpers.leaves import leaves_of, scramble
from tests.helpers.receivers import ReceiverPool, ReceiverProcess

PUSH_SECONDS = 20.0

# For the `connect` fixture: one kind of transport only. For its tests: either way of receiving.
over_network = pytest.mark.parametrize("connect", ["network"], indirect=True)
over_shared_memory = pytest.mark.parametrize("connect", ["shared_memory"], indirect=True)
both_ways = pytest.mark.parametrize("sync", [True, False], ids=["receive()", "background thread"])


# --- run in the receiver's process ---------------------------------------------------------------------------------


def init(box: SimpleNamespace, scheme: DistributedWeightSyncScheme, model: nn.Module, **kwargs: Any) -> None:
    """``box.scheme`` is the receiver of ``box.model``."""
    box.scheme, box.model = scheme, model
    scheme.init_on_receiver(kwargs.pop("model_id", "policy"), model=model, **kwargs)


def connect(box: SimpleNamespace, **kwargs: Any) -> None:
    box.scheme.connect(**kwargs)


def receive(box: SimpleNamespace, timeout: float | None = PUSH_SECONDS) -> TensorDict | None:
    return box.scheme.receive(timeout)


def leaves(box: SimpleNamespace) -> dict[str, Tensor]:
    """Copies of what the model holds now."""
    return leaves_of(box.model)


def version(box: SimpleNamespace) -> int:
    return box.scheme.version


def shutdown(box: SimpleNamespace) -> None:
    box.scheme.shutdown()


def hold_gate(box: SimpleNamespace) -> None:
    """A policy call that does not end before ``release_gate``, in a thread of its own."""
    box.release, entered = threading.Event(), threading.Event()

    def read() -> None:
        with box.scheme.gate:
            entered.set()
            box.release.wait(30)

    box.reader = threading.Thread(target=read, name="slow policy call")
    box.reader.start()
    assert entered.wait(5)


def release_gate(box: SimpleNamespace) -> None:
    box.release.set()
    box.reader.join(5)


# --- run in the test's process -------------------------------------------------------------------------------------


class Connected:
    """A scheme's sender, and the processes that hold its receivers; worker ``i`` is ``processes[i]``."""

    def __init__(self, scheme: DistributedWeightSyncScheme, processes: Sequence[ReceiverProcess]) -> None:
        self.scheme = scheme
        self.processes = list(processes)

    def push(self, weights: Any = None, worker_ids: int | list[int] | None = None) -> None:
        """``scheme.send``, while the targeted receivers that have no thread of their own for it ``receive``."""
        everybody = range(len(self.processes))
        targeted = [worker_ids] if isinstance(worker_ids, int) else everybody if worker_ids is None else worker_ids
        waiting = [self.processes[i].begin(receive) for i in targeted] if self.scheme.sync else []
        self.scheme.send(weights, worker_ids)
        for future in waiting:
            assert future.result(PUSH_SECONDS) is not None

    def join(self, worker_idx: int, process: ReceiverProcess, model: nn.Module) -> Future:
        """Another process begins to connect as this worker, with a model of its own; from here on it is the worker."""
        process.call(init, self.scheme, model, worker_idx=worker_idx)
        self.processes[worker_idx] = process
        return process.begin(connect)

    def leaves(self, worker_idx: int = 0) -> dict[str, Tensor]:
        return self.processes[worker_idx].call(leaves)

    @property
    def versions(self) -> list[int]:
        """Of the weights in force in each receiver."""
        return [process.call(version) for process in self.processes]


class Connector:
    """Makes connected schemes, and shuts their senders down at the end of the test.

    Attributes:
        same_host: How all of them reach their receivers: ``"shared_memory"`` or ``"network"``.
    """

    def __init__(self, receivers: ReceiverPool, same_host: str) -> None:
        self.receivers = receivers
        self.same_host = same_host
        self._schemes: list[DistributedWeightSyncScheme] = []

    def __call__(
        self,
        model: nn.Module,
        num_workers: int = 1,
        *,
        receiver_model: nn.Module | Callable[[int], nn.Module] | None = None,
        **options: Any,
    ) -> Connected:
        """A scheme of ``model``, connected to ``num_workers`` receivers.

        Args:
            model: The source.
            num_workers: How many receivers.
            receiver_model: What the receivers hold: the same for each, or made from the worker's index. Left out, a
                copy of the source with every byte of its leaves changed.
            **options: Of the scheme, on both sides.
        """
        sender, joining = self.begin(model, num_workers, receiver_model=receiver_model, **options)
        sender.connect()
        connected = Connected(sender, list(self.receivers)[:num_workers])
        for process, future in zip(connected.processes, joining, strict=True):
            process.result_of(future)
        return connected

    def begin(
        self,
        model: nn.Module,
        num_workers: int = 1,
        *,
        receiver_model: nn.Module | Callable[[int], nn.Module] | None = None,
        **options: Any,
    ) -> tuple[DistributedWeightSyncScheme, list[Future]]:
        """A sender that has yet to connect, and its receivers, which are connecting already; see ``__call__``."""
        sender = self.sender(model, num_workers, **options)
        joining = []
        for index in range(num_workers):
            theirs = receiver_model
            if theirs is None:
                theirs = altered(model)
            elif not isinstance(theirs, nn.Module):
                theirs = theirs(index)
            process = self.receivers[index]
            process.call(init, sender, theirs, worker_idx=index)  # the scheme is pickled over: it knows the address
            joining.append(process.begin(connect))
        return sender, joining

    def sender(self, model: nn.Module, num_workers: int = 1, **options: Any) -> DistributedWeightSyncScheme:
        """The sender's end alone, with nobody connecting to it yet."""
        defaults = {"timeout": PUSH_SECONDS, "connect_timeout": PUSH_SECONDS, "same_host": self.same_host}
        scheme = DistributedWeightSyncScheme(**defaults | options)
        self._schemes.append(scheme)
        scheme.init_on_sender("policy", model=model, num_workers=num_workers)
        return scheme

    def close(self) -> None:
        for scheme in self._schemes:
            scheme.shutdown()


class Link:
    """A context that lends its gate and its link to the sender, as a worker's does; destinations are its attributes."""

    def __init__(self, info: Any, worker_idx: int, **models: nn.Module) -> None:
        self.gate = Gate()
        self.receiver_link = ReceiverLink(info, worker_idx, self.gate)
        vars(self).update(models)

    def shutdown(self) -> None:
        self.receiver_link.end()


def assert_text(error: BaseException, *patterns: str) -> None:
    """Each pattern is found in what the error says."""
    for pattern in patterns:
        assert re.search(pattern, str(error)), f"{pattern!r} is not in {str(error)!r}"


def altered(model: nn.Module) -> nn.Module:
    """A copy of a module that agrees with it in no leaf."""
    other = copy.deepcopy(model)
    scramble(other.state_dict().values(), seed=999)
    return other


def layers(width: int = 4, *, depth: int = 1, dtype: torch.dtype = torch.float32, buffer: bool = True) -> nn.Sequential:
    """A few small layers, and a buffer."""
    net = nn.Sequential(nn.Linear(3, width), *(nn.Linear(width, width) for _ in range(depth))).to(dtype)
    if buffer:
        net.register_buffer("scale", torch.ones(2))
    return net
