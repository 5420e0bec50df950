"""The Pendulum example: two models in one push, and a replay buffer that is in the checkpoints."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from examples.pendulum_nets import GAMMA, Actor, Critic, PrioritizingCollector
from examples.pendulum_sac import SAC, ReplayBuffer
from lightning_weightsync import CollectorGroup, DistributedWeightSyncScheme, UpdateWeights
from tests.helpers.fit import make_trainer

ROOT = Path(__file__).parents[2]
MAP = {"policy": "actor", "critic": "critic"}
COLUMNS = ("observation", "action", "next_observation", "reward", "terminated")


def make_group(**kwargs):
    factory = partial(PrioritizingCollector, "Pendulum-v1", Actor, critic=Critic, num_envs=2, frames_per_batch=16)
    schemes = {name: DistributedWeightSyncScheme() for name in ("policy", "critic")}
    return CollectorGroup(factory, 0, weight_sync_schemes=schemes, batches_per_epoch=4, seed=7, **kwargs)


def constant(value):
    """A critic that says the same of everything."""
    critic = Critic()
    for net in critic.nets:
        torch.nn.init.zeros_(net[-1].weight)
        torch.nn.init.constant_(net[-1].bias, value)
    return critic


def batch_of(count, first=0):
    """``count`` rows, numbered in all columns."""
    group = make_group()
    group.start({"policy": Actor(), "critic": Critic()})
    rows = next(iter(group)).flatten()[0].expand(count).clone()
    group.shutdown()
    numbers = torch.arange(first, first + count, dtype=torch.float32)
    rows["observation"] = numbers[:, None].expand(-1, 3)
    rows["next", "reward"] = numbers[:, None]
    rows["priority"] = torch.ones(count)
    return rows


def test_the_workers_critic_is_the_one_that_was_pushed_with_the_policy():
    with make_group() as group:
        for version, value in enumerate((0.0, 5.0, -1.0)):
            group.update_policy_weights_(weights_dict={"policy": Actor(), "critic": constant(value)})
            batch = next(iter(group))
            reward = batch["next", "reward"].squeeze(-1)
            assert batch["policy_version"].eq(version).all()
            assert torch.equal(batch["priority"], (reward + GAMMA * torch.tensor(value) - value).abs())


def test_the_oldest_transitions_are_overwritten():
    replay = ReplayBuffer(capacity=8)
    for first in (0, 5, 10):
        replay.extend(batch_of(5, first))
    assert len(replay) == 8 and replay.added == 15
    assert replay.reward.tolist() == [8, 9, 10, 11, 12, 13, 14, 7]


def test_transitions_are_drawn_in_proportion_to_their_priority():
    replay = ReplayBuffer(capacity=8, exponent=1.0, correction=1.0)
    replay.extend(batch_of(4))
    replay.prioritize(torch.arange(4), torch.tensor([0.0, 1.0, 2.0, 5.0]))
    torch.manual_seed(0)
    drawn = replay.sample(20_000)
    shares = drawn["index"].bincount() / 20_000
    assert shares.tolist() == pytest.approx([0.0, 1 / 8, 2 / 8, 5 / 8], abs=0.02)
    assert torch.equal(drawn["reward"], drawn["index"].float())
    corrected = [(shares[i] * drawn["weight"][drawn["index"] == i][0]).item() for i in (1, 2, 3)]
    assert corrected == pytest.approx([corrected[0]] * 3, rel=0.1)


def test_a_resumed_run_has_what_was_in_the_buffer(tmp_path):
    def fit(max_epochs, **kwargs):
        group, module = make_group(), SAC(learning_starts=32, minibatch_size=8, capacity=100)
        update = UpdateWeights(group, 8, interval_unit="optim_steps", weight_update_map=MAP)
        checkpoints = ModelCheckpoint(tmp_path, filename="last", enable_version_counter=False)
        trainer = make_trainer(update, checkpoints, max_epochs=max_epochs, enable_checkpointing=True)
        trainer.fit(module, group, **kwargs)
        return module, update

    before, update = fit(1)
    assert before.replay.added == 64  # the first 32 of them without a step: then 16 steps for each batch of 16
    assert (update.num_pushes, update.version) == (6, 6)
    after, update = fit(2, ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert after.replay.added == 128 and len(after.replay) == 100
    assert (update.num_pushes, update.version) == (6 + 8, 6 + 8)
    for name in COLUMNS:  # the newest 64 begin at 64 and go round
        assert torch.equal(getattr(after.replay, name)[28:64], getattr(before.replay, name)[28:64]), name
    assert not torch.equal(after.replay.observation[:28], before.replay.observation[:28])
    assert not torch.equal(after.replay.observation[64:92], before.replay.observation[:28]), "episodes were replayed"


@pytest.mark.slow
def test_the_example_runs_is_checkpointed_and_goes_on(tmp_path):
    def run(*arguments):
        command = [sys.executable, "-m", "examples.pendulum_sac", "--checkpoints", str(tmp_path / "kept"), *arguments]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        last_line = done.stdout.splitlines()[-1]
        assert done.returncode in (0, 1) and "mean evaluation return=" in last_line, done.stderr
        return (
            dict(re.findall(r"(\w+)=(\S+)", last_line)),
            torch.load(tmp_path / "kept" / "last.ckpt", weights_only=True)["state_dict"],
        )

    figures, before = run("--max-epochs", "1")
    assert figures["frames"] == "1024" and before["replay.added"] == 1024
    resumed, after = run("--max-epochs", "2", "--resume", str(tmp_path / "kept" / "last.ckpt"))
    assert resumed["frames"] == "2048" and after["replay.added"] == 2048
    assert int(resumed["version"]) > int(figures["version"])
    for name in COLUMNS:
        assert torch.equal(after[f"replay.{name}"][:1024], before[f"replay.{name}"][:1024]), name
