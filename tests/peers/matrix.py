"""Clause by implementation: which clauses the bytes of each implementation keep, and the smallest block of each breach.

`python -m peers.matrix` asks what is installed and writes docs/records/matrix_DATE.json. With --microxcaling and
--transformer-engine, each a checkout, it asks what the package index does not have for a CPU too. With --add FILE it
only adds a recording of another machine, which `mxref.check_quantizer` wrote there. These are kept in
docs/records/machines, and are judged from their bytes on every run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ml_dtypes
import numpy as np

from bench.machine import processor
from bench.records import RECORDS, newest, read
from mxref import DIALECTS, OperandSpec, check_quantizer, dequantize, quantize
from mxref._version import SPECIFICATION
from mxref.conformance.blame import Search, fewest_elements
from mxref.conformance.function import codes_of_values
from mxref.conformance.replay import Call, RecordedQuantization, load_recording
from mxref.conformance.requests.crafted import NAN_PAYLOADS, crafted_tensors
from mxref.conformance.requests.quantizing import MalformedAnswer, Request
from mxref.errors import FileFormatError
from mxref.explain.link import treatment_text
from mxref.formats import Negatives
from mxref.layouts.packed import pack, unpack
from mxref.steps.quotient import Arithmetic
from mxref.steps.rounding import round_magnitude
from peers import blocks, kernels, nvfp4
from peers.blocks import Case, Stored
from peers.measure import environment, release
from peers.peer import Peer
from peers.verdicts import DIFFERS, coverage, decoded, verdicts, wrong_blocks

MACHINES = RECORDS / "machines"
MODULES = ("torchao", "gfloat", "gguf", "compressed_tensors", "onnx", "ml_dtypes", "torch", "transformers")
INFINITIES = (0x7F800000, 0xFF800000)
ABSENT = {
    "triton_kernels": "not on the package index, whose triton-kernels is another project; its kernels need a GPU",
    "aiter": "its kernels need a GPU of AMD",
    "flashinfer": "its kernels need a GPU of NVIDIA",
}
"""Implementations that no run here can ask, and why."""
EQUAL_ROWS = 16
GIVEN = ", under mxref's scales"
"""Ends the name of a setting that has no scales of its own."""

CHECKOUTS: dict[str, Callable[[Path], None]] = {
    "microxcaling": lambda folder: blocks.package("mx", folder / "mx"),
    "transformer-engine": blocks.from_transformer_engine,
}
"""What lets an implementation be imported that is no package of the index, or not one for a CPU."""

Clauses = dict[str, dict[str, Any]]


# ---- what is asked ----


def asked(case: Case) -> tuple[list[Call], Clauses]:
    """Return what a case answers to the kit's questions, and the clauses of which it gives no bytes to judge."""
    calls: list[Call] = []
    silent: Clauses = {}
    for x in questions(case.spec, case.bfloat16):
        _ask(case, x, calls, silent)
    return [*calls, *_shrunk(case, calls)], silent


def _ask(case: Case, x: np.ndarray, calls: list[Call], silent: Clauses) -> None:
    """Add the answer for a matrix, or those for its halves where it has none; then what a single row shows."""
    rows = case.spec.block.rows
    try:
        calls.append(recorded(case, x))
    except Exception as err:
        if len(x) > rows:
            middle = len(x) // 2 // rows * rows
            for half in (x[:middle], x[middle:]):
                _ask(case, half, calls, silent)
        elif isinstance(err, MalformedAnswer):
            below = np.abs(x).max() < 2.0 ** (case.spec.format.element.max_exponent - 126)
            clause = "scale.clamp" if below else "formats.e8m0"
            silent.setdefault(clause, {"outcome": DIFFERS, "message": str(err)})
        elif np.isfinite(x).all():
            message = f"raised {type(err).__name__}: {err}"
            silent.setdefault("conformance.protocol", {"outcome": DIFFERS, "message": message})
        else:  # as the policy `raise` of the specification
            silent.setdefault("scale.nonfinite", {"outcome": "refuses", "message": type(err).__name__})


