"""Two ranks on the CPU: FSDP2 has the bits of unsharded training, and a followed handle gives each rank its own."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ranks import assert_ranks_print

from mxref import get_backend
from mxref.errors import DtypeError, MxrefError
from mxref_torch.bridge import to_backend
from mxref_torch.errors import LayerError
from places import TESTS

CASES = [f"reference:{recipe}:3" for recipe in ("mxfp4", "tseng", "fp8", "bf16", "nvfp4")]
with suppress(MxrefError):  # where numba is not installed
    CASES += [f"{get_backend('numba').name}:{recipe}:3" for recipe in ("mxfp4_h16", "tseng")]


INTERPRETED = ["mxref_triton:TritonBackend:mxfp4:1"]


@pytest.mark.parametrize("cases", [CASES, INTERPRETED], ids=["compiled", "interpreted"])
def test_two_ranks_take_the_steps_of_one(cases: list[str], tmp_path: Path) -> None:
    settings = {}
    if cases is INTERPRETED:
        pytest.importorskip("triton")
        settings["TRITON_INTERPRET"] = "1"
        folders = [str(TESTS / "backends" / "mxref_triton"), os.environ.get("PYTHONPATH", "")]
        settings["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    assert_ranks_print([f"{case} equal" for case in cases], "sharded.py", tmp_path, *cases, settings=settings)


@pytest.mark.clause("linear.tensor_scale")
def test_sums_over_two_ranks_are_float32_and_scales_are_those_of_whole_tensors(tmp_path: Path) -> None:
    """Faults are planted too: sums in bfloat16, which dX and Y show, and a scale of each rank's own part."""
    lines = ["sums in float32: wrong are [[], []]", "sums in bfloat16: wrong are [['dX'], ['Y']]"]
    lines += [
        "nvfp4: wrong are [[], []]",
        "each its own amax: wrong is something [True, True]",
    ]
    settings = {"PYTHONPATH": os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))}
    assert_ranks_print(lines, "split_ranks.py", tmp_path, settings=settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_memory_is_shared_and_its_storage_can_still_be_resized(dtype: torch.dtype) -> None:
    backend = get_backend("reference")
    for shape in ((4, 6), (3, 0), (0, 3), (5,), ()):
        tensor = torch.ones(shape).to(dtype)
        for view in (tensor, tensor.t() if len(shape) == 2 else tensor, tensor[1:] if shape else tensor):
            array = to_backend(view, backend)
            assert array.shape == tuple(view.shape)
            assert array.flags.writeable
            np.testing.assert_array_equal(array.astype(np.float32), view.float().numpy())
            array[...] = 2
            assert (view == 2).all()
    tensor = torch.ones(4, 6).to(dtype)
    to_backend(tensor, backend)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(LayerError, match="shape .4, 6. has no memory: sharded training has freed it"):
        to_backend(tensor, backend)


def test_an_array_keeps_its_tensor_and_other_types_are_refused() -> None:
    backend = get_backend("reference")
    array = to_backend(torch.arange(1000.0), backend)
    torch.full((1000,), -1.0)  # takes the memory, were it free
    np.testing.assert_array_equal(array, np.arange(1000))
    with pytest.raises(DtypeError, match="NumPy has no type for torch.complex64"):
        to_backend(torch.ones(2, dtype=torch.complex64), backend)


def test_two_ranks_of_a_followed_model_take_the_steps_of_one_process(tmp_path: Path) -> None:
    assert_ranks_print(["ddp", "fsdp", "policy"], "api_ranks.py", tmp_path)
