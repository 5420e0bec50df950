"""What does a process hold? Memory, memory files, other descriptors and threads, as ``/proc`` tells (Linux)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
_MEMORY_FILES_OF_OURS = "/memfd:lightning_weightsync"


@dataclass(frozen=True)
class Holdings:
    """What one process holds.

    Attributes:
        resident: MiB of memory.
        private: Those MiB that no other process shares.
        memory_files: Descriptors of slots; a mapped one has two, because Python's ``mmap`` keeps one of its own.
        descriptors: All others.
        threads: Native ones too.
    """

    resident: float
    private: float
    memory_files: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Holdings:
        """Of a process of ours."""
        resident, private = memory(pid)
        files = [_target(descriptor) for descriptor in Path(f"/proc/{pid}/fd").iterdir()]
        memory_files = sum(file.startswith(_MEMORY_FILES_OF_OURS) for file in files)
        threads = len(os.listdir(f"/proc/{pid}/task"))
        return cls(resident / MIB, private / MIB, memory_files, len(files) - memory_files, threads)


def memory(pid: int) -> tuple[int, int]:
    """Bytes of a process: those that are resident, and those of them that no other shares.

    Raises:
        OSError: There is no such process, or the kernel does not say.
    """
    resident, private = 0, 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
        name, size, *_ = line.split()
        private += 1024 * int(size) if name.startswith("Private_") else 0
        resident += 1024 * int(size) if name == "Rss:" else 0
    return resident, private


def _target(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except FileNotFoundError:  # that of looking
        return ""
