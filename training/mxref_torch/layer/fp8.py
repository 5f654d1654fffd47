"""Tensor-scaled hybrid FP8, the baseline that MXFP4 is measured against.

X and W are E4M3, dY is E5M2, each under one float32 scale: q = RNE(x * scale), saturating, with
scale = fp8_max / amax. Under delayed scaling the scale of a step comes from the amax of the step before,
the maximum over its micro-batches; a tensor's first step uses its own amax. That history is training
state and lives in buffers. Source: Micikevicius et al., "FP8 formats for deep learning"
(arXiv 2209.05433); the delayed scheme is Transformer Engine's with a history of one step.
The order of the operations in this file decides bits.

Implements: fp8.formats
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn

from mxref.formats import E4M3, E5M2, ElementFormat
from mxref.recipe import Fp8Scaling

FORMATS: dict[str, ElementFormat] = {"x": E4M3, "w": E4M3, "dy": E5M2}
"""The FP8 format of each tensor of a linear layer."""

DTYPES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}

_FLT_MAX = torch.finfo(torch.float32).max
_INDEX = {tensor: i for i, tensor in enumerate(FORMATS)}
_UNSEEN = -1.0
"""The amax of a tensor that was not seen in this step: below every real amax."""
_NO_SCALE = 0.0
"""Marks a tensor that has no history yet: no formula gives this scale."""


class Fp8Tensor(NamedTuple):
    """A tensor in FP8."""

    data: torch.Tensor
    """float8_e4m3fn or float8_e5m2, the shape of the source."""
    inverse: torch.Tensor
    """fl32(1 / scale), float32 scalar: what a GEMM's output is multiplied by."""
    amax: torch.Tensor
    """Largest magnitude of the source, float32 scalar; NaN if it holds one."""


def tensor_amax(x: torch.Tensor) -> torch.Tensor:
    """Return max |x| as a float32 scalar, 0 for an empty tensor; a NaN anywhere gives NaN."""
    if x.numel() == 0:
        return x.new_zeros((), dtype=torch.float32)
    return x.detach().abs().amax().to(torch.float32)


def scale_from_amax(amax: torch.Tensor, fp8_max: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """Return min(fl32(fp8_max / amax), FLT_MAX), or `previous` where amax is 0 or not finite: float32, one shape.

    Implements: fp8.scale
    """
    usable = torch.isfinite(amax) & (amax > 0)
    # A float divided by a tensor would be computed as a product with the reciprocal, rounded twice.
    return torch.where(usable, torch.div(fp8_max, amax).clamp(max=_FLT_MAX), previous)


def cast(x: torch.Tensor, scale: torch.Tensor, tensor: str) -> torch.Tensor:
    """Return RNE(fl32(x * scale)) in the FP8 format of `x`, `w` or `dy`: NaN stays NaN, Inf saturates.

    `x` is float32 or bfloat16 of any shape, `scale` a float32 scalar.

    Implements: fp8.cast
    """
    format = FORMATS[tensor]
    scaled = x.detach().to(torch.float32, copy=True).mul_(scale)
    # Torch's own cast makes Inf of what is above the range of E5M2.
    return scaled.clamp_(-format.max_value, format.max_value).to(DTYPES[format])


class Fp8Scales(nn.Module):
    """The scales of a linear layer's three tensors, and under delayed scaling their history.

    Buffers, float32 [3] in the order of `FORMATS`: `scale`, in force during this step, `amax`, the largest so far
    in this step, and `limits`, the largest magnitudes of the formats. Current scaling has none. None is in a state
    dict, which is that of `nn.Linear`; `mxref_torch.optimizer_step` saves the first two.

    Implements: fp8.delayed, fp8.current
    """

    scale: torch.Tensor
    amax: torch.Tensor
    limits: torch.Tensor

    def __init__(self, scaling: Fp8Scaling, device: torch.device | None = None) -> None:
        super().__init__()
        self.delayed = scaling is Fp8Scaling.DELAYED
        if self.delayed:
            # The limits are made here once: a tensor of Python's numbers is copied to a GPU while the CPU waits.
            for name in ("scale", "amax", "limits"):
                self.register_buffer(
                    name, torch.empty(3, dtype=torch.float32, device=device), persistent=False
                )
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Forget the history; a module that was built on the meta device calls it once it has memory."""
        if self.delayed:
            self.scale.fill_(_NO_SCALE)
            self.amax.fill_(_UNSEEN)
            for limit, format in zip(self.limits, FORMATS.values(), strict=True):
                limit.fill_(format.max_value)

    def quantize(
        self, tensor: str, x: torch.Tensor, largest: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> Fp8Tensor:
        """Return `x` in FP8 under the scale in force; the history is not touched (see `record_amax`).

        `x` is float32 or bfloat16, and `tensor` a key of `FORMATS`. `largest` returns the amax of the whole tensor, of
        which `x` is a part, from that of `x`; None: it is whole.
        """
        amax = tensor_amax(x) if largest is None else largest(tensor_amax(x))
        limit = torch.full_like(amax, FORMATS[tensor].max_value)
        scale = scale_from_amax(amax, limit, torch.ones_like(amax))
        if self.delayed:
            kept = self.scale[_INDEX[tensor]]
            scale = torch.where(kept != _NO_SCALE, kept, scale)
        return Fp8Tensor(cast(x, scale, tensor), scale.reciprocal(), amax)

    def record_amax(self, tensor: str, amax: torch.Tensor) -> None:
        """Take a micro-batch's amax into this step's maximum; seeing it again (recomputation) changes nothing."""
        if self.delayed:
            with torch.no_grad():
                self.amax[_INDEX[tensor]].copy_(torch.maximum(self.amax[_INDEX[tensor]], amax))

    def restart(self) -> None:
        """Forget this step's amax; the scales in force stay."""
        if self.delayed:
            self.amax.fill_(_UNSEEN)


@torch.no_grad()
def advance_scales(scales: Iterable[Fp8Scales], withheld: torch.Tensor | None = None) -> None:
    """Set the next step's scales from this step's amax; a tensor that was not seen keeps its state.

    All layers together: one by one, each would launch twenty kernels. `withheld`, a bool scalar on the same device,
    says whether the step will be done over, so that no scale changes.
    """
    by_device: dict[torch.device, list[Fp8Scales]] = {}
    for each in scales:
        if each.delayed:
            by_device.setdefault(each.scale.device, []).append(each)
    for together in by_device.values():
        now, amaxes = [each.scale for each in together], [each.amax for each in together]
        scale, amax = torch.stack(now), torch.stack(amaxes)  # [layers, 3]
        previous = torch.where(scale != _NO_SCALE, scale, 1.0)
        seen = ~(amax < 0)  # a NaN has been seen
        if withheld is not None:
            seen = seen & ~withheld
        new = scale_from_amax(amax, together[0].limits, previous)
        torch._foreach_copy_(now, list(torch.where(seen, new, scale).unbind()))
        torch._foreach_copy_(amaxes, list(torch.full_like(amax, _UNSEEN).unbind()))
