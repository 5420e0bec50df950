"""A small training script, to be run as ``python -m tests.helpers.fit_script OPTIONS`` (JSON); see ``DEFAULTS``.

Prints ``launched`` when its workers have been started, ``training`` when the first batch has been learned from,
``happening`` when it is about to end as the options say, and what it saw, as JSON, in its last line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from typing import Any

from lightning.pytorch import Callback

from tests.helpers import collectors
from tests.helpers.envs import CountingEnv
from tests.helpers.fit import Learner, make_callback, make_group, make_trainer
from tests.helpers.policies import fingerprint

DEFAULTS: dict[str, Any] = {
    "num_workers": 1,
    "length": 4,
    "max_epochs": 1,
    "interval": 1,  # of pushes
    "unit": "batches",
    "seed": 7,  # of the group
    "actor": 0,  # seed of the actor's initial weights
    "env": "CountingEnv",  # or "ParentEnv", which starts a process of its own, or "TrainerEnv"
    "doze_at": 0,  # step of each worker's life in which it falls asleep for an hour; 0: never
    "doze_on": None,  # the only rank on which they do; None: on all
    "pause": 0.0,  # seconds that each batch takes to learn from
    "ending": "normal",  # or where ``happens`` is called with
    "rank": 0,  # on which that happens
    "ckpt_path": None,
    "devices": 1,
    "strategy": "auto",
}


class Ends(Callback):
    """Placed after ``UpdateWeights``: its workers have been started, and it has pushed."""

    def __init__(self, options: dict[str, Any], update: Any) -> None:
        self.options, self.update = options, update
        self.batches: list[Any] = []
        self.seen: dict[str, Any] = {"after": []}

    def happens(self, ending: str, rank: int) -> None:
        """What the user's own code does wrong."""
        if (self.options["ending"], self.options["rank"]) != (ending, rank):
            return
        say("happening")
        if ending == "_exit":
            os._exit(7)
        if ending == "early SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)  # Lightning has no handler yet
        if ending == "early SIGTERM to the group":
            os.killpg(0, signal.SIGTERM)
        raise ArithmeticError(f"the {ending.replace('_', ' ')} of rank {rank}")

    def setup(self, trainer, pl_module, stage):
        say("launched")
        for ending in ("setup", "early SIGTERM", "early SIGTERM to the group"):
            self.happens(ending, trainer.global_rank)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if not self.batches:
            self.seen["fingerprint"] = fingerprint(pl_module.actor).item()
        self.batches.append(batch)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen["after"].append(self.update.version)
        if len(self.batches) == 1:
            say("training")
            self.happens("callback", trainer.global_rank)
            self.happens("_exit", trainer.global_rank)


class EndingLearner(Learner):
    def __init__(self, ends: Ends) -> None:
        super().__init__(seed=ends.options["actor"])
        self.ends = ends

    def configure_optimizers(self):
        self.ends.happens("configure_optimizers", self.global_rank)
        return super().configure_optimizers()

    def training_step(self, batch, batch_idx):
        time.sleep(self.ends.options["pause"])
        if batch_idx == 1:
            self.ends.happens("training_step", self.global_rank)
        return super().training_step(batch, batch_idx)


class EndingLoader:
    def __init__(self, ends: Ends, group: Any) -> None:
        self.ends, self.group = ends, group

    def __len__(self) -> int:
        return len(self.group)

    def __iter__(self):
        for count, batch in enumerate(self.group):
            if count == 1:
                self.ends.happens("loader", rank())
            yield batch


def say(line: str) -> None:
    """In one write: ranks share a pipe."""
    print(f"{line}\n", end="", flush=True)


def rank() -> int:
    return int(os.environ.get("LOCAL_RANK", 0))


def make_env(options: dict[str, Any]) -> Any:
    env: Any = CountingEnv if options["env"] == "CountingEnv" else getattr(collectors, options["env"])
    dozes = options["doze_at"] and options["doze_on"] in (None, rank())
    return partial(collectors.MisbehavingEnv, collectors.doze, options["doze_at"], env) if dozes else env


def main(options: dict[str, Any]) -> None:
    factory = partial(collectors.gym_collector, env=make_env(options), num_envs=1)
    group = make_group(options["num_workers"], factory, length=options["length"], seed=options["seed"])
    source = "aktor" if options["ending"] == "own setup" else "actor"
    update = make_callback(group, options["interval"], options["unit"], weight_update_map={"policy": source})
    ends = Ends(options, update)
    devices = {"devices": options["devices"], "strategy": options["strategy"]}
    trainer = make_trainer(update, ends, max_epochs=options["max_epochs"], **devices)
    loader = EndingLoader(ends, group) if options["ending"] == "loader" else group
    trainer.fit(EndingLearner(ends), loader, ckpt_path=options["ckpt_path"])
    seen = ends.seen | {
        "run": group.run,
        "versions": [batch["policy_version"].unique().tolist() for batch in ends.batches],
        "made_by": [batch["fingerprint"].unique().tolist() for batch in ends.batches],
        "marks": [batch["observation"][0, 0, 2].item() for batch in ends.batches],
        "num_pushes": update.num_pushes,
        "frames": group.frames,
    }
    say(json.dumps(seen))


if __name__ == "__main__":
    main(DEFAULTS | json.loads(sys.argv[1]))
