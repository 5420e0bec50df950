"""In which frames do the two ends of a connection speak?

A frame is two big-endian ``uint32`` (length of the JSON part, length of the blob), UTF-8 JSON, and the blob. Every
kind of message has a fixed schema. An unknown kind, a missing, extra or wrongly typed field, or a part above its cap
breaks the channel: it is never repaired, and nothing that came from a socket is ever unpickled here.

A channel may be used by one receiving and several sending threads.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from lightning_weightsync.transports.bodies import Schema, codec_of
from lightning_weightsync.transports.messages import CARRIES_DESCRIPTOR, LINK_MESSAGES

_HEADER = struct.Struct("!II")
_INT = struct.Struct("i")
MAX_JSON = 64 << 20
MAX_BLOB = 1 << 30
_ROOM = socket.CMSG_LEN(64 * _INT.size) if hasattr(socket, "CMSG_LEN") else 0
_CLOSE_ON_EXEC: int = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_PEER_CLOSED = getattr(select, "POLLRDHUP", 0)  # where there is none, POLLHUP, which is always reported, tells


class ChannelClosed(ConnectionError):
    """The other end has closed the connection, or this end has."""


class ProtocolError(ChannelClosed):
    """The other end sent something that is no valid message; the channel is closed with it."""


class ChannelTimeout(TimeoutError):
    """A deadline passed while sending or receiving."""


@dataclass(slots=True)  # not frozen: that takes four calls more
class Message:
    """One message: its kind, its checked fields, an optional blob, and a file's descriptor if its kind carries one."""

    kind: str
    fields: Mapping[str, Any]
    blob: bytes = b""
    descriptor: int = -1

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


