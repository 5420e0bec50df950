"""What does a receiver hold for one destination? Its live leaves, and how a staged slot becomes what they hold.

Where it is safe, a leaf is *switched*: it lives in a window, in which slot after slot is shown, and nothing is copied.
Where it is not, the slot is copied into it. Either way the ``Parameter`` objects stay the same, views of them follow,
and a backward pass that needs the old values raises. When to apply or roll back is the transaction's business.

Switched are parameters on the CPU that have the sender's dtype, own their whole storage contiguously, are not in
shared memory and are written by nobody's ``load_state_dict``. They move into the window with the first version: only
views that were taken before that do not follow.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from lightning_weightsync.errors import WeightSyncError
from lightning_weightsync.schemes.extra_state import stateful_parts
from lightning_weightsync.schemes.leaves import Leaves
from lightning_weightsync.schemes.matching import copy_may_fail, has_form_of_bytes, match, owns_its_memory
from lightning_weightsync.schemes.strategy import (
    Weights,
    WeightStrategy,
    clean_name,
    load_state,
    nested,
    same_values,
    unwrap,
)
from lightning_weightsync.schemes.writing import wait_for_devices, write
from lightning_weightsync.transports.layout import Leaf, WeightLayout, digest_of
from lightning_weightsync.transports.memory import SlotMemory
from lightning_weightsync.transports.window import Window


class StagedModel:
    """One destination on the receiving side.

    Args:
        model_id: The destination.
        target: The live model (or a TensorDict or dict of live tensors).
        strategy: How leaves are found and written.
        strict: Whether every leaf of the target must be in the sender's layout.
        may_switch: Whether leaves may be switched at all (``apply="auto"``).

    Attributes:
        layout: The sender's layout, once ``bind`` has accepted it.
        applied_hooks: Called with ``(target, version)`` while the gate is still held alone.
    """

    def __init__(
        self,
        model_id: str,
        target: Weights,
        strategy: WeightStrategy,
        *,
        strict: bool = True,
        may_switch: bool = False,
    ) -> None:
        self.model_id = model_id
        self.target = target
        self.strategy = strategy
        self.strict = strict
        self.applied_hooks: list[Callable[[Any, int], None]] = []
        self.layout = WeightLayout((), {})
        self._may_switch = may_switch and strategy.extract_as == "tensordict" and isinstance(target, nn.Module)
        self._casts = False
        self._extra_keys: list[str] = []
        self._leaves: Leaves | None = None
        self._extra_parts: dict[str, nn.Module] = {}
        self._window: Window | None = None
        self._entered = False
        self._switched: list[tuple[Tensor, str]] = []
        self._in_window: list[Tensor] = []  # the leaves of `_switched`
        self._copied: list[tuple[Tensor, str]] = []
        self._copy_may_fail = False
        self._views: dict[int, list[Tensor]] = {}
        self._undo: list[Callable[[], None]] = []
        self._applied: SlotMemory | None = None  # and in force, once it is kept
        self._in_force: SlotMemory | None = None

    @property
    def range_at_rest(self) -> tuple[int, int] | None:
        """Address and bytes of what holds all weights, where a switch consists in other bytes being there; or None."""
        if self._window is None or not self._entered or self._copied or self._extra_parts or self.applied_hooks:
            return None
        return self._window.memory.data_ptr(), self.layout.nbytes

    @property
    def holds_slot(self) -> bool:
        """Whether leaves live in the slot that was applied last, so that nobody may write it."""
        return bool(self._switched)

    def bind(
        self,
        layout: WeightLayout,
        *,
        extra_keys: Collection[str] = (),
        casts: bool = False,
        strict: bool | None = None,
        may_hold: bool = True,
    ) -> None:
        """Accept a sender's layout.

        Args:
            layout: What the sender has.
            extra_keys: ``state_dict`` keys of the extra states that travel with it.
            casts: Whether floating-point leaves may be of another floating dtype (``wire_dtype``).
            strict: Whether the sender is strict too.
            may_hold: Whether the sender has slots enough for one to stay in force here; if not, every leaf is copied.

        Raises:
            LayoutMismatchError: The target does not have the same leaves; what was bound before is bound still.
        """
        if layout != self.layout:
            self._leave_window(self._in_window)
            self._window = None
        before = self._casts, self.strict, self._may_switch, self._extra_keys
        self._casts = casts
        self.strict = self.strict if strict is None else strict and self.strict
        self._may_switch = self._may_switch and may_hold
        self._extra_keys = sorted(extra_keys)
        try:
            self._leaves = self._find_leaves(layout)
        except BaseException:
            self._casts, self.strict, self._may_switch, self._extra_keys = before
            raise
        self._may_switch = bool(self._switched)  # the sender is told now whether slots are held here, and never again
        self.layout = layout

    def rebind(self, target: nn.Module) -> None:
        """Hold another module from now on: a copy, perhaps on another device. The caller holds the gate alone.

        If a layout is bound, the new target takes over what the old one holds; that keeps it, in memory of its own.

        Args:
            target: Has the old one's leaves and extra states.

        Raises:
            LayoutMismatchError: It has others; the old target stays bound.
        """
        before, self.target = self.target, target
        if self._leaves is None:
            return
        try:
            self.strategy.apply_weights(target, before)
            held = stateful_parts(before)
            for key, part in stateful_parts(target).items():
                if key in held:
                    part.set_extra_state(held[key].get_extra_state())
            self._leaves = self._find_leaves(self.layout)
        except BaseException:
            self.target = before
            raise

    def apply(self, slot: SlotMemory, extra: dict[str, Any], *, keep_backup: bool) -> None:
        """Make the live leaves hold what the slot holds. The caller holds the gate alone.

        Args:
            slot: The staged version (``layout.nbytes`` long); not written again while ``holds_slot``.
            extra: The extra state of submodules, by ``state_dict`` key.
            keep_backup: Keep what is needed for ``roll_back``. Left out, it is kept all the same where something here
                can fail after something else has been written.
        """
        self._undo = []
        self._applied = slot
        if self._leaves is None or self._leaves.stale() or (self._window is not None and self._window.moved):
            # `self.mean = new_mean` has put another tensor in the place of a buffer, for example.
            self._leaves = self._find_leaves(self.layout)
        keep_backup = keep_backup or self._copy_may_fail or bool(self.applied_hooks) or bool(self._extra_parts)
        if self.strategy.extract_as == "state_dict" and isinstance(self.target, nn.Module):
            views, named = self.layout.views(slot.memory), self.layout.by_name
            self._undo.append(_remember(self.target))
            load_state(
                self.target, {n: views[named[n].name] for n in self._leaves.tensors if n in named}, strict=self.strict
            )
        else:
            if keep_backup:
                self._back_up_copied()
            if self._switched:
                window = self._enter_window()
                self._undo.append(window.restore)
                window.show(slot.descriptor, keep_aside=keep_backup)
                increment_version(self._in_window)
            if self._copied:
                copied = [leaf for leaf, _ in self._copied]
                write(copied, self._views_of(slot.memory))
                wait_for_devices(copied)
        for key, part in self._extra_parts.items():
            if key in extra:
                self._undo.append(_restore_extra(part))
                part.set_extra_state(extra[key])

    def follow(self) -> bool:
        """The sender has written the slot in force again. The caller holds the gate.

        Returns:
            Whether weights lie elsewhere now: others had been put in their place since the last version, and hold it
            only from now on.

        Raises:
            LayoutMismatchError: There are other leaves than were agreed on; those that were hold the version, if
                ``shows_slot``.
        """
        if self._leaves is None or self._in_force is None:
            return False
        increment_version(self._in_window)
        if not self._leaves.stale() and not (self._window is not None and self._window.moved):
            return False
        with torch.inference_mode(False):  # or what is moved would be an inference tensor from then on
            self.apply(self._in_force, {}, keep_backup=False)
        self.keep()
        return True

    @property
    def shows_slot(self) -> bool:
        """Whether every leaf that was agreed on is one that lives in the slot in force."""
        live = self.strategy.leaves(self.target)
        return all(live.get(name) is leaf and self._is_in_window(leaf) for leaf, name in self._switched)

    def roll_back(self) -> None:
        """Restore what the live leaves held before ``apply``. The caller holds the gate alone."""
        self._applied = None
        while self._undo:
            self._undo.pop()()

    def keep(self) -> None:
        """The version is in force: the one before is not needed any more."""
        self._undo = []
        if self._window is not None:
            self._window.drop_aside()
        self._in_force, self._applied = (self._applied if self._switched else None), None

    def forget(self, slot: SlotMemory) -> None:
        """This slot is not going to be used again: let go of views of it."""
        self._views.pop(slot.memory.data_ptr(), None)

    def detach(self) -> None:
        """Move leaves out of the window into memory of their own. The caller holds the gate alone."""
        self._leave_window(self._in_window)
        self._window = None
        self._switched, self._in_window, self._copied = [], [], self._switched + self._copied
        self._may_switch = False
        self._views = {}
        self._undo = []
        self._in_force = self._applied = None

    def digest(self) -> str:
        """SHA-256 over the live leaves, in layout order, each stored leaf once."""
        live = self.strategy.leaves(self.target)
        return digest_of(live[leaf.name] for leaf in self.layout.leaves if leaf.name in live)

    def digest_of_applied(self, slot: SlotMemory) -> str:
        """SHA-256 over what ``apply`` has brought from a slot, in the dtypes that travelled.

        What ``load_state_dict`` makes of its values is its own business: there it is what it was given.

        Raises:
            WeightSyncError: A leaf that was cast on its way does not hold the slot's value.
        """
        views = self.layout.views(slot.memory)
        if self.strategy.extract_as == "state_dict":
            return digest_of(views.values())
        live = self._leaves.tensors if self._leaves is not None else {}
        applied = []
        for leaf in self.layout.leaves:
            tensor, view = live.get(leaf.name), views[leaf.name]
            if tensor is not None and tensor.dtype != view.dtype:
                if not same_values(tensor, view.to(tensor.device, tensor.dtype)):
                    raise WeightSyncError(f"{self.model_id!r}: {leaf.name} does not hold what was pushed")
                tensor = None
            applied.append(view if tensor is None else tensor)
        return digest_of(applied)

    def copy(self) -> TensorDict:
        """A copy of the live leaves as a nested TensorDict."""
        return nested({name: leaf.detach().clone() for name, leaf in self.strategy.leaves(self.target).items()})

    def _find_leaves(self, layout: WeightLayout) -> Leaves:
        """Match the live leaves with the layout's, and sort them into switched and copied ones."""
        leaves = Leaves(self.target, self.strategy)
        found = match(self.model_id, leaves, layout, extra_keys=self._extra_keys, casts=self._casts, strict=self.strict)
        self._extra_parts = found.extra_parts
        self._views = {}
        before = self._in_window
        self._switched, self._copied, self._copy_may_fail = [], [], False
        for tensor, leaf in found.pairs:
            if self._may_switch and self._is_switchable(tensor, leaf):
                self._switched.append((tensor, leaf.name))
            else:
                self._copied.append((tensor, leaf.name))
                self._copy_may_fail |= copy_may_fail(tensor, leaf)
        self._in_window = [leaf for leaf, _ in self._switched]
        staying = {id(leaf) for leaf in self._in_window}
        self._leave_window([leaf for leaf in before if id(leaf) not in staying])
        self._entered = False
        return leaves

    def _is_switchable(self, tensor: Tensor, leaf: Leaf) -> bool:
        return has_form_of_bytes(tensor, leaf) and (self._is_in_window(tensor) or owns_its_memory(tensor))

    def _is_in_window(self, tensor: Tensor) -> bool:
        window = self._window
        if window is None or window.moved or tensor.device != window.memory.device:
            return False
        return tensor.untyped_storage().data_ptr() == window.memory.data_ptr()

    def _enter_window(self) -> Window:
        """Have all switched leaves live in the window, in which something is shown next.

        Until the first version they stay where they are, and they return there if it fails: a ``connect`` that fails
        leaves the model as it was.
        """
        if self._entered and self._window is not None:
            return self._window
        if self._window is None or self._window.moved:
            self._window = Window(self.layout.nbytes)
        views = self.layout.views(self._window.memory)
        for leaf, name in self._switched:
            if leaf.data_ptr() != views[name].data_ptr():
                self._undo.append(partial(setattr, leaf, "data", leaf.data))
                leaf.data = views[name]
        if self._leaves is not None:
            self._leaves.remember_forms()
        self._entered = True
        return self._window

    def _leave_window(self, leaves: Iterable[Tensor]) -> None:
        """Give leaves memory of their own again; tied ones stay tied."""
        own: dict[int, Tensor] = {}
        for leaf in leaves:
            if self._is_in_window(leaf):
                leaf.data = own.setdefault(leaf.data_ptr(), leaf.data.clone())

    def _views_of(self, slot: Tensor) -> list[Tensor]:
        """The slot's leaves as the copied ones need them; made once per slot."""
        known = self._views.get(slot.data_ptr())
        if known is None:
            views = self.layout.views(slot)
            known = self._views[slot.data_ptr()] = [views[name] for _, name in self._copied]
        return known

    def _back_up_copied(self) -> None:
        if self._copied:
            copied = [leaf for leaf, _ in self._copied]
            values = [leaf.detach().clone() for leaf in copied]
            self._undo.append(lambda: write(copied, values))


def _remember(module: nn.Module) -> Callable[[], None]:
    """What puts a module back into the state that it is in now, if loading another one fails half-way or later."""
    module = unwrap(module)
    state = {clean_name(key): value.detach().clone() for key, value in module.state_dict().items() if _is_tensor(value)}
    tensors: list[tuple[dict[str, Any], str, Tensor, Tensor]] = [
        (registry, name, tensor, tensor.detach().clone())
        for part in module.modules()
        for registry in (part._parameters, part._buffers)
        for name, tensor in registry.items()
        if tensor is not None
    ]

    def put_back() -> None:
        # Through its own hooks first, for what it derives from its tensors; they may be what failed, or not invertible.
        with contextlib.suppress(Exception):
            load_state(module, state, strict=True)
        for registry, name, tensor, _ in tensors:
            registry[name] = tensor
        write([tensor for _, _, tensor, _ in tensors], [value for _, _, _, value in tensors])

    return put_back


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)  # an extra state is any object


def _restore_extra(part: nn.Module) -> Callable[[], None]:
    before = copy.deepcopy(part.get_extra_state())
    return lambda: part.set_extra_state(before)
