"""``doctor``: is this machine fit for workers that share memory with a trainer? What is not, and how to mend it."""

from __future__ import annotations

import argparse
import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from lightning_weightsync.wording import size

PER_WORKER = 24
"""Descriptors that a worker may cost the trainer. With two models it was 5 over shared memory, 14 over the network."""

_OURS = "lightning-weightsync"
_EXTRAS = ("gym", "torchrl", "plots")
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[.*?\])?(?P<versions>[^;]*)(?:;.*extra == ['\"](?P<extra>\w+)['\"])?")
"""As package metadata has them; ``packaging``, which reads them too, is installed with what may be missing."""

_MALICIOUS = {"lightning": "a malicious release: rotate the credentials of this machine (GHSA-w37p-236h-pfx3)"}
"""Why versions of a package are excluded; which they are, its requirement says."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: ``"ok"``, ``"note"`` or ``"BAD"``.
        what: Its name.
        found: What there is.
        mend: What to do, where that is not enough.
    """

    level: str
    what: str
    found: str
    mend: str = ""

    def __str__(self) -> str:
        text = f"{self.level:4} {self.what:16} {self.found}"
        return f"{text}\n{'':21} -> {self.mend}" if self.mend else text


def main(arguments: list[str]) -> int:
    """Print the findings.

    Returns:
        0, or 1 if something is bad.
    """
    argparse.ArgumentParser(prog="lightning-weightsync doctor", description=__doc__).parse_args(arguments)
    findings = list(examine())
    for finding in findings:
        print(finding)
    bad = [finding.what for finding in findings if finding.level == "BAD"]
    print(f"bad: {', '.join(bad)}" if bad else "fit")
    return int(bool(bad))


def examine() -> Iterator[Finding]:
    """Look at everything, one thing after the other; what raises is a finding too."""
    looks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("python", _python),
        ("packages", _packages),
        ("cores", _cores),
        ("memory", _memory),
        ("shared memory", _shared_memory),
        ("descriptors", _descriptors),
        ("processes", _processes),
        ("loopback", _ports),
        ("interfaces", _interfaces),
        ("gloo", _gloo),
        ("temporary files", _temporary),
        ("environment", _environment),
    ]
    for what, look in looks:
        try:
            yield from look()
        except Exception as error:
            yield Finding("BAD", what, f"looking at it raised {type(error).__name__}: {error}", "see the message")


def _judged(wrong: bool, what: str, found: str, mend: str) -> Finding:
    """How to mend it is told only where something is wrong."""
    return Finding("BAD", what, found, mend) if wrong else Finding("ok", what, found)


def _python() -> Iterator[Finding]:
    found = f"{platform.python_version()} on {platform.system()} {platform.release()} ({platform.machine()})"
    yield _judged(sys.version_info < (3, 10), "python", found, "install Python 3.10 or newer")


def _packages() -> Iterator[Finding]:
    """What the package's own metadata asks for, and what its extras do."""
    try:
        requirements = _requirements()
    except metadata.PackageNotFoundError:
        found = f"{_OURS} itself is not installed, so what it needs is not known"
        yield Finding("note", "packages", found, f"pip install {_OURS}")
        return
    for name, versions, extra in requirements:
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            mend = f"pip install '{_OURS}[{extra}]', if needed" if extra else f"pip install '{name}{versions}'"
            yield Finding("note" if extra else "BAD", name, "is not installed", mend)
            continue
        reason = _refused(found, versions)
        why = f", {_MALICIOUS[name]}" if reason == "excluded" and name in _MALICIOUS else ""
        yield _judged(bool(reason), name, f"{found}{why}" if reason else found, f"pip install -U '{name}{versions}'")


def _requirements() -> list[tuple[str, str, str]]:
    """Name, versions and extra (``""``: always needed) of each."""
    parsed = [match for text in metadata.requires(_OURS) or () if (match := _REQUIREMENT.match(text))]
    found = [(match["name"], match["versions"].strip(), match["extra"] or "") for match in parsed]
    return [one for extra in ("", *_EXTRAS) for one in found if one[2] == extra]


