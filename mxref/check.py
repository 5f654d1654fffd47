"""One-line checks of a quantizer that is no backend: of a function, and of arrays that a kernel wrote."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mxref.arguments import as_spec, check_integer
from mxref.arrays import described
from mxref.dialects import DIALECTS, Dialect
from mxref.errors import BackendError, DtypeError, RecipeError, ShapeError, UnsupportedError
from mxref.formats import INPUT_DTYPES, BlockFormat
from mxref.recipe import OperandSpec
from mxref.recipe_files import load_recipe
from mxref.roles import OPERANDS, GemmRole
from mxref.steps.hadamard import SignPolicy
from mxref.steps.random import Stream
from mxref.steps.rounding import Rounding
from mxref.tomlio import nearest

if TYPE_CHECKING:  # `import mxref` stays light
    from mxref.conformance.dump import Comparison
    from mxref.conformance.function import FunctionBackend
    from mxref.conformance.outcome import Report


def check_quantizer(
    function: Callable[[Any], Any],
    spec: OperandSpec | Dialect | str = "ocp",
    *,
    axis: int = -1,
    layout: str | Sequence[str] = (),
    device: str | None = None,
    dtypes: str | Sequence[str] = "float32",
    level: str = "quick",
    finite: bool = False,
    strided: bool = True,
    multiple: tuple[int, int] = (1, 1),
    stream: Stream | None = None,
    seed: int = 0,
    shrink: bool = True,
    recording: str | Path | None = None,
    facts: Mapping[str, str] | None = None,
) -> Report:
    """Hold a function to the specification of one treatment, with the requests of `mxref conform`.

    Args:
        function: of a matrix. It returns `(codes, scales)`, an MXArray, or the dequantized matrix, whose values
            are those of `mxref.dequantize`: without undoing a Hadamard transform or a prescale.
        spec: the treatment: a spec, a dialect or its name, or an operand of a recipe, as in `mxfp4_h16:wgrad.dy`.
        axis: the block axis of the matrix, -1 or 0.
        layout: how codes and scales are stored, by names of `mxref.layouts.foreign.LAYOUTS`.
        device: pass torch tensors on this device, as in `cpu` or `cuda`; default: NumPy arrays.
        dtypes: input types that the function takes.
        level: `quick`, or `full` for every exponent and more draws.
        finite: leave out blocks with NaN or Inf.
        strided: pass views of larger arrays too.
        multiple: rows and length along the block axis are multiples of these numbers.
        stream: the random stream whose bits the function draws, for SR and random signs.
        seed: of drawn values.
        shrink: whether the first failure of each clause is shrunk to the smallest block that fails.
        recording: a file to write, `.npz`: every matrix that the function was given, and the bytes of its answer.
            `mxref conform --replay` and the matrix of implementations read it, and compare the bytes themselves.
        facts: what a reader of this file should know, such as the name and version of the implementation. Versions of
            mxref, NumPy and torch, the platform and the device are added.

    Returns:
        A report, true if everything passed. `str` shows the failures, `require()` raises ConformanceError with them.

    Raises:
        RecipeError, ShapeError, DtypeError: an argument that does not fit.
        BackendError: a device that torch does not have here.
        FileFormatError: a recording that cannot be written.

    What the function raises, or returns instead of arrays that fit, breaks `conformance.protocol`; after the first
    call it ends the run. So do codes or scales that are right in another layout, which the failure names.
    """
    from mxref.capabilities import Capabilities
    from mxref.conformance import archive, examined
    from mxref.conformance.checking import Op, Plan
    from mxref.conformance.clauses import by_rank
    from mxref.conformance.function import FunctionBackend, Ways
    from mxref.conformance.outcome import Level, Report
    from mxref.conformance.replay import Recording, save_recording
    from mxref.layouts.foreign import layouts_of
    from mxref.placement import Placement
    from mxref.plan import plan_quantize

    if not callable(function):
        raise DtypeError(f"check_quantizer takes a function of a matrix, got {described(function)}")
    start = time.monotonic()
    treatment = named_spec(spec)
    made = treatment.format
    if not isinstance(made, BlockFormat):
        raise RecipeError(f"check_quantizer checks block formats, and {made} has no blocks")
    if not made.scale.powers:
        raise UnsupportedError(
            f"check_quantizer calls a function of a matrix alone, and under {made.title} its bits depend on the scale "
            "of the tensor too; make it a backend and run mxref conform, or compare the bytes of one matrix"
        )
    if level not in tuple(Level):
        raise RecipeError(f"unknown level {described(level)}; known: {', '.join(Level)}")
    random = treatment.rounding is Rounding.SR or treatment.signs is not SignPolicy.NONE
    if random and stream is None:
        raise RecipeError(
            "the treatment draws random bits: pass stream=mxref.Stream(seed, step, layer, operand), the stream "
            "that the function draws from"
        )
    types = (dtypes,) if isinstance(dtypes, str) else tuple(dtypes)
    if unknown := [name for name in types if name not in INPUT_DTYPES] or not types:
        raise DtypeError(f"dtypes = {unknown or types}: choose one or more of {', '.join(INPUT_DTYPES)}")
    rows, unit = _multiples(multiple, treatment, made)
    along = _matrix_axis(axis)
    # Refuses a random stream that is no operand's before the function is asked.
    plan_quantize((rows, unit), treatment, 1, Placement(stream))
    names = (layout,) if isinstance(layout, str) else tuple(layout)
    plan = Plan(Level(level), seed, treatment, types[0], Capabilities())
    ways = Ways(plan, along, layouts_of(names), device, stream, types, finite, strided, rows, unit)
    backend = FunctionBackend(function, ways, keep=recording is not None)
    _require_device(backend)
    if recording is not None:
        archive.check_name(recording)
    asked = list(ways.checks())
    results = examined(backend, asked[:1], shrink)
    if not any(result.failed for result in results.values()):  # else every check would fail alike
        results = examined(backend, asked, shrink)
    if recording is not None:
        reason = f"check_quantizer, level {level}, seed {seed}"
        known = _machine(device) | dict(facts or {})
        save_recording(recording, Recording(backend.name, backend.recorded, reason, known))
    return Report(
        backend.name, Level(level), seed, (Op.QUANTIZE.value,), tuple(results[c] for c in by_rank(results)),
        time.monotonic() - start, (made.name,),
    )  # fmt: skip


def compare(
    x: Any,
    codes: Any,
    scales: Any,
    spec: OperandSpec | Dialect | str = "ocp",
    *,
    axis: int = -1,
    layout: str | Sequence[str] = (),
    stream: Stream | None = None,
    pad: bool = False,
) -> Comparison:
    """Compare the codes and scales that a kernel wrote for an array with the reference's, byte by byte.

    Args:
        x: what was quantized: float32, bfloat16 or float16, any shape.
        codes: the kernel's codes, of any one-byte type.
        scales: its scales.
        spec: the treatment, as in `check_quantizer`.
        axis: the block axis of `x`.
        layout: how codes and scales are stored, by names of `mxref.layouts.foreign.LAYOUTS`; `any` tries them all.
        stream: the random stream, for SR and random signs.
        pad: whether the kernel fills the block axis up with zeros.

    Returns:
        What differs; true if nothing does. It names the first differing block, the clause that decides it, the
        `mxref explain` command that shows it, and layouts and treatments under which the bytes would be equal.

    Raises:
        ShapeError, DtypeError, RecipeError: arrays that do not fit together, or as `mxref.quantize`.
    """
    from mxref.conformance.dump import compare_arrays

    names = (layout,) if isinstance(layout, str) else tuple(layout)
    return compare_arrays(x, codes, scales, named_spec(spec), axis, names, stream, pad)


def named_spec(spec: OperandSpec | Dialect | str) -> OperandSpec:
    """Return a treatment: a spec, a dialect or its name, or an operand of a recipe, as `mxfp4_h16:wgrad.dy`.

    Raises:
        RecipeError: an unknown name.
    """
    if not isinstance(spec, str) or spec in DIALECTS or ":" not in spec:
        return as_spec(spec)
    name, _, operand = spec.rpartition(":")
    known = {
        f"{role.value}.{o.tensor}": (role, which)
        for role in GemmRole
        for which, o in enumerate(OPERANDS[role])
    }
    if operand not in known:
        raise RecipeError(
            f"unknown operand {operand!r}{nearest(operand, known)}; known: {', '.join(known)}, as in mxfp4_h16:wgrad.dy"
        )
    role, which = known[operand]
    return load_recipe(name).operands(role)[which]


def _require_device(backend: FunctionBackend) -> None:
    try:
        backend.from_numpy(np.zeros((1, 1), np.float32))
    except Exception as err:  # torch has an exception for each kind of device
        text = str(err).strip().partition("\n")[0] or type(err).__name__
        raise BackendError(
            f"device = {backend.ways.device!r} cannot hold a tensor here: {text}; name a device of this machine, as "
            "device='cpu', or leave it out for NumPy arrays"
        ) from err


def _machine(device: str | None) -> dict[str, str]:
    """Return what the answers of a function may depend on besides its own version."""
    facts = {"platform": platform.platform(), "numpy": np.__version__, "device": "cpu"}
    if device is not None:
        import torch

        facts |= {"torch": torch.__version__, "device": device}
        if torch.device(device).type == "cuda":
            facts["device"] = torch.cuda.get_device_name(device)
    return facts


def _matrix_axis(axis: int) -> int:
    found = check_integer("axis", axis)
    if not -2 <= found < 2:
        raise ShapeError(f"axis = {found}: the function is given matrices; take -1 (rows) or 0 (columns)")
    return found % 2


def _multiples(multiple: Any, spec: OperandSpec, made: BlockFormat) -> tuple[int, int]:
    """Return what rows and length are multiples of, blocks, tiles and Hadamard groups included."""
    try:
        rows, length = (check_integer("multiple", value) for value in multiple)
    except (TypeError, ValueError):
        raise ShapeError(
            f"multiple = {multiple!r} must be two integers: of rows, and of the length"
        ) from None
    if rows < 1 or length < 1:
        raise ShapeError(f"multiple = {multiple!r} must be positive: of rows, and of the length")
    tile = made.k if spec.block.is_tile else 1
    return math.lcm(rows, tile), math.lcm(length, made.k, spec.hadamard or 1)
