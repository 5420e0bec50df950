"""How are figures shown? As Markdown tables that can be read on a terminal too; progress and machine in a line each."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; the first column to the left, all others to the right."""
    cells = [list(headers), *[[_show(cell) for cell in row] for row in rows]]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(headers))]
    ruler = ["-" * widths[0], *["-" * (width - 1) + ":" for width in widths[1:]]]

    def line(row: Sequence[str]) -> str:
        first, *others = row
        rest = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        return f"| {' | '.join([first.ljust(widths[0]), *rest])} |"

    return "\n".join([line(cells[0]), line(ruler), *map(line, cells[1:])])


def verdict(value: float | None, limit: float, *, at_least: bool = False) -> str:
    """A ratio beside what it is to be."""
    if value is None:
        return "-"
    holds = value >= limit if at_least else value <= limit
    return f"{_show(value)} ({'>=' if at_least else '<='} {limit:g}: {'yes' if holds else 'NO'})"


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": cores,
        "load": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "tensordict", "torchrl")},
    }


def progress(text: str) -> None:
    """A line that the next one replaces, where somebody looks."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _show(cell: object) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        digits = 0 if cell >= 100 else 1 if cell >= 10 else 2 if cell >= 1 else 3
        return f"{cell:.{digits}f}"
    return str(cell)
