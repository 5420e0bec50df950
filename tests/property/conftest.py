"""What a simulation has mapped, and the descriptors with it, goes with the last tensor that views it."""

import gc

import pytest


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    gc.collect()
