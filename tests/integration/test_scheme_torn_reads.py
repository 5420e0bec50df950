"""No policy call ever sees two versions: every layer holds one constant, so that any mixture shows.

With long runs, which are marked slow: 20,000 calls while 500 versions are pushed back to back.
"""

import copy
import threading
import time

import pytest
import torch
from torch import nn

from tests.helpers import schemes
from tests.helpers.holdings import holdings, memory_file_at, resident_bytes
from tests.helpers.leaves import assert_same_bits, fill, leaves_of
from tests.helpers.schemes import layers, over_shared_memory
from tests.helpers.threads import eventually

LENGTHS = [pytest.param((2_000, 100), id="short"), pytest.param((20_000, 500), id="long", marks=pytest.mark.slow)]


def constant_layers(size=64, depth=6):
    """Parameters and a buffer; two pages and more each."""
    net = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(depth)))
    net.register_buffer("level", torch.zeros(size))
    fill(net, 0.0)
    return net


def start_callers(box, *, count, scribbles):
    """Threads that call the policy under the gate, and look at every leaf; ``scribbles``: then write into them."""
    box.stop, box.mixed, box.calls, box.versions, box.slots = threading.Event(), [], [0] * count, [], {}
    box.scheme.add_applied_hook(note_slot(box))

    def call(number):
        net, gate = box.model, box.scheme.gate
        last = -1
        x = torch.ones(1, 64)
        while not box.stop.is_set():
            with gate, torch.no_grad():
                version = gate.version
                found = {layer(x)[0, 0].item() / 64 for layer in net}
                found.add(net.level[0].item())
                found.update(value for p in net.parameters() for value in (p[0, 0].item(), p[-1, -1].item()))
                if version > 0 and found != {float(version)} and not (scribbles and found <= {float(version), -5.0}):
                    box.mixed.append((version, found))
                if version < last:
                    box.mixed.append(("backwards", last, version))
                last = version
                if scribbles:
                    for parameter in net.parameters():
                        parameter[3:5].fill_(-5.0)
                        parameter[-1, -1] = -5.0
            box.calls[number] += 1
            time.sleep(0)

    box.threads = [threading.Thread(target=call, args=(number,), name=f"inference {number}") for number in range(count)]
    for thread in box.threads:
        thread.start()


def note_slot(box):
    """What the weights lie in after each switch; all of them are the new version, to the last element."""

    def hook(model, version):
        slot = memory_file_at(model[0].weight.data_ptr())
        box.slots[slot] = box.slots.get(slot, 0) + 1
        box.versions.append(version)
        for leaf in model.state_dict().values():
            if not bool((leaf == version).all()):
                box.mixed.append(("at the switch", version, leaf.unique().tolist()))

    return hook


def stop_callers(box):
    box.stop.set()
    for thread in box.threads:
        thread.join(10)
    return {
        "mixed": box.mixed[:5],
        "calls": box.calls,
        "versions": box.versions,
        "slots": list(box.slots.values()),
    }


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("scribbles", [False, True], ids=["reads only", "writes its weights"])
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "async"])
def test_no_call_sees_two_versions_while_pushes_come_back_to_back(connect, length, scribbles, blocking):
    calls, pushes = length
    connected = connect(source := constant_layers(), 1, sync=False)
    process = connected.processes[0]
    process.call(start_callers, count=2, scribbles=scribbles)
    version, deadline = 0, time.monotonic() + 110
    while version < pushes or sum(process.call(lambda box: box.calls)) < calls:
        assert time.monotonic() < deadline
        for _ in range(20):
            version += 1
            fill(source, float(version))
            if blocking:
                connected.scheme.send()
            else:
                connected.scheme.send_async()
    fill(source, float(version + 1))
    connected.push()
    found = process.call(stop_callers)
    assert found["mixed"] == []
    assert min(found["calls"]) > 0 and sum(found["calls"]) >= calls
    assert found["versions"][-1] == connected.scheme.version == version + 1
    assert found["versions"] == sorted(set(found["versions"]))
    if blocking:
        assert len(found["versions"]) == version + 1


@over_shared_memory
@pytest.mark.parametrize("scribbles", [False, True], ids=["reads only", "writes its weights"])
def test_every_slot_is_used_a_hundred_times_and_more(connect, scribbles):
    connected = connect(source := constant_layers(), 2, sync=False)
    for process in connected.processes:
        process.call(start_callers, count=1, scribbles=scribbles)
    for version in range(1, 401):
        fill(source, float(version))
        connected.scheme.send()
    for process in connected.processes:
        found = process.call(stop_callers)
        assert found["mixed"] == []
        assert len(found["slots"]) >= 2  # they were switched
        assert min(found["slots"]) >= 100
        assert found["versions"] == list(range(1, 401))


# --- what a switch keeps --------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(40, 40)
        self.decoder = nn.Linear(40, 40, bias=False)
        self.decoder.weight = self.encoder.weight
        self.frozen = nn.Parameter(torch.zeros(2000), requires_grad=False)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def remember(box):
    box.parameters = dict(box.model.named_parameters(remove_duplicate=False))


def compare(box):
    now = dict(box.model.named_parameters(remove_duplicate=False))
    return {
        "identity": all(now[name] is parameter for name, parameter in box.parameters.items()),
        "requires_grad": [name for name, parameter in now.items() if not parameter.requires_grad],
        "tied": now["decoder.weight"] is now["encoder.weight"],
        "leaf": all(parameter.is_leaf for parameter in now.values()),
        "switched": all(memory_file_at(parameter.data_ptr()) is not None for parameter in now.values()),
        "level": now["decoder.weight"].unique().tolist(),
    }


