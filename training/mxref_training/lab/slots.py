"""Where runs train at the same time: slots, each a share of the cores and, if GPUs are given, of one GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mxref.backend import Backend
from mxref.cores import cores
from mxref.tomlio import shown
from mxref_training.config import TrainConfig
from mxref_training.errors import ConfigError

AUTO_LIMIT = 8
"""Largest default number of processes: each holds a model, its optimizer and the tokens."""
AUTO_LIMIT_GPU = 4
"""The same on one GPU."""

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Slot:
    """A place for one process at a time."""

    device: str = ""
    """The GPU, as the environment variable `CUDA_VISIBLE_DEVICES` names it; empty: what this process sees."""

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of the process."""
        return {VISIBLE: self.device} if self.device else {}


@dataclass(frozen=True)
class Slots:
    """All places of a ladder."""

    slots: Sequence[Slot]
    per_device: int
    """How many share a device."""
    devices: Sequence[str] = ()
    """The GPUs as PyTorch names them; empty where none were asked for."""

    def __len__(self) -> int:
        return len(self.slots)


def job_count(asked: int | None, runs: int) -> int:
    """Return how many of a ladder's `runs` train at a time; None asks for one per core, up to `AUTO_LIMIT`.

    The number depends on the whole ladder, not on the unfinished runs, so a resumed ladder has the same thread counts.
    """
    return max(1, min(min(cores(), AUTO_LIMIT) if asked is None else asked, runs))


def on_share(config: TrainConfig, jobs: int) -> TrainConfig:
    """Return the configuration with `run.threads` set, if it is not, to the share of one of `jobs` processes.

    Threads belong to the machine and not to the recipe. With another number of threads, a finished arm stays finished,
    and an unfinished one resumes with a note. But a sum over threads then has another order of additions, so equal
    bits are promised only for equal thread counts. Every result records its own.
    """
    threads = config.run.threads or max(1, cores() // jobs)
    return replace(config, run=replace(config.run, threads=threads))


def make_slots(
    jobs: int | None, devices: str | None, config: TrainConfig, backend: Backend, runs: int
) -> Slots:
    """Return the places in which a ladder's runs train.

    Args:
        jobs: processes on each device, or in all where no devices are given; None chooses.
        devices: numbers of GPUs as PyTorch counts them, as in `0,1`; or `all`. None: the device that the runs choose.
        config: the configuration of the runs.
        backend: computes the block formats.
        runs: number of runs of the ladder.

    Raises:
        ConfigError: no such GPU, the backend computes on none, or `run.device` names another one.
    """
    if devices is None:
        count = job_count(jobs, runs)
        return Slots([Slot()] * count, count)
    if "cuda" not in backend.capabilities.devices:
        on = ", ".join(sorted(backend.capabilities.devices))
        raise ConfigError(
            f"--devices {devices}, but backend {backend.name!r} computes on {on}: leave --devices out, or choose "
            "another backend"
        )
    if config.run.device not in ("auto", "cuda"):
        raise ConfigError(
            f"run.device = {config.run.device!r} and --devices {devices} name devices twice: leave one of them out"
        )
    numbers = device_numbers(devices)
    if jobs is None:
        jobs = max(1, min(AUTO_LIMIT_GPU, cores() // len(numbers)))
    jobs = max(1, min(jobs, -(-runs // len(numbers))))
    # One slot on each GPU comes before a second one on any.
    slots = [Slot(visible(number, os.environ)) for _ in range(jobs) for number in numbers]
    return Slots(slots[:runs], jobs, [f"cuda:{number}" for number in numbers])


def device_numbers(text: str) -> list[int]:
    """Return the GPUs that `0,2` or `all` names; ConfigError if one is not there, or named twice."""
    import torch

    count = torch.cuda.device_count()
    if text.strip() == "all":
        if not count:
            raise ConfigError("--devices all, but PyTorch sees no GPU here: leave --devices out")
        return list(range(count))
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isdecimal() or int(word) >= count:
            there = f"0 to {count - 1}" if count else "none"
            raise ConfigError(
                f"--devices {shown(text)}: {shown(word)} is no GPU that PyTorch sees here ({there}); give numbers "
                "as in 0,1, or all"
            )
        if words.count(word) > 1:
            raise ConfigError(
                f"--devices {shown(text)} names {word} twice; --jobs sets how many runs share a GPU"
            )
    return [int(word) for word in words]


def visible(number: int, environment: Mapping[str, str]) -> str:
    """Return the value of `CUDA_VISIBLE_DEVICES` that shows a child process the GPU of this number."""
    own = [word.strip() for word in environment.get(VISIBLE, "").split(",") if word.strip()]
    return own[number] if own else str(number)
