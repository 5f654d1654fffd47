"""The machine on which numbers were measured, and whether it was otherwise idle."""

from __future__ import annotations

import datetime
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mxref

THREAD_VARIABLES = ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
ABSENT_PEERS = {"microxcaling": "not measured: it is not on PyPI"}
"""Known packages that are not among the peers, and why."""
BUSY = 0.05
"""Share of the machine's time that others may take before its numbers carry a warning."""


def describe() -> dict[str, Any]:
    """Return date, processor, versions, and how busy the machine was with other things."""
    load, busy = os.getloadavg(), busy_share()
    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "mxref": mxref.__version__,
        "versions": {name: version(name) for name in ("numpy", "ml_dtypes", "numba", "llvmlite")},
        "load_average": [round(x, 2) for x in load],
        "busy_share": round(busy, 3),
        "quiet": busy <= BUSY,
    }


def processor() -> str:
    """Return the processor's name, and the vector extensions that decide which kernels run."""
    lines = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in lines.items()}
    flags = fields.get("flags", "").split()
    known = [name for name in ("avx2", "avx512f", "avx512_vnni") if name in flags]
    family = f"family {fields.get('cpu family', '?')} model {fields.get('model', '?')}"
    return f"{fields.get('model name', platform.machine())} ({family}; {', '.join(known)})"


def busy_share(seconds: float = 1.0) -> float:
    """Return the share of all cores' time that was in use while this process slept."""
    before = _ticks()
    time.sleep(seconds)
    busy, total = (late - early for late, early in zip(_ticks(), before, strict=True))
    return busy / total if total else 0.0


def _ticks() -> tuple[int, int]:
    ticks = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)
