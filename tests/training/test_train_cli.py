"""`mxref train` as a person runs it: help, dry run, errors, and processes that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import warm
from mxref.cli import main
from mxref_training import config
from mxref_training.cli.train import train
from training_setup import newest

SIZES = [
    "model.layers=1", "model.width=64", "model.heads=2", "model.ffn=64", "model.vocab=384", "model.max_seq=32",
    "run.seq_len=32", "run.batch=4", "run.micro_batch=2", "run.eval_tokens=64", "run.eval_every=4",
    "run.checkpoint_every=3", "run.steps=14", "run.threads=1",
]  # fmt: skip


def words(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    syllables = ["ka", "lo", "mi", "ren", "to", "shu", "bel", "dor", "vi", "nas", "qu", "pe"]
    lexicon = ["".join(rng.choice(syllables, 3)) for _ in range(300)]
    return [" ".join(rng.choice(lexicon, 60)) + "." for _ in range(count)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for name, count, seed in (("train", 120, 1), ("val", 6, 2)):
        rows = [json.dumps({"text": text}) + "\n" for text in words(count, seed)]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    return folder


def arguments(corpus: Path, out: Path, recipe: str = "mxfp4", *more: str) -> list[str]:
    sets = [part for size in SIZES for part in ("--set", size)]
    data = ["--data", str(corpus / "train.jsonl"), "--set", f"data.val={corpus / 'val.jsonl'}"]
    return [
        "train",
        "tiny",
        *sets,
        *data,
        "--recipe",
        recipe,
        "--backend",
        "reference",
        "--out",
        str(out),
        *more,
    ]


def environment(corpus: Path) -> dict[str, str]:
    return os.environ | {"XDG_CACHE_HOME": str(corpus / "cache"), "OMP_NUM_THREADS": "1"}


def start(corpus: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-c",
        "from mxref.cli import main; main()",
        *arguments(corpus, out, "mxfp4", *more),
    ]
    return warm.Popen(
        command, env=environment(corpus), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_lines(process: subprocess.Popen[str], path: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.005)


def invoke(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, arguments, env=env)


def test_killed_and_resumed_equals_uninterrupted(corpus: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    uninterrupted = start(corpus, whole)
    killed = start(corpus, parts)
    try:
        wait_for_lines(
            killed, parts / "metrics.jsonl", 7
        )  # past the checkpoint of step 3, short of the last step
    finally:
        killed.kill()
        killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    done = (parts / "metrics.jsonl").read_bytes()
    out, err = uninterrupted.communicate(timeout=120)
    assert uninterrupted.returncode == 0, err
    expected = (whole / "metrics.jsonl").read_bytes()
    assert len(done) < len(expected), "it was killed before the end"

    resumed = start(corpus, parts)
    again, err = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, err
    assert "resumed at step" in err
    assert (parts / "metrics.jsonl").read_bytes() == expected
    for group in ("model", "optimizer"):
        files = [folder / "checkpoints" / "step-14" / f"{group}.safetensors" for folder in (whole, parts)]
        assert files[0].read_bytes() == files[1].read_bytes()
    assert [text.split(" in ")[0] for text in (out, again)] == [out.split(" in ")[0]] * 2
    assert out.startswith("validation loss ")
    assert " after 1,792 tokens" in out


def test_interrupted_says_how_to_go_on(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(corpus, out, "--set", "run.steps=500")
    try:
        wait_for_lines(process, out / "metrics.jsonl", 2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, err
    last = err.strip().splitlines()[-1]
    assert last.startswith("interrupted: SIGINT after step ")
    assert last.endswith(f"of 500: saved in {out}; the same command goes on from there")
    assert "Traceback" not in err
    step = int(last.split()[4])
    assert newest(out) == step
    assert json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["step"] == step


def test_another_recipe_in_the_same_folder_is_one_line(corpus: Path, tmp_path: Path) -> None:
    env = environment(corpus)
    first = invoke(*arguments(corpus, tmp_path / "run", "bf16", "--set", "run.steps=2"), env=env)
    assert first.exit_code == 0, first.output
    assert "recipe bf16" in first.stderr
    assert "backend reference (asked for by name)" in first.stderr
    assert "train train.jsonl: 120 documents" in first.stderr
    second = invoke(*arguments(corpus, tmp_path / "run", "fp8", "--set", "run.steps=2"), env=env)
    assert second.exit_code == 2
    assert "recipe.fprop.x.format is bf16 there and fp8 here" in second.stderr.splitlines()[-1]
    third = invoke(
        *arguments(corpus, tmp_path / "run", "fp8", "--set", "run.steps=2", "--no-resume"), env=env
    )
    assert third.exit_code == 0, third.output


def test_ranks_that_are_started_again_delete_nothing(corpus: Path, tmp_path: Path) -> None:
    """`torchrun --max-restarts` repeats the command after a failure, --no-resume included."""
    env, folder = environment(corpus), tmp_path / "run"
    given = arguments(corpus, folder, "bf16", "--no-resume")
    assert invoke(*given, "--set", "run.steps=2", env=env).exit_code == 0
    begun = json.loads((folder / "run.json").read_text())["started"], (folder / "metrics.jsonl").read_bytes()
    (folder / "log.txt").write_text("the failure\n")
    again = invoke(*given, "--set", "run.steps=3", env=env | {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert again.exit_code == 0, again.output
    assert "torchrun has started the ranks again" in again.stderr
    assert "resumed at step 2 of 3" in again.stderr
    assert json.loads((folder / "run.json").read_text())["started"] == begun[0]
    assert (folder / "metrics.jsonl").read_bytes().startswith(begun[1])
    assert (folder / "log.txt").exists()
    anew = invoke(*given, "--set", "run.steps=2", env=env | {"TORCHELASTIC_RESTART_COUNT": "0"})
    assert "resumed at step" not in anew.stderr
    assert not (folder / "log.txt").exists()


def test_training_data_as_validation_data_is_refused(corpus: Path, tmp_path: Path) -> None:
    args = arguments(corpus, tmp_path / "run", "bf16", "--set", f"data.val={corpus / 'train.jsonl'}")
    result = invoke(*args, env=environment(corpus))
    assert result.exit_code == 2
    assert "120 of 120 validation documents are in the training data too" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["tini"], "unknown preset 'tini' (did you mean 'tiny'?)"),
        (["tiny", "--recipe", "mxfp4_h61"], "unknown recipe 'mxfp4_h61' (did you mean 'mxfp4_h16'?)"),
        (["tiny", "--backend", "numbra"], "unknown backend 'numbra'"),
        (["tiny", "--set", "run.stesp=1"], "--set 'run.stesp=1': unknown key 'stesp' in [run] (did you"),
        (["missing/file.toml"], "cannot read missing/file.toml: No such file or directory"),
        (["tiny", "--data", "missing.jsonl"], "no such data file: missing.jsonl"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke("train", *args)
    assert result.exit_code == 2
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["train", "tiny"], ["ablate", "paper"], ["probe", "a"], ["report", "a"]])
def test_an_empty_name_of_a_folder_is_refused(words: list[str]) -> None:
    """A shell variable that is not set; the command would write into the current folder."""
    result = invoke(*words, "--out", "")
    assert result.exit_code == 2
    assert "'--out': the name of the folder is empty: give one (`.` is this one)" in result.stderr


def dry_run(*args: str) -> str:
    result = invoke("train", *args, "--dry-run", "--backend", "reference", env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    return result.output


def test_dry_run_of_the_full_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = dry_run("llama31_8b", "--recipe", "mxfp4_h16")
    for expected in (
        "8,030,261,248",
        "3,145,728,000 in 12,000 steps of 32 x 8192",
        "weights            32.1 GB, float32",
        "AdamW moments      64.2 GB, float32",
        "MXFP4, EVEN, H16",
        "16 in bf16, 3584 in mxfp4",
        "asked for by name",
    ):
        assert expected in text
    assert not list(tmp_path.iterdir())


def test_dry_run_follows_recipe_and_settings() -> None:
    text = dry_run("tiny", "--recipe", "tseng", "--set", "run.steps=7", "--set", "run.micro_batch=2")
    assert "3,584 in 7 steps of 8 x 64" in text
    assert "Fprop              60 in bf16" in text  # (2 * 7 + 1) linear layers, 4 micro-batches
    assert "Dgrad              4 in bf16, 56 in mxfp4" in text
    assert "FLOOR, SR, × 3/4, H64, signs per step and layer" in text


def test_dry_run_refuses_what_training_would() -> None:
    result = invoke("train", "tiny", "--dry-run", "--backend", "reference", "--set", "model.ffn=80")
    assert result.exit_code == 2
    assert "out_features = 80 is not a multiple of 32" in result.stderr


def test_help_shows_examples_without_loading_torch() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom mxref.cli import main\n"
        "result = CliRunner().invoke(main, ['train', '--help'])\nprint(result.output)\n"
        "sys.exit(result.exit_code or 'torch' in sys.modules or 'numba' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "mxref train demo --recipe fp8 --set run.steps=200" in done.stdout
    for option in (
        "--recipe",
        "--data",
        "--out",
        "--backend",
        "--set",
        "--dry-run",
    ):
        assert option in done.stdout


def test_the_command_has_no_second_way_to_set_a_key() -> None:
    """What it once had says what to write; data is an option, because every user has it."""
    options = {word for option in train.params for word in option.opts if word.startswith("--")}
    assert options == {
        "--recipe", "--data", "--out", "--backend", "--set", "--resume", "--track", "--profile", "--dry-run",
        "--ranks", "--peak-tflops", "--utilisation",
    }  # fmt: skip
    for words, instead in (
        (["--steps", "5"], "--set run.steps=N"), (["--val=a.jsonl"], "--set data.val=PATH"),
        (["--tokenizer", "t.json"], "--set data.tokenizer=FILE"), (["--shadow=1"], "--set run.shadow=SHARE"),
        (["--init-from", "hf"], "--set run.init_from=FOLDER"), (["--telemetry", "5"], "--set run.telemetry_every=N"),
        (["--tensorboard"], "--track tensorboard"),
    ):  # fmt: skip
        result = invoke("train", "tiny", *words)
        said = f"{words[0].partition('=')[0]} is no option any more: write {instead}"
        assert (result.exit_code, said in result.stderr) == (2, True), result.stderr
    assert "No such option '--stepps'" in invoke("train", "--stepps", "5").stderr


def test_help_names_every_shipped_preset_and_recipe() -> None:
    text = invoke("train", "--help").output
    for folder in ("presets", "recipes"):
        for path in (Path(config.__file__).parent / folder).glob("*.toml"):
            assert path.stem in text


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name == "torch" else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    result = invoke("train", "tiny", "--dry-run")
    assert result.exit_code == 2
    assert "mxref train needs torch, which is not installed: pip install 'mxref[training]'" in result.stderr


WITHOUT_TORCH = """
import os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("torch is looked for under", os.environ.get("OMP_WAIT_POLICY"))
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Finder())
from mxref.cli import main
main()
"""


@pytest.mark.parametrize("command", ["train tiny --dry-run", "ablate paper"])
@pytest.mark.parametrize(("given", "found"), [({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")])
def test_openmp_is_told_to_sleep_while_it_waits_before_torch_is_loaded(
    command: str, given: dict[str, str], found: str
) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    words = [sys.executable, "-c", WITHOUT_TORCH, *command.split()]
    done = subprocess.run(words, env=kept | given, capture_output=True, text=True)
    assert set(done.stdout.splitlines()) == {f"torch is looked for under {found}"}
