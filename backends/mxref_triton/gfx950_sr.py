"""Stochastic rounding by gfx950's own conversions: a backend of its own, that only statistics hold to the reference.

How the hardware uses its random bits is described in two ways that disagree, so no code of it is promised; the
distribution is. It is chosen by name: MXREF_BACKEND=mxref_triton.gfx950_sr:backend.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from mxref.errors import BackendError
from mxref.steps.rounding import Rounding
from mxref_triton.backend import TritonBackend
from mxref_triton.lane.gfx950 import is_gfx950
from mxref_triton.launch import INTERPRETED
from mxref_triton.products.bounded import BOUNDED
from mxref_triton.quantizer.native import first_difference, on_device

_SR_BITS = 16
"""At most so many are asked for: the eight elements of a Philox call then get a word per pair, which is its seed."""


class NativeStochasticBackend(TritonBackend):
    """The Triton backend, with SR by hardware; everything else is what TritonBackend does, bit for bit."""

    name = "triton-native-sr"

    def __init__(self, bounded: str = "auto", conversions: str = "auto") -> None:
        super().__init__(bounded, conversions)
        self.native |= {Rounding.SR}
        # The conversions multiply by nothing but powers of two.
        self.capabilities = replace(self.capabilities, native_sr=True, max_sr_bits=_SR_BITS, prescale=False)

    def details(self) -> str:
        """Return what runs here, and that SR's bits are the hardware's."""
        return f"{super().details()}; SR by gfx950's own conversions, which only statistics hold to the reference"


def backend() -> NativeStochasticBackend:
    """Return the backend.

    Raises:
        BackendError: no gfx950, or one that rounds to something else than the two neighbours of a value.
    """
    gpu = torch.device("cuda")
    if INTERPRETED or not torch.cuda.is_available() or not is_gfx950(gpu):
        raise BackendError("backend 'triton-native-sr' needs a gfx950 GPU, and there is none; take 'triton'")
    if (wrong := first_difference(on_device(gpu, seed=1), stochastic=True)) is not None:
        raise BackendError(f"the stochastic conversions of this gfx950 leave a value's neighbours: {wrong}")
    return NativeStochasticBackend(BOUNDED)
