"""The state of a training run that a checkpoint holds: model, optimizer, loader and random generators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mxref.errors import MxrefError
from mxref_torch.optimizer_step import fp8_history, load_fp8_history
from mxref_training.data import SampleLoader
from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.errors import CheckpointError
from mxref_training.model.llama import Llama
from mxref_training.run.checkpoint import CheckpointStore
from mxref_training.run.device import generator_states, set_generator_states
from mxref_training.run.optim import MOMENTS, load_optimizer_tensors, optimizer_tensors
from mxref_training.run.snapshot import Snapshot


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
            "rng": {f"{self._own}{name}": t for name, t in generator_states(self.device).items()},
        }
        return Snapshot(step, groups, {**facts, "loader": self.loader.state_dict()})

    def read(self, store: CheckpointStore, step: int) -> Snapshot:
        """Return a checkpoint for `restore`. On several ranks each reads its own parts, into the model's own weights.

        Raises:
            CheckpointError: as of `CheckpointStore.load`.
        """
        return store.load(step, targets=self._targets) if self.ranks.several else store.load(step)

    def restore(self, snapshot: Snapshot) -> None:
        """Take the state of a checkpoint that any number of ranks wrote; CheckpointError if it is of another model.

        A rank that the checkpoint does not know keeps its random generators.
        """
        history = load_weights(self.model, snapshot)
        try:
            load_fp8_history(self.model, history)
        except MxrefError as err:
            raise _unfit(snapshot, err) from err
        load_optimizer_tensors(self.model, self.optimizer, snapshot.tensors["optimizer"])
        if own := self._own_generators(snapshot.tensors["rng"]):
            set_generator_states(self.device, own)
        self.loader.load_state_dict(snapshot.state["loader"])

    @property
    def _own(self) -> str:
        """Return the prefix of the names of this rank's generators."""
        return f"rank-{self.ranks.rank}/" if self.ranks.several else ""

    def _own_generators(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the states that this rank takes of those that a checkpoint has."""
        prefix = f"rank-{self.ranks.rank}/"
        own = {name.removeprefix(prefix): t for name, t in saved.items() if name.startswith(prefix)}
        alone = {name: t for name, t in saved.items() if "/" not in name}  # written by one process
        return own or (alone if self.ranks.first else {})

    def _targets(self, group: str, names: frozenset[str]) -> dict[str, Tensor] | None:
        """Return the tensors of this rank that take a group; LookupError if the group is not of this model.

        Generators are small: each rank reads those of all.
        """
        if group == "rng":
            return None
        targets = self._weights() if group == "model" else self._moments() if names else {}
        if left := names ^ targets.keys():
            raise LookupError(f"only one of them has {min(left)}")
        return targets

    def _moments(self) -> dict[str, Tensor]:
        """Return zeros for the optimizer's state, as `optimizer_tensors` names it."""
        return {
            f"{moment}/{name}": torch.zeros((), device=parameter.device)
            if moment == "step"
            else torch.zeros_like(parameter.detach())
            for name, parameter in self.model.named_parameters()
            for moment in MOMENTS
        }

    @property
    def _tied(self) -> bool:
        return self.model.config.tie_embeddings

    def _weights(self) -> dict[str, Tensor]:
        tensors = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        if self._tied:
            del tensors["lm_head.weight"]
        return tensors | {name: tensor.detach() for name, tensor in fp8_history(self.model).items()}
