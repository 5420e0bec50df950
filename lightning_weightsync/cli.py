"""The ``lightning-weightsync`` command: which subcommand is it, and what is it given?

``train`` (the default), ``check`` and ``bench`` compose a configuration with Hydra; ``report``, ``doctor`` and
``template`` do without. Exit codes: 0; 1 for a run that failed or was not solved, or a machine that is not fit; 2 for a
wrong configuration or command line.
"""

from __future__ import annotations

import time

_STARTED = time.perf_counter()

import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402

from lightning_weightsync.commands.problems import EXIT_MISCONFIGURED, ConfigError, tell  # noqa: E402
from lightning_weightsync.wording import ended, nearest  # noqa: E402

HELP = """\
lightning-weightsync: reinforcement learning in a Lightning Trainer, with worker processes in sync

    lightning-weightsync [train] FILE.yaml [key=value ...]    train what the YAML describes
    lightning-weightsync check   FILE.yaml [key=value ...]    what would it do? finds mistakes; starts no process
    lightning-weightsync bench   FILE.yaml [key=value ...]    what does a push of this model cost on this machine?
    lightning-weightsync report  RUN_FOLDER                   one HTML page about a run
    lightning-weightsync doctor                               is this machine fit? how to mend it
    lightning-weightsync template [FILE.yaml]                 a commented YAML to start from

examples
    lightning-weightsync template my.yaml                     # write it, then edit it
    lightning-weightsync check my.yaml
    lightning-weightsync my.yaml seed=2 trainer.max_epochs=20
    lightning-weightsync my.yaml callbacks.update_weights.interval_unit=optim_steps \\
        callbacks.update_weights.update_weights_interval=8
    lightning-weightsync my.yaml \\
        'callbacks.update_weights.weight_update_map=["policy=actor","replay_buffer.transforms[0]=critic"]'
    lightning-weightsync my.yaml weight_sync_scheme=network collector.num_workers=4
    lightning-weightsync --multirun my.yaml callbacks.update_weights.update_weights_interval=1,4,16
    lightning-weightsync my.yaml ckpt_path=outputs/.../last.ckpt
    lightning-weightsync report outputs/2026-11-30/10-00-00

Hydra's options work too: --cfg job prints the configuration, --config-dir and --config-name name it in another way,
hydra.run.dir=... is where a run leaves its files, and
    eval "$(lightning-weightsync --shell-completion install=bash)"
has the shell complete keys and groups. `lightning-weightsync COMMAND --help` tells more.

exit codes: 0 fine, 1 failed or not solved, 2 wrong configuration or command line
"""

COMMANDS = ("train", "check", "bench", "report", "doctor", "template")


def main() -> None:
    """Entry point of the console script."""
    # A console script has its own folder on sys.path, not the one where the user's modules are.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        code = run(sys.argv[1:])
    except ConfigError as error:
        tell(error)
        code = EXIT_MISCONFIGURED
    sys.stdout.flush()
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run a command line.

    Returns:
        The exit code.

    Raises:
        ConfigError: The command line or the configuration is wrong.
    """
    command, rest = split(arguments)
    if (not rest and command == "train") or (rest and rest[0] in ("-h", "--help") and command == "train"):
        print(HELP, end="")
        return 0 if rest else EXIT_MISCONFIGURED
    return _implementation(command)(rest)


def split(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The subcommand, ``train`` where none is named, and the rest.

    Raises:
        ConfigError: The first word looks like a subcommand, and is none.
    """
    if arguments and arguments[0] in COMMANDS:
        return arguments[0], list(arguments[1:])
    first = arguments[0] if arguments else ""
    if first.isalpha():
        told = ended(f"there is no command {first!r}{nearest(first, COMMANDS)}")
        raise ConfigError(f"{told} Commands: {', '.join(COMMANDS)}")
    return "train", list(arguments)


def _implementation(command: str) -> Callable[[list[str]], int]:
    """Only what a command needs is imported."""
    if command == "report":
        from lightning_weightsync.commands.report import main as report

        return report
    if command == "doctor":
        from lightning_weightsync.commands.doctor import main as doctor

        return doctor
    if command == "template":
        from lightning_weightsync.commands.template import main as template

        return template
    from lightning_weightsync.commands.composing import compose_and_run

    return lambda rest: compose_and_run(command, rest, _STARTED)


if __name__ == "__main__":
    main()
