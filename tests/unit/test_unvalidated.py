"""Distributions in a policy's call, and outside of it."""

import threading

import pytest
import torch
from torch.distributions import Distribution, Normal

from lightning_weightsync.collectors.unvalidated import unvalidated

NAN = torch.tensor(float("nan"))


@pytest.fixture(autouse=True)
def as_torch_has_it():
    """Other libraries switch it off for the whole process when they are imported (TorchRL's distributions do)."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(True)
    yield
    Distribution.set_default_validate_args(before)


def test_arguments_are_validated_outside_only():
    with unvalidated:
        Normal(NAN, 1.0)
        with unvalidated:
            Normal(NAN, 1.0)
        Normal(NAN, 1.0)
        with pytest.raises(ValueError, match="constraint"):
            Normal(NAN, 1.0, validate_args=True)
    with pytest.raises(ValueError, match="constraint"):
        Normal(NAN, 1.0)


@pytest.mark.parametrize("before", [True, False])
def test_it_is_as_it_was_when_an_error_leaves(before):
    Distribution.set_default_validate_args(before)
    with pytest.raises(KeyError), unvalidated:
        raise KeyError
    assert Distribution._validate_args is before


def test_threads_that_are_inside_at_the_same_time_leave_it_as_it_was():
    first_in, second_in, first_out = (threading.Event() for _ in range(3))
    seen = []

    def first():
        with unvalidated:
            first_in.set()
            second_in.wait(10)
        first_out.set()

    thread = threading.Thread(target=first)
    thread.start()
    first_in.wait(10)
    with unvalidated:
        second_in.set()
        first_out.wait(10)
        seen.append(Distribution._validate_args)
    thread.join()
    assert seen == [False]
    assert Distribution._validate_args is True
