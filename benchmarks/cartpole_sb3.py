"""What does ``benchmarks.cartpole`` compare with? stable-baselines3's PPO on CartPole, with rl-zoo's settings.

Run by the Python that has stable-baselines3: it imports nothing of this project.

    python benchmarks/cartpole_sb3.py SEED
"""

from __future__ import annotations

import sys

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

SOLVED = 475.0
BUDGET = 100_000


class Solved(BaseCallback):  # type: ignore[misc]
    """Ends the training when the mean return of the last 100 finished episodes is 475; looked at at each rollout."""

    episode_return = 0.0

    def _on_step(self) -> bool:
        return self.episode_return < SOLVED

    def _on_rollout_end(self) -> None:
        episodes = self.model.ep_info_buffer
        if episodes:
            self.episode_return = sum(float(episode["r"]) for episode in episodes) / len(episodes)


def main() -> int:
    torch.set_num_threads(1)  # tensors this small gain nothing from a second thread, and lose much where cores are busy
    model = PPO(
        "MlpPolicy",  # two layers of 64, tanh, for the policy and for the value
        make_vec_env("CartPole-v1", n_envs=8, seed=int(sys.argv[1])),
        # rl-zoo's settings for CartPole-v1; "lin_" values fall to 0 over the budget.
        n_steps=32,
        batch_size=256,
        n_epochs=20,
        gamma=0.98,
        gae_lambda=0.8,
        ent_coef=0.0,
        learning_rate=lambda left: 0.001 * left,
        clip_range=lambda left: 0.2 * left,
        seed=int(sys.argv[1]),
        device="cpu",
    )
    solved = Solved()
    for _ in range(3):  # a run that is late gets another budget, with schedules that go on
        model.learn(BUDGET, callback=solved, reset_num_timesteps=False)
        if solved.episode_return >= SOLVED:
            break
    reached = solved.episode_return >= SOLVED
    print(
        f"{'solved' if reached else 'unsolved'} frames={model.num_timesteps} return={solved.episode_return:.1f}",
        flush=True,
    )
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
