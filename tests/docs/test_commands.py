"""Every command that a page shows is understood by the program, and is run by a test or excepted with its reason."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("mxref_training.cli.train")
pytest.importorskip("sphinx")

import command_line
from shown import PAGES, Session, Step, blocks, steps

import data_files
from mxref.cli import main
from places import ROOT

ELSEWHERE = {
    "how-to/add-a-format.rst": "tests/docs/test_add_format.py",
    "how-to/conformance.rst": "tests/mxref/conformance/test_conformance_cli.py",
    "how-to/data.rst": "tests/docs/test_data_page.py",
    "how-to/export.rst": "tests/training/test_export_page.py",
    "how-to/two-stacks.rst": "tests/torch/checks/test_operands.py",
    "how-to/torchtitan.rst": "tests/torchtitan/test_titan_page.py",
    "tutorials/end-to-end.rst": "tests/docs/test_end_to_end_page.py",
    "tutorials/quickstart.rst": "tests/docs/test_quickstart.py",
}
"""Pages whose commands another file runs, or holds to what they print."""
EXCEPTED = {
    r"pip install|python3 -m venv|source \.venv": "installs packages",
    r"make [\w-]+|\.ci/run|pytest -n auto|pytest --durations": "a target of the Makefile, or all tests",
    r"python -m (projection|exhaustive|peers|ablations|bench|aot)": "a program with tests of its own",
    r"triton|check_scales|collect_env|--gpus-per-run|mx64|torchrun|lab_20m|gpu": "needs GPUs",
    r"kill -9|pdb|cuda-gdb": "is for a second terminal or a debugger",
    r"c4|hf:|allenai|large_train|val_c4|\$D\b|D=|runs/probed": "downloads data, or needs those of a published run",
    r"--track": "needs a package that is not installed, or sends numbers to a service",
    r"paper_8b|docs/records|back/one|runs/(all|today|one)|pytest -p mxref": "needs results or a backend of the reader",
    r"runs/readings": "needs the results of whole ladders",
    r"path/to/mine|--backend mine |https://host": "names a file of the reader's",
    r"lab2?/bin|mxref-lab-\d": "is for the wheel of a published experiment",
    r"train llama31_8b (?!.*--dry-run)": "trains 8 billion parameters",
    r"mkdir|tar czf|mxref warm-up": "is the shell's, or compiles every kernel for minutes",
    r"conform --backend (numba|tests/explorer)": "a minute; the tests of the backends ask for the same",
    r"cd here|verilator|obj_dir|unzip": "compiles C, which test_vectors_c.py does, or needs Verilator or a wheel",
    r"conform --replay": "repeats a recording of a run in which a bit was wrong",
}
"""Commands that no test runs as they stand, by patterns, with the reason."""
SHORT = {
    r"mxref train demo": "--set run.steps=10 --set model.layers=1 --set run.eval_tokens=256 --set run.eval_every=2",
    r"mxref train tiny(?!.*--dry-run)": "--set run.steps=10 --set run.eval_tokens=256",
    r"mxref ablate paper .*--branch": '--set run.steps=4 --set branch.moments=["50%"] --set branch.updates=2 '
    "--arms all --set model.layers=1 --set run.eval_every=1 --set run.eval_tokens=256 --set run.batch=4 "
    "--set run.seq_len=32",
    r"mxref ablate paper .*tokenizer\.json": "--set run.steps=2 --arms fp8,all --set model.layers=1 "
    "--set run.eval_every=1 --set run.eval_tokens=256 --set run.batch=4 --set run.seq_len=32 --set model.vocab=512",
    r"mxref ablate paper(?!.*--list)": "--set run.steps=2 --arms fp8,all --set model.layers=1 --set run.eval_every=1 "
    "--set run.eval_tokens=256 --set run.batch=4 --set run.seq_len=32",
    r"mxref ablate ladder.toml(?!.*--list)": "--set run.steps=6 --set run.eval_every=2 --set run.eval_tokens=256",
}
"""What is added to commands that would train for minutes. Their output is then another one."""


def reason(step: Step) -> str | None:
    """Return why no test runs a command."""
    return next((why for pattern, why in EXCEPTED.items() if re.search(pattern, step.command)), None)


def to_run(page: str) -> list[Step]:
    return [step for step in steps(page) if reason(step) is None]


def arrays(folder: Path) -> None:
    """The files that the pages name."""
    g = np.random.default_rng(0)
    np.save(folder / "weights.npy", g.standard_normal((18, 32)).astype(np.float32))
    for name in ("text", "held_out", "train", "val", "other"):
        data_files.write(folder / f"{name}.jsonl", data_files.make_texts(300, len(name)))


def quantized(folder: Path) -> None:
    """Arrays that a kernel would have written, the second under a recipe's operand along the first axis."""
    import mxref
    from mxref.check import named_spec

    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    q = mxref.quantize(x, "amd")
    for name, array in (("x", x), ("codes", q.codes), ("scales", q.scales)):
        np.save(folder / f"{name}.npy", array)
    from safetensors.numpy import save_file

    other = mxref.quantize(x, named_spec("mxfp4_h16:fprop.x"), axis=0)
    save_file({"x": x, "codes": other.codes, "scales": other.scales}, folder / "dump.safetensors")


