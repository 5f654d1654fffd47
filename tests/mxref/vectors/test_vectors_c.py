"""mxref.h: through several compilers equal to every vector and to the reference, and a changed bit of it is noticed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from decimal import Decimal, getcontext
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mxref._version import SPECIFICATION
from mxref.formats import BLOCK_FORMATS, BlockFormat
from mxref.layouts.packed import pack
from mxref.mxarray import MXArray
from mxref.placement import Placement
from mxref.recipe import OperandSpec
from mxref.reference import backend as reference
from mxref.steps.random import Stream
from mxref.steps.rounding import Rounding
from mxref.vectors.c_table import TABLE, write_c
from places import ROOT

getcontext().prec = 60
NAMES = ("mxfp4", "mxfp4_e1m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2", "mxint8", "nvfp4")
"""In the order of many.c."""
RULES = ("floor", "ceil", "rceil", "even", "turn", "nearest")
ROUNDINGS = ("rne", "rna", "rtz", "sr")
ONE = 0x3F800000
PAGE = ROOT / "docs" / "reference" / "vectors.rst"
COMPILERS = {
    "c99": ["gcc", "-std=c99", "-O0", "-Wall", "-Wextra", "-Wconversion", "-pedantic", "-Werror"],
    "fast": ["gcc", "-O2", "-ffast-math", "-Wall", "-Werror"],
    "c++": ["g++", "-x", "c++", "-O2", "-Wall", "-Wextra", "-Werror"],
    "sanitized": ["gcc", "-O1", "-fsanitize=undefined,address", "-fno-sanitize-recover"],
    "clang": ["clang", "-std=c99", "-O0", "-Wall", "-Wextra", "-Werror"],
    "clang fast": ["clang", "-O2"],
}
PLANTED = {
    "one subnormal": (
        "return field ? mxref__make(m | 0x800000",
        "return field > 1 ? mxref__make(m | 0x800000",
    ),
    "ties to odd": (
        "(how->rounding == MXREF_RNA || low % 2)",
        "(how->rounding == MXREF_RNA || low % 2 == 0)",
    ),
    "SR one bit off": ("(t + random >= (uint64_t)1", "(t + random > (uint64_t)1"),
    "saturation": ("if (low == mxref_max_code(f) || how", "if (how"),
    "RCEIL at M": ("return (int32_t)mxref__max_mantissa(f);", "return (int32_t)mxref__max_mantissa(f) - 1;"),
    "EVEN one up": ("(1 << (22 - p)) - 1;", "(1 << (22 - p));"),
    "clamp": ("code < 0 ? 0", "code < 1 ? 1"),
    "zero scale": ("how->zero_scale_one ? (uint32_t)s->bias", "!how->zero_scale_one ? (uint32_t)s->bias"),
    "scale tie": ("(order == 0 && code % 2 == 0)", "(order == 0)"),
    "tensor scale": ("return t ? t : 1;", "return t;"),
    "sign of zero": ("if (!negative) return", "if (!negative || !magnitude) return"),
    "two's complement": ("? 256 - magnitude", "? 255 - magnitude"),
    "prescale rounds": (
        "n = mxref__times(mxref__of(mxref__round(0, mxref__make(n.lo, 0))), 1, n.e);",
        "",
    ),
    "NaN block": ("codes[i] = finite ?", "codes[i] = 1 ?"),
    "sticky bit": ("n.lo |= lost != 0;", ""),
    "round to even": ("(n.lo & 2) && (n.lo & 5)", "(n.lo & 2)"),
    "no subnormals": ("top < -126 ? -149 : top - 23", "top - 23"),
    "bfloat16 tie": ("0x7FFF + (bits >> 16 & 1)", "0x8000"),
    "Philox": ("for (round = 0; round < 10;", "for (round = 0; round < 9;"),
    "half of a word": ("(16 * (i % 2))", "(16 * (1 - i % 2))"),
    "signs": ("words[i / 32 % 4] >> (i % 32)", "words[i / 32 % 4] >> (31 - i % 32)"),
    "butterfly": ("z[i] = mxref_add(s, t);", "z[i] = mxref_add(t, s ^ 0x80000000u) ^ 0x80000000u;"),
    "factor": ("(log % 2 ? 0x3F3504F3u", "(log % 2 ? 0x3F3504F4u"),
    "packing": ("- 1)) << held;", "- 1)) << (held & 4);"),
    "infinity meets zero": ("(ka == MXREF__NUMBER && !x.lo)", "(0 && !x.lo)"),
    "infinities": ("infinities == 3 ? MXREF__NAN", "infinities == 4 ? MXREF__NAN"),
    "zero meets an infinity": ("(kb == MXREF__NUMBER && !y.lo)", "(0 && !y.lo)"),
    "sign of a product": ("infinities |= na != nb ? 2 : 1;", "infinities |= na ? 2 : 1;"),
    "sign of an infinity": ("(negative ? 0x80000000u : 0) | 0x7F800000u", "0x7F800000u"),
    "infinity onto infinity": (
        "acc = mxref_add(acc, (negative ? 0x80000000u : 0) | 0x7F800000u);",
        "acc = (negative ? 0x80000000u : 0) | 0x7F800000u;",
    ),
    "sign of a dot": ("*negative = (int)(high >> 63);", "*negative = 0;"),
    "finite accumulator": ("else if (mxref_finite(acc))", "else"),
    "NaN byte": ("return MXREF_NAN; /* [gemm.nan] */", "return 0;"),
    "undone prescale": ("if (a->prescale || b->prescale)", "if (a->prescale && b->prescale)"),
    "tensor scale of B": ("acc = mxref_multiply(acc, b->t)", "acc = mxref_multiply(acc, a->t)"),
    "E5M2 infinity": ("magnitude == mxref_max_code(f) + 1", "magnitude == mxref_max_code(f)"),
}
"""A line of mxref.h, and what stands there instead."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("c")
    write_c(folder)
    return folder


