"""Results of several folders brought together: which are taken, which are refused, and what goes on from them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import mxref
from ablation_fakes import FakeCorpus, FakeTrainer, ladder, run_branches, run_ladder, table, tiny
from ablations.archive import archive
from mxref.cli import main
from mxref.errors import FileFormatError
from mxref_training.errors import ConfigError
from mxref_training.lab import result_file
from mxref_training.lab.collect import Found, _once, collect
from mxref_training.lab.ladder import Ladder
from mxref_training.lab.study import load_results


def run(out: Path, lad: Ladder | None = None, **options: Any) -> tuple[dict[str, Any], FakeTrainer]:
    trainer = options.pop("trainer", FakeTrainer({"H16": 0.1}))
    given = {"config": tiny(), "corpus": FakeCorpus, "backend": mxref.get_backend("reference"), **options}
    return run_ladder(lad or ladder(), out=out, trainer=trainer, say=lambda line: None, **given), trainer


def bring(out: Path, *folders: Path, lad: Ladder | None = None) -> tuple[dict[str, Any] | None, list[str]]:
    said: list[str] = []
    return collect(lad or ladder(), folders, out, said.append).ladder, said


def reseal(path: Path, change: Any) -> None:
    """Change a result file as another machine might have written it."""
    content = json.loads(path.read_text())
    content.pop("sha256")
    change(content)
    path.write_text(json.dumps(content | {"sha256": result_file.digest(content)}))


@pytest.fixture
def halves(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders that share the reference, and have one arm each."""
    run(tmp_path / "a", arms=["h16"], seeds=2)
    run(tmp_path / "b", arms=["bad", "fp8-seed2"], seeds=2)
    return tmp_path / "a", tmp_path / "b"


def only_results(folder: Path, target: Path) -> Path:
    """What comes back from a machine: the small files alone."""
    for path in folder.rglob("result.json"):
        place = target / path.relative_to(folder)
        place.parent.mkdir(parents=True)
        shutil.copy(path, place)
    return target


def test_collected_results_are_those_of_one_ladder(tmp_path: Path, halves: tuple[Path, Path]) -> None:
    whole, _ = run(tmp_path / "whole", seeds=2)
    small = [only_results(half, tmp_path / "back" / half.name) for half in halves]
    results, said = bring(tmp_path / "all", *small)
    assert results == whole
    assert load_results(tmp_path / "all") == whole
    assert said == [
        "2 results are there more than once, with equal bits",
        f"7 runs in {tmp_path / 'all'}, trained on unknown",
    ]


def test_repetitions_keep_their_numbers_where_one_is_missing(tmp_path: Path) -> None:
    """The second of three did not come back: each run is still compared with the reference of its own seed."""
    contrast = {"name": "c", "arm": "h16", "against": "fp8", "question": "?"}
    whole, _ = run(tmp_path / "a", ladder(contrast=[contrast]), seeds=3)
    for folder in (tmp_path / "a" / "arms").glob("*.seed1"):
        shutil.rmtree(folder)
    results, _ = bring(tmp_path / "all", tmp_path / "a", lad=ladder(contrast=[contrast]))
    assert results is not None
    assert results["seeds"] == 3
    arms, ends = ({arm["name"]: arm["runs"] for arm in one["arms"]} for one in (results, whole))
    assert [run["pair"] for run in arms["h16"]] == [0, 2]
    apart = [ends["h16"][pair]["curve"][-1][1] - ends["fp8"][pair]["curve"][-1][1] for pair in (0, 2)]
    assert apart[0] != apart[1]
    (gap,) = (arm["gap_reference"] for arm in results["arms"] if arm["name"] == "h16")
    assert gap == results["contrasts"][0]["loss"]["nats"] == pytest.approx(sum(apart) / 2, rel=1e-12)


def test_the_queue_goes_on_from_collected_results(tmp_path: Path, halves: tuple[Path, Path]) -> None:
    some, _ = bring(tmp_path / "all", halves[0])
    assert some is not None
    assert some["runs"] == {"planned": 6, "finished": 4}  # the ladder itself asks for one run of each arm
    results, trainer = run(tmp_path / "all", seeds=2)
    assert trainer.calls == [("FP8 again", 7), ("bad", 0), ("bad", 1)]
    assert results["unfinished"] == []
    bring(tmp_path / "all", halves[1])
    _, trainer = run(tmp_path / "all", seeds=2)
    assert trainer.calls == []


