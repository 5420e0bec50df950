import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_weightsync.errors import StaleVersionError, WeightSyncTimeout
from lightning_weightsync.schemes.gate import Gate
from lightning_weightsync.schemes.strategy import WeightStrategy
from lightning_weightsync.schemes.transaction import Staged, Transaction, TransactionState, check_newer
from tests.helpers.leaves import assert_same_bits, randomise, values
from tests.helpers.models import Mixed
from tests.helpers.staging import Destination
from tests.helpers.threads import Call, eventually, soon

ANNOUNCED, STAGED, APPLIED, ABORTED = TransactionState


@pytest.fixture
def gate():
    gate = Gate()
    gate.run, gate.version = 2, 6
    return gate


class Link:
    """Where pushes come from: it may call them off."""

    def __init__(self):
        self.run, self.version = 2, 6
        self.asked = 0
        self.called_off_after = 10**9

    def check_wanted(self):
        self.asked += 1
        if self.asked > self.called_off_after:
            raise ConnectionError("nobody waits for it")


WAYS = ["tensordict", "state_dict", "switched"]


def destination(model=None, *, name="policy", strategy="tensordict"):
    """A live model and its staging, bound to its own layout."""
    switched = strategy == "switched"
    how = WeightStrategy("tensordict" if switched else strategy)
    return Destination(Mixed() if model is None else model, strategy=how, model_id=name, may_switch=switched)


def staged_push(gate, *models, seed=1, version=7, deadline=None, origin=None):
    """A push with new values for each of the models, all in their slots."""
    push = Transaction(gate, 3, version, soon(30.0) if deadline is None else deadline, origin)
    push.stage([model.fill(randomise(type(model.target)(), seed)) for model in models])
    return push


def pushed_values(model, seed=1):
    """What the model's persistent leaves hold once that push is applied."""
    return dict(randomise(type(model.target)(), seed).state_dict())


def assert_aborted(push, gate, before):
    """It was not applied, and never will be."""
    for _ in range(2):
        assert push.state is ABORTED
        assert (gate.run, gate.version) == (2, 6)
        for model, old in before.items():
            assert_same_bits(values(model.target), old)
        assert push.commit() is False


class Failing(Mixed):
    """Its state can be loaded only half-way."""

    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)
        raise ZeroDivisionError("half-way")


# --- states ---------------------------------------------------------------------------------------------------------


def test_a_push_goes_from_announced_over_staged_to_applied(gate):
    model = destination()
    push = Transaction(gate, 3, 7, soon())
    assert (push.state, push.error) == (ANNOUNCED, None)
    push.stage([model.fill(randomise(Mixed(), 1))])
    assert push.state is STAGED
    assert push.commit() is True
    assert (push.state, push.error, gate.run, gate.version) == (APPLIED, None, 3, 7)
    assert_same_bits(dict(model.target.state_dict()), pushed_values(model))


def test_a_push_that_is_not_staged_is_not_committed(gate):
    model = destination()
    before = values(model.target)
    push = Transaction(gate, 3, 7, soon())
    assert push.commit() is False
    assert (push.state, gate.version) == (ANNOUNCED, 6)
    assert_same_bits(values(model.target), before)


def in_state(gate, state):
    push = Transaction(gate, 3, 7, soon())
    if state is ABORTED:
        push.abort(ZeroDivisionError())
    if state in (STAGED, APPLIED):
        push.stage([destination().fill()])
    if state is APPLIED:
        push.commit()
    assert push.state is state
    return push


@pytest.mark.parametrize("state", [STAGED, APPLIED, ABORTED])
def test_a_push_is_staged_only_once_and_only_when_it_was_just_announced(gate, state):
    push = in_state(gate, state)
    with pytest.raises(RuntimeError, match=f"cannot go from {state.value} to staged"):
        push.stage([])
    assert push.state is state


@pytest.mark.parametrize("state", [APPLIED, ABORTED])
def test_an_end_is_final_and_its_error_with_it(gate, state):
    push = in_state(gate, state)
    error = push.error
    with pytest.raises(RuntimeError, match=f"cannot go from {state.value} to aborted"):
        push.abort(ValueError("too late"))
    assert (push.state, push.error) == (state, error)
    assert push.commit() is False


@pytest.mark.parametrize("state", [ANNOUNCED, STAGED])
def test_a_push_that_was_given_up_is_never_applied(gate, state):
    model = destination()
    before = {model: values(model.target)}
    push = staged_push(gate, model) if state is STAGED else Transaction(gate, 3, 7, soon())
    error = ValueError("refused")
    push.abort(error)
    assert push.error is error
    assert_aborted(push, gate, before)