def built(compiler: list[str], folder: Path, *names: str) -> Path:
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"needs {compiler[0]}")
    program = folder / "program"
    sources = [str(folder / name) for name in names]
    subprocess.run([*compiler, f"-I{folder}", *sources, "-o", str(program)], check=True, timeout=300)
    return program


def checked(program: Path) -> tuple[int, str]:
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout


@pytest.mark.parametrize("name", COMPILERS)
def test_every_vector_through_a_compiler(name: str, written: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written, tmp_path / "c"))
    count, left_out = write_c(tmp_path / "again")
    assert f"\n   {count} checked, 0 differ\n" in PAGE.read_text()
    assert left_out < count / 5
    assert f"specification {SPECIFICATION};" in (folder / TABLE).read_text().partition("\n")[0]
    code, out = checked(built(COMPILERS[name], folder, "check_vectors.c"))
    assert (code, out) == (0, f"{count} checked, 0 differ\n")


def test_a_changed_vector_is_named(written: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written, tmp_path / "c"))
    table = folder / TABLE
    lines = table.read_text().split("\n")
    changed = set()
    for kind in ("scale", "quantize", "dequantize", "hadamard", "gemm", "random", "signs", "pack"):
        start = lines.index(f"static const mxref_{kind}_vector mxref_{kind}_vectors[] = {{") + 1
        row = next(line for line in lines[start:] if line.rstrip("},").split(", ")[-1].startswith("mxref__"))
        name = row.rstrip("},").split(", ")[-1]
        at = next(i for i, line in enumerate(lines) if f" {name}[] = {{" in line)
        head, _, values = lines[at].partition("{")
        first, mark, rest = values.partition("," if "," in values else "}")
        lines[at] = f"{head}{{{int(first, 16) ^ 1:#x}{mark}{rest}"
        changed.add(row.split('"')[1])
    table.write_text("\n".join(lines))
    code, out = checked(built(["gcc", "-O0"], folder, "check_vectors.c"))
    assert code == 1
    assert {line.removesuffix(" differs") for line in out.splitlines()[:-1]} == changed


