"""The example's PPO with what an evaluation needs."""

from examples.cartpole_ppo import PPO


class EvaluatedPPO(PPO):
    def validation_step(self, batch, batch_idx):
        self.log("val/episode_return", batch["episode_return"])
