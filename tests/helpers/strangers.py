"""What do those do who can connect to a process and should not? A flood.

Run as a program, it is one: ``python -m tests.helpers.strangers CONNECTIONS NOISE BEFORE TARGET...``.
"""

from __future__ import annotations

import contextlib
import random
import resource
import select
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from types import TracebackType

Address = tuple[str, int]


class Flood:
    """A process that connects a thousand times to each address, sends a megabyte of noise and more, and stays.

    Args:
        addresses: TCP addresses, or names of Unix sockets.
        connections: To each of them.
        noise: Bytes that one more connection sends to each of them.
        before: What each connection sends first.
        for_ever: Whether it comes again and again, instead of once.
    """

    def __init__(
        self,
        addresses: Iterable[Address | str],
        *,
        connections: int = 1000,
        noise: int = 1 << 20,
        before: bytes = b"",
        for_ever: bool = False,
    ) -> None:
        targets = [item if isinstance(item, str) else f"{item[0]} {item[1]}" for item in addresses]
        assert targets
        arguments = [str(connections), str(noise), before.hex() or "-", "again" if for_ever else "once", *targets]
        self._process = subprocess.Popen(
            [sys.executable, "-S", __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def under_way(self) -> bool:
        """Whether it is still connecting, or sending."""
        assert self._process.stdout is not None
        return not select.select([self._process.stdout], [], [], 0)[0]

    def wait(self) -> list[int]:
        """How many connections were accepted by the system at each address, when all were tried."""
        assert self._process.stdout is not None
        return [int(number) for number in self._process.stdout.readline().split()]

    def close(self) -> None:
        """End it, and its connections."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Flood:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


def _dial(target: str) -> socket.socket:
    """A connection that is being made: where nobody answers, it never is."""
    host, _, port = target.partition(" ")
    family = socket.AF_UNIX if not port else socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    sock.setblocking(False)
    address = f"\0{host[1:]}" if not port else (host, int(port))
    with contextlib.suppress(OSError):
        sock.connect(address)
    return sock


def _is_connected(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


def _shower(sock: socket.socket, noise: bytes) -> Iterator[None]:
    for start in range(0, len(noise), 1 << 14):
        with contextlib.suppress(OSError):
            poller = select.poll()  # select.select ends at descriptor 1024
            poller.register(sock, select.POLLOUT)
            poller.poll(20)
            sock.send(noise[start : start + (1 << 14)])
        yield


def _main(connections: int, noise: int, before: bytes, again: bool, targets: list[str]) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    generator = random.Random(5)
    while True:
        held: dict[str, list[socket.socket]] = {target: [] for target in targets}
        for _ in range(connections):
            for target, sockets in held.items():
                sockets.append(_dial(target))
                with contextlib.suppress(OSError):
                    sockets[-1].send(before + generator.randbytes(generator.choice([0, 1, 8, 36, 64, 100])))
        showers = [_shower(_dial(target), before + generator.randbytes(noise)) for target in targets]
        for _ in zip(*showers, strict=True):
            pass
        if not again:
            print(*[sum(map(_is_connected, sockets)) for sockets in held.values()], flush=True)
            sys.stdin.read()  # hold them
        for sockets in held.values():
            for sock in sockets:
                sock.close()


if __name__ == "__main__":
    _connections, _noise, _before, _again, *_targets = sys.argv[1:]
    _before_bytes = b"" if _before == "-" else bytes.fromhex(_before)
    _main(int(_connections), int(_noise), _before_bytes, _again == "again", _targets)