def recorded(case: Case, x: np.ndarray) -> RecordedQuantization:
    """Return a matrix and what a case stores for it. Of values alone, rows that overflow float32 are left out."""
    stored = case.run(x.copy())
    if stored.values is not None:
        kept = np.isfinite(stored.values).all(axis=1) | ~np.isfinite(x).all(axis=1)
        x, values = x[kept], stored.values[kept]
    request = Request(x.astype(ml_dtypes.bfloat16) if case.bfloat16 else x, case.spec, axis=1)
    if stored.values is not None:
        return RecordedQuantization({}, request, *_bytes_of(request, values))
    assert stored.scales is not None
    assert stored.codes is not None
    # An implementation that stores no scale of the tensor is not judged by it.
    tensor = request.expected.tensor_scale if stored.tensor is None else np.array([stored.tensor], np.float32)
    return RecordedQuantization({}, request, pack(stored.codes, request.element), stored.scales, tensor)


def _bytes_of(request: Request, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and scales of values: of a wrong block, those of another scale under which it rounds to them.

    Raises:
        MalformedAnswer: values that no code and scale have.
    """
    codes, scales = codes_of_values(values, request.expected)
    want, element = request.expected_blocks, request.element
    grid = np.array(element.magnitudes)
    x, got = (each.astype(np.float64).reshape(want.codes.shape) for each in (request.x, values))
    ours = dequantize(request.expected, "float64").reshape(got.shape)
    found = unpack(codes, element).reshape(got.shape)
    wrong = (np.abs(got) != np.abs(ours)).any(axis=-1) & np.isfinite(got).all(axis=-1)
    for place in map(tuple, np.argwhere(wrong)):
        for byte in int(want.scales[place]) + np.array([1, -1, 2, -2]):
            magnitudes = round_magnitude(
                np.ldexp(np.abs(x[place]), 127 - byte), request.spec.rounding, element
            )
            if (np.ldexp(grid[magnitudes], byte - 127) != np.abs(got[place])).any():
                continue
            if byte < 0:
                raise MalformedAnswer(
                    f"the values are those of the scale 2^{byte - 127}, which E8M0 does not have"
                )
            negative, signed = np.signbit(got[place]), magnitudes | np.uint8(element.sign)
            if element.negatives is Negatives.TWOS_COMPLEMENT:
                signed = -magnitudes
            found[place], scales[place] = np.where(negative, signed, magnitudes), byte
            break
    return pack(found.reshape(values.shape), element), scales


@cache
def questions(spec: OperandSpec, bfloat16: bool) -> tuple[np.ndarray, ...]:
    """Return the matrices of `check_quantizer` for a treatment as float32, then those with NaN or Inf."""
    if spec.format.tensor_scale:
        return tuple(_tensors(spec))
    dtype = "bfloat16" if bfloat16 else "float32"
    with TemporaryDirectory() as folder:
        file = Path(folder) / "asked.npz"
        check_quantizer(
            partial(quantize, spec=spec), spec, dtypes=dtype, finite=True, strided=False, recording=file
        )
        calls = load_recording(file).calls
    finite = tuple(call.request.x.astype(np.float32) for call in calls)
    return (*finite, *_nonfinite(spec))


def _shrunk(case: Case, calls: list[Call]) -> Iterator[RecordedQuantization]:
    """Yield for each clause that is wrong the smallest block that still is, as the implementation answers it.

    It is asked in equal rows: a vectorized log2 may give another result than that of a single number.
    """
    for clause, (x, same) in wrong_blocks(calls).items():

        def answer(x: np.ndarray) -> RecordedQuantization:
            return recorded(case, np.tile(x, (EQUAL_ROWS, 1)))

        def still(x: np.ndarray, clause: str = clause, same: bool = same) -> str | None:
            found = wrong_blocks([answer(x)]).get(clause)
            return clause if found and found[1] is same else None

        search = Search(x, clause, still, 320)
        if search.take(x):
            fewest_elements(search, x, lambda x: x)
            yield answer(search.case)


def _nonfinite(spec: OperandSpec) -> Iterator[np.ndarray]:
    """Yield matrices of ones whose first block is NaN or Inf and 1."""
    made = spec.format
    shape = made.k if spec.block.is_tile else 1, made.k
    for bits in (*NAN_PAYLOADS, *INFINITIES):
        x = np.ones(shape, np.float32)
        x[0, : made.k] = 0
        x[0, :2].view(np.uint32)[:] = bits, 0x3F800000
        yield x


def _tensors(spec: OperandSpec) -> Iterator[np.ndarray]:
    """Yield tensors for a format with a scale of the tensor."""
    k = unit = spec.format.k
    for kind in nvfp4.KINDS.values():
        yield nvfp4.numbers(kind, (2 * k, 10 * k))
    crafted = next(each.x for each in crafted_tensors(spec.format, full=False) if each.amax is None)
    finite = crafted[np.isfinite(crafted).all(axis=1)].ravel()
    yield np.concatenate([finite, np.ones(-finite.size % (unit * k), np.float32)]).reshape(-1, unit)
    yield np.zeros((k, 2 * unit), np.float32)
    yield from (np.pad(x, [(0, -len(x) % k), (0, 0)], constant_values=1) for x in _nonfinite(spec))


# ---- the implementations ----


def cases(microxcaling: bool = False, transformer_engine: bool = False) -> list[Case]:
    """Return every way to quantize of every implementation; of two that have one name the first counts."""
    found = []
    for peer in peers().values():
        for title, one in peer.quantizers.items():
            spec = OperandSpec(scale_rule=one.rule)
            name = title.removeprefix(peer.distribution).strip() or "float32"
            found.append(Case(peer.distribution, name, partial(_of_blocks, one.run), spec, one.bfloat16))
        for title, cast in peer.elements.items():
            if not peer.quantizers:
                found.append(
                    Case(peer.distribution, f"{title}{GIVEN}", partial(_of_elements, cast), OperandSpec())
                )
    # Of a transform, the result alone is not stored: what differs could not be told from the quantization.
    more = blocks.cases(mxc=microxcaling, te=transformer_engine)
    found += [case for case in more if not case.spec.hadamard]
    for name, run in nvfp4.INSTALLED.items():
        spec = DIALECTS[nvfp4.DIALECTS[name]].spec
        found.append(Case(name, "float32", partial(_of_tensor, run), spec))
    found += kernels.cases()
    named = {(case.peer, str(case.spec.format), case.setting): case for case in reversed(found)}
    return list(reversed(named.values()))


def peers() -> dict[str, Peer]:
    """Return the peers of MXFP4 that are installed, by the names of their modules."""
    found = {}
    for name in MODULES:
        with suppress(ImportError):
            found[name] = import_module(f"peers.{name}").PEER
    return found


def _of_tensor(run: Callable[[np.ndarray], nvfp4.Stored], x: np.ndarray) -> Stored:
    return Stored(*run(x))


def _of_blocks(run: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]], x: np.ndarray) -> Stored:
    scales, codes = run(x.reshape(-1, 32))
    return Stored(scales.reshape(len(x), -1), codes.reshape(x.shape))


def _of_elements(cast: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> Stored:
    """Return what the cast of elements makes of a matrix that was divided by the scales of mxref."""
    scales = quantize(x, OperandSpec()).scales
    exponents = scales.repeat(32, axis=1).astype(int) - 127
    divided = np.ldexp(x.astype(np.float64), -exponents).astype(np.float32)
    return Stored(scales, cast(divided.ravel()).reshape(x.shape))


# ---- the record ----


def entries(case: Case) -> Iterator[dict[str, Any]]:
    """Yield the verdicts on a case. One of NVFP4 has two: under its order of operations, and the real quotient."""
    made = case.spec.format
    try:
        tried = case.run(np.ones((made.k, 8 * made.k), np.float32))
    except Exception as err:
        why = f"{type(err).__name__}: {' '.join(str(err).split())}"
        yield {"format": str(made), "setting": case.setting, "clauses": {}, "not_run": why}
        return
    calls, silent = asked(case)
    for spec in dict.fromkeys([case.spec, replace(case.spec, arithmetic=Arithmetic.REAL)]):
        requests = [replace(call.request, spec=spec) for call in calls]
        these = [replace(call, request=request) for call, request in zip(calls, requests, strict=True)]
        if tried.tensor is None:
            these = [replace(call, tensor_scale=call.request.expected.tensor_scale) for call in these]
        yield entry(case.setting, spec, these, silent)


def entry(name: str, spec: OperandSpec, calls: list[Call], silent: Clauses) -> dict[str, Any]:
    """Return the verdicts on recorded calls of one treatment, as the record has them."""
    found = verdicts(calls)
    found |= {
        clause: each for clause, each in silent.items() if found.get(clause, {}).get("outcome") != DIFFERS
    }
    if name.endswith(GIVEN):  # the scales are not its own
        found = {clause: each for clause, each in found.items() if clause.startswith("rounding.")}
    return {
        "format": str(spec.format), "setting": name,
        "treatment": {key: str(value) for key, value in spec.stated.items()},
        "crafted": coverage(calls), "clauses": found,
    }  # fmt: skip


def measure(checkouts: Mapping[str, Path]) -> dict[str, Any]:
    """Return the record of everything that can be asked here, and of the recordings of other machines."""
    for name, folder in checkouts.items():
        CHECKOUTS[name](folder)
    versions = {name: blocks.commit(folder) for name, folder in checkouts.items()}
    absent = ABSENT | dict.fromkeys(CHECKOUTS.keys() - checkouts, "no checkout of it was given")
    columns: dict[str, dict[str, Any]] = {}

    def add(peer: str, found: Iterable[dict[str, Any]]) -> None:
        try:
            version = versions.get(peer) or release(peer)
        except PackageNotFoundError:
            absent[peer] = "not installed"
        else:
            columns.setdefault(peer, {"version": version, "settings": []})["settings"] += found

    installed = peers()
    absent |= {name.replace("_", "-"): "not installed" for name in MODULES if name not in installed}
    for case in cases(*(name in checkouts for name in CHECKOUTS)):
        add(case.peer, entries(case))
        print(case.name, flush=True)
    for peer in installed.values():
        for title, decoder in peer.decoders.items():
            found = {"format": "mxfp4", "setting": f"{title}, {decoder.dtype}", "clauses": decoded(decoder)}
            add(peer.distribution, [found])
    for name, column in [*columns.items()]:
        if all("not_run" in setting for setting in column["settings"]):
            absent[name] = columns.pop(name)["settings"][0]["not_run"]
    return {
        "date": datetime.date.today().isoformat(),
        "environment": environment() | {"processor": processor()},
        "specification": SPECIFICATION,
        "columns": columns,
        "machines": machines(MACHINES),
        "absent": absent,
    }


def machines(folder: Path) -> dict[str, dict[str, Any]]:
    """Return a column for each recording of another machine, as `recorded_elsewhere` does."""
    return {path.stem: recorded_elsewhere(path) for path in sorted(folder.glob("*.npz"))}


def recorded_elsewhere(path: Path) -> dict[str, Any]:
    """Return the column of a recording of another machine.

    Raises:
        FileFormatError: a recording that is damaged, of another version of the specification, or without answers.
    """
    recording = load_recording(path)
    if not recording.calls:
        raise FileFormatError(f"{path} holds no answers: record a function that returns some")
    alike: dict[OperandSpec, list[Call]] = {}
    for call in recording.calls:
        spec = call.request.spec if isinstance(call, RecordedQuantization) else OperandSpec()
        alike.setdefault(spec, []).append(call)
    settings = [
        entry(f"{recording.backend}, {treatment_text(spec)}", spec, calls, {})
        for spec, calls in alike.items()
    ]
    return {"facts": dict(recording.facts), "settings": settings}


def add(file: Path) -> Path:
    """Keep a recording of another machine, and write its column into the newest record, whose path is returned.

    Raises:
        FileFormatError: as of `recorded_elsewhere`, or a name that gives no column; nothing is written then.
    """
    path = newest("matrix", RECORDS)
    record = read(path)
    if file.suffix != ".npz":
        raise FileFormatError(f"cannot add {file}: its name must end in .npz; the rest names the column")
    if file.stem in record["columns"]:
        raise FileFormatError(
            f"cannot add {file}: {file.stem} is a column already; rename the file, for example to {file.stem}-gpu.npz"
        )
    recorded_elsewhere(file)
    MACHINES.mkdir(exist_ok=True)
    shutil.copy(file, MACHINES)
    _write(path, record | {"machines": machines(MACHINES)})
    return path


def _write(path: Path, record: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Ask every implementation, or add a recording, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in CHECKOUTS:
        parser.add_argument(
            f"--{name.replace('_', '-')}", dest=name, type=Path, help="a checkout of its sources"
        )
    parser.add_argument("--add", type=Path, help="only add a recording of another machine")
    chosen = vars(parser.parse_args(arguments))
    if file := chosen["add"]:
        path = add(file)
    else:
        record = measure({name: chosen[name] for name in CHECKOUTS if chosen[name]})
        path = RECORDS / f"matrix_{record['date']}.json"
        _write(path, record)
    print(path)


if __name__ == "__main__":
    try:
        main()
    except FileFormatError as err:
        sys.exit(str(err))
