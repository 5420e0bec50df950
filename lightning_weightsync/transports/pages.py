"""Where does memory lie, and in pages of which size?

A mapping in pages of 4 KiB costs twice whenever it is replaced and read: 340 MB take 20 ms until they are found again,
and 10 to 20 to be let go of; in pages of 2 MiB next to nothing (docs/platform-notes.md). So what is large lies at
addresses where huge pages can, and slots are asked to be made of them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time

import torch
from torch import Tensor

HUGE = 2 << 20
"""Bytes of a huge page."""

_FIXED = 0x10  # MAP_FIXED, on Linux, macOS and the BSDs
_MAY_MOVE, _TO_FIXED, _KEEP_MAPPED = 1, 2, 4  # MREMAP_MAYMOVE, MREMAP_FIXED, MREMAP_DONTUNMAP
_COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1; older ones say EINVAL
_AT_ONCE = 16 * HUGE
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
if hasattr(_libc, "mremap"):
    _libc.mremap.restype = ctypes.c_void_p
    _libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]


def reserve(nbytes: int) -> Tensor:
    """A range of addresses (uint8, 1-dimensional): zeros that nobody shares. It lasts as long as any view of it."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    spare = HUGE if nbytes >= HUGE else 0
    pages = mmap.mmap(-1, nbytes + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % HUGE if spare else 0
    return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes, offset=start)


def map_at(address: int, nbytes: int, flags: int, descriptor: int) -> None:
    """Have the first bytes of a file lie in a range, in the place of what was there.

    Args:
        address: Of a range that ``reserve`` has made.
        nbytes: Its size.
        flags: ``MAP_SHARED`` or ``MAP_PRIVATE``; with ``MAP_ANONYMOUS``, zeros.
        descriptor: Of the file, which may be closed afterwards; -1 for none.

    Raises:
        OSError: It cannot be mapped.
    """
    found = _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags | _FIXED, descriptor, 0)
    if found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}: {nbytes} bytes cannot be mapped")


def move_pages(address: int, nbytes: int, to: int) -> bool:
    """Move what lies in one range to another of its size, both of which stay mapped; whether the platform can."""
    if not hasattr(_libc, "mremap"):
        return False
    return bool(_libc.mremap(address, nbytes, nbytes, _MAY_MOVE | _TO_FIXED | _KEEP_MAPPED, to) != _FAILED)


def prefault(memory: Tensor, seconds: float) -> None:
    """Have all pages of a range there, as zeros: huge ones where the system gives them, within so many seconds.

    The system is asked for each, whatever ``shmem_enabled`` says, which is about what is done without being asked.
    """
    address, nbytes = memory.data_ptr(), memory.numel()
    deadline = time.monotonic() + seconds
    first, last = -(-address // HUGE) * HUGE, (address + nbytes) // HUGE * HUGE
    while sys.platform == "linux" and first < last and time.monotonic() < deadline:
        end = min(first + _AT_ONCE, last)
        memory[first - address : end - address : HUGE] = 0  # none is made of nothing at all
        if _libc.madvise(first, end - first, _COLLAPSE):
            break  # an older system; or there are none left
        first = end
    memory.zero_()
