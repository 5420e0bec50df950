"""What is a worker in a simulation? A real receiver with its models and gate, run step by step by the test."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_weightsync.errors import WeightSyncError
from lightning_weightsync.schemes.gate import Gate
from lightning_weightsync.schemes.receiver import ReceiverLink, ReceiverState
from lightning_weightsync.transports.link import WorkerLink
from tests.helpers.simulation.relay import Relay
from tests.helpers.simulation.scheme import SimulatedScheme

if TYPE_CHECKING:
    from tests.helpers.simulation.world import World

MODELS = ("policy", "value")
UNWRITTEN = -1


class Net(nn.Module):
    """Two parameters, which are switched, and two buffers, which are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 5), float(UNWRITTEN)))
        self.bias = nn.Parameter(torch.full((3,), float(UNWRITTEN)))
        self.register_buffer("scale", torch.full((2,), float(UNWRITTEN)))
        self.register_buffer("steps", torch.tensor(UNWRITTEN))

    @property
    def leaves(self) -> list[Tensor]:
        return [self.weight, self.bias, self.scale, self.steps]

    def fill(self, value: int) -> None:
        """Every leaf holds this value."""
        with torch.no_grad():
            for leaf in self.leaves:
                leaf.fill_(value)

    def value(self) -> int:
        """What every leaf holds."""
        values = {number for leaf in self.leaves for number in leaf.reshape(-1).tolist()}
        assert len(values) == 1, f"torn: the leaves hold {[leaf.reshape(-1).tolist() for leaf in self.leaves]}"
        return int(values.pop())


class SimulatedWorker:
    """One process that takes a worker's index for a while.

    Attributes:
        generation: By which the sender tells it from those before it.
        relay: Its connection.
        stopped: It does not run, and is going to.
        dead: It does not run, and never will.
        harmed: Something was done to its connection, so that its sender may well find it gone.
        in_force: (run, version) that it said it holds, when it was last looked at.
        holds: Value of each model that it must hold.
        schedule: The values that must be in force in it.
        applied: Serials of the pushes that it has applied.
        forbidden: Serials of the pushes that were reported as failed for it before it had applied them.
        fenced: The sender has given it up.
        scribbled: It has written into its own weights since the last push.
        reading: Copies of all leaves, made when its reader entered the gate; ``None`` while nobody is inside.
        link: The sender's end of its link.
    """

    _numbers = itertools.count(1)

    def __init__(self, world: World, index: int) -> None:
        self.world, self.index = world, index
        self.generation = -1
        self.relay = Relay()
        self.link: WorkerLink | None = None
        self.stopped = self.dead = self.harmed = self.fenced = False
        self.in_force = (-1, -1)
        self.holds = dict.fromkeys(MODELS, UNWRITTEN)
        self.schedule: dict[str, Any] = {}
        self.applied: set[int] = set()
        self.forbidden: set[int] = set()
        self.scribbled: set[str] = set()
        self.reading: list[Tensor] | None = None
        self.raise_at: str | None = None
        self.gate_plan: list[str] = []
        self.hook_plan: list[str] = []
        number = next(self._numbers)
        self._main, self._reader = 2 * number, 2 * number + 1
        self.nets = {model_id: Net() for model_id in MODELS}
        self.gate = Gate()
        self.receiver_link = ReceiverLink(world.hub.info, index, self.gate)
        self.schemes: dict[str, SimulatedScheme] = {model_id: world.make_scheme() for model_id in MODELS}
        for model_id, scheme in self.schemes.items():
            scheme.init_on_receiver(model_id, context=self)
            scheme.add_applied_hook(self._hook_of(model_id))

    def get_model(self, model_id: str) -> Net:
        """See ``init_on_receiver``."""
        return self.nets[model_id]

    @property
    def leaves(self) -> list[Tensor]:
        return [leaf for net in self.nets.values() for leaf in net.leaves]

    @property
    def runs(self) -> bool:
        return not (self.dead or self.stopped)

    def serve(self) -> None:
        """Let it act on everything that has arrived."""
        before, self.world.acting = self.world.acting, self
        try:
            with self.world.clock.playing(self._main):
                if self.receiver_link.state is ReceiverState.NEW:
                    if not self.relay.has_reached_worker:
                        return
                    self.receiver_link.join(self.world.clock.now + 60.0)
                    self.generation = self.receiver_link.generation
                while self.receiver_link.serve_once(0.0):
                    self.world.observe(self)
        except WeightSyncError:
            pass  # its link has ended
        finally:
            self.world.acting = before
            self.gate_plan, self.hook_plan = [], []
        self.world.observe(self)

    def beat(self) -> None:
        """What its second thread does."""
        channel = self.receiver_link._channel
        if channel is not None:
            with contextlib.suppress(OSError):
                channel.try_send("beat")

    def end(self) -> None:
        """It shuts its own end down."""
        self.harmed = True
        with self.world.clock.playing(self._main):
            self.receiver_link.end()

    def stop(self) -> None:
        self.stopped = True

    def die(self, *, lossy: bool) -> None:
        self.dead = self.harmed = True
        self.relay.end_worker(lossy=lossy)
        self._break_wires()

    def cut(self) -> None:
        self.harmed = True
        self.relay.cut()
        self._break_wires()

    def enter(self) -> None:
        """A policy call begins."""
        with self.world.clock.playing(self._reader):
            self.gate.__enter__()
        self.reading = [leaf.detach().clone() for leaf in self.leaves]

    def leave(self) -> None:
        """The policy call ends."""
        if self.reading is not None:
            self.reading = None
            with self.world.clock.playing(self._reader):
                self.gate.__exit__()

    def scribble(self, model_id: str) -> None:
        """It writes into its own weights, as a worker that trains on might."""
        with torch.no_grad():
            self.nets[model_id].weight.fill_(-7)
        self.scribbled.add(model_id)

    def _break_wires(self) -> None:
        for scheme in self.schemes.values():
            if scheme.wire is not None:
                scheme.wire.broken = True

    def _hook_of(self, model_id: str) -> Any:
        def hook(net: Net, version: int) -> None:
            while self.hook_plan:
                self.world.happen(self, self.hook_plan.pop(0))
            if self.raise_at == model_id:
                self.raise_at = None
                raise RuntimeError(f"the hook of {model_id} does not like version {version}")

        return hook
