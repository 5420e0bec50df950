"""Whole episodes by one collector, and the worker's side of an evaluation. One process."""

import pytest
import torch
from tensordict.nn import InteractionType, TensorDictModule, set_interaction_type
from tensordict.nn.probabilistic import interaction_type

from lightning_weightsync import GymCollector
from lightning_weightsync.collectors.episodes import EpisodeCollector, EpisodeFactory
from tests.helpers.collectors import Stream
from tests.helpers.evaluation import NUM_ENVS, Dial, LengthBySeed, Stubborn, dial_collector


def length_of(seed):
    env = LengthBySeed()
    env.reset(seed=seed)
    return env.length


def playing(policy=Dial, env=LengthBySeed, num_envs=NUM_ENVS):
    return GymCollector(env, policy, num_envs=num_envs, frames_per_batch=4 * num_envs, worker_idx=0, seed=3)


def factory(episodes=7, num_workers=1, *, collector=dial_collector, deterministic=True, seed=5):
    return EpisodeFactory(collector, episodes, num_workers, 2, seed, deterministic)


def deterministic():
    return set_interaction_type(InteractionType.DETERMINISTIC)


@pytest.mark.parametrize("num_envs", [1, 2, 5, 30])
@pytest.mark.parametrize("seeds", [[11], list(range(12))])
def test_one_whole_episode_per_seed_whatever_the_number_of_environments(num_envs, seeds):
    collector = playing(num_envs=num_envs)
    with torch.no_grad():
        collector.policy.value.fill_(3.0)
    with deterministic():
        played = collector.play_episodes(seeds)
        assert played == [(3.25 * length_of(seed), length_of(seed)) for seed in seeds]
        assert collector.play_episodes(seeds) == played, "the second time other episodes were played"
    assert len({length for _, length in played}) > 1 or len(seeds) == 1


def test_no_more_is_played_than_asked_for():
    resets, ends = [], []

    class Counted(LengthBySeed):
        def reset(self, *, seed=None, options=None):
            resets.append(seed)
            return super().reset(seed=seed, options=options)

        def step(self, action):
            result = super().step(action)
            ends.append(result[2] or result[3])
            return result

    collector = playing(env=Counted)
    resets.clear()
    with deterministic():
        collector.play_episodes([4, 5, 6, 7, 8])
    assert sorted(resets) == [4, 5, 6, 7, 8] and sum(ends) == 5
    assert len(ends) == sum(map(length_of, range(4, 9)))


def test_the_policy_is_always_called_for_all_environments():
    seen = []

    class Watching(Dial):
        def forward(self, td):
            seen.append((td.batch_size, td["observation"].clone()))
            return super().forward(td)

    collector = playing(Watching, num_envs=4)
    with deterministic():
        collector.play_episodes([1, 2])
    assert {size for size, _ in seen} == {torch.Size([4])}
    lengths = [length_of(1), length_of(2)]
    assert seen[0][1].tolist() == [[lengths[0], 0], [lengths[1], 0], [lengths[0], 0], [lengths[0], 0]]
    assert len(seen) == max(lengths)


def test_batches_after_episodes_begin_new_ones():
    collector = playing()
    first = next(iter(collector)).clone()
    with deterministic():
        collector.play_episodes([1, 2, 3])
    collector.take_episodes()
    batch = next(iter(collector))
    assert batch["observation"][:, 0, 1].tolist() == [0, 0], "it goes on in an episode that was played"
    assert first["observation"].shape == batch["observation"].shape
    ended = int(batch["next", "done"].sum())
    assert len(collector.take_episodes()) == ended, "an episode that was played is counted for the batches"
    collector.close()
    with pytest.raises(RuntimeError, match="closed"):
        collector.play_episodes([1])


def test_a_policy_that_draws_although_it_is_asked_for_its_best_action_is_refused():
    with deterministic(), pytest.raises(ValueError, match=r"Stubborn.*draws random numbers all.*deterministic=False"):
        playing(Stubborn).play_episodes([1])
    assert len(playing(Stubborn).play_episodes([1])) == 1


def test_a_policy_without_an_action_is_told():
    class Silent(Dial):
        def forward(self, td):
            return td

    with pytest.raises(ValueError, match="Silent has to return a TensorDict with 'action'; it returned"):
        playing(Silent).play_episodes([1])


