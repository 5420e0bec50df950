"""Do a policy's distributions check what they are given? Not in a collector that looks at the actions itself.

torch.distributions validates parameters and samples by default, which takes a small policy an eighth of a step. What it
would find (NaN, mostly) shows in the actions, which are looked at once per batch.

It is off for whole batches, and so in the environments' steps too: torch's switch is an attribute of a class, and when
one is set, Python forgets what it has found out about the class and all that inherit from it. Set around each policy
call, it took a twentieth of a step.
"""

from __future__ import annotations

import threading

from torch.distributions import Distribution


class _Unvalidated:
    """A context in which validation is off, unless a distribution is made with ``validate_args=True``.

    torch has one switch for the whole process, so threads that are inside at the same time share a context: it is as it
    was when the last of them has left.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._inside = 0
        self._before = True

    def __enter__(self) -> None:
        with self._mutex:
            if not self._inside:
                # What set_default_validate_args() sets: torch has no other way to ask, and this is done in every step.
                self._before = Distribution._validate_args
                Distribution._validate_args = False
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._mutex:
            self._inside -= 1
            if not self._inside:
                Distribution._validate_args = self._before


unvalidated = _Unvalidated()
