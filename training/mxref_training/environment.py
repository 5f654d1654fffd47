"""The machine that computes a run: versions and hardware that decide its bits."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
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


def device_name(device: torch.device) -> str:
    """Return what a device is, as its maker calls it; the CPU is named elsewhere."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _processor() -> str:
    """Return the name of the processor; Linux keeps it where `platform` does not look."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def changed_environment(record: Mapping[str, Any], device: str) -> list[str]:
    """Return the differences between the machine that a run recorded and this one, as in `torch 2.12 -> 2.13`."""
    now = environment(device)
    return [
        f"{key} {theirs} -> {mine}"
        for part in ("versions", "hardware")
        for key, mine, theirs in differences(now[part], record.get(part, {}))
    ]


def differences(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = ""
) -> list[tuple[str, Any, Any]]:
    """Return the keys in which two tables differ, each with both values; a missing value is `not set`."""
    found = []
    for key in dict.fromkeys([*mine, *theirs]):
        a, b = mine.get(key), theirs.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append((prefix + key, "not set" if a is None else a, "not set" if b is None else b))
    return found
