"""Where does a worker's log record go? To the trainer's logging, with the worker's index, and at nobody's cost.

    worker: root logger -> Forwarder -> `log` on the job channel -> trainer: the logger of the same name

The trainer reads it when it next waits for the worker, or stops it. A worker never waits to be read, and sends no more
than a steady few: what is dropped is counted, and told with the next record.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from lightning_weightsync.transports.control import ChannelClosed, ControlChannel, Message

BURST, PER_SECOND = 50, 10.0
"""So many records may come at once (a socket holds a few more), and so many per second."""

_LONGEST = 8192
"""Characters of one record."""


class Forwarder(logging.Handler):
    """A handler that sends records over the job channel, formatted, tracebacks included.

    Args:
        jobs: To the parent.
        clock: Seconds that never go back.
    """

    def __init__(self, jobs: ControlChannel, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._jobs = jobs
        self._clock = clock
        self._budget, self._at = float(BURST), clock()
        self._dropped = 0
        self._pid = os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        """Send it, or count it as dropped; never blocks, and raises nothing of its own."""
        if os.getpid() != self._pid:  # an environment's forked child, which shares the channel
            logging.lastResort.emit(record)  # type: ignore[union-attr]
            return
        now = self._clock()
        self._budget = min(BURST, self._budget + (now - self._at) * PER_SECOND)
        self._at = now
        if self._budget < 1.0 or not self._sent(record):
            self._dropped += 1
            return
        self._budget -= 1.0
        self._dropped = 0

    def _sent(self, record: logging.LogRecord) -> bool:
        try:
            fields = {"level": record.levelno, "name": record.name, "message": self.format(record)[:_LONGEST]}
            return self._jobs.try_send("log", dropped=self._dropped, **fields)
        except ChannelClosed:
            return False
        except Exception:
            self.handleError(record)
            return False


def forward(jobs: ControlChannel, level: int) -> None:
    """Have this process's records forwarded, from the parent's level on. In a worker, once."""
    root = logging.getLogger()
    root.setLevel(level)
    root.addHandler(Forwarder(jobs))


def hand_on(worker_idx: int, message: Message) -> None:
    """Log in the trainer what a worker has sent, as ``[worker 0] …``; ``worker_idx`` is an attribute of the record."""
    extra = {"worker_idx": worker_idx}
    logger = logging.getLogger(message["name"])
    if message["dropped"]:
        rate = f"more than {PER_SECOND:.0f} a second"
        logger.warning(f"[worker {worker_idx}] {message['dropped']} log records were dropped ({rate})", extra=extra)
    logger.log(message["level"], "[worker %d] %s", worker_idx, message["message"], extra=extra)
