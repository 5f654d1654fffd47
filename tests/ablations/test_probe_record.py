"""The record of a probe keeps the quartiles over the layers, and its figures stand alone; branches at equal seeds."""

from __future__ import annotations

import json
import lzma
import re
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ablations import branches, probes
from bench.plot import NARROW, WIDE, chart
from mxref_training.probe.results import rows
from mxref_training.report.probe import plots

TREATMENT = {"name": "h16", "label": "H16", "digest": "d1", "gemm": "exact", "treatment": [], "table": {}}


def probe(step: int, **changes: Any) -> dict[str, Any]:
    """A probe of five layers, whose SNRs are 10 to 14 dB."""
    moment = f"step {step}"
    product = {"moment": moment, "recipe": "h16", "formats": "mxfp4", "cosine": 0.5, "bias": 0.25}
    causes = {"noise_scale": 0.25, "noise_dead": 0.0, "noise_clip": 0.0, "noise_grid": 0.25}
    dc = {"group": 16, "dc_source": 0.25, "dc_first": 0.25, "dc_noise": 0.5, "dc_bias": 0.0, "rest_bias": 0.0}
    layers = [f"model.layers.{i}.q" for i in range(5)]
    tables = {
        "products": [
            product | {"layer": name, "role": role, "snr": 10.0 + i + step / 1000}
            for i, name in enumerate(layers)
            for role in ("fprop", "dgrad", "wgrad")
        ],
        "operands": [
            {"moment": moment, "recipe": "h16", "layer": name, "role": role, "operand": tensor, "format": "mxfp4",
             "noise": 0.5} | causes | dc
            for name in layers
            for role, tensors in (("fprop", "xw"), ("wgrad", "x"))
            for tensor in tensors
        ],
        "variances": [
            {"moment": moment, "recipe": "h16", "layer": name, "role": "wgrad", "draws": 64, "variance": 0.5}
            for name in layers
        ],
        "unbiased": [],
        "growth": [
            {"moment": moment, "layer": layers[2], "role": role, "length": length, "plain": 1.0 * length,
             "rotated": 1.0, "plain_bound": 2.0 * length, "rotated_bound": 2.0}
            for role in ("fprop", "dgrad", "wgrad")
            for length in (64, 128)
        ],
    }  # fmt: skip
    columns = {name: list(dict.fromkeys(key for row in rows for key in row)) for name, rows in tables.items()}
    facts = {
        "name": moment, "checkpoint": f"/tmp/run/arms/fp8/checkpoints/step-{step}", "step": step, "loss": 4.5,
    }  # fmt: skip
    return {
        "format": "mxref-probe/1", "recipes": [TREATMENT], "batch": {"name": "val"}, "data": {}, "draws": 64,
        "versions": {}, "moments": [facts],
        **{
            name: {"columns": columns[name], "rows": [[row[key] for key in columns[name]] for row in rows]}
            for name, rows in tables.items()
        },
        **changes,
    }  # fmt: skip


def made(tmp_path: Path, *found: dict[str, Any]) -> dict[str, Any]:
    files = [tmp_path / f"{i}.json.xz" for i in range(len(found))]
    for path, one in zip(files, found, strict=True):
        path.write_bytes(lzma.compress(json.dumps(one).encode()))
    probes.main([*map(str, files), "--out", str(tmp_path / "ablation_probe_test.json")])
    kept = probes.record(tmp_path)
    assert kept is not None
    return kept


def test_a_record_has_the_quartiles_over_the_layers_of_each_checkpoint(tmp_path: Path) -> None:
    kept = made(tmp_path, probe(100), probe(200))
    found = {(row["moment"], row["role"], row["layer"]): row["snr"] for row in probes.rows(kept, "products")}
    assert len(found) == 2 * 3 * 3
    for step in (100, 200):
        quartiles = [found[f"step {step}", "wgrad", name] for name in probes.QUARTILES]
        assert quartiles == pytest.approx([11 + step / 1000, 12 + step / 1000, 13 + step / 1000])
    assert kept["layers"] == 5
    assert [moment["checkpoint"] for moment in kept["moments"]] == [
        "arms/fp8/checkpoints/step-100", "arms/fp8/checkpoints/step-200",
    ]  # fmt: skip
    assert len({moment["probe_sha256"] for moment in kept["moments"]}) == 2
    assert len(probes.rows(kept, "growth")) == 2 * 6
    head, row = probes.table(kept)
    assert row[0] == "H16"
    assert row[head.index("SNR, dB Wgrad")] == "12.2"  # of the last checkpoint
    assert row[-1] == "``d1``"


