"""The backend whose SR is the hardware's: which gfx950 it takes, and which it refuses."""

import numpy as np
import pytest

from mxref import Rounding
from mxref.errors import BackendError
from mxref.formats import E2M1
from mxref.steps.rounding import round_magnitude
from mxref_triton import gfx950_sr

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def coin_flips(spoiled_at=None):
    """Return conversions that give either neighbour of a value by chance, and one of them a code too far."""
    rng = np.random.default_rng(0)

    def convert(values, factors):
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            magnitude = np.minimum(np.nan_to_num(np.abs(values * factors[:, None]), nan=0.0), 8)
        below = round_magnitude(magnitude.astype(np.float32), Rounding.RTZ, E2M1)
        above = np.minimum(below + (magnitude > GRID[below]), 7)
        codes = np.where(rng.random(values.shape) < 0.5, below, above).astype(np.uint32)
        if spoiled_at is not None and len(codes) > spoiled_at:
            codes[spoiled_at] = codes[spoiled_at] ^ 4  # two or more steps away on the grid
        codes |= np.signbit(values).astype(np.uint32) << 3
        return (codes << (4 * np.arange(8, dtype=np.uint32))).sum(axis=1, dtype=np.uint32)

    return convert


@pytest.fixture
def gfx950(monkeypatch):
    """A machine that says it has a gfx950, whose conversions a test gives."""
    monkeypatch.setattr(gfx950_sr, "INTERPRETED", False)
    monkeypatch.setattr(gfx950_sr, "is_gfx950", lambda device: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)

    def give(convert):
        asked = []
        monkeypatch.setattr(
            gfx950_sr, "on_device", lambda device, made, seed: asked.append((made, seed)) or convert
        )
        return asked

    return give


@pytest.mark.clause("rounding.native_sr")
def test_a_card_that_gives_neighbours_is_taken(gfx950):
    seeds = gfx950(coin_flips())
    backend = gfx950_sr.backend()
    assert seeds == [((E2M1, Rounding.SR), 1)]
    assert (backend.name, backend.capabilities.native_sr) == ("triton-native-sr", True)
    assert (E2M1, Rounding.SR) in backend.native
    assert "SR by gfx950's own conversions, which only statistics hold" in backend.details()


@pytest.mark.clause("rounding.native_sr")
def test_a_card_that_leaves_the_neighbours_is_refused(gfx950):
    gfx950(coin_flips(spoiled_at=2100))
    with pytest.raises(
        BackendError,
        match=r"give codes that are not neighbours of the value: 0x[0-9a-f]{8} / 2\^-?\d+ became code",
    ):
        gfx950_sr.backend()


@pytest.mark.clause("rounding.native_sr")
def test_a_card_that_is_no_gfx950_is_refused(gfx950, monkeypatch):
    gfx950(coin_flips())
    monkeypatch.setattr(gfx950_sr, "is_gfx950", lambda device: False)
    with pytest.raises(BackendError, match="needs a gfx950 GPU, and there is none"):
        gfx950_sr.backend()
