"""Telemetry, trackers and profiles of a run: complete, resumed to the byte, and without effect on the run's bits."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from mxref.cli import main
from mxref.recipe_files import recipe_from_table
from mxref_training.errors import ConfigError
from mxref_training.log import TrainResult
from mxref_training.observe import Observation, Window, flat
from narrow_backend import Narrow
from training_setup import SR, Saboteur, change, crash, metrics, run, weights

Whole = Callable[..., tuple[Path, TrainResult]]
PLAIN = change(steps=4, threads=1, batch=2, micro_batch=1)
EVERY_2 = change(PLAIN, telemetry_every=2)
MIXED = recipe_from_table(
    {
        "fprop": {"format": "mxfp8_e4m3"},
        "dgrad": {"format": "fp8"},
        "wgrad": {"format": "mxfp4", "rounding": "sr", "hadamard": 16, "signs": "per_step"},
    }
)


def measured(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "telemetry.jsonl").read_bytes().splitlines()]


@pytest.mark.parametrize("recipe", [SR, "fp8", MIXED], ids=["sr", "fp8", "mixed"])
def test_a_run_with_telemetry_has_the_bits_of_one_without(whole: Whole, recipe: Any) -> None:
    (plain, expected), (watched, result) = whole(recipe, PLAIN), whole(recipe, EVERY_2)
    assert result.losses == expected.losses
    assert metrics(plain) == metrics(watched)
    assert weights(plain) == weights(watched)
    assert not (plain / "telemetry.jsonl").exists()
    lines = measured(watched)
    assert [line["step"] for line in lines if "census" in line] == [2, 4]
    operands = {(line["layer"], line["role"], line["operand"]) for line in lines if "operand" in line}
    assert len(operands) == 7 * 7  # seven layers, six operands and a gradient each; lm_head stays in BF16
    assert all(0.5 < line["cosine"] <= 1 for line in lines if line.get("operand") == "dw")


def test_the_census_of_a_measured_step_is_the_recipes(whole: Whole) -> None:
    watched = measured(whole(SR, EVERY_2)[0])
    (census,) = {json.dumps(line["census"]) for line in watched if "census" in line}
    assert json.loads(census) == {
        f"{role} in {format}": 2 * layers
        for role in ("fprop", "dgrad", "wgrad")
        for format, layers in (("bf16", 1), ("mxfp4", 7))
    }


def test_telemetry_is_resumed_to_the_byte(tmp_path: Path) -> None:
    whole, stopped, died = (tmp_path / name for name in ("whole", "stopped", "died"))
    config = change(PLAIN, telemetry_every=2, checkpoint_every=2)
    run(whole, SR, config)
    run(stopped, SR, config, stop_after=3)
    run(stopped, SR, config)
    with pytest.raises(RuntimeError):
        run(died, SR, config, progress=Saboteur(4, crash))
    with (died / "telemetry.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "lay')
    run(died, SR, config)
    for parts in (stopped, died):
        assert (parts / "telemetry.jsonl").read_bytes() == (whole / "telemetry.jsonl").read_bytes()
        assert metrics(parts) == metrics(whole)


def test_telemetry_can_be_switched_on_and_off_in_a_run(tmp_path: Path, whole: Whole) -> None:
    (plain, _), switched = whole(SR, PLAIN), tmp_path / "switched"
    run(switched, SR, PLAIN, stop_after=1)
    run(switched, SR, EVERY_2, stop_after=2)
    run(switched, SR, PLAIN)
    assert metrics(switched) == metrics(plain)
    assert {line["step"] for line in measured(switched)} == {2}


def test_a_step_without_a_backward_pass_leaves_its_census(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mxref_training import steps

    original = steps.cross_entropy
    monkeypatch.setattr(steps, "cross_entropy", lambda *args: original(*args) * float("nan"))
    run(tmp_path, SR, change(PLAIN, telemetry_every=1), stop_after=2)
    assert [set(line) for line in measured(tmp_path)] == [{"step", "census"}] * 2


def test_a_widened_step_is_measured_once(tmp_path: Path) -> None:
    result = run(tmp_path, "mxfp4", change(PLAIN, telemetry_every=1), backend=Narrow({3}), stop_after=1)
    assert result.widened_steps == 1
    keys = [(x["layer"], x["role"], x["operand"]) for x in measured(tmp_path) if "operand" in x]
    assert len(keys) == len(set(keys)) == 49
    census = [line["census"] for line in measured(tmp_path) if "census" in line]
    run(tmp_path / "plain", "mxfp4", change(PLAIN, telemetry_every=1), stop_after=1)
    assert census == [line["census"] for line in measured(tmp_path / "plain") if "census" in line]
    assert all(census)


def test_no_resume_deletes_telemetry_and_profile(tmp_path: Path) -> None:
    run(tmp_path, SR, EVERY_2, observe=Observation(profile=Window(1, 1)))
    assert (tmp_path / "profile").is_dir()
    run(tmp_path, SR, resume=False, stop_after=1)
    assert not (tmp_path / "profile").exists()
    assert not (tmp_path / "telemetry.jsonl").exists()


class Writer:
    def __init__(self, log_dir: str, purge_step: int) -> None:
        self.made, self.scalars, self.closed = (log_dir, purge_step), {}, False
        Writer.last = self

    last: Writer

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name, step] = value

    def close(self) -> None:
        self.closed = True


def test_tensorboard_gets_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    run(tmp_path, SR, EVERY_2, observe=Observation(track="tensorboard"), stop_after=2)
    writer = Writer.last
    assert writer.made == (str(tmp_path / "tensorboard"), 1)
    assert writer.closed
    for line in measured(tmp_path) + [json.loads(x) for x in metrics(tmp_path).splitlines()]:
        for name, value in flat(line).items():
            assert writer.scalars[name, line["step"]] == value
    assert {"train/loss", "val/loss"} <= {name for name, _ in writer.scalars}
    assert ("telemetry/snr/fprop.x/model.layers.0.self_attn.q_proj", 2) in writer.scalars
    run(tmp_path, SR, EVERY_2, observe=Observation(track="tensorboard"), stop_after=3)
    assert Writer.last.made[1] == 3


@pytest.mark.parametrize("package", ["trackio", "wandb"])
def test_a_tracker_gets_config_and_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    calls: list[tuple[str, Any, Any]] = []
    fake = SimpleNamespace(
        init=lambda **given: calls.append(("init", given, None)),
        log=lambda values, step: calls.append(("log", step, values)),
        finish=lambda: calls.append(("finish", None, None)),
    )
    monkeypatch.setitem(sys.modules, package, fake)  # type: ignore[arg-type]
    run(tmp_path / "arm", SR, EVERY_2, observe=Observation(track=package), stop_after=2)
    given = calls[0][1]
    assert (given["project"], given["name"], given["resume"]) == ("mxref", "arm", "allow")
    assert given["config"]["digest"] == SR.digest
    assert given["config"]["config"]["run"]["seed"] == 3
    assert ("id" in given) == (package == "wandb")
    assert calls[-1][0] == "finish"
    steps = [step for name, step, _ in calls if name == "log"]
    assert steps == sorted(steps)
    logged = {name for kind, _, values in calls if kind == "log" for name in values}
    assert {"train/loss", "train/lr", "val/loss", "val/perplexity"} <= logged
    assert any(name.startswith("telemetry/cosine/wgrad.dw/") for name in logged)


def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def log(values: Any, step: int) -> None:
        asked.append(step)
        raise ConnectionError("no network")

    module = SimpleNamespace(init=lambda **_: None, log=log, finish=lambda: None)
    monkeypatch.setitem(sys.modules, "trackio", module)  # type: ignore[arg-type]
    sink = Saboteur(0, lambda: None)
    run(tmp_path / "seen", observe=Observation(track="trackio"), progress=sink)
    run(tmp_path / "alone")
    assert metrics(tmp_path / "seen") == metrics(tmp_path / "alone")
    assert asked == [1]
    (note,) = sink.notes
    assert note.startswith("trackio failed at step 1, and gets no more numbers: ConnectionError: no network")


@pytest.mark.parametrize("package", ["trackio", "wandb"])
def test_a_tracker_that_does_not_start_ends_a_new_run_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    def init(**_: Any) -> None:
        raise ConnectionError("no network\nand a second line")

    module = SimpleNamespace(init=init, log=None, finish=None)
    monkeypatch.setitem(sys.modules, package, module)  # type: ignore[arg-type]
    asked = Observation(track=package)
    way_out = "; .*WANDB_MODE=offline, or leave" if package == "wandb" else "; leave"
    with pytest.raises(ConfigError, match=f"--track {package} did not start.*no network.*{way_out} --track"):
        run(tmp_path / "seen", config=PLAIN, observe=asked)
    assert metrics(tmp_path / "seen") == b""
    run(tmp_path / "seen", config=PLAIN, stop_after=2)
    sink = Saboteur(0, lambda: None)
    run(tmp_path / "seen", config=PLAIN, observe=asked, progress=sink)
    run(tmp_path / "alone", config=PLAIN)
    assert metrics(tmp_path / "seen") == metrics(tmp_path / "alone")
    (note,) = [note for note in sink.notes if "did not start" in note]
    assert note.startswith(
        f"--track {package} did not start, and gets no numbers; the run's own logs have them"
    )


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            Observation(track="tensorboard"),
            "--track tensorboard needs the package tensorboard.*pip install tensorboard",
        ),
        (Observation(track="trackio"), "--track trackio needs the package trackio.*pip install trackio"),
        (Observation(track="wandb"), "--track wandb needs the package wandb"),
        (
            Observation(track="mlflow"),
            "--track mlflow: no such tracker; take one of tensorboard, trackio, wandb",
        ),
        (Observation(profile=Window(7, 9)), "--profile 7:9: the run has 4 steps"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: Observation, message: str
) -> None:
    for package in ("torch.utils.tensorboard", "tensorboard", "trackio", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / "run", config=PLAIN, observe=asked)
    assert not (tmp_path / "run").exists()


def test_profile_writes_a_trace_and_a_table_and_moves_no_bit(tmp_path: Path, whole: Whole) -> None:
    (plain, _), profiled = whole(SR, PLAIN), tmp_path / "profiled"
    run(profiled, SR, PLAIN, observe=Observation(profile=Window(2, 3)))
    assert metrics(profiled) == metrics(plain)
    assert weights(profiled) == weights(plain)
    trace = json.loads((profiled / "profile" / "steps-2-3.json").read_text())
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("mxref::quantize") > 0
    assert "mxref::" in (profiled / "profile" / "steps-2-3.txt").read_text()
    assert sorted(path.name for path in (profiled / "profile").iterdir()) == [
        "steps-2-3.json",
        "steps-2-3.txt",
    ]


def test_profile_of_a_run_that_stops_or_resumes_inside_it(tmp_path: Path) -> None:
    window = Observation(profile=Window(1, 4))
    run(tmp_path, config=PLAIN, observe=window, stop_after=2)
    assert (tmp_path / "profile" / "steps-1-2.json").exists()
    run(tmp_path, config=PLAIN, observe=window, stop_after=3)
    assert (tmp_path / "profile" / "steps-3-3.json").exists()
    notes = Saboteur(0, crash)
    run(tmp_path, config=PLAIN, observe=Observation(profile=Window(2, 3)), progress=notes)
    assert "nothing to profile: the run is at step 3 already, beyond 2:3" in notes.notes


@pytest.mark.parametrize("text", ["", "x", "3:2", "0:4", "1:2:3", "-1"])
def test_a_window_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--profile"):
        Window.parse(text)


def test_a_window_is_one_step_or_two_ends() -> None:
    assert Window.parse("7") == Window(7, 7)
    assert str(Window.parse("10:13")) == "10:13"


def test_a_recipe_without_quantized_operands_says_so(tmp_path: Path) -> None:
    notes = Saboteur(0, crash)
    run(tmp_path, "bf16", EVERY_2, progress=notes, stop_after=2)
    assert notes.notes == ["telemetry has no operands to measure: the recipe quantizes none"]
    assert [set(line) for line in measured(tmp_path)] == [{"step", "census"}]


def test_the_command_takes_telemetry_and_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def record(config: Any, *_: Any, observe: Observation, **__: Any) -> Any:
        given.update(every=config.run.telemetry_every, observe=observe)
        return SimpleNamespace(tokens=0, seconds=0.0, skipped_steps=0, final_loss=1.0)

    monkeypatch.setattr("mxref_training.trainer.train", record)
    monkeypatch.setattr(
        "mxref_training.data.corpus.prepare_corpus", lambda config: SimpleNamespace(report="made up")
    )
    command = ["train", "tiny", "--set", "run.telemetry_every=5", "--profile", "2:3", "--out", str(tmp_path)]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert given == {"every": 5, "observe": Observation(profile=Window(2, 3))}