def test_layers_in_another_format_count_with_the_others(tmp_path: Path) -> None:
    mixed = probe(100)
    columns, table = mixed["products"]["columns"], mixed["products"]["rows"]
    for row in table[-3:]:  # the last layer
        row[columns.index("formats")], row[columns.index("snr")] = "bf16", 54.0
    found = [row for row in probes.rows(made(tmp_path, mixed), "products") if row["role"] == "wgrad"]
    assert [row["snr"] for row in found] == pytest.approx([11.1, 12.1, 13.1])
    assert {row["formats"] for row in found} == {"mxfp4"}


def test_probes_of_different_recipes_make_no_record(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has other recipes"):
        made(tmp_path, probe(100), probe(200, recipes=[TREATMENT | {"digest": "d2"}]))


def test_figures_are_files_of_their_own(tmp_path: Path) -> None:
    drawn = probes.figures(made(tmp_path, probe(100), probe(200)))
    names = {"snr", "bias", "split", "mean", "variance", "growth"}
    assert set(drawn) == {f"{name}{form}.svg" for name in names for form in ("", ".narrow")}
    for name, svg in drawn.items():
        column = NARROW if name.endswith(".narrow.svg") else WIDE
        assert float(re.findall(r'viewBox="0 0 ([\d.]+)', svg)[0]) <= 72 * column
        assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
        assert "--ink: " in svg
        assert not re.search(r"(?<!xlink:)href=", svg)
    assert "var(--ink)" in drawn["snr.svg"]


def test_branches_are_compared_with_the_trunks_own_at_equal_seeds() -> None:
    def arm(name: str, losses: list[float]) -> dict[str, Any]:
        runs = [
            {"pair": pair, "losses": [[1000 + updates, loss + updates / 1000] for updates in (50, 100, 200)]}
            for pair, loss in enumerate(losses)
        ]
        end = {"mean": 0.25, "half_width": 0.125}
        return {
            "name": name,
            "label": name,
            "stage": "s",
            "recipe": "d",
            "runs": runs,
            "validation_last": end,
        }

    moment = {"step": 1000, "arms": [arm("fp8", [4.0, 5.0, 6.0]), arm("all", [4.5, 5.25, 6.0])]}
    assert branches.after(moment, "all", 100) == pytest.approx([0.5, 0.25, 0.0])
    results = {"moments": [moment], "design": {"updates": 200}}
    _, row = branches.table(results)
    assert row == (
        "s", "all", "+0.2500", "+0.2500", "+0.2500", "+0.1250 to +0.3750", "3", "``d``",
    )  # fmt: skip
    assert "after 200 updates" in chart("branches", partial(branches.figure, results))


def test_the_axis_of_the_snr_shows_the_decibels_between_the_recipes_in_mxfp4() -> None:
    record = probes.record()
    assert record is not None
    last = {**record, "moments": record["moments"][-1:]}
    limits = plots._limits(plots._by_role(last, "products"))
    assert limits is not None
    medians = [
        row["snr"]
        for row in rows(last, "products")
        if row["layer"] == "median of the layers" and row["moment"] == last["moments"][0]["name"]
    ]
    inside = [value for value in medians if limits[0] <= value <= limits[1]]
    beyond = [value for value in medians if value > limits[1]]
    assert sorted([*inside, *beyond]) == sorted(medians)
    assert max(inside) < 21
    assert min(beyond) > 27
    assert limits[1] - limits[0] < 13
    svg = plots.snr_svg(last)
    assert "an arrow: beyond the axis" in svg
    # A probe whose recipes are alike has an axis for all of them.
    assert (
        plots._limits([plots.Panel("Fprop", [{"recipe": "a", "role": "fprop", "moment": "m", "snr": 19.0}])])
        is None
    )
