"""How does a command line become a configuration, and a run? With Hydra, whose complaints are put into our form.

Beside Hydra's own grammar a command line may name its YAML as a file, ``my.yaml``, and give a map in either form over
one in the other form in the YAML, which OmegaConf would refuse to merge: it takes the other's place.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
    SearchPathException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lightning_weightsync.commands.application import NODES, read
from lightning_weightsync.commands.problems import EXIT_MISCONFIGURED, ConfigError, tell
from lightning_weightsync.commands.schema import find, has_argument
from lightning_weightsync.wording import ended, listed, nearest

_NAMING = ("--config-dir", "--config-name", "--config-path", "-cd", "-cn", "-cp")
_COMPOSING = ("train", "check", "bench")
_MAP = re.compile(r"(?P<key>[\w.]*weight_update_map)=(?P<value>[\[{].*)", re.DOTALL)
_QUIET = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=stdout"]
"""What has Hydra leave nothing behind."""


def compose_and_run(command: str, arguments: Sequence[str], started: float) -> int:
    """Compose and run ``train``, ``check`` or ``bench``, once for each job of a multirun.

    Args:
        command: Which.
        arguments: Hydra's, and the command's own.
        started: When the process began, on ``time.perf_counter``.

    Returns:
        The highest exit code of all jobs.

    Raises:
        ConfigError: Nothing could be composed.
    """
    options, rest = _own_options(command, arguments)
    overrides = rewrite([*_named_in_completed_line(rest), *rest])
    if command != "train":
        overrides = [*overrides, *_QUIET]
    codes: list[int] = []
    raised: list[Exception] = []

    def job(config: DictConfig) -> None:
        try:
            codes.append(_job(command, config, options, started))
        except ConfigError as error:  # the other jobs of a multirun go on
            tell(error)
            codes.append(EXIT_MISCONFIGURED)
        except Exception as error:
            raised.append(error)
            raise

    job.__module__ = f"lightning_weightsync.{command}"  # of which Hydra makes the job's name, and its log's
    with _own_words(overrides, raised):
        hydra.main(version_base="1.3", config_path=None)(job)()
    return max(codes, default=0)


def rewrite(arguments: Sequence[str]) -> list[str]:
    """Arguments in Hydra's own grammar. Idempotent: Lightning starts further ranks with what comes out.

    Raises:
        ConfigError: A file is not there, is no ``.yaml``, or is the second one.

    Example:
        >>> rewrite(["conf/my.yaml", "seed=2"])
        ['--config-dir', 'conf', '--config-name', 'my', 'seed=2']
        >>> rewrite(["a.weight_update_map=['policy=actor']"])
        ['a.weight_update_map=null', "a.weight_update_map=['policy=actor']"]
    """
    made: list[str] = []
    file: list[str] = []
    named = ""
    for argument in arguments:
        path = Path(argument)
        if path.suffix in (".yaml", ".yml") and "=" not in argument and not (made and made[-1] in _NAMING):
            if path.suffix == ".yml":
                raise ConfigError(f"{argument}: Hydra reads .yaml files only; rename it to {path.with_suffix('.yaml')}")
            if file:
                raise ConfigError(f"{argument}: the configuration is {named} already; name one file")
            if not path.is_file():
                raise ConfigError(f"there is no file {argument}; `lightning-weightsync template {argument}` writes one")
            file, named = ["--config-dir", str(path.parent), "--config-name", path.stem], argument
            continue
        given = _MAP.fullmatch(argument)
        if given is not None and made[-1:] != [f"{given['key']}=null"]:
            made.append(f"{given['key']}=null")
        made.append(argument)
    return [*file, *made]  # Hydra takes no options after the first override


def _named_in_completed_line(arguments: Sequence[str]) -> list[str]:
    """What names the configuration in the line that a shell wants completed; it is taken out of that line.

    The shell calls us with nothing but ``-sc query=bash``, and Hydra looks at the line's overrides only.
    """
    line = os.environ.get("COMP_LINE", "")
    if not line or not {"-sc", "--shell-completion"} & set(arguments):
        return []
    program, *words = line.split()
    named, kept = [], []
    for before, word in zip(["", *words], words, strict=False):
        is_file = Path(word).suffix == ".yaml" and Path(word).is_file()
        if is_file or word in _NAMING or before in _NAMING:
            named.append(word)
        elif word not in _COMPOSING:
            kept.append(word)
    os.environ["COMP_LINE"] = " ".join([program, *kept]) + (" " if line.endswith(" ") or not kept else "")
    return named


def _own_options(command: str, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    if command == "bench":
        from lightning_weightsync.commands.bench import parser as bench_parser

        return bench_parser().parse_known_args(list(arguments))
    parser = argparse.ArgumentParser(
        prog=f"lightning-weightsync {command}",
        description="train what a YAML describes" if command == "train" else "find mistakes, and print the plan",
        usage="%(prog)s FILE.yaml [key=value ...] [Hydra's options]",
        epilog="--cfg job prints the configuration; `lightning-weightsync --help` has examples",
        allow_abbrev=False,
    )
    return parser.parse_known_args(list(arguments))


def _job(command: str, config: DictConfig, options: argparse.Namespace, started: float) -> int:
    application = read(config)
    if command != "train":
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    if logging.getLogger().hasHandlers():
        logging.getLogger("lightning").handlers.clear()  # Hydra's show the same: each line would come twice
    if command == "check":
        from lightning_weightsync.commands.check import check

        return check(application)
    if command == "bench":
        from lightning_weightsync.commands.bench import bench

        return bench(application, options)
    from lightning_weightsync.commands.train import train

    return train(application, started)


@contextmanager
def _own_words(overrides: Sequence[str], raised_by_jobs: list[Exception]) -> Iterator[None]:
    """Inside, Hydra has these arguments, and what it cannot compose is a ``ConfigError``; jobs' errors stay theirs."""
    before, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [before[0], *overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints errors itself, and exits
    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        if full or any(error is known for known in raised_by_jobs):
            raise
        raise ConfigError(_explained(error, overrides)) from error
    finally:
        sys.argv = before
        os.environ.pop("HYDRA_FULL_ERROR") if full is None else os.environ.update(HYDRA_FULL_ERROR=full)


def _explained(error: Exception, overrides: Sequence[str]) -> str:
    if isinstance(error, MissingConfigException) and error.options:
        missing, options = str(error.missing_cfg_file), list(error.options)
        group, _, name = missing.rpartition("/")
        wanted = f"{group}={name}" if group else missing
        return f"{ended(f'{wanted}: there is no such choice{nearest(name, options)}')} Choices: {listed(options)}"
    text = str(error).strip()
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    key = getattr(cause, "full_key", None)
    if isinstance(error, ConfigCompositionException) and key and "is not in struct" in str(cause):
        return _unknown_key(str(key), text, overrides)
    if isinstance(error, OverrideParseException):
        shown = next((o for o in overrides if str(getattr(error, "override", "")) == o), "")
        first = text.splitlines()[0]
        quoted = """'key="value"' or 'key=["a","b"]'"""
        return f"{shown or 'an override'} cannot be read: {first}; quote it, also for the shell: {quoted}"
    if isinstance(error, YAMLError):
        return f"the YAML cannot be read: {' '.join(text.split())}"
    if isinstance(error, MissingConfigException) and "/" in str(error.missing_cfg_file or ""):
        has_groups = (
            "the groups of the package are found with hydra: {searchpath: [pkg://lightning_weightsync.configs]}"
        )
        return f"there is no group for {error.missing_cfg_file!r}; {has_groups} in the YAML"
    if isinstance(error, MissingConfigException | SearchPathException):
        return f"{text.splitlines()[0]} (name a file, lightning-weightsync my.yaml)"
    if "You must specify a config to use" in text or "No config" in text:
        return "name a configuration: lightning-weightsync my.yaml"
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def _unknown_key(key: str, text: str, overrides: Sequence[str]) -> str:
    """An override of a key that is not there: what is there instead."""
    wanted = key.split(".")
    override = next((o for o in overrides if o.split("=")[0] == key), key)
    here: Any = _composed_without_overrides(overrides)
    depth = 0
    while depth < len(wanted) and isinstance(here, DictConfig) and wanted[depth] in here:
        here = here._get_node(wanted[depth])
        depth += 1
    there = [str(name) for name in here] if isinstance(here, DictConfig) else []
    if not there or depth >= len(wanted):
        return " ".join(text.split())
    parent = ".".join(wanted[:depth])
    if _is_argument(here, wanted[depth]) or (not parent and wanted[0] in NODES):
        return f"{override}: the YAML has no {wanted[depth]!r} in {parent or 'it'}; add it with a plus: +{override}"
    told = f"{override}: there is no key {wanted[depth]!r} in {parent or 'the configuration'}"
    return f"{ended(told + nearest(wanted[depth], there))} There is {listed(there)}. (+{override} adds a key.)"


def _is_argument(node: DictConfig, name: str) -> bool:
    """Whether what a node names takes such an argument, though the YAML does not give it."""
    target, _ = find(str(node.get("_target_")), "")
    return target is not None and has_argument(target, name)


def _composed_without_overrides(overrides: Sequence[str]) -> DictConfig:
    options = {name: overrides[i + 1] for i, name in enumerate(overrides[:-1]) if name.startswith("--config-")}
    folder, name = options.get("--config-dir"), options.get("--config-name")
    groups = [o for o in overrides if re.fullmatch(r"[\w/@]+=[\w/]+", o) and "." not in o.partition("=")[0]]
    if folder is None or name is None:
        return OmegaConf.create({})
    for tried in (groups, []):
        GlobalHydra.instance().clear()
        try:
            with hydra.initialize_config_dir(str(Path(folder).absolute()), version_base="1.3"):
                return hydra.compose(name, overrides=tried)
        except Exception:
            continue
    return OmegaConf.create({})
