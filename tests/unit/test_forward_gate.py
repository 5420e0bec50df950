import copy
import functools
import gc
import inspect
import io
import pickle
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from lightning_weightsync.schemes.forward_gate import gate_forward
from lightning_weightsync.schemes.gate import Gate


class Net(nn.Module):
    """Tells of each call of its ``forward`` whether the gate was held, unless it is being compiled."""

    gate: Gate | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen: list[bool] = []

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        if not torch.compiler.is_compiling() and Net.gate is not None:
            self.seen.append(Net.gate.inside)
        return torch.relu(self.layer(x)) * scale


@pytest.fixture
def gate() -> Iterator[Gate]:
    Net.gate = Gate()
    yield Net.gate
    Net.gate = None


X = torch.ones(1, 2)


def test_forward_holds_the_gate_however_it_is_reached(gate: Gate) -> None:
    net = Net()
    expected = net(X)
    gate_forward(net, gate)
    assert torch.equal(net(X), expected)
    assert torch.equal(net.forward(X, scale=2.0), 2 * expected)
    assert net.seen == [False, True, True]
    assert not gate.inside


def test_an_exception_in_forward_leaves_the_gate(gate: Gate) -> None:
    net = Net()
    gate_forward(net, gate)
    with pytest.raises(RuntimeError, match="shapes"):
        net(torch.ones(1, 3))
    assert not gate.inside


def test_a_switch_waits_for_forward_and_forward_for_a_switch(gate: Gate) -> None:
    inside, leave, order = threading.Event(), threading.Event(), []

    class Slow(nn.Module):
        def forward(self) -> None:
            order.append("forward")
            inside.set()
            assert leave.wait(10)
            order.append("left")

    net = Slow()
    gate_forward(net, gate)
    caller = threading.Thread(target=net)
    caller.start()
    assert inside.wait(10)
    switch = threading.Thread(target=lambda: _alone(gate, lambda: order.append("switch")))
    switch.start()
    leave.set()
    caller.join(10)
    switch.join(10)
    assert order == ["forward", "left", "switch"]


def _alone(gate: Gate, then: Callable[[], object]) -> None:
    with gate.alone():
        then()


