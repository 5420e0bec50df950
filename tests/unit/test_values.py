"""Schedule values: what the trainer gives its workers that is no weight."""

import threading

import numpy as np
import pytest
import torch

from lightning_weightsync import values
from lightning_weightsync.collectors.values import canonical, serving


def test_without_anybody_who_serves_there_are_none():
    assert dict(values) == {} and len(values) == 0 and "epsilon" not in values
    assert values.get("epsilon", 1.0) == 1.0
    with pytest.raises(KeyError, match=r"no value 'epsilon'.*there is none.*values\.get\('epsilon', default\)"):
        values["epsilon"]


def test_what_is_served_is_seen_as_it_is_now_and_in_that_thread_alone():
    served, elsewhere = {"epsilon": 0.5}, []
    with serving(lambda: served):
        assert values["epsilon"] == 0.5
        served = {"epsilon": 0.25, "level": 2}
        assert dict(values) == served and repr(values) == "values({'epsilon': 0.25, 'level': 2})"
        with pytest.raises(KeyError, match=r"\['epsilon', 'level'\]"):
            values["lever"]
        with serving(lambda: {"epsilon": 0.0}):
            assert values["epsilon"] == 0.0
        assert values["epsilon"] == 0.25
        thread = threading.Thread(target=lambda: elsewhere.append(dict(values)))
        thread.start()
        thread.join()
    assert elsewhere == [{}] and dict(values) == {}


def test_values_are_what_every_worker_will_see():
    given = {
        "epsilon": torch.tensor(0.5),
        "level": np.int64(3),
        "flags": (True, None, "fast"),
        "table": {"a": [1, 2.5, np.float32(0.1)]},
    }
    assert canonical(given) == {
        "epsilon": 0.5,
        "level": 3,
        "flags": [True, None, "fast"],
        "table": {"a": [1, 2.5, float(np.float32(0.1))]},
    }
    assert canonical({"third": 1 / 3})["third"] == 1 / 3, "to the last bit"


@pytest.mark.parametrize("value", [torch.zeros(2), object(), lambda: 1, {1, 2}, np.zeros(3)])
def test_what_is_no_plain_value_is_refused_by_name(value):
    with pytest.raises(TypeError, match="epsilon=.* cannot be broadcast.*extra state"):
        canonical({"epsilon": value})
