"""The linear layer whose three GEMMs each run in the format that the recipe gives them.

Fprop Y = X W^T, Dgrad dX = dY W and Wgrad dW = dY^T X, in any of the 27 combinations of BF16, FP8 and
MXFP4. Parameters stay float32 and never change format; every operand is made from its high-precision
source when a GEMM needs it. What forward keeps for Wgrad is X as Wgrad will read it: packed MXFP4 or FP8
where that is the format, a quarter or half of BF16's memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from mxref.errors import DtypeError, ShapeError
from mxref.formats import BF16, FP8, MXFP4
from mxref.hadamard import SignPolicy
from mxref.recipe import DgradSpec, FpropSpec, OperandSpec, Recipe, WgradSpec
from mxref.roles import OPERANDS, GemmRole
from mxref.rounding import Rounding
from mxref_torch import operators
from mxref_torch.context import StepContext, repeated
from mxref_torch.errors import StepError
from mxref_torch.fp8 import Fp8Scales

_BF16 = OperandSpec(format=BF16)
BF16_RECIPE = Recipe(FpropSpec(_BF16, _BF16), DgradSpec(_BF16, _BF16), WgradSpec(_BF16, _BF16))
"""The recipe of the layers that `keep_bf16` names."""

Operand = tuple[torch.Tensor, ...]
"""An operand as its GEMM reads it: (bf16,), (fp8, fl32(1 / scale)) or (codes, scale codes).

