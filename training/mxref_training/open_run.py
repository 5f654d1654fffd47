"""A run whose folder is locked: what it computes, where, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mxref.backend import Backend
from mxref.recipe import Recipe
from mxref_training.agreement import require_shared
from mxref_training.config import TrainConfig
from mxref_training.data.corpus import TokenCorpus
from mxref_training.device import device_name
from mxref_training.distributed.ranks import Ranks
from mxref_training.identity import run_facts
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
    identity: dict[str, Any]
    """Everything that determines its numbers."""
    label: str
    """Its name in progress reports."""
    sink: ProgressSink
    exists: bool = False
    """Whether the folder held the run already."""
    step: int = 0
    """Steps that were taken: at the beginning those of the newest checkpoint."""
    skipped_in_a_row: int = 0
    training: bool = False
    """Whether its first step is near."""

    @property
    def finished(self) -> bool:
        """Whether all steps are taken."""
        return self.step == self.config.run.steps

    def describe(self) -> None:
        """Write what the folder says of the run, which from then on is in it; on all ranks, which must see it there."""
        folder = self.folder
        if self.ranks.first:
            if not self.exists:
                facts = run_facts(self.config, self.label, self.identity, self.backend)
                folder.create(self.recipe, self.corpus, device_name(self.device), facts)
            folder.describe(self.config, self.recipe)
        if not self.exists:
            require_shared(folder.path / "run.json", self.ranks)
