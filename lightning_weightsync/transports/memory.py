"""Where does memory that two processes share come from? An anonymous file, handed over by descriptor.

It has no name, so nothing is left on disk or in ``/dev/shm`` however its owners end.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class SlotMemory:
    """The bytes of one slot, as one process has them.

    Args:
        memory: uint8, 1-dimensional.
        descriptor: Of the file that holds them, where a ``Window`` can show them; -1 for memory of no file. It is
            owned: closed with the last reference to this object, so whoever has one can still show it.
    """

    def __init__(self, memory: Tensor, descriptor: int = -1) -> None:
        self.memory = memory
        self.descriptor = descriptor

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


def create_memory_file(label: str) -> int:
    """An empty anonymous file; returns its descriptor, which is closed on exec unless it is passed on.

    In memory where the platform has ``memfd_create``; elsewhere a temporary file that is unlinked at once.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(label, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix=label) as file:
        return os.dup(file.fileno())


def map_memory(descriptor: int, nbytes: int, *, private: bool = False) -> Tensor:
    """The first ``nbytes`` of a memory file as a uint8 tensor; what is written shows in every process that maps it.

    With ``private``, what is written shows nowhere else. The file is grown to that size if it is smaller. The mapping
    lasts as long as the tensor.
    """
    # Not above: a worker process is started without torch.
    from lightning_weightsync.transports.pages import map_at, reserve

    memory = reserve(nbytes)
    if nbytes:
        if os.fstat(descriptor).st_size < nbytes:
            os.ftruncate(descriptor, nbytes)
        map_at(memory.data_ptr(), nbytes, mmap.MAP_PRIVATE if private else mmap.MAP_SHARED, descriptor)
    return memory
