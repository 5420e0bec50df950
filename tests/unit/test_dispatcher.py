"""Many links at once: each errand gets its answer or its failure, and nobody waits for anybody else's worker."""

import re
import threading
import time

import pytest

from lightning_weightsync.errors import WeightSyncError, WeightSyncTimeout
from lightning_weightsync.transports.control import ChannelClosed, ControlChannel
from lightning_weightsync.transports.dispatcher import Dispatcher
from lightning_weightsync.transports.errand import Errand, ErrandState
from lightning_weightsync.transports.link import LinkState, WorkerLink
from lightning_weightsync.transports.posting import PostingChannel
from lightning_weightsync.transports.pushing import PushHandle
from tests.helpers.sockets import socket_pair
from tests.helpers.threads import Call, eventually, soon

QUEUED, SENT, ANSWERED, FAILED, SUPERSEDED = ErrandState


class Exchange:
    """A dispatcher, its links, and the other ends of them, which a test answers by hand."""

    def __init__(self, num_links=1, *, heartbeat_timeout=30.0):
        self.lost = []
        self.dispatcher = Dispatcher(heartbeat_timeout, self._lose)
        self.links, self.workers = [], []
        for index in range(num_links):
            ours, theirs = socket_pair("unix")
            self.links.append(WorkerLink(index, 1, PostingChannel(ours), 0, True))
            self.workers.append(ControlChannel(theirs))
            self.dispatcher.watch(self.links[-1])

    def _lose(self, link, phase, seconds, error):
        cause = RuntimeError(f"lost {link.worker_idx} in {phase} after {seconds:.1f} s: {error}")
        self.lost.append(link.worker_idx)
        link.end(cause)
        return cause

    def errand(self, link=0, number=1, *, seconds=20.0, settled=None, replaces=None):
        def request(link):
            link.channel.send("push", run=1, version=number, models=[], values={}, budget=1.0, initial=False)

        errand = Errand(
            self.links[link],
            request,
            {"applied", "failed"},
            phase=f"push {number}",
            deadline=soon(seconds),
            settled=settled,
            takes_place_of=replaces,
        )
        errand.number = number
        return errand

    def submit(self, *errands):
        self.dispatcher.submit(errands)
        return errands

    def asked(self, worker=0, timeout=5.0):
        """The number of the next request that arrives at a worker."""
        return self.workers[worker].receive(soon(timeout))["version"]

    def nothing_asked(self, worker=0):
        return self.workers[worker].poll() is None

    def answer(self, worker=0, number=1):
        self.workers[worker].send("applied", run=1, version=number, digests={})

    def serve(self, worker, *, count, delay=0.0):
        """A worker that answers so many requests, in a thread of its own; gives their numbers."""

        def loop():
            numbers = []
            for _ in range(count):
                numbers.append(self.asked(worker))
                time.sleep(delay)
                self.answer(worker, numbers[-1])
            return numbers

        return Call(loop)

    def close(self):
        self.dispatcher.close()
        for link in self.links:
            link.end()
        for worker in self.workers:
            worker.close()


@pytest.fixture
def exchange():
    made = []

    def make(*args, **kwargs):
        made.append(Exchange(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "weight-sync-sender"]


# --- one errand -----------------------------------------------------------------------------------------------------


def test_an_errand_goes_from_queued_over_sent_to_answered(exchange):
    there = exchange()
    settled = []
    errand = there.errand(settled=settled.append)
    assert (errand.state, errand.final) == (QUEUED, False)
    there.submit(errand)
    assert errand.state is QUEUED and there.nothing_asked()  # to submit does not block, and sends nothing
    waiting = Call(there.dispatcher.wait, [errand])
    assert there.asked() == 1
    assert errand.state is SENT and settled == []
    there.answer()
    assert waiting.result(5) is True
    assert (errand.state, errand.reply["version"], errand.error, settled) == (ANSWERED, 1, None, [errand])


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ([], ANSWERED),
        ([SENT], QUEUED),
        ([SENT], SUPERSEDED),
        ([SENT, ANSWERED], FAILED),
        ([FAILED], SENT),
        ([SUPERSEDED], FAILED),
    ],
)
def test_no_other_way_through_the_states_exists(exchange, path, wrong):
    errand = exchange().errand()
    for state in path:
        errand.move(state)
    with pytest.raises(RuntimeError, match=f"cannot go from {errand.state.value} to {wrong.value}"):
        errand.move(wrong)


