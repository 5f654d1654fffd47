"""The protocol: capabilities are promises, selection is explained, and nothing falls back silently."""

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from dataclasses import fields, replace

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

import mxref
from conftest import EXTENSION, load_clauses
from mxref import (
    Backend,
    BlockShape,
    Capabilities,
    GemmProfile,
    OperandSpec,
    PreparedArray,
    Rounding,
    ScaleRule,
    Stream,
    UnsupportedError,
    get_backend,
    hadamard,
    quantize,
    scaled_gemm,
)
from mxref.cli import main
from mxref.discovery import candidates, choose
from mxref.errors import BackendError, DtypeError, LoadError, NonfiniteError, ShapeError
from mxref.formats import MXFP4
from mxref.hadamard import Rotation
from mxref.philox import random_integers
from mxref.placement import Placement
from mxref.reference import ReferenceBackend
from oracle import random as oracle_random

X = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)


class Narrow(ReferenceBackend):
    name = "narrow"
    capabilities = Capabilities(
        scale_rules=frozenset({ScaleRule.FLOOR}),
        roundings=frozenset({Rounding.RNE, Rounding.SR}),
        max_sr_bits=16,
        blocks=frozenset({BlockShape.ROW}),
        hadamard_sizes=frozenset({16}),
        prescale=False,
        in_dtypes=frozenset({"float32"}),
        dequantize_dtypes=frozenset({"float32"}),
        gemm_dtypes=frozenset({"float32"}),
    )


narrow = Narrow()


@pytest.mark.clause("conformance.unsupported", evidence="known answer")
@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: narrow.quantize(X, OperandSpec(scale_rule="even")), "scale_rules"),
        (lambda: narrow.quantize(X, OperandSpec(rounding="rna")), "roundings"),
        (
            lambda: narrow.quantize(
                X, OperandSpec(rounding="sr", sr_bits=17), placement=Placement(Stream(0))
            ),
            "max_sr_bits",
        ),
        (lambda: narrow.quantize(X, OperandSpec(block="32x32")), "blocks"),
        (lambda: narrow.quantize(X, OperandSpec(hadamard=32)), "hadamard_sizes"),
        (lambda: narrow.quantize(X, OperandSpec(prescale=True)), "prescale"),
        (lambda: narrow.scaled_gemm(quantize(X), quantize(X, OperandSpec(prescale=True))), "prescale"),
        (lambda: narrow.quantize(X.astype(np.float16), OperandSpec()), "in_dtypes"),
        (lambda: narrow.hadamard(X.astype(np.float16), 16), "in_dtypes"),
        (lambda: narrow.hadamard(X, 32), "hadamard_sizes"),
        (lambda: narrow.dequantize(quantize(X), "bfloat16"), "dequantize_dtypes"),
        (lambda: narrow.scaled_gemm(quantize(X), quantize(X), profile="exact"), "gemms"),
        (lambda: narrow.scaled_gemm(quantize(X), quantize(X), out_dtype="bfloat16"), "gemm_dtypes"),
    ],
)
def test_what_is_not_declared_is_refused_by_field(call, field):
    with pytest.raises(UnsupportedError, match=rf"backend 'narrow' .*{field}"):
        call()


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


@pytest.mark.clause("conformance.dual")
def test_quantize_dual_gives_both_orientations():
    reference = get_backend("reference")
    specs = (OperandSpec(rounding="sr"), OperandSpec(hadamard=32))
    placements = tuple(
        Placement(stream, origin=(64, 0), global_shape=(128, 64)) for stream in (Stream(1), None)
    )
    row, column = reference.quantize_dual(X, specs, placements=placements)
    assert row == reference.quantize(X, specs[0], placement=placements[0])
    assert column == reference.quantize(X, specs[1], axis=0, placement=placements[1])


