"""How does a process end with the one that started it, stopped or not? By a signal that the kernel sends (Linux)."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """SIGKILL for this process when its parent ends. Elsewhere than on Linux this does nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
