"""Row kernels are proved to be their clauses: certificates, the translator, and planted faults."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("triton")

from mxref import OperandSpec, quantize
from mxref.cli import main
from mxref.placement import Placement
from mxref.steps.random import Stream
from mxref.steps.rounding import Rounding
from mxref.steps.scale import ScaleRule
from prove.certificates import (
    ASSUMPTIONS,
    certificate_of,
    command_for,
    decide,
    first_difference,
    float32_of,
    proof_of,
    read_certificates,
    some_blocks,
    stored_by_kernel,
    what_is_stale,
)
from prove.kernels import TARGETS, Compiled, cases, compile_cases, faults_below
from prove.terms import Term, apply, concat, const, evaluate, every, extract, var, widen
from prove.theorems import NotProved
from prove.ttir import LANE, UnknownOperation, digest_of, read, without_locations
from usual import usual

QUICK = (
    "mxfp4.even.bfloat16", "mxfp4.floor.bfloat16", "mxfp4.rceil.float32", "mxfp6_e2m3.even.bfloat16",
    "mxfp4.floor.bfloat16.rna", "mxfp4.floor.bfloat16.sr",
)  # fmt: skip
"""Cases of `make test`; the rest are of `make test-studies`."""
HERE = [f"{target} {name}" for target in TARGETS for name in cases()]
WHICH = pytest.mark.parametrize("which", usual(HERE, *(f"{t} {n}" for t in TARGETS for n in QUICK)))


@pytest.fixture(scope="session")
def compiled(request, tmp_path_factory):
    """Kernels by target and case, compiled once; those of `QUICK` first, the others when one is asked for."""
    with pytest.MonkeyPatch.context() as patch:
        if request.config.pluginmanager.hasplugin("cacheprovider"):
            patch.setenv("TRITON_CACHE_DIR", str(request.config.cache.mkdir("triton-gfx950")))
        else:
            patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        found = {}

        def get(target, name):
            if (target, name) not in found:
                wanted = QUICK if name in QUICK else [n for n in cases() if n not in QUICK]
                found.update({(target, c.case): c for c in compile_cases(target, wanted)})
            return found[target, name]

        yield get


@WHICH
def test_a_certificate_is_of_the_kernel_as_it_is_now(compiled, which):
    import triton

    target, name = which.split()
    certificate = read_certificates().get((name, target))
    if certificate is not None and certificate.triton != triton.__version__:
        pytest.skip(f"proved with Triton {certificate.triton}, this is {triton.__version__}")
    now = compiled(target, name)
    assert certificate is not None, "prove it: make prove"
    assert what_is_stale(certificate, now) is None, "prove it anew: make prove"
    assert set(certificate.assumptions) <= set(ASSUMPTIONS)


def test_every_case_has_a_certificate():
    assert set(read_certificates()) == {(name, target) for name in cases() for target in TARGETS}


def test_a_certificate_of_another_kernel_is_red(compiled):
    now = compiled("gfx950", QUICK[0])
    certificate = read_certificates()[QUICK[0], "gfx950"]
    other = Compiled(
        now.case, now.target, now.kernel, now.ttir.replace("dense<2097152>", "dense<2097153>"), []
    )
    assert "IR has changed" in str(what_is_stale(certificate, other))
    assert what_is_stale(certificate, compiled("gfx950", QUICK[1])) is not None


def test_locations_and_names_of_the_source_change_nothing(compiled):
    text = compiled("gfx950", QUICK[0]).ttir
    moved = re.sub(r"#loc(\d+)", r"#loc1\1", text).replace("%amax_bits", "%largest")
    assert moved != text
    assert digest_of(moved) == digest_of(text) == digest_of(without_locations(text))
    assert "loc(" not in without_locations(text)


@WHICH
def test_the_terms_give_the_references_bytes(compiled, which):
    proof = proof_of(compiled(*which.split()))
    blocks = some_blocks(proof, 10_000)
    stream = Stream(seed=0x123456789ABCDEF0, step=7, layer=5, operand=3)
    words, scales = stored_by_kernel(proof, blocks, (0x9ABCDEF0, 0x12345678, 5 << 8 | 3, 7))
    case = proof.case
    how = Rounding(case.rounding)
    spec = OperandSpec(case.block, ScaleRule(case.rule), rounding=how, zero_scale=case.zero_scale)
    right = quantize(float32_of(case, blocks), spec, placement=Placement(stream))
    assert (words.astype("<u4").view(np.uint8) == right.codes).all()
    assert (scales == right.scales[:, 0]).all()
    assert first_difference(proof, blocks) is None


def test_simpler_terms_have_the_same_values():
    x, bits = var("x", 8), np.arange(256)
    for op in (
        "add",
        "sub",
        "mul",
        "and",
        "or",
        "xor",
        "shl",
        "lshr",
        "eq",
        "ult",
        "ule",
        "slt",
        "umin",
        "smax",
    ):
        for b in range(256):
            for args in ((x, const(b, 8)), (const(b, 8), x)):
                made = apply(op, *args)
                simpler, plain = evaluate([made, Term(op, made.width, args)], {"x": bits})
                assert (simpler == plain).all(), (op, args)
    for truths in product((const(0, 1), const(1, 1), var("t", 1)), repeat=3):
        (found,) = evaluate([every(truths)], {"t": [0, 1]})
        assert np.broadcast_to(found, 2).tolist() == [
            all(t.constant if t.op == "const" else value for t in truths) for value in (0, 1)
        ]


def test_the_solver_agrees_with_numpy_on_every_operation():
    ask = pytest.importorskip("prove.solver", reason="bitwuzla is not installed").ask
    random = np.random.default_rng(3)
    words = [0, 1, 0x80000000, 0x7F800000, 0x3F800000, 0x00000001, 0x7F7FFFFF, 0xFFFFFFFF, 23, 31, 0x4B000001]
    words += [int(x) for x in random.integers(0, 1 << 32, 12)]
    a, b, c = var("a", 32), var("b", 32), var("c", 32)
    two = ["add", "sub", "mul", "and", "or", "xor", "shl", "lshr", "eq", "ult", "ule", "slt", "sle"]
    two += ["umin", "umax", "smin", "smax", "fadd", "fadd.rz", "fsub", "fmul", "fmaximum"]
    terms = [apply(op, a, b) for op in two] + [apply("fma", a, b, c), a & 0x7FFF00FF, a >> 5, a << 9]
    halves = [extract(x, 15, 0) for x in (a, b, c)]
    terms += [apply("fma", *halves), apply("fmul", *halves[:2]), Term("half", 32, (halves[0],))]
    terms += [concat(halves[0], halves[1]), Term("sext", 64, (a,)), Term("ite", 32, (a.below(b), a, b))]
    for _ in range(12):
        values = {name: int(random.choice(words)) for name in "abc"}
        given = [var(name, 32).equal(value) for name, value in values.items()]
        for term in terms:
            value = int(np.asarray(evaluate([term], values)[0]).ravel()[0])
            equal = term.equal(value)
            if term.op.startswith("f") or term.op == "half":  # a NaN has any payload
                infinity = {32: 0x7F800000, 16: 0x7F80}[term.width]
                if value & (1 << term.width - 1) - 1 > infinity:
                    equal = ~(term & ((1 << term.width - 1) - 1)).upto(infinity)
            assert ask(equal, given).holds, (term.op, values)
    whole = Term("ftoi", 32, (a,))
    for number in (0.0, -0.0, 1.5, -1.5, 2.0**24 + 2, -(2.0**31), 1e-40):
        bits = int(np.float32(number).view(np.uint32))
        value = int(np.asarray(evaluate([whole], {"a": bits})[0]).ravel()[0])
        assert ask(whole.equal(value), [a.equal(bits)]).holds, number
    for bits in (0x4F000000, 0x7F800000, 0x7FC00000):  # of no integer, any
        assert not any(
            ask(whole.equal(value), [a.equal(bits)]).holds for value in (0, 1 << 31, (1 << 31) - 1)
        )


@pytest.mark.parametrize("name", QUICK[:2])
@pytest.mark.parametrize("target", TARGETS)
def test_a_kernel_is_proved_anew(compiled, target, name):
    ask = pytest.importorskip("prove.solver", reason="bitwuzla is not installed").ask
    now = compiled(target, name)
    steps = list(decide(now, {}))
    nothing = const(0, 1)
    assert all(ask(nothing, step.assumptions).holds is False for step, _ in steps)  # some values satisfy them
    assert {step.name for step, _ in steps} == {"places", "amax: one maximum", "byte", "element", "words"}
    made, kept = certificate_of(now, steps), read_certificates()[name, target]
    assert (made.ir, made.assumptions) == (kept.ir, kept.assumptions)
    assert {k: [d for d, _ in v] for k, v in made.steps.items()} == {
        k: [d for d, _ in v] for k, v in kept.steps.items()
    }


def rare(text):
    """Change the code of the first element for one element and one amax, of 2^64 pairs."""
    lines = without_locations(text).splitlines()
    at = next(i for i, line in enumerate(lines) if "arith.minui" in line)
    result, operands = lines[at].strip().split(" = arith.minui ")
    (product,) = (line for line in lines if line.strip().startswith(operands.split(",")[0] + " = tt.bitcast"))
    total = re.search(r"tt\.bitcast (%\d+)", product)[1]
    (summed,) = (line for line in lines if line.strip().startswith(f"{total} = arith.addf"))
    v = re.search(r"arith\.addf (%\d+)", summed)[1]
    (scaled,) = (line for line in lines if line.strip().startswith(f"{v} = arith.mulf"))
    x = re.search(r"arith\.mulf (%\d+)", scaled)[1]
    amax = next(m[1] for line in lines if (m := re.search(r"arith\.cmpi ult, (%\d+)", line)))
    kind = "tensor<512xi32>"
    lines[at : at + 1] = [
        f"%8000 = arith.minui {operands}",
        f"%8001 = tt.bitcast {x} : tensor<512xf32> -> {kind}",
        f"%8002 = arith.constant dense<{0x3FA5A5A5}> : {kind}",
        f"%8003 = arith.constant dense<{0x41234567}> : {kind}",
        f"%8004 = arith.cmpi eq, %8001, %8002 : {kind}",
        f"%8005 = arith.cmpi eq, {amax}, %8003 : {kind}",
        "%8006 = arith.andi %8004, %8005 : tensor<512xi1>",
        f"%8007 = arith.extui %8006 : tensor<512xi1> to {kind}",
        f"{result} = arith.xori %8000, %8007 : {kind}",
    ]
    return "\n".join(lines)


def one_nan(text):
    """Let blocks whose amax has one payload of NaN count as finite."""
    text = without_locations(text)
    result, args, kind = re.search(r"(%\d+) = arith\.cmpi ult, (.*) : (.*)\n", text).groups()
    return text.replace(
        f"{result} = arith.cmpi ult, {args} : {kind}\n",
        f"%8000 = arith.cmpi ult, {args} : {kind}\n"
        f"%8001 = arith.constant dense<{0x7FA50000}> : {kind}\n"
        f"%8002 = arith.cmpi eq, {args.split(',')[0]}, %8001 : {kind}\n"
        f"{result} = arith.ori %8000, %8002 : {kind.replace('i32', 'i1')}\n",
    )


FAULTS = {
    "a tie goes the other way": ("gfx950", "mxfp4.even.bfloat16", ("0x4B000000", "0x4B000001")),
    "the scale is twice too small": ("gfx950", "mxfp4.even.bfloat16", ("dense<254>", "dense<255>")),
    "the rule's bound is one too high": ("gfx950", "mxfp4.even.bfloat16", ("dense<2097152>", "dense<2031616>")),
    "infinity counts as finite": ("gfx950", "mxfp4.even.bfloat16", ("dense<2139095040>", "dense<2139095041>")),
    "an element is left out of amax": (
        "gfx950", "mxfp4.even.bfloat16", (r"re:arith\.maximumf (%\w+), %\w+", r"arith.maximumf \1, \1"),
    ),
    "two words change places": ("gfx950", "mxfp4.even.bfloat16", (r"re:tt\.join (%\w+), (%\w+)", r"tt.join \2, \1")),
    "a code is not limited": (
        "gfx950", "mxfp4.floor.bfloat16", (r"re:arith\.subi (%codes\w*), %codes\w*", r"arith.ori \1, \1"),
    ),
    "packed arithmetic has another constant": (
        "sm_90", "mxfp4.even.bfloat16", ("dense<1124090624>", "dense<1124090625>"),
    ),
    "half a gap is one too small": ("gfx950", "mxfp4.floor.bfloat16.rna", ("dense<2097152>", "dense<2097151>")),
    "one pair in 2^64": ("gfx950", "mxfp4.rceil.float32", rare),
    "one payload of NaN": ("sm_90", "mxfp4.even.bfloat16", one_nan),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_has_a_counterexample(compiled, fault):
    pytest.importorskip("bitwuzla", reason="bitwuzla is not installed")
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
    command = caught.value.command
    print(f"{fault}: {command}")
    done = CliRunner().invoke(main, command.split()[1:])
    assert done.exit_code == 0, done.output


def test_other_random_words_have_no_proof(compiled):
    now = compiled("gfx950", "mxfp4.floor.bfloat16.sr")
    for old, new, told in (
        ("3449720151", "3449720153", "random|element"),
        ("3528531795", "3528531793", "random"),
    ):
        other = Compiled(now.case, now.target, now.kernel, now.ttir.replace(old, new), [])
        assert other.ttir != now.ttir
        with pytest.raises(NotProved, match=told):
            proof_of(other).steps()


def test_what_has_no_meaning_here_is_named(compiled):
    text = compiled("gfx950", QUICK[0]).ttir
    for old, new, told in (
        ("arith.minui", "arith.ceildivui", "arith.ceildivui"),
        ("math.absf", "math.exp2", "math.exp2"),
        (r" : tensor<512xf32>", " fastmath<contract> : tensor<512xf32>", "fastmath"),
    ):
        with pytest.raises(UnknownOperation, match=re.escape(told)):
            read(text.replace(old, new))
    for old, new, told in (
        (r"(tt\.reshape \S+)", r"\1 allow_reorder", "allow_reorder"),
        (r"dense<23>", "dense<32>", "below 32"),
        (r"(arith\.shrui \S+) \S+", r"\1 %i", "below 32"),
        (r"(arith\.mulf .*)xf32>", r"\1xf16>", "arith.mulf"),
        (r"(math\.absf .*) :", r"\1 fastmath<nnan> :", "nnan"),
        (r"(arith\.remsi \S+) (\S+)", r"\1 %i", "power of two"),
    ):
        other = re.sub(old, new, text)
        assert other != text
        with pytest.raises(UnknownOperation, match=told):
            read(other)
    packed = compiled("sm_90", QUICK[0]).ttir
    with pytest.raises(UnknownOperation, match="0x5411"):
        read(packed.replace("0x5410", "0x5411"))


def test_nothing_but_words_and_a_byte_is_moved(compiled):
    now = compiled("gfx950", QUICK[0])
    proof = proof_of(now)
    proof.kernel.stores.append(replace(proof.kernel.stores[0], value=const(0, 16)))
    with pytest.raises(NotProved, match="written"):
        proof.steps()
    proof = proof_of(now)
    proof.kernel.loads[0] = replace(proof.kernel.loads[0], value=var("load0", 16))
    with pytest.raises(NotProved, match="read"):
        proof.steps()


def test_one_byte_at_another_place_has_no_proof(compiled):
    ask = pytest.importorskip("prove.solver", reason="bitwuzla is not installed").ask
    proof = proof_of(compiled("gfx950", QUICK[0]))
    stores, lane = proof.kernel.stores, var(LANE, proof.kernel.units.bit_length() - 1)
    stores[-1] = replace(stores[-1], address=stores[-1].address + widen(lane.equal(300), 64))
    (places,) = (step for step in proof.steps() if step.name == "places")
    answer = ask(places.goal, places.assumptions)
    assert answer.holds is False
    assert answer.model[LANE] == 300


def test_units_that_are_mixed_are_refused(compiled):
    text = compiled("gfx950", QUICK[0]).ttir
    turned, before = re.search(r"(%\w+) = tt\.trans (%\w+) ", text).groups()
    mixed = text.replace(
        f"tt.reshape {turned} : tensor<512x4x4xi32>", f"tt.reshape {before} : tensor<4x512x4xi32>"
    )
    assert mixed != text
    with pytest.raises(UnknownOperation, match="mixed"):
        read(mixed)


def test_what_compilers_may_change_is_seen():
    llvm = '%1 = fadd contract bfloat %2, %3\nattributes #0 = { "denormal-fp-math-f32"="preserve-sign" }'
    machine = (
        ".amdhsa_float_round_mode_32 0\n.amdhsa_float_denorm_mode_32 0\nv_fma_f32 v0, v1\nv_pk_fma_f32 v0"
    )
    assert faults_below(llvm, machine, "gfx950", 2) == [
        "LLVM IR has the flag contract",
        "LLVM IR does not ask for subnormals",
        "the kernel's mode denorm_mode_32 is not 3",
        "3 fused operations, Triton's IR has 2",
    ]
    ptx = "mul.ftz.f32 %f1, %f2;\nadd.f32 %f1;\nfma.rn.f32 %f1;"
    assert faults_below("", ptx, "sm_90", 0) == [
        "PTX has mul.ftz.f32",
        "PTX may be contracted: add.f32",
        "1 fused operations, Triton's IR has 0",
    ]


def test_a_command_shows_a_block():
    case = cases()["mxfp4.even.bfloat16.zero127"]
    block = np.zeros(32, dtype=np.uint64)
    block[:3] = 0xBF80, 0x7F80, 0x7FC0
    assert command_for(case, block) == (
        "mxref explain --format mxfp4 --scale-rule even --zero-scale 127 -1.0 inf nan"
    )