# --- committing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", WAYS)
def test_all_models_of_a_push_switch_together(gate, strategy):
    models = [destination(name=name, strategy=strategy) for name in ("actor", "critic", "encoder")]
    assert staged_push(gate, *models).commit() is True
    for model in models:
        assert_same_bits(dict(model.target.state_dict()), pushed_values(model))
    assert (gate.run, gate.version) == (3, 7)


def test_the_version_is_given_to_the_gate_and_to_the_origin_together(gate):
    link, seen = Link(), []
    model = destination()
    model.applied_hooks.append(lambda target, version: seen.append((gate.run, gate.version, link.run, link.version)))
    assert staged_push(gate, model, origin=link).commit() is True
    assert seen == [(3, 7, 3, 7)]
    assert (link.run, link.version) == (3, 7)


def test_values_come_into_force_with_the_weights_and_hooks_see_them_or_not_at_all(gate):
    gate.values = before = {"level": 1}
    model, seen = destination(), []
    for fails in (True, False):
        push = Transaction(gate, 3, 7, soon(), values={"level": 2})
        push.stage([model.fill()])

        def hook(target, version, fails=fails):
            seen.append((version, gate.values))
            if fails:
                raise ZeroDivisionError

        model.applied_hooks[:] = [hook]
        assert gate.values is before
        if fails:
            with pytest.raises(ZeroDivisionError):
                push.commit()
        else:
            push.commit()
    assert seen == [(7, {"level": 2})] * 2
    assert (gate.version, gate.values) == (7, {"level": 2})


def test_committing_twice_switches_once(gate):
    model = destination()
    push = staged_push(gate, model)
    assert push.commit() is True
    model.target.steps += 1
    steps = model.target.steps.item()
    assert push.commit() is False
    assert (model.target.steps.item(), push.state) == (steps, APPLIED)


def test_committing_in_many_threads_at_once_switches_once(gate):
    for round_ in range(20):
        model, switched = destination(), []
        model.applied_hooks.append(lambda target, version, switched=switched: switched.append(version))
        push = staged_push(gate, model, version=7 + round_)
        start = threading.Barrier(6)

        def commit(start=start, push=push):
            start.wait()
            return push.commit(), push.state

        outcomes = [call.result() for call in [Call(commit) for _ in range(6)]]
        assert sorted(outcome for outcome, _ in outcomes) == [False] * 5 + [True]
        assert {state for _, state in outcomes} == {APPLIED}  # nobody comes back before it is done
        assert switched == [7 + round_]


def test_a_commit_waits_for_the_readers_and_they_see_one_version_from_end_to_end(gate):
    model = destination()
    push = staged_push(gate, model)
    before = values(model.target)
    with gate:
        committing = Call(push.commit)
        eventually(lambda: gate._waiting_writers)
        assert (push.state, gate.version) == (STAGED, 6)
        assert_same_bits(values(model.target), before)
    assert committing.result() is True
    assert_same_bits(dict(model.target.state_dict()), pushed_values(model))


@pytest.mark.parametrize("alone", [False, True])
def test_a_commit_inside_the_gate_raises_and_leaves_the_push_to_be_committed_outside(gate, alone):
    model = destination()
    push = staged_push(gate, model)
    with gate.alone() if alone else gate:
        with pytest.raises(RuntimeError, match="from inside the gate"):
            push.commit()
        assert push.state is STAGED
    assert push.commit() is True


def test_readers_never_see_two_models_of_different_versions(gate):
    models = [destination(nn.Linear(8, 8), name=name) for name in ("actor", "critic")]
    for model in models:
        model.applied_hooks.append(lambda target, version: time.sleep(0))  # lets another thread run between models
    stop = threading.Event()
    seen = []

    def read():
        while not stop.is_set():
            with gate:
                found = {value for m in models for p in m.target.parameters() for value in p.flatten().tolist()}
                assert len(found) == 1 or gate.version == 6
                seen.append((gate.version, found))

    readers = [Call(read) for _ in range(3)]
    for version in range(7, 107):
        with torch.no_grad():
            source = nn.Linear(8, 8)
            for parameter in source.parameters():
                parameter.fill_(version)
        push = Transaction(gate, 2, version, soon(30.0))
        push.stage([model.fill(source) for model in models])
        assert push.commit() is True
    eventually(lambda: seen and seen[-1][0] == 106)
    stop.set()
    for call in readers:
        call.result()
    assert {version: found for version, found in seen if version > 6} == {
        version: {float(version)} for version in {version for version, _ in seen} if version > 6
    }


# --- deadlines ------------------------------------------------------------------------------------------------------


def test_a_push_whose_deadline_has_passed_is_not_applied_and_never_will_be(gate):
    model = destination()
    before = {model: values(model.target)}
    push = staged_push(gate, model, deadline=time.monotonic() - 0.001)
    with pytest.raises(WeightSyncTimeout, match="the deadline passed") as caught:
        push.commit()
    assert push.error is caught.value
    assert_aborted(push, gate, before)


