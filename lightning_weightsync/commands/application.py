"""What does a configuration describe? Its nodes, checked, and the objects that are built from them, one by one.

Everything that is wrong is a ``ConfigError`` before a worker process is started: `read` looks at keys, types and paths
without building anything; each ``build_*`` turns what a constructor refuses into one line.
"""

from __future__ import annotations

import io
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_weightsync.commands import weight_map
from lightning_weightsync.commands.problems import ConfigError
from lightning_weightsync.commands.schema import MISSING, check_arguments, check_tree, find
from lightning_weightsync.wording import nearest

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_weightsync.collectors.group import CollectorGroup
    from lightning_weightsync.commands.built import Built
    from lightning_weightsync.schemes.base import WeightSyncScheme

NODES = {
    "seed": "an int, for everything that draws random numbers",
    "module": "the LightningModule",
    "collector": "the CollectorGroup",
    "trainer": "the Trainer",
    "logger": "loggers, by any name",
    "callbacks": "callbacks, by any name; update_weights among them",
    "weight_sync_scheme": "the scheme of each destination",
    "weight_sync_schemes": "schemes of single destinations",
    "evaluation": "arguments of CollectorGroup.evaluation",
    "ckpt_path": "a checkpoint to go on from",
    "record": "whether events.jsonl is written to the run folder, for `report`",
    "trace": "whether a trace of trainer and workers is written to the run folder",
}
_CHECKPOINTS = ("best", "last", "hpc")
_NEEDED = ("module", "collector", "trainer")


@dataclass
class Application:
    """A configuration that has been read.

    Attributes:
        config: Plain dicts, lists and values, interpolations resolved, maps in their mapping form.
        maps: Key of each ``UpdateWeights`` node -> its map (``None``: it has none).
        schemes: Destination -> the node of its scheme.
    """

    config: dict[str, Any]
    maps: dict[str, dict[str, str] | None]
    schemes: dict[str, Any]

    def build_module(self) -> pl.LightningModule:
        """The LightningModule, after seeding."""
        import lightning.pytorch as pl

        if self.config.get("seed") is not None:
            pl.seed_everything(self.config["seed"], verbose=False)
        module: pl.LightningModule = build(self.config["module"], "module")
        if not isinstance(module, pl.LightningModule):
            raise ConfigError(f"module._target_ makes a {type(module).__name__}: a LightningModule is needed")
        return module

    def build_schemes(self) -> dict[str, WeightSyncScheme]:
        """A fresh scheme for each destination."""
        exact = self.config.get("weight_sync_schemes") or {}
        return {
            name: build(node, f"weight_sync_schemes.{name}" if name in exact else "weight_sync_scheme")
            for name, node in self.schemes.items()
        }

    def build_group(self) -> CollectorGroup:
        """The group, which is not launched; its factory is known to pickle."""
        node = {name: value for name, value in self.config["collector"].items() if name != "weight_sync_schemes"}
        group: CollectorGroup = build(node, "collector", weight_sync_schemes=self.build_schemes())
        if group.num_workers:
            _check_pickles(group.collector)
        return group

    def build_callbacks(self, group: CollectorGroup) -> dict[str, pl.Callback]:
        """By key. An ``UpdateWeights`` that names no target gets the group: an interpolation would build another."""
        callbacks = {}
        for name, node in (self.config.get("callbacks") or {}).items():
            if node is None:
                continue
            key = f"callbacks.{name}"
            lacks = key in self.maps and node.get("collector") is None and node.get("sender") is None
            if lacks:
                node = {k: v for k, v in node.items() if k not in ("collector", "sender")}
            callbacks[key] = build(node, key, **({"collector": group} if lacks else {}))
        return callbacks

    def build_loggers(self) -> list[Any]:
        """Loggers, in their order."""
        nodes = (self.config.get("logger") or {}).items()
        return [build(node, f"logger.{name}") for name, node in nodes if node is not None]

    def build_trainer(self, callbacks: list[pl.Callback], loggers: list[Any]) -> pl.Trainer:
        """The Trainer."""
        trainer: pl.Trainer = build(self.config["trainer"], "trainer", callbacks=callbacks, logger=loggers)
        return trainer

    def build_evaluation(self, group: CollectorGroup) -> Any:
        """The validation loader, where there is one."""
        wanted = self.config.get("evaluation")
        return None if wanted is None else _told("evaluation", lambda: group.evaluation(**wanted))

    def build(self) -> Built:
        """Module, group, callbacks and trainer, in the order in which each is needed; nothing is started.

        Raises:
            ConfigError: A constructor refuses what it is given, or a source path leads nowhere.
        """
        from lightning_weightsync.commands.built import Built

        module = self.build_module()
        group = self.build_group()
        callbacks = self.build_callbacks(group)
        trainer = self.build_trainer(list(callbacks.values()), self.build_loggers())
        updates: dict[str, Any] = {key: callbacks[key] for key in self.maps}
        built = Built(module, group, updates, trainer)
        built.follow_paths()
        return built