@pytest.mark.parametrize("options", [{}, {"apply": "copy"}, {"max_slots": 1}], ids=["auto", "copy", "max_slots=1"])
def test_parameters_keep_their_identity_and_ties_over_many_pushes(connect, options):
    connected = connect(source := Tied(), 2, sync=False, **options)
    for process in connected.processes:
        process.call(remember)
    # Or copied. Over the network receivers have slots of their own, however few the sender has.
    switched = options == {} or (connect.same_host == "network" and "max_slots" in options)
    for value in range(1, 6):
        fill(source, float(value))
        connected.push()
        for process in connected.processes:
            assert process.call(compare) == {
                "identity": True, "requires_grad": ["frozen"], "tied": True, "leaf": True, "level": [float(value)],
                "switched": switched,
            }  # fmt: skip
    for worker in range(2):
        assert_same_bits(connected.leaves(worker), leaves_of(source))
    if options == {"max_slots": 1}:
        assert len(connected.scheme._pool) == 1


def test_weights_may_travel_in_another_dtype_and_the_receiver_keeps_its_own(connect):
    source = nn.Linear(30, 30)
    connected = connect(source, 2, sync=False, wire_dtype=torch.bfloat16)
    with torch.no_grad():
        source.weight.normal_()
    before = leaves_of(source)
    connected.push()
    for worker in range(2):
        expected = {name: leaf.bfloat16().float() for name, leaf in before.items()}
        assert_same_bits(connected.leaves(worker), expected)
    assert_same_bits(leaves_of(source), before)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@over_shared_memory
def test_a_compiled_policy_follows_twenty_pushes_with_one_compilation(connect, backend):
    def compile_and_count(box):
        import torch._inductor.config
        from torch._dynamo.testing import CompileCounterWithBackend

        torch._inductor.config.compile_threads = 1

        box.counter = CompileCounterWithBackend(backend)
        box.compiled = torch.compile(box.model, backend=box.counter)

    def call(box, x):
        with box.scheme.gate, torch.no_grad():
            return box.compiled(x)

    connected = connect(source := nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), sync=False)
    process = connected.processes[0]
    process.call(compile_and_count)
    x = torch.randn(4, 8)
    for _ in range(20):
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.normal_()
        connected.push()
        torch.testing.assert_close(process.call(call, x, timeout=100), source(x).detach())
    assert process.call(lambda box: box.counter.frame_count) == 1
    process.kill()  # a compiler leaves threads and pipes of its own


def test_a_hundred_pushes_change_nothing_of_the_trainers(connect):
    source = layers(16)
    optimizer = torch.optim.Adam(source.parameters())
    source(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    connected = connect(source, sync=False)
    module, state = leaves_of(source), copy.deepcopy(optimizer.state_dict())
    grads = [parameter.grad.clone() for parameter in source.parameters()]
    versions = [parameter._version for parameter in source.parameters()]
    rng = torch.get_rng_state()
    for number in range(100):
        connected.scheme.send() if number % 2 else connected.scheme.send_async()
    connected.push()
    assert_same_bits(leaves_of(source), module)
    now = optimizer.state_dict()
    assert now["param_groups"] == state["param_groups"]
    for index, entry in state["state"].items():
        assert_same_bits(now["state"][index], entry)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(source.parameters(), grads, strict=True))
    assert [parameter._version for parameter in source.parameters()] == versions
    assert torch.equal(torch.get_rng_state(), rng)


# --- what is left afterwards ----------------------------------------------------------------------------------------


def test_a_receivers_model_is_its_own_after_shutdown(connect):
    connected = connect(source := constant_layers(), 2, sync=False)
    fill(source, 3.0)
    connected.push()
    connected.processes[0].call(schemes.shutdown)
    connected.scheme.shutdown()
    connected.processes[1].call(schemes.shutdown)
    fill(source, 4.0)
    for process in connected.processes:
        assert process.call(
            lambda box: {v for leaf in box.model.state_dict().values() for v in leaf.unique().tolist()}
        ) == {3.0}

    def train(box):
        box.model(torch.ones(1, 64)).sum().backward()
        torch.optim.SGD(box.model.parameters(), lr=1.0).step()
        return box.model[0].weight[0, 0].item()

    assert connected.processes[0].call(train) != 3.0
    held = connected.processes[1].call(lambda box: box.model[0].weight[0, 0].item())
    assert held == 3.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_pushes_leave_memory_descriptors_and_threads_as_they_were(connect):
    def everywhere():
        return [measure(None), *(process.call(measure) for process in connected.processes)]

    connected = connect(source := nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4)), 2, sync=False)
    for _ in range(500):
        connected.scheme.send()
        connected.scheme.send_async()
    connected.push()
    pool = connected.scheme._pool
    before, slots = everywhere(), len(pool)
    for _ in range(5_000):
        connected.scheme.send()
        connected.scheme.send_async()
    connected.push()
    after = everywhere()
    assert len(pool) <= pool.max_slots
    # A slot is made when all others are in use, now or later, and has a file, in the sender only.
    before[0][2].extend(["/memfd"] * (len(pool) - slots if pool.shared else 0))
    for now, then in zip(after, before, strict=True):
        assert now[0] - then[0] < 10 << 20
        assert now[1] == then[1]
        assert sorted(now[2]) == sorted(then[2])
    eventually(lambda: connected.versions == [connected.scheme.version] * 2)
    assert_same_bits(connected.leaves(), leaves_of(source))


def measure(box):
    held = holdings()
    threads = [name for name in held.threads if name != "call" and not name.startswith("reader of")]
    return resident_bytes(), sorted(threads), sorted(held.descriptors)
