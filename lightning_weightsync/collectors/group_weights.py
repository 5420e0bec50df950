"""What can be pushed to a group's workers, and how? Weights of its destinations, and values that travel with them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import nn

from lightning_weightsync.collectors.group_record import GroupRecord, GroupState
from lightning_weightsync.collectors.values import canonical
from lightning_weightsync.errors import WeightSyncError
from lightning_weightsync.schemes.base import WeightSyncScheme
from lightning_weightsync.schemes.push import PerWorker
from lightning_weightsync.schemes.strategy import Weights
from lightning_weightsync.transports.pushing import PushHandle, failure

log = logging.getLogger(__name__)


class GroupWeights(GroupRecord):
    """The part of a ``CollectorGroup`` that is the target of pushes.

    Args:
        weight_sync_schemes: Destination -> scheme.
        seed: See ``GroupRecord``.
    """

    def __init__(self, weight_sync_schemes: dict[str, WeightSyncScheme], seed: int | None) -> None:
        super().__init__(seed)
        self.weight_sync_schemes = weight_sync_schemes
        self.weights_getter: Callable[[], Mapping[str, Weights | PerWorker]] | None = None
        self._sources: dict[str, Weights | PerWorker] = {}

    def connect(self, weights_dict: Mapping[str, Weights | PerWorker] | None = None) -> None:
        """See ``CollectorGroup``."""
        raise NotImplementedError

    def update_policy_weights_(
        self,
        policy_or_weights: Weights | PerWorker | None = None,
        *,
        weights: Weights | PerWorker | None = None,
        policy: Weights | None = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Weights | PerWorker] | None = None,
        worker_ids: int | Sequence[int] | None = None,
    ) -> None:
        """Push one version; returns when every targeted worker has applied it. The first call connects, as version 0.

        A worker that is lost meanwhile, or being replaced, is no error as long as it is replaced: its replacement
        starts from this version. It is not waited for.

        Args:
            policy_or_weights: A module, TensorDict or dict of tensors; a dict with int keys gives each worker its
                own. Without any weights, what was given to ``connect`` is read again.
            weights: The same, by name.
            policy: The same, by name.
            model_id: The destination; needed only where the group has several.
            weights_dict: Several destinations as one version, applied together or not at all in each worker.
            worker_ids: ``None`` for all, one index, or several.

        Raises:
            WeightSyncError: ``.failed`` maps each worker that did not apply it, and will not, to the cause; all others
                did.
            LayoutMismatchError: The weights are not those of ``connect``; nothing was sent.
            WeightSyncTimeout: No slot for the weights became free within ``timeout``; nothing was sent.
            ValueError: An unknown destination or worker; or weights that are given twice, or not at all.
            RuntimeError: The group is not started.
        """
        given = [each for each in (policy_or_weights, weights, policy) if each is not None]
        if len(given) > 1:
            raise ValueError("give the weights once: as policy_or_weights, weights or policy")
        pushed = self._destinations(given[0] if given else None, model_id, weights_dict)
        if self._state is GroupState.LAUNCHED:
            self.connect(pushed)
            return
        pool = self._running_pool()
        handle = pool.push(pushed, pool.check_ids(worker_ids), timeout=self._timeout(pushed))
        if handle is not None:
            self.settle(handle)

    def send_async(self, weights_dict: Mapping[str, Weights | PerWorker] | None = None) -> PushHandle | None:
        """Snapshot the weights as one version and return; a background thread delivers it. Blocks on no worker.

        Args:
            weights_dict: Weights for each destination; ``None`` reads again what was given to ``connect``.

        Returns:
            The handle, which tells what became of the push; ``None`` without worker processes, where it is applied at
            once. Its ``wait`` raises for a worker that is replaced, too; ``settle`` does not.

        Raises:
            LayoutMismatchError: The weights are not those of ``connect``; nothing was sent.
            WeightSyncTimeout: No slot for the weights became free within ``timeout``; nothing was sent.
            ValueError: An unknown destination, or no weights at all.
            RuntimeError: The group is not connected.
        """
        if self._state is not GroupState.RUNNING:
            raise RuntimeError(f"the group is {self._state.value}: connect it first")
        pushed = self._destinations(None, None, self._sources if weights_dict is None else weights_dict)
        pool = self._running_pool()
        handle = pool.push(pushed, pool.check_ids(None), timeout=self._timeout(pushed), replaceable=True)
        if handle is not None and self.hub is not None:
            self.hub.dispatcher.run_in_background()
        return handle

    def settle(self, handle: PushHandle) -> None:
        """Wait until a push is settled; what replacements of lost workers make good is no error.

        Raises:
            WeightSyncError: ``.failed`` names the workers that have not applied it, and will not be replaced.
        """
        try:
            handle.wait()
        except WeightSyncError as error:
            left = self._running_pool().beyond_repair(error.failed)
            if left:
                raise failure(left, handle.phase) from None
            if not error.failed:
                raise
            log.debug(f"{handle.phase} was missed by workers that are replaced: {sorted(error.failed)}")

    def broadcast(self, **values: Any) -> None:
        """Give workers schedule values (epsilon, a temperature, a level); they come into force with the next push.

        Policies, environments and collectors read them in the workers, as ``lightning_weightsync.values["epsilon"]``:
        together with the version that they came with, they change between two policy calls. Each push carries all
        values, so replacements, new workers and evaluations have them too; what a group was given before it is
        connected is there when its collectors are built. They are checkpointed with the group. Does not block.

        Args:
            **values: Numbers, strings, bools, None, and lists and dicts of them; each replaces the one of its name.

        Raises:
            TypeError: A value is anything else.
            RuntimeError: The group has no ``weight_sync_schemes``, and runs: nothing is pushed.

        Example::

            group.broadcast(epsilon=max(0.05, 1.0 - step / 10_000))  # and with the next push every worker has it
        """
        given = canonical(values)
        if self.running and not self.weight_sync_schemes:
            raise RuntimeError("values travel with pushes, and this group has no weight_sync_schemes")
        self._values = {**self._values, **given}
        if self.running and self._pool is not None:
            (self.hub or self._pool).next_values = self._values  # type: ignore[union-attr]  # a pool without a hub

    def digest(self, model_id: str = "policy") -> dict[int, str]:
        """SHA-256 over each worker's live leaves, in layout order: ``worker_idx`` -> hexadecimal digits.

        Blocks on all workers, within the scheme's ``timeout``: each answers as soon as its gate is free. Those that are
        being replaced are left out.

        Args:
            model_id: The destination.

        Raises:
            ValueError: There is no scheme for it.
            WeightSyncError: ``.failed`` names the workers that have not answered, and will not be replaced.
            RuntimeError: The group is not started.
        """
        self._known(model_id)
        return self._running_pool().digest(model_id)

    def newest_weights(self) -> Mapping[str, Weights | PerWorker]:
        """The sources as they are now: what the callback would push, or what the group was connected with.

        Raises:
            RuntimeError: The group was given tensors, not modules: they are what they were when it was connected.
        """
        if self.weights_getter is not None:
            return self.weights_getter()
        weights = self._sources
        if weights.keys() != self.weight_sync_schemes.keys() or not all(
            isinstance(source, nn.Module) for source in weights.values()
        ):
            raise RuntimeError(
                f"the group does not know a source of {sorted(self.weight_sync_schemes)} that it could read again: it "
                "was not connected with modules, and no UpdateWeights callback drives it"
            )
        return weights

    def _destinations(
        self,
        weights: Weights | PerWorker | None,
        model_id: str | None,
        weights_dict: Mapping[str, Weights | PerWorker] | None,
    ) -> dict[str, Weights | PerWorker]:
        if weights_dict is not None:
            if weights is not None or model_id is not None:
                raise ValueError("give either weights_dict, or weights with at most a model_id")
            for name in weights_dict:
                self._known(name)
            return dict(weights_dict)
        if weights is None and model_id is None and self._sources:
            return dict(self._sources)
        if model_id is None:
            if len(self.weight_sync_schemes) != 1:
                raise ValueError(f"give model_id or weights_dict: the group has {sorted(self.weight_sync_schemes)}")
            model_id = next(iter(self.weight_sync_schemes))
        self._known(model_id)
        if weights is None:
            if model_id not in self._sources:
                raise ValueError(f"no weights are given for {model_id!r}, and none were before")
            weights = self._sources[model_id]
        return {model_id: weights}

    def _timeout(self, destinations: Mapping[str, object]) -> float:
        if not destinations:
            raise ValueError(
                f"there are no weights to push; the group has schemes for {sorted(self.weight_sync_schemes)}"
            )
        return max(self.weight_sync_schemes[name].timeout for name in destinations)

    def _known(self, model_id: str) -> None:
        if model_id not in self.weight_sync_schemes:
            raise ValueError(f"there is no scheme for {model_id!r}; the group has {sorted(self.weight_sync_schemes)}")


def unmatched(name: str, destinations: Collection[str], schemes: Collection[str]) -> str | None:
    """Why these are not the destinations that a group has schemes for, or ``None`` if they are.

    Args:
        name: What the destinations were given as, for the sentence.
        destinations: What there are weights for.
        schemes: ``weight_sync_schemes``.
    """
    without_scheme, without_source = sorted(set(destinations) - set(schemes)), sorted(set(schemes) - set(destinations))
    if not without_scheme and not without_source:
        return None
    return (
        f"{name} is given for {sorted(destinations)}, and the group's weight_sync_schemes for {sorted(schemes)}: "
        f"without a scheme {without_scheme}, without a source {without_source}"
    )
