"""Faults that are planted in kernels have no proof, and a counterexample shows each."""

from __future__ import annotations

import re
import subprocess

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("bitwuzla", reason="bitwuzla is not installed")

from mxref.cli import main
from mxref.steps.random import Stream
from prove.certificates import decide
from prove.counterexamples import Counterexample
from prove.kernels import Compiled, cases
from prove.planted import flipped, one_integer, one_nan, rare, reordered
from prove.questions import NotProved
from prove.ttir import without_locations

EVEN, FLOOR, SR = "mxfp4.even.bfloat16", "mxfp4.floor.bfloat16", "mxfp4.floor.bfloat16.sr"
OTHER_SR, INTEGERS = "mxfp8_e4m3.floor.bfloat16.sr", "mxint8.floor.bfloat16"
H16, H32 = "mxfp4.even.bfloat16.h16", "mxfp4.even.bfloat16.h32"
PRESCALE = "mxfp4.floor.bfloat16.prescale"


def where(conditions, op="arith.minui", **more):
    return lambda text: flipped(without_locations(text), op, conditions, **more)


FAULTS = {
    "a tie goes the other way": ("gfx950", EVEN, ("0x4B000000", "0x4B000001")),
    "the scale is twice too small": ("gfx950", EVEN, ("dense<254>", "dense<255>")),
    "the rule's bound is one too high": ("gfx950", EVEN, ("dense<2097152>", "dense<2031616>")),
    "infinity counts as finite": ("gfx950", EVEN, ("dense<2139095040>", "dense<2139095041>")),
    "an element is left out of amax": (
        "gfx950", EVEN, (r"re:arith\.maximumf (%\w+), %\w+", r"arith.maximumf \1, \1"),
    ),
    "two words change places": ("gfx950", EVEN, (r"re:tt\.join (%\w+), (%\w+)", r"tt.join \2, \1")),
    "a code is not limited": (
        "gfx950", FLOOR, (r"re:arith\.subi (%codes\w*), %codes\w*", r"arith.ori \1, \1"),
    ),
    "packed arithmetic has another constant": ("sm_90", EVEN, ("dense<1124090624>", "dense<1124090625>")),
    "half a gap is one too small": ("gfx950", f"{FLOOR}.rna", ("dense<2097152>", "dense<2097151>")),
    "one pair in 2^64": ("gfx950", "mxfp4.rceil.float32", rare),
    "one payload of NaN": ("sm_90", EVEN, one_nan),
    "one lane of one program": ("gfx950", EVEN, where({"lane": 300, "program": 77})),
    "one lane": ("gfx950", FLOOR, where({"lane": 509})),
    "the factor of random words": ("gfx950", SR, ("3449720151", "3449720153")),
    "the other factor of random words": ("gfx950", SR, ("3528531795", "3528531793")),
    "one seed": ("gfx950", SR, where({"%10": 0x1234567, "%11": 0x7654321}, bit=21)),
    "one step and layer": ("gfx950", SR, where({"%12": 77 << 8 | 3, "%13": 100_000}, bit=21)),
    "one program under SR": ("gfx950", SR, where({"program": 3}, bit=21)),
    "the lowest random bit is lost": ("gfx950", SR, ("dense<4194240>", "dense<4194176>")),
    "SR adds one too much": ("gfx950", OTHER_SR, ("dense<4194240>", "dense<4194241>")),
    "one step of random integers": ("gfx950", SR, ("dense<22>", "dense<21>")),
    "one random integer of 2^16": ("gfx950", SR, one_integer),
    "a code of integers": ("gfx950", INTEGERS, where({"lane": 100}, "arith.maxui")),
    "integers above 127": ("gfx950", INTEGERS, ("dense<127>", "dense<128>")),
    "a difference the other way": (
        "gfx950", H16, (r"re:arith\.subf (%\w+), (%\w+)", r"arith.subf \2, \1"),
    ),
    "a sum of others": ("gfx950", H32, reordered),
    "the transform's norm": ("gfx950", H16, ("2.500000e-01", "5.000000e-01")),
    "another norm": ("gfx950", H32, ("0.176776692", "0.176776707")),
    "the prescale": ("gfx950", PRESCALE, ("7.500000e-01", "0x3F3FFFFF")),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_has_a_counterexample(compiled, fault, tmp_path, monkeypatch):
    target, name, change = FAULTS[fault]
    now = compiled(target, name)
    if callable(change):
        text = change(now.ttir)
    elif change[0].startswith("re:"):
        text = re.sub(change[0].removeprefix("re:"), change[1], now.ttir, count=1)
    else:
        text = now.ttir.replace(*change)
    assert text != now.ttir
    with pytest.raises(NotProved, match="mxref explain") as caught:
        list(decide(Compiled(name, target, now.kernel, text, []), {}))
    print(f"{fault}: {caught.value}")
    monkeypatch.chdir(tmp_path)
    write, _, command = caught.value.command.rpartition(" && ")
    if write:
        subprocess.run(write, shell=True, check=True)
    done = CliRunner().invoke(main, command.split()[1:])
    assert done.exit_code == 0, done.output


def test_a_place_that_is_wrong_for_one_unit_is_told(compiled):
    now = compiled("gfx950", EVEN)
    text = without_locations(now.ttir)
    at = next(i for i, line in enumerate(text.splitlines()) if "tt.make_range" in line and "512" in line)
    lane, kind = text.splitlines()[at].split()[0], "tensor<512xi32>"
    store = next(line for line in text.splitlines() if "tt.store" in line and "ptr<i8>" in line)
    moved = re.search(r"tt\.store (%\d+)", store)[1]
    lines = text.replace(f"tt.store {moved}", "tt.store %8004").splitlines()
    at = next(i for i, line in enumerate(lines) if "%8004" in line)
    lines[at:at] = [
        f"%8000 = arith.constant dense<300> : {kind}",
        f"%8001 = arith.cmpi eq, {lane}, %8000 : {kind}",
        f"%8002 = arith.extui %8001 : tensor<512xi1> to {kind}",
        f"%8004 = tt.addptr {moved}, %8002 : tensor<512x!tt.ptr<i8>>, {kind}",
    ]
    told = r"unit 300, lane 300 of program 0: scale byte is at byte 301, its place is byte 300"
    with pytest.raises(NotProved, match=told):
        list(decide(Compiled(now.case, now.target, now.kernel, "\n".join(lines), []), {}))


def test_a_command_shows_a_block(tmp_path, monkeypatch):
    case = cases()["mxfp4.even.bfloat16.zero127"]
    block = np.zeros(32, dtype=np.uint64)
    block[:4] = 0xBF80, 0x7F80, 0x7FC0, 0x7FA5
    assert Counterexample(case, block).command == (
        "mxref explain --format mxfp4 --scale-rule even --zero-scale 127 -1.0 inf nan 0x7fa50000"
    )
    assert Counterexample(case, block, 7).place == ", in unit 7"
    one = np.array([0x3F80])
    assert Counterexample(cases()[SR], one, 0, Stream(3, 4, 5, 1)).command == (
        "mxref explain --format mxfp4 --scale-rule floor --rounding sr --seed 3 --step 4 --layer 5 "
        "--operand fprop.w 1.0"
    )
    assert "--file block.npy --block 7" in Counterexample(cases()[SR], one, 7).command