def test_modules_of_tensordict_take_their_best_action():
    from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential

    def make():
        net = TensorDictModule(torch.nn.Linear(2, 1000), ["observation"], ["logits"])
        torch.nn.init.zeros_(net.module.weight), torch.nn.init.zeros_(net.module.bias)
        net.module.bias.data[7] = 1e-3  # nearly uniform: a sample is hardly ever this one
        head = ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=torch.distributions.Categorical,
            default_interaction_type=InteractionType.RANDOM,
        )  # fmt: skip
        return ProbabilisticTensorDictSequential(net, head)

    collector = playing(make)
    with deterministic():
        assert collector.play_episodes([1, 2]) == [(7.25 * length_of(s), length_of(s)) for s in (1, 2)]


# --- the worker's side of an evaluation ------------------------------------------------------------------------------


def batch_of(collector):
    return next(iter(collector))


def test_workers_share_the_episodes_and_each_episode_is_the_same_whoever_plays_it():
    whole = batch_of(factory(7, 1)(worker_idx=0, seed=1))
    assert whole["episode"].tolist() == list(range(7)) and whole.batch_size == (7,)
    parts = [batch_of(factory(7, 3)(worker_idx=w, seed=9 * w)) for w in range(3)]
    assert [part["episode"].tolist() for part in parts] == [[0, 3, 6], [1, 4], [2, 5]]
    for part in parts:
        for name in ("episode_return", "episode_length"):
            assert torch.equal(part[name], whole[name][part["episode"]])
    assert whole["episode_return"].dtype == whole["episode_length"].dtype == torch.float32
    other = batch_of(factory(7, 1, seed=6)(worker_idx=0, seed=1))
    assert not torch.equal(other["episode_length"], whole["episode_length"])


def test_one_version_is_in_force_from_the_first_action_to_the_last():
    collector = factory(5)(worker_idx=0, seed=1)
    held = []
    collector.policy.register_forward_pre_hook(lambda *_: held.append(collector.gate.inside))
    batch = batch_of(collector)
    assert held and all(held) and not collector.gate.inside
    assert batch["policy_version"].tolist() == [collector.gate.version] * 5


def test_samples_are_those_of_the_seed_and_the_mode_is_left_as_it_was():
    sampled = factory(6, deterministic=False)(worker_idx=0, seed=1)
    with torch.random.fork_rng(devices=[]):
        returns = [batch_of(sampled)["episode_return"] for _ in range(2)]
        torch.rand(3)
        returns.append(batch_of(factory(6, deterministic=False)(worker_idx=0, seed=77))["episode_return"])
    assert all(torch.equal(value, returns[0]) for value in returns)
    best = factory(6)(worker_idx=0, seed=1)
    batch = batch_of(best)
    assert torch.equal(batch["episode_return"], -0.75 * batch["episode_length"])  # the dial stands at -1
    assert not torch.equal(batch["episode_return"], returns[0])
    assert interaction_type() is None


def test_the_collector_is_told_an_index_that_no_other_worker_has():
    told = []

    def make(*, worker_idx, seed):
        told.append(worker_idx)
        return dial_collector(worker_idx=worker_idx, seed=seed)

    for w in range(2):
        factory(4, 2, collector=make)(worker_idx=w, seed=0)
    assert told == [2, 3]


def test_destinations_are_the_collectors():
    collector = factory(2)(worker_idx=0, seed=1)
    assert isinstance(collector.policy, Dial) and collector.num_envs == NUM_ENVS
    with pytest.raises(AttributeError, match="GymCollector.*'polizy'"):
        _ = collector.polizy
    collector.close()


def test_a_collector_that_cannot_play_is_refused():
    with pytest.raises(TypeError, match=r"Stream cannot be evaluated: it has no play_episodes\(seeds\)"):
        factory(2, collector=Stream)(worker_idx=0, seed=1)


def test_a_collector_that_plays_too_few_is_told():
    class Lazy:
        def play_episodes(self, seeds):
            return [(1.0, 1)]

    with pytest.raises(RuntimeError, match=r"Lazy\.play_episodes was given 2 seeds and returned 1 episodes"):
        batch_of(EpisodeCollector(Lazy(), {0: 1, 1: 2}, False))
