"""Golden vectors: what every bit must be, as data that needs no mxref to be read.

A record is one operation, its inputs and the results that a correct implementation gives; the files are
`spec/vectors/<chapter>.json`, one record per line. `load_vectors` reads them; `mxref.vectors.run.run_record`
puts one through a backend. The files are written by `tests/golden` only; released records are never changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from mxref.errors import FileFormatError
from mxref.formats import BLOCK_FORMATS
from mxref.recipe import OperandSpec
from mxref.tomlio import nearest

FORMAT = "mxref.vectors.1"
DEFAULT = OperandSpec().format.name
"""The block format of a record that names none."""
FORMAT_CHAPTERS = tuple(name for name in BLOCK_FORMATS if name != DEFAULT)
"""Stems of the files of the other block formats, each of which holds every operation."""
CHAPTERS = (
    "scale", "rounding", "random", "hadamard", "quantize", "dequantize", "packing", "gemm", *FORMAT_CHAPTERS
)  # fmt: skip
"""Stems of the files: the default format by chapter, in the order of the specification, then the other formats."""


def chapters_of(made: str | None) -> tuple[str, ...]:
    """Return the stems of the files of a block format, by name; None is all of them.

    Raises:
        FileFormatError: there are no vectors of such a format.
    """
    if made is None:
        return CHAPTERS
    if made not in BLOCK_FORMATS:
        raise FileFormatError(f"no golden vectors of a format {made!r}{nearest(made, BLOCK_FORMATS)}")
    return (made,) if made in FORMAT_CHAPTERS else tuple(c for c in CHAPTERS if c not in FORMAT_CHAPTERS)


class Source(StrEnum):
    """Where the expected results of a record come from; the reference agrees with all of them."""

    STANDARD = "standard"
    """A table or sentence of the OCP MX v1.0 standard."""
    KNOWN_ANSWER = "known-answer"
    """Published by the authors of the algorithm (Random123)."""
    ORACLE = "oracle"
    """Computed by a scalar, exact implementation in integers that shares no code with the reference."""
    MXREF = "mxref"
    """Computed by the reference alone: self-consistent only."""


class RecordOp(StrEnum):
    """The operation of a record. The first five are operations of a backend; the others belong to the reference."""

    SCALE = "scale"
    QUANTIZE = "quantize"
    DEQUANTIZE = "dequantize"
    HADAMARD = "hadamard"
    SCALED_GEMM = "scaled_gemm"
    PHILOX = "philox"
    INTEGERS = "integers"
    SIGNS = "signs"
    PACK = "pack"
    UNPACK = "unpack"
    EXCHANGE = "exchange"


BACKEND_OPS = frozenset(
    {RecordOp.SCALE, RecordOp.QUANTIZE, RecordOp.DEQUANTIZE, RecordOp.HADAMARD, RecordOp.SCALED_GEMM}
)
"""Operations that a record asks of a backend."""


@dataclass(frozen=True)
class Keys:
    """The keys of an operation's records, in the order in which they are written."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    """Written between the required inputs and the data, and only where they differ from their default."""
    data: tuple[str, ...] = ()
    """Long inputs; exactly one of the alternatives separated by `|` is present."""
    expected: tuple[str, ...] = ()


_PLACE = ("shape", "axis")
_STREAM = ("seed", "step", "layer", "operand")
_GENERATED = "x|x_seed"
KEYS: dict[RecordOp, Keys] = {
    RecordOp.SCALE: Keys(("rule",), ("format", "tensor_amax"), ("amax",), ("scales", "tensor_scale")),
    RecordOp.QUANTIZE: Keys(
        ("rule", "rounding"),
        (
            "format", "tensor_amax", "sr_bits", "block", "zero_scale", "nonfinite", "prescale", "hadamard", "signs",
            "arithmetic", "four_over_six", *_STREAM,
            "dtype", *_PLACE, "origin", "global_shape", "pad", "x_rule", "x_base",
        ),
        (_GENERATED,),
        ("scales", "codes", "scales_sha256", "codes_sha256", "tensor_scale", "error"),
    ),
    RecordOp.DEQUANTIZE: Keys(("out",), ("format", "tensor_scale", *_PLACE), ("scales", "codes"), ("y",)),
    RecordOp.HADAMARD: Keys(
        ("n", "signs"), ("dtype", *_PLACE, "x_rule", "x_base"), (_GENERATED,), ("y", "y_sha256")
    ),
    RecordOp.SCALED_GEMM: Keys(
        ("profile", "out", "m", "n", "k"),
        ("a_format", "b_format", "a_prescale", "b_prescale", "a_tensor_scale", "b_tensor_scale"),
        ("a_scales|operand_seed", "a_codes|operand_seed", "b_scales|operand_seed", "b_codes|operand_seed"),
        ("c", "c_sha256"),
    ),
    RecordOp.PHILOX: Keys(("counter", "key"), (), (), ("words",)),
    RecordOp.INTEGERS: Keys((*_STREAM, "sr_bits", "row", "first", "count", "length"), (), (), ("r",)),
    RecordOp.SIGNS: Keys(("n", "policy", *_STREAM), (), (), ("signs",)),
    RecordOp.PACK: Keys((), ("format",), ("codes",), ("packed",)),
    RecordOp.UNPACK: Keys((), ("format",), ("packed",), ("codes",)),
    RecordOp.EXCHANGE: Keys((), (), ("packed", "scales"), ("elements", "factors")),
}  # fmt: skip
"""Every operation's keys. A name that is both input and result, as `signs`, is one of them per operation."""

