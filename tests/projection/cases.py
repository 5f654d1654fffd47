"""A machine, a model and kernels whose times can be computed by hand, and the recorded counts."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from bench.records import newest, read
from mxref_training.config import ModelConfig
from places import ROOT
from projection import counted
from projection.__main__ import projection_of
from projection.assumptions import Assumption, Assumptions, Machine, Peak
from projection.step import ARMS, Workload

DOCS = ROOT / "docs"
COUNTS = newest("projection")
DOCUMENT = read(COUNTS)
PROJECTION = projection_of(DOCUMENT)


def peak(value):
    return Peak(value, "", "", "")


def certain(value):
    return Assumption(value, value, value, "")


# One lane operation, one byte and one FP4 FLOP a second: seconds are amounts.
UNIT = Machine(**{f.name: peak(1.0) for f in fields(Machine)})
ALL_OF_IT = Assumptions(**{f.name: certain(1.0) for f in fields(Assumptions)})
FULL = replace(
    ALL_OF_IT, residual_bytes=certain(4), logit_bytes=certain(6), gradient_bytes=certain(4),
    parameter_bytes=certain(2), hidden_share=certain(0.75), shared_inputs=certain(0),
)  # fmt: skip

TINY = Workload(
    ModelConfig(layers=2, width=8, heads=2, kv_heads=1, ffn=16, vocab=32, max_seq=4),
    batch=4, seq_len=4, cards=2, micro_batch=1,
)  # fmt: skip

WEIGHTS = 2 * (2 * 8 * 8 + 2 * 4 * 8 + 3 * 8 * 16)  # q o, k v, gate up down
PARAMETERS = WEIGHTS + 2 * 32 * 8 + (2 * 2 + 1) * 8


def record(case, alu, kernel="quantize_both", **more):
    found = {
        "case": case, "target": "gfx950", "kernel": kernel, "elements_per_thread": 64.0, "alu": alu, "loop_alu": 0,
        "loop_matrix": 0, "occupancy": 4, "spills": 0, "vgpr": 64, "multiply32": 0, "notable": [],
    }  # fmt: skip
    return found | more


# 10 operations per element for X and dY, and 1 for W, whose 5.0625 bytes then bind.
RECORDS = [
    record(counted.case_name(tensor, rotation, native), 640 if tensor == "x" else 64)
    for tensor in counted.TENSORS
    for rotation in counted.TREATMENTS
    for native in (True, False)
]


def arm(key):
    return next(a for a in ARMS if a.key == key)
