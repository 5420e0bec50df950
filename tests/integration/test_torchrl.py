"""Our scheme inside TorchRL's collectors, and TorchRL's collectors behind our callback.

Workers are spawned: they import this module, so nothing heavy is imported at its top.
"""

import contextlib
import gc
import hashlib
import os
import pickle
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

pytest.importorskip("torchrl", minversion="0.14", reason="torchrl is not installed: pip install .[torchrl]")
pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="Unix sockets and signals"),
    pytest.mark.filterwarnings("ignore"),
]
warnings.filterwarnings("ignore")  # in the workers

from tensordict.nn import TensorDictModuleBase  # noqa: E402
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector  # noqa: E402
from torchrl.data import Composite, Unbounded  # noqa: E402
from torchrl.envs import EnvBase  # noqa: E402
from torchrl.weight_update import WeightSyncScheme as TheirScheme  # noqa: E402

from lightning_weightsync.errors import (  # noqa: E402
    LayoutMismatchError,
    WorkerDied,
    WorkerError,
)
from lightning_weightsync.integrations.torchrl import TorchRLWeightSyncScheme  # noqa: E402
from lightning_weightsync.integrations.torchrl_policy import materialize  # noqa: E402

WORKERS, STEPS, LAYERS = 2, 4, 6
TABLE = 42.0
"""In a buffer that is not persistent: nobody's state_dict has it, and every worker needs it."""


class Env(EnvBase):
    """Observes zeros, for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((2,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        return TensorDict({"observation": torch.zeros(2)}, [])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        ended = torch.zeros(1, dtype=torch.bool)
        return TensorDict(
            {"observation": torch.zeros(2), "reward": torch.zeros(1), "done": ended, "terminated": ended.clone()}, []
        )

    def _set_seed(self, seed: int | None) -> None:
        pass


class BrokenEnv(Env):
    def __init__(self) -> None:
        raise ArithmeticError("the dice rolled off the table")


class Net(nn.Module):
    """Every layer holds the same constant; an action is [lowest, highest] of what one call has seen of them."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(LAYERS))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.tensor(TABLE), persistent=False)
        self.extra = 0.0
        set_all(self, value)

    def get_extra_state(self) -> float:
        return self.extra

    def set_extra_state(self, state: float) -> None:
        self.extra = state

    def forward(self) -> tuple[float, float]:
        seen = []
        for layer in self.layers:
            seen += [float(layer.weight.detach()[0, 0]), float(layer.bias.detach()[-1])]
            time.sleep(0)  # lets the thread that switches weights run
        seen += [float(self.count), self.extra]
        return min(seen), max(seen)


def set_all(net: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(value)
        net.count.fill_(int(value))
    net.extra = float(value)


def bias(net: nn.Module) -> float:
    return float(net.layers[0].bias.detach()[0])


class Policy(TensorDictModuleBase):
    """Writes what it has seen into the batch."""

    in_keys = ["observation"]  # noqa: RUF012
    out_keys = ["action", "low", "high", "bias", "table", "pid"]  # noqa: RUF012

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.net = Net(value)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        low, high = self.net()
        shape = [*tensordict.batch_size, 1]
        told = {"action": low, "low": low, "high": high, "bias": bias(self.net), "table": float(self.net.table)}
        for key, value in told.items():
            tensordict.set(key, torch.full(shape, value))
        tensordict.set("pid", torch.full(shape, os.getpid()))
        return tensordict

    def digest(self) -> str:
        """Of every bit that travels."""
        state = self.net.state_dict()
        extra = state.pop("_extra_state")
        return hashlib.sha256(
            b"".join(tensor.numpy().tobytes() for tensor in state.values()) + repr(extra).encode()
        ).hexdigest()


def make_policy() -> Policy:
    return Policy(-1.0)


class Linear(TensorDictModuleBase):
    """One that torch.compile can take, and that counts how often it did."""

    in_keys = ["observation"]  # noqa: RUF012
    out_keys = ["action"]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("action", self.net(tensordict.get("observation")))

    def compilations(self) -> int:
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@contextlib.contextmanager
def collecting(kind: type, policy: nn.Module | None, **kwargs: Any) -> Iterator[tuple[Any, TorchRLWeightSyncScheme]]:
    scheme = kwargs.pop("scheme", None) or TorchRLWeightSyncScheme(timeout=30.0)
    env = kwargs.pop("env", Env)
    collector = kind(
        [env] * WORKERS,
        policy,
        frames_per_batch=STEPS * (WORKERS if kind is MultiSyncCollector else 1),
        total_frames=-1,
        weight_sync_schemes={"policy": scheme},
        **kwargs,
    )
    try:
        yield collector, scheme
    finally:
        collector.shutdown()


def threads_of_ours() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if "weight-sync" in thread.name)