def test_whoever_finds_an_errand_final_finds_its_consequences_too(exchange):
    """Else a push that failed would be seen as done for a moment."""
    finals = []
    errand = exchange().errand(settled=lambda errand: finals.append(errand.final))
    errand.move(FAILED, error=ValueError())
    assert (finals, errand.final) == ([False], True)


def test_waiting_gives_up_at_its_own_deadline_and_the_errand_goes_on(exchange):
    there = exchange()
    (errand,) = there.submit(there.errand())
    started = time.monotonic()
    assert there.dispatcher.wait([errand], soon(0.2)) is False
    assert 0.2 <= time.monotonic() - started < 1.0
    assert errand.state is SENT
    there.answer()
    assert there.dispatcher.wait([errand]) is True


def test_beats_are_no_answers(exchange):
    there = exchange()
    (errand,) = there.submit(there.errand())
    there.workers[0].send("beat")
    assert there.dispatcher.wait([errand], soon(0.2)) is False
    there.workers[0].send("beat")
    there.answer()
    assert there.dispatcher.wait([errand], soon()) is True


def test_a_worker_that_floods_its_sender_with_beats_keeps_nobody_else_waiting(exchange, monkeypatch):
    """Whenever some have been read, there are more."""
    there = exchange(2)
    beats = there.workers[0].encode("beat")
    flood = b"".join([beats] * 100)
    read = there.links[0].channel._read
    monkeypatch.setattr(there.links[0].channel, "_read", lambda: (there.workers[0]._sock.send(flood), read())[1])
    there.workers[0].send("beat")
    there.answer(1, 2)  # unasked, which the driver notices when it comes to it
    there.dispatcher.wait_until(lambda: there.lost, soon(2))
    assert there.lost == [1]


def test_an_answer_behind_many_beats_is_found(exchange):
    there = exchange()
    (errand,) = there.submit(there.errand())
    there.dispatcher.wait_until(lambda: errand.state is SENT, soon())
    for _ in range(200):
        there.workers[0].send("beat")
    there.answer()
    assert there.dispatcher.wait([errand], soon(2)) is True


# --- queues ---------------------------------------------------------------------------------------------------------


def test_one_link_carries_one_errand_at_a_time_in_their_order(exchange):
    there = exchange()
    errands = there.submit(*(there.errand(number=number) for number in (1, 2, 3)))
    waiting = Call(there.dispatcher.wait, errands)
    for number in (1, 2, 3):
        assert there.asked() == number
        time.sleep(0.1)
        assert there.nothing_asked()
        assert [errand.state for errand in errands] == [ANSWERED] * (number - 1) + [SENT] + [QUEUED] * (3 - number)
        there.answer(number=number)
    assert waiting.result(5) is True


def test_links_go_side_by_side(exchange):
    there = exchange(4)
    errands = there.submit(*(there.errand(link) for link in range(4)))
    workers = [there.serve(link, count=1, delay=0.4) for link in range(4)]
    started = time.monotonic()
    assert there.dispatcher.wait(errands) is True
    assert time.monotonic() - started < 1.2  # in a row they would take 1.6
    assert [worker.result() for worker in workers] == [[1]] * 4


def test_a_slow_worker_lengthens_its_own_queue_only(exchange):
    there = exchange(2)
    slow = there.submit(*(there.errand(0, number) for number in range(3)))
    quick = there.submit(*(there.errand(1, number) for number in range(20)))
    worker = there.serve(1, count=20)
    assert there.dispatcher.wait(quick, soon(5)) is True
    assert worker.result() == list(range(20))
    assert [errand.state for errand in slow] == [SENT, QUEUED, QUEUED]


def test_a_worker_that_does_not_read_delays_nobody(exchange):
    there = exchange(2)
    there.submit(there.errand(0))
    assert there.dispatcher.wait(there.submit(there.errand(1, 1, seconds=20.0)), soon(0.1)) is False
    there.answer(1)
    eventually(lambda: not there.dispatcher.wait_until(lambda: False, soon(0.01)))
    assert there.lost == []


