"""A Hydra application whose workers get nodes of its configuration, not resolved; they log what they see."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from functools import partial
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

from tests.helpers.collectors import configured_collector
from tests.helpers.fit import Learner, make_callback, make_group, make_trainer

log = logging.getLogger("app")

DEFAULTS = {
    "devices": 1,
    "strategy": "auto",
    "x": 0,
    "settings": {
        "began": "${now:%S.%f}",
        "folder": "${hydra:runtime.output_dir}",
        "x": "${x}",
        "file": "env.json",
    },
}
ConfigStore.instance().store("app", DEFAULTS)


@hydra.main(version_base="1.3", config_path=None, config_name="app")
def main(config: DictConfig) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        Path(config.settings.file).write_text(json.dumps({"made_by": os.getpid(), "x": config.x}))
    group = make_group(1, partial(configured_collector, settings=config.settings), length=2)
    time.sleep(0.01)
    kind = {"devices": config.devices, "strategy": config.strategy}
    make_trainer(make_callback(group), **kind).fit(Learner(), group)
    seen = {"began": config.settings.began, "folder": config.settings.folder, "x": config.x}
    log.info(f"trainer {json.dumps(seen)}")


if __name__ == "__main__":
    sys.exit(main())
