"""Draw the figures of docs/_static again, from the result files: `PYTHONPATH=tests python -m ablations`."""

from __future__ import annotations

from functools import partial

from ablations import formats
from ablations.front import SIZES, figure
from ablations.ladders import results_of
from bench.plot import charts
from bench.records import RECORDS

FOLDER = RECORDS.parent / "_static"


def drawn() -> dict[str, str]:
    """Return the files of the figures by their names."""
    found = {name: results_of(name) for name in SIZES}
    return charts("ablations", partial(figure, found)) | charts(
        "formats", partial(formats.figure, results_of(formats.LADDER))
    )


if __name__ == "__main__":
    for name, text in drawn().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(FOLDER / name)