def test_a_newer_errand_takes_the_place_of_queued_ones_only_where_it_may(exchange):
    there = exchange(2)
    settled = []

    def errand(number, link=0, replaces=lambda older: older.number % 2 == 1):
        return there.errand(link, number, settled=settled.append, replaces=replaces)

    sent, odd, even, elsewhere = errand(1), errand(3), errand(4), errand(5, link=1)
    there.submit(sent, odd, even, elsewhere)
    assert [e.state for e in (sent, odd, even)] == [SUPERSEDED, SUPERSEDED, QUEUED]
    there.dispatcher.wait_until(lambda: even.state is SENT and elsewhere.state is SENT, soon())
    more = there.submit(errand(7), errand(9), errand(11))
    assert [e.state for e in more] == [SUPERSEDED, SUPERSEDED, QUEUED]
    assert even.state is SENT and elsewhere.state is SENT  # what was sent, or is another link's, is left alone
    assert settled == [sent, odd, *more[:2]]
    assert there.asked() == 4
    there.answer(number=4)
    worker = there.serve(0, count=1)
    assert there.dispatcher.wait([even, *more], soon()) is True
    assert worker.result() == [11]


def test_when_the_first_in_a_queue_is_superseded_the_one_behind_it_is_sent(exchange):
    there = exchange()
    replaceable, behind = there.errand(number=1), there.errand(number=2)
    newer = there.errand(number=3, replaces=lambda older: older is replaceable)
    there.submit(replaceable, behind, newer)
    worker = there.serve(0, count=2)
    assert there.dispatcher.wait([behind, newer], soon(5)) is True
    assert worker.result() == [2, 3]
    assert replaceable.state is SUPERSEDED


def test_an_errand_that_replaces_nothing_waits_its_turn(exchange):
    there = exchange()
    errands = there.submit(there.errand(number=1), there.errand(number=2, replaces=lambda older: False))
    assert [errand.state for errand in errands] == [QUEUED, QUEUED]


def test_superseding_and_deadlines_at_the_same_moment_settle_each_errand_once(exchange):
    """The submitting thread takes errands out of a queue in which the driving one finds them expired."""
    there = exchange()
    counts = {}

    def count(errand):
        counts[errand] = counts.get(errand, 0) + 1

    def errand(number):
        return there.errand(number=number, seconds=0.05, settled=count, replaces=lambda older: True)

    blocker = there.errand(number=0)
    there.submit(blocker)
    there.dispatcher.run_in_background()
    eventually(lambda: blocker.state is SENT)
    errands = []
    until = soon(2.0)
    while time.monotonic() < until:
        errands += there.submit(errand(len(errands) + 1))
        time.sleep(0.0003)
    eventually(lambda: all(errand.final for errand in errands))
    assert set(counts.values()) == {1} and len(counts) == len(errands)
    there.answer(number=0)
    eventually(lambda: blocker.state is ANSWERED)  # whoever drives has survived it


# --- failures -------------------------------------------------------------------------------------------------------


def test_a_queued_errand_that_was_not_sent_in_time_fails_alone(exchange):
    there = exchange()
    first, second, third = there.submit(
        there.errand(number=1), there.errand(number=2, seconds=0.2), there.errand(number=3)
    )
    assert there.dispatcher.wait([second], soon(5)) is True
    assert second.state is FAILED
    assert re.fullmatch(r"worker 0 \(pid \d+\) is busy: push 2 was not sent within 0\.\d s", str(second.error))
    assert isinstance(second.error, WeightSyncTimeout)
    worker = there.serve(0, count=2)
    assert there.dispatcher.wait([first, third], soon(5)) is True
    assert worker.result() == [1, 3]
    assert there.lost == []


def test_a_first_errand_that_expires_before_it_was_sent_lets_the_next_one_go(exchange):
    there = exchange()
    late, next_one = there.submit(there.errand(number=1, seconds=-1.0), there.errand(number=2))
    worker = Call(lambda: [there.asked(), there.answer(number=2)][0])
    there.dispatcher._ready.clear()  # as if nobody had driven until now
    there.dispatcher._expire()
    assert late.state is FAILED
    assert there.dispatcher.wait([next_one], soon(5)) is True
    assert worker.result() == 2


def test_an_answer_that_is_due_and_does_not_come_ends_the_link_and_fails_all_that_was_meant_for_it(exchange):
    there = exchange(2)
    late, queued = there.submit(there.errand(seconds=0.3), there.errand(number=2))
    other = there.errand(1)
    there.submit(other)
    worker = there.serve(1, count=1)
    assert there.dispatcher.wait([late, queued, other], soon(5)) is True
    assert (late.state, queued.state, other.state) == (FAILED, FAILED, ANSWERED)
    assert late.error is queued.error is there.links[0].cause
    assert "lost 0 in push 1" in str(late.error) and "no answer before the deadline" in str(late.error)
    assert (there.lost, there.links[0].state, there.links[1].state) == ([0], LinkState.BROKEN, LinkState.OPEN)
    worker.result()


