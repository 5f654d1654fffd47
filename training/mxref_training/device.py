"""Where and how a run computes: its device and memory, deterministic kernels, and no kernel chosen by its time.

Every run uses PyTorch's deterministic kernels. `run.deterministic = true` adds that nothing is measured to choose a
kernel: a compiler or library that times several of them may take another one in another process, on a GPU that is
shared for example, and reductions in another order have other bits.
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch

from mxref.backend import Backend
from mxref.discovery import choose
from mxref.tomlio import shown
from mxref_training.config import Compile, TrainConfig
from mxref_training.distributed.ranks import SOLE, Ranks
from mxref_training.errors import ConfigError
from mxref_training.wording import counted

CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Where Linux says how much memory a container may hold, in its two versions."""


def choose_device(wanted: str, backend: Backend, ranks: Ranks = SOLE) -> torch.device:
    """Return the device of a run, which is one that the backend computes on; of several ranks, that of this rank.

    Args:
        wanted: `auto`, or what `torch.device` takes, as in `cpu` or `cuda:1`; several ranks take no number.
        backend: `auto` is the first GPU if it computes on GPUs, else the CPU.
        ranks: each takes the GPU of its number on its host.

    Raises:
        ConfigError: no such device here, or the backend does not compute on it.
    """
    devices = backend.capabilities.devices
    if wanted == "auto":
        wanted = "cpu" if "cpu" in devices else min(devices)
    try:
        device = torch.device(wanted)
    except RuntimeError as err:
        raise ConfigError(
            f"run.device = {shown(wanted)} is no device; take auto, cpu, cuda or cuda:N"
        ) from err
    if device.type not in devices:
        raise ConfigError(
            f"run.device = {shown(wanted)}, but backend {backend.name!r} computes on {', '.join(sorted(devices))}; "
            "set run.device = 'auto', or choose another backend"
        )
    if device.type == "cuda":
        if ranks.several and device.index is not None:
            raise ConfigError(
                f"run.device = {wanted!r} on {ranks.world} ranks, each of which takes a GPU of its own: set 'cuda'"
            )
        count, index = torch.cuda.device_count(), device.index or ranks.local_rank
        seen = f"PyTorch sees {counted(count, 'GPU')} on {socket.gethostname()}"
        if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
            seen += f", where CUDA_VISIBLE_DEVICES = {shown(visible)}"
        if ranks.several and ranks.local_world > count:
            raise ConfigError(
                f"{counted(ranks.local_world, 'rank')} of this host, but {seen}: each rank must see the GPUs of all "
                "ranks of its host; let it see them, or start fewer ranks there"
            )
        if not 0 <= index < count:
            raise ConfigError(f"run.device = {wanted!r}, but {seen}")
        device = torch.device("cuda", index)
    return device


def default_backend(name: str | None, wanted: str) -> tuple[str, str]:
    """Return the name of a run's backend and the reason for it, as `mxref.discovery.choose` does.

    Args:
        name: what was asked for, if anything was.
        wanted: the key `run.device`; `auto` is a GPU where PyTorch sees one.
    """
    on_gpu = torch.cuda.is_available() and wanted.partition(":")[0] in ("auto", "cuda")
    return choose(name, "cuda" if on_gpu else "cpu")


def made_current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one in a block. An event that is given no stream takes one of the current GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def memory_limit(device: torch.device) -> int:
    """Return the bytes that a run may hold on a device: on a CPU the machine's, or a lower limit of the process."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space)
    texts = (path.read_text(encoding="ascii").strip() for path in CGROUP_LIMITS if path.is_file())
    limits += [int(text) for text in texts if text.isdecimal()]  # `max` is no limit
    return min(limits)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt, in glibc's malloc.h."""


def keep_freed_memory() -> None:
    """Have the C library of Linux keep the memory of freed arrays for those of the next step.

    By default it gives large blocks back to the system, which clears them page by page when they are taken again: up
    to ten thousand page faults in a step of a small model. Other C libraries are left as they are.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_MMAP_THRESHOLD, 32 << 20)  # the most that glibc takes
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


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
        ConfigError: a setting of this process chooses kernels in another way.
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
            from torch._inductor import config as inductor

            untimed = inductor.patch(deterministic=True, max_autotune=False, coordinate_descent_tuning=False)
            settings.enter_context(untimed)
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


def _refused(reason: str, way_out: str) -> ConfigError:
    return ConfigError(f"run.deterministic = true, but {reason}: {way_out}, or set run.deterministic = false")
