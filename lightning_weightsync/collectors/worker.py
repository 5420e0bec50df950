"""What does a worker process do? It builds the collector, keeps its models in sync, and collects as the parent asks.

Started as ``python -m lightning_weightsync.collectors.worker`` with an inherited socket pair. Its threads: the main one
builds and collects; one listens to the parent, and ends the process group when the parent is gone; two serve the link,
where there are schemes: one applies pushes, one sends heartbeats; and one watches for progress, with ``env_timeout``.
Neither ``lightning`` nor ``hydra`` is imported here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from lightning_weightsync.collectors.process import JOB_MESSAGES
from lightning_weightsync.transports.control import ChannelClosed, ChannelTimeout, ControlChannel, Message

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from lightning_weightsync.collectors.base import Collector
    from lightning_weightsync.collectors.context import WorkerContext
    from lightning_weightsync.schemes.base import WeightSyncScheme

NEW_WEIGHTS_WAIT = 1.0
"""Seconds for which a worker that was asked to begin with a certain version waits for it, outside the gate."""


def main(arguments: list[str]) -> None:
    """Run one worker until its parent says stop or is gone."""
    socket_fd, memory_fd, parent_pid = map(int, arguments)
    _leave_signals_to_the_parent()
    jobs = ControlChannel(socket.socket(fileno=socket_fd), JOB_MESSAGES, takes_descriptors=True)
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(jobs, parent_pid, inbox), name="parent", daemon=True).start()
    code = 0
    try:
        _prepare_interpreter(inbox.get())
        jobs.send("booted")
        job = inbox.get()
        if job.kind == "build":
            code = _work(jobs, job, inbox, memory_fd)
    except ChannelClosed:
        code = 1
    finally:
        _end_children()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: libraries' destructors at interpreter exit are slow and noisy, and there is nothing left to save.
    os._exit(code)


def _work(jobs: ControlChannel, job: Message, inbox: queue.SimpleQueue[Message], memory_fd: int) -> int:
    """Build, connect, collect; what raises is told to the parent. Returns the exit code."""
    from lightning_weightsync.collectors.context import WorkerContext
    from lightning_weightsync.collectors.logs import forward
    from lightning_weightsync.collectors.rollouts import BatchWriter
    from lightning_weightsync.collectors.values import serve_process

    forward(jobs, job["log_level"])
    phase, code = "build", 0
    context: WorkerContext | None = None
    try:
        factory, schemes, info = _unpack(job)
        serve_process(lambda: context.gate.values if context is not None else job["values"])
        collector = factory(worker_idx=job["worker_idx"], seed=job["seed"])
        context = WorkerContext(collector, job["worker_idx"], info, job["values"])
        jobs.send("built")
        phase = "connect"
        if inbox.get().kind != "connect":
            return 0
        if schemes:
            context.connect(schemes, job["connect_timeout"])
        jobs.send("connected")
        phase = "collect"
        watch = _watch(jobs, collector, job["env_timeout"])
        writer = BatchWriter(memory_fd)
        batches: Iterator[TensorDictBase] = iter(collector)
        while (request := inbox.get()).kind != "stop":
            if request.kind == "joint":
                writer.join(request.descriptor, request["parts"], request["part"])
                os.close(request.descriptor)
                continue
            context.gate.wait_for_version(request["version"], NEW_WEIGHTS_WAIT)  # a push may be on its way here
            with watch:
                batch = context.next_batch(batches)
            schema = writer.write(request["slot"], batch)
            jobs.send(
                "batch",
                slot=request["slot"],
                schema=schema,
                frames=batch.numel(),
                episodes=context.take_episodes(),
                sums=context.take_sums(),
            )
    except ChannelClosed:
        code = 1
    except BaseException as error:  # SystemExit too: the user's code has raised it, and would raise it again
        code = _tell(jobs, phase, error)
    finally:
        if context is not None:
            code = _leave(jobs, context, code)
    return code


def _leave(jobs: ControlChannel, context: WorkerContext, code: int) -> int:
    """Close the collector, however its work has ended, and then the link, whose weights it may use until then."""
    try:
        context.collector.close()
    except BaseException as error:
        if code == 0:  # else it is known already why the work has ended
            code = _tell(jobs, "close", error)
    finally:
        context.end()
    return code


def _tell(jobs: ControlChannel, phase: str, error: BaseException) -> int:
    """Tell the parent what has raised. Returns the exit code."""
    text = "".join(traceback.format_exception(error))
    message = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    with contextlib.suppress(ChannelClosed):
        jobs.send("error", phase=phase, message=message, traceback=text, user_code=not _is_ours(error, phase))
    return 1


def _watch(jobs: ControlChannel, collector: Collector, env_timeout: float) -> AbstractContextManager[None]:
    """What each batch is made in: one that is stuck is told of, and is the end of this process."""
    from lightning_weightsync.collectors.watch import Watch

    # The thread that makes batches cannot be ended otherwise, whatever becomes of the message.
    def stuck(seconds: float, at: object, stack: str) -> None:
        try:
            jobs.send("stuck", seconds=seconds, at=str(at), stack=stack)
        finally:
            _die_with_children()

    def failed(error: Exception) -> None:
        try:
            _tell(jobs, "collect", error)
        finally:
            _die_with_children()

    if not env_timeout:
        return contextlib.nullcontext()
    watch = Watch(collector, env_timeout, stuck, failed)
    watch.start()
    return watch


def _is_ours(error: BaseException, phase: str) -> bool:
    """Whether it is the link that failed, and not the user's code: the next try may work."""
    from lightning_weightsync.errors import LayoutMismatchError, WeightSyncError

    return phase == "connect" and isinstance(error, WeightSyncError) and not isinstance(error, LayoutMismatchError)


