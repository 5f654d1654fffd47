"""The oracle's random bits, signs and Hadamard against published vectors, memory layouts and matrices."""

import numpy as np
import pytest
from numpy.typing import NDArray

import oracle
from oracle.random import SignPolicy, hadamard, inverse_sqrt_f32, philox4x32_10, sign_vector, sr_integer

NAN = oracle.NAN32


def f32(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def same(a: int, b: int) -> bool:
    """Equal bits, or both NaN."""
    return a == b or (a & 0x7FFFFFFF > oracle.INF32 and b & 0x7FFFFFFF > oracle.INF32)


@pytest.mark.parametrize(
    ("counter", "key", "words"),  # Random123, kat_vectors, philox4x32 of 10 rounds
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers(counter: str, key: str, words: str) -> None:
    c, k, expected = ([int(word, 16) for word in text.split()] for text in (counter, key, words))
    assert philox4x32_10(c, k) == expected


SEED, STEP, LAYER, OPERAND = 0x0123456789ABCDEF, 0x01020304, 0xABCDEF, 0x42


def little_endian_words(g: int, step: int = STEP, layer: int = LAYER) -> NDArray[np.uint32]:
    """Call g as laid out in memory: counter, then key, from little-endian bytes of each field."""
    counter = (
        g.to_bytes(8, "little") + bytes([OPERAND]) + layer.to_bytes(3, "little") + step.to_bytes(4, "little")
    )
    words = np.frombuffer(counter + SEED.to_bytes(8, "little"), "<u4").tolist()
    return np.array(philox4x32_10(words[:4], words[4:]), "<u4")


@pytest.mark.parametrize("R", [1, 8, 15, 16])
def test_up_to_16_bits_come_as_halves(R: int) -> None:
    for g in (0, 1, 12345, 2**33):
        halves = little_endian_words(g).view("<u2")
        got = [sr_integer(SEED, STEP, LAYER, OPERAND, 8 * g + j, R) for j in range(8)]
        assert got == (halves >> (16 - R)).tolist()


@pytest.mark.parametrize("R", [17, 22])
def test_more_than_16_bits_come_as_words(R: int) -> None:
    for g in (0, 1, 12345, 2**33):
        got = [sr_integer(SEED, STEP, LAYER, OPERAND, 4 * g + j, R) for j in range(4)]
        assert got == (little_endian_words(g) >> (32 - R)).tolist()


@pytest.mark.parametrize(
    ("seed", "step", "layer", "operand", "R"),
    [(2**64, 0, 0, 0, 16), (0, 2**32, 0, 0, 16), (0, 0, 2**24, 0, 16), (0, 0, 0, 256, 16), (0, 0, 0, 0, 23)],
)
def test_fields_out_of_range(seed: int, step: int, layer: int, operand: int, R: int) -> None:
    with pytest.raises(ValueError, match=r"does not fit|outside"):
        sr_integer(seed, step, layer, operand, 0, R)


@pytest.mark.parametrize(
    ("policy", "step", "layer"), [("fixed", 0, 0), ("per_step", STEP, 0), ("per_step_layer", STEP, LAYER)]
)
def test_signs_are_the_streams_bits(policy: SignPolicy, step: int, layer: int) -> None:
    calls = np.concatenate([little_endian_words(g, step, layer) for g in (0, 1)])
    bits = np.unpackbits(calls.view(np.uint8), bitorder="little")
    for n in (2, 16, 64, 256):
        expected = (1 - 2 * bits[:n].astype(int)).tolist()
        assert sign_vector(n, SEED, STEP, LAYER, OPERAND, policy) == expected
    assert sign_vector(64, SEED, STEP, LAYER, OPERAND, "none") == [1] * 64


def sylvester(n: int) -> NDArray[np.float64]:
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32, 64, 128, 256])
def test_hadamard_is_the_sylvester_matrix(n: int) -> None:
    assert inverse_sqrt_f32(n) == f32(float(np.float64(1) / np.sqrt(np.float64(n))))
    rng = np.random.default_rng(n)
    x, signs = rng.integers(-99, 100, n), rng.choice([-1, 1], n)  # sums of small integers are exact
    factor = np.uint32(inverse_sqrt_f32(n)).view(np.float32)
    expected = (sylvester(n) @ (x * signs)).astype(np.float32) * factor
    got = hadamard(x.astype(np.float32).view(np.uint32).tolist(), signs.tolist())
    assert np.array_equal(np.array(got, np.uint32).view(np.float32), expected)


def butterfly(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The same order of additions told the other way round: halves first, then their sum and difference."""
    if len(x) == 1:
        return x
    low, high = butterfly(x[: len(x) // 2]), butterfly(x[len(x) // 2 :])
    return np.concatenate([low + high, low - high])


@pytest.mark.parametrize("n", [16, 32, 64])
def test_hadamard_rounds_every_step_in_float32(n: int) -> None:
    rng = np.random.default_rng(9)
    for exponent in (-140, -20, 0, 100, 124):
        with np.errstate(all="ignore"):
            x = np.ldexp(rng.standard_normal(n), exponent + rng.integers(-9, 10, n)).astype(np.float32)
            expected = butterfly(x) * np.uint32(inverse_sqrt_f32(n)).view(np.float32)
        got = hadamard(x.view(np.uint32).tolist(), [1] * n)
        assert all(map(same, got, expected.view(np.uint32).tolist()))


def test_hadamard_keeps_overflow_and_spreads_nan() -> None:
    large = f32(2.0**127)
    # First step (0, Inf, 0, Inf), second (0 + 0, Inf + Inf, 0 - 0, Inf - Inf).
    assert hadamard([large] * 4, [1, -1, 1, -1]) == [0, oracle.INF32, 0, NAN]
    assert hadamard([f32(1.0), NAN, 0, 0], [1] * 4) == [NAN] * 4
