"""Faults of FP8, of random streams, of treatments and of the model's layers; planted as in `loop`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

import mxref_torch
from mxref.formats import E4M3
from mxref.recipe import Recipe
from mxref.roles import GemmRole
from mxref_torch import operators, optimizer_step
from mxref_torch.layer import fp8
from mxref_torch.layer.fp8 import Fp8Scales
from mxref_torch.layer.linear import MXLinear
from mxref_torch.step_context import StepContext
from mxref_training import steps, trainer
from mxref_training.checkpoint import CheckpointStore
from mxref_training.model import llama
from mxref_training.model.llama import RotaryTable
from training_oracle.faults.loop import DATA_SEED, Patch, Plant


def unrefused(patch: Patch) -> None:
    """Switch off what stops such a run by itself, so that the oracle's check has to see the fault."""
    close = StepContext.close_step
    patch.setattr(trainer, "require_finite", lambda *arguments: None)
    patch.setattr(trainer, "require_trained", lambda *arguments: None)
    patch.setattr(MXLinear, "check_pass", lambda self: None)
    patch.setattr(StepContext, "close_step", lambda self, draws: close(self, False))


# ---- steps that are skipped ----


def nan_taken_for_zero(patch: Patch) -> None:
    right = steps.clip_gradients

    def clip(parameters: Any, limit: float) -> Any:
        held = list(parameters)
        for parameter in held:
            parameter.grad.nan_to_num_()
        return right(held, limit)

    patch.setattr(steps, "clip_gradients", clip)


def skipped_steps_update(patch: Patch) -> None:
    """The norm is not looked at, and the moments carry NaN on into every weight."""
    unrefused(patch)
    right = steps.clip_gradients
    patch.setattr(
        steps, "clip_gradients", lambda parameters, limit: torch.nan_to_num(right(parameters, limit))
    )


# ---- FP8 ----


def last_amax(patch: Patch) -> None:
    def record_amax(self: Fp8Scales, tensor: str, amax: torch.Tensor) -> None:
        self.amax[list(fp8.FORMATS).index(tensor)] = amax

    patch.setattr(Fp8Scales, "record_amax", record_amax)


_advance_scales = optimizer_step.advance_scales


def _after(change: Callable[[Fp8Scales, torch.Tensor, torch.Tensor], Any]) -> Plant:
    """`change` gives the next scales from the history, the scales and the amax before."""

    def advance_scales(scales: Iterable[Fp8Scales]) -> None:
        held = [(each, each.scale.clone(), each.amax.clone()) for each in scales]
        _advance_scales(each for each, *_ in held)
        for each, before, amax in held:
            each.scale.copy_(change(each, before, amax))

    return lambda patch: patch.setattr(optimizer_step, "advance_scales", advance_scales)


unseen_loses_its_scale = _after(lambda self, before, amax: torch.where(amax < 0, 0.0, self.scale))
zero_resets_the_scale = _after(lambda self, before, amax: torch.where(amax == 0, 1.0, self.scale))
powers_of_two = _after(lambda self, before, amax: self.scale.log2().floor().exp2())


