"""What can happen in a simulation? A sender, its workers and what is between them, one event at a time.

Everything is the package's own code, but for the process group, the rendezvous' sockets, the clock and the threads.
What must hold whatever happens is in ``laws``.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from lightning_weightsync.errors import WeightSyncError, WeightSyncTimeout
from lightning_weightsync.schemes import receiver as receiver_module
from lightning_weightsync.schemes.joining import connect_workers, reconnect_workers
from lightning_weightsync.schemes.push import push_models
from lightning_weightsync.transports import hub as hub_module
from lightning_weightsync.transports.control import ChannelClosed, ControlChannel, Message
from lightning_weightsync.transports.hub import LinkHub
from lightning_weightsync.transports.link import LinkState, WorkerLink
from lightning_weightsync.transports.posting import PostingChannel
from lightning_weightsync.transports.pushing import PushHandle
from lightning_weightsync.transports.rendezvous import Joined, StoreInfo
from tests.helpers.simulation import laws
from tests.helpers.simulation.clock import Clock, simulated
from tests.helpers.simulation.scheme import SimulatedScheme, Wire
from tests.helpers.simulation.worker import MODELS, Net, SimulatedWorker

NUM_WORKERS = 2
HEARTBEAT_SECONDS = 35.0
CONNECT_SECONDS = 60.0


@dataclass
class Pushed:
    """A push that was put on its way: to which processes, what each leaf of its models holds after it, and values."""

    serial: int
    handle: PushHandle
    values: dict[str, int]
    targets: dict[int, SimulatedWorker]
    deadline: float
    schedule: dict[str, Any]
    latest_wins: bool = False

    @property
    def settled(self) -> bool:
        return all(errand.final for errand in self.handle.errands)


class _Rendezvous:
    """Whoever is expected is there."""

    def __init__(self, host: str, *, local: bool) -> None:
        self.info = StoreInfo(host=host, port=0, authkey="")
        self.coming: list[SimulatedWorker] = []
        self._local = local

    def accept(
        self, expected: Collection[int], deadline: float, watch: Callable[[set[int]], None]
    ) -> dict[int, Joined]:
        assert set(expected) == {worker.index for worker in self.coming}
        return {w.index: Joined(w.index, 0, PostingChannel(w.relay.sender_end), self._local) for w in self.coming}

    def close(self) -> None:
        pass


class World:
    """A sender and its workers.

    Args:
        shared: Whether workers map the sender's slots, or get them over a network.
        max_slots: See ``DistributedWeightSyncScheme``.
        **options: Others of its options.

    Attributes:
        pushed: Every push so far.
        workers: Every process so far.
        current: The newest process of each index.
        acting: The process whose code is running, if one's is.
    """

    _closed = itertools.count()

    def __init__(self, *, shared: bool, max_slots: int | None = None, **options: bool) -> None:
        self.clock = Clock()
        self.clock.on_wait = self._on_wait
        self.clock.on_gate_wait = self._on_gate_wait
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(simulated(self.clock))
        self._stack.enter_context(mock.patch.object(hub_module, "Rendezvous", _Rendezvous))
        self._stack.enter_context(mock.patch.object(receiver_module, "join", self._meet))
        self.shared, self.max_slots, self._options = shared, max_slots, options
        self.wires: dict[str, Wire] = {}
        self.hub = LinkHub(NUM_WORKERS, local=shared, heartbeat_timeout=HEARTBEAT_SECONDS)
        self._accept, self._push = self.hub.accept, self.hub.push
        self._stack.enter_context(mock.patch.object(self.hub, "accept", self._take_down_links))
        self._stack.enter_context(mock.patch.object(self.hub, "push", self._take_down_push))
        self.pushed: list[Pushed] = []
        self.workers: list[SimulatedWorker] = []
        self.current: dict[int, SimulatedWorker] = {}
        self.acting: SimulatedWorker | None = None
        self.newest = 0
        self._values = itertools.count(1)
        self._running: Sequence[SimulatedWorker] = ()
        self._trouble: tuple[int, Callable[[], object]] | None = None
        self._blocked = False
        self.sources = {model_id: Net() for model_id in MODELS}
        self.schemes = {model_id: self.make_scheme() for model_id in MODELS}
        for model_id, scheme in self.schemes.items():
            scheme.init_on_sender(model_id, context=self, model=self.sources[model_id])

    def make_scheme(self) -> SimulatedScheme:
        same_host: Any = "shared_memory" if self.shared else "network"
        return SimulatedScheme(self.wires, same_host=same_host, max_slots=self.max_slots, **self._options)

    # --- the sender --------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """The first workers come."""
        self._fill(MODELS)
        coming = [SimulatedWorker(self, index) for index in range(NUM_WORKERS)]
        with self._meeting(coming) as deadline:
            connect_workers(self.hub, dict.fromkeys(self.schemes.values()), range(NUM_WORKERS), deadline)

    def replace(self, index: int, trouble: str | None = None, after: int = 0) -> None:
        """A new process takes an index; something may happen on the way."""
        worker = SimulatedWorker(self, index)
        acts: dict[str, Callable[[], object]] = {
            "cut": worker.cut,
            "die": lambda: worker.die(lossy=True),
            "stop": worker.stop,
            "push": self._push_by_another_thread,
            "push elsewhere": lambda: self._push_by_another_thread([1 - index]),
        }
        if trouble is not None:
            self._trouble = (after, acts[trouble])
        if index in self.current:
            self.current[index].harmed = True  # it is being fenced off
        try:
            with self._meeting([worker]) as deadline:
                reconnect_workers(self.hub, list(self.schemes.values()), [index], deadline)
        except WeightSyncError:
            no_slot = self.max_slots is not None and not all(push.settled for push in self.pushed)
            assert worker.harmed or worker.stopped or no_slot, "nothing has happened to it, and it was not connected"
            worker.harmed = True  # it is turned away
        else:
            if not worker.harmed and not worker.stopped:
                laws.check_start(self, worker)
        finally:
            self._trouble = None

    def push(
        self, models: Collection[str], targets: Sequence[int], timeout: float, *, replaceable: bool = False
    ) -> Pushed | None:
        """Put new weights on their way; ``None`` if no slot became free in time."""
        self._fill(models)
        deadline = self.clock.now + timeout
        try:
            with self._blocking(()):
                push_models(
                    self.hub,
                    {self.schemes[model_id]: None for model_id in models},
                    targets,
                    timeout=timeout,
                    replaceable=replaceable,
                )
        except WeightSyncTimeout:
            latest_wins = all(push.latest_wins or push.settled for push in self.pushed)
            assert self.max_slots is not None or not latest_wins, "by default nobody ever waits for a slot"
            laws.check_in_time(self, deadline, "a push that waited for a slot")
            return None
        pushed = self.pushed[-1]
        pushed.latest_wins = replaceable and set(models) == set(MODELS) and len(targets) == NUM_WORKERS
        self.newest = max(self.newest, self.hub.version)
        self.note()
        return pushed

    def drive(self) -> None:
        """The sender's driver does one round: sends what is due, reads what has arrived, looks at the clock."""
        if self._blocked:
            return
        rounds = iter([False, False])
        with self._blocking(()):
            self.hub.dispatcher.wait_until(lambda: next(rounds, True))
        self.note()
        laws.check_deadlines(self)

    def wait_for(self, pushed: Pushed, running: Sequence[SimulatedWorker]) -> None:
        """The sender blocks on a push, while these workers run."""
        began = self.clock.now
        with contextlib.suppress(WeightSyncError), self._blocking(running):
            pushed.handle.wait()
        laws.check_in_time(self, max(began, pushed.deadline), "a wait for a push")
        self.note()

    def ask_digest(self, index: int, model_id: str) -> None:
        """Another kind of errand, for which the sender waits; the worker runs meanwhile."""
        worker, deadline = self.current[index], self.clock.now + 30.0
        with self._blocking([worker]):
            answers = self.hub.ask(
                [self.hub.links[index]],
                lambda link: link.channel.send("digest", model_id=model_id),
                {"digested"},
                phase="digest",
                deadline=deadline,
            )
        laws.check_in_time(self, deadline, "a digest")
        self.note()
        if index in answers.replies:
            assert answers.replies[index]["digest"] == worker.schemes[model_id].staged_model.digest()

    # --- what happens ------------------------------------------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.drive()

    def run(self, workers: Sequence[SimulatedWorker]) -> bool:
        """Each worker gets one frame and acts on it, and one of its own goes on; whether anything moved."""
        moved = False
        for worker in workers:
            if worker.runs and worker.relay.to_worker():
                moved = True
            if worker.runs:
                worker.serve()
            moved |= worker.relay.to_sender()
        return moved

    def happen(self, worker: SimulatedWorker, event: str) -> None:
        """Something happens in the middle of what a worker does."""
        if event == "leave":
            worker.leave()
        elif event == "late":
            self.clock.now += 12.0
        elif event == "drive":
            self.drive()
        elif event == "cut":
            worker.cut()
        elif event == "end":
            worker.end()
        worker.relay.collect()
        self.note()

    def settle(self) -> None:
        """Whoever lives goes on, everything arrives, and then one more push must reach every live worker."""
        for worker in self.workers:
            worker.stopped, worker.raise_at = False, None
            worker.leave()
        for _ in range(2000):
            moved = self.run(self.workers)
            self.drive()
            if not moved and all(push.settled for push in self.pushed):
                break
        else:
            raise AssertionError("it does not come to rest")
        self.hub.version = self.newest
        living = [i for i, link in self.hub.links.items() if link.state is LinkState.OPEN]
        if living:
            last = self.push(MODELS, living, CONNECT_SECONDS)
            assert last is not None, "everything has settled, and there is no free slot"
            self.wait_for(last, self.workers)
            assert last.handle.done, f"everybody is well, and the last push is {last.handle!r}: {last.handle.failed}"
            laws.check_rest(self, last)

    def shut_down(self) -> None:
        """The sender ends, whatever is under way; then everything arrives that is on its way."""
        self.hub.close()
        self.note()
        for push in self.pushed:
            assert push.settled, f"{push.handle!r} is not settled after a shutdown"
        for worker in self.workers:
            worker.stopped = False
            worker.leave()
        while self.run(self.workers):
            pass
        laws.check(self)

    def close(self) -> None:
        """Give everything back, whatever has happened."""
        try:
            self.hub.close()
            for scheme in self.schemes.values():
                scheme.shutdown()
            for worker in self.workers:
                worker.leave()
                worker.end()
                worker.relay.close()
        finally:
            self._stack.close()
            if next(self._closed) % 20 == 0:  # mappings, which hold descriptors, go with the tensors that view them
                gc.collect()

    # --- what is seen ------------------------------------------------------------------------------------------

    def note(self) -> None:
        """Take down what the sender has found: whom it has given up, and which pushes it has reported as failed."""
        laws.note(self)

    def observe(self, worker: SimulatedWorker) -> None:
        """Look at what a worker holds."""
        laws.observe(self, worker)

    def _fill(self, models: Collection[str]) -> None:
        for model_id in models:
            self.sources[model_id].fill(next(self._values))

    def _take_down_links(self, worker_ids: Collection[int], deadline: float) -> dict[int, WorkerLink]:
        links = self._accept(worker_ids, deadline)
        for worker in self.hub._rendezvous.coming:
            worker.link = links[worker.index]
            self.workers.append(worker)
            self.current[worker.index] = worker
        self.note()
        return links

    def _take_down_push(self, payloads: Any, version: int, *, links: Any = None, **how: Any) -> PushHandle:
        values = {p.model_id: int(p.slot.views[0].reshape(-1)[0]) for several in payloads.values() for p in several}
        deadline = self.clock.now + how["timeout"]
        handle = self._push(payloads, version, links=links, **how)
        by_link = {id(worker.link): worker for worker in self.workers}
        given = self.hub.links if links is None else links
        targets = {index: by_link[id(given[index])] for index in payloads if index in given}
        self.pushed.append(Pushed(len(self.pushed), handle, values, targets, deadline, dict(self.hub.values)))
        self.hub.next_values = {"pushes before": len(self.pushed)}
        return handle

    def _push_by_another_thread(self, targets: Sequence[int] = range(NUM_WORKERS)) -> None:
        """Only where it would not wait: the thread that is played has to go on."""
        if self.max_slots is None and all(push.settled for push in self.pushed) and not self.hub.pushing._is_owned():
            self.push(MODELS, targets, 30.0, replaceable=True)

    @contextlib.contextmanager
    def _meeting(self, coming: list[SimulatedWorker]) -> Iterator[float]:
        """These workers come; gives the deadline."""
        deadline = self.clock.now + CONNECT_SECONDS
        self.hub._rendezvous.coming = coming
        try:
            with self._blocking(coming):
                yield deadline
        finally:
            laws.check_in_time(self, deadline, "connecting")
            self.note()

    @contextlib.contextmanager
    def _blocking(self, running: Sequence[SimulatedWorker]) -> Iterator[None]:
        """The sender is in a call that may block; these workers run meanwhile."""
        before = self._blocked, self._running
        self._blocked, self._running = True, running
        try:
            yield
        finally:
            self._blocked, self._running = before

    def _on_wait(self, seconds: float) -> bool:
        if self.acting is not None:
            return False
        if self._trouble is not None:
            after, act = self._trouble
            self._trouble = (after - 1, act) if after else None
            if not after:
                act()
        return self.run(self._running)

    def _on_gate_wait(self) -> bool:
        """A worker's main thread waits for its gate."""
        worker = self.acting
        if worker is None:
            return False
        if worker.gate_plan:
            self.happen(worker, worker.gate_plan.pop(0))
        elif self._blocked:  # the driver cannot run meanwhile, as it would
            worker.leave()
        else:
            self.pass_time(1.0)
        return True

    def _meet(
        self, info: StoreInfo, worker_idx: int, deadline: float, on_socket: Callable[[socket.socket], None]
    ) -> tuple[ControlChannel, Message]:
        worker = self.acting
        assert worker is not None
        on_socket(worker.relay.worker_end)
        channel = ControlChannel(worker.relay.worker_end, takes_descriptors=True)
        try:
            return channel, channel.receive(deadline)
        except ChannelClosed as error:
            raise WeightSyncError("could not join") from error
