"""What a backend declares that it does: formats, scale rules, roundings, GEMMs, types and devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mxref.errors import UnsupportedError
from mxref.formats import E8M0, INPUT_DTYPES, MXFP4, BlockFormat, BlockShape, Negatives
from mxref.gemm import OUT_DTYPES
from mxref.recipe import GemmProfile
from mxref.steps.four_over_six import FourOverSix
from mxref.steps.hadamard import SIZES
from mxref.steps.quotient import Arithmetic
from mxref.steps.rounding import MAX_SR_BITS, Rounding
from mxref.steps.scale import EXPONENT_RULES, ScaleRule

Gemm = tuple[GemmProfile, BlockFormat, BlockFormat]
"""What a scaled GEMM is asked for: its profile, the format of A and that of B."""


def every_gemm(profiles: Iterable[GemmProfile], formats: Iterable[BlockFormat]) -> frozenset[Gemm]:
    """Return each profile with each pair of formats that have the same block length."""
    formats = tuple(formats)
    return frozenset((p, a, b) for p in profiles for a in formats for b in formats if a.k == b.k)


def scaled_by_powers(formats: Iterable[BlockFormat], k: int = 32) -> frozenset[BlockFormat]:
    """Return the formats of sign and magnitude in blocks of k under E8M0 scales, which kernels of MXFP4 can share."""
    return frozenset(
        made for made in formats
        if made.k == k and made.scale == E8M0 and made.element.negatives is Negatives.SIGN
    )  # fmt: skip


@dataclass(frozen=True)
class Capabilities:
    """What a backend promises to do bit for bit; asking for more raises UnsupportedError.

    Implements: conformance.capabilities, rounding.native_sr
    """

    formats: frozenset[BlockFormat] = frozenset({MXFP4})
    """Block formats that `quantize` makes and `dequantize` reads."""
    scale_rules: frozenset[ScaleRule] = frozenset(EXPONENT_RULES)
    scale_thresholds: bool = False
    """Whether every threshold is a scale rule too, as `>1.5`."""
    roundings: frozenset[Rounding] = frozenset(Rounding)
    max_sr_bits: int = MAX_SR_BITS
    blocks: frozenset[BlockShape] = frozenset({BlockShape.ROW, BlockShape.TILE})
    hadamard_sizes: frozenset[int] = frozenset(SIZES)
    prescale: bool = True
    arithmetics: frozenset[Arithmetic] = frozenset({Arithmetic.REAL})
    """Orders in which quotients by scales with a mantissa are computed."""
    four_over_six: frozenset[FourOverSix] = frozenset({FourOverSix.OFF})
    """Errors by which a block may choose between two scales."""
    in_dtypes: frozenset[str] = frozenset(INPUT_DTYPES)
    dequantize_dtypes: frozenset[str] = frozenset({"float32", "bfloat16"})
    gemms: frozenset[Gemm] = every_gemm({GemmProfile.ORDERED}, {MXFP4})
    """Profiles of `scaled_gemm`, each with the formats of its two operands."""
    gemm_dtypes: frozenset[str] = frozenset(OUT_DTYPES)
    bounded_class: str = "fp32"
    """Error class of the profile `bounded`."""
    bounded_max_scale: int = 254
    """Largest scale code for which `bounded` is promised."""
    devices: frozenset[str] = frozenset({"cpu"})
    arrays: str = "numpy"
    """Library whose arrays the operations take and give: `numpy` or `torch`."""
    native_sr: bool = False
    """Whether SR comes from the hardware's own random bits: statistical tests only."""
    device_steps: bool = False
    """Whether `Placement.step` is taken: kernels read the step when they run."""

    def profiles(self, a: BlockFormat, b: BlockFormat) -> frozenset[GemmProfile]:
        """Return the GEMM profiles that are declared for operands of these formats."""
        return frozenset(profile for profile, *formats in self.gemms if formats == [a, b])

    def takes_threshold(self, value: Any) -> bool:
        """Return whether a value is a scale rule given as a threshold, and every threshold is declared."""
        return self.scale_thresholds and isinstance(value, ScaleRule) and value.is_threshold

    def require(self, backend: str, capability: str, value: Any) -> None:
        """Raise UnsupportedError, naming the field, unless `value` is declared in it.

        Implements: conformance.unsupported
        """
        declared = getattr(self, capability)
        if value not in declared and not self.takes_threshold(value):
            near = _near(declared, *value) if isinstance(value, tuple) else declared
            names = ", ".join(sorted(map(declared_words, near))) or "nothing"
            raise UnsupportedError(
                f"backend {backend!r} does not declare {declared_words(value)} in {capability} (declared: {names}); "
                "change the recipe or choose another backend"
            )

    def require_prepared(self, backend: str, profile: GemmProfile, b: BlockFormat) -> None:
        """Raise UnsupportedError unless a GEMM of this profile is declared whose operand B has this format."""
        if not any((p, f) == (profile, b) for p, _, f in self.gemms):
            self.require(backend, "gemms", (profile, b, b))

    def require_device_steps(self, backend: str) -> None:
        """Raise UnsupportedError unless a step in the memory of the device is declared."""
        if not self.device_steps:
            raise UnsupportedError(
                f"backend {backend!r} does not declare device_steps, so it takes no placement.step; give the number to "
                "the stream, as in Stream(seed, step=3), or choose another backend"
            )

    def require_prescale(self, backend: str) -> None:
        """Raise UnsupportedError unless the prescale is declared, in quantization and in the GEMM alike."""
        if not self.prescale:
            raise UnsupportedError(f"backend {backend!r} does not declare prescale; choose another backend")


def _near(gemms: frozenset[Gemm], profile: GemmProfile, *formats: BlockFormat) -> frozenset[Any]:
    """Return the declared GEMMs of these formats, or of the profile with one of them, or all declared formats.

    All declared GEMMs would be a hundred pairs.
    """
    same = frozenset(gemm for gemm in gemms if gemm[1:] == formats)
    one = frozenset(gemm for gemm in gemms if gemm[0] == profile and {*gemm[1:]} & {*formats})
    return same or one or frozenset(made for gemm in gemms for made in gemm[1:])


def declared_words(value: Any) -> str:
    """Return a declared value as an error message shows it, as in `ordered of mxfp4 x mxfp4`."""
    return f"{value[0]} of {value[1]} x {value[2]}" if isinstance(value, tuple) else str(value)
