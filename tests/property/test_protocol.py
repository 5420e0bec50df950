"""Sender and workers keep their promises whatever happens between them, in whatever order."""

import pytest

from lightning_weightsync.transports import process_group
from tests.property.machine import Protocol, ProtocolOverNetwork, run

MACHINES = [pytest.param(Protocol, id="shared slots"), pytest.param(ProtocolOverNetwork, id="network")]


@pytest.mark.parametrize("machine", MACHINES)
def test_no_order_of_events_breaks_a_promise(machine):
    run(machine, examples=30, steps=30)


def test_no_order_of_events_breaks_a_promise_of_small_models(monkeypatch):
    monkeypatch.setattr(process_group, "INLINE", 64 << 10)
    run(ProtocolOverNetwork, examples=20, steps=30)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("machine", MACHINES)
def test_no_long_order_of_events_breaks_a_promise(machine):
    run(machine, examples=500, steps=50)