@_after
def scales_a_step_late(self: Fp8Scales, before: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    waiting = getattr(self, "waiting", self.scale.clone())
    self.waiting = self.scale.clone()
    return waiting


def one_range_for_all(patch: Patch) -> None:
    right = Fp8Scales.reset_parameters

    def reset(self: Fp8Scales) -> None:
        right(self)
        if self.delayed:
            self.limits.fill_(E4M3.max_value)

    patch.setattr(Fp8Scales, "reset_parameters", reset)


def fp8_history_lost(patch: Patch) -> None:
    right = CheckpointStore.load

    def load(self: CheckpointStore, *given: Any, **named: Any) -> Any:
        found = right(self, *given, **named)
        tensors = {
            name: torch.zeros_like(t) if name.endswith("fp8.scale") else t
            for name, t in found.tensors["model"].items()
        }
        return replace(found, tensors={**found.tensors, "model": tensors})

    patch.setattr(CheckpointStore, "load", load)


def skipped_amax_stays(patch: Patch) -> None:
    """Only a step that changes the weights is closed."""
    unrefused(patch)
    clip, advance, finite = steps.clip_gradients, mxref_torch.advance, [False]

    def noting(parameters: Any, limit: float) -> Any:
        norm = clip(parameters, limit)
        finite[0] = math.isfinite(norm)
        return norm

    def close(net: torch.nn.Module) -> None:
        if finite[0]:
            advance(net)
        finite[0] = False

    patch.setattr(steps, "clip_gradients", noting)
    patch.setattr(mxref_torch, "advance", close)


def current_scaling(patch: Patch) -> None:
    right = Fp8Scales.quantize

    def quantize(self: Fp8Scales, tensor: str, x: torch.Tensor, *whole: Any) -> Any:
        kept, self.delayed = self.delayed, False
        try:
            return right(self, tensor, x, *whole)
        finally:
            self.delayed = kept

    patch.setattr(Fp8Scales, "quantize", quantize)


def nan_passed_over(patch: Patch) -> None:
    def record_amax(self: Fp8Scales, tensor: str, amax: torch.Tensor) -> None:
        place = list(fp8.FORMATS).index(tensor)
        self.amax[place] = torch.fmax(self.amax[place], amax)

    patch.setattr(Fp8Scales, "record_amax", record_amax)


def evaluation_is_observed(patch: Patch) -> None:
    right = MXLinear.operands
    patch.setattr(
        MXLinear,
        "operands",
        lambda self, tensor, t, place, roles, record_amax=False, **more: right(
            self, tensor, t, place, roles, tensor != "w", **more
        ),
    )


def restart_keeps_amax(patch: Patch) -> None:
    patch.setattr(Fp8Scales, "restart", lambda self: None)


# ---- treatments and random streams ----


def keeps_nothing(patch: Patch) -> None:
    """The census expects what the layers were made for, so that it does not refuse them."""
    patch.setattr(Recipe, "keeps", lambda self, name: False)


def _specs(change: Callable[[dict[GemmRole, list[str]]], None]) -> Plant:
    right = MXLinear.__init__

    def init(self: MXLinear, *args: Any) -> None:
        right(self, *args)
        change({role: gemm.texts for role, gemm in self.gemms.items()})

    return lambda patch: patch.setattr(MXLinear, "__init__", init)


@_specs
def dgrad_as_fprop(texts: dict[GemmRole, list[str]]) -> None:
    texts[GemmRole.DGRAD][0] = texts[GemmRole.FPROP][0]


@_specs
def wgrad_exchanged(texts: dict[GemmRole, list[str]]) -> None:
    texts[GemmRole.WGRAD].reverse()


def weights_made_again(patch: Patch) -> None:
    patch.setattr(mxref_torch, "weights_held", lambda model: nullcontext())


def quantizer_of_the_data_seed(patch: Patch) -> None:
    right = mxref_torch.convert
    patch.setattr(
        mxref_torch,
        "convert",
        lambda net, recipe, *, seed, **given: right(net, recipe, seed=DATA_SEED, **given),
    )


def place(**fixed: Any) -> Plant:
    """A field of the context that never changes."""
    right = StepContext.__setattr__

    def plant(patch: Patch) -> None:
        unrefused(patch)
        patch.setattr(
            StepContext, "__setattr__", lambda self, name, value: right(self, name, fixed.get(name, value))
        )

    return plant


def one_layer(patch: Patch) -> None:
    right = MXLinear.__init__
    patch.setattr(
        MXLinear,
        "__init__",
        lambda self, source, recipe, context, index: right(self, source, recipe, context, 0),
    )


def one_operand(patch: Patch) -> None:
    # The check at the start would stop the run first.
    patch.setattr(mxref_torch, "check_stochastic_rounding", lambda backend, recipe: None)
    right = operators.stream_words
    patch.setattr(operators, "stream_words", lambda seed, index, operand: right(seed, index, operand % 2))


# ---- the model ----


def _config(**fields: Any) -> Plant:
    """Ignores what the configuration says of a rotary table."""
    right = RotaryTable.__init__
    return lambda patch: patch.setattr(
        RotaryTable, "__init__", lambda self, config: right(self, replace(config, **fields))
    )


other_theta = _config(rope_theta=10000.0)


def _rotary(change: Callable[[RotaryTable, torch.Tensor], torch.Tensor]) -> Plant:
    return lambda patch: patch.setattr(RotaryTable, "forward", change)


_turn = RotaryTable.forward


@_rotary
def interleaved_pairs(self: RotaryTable, x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    order = torch.arange(2 * half).reshape(half, 2).T.flatten()
    return _turn(self, x[..., order])


@_rotary
def positions_reversed(self: RotaryTable, x: torch.Tensor) -> torch.Tensor:
    return _turn(self, x.flip(-2)).flip(-2)


def _rms(change: Callable[[torch.Tensor, Any, torch.Tensor, float], torch.Tensor]) -> Plant:
    return lambda patch: patch.setattr(llama.F, "rms_norm", change)


_rms_norm = F.rms_norm
default_norm_eps = _rms(lambda x, shape, weight, eps: _rms_norm(x, shape, weight, 1e-5))
norm_without_weight = _rms(lambda x, shape, weight, eps: _rms_norm(x, shape, torch.ones_like(weight), eps))

_sdpa = F.scaled_dot_product_attention


def attention(**options: Any) -> Plant:
    return lambda patch: patch.setattr(
        llama.F, "scaled_dot_product_attention", lambda q, k, v, **rest: _sdpa(q, k, v, **rest | options)
    )


def heads_in_turn(patch: Patch) -> None:
    def attend(q: Any, k: Any, v: Any, **rest: Any) -> Any:
        times = q.shape[1] // k.shape[1]
        return _sdpa(q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1), is_causal=True)

    patch.setattr(llama.F, "scaled_dot_product_attention", attend)


def gate_and_up_exchanged(patch: Patch) -> None:
    def forward(self: llama.MLP, x: torch.Tensor) -> Any:
        return self.down_proj(F.silu(self.up_proj(x)) * self.gate_proj(x))

    patch.setattr(llama.MLP, "forward", forward)
