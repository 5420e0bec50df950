"""A connection that goes wrong raises on each side that is alive, soon, and says what and who it was."""

import os
import signal
import threading
import time

import pytest
import torch
from torch import nn

from lightning_weightsync import (
    DistributedWeightSyncScheme,
    LayoutMismatchError,
    WeightSyncError,
    WeightSyncTimeout,
    WorkerDied,
    WorkerError,
)
from lightning_weightsync.transports.base import TransferFailed
from tests.helpers import schemes
from tests.helpers.leaves import assert_same_bits, leaves_of
from tests.helpers.schemes import altered, assert_text, layers

# --- layouts that do not match -------------------------------------------------------------------------------------

OTHERS = {
    "wider layer": (layers(5), {"mismatched": {"0.weight", "0.bias", "1.weight", "1.bias"}}),
    "narrower layer": (layers(3), {"mismatched": {"0.weight", "0.bias", "1.weight", "1.bias"}}),
    "missing buffer": (layers(buffer=False), {"unexpected": {"scale"}}),
    "other dtype": (layers(dtype=torch.bfloat16), {"mismatched": {"0.weight", "0.bias", "1.weight", "1.bias"}}),
    "extra layer": (layers(depth=2), {"missing": {"2.weight", "2.bias"}}),
    "layer too few": (layers(depth=0), {"unexpected": {"1.weight", "1.bias"}}),
}


@pytest.mark.parametrize("theirs, leaves", OTHERS.values(), ids=OTHERS.keys())
def test_a_layout_that_does_not_match_raises_on_both_sides_and_names_the_leaf(connect, receivers, theirs, leaves):
    before = leaves_of(theirs)
    sender, (joining,) = connect.begin(layers(), receiver_model=theirs)
    started = time.monotonic()
    with pytest.raises(LayoutMismatchError, match="worker 0") as here:
        sender.connect()
    with pytest.raises(LayoutMismatchError) as there:
        joining.result(2.0)
    assert time.monotonic() - started < 2.0
    assert list(here.value.failed) == [0]
    for error in (here.value, there.value):
        for kind in ("missing", "unexpected", "mismatched"):
            assert set(getattr(error, kind)) == leaves.get(kind, set())
        for name in set().union(*leaves.values()):
            assert name in str(error)
    assert_same_bits(receivers[0].call(schemes.leaves), before)

    # The process is as good as before: a fresh scheme works there.
    receivers[0].call(schemes.shutdown)
    connected = connect(source := layers())
    connected.push()
    assert connected.versions == [1]
    assert_same_bits(connected.leaves(), leaves_of(source))


def test_an_error_shows_shapes_and_dtypes_of_both_sides(connect):
    sender, (joining,) = connect.begin(layers(4), receiver_model=layers(5, dtype=torch.float64))
    with pytest.raises(LayoutMismatchError) as here:
        sender.connect()
    assert here.value.mismatched["0.weight"] == "sender float32[4, 3], receiver float64[5, 3]"
    with pytest.raises(LayoutMismatchError):
        joining.result(2.0)


def test_a_worker_that_matches_raises_too_when_another_does_not(connect, receivers):
    matching, other = layers(), layers(5)
    before = leaves_of(matching)
    sender, joining = connect.begin(layers(), 2, receiver_model=lambda index: (matching, other)[index])
    started = time.monotonic()
    with pytest.raises(LayoutMismatchError, match="worker 1") as here:
        sender.connect()
    assert list(here.value.failed) == [1]
    with pytest.raises(LayoutMismatchError):
        joining[1].result(2.0)
    with pytest.raises(WeightSyncError, match="the sender gave up") as there:
        joining[0].result(2.0)
    assert time.monotonic() - started < 2.0
    assert not isinstance(there.value, LayoutMismatchError)
    assert_same_bits(receivers[0].call(schemes.leaves), before)


