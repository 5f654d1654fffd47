"""What the planted faults of `mutants` are made of: the reference in stages, and wrong stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from mxref import BlockShape, Capabilities, GemmProfile, MXArray, Rounding, ScaleRule, Stream
from mxref import hadamard as transform
from mxref.block_dots import block_dots
from mxref.formats import E2M1
from mxref.hadamard import Rotation, norm_factor
from mxref.packing import pack, unpack
from mxref.philox import random_integers, stream_words
from mxref.placement import Placement
from mxref.quantization import dequantize
from mxref.reference import ReferenceBackend
from mxref.rounding import apply_prescale, round_magnitude
from mxref.scale import magnitude_bits, scale_code, scale_exponent

GRID = np.array(E2M1.magnitudes)
TIES = (GRID[1:] + GRID[:-1]) / 2
INF = 0x7F800000
VALUES = np.array([*GRID, *-GRID], np.float32)


class Staged(ReferenceBackend):
    """The reference, stage by stage."""

    name = "mutant"

    def _quantize(self, x, plan):
        self.plan_now, self.dtype_now, spec = plan, x.dtype, plan.spec
        v = np.moveaxis(x, plan.axis, -1)
        v = self.rows(self.widen(v), plan)
        bits = magnitude_bits(v).reshape(len(v), plan.length // 32, 32)
        amax = self.amax(bits, v, spec)  # [rows, blocks]
        spoiled = self.spoiled(amax, bits, spec)
        scales = self.scale(np.where(spoiled, np.uint32(0), amax), spec)
        scales = np.where(amax == 0, self.zero(spec), scales).astype(np.uint8)
        magnitude = np.where(spoiled[..., None], 0, bits).astype(np.uint32).view(np.float32)
        with np.errstate(under="ignore", over="ignore", invalid="ignore"):
            scaled = self.scaled(magnitude, scales)
            if spec.prescale:
                scaled = self.prescale(scaled)
        random = self.integers(plan).reshape(bits.shape) if plan.stream else None
        codes = self.round(scaled, spec, random).astype(np.uint8)
        codes = self.sign(codes, np.signbit(v).reshape(bits.shape))
        codes, scales = self.nan(codes, scales, spoiled, v.reshape(bits.shape))
        shape = (*plan.rows_shape, plan.length)
        return self.pack(codes.reshape(shape)), scales.reshape(*shape[:-1], plan.length // 32)

    def widen(self, x):
        return x.astype(np.float32)

    def rows(self, v, plan):
        v = np.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, plan.length - v.shape[-1])]).reshape(
            plan.rows, plan.length
        )
        return self.rotate(v, plan.rotation) if plan.rotation else v

    def rotate(self, v, rotation):
        return transform(v, rotation)

    def amax(self, bits, v, spec):
        amax = bits.max(axis=-1)
        if spec.block is BlockShape.TILE:
            tiles = amax.reshape(len(amax) // 32, 32, amax.shape[-1]).max(axis=1)
            amax = np.repeat(tiles, 32, axis=0)
        return amax

    def spoiled(self, amax, bits, spec):
        return amax >= INF

    def scale(self, amax, spec):
        return scale_code(amax, spec.scale_rule, E2M1)

    def zero(self, spec):
        return spec.zero_scale

    def scaled(self, magnitude, scales):
        return np.ldexp(magnitude.astype(np.float64), -scale_exponent(scales)[..., None]).astype(np.float32)

    def prescale(self, v):
        return apply_prescale(v, E2M1)

    def stream(self, plan):
        return plan.stream

    def integers(self, plan):
        return random_integers(
            self.rows_index(plan),
            plan.first,
            plan.length,
            plan.global_length,
            self.stream(plan),
            plan.spec.sr_bits,
        )

    def rows_index(self, plan):
        return plan.global_rows()

    def round(self, v, spec, random):
        return round_magnitude(v, spec.rounding, E2M1, random, spec.sr_bits)

    def sign(self, codes, negative):
        return codes | negative.astype(np.uint8) << 3

    def nan(self, codes, scales, spoiled, v):
        return np.where(spoiled[..., None], 0, codes).astype(np.uint8), np.where(spoiled, 255, scales).astype(
            np.uint8
        )

    def pack(self, codes):
        return pack(codes, E2M1)

    def _scaled_gemm(self, a, b, profile, out_dtype):
        if profile is GemmProfile.EXACT:
            return super()._scaled_gemm(a, b, profile, out_dtype)
        with np.errstate(all="ignore"):
            acc = self.accumulate(a, b) * self.undo(int(a.prescale) + int(b.prescale))
            out = self.narrow(acc.astype(np.float32), out_dtype)
        spoiled = self.nan_rows(a, b)
        out[spoiled] = np.nan
        return out

    def accumulate(self, a, b):
        acc = np.zeros((len(a.scales), len(b.scales)), np.float32)
        for dot in block_dots(a, b):
            acc = self.add(acc, dot.approximate())
        return acc

    def add(self, acc, term):
        return (acc.astype(np.float64) + term).astype(np.float32)

    def undo(self, prescaled):
        return (np.float32(1), np.float32(4 / 3), np.float32(16 / 9))[prescaled]

    def narrow(self, acc, out_dtype):
        return acc if out_dtype == "float32" else acc.astype(ml_dtypes.bfloat16)

    def nan_rows(self, a, b):
        return (a.scales == 255).any(axis=1)[:, None] | (b.scales == 255).any(axis=1)


def staged(**stages: Any) -> Callable[[], ReferenceBackend]:
    """A backend with some stages replaced by functions of (self, ...)."""
    return lambda: type("Mutant", (Staged,), stages)()


def with_capabilities(**fields: Any) -> Capabilities:
    return replace(ReferenceBackend.capabilities, **fields)


# ---- scales ----


def log2_floor(self, amax, spec):
    a = amax.astype(np.uint32).view(np.float32)
    with np.errstate(divide="ignore"):
        e = np.floor(np.log2(a)).clip(-149, 127)
    bump = scale_code(amax, spec.scale_rule, E2M1).astype(int) - scale_code(amax, ScaleRule.FLOOR, E2M1)
    return (e - 2 + bump).clip(-127, 127).astype(int) + 127


def log2_in_bfloat16(self, amax, spec):
    if self.dtype_now != ml_dtypes.bfloat16:
        return scale_code(amax, spec.scale_rule, E2M1)
    a = amax.astype(np.uint32).view(np.float32).astype(np.float64)
    with np.errstate(divide="ignore"):
        e = np.floor(np.log2(a).astype(ml_dtypes.bfloat16).astype(np.float64)).clip(-149, 127)
    bump = scale_code(amax, spec.scale_rule, E2M1).astype(int) - scale_code(amax, ScaleRule.FLOOR, E2M1)
    return (e - 2 + bump).clip(-127, 127).astype(int) + 127


def turn(rule: ScaleRule, above: int):
    """The scale rule with another mantissa at which it turns."""

    def scale(self, amax, spec):
        if spec.scale_rule is not rule:
            return scale_code(amax, spec.scale_rule, E2M1)
        u = amax.astype(np.int64)
        return np.clip((u >> 23) - 129 + ((u & 0x7FFFFF) > above), -127, 127) + 127

    return scale


def even_to_nan(self, amax, spec):
    scales = scale_code(amax, spec.scale_rule, E2M1).astype(int)
    return np.where((spec.scale_rule is ScaleRule.EVEN) & (amax >= 0x7F600000), 255, scales)


def wrapped(self, amax, spec):
    u = amax.astype(np.int64)
    bump = scale_code(amax, spec.scale_rule, E2M1).astype(int) - scale_code(amax, ScaleRule.FLOOR, E2M1)
    return np.where(amax > 0, (u >> 23) - 2 + bump, 0) & 255


def applied_scale_clamped(self, magnitude, scales):
    return Staged.scaled(self, magnitude, np.maximum(scales, 1))


def flush_inputs(self, x):
    wide = x.astype(np.float32)
    return np.where(np.abs(wide) < 2.0**-126, np.copysign(np.float32(0), wide), wide)


def signed_max(self, bits, v, spec):
    amax = Staged.amax(self, bits, v, spec)
    largest = v.reshape(bits.shape).max(axis=-1)
    negative = (largest <= 0) | np.isnan(largest)
    return (
        np.where(negative, amax, np.maximum(magnitude_bits(largest), 1))
        if spec.block is BlockShape.ROW
        else amax
    )


def amax_of_64(self, bits, v, spec):
    amax = Staged.amax(self, bits, v, spec)
    pairs = amax[:, : amax.shape[1] // 2 * 2].reshape(len(amax), -1, 2).max(axis=-1)
    return np.concatenate([np.repeat(pairs, 2, axis=1), amax[:, pairs.shape[1] * 2 :]], axis=1)


def tile_as_row(self, bits, v, spec):
    return bits.max(axis=-1)


def tile_nan_per_row(self, amax, bits, spec):
    return bits.max(axis=-1) >= INF


# ---- special values ----


def nan_to_zero(self, codes, scales, spoiled, v):
    finite = np.where(np.isfinite(v), v, 0)
    amax = magnitude_bits(np.ascontiguousarray(finite, np.float32)).max(axis=-1)
    byte = scale_code(amax, ScaleRule.FLOOR, E2M1)
    again = round_magnitude(self.scaled(np.abs(finite).astype(np.float32), byte), Rounding.RNE, E2M1)
    codes = np.where(spoiled[..., None], again | np.signbit(v).astype(np.uint8) << 3, codes)
    return codes.astype(np.uint8), np.where(spoiled, byte, scales).astype(np.uint8)


def nan_keeps_the_rest(self, codes, scales, spoiled, v):
    kept, _ = nan_to_zero(self, codes, scales, spoiled, v)
    return kept, np.where(spoiled, 255, scales).astype(np.uint8)


def nan_block_zeroed(self, codes, scales, spoiled, v):
    return np.where(spoiled[..., None], 0, codes).astype(np.uint8), np.where(spoiled, 0, scales).astype(
        np.uint8
    )


def inf_only(byte: int, code: int):
    """Blocks with Inf and no NaN get a finite scale and the given code for Inf."""

    def nan(self, codes, scales, spoiled, v):
        codes, scales = Staged.nan(self, codes, scales, spoiled, v)
        infinite = spoiled & ~np.isnan(v).any(axis=-1)
        return (
            np.where(infinite[..., None], np.where(np.isinf(v), code, 0), codes).astype(np.uint8),
            np.where(infinite, byte, scales).astype(np.uint8),
        )

    return nan


def sign_lost_on(which: str):
    def sign(self, codes, negative):
        if which == "underflow":  # both -0 and what rounds to it
            negative = negative & (codes != 0)
        return codes | negative.astype(np.uint8) << 3

    return sign


def minus_zero_lost(self, x):
    with np.errstate(invalid="ignore"):
        return x.astype(np.float32) + np.float32(0)


# ---- rounding ----


def mode(rounding: Rounding, actual: Callable[[Any], Any]):
    def round_(self, v, spec, random):
        return actual(v) if spec.rounding is rounding else Staged.round(self, v, spec, random)

    return round_


def floor_of_half_more(v):
    """floor(x + 0.5) in float32 at the element's precision, where 0.24999999 + 0.25 is already 0.5."""
    code = round_magnitude(v, Rounding.RNE, E2M1)
    return np.where((v < 0.5) & ((v + np.float32(0.25)) >= np.float32(0.5)) & (v != 0.25), 1, code)