def _refused(found: str, versions: str) -> str:
    """``"excluded"`` or ``"too old"``, if a requirement such as ``>=2.5,!=2.6.2`` does not take this version."""
    for relation, wanted in re.findall(r"(>=|!=)([\w.]+)", versions):
        if relation == "!=" and found == wanted:
            return "excluded"
        if relation == ">=" and _numbers(found) < _numbers(wanted):
            return "too old"
    return ""


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".") if part.isdigit())


def _cores() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0]
    mend = "each worker wants a core of its own: num_workers beyond that does not collect faster" if cores < 3 else ""
    yield Finding("note" if mend else "ok", "cores", f"{cores}, load {load:.1f}", mend)


def _memory() -> Iterator[Finding]:
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    free = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}.get("MemAvailable")
    if free is None:
        yield Finding("note", "memory", "not told by this system")
        return
    mend = "a worker needs 0.3 GB to begin with: end other programs, or lower collector.num_workers"
    yield _judged(free < 1 << 30, "memory", f"{size(free)} available", mend)


def _shared_memory() -> Iterator[Finding]:
    from lightning_weightsync.transports.memory import create_memory_file, map_memory

    descriptor = create_memory_file("doctor")
    try:
        map_memory(descriptor, 1 << 20)[0] = 1
    finally:
        os.close(descriptor)
    if hasattr(os, "memfd_create"):
        yield Finding("ok", "shared memory", "anonymous memory files (memfd): nothing is left behind in any crash")
    else:
        where = tempfile.gettempdir()
        yield Finding(
            "note",
            "shared memory",
            f"no memfd here: unlinked files in {where}, {_free(where)} free",
            "set TMPDIR to a folder in memory, if there is one",
        )
    if Path("/dev/shm").exists() and shutil.disk_usage("/dev/shm").free < 64 << 20:
        yield Finding(
            "note",
            "/dev/shm",
            f"{_free('/dev/shm')} free: not used by this package, but by torch's DataLoader",
            "docker run --shm-size=1g ...",
        )


def _free(folder: str) -> str:
    return size(shutil.disk_usage(folder).free)


def _descriptors() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(0, soft - 128) // PER_WORKER
    found = f"{soft} open files allowed (at most {hard}): enough for {most} workers"
    yield _judged(most < 8, "descriptors", found, f"ulimit -n {min(hard, 4096) if hard > 0 else 4096}")


def _processes() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    found = "no limit" if soft < 0 else f"{soft} processes and threads allowed"
    yield _judged(0 <= soft < 256, "processes", found, "ulimit -u 4096")


def _ports() -> Iterator[Finding]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 2.0):
        yield Finding("ok", "loopback", f"listens and connects (port {server.getsockname()[1]})")
    path = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if path.exists():
        low, high = map(int, path.read_text().split())
        mend = "sysctl -w net.ipv4.ip_local_port_range='32768 60999'"
        yield _judged(high - low < 1000, "ports", f"{low} to {high} for the system to give", mend)


def _interfaces() -> Iterator[Finding]:
    names = [name for _, name in socket.if_nameindex()]
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)})
    except OSError:
        addresses = []
    loopback_only = all(address.startswith("127.") or address == "::1" for address in addresses)
    found = (
        f"{', '.join(names) or 'none'}; {socket.gethostname()} is {', '.join(addresses) or 'unknown to the resolver'}"
    )
    mend = (
        "fine on one host; for workers elsewhere give weight_sync_scheme.host an address that they can reach"
        if loopback_only
        else ""
    )
    yield Finding("note" if mend else "ok", "interfaces", found, mend)


def _gloo() -> Iterator[Finding]:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        yield Finding(
            "note",
            "gloo",
            "is not in this torch: weights reach workers of this host only",
            "install torch with distributed support",
        )
    else:
        nccl = dist.is_nccl_available()
        yield Finding("ok", "gloo", f"is there; nccl is {'there' if nccl else 'not'}")


def _temporary() -> Iterator[Finding]:
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x")
    yield Finding("ok", "temporary files", f"{tempfile.gettempdir()}, {_free(tempfile.gettempdir())} free")


def _environment() -> Iterator[Finding]:
    stray = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK") if name in os.environ]
    if stray:
        yield Finding(
            "note",
            "environment",
            f"{', '.join(stray)} set: a Trainer takes itself for one of several",
            f"unset {' '.join(stray)}, unless a launcher has set them",
        )
    else:
        yield Finding("ok", "environment", "no stray variables of a distributed launcher")
