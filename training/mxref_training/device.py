"""Where a run computes: its device, and how much memory that has."""

from __future__ import annotations

import os
import resource
import socket
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from mxref.backend import Backend
from mxref.discovery import choose
from mxref.tomlio import shown
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


def made_current(device: torch.device) -> AbstractContextManager[Any]:
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