def no_saturation(self, v, spec, random):
    codes = Staged.round(self, v, spec, random)
    return np.where(v > 7, 0, codes)


def sr_with(compare: Callable[[Any, Any, int], Any]):
    def round_(self, v, spec, random):
        if spec.rounding is not Rounding.SR:
            return Staged.round(self, v, spec, random)
        lower = np.minimum(np.searchsorted(GRID, v, side="right") - 1, 6)
        f = np.minimum((v.astype(np.float64) - GRID[lower]) / np.diff(GRID)[lower], 1)
        up = np.where(v >= 6, True, compare(f, random.astype(np.int64), spec.sr_bits))
        return lower + up

    return round_


def shared_random(self, plan):
    r = random_integers(
        plan.global_rows(), plan.first, plan.length, plan.global_length, plan.stream, plan.spec.sr_bits
    )
    return np.repeat(r[:, ::4], 4, axis=1)


def low_bits(self, plan):
    bits = plan.spec.sr_bits
    full = 16 if bits <= 16 else 22
    return np.asarray(
        random_integers(plan.global_rows(), plan.first, plan.length, plan.global_length, plan.stream, full)
    ) & ((1 << bits) - 1)


def halves_swapped(self, plan):
    r = Staged.integers(self, plan)
    return r.reshape(len(r), -1, 2)[:, :, ::-1].reshape(r.shape) if plan.spec.sr_bits <= 16 else r


