"""Gives a run its state: that of its newest checkpoint, or the initial one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mxref_torch import StepContext
from mxref_training.checkpoint import Snapshot
from mxref_training.config import LAYOUT
from mxref_training.distributed.ranks import Ranks
from mxref_training.finite import require_finite_start
from mxref_training.model import pretrained
from mxref_training.open_run import OpenRun
from mxref_training.run_state import RunState
from mxref_training.wording import counted


def begin(run: OpenRun, state: RunState, context: StepContext) -> None:
    """Give a run the state of its checkpoint, or the initial one at step 0, which must be finite.

    Raises:
        CheckpointError: the checkpoint is of another run, is damaged or not finite.
        ConfigError: initial weights that are not finite.
    """
    settings, store = run.config.run, run.folder.store
    torch.manual_seed(settings.seed)  # so that a module that draws from it stays repeatable
    if run.step:
        # The checkpoint has the scales of its phase, and ranks read into those that the layers have.
        context.step = run.step - 1
        run.folder.require(run.identity, store.state(run.step)["identity"])
        snapshot = state.restore(store, run.step)
        if said := resharded(snapshot, run.ranks, run.identity):
            run.sink.note(said)
        run.skipped_in_a_row = int(snapshot.state["skipped_in_a_row"])
        run.logs = snapshot.state["logs"]
    elif settings.init_from is not None:
        pretrained.load_pretrained(state.model, settings.init_from)
    else:
        state.model.reset_parameters(settings.seed)
    require_finite_start(run, state.tensors())


def resharded(snapshot: Snapshot, ranks: Ranks, identity: Mapping[str, Any]) -> str:
    """Return a note if ranks in another number or layout resume a checkpoint than wrote it; else nothing.

    Args:
        snapshot: the checkpoint.
        ranks: of the run that resumes it.
        identity: of that run; its `LAYOUT` is how the ranks share the work.
    """
    wrote = snapshot.state["ranks"]
    layout, own = (held.get(LAYOUT) for held in (snapshot.state["identity"], identity))
    if wrote != ranks.world:
        said = f"resumes on {counted(ranks.world, 'rank')} what {counted(wrote, 'rank')} wrote"
    elif layout != own:
        said = f"resumes on ranks in the layout {own} what the layout {layout} wrote"
    else:
        return ""
    return f"{said}: losses may differ in the last bits, because sums have another order"
