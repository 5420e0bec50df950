"""PPO on CartPole: a Lightning Trainer, a worker process that is one batch ahead, one callback between them.

Run it from the root of the repository: ``python -m examples.cartpole_ppo``. Composed from YAML, with two collector
processes that make each batch together, it is ``lightning-weightsync configs/cartpole_ppo.yaml``.
"""

from __future__ import annotations

import argparse

from lightning_weightsync import start_workers_early


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    # On two cores one worker is soonest done: to start another one takes longer than it saves in a run of seconds.
    parser.add_argument("--num-workers", type=int, default=1, help="worker processes; 0 collects in this one")
    parser.add_argument(
        "--ahead",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="collect while learning: batches may be one version old",
    )
    parser.add_argument("--max-epochs", type=int, default=50, help="epochs of two batches")
    parser.add_argument("--checkpoints", metavar="FOLDER", help="write a checkpoint after each epoch, last.ckpt")
    parser.add_argument("--resume", metavar="FILE", help="go on from a checkpoint")
    return parser.parse_args()


if __name__ == "__main__":  # workers, too, need seconds for what is imported below: both at the same time
    start_workers_early(arguments().num_workers)

import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from tensordict import TensorDictBase
from torch import Tensor, nn

from lightning_weightsync import CollectorGroup, DistributedWeightSyncScheme, GymCollector, UpdateWeights

try:
    from examples.cartpole_nets import Actor, Critic
except ModuleNotFoundError:  # run as a script, whose folder is on the path instead
    from cartpole_nets import Actor, Critic

SOLVED = 475.0


class Rollout(NamedTuple):
    """What the loss needs of N transitions."""

    observation: Tensor  # [N, observation_size]
    action: Tensor  # [N]
    log_prob: Tensor  # [N], under the policy that acted
    advantage: Tensor  # [N]
    value_target: Tensor  # [N]


class PPO(LightningModule):
    """Proximal policy optimization (Schulman et al. 2017, arXiv:1707.06347) on batches from a ``CollectorGroup``.

    Each batch is worked through ``epochs`` times in minibatches, under manual optimization: one finished batch is many
    optimizer steps.

    Args:
        lr: Learning rate at the start.
        lr_floor: What the learning rate decays to, as a fraction of ``lr``. Not 0: a run that is late must still learn.
        lr_decay_batches: How many batches the linear decay takes.
        gamma: Discount.
        gae_lambda: Weight of long returns in the advantage estimate.
        clip: How far a probability ratio is followed from 1.
        epochs: Passes over each batch.
        minibatch_size: Transitions per optimizer step.
        max_grad_norm: Gradients are scaled down to this norm.
    """

    def __init__(
        self,
        lr: float = 6e-3,
        lr_floor: float = 0.1,
        lr_decay_batches: int = 50,
        gamma: float = 0.99,
        gae_lambda: float = 0.9,
        clip: float = 0.2,
        epochs: int = 6,
        minibatch_size: int = 512,
        max_grad_norm: float = 0.5,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)  # a logger would import OmegaConf for them, which takes a second
        self.automatic_optimization = False
        self.actor = Actor()
        self.critic = Critic()

    def on_fit_start(self) -> None:
        # Tensors this small gain nothing from a second thread, and where workers or others keep the cores busy, threads
        # that wait for each other made the run ten times slower.
        torch.set_num_threads(1)

    def training_step(self, batch: TensorDictBase, batch_idx: int) -> None:
        hp = self.hparams
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        parameters = list(self.parameters())
        rollout = make_rollout(batch, self.critic, hp.gamma, hp.gae_lambda)
        losses = []
        for minibatch in minibatches(rollout, hp.minibatch_size, hp.epochs):
            loss = ppo_loss(self.actor, self.critic, minibatch, hp.clip)
            optimizer.zero_grad()
            self.manual_backward(loss)
            nn.utils.clip_grad_norm_(parameters, hp.max_grad_norm)
            optimizer.step()
            losses.append(loss.detach())
        self.log_dict({"train/loss": torch.stack(losses).mean(), "train/lr": scheduler.get_last_lr()[0]})
        scheduler.step()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        hp = self.hparams
        optimizer = torch.optim.Adam(self.parameters(), lr=hp.lr, eps=1e-5, fused=True)
        decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, hp.lr_floor, total_iters=hp.lr_decay_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay}}


