"""How can tensors be given other bytes without being touched? Their addresses stay; what lies there is replaced.

A window is a range of addresses in which one memory file at a time is mapped, privately (copy on write). To show
another file is one system call, however many tensors view the window and however large it is; pages that were
written here are dropped with it. To a tensor it is a change in place: views follow, and its address stays.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

_FIXED = 0x10  # MAP_FIXED, on Linux, macOS and the BSDs
_MAY_MOVE, _TO_FIXED, _KEEP_MAPPED = 1, 2, 4  # MREMAP_MAYMOVE, MREMAP_FIXED, MREMAP_DONTUNMAP
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
if hasattr(_libc, "mremap"):
    _libc.mremap.restype = ctypes.c_void_p
    _libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]


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
        self.memory = _reserve(nbytes)
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
        _map(self._address, self._nbytes, mmap.MAP_PRIVATE, descriptor)

    def restore(self) -> None:
        """Put back what the last ``show`` has kept aside."""
        aside, self._aside = self._aside, None
        if aside is not None and not _remap(aside.data_ptr(), self._nbytes, self._address):
            _map(self._address, self._nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
            self.memory.copy_(aside)

    def drop_aside(self) -> None:
        """What was kept aside is not needed any more."""
        self._aside = None

    def _move_aside(self) -> torch.Tensor:
        aside = _reserve(self._nbytes)
        if _remap(self._address, self._nbytes, aside.data_ptr()):
            return aside
        return self.memory.clone()


def _reserve(nbytes: int) -> torch.Tensor:
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def _map(address: int, nbytes: int, flags: int, descriptor: int) -> None:
    found = _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags | _FIXED, descriptor, 0)
    if found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: {nbytes} bytes cannot be mapped")


def _remap(address: int, nbytes: int, to: int) -> bool:
    """Move pages to other addresses, both of which stay mapped; whether the platform can."""
    if not hasattr(_libc, "mremap"):
        return False
    moved = _libc.mremap(address, nbytes, nbytes, _MAY_MOVE | _TO_FIXED | _KEEP_MAPPED, to)
    return bool(moved != _FAILED)
