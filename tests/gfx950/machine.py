"""Executes compiled gfx950 kernels in a software model.

What it is: an interpreter, in NumPy, of the assembly text that a compiler for gfx950 (CDNA4) wrote. A test
compiles a kernel ahead of time, without a GPU, runs the text here on host arrays, and compares the result with
the reference bit for bit. That catches what the compiler did to the kernel (wrong operations in the source,
contraction, lost carries, wrong masks), but it is a model written from the public ISA documents, not the
hardware: say "executed in a software model".

How it works. assembly.py turns the text into instructions. registers.py holds the registers of ALL waves of the
launch, [register, wave, 64], and one instruction is executed for all waves that are at it, in one NumPy
operation each (`Group`). Waves part at branches: each has its program counter, the waves at the lowest one run
next, so they meet again where the paths join. A wave at s_barrier waits for its workgroup.

    sources.py      input and output modifiers, DPP, SDWA    valu_tables.py, valu.py, packed.py  vector arithmetic
    floats.py       IEEE details                             crosslane.py, lanes.py   between lanes; lane maps
    memory.py       buffers with guards, LDS                 salu.py                  scalar arithmetic
    hazards.py      missing wait states                      vmem.py, lds.py          loads and stores
    driver.py       a Triton device that is this model       fp4.py, fp6.py, mfma.py  4 and 6 bits; matrices

What is checked besides the results: every access lies inside a buffer (or is dropped by a buffer descriptor's
own bounds), guard bytes stay intact, registers and LDS that nothing wrote hold poison, the wait states that the
hardware does not insert are there (hazards.py). What is not modelled raises Gfx950Error with the line: unknown
instructions and modifiers, inexact transcendental functions, matrix sums whose order could matter, stochastic
rounding by hardware, scratch memory, atomics but the sum and the maximum of 32-bit integers, loads into half
registers. Time, caches, s_waitcnt, races and the payloads of NaNs are not modelled: instructions complete in order.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gfx950 import crosslane, fp4, fp6, mfma, packed, salu, valu, vmem
from gfx950 import lds as lds_module
from gfx950.assembly import Instruction, Program, parse
from gfx950.errors import Gfx950Error
from gfx950.hazards import check_hazards
from gfx950.memory import Lds, Memory
from gfx950.registers import LANES, Choices, Group, Registers

ARITHMETIC = (
    valu.HANDLERS
    | packed.HANDLERS
    | crosslane.HANDLERS
    | salu.HANDLERS
    | fp4.HANDLERS
    | fp6.HANDLERS
    | mfma.HANDLERS
)
MEMORY = vmem.HANDLERS | lds_module.HANDLERS
NOTHING = frozenset(
    {
        *("s_nop", "s_waitcnt", "s_sleep", "s_setprio"),
        *("buffer_wbl2", "buffer_inv", "s_icache_inv", "s_dcache_wb"),
    }
)
BRANCHES = {
    "s_branch": None, "s_cbranch_scc0": ("scc", False), "s_cbranch_scc1": ("scc", True),
    "s_cbranch_vccz": ("vccz", True), "s_cbranch_vccnz": ("vccz", False),
    "s_cbranch_execz": ("execz", True), "s_cbranch_execnz": ("execz", False),
}  # fmt: skip
CONTROL = frozenset({*BRANCHES, "s_barrier", "s_endpgm"})
USER_SGPRS = {"dispatch_ptr": 2, "queue_ptr": 2, "kernarg_segment_ptr": 2, "dispatch_id": 2}
"""What a descriptor may ask for in the first scalar registers, in the order in which they lie, and how many each takes.