@pytest.mark.clause("conformance.dual", "quantize.padding")
def test_quantize_dual_pads_each_orientation_on_its_own():
    reference = get_backend("reference")
    x, specs = X[:41, :50], (OperandSpec(hadamard=64), OperandSpec())
    row, column = reference.quantize_dual(x, specs, pads=(True, True))
    assert (row.length, column.length) == (64, 64)
    assert row == reference.quantize(x, specs[0], pad=True)
    assert column == reference.quantize(x, specs[1], axis=0, pad=True)
    for pads, axis in (((True, False), 0), ((False, True), 1)):
        with pytest.raises(ShapeError, match=f"axis {axis} has length"):
            reference.quantize_dual(x, specs, pads=pads)
    with pytest.raises(ShapeError, match=r"takes a matrix, got shape \(64,\)"):
        reference.quantize_dual(X[0], specs)
    with pytest.raises(UnsupportedError, match="hadamard_sizes"):
        narrow.quantize_dual(X, specs)


class Layered(ReferenceBackend):
    """Its GEMM reads scales from a layout, and keeps what it was given."""

    name = "layered"

    def _prepare(self, q, profile):
        return (q.scales.copy(),) if profile is GemmProfile.ORDERED else ()

    def _scaled_gemm(self, a, b, profile, out_dtype):
        self.seen = a, b
        if isinstance(b, PreparedArray):
            b = replace(b, scales=b.layout[0])
        return super()._scaled_gemm(a, b, profile, out_dtype)


@pytest.mark.clause("conformance.dual", "conformance.protocol")
def test_a_prepared_operand_is_read_by_who_prepared_it_and_by_all_others_as_codes():
    layered, reference = Layered(), get_backend("reference")
    a, b = quantize(X), quantize(X[:32], OperandSpec(prescale=True))
    prepared = layered.prepare(b, profile="ordered")
    assert isinstance(prepared, PreparedArray)
    assert prepared == b
    assert prepared.codes is b.codes
    for profile in ("ordered", "exact"):
        want = reference.scaled_gemm(a, b, profile=profile)
        np.testing.assert_array_equal(layered.scaled_gemm(a, prepared, profile=profile), want)
        assert isinstance(layered.seen[1], PreparedArray) == (profile == "ordered")
        np.testing.assert_array_equal(reference.scaled_gemm(a, prepared, profile=profile), want)
    prepared.layout[0][:] = 255  # whoever reads it now gives NaN
    assert np.isnan(layered.scaled_gemm(a, prepared)).all()
    assert not np.isnan(layered.scaled_gemm(a, prepared, profile="exact")).any()
    assert not np.isnan(reference.scaled_gemm(a, prepared)).any()
    namesake = PreparedArray.of(b, "another", "ordered", prepared.layout)
    assert not np.isnan(layered.scaled_gemm(a, namesake)).any()
    assert layered.prepare(b, profile="exact") is b
    assert reference.prepare(b) is b


@pytest.mark.clause("conformance.dual", "conformance.unsupported", evidence="known answer")
def test_prepare_refuses_what_the_gemm_would():
    with pytest.raises(UnsupportedError, match="gemms"):
        narrow.prepare(quantize(X), profile="exact")
    with pytest.raises(UnsupportedError, match="prescale"):
        narrow.prepare(quantize(X, OperandSpec(prescale=True)))
    with pytest.raises(ShapeError, match=r"two axes, got shape \(2, 32, 64\)"):
        narrow.prepare(quantize(X.reshape(2, 32, 64)))


@pytest.mark.clause("conformance.dual", evidence="known answer")
def test_a_product_is_added_in_place_and_rounded_once():
    layered = Layered()
    a, b = (
        quantize(np.ones((2, 32), np.float32)),
        quantize(np.full((3, 32), 0.5, np.float32)),
    )  # products of 16
    onto = np.array([[1.5, -16, 2.0**28 + 32], [np.nan, -np.inf, 0]], np.float32)
    for right in (b, layered.prepare(b)):
        held = onto.copy()
        assert layered.add_product(a, right, held) is None
        # 2^28 + 48 is a tie of float32, which has units of 32 there.
        np.testing.assert_array_equal(held, np.float32([[17.5, 0, 2**28 + 64], [np.nan, -np.inf, 16]]))
        assert isinstance(layered.seen[1], PreparedArray) == (right is not b)
    foreign = PreparedArray.of(b, "another", "ordered", (b.codes,))
    layered.add_product(a, foreign, onto, profile="exact")
    assert not isinstance(layered.seen[1], PreparedArray)
    assert onto[0, 0] == 17.5


