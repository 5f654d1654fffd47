"""An evaluation as one CUDA graph: the forward passes over all validation batches, without Python between them.

Small models wait for Python in every operator of a forward pass. The graph reads weights and FP8 scales where they lie,
and the step from the device, so each replay evaluates what the weights are then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mxref_torch import operators
from mxref_training.distributed.share import ALONE, Share, added
from mxref_training.distributed.team import rows_of
from mxref_training.model.llama import Llama
from mxref_training.run.evaluate import Evaluation, LossSum, Turn, evaluate, loss_of, turns, undisturbed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mxref_torch import StepContext


_NOTHING = np.empty(0, np.int64)


class CapturedEvaluation:
    """The loss of a model on the first validation tokens; the second evaluation captures a graph.

    The first one runs one operation at a time and compiles what it needs. So does the first one after the recipe of a
    layer has changed.
    """

    def __init__(
        self,
        model: Llama,
        context: StepContext,
        tokens: NDArray[np.integer[Any]],
        *,
        seq_len: int,
        batch: int,
        limit: int,
        loss_sum: LossSum | None = None,
        share: Share = ALONE,
        free: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare to evaluate a model that lies on a GPU; arguments as of `mxref_training.run.evaluate.evaluate`.

        `free` frees the split weights that a forward pass has left gathered.
        """
        self._model, self._context, self._tokens = model, context, tokens
        self._loss_sum, self._share, self._free = loss_sum, share, free
        self._sizes: Any = {"seq_len": seq_len, "batch": batch, "limit": limit}
        self._device = next(model.parameters()).device
        self._step = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._turns: list[Turn] = []
        self._batches: list[tuple[Tensor, Tensor]] = []
        self._losses = torch.empty(0)
        self._recipes: list[Any] = []
        self._graph: Any = None

    def __call__(self) -> Evaluation:
        """Return the loss under the weights, the scales and the step that are in force."""
        self._step.fill_(self._context.step)
        recipes = [getattr(module, "recipe", None) for module in self._model.modules()]
        if recipes != self._recipes:
            self._recipes, self._graph = recipes, None
            # With the step on the device as in a graph, so that it finds the kernels that read it there compiled.
            with operators.device_step(self._step):
                found = evaluate(
                    self._model,
                    self._context,
                    self._tokens,
                    loss_sum=self._loss_sum,
                    share=self._share,
                    **self._sizes,
                )
            self._free()
            return found
        if self._graph is None:
            self._graph = self._captured()
        self._graph.replay()
        rows = self._losses.tolist()[:: self._share.axes.tensor]
        in_order = [row[turn] for turn in range(len(self._turns)) for row in rows]
        count, number = (
            sum(column) for column in zip(*((t.tokens, t.batches) for t in self._turns), strict=True)
        )
        return Evaluation(added(in_order[:number]) / count, count)

    def close(self) -> None:
        """Free the graph, before the ranks part."""
        self._graph = None

    def _captured(self) -> Any:
        seq_len, context = self._sizes["seq_len"], self._context
        if not self._batches:
            found = list(turns(self._tokens, self._share, **self._sizes))
            self._batches = [
                (
                    torch.from_numpy(turn.inputs).to(self._device),
                    torch.from_numpy(turn.targets).to(self._device),
                )
                for turn in found
            ]
            self._turns = [turn._replace(inputs=_NOTHING, targets=_NOTHING) for turn in found]
            self._losses = torch.zeros(self._share.ranks.world, len(found), device=self._device)
        graph, loss_sum = torch.cuda.CUDAGraph(), loss_of(self._model, self._loss_sum)
        with undisturbed(self._model, context):
            context.global_tokens = self._sizes["limit"] // seq_len * seq_len
            with operators.device_step(self._step), torch.cuda.graph(graph):
                own = torch.zeros(len(self._turns), device=self._device)
                for number, (inputs, targets) in enumerate(self._batches):
                    context.token_origin = self._turns[number].origin
                    own[number].copy_(loss_sum(inputs, targets))
                self._free()
                self._losses.copy_(rows_of(own, self._share) if self._share.ranks.several else own[None])
        return graph
