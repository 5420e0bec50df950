"""How can a sender change the weights of a worker that sleeps? The page of memory on which the two of them agree.

A *board* is one page that a sender shares with one worker of its host, and one lock. The worker holds the lock,
together with whoever else it lets in, for as long as it is in its gate; the sender holds it alone while it writes. So a
sender that gets the lock may write what the worker has mapped, and no policy call sees half of it. The lock belongs to
an open file (``flock``): the kernel lets go of it when its owner dies. Neither side ever waits inside the kernel for
it.

    word        written by    says
    MIXED       both          what the worker has mapped is being written: not to be used until this is 0 again
    VERSION     both          which version is in force
    OPEN        the worker    it may be switched in its sleep; 0 if it has anything of its own to do at a switch
    RANGES      the worker    in how many ranges of its addresses its weights lie; address and size of each follow
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Sequence

from lightning_weightsync.transports.memory import create_memory_file, map_memory

if sys.platform != "win32":
    import fcntl
    import resource

Range = tuple[int, int]
"""An address and a number of bytes."""

_PAGE = mmap.PAGESIZE
_ENTRY = 8  # bytes of /proc/PID/pagemap for each page
_MIXED, _VERSION, _OPEN, _RANGES, _FIRST_RANGE = range(5)
_MOST_RANGES = 64
_MOST_BYTES = 64 << 20
_RUNNING = (b"S", b"R", b"D", b"I")  # asleep, on a core, in the middle of I/O, idle; not: stopped, traced, ended
# The last byte of an entry holds bits 56 to 63: 0x80 present, 0x40 swapped out, 0x20 of a file. What is there, and is
# not the file's, is a page that the worker has written to, and has to itself.
_OF_THE_FILE = bytes(flags for flags in range(256) if not flags & 0xC0 or flags & 0x20)


class _Board:
    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._closing = threading.Lock()
        try:
            self._page = map_memory(descriptor, _PAGE)  # for as long as this object is there, closed or not
        except BaseException:
            os.close(descriptor)
            raise
        self._words = (ctypes.c_int64 * (_PAGE // 8)).from_address(self._page.data_ptr())
        _boards.add(self)

    @property
    def is_mixed(self) -> bool:
        """Whether what the worker has mapped was written in part only, and waits for a push that makes it whole."""
        return bool(self._words[_MIXED])

    def _lock(self, how: int) -> bool:
        with self._closing:
            if self.descriptor < 0:
                return False
            try:
                fcntl.flock(self.descriptor, how | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:  # somebody has closed it, by its number
                self.descriptor = -1
                return False
            return True

    def unlock(self) -> None:
        """Let go of the lock."""
        self._lock(fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the lock, and of the file. Idempotent."""
        self.unlock()  # the mapping keeps the file open
        with self._closing:
            descriptor, self.descriptor = self.descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)

    def leave_to_parent(self) -> None:
        """In a forked process: what is read here is what it was, and what is written here stays here."""
        self._closing = threading.Lock()
        self._words = type(self._words).from_buffer_copy(self._words)
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class SenderBoard(_Board):
    """The sender's end.

    Args:
        pid: Of the worker's process, as the kernel knows it.

    Raises:
        OSError: Its memory cannot be looked at.
    """

    def __init__(self, pid: int) -> None:
        self._writes = False
        self._status = self._stat = self._pages = -1
        try:
            self._status = os.open(f"/proc/{pid}/status", os.O_RDONLY | os.O_CLOEXEC)
            self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
            self._pages = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            super().__init__(create_memory_file("lightning_weightsync-board"))
        except BaseException:
            self._close_process()
            raise

    def lock(self) -> bool:
        """Have the lock alone, if the worker is not in its gate at this moment; whether it is had."""
        return self._lock(fcntl.LOCK_EX)

    @property
    def is_open(self) -> bool:
        """Whether the worker may be switched in its sleep; never again once it has written its own weights."""
        return bool(self._words[_OPEN]) and not self.is_mixed and not self._writes

    def may_write(self) -> bool:
        """Whether the worker's process runs as usual, and every page of its weights is the slot's.

        It may be stopped, or about to be, or at its end; and a page that it has written itself would not follow.
        """
        return self._runs() and self.pages_are_shared()

    def _runs(self) -> bool:
        try:
            status, stat = os.pread(self._status, 4096, 0), os.pread(self._stat, 512, 0)
        except OSError:  # it is gone
            return False
        # In this order: the thread that takes SIGSTOP from what is pending stops under the same lock. It is the first
        # one, or else the first one has yet to stop: then what is written now came before the stop.
        for name in (b"\nSigPnd:\t", b"\nShdPnd:\t"):
            at = status.find(name) + len(name)
            if status[at : at + 16] != b"0" * 16:  # about to be stopped, or to end
                return False
        state = stat.rfind(b") ") + 2  # behind the program's name
        return stat[state : state + 1] in _RUNNING

    def pages_are_shared(self) -> bool:
        """Whether the worker has none of the pages of its weights to itself; ``False`` if it is gone."""
        words = self._words
        for place in range(_FIRST_RANGE, _FIRST_RANGE + 2 * min(words[_RANGES], _MOST_RANGES), 2):
            address, nbytes = words[place], words[place + 1]
            if not 0 <= nbytes <= _MOST_BYTES:
                return False
            first, last = address // _PAGE, -(-(address + nbytes) // _PAGE)
            size = (last - first) * _ENTRY
            try:
                entries = os.pread(self._pages, size, first * _ENTRY)
            except (OSError, OverflowError, ValueError):
                return False
            if len(entries) != size:
                return False
            if entries[7::_ENTRY].translate(None, _OF_THE_FILE):
                self._writes = True  # and may do so again, at any moment
                return False
        return True

    def begin(self) -> None:
        """What the worker has mapped is about to be written; the lock is had alone."""
        self._words[_MIXED] = 1

    def end(self, version: int) -> None:
        """It has been written, and is this version."""
        self._words[_VERSION] = version
        self._words[_MIXED] = 0

    def close(self) -> None:
        """See ``_Board.close``."""
        super().close()
        self._close_process()

    def _close_process(self) -> None:
        descriptors = self._status, self._stat, self._pages
        self._status = self._stat = self._pages = -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)


