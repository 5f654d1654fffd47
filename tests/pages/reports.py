"""Reports of every kind: of recorded ladders, and of two runs of a few steps of a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from ablations.ladders import results_of
from mxref.cli import main
from mxref.recipe_files import recipe_from_table
from mxref_training.probe import batch
from mxref_training.report.ladder.page import write_report
from training_setup import CORPUS, change, run

_MIXED = recipe_from_table(
    {"fprop": {"format": "mxfp4"}, "dgrad": {"format": "fp8"}, "wgrad": {"format": "mxfp8_e4m3"}}
)


def _runs(folder: Path) -> tuple[Path, Path]:
    config = change(steps=6, batch=2, micro_batch=1, threads=1, telemetry_every=2)
    run(folder / "mixed", _MIXED, config)
    run(folder / "fp8", "fp8", change(config, seed=4))
    return folder / "mixed", folder / "fp8"


def _called(*arguments: object) -> None:
    done = CliRunner().invoke(main, [*map(str, arguments)])
    assert done.exit_code == 0, done.output


def _ladder(folder: Path) -> Path:
    return write_report(results_of("readings"), folder)[0]


def _small_ladder(folder: Path) -> Path:
    return write_report(results_of("tseng"), folder)[0]


def _run(folder: Path) -> Path:
    mixed, _ = _runs(folder)
    _called("report", mixed)
    return mixed / "report.html"


def _comparison(folder: Path) -> Path:
    _called("report", *_runs(folder), "--out", folder)
    return folder / "comparison.html"


def _probe(folder: Path) -> Path:
    _, fp8 = _runs(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "prepare_corpus", lambda _config: CORPUS)
        recipes = ("mxfp4", "mxfp4_h16", "tseng", "nvfp4_style")
        _called(
            "probe", "--backend", "reference", fp8, *(word for name in recipes for word in ("--recipe", name)),
            "--out", folder,
        )  # fmt: skip
    return folder / "probe.html"


KINDS: dict[str, Callable[[Path], Path]] = {
    "ladder": _ladder, "small ladder": _small_ladder, "run": _run, "comparison": _comparison, "probe": _probe,
}  # fmt: skip
"""Functions that write a report into a folder, and return its page."""
