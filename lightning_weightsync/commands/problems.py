"""How is a wrong configuration told? Key, value, what is allowed and how to mend it, in a line each; no traceback."""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Iterable, Sequence

EXIT_UNSOLVED = 1
EXIT_MISCONFIGURED = 2
_FULL = bool(os.environ.get("HYDRA_FULL_ERROR"))


class ConfigError(Exception):
    """What is wrong with a configuration, all of it, found before anything was started.

    Args:
        problems: One sentence each.
    """

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return f"configuration: {self.problems[0]}"
        return "\n".join([f"configuration: {len(self.problems)} problems", *(f"  - {p}" for p in self.problems)])


def nearest(wanted: object, names: Iterable[object]) -> str:
    """``"; did you mean 'x'?"``, or nothing where no name is near."""
    close = difflib.get_close_matches(str(wanted), [str(name) for name in names], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def tell(error: ConfigError) -> None:
    """Print it to stderr; with ``HYDRA_FULL_ERROR=1`` in the user's environment, with where it was raised."""
    if _FULL and error.__cause__ is not None:
        traceback.print_exception(error.__cause__)
    print(error, file=sys.stderr)


def ended(text: str) -> str:
    """A sentence with its full stop, for another one to follow."""
    return text if text.endswith("?") else f"{text}."


def listed(names: Iterable[object], most: int = 24) -> str:
    """Names, separated by commas; many are cut short."""
    texts = [str(name) for name in names]
    more = len(texts) - most
    return (", ".join(texts[:most]) or "none") + (f" and {more} more" if more > 0 else "")
