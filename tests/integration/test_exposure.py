"""Who can reach the sender and its workers, and what can those do who do not hold the key? Nothing that lasts."""

import ast
import contextlib
import io
import os
import socket
import struct
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import lightning_weightsync
from lightning_weightsync import DistributedWeightSyncScheme, WeightSyncError
from lightning_weightsync.schemes.extra_state import unpack
from lightning_weightsync.transports.hub import LinkHub
from tests.helpers import schemes
from tests.helpers.holdings import num_sockets, tcp_listeners, unix_listeners
from tests.helpers.leaves import assert_same_bits, fill, leaves_of
from tests.helpers.processes import wait_until
from tests.helpers.schemes import Connected, altered, assert_text, layers, over_network
from tests.helpers.strangers import Flood

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's tables of sockets")

PUSH_SECONDS = 5.0


def pids_of(connected):
    return [os.getpid(), *[process.pid for process in connected.processes]]


def links_of(scheme):
    """Process and generation of who has each index."""
    return {index: (link.pid, link.generation) for index, link in scheme._hub.links.items()}


class Listeners:
    """Collects what some processes listen on, again and again, until ``close``; what they had before does not count."""

    def __init__(self, pids):
        self._pids = list(pids)
        self._before = {pid: (tcp_listeners(pid), unix_listeners(pid)) for pid in pids}
        self.tcp = {pid: set() for pid in pids}
        self.unix = {pid: set() for pid in pids}
        self.looks = 0
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self):
        while not self._enough.is_set():
            self.look()

    def look(self):
        for pid in self._pids:
            tcp, unix = self._before[pid]
            self.tcp[pid] |= tcp_listeners(pid) - tcp
            self.unix[pid] |= unix_listeners(pid) - unix
        self.looks += 1

    def close(self):
        self._enough.set()
        self._thread.join()


# --- where they listen ---------------------------------------------------------------------------------------------


def test_sender_and_workers_listen_on_the_loopback_interface_only_from_connecting_to_pushing(connect, receivers):
    pids = [os.getpid(), receivers[0].pid, receivers[1].pid]
    for process in list(receivers)[:2]:
        process.call(lambda box: None)  # it is ready
    with contextlib.closing(Listeners(pids)) as found:
        connected = connect(source := layers(64), 2, sync=False)
        looks = found.looks
        while found.looks < looks + 10:
            fill(source, found.looks)
            connected.push()
    rendezvous = ("127.0.0.1", connected.scheme.get_store_info()["port"])
    assert rendezvous in found.tcp[os.getpid()]
    assert {host for addresses in found.tcp.values() for host, _ in addresses} == {"127.0.0.1"}
    if connect.same_host == "shared_memory":
        assert found.tcp[os.getpid()] == {rendezvous}
        assert [len(found.unix[pid]) for pid in pids] == [1, 0, 0]  # of no file: nobody can leave one behind
        assert found.unix[os.getpid()].pop().startswith("@lightning_weightsync-")
        assert not found.tcp[pids[1]] and not found.tcp[pids[2]]
    else:
        assert [len(found.tcp[pid]) for pid in pids] == [3, 1, 1]  # a port of gloo's at either end of each pair
        assert not any(found.unix.values())


@over_network
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_once_a_pair_is_complete_its_ports_let_nobody_in(connect, host):
    found = Listeners([os.getpid(), connect.receivers[0].pid])
    connected = connect(source := layers(), host=host)
    found.look()
    found.close()
    rendezvous = connected.scheme.get_store_info()["port"]
    addresses = [address for several in found.tcp.values() for address in several if address[1] != rendezvous]
    assert len(addresses) == 2 and {address for address, _ in addresses} == {host}
    for address in addresses:
        with pytest.raises(TimeoutError):
            socket.create_connection(address, timeout=0.3)
    connected.push()
    assert_same_bits(connected.leaves(), leaves_of(source))


# --- a flood -------------------------------------------------------------------------------------------------------


