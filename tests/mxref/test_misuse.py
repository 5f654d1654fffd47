"""Wrong arguments to every public function either work or raise an MxrefError that says what to do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mxref
from mxref.conformance import check, checks_of
from mxref.errors import BackendError, DtypeError, MxrefError, RecipeError, ShapeError
from mxref.explain import explain_block
from mxref.placement import Placement

X = np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32)
Q, SPEC, RECIPE = mxref.quantize(X), mxref.OperandSpec(), mxref.Recipe()

try:
    import torch
    from torch import nn

    import mxref_torch
except ImportError:
    torch = None

BACKENDS = [mxref.get_backend("reference")]
with suppress(MxrefError):  # where numba is not installed
    BACKENDS.append(mxref.get_backend("numba"))


class Thing:
    """Nothing that any function knows."""

    def __repr__(self) -> str:
        return "Thing()"


class OnADevice:
    """An array of a library that gives no NumPy array, as those of CuPy."""

    dtype, shape = np.dtype(np.float32), (32, 32)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")


class Copied:
    """An array of a library whose `__array__` gives a copy."""

    dtype, shape = np.dtype(np.float32), (32, 32)

    def __array__(self, *_: Any, **__: Any) -> Any:
        return X.copy()


def nasty() -> Iterator[Any]:
    yield from (
        None,
        0,
        -1,
        1.5,
        True,
        "",
        "amd",
        "nope",
        "a\0b",
        b"x",
        [1.0],
        (1, 2),
        {},
        {"a": 1},
        Thing(),
        Thing,
    )
    yield from (float("nan"), 1 << 70, np.int64(1), np.float32(1), print, Path("nowhere.toml"), 1j, set())
    yield from (X, X.astype(np.float64), X.astype(">f4"), X[0, 0:0], np.array("a"), np.array([None]), X[0])
    yield from (Q, mxref.Stream(1), SPEC, RECIPE, mxref.DIALECTS["amd"], mxref.Rotation(16), BACKENDS[0])
    yield from (mxref.GemmRole.WGRAD, mxref.ScaleRule.CEIL, OnADevice(), Copied())
    if torch is not None:
        ones = torch.ones(32, 32)
        yield from (
            ones,
            ones.requires_grad_(),
            ones.bfloat16(),
            ones.double(),
            ones.to("meta"),
            ones.to_sparse(),
        )
        yield from (nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32)), ones.to(torch.complex64))


def of_mxref() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    place = {"axis": -1, "placement": Placement(mxref.Stream(1)), "pad": False}
    fields = {name: getattr(SPEC, name) for name in SPEC.__dataclass_fields__}
    table: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "quantize": (mxref.quantize, {"x": X, "spec": SPEC, **place}),
        "dequantize": (mxref.dequantize, {"q": Q, "dtype": "float32"}),
        "scaled_gemm": (mxref.scaled_gemm, {"a": Q, "b": Q, "profile": "exact", "out_dtype": "float32"}),
        "hadamard": (mxref.hadamard, {"x": X, "rotation": mxref.Rotation(16)}),
        "inverse_hadamard": (mxref.inverse_hadamard, {"y": X, "rotation": mxref.Rotation(16)}),
        "linear_gemm": (
            mxref.linear_gemm,
            {"role": "fprop", "a": X, "b": X, "recipe": RECIPE, "backend": BACKENDS[0], "stream": mxref.Stream(1)},
        ),
        "load_recipe": (mxref.load_recipe, {"path": RECIPE}),
        "get_backend": (mxref.get_backend, {"name": "reference"}),
        "explain_block": (
            explain_block, {"x": X, "spec": SPEC, "rng": mxref.Stream(1), "axis": -1, "index": 0, "pad": False},
        ),
        "Stream": (mxref.Stream, {"seed": 1, "step": 0, "layer": 0, "operand": 0}),
        "Placement": (mxref.Placement, {"stream": mxref.Stream(1), "origin": None, "global_shape": None}),
        "Rotation": (mxref.Rotation, {"n": 16, "signs": 0}),
        "OperandSpec": (mxref.OperandSpec, fields),
        "Recipe": (mxref.Recipe, {name: getattr(RECIPE, name) for name in RECIPE.__dataclass_fields__}),
        "MXArray": (mxref.MXArray, {name: getattr(Q, name) for name in mxref.MXArray.__dataclass_fields__}),
        "MXArray.load": (mxref.MXArray.load, {"path": "no.npz"}),
    }  # fmt: skip
    for backend in BACKENDS:
        gemm = {"a": Q, "b": Q, "profile": "ordered"}
        pair = {"specs": (SPEC, SPEC), "placements": (Placement(), Placement())}
        table |= {
            f"{backend.name}.{name}": (getattr(backend, name), given)
            for name, given in {
                "quantize": {"x": X, "spec": SPEC, **place},
                "fake_quantize": {"x": X, "spec": SPEC, "dtype": "float32", **place},
                "quantize_dual": {"x": X, **pair, "pads": (False, False)},
                "dequantize": {"q": Q, "dtype": "float32"},
                "hadamard": {"x": X, "n": 16, "signs": 0, "axis": -1},
                "scaled_gemm": {**gemm, "out_dtype": "float32"},
                "add_product": {**gemm, "onto": np.zeros((32, 32), np.float32)},
                "prepare": {"q": Q, "profile": "ordered"},
            }.items()
        }
    return table


TABLE = of_mxref()


def hold(function: Callable[..., Any], given: dict[str, Callable[[], Any]]) -> None:
    """Call a function with each nasty value in place of each argument."""
    for name in given:
        for value in nasty():
            arguments = {key: make() for key, make in given.items()} | {name: value}
            try:
                function(**arguments)
            except MxrefError:
                pass
            except Exception as err:
                raise AssertionError(f"{name} = {value!r}: {type(err).__name__}: {err}") from err


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize("name", TABLE)
def test_a_wrong_argument_works_or_is_refused_by_an_mxref_error(name: str) -> None:
    function, given = TABLE[name]
    hold(function, {key: (lambda value=value: value) for key, value in given.items()})


@pytest.mark.skipif(torch is None, reason="needs torch")
@pytest.mark.filterwarnings("ignore:converted layers that never ran:UserWarning")
@pytest.mark.parametrize(
    "name", ["convert", "expected_census", "check_census", "check_stochastic_rounding", "advance", "restart"]
)
def test_so_is_one_to_the_training_layer(name: str) -> None:
    def model() -> Any:
        return nn.Sequential(nn.Linear(32, 32))

    table: dict[str, dict[str, Callable[[], Any]]] = {
        "convert": {"model": model, "recipe": lambda: RECIPE, "backend": lambda: BACKENDS[0], "seed": lambda: 1},
        "expected_census": {"model": model, "recipe": lambda: RECIPE},
        "check_census": {
            "context": lambda: mxref_torch.convert(model(), RECIPE, backend=BACKENDS[0], seed=1),
            "model": model, "recipe": lambda: RECIPE,
        },
        "advance": {"model": model},
        "restart": {"model": model},
        "check_stochastic_rounding": {"backend": lambda: BACKENDS[0], "recipe": lambda: RECIPE},
    }  # fmt: skip
    hold(getattr(mxref_torch, name), table[name])


@pytest.mark.skipif(torch is None, reason="needs torch")
@pytest.mark.clause("conventions.inputs")
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_a_tensor_on_the_cpu_is_taken_as_the_array_that_it_is(backend: mxref.Backend) -> None:
    for dtype, name in (
        (torch.float32, np.float32),
        (torch.float16, np.float16),
        (torch.bfloat16, ml_dtypes.bfloat16),
    ):
        tensor = torch.from_numpy(X).to(dtype).t().requires_grad_()
        array = X.astype(name).T
        assert mxref.quantize(tensor) == mxref.quantize(array)
        assert backend.quantize(tensor, "amd") == backend.quantize(array, mxref.DIALECTS["amd"].spec)
        pair = backend.quantize_dual(tensor, ("amd", "ocp"))
        assert pair == backend.quantize_dual(array, (mxref.DIALECTS["amd"].spec, SPEC))
        values = backend.fake_quantize(tensor, "nvidia")
        np.testing.assert_array_equal(values, backend.fake_quantize(array, "nvidia"))
        np.testing.assert_array_equal(backend.hadamard(tensor, 16), backend.hadamard(array, 16))
        assert explain_block(tensor, "amd").packed == explain_block(array, "amd").packed
    sums = torch.zeros(32, 32)
    backend.add_product(Q, Q, sums)
    np.testing.assert_array_equal(sums.numpy(), backend.scaled_gemm(Q, Q))
    with pytest.raises(DtypeError, match=r"a tensor on meta cannot be read.*x.cpu\(\).*for that device"):
        backend.quantize(torch.ones(32, 32, device="meta"), "ocp")


@pytest.mark.skipif(torch is None, reason="needs torch")
@pytest.mark.clause("conventions.inputs", "conformance.arrays")
@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning")
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_every_operation_takes_and_refuses_the_same_arrays(backend: mxref.Backend) -> None:
    import taken_arrays

    taken_arrays.hold(backend)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_an_array_of_another_library_is_converted_or_refused(backend: mxref.Backend) -> None:
    assert mxref.quantize(Copied()) == backend.quantize(Copied(), "ocp") == mxref.quantize(X)
    for call in (
        mxref.quantize,
        explain_block,
        lambda x: backend.hadamard(x, 16),
        lambda x: mxref.hadamard(x, 16),
    ):
        with pytest.raises(
            DtypeError,
            match=r"OnADevice cannot be converted to a NumPy array \(TypeError: Implicit conversion .*it yourself",
        ):
            call(OnADevice())


@pytest.mark.clause("conformance.dual")
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_a_product_is_added_only_to_memory_that_is_the_callers(backend: mxref.Backend) -> None:
    with pytest.raises(
        DtypeError, match="add_product .* NumPy array or a PyTorch tensor on the CPU, got Copied"
    ):
        backend.add_product(Q, Q, Copied())
    if torch is not None:  # torch negates such a view when it is read: as an array it would be a copy
        negated = torch.zeros(32, 32, dtype=torch.complex64).conj().imag
        with pytest.raises(DtypeError, match="negated view.*clone"):
            backend.add_product(Q, Q, negated)


def test_a_transform_takes_what_a_quantization_takes() -> None:
    want = mxref.hadamard(X, mxref.Rotation(16))
    for rotation in (16, np.int64(16)):
        np.testing.assert_array_equal(mxref.hadamard(X, rotation), want)
        np.testing.assert_allclose(mxref.inverse_hadamard(want, rotation), X, atol=1e-5)
    np.testing.assert_array_equal(mxref.hadamard(Copied(), 16), want)
    if torch is not None:
        tensor = torch.from_numpy(X).requires_grad_()
        np.testing.assert_array_equal(mxref.hadamard(tensor, 16), want)
        np.testing.assert_array_equal(
            mxref.inverse_hadamard(tensor, 16), mxref.inverse_hadamard(X, mxref.Rotation(16))
        )
    with pytest.raises(RecipeError, match="Hadamard size 15 is not one of"):
        mxref.hadamard(X, 15)
    with pytest.raises(RecipeError, match="expected a Rotation or a size, got '16'"):
        mxref.hadamard(X, "16")


def test_one_name_is_one_choice_of_the_suite() -> None:
    capabilities = BACKENDS[0].capabilities
    titles = [each.title for each in checks_of(capabilities, ops=["hadamard"], level="quick")]
    assert titles
    assert [each.title for each in checks_of(capabilities, ops="hadamard", level="quick")] == titles
    named = checks_of(capabilities, clauses="hadamard.order", level="quick")
    assert {each.clause for each in named} == {"hadamard.order"}
    report = check(BACKENDS[0], ops="dequantize", clauses="hadamard.order", level="quick")
    assert report.ops == ("dequantize",)
    for given, words in (
        ({"level": "ful"}, "unknown level 'ful' .did you mean 'full'..; known: quick, full"),
        ({"ops": "quantise"}, "unknown operation 'quantise' .did you mean 'quantize'..; known: quantize"),
        ({"ops": 3}, "ops .* got 3 .int."),
        ({"level": 3}, "unknown level 3"),
    ):
        with pytest.raises(RecipeError, match=words):
            check("reference", **given)
        with pytest.raises(RecipeError, match=words):
            checks_of(capabilities, **given)


def test_names_and_dialects_stand_for_a_spec() -> None:
    amd = mxref.DIALECTS["amd"]
    assert mxref.quantize(X, "amd") == mxref.quantize(X, amd) == mxref.quantize(X, amd.spec)
    assert mxref.quantize(X, "amd") != mxref.quantize(X * 0, "amd")
    with pytest.raises(RecipeError, match="unknown dialect 'amdd' .did you mean 'amd'"):
        mxref.quantize(X, "amdd")
    with pytest.raises(RecipeError, match="expected an OperandSpec, a dialect or its name, got Recipe"):
        mxref.quantize(X, RECIPE)


@pytest.mark.skipif(torch is None, reason="needs torch")
def test_names_stand_for_a_shipped_recipe() -> None:
    recipe = mxref.load_recipe("mxfp4_h16")
    assert recipe.fprop.x.hadamard == 16
    assert mxref.load_recipe(recipe) is recipe
    with pytest.raises(
        RecipeError, match="unknown recipe 'mxfp4_h6' .did you mean 'mxfp4_h16'.*end in .toml"
    ):
        mxref.load_recipe("mxfp4_h6")
    with pytest.raises(RecipeError, match="expected a recipe, the name of one, or the path .*, got int"):
        mxref.load_recipe(1)
    model = nn.Sequential(nn.Linear(32, 32))
    mxref_torch.convert(model, "mxfp4_h16", backend="reference", seed=0)
    assert model[0].recipe == recipe
    assert mxref_torch.expected_census(model, "mxfp4_h16") == mxref_torch.expected_census(model, recipe)
    with pytest.raises(BackendError, match="expected a backend or its name, got int"):
        mxref_torch.convert(model, recipe, backend=3, seed=0)


@pytest.mark.skipif(torch is None, reason="needs torch")
def test_a_recipe_is_enough_to_convert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MXREF_BACKEND", raising=False)
    context = mxref_torch.convert(nn.Sequential(nn.Linear(32, 32)), "mxfp4_h16").context
    assert (context.backend, context.seed) == (mxref.get_backend(), 0)
    monkeypatch.setenv("MXREF_BACKEND", "reference")
    assert mxref_torch.convert(
        nn.Sequential(nn.Linear(32, 32)), "mxfp4_h16"
    ).context.backend is mxref.get_backend("reference")


def test_messages_name_the_value_and_the_way_out() -> None:
    with pytest.raises(
        DtypeError, match="scaled_gemm takes an MXArray, got ndarray; quantize it first"
    ) as found:
        mxref.scaled_gemm(Q, X)
    assert isinstance(found.value, TypeError)
    with pytest.raises(RecipeError, match=r"stream must be a Stream, got 3 .int.; make one"):
        mxref.quantize(X, placement=Placement(3))
    with pytest.raises(RecipeError, match=r"placement must be a Placement, got Stream.*; make one"):
        mxref.quantize(X, placement=mxref.Stream(3))
    with pytest.raises(ShapeError, match="axis must be an integer, got 1.5"):
        mxref.quantize(X, axis=1.5)


def test_torch_is_not_imported_for_it() -> None:
    code = "import sys, numpy, mxref; mxref.quantize(numpy.ones(32, 'f4'), 'amd'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
