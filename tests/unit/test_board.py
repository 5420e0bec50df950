"""The page that a sender shares with a worker, and its lock: here both ends are in one process."""

import contextlib
import mmap
import os
import resource
import signal
import subprocess
import sys

import pytest

from lightning_weightsync.transports import board as boards
from lightning_weightsync.transports.board import SenderBoard, WorkerBoard, make_board
from lightning_weightsync.transports.memory import create_memory_file, map_memory
from lightning_weightsync.transports.window import Window
from tests.helpers.sockets import num_descriptors
from tests.helpers.threads import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="boards are made on Linux only")


@pytest.fixture
def ends():
    sender = SenderBoard(os.getpid())
    worker = WorkerBoard(sender.descriptor)
    yield sender, worker
    sender.close()
    worker.close()


def test_either_end_keeps_the_other_one_out(ends):
    sender, worker = ends
    assert worker.lock() and worker.lock()
    assert not sender.lock()
    worker.unlock()
    assert sender.lock()
    assert not worker.lock()
    sender.unlock()
    assert worker.lock()


def test_the_lock_goes_with_its_owner(ends):
    sender, worker = ends
    assert worker.lock()
    worker.close()
    assert sender.lock()
    sender.close()
    sender.close()
    worker.close()
    assert not sender.lock()
    assert worker.lock()  # nobody is there to be kept out


def test_what_one_end_says_the_other_one_reads(ends):
    sender, worker = ends
    assert not sender.is_open
    worker.offer([])
    assert sender.is_open
    sender.begin()
    assert worker.is_mixed and not sender.is_open
    sender.end(7)
    assert (worker.version, worker.is_mixed, sender.is_open) == (7, False, True)
    worker.version = 8
    worker.offer(None)
    assert not sender.is_open


@pytest.mark.parametrize("nbytes", [1, 5000, 3 * mmap.PAGESIZE, 6 << 20])
def test_a_page_that_was_written_by_the_worker_shows(ends, nbytes):
    sender, worker = ends
    file = create_memory_file("test")
    slot = map_memory(file, nbytes)
    window = Window(nbytes)
    window.show(file)
    worker.offer([(window.memory.data_ptr(), nbytes)])
    assert sender.pages_are_shared()  # none has been looked at
    slot.fill_(1)
    assert window.memory.sum() == nbytes
    assert sender.pages_are_shared()
    slot.fill_(2)
    assert window.memory[-1] == 2  # they follow
    window.memory[nbytes // 2] = 9
    assert not sender.pages_are_shared()
    window.show(file)
    assert sender.pages_are_shared()
    assert not sender.is_open  # it may write again at any moment
    os.close(file)


def test_a_range_of_no_bytes_and_no_range_at_all(ends):
    sender, worker = ends
    worker.offer([])
    assert sender.may_write()
    worker.offer([(0, 0)])
    assert sender.may_write()


def test_ranges_that_cannot_be_are_not_written(ends):
    sender, worker = ends
    worker.offer([(-4096, 4096)])
    assert not sender.pages_are_shared()
    worker.offer([((1 << 62), 1 << 20)])
    assert not sender.pages_are_shared()
    worker.offer([(0, 1)] * 1000)
    assert not sender.is_open


@contextlib.contextmanager
def other_process():
    process = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=-1)
    try:
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_process_that_is_stopped_or_about_to_be_or_gone_is_not_written_to():
    with other_process() as process:
        board = SenderBoard(process.pid)
        assert board.may_write()
        for _ in range(20):
            process.send_signal(signal.SIGSTOP)
            assert not board.may_write()
            process.send_signal(signal.SIGCONT)
            eventually(board.may_write)
        process.kill()
        assert not board.may_write()
        process.wait()
        assert not board.may_write()
        board.close()


def test_a_board_that_cannot_be_had_is_none(monkeypatch):
    before = num_descriptors()
    assert make_board(0) is None
    assert make_board(2**22 + 1) is None
    monkeypatch.setattr(boards, "create_memory_file", lambda label: (_ for _ in ()).throw(OSError("no memory")))
    assert make_board(os.getpid()) is None
    assert num_descriptors() == before


def test_no_board_takes_the_last_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = num_descriptors()
    taken = make_board(os.getpid())
    assert taken is not None
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * taken.descriptor, hard))
    try:
        assert make_board(os.getpid()) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        taken.close()
    assert num_descriptors() == before


def test_a_forked_process_does_not_let_go_of_its_parents_lock(ends):
    sender, worker = ends
    assert worker.lock()
    child = os.fork()
    if child == 0:
        worker.unlock()
        worker.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert not sender.lock()
