"""Importing mxref is light: dependencies point one way."""

import subprocess
import sys

import pytest

HEAVY = (
    "torch",
    "numba",
    "triton",
    "llvmlite",
    "click",
    "rich",
    "safetensors",
    "tomli_w",
    "mxref_numba",
    "mxref_torch",
    "mxref_training",
)


def _loaded_after(statement):
    code = f"import sys; {statement}; print(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(run.stdout.split())


def test_import_mxref_brings_numpy_and_ml_dtypes_only():
    loaded = _loaded_after("import mxref; mxref.get_backend('reference')")
    assert {"mxref", "numpy", "ml_dtypes"} <= loaded
    assert not loaded & set(HEAVY)


@pytest.mark.parametrize("package", ["mxref_numba"])
def test_backends_import_neither_torch_nor_training(package):
    loaded = _loaded_after(f"import {package}")
    assert package in loaded
    assert not loaded & {"torch", "mxref_training", "triton"}


def test_the_torch_layer_says_what_to_install_where_torch_is_missing():
    code = "import sys; sys.modules['torch'] = None; import mxref_torch"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert last.endswith("mxref_torch needs PyTorch, which is not installed: pip install 'mxref[training]'")


def test_the_torch_layer_imports_no_training():
    loaded = _loaded_after("import mxref_torch")
    assert "torch" in loaded
    assert not loaded & {"mxref_training", "numba", "triton", "click", "rich"}


def test_training_imports_no_backend():
    loaded = _loaded_after("import mxref_training.trainer, mxref_training.lab.study")
    assert "torch" in loaded
    assert not loaded & {"numba", "mxref_numba", "mxref_triton"}
