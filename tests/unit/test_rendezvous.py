import contextlib
import errno
import os
import random
import socket
import subprocess
import sys
import time
from ipaddress import ip_address
from pathlib import Path

import pytest

from lightning_weightsync.errors import WeightSyncError, WeightSyncTimeout
from lightning_weightsync.transports import rendezvous as module_under_test
from lightning_weightsync.transports.control import ChannelClosed, ControlChannel
from lightning_weightsync.transports.dialling import join
from lightning_weightsync.transports.rendezvous import Rendezvous, bind_listener, check_host
from tests.helpers.sockets import frame, is_closed, num_descriptors
from tests.helpers.threads import Call, soon

WELCOME = {"generation": 2, "heartbeat_timeout": 30.0}
HELLO = {"kind": "hello", "worker_idx": 0, "pid": 1}


def say_hello(sock, worker_idx=0, pid=1):
    sock.sendall(frame({"kind": "hello", "worker_idx": worker_idx, "pid": pid}))


def patiently(missing):
    """A watch that never gives up."""


@pytest.fixture
def rendezvous():
    sender = Rendezvous()
    yield sender
    sender.close()


@pytest.fixture
def closing():
    """Collects sockets and channels, and closes them at the end."""
    with contextlib.ExitStack() as stack:

        def keep(item):
            stack.callback(item.close)
            return item

        yield keep


def dial(sender):
    return socket.create_connection((sender.info["host"], sender.info["port"]), timeout=5.0)


def read_exactly(sock, size):
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        assert part, "closed too early"
        data += part
    return data


def credentials(info, greeting, nonce=bytes(32)):
    """What a worker that holds the key answers to a greeting."""
    assert greeting[:4] == b"LWS1"
    return nonce + module_under_test.mac(bytes.fromhex(info["authkey"]), b"worker", greeting[4:], nonce)


def authenticated(sender):
    """A raw connection of somebody who holds the key, to a sender that is accepting."""
    sock = dial(sender)
    sock.sendall(credentials(sender.info, read_exactly(sock, 36)))
    read_exactly(sock, 32)
    return sock


def welcome(joined):
    for member in joined.values():
        member.channel.send("welcome", **WELCOME)


def accept_and_welcome(sender, expected, seconds=5.0):
    joined = sender.accept(expected, soon(seconds), patiently)
    welcome(joined)
    return joined


