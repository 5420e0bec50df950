import contextlib
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import torch

from lightning_weightsync.transports.base import TransferFailed
from lightning_weightsync.transports.meeting import Meeting, from_text, to_text
from lightning_weightsync.transports.pair_groups import GlooGroups
from lightning_weightsync.transports.process_group import (
    RECEIVER_RANK,
    SENDER_RANK,
    ProcessGroupReceiver,
    ProcessGroupSender,
)
from lightning_weightsync.transports.rendezvous import proofs
from tests.helpers.threads import Call, soon

INFO = {"host": "127.0.0.1", "port": 1, "authkey": "ab" * 32}
WAIT = timedelta(seconds=1)


def test_what_one_end_sets_the_other_finds_and_they_swap_once():
    swaps = []

    def swap(ours, deadline):
        swaps.append((dict(ours), deadline))
        return {"theirs": b"\0\xff"}

    meeting = Meeting(swap, 12.5)
    meeting.set("mine", b"\1")
    meeting.set("text", "2")
    meeting.wait(["mine"], WAIT)
    assert (meeting.get("mine"), meeting.get("text"), swaps) == (b"\1", b"2", [])
    meeting.wait(["theirs"], WAIT)
    assert meeting.get("theirs") == b"\0\xff"
    assert swaps == [({"mine": b"\1", "text": b"2"}, 12.5)]
    assert meeting.published == b"\x012"
    with pytest.raises(TransferFailed, match=r"did not tell 'other', but \['theirs'\]"):
        meeting.get("other")


def test_values_survive_the_way_through_a_message():
    values = {"0/0": bytes(range(256)), "": b""}
    assert from_text(to_text(values)) == values


@pytest.mark.parametrize("values", [{"a": "zz"}, {"a": 3}, {"a": None}, {"a": ["00"]}], ids=str)
def test_what_is_no_value_is_a_failed_transfer(values):
    with pytest.raises(TransferFailed, match="no address"):
        from_text(values)


class Table:
    """Where two ends of a pair in one process lay down what they tell each other."""

    def __init__(self):
        self.told = {}
        self._both = threading.Barrier(2)

    def swap(self, rank, ours, deadline):
        self.told[rank] = ours
        self._both.wait(5.0)
        return self.told[1 - rank]


@contextlib.contextmanager
def pair(swap=None, *, keys=("ab" * 32, "ab" * 32), seconds=5.0):
    """Both ends of a pair, connecting; yields them and the calls."""
    swap = swap or Table().swap
    ends = [
        kind(GlooGroups(), rank, partial(swap, rank), proofs({**INFO, "authkey": keys[rank]}, "pair"), "127.0.0.1")
        for kind, rank in ((ProcessGroupSender, SENDER_RANK), (ProcessGroupReceiver, RECEIVER_RANK))
    ]
    try:
        yield ends, [Call(end.connect, soon(seconds)) for end in ends]
    finally:
        for end in ends:
            end.close()


def test_two_ends_meet_without_a_store_and_move_bytes():
    with pair() as (ends, connecting):
        for call in connecting:
            call.result()
        sent, got = torch.arange(1000), torch.zeros(1000, dtype=torch.int64)
        works = [ends[0].start("send", sent), ends[1].start("recv", got)]
        for end, work in zip(ends, works, strict=True):
            end.wait(work, soon(5.0))
        assert torch.equal(got, sent)


def test_an_end_that_does_not_hold_the_key_is_found_out_by_the_other():
    with pair(keys=("ab" * 32, "cd" * 32)) as (_, connecting):
        for call in connecting:
            with pytest.raises(TransferFailed, match="did not prove who it is"):
                call.result()


@pytest.mark.parametrize("error", [TransferFailed("the other end is gone"), ConnectionError("gone"), OSError("gone")])
def test_an_error_of_the_swap_comes_out_of_connect(error):
    def swap(rank, ours, deadline):
        raise error

    with pair(swap) as (_, connecting):
        for call in connecting:
            with pytest.raises(type(error), match="gone"):
                call.result()


@pytest.mark.parametrize("attempt", range(6))
def test_an_other_end_that_has_told_where_it_is_and_is_not_there_is_a_timeout(attempt):
    """Which end connects, and which one waits to be connected to, is decided by their ports: several attempts."""
    table = Table()

    def swap(rank, ours, deadline):
        theirs = table.swap(rank, ours, deadline)
        if rank == RECEIVER_RANK:
            raise TransferFailed("changed its mind")
        return theirs

    with pair(swap, seconds=0.6) as (_, connecting):
        started = time.monotonic()
        for call in connecting:
            with pytest.raises(TransferFailed):
                call.result()
        assert time.monotonic() - started < 2.5  # gloo itself takes five times as long as it was given
