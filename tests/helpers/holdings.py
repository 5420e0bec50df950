"""What does a process hold that it should have given back? Threads, listening ports, file descriptors (Linux)."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

_LISTEN = "0A"
_NATIVE_THREADS_OF_OURS = ("gloo", "pt_gloo", "pt_tcpstore")


class Holdings(NamedTuple):
    """What the calling process holds."""

    threads: tuple[str, ...]
    ports: tuple[str, ...]
    descriptors: tuple[str, ...]


def holdings() -> Holdings:
    """Python threads, native threads of gloo and of stores, listening TCP addresses, kinds of open descriptors."""
    links = _descriptors()
    inodes = {link.removeprefix("socket:[").removesuffix("]") for link in links.values()}
    ports = [row[1] for row in _tcp_rows() if row[3] == _LISTEN and row[9] in inodes]
    python = [thread.name for thread in threading.enumerate()]
    native = [name for name in _native_threads() if name.startswith(_NATIVE_THREADS_OF_OURS)]
    kinds = [link.split(":")[0] for link in links.values()]
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


def resident_bytes() -> int:
    """Physical memory of the calling process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _descriptors() -> dict[int, str]:
    links = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            links[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return links


def _tcp_rows() -> list[list[str]]:
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    return [row.split() for table in tables if table.exists() for row in table.read_text().splitlines()[1:]]


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
