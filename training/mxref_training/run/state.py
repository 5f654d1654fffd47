"""The state of a training run that a checkpoint holds: model, optimizer, loader and random generators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxref.errors import MxrefError
from mxref_torch.optimizer_step.history import fp8_history, load_fp8_history
from mxref_training.data import SampleLoader
from mxref_training.errors import CheckpointError
from mxref_training.model.llama import Llama
from mxref_training.run.checkpoint import Snapshot
from mxref_training.run.device import generator_states, set_generator_states
from mxref_training.run.optim import load_optimizer_tensors, optimizer_tensors


def load_weights(model: Llama, snapshot: Snapshot) -> dict[str, Tensor]:
    """Give a model the weights of a checkpoint, and return the FP8 history that is saved beside them.

    Raises:
        CheckpointError: it is of another model.
    """
    tensors = dict(snapshot.tensors["model"])
    if model.config.tie_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    history = {name: tensors.pop(name) for name in list(tensors) if ".fp8." in name}
    try:
        model.load_state_dict(tensors)
    except RuntimeError as err:
        raise _unfit(snapshot, err) from err
    return history


def _unfit(snapshot: Snapshot, err: Exception) -> CheckpointError:
    first = str(err).splitlines()[-1].strip()
    return CheckpointError(f"the checkpoint of step {snapshot.step} does not fit the model: {first}")


@dataclass
class RunState:
    """What training changes, and a checkpoint therefore saves."""

    model: Llama
    optimizer: torch.optim.Optimizer
    loader: SampleLoader
    device: torch.device

    def tensors(self) -> dict[str, Tensor]:
        """Return weights, buffers and moments by name."""
        return self._weights() | optimizer_tensors(self.model, self.optimizer)

    def snapshot(self, step: int, facts: Mapping[str, Any]) -> Snapshot:
        """Return a checkpoint of the state at a step; `facts` are saved beside it."""
        groups = {
            "model": self._weights(),
            "optimizer": optimizer_tensors(self.model, self.optimizer),
            "rng": generator_states(self.device),
        }
        return Snapshot(step, groups, {**facts, "loader": self.loader.state_dict()})

    def restore(self, snapshot: Snapshot) -> None:
        """Take the state of a checkpoint; CheckpointError if it is of another model."""
        history = load_weights(self.model, snapshot)
        try:
            load_fp8_history(self.model, history)
        except MxrefError as err:
            raise _unfit(snapshot, err) from err
        load_optimizer_tensors(self.model, self.optimizer, snapshot.tensors["optimizer"])
        set_generator_states(self.device, snapshot.tensors["rng"])
        self.loader.load_state_dict(snapshot.state["loader"])

    @property
    def _tied(self) -> bool:
        return self.model.config.tie_embeddings

    def _weights(self) -> dict[str, Tensor]:
        tensors = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        if self._tied:
            del tensors["lm_head.weight"]
        return tensors | {name: tensor.detach() for name, tensor in fp8_history(self.model).items()}
