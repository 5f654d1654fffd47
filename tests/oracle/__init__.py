"""A scalar, exact oracle in integers and fractions, with which the reference is compared.

Written from the text of the OCP MX v1.0 standard and the specification's prose, one number at a time, for
clarity and independence: it shares no code with the package under test and uses no floating-point arithmetic.
Where the package computes a shared scale from bit fields, `oracle.scales` compares exact magnitudes; where the
package uses thresholds, `oracle.elements` compares exact distances on the element grid.

Everything is a Python int (float32 or bfloat16 bit pattern, element code, scale byte, random integer), a list
of them, or a Fraction. The formats of element and scale are arguments; the defaults are E2M1 and E8M0.
"""

from oracle.blocks import dequantize_bf16, dequantize_f32, dequantize_real, quantize_block
from oracle.elements import (
    E2M1,
    E4M3,
    E5M2,
    ELEMENTS,
    GRID,
    INT8,
    Element,
    Rounding,
    element_value,
    round_element,
)
from oracle.floats import (
    INF16,
    INF32,
    NAN16,
    NAN32,
    SIGN16,
    SIGN32,
    f32_add,
    f32_bits_to_bf16_bits,
    f32_mul,
    f32_sub,
    f32_value,
    is_nonfinite,
    round_bf16,
    round_f32,
)
from oracle.fp8 import fp8_cast, fp8_scale, fp8_value
from oracle.gemm import Block, block_dot, gemm_exact, gemm_ordered, undo_factor
from oracle.orders import tensor_scale_in
from oracle.scales import (
    E8M0,
    NAN_BYTE,
    ONE,
    RULES,
    SCALES,
    UE4M3,
    UE5M3,
    Rule,
    Scale,
    nearest_scale,
    scale_value,
    shared_scale,
    tensor_amax,
    tensor_scale,
)

__all__ = [
    "E2M1",
    "E4M3",
    "E5M2",
    "E8M0",
    "ELEMENTS",
    "GRID",
    "INF16",
    "INF32",
    "INT8",
    "NAN16",
    "NAN32",
    "NAN_BYTE",
    "ONE",
    "RULES",
    "SCALES",
    "SIGN16",
    "SIGN32",
    "UE4M3",
    "UE5M3",
    "Block",
    "Element",
    "Rounding",
    "Rule",
    "Scale",
    "block_dot",
    "dequantize_bf16",
    "dequantize_f32",
    "dequantize_real",
    "element_value",
    "f32_add",
    "f32_bits_to_bf16_bits",
    "f32_mul",
    "f32_sub",
    "f32_value",
    "fp8_cast",
    "fp8_scale",
    "fp8_value",
    "gemm_exact",
    "gemm_ordered",
    "is_nonfinite",
    "nearest_scale",
    "quantize_block",
    "round_bf16",
    "round_element",
    "round_f32",
    "scale_value",
    "shared_scale",
    "tensor_amax",
    "tensor_scale",
    "tensor_scale_in",
    "undo_factor",
]
