"""Row kernels are proved to be their clauses: certificates, and the translator."""

from __future__ import annotations

import ast
import hashlib
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from mxref.steps.random import Stream
from prove.certificates import (
    ASSUMPTIONS,
    certificate_of,
    decide,
    encoding,
    proof_of,
    read_certificates,
    what_is_stale,
)
from prove.counterexamples import first_difference, some_blocks
from prove.kernels import QUICK, TARGETS, Case, Compiled, cases, faults_below, theorems
from prove.questions import NotProved
from prove.terms import Term, apply, concat, const, evaluate, every, extract, var
from prove.ttir import UnknownOperation, digest_of, read, without_locations
from usual import usual

ROWS = [name for name, case in cases().items() if isinstance(case, Case) and case.axis == 1]
HERE = [f"{target} {name}" for name, target in theorems()]
WHICH = pytest.mark.parametrize("which", usual(HERE, *(f"{t} {n}" for n, t in theorems() if n in QUICK)))


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
    assert set(read_certificates()) == set(theorems())


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


@pytest.mark.parametrize(
    "which",
    usual(
        [f"{t} {n}" for t in TARGETS for n in ROWS],
        *(f"{t} {n}" for t in TARGETS for n in QUICK if n in ROWS),
    ),
)
def test_the_terms_give_the_references_bytes(compiled, which):
    proof = proof_of(compiled(*which.split()))
    blocks = some_blocks(proof, 10_000)
    stream = Stream(seed=0x123456789ABCDEF0, step=7, layer=5, operand=3)
    assert first_difference(proof, blocks, None, stream) is None


def test_what_questions_mean_to_the_solver_is_counted(compiled):
    path = Path(__file__).with_name("solver.py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):  # comments and docstrings mean nothing
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = None
    digest = hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]
    assert (encoding(), digest) == (1, "eb657d4c0c2a79e7"), (
        "solver.py has changed. If an operation has another meaning now, raise ENCODING and prove all anew: "
        "make prove. Write the new digest here."
    )
    certificate = read_certificates()[QUICK[0], "gfx950"]
    other = replace(certificate, encoding=0)
    assert "another way" in str(what_is_stale(other, compiled("gfx950", QUICK[0])))


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
