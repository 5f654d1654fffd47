"""Run a probe: one forward and backward pass of each checkpoint in BF16, and every recipe's GEMMs on what it gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import mxref_torch
from mxref.backend import Backend
from mxref.layer_choice import matching
from mxref.recipe import BF16_RECIPE, Recipe
from mxref_torch.layer.linear import MXLinear
from mxref_torch.names import named_linears
from mxref_training.config import TrainConfig
from mxref_training.device import choose_device, deterministic, memory_limit
from mxref_training.errors import ConfigError
from mxref_training.forecast import memory
from mxref_training.model.llama import Llama
from mxref_training.model.loss import cross_entropy
from mxref_training.probe.arms import NamedRecipe, phases, probed_layers, resolved
from mxref_training.probe.batch import Batch
from mxref_training.probe.draws import LayerDraws
from mxref_training.probe.layer import Captured, LayerProbe
from mxref_training.probe.moments import Moment
from mxref_training.probe.results import Row
from mxref_training.run_state import load_weights
from mxref_training.wording import si

Said = Callable[[str], None]
Take = Callable[[str, Tensor, Tensor], None]
"""Receives a layer's name, X [tokens, inputs] and dY [tokens, outputs], while the backward pass waits."""


@dataclass
class ProbeRows:
    """The rows of one checkpoint."""

    loss: float = 0.0
    """Mean cross-entropy of the batch in nats per token, in BF16."""
    phases: dict[str, str] = field(default_factory=dict)
    """The phase that was probed, by the labels of the recipes that have several."""
    products: list[Row] = field(default_factory=list)
    operands: list[Row] = field(default_factory=list)
    variances: list[Row] = field(default_factory=list)
    """Variances of products over the draws."""
    unbiased: list[Row] = field(default_factory=list)
    """Errors of the mean of operands under SR, over the draws."""
    growth: list[Row] = field(default_factory=list)
    """Variance of SR products by length, beside the bounds."""


def measure(
    moment: Moment,
    config: TrainConfig,
    arms: Sequence[NamedRecipe],
    batch: Batch,
    *,
    backend: Backend,
    layers: str = "*",
    draws: int = 0,
    said: Said = print,
) -> ProbeRows:
    """Return what every recipe does to the GEMMs of a checkpoint on a batch.

    Args:
        moment: the checkpoint.
        config: of its run.
        arms: the recipes.
        batch: the tokens.
        backend: computes the block formats.
        layers: glob over the names of linear layers.
        draws: how often the random bits of recipes that draw some are drawn anew; 0 measures no variance.
        said: takes a line about the progress.

    Raises:
        CheckpointError: a damaged checkpoint.
        ConfigError: a glob that matches no layer, a batch that does not fit into memory, or no such device.
        MxrefError: a recipe that does not fit the model or that the backend does not declare.
    """
    device = choose_device(config.run.device, backend)
    sequences, length = batch.inputs.shape
    run = replace(config.run, batch=sequences, micro_batch=0, seq_len=length, eval_tokens=length)
    config = replace(config, run=run)
    _require_memory(config, len(arms), memory_limit(device))
    with deterministic(device, config.run.threads, compiled=False):
        model = Llama(config.model, device=device)
        load_weights(model, moment.store.load(moment.step, ("model",)))
        handle = mxref_torch.convert(model, BF16_RECIPE, backend=backend, seed=moment.seed)
        handle.context.step = moment.step
        seed, steps = moment.seed, config.run.steps
        recipes = resolved(arms, named_linears(model), backend, seed, moment.step, steps)
        chosen = chosen_layers(model, recipes, layers)
        model.requires_grad_(False)
        model.model.embed_tokens.weight.requires_grad_(True)  # so that a gradient flows through every layer
        found = ProbeRows(phases=phases(arms, moment.step, steps))
        done: list[str] = []

        def take(name: str, x: torch.Tensor, dy: torch.Tensor) -> None:
            own = Captured(name, chosen[name], x, dy, moment.step)
            of_layer = {arm.name: recipes[arm.name][name] for arm in arms}
            for _, products, operands in LayerProbe(own).rows(of_layer):
                found.products += products
                found.operands += operands
            if draws:
                drawn = LayerDraws(own, draws)
                found.variances += drawn.variances(of_layer)
                found.unbiased += drawn.unbiased(of_layer)
                if name in growing(list(chosen)):
                    found.growth += drawn.growth()
            done.append(name)
            said(f"{moment.name}: {len(done)} of {len(chosen)} layers")

        inputs, targets = (torch.from_numpy(side).to(device) for side in (batch.inputs, batch.targets))
        with _captured(chosen, take):
            loss = cross_entropy(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
        found.loss = loss.item()
        _in_order(found, list(chosen), [arm.name for arm in arms])
        return found


@contextmanager
def _captured(layers: Mapping[str, nn.Linear], take: Take) -> Iterator[None]:
    """Give X and dY of each layer to `take` when the backward pass within the block reaches the layer.

    Both are as the layer has them, in its compute type. A layer has to run once in the forward pass.
    """
    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.callback(layer.register_forward_hook(_hook(name, take)).remove)
        yield


def _hook(name: str, take: Take) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
    def hook(_layer: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        x = arguments[0].detach()

        def arrived(dy: Tensor) -> None:
            with torch.no_grad():
                take(name, x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]))

        output.register_hook(arrived)  # type: ignore[no-untyped-call]

    return hook


