"""Sending never blocks; what waits leaves in order, descriptors included, as the other end reads."""

import os
import time

import pytest

from lightning_weightsync.transports.control import ChannelClosed, ControlChannel
from lightning_weightsync.transports.posting import PostingChannel
from tests.helpers.sockets import num_descriptors, socket_pair
from tests.helpers.threads import Call, soon

PUSH = {"run": 1, "models": [], "values": {}, "budget": 1.0, "initial": False}


@pytest.fixture(params=["unix", "tcp"])
def ends(request):
    ours, theirs = socket_pair(request.param)
    near, far = PostingChannel(ours), ControlChannel(theirs, takes_descriptors=True)
    yield near, far
    near.close()
    far.close()


def test_what_fits_leaves_at_once(ends):
    near, far = ends
    near.send("digest", model_id="a")
    assert not near.has_mail
    assert far.receive(soon())["model_id"] == "a"


def test_what_does_not_fit_waits_and_leaves_in_order(ends):
    near, far = ends
    blobs = [os.urandom(size) for size in (3_000_000, 10, 20_000_000, 0)]
    started = time.monotonic()
    for version, blob in enumerate(blobs):
        near.send("push", blob, version=version, **PUSH)
    assert time.monotonic() - started < 1.0
    assert near.has_mail

    def read_all():
        return [far.receive(soon(20)) for _ in blobs]

    reading = Call(read_all)
    while near.has_mail:
        near.post()
        time.sleep(0.001)
    received = reading.result()
    assert [message["version"] for message in received] == [0, 1, 2, 3]
    assert [message.blob for message in received] == blobs


def test_a_small_message_is_dropped_rather_than_queued_when_there_is_no_room(ends):
    near, _ = ends
    near.send("push", bytes(30_000_000), version=1, **PUSH)
    assert near.has_mail
    assert near.try_send("close") is False


def test_a_descriptor_goes_with_its_own_frame():
    ours, theirs = socket_pair("unix")
    near, far = PostingChannel(ours), ControlChannel(theirs, takes_descriptors=True)
    before = num_descriptors()
    descriptor = os.memfd_create("test")
    try:
        os.write(descriptor, b"bytes")
        near.send("push", bytes(3_000_000), version=1, **PUSH)
        near.send("slot", model_id="a", index=4, nbytes=5, descriptor=descriptor)
        assert near.has_mail
        reading = Call(lambda: [far.receive(soon()) for _ in range(2)])
        while near.has_mail:
            near.post()
            time.sleep(0.001)
        _, slot = reading.result()
        assert os.pread(slot.descriptor, 10, 0) == b"bytes"
        os.close(slot.descriptor)
    finally:
        os.close(descriptor)
        assert num_descriptors() == before
        near.close()
        far.close()


def test_the_end_of_the_connection_ends_it(ends):
    near, far = ends
    near.send("push", bytes(30_000_000), version=1, **PUSH)
    far.close()
    with pytest.raises(ChannelClosed):
        for _ in range(100):
            near.post()
            time.sleep(0.01)
    near.close()
    assert not near.has_mail
    with pytest.raises(ChannelClosed):
        near.send("close")
