"""What must hold in a simulation, whatever happens? What DESIGN calls "what must never happen", as assertions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lightning_weightsync.errors import WeightSyncError, WeightSyncTimeout
from lightning_weightsync.transports.errand import ErrandState
from lightning_weightsync.transports.link import LinkState
from lightning_weightsync.transports.process_group import ProcessGroupSender

if TYPE_CHECKING:
    from tests.helpers.simulation.worker import SimulatedWorker
    from tests.helpers.simulation.world import Pushed, World

SLACK_SECONDS = 0.2


def note(world: World) -> None:
    """What a sender has given up, or reported as failed, is never applied from now on."""
    for worker in world.workers:
        assert worker.link is not None
        if worker.link.state is not LinkState.OPEN:
            worker.fenced = True
    for push in world.pushed:
        for index, worker in push.targets.items():
            if index in push.handle.failed and push.serial not in worker.applied:
                worker.forbidden.add(push.serial)


def observe(world: World, worker: SimulatedWorker) -> None:
    """A worker holds one version, which it says, and never an older one; while a reader is inside, nothing moves."""
    if worker.dead:
        return
    link = worker.receiver_link
    says = (link.run, link.version)
    assert says == worker.in_force or says > worker.in_force, f"from {worker.in_force} back to {says}"
    if says != worker.in_force:
        _take_in(world, worker)
    if says[1] >= 0:
        assert (worker.gate.run, worker.gate.version) == says, "the gate tells another version than the link"
        assert worker.gate.values == worker.schedule, "the values in force came with another version"
    for model_id, net in worker.nets.items():
        if model_id not in worker.scribbled:
            value = net.value()
            assert value == worker.holds[model_id], f"{model_id} holds {value}, not {worker.holds[model_id]} ({says})"
    if worker.reading is not None:
        for leaf, before in zip(worker.leaves, worker.reading, strict=True):
            assert torch.equal(leaf, before), "weights have changed under a reader that is in the gate"


def _take_in(world: World, worker: SimulatedWorker) -> None:
    """It says that it has applied a push: which one is told by the values."""
    link = worker.receiver_link
    says = (link.run, link.version)
    candidates = [
        push
        for push in world.pushed
        if (push.handle.run, push.handle.version) == says
        and push.targets.get(worker.index) is worker
        and all(worker.nets[model_id].value() == value for model_id, value in push.values.items())
    ]
    assert candidates, f"what it holds is no version that it was sent: {says}"
    push = candidates[-1]
    assert not worker.fenced, f"a worker that was given up has applied {says}"
    assert push.serial not in worker.forbidden, f"{says} was reported as failed, and is applied later"
    worker.schedule = push.schedule
    worker.in_force = says
    worker.applied.add(push.serial)
    worker.scribbled -= set(push.values)
    worker.holds |= push.values


def check(world: World) -> None:
    """Everything that holds at any moment."""
    note(world)
    for worker in world.workers:
        observe(world, worker)
        _check_link(worker)
    for push in world.pushed:
        _check_push(world, push)
    for scheme in world.schemes.values():
        if scheme._pool is not None:
            living = sum(link.state is LinkState.OPEN for link in world.hub.links.values())
            slots = scheme._pool._slots.values()
            kept = [slot for slot in slots if slot.retired and slot.holders == {scheme._newest}]  # one per worker
            assert len(slots) - len(kept) <= scheme._pool.max_slots + 2 * living, f"{len(slots)} slots"
            assert len(kept) <= len(world.current) + 1, f"{len(kept)} slots are kept for those who join next"


def _check_link(worker: SimulatedWorker) -> None:
    link = worker.link
    assert link is not None
    assert (link.run, link.version) <= worker.in_force, "the sender believes in a version that was not applied"
    if link.state is LinkState.BROKEN:
        late = isinstance(link.cause, WeightSyncTimeout)
        assert worker.harmed or late, f"a worker to which nothing has happened was given up: {link.cause}"


def _check_push(world: World, push: Pushed) -> None:
    handle = push.handle
    for errand in handle.errands:
        worker = push.targets[errand.link.worker_idx]
        assert errand.link is worker.link
        applied = push.serial in worker.applied
        if errand.state is ErrandState.ANSWERED:
            assert errand.reply is not None
            assert (errand.reply.kind == "applied") == applied, f"{errand.reply.kind}, and applied is {applied}"
        elif errand.state is ErrandState.SUPERSEDED:
            assert not applied
            assert any(
                newer.serial > push.serial
                and newer.targets.get(worker.index) is worker
                and newer.values.keys() >= push.values.keys()
                for newer in world.pushed
            ), "superseded, and no newer push carries its models"
        elif errand.final:
            assert worker.index in handle.failed, "failed, and the handle does not name it"
    for index, cause in handle.failed.items():
        assert isinstance(cause, WeightSyncError), f"the failure of worker {index} is {cause!r}"
        assert f"worker {index}" in str(cause), f"the failure of worker {index} does not name it: {cause}"
    if handle.done:
        assert all(push.serial in worker.applied for worker in push.targets.values()), "done, and not applied"
    if handle.superseded:
        assert not handle.failed


def check_start(world: World, worker: SimulatedWorker) -> None:
    """A replacement that has been connected holds what was pushed last for its worker, of each model."""
    for model_id in worker.nets:
        last = [push for push in world.pushed if worker.index in push.targets and model_id in push.values][-1]
        holds = worker.nets[model_id].value()
        assert holds == last.values[model_id], f"it starts from {holds}, and was to hold {last.values[model_id]}"


def check_deadlines(world: World) -> None:
    """The sender has just looked at the clock: nothing is under way beyond what bounds it."""
    for push in world.pushed:
        for errand in push.handle.errands:
            if not errand.final:
                check_in_time(world, push.deadline, f"{errand.phase} ({errand.state.value})")
                if errand.state is ErrandState.SENT:
                    quiet_since = max(errand.link.channel.last_heard, errand.created)
                    check_in_time(world, quiet_since + world.hub.heartbeat_timeout, "waiting for a silent worker")


def check_in_time(world: World, deadline: float, what: str) -> None:
    """It ends by its deadline, but for one look at the clock."""
    assert world.clock.now <= deadline + SLACK_SECONDS, f"{what}: {world.clock.now - deadline:.1f} s too late"


def check_rest(world: World, last: Pushed) -> None:
    """Everything has settled: live workers hold what the sender has, and slots are held by them alone."""
    check(world)
    for worker in world.workers:
        if not worker.fenced:
            assert not worker.dead
            for model_id, net in worker.nets.items():
                assert net.value() == last.values[model_id], "left on old weights"
    living = [worker for worker in world.workers if not worker.fenced]
    workers = {("worker", worker.index, worker.generation) for worker in living}
    for scheme in world.schemes.values():
        pool = scheme._pool
        assert pool is not None
        holders = {holder for slot in pool._slots.values() for holder in slot.holders} - workers
        pairs = {holder for holder in holders if isinstance(holder, ProcessGroupSender)}
        assert len(pairs) <= len(living), "slots are held for pairs that have ended"
        assert holders - pairs <= {scheme._newest}, f"slots are held by {holders}"
        assert len(pool) <= pool.max_slots
