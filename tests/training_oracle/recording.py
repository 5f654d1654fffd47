"""Records a run of the training loop through PyTorch's own hooks, without replacing any code of mxref."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import mxref_torch
from mxref.placement import Placement
from mxref.recipe import Recipe
from mxref.reference import ReferenceBackend
from mxref_torch.layer.linear import MXLinear
from mxref_training.config import TrainConfig
from mxref_training.data.corpus import TokenCorpus
from mxref_training.model.llama import Llama
from mxref_training.progress import ProgressSink
from training_oracle.layer import Array, Arrays
from training_setup import lines, run

TENSORS = ("x", "w", "dy")


@dataclass
class Forward:
    """One forward pass."""

    inputs: Array
    training: bool
    logits: Array = field(default_factory=lambda: np.empty(0))
    gradient: Array | None = None
    """Of the loss at the logits."""


@dataclass
class Step:
    """One optimizer step; the arrays are by parameter name."""

    forwards: list[Forward] = field(default_factory=list)
    raw: Arrays = field(default_factory=dict)
    """Gradients as the last micro-batch left them."""
    clipped: Arrays = field(default_factory=dict)
    """Gradients that the optimizer was given; none where the step was skipped."""
    before: Arrays = field(default_factory=dict)
    after: Arrays = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    scales: dict[tuple[str, str], np.float32] = field(default_factory=dict)
    """FP8 scale in force, by layer and tensor; 0 before any history."""
    amaxes: dict[tuple[str, str], list[np.float32]] = field(default_factory=dict)
    """Of each micro-batch."""
    products: list[tuple[Array, Array, Array]] = field(default_factory=list)
    """X, W and Y of the watched layer, in each micro-batch."""


@dataclass
class Call:
    """One tensor that a backend was asked to quantize."""

    step: int
    phase: str
    forward: int
    """Number of the forward pass within its step or evaluation."""
    shape: tuple[int, ...]
    axis: int
    spec: Any
    stream: Any
    origin: tuple[int, ...] | None
    global_shape: tuple[int, ...] | None


@dataclass
class Recording:
    """A run, and what was seen of it."""

    config: TrainConfig
    corpus: TokenCorpus
    folder: Path
    steps: list[Step]
    evaluations: dict[int, list[Forward]]
    """By the number of steps taken before."""
    calls: list[Call]
    names: list[str]
    """Linear layers in definition order."""

    @property
    def log(self) -> list[dict[str, Any]]:
        return lines(self.folder)

    def tensors(self, step: int, group: str) -> Arrays:
        found = load_file(self.folder / f"checkpoints/step-{step}/{group}.safetensors")
        return {name: tensor.numpy() for name, tensor in found.items()}


def floats(tensor: torch.Tensor) -> NDArray[np.float32]:
    """A copy as float32, which holds every bfloat16."""
    return tensor.detach().to(torch.float32, copy=True).numpy()


class Recorder(ProgressSink):
    """Listens to the models, the optimizer and the progress of runs in this process.

    Args:
        spoil: what becomes NaN in which step, from 0: `loss`, at the first micro-batch, or `gradient`.
        gradients: listen to each parameter's gradient. Wgrad in MXFP4 is then not added in place.
    """

    WATCHED = "model.layers.0.self_attn.q_proj"

    def __init__(self, spoil: dict[int, str] | None = None, gradients: bool = True) -> None:
        self.spoil, self.gradients = spoil or {}, gradients
        self.steps, self.evaluations = [Step()], {}
        self.calls: list[Call] = []
        self.model: Llama | None = None
        self.names: dict[int, str] = {}
        self.phase = "start"

    @property
    def number(self) -> int:
        """Number of the step in progress, from 0."""
        return len(self.steps) - 1

    @contextmanager
    def listening(self) -> Iterator[None]:
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave),
            register_optimizer_step_pre_hook(self._update),
            register_optimizer_step_post_hook(self._updated),
        ]
        hold = mxref_torch.weights_held
        mxref_torch.weights_held = lambda model: self._holding(hold, model)
        try:
            yield
        finally:
            mxref_torch.weights_held = hold
            for handle in handles:
                handle.remove()

    def _holding(self, hold: Any, model: Any) -> Any:
        """Weights that a step holds are quantized before its first forward pass."""
        self.phase = "train"
        return hold(model)

    def step(self, step: int, loss: float | None) -> None:
        self.steps.append(Step())

    def _enter(self, module: Any, args: Any) -> None:
        if not isinstance(module, Llama):
            return
        if module is not self.model:
            self._meet(module)
        seen = Forward(args[0].numpy().copy(), module.training)
        if torch.is_grad_enabled():
            self.phase = "train"
            if not self.steps[-1].forwards:
                self._begin(module)
            self.steps[-1].forwards.append(seen)
        else:
            self.phase = "evaluate"
            self.evaluations.setdefault(self.number, []).append(seen)

    def _meet(self, model: Llama) -> None:
        self.model = model
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.names |= {id(m): name for name, m in model.named_modules() if isinstance(m, MXLinear)}
        for name, parameter in model.named_parameters() if self.gradients else ():
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: self.steps[-1].raw.__setitem__(name, floats(p.grad))
            )

    def _begin(self, model: Llama) -> None:
        step = self.steps[-1]
        step.before = {name: floats(p) for name, p in model.named_parameters()}
        for name, module in model.named_modules():
            if isinstance(module, MXLinear) and hasattr(module, "fp8") and module.fp8.delayed:
                scales = zip(TENSORS, module.fp8.scale.numpy().copy(), strict=True)
                step.scales |= {(name, tensor): scale for tensor, scale in scales}

    def _leave(self, module: Any, args: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            if isinstance(module, Llama):
                self.evaluations[self.number][-1].logits = floats(output)
            return None
        if isinstance(module, MXLinear) and hasattr(module, "fp8"):
            self._linear(module, args[0], output)
        if not isinstance(module, Llama):
            return None
        seen = self.steps[-1].forwards[-1]
        spoiled = self.spoil.get(self.number)
        if spoiled == "loss":
            output = output * torch.nan
        seen.logits = floats(output)

        def listen(gradient: torch.Tensor) -> torch.Tensor:
            seen.gradient = floats(gradient)
            return gradient * torch.nan if spoiled == "gradient" else gradient

        output.register_hook(listen)
        return output

    def _linear(self, module: MXLinear, x: torch.Tensor, y: torch.Tensor) -> None:
        step, name = self.steps[-1], self.names[id(module)]

        def see(tensor: str, value: torch.Tensor) -> None:
            step.amaxes.setdefault((name, tensor), []).append(np.abs(floats(value)).max())

        see("x", x)
        see("w", module.weight)
        y.register_hook(lambda gradient: see("dy", gradient))
        if name == self.WATCHED:
            step.products.append((floats(x), floats(module.weight), floats(y)))

    def _update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        step = self.steps[-1]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                step.rates[self.names[id(parameter)]] = group["lr"]
                step.clipped[self.names[id(parameter)]] = floats(parameter.grad)

    def _updated(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        assert self.model is not None
        self.steps[-1].after = {name: floats(p) for name, p in self.model.named_parameters()}


class Watched(ReferenceBackend):
    """The reference, and a note to a recorder of what it was asked to quantize.

    One object serves all runs: the check of its stochastic rounding takes longer than the run that follows.
    """

    recorder: Recorder

    def quantize(self, x, spec, *, axis=-1, placement=Placement(), pad=False):  # type: ignore[no-untyped-def]
        self._note(x, spec, axis, placement)
        return super().quantize(x, spec, axis=axis, placement=placement, pad=pad)

    def _note(self, x: Any, spec: Any, axis: int, placement: Placement) -> None:
        seen = self.recorder
        if seen.phase != "start":
            number = seen.number
            forwards = seen.steps[-1].forwards if seen.phase == "train" else seen.evaluations[number]
            seen.calls.append(
                Call(
                    number,
                    seen.phase,
                    len(forwards) - 1,
                    x.shape,
                    axis,
                    spec,
                    placement.stream,
                    placement.origin,
                    placement.global_shape,
                )
            )

    def quantize_dual(self, x, specs, *, placements=(Placement(), Placement()), pads=(False, False)):  # type: ignore[no-untyped-def]
        # One after the other, by what any backend has: each is then noted once.
        first, second = (
            self.quantize(
                x,
                specs[i],
                axis=1 - i,
                placement=placements[i],
                pad=pads[i],
            )
            for i in (0, 1)
        )
        return first, second


WATCHED = Watched()


def record(
    folder: Path,
    recipe: Recipe | str,
    config: TrainConfig,
    corpus: TokenCorpus,
    *,
    stops: tuple[int, ...] = (),
    recorder: Recorder | None = None,
    watched: bool = False,
) -> Recording:
    """Train, stopping with a checkpoint after each step of `stops` and going on from there."""
    recorder = recorder or Recorder()
    options: dict[str, Any] = {"backend": WATCHED} if watched else {}
    WATCHED.recorder = recorder
    with recorder.listening():
        for stop in (*stops, None):
            run(folder, recipe, config, corpus=corpus, progress=recorder, stop_after=stop, **options)
    assert recorder.model is not None
    names = [name for name, m in recorder.model.named_modules() if isinstance(m, torch.nn.Linear)]
    done = recorder.steps[:-1]
    return Recording(config, corpus, folder, done, recorder.evaluations, recorder.calls, names)
