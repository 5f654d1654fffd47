"""torchtitan's checkpoints with the place of converted layers in training: step, seed, recipe, FP8's scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpointer import CheckpointManager

from mxref_torch.conversion.handle import Handle
from mxref_torch.errors import LayerError
from mxref_torch.torchtitan.following import RECIPE, handles

KEY = "mxref"
"""The place in training among the states of a checkpoint, and its name in `checkpoint.exclude_from_loading`."""

_WAY_OUT = (
    f"add {KEY!r} to checkpoint.exclude_from_loading, to go on from its weights under the recipe of this job"
)


class MXCheckpointManager(CheckpointManager):
    """torchtitan's own manager, with one more state: the place of converted layers in training.

    A configuration that `MXLinearConverter` made puts it in the place of `CheckpointManager` by itself.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """Configuration of torchtitan's own manager."""

    def __init__(
        self, config: Config, *, model_parts: list[nn.Module], states: dict[str, Any], **components: Any
    ) -> None:
        place = PlaceInTraining(handles(model_parts))
        super().__init__(config, model_parts=model_parts, states=states | {KEY: place}, **components)

    def _load(self, step: int = -1) -> bool:
        try:
            loaded = super()._load(step)
        except CheckpointException as err:
            if f"{KEY}." not in str(err):
                raise
            raise LayerError(
                f"the checkpoint has no {KEY!r} state that fits this model: it was saved without converted layers, or "
                f"under another recipe; {_WAY_OUT}"
            ) from err
        if loaded and KEY in self.exclude_from_loading:
            self.states[KEY].go_to(self.states["train_state"].step)
        return loaded


class PlaceInTraining(Stateful):
    """Step, seed and recipe of a converted model and the history of FP8's scales, over all its parts on this rank."""

    def __init__(self, of: Sequence[Handle]) -> None:
        self.handles = tuple(of)

    def state_dict(self) -> dict[str, Any]:
        """Return the state; each tensor of FP8's history has a key of its own, so that stages do not collide."""
        states = [handle.state_dict() for handle in self.handles]
        if not states:
            return {}
        history: dict[str, torch.Tensor] = {}
        for state in states:
            history |= state["fp8"]
        first = states[0]
        return {"step": first["step"], "seed": first["seed"], "recipe": self._recipe, "fp8": history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint.

        Raises:
            LayerError: the state of another recipe or seed, or of other FP8 layers.
        """
        if self.handles and state["recipe"] != self._recipe:
            raise LayerError(
                f"the checkpoint was saved under the recipe {state['recipe']}, and the model is converted to "
                f"{self._recipe}; convert it to the same recipe, or {_WAY_OUT}"
            )
        for handle in self.handles:
            names = handle.state_dict()["fp8"]
            handle.load_state_dict(
                {
                    "step": state["step"],
                    "seed": state["seed"],
                    "fp8": {name: state["fp8"][name] for name in names},
                }
            )

    @property
    def _recipe(self) -> str:
        return str(getattr(self.handles[0].model, RECIPE))

    def go_to(self, step: int) -> None:
        """Set the step without a history: the next step draws its own bits and makes FP8's scales anew."""
        for handle in self.handles:
            handle.step = step
