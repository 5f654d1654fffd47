"""What a checkpoint holds: weights, moments, FP8 scales, generators of random numbers, and the place in the data.

`TrainingRun._save` in `trainer` adds the lengths of the logs and the identity of the run, which must be equal when it
resumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxref_torch.optimizer_step import fp8_history, load_fp8_history
from mxref_training.checkpoint import GROUPS, CheckpointStore, Snapshot
from mxref_training.data import SampleLoader
from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.errors import CheckpointError
from mxref_training.model.llama import Llama
from mxref_training.optim import MOMENTS, load_optimizer_tensors, optimizer_tensors


@dataclass
class RunState:
    """What training changes, and a checkpoint therefore saves. Its methods are called on every rank."""

    model: Llama
    optimizer: torch.optim.Optimizer
    loader: SampleLoader
    device: torch.device
    ranks: Ranks = SOLE

    def tensors(self) -> dict[str, Tensor]:
        """Return weights, buffers and moments by name."""
        return self._weights() | optimizer_tensors(self.model, self.optimizer)

    def snapshot(self, step: int, facts: Mapping[str, Any]) -> Snapshot:
        """Return a checkpoint of the state at a step; `facts` are saved beside it."""
        groups = {
            "model": self._weights(),
            "optimizer": optimizer_tensors(self.model, self.optimizer),
            "rng": {f"rank-{self.ranks.rank}/{k}": t for k, t in _generator_states(self.device).items()},
        }
        return Snapshot(step, groups, {**facts, "loader": self.loader.state_dict()})

    def read(self, store: CheckpointStore, step: int) -> Snapshot:
        """Read a checkpoint that any number of ranks wrote into the model's own weights, and return it for `restore`.

        Raises:
            CheckpointError: as of `CheckpointStore.load`.
        """
        return store.load(step, into={"model": self._weights(), "optimizer": self._moments()})

    def restore(self, snapshot: Snapshot) -> None:
        """Take the rest of the state from what `read` returned. A rank that it does not know keeps its generators."""
        weights, moments, generators = (snapshot.tensors[group] for group in GROUPS)
        load_fp8_history(self.model, {name: t for name, t in weights.items() if ".fp8." in name})
        load_optimizer_tensors(self.model, self.optimizer, moments)
        prefix = f"rank-{self.ranks.rank}/"
        own = {name.removeprefix(prefix): t for name, t in generators.items() if name.startswith(prefix)}
        if own:
            _set_generator_states(self.device, own)
        self.loader.load_state_dict(snapshot.state["loader"])

    def _moments(self) -> dict[str, Tensor]:
        """Return zeros for the optimizer's state, as `optimizer_tensors` names it."""
        return {
            f"{moment}/{name}": torch.zeros((), device=parameter.device)
            if moment == "step"
            else torch.zeros_like(parameter.detach())
            for name, parameter in self.model.named_parameters()
            for moment in MOMENTS
        }

    def _weights(self) -> dict[str, Tensor]:
        tensors = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        if self.model.config.tie_embeddings:
            del tensors["lm_head.weight"]
        return tensors | {name: tensor.detach() for name, tensor in fp8_history(self.model).items()}


def load_weights(model: Llama, snapshot: Snapshot) -> dict[str, Tensor]:
    """Give a model the whole weights of a checkpoint, and return the FP8 history that is saved beside them.

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
        said = str(err).splitlines()[-1].strip()
        raise CheckpointError(
            f"the checkpoint of step {snapshot.step} does not fit the model: {said}"
        ) from err
    return history


def _generator_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of PyTorch's generators, by name, for a checkpoint."""
    states = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_generator_states(device: torch.device, states: dict[str, Tensor]) -> None:
    """Give PyTorch's generators the states of a checkpoint; one from a CPU has none for a GPU."""
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