def _unpack(job: Message) -> tuple[Callable[..., Collector], dict[str, WeightSyncScheme], Any]:
    import cloudpickle
    import numpy as np
    import torch

    seed = job["seed"]
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    # These bytes came over a socket pair that this process inherited: only its parent can have written them.
    factory, schemes, info = cloudpickle.loads(job.blob)
    return factory, schemes, info


def _prepare_interpreter(boot: Message) -> None:
    """Take the parent's ``sys.path``, cap the threads, and import what every worker needs while nobody waits for it."""
    sys.path[:] = boot["sys_path"]
    if boot["pythonpath"]:
        os.environ["PYTHONPATH"] = boot["pythonpath"]
    else:
        os.environ.pop("PYTHONPATH", None)

    import torch

    torch.set_num_threads(boot["threads"])
    import lightning_weightsync.collectors.context  # noqa: F401 - pulls in tensordict

    _settle_what_is_absent("pandas")


def _settle_what_is_absent(module: str) -> None:
    """Make a search for a module that is not installed cost nothing.

    tensordict (0.14) looks for pandas at each call of a ``TensorDictModule``, for each tensor that it writes: where
    there is none, a search of all of ``sys.path``, which makes a quarter of the time of a small policy.
    """
    if importlib.util.find_spec(module) is None:
        sys.modules[module] = None  # type: ignore[assignment]  # what import and find_spec take for "absent"


def _listen(jobs: ControlChannel, parent_pid: int, inbox: queue.SimpleQueue[Message]) -> None:
    """Hand on the parent's messages; when the parent is gone, so are this process and its children."""
    while True:
        try:
            message = jobs.receive(time.monotonic() + 1.0)
            if message.kind == "stop":
                _forget_batches(inbox)
            inbox.put(message)
        except ChannelTimeout:
            # The pair stays open as long as any forked child of the parent holds a copy of it.
            if os.getppid() != parent_pid:
                _die_with_children()
        except ChannelClosed:
            _die_with_children()


def _forget_batches(inbox: queue.SimpleQueue[Message]) -> None:
    """Nobody wants those any more that were asked for ahead and have not been begun."""
    waiting = []
    with contextlib.suppress(queue.Empty):
        while True:
            waiting.append(inbox.get_nowait())
    for message in waiting:
        if message.kind != "collect":
            inbox.put(message)


def _end_children() -> None:
    """Kill what environments have started in this process's group, and not this process, which leaves in good order.

    The parent does so too, but may itself be killed before.
    """
    own_pid = os.getpid()
    if os.getpgid(0) != own_pid:
        return
    if not os.path.isdir("/proc/self"):
        os.killpg(0, signal.SIGTERM)  # which this process does not heed
        return
    killed = {own_pid}
    while started := _members_of_group(own_pid) - killed:  # again, for what those started meanwhile
        killed |= started
        for pid in started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _members_of_group(group: int) -> set[int]:
    members = set()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(int(name)) == group:
                    members.add(int(name))
    return members


def _die_with_children() -> NoReturn:
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _leave_signals_to_the_parent() -> None:
    """A cluster, or Ctrl-C, signals everybody; the parent decides. Its death is noticed without any signal."""
    own_pid = os.getpid()

    def ignore(number: int, frame: FrameType | None) -> None:
        # A handler, not SIG_IGN, which exec would hand on; an environment's forked child must still be stoppable.
        if os.getpid() != own_pid:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGINT, ignore)
    signal.signal(signal.SIGTERM, ignore)


if __name__ == "__main__":
    main(sys.argv[1:])
