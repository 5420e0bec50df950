"""``backend="nccl"``: refused at once where it cannot work; device to device where there are two GPUs."""

import time

import pytest
import torch
from torch import nn

from lightning_weightsync import DistributedWeightSyncScheme, WeightSyncError
from lightning_weightsync.transports.meeting import LateMeeting
from tests.helpers import schemes
from tests.helpers.leaves import assert_same_bits, fill, leaves_of
from tests.helpers.schemes import altered, over_network

needs_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL moves memory between two GPUs, and this machine has not got them"
)
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@needs_no_gpu
def test_a_sender_without_a_gpu_says_so_before_anybody_connects():
    scheme = DistributedWeightSyncScheme(backend="nccl")
    with pytest.raises(WeightSyncError, match="backend='nccl' (is not part of|moves memory of GPUs)"):
        scheme.init_on_sender("policy", model=nn.Linear(2, 2), num_workers=1)


@needs_no_gpu
@over_network
def test_a_worker_without_a_gpu_is_an_error_on_both_sides_at_once(connect, receivers, monkeypatch):
    monkeypatch.setattr(DistributedWeightSyncScheme, "check_backend", lambda self: None)
    monkeypatch.setattr(DistributedWeightSyncScheme, "slot_device", torch.device("cpu"))
    sender = connect.sender(source := nn.Linear(2, 2), backend="nccl")
    receivers[0].call(schemes.init, sender, altered(source), worker_idx=0)
    joining = receivers[0].begin(schemes.connect)
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"worker 0: backend='nccl' ") as here:
        sender.connect()
    assert list(here.value.failed) == [0]
    with pytest.raises(WeightSyncError, match="backend='nccl'"):
        joining.result(5)
    assert time.monotonic() - started < 2.0


def test_the_identifier_is_told_when_it_is_made_and_when_it_is_asked_for():
    told = []

    def exchange(ours, deadline):
        told.append(dict(ours))
        return {"theirs": b"x"}

    meeting = LateMeeting(exchange, time.monotonic() + 5)
    meeting.set("some other value", b"short")
    assert told == []
    meeting.set("identifier", bytes(128))
    assert [sorted(values) for values in told] == [["identifier", "some other value"]]
    assert (meeting.check(["identifier", "theirs"]), meeting.check(["another"])) == (True, False)
    asking = LateMeeting(exchange, time.monotonic() + 5)
    assert asking.get("theirs") == b"x"
    assert len(told) == 2


@needs_gpus
@pytest.mark.gpu
@over_network
@pytest.mark.parametrize("verify", [False, True])
def test_weights_go_from_device_to_device(connect, receivers, verify):
    source = nn.Sequential(nn.Linear(500, 500), nn.BatchNorm1d(500)).to("cuda:0")
    sender = connect.sender(source, backend="nccl", verify=verify)
    receivers[0].call(schemes.init, sender, altered(source).to("cuda:1"), worker_idx=0)
    joining = receivers[0].begin(schemes.connect)
    sender.connect()
    receivers[0].result_of(joining)
    for value in (1.0, 2.0, 3.0):
        fill(source, value)
        waiting = receivers[0].begin(schemes.receive)
        sender.send()
        assert waiting.result(20) is not None
        held = {name: leaf.cpu() for name, leaf in receivers[0].call(schemes.leaves).items()}
        assert_same_bits(held, {name: leaf.cpu() for name, leaf in leaves_of(source).items()})
