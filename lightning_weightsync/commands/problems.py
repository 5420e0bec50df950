"""How is a wrong configuration told? Key, value, what is allowed and how to mend it, in a line each; no traceback."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

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


def tell(error: ConfigError) -> None:
    """Print it to stderr; with ``HYDRA_FULL_ERROR=1`` in the user's environment, with where it was raised."""
    if _FULL and error.__cause__ is not None:
        traceback.print_exception(error.__cause__)
    print(error, file=sys.stderr)
