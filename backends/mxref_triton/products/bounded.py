"""Scaled GEMM: which kernels answer which profile, and where `bounded` at FP8 rate ends."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum

import torch

from mxref.errors import BackendError, RecipeError, UnsupportedError
from mxref.mxarray import MXArray, PreparedArray
from mxref.recipe import GemmProfile
from mxref_triton.lane.gfx950 import is_gfx950
from mxref_triton.launch import DEVICE, INTERPRETED, check_device, is_hopper
from mxref_triton.memory import asking
from mxref_triton.operands import unprescale
from mxref_triton.products.by_block import multiply_blocks
from mxref_triton.products.by_value import decoded_layout, multiply_decoded
from mxref_triton.products.fold import Folded, are_folded, fits_wide, fold, fold_both
from mxref_triton.products.matrix_cores import (
    MAX_SCALE,
    SIX_TILES,
    TUNES,
    max_scale,
    multiply,
    multiply_onto,
    on_matrix_cores,
    refuse_sixes,
)
from mxref_triton.products.misfits import multiply_misfits
from mxref_triton.products.ordered import ordered, sums_in_float32, sums_in_fp8
from mxref_triton.products.scale_bytes import SIX_PAIRS, first_wrong_scale, on_device
from mxref_triton.products.scale_range import flag_scales


class BoundedWay(StrEnum):
    """How `bounded` GEMMs are computed."""

    FP8 = "fp8"
    """Operands folded into FP8 and multiplied there: class `fp8-hopper`, any scale; see `mxref_triton.products.fold`.

    Each operand may have elements of 4 or 6 bits under E8M0. What FP8 cannot multiply, or gains nothing by it, is
    answered with `ordered`. Rows that do not fit are multiplied from their codes; see `mxref_triton.products.misfits`.
    Products with an operand in MXFP8, MXINT8 or NVFP4 go through BF16.
    """
    BF16 = "bf16"
    """Operands decoded to BF16, multiplied into float32: class `fp32`; see `mxref_triton.products.by_value`."""
    MFMA = "mfma"
    """Packed codes multiplied by the matrix cores of gfx950: class `fp32`; see `mxref_triton.products.matrix_cores`.

    Products with an operand in MXINT8 or NVFP4 go through BF16.
    """
    ORDERED = "ordered"
    """By the kernels of the profile `ordered`, whose result is a member of every class; any scale.

    Where these are slow, with an operand in MXFP8, blocks are multiplied one by one; see
    `mxref_triton.products.by_block`.
    """


CLASSES = {
    BoundedWay.FP8: "fp8-hopper",
    BoundedWay.BF16: "fp32",
    BoundedWay.MFMA: "fp32",
    BoundedWay.ORDERED: "fp32",
}
"""Error class of `bounded`."""

MAX_SCALES = {
    BoundedWay.FP8: 254,
    BoundedWay.BF16: MAX_SCALE,
    BoundedWay.MFMA: MAX_SCALE,
    BoundedWay.ORDERED: 254,
}
"""Largest scale code of `bounded` for MXFP4. FP8 and `ordered` have none; BF16 has to hold every element, 6 * 2^125.

Other formats have limits of their own: `max_scale` for the matrix cores; for BF16, each decoded value is checked."""

BOUNDED = os.environ.get("MXREF_TRITON_BOUNDED", "auto")
"""How the backend that is chosen by name computes `bounded`; see `bounded_way`."""

_FP8_UNIT = 16
"""What cuBLAS wants N and K to be multiples of in FP8."""

SHORTEST_FP8 = 512
"""Smallest K multiplied in FP8 where `ordered` multiplies there too: on less, folding takes as long as it saves."""

LEAST_FOLDED_WORK = 1 if os.environ.get("MXREF_TRITON_FOLD") == "1" else 1 << 30
"""Multiplications from which `ordered` gains by folding its operands first; with MXREF_TRITON_FOLD=1 it always does."""

MOST_FOLDED_ROWS = 1 << 26
"""With this many rows or more, a kernel's offset to the next block would need more than 32 bits."""


class RangeFlag:
    """Whether an operand of a `bounded` GEMM was outside its range: one word per device, written by kernels."""

    def __init__(self) -> None:
        self._words: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the device's word, int32 [1]; BackendError if it would have to be made inside a captured graph."""
        if device not in self._words:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise BackendError(
                    f"the first `bounded` GEMM of this backend on {device} is inside the capture of a CUDA graph, "
                    "whose replays would forget what earlier GEMMs found out of range; run the step once before it"
                )
            self._words[device] = torch.zeros(1, dtype=torch.int32, device=device)
        return self._words[device]

    def words(self) -> tuple[torch.Tensor, ...]:
        """Return the words of all devices so far."""
        return tuple(self._words.values())

    def take(self) -> bool:
        """Return whether any word was set, after all work in flight, and clear them."""
        found = False
        for device, word in self._words.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found |= bool(word.item())
            word.zero_()
        return found


