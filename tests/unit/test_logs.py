"""A worker's log records, from its root logger to the trainer's, over a real socket pair."""

import logging
import os
import socket

import pytest

from lightning_weightsync.collectors import logs
from lightning_weightsync.collectors.process import JOB_MESSAGES
from lightning_weightsync.transports.control import ControlChannel


@pytest.fixture
def ends():
    ours, theirs = (ControlChannel(end, JOB_MESSAGES) for end in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def record(text, level=logging.WARNING, name="env", **kwargs):
    return logging.LogRecord(name, level, "file.py", 1, text, (), kwargs.get("exc_info"))


def received(channel):
    messages = []
    while (message := channel.poll()) is not None:
        messages.append(message)
    return messages


def test_a_record_arrives_with_its_name_level_and_traceback(ends, caplog):
    ours, theirs = ends
    try:
        raise ArithmeticError("odd dice")
    except ArithmeticError as error:
        logs.Forwarder(theirs).handle(record("look", exc_info=(type(error), error, error.__traceback__)))
    (message,) = received(ours)
    with caplog.at_level(logging.INFO):
        logs.hand_on(3, message)
    (handed,) = caplog.records
    assert (handed.name, handed.levelno, handed.worker_idx) == ("env", logging.WARNING, 3)
    assert handed.getMessage().startswith("[worker 3] look\nTraceback") and "odd dice" in handed.getMessage()


def test_a_flood_is_cut_counted_and_told(ends, caplog):
    (ours, theirs), now = ends, [0.0]
    forwarder = logs.Forwarder(theirs, clock=lambda: now[0])
    for k in range(logs.BURST + 50):
        forwarder.handle(record(f"{k}"))
    arrived = received(ours)
    assert [message["message"] for message in arrived] == [f"{k}" for k in range(logs.BURST)]
    now[0] = 1.0
    for k in range(30):
        forwarder.handle(record(f"later {k}"))
    later = received(ours)
    assert len(later) == logs.PER_SECOND
    assert [message["dropped"] for message in later] == [50] + [0] * 9
    logs.hand_on(0, later[0])
    assert [r.getMessage() for r in caplog.records] == [
        "[worker 0] 50 log records were dropped (more than 10 a second)",
        "[worker 0] later 0",
    ]


def test_a_worker_never_waits_for_a_trainer_that_does_not_read(ends):
    ours, theirs = ends
    forwarder = logs.Forwarder(theirs, clock=iter(range(10**6)).__next__)  # ten allowed with each record
    for _ in range(1000):
        forwarder.handle(record("x" * 8000))
    arrived = received(ours)
    assert 0 < len(arrived) < 1000
    forwarder.handle(record("again"))
    (message,) = received(ours)
    assert message["message"] == "again" and message["dropped"] == 1000 - len(arrived)


def test_a_closed_channel_is_no_error(ends):
    ours, theirs = ends
    ours.close()
    theirs.close()
    logs.Forwarder(theirs).handle(record("nobody hears"))


def test_a_forked_child_does_not_write_to_the_channel_of_its_parent(ends, monkeypatch, capsys):
    ours, theirs = ends
    forwarder = logs.Forwarder(theirs)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    forwarder.handle(record("from a child"))
    assert received(ours) == [] and "from a child" in capsys.readouterr().err


def test_what_the_trainer_does_not_want_to_hear_is_not_logged(ends, caplog):
    ours, theirs = ends
    logs.Forwarder(theirs).handle(record("a detail", logging.DEBUG))
    (message,) = received(ours)
    with caplog.at_level(logging.INFO):
        logs.hand_on(0, message)
    assert not caplog.records