def test_a_gate_that_is_not_free_in_time_ends_the_push_with_the_holders_name_and_seconds(gate):
    model = destination()
    before = {model: values(model.target)}
    entered, leave = threading.Event(), threading.Event()

    def stay():
        with gate:
            entered.set()
            assert leave.wait(10)

    slow = Call(stay, name="slow-environment")
    assert entered.wait(5)
    push = staged_push(gate, model, deadline=soon(0.2))
    with pytest.raises(WeightSyncTimeout, match=r"'slow-environment' has been inside for 0\.\d s") as caught:
        push.commit()
    assert push.error is caught.value
    leave.set()
    slow.result()
    assert_aborted(push, gate, before)
    assert staged_push(gate, model, seed=2, version=8).commit() is True
    assert_same_bits(dict(model.target.state_dict()), pushed_values(model, 2))


def test_a_deadline_that_passes_for_one_of_several_committing_threads_ends_the_push_for_all(gate):
    model = destination()
    before = {model: values(model.target)}
    push = staged_push(gate, model, deadline=soon(0.2))
    with gate:
        calls = [Call(push.commit) for _ in range(3)]
        outcomes = []
        for call in calls:
            try:
                outcomes.append(call.result())
            except WeightSyncTimeout:
                outcomes.append("expired")
    assert sorted(map(str, outcomes)) == ["False", "False", "expired"]
    assert_aborted(push, gate, before)


@pytest.mark.parametrize("asked_before", [0, 1, 3])
def test_a_push_that_is_called_off_while_it_waits_or_just_before_is_not_applied(gate, asked_before):
    model, link = destination(), Link()
    before = {model: values(model.target)}
    push = staged_push(gate, model, origin=link)
    link.called_off_after = asked_before
    if asked_before:
        with gate, pytest.raises(ConnectionError, match="nobody waits"):
            Call(push.commit).result()
    else:
        with pytest.raises(ConnectionError, match="nobody waits"):
            push.commit()
    assert link.asked == asked_before + 1
    assert isinstance(push.error, ConnectionError)
    assert_aborted(push, gate, before)
    assert (link.run, link.version) == (2, 6)


def test_a_push_that_is_aborted_while_its_commit_waits_for_the_gate_is_not_applied(gate):
    model = destination()
    before = {model: values(model.target)}
    push = staged_push(gate, model)
    with gate:
        committing = Call(push.commit)
        eventually(lambda: gate._waiting_writers)
        push.abort(ValueError("given up"))
    assert committing.result() is False
    assert isinstance(push.error, ValueError)
    assert_aborted(push, gate, before)


# --- errors in a commit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("strategy", WAYS)
def test_if_any_model_cannot_be_applied_all_keep_what_they_had_bit_for_bit(gate, position, strategy):
    torch.manual_seed(0)
    models = [destination(name=f"model {number}", strategy=strategy) for number in range(2)]
    models.insert(position, destination(Failing(), name="broken", strategy="state_dict"))
    before = {model: values(model.target) for model in models}
    link = Link()
    push = staged_push(gate, *models, origin=link)
    with pytest.raises(ZeroDivisionError, match="half-way") as caught:
        push.commit()
    assert push.error is caught.value
    assert_aborted(push, gate, before)
    assert (link.run, link.version) == (2, 6)


def test_models_are_rolled_back_in_reverse_order(gate):
    events = []

    class Recorder:
        applied_hooks = ()

        def __init__(self, name):
            self.name = name

        def apply(self, slot, extra, *, keep_backup):
            assert gate.inside
            assert extra == {"of": self.name}
            events.append(f"apply {self.name}, backup {keep_backup}")
            if self.name == "c":
                raise ZeroDivisionError

        def roll_back(self):
            assert gate.inside  # nobody reads in between
            events.append(f"roll back {self.name}")

    push = Transaction(gate, 3, 7, soon())
    push.stage([Staged(Recorder(name), torch.empty(0), {"of": name}) for name in "abcd"])
    with pytest.raises(ZeroDivisionError):
        push.commit()
    assert events == [
        *(f"apply {name}, backup True" for name in "abc"),
        *(f"roll back {name}" for name in "cba"),
    ]


@pytest.mark.parametrize("error", [ValueError("hook"), KeyboardInterrupt()], ids=["Exception", "KeyboardInterrupt"])
@pytest.mark.parametrize("num_models", [1, 2])
@pytest.mark.parametrize("strategy", WAYS)
def test_an_applied_hook_that_raises_rolls_every_model_back(gate, error, num_models, strategy):
    models = [destination(name=str(number), strategy=strategy) for number in range(num_models)]
    called = []

    def fail(target, version):
        called.append((gate.version, version))
        raise error

    models[-1].applied_hooks.append(fail)
    before = {model: values(model.target) for model in models}
    link = Link()
    push = staged_push(gate, *models, origin=link)
    with pytest.raises(type(error)) as caught:
        push.commit()
    assert (caught.value, push.error) == (error, error)
    assert called == [(7, 7)]
    assert_aborted(push, gate, before)
    assert (link.run, link.version) == (2, 6)

    models[-1].applied_hooks.clear()
    assert staged_push(gate, *models, seed=2, version=8).commit() is True  # nothing of the failure is left
    for model in models:
        assert_same_bits(dict(model.target.state_dict()), pushed_values(model, 2))