def bounded_way(name: str) -> tuple[BoundedWay, str]:
    """Return how `bounded` is computed, and what to say about it.

    `auto` is FP8 where the current GPU is a Hopper and BF16 on others, but on gfx950 MFMA if its scaled matrix
    instruction gives the reference's bits for every scale byte, and `ordered` if not. A name is used without a check of
    the GPU's bits.

    Raises:
        RecipeError: neither a way nor `auto`.
        UnsupportedError: MFMA on another GPU than gfx950.
    """
    gpu = torch.device("cuda")
    if name == "auto":
        if INTERPRETED:
            way = BoundedWay.BF16
        elif is_gfx950(gpu):
            return _way_of_gfx950(gpu)
        else:
            way = BoundedWay.FP8 if is_hopper(gpu) else BoundedWay.BF16
        return way, way
    try:
        way = BoundedWay(name)
    except ValueError:
        raise RecipeError(
            f"bounded = {name!r} is not one of auto, {', '.join(BoundedWay)} (MXREF_TRITON_BOUNDED sets it)"
        ) from None
    if way is BoundedWay.MFMA and not (INTERPRETED or is_gfx950(gpu)):
        raise UnsupportedError("bounded = 'mfma' needs a gfx950 GPU, and this is none; take bounded = 'auto'")
    return way, way


def _way_of_gfx950(gpu: torch.device) -> tuple[BoundedWay, str]:
    if (wrong := first_wrong_scale(on_device(gpu))) is None:
        said = f"{BoundedWay.MFMA}, whose scale bytes gave the reference's bits at start-up"
        if TUNES and (wrong := first_wrong_scale(on_device(gpu, SIX_TILES[-1]), SIX_PAIRS)) is not None:
            refuse_sixes()
            said += f"; elements of 6 bits are multiplied as E4M3 alone: {wrong}"
        return BoundedWay.MFMA, said
    return (
        BoundedWay.ORDERED,
        f"{BoundedWay.ORDERED}: the scaled matrix instruction is not as specified, {wrong}",
    )


def scaled_gemm(
    a: MXArray, b: MXArray, profile: GemmProfile, out_dtype: str, way: BoundedWay, flag: RangeFlag, name: str
) -> torch.Tensor:
    """Return A B^T of A [M, K] and B [N, K], checked operands, under `ordered` or `bounded`.

    Args:
        a: left operand, perhaps with a layout from `prepare`: one that several products share is folded once.
        b: right operand, likewise.
        profile: one of the two.
        out_dtype: `float32` or `bfloat16`.
        way: how `bounded` is computed.
        flag: is set if `bounded` gets an operand outside its range.
        name: of the backend whose layouts these are.
    """
    _check_devices(a, b)
    layouts = _layouts(a, b, profile, name)
    fp8 = way is BoundedWay.FP8 and are_folded(a, b)
    by_ordered = (way is BoundedWay.ORDERED and sums_in_float32(a, b)) or (fp8 and not _multiplies_fp8(a, b))
    if profile is GemmProfile.ORDERED or by_ordered:
        folded = None
        if _folds_ordered(a, b):
            folded = _both_folded(a, b, layouts)
        return ordered(a, b, out_dtype, folded)
    if fp8:
        return _fp8(a, b, *_both_folded(a, b, layouts), out_dtype)
    return _by_value(a, b, out_dtype, way, flag, layouts)