@torch.no_grad()
def make_rollout(batch: TensorDictBase, critic: nn.Module, gamma: float, gae_lambda: float) -> Rollout:
    """Estimate advantages and value targets of a batch ``[E, T]``, and flatten it to ``N = E * T`` transitions."""
    following = batch["next"]
    value, next_value = critic(torch.stack([batch["observation"], following["observation"]]))
    reward, terminated, done = (following[key].squeeze(-1) for key in ("reward", "terminated", "done"))
    advantage = gae(reward, value, next_value, terminated, done, gamma, gae_lambda)
    columns = (batch["observation"], batch["action"], batch["sample_log_prob"], advantage, advantage + value)
    return Rollout(*(column.flatten(0, 1) for column in columns))


def gae(
    reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """Generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438), along the last dimension.

    The value of the next observation counts unless the episode *terminated*: one that was truncated would have gone
    on. The estimate itself never reaches beyond the end of an episode (*done*).
    """
    delta = reward + gamma * next_value * ~terminated - value
    decay = gamma * gae_lambda * ~done
    advantage = torch.zeros_like(delta)
    ahead = torch.zeros_like(delta[..., 0])
    for t in reversed(range(delta.shape[-1])):
        ahead = torch.addcmul(delta[..., t], decay[..., t], ahead)
        advantage[..., t] = ahead
    return advantage


def minibatches(rollout: Rollout, size: int, epochs: int) -> Iterator[Rollout]:
    """Shuffle and split, anew for each epoch."""
    for _ in range(epochs):
        order = torch.randperm(len(rollout.action), device=rollout.action.device)
        for columns in zip(*(column[order].split(size) for column in rollout), strict=True):
            yield Rollout(*columns)


def ppo_loss(actor: Actor, critic: Critic, data: Rollout, clip: float) -> Tensor:
    """Clipped surrogate objective plus half the squared error of the values."""
    log_prob = actor.log_probs(data.observation).gather(-1, data.action.unsqueeze(-1)).squeeze(-1)
    ratio = (log_prob - data.log_prob).exp()
    advantage = (data.advantage - data.advantage.mean()) / (data.advantage.std() + 1e-8)
    surrogate = torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    value_error = (critic(data.observation) - data.value_target).square()
    return 0.5 * value_error.mean() - surrogate.mean()


def main() -> int:
    """Train until the mean return of the last 100 episodes is 475; returns the exit code."""
    args = arguments()
    started = time.monotonic()
    seed_everything(args.seed, verbose=False)
    share = 1 if args.ahead else max(1, args.num_workers)  # of a batch: all workers make one together, or each its own
    num_envs = 16 // share
    group = CollectorGroup(
        partial(GymCollector, "CartPole-v1", Actor, num_envs=num_envs, frames_per_batch=128 * num_envs),
        num_workers=args.num_workers,
        weight_sync_schemes={"policy": DistributedWeightSyncScheme()},
        sync=not args.ahead,
        max_staleness=1 if args.ahead else None,
        batches_per_epoch=2,
        seed=args.seed,
    )
    update_weights = UpdateWeights(group, weight_update_map={"policy": "actor"})
    callbacks: list[Callback] = [
        update_weights,
        EarlyStopping(
            monitor="collect/episode_return",
            mode="max",
            stopping_threshold=SOLVED,
            patience=sys.maxsize,
            check_on_train_epoch_end=True,
        ),
    ]
    if args.checkpoints:
        callbacks.append(ModelCheckpoint(args.checkpoints, save_last=True))
    trainer = Trainer(
        accelerator="cpu",  # networks of this size are faster there
        max_epochs=args.max_epochs,
        callbacks=callbacks,
        logger=CSVLogger("outputs", name="cartpole_ppo"),
        log_every_n_steps=1,
        enable_checkpointing=bool(args.checkpoints),
        enable_model_summary=False,
    )
    trainer.fit(PPO(), group, ckpt_path=args.resume)

    episode_return = float(trainer.callback_metrics["collect/episode_return"])
    solved = episode_return >= SOLVED
    print(
        f"{'solved' if solved else 'unsolved'} frames={group.frames} seconds={time.monotonic() - started:.1f} "
        f"return={episode_return:.1f} version={update_weights.version}"
    )
    return 0 if solved else 1


if __name__ == "__main__":
    sys.exit(main())
