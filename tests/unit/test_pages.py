"""What is large lies in huge pages where the system gives them, and is the same memory where it does not."""

import mmap
import os
import re
from types import SimpleNamespace

import pytest
import torch

from lightning_weightsync.transports import pages
from lightning_weightsync.transports.memory import create_memory_file, map_memory
from lightning_weightsync.transports.pages import HUGE, map_at, prefault, reserve
from lightning_weightsync.transports.window import Window

SIZES = [1, 4096, HUGE - 1, HUGE, HUGE + 1, 3 * HUGE + 100]


@pytest.fixture
def file():
    descriptors = []

    def make():
        descriptors.append(create_memory_file("test"))
        return descriptors[-1]

    yield make
    for descriptor in descriptors:
        os.close(descriptor)


def huge_bytes(memory):
    """Of a mapping, what lies in huge pages."""
    address, found, mine = memory.data_ptr(), 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                start, end = (int(number, 16) for number in head.groups())
                mine = start < address + memory.numel() and address < end
            elif mine and re.match(r"(Shmem|File)PmdMapped:", line):
                found += int(line.split()[1]) << 10
    return found


@pytest.fixture
def huge(file):
    """A file in huge pages, and this process's mapping of it."""
    descriptor = file()
    memory = map_memory(descriptor, 4 * HUGE)
    prefault(memory, 10.0)
    if not huge_bytes(memory):
        pytest.skip("this system gives no huge pages to memory files")
    return descriptor, memory


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_range_is_zeros_of_that_size_where_huge_pages_can_lie(nbytes):
    memory = reserve(nbytes)
    assert memory.shape == (nbytes,) and memory.dtype == torch.uint8 and not memory.any()
    assert nbytes < HUGE or memory.data_ptr() % HUGE == 0
    assert memory.untyped_storage().data_ptr() == memory.data_ptr()
    memory.fill_(1)


def test_a_range_of_nothing():
    assert reserve(0).numel() == 0


def test_what_cannot_be_mapped_raises():
    memory = reserve(4096)
    with pytest.raises(OSError, match="4096 bytes cannot be mapped"):
        map_at(memory.data_ptr(), 4096, mmap.MAP_SHARED, -1)
    memory.fill_(1)


@pytest.mark.parametrize("seconds", [-1.0, 0.0, 10.0])
@pytest.mark.parametrize("nbytes", SIZES)
def test_prefaulted_memory_is_zeros_and_the_same_in_every_mapping(file, nbytes, seconds):
    descriptor = file()
    memory = map_memory(descriptor, nbytes).fill_(7)
    other, private = map_memory(descriptor, nbytes), map_memory(descriptor, nbytes, private=True)
    prefault(memory, seconds)
    assert not other.any() and not private.any()
    memory[-1] = 5
    assert other[-1] == private[-1] == 5
    private[0] = 9
    assert memory[0] == other[0] == (5 if nbytes == 1 else 0)


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_system_that_gives_no_huge_pages_is_asked_once_at_most(monkeypatch, platform):
    asked = []
    refusing = SimpleNamespace(madvise=lambda *arguments: asked.append(arguments) or -1)
    monkeypatch.setattr(pages, "_libc", refusing)
    monkeypatch.setattr(pages.sys, "platform", platform)
    memory = reserve(50 * HUGE).fill_(3)
    prefault(memory, 10.0)
    assert not memory.any() and len(asked) == (platform == "linux")


def test_it_is_asked_for_no_longer_than_allowed(monkeypatch):
    asked = []

    def madvise(*arguments):
        asked.append(arguments)
        return 0

    monkeypatch.setattr(pages, "_libc", SimpleNamespace(madvise=madvise))
    monkeypatch.setattr(pages, "time", SimpleNamespace(monotonic=lambda: 0.05 * len(asked)))  # each takes so long
    prefault(reserve(400 * HUGE), 0.06)
    assert len(asked) == 2


def test_another_process_or_window_sees_huge_pages_too(huge):
    descriptor, memory = huge
    assert huge_bytes(memory) == 4 * HUGE
    memory.copy_(torch.arange(4 * HUGE, dtype=torch.uint8))
    window = Window(4 * HUGE)
    window.show(descriptor)
    assert torch.equal(window.memory, memory)
    assert huge_bytes(window.memory) == 4 * HUGE


def test_what_is_written_in_a_window_on_huge_pages_stays_there(huge):
    descriptor, memory = huge
    memory.fill_(1)
    one, other = Window(4 * HUGE), Window(4 * HUGE)
    for window in (one, other):
        window.show(descriptor)
        assert window.memory.eq(1).all()
    one.memory[HUGE + 5] = 2
    assert other.memory.eq(1).all() and memory.eq(1).all()
    assert one.memory.sum(dtype=torch.int64) == 4 * HUGE + 1
    memory.fill_(3)
    assert other.memory.eq(3).all()
    one.show(descriptor, keep_aside=True)
    assert one.memory.eq(3).all()
    one.restore()
    assert one.memory[HUGE + 5] == 2
    one.show(descriptor)
    assert one.memory.eq(3).all()
