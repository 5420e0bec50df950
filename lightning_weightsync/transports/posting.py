"""How does a sender speak to a worker that does not listen? What there is no room for waits here, in order.

One thread speaks to all workers. A stopped one reads nothing, and a layout or an extra state can be larger than what
its socket holds: a sender that waited for it would keep all others waiting too.
"""

from __future__ import annotations

import socket
from collections import deque
from typing import Any

from lightning_weightsync.transports.control import ChannelClosed, ControlChannel


class PostingChannel(ControlChannel):
    """A channel that is sent on without blocking: deadlines are those of the answers.

    A descriptor that is handed over has to stay open until it has left, or the channel is closed.

    Args:
        sock: A connected stream socket; the channel owns it from here on.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._waiting: deque[tuple[memoryview, int]] = deque()

    def send(self, kind: str, blob: bytes = b"", *, descriptor: int = -1, **fields: Any) -> None:
        """Send one message; what there is no room for waits. Never blocks; see ``ControlChannel.send``."""
        self.send_frame(self.encode(kind, blob, **fields), descriptor=descriptor)

    @property
    def has_mail(self) -> bool:
        """Whether something waits for room: see to it that ``post`` is called when the socket has some."""
        return bool(self._waiting)

    def post(self) -> None:
        """Send as much of what waits as there is room for; never blocks.

        Raises:
            ChannelClosed: The connection is gone.
        """
        with self._sending:
            self._post()

    def close(self) -> None:
        """Close this end; what waits is never sent."""
        super().close()
        self._waiting.clear()

    def _write(self, data: bytes, deadline: float | None, descriptor: int) -> None:
        self._waiting.append((memoryview(data), descriptor))
        self._post()

    def _post(self) -> None:
        try:
            while self._waiting:
                rest, descriptor = self._waiting[0]
                sent = socket.send_fds(self._sock, [rest], [descriptor]) if descriptor >= 0 else self._sock.send(rest)
                if sent == len(rest):
                    self._waiting.popleft()
                else:
                    self._waiting[0] = (rest[sent:], -1)
        except BlockingIOError:
            return
        except (OSError, ValueError, IndexError) as error:  # an empty queue: closed by another thread
            raise ChannelClosed(f"the connection is gone: {error}") from error
