"""The probe of the FP8 run: a record of it without the single layers, and its figures for the page.

`python -m ablations.probes A/probe.json.xz B/probe.json.xz --out FILE` brings probes of several checkpoints together.
Of each number it keeps the quartiles over the layers, or the median alone, in place of some dozens of layers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mode, quantiles
from typing import Any

from bench.plot import NARROW, WIDE, standalone
from bench.records import RECORDS
from mxref_training.probe.results import TABLES, Results, rows
from mxref_training.report.probe.page import figures as drawn

KIND = "ablation_probe"
QUARTILES = ("lower quartile of the layers", "median of the layers", "upper quartile of the layers")
_WHOLE = ("growth",)
"""Tables that have few rows, and are kept as they are."""
_MEDIANS = ("operands", "unbiased")
"""Tables of which the medians are kept alone."""
_GROUP = ("moment", "recipe", "role", "operand")
_TEXTS = (*_GROUP, "layer", "formats", "format")
_DIGITS = 4


def record_of(files: Sequence[Path]) -> Results:
    """Return the record of probes of several checkpoints of one run, in the form of `probe.json`.

    SystemExit if they are of different recipes, batches or backends.
    """
    texts = [_text(path) for path in files]
    probes: list[Results] = [json.loads(text) for text in texts]
    shared = [
        {key: probe[key] for key in ("recipes", "batch", "data", "draws", "versions")} for probe in probes
    ]
    for path, one in zip(files, shared, strict=True):
        if one != shared[0]:
            raise SystemExit(f"{path} has other recipes, data or versions than {files[0]}")
    found = dict(probes[0])
    found["moments"] = [
        {**moment, "checkpoint": "/".join(Path(moment["checkpoint"]).parts[-4:]), "probe_sha256": sha}
        for probe, sha in zip(probes, (hashlib.sha256(text).hexdigest() for text in texts), strict=True)
        for moment in probe["moments"]
    ]
    found["layers"] = len({row["layer"] for row in rows(probes[0], "products")})
    for name in TABLES:
        kept = [row for probe in probes for row in rows(probe, name)]
        if name not in _WHOLE:
            kept = list(_quartiles(kept, (1,) if name in _MEDIANS else (0, 1, 2)))
        columns = list(dict.fromkeys(key for row in kept for key in row))
        found[name] = {"columns": columns, "rows": [[row.get(key) for key in columns] for row in kept]}
    return found


def _text(path: Path) -> bytes:
    return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()


def _quartiles(found: Sequence[dict[str, Any]], which: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield rows for each recipe and GEMM, or operand: some of each number's quartiles over the layers."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in found:
        groups[tuple(row.get(key) for key in _GROUP)].append(row)
    for of_layers in groups.values():
        # A recipe may leave some layers in another format: that of most of them is named.
        formats = mode(row.get("formats", row.get("format")) for row in of_layers)
        first = next(row for row in of_layers if row.get("formats", row.get("format")) == formats)
        for i in which:
            yield {
                key: QUARTILES[i]
                if key == "layer"
                else value
                if key in _TEXTS
                else _quartile(of_layers, key, i)
                for key, value in first.items()
            }


def _quartile(of_layers: Sequence[dict[str, Any]], key: str, which: int) -> float | None:
    values = [row[key] for row in of_layers if row[key] is not None]
    if not values:
        return None
    found = quantiles(values, n=4, method="inclusive")[which] if len(values) > 1 else values[0]
    return float(f"{found:.{_DIGITS}g}")


def record(records: Path = RECORDS) -> Results | None:
    """Return the newest record; None if there is none."""
    paths = sorted(records.glob(f"{KIND}_*.json"))
    return json.loads(paths[-1].read_text(encoding="utf-8")) if paths else None


def figures(results: Results) -> dict[str, str]:
    """Return the figures of the last checkpoint by the names of their files, for wide screens and for narrow ones."""
    results = {**results, "moments": results["moments"][-1:]}
    wide = {f"{name}.svg": svg for name, svg in drawn(results, WIDE, 3).items()}
    narrow = {f"{name}.narrow.svg": svg for name, svg in drawn(results, NARROW, 1, "-narrow").items()}
    return {name: standalone(svg) for name, svg in (wide | narrow).items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a record."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m ablations.probes")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    given = parser.parse_args(arguments)
    text = json.dumps(record_of(given.files), separators=(",", ":"), allow_nan=False)
    given.out.write_text(text.replace("],[", "],\n[") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
