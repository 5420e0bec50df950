"""How does a worker reach its sender? It connects, proves that it holds the run's key, and sees that the sender does.

The sender's side is in ``rendezvous``.
"""

from __future__ import annotations

import hmac
import os
import socket
import sys
import time
from collections.abc import Callable

from lightning_weightsync.errors import WeightSyncError, WeightSyncTimeout
from lightning_weightsync.transports.control import ChannelClosed, ChannelTimeout, ControlChannel, Message
from lightning_weightsync.transports.rendezvous import MAC, MAGIC, NONCE, StoreInfo, is_of_this_user, mac

_ATTEMPT_SECONDS = 2.0


def join(
    info: StoreInfo, worker_idx: int, deadline: float, on_socket: Callable[[socket.socket], None] = lambda sock: None
) -> tuple[ControlChannel, Message]:
    """Connect, authenticate both ways, say hello; returns the channel and the sender's ``welcome``.

    Blocks until the sender has met all the workers that it waits for.

    Args:
        info: Where the sender is.
        worker_idx: 0-based.
        deadline: On the monotonic clock, in seconds.
        on_socket: Given each socket before it is connected: to shut it down is to break off the wait. May raise.

    Raises:
        WeightSyncError: The sender refused this index, does not hold the key, or is gone.
        WeightSyncTimeout: The deadline (monotonic clock, seconds) passed first.
    """
    where = f"the sender at {info['host']} port {info['port']}"
    key = bytes.fromhex(info["authkey"])
    started = time.monotonic()
    try:
        sock = _connect_locally(info, deadline, on_socket) or _connect(info, deadline, on_socket)
        try:
            greeting = _read_exactly(sock, len(MAGIC) + NONCE, deadline)
            if not greeting.startswith(MAGIC):
                raise WeightSyncError(f"worker {worker_idx}: {where} does not speak this protocol")
            theirs, ours = greeting[len(MAGIC) :], os.urandom(NONCE)
            sock.sendall(ours + mac(key, b"worker", theirs, ours))
            if not hmac.compare_digest(_read_exactly(sock, MAC, deadline), mac(key, b"sender", theirs, ours)):
                raise WeightSyncError(f"worker {worker_idx}: {where} does not hold this run's key")
            channel = ControlChannel(sock, takes_descriptors=True)
            channel.send("hello", worker_idx=worker_idx, pid=os.getpid(), deadline=deadline)
            answer = channel.receive(deadline)
        except BaseException:
            sock.close()
            raise
    except (TimeoutError, ChannelTimeout) as error:
        raise WeightSyncTimeout(
            f"worker {worker_idx}: {where} did not answer within {time.monotonic() - started:.1f} s (phase: rendezvous)"
        ) from error
    except (ChannelClosed, OSError) as error:
        raise WeightSyncError(f"worker {worker_idx}: could not join {where} (phase: rendezvous): {error}") from error
    if answer.kind == "welcome":
        return channel, answer
    channel.close()
    reason = answer["reason"] if answer.kind == "refused" else f"unexpected message {answer.kind!r}"
    raise WeightSyncError(f"worker {worker_idx}: {where} refused it: {reason}")


def _connect(info: StoreInfo, deadline: float, on_socket: Callable[[socket.socket], None]) -> socket.socket:
    """A TCP connection to the sender."""
    while True:
        late: TimeoutError | None = None
        refused: OSError | None = None
        for family, kind, protocol, _, address in socket.getaddrinfo(
            info["host"], info["port"], type=socket.SOCK_STREAM
        ):
            sock = socket.socket(family, kind, protocol)
            try:
                on_socket(sock)
                # An attempt that meets a full queue is repeated by the kernel after 1, 3, 7, ... seconds: begin anew.
                sock.settimeout(max(0.01, min(_ATTEMPT_SECONDS, deadline - time.monotonic())))
                sock.connect(address)
                return sock
            except TimeoutError as error:
                late = error
                sock.close()
            except OSError as error:
                refused = error
                sock.close()
            except BaseException:
                sock.close()
                raise
        if late is None:
            raise refused or ConnectionError(f"no address was found for {info['host']}")
        if time.monotonic() >= deadline:
            raise late


def _connect_locally(
    info: StoreInfo, deadline: float, on_socket: Callable[[socket.socket], None]
) -> socket.socket | None:
    """A connection to the sender's Unix socket; ``None`` on another host, or in another network namespace."""
    name = info.get("local", "")
    if not name or sys.platform != "linux":
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)  # where the queue is full, a blocking one waits for ever
        while True:
            on_socket(sock)
            try:
                sock.connect(f"\0{name}")
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise TimeoutError("the sender's queue was full") from error
                time.sleep(0.02)
            except OSError:
                sock.close()
                return None
        if is_of_this_user(sock):
            return sock
    except BaseException:
        sock.close()
        raise
    sock.close()
    return None


def _read_exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(max(0.01, deadline - time.monotonic()))
        chunk = sock.recv(size - len(data))
        if not chunk:
            raise ConnectionError("the connection was closed during the handshake (is the key this run's?)")
        data += chunk
    return data
