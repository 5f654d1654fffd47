"""Starting a kernel again without Triton's look at its arguments: what is remembered is never too coarse."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from mxref_triton import launch as launching
from mxref_triton.launch import kinds

MEMORY = torch.zeros(256, dtype=torch.uint8)
START = -MEMORY.data_ptr() % 16
ARGUMENTS = [
    *(sign * n for n in (0, 1, 2, 15, 16, 17, 31, 32, (1 << 31) - 16, (1 << 31), 1 << 40) for sign in (1, -1)),
    (1 << 31) - 1, -(1 << 31) - 1, (1 << 63) - 1, 1 << 63, 0.0, 1.0, 0.5, None,
    *(MEMORY[START + at :] for at in (0, 1, 4, 8, 16, 32)),
    *(MEMORY[START : START + 64].view(dtype) for dtype in (torch.int32, torch.int64, torch.bfloat16)),
]  # fmt: skip


def of_triton(x):
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    return native_specialize_impl(backend, x, False, True, True)


def test_arguments_of_one_kind_are_one_kind_to_triton():
    kinds_of = [kinds((x,)) for x in ARGUMENTS]
    of = [of_triton(x) for x in ARGUMENTS]
    for kind in set(kinds_of):
        assert len({repr(t) for k, t in zip(kinds_of, of, strict=True) if k == kind}) == 1, kind
    assert len(set(kinds_of)) >= len({repr(t) for t in of}) > 10


@pytest.mark.parametrize("x", [True, "text", (1, 2), object()])
def test_other_arguments_have_no_kind(x):
    assert kinds((x,)) is None


class Fake:
    """A kernel that counts how often Triton looks at it, and what it compiles."""

    arg_names = ("x", "n", "SIZE", "FLAG")

    def __init__(self):
        self.looked, self.ran = [], []

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.looked.append((grid, arguments, constants))
            return SimpleNamespace(
                run=lambda *given: self.ran.append(given), function="function", packed_metadata="metadata"
            )

        return run


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is not there, as far as a launch asks for one."""
    active = SimpleNamespace(get_current_stream=lambda device: f"stream of {device}")
    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(launching.torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(launching.torch.version, "hip", None)
    monkeypatch.setattr(launching.triton.runtime.driver, "_active", active)


def tensor(at=0):
    """A tensor that says it is on a GPU."""

    class OnGpu(torch.Tensor):
        is_cuda = True
        device = SimpleNamespace(index=3)

    return MEMORY[START + at :].as_subclass(OnGpu)


@pytest.mark.usefixtures("gpu")
def test_a_kernel_is_looked_at_once_for_each_kind_of_arguments_and_each_constant():
    kernel, x = Fake(), tensor()
    for n in (32, 48, 64):
        launching.launch(kernel, (7, 2), x, n, SIZE=4, FLAG=True, num_warps=8)
    assert len(kernel.looked) == 1
    assert kernel.looked[0][2] == {"num_warps": 8, "enable_fp_fusion": False, "SIZE": 4, "FLAG": True}
    assert [run[:9] for run in kernel.ran] == [
        (7, 2, 1, "stream of 3", "function", "metadata", None, None, None)
    ] * 2
    assert [run[9:] for run in kernel.ran] == [(x, n, 4, True) for n in (48, 64)]
    launching.launch(kernel, (7,), x, 33, SIZE=4, FLAG=True, num_warps=8)
    launching.launch(kernel, (7,), tensor(4), 32, SIZE=4, FLAG=True, num_warps=8)
    launching.launch(kernel, (7,), x, 32, SIZE=8, FLAG=True, num_warps=8)
    launching.launch(kernel, (7,), x, 32, SIZE=4, FLAG=True)
    assert len(kernel.looked) == 5


@pytest.mark.usefixtures("gpu")
def test_what_looks_at_launches_sees_each(monkeypatch):
    kernel, x = Fake(), tensor()
    hook = SimpleNamespace(calls=[print])
    for name, value in (("launch_enter_hook", hook), ("launch_exit_hook", print)):
        with monkeypatch.context() as patched:
            patched.setattr(launching.triton.knobs.runtime, name, value)
            for _ in range(2):
                launching.launch(kernel, (1,), x, 1, SIZE=1, FLAG=False)
    monkeypatch.setattr(launching.JITFunction, "run", lambda *_, **__: None)
    for _ in range(2):
        launching.launch(kernel, (1,), x, 1, SIZE=1, FLAG=False)
    assert len(kernel.looked) == 6
    assert not kernel.ran
