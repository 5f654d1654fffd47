"""Reads the assembly text of one compiled kernel: its instructions, its labels and what its descriptor says.

Nothing here knows what an instruction does. Every token of a line must be understood: a modifier, a register
or a directive of the descriptor that is not listed here raises Gfx950Error with the line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache, lru_cache

from gfx950.errors import Gfx950Error
from gfx950.operands import Operand, parse_operand


@dataclass(frozen=True)
class Instruction:
    """One line: `name` without its encoding suffix, `form` that suffix (e32, e64, sdwa, dpp or empty)."""

    name: str
    form: str
    operands: tuple[Operand, ...]
    modifiers: dict[str, object]
    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"


@dataclass(frozen=True)
class Argument:
    """One kernel argument in the kernarg segment; offset and size in bytes."""

    offset: int
    size: int
    kind: str


@dataclass
class Program:
    """A kernel: `entry` is where a launch with preloaded arguments begins, 256 bytes behind the start."""

    name: str = ""
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    entry: int = 0
    descriptor: dict[str, int] = field(default_factory=dict)
    arguments: list[Argument] = field(default_factory=list)
    threads: int = 0


FORMS = ("e32", "e64", "sdwa", "dpp")
FLAGS = frozenset({"clamp", "offen", "idxen", "off", "glc", "slc", "sc0", "sc1", "nt", "gds", "lds"})
NUMBERS = frozenset(
    {
        *("offset", "offset0", "offset1", "row_mask", "bank_mask", "bound_ctrl", "bitop3", "mul", "div"),
        *("row_shl", "row_shr", "row_ror", "row_bcast", "row_newbcast", "wave_shl", "wave_rol", "wave_shr"),
        *("wave_ror", "cbsz", "abid", "blgp"),
    }
)
LISTS = frozenset({"op_sel", "op_sel_hi", "neg_lo", "neg_hi", "quad_perm"})
NAMES = frozenset({"dst_sel", "dst_unused", "src0_sel", "src1_sel"})
BARE_DPP = frozenset({"row_mirror", "row_half_mirror"})

LABEL = re.compile(r"^([.\w$]+):")
MODIFIER = re.compile(r"^(\w+)(?::(.*))?$")


def split_operands(text: str) -> list[str]:
    """Split at commas and spaces outside brackets; `swizzle(...)` and `hwreg(...)` stay whole."""
    pieces, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "[(") - (c in "])")
        if c in ", \t" and depth == 0:
            pieces.append(text[start:i])
            start = i + 1
    pieces.append(text[start:])
    return [p for p in pieces if p]


@cache
def parse_modifier(piece: str) -> tuple[str, object] | None:
    """Return (name, value) if `piece` is a modifier, None if it is an operand."""
    match = MODIFIER.match(piece)
    if match is None:
        return None
    name, value = match.groups()
    if value is None:
        return (name, True) if name in FLAGS or name in BARE_DPP else None
    if name == "offset" and value.startswith("swizzle("):
        return "swizzle", value[len("swizzle(") : -1].replace(" ", "")
    if name in NUMBERS:
        return name, int(value, 0)
    if name in LISTS:
        return name, tuple(int(v) for v in value.strip("[]").split(","))
    if name in NAMES:
        return name, value
    return None


def parse_instruction(text: str, line: int) -> Instruction:
    """Return the instruction on one line of assembly, comments removed."""
    mnemonic, _, rest = text.strip().partition(" ")
    name, form = mnemonic, ""
    for suffix in FORMS:
        if mnemonic.endswith("_" + suffix):
            name, form = mnemonic.removesuffix("_" + suffix), suffix
    operands: list[Operand] = []
    modifiers: dict[str, object] = {}
    if name == "s_waitcnt":
        return Instruction(name, form, (), {}, line, text.strip())
    for piece in split_operands(rest):
        modifier = parse_modifier(piece)
        if modifier is not None:
            modifiers[modifier[0]] = modifier[1]
            continue
        operand = parse_operand(piece)
        if operand is None:
            raise Gfx950Error(f"line {line}: {text.strip()}: operand or modifier {piece!r} is not modelled")
        operands.append(operand)
    return Instruction(name, form, tuple(operands), modifiers, line, text.strip())


IGNORED_DIRECTIVES = re.compile(
    r"^\.(loc|file|cfi_\w+|p2alignl?|globl|type|size|section|text|set|fill|amdgcn_target|weak|protected|ident"
    r"|amdhsa_code_object_version|addrsig|addrsig_sym|hidden)\b"
)


@lru_cache(maxsize=64)
def parse(text: str) -> Program:
    """Return the only kernel of an assembly text as the compiler prints it; nobody changes a program."""
    program = Program()
    in_code = in_descriptor = aligned = False
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split(";")[0].split("//")[0].strip()
        if not line:
            continue
        if line.startswith(".amdgpu_metadata"):
            break
        if match := re.match(r"^\.type\s+(\w+),@function", line):
            if program.name:
                raise Gfx950Error(
                    f"line {number}: a second function {match[1]}; one kernel a text is modelled"
                )
            program.name = match[1]
        elif line.startswith(".amdhsa_kernel"):
            in_descriptor, in_code = True, False
        elif line == ".end_amdhsa_kernel":
            in_descriptor = False
        elif in_descriptor:
            key, value = line.removeprefix(".amdhsa_").split(None, 1)
            program.descriptor[key] = int(value, 0)
        elif match := LABEL.match(line):
            in_code = in_code or match[1] == program.name != ""
            program.labels[match[1]] = len(program.instructions)
        elif in_code and line.startswith(".p2align") and not aligned:
            program.entry, aligned = len(program.instructions), True
        elif in_code and not line.startswith("."):
            program.instructions.append(parse_instruction(line, number))
        elif in_code and not IGNORED_DIRECTIVES.match(line):
            raise Gfx950Error(f"line {number}: directive {line!r} inside the code is not modelled")
    if not program.instructions:
        raise Gfx950Error("no kernel in this text; pass the compiled kernel's .asm['amdgcn']")
    parse_metadata(text.partition(".amdgpu_metadata")[2], program)
    return program


def parse_metadata(text: str, program: Program) -> None:
    """Fill in the arguments and the workgroup size from the kernel's metadata (a small YAML)."""
    found: list[dict[str, str]] = []
    in_arguments = False
    for line in text.splitlines():
        if re.match(r"^\s*(- )?\.args:", line):
            in_arguments = True
        elif in_arguments and (match := re.match(r"^\s{6}(- )?\s*\.(\w+):\s*(\S+)", line)):
            if match[1]:
                found.append({})
            found[-1][match[2]] = match[3]
        elif match := re.match(r"^\s+\.max_flat_workgroup_size:\s*(\d+)", line):
            program.threads = int(match[1])
        elif line.startswith("    ."):
            in_arguments = False
    program.arguments = [Argument(int(a["offset"]), int(a["size"]), a["value_kind"]) for a in found]
