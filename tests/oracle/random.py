"""The scalar exact oracle's random bits and Hadamard: Philox4x32-10, rounding integers, signs, butterflies.

As all of `oracle`, it shares no code with the package under test: Philox is written from its published description
(Salmon et al., SC 2011), float32 arithmetic is the exact one of `oracle`.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import cache, lru_cache
from math import isqrt
from typing import Literal

from oracle.floats import SIGN32, f32_add, f32_mul, f32_sub, round_f32

SignPolicy = Literal["none", "fixed", "per_step", "per_step_layer"]
_WORD = 0xFFFFFFFF


def philox4x32_10(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Ten rounds of Philox on four counter words and two key words; the key steps between rounds (Weyl)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = right >> 32 ^ c1 ^ k0, right & _WORD, left >> 32 ^ c3 ^ k1, left & _WORD
        k0, k1 = k0 + 0x9E3779B9 & _WORD, k1 + 0xBB67AE85 & _WORD
    return [c0, c1, c2, c3]


def _check(name: str, value: int, bits: int) -> None:
    if not 0 <= value < 1 << bits:
        raise ValueError(f"{name}={value} does not fit {bits} bits")


@lru_cache(maxsize=8)  # neighbours ask for the same words
def _stream_words(g: int, seed: int, step: int, layer: int, operand: int) -> list[int]:
    """Call g of one stream: counter (g, step << 32 | layer << 8 | operand), key = seed, low words first."""
    for name, value, bits in (
        ("g", g, 64),
        ("seed", seed, 64),
        ("step", step, 32),
        ("layer", layer, 24),
        ("operand", operand, 8),
    ):
        _check(name, value, bits)
    stream = step << 32 | layer << 8 | operand
    return philox4x32_10((g & _WORD, g >> 32, stream & _WORD, stream >> 32), (seed & _WORD, seed >> 32))


def sr_integer(seed: int, step: int, layer: int, operand: int, flat_index: int, R: int) -> int:
    """The rounding integer in [0, 2^R) of one element of the global padded tensor, block axis last.

    R <= 16: a call serves eight consecutive elements; element j owns half j & 1 (low first) of word j >> 1.
    R > 16: a call serves four; element j owns word j. The top R bits of what it owns are its integer.
    """
    if not 1 <= R <= 22:
        raise ValueError(f"R={R} is outside 1..22")
    if R <= 16:
        g, j = divmod(flat_index, 8)
        half = _stream_words(g, seed, step, layer, operand)[j >> 1] >> 16 * (j & 1) & 0xFFFF
        return half >> (16 - R)
    g, j = divmod(flat_index, 4)
    return _stream_words(g, seed, step, layer, operand)[j] >> (32 - R)


def sign_vector(n: int, seed: int, step: int, layer: int, role_sign_id: int, policy: SignPolicy) -> list[int]:
    """n signs: d_i = -1 where bit i of the stream is 1, with 128 bits to a call, 32 to a word, low bit first.

    none: all +1. fixed: step 0, layer 0. per_step: layer 0. per_step_layer: both as given.
    """
    if policy == "none":
        return [1] * n
    if policy not in ("fixed", "per_step", "per_step_layer"):
        raise ValueError(f"unknown sign policy {policy!r}")
    step = 0 if policy == "fixed" else step
    layer = layer if policy == "per_step_layer" else 0
    signs = []
    for i in range(n):
        word = _stream_words(i // 128, seed, step, layer, role_sign_id)[i // 32 % 4]
        signs.append(-1 if word >> i % 32 & 1 else 1)
    return signs


@cache
def inverse_sqrt_f32(n: int) -> int:
    """fl32(1 / sqrt(n)) for a power of two n, from an integer square root and a sticky digit."""
    if n < 1 or n & (n - 1):
        raise ValueError(f"Hadamard size {n} is not a power of two")
    square = (1 << 128) // n  # (2^64 / sqrt(n))^2, an integer for n <= 2^128
    root = isqrt(square)
    sticky = root * root != square  # then the true root lies strictly between root and root + 1
    return round_f32(Fraction(2 * root + sticky, 1 << 65))


def hadamard(group_bits: Sequence[int], signs: Sequence[int]) -> list[int]:
    """Signs, then the Sylvester butterfly, then 1/sqrt(n), on a group of float32 bits, every step rounded.

    For h = 1, 2, 4, .. n/2 a pair (s, t) at distance h becomes (s + t, s - t); then one multiply per element.
    """
    n = len(group_bits)
    factor = inverse_sqrt_f32(n)
    x = [b ^ SIGN32 if d < 0 else b for b, d in zip(group_bits, signs, strict=True)]
    h = 1
    while h < n:
        for i in range(n):
            if not i & h:
                x[i], x[i + h] = f32_add(x[i], x[i + h]), f32_sub(x[i], x[i + h])
        h *= 2
    return [f32_mul(b, factor) for b in x]
