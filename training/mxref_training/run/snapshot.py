"""What a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mxref_training.distributed.ranks import Ranks
from mxref_training.parallel import LAYOUT
from mxref_training.wording import counted


@dataclass(frozen=True)
class Snapshot:
    """Everything that a run needs to resume after `step` optimizer steps."""

    step: int
    tensors: Mapping[str, dict[str, Tensor]]
    """Named tensors of each of `GROUPS`; no two may share memory. On several ranks a DTensor is this rank's part."""
    state: Mapping[str, Any]
    """Everything else, as JSON."""

    def resharded(self, ranks: Ranks, identity: Mapping[str, Any]) -> str:
        """Return a note if ranks in another number or layout resume this than wrote it; else nothing.

        Args:
            ranks: of the run that resumes it.
            identity: of that run; its `LAYOUT` is how the ranks share the work.
        """
        wrote = int(self.state.get("ranks", 1))
        layout, own = (held.get(LAYOUT) for held in (self.state["identity"], identity))
        if wrote != ranks.world:
            said = f"resumes on {counted(ranks.world, 'rank')} what {counted(wrote, 'rank')} wrote"
        elif layout != own:
            said = f"resumes on ranks in the layout {own} what the layout {layout} wrote"
        else:
            return ""
        return f"{said}: losses may differ in the last bits, because sums have another order"
