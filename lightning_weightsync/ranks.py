"""What does one rank need of the others? Parameters that are whole on each, and to end when the others are gone.

Nothing here talks to other ranks: each has workers of its own and pushes at its own pace.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from lightning_weightsync.errors import WeightSyncError

log = logging.getLogger(__name__)

GRACE = 5.0
"""Seconds that a rank may be in Lightning's handler of SIGTERM, which waits for other ranks."""

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


def separate_sweeps(strategy: Any) -> str | None:
    """Why the ranks of a Hydra job would not be in one folder, or ``None`` if they are.

    Args:
        strategy: Lightning's; what is spawned or forked runs no command.
    """
    hydra_config = sys.modules.get("hydra.core.hydra_config")
    by_command = type(strategy.launcher).__name__ == "_SubprocessScriptLauncher"
    if hydra_config is None or not by_command or not hydra_config.HydraConfig.initialized():
        return None
    node = hydra_config.HydraConfig.get()
    written = {key: node.sweep._get_node(key)._value() for key in ("dir", "subdir")}
    if node.mode is None or node.mode.name != "MULTIRUN" or not any("${now" in str(text) for text in written.values()):
        return None
    return (
        "Lightning's 'ddp' starts each further rank by running the command again, here a whole Hydra sweep, and "
        f"hydra.sweep.dir has the time in it ({written['dir']}): that rank would be in another folder. Set "
        "hydra.sweep.dir to a fixed path, or strategy='ddp_spawn'"
    )


class RankWatch:
    """Notices that a rank cannot go on, where neither the rank nor Lightning does.

    * **The process that has started it is gone**: rank 0 under ``ddp``, the agent under ``torchrun``. Lightning ends
      rank 0 when another rank has failed, but nothing ends the others when rank 0 has: one that waits for its own
      workers waits on. ``look`` raises then, for those who wait.
    * **SIGTERM in the middle of a collective operation**: Lightning's handler makes a collective of its own, waits in
      it for another rank, and that one waits for this rank in the operation that was interrupted. A thread looks twice
      a second, and ends a process whose main thread has been in that handler for ``GRACE`` seconds: no Python code runs
      there any more. Its workers end with it.
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
            if since and time.monotonic() - since > GRACE:
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
