"""The commands that are tried under faults, and what two folders must have in common afterwards."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SIZES = [
    "model.layers=1", "model.width=64", "model.heads=2", "model.ffn=64", "model.vocab=280", "model.max_seq=32",
    "run.seq_len=32", "run.batch=1", "run.micro_batch=0", "run.steps=2", "run.eval_every=1",
    "run.eval_tokens=32", "run.checkpoint_every=1", "run.keep=1", "run.threads=1", "optim.warmup=0",
    "data.max_documents=0",
]  # fmt: skip
LADDER = """
title = "two arms"
train.preset = "tiny"
target.high_precision = ""
recipe = { dialect = "amd", all.format = "bf16" }
[[arm]]
name = "fp8"
label = "reference"
[[arm]]
name = "other"
label = "another"
recipe.all = { format = "fp8" }
"""
_CLOCKS = {"seconds", "evaluation_seconds", "tokens_per_second", "started", "sha256", "timing"}
"""Keys of tables that hold clock readings, or digests of a table that does."""


@dataclass(frozen=True)
class Scenario:
    """A command, and the one that was given before it in the same folder."""

    name: str
    command: tuple[str, ...]
    before: tuple[str, ...] = ()


def write_inputs(folder: Path) -> None:
    """Write texts and a ladder."""
    draw = np.random.default_rng(0)
    words = ["scale", "block", "element", "shared", "code", "value", "round", "stochastic", "gradient"]
    for side, count in (("train", 30), ("val", 6)):
        texts = [" ".join(draw.choice(words, 60)) for _ in range(count)]
        (folder / f"{side}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "two.toml").write_text(LADDER)


def scenarios(inputs: Path, root: Path) -> list[Scenario]:
    """Return the commands; whatever they write is below `root`."""
    sets = [part for size in SIZES for part in ("--set", size)]
    data = ["--set", f"data.train={inputs / 'train.jsonl'}", "--set", f"data.val={inputs / 'val.jsonl'}"]
    common = [*sets, *data, "--backend", "reference", "--out", str(root / "runs" / "out")]
    train = ("train", "tiny", *common, "--recipe", "bf16")
    ablate = ("ablate", str(inputs / "two.toml"), *common)
    return [
        Scenario("train", train),
        Scenario("beside", (*train, "--set", "run.async_checkpoint=true")),
        Scenario("ablate", ablate),
        Scenario("again", (*train, "--no-resume"), train),
        Scenario("longer", (*ablate, "--set", "run.steps=3"), ablate),
    ]


def contents(root: Path) -> dict[str, Any]:
    """Return by name what every file below a folder says, less clock readings and the locks of dead processes."""
    return {
        str(p.relative_to(root)): _content(p)
        for p in sorted(root.rglob("*"))
        if p.is_file() and p.suffix != ".lock"
    }


def _content(path: Path) -> Any:
    if path.name == "manifest.json":
        # The digest of state.json is that of a clock, too.
        return {k: v for k, v in json.loads(path.read_text()).items() if k != "state.json"}
    if path.suffix == ".json" and path.name != "tokenizer.json":
        return _timeless(json.loads(path.read_text()))
    if path.name == "timing.jsonl":
        return [
            (json.loads(line)["step"], sorted(json.loads(line))) for line in path.read_text().splitlines()
        ]
    if path.name == "report.html":
        return path.read_text().rstrip().endswith("</html>")
    if path.name == "report.md":
        return re.sub(r"(Training time, all arms: ).*", r"\1", path.read_text())
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(item) for key, item in value.items() if key not in _CLOCKS}
    return [_timeless(item) for item in value] if isinstance(value, list) else value
