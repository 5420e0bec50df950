"""What may be wrong before a fit begins, where no fit is needed to see it."""

import lightning.pytorch as pl
import pytest

from lightning_weightsync.collectors.group_weights import unmatched
from lightning_weightsync.preflight import builds_later


class Plain(pl.LightningModule):
    pass


class InSetup(pl.LightningModule):
    def setup(self, stage):
        pass


class InConfigureModel(pl.LightningModule):
    def configure_model(self):
        pass


@pytest.mark.parametrize(("kind", "expected"), [(Plain, False), (InSetup, True), (InConfigureModel, True)])
def test_a_module_that_overrides_a_hook_for_it_may_build_its_networks_later(kind, expected):
    assert builds_later(kind()) is expected


def test_what_is_without_a_scheme_and_without_a_source_is_told_in_one_sentence():
    assert unmatched("weight_update_map", {"policy": "actor"}, ["policy"]) is None
    assert unmatched("weight_update_map", ["value", "policy"], ["policy", "encoder"]) == (
        "weight_update_map is given for ['policy', 'value'], and the group's weight_sync_schemes for "
        "['encoder', 'policy']: without a scheme ['value'], without a source ['encoder']"
    )
