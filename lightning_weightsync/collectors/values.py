"""What does the trainer give its workers that is no weight? Schedule values: epsilon, a temperature, a level.

``group.broadcast(epsilon=0.1)`` in the trainer; ``values["epsilon"]`` in whatever runs in a worker: a policy, an
environment, a collector. They travel with pushes, and change as the weights do, under the gate.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

_Source: TypeAlias = Callable[[], Mapping[str, Any]]

_of_process: _Source = dict
_of_block: ContextVar[_Source | None] = ContextVar("lightning_weightsync_values", default=None)


class BroadcastValues(Mapping[str, Any]):
    """The values that are in force where this is asked: in a worker, or in a collector of the trainer's own process.

    A mapping that is always up to date. In a policy call that holds the gate nothing changes; elsewhere (in a step of
    an environment with ``update_at="step"``) read what belongs together at once. Empty where nothing was broadcast.
    """

    def __getitem__(self, name: str) -> Any:
        """One value.

        Raises:
            KeyError: Nobody has broadcast it, or no push has brought it yet.
        """
        now = _now()
        if name not in now:
            raise KeyError(
                f"no value {name!r} has come with a push; there is {sorted(now) or 'none'}: broadcast it before the "
                f"group is connected, or use values.get({name!r}, default)"
            )
        return now[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_now())

    def __len__(self) -> int:
        return len(_now())

    def __repr__(self) -> str:
        return f"values({dict(_now())})"


values = BroadcastValues()
"""What every import of it sees."""


def canonical(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values as every worker will see them.

    Args:
        given: Numbers, strings, bools, None, and lists and dicts of them. What has ``item()`` (a tensor or an array of
            one element) becomes a number; a tuple becomes a list.

    Raises:
        TypeError: One of them is anything else.
    """
    found = {}
    for name, value in given.items():
        try:
            found[name] = json.loads(json.dumps(value, default=_as_number))
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise TypeError(
                f"{name}={value!r} cannot be broadcast: values are numbers, strings, and lists and dicts of them; "
                "tensors travel as weights, buffers or extra state of a model"
            ) from error
    return found


def serve_process(source: _Source) -> None:
    """From now on the values of this process come from there."""
    global _of_process
    _of_process = source


@contextmanager
def serving(source: _Source) -> Iterator[None]:
    """Inside, in the calling thread, the values come from there."""
    token = _of_block.set(source)
    try:
        yield
    finally:
        _of_block.reset(token)


def _now() -> Mapping[str, Any]:
    return (_of_block.get() or _of_process)()


def _as_number(value: Any) -> Any:
    return value.item()