The source is the table of user SGPRs in LLVM's user guide for the AMDGPU backend, "Initial Kernel Execution State".
Only the pointer to the arguments is modelled. The others hold poison, at which no buffer is.
"""

Argument = np.ndarray | int | float | None


@dataclass(frozen=True)
class Run:
    """What a launch did: instructions executed, counted per group of waves, and waves."""

    steps: int
    waves: int


def known(instruction: Instruction) -> bool:
    """Return whether the model has the instruction."""
    name = instruction.name
    return name in ARITHMETIC or name in MEMORY or name in NOTHING or name in CONTROL


class Machine:
    """One launch of one program."""

    def __init__(self, program: Program, grid: tuple[int, int, int], shared: int) -> None:
        self.program = program
        for instruction in program.instructions:
            if not known(instruction):
                raise Gfx950Error(f"{instruction}: instruction {instruction.name} is not modelled")
        check_hazards(program)
        self.per_group = program.threads // LANES
        self.workgroups = math.prod(grid)
        waves = self.per_group * self.workgroups
        descriptor = program.descriptor
        vgprs = descriptor["next_free_vgpr"]
        offset = min(descriptor.get("accum_offset", vgprs), vgprs)
        self.state = Registers(waves, offset, vgprs - offset)
        self.state.denorm32 = descriptor["float_denorm_mode_32"]
        self.state.denorm16 = descriptor["float_denorm_mode_16_64"]
        self.state.workgroup = np.arange(waves) // self.per_group
        fixed = descriptor["group_segment_fixed_size"]
        self.lds = Lds(self.workgroups, max(shared, fixed), 0xA5)
        self.memory = Memory()
        self.grid = grid
        self.running = np.ones(waves, bool)
        self.waiting = np.zeros(waves, bool)
        self.steps = 0

    def set_up(self, kernarg: np.ndarray, *, preload: bool) -> None:
        """Write the registers that a launch writes."""
        descriptor, state = self.program.descriptor, self.state
        address = self.memory.add(kernarg, writable=False)
        next_sgpr = 0
        for name, registers in USER_SGPRS.items():
            if name == "kernarg_segment_ptr":
                state.sgpr[next_sgpr], state.sgpr[next_sgpr + 1] = address & 0xFFFFFFFF, address >> 32
            next_sgpr += registers * descriptor.get(f"user_sgpr_{name}", 0)
        count = descriptor.get("user_sgpr_kernarg_preload_length", 0)
        if preload and count:
            first = descriptor.get("user_sgpr_kernarg_preload_offset", 0)
            state.sgpr[next_sgpr : next_sgpr + count] = kernarg.view(np.uint32)[first : first + count, None]
            state.pc[:] = self.program.entry
        next_sgpr = descriptor["user_sgpr_count"]
        x, y, _ = self.grid
        number = state.workgroup
        for axis, values in (("x", number % x), ("y", number // x % y), ("z", number // (x * y))):
            if descriptor[f"system_sgpr_workgroup_id_{axis}"]:
                state.sgpr[next_sgpr] = values
                next_sgpr += 1
        # Bits 10 and up hold the indices along y and z, which are 0: workgroups are modelled along x alone.
        wave = np.arange(len(state.pc)) % self.per_group
        state.vgpr[0] = wave[:, None] * LANES + np.arange(LANES)

    def run(self, limit: int) -> None:
        """Run until every wave has ended."""
        with np.errstate(all="ignore"):
            while self.running.any():
                ready = self.running & ~self.waiting
                if not ready.any():
                    self._release()
                    continue
                counters = self.state.pc[ready]
                start = int(counters.min())
                rest = counters[counters > start]
                stop = int(rest.min()) if len(rest) else len(self.program.instructions)
                chosen = ready & (self.state.pc == start)
                group = Group(self.state, slice(None) if chosen.all() else np.flatnonzero(chosen))
                self._straight(group, start, stop)
                if self.steps > limit:
                    raise Gfx950Error(f"more than {limit} instructions; an endless loop?")

    def _release(self) -> None:
        """Resume each workgroup whose running waves all wait at its barrier."""
        blocked = self.waiting | ~self.running
        full = np.logical_and.reduceat(blocked, np.arange(0, len(blocked), self.per_group))
        self.waiting &= ~np.repeat(full, self.per_group)

    def _straight(self, group: Group, start: int, stop: int) -> None:
        """Run instructions until one moves the program counter, or other waves can join."""
        instructions = self.program.instructions
        for position in range(start, stop):
            instruction = instructions[position]
            name = instruction.name
            self.steps += 1
            try:
                if name in ARITHMETIC:
                    ARITHMETIC[name](group, instruction)
                elif name in MEMORY:
                    MEMORY[name](group, instruction, self.memory, self.lds)
                elif name in CONTROL:
                    self._control(group, instruction, position)
                    return
            except (Gfx950Error, ValueError, KeyError, IndexError, TypeError) as error:
                raise Gfx950Error(f"{instruction}: {error}") from error
        if stop == len(instructions):
            raise Gfx950Error("the program ran past its last instruction")
        self.state.pc[group.chosen] = stop

    def _control(self, group: Group, instruction: Instruction, position: int) -> None:
        chosen, state = group.chosen, self.state
        state.pc[chosen] = position + 1
        if instruction.name == "s_endpgm":
            self.running[chosen] = False
        elif instruction.name == "s_barrier":
            self.waiting[chosen] = True
        else:
            target = self.program.labels[str(instruction.operands[0].value)]
            condition = BRANCHES[instruction.name]
            taken = (
                np.ones(group.count, bool)
                if condition is None
                else group.status(condition[0]) == condition[1]
            )
            state.pc[chosen] = np.where(taken, target, position + 1)


REQUIRED = {
    "private_segment_fixed_size": 0, "float_round_mode_32": 0, "float_round_mode_16_64": 0, "dx10_clamp": 1,
    "fp16_overflow": 0, "ieee_mode": 1, "tg_split": 0, "uses_dynamic_stack": 0,
    "user_sgpr_private_segment_size": 0, "user_sgpr_kernarg_segment_ptr": 1,
    "system_sgpr_workgroup_info": 0, "enable_private_segment": 0,
}  # fmt: skip


HIDDEN = {f"hidden_block_count_{axis}": number for number, axis in enumerate("xyz")}
"""Arguments that the runtime adds and that are modelled: which part of the grid they hold. Others hold poison."""


def pack_arguments(
    program: Program, args: Sequence[Argument], memory: Memory, grid: tuple[int, int, int]
) -> np.ndarray:
    """Return the kernarg segment; missing trailing pointers (Triton's scratch buffers) are null."""
    size = max((a.offset + a.size for a in program.arguments), default=0)
    segment = bytearray(-(-size // 64) * 64)
    if len(args) > len(program.arguments):
        raise Gfx950Error(f"{len(args)} arguments for a kernel that takes {len(program.arguments)}")
    for number, where in enumerate(program.arguments):
        value = args[number] if number < len(args) else None
        if where.kind in HIDDEN:
            value = grid[HIDDEN[where.kind]]
        elif where.kind.startswith("hidden_"):
            value = int.from_bytes(b"\xa5" * where.size)
        elif value is None and where.kind != "global_buffer":
            raise Gfx950Error(f"argument {number} ({where.kind}, {where.size} bytes) is missing")
        if isinstance(value, np.ndarray):
            # Alignment decides which instructions a compiler may use, so it stays what it is.
            data = memory.add(value, misalign=value.ctypes.data % 256).to_bytes(8, "little")
        elif isinstance(value, float):
            data = struct.pack("<f" if where.size == 4 else "<d", value)
        else:
            data = (int(value or 0) & ((1 << 8 * where.size) - 1)).to_bytes(where.size, "little")
        if len(data) != where.size:
            raise Gfx950Error(f"argument {number} takes {where.size} bytes, got {len(data)}")
        segment[where.offset : where.offset + where.size] = data
    return np.frombuffer(bytes(segment), np.uint8)


def run_compiled(
    assembly: str,
    grid: tuple[int, ...],
    args: Sequence[Argument],
    num_warps: int | None = None,
    *,
    shared: int = 0,
    preload: bool = True,
    choices: Choices | None = None,
    limit: int = 10_000_000,
) -> Run:
    """Execute a compiled kernel on host arrays, which are changed in place.

    Args:
        assembly: the kernel's amdgcn text.
        grid: workgroups along x, y, z.
        args: NumPy arrays for pointers, numbers for the rest, in the order of the signature without constants.
        num_warps: waves per workgroup; checked against the text.
        shared: bytes of LDS per workgroup (the compiler's metadata has it, the text does not).
        preload: whether arguments arrive in scalar registers, as new firmware does, or are loaded first.
        choices: what the hardware does where public texts do not say; None is as `Choices` says.
        limit: instructions after which a launch is taken to hang.

    Raises Gfx950Error where the model refuses, naming the line.
    """
    program = parse(assembly)
    for name, wanted in REQUIRED.items():
        if program.descriptor.get(name, wanted) != wanted:
            raise Gfx950Error(f".amdhsa_{name} {program.descriptor[name]} is not modelled")
    if num_warps is not None and num_warps * LANES != program.threads:
        raise Gfx950Error(
            f"{num_warps} waves asked for, the text has workgroups of {program.threads} threads"
        )
    x, y, z = (*grid, 1, 1)[:3]
    machine = Machine(program, (x, y, z), shared)
    machine.state.choices = choices or Choices()
    machine.set_up(pack_arguments(program, args, machine.memory, (x, y, z)), preload=preload)
    machine.run(limit)
    machine.memory.finish()
    return Run(machine.steps, len(machine.running))
