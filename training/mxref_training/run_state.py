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
            "rng": self._generators(),
        }
        return Snapshot(step, groups, {**facts, "loader": self.loader.state_dict()})

    def restore(self, store: CheckpointStore, step: int) -> Snapshot:
        """Take the state of a checkpoint that any number of ranks wrote, and return the checkpoint.

        A rank that it does not know keeps its generators.

        Raises:
            CheckpointError: as of `CheckpointStore.load`.
        """
        snapshot = store.load(step, into={"model": self._weights(), "optimizer": self._moments()})
        weights, moments, generators = (snapshot.tensors[group] for group in GROUPS)
        load_fp8_history(self.model, {name: t for name, t in weights.items() if ".fp8." in name})
        load_optimizer_tensors(self.model, self.optimizer, moments)
        cpu, cuda = (generators.get(name) for name in self._generator_names())
        if cpu is not None:
            torch.set_rng_state(cpu)
        if cuda is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(cuda, self.device)
        self.loader.load_state_dict(snapshot.state["loader"])
        return snapshot

    def _generator_names(self) -> tuple[str, str]:
        return f"rank-{self.ranks.rank}/torch", f"rank-{self.ranks.rank}/cuda"

    def _generators(self) -> dict[str, Tensor]:
        """Return the states of PyTorch's generators on this rank."""
        cpu, cuda = self._generator_names()
        states = {cpu: torch.get_rng_state()}
        if self.device.type == "cuda":
            states[cuda] = torch.cuda.get_rng_state(self.device)
        return states

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
    """Give a model the whole weights of its checkpoint, and return the FP8 history that is saved beside them."""
    tensors = dict(snapshot.tensors["model"])
    if model.config.tie_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    history = {name: tensors.pop(name) for name in list(tensors) if ".fp8." in name}
    model.load_state_dict(tensors)
    return history
