"""Sphinx extension: plots of measurements, written from docs/records when the documentation is built.

A page shows `/_measured/NAME`. The folder is not in git: a number is stored once, as data in docs/records.
Tables stand in the pages themselves: see `committed`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from sphinx.application import Sphinx

FOLDER = "_measured"
TABLE = ".inc"
STUDIES = (
    "bench.render",
    "bench.bench_demo",
    "bench.render_gpu",
    "bench.render_ranks",
    "bench.render_aot",
    "projection.page",
    "peers.render",
    "peers.pages",
    "peers.nvfp4",
    "peers.blocks",
    "peers.matrix_page",
    "calibration.identify",
    "exhaustive.table",
    "prove.certificates",
    "prove.foreign_certificates",
    "ablations.page",
)
"""Modules with a function `parts()` that returns the text of each file by its name."""


def write(app: Sphinx) -> None:
    """Write every plot whose text changed. An equal one keeps its time, so that Sphinx does not read its page again."""
    folder = Path(app.srcdir) / FOLDER
    folder.mkdir(exist_ok=True)
    for study in STUDIES:
        for name, text in import_module(study).parts().items():
            if name.endswith(TABLE):
                continue
            path = folder / name
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Write the parts before the pages are read."""
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
