"""The handle of a converted model: it follows optimizers, saves the place in training, and takes the model back.

Random bits are counted in the tensor of all tokens of a step. Micro-batches that lay at the same place would
draw the same bits. So the place moves on by the tokens of a micro-batch when its backward pass ends, when the next
forward pass of the whole model begins, or when a layer that has drawn at this place begins another forward pass.
Compiled code has the place that was set before it was called, so a layer that would draw there again is refused.
Every change of where the place moves to changes the random bits of users' runs.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from mxref.formats import BlockFormat
from mxref.recipe import Recipe
from mxref.roles import GemmRole
from mxref.steps.hadamard import SIZES
from mxref_torch import operators
from mxref_torch.conversion.candidates import Coverage, grouped, starred
from mxref_torch.errors import LayerError, StepError
from mxref_torch.layer.linear import MXLinear, converted, require_converted
from mxref_torch.names import named_linears, replace_modules, some
from mxref_torch.optimizer_step import advance, check_master_weights, fp8_history, load_fp8_history, restart
from mxref_torch.step_context import StepContext, in_backward

_SHARED = [
    key
    for key, value in vars(nn.Module()).items()
    if isinstance(value, dict) and key not in ("_buffers", "_modules")
]
"""Dictionaries of a module that both layers hold, so that what is registered on one is on the other too: hooks."""


def _share(source: nn.Linear, target: nn.Linear) -> None:
    for key in _SHARED:
        vars(target)[key] = vars(source)[key]
    vars(target)["_is_full_backward_hook"] = source._is_full_backward_hook


def keep_plain(layer: MXLinear, source: nn.Linear, name: str) -> None:
    """Give a new layer the hooks of the linear layer it replaces, converted or not, and keep the plain one of them."""
    # In a tuple: as an attribute it would be a child, and have names in state dicts.
    vars(layer)["_plain"] = (plain_of(source, name) if isinstance(source, MXLinear) else source,)
    _share(source, layer)


def plain_of(layer: MXLinear, name: str) -> nn.Linear:
    """Return the layer that `convert` replaced, with Parameters, hooks and mode of the converted one."""
    if hasattr(layer.weight, "to_local"):
        raise LayerError(
            f"{name}: its weight is sharded, and FSDP2 has hooks on the converted layer; save the state dict, and load "
            "it into an unconverted model"
        )
    plain: nn.Linear = vars(layer)["_plain"][0]
    _share(layer, plain)
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
        layers = require_converted(model)
        contexts = {id(layer.context): layer.context for layer in layers.values()}
        if len(contexts) != 1:
            raise LayerError(
                f"the layers of the model belong to {len(contexts)} conversions; convert the whole model at once"
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
        steps after a backward pass. A step that a `GradScaler` skips is not counted. Each micro-batch and each rank
        draws random bits of its own. If you set `context.token_origin` or `context.global_tokens` by hand, only the
        step moves on.

        Args:
            optimizers: hold the trained weights of all converted layers.
            rank: number of the data-parallel rank; default that of `torch.distributed`, or 0.
            ranks: how many there are.

        Raises:
            LayerError: an optimizer that is followed already or is none, a trained weight that none of them holds or
                that is not float32, a wrong rank, or a model that another handle follows.
        """
        if not optimizers:
            raise LayerError("follow takes one or more optimizers, got none")
        layers, followed = converted(self.model), [*self._follower.optimizers] if self._follower else []
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                raise LayerError(f"follow takes optimizers of torch.optim, got {type(optimizer).__name__}")
            if optimizer in followed:
                raise LayerError("this optimizer is followed already: each of its steps would count twice")
            followed.append(optimizer)
        held = {p for one in followed for group in one.param_groups for p in group["params"]}
        trained = {name: layer.weight for name, layer in layers.items() if layer.weight.requires_grad}
        if lost := [name for name, weight in trained.items() if weight not in held]:
            raise LayerError(
                f"no followed optimizer holds the weights of {some(lost)}: make the optimizer after convert, "
                "fully_shard and model.to, pass all optimizers in one call, or freeze them by requires_grad_(False)"
            )
        check_master_weights(self.model, layers.values())
        if self._follower is None:
            self._follower = Follower(self.model, self.context, self.advance, rank, ranks)
            # After a step that was closed by hand or captured, the context still has its number.
            self.context.step = self.context.next_step
        self._follower.follow(optimizers)

    def unfollow(self) -> None:
        """Follow no optimizer any more: the step and the place stay where they are."""
        if self._follower is not None:
            self._follower.stop()
            self._follower = None

    def advance(self) -> None:
        """Close an optimizer step by hand and go to the next one; errors as of `mxref_torch.advance`."""
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
        if set(state) - {"regions"} != {"step", "seed", "fp8"}:
            keys = ", ".join(map(repr, state))
            raise LayerError(f"the state of a handle has the keys 'step', 'seed' and 'fp8', got keys {keys}")
        if state["seed"] != self.context.seed:
            raise LayerError(
                f"the saved seed is {state['seed']}, and the model was converted with seed {self.context.seed}: the "
                f"random bits would be others; pass seed={state['seed']} to convert"
            )
        before = self.context.step
        # The phase of the step decides which layers have a history.
        self.context.step = state["step"]
        self.context.reopen_step()
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
        replace_modules(self.model, plain)
        return self.model

    def __repr__(self) -> str:
        """Return a table: layers whose names differ in numbers alone share a row. The last line has their share."""
        context, coverage, layers = self.context, Coverage(self.model), converted(self.model)
        rows: Counter[tuple[str, ...]] = Counter()
        for name, layer in layers.items():
            formats = [operators.formats_text(*layer.recipe.formats(role)) for role in GemmRole]
            rows[(starred(name), *formats, layer.recipe.digest)] += 1
        table = [("layers", "", *(role.value for role in GemmRole), "recipe")]
        table += [(row[0], f"x{number}", *row[1:]) for row, number in rows.items()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)) for row in table]
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


