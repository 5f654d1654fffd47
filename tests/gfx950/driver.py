"""A Triton device that is the software model: kernels launched on CPU tensors are compiled for gfx950 and executed.

With `on_model()` active, `kernel[grid](...)` does all that it does on a GPU, specialization and compilation for
gfx950 included; only the launch goes to machine.py, on the tensors' own memory.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.cache import get_cache_manager

from gfx950.errors import Gfx950Error
from gfx950.machine import run_compiled
from gfx950.registers import Choices

TARGET = GPUTarget("hip", "gfx950", 64)
LDS_BYTES = 160 * 1024


def memory_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the bytes that a tensor's elements span, as a view of its memory."""
    if tensor.device.type != "cpu":
        raise Gfx950Error(f"the model runs on CPU tensors, not on {tensor.device}")
    span = (
        sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        if tensor.numel()
        else 0
    )
    flat = tensor.as_strided((span,), (1,), tensor.storage_offset())
    return flat.view(torch.uint8).numpy()


@dataclass
class Settings:
    """How launches are executed (see `run_compiled`), and the names of the kernels that were."""

    preload: bool = True
    choices: Choices = field(default_factory=Choices)
    launched: list[str] = field(default_factory=list)


class Launcher:
    """What Triton calls to launch one compiled kernel."""

    settings = Settings()

    def __init__(self, source: Any, metadata: Any) -> None:
        path = get_cache_manager(metadata.hash).get_file(f"{metadata.name}.amdgcn")
        if path is None:
            raise Gfx950Error(f"the assembly of {metadata.name} is not in Triton's cache")
        self.assembly = Path(path).read_text()
        self.types = list(source.signature.values())
        self.metadata = metadata

    def __call__(self, x: int, y: int, z: int, *rest: Any) -> None:
        """Execute the kernel; `rest` is six things about the launch and then the arguments, constants included."""
        values = rest[6:]
        args = [
            memory_of(v) if isinstance(v, torch.Tensor) else v
            for v, kind in zip(values, self.types, strict=True)
            if kind != "constexpr"
        ]
        run_compiled(
            self.assembly, (x, y, z), args, self.metadata.num_warps, shared=self.metadata.shared,
            preload=self.settings.preload, choices=self.settings.choices,
        )  # fmt: skip
        self.settings.launched.append(self.metadata.name)


class ModelDriver(DriverBase):
    """One device, gfx950, and no streams."""

    launcher_cls = Launcher
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": LDS_BYTES, "multiprocessor_count": 256},
        # No module, because Triton would ask the driver of that time to unload it, a function that nothing looks at, no
        # spills, and the largest workgroup.
        load_binary=lambda name, binary, shared, device: (None, 1, 0, 0, 1024),
    )

    @classmethod
    def is_active(cls) -> bool:
        """Return False: this driver is never chosen by itself."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        """No launcher is compiled."""
        raise NotImplementedError

    def get_current_target(self) -> GPUTarget:
        """Return what kernels are compiled for."""
        return TARGET

    def get_current_device(self) -> int:
        """Return the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the only stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Return where tensors live."""
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        """Time is not modelled."""
        raise NotImplementedError


@contextmanager
def on_model(*, preload: bool = True, **choices: Any) -> Iterator[list[str]]:
    """Make the model the device that Triton launches on; yield the list of kernels as they are executed.

    Args:
        preload: see `run_compiled`.
        choices: fields of `Choices`.
    """
    driver = triton.runtime.driver
    # reset_active() would look for a GPU.
    previous = driver._active
    driver.set_active(ModelDriver())
    Launcher.settings = Settings(preload, Choices(**choices))
    try:
        with _as_amd():
            yield Launcher.settings.launched
    finally:
        driver._active = previous


@contextmanager
def _as_amd() -> Iterator[None]:
    """Let torch say that it was built for an AMD GPU, a gfx950, and that the current device has no index, as CPUs."""
    properties = SimpleNamespace(gcnArchName="gfx950:sramecc+:xnack-", multi_processor_count=256)
    hip = torch.version.hip
    torch.version.hip = "model"
    try:
        with (
            patch.object(torch.cuda, "current_device", lambda: None),
            patch.object(torch.cuda, "get_device_properties", lambda device=None: properties),
        ):
            yield
    finally:
        torch.version.hip = hip


def load_package(folder: Path, *names: str) -> dict[str, ModuleType]:
    """Import `mxref_triton` from a folder as an AMD GPU would see it; return its modules by their last names.

    The copy is separate from one that is imported already: it has wavefronts of 64 and takes CPU tensors. `names`
    are modules that the package does not import by itself.
    """
    others = {n: sys.modules.pop(n) for n in list(sys.modules) if n.partition(".")[0] == "mxref_triton"}
    sys.path.insert(0, str(folder))
    try:
        with _as_amd():
            importlib.import_module("mxref_triton")
            for name in names:
                importlib.import_module(f"mxref_triton.{name}")
        found = {n: sys.modules.pop(n) for n in list(sys.modules) if n.partition(".")[0] == "mxref_triton"}
    finally:
        sys.path.remove(str(folder))
        sys.modules.update(others)
    for module in found.values():
        if hasattr(module, "DEVICE"):
            module.DEVICE = "cpu"
    return {name.rpartition(".")[2]: module for name, module in found.items()}
