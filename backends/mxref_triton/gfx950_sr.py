"""Stochastic rounding by gfx950's own conversions: a separate backend, compared with the reference by statistics only.

Two descriptions of how the hardware uses its random bits disagree, so its codes are not promised; only their
distribution is. It is chosen by name: MXREF_BACKEND=mxref_triton.gfx950_sr:backend.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from mxref.errors import BackendError
from mxref_triton.backend import TritonBackend
from mxref_triton.lane.gfx950 import STOCHASTIC, is_gfx950
from mxref_triton.launch import INTERPRETED
from mxref_triton.products.bounded import BOUNDED
from mxref_triton.quantizer.native import first_difference, on_device

_SR_BITS = 16
"""Most random bits per element: each pair of the eight elements of a Philox call then has one word as its seed."""


class NativeStochasticBackend(TritonBackend):
    """The Triton backend with SR in hardware; everything else has the bits of TritonBackend."""

    name = "triton-native-sr"

    def __init__(self, bounded: str = "auto", conversions: str = "auto") -> None:
        super().__init__(bounded, conversions)
        self.native |= {STOCHASTIC}
        # The conversions multiply by powers of two only.
        self.capabilities = replace(self.capabilities, native_sr=True, max_sr_bits=_SR_BITS, prescale=False)

    def details(self) -> str:
        """Return what runs here, and that SR's bits are the hardware's."""
        return f"{super().details()}; SR by gfx950's own conversions, which only statistics hold to the reference"


def backend() -> NativeStochasticBackend:
    """Return the backend.

    Raises:
        BackendError: there is no gfx950, or it rounds values to codes other than their two neighbours.
    """
    gpu = torch.device("cuda")
    if INTERPRETED or not torch.cuda.is_available() or not is_gfx950(gpu):
        raise BackendError("backend 'triton-native-sr' needs a gfx950 GPU, and there is none; take 'triton'")
    if (wrong := first_difference(on_device(gpu, STOCHASTIC, seed=1), STOCHASTIC)) is not None:
        raise BackendError(
            f"the stochastic conversions of this gfx950 give codes that are not neighbours of the value: {wrong}"
        )
    return NativeStochasticBackend(BOUNDED)
