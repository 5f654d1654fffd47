"""Random bits: Random123's known answers, the counter layout, and the range checks."""

import numpy as np
import pytest

from mxref.errors import RecipeError
from mxref.steps.random import Stream, philox4x32, random_integers
from oracle import random as oracle_random

KNOWN_ANSWERS = [  # Random123, kat_vectors: philox4x32, 10 rounds
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.clause("random.philox", evidence="known answer")
@pytest.mark.parametrize(("counter", "key", "want"), KNOWN_ANSWERS)
def test_known_answers(counter, key, want):
    assert tuple(philox4x32(np.array(counter, np.uint32), key).tolist()) == want


@pytest.mark.clause("random.philox", "random.counter", "random.elements")
@pytest.mark.parametrize("bits", [1, 8, 15, 16, 17, 22])
def test_integers_match_the_oracle(bits):
    stream = Stream(0xDEADBEEF12345678, step=0xFFFFFFFE, layer=0xABCDEF, operand=4)
    rows = np.array([0, 3, 2**33 + 1])
    length, first, count = 96, 32, 64
    got = random_integers(rows, first, count, length, stream, bits)
    where = (stream.seed, stream.step, stream.layer, stream.operand)
    want = [
        [oracle_random.sr_integer(*where, r * length + c, bits) for c in range(first, first + count)]
        for r in rows.tolist()
    ]
    assert got.tolist() == want


@pytest.mark.clause("random.stream", evidence="known answer")
def test_the_stream_word_is_a_layout():
    assert Stream(0, step=1, layer=2, operand=3).word == 1 << 32 | 2 << 8 | 3
    assert [Stream(0, operand=i).role for i in range(9)] == [0, 0, 1, 1, 2, 2, 0, 1, 2]


@pytest.mark.clause("random.range", evidence="known answer")
@pytest.mark.parametrize(
    ("field", "value"),
    [("seed", -1), ("seed", 1 << 64), ("step", 1 << 32), ("layer", 1 << 24), ("layer", -1), ("operand", 9)],
)
def test_fields_are_range_checked(field, value):
    with pytest.raises(RecipeError, match=f"{field} = {value} is outside"):
        Stream(**{"seed": 0, field: value})


@pytest.mark.clause("random.range", evidence="known answer")
@pytest.mark.parametrize("bits", [0, 23])
def test_bits_out_of_range(bits):
    with pytest.raises(RecipeError, match="outside 1 .. 22"):
        random_integers(np.zeros(1, np.int64), 0, 32, 32, Stream(0), bits)
