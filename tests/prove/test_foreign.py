"""Kernels of other projects are proved, as far as they are equal: certificates, the reader of tiles, planted faults."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from mxref.cli import main
from places import TESTS
from prove import foreign_certificates
from prove.algebra import is_place
from prove.foreign import ALL
from prove.foreign_certificates import (
    ASSUMPTIONS,
    certify,
    domains,
    read_foreign,
    refuting,
    smallest,
    what_is_stale,
)
from prove.foreign_kernels import (
    PROJECTS,
    NotFound,
    compile_subjects,
    faults_below,
    proof_of,
    subjects,
    where,
)
from prove.terms import concat, const, evaluate, extract, var, variables, widen, widen_signed
from prove.theorems import NotProved
from prove.tiles import read_tile
from prove.ttir import UnknownOperation
from usual import usual

ROWS, COLUMNS = "torchao.rows.floor.256x128", "torchao.columns.rceil.256x128"
SOURCES = os.environ.get("FOREIGN")
"""A folder with checkouts of projects that are no packages, as `make prove FOREIGN=` has it."""


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Kernels by subject, compiled once; the usual ones together."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))

        def get(name):
            folder = Path(SOURCES) if SOURCES else None
            certificate = read_foreign()[name]
            try:
                installed, _ = where(PROJECTS[subjects()[name].project], folder)
            except NotFound as err:
                pytest.skip(str(err))
            if installed != certificate.version:
                pytest.skip(f"proved of version {certificate.version}, this is {installed}")
            if certificate.triton != triton.__version__:
                pytest.skip(f"proved with Triton {certificate.triton}, this is {triton.__version__}")
            if name not in found:
                wanted = [ROWS, COLUMNS] if name in (ROWS, COLUMNS) else [name]
                found.update({c.name: c for c in compile_subjects(wanted, folder)})
            return found[name]

        yield get


def proof(compiled, name=ROWS, domain=1, change=None):
    """Return the proof of a kernel, after a change of its IR."""
    text = compiled(name).ttir
    if change is not None:
        old, new = change
        changed = re.sub(old, new, text, count=1)
        assert changed != text
        text = changed
    subject = subjects()[name]
    return proof_of(subject, text, domains(subject)[domain])


@pytest.mark.parametrize("name", usual(subjects(), ROWS, COLUMNS))
def test_a_certificate_is_of_the_kernel_as_it_is_now(compiled, name):
    certificate = read_foreign()[name]
    now = compiled(name)
    if now.source != certificate.source:
        pytest.skip("the checkout has another version of the kernel's file")
    assert what_is_stale(certificate, now) is None, "prove it anew: make prove FOREIGN=..."
    assert set(certificate.assumptions) <= set(ASSUMPTIONS)


def test_every_subject_has_a_certificate():
    assert list(read_foreign()) == list(subjects())


def test_each_difference_is_explained():
    """The command of a record gives the bytes that the record has of the clauses."""
    seen = set()
    for certificate in read_foreign().values():
        for each in certificate.differences:
            assert each.kernel != each.clauses
            if each.command in seen:
                continue
            seen.add(each.command)
            done = CliRunner().invoke(main, [*each.command.split()[1:], "--json"])
            assert done.exit_code == 0, done.output
            (block,) = json.loads(done.output)["blocks"]
            codes = bytes.fromhex(block["packed"])[:4].hex(" ").upper()
            assert each.clauses == f"{block['scale']['byte']:02X}: {codes}"
    assert len(seen) >= 6


def test_a_certificate_of_another_kernel_is_red(compiled):
    certificate, now = read_foreign()[ROWS], compiled(ROWS)
    other = replace(now, ttir=now.ttir.replace("dense<254>", "dense<253>"))
    assert "IR has changed" in str(what_is_stale(certificate, other))
    changed = replace(certificate, questions="")
    assert "questions" in str(what_is_stale(changed, now))
    changed = replace(certificate, proved="everything")
    assert "set of blocks" in str(what_is_stale(changed, now))


def test_the_terms_give_torchaos_own_bytes(compiled):
    """torchao's PyTorch code and its Triton kernel agree where the kernel is proved to be its clauses."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    for name in (ROWS, COLUMNS):
        made = proof(compiled, name)
        random = np.random.default_rng(5)
        base = random.integers(20, 230, (5_000, 1))
        exponents = np.clip(base - random.integers(0, 20, (5_000, 32)), 0, 254).astype(np.uint64)
        blocks = random.integers(0, 2, (5_000, 32), dtype=np.uint64) << np.uint64(15)
        blocks |= exponents << np.uint64(7) | random.integers(0, 128, (5_000, 32), dtype=np.uint64)
        codes, scales = made.stored_by_kernel(blocks)
        x = torch.from_numpy(blocks.astype(np.uint16).view(np.int16)).view(torch.bfloat16)
        mode = {"floor": ScaleCalculationMode.FLOOR, "rceil": ScaleCalculationMode.RCEIL}[made.rule]
        right_scales, right = to_mx(x, torch.float8_e4m3fn, 32, scaling_mode=mode)
        assert (scales == right_scales.view(torch.uint8).numpy().ravel()).all()
        assert (codes == right.view(torch.uint8).numpy()).all()
        assert not made.differing(blocks).any()


