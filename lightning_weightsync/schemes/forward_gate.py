"""How is a model gated whose callers know nothing of gates? Its own ``forward`` holds the gate, shared.

What this covers is the outermost module's ``forward``, however it is reached: ``model(...)`` or ``model.forward(...)``,
in any thread, of a plain module, a ``TensorDictModule`` or a ``torch.compile``d one. It does **not** cover

* submodules, and methods other than ``forward`` (``agent.get_value``), that are called directly;
* hooks of the outermost module itself: they run before ``forward`` is entered, or after it is left;
* what the caller makes of the output afterwards: several calls of one batch may see several versions;
* a CUDA graph that was captured around the call: replaying it calls no ``forward``;
* tensors that the caller read from the module before the call.

Whoever needs more says ``with scheme.gate:`` around it; the gate may be entered again inside.

The gate is never part of a compiled region: it breaks the graph around the outermost ``forward``, whose inside is
compiled as it would be without it. It makes no difference whether ``torch.compile`` or the gate comes first, and either
of the compiled wrapper and the module inside may be gated. One order is refused, by torch, and loudly: gating what is
*inside* of a wrapper that was made with ``fullgraph=True``. Gate the wrapper then.

Copies are not gated: a module that comes out of ``copy.deepcopy``, ``pickle`` or ``torch.save`` has its own ``forward``
back.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_weightsync.schemes.gate import Gate

_changing = threading.Lock()


def gate_forward(model: nn.Module, gate: Gate) -> Callable[[], None]:
    """Have ``model.forward`` hold ``gate`` (shared) whenever it runs.

    Calling it again with the same gate changes nothing; the gate goes when every caller has undone it.

    Args:
        model: The outermost module, the one that its users call. See the module's text for what is not covered.
        gate: Whose exclusive side the weights are switched under.

    Returns:
        A function that undoes it; further calls of that function do nothing.

    Raises:
        TypeError: The model is not an ``nn.Module``.
        ValueError: The model is behind another gate, so two receivers want to switch its weights.

    Example:
        >>> import torch
        >>> gate, model = Gate(), nn.Linear(1, 1)
        >>> undo = gate_forward(model, gate)
        >>> _ = model.register_forward_pre_hook(lambda *_: print(gate.inside))
        >>> _ = model(torch.zeros(1))
        False
        >>> undo()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"only the forward of an nn.Module can be gated, not a {type(model).__name__}")
    hidden = _hide_from_compiler()
    with _changing:
        entrance = model.__dict__.get("forward")
        if not isinstance(entrance, _Entrance):
            entrance = _Entrance(model, gate, hidden(gate))
            model.forward = entrance
        elif entrance.gate is not gate:
            raise ValueError(
                f"this {type(model).__name__} is behind another gate already: its weights are switched by a receiver "
                "of another context"
            )
        entrance.users += 1
    undone = False

    def undo() -> None:
        nonlocal undone
        with _changing:
            if undone:
                return
            undone = True
            entrance.users -= 1
            if not entrance.users:
                entrance.remove()

    return undo


class _Entrance:
    """Stands in for the ``forward`` of one module.

    The module is held weakly, so that it is freed when its last user drops it and not at the next garbage collection.
    """

    def __init__(self, module: nn.Module, gate: Gate, held: contextlib.AbstractContextManager[object]) -> None:
        self.gate = gate
        self.users = 0
        self._held = held
        self._module = weakref.ref(module)
        self._before: Callable[..., Any] | None = module.__dict__.get("forward")
        # Callers look at a policy's signature to find its inputs. Attributes are not copied: torch.compile leaves some
        # on its forward by which it finds the function inside, and would go round the gate.
        forward = module.forward
        functools.update_wrapper(self, forward, updated=())
        del self.__wrapped__  # type: ignore[attr-defined]
        with contextlib.suppress(TypeError, ValueError):
            self.__signature__ = inspect.signature(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._held:
            if self._before is not None:
                return _through(self._before, *args, **kwargs)
            module = self._module()
            if module is None:
                raise ReferenceError(
                    "the module that this forward belongs to is gone: keep the module, not its forward"
                )
            return _through(type(module).forward, module, *args, **kwargs)

    def remove(self) -> None:
        """Give the module its own ``forward`` back."""
        self._held = contextlib.nullcontext()  # somebody may have wrapped this object, and go on calling it
        module = self._module()
        if module is None or module.__dict__.get("forward") is not self:
            return
        if self._before is None:
            del module.forward
        else:
            module.forward = self._before

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # The copy of the module exists when this is evaluated, and does not have its attributes yet: what is found is
        # the forward of its class, bound to the copy.
        return (getattr, (self._module(), "forward")) if self._before is None else (_itself, (self._before,))


def _through(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The frame where ``torch.compile`` starts: it ignores frames of ``torch.nn``, such as ``Sequential.forward``."""
    return forward(*args, **kwargs)


def _itself(value: Any) -> Any:
    return value


@functools.cache
def _hide_from_compiler() -> Callable[[Gate], contextlib.AbstractContextManager[object]]:
    """Have ``torch.compile`` leave the frame with the gate alone, and go on with the frames inside.

    Returns:
        What makes of a gate one that is entered and left without ``torch.compile`` looking at how that is done.

    ``torch.compiler.disable(recursive=False)`` is no substitute: it looks into the function that it is given, finds a
    context manager that it does not know, and ``fullgraph=True`` becomes an error.
    """
    from torch._dynamo.decorators import skip

    skip(_Entrance.__call__)

    class Hidden(contextlib.AbstractContextManager[object]):
        def __init__(self, gate: Gate) -> None:
            self._gate = gate

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def __enter__(self) -> None:
            self._gate.__enter__()

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def __exit__(self, *exc: object) -> None:
            self._gate.__exit__(*exc)

    return Hidden
