"""The parts of a run: model, optimizer, loader, steps and evaluations, and its initial state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import mxref_torch
from mxref.backend import Backend
from mxref.recipe import Recipe
from mxref_training.config import TrainConfig
from mxref_training.data.corpus import TokenCorpus
from mxref_training.distributed.ranks import Ranks
from mxref_training.distributed.share import Share, check_layout
from mxref_training.model.llama import Llama
from mxref_training.model.pretrained import load_pretrained
from mxref_training.run.captured_evaluation import CapturedEvaluation
from mxref_training.run.eager import EagerTraining
from mxref_training.run.finite import require_finite_start
from mxref_training.run.first_step import FirstStep
from mxref_training.run.folder import RunFolder, log_marks
from mxref_training.run.loss import compiled_loss
from mxref_training.run.metrics_log import Mark
from mxref_training.run.optim import make_optimizer
from mxref_training.run.preflight import check_rounding
from mxref_training.run.progress import ProgressSink
from mxref_training.run.saving import Saver
from mxref_training.run.state import RunState
from mxref_training.run.stepping import CapturedTraining


class Assembly:
    """The parts of a run on one rank."""

    def __init__(
        self,
        config: TrainConfig,
        recipe: Recipe,
        folder: RunFolder,
        backend: Backend,
        device: torch.device,
        corpus: TokenCorpus,
        identity: dict[str, Any],
        sink: ProgressSink,
        ranks: Ranks,
    ) -> None:
        check_rounding(backend, recipe)
        run = config.run
        self.config, self.recipe, self.folder = config, recipe, folder
        self.backend, self.device = backend, device
        self.corpus, self.identity, self.sink = corpus, identity, sink
        self.ranks, self.share = ranks, Share(ranks, check_layout(config, ranks.world))
        split = not self.share.axes.whole
        # Weights are drawn only if nothing else gives them, which takes long at full size.
        self.model = Llama(config.model, None, device="meta" if split else device)
        self.context = mxref_torch.convert(
            self.model, recipe, backend=backend, seed=run.seed, steps=run.steps
        ).context
        assert self.context.schedule is not None  # `convert` made it
        self.schedule = self.context.schedule
        self.model.model.recompute = run.recompute
        self.compiled = compiled_loss(self.model, run.compile)
        if split:
            from mxref_training.distributed import sharded

            sharded.shard(
                self.model, sharded.make_mesh(device, self.share.axes), device,
                keep_gathered=bool(config.parallel and config.parallel.keep_gathered),
            )  # fmt: skip
            self.model.model.rotary_emb.fill()
        self.optimizer = make_optimizer(self.model, config.optim)
        self.loader = corpus.loader(run)
        self.state = RunState(self.model, self.optimizer, self.loader, device, ranks)
        self.saver = Saver(folder.store, run.async_checkpoint)
        self.first = FirstStep(self.model, self.optimizer, self.context, recipe, config)
        self.eager = EagerTraining(
            self.model, self.context, self.optimizer, config, self.first, self.compiled, self.share
        )
        self.captured: CapturedTraining | None = None
        if run.capture:
            self.captured = CapturedTraining(
                self.model, self.context, self.optimizer, config, self.compiled, self.share, self.eager.team
            )
        self.evaluated: dict[str, Any] = {
            "seq_len": run.seq_len, "batch": self.share.sequences(run), "limit": run.eval_tokens,
            "loss_sum": self.compiled and self.compiled.total,
        }  # fmt: skip
        if ranks.several:
            self.evaluated["share"] = self.share
        self.captured_evaluation: CapturedEvaluation | None = None
        if run.capture and device.type == "cuda" and not ranks.several:
            watched = self.model, self.context, corpus.val.ids
            self.captured_evaluation = CapturedEvaluation(*watched, **self.evaluated)
        self.step = self.skipped_in_a_row = 0

    def begin(self, step: int) -> None:
        """Take the state of a checkpoint, or the initial one at step 0, and refuse it unless it is finite."""
        torch.manual_seed(self.config.run.seed)  # so that a module that draws from it stays repeatable
        self.marks: dict[str, Mark] = {}
        if step:
            self.marks = self._restore(step)
        elif self.config.run.init_from is not None:
            load_pretrained(self.model, Path(self.config.run.init_from))
        else:
            self.model.reset_parameters(self.config.run.seed)
        require_finite_start(self.state.tensors(), step, self.config, self.folder.store, self.ranks)

    def _restore(self, step: int) -> dict[str, Mark]:
        """Take a checkpoint's state; return what metrics and timing files held at that point."""
        # The checkpoint has the scales of its phase, and ranks read into those that the layers have.
        self.context.step = step - 1
        snapshot = self.state.read(self.folder.store, step)
        self.folder.require(self.identity, snapshot.state["identity"])
        self.state.restore(snapshot)
        for said in (snapshot.resharded(self.ranks, self.identity), self.folder.store.lost()):
            if said:
                self.sink.note(said)
        self.step, self.skipped_in_a_row = step, int(snapshot.state["skipped_in_a_row"])
        return log_marks(snapshot.state)