@contextlib.contextmanager
def fake_sender(talk):
    """A listener of somebody else: ``talk(sock)`` with the first who connects."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5.0)

        def serve():
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(5.0)
                talk(sock)

        serving = Call(serve)
        yield {"host": "127.0.0.1", "port": listener.getsockname()[1], "authkey": "ab" * 32}
        serving.result()


def test_workers_that_hold_the_key_join_under_the_index_they_name(rendezvous, closing):
    accepting = Call(accept_and_welcome, rendezvous, [0, 1, 2])
    joining = {index: Call(join, rendezvous.info, index, soon()) for index in (2, 0, 1)}
    joined = accepting.result()
    assert sorted(joined) == [0, 1, 2]
    for index, call in joining.items():
        channel, message = call.result()
        closing(channel)
        closing(joined[index].channel)
        assert (message.kind, dict(message.fields)) == ("welcome", WELCOME)
        assert (joined[index].worker_idx, joined[index].pid) == (index, os.getpid())
        channel.send("applied", run=1, version=index, digests={})
        assert joined[index].channel.receive(soon())["version"] == index
        joined[index].channel.send("digest", model_id=str(index))
        assert channel.receive(soon())["model_id"] == str(index)


def test_workers_may_come_before_the_sender_accepts(rendezvous, closing):
    joining = Call(join, rendezvous.info, 0, soon())
    time.sleep(0.05)
    assert joining.running
    joined = accept_and_welcome(rendezvous, [0])
    closing(joined[0].channel)
    closing(joining.result()[0])


def test_expecting_nobody_ends_at_once(rendezvous):
    assert rendezvous.accept([], soon(), patiently) == {}


def test_a_second_round_admits_a_replacement(rendezvous, closing):
    for _ in range(2):
        joining = Call(join, rendezvous.info, 0, soon())
        closing(accept_and_welcome(rendezvous, [0])[0].channel)
        closing(joining.result()[0])


def test_a_worker_with_another_key_is_refused_and_the_right_one_is_not_delayed(rendezvous, closing):
    accepting = Call(accept_and_welcome, rendezvous, [0])
    wrong = {**rendezvous.info, "authkey": "00" * 32}
    with pytest.raises(WeightSyncError, match=r"worker 0: could not join .*key"):
        join(wrong, 0, soon())
    assert accepting.running
    closing(join(rendezvous.info, 0, soon())[0])
    closing(accepting.result()[0].channel)


def test_every_sender_has_a_key_and_a_port_of_its_own():
    senders = [Rendezvous() for _ in range(3)]
    try:
        assert len({sender.info["authkey"] for sender in senders}) == 3
        assert len({sender.info["port"] for sender in senders}) == 3
        assert all(len(bytes.fromhex(sender.info["authkey"])) == 32 for sender in senders)
    finally:
        for sender in senders:
            sender.close()


def test_a_recorded_handshake_cannot_be_played_again(rendezvous, closing):
    recorded = {}

    def record():
        sock = closing(dial(rendezvous))
        recorded["answer"] = credentials(rendezvous.info, read_exactly(sock, 36), nonce=os.urandom(32))
        sock.sendall(recorded["answer"] + frame(HELLO))

    accepting = Call(rendezvous.accept, [0], soon(), patiently)
    record()
    closing(accepting.result()[0].channel)

    accepting = Call(rendezvous.accept, [0], soon(), patiently)
    replayed = closing(dial(rendezvous))
    replayed.sendall(recorded["answer"] + frame(HELLO))
    assert is_closed(replayed)
    assert accepting.running
    record()
    closing(accepting.result()[0].channel)


def test_a_sender_that_does_not_hold_the_key_is_found_out():
    def guess(sock):
        sock.sendall(b"LWS1" + os.urandom(32))
        read_exactly(sock, 64)
        sock.sendall(os.urandom(32))

    with fake_sender(guess) as info, pytest.raises(WeightSyncError, match="does not hold this run's key"):
        join(info, 0, soon())


def test_a_sender_that_hands_a_workers_own_proof_back_is_found_out():
    def reflect(sock):
        sock.sendall(b"LWS1" + os.urandom(32))
        sock.sendall(read_exactly(sock, 64)[32:])

    with fake_sender(reflect) as info, pytest.raises(WeightSyncError, match="does not hold this run's key"):
        join(info, 0, soon())


def test_something_else_at_that_port_is_found_out():
    def babble(sock):
        sock.sendall(b"HTTP/1.1 400 Bad Request\r\nServer: x\r\n\r\n")

    with fake_sender(babble) as info, pytest.raises(WeightSyncError, match="does not speak this protocol"):
        join(info, 0, soon())


def test_silent_and_babbling_clients_delay_nobody(rendezvous, closing):
    generator = random.Random(3)
    babblers = []
    for number in range(200):
        sock = closing(dial(rendezvous))
        if number % 4:
            sock.send(generator.randbytes(generator.choice([1, 40, 64, 65, 1000])))
        babblers.append(sock)
    started = time.monotonic()
    joining = [Call(join, rendezvous.info, index, soon()) for index in (0, 1)]
    joined = accept_and_welcome(rendezvous, [0, 1])
    assert time.monotonic() - started < 2.0
    for index, call in enumerate(joining):
        closing(joined[index].channel)
        closing(call.result()[0])
    assert all(is_closed(sock) for sock in babblers)  # and nobody of them is left over


def test_clients_that_come_and_go_at_once_harm_nobody(rendezvous, closing):
    for _ in range(50):
        sock = dial(rendezvous)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.close()  # a reset, not an end
    joining = Call(join, rendezvous.info, 0, soon())
    closing(accept_and_welcome(rendezvous, [0])[0].channel)
    closing(joining.result()[0])


def test_a_client_that_has_not_said_hello_in_time_is_dropped(rendezvous, closing, monkeypatch):
    monkeypatch.setattr(module_under_test, "HANDSHAKE_SECONDS", 0.2)
    accepting = Call(rendezvous.accept, [0], soon(), patiently)
    silent, half = closing(dial(rendezvous)), closing(authenticated(rendezvous))
    started = time.monotonic()
    assert is_closed(silent) and is_closed(half)
    assert time.monotonic() - started < 2.0
    assert accepting.running
    say_hello(closing(authenticated(rendezvous)))
    closing(accepting.result()[0].channel)


def test_of_too_many_clients_those_that_waited_longest_are_dropped(rendezvous, closing, monkeypatch):
    monkeypatch.setattr(module_under_test, "_MAX_PENDING", 5)
    accepting = Call(accept_and_welcome, rendezvous, [0])
    crowd = [closing(dial(rendezvous)) for _ in range(12)]
    assert all(is_closed(sock) for sock in crowd[:7])
    assert not any(is_closed(sock, 0.02) for sock in crowd[7:])
    closing(join(rendezvous.info, 0, soon())[0])
    closing(accepting.result()[0].channel)


SENDER = """
import resource, sys, time
from lightning_weightsync.transports.rendezvous import Rendezvous
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
sender = Rendezvous()
print(*sender.info.values(), flush=True)
joined = sender.accept([0], time.monotonic() + 20.0, lambda missing: None)
joined[0].channel.send("welcome", generation=2, heartbeat_timeout=30.0)
print(sorted(joined), flush=True)
"""


def test_a_sender_that_has_no_descriptor_left_drops_those_that_waited_longest(closing):
    process = subprocess.Popen([sys.executable, "-c", SENDER], stdout=subprocess.PIPE, text=True)
    try:
        host, port, key = process.stdout.readline().split()
        crowd = [closing(socket.create_connection((host, int(port)), timeout=5.0)) for _ in range(200)]
        channel, message = join({"host": host, "port": int(port), "authkey": key}, 0, soon(10.0))
        closing(channel)
        assert dict(message.fields) == WELCOME
        assert process.stdout.readline() == "[0]\n"
        assert process.wait(10.0) == 0
        assert all(is_closed(sock) for sock in crowd)
    finally:
        process.kill()
        process.communicate()


def fill_queue(family, address):
    """Connections that nobody accepts, until the system takes no more."""
    crowd = []
    while len(crowd) < 3000:
        sock = socket.socket(family)
        crowd.append(sock)
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            sock.connect(address)
        if family == socket.AF_UNIX or len(crowd) > module_under_test._QUEUE:
            try:
                sock.getpeername()
            except OSError:
                break
    return crowd


@pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets")
@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET], ids=["unix", "tcp"])
def test_where_the_queue_is_full_a_worker_waits_until_its_deadline_and_gets_in_when_the_sender_accepts(family, closing):
    sender = closing(Rendezvous(local=family == socket.AF_UNIX))
    info = sender.info
    unix = family == socket.AF_UNIX
    for sock in fill_queue(family, f"\0{info['local']}" if unix else (info["host"], info["port"])):
        closing(sock)
    started = time.monotonic()
    with pytest.raises(WeightSyncTimeout, match="phase: rendezvous"):
        join(info, 0, started + 0.5)
    assert 0.4 < time.monotonic() - started < 1.5
    joining = Call(join, info, 0, soon(10.0))
    time.sleep(0.1)
    assert joining.running
    joined = accept_and_welcome(sender, [0], 8.0)
    assert joined[0].local == unix
    closing(joined[0].channel)
    closing(joining.result(8.0)[0])


@pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets")
@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET], ids=["unix", "tcp"])
def test_a_worker_that_waits_in_front_of_a_full_queue_can_be_broken_off(family, closing):
    sender = closing(Rendezvous(local=family == socket.AF_UNIX))
    info = sender.info
    for sock in fill_queue(family, f"\0{info['local']}" if info["local"] else (info["host"], info["port"])):
        closing(sock)
    held = []

    def hold(sock):
        held.append(sock)
        if len(held) > 1 and held[0] is None:
            raise ConnectionError("broken off")

    joining = Call(join, info, 0, soon(10.0), hold)
    time.sleep(0.2)
    waiting, held[0] = held[-1], None
    started = time.monotonic()
    with contextlib.suppress(OSError):
        waiting.shutdown(socket.SHUT_RDWR)
    with pytest.raises(WeightSyncError, match="could not join"):
        joining.result()
    assert time.monotonic() - started < 1.0


def test_a_client_may_answer_byte_by_byte_and_in_one_piece_with_its_hello(rendezvous, closing):
    accepting = Call(rendezvous.accept, [0, 1], soon(), patiently)
    slow = closing(dial(rendezvous))
    for byte in credentials(rendezvous.info, read_exactly(slow, 36)) + frame(HELLO):
        slow.send(bytes([byte]))
        time.sleep(1e-4)
    quick = closing(dial(rendezvous))
    quick.sendall(credentials(rendezvous.info, read_exactly(quick, 36)) + frame({**HELLO, "worker_idx": 1, "pid": 77}))
    joined = accepting.result()
    assert {index: member.pid for index, member in joined.items()} == {0: 1, 1: 77}
    for member in joined.values():
        closing(member.channel)


@pytest.mark.parametrize("index", [1, -1, 3, 10**30])
def test_an_index_that_is_not_expected_is_refused_with_the_reason(rendezvous, closing, index):
    accepting = Call(rendezvous.accept, [0, 2], soon(), patiently)
    with pytest.raises(WeightSyncError, match=rf"refused it: worker_idx={index} is not expected now, but \[0, 2\]"):
        join(rendezvous.info, index, soon())
    assert accepting.running
    for expected in (0, 2):
        say_hello(closing(authenticated(rendezvous)), expected)
    for member in accepting.result().values():
        closing(member.channel)


def test_a_second_worker_with_an_index_that_is_taken_is_refused_and_the_first_stays(rendezvous, closing):
    accepting = Call(rendezvous.accept, [0, 1], soon(), patiently)
    first = closing(authenticated(rendezvous))
    say_hello(first)
    with pytest.raises(WeightSyncError, match=r"refused it: worker_idx=0 is not expected now, but \[1\]"):
        join(rendezvous.info, 0, soon())
    assert accepting.running
    say_hello(closing(authenticated(rendezvous)), 1)
    joined = accepting.result()
    first.sendall(frame({"kind": "beat"}))
    assert joined[0].channel.receive(soon()).kind == "beat"
    for member in joined.values():
        closing(member.channel)


@pytest.mark.parametrize(
    "data",
    [
        frame({"kind": "applied", "run": 1, "version": 0, "digests": {}}, bytes(8)),
        frame({"kind": "beat"}),
        frame({"kind": "welcome", **WELCOME}),
    ],
    ids=["applied", "beat", "welcome"],
)
def test_an_authenticated_client_that_says_anything_but_hello_is_refused(rendezvous, closing, data):
    accepting = Call(rendezvous.accept, [0], soon(), patiently)
    channel = closing(ControlChannel(authenticated(rendezvous)))
    channel._sock.sendall(data)
    assert "is not expected" in channel.receive(soon())["reason"]
    with pytest.raises(ChannelClosed):
        channel.receive(soon())
    assert accepting.running
    say_hello(closing(authenticated(rendezvous)))
    closing(accepting.result()[0].channel)


@pytest.mark.parametrize(
    "data",
    [
        frame({"kind": "hello"}),
        frame({"kind": "hello", "worker_idx": "0", "pid": 1}),
        frame({"kind": "hello", "worker_idx": True, "pid": 1}),
        frame({"kind": "hello", "worker_idx": 0, "pid": 1, "more": 2}),
        frame(b"\x80\x04]\x94."),
        b"\xff" * 64,
    ],
    ids=["no fields", "text", "bool", "extra", "pickle", "above the cap"],
)
def test_an_authenticated_client_with_a_malformed_hello_is_dropped(rendezvous, closing, data):
    accepting = Call(rendezvous.accept, [0], soon(), patiently)
    sock = closing(authenticated(rendezvous))
    sock.sendall(data)
    assert is_closed(sock)
    assert accepting.running
    say_hello(closing(authenticated(rendezvous)))
    closing(accepting.result()[0].channel)


WILDCARDS = ["0.0.0.0", "::", "", "0", "0.0", "0x0", "000.0.0.0", "::0", "0:0:0:0:0:0:0:0", "::ffff:0.0.0.0"]


@pytest.mark.parametrize("host", WILDCARDS)
def test_a_wildcard_is_no_address_that_a_worker_could_connect_to(host):
    for refuse in (check_host, bind_listener, Rendezvous):
        with pytest.raises(ValueError, match=r"no address that a worker can connect to.*127\.0\.0\.1"):
            refuse(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "10.1.2.3", "fe80::1", "node-7.cluster"])
def test_an_address_or_a_name_is_taken_without_asking_for_it(host):
    check_host(host)


def test_an_address_that_is_not_this_machines_is_an_error_that_leaks_nothing():
    before = num_descriptors()
    errors = []
    for _ in range(5):
        with pytest.raises(OSError) as caught:
            Rendezvous("192.0.2.1")
        errors.append(caught)
    assert num_descriptors() == before


def test_ipv6_loopback_works(closing):
    try:
        sender = closing(Rendezvous("::1"))
    except OSError as error:
        pytest.skip(f"this machine has no ::1: {error}")
    assert sender.info["host"] == "::1"
    accepting = Call(accept_and_welcome, sender, [0])
    closing(join(sender.info, 0, soon())[0])
    closing(accepting.result()[0].channel)


def test_the_deadlines_error_names_the_missing_workers_and_the_seconds(rendezvous, closing):
    accepting = Call(rendezvous.accept, [3, 0, 5], soon(0.3), patiently)
    there = closing(authenticated(rendezvous))
    say_hello(there, 3)
    started = time.monotonic()
    with pytest.raises(WeightSyncTimeout, match=r"\[0, 5\] of \[0, 3, 5\].*0\.\d s \(phase: rendezvous\)") as caught:
        accepting.result()
    assert time.monotonic() - started < 1.5
    assert sorted(caught.value.failed) == [0, 5]
    for index, cause in caught.value.failed.items():
        assert isinstance(cause, WeightSyncTimeout)
        assert f"worker {index} did not connect" in str(cause)
    assert is_closed(there)  # who had come is let go


def test_a_deadline_that_has_passed_is_an_error_at_once(rendezvous):
    started = time.monotonic()
    with pytest.raises(WeightSyncTimeout):
        rendezvous.accept([0], started - 1.0, patiently)
    assert time.monotonic() - started < 0.5


def test_the_watch_is_told_who_is_missing_and_may_give_up(rendezvous, closing):
    told = []

    def watch(missing):
        told.append(set(missing))
        if missing == {1}:
            raise ZeroDivisionError("enough")

    accepting = Call(rendezvous.accept, [0, 1], soon(), watch)
    there = closing(authenticated(rendezvous))
    silent = closing(dial(rendezvous))
    read_exactly(silent, 36)
    say_hello(there)
    with pytest.raises(ZeroDivisionError, match="enough"):
        accepting.result()
    assert told[0] == {0, 1}
    assert told[-1] == {1}
    assert is_closed(there) and is_closed(silent)


def test_the_watch_is_called_many_times_a_second(rendezvous):
    calls = []
    with pytest.raises(WeightSyncTimeout):
        rendezvous.accept([0], soon(0.5), calls.append)
    assert 5 <= len(calls) <= 60


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
def test_nothing_listens_beyond_loopback(rendezvous):
    port = f"{rendezvous.info['port']:04X}"
    listening = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:] if Path(table).exists() else ():
            address, state = line.split()[1], line.split()[3]
            if state == "0A" and address.endswith(f":{port}"):
                listening.append(address)
    assert rendezvous.info["host"] == "127.0.0.1"
    assert listening == [f"0100007F:{port}"]


def test_another_address_of_this_machine_does_not_answer(rendezvous):
    try:
        own = {found[4][0] for found in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    except OSError:
        own = set()
    own = {address for address in own if not ip_address(address).is_loopback} | {"127.0.0.2"}
    for address in own:
        with pytest.raises(OSError):
            socket.create_connection((address, rendezvous.info["port"]), timeout=1.0)


def test_a_closed_rendezvous_refuses_at_once_and_closes_twice(rendezvous):
    rendezvous.close()
    rendezvous.close()
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"worker 4: could not join the sender at 127\.0\.0\.1 port \d+"):
        join(rendezvous.info, 4, soon())
    assert time.monotonic() - started < 1.0


@pytest.mark.parametrize(
    "stage", ["never accepts", "silent after the greeting", "drips its greeting", "never says welcome"]
)
def test_a_worker_waits_no_longer_than_its_deadline(stage, closing):
    def talk(sock):
        if stage == "silent after the greeting":
            sock.sendall(b"LWS1" + os.urandom(32))
        with contextlib.suppress(OSError):
            for byte in b"LWS1" + bytes(32):
                if stage == "drips its greeting":
                    sock.send(bytes([byte]))
                    time.sleep(0.03)
        is_closed(sock)

    with contextlib.ExitStack() as stack:
        if stage == "never says welcome":
            sender = closing(Rendezvous())
            info = sender.info
            accepting = Call(sender.accept, [0], soon(), patiently)
        else:
            info = stack.enter_context(fake_sender(talk))
        started = time.monotonic()
        with pytest.raises(
            WeightSyncTimeout, match=r"worker 0: .* did not answer within 0\.\d s \(phase: rendezvous\)"
        ):
            join(info, 0, started + 0.3)
        assert 0.3 <= time.monotonic() - started < 1.5
    if stage == "never says welcome":
        closing(accepting.result()[0].channel)


def test_a_sender_that_leaves_after_the_hello_is_named(rendezvous):
    accepting = Call(rendezvous.accept, [0], soon(), patiently)
    joining = Call(join, rendezvous.info, 0, soon())
    accepting.result()[0].channel.close()
    with pytest.raises(WeightSyncError, match="worker 0: could not join"):
        joining.result()


def test_a_sender_that_answers_something_else_than_welcome_is_an_error(rendezvous, closing):
    accepting = Call(rendezvous.accept, [0], soon(), patiently)
    joining = Call(join, rendezvous.info, 0, soon())
    closing(accepting.result()[0].channel).send("beat")
    with pytest.raises(WeightSyncError, match="unexpected message 'beat'"):
        joining.result()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
def test_fifty_rounds_of_good_and_bad_clients_leak_no_descriptor(rendezvous):
    errors = []  # a kept traceback keeps its frames, and what they hold, alive

    def one_round():
        babbler = dial(rendezvous)
        babbler.send(b"x" * 100)
        accepting = Call(accept_and_welcome, rendezvous, [0])
        for info, index in (({**rendezvous.info, "authkey": "00" * 32}, 0), (rendezvous.info, 7)):
            with pytest.raises(WeightSyncError) as caught:
                join(info, index, soon())
            errors.append(caught)
        channel, _ = join(rendezvous.info, 0, soon())
        accepting.result()[0].channel.close()
        channel.close()
        babbler.close()

        accepting = Call(rendezvous.accept, [0], soon(), patiently)
        joining = Call(join, rendezvous.info, 0, soon())
        accepting.result()[0].channel.close()
        with pytest.raises(WeightSyncError) as caught:
            joining.result()
        errors.append(caught)

        def give_up(missing):
            if missing == {1}:
                raise ZeroDivisionError

        there = Call(join, rendezvous.info, 0, soon())
        with pytest.raises(ZeroDivisionError) as caught:
            rendezvous.accept([0, 1], soon(), give_up)
        errors.append(caught)
        with pytest.raises(WeightSyncError) as caught:
            there.result()
        errors.append(caught)

    one_round()
    before = num_descriptors()
    for _ in range(50):
        one_round()
    assert num_descriptors() == before
    assert len(errors) == 51 * 5


class Failing:
    """A listening socket whose next accepts fail, each with another error."""

    def __init__(self, listener, numbers):
        self._listener, self.numbers = listener, list(numbers)

    def accept(self):
        if self.numbers:
            number = self.numbers.pop()
            raise OSError(number, os.strerror(number))
        return self._listener.accept()

    def __getattr__(self, name):
        return getattr(self._listener, name)


def test_a_connection_that_the_network_has_broken_before_it_was_accepted_disturbs_nobody(rendezvous, closing):
    numbers = [errno.ENETDOWN, errno.EPROTO, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNABORTED]
    failing = rendezvous._listener = Failing(rendezvous._listener, numbers)
    accepting = Call(accept_and_welcome, rendezvous, [0])
    channel, _ = join(rendezvous.info, 0, soon())
    closing(channel)
    for member in accepting.result().values():
        closing(member.channel)
    assert failing.numbers == []


def test_a_listener_that_is_closed_meanwhile_is_told_by_the_watch(rendezvous):
    def watch(missing):
        if not failing.numbers:
            raise WeightSyncError("shut down")

    failing = rendezvous._listener = Failing(rendezvous._listener, [errno.EBADF])
    accepting = Call(rendezvous.accept, [0], soon(), watch)
    with dial(rendezvous), pytest.raises(WeightSyncError, match="shut down"):
        accepting.result()


def test_other_errors_of_accept_are_raised(rendezvous):
    rendezvous._listener = Failing(rendezvous._listener, [errno.EPERM])
    accepting = Call(rendezvous.accept, [0], soon(), patiently)
    with dial(rendezvous), pytest.raises(PermissionError):
        accepting.result()
