"""Worked examples of the specification: tables whose every number comes from running mxref while pages are built."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from docutils import nodes
from docutils.parsers.rst import directives
from numpy.typing import NDArray
from sphinx.util.docutils import SphinxDirective

from mxref import DIALECTS, MXArray, OperandSpec, SignPolicy, Stream, dequantize, quantize, scaled_gemm
from mxref.block_dots import block_dots
from mxref.explain import explain_block
from mxref.explain.text import notes, number, reason, scale_steps
from mxref.formats import BLOCK_FORMATS, MXFP4, BlockFormat
from mxref.layouts.packed import pack, unpack
from mxref.placement import Placement
from mxref.steps.hadamard import Rotation, draw_rotation, hadamard
from mxref.steps.random import SIGN_OPERAND, random_integers, stream_words
from mxref.steps.rounding import Rounding
from mxref.steps.scale import magnitude_bits

Cell = str | nodes.Node | list[nodes.Node]


_POWER = re.compile(r"2\^(-?\d+)")


def formula(text: str) -> list[nodes.Node]:
    """Return text with its powers of two set as the clauses set them."""
    parts = _POWER.split(text)
    out: list[nodes.Node] = []
    for i, part in enumerate(parts):
        if i % 2:
            out += [nodes.Text("2"), nodes.superscript("", part)]
        elif part:
            out.append(nodes.Text(part))
    return out


def _after(text: str) -> nodes.paragraph:
    return nodes.paragraph("", "", *formula(text), classes=["worked-after"])


def table(
    head: list[str], rows: list[Any], classes: list[str], widths: list[int] | None = None
) -> nodes.table:
    """Return a table; a cell is text (code where it starts with a backtick), a node, or several nodes."""
    group = nodes.tgroup(cols=len(head))
    group += [nodes.colspec(colwidth=width) for width in widths or [1] * len(head)]
    group += nodes.thead("", nodes.row("", *(_entry(cell) for cell in head)))
    group += nodes.tbody("", *(nodes.row("", *(_entry(cell) for cell in row)) for row in rows))
    given = ["colwidths-given"] if widths else []
    return nodes.table("", group, classes=[*classes, *given])


def _entry(cell: Cell) -> nodes.entry:
    if isinstance(cell, str):
        text = [nodes.literal("", cell[1:])] if cell.startswith("`") else formula(cell)
        cell = nodes.paragraph("", "", *text)
    return nodes.entry("", *(cell if isinstance(cell, list) else [cell]))


def spec_of(text: str) -> OperandSpec:
    """Return the treatment that `key=value, key=value` names; the key `dialect` names the treatment to start from."""
    spec = OperandSpec()
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = item.partition("=")
        if key == "dialect":
            spec = DIALECTS[value].spec
        else:
            integer = key in ("sr_bits", "zero_scale", "hadamard")
            spec = replace(
                spec, **{key: int(value) if integer else value == "true" if key == "prescale" else value}
            )
    return spec


def _block(text: str) -> NDArray[np.float32]:
    """Return one block whose first elements are the numbers of `text`, the others +0: float32 [1, 32]."""
    values = [float(word) for word in text.split()]
    x = np.zeros((1, MXFP4.k), np.float32)
    x[0, : len(values)] = values
    return x


def _hex(value: np.generic) -> str:
    return f"`{int(value):08x}"


class Worked(SphinxDirective):
    """A worked example: the argument names its kind, the content is the caption."""

    required_arguments = 1
    has_content = True
    option_spec: ClassVar = dict.fromkeys(
        (
            "values",
            "spec",
            "specs",
            "zeros",
            "show",
            "seed",
            "step",
            "layer",
            "operand",
            "first",
            "count",
            "n",
            "a",
            "b",
            "formats",
        ),
        directives.unchanged,
    )

    def run(self) -> list[nodes.Node]:
        kinds: dict[str, Callable[[], list[nodes.Node]]] = {
            "block": self.block,
            "elements": self.elements,
            "dialects": self.dialects,
            "random": self.random,
            "signs": self.signs,
            "hadamard": self.hadamard,
            "gemm": self.gemm,
            "vectors": self.vectors,
        }
        if self.arguments[0] not in kinds:
            raise self.error(f"no worked example {self.arguments[0]!r}; known: {', '.join(kinds)}")
        box = nodes.container(classes=["worked"])
        caption = nodes.container(classes=["worked-caption"])
        self.state.nested_parse(self.content, self.content_offset, caption)
        box += caption
        box += kinds[self.arguments[0]]()
        return [box]

    def integer(self, name: str, default: int = 0) -> int:
        """Return an integer option, decimal or hexadecimal."""
        return int(self.options.get(name, str(default)), 0)

    def stream(self) -> Stream:
        """Return the stream that the options name."""
        return Stream(*(self.integer(name) for name in ("seed", "step", "layer", "operand")))

    def stream_line(self, of: str) -> nodes.paragraph:
        """Return the stream that the options name, in words."""
        s = self.stream()
        seed = f"0x{s.seed:016x}" if s.seed > 0xFFFF else str(s.seed)
        return _after(f"Stream: seed {seed}, step {s.step}, layer {s.layer}, operand {s.operand}{of}.")

    def block(self) -> list[nodes.Node]:
        """Return one block from its numbers to its bytes, step by step."""
        spec = spec_of(self.options.get("spec", ""))
        block = explain_block(_block(self.options["values"]), spec, self.stream())
        steps = nodes.bullet_list(
            "", *(nodes.list_item("", nodes.paragraph("", "", *formula(s))) for s in scale_steps(block))
        )
        head = ["#", "x", "y", "bits of y", "v", "T", "r", "code", "P", "P · X", "why"]
        absent = {*(() if spec.rounding is Rounding.SR else ("T", "r")), *(() if block.rotation else ("y",))}
        keep = [name not in absent for name in head]
        rows = []
        for e in block.elements[: self.integer("show", 8)]:
            v = number(e.v) if e.v is not None else ""
            cells = [str(e.position), number(e.x), number(e.y), f"`{e.y_bits:08x}", v]
            cells += ["" if i is None else str(i) for i in (e.threshold, e.random)]
            cells += [f"`{e.code:04b}", number(e.element), number(e.value), reason(e, block)]
            rows.append([cell for cell, kept in zip(cells, keep, strict=True) if kept])
        stored = f"Stored: byte {block.scale.byte:02x}, codes {block.packed.hex(' ')}."
        unusual = [n for n in notes(block) if "padding" not in n]
        after = [_after(text) for text in (stored, *unusual)]
        place = f"; the block is row 0 and L = {MXFP4.k}, so # is the element's index"
        return [
            *([self.stream_line(place)] if spec.rounding is Rounding.SR else []),
            steps,
            table([h for h, kept in zip(head, keep, strict=True) if kept], rows, ["numbers"]),
            *after,
        ]

    def elements(self) -> list[nodes.Node]:
        """Return the elements of one block in any format: scaled, rounded, and decoded."""
        spec = spec_of(self.options["spec"])
        x = _block(self.options["values"])
        count, element = len(self.options["values"].split()), spec.format.element
        q = quantize(x, spec, placement=Placement(self.stream()))
        byte, codes, values = int(q.scales[0, 0]), unpack(q.codes, element)[0], dequantize(q)[0]
        u = int(magnitude_bits(x).max())
        v = np.abs(x[0].astype(np.float64)) * 2.0 ** (127 - byte)
        if spec.prescale:
            v = (np.float32(element.prescale) * v.astype(np.float32)).astype(np.float64)
        rows = [
            [str(i), number(x[0, i]), number(v[i]), f"`{int(codes[i]):0{element.bits}b}",
             number(element.values[codes[i]]), number(values[i])]
            for i in range(count)
        ]  # fmt: skip
        head = ["#", "x", "v'" if spec.prescale else "v", "code", "P", "P · X"]
        given = f"u = 0x{u:08x}, E = {u >> 23}, m = 0x{u & 0x7FFFFF:06x}; byte {byte}, so X = 2^{byte - 127}."
        return [
            _after(
                f"{spec.format.title}, {spec.scale_rule.value.upper()}, {spec.rounding.value.upper()}: {given}"
            ),
            table(head, rows, ["numbers"]),
        ]

    def dialects(self) -> list[nodes.Node]:
        """Return blocks, each under several treatments."""
        return [node for text in self.options["values"].split("|") for node in self._treated(text)]

    def _treated(self, values: str) -> list[nodes.Node]:
        x = _block(values)
        count = len(values.split())
        u = int(magnitude_bits(x).max())
        amax = number(float(np.uint32(u).view(np.float32)))
        fields = f"amax = {amax}, u = 0x{u:08x}, E = {u >> 23}, m = 0x{u & 0x7FFFFF:06x}."
        given = _after(
            f"Input: {', '.join(number(v) for v in x[0, :count])}, and {x.size - count} times +0; {fields}"
        )
        rows = []
        for text in (part.strip() for part in self.options["specs"].split("|")):
            spec = spec_of(text)
            q = quantize(x, spec)
            packed = q.codes.tobytes()[: -(-count * spec.format.element.bits // 8)].hex(" ")
            row = [f"`{text}", f"`{q.scales[0, 0]:02x}", f"`{packed}", self._decoded(q, count)]
            if "zeros" in self.options:
                zeros = quantize(np.zeros_like(x), spec)
                row.append(f"`{zeros.scales[0, 0]:02x}")
            rows.append(row)
        head = ["treatment", "byte", "codes, packed", "values", "byte of a zero block"]
        return [given, table(head[: len(rows[0])], rows, ["numbers"])]

    @staticmethod
    def _decoded(q: MXArray, count: int) -> str:
        return ", ".join(number(v) for v in dequantize(q)[0, :count])

    def random(self) -> list[nodes.Node]:
        """Return the calls and integers of some elements, R = 16."""
        stream, first, count = self.stream(), self.integer("first"), self.integer("count")
        length = -(-(first + count) // MXFP4.k) * MXFP4.k
        rows = []
        for index in range(first, first + count):
            g, j = divmod(index, 8)
            words = stream_words(np.array([g]), stream)[0]
            r = {}
            for bits in (16, 8):
                r[bits] = random_integers(np.array([0]), 0, length, length, stream, bits)[0, index]
            wide, k = stream_words(np.array([index // 4]), stream)[0], index % 4
            r22 = random_integers(np.array([0]), 0, length, length, stream, 22)[0, index]
            rows.append(
                [str(index), str(g), str(j), _hex(words[j >> 1]), f"`{int(r[16]):04x}", f"`{int(r[8]):02x}",
                 f"{index // 4}, {k}", _hex(wide[k]), f"`{int(r22):06x}"]
            )  # fmt: skip
        s = stream.word
        key = f"key {stream.seed & 0xFFFFFFFF:08x} {stream.seed >> 32:08x}"
        where = f"{key}, counter (g mod 2^32, g >> 32, {s & 0xFFFFFFFF:08x}, {s >> 32:08x})"
        head = [
            "i",
            "g",
            "j",
            "word j >> 1",
            "r, R = 16",
            "r, R = 8",
            "g, j for R > 16",
            "word j",
            "r, R = 22",
        ]
        return [self.stream_line(""), _after(f"Philox: {where}."), table(head, rows, ["numbers"])]

    def signs(self) -> list[nodes.Node]:
        """Return the signs of a GEMM under each policy."""
        n, stream = self.integer("n"), self.stream()
        rows = []
        for policy in SignPolicy:
            rotation = draw_rotation(n, policy, stream)
            text = " ".join("-" if rotation.signs >> i & 1 else "+" for i in range(n))
            rows.append([f"`{policy.value}", f"`{rotation.signs:0{n // 4}x}", f"`{text}"])
        head = ["policy", "signs as a number", "d, from element 0 on"]
        return [
            self.stream_line(f", so sign id {SIGN_OPERAND + stream.role}"),
            table(head, rows, ["numbers"]),
        ]

    def hadamard(self) -> list[nodes.Node]:
        """Return a group before and after its transform."""
        n = self.integer("n")
        x = _block(self.options["values"])[0, :n]
        y = hadamard(x[None], Rotation(n))[0]
        rows = [
            [str(i), number(x[i]), _hex(x.view("u4")[i]), number(y[i]), _hex(y.view("u4")[i])]
            for i in range(n)
        ]
        return [table(["i", "x", "bits", "y", "bits"], rows, ["numbers"])]

    def gemm(self) -> list[nodes.Node]:
        """Return one element of a product, block by block, and its results under two profiles."""
        names = self.options.get("formats", "mxfp4 mxfp4").split()
        a, b = (
            self._operand(self.options[name], BLOCK_FORMATS[block_format])
            for name, block_format in zip(("a", "b"), names, strict=True)
        )
        rows = []
        for i, dot in enumerate(block_dots(a, b)):
            bytes_ = [str(int(q.scales[0, i])) for q in (a, b)]
            value = sum(float(part[0, 0]) for part in dot.parts)
            rows.append([str(i), *bytes_, number(value), str(int(dot.exponent[0, 0]))])
        results = ", ".join(
            f"{profile}: {number(value)} ({int(value.view('u4')):08x})"
            for profile in ("exact", "ordered")
            for value in [scaled_gemm(a, b, profile=profile)[0, 0]]
        )
        head = ["block", "byte of A", "byte of B", "dot", "s"]
        return [
            table(head, rows, ["numbers"]),
            _after(f"C in float32, {results}."),
        ]

    @staticmethod
    def _operand(text: str, block_format: BlockFormat) -> MXArray:
        """Return one row from `byte: values | byte: values`, the values on the element grid."""
        element, codes, scales = block_format.element, [], []
        for part in text.split("|"):
            byte, _, values = part.partition(":")
            numbers = [float(word) for word in values.split()]
            block = [element.magnitudes.index(abs(v)) | (element.sign if v < 0 else 0) for v in numbers]
            codes += block + [0] * (block_format.k - len(block))
            scales.append(int(byte))
        packed = pack(np.array([codes], np.uint8), element)
        return MXArray(packed, np.array([scales], np.uint8), (1, len(codes)), 1, format=block_format)

    def vectors(self) -> list[nodes.Node]:
        """Return blocks as float32 words and their bytes in several treatments, then zeros, NaN and a tile."""
        stream = self.stream()
        x = np.concatenate([_block(text) for text in self.options["values"].split("|")], axis=1)
        treatments = (
            "dialect=ocp", "dialect=amd", "dialect=nvidia", "scale_rule=ceil", "rounding=rna", "rounding=rtz",
            "rounding=sr", "rounding=sr, sr_bits=8", "rounding=sr, sr_bits=22", "rounding=sr, prescale=true",
            "dialect=amd, hadamard=16", "dialect=amd, hadamard=32, signs=fixed",
        )  # fmt: skip
        arrays = [quantize(x, spec_of(text), placement=Placement(stream)) for text in treatments]
        if len({q.codes.tobytes() + q.scales.tobytes() for q in arrays}) < len(arrays):
            raise self.error("two treatments give the same bytes: choose blocks that tell them apart")
        rows = [
            [[_code(text)] + ([_after("sign id 6")] if "signs" in text else []), _stored(q)]
            for text, q in zip(treatments, arrays, strict=True)
        ]
        zeros, spoiled = np.zeros((1, MXFP4.k), np.float32), x[:, : MXFP4.k].copy()
        zeros[0, 1::2] = -0.0
        spoiled[0, 5] = np.nan
        tile = np.ldexp(x[:, : MXFP4.k], -np.arange(MXFP4.k)[:, None]).astype(np.float32)
        special = [
            ("+0 and -0 in turn", zeros, "dialect=ocp"),
            ("+0 and -0 in turn", zeros, "dialect=amd"),
            ("+0 and -0 in turn", zeros, "hadamard=32"),
            ("block 0, element 5 a NaN", spoiled, "dialect=ocp"),
        ]
        others = [
            [name, f"`{text}", _stored(quantize(values, spec_of(text)))] for name, values, text in special
        ]
        q = quantize(tile, spec_of("block=32x32"))
        others += [
            [f"row {i} of a tile: block 0 times 2^{-i}", "`block=32x32", [_code(_bytes(q, i, 0))]]
            for i in (0, 1, 3)
        ]
        head = ["treatment", "byte and codes of blocks 0, 1 and 2"]
        return [
            *(self._words(i, block) for i, block in enumerate(x.reshape(-1, MXFP4.k))),
            self.stream_line("; row 0, L = 96"),
            table(head, rows, ["numbers"]),
            _after(
                "Special blocks, one row of one block each; the tile's 32 rows all have the byte of row 0."
            ),
            table(["input", "treatment", "byte and codes"], others, ["numbers"]),
        ]

    @staticmethod
    def _words(i: int, block: NDArray[np.float32]) -> nodes.literal_block:
        words = f"block {i}: " + " ".join(f"{int(w):08x}" for w in block.view(np.uint32))
        return nodes.literal_block(words, words, classes=["wrap"], language="none")


def _code(text: str) -> nodes.paragraph:
    return nodes.paragraph("", "", nodes.literal("", text))


def _bytes(q: MXArray, row: int, block: int) -> str:
    half = MXFP4.k // 2
    return f"{q.scales[row, block]:02x}  {q.codes[row, block * half : (block + 1) * half].tobytes().hex()}"


def _stored(q: MXArray) -> list[nodes.Node]:
    return [_code(_bytes(q, 0, block)) for block in range(q.scales.shape[1])]
