"""mxref, the executable specification of microscaled training: plain NumPy, written for clarity before speed.

Read it in the order of the data: `formats`, `steps` (Hadamard transform, scale, rounding, random bits), `plan`,
`quantization`, `gemm`, `linear`. Clauses and golden vectors fix every bit that these give. Make them clearer or
faster at will; a changed bit is a change of the specification, with its clause, its vectors and its tests.
"""

from mxref._version import __version__ as __version__
from mxref.backend import Backend
from mxref.capabilities import Capabilities
from mxref.check import check_quantizer
from mxref.dialects import DIALECTS
from mxref.discovery import get_backend
from mxref.errors import MxrefError, UnsupportedError
from mxref.formats import (
    E2M1,
    E8M0,
    MXFP4,
    MXFP4_E1M2,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    MXINT8,
    NVFP4,
    BlockFormat,
    BlockShape,
    Nonfinite,
    OperandFormat,
)
from mxref.gemm import scaled_gemm
from mxref.linear import linear_gemm
from mxref.mxarray import MXArray, PreparedArray
from mxref.placement import Placement
from mxref.quantization import dequantize, quantize
from mxref.recipe import GemmProfile, OperandSpec, Recipe
from mxref.recipe_files import load_recipe
from mxref.roles import GemmRole
from mxref.steps.four_over_six import FourOverSix
from mxref.steps.hadamard import Rotation, SignPolicy, hadamard, inverse_hadamard
from mxref.steps.quotient import Arithmetic
from mxref.steps.random import Stream
from mxref.steps.rounding import Rounding
from mxref.steps.scale import ScaleRule

__all__ = [
    "DIALECTS",
    "E2M1",
    "E8M0",
    "MXFP4",
    "MXFP4_E1M2",
    "MXFP6_E2M3",
    "MXFP6_E3M2",
    "MXFP8_E4M3",
    "MXFP8_E5M2",
    "MXINT8",
    "NVFP4",
    "Arithmetic",
    "Backend",
    "BlockFormat",
    "BlockShape",
    "Capabilities",
    "FourOverSix",
    "GemmProfile",
    "GemmRole",
    "MXArray",
    "MxrefError",
    "Nonfinite",
    "OperandFormat",
    "OperandSpec",
    "Placement",
    "PreparedArray",
    "Recipe",
    "Rotation",
    "Rounding",
    "ScaleRule",
    "SignPolicy",
    "Stream",
    "UnsupportedError",
    "check_quantizer",
    "dequantize",
    "get_backend",
    "hadamard",
    "inverse_hadamard",
    "linear_gemm",
    "load_recipe",
    "quantize",
    "scaled_gemm",
]
