"""What can go wrong at run time, and who is to blame: every fault names its workers.

Misconfiguration is not here: it raises ``ValueError``, ``TypeError`` or Lightning's ``MisconfigurationException``
before anything is started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class WeightSyncError(RuntimeError):
    """A push or a connection failed for at least one worker.

    Args:
        message: What happened, to whom, in which phase, after how many seconds.
        failed: Each failing ``worker_idx`` and its cause. Workers that are not named were served.
    """

    def __init__(self, message: str, failed: Mapping[int, Exception] | None = None) -> None:
        super().__init__(message)
        self.failed: dict[int, Exception] = dict(failed or {})

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.failed), self.__dict__)


class LayoutMismatchError(WeightSyncError):
    """The two sides do not hold the same leaves; raised before any byte of them is applied.

    Args:
        message: The sentence shown to the user; it lists the leaves.
        failed: Each failing ``worker_idx`` and its cause, where the error concerns workers.
        missing: Leaves that the receiver has and the sender does not.
        unexpected: Leaves that the sender has and the receiver does not.
        mismatched: Leaves that both have, with another shape or dtype: name -> "sender … , receiver …".
    """

    def __init__(
        self,
        message: str,
        failed: Mapping[int, Exception] | None = None,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, failed)
        self.missing = list(missing)
        self.unexpected = list(unexpected)
        self.mismatched = dict(mismatched or {})


class WeightSyncTimeout(WeightSyncError):
    """A deadline passed: ``connect_timeout``, ``timeout`` of a push, or ``heartbeat_timeout`` of a silent worker."""


class WorkerDied(WeightSyncError):
    """A worker process ended, or its end of the link was closed, without being asked to."""


class WorkerError(WeightSyncError):
    """Code in a worker raised (an environment, a policy, a factory, an applied hook); carries its traceback.

    Args:
        message: What raised, in which worker and phase.
        failed: Each failing ``worker_idx`` and its cause.
        remote_traceback: The worker's own traceback, as text.
    """

    def __init__(
        self, message: str, failed: Mapping[int, Exception] | None = None, *, remote_traceback: str = ""
    ) -> None:
        super().__init__(message, failed)
        self.remote_traceback = remote_traceback


class StaleVersionError(WeightSyncError):
    """A receiver was offered a (run, version) that is not newer than what it has applied."""


def explain(error: BaseException, note: str) -> None:
    """Say where an exception comes from, in its notes; its type and text stay."""
    error.__notes__ = [*getattr(error, "__notes__", []), note]  # before Python 3.11, a worker's error alone shows it
