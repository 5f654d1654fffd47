"""How often `mxref identify` is right: synthetic checkpoints, whose rules are known, and their answers.

`python -m calibration.identify --checkpoints 1000 --jobs 2` writes docs/records/identify_DATE.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bench.records import RECORDS, newest, read
from calibration.drawn import NAMELESS, draw
from mxref.identify.answer import identify
from rst_table import csv_table

PART, BY_KIND = "identify_rules.inc", "identify_kinds.inc"
FORMAT = "mxref.identify_calibration.1"
SEED = 20261130
Row = dict[str, Any]


def answer(number: int, seed: int = SEED) -> Row:
    """Return what is known about a checkpoint, and what is said."""
    folder = Path(tempfile.mkdtemp())
    try:
        drawn = draw(folder, seed, number)
        (group,) = identify((drawn.path,)).groups
    finally:
        shutil.rmtree(folder)
    return {
        "number": number, "kind": drawn.kind, "format": drawn.made.name, "rule": drawn.rule, "blocks": drawn.blocks,
        "files": drawn.files,
        "alike": drawn.alike.get(group.verdict.rule or "", 0.0), "said": group.verdict.rule,
        "formats": [made.name for made in group.formats],
        "layout": group.scale_layout, "lead": group.verdict.lead, "details": group.verdict.details,
    }  # fmt: skip


def wrong(row: Row) -> bool:
    """Return whether a rule is said that is not the checkpoint's, and does not give 99.9 % of its scale bytes either.

    The smaller error chooses the scales of EVEN for E3M2 and E5M2. Four over six is a choice by error.
    """
    right = row["rule"]
    if row["format"] == "nvfp4" and right != "nearest":
        right = "by_error"
    return row["said"] not in (None, right) and row["alike"] < 0.999


def has_name(row: Row) -> bool:
    """Return whether the checkpoint has a rule that can be said."""
    return row["format"] == "nvfp4" or row["rule"] not in NAMELESS


def interval(right: int, said: int, z: float = 1.959964) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share."""
    if not said:
        return 0.0, 1.0
    share, zz = right / said, z * z / said
    middle = (share + zz / 2) / (1 + zz)
    half = z / (1 + zz) * (share * (1 - share) / said + zz / said / 4) ** 0.5
    return middle - half, min(1.0, middle + half)


def render(rows: list[Row]) -> str:
    """Return the table of formats, and all of them together."""
    groups = {"MXFP4": ["mxfp4"], "NVFP4": ["nvfp4"]}
    rest = {row["format"] for row in rows} - {"mxfp4", "nvfp4"}
    groups |= {
        "MXFP4 E1M2, MXFP6, MXFP8, MXINT8": sorted(rest),
        "all": sorted({row["format"] for row in rows}),
    }
    return csv_table(
        ["format", "checkpoints", "of a named rule", "said", "right", "95 % interval"],
        (
            [name, *_cells([row for row in rows if row["format"] in formats])]
            for name, formats in groups.items()
        ),
    )


def _cells(rows: list[Row]) -> Iterator[str]:
    said = [row for row in rows if row["said"]]
    right = sum(not wrong(row) for row in said)
    low, high = interval(right, len(said))
    named = list(filter(has_name, rows))
    yield f"{len(rows):,}"
    yield f"{len(named):,}"
    yield f"{len(said):,}"
    yield f"{right:,}"
    yield f"{low:.2%} to {high:.2%}"


def render_kinds(rows: list[Row]) -> str:
    """Return the table of kinds of weights: how many of a named rule are said, and how many answers are wrong."""
    table = []
    for kind in dict.fromkeys(sorted(row["kind"] for row in rows)):
        of_kind = [row for row in rows if row["kind"] == kind]
        named = list(filter(has_name, of_kind))
        said = sum(row["said"] is not None for row in named)
        table.append([kind, f"{len(named)}", f"{said}", f"{sum(map(wrong, of_kind))}"])
    return csv_table(["weights", "of a named rule", "said of these", "wrong, of all"], table)


def parts(records: Path = RECORDS) -> dict[str, str]:
    """Return the tables of the page by their names."""
    rows = read(newest("identify", records))["rows"]
    return {PART: render(rows), BY_KIND: render_kinds(rows)}


def run(numbers: Iterable[int], seed: int = SEED, jobs: int = 1) -> list[Row]:
    """Return the answers of checkpoints by their numbers."""
    if jobs == 1:
        return [answer(number, seed) for number in numbers]
    with ProcessPoolExecutor(jobs) as pool:
        return list(pool.map(partial(answer, seed=seed), numbers, chunksize=4))


def main() -> None:
    """Answer, print the tables and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="The number of the first one.")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, help="Where to write the record; default docs/records.")
    args = parser.parse_args()
    rows = run(range(args.first, args.first + args.checkpoints), args.seed, args.jobs)
    date = datetime.date.today().isoformat()
    path = args.out or RECORDS / f"identify_{date}.json"
    head = {"format": FORMAT, "date": date, "seed": args.seed}
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")
    print(render(rows), render_kinds(rows), *(row for row in rows if wrong(row)), sep="\n")


if __name__ == "__main__":
    main()
