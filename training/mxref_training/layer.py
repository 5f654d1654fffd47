"""The linear layer whose three GEMMs each run in the format that the recipe gives them.

Fprop Y = X W^T, Dgrad dX = dY W and Wgrad dW = dY^T X, in any of the 27 combinations of BF16, FP8 and
MXFP4. Parameters stay float32 and never change format; every operand is made from its high-precision
source when a GEMM needs it. What forward keeps for Wgrad is X as Wgrad will read it: packed MXFP4 or FP8
where that is the format, a quarter or half of BF16's memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mxref.backend import Backend
from mxref.errors import DtypeError, ShapeError
from mxref.formats import OperandFormat
from mxref.linear import OPERANDS, GemmRole
from mxref.philox import Stream
from mxref.recipe import DgradSpec, FpropSpec, OperandSpec, Recipe, WgradSpec
from mxref_training import ops
from mxref_training.fp8 import Fp8Scales

_BF16 = OperandSpec(format=OperandFormat.BF16)
BF16_RECIPE = Recipe(FpropSpec(_BF16, _BF16), DgradSpec(_BF16, _BF16), WgradSpec(_BF16, _BF16))
"""The recipe of the layers that `keep_bf16` names."""

Operand = tuple[torch.Tensor, ...]
"""An operand as its GEMM reads it: (bf16,), (fp8, fl32(1 / scale)) or (codes, scale codes)."""


@dataclass
class StepContext:
    """What every linear layer of a model needs to know about the step; set before each forward."""

    backend: Backend
    seed: int
    step: int = 0
    """Optimizer step, from 0."""
    token_origin: int = 0
    """Index of the micro-batch's first token within the optimizer step (sample index * sequence length)."""
    global_tokens: int | None = None
    """Tokens of the whole optimizer step; None: those of the tensor itself."""
    census: ops.Census = field(default_factory=Counter)
    """GEMMs that ran since `reset_census`."""

    def __post_init__(self) -> None:
        Stream(self.seed)  # checks its range
        self.backend_key = ops.register_backend(self.backend)
        self.tally = ops.register_census(self.census)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("step", "token_origin", "global_tokens"):
            # A new tensor each time: a backward pass still to come keeps that of its forward.
            self.place = ops.step_place(self.step, self.token_origin, self.global_tokens)

    def reset_census(self) -> None:
        """Forget the GEMMs counted so far."""
        self.census.clear()


