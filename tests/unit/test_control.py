import math
import os
import random
import socket
import struct
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_weightsync.transports import control
from lightning_weightsync.transports.control import (
    MAX_BLOB,
    MAX_JSON,
    ChannelClosed,
    ChannelTimeout,
    ControlChannel,
    Message,
    ProtocolError,
)
from lightning_weightsync.transports.memory import create_memory_file
from lightning_weightsync.transports.messages import CARRIES_DESCRIPTOR, LINK_MESSAGES
from tests.helpers.sockets import fill, frame, is_closed, num_descriptors, socket_pair
from tests.helpers.threads import Call, eventually, soon

SCHEMA = {
    "ping": {"number": int},
    "flag": {"on": bool},
    "note": {"text": str, "seconds": float, "items": list, "table": dict},
    "either": {"value": (int, str)},
    "beat": {},
}
SAMPLES = {int: -7, float: 0.25, str: "größe\n\0", bool: True, list: [1, "a", None], dict: {"a": [1.5]}}


@pytest.fixture(params=["unix", "tcp"])
def kind(request):
    return request.param


@pytest.fixture
def sockets(kind):
    pair = socket_pair(kind)
    yield pair
    for sock in pair:
        sock.close()


@pytest.fixture
def channels(sockets):
    return tuple(ControlChannel(sock, SCHEMA) for sock in sockets)


@pytest.fixture
def raw(sockets):
    """A plain socket, and the channel at its other end."""
    return sockets[0], ControlChannel(sockets[1], SCHEMA)


@pytest.fixture
def deaf(kind):
    """A channel whose other end does not read, and that other end."""
    near, far = socket_pair(kind, buffer=4096)
    yield ControlChannel(near, SCHEMA), far
    near.close()
    far.close()


def receive(channel, seconds=5.0):
    return channel.receive(soon(seconds))


def assert_broken(channel):
    """Nothing can be sent or received through the channel any more."""
    assert channel.closed
    assert channel.fileno() == -1
    with pytest.raises(ChannelClosed):
        channel.send("beat")
    with pytest.raises(ChannelClosed):
        channel.try_send("beat")
    with pytest.raises(ChannelClosed):
        channel.receive(soon())
    with pytest.raises(ChannelClosed):
        channel.poll()


@pytest.mark.parametrize("name", sorted(LINK_MESSAGES.keys() - CARRIES_DESCRIPTOR))
def test_every_message_of_a_link_arrives_as_it_was_sent(kind, name):
    fields = {field: SAMPLES[expected] for field, expected in LINK_MESSAGES[name].items()}
    near, far = socket_pair(kind)
    with near, far:
        one, other = ControlChannel(near), ControlChannel(far)
        one.send(name, b"\0blob\xff", **fields)
        message = receive(other)
        assert message == Message(name, fields, b"\0blob\xff")
        assert all(message[field] == value for field, value in fields.items())


SLOT = {"model_id": "policy", "index": 3, "nbytes": 4}


def test_a_file_is_handed_over_with_the_message_that_names_it():
    before = num_descriptors()
    near, far = socket_pair("unix")
    one, other = ControlChannel(near), ControlChannel(far, takes_descriptors=True)
    files = [create_memory_file("test") for _ in range(3)]
    for number, file in enumerate(files):
        os.write(file, bytes([number]) * 4)
        one.send("beat")
        one.send("slot", b"\0blob\xff", descriptor=file, **SLOT)
        os.close(file)
    for number in range(3):
        assert receive(other).kind == "beat"
        message = receive(other)
        assert (message.kind, message.fields, message.blob) == ("slot", SLOT, b"\0blob\xff")
        assert os.pread(message.descriptor, 10, 0) == bytes([number]) * 4
        assert not os.get_inheritable(message.descriptor)
        os.close(message.descriptor)
    one.close()
    other.close()
    assert num_descriptors() == before


def test_a_file_that_was_not_fetched_is_closed_with_the_channel():
    before = num_descriptors()
    near, far = socket_pair("unix")
    one, other = ControlChannel(near), ControlChannel(far, takes_descriptors=True)
    file = create_memory_file("test")
    for _ in range(2):
        one.send("slot", descriptor=file, **SLOT)
    os.close(file)
    os.close(receive(other).descriptor)
    one.close()
    other.close()
    assert num_descriptors() == before


