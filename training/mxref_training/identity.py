"""What a run is: what determines its numbers, and the machine that computes them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mxref.backend import Backend
from mxref.recipe import Recipe
from mxref.tomlio import to_table
from mxref_training.config import Compile, Schedule, TrainConfig
from mxref_training.data.corpus import TokenCorpus
from mxref_training.huggingface.weights import Weights
from mxref_training.model.llama import flops_per_token, parameter_count
from mxref_training.sources import backend_identity


def identity(config: TrainConfig, recipe: Recipe, backend: Backend, corpus: TokenCorpus) -> dict[str, Any]:
    """Return everything that determines a run's numbers, as plain tables. A resumed run must match it."""
    run = config.run
    kept: dict[str, Any] = {
        "seed": run.seed,
        "data_seed": run.order_seed,
        "batch": run.batch,
        "micro_batch": run.sequences,
        "seq_len": run.seq_len,
        "eval_every": run.eval_every,
        "eval_tokens": run.eval_tokens,
        "log_every": run.log_every,
    }
    if run.compile is not Compile.NONE:
        kept["compile"] = run.compile
    for name in ("capture", "deterministic"):
        if getattr(run, name):
            kept[name] = True
    if run.init_from is not None:
        kept["init_from"] = Weights.open(Path(run.init_from)).sha256()  # the weights, wherever they lie
    if config.optim.schedule is not Schedule.CONSTANT and not config.optim.decay_steps:
        kept["steps"] = run.steps  # the decay ends there
    table = {
        "model": to_table(config.model),
        "optim": to_table(config.optim),
        "run": kept,
        "recipe": to_table(recipe),
        "data": corpus.hashes,
        "backend": backend_identity(backend),
    }
    spans = recipe.spans(run.steps)
    if len(spans) > 1:  # the steps where the phases begin, which a recipe in shares of the run does not fix
        table["phases"] = [[span.name, span.first] for span in spans]
    plain: dict[str, Any] = json.loads(json.dumps(table))
    return plain


def run_facts(config: TrainConfig, label: str, wanted: Mapping[str, Any], backend: Backend) -> dict[str, Any]:
    """Return the entries of a run's record, except versions and hardware.

    Args:
        config: the run.
        label: its name in progress reports.
        wanted: what `identity` returned.
        backend: computes the block formats.
    """
    return {
        "label": label,
        "identity": wanted,
        "backend": backend.name,
        "parameters": parameter_count(config.model),
        "flops_per_token": flops_per_token(config.model, config.run.seq_len),
    }


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
