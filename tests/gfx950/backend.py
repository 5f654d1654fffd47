"""The Triton backend on the software model, for the conformance suite and by hand:

    PYTHONPATH=tests TRITON_CACHE_DIR=/tmp/triton mxref conform --backend gfx950.backend:backend --quick

With MXREF_TRITON_FOLD=1 products under `ordered` are folded whatever their size.

All kernels are compiled for gfx950, which takes seconds each, and executed here; importing this module makes the
model Triton's device for the rest of the process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gfx950.driver import load_package, on_model

# What FP8 gives for rows that it does not hold is thrown away, and may be anything.
_active = on_model(unknown_sums=np.nan)
_active.__enter__()
_package = load_package(Path(__file__).parents[2] / "backends")
# As many programs as a GPU has room for share the rows that do not fit; most would find none of the suite's.
_package["ordered"]._MISFIT_PROGRAMS = 3  # type: ignore[attr-defined]
backend: Any = _package["backend"].TritonBackend(bounded="bf16", conversions="portable")