def test_a_collected_result_of_fewer_steps_starts_anew(tmp_path: Path) -> None:
    run(tmp_path / "a")
    bring(tmp_path / "all", tmp_path / "a")
    said: list[str] = []
    run_ladder(
        ladder(), tiny("run.steps=200"), tmp_path / "all", backend=mxref.get_backend("reference"),
        trainer=FakeTrainer(), corpus=FakeCorpus, say=said.append,
    )  # fmt: skip
    assert said[0] == "[1/4] fp8: starts anew, for 200 steps: the run of 100 steps has no checkpoint here"


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"config": tiny("optim.lr=1e-4")}, "optim.lr"),
        ({"config": tiny("run.steps=90")}, "run.steps"),
        ({"corpus": lambda: FakeCorpus({"train": "zz", "val": "bb", "tokenizer": "cc"})}, "data.train"),
        ({"backend": mxref.get_backend("numba")}, "backend.code, backend.name"),
    ],
)
def test_results_of_other_conditions_are_refused(
    tmp_path: Path, options: dict[str, Any], difference: str
) -> None:
    run(tmp_path / "a")
    run(tmp_path / "b", **options)
    with pytest.raises(
        ConfigError, match=rf"4 of 8 results are not of the ladder of .*/a/.*/b/.* by {difference}"
    ):
        bring(tmp_path / "all", tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "all").exists()


def test_results_of_other_code_are_refused_and_those_of_old_code_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "a")
    monkeypatch.setattr("mxref_training.lab.study.code_digest", lambda: "0" * 12)
    run(tmp_path / "b")
    with pytest.raises(ConfigError, match="by code"):
        bring(tmp_path / "all", tmp_path / "a", tmp_path / "b")
    _, said = bring(tmp_path / "old", tmp_path / "b")
    assert "they were trained by other code than this: 'mxref ablate' would train them again" in said


def test_arms_of_another_recipe_or_name_and_other_seeds_are_refused(tmp_path: Path) -> None:
    run(tmp_path / "a")
    arms = table()["arm"]
    arms[2]["recipe"]["all"]["hadamard"] = 32
    with pytest.raises(
        ConfigError, match=r"h16/result.json: arm h16 has another recipe .*dgrad.dy.hadamard.*more"
    ):
        bring(tmp_path / "all", tmp_path / "a", lad=ladder(arm=arms))
    with pytest.raises(ConfigError, match=r"bad/result.json: no arm is named 'bad'"):
        bring(tmp_path / "all", tmp_path / "a", lad=ladder(arm=arms[:2]))
    run(tmp_path / "b", config=tiny("run.seed=5"))
    with pytest.raises(ConfigError, match=r"first seeds .* are \(0, None\), and .* with \(5, None\)"):
        bring(tmp_path / "all", tmp_path / "a", tmp_path / "b")


def test_other_bits_of_one_run_are_an_error_that_shows_where_the_curves_part(tmp_path: Path) -> None:
    run(tmp_path / "a")
    run(tmp_path / "b")

    def flip(content: dict[str, Any]) -> None:
        content["record"]["losses"][3][1] += 2**-40

    reseal(tmp_path / "b" / "arms" / "h16" / "result.json", flip)
    said = r"h16 has other bits in .*/b/.* than in .*/a/.*: the validation losses part at step 40: 4\.\d+ and"
    with pytest.raises(ConfigError, match=said):
        bring(tmp_path / "all", tmp_path / "a", tmp_path / "b")


def test_other_bits_where_a_compiler_measured_are_announced(tmp_path: Path) -> None:
    def found(folder: str, last: float) -> Found:
        record = {
            "arm": "h16",
            "pair": 0,
            "losses": [[1, 5.0], [2, last]],
            "train_curve": [],
            "environment": {},
        }
        config = {"run": {"deterministic": False, "compile": "block"}}
        table = {"key": {}, "metrics": folder, "config": config, "record": record}
        return Found(folder, table)

    said: list[str] = []
    kept = _once([found("a", 4.0), found("b", 4.5)], said.append)
    assert [result.path for result in kept] == ["a"]
    assert said == [
        "h16: b has other bits than a, which is kept: the validation losses part at step 2: 4.0 and 4.5"
    ]


def test_an_archive_of_a_result_a_line_is_read_like_the_folder(
    tmp_path: Path, halves: tuple[Path, Path]
) -> None:
    paths = [archive(half) for half in halves]
    assert bring(tmp_path / "lines", *paths)[0] == bring(tmp_path / "files", *halves)[0]
    paths[1].write_text(paths[1].read_text().replace("3.9", "3.8", 1))
    with pytest.raises(FileFormatError, match=r"b\.jsonl, line 1 is damaged, was edited"):
        bring(tmp_path / "all", paths[1])


