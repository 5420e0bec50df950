"""What does one rank need of the others? That its parameters are whole, and to end when whoever started it is gone.

Nothing here talks to other ranks: each has workers of its own and pushes at its own pace.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_weightsync.errors import WeightSyncError

log = logging.getLogger(__name__)

GRACE_AFTER_PARENT = 5.0
"""Seconds that a rank gets to end in good order when the process that started it has ended."""

_LOOK_SECONDS = 0.5
_SHARDING_STRATEGIES = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy", "XLAFSDPStrategy")
_WAY_OUT = (
    "UpdateWeights pushes whole parameters: train with strategy='ddp', where each rank holds them all, or, instead of "
    "weight_update_map, give a policy_weights_getter that gathers them and returns a dict of whole tensors (all ranks "
    "call it at the same pushes)"
)


def sharding_strategy(strategy: object) -> str | None:
    """Why sources cannot be read under a Lightning strategy, or ``None`` if each rank has whole parameters.

    DeepSpeed's stages 1 and 2 leave parameters whole.
    """
    for cls in type(strategy).__mro__:
        if cls.__name__ in _SHARDING_STRATEGIES and getattr(strategy, "zero_stage_3", True):
            return f"{type(strategy).__name__} spreads parameters over its ranks, and {_WAY_OUT}"
    return None


def sharded_parameter(sources: Mapping[str, Any]) -> str | None:
    """The first parameter of these sources that is not whole in this process, in words; ``None`` if all are.

    Args:
        sources: By destination; what is no module is left alone.
    """
    for destination, source in sources.items():
        for name, parameter in source.named_parameters() if isinstance(source, nn.Module) else ():
            why = _sharded(parameter)
            if why is not None:
                return f"parameter {name!r} of what goes to {destination!r} {why}, and {_WAY_OUT}"
        for name, module in source.named_modules() if isinstance(source, nn.Module) else ():
            if type(module).__name__ == "FullyShardedDataParallel":
                return f"module {name!r} of what goes to {destination!r} is sharded (FSDP), and {_WAY_OUT}"
    return None


def _sharded(parameter: nn.Parameter) -> str | None:
    if hasattr(parameter, "ds_id"):
        return "is kept by DeepSpeed's ZeRO-3, which has emptied it"
    if getattr(parameter, "_is_flat_param", False):
        return "is a flat parameter of FSDP"
    if hasattr(parameter, "placements") and hasattr(parameter, "device_mesh"):
        return "is spread over ranks (DTensor)"
    return None


class ParentWatch:
    """Ends a rank soon after the process that has started it: rank 0 under ``ddp``, an agent under ``torchrun``.

    Lightning ends rank 0 when another rank has failed. Nothing ends the others when rank 0 is gone: one that waits for
    its own workers does not notice, and waits on.

    A thread looks at the parent's process id. When it changes, ``look`` raises, for whoever waits; where nobody looks
    for ``GRACE_AFTER_PARENT`` seconds (in a collective, in a signal's handler), the process ends, and its workers with
    it.
    """

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def start(cls, local_rank: int, world_size: int) -> ParentWatch:
        """Watch, if this rank was started by a Python process; whoever else starts ranks may well end before them."""
        watch = cls()
        if world_size > 1 and local_rank > 0 and _parent_is_python():
            watch._thread = threading.Thread(target=watch._run, name="weight-sync-parent", daemon=True)
            watch._thread.start()
        return watch

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), ()  # another process has another parent, and is watched when it says so

    def look(self) -> None:
        """Raise if the parent is gone.

        Raises:
            WeightSyncError: It is, and says why itself.
        """
        if self._thread is not None and self._gone:
            raise WeightSyncError(f"{self._words}: this rank has nobody to train with, see there for the reason")

    def stop(self) -> None:
        """Watch no longer; does not block."""
        self._stopped.set()

    @property
    def _gone(self) -> bool:
        return os.getppid() != self._parent

    @property
    def _words(self) -> str:
        return f"the process that started this rank (pid {self._parent}) has ended"

    def _run(self) -> None:
        while not self._stopped.wait(_LOOK_SECONDS):
            if self._gone:
                if not self._stopped.wait(GRACE_AFTER_PARENT):
                    log.error(f"{self._words}, {GRACE_AFTER_PARENT:.0f} s ago: this rank ends")
                    os._exit(1)  # the main thread may be anywhere, in a collective too
                return


def _parent_is_python() -> bool:
    try:
        return os.readlink(f"/proc/{os.getppid()}/exe") == os.readlink("/proc/self/exe")
    except OSError:  # another user's, or no Linux
        return False