def read(config: DictConfig) -> Application:
    """Resolve and check a composed configuration; nothing is built.

    Raises:
        ConfigError: All problems that were found.
    """
    try:
        plain: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    problems = [f"there is no node {name!r}: {NODES[name]}" for name in _NEEDED if not plain.get(name)]
    problems += [
        f"{name}: there is no node of that name{nearest(name, NODES)}"
        for name in plain
        if name not in NODES and nearest(name, NODES)
    ]
    if problems:
        raise ConfigError(problems)
    maps, problems = _read_maps(plain)
    problems += _check_nodes(plain, maps)
    if problems:
        raise ConfigError(problems)
    return Application(plain, maps, _read_schemes(plain, maps))


def build(node: Mapping[str, Any], key: str, **given: Any) -> Any:
    """Instantiate a node that has been checked; what its constructor refuses is a ``ConfigError``."""
    return _told(key, lambda: instantiate(dict(node), **given, _convert_="all"))


def _told(key: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (InstantiationException, ValueError, TypeError, NotImplementedError, ImportError) as error:
        where = key
        cause: BaseException = error
        while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
            cause = cause.__cause__  # what was raised; its own cause is its author's affair
        inner = getattr(error, "full_key", None) or _full_key(str(error))
        if inner:
            where = f"{key}.{inner}"
        told = f"{where}: {cause}" if isinstance(cause, ValueError) else f"{where}: {type(cause).__name__}: {cause}"
        hint = " (HYDRA_FULL_ERROR=1 shows where)" if _is_others_code(cause) else ""
        raise ConfigError(told + hint) from error


def _is_others_code(error: BaseException) -> bool:
    """Whether it was raised neither by us nor by Lightning, whose messages say what is wrong with an argument."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return True
    package = str(frames[-1].f_globals.get("__name__", "")).partition(".")[0]
    return package not in ("lightning", "lightning_weightsync", "hydra") and not isinstance(error, ImportError)


def _full_key(message: str) -> str:
    return next((line.removeprefix("full_key: ").strip() for line in message.splitlines() if "full_key: " in line), "")


def _read_maps(plain: dict[str, Any]) -> tuple[dict[str, dict[str, str] | None], list[str]]:
    """The map of each ``UpdateWeights`` node, which is brought into its mapping form in place."""
    from lightning_weightsync.callback import UpdateWeights

    maps: dict[str, dict[str, str] | None] = {}
    problems: list[str] = []
    for name, node in (plain.get("callbacks") or {}).items():
        key = f"callbacks.{name}"
        if not isinstance(node, dict) or not isinstance(node.get("_target_"), str):
            if node is not None:
                problems.append(f"{key}={node!r}: a callback is a node with _target_")
            continue
        cls, _ = find(node["_target_"], key)
        if not (isinstance(cls, type) and issubclass(cls, UpdateWeights)):
            continue
        given = node.get(weight_map.KEY)
        if given == MISSING:
            maps[key] = None
            problems.append(
                f"{key}.{weight_map.KEY} has no value (???): say which part of the module goes where on the collector, "
                "{policy: actor}, or on the command line ['policy=actor'] (destination=source); or null, where "
                "policy_weights_getter or sender is given in its place"
            )
            node[weight_map.KEY] = None
            continue
        try:
            maps[key] = node[weight_map.KEY] = weight_map.as_mapping(given, f"{key}.{weight_map.KEY}")
        except ConfigError as error:
            problems += error.problems
            maps[key] = node[weight_map.KEY] = None
    return maps, problems


def _read_schemes(plain: dict[str, Any], maps: Mapping[str, dict[str, str] | None]) -> dict[str, Any]:
    exact = plain.get("weight_sync_schemes") or {}
    default = plain.get("weight_sync_scheme")
    own = plain["collector"].get("weight_sync_schemes") or {}
    if own and exact:
        raise ConfigError(
            f"weight_sync_schemes has {sorted(exact)} and collector.weight_sync_schemes {sorted(own)}: use one of them"
        )
    exact = plain["weight_sync_schemes"] = exact or own
    mapped = [destination for mapping in maps.values() for destination in (mapping or {})]
    if any(mapping is None for mapping in maps.values()) or not maps:  # a getter gives weights for what has a scheme
        mapped += list(exact) or ["policy"]
    return weight_map.scheme_nodes(list(dict.fromkeys(mapped)), exact, default)


def _check_nodes(plain: dict[str, Any], maps: Mapping[str, object]) -> list[str]:
    from lightning_weightsync.collectors.group import CollectorGroup

    supplied = {key: {"collector"} for key in maps}
    supplied["trainer"] = {"callbacks", "logger"}
    problems = check_tree(plain, "", supplied)
    problems += [
        f"{name}={plain[name]!r}: a node with _target_ is needed: {NODES[name]}"
        for name in (*_NEEDED, "weight_sync_scheme")
        if plain.get(name) is not None and not (isinstance(plain[name], dict) and "_target_" in plain[name])
    ]
    cls, _ = (
        find(str(plain["collector"].get("_target_")), "collector")
        if isinstance(plain["collector"], dict)
        else (None, "")
    )
    if cls is not None and not (isinstance(cls, type) and issubclass(cls, CollectorGroup)):
        problems.append(f"collector._target_={plain['collector']['_target_']!r}: a CollectorGroup is needed")
    if plain.get("seed") is not None and (isinstance(plain["seed"], bool) or not isinstance(plain["seed"], int)):
        problems.append(f"seed={plain['seed']!r}: an int is needed, or null")
    for name in ("record", "trace"):
        if not isinstance(plain.get(name, False), bool):
            problems.append(f"{name}={plain[name]!r}: true or false is needed")
    if plain.get("trace") is True and plain.get("record", True) is False:
        problems.append("trace=True with record=False: a trace is made of what is recorded; give record=true with it")
    checkpoint = plain.get("ckpt_path")
    if checkpoint is not None and not (
        isinstance(checkpoint, str) and (checkpoint in _CHECKPOINTS or ":" in checkpoint or Path(checkpoint).exists())
    ):
        names = ", ".join(map(repr, _CHECKPOINTS))
        problems.append(
            f"ckpt_path={checkpoint!r}: there is no such file (seen from {Path.cwd()}), nor is it one of {names}"
        )
    wanted = plain.get("evaluation")
    if isinstance(wanted, dict):
        problems += check_arguments(CollectorGroup.evaluation, wanted, "evaluation", {"self"})
    elif wanted is not None:
        problems.append(f"evaluation={wanted!r}: a mapping is needed, for example {{episodes: 20}}")
    return problems


def _check_pickles(factory: object) -> None:
    try:
        cloudpickle.dump(factory, io.BytesIO())
    except Exception as error:
        raise ConfigError(
            f"collector.collector: the factory cannot be sent to worker processes: {type(error).__name__}: {error}; "
            "give a function or class of a module (with its arguments), and make what does not pickle inside of it"
        ) from error
