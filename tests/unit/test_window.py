"""A range of addresses in which one memory file after another is shown."""

import os

import pytest
import torch

from lightning_weightsync.transports import window as window_module
from lightning_weightsync.transports.memory import create_memory_file, map_memory
from lightning_weightsync.transports.window import Window
from tests.helpers.sockets import num_descriptors

PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(params=["remap", "copy"], autouse=True)
def platform(request, monkeypatch):
    """With and without ``mremap``, which not every platform has."""
    if request.param == "copy":
        monkeypatch.setattr(window_module, "move_pages", lambda *addresses: False)


@pytest.fixture
def files():
    descriptors = []

    def make(value, nbytes):
        descriptors.append(create_memory_file("test"))
        map_memory(descriptors[-1], nbytes).fill_(value)
        return descriptors[-1]

    yield make
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.parametrize("nbytes", [1, 100, PAGE, 3 * PAGE + 1])
def test_tensors_stay_and_what_they_hold_is_replaced(files, nbytes):
    window = Window(nbytes)
    assert not window.memory.any()
    view, address = window.memory[nbytes // 2 :], window.memory.data_ptr()
    for value in (1, 2, 3):
        window.show(files(value, nbytes))
        assert window.memory.unique().tolist() == view.unique().tolist() == [value]
    assert (window.memory.data_ptr(), window.moved) == (address, False)


def test_what_is_written_here_stays_here_and_goes_with_the_next_file(files):
    one, other = files(1, 2 * PAGE), files(2, 2 * PAGE)
    window, elsewhere = Window(2 * PAGE), Window(2 * PAGE)
    window.show(one)
    window.memory[7] = 9
    elsewhere.show(one)
    assert elsewhere.memory.unique().tolist() == [1]
    window.show(other)
    assert window.memory.unique().tolist() == [2]
    window.show(one)
    assert window.memory.unique().tolist() == [1]


def test_what_was_kept_aside_comes_back_with_what_was_written_to_it(files):
    one, other = files(1, 2 * PAGE), files(2, 2 * PAGE)
    window = Window(2 * PAGE)
    window.show(one)
    window.memory[PAGE + 7] = 9
    before = window.memory.clone()
    for _ in range(3):
        window.show(other, keep_aside=True)
        assert window.memory.unique().tolist() == [2]
        window.restore()
        assert torch.equal(window.memory, before)
    window.restore()  # nothing is aside any more
    assert torch.equal(window.memory, before)


def test_what_was_in_the_window_before_any_file_comes_back_too(files):
    window = Window(PAGE)
    window.memory.fill_(5)
    window.show(files(1, PAGE), keep_aside=True)
    window.restore()
    assert window.memory.unique().tolist() == [5]


def test_what_was_dropped_does_not_come_back(files):
    window = Window(PAGE)
    window.show(files(1, PAGE), keep_aside=True)
    window.drop_aside()
    window.restore()
    assert window.memory.unique().tolist() == [1]


def test_the_addresses_outlive_the_window_and_the_file(files):
    window = Window(PAGE)
    descriptor = os.dup(files(4, PAGE))
    window.show(descriptor)
    os.close(descriptor)
    view = window.memory[:5]
    del window
    assert view.tolist() == [4] * 5


def test_a_window_whose_tensors_were_moved_to_shared_memory_says_so():
    window = Window(PAGE)
    window.memory[10:20].share_memory_()
    assert window.moved


def test_a_file_that_cannot_be_mapped_is_an_error():
    reading, writing = os.pipe()
    with pytest.raises(OSError, match=f"{PAGE} bytes cannot be mapped"):
        Window(PAGE).show(reading)
    os.close(reading)
    os.close(writing)


def test_a_window_of_no_bytes_shows_anything():
    window = Window(0)
    window.show(-1, keep_aside=True)
    window.restore()
    assert (window.memory.numel(), window.moved) == (0, False)


def test_a_thousand_windows_and_switches_leave_nothing(files):
    one, other = files(1, 64 * PAGE), files(2, 64 * PAGE)
    descriptors, maps = num_descriptors(), _num_maps()
    for _ in range(1000):
        window = Window(64 * PAGE)
        for descriptor in (one, other):
            window.show(descriptor, keep_aside=True)
        window.restore()
        window.show(other, keep_aside=True)
        window.drop_aside()
    assert num_descriptors() == descriptors
    assert _num_maps() < maps + 50


def _num_maps():
    try:
        with open("/proc/self/maps") as file:
            return sum(1 for _ in file)
    except FileNotFoundError:
        return 0
