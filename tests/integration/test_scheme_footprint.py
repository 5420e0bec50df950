"""What a push costs and touches: messages, memory, and nothing of the process that it runs in."""

import json
import os
import random
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_weightsync.transports.posting import PostingChannel
from tests.helpers import schemes
from tests.helpers.holdings import holdings, resident_bytes
from tests.helpers.leaves import assert_same_bits, fill, leaves_of, scramble
from tests.helpers.schemes import over_network


def small():
    return nn.Linear(3, 2)


def many(count):
    return nn.ParameterDict({f"leaf{number}": nn.Parameter(torch.zeros(64)) for number in range(count)})


# --- messages and memory -------------------------------------------------------------------------------------------


class Counting:
    """A process group that counts what it sends."""

    def __init__(self, group):
        self.group = group
        self.sends = 0

    def send(self, *args):
        self.sends += 1
        return self.group.send(*args)

    def __getattr__(self, name):
        return getattr(self.group, name)


def count_push(connected, monkeypatch):
    """(Transfers, control messages) of one push, on the sender's side."""
    groups, messages = [], []
    write = PostingChannel._write

    def counted(channel, frame, *args):
        size = int.from_bytes(frame[:4], "big")
        messages.append(json.loads(frame[8 : 8 + size])["kind"])
        write(channel, frame, *args)

    with monkeypatch.context() as patch:
        for transport in connected.scheme.sender_transports.values():
            if hasattr(transport, "_group"):
                groups.append(Counting(transport._group))
                patch.setattr(transport, "_group", groups[-1])
        patch.setattr(PostingChannel, "_write", counted)
        connected.push()
    return sum(group.sends for group in groups), messages


@pytest.mark.parametrize("at_rest", [False, True], ids=["awake", "at rest"])
def test_a_push_is_one_transfer_and_one_announcement_per_worker_however_many_leaves_there_are(
    connect, monkeypatch, at_rest
):
    """In shared memory it is no transfer at all; what is said there besides is said once for each slot.

    Workers of this host that are at rest are told nothing.
    """
    counts = []
    for leaves in (2, 2000):
        connected = connect(source := many(leaves), 2, sync=False)
        if not at_rest:
            for process in connected.processes:
                process.call(lambda box: box.scheme.add_applied_hook(lambda model, version: None))
        for _ in range(3):
            connected.push()
        scramble(source.parameters(), seed=leaves)
        counts.append(count_push(connected, monkeypatch))
        for worker in range(2):
            assert_same_bits(connected.leaves(worker), leaves_of(source))
        for process in connected.processes:
            process.call(schemes.shutdown)
    is_local = connect.same_host == "shared_memory"
    assert counts == [(0 if is_local else 2, [] if is_local and at_rest else ["push", "push"])] * 2


@pytest.mark.slow
def test_memory_is_flat_over_two_hundred_pushes(connect):
    """2,000 leaves, 512 kB: 200 of them kept anywhere would be 100 MB."""

    def everywhere():
        return [resident_bytes(), *(process.call(lambda box: resident_bytes()) for process in connected.processes)]

    connected = connect(source := many(2000), 2, sync=False)
    for _ in range(10):
        connected.push()
    before = everywhere()
    for _ in range(200):
        connected.push()
    growth = [after - then for after, then in zip(everywhere(), before, strict=True)]
    assert max(growth) < 10 << 20
    assert connected.versions == [210, 210]
    assert_same_bits(connected.leaves(), leaves_of(source))


# --- what is not touched -------------------------------------------------------------------------------------------


def random_states():
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


def test_no_random_stream_moves_on_either_side(connect):
    def remember(box):
        box.before = random_states()

    source = small()
    here = random_states()
    connected = connect(source)
    connected.processes[0].call(remember)
    for _ in range(3):
        connected.push()
    assert random_states() == here
    assert connected.processes[0].call(lambda box: random_states() == box.before)


@pytest.mark.parametrize("sync", [True, False])
def test_the_default_process_group_is_never_initialised(connect, sync):
    connected = connect(small(), 2, sync=sync)
    connected.push()
    assert not dist.is_initialized()
    assert not any(process.call(lambda box: dist.is_initialized()) for process in connected.processes)
    connected.scheme.shutdown()
    assert not dist.is_initialized()


def join_default_group(rank, file):
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )


def reduced(rank):
    value = torch.tensor([rank + 1.0])
    dist.all_reduce(value)
    return value.item()


def test_pushes_work_beside_a_default_group_of_the_user(connect, tmp_path):
    """The user's group has the sender and a worker in it: its all-reduce still gives the sum, before and after."""
    process = connect.receivers[0]
    joining = process.begin(lambda box, file: join_default_group(1, file), str(tmp_path / "store"))
    join_default_group(0, tmp_path / "store")
    try:
        process.result_of(joining)
        connected = connect(source := small(), sync=False)
        for value in (1.0, 2.0):
            over_there = process.begin(lambda box: reduced(1))
            assert reduced(0) == process.result_of(over_there) == 3.0
            fill(source, value)
            connected.push()
            assert_same_bits(connected.leaves(), leaves_of(source))
        connected.scheme.shutdown()
        process.call(schemes.shutdown)
        assert (dist.is_initialized(), dist.get_world_size(), dist.get_rank()) == (True, 2, 0)
        over_there = process.begin(lambda box: reduced(1))
        assert reduced(0) == process.result_of(over_there) == 3.0
    finally:
        leaving = process.begin(lambda box: dist.destroy_process_group())
        dist.destroy_process_group()
        process.result_of(leaving)


STRAY = {
    "RANK": "3", "LOCAL_RANK": "3", "NODE_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "1", "GLOO_SOCKET_IFNAME": "nosuchif0",
}  # fmt: skip


def test_stray_variables_of_a_launcher_do_not_matter(connect, monkeypatch):
    for name, value in STRAY.items():
        monkeypatch.setenv(name, value)

    def set_stray(box):
        box.environment = dict(os.environ)
        os.environ.update(STRAY)

    def restore(box):
        os.environ.clear()
        os.environ.update(box.environment)

    for process in list(connect.receivers)[:2]:
        process.call(set_stray)
    try:
        connected = connect(source := small(), 2, sync=False)
        fill(source, 3.0)
        connected.push()
        for worker in range(2):
            assert_same_bits(connected.leaves(worker), leaves_of(source))
    finally:
        for process in list(connect.receivers)[:2]:
            process.call(restore)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2", "::1"])
def test_the_sender_listens_where_it_is_told(connect, host):
    connected = connect(source := small(), host=host)
    assert connected.scheme.get_store_info()["host"] == host
    fill(source, 3.0)
    connected.push()
    assert_same_bits(connected.leaves(), leaves_of(source))


@over_network
def test_each_side_listens_on_its_own_address(connect):
    """A worker of another host has no interface with the sender's address: gloo must not try to listen there."""
    before = set(holdings().ports)
    connected = connect(small(), host="127.0.0.2")
    here = set(holdings().ports) - before
    there, own = connected.processes[0].call(lambda box: (holdings().ports, box.scheme._link.local_host))
    assert own == "127.0.0.1"  # what the kernel chooses to reach 127.0.0.2 from
    assert {address.split(":")[0] for address in here} == {"127.0.0.2"}
    assert {address.split(":")[0] for address in there} == {"127.0.0.1"}
