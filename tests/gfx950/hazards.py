"""Wait states that the hardware does not insert itself, checked on neighbouring instructions of the text.

On gfx950 a vector instruction that writes only a byte or a half of a register (SDWA, op_sel on the destination,
the scaled FP4 and FP8 conversions), and a transcendental one, must not be followed at once by a vector
instruction that reads that register; writing another byte of it reads it too. A scalar instruction that writes M0
must not be followed at once by a load into the LDS, which reads it. Any instruction between, an
`s_nop 0` at least, is enough. Compilers insert it, but not around inline assembly.
"""

from __future__ import annotations

from gfx950.assembly import Instruction, Program
from gfx950.errors import Gfx950Error
from gfx950.operands import M0, Operand

TRANSCENDENTAL = ("v_exp_", "v_log_", "v_rcp_", "v_rsq_", "v_sqrt_", "v_sin_", "v_cos_")
BYTE_SELECTED = (
    "v_cvt_scalef32_pk_fp4_",
    "v_cvt_scalef32_sr_pk_fp4_",
    "v_cvt_scalef32_pk_fp8_",
    "v_cvt_pk_fp8_",
)


def writes_part(instruction: Instruction) -> bool:
    """Return whether the instruction writes only part of its destination register."""
    if instruction.form == "sdwa":
        return instruction.modifiers.get("dst_sel", "DWORD") != "DWORD"
    if instruction.name.startswith(BYTE_SELECTED):
        return True
    halves = instruction.modifiers.get("op_sel")
    sources = len(instruction.operands) - 1
    is_packed = instruction.name.startswith("v_pk_")
    return not is_packed and isinstance(halves, tuple) and len(halves) > sources and bool(halves[sources])


def reads(instruction: Instruction, register: int) -> bool:
    """Return whether a vector instruction reads v<register>, the kept part of its own destination included."""
    keeps = writes_part(instruction) or instruction.name.startswith(("v_fmac", "v_dot"))
    operands = instruction.operands if keeps else instruction.operands[1:]
    return any(o.kind == "v" and o.index <= register < o.index + o.count for o in operands)


def check_hazards(program: Program) -> None:
    """Raise if a result is read one instruction too early."""
    for first, second in zip(program.instructions, program.instructions[1:], strict=False):
        if (
            second.modifiers.get("lds")
            and first.name.startswith("s_")
            and Operand("s", M0) in first.operands[:1]
        ):
            raise Gfx950Error(f"{second}: reads m0 right after {first.text!r}; s_nop 0 is missing")
        if not (first.name.startswith("v_") and second.name.startswith("v_") and first.operands):
            continue
        slow = first.name.startswith(TRANSCENDENTAL) and not second.name.startswith(TRANSCENDENTAL)
        if not slow and not writes_part(first):
            continue
        written = first.operands[0]
        if written.kind == "v" and reads(second, written.index):
            raise Gfx950Error(
                f"{second}: reads v{written.index} right after {first.text!r}; s_nop 0 is missing"
            )
