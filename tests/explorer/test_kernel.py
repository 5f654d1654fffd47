"""The bytes of a kernel on the explorer page: how they are read, and which step is said to differ first."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from explorer.page_backend import Engine, script
from mxref import DIALECTS, OperandSpec
from mxref.explain import explain_block, explorer_link

AMD = DIALECTS["amd"].spec
SCRIPTS = ("orders.js", "mx.js", "link.js", "numbers.js", "explain.js", "kernel.js")
FOUND = """((address, scale, packed) => {
  const state = link.read(address);
  const block = explain.block(state, state.a);
  const theirs = { scale, packed: packed && Uint8Array.from(packed) };
  const { step, order, under, codes } = kernel.difference(block, theirs, state);
  const ways = step ? kernel.explanations(state, state.a, theirs).map(([key, value]) => `${key}=${value}`) : [];
  return { step, order, under, wrong: codes.filter(Boolean).length, ways };
})"""


@cache
def page() -> Engine:
    return Engine(*map(script, SCRIPTS))


def found(x: Any, spec: Any, scale: int | None, packed: bytes | None) -> dict[str, Any]:
    address = explorer_link(np.float32(x), spec, pad=True).partition("#")[2]
    return dict(page().call(FOUND, address, scale, None if packed is None else list(packed)))


def drawn() -> np.ndarray:
    x = np.random.default_rng(3).standard_normal(32).astype(np.float32)
    x[:4] = 5, -5, 3.5, 7.75
    return x


@pytest.mark.parametrize(
    ("kernel", "step", "way"),
    [
        (AMD, None, None),
        (replace(AMD, rounding="rtz"), "elements", "rounding=rtz"),
        (replace(AMD, rounding="rna"), "elements", "rounding=rna"),
        (replace(AMD, scale_rule="floor"), "scale", "scale_rule=floor"),
        (replace(AMD, hadamard=16), "scale", "hadamard=16"),
        (replace(AMD, prescale=True), "elements", "prescale=true"),
    ],
)
def test_the_step_and_the_choice_that_differ(kernel: OperandSpec, step: str | None, way: str | None) -> None:
    x = drawn()
    block = explain_block(x, kernel)
    shown = found(x, AMD, block.scale.byte, block.packed)
    if way and way.startswith("hadamard"):
        step = shown["step"]  # the transform may leave the scale as it is
    assert shown["step"] == step
    assert shown["ways"] == ([way] if way else [])
    if step != "scale":
        right = explain_block(x, AMD).packed
        assert (shown["wrong"] > 0) == (block.packed != right)


def test_codes_are_also_held_against_the_kernels_own_scale() -> None:
    x = drawn()
    block = explain_block(x, replace(AMD, scale_rule="floor"))
    assert found(x, AMD, block.scale.byte, block.packed)["under"] == 0
    wrong = bytearray(block.packed)
    wrong[3] ^= 0x10
    wrong[9] ^= 0x01
    assert found(x, AMD, block.scale.byte, bytes(wrong))["under"] == 2


def test_the_order_of_nibbles_is_a_step_of_its_own() -> None:
    x = drawn()
    block = explain_block(x, AMD)
    codes = [nibble for byte in block.packed for nibble in (byte & 15, byte >> 4)]
    swapped = bytes(low << 4 | high for low, high in zip(codes[::2], codes[1::2], strict=True))
    halves = bytes(codes[j] | codes[j + 16] << 4 for j in range(16))
    for packed, order in ((swapped, "high_first"), (halves, "halves")):
        shown = found(x, AMD, block.scale.byte, packed)
        assert (shown["step"], shown["order"]) == ("memory", order)


def test_either_part_alone_is_compared() -> None:
    x = drawn()
    block = explain_block(x, AMD)
    assert found(x, AMD, block.scale.byte, None)["step"] is None
    assert found(x, AMD, None, block.packed)["step"] is None
    assert found(x, AMD, block.scale.byte + 1, None)["step"] == "scale"
    assert found(x, AMD, None, bytes(16))["step"] == "elements"


@pytest.mark.parametrize(
    ("text", "notation", "expected"),
    [
        ("7e 0x12 a0b1", "hex", [0x7E, 0x12, 0xA0, 0xB1]),
        ("tensor([ 18, 255,\n  -1], dtype=torch.uint8)", "decimal", [18, 255, 255]),
        ("array([1, 2], dtype=uint8)", "decimal", [1, 2]),
        ("", "hex", []),
        ("256", "decimal", "256 is no byte from -128 to 255"),
        ("123", "hex", "123 is not made of bytes of two hexadecimal digits"),
    ],
)
def test_pasted_bytes_are_read(text: str, notation: str, expected: Any) -> None:
    call = """((text, notation) => {
      try { return Array.from(kernel.parseBytes(text, notation)); } catch (error) { return error.message; }
    })"""
    got = page().call(call, text, notation)
    assert got == expected or (isinstance(expected, str) and got.startswith(expected))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_numbers_of_files_are_read_bit_by_bit(dtype: Any) -> None:
    import io

    if dtype is np.float32:
        x = np.array([0, -0.0, 1e-45, 1.5, -np.inf, 3.4e38], dtype)
    else:
        x = np.arange(0, 1 << 16, dtype=np.uint16).view(dtype)
        x = x[~np.isnan(x.astype(np.float32))]
    buffer = io.BytesIO()
    np.save(buffer, x)
    call = """((bytes) => Array.from(kernel.readNpy(Uint8Array.from(bytes).buffer, "x.npy").words))"""
    engine = Engine(
        "var TextDecoder = class { decode(bytes) { return String.fromCharCode(...bytes); } };",
        *map(script, SCRIPTS),
    )
    words = np.array(engine.call(call, list(buffer.getvalue())), np.uint32)
    np.testing.assert_array_equal(words, x.astype(np.float32).view(np.uint32))