def stream_without(**fields: int):
    def stream(self, plan):
        return replace(plan.stream, **fields)

    return stream


def seed_low_word(self, plan):
    return replace(plan.stream, seed=plan.stream.seed & 0xFFFFFFFF)


def local_rows(self, plan):
    return np.arange(plan.rows, dtype=np.int64)


def local_integers(self, plan):
    return random_integers(plan.global_rows(), 0, plan.length, plan.length, plan.stream, plan.spec.sr_bits)


def unpadded_length(self, plan):
    length = -(-plan.global_shape[plan.axis] // 8) * 8
    return random_integers(
        plan.global_rows(), plan.first, plan.length, length, plan.stream, plan.spec.sr_bits
    )


def rows_in_32_bits(self, plan):
    return plan.global_rows() & 0x0FFFFFFF


def launch_counter():
    """Random bits that depend on how often the kernel ran."""
    calls = iter(range(1 << 30))

    def stream(self, plan):
        return replace(plan.stream, step=next(calls) % 2)

    return staged(stream=stream)()


# ---- Hadamard ----


def rotating(actual: Callable[[Any, Rotation], Any]):
    """A fault in both the transform alone and the one inside a quantization."""

    def make():
        class Rotating(Staged):
            def rotate(self, v, rotation):
                return actual(v, rotation)

            def _hadamard(self, x, rotation, axis):
                v = np.moveaxis(x, axis, -1).astype(np.float32)
                return np.moveaxis(actual(v, rotation), -1, axis)

        return Rotating()

    return make


def stages_swapped(x, rotation):
    n = rotation.n
    with np.errstate(all="ignore"):
        y = x.reshape(-1, n) * rotation.vector()
        h = n // 2
        while h:
            pairs = y.reshape(-1, n // (2 * h), 2, h)
            s, t = pairs[:, :, 0], pairs[:, :, 1]
            y = np.stack([s + t, s - t], axis=2)
            h //= 2
        return (y.reshape(x.shape) * norm_factor(n)).astype(np.float32)


def as_matrix(x, rotation):
    n = rotation.n
    h = np.array([[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)])
    with np.errstate(all="ignore"):
        y = (x.reshape(-1, n) * rotation.vector()).astype(np.float64) @ h
        return (y.astype(np.float32) * norm_factor(n)).reshape(x.shape)


def unnormalised(x, rotation):
    return transform(x, rotation) / norm_factor(rotation.n)


def bit_reversed(x, rotation):
    n, width = rotation.n, rotation.n.bit_length() - 1
    order = [int(f"{i:0{width}b}"[::-1], 2) for i in range(n)]
    return transform(x, rotation).reshape(-1, n)[:, order].reshape(x.shape)


def signs_after(x, rotation):
    y = transform(x, Rotation(rotation.n))
    return (y.reshape(-1, rotation.n) * rotation.vector()).reshape(x.shape)


def scaled_each_stage(x, rotation):
    """1/sqrt(2) at every stage instead of one factor at the end."""
    n, root = rotation.n, np.float32(np.sqrt(0.5))
    with np.errstate(all="ignore"):
        y, h = x.reshape(-1, n) * rotation.vector(), 1
        while h < n:
            pairs = y.reshape(-1, n // (2 * h), 2, h)
            s, t = pairs[:, :, 0], pairs[:, :, 1]
            y = np.stack([(s + t) * root, (s - t) * root], axis=2)
            h *= 2
    return y.reshape(x.shape)


def clip_nonfinite(x, rotation):
    return np.nan_to_num(transform(x, rotation), nan=0.0)


def rounded_to_bfloat16(self, v, rotation):
    with np.errstate(all="ignore"):
        return transform(v, rotation).astype(ml_dtypes.bfloat16).astype(np.float32)


class WrongAxis(Staged):
    def _hadamard(self, x, rotation, axis):
        other = axis if x.shape[-1] % rotation.n else x.ndim - 1
        return super()._hadamard(x, rotation, other)


class PadsAfter(Staged):
    def rows(self, v, plan):
        length = v.shape[-1]
        if plan.rotation is None or length == plan.length:
            return super().rows(v, plan)
        n = plan.rotation.n
        short = -(-length // n) * n if length >= n else plan.length
        v = np.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, short - length)], mode="edge")
        v = transform(v, plan.rotation)
        return np.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, plan.length - short)]).reshape(plan.rows, plan.length)


