"""How can a slot leave while it is still being written? In order: its bytes are followed as they come.

One thread writes, and one passes on what is there: gloo sends in the thread that asks it to. A transport whose turn
comes earlier or later, in whichever thread, gets what is there at once and the rest as it comes. If the writing fails,
those who follow are left with a part of it: end their links.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from lightning_weightsync.transports.base import TransferFailed


class Filling:
    """The writing of one slot.

    Args:
        nbytes: Of the slot.
        copy: Writes all of it, from the first byte to the last; yields, again and again, how many are there.
    """

    def __init__(self, nbytes: int, copy: Callable[[], Iterator[int]]) -> None:
        self._nbytes = nbytes
        self._copy = copy
        self._written = 0
        self._ended = False
        self._changed = threading.Condition()
        self._passed_on = 0
        self._followers: list[Callable[[int], None]] = []
        self._following = threading.Lock()

    def run(self) -> None:
        """Write the slot, in the calling thread; returns when all that follow have been told.

        May be called again: what is written already is not written again.

        Raises:
            Exception: What the copy raised; the slot is not complete then.
        """
        self._ended = False
        helper = threading.Thread(target=self._pass_on, name="weight-sync-follow", daemon=True)
        helper.start()
        try:
            self._write()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify()
            helper.join()

    def follow(self, take: Callable[[int], None]) -> None:
        """Have ``take`` called with the number of bytes that are there, now and whenever there are more.

        Raises:
            TransferFailed: ``take`` does, now; later it is only not called any more.
        """
        with self._following:
            take(self._passed_on)
            if self._passed_on < self._nbytes:
                self._followers.append(take)

    def _write(self) -> None:
        for there in self._copy():
            with self._changed:
                self._written = max(self._written, there)
                self._changed.notify()
        with self._changed:
            self._written = self._nbytes
            self._changed.notify()
        self._copy = _nothing  # it holds the weights that were copied

    def _pass_on(self) -> None:
        while self._passed_on < self._nbytes:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._written > self._passed_on)
                there = self._written
            if there == self._passed_on:  # the writing has ended, and failed
                return
            with self._following:
                self._passed_on = there
                following, self._followers = self._followers, []
                for take in following:
                    with contextlib.suppress(TransferFailed):  # its own link ends by that
                        take(there)
                        if there < self._nbytes:
                            self._followers.append(take)


def _nothing() -> Iterator[int]:
    yield from ()
