"""Can this rank go on? Where it cannot, and neither it nor Lightning notices, it is ended.

Nothing here talks to other ranks: each has workers of its own and pushes at its own pace.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from lightning_weightsync.errors import WeightSyncError

log = logging.getLogger(__name__)

GRACE_IN_SIGTERM_HANDLER = 5.0
"""Seconds that a rank may be in Lightning's handler of SIGTERM, which waits for other ranks."""

_LOOK_SECONDS = 0.5


class RankWatch:
    """Notices that a rank cannot go on, where neither the rank nor Lightning does.

    * **The process that has started it is gone**: rank 0 under ``ddp``, the agent under ``torchrun``. Lightning ends
      rank 0 when another rank has failed, but nothing ends the others when rank 0 has: one that waits for its own
      workers waits on. ``look`` raises then, for those who wait.
    * **SIGTERM in the middle of a collective operation**: Lightning's handler makes a collective of its own, waits in
      it for another rank, and that one waits for this rank in the operation that was interrupted. A thread looks twice
      a second, and ends a process whose main thread has been in that handler for ``GRACE_IN_SIGTERM_HANDLER`` seconds:
      no Python code runs there any more. Its workers end with it.
    """

    def __init__(self) -> None:
        self._parent = 0
        self._stopped = threading.Event()

    @classmethod
    def start(cls, local_rank: int, world_size: int) -> RankWatch:
        """Watch this process; with one rank there is nothing to watch."""
        watch = cls()
        if world_size > 1:
            watch._parent = os.getppid() if local_rank > 0 and _parent_runs_this_script() else 0
            threading.Thread(target=watch._run, name="weight-sync-rank", daemon=True).start()
        return watch

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), ()  # another process is watched when it says so

    def look(self) -> None:
        """Raise if the parent is gone. To be called in training only: after it, ranks end one by one.

        Raises:
            WeightSyncError: It is; why, it has said itself.
        """
        if self._parent > 0 and os.getppid() != self._parent:
            raise WeightSyncError(f"the process that started this rank (pid {self._parent}) has ended: see there why")

    def stop(self) -> None:
        """Watch no longer; does not block."""
        self._stopped.set()

    def _run(self) -> None:
        since = 0.0
        while not self._stopped.wait(_LOOK_SECONDS):
            since = (since or time.monotonic()) if _in_sigterm_handler() else 0.0
            if since and time.monotonic() - since > GRACE_IN_SIGTERM_HANDLER:
                log.error(
                    "SIGTERM came in the middle of a collective operation: Lightning's handler of it waits for another "
                    "rank, which waits for this one. This rank ends now"
                )
                os._exit(128 + signal.SIGTERM)


def _in_sigterm_handler() -> bool:
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "_sigterm_notifier_fn":
            return True
        frame = frame.f_back
    return False


def _parent_runs_this_script() -> bool:
    """Whether this rank was started by another one, or by ``torchrun``; other launchers may well end before it."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    names = {os.path.basename(sys.argv[0])} | ({spec.name} if spec is not None else set())
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    except OSError:  # another user's, or no Linux
        return False
    return any(os.path.basename(part) in names for part in command)
