"""Would the property test notice? It finds each way to break the protocol, within a bounded number of examples."""

import pytest
from hypothesis import Phase

from tests.property import mutants
from tests.property.machine import Protocol, ProtocolOverNetwork, run

EXAMPLES, STEPS = 500, 50
QUICKLY_FOUND = [
    mutants.slot_is_free_before_the_answer,
    mutants.slot_of_a_lost_worker_is_used_again,
    mutants.push_is_applied_although_it_was_given_up,
    mutants.answer_comes_before_the_switch,
    mutants.failed_push_is_not_rolled_back,
]
OTHERS = [mutant for mutant in mutants.MUTANTS if mutant not in QUICKLY_FOUND]
FOR_SHARED_SLOTS_ONLY = [mutants.slot_in_force_is_free, mutants.slot_of_a_lost_worker_is_used_again]
FOR_NETWORK = [mutant for mutant in mutants.MUTANTS if mutant not in FOR_SHARED_SLOTS_ONLY]


def name_of(mutant):
    return mutant.__name__


def is_found(machine, mutant):
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        try:
            run(
                machine, examples=EXAMPLES, steps=STEPS, phases=[Phase.generate]
            )  # the smallest example is not asked for
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("mutant", QUICKLY_FOUND, ids=name_of)
def test_a_broken_protocol_is_found(mutant):
    assert is_found(Protocol, mutant)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", OTHERS, ids=name_of)
def test_a_protocol_that_is_broken_in_another_way_is_found(mutant):
    assert is_found(Protocol, mutant)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", FOR_NETWORK, ids=name_of)
def test_a_broken_protocol_is_found_over_a_network(mutant):
    assert is_found(ProtocolOverNetwork, mutant)
