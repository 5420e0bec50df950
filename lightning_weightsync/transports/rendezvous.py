"""Whom does a sender let in? Those who hold the run's key: a listening socket, and a mutual challenge.

The sender listens on one address, the loopback interface unless told otherwise, on a port that the kernel picks; and,
where workers of its host may share memory with it, on a Unix socket without a file (Linux' abstract namespace).
Before any message is read, both ends prove that they hold the run's key (HMAC-SHA256 over two fresh nonces). The
sender waits on all clients at once, so one that is silent, slow or babbling delays nobody and is dropped after
``HANDSHAKE_SECONDS``, or as soon as there are too many; a flood of them delays a worker, and does not keep it out.
The worker's side is in ``dialling``.
"""

from __future__ import annotations

import contextlib
import errno
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

from lightning_weightsync.errors import WeightSyncTimeout
from lightning_weightsync.transports.posting import PostingChannel

HANDSHAKE_SECONDS = 10.0
_MAX_PENDING = 512
_AT_ONCE = 64
_QUEUE = 1024
_STRANGERS_BUFFER, _BUFFER = 1 << 12, 1 << 17
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
# accept(2) on Linux tells errors of the network that the new connection has met already; EBADF: closed by `close`.
_NOBODY = {errno.EBADF} | {
    getattr(errno, name)
    for name in (
        "ENETDOWN", "EPROTO", "ENOPROTOOPT", "EHOSTDOWN", "ENONET", "EHOSTUNREACH", "EOPNOTSUPP", "ENETUNREACH"
    )
    if hasattr(errno, name)
}  # fmt: skip
MAGIC = b"LWS1"
NONCE = 32
MAC = hashlib.sha256().digest_size


class StoreInfo(TypedDict):
    """Where a sender can be reached, and the key that lets one in. Keep it as secret as the run.

    ``local`` names the Unix socket for workers of the sender's host; it is empty where there is none.
    ``connect_timeout`` is how long the sender waits for all of them, in seconds.
    """

    host: str
    port: int
    authkey: str
    local: NotRequired[str]
    connect_timeout: NotRequired[float]


Proofs = tuple[bytes, bytes]
"""What the sender, and what the worker, shows the other to prove that it holds the run's key."""


@dataclass
class Joined:
    """A worker that has authenticated and said hello."""

    worker_idx: int
    pid: int
    channel: PostingChannel
    local: bool


@dataclass
class _Client:
    """A connection that has not yet said hello."""

    sock: socket.socket
    nonce: bytes
    deadline: float
    received: bytearray = field(default_factory=bytearray)
    channel: PostingChannel | None = None


_Pending = dict[socket.socket, _Client]
"""Those who have not said hello, in the order in which they came."""


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
    """A listening TCP socket on ``host``, on a port that the kernel picks.

    Raises:
        ValueError: See ``check_host``.
        OSError: The name does not resolve, or is no address of this machine.
    """
    check_host(host)
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # What strangers send while nobody accepts is kept by the system, for each of them; workers get more later.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _STRANGERS_BUFFER)
        listener.bind(address)
        listener.listen(_QUEUE)
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
            self._local_listener.listen(_QUEUE)
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
        pending: _Pending = {}
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
                            self._take_new(selector, key.fileobj, pending)
                        elif key.data.sock in pending:
                            self._advance(selector, key.data, pending, missing, joined)
                    while pending and next(iter(pending.values())).deadline <= time.monotonic():
                        _drop_oldest(selector, pending)
            except BaseException:
                for member in joined.values():
                    member.channel.close()
                raise
            finally:
                for sock in pending:
                    sock.close()
        return joined

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()
        if self._local_listener is not None:
            self._local_listener.close()

    def _take_new(self, selector: selectors.BaseSelector, listener: Any, pending: _Pending) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                if error.errno in _NOBODY:
                    return
                if error.errno not in _OUT_OF_DESCRIPTORS or not pending:
                    raise
                _drop_oldest(selector, pending)
                continue
            if not is_of_this_user(sock):
                sock.close()
                continue
            sock.setblocking(False)
            client = _Client(sock, os.urandom(NONCE), time.monotonic() + HANDSHAKE_SECONDS)
            selector.register(sock, selectors.EVENT_READ, client)
            pending[sock] = client
            if len(pending) > _MAX_PENDING:
                _drop_oldest(selector, pending)
            try:
                sock.send(MAGIC + client.nonce)  # a fresh socket has room for 36 bytes
            except OSError:
                _drop(selector, client, pending)

    def _advance(
        self,
        selector: selectors.BaseSelector,
        client: _Client,
        pending: _Pending,
        missing: set[int],
        joined: dict[int, Joined],
    ) -> None:
        try:
            if client.channel is None:
                self._authenticate(client)
            message = client.channel.poll() if client.channel is not None else None
        except OSError:
            _drop(selector, client, pending)
            return
        if message is None or client.channel is None:
            return
        selector.unregister(client.sock)
        del pending[client.sock]
        index = int(message["worker_idx"]) if message.kind == "hello" else -1
        if index in missing and index not in joined:
            joined[index] = Joined(index, int(message["pid"]), client.channel, client.sock.family == socket.AF_UNIX)
            return
        with contextlib.suppress(OSError):
            client.channel.send(
                "refused",
                reason=f"worker_idx={index} is not expected now, but {sorted(missing - joined.keys())}",
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
        if len(client.received) < NONCE + MAC:
            return
        nonce, shown = bytes(client.received[:NONCE]), bytes(client.received[NONCE : NONCE + MAC])
        if not hmac.compare_digest(shown, mac(self._key, b"worker", client.nonce, nonce)):
            raise ConnectionError("wrong key")
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        client.sock.send(mac(self._key, b"sender", client.nonce, nonce))
        client.channel = PostingChannel(client.sock)
        client.channel.feed(bytes(client.received[NONCE + MAC :]))


def proofs(info: StoreInfo, name: str) -> Proofs:
    """What the two ends show each other over a second connection of theirs.

    Args:
        info: Holds the run's key.
        name: Of that connection; never used twice.
    """
    key, context = bytes.fromhex(info["authkey"]), name.encode()
    return mac(key, b"sender of ", context, b""), mac(key, b"worker of ", context, b"")


def _is_wildcard(host: str) -> bool:
    try:
        # The resolver reads more as 0.0.0.0 than ipaddress does: "0", "0x0", "000.0.0.0".
        host = str(socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)[0][4][0])
    except OSError:  # a name
        return False
    address = ipaddress.ip_address(host)
    return (getattr(address, "ipv4_mapped", None) or address).is_unspecified


def is_of_this_user(sock: socket.socket) -> bool:
    """Whether the other end of a Unix socket runs as this user (or as root); other sockets cannot tell."""
    if sock.family != socket.AF_UNIX or sys.platform != "linux":
        return True
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user in (os.getuid(), 0)


def mac(key: bytes, role: bytes, sender_nonce: bytes, worker_nonce: bytes) -> bytes:
    """What proves, for these two nonces, that an end in this role holds the key."""
    return hmac.digest(key, b"lightning_weightsync/1 " + role + sender_nonce + worker_nonce, "sha256")


def _drop(selector: selectors.BaseSelector, client: _Client, pending: _Pending) -> None:
    selector.unregister(client.sock)
    del pending[client.sock]
    client.sock.close()


def _drop_oldest(selector: selectors.BaseSelector, pending: _Pending) -> None:
    _drop(selector, next(iter(pending.values())), pending)
