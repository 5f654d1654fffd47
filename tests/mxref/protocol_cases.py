"""A matrix, a backend that declares little, and the clauses of the specification, for tests of the protocol."""

import numpy as np

from clause_index import EXTENSION, load_clauses
from mxref import BlockShape, Capabilities, Rounding, ScaleRule
from mxref.reference import ReferenceBackend

X = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)


class Narrow(ReferenceBackend):
    """The reference under narrower promises."""

    name = "narrow"
    capabilities = Capabilities(
        scale_rules=frozenset({ScaleRule.FLOOR}),
        roundings=frozenset({Rounding.RNE, Rounding.SR}),
        max_sr_bits=16,
        blocks=frozenset({BlockShape.ROW}),
        hadamard_sizes=frozenset({16}),
        prescale=False,
        in_dtypes=frozenset({"float32"}),
        dequantize_dtypes=frozenset({"float32"}),
        gemm_dtypes=frozenset({"float32"}),
    )


narrow = Narrow()

SPEC = load_clauses().read_chapters(EXTENSION.parent.parent).clauses
