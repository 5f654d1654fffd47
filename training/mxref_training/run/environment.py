"""The versions and the hardware on which a run computes, as its record keeps them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch

_VERSIONS_OF = ("mxref", "torch", "numpy", "ml_dtypes", "numba", "triton", "tokenizers", "safetensors")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide a run's bits."""
    found = {name: _installed(name) for name in _VERSIONS_OF}
    return {"python": platform.python_version()} | {name: it for name, it in found.items() if it is not None}


@cache
def _installed(name: str) -> str | None:
    """Return a package's version; None if it is not installed. It is read from files, once in a process."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(device: str) -> dict[str, Any]:
    """Return the versions and the hardware that decide a run's bits; `device` is the name of where it computes."""
    hardware = {
        "machine": platform.machine(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": device,
    }
    return {"versions": versions(), "platform": platform.platform(), "hardware": hardware}


def _processor() -> str:
    """Return the name of the processor; Linux keeps it where `platform` does not look."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
