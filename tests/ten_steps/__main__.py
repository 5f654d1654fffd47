"""Compare the metrics of two trees, byte for byte, over ten steps of each arm of `paper.toml` beside this file.

    python -m ten_steps OLD NEW [OUT]     in tests/: the checkouts of both trees, and a folder to keep the runs in

Bytes are not committed, because they are those of one machine: the attention, the last layer and the cross-entropy
run in PyTorch, whose sums and exponentials depend on the processor and on PyTorch's version. So both trees train on
this machine, each in a process of its own that sees nothing but the command line of its tree.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

LADDER = Path(__file__).with_name("paper.toml")
WORDS = (
    "scale",
    "block",
    "round",
    "pack",
    "code",
    "sign",
    "half",
    "even",
    "tile",
    "group",
    "norm",
    "loss",
    "step",
    "rank",
)
SIZES = {
    "model.layers": 2, "model.width": 64, "model.heads": 2, "model.kv_heads": 1, "model.ffn": 128, "model.vocab": 300,
    "model.max_seq": 32, "run.steps": 10, "run.batch": 4, "run.micro_batch": 2, "run.seq_len": 32, "run.eval_every": 5,
    "run.eval_tokens": 128, "run.checkpoint_every": 0, "run.threads": 1, "optim.warmup": 3,
}  # fmt: skip

_TRAIN = """
import json, sys
from mxref.cli import main
for arguments in json.load(sys.stdin):
    try:
        main(arguments)
    except SystemExit as ended:
        if ended.code:
            sys.exit(f"{ended.code} of {arguments}")
"""


def arms() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return the recipe and the settings of each arm; two arms are trained by captured steps too."""
    ladder = tomllib.loads(LADDER.read_text(encoding="utf-8"))
    found = {
        arm["name"]: (
            _laid(ladder["recipe"], arm.get("recipe", {})),
            SIZES | {"run.seed": 7 + arm.get("seed_offset", 0)},
        )
        for arm in ladder["arm"]
    }
    for name in ("fp8", "all-sr"):
        recipe, settings = found[name]
        found[f"{name}-captured"] = recipe, settings | {"run.capture": "true"}
    return found


def _laid(below: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {**below, **over}
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            both[key] = _laid(below[key], value)
    return both


def _toml(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _toml(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key} = {json.dumps(value)}"


def _documents(count: int, seed: int) -> Iterator[str]:
    """Yield lines of JSONL whose words follow a linear congruence."""
    state = seed
    for _ in range(count):
        words = []
        for _ in range(40):
            state = (1103515245 * state + 12345) % 2**31
            words.append(WORDS[(state >> 16) % len(WORDS)])
        yield json.dumps({"text": " ".join(words)}) + "\n"


def train(tree: Path, out: Path, names: Iterable[str] = ()) -> dict[str, bytes]:
    """Train all arms, or the named ones, with the code of a checkout; return the bytes of each `metrics.jsonl`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "train.jsonl").write_text("".join(_documents(120, 1)), encoding="utf-8")
    (out / "val.jsonl").write_text("".join(_documents(12, 2)), encoding="utf-8")
    chosen = {name: arm for name, arm in arms().items() if not names or name in names}
    commands = []
    for name, (recipe, settings) in chosen.items():
        file = out / f"{name}.toml"
        file.write_text("\n".join(_toml(recipe)) + "\n", encoding="utf-8")
        settings = settings | {"data.val": out / "val.jsonl"}
        given = {"data": out / "train.jsonl", "recipe": file, "backend": "numba"}
        words = ["train", "tiny", "--no-resume", "--out", str(out / name)]
        words += [word for key, value in given.items() for word in (f"--{key}", str(value))]
        commands.append(
            words + [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        )
    code = os.pathsep.join(str(tree / folder) for folder in (".", "backends", "training"))
    own = {
        "PYTHONPATH": code,
        "XDG_CACHE_HOME": str(out / "cache"),
        "NUMBA_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    process = [sys.executable, "-c", _TRAIN]
    subprocess.run(process, input=json.dumps(commands), text=True, check=True, env=os.environ | own, cwd=out)
    return {name: (out / name / "metrics.jsonl").read_bytes() for name in chosen}


def differences(old: Mapping[str, bytes], new: Mapping[str, bytes]) -> Iterator[str]:
    """Yield a line for each arm whose metrics differ, with the first lines that do."""
    for name, expected in old.items():
        if new[name] != expected:
            pairs = zip(expected.splitlines(), new[name].splitlines(), strict=False)
            first = next(
                (f"{a.decode()} and {b.decode()}" for a, b in pairs if a != b), "the number of lines"
            )
            yield f"{name}: {first}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(sys.argv[3]) if len(sys.argv) > 3 else Path(scratch)
        trees = [Path(argument).resolve() for argument in sys.argv[1:3]]
        old, new = (train(tree, folder / name) for tree, name in zip(trees, ("old", "new"), strict=True))
    found = list(differences(old, new))
    print("\n".join(found) or f"{len(old)} arms have equal metrics")
    sys.exit(bool(found))