@pytest.mark.parametrize("fault", [pytest.param(name, marks=pytest.mark.study) for name in PLANTED])
def test_a_fault_in_the_header_is_found(fault: str, written: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(written, tmp_path / "c"))
    right, wrong = PLANTED[fault]
    header = folder / "mxref.h"
    text = header.read_text()
    assert right in text
    header.write_text(text.replace(right, wrong))
    if checked(built(["gcc", "-O0", "-w"], folder, "check_vectors.c"))[0] == 0:
        library = loaded(folder)
        with pytest.raises(AssertionError):  # no vector has it
            random_inputs_equal_the_reference(library)


class Treatment(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int32)
        for name in ("rule", "turn", "rounding", "sr_bits", "prescale", "zero_scale_one")
    ]


class StreamWords(ctypes.Structure):
    _fields_ = [("seed", ctypes.c_uint64), ("word", ctypes.c_uint64)]


def address(array: np.ndarray[Any, Any]) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


@pytest.fixture(scope="module")
def many(written: Path) -> ctypes.CDLL:
    return loaded(written)


def loaded(folder: Path) -> ctypes.CDLL:
    shutil.copy(Path(__file__).with_name("many.c"), folder)
    library = ctypes.CDLL(str(built(["gcc", "-O2", "-shared", "-fPIC"], folder, "many.c")))
    library.quantize_many.restype = ctypes.c_uint32
    return library