class OwnSigns(Staged):
    """Draws its signs itself, from a stream that it changes."""

    def __init__(self, change: Callable[[Stream], Stream], policies: tuple[str, ...]) -> None:
        self.change, self.policies = change, policies

    def plan(self, x, spec, *, axis, **placement):
        where = placement.get("placement", Placement())
        if where.stream is None or not spec.hadamard or spec.signs.value not in self.policies:
            return super().plan(x, spec, axis=axis, **placement)
        plan = super().plan(x, spec, axis=axis, **placement)
        other = super().plan(
            x, spec, axis=axis, **{**placement, "placement": replace(where, stream=self.change(where.stream))}
        )
        return replace(plan, rotation=other.rotation)


class SignPerOperand(Staged):
    """Each operand of a GEMM draws signs of its own."""

    def plan(self, x, spec, *, axis, **placement):
        plan = super().plan(x, spec, axis=axis, **placement)
        rng = placement.get("rng")
        if not plan.rotation or spec.signs.value == "none":
            return plan
        words = stream_words(np.arange(2), replace(rng, operand=6 + rng.operand % 3, step=rng.step)).reshape(
            -1
        )
        bits = sum(int(w) << 32 * i for i, w in enumerate(words)) & (1 << spec.hadamard) - 1
        return replace(plan, rotation=Rotation(spec.hadamard, bits))


