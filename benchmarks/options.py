"""What can be asked of the programs here? Options that several of them have, and numbers that make sense."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def at_least(least: int) -> Callable[[str], int]:
    """``type`` of an option: whole numbers from ``least`` on."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r}: a whole number is needed, at least {least}")
        return number

    return parse


def positive(text: str) -> float:
    """``type`` of an option: finite numbers above 0."""
    number = not_negative(text)
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r}: a number above 0 is needed")
    return number


def not_negative(text: str) -> float:
    """``type`` of an option: finite numbers from 0 on."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: a number is needed, at least 0")
    return number


def add_json(parser: argparse.ArgumentParser, what: str = "all samples", default: Path | None = None) -> None:
    """``--json FILE``."""
    parser.add_argument("--json", type=Path, metavar="FILE", default=default, help=f"write {what} to this file")


def add_quick(parser: argparse.ArgumentParser, meaning: str) -> None:
    """``--quick``: other defaults (``fill_in``); what is given stands."""
    parser.add_argument("--quick", action="store_true", help=f"does it run? {meaning}, unless given")


def fill_in(options: argparse.Namespace, *, quick: Mapping[str, Any], otherwise: Mapping[str, Any]) -> None:
    """Give options that were not given (``None``) their defaults, with ``--quick`` or without."""
    for name, default in (quick if options.quick else otherwise).items():
        if getattr(options, name) is None:
            setattr(options, name, default)


def write(file: Path | None, report: Any) -> None:
    """Write a report as JSON, if it was asked for."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
