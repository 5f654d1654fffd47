"""An evaluation as one CUDA graph: the forward passes over all validation batches, without Python between them.

Small models wait for Python in every operator of a forward pass. The graph reads weights and FP8 scales where they lie,
and the step from the device, so each replay evaluates the current weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mxref_torch import operators
from mxref_torch.captured.graph import capturing
from mxref_training.data import sequential_batches
from mxref_training.model.llama import Llama
from mxref_training.run.evaluate import Evaluation, LossSum, evaluate, loss_of, undisturbed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mxref_torch import StepContext


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
    ) -> None:
        """Prepare to evaluate a model that lies on a GPU; arguments as of `mxref_training.run.evaluate.evaluate`."""
        self._model, self._context, self._tokens = model, context, tokens
        self._loss_sum = loss_sum
        self._sizes: Any = {"seq_len": seq_len, "batch": batch, "limit": limit}
        self._device = next(model.parameters()).device
        # PyTorch's own stream for captures lies on the GPU on which this process has captured first.
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._step = torch.zeros(1, dtype=torch.int64, device=self._device)
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
            # The step is on the device as in a graph, so that the kernels that read it there are compiled before the
            # capture.
            with operators.device_step(self._step):
                return evaluate(
                    self._model, self._context, self._tokens, loss_sum=self._loss_sum, **self._sizes
                )
        if self._graph is None:
            self._graph = self._captured()
        self._graph.replay()
        total = 0.0
        for loss in self._losses.tolist():
            total += loss
        count = sum(targets.numel() for _, targets in self._batches)
        return Evaluation(total / count, count)

    def _captured(self) -> Any:
        seq_len, context = self._sizes["seq_len"], self._context
        if not self._batches:
            windows = sequential_batches(self._tokens, seq_len, self._sizes["batch"], self._sizes["limit"])
            self._batches = [
                (torch.from_numpy(inputs).to(self._device), torch.from_numpy(targets).to(self._device))
                for inputs, targets in windows
            ]
            self._losses = torch.zeros(len(self._batches), device=self._device)
        graph, loss_sum = torch.cuda.CUDAGraph(), loss_of(self._model, self._loss_sum)
        with undisturbed(self._model, context):
            context.global_tokens = self._sizes["limit"] // seq_len * seq_len
            with operators.device_step(self._step), capturing(graph, self._stream):
                count = 0
                for number, (inputs, targets) in enumerate(self._batches):
                    context.token_origin = count
                    self._losses[number].copy_(loss_sum(inputs, targets))
                    count += targets.numel()
        return graph
