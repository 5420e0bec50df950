"""``report``: what came of a run? One HTML page, made from what its folder holds."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_weightsync.commands.problems import ConfigError
from lightning_weightsync.report.events import EVENTS, read_run
from lightning_weightsync.report.page import make_page


def main(arguments: list[str]) -> int:
    """Write the page, and print where it is.

    Returns:
        0.

    Raises:
        ConfigError: There is nothing to report on, or no matplotlib.
    """
    parser = argparse.ArgumentParser(prog="lightning-weightsync report", description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder: outputs/DATE/TIME, or hydra.run.dir")
    parser.add_argument("--output", type=Path, help="where the page goes (RUN/report.html)")
    options = parser.parse_args(arguments)
    output = options.output or options.run / "report.html"
    text = report(options.run)
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {output}: not written: {error.strerror}") from None
    print(output)
    return 0


def report(folder: Path) -> str:
    """The page on the run of a folder.

    Raises:
        ConfigError: See ``main``.
    """
    path = folder / EVENTS
    try:
        run = read_run(folder)
    except OSError:
        others = sorted(str(found.parent) for found in folder.rglob(EVENTS)) if folder.is_dir() else []
        hint = f"; there is one in {', '.join(others[:8])}" if others else "; runs write it unless record=false"
        raise ConfigError(f"{path} is not there{hint}") from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    try:
        from lightning_weightsync.report.plots import draw

        pictures = draw(run)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the plots need {error.name}, which is not installed: pip install 'lightning_weightsync[plots]'"
        ) from None
    title = f"{run.start.get('module', 'run')}, {folder.resolve().name}"
    return make_page(
        title, run, pictures, _text(folder / ".hydra/config.yaml"), _text(folder / ".hydra/overrides.yaml")
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