class ControlChannel:
    """Framed, schema-checked messages over a connected stream socket.

    Args:
        sock: A connected stream socket; the channel owns it from here on.
        schema: Field names and types for each kind of message that may be sent or received.
        takes_descriptors: Whether files may be handed to this end (over a Unix socket).
    """

    def __init__(self, sock: socket.socket, schema: Schema = LINK_MESSAGES, *, takes_descriptors: bool = False) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._codec = codec_of(schema)
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._descriptors: deque[int] = deque()
        self._passes_descriptors = sock.family == socket.AF_UNIX
        self._takes_descriptors = takes_descriptors and self._passes_descriptors
        self._poller = select.poll()  # select.select is limited to descriptors below 1024
        self._poller.register(sock, select.POLLIN)
        self._closed = False
        self.last_heard = time.monotonic()

    def fileno(self) -> int:
        """The descriptor to wait on; -1 after ``close``."""
        return self._sock.fileno()

    @property
    def local_host(self) -> str | None:
        """Address of this end: of the interface over which the other end is reached; ``None`` on a Unix socket."""
        return None if self._passes_descriptors else str(self._sock.getsockname()[0])

    @property
    def peer_pid(self) -> int:
        """The process at the other end of a Unix socket, as the kernel knows it; 0 where it does not tell."""
        if not self._passes_descriptors or not hasattr(socket, "SO_PEERCRED"):
            return 0
        found = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 3 * _INT.size)
        return int(_INT.unpack_from(found)[0])

    @property
    def has_more(self) -> bool:
        """Whether bytes were read that have not been looked at."""
        return bool(self._buffer)

    @property
    def closed(self) -> bool:
        """Whether this end is closed."""
        return self._closed

    def encode(self, kind: str, blob: bytes = b"", **fields: Any) -> bytes:
        """The frame of one message, to be sent to several ends with ``send_frame``.

        Raises:
            ValueError: The message is not one of the schema, or above a cap.
        """
        body, number = self._codec.write(kind, fields)
        size = len(number) + len(blob)
        if len(body) > MAX_JSON or size > MAX_BLOB:
            raise ValueError(f"message {kind!r} of {len(body)} + {size} bytes is above the cap")
        return b"".join((_HEADER.pack(len(body), size), body, number, blob))

    def send(
        self, kind: str, blob: bytes = b"", *, deadline: float | None = None, descriptor: int = -1, **fields: Any
    ) -> None:
        """Send one message; blocks while the other end does not read and the socket's buffer is full.

        Args:
            kind: One of the schema's.
            blob: Bytes that go with it.
            deadline: On the monotonic clock, in seconds.
            descriptor: Of a file to hand over, with the kinds that carry one; needs a Unix socket.
            **fields: As the schema says.

        Raises:
            ChannelTimeout: The deadline passed. If the frame was half sent by then, the channel is closed: the next
                frame would be read as its rest.
            ChannelClosed: The connection is gone.
            ValueError: The message is not one of the schema, or above a cap.
        """
        self.send_frame(self.encode(kind, blob, **fields), deadline=deadline, descriptor=descriptor)

    def send_frame(self, frame: bytes, *, deadline: float | None = None, descriptor: int = -1) -> None:
        """Send an encoded frame; see ``send``."""
        if not self._sending.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())):
            raise ChannelTimeout("the deadline passed while another thread was sending on the channel")
        try:
            self._write(frame, deadline, descriptor)
        finally:
            self._sending.release()

    def try_send(self, kind: str, **fields: Any) -> bool:
        """Send one small message if the socket's buffer has room for it and nobody else is sending; never blocks."""
        data = self.encode(kind, **fields)
        if not self._sending.acquire(blocking=False):
            return False
        try:
            # A writable stream socket has at least a third of its buffer free: a small frame is never cut.
            poller = select.poll()
            poller.register(self._sock, select.POLLOUT)
            writable = bool(poller.poll(0))
            if writable:
                self._write(data, None, -1)
        except (OSError, ValueError) as error:
            raise ChannelClosed(f"the connection is gone: {error}") from error
        finally:
            self._sending.release()
        return writable

    def receive(self, deadline: float | None = None) -> Message:
        """Wait for the next message.

        Raises:
            ChannelTimeout: The deadline (monotonic clock, seconds) passed; the channel stays usable.
            ChannelClosed: The other end is gone, or sent something that is no message.
        """
        message = self._parse()
        while message is None:
            self._wait(write=False, deadline=deadline)
            message = self.poll()
        return message

    def poll(self, *, read: bool = True) -> Message | None:
        """The next message, if it has arrived in full; never blocks, and reads at most a megabyte.

        Args:
            read: Whether to look for more than what has been read from the socket already.
        """
        message = self._parse()
        if message is not None or not read:
            return message
        for _ in range(16):  # a peer that never stops sending must not keep its reader from looking at the clock
            try:
                data = self._read()
            except BlockingIOError:
                return None
            except (OSError, ValueError) as error:
                raise ChannelClosed(f"the connection is gone: {error}") from error
            if not data:
                raise ChannelClosed("the other end closed the connection")
            self.last_heard = time.monotonic()
            self._buffer += data
            message = self._parse()
            if message is not None:
                return message
        return None

    def _read(self) -> bytes:
        if not self._takes_descriptors:  # those that come all the same are dropped by the kernel
            return self._sock.recv(1 << 16)
        data, ancillary, _, _ = self._sock.recvmsg(1 << 16, _ROOM, _CLOSE_ON_EXEC)  # socket.recv_fds() forgets the flag
        for level, kind, packed in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(packed) - len(packed) % _INT.size
                self._descriptors += [number for (number,) in _INT.iter_unpack(packed[:whole])]
        return data

    def check_open(self) -> None:
        """See whether both ends are still there; reads nothing, never blocks.

        Raises:
            ChannelClosed: One of the ends has closed the connection, whatever is still to be read from it.
        """
        try:
            poller = select.poll()
            poller.register(self._sock, _PEER_CLOSED)
            events = poller.poll(0)
        except (OSError, ValueError) as error:
            raise ChannelClosed("this end was closed") from error
        if events:
            raise ChannelClosed("the other end closed the connection")

    def feed(self, data: bytes) -> None:
        """Put bytes that were read from the socket before the channel took over in front of the next ones."""
        self._buffer += data

    def close(self) -> None:
        """Close this end; a thread that waits on it, here or there, gets ``ChannelClosed``."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _write(self, data: bytes, deadline: float | None, descriptor: int) -> None:
        """Write a frame; the caller holds ``_sending``."""
        rest = memoryview(data)
        try:
            while rest:
                try:
                    if descriptor >= 0:
                        sent = socket.send_fds(self._sock, [rest], [descriptor])
                        descriptor = -1
                    else:
                        sent = self._sock.send(rest)
                    rest = rest[sent:]
                except BlockingIOError:
                    self._wait(write=True, deadline=deadline)
        except BaseException as error:
            if len(rest) < len(data):
                self.close()
            if isinstance(error, OSError | ValueError) and not isinstance(error, ChannelTimeout | ChannelClosed):
                raise ChannelClosed(f"the connection is gone: {error}") from error
            raise

    def _wait(self, *, write: bool, deadline: float | None) -> None:
        try:
            poller = self._poller
            if write:
                poller = select.poll()
                poller.register(self._sock, select.POLLOUT)
            elif self._closed:
                raise ChannelClosed("this end was closed")
            while True:
                remaining = None if deadline is None else deadline - time.monotonic()
                # Another thread's close() need not wake a poll on the same descriptor: look again now and then.
                if poller.poll(200 if remaining is None else min(200, max(0, remaining * 1000))):
                    return
                if self._closed:
                    raise ChannelClosed("this end was closed")
                if remaining is not None and remaining <= 0:
                    raise ChannelTimeout("the deadline passed while waiting on the channel")
        except ValueError as error:
            raise ChannelClosed("this end was closed") from error

    def _parse(self) -> Message | None:
        if len(self._buffer) < _HEADER.size:
            return None
        body_size, blob_size = _HEADER.unpack_from(self._buffer)
        if body_size > MAX_JSON or blob_size > MAX_BLOB:
            self._break(f"a frame of {body_size} + {blob_size} bytes is above the cap")
        end = _HEADER.size + body_size + blob_size
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_HEADER.size : _HEADER.size + body_size])
        blob = bytes(self._buffer[_HEADER.size + body_size : end])
        del self._buffer[:end]
        try:
            kind, fields, blob = self._codec.read(body, blob)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            self._break(f"not a message: {error}")
        descriptor = -1
        if kind in CARRIES_DESCRIPTOR:
            if not self._descriptors:
                self._break(f"message {kind!r} came without its descriptor")
            descriptor = self._descriptors.popleft()
        return Message(kind, fields, blob, descriptor)

    def _break(self, reason: str) -> NoReturn:
        self.close()
        self._buffer.clear()
        raise ProtocolError(reason)
