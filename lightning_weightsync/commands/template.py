"""``template``: what does a YAML of one's own begin with? The commented one that is shipped, printed or written."""

from __future__ import annotations

from pathlib import Path

from lightning_weightsync import configs
from lightning_weightsync.commands.problems import EXIT_MISCONFIGURED, ConfigError


def main(arguments: list[str]) -> int:
    """Print the template, or write it to a file that is not there yet.

    Returns:
        0, or 2 for a wrong command line.

    Raises:
        ConfigError: It cannot be written.
    """
    if len(arguments) > 1 or any(a.startswith("-") for a in arguments):
        print("usage: lightning-weightsync template [FILE.yaml]")
        return 0 if arguments[0] in ("-h", "--help") else EXIT_MISCONFIGURED
    text = Path(configs.__file__).with_name("template.yaml").read_text(encoding="utf-8")
    if not arguments:
        print(text, end="")
        return 0
    try:
        with open(arguments[0], "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{arguments[0]}: not written: {error.strerror}") from None
    print(f"{arguments[0]}: fill in what is ???, then run `lightning-weightsync check {arguments[0]}`")
    return 0