def sockets() -> int:
    """Open sockets and slots of this process."""
    gc.collect()
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += os.readlink(descriptor).startswith(("socket:", "/memfd:lightning_weightsync"))
    return found


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def digests(collector: Any) -> list[str]:
    return collector.map_fn("policy.digest")


# Each way of handing weights over, of a policy that is not the collector's.
FORMS: dict[str, Callable[[Any, Policy], None]] = {
    "module": lambda collector, policy: collector.update_policy_weights_(policy),
    "policy=": lambda collector, policy: collector.update_policy_weights_(policy=policy),
    "tensordict": lambda collector, policy: collector.update_policy_weights_(TensorDict.from_module(policy)),
    "tensordict.data": lambda collector, policy: collector.update_policy_weights_(TensorDict.from_module(policy).data),
    "params": lambda collector, policy: collector.update_policy_weights_(
        TensorDict.from_module(policy, as_module=True)
    ),
    "weights=": lambda collector, policy: collector.update_policy_weights_(weights=TensorDict.from_module(policy)),
    "weights_dict=": lambda collector, policy: collector.update_policy_weights_(weights_dict={"policy": policy}),
    "each worker its own": lambda collector, policy: collector.update_policy_weights_(
        {index: TensorDict.from_module(policy) for index in range(WORKERS)}
    ),
}


Side: TypeAlias = tuple[Any, Policy, TorchRLWeightSyncScheme, Iterator[TensorDictBase]]


@pytest.fixture(scope="module")
def sync_side() -> Iterator[Side]:
    """A MultiSyncCollector of two workers, its policy, its scheme and its batches."""
    policy = Policy(7.0)
    with collecting(MultiSyncCollector, policy, track_policy_version=True) as (collector, scheme):
        yield collector, policy, scheme, iter(collector)


@pytest.fixture
def side(sync_side: Side) -> Side:
    """The same, set back to 7 everywhere."""
    collector, policy, scheme, _ = sync_side
    set_all(policy.net, 7.0)
    if scheme.version:
        collector.update_policy_weights_()
    return sync_side


def values(batch: TensorDictBase) -> set[float]:
    assert torch.equal(batch["low"], batch["high"]), "a call has mixed two versions"
    assert set(batch["table"].flatten().tolist()) == {TABLE}
    return set(batch["low"].flatten().tolist())


def test_workers_start_with_the_trainers_weights(side: Side) -> None:
    collector, policy, scheme, batches = side
    assert isinstance(scheme, TheirScheme)
    assert scheme.synchronized_on_sender and not scheme.initialized_on_receiver
    assert values(next(batches)) == {7.0}
    assert digests(collector) == [policy.digest()] * WORKERS


def test_twenty_updates_reach_every_worker_bit_for_bit(side: Side) -> None:
    collector, policy, scheme, batches = side
    before = scheme.version
    for value in range(1, 21):
        set_all(policy.net, value)
        collector.update_policy_weights_()
        assert values(next(batches)) == {float(value)}
    torch.manual_seed(0)
    for parameter in policy.parameters():
        nn.init.normal_(parameter)
    collector.update_policy_weights_()
    assert digests(collector) == [policy.digest()] * WORKERS
    assert scheme.version == before + 21


