"""Which events, in which order? A state machine of hypothesis that drives a simulated sender and its workers."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.helpers.simulation import laws
from tests.helpers.simulation.worker import MODELS, SimulatedWorker
from tests.helpers.simulation.world import NUM_WORKERS, World

INDICES = st.integers(0, NUM_WORKERS - 1)
DURING = st.lists(st.sampled_from(["leave", "late", "drive", "cut", "end"]), min_size=1, max_size=3)
SECONDS = st.sampled_from([0.1, 1.0, 5.0, 12.0, 45.0])
MISHAPS = ["stop", "raise", "raise", "scribble", "cut", "die", "die with its host", "end"]
ON_THE_WAY = st.one_of(
    st.none(), st.tuples(st.sampled_from(["cut", "die", "stop", "push", "push elsewhere"]), st.integers(0, 14))
)


class Protocol(RuleBasedStateMachine):
    """Pushes, deliveries frame by frame, faults of every kind at any point between them, replacements."""

    shared = True

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None

    @initialize(
        max_slots=st.sampled_from([None, None, None, 1, 2, 3]),
        verify=st.booleans(),
        only_changed=st.booleans(),
        ends=st.sampled_from(["settled", "settled", "shut down"]),
    )
    def begin(self, max_slots: int | None, verify: bool, only_changed: bool, ends: str) -> None:
        self.world = World(shared=self.shared, max_slots=max_slots, verify=verify, only_changed=only_changed)
        self.ends = ends
        self.world.connect()

    @property
    def there(self) -> World:
        assert self.world is not None
        return self.world

    def worker(self, index: int) -> SimulatedWorker:
        return self.there.current[index]

    # --- the sender

    @rule(
        models=st.sets(st.sampled_from(MODELS), min_size=1),
        workers=st.sets(INDICES, min_size=1),
        timeout=st.sampled_from([3.0, 15.0, 90.0, 90.0]),
        replaceable=st.booleans(),
        driven=st.booleans(),
    )
    def push(self, models: set[str], workers: set[int], timeout: float, replaceable: bool, driven: bool) -> None:
        self.there.push(sorted(models), sorted(workers), timeout, replaceable=replaceable)
        if driven:
            self.there.drive()

    @rule(
        models=st.sets(st.sampled_from(MODELS), min_size=1),
        timeout=st.sampled_from([15.0, 90.0, 90.0]),
        driven=st.booleans(),
    )
    def push_to_all(self, models: set[str], timeout: float, driven: bool) -> None:
        self.push(models, set(range(NUM_WORKERS)), timeout, True, driven)

    @rule()
    def drive(self) -> None:
        self.there.drive()

    @precondition(lambda self: self.there.pushed)
    @rule(number=st.integers(0, 3), running=st.sets(INDICES, min_size=1))
    def wait(self, number: int, running: set[int]) -> None:
        self.there.wait_for(self.there.pushed[-1 - number % len(self.there.pushed)], [self.worker(i) for i in running])

    @rule(index=INDICES, model=st.sampled_from(MODELS))
    def ask_digest(self, index: int, model: str) -> None:
        self.there.ask_digest(index, model)

    @rule(by=st.integers(1, 2), really=st.integers(0, 3))
    def set_back(self, by: int, really: int) -> None:
        """The sender takes an older version than it has pushed for the newest."""
        if really == 0:
            self.there.hub.version = max(0, self.there.hub.version - by)

    # --- what is between them

    @rule(indices=st.sets(INDICES, min_size=1), rounds=st.integers(1, 4))
    def exchange(self, indices: set[int], rounds: int) -> None:
        """All goes well for a while."""
        for _ in range(rounds):
            self.there.drive()
            self.there.run([self.worker(index) for index in sorted(indices)])
        self.there.drive()

    @rule(index=INDICES)
    def deliver_to_worker(self, index: int) -> None:
        worker = self.worker(index)
        if worker.runs:
            worker.relay.to_worker()
            worker.serve()

    @rule(
        index=INDICES,
        models=st.sets(st.sampled_from(MODELS), min_size=1),
        reading=st.booleans(),
        gate=DURING,
        hook=DURING,
    )
    def interrupt(self, index: int, models: set[str], reading: bool, gate: list[str], hook: list[str]) -> None:
        """Things happen in the middle of a switch: while it waits for its gate, and while its hooks run."""
        worker = self.worker(index)
        if worker.runs:
            if reading and worker.reading is None:
                worker.enter()
            self.push(models, {index}, 15.0, False, True)
            while worker.relay.to_worker():
                pass
            worker.gate_plan, worker.hook_plan = gate, hook
            worker.serve()

    @rule(index=INDICES, driven=st.booleans())
    def deliver_to_sender(self, index: int, driven: bool) -> None:
        self.worker(index).relay.to_sender()
        if driven:
            self.there.drive()

    @rule(seconds=SECONDS, heard=st.sets(INDICES))
    def pass_time(self, seconds: float, heard: set[int]) -> None:
        """Some workers' heartbeats arrive meanwhile."""
        while seconds > 0:
            for index in heard:
                if self.worker(index).runs:
                    self.worker(index).beat()
                while self.worker(index).relay.to_sender():
                    pass
            self.there.drive()
            self.there.pass_time(min(5.0, seconds))
            seconds -= 5.0

    # --- the workers

    @rule(index=INDICES)
    def enter_or_leave(self, index: int) -> None:
        worker = self.worker(index)
        if worker.runs:
            (worker.enter if worker.reading is None else worker.leave)()

    @rule(index=INDICES, what=st.sampled_from(MISHAPS), model=st.sampled_from(MODELS))
    def mishap(self, index: int, what: str, model: str) -> None:
        worker = self.worker(index)
        if what == "raise":
            worker.raise_at = model
        elif worker.dead:
            pass
        elif what == "stop":
            worker.stop()
        elif what == "cut":
            worker.cut()
        elif what == "scribble":
            if worker.reading is None:
                worker.scribble(model)
        elif what == "end":
            worker.end()
        else:
            worker.die(lossy=what != "die")

    @precondition(lambda self: any(worker.stopped for worker in self.there.workers))
    @rule()
    def go_on(self) -> None:
        """Whoever was stopped goes on; some of them were replaced meanwhile, and find out."""
        for worker in self.there.workers:
            worker.stopped = False
        self.there.run(self.there.workers)

    @precondition(lambda self: any(worker.harmed or worker.fenced for worker in self.there.current.values()))
    @rule(index=INDICES, on_the_way=ON_THE_WAY)
    def replace(self, index: int, on_the_way: tuple[str, int] | None) -> None:
        self.there.replace(index, *(on_the_way or ()))

    @precondition(lambda self: any(worker.harmed or worker.fenced for worker in self.there.current.values()))
    @rule()
    def heal(self) -> None:
        """Whoever is lost is replaced."""
        self.go_on()
        for index in range(NUM_WORKERS):
            if self.worker(index).harmed or self.worker(index).fenced:
                self.there.replace(index)

    # --- always

    @invariant()
    def laws_hold(self) -> None:
        if self.world is not None:
            laws.check(self.world)

    def teardown(self) -> None:
        if self.world is None:
            return
        try:
            if self.ends == "settled":
                self.world.settle()
            self.world.shut_down()
        finally:
            self.world.close()


class ProtocolOverNetwork(Protocol):
    """The same, where every worker receives into slots of its own."""

    shared = False


def run(machine: type[Protocol], *, examples: int, steps: int, phases: Collection[Phase] = tuple(Phase)) -> None:
    """So many orders of events, the same ones each time; raises the law that was broken."""
    given = settings(
        max_examples=examples,
        stateful_step_count=steps,
        phases=phases,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=given)
