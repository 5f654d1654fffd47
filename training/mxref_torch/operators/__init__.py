"""The operations of a backend as torch operators, so that `torch.compile` sees no graph break.

Operators take tensors, integers and strings alone: a backend travels by its name in a table, the
treatment of an operand as compact JSON. GEMMs are counted where they run, and not where they are
asked for: a compiled graph that drops or replaces one cannot hide it from the census.
"""

from mxref_torch.operators.blocks import (
    add_product,
    dequantize,
    gained,
    prepare,
    quantize,
    quantize_dual,
    scaled_gemm,
)
from mxref_torch.operators.dense import dense_gemm
from mxref_torch.operators.registry import (
    WHOLE,
    Census,
    LayerCensus,
    Multiplied,
    Quantized,
    Watcher,
    block_format,
    device_step,
    draws_by_layer,
    formats_text,
    gemm_text,
    in_order,
    region_words,
    register_backend,
    register_census,
    spec_text,
    step_place,
    stream_words,
    watchers,
)

__all__ = [
    "WHOLE",
    "Census",
    "LayerCensus",
    "Multiplied",
    "Quantized",
    "Watcher",
    "add_product",
    "block_format",
    "dense_gemm",
    "dequantize",
    "device_step",
    "draws_by_layer",
    "formats_text",
    "gained",
    "gemm_text",
    "in_order",
    "prepare",
    "quantize",
    "quantize_dual",
    "region_words",
    "register_backend",
    "register_census",
    "scaled_gemm",
    "spec_text",
    "step_place",
    "stream_words",
    "watchers",
]