@pytest.mark.parametrize("update", FORMS.values(), ids=FORMS)
def test_weights_may_be_handed_over_in_each_form(side: Side, update: Callable[[Any, Policy], None]) -> None:
    collector, policy, _, batches = side
    other = Policy(3.0)
    other.net.extra = 7.0 if update not in (FORMS["module"], FORMS["policy="], FORMS["weights_dict="]) else 3.0
    update(collector, other)
    batch = next(batches)
    # A TensorDict has no extra state: that stays what it was.
    assert set(batch["low"].flatten().tolist()) == {3.0}
    assert set(batch["high"].flatten().tolist()) == {other.net.extra}
    assert set(batch["table"].flatten().tolist()) == {TABLE}
    assert digests(collector) == [other.digest()] * WORKERS
    assert float(policy.net.layers[0].weight[0, 0]) == 7.0, "the collector's own policy is not touched"


@pytest.mark.parametrize("worker_ids", [1, [1]], ids=["int", "list"])
def test_an_update_of_one_worker_leaves_the_other_alone(side: Side, worker_ids: int | list[int]) -> None:
    collector, _, _, batches = side
    collector.update_policy_weights_(Policy(9.0), worker_ids=worker_ids)
    assert digests(collector) == [Policy(7.0).digest(), Policy(9.0).digest()]
    batch = next(batches)
    assert values(batch) == {7.0, 9.0}
    assert len(set(batch["pid"].flatten().tolist())) == 2


def test_each_worker_may_have_its_own_weights(side: Side) -> None:
    collector, _, _, batches = side
    collector.update_policy_weights_({0: Policy(1.0), 1: Policy(2.0)})
    assert digests(collector) == [Policy(1.0).digest(), Policy(2.0).digest()]
    assert values(next(batches)) == {1.0, 2.0}
    collector.update_policy_weights_({1: Policy(5.0)})
    assert digests(collector) == [Policy(1.0).digest(), Policy(5.0).digest()]


def test_weights_of_another_model_are_refused_and_nothing_changes(side: Side) -> None:
    collector, policy, scheme, batches = side
    version = scheme.version
    with pytest.raises(LayoutMismatchError, match="weight"):
        collector.update_policy_weights_(Linear())
    with pytest.raises(ValueError, match="numbered 0 .. 1"):
        collector.update_policy_weights_(worker_ids=2)
    with pytest.raises(KeyError, match="value_net"):
        collector.update_policy_weights_(policy, model_id="value_net")
    assert scheme.version == version
    assert values(next(batches)) == {7.0}


def test_policy_version_counts_updates(side: Side) -> None:
    collector, _, _, batches = side
    # Each worker counts the updates that it was sent, and stamps a step after it has called the policy: a batch begins
    # with what was stamped before it.
    before = next(batches)["policy_version"][:, -1].flatten()
    for _ in range(3):
        collector.update_policy_weights_()
    after = next(batches)["policy_version"][:, -1].flatten()
    assert after.tolist() == (before + 3).tolist()


def test_an_async_collector_never_mixes_versions_and_ends_with_the_last() -> None:
    policy = Policy(0.0)
    with collecting(MultiAsyncCollector, policy) as (collector, _):
        batches = iter(collector)
        newest: dict[float, float] = {}
        for version in range(1, 21):
            set_all(policy.net, version)
            collector.update_policy_weights_()
            batch = next(batches)
            seen = sorted(values(batch))
            pid = float(batch["pid"].flatten()[0])
            assert newest.get(pid, 0.0) <= seen[0] <= seen[-1] <= version
            newest[pid] = seen[-1]
        for version in range(21, 300):  # back to back, while they collect
            set_all(policy.net, version)
            collector.update_policy_weights_()
            if version % 30 == 0:
                values(next(batches))
        # At most one finished batch of each worker may wait for us.
        assert wait_until(lambda: values(next(batches)) == {float(version)}, 20.0)
        assert digests(collector) == [policy.digest()] * WORKERS


@pytest.mark.slow
def test_a_shut_down_collector_leaves_nothing_and_its_scheme_may_serve_the_next() -> None:
    before = threads_of_ours(), sockets()
    scheme = TorchRLWeightSyncScheme()
    for value in (1.0, 2.0):
        policy = Policy(value)
        with collecting(MultiSyncCollector, policy, scheme=scheme) as (collector, _):
            batches = iter(collector)
            assert values(next(batches)) == {value}
            scheme.send_async(Policy(5.0)).wait()
            assert values(next(batches)) == {5.0}
            processes = collector.procs
        assert not any(process.is_alive() for process in processes)
        assert wait_until(lambda: not scheme.initialized_on_sender), "the scheme has not noticed"
        assert wait_until(lambda: len(threads_of_ours()) <= len(before[0])), threads_of_ours()
        assert wait_until(lambda: sockets() <= before[1]), (sockets(), before)
    scheme.shutdown()


