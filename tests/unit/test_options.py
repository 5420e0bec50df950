"""An option that no push could be made with is refused where it is given, by its name."""

import math
import threading

import numpy as np
import pytest

from lightning_weightsync import DistributedWeightSyncScheme
from lightning_weightsync.schemes.options import choose, seconds


@pytest.mark.parametrize("name", ["timeout", "connect_timeout", "heartbeat_timeout"])
@pytest.mark.parametrize("value", [math.inf, math.nan, 0, -1.0, threading.TIMEOUT_MAX, "60", True, [1.0]])
def test_a_number_of_seconds_that_nobody_can_wait_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"^{name}=.*: give a positive number of seconds, at most \d+$"):
        DistributedWeightSyncScheme(**{name: value})


@pytest.mark.parametrize("name", ["timeout", "heartbeat_timeout"])
def test_only_the_time_for_connecting_has_a_default_of_its_own(name):
    with pytest.raises(ValueError, match=f"^{name}=None: "):
        DistributedWeightSyncScheme(**{name: None})
    assert DistributedWeightSyncScheme(connect_timeout=None).connect_timeout is None


@pytest.mark.parametrize("value", [1, 0.25, np.float32(0.5), np.int64(3), threading.TIMEOUT_MAX / 2])
def test_any_other_number_is_taken_as_a_float(value):
    assert seconds("timeout", value) == value and type(seconds("timeout", value)) is float


def test_the_longest_time_can_be_waited():
    lock = threading.Lock()
    assert lock.acquire(timeout=seconds("timeout", threading.TIMEOUT_MAX / 2))


@pytest.mark.parametrize(
    "options",
    [{"backend": "mpi"}, {"same_host": "pipe"}, {"apply": "move"}, {"strategy": "pickle"}],
)
def test_a_choice_that_there_is_not_is_refused_and_those_that_there_are_are_listed(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"^{name}='{value}': choose one of '.*', '.*'$"):
        DistributedWeightSyncScheme(**options)
    choose("backend", "gloo", ("gloo", "nccl"))
