"""How do workers that sleep get a version? What they have mapped is written, and nobody is woken.

A push of a small model is bound by wake-ups: each worker's thread wakes, reads, switches and answers, to no other end
than that its next policy call uses the new weights. A worker of this host that is *at rest* can be spared that. It owes
no answer, is not in its gate, and has nothing of its own to do at a switch (a hook, a buffer to copy, an extra state);
its process is not stopped, and it has written none of its pages. So its slot is written again, under its lock
(``board``), and its next policy call finds other bytes there, and another version on the board.

It is all or nobody: unless every targeted worker is at rest, the push takes the usual way. What breaks in the middle
is mended by that, too: until it has arrived, a worker whose pages are mixed lets no policy call in.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence

from lightning_weightsync.transports.link import WorkerLink
from lightning_weightsync.transports.slots import Slot

AT_MOST = 4 << 20
"""Bytes of all models of a push; what is larger is worth a wake-up, and would keep policy calls waiting for longer."""


def seem_at_rest(links: Sequence[WorkerLink]) -> bool:
    """Whether it is worth while to look closer: their boards are open, and nobody is in their gates at this moment."""
    try:
        return all((board := link.board) is not None and board.is_open and board.lock() for link in links)
    finally:
        let_go(links)


def switch_at_rest(
    links: Sequence[WorkerLink],
    slots: Sequence[tuple[Slot, Slot]],
    version: int,
    about_to_write: Callable[[], None],
) -> list[int] | None:
    """Have all of these workers switch to a version in their sleep; does not block.

    Args:
        links: To the targeted workers; inside ``Dispatcher.at_rest``.
        slots: For each model the slot with the new bytes, and the one that all of these workers have mapped.
        version: Of the new bytes.
        about_to_write: Called when nothing stands in the way any more.

    Returns:
        The indices of those that have. Others have written to their own pages just then, and wait for the usual push.
        ``None``: it was not possible, and nothing has happened.

    Raises:
        BaseException: It was interrupted (Ctrl-C). All of them need the usual push, after ``let_go``.
    """
    boards = [board for link in links if (board := link.board) is not None]
    try:
        if len(boards) < len(links) or not all(board.lock() for board in boards):
            return None
        # With the lock in hand: what is found now stays as it is, but for code that asks no gate.
        if not all(board.is_open and board.may_write() for board in boards):
            return None
        about_to_write()
        for board in boards:
            board.begin()
        for new, mapped in slots:
            ctypes.memmove(mapped.memory.data_ptr(), new.memory.data_ptr(), new.memory.numel())
        switched = []
        for link, board in zip(links, boards, strict=True):
            if board.pages_are_shared():
                board.end(version)
                link.version = version
                switched.append(link.worker_idx)
        return switched
    finally:
        let_go(links)


def let_go(links: Iterable[WorkerLink]) -> None:
    """Unlock the boards of these workers, whether they are locked or not."""
    for link in links:
        if (board := link.board) is not None:
            board.unlock()
