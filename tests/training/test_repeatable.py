"""`run.deterministic`: it stands in the run's record, changes no number, and refuses what would break its promise."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mxref.discovery import get_backend
from mxref.reference import ReferenceBackend
from mxref_training import steps
from mxref_training.config import Compile, TrainConfig
from mxref_training.device import CUBLAS, compiler_threads, fixed_choices
from mxref_training.errors import CheckpointError, ConfigError
from mxref_training.failures import known_errors
from mxref_training.report.ladder.tables import provenance
from training_setup import change, metrics, run

GPU = torch.device("cuda")
"""Only its name is read."""


def configured(**changes: Any) -> TrainConfig:
    return change(deterministic=True, **changes)


def identity(folder: Path) -> dict[str, Any]:
    table: dict[str, Any] = json.loads((folder / "run.json").read_text())["identity"]["run"]
    return table


def test_it_is_recorded_and_changes_no_number(tmp_path: Path) -> None:
    run(tmp_path / "plain", config=change())
    run(tmp_path / "fixed", config=configured())
    assert metrics(tmp_path / "fixed") == metrics(tmp_path / "plain")
    assert identity(tmp_path / "fixed") == identity(tmp_path / "plain") | {"deterministic": True}
    assert "deterministic" not in identity(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="deterministic is not set there and True here"):
        run(tmp_path / "plain", config=configured())


def test_the_report_of_a_ladder_says_it() -> None:
    model = {"layers": 1, "width": 32, "ffn": 64, "vocab": 64}
    results = {
        "mxref": "1",
        "backend": "reference",
        "tokens": 1,
        "arms": [],
        "data": {"report": "", "hashes": {}},
    }
    for value in (True, False):
        settings = {"steps": 1, "batch": 1, "seq_len": 1, "deterministic": value}
        shown = dict(provenance(results | {"config": {"model": model, "run": settings}}))
        assert ("Deterministic" in shown) is value


def test_an_operation_without_a_deterministic_kernel_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def puts(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return logits.sum().put_(torch.tensor([0]), torch.tensor([1.0]))

    monkeypatch.setattr(steps, "cross_entropy", puts)
    with pytest.raises(ConfigError, match=r"no deterministic kernel for put_, which"):
        run(tmp_path, config=configured())


def test_other_errors_are_not_explained_away() -> None:
    with pytest.raises(RuntimeError, match="^something else$"), known_errors(""):
        raise RuntimeError("something else")


def test_the_compiler_times_nothing_within(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config as inductor

    seen = ("deterministic", "max_autotune", "coordinate_descent_tuning")

    def values() -> list[Any]:
        return [getattr(inductor, name) for name in seen]

    backend, cpu = get_backend("reference"), torch.device("cpu")
    with inductor.patch(deterministic=False, max_autotune=True, coordinate_descent_tuning=True):
        with fixed_choices(configured(compile=Compile.BLOCK), backend, cpu):
            assert values() == [True, False, False]
        assert values() == [False, True, True]
        with fixed_choices(change(compile=Compile.BLOCK), backend, cpu):
            assert values() == [False, True, True]


def test_the_compiler_starts_no_more_processes_than_the_run_has_threads() -> None:
    from torch._inductor import config as inductor

    with inductor.patch(compile_threads=16):
        for compiles, threads, want in ((Compile.BLOCK, 2, 2), (Compile.BLOCK, 0, 16), (Compile.NONE, 2, 16)):
            with compiler_threads(change(compile=compiles, threads=threads)):
                assert inductor.compile_threads == want
        assert inductor.compile_threads == 16


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (CUBLAS, ":0:0", r"CUBLAS_WORKSPACE_CONFIG=:0:0: unset it, or set it to :4096:8 or :16:8"),
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50", "a part of the GPU.*: unset it"),
    ],
)
def test_settings_of_a_gpu_that_change_results_are_refused(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda.tunable, "is_enabled", lambda: False)
    monkeypatch.delenv(CUBLAS, raising=False)
    monkeypatch.setenv(variable, value)
    backend = get_backend("reference")
    with pytest.raises(ConfigError, match=message), fixed_choices(configured(), backend, GPU):
        pass
    with fixed_choices(change(), backend, GPU):
        assert os.environ[variable] == value


def test_kernels_that_are_chosen_by_time_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Timed(ReferenceBackend):
        name = "timed"

        def chosen_by_time(self) -> str:
            return "TIMED_TUNE=1"

    with (
        pytest.raises(
            ConfigError, match="TIMED_TUNE=1 has backend 'timed' choose kernels.*: unset TIMED_TUNE=1"
        ),
        fixed_choices(configured(), Timed(), torch.device("cpu")),
    ):
        pass
    monkeypatch.setattr(torch.cuda.tunable, "is_enabled", lambda: True)
    monkeypatch.delenv(CUBLAS, raising=False)
    with (
        pytest.raises(ConfigError, match="unset PYTORCH_TUNABLEOP_ENABLED"),
        fixed_choices(configured(), get_backend("reference"), GPU),
    ):
        pass
