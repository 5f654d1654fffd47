"""Invalid options and unwritable outputs give one line on standard error and exit code 2, in every command."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from mxref.cli import main

HUGE = str(10**30)
LONG = "x" * 5000


def run(*args: str) -> Result:
    return CliRunner().invoke(main, args, env={"MXREF_BACKEND": "", "COLUMNS": "100"})


@pytest.mark.parametrize(
    "args",
    [
        ("explain", "1", "--seed", HUGE),
        ("explain", "1", "--rounding", "sr", "--seed", "-1"),
        ("explain", "1", "--rounding", "sr", "--step", HUGE),
        ("explain", "1", "--rounding", "sr", "--layer", "-1"),
        ("explain", "1", "--block", HUGE),
        ("explain", "1", "--block", "-1"),
        ("explain", "1", "--dialect", LONG),
        ("explain", "--file", f"{LONG}.npy"),
        ("explain", "--file", LONG),
        ("explain", "0x" + "f" * 5000),
        ("explain", "9" * 5000),
        ("explain", "1e999"),
        ("explain", "$\\foo$"),
        ("vectors", "list", "--dir", LONG),
        ("vectors", "verify", "--dir", LONG),
        ("warm-up", "--backend", LONG),
        ("train", LONG, "--dry-run"),
        ("train", f"{LONG}.toml", "--dry-run"),
        ("train", "tiny", "--recipe", LONG),
        ("train", "tiny", "--set", f"run.steps={HUGE}"),
        ("train", "tiny", "--set", "run.steps=0"),
        ("train", "tiny", "--backend", "reference", "--set", f"run.device={LONG}"),
        ("train", "tiny", "--set", "run.threads=1000000"),
        ("train", "tiny", "--set", "optim.clip=inf"),
        ("train", "tiny", "--set", f"model.vocab={HUGE}"),
        ("train", "tiny", "--set", "model.layers=1000000", "--dry-run"),
        ("ablate", LONG),
        ("ablate", f"{LONG}.toml"),
        ("ablate", "paper", "--set", "branch.updates=-1"),
        ("ablate", "paper", "--max-minutes", "nan"),
        ("ablate", "paper", "--max-minutes", "inf"),
        ("conform", "--time-limit", "nan"),
        ("ablate", "paper", "--seeds", HUGE),
        ("ablate", "paper", "--seeds", "0"),
        ("ablate", "paper", "--arms", LONG),
        ("ablate", "paper", "--set", "run.seed=2026-01-02"),
        ("report", LONG),
    ],
    ids=lambda args: " ".join(word[:12] for word in args),
)
def test_options_that_cannot_be(
    args: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = run(*args)
    assert isinstance(found.exception, SystemExit), found.exception
    assert found.exit_code == 2
    assert found.stdout == ""
    last = found.stderr.splitlines()[-1]
    assert last.startswith(("error: ", "Error: "))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--sr-bits 4", "--sr-bits needs --rounding sr, but the rounding is rne"),
        ("--sr-bits 4 --rounding rtz", "--sr-bits needs --rounding sr, but the rounding is rtz"),
        ("--seed 1", "--seed has no effect here: it needs --rounding sr, or --hadamard with --signs"),
        ("--step 1 --hadamard 16", "--step has no effect here"),
        ("--layer 1 --dialect amd", "--layer has no effect here"),
    ],
)
def test_explain_refuses_options_that_decide_nothing(options: str, message: str) -> None:
    found = run("explain", "1", *options.split())
    assert found.exit_code == 2
    assert message in found.stderr


@pytest.mark.parametrize(
    "options",
    [
        "--sr-bits 4 --rounding sr --seed 1 --step 1 --layer 1",
        "--dialect tseng --sr-bits 4 --layer 2",
        "--hadamard 16 --signs fixed --seed 1",
        "--hadamard 16 --signs per_step --seed 1 --step 1",
        "--hadamard 16 --signs per_step_layer --seed 1 --step 1 --layer 1",
    ],
)
def test_explain_takes_options_that_decide_something(options: str) -> None:
    assert run("explain", "1", *options.split()).exit_code == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's device without space")
@pytest.mark.parametrize("args", [("--help",), ("explain", "1", "2")])
def test_output_that_cannot_be_written(args: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", "from mxref.cli import main; main()", *args],
            stdout=full,
            stderr=subprocess.PIPE,
            env=os.environ | {"MXREF_BACKEND": ""},
            text=True,
            timeout=120,
        )
    assert done.returncode == 2
    assert done.stderr == "error: No space left on device\n"


def test_an_error_of_the_system_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plug_system.py").write_text(
        f"import click\n@click.command()\ndef go():\n    open({str(tmp_path)!r}, 'w')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("mxref.cli.entry_points", lambda group: [EntryPoint("go", "plug_system:go", group)])
    found = run("go")
    assert found.exit_code == 2
    assert found.stderr == f"error: Is a directory: {tmp_path}\n"


def plugged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Path:
    """Add a command `go` with this body; return its file."""
    file = tmp_path / "plug_raising.py"
    file.write_text(f"import click\n@click.command()\ndef go():\n    {body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "plug_raising", raising=False)
    monkeypatch.setattr("mxref.cli.entry_points", lambda group: [EntryPoint("go", "plug_raising:go", group)])
    return file


def test_an_unexpected_exception_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = plugged(tmp_path, monkeypatch, "{}['a\\x1bb']")
    found = run("go")
    assert found.exit_code == 2
    assert found.stdout == ""
    assert found.stderr == (
        f"error: mxref go stopped: KeyError: 'a\\x1bb' ({file}, line 4), which is a defect of mxref, a backend or a "
        "plugin; MXREF_TRACEBACK=1 prints the traceback\n"
    )


@pytest.mark.parametrize("body", ["{}['a']", "import mxref; mxref.get_backend('zzz')"])
def test_the_traceback_is_printed_on_request(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = plugged(tmp_path, monkeypatch, body)
    assert "Traceback" not in run("go").stderr
    for value in ("", "0"):
        monkeypatch.setenv("MXREF_TRACEBACK", value)
        assert "Traceback" not in run("go").stderr
    monkeypatch.setenv("MXREF_TRACEBACK", "1")
    found = run("go")
    assert found.exit_code == 2
    assert found.stderr.startswith("Traceback (most recent call last)")
    assert str(file) in found.stderr
    assert found.stderr.splitlines()[-1].startswith("error: ")
    assert "MXREF_TRACEBACK" not in found.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("raise SystemExit(7)", 7),
        ("click.get_current_context().exit(1)", 1),
        ("raise KeyboardInterrupt", 130),
    ],
)
def test_exit_codes_of_commands_are_kept(
    body: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugged(tmp_path, monkeypatch, body)
    found = run("go")
    assert found.exit_code == code
    assert "error:" not in found.stderr


def test_help_names_the_variables_of_the_environment() -> None:
    text = run("--help").stdout
    assert "MXREF_BACKEND" in text
    assert "MXREF_TRACEBACK=1" in text


def commands(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    context = click.Context(group)
    found: list[tuple[str, ...]] = [path]
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        inner = (*path, name)
        found += commands(command, inner) if isinstance(command, click.Group) else [inner]
    return found


def test_help_as_it_is_shown() -> None:
    examples = 0
    for path in commands(main):
        found = run(*path, "--help")
        assert found.exit_code == 0
        assert "\\" not in found.stdout, path
        assert "\b" not in found.stdout, path
        lines = [line.strip() for line in found.stdout.splitlines()]
        written = [line for line in lines if line.startswith("mxref ")]
        examples += len(written)
        # An example is a line of its own: the start of none is found within a line.
        begins = "Usage: mxref ", "torchrun ", "mxref layout "  # mxref is the name of a layout too
        assert not [line for line in lines if " mxref " in line and not line.startswith(begins)], path
    assert examples >= 15


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (("conform", "--backend", "zzz"), ["known: ", "numba", "reference", "module:object"]),
        (("conform", "--backend", "nunba"), ["did you mean 'numba'?", "known: ", "module:object"]),
        (("conform", "--backend", "mine.py"), ["'mine.py' is a file", "mine.py:backend"]),
        (("explain", "weights.npy"), ["'weights.npy' is not a number", "--file weights.npy"]),
        (("explain", "--dialect", "zzz", "1"), ["known: ", "nvidia"]),
        (("conform", "--clause", "zzz.zzz"), ["known: ", "scale."]),
        (("conform", "--op", "zzz"), ["'quantize'"]),
        (("train", "zzz"), ["known: ", "tiny"]),
        (("ablate", "zzz"), ["known: ", "paper"]),
        (("zzz",), ["known: ", "explain"]),
    ],
    ids=lambda args: " ".join(args),
)
def test_known_names_are_listed_once(args: tuple[str, ...], names: list[str]) -> None:
    found = run(*args)
    assert found.exit_code == 2
    assert found.stderr.count("known:") <= 1
    assert all(name in found.stderr for name in names)