def test_silence_is_told_from_slowness_by_the_beats(exchange):
    there = exchange(2, heartbeat_timeout=0.5)
    silent, slow = there.submit(there.errand(0), there.errand(1))

    def work():
        for _ in range(15):
            there.workers[1].send("beat")
            time.sleep(0.1)
        there.answer(1)

    worker = Call(work)
    started = time.monotonic()
    assert there.dispatcher.wait([silent], soon(5)) is True
    assert 0.4 < time.monotonic() - started < 1.4
    assert "silent for 0." in str(silent.error) and "heartbeat_timeout" in str(silent.error)
    assert there.dispatcher.wait([slow], soon(5)) is True
    assert (slow.state, there.lost) == (ANSWERED, [0])
    worker.result()


def test_a_worker_that_owes_nothing_may_be_silent(exchange):
    there = exchange(1, heartbeat_timeout=0.1)
    there.dispatcher.wait_until(lambda: False, soon(0.4))
    assert there.lost == []


@pytest.mark.parametrize("moment", ["queued", "sent"])
def test_a_worker_that_closes_fails_its_errands_at_once(exchange, moment):
    there = exchange()
    errands = there.submit(there.errand(number=1), there.errand(number=2))
    if moment == "sent":
        there.dispatcher.wait(errands, soon(0.05))
        assert errands[0].state is SENT
    there.workers[0].close()
    started = time.monotonic()
    assert there.dispatcher.wait(errands, soon(5)) is True
    assert time.monotonic() - started < 1.0
    assert {errand.state for errand in errands} == {FAILED}
    assert there.lost == [0]


def test_an_answer_that_nobody_asked_for_or_of_another_kind_ends_the_link(exchange):
    there = exchange(2)
    (errand,) = there.submit(there.errand(0))
    there.dispatcher.wait([errand], soon(0.05))
    there.workers[0].send("digested", model_id="policy", digest="")
    there.answer(1)
    there.dispatcher.wait_until(lambda: len(there.lost) == 2, soon(5))
    assert sorted(there.lost) == [0, 1]
    assert "it answered 'digested' where ['applied', 'failed'] was due" in str(errand.error)
    assert "it sent 'applied' unasked" in str(there.links[1].cause)


def test_an_errand_for_a_link_that_has_ended_fails_at_once(exchange):
    there = exchange()
    cause = ValueError("dead before")
    there.links[0].end(cause)
    settled = []
    (errand,) = there.submit(there.errand(settled=settled.append))
    assert (errand.state, errand.error, settled) == (FAILED, cause, [errand])
    assert there.dispatcher.wait([errand]) is True


def test_when_somebody_else_ends_a_link_its_errands_fail_and_whoever_waits_is_told(exchange):
    """A replacement has taken the worker's place, for example."""
    there = exchange()
    errands = there.submit(there.errand(number=1), there.errand(number=2))
    there.dispatcher.wait(errands, soon(0.05))
    assert errands[0].state is SENT
    there.links[0].end(ValueError("replaced"))
    assert Call(there.dispatcher.wait, errands).result(2.0) is True
    assert [(errand.state, str(errand.error)) for errand in errands] == [(FAILED, "replaced")] * 2


def test_when_a_link_ends_in_another_thread_whoever_waits_is_told(exchange):
    there = exchange()
    errands = there.submit(there.errand(number=1), there.errand(number=2))
    waiting = Call(there.dispatcher.wait, errands)
    assert there.asked() == 1
    there.links[0].end(ValueError("replaced"))
    assert waiting.result(2.0) is True
    assert {errand.state for errand in errands} == {FAILED}


# --- threads --------------------------------------------------------------------------------------------------------


def test_two_threads_that_wait_at_once_both_get_what_they_wait_for(exchange):
    there = exchange(2)
    first, second = there.errand(0), there.errand(1)
    there.submit(first, second)
    waiting = [Call(there.dispatcher.wait, [errand]) for errand in (first, second)]
    assert (there.asked(0), there.asked(1)) == (1, 1)
    there.answer(1)
    assert waiting[1].result(2.0) is True
    assert waiting[0].running
    third = there.errand(1, 2)  # submitted while another thread drives
    there.submit(third)
    waiting.append(Call(there.dispatcher.wait, [third]))
    assert there.asked(1) == 2
    there.answer(1, 2)
    there.answer(0)
    assert [call.result(2.0) for call in waiting] == [True, True, True]