def test_leaves_that_are_tied_over_there_and_not_here_are_a_mismatch(connect):
    tied = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    tied["b"].weight = tied["a"].weight
    separate = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    sender, (joining,) = connect.begin(separate, receiver_model=tied)
    with pytest.raises(LayoutMismatchError, match=r"b\.weight: tied to a\.weight in the receiver"):
        sender.connect()
    with pytest.raises(LayoutMismatchError):
        joining.result(2.0)


def test_with_strict_off_a_subset_of_the_receivers_leaves_is_enough(connect):
    source, theirs = layers(), layers(depth=2)
    before = leaves_of(theirs)
    connected = connect(source, receiver_model=theirs, strict=False)
    connected.push()
    assert_same_bits(connected.leaves(), before | leaves_of(source))


# --- connecting ----------------------------------------------------------------------------------------------------


def test_a_worker_that_never_comes_is_named_within_connect_timeout(receivers, connect):
    sender = connect.sender(source := layers(), 2, connect_timeout=1.5)
    receivers[0].call(schemes.init, sender, altered(source), worker_idx=0)
    joining = receivers[0].begin(schemes.connect)
    started = time.monotonic()
    with pytest.raises(WeightSyncTimeout) as caught:
        sender.connect()
    assert 1.4 < time.monotonic() - started < 2.5
    assert list(caught.value.failed) == [1]
    assert_text(caught.value, r"waiting for workers to connect: \[1\] of \[0, 1\]", r"1\.\d s", "phase: rendezvous")
    with pytest.raises(WeightSyncError, match="worker 0"):
        joining.result(2.0)


@pytest.mark.slow
def test_a_sender_that_never_comes_is_a_timeout_of_the_receiver(receivers, connect):
    sender = connect.sender(source := layers(), connect_timeout=1.5)
    receivers[0].call(schemes.init, sender, altered(source), worker_idx=0)
    started = time.monotonic()
    with pytest.raises(WeightSyncTimeout, match=r"worker 0: the sender at 127\.0\.0\.1 port \d+ .* 1\.\d s"):
        receivers[0].call(schemes.connect)
    assert 1.4 < time.monotonic() - started < 2.5


def test_a_sender_that_is_gone_is_an_error_at_once(receivers, connect):
    sender = connect.sender(source := layers())
    receivers[0].call(schemes.init, sender, altered(source), worker_idx=0)
    sender.shutdown()
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"worker 0: could not join the sender at 127\.0\.0\.1 port \d+"):
        receivers[0].call(schemes.connect)
    assert time.monotonic() - started < 2.0


def test_another_backend_on_the_other_side_raises_on_both(receivers, connect):
    def init_with_other_backend(box, scheme, model):
        scheme.backend = "carrier pigeon"
        schemes.init(box, scheme, model, worker_idx=0)

    sender = connect.sender(source := layers())
    receivers[0].call(init_with_other_backend, sender, altered(source))
    joining = receivers[0].begin(schemes.connect)
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"backend='gloo', this worker was told 'carrier pigeon'") as here:
        sender.connect()
    assert list(here.value.failed) == [0]
    with pytest.raises(WeightSyncError, match=r"backend='gloo', this worker was told 'carrier pigeon'"):
        joining.result(2.0)
    assert time.monotonic() - started < 2.0


def test_a_destination_that_the_worker_does_not_have_raises_on_both(receivers, connect):
    sender = connect.sender(source := layers())
    receivers[0].call(schemes.init, sender, altered(source), worker_idx=0, model_id="critic")
    joining = receivers[0].begin(schemes.connect)
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"no receiver for 'policy' in this worker; there is 'critic'") as here:
        sender.connect()
    assert list(here.value.failed) == [0]
    with pytest.raises(WeightSyncError, match="no receiver for 'policy'"):
        joining.result(2.0)
    assert time.monotonic() - started < 2.0