def layouts(folder: Path) -> None:
    """An array of mxref, and a checkpoint of two layers in Quark's convention."""
    import mxref
    from mxref import exchange

    g = np.random.default_rng(0)
    q = mxref.quantize(g.standard_normal((160, 320)).astype(np.float32))
    q.save(folder / "w.npz")
    from safetensors.numpy import save_file

    held = exchange.stored(q, "quark", "model.layers.0.mlp.up_proj")
    save_file(held | exchange.stored(q, "quark", "lm_head"), folder / "checkpoint.safetensors")


def saved(page: str, name: str) -> Callable[[Path], None]:
    """The first TOML of a page, which tells the reader to save it under this name."""

    def write(folder: Path) -> None:
        text = next(block.text for block in blocks(page) if block.language == "toml")
        (folder / name).write_text(text, encoding="utf-8")

    return write


def configured(folder: Path) -> None:
    """A configuration, a tokenizer and texts of the reader's own."""
    from mxref_training.config_files import PRESETS
    from mxref_training.data import train_tokenizer

    arrays(folder)
    text = (PRESETS / "tiny.toml").read_text(encoding="utf-8")
    (folder / "mine.toml").write_text(text, encoding="utf-8")
    tokenizer = train_tokenizer(data_files.documents(data_files.make_texts(300)), 400)
    (folder / "tokenizer.json").write_text(tokenizer.to_table()["json"], encoding="utf-8")


def three_runs(folder: Path) -> None:
    """Runs to compare."""
    for recipe in ("fp8", "mxfp4", "mxfp4_h16"):
        words = ["train", "tiny", "--recipe", recipe, "--set", "run.steps=2", "--out", f"runs/{recipe}"]
        assert CliRunner().invoke(main, words).exit_code == 0


def toy(folder: Path) -> None:
    (folder / "mine.py").write_text(
        (ROOT / "docs" / "examples" / "toy_backend.py").read_text(encoding="utf-8")
    )


QUICK: dict[str, Callable[[Path], None]] = {
    "tutorials/hold-your-kernel.rst": arrays,
    "how-to/distributed.rst": arrays,
    "how-to/layouts.rst": layouts,
    "how-to/identify.rst": lambda folder: None,
    "reference/cli.rst": arrays,
    "reference/ladders.rst": arrays,
    "reference/presets.rst": arrays,
    **{page: arrays for page in PAGES if page.startswith("reference/peers/") and steps(page)},
}
"""Pages whose commands take seconds together, with what prepares their folder."""
LONG: dict[str, Callable[[Path], None]] = {
    "tutorials/training.rst": arrays,
    "tutorials/ladder.rst": arrays,
    "how-to/ablation.rst": configured,
    "how-to/backends.rst": toy,
    "how-to/check-a-kernel.rst": quantized,
    "how-to/layers-and-phases.rst": saved("how-to/layers-and-phases.rst", "plan.toml"),
    "how-to/probe.rst": arrays,
    "how-to/recipe.rst": saved("how-to/recipe.rst", "mine.toml"),
    "how-to/telemetry.rst": three_runs,
    "reference/explorer.rst": arrays,
    "reference/vectors.rst": arrays,
    "explanation/bits.rst": arrays,
    "explanation/performance.rst": arrays,
}
"""Pages whose commands train or take minutes."""