def test_a_flood_at_every_socket_that_listens_delays_no_push_and_changes_nothing(connect):
    found = Listeners([os.getpid(), *[process.pid for process in list(connect.receivers)[:2]]])
    connected = connect(source := layers(64), 2, sync=False, timeout=PUSH_SECONDS)
    found.look()
    found.close()
    pids, info = pids_of(connected), connected.scheme.get_store_info()
    addresses = [address for pid in pids for address in (*found.tcp[pid], *found.unix[pid])]
    assert len(addresses) == (2 if connect.same_host == "shared_memory" else 5)
    before = [num_sockets(pid) for pid in pids]
    slowest, pushes = 0.0, 0
    with Flood(addresses) as flood:
        while flood.under_way or pushes < 50:
            fill(source, pushes)
            started = time.monotonic()
            connected.push()
            slowest, pushes = max(slowest, time.monotonic() - started), pushes + 1
        accepted = flood.wait()
        during = [num_sockets(pid) for pid in pids]
        connected.push()
    assert slowest < PUSH_SECONDS
    assert connected.versions == [pushes + 1] * 2
    for worker in range(2):
        assert_same_bits(connected.leaves(worker), leaves_of(source))
    # Those at the rendezvous wait in the system's queue, as far as it goes; nobody gets into one of our processes.
    assert during == before
    assert all(number <= 1025 for number in accepted)
    assert connected.scheme.get_store_info() == info
    assert links_of(connected.scheme) == {0: (pids[1], 0), 1: (pids[2], 0)}


def test_a_flood_while_they_connect_delays_nobody_beyond_the_deadline_and_takes_no_index(connect):
    """The queue is full before anybody comes, and strangers come again and again while the workers connect."""
    sender = connect.sender(source := layers(), 2, sync=False, connect_timeout=20.0)
    info = sender.get_store_info()
    addresses = [("127.0.0.1", info["port"]), *[f"@{info['local']}" for _ in range(1) if info["local"]]]
    processes = list(connect.receivers)[:2]
    for index, process in enumerate(processes):
        process.call(schemes.init, sender, altered(source), worker_idx=index)
    with Flood(addresses) as first, Flood(addresses, before=b"LWS1", for_ever=True):
        first.wait()
        joining = [process.begin(schemes.connect) for process in processes]
        time.sleep(0.3)
        started = time.monotonic()
        sender.connect()
        for future in joining:
            future.result(10.0)
        assert time.monotonic() - started < 15.0
        connected = Connected(sender, processes)
        fill(source, 5.0)
        connected.push()
    assert links_of(sender) == {index: (process.pid, 0) for index, process in enumerate(processes)}
    assert connected.versions == [1, 1]
    for worker in range(2):
        assert_same_bits(connected.leaves(worker), leaves_of(source))
    assert sender.get_store_info() == info


@pytest.mark.slow
@over_network
def test_a_flood_at_the_ports_of_a_pair_that_is_being_formed_is_shut_out_with_it(connect, monkeypatch):
    """gloo keeps what has connected to it until its group is closed; what comes later does not get in."""
    floods, real_swap = [], LinkHub.swap

    def swap(hub, link, model_id, ours, deadline):
        mine = found.tcp[os.getpid()]
        assert wait_until(lambda: len(mine) == 2, 5.0)  # the rendezvous, and this pair's
        floods.append(Flood([address for address in mine if address[1] != hub.info["port"]]))
        time.sleep(0.05)
        return real_swap(hub, link, model_id, ours, deadline)

    monkeypatch.setattr(LinkHub, "swap", swap)
    with contextlib.closing(Listeners([os.getpid()])) as found, contextlib.ExitStack() as stack:
        try:
            connected = connect(source := layers(), sync=False)
        finally:
            for flood in floods:
                stack.enter_context(flood)
        for value in range(20):
            fill(source, value)
            connected.push()
        floods[0].wait()
        inside = num_sockets(os.getpid())
        with Flood(found.tcp[os.getpid()]) as second:
            second.wait()
            assert num_sockets(os.getpid()) == inside
        connected.push()
        assert_same_bits(connected.leaves(), leaves_of(source))
    assert connected.versions == [21]


