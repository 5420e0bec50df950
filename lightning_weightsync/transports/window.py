"""How can tensors be given other bytes without being touched? Their addresses stay; what lies there is replaced.

A window is a range of addresses in which one memory file at a time is mapped, privately (copy on write). To show
another file is one system call, however many tensors view the window and however large it is; pages that were
written here are dropped with it. To a tensor it is a change in place: views follow, and its address stays.
"""

from __future__ import annotations

import mmap

import torch

from lightning_weightsync.transports.pages import map_at, move_pages, reserve


class Window:
    """A fixed range of addresses.

    Args:
        nbytes: Its size.

    Attributes:
        memory: The range as a tensor (uint8, 1-dimensional); zeros until something is shown. The range lasts as long
            as any tensor that views it.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self.memory = reserve(nbytes)
        self._address = self.memory.data_ptr()
        self._aside: torch.Tensor | None = None

    @property
    def moved(self) -> bool:
        """Whether tensors that were made as views of it lie elsewhere now, as after ``share_memory_()``."""
        return self.memory.data_ptr() != self._address

    def show(self, descriptor: int, *, keep_aside: bool = False) -> None:
        """Replace what lies in the window by the first bytes of a memory file.

        Args:
            descriptor: Of a file of at least the window's size; it may be closed afterwards.
            keep_aside: Keep what lies there now, changes included, for ``restore``.

        Raises:
            OSError: It cannot be mapped.
        """
        if not self._nbytes:
            return
        if keep_aside:
            self._aside = self._move_aside()
        map_at(self._address, self._nbytes, mmap.MAP_PRIVATE, descriptor)

    def restore(self) -> None:
        """Put back what the last ``show`` has kept aside."""
        aside, self._aside = self._aside, None
        if aside is not None and not move_pages(aside.data_ptr(), self._nbytes, self._address):
            map_at(self._address, self._nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
            self.memory.copy_(aside)

    def drop_aside(self) -> None:
        """What was kept aside is not needed any more."""
        self._aside = None

    def _move_aside(self) -> torch.Tensor:
        aside = reserve(self._nbytes)
        if move_pages(self._address, self._nbytes, aside.data_ptr()):
            return aside
        return self.memory.clone()