class Layers(nn.Module):
    """Its layers hold the same constant; what it returns is the constants that one call has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))

    def forward(self) -> set[float]:
        seen = set()
        for layer in self.layers:
            seen.add(float(layer.weight[0, 0]))
            time.sleep(0)  # lets another thread run
        return seen


def test_no_call_mixes_two_versions(gate: Gate) -> None:
    net = Layers()
    _set_all(net, 0)
    gate_forward(net, gate)
    mixed, calls, end = [], [0, 0], threading.Event()

    def read(number: int) -> None:
        while not end.is_set():
            seen = net()
            calls[number] += 1
            if len(seen) != 1:
                mixed.append(seen)

    readers = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for reader in readers:
        reader.start()
    version = 0
    while min(calls) < 500 or version < 200:
        version += 1
        with gate.alone():
            _set_all(net, version)
        time.sleep(0.0002)  # a switch that waits goes before new calls, so back to back they would keep calls out
    end.set()
    for reader in readers:
        reader.join(10)
    assert not mixed


def _set_all(net: Layers, value: int) -> None:
    with torch.no_grad():
        for layer in net.layers:
            layer.weight.fill_(value)


def test_gating_twice_is_gating_once(gate: Gate) -> None:
    net = Net()
    first, second = gate_forward(net, gate), gate_forward(net, gate)
    net(X)
    first()
    first()
    net(X)
    second()
    net(X)
    assert net.seen == [True, True, False]
    assert "forward" not in net.__dict__


def test_undoing_restores_a_forward_that_the_user_has_put_on_the_instance(gate: Gate) -> None:
    net = Net()
    own = net.forward = lambda x: x + 1
    undo = gate_forward(net, gate)
    assert torch.equal(net(X), X + 1)
    undo()
    assert net.forward is own


def test_undoing_opens_the_gate_for_those_who_have_wrapped_forward_meanwhile(gate: Gate) -> None:
    net = Net()
    undo = gate_forward(net, gate)
    gated = net.forward
    net.forward = lambda x: gated(x)
    undo()
    net(X)
    assert net.seen == [False]


def test_a_second_gate_is_refused(gate: Gate) -> None:
    net = Net()
    gate_forward(net, gate)
    with pytest.raises(ValueError, match="behind another gate"):
        gate_forward(net, Gate())
    with pytest.raises(TypeError, match="not a function"):
        gate_forward(lambda x: x, gate)


def test_the_signature_is_still_there(gate: Gate) -> None:
    net = Net()
    before = inspect.signature(net.forward)
    gate_forward(net, gate)
    assert inspect.signature(net.forward) == before
    assert net.forward.__name__ == "forward"


def test_a_gated_module_is_freed_without_the_garbage_collector(gate: Gate) -> None:
    net = Net()
    undo = gate_forward(net, gate)
    gone = weakref.ref(net)
    gc.disable()
    try:
        del net
        assert gone() is None
    finally:
        gc.enable()
    undo()


def _saved(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "cloudpickle": lambda module: pickle.loads(cloudpickle.dumps(module)),
    "torch.save": _saved,
}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_copy_has_its_own_weights_and_no_gate(gate: Gate, duplicate: Callable[[Any], Any]) -> None:
    net = Net()
    gate_forward(net, gate)
    other = duplicate(net)
    with torch.no_grad():
        other.layer.weight.fill_(1.0)
        other.layer.bias.fill_(1.0)
        assert other(X).tolist() == [[3.0, 3.0]]
    assert other.seen == [False]
    assert net.seen == []
    net(X)
    assert net.seen == [True]


def test_a_copy_may_be_gated_again(gate: Gate) -> None:
    net = Net()
    gate_forward(net, gate)
    other = copy.deepcopy(net)
    Net.gate = Gate()
    gate_forward(other, Net.gate)
    other(X)
    assert other.seen == [True]


def test_tensordict_modules_work_as_before(gate: Gate) -> None:
    net = Net()
    inner = TensorDictModule(net, in_keys=["observation"], out_keys=["hidden"])
    module = TensorDictSequential(inner, TensorDictModule(nn.Identity(), in_keys=["hidden"], out_keys=["action"]))
    gate_forward(module, gate)
    batch = module(TensorDict({"observation": X}, [1]))
    assert torch.equal(batch["action"], module(observation=X)[-1])
    assert net.seen == [True, True]
    gate_forward(inner, gate)  # a part of it may be gated too: the thread enters again
    module(batch)
    assert net.seen == [True, True, True]


class Compiled:
    """A backend that counts what it compiles and looks at the gate when that runs."""

    def __init__(self, gate: Gate, inner: str = "eager") -> None:
        self.gate = gate
        self.inner = inner
        self.compilations = 0
        self.inside: list[bool] = []

    def __deepcopy__(self, memo):
        return self  # Lightning, where some other test has imported it, copies what torch.compile is given

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.compilations += 1
        backend = torch._dynamo.lookup_backend(self.inner)
        compiled = backend(graph, inputs)

        def run(*args: Any) -> Any:
            self.inside.append(self.gate.inside)
            return compiled(*args)

        return run


def _sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh())


def _tensordict_module() -> nn.Module:
    return TensorDictModule(_sequential(), in_keys=["observation"], out_keys=["action"])


def _output(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TensorDict({"observation": X}, [1]))["action"] if hasattr(model, "in_keys") else model(X)


def _switch_twenty_times(model: nn.Module, called: nn.Module, make: Callable[[], nn.Module], gate: Gate) -> None:
    """Both ways to switch: other storage, and other values in it. Each output is that of a fresh module."""
    for version in range(20):
        with gate.alone(), torch.no_grad():
            for parameter in model.parameters():
                if version % 2:
                    parameter.data = torch.full_like(parameter, 0.1 * version)
                else:
                    parameter.fill_(0.1 * version)
        reference = make()
        reference.load_state_dict({name: p.detach().clone() for name, p in model.state_dict().items()})
        torch.testing.assert_close(_output(called), _output(reference))


ORDERS: dict[str, Callable[[nn.Module, Gate, Callable[..., nn.Module]], nn.Module]] = {}


def _order(function: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    ORDERS[function.__name__.strip("_")] = function
    return function


@_order
def _the_wrapper_is_gated(model: nn.Module, gate: Gate, compile_: Callable[..., nn.Module]) -> nn.Module:
    called = compile_(model)
    gate_forward(called, gate)
    return called


@_order
def _the_inside_is_gated_first(model: nn.Module, gate: Gate, compile_: Callable[..., nn.Module]) -> nn.Module:
    gate_forward(model, gate)
    return compile_(model)


@_order
def _the_inside_is_gated_later(model: nn.Module, gate: Gate, compile_: Callable[..., nn.Module]) -> nn.Module:
    called = compile_(model)
    gate_forward(model, gate)
    return called


@_order
def _it_is_compiled_in_place(model: nn.Module, gate: Gate, compile_: Callable[..., nn.Module]) -> nn.Module:
    gate_forward(model, gate)
    model.compile(**compile_.keywords)  # type: ignore[attr-defined]
    return model


@pytest.mark.skipif(sys.platform == "win32", reason="torch.compile needs a compiler that is not there on Windows")
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("make", [Net, _sequential, _tensordict_module], ids=["net", "sequential", "tensordict"])
@pytest.mark.parametrize("fullgraph", [False, True], ids=["breaks allowed", "fullgraph"])
def test_compiled_once_and_run_inside_the_gate(
    gate: Gate, make: Callable[[], nn.Module], order: Callable[..., nn.Module], fullgraph: bool
) -> None:
    torch._dynamo.reset()
    Net.gate = None
    backend = Compiled(gate)
    model = make()
    compile_ = functools.partial(torch.compile, backend=backend, fullgraph=fullgraph)
    called = order(model, gate, compile_)
    if fullgraph and order is _the_inside_is_gated_later and make is _sequential:
        with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
            _output(called)
        return
    _switch_twenty_times(model, called, make, gate)
    assert backend.compilations == 1
    assert backend.inside == [True] * 20


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles with g++")
def test_inductor_compiles_once(gate: Gate) -> None:
    torch._dynamo.reset()
    Net.gate = None
    backend = Compiled(gate, "inductor")
    model = Net()
    called = torch.compile(model, backend=backend)
    gate_forward(called, gate)
    _switch_twenty_times(model, called, Net, gate)
    assert backend.compilations == 1
    assert backend.inside == [True] * 20


def test_a_compiled_wrapper_gets_its_forward_back(gate: Gate) -> None:
    torch._dynamo.reset()
    Net.gate = None
    backend = Compiled(gate)
    called = torch.compile(Net(), backend=backend)
    before = called.forward
    undo = gate_forward(called, gate)
    _output(called)
    undo()
    assert called.forward is before
    _output(called)
    assert (backend.compilations, backend.inside) == (1, [True, False])