def _by_value(
    a: MXArray,
    b: MXArray,
    out_dtype: str,
    way: BoundedWay,
    flag: RangeFlag,
    layouts: Sequence[tuple[torch.Tensor, ...]],
    onto: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return A B^T under `bounded` by matrix instructions that `ordered` does not use; arguments as in `scaled_gemm`.

    It is added to `onto`, if that is given.
    """
    if way is BoundedWay.ORDERED:
        return multiply_blocks(a, b, out_dtype)
    word = flag.on(a.codes.device)
    if way is BoundedWay.MFMA and on_matrix_cores(a, b):
        _flag_by_format(word, a, b)
        if onto is None:
            return multiply(a, b, out_dtype)
        multiply_onto(a, b, onto)
        return onto
    return multiply_decoded(a, b, out_dtype, word, layouts, onto)


def _flag_by_format(word: torch.Tensor, a: MXArray, b: MXArray) -> None:
    """Set a word if an operand has a scale code beyond what the matrix cores are promised for in its format."""
    limits = [max_scale(q.format.element) for q in (a, b)]
    if limits[0] == limits[1]:
        flag_scales(limits[0], word, a.scales, b.scales)
    else:
        for limit, q in zip(limits, (a, b), strict=True):
            flag_scales(limit, word, q.scales)


def add_product(
    a: MXArray, b: MXArray, onto: torch.Tensor, way: BoundedWay, flag: RangeFlag, name: str
) -> bool:
    """Add A B^T of checked operands under `bounded` to a float32 array in place, where the sums are stored.

    Returns:
        False, and nothing is added, if there is no such kernel for these operands.
    """
    if way is BoundedWay.ORDERED or (way is BoundedWay.FP8 and are_folded(a, b)):
        return False
    _check_devices(a, b)
    _by_value(a, b, "float32", way, flag, _layouts(a, b, GemmProfile.BOUNDED, name), onto)
    return True


def check_same_device(onto: torch.Tensor, a: MXArray) -> None:
    """Raise UnsupportedError unless the array is on the device of the operands whose product is added to it."""
    if onto.device != a.codes.device:
        raise UnsupportedError(
            f"backend 'triton' adds products where their operands lie, got an array on {onto.device} for operands "
            f"on {a.codes.device}; move it: onto.to({str(a.codes.device)!r})"
        )


def prepared_layout(q: MXArray, profile: GemmProfile, way: BoundedWay) -> tuple[torch.Tensor, ...]:
    """Return what GEMMs read in place of an operand's codes; nothing where they read codes."""
    bounded, folds = profile is GemmProfile.BOUNDED, are_folded(q)
    if bounded:
        by_codes = {
            BoundedWay.BF16: False, BoundedWay.FP8: folds, BoundedWay.MFMA: on_matrix_cores(q), BoundedWay.ORDERED: True
        }  # fmt: skip
        if not by_codes[way]:
            return decoded_layout(q)
    # Under `ordered`, what another operand is does not matter if this one has too many bits with itself.
    reads_codes = not folds or (way is BoundedWay.MFMA if bounded else not sums_in_fp8(q, q))
    if reads_codes or not _multiplies_folded(q.codes.device):
        return ()
    return _folded(q).layout


def _layouts(a: MXArray, b: MXArray, profile: GemmProfile, name: str) -> list[tuple[torch.Tensor, ...]]:
    return [q.layout_for(name, profile) if isinstance(q, PreparedArray) else () for q in (a, b)]


def _check_devices(a: MXArray, b: MXArray) -> None:
    """Raise UnsupportedError unless all four arrays are on one device where kernels run."""
    device = a.codes.device
    for t in (a.codes, a.scales, a.tensor_scale, b.codes, b.scales, b.tensor_scale):
        if t is None:
            continue
        check_device(t)
        if t.device != device:
            raise UnsupportedError(
                f"backend 'triton' multiplies operands of one device, got {device} and {t.device}; "
                f"move them together: codes.to({str(device)!r}), scales.to({str(device)!r})"
            )


def _multiplies_folded(device: torch.device) -> bool:
    """Return whether a GPU can multiply E4M3 so that each block is summed separately."""
    return device.type == DEVICE and (is_hopper(device) or is_gfx950(device))


def _folds_ordered(a: MXArray, b: MXArray) -> bool:
    m, n = a.scales.shape[0], b.scales.shape[0]
    few = max(m, n) < MOST_FOLDED_ROWS and are_folded(a, b) and sums_in_fp8(a, b)
    return few and m * n * a.length >= LEAST_FOLDED_WORK and _multiplies_folded(a.codes.device)


def _folded(q: MXArray) -> Folded:
    """Return an operand folded as this GPU reads it; see `fold`."""
    return fold(q, by_block=is_gfx950(q.codes.device))


def _both_folded(
    a: MXArray, b: MXArray, layouts: Sequence[tuple[torch.Tensor, ...]]
) -> tuple[Folded, Folded]:
    """Return both operands folded, from their layouts where they have some.

    On Hopper the first one is folded wide if E5M2 holds it. In a backward pass it is a gradient, many of whose rows do
    not fit E4M3.
    """
    left, right = layouts
    by_block = is_gfx950(a.codes.device)
    wide = not by_block and fits_wide(a.format.element)
    if not (left or right or by_block):
        return fold_both(a, b, wide)
    first = Folded.of(left) if left else fold(a, by_block, wide)
    return first, Folded.of(right) if right else _folded(b)


def _multiplies_fp8(a: MXArray, b: MXArray) -> bool:
    m, n = a.scales.shape[0], b.scales.shape[0]
    whole = m > 0 and n > 0 and a.length > 0 and n % _FP8_UNIT == 0
    pays = a.length >= SHORTEST_FP8 or not sums_in_fp8(a, b)
    return whole and pays and is_hopper(a.codes.device)


def _fp8(a: MXArray, b: MXArray, left: Folded, right: Folded, out_dtype: str) -> torch.Tensor:
    factor = unprescale(a, b)
    scale = left.scale * factor if factor != 1 else left.scale
    dtype: torch.dtype = getattr(torch, out_dtype)
    m, n = left.values.shape[0], right.values.shape[0]
    with asking(m * n * dtype.itemsize, left.values.device):
        # Fast accumulation would keep 14 bits of the sum for all of K.
        out = torch._scaled_mm(
            left.values, right.values.t(), scale_a=scale, scale_b=right.scale.view(1, n),
            out_dtype=dtype, use_fast_accum=False,
        )  # fmt: skip
    multiply_misfits(a, b, left, right, out)
    return out
