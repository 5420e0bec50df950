"""Calls in other threads whose outcome is looked at, each within a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from tests.helpers.processes import wait_until


class Call:
    """``function(*args, **kwargs)`` in a daemon thread of its own."""

    def __init__(self, function: Callable[..., Any], *args: Any, name: str | None = None, **kwargs: Any) -> None:
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function, args, kwargs), name=name, daemon=True)
        self._thread.start()

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            self._value = function(*args, **kwargs)
        except BaseException as error:
            self._error = error

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self, timeout: float = 10.0) -> Any:
        """What the call returned; raises what it raised."""
        self._thread.join(timeout)
        assert not self.running, f"still running after {timeout} s"
        if self._error is not None:
            raise self._error
        return self._value


def eventually(condition: Callable[[], object], timeout: float = 10.0) -> None:
    """Wait until a condition holds."""
    assert wait_until(condition, timeout, pause=0.001), f"did not come true within {timeout} s"


def soon(seconds: float = 10.0) -> float:
    """A deadline on the monotonic clock."""
    return time.monotonic() + seconds
