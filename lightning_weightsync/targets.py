"""TO WHOM does the callback push, and how? A group, somebody else's collector, or a sender."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase

from lightning_weightsync.collectors.group import CollectorGroup
from lightning_weightsync.schemes.strategy import WeightStrategy
from lightning_weightsync.sources import Sources
from lightning_weightsync.transports.pushing import PushHandle, PushState


class Target:
    """What is pushed to.

    Args:
        collector: A ``CollectorGroup``, or any object with ``update_policy_weights_``; or ``None``.
        sender: Any object with ``update_weights()``, in its place; or ``None``.
        blocking: Whether a push waits until it is applied; ``None``: where the group is ``sync=True``.

    Raises:
        ValueError: Not one of the two, or one that cannot be pushed to in this way.

    Attributes:
        group: The collector, if it is a ``CollectorGroup``.
    """

    def __init__(self, collector: Any, sender: Any, blocking: bool | None) -> None:
        if (collector is None) == (sender is None):
            raise ValueError("give either a collector or a sender")
        for given, method in ((collector, "update_policy_weights_"), (sender, "update_weights")):
            if given is not None and not callable(getattr(given, method, None)):
                raise ValueError(f"{type(given).__name__} cannot be pushed to: it has no method {method}()")
        self.collector = collector
        self.sender = sender
        self.group: CollectorGroup | None = collector if isinstance(collector, CollectorGroup) else None
        if blocking is False and self.group is None:
            raise ValueError(
                "blocking=False needs a CollectorGroup: nothing else is known to deliver in the background"
            )
        self.blocking = blocking
        self._version = 0
        self._frames = 0
        self._under_way: list[PushHandle] = []

    def check(self, sources: Sources, interval_unit: str) -> None:
        """See whether it can be given what these sources have, as often as this unit says.

        Raises:
            ValueError: It cannot.
        """
        given = sources.map is not None or sources.getter is not None
        if self.sender is not None and given:
            raise ValueError(
                "a sender has its own weights: give no policy_weights_getter and no weight_update_map with it"
            )
        if self.group is not None and not given:
            raise ValueError(
                "a CollectorGroup needs a source: give weight_update_map, for example "
                f"{dict.fromkeys(self.group.weight_sync_schemes, 'actor') or {'policy': 'actor'}}, or "
                "policy_weights_getter"
            )
        if interval_unit == "frames" and not hasattr(self.collector, "__iter__"):
            whose = "a sender" if self.collector is None else f"{self._name}, which is not iterable,"
            raise ValueError(
                f"interval_unit='frames' needs a collector whose frames can be counted, a CollectorGroup or an "
                f"iterable of TensorDicts; {whose} has none: use 'batches', 'optim_steps' or 'seconds'"
            )

    @property
    def version(self) -> int:
        """Of the newest push: the group's, or the number of pushes to anything else."""
        return self.group.version if self.group is not None else self._version

    def restore(self, run: int, version: int, incarnation: int) -> None:
        """Go on after these counts, never backwards. Idempotent."""
        self._version = max(self._version, version)
        if self.group is not None:
            self.group.restore_version(run, version, incarnation)

    # --- pushes --------------------------------------------------------------------------------------------------

    def weights(self, sources: Sources) -> dict[str, Any]:
        """What a group is given: the mapped sources, or what the getter returns for its only destination."""
        if sources.map:
            return sources.weights()
        assert sources.getter is not None and self.group is not None
        weights = sources.getter()
        schemes = list(self.group.weight_sync_schemes)
        return {schemes[0]: weights} if len(schemes) == 1 else dict(weights)

    def push(self, sources: Sources) -> None:
        """Push one version; with ``blocking``, returns when every worker has applied it.

        Raises:
            WeightSyncError: What a group raises for workers that it does not replace.
        """
        if self.group is None:
            self.call(sources)
            self._version += 1
        elif self.blocking if self.blocking is not None else self.group.sync:
            self.group.update_policy_weights_(weights_dict=self.weights(sources))
        else:
            handle = self.group.send_async(self.weights(sources))
            if handle is not None:
                self._under_way.append(handle)

    def call(self, sources: Sources) -> None:
        """Call an object that is not ours."""
        if self.sender is not None:
            self.sender.update_weights()
        elif sources.map:
            extract = WeightStrategy().extract_weights
            weights = {name: extract(source) for name, source in sources.weights().items()}
            # A TorchRL collector without schemes ignores a weights_dict, and says nothing.
            if weights.keys() == {"policy"} and not getattr(self.collector, "_weight_sync_schemes", True):
                self.collector.update_policy_weights_(weights["policy"])
            else:
                self.collector.update_policy_weights_(weights_dict=weights)
        elif sources.getter is not None:
            self.collector.update_policy_weights_(sources.getter())
        else:
            self.collector.update_policy_weights_()

    def check_under_way(self) -> None:
        """Raise what a push that nobody waited for has run into."""
        if self._under_way:
            settled = [handle for handle in self._under_way if handle.state is not PushState.PENDING]
            self._under_way = [handle for handle in self._under_way if handle not in settled]
            self._settle(settled)

    def wait(self) -> None:
        """Wait for all pushes that are under way, and raise what they have run into."""
        under_way, self._under_way = self._under_way, []
        self._settle(under_way)

    def _settle(self, handles: list[PushHandle]) -> None:
        """Raise, except for workers that the group replaces: those it has logged."""
        assert self.group is not None or not handles
        for handle in handles:
            self.group.settle(handle)  # type: ignore[union-attr]

    # --- frames --------------------------------------------------------------------------------------------------

    def start_counting_frames(self) -> None:
        """What was collected before does not count."""
        self._frames = self.group.frames if self.group is not None else 0

    def new_frames(self, batch: Any, *, needed: bool) -> int:
        """What was collected since the last call; where no group counts, the batch is what was collected.

        Args:
            batch: What was trained on.
            needed: Whether not to know is an error; 0 otherwise.

        Raises:
            TypeError: The number is needed, and cannot be known.
        """
        if self.group is not None:
            before, self._frames = self._frames, self.group.frames
            return self._frames - before
        if isinstance(batch, TensorDictBase):
            return int(batch.numel())
        if needed:
            raise TypeError(
                f"interval_unit='frames' counts TensorDict batches of a {self._name}; this one is "
                f"{type(batch).__name__}: use 'batches', 'optim_steps' or 'seconds'"
            )
        return 0

    # --- copies --------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """A group that runs travels as one that goes on after it: processes stay where they are."""
        state = self.__dict__ | {"_under_way": []}
        if self.group is not None and self.group.running:
            state["group"] = state["collector"] = self.group.successor()
        return state

    def __repr__(self) -> str:
        return repr(self.group) if self.group is not None else self._name

    @property
    def _name(self) -> str:
        return type(self.collector if self.collector is not None else self.sender).__name__
