"""The command line: lazy commands, one-line errors, exit codes, and what `explain` and `backends` print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import save_file

import mxref
from mxref import OperandSpec, Rounding, ScaleRule, Stream, quantize
from mxref._version import SPECIFICATION
from mxref.capabilities import Capabilities
from mxref.cli import LazyGroup, load_command, main, summary
from mxref.errors import BackendError
from mxref.formats import BLOCK_FORMATS
from mxref.placement import Placement


def run(*args: str, width: int = 80, **env: str) -> Result:
    return CliRunner().invoke(main, args, env={"COLUMNS": str(width), "MXREF_BACKEND": "", **env})


def test_help_lists_every_command_and_imports_none():
    code = (
        "import sys; from mxref.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numba', 'triton', 'rich', 'mxref_training'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for name in ("explain", "backends", "train", "ablate", "report"):
        assert f"\n  {name}" in done.stdout


def test_python_runs_the_package_as_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "mxref", "--version"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        f"mxref {mxref.__version__}, specification {SPECIFICATION}\n",
        "",
    )


def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, package: str = "plug") -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / package / "cli.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(
        "mxref.cli.entry_points", lambda group: [EntryPoint("go", f"{package}.cli:go", group)]
    )


def test_help_of_a_command_comes_from_its_source(tmp_path, monkeypatch):
    source = 'raise SystemExit("imported")\ndef go():\n    """Go far. And back."""\n'
    plugin(tmp_path, monkeypatch, source, "plug_far")
    assert "  go          Go far.\n" in run("--help").output


def test_help_follows_an_import_and_falls_back_to_the_origin(tmp_path, monkeypatch):
    plugin(tmp_path, monkeypatch, "from plug_b.other import start as go\n", "plug_b")
    (tmp_path / "plug_b" / "other.py").write_text(
        'def start():\n    """Start\n    here: now.\n\n    More."""\n'
    )
    assert summary(EntryPoint("go", "plug_b.cli:go", "g")) == "Start here: now."
    assert summary(EntryPoint("go", "plug_b.cli:other", "g")) == "From plug_b.cli:other."
    assert summary(EntryPoint("go", "no_such_package.cli:go", "g")) == "From no_such_package.cli:go."


@pytest.mark.parametrize(
    ("body", "exit_code", "line"),
    [
        ("raise RecipeError('steps = 0; give 1 or more')", 2, "error: steps = 0; give 1 or more"),
        ("raise KeyboardInterrupt", 130, "interrupted"),
    ],
)
def test_errors_are_one_line(tmp_path, monkeypatch, body, exit_code, line):
    package = f"plug_error_{exit_code}"
    source = f"import click\nfrom mxref.errors import RecipeError\n@click.command()\ndef go():\n    {body}\n"
    plugin(tmp_path, monkeypatch, source, package)
    result = run("go")
    assert result.exit_code == exit_code
    assert result.stderr == line + "\n"
    assert result.stdout == ""


def test_a_missing_package_is_named_with_the_extra_that_brings_it(tmp_path, monkeypatch):
    plugin(tmp_path, monkeypatch, "import torch_that_is_not_there\n", "plug_missing")
    result = run("go")
    assert result.exit_code == 2
    assert (
        "needs torch_that_is_not_there, which is not installed: pip install torch_that_is_not_there"
        in result.stderr
    )

    class Distribution:
        name = "mxref"
        requires = ("torch_that_is_not_there>=2.11; extra == 'training'", "numpy>=2")

    point = EntryPoint("go", "plug_missing.cli:go", "g")
    vars(point).update(dist=Distribution())
    with pytest.raises(BackendError, match=r"pip install 'mxref\[training\]'"):
        load_command(point)
    vars(point).update(value="plug_gone.cli:go")
    with pytest.raises(BackendError, match="reinstall mxref"):
        load_command(point)


def test_unknown_command_and_version():
    result = run("explian")
    assert result.exit_code == 2
    assert "no command 'explian' (did you mean 'explain'?)" in result.stderr
    assert run("--version").output == f"mxref {mxref.__version__}, specification {SPECIFICATION}\n"
    assert run("--verison").exit_code == 2


def test_own_commands_load():
    with click.Context(main) as ctx:
        assert isinstance(main, LazyGroup)
        assert [main.get_command(ctx, n).name for n in ("explain", "backends")] == ["explain", "backends"]


def explained(*args: str) -> list[dict]:
    result = run("explain", "--json", *args)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["blocks"]


def test_explain_takes_every_way_to_write_a_number():
    words = ("1", "-2.5", "-0", "nan", "-inf", "0x7f800001", "1e-45", "-.5,", "+3", "0X80000000", "-1e-3")
    (block,) = explained(*words)
    bits = [e["x_bits"] for e in block["elements"]]
    expected = np.array([1, -2.5, -0.0, np.nan, -np.inf, 0, 1e-45, -0.5, 3, -0.0, -1e-3], np.float32).view(
        np.uint32
    )
    expected[5] = 0x7F800001
    assert bits == [*expected.tolist(), *[0] * (32 - len(words))]
    assert block["elements"][0]["case"] == "nan"
    assert any("21 of 32 elements are padding" in note for note in block["notes"])


def test_explain_passes_every_option_on():
    args = (
        "--scale-rule ceil --rounding sr --sr-bits 9 --hadamard 16 --signs per_step_layer --prescale "
        "--seed 5 --step 6 --layer 7 --operand wgrad.x 1 -2 3"
    )
    (block,) = explained(*args.split())
    spec = OperandSpec(
        scale_rule=ScaleRule.CEIL, rounding=Rounding.SR, sr_bits=9, prescale=True, hadamard=16,
        signs=mxref.SignPolicy.PER_STEP_LAYER,
    )  # fmt: skip
    q = quantize(np.array([1, -2, 3], np.float32), spec, placement=Placement(Stream(5, 6, 7, 5)), pad=True)
    assert block["packed"] == q.codes.tobytes().hex()
    assert block["scale"]["byte"] == q.scales[0]


def test_explain_dialects_and_overrides():
    (amd,) = explained("--dialect", "amd", "0")
    assert amd["scale"]["byte"] == 127
    (changed,) = explained("--dialect", "amd", "--zero-scale", "0", "0")
    assert changed["scale"]["byte"] == 0
    (plain,) = explained("--dialect", "tseng", "--hadamard", "0", "--no-prescale", "1")
    assert (plain["spec"]["signs"], plain["spec"]["prescale"], plain["spec"]["rounding"]) == (
        "none",
        False,
        "sr",
    )
    assert len(explained("--dialect", "tseng", "1")) == 2  # H64 pads to two blocks
    (second,) = explained("--dialect", "tseng", "--block", "1", "1")
    assert second["index"] == 1


@pytest.fixture
def array() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((64, 96)).astype(np.float32)


def test_explain_reads_files(tmp_path, array):
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "a.npz", w=array, v=array[:1])
    save_file({"w": array.astype(ml_dtypes.bfloat16)}, tmp_path / "a.safetensors")
    q = quantize(array, axis=0)
    for name, extra in (("a.npy", ()), ("a.npz", ("--key", "w"))):
        (block,) = explained("--file", str(tmp_path / name), "--axis", "0", "--block", "70", *extra)
        assert block["packed"] == q.codes.reshape(-1, 16)[70].tobytes().hex()
    narrow = quantize(array.astype(ml_dtypes.bfloat16))
    (block,) = explained("--file", str(tmp_path / "a.safetensors"), "--block", "3")
    assert block["packed"] == narrow.codes.reshape(-1, 16)[3].tobytes().hex()
    (tile,) = explained("--file", str(tmp_path / "a.npy"), "--tile", "--block", "3")
    tiled = quantize(array, OperandSpec(block=mxref.BlockShape.TILE))
    assert tile["scale"]["byte"] == tiled.scales.reshape(-1)[3]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "give either numbers or --file"),
        (("1", "--file", "x.npy"), "give either numbers or --file"),
        (("1", "--axis", "0"), "need --file"),
        (("--roundin", "sr", "1"), "'--rounding'"),
        (("one",), "'one' is not a float32 number"),
        (("-x",), "'-x' is not a float32 number"),
        (("0x1ffffffff",), "is not a float32 number"),
        (("1e39",), "beyond float32"),
        (("1", "--block", "5"), "block 5 does not exist"),
        (("1", "--rounding", "sr", "--seed", "-1"), "seed = -1 is outside"),
        (("1", "--signs", "fixed"), "without a Hadamard transform"),
        (("1", "--dialect", "amdd"), "did you mean 'amd'?"),
        (("1", "--tile"), "needs two axes"),
        (("1", "--amax", "7"), "amax = 7.0 with the format mxfp4: it has no scale of the tensor"),
        (("1", "--format", "nvfp4", "--amax", "nan"), "amax = nan is no finite magnitude"),
        (("1", "--format", "nvfp4", "--amax", "much"), "--amax 'much' is not a float32 number"),
        (("1", "--format", "nvfp4", "--prescale"), "prescale = true with the format nvfp4"),
        (("1", "--format", "nvfp4", "--scale-rule", "floor"), "scale_rule = 'floor' with the format nvfp4"),
        (("1", "--format", "nvfp4", "--scale-rule", ">1.5"), "scale_rule = '>1.5' with the format nvfp4"),
        (("1", "--format", "nvfp4", "--dialect", "amd"), "scale_rule = 'even' with the format nvfp4"),
        (("1", "--format", "nvfp4", "--zero-scale", "127"), "neither 0 nor 56"),
        (("--file", "missing.npy"), "cannot read missing.npy: No such file"),
        (("--file", "missing.txt"), "the suffix must be"),
    ],
)  # fmt: skip
def test_explain_refuses(args, message):
    result = run("explain", *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_explain_refuses_damaged_and_ambiguous_files(tmp_path, array):
    (tmp_path / "bad.npy").write_bytes(b"\x93NUMPY\x01\x00garbage")
    (tmp_path / "bad.safetensors").write_bytes(b"garbage")
    np.savez(tmp_path / "two.npz", a=array, b=array)
    np.save(tmp_path / "wide.npy", array.astype(np.float64))
    for name, message in (
        ("bad.npy", "cannot read"),
        ("bad.safetensors", "cannot read"),
        ("two.npz", "has 2 arrays, choose one with --key: a, b"),
        ("wide.npy", "x.astype(numpy.float32)"),
    ):
        result = run("explain", "--file", str(tmp_path / name))
        assert result.exit_code == 2
        assert result.stderr.startswith("error: ")
        assert message in result.stderr
        assert result.stderr.count("\n") == 1
    assert "no array 'c': a, b" in run("explain", "--file", str(tmp_path / "two.npz"), "--key", "c").stderr


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "args",
    [
        "1 -2 0.5 1.75 7 -0 1e-9",
        "nan 1",
        "0 -0 --zero-scale 127",
        "1e-45 3.4028235e38 -1.1754944e-38 0.1 0.33333334 --rounding sr",
        "--dialect tseng --seed 18446744073709551615 --step 4294967295 1 -2 33.333332 0.0123456",
        "--rounding sr --sr-bits 22 1 -2 33.333332 0.0123456",
        "--format mxfp8_e4m3 1 -2 0.5 3.3e-4 448 600 0.013",
        "--format mxfp8_e5m2 --rounding sr --hadamard 16 1 -2 3.3e-7 448 60000 0.013 0.1234567",
    ],
)
def test_tables_fit_the_terminal(args, width):
    result = run("explain", *args.split(), width=width)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in result.stdout
    for block in explained(*args.split()):
        stored = " ".join(block["packed"][i : i + 2] for i in range(0, 32, 2))
        assert f"scale {block['scale']['byte']:02x}  codes {stored}" in result.stdout


def test_wide_tables_give_reasons():
    assert "T+r = " in run("explain", "1", "0.3", "--rounding", "sr", width=120).stdout
    assert "T+r = " not in run("explain", "1", "0.3", "--rounding", "sr", width=80).stdout


def test_a_run_of_padding_is_one_row_unless_the_transform_spreads_into_it():
    assert "\n8-31  " in run("explain", *"12345678").stdout
    assert "\n30  " in run("explain", *"12345678", "--hadamard", "16").stdout


def test_explain_takes_the_amax_of_the_tensor():
    words = ("--format", "nvfp4", "1.5234375", "-0.75", *["0"] * 14, "3")
    for text in ("260", "0x43820000"):
        first, second = explained("--amax", text, *words)
        assert (first["scale"]["byte"], first["scale"]["tensor_amax"], second["index"]) == (0x42, 260, 1)
    own, _ = explained(*words)
    assert (own["scale"]["tensor_amax"], own["scale"]["byte"]) == (3, 0x76)
    shown = run("explain", "--amax", "260", *words).stdout
    assert "scale of the tensor 3dc61862, a float32" in shown
    assert "v = |x| / (X t)" in shown


def test_backends_lists_the_reference_and_its_capabilities():
    result = run("backends", "--json", MXREF_BACKEND="reference")
    answer = json.loads(result.stdout)
    assert answer["chosen"] == "reference"
    assert answer["why"] == "MXREF_BACKEND=reference"
    (row,) = [b for b in answer["backends"] if b["name"] == "reference"]
    assert set(row["capabilities"]) == set(Capabilities.__dataclass_fields__)
    assert row["capabilities"]["scale_rules"] == list(ScaleRule)
    assert row["capabilities"]["hadamard_sizes"] == [2, 4, 8, 16, 32, 64, 128, 256]
    assert row["capabilities"]["formats"] == list(BLOCK_FORMATS)
    assert row["capabilities"]["gemms"][:2] == [["exact", "mxfp4", "mxfp4"], ["exact", "mxfp4", "mxfp8_e4m3"]]
    shown = " ".join(run("backends", width=400).stdout.split())
    long = ", ".join(name for name, made in BLOCK_FORMATS.items() if made.k == 32)
    assert f"exact: all pairs of {long} and nvfp4; ordered: all pairs" in shown
    text = run("backends", MXREF_BACKEND="reference").stdout
    for field in Capabilities.__dataclass_fields__:
        assert f"\n{field} " in text
    assert "chosen: reference, MXREF_BACKEND=reference" in text


def test_backends_takes_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from mxref.reference import ReferenceBackend\nfrom mxref import Capabilities\n"
        "class Mine(ReferenceBackend):\n    name = 'mine'\n    capabilities = Capabilities(prescale=False)\n"
        "backend = Mine()\n"
    )
    name = f"{path}:backend"
    answer = json.loads(run("backends", "--json", MXREF_BACKEND=name).stdout)
    assert answer["chosen"] == name
    assert answer["backends"][0]["capabilities"]["prescale"] is False
    assert "Bold rows differ" in run("backends", MXREF_BACKEND=name, width=120).stdout


def test_backends_shows_the_list_and_then_the_problem():
    result = run("backends", MXREF_BACKEND="referense", width=200)
    assert result.exit_code == 2
    assert "mxref.reference:backend" in result.stdout
    assert result.stderr.startswith("error: unknown backend 'referense' (did you mean 'reference'?)")


def test_module_is_usable_from_a_fresh_process():
    env = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-c", "from mxref.cli import main; main()", "explain", "1", "-2", "0.5"],
        capture_output=True, text=True, timeout=60, env=env,
    )  # fmt: skip
    assert done.returncode == 0
    assert "scale 7e  codes e4 02 00" in done.stdout


def test_explain_takes_a_block_format_and_names_it_in_json():
    shown = run("explain", "1", "-2", "448", "--format", "mxfp8_e4m3", "--json")
    (block,) = json.loads(shown.stdout)["blocks"]
    assert block["spec"]["format"] == "mxfp8_e4m3"
    assert block["packed"] == "38c07e" + "00" * 29
    (plain,) = json.loads(run("explain", "1", "--json").stdout)["blocks"]
    assert plain["spec"]["format"] == "mxfp4"
    text = run("explain", "1", "-2", "448", "--format", "mxfp8_e4m3").stdout
    assert "MXFP8 E4M3" in text
    assert "Rounding to the grid of E4M3" in text