_HEAD = ("id", "op", "clauses", "source", "note")
_SPEC = (
    "format", "rounding", "sr_bits", "block", "zero_scale", "nonfinite", "prescale", "hadamard", "signs",
    "arithmetic", "four_over_six",
)  # fmt: skip


@dataclass(frozen=True)
class Record:
    """One golden vector."""

    id: str
    """Readable, unique over all files, its chapter first."""
    op: RecordOp
    clauses: tuple[str, ...]
    """Clauses of the specification that a wrong result breaks."""
    source: Source
    note: str
    """What the record is meant to catch."""
    inputs: Mapping[str, Any]
    expected: Mapping[str, str] = field(default_factory=dict)

    @property
    def chapter(self) -> str:
        """Stem of the record's file."""
        return self.id.partition(".")[0]

    @cached_property
    def spec(self) -> OperandSpec:
        """The treatment that a quantize record asks for; keys that it leaves out have their defaults."""
        given = {name: self.inputs[name] for name in _SPEC if name in self.inputs}
        return OperandSpec(scale_rule=self.inputs["rule"], **given)

    def line(self) -> str:
        """Return the record as its line of the file, without the comma after it."""
        head = dict(zip(_HEAD, (self.id, self.op, self.clauses, self.source, self.note), strict=True))
        return json.dumps({**head, **self.inputs, **self.expected}, separators=(",", ":"))


@dataclass(frozen=True)
class Mismatch:
    """The first place at which a result differs from a record."""

    record: Record
    field: str
    """The expected key that differs, as in `codes`."""
    index: int
    """Which item of it: element, block or word in row-major order; -1 where the whole differs."""
    got: str
    want: str

    def __str__(self) -> str:
        """Return one line: the record, what differs and where, and the clauses that it breaks."""
        place = f"{self.field}[{self.index}]" if self.index >= 0 else self.field
        about = f" ({self.record.note})" if self.record.note else ""
        return (
            f"{self.record.id}{about}: {place} is {self.got}, must be {self.want}; "
            f"clauses {', '.join(self.record.clauses)}"
        )


def vectors_directory() -> Path:
    """Return the folder of the vectors: `spec/vectors` of a checkout, else the copy installed with mxref.

    Raises:
        FileFormatError: neither exists.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package.parent / "spec" / "vectors", package / "_vectors"):
        if (folder / "schema.json").is_file():
            return folder
    raise FileFormatError(
        f"no golden vectors beside {package}: reinstall mxref, or name their folder with --dir"
    )


def load_vectors(stem: str | None = None, directory: str | Path | None = None) -> list[Record]:
    """Return the records of one chapter, or of all of them, in file order.

    Args:
        stem: one of `CHAPTERS`; default all.
        directory: folder of the files; default that of `vectors_directory`.

    Raises:
        FileFormatError: an unknown chapter, or a file that is missing or damaged; the message names the file
            and, where there is one, the line and the record.
    """
    if stem is not None and stem not in CHAPTERS:
        raise FileFormatError(f"no golden vectors of a chapter {stem!r}{nearest(stem, CHAPTERS)}")
    folder = Path(directory) if directory is not None else vectors_directory()
    records: list[Record] = []
    for chapter in CHAPTERS if stem is None else (stem,):
        records += _read(folder / f"{chapter}.json", chapter)
    return records


def _read(path: Path, chapter: str) -> list[Record]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise FileFormatError(f"cannot read golden vectors {path}: {err.strerror or err}") from err
    except ValueError as err:
        raise FileFormatError(f"{path} is not valid JSON: {err}") from err
    found = table.get("format") if isinstance(table, dict) else None
    if found != FORMAT or table.get("chapter") != chapter or not isinstance(table.get("records"), list):
        raise FileFormatError(
            f"{path} does not hold the vectors of chapter {chapter!r} in format {FORMAT!r} (its format is {found!r})"
        )
    if table.get("count") != len(table["records"]):
        raise FileFormatError(
            f"{path} announces {table.get('count')} records and holds {len(table['records'])}"
        )
    records = [_parse(row, f"{path}: record {i + 1}") for i, row in enumerate(table["records"])]
    seen: set[str] = set()
    for record in records:
        if record.id in seen or record.chapter != chapter:
            raise FileFormatError(f"{path}: id {record.id!r} is used twice or is not of chapter {chapter!r}")
        seen.add(record.id)
    return records


def _parse(row: Any, where: str) -> Record:
    if not isinstance(row, dict):
        raise FileFormatError(f"{where} is not an object")
    where = f"{where} ({row.get('id')!r})"
    missing = [key for key in _HEAD if key not in row]
    if missing:
        raise FileFormatError(f"{where} has no {missing[0]!r}")
    try:
        op, source = RecordOp(row["op"]), Source(row["source"])
    except ValueError as err:
        raise FileFormatError(f"{where}: {err}") from None
    keys = KEYS[op]
    alternatives = [choice.split("|") for choice in keys.data]
    known = {*keys.required, *keys.optional, *(name for names in alternatives for name in names)}
    inputs = {key: value for key, value in row.items() if key in known}
    expected = {key: value for key, value in row.items() if key in keys.expected}
    for key in row:
        if key not in known and key not in keys.expected and key not in _HEAD:
            raise FileFormatError(f"{where}: {op.value} has no key {key!r}{nearest(key, known)}")
    for names in [[key] for key in keys.required] + alternatives:
        if sum(name in inputs for name in names) != 1:
            raise FileFormatError(f"{where} needs exactly one of {', '.join(names)}")
    if not expected or not all(isinstance(value, str) for value in expected.values()):
        raise FileFormatError(f"{where} has no result, or one that is not text")
    return Record(str(row["id"]), op, tuple(row["clauses"]), source, str(row["note"]), inputs, expected)
