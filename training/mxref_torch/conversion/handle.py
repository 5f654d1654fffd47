"""The handle of a converted model: it follows optimizers, saves the place in training, and takes the model back."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mxref.recipe import Recipe
from mxref.roles import GemmRole
from mxref_torch import operators
from mxref_torch.conversion.candidates import Coverage, grouped, starred
from mxref_torch.conversion.following import Follower, check_optimizers
from mxref_torch.errors import LayerError
from mxref_torch.layer.linear import MXLinear, converted
from mxref_torch.names import named_linears, replace_modules
from mxref_torch.optimizer_step import advance, check_master_weights, fp8_history, load_fp8_history, restart

_SHARED = [
    key
    for key, value in vars(nn.Module()).items()
    if isinstance(value, dict) and key not in ("_buffers", "_modules")
]
"""Dictionaries of a module that both layers hold, so that what is registered on one is on the other too: hooks."""


def keep_plain(layer: MXLinear, source: nn.Linear, name: str) -> None:
    """Give a new layer the hooks of the linear layer it replaces, converted or not, and keep the plain one of them."""
    plain = plain_of(source, name) if isinstance(source, MXLinear) else source
    for key in _SHARED:
        vars(layer)[key] = vars(source)[key]
    vars(layer)["_is_full_backward_hook"] = source._is_full_backward_hook
    # In a tuple: as an attribute it would be a child, and have names in state dicts.
    vars(layer)["_plain"] = (plain,)


def plain_of(layer: MXLinear, name: str) -> nn.Linear:
    """Return the linear layer that `convert` replaced, with the Parameters, hooks and mode of the converted one.

    Raises:
        LayerError: a layer that convert has not made, or whose weights are sharded.
    """
    if "_plain" not in vars(layer):
        raise LayerError(f"{name}: convert has not made this layer, so there is no nn.Linear to return to")
    if hasattr(layer.weight, "to_local"):
        raise LayerError(
            f"{name}: its weight is sharded, and FSDP2 has hooks on the converted layer; save the state dict, and load "
            "it into an unconverted model"
        )
    plain: nn.Linear = vars(layer)["_plain"][0]
    for key in _SHARED:
        vars(plain)[key] = vars(layer)[key]
    vars(plain)["_is_full_backward_hook"] = layer._is_full_backward_hook
    plain.training = layer.training
    return plain


class Handle:
    """What `convert` returns: the converted model, its place in training, and the way back.

    `Handle(model)` makes one for a converted model that was copied or loaded by `torch.load`.

    Attributes:
        model: the converted model.
        context: what its layers share: seed, place of the micro-batch in the step, schedule and census.
        layers: the names of the converted layers.

    Raises:
        LayerError: a model without converted layers, or with layers of several conversions.
    """

    # What belongs to the context can then not be set here, where nothing would read it.
    __slots__ = ("_follower", "_known", "context", "layers", "model")

    def __init__(self, model: nn.Module) -> None:
        layers = converted(model)
        contexts = {id(layer.context): layer.context for layer in layers.values()}
        if len(contexts) != 1:
            raise LayerError(
                "no layer of the model is converted; call mxref_torch.convert"
                if not contexts
                else f"the layers of the model belong to {len(contexts)} conversions; convert the whole model at once"
            )
        self.model = model
        (self.context,) = contexts.values()
        self.layers = tuple(layers)
        self._known = {name for name in named_linears(model) if name not in layers}  # layers that stay plain
        self._follower: Follower | None = None

    @property
    def step(self) -> int:
        """Number of the optimizer step, from 0; `follow` moves it on."""
        return self.context.step

    @step.setter
    def step(self, step: int) -> None:
        self.context.step = step
        self._note_plain_layers()

    @property
    def recipes(self) -> dict[str, Recipe]:
        """The recipe of each converted layer, by its name."""
        return {name: layer.recipe for name, layer in converted(self.model).items()}

    # Following an optimizer.

    def follow(self, *optimizers: Optimizer, rank: int | None = None, ranks: int | None = None) -> None:
        """Move the step on after each step of the optimizers, and the place after each micro-batch.

        Give all optimizers of the model in one call, after `fully_shard`. The step moves on when the first of them
        steps after a backward pass; the others then belong to the same step. A step that a `GradScaler` skips
        is not counted. Each micro-batch and each rank draws random bits of its own, at the place that is then set in
        the context. If you set `context.token_origin` or `context.global_tokens` by hand, only the step moves on.

        Args:
            optimizers: hold the trained weights of all converted layers.
            rank: number of the data-parallel rank; default that of `torch.distributed`, or 0.
            ranks: how many there are.

        Raises:
            LayerError: an optimizer that is followed already or is none, a trained weight that none of them holds or
                that is not float32, a wrong rank, or a model that another handle follows.
        """
        layers = converted(self.model)
        check_optimizers(optimizers, self._follower.optimizers if self._follower else (), layers)
        check_master_weights(self.model, layers.values())
        if self._follower is None:
            self._follower = Follower(
                self.model, self.context, tuple(layers.values()), self.advance, rank, ranks
            )
            # After a step that was closed by hand or captured, the context still has its number.
            self.context.step = self.context.next_step
        self._follower.follow(optimizers)

    def unfollow(self) -> None:
        """Follow no optimizer any more: the step and the place stay where they are."""
        if self._follower is not None:
            self._follower.stop()
            self._follower = None

    def advance(self) -> None:
        """Close an optimizer step by hand and go to the next one.

        Raises:
            StepError: as `mxref_torch.advance`.
        """
        advance(self.model)
        self.step += 1
        if self._follower is not None:
            self._follower.begin_step()

    def _note_plain_layers(self) -> None:
        """Warn once of each linear layer that was added since `convert`, or has replaced a converted one.

        It is no error: adapters are added on purpose, and many compute in their own precision on purpose too.
        """
        plain = [name for name, layer in named_linears(self.model).items() if not isinstance(layer, MXLinear)]
        if new := [name for name in plain if name not in self._known]:
            self._known.update(new)
            warnings.warn(
                f"these linear layers came into the model after convert, and compute in their own precision: "
                f"{grouped(new)}; add them before convert, or convert the model again",
                stacklevel=3,
            )

    def restart(self) -> None:
        """Discard what the current step has left in the layers, so that the step can be repeated from its start."""
        restart(self.model)
        if self._follower is not None:
            self._follower.begin_step()

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return the place in training between two steps: step, seed and FP8's history, as copies on the CPU.

        The history that only regions of another recipe have used is under the key `regions`, if there is any. Save the
        state beside the state dict of the model, which is that of the unconverted model.
        """
        # After a step that was closed by hand or captured, the context still has its number.
        self.context.step = self.context.next_step
        history, regions = (
            {name: t.detach().cpu().clone() for name, t in fp8_history(self.model, of_regions=kind).items()}
            for kind in (False, True)
        )
        state = {"step": self.context.step, "seed": self.context.seed, "fp8": history}
        return state | ({"regions": regions} if regions else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state of `state_dict`; the next step then draws the bits that it would have drawn.

        Raises:
            LayerError: a state with other keys, of another seed, or of a model with other FP8 layers.
        """
        if not isinstance(state, Mapping) or set(state) - {"regions"} != {"step", "seed", "fp8"}:
            keys = (
                f"keys {', '.join(map(repr, state))}" if isinstance(state, Mapping) else type(state).__name__
            )
            raise LayerError(f"the state of a handle has the keys 'step', 'seed' and 'fp8', got {keys}")
        if state["seed"] != self.context.seed:
            raise LayerError(
                f"the saved seed is {state['seed']}, and the model was converted with seed {self.context.seed}: the "
                f"random bits would be others; pass seed={state['seed']} to convert"
            )
        if isinstance(state["step"], bool) or not isinstance(state["step"], int) or state["step"] < 0:
            raise LayerError(f"the saved step is {state['step']!r}, but a step is a number from 0")
        before = self.context.step
        self.context.reopen_step()
        # The phase of the step decides which layers have a history.
        self.context.step = state["step"]
        try:
            load_fp8_history(self.model, state["fp8"], state.get("regions"))
        except LayerError:
            self.context.step = before
            raise
        if self._follower is not None:
            self._follower.begin_step()

    def unconvert(self) -> nn.Module:
        """Put the nn.Linear modules back, with the same Parameters, hooks and mode, and return the model.

        Raises:
            LayerError: sharded weights, or a model that was converted again since; the model is then unchanged.
        """
        layers = converted(self.model)
        if any(layer.context is not self.context for layer in layers.values()) or not layers:
            raise LayerError(
                "the model is not converted any more, or was converted again; use the newest handle"
            )
        plain = {layer: plain_of(layer, name) for name, layer in layers.items()}
        self.unfollow()
        self._known.update(layers)
        replace_modules(self.model, plain)
        return self.model

    def __repr__(self) -> str:
        """Return a table: layers whose names differ in numbers alone share a row. The last line has their share."""
        context, coverage = self.context, Coverage(self.model)
        layers = converted(self.model)
        rows: Counter[tuple[str, ...]] = Counter()
        for name, layer in layers.items():
            formats = [operators.formats_text(*layer.recipe.formats(role)) for role in GemmRole]
            rows[(starred(name), *formats, layer.recipe.digest)] += 1
        table = [("layers", "", *(role.value for role in GemmRole), "recipe")]
        table += [(row[0], f"x{number}", *row[1:]) for row, number in rows.items()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table
        ]
        followed = len(self._follower.optimizers) if self._follower else 0
        head = (
            f"Handle of {len(layers)} converted layers of {len(coverage.linears)}: backend {context.backend.name}, "
            f"seed {context.seed}, step {context.step}, follows {followed} optimizers"
        )
        low = {name for name, layer in layers.items() if layer.low_precision}
        share = f"{coverage.share(low):.1f} % of the weights in the matrices of the model's blocks are in low precision"
        if coverage.others:
            share += f"; in no nn.Linear: {grouped(coverage.others)}"
        return "\n  ".join([head, *(line.rstrip() for line in lines), share])
