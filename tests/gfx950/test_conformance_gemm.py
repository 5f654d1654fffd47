"""The conformance suite's checks of the GEMM, on kernels as compiled for gfx950, executed in the model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import ModuleType

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton")
pytest.importorskip("torch", reason="the backend's arrays are torch tensors")

from gfx950.compare import BACKENDS
from gfx950.driver import on_model
from mxref.conformance import Level, checks_of
from mxref.conformance.checking import Subject
from mxref.conformance.suite import result_of
from mxref.gemm import OUT_DTYPES

pytestmark = pytest.mark.study

NOT_EXACT = (
    *("2^30 - 2^30 + 2^-10", "2^30 + 2^-10 - 2^30", "2^-10 + 2^30 - 2^30"),
    *("1 and sixteen half ulps", "3 half ulps and 1, both ways"),
    *("double rounding: 257 + 2^-40", "double rounding: 2^24 + 1 + 2^-40"),
    *(f"halves of {out}'s least, and a little" for out in ("float32", "bfloat16")),
    *("negative underflow", "zero after a negative underflow", "subnormal sums"),
    *(f"{out}: prescaled ({a}, {b})" for out in OUT_DTYPES for a, b in ((True, False), (False, True), (True, True))),
    *("heavy tails 0", "heavy tails 1"),
    *(f"heavy tails, K = {k}, scales to 252{end}" for k in (512, 4096) for end in ("", ", prescaled")),
    *("M, N, K = 5, 33, 96", "M, N, K = 65, 17, 64", ", along axis 0, padded"),
)  # fmt: skip
"""Ends of the titles of checks whose sums the model refuses: they depend on the order or the width of additions."""


def test_bounded_by_the_matrix_cores_where_sums_are_exact(package: dict[str, ModuleType]) -> None:
    """Every check but those, and but those that the backend does not declare: scale codes above 252."""
    refused: list[str] = []
    passed = 0
    with on_model() as launched:
        backend = package["backend"].TritonBackend(bounded="mfma", conversions="portable")
        checks = checks_of(backend.capabilities, ops=["gemm"], level=Level.QUICK, formats=["mxfp4"])
        subject = Subject(backend, shrink=False)
        for check in checks:
            if not check.title.startswith("bounded") or check.undeclared(backend.capabilities):
                continue
            failure = result_of(check, subject).failure
            if failure is None:
                passed += 1
                continue
            assert "order or width is not modelled" in failure.message, (check.title, failure)
            refused.append(check.title)
    assert passed > 80
    assert launched.count("_multiply") > 60
    unexpected = [title for title in refused if not title.endswith(NOT_EXACT)]
    needless = [end for end in NOT_EXACT if not any(title.endswith(end) for title in refused)]
    assert (unexpected, needless) == ([], [])


SUMS = ["gemm.nan", "gemm.ordered"]


@pytest.mark.parametrize("clauses", [SUMS, []])
def test_ordered_through_the_command(clauses: list[str]) -> None:
    """Operands of every size are folded, as those of large products are; `bounded` is PyTorch's product on the CPU.

    In a process of its own: the object that the command loads makes the model its device for good.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(BACKENDS.parent / "tests"), *sys.path]),
        "MXREF_TRITON_FOLD": "1",
    }
    command = [sys.executable, "-c", "from mxref.cli import main; main()", "conform", "--quick", "-v"]
    command += ["--backend", "gfx950.backend:backend", "--op", "gemm", "--format", "mxfp4"]
    command += [part for clause in clauses for part in ("--clause", clause)]
    process = subprocess.run(command, env=environment, timeout=250, capture_output=True, text=True)
    assert process.returncode == 0, (process.stdout + process.stderr)[-3000:]
    assert re.search(r"gemm\.ordered +passed +74", process.stdout)
