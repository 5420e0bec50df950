"""Pairs of connected sockets, and the frames of the control channel made by hand."""

from __future__ import annotations

import gc
import json
import os
import select
import socket
import struct


def socket_pair(kind: str, buffer: int | None = None) -> tuple[socket.socket, socket.socket]:
    """Two connected stream sockets, ``"unix"`` or ``"tcp"``; ``buffer`` bytes of room on the way, about."""
    if kind == "unix":
        pair = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            client = socket.create_connection(listener.getsockname())
            pair = (client, listener.accept()[0])
    for end in pair if buffer is not None else ():
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    return pair


def frame(body: object, blob: bytes = b"") -> bytes:
    """A frame of the control channel: ``body`` as JSON, or as it is if it is bytes already."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return struct.pack("!II", len(data), len(blob)) + data + blob


def fill(sock: socket.socket) -> int:
    """Write until the socket takes no more; returns how many bytes it took."""
    sock.setblocking(False)
    written = 0
    while select.select([], [sock], [], 0.05)[1]:
        written += sock.send(bytes(1 << 16))
    return written


def is_closed(sock: socket.socket, timeout: float = 5.0) -> bool:
    """Whether the other end of a plain socket is closed, within ``timeout`` seconds; what it sent before is read."""
    sock.settimeout(timeout)
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def num_descriptors() -> int:
    """How many descriptors this process has open."""
    gc.collect()  # what earlier tests have left in cycles would go at some moment in between
    return len(os.listdir("/proc/self/fd"))
