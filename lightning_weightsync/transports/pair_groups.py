"""What do gloo and NCCL do differently for a group of two?

gloo moves memory of the CPU, and each end listens on a port of its own. NCCL moves memory of the device without a
detour over the CPU; its two ends must be on different devices, a wait for it is a wait for the stream's work, and the
one value that its ends share is the identifier that rank 0 makes when the first transfer starts.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_weightsync.transports.base import TransferFailed
from lightning_weightsync.transports.meeting import Exchange, LateMeeting, Meeting
from lightning_weightsync.transports.memory import SlotMemory, create_memory_file, map_memory
from lightning_weightsync.transports.pages import prefault
from lightning_weightsync.transports.strangers import keep_out

_GLOO_ATTEMPTS = 5  # to connect to an end that is not there, each as long as the group's timeout
_LOOK_AROUND = 0.0005
_SECONDS_FOR_PAGES = 1.0  # while a push waits


class PairGroups(Protocol):
    """How groups of one backend are formed and used. Deadlines are on the monotonic clock, in seconds."""

    def form(self, exchange: Exchange, rank: int, host: str, deadline: float) -> tuple[Any, Meeting]:
        """The group, and what it was formed by, which must live as long. Raises ``RuntimeError``."""
        ...

    def formed(self, meeting: Meeting) -> None:
        """The other end is there: nobody else may join."""
        ...

    def wait(self, work: Any, deadline: float) -> None:
        """Wait for a transfer. Raises ``RuntimeError`` or ``TransferFailed`` if it broke or is late."""
        ...

    def placed(self, tensor: Tensor) -> Tensor:
        """A small tensor of the CPU where the group can move it."""
        ...

    def new_slot(self, nbytes: int) -> SlotMemory:
        """Memory that the group can receive into. Raises ``OSError`` or ``RuntimeError`` if there is none."""
        ...


class GlooGroups:
    """Groups over TCP, for memory of the CPU."""

    def form(self, exchange: Exchange, rank: int, host: str, deadline: float) -> tuple[Any, Meeting]:
        """See ``PairGroups``. The two meet in here; each opens a port on ``host``."""
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=max(0.1, (deadline - time.monotonic()) / _GLOO_ATTEMPTS))
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        meeting = Meeting(exchange, deadline)
        return dist.ProcessGroupGloo(meeting, rank, 2, options), meeting

    def formed(self, meeting: Meeting) -> None:
        """See ``PairGroups``."""
        keep_out(meeting.published)

    def wait(self, work: Any, deadline: float) -> None:
        """See ``PairGroups``."""
        # A wait of zero means "no timeout" to gloo.
        work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))

    def placed(self, tensor: Tensor) -> Tensor:
        """See ``PairGroups``."""
        return tensor

    def new_slot(self, nbytes: int) -> SlotMemory:
        """A memory file, which a window can show."""
        slot = SlotMemory(torch.empty(0, dtype=torch.uint8), create_memory_file("lightning_weightsync-received"))
        slot.memory = map_memory(slot.descriptor, nbytes)
        prefault(slot.memory, _SECONDS_FOR_PAGES)
        return slot


class NcclGroups:
    """Groups between devices. Never run where this was written: its tests need two GPUs.

    Args:
        device: Of this end.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def form(self, exchange: Exchange, rank: int, host: str, deadline: float) -> tuple[Any, Meeting]:
        """See ``PairGroups``. The two meet when the first transfer starts."""
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=max(0.1, deadline - time.monotonic()))
        meeting = LateMeeting(exchange, deadline)
        return dist.ProcessGroupNCCL(meeting, rank, 2, options), meeting

    def formed(self, meeting: Meeting) -> None:
        """Nothing has to be done: NCCL's bootstrap socket is closed by then, and asked for the identifier."""

    def wait(self, work: Any, deadline: float) -> None:
        """See ``PairGroups``. ``work.wait`` would only make the stream wait."""
        while not work.is_completed():
            if time.monotonic() >= deadline:
                raise TransferFailed("the transfer did not end before its deadline")
            time.sleep(_LOOK_AROUND)
        work.wait()

    def placed(self, tensor: Tensor) -> Tensor:
        """See ``PairGroups``."""
        return tensor.to(self.device)

    def new_slot(self, nbytes: int) -> SlotMemory:
        """Memory of the device; what it holds is copied into the model's leaves there."""
        return SlotMemory(torch.empty(nbytes, dtype=torch.uint8, device=self.device))


def pair_groups(backend: str, device: torch.device) -> PairGroups:
    """The groups of a backend, for an end on this device."""
    return NcclGroups(device) if backend == "nccl" else GlooGroups()


def why_unavailable(backend: str) -> str | None:
    """Why this process cannot form groups over ``backend``; ``None`` if it can."""
    if not dist.is_available() or not (dist.is_gloo_available() if backend == "gloo" else dist.is_nccl_available()):
        return f"backend={backend!r} is not part of this process's build of torch"
    if backend == "nccl" and not torch.cuda.is_available():
        return "backend='nccl' moves memory of GPUs, and this process has none"
    return None
