"""The versions and the hardware on which a run computes, as its record keeps them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

_VERSIONS_OF = ("mxref", "torch", "numpy", "ml_dtypes", "numba", "triton", "tokenizers", "safetensors")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide a run's bits."""
    found = {"python": platform.python_version()}
    for name in _VERSIONS_OF:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


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
