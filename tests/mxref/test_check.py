"""`mxref.check_quantizer`: one line that holds a function to a treatment, and the fault that it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mxref
from mxref import DIALECTS, OperandSpec, Stream, check_quantizer
from mxref.conformance.replay import load_recording, replay
from mxref.errors import (
    BackendError,
    ConformanceError,
    DtypeError,
    FileFormatError,
    RecipeError,
    ShapeError,
)
from mxref.layouts.packed import unpack

AMD = DIALECTS["amd"].spec
STREAM = Stream(5, step=2, layer=1, operand=4)
SPECS = {
    "amd": (AMD, {}), "ocp": (OperandSpec(), {}), "nvidia": (DIALECTS["nvidia"].spec, {}),
    "tseng": (DIALECTS["tseng"].spec, {"stream": STREAM}), "H16": (replace(AMD, hadamard=16), {}),
    "tiles": (OperandSpec(block="32x32"), {}), "mxfp8": (OperandSpec(format="mxfp8_e4m3", rounding="rna"), {}),
}  # fmt: skip


def quantizer(spec: Any, axis: int = -1, stream: Stream | None = None) -> Callable[[Any], Any]:
    def quantize(x: Any) -> Any:
        q = mxref.quantize(x, spec, axis=axis, placement=mxref.Placement(stream))
        return q.codes, q.scales

    return quantize


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("name", SPECS)
def test_a_right_function_passes(name: str, axis: int) -> None:
    spec, options = SPECS[name]
    function = quantizer(spec, axis, options.get("stream"))
    report = check_quantizer(function, spec, axis=axis, **options)
    assert report, str(report)
    report.require()
    assert report.failing == ()
    assert report.total("compared") > 1000
    assert str(report).startswith("quantize conforms (quick, seed 0)")


def test_the_full_level_asks_more() -> None:
    quick, full = (check_quantizer(quantizer("amd"), "amd", level=level) for level in ("quick", "full"))
    assert quick
    assert full
    assert full.total("compared") > 5 * quick.total("compared")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_function_may_return_the_dequantized_matrix(dtype: str) -> None:
    def fake(x: Any) -> Any:
        return mxref.dequantize(mxref.quantize(x, "amd"))

    assert check_quantizer(fake, "amd", dtypes=dtype)
    assert check_quantizer(lambda x: mxref.quantize(x, "amd"), "amd"), "an MXArray"


def changed(**fields: Any) -> Callable[[Any], Any]:
    return quantizer(replace(AMD, **fields))


def swapped(x: Any) -> Any:
    codes, scales = quantizer(AMD)(x)
    return codes << 4 | codes >> 4, scales


def scales_reversed(x: Any) -> Any:
    codes, scales = quantizer(AMD)(x)
    return codes, scales[:, ::-1]


def no_signed_zero(x: Any) -> Any:
    values = mxref.dequantize(mxref.quantize(x, AMD))
    return np.where(values == 0, np.float32(0), values)


def fake_away(x: Any) -> Any:
    return mxref.dequantize(mxref.quantize(x, replace(AMD, rounding="rna")))


def strides_ignored(x: Any) -> Any:
    if x.flags.c_contiguous:
        return quantizer(AMD)(x)
    return quantizer(AMD)(np.ascontiguousarray(x)[::-1])


FAULTS = {
    "ties away": (changed(rounding="rna"), "amd", "rounding.rne"),
    "truncates": (changed(rounding="rtz"), "amd", "rounding.rne"),
    "another rule": (changed(scale_rule="rceil"), "amd", "scale.rule.even"),
    "zero byte": (changed(zero_scale=0), "amd", "scale.zero"),
    "no prescale": (quantizer(OperandSpec()), OperandSpec(prescale=True), "rounding.prescale"),
    "swapped nibbles": (swapped, "amd", "packing.nibbles"),
    "scales backwards": (scales_reversed, "amd", "packing.scales"),
    "-0 becomes 0": (no_signed_zero, "amd", "rounding.sign"),
    "dequantized, ties away": (fake_away, "amd", "rounding.rne"),
    "another transform": (changed(hadamard=32), replace(AMD, hadamard=16), "hadamard.order"),
    "no transform": (changed(), replace(AMD, hadamard=16), "hadamard.order"),
    "rows for tiles": (quantizer(OperandSpec()), OperandSpec(block="32x32"), "scale.block.tile"),
    "strides": (strides_ignored, "amd", "quantize.strides"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_by_its_clause_and_shrunk(name: str) -> None:
    function, spec, clause = FAULTS[name]
    report = check_quantizer(function, spec)
    assert not report
    assert report.failing[0] == clause, report.failing
    failure = report.failures[0]
    assert failure.expected != failure.got
    text = str(report)
    assert "does not conform" in text
    assert f"\n{clause}: " in text
    with pytest.raises(ConformanceError, match=clause):
        report.require()
    if name == "ties away":
        assert sum(int(word, 16) != 0 for word in failure.inputs["x"]) == 1
        assert failure.command
        assert failure.command.startswith("mxref explain --scale-rule even")


def test_narrow_input_that_is_read_wrongly() -> None:
    def negated(x: Any) -> Any:
        wide = x.astype(np.float32)
        return quantizer(AMD)(-wide if x.dtype == ml_dtypes.bfloat16 else wide)

    report = check_quantizer(negated, "amd", dtypes=("float32", "bfloat16"))
    assert report.failing == ("conventions.inputs",)


def test_values_on_no_grid_and_exceptions_are_failures_with_words() -> None:
    report = check_quantizer(lambda x: x * np.float32(0.9), "amd", finite=True)
    assert "are not elements of MXFP4 times one power of two: element" in str(report)

    def broken(x: Any) -> Any:
        raise ValueError(f"no kernel for {x.shape}")

    report = check_quantizer(broken, "amd")
    assert not report
    assert "raised ValueError: no kernel for (3, 160)" in str(report)


def amd(x: Any) -> Any:
    return quantizer(AMD)(x)


NO_ANSWERS = {
    "None": (lambda x: None, "returned None (NoneType): return (codes, scales)"),
    "number": (lambda x: 3, "returned 3 (int)"),
    "three": (lambda x: (*amd(x), 0), "returned tuple: return (codes, scales)"),
    "pair of None": (lambda x: (None, None), "codes and scales must be arrays of bytes, got None"),
    "type": (lambda x: (amd(x)[0].astype(np.int32), amd(x)[1]), "codes and scales are bytes, got int32"),
    "shape": (lambda x: (amd(x)[0][:1], amd(x)[1]), "packed codes take 240 bytes here, got 80"),
    "transposed": (lambda x: (amd(x)[0], amd(x)[1].T), "got shape (5, 3); the layouts that fit are rows.T"),
    "values": (lambda x: x[:1], "returned float32 (1, 160): (codes, scales), or the dequantized matrix (3, 160)"),
    "error": (lambda x: 1 // 0, "raised ZeroDivisionError"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_ANSWERS)
def test_what_is_no_answer_breaks_the_protocol_at_the_first_call(name: str) -> None:
    answer, message = NO_ANSWERS[name]
    calls = []

    def function(x: Any) -> Any:
        calls.append(x.shape)
        return answer(x)

    report = check_quantizer(function, "amd")
    assert report.failing == ("conformance.protocol",), str(report)
    assert message in report.failures[0].message
    assert set(calls) == {(3, 160)}


def test_an_error_in_a_later_call_breaks_the_protocol_too() -> None:
    def function(x: Any) -> Any:
        return amd(x) if len(x) < 100 else None

    assert check_quantizer(function, "amd").failing == ("conformance.protocol",)


@pytest.mark.parametrize(
    ("part", "stored", "clause", "layout"),
    [
        (1, lambda s: s.T.reshape(-1), "packing.scales", "rows.T"),
        (0, lambda c: c << 4 | c >> 4, "packing.nibbles", "high_first"),
        (0, lambda c: c.T.reshape(-1), "packing.nibbles", "packed.T"),
    ],
)
def test_another_layout_is_named_as_compare_names_it(
    part: int, stored: Any, clause: str, layout: str
) -> None:
    def function(x: Any) -> Any:
        answer = list(amd(x))
        answer[part] = stored(answer[part])
        return answer

    report = check_quantizer(function, "amd")
    assert report.failing == (clause,)
    assert f"are equal under --layout {layout}" in report.failures[0].message


def test_a_device_that_is_not_there_is_an_error() -> None:
    torch = pytest.importorskip("torch")
    for device in ("quda", *(() if torch.cuda.is_available() else ("cuda",))):
        with pytest.raises(BackendError, match=f"device = '{device}' cannot hold a tensor here: "):
            check_quantizer(amd, "amd", device=device)


def test_what_a_kernel_cannot_take_is_left_out() -> None:
    def kernel(x: Any) -> Any:
        assert x.shape[0] % 16 == 0
        assert x.shape[1] % 128 == 0
        assert x.flags.c_contiguous
        assert np.isfinite(x.astype(np.float32)).all()
        return quantizer(AMD)(x)

    assert check_quantizer(kernel, "amd", multiple=(16, 128), strided=False, finite=True, dtypes="float16")


@pytest.mark.parametrize(
    ("layout", "stored"),
    [
        ("high_first", lambda c, s: (c << 4 | c >> 4, s)),
        ("unpacked", lambda c, s: (unpack(c, mxref.E2M1), s)),
        (("packed.T", "rows.T"), lambda c, s: (np.ascontiguousarray(c.T), np.ascontiguousarray(s.T))),
        ("exponents", lambda c, s: (c, (s.astype(np.int16) - 127).astype(np.int8))),
        (
            (),
            lambda c, s: (
                unpack(c, mxref.E2M1).view(ml_dtypes.float4_e2m1fn),
                s.view(ml_dtypes.float8_e8m0fnu),
            ),
        ),
    ],
)
def test_layouts_of_other_libraries(layout: Any, stored: Callable[[Any, Any], Any]) -> None:
    def function(x: Any) -> Any:
        return stored(*quantizer(AMD)(x))

    names = layout or "unpacked"  # ml_dtypes keeps an element per byte
    assert check_quantizer(function, "amd", layout=names, finite=True), str(
        check_quantizer(function, layout=names)
    )
    if layout:
        assert not check_quantizer(function, "amd", finite=True)


def test_an_operand_of_a_recipe_by_name() -> None:
    pytest.importorskip("mxref_training")
    spec = mxref.load_recipe("mxfp4_h16").wgrad.dy
    assert spec.hadamard == 16
    assert check_quantizer(quantizer(spec), "mxfp4_h16:wgrad.dy")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"spec": "amdd"}, RecipeError, "unknown dialect 'amdd'"),
        ({"spec": "mxfp4_h16:wgrad.w"}, RecipeError, "unknown operand 'wgrad.w'"),
        ({"spec": OperandSpec(format="bf16")}, RecipeError, "has no blocks"),
        ({"spec": "tseng"}, RecipeError, "pass stream="),
        ({"spec": "tseng", "stream": Stream(1, operand=7)}, RecipeError, "operand = 7"),
        ({"layout": "low_first"}, RecipeError, "unknown layout 'low_first'; known: packed"),
        ({"layout": ("packed", "high_first")}, RecipeError, "are both of codes"),
        ({"level": "thorough"}, RecipeError, "unknown level 'thorough'; known: quick, full"),
        ({"dtypes": "float64"}, DtypeError, "float64"),
        ({"dtypes": ()}, DtypeError, "choose one or more of float32"),
        ({"axis": 2}, ShapeError, "axis = 2"),
        ({"multiple": (0, 32)}, ShapeError, "must be positive"),
        ({"multiple": 3}, ShapeError, "two integers"),
    ],
)
def test_arguments_that_do_not_fit(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_quantizer(quantizer("amd"), **options)
    with pytest.raises(DtypeError, match="takes a function"):
        check_quantizer(3, "amd")  # type: ignore[arg-type]


def test_tensors() -> None:
    torch = pytest.importorskip("torch")

    def function(x: Any) -> Any:
        assert isinstance(x, torch.Tensor)
        q = mxref.quantize(x, "amd")
        return torch.from_numpy(q.codes), torch.from_numpy(q.scales).view(torch.float8_e8m0fnu)

    report = check_quantizer(function, "amd", device="cpu", dtypes=("float32", "bfloat16"))
    assert report, str(report)


def test_a_recording_holds_what_was_asked_and_answered_and_no_verdict(tmp_path: Path) -> None:
    file = tmp_path / "mine.npz"
    function = changed(rounding="rna")
    report = check_quantizer(function, "amd", recording=file, facts={"kernel": "1.2"})
    recording = load_recording(file)
    assert recording.backend == "quantize"
    assert recording.facts["kernel"] == "1.2"
    assert {"device", "numpy", "platform"} <= {*recording.facts}
    failures = [call.failure for call in recording.calls if call.failure]
    assert {failure.clause for failure in failures} == {"rounding.rne"} == {*report.failing}
    for call in recording.calls:
        codes, scales = function(call.request.x)
        assert np.array_equal(call.codes, codes)
        assert np.array_equal(call.scales, scales)
    held = {
        row.tobytes() for call in recording.calls for row in call.request.x if call.request.x.shape[1] == 32
    }
    words = np.array([int(word, 16) for word in report.failures[0].inputs["x"]], np.uint32)
    assert words.tobytes() in held, "the shrunk block is in the file"
    assert not replay(file, "reference").ok
    assert not any(call.answered for call in replay(file, "reference").calls)


@pytest.mark.parametrize("name", SPECS)
def test_a_recording_of_a_right_function_is_right(name: str, tmp_path: Path) -> None:
    spec, options = SPECS[name]
    for axis in (0, -1):
        file = tmp_path / f"{axis}.npz"
        function = quantizer(spec, axis, options.get("stream"))
        assert check_quantizer(function, spec, axis=axis, recording=file, **options)
        recording = load_recording(file)
        assert sum(call.scales.size for call in recording.calls) > 300
        assert not any(call.failure for call in recording.calls)


def test_a_recording_keeps_the_input_that_a_function_overwrites(tmp_path: Path) -> None:
    def overwrites(x: Any) -> Any:
        codes, scales = quantizer("amd")(x)
        x[:] = 0
        return codes, scales

    check_quantizer(overwrites, "amd", shrink=False, strided=False, recording=tmp_path / "mine.npz")
    recording = load_recording(tmp_path / "mine.npz")
    assert not any(call.failure for call in recording.calls)


def test_a_recording_that_cannot_be_written_is_refused_before_the_function_is_called(tmp_path: Path) -> None:
    def never(x: Any) -> Any:
        raise AssertionError("called")

    for path in (tmp_path / "mine.bin", tmp_path / "no" / "mine.npz"):
        with pytest.raises(FileFormatError):
            check_quantizer(never, "amd", recording=path)
