"""Operations of floats on bits give what NumPy, ml_dtypes and the solver give."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from prove import floats, ptx
from prove.terms import Term, apply, const, evaluate, var

X, Y = var("x", 32), var("y", 32)


def numbers(seed=0):
    """Bits of float32: at random, near every exponent, and those of bfloat16 and of 8 bits with their neighbours."""
    random = np.random.default_rng(seed)
    grid = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32).view(np.uint32)
    ties = np.arange(0x3A00_0000, 0x4400_0000, 1 << 18, dtype=np.uint32)  # E4M3 has 3 bits of mantissa
    near = np.concatenate([grid, ties, np.arange(0, 1 << 32, 1 << 22, dtype=np.uint64).astype(np.uint32)])
    near = (near[:, None].astype(np.int64) + np.arange(-2, 3)).ravel() & 0xFFFFFFFF
    return np.concatenate([near, random.integers(0, 1 << 32, 100_000)]).astype(np.uint32)


@pytest.mark.parametrize(("name", "dtype"), [("f8E4M3FN", "float8_e4m3fn"), ("f8E5M2", "float8_e5m2")])
def test_floats_of_8_bits(name, dtype):
    bits = numbers()
    x = bits.view(np.float32)
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    (found,) = evaluate([floats.to_float8(X, name)], {"x": bits})
    with np.errstate(invalid="ignore"):
        right = np.clip(x, -largest, largest).astype(dtype).view(np.uint8)
    finite = ~np.isnan(x)
    assert (found[finite] == right[finite]).all()
    assert (found[~finite] & 0x7F == 0x7F).all()


def test_bfloat16():
    bits = numbers()
    (found,) = evaluate([floats.narrowed(X)], {"x": bits})
    x = bits.view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        right = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    assert (found[~np.isnan(x)] == right[~np.isnan(x)]).all()
    assert np.isnan((found[np.isnan(x)].astype(np.uint32) << 16).view(np.float32)).all()


def test_comparisons_and_clamps():
    x, y = numbers(1), np.random.default_rng(2).permutation(numbers(1))
    y[::3], y[1::7] = x[::3], x[1::7] ^ np.uint32(1 << 31)
    a, b = x.view(np.float32), y.view(np.float32)
    nan = np.isnan(a) | np.isnan(b)
    with np.errstate(invalid="ignore"):
        right = {"eq": a == b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b, "ne": a != b}
    for name, truth in right.items():
        ordered, free = evaluate([floats.compared(p + name, X, Y) for p in "ou"], {"x": x, "y": y})
        assert (ordered == (truth & ~nan)).all(), name
        assert (free == (truth | nan)).all(), name
    low, high = (const(int(np.float32(v).view(np.uint32)), 32) for v in (-127, 127))
    (found,) = evaluate([floats.clamped(X, low, high)], {"x": x})
    right = np.where(np.isnan(a), np.float32(-127), np.clip(a, -127, 127))
    assert (found.astype(np.uint32).view(np.float32) == right).all()


def test_powers_of_two():
    e = np.arange(256)
    (found,) = evaluate([floats.log2_of_power(X)], {"x": e << 23})
    right = [-np.inf, *range(-126, 128), np.inf]
    assert found.astype(np.uint32).view(np.float32).tolist() == right
    whole = np.arange(-127, 128).astype(np.float32)
    (found,) = evaluate(
        [floats.exp2_of_whole(X)], {"x": whole.view(np.uint32)} | _any(floats.exp2_of_whole(X))
    )
    assert found.astype(np.uint32).view(np.float32).tolist() == [2.0 ** int(i) for i in whole]


def _any(term):
    from prove.terms import variables

    return {v.value: 1 for v in variables(term) if v.value != "x"}


def test_powers_above():
    """cvt.rp.satfinite.ue8m0x2.f32, for numbers that are not negative."""
    cast = ptx.MEANING["cvt.rp.satfinite.ue8m0x2.f32 $0, 0.0, $1;"]
    bits = numbers() & 0x7FFFFFFF
    (found,) = evaluate([cast(X)], {"x": bits})
    with np.errstate(invalid="ignore"):
        x = bits.view(np.float32).astype(np.float64)
    finite = np.isfinite(x)
    powers = 2.0 ** (np.minimum(found, 254).astype(np.float64) - 127)
    assert (found[np.isnan(x)] == 255).all()
    assert (found[np.isinf(x)] == 254).all()
    inside = finite & (x <= 2.0**127)
    assert (powers[inside] >= x[inside]).all()
    assert ((powers[inside] / 2 < x[inside]) | (found[inside] == 0)).all()
    assert (found[finite & ~inside] == 254).all()


def test_the_solver_agrees_on_quotients_and_whole_numbers():
    ask = pytest.importorskip("prove.solver", reason="bitwuzla is not installed").ask
    random = np.random.default_rng(4)
    bits = [int(b) for b in random.choice(numbers(), 12)] + [0x40C00000, 0x00000004, 0x7F7FFFFF, 0x3F800000]
    for x in bits:
        for y in (0x40C00000, 0x43E00000, 0x47600000, 0x00400000, int(random.integers(1 << 32))):
            quotient = apply("fdiv", X, Y)
            value = int(np.asarray(evaluate([quotient], {"x": x, "y": y})[0]).ravel()[0])
            goal = quotient.equal(value)
            if value & 0x7FFFFFFF > 0x7F800000:
                goal = const(0x7F800000, 32).below(quotient & 0x7FFFFFFF)
            assert ask(goal, [X.equal(x), Y.equal(y)]).holds, (hex(x), hex(y))
    for width in (16, 32):
        term = Term("itof", width, (X,))
        for x in (0, 1, 5, 255, 257, 385, (1 << 24) + 1, (1 << 32) - 127, 1 << 31):
            value = int(np.asarray(evaluate([term], {"x": x})[0]).ravel()[0])
            assert ask(term.equal(value), [X.equal(x)]).holds, (width, x)
    term = Term("ftou", 8, (X,))
    for number in (0.0, 0.5, 1.0, 127.99, 255.0):
        x = int(np.float32(number).view(np.uint32))
        value = int(np.asarray(evaluate([term], {"x": x})[0]).ravel()[0])
        assert ask(term.equal(value), [X.equal(x)]).holds, number
    below = int(np.float32(-1).view(np.uint32))
    assert not any(ask(term.equal(value), [X.equal(below)]).holds for value in (0, 255))  # it has no value