def random_words(rng: np.random.Generator, count: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return float32 bits: of any kind, or of eight exponents beside each other, with ties, with zeros."""
    words = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    kind = rng.integers(4)
    if kind:
        base, field = rng.integers(0, 248), words >> 23 & 7
        kept = words & np.uint32(0x80780000 if kind == 1 else 0x807FFFFF)
        words = kept | ((field + base) << 23).astype(np.uint32)
    if rng.integers(4) == 0:
        words[rng.random(count) < 0.5] &= np.uint32(0x80000000)
    return words


def random_treatment(rng: np.random.Generator, made: BlockFormat) -> tuple[OperandSpec, Treatment]:
    powers = made.scale.powers
    rule = RULES[rng.integers(5)] if powers else "nearest"
    turn, name = 0, rule
    if rule == "turn":
        turn = int(rng.integers(0, 0x7FFFFF))
        exact = 1 + Fraction(turn, 1 << 23)
        name = f">{Decimal(exact.numerator) / Decimal(exact.denominator)}"
    rounding, bits = ROUNDINGS[rng.integers(4)], int(rng.integers(1, 23))
    prescale, ones = bool(powers and rng.integers(2)), bool(rng.integers(2))
    spec = OperandSpec(
        format=made.name,
        scale_rule=name,
        rounding=rounding,
        prescale=prescale,
        zero_scale=made.scale.bias << made.scale.mantissa_bits if ones else 0,
        **({"sr_bits": bits} if rounding == "sr" else {}),
    )
    return spec, Treatment(RULES.index(rule), turn, ROUNDINGS.index(rounding), bits, prescale, ones)


def equal_floats(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> bool:
    a, b = ours.view(np.float32), theirs.view(np.float32)
    return bool(((ours == theirs) | (np.isnan(a) & np.isnan(b))).all())


@pytest.mark.parametrize("blocks", [200_000, pytest.param(10_000_000, marks=pytest.mark.study)])
def test_random_blocks_equal_the_reference(blocks: int, many: ctypes.CDLL) -> None:
    rng = np.random.default_rng(blocks)
    each = 512
    for _ in range(blocks // each):
        which = int(rng.integers(len(NAMES)))
        made = BLOCK_FORMATS[NAMES[which]]
        x = random_words(rng, each * made.k)
        spec, how = random_treatment(rng, made)
        stream = Stream(int(rng.integers(1 << 63)), int(rng.integers(1 << 32)), int(rng.integers(1 << 24)), 3)
        values = x.view(np.float32).reshape(4, -1)
        q = reference.quantize(values, spec, axis=1, placement=Placement(stream))
        codes, scales = np.full(q.codes.size, 0xA5, np.uint8), np.full(each, 0xA5, np.uint8)
        drawn = StreamWords(stream.seed, stream.word)
        t = many.quantize_many(
            which, ctypes.byref(how), address(x), ctypes.c_int64(each), ctypes.byref(drawn), address(codes),
            address(scales),
        )  # fmt: skip
        assert np.array_equal(codes, q.codes.reshape(-1)), spec
        assert np.array_equal(scales, q.scales.reshape(-1)), spec
        assert t == (ONE if q.tensor_scale is None else q.tensor_scale.view(np.uint32)[0]), spec
        if spec.rounding is Rounding.RNE:
            y = np.full(x.size, 0xA5A5A5A5, np.uint32)
            many.values_many(
                which, address(codes), address(scales), ctypes.c_uint32(t), ctypes.c_int64(each), address(y)
            )
            assert equal_floats(y, reference.dequantize(q, "float32").view(np.uint32).reshape(-1)), spec


def random_inputs_equal_the_reference(library: ctypes.CDLL) -> None:
    test_random_products_equal_the_reference(library)
    test_random_blocks_equal_the_reference(100_000, library)


def random_operand(rng: np.random.Generator, made: BlockFormat, rows: int, blocks: int) -> tuple[Any, ...]:
    """Return codes, scales, t and prescale of an operand with any codes, and the same as an MXArray."""
    element, count = made.element, rows * blocks * made.k
    codes = rng.integers(0, 1 << element.bits, count).astype(np.uint8)
    magnitudes, kind = codes & (element.sign - 1), rng.integers(4)
    if kind == 0:  # infinities and zeros: a NaN code would make most results NaN
        codes[magnitudes > element.max_code + 1] = 0
    elif kind > 1:
        codes[magnitudes > element.max_code] = element.max_code
    middle = made.scale.bias << made.scale.mantissa_bits
    spread, end = ((8, made.scale.nan_code), (255, 256))[int(rng.integers(8) == 0)]
    scales = np.clip(rng.integers(middle - spread, middle + spread, rows * blocks), 0, end - 1).astype(
        np.uint8
    )
    t = np.abs(rng.standard_normal(1).astype(np.float32)) if made.tensor_scale else None
    prescale = bool(made.scale.powers and rng.integers(2))
    packed = pack(codes.reshape(rows, -1), element)
    q = MXArray(
        packed,
        scales.reshape(rows, -1),
        (rows, blocks * made.k),
        1,
        prescale=prescale,
        format=made,
        tensor_scale=t,
    )
    word = ONE if t is None else int(t.view(np.uint32)[0])
    return (address(codes), address(scales), ctypes.c_uint32(word), int(prescale)), (q, codes, scales)


def test_random_products_equal_the_reference(many: ctypes.CDLL) -> None:
    rng = np.random.default_rng(5)
    pairs = [(a, b) for a in NAMES for b in NAMES if BLOCK_FORMATS[a].k == BLOCK_FORMATS[b].k]
    for a, b in pairs * 20:
        m, n, blocks = 3, 5, int(rng.integers(7))
        left, (qa, *_held_a) = random_operand(rng, BLOCK_FORMATS[a], m, blocks)
        right, (qb, *_held_b) = random_operand(rng, BLOCK_FORMATS[b], n, blocks)
        c = np.full((m, n), 0xA5A5A5A5, np.uint32)
        sizes = [ctypes.c_int64(size) for size in (m, n, blocks)]
        many.products_many(NAMES.index(a), *left, NAMES.index(b), *right, *sizes, address(c))
        wanted = reference.scaled_gemm(qa, qb, profile="ordered", out_dtype="float32").view(np.uint32)
        assert equal_floats(c, wanted), (a, b, blocks)


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32, 64, 128, 256])
def test_random_transforms_equal_the_reference(n: int, many: ctypes.CDLL) -> None:
    rng = np.random.default_rng(n)
    for _ in range(8):
        x = random_words(rng, 16 * 256)
        wanted = reference.hadamard(x.view(np.float32).reshape(-1, n), n, 0).view(np.uint32)
        many.hadamard_many(address(x), n, ctypes.c_int64(x.size // n))
        assert equal_floats(x, wanted.reshape(-1))