# ---- layout ----


class IgnoresStrides(Staged):
    def _quantize(self, x, plan):
        if not x.flags.c_contiguous and x.base is not None and x.base.size >= x.size:
            x = np.lib.stride_tricks.as_strided(
                np.ascontiguousarray(x.base).reshape(-1), x.shape, _contiguous(x)
            )
        return super()._quantize(x, plan)


def _contiguous(x):
    return tuple(int(np.prod(x.shape[i + 1 :])) * x.itemsize for i in range(x.ndim))


class WritesToItsInput(Staged):
    def _quantize(self, x, plan):
        out = super()._quantize(x, plan)
        if x.flags.writeable:
            x[np.isnan(x)] = 0
        return out


class LetsNanPass(Staged):
    def quantize(self, x, spec, **arguments):
        return super().quantize(x, replace(spec, nonfinite="nan_block"), **arguments)


class PadsWhatItIsGiven(Staged):
    def quantize(self, x, spec, **arguments):
        return super().quantize(x, spec, **{**arguments, "pad": True})


class AxisByShape(Staged):
    """Guesses that the block axis is the longer one."""

    def _quantize(self, x, plan):
        if x.ndim == 2 and plan.axis == 0 and x.shape[0] == x.shape[1]:
            x = x.T
        elif x.ndim == 3 and plan.axis == 0:
            codes, scales = super()._quantize(x, plan)
            return codes.swapaxes(0, 1).reshape(codes.shape), scales
        return super()._quantize(x, plan)


class TakesFloat64(Staged):
    def quantize(self, x, spec, **arguments):
        return super().quantize(x.astype(np.float32) if x.dtype == np.float64 else x, spec, **arguments)


