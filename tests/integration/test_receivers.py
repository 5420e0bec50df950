"""The harness itself: a test that leaves something behind must not pass, nor spoil the next one."""

import socket
import threading

import pytest

from tests.helpers.holdings import holdings, leftovers
from tests.helpers.receivers import ProcessEnded


def test_what_a_function_returns_or_raises_comes_back(receivers):
    assert receivers[0].call(lambda box, a, b: a + b, 1, b=2) == 3
    with pytest.raises(ZeroDivisionError) as caught:
        receivers[0].call(lambda box: 1 / 0)
    assert "Traceback" in str(caught.value.__cause__)  # of over there


def test_the_box_lives_until_the_test_ends(receivers):
    receivers[0].call(lambda box: setattr(box, "kept", 7))
    assert receivers[0].call(lambda box: box.kept) == 7
    assert receivers.clean() == []
    assert receivers[0].call(lambda box: hasattr(box, "kept")) is False


def leave_behind(box):
    threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()
    socket.create_server(("127.0.0.1", 0)).detach()


def test_what_is_left_is_told_and_the_process_replaced(receiver_pool):
    process = receiver_pool[0]
    process.call(leave_behind)
    (complaint,) = receiver_pool.clean()
    assert complaint.startswith(process.name)
    assert "threads: forgotten" in complaint and "ports: 127.0.0.1" in complaint and "descriptors: socket" in complaint
    assert not process.alive
    receiver_pool.renew()
    assert process not in list(receiver_pool) and all(other.alive for other in receiver_pool)


def test_what_is_left_in_the_tests_own_process_is_told_too():
    before = holdings()
    with socket.create_server(("127.0.0.1", 0)):
        assert "ports: 127.0.0.1" in leftovers(before, patience=0.0)
    assert leftovers(before) == ""


def test_a_process_that_dies_fails_its_calls_at_once(receivers):
    waiting = receivers[0].begin(lambda box: threading.Event().wait(30))
    receivers[0].kill()
    with pytest.raises(ProcessEnded, match="before it had answered"):
        waiting.result(5.0)
    with pytest.raises(ProcessEnded):
        receivers[0].call(lambda box: None)
