"""How long does a push take? Ours, TorchRL's and a plain copy of the same bytes, measured in turn in one run.

    python -m benchmarks.push                        # some ten minutes on two cores
    python -m benchmarks.push --quick                # does it run? (the figures mean little)
    python -m benchmarks.push --kinds large --workers 1 4 --json push.json

Receivers are bare: they take pushes and run neither environments nor policies. Every figure is a median in
milliseconds, until all receivers have acknowledged unless the column says otherwise:

    copy          warm torch._foreach_copy_ of all leaves to a second set of tensors, in the sender
    ours          send()
    in a row      the same, per push of five without a pause (a receiver tidies up after it has acknowledged)
    async stall   how long send_async() holds the caller
    async applied until its handle says that all have applied it
    network       send() with same_host="network"
    TorchRL       send() of torchrl.weight_update.DistributedWeightSyncScheme (optional)
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.engines import BareTcp, Engine, Ours, Peer, ReceiverMode, Sample, Source, verify
from benchmarks.measure import Comparison, interleave
from benchmarks.models import KINDS
from benchmarks.options import add_json, add_quick, at_least, fill_in, write
from benchmarks.receivers import settle
from benchmarks.table import machine, table, verdict
from lightning_weightsync.errors import WeightSyncError
from lightning_weightsync.wording import size

SENDER_THREADS = 2
RECEIVER_THREADS = 1
BARE_RECEIVERS = (16, 64)
PEER_IS_SLOWER_BY = {
    "ours": {"mlp": 20.0, "many": 200.0, "large": 15.0},
    "network": {"mlp": 8.0, "many": 80.0, "large": 1.4},
}
"""What is asked of four workers."""


def compare_schemes(kind: str, workers: int, pairs: int, mode: ReceiverMode) -> Comparison:
    """All schemes and a copy, for one model and one number of receivers."""
    source = Source(kind)
    result = Comparison("schemes", kind, source.nbytes, source.tensors, workers)
    with ExitStack() as stack:
        ours = stack.enter_context(Ours(source, workers, mode=mode))
        engines: list[Engine] = [ours]
        actions: list[Callable[[], Sample]] = [source.copy, ours.send]
        others: dict[str, Callable[[], Engine]] = {
            "network": lambda: Ours(source, workers, name="network", same_host="network", mode=mode),
            "TorchRL": lambda: Peer(source, workers),
        }
        for name, make in others.items():
            try:
                _check_room(source.nbytes * (1 + 2 * workers))  # two sets of weights in each receiver
                engine = stack.enter_context(closing(make()))
            except WeightSyncError:
                raise
            except (ImportError, MemoryError, RuntimeError) as error:
                result.notes.append(f"{name}, {kind}, {workers} workers: not measured: {error}")
                continue
            engines.append(engine)
            actions.append(engine.send)
        actions += [ours.send_async, ours.send_in_a_row]
        interleave(result, actions, pairs, [pid for engine in engines for pid in engine.receivers.pids])
        for engine in engines:
            verify(source, engine)
    return result


def compare_group_sizes(kind: str, sizes: Sequence[int], pairs: int, mode: ReceiverMode) -> Comparison:
    """Ours, with groups of several sizes that exist side by side."""
    source = Source(kind)
    result = Comparison("group sizes", kind, source.nbytes, source.tensors)
    with ExitStack() as stack:
        groups = [stack.enter_context(Ours(source, size, name=str(size), mode=mode)) for size in sizes]
        pids = [pid for group in groups for pid in group.receivers.pids]
        interleave(result, [source.copy, *[group.send for group in groups]], pairs, pids)
        for group in groups:
            verify(source, group)
    return result


def compare_stalls(kind: str, sizes: Sequence[int], pairs: int, mode: ReceiverMode) -> Comparison:
    """``send_async``, with groups of several sizes, and with one more of the last size in which a worker is stopped."""
    source = Source(kind)
    result = Comparison("stalls", kind, source.nbytes, source.tensors)
    with ExitStack() as stack:
        groups = [stack.enter_context(Ours(source, size, name=str(size), mode=mode)) for size in sizes]
        stopped = stack.enter_context(Ours(source, sizes[-1], name="stopped", mode=mode))
        pids = [pid for group in [*groups, stopped] for pid in group.receivers.pids]
        stuck = stopped.receivers.pids[0]
        os.kill(stuck, signal.SIGSTOP)
        try:
            actions = [source.copy, *[group.send_async for group in groups], lambda: stopped.send_async_past(0)]
            interleave(result, actions, pairs, pids)
        finally:
            os.kill(stuck, signal.SIGCONT)
        for group in [*groups, stopped]:
            verify(source, group)
    return result


def compare_with_tcp(kind: str, pairs: int, mode: ReceiverMode) -> Comparison:
    """Ours over the network to one receiver, and a bare TCP connection with as many bytes."""
    source = Source(kind)
    result = Comparison("tcp", kind, source.nbytes, source.tensors, 1)
    with Ours(source, 1, name="network", same_host="network", mode=mode) as ours, closing(BareTcp(source)) as tcp:
        interleave(result, [tcp.send, ours.send], pairs, [*ours.receivers.pids, *tcp.receivers.pids])
        verify(source, ours)
    return result


def private_memory(kind: str, workers: int) -> dict[str, Any]:
    """What each receiver needs for its weights that no other process shares, after it has read them all.

    Receivers are of the ``background`` kind: the copy that ``receive()`` hands out is its caller's.
    """
    source = Source(kind)
    with Ours(source, workers) as ours:
        for _ in range(5):
            ours.send()
        settle(ours.receivers.pids)
        grown = ours.receivers.ask("private")
    return {"kind": kind, "nbytes": source.nbytes, "workers": workers, "private_bytes": grown}


def show_schemes(results: Sequence[Comparison]) -> None:
    """One row for each model and number of receivers."""
    columns = ["copy", "ours", "ours in a row", "ours stall", "ours applied", "network", "peer"]
    headers = ["model", "workers", "copy", "ours", "in a row", "async stall", "async applied", "network", "TorchRL"]
    rows = []
    for result in results:
        name = f"{result.kind}: {result.tensors} tensors, {size(result.nbytes)}"
        ratios = [result.ratio("peer", "ours"), result.ratio("ours", "copy"), result.ratio("ours stall", "copy")]
        rows.append([name, result.workers, *map(result.median, columns), *ratios])
    print(table([*headers, "TorchRL / ours", "ours / copy", "stall / copy"], rows))
    for note in sorted({note for result in results for note in result.notes}):
        print(f"\n{note}")
    for result in results:
        if result.workers != 4:
            continue
        for name, limits in PEER_IS_SLOWER_BY.items():
            if result.kind in limits:
                ratio = verdict(result.ratio("peer", name), limits[result.kind], at_least=True)
                print(f"\n{result.kind}, 4 workers: TorchRL / {name} {ratio}")


def show_group_sizes(result: Comparison, *, of_copy: float | None, of_first: float) -> None:
    """One row for each size of a group."""
    sizes = [name for name in result.samples if name != "copy"]
    rows: list[list[object]] = []
    for workers in sizes:
        to_copy, to_first = result.ratio(workers, "copy"), result.ratio(workers, sizes[0])
        shown = to_copy if of_copy is None else verdict(to_copy, of_copy)
        is_last = workers == sizes[-1] and len(sizes) > 1
        rows.append([workers, result.median(workers), shown, verdict(to_first, of_first) if is_last else to_first])
    print(f"{result.kind}, groups of several sizes side by side; copy: {result.median('copy'):.3f} ms\n")
    print(table(["workers", "ours", "ours / copy", f"to {sizes[0]} workers"], rows))


def show_stalls(result: Comparison) -> None:
    """One row for each group."""
    names = [name for name in result.samples if name.endswith(" stall")]
    rows: list[list[object]] = []
    for name in names:
        group = name.removesuffix(" stall")
        who = f"{names[-2].removesuffix(' stall')}, one of them stopped" if group == "stopped" else group
        rows.append([who, result.median(name), verdict(result.ratio(name, "copy"), 1.3)])
    print(f"{result.kind}, send_async; copy: {result.median('copy'):.3f} ms\n")
    print(table(["workers", "stall", "stall / copy"], rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # leave through every context manager
    torch.set_num_threads(SENDER_THREADS)
    bare = BARE_RECEIVERS if not options.quick else (4, 8)
    mode, pairs = options.receivers, options.pairs
    report: dict[str, Any] = {
        "machine": machine(),
        "pairs": pairs,
        "threads": {"sender": SENDER_THREADS, "receiver": RECEIVER_THREADS},
        "receivers": mode,
    }
    print(", ".join(f"{name} {value}" for name, value in report["machine"].items()))
    print(f"medians of {pairs} interleaved samples, in ms; threads: {SENDER_THREADS} in the sender for copies and for")
    print(f"pushes, {RECEIVER_THREADS} in each receiver; receivers: {mode}\n")

    schemes = [compare_schemes(kind, count, pairs, mode) for kind in options.kinds for count in options.workers]
    show_schemes(schemes)
    report["schemes"] = [result.as_json() for result in schemes]
    report["group_sizes"] = []
    if "large" in options.kinds:
        sizes = compare_group_sizes("large", options.workers, pairs, mode)
        print()
        show_group_sizes(sizes, of_copy=1.35, of_first=1.15)
        report["group_sizes"].append(sizes.as_json())
    if "mlp" in options.kinds:
        sizes = compare_group_sizes("mlp", bare, pairs, mode)
        print()
        show_group_sizes(sizes, of_copy=None, of_first=6.0)
        report["group_sizes"].append(sizes.as_json())
    if "large" in options.kinds:
        stalls = compare_stalls("large", sorted({1, min(4, max(options.workers))}), pairs, mode)
        print()
        show_stalls(stalls)
        report["stalls"] = stalls.as_json()
        tcp = compare_with_tcp("large", pairs, mode)
        times = f"network {tcp.median('network'):.0f} ms, bare TCP {tcp.median('tcp'):.0f} ms"
        print(f"\nlarge, one worker: {times}: {verdict(tcp.ratio('network', 'tcp'), 1.3)}")
        report["tcp"] = tcp.as_json()
        memory = report["private_memory"] = private_memory("large", min(4, max(options.workers)))
        shares = [100 * grown / memory["nbytes"] for grown in memory["private_bytes"]]
        print(
            f"\nlarge, private memory of each receiver for its weights, in % of the model: {verdict(max(shares), 5.0)}"
        )
    report["load_at_end"] = machine()["load"]
    write(options.json, report)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.push", description="Measure pushes of weights.")
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=list(KINDS), help="models to push")
    parser.add_argument("--workers", nargs="+", type=at_least(1), help="numbers of receivers (1 2 4 8)")
    parser.add_argument("--pairs", type=at_least(1), help="samples of each action (30)")
    add_json(parser)
    parser.add_argument(
        "--receivers",
        choices=["background", "receive"],
        default="background",
        help="who applies pushes in a receiver: the scheme's thread, as in a CollectorGroup (and in TorchRL's scheme), "
        "or its main loop calling receive(), which also copies the weights for the caller after it has acknowledged",
    )
    add_quick(parser, "3 samples, 1 and 2 workers, bare groups of 4 and 8")
    options = parser.parse_args(arguments)
    fill_in(options, quick={"pairs": 3, "workers": [1, 2]}, otherwise={"pairs": 30, "workers": [1, 2, 4, 8]})
    options.workers = sorted(set(options.workers))
    return options


def _check_room(nbytes: int) -> None:
    """Refuse to drive the machine out of memory; where ``/proc`` does not tell, hope."""
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), nbytes)
        if free < nbytes:
            raise MemoryError(f"it needs {size(nbytes)} of memory, and {size(free)} are available")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
