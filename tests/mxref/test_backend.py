"""The protocol: checks before a backend computes, plans, arrays, and the specified signatures and names."""

import inspect
import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from protocol_cases import SPEC, X

import mxref
from mxref import (
    Backend,
    GemmProfile,
    OperandSpec,
    Stream,
    formats,
    get_backend,
    hadamard,
    quantize,
    scaled_gemm,
)
from mxref.discovery import candidates
from mxref.errors import DtypeError, NonfiniteError, ShapeError
from mxref.placement import Placement
from mxref.reference import ReferenceBackend
from mxref.steps.hadamard import Rotation
from mxref.steps.random import random_integers
from oracle import random as oracle_random


@pytest.mark.clause("conformance.protocol", "conformance.dual")
def test_the_reference_runs_through_the_protocol():
    reference = get_backend("reference")
    spec = OperandSpec(rounding="sr", hadamard=16, signs="per_step")
    stream = Stream(1, 2, 3, 4)
    q = reference.quantize(X, spec, axis=0, placement=Placement(stream))
    assert q == quantize(X, spec, axis=0, placement=Placement(stream))
    np.testing.assert_array_equal(reference.hadamard(X, 16, 5, axis=0), hadamard(X.T, Rotation(16, 5)).T)
    np.testing.assert_array_equal(
        reference.scaled_gemm(q, q, profile="bounded"), scaled_gemm(q, q, profile=GemmProfile.ORDERED)
    )
    np.testing.assert_array_equal(
        reference.fake_quantize(X, spec, placement=Placement(stream)),
        reference.dequantize(reference.quantize(X, spec, placement=Placement(stream))),
    )


@pytest.mark.clause("conformance.protocol", evidence="known answer")
def test_public_operations_check_before_the_backend_computes():
    reference = get_backend("reference")
    with pytest.raises(DtypeError, match="float64"):
        reference.quantize(X.astype(np.float64), OperandSpec())
    with pytest.raises(ShapeError, match="multiple of the size 16"):
        reference.hadamard(X[:, :40], 16)
    with pytest.raises(ShapeError, match="axis 2 is out of range"):
        reference.hadamard(X, 16, axis=2)
    bad = X.copy()
    bad[3, 3] = np.inf
    with pytest.raises(NonfiniteError, match="1 blocks"):
        reference.quantize(bad, OperandSpec(nonfinite="raise"))


class Recording(ReferenceBackend):
    name = "recording"

    def _quantize(self, x, plan):
        self.seen = plan
        return super()._quantize(x, plan)


@pytest.mark.clause("conformance.plan")
def test_a_plan_says_everything_that_a_backend_needs():
    backend = Recording()
    stream = Stream(9, step=8, layer=7, operand=2)
    spec = OperandSpec(rounding="sr", hadamard=64, signs="per_step")
    x = np.random.default_rng(0).standard_normal((2, 40, 3)).astype(np.float32)
    origin, shape = (1, 128, 4), (5, 168, 9)
    backend.quantize(
        x, spec, axis=-2, placement=Placement(stream, origin=origin, global_shape=shape), pad=True
    )
    plan = backend.seen
    assert (plan.spec, plan.shape, plan.axis) == (spec, (2, 40, 3), 1)
    assert (plan.length, plan.first, plan.global_length) == (64, 128, 192)
    assert (plan.rows, plan.rows_shape) == (6, (2, 3))
    assert plan.global_rows().tolist() == [i * 9 + j for i in (1, 2) for j in (4, 5, 6)]
    assert (plan.stream.seed, plan.stream.word) == (9, 8 << 32 | 7 << 8 | 2)
    signs = oracle_random.sign_vector(64, 9, 8, 7, 7, "per_step")
    assert plan.rotation.n == 64
    assert [-1 if plan.rotation.signs >> i & 1 else 1 for i in range(64)] == signs

    place = plan.global_rows(), plan.first, plan.length, plan.global_length
    want = [
        [oracle_random.sr_integer(9, 8, 7, 2, row * 192 + 128 + j, 16) for j in range(64)]
        for row in plan.global_rows().tolist()
    ]
    assert random_integers(*place, plan.stream, spec.sr_bits).tolist() == want
    backend.quantize(x, OperandSpec(), axis=1, pad=True)
    assert (backend.seen.rotation, backend.seen.stream, backend.seen.length) == (None, None, 64)
    backend.quantize(x, OperandSpec(hadamard=16), axis=1, pad=True)
    assert (backend.seen.rotation, backend.seen.rotation.signs) == (Rotation(16), 0)
    backend.capabilities = replace(backend.capabilities, native_sr=True)
    backend.quantize(x, OperandSpec(rounding="sr"), axis=1, pad=True, placement=Placement(stream))
    assert backend.seen.stream == stream


@pytest.mark.clause("conformance.arrays", evidence="peer")
@pytest.mark.parametrize("candidate", [c for c in candidates() if c.backend], ids=lambda c: c.name)
def test_arrays_go_to_a_backend_and_back_with_the_same_bits(candidate):
    backend = candidate.backend
    assert backend.capabilities.arrays in ("numpy", "torch")
    halves = np.arange(1 << 16, dtype=np.uint16).reshape(64, -1)
    for array in (halves.view(ml_dtypes.bfloat16), halves.view(np.float16), halves.view(np.float32), X.T):
        back = backend.to_numpy(backend.from_numpy(array))
        assert (back.dtype, back.shape) == (array.dtype, array.shape)
        assert back.tobytes() == array.tobytes()


@pytest.mark.clause("conformance.public", evidence="known answer")
def test_public_operations_have_the_signatures_of_the_specification():
    written = re.findall(r"^ +(\w+)(\(.*\))$", SPEC["conformance.public"].text, re.MULTILINE)
    assert len(written) == 11
    for name, parameters in written:
        scope = {"Placement": Placement}
        exec(f"def f{parameters}: pass".replace("(", "(self, ", 1), scope)
        want, got = (inspect.signature(f).parameters.values() for f in (scope["f"], getattr(Backend, name)))
        assert [(p.name, p.kind, p.default) for p in got] == [(p.name, p.kind, p.default) for p in want]


@pytest.mark.clause("conformance.names", evidence="known answer")
def test_names_are_those_of_the_specification():
    rows = re.findall(r"^`(\w+)` +([A-Z].*)$", SPEC["conformance.names"].text, re.MULTILINE)
    assert len(rows) == 7
    for enum, members in rows:
        named = dict(re.findall(r'(\w+) `"([^"]+)"`', members))
        assert {m.name: str(m) for m in getattr(mxref, enum)} == named
        assert all(getattr(getattr(mxref, enum), name) == value for name, value in named.items())


@pytest.mark.clause("conformance.names", evidence="known answer")
def test_formats_are_those_of_the_specification():
    text = SPEC["conformance.names"].text.partition("A format is")[2]
    named = dict(re.findall(r'`(\w+)` `"(\w+)"`', text))
    assert list(named.values()) == list(formats.FORMATS)
    assert list(formats.BLOCK_FORMATS) == list(named.values())[2:]
    for name, value in named.items():
        assert getattr(formats, name) is formats.FORMATS[value]
        assert str(formats.FORMATS[value]) == value
    of_element = re.findall(
        r"`(\w+)`",
        text.partition("Its `element`")[2].partition("Its `scale`")[0].replace("`formats.element`", ""),
    )
    assert len(of_element) == 13
    for block_format in formats.BLOCK_FORMATS.values():
        assert not [name for name in of_element if not hasattr(block_format.element, name)]
