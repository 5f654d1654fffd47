"""The Hadamard transform alone, in float32: the quantizer's kernels, which here stop after the transform.

One thread does up to 64 elements in registers. The last stages of a longer transform, whose pairs are 64 or more
apart, are sums and differences of whole rows of 64, done by torch.
"""

from __future__ import annotations

import torch

from mxref.plan import dtype_name
from mxref.recipe import OperandSpec
from mxref.steps.hadamard import Rotation, norm_factor
from mxref_triton.lane.treatment import MAX_FUSED_HADAMARD, Output, treatment
from mxref_triton.launch import check_device, signed_word
from mxref_triton.quantizer.inputs import matrices
from mxref_triton.quantizer.launches import Outputs, launch_columns, launch_rows
from mxref_triton.quantizer.signs import given_signs


def hadamard(
    x: torch.Tensor, rotation: Rotation, axis: int, signs: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a tensor transformed along an axis, float32 in its shape; in memory that axis is the last.

    Args:
        x: the tensor.
        rotation: size and signs.
        axis: of x.
        signs: those of a size above `MAX_FUSED_HADAMARD`, float32 [n], in place of the rotation's.
    """
    check_device(x)
    if rotation.n > MAX_FUSED_HADAMARD:
        if signs is None and rotation.signs:
            signs = given_signs(rotation, x.device)
        return _long(x, rotation.n, signs, axis)
    return _short(x, rotation, axis, float(norm_factor(rotation.n)))


def _short(x: torch.Tensor, rotation: Rotation, axis: int, norm: float) -> torch.Tensor:
    out = torch.empty(x.movedim(axis, -1).shape, dtype=torch.float32, device=x.device)
    if out.numel():
        how = treatment(
            OperandSpec(), dtype_name(x), rotation.n, rotation.signs != 0, Output.TRANSFORMED, norm
        )
        signs = signed_word(rotation.signs), signed_word(rotation.signs >> 32)
        arguments = (*signs, 0, 0, 0, 0, 0, 0)  # no random bits
        rows = out.view(torch.int32).view(-1, out.shape[-1])
        for m in matrices(x, axis):
            words = rows[m.first_row :]
            if m.reads_words() and how.words_in:
                launch_rows(m, Outputs(words), how, arguments, one_row=True)
            else:
                launch_columns(m, Outputs(words), how, arguments, m.tensor.shape[1])
    return out.movedim(-1, axis)


def _long(x: torch.Tensor, n: int, signs: torch.Tensor | None, axis: int) -> torch.Tensor:
    short = MAX_FUSED_HADAMARD
    last = x.movedim(axis, -1)
    if signs is not None:
        last = (last.float().reshape(*last.shape[:-1], -1, n) * signs).flatten(-2)
    y = _short(last, Rotation(short), -1, 1.0).reshape(-1, short)
    h = 1
    while h * short < n:
        s, t = y.view(-1, 2, h, short).unbind(1)
        y = torch.stack((s + t, s - t), 1)
        h *= 2
    return (y.view(last.shape) * float(norm_factor(n))).movedim(-1, axis)