def truncate_bfloat16(self, x):
    """A reinterpretation that drops a bfloat16's low bits on their way."""
    wide = x.astype(np.float32)
    return (
        (wide.view(np.uint32) & np.uint32(0xFFFE0000)).view(np.float32)
        if x.dtype == ml_dtypes.bfloat16
        else wide
    )


def flush_float16(self, x):
    wide = x.astype(np.float32)
    return (
        np.where(np.abs(wide) < 2.0**-14, np.copysign(np.float32(0), wide), wide)
        if x.dtype == np.float16
        else wide
    )


def split_nibbles(codes):
    blocks = codes.reshape(*codes.shape[:-1], -1, 2, 16)
    return (blocks[..., 0, :] | blocks[..., 1, :] << 4).reshape(*codes.shape[:-1], codes.shape[-1] // 2)


def block_order(self, codes, scales, spoiled, v):
    codes, scales = Staged.nan(self, codes, scales, spoiled, v)
    return codes, scales[:, ::-1]


# ---- dequantization ----


def decoding(actual: Callable[[MXArray, str], Any]):
    class Decoding(Staged):
        def _dequantize(self, q, dtype):
            with np.errstate(all="ignore"):
                return actual(q, dtype)

    return Decoding


def by_scale(change: Callable[[Any, Any], Any]):
    """Values as elements times factors, the factors changed."""

    def decode(q, dtype):
        factors = np.ldexp(1.0, q.scales.astype(int) - 127)
        factors = np.repeat(change(q.scales, np.where(q.scales == 255, np.nan, factors)), 32, axis=-1)
        values = VALUES[unpack(q.codes, E2M1)].astype(np.float64) * factors
        values = np.moveaxis(values[..., : q.shape[q.axis]], -1, q.axis)
        kind = {"float64": np.float64, "float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[dtype]
        return values.astype(np.float32).astype(kind) if dtype == "bfloat16" else values.astype(kind)

    return decode


def clamped_to_largest(q, dtype):
    values = dequantize(q, dtype)
    wide = values.astype(np.float64)
    return np.where(np.isinf(wide), np.copysign(float(ml_dtypes.finfo(values.dtype).max), wide), wide).astype(
        values.dtype
    )


def unsplit(q, dtype):
    nibbles = unpack(q.codes, E2M1).reshape(*q.codes.shape[:-1], -1, 16, 2)
    codes = np.concatenate([nibbles[..., 0], nibbles[..., 1]], axis=-1).reshape(*q.codes.shape[:-1], -1)
    return dequantize(replace(q, codes=pack(codes, E2M1)), dtype)


def undoes_prescale(q, dtype):
    values = dequantize(q, dtype)
    return (values.astype(np.float64) * (4 / 3)).astype(values.dtype) if q.prescale else values


# ---- GEMM ----


def dequantized(self, a, b):
    wide = [dequantize(replace(q, shape=(len(q.scales), q.length), axis=1), "float32") for q in (a, b)]
    return wide[0] @ wide[1].T


def descending(self, a, b):
    acc = np.zeros((len(a.scales), len(b.scales)), np.float32)
    for dot in reversed(list(block_dots(a, b))):
        acc = self.add(acc, dot.approximate())
    return acc


def float64_accumulation(self, a, b):
    acc = np.zeros((len(a.scales), len(b.scales)))
    for dot in block_dots(a, b):
        acc = acc + dot.approximate()
    return acc.astype(np.float32)


def term_in_float32(self, acc, term):
    return acc + term.astype(np.float32)


def float32_terms_flushed(self, acc, term):
    narrow = Staged.add(self, acc, term)
    return np.where(np.abs(narrow) < 2.0**-126, np.copysign(np.float32(0), narrow), narrow)


def undo_before(self, a, b):
    factor = (np.float32(1), np.float32(4 / 3), np.float32(16 / 9))[int(a.prescale) + int(b.prescale)]
    acc = np.zeros((len(a.scales), len(b.scales)), np.float32)
    for dot in block_dots(a, b):
        acc = self.add(acc, dot.approximate() * float(factor))
    return acc


def inf_minus_inf(self, acc, term):
    terms = term.astype(np.float32)
    return np.where(
        np.isinf(acc) & np.isinf(terms) & (np.sign(acc) != np.sign(terms)), np.nan, self_add(acc, term)
    )


def self_add(acc, term):
    return (acc.astype(np.float64) + term).astype(np.float32)


def truncated(self, acc, out_dtype):
    if out_dtype == "float32":
        return acc
    return (acc.view(np.uint32) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)


def no_nan_rows(self, a, b):
    return np.zeros((len(a.scales), len(b.scales)), np.bool_)


def nan_only_if_nonzero(self, a, b):
    live = [(q.scales == 255) & (q.codes.reshape(*q.scales.shape, 16) & 0x77).any(axis=-1) for q in (a, b)]
    return live[0].any(axis=1)[:, None] | live[1].any(axis=1)


class ExactBy(Staged):
    def __init__(self, change: Callable[..., Any]) -> None:
        self.change = change

    def _scaled_gemm(self, a, b, profile, out_dtype):
        if profile is not GemmProfile.EXACT:
            return super()._scaled_gemm(a, b, profile, out_dtype)
        with np.errstate(all="ignore"):
            return self.change(self, a, b, out_dtype)


def rounded_twice(self, a, b, out_dtype):
    wide = ReferenceBackend._scaled_gemm(self, a, b, GemmProfile.EXACT, "float32")
    return wide if out_dtype == "float32" else wide.astype(ml_dtypes.bfloat16)


def exact_plus_zero(self, a, b, out_dtype):
    return ReferenceBackend._scaled_gemm(self, a, b, GemmProfile.EXACT, out_dtype) + np.float32(0).astype(
        "float32" if out_dtype == "float32" else ml_dtypes.bfloat16
    )


def exact_by_ordered(self, a, b, out_dtype):
    return ReferenceBackend._scaled_gemm(self, a, b, GemmProfile.ORDERED, out_dtype)


class Loose(Staged):
    """`bounded` from operands rounded to three mantissa bits: beyond the error class that it declares."""

    def _scaled_gemm(self, a, b, profile, out_dtype):
        out = super()._scaled_gemm(a, b, profile, out_dtype)
        if profile is GemmProfile.BOUNDED:
            with np.errstate(all="ignore"):
                out = (out.astype(np.float64) * (1 + 2.0**-7)).astype(out.dtype)
        return out


class GemmIgnoresAxis(Staged):
    def _scaled_gemm(self, a, b, profile, out_dtype):
        out = super()._scaled_gemm(a, b, profile, out_dtype)
        return out[::-1] if a.axis == 0 and b.axis == 1 else out


# ---- protocol ----


class Accepts(Staged):
    """Does what it does not declare."""

    capabilities = with_capabilities(scale_rules=frozenset({ScaleRule.FLOOR}), prescale=False)

    def plan(self, x, spec, **placement):
        return ReferenceBackend().plan(x, spec, **placement)


class DecodesAll(Staged):
    capabilities = with_capabilities(dequantize_dtypes=frozenset({"float32"}))

    def dequantize(self, q, dtype="float32"):
        return dequantize(q, dtype)


class RefusesWhatItDeclares(Staged):
    def plan(self, x, spec, **placement):
        if spec.hadamard > 128:
            ReferenceBackend.capabilities.require("mutant", "scale_rules", "H256")
        return super().plan(x, spec, **placement)


class BrokenArrays(Staged):
    def from_numpy(self, array):
        return array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array


class NonsenseCapabilities(Staged):
    capabilities = with_capabilities(hadamard_sizes=frozenset({16, 48}))


def bias_125(self, amax, spec):
    return np.maximum(scale_code(amax, spec.scale_rule, E2M1).astype(int) - 2, 0)


def prescale_in_the_scale(self, amax, spec):
    return scale_code(amax, ScaleRule.RCEIL if spec.prescale else spec.scale_rule, E2M1)


def prescale_in_bfloat16(self, v):
    narrow = v.astype(ml_dtypes.bfloat16).astype(np.float32)
    return (np.float32(0.75) * narrow).astype(ml_dtypes.bfloat16).astype(np.float32)


def high_nibble_first(self, codes):
    return pack(
        codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)[..., ::-1].reshape(codes.shape), E2M1
    )
