import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from lightning_weightsync.transports.memory import create_memory_file, map_memory


@pytest.fixture(params=["memfd", "temporary file"])
def create(request, monkeypatch):
    """Makes memory files as a platform with, and as one without ``memfd_create``; closes them afterwards."""
    if request.param == "memfd":
        if not hasattr(os, "memfd_create"):
            pytest.skip("this platform has no memfd_create")
    else:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    made = []

    def make(label="weights"):
        made.append(create_memory_file(label))
        return made[-1]

    yield make
    for descriptor in made:
        os.close(descriptor)


@contextmanager
def nothing_new_in(*folders):
    before = {folder: set(os.listdir(folder)) for folder in folders if os.path.isdir(folder)}
    yield
    assert [set(os.listdir(folder)) - names for folder, names in before.items()] == [set()] * len(before)


def test_a_new_memory_file_is_empty_has_no_name_and_is_not_inherited(create, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with nothing_new_in("/dev/shm"):
        descriptor = create()
        found = os.fstat(descriptor)
        assert (found.st_size, found.st_nlink) == (0, 0)
        assert not os.get_inheritable(descriptor)
        assert os.listdir(tmp_path) == []


def test_two_memory_files_of_one_label_are_two_files(create):
    first, second = create("slot"), create("slot")
    map_memory(first, 8).fill_(1)
    assert map_memory(second, 8).tolist() == [0] * 8


def test_the_file_grows_to_what_is_mapped_and_never_shrinks(create):
    descriptor = create()
    assert map_memory(descriptor, 100).tolist() == [0] * 100
    assert os.fstat(descriptor).st_size == 100
    assert map_memory(descriptor, 10).numel() == 10
    assert os.fstat(descriptor).st_size == 100


def test_mappings_of_one_file_see_each_others_writes(create):
    descriptor = create()
    whole, head = map_memory(descriptor, 8192), map_memory(descriptor, 16)
    assert (whole.dtype, whole.shape, head.shape) == (torch.uint8, (8192,), (16,))
    whole[3], head[4] = 7, 9
    assert (head[3].item(), whole[4].item()) == (7, 9)
    whole[8191] = 5
    assert map_memory(descriptor, 8192)[8191].item() == 5


def test_another_process_that_inherits_the_descriptor_sees_and_writes_the_same_bytes(create):
    descriptor = create()
    memory = map_memory(descriptor, 4096)
    memory[:3] = torch.tensor([1, 2, 250], dtype=torch.uint8)
    code = (
        "import mmap, sys\n"
        f"memory = mmap.mmap({descriptor}, 4096)\n"
        "assert bytes(memory[:3]) == bytes([1, 2, 250])\n"
        "memory[4095] = 77\n"
    )
    result = subprocess.run(
        [sys.executable, "-S", "-c", code], pass_fds=[descriptor], capture_output=True, text=True, timeout=30
    )
    assert result.returncode == 0, result.stderr
    assert memory[4095].item() == 77


def test_a_mapping_outlives_its_descriptor_and_views_outlive_the_mapping():
    descriptor = create_memory_file("short-lived")
    memory = map_memory(descriptor, 64)
    os.close(descriptor)
    view = memory[8:16].view(torch.float64)
    del memory
    view.fill_(1.5)
    assert view.tolist() == [1.5]


def test_a_mapping_gives_its_descriptor_back_when_the_last_view_is_gone(create):
    descriptor = create()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        view = map_memory(descriptor, 4096)[1:]
        del view
    assert len(os.listdir("/proc/self/fd")) == before


def test_mapping_nothing_gives_an_empty_tensor(create):
    descriptor = create()
    memory = map_memory(descriptor, 0)
    assert (memory.shape, memory.dtype) == ((0,), torch.uint8)
    assert os.fstat(descriptor).st_size == 0