@pytest.mark.parametrize("takes", [True, False])
def test_a_slot_without_its_file_breaks_the_channel(kind, takes):
    near, far = socket_pair(kind)
    with near, far:
        one, other = ControlChannel(near), ControlChannel(far, takes_descriptors=takes)
        one.send("slot", **SLOT)
        with pytest.raises(ProtocolError, match="came without its descriptor"):
            receive(other)
        assert other.closed


def test_files_that_an_end_does_not_take_are_not_left_open_in_it():
    before = num_descriptors()
    near, far = socket_pair("unix")
    one, other = ControlChannel(near), ControlChannel(far)
    file = create_memory_file("test")
    one.send("slot", descriptor=file, **SLOT)
    os.close(file)
    with pytest.raises(ProtocolError):
        receive(other)
    one.close()
    assert num_descriptors() == before


def test_messages_go_both_ways_and_keep_their_order(channels):
    one, other = channels
    for number in range(100):
        one.send("ping", number=number)
        other.send("ping", number=-number)
    assert [receive(other)["number"] for _ in range(100)] == list(range(100))
    assert [receive(one)["number"] for _ in range(100)] == [-number for number in range(100)]


def test_a_message_that_is_larger_than_every_buffer_arrives_whole(channels):
    one, other = channels
    blob = random.Random(0).randbytes(3_000_001)
    sending = Call(one.send, "note", blob, text="x" * 1_000_000, seconds=0.5, items=[], table={})
    message = receive(other)
    sending.result()
    assert (message.blob, len(message["text"])) == (blob, 1_000_000)


@settings(max_examples=60, deadline=None)
@given(
    st.text(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.dictionaries(st.text(max_size=4), st.lists(st.none() | st.booleans() | st.integers() | st.text(), max_size=3)),
    st.binary(max_size=40),
)
def test_any_text_number_table_and_blob_survives(text, number, seconds, table, blob):
    near, far = socket.socketpair()
    with near, far:
        one, other = ControlChannel(near, SCHEMA), ControlChannel(far, SCHEMA)
        fields = {"text": text, "seconds": seconds, "items": [number, text], "table": table}
        one.send("note", blob, **fields)
        assert receive(other) == Message("note", fields, blob)


def test_what_is_not_a_number_may_be_data(channels):
    one, other = channels
    one.send("note", text="", seconds=math.inf, items=[[math.nan, 3]], table={})
    message = receive(other)
    assert message["seconds"] == math.inf
    assert math.isnan(message["items"][0][0])


WRONG_MESSAGES = [
    ("pong", {}),
    ("", {}),
    ("ping", {}),
    ("ping", {"number": 1, "other": 2}),
    ("ping", {"Number": 1}),
    ("ping", {"number": "1"}),
    ("ping", {"number": 1.0}),
    ("ping", {"number": None}),
    ("ping", {"number": [1]}),
    ("ping", {"number": True}),
    ("ping", {"number": False}),
    ("flag", {"on": 1}),
    ("flag", {"on": 0}),
    ("either", {"value": True}),
    ("either", {"value": 1.0}),
    ("note", {"text": "", "seconds": 1, "items": [], "table": {}}),
    ("note", {"text": "", "seconds": True, "items": [], "table": {}}),
    ("note", {"text": "", "seconds": math.nan, "items": [], "table": {}}),
    ("note", {"text": "", "seconds": 1.0, "items": {}, "table": {}}),
    ("note", {"text": "", "seconds": 1.0, "items": [], "table": []}),
    ("beat", {"extra": 0}),
]


@pytest.mark.parametrize(("name", "fields"), WRONG_MESSAGES, ids=str)
def test_a_message_against_the_schema_is_not_sent_and_harms_nothing(channels, name, fields):
    one, other = channels
    with pytest.raises(ValueError):
        one.send(name, **fields)
    with pytest.raises(ValueError):
        one.try_send(name, **fields)
    one.send("ping", number=3)
    assert receive(other)["number"] == 3


@pytest.mark.parametrize(("name", "fields"), WRONG_MESSAGES, ids=str)
def test_a_message_against_the_schema_breaks_the_channel_that_receives_it(raw, name, fields):
    sock, channel = raw
    sock.sendall(frame({"kind": name, **fields}) + frame({"kind": "beat"}))
    with pytest.raises(ProtocolError):
        receive(channel)
    assert_broken(channel)
    assert is_closed(sock)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"null",
        b"3",
        b'"beat"',
        b"[]",
        b'["kind", "beat"]',
        b"{}",
        b'{"kind": null}',
        b'{"kind": 3}',
        b'{"kind": ["beat"]}',
        b'{"kind": {"beat": {}}}',
        b'{"kind": "beat"} {"kind": "beat"}',
        b"{'kind': 'beat'}",
        b'{"kind": "beat\xff"}',
        b'{"kind": "note", "text": "", "seconds": NaN, "items": [], "table": {}}',
        b'{"kind": "note", "text": "", "seconds": 1e, "items": [], "table": {}}',
        b"[" * 100_000,
        b'{"kind": "ping", "number": ' + b"9" * 10_000 + b"}",
        b"\x80\x04]\x94.",
    ],
    ids=lambda body: repr(body[:40]),
)
def test_a_body_that_is_no_message_breaks_the_channel(raw, body):
    sock, channel = raw
    sock.sendall(frame(body))
    with pytest.raises(ProtocolError):
        receive(channel)
    assert_broken(channel)
    assert is_closed(sock)