def test_every_command_is_run_or_excepted_with_a_reason() -> None:
    """A page that is new, or gets a first command, is named here."""
    homes = {**ELSEWHERE, **QUICK, **LONG}
    forgotten = [
        f"{page}: {step.command}"
        for page in PAGES
        if page not in homes
        for step in steps(page)
        if reason(step) is None
    ]
    assert forgotten == []
    assert [page for page in homes if not steps(page)] == []
    for page, file in ELSEWHERE.items():
        assert Path(page).stem in (ROOT / file).read_text(encoding="utf-8")
    used = {
        pattern
        for pattern in EXCEPTED
        for page in PAGES
        for s in steps(page)
        if re.search(pattern, s.command)
    }
    assert used == set(EXCEPTED)


def mxref_words(step: Step) -> list[str] | None:
    """Return the words after `mxref` in a command, or None."""
    words = step.command.replace("$(which mxref)", "mxref").replace(";", " ;")
    program = Step(words, ()).program
    if "mxref" not in program:
        return None
    words_ = program[program.index("mxref") + 1 :]
    return words_[: words_.index(";")] if ";" in words_ else words_


def understood(words: list[str]) -> None:
    """Raise a usage error unless the program takes these words."""
    context = click.Context(main, info_name="mxref")
    command: click.Command = main
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, found, words = command.resolve_command(context, words)
        assert found is not None
        command, context = found, click.Context(found, context, info_name=name)
    if command is not main and not isinstance(command, click.Group):
        with contextlib.suppress(click.exceptions.Exit):  # of --help
            command.make_context(context.info_name, list(words), parent=context.parent)


@pytest.mark.parametrize("page", [page for page in PAGES if any(map(mxref_words, steps(page)))])
def test_every_command_of_mxref_is_understood(page: str) -> None:
    for step in steps(page):
        words = mxref_words(step)
        if words is not None:
            understood([word for word in words if not word.startswith("$")])


def test_every_example_of_a_help_text_is_understood() -> None:
    shown = [
        (name, example)
        for name, command in command_line.commands()
        for example in command_line.examples(command)
    ]
    assert len(shown) > 30
    for _, example in shown:
        understood(mxref_words(Step(example, ())) or [])


def test_an_option_that_does_not_exist_is_found() -> None:
    with pytest.raises(click.NoSuchOption, match="--quik"):
        understood(["conform", "--quik"])
    with pytest.raises(click.UsageError, match="no command 'trian'"):
        understood(["trian"])


def run_page(page: str, folder: Path, session: Session) -> int:
    """Save the files of a page and run its commands, in its order; return how many were run."""
    prepared = {**QUICK, **LONG}[page]
    prepared(folder)
    count = 0
    for block in blocks(page):
        if block.language != "console":
            if block.caption:
                session.save(block.caption, block.text)
            continue
        for step in block.steps():
            if reason(step) is None:
                more = next(
                    (words.split() for pattern, words in SHORT.items() if re.search(pattern, step.command)),
                    [],
                )
                session.run(Step(step.command, ()) if more else step, *more)
                count += 1
    return count


@pytest.mark.parametrize("page", QUICK)
def test_the_commands_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_page(page, tmp_path, Session(tmp_path, monkeypatch)) == len(to_run(page)) > 0


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of tokens, which the pages share: half of the time goes into the built-in text."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", LONG)
def test_the_commands_of_a_page_that_take_minutes_run(
    page: str, tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(tmp_path, monkeypatch, XDG_CACHE_HOME=str(texts))
    assert run_page(page, tmp_path, session) == len(to_run(page)) > 0
