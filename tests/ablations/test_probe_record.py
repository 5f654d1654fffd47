"""The record of a probe keeps the quartiles over the layers, and its figures stand alone; branches at equal seeds."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from ablations import probes

pytestmark = pytest.mark.study

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
