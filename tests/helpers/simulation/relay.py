"""What is on its way between a sender and one worker? Whole frames, held back until the test lets them go on.

Frames of one direction keep their order, as on any stream. The end of a stream is the last thing in it: a worker's end
may be as late as its frames. The sender's is not: a worker of its host can tell at once that the sender has closed,
although it has frames to read still.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections import deque

_HEADER = struct.Struct("!II")


class _End:
    """One side of the relay: takes what that party sends apart into frames, and hands it the other party's."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setblocking(False)
        self.frames: deque[tuple[bytes, list[int]]] = deque()  # sent by this party, held back
        self.ended = False  # this party has closed
        self.gone = False  # ... and the other one can see it, or the connection was cut
        self._data = bytearray()
        self._descriptors: list[int] = []

    def collect(self) -> None:
        """Read what this party has sent."""
        while not self.ended:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.sock, 1 << 16, 16)
            except BlockingIOError:
                return
            except OSError:
                data, descriptors = b"", []
            if not data:
                self.ended = True
            self._data += data
            self._descriptors += descriptors
            while len(self._data) >= _HEADER.size:
                end = _HEADER.size + sum(_HEADER.unpack_from(self._data))
                if len(self._data) < end:
                    break
                frame = bytes(self._data[:end])
                del self._data[:end]
                self.frames.append((frame, self._descriptors))
                self._descriptors = []

    def drop(self) -> None:
        """What is held back is lost."""
        for _, descriptors in self.frames:
            for descriptor in descriptors:
                os.close(descriptor)
        self.frames.clear()

    def close(self) -> None:
        self.ended = self.gone = True
        self.drop()
        self.sock.close()


class Relay:
    """The connection of one link.

    Attributes:
        sender_end: The socket that the sender uses.
        worker_end: The socket that the worker uses.
    """

    def __init__(self) -> None:
        self.sender_end, ours = socket.socketpair()
        theirs, self.worker_end = socket.socketpair()
        self._sender, self._worker = _End(ours), _End(theirs)

    def collect(self) -> None:
        """Take in what both parties have sent or closed; a worker sees the sender's end at once."""
        self._sender.collect()
        self._worker.collect()
        if self._sender.ended and not self._sender.gone:
            while self._sender.frames:
                _hand_on(self._sender, self._worker)
            self._sender.gone = True
            with contextlib.suppress(OSError):
                self._worker.sock.shutdown(socket.SHUT_WR)

    @property
    def has_reached_worker(self) -> bool:
        """Whether there is something for the worker to read: a frame, or the end."""
        poller = select.poll()
        poller.register(self.worker_end, select.POLLIN)
        return bool(poller.poll(0))

    def to_worker(self) -> bool:
        """Let the sender's oldest frame go on; whether there was one."""
        self.collect()
        if not self._sender.frames:
            return False
        _hand_on(self._sender, self._worker)
        return True

    def to_sender(self) -> bool:
        """Let the worker's oldest frame, or its end, go on; whether there was one."""
        self.collect()
        if self._worker.frames:
            _hand_on(self._worker, self._sender)
            return True
        if self._worker.ended and not self._worker.gone:
            self._worker.gone = True
            with contextlib.suppress(OSError):
                self._sender.sock.shutdown(socket.SHUT_RDWR)
            return True
        return False

    def end_worker(self, *, lossy: bool) -> None:
        """The worker's process has ended; what it had sent may be lost (its host went down with it)."""
        self.collect()
        self._worker.ended = True
        if lossy:
            self._worker.drop()
        with contextlib.suppress(OSError):
            self._worker.sock.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Both parties see the end of the connection, and what was on its way is lost."""
        self.collect()
        self._sender.close()
        self._worker.close()

    def close(self) -> None:
        """Give everything back."""
        self.cut()
        self.sender_end.close()
        self.worker_end.close()


def _hand_on(source: _End, target: _End) -> None:
    frame, descriptors = source.frames.popleft()
    try:
        if descriptors:
            socket.send_fds(target.sock, [frame], descriptors)
        else:
            target.sock.sendall(frame)
    except OSError:
        pass  # the other party is gone
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
