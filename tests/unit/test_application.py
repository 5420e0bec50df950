"""What a configuration describes, once it is read: schemes for each destination, the group for each UpdateWeights."""

import random

import numpy as np
import pytest
import torch
from hydra.errors import InstantiationException
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf

from lightning_weightsync import CollectorGroup, UpdateWeights
from lightning_weightsync.commands.application import _told, build, read
from lightning_weightsync.commands.check import check
from lightning_weightsync.commands.plan import dry_collector
from lightning_weightsync.commands.problems import ConfigError
from lightning_weightsync.commands.train import train
from tests.helpers.configured import Shown

SCHEME = {"_target_": "lightning_weightsync.DistributedWeightSyncScheme"}
UPDATE = {
    "_target_": "lightning_weightsync.UpdateWeights",
    "weight_update_map": {"policy": "actor", "nets[0]": "critic"},
}


def config(**nodes):
    base = {
        "module": {"_target_": "tests.helpers.configured.Probe"},
        "collector": {
            "_target_": "lightning_weightsync.CollectorGroup",
            "collector": {"_target_": "tests.helpers.configured.shown_factory"},
            "num_workers": 0,
        },
        "weight_sync_scheme": SCHEME,
        "callbacks": {"update_weights": UPDATE},
        "trainer": {"_target_": "lightning.pytorch.Trainer", "accelerator": "cpu"},
    }
    return OmegaConf.create(base | nodes)


def test_each_destination_has_a_scheme_of_its_own_and_the_one_that_names_it_goes_first():
    application = read(config(weight_sync_schemes={"nets[0]": SCHEME | {"max_slots": 7}}))
    group = application.build_group()
    schemes = group.weight_sync_schemes
    assert list(schemes) == ["policy", "nets[0]"]
    assert [scheme.max_slots for scheme in schemes.values()] == [None, 7]
    both = read(config()).build_group().weight_sync_schemes
    assert both["policy"] is not both["nets[0]"]


def test_schemes_may_be_the_groups_own_argument():
    application = read(config())
    node = application.config["collector"] | {"weight_sync_schemes": {"policy": SCHEME, "nets[0]": SCHEME}}
    schemes = read(config(collector=node, weight_sync_scheme=None)).build_group().weight_sync_schemes
    assert list(schemes) == ["policy", "nets[0]"]
    with pytest.raises(ConfigError, match=r"a scheme without a source: 'nets\[1\]'"):
        read(config(collector=node | {"weight_sync_schemes": {"nets[1]": SCHEME}}))


def test_a_callback_that_names_no_target_gets_the_one_group():
    callbacks = {
        "update_weights": UPDATE,
        "timer": {"_target_": "lightning.pytorch.callbacks.Timer"},
        "nothing": None,
    }
    application = read(config(callbacks=callbacks))
    group = application.build_group()
    built = application.build_callbacks(group)
    assert list(built) == ["callbacks.update_weights", "callbacks.timer"]
    update = built["callbacks.update_weights"]
    assert isinstance(update, UpdateWeights) and update.collector is group
    assert update.weight_update_map == {"policy": "actor", "nets[0]": "critic"}


def test_the_sources_are_those_of_the_module():
    built = read(config()).build()
    assert built.weights() == {"policy": built.module.actor, "nets[0]": built.module.critic}
    assert not built.unknown


def checked(capsys, module="Probe", code=0, **update):
    """What ``check`` prints of a run with one destination."""
    node = {k: v for k, v in UPDATE.items() if k == "_target_"} | update
    target = {"_target_": f"tests.helpers.configured.{module}"}
    assert check(read(config(module=target, callbacks={"update_weights": node}))) == code
    return capsys.readouterr().out


def test_check_takes_what_a_method_makes(capsys):
    told = checked(capsys, "Adapted", weight_update_map={"policy": "merged"})
    assert "  merged -> policy\n             Constants: 1 leaves, 64 B," in told
    assert told.endswith("\nok\n")