STEP_TOKENS = 1 << 30
"""Tokens that a step is laid out for, over all ranks. Fixed, so that bits do not depend on the number of tokens."""
_LONGEST = max(SIZES)


class Follower:
    """Moves a context from micro-batch to micro-batch unless it is set by hand, and closes the steps of a model."""

    def __init__(
        self,
        model: nn.Module,
        context: StepContext,
        close: Callable[[], None],
        rank: int | None,
        ranks: int | None,
    ) -> None:
        """Begin to count; `close` closes a step of the model, and the rest is as in `Handle.follow`."""
        together = dist.is_available() and dist.is_initialized()
        ranks = ranks if ranks is not None else dist.get_world_size() if together else 1
        rank = rank if rank is not None else dist.get_rank() if together else 0
        if not 0 <= rank < ranks <= 1 << 20:
            raise LayerError(f"rank = {rank} of ranks = {ranks}: a rank is from 0 to ranks - 1, below 2^20")
        layers = tuple(converted(model).values())
        if any(layer.census.listener is not None for layer in layers):
            raise LayerError("another handle follows an optimizer of this model; call its unfollow() first")
        self._context, self._layers, self._close = context, layers, close
        self.optimizers: list[Optimizer] = []
        """The followed ones."""
        self._closing = -1  # backward pass whose end closes the step
        share = STEP_TOKENS // ranks // _LONGEST * _LONGEST  # whole Hadamard groups
        self._first, self._last = rank * share, (rank + 1) * share
        self._tokens = 0
        self._drawn: set[int] = set()  # layers, by index, that have drawn for a forward pass at this place
        self._task = self._recomputing = -1  # backward passes, by autograd's numbers
        self._set(self._first)
        for layer in layers:
            layer.census.listener = partial(self._ran, layer)
        self._hooks: list[Any] = [model.register_forward_pre_hook(self._begin_pass)]

    def __getstate__(self) -> dict[str, Any]:
        """Return the object for a copied model's hook: it counts nothing, because no handle follows the copy."""
        return {"_tokens": 0, "_drawn": set()}

    # Optimizers.

    def follow(self, optimizers: Sequence[Optimizer]) -> None:
        """Follow these optimizers too."""
        self.optimizers += optimizers
        self._hooks += [each.register_step_post_hook(self._stepped) for each in optimizers]

    def stop(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        for layer in self._layers:
            layer.census.listener = None

    def _stepped(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        """Close the step that an optimizer took: its hook."""
        # A GradScaler calls a fused optimizer also for the step that it skips.
        skipped = getattr(optimizer, "found_inf", None)
        if skipped is not None and bool(skipped):
            for layer in self._layers:
                layer.last_pass = None  # the step continues under the same number
        elif not in_backward():
            self._end_step()
        elif self._closing != (task := torch._C._current_graph_task_id()):
            # An optimizer that steps within the backward pass: the step ends with that pass.
            self._closing = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_step)

    def _end_step(self) -> None:
        self._closing = -1
        if self._context.trained:
            self._close()

    # Micro-batches.

    def begin_step(self) -> None:
        """Go to the first micro-batch of a step."""
        self._tokens = 0
        self._drawn.clear()
        if self._counts:
            self._set(self._first)

    @property
    def _counts(self) -> bool:
        """Whether the place is counted here: the place is still the one that was set last."""
        context = self._context
        return (context.token_origin, context.global_tokens) == (self._origin, STEP_TOKENS)

    def _begin_pass(self, module: torch.nn.Module, arguments: Any) -> None:
        """Note that a forward pass of the whole model begins: its forward pre-hook."""
        if not torch.compiler.is_compiling() and not in_backward():
            self._move_on()

    def _ran(self, layer: MXLinear, role: GemmRole | None, tokens: int) -> None:
        """Note that a GEMM of a layer ran on this many tokens; without a role, that a forward pass of it begins."""
        if role in (None, GemmRole.FPROP) and in_backward():
            self._recomputing = torch._C._current_graph_task_id()
            return
        if role is None:
            if layer.index in self._drawn:
                self._move_on()
            return
        if role is GemmRole.FPROP:
            self._recomputing = -1
            if layer.index in self._drawn and self._counts:
                raise StepError(
                    f"the layer {layer.census.name} ran twice in compiled code at the place of one micro-batch "
                    f"(step {self._context.step}, token {self._origin}), and would draw the same random bits: run the "
                    "backward pass of each micro-batch before the next forward pass, call the model that convert was "
                    "given by its own forward and compile its blocks alone, or set token_origin and global_tokens "
                    "before each call; evaluate within torch.no_grad(); after an error call handle.restart()"
                )
            if layer.draws_by_place:
                self._drawn.add(layer.index)
            self._tokens = max(self._tokens, tokens)
            return
        self._tokens = max(self._tokens, tokens)
        task = torch._C._current_graph_task_id()
        # A backward pass within another one ends before all recomputation has ended.
        if task not in (-1, self._task) and self._recomputing in (-1, task):
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._move_on)

    def _move_on(self) -> None:
        """Go to the next micro-batch, if one ran."""
        self._drawn.clear()
        tokens, self._tokens = self._tokens, 0
        if not tokens or not self._counts:
            return
        origin = self._origin + tokens + -tokens % self._unit(tokens)
        if origin > self._last:
            raise StepError(
                f"more than {self._last - self._first} tokens ran in a step on this rank, and it has random bits for "
                "no more: step the optimizer earlier, or set token_origin and global_tokens before each forward pass"
            )
        self._set(origin)

    def _unit(self, tokens: int) -> int:
        """Return the number of tokens of which a micro-batch's place is a multiple: whole blocks of Wgrad."""
        if tokens % _LONGEST == 0:
            return 1
        specs = {spec for layer in self._layers for spec in layer.recipe.operands(GemmRole.WGRAD)}
        return max(
            (operators.block_unit(spec) for spec in specs if isinstance(spec.format, BlockFormat)), default=1
        )

    def _set(self, origin: int) -> None:
        self._origin = origin
        self._context.token_origin, self._context.global_tokens = origin, STEP_TOKENS