# --- taking somebody's place ---------------------------------------------------------------------------------------


@over_network
def test_whoever_takes_a_workers_place_in_its_pair_gets_no_weights_and_is_found_out(connect, monkeypatch):
    """gloo believes anybody who names the number of the pair, and the numbers are small."""
    strangers, real_swap = [], LinkHub.swap

    def swap(hub, link, model_id, ours, deadline):
        found.look()
        theirs = real_swap(hub, link, model_id, {}, deadline)  # the worker finds nobody, and listens
        for address in {*found.tcp[os.getpid()], *found.tcp[pid]} - {("127.0.0.1", hub.info["port"])}:
            for number in (0, 1):
                strangers.append(socket.create_connection(address, timeout=2.0))
                strangers[-1].sendall(struct.pack("=q", number))
        return theirs

    monkeypatch.setattr(LinkHub, "swap", swap)
    pid = connect.receivers[0].pid
    connect.receivers[0].call(lambda box: None)
    with contextlib.closing(Listeners([os.getpid(), pid])) as found:
        theirs = altered(source := layers())
        before = leaves_of(theirs)
        sender, (joining,) = connect.begin(source, receiver_model=theirs, connect_timeout=3.0)
        started = time.monotonic()
        with pytest.raises(WeightSyncError) as here:
            sender.connect()
        assert time.monotonic() - started < 5.0
        with pytest.raises(WeightSyncError):
            joining.result(5.0)
    assert list(here.value.failed) == [0]
    assert_text(here.value, "worker 0", "pair group")
    assert strangers
    for stranger in strangers:
        stranger.settimeout(0.1)
        with contextlib.suppress(OSError):
            assert len(stranger.recv(1 << 16)) < 200  # a proof at most, which nobody asks for a second time
        stranger.close()
    assert_same_bits(connect.receivers[0].call(schemes.leaves), before)


# --- what is told where --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_a_wildcard_is_refused_before_anything_listens(host):
    before = tcp_listeners(os.getpid())
    with pytest.raises(ValueError, match="no address that a worker can connect to"):
        DistributedWeightSyncScheme(host=host)
    assert tcp_listeners(os.getpid()) == before


def test_the_key_is_in_no_command_line_environment_or_error_of_a_run(connect):
    connected = connect(layers(), 2, sync=False)
    key = connected.scheme.get_store_info()["authkey"]
    for pid in pids_of(connected):
        for name in ("cmdline", "environ"):
            assert key.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
    connected.processes[0].kill()
    with pytest.raises(WeightSyncError) as caught:
        connected.push()
    assert key not in repr(caught.value) and key not in repr(connected.scheme)


def test_nothing_that_comes_from_a_socket_is_unpickled():
    """The one pickle is the worker's factory, through the pipe that it has inherited from its parent.

    Two more are not from anywhere else: a factory inside a pickle of its group, and one that ``check`` has just made.
    """
    package, kinds = Path(lightning_weightsync.__file__).parent, set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("load", "loads", "Unpickler"):
                safe = "weights_only=True" in map(ast.unparse, node.keywords)
                kinds.add((path.relative_to(package).as_posix(), ast.unparse(node.func), safe))
    assert kinds == {
        ("collectors/group.py", "cloudpickle.loads", False),
        ("collectors/values.py", "json.loads", False),
        ("collectors/worker.py", "cloudpickle.loads", False),
        ("commands/plan.py", "cloudpickle.loads", False),
        ("report/events.py", "json.loads", False),
        ("schemes/extra_state.py", "torch.load", True),
        ("transports/bodies.py", "json.loads", False),
    }


def test_a_file_that_pretends_to_be_extra_state_runs_nothing(tmp_path):
    class Mine:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    buffer = io.BytesIO()
    torch.save({"": Mine()}, buffer)
    with pytest.raises(Exception, match="(?i)weights.only"):
        unpack(buffer.getvalue())
    assert not (tmp_path / "ran").exists()