def test_check_compares_leaves_under_the_names_that_they_travel_under(capsys):
    names = {"policy": {"base_layer": "", "adapter": None}}
    told = checked(capsys, "Adapted", weight_update_map={"policy": "wrapped"}, name_map=names)
    assert "  wrapped -> policy\n             Constants: 1 leaves, 64 B," in told
    with pytest.raises(ConfigError, match=r"'policy'.*adapter\.value"):
        checked(capsys, "Adapted", weight_update_map={"policy": "wrapped"})
    with pytest.raises(ConfigError, match="no leaf begins with 'base'"):
        checked(capsys, "Adapted", weight_update_map={"policy": "wrapped"}, name_map={"policy": {"base": ""}})


@pytest.mark.parametrize(
    ("module", "source", "why"),
    [
        ("BuiltLater", "aktor", "no attribute 'aktor'; did you mean 'actor'?"),
        ("BuiltLater", "late", "no attribute 'late'"),
        ("Adapted", "of_the_run", "making its weights raised RuntimeError: Adapted is not attached to a"),
    ],
)
def test_check_says_what_it_could_not_look_at_and_why(capsys, module, source, why):
    told = checked(capsys, module, weight_update_map={"policy": source})
    assert f"  {source} -> policy\n" in told and why in told
    assert told.endswith("\nok, but for what is not known yet: policy\n")


def test_a_module_that_is_set_up_later_is_compared_where_it_is_there_already(capsys):
    assert checked(capsys, "BuiltLater", weight_update_map={"policy": "actor"}).endswith("\nok\n")


def told_of(sort):
    with pytest.raises(ConfigError) as caught:
        build({"_target_": "tests.helpers.configured.Helpful", "sort": sort}, "module")
    return str(caught.value)


def test_an_error_of_the_users_is_told_in_its_own_words_not_in_those_of_its_cause():
    assert "module: no data: run make data" in told_of("nested")


def test_an_error_whose_cause_has_no_traceback_is_told_too():
    assert "module: no traceback of its own" in told_of("other")

    def refuse():
        raise InstantiationException("wrapped") from ValueError("never raised itself")

    with pytest.raises(ConfigError, match="key: never raised itself"):
        _told("key", refuse)


def test_a_dry_collector_is_seeded_as_a_worker_is_and_leaves_random_state_alone():
    drawn = []

    class Drawing(Shown):
        def __init__(self, *, worker_idx, seed):
            super().__init__(worker_idx=worker_idx, seed=seed)
            drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))

    group = CollectorGroup(Drawing, 0, seed=3)
    for seed in (1, 2):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        with dry_collector(group):
            random.random(), np.random.rand(), torch.rand(())
        assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert drawn[0] == drawn[1]


def test_a_trace_without_a_record_is_refused():
    with pytest.raises(ConfigError, match="trace=True with record=False: .*give record=true"):
        read(config(trace=True, record=False))


def test_a_map_that_is_not_given_is_asked_for_with_an_example():
    update = UPDATE | {"weight_update_map": "???"}
    with pytest.raises(ConfigError, match=r"weight_update_map has no value .* \['policy=actor'\]"):
        read(config(callbacks={"update_weights": update}))


def test_a_configuration_that_is_found_to_be_wrong_in_the_middle_of_a_run_is_an_error_of_the_run():
    collector = {
        "_target_": "lightning_weightsync.CollectorGroup",
        "collector": {"_target_": "tests.helpers.configured.shown_factory"},
        "num_workers": 0,
        "batches_per_epoch": 2,
    }
    quiet = {"enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = {"_target_": "lightning.pytorch.Trainer", "accelerator": "cpu", "max_epochs": 1, **quiet}
    for at, error in ((0, ConfigError), (1, MisconfigurationException)):
        module = {"_target_": "tests.helpers.configured.Misconfigured", "at": at}
        with pytest.raises(error, match="found late"):
            train(read(config(module=module, collector=collector, trainer=trainer, record=False)), 0.0)
