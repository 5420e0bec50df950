"""How is a worker process started, watched and stopped?

A worker is a fresh interpreter in a session of its own, not a fork and not a re-import of the user's script. It is
given one end of a socket pair: its jobs arrive there, and the end of it is how it learns that its parent died. To
stop it is to ask, and then to kill its whole process group, so that environments with children of their own leave
none behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

from lightning_weightsync.transports.bodies import Schema
from lightning_weightsync.transports.control import ChannelClosed, ChannelTimeout, ControlChannel
from lightning_weightsync.transports.memory import create_memory_file

JOB_MESSAGES: Schema = {
    # parent to worker
    "boot": {"sys_path": list, "pythonpath": str, "threads": int},
    # blob: cloudpickle, over the inherited pair; env_timeout: 0.0 for none
    "build": {
        "worker_idx": int,
        "seed": int,
        "values": dict,
        "connect_timeout": float,
        "env_timeout": float,
        "log_level": int,
    },
    "connect": {},
    "joint": {"parts": int, "part": int},  # with one descriptor
    "collect": {"slot": int, "version": int},
    "stop": {},
    # worker to parent
    "booted": {},
    "built": {},
    "connected": {},
    "batch": {"slot": int, "schema": dict, "frames": int, "episodes": list, "sums": dict},
    "log": {"level": int, "name": str, "message": str, "dropped": int},
    "stuck": {"seconds": float, "at": str, "stack": str},
    "error": {"phase": str, "message": str, "traceback": str, "user_code": bool},
}

_TRAINER_VARIABLES = (
    "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED", "PL_SEED_WORKERS",
)  # fmt: skip
# torchrun, SLURM (with a number of tasks, Lightning takes itself for one of them), MPI, LSF
_TRAINER_PREFIXES = (
    "TORCHELASTIC_", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS",
    "OMPI_COMM_WORLD_", "PMI_", "PMIX_", "JSM_NAMESPACE_",
)  # fmt: skip
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class WorkerProcess:
    """A running worker interpreter, from the parent's side.

    Args:
        threads: Cap on the worker's compute threads.

    Attributes:
        jobs: The job channel.
        memory: Descriptor of the memory file for its batches.

    Raises:
        OSError: No descriptor, no memory or no process id is left, or the interpreter has ended at once. Nothing stays.
    """

    def __init__(self, threads: int) -> None:
        self._killed = False
        with contextlib.ExitStack() as undo:
            self.memory = create_memory_file("lightning_weightsync")
            undo.callback(os.close, self.memory)
            ours, theirs = socket.socketpair()
            self.jobs = ControlChannel(ours, JOB_MESSAGES)
            undo.callback(self.jobs.close)
            with theirs:
                command = [sys.executable, "-m", "lightning_weightsync.collectors.worker"]
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno()), str(self.memory), str(os.getpid())],
                    pass_fds=(theirs.fileno(), self.memory),
                    stdin=subprocess.DEVNULL,
                    env=_environment(threads),
                    start_new_session=True,
                )
            undo.callback(self.kill)
            pythonpath = os.environ.get("PYTHONPATH", "")
            self.jobs.send("boot", sys_path=list(sys.path), pythonpath=pythonpath, threads=threads)
            undo.pop_all()

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its process group."""
        return self._process.pid

    def ended(self, wait: float = 0.0) -> str | None:
        """How the process ended ("exit code 3", "killed by SIGTERM"), or ``None`` while it runs.

        Args:
            wait: Seconds to wait for its end.
        """
        try:
            code = self._process.wait(wait) if wait > 0 else self._process.poll()
        except subprocess.TimeoutExpired:
            return None
        if code is None:
            return None
        if code >= 0:
            return f"exit code {code}"
        if -code == signal.SIGKILL:
            return "killed by SIGKILL (is the machine out of memory?)"
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"

    def ask_to_stop(self) -> None:
        """Send ``stop``, if the worker can still hear it; does not wait."""
        with contextlib.suppress(ChannelClosed, ChannelTimeout):
            self.jobs.send("stop", deadline=time.monotonic() + 0.1)

    def kill(self) -> None:
        """End it and its process group, stopped or not, and wait for its end. What it has sent can still be read."""
        if self._killed:
            return  # its process id may be somebody else's by now
        self._killed = True
        # Its group may outlive it: an environment's child processes are in it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def reap(self, wait: float) -> None:
        """Wait for its end, kill what is left of its process group, and give everything back. Idempotent.

        Args:
            wait: Seconds that it may take to end by itself.
        """
        if self.memory < 0:
            return
        self.ended(wait)
        self.kill()
        self.jobs.close()
        memory, self.memory = self.memory, -1
        os.close(memory)


def _environment(threads: int) -> dict[str, str]:
    """The parent's, without what makes a process take itself for a rank of the trainer, and with capped threads."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _TRAINER_VARIABLES and not name.startswith(_TRAINER_PREFIXES)
    }
    kept.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))
    # Only to find this package; the worker then takes the exact sys.path from the boot message.
    kept["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return kept