def test_many_threads_each_with_its_own_errands(exchange):
    there = exchange(3)
    workers = [there.serve(link, count=40) for link in range(3)]

    def push(link):
        for number in range(20):
            assert there.dispatcher.wait(there.submit(there.errand(link, number)), soon(10)) is True
        return True

    callers = [Call(push, link) for link in (0, 0, 1, 1, 2, 2)]
    assert [call.result(20) for call in callers] == [True] * 6
    for worker in workers:
        assert sorted(worker.result()) == sorted([*range(20), *range(20)])


def test_a_background_thread_runs_errands_that_nobody_waits_for_and_rests_in_between(exchange):
    there = exchange()
    for number in range(3):
        (errand,) = there.submit(there.errand(number=number))
        there.dispatcher.run_in_background()
        assert there.asked() == number
        there.answer(number=number)
        eventually(lambda errand=errand: errand.state is ANSWERED)
    assert [thread.name for thread in threading.enumerate()].count("weight-sync-sender") == 1
    eventually(lambda: not there.dispatcher._driving.locked())


def test_waiting_beside_the_background_thread_works_too(exchange):
    there = exchange(2)
    background = there.submit(there.errand(0))
    there.dispatcher.run_in_background()
    assert there.asked(0) == 1
    waiting = Call(there.dispatcher.wait, there.submit(there.errand(1)))
    assert there.asked(1) == 1
    there.answer(1)
    assert waiting.result(2.0) is True
    there.answer(0)
    eventually(lambda: background[0].state is ANSWERED)


@pytest.mark.parametrize("background", [False, True])
def test_closing_fails_everything_and_wakes_whoever_waits_within_a_second(exchange, background):
    there = exchange(2)
    errands = there.submit(there.errand(0, 1), there.errand(0, 2), there.errand(1, 3))
    if background:
        there.dispatcher.run_in_background()
    waiting = [Call(there.dispatcher.wait, [errand]) for errand in errands]
    assert (there.asked(0), there.asked(1)) == (1, 3)
    started = time.monotonic()
    there.dispatcher.close()
    for call in waiting:
        call.result(1.0)
    assert time.monotonic() - started < 1.0
    assert {errand.state for errand in errands} == {FAILED}
    assert all("the sender was shut down" in str(errand.error) for errand in errands)
    there.dispatcher.close()  # twice is fine


def test_closing_while_nothing_is_under_way_ends_the_background_thread(exchange):
    there = exchange()
    there.dispatcher.run_in_background()
    time.sleep(0.1)
    started = time.monotonic()
    there.dispatcher.close()
    assert time.monotonic() - started < 0.5
    assert not [thread for thread in threading.enumerate() if thread.name == "weight-sync-sender"]


def test_whoever_waits_beside_the_background_thread_finds_its_errands_failed_when_it_is_closed(exchange, monkeypatch):
    """The background thread has gone by then, and the thread that closes may not have come to failing them."""
    there = exchange()
    (errand,) = there.submit(there.errand())
    there.dispatcher.run_in_background()
    assert there.asked() == 1
    waiting = Call(there.dispatcher.wait, [errand])
    eventually(lambda: there.dispatcher._waiters)
    told = threading.Event()
    monkeypatch.setattr(there.dispatcher._background, "join", lambda timeout: told.wait(5))
    closing = Call(there.dispatcher.close)
    assert waiting.result(2.0) is True
    assert errand.state is FAILED and "the sender was shut down" in str(errand.error)
    told.set()
    closing.result(2.0)


def test_a_push_that_is_not_settled_when_the_sender_is_shut_down_says_so():
    class Closed:
        def wait(self, errands, deadline):
            return False

    handle = PushHandle(1, 2, Closed(), "push of version 2")
    with pytest.raises(WeightSyncError, match="push of version 2: the sender was shut down"):
        handle.wait()


def test_after_closing_errands_fail_and_do_not_wait(exchange):
    there = exchange()
    there.dispatcher.close()
    (errand,) = there.submit(there.errand())
    Call(there.dispatcher.wait, [errand]).result(1.0)
    assert errand.state is FAILED
    assert "the sender was shut down" in str(errand.error)


