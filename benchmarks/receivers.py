"""What is at the other end of a measured push? Real processes, one per receiver, that end whatever happens to us.

They come from a fork server that has imported torch and the schemes, so that 64 of them are there in seconds. Each
ends when its pipe to us does (we closed it, or were killed), a stopped one with the fork server. Ctrl-C is our business
alone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn

from benchmarks.holdings import memory
from benchmarks.models import KINDS, checksum, leaves
from benchmarks.parent import end_with_parent

_PRELOADED = ["tensordict", "lightning_weightsync.schemes.distributed", "benchmarks.receivers"]
_SECONDS_TO_END = 10.0
_SECONDS_TO_ANSWER = 120.0


class ReceivingEnd(Protocol):
    """What a receiver does with its model; pickled into its process."""

    def serve(self, model: nn.Module) -> None:
        """Connect and take pushes until the sender goes."""
        ...


class Receivers:
    """A group of receiver processes. As a context manager, it stops them on every way out.

    Args:
        kind: Name of the model that each of them builds.
        ends: What each of them does.
        preload: Further modules that the fork server imports; one that is not installed is skipped.
    """

    def __init__(self, kind: str, ends: Sequence[ReceivingEnd], preload: Iterable[str] = ()) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*_PRELOADED, *preload])  # heeded by the first group
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        try:
            for end in ends:
                ours, theirs = context.Pipe()
                self._pipes.append(ours)
                process = context.Process(target=_receiver, args=(theirs, kind, end), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Of the receivers, in order."""
        return [process.pid for process in self._processes if process.pid is not None]

    def ask(self, question: str) -> list[int]:
        """What each receiver answers: ``"checksum"`` of its leaves; ``"private"``, the growth of its private memory.

        ``private`` is in bytes, since before it built its model, and after it has read every leaf.

        Raises:
            RuntimeError: A receiver has ended, or is silent.
        """
        answers = []
        try:
            for pipe in self._pipes:
                pipe.send(question)
            for index, pipe in enumerate(self._pipes):
                if not pipe.poll(_SECONDS_TO_ANSWER):
                    raise RuntimeError(f"receiver {index} did not answer {question!r} in {_SECONDS_TO_ANSWER:.0f} s")
                answers.append(int(pipe.recv()))
        except (EOFError, OSError) as error:
            raise RuntimeError(f"a receiver has ended before it answered {question!r}") from error
        return answers

    def close(self) -> None:
        """Stop all of them; bounded, idempotent."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + _SECONDS_TO_END
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._processes.clear()
        self._pipes.clear()

    def __enter__(self) -> Receivers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


def settle(pids: Iterable[int], seconds: float = 10.0) -> None:
    """Wait until these processes sleep: what one does after an acknowledgement is not to slow down the next push.

    Args:
        pids: Of the processes; every thread of them counts.
        seconds: Go on after that anyway. Where there is no ``/proc``, this waits for a tenth of a second.
    """
    if not Path("/proc/self/task").exists():
        time.sleep(0.1)
        return
    pids, deadline, quiet = list(pids), time.monotonic() + seconds, 0
    while quiet < 2 and time.monotonic() < deadline:
        quiet = 0 if any(_is_running(pid) for pid in pids) else quiet + 1
        time.sleep(0.001)


def _is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):  # it, or one of its threads, has just ended
        for thread in os.scandir(f"/proc/{pid}/task"):
            if Path(thread.path, "stat").read_text().rpartition(")")[2].split()[0] in "RD":
                return True
    return False


def _receiver(pipe: Connection, kind: str, end: ReceivingEnd) -> None:
    """The receiver's main thread serves; a second one answers questions, and ends the process with the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":  # the pipe's end does not wake a stopped process, SIGKILL does
        end_with_parent()
        _let_fork_server_end()
    torch.set_num_threads(1)
    before = _private_bytes()
    model = KINDS[kind].build()
    threading.Thread(target=_answer, args=(pipe, model, before), daemon=True).start()
    try:
        end.serve(model)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # libraries that are not ours may block in their exit handlers


def _let_fork_server_end() -> None:
    """Every child holds the pipe whose end tells the fork server to leave, so a stopped one would keep it for ever."""
    server = vars(forkserver)["_forkserver"]
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def _answer(pipe: Connection, model: nn.Module, before: int) -> None:
    answers: dict[str, Callable[[], Any]] = {
        "checksum": lambda: checksum(leaves(model)),
        "private": lambda: _private_bytes_with_all_read(model) - before,
    }
    try:
        while True:
            pipe.send(answers[pipe.recv()]())
    except (EOFError, OSError):
        os._exit(0)


def _private_bytes_with_all_read(model: nn.Module) -> int:
    for leaf in leaves(model):
        leaf.sum()  # pages that were only mapped so far are in use now
    return _private_bytes()


def _private_bytes() -> int:
    """Memory of this process that no other shares; 0 where the kernel does not say."""
    try:
        return memory(os.getpid())[1]
    except OSError:
        return 0