def test_a_kernel_is_proved_anew(compiled):
    pytest.importorskip("bitwuzla", reason="bitwuzla is not installed")
    made, kept = certify(compiled(ROWS)), read_foreign()[ROWS]
    assert made.proved == kept.proved == "scale byte of 1 or more, or all zeros"
    assert (made.ir, made.questions, made.differences) == (kept.ir, kept.questions, kept.differences)


FAULTS = {
    "the exponent of the largest number is another": (
        ROWS, (r"dense<8> : tensor<1024xi32>", "dense<9> : tensor<1024xi32>"),
    ),
    "the bias of the scale is another": (ROWS, (r"dense<1\.270000e\+02>", "dense<1.260000e+02>")),
    "the reciprocal is another": (ROWS, (r"dense<-2> : tensor<1024xi8>", "dense<-3> : tensor<1024xi8>")),
    "the divisor is one float too large": (COLUMNS, (r"dense<0\.00223214296>", "dense<0.00223214319>")),
    "the sign is lost": (ROWS, (r"(%scaled_data_r\w* = arith\.extf) %x_block_r ", r"\1 %x_block_abs_r ")),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_has_a_block(compiled, fault):
    pytest.importorskip("bitwuzla", reason="bitwuzla is not installed")
    name, change = FAULTS[fault]
    made = proof(compiled, name, change=change)
    found = refuting(made)
    assert not isinstance(found, float)
    block = smallest(made, *found)
    assert block is not None
    print(fault, foreign_certificates.difference(made, subjects()[name], "", block))


def without_places(text):
    """Return IR without source locations, and with the names of its values."""
    return re.sub(r" loc\(#loc\d*\)", "", text)


PERMUTED = """%p1 = tt.reshape %mask_27 : tensor<256x128xi1> -> tensor<256x64x2xi1>
    %p2 = tt.trans %p1 {order = array<i32: 0, 2, 1>} : tensor<256x64x2xi1> -> tensor<256x2x64xi1>
    %p3 = tt.reshape %p2 : tensor<256x2x64xi1> -> tensor<256x128xi1>
    %p4 = arith.constant dense<0.000000e+00> : tensor<256x128xf32>
    %p5 = arith.select %p3, %e4m3_data_2d, %p4 : tensor<256x128xi1>, tensor<256x128xf32>
"""
ARGUMENT = """%q0 = tt.splat %amax : i32 -> tensor<1024xi32>
    %q1 = tt.bitcast %max_abs : tensor<1024xf32> -> tensor<1024xi32>
    %q2 = arith.subi %q1, %q1 : tensor<1024xi32>
    %q3 = arith.addi %q0, %q2 : tensor<1024xi32>
    %q4 = tt.bitcast %q3 : tensor<1024xi32> -> tensor<1024xf32>
"""
COMPARED = """%r1 = arith.constant dense<0.000000e+00> : tensor<256x128xf32>
    %r2 = arith.cmpf oeq, %e4m3_data_2d, %r1 fastmath<fast> : tensor<256x128xf32>
    %r3 = arith.select %r2, %e4m3_data_2d, %e4m3_data_2d : tensor<256x128xi1>, tensor<256x128xf32>
"""
HALF = """%h0 = arith.sitofp %extracted_pow2_35 : tensor<1024xi32> to tensor<1024xf16>
    %scale_e8m0_unbiased_36 = tt.bitcast %h0 : tensor<1024xf16> -> tensor<1024xbf16>"""
HALF_OF_A_TILE = [
    ("256x128", "256x64"), ("1x128", "1x64"), ("end = 128", "end = 64"), ("<128xi32", "<64xi32"),
    ("1024", "512"), ("256x4x", "256x2x"), ("1x4x", "1x2x"), ("end = 4 ", "end = 2 "), ("<4xi32", "<2xi32"),
]  # fmt: skip
MISTAKEN = {
    "codes depend on whether another block is there": (
        "codes does not hold",
        [
            ("%e4m3_data_2d_54 =", f"{PERMUTED}    %e4m3_data_2d_54 ="),
            ("tt.fp_to_fp %e4m3_data_2d,", "tt.fp_to_fp %p5,"),
        ],
    ),
    "an argument is called like a variable of the proof": (
        "names of variables of the proof: amax",
        [
            ("(%x_ptr: ", "(%amax: i32, %x_ptr: "),
            ("%max_abs_30 = arith.truncf %max_abs ", f"{ARGUMENT}    %max_abs_30 = arith.truncf %q4 "),
        ],
    ),
    "half of the blocks are not written": ("64 elements of a unit are read, of 128", HALF_OF_A_TILE),
    "a number is written as float16 and read as bfloat16": (
        "arith.sitofp",
        [
            (
                "%scale_e8m0_unbiased_36 = arith.sitofp %extracted_pow2_35 : tensor<1024xi32> to tensor<1024xbf16>",
                HALF,
            )
        ],
    ),
    "a comparison may take any numbers for finite": (
        "fastmath", [("%e4m3_data_2d_54 =", f"{COMPARED}    %e4m3_data_2d_54 =")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", MISTAKEN)
def test_what_looks_like_a_proof_is_refused(compiled, fault):
    pytest.importorskip("bitwuzla", reason="bitwuzla is not installed")
    told, changes = MISTAKEN[fault]
    text = without_places(compiled(ROWS).ttir)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    with pytest.raises((NotProved, UnknownOperation), match=re.escape(told)):
        certify(replace(compiled(ROWS), ttir=text))


@pytest.mark.parametrize("name", ["amax", "byte", "x3", "any0", "nan7", "load0", "lane", "turn", "program_x"])
def test_an_argument_has_no_name_of_the_proof(compiled, name):
    with pytest.raises(UnknownOperation, match=f"of the proof: {name}"):
        read_tile(compiled(ROWS).ttir.replace("%n_rows", f"%{name}"), 256)


def test_what_machines_do_is_held_to_the_record(compiled):
    """A certificate is stale if the compiler makes something else of the same IR."""
    certificate, now = read_foreign()[ROWS], compiled(ROWS)
    assert "may be contracted" in str(
        what_is_stale(certificate, replace(now, faults=["PTX may be contracted"]))
    )
    assert "is assumed" in str(what_is_stale(certificate, replace(now, division=True)))
    assert "another way" in str(what_is_stale(replace(certificate, encoding=0), now))


def test_assumptions_are_those_of_the_kernel():
    """What is assumed of AMD's conversions and of powers is said of the kernels that have them."""
    for certificate in read_foreign().values():
        assert ({"powers", "whole"} <= set(certificate.assumptions)) == certificate.name.startswith("aiter")
        assert ("ptx" in certificate.assumptions) == (".rceil." in certificate.name)


def test_the_smallest_block_is_the_smallest(compiled):
    """Of the blocks of one number and zeros, those below the one that is shown are stored as the clauses say."""
    pytest.importorskip("bitwuzla", reason="bitwuzla is not installed")
    made = proof(compiled, domain=0)
    found = refuting(made)
    block = smallest(made, *found)
    every = np.zeros((0x200, 32), dtype=np.uint64)
    every[:, 0] = np.arange(0x200)
    assert np.flatnonzero(made.differing(every))[0] == block.max() == 1


def test_columns_are_right_for_whole_tiles_only(compiled):
    """The host takes 128 rows, for which a tile of 256 writes scales that other columns have."""
    pytest.importorskip("torchao")
    subject = subjects()[COLUMNS]
    columns, length = subject.tile
    rows = concat(const(0, 1), var("n_rows", 24), const(0, 7))
    given = {"n_rows": rows, "n_cols": concat(const(0, 1), var("n_cols", 24), const(0, 7))}
    kernel = read_tile(compiled(COLUMNS).ttir, columns, subject.among, given)
    scales = [s for s in kernel.stores if "col_scale_ptr" in {v.value for v in variables(s.address)}]
    assert all(s.mask.constant == 1 for s in scales)
    values = {"n_rows": 3, "n_cols": 1, "col_scale_ptr": 0, "program_x": 1, "program_y": 0, "lane": 0}
    found = [int(np.asarray(x).ravel()[0]) for x in evaluate([s.address for s in scales], values)]
    assert length == 256
    assert sorted(found) == list(range(8, 16))  # the blocks of column 0 are 0 to 11


BEYOND = """
import sys, torch
from prove.foreign_kernels import PROJECTS, describe, loaded
from triton.backends.compiler import GPUTarget
describe(GPUTarget("cuda", 100, 32))
kernel = loaded(PROJECTS["torchao"], None).to_mxfp8_dim1_kernel.fn
codes = torch.zeros(128, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)
for columns in (128, 256):
    scales = torch.full((4096,), 0xAA, dtype=torch.uint8)
    kernel[(1, 1)](torch.ones(128, 128, dtype=torch.bfloat16), codes, scales, 128, 128, 128, columns, 32, "floor")
    print("bytes", int((scales[512:] != 0xAA).sum()))
"""


@pytest.mark.study
def test_columns_are_written_behind_the_array():
    """torchao's own source in Triton's interpreter: a tile of 256 columns for a matrix of 128, which the host takes."""
    pytest.importorskip("torchao")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        [sys.executable, "-c", BEYOND], env=environment, check=True, capture_output=True, text=True
    )
    assert re.findall(r"^bytes (\d+)", done.stdout, re.M) == ["0", "512"]


def test_what_has_no_meaning_here_is_named(compiled):
    text = compiled(ROWS).ttir
    for old, new, told in (
        (r"arith\.maxnumf", "arith.minnumf", "reduction by arith.minnumf"),
        (r"propagateNan = none", "propagateNan = all", "propagateNan"),
        (r"rounding = rtne", "rounding = rtz", "rtz"),
        (r"tt\.reshape (\S+) :", r"tt.reshape \1 allow_reorder :", "allow_reorder"),
        (r"axis = 1 : i32\}> \(\{", "axis = 0 : i32}> ({", "units are reduced"),
        (
            r"tensor<256x128xbf16> -> tensor<1024x32xbf16>",
            "tensor<256x128xbf16> -> tensor<32x1024xbf16>",
            "mixed",
        ),
        (r"math\.absf", "math.exp", "math.exp"),
    ):
        other = re.sub(old, new, text)
        assert other != text
        with pytest.raises(UnknownOperation, match=re.escape(told)):
            read_tile(other, 256)


def test_what_compilers_may_change_is_seen():
    ptx = "mul.f32 %r1, %r2, %r3;\nadd.f32 %r4, %r1, %r5;"
    assert faults_below("", ptx, "sm_90") == ["PTX may be contracted"]
    assert faults_below("", ptx.replace("%r1, %r5", "%r6, %r5"), "sm_90") == []
    assert faults_below("", "fma.rn.f32 %r1;", "sm_90") == ["PTX has fma.rn.f32"]
    subnormal = '"denormal-fp-math-f32"="ieee"'
    assert faults_below(subnormal, "v_fma_f32 v0\nv_div_fixup_f32 v0", "gfx950") == [
        "1 fused operations, not those of quotients"
    ]
    assert faults_below(subnormal, "v_fmac_f32_e32 v0\n" * 5 + "v_div_fixup_f32 v0", "gfx950") == []
    assert faults_below("%1 = fadd contract float %2, %3", "", "gfx950") == [
        "LLVM IR has the flag contract", "LLVM IR does not ask for subnormals",
    ]  # fmt: skip


def test_a_place_is_shown_by_algebra():
    n, lane, program, pointer = var("n", 16), var("lane", 5), var("p", 20), var("pointer", 64)
    unit = widen(concat(program, lane), 64)
    offset = unit * widen(n, 64) + 3
    one = widen(program, 64) * 32 * widen(n, 64) + widen(n, 64) * widen(lane, 64) + 3
    assert is_place(pointer + one * 2, pointer, offset, 2, small=False)
    assert not is_place(pointer + one * 2, pointer, offset + 1, 2, small=False)
    assert not is_place(pointer + one, pointer, offset, 2, small=False)
    # In 32 bits a product may overflow, unless it is a part of an offset that is known to be small.
    short = widen(concat(program, lane), 32) * widen(n, 32) + 3
    assert not is_place(pointer + widen_signed(short, 64), pointer, offset, 1, small=False)
    assert is_place(pointer + widen_signed(short, 64), pointer, offset, 1, small=True)
    assert not is_place(pointer + widen_signed(short + 1, 64), pointer, offset, 1, small=True)
    assert not is_place(pointer + widen(extract(one, 40, 3), 64), pointer, offset, 1, small=True)


INTERPRETED = """
import sys, numpy as np, torch
from pathlib import Path
from prove.foreign_kernels import PROJECTS, loaded, where
name, folder, source, codes, scales = sys.argv[1:]
module = loaded(PROJECTS[name], where(PROJECTS[name], Path(folder))[1])
module.MXFP_BLOCK_SIZE = 32  # the interpreter knows no constexpr outside of a kernel
x = torch.from_numpy(np.load(source)).contiguous()
q = torch.zeros(x.shape[0], 16, dtype=torch.uint8)
s = torch.zeros(x.shape[0], 1, dtype=torch.uint8)
module._downcast_to_mxfp[(-(-len(x) // 32), 1)](q, 16, 1, s, 1, 1, x, 32, 1, len(x), 32, 32, 128, 0)
np.save(codes, q.numpy())
np.save(scales, s.numpy())
"""


def test_the_terms_give_the_interpreters_bytes(compiled, tmp_path):
    """Triton's interpreter runs the source, and not the IR. It runs on NumPy, which shifts as NVIDIA's GPUs do."""
    name = "triton_kernels.mxfp4.float32.sm_90"
    made = proof(compiled, name, domain=0)
    assert made.domain is ALL
    random = np.random.default_rng(6)
    blocks = random.integers(0, 1 << 32, (10_000, 32), dtype=np.uint64)
    near = blocks[::2]
    near[:] = near & 0x80FFFFFF | random.integers(20, 220, (len(near), 1), dtype=np.uint64) << np.uint64(23)
    blocks[(blocks & 0x7F800000) == 0x7F800000] = 0  # finite
    np.save(tmp_path / "x.npy", blocks.astype(np.uint32).view(np.float32))
    files = [str(tmp_path / f) for f in ("x.npy", "codes.npy", "scales.npy")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-c", INTERPRETED, "triton_kernels", str(SOURCES), *files]
    subprocess.run(command, env=environment, check=True)
    codes, scales = made.stored_by_kernel(blocks)
    assert (np.load(files[1]) == codes).all()
    assert (np.load(files[2])[:, 0] == scales).all()
