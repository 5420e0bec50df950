import contextlib
import socket
import struct
import sys

import pytest

from lightning_weightsync.transports import strangers
from lightning_weightsync.transports.strangers import keep_out

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="packet filters of Linux")


def address_of(listener):
    """As gloo publishes it: the system's ``sockaddr``, with other things around it."""
    host, port = listener.getsockname()[:2]
    packed = socket.inet_pton(listener.family, host)
    flow = bytes(4) if listener.family == socket.AF_INET6 else b""
    return b"somewhere" + struct.pack("=H", listener.family) + struct.pack("!H", port) + flow + packed + b"else"


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def listeners(request):
    host = "127.0.0.1" if request.param == socket.AF_INET else "::1"
    with contextlib.ExitStack() as stack:
        try:
            yield [stack.enter_context(socket.create_server((host, 0), family=request.param)) for _ in range(2)]
        except OSError as error:
            pytest.skip(f"this machine has no {host}: {error}")


def test_nobody_gets_in_any_more_and_those_who_are_in_stay(listeners):
    one, other = listeners
    with socket.create_connection(one.getsockname()[:2]) as early, one.accept()[0] as accepted:
        assert keep_out(address_of(one)) == 1
        with pytest.raises(TimeoutError):
            socket.create_connection(one.getsockname()[:2], timeout=0.2)
        early.sendall(b"still here")
        assert accepted.recv(100) == b"still here"
        accepted.sendall(b"and there")
        assert early.recv(100) == b"and there"
    with socket.create_connection(other.getsockname()[:2], timeout=1.0):
        pass


def test_what_nobody_names_is_left_alone(listeners):
    for published in (b"", b"nothing", address_of(listeners[0])[:-8]):
        assert keep_out(published) == 0
    for listener in listeners:
        with socket.create_connection(listener.getsockname()[:2], timeout=1.0):
            pass


def test_a_connection_with_that_address_is_not_taken_for_a_listener(listeners):
    with socket.create_connection(listeners[0].getsockname()[:2]) as client, listeners[0].accept()[0] as accepted:
        assert keep_out(address_of(listeners[0])) == 1  # `accepted` has the same address
        assert keep_out(address_of(client)) == 0
        client.sendall(b"x")
        assert accepted.recv(1) == b"x"


def test_without_proc_nobody_is_kept_out_and_nothing_raised(monkeypatch, listeners):
    monkeypatch.setattr(strangers, "_DESCRIPTORS", "/nowhere/fd")
    assert keep_out(address_of(listeners[0])) == 0
