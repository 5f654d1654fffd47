"""Training with a shadow: no bit of the run changes, and a backend that goes wrong in mid-run is stopped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mxref_torch
from conform_command import run as command
from mxref.conformance.replay import load_recording, replay
from mxref.discovery import get_backend
from mxref.recipe_files import recipe_from_table
from mxref.reference import ReferenceBackend
from mxref_torch import ShadowError
from mxref_training.errors import ConfigError
from places import ROOT
from training_setup import Saboteur, change, files, metrics, run

SR = recipe_from_table({"dialect": "amd", "wgrad": {"dy": {"rounding": "sr"}}})
PAGE = (ROOT / "docs" / "how-to" / "check-a-kernel.rst").read_text(encoding="utf-8")


class WrongFromStep3(ReferenceBackend):
    """Right for the first steps; from step 3 on, one scale byte of each dY along the tokens is off by one."""

    name = "wrong from step 3"

    def _quantize(self, x: Any, plan: Any) -> Any:
        codes, scales = super()._quantize(x, plan)
        if plan.stream is not None and plan.stream.step >= 3 and plan.stream.operand == 4:
            scales = scales.copy()
            scales[-1, 0] += 1
        return codes, scales


def test_twenty_steps_show_no_difference_and_have_the_same_bits(tmp_path: Path) -> None:
    config = change(steps=20, eval_every=20, checkpoint_every=20, batch=2, micro_batch=2)
    notes = Saboteur(0, lambda: None)
    run(tmp_path / "plain", SR, config)
    run(tmp_path / "shadow", SR, change(config, shadow=0.3), progress=notes)
    assert metrics(tmp_path / "plain") == metrics(tmp_path / "shadow")
    plain, shadowed = (
        {name: data for name, data in files(tmp_path / name).items() if name.endswith(".safetensors")}
        for name in ("plain", "shadow")
    )
    assert plain == shadowed
    (said,) = notes.notes
    found = re.fullmatch(
        r"the shadow compared ([\d,]+) quantizations \(([\d,]+) elements\) and ([\d,]+) GEMMs .*: no difference",
        said,
    )
    assert found, said
    quantizations, elements, products = (int(word.replace(",", "")) for word in found.groups())
    assert quantizations > 200
    assert elements > 1000 * quantizations
    assert products > 100


def test_a_backend_that_goes_wrong_in_mid_run_stops_the_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    message = (
        r"step 3 counted from 0, layer model\.layers\.0\.\S+, wgrad dy differs .* under scale\.rule\.even"
    )
    with pytest.raises(ShadowError, match=message):
        run(out, SR, change(shadow=0.5), backend=WrongFromStep3())
    file = out / "shadow.npz"
    (call,) = load_recording(file).calls
    assert call.where["step"] == "3"
    assert replay(file, WrongFromStep3()).calls[0].answered is not None
    shown = command("conform", "--replay", str(file), "--backend", "reference")
    assert shown.exit_code == 1
    assert "differs under scale.rule.even, reference is right" in shown.output
    # The command that was stopped goes on with a right backend, or starts over, and leaves no stale file behind.
    run(out, SR, change(shadow=0.1), resume=False)
    assert not file.exists()


def test_a_recipe_without_block_formats_has_nothing_to_compare(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run.shadow = 0.5, but the recipe has no block format"):
        run(tmp_path, "fp8", change(shadow=0.5))
    with pytest.raises(ConfigError, match=r"run.shadow = 1.5 is above 1"):
        change(shadow=1.5)


def page_examples() -> list[str]:
    found = re.findall(r"^\.\. code-block:: python\n\n((?:   .*\n|\n)+)", PAGE, re.MULTILINE)
    return [re.sub(r"^   ", "", body, flags=re.MULTILINE) for body in found]


def test_the_examples_of_the_page_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = get_backend("numba" if _has_numba() else "reference")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.ModuleDict({"attention": nn.ModuleDict({"q_proj": nn.Linear(32, 32)})})
    mxref_torch.convert(model, recipe_from_table({"gemm": "ordered"}), backend="reference")
    layer, batch = model["attention"]["q_proj"], torch.randn(32, 32)  # type: ignore[index]

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = layer(batch).square().mean()
        return out

    def train(model: nn.Module) -> None:
        with torch.no_grad():
            for _ in range(40):
                layer(batch)

    names = {"model": model, "batch": batch, "loss_of": loss_of, "train": train}
    examples = page_examples()
    assert len(examples) == 3
    for example in examples:
        exec(example, names)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("the shadow compared ")
    assert said[-1] == "None"
    report = replay(tmp_path / "step.npz", backend)
    assert report, str(report)
    assert {call.op for call in report.calls} == {"quantize", "gemm"}


def _has_numba() -> bool:
    import importlib.util

    return importlib.util.find_spec("numba") is not None
