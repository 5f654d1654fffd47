"""Limits of what a configuration may say, and the checks against them."""

from __future__ import annotations

from typing import Any

from mxref.errors import RecipeError
from mxref.tomlio import normalize
from mxref_training.errors import ConfigError

MAX_COUNT = 2**32 - 1
"""Most of what is counted by the run; a step is a 32-bit word of the random streams."""
MAX_STEP_TOKENS = 2**31
MAX_LAYERS = 4096
MAX_WIDTH = 2**24
MAX_RANKS = 2**20
MAX_THREADS = 1024
"""OpenMP ends the process where the system refuses to start a thread."""

# Limits of normal float32, in which a run computes.
SMALLEST, LARGEST = 1.1754943508222875e-38, 3.4028234663852886e38


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with the message unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def check(obj: Any, section: str, **limits: tuple[float, float]) -> None:
    """Raise ConfigError, naming key, value and limit, unless all fields have their types and lie within limits."""
    try:
        normalize(obj, f"{section}.")
    except RecipeError as err:
        raise ConfigError(str(err)) from err
    for name, (low, high) in limits.items():
        value = getattr(obj, name)
        if value is None or low <= value <= high:
            continue
        if value > high:
            limit = f"above {high:,}" if isinstance(high, int) else f"above {high:.6g}"
        elif low == 0:
            limit = "negative"
        else:
            limit = f"below {low}" if low != SMALLEST or value > 0 else "no positive number"
        raise ConfigError(f"{section}.{name} = {value} is {limit}")