@pytest.mark.clause("conformance.dual", "conformance.unsupported", evidence="known answer")
def test_what_cannot_be_added_to_is_refused_and_left_as_it_was():
    reference, a, b = get_backend("reference"), quantize(X[:4]), quantize(X[:6])
    plain, frozen = np.ones((4, 6), np.float32), np.ones((4, 6), np.float32)
    frozen.flags.writeable = False
    for backend, onto, words in (
        (reference, [[1.0] * 6] * 4, "got list"),
        (reference, np.ones((4, 6)), "the array holds float64: cast it to float32, or add the result"),
        (reference, plain.astype(ml_dtypes.bfloat16), "holds bfloat16"),
        (reference, plain.astype(">f4"), "holds >f4"),
        (reference, np.ones((6, 4), np.float32), r"shape \(6, 4\), the product \(4, 6\)"),
        (reference, np.ones((1, 6), np.float32), r"shape \(1, 6\), the product"),
        (
            reference,
            np.ones((6, 4), np.float32).T,
            "in C order, and this one of shape .* give a contiguous copy",
        ),
        (reference, np.ones((4, 12), np.float32)[:, ::2], "in C order"),
        (reference, frozen, "read-only"),
    ):
        with pytest.raises((DtypeError, ShapeError), match=words):
            backend.add_product(a, b, onto)
        assert (np.asarray(onto, np.float32) == 1).all()
    for profile, right, error in (
        ("exact", b, UnsupportedError),
        ("ordered", quantize(X[:6], OperandSpec(prescale=True)), UnsupportedError),
        ("ordered", quantize(X[:6, :32]), ShapeError),
    ):
        with pytest.raises(error):
            narrow.add_product(a, right, plain, profile=profile)
        assert (plain == 1).all()


@pytest.mark.clause("conformance.dual", "scale.nonfinite")
def test_fused_operations_refuse_nan_where_the_policy_does():
    class Fused(ReferenceBackend):
        def _fake_quantize(self, x, plan, dtype):
            return np.zeros(x.shape, dtype)

    bad = X.copy()
    bad[3, 3] = np.nan
    spec = OperandSpec(nonfinite="raise")
    with pytest.raises(NonfiniteError, match="1 blocks"):
        Fused().fake_quantize(bad, spec)
    with pytest.raises(NonfiniteError, match="1 blocks"):
        Fused().quantize_dual(bad, (OperandSpec(), spec))
    assert not Fused().fake_quantize(bad, OperandSpec()).any()


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


@pytest.mark.clause("conformance.selection", evidence="known answer")
def test_selection_argument_then_environment_then_default(monkeypatch):
    monkeypatch.setenv("MXREF_BACKEND", "reference")
    assert choose("numba") == ("numba", "asked for by name")
    assert choose() == ("reference", "MXREF_BACKEND=reference")
    assert get_backend().name == "reference"
    monkeypatch.delenv("MXREF_BACKEND")
    name, reason = choose()
    assert name in ("numba", "reference")
    assert "the default: first of numba, reference" in reason


@pytest.mark.clause("conformance.selection", evidence="known answer")
def test_unknown_names_list_the_known_ones():
    with pytest.raises(
        BackendError, match=r"unknown backend 'numbr' \(did you mean 'numba'\?\); known: .*reference"
    ):
        get_backend("numbr")


BACKEND_FILE = """
    from mxref.reference import ReferenceBackend

    class Mine(ReferenceBackend):
        name = "mine"

    backend = Mine()
    factory = Mine
    number = 3
"""


@pytest.mark.clause("conformance.selection", "conformance.protocol", evidence="known answer")
def test_one_file_is_a_backend(tmp_path, monkeypatch):
    path = tmp_path / "mine_backend.py"
    path.write_text(textwrap.dedent(BACKEND_FILE))
    monkeypatch.setenv("MXREF_BACKEND", f"{path}:backend")
    assert get_backend().name == "mine"
    assert get_backend(f"{path}:factory").quantize(X, OperandSpec()) == quantize(X)
    with pytest.raises(BackendError, match="is of type int, not an mxref.Backend"):
        get_backend(f"{path}:number")
    with pytest.raises(BackendError, match=r"has no 'bakend' \(did you mean 'backend'"):
        get_backend(f"{path}:bakend")
    monkeypatch.syspath_prepend(tmp_path)
    assert get_backend("mine_backend:backend").name == "mine"


