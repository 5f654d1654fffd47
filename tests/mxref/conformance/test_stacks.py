"""Operands of two stacks: the first bytes that differ, with layer, GEMM, operand, block and the treatment of each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mxref
from conform_command import run
from mxref.conformance.stacks import Stack, StackOperand, compare_stacks, load_stack, save_stack
from mxref.errors import FileFormatError, ShapeError

LAYERS = {"model.up": (48, 64), "model.down": (16, 96)}


def numbers(layer: str, tensor: str) -> Any:
    rows, length = LAYERS[layer]
    g = np.random.default_rng([len(layer), len(tensor), ord(tensor[0])])
    return (g.standard_normal((rows, length)) * 3).astype(ml_dtypes.bfloat16)


def operand(layer: str, tensor: str, spec: Any = "amd", gemm: str = "fprop", **fields: Any) -> StackOperand:
    x = numbers(layer, tensor)
    axis = 0 if gemm == "wgrad" else 1
    array = None if spec is None else mxref.quantize(x, spec, axis=axis, pad=True)
    return replace(StackOperand(layer, gemm, tensor, 0, x, array), **fields)


def stack(spec: Any = "amd", name: str = "ours", **changed: StackOperand) -> Stack:
    operands = [operand(layer, tensor, spec) for layer in LAYERS for tensor in "xw"]
    return Stack(name, tuple(changed.get(f"{o.layer.partition('.')[2]}_{o.tensor}", o) for o in operands))


@pytest.mark.parametrize("spec", ["amd", "te_nvfp4", None, mxref.OperandSpec(hadamard=16)], ids=str)
def test_a_file_holds_every_byte(spec: Any, tmp_path: Path) -> None:
    wgrad = operand(
        "model.up", "dy", spec, gemm="wgrad", call=3, source=None if spec else numbers("model.up", "dy")
    )
    held = Stack("ours", (*stack(spec).operands, wgrad), {"torch": "2.13"})
    save_stack(tmp_path / "a.npz", held)
    read = load_stack(tmp_path / "a.npz")
    assert (read.name, read.facts) == (held.name, held.facts)
    for one, other in zip(read.operands, held.operands, strict=True):
        assert one.key == other.key
        assert one.array == other.array
        assert (one.source is None) == (other.source is None)
        if one.source is not None and other.source is not None:
            assert one.source.dtype == other.source.dtype
            np.testing.assert_array_equal(one.source, other.source)
    report = compare_stacks(read, held)
    assert report.ok
    assert "equal: 5 operands" in str(report)


def test_the_first_difference_is_named_with_both_treatments() -> None:
    report = compare_stacks(stack("amd"), stack("nvidia", "theirs"))
    assert not report
    text = str(report)
    first = next(pair for pair in report.pairs if not pair.ok)
    (a, a_codes), (b, b_codes) = (
        (np.asarray(q.scales), np.asarray(q.codes)) for q in (first.a.array, first.b.array) if q
    )
    wrong = (a != b) | (a_codes != b_codes).reshape(*a.shape, 16).any(-1)
    row, block = np.argwhere(wrong)[0]
    assert (
        f"first difference: {first.a.title}\n  block {block} of row {row}:\n    a  scale {a[row, block]:02x}"
        in text
    )
    assert "  the numbers before quantization are equal\n  a: all bytes are those of the dialect amd" in text
    assert "  b: all bytes are those of the dialect nvidia" in text
    assert f"{first.a.title}: {int(wrong.sum())} of {wrong.size} blocks" in text


def test_one_code_is_enough() -> None:
    wrong = operand("model.down", "w")
    assert wrong.array is not None
    codes = wrong.array.codes.copy()
    codes[7, 35] ^= 0x40
    changed = replace(wrong, array=replace(wrong.array, codes=codes))
    report = compare_stacks(stack(), stack(down_w=changed))
    assert "first difference: layer model.down, fprop w\n  block 2 of row 7:" in str(report)
    assert "  b: no known treatment" in str(report)
    assert "1 of 4 operands differ:" in str(report)


def test_one_scale_is_enough_of_a_block_or_of_the_tensor() -> None:
    wrong = operand("model.down", "w", "te_nvfp4")
    assert wrong.array is not None
    scales = wrong.array.scales.copy()
    scales[7, 3] ^= 1
    of_block = replace(wrong, array=replace(wrong.array, scales=scales))
    text = str(compare_stacks(stack("te_nvfp4"), stack("te_nvfp4", down_w=of_block)))
    assert "first difference: layer model.down, fprop w\n  block 3 of row 7:" in text
    assert "1 of 4 operands differ:\n  layer model.down, fprop w: 1 of 96 blocks" in text
    of_tensor = replace(wrong, array=replace(wrong.array, tensor_scale=wrong.array.tensor_scale * 2))
    text = str(compare_stacks(stack("te_nvfp4"), stack("te_nvfp4", down_w=of_tensor)))
    assert "first difference: layer model.down, fprop w\n  the scale of the tensor is " in text


def test_numbers_that_differ_before_quantization_are_said_to() -> None:
    x = numbers("model.down", "x")
    x[5, 11] = 100
    changed = replace(operand("model.down", "x"), source=x, array=mxref.quantize(x, "amd"))
    text = str(compare_stacks(stack(), stack(down_x=changed)))
    assert (
        "first difference: layer model.down, fprop x\n  the numbers before quantization differ, 1 of 1,536; the first"
        in text
    )
    assert "at [5, 11]:" in text
    assert "100.0 in b" in text
    assert "  b: all bytes are those of the dialect amd" in text


def test_a_side_without_numbers_is_asked_about_those_of_the_other() -> None:
    theirs = operand("model.up", "w", "nvidia", source=None)
    text = str(compare_stacks(stack(), stack(up_w=theirs)))
    assert "  only a has the numbers before quantization\n" in text
    assert "  b: all bytes are those of the dialect nvidia" in text


def test_a_threshold_and_a_scale_of_the_tensor_are_recognised() -> None:
    spec = mxref.OperandSpec(mxref.MXFP8_E4M3, scale_rule=mxref.ScaleRule(">=1.75"))
    x = numbers("model.up", "x")
    x[3, 40] = 448  # 1.75 * 2^8, which RCEIL keeps in the lower binade
    one, other = (
        operand("model.up", "x", source=x, array=mxref.quantize(x, each)) for each in ("te_mxfp8", spec)
    )
    text = str(compare_stacks(stack(up_x=one), stack(up_x=other)))
    assert "b: all bytes are those of scale_rule = >=1.75" in text
    x = numbers("model.up", "x")
    x = numbers("model.up", "x")
    larger = mxref.quantize(x, "te_nvfp4", placement=mxref.Placement(amax=np.float32([96])))
    report = compare_stacks(stack("te_nvfp4"), stack("te_nvfp4", up_x=operand("model.up", "x", array=larger)))
    assert "the scale of the tensor is" in str(report)
    assert "  b: all bytes are those of the dialect te_nvfp4" in str(report)


def test_formats_and_operands_that_only_one_has() -> None:
    text = str(compare_stacks(stack(), stack(None)))
    assert "  a is MXFP4, b is bfloat16" in text
    assert "  layer model.up, fprop x: MXFP4 and bfloat16" in text
    whole = stack()
    fewer = compare_stacks(whole, Stack("b", whole.operands[1:]))
    assert not fewer
    assert "only a has 1 more operands, the first of layer model.up, fprop x" in str(fewer)
    trained = Stack("b", (*whole.operands, operand("model.up", "dy", gemm="wgrad")))
    assert compare_stacks(whole, trained)
    assert "only b recorded wgrad, which has no counterpart" in str(compare_stacks(whole, trained))
    with pytest.raises(
        ShapeError, match="no operand in common: a begins with layer model.up, fprop x, b with layer other"
    ):
        compare_stacks(whole, Stack("b", (replace(whole.operands[0], layer="other"),)))
    with pytest.raises(ShapeError, match=r"has the shape \(48, 64\) in a and \(16, 96\) in b"):
        compare_stacks(whole, stack(up_x=replace(operand("model.down", "x"), layer="model.up")))


def test_the_command_compares_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_stack("a.npz", stack())
    save_stack("b.npz", stack("nvidia", "theirs"))
    same = run("compare", "a.npz", "a.npz")
    assert (same.exit_code, "equal: 4 operands" in same.output) == (0, True)
    other = run("compare", "a.npz", "b.npz")
    assert (other.exit_code, "first difference: layer model.up" in other.output) == (1, True)
    np.savez("x.npz", x=np.zeros(3))
    for words, message in (
        (("a.npz", "b.npz", "--dialect", "amd", "--pad"), "without options: leave out spec, pad"),
        (("a.npz", "x.npz"), "cannot read operands from x.npz"),
        (("a.npz", "no.npz"), "cannot read operands from no.npz: No such file or directory"),
    ):
        refused = run("compare", *words, width=200)
        assert refused.exit_code == 2, refused.output
        assert message in " ".join(refused.output.split())
    with pytest.raises(FileFormatError, match="must end in .npz"):
        save_stack("a.safetensors", stack())
