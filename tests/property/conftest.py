"""What a simulation has mapped, and the descriptors with it, goes with the last tensor that views it."""

import gc

import pytest

from lightning_weightsync.transports import process_group


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def over_the_pair(monkeypatch):
    """However small the models are; one test has those that travel in the announcement."""
    monkeypatch.setattr(process_group, "INLINE", 0)