def test_damaged_results_and_empty_folders_are_refused(tmp_path: Path) -> None:
    run(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty holds no result\.json: name the --out"):
        bring(tmp_path / "all", tmp_path / "a", tmp_path / "empty")
    path = tmp_path / "a" / "arms" / "bad" / "result.json"
    path.write_text(path.read_text().replace("3.9", "3.8", 1))
    with pytest.raises(FileFormatError, match=r"bad/result\.json is damaged, was edited"):
        bring(tmp_path / "all", tmp_path / "a")


def test_a_result_is_kept_under_its_arm_whatever_name_it_gives(tmp_path: Path) -> None:
    run(tmp_path / "a", arms=["h16", "bad"])
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "run.json").write_text("{}")
    for arm, name in (("h16", "../../precious"), ("bad", str(precious))):
        reseal(
            tmp_path / "a" / "arms" / arm / "result.json",
            lambda content, name=name: content.update(name=name),
        )
    bring(tmp_path / "all", tmp_path / "a")
    assert [path.name for path in precious.iterdir()] == ["run.json"]
    assert {path.parent.name for path in (tmp_path / "all").rglob("result.json")} == {"fp8", "h16", "bad"}


@pytest.mark.parametrize("pair", ["1/../../precious", -1, True, None])
def test_a_result_without_a_number_is_refused(tmp_path: Path, pair: Any) -> None:
    run(tmp_path / "a", arms=["h16"])
    path = tmp_path / "a" / "arms" / "h16" / "result.json"
    reseal(path, lambda content: content["record"].update(pair=pair))
    with pytest.raises(FileFormatError, match=r"h16/result\.json is damaged, was edited"):
        bring(tmp_path / "all", tmp_path / "a")


def test_an_unfinished_run_makes_room_and_finished_ones_stay(tmp_path: Path) -> None:
    run(tmp_path / "a")
    run(tmp_path / "all", arms=["bad"])
    for name in ("h16", "bad"):
        folder = tmp_path / "all" / "arms" / name
        folder.mkdir(exist_ok=True)
        (folder / "run.json").write_text("{}")
    _, said = bring(tmp_path / "all", tmp_path / "a")
    assert f"h16: the unfinished run moves to {tmp_path / 'all' / 'superseded' / 'h16-1'}" in said
    assert (tmp_path / "all" / "arms" / "bad" / "run.json").exists()


def test_without_the_reference_results_are_kept_and_not_compared(tmp_path: Path) -> None:
    run(tmp_path / "a")
    shutil.rmtree(tmp_path / "a" / "arms" / "fp8")
    results, said = bring(tmp_path / "all", tmp_path / "a")
    assert results is None
    assert said[-1] == "no run of fp8, the reference, so there is nothing to compare with"
    assert (tmp_path / "all" / "arms" / "h16" / "result.json").exists()


