"""What does a process hold? Threads, listening sockets, file descriptors, memory (Linux)."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import struct
import threading
import time
from pathlib import Path
from typing import NamedTuple

Address = tuple[str, int]

_LISTENS = "0A"
_UNIX_LISTENS = 1 << 16
_NATIVE_THREADS_OF_OURS = ("gloo", "pt_gloo", "pt_tcpstore")


class Holdings(NamedTuple):
    """What the calling process holds."""

    threads: tuple[str, ...]
    ports: tuple[str, ...]
    descriptors: tuple[str, ...]


def holdings() -> Holdings:
    """Python threads, native threads of gloo and of stores, listening TCP addresses, kinds of open descriptors."""
    ports = [f"{host}:{port}" for host, port in tcp_listeners(os.getpid())]
    python = [thread.name for thread in threading.enumerate()]
    native = [name for name in _native_threads() if name.startswith(_NATIVE_THREADS_OF_OURS)]
    kinds = [link.split(":")[0] for link in _descriptors(os.getpid()).values()]
    return Holdings(tuple(sorted(python + native)), tuple(sorted(ports)), tuple(sorted(kinds)))


def leftovers(before: Holdings, *, patience: float = 2.0) -> str:
    """What this process holds beyond ``before``, as text; empty if nothing.

    Looks again for up to ``patience`` seconds: native threads of a group that was given up need a moment to leave.
    """
    deadline = time.monotonic() + patience
    while True:
        now = holdings()
        extra = {field: _beyond(getattr(now, field), getattr(before, field)) for field in Holdings._fields}
        if not any(extra.values()):
            return ""
        if time.monotonic() > deadline:
            return "; ".join(f"{field}: {', '.join(items)}" for field, items in extra.items() if items)
        gc.collect()
        time.sleep(0.02)


def tcp_listeners(pid: int) -> set[Address]:
    """(host, port) of each TCP socket that a process listens on."""
    inodes, found = _socket_inodes(pid), set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        table = Path(f"/proc/{pid}/net/{name}")
        for row in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = row.split()
            if fields[3] == _LISTENS and fields[9] in inodes:
                words, _, port = fields[1].partition(":")
                packed = b"".join(struct.pack("=I", int(words[i : i + 8], 16)) for i in range(0, len(words), 8))
                found.add((socket.inet_ntop(family, packed), int(port, 16)))
    return found


def unix_listeners(pid: int) -> set[str]:
    """Names of the Unix sockets that a process listens on; abstract ones begin with ``@``."""
    inodes = _socket_inodes(pid)
    rows = [row.split() for row in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    return {row[7] for row in rows if len(row) > 7 and row[6] in inodes and int(row[3], 16) & _UNIX_LISTENS}


def num_sockets(pid: int) -> int:
    """How many sockets a process has open."""
    return len(_socket_inodes(pid))


def resident_bytes() -> int:
    """Physical memory of the calling process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _descriptors(pid: int) -> dict[int, str]:
    links = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            links[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
    return links


def _socket_inodes(pid: int) -> set[str]:
    links = _descriptors(pid).values()
    return {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")}


def _native_threads() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return names


def _beyond(now: tuple[str, ...], before: tuple[str, ...]) -> list[str]:
    rest = list(before)
    extra = []
    for item in now:
        if item in rest:
            rest.remove(item)
        else:
            extra.append(item)
    return extra


def memory_file_at(address: int) -> int | None:
    """The inode of the memory file that is mapped at an address of this process, if one is."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            extent, _, _, _, inode, *path = line.split()
            start, end = (int(part, 16) for part in extent.split("-"))
            if start <= address < end:
                return int(inode) if any("memfd" in part for part in path) else None
    return None