# --- links that are given up from outside ---------------------------------------------------------------------------


def test_a_link_is_given_up_by_whoever_drives_and_all_that_is_queued_for_it_fails(exchange):
    there = exchange(2)
    first, queued, other = there.submit(there.errand(0, 1), there.errand(0, 2), there.errand(1, 3))
    waiting = Call(there.dispatcher.wait, [first, queued, other])
    assert there.asked(0) == 1
    there.dispatcher.give_up(there.links[0], ConnectionError("another has taken its place"))
    assert there.links[0].state is LinkState.BROKEN
    assert (first.state, queued.state, other.state) == (FAILED, FAILED, SENT)
    assert "another has taken its place" in str(queued.error)
    there.answer(1, 3)
    assert waiting.result(5) is True


def test_a_link_is_given_up_while_nobody_drives_and_after_the_end(exchange):
    there = exchange(2)
    there.dispatcher.give_up(there.links[0], ConnectionError("not needed"))
    assert there.links[0].state is LinkState.BROKEN and there.lost == [0]
    there.dispatcher.close()
    there.dispatcher.give_up(there.links[1], ConnectionError("not needed"))
    assert there.links[1].state is LinkState.BROKEN


def test_a_link_that_has_ended_is_not_lost_once_more(exchange):
    there = exchange(2)
    there.links[0].end(ValueError("dead before"))
    there.dispatcher.give_up(there.links[0], ConnectionError("not needed"))
    there.dispatcher.wait_until(lambda: False, soon(0.1))
    assert there.lost == [] and "dead before" in str(there.links[0].cause)


def test_what_is_called_off_fails_and_only_links_of_what_was_sent_are_given_up(exchange):
    there = exchange(3)
    before, queued = there.submit(there.errand(0, 1), there.errand(0, 2))
    sent, answered = there.submit(there.errand(1, 2), there.errand(2, 2))
    serving = there.serve(2, count=1)
    assert there.dispatcher.wait([answered], soon(5)) is True
    serving.result()
    there.dispatcher.call_off([queued, sent, answered], WeightSyncError("no more of it"))
    assert [e.state for e in (before, queued, sent, answered)] == [SENT, FAILED, FAILED, ANSWERED]
    assert there.lost == [1]
    assert re.fullmatch(r"worker 0 \(pid 1\): no more of it \(phase: push 2\)", str(queued.error))
    there.asked(0)
    there.answer(0)
    assert there.dispatcher.wait([before], soon(5)) is True


def test_an_answer_that_is_not_the_one_that_is_due_costs_the_link(exchange):
    there = exchange()
    errand = there.errand()

    def check(message):
        raise ChannelClosed(f"version {message['version']}")

    errand.check = check
    there.submit(errand)
    waiting = Call(there.dispatcher.wait, [errand])
    there.asked()
    there.answer(number=7)
    assert waiting.result(5) is True
    assert errand.state is FAILED and "version 7" in str(errand.error)
    assert there.links[0].state is LinkState.BROKEN


def test_a_request_that_no_socket_holds_keeps_nobody_else_waiting(exchange):
    there = exchange(2, heartbeat_timeout=0.5)
    big = there.errand(0, 1)
    fields = {"run": 1, "version": 1, "models": [], "values": {}, "budget": 1.0, "initial": False}
    big.request = lambda link: link.channel.send("push", bytes(30_000_000), **fields)
    small = there.errand(1, 2)
    there.submit(big, small)
    serving = there.serve(1, count=1)
    started = time.monotonic()
    there.dispatcher.wait([small])
    assert time.monotonic() - started < 0.4
    assert serving.result(5) == [2]
    there.dispatcher.wait([big])
    assert 0.4 < time.monotonic() - started < 1.5
    assert big.state is FAILED and "silent" in str(big.error)


def test_a_request_that_no_socket_holds_arrives_as_it_is_read(exchange):
    there = exchange()
    errand = there.errand()
    fields = {"run": 1, "version": 1, "models": [], "values": {}, "budget": 1.0, "initial": False}
    errand.request = lambda link: link.channel.send("push", b"x" * 30_000_000, **fields)
    there.submit(errand)
    waiting = Call(there.dispatcher.wait, [errand])
    message = there.workers[0].receive(soon(10))
    assert message.blob == b"x" * 30_000_000
    there.answer()
    assert waiting.result(5) is True
    assert errand.state is ANSWERED