@pytest.mark.parametrize("sizes", [(MAX_JSON + 1, 0), (0, MAX_BLOB + 1), (0xFFFFFFFF, 0xFFFFFFFF)], ids=str)
def test_a_frame_above_the_cap_breaks_the_channel_before_its_body_comes(raw, sizes):
    sock, channel = raw
    sock.sendall(struct.pack("!II", *sizes))
    with pytest.raises(ProtocolError, match="above the cap"):
        receive(channel)
    assert_broken(channel)


def test_frames_up_to_the_caps_are_received_and_larger_ones_are_never_sent(channels, monkeypatch):
    one, other = channels
    size = len(frame({"kind": "ping", "number": 100})) - 8
    monkeypatch.setattr(control, "MAX_JSON", size)
    monkeypatch.setattr(control, "MAX_BLOB", 10)
    one.send("ping", bytes(10), number=100)
    assert receive(other) == Message("ping", {"number": 100}, bytes(10))
    with pytest.raises(ValueError, match="cap"):
        one.send("ping", number=1000)
    with pytest.raises(ValueError, match="cap"):
        one.send("ping", bytes(11), number=100)
    one.send("ping", number=1)
    assert receive(other)["number"] == 1


def test_random_bytes_are_never_taken_for_a_message():
    generator = random.Random(7)
    for trial in range(200):
        near, far = socket.socketpair()
        with near, far:
            channel = ControlChannel(far)
            junk = generator.randbytes(generator.randrange(1, 200))
            if trial % 2:  # a plausible header, so that the body is looked at
                junk = struct.pack("!II", generator.randrange(len(junk) + 1), 0) + junk
            near.sendall(junk)
            near.close()
            with pytest.raises(ChannelClosed):
                while True:
                    receive(channel)


def test_a_frame_that_comes_byte_by_byte_is_one_message(raw):
    sock, channel = raw
    data = frame({"kind": "ping", "number": 5}, b"blob")
    for byte in data[:-1]:
        sock.send(bytes([byte]))
        assert channel.poll() is None
    sock.send(data[-1:])
    assert receive(channel) == Message("ping", {"number": 5}, b"blob")
    assert channel.poll() is None


def test_two_frames_in_one_read_are_two_messages(raw):
    sock, channel = raw
    sock.sendall(frame({"kind": "ping", "number": 1}, b"\0\0") + frame({"kind": "ping", "number": 2}) + b"\0\0")
    assert receive(channel) == Message("ping", {"number": 1}, b"\0\0")
    # The second one is in the channel already: nothing is left to wait for.
    assert channel.receive(time.monotonic() - 1.0)["number"] == 2
    assert channel.poll() is None


def test_what_was_read_before_the_channel_took_over_comes_first(raw):
    sock, channel = raw
    first, second = frame({"kind": "ping", "number": 1}), frame({"kind": "ping", "number": 2})
    channel.feed(first[:5])
    assert channel.poll() is None
    sock.sendall(first[5:] + second)
    assert [receive(channel)["number"] for _ in range(2)] == [1, 2]
    channel.feed(first + second)
    assert [channel.poll()["number"] for _ in range(2)] == [1, 2]


@pytest.mark.parametrize("kept", [0, 3, 8, 12])
def test_an_end_of_the_connection_in_any_part_of_a_frame_is_the_end_of_the_channel(raw, kept):
    sock, channel = raw
    sock.sendall(frame({"kind": "beat"})[:kept])
    sock.close()
    with pytest.raises(ChannelClosed):
        receive(channel)


def test_messages_that_came_before_the_end_are_still_received(channels):
    one, other = channels
    one.send("ping", number=1)
    one.send("ping", number=2)
    one.close()
    assert [receive(other)["number"] for _ in range(2)] == [1, 2]
    with pytest.raises(ChannelClosed):
        receive(other)


