"""Which values may an option have? One that is not allowed is refused where it is given, by its name."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from numbers import Real
from typing import Any

_LONGEST = threading.TIMEOUT_MAX / 2
"""In seconds: what is waited for can be as long, and a second wait longer; 146 years."""


def choose(name: str, value: object, allowed: Sequence[str]) -> None:
    """See whether an option has one of the values that there are.

    Raises:
        ValueError: It has not; lists them.
    """
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(map(repr, allowed))}")


def seconds(name: str, value: object) -> float:
    """How long something may take.

    Raises:
        ValueError: It is no number, not positive, infinite, or longer than the system can wait.
    """
    number: Any = value
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < number <= _LONGEST:
        raise ValueError(f"{name}={value!r}: give a positive number of seconds, at most {_LONGEST:.0f}")
    return float(number)
