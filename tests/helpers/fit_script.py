"""A small training script, to be run as ``python -m tests.helpers.fit_script OPTIONS`` (JSON); see ``DEFAULTS``.

Prints ``training`` when the first batch has been learned from, and what it saw, as JSON, in its last line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from typing import Any

DEFAULTS: dict[str, Any] = {
    "num_workers": 1,
    "length": 4,
    "max_epochs": 1,
    "interval": 1,  # of pushes
    "unit": "batches",
    "seed": 7,  # of the group
    "actor": 0,  # seed of the actor's initial weights
    "env": "CountingEnv",  # or "ParentEnv", which starts a process of its own
    "doze_at": 0,  # step of each worker's life in which it falls asleep for an hour; 0: never
    "pause": 0.0,  # seconds that each batch takes to learn from
    "ending": "normal",  # or "exception", "setup" (of another callback), "_exit"
    "ckpt_path": None,
}


def main(options: dict[str, Any]) -> None:
    from lightning.pytorch import Callback

    from tests.helpers import collectors
    from tests.helpers.envs import CountingEnv
    from tests.helpers.fit import Learner, make_callback, make_group, make_trainer
    from tests.helpers.policies import fingerprint

    class Ends(Callback):
        def setup(self, trainer, pl_module, stage):
            if options["ending"] == "setup":
                raise ArithmeticError("another callback's setup")

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if not batches:
                seen["fingerprint"] = fingerprint(module.actor).item()
            batches.append(batch)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen["after"].append(callback.version)
            if len(batches) > 1:
                return
            print("training", flush=True)
            if options["ending"] == "exception":
                raise ArithmeticError("enough")
            if options["ending"] == "_exit":
                os._exit(7)

    env: Any = {"CountingEnv": CountingEnv, "ParentEnv": collectors.ParentEnv}[options["env"]]
    if options["doze_at"]:
        env = partial(collectors.MisbehavingEnv, collectors.doze, options["doze_at"], env)
    factory = partial(collectors.gym_collector, env=env, num_envs=1)
    group = make_group(options["num_workers"], factory, length=options["length"], seed=options["seed"])
    module = Learner(seed=options["actor"], on_batch=lambda batch: time.sleep(options["pause"]))
    callback = make_callback(group, options["interval"], options["unit"])
    batches: list[Any] = []
    seen: dict[str, Any] = {"after": []}
    trainer = make_trainer(callback, Ends(), max_epochs=options["max_epochs"])
    trainer.fit(module, group, ckpt_path=options["ckpt_path"])
    seen |= {
        "run": group.run,
        "versions": [batch["policy_version"].unique().tolist() for batch in batches],
        "made_by": [batch["fingerprint"].unique().tolist() for batch in batches],
        "marks": [batch["observation"][0, 0, 2].item() for batch in batches],
        "num_pushes": callback.num_pushes,
        "frames": group.frames,
    }
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main(DEFAULTS | json.loads(sys.argv[1]))
