"""What is a push? One version of one or several models: taken, snapshot, and put on its way in one order."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeGuard

from lightning_weightsync.errors import WeightSyncError
from lightning_weightsync.schemes.newest import NEWCOMERS, Newest
from lightning_weightsync.schemes.strategy import Weights
from lightning_weightsync.transports.at_rest import AT_MOST, let_go, seem_at_rest, switch_at_rest
from lightning_weightsync.transports.hub import LinkHub
from lightning_weightsync.transports.link import WorkerLink
from lightning_weightsync.transports.pushing import Payload, PushHandle, check_size
from lightning_weightsync.transports.slots import Slot


class Pushable(Protocol):
    """The sender's role of a scheme, as far as a push needs it."""

    @property
    def model_id(self) -> str | None:
        """The destination."""
        ...

    def snapshot(
        self, weights: Weights | None, holder: object, deadline: float, *, followed_by: Collection[int] = ()
    ) -> tuple[Slot, bytes]:
        """Copy weights into a free slot, which ``holder`` then holds; returns it and the extra state.

        Where those that are to follow it can, the copy is left to ``slot.filling``.
        """
        ...

    def release(self, holder: object) -> None:
        """``holder`` does not need any slot any more."""
        ...

    def keep_newest(self, worker_ids: Iterable[int], newest: Newest) -> None:
        """This snapshot is what a replacement of one of these workers starts from."""
        ...

    def discard_newest(self, slot: Slot) -> None:
        """Nobody can start from this snapshot."""
        ...

    def newest(self, worker_idx: int) -> Newest | None:
        """The newest snapshot that was meant for a worker, if it is still there."""
        ...

    def mapped_slot(self, links: Collection[WorkerLink], meant_for: Iterable[int], holder: object) -> Slot | None:
        """The one slot that all of these workers have mapped, now held by ``holder`` too; ``None`` without one.

        Nobody else needs its bytes, once a push that is meant for these indices has been made.
        """
        ...

    def payload(self, worker_idx: int, slot: Slot, extra: bytes) -> Payload:
        """What the hub is handed for one worker."""
        ...


PerWorker: TypeAlias = Mapping[int, Weights]

_Taken: TypeAlias = tuple[Pushable, Collection[int], Slot, bytes]
"""A snapshot: of which scheme, for whom, the slot, and the extra state."""


def push_models(
    hub: LinkHub,
    weights: Mapping[Any, Weights | PerWorker | None],
    worker_ids: Sequence[int],
    *,
    timeout: float,
    initial: bool = False,
    replaceable: bool = False,
    links: Mapping[int, WorkerLink] | None = None,
) -> PushHandle:
    """Take one version, snapshot several models as it, and put it on its way; the caller may wait for the handle.

    Args:
        hub: Whose version it is.
        weights: For each scheme its weights; ``None`` for what was bound; int keys for weights of each worker.
        worker_ids: The targeted workers.
        timeout: Bounds the whole push, in seconds.
        initial: Deliver the current version instead of taking a new one.
        replaceable: Whether a newer push of the same models may take its place where it has not been sent.
        links: Of workers that are connecting; ``None`` for those that are connected.

    Raises:
        LayoutMismatchError: Weights are not those of ``connect``; nothing was sent and no version taken.
        TypeError: The extra states of all models are too large for one announcement; the same.
        WeightSyncTimeout: No slot became free in time.
    """
    started = time.monotonic()
    holder = _Snapshot()
    taken: list[_Taken] = []
    with hub.pushing:
        hub.check_open()
        try:
            everybody = [*worker_ids, NEWCOMERS] if len(worker_ids) == hub.num_workers else worker_ids
            payloads: dict[int, list[Payload]] = {index: [] for index in worker_ids}
            failed: dict[int, Exception] = {}
            scheme: Pushable
            for scheme, given in weights.items():
                for indices, own in _per_slot(scheme, given, worker_ids):
                    followed_by = () if initial or replaceable else indices
                    slot, extra = scheme.snapshot(own, holder, started + timeout, followed_by=followed_by)
                    taken.append((scheme, everybody if indices is worker_ids else indices, slot, extra))
                    for index in indices:
                        try:
                            payloads[index].append(scheme.payload(index, slot, extra))
                        except WeightSyncError as error:
                            failed[index] = error
            if any(extra for _, _, _, extra in taken):
                check_size(payloads)
            if not initial:
                hub.version += 1
            hub.values = hub.next_values
            reachable = {index: several for index, several in payloads.items() if index not in failed}
            interrupted: BaseException | None = None
            switched: Collection[int] = ()
            if not initial and links is None:
                try:
                    switched = _switch_at_rest(hub, taken, worker_ids, holder)
                except BaseException as error:  # Ctrl-C: some may wait for a push that makes them whole again
                    interrupted = error
                    let_go(hub.links[index] for index in worker_ids if index in hub.links)
            remaining = max(0.001, timeout - (time.monotonic() - started))
            handle = hub.push(
                reachable,
                hub.version,
                timeout=remaining,
                initial=initial,
                replaceable=replaceable,
                links=links,
                switched=switched,
            )
            handle.failed |= failed
            try:
                if not replaceable or interrupted is not None:
                    hub.dispatcher.send_off()  # what is to be done here can be done while the workers wake up
                _keep(taken, hub.version)
                _fill(taken)
            except BaseException as error:
                _recover(hub, handle, taken, error)
                raise
            if interrupted is not None:
                raise interrupted
            return handle
        finally:
            for scheme in weights:
                scheme.release(holder)


