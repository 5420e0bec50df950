"""``check``: is the configuration right, and what would it do? Prints the plan; starts no process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lightning_weightsync.commands.application import Application
from lightning_weightsync.commands.plan import Route, find_routes
from lightning_weightsync.wording import size

if TYPE_CHECKING:
    from lightning_weightsync.callback import UpdateWeights
    from lightning_weightsync.collectors.group import CollectorGroup
    from lightning_weightsync.commands.built import Built


def check(application: Application) -> int:
    """Build what is light, compare what would meet, and print who sends what to whom, how, and when.

    Returns:
        0.

    Raises:
        ConfigError: What is wrong.
    """
    built = application.build()
    application.build_evaluation(built.group)
    routes, kind = find_routes(built.group, built.weights())
    print("\n".join(describe(application, built, kind, routes)))
    return 0


def describe(application: Application, built: Built, kind: type, routes: list[Route]) -> Iterable[str]:
    """The plan, line by line."""
    group = built.group
    maps = {d: s for mapping in application.maps.values() for d, s in (mapping or {}).items()}
    yield f"module       {_name(type(built.module))}"
    yield f"collectors   {_workers(group)}"
    yield f"             each a {_name(kind)}{_batches(application)}"
    wanted = application.config.get("evaluation")
    if wanted is not None:
        yield f"evaluation   {', '.join(f'{name}={value}' for name, value in wanted.items()) or 'as it comes'}"
    for key, update in built.updates.items():
        yield f"pushes       {when(update, group)} ({key})"
    if not built.updates:
        yield "pushes       none: no callback is an UpdateWeights"
    for route in routes:
        yield f"  {maps[route.destination]} -> {route.destination}"
        what = type(route.model).__name__
        yield f"             {what}: {route.leaves} leaves, {size(route.nbytes)}, {_wire(route)}"
        yield f"             {route.transport(group.num_workers)}"
    unknown = [name for name in group.weight_sync_schemes if name not in {route.destination for route in routes}]
    for name in unknown:
        why = built.unknown.get(name, "a getter makes its weights")
        yield f"  {maps.get(name, '?')} -> {name}"
        yield f"             ? known only when the run has begun: {'; '.join(why.splitlines())}"
    total = sum(route.nbytes for route in routes)
    slots = sum(route.nbytes * (route.scheme.max_slots or 2 * group.num_workers + 2) for route in routes)
    if routes:
        yield f"a push       {size(total)}, applied in each worker as a whole or not at all"
    if routes and group.num_workers:
        yield f"memory       {size(2 * total)} for weights on their way; at most {size(slots)}, if workers are slow"
    yield f"ok, but for what is not known yet: {', '.join(unknown)}" if unknown else "ok"


def when(update: UpdateWeights, group: CollectorGroup) -> str:
    """The cadence, and who waits."""
    unit = {"batches": "batch(es)", "optim_steps": "optimizer step(s)"}.get(update.interval_unit, update.interval_unit)
    waits = update.blocking if update.blocking is not None else group.sync
    who = "the trainer waits until every worker has applied it" if waits else "the trainer waits for one copy only"
    return f"every {update.update_weights_interval:g} {unit}; {who}"


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _workers(group: CollectorGroup) -> str:
    how = "batches of all workers together" if group.sync else "ahead, a batch of one worker at a time"
    stale = f", none older than {group.max_staleness} version(s)" if group.max_staleness is not None else ""
    if not group.num_workers:
        return "one, in this process"
    return f"{group.num_workers} worker process(es), {how}{stale}"


def _wire(route: Route) -> str:
    cast = route.scheme.wire_dtype
    return f"in {str(cast).removeprefix('torch.')}" if cast is not None else "in the dtypes that they have"


def _batches(application: Application) -> str:
    factory = application.config["collector"].get("collector")
    known = (
        {k: factory[k] for k in ("env", "num_envs", "frames_per_batch") if k in factory}
        if isinstance(factory, dict)
        else {}
    )
    text = ", ".join(f"{name}={value}" for name, value in known.items() if isinstance(value, str | int))
    return f" ({text})" if text else ""