@pytest.mark.parametrize("index", [0, 2, -1])
def test_an_index_that_is_taken_or_does_not_exist_is_refused_and_disturbs_nobody(receivers, connect, index):
    sender = connect.sender(source := layers(), 2)
    receivers[0].call(schemes.init, sender, altered(source), worker_idx=0)
    receivers[1].call(schemes.init, sender, altered(source), worker_idx=1)
    receivers[2].call(schemes.init, sender, altered(source), worker_idx=index)
    connecting = threading.Thread(target=sender.connect)
    connecting.start()
    first = receivers[0].begin(schemes.connect)
    time.sleep(0.2)  # worker 0 has joined; worker 1 is still missing, so the sender still accepts
    with pytest.raises(WeightSyncError, match=rf"worker {index}: .* refused it: worker_idx={index} is not expected"):
        receivers[2].call(schemes.connect)
    second = receivers[1].begin(schemes.connect)
    connecting.join(5.0)
    assert not connecting.is_alive()
    for future in (first, second):
        future.result(5.0)
    assert [receivers[i].call(schemes.version) for i in range(2)] == [0, 0]


def test_a_wrong_key_is_refused_and_disturbs_nobody(receivers, connect):
    sender = connect.sender(source := layers())
    info = sender.get_store_info()
    stranger = DistributedWeightSyncScheme(connect_timeout=5)
    wrong = info | {"authkey": "00" * 32}
    receivers[1].call(schemes.init, stranger, altered(source), worker_idx=0, store_info=wrong)
    receivers[0].call(schemes.init, sender, altered(source), worker_idx=0)
    connecting = threading.Thread(target=sender.connect)
    connecting.start()
    with pytest.raises(WeightSyncError, match="key"):
        receivers[1].call(schemes.connect)
    receivers[0].call(schemes.connect)
    connecting.join(5.0)
    assert not connecting.is_alive()
    assert_same_bits(receivers[0].call(schemes.leaves), leaves_of(source))


def init_and_die_when(box, scheme, model, moment, **kwargs):
    schemes.init(box, scheme, model, **kwargs)
    setattr(scheme, moment, lambda *args: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.parametrize("moment", ["accept_offer", "make_transport"])
def test_a_worker_that_dies_while_it_connects_is_named_and_the_other_raises_too(receivers, connect, moment):
    sender = connect.sender(source := layers(), 2, connect_timeout=20)
    receivers[0].call(schemes.init, sender, altered(source), worker_idx=0)
    receivers[1].call(init_and_die_when, sender, altered(source), moment, worker_idx=1)
    joining = receivers[0].begin(schemes.connect)
    receivers[1].begin(schemes.connect)
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="worker 1") as caught:
        sender.connect()
    assert list(caught.value.failed) == [1]
    assert time.monotonic() - started < 3.0
    with pytest.raises(WeightSyncError, match="worker 0"):
        joining.result(3.0)
    assert receivers[1].wait() == -signal.SIGKILL


def test_an_error_in_the_first_apply_raises_on_both_sides(receivers, connect):
    def init_with_hook(box, scheme, model):
        def hook(model, version):
            raise ArithmeticError("cannot start")

        schemes.init(box, scheme, model, worker_idx=0)
        scheme.add_applied_hook(hook)

    sender = connect.sender(source := layers())
    theirs = altered(source)
    receivers[0].call(init_with_hook, sender, theirs)
    joining = receivers[0].begin(schemes.connect)
    with pytest.raises(WorkerError, match="ArithmeticError: cannot start") as here:
        sender.connect()
    assert list(here.value.failed) == [0]
    with pytest.raises(WeightSyncError):
        joining.result(2.0)
    assert_same_bits(receivers[0].call(schemes.leaves), leaves_of(theirs))


def test_a_transport_that_cannot_be_opened_ends_its_link_and_names_worker_and_phase(receivers, connect):
    sender, (joining,) = connect.begin(layers())
    create = sender.create_transport

    def create_broken(**kwargs):
        transport = create(**kwargs)
        transport.connect = fail
        return transport

    def fail(deadline):
        raise TransferFailed("no way there")

    sender.create_transport = create_broken
    with pytest.raises(WorkerDied) as caught:
        sender.connect()
    assert_text(
        caught.value, r"worker 0 \(pid \d+\) is gone: no way there", r"phase: opening the transport of 'policy', "
    )
    with pytest.raises(WeightSyncError, match="no way there|gave up"):
        joining.result(5.0)