class WorkerBoard(_Board):
    """The worker's end.

    Args:
        descriptor: Of the sender's page; it may be closed afterwards.

    Raises:
        OSError: It cannot be opened.
    """

    def __init__(self, descriptor: int) -> None:
        # The lock belongs to the open file, and this descriptor is the sender's own one.
        super().__init__(os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))

    def lock(self) -> bool:
        """Keep the sender from writing; ``False`` while it writes."""
        return self._lock(fcntl.LOCK_SH) or self.descriptor < 0

    def make_whole(self) -> None:
        """What was written in part only has been replaced."""
        self._words[_MIXED] = 0

    @property
    def version(self) -> int:
        """Which version is in force."""
        return self._words[_VERSION]

    @version.setter
    def version(self, version: int) -> None:
        self._words[_VERSION] = version

    def offer(self, ranges: Sequence[Range] | None) -> None:
        """The worker may be switched in its sleep: its weights lie in these ranges, and nothing else is to be done.

        Args:
            ranges: ``None`` if it may not.
        """
        words = self._words
        words[_OPEN] = 0
        if ranges is not None and len(ranges) <= _MOST_RANGES:
            for number, (address, nbytes) in enumerate(ranges):
                words[_FIRST_RANGE + 2 * number], words[_FIRST_RANGE + 2 * number + 1] = address, nbytes
            words[_RANGES] = len(ranges)
            words[_OPEN] = 1


def make_board(pid: int) -> SenderBoard | None:
    """A board for a worker of this host; ``None`` where it cannot be had.

    It takes four descriptors. Where half of what a process may have are in use, they are left for what needs them more.

    Args:
        pid: Of its process, as the kernel knows it; 0 where that is not known.
    """
    if sys.platform != "linux" or pid <= 0:
        return None
    with contextlib.suppress(OSError):
        board = SenderBoard(pid)
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit == resource.RLIM_INFINITY or 2 * board.descriptor < limit:
            return board
        board.close()
    return None


_boards: weakref.WeakSet[_Board] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """A forked process shares its parent's open files, and would let go of its parent's locks."""
    for board in list(_boards):
        board.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
