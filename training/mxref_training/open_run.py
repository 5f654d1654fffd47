"""A run whose folder is locked: what it computes, where, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from mxref.backend import Backend
from mxref.recipe import Recipe
from mxref_training.config import TrainConfig
from mxref_training.data.corpus import TokenCorpus
from mxref_training.distributed.agreement import require_agreement, require_same_draws, require_shared
from mxref_training.distributed.ranks import Ranks
from mxref_training.environment import changed_environment, device_name
from mxref_training.errors import CheckpointError, start_over
from mxref_training.identity import identity, run_facts
from mxref_training.log_files import open_logs
from mxref_training.progress import ProgressSink
from mxref_training.run_folder import RunFolder


@dataclass
class OpenRun:
    """A run whose folder is locked: what it computes, where, and how far it is."""

    config: TrainConfig
    recipe: Recipe
    backend: Backend
    device: torch.device
    corpus: TokenCorpus
    folder: RunFolder
    ranks: Ranks
    label: str
    """Its name in progress reports."""
    sink: ProgressSink
    identity: dict[str, Any] = field(default_factory=dict)
    """Everything that determines its numbers."""
    exists: bool = False
    """Whether the folder held the run already."""
    step: int = 0
    """Steps that were taken: at the beginning those of the newest checkpoint."""
    skipped_in_a_row: int = 0
    logs: dict[str, int] = field(default_factory=dict)
    """Lengths of the logs by name, as the newest checkpoint recorded them."""
    training: bool = False
    """Whether its first step is near."""

    @property
    def finished(self) -> bool:
        """Whether all steps are taken."""
        return self.step == self.config.run.steps

    def agree(self) -> None:
        """Learn what determines the run's numbers, which must be the same on all ranks.

        Raises:
            ConfigError: it differs, or the command or the software does.
        """
        parts = self.config, self.recipe, self.backend, self.corpus
        self.identity = identity(*parts, self.ranks.world)
        require_agreement(self.ranks, self.folder.path, self.identity)

    def find(self) -> None:
        """Learn what the folder holds of this run, and how far that is; on all ranks, which must see it.

        Raises:
            ConfigError: a rank does not see the folder, or nothing is there and ranks would draw different weights.
            CheckpointError: the folder holds another run or a part of this one is missing, or it has more steps than
                this run.
        """
        self.exists, self.step = self.ranks.broadcast(self._found() if self.ranks.first else (False, 0))
        if self.exists:
            require_shared(self.folder.path / "run.json", self.ranks)
        if not self.step and self.config.run.init_from is None:
            require_same_draws(self.ranks)
        if self.step > (steps := self.config.run.steps):
            raise CheckpointError(
                f"the run in {self.folder.path} is at step {self.step} already, beyond run.steps = {steps}; "
                f"choose another --out, or {start_over(self.folder.path)}"
            )

    def _found(self) -> tuple[bool, int]:
        """Return whether the folder holds this run, and the step of its newest checkpoint, 0 if there is none."""
        folder, record = self.folder, self.folder.record()
        if record is None:
            return False, 0
        folder.require(self.identity, record["identity"])
        folder.require_checkpoints()
        if changed := changed_environment(record, device_name(self.device)):
            self.sink.note(f"not the machine that began this run, so bits may differ: {', '.join(changed)}")
        step = folder.store.latest()
        if step is None:
            self.sink.note(f"no checkpoint in {folder.store.folder}: starts at step 0")
        return True, step or 0

    def settle(self) -> None:
        """Finish what a killed process left undone of a finished run."""
        self.sink.note(f"{self.folder.path} is finished: {self.step} steps")
        if self.ranks.first:
            for log in open_logs(self.folder.path, self.folder.store.state(self.step)["logs"]).values():
                log.close()
            self.folder.store.settle(self.step)
        self.describe()

    def describe(self) -> None:
        """Write what the folder says of the run, which from then on is in it; on all ranks, which must see it there."""
        folder = self.folder
        if self.ranks.first:
            if not self.exists:
                facts = run_facts(
                    self.config,
                    self.backend,
                    self.corpus,
                    digest=self.recipe.digest,
                    label=self.label,
                    wanted=self.identity,
                    device=device_name(self.device),
                )
                folder.create(facts)
            folder.describe(config=self.config, recipe=self.recipe)
        if not self.exists:
            require_shared(folder.path / "run.json", self.ranks)
