"""Evaluations of a run's last checkpoint on other text and with other recipes leave no trace in the run."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ablation_fakes import run_ladder
from mxref.discovery import get_backend
from mxref.recipe_files import load_recipe
from mxref.tomlio import build, to_table
from mxref_training.data.corpus import TokenCorpus
from mxref_training.data.tokens import Tokens
from mxref_training.errors import ConfigError
from mxref_training.lab import last_checkpoint
from mxref_training.lab.arm import ArmRun
from mxref_training.lab.ladder import Arm, Ladder, LastCheckpoints
from mxref_training.lab.last_checkpoint import Extra, prepare
from mxref_training.trainer import train
from training_setup import CONFIG, CORPUS, VOCAB, Vocabulary, text

NOTHING = Extra()
LADDER = build(
    Ladder,
    {
        "title": "two arms",
        "train": {"preset": "tiny"},
        "recipe": {"dialect": "amd", "all": {"format": "fp8"}},
        "target": {"high_precision": ""},
        "arm": [
            {"name": "fp8", "label": "FP8"},
            {"name": "sr", "label": "SR", "recipe": {"all": {"format": "mxfp4", "rounding": "sr"}}},
        ],
    },
    "test.toml",
)


def on_disk(folder: Path, name: str, tokens: Tokens) -> dict[str, Any]:
    """Tokens as another process reads them."""
    path = folder / f"{name}.bin"
    tokens.ids.tofile(path)
    return {"path": str(path), "dtype": tokens.ids.dtype.str, "sha256": tokens.sha256}


def ladder(out: Path, extra: Extra = NOTHING) -> dict[str, Any]:
    run_ladder(
        replace(LADDER, last=LastCheckpoints(keep=())), CONFIG, out,
        backend=get_backend("reference"), trainer=train, corpus=lambda: CORPUS, extra=lambda _: extra,
        say=lambda _: None,
    )  # fmt: skip
    return {name: json.loads((out / "arms" / name / "result.json").read_text()) for name in ("fp8", "sr")}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ladder's results without and with evaluations of the last checkpoint."""
    folder = tmp_path_factory.mktemp("last")
    halves = text(200, 2)
    texts = {
        "first": on_disk(folder, "first", Tokens(halves.ids[:65], "1")),
        "both": on_disk(folder, "both", halves),
    }
    recipes = {name: to_table(load_recipe(name)) for name in ("bf16", "fp8")}
    return ladder(folder / "plain"), ladder(folder / "more", Extra(texts, recipes))


def test_the_run_itself_is_the_same(results: tuple[dict[str, Any], dict[str, Any]]) -> None:
    for name, plain in results[0].items():
        more = results[1][name]
        for part in ("key", "config", "metrics", "recipe"):
            assert more[part] == plain[part]
        timed = {"seconds", "tokens_per_second", "evaluation_seconds", "environment"}
        assert {k: v for k, v in more["record"].items() if k not in timed | {"last"}} == {
            k: v for k, v in plain["record"].items() if k not in timed
        }
        assert "last" not in plain["record"]


def test_the_own_recipe_gives_the_last_loss_of_the_log(
    results: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    """With the history of FP8's scales, and with the random bits of SR."""
    for result in results[1].values():
        record, last = result["record"], result["record"]["last"]
        step, loss = record["losses"][-1]
        assert last["step"] == step == CONFIG.run.steps
        assert last["losses"]["own"]["validation"] == loss
        # The same 64 tokens: the first ones of the run's validation text.
        assert last["losses"]["own"]["first"] == loss
        assert last["losses"]["own"]["both"] != loss
        assert last["texts"]["both"] == {"tokens": 200, "sha256": CORPUS.val.sha256}
        assert last["recipes"]["own"] == result["recipe"]
        assert last["recipes"]["bf16"] == load_recipe("bf16").digest


def test_other_recipes_evaluate_the_same_weights(results: tuple[dict[str, Any], dict[str, Any]]) -> None:
    for name, result in results[1].items():
        losses = result["record"]["last"]["losses"]
        values = {losses[recipe]["both"] for recipe in ("own", "bf16", "fp8")}
        assert len(values) == 3, name
        assert abs(losses["fp8"]["both"] - losses["bf16"]["both"]) < 0.05
    own, bf16 = (results[1]["sr"]["record"]["last"]["losses"][recipe]["both"] for recipe in ("own", "bf16"))
    assert abs(own - bf16) > 1e-4


def test_a_run_keeps_what_is_asked_on_its_way_to_a_child_process(tmp_path: Path) -> None:
    extra = Extra({"news": on_disk(tmp_path, "news", text(100, 4))}, {"bf16": to_table(load_recipe("bf16"))})
    run = ArmRun(tmp_path, Arm("a", "A"), 0, CONFIG, load_recipe("fp8"), {}, extra=extra)
    assert ArmRun.from_table(json.loads(json.dumps(run.to_table()))).extra == extra


def test_text_is_divided_by_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what cannot be evaluated is refused before anything trains."""
    made: dict[str, Tokens] = {}

    def tokenized(documents: Any, tokenizer: Any) -> Tokens:
        ids = np.array([ord(c) % VOCAB for text in documents for c in text], np.uint16)
        name = documents.name
        saved = on_disk(tmp_path, name, Tokens(ids, hashlib.sha256(ids.tobytes()).hexdigest()))
        made[name] = Tokens(np.memmap(saved["path"], np.uint16, "r"), saved["sha256"])
        return made[name]

    monkeypatch.setattr(last_checkpoint, "tokenize", tokenized)
    file = tmp_path / "more.jsonl"

    def asked(*documents: tuple[str, Any], recipes: tuple[str, ...] = ()) -> Extra:
        lines = [{"text": text} | ({"source": source} if source else {}) for text, source in documents]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return prepare([str(file)], recipes, CONFIG, CORPUS, get_backend("reference"))

    found = asked(("a" * 30, "news"), ("b" * 40, None), ("c" * 10, "news"), ("d" * 50, 7), recipes=("fp8",))
    assert {name: Path(side["path"]).stat().st_size for name, side in found.texts.items()} == {
        "news": 80,
        "other": 180,
    }
    assert bytes(made["news"].ids) == bytes(np.array([33] * 30 + [35] * 10, np.uint16))
    assert list(found.recipes) == ["fp8"]

    with pytest.raises(ConfigError, match="short has 32 tokens, and one sequence needs 33"):
        asked(("a" * 32, "short"))
    with pytest.raises(ConfigError, match="a source 'validation'"):
        asked(("a" * 40, "validation"))
    with pytest.raises(ConfigError, match="another recipe is named 'fp8'"):
        asked(("a" * 40, "news"), recipes=("fp8", "fp8"))
    same = TokenCorpus(made["news"], CORPUS.val, Vocabulary(), "")  # type: ignore[arg-type]
    file.write_text(json.dumps({"text": "a" * 40, "source": "news"}) + "\n")
    with pytest.raises(ConfigError, match="news is the training text"):
        prepare([str(file)], (), CONFIG, same, get_backend("reference"))