@pytest.mark.parametrize("why", ["late", "called off"])
def test_a_push_that_is_given_up_while_a_hook_runs_is_rolled_back(gate, why):
    model, link = destination(), Link()
    push = staged_push(gate, model, deadline=soon(0.1 if why == "late" else 30.0), origin=link)
    before = values(model.target)

    def hook(target, version):
        if why == "late":
            time.sleep(0.15)
        else:
            link.called_off_after = link.asked

    model.applied_hooks.append(hook)
    with pytest.raises(WeightSyncTimeout if why == "late" else ConnectionError):
        push.commit()
    assert_aborted(push, gate, {model: before})
    assert (link.run, link.version) == (2, 6)


def test_hooks_run_once_each_after_all_models_have_switched_and_before_any_reader(gate):
    models = [destination(name=name) for name in ("actor", "critic")]
    calls = []

    def hook(target, version):
        with gate:  # it may call the policy
            assert gate.version == version == 7
        for model in models:
            assert_same_bits(dict(model.target.state_dict()), pushed_values(model))
        calls.append([model.name for model in named if model.target is target])

    named = [SimpleNamespace(name=model.model_id, target=model.target) for model in models]
    for model in models:
        model.applied_hooks.append(hook)
    models[0].applied_hooks.append(lambda target, version: calls.append("second"))
    push = staged_push(gate, *models)
    with gate:
        committing = Call(push.commit)
        eventually(lambda: gate._waiting_writers)
        reading = Call(lambda: enter(gate, calls))
    assert committing.result() is True
    assert reading.result() == 3
    assert calls == [["actor"], "second", ["critic"]]


def enter(gate, calls):
    with gate:
        return len(calls)


def test_a_hook_that_commits_or_switches_is_an_error_and_not_a_deadlock(gate):
    model, other = destination(), destination(name="other")
    nested = staged_push(gate, other, version=8)
    model.applied_hooks.append(lambda target, version: nested.commit())
    before = {model: values(model.target)}
    push = staged_push(gate, model)
    with pytest.raises(RuntimeError, match="from inside the gate"):
        Call(push.commit).result(5)
    assert_aborted(push, gate, before)
    assert nested.commit() is True


def test_what_a_policy_remembers_is_forgotten_before_its_next_call(gate):
    class Memoising(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(1))
            self.memory = {}

        def forward(self, observation):
            if observation not in self.memory:
                self.memory[observation] = observation + self.bias.item()
            return self.memory[observation]

    policy = Memoising()
    model = destination(policy)
    model.applied_hooks.append(lambda target, version: target.memory.clear())
    assert policy(1) == 1.0
    push = Transaction(gate, 3, 7, soon())
    push.stage([model.fill({"bias": torch.tensor([2.0])})])
    assert push.commit() is True
    assert policy(1) == 3.0


def test_a_failed_push_is_reported_by_its_first_error_although_rolling_back_its_state_fails_again(gate):
    model = destination(Failing(), strategy="state_dict")
    before = {model: values(model.target)}
    push = staged_push(gate, model)
    with pytest.raises(ZeroDivisionError, match="half-way"):
        push.commit()
    assert_aborted(push, gate, before)


# --- versions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("applied", "offered", "initial"),
    [
        ((1, 5), (1, 6), False),
        ((1, 5), (1, 99), False),
        ((1, 5), (2, 0), False),
        ((1, 5), (2, 0), True),
        ((1, 5), (1, 5), True),
        ((-1, -1), (1, 0), True),
        ((-1, -1), (0, 0), False),
    ],
)
def test_a_newer_version_is_taken_and_so_is_an_equal_one_right_after_connecting(applied, offered, initial):
    check_newer(applied, offered, initial=initial)


@pytest.mark.parametrize(
    ("applied", "offered", "initial"),
    [
        ((1, 5), (1, 5), False),
        ((1, 5), (1, 4), False),
        ((1, 5), (1, 4), True),
        ((2, 0), (1, 99), False),
        ((2, 0), (1, 99), True),
        ((1, 5), (0, 5), False),
    ],
)
def test_weights_never_go_backwards(applied, offered, initial):
    with pytest.raises(StaleVersionError) as caught:
        check_newer(applied, offered, initial=initial)
    assert str(applied) in str(caught.value)
    assert str(offered) in str(caught.value)
