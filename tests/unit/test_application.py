"""What a configuration describes, once it is read: schemes for each destination, the group for each UpdateWeights."""

import pytest
from omegaconf import OmegaConf

from lightning_weightsync import UpdateWeights
from lightning_weightsync.commands.application import read
from lightning_weightsync.commands.problems import ConfigError

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
    application = read(config())
    module, group = application.build_module(), application.build_group()
    trainer = application.build_trainer(list(application.build_callbacks(group).values()), [])
    assert application.resolve_sources(module, trainer) == {"policy": module.actor, "nets[0]": module.critic}


def test_a_map_that_is_not_given_is_asked_for_with_an_example():
    update = UPDATE | {"weight_update_map": "???"}
    with pytest.raises(ConfigError, match=r"weight_update_map has no value .* \['policy=actor'\]"):
        read(config(callbacks={"update_weights": update}))
