"""Repeatable runs: kernels with a fixed order of additions, and no kernel that is chosen by its time.

Every run uses PyTorch's deterministic kernels. `run.deterministic = true` adds that nothing is measured to choose a
kernel: a compiler or library that times several of them may take another one in another process, on a GPU that is
shared for example, and reductions in another order have other bits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from mxref.backend import Backend
from mxref_training.config import Compile, TrainConfig
from mxref_training.device import made_current
from mxref_training.errors import ConfigError

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_CUBLAS_FIXED = (":4096:8", ":16:8")
"""Sizes of cuBLAS's workspaces under which its results are deterministic (cuBLAS manual, section 2.1.4)."""
_MPS_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


@contextmanager
def fixed_numerics(config: TrainConfig, backend: Backend, device: torch.device) -> Iterator[None]:
    """Run the block as a run computes: on its device and threads, with deterministic kernels.

    Raises:
        ConfigError: as of `fixed_choices`.
    """
    compiled = config.run.compile is not Compile.NONE
    with (
        made_current(device),
        deterministic(device, config.run.threads, compiled),
        compiler_threads(config),
        fixed_choices(config, backend, device),
    ):
        yield


@contextmanager
def deterministic(device: torch.device, threads: int, compiled: bool = True) -> Iterator[None]:
    """Run the block with deterministic kernels, and on `threads` CPU threads unless that is 0.

    Args:
        device: where it runs.
        threads: the number of threads; 0 leaves it.
        compiled: whether the block may compile something. PyTorch's function tells its compiler too, and imports it
            for that.
    """
    mode, before = torch.get_deterministic_debug_mode(), torch.get_num_threads()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if device.type == "cuda":
        # cuBLAS reads it when it makes a handle; without it PyTorch refuses to call cuBLAS deterministically.
        os.environ.setdefault(CUBLAS, _CUBLAS_FIXED[0])
    if compiled:
        torch.use_deterministic_algorithms(True)
    torch.set_deterministic_debug_mode("error")
    # Otherwise every new tensor is filled with NaN first, which takes one more kernel and pass over memory for each.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if threads:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if compiled:
            torch.use_deterministic_algorithms(mode != 0)
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
        torch.set_num_threads(before)


@contextmanager
def compiler_threads(config: TrainConfig) -> Iterator[None]:
    """Have PyTorch's compiler start no more processes in the block than the run has threads, if `run.threads` is set.

    It starts one for each core, so that a dozen runs that start together on a shared machine would start hundreds.
    """
    threads = config.run.threads
    if config.run.compile is Compile.NONE or not threads:
        yield
        return
    from torch._inductor import config as inductor

    with inductor.patch(compile_threads=min(threads, inductor.compile_threads or threads)):
        yield


@contextmanager
def fixed_choices(config: TrainConfig, backend: Backend, device: torch.device) -> Iterator[None]:
    """Under `run.deterministic`, run the block without choosing any kernel by its time.

    Raises:
        ConfigError: a setting of this process chooses kernels in another way, or PyTorch's compiler cannot do it.
    """
    if not config.run.deterministic:
        yield
        return
    if timed := backend.chosen_by_time():
        raise _refused(f"{timed} has backend {backend.name!r} choose kernels by their time", f"unset {timed}")
    if device.type == "cuda":
        _check_gpu()
    with ExitStack() as settings:
        benchmark = torch.backends.cudnn.benchmark
        settings.callback(setattr, torch.backends.cudnn, "benchmark", benchmark)
        torch.backends.cudnn.benchmark = False
        if config.run.compile is not Compile.NONE:
            settings.enter_context(_untimed_compiler())
        yield


def _check_gpu() -> None:
    """Refuse settings of CUDA's libraries that make results depend on more than the device."""
    workspace = os.environ.get(CUBLAS)
    if workspace is not None and workspace not in _CUBLAS_FIXED:
        raise _refused(
            f"cuBLAS is not deterministic with {CUBLAS}={workspace}",
            f"unset it, or set it to {' or '.join(_CUBLAS_FIXED)}",
        )
    if torch.cuda.tunable.is_enabled():
        raise _refused("PyTorch's TunableOp chooses kernels by their time", "unset PYTORCH_TUNABLEOP_ENABLED")
    share = os.environ.get(_MPS_SHARE, "100")
    if share != "100":
        raise _refused(
            f"{_MPS_SHARE}={share} gives this process a part of the GPU, for which cuBLAS takes other kernels",
            "unset it; processes share a GPU under CUDA MPS without it too",
        )


def _untimed_compiler() -> ExitStack:
    """Return a context in which PyTorch's compiler times no kernel whose choice changes bits."""
    from torch._inductor import config as inductor

    if not hasattr(inductor, "deterministic"):
        raise _refused(
            f"the compiler of PyTorch {torch.__version__} has no deterministic mode",
            "set run.compile = 'none', or take PyTorch 2.11 or newer",
        )
    stack = ExitStack()
    stack.enter_context(
        inductor.patch(deterministic=True, max_autotune=False, coordinate_descent_tuning=False)
    )
    return stack


def _refused(reason: str, way_out: str) -> ConfigError:
    return ConfigError(f"run.deterministic = true, but {reason}: {way_out}, or set run.deterministic = false")
