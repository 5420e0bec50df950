"""Have environments and policy given each other what their spaces promise?"""

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Text

from lightning_weightsync.collectors.checks import Fault, find_nan, find_outside, misfit, name_of, raise_first
from lightning_weightsync.errors import explain
from tests.helpers.envs import CountingEnv

NAMES = ["environment 0 (A)", "environment 1 (B)"]


def test_an_environment_is_called_by_its_id_or_else_its_class():
    assert name_of(gymnasium.make("CartPole-v1"), 3) == "environment 3 (CartPole-v1)"
    assert name_of(gymnasium.wrappers.TimeLimit(CountingEnv(), 5), 0) == "environment 0 (CountingEnv)"


def test_an_explanation_leaves_the_error_as_it_is():
    error = OSError("no such joint")
    for note in ("first", "second"):
        explain(error, note)
    assert (str(error), error.__notes__) == ("no such joint", ["first", "second"])


def test_what_came_first_in_time_is_named():
    values = np.zeros((2, 4, 3), np.float32)
    assert find_nan("an observation", values, NAMES) is None
    values[0, 3, 1] = values[1, 2, 2] = np.nan
    told = find_nan("an observation", values, NAMES)
    assert told == (2, "environment 1 (B) returned NaN as an observation in step 2 of a batch: [ 0.  0. nan]")


@pytest.mark.parametrize("values", [np.zeros((2, 1), np.uint8), np.array([[np.inf, 1.0], [-np.inf, 0.0]])])
def test_what_holds_no_nan_is_left_alone(values):
    assert find_nan("a reward", values, NAMES) is None


def test_of_several_faults_the_first_one_is_raised():
    raise_first([None, None])
    with pytest.raises(ValueError, match="cause"):
        raise_first([Fault(2, "later"), None, Fault(1, "cause"), Fault(1, "effect in the same step")])


SPACES = [
    # space, inside, outside
    (Discrete(3), [0, 2], [3, -1]),
    (Discrete(3, start=-1), [-1, 1], [2, -2]),
    (MultiDiscrete([2, 3]), [[0, 0], [1, 2]], [[2, 0], [0, 3], [-1, 0]]),
    (MultiBinary(2), [[0, 1], [1, 1]], [[2, 0]]),
    (Box(-2.0, 2.0, (2,)), [[-2.0, 2.0], [0.0, 2.00001]], [[2.001, 0.0], [0.0, np.nan], [-np.inf, 0.0]]),
    (Box(-np.inf, np.inf, (1,)), [[1e30]], [[np.nan]]),
]


@pytest.mark.parametrize(("space", "inside", "outside"), SPACES, ids=lambda case: str(case)[:20])
def test_an_action_outside_of_its_space_is_found_whatever_the_space(space, inside, outside):
    good = np.array([inside, inside])
    assert find_outside(space, good, NAMES) is None
    for wrong in outside:
        actions = good.copy()
        actions[1, -1] = wrong
        fault = find_outside(space, actions, NAMES)
        assert fault is not None and fault.step == actions.shape[1] - 1
        told = fault.text
        assert "environment 1 (B)" in told and f"action space {space}" in told
        is_nan = np.isnan(wrong).any()
        assert ("gymnasium.wrappers.ClipAction" in told) == (isinstance(space, Box) and not is_nan)
        assert ("are the policy's weights finite?" in told) == is_nan
        assert ("in step" in told) == (actions.shape[1] > 1)


def test_an_action_of_another_shape_is_told():
    one_hot = np.eye(2)[np.zeros((2, 4), int)]
    told = find_outside(Discrete(2), one_hot, NAMES)
    assert told == (0, "an action has the shape (2,), and the action space Discrete(2) has ()")


def test_spaces_that_are_no_arrays_are_not_looked_at():
    assert find_outside(Text(3), np.zeros((2, 1)), NAMES) is None
    assert misfit(Text(3), "abcd", 0.0) is None


def test_the_form_of_what_an_environment_returns():
    space = CountingEnv.observation_space
    assert misfit(space, np.zeros(3), 1) is None
    assert misfit(space, np.zeros(3), np.array([1.0])) is None
    assert "observation of shape (1,)" in misfit(space, np.zeros(1), 1.0)
    assert "reward of shape (2,)" in misfit(space, np.zeros(3), np.zeros(2))