class MXLinear(nn.Linear):
    """A linear layer that holds the Parameters of the `nn.Linear` it replaces.

    Takes x [..., in_features] in float32 or bfloat16 and returns [..., out_features] in the same type;
    weight gradients have the weight's type. Raises ShapeError and DtypeError on anything else.

    Implements: fp8.gemm, linear.formats
    """

    def __init__(self, source: nn.Linear, recipe: Recipe, context: StepContext, index: int) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate new weights
        self.training = source.training
        self.in_features, self.out_features = source.in_features, source.out_features
        self.weight, self.bias = source.weight, source.bias
        self.recipe, self.context, self.index = recipe, context, index
        self.formats = {role: recipe.format(role) for role in GemmRole}
        self.spec_texts = {role: [ops.spec_text(s) for s in recipe.operands(role)] for role in GemmRole}
        if OperandFormat.FP8 in self.formats.values():
            self.fp8 = Fp8Scales(recipe.fp8_scaling, source.weight.device)
        self._weights: dict[str, tuple[tuple[int, int, int], Operand]] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x W^T + bias."""
        if x.dtype not in (torch.float32, torch.bfloat16):
            raise DtypeError(f"MXLinear takes float32 or bfloat16, got {x.dtype}; cast its input")
        if x.shape[-1] != self.in_features:
            raise ShapeError(f"MXLinear: input has {x.shape[-1]} features, the weight {self.in_features}")
        tokens = x.reshape(-1, self.in_features)  # [tokens, in]
        place = self.context.place
        if torch.is_grad_enabled() and (tokens.requires_grad or self.weight.requires_grad):
            y: torch.Tensor = _LinearFunction.apply(tokens, self.weight, place, self)  # type: ignore[no-untyped-call]
        else:
            x8 = self.shared_fp8("x", tokens, (GemmRole.FPROP,), observe=False)
            y = self.fprop(tokens, self.weight, place, x8, observe=False)
        y = y.reshape(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def fprop(
        self, x: torch.Tensor, weight: torch.Tensor, place: torch.Tensor, x8: Operand, observe: bool
    ) -> torch.Tensor:
        """Return Y [tokens, out] in the type of `x`; `x8` is from `shared_fp8`."""
        role = GemmRole.FPROP
        a = self.operand(role, 0, x, place, x8)
        return self.gemm(
            role, a, self.weight_operand(role, weight, place, observe), self.in_features, x.dtype
        )

    def shared_fp8(
        self, tensor: str, t: torch.Tensor, roles: Collection[GemmRole], observe: bool = True
    ) -> Operand:
        """Return X or dY in FP8 for those of the roles that read it so, or nothing if none does.

        `observe` says whether FP8's history takes note of it: in training, not in evaluation.
        """
        if all(self.formats[role] is not OperandFormat.FP8 for role in roles):
            return ()
        data, inverse, amax = self.fp8.quantize(tensor, t)
        if observe:
            self.fp8.observe(tensor, amax)
        return data, inverse

    def operand(
        self, role: GemmRole, which: int, t: torch.Tensor, place: torch.Tensor, fp8: Operand = ()
    ) -> Operand:
        """Return a role's first (0) or second (1) operand, made from its source; `fp8` is it in FP8."""
        format = self.formats[role]
        if format is OperandFormat.FP8:
            return fp8
        if format is OperandFormat.BF16:
            return (t.to(torch.bfloat16),)
        operand = OPERANDS[role][which]
        stream = ops.stream_words(self.context.seed, self.index, operand.id)
        spec, key = self.spec_texts[role][which], self.context.backend_key
        codes, scales = ops.quantize(t, place, key, spec, operand.axis, stream, operand.tensor != "w")
        return codes, scales

    def weight_operand(
        self, role: GemmRole, weight: torch.Tensor, place: torch.Tensor, observe: bool
    ) -> Operand:
        """Return W as the role reads it, made once per optimizer step and version of the weight."""
        format = self.formats[role]
        if format is OperandFormat.BF16:
            return (weight.to(torch.bfloat16),)
        slot = "fp8" if format is OperandFormat.FP8 else role.value
        # A compiled graph cannot ask for a tensor's version: it makes the operand anew.
        key = None
        if not torch.compiler.is_compiling():
            key = int(place[0]), weight._version, weight.data_ptr()
        cached = self._weights.get(slot)
        if key is not None and cached is not None and cached[0] == key:
            made = cached[1]
        else:
            made = self.fp8.quantize("w", weight) if slot == "fp8" else self.operand(role, 1, weight, place)
            if key is not None:
                self._weights[slot] = key, made
        if slot == "fp8":
            data, inverse, amax = made
            if observe:
                self.fp8.observe("w", amax)
            return data, inverse
        return made

    def gemm(self, role: GemmRole, a: Operand, b: Operand, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return one GEMM from its two operands, [M, N] of `dtype`; `length` is its contraction length."""
        context, format = self.context, self.formats[role]
        if format is OperandFormat.MXFP4:
            profile, name = self.recipe.gemm.value, str(dtype).removeprefix("torch.")
            treatment = (context.backend_key, *self.spec_texts[role], length, profile, name)
            product: torch.Tensor = ops.scaled_gemm(*a, *b, *treatment, role.value, context.tally)
            return product
        # The contraction axis goes last, as MXFP4 operands are stored.
        rows, columns = (
            t[0] if operand.axis == 1 else t[0].t() for operand, t in zip(OPERANDS[role], (a, b), strict=True)
        )
        out: torch.Tensor = ops.dense_gemm(rows, columns, role.value, context.tally)
        if format is OperandFormat.FP8:
            out = out.mul_(a[1]).mul_(b[1])
        return out.to(dtype)

    def advance(self) -> None:
        """Close an optimizer step: the next FP8 scales, and no quantized weight of this step."""
        self._weights.clear()
        if OperandFormat.FP8 in self.formats.values():
            self.fp8.advance()

    def restart(self) -> None:
        """Forget this step's quantized weights and FP8 history: the step is done over."""
        self._weights.clear()
        if OperandFormat.FP8 in self.formats.values():
            self.fp8.restart()


class _LinearFunction(torch.autograd.Function):
    """Fprop, and from its incoming gradient Dgrad and Wgrad, each in its own format."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, place: torch.Tensor, layer: MXLinear
    ) -> torch.Tensor:
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        x8 = layer.shared_fp8("x", x, [GemmRole.FPROP, *([GemmRole.WGRAD] if needs_dw else [])])
        kept = layer.operand(GemmRole.WGRAD, 1, x, place, x8) if needs_dw else ()
        # The Parameter itself, never a view of it: sharded training frees and refills its storage.
        ctx.save_for_backward(place, weight if needs_dx else None, *kept)
        ctx.layer, ctx.dtypes = layer, (x.dtype, weight.dtype)
        return layer.fprop(x, weight, place, x8, observe=True)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        layer = ctx.layer
        place, weight, *x = ctx.saved_tensors
        x_dtype, w_dtype = ctx.dtypes
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        roles = [*([GemmRole.DGRAD] if needs_dx else []), *([GemmRole.WGRAD] if needs_dw else [])]
        dy8 = layer.shared_fp8("dy", dy, roles)
        dx = dw = None
        if needs_dx:
            role = GemmRole.DGRAD
            w = layer.weight_operand(role, weight, place, observe=True)
            dx = layer.gemm(role, layer.operand(role, 0, dy, place, dy8), w, layer.out_features, x_dtype)
        if needs_dw:
            role = GemmRole.WGRAD
            dw = layer.gemm(role, layer.operand(role, 0, dy, place, dy8), x, dy.shape[0], w_dtype)
        return dx, dw, None, None
