"""Draw the figure on the README's front again, from the result files: `PYTHONPATH=tests python -m ablations`."""

from __future__ import annotations

from ablations.front import SIZES, figure
from ablations.ladders import ladders, results_of
from bench.records import RECORDS

FILE = RECORDS.parent / "_static" / "ablations.svg"

if __name__ == "__main__":
    FILE.write_text(figure({name: results_of(name) for name in SIZES if name in ladders()}), encoding="utf-8")
    print(FILE)
