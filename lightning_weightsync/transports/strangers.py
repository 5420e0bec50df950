"""Who else may connect to a port that gloo listens on? Nobody, once the pair is complete.

gloo accepts whoever connects and keeps each connection open until its group ends: a thousand strangers are a thousand
descriptors of the trainer. The listening socket is gloo's own, and gloo aborts the process if it is closed under its
feet; but a packet filter that lets nothing through (``SO_ATTACH_FILTER``) may be put on it by whoever has its
descriptor. New connections are then not even answered; those that exist go on.

Linux only, and with ``/proc``: elsewhere the ports stay open as gloo has opened them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
import sys

_DESCRIPTORS = "/proc/self/fd"
_SO_ATTACH_FILTER = 26
_RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # one classic BPF instruction: "accept 0 bytes of the packet"


def keep_out(published: bytes) -> int:
    """Let nobody connect any more to the sockets of this process that listen on one of these addresses.

    Args:
        published: What tells the addresses: each somewhere in it, as the system's ``sockaddr``.

    Returns:
        How many sockets that were.
    """
    if sys.platform != "linux":
        return 0
    shut = 0
    try:
        descriptors = os.listdir(_DESCRIPTORS)
    except OSError:  # a sandbox without /proc
        return 0
    for name in descriptors:
        with contextlib.suppress(OSError):  # closed by another thread, or no socket
            if stat.S_ISSOCK(os.stat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as sock:
                    if _listens(sock) and _sockaddr(sock) in published:
                        _drop_everything(sock)
                        shut += 1
    return shut


def _listens(sock: socket.socket) -> bool:
    internet = sock.family in (socket.AF_INET, socket.AF_INET6)
    return internet and bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _sockaddr(sock: socket.socket) -> bytes:
    host, port, *rest = sock.getsockname()
    start = struct.pack("=H", sock.family) + struct.pack("!H", port)
    if sock.family == socket.AF_INET:
        return start + socket.inet_pton(socket.AF_INET, host)
    return start + struct.pack("!I", rest[0]) + socket.inet_pton(socket.AF_INET6, host.partition("%")[0])


def _drop_everything(sock: socket.socket) -> None:
    code = ctypes.create_string_buffer(_RETURN_NOTHING, len(_RETURN_NOTHING))
    program = struct.pack("HP", 1, ctypes.addressof(code))  # struct sock_fprog, with native alignment
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