UNFINISHED = """
    from mxref import Backend, Capabilities

    class Unfinished(Backend):
        name, capabilities = "unfinished", Capabilities()
        def _quantize(self, x, plan): ...
        def _hadamard(self, x, rotation, axis): ...

    def make(): return Unfinished()
"""


@pytest.mark.clause("conformance.protocol", evidence="known answer")
@pytest.mark.parametrize(("name", "at_import"), [("backend", True), ("make", False), ("Unfinished", False)])
def test_a_backend_without_a_method_is_refused_in_one_line(tmp_path, name, at_import):
    path = tmp_path / "unfinished.py"
    path.write_text(textwrap.dedent(UNFINISHED) + ("backend = Unfinished()\n" if at_import else ""))
    with pytest.raises(
        BackendError, match="class Unfinished lacks _dequantize, _scaled_gemm: all four"
    ) as error:
        get_backend(f"{path}:{name}")
    assert "\n" not in str(error.value)


SPEC = load_clauses().read_chapters(EXTENSION.parent.parent).clauses


@pytest.mark.clause("conformance.public", evidence="known answer")
def test_public_operations_have_the_signatures_of_the_specification():
    written = re.findall(r"^ +(\w+)(\(.*\))$", SPEC["conformance.public"].text, re.MULTILINE)
    assert len(written) == 10
    for name, parameters in written:
        scope = {"Placement": Placement}
        exec(f"def f{parameters}: pass".replace("(", "(self, ", 1), scope)
        want, got = (inspect.signature(f).parameters.values() for f in (scope["f"], getattr(Backend, name)))
        assert [(p.name, p.kind, p.default) for p in got] == [(p.name, p.kind, p.default) for p in want]


@pytest.mark.clause("conformance.names", evidence="known answer")
def test_names_are_those_of_the_specification():
    rows = re.findall(r"^`(\w+)` +([A-Z].*)$", SPEC["conformance.names"].text, re.MULTILINE)
    assert len(rows) == 6
    for enum, members in rows:
        named = dict(re.findall(r'(\w+) `"([^"]+)"`', members))
        assert {m.name: str(m) for m in getattr(mxref, enum)} == named
        assert all(getattr(getattr(mxref, enum), name) == value for name, value in named.items())
    named = dict(
        re.findall(r'`([A-Z0-9_]+)` `"(\w+)"`', SPEC["conformance.names"].text.partition("A format is")[2])
    )
    assert {name: str(getattr(mxref.formats, name)) for name in named} == named
    assert {format: mxref.formats.FORMATS[format].name for format in named.values()} == {
        format: format for format in mxref.formats.FORMATS
    }


@pytest.mark.clause("conformance.capabilities", evidence="known answer")
def test_capabilities_have_the_defaults_of_the_specification():
    everything = {
        "scale_rules": set(ScaleRule), "roundings": set(Rounding), "blocks": set(BlockShape),
        "hadamard_sizes": {2, 4, 8, 16, 32, 64, 128, 256},
        "in_dtypes": {"float32", "bfloat16", "float16"}, "gemm_dtypes": {"float32", "bfloat16"},
    }  # fmt: skip
    counts = {"both": 2, "all three": 3, "all four": 4, "all eight": 8}
    rows = re.findall(r"^`(\w+)` .* {2,}(\S.*)$", SPEC["conformance.capabilities"].text, re.MULTILINE)
    assert [name for name, _ in rows] == [f.name for f in fields(Capabilities)]
    for name, default in rows:
        if name == "formats":
            assert (default, Capabilities().formats) == ("`{MXFP4}`", {MXFP4})
        elif name == "gemms":
            assert default == "`ordered` of two"  # and `MXFP4` in the line below
            assert Capabilities().gemms == {(GemmProfile.ORDERED, MXFP4, MXFP4)}
        elif default in counts:
            assert len(everything[name]) == counts[default]
            assert getattr(Capabilities(), name) == everything[name]
        else:
            assert getattr(Capabilities(), name) == ast.literal_eval(default.strip("`")), name


