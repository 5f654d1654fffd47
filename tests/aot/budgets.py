"""Goals and budgets: what compiled kernels may cost, and which instructions they must or must not have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mxref.errors import RecipeError
from mxref.tomlio import build, read_toml

PATH = Path(__file__).parent / "budgets.toml"


@dataclass(frozen=True)
class KernelBudget:
    """Limits for the kernels that its patterns match; every budget that matches holds."""

    case: str
    """Pattern of case names, as in a shell."""
    kernel: str = "*"
    """Pattern of kernel names."""
    target: str = "*"
    """Pattern of machines."""
    max_spills: int | None = None
    """Registers."""
    max_scratch: int | None = None
    """Bytes per thread."""
    max_shared: int | None = None
    """Bytes of LDS or shared memory."""
    max_vgpr: int | None = None
    """Vector registers, both kinds together."""
    min_occupancy: int | None = None
    """Waves per SIMD, or warps per SM."""
    max_alu: float | None = None
    """Vector ALU instructions per element."""
    max_loop_alu: float | None = None
    """Vector ALU instructions per matrix instruction, in the loop."""
    max_chained: int | None = None
    """Matrix instructions that add to something other than 0."""
    required: tuple[str, ...] = ()
    """Beginnings of mnemonics that must occur; in the loop, if there is one."""
    forbidden: tuple[str, ...] = ()
    """Beginnings of mnemonics that must not occur."""

    def matches(self, record: Mapping[str, Any]) -> bool:
        """Return whether the budget applies to a kernel."""
        return all(fnmatchcase(record[key], getattr(self, key)) for key in ("case", "kernel", "target"))

    def excesses(self, record: Mapping[str, Any]) -> Iterator[str]:
        """Yield the limits that a kernel exceeds, each with the kernel's number."""
        vgpr = record["registers"].get("vgpr", 0) + record["registers"].get("agpr", 0)
        upper = {
            "max_spills": record["spills"],
            "max_scratch": record["scratch"],
            "max_shared": record["shared"],
            "max_vgpr": vgpr,
            "max_alu": alu_per_element(record),
            "max_loop_alu": record["loop_alu"] / max(1, record["loop_matrix"]),
            "max_chained": record["chained"],
        }
        for key, value in upper.items():
            limit = getattr(self, key)
            if limit is None:
                continue
            if value is None:
                yield f"{key[4:]} is not counted"
            elif value > limit:
                yield f"{key[4:]} {value:.4g} > {limit:.4g}"
        if self.min_occupancy is not None and record["occupancy"] < self.min_occupancy:
            yield f"occupancy {record['occupancy']} < {self.min_occupancy}"
        where = record["loop_mnemonics"] or record["mnemonics"]
        for wanted in self.required:
            if not any(m.startswith(wanted) for m in where):
                yield f"no {wanted} in the {'loop' if record['loop_mnemonics'] else 'code'}"
        for banned in self.forbidden:
            if found := sorted(m for m in record["mnemonics"] if m.startswith(banned)):
                yield f"{found[0]} is there"


@dataclass(frozen=True)
class Budgets:
    """A file of limits."""

    counted_with: str
    """Release of Triton for which the budgets were counted."""
    goal: tuple[KernelBudget, ...]
    """Limits under every release."""
    budget: tuple[KernelBudget, ...]
    """Limits under `counted_with` only: other compilers count a little differently."""

    def enforced(self, triton: str) -> tuple[KernelBudget, ...]:
        """Return the limits that hold under a release."""
        return (*self.goal, *self.budget) if triton == self.counted_with else self.goal

    def waived(self, triton: str) -> tuple[KernelBudget, ...]:
        """Return the limits that need not hold under a release."""
        return () if triton == self.counted_with else self.budget


def alu_per_element(record: Mapping[str, Any]) -> float:
    """Return the vector ALU instructions that a thread has in its code, by the elements that it treats.

    All instructions count once, also those that a branch may skip. It means little for a kernel with a loop.
    """
    return float(record["alu"] / record["elements_per_thread"])


def read_budgets(path: Path = PATH) -> Budgets:
    """Return the goals and budgets of a file; FileFormatError or RecipeError names what is wrong with it."""
    return build(Budgets, read_toml(path), path.name)


def check(
    records: Sequence[Mapping[str, Any]], budgets: Sequence[KernelBudget], whole: bool = True
) -> list[str]:
    """Return one line per excess; empty if all budgets hold.

    Args:
        records: of all kernels that were compiled.
        budgets: goals, budgets, or both.
        whole: whether the whole table was compiled: a budget that matches nothing is an error then.

    Raises:
        RecipeError: a budget matches no kernel at all.
    """
    out = []
    for budget in budgets:
        mine = [r for r in records if budget.matches(r)]
        if whole and not mine:
            raise RecipeError(
                f"{PATH.name}: no kernel matches case {budget.case!r}, kernel {budget.kernel!r}, target "
                f"{budget.target!r}; take the budget out or name a case of the table"
            )
        for record in mine:
            name = f"{record['target']} {record['case']} {record['kernel']}"
            out += [f"{name}: {excess}" for excess in budget.excesses(record)]
    return out