def test_a_deadline_leaves_the_channel_usable(channels):
    one, other = channels
    started = time.monotonic()
    with pytest.raises(ChannelTimeout):
        other.receive(started + 0.1)
    assert 0.1 <= time.monotonic() - started < 1.0
    with pytest.raises(ChannelTimeout):
        other.receive(started)
    assert time.monotonic() - started < 1.0
    one.send("ping", number=1)
    other.send("ping", number=2)
    assert (receive(other)["number"], receive(one)["number"]) == (1, 2)


def test_a_deadline_in_the_middle_of_a_frame_loses_no_byte(raw):
    sock, channel = raw
    data = frame({"kind": "ping", "number": 5}, b"blob")
    for cut in (3, 10, len(data) - 1):
        sock.sendall(data[:cut])
        with pytest.raises(ChannelTimeout):
            channel.receive(soon(0.02))
        sock.sendall(data[cut:])
        assert receive(channel) == Message("ping", {"number": 5}, b"blob")


def test_polling_never_blocks(channels):
    _, other = channels
    started = time.monotonic()
    assert [other.poll() for _ in range(1000)] == [None] * 1000
    assert time.monotonic() - started < 1.0


def test_last_heard_moves_with_every_byte_and_with_nothing_else(raw):
    sock, channel = raw
    before = channel.last_heard
    channel.send("beat")
    assert channel.poll() is None
    assert channel.last_heard == before
    time.sleep(0.002)
    sock.send(b"\0")
    eventually(lambda: channel.poll() or channel.last_heard > before)
    assert channel.last_heard <= time.monotonic()


def test_closing_one_end_from_another_thread_wakes_the_receivers_at_both_within_a_second(channels):
    waiting = [Call(channel.receive, None) for channel in channels]
    time.sleep(0.05)
    assert [call.running for call in waiting] == [True, True]
    channels[0].close()
    for call in waiting:
        with pytest.raises(ChannelClosed):
            call.result(1.0)


def test_closing_from_another_thread_wakes_a_blocked_sender_within_a_second(deaf):
    channel, _ = deaf
    sending = Call(channel.send, "beat", bytes(1 << 22))
    time.sleep(0.05)
    assert sending.running
    channel.close()
    with pytest.raises(ChannelClosed):
        sending.result(1.0)


def test_a_sender_whose_peer_goes_away_is_woken_within_a_second(deaf):
    channel, far = deaf
    sending = Call(channel.send, "beat", bytes(1 << 22))
    time.sleep(0.05)
    far.close()
    with pytest.raises(ChannelClosed):
        sending.result(1.0)


def test_closing_twice_and_from_many_threads_is_fine(channels):
    one, other = channels
    for call in [Call(one.close) for _ in range(8)]:
        call.result()
    one.close()
    assert_broken(one)
    with pytest.raises(ChannelClosed):
        receive(other)


def test_a_send_that_cannot_end_in_time_is_given_up_at_its_deadline(deaf):
    channel, _ = deaf
    started = time.monotonic()
    with pytest.raises(ChannelTimeout):
        channel.send("beat", bytes(1 << 22), deadline=started + 0.2)
    assert 0.2 <= time.monotonic() - started < 1.0


def test_a_send_that_waits_for_another_threads_send_is_given_up_at_its_deadline_too(deaf):
    channel, _ = deaf
    stuck = Call(channel.send, "beat", bytes(1 << 22))
    eventually(channel._sending.locked)
    started = time.monotonic()
    with pytest.raises(ChannelTimeout):
        channel.send("beat", deadline=started + 0.2)
    assert 0.2 <= time.monotonic() - started < 1.0
    assert stuck.running
    channel.close()
    with pytest.raises(ChannelClosed):
        stuck.result(1.0)


def test_nothing_is_ever_written_behind_half_a_frame(deaf):
    """Else the next frame would be read as the rest of the one that was cut."""
    channel, far = deaf
    with pytest.raises(ChannelTimeout):
        channel.send("beat", bytes(1 << 20), deadline=soon(0.05))
    drain = Call(read_all, far)
    with pytest.raises(ChannelClosed):
        for _ in range(100_000):
            channel.send("beat", b"behind", deadline=soon(0.5))
    channel.close()
    received = drain.result()
    assert len(received) < 1 << 20
    assert received == frame({"kind": "beat"}, bytes(1 << 20))[: len(received)]


