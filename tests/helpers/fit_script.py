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
    "seed": 7,  # of the group
    "actor": 0,  # seed of the actor's initial weights
    "env": "CountingEnv",  # or "ParentEnv", which starts a process of its own
    "doze_at": 0,  # step of each worker's life in which it falls asleep for an hour; 0: never
    "doze_on": None,  # the only rank on which they do; None: on all
    "pause": 0.0,  # seconds that each batch takes to learn from
    "ending": "normal",  # or where something happens, see ``Ends``
    "rank": 0,  # where it happens
    "ckpt_path": None,
    "devices": 1,
    "strategy": "auto",
}


def happens(options: dict[str, Any], ending: str, rank: int) -> None:
    """What the user's own code does wrong."""
    if (options["ending"], options["rank"]) == (ending, rank):
        raise ArithmeticError(f"the {ending.replace('_', ' ')} of rank {rank}")


def main(options: dict[str, Any]) -> None:
    from lightning.pytorch import Callback

    from tests.helpers import collectors
    from tests.helpers.envs import CountingEnv
    from tests.helpers.fit import Learner, make_callback, make_group, make_trainer
    from tests.helpers.policies import fingerprint

    class Ends(Callback):
        def setup(self, trainer, pl_module, stage):
            happens(options, "setup", trainer.global_rank)

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if not batches:
                seen["fingerprint"] = fingerprint(module.actor).item()
            batches.append(batch)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen["after"].append(callback.version)
            if len(batches) > 1:
                return
            print("training\n", end="", flush=True)
            happens(options, "exception", trainer.global_rank)
            if (options["ending"], options["rank"]) == ("_exit", trainer.global_rank):
                os._exit(7)

    class Ending(Learner):
        def configure_optimizers(self):
            happens(options, "configure_optimizers", self.global_rank)
            return super().configure_optimizers()

        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                happens(options, "training_step", self.global_rank)
            return super().training_step(batch, batch_idx)

    class Loader:
        def __len__(self):
            return len(group)

        def __iter__(self):
            for count, batch in enumerate(group):
                if count == 1:
                    happens(options, "loader", int(os.environ.get("LOCAL_RANK", 0)))
                yield batch

    env: Any = {"CountingEnv": CountingEnv, "ParentEnv": collectors.ParentEnv}[options["env"]]
    if options["doze_at"] and options["doze_on"] in (None, int(os.environ.get("LOCAL_RANK", 0))):
        env = partial(collectors.MisbehavingEnv, collectors.doze, options["doze_at"], env)
    factory = partial(collectors.gym_collector, env=env, num_envs=1)
    group = make_group(options["num_workers"], factory, length=options["length"], seed=options["seed"])
    module = Ending(seed=options["actor"], on_batch=lambda batch: time.sleep(options["pause"]))
    source = "aktor" if options["ending"] == "own setup" else "actor"
    callback = make_callback(group, weight_update_map={"policy": source})
    batches: list[Any] = []
    seen: dict[str, Any] = {"after": []}
    devices = {"devices": options["devices"], "strategy": options["strategy"]}
    trainer = make_trainer(callback, Ends(), max_epochs=options["max_epochs"], **devices)
    trainer.fit(module, Loader() if options["ending"] == "loader" else group, ckpt_path=options["ckpt_path"])
    seen |= {
        "run": group.run,
        "versions": [batch["policy_version"].unique().tolist() for batch in batches],
        "made_by": [batch["fingerprint"].unique().tolist() for batch in batches],
        "marks": [batch["observation"][0, 0, 2].item() for batch in batches],
        "num_pushes": callback.num_pushes,
        "frames": group.frames,
    }
    print(f"{json.dumps(seen)}\n", end="", flush=True)


if __name__ == "__main__":
    main(DEFAULTS | json.loads(sys.argv[1]))
