"""Vector instructions that are one function of their typed sources: name -> types and function.

`b32` stands for an operand that arithmetic does not touch. Comparisons return bool, a lane mask.
Functions get arrays that broadcast to [waves, 64] and return the type named first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gfx950 import floats

U32, U64 = np.uint32, np.uint64


@dataclass(frozen=True)
class Op:
    """`result` and `sources` are types.

    `keeps_high`: a 16-bit result leaves the upper half as it was. `partial`: the function refuses some numbers, so
    it must not see what disabled lanes hold. `saturates`: clamp keeps the sum or difference in range.
    """

    result: str
    sources: tuple[str, ...]
    function: Callable[..., np.ndarray]
    keeps_high: bool = False
    partial: bool = False
    saturates: bool = False


def low(count: int, shift: np.ndarray) -> np.ndarray:
    """Return a shift amount cut to the bits that the instruction reads."""
    return shift & shift.dtype.type(count - 1)


def shift_left(count: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return (amount, value) -> value << amount for values of `count` bits."""
    return lambda amount, value: value << low(count, amount).astype(value.dtype)


def shift_right(count: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return (amount, value) -> value >> amount; arithmetic if the value is signed."""
    return lambda amount, value: value >> low(count, amount).astype(value.dtype)


def choose(pick: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[..., np.ndarray]:
    """Return the fold of a two-operand minimum or maximum over three operands."""
    return lambda a, b, c: pick(pick(a, b), c)


def middle(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return the median of three integers."""
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def high_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the upper 32 bits of a product of 32-bit integers, signed or not."""
    wide = np.int64 if a.dtype == np.int32 else np.uint64
    return ((a.astype(wide) * b.astype(wide)) >> wide(32)).astype(a.dtype)


def bfe_unsigned(value: np.ndarray, offset: np.ndarray, width: np.ndarray) -> np.ndarray:
    """Return `width` bits from `offset`; both amounts are five bits."""
    return (value >> low(32, offset)) & ((U32(1) << low(32, width)) - U32(1))


def bfe_signed(value: np.ndarray, offset: np.ndarray, width: np.ndarray) -> np.ndarray:
    """Return `width` bits from `offset`, sign-extended; width 0 gives 0."""
    width = low(32, width)
    field = (value >> low(32, offset).astype(np.int32)) & (
        (np.int32(1) << width.astype(np.int32)) - np.int32(1)
    )
    sign = np.where(width > 0, np.int32(1) << np.maximum(width.astype(np.int32) - 1, 0), 0).astype(np.int32)
    return (field ^ sign) - sign


def permute_alike(high: np.ndarray, lower: np.ndarray, selector: int) -> np.ndarray:
    """Return v_perm_b32 where all lanes have one selector, as nearly always."""
    result = np.zeros(np.broadcast_shapes(high.shape, lower.shape), U32)
    for byte in range(4):
        which = min(selector >> 8 * byte & 0xFF, 13)
        if which < 12:
            number = which if which < 8 else 2 * which - 15  # a sign is that of byte 1, 3, 5 or 7
            field = ((lower if number < 4 else high) >> U32(8 * (number % 4))) & U32(0xFF)
            result |= (field if which < 8 else (field >> U32(7)) * U32(0xFF)) << U32(8 * byte)
        elif which == 13:
            result |= U32(0xFF << 8 * byte)
    return result


def permute_bytes(high: np.ndarray, lower: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Return v_perm_b32: each selector byte picks one of the eight bytes {high, lower}, a sign, 0 or 255."""
    if selector.size == 1:
        return permute_alike(high, lower, int(selector.item()))
    high, lower, selector = np.broadcast_arrays(high, lower, selector)
    table = [((lower if i < 4 else high) >> U32(8 * (i % 4))) & U32(0xFF) for i in range(8)]
    table += [np.where(table[i] & U32(0x80), U32(0xFF), U32(0)) for i in (1, 3, 5, 7)]
    table += [np.zeros_like(high), np.full_like(high, 0xFF)]
    result = np.zeros_like(high)
    for byte in range(4):
        which = np.minimum((selector >> U32(8 * byte)) & U32(0xFF), U32(13))
        result |= np.choose(which, table).astype(U32) << U32(8 * byte)
    return result


def funnel(high: np.ndarray, lower: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """Return the low half of {high, lower} >> amount."""
    pair = (high.astype(U64) << U64(32)) | lower.astype(U64)
    return (pair >> amount.astype(U64)).astype(U32)


def reverse_bits(x: np.ndarray) -> np.ndarray:
    """Return the 32 bits in the opposite order."""
    for step, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        x = ((x >> U32(step)) & U32(mask)) | ((x & U32(mask)) << U32(step))
    return x


def count_bits(x: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Return the number of ones plus `start`."""
    return np.bitwise_count(x).astype(U32) + start


def first_high(x: np.ndarray) -> np.ndarray:
    """Return the number of leading zeros; all ones for 0."""
    exponent = np.frexp(x.astype(np.float64))[1]
    return np.where(x == 0, np.int32(-1), 32 - exponent).astype(np.int32).view(U32)


def first_low(x: np.ndarray) -> np.ndarray:
    """Return the position of the lowest one; all ones for 0."""
    return np.where(x == 0, U32(0xFFFFFFFF), U32(31) - first_high(x & (~x + U32(1)))).astype(U32)


def saturate(dtype: type[np.integer]) -> Callable[[np.ndarray], np.ndarray]:
    """Return the saturating cast of 32-bit integers to 16 bits."""
    info = np.iinfo(dtype)
    return lambda x: np.clip(x.astype(np.int64), info.min, info.max).astype(dtype).view(np.uint16).astype(U32)


def pack(to_bits: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return (a, b) -> the 16 bits of a low and those of b high."""
    return lambda a, b: to_bits(a) | (to_bits(b) << U32(16))


def half_bits(x: np.ndarray) -> np.ndarray:
    """Return float32 as float16 bits in uint32, RNE."""
    return x.astype(np.float16).view(np.uint16).astype(U32)


def half_bits_toward_zero(x: np.ndarray) -> np.ndarray:
    """Return float32 as float16 bits in uint32, toward zero."""
    nearest = x.astype(np.float16)
    beyond = (np.abs(nearest.astype(np.float32)) > np.abs(x)) & ~np.isnan(x)
    return nearest.view(np.uint16).astype(U32) - beyond.astype(U32)


def ubyte(number: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return the conversion of one byte to float32."""
    return lambda x: ((x >> U32(8 * number)) & U32(0xFF)).astype(np.float32)


TABLE: dict[str, Op] = {
    "v_mov_b32": Op("b32", ("b32",), lambda a: a),
    "v_mov_b64": Op("b64", ("b64",), lambda a: a),
    "v_accvgpr_read_b32": Op("b32", ("b32",), lambda a: a),
    "v_accvgpr_write_b32": Op("b32", ("b32",), lambda a: a),
    "v_accvgpr_mov_b32": Op("b32", ("b32",), lambda a: a),
    "v_not_b32": Op("u32", ("u32",), np.invert),
    "v_bfrev_b32": Op("u32", ("u32",), reverse_bits),
    "v_ffbh_u32": Op("u32", ("u32",), first_high),
    "v_ffbl_b32": Op("u32", ("u32",), first_low),
    "v_bcnt_u32_b32": Op("u32", ("u32", "u32"), count_bits),
    "v_prng_b32": Op("u32", ("u32",), lambda a: (a << U32(1)) ^ np.where(a >> U32(31), U32(197), U32(0))),
    "v_and_b32": Op("u32", ("u32", "u32"), np.bitwise_and),
    "v_or_b32": Op("u32", ("u32", "u32"), np.bitwise_or),
    "v_xor_b32": Op("u32", ("u32", "u32"), np.bitwise_xor),
    "v_xnor_b32": Op("u32", ("u32", "u32"), lambda a, b: ~(a ^ b)),
    "v_bfm_b32": Op("u32", ("u32", "u32"), lambda a, b: ((U32(1) << low(32, a)) - U32(1)) << low(32, b)),
    "v_lshlrev_b32": Op("u32", ("u32", "u32"), shift_left(32)),
    "v_lshrrev_b32": Op("u32", ("u32", "u32"), shift_right(32)),
    "v_ashrrev_i32": Op("i32", ("u32", "i32"), shift_right(32)),
    "v_lshlrev_b64": Op("u64", ("u32", "u64"), shift_left(64)),
    "v_lshrrev_b64": Op("u64", ("u32", "u64"), shift_right(64)),
    "v_ashrrev_i64": Op("i64", ("u32", "i64"), shift_right(64)),
    "v_lshl_add_u64": Op("u64", ("u64", "u32", "u64"), lambda a, b, c: (a << low(8, b).astype(U64)) + c),
    "v_add_u32": Op("u32", ("u32", "u32"), np.add, saturates=True),
    "v_sub_u32": Op("u32", ("u32", "u32"), np.subtract, saturates=True),
    "v_subrev_u32": Op("u32", ("u32", "u32"), lambda a, b: b - a, saturates=True),
    "v_mul_lo_u32": Op("u32", ("u32", "u32"), np.multiply),
    "v_mul_hi_u32": Op("u32", ("u32", "u32"), high_product),
    "v_mul_hi_i32": Op("i32", ("i32", "i32"), high_product),
    "v_mul_u32_u24": Op("u32", ("u24", "u24"), np.multiply),
    "v_mul_hi_u32_u24": Op("u32", ("u24", "u24"), high_product),
    "v_mul_i32_i24": Op("i32", ("i24", "i24"), np.multiply),
    "v_mul_hi_i32_i24": Op("i32", ("i24", "i24"), high_product),
    "v_mad_u32_u24": Op("u32", ("u24", "u24", "u32"), lambda a, b, c: a * b + c),
    "v_mad_i32_i24": Op("i32", ("i24", "i24", "i32"), lambda a, b, c: a * b + c),
    "v_mad_u32_u16": Op("u32", ("u16", "u16", "u32"), lambda a, b, c: a.astype(U32) * b.astype(U32) + c),
    "v_add3_u32": Op("u32", ("u32", "u32", "u32"), lambda a, b, c: a + b + c),
    "v_xad_u32": Op("u32", ("u32", "u32", "u32"), lambda a, b, c: (a ^ b) + c),
    "v_lshl_add_u32": Op("u32", ("u32", "u32", "u32"), lambda a, b, c: (a << low(32, b)) + c),
    "v_add_lshl_u32": Op("u32", ("u32", "u32", "u32"), lambda a, b, c: (a + b) << low(32, c)),
    "v_lshl_or_b32": Op("u32", ("u32", "u32", "u32"), lambda a, b, c: (a << low(32, b)) | c),
    "v_and_or_b32": Op("u32", ("u32", "u32", "u32"), lambda a, b, c: (a & b) | c),
    "v_or3_b32": Op("u32", ("u32", "u32", "u32"), lambda a, b, c: a | b | c),
    "v_bfi_b32": Op("u32", ("u32", "u32", "u32"), lambda a, b, c: (a & b) | (~a & c)),
    "v_bfe_u32": Op("u32", ("u32", "u32", "u32"), bfe_unsigned),
    "v_bfe_i32": Op("i32", ("i32", "u32", "u32"), bfe_signed),
    "v_alignbit_b32": Op("u32", ("u32", "u32", "u32"), lambda a, b, c: funnel(a, b, low(32, c))),
    "v_alignbyte_b32": Op("u32", ("u32", "u32", "u32"), lambda a, b, c: funnel(a, b, low(4, c) * U32(8))),
    "v_perm_b32": Op("u32", ("u32", "u32", "u32"), permute_bytes),
    "v_sad_u32": Op("u32", ("u32", "u32", "u32"), lambda a, b, c: np.maximum(a, b) - np.minimum(a, b) + c),
    "v_cvt_pk_u16_u32": Op("u32", ("u32", "u32"), pack(saturate(np.uint16))),
    "v_cvt_pk_i16_i32": Op("u32", ("i32", "i32"), pack(saturate(np.int16))),
    "v_pack_b32_f16": Op("u32", ("b16", "b16"), lambda a, b: a.astype(U32) | (b.astype(U32) << U32(16))),
    "v_cvt_pk_bf16_f32": Op("u32", ("f32", "f32"), pack(floats.bfloat16_bits)),
    "v_cvt_pk_f16_f32": Op("u32", ("f32", "f32"), pack(half_bits)),
    "v_cvt_pkrtz_f16_f32": Op("u32", ("f32", "f32"), pack(half_bits_toward_zero)),
    "v_cvt_f32_bf16": Op("b32", ("b16",), lambda a: a.astype(U32) << U32(16)),
    "v_cvt_f16_f32": Op("f16", ("f32",), lambda a: a.astype(np.float16)),
    "v_cvt_f32_f16": Op("f32", ("f16",), lambda a: a.astype(np.float32)),
    "v_cvt_f64_f32": Op("f64", ("f32",), lambda a: a.astype(np.float64)),
    "v_cvt_f32_f64": Op("f32", ("f64",), lambda a: a.astype(np.float32)),
    "v_cvt_f32_i32": Op("f32", ("i32",), lambda a: a.astype(np.float32)),
    "v_cvt_f32_u32": Op("f32", ("u32",), lambda a: a.astype(np.float32)),
    "v_cvt_f64_i32": Op("f64", ("i32",), lambda a: a.astype(np.float64)),
    "v_cvt_f64_u32": Op("f64", ("u32",), lambda a: a.astype(np.float64)),
    "v_cvt_i32_f32": Op("i32", ("f32",), floats.to_integer(np.int32)),
    "v_cvt_u32_f32": Op("u32", ("f32",), floats.to_integer(np.uint32)),
    "v_cvt_i32_f64": Op("i32", ("f64",), floats.to_integer(np.int32)),
    "v_cvt_u32_f64": Op("u32", ("f64",), floats.to_integer(np.uint32)),
    **{f"v_cvt_f32_ubyte{i}": Op("f32", ("u32",), ubyte(i)) for i in range(4)},
    "v_rndne_f32": Op("f32", ("f32",), np.rint),
    "v_floor_f32": Op("f32", ("f32",), np.floor),
    "v_ceil_f32": Op("f32", ("f32",), np.ceil),
    "v_trunc_f32": Op("f32", ("f32",), np.trunc),
    "v_ldexp_f32": Op("f32", ("f32", "i32"), floats.ldexp),
    "v_ldexp_f64": Op("f64", ("f64", "i32"), np.ldexp),
    "v_add_f64": Op("f64", ("f64", "f64"), np.add),
    "v_mul_f64": Op("f64", ("f64", "f64"), np.multiply),
    "v_max_f64": Op("f64", ("f64", "f64"), floats.maximum),
    "v_exp_f32": Op("f32", ("f32",), floats.exactly("v_exp_f32", floats.power_of_two), partial=True),
    "v_rsq_f32": Op("f32", ("f32",), floats.exactly("v_rsq_f32", lambda a: 1 / np.sqrt(a)), partial=True),
    "v_sqrt_f32": Op("f32", ("f32",), floats.exactly("v_sqrt_f32", np.sqrt), partial=True),
}

for _kind, _dtype in (("f32", np.float32), ("f16", np.float16)):
    TABLE |= {
        f"v_add_{_kind}": Op(_kind, (_kind, _kind), np.add),
        f"v_sub_{_kind}": Op(_kind, (_kind, _kind), np.subtract),
        f"v_subrev_{_kind}": Op(_kind, (_kind, _kind), lambda a, b: b - a),
        f"v_mul_{_kind}": Op(_kind, (_kind, _kind), np.multiply),
        f"v_fma_{_kind}": Op(_kind, (_kind,) * 3, floats.fma, keeps_high=True),
        f"v_min_{_kind}": Op(_kind, (_kind, _kind), floats.minimum),
        f"v_max_{_kind}": Op(_kind, (_kind, _kind), floats.maximum),
        f"v_min3_{_kind}": Op(_kind, (_kind,) * 3, choose(floats.minimum), keeps_high=True),
        f"v_max3_{_kind}": Op(_kind, (_kind,) * 3, choose(floats.maximum), keeps_high=True),
        f"v_med3_{_kind}": Op(_kind, (_kind,) * 3, floats.median, keeps_high=True),
    }
TABLE |= {
    "v_minimum3_f32": Op("f32", ("f32",) * 3, choose(floats.minimum_with_nan)),
    "v_maximum3_f32": Op("f32", ("f32",) * 3, choose(floats.maximum_with_nan)),
}

for _kind in ("u32", "i32", "u16", "i16"):
    TABLE |= {
        f"v_min_{_kind}": Op(_kind, (_kind, _kind), np.minimum),
        f"v_max_{_kind}": Op(_kind, (_kind, _kind), np.maximum),
        f"v_min3_{_kind}": Op(_kind, (_kind,) * 3, choose(np.minimum), keeps_high=True),
        f"v_max3_{_kind}": Op(_kind, (_kind,) * 3, choose(np.maximum), keeps_high=True),
        f"v_med3_{_kind}": Op(_kind, (_kind,) * 3, middle, keeps_high=True),
    }

TABLE |= {
    "v_add_u16": Op("u16", ("u16", "u16"), np.add, saturates=True),
    "v_sub_u16": Op("u16", ("u16", "u16"), np.subtract, saturates=True),
    "v_subrev_u16": Op("u16", ("u16", "u16"), lambda a, b: b - a, saturates=True),
    "v_add_i16": Op("i16", ("i16", "i16"), np.add, keeps_high=True, saturates=True),
    "v_sub_i16": Op("i16", ("i16", "i16"), np.subtract, keeps_high=True, saturates=True),
    "v_mul_lo_u16": Op("u16", ("u16", "u16"), np.multiply),
    "v_mad_u16": Op("u16", ("u16",) * 3, lambda a, b, c: a * b + c, keeps_high=True),
    "v_mad_legacy_u16": Op("u16", ("u16",) * 3, lambda a, b, c: a * b + c),
    "v_lshlrev_b16": Op("u16", ("u16", "u16"), shift_left(16)),
    "v_lshrrev_b16": Op("u16", ("u16", "u16"), shift_right(16)),
    "v_ashrrev_i16": Op("i16", ("u16", "i16"), shift_right(16)),
    "v_add_i32": Op("i32", ("i32", "i32"), np.add, saturates=True),
    "v_sub_i32": Op("i32", ("i32", "i32"), np.subtract, saturates=True),
}

COMPARISONS = {
    "eq": operator.eq, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
COMPARE: dict[str, tuple[str, Callable[[np.ndarray, np.ndarray], np.ndarray]]] = {}
for _kind in ("i32", "u32", "i16", "u16", "i64", "u64", "f32", "f16", "f64"):
    for _name, _function in COMPARISONS.items():
        COMPARE[f"{_name}_{_kind}"] = (_kind, _function)
        if _kind.startswith("f"):
            # "not less" and the like differ from "greater or equal" where an operand is NaN.
            COMPARE[f"n{_name}_{_kind}"] = (_kind, lambda a, b, f=_function: ~f(a, b))
    if _kind.startswith("f"):
        COMPARE[f"o_{_kind}"] = (_kind, lambda a, b: ~(np.isnan(a) | np.isnan(b)))
        COMPARE[f"u_{_kind}"] = (_kind, lambda a, b: np.isnan(a) | np.isnan(b))
        COMPARE[f"lg_{_kind}"] = (_kind, lambda a, b: (a < b) | (a > b))
        COMPARE[f"nlg_{_kind}"] = (_kind, lambda a, b: ~((a < b) | (a > b)))
        COMPARE[f"neq_{_kind}"] = (_kind, operator.ne)
    else:
        COMPARE[f"ne_{_kind}"] = (_kind, operator.ne)
