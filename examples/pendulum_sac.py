"""SAC on Pendulum: off-policy, with collectors that run ahead, and two models in one push.

Run it from the root of the repository: ``python -m examples.pendulum_sac``. The same run composed from YAML is
``lightning-weightsync configs/pendulum_sac.yaml``.

Workers collect ahead (``sync=False``), and get policy and critic every few optimizer steps, in the middle of a batch.
With the critic they say how surprising each transition is: where it starts from in the prioritized replay buffer.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from functools import partial

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from lightning_weightsync import CollectorGroup, DistributedWeightSyncScheme, UpdateWeights

try:
    from examples.pendulum_nets import GAMMA, Actor, Critic, PrioritizingCollector
except ModuleNotFoundError:  # run as a script, whose folder is on the path instead
    from pendulum_nets import GAMMA, Actor, Critic, PrioritizingCollector

SOLVED = -200.0
ENOUGH = -180.0
"""Mean return that ends the training: a margin, since half of the starts that count in the end are other ones."""


class ReplayBuffer(nn.Module):
    """The newest ``capacity`` transitions, drawn in proportion to a power of their priority.

    Schaul et al. 2016, arXiv:1511.05952. It is a module, and its columns are buffers: Lightning saves and restores them
    with the weights, in every checkpoint.

    Args:
        capacity: Transitions; the oldest ones are overwritten.
        exponent: 0 draws uniformly, 1 in proportion to the priority.
        correction: How far the weights of :meth:`sample` undo that, from 0 (not at all) to 1.
    """

    def __init__(self, capacity: int, exponent: float = 0.6, correction: float = 0.4) -> None:
        super().__init__()
        self.capacity, self.exponent, self.correction = capacity, exponent, correction
        self.register_buffer("observation", torch.zeros(capacity, 3))
        self.register_buffer("action", torch.zeros(capacity, 1))
        self.register_buffer("next_observation", torch.zeros(capacity, 3))
        self.register_buffer("reward", torch.zeros(capacity))
        self.register_buffer("terminated", torch.zeros(capacity, dtype=torch.bool))
        self.register_buffer("priority", torch.zeros(capacity))
        self.register_buffer("added", torch.zeros((), dtype=torch.int64))

    def __len__(self) -> int:
        return min(int(self.added), self.capacity)

    def extend(self, batch: TensorDictBase) -> None:
        """Add a batch ``[E, T]`` from the collectors."""
        rows = batch.flatten()
        index = (self.added + torch.arange(len(rows), device=self.added.device)) % self.capacity
        self.observation[index] = rows["observation"]
        self.action[index] = rows["action"]
        self.next_observation[index] = rows["next", "observation"]
        self.reward[index] = rows["next", "reward"].squeeze(-1)
        self.terminated[index] = rows["next", "terminated"].squeeze(-1)
        self.prioritize(index, rows["priority"])
        self.added += len(rows)

    def sample(self, size: int) -> TensorDict:
        """Draw ``size`` transitions, with ``index`` (where they are) and ``weight`` (at most 1)."""
        index = torch.multinomial(self.priority[: len(self)], size, replacement=True)
        weight = self.priority[index] ** -self.correction
        columns = ("observation", "action", "next_observation", "reward", "terminated")
        drawn = {name: getattr(self, name)[index] for name in columns}
        return TensorDict({**drawn, "index": index, "weight": weight / weight.max()}, [size])

    def prioritize(self, index: Tensor, error: Tensor) -> None:
        """Set priorities from temporal-difference errors."""
        self.priority[index] = (error.abs() + 1e-3) ** self.exponent


class SAC(LightningModule):
    """Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905) on batches from a ``CollectorGroup``.

    Args:
        lr: Learning rate, of actor, critic and temperature.
        tau: How far the target critic follows in each step.
        minibatch_size: Transitions per optimizer step.
        steps_per_frame: Optimizer steps for each transition that comes in.
        learning_starts: Transitions that are collected before the first step.
        target_entropy: Of the policy; the temperature is tuned to reach it.
        capacity: Transitions in the replay buffer.
    """

    def __init__(
        self,
        lr: float = 2e-3,
        tau: float = 0.01,
        minibatch_size: int = 128,
        steps_per_frame: float = 1.0,
        learning_starts: int = 512,
        target_entropy: float = -1.0,
        capacity: int = 20_000,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.automatic_optimization = False
        self.actor = Actor()
        self.critic = Critic()
        self.target_critic = copy.deepcopy(self.critic).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.zeros(()))
        self.replay = ReplayBuffer(capacity)

    def on_fit_start(self) -> None:
        torch.set_num_threads(1)  # tensors this small gain nothing from a second thread

    def training_step(self, batch: TensorDictBase, batch_idx: int) -> None:
        hp = self.hparams
        self.replay.extend(batch)
        if len(self.replay) < hp.learning_starts:
            return
        optimizer = self.optimizers()
        for _ in range(max(1, round(batch.numel() * hp.steps_per_frame))):
            data = self.replay.sample(hp.minibatch_size)
            loss, error = self.loss(data)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.replay.prioritize(data["index"], error)
            with torch.no_grad():
                torch._foreach_lerp_(list(self.target_critic.parameters()), list(self.critic.parameters()), hp.tau)
        self.log_dict({"train/loss": loss.detach(), "train/alpha": self.log_alpha.detach().exp()})

    def loss(self, data: TensorDict) -> tuple[Tensor, Tensor]:
        """The sum of the three losses, and each transition's temporal-difference error."""
        observation, following = data["observation"], data["next_observation"]
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            next_action, next_log_prob = self.actor.sample(following)
            next_value = self.target_critic(following, next_action).amin(0) - alpha * next_log_prob
            target = data["reward"] + GAMMA * ~data["terminated"] * next_value
        error = self.critic(observation, data["action"]) - target
        critic_loss = (data["weight"] * error.square()).mean(-1).sum()

        action, log_prob = self.actor.sample(observation)
        self.critic.requires_grad_(False)  # the actor's loss must not teach the critic
        actor_loss = (alpha * log_prob - self.critic(observation, action).amin(0)).mean()
        self.critic.requires_grad_(True)
        alpha_loss = -self.log_alpha * (log_prob.detach().mean() + self.hparams.target_entropy)
        return critic_loss + actor_loss + alpha_loss, error.detach().abs().amax(0)

    def validation_step(self, batch: TensorDictBase, batch_idx: int) -> None:
        self.log("val/episode_return", batch["episode_return"], prog_bar=True, batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [*self.actor.parameters(), *self.critic.parameters(), self.log_alpha]
        return torch.optim.Adam(trained, lr=self.hparams.lr, fused=True)


def main() -> int:
    """Train until the policy is good enough, then evaluate it: above -200 is solved. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-workers", type=int, default=2, help="worker processes; 0 collects in this one")
    parser.add_argument("--max-epochs", type=int, default=30, help="epochs of 1,024 frames")
    parser.add_argument("--checkpoints", metavar="FOLDER", help="write a checkpoint after each epoch, last.ckpt")
    parser.add_argument("--resume", metavar="FILE", help="go on from a checkpoint, with what was in its replay buffer")
    args = parser.parse_args()

    started = time.monotonic()
    seed_everything(args.seed, verbose=False)
    group = CollectorGroup(
        partial(PrioritizingCollector, "Pendulum-v1", Actor, critic=Critic, num_envs=4, frames_per_batch=64),
        num_workers=args.num_workers,
        weight_sync_schemes={"policy": DistributedWeightSyncScheme(), "critic": DistributedWeightSyncScheme()},
        sync=False,
        batches_per_epoch=16,
        seed=args.seed,
    )
    update_weights = UpdateWeights(
        group,
        update_weights_interval=16,
        interval_unit="optim_steps",
        weight_update_map={"policy": "actor", "critic": "critic"},
    )
    callbacks: list[Callback] = [
        update_weights,
        EarlyStopping(monitor="val/episode_return", mode="max", stopping_threshold=ENOUGH, patience=sys.maxsize),
    ]
    if args.checkpoints:
        callbacks.append(ModelCheckpoint(args.checkpoints, save_last=True))
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=args.max_epochs,
        callbacks=callbacks,
        logger=CSVLogger("outputs", name="pendulum_sac"),
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_checkpointing=bool(args.checkpoints),
        enable_model_summary=False,
    )
    module = SAC()
    trainer.fit(module, group, val_dataloaders=group.evaluation(episodes=100), ckpt_path=args.resume)

    (figures,) = trainer.validate(module, group.evaluation(episodes=200), verbose=False)
    episode_return = figures["val/episode_return"]
    solved = episode_return > SOLVED
    print(
        f"{'solved' if solved else 'unsolved'} frames={group.frames} seconds={time.monotonic() - started:.1f} "
        f"version={update_weights.version} mean evaluation return={episode_return:.1f}"
    )
    return 0 if solved else 1


if __name__ == "__main__":
    sys.exit(main())