@pytest.mark.slow
def test_a_scheme_that_is_shut_down_first_takes_under_a_second() -> None:
    with collecting(MultiSyncCollector, Policy()) as (collector, scheme):
        started = time.monotonic()
        scheme.shutdown()
        scheme.shutdown()
        assert time.monotonic() - started < 1.0
        assert values(next(iter(collector))) == {0.0}, "workers go on with what they have"


def test_a_killed_worker_is_named_and_the_other_one_served() -> None:
    policy = Policy(1.0)
    with collecting(MultiSyncCollector, policy) as (collector, _):
        os.kill(collector.procs[0].pid, signal.SIGKILL)
        collector.procs[0].join(10)
        for value in (2.0, 3.0):
            set_all(policy.net, value)
            with pytest.raises(WorkerDied, match="exit code -9|broken|gone") as caught:
                collector.update_policy_weights_()
            assert set(caught.value.failed) == {0}
        collector.update_policy_weights_(worker_ids=[1])
        collector.pipes[1].send((("policy.digest", (), {}), "cascade_execute"))
        assert collector.pipes[1].recv()[0] == policy.digest()


def test_a_worker_that_fails_while_it_starts_is_told_at_once_with_its_traceback() -> None:
    started, before = time.monotonic(), threads_of_ours()
    with (
        pytest.raises(WorkerError, match="the dice rolled off the table") as caught,
        collecting(MultiSyncCollector, Policy(), env=BrokenEnv),
    ):
        pass
    assert time.monotonic() - started < 45.0, "less than connect_timeout"
    assert "ArithmeticError" in caught.value.remote_traceback
    # Those of a test before may still have been ending.
    assert wait_until(lambda: len(threads_of_ours()) <= len(before)), threads_of_ours()


@pytest.mark.slow
def test_a_policy_factory_makes_the_workers_policies_and_policy_has_the_weights() -> None:
    with collecting(MultiSyncCollector, Policy(4.0), policy_factory=make_policy) as (collector, _):
        batches = iter(collector)
        assert values(next(batches)) == {4.0}
        collector.update_policy_weights_(Policy(5.0))
        assert values(next(batches)) == {5.0}


def test_a_policy_factory_alone_is_an_error_that_says_what_to_do() -> None:
    with (
        pytest.raises(ValueError, match="give it policy= beside policy_factory="),
        collecting(MultiSyncCollector, None, policy_factory=make_policy),
    ):
        pass


def test_a_compiled_policy_follows_and_is_not_compiled_again() -> None:
    policy = Linear()
    compile_policy = {"backend": "eager", "fullgraph": True}
    with collecting(MultiSyncCollector, policy, compile_policy=compile_policy) as (collector, _):
        batches = iter(collector)
        next(batches)
        # TorchRL's first batch has two kinds of input, whatever the scheme: without the outputs' keys, and with them.
        compilations = collector.map_fn("policy.compilations")
        assert all(compilations)
        for value in range(20):
            with torch.no_grad():
                policy.net.bias.fill_(float(value))
            collector.update_policy_weights_()
            assert set(next(batches)["action"].flatten().tolist()) == {float(value)}
        assert collector.map_fn("policy.compilations") == compilations


@pytest.mark.slow
def test_a_policy_that_is_replayed_as_a_graph_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="use compile_policy"),
        collecting(MultiSyncCollector, Linear(), cudagraph_policy=True),
    ):
        pass


# --- their distributed collector -------------------------------------------------------------------------------------