def test_a_send_that_had_no_room_at_all_leaves_the_channel_usable(deaf):
    channel, far = deaf
    filled = fill(socket.fromfd(channel.fileno(), far.family, far.type))
    with pytest.raises(ChannelTimeout):
        channel.send("ping", number=1, deadline=soon(0.05))
    for _ in range(filled):
        filled -= len(far.recv(min(filled, 1 << 16)))
        if not filled:
            break
    channel.send("ping", number=2, deadline=soon())
    assert receive(ControlChannel(far, SCHEMA))["number"] == 2


def test_trying_to_send_delivers_where_there_is_room(channels):
    one, other = channels
    assert one.try_send("ping", number=4) is True
    assert receive(other)["number"] == 4


def test_trying_to_send_to_a_peer_that_does_not_read_stops_without_blocking(deaf):
    channel, far = deaf
    slowest, sent = 0.0, 0
    for _ in range(100_000):
        started = time.monotonic()
        accepted = channel.try_send("ping", number=sent)
        slowest = max(slowest, time.monotonic() - started)
        if not accepted:
            break
        sent += 1
    assert slowest < 0.5
    assert channel.try_send("beat") is False
    peer = ControlChannel(far, SCHEMA)
    assert [receive(peer)["number"] for _ in range(sent)] == list(range(sent))
    assert peer.poll() is None  # no frame was cut


def test_trying_to_send_never_waits_for_a_thread_that_is_stuck_in_a_send(kind):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads change places wherever they can
    try:
        for _ in range(150):
            near, far = socket_pair(kind, buffer=4096)
            channel = ControlChannel(near, SCHEMA)
            stuck = Call(channel.send, "note", bytes(1 << 20), text="", seconds=0.0, items=[], table={})
            trying = Call(lambda channel: [channel.try_send("beat") for _ in range(50)], channel)
            trying.result(2.0)
            channel.close()
            with pytest.raises(ChannelClosed):
                stuck.result(2.0)
            far.close()
    finally:
        sys.setswitchinterval(interval)


def test_threads_that_send_at_once_do_not_mix_their_frames(kind):
    near, far = socket_pair(kind, buffer=8192 if kind == "unix" else None)  # loopback TCP crawls through small buffers
    with near, far:
        one, other = ControlChannel(near, SCHEMA), ControlChannel(far, SCHEMA)
        start = threading.Barrier(8)

        def send(thread):
            start.wait()
            for number in range(40):
                one.send("ping", bytes([thread]) * (thread * 4999 + number), number=thread * 1000 + number)
                one.try_send("beat")

        calls = [Call(send, thread) for thread in range(8)]
        seen = {thread: [] for thread in range(8)}
        while sum(map(len, seen.values())) < 320:
            message = receive(other)
            if message.kind == "ping":
                thread, number = divmod(message["number"], 1000)
                assert message.blob == bytes([thread]) * (thread * 4999 + number)
                seen[thread].append(number)
        for call in calls:
            call.result()
        assert seen == {thread: list(range(40)) for thread in range(8)}


def test_a_descriptor_above_1023_can_be_waited_on():
    resource = pytest.importorskip("resource")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft <= 1100:
        pytest.skip("this process may not have that many descriptors")
    near, far = socket.socketpair()
    holders = [near.dup()]
    try:
        while holders[-1].fileno() < 1024:
            holders.append(near.dup())
        channel = ControlChannel(holders.pop(), SCHEMA)
        with pytest.raises(ChannelTimeout):
            channel.receive(soon(0.01))
        ControlChannel(far, SCHEMA).send("ping", number=1)
        assert receive(channel)["number"] == 1
        channel.close()
    finally:
        for sock in (near, far, *holders):
            sock.close()


def test_a_peer_that_never_stops_sending_does_not_hold_up_a_deadline(raw):
    _, channel = raw
    channel.feed(struct.pack("!II", 0, MAX_BLOB))
    looks = 0

    class Endless:
        """Has always more to be read."""

        def recv(self, size):
            nonlocal looks
            looks += 1
            assert looks < 1000
            return b"x" * 100

        def __getattr__(self, name):
            return getattr(channel_sock, name)

    channel_sock, channel._sock = channel._sock, Endless()
    started = time.monotonic()
    assert channel.poll() is None
    assert looks < 100
    with pytest.raises(ChannelTimeout):
        channel.receive(started)
    channel._sock = channel_sock


def read_all(sock):
    sock.setblocking(True)
    parts = []
    while True:
        try:
            part = sock.recv(1 << 16)
        except ConnectionError:
            part = b""
        if not part:
            return b"".join(parts)
        parts.append(part)
