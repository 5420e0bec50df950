"""What was built of a configuration, and which weights would it push? The callbacks' own sources say so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_weightsync.commands.problems import ConfigError
from lightning_weightsync.paths import PathError
from lightning_weightsync.preflight import builds_later
from lightning_weightsync.sources import Sources

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_weightsync.callback import UpdateWeights
    from lightning_weightsync.collectors.group import CollectorGroup


@dataclass
class Built:
    """What a configuration describes; nothing of it is started.

    Attributes:
        module: The LightningModule.
        group: The CollectorGroup.
        updates: Key of each ``UpdateWeights`` node -> the callback.
        trainer: The Trainer; it has all callbacks and loggers.
        unknown: Destination -> why its weights are not known before the run has begun.
    """

    module: pl.LightningModule
    group: CollectorGroup
    updates: dict[str, UpdateWeights]
    trainer: pl.Trainer
    unknown: dict[str, str] = field(default_factory=dict)

    def follow_paths(self) -> None:
        """See whether each source path leads somewhere; no method is called.

        With a module that builds its networks later (``setup``, ``configure_model``), one that does not is ``unknown``.

        Raises:
            ConfigError: One does not; all of them.
        """
        problems = []
        for key, sources, destination in self._mapped():
            sources.bind(self.module, self.trainer)
            try:
                sources.source_of(destination)
            except PathError as error:
                if builds_later(self.module):
                    self.unknown[destination] = str(error)
                else:
                    problems.append(f"{key}.weight_update_map, source of {destination!r}: {error}")
        if problems:
            raise ConfigError(problems)

    def weights(self) -> dict[str, Any]:
        """Destination -> what would be pushed now: methods are called, leaves have the receiver's names.

        A method that raises, which it need not do when the run has begun, makes its destination ``unknown``.
        """
        found = {}
        for _, sources, destination in self._mapped():
            if destination not in self.unknown:
                try:
                    found[destination] = sources.weights_of(destination)
                except Exception as error:
                    self.unknown[destination] = f"making its weights raised {type(error).__name__}: {error}"
        return found

    def _mapped(self) -> Iterator[tuple[str, Sources, str]]:
        for key, update in self.updates.items():
            for destination in update.sources.map or ():
                yield key, update.sources, destination
