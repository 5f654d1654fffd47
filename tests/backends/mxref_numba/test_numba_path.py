"""Which Numba kernels run, and why; and that those for narrow vectors use no other instructions."""

import pickle
import re
import sys
from collections import Counter

import numpy as np
import pytest

pytest.importorskip("numba")

from numba.core.caching import NullCache

from mxref import OperandSpec, discovery, get_backend
from mxref.errors import BackendError, SettingError
from mxref_numba import path
from mxref_numba.backend import NumbaBackend, backend, portable
from mxref_numba.gemm.packed_tiles import _multiply_groups
from mxref_numba.kernels import KERNELS
from mxref_numba.path import KernelPath
from mxref_numba.vector.columns import encode_columns
from mxref_numba.vector.encode import encode_rows
from mxref_numba.vector.staging import stage_row
from mxref_numba.vector.target import TARGETS, Target, VectorNative


def lacking(monkeypatch: pytest.MonkeyPatch, *paths: KernelPath) -> None:
    """Let these paths need what no CPU has."""
    for lacked in paths:
        monkeypatch.setitem(path.REQUIRED, lacked, (f"feature-of-{lacked}",))
    path.missing.cache_clear()


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MXREF_NUMBA_PATH", raising=False)
    yield
    monkeypatch.undo()
    path.missing.cache_clear()


def test_names() -> None:
    assert portable.path is KernelPath.PORTABLE
    assert (backend.name, portable.name) == ("numba", "numba-portable")
    assert get_backend("mxref_numba.backend:portable") is portable
    for each in path.available():
        assert NumbaBackend(each).path is each
        assert NumbaBackend(each).name == f"numba-{each}"
    assert NumbaBackend().path is path.available()[0]
    assert NumbaBackend().name == "numba"


def test_an_unknown_path_is_refused() -> None:
    with pytest.raises(BackendError, match="'sse9' is not one of auto, portable, avx512, avx2"):
        NumbaBackend("sse9")


def test_a_path_that_the_cpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(monkeypatch, KernelPath.AVX512, KernelPath.AVX2)
    assert NumbaBackend().path is KernelPath.PORTABLE
    for asked in ("avx2", KernelPath.AVX2):
        with pytest.raises(
            BackendError, match="^kernel path 'avx2' needs a CPU with feature-of-avx2, .* portable, or auto$"
        ):
            NumbaBackend(asked)


def test_the_reason_names_what_a_faster_path_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    fastest = path.available()[0]
    assert NumbaBackend().details().startswith(f"{fastest} kernels (the fastest")
    assert NumbaBackend("portable").details().startswith("portable kernels (asked for by name)")
    lacking(monkeypatch, KernelPath.AVX512, KernelPath.AVX2)
    why = "the fastest that this CPU can run: avx512 needs feature-of-avx512; avx2 needs feature-of-avx2"
    assert NumbaBackend().details().startswith(f"portable kernels ({why}), ")


@pytest.mark.parametrize("asked", path.available())
def test_the_variable_chooses_a_path(asked: KernelPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXREF_NUMBA_PATH", asked)
    # Backends of one name read each other's layouts, so one made by hand must have the same path.
    for chosen in (NumbaBackend(), NumbaBackend("auto")):
        assert (chosen.path, chosen.name) == (asked, "numba")
    assert chosen.details().startswith(f"{asked} kernels (MXREF_NUMBA_PATH={asked}), ")


@pytest.mark.parametrize("unset", ["", "auto"])
def test_without_the_variable_the_fastest_path_runs(unset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXREF_NUMBA_PATH", unset)
    assert NumbaBackend().path is path.available()[0]


def test_a_wrong_variable_is_an_error_and_no_reason_for_another_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(discovery, "_registry", discovery._Registry())
    monkeypatch.delitem(sys.modules, "mxref_numba.backend")
    monkeypatch.delenv("MXREF_BACKEND", raising=False)
    monkeypatch.setenv("MXREF_NUMBA_PATH", "mmx")
    message = r"^MXREF_NUMBA_PATH='mmx' is not one of auto, portable, avx512, avx2$"
    for ask in (get_backend, discovery.choose, lambda: get_backend("numba")):
        with pytest.raises(SettingError, match=message):
            ask()
    lacking(monkeypatch, KernelPath.AVX2)
    monkeypatch.setenv("MXREF_NUMBA_PATH", "avx2")
    with pytest.raises(SettingError, match="^MXREF_NUMBA_PATH='avx2' needs a CPU with feature-of-avx2, "):
        get_backend()


def test_what_was_pickled_on_one_path_is_read_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = {}
    for each in path.available():
        monkeypatch.setenv("MXREF_NUMBA_PATH", each)
        backends[each] = NumbaBackend()
    q = backend.quantize(np.random.default_rng(2).standard_normal((40, 96)).astype(np.float32), OperandSpec())
    expected = get_backend("reference").scaled_gemm(q, q)
    for made in backends.values():
        prepared = made.prepare(q)
        assert prepared.layout
        loaded = pickle.loads(pickle.dumps(prepared))
        assert (type(loaded), loaded.layout, loaded) == (type(prepared), (), q)
        for read in backends.values():
            np.testing.assert_array_equal(read.scaled_gemm(q, loaded), expected)


NEEDS = {
    "v(f|fn)m(add|sub)": "fma", "vcvtp[hs]2p[hs]": "f16c", "popcnt": "popcnt", "lzcnt": "lzcnt", "movbe": "movbe",
    "tzcnt|andn|bls": "bmi", "(sh[lr]|sar|ror)x|mulx|bzhi|pdep|pext": "bmi2",
}  # fmt: skip
"""Beginnings of instructions that not every CPU with AVX2 need have, and the features that they are of."""


def compiled(kernel: VectorNative, target: Target) -> str:
    """Return the assembly code of a kernel that runs here, compiled anew: the cache keeps no text."""
    made = kernel.on(target).dispatcher()
    made._cache = NullCache()
    KERNELS.remove(made)  # it is none of the package's
    made.compile(kernel.types)
    (overload,) = made.overloads.values()
    text: str = overload.library.get_asm_str()
    return text


def instructions(code: str) -> Counter[str]:
    """Return how often each instruction stands in assembly code."""
    lines = (line.strip() for line in code.splitlines() if line.startswith("\t"))
    return Counter(line.split()[0] for line in lines if line and line[0] not in ".#/")


@pytest.mark.skipif(KernelPath.AVX2 not in path.available(), reason="the CPU, as Numba sees it, has no avx2")
@pytest.mark.parametrize(
    "kernel",
    [encode_rows, encode_columns, stage_row, _multiply_groups],
    ids=["encode", "columns", "stage", "gemm"],
)
def test_code_that_runs_on_avx2_has_no_other_instruction(kernel: VectorNative) -> None:
    code = compiled(kernel, TARGETS[KernelPath.AVX2])
    assert "%ymm" in code
    assert not re.search(r"%zmm|%[xy]mm(1[6-9]|2\d|3[01])|%k[0-7]", code)
    used = {
        feature for name in instructions(code) for start, feature in NEEDS.items() if re.match(start, name)
    }
    assert used <= set(path.REQUIRED[KernelPath.AVX2])