def test_branches_of_several_machines_are_compared_and_go_on(tmp_path: Path) -> None:
    arms = [arm for arm in table()["arm"] if "seed_offset" not in arm]
    lad = ladder(arm=arms, branch={"moments": ["40", "60"], "updates": 20, "eval_every": 20, "seeds": 2})
    options: dict[str, Any] = {"backend": mxref.get_backend("reference"), "corpus": FakeCorpus}

    def branches(out: Path, trainer: FakeTrainer, lad: Ladder = lad, **more: Any) -> dict[str, Any]:
        return run_branches(lad, tiny(), out, trainer=trainer, say=lambda line: None, **options, **more)

    def begin(*_: Any, **__: Any) -> None:
        """The fake trainer makes no checkpoint from which to branch off."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mxref_training.lab.arm.begin_branch", begin)
        whole = branches(tmp_path / "whole", FakeTrainer({"H16": 0.1}))
        run(tmp_path / "a", lad=lad, arms=["h16"])
        branches(tmp_path / "a", FakeTrainer({"H16": 0.1}), arms=["h16"])
        branches(tmp_path / "b", FakeTrainer(), arms=["bad"])
        back = [only_results(tmp_path / name, tmp_path / "back" / name) for name in "ab"]
        said: list[str] = []
        found = collect(lad, back, tmp_path / "all", said.append)
        assert found.branches == whole == json.loads((tmp_path / "all" / "branch.json").read_text())
        assert found.ladder is not None
        assert [arm["name"] for arm in found.ladder["arms"]] == ["fp8", "h16"]
        assert said[:2] == [
            "4 results are there more than once, with equal bits",
            f"14 runs in {tmp_path / 'all'}, trained on unknown",
        ]
        trainer = FakeTrainer()
        assert branches(tmp_path / "all", trainer) == whole
        assert trainer.calls == []
        branches(tmp_path / "c", FakeTrainer(), replace(lad, branch=replace(lad.branch, updates=40)))
    with pytest.raises(ConfigError, match=r"by design\.updates"):
        collect(lad, [tmp_path / "a", tmp_path / "c"], tmp_path / "new")


def test_a_result_stands_alone(tmp_path: Path) -> None:
    run(tmp_path)
    content = result_file.read(tmp_path / "arms" / "h16" / "result.json")
    assert content is not None
    assert content["recipe"] == ladder().resolve(ladder().arm[2]).digest
    assert content["key"]["recipe"]["dgrad"]["dy"]["hadamard"] == 16
    assert content["key"]["data"] == FakeCorpus().hashes
    assert content["config"]["run"]["steps"] == 100
    assert len(content["record"]["losses"]) == 10
    assert content["corpus"] == "synthetic curves"


def test_a_training_curve_is_thinned_to_means(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": float(step), "lr": 1e-3} for step in range(1, 401)]
    lines[1]["loss"] = None  # skipped
    lines.insert(3, {"step": 3, "val_loss": 9.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curve = result_file.train_curve(tmp_path)
    assert len(curve) == 200
    assert curve[:3] == [[3, 2.0], [5, 4.5], [7, 6.5]]
    assert curve[-1] == [400, 400.0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["paper", "runs/a"], "runs/a: folders of results need --collect"),
        (["paper", "--collect", "--out", "x"], "--collect needs folders, and --out"),
        (["paper", "--collect", "runs/a"], "--collect needs folders, and --out"),
    ],
)
def test_collecting_needs_folders_and_out(arguments: list[str], said: str) -> None:
    found = CliRunner().invoke(main, ["ablate", *arguments])
    assert found.exit_code == 2
    assert said in " ".join(found.stderr.split())


@pytest.mark.parametrize("more", [(), ("--collect", "runs/a")])
def test_the_folder_of_a_training_run_takes_no_ladder(tmp_path: Path, more: tuple[str, ...]) -> None:
    (tmp_path / "run.json").write_text("{}")
    found = CliRunner().invoke(main, ["ablate", "paper", *more, "--out", str(tmp_path)])
    assert found.exit_code == 2
    assert all(part in " ".join(found.stderr.split()) for part in ("mxref train", "another --out"))
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_an_arm_trains_with_keys_of_its_own_and_its_results_are_collected(tmp_path: Path) -> None:
    own = {"name": "slow", "label": "slow", "train": {"optim": {"lr": 1e-5}, "run": {"log_every": 5}}}
    lad = ladder(arm=[own, *table()["arm"]])  # the arm with own keys comes first
    whole, trainer = run(tmp_path / "a", lad)
    trained, shared = trainer.configs, tiny()
    assert (trained["slow"].optim.lr, trained["slow"].run.log_every) == (1e-5, 5)
    assert (trained["H16"].optim.lr, trained["H16"].run.log_every) == (shared.optim.lr, shared.run.log_every)
    results, _ = bring(tmp_path / "all", only_results(tmp_path / "a", tmp_path / "back"), lad=lad)
    assert results == whole
    assert results["config"]["optim"]["lr"] == shared.optim.lr
    changed = ladder(arm=[own | {"train": {"optim": {"lr": 2e-5}}}, *table()["arm"]])
    with pytest.raises(ConfigError, match=r"arm slow was trained with another optim\.lr than in the ladder"):
        bring(tmp_path / "other", tmp_path / "back", lad=changed)


@pytest.mark.parametrize(
    "keys", [{"run": {"steps": 5}}, {"data": {"max_documents": 2}}, {"model": {"vocab": 99}}]
)
def test_what_makes_arms_comparable_is_no_arms_own(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"arm 'a': train\.(run|data|model)\.\w+ is shared by all arms"):
        ladder(arm=[*table()["arm"], {"name": "a", "label": "a", "train": keys}])


def test_a_repetition_of_the_reference_has_no_keys_of_its_own() -> None:
    again = {"name": "again", "label": "a", "seed_offset": 3, "train": {"optim": {"lr": 1e-5}}}
    with pytest.raises(ConfigError, match="other keys of train"):
        ladder(arm=[*table()["arm"], again])