def free_port() -> str:
    """Their collector listens on it, and on the next one if that is free."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return str(taken.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("inner", [Collector, MultiSyncCollector], ids=["one process", "two processes"])
def test_a_distributed_collector_follows_and_its_ranks_are_told_apart(
    inner: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchrl.collectors.distributed import DistributedCollector

    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # theirs are undone with it
    policy, before = Policy(7.0), threads_of_ours()
    scheme = TorchRLWeightSyncScheme(timeout=30.0)
    collector = DistributedCollector(
        [Env] * 2,
        policy,
        policy_factory=make_policy,
        collector_class=inner,
        num_workers_per_collector=1,
        frames_per_batch=2 * STEPS,
        total_frames=5 * 2 * STEPS,
        sync=True,
        launcher="mp",
        backend="gloo",
        tcp_port=free_port(),
        weight_sync_schemes={"policy": scheme},
    )
    try:
        expected = [[7.0, 7.0], [1.0, 1.0], [2.0, 2.0], [50.0, 3.0], [4.0, 4.0]]
        for value, batch in enumerate(collector):
            assert [set(part["bias"].flatten().tolist()) for part in batch] == [{part} for part in expected[value]]
            assert len(set(batch["pid"].flatten().tolist())) == 2
            if inner is Collector:  # what is handed on has no extra state
                values(batch)
            set_all(policy.net, value + 1.0)
            collector.update_policy_weights_(policy)
            if value == 2:
                collector.update_policy_weights_(Policy(50.0), worker_ids=[0])
                assert bias(policy.net) == 3.0, "the collector's own policy is not touched"
        assert value == len(expected) - 1
        processes = collector.jobs
    finally:
        collector.shutdown()
    assert not scheme.initialized_on_sender
    assert wait_until(lambda: len(threads_of_ours()) <= len(before)), threads_of_ours()
    assert wait_until(lambda: not any(process.is_alive() for process in processes))


# --- the bridge alone: both ends in this process ---------------------------------------------------------------------


class Ends:
    """A sender, and one receiver that came to be as in a worker."""

    def __init__(self, source: nn.Module, target: nn.Module, *, rank: int = 0, context: Any = None) -> None:
        self.sender = TorchRLWeightSyncScheme(timeout=20.0, connect_timeout=20.0)
        if context is None:
            self.sender.init_on_sender("policy", model=source, num_workers=1)
        else:
            self.sender.init_on_sender("policy", context)
        self.receiver: TorchRLWeightSyncScheme = pickle.loads(pickle.dumps(self.sender))
        self.receiver.init_on_receiver(model_id="policy", model=target, worker_idx=rank)
        self.error: BaseException | None = None
        thread = threading.Thread(target=self._join, args=(rank,))
        thread.start()
        try:
            self.sender.connect()
        finally:
            thread.join(20)

    def _join(self, rank: int) -> None:
        try:
            self.receiver.connect(worker_idx=rank)
        except BaseException as error:
            self.error = error

    def close(self) -> None:
        self.receiver.shutdown()
        self.sender.shutdown()


@pytest.fixture
def ends() -> Iterator[Callable[..., Ends]]:
    made: list[Ends] = []

    def make(*args: Any, **kwargs: Any) -> Ends:
        made.append(Ends(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_the_scheme_has_every_public_name_of_theirs() -> None:
    theirs = {name for name in vars(TheirScheme) if not name.startswith("_")} - {"from_backend"}
    assert theirs <= set(dir(TorchRLWeightSyncScheme()))


def test_what_they_read_of_a_scheme(ends: Callable[..., Ends]) -> None:
    scheme = TorchRLWeightSyncScheme()
    told = (
        "initialized_on_sender",
        "initialized_on_receiver",
        "synchronized_on_sender",
        "synchronized_on_receiver",
    )
    assert [getattr(scheme, name) for name in told] == [False] * 4
    both = ends(Net(1.0), Net(2.0))
    assert [getattr(both.sender, name) for name in told] == [True, False, True, False]
    assert [getattr(both.receiver, name) for name in told] == [False, True, False, True]
    assert both.receiver.context is None and both.receiver.worker_idx == 0
    both.close()
    assert [getattr(both.sender, name) for name in told] == [False] * 4
    assert [getattr(both.receiver, name) for name in told] == [False] * 4


def test_a_receiver_gates_forward_applies_by_itself_and_ungates_at_the_end(ends: Callable[..., Ends]) -> None:
    source, target = Net(1.0), Net(2.0)
    both = ends(source, target)
    assert target() == (1.0, 1.0)
    set_all(source, 3.0)
    both.sender.send()
    assert target() == (3.0, 3.0)
    assert both.receiver.receive(0) is None
    with both.receiver.gate:
        handle = both.sender.send_async(Net(4.0))
        time.sleep(0.1)
        assert not handle.done and target() == (3.0, 3.0)
    handle.wait(10)
    assert target() == (4.0, 4.0)
    assert "forward" in target.__dict__
    both.receiver.shutdown()
    assert "forward" not in target.__dict__


def test_a_loop_of_ones_own_may_hold_the_gate_itself() -> None:
    sender, target = TorchRLWeightSyncScheme(), Net()
    sender.init_on_sender("policy", model=Net(), num_workers=1)

    def received(model: Any, safe_point: str) -> TorchRLWeightSyncScheme:
        receiver: TorchRLWeightSyncScheme = pickle.loads(pickle.dumps(sender))
        receiver.init_on_receiver("policy", model=model, worker_idx=0, safe_point=safe_point)
        return receiver

    with pytest.raises(ValueError, match="safe_point='now': choose one of 'gate', 'forward'"):
        received(target, "now")
    with pytest.raises(TypeError, match="needs a module"):
        received(TensorDict.from_module(target), "forward")
    receivers = [received(target, "gate"), received(TensorDict.from_module(target), "gate")]
    receivers[0].model = other = Net()
    assert "forward" not in {*target.__dict__, *other.__dict__}
    for end in (*receivers, sender):
        end.shutdown()


def test_another_model_assigned_takes_over_what_is_in_force(ends: Callable[..., Ends]) -> None:
    source, target, copy = Net(1.0), Net(2.0), Net(3.0)
    both = ends(source, target)
    set_all(source, 5.0)
    both.sender.send()
    both.receiver.model = copy
    assert both.receiver.model is copy
    assert copy() == (5.0, 5.0)
    set_all(source, 6.0)
    both.sender.send()
    assert copy() == (6.0, 6.0)
    assert target() == (5.0, 5.0), "the old one is on its own now"
    assert "forward" in copy.__dict__ and "forward" not in target.__dict__
    before = dict(copy.named_parameters())
    for value in (7.0, 8.0, 9.0):
        set_all(source, value)
        both.sender.send()
        assert copy() == (value, value) and target() == (5.0, 5.0)
    assert all(parameter is before[name] for name, parameter in copy.named_parameters())


def test_a_model_of_another_shape_cannot_be_assigned(ends: Callable[..., Ends]) -> None:
    both = ends(Net(1.0), target := Net(2.0))
    with pytest.raises(LayoutMismatchError):
        both.receiver.model = nn.Linear(2, 2)
    both.sender.send(Net(3.0))
    assert target() == (3.0, 3.0)


class DistributedLike:
    """What their distributed collectors look like from a scheme."""

    __module__ = "torchrl.collectors.distributed.generic"
    num_workers = 1

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy


def test_ranks_of_distributed_collectors_count_from_one(ends: Callable[..., Ends]) -> None:
    collector = DistributedLike(Net(1.0))
    both = ends(None, target := Net(2.0), context=collector, rank=1)
    assert both.error is None
    assert both.receiver.worker_idx == 0
    assert both.sender.context is collector
    both.sender.send(Net(3.0), worker_ids=0)
    assert target() == (3.0, 3.0)
    del collector
    assert both.sender.context is None


def test_a_collector_of_collectors_hands_the_weights_on(ends: Callable[..., Ends]) -> None:
    both = ends(source := Net(1.0), Net(2.0))
    told = []

    class Parent:
        def update_policy_weights_(self, *, weights: TensorDictBase, model_id: str) -> None:
            told.append((model_id, float(weights["layers", "0", "bias"][0])))

    both.receiver.context = parent = Parent()
    set_all(source, 4.0)
    both.sender.send()
    assert told == [("policy", 4.0)]
    assert both.receiver.context is parent


def test_a_context_that_fails_fails_the_push_and_nothing_is_applied(ends: Callable[..., Ends]) -> None:
    both = ends(source := Net(1.0), target := Net(2.0))

    class Parent:
        def update_policy_weights_(self, **kwargs: Any) -> None:
            raise ArithmeticError("no")

    both.receiver.context = parent = Parent()
    set_all(source, 4.0)
    with pytest.raises(WorkerError, match="ArithmeticError: no"):
        both.sender.send()
    assert target() == (1.0, 1.0)
    assert both.receiver.context is parent
    both.receiver.context = None
    both.sender.send()
    assert target() == (4.0, 4.0)


def test_a_policy_without_values_is_given_memory_and_its_constants() -> None:
    net, meta = Net(1.0), Net(1.0).to("meta")
    meta.layers[1].weight = meta.layers[0].weight
    names = materialize(meta, {"table": net.table})
    assert names == set(net.state_dict()) - {"_extra_state"}
    assert not any(tensor.is_meta for tensor in (*meta.parameters(), *meta.buffers()))
    assert float(meta.table) == TABLE
    assert meta.layers[1].weight is meta.layers[0].weight
    assert isinstance(meta.layers[0].weight, nn.Parameter)
    assert materialize(net, {}) == set()


def test_a_policy_without_values_for_which_the_sender_has_none_is_refused(ends: Callable[..., Ends]) -> None:
    scheme = TorchRLWeightSyncScheme(strict=False, connect_timeout=20.0)
    source = {f"layers.{i}.{kind}": torch.zeros(s) for i in range(LAYERS) for kind, s in (("weight", (16, 16)),)}
    scheme.init_on_sender("policy", weights=source, num_workers=1)
    receiver = pickle.loads(pickle.dumps(scheme))
    meta = Net().to("meta")
    del meta.extra
    receiver.init_on_receiver("policy", model=nn.ModuleDict({"layers": meta.layers}), worker_idx=0)
    errors = []

    def join() -> None:
        try:
            receiver.connect(worker_idx=0)
        except LayoutMismatchError as error:
            errors.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    scheme.connect()
    thread.join(20)
    scheme.shutdown()
    assert [error.missing for error in errors] == [sorted(f"layers.{i}.bias" for i in range(LAYERS))]


# --- the other way: our callback drives their collectors -------------------------------------------------------------


class Sized:
    """A collector as a train loader of a known length: Lightning prefetches from what has none."""

    def __init__(self, collector: Any, length: int) -> None:
        self.batches = iter(collector)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[TensorDictBase]:
        for _ in range(self.length):
            yield next(self.batches)


def fit(collector: Any, tmp_path: Path, **kwargs: Any) -> list[set[float]]:
    """Ten batches; once the k-th has been trained on, the actor's weights are k. What each batch has seen of them."""
    pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    from lightning_weightsync import UpdateWeights

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.actor = Policy(0.0)
            self.seen: list[set[float]] = []
            self.automatic_optimization = False

        def training_step(self, batch: TensorDictBase, batch_idx: int) -> None:
            self.seen.append(set(batch["bias"].flatten().tolist()))
            set_all(self.actor.net, batch_idx + 1.0)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    callback = UpdateWeights(collector, **kwargs)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[callback],
    )
    trainer.fit(module, Sized(collector, 10))
    assert callback.num_pushes == 10
    return module.seen


EXPECTED = [{float(value)} for value in range(10)]


def test_update_weights_drives_a_multi_sync_collector(tmp_path: Path) -> None:
    with collecting(MultiSyncCollector, Policy(-5.0)) as (collector, scheme):
        assert fit(collector, tmp_path, weight_update_map={"policy": "actor"}) == EXPECTED
        assert scheme.version == 11
        assert values_of_bias(collector) == {10.0}


def values_of_bias(collector: Any) -> set[float]:
    return {float(value[0]) for value in collector.get_distant_attr("policy.net.layers.0.bias")}


def test_update_weights_drives_a_single_collector(tmp_path: Path) -> None:
    policy = Policy(-5.0)
    collector = Collector(Env, policy, frames_per_batch=STEPS, total_frames=-1)
    try:
        assert fit(collector, tmp_path, weight_update_map={"policy": "actor"}) == EXPECTED
        assert bias(policy.net) == 10.0
    finally:
        collector.shutdown()