A weight in MXFP4 that several GEMMs read may have the backend's layout of it after them.
"""

_FP8 = "fp8"
"""Where a layer keeps its weight in FP8, which all roles read alike; in MXFP4 each role has its own."""

READERS = {
    "x": ((GemmRole.FPROP, 0), (GemmRole.WGRAD, 1)),
    "w": ((GemmRole.FPROP, 1), (GemmRole.DGRAD, 1)),
    "dy": ((GemmRole.DGRAD, 0), (GemmRole.WGRAD, 0)),
}
"""The two GEMMs that read a tensor, along axis 1 and along axis 0, and which of their operands it is."""


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
        self.formats = {role: recipe.formats(role)[0] for role in GemmRole}
        self.low_precision = set(self.formats.values()) != {BF16}
        self.spec_texts = {role: [operators.spec_text(s) for s in recipe.operands(role)] for role in GemmRole}
        if FP8 in self.formats.values():
            self.fp8 = Fp8Scales(recipe.fp8_scaling, source.weight.device)
        self.draws = any(
            spec.signs in (SignPolicy.PER_STEP, SignPolicy.PER_STEP_LAYER)
            or (spec.rounding is Rounding.SR and not context.backend.capabilities.native_sr)
            for role in GemmRole
            if self.formats[role] is MXFP4
            for spec in recipe.operands(role)
        )
        self.census = operators.LayerCensus()
        self.census.whole = context.census
        self.tally = operators.register_census(self.census)
        context.layers.append(self.census)
        self._converted = weakref.ref(self.weight)
        self._trained: tuple[int, int] | None = None  # step and version of the weight that a forward saw
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
            if self.low_precision and not torch.compiler.is_compiling():
                self._check_step()
            y: torch.Tensor = _LinearFunction.apply(tokens, self.weight, place, self)  # type: ignore[no-untyped-call]
        else:
            role = GemmRole.FPROP
            x8 = self.shared_fp8("x", tokens, (role,), observe=False)
            a = self.operands("x", tokens, place, (role,), x8)[role]
            w = self.weight_operand(role, self.weight, place, None)
            y = self.gemm(role, a, w, self.in_features, x.dtype)
        # As torch's own linear layer: the result is no view, which FSDP2 would warn of.
        y = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], self.out_features))
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _check_step(self) -> None:
        """Raise StepError if the weight has changed since the forward before, and the step of random bits has not."""
        # A weight that is refilled by its owner keeps its version: nothing can be said of it here.
        if not self._has_own_weight(self.weight):
            return
        now = self.context.step, self.weight._version
        if self._trained is not None and self._trained[1] != now[1]:
            if self._trained[0] != now[0]:
                self.context.note_next_step()
            elif self.draws:
                raise StepError(repeated(now[0]))
        self._trained = now

    def _has_own_weight(self, weight: torch.Tensor) -> bool:
        """Return whether the weight is the Parameter that was converted, whose version tells of every change.

        FSDP2 puts another one in its place and refills it before each forward under an unchanged version.
        """
        return self._converted() is weight

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle holds: nothing that was made of the weight, nor a reference to it."""
        kept = {key: value for key, value in vars(self).items() if key != "_converted"}
        return kept | {"_weights": {}, "_trained": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of `__getstate__`."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._converted = weakref.ref(self.weight)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self._forget()
        self.context.reopen_step()

    def _forget(self) -> None:
        """Forget what is known of the weight and of the step that trained it."""
        self._weights.clear()
        self._trained = None

    def shared_fp8(
        self, tensor: str, t: torch.Tensor, roles: Collection[GemmRole], observe: bool = True
    ) -> Operand:
        """Return X or dY in FP8 for those of the roles that read it so, or nothing if none does.

        `observe` says whether FP8's history takes note of it: in training, not in evaluation.
        """
        if all(self.formats[role] is not FP8 for role in roles):
            return ()
        data, inverse, amax = self.fp8.quantize(tensor, t)
        if observe:
            self.fp8.observe(tensor, amax)
        return data, inverse

    def operands(
        self,
        tensor: str,
        t: torch.Tensor,
        place: torch.Tensor,
        roles: Collection[GemmRole],
        fp8: Operand = (),
    ) -> dict[GemmRole, Operand]:
        """Return X, W or dY as each of the roles reads it, made from its source; `fp8` is it in FP8."""
        made: dict[GemmRole, Operand] = {}
        quantized, bf16 = [], None
        for role, which in READERS[tensor]:
            if role not in roles:
                continue
            if self.formats[role] is MXFP4:
                quantized.append((role, which))
            elif self.formats[role] is FP8:
                made[role] = fp8
            else:
                bf16 = _cast(t, torch.bfloat16) if bf16 is None else bf16
                made[role] = (bf16,)
        given, tokens = (t, place, self.context.backend_key), tensor != "w"
        specs = [self.spec_texts[role][which] for role, which in quantized]
        streams = [
            operators.stream_words(self.context.seed, self.index, OPERANDS[role][which].id)
            for role, which in quantized
        ]
        if len(quantized) == 2:
            both = operators.quantize_dual(*given, *specs, *streams, tokens)
            made |= {quantized[0][0]: both[:2], quantized[1][0]: both[2:]}
        elif quantized:
            ((role, which),) = quantized
            made[role] = operators.quantize(*given, *specs, OPERANDS[role][which].axis, *streams, tokens)
        return made

    def weight_operand(
        self,
        role: GemmRole,
        weight: torch.Tensor,
        place: torch.Tensor,
        tokens: int | None,
        ahead: Collection[GemmRole] = (),
    ) -> Operand:
        """Return W as the role reads it, made once per optimizer step and version of the weight.

        Args:
            role: Fprop or Dgrad.
            weight: float32 [outputs, inputs].
            place: where the micro-batch lies in training.
            tokens: of the micro-batch; None in evaluation, of which FP8's history takes no note.
            ahead: roles that will read W in this step too; theirs is made from the same read of it.
        """
        format = self.formats[role]
        if format is BF16:
            return (_cast(weight, torch.bfloat16),)
        # A compiled graph cannot ask for a tensor's version, and a sharded weight has none: the operand is made anew.
        key, again = None, False
        if not torch.compiler.is_compiling() and self._has_own_weight(weight):
            step, _, total = place.tolist()
            key = step, weight._version, weight.data_ptr()
            # One GEMM alone gains nothing from a layout: it would make the same on its way.
            again = tokens is None or tokens < total
        if format is FP8:
            made = self._weights[_FP8][1] if self._keeps(_FP8, key) else self.fp8.quantize("w", weight)
            if key is not None:
                self._weights[_FP8] = key, made
            data, inverse, amax = made
            if tokens is not None:
                self.fp8.observe("w", amax)
            return data, inverse
        if key is None:
            return self.operands("w", weight, place, (role,))[role]
        if not self._keeps(role.value, key):
            mxfp4 = (each for each in ahead if self.formats[each] is MXFP4)
            wanted = [role, *(each for each in mxfp4 if not self._keeps(each.value, key))]
            for each, quantized in self.operands("w", weight, place, wanted).items():
                self._weights[each.value] = key, self.prepared(each, quantized) if again else quantized
        return self._weights[role.value][1]

    def _keeps(self, slot: str, key: tuple[int, int, int] | None) -> bool:
        """Return whether what is kept of the weight is of that step and version."""
        return key is not None and slot in self._weights and self._weights[slot][0] == key

    def prepared(self, role: GemmRole, quantized: Operand) -> Operand:
        """Return W in MXFP4 with the layout that the backend's GEMM reads, if it has one."""
        length = self.in_features if role is GemmRole.FPROP else self.out_features
        treatment = self.context.backend_key, self.spec_texts[role][1], length, self.recipe.gemm.value
        return (*quantized, *operators.prepare(*quantized, *treatment))

    def gemm(self, role: GemmRole, a: Operand, b: Operand, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return one GEMM from its two operands, [M, N] of `dtype`; `length` is its contraction length."""
        format = self.formats[role]
        if format is MXFP4:
            name = str(dtype).removeprefix("torch.")
            product: torch.Tensor = operators.scaled_gemm(
                *self._packed(role, a, b, length), name, role.value, self.tally
            )
            return product
        # The contraction axis goes last, as MXFP4 operands are stored.
        rows, columns = (
            t[0] if operand.axis == 1 else t[0].t() for operand, t in zip(OPERANDS[role], (a, b), strict=True)
        )
        out: torch.Tensor = operators.dense_gemm(rows, columns, role.value, self.tally)
        if format is FP8:
            out = out * a[1] * b[1]
        return _cast(out, dtype)

    def gemm_onto(self, onto: torch.Tensor, role: GemmRole, a: Operand, b: Operand, length: int) -> None:
        """Add one GEMM in MXFP4 to a contiguous float32 array [M, N] in place; the rest as in `gemm`."""
        operators.add_product(onto, *self._packed(role, a, b, length), role.value, self.tally)

    def _packed(self, role: GemmRole, a: Operand, b: Operand, length: int) -> tuple[Any, ...]:
        """Return a GEMM in MXFP4 as its operators take it: operands, and how they were made."""
        (codes, scales, *layout) = b
        treatment = self.context.backend_key, *self.spec_texts[role], length, self.recipe.gemm.value
        return *a, codes, scales, layout, *treatment

    def advance(self) -> None:
        """Close an optimizer step: the next FP8 scales, and no quantized weight of this step."""
        self._weights.clear()
        if FP8 in self.formats.values():
            self.fp8.advance()

    def restart(self) -> None:
        """Forget this step's quantized weights and FP8 history: the step is done over."""
        self._forget()
        if FP8 in self.formats.values():
            self.fp8.restart()


def _cast(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `t` in a type, and `t` itself where it has that type already.

    `t.to(dtype)` gives the same tensor, but the compiler of torch 2.11 takes it for a second one.
    A traced `_LinearFunction` then returns one tensor as two results, and its gradient is lost: zeros arrive.
    """
    return t if t.dtype is dtype else t.to(dtype)


class _LinearFunction(torch.autograd.Function):
    """Fprop, and from its incoming gradient Dgrad and Wgrad, each in its own format.

    No torch function called here may return one of its own arguments (see `_cast`): no cast to the same type,
    no operation in place.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, place: torch.Tensor, layer: MXLinear
    ) -> torch.Tensor:
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        roles = [GemmRole.FPROP, *([GemmRole.WGRAD] if needs_dw else [])]
        made = layer.operands("x", x, place, roles, layer.shared_fp8("x", x, roles))
        kept = made.get(GemmRole.WGRAD, ())
        # The Parameter itself, never a view of it: sharded training frees and refills its storage.
        ctx.save_for_backward(place, weight if needs_dx else None, *kept)
        ctx.layer, ctx.dtypes = layer, (x.dtype, weight.dtype)
        ahead = [GemmRole.DGRAD] if needs_dx else []
        w = layer.weight_operand(GemmRole.FPROP, weight, place, x.shape[0], ahead)
        return layer.gemm(GemmRole.FPROP, made[GemmRole.FPROP], w, layer.in_features, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        layer = ctx.layer
        place, weight, *x = ctx.saved_tensors
        x_dtype, w_dtype = ctx.dtypes
        needs_dx, needs_dw = ctx.needs_input_grad[:2]
        roles = [*([GemmRole.DGRAD] if needs_dx else []), *([GemmRole.WGRAD] if needs_dw else [])]
        made = layer.operands("dy", dy, place, roles, layer.shared_fp8("dy", dy, roles))
        dx = dw = None
        if needs_dx:
            role = GemmRole.DGRAD
            w = layer.weight_operand(role, weight, place, dy.shape[0])
            dx = layer.gemm(role, made[role], w, layer.out_features, x_dtype)
        if needs_dw:
            role = GemmRole.WGRAD
            gradient = None if torch.compiler.is_compiling() else _held_gradient(ctx, layer)
            if gradient is None:
                dw = layer.gemm(role, made[role], x, dy.shape[0], w_dtype)
            else:
                layer.gemm_onto(gradient, role, made[role], x, dy.shape[0])
        return dx, dw, None, None


def _held_gradient(node: Any, layer: MXLinear) -> torch.Tensor | None:
    """Return the gradient to which Wgrad may add in place, as autograd would; None if autograd has to."""
    weight = layer.context.sole_uses.get(node)
    if weight is None or layer.formats[GemmRole.WGRAD] is not MXFP4:
        return None
    # Who listens to the gradient has to be given one.
    if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
        return None
    held = weight.grad
    if held is None or held.layout is not torch.strided or held.requires_grad:
        return None
    return held if held.dtype is torch.float32 and held.is_contiguous() else None