def chosen_layers(
    model: Llama, recipes: Mapping[str, Mapping[str, Recipe]], glob: str
) -> dict[str, MXLinear]:
    """Return the layers that a glob names and some recipe does not compute in BF16.

    Raises:
        ConfigError: a glob that matches no layer.
    """
    linears = named_linears(model)
    low = probed_layers(recipes, list(linears))
    names = [name for name in matching(list(linears), glob, "--layers") if name in low]
    if not names:
        raise ConfigError(
            f"--layers {glob!r}: every recipe computes these layers in BF16; the first other layer is {low[0]!r}"
        )
    found = {}
    for name in names:
        layer = linears[name]
        assert isinstance(layer, MXLinear)  # `convert` replaced all
        found[name] = layer
    return found


def growing(layers: Sequence[str]) -> list[str]:
    """Return the layers whose variance is measured by length: those of the block in the middle."""
    blocks = dict.fromkeys(_block(name) for name in layers)
    middle = list(blocks)[len(blocks) // 2]
    return [name for name in layers if _block(name) == middle]


def _block(name: str) -> str:
    """Return the part of a layer's name up to its first number."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else ""


def _in_order(found: ProbeRows, layers: list[str], arms: list[str]) -> None:
    """Sort all rows by layer in forward order, then by recipe; the backward pass gave them the other way round."""
    for rows in (found.products, found.operands, found.variances, found.unbiased):
        rows.sort(key=lambda row: (arms.index(row["recipe"]), layers.index(row["layer"])))
    found.growth.sort(key=lambda row: layers.index(row["layer"]))


def _require_memory(config: TrainConfig, arms: int, available: int) -> None:
    """Raise ConfigError if a pass of the batch and one layer's operands do not fit into memory."""
    need, model, tokens = memory(config, BF16_RECIPE), config.model, config.run.step_tokens
    wide, narrow = max(model.ffn, model.width), model.width
    # One layer: three exact products in float64 and their operands, and the codes of each recipe.
    layer = (6 * 8 + arms) * (tokens * (wide + narrow) + wide * narrow)
    total = need.weights + need.activations + need.logits + need.tables + layer
    if total > available:
        raise ConfigError(
            f"the batch of {config.run.batch} x {config.run.seq_len} tokens needs about {si(total)}B of memory and "
            f"there are {si(available)}B: lower --batch or --length, or probe fewer recipes"
        )
