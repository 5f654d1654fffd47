"""Instruction counts behind the projection: training's own quantizations, and tables of `aot`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import triton

from mxref.errors import BackendError, FileFormatError
from mxref.formats import E2M1, MXFP6_E2M3
from mxref.recipe import OperandSpec
from mxref.steps.rounding import Rounding
from mxref.steps.scale import ScaleRule

TARGET = "gfx950"
ROTATIONS = {"plain": 0, "h16": 16, "h32": 32}
"""Sizes of Hadamard transforms by name, 0 for none."""
MX64 = "mx64"
"""The operands of Fprop in MXFP6 E2M3, and in the other orientation MXFP4 with H16."""
TREATMENTS = (*ROTATIONS, MX64)
TENSORS = {"x": ("bfloat16", (16384, 4096)), "w": ("float32", (4096, 4096))}
"""What a linear layer quantizes in both orientations, and its type: X and dY, and the float32 weight."""

_OTHERS = frozenset({"mxfp8", "e3m2", "e2m3", "e1m2"})
"""Words of the cases of other formats."""

KernelCounts = Mapping[str, Any]
"""What is counted of one compiled kernel, as `aot` writes it."""

_TESTS = str(Path(__file__).parents[1])
"""Where this package is found by the process that compiles."""

# Importing the backend fixes what a wavefront is, so torch has to answer for the machine before that.
_WORKER = """
import sys, torch
torch.version.hip = "ahead of time"
from aot import absent
absent.become(absent.MACHINES[sys.argv[1]])
from projection import counted
counted.compile_here(int(sys.argv[2]))
"""


def case_name(tensor: str, treatment: str, native: bool) -> str:
    """Return the name of one of training's quantizations."""
    return f"train.{tensor}.{treatment}{'.native' if native else ''}"


def operands(treatment: str) -> tuple[OperandSpec, OperandSpec]:
    """Return how one of `TREATMENTS` quantizes a tensor along its rows and along its columns."""
    if treatment == MX64:
        return OperandSpec(MXFP6_E2M3, scale_rule=ScaleRule.EVEN), operands("h16")[1]
    spec = OperandSpec(scale_rule=ScaleRule.EVEN, hadamard=ROTATIONS[treatment])
    return spec, spec


def compile_here(jobs: int) -> None:
    """Compile training's quantizations in a process that became the machine; a line of JSON per case on stdout."""
    import torch

    from aot import absent, worker
    from aot.table import CompiledCase

    def both(treatment: str, dtype: str, shape: tuple[int, int], backend: Any) -> object:
        x = torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
        return backend.quantize_dual(x, operands(treatment))

    cases = [
        CompiledCase(
            case_name(tensor, treatment, native),
            partial(both, treatment, dtype, shape),
            shape[0] * shape[1],
            # The projection knows what a conversion of two values to E2M1 takes, and not what one of 32 to 6 bits does.
            frozenset({(E2M1, Rounding.RNE)} if native else ()),
        )
        for tensor, (dtype, shape) in TENSORS.items()
        for treatment in TREATMENTS
        for native in (True, False)
    ]
    for result in worker.results(cases, absent.MACHINES[TARGET], jobs, None):
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


def compile_training(jobs: int) -> list[dict[str, Any]]:
    """Return the records of training's quantizations for gfx950, compiled now, with no GPU.

    Raises:
        BackendError: a kernel did not compile.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    # A process with threads must not fork, and a BLAS starts them when it is loaded.
    environment |= {"PYTHONPATH": os.pathsep.join([_TESTS, *filter(None, [os.environ.get("PYTHONPATH")])])}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as words:
        run = subprocess.run(
            [sys.executable, "-c", _WORKER, TARGET, str(jobs)],
            stdout=subprocess.PIPE, stderr=words, env=environment, text=True, check=False,
        )  # fmt: skip
        words.seek(0)
        last = " ".join(words.read().strip().splitlines()[-3:])
    # Compilers print too.
    answers = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    failures = [f"{a['case']}: {a['error']}" for a in answers if "error" in a]
    if run.returncode or failures or not answers:
        why = failures[0] if failures else f"exit code {run.returncode}: {last}"
        raise BackendError(f"compiling training's kernels for {TARGET} failed: {why}")
    return [record for answer in answers for record in answer["records"]]


def document(counts: Path | None, jobs: int) -> dict[str, Any]:
    """Return counts as one document: a file's gfx950 records, and training's, compiled now if it has none.

    Args:
        counts: JSON of `python -m aot --json` or of this command; None compiles training's alone.
        jobs: compilers at a time.

    Raises:
        FileFormatError: not such a file.
        BackendError: a kernel did not compile.
    """
    source = _read(counts) if counts else {"triton": triton.__version__, "records": []}
    # Kernels of other formats are not projected alone; training's quantization of `mx64` is counted as `train.`
    records = [short(r) for r in source["records"] if r["target"] == TARGET and _is_mxfp4(r["case"])]
    date = source.get("date", datetime.now(UTC).date().isoformat())
    if not any(r["case"].startswith("train.") for r in records):
        if source["triton"] != triton.__version__:
            raise FileFormatError(
                f"{counts}: counted by Triton {source['triton']}, and this is {triton.__version__}; "
                "count both with one: python -m aot --json FILE"
            )
        records += [short(r) for r in compile_training(jobs)]
    return {
        "date": date,
        "triton": source["triton"],
        "records": sorted(records, key=lambda r: (r["case"], r["kernel"])),
    }


def _is_mxfp4(case: str) -> bool:
    """Return whether a case of `aot` computes in MXFP4."""
    return not _OTHERS.intersection(case.split("."))


def _read(path: Path) -> dict[str, Any]:
    wanted = "JSON of `python -m aot --json FILE` or of this command"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise FileFormatError(f"{path}: {err}; give the {wanted}") from None
    if not isinstance(found, dict) or not {"triton", "records"} <= found.keys():
        raise FileFormatError(f"{path} has no counts in it; give the {wanted}")
    return found


def short(record: KernelCounts) -> dict[str, Any]:
    """Return of a record what the projection reads."""
    kept = (
        "case",
        "target",
        "kernel",
        "elements_per_thread",
        "alu",
        "loop_alu",
        "loop_matrix",
        "occupancy",
        "spills",
    )
    found = {key: record[key] for key in kept}
    return found | {
        "vgpr": record["vgpr"] if "vgpr" in record else record["registers"]["vgpr"],
        "multiply32": record["multiply32"] if "multiply32" in record else record["pipes"]["multiply32"],
        "notable": list(record["notable"]),
    }


def one(records: Sequence[KernelCounts], case: str) -> KernelCounts:
    """Return the record of a case; FileFormatError if there is none, or more than one."""
    found = [r for r in records if r["case"] == case]
    if len(found) != 1:
        raise FileFormatError(
            f"the counts have {len(found)} kernels of case {case!r}, and one is needed; count again"
        )
    return found[0]
