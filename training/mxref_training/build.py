"""Builds the parts of a run on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mxref_torch
from mxref_training.checkpoint import Saver
from mxref_training.data import SampleLoader
from mxref_training.distributed import sharded
from mxref_training.distributed.share import Share
from mxref_training.evaluate import Evaluator
from mxref_training.model.llama import Llama
from mxref_training.model.loss import compiled_loss
from mxref_training.open_run import OpenRun
from mxref_training.optim import make_optimizer
from mxref_training.resume import begin
from mxref_training.run_state import RunState
from mxref_training.steps import CapturedSteps, EagerSteps, Steps

_rounds_well = cache(mxref_torch.check_stochastic_rounding)
"""The check of a backend's stochastic rounding, once in a process for each recipe: it takes as long as some steps."""


@dataclass
class Built:
    """The parts of a run."""

    model: Llama
    context: mxref_torch.StepContext
    phases: mxref_torch.step_context.RecipeSchedule
    """The phases of the recipe."""
    loader: SampleLoader
    steps: Steps
    evaluator: Evaluator
    state: RunState
    """What a checkpoint holds of them."""
    saver: Saver


def build(run: OpenRun) -> Built:
    """Return the parts of a run, in the state of its newest checkpoint, or the initial one at step 0.

    Raises:
        MxrefError: stochastic rounding does not round well, or the model does not fit the recipe; or as of `begin`.
    """
    config, settings, device, ranks = run.config, run.config.run, run.device, run.ranks
    _rounds_well(run.backend, run.recipe)
    share = Share(ranks, config.axes(ranks.world))
    # Weights are drawn only if nothing else gives them, which takes long at full size.
    model = Llama(config.model, None, device=device if share.axes.whole else "meta")
    context = mxref_torch.convert(
        model, run.recipe, backend=run.backend, seed=settings.seed, steps=settings.steps
    ).context
    assert context.schedule is not None  # `convert` made it
    model.model.recompute = settings.recompute
    loss = compiled_loss(model, settings.compile)
    if not share.axes.whole:
        mesh = sharded.make_mesh(device, share.axes)
        sharded.shard(model, mesh, device, keep_gathered=config.keeps_gathered)
        model.model.rotary_emb.fill()
    optimizer = make_optimizer(model, config.optim)
    kind = CapturedSteps if settings.capture else EagerSteps
    steps = kind(model, context, optimizer, config, run.recipe, loss, share)
    loader = run.corpus.loader(settings)
    state = RunState(model, optimizer, loader, device, ranks)
    begin(run, state, context)
    return Built(
        model,
        context,
        context.schedule,
        loader,
        steps,
        Evaluator(
            model,
            context,
            run.corpus.val.ids,
            seq_len=settings.seq_len,
            batch=share.sequences(settings),
            limit=settings.eval_tokens,
            loss_sum=loss and loss.total,
            share=share,
            captured=settings.capture and device.type == "cuda" and not ranks.several,
        ),
        state,
        Saver(run.folder.store, settings.async_checkpoint),
    )