def push_newest(hub: LinkHub, schemes: Collection[Pushable], link: WorkerLink, *, timeout: float) -> PushHandle:
    """Put what was pushed last for a worker that is connecting on its way to it, under its own version.

    If the slot of the newest snapshot has been needed for a push that then failed, nobody has its bytes any more: the
    sources are read again, as a new version.
    """
    index, links = link.worker_idx, {link.worker_idx: link}
    with hub.pushing:
        version = newest_version(schemes, index)
        if version is None:
            return push_models(hub, dict.fromkeys(schemes), [index], timeout=timeout, links=links)
        kept = ((scheme, scheme.newest(index)) for scheme in schemes)
        several = [scheme.payload(index, newest.slot, newest.extra) for scheme, newest in kept if newest is not None]
        return hub.push({index: several}, version, timeout=timeout, initial=True, links=links)


def newest_version(schemes: Collection[Pushable], worker_idx: int) -> int | None:
    """Of the newest push that was meant for a worker, of any of these; ``None`` if the bytes of one are gone."""
    versions = [newest.version for scheme in schemes if (newest := scheme.newest(worker_idx)) is not None]
    return max(versions) if len(versions) == len(schemes) else None


def _switch_at_rest(hub: LinkHub, taken: list[_Taken], worker_ids: Sequence[int], holder: object) -> Collection[int]:
    """Have workers switch in their sleep, if all of them can (see ``transports.at_rest``); returns who has.

    What was taken is then what they have mapped.
    """
    links = [link for index in worker_ids if (link := hub.links.get(index)) is not None]
    if len(links) < len(worker_ids) or sum(slot.memory.numel() for _, _, slot, _ in taken) > AT_MOST:
        return ()
    if not seem_at_rest(links):
        return ()
    with hub.dispatcher.at_rest(links) as resting:
        # From here on nothing arrives that says who holds what.
        if not resting or not all(link.values is hub.values for link in links):
            return ()
        mapped: list[_Taken] = []
        for scheme, meant_for, slot, extra in taken:
            same = None
            if len(meant_for) >= len(links) and not extra and slot.filling is None and slot.digest is None:
                same = scheme.mapped_slot(links, meant_for, holder)
            if same is None:
                return ()
            mapped.append((scheme, meant_for, same, extra))
        slots = [(slot, same) for (_, _, slot, _), (_, _, same, _) in zip(taken, mapped, strict=True)]
        # Kept before it is written, so that the bytes of this version never go by the number of the one before.
        switched = switch_at_rest(links, slots, hub.version, partial(_keep, mapped, hub.version))
        if switched is None:
            return ()
        taken[:] = mapped
        return switched


def _keep(taken: Iterable[_Taken], version: int) -> None:
    for scheme, meant_for, slot, extra in taken:
        scheme.keep_newest(meant_for, Newest(slot, extra, version))


def _fill(taken: Iterable[_Taken]) -> None:
    """Write the slots that are on their way already."""
    for _, _, slot, _ in taken:
        if slot.filling is not None:
            slot.filling.run()


def _recover(hub: LinkHub, handle: PushHandle, taken: Collection[_Taken], error: BaseException) -> None:
    """A push that is on its way was interrupted: it gets to its end, or is called off if it cannot."""
    complete = all(slot.filling is None for _, _, slot, _ in taken)
    try:
        _keep(taken, handle.version)
        if not complete and not isinstance(error, Exception):
            _fill(taken)  # Ctrl-C: whoever follows has a part already, and needs the rest before it can go on
            complete = True
    finally:
        if not complete:  # what has left cannot be called back, and the rest will never come
            for scheme, _, slot, _ in taken:
                scheme.discard_newest(slot)
            reason = str(error) or type(error).__name__
            hub.dispatcher.call_off(handle.errands, WeightSyncError(f"the weights could not be read: {reason}"))


class _Snapshot:
    """Holds a slot while it is being written."""

    def __repr__(self) -> str:
        return "a snapshot that is being taken"


def is_per_worker(weights: Weights | PerWorker | None) -> TypeGuard[PerWorker]:
    """Whether these are weights for each worker on its own: a dict with int keys."""
    return isinstance(weights, dict) and bool(weights) and all(isinstance(key, int) for key in weights)


def _per_slot(
    scheme: Pushable, weights: Weights | PerWorker | None, worker_ids: Sequence[int]
) -> list[tuple[Sequence[int], Weights | None]]:
    """One snapshot for everybody, or one for each worker where each is given its own weights."""
    if not is_per_worker(weights):
        return [(worker_ids, weights)]
    left_out = [index for index in worker_ids if index not in weights]
    if left_out:
        raise ValueError(
            f"{scheme.model_id!r}: weights are given for workers {sorted(weights)}, but not for {left_out}"
        )
    return [([index], weights[index]) for index in worker_ids]
