"""Threads of the Numba backend: any number, from any thread, and none after a fork."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba")

START = """
import os, sys, threading
import numpy as np
import mxref, mxref_numba.threads
backend = mxref.get_backend("numba")
x = np.random.default_rng(0).standard_normal((512, 256), np.float32)
work = lambda: backend.quantize(x, mxref.OperandSpec())
"""
FORK = """
child = os.fork()
if child == 0:
    try:
        work()
        print("done", flush=True)
    except mxref.errors.BackendError as err:
        print(err, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
CROWD = """
expected = work()
found = []
def repeat():
    found.extend(work() == expected for _ in range(50))
crowd = [threading.Thread(target=repeat) for _ in range(4)]
for t in crowd: t.start()
for t in crowd: t.join()
print(len(found), all(found), mxref_numba.threads.started_layer())
"""
USED = "work()\n"
TORCH = "import torch\ntorch.ones(1 << 22).add_(1)\n"
TORCHS_THREADS = """
import numba
torch.set_num_threads(3)
work()
print(torch.get_num_threads(), numba.get_num_threads(), sep="\\n")
"""
OPENMPS_THREADS = """
import ctypes
import numba.np.ufunc.omppool
print(ctypes.CDLL(numba.np.ufunc.omppool.__file__).omp_get_max_threads())
"""

on_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere a fork does not lose OpenMP's threads"
)


def python(code: str, layer: str = "omp") -> str:
    variables = {"NUMBA_NUM_THREADS": "2", "OMP_NUM_THREADS": "3", "NUMBA_THREADING_LAYER": layer}
    done = subprocess.run(
        [sys.executable, "-c", START + code],
        env=os.environ | variables, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@on_linux
def test_a_forked_child_is_told_to_spawn() -> None:
    assert "spawn" in python(USED + FORK)


@on_linux
def test_beside_torch_a_forked_child_is_told_to_spawn_and_torch_keeps_its_number_of_threads() -> None:
    """Numba starts two threads, and sets OpenMP's number, which PyTorch reads, to two on its way."""
    pytest.importorskip("torch")
    told, of_torch, of_numba = python(TORCH + FORK + TORCHS_THREADS).splitlines()
    assert "spawn" in told
    assert (of_torch, of_numba) == ("3", "2")


@on_linux
def test_a_child_forked_before_any_threads_works_and_leaves_the_number_of_openmp() -> None:
    assert python(FORK + USED + OPENMPS_THREADS).splitlines() == ["done", "3"]


@on_linux
def test_a_forked_child_works_on_the_layer_that_the_error_names() -> None:
    assert python(USED + FORK, layer="workqueue") == "done"


@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_calls_from_several_threads_at_once(layer: str) -> None:
    assert python(CROWD, layer) == f"200 True {layer}"


def test_a_spawned_worker_computes_what_its_parent_does() -> None:
    code = """
if __name__ == "__main__":
    import multiprocessing
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(backend.quantize, (x, mxref.OperandSpec())) == work())
"""
    assert python(USED + code) == "True"


def test_the_number_of_threads_changes_no_bit() -> None:
    code = """
import numba
two = work()
numba.set_num_threads(1)
print(work() == two, numba.get_num_threads())
"""
    assert python(code) == "True 1"