def test_missing_modules_and_files(tmp_path):
    with pytest.raises(BackendError, match=r"cannot load backend nowhere:backend: .*nowhere.py:backend"):
        get_backend("nowhere:backend")
    with pytest.raises(BackendError, match="cannot load backend"):
        get_backend(f"{tmp_path}/none.py:backend")


@pytest.mark.clause("conformance.selection", evidence="known answer")
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit(0)", r"its code raised SystemExit: 0 \(.*mine.py, line 1\)"),
        ("raise ValueError('bad\\n table')", r"its code raised ValueError: bad table \(.*mine.py, line 1\)"),
        ("raise RuntimeError", r"its code raised RuntimeError: no message \(.*mine.py, line 1\)"),
        ("def f(:", r"its code raised SyntaxError: .*line 1\)"),
        ("def backend(): exit(0)", r"its code raised SystemExit: 0"),
        ("import os; os._exit(0)", r"its code raised SystemExit: os\._exit\(0\) \(.*mine.py, line 1\)"),
    ],
)
def test_what_a_backends_code_raises_while_it_is_loaded_is_one_error(tmp_path, code, message):
    (tmp_path / "mine.py").write_text(f"{code}\n")
    with pytest.raises(LoadError, match=f"cannot load backend '.*mine.py:backend': {message}") as error:
        get_backend(f"{tmp_path}/mine.py:backend")
    assert "\n" not in str(error.value)


@pytest.mark.clause("conformance.selection", evidence="known answer")
def test_a_loaded_backend_may_fork_and_a_kept_exit_works_later(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from os import _exit, fork, waitpid\n"
        "child = fork()\n"
        "child or _exit(7)\n"
        "ended = waitpid(child, 0)[1] >> 8\n" + textwrap.dedent(BACKEND_FILE)
    )
    code = (
        "import sys; from mxref import get_backend; backend = get_backend(sys.argv[1])\n"
        "kept = sys.modules[type(backend).__module__]; kept._exit(kept.ended)"
    )
    command = [sys.executable, "-c", code, f"{tmp_path}/mine.py:backend"]
    assert subprocess.run(command, check=False, timeout=60).returncode == 7


@pytest.mark.clause("conformance.selection", evidence="known answer")
@pytest.mark.parametrize("code", ["raise SystemExit(0)", "import os; os._exit(0)"])
def test_training_with_a_backend_that_exits_is_refused(tmp_path, code):
    pytest.importorskip("torch")
    (tmp_path / "mine.py").write_text(f"{code}\n")
    command = ["train", "tiny", "--dry-run", "--backend", f"{tmp_path}/mine.py:backend"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2
    assert "its code raised SystemExit: " in result.stderr


@pytest.mark.clause("conformance.selection", evidence="known answer")
def test_a_file_has_a_name_of_its_own_and_finds_its_siblings(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    for module in ("colorsys_of_mine", "colorsys"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    (tmp_path / "colorsys.py").write_text(f"import colorsys_of_mine\n{textwrap.dedent(BACKEND_FILE)}")
    (tmp_path / "colorsys_of_mine.py").write_text("import colorsys\nassert colorsys.hsv_to_rgb\n")
    assert get_backend(f"{tmp_path}/colorsys.py:backend").name == "mine"
    assert sys.modules["colorsys"].hsv_to_rgb
    assert sys.path[-1] == str(tmp_path)


def test_a_backend_without_capabilities_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text(textwrap.dedent(BACKEND_FILE) + "backend.capabilities = None\n")
    with pytest.raises(BackendError, match="declares nothing: give it `capabilities`"):
        get_backend(f"{tmp_path}/mine.py:backend")


def test_a_backend_whose_package_is_missing_says_what_to_install():
    code = """
        import sys
        sys.modules["numba"] = None
        from mxref.discovery import candidates, choose
        found = {c.name: c for c in candidates()}
        assert found["numba"].backend is None
        assert "pip install 'mxref[numba]'" in found["numba"].problem, found["numba"].problem
        assert choose()[0] == "reference"
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env={"PATH": ""})


def test_candidates_hold_the_reference_and_their_source():
    found = {c.name: c for c in candidates()}
    assert found["reference"].source == "mxref.reference:backend"
    assert isinstance(found["reference"].backend, Backend)
