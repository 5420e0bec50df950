"""The callback from LightningCLI: configured there, cadence and all, as any other callback."""

import pytest

pytest.importorskip("jsonargparse")

from lightning.pytorch.cli import LightningCLI

from lightning_weightsync import CollectorGroup, DistributedWeightSyncScheme, UpdateWeights
from tests.helpers.configured import Probe, Shown


class Synced(UpdateWeights):
    """What LightningCLI can build: the group is made from plain arguments."""

    def __init__(
        self,
        weight_update_map: dict[str, str],
        num_workers: int = 0,
        update_weights_interval: int | float = 1,
        interval_unit: str = "batches",
    ) -> None:
        schemes = {destination: DistributedWeightSyncScheme() for destination in weight_update_map}
        group = CollectorGroup(Shown, num_workers, weight_sync_schemes=schemes, batches_per_epoch=4, seed=1)
        super().__init__(group, update_weights_interval, None, weight_update_map, interval_unit=interval_unit)


def test_the_callback_is_configured_on_the_command_line_of_lightning_cli(tmp_path):
    arguments = [
        "--trainer.max_epochs=1",
        "--trainer.accelerator=cpu",
        "--trainer.logger=false",
        "--trainer.enable_checkpointing=false",
        "--trainer.enable_progress_bar=false",
        f"--trainer.default_root_dir={tmp_path}",
        f"--trainer.callbacks+={__name__}.Synced",
        "--trainer.callbacks.weight_update_map={policy: actor, 'nets[0]': critic}",
        "--trainer.callbacks.update_weights_interval=2",
    ]
    cli = LightningCLI(Probe, args=arguments, run=False, save_config_callback=None)
    (synced,) = [callback for callback in cli.trainer.callbacks if isinstance(callback, UpdateWeights)]
    cli.trainer.fit(cli.model, synced.collector)
    assert synced.update_weights_interval == 2
    assert [batch["version"] for batch in cli.model.seen] == [0, 0, 1, 1]
    assert [batch["models"][1] for batch in cli.model.seen] == [[2.0]] * 4
    assert synced.version == 2
