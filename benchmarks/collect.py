"""How many frames do collectors make per second? Ours, TorchRL's and a loop written by hand, in turn in one run.

    python -m benchmarks.collect                     # some five minutes on two cores
    python -m benchmarks.collect --quick             # does it run? (the figures mean little)
    python -m benchmarks.collect --only cartpole --modes async --rounds 9 --json collect.json

Parts: ``cartpole`` and ``pixels`` (frames per second), ``copies`` (what a batch costs the trainer), ``start`` (how long
until a worker is ready). Weights are pushed after each batch; the trainer does nothing else, so the collectors are what
is measured. Figures are medians. Two forms of one policy act:

    probabilistic   tensordict's ProbabilisticTensorDictSequential, as TorchRL's users write it
    hand-written    a module that maps a TensorDict without a distribution object; CartPole's network is written out

TorchRL (optional) collects with the former, in two kinds of vector environment: its own (``GymEnv(id, num_envs=8)``:
gymnasium's AsyncVectorEnv), and the fastest one that we found (a SyncVectorEnv that TorchRL resets). The hand-written
loop has the same network and a SyncVectorEnv, and nothing else: no TensorDict, no shared memory, no pushes, no trainer.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import torch

from benchmarks.acting import CARTPOLE, NUM_ENVS, PIXELS, Task
from benchmarks.collecting import Bare, Engine, Ours, Peer, own_vector_env, wrapped_vector_env
from benchmarks.measure import Comparison, interleave
from benchmarks.options import add_json, add_quick, at_least, fill_in, positive
from benchmarks.receivers import settle
from benchmarks.table import machine, table, verdict
from lightning_weightsync import CollectorGroup, DistributedWeightSyncScheme, GymCollector

PARTS = ("cartpole", "pixels", "copies", "start")
MODES = {"sync": True, "async": False}
LOOPS = {"hand-written": "hand-written loop", "probabilistic": "the same, Categorical"}
FASTER_THAN_PEER = {"probabilistic": 8.0, "hand-written": 18.0}
OF_BARE = 0.7
PIXELS_FASTER_THAN_PEER = 3.0
COPIES = 1.3
SECONDS_LATER = 0.7
_BARE_INTERPRETER = "import torch, tensordict, gymnasium; print('ready', flush=True); input()"


def frames_per_second(task: Task, makers: Sequence[Callable[[], Engine]], options: argparse.Namespace) -> Comparison:
    """All engines, up at once, in turn."""
    result = Comparison("collectors", task.name, 0, 0, options.workers)
    with ExitStack() as stack:
        engines: list[Engine] = []
        for make in makers:
            try:
                engines.append(stack.enter_context(closing(make())))
            except ModuleNotFoundError as error:
                result.notes.append(f"{error}")
        pids = [pid for engine in engines for pid in engine.pids()]
        turns = [partial(engine.turn, options.seconds) for engine in engines]
        return interleave(result, turns, options.rounds, pids, warm_up=1)


def engines_of(task: Task, workers: int, modes: Sequence[str]) -> list[Callable[[], Engine]]:
    """What is compared with this task."""
    makers: list[Callable[[], Engine]] = []
    for mode in modes:
        sync = MODES[mode]
        for policy in task.policies:
            makers.append(partial(Ours, f"ours, {policy}, {mode}", task, policy, workers, sync=sync))
        for name, env in (("own", own_vector_env), ("fastest", wrapped_vector_env)):
            peer = partial(Peer, f"TorchRL, {name} env, {mode}", task, workers, sync=sync, env=partial(env, task))
            makers.append(peer)
    makers += [partial(Bare, name, task, workers, policy) for policy, name in LOOPS.items()]
    return makers


def show_rates(task: Task, result: Comparison, modes: Sequence[str]) -> list[str]:
    """A table, and how the figures stand to what is asked."""

    def rate(name: str) -> float | None:
        milliseconds = result.median(name)
        return None if milliseconds is None else 1e3 * task.frames / milliseconds

    peers = ["TorchRL, own env", "TorchRL, fastest env"]
    rows: list[list[object]] = [
        [name, *[rate(f"{name}, {mode}") for mode in modes]]
        for name in [f"ours, {policy}" for policy in task.policies] + peers
    ]
    rows += [[name, *[rate(name)] * len(modes)] for name in LOOPS.values()]
    lines = [table([f"{task.name}, frames/s", *modes], [row for row in rows if row[1] is not None]), ""]
    for policy in task.policies:
        for mode in modes:
            ours = f"ours, {policy}, {mode}"
            for peer in peers:
                ratio = result.ratio(f"{peer}, {mode}", ours)
                if ratio is not None:
                    lines.append(f"{ours}, to {peer}: {_asked(task, policy, peer, ratio)}")
            loop = LOOPS[policy]
            lines.append(f"{ours}, to {loop!r}: {verdict(result.ratio(loop, ours), OF_BARE, at_least=True)}")
    return [*lines, *result.notes]


def _asked(task: Task, policy: str, peer: str, ratio: float) -> str:
    if peer != "TorchRL, own env":
        return f"{ratio:.2f}"
    return verdict(ratio, PIXELS_FASTER_THAN_PEER if task is PIXELS else FASTER_THAN_PEER[policy], at_least=True)


def copies(task: Task, options: argparse.Namespace) -> Comparison:
    """What the trainer pays for a batch that is ready, beside copies of the same bytes to new and to old memory.

    By one thread each: where collectors are busy, a second one has no core. A batch is lent, not copied, so it is also
    measured with a first pass over all of its bytes, which is when a trainer pays for what lies in others' caches. Of a
    synchronous batch, which is waited for, it is the processor time.
    """
    torch.set_num_threads(1)
    factory = partial(
        GymCollector, task.env, task.policies["hand-written"], num_envs=NUM_ENVS, frames_per_batch=task.frames
    )
    make = task.policies["hand-written"]
    ahead, together = (
        CollectorGroup(
            factory, options.workers, weight_sync_schemes={"policy": DistributedWeightSyncScheme()}, sync=sync, seed=1
        )
        for sync in (False, True)
    )
    with ahead, together:
        for group in (ahead, together):
            group.update_policy_weights_(make())
        batches, joint = iter(ahead), iter(together)
        source, target = next(batches).clone(), next(batches).clone()
        leaves = list(source.values(include_nested=True, leaves_only=True))
        whole = torch.cat([leaf.reshape(-1).view(torch.uint8) for leaf in leaves])
        result = Comparison("copies", task.name, sum(leaf.nbytes for leaf in leaves), len(leaves), options.workers)

        def timed(
            name: str, action: Callable[[], object], clock: Callable[[], float] = time.perf_counter
        ) -> Callable[[], dict[str, float]]:
            def run() -> dict[str, float]:
                started = clock()
                kept = action()
                seconds = clock() - started
                del kept
                return {name: 1e3 * seconds}

            return run

        actions = [
            timed("a batch", lambda: next(batches)),
            timed("a batch, and a copy of it", lambda: target.update_(next(batches))),
            timed("a synchronous batch", lambda: next(joint), time.thread_time),
            timed(
                "copy to new memory",
                lambda: torch.frombuffer(mmap.mmap(-1, whole.nbytes), dtype=torch.uint8).copy_(whole),
            ),
            timed("copy to old memory", lambda: target.update_(source)),
        ]
        pids = [stat["pid"] for group in (ahead, together) for stat in group.stats().values()]
        return interleave(result, actions, 4 * options.rounds, pids, warm_up=4)


def start(options: argparse.Namespace) -> Comparison:
    """How long until a worker is ready, and until a bare interpreter has imported, both started together; in ms."""
    result = Comparison("start", "CartPole", 0, 0, 1)
    policy = CARTPOLE.policies["hand-written"]
    factory = partial(GymCollector, CARTPOLE.env, policy, num_envs=NUM_ENVS, frames_per_batch=1024)
    for turn in range(-1, options.rounds):
        settle([])
        group = CollectorGroup(factory, 1, weight_sync_schemes={"policy": DistributedWeightSyncScheme()}, seed=1)
        ready: list[float] = []
        started = time.perf_counter()
        bare = subprocess.Popen(
            [sys.executable, "-c", _BARE_INTERPRETER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

        def wait(process: subprocess.Popen[str] = bare, ready: list[float] = ready, since: float = started) -> None:
            assert process.stdout is not None
            process.stdout.readline()
            ready.append(time.perf_counter() - since)

        waiting = threading.Thread(target=wait)
        waiting.start()
        try:
            group.start({"policy": policy()})
            worker = time.perf_counter() - started
            waiting.join()
        finally:
            group.shutdown()
            bare.communicate("\n")
        if turn >= 0:
            for name, seconds in (("worker", worker), ("imports alone", ready[0]), ("later", worker - ready[0])):
                result.samples.setdefault(name, []).append(1e3 * seconds)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write what was asked for; returns the exit code."""
    warnings.filterwarnings("ignore", module="torchrl")
    os.environ.setdefault("RL_LOGGING_LEVEL", "ERROR")  # TorchRL's, which it tells on standard output
    options = _options(arguments)
    report: dict[str, Any] = {"machine": machine(), "options": {k: str(v) for k, v in vars(options).items()}}
    print(f"{report['machine']}\n", flush=True)
    for task, part in ((CARTPOLE, "cartpole"), (PIXELS, "pixels")):
        if part in options.only:
            result = frames_per_second(task, engines_of(task, options.workers, options.modes), options)
            print("\n".join(show_rates(task, result, options.modes)) + "\n", flush=True)
            report[part] = result.as_json()
    if "copies" in options.only:
        result = copies(PIXELS, options)
        rows = [[name, result.median(name), result.ratio(name, "copy to old memory")] for name in result.samples]
        print(table([f"{result.nbytes / 1e6:.1f} MB, ms", "median", "copies"], rows))
        for name in ("a batch", "a synchronous batch"):
            print(f"\n{name}, in copies: {verdict(result.ratio(name, 'copy to old memory'), COPIES)}", flush=True)
        print(flush=True)
        report["copies"] = result.as_json()
    if "start" in options.only:
        result = start(options)
        rows = [[name, statistics.median(values) / 1e3] for name, values in result.samples.items()]
        print(table(["ready after, s", "median"], rows))
        print(f"\nlater than imports alone, s: {verdict(float(rows[2][1]), SECONDS_LATER)}")  # type: ignore[arg-type]
        report["start"] = result.as_json()
    report["load_at_end"] = machine()["load"]
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collect", description="Measure collectors.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="of frames per second")
    parser.add_argument("--rounds", type=at_least(1), help="turns of each engine (7)")
    parser.add_argument("--seconds", type=positive, help="length of a turn (2)")
    parser.add_argument("--workers", type=at_least(1), default=2)
    add_json(parser)
    add_quick(parser, "2 turns of half a second")
    options = parser.parse_args(arguments)
    fill_in(options, quick={"rounds": 2, "seconds": 0.5}, otherwise={"rounds": 7, "seconds": 2.0})
    if CARTPOLE.frames % (options.workers * NUM_ENVS):
        parser.error(f"--workers: {CARTPOLE.frames} frames are to be shared by them")
    return options


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    torch.set_num_threads(2)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
