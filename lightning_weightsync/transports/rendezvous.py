"""How do the two ends find and trust each other? A listening socket, a key, and a mutual challenge.

The sender listens on one address, the loopback interface unless told otherwise, on a port that the kernel picks; and,
where workers of its host may share memory with it, on a Unix socket without a file (Linux' abstract namespace).
Before any message is read, both ends prove that they hold the run's key (HMAC-SHA256 over two fresh nonces). The
sender waits on all clients at once, so one that is silent, slow or babbling delays nobody and is dropped after
``HANDSHAKE_SECONDS``.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import secrets
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, TypedDict

from typing_extensions import NotRequired

from lightning_weightsync.errors import WeightSyncError, WeightSyncTimeout
from lightning_weightsync.transports.control import ChannelClosed, ChannelTimeout, ControlChannel, Message

HANDSHAKE_SECONDS = 10.0
_MAX_PENDING = 512
_MAGIC = b"LWS1"
_NONCE = 32
_MAC = hashlib.sha256().digest_size


class StoreInfo(TypedDict):
    """Where a sender can be reached, and the key that lets one in. Keep it as secret as the run.

    ``local`` names the Unix socket for workers of the sender's host; it is empty where there is none.
    """

    host: str
    port: int
    authkey: str
    local: NotRequired[str]


@dataclass
class Joined:
    """A worker that has authenticated and said hello."""

    worker_idx: int
    pid: int
    channel: ControlChannel
    local: bool


@dataclass
class _Client:
    """A connection that has not yet said hello."""

    sock: socket.socket
    nonce: bytes
    deadline: float
    received: bytearray = field(default_factory=bytearray)
    channel: ControlChannel | None = None


def check_host(host: str) -> None:
    """Refuse an address at which no worker could reach the sender.

    Raises:
        ValueError: ``host`` is a wildcard (``0.0.0.0``, ``::``) or empty.
    """
    if not host or _is_wildcard(host):
        raise ValueError(
            f"host={host!r} is no address that a worker can connect to: give that of the interface to listen on, "
            "for example host='127.0.0.1' or the machine's own address"
        )


def bind_listener(host: str) -> socket.socket:
    """A listening TCP socket on ``host``, on a port that the kernel picks."""
    check_host(host)
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.bind(address)
        listener.listen(512)
    except BaseException:
        listener.close()
        raise
    return listener


class Rendezvous:
    """The sender's side: listens from its creation on, accepts only inside ``accept``.

    Args:
        host: Address to listen on, and the one that workers are told.
        local: Whether to listen on a Unix socket too, over which descriptors can be handed to workers of this host.
    """

    def __init__(self, host: str = "127.0.0.1", *, local: bool = False) -> None:
        self._key = secrets.token_bytes(32)
        self._listener = bind_listener(host)
        self._listener.setblocking(False)
        self._local_listener: socket.socket | None = None
        name = ""
        if local and sys.platform == "linux":
            name = f"lightning_weightsync-{secrets.token_hex(16)}"
            self._local_listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._local_listener.bind(f"\0{name}")
            self._local_listener.listen(512)
            self._local_listener.setblocking(False)
        port = self._listener.getsockname()[1]
        self.info = StoreInfo(host=host, port=port, authkey=self._key.hex(), local=name)

    def accept(
        self, expected: Collection[int], deadline: float, watch: Callable[[set[int]], None]
    ) -> dict[int, Joined]:
        """Wait until every expected worker has said hello.

        Args:
            expected: The indices that may join now. Any other index, or a second client with one of them, is refused.
            deadline: On the monotonic clock, in seconds.
            watch: Called about twenty times a second with the indices that are still missing; may raise to give up.

        Raises:
            WeightSyncTimeout: The deadline passed; ``.failed`` names the missing workers.
        """
        started = time.monotonic()
        joined: dict[int, Joined] = {}
        with selectors.DefaultSelector() as selector:
            for listener in filter(None, (self._listener, self._local_listener)):
                selector.register(listener, selectors.EVENT_READ, None)
            try:
                while missing := set(expected) - joined.keys():
                    watch(missing)
                    now = time.monotonic()
                    if now >= deadline:
                        cause = {
                            index: WeightSyncTimeout(f"worker {index} did not connect within {now - started:.1f} s")
                            for index in sorted(missing)
                        }
                        raise WeightSyncTimeout(
                            f"waiting for workers to connect: {sorted(missing)} of {sorted(expected)} still missing "
                            f"after {now - started:.1f} s (phase: rendezvous)",
                            cause,
                        )
                    for key, _ in selector.select(min(0.05, deadline - now)):
                        if key.data is None:
                            self._take_new(selector, key.fileobj)
                        else:
                            self._advance(selector, key.data, missing, joined)
                    self._drop_late(selector)
            except BaseException:
                for member in joined.values():
                    member.channel.close()
                raise
            finally:
                for key in list(selector.get_map().values()):
                    if key.data is not None:
                        key.data.sock.close()
        return joined

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()
        if self._local_listener is not None:
            self._local_listener.close()

    def _take_new(self, selector: selectors.BaseSelector, listener: Any) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            sock, _ = listener.accept()
            if not _is_of_this_user(sock):
                sock.close()
                return
            sock.setblocking(False)
            client = _Client(sock, os.urandom(_NONCE), time.monotonic() + HANDSHAKE_SECONDS)
            selector.register(sock, selectors.EVENT_READ, client)
            try:
                sock.send(_MAGIC + client.nonce)  # a fresh socket has room for 36 bytes
            except OSError:
                _drop(selector, client)

    def _advance(
        self, selector: selectors.BaseSelector, client: _Client, missing: set[int], joined: dict[int, Joined]
    ) -> None:
        try:
            if client.channel is None:
                self._authenticate(client)
            message = client.channel.poll() if client.channel is not None else None
        except OSError:
            _drop(selector, client)
            return
        if message is None or client.channel is None:
            return
        selector.unregister(client.sock)
        index = int(message["worker_idx"]) if message.kind == "hello" else -1
        if index in missing and index not in joined:
            joined[index] = Joined(index, int(message["pid"]), client.channel, client.sock.family == socket.AF_UNIX)
            return
        with contextlib.suppress(OSError):
            client.channel.send(
                "refused",
                reason=f"worker_idx={index} is not expected now, but {sorted(missing - joined.keys())}",
                deadline=time.monotonic() + 1.0,
            )
        client.channel.close()

    def _authenticate(self, client: _Client) -> None:
        try:
            data = client.sock.recv(4096)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionError("closed before it had authenticated")
        client.received += data
        if len(client.received) < _NONCE + _MAC:
            return
        nonce, mac = bytes(client.received[:_NONCE]), bytes(client.received[_NONCE : _NONCE + _MAC])
        if not hmac.compare_digest(mac, _mac(self._key, b"worker", client.nonce, nonce)):
            raise ConnectionError("wrong key")
        client.sock.send(_mac(self._key, b"sender", client.nonce, nonce))
        client.channel = ControlChannel(client.sock)
        client.channel.feed(bytes(client.received[_NONCE + _MAC :]))

    @staticmethod
    def _drop_late(selector: selectors.BaseSelector) -> None:
        pending = [key.data for key in selector.get_map().values() if key.data is not None]
        pending.sort(key=lambda client: client.deadline)
        now = time.monotonic()
        excess = len(pending) - _MAX_PENDING
        for position, client in enumerate(pending):
            if client.deadline <= now or position < excess:
                _drop(selector, client)


def join(
    info: StoreInfo, worker_idx: int, deadline: float, on_socket: Callable[[socket.socket], None] | None = None
) -> tuple[ControlChannel, Message]:
    """The worker's side: connect, authenticate both ways, say hello; returns the channel and the sender's ``welcome``.

    Blocks until the sender has met all the workers that it waits for.

    Args:
        info: Where the sender is.
        worker_idx: 0-based.
        deadline: On the monotonic clock, in seconds.
        on_socket: Given the socket as soon as there is one: to shut it down is to break off the wait.

    Raises:
        WeightSyncError: The sender refused this index, does not hold the key, or is gone.
        WeightSyncTimeout: The deadline (monotonic clock, seconds) passed first.
    """
    where = f"the sender at {info['host']} port {info['port']}"
    key = bytes.fromhex(info["authkey"])
    started = time.monotonic()
    try:
        sock = _connect_locally(info) or socket.create_connection(
            (info["host"], info["port"]), timeout=max(0.01, deadline - started)
        )
        try:
            if on_socket is not None:
                on_socket(sock)
            greeting = _read_exactly(sock, len(_MAGIC) + _NONCE, deadline)
            if not greeting.startswith(_MAGIC):
                raise WeightSyncError(f"worker {worker_idx}: {where} does not speak this protocol")
            theirs, ours = greeting[len(_MAGIC) :], os.urandom(_NONCE)
            sock.sendall(ours + _mac(key, b"worker", theirs, ours))
            if not hmac.compare_digest(_read_exactly(sock, _MAC, deadline), _mac(key, b"sender", theirs, ours)):
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


def _is_wildcard(host: str) -> bool:
    try:
        # The resolver reads more as 0.0.0.0 than ipaddress does: "0", "0x0", "000.0.0.0".
        host = str(socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)[0][4][0])
    except OSError:  # a name
        return False
    address = ipaddress.ip_address(host)
    return (getattr(address, "ipv4_mapped", None) or address).is_unspecified


def _connect_locally(info: StoreInfo) -> socket.socket | None:
    """A connection to the sender's Unix socket; ``None`` on another host, or in another network namespace."""
    name = info.get("local", "")
    if not name or sys.platform != "linux":
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(f"\0{name}")
        if _is_of_this_user(sock):
            return sock
    except OSError:
        pass
    sock.close()
    return None


def _is_of_this_user(sock: socket.socket) -> bool:
    """Whether the other end of a Unix socket runs as this user (or as root); other sockets cannot tell."""
    if sock.family != socket.AF_UNIX or sys.platform != "linux":
        return True
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user in (os.getuid(), 0)


def _mac(key: bytes, role: bytes, sender_nonce: bytes, worker_nonce: bytes) -> bytes:
    return hmac.digest(key, b"lightning_weightsync/1 " + role + sender_nonce + worker_nonce, "sha256")


def _read_exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(max(0.01, deadline - time.monotonic()))
        chunk = sock.recv(size - len(data))
        if not chunk:
            raise ConnectionError("the connection was closed during the handshake (is the key this run's?)")
        data += chunk
    return data


def _drop(selector: selectors.BaseSelector, client: _Client) -> None:
    selector.unregister(client.sock)
    client.sock.close()
